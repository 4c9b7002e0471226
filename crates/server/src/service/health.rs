//! What agents say, and the moment they stop.
//!
//! A report stream is a [`Session`]; dropping it, for whatever reason, marks the agent lost, starts the look at its VM
//! and wakes its group. Nothing here decides: facts in, wake-ups out.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::Health,
    time::Timestamp,
};
use nstance_proto::v1;
use tokio_util::sync::CancellationToken;

use super::{files, report};
use crate::{
    events::{Reason, Tell},
    grpc::status::cut,
    term::Term,
    world::{Notice, Pair, StreamId, is_terminal},
};

/// An agent that announced its own restart is expected back for this long before anybody looks.
const LEAVE_GRACE: Duration = Duration::from_secs(30);
/// What is kept of the name an agent gives a notice.
const MAX_NOTICE_ID: usize = 64;
/// What is kept of the hash an agent says it has. Ours are shorter, and whoever says a longer one has none of ours.
const MAX_HASH: usize = 128;
/// How often the deadline of a notice may be brought forward. No cloud does it twice; a machine that did it with every
/// report would cost us a write and an event each time, and its neighbours their place in the log of events.
const MAX_SHORTENED: u8 = 8;
/// What is logged of the name of a notice that nobody knows.
const MAX_ACTION: usize = 32;

/// A stream that ended on a living connection may be reopened for this long before its agent counts as lost.
const REOPEN: Duration = Duration::from_secs(2);

/// One open report stream.
pub struct Session {
    stream: Stream,
    /// A newer stream of the same instance took over.
    pub superseded: CancellationToken,
    /// The instance is gone.
    pub cut: CancellationToken,
    /// The connection ended.
    closed: CancellationToken,
}

/// Which stream of which instance.
#[derive(Clone)]
struct Stream {
    term: Arc<Term>,
    group: GroupRef,
    instance: InstanceId,
    id: StreamId,
}

impl Session {
    /// Opens the stream of an instance on a connection that tells its end by `closed`, superseding an older one. `None`
    /// if the instance is not known any more.
    pub fn open(term: &Arc<Term>, instance: InstanceId, closed: CancellationToken) -> Option<Self> {
        let now = term.now();
        let superseded = CancellationToken::new();
        let mut state = term.world.lock();
        let id = StreamId(state.next_stream);
        state.next_stream += 1;
        let health = state.entries.get(&instance).map(|entry| entry.health(&state, now));
        let entry = state.entries.get_mut(&instance)?;
        let group = entry.instance().group.clone();
        let was_open = entry.link.stream.replace(id).is_some();
        if let Some(older) = entry.link.superseded.replace(superseded.clone()) {
            older.cancel();
        }
        entry.link.last_seen = now;
        entry.link.lost_at = None;
        entry.link.lost_at_mono = None;
        entry.describe.tries = 0;
        if entry.link.notice.as_ref().is_some_and(|notice| matches!(notice.action.as_str(), "leave" | "shutdown")) {
            entry.link.notice = None;
        }
        let cut = entry.cut.clone();
        state.lost.remove(&instance);
        state.n_connected += usize::from(!was_open);
        drop(state);
        if !was_open {
            term.shared.metrics.agents_connected.inc();
        }
        if matches!(health, Some(Health::Lost { .. } | Health::Silent { .. })) {
            term.tell(Tell::instance(Reason::InstanceRecovered, &group, instance, "agent is back"));
            term.wake(&group);
        }
        let stream = Stream { term: term.clone(), group, instance, id };
        Some(Self { stream, superseded, cut, closed })
    }

    /// Takes a report in. Whatever is urgent comes first; a bad field never ends the stream.
    pub fn report(&self, report: &v1::HealthReportRequest) {
        let Stream { term, group, instance, id } = &self.stream;
        let (now, mono) = (term.now(), term.world.clock().monotonic());
        term.shared.metrics.reports.inc();
        let mut wake = false;
        let mut told = None;
        let mut look = None;
        let delivery;
        {
            let mut state = term.world.lock();
            let Some(entry) = state.entries.get_mut(instance) else { return };
            let link = &mut entry.link;
            if link.stream != Some(*id) {
                return;
            }
            let mut taken = false;
            if let Some(notice) = &report.termination_notice {
                let was_taken = link.notice.as_ref().is_some_and(|old| is_terminal(&old.action));
                told = note(&mut link.notice, notice, now);
                wake |= told.is_some();
                taken = told.is_some() && is_terminal(&notice.action) && !was_taken;
            }
            // The first report makes a member ready; one after silence brings it back.
            let late = !link.interval.is_zero() && link.interval.saturating_mul(3) <= now.since(link.last_seen);
            wake |= !link.reported || late;
            link.reported = true;
            link.last_seen = now;
            link.interval = Duration::from_millis(u64::from(report.interval_ms));
            if !report.config_hash.is_empty() {
                link.config_hash = cut(&report.config_hash, MAX_HASH);
            }
            delivery = entry.delivery.clone();
            // A host on its way down is looked at from now on, again and again, while its agent can still speak.
            let shuts_down = told.is_some() && link.notice.as_ref().is_some_and(|notice| notice.action == "shutdown");
            if shuts_down && !entry.describe.in_flight {
                entry.describe.in_flight = true;
                entry.describe.due = None;
                entry.describe.tries = 0;
                look = Some(entry.vm_ref());
            }
            if taken {
                let was_member = entry.is_member();
                let it = entry.instance();
                let pair = Pair { subnet: it.subnet.clone(), instance_type: it.instance_type.clone() };
                state.places.taken(pair, now);
                // Nobody replaces the others: what is waited for would be measured from a loss that is none.
                if was_member {
                    state.group(group).losses.push_back(mono);
                }
            }
        }
        term.observer.look(look.into_iter().collect());
        // People are told while the worker is on its way.
        if told.is_some() {
            term.hurry(group);
        } else if wake {
            term.wake(group);
        }
        if let Some((reason, message)) = told {
            term.tell(Tell::instance(reason, group, *instance, message));
        }
        files::reported(term, group, *instance, &delivery, report);
        report::take(term, (group, *instance, *id), report, now);
    }
}

impl Drop for Session {
    /// The stream is over, for whatever reason; also its handler being dropped in the middle is one. A connection that
    /// still stands gives the agent a moment to open the next stream.
    fn drop(&mut self) {
        let stream = self.stream.clone();
        report::flush(&stream.term, stream.instance);
        if self.closed.is_cancelled() || stream.term.tasks.is_stopping() {
            stream.end();
            return;
        }
        let (closed, stop) = (self.closed.clone(), stream.term.tasks.token().clone());
        let scope = stream.term.tasks.clone();
        scope.spawn("reopen", async move {
            tokio::select! {
                biased;
                () = closed.cancelled() => {}
                () = stop.cancelled() => {}
                () = tokio::time::sleep(REOPEN) => {}
            }
            stream.end();
        });
    }
}

impl Stream {
    /// Marks the agent lost, unless a newer stream took over or the term ends anyway.
    fn end(self) {
        let Self { term, group, instance, id } = self;
        let (now, mono) = (term.now(), term.world.clock().monotonic());
        let (look, leaving) = {
            let mut state = term.world.lock();
            let current = state.entries.get(&instance).map(|entry| entry.link.stream == Some(id));
            if current == Some(false) {
                return; // superseded: the newer one counts now
            }
            state.n_connected = state.n_connected.saturating_sub(1);
            let Some(entry) = state.entries.get_mut(&instance) else {
                term.shared.metrics.agents_connected.dec();
                return;
            };
            entry.link.stream = None;
            entry.link.superseded = None;
            let leaving = entry.link.notice.as_ref().is_some_and(|notice| notice.action == "leave");
            entry.link.lost_at = Some(if leaving { now.plus(LEAVE_GRACE) } else { now });
            entry.link.lost_at_mono = (!leaving).then_some(mono);
            let look = if leaving || entry.describe.in_flight {
                None
            } else {
                entry.describe.in_flight = true;
                entry.describe.due = None;
                entry.describe.tries = 0;
                Some(entry.vm_ref())
            };
            if !entry.is_over() {
                state.lost.insert(instance);
            }
            (look, leaving)
        };
        term.shared.metrics.agents_connected.dec();
        if term.tasks.is_stopping() {
            return;
        }
        // The look first: an event is told to people, who are slower than a provider.
        term.observer.look(look.into_iter().collect());
        if !leaving {
            term.tell(Tell::instance(Reason::InstanceLost, &group, instance, "report stream ended"));
        }
        term.wake(&group);
    }
}

/// Tells of agents that did not come back from a restart they announced, whoever saw their VM since.
pub fn tell_left(term: &Term, group: &GroupRef, left: Vec<InstanceId>) {
    for instance in left {
        let message = "agent did not come back from its restart";
        term.tell(Tell::instance(Reason::InstanceLost, group, instance, message));
    }
}

/// How much a notice weighs: advice, an agent that goes, a host that goes, a machine that is taken. `None` is not known.
fn weight(action: &str) -> Option<u8> {
    match action {
        "rebalance" | "maintenance" => Some(0),
        "leave" => Some(1),
        "shutdown" => Some(2),
        action => is_terminal(action).then_some(3),
    }
}

/// Notes a notice. Only a weightier one takes the place of another: a machine that is about to be taken is not saved by
/// advice, nor by a word of its own, and whoever says two things in turn is heard once. A repeat changes nothing, an
/// earlier deadline shortens, in whatever words it comes.
fn note(noted: &mut Option<Notice>, notice: &v1::TerminationNotice, now: Timestamp) -> Option<(Reason, String)> {
    let Some(new_weight) = weight(&notice.action) else {
        tracing::warn!(action = cut(&notice.action, MAX_ACTION), "notice of an unknown kind ignored");
        return None;
    };
    let time =
        |told| report::at(told).map(|at| Timestamp::from_millis(at.seconds * 1000 + i64::from(at.nanos) / 1_000_000));
    let new = Notice {
        action: notice.action.clone(),
        at: now,
        // It ends up in the record. What is past is due now, however long ago a machine says it was.
        deadline: time(notice.deadline).map(|at| at.max(now)),
        detected_at: time(notice.detected_at),
        id: notice.notice_id.chars().take(MAX_NOTICE_ID).collect(),
        n_shortened: 0,
    };
    if let Some(old) = noted
        && Some(new_weight) <= weight(&old.action)
    {
        let may_shorten = Some(new_weight) == weight(&old.action) && old.n_shortened < MAX_SHORTENED;
        let earlier = new.due_at().filter(|at| may_shorten && old.due_at().is_none_or(|before| *at < before))?;
        old.deadline = Some(earlier);
        old.n_shortened += 1;
        return Some((Reason::TerminationNotice, format!("{}, earlier than told before", new.action)));
    }
    *noted = Some(new);
    let reason = match notice.action.as_str() {
        "shutdown" | "leave" => Reason::HostShutdown,
        _ => Reason::TerminationNotice,
    };
    Some((reason, notice.action.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_time_that_can_be_and_never_past() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        for (seconds, nanos, expected) in [
            (1_800_000_020, 5_000_000, Some(1_800_000_020_005)),
            (1_700_000_000, 0, Some(now.as_millis())),
            (i64::MIN, 0, None),
            (i64::MAX, 0, None),
            (1_800_000_020, -1, None),
        ] {
            let time = Some(prost_types::Timestamp { seconds, nanos });
            let notice = v1::TerminationNotice {
                action: "terminate".into(),
                deadline: time,
                detected_at: time,
                ..Default::default()
            };
            let mut noted = None;
            note(&mut noted, &notice, now);
            let noted = noted.unwrap();
            assert_eq!(noted.deadline.map(Timestamp::as_millis), expected, "{seconds}");
            assert_eq!(noted.detected_at.is_some(), expected.is_some(), "{seconds}");
        }
    }

    #[test]
    fn advice_does_not_take_the_place_of_an_order() {
        let mut noted = None;
        let mut told = |action: &str| {
            let notice = v1::TerminationNotice { action: action.into(), ..Default::default() };
            let told = note(&mut noted, &notice, Timestamp::EPOCH).is_some();
            (told, noted.as_ref().map(|it| it.action.clone()).unwrap_or_default())
        };
        for (action, expected) in [
            ("rebalance", (true, "rebalance")),
            ("maintenance", (false, "rebalance")),
            ("leave", (true, "leave")),
            ("shutdown", (true, "shutdown")),
            ("leave", (false, "shutdown")),
            ("maintenance", (false, "shutdown")),
            ("terminate", (true, "terminate")),
            ("rebalance", (false, "terminate")),
            ("maintenance", (false, "terminate")),
            ("shutdown", (false, "terminate")),
            ("leave", (false, "terminate")),
            ("stop", (false, "terminate")),
            ("nonsense", (false, "terminate")),
        ] {
            assert_eq!(told(action), (expected.0, expected.1.to_owned()), "{action}");
        }
    }

    #[test]
    fn a_machine_that_brings_its_end_forward_all_the_time_is_not_listened_to_for_ever() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        let mut noted = None;
        let told = (0..1000).filter(|n| {
            let deadline = Some(prost_types::Timestamp { seconds: 1_800_100_000 - n, nanos: 0 });
            let notice = v1::TerminationNotice { action: "terminate".into(), deadline, ..Default::default() };
            note(&mut noted, &notice, now).is_some()
        });
        assert_eq!(told.count(), 1 + usize::from(MAX_SHORTENED));
    }

    #[test]
    fn the_earliest_deadline_stays_whatever_is_said_in_between() {
        let now = Timestamp::from_millis(1_800_000_000_000);
        let mut noted = None;
        for (action, seconds, news, due) in [
            ("terminate", Some(120), true, Some(120)),
            // Google gives half a minute and does not say so.
            ("preempt", None, true, Some(25)),
            ("terminate", Some(120), false, Some(25)),
            ("terminate", Some(10), true, Some(10)),
            ("preempt", None, false, Some(10)),
            ("terminate", Some(10), false, Some(10)),
            // A deadline of something that was taken over by what is worse says nothing of that.
            ("shutdown", Some(5), false, Some(10)),
        ] {
            let deadline = seconds.map(|it| prost_types::Timestamp { seconds: 1_800_000_000 + it, nanos: 0 });
            let notice = v1::TerminationNotice { action: action.into(), deadline, ..Default::default() };
            assert_eq!(note(&mut noted, &notice, now).is_some(), news, "{action} {seconds:?}");
            let left = noted.as_ref().and_then(Notice::due_at).map(|at| at.since(now).as_secs());
            assert_eq!(left, due, "{action} {seconds:?}");
        }
    }
}
