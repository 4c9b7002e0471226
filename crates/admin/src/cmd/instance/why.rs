//! `instance why`: one answer in plain words, and what it rests on.

mod words_of;

use clap::Args;
use nstance_core::time::Timestamp;
use nstance_proto::v1::{Event, InstanceStatusResponse};
use serde_json::{Value, json};

use self::words_of::answer;
use super::show::{Seen, look, timeline_lines};
use crate::{
    args::{Context, ShardArgs},
    exit::Exit,
    failure::Failure,
    output::{Format, print},
    report, view, words,
};

#[derive(Debug, Args)]
pub(super) struct WhyArgs {
    /// Id of the instance
    id: String,
    #[command(flatten)]
    shards: ShardArgs,
}

pub(super) async fn run(context: &Context, args: WhyArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let (shard, seen) = match look(&shards, &args.id).await {
        Ok(found) => found,
        Err(errors) => return Ok(report::all_failed(context, &errors)),
    };
    match context.output.format {
        Format::Json | Format::Yaml => context.output.document(&document(&shard, &seen, words::now())),
        Format::Name => print(&format!("{}\n", seen.instance.instance_id)),
        Format::Table | Format::Wide => print(&page(&shard, &seen, words::now())),
    }
    Ok(Exit::Done)
}

fn document(shard: &str, seen: &Seen, now: Timestamp) -> Value {
    let answer = answer(&seen.instance, &seen.explained, now);
    let timeline = timeline(&seen.instance, &seen.explained.history);
    json!({
        "instance_id": seen.instance.instance_id,
        "shard": shard,
        "group": seen.instance.group,
        "status": seen.instance.status,
        "health": seen.instance.health,
        "summary": answer.summary,
        "because": answer.because,
        "next": answer.next,
        "facts": seen.explained.facts.iter().map(view::fact).collect::<Vec<_>>(),
        "actions": seen.explained.actions.iter().map(view::action).collect::<Vec<_>>(),
        "holds": seen.explained.holds.iter().map(view::hold).collect::<Vec<_>>(),
        "timeline": timeline.iter().map(|it| json!({"at": it.at.to_string(), "what": it.what})).collect::<Vec<_>>(),
        "logs": seen.instance.boot.iter().flat_map(|boot| &boot.logs)
            .map(|it| json!({"name": it.name, "text": it.text})).collect::<Vec<_>>(),
    })
}

/// Lines of a log that an answer shows.
const LOG_LINES: usize = 10;

fn page(shard: &str, seen: &Seen, now: Timestamp) -> String {
    let answer = answer(&seen.instance, &seen.explained, now);
    let mut lines = vec![format!("{} in {shard}: {}", seen.instance.instance_id, answer.summary)];
    lines.extend(answer.because.iter().map(|it| format!("  {it}")));
    let moments = timeline_lines(seen);
    if 1 < moments.len() {
        lines.push(String::new());
        lines.extend(moments);
    }
    for log in seen.instance.boot.iter().filter(|boot| boot.failed).flat_map(|boot| &boot.logs) {
        lines.push(format!("\n  last lines of {}:", log.name));
        let all: Vec<&str> = log.text.lines().collect();
        lines.extend(all[all.len().saturating_sub(LOG_LINES)..].iter().map(|it| format!("    {it}")));
    }
    lines.extend(answer.next.iter().map(|it| format!("\nnext: {it}")));
    lines.join("\n") + "\n"
}

/// A moment of an instance's life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moment {
    pub(super) at: Timestamp,
    pub(super) what: String,
}

/// Its life in order: what its record says, what its machine said, what was told of it.
pub(super) fn timeline(it: &InstanceStatusResponse, history: &[Event]) -> Vec<Moment> {
    let mut moments = Vec::new();
    let mut push = |at: Option<&prost_types::Timestamp>, what: String| {
        moments.extend(view::time(at).map(|at| Moment { at, what }));
    };
    // Events are forgotten with a leader, records are not.
    let told = |reason: &str| history.iter().any(|event| event.reason == reason);
    if !told("InstanceCreateRequested") {
        push(it.created_at.as_ref(), "asked for".to_owned());
    }
    if !told("InstanceRegistered") {
        push(it.registered_at.as_ref(), "its agent registered".to_owned());
    }
    if let Some(drain) = it.drain.as_ref().filter(|_| !told("DrainStarted")) {
        push(drain.started_at.as_ref(), format!("drain began: {}", drain.reason));
    }
    if !told("InstanceDeleted") {
        push(it.deleted_at.as_ref(), "gone".to_owned());
    }
    for stage in it.boot.iter().flat_map(|boot| &boot.stages) {
        let detail = if stage.detail.is_empty() { String::new() } else { format!(": {}", stage.detail) };
        let at = stage.ended.as_ref().or(stage.started.as_ref());
        push(at, format!("boot stage {} {}{detail}", stage.name, stage.state));
    }
    for event in history {
        let message = if event.message.is_empty() { String::new() } else { format!(": {}", event.message) };
        push(event.at.as_ref(), format!("{}{message}", event.reason));
    }
    // Of the same moment in the order in which they were told.
    moments.sort_by_key(|it| it.at);
    moments
}
