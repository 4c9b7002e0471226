//! The task that writes events. Those who emit never wait: what does not fit into the queue is counted and dropped.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use nstance_core::{ports::clock::Clock, time::Mono};
use nstance_rt::{chain::Chain, tasks::Tasks};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::events::{About, EventSink, Severity};
use crate::ports::{KubeErrorKind, KubePort, ObjectRef, Target, kinds};

const MAX_QUEUED: usize = 1024;
/// Equal events are written once in this time.
const WINDOW: Duration = Duration::from_secs(600);
/// Different events that are remembered.
const MAX_FOLDS: usize = 4096;
/// The longest message that an API server accepts.
const MAX_MESSAGE: usize = 1024;

struct Emitted {
    about: About,
    severity: Severity,
    reason: String,
    message: String,
}

/// Puts events into the queue of the writer.
pub struct EventWriter {
    queue: Sender<Emitted>,
    n_dropped: Arc<AtomicU64>,
}

impl EventWriter {
    /// Starts the task that writes.
    pub fn start(tasks: &Tasks, kube: Arc<dyn KubePort>, clock: Arc<dyn Clock>) -> Arc<Self> {
        let (queue, events) = channel(MAX_QUEUED);
        let n_dropped = Arc::new(AtomicU64::new(0));
        tasks.spawn_droppable("write events", write(events, kube, clock, n_dropped.clone()));
        Arc::new(Self { queue, n_dropped })
    }
}

impl EventSink for EventWriter {
    fn emit(&self, about: &About, severity: Severity, reason: &str, message: &str) {
        tracing::info!(object = %about.object, reason, message, "event");
        let (about, reason, message) = (about.clone(), reason.to_owned(), message.to_owned());
        if self.queue.try_send(Emitted { about, severity, reason, message }).is_err() {
            self.n_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

type Same = (String, String, String);

/// An event that was written and what came since.
struct Fold {
    since: Mono,
    event: ObjectRef,
    /// How often it was told, all in all.
    n: u64,
}

/// What is to be done about an event.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Create,
    /// The same was told before the window; it is written again with the whole count.
    Repeat {
        event: ObjectRef,
        n: u64,
    },
    /// It is counted.
    Fold,
}

#[derive(Default)]
struct Folds(BTreeMap<Same, Fold>);

impl Folds {
    fn take(&mut self, same: &Same, now: Mono) -> Fate {
        let Some(fold) = self.0.get_mut(same) else { return Fate::Create };
        fold.n += 1;
        if now.since(fold.since) < WINDOW {
            return Fate::Fold;
        }
        fold.since = now;
        Fate::Repeat { event: fold.event.clone(), n: fold.n }
    }

    fn created(&mut self, same: Same, event: ObjectRef, now: Mono) {
        if MAX_FOLDS <= self.0.len()
            && let Some(oldest) = self.0.iter().min_by_key(|(_, it)| it.since).map(|(same, _)| same.clone())
        {
            self.0.remove(&oldest);
        }
        self.0.insert(same, Fold { since: now, event, n: 1 });
    }
}

async fn write(
    mut events: Receiver<Emitted>,
    kube: Arc<dyn KubePort>,
    clock: Arc<dyn Clock>,
    n_dropped: Arc<AtomicU64>,
) {
    let mut folds = Folds::default();
    while let Some(event) = events.recv().await {
        let n = n_dropped.swap(0, Ordering::Relaxed);
        if 0 < n {
            tracing::warn!(n, "events were dropped: they could not be written fast enough");
        }
        let now = clock.monotonic();
        let time = Timestamp::from_millisecond(clock.now().as_millis()).unwrap_or_default();
        let same = (event.about.uid.clone(), event.reason.clone(), event.message.clone());
        let written = match folds.take(&same, now) {
            Fate::Fold => continue,
            Fate::Repeat { event, n } => {
                let patch = json!({ "count": n, "lastTimestamp": seconds(time) });
                match kube.merge_patch(&event, &patch, Target::Main).await {
                    // The API server forgets events after a while.
                    Err(error) if error.is_not_found() => {
                        folds.0.remove(&same);
                        Ok(())
                    }
                    written => written.map(drop),
                }
            }
            Fate::Create => {
                let (object, body) = body(&event, time);
                match kube.create(&object, &body, "nstance-operator").await {
                    Ok(_) => {
                        folds.created(same, object, now);
                        Ok(())
                    }
                    Err(error) if error.kind == KubeErrorKind::AlreadyExists => Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        if let Err(error) = written {
            tracing::warn!(error = %Chain(&error), "an event was not written");
        }
    }
}

/// Events have times in whole seconds.
fn seconds(time: Timestamp) -> String {
    format!("{time:.0}")
}

fn body(event: &Emitted, time: Timestamp) -> (ObjectRef, Value) {
    let Emitted { about: About { object, uid }, severity, reason, message } = event;
    let namespace = if object.namespace.is_empty() { "default" } else { object.namespace.as_str() };
    // The name tells equal events at different times apart, and is the same if a lost answer makes us write it again.
    let mut hash = Sha256::new();
    for part in [uid.as_str(), reason, message, &time.to_string()] {
        hash.update(part.as_bytes());
        hash.update([0]);
    }
    let hash = data_encoding::HEXLOWER.encode(&hash.finalize()[..8]);
    let name = format!("{}.{hash}", object.name.chars().take(230).collect::<String>());
    let reference = ObjectRef::new(kinds::EVENT, namespace, &name);
    let kind = match severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    };
    let mut involved = json!({
        "apiVersion": object.kind.api_version(),
        "kind": object.kind.kind,
        "name": object.name,
        "uid": uid,
    });
    if !object.namespace.is_empty() {
        involved["namespace"] = json!(object.namespace);
    }
    let body = json!({
        "metadata": { "name": name, "namespace": namespace },
        "involvedObject": involved,
        "reason": reason,
        "message": message.chars().take(MAX_MESSAGE).collect::<String>(),
        "type": kind,
        "count": 1,
        "firstTimestamp": seconds(time),
        "lastTimestamp": seconds(time),
        "source": { "component": "nstance-operator" },
        "reportingComponent": "nstance-operator",
        "reportingInstance": "nstance-operator",
    });
    (reference, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Mono {
        Mono::from_start(Duration::from_secs(seconds))
    }

    #[test]
    fn equal_events_are_written_once_in_ten_minutes_and_then_with_their_number() {
        let mut folds = Folds::default();
        let same = ("uid".to_owned(), "SizePushed".to_owned(), "3".to_owned());
        let other = ("uid".to_owned(), "SizePushed".to_owned(), "4".to_owned());
        let object = ObjectRef::new(kinds::EVENT, "default", "web.1");
        assert_eq!(folds.take(&same, at(0)), Fate::Create);
        folds.created(same.clone(), object.clone(), at(0));
        assert_eq!(folds.take(&other, at(1)), Fate::Create);
        assert_eq!(folds.take(&same, at(599)), Fate::Fold);
        assert_eq!(folds.take(&same, at(600)), Fate::Repeat { event: object, n: 3 });
        assert_eq!(folds.take(&same, at(601)), Fate::Fold);
    }

    #[test]
    fn an_event_about_an_object_without_namespace_lies_in_the_default_one() {
        let event = Emitted {
            about: About { object: ObjectRef::new(kinds::NODE, "", "n1"), uid: "u".to_owned() },
            severity: Severity::Warning,
            reason: "AmbiguousNode".to_owned(),
            message: "x".repeat(2000),
        };
        let time = Timestamp::from_millisecond(1_700_000_000_123).unwrap();
        let (object, body) = body(&event, time);
        assert_eq!(object.namespace, "default");
        assert_eq!(body["involvedObject"]["namespace"], Value::Null);
        assert_eq!(body["message"].as_str().unwrap().len(), 1024);
        assert_eq!(body["firstTimestamp"], "2023-11-14T22:13:20Z");
    }
}
