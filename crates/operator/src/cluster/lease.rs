//! Election by a Lease. One process leads; the others wait until its Lease has not changed for a while.
//!
//! Clocks of machines are not compared: a Lease is stale if this process has seen the very same record for the whole term
//! on its own monotonic clock. Every write names the `resourceVersion` that it is based on, so of two candidates one wins.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use nstance_core::{ports::clock::Clock, time::Mono};
use nstance_rt::chain::Chain;
use serde_json::{Value, json};

use super::leadership::Leadership;
use crate::ports::{KubeError, KubeErrorKind, KubePort, ObjectRef, kinds};

pub const LEASE_NAME: &str = "nstance-operator-leader-election";

const TERM: Duration = Duration::from_secs(15);
/// The leader gives up if it could not renew for this long: well before others may take over.
const RENEW_LIMIT: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(2);

/// A Lease as it was read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    pub holder: String,
    pub transitions: i32,
    pub version: String,
    acquired: String,
}

/// The last record that was seen, and since when it has been the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    pub record: Record,
    pub since: Mono,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// There is no Lease.
    Create,
    /// Nobody holds it, or its holder has not renewed it.
    Take { transitions: i32 },
    /// It is ours.
    Renew { transitions: i32 },
    /// Another process holds it.
    Wait,
}

/// Remembers what was read. A record that is the same as before keeps its time.
pub fn observe(before: Option<Observed>, record: Option<Record>, now: Mono) -> Option<Observed> {
    let record = record?;
    match before {
        Some(before) if before.record == record => Some(before),
        _ => Some(Observed { record, since: now }),
    }
}

pub fn decide(me: &str, observed: Option<&Observed>, now: Mono) -> Step {
    let Some(Observed { record, since }) = observed else { return Step::Create };
    if record.holder == me {
        return Step::Renew { transitions: record.transitions };
    }
    let is_stale = TERM <= now.since(*since);
    if record.holder.is_empty() || is_stale {
        return Step::Take { transitions: record.transitions.saturating_add(1) };
    }
    Step::Wait
}

pub struct Election {
    /// A client that may write without being the leader.
    kube: Arc<dyn KubePort>,
    lease: ObjectRef,
    me: String,
    clock: Arc<dyn Clock>,
    leadership: Arc<Leadership>,
    observed: Option<Observed>,
}

/// What an attempt came to.
enum Attempt {
    Held,
    Waiting,
}

impl Election {
    pub fn new(
        kube: Arc<dyn KubePort>,
        namespace: &str,
        me: String,
        clock: Arc<dyn Clock>,
        leadership: Arc<Leadership>,
    ) -> Self {
        let lease = ObjectRef::new(kinds::LEASE, namespace, LEASE_NAME);
        Self { kube, lease, me, clock, leadership, observed: None }
    }

    /// Waits until this process leads.
    pub async fn acquire(&mut self) {
        let mut is_told = false;
        loop {
            match self.attempt().await {
                Ok(Attempt::Held) => {
                    let transitions = self.leadership.transitions();
                    tracing::info!(holder = self.me, lease_transitions = transitions, "elected");
                    return;
                }
                Ok(Attempt::Waiting) => {
                    if !std::mem::replace(&mut is_told, true) {
                        let holder = self.observed.as_ref().map(|it| it.record.holder.as_str());
                        tracing::info!(holder, "standing by: another process leads");
                    }
                }
                Err(error) => tracing::warn!(error = %Chain(&error), "election: the Lease was not read or written"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Renews until leadership is lost.
    pub async fn hold(&mut self) {
        loop {
            tokio::time::sleep(RETRY).await;
            let renewed = async {
                loop {
                    match self.attempt().await {
                        Ok(Attempt::Held) => return true,
                        Ok(Attempt::Waiting) => return false,
                        Err(error) => tracing::warn!(error = %Chain(&error), "the Lease was not renewed"),
                    }
                    tokio::time::sleep(RETRY).await;
                }
            };
            if !matches!(tokio::time::timeout(RENEW_LIMIT.saturating_sub(RETRY), renewed).await, Ok(true)) {
                self.leadership.lose();
                return;
            }
        }
    }

    /// Gives the Lease up, so that another process need not wait for its end.
    pub async fn release(&mut self) {
        let held = self.observed.as_ref().map(|it| it.record.clone()).filter(|it| it.holder == self.me);
        self.leadership.lose();
        if let Some(record) = held {
            let mut body = self.body(record.transitions, Some(&record), 1);
            body["spec"]["holderIdentity"] = json!("");
            if let Err(error) = self.kube.replace(&self.lease, &body).await {
                tracing::warn!(error = %Chain(&error), "the Lease was not released; it runs out by itself");
            }
        }
    }

    async fn attempt(&mut self) -> Result<Attempt, KubeError> {
        // The term counts from before the request: the API server may have written it at any time since.
        let now = self.clock.monotonic();
        let read = self.kube.get(&self.lease).await?;
        self.observed = observe(self.observed.take(), read.as_ref().map(record), now);
        let (written, transitions) = match decide(&self.me, self.observed.as_ref(), self.clock.monotonic()) {
            Step::Wait => return Ok(Attempt::Waiting),
            Step::Create => {
                let body = self.body(0, None, TERM.as_secs());
                (self.kube.create(&self.lease, &body, "nstance-operator").await, 0)
            }
            Step::Take { transitions } => {
                let current = self.observed.as_ref().map(|it| Record { acquired: String::new(), ..it.record.clone() });
                let body = self.body(transitions, current.as_ref(), TERM.as_secs());
                (self.kube.replace(&self.lease, &body).await, transitions)
            }
            Step::Renew { transitions } => {
                let current = self.observed.as_ref().map(|it| it.record.clone());
                let body = self.body(transitions, current.as_ref(), TERM.as_secs());
                (self.kube.replace(&self.lease, &body).await, transitions)
            }
        };
        match written {
            Ok(lease) => {
                self.observed = observe(self.observed.take(), Some(record(&lease)), now);
                self.leadership.renew(now, RENEW_LIMIT, transitions);
                Ok(Attempt::Held)
            }
            // Somebody else wrote it first: look again.
            Err(error) if matches!(error.kind, KubeErrorKind::Conflict | KubeErrorKind::AlreadyExists) => {
                let is_ours = self.observed.as_ref().is_some_and(|it| it.record.holder == self.me);
                if is_ours { Err(error) } else { Ok(Attempt::Waiting) }
            }
            Err(error) => Err(error),
        }
    }

    fn body(&self, transitions: i32, current: Option<&Record>, term_seconds: u64) -> Value {
        let now = Timestamp::from_millisecond(self.clock.now().as_millis()).unwrap_or_default();
        let now = format!("{now:.6}");
        let acquired = current.map(|it| it.acquired.clone()).filter(|it| !it.is_empty()).unwrap_or_else(|| now.clone());
        let mut metadata = json!({ "name": self.lease.name, "namespace": self.lease.namespace });
        if let Some(current) = current {
            metadata["resourceVersion"] = json!(current.version);
        }
        json!({
            "apiVersion": kinds::LEASE.api_version(),
            "kind": kinds::LEASE.kind,
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.me,
                "leaseDurationSeconds": term_seconds,
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        })
    }
}

fn record(lease: &Value) -> Record {
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    let spec = &lease["spec"];
    Record {
        holder: text(&spec["holderIdentity"]),
        transitions: spec["leaseTransitions"].as_i64().and_then(|it| i32::try_from(it).ok()).unwrap_or(0),
        version: text(&lease["metadata"]["resourceVersion"]),
        acquired: text(&spec["acquireTime"]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Mono {
        Mono::from_start(Duration::from_secs(seconds))
    }

    fn held_by(holder: &str, version: &str) -> Option<Record> {
        Some(Record { holder: holder.to_owned(), transitions: 3, version: version.to_owned(), ..Record::default() })
    }

    #[test]
    fn a_lease_is_taken_only_after_it_stayed_the_same_for_its_whole_term() {
        let seen = observe(None, held_by("other", "1"), at(100));
        assert_eq!(decide("me", seen.as_ref(), at(100)), Step::Wait);
        let seen = observe(seen, held_by("other", "1"), at(110));
        assert_eq!(decide("me", seen.as_ref(), at(114)), Step::Wait);
        assert_eq!(decide("me", seen.as_ref(), at(115)), Step::Take { transitions: 4 });
        let seen = observe(seen, held_by("other", "2"), at(114));
        assert_eq!(decide("me", seen.as_ref(), at(128)), Step::Wait, "it was renewed");
    }

    #[test]
    fn a_free_lease_is_taken_at_once_and_ones_own_renewed() {
        assert_eq!(decide("me", None, at(1)), Step::Create);
        let free = observe(None, held_by("", "1"), at(1));
        assert_eq!(decide("me", free.as_ref(), at(1)), Step::Take { transitions: 4 });
        let own = observe(None, held_by("me", "1"), at(1));
        assert_eq!(decide("me", own.as_ref(), at(99)), Step::Renew { transitions: 3 });
    }

    #[test]
    fn a_process_that_stood_still_is_not_the_leader_any_more() {
        use nstance_core::time::Timestamp as Wall;
        struct Fixed(std::sync::Mutex<u64>);
        impl Clock for Fixed {
            fn now(&self) -> Wall {
                Wall::from_millis(0)
            }

            fn monotonic(&self) -> Mono {
                at(*self.0.lock().unwrap())
            }
        }
        let clock = Arc::new(Fixed(std::sync::Mutex::new(100)));
        let leadership = Leadership::standby(clock.clone());
        assert!(!leadership.is_leader());
        leadership.renew(at(100), RENEW_LIMIT, 4);
        assert!(leadership.is_leader() && leadership.transitions() == 4);
        *clock.0.lock().unwrap() = 110;
        assert!(!leadership.is_leader());
        leadership.lose();
        leadership.renew(at(110), RENEW_LIMIT, 4);
        assert!(!leadership.is_leader(), "a lost term does not come back");
    }
}
