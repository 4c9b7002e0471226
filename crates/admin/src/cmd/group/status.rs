//! `group status`: one group in every shard that has it.

use clap::Args;
use nstance_client::{
    ShardClient, ShardError, Shards,
    goal::{Goal, GoalUpdate, follow},
};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{
    Event, ExplainRequest, GroupStatus, InstanceStatusResponse, ListInstancesRequest, explain_request,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tonic::Code;

use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Format, Table, print},
    report, view,
    words::{self, count},
};

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    /// Name of the group
    group: String,
    /// Show it again whenever it changes
    #[arg(long)]
    watch: bool,
    #[command(flatten)]
    shards: ShardArgs,
}

struct Seen {
    group: GroupStatus,
    instances: Vec<InstanceStatusResponse>,
    /// The last things that went wrong.
    troubles: Vec<Event>,
}

/// Events of a group that its status shows.
const TROUBLES: usize = 5;

pub(super) async fn run(context: &Context, args: StatusArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    if args.watch {
        return watch(context, &shards, &args.group).await;
    }
    let group = args.group.as_str();
    let mut answers = shards.each(|client| look(client, group)).await;
    // A group need not be in every shard. If it is nowhere, that is said once.
    if !answers.ok.is_empty() {
        answers.errors.retain(|it| it.code != Code::NotFound);
    } else if answers.errors.iter().all(|it| it.code == Code::NotFound) {
        let asked = answers.errors.iter().map(|it| it.shard.as_str()).collect::<Vec<_>>().join(", ");
        let absent = ShardError::new(&asked, Code::NotFound, format!("there is no group {group}"));
        return Ok(report::all_failed(context, &[absent]));
    }
    let document = json!({
        "groups": answers.ok.iter().map(|(shard, seen)| document(shard, seen)).collect::<Vec<_>>(),
        "errors": report::error_documents(&answers.errors),
    });
    let now = words::now();
    let pages: Vec<String> = answers.ok.iter().map(|(shard, seen)| page(shard, seen, now)).collect();
    match context.output.format {
        Format::Table | Format::Wide => print(&pages.join("\n")),
        Format::Name => {
            print(&answers.ok.iter().map(|(shard, seen)| format!("{shard}/{}\n", seen.group.key)).collect::<String>());
        }
        Format::Json | Format::Yaml => context.output.document(&document),
    }
    Ok(report::outcome(context, &answers))
}

async fn look(mut client: ShardClient, key: &str) -> Result<Seen, tonic::Status> {
    let group = client.group(key).await?;
    let request = ListInstancesRequest { group: key.to_owned(), ..ListInstancesRequest::default() };
    let instances = client.instances(request).await?;
    let target = Some(explain_request::Target::Group(key.to_owned()));
    let history = client.service.explain(ExplainRequest { target }).await?.into_inner().history;
    let troubles = history.into_iter().filter(|it| nstance_proto::v1::Severity::Warning <= it.severity());
    let troubles: Vec<Event> = troubles.collect();
    let skipped = troubles.len().saturating_sub(TROUBLES);
    Ok(Seen { group, instances, troubles: troubles.into_iter().skip(skipped).collect() })
}

fn document(shard: &str, seen: &Seen) -> Value {
    let mut value = view::group(shard, &seen.group);
    value["instances"] = seen.instances.iter().map(|it| view::instance(shard, it)).collect();
    value["last_errors"] = seen.troubles.iter().map(|it| view::event(shard, it)).collect();
    value
}

fn page(shard: &str, seen: &Seen, now: Timestamp) -> String {
    let group = &seen.group;
    let mut lines = vec![format!("{} in {shard}: {}", group.key, standing(group))];
    let origin = if group.is_static { "the config" } else { "the API" };
    lines.push(format!("  template {}, made by {origin}, version {}", group.template, text(&group.etag)));
    if let Some(rollout) = &group.rollout {
        let paused = if rollout.paused { ", paused" } else { "" };
        let failed = if 0 < rollout.failures {
            format!(", {} in a row", count(rollout.failures, "failure"))
        } else {
            String::new()
        };
        lines.push(format!("  rollout: {} of {} up to date{paused}{failed}", rollout.updated, rollout.total));
    }
    for hold in &group.holds {
        let until = words::left(hold.until.as_ref(), now);
        let until = if until.is_empty() { String::new() } else { format!("; until then {until}") };
        lines.push(format!("  held back by {}: {}{until}", hold.kind, hold.message));
    }
    for event in &seen.troubles {
        lines.push(format!("  {} ago {}: {}", words::age(event.at.as_ref(), now), event.reason, event.message));
    }
    let mut table = Table::new(&["  INSTANCE", "STATE", "HEALTH", "TYPE", ">AGE"]);
    for it in &seen.instances {
        let id = format!("  {}", it.instance_id);
        let age = words::age(it.created_at.as_ref(), now);
        table.row([id, it.status.clone(), it.health.clone(), it.instance_type.clone(), age]);
    }
    if !table.is_empty() {
        lines.extend(table.lines(false));
    }
    lines.join("\n") + "\n"
}

fn text(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

/// One sentence of numbers.
fn standing(group: &GroupStatus) -> String {
    if group.deleting {
        return format!("being deleted, {} on the way out", count(group.draining_size, "instance"));
    }
    let mut parts = vec![format!("{} of {} ready", group.ready_size, group.size)];
    for (n, word) in
        [(group.pending_size, "starting"), (group.draining_size, "leaving"), (group.unhealthy_size, "unhealthy")]
    {
        if 0 < n {
            parts.push(format!("{n} {word}"));
        }
    }
    parts.join(", ")
}

/// One line, or one document, per change; until somebody stops it.
async fn watch(context: &Context, shards: &Shards, group: &str) -> Result<Exit, Failure> {
    let goal = Goal::GroupReady(group.to_owned());
    let (sender, mut updates) = mpsc::channel(64);
    let mut following =
        Box::pin(futures::future::join_all(shards.connections().iter().map(|it| follow(it, &goal, sender.clone()))));
    let mut stop = nstance_rt::shutdown::StopSignals::listen()
        .map_err(|error| Failure::failed("listen for signals").because(error))?;
    loop {
        let update = tokio::select! {
            biased;
            _ = stop.next() => return Ok(Exit::Interrupted),
            Some(update) = updates.recv() => update,
            _ = &mut following => return Ok(Exit::Failed),
        };
        match update {
            GoalUpdate::Problem { shard, message } => context.output.note(&format!("error: {shard}: {message}")),
            GoalUpdate::State { shard, state } => match state.group {
                Some(it) => context.output.item(&view::group(&shard, &it), || {
                    format!("{}  {}  {shard}  {}", words::now(), it.key, standing(&it))
                }),
                None => {
                    let document = json!({"group": group, "shard": shard, "absent": true});
                    context.output.item(&document, || format!("{}  {group}  {shard}  absent", words::now()));
                }
            },
        }
    }
}
