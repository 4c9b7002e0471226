//! Events: those that are remembered, and those that come.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use axum::body::{Body, Bytes};
use futures::stream;
use http::StatusCode;
use nstance_client::{
    ResumeToken,
    live::{EventHistory, ShardEvent, dropped_events},
};
use nstance_core::time::Timestamp;
use nstance_proto::v1::Severity;
use serde_json::{Map, Value, json};
use tokio::sync::broadcast::error::RecvError;

use super::{
    super::{
        App,
        reply::{Reply, Trouble, shard_error},
        route::Call,
    },
    looked_at,
};
use crate::view;

/// Something is said at least this often, so that whoever stands between does not take us for dead.
const KEEPALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Document,
    Sse,
    Lines,
}

/// The first form of `Accept` that we have.
pub(super) fn form(accept: &str, follow: bool) -> Form {
    let kinds = accept.split(',').map(|it| it.split(';').next().unwrap_or_default().trim());
    let wanted = kinds.filter_map(|kind| match kind {
        "text/event-stream" => Some(Form::Sse),
        "application/x-ndjson" => Some(Form::Lines),
        "application/json" => Some(Form::Document),
        _ => None,
    });
    match wanted.into_iter().next() {
        // What goes on has no end, so it is no document.
        None | Some(Form::Document) if follow => Form::Lines,
        None => Form::Document,
        Some(form) => form,
    }
}

/// Which events are wanted.
#[derive(Debug, Clone)]
struct Filter {
    shards: Vec<String>,
    since: Option<Timestamp>,
    group: Option<String>,
    instance: Option<String>,
    min_severity: i32,
}

impl Filter {
    fn of(app: &App, call: &Call, shards: Vec<String>) -> Self {
        let owned = |name: &str| call.text(name).map(str::to_owned);
        let span = call.text("since").and_then(|it| nstance_config::duration::parse(it).ok());
        let min_severity = match call.text("min_severity") {
            Some("info") => Severity::Info,
            Some("warning") => Severity::Warning,
            Some("error") => Severity::Error,
            _ => Severity::Debug,
        };
        Self {
            shards,
            since: span.map(|it| app.clock.now().minus(it)),
            group: owned("group"),
            instance: owned("instance"),
            min_severity: min_severity as i32,
        }
    }

    fn wants(&self, told: &ShardEvent) -> bool {
        let event = &told.event;
        self.shards.contains(&told.shard)
            && self.min_severity <= event.severity
            && self.since.is_none_or(|since| view::time(event.at.as_ref()).is_some_and(|at| since <= at))
            && self.group.as_ref().is_none_or(|it| *it == event.group)
            && self.instance.as_ref().is_none_or(|it| *it == event.instance_id)
    }
}

pub(in super::super) async fn list(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = looked_at(&app, &call)?;
    let names = shards.names().map(str::to_owned).collect();
    let (filter, follow) = (Filter::of(&app, &call, names), call.flag("follow"));
    // Before the past is looked at: what comes meanwhile is heard twice rather than never.
    let coming = app.live.subscribe_events();
    let past = app.live.event_history(&shards);
    let errors: Vec<_> = past.iter().filter_map(|it| it.disconnected.clone()).collect();
    let times: Map<String, Value> =
        past.iter().filter_map(|it| Some((it.shard.clone(), it.as_of?.to_string().into()))).collect();
    let told = in_order(past);
    let form = form(&call.accept, follow);
    if form == Form::Document {
        if told.is_empty() && !errors.is_empty() && times.is_empty() {
            return Err(Trouble::of_shards(&errors));
        }
        let events = told.iter().filter(|it| filter.wants(it)).map(|it| view::event(&it.shard, &it.event));
        let status = if errors.is_empty() { StatusCode::OK } else { StatusCode::MULTI_STATUS };
        let errors: Vec<Value> = errors.iter().map(shard_error).collect();
        return Ok(Reply::json(
            status,
            json!({"events": events.collect::<Vec<_>>(), "errors": errors, "as_of": times}),
        ));
    }
    let places = call.text("Last-Event-ID").map(places).unwrap_or_default();
    let reader = Reader { filter, form, places, waiting: told.into(), coming: follow.then_some(coming), app };
    let body = Body::from_stream(stream::unfold(reader, |mut reader| async move {
        let text = reader.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), reader))
    }));
    Ok(Reply::stream(if form == Form::Sse { "text/event-stream" } else { "application/x-ndjson" }, body))
}

/// By their times, but never against the order in which a shard told them: a new leader may have decided something before
/// the last word of the old one, and a reader would take what comes after a later one for told already.
fn in_order(past: Vec<EventHistory>) -> Vec<ShardEvent> {
    let mut all = Vec::new();
    for it in past {
        let mut latest = None;
        for event in it.events {
            latest = latest.max(view::time(event.at.as_ref()));
            all.push((latest, ShardEvent { shard: it.shard.clone(), event }));
        }
    }
    all.sort_by_key(|(latest, _)| *latest);
    all.into_iter().map(|(_, told)| told).collect()
}

/// `dev-1=7-12,dev-2=9-3`: where a reader is in the history of each shard.
fn places(text: &str) -> BTreeMap<String, ResumeToken> {
    let parts = text.split(',').filter_map(|it| it.split_once('='));
    parts.filter_map(|(shard, token)| Some((shard.to_owned(), ResumeToken::parse(token)?))).collect()
}

/// One who reads a stream.
struct Reader {
    filter: Filter,
    form: Form,
    /// How far it came, by shard.
    places: BTreeMap<String, ResumeToken>,
    waiting: VecDeque<ShardEvent>,
    coming: Option<tokio::sync::broadcast::Receiver<Arc<ShardEvent>>>,
    app: Arc<App>,
}

impl Reader {
    /// The next piece of text; nothing at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            let told = match self.waiting.pop_front() {
                Some(told) => told,
                None => {
                    let coming = self.coming.as_mut()?;
                    tokio::select! {
                        biased;
                        () = self.app.stop.cancelled() => return None,
                        heard = coming.recv() => match heard {
                            Ok(told) => ShardEvent::clone(&told),
                            Err(RecvError::Closed) => return None,
                            // The numbers of the next events show how many of whom.
                            Err(RecvError::Lagged(_)) => continue,
                        },
                        () = tokio::time::sleep(KEEPALIVE) => {
                            return Some(if self.form == Form::Sse { ":\n\n" } else { "\n" }.to_owned());
                        }
                    }
                }
            };
            if let Some(text) = self.take(told) {
                return Some(text);
            }
        }
    }

    /// An event that is new to this reader, and wanted. What is missing before it is told in any case: among what was lost
    /// there may be something that is wanted.
    fn take(&mut self, told: ShardEvent) -> Option<String> {
        let mut n_missed = 0;
        let position = ResumeToken::parse(&told.event.resume_token);
        if let Some(position) = position {
            let before = self.places.get(&told.shard).copied();
            if before.is_some_and(|before| position <= before) {
                return None;
            }
            n_missed = before.map_or(0, |before| before.n_between(position));
        }
        let wanted = self.filter.wants(&told);
        // An event that is shown says by itself what was dropped before it.
        let n_missed = match u64::from(told.event.dropped) {
            0 => n_missed,
            _ if wanted => 0,
            n_dropped => n_dropped,
        };
        let mut text = String::new();
        if 0 < n_missed && self.filter.shards.contains(&told.shard) {
            text.push_str(&self.said(&view::event(&told.shard, &dropped_events(n_missed))));
        }
        if let Some(position) = position {
            self.places.insert(told.shard.clone(), position);
        }
        if wanted {
            text.push_str(&self.said(&view::event(&told.shard, &told.event)));
        }
        (!text.is_empty()).then_some(text)
    }

    fn said(&self, event: &Value) -> String {
        if self.form == Form::Lines {
            return format!("{event}\n");
        }
        let places = self.places.iter().map(|(shard, it)| format!("{shard}={it}"));
        format!("id: {}\nevent: event\ndata: {event}\n\n", places.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use nstance_proto::v1::Event;

    use super::*;

    #[test]
    fn accept_chooses_the_form() {
        assert_eq!(form("", false), Form::Document);
        assert_eq!(form("*/*", true), Form::Lines);
        assert_eq!(form("text/event-stream", true), Form::Sse);
        assert_eq!(form("text/html, application/x-ndjson;q=0.5", false), Form::Lines);
        assert_eq!(form("application/json", true), Form::Lines);
    }

    #[test]
    fn events_of_several_shards_are_merged_and_none_changes_its_place_among_its_own() {
        let event = |token: &str, seconds: i64| Event {
            resume_token: token.to_owned(),
            at: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            ..Event::default()
        };
        let past = |shard: &str, events: Vec<Event>| EventHistory {
            shard: shard.to_owned(),
            events,
            as_of: None,
            disconnected: None,
        };
        // The clocks of two leaders.
        let one = past("dev-1", vec![event("1-1", 10), event("1-2", 30), event("2-1", 20), event("2-2", 50)]);
        let two = past("dev-2", vec![event("7-1", 15), event("7-2", 40)]);
        let told = in_order(vec![one, two]);
        let tokens: Vec<&str> = told.iter().map(|it| it.event.resume_token.as_str()).collect();
        assert_eq!(tokens, ["1-1", "7-1", "1-2", "2-1", "7-2", "2-2"]);
    }

    #[test]
    fn places_of_a_reader_are_read_back() {
        let read = places("dev-1=7-12,nonsense,dev-2=9-3,dev-3=x");
        assert_eq!(read.len(), 2);
        assert_eq!(Some(&read["dev-2"]), ResumeToken::parse("9-3").as_ref());
    }
}
