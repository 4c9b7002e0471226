//! `shards`: who answers, who leads.

use std::time::Instant;

use clap::Args;
use nstance_client::{Answers, ShardClient};
use nstance_proto::v1::{ConfigStatusResponse, ListInstancesRequest};
use serde_json::{Value, json};
use tonic::Status;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    view,
};

#[derive(Debug, Args)]
pub struct ShardsArgs {
    #[command(flatten)]
    shards: ShardArgs,
}

/// What one shard is.
pub struct Seen {
    pub config: ConfigStatusResponse,
    pub n_groups: usize,
    pub n_instances: usize,
    pub latency_ms: f64,
}

pub async fn run(context: &Context, args: ShardsArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let answers = shards.each(look).await;
    context.output.show(&shown(&answers));
    Ok(Exit::of_shards(answers.ok.len(), &answers.errors))
}

/// Which config a shard has, with the time in milliseconds that its leader took for the answer.
pub async fn timed(client: &mut ShardClient) -> Result<(ConfigStatusResponse, f64), Status> {
    #[expect(clippy::disallowed_methods, reason = "a time that is shown, and nothing is decided by it")]
    let asked = Instant::now();
    let config = client.config_status().await?;
    Ok((config, asked.elapsed().as_secs_f64() * 1000.0))
}

async fn look(mut client: ShardClient) -> Result<Seen, Status> {
    let (config, latency_ms) = timed(&mut client).await?;
    let n_groups = client.groups().await?.len();
    let n_instances = client.instances(ListInstancesRequest::default()).await?.len();
    Ok(Seen { config, n_groups, n_instances, latency_ms })
}

/// A shard as the HTTP API shows it too.
pub fn document(shard: &str, seen: &Seen) -> Value {
    let mut value = view::config_status(shard, &seen.config);
    value["reachable"] = true.into();
    value["groups"] = seen.n_groups.into();
    value["instances"] = seen.n_instances.into();
    value["latency_ms"] = json!((seen.latency_ms * 1000.0).round() / 1000.0);
    value
}

fn shown(answers: &Answers<Seen>) -> Shown {
    let mut table = Table::new(&[
        "SHARD",
        "REACHABLE",
        "LEADER",
        ">EPOCH",
        "CONFIG",
        ">GROUPS",
        ">INSTANCES",
        ">LATENCY",
        "+PROVIDER",
        "+VERSION",
        "+PROBLEM",
    ]);
    for (shard, seen) in &answers.ok {
        let (config, problem) = (&seen.config, seen.config.apply_errors.join("; "));
        table.row([
            shard.clone(),
            "yes".into(),
            config.leader_id.clone(),
            config.epoch.to_string(),
            config.etag.chars().take(12).collect(),
            seen.n_groups.to_string(),
            seen.n_instances.to_string(),
            format!("{:.1}ms", seen.latency_ms),
            config.provider.clone(),
            config.server_version.clone(),
            problem,
        ]);
    }
    for error in &answers.errors {
        let none = String::new;
        table.row([
            error.shard.clone(),
            "no".into(),
            none(),
            none(),
            none(),
            none(),
            none(),
            none(),
            none(),
            none(),
            error.message.clone(),
        ]);
        table.note(format!("{error}"));
    }
    let reached = answers.ok.iter().map(|(shard, seen)| document(shard, seen));
    let lost = answers.errors.iter().map(|it| json!({"shard": it.shard, "reachable": false, "problem": it.message}));
    Shown {
        document: json!({
            "shards": reached.chain(lost).collect::<Vec<_>>(),
            "errors": answers.errors.iter().map(view::error).collect::<Vec<_>>(),
        }),
        table,
        names: answers.ok.iter().map(|(shard, _)| shard.clone()).collect(),
    }
}
