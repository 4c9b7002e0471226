//! One stream of everything that changes at all shards, for a dashboard.
//!
//! It begins with `begin`, a `snapshot` of every shard and `ready`; then come changes, each with an id. Who comes back with
//! the last id is either told what came after it (`begin` says `resumed`) or everything anew: never less without being
//! told. Nothing is kept for a reader but its place, so one that is too slow is cut and begins anew.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use futures::stream;
use nstance_client::live::{Change, LogEntry, ReadStart, ShardView};
use nstance_core::time::Timestamp;
use serde_json::{Map, Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use super::{
    super::{
        App,
        reply::{Reply, Trouble},
        route::Call,
    },
    events::{Form, form},
    looked_at, names,
};
use crate::view;

/// Something is said at least this often, so that whoever stands between does not take us for dead, and a dashboard knows
/// how old the rest is.
pub(in super::super) const PULSE: Duration = Duration::from_secs(5);

/// Changes that are put into one piece of text.
const BATCH: usize = 64;

pub(in super::super) async fn stream(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = looked_at(&app, &call)?;
    let shards: Vec<String> = shards.names().map(str::to_owned).collect();
    let chosen = names(&call);
    let scope = if chosen.is_empty() { Vec::new() } else { shards.clone() };
    let ids = Ids { life: app.life.clone(), scope: scope.join(".") };
    // A stream is no document, whatever is preferred.
    let form = if form(&call.accept, true) == Form::Lines && call.accept.contains("application/x-ndjson") {
        Form::Lines
    } else {
        Form::Sse
    };
    let place = call.text("Last-Event-ID").and_then(|it| ids.number(it));
    // Before the state is read: a change in between wakes us once too often rather than never.
    let changes = app.live.subscribe();
    let mut reader = Reader {
        opening: VecDeque::new(),
        at: 0,
        follow: call.params.get("follow").and_then(Value::as_bool).unwrap_or(true),
        pulse_at: Instant::now() + PULSE,
        changes,
        form,
        shards,
        ids,
        app,
    };
    reader.open(place);
    let body = Body::from_stream(stream::unfold(reader, |mut reader| async move {
        let text = reader.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), reader))
    }));
    Ok(Reply::stream(if form == Form::Sse { "text/event-stream" } else { "application/x-ndjson" }, body))
}

/// `LIFE-NUMBER`, and the shards of a reader that did not ask for all: numbers mean nothing in another life of this
/// process, nor to a reader of other shards.
struct Ids {
    life: String,
    scope: String,
}

impl Ids {
    fn id(&self, number: u64) -> String {
        let (life, scope) = (&self.life, &self.scope);
        if scope.is_empty() { format!("{life}-{number}") } else { format!("{life}-{number}.{scope}") }
    }

    fn number(&self, id: &str) -> Option<u64> {
        let (id, scope) = id.split_once('.').unwrap_or((id, ""));
        let (life, number) = id.split_once('-')?;
        if life == self.life && scope == self.scope { number.parse().ok() } else { None }
    }
}

/// What is said before the changes.
enum Said {
    Begin { resumed: bool },
    Snapshot(Box<ShardView>),
    Ready,
}

/// One who reads the stream.
struct Reader {
    opening: VecDeque<Said>,
    /// The number of the last change it knows.
    at: u64,
    follow: bool,
    pulse_at: Instant,
    changes: watch::Receiver<u64>,
    form: Form,
    shards: Vec<String>,
    ids: Ids,
    app: Arc<App>,
}

impl Reader {
    fn open(&mut self, place: Option<u64>) {
        match (self.app.live.start_reading(place), place) {
            (ReadStart::Resumed, Some(number)) => {
                self.at = number;
                self.opening.push_back(Said::Begin { resumed: true });
            }
            (ReadStart::Resumed, None) => {}
            (ReadStart::FullState(seen, last), _) => {
                self.at = last;
                let wanted = seen.into_iter().filter(|it| self.shards.iter().any(|shard| **shard == *it.shard));
                self.opening.push_back(Said::Begin { resumed: false });
                self.opening.extend(wanted.map(|it| Said::Snapshot(Box::new(it))));
                self.opening.push_back(Said::Ready);
            }
        }
    }

    /// The next piece of text; nothing at the end.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(said) = self.opening.pop_front() {
                return Some(self.opened(&said));
            }
            if !self.follow || self.app.stop.is_cancelled() {
                return None;
            }
            if self.pulse_at <= Instant::now() {
                self.pulse_at = Instant::now() + PULSE;
                return Some(self.message(None, "pulse", &json!({"type": "pulse", "as_of": self.ages()})));
            }
            self.changes.borrow_and_update();
            let Ok(entries) = self.app.live.changes_after(self.at, BATCH) else {
                self.follow = false;
                let problem = "the stream was not read fast enough; it begins anew with the next request";
                return Some(self.message(None, "cut", &json!({"type": "cut", "problem": problem})));
            };
            if let Some(last) = entries.last() {
                self.at = last.number;
                let wanted = entries.iter().filter(|it| self.shards.iter().any(|shard| **shard == *it.shard));
                let text: String = wanted.map(|it| self.changed(it)).collect();
                if !text.is_empty() {
                    return Some(text);
                }
                continue;
            }
            tokio::select! {
                biased;
                () = self.app.stop.cancelled() => return None,
                changed = self.changes.changed() => changed.ok()?,
                () = sleep_until(self.pulse_at) => {}
            }
        }
    }

    fn opened(&self, said: &Said) -> String {
        match said {
            Said::Begin { resumed } => {
                // Whoever held an id that we do not know must not come back with it in the midst of a snapshot.
                let id = if *resumed { None } else { Some("") };
                let value = json!({"type": "begin", "resumed": resumed, "shards": self.shards, "as_of": self.ages()});
                self.message(id, "begin", &value)
            }
            Said::Snapshot(seen) => self.message(None, "snapshot", &snapshot(seen)),
            Said::Ready => {
                let id = self.ids.id(self.at);
                self.message(Some(&id), "ready", &json!({"type": "ready", "id": id}))
            }
        }
    }

    fn changed(&self, entry: &LogEntry) -> String {
        let id = self.ids.id(entry.number);
        let (kind, mut value) = change(&entry.shard, &entry.change);
        (value["type"], value["id"], value["shard"]) = (kind.into(), id.as_str().into(), (*entry.shard).into());
        value["as_of"] = time(entry.as_of);
        self.message(Some(&id), kind, &value)
    }

    fn message(&self, id: Option<&str>, kind: &str, value: &Value) -> String {
        if self.form == Form::Lines {
            return format!("{value}\n");
        }
        let id = id.map(|it| format!("id: {it}\n")).unwrap_or_default();
        format!("{id}event: {kind}\ndata: {value}\n\n")
    }

    /// When each shard was last heard of; none that never was.
    fn ages(&self) -> Map<String, Value> {
        let seen = self.app.live.views().into_iter();
        let wanted = seen.filter(|it| self.shards.iter().any(|shard| **shard == *it.shard));
        wanted.filter_map(|it| Some((it.shard.to_string(), it.as_of?.to_string().into()))).collect()
    }
}

fn time(at: Option<Timestamp>) -> Value {
    at.map_or(Value::Null, |it| it.to_string().into())
}

/// A shard that was never reached has `null` where another has lists: nobody knows what it has.
fn snapshot(seen: &ShardView) -> Value {
    let (shard, picture) = (&*seen.shard, seen.state.as_ref());
    json!({
        "type": "snapshot",
        "shard": shard,
        "as_of": time(seen.as_of),
        "reachable": seen.disconnected.is_none(),
        "problem": seen.disconnected.as_ref().map(|it| it.message.as_str()),
        "status": picture.map(|it| view::config_status(shard, &it.status)),
        "groups": picture.map(|it| it.groups.values().map(|it| view::group(shard, it)).collect::<Vec<_>>()),
        "instances": picture.map(|it| it.instances.values().map(|it| view::instance(shard, it)).collect::<Vec<_>>()),
        "events": seen.events.iter().map(|it| view::event(shard, it)).collect::<Vec<_>>(),
    })
}

/// What kind of change it is, and what is its own in it.
fn change(shard: &str, change: &Change) -> (&'static str, Value) {
    match change {
        Change::Connected(seen) => ("snapshot", snapshot(seen)),
        Change::Status(it) => ("status", json!({"status": view::config_status(shard, it)})),
        Change::Group(it) => ("group", json!({"group": view::group(shard, it)})),
        Change::GroupDeleted(key) => ("group_gone", json!({"group": key})),
        Change::Instance(it) => ("instance", json!({"instance": view::instance(shard, it)})),
        Change::Event(it) => ("event", json!({"event": view::event(shard, it)})),
        Change::Disconnected(error) => ("lost", json!({"code": view::code_of(error), "problem": error.message})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_back_by_the_same_life_and_for_the_same_shards_only() {
        let all = Ids { life: "a1".into(), scope: String::new() };
        let one = Ids { life: "a1".into(), scope: "dev-1".into() };
        assert_eq!((all.id(7), one.id(7)), ("a1-7".to_owned(), "a1-7.dev-1".to_owned()));
        assert_eq!((all.number("a1-7"), one.number("a1-7.dev-1")), (Some(7), Some(7)));
        for foreign in ["b2-7", "a1-7.dev-1", "a1-x", "a1", "", "7", "a1--7"] {
            assert_eq!(all.number(foreign), None, "{foreign}");
        }
        assert_eq!(one.number("a1-7"), None);
        assert_eq!(one.number("a1-7.dev-1.dev-2"), None);
    }
}
