//! `cluster info`: what the bucket says, whoever runs or does not run.

use clap::Args;
use nstance_core::{ids::Shard, time::Timestamp};
use nstance_identity::ca::Bundle;
use nstance_store::records::leader::LeaseRecord;
use serde_json::{Value, json};

use crate::{
    args::Context,
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    storage::{Cluster, ShardConfig, StoreArgs},
};

#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    store: StoreArgs,
}

pub(super) async fn run(context: &Context, args: InfoArgs) -> Result<Exit, Failure> {
    let cluster = args.store.open()?;
    let bundle = cluster.bundle().await?;
    // A bucket whose configs are broken is still shown: that is when somebody looks.
    let id = cluster.id().await.map_or_else(|failure| format!("unknown ({failure})"), |id| id.to_string());
    let failed = |error| Failure::failed(format!("read {}", cluster.store.describe())).because(error);
    let mut shards = Vec::new();
    for shard in cluster.shards().await.map_err(failed)? {
        let config = cluster.config(&shard).await.map_err(failed)?;
        let lease = cluster.lease(Some(&shard)).await?.map(|(lease, _)| lease);
        shards.push((shard, config, lease));
    }
    let operators = cluster.operators().await.map_err(failed)?;
    let n_revoked = operators.iter().flatten().filter(|it| it.value.revoked.is_some()).count();
    let shown = Info { id, bundle: &bundle, shards, n_operators: operators.len(), n_revoked, now: cluster.clock.now() };
    context.output.show(&shown.shown(&cluster));
    Ok(Exit::Done)
}

struct Info<'a> {
    id: String,
    bundle: &'a Bundle,
    shards: Vec<(Shard, Option<ShardConfig>, Option<LeaseRecord>)>,
    n_operators: usize,
    n_revoked: usize,
    now: Timestamp,
}

impl Info<'_> {
    fn shown(&self, cluster: &Cluster) -> Shown {
        let mut table = Table::new(&["SHARD", "LEADER", ">EPOCH", "RENEWED", "CONFIG", "+ADDRESS", "+ETAG"]);
        for (shard, config, lease) in &self.shards {
            table.row([
                shard.to_string(),
                lease.as_ref().map(leader).unwrap_or_default(),
                lease.as_ref().map(|it| it.epoch.to_string()).unwrap_or_default(),
                lease.as_ref().map(|it| it.renewed_at.to_string()).unwrap_or_default(),
                config_word(config.as_ref()).to_owned(),
                lease.as_ref().map(|it| it.addr.clone()).unwrap_or_default(),
                config.as_ref().map(|it| it.etag.to_string()).unwrap_or_default(),
            ]);
        }
        table.note(format!("cluster {}, in {}", self.id, cluster.store.describe()));
        for (number, ca) in self.bundle.certificates().iter().enumerate() {
            let role = if number == 0 { "issues" } else { "is trusted" };
            let end = if ca.not_after <= self.now { "expired" } else { "until" };
            table.note(format!("CA {} {role}, {end} {} ({})", ca.fingerprint, ca.not_after, ca.subject_text()));
        }
        table.note(format!("{} operators, {} of them revoked", self.n_operators, self.n_revoked));
        Shown {
            document: self.document(cluster),
            table,
            names: self.shards.iter().map(|it| it.0.to_string()).collect(),
        }
    }

    fn document(&self, cluster: &Cluster) -> Value {
        let cas = self.bundle.certificates().iter().enumerate().map(|(number, ca)| {
            json!({
                "fingerprint": ca.fingerprint,
                "subject": ca.subject_text(),
                "issues": number == 0,
                "made_at": ca.made_at().to_string(),
                "not_after": ca.not_after.to_string(),
            })
        });
        let shards = self.shards.iter().map(|(shard, config, lease)| {
            json!({
                "shard": shard.to_string(),
                "leader": lease.as_ref().map(leader).filter(|it| it != RELEASED),
                "epoch": lease.as_ref().map(|it| it.epoch.0),
                "renewed_at": lease.as_ref().map(|it| it.renewed_at.to_string()),
                "address": lease.as_ref().map(|it| it.addr.clone()),
                "config": config_word(config.as_ref()),
                "config_etag": config.as_ref().map(|it| it.etag.to_string()),
            })
        });
        json!({
            "cluster_id": self.id,
            "store": cluster.store.describe(),
            "cas": cas.collect::<Vec<_>>(),
            "shards": shards.collect::<Vec<_>>(),
            "operators": {"total": self.n_operators, "revoked": self.n_revoked},
        })
    }
}

/// A lease that was given back has nobody behind it.
const RELEASED: &str = "(released)";

fn leader(lease: &LeaseRecord) -> String {
    if lease.released { RELEASED.to_owned() } else { lease.holder.clone() }
}

fn config_word(config: Option<&ShardConfig>) -> &'static str {
    match config.map(|it| it.config.is_ok()) {
        None => "missing",
        Some(true) => "valid",
        Some(false) => "invalid",
    }
}
