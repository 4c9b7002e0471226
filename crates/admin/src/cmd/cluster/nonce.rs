//! `cluster nonce`: a signed statement by which one operator may register, once.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use nstance_core::ids::{ClusterId, OperatorId, Tenant, uuid_v7};
use nstance_core::ports::clock::random;
use nstance_identity::{
    ca::NONCE_KEY_SECRET,
    nonce::{OperatorNonce, new_jti, sign_operator_nonce},
    vault::read_nonce_key,
};
use serde_json::json;

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    identity_files::{make_dir, place},
    output::{self, Shown, Table},
    storage::StoreArgs,
};

#[derive(Debug, Args)]
pub struct NonceArgs {
    /// The cluster it is for; a server of another refuses it
    #[arg(long, value_name = "ID")]
    cluster_id: ClusterId,
    /// The tenant of the operator
    #[arg(long, default_value = "default")]
    tenant: Tenant,
    /// How long it may be used: 1m to 7d
    #[arg(long, value_name = "DURATION", default_value = "3h", value_parser = expiry)]
    expiry: Duration,
    /// Where it is written; `-` prints it [default: cli-operator-identity/nonce.jwt below --temp-dir]
    #[arg(long, value_name = "PATH")]
    output: Option<PathBuf>,
    #[command(flatten)]
    store: StoreArgs,
}

const SHORTEST: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(7 * 86_400);

fn expiry(text: &str) -> Result<Duration, String> {
    let expiry = crate::args::duration(text)?;
    if expiry < SHORTEST || LONGEST < expiry {
        return Err("a nonce lives between 1m and 7d".to_owned());
    }
    Ok(expiry)
}

pub(super) async fn run(context: &Context, args: NonceArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let secrets = args.store.secrets(cluster.store.clone(), Vec::new())?;
    let key = read_nonce_key(secrets.as_ref()).await;
    let key = key.map_err(|error| Failure::failed("read the nonce key").because(error))?.ok_or_else(|| {
        let what = format!("secret {NONCE_KEY_SECRET} is not in {}", cluster.store.describe());
        Failure::new(Exit::NotFound, what)
            .next("start a nstance-server of this cluster: its first start makes the CA and the nonce key")
    })?;
    // Without a readable config nothing can be compared, and the server will judge.
    if let Ok(there) = cluster.id().await
        && there != args.cluster_id
    {
        let what = format!("--cluster-id {}: this bucket is of cluster {there}", args.cluster_id);
        return Err(Failure::usage(what).next("the id of the cluster, or its own --storage-bucket"));
    }
    let (now, entropy) = (cluster.clock.now(), cluster.entropy.as_ref());
    let nonce = OperatorNonce {
        operator: OperatorId::new(uuid_v7(now, random(entropy))),
        jti: new_jti(entropy),
        issued_at: now,
        expires_at: now.plus(args.expiry),
        cluster: args.cluster_id,
        tenant: args.tenant,
    };
    let token = sign_operator_nonce(&key, &nonce);
    if args.output.as_ref().is_some_and(|path| path.as_os_str() == "-") {
        output::print(&format!("{token}\n"));
        return Ok(Exit::Done);
    }
    let path = args.output.unwrap_or_else(|| context.identity_dir().join("nonce.jwt"));
    let (dir, name) = match (path.parent(), path.file_name().and_then(|it| it.to_str())) {
        (Some(dir), Some(name)) if dir.as_os_str().is_empty() => (PathBuf::from("."), name),
        (Some(dir), Some(name)) => (dir.to_owned(), name),
        _ => return Err(Failure::usage(format!("--output {}: it names no file", path.display()))),
    };
    let written = make_dir(&dir).and_then(|()| place(&dir, name, token.as_bytes()));
    written.map_err(|error| Failure::failed(format!("write the nonce to {}", path.display())).because(error))?;
    let mut table = Table::new(&["OPERATOR", "TENANT", "EXPIRES", "FILE", "+JTI"]);
    let (operator, tenant, expires) =
        (nonce.operator.to_string(), nonce.tenant.to_string(), nonce.expires_at.to_string());
    table.row([operator.clone(), tenant.clone(), expires.clone(), path.display().to_string(), nonce.jti.clone()]);
    context.output.show(&Shown {
        document: json!({
            "operator_id": operator,
            "tenant": tenant,
            "cluster_id": nonce.cluster.to_string(),
            "jti": nonce.jti,
            "expires_at": expires,
            "path": path.display().to_string(),
        }),
        table,
        names: vec![path.display().to_string()],
    });
    context.output.note("It can be used once: hand it to the operator, who registers with it at any shard.");
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonce_lives_between_a_minute_and_a_week() {
        for good in ["1m", "3h", "7d"] {
            assert!(expiry(good).is_ok(), "{good}");
        }
        for bad in ["59s", "8d", "0s", "soon"] {
            assert!(expiry(bad).is_err(), "{bad}");
        }
    }
}
