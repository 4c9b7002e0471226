//! `drains`: who is on the way out, and a hook that acknowledges drains where there is no Kubernetes.

mod hook;

use clap::{Args, Subcommand};
use nstance_proto::v1::InstanceStatusResponse;
use serde_json::{Value, json};

use crate::{
    args::{Context, ShardArgs},
    drains::{self, Blocker, Drain},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view, words,
};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DrainsArgs {
    #[command(subcommand)]
    command: Option<DrainsCommand>,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Subcommand)]
enum DrainsCommand {
    /// Run a program for every drain, and acknowledge the drain if it succeeds
    Watch(hook::WatchArgs),
}

pub async fn run(context: &Context, args: DrainsArgs) -> Result<Exit, Failure> {
    match args.command {
        Some(DrainsCommand::Watch(args)) => hook::run(context, args).await,
        None => list(context, &args.shards).await,
    }
}

/// A drain, as programs are told of it.
fn document(shard: &str, it: &InstanceStatusResponse) -> Value {
    let mut value = it.drain.as_ref().map(view::drain).unwrap_or_else(|| json!({}));
    value["instance_id"] = it.instance_id.clone().into();
    value["group"] = it.group.clone().into();
    value["shard"] = shard.into();
    value["provider_instance_id"] = it.provider_instance_id.clone().into();
    value["private_ipv4"] = it.private_ipv4.clone().into();
    value["private_ipv6"] = it.private_ipv6.clone().into();
    value["hostname"] = it.hostname.clone().into();
    value
}

/// The same in a list, where it is known what it waits for.
fn listed(shard: &str, it: &Drain) -> Value {
    let mut value = document(shard, &it.instance);
    value["status"] = it.instance.status.clone().into();
    value["blocked_by"] = it.blocked_by.iter().map(Blocker::document).collect();
    value
}

async fn list(context: &Context, args: &ShardArgs) -> Result<Exit, Failure> {
    let shards = args.shards(context).await?;
    let answers = shards.each(|mut client| async move { drains::of_shard(&mut client).await }).await;
    let all = answers.ok.iter().flat_map(|(shard, drains)| drains.iter().map(move |it| (shard.as_str(), it)));
    let drains: Vec<(&str, &Drain)> = all.collect();
    let now = words::now();
    let mut table = Table::new(&[
        "INSTANCE",
        "GROUP",
        "SHARD",
        "REASON",
        ">SINCE",
        ">LEFT",
        "ACKNOWLEDGED",
        "+DRAIN ID",
        "+STATE",
        "+BLOCKED BY",
    ]);
    for (shard, Drain { instance: it, blocked_by }) in &drains {
        let drain = it.drain.clone().unwrap_or_default();
        let blockers: Vec<&str> = blocked_by.iter().map(|it| it.message.as_str()).collect();
        table.row([
            it.instance_id.clone(),
            it.group.clone(),
            (*shard).to_owned(),
            drain.reason.clone(),
            words::age(drain.started_at.as_ref(), now),
            words::left(drain.delete_at.as_ref(), now),
            if drain.acked_at.is_some() { "yes" } else { "no" }.to_owned(),
            drain.drain_id.clone(),
            it.status.clone(),
            blockers.join("; "),
        ]);
    }
    context.output.show(&Shown {
        document: json!({
            "drains": drains.iter().map(|(shard, it)| listed(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        }),
        table,
        names: drains.iter().map(|(_, it)| it.instance.instance_id.clone()).collect(),
    });
    Ok(report::outcome(context, &answers))
}
