//! `group delete`.

use clap::Args;
use nstance_client::{Answers, ShardClient, goal::Goal};
use nstance_proto::v1::{DeleteGroupRequest, GroupStatus};
use serde_json::json;

use crate::{
    args::{Context, ShardArgs, limit_requests},
    exit::Exit,
    failure::Failure,
    output::{Shown, Table},
    rehearse::check_etag,
    report,
    wait::wait,
    words::count,
};

#[derive(Debug, Args)]
pub(super) struct DeleteArgs {
    /// Name of the group
    group: String,
    /// Only if the group still has this version
    #[arg(long)]
    etag: Option<String>,
    /// Follow until its last instance is gone
    #[arg(long)]
    wait: bool,
    /// Say what would be done, and do nothing
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: DeleteArgs) -> Result<Exit, Failure> {
    let shards = limit_requests(args.shards.chosen(context).await?, args.wait);
    if args.etag.is_some() && 1 < shards.len() {
        return Err(Failure::usage("--etag is of one shard's group").next("name the shard with --shard"));
    }
    let key = args.group.as_str();
    // Where something is sent, the server looks at it in the same breath.
    let etag = args.etag.as_deref().filter(|_| args.dry_run).unwrap_or_default();
    let found = shards.each(|mut client| async move {
        let group = client.group(key).await?;
        check_etag(key, Some(&group), etag)?;
        Ok(group)
    });
    let found = found.await;
    if found.ok.is_empty() {
        return Ok(report::all_failed(context, &found.errors));
    }
    for (shard, group) in &found.ok {
        context.output.note(&format!("{shard}: {}", consequence(group)));
    }
    if args.dry_run {
        show(context, &found);
        return Ok(report::outcome(context, &found));
    }
    context.confirm(&format!("group {key} will be deleted in {}", count(found.ok.len(), "shard")))?;
    let names: Vec<String> = found.ok.iter().map(|(shard, _)| shard.clone()).collect();
    let there = shards.only(&names)?;
    let (request, groups) = (&args, &found);
    let mut answers = there.each(|client| remove(client, request, groups)).await;
    answers.errors.extend(found.errors);
    // A static group stays, with its own size: nobody waits for its end.
    let leaving: Vec<String> =
        answers.ok.iter().filter(|(_, group)| !group.is_static).map(|(shard, _)| shard.clone()).collect();
    if args.wait && !leaving.is_empty() {
        report::print_errors(context, &answers.errors);
        let there = there.only(&leaving)?;
        let ended = wait(context, &there, Goal::GroupDeleted(args.group.clone()), args.shards.patience()).await?;
        show(context, &answers);
        return Ok(if ended == Exit::Done { Exit::of_shards(answers.ok.len(), &answers.errors) } else { ended });
    }
    show(context, &answers);
    Ok(report::outcome(context, &answers))
}

async fn remove(
    mut client: ShardClient,
    args: &DeleteArgs,
    found: &Answers<GroupStatus>,
) -> Result<GroupStatus, tonic::Status> {
    let expected_etag = args.etag.clone().unwrap_or_default();
    client.service.delete_group(DeleteGroupRequest { key: args.group.clone(), expected_etag }).await?;
    let before = found.ok.iter().find(|(shard, _)| *shard == client.shard);
    Ok(before.map(|(_, group)| group.clone()).unwrap_or_default())
}

fn consequence(group: &GroupStatus) -> String {
    if group.is_static {
        return format!(
            "group {} is static: only what was changed of it goes, the group of the config stays",
            group.key
        );
    }
    let n = group.actual_size.max(group.draining_size);
    format!("group {} is dynamic: it ends, and {} will be drained", group.key, count(n, "instance"))
}

fn show(context: &Context, answers: &Answers<GroupStatus>) {
    let mut table = Table::new(&["GROUP", "SHARD", "STATIC", ">INSTANCES", "EFFECT"]);
    let effect = |group: &GroupStatus| if group.is_static { "overrides dropped" } else { "deleted" };
    for (shard, group) in &answers.ok {
        let is_static = if group.is_static { "yes" } else { "no" };
        let n = group.actual_size.to_string();
        table.row([group.key.as_str(), shard, is_static, &n, effect(group)]);
    }
    let results = answers.ok.iter().map(|(shard, group)| {
        let (is_static, n) = (group.is_static, group.actual_size);
        json!({"group": group.key, "shard": shard, "is_static": is_static, "instances": n, "effect": effect(group)})
    });
    context.output.show(&Shown {
        document: json!({"results": results.collect::<Vec<_>>(), "errors": report::error_documents(&answers.errors)}),
        table,
        names: answers.ok.iter().map(|(shard, group)| format!("{shard}/{}", group.key)).collect(),
    });
}
