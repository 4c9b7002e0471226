//! `events`: what happened, and what happens.
//!
//! Events come from `nstance_client::events`; here they are filtered and shown.

use std::time::Duration;

use clap::{Args, ValueEnum};
use nstance_client::{
    Answers, ShardError, Shards,
    events::{EventUpdate, EventUpdateKind, StartAt, follow, past},
};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{Event, Severity, WatchEventsRequest};
use nstance_rt::shutdown::StopSignals;
use serde_json::json;
use tokio::sync::mpsc;

use crate::{
    args::{Context, ShardArgs, duration},
    exit::Exit,
    failure::Failure,
    output::{Format, Shown, Table},
    report, view, words,
};

#[derive(Debug, Args)]
pub struct EventsArgs {
    /// Go on with what happens from now on
    #[arg(long, short = 'f')]
    follow: bool,
    /// What happened in this time [default: all that the leaders remember; with --follow nothing]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    since: Option<Duration>,
    /// Only of this group
    #[arg(long)]
    group: Option<String>,
    /// Only of this instance
    #[arg(long)]
    instance: Option<String>,
    /// Only this severe, or more
    #[arg(long, value_enum, default_value_t = Least::Info)]
    min_severity: Least,
    #[command(flatten)]
    shards: ShardArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Least {
    Debug,
    Info,
    Warning,
    Error,
}

/// Shards may tell faster than a terminal scrolls.
const QUEUE: usize = 256;

pub async fn run(context: &Context, args: EventsArgs) -> Result<Exit, Failure> {
    let shards = args.shards.shards(context).await?;
    let least = match args.min_severity {
        Least::Debug => Severity::Debug,
        Least::Info => Severity::Info,
        Least::Warning => Severity::Warning,
        Least::Error => Severity::Error,
    };
    let request = WatchEventsRequest {
        resume_token: String::new(),
        min_severity: least.into(),
        group: args.group.clone().unwrap_or_default(),
        instance_id: args.instance.clone().unwrap_or_default(),
    };
    let since = args.since.map(|since| words::now().minus(since));
    if args.follow {
        return follow_all(context, &shards, &request, since).await;
    }
    let request = &request;
    let mut answers = shards.each(|client| past(client, request.clone())).await;
    for (_, events) in &mut answers.ok {
        events.retain(|it| is_since(it, since));
    }
    show(context, &answers);
    Ok(report::outcome(context, &answers))
}

fn is_since(event: &Event, since: Option<Timestamp>) -> bool {
    since.is_none_or(|since| view::time(event.at.as_ref()).is_none_or(|at| since <= at))
}

fn show(context: &Context, answers: &Answers<Vec<Event>>) {
    let all = answers.ok.iter().flat_map(|(shard, events)| events.iter().map(move |it| (shard.as_str(), it)));
    let mut all: Vec<(&str, &Event)> = all.collect();
    all.sort_by_key(|(_, it)| view::time(it.at.as_ref()));
    let mut table = Table::new(&["TIME", "SEVERITY", "SHARD", "GROUP", "INSTANCE", "REASON", "MESSAGE", "+ACTOR"]);
    for (shard, it) in &all {
        if 0 < it.dropped {
            table.row(["...", "", shard, "", "", "", &format!("{} dropped", words::count(it.dropped, "event")), ""]);
        }
        let at = view::time(it.at.as_ref()).map(|it| it.to_string()).unwrap_or_default();
        let severity = view::severity(it.severity());
        table.row([&at, severity, shard, &it.group, &it.instance_id, &it.reason, &it.message, &it.actor]);
    }
    context.output.show(&Shown {
        document: json!({
            "events": all.iter().map(|(shard, it)| view::event(shard, it)).collect::<Vec<_>>(),
            "errors": report::error_documents(&answers.errors),
        }),
        table,
        names: all.iter().map(|(_, it)| it.reason.clone()).collect(),
    });
}

/// Until somebody stops it, or every shard has refused. A shard that cannot be reached is said to be, and waited for.
async fn follow_all(
    context: &Context,
    shards: &Shards,
    request: &WatchEventsRequest,
    since: Option<Timestamp>,
) -> Result<Exit, Failure> {
    let (sender, updates) = mpsc::channel(QUEUE);
    let start = if since.is_some() { StartAt::Oldest } else { StartAt::Now };
    let streams = shards.connections().iter().map(|it| follow(it, request, start, sender.clone()));
    let following = futures::future::join_all(streams.collect::<Vec<_>>());
    // Only the streams hold senders: once they have ended, so does the channel.
    drop(sender);
    let mut stop = StopSignals::listen().map_err(|error| Failure::failed("listen for signals").because(error))?;
    let note = |shard: &str, text: &str| context.output.note(&format!("note: {shard}: {text}"));
    let showing = show_updates(updates, |EventUpdate { shard, kind }| match kind {
        EventUpdateKind::Event(event) if is_since(&event, since) => item(context, &shard, &event),
        EventUpdateKind::Event(_) => {}
        EventUpdateKind::Refused(error) => report::print_errors(context, std::slice::from_ref(&error)),
        EventUpdateKind::Disconnected(error) => {
            note(&shard, &format!("{}; going on as soon as there is a leader", error.message));
        }
        EventUpdateKind::Reconnected => note(&shard, "following again"),
        EventUpdateKind::NewLeader { epoch } => note(&shard, &format!("another leader since epoch {epoch}")),
    });
    tokio::select! {
        biased;
        _ = stop.next() => Ok(Exit::Interrupted),
        (refused, _) = futures::future::join(showing, following) => Ok(Exit::of_shards(0, &refused)),
    }
}

/// Shows all updates until every stream has ended, and answers which shards refused. A refusal does not end the streams of
/// other shards.
async fn show_updates(mut updates: mpsc::Receiver<EventUpdate>, mut show: impl FnMut(EventUpdate)) -> Vec<ShardError> {
    let mut refused = Vec::new();
    while let Some(update) = updates.recv().await {
        if let EventUpdateKind::Refused(error) = &update.kind {
            refused.push(error.clone());
        }
        show(update);
    }
    refused
}

fn item(context: &Context, shard: &str, event: &Event) {
    if 0 < event.dropped && matches!(context.output.format, Format::Table | Format::Wide) {
        // In JSON the event itself says it.
        context
            .output
            .item(&json!(null), || format!("... {} dropped in {shard}", words::count(event.dropped, "event")));
    }
    context.output.item(&view::event(shard, event), || line(shard, event));
}

/// One line: a stream has no columns that could be measured.
fn line(shard: &str, it: &Event) -> String {
    let at = view::time(it.at.as_ref()).map(|it| it.to_string()).unwrap_or_default();
    let of = [it.group.as_str(), &it.instance_id].into_iter().filter(|it| !it.is_empty()).collect::<Vec<_>>().join("/");
    let of = if of.is_empty() { "-".to_owned() } else { of };
    format!("{at}  {:<7}  {shard}  {of}  {}  {}", view::severity(it.severity()), it.reason, it.message)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn a_shard_that_refuses_does_not_end_the_others() {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let update = |shard: &str, kind| EventUpdate { shard: shard.to_owned(), kind };
        let refused = |shard: &str| {
            update(shard, EventUpdateKind::Refused(ShardError::new(shard, Code::PermissionDenied, "not you")))
        };
        sender.send(refused("dev-1")).await.unwrap();
        let event = Box::new(Event { reason: "GroupChanged".into(), ..Event::default() });
        sender.send(update("dev-2", EventUpdateKind::Event(event))).await.unwrap();
        sender.send(refused("dev-2")).await.unwrap();
        drop(sender);
        let mut said = Vec::new();
        let refusals = show_updates(receiver, |EventUpdate { shard, kind }| {
            said.push(match kind {
                EventUpdateKind::Event(event) => format!("{shard}: {}", event.reason),
                EventUpdateKind::Refused(error) => error.to_string(),
                other => format!("{shard}: {other:?}"),
            });
        });
        let refusals = refusals.await;
        assert_eq!(said, ["dev-1: not you", "dev-2: GroupChanged", "dev-2: not you"]);
        assert_eq!(Exit::of_shards(0, &refusals), Exit::Denied);
    }
}
