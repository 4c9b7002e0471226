//! `cluster register-operator`: an operator's identity, made by whoever has the CA's key.

use std::{fs, path::PathBuf, time::Duration};

use clap::Args;
use nstance_core::{
    ids::{OperatorId, Tenant, uuid_v7},
    ports::clock::random,
};
use nstance_identity::keys::{KeyPair, PublicKey};
use serde_json::json;

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    identity_files,
    issue::{IssueError, NewOperator, issue_operator},
    output::{Shown, Table},
    storage::{Cluster, StoreArgs},
};

#[derive(Debug, Args)]
pub struct RegisterArgs {
    /// The tenant of the operator
    #[arg(long, default_value = "default")]
    tenant: Tenant,
    /// Its id [default: a new one]
    #[arg(long, value_name = "ID")]
    operator_id: Option<OperatorId>,
    /// Certify this Ed25519 public key (PEM), whose private half stays where it is
    #[arg(long, value_name = "FILE")]
    public_key_file: Option<PathBuf>,
    /// Where ca.crt, identity.key and identity.crt are written [default: cli-operator-identity below --temp-dir]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,
    /// Life of the certificate in hours
    #[arg(long, value_name = "HOURS", default_value_t = 720, value_parser = clap::value_parser!(u32).range(1..=87_600))]
    cert_ttl_hours: u32,
    #[command(flatten)]
    store: StoreArgs,
}

/// Whose key is certified.
enum Key {
    Ours(KeyPair),
    Theirs(PublicKey),
}

impl Key {
    fn public(&self) -> PublicKey {
        match self {
            Self::Ours(pair) => pair.public_key(),
            Self::Theirs(public) => *public,
        }
    }

    fn pair(&self) -> Option<&KeyPair> {
        match self {
            Self::Ours(pair) => Some(pair),
            Self::Theirs(_) => None,
        }
    }
}

pub(super) async fn run(context: &Context, args: RegisterArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let secrets = args.store.secrets(cluster.store.clone(), Vec::new())?;
    let key = match &args.public_key_file {
        Some(path) => Key::Theirs(read_public(path)?),
        None => Key::Ours(KeyPair::generate(cluster.entropy.as_ref())),
    };
    let ca = cluster.ca(secrets.as_ref()).await?;
    let now = cluster.clock.now();
    let new = NewOperator {
        operator: args.operator_id.unwrap_or_else(|| OperatorId::new(uuid_v7(now, random(cluster.entropy.as_ref())))),
        tenant: args.tenant,
        cluster: cluster.id().await?,
        key: key.public(),
        ttl: Duration::from_secs(3600 * u64::from(args.cert_ttl_hours)),
    };
    let dir = args.output_dir.unwrap_or_else(|| context.identity_dir());
    let what = || format!("write the operator identity to {}", dir.display());
    // Before anything is recorded: an operator whose files cannot be written would be of no use.
    identity_files::make_dir(&dir).map_err(|error| Failure::failed(what()).because(error))?;
    let issued = issue_operator(&ca, &cluster.records(), &new, now, cluster.entropy.as_ref()).await;
    let issued = issued.map_err(|error| {
        let next = match &error {
            IssueError::Exists { .. } => "leave --operator-id out; or nstance-admin operator list",
            _ => "nstance-admin check --only store",
        };
        Failure::failed(format!("register operator {}", new.operator)).because(error).next(next)
    })?;
    identity_files::write(&dir, ca.bundle_pem(), key.pair(), &issued.chain_pem)
        .map_err(|error| Failure::failed(what()).because(error))?;
    let mut table = Table::new(&["OPERATOR", "TENANT", "EXPIRES", "DIRECTORY", "+SERIAL"]);
    let (id, expires, shown) = (new.operator.to_string(), issued.not_after.to_string(), dir.display().to_string());
    table.row([id.clone(), new.tenant.to_string(), expires.clone(), shown.clone(), issued.serial.clone()]);
    context.output.show(&Shown {
        document: json!({
            "operator_id": id,
            "tenant": new.tenant.to_string(),
            "cluster_id": new.cluster.to_string(),
            "serial": issued.serial,
            "expires_at": expires,
            "dir": shown,
        }),
        table,
        names: vec![id],
    });
    note_tenant(context, &cluster, &new.tenant).await;
    context.output.note("next: nstance-admin check");
    Ok(Exit::Done)
}

/// A tenant that no config has yet is no mistake: but until one has it, no server lets the operator in.
async fn note_tenant(context: &Context, cluster: &Cluster, tenant: &Tenant) {
    let Ok(configs) = cluster.configs().await else { return };
    let mut valid = configs.valid().peekable();
    if valid.peek().is_some() && !valid.any(|config| config.tenants.contains(tenant)) {
        context
            .output
            .note(&format!("note: no config has tenant {tenant} yet, so servers refuse this operator until one has"));
    }
}

fn read_public(path: &PathBuf) -> Result<PublicKey, Failure> {
    let what = || Failure::failed(format!("read the public key {}", path.display()));
    let text = fs::read(path).map_err(|error| what().because(error))?;
    PublicKey::from_pem(&text).map_err(|error| {
        what().because(error).next("an Ed25519 public key in PEM: openssl pkey -in identity.key -pubout")
    })
}
