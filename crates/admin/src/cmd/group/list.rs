//! `group list`, and the table that other commands show groups with.

use clap::Args;
use nstance_client::{Answers, ShardError};
use nstance_proto::v1::GroupStatus;
use serde_json::json;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    report, view,
};

#[derive(Debug, Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: ListArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let answers = shards.each(|mut client| async move { client.groups().await }).await;
    let groups: Vec<(&str, &GroupStatus)> =
        answers.ok.iter().flat_map(|(shard, groups)| groups.iter().map(move |it| (shard.as_str(), it))).collect();
    context.output.show(&shown(&groups, &answers.errors));
    Ok(report::outcome(context, &answers))
}

/// Groups that shards answered with one by one.
pub(super) fn show(context: &Context, answers: &Answers<GroupStatus>) {
    if answers.ok.is_empty() && context.output.is_for_people() {
        return; // what went wrong is told elsewhere, and a table of nothing tells nothing
    }
    let groups: Vec<_> = answers.ok.iter().map(|(shard, group)| (shard.as_str(), group)).collect();
    context.output.show(&shown(&groups, &answers.errors));
}

fn shown(groups: &[(&str, &GroupStatus)], errors: &[ShardError]) -> Shown {
    let mut table = Table::new(&[
        "GROUP",
        "SHARD",
        "TEMPLATE",
        ">SIZE",
        ">ACTUAL",
        ">READY",
        ">DRAINING",
        "STATIC",
        "HOLDS",
        "+TYPE",
        "+SUBNET POOL",
        "+UPDATED",
        "+ETAG",
    ]);
    let mut sorted = groups.to_vec();
    sorted.sort_by_key(|(shard, group)| (group.key.clone(), (*shard).to_owned()));
    for (shard, group) in &sorted {
        let mut holds: Vec<&str> = group.holds.iter().map(|it| it.kind.as_str()).collect();
        if group.deleting {
            holds.insert(0, "deleting");
        }
        holds.dedup();
        table.row([
            group.key.clone(),
            (*shard).to_owned(),
            group.template.clone(),
            group.size.to_string(),
            group.actual_size.to_string(),
            group.ready_size.to_string(),
            group.draining_size.to_string(),
            if group.is_static { "yes" } else { "no" }.to_owned(),
            holds.join(","),
            group.instance_type.clone(),
            group.subnet_pool.clone(),
            format!("{}/{}", group.updated_size, group.size),
            group.etag.clone(),
        ]);
    }
    Shown {
        document: json!({
            "groups": sorted.iter().map(|(shard, group)| view::group(shard, group)).collect::<Vec<_>>(),
            "errors": report::error_documents(errors),
        }),
        table,
        names: sorted.iter().map(|(shard, group)| format!("{shard}/{}", group.key)).collect(),
    }
}
