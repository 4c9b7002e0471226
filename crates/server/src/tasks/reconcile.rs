//! A group's worker: look, plan, act, wait. Woken by events, by the clock, and every 30 s regardless, so that a lost
//! event costs half a minute and nothing more.
//!
//! Events come in bursts: one replacement alone is five of them. What somebody waits for wakes the worker at once; the
//! rest is planned together, a moment after the last pass at the latest.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    check::check,
    group::Desired,
    ids::GroupRef,
    instance::{CreateReason, Health, Phase},
    plan::{Action, Hold, HoldKind, Plan, counts},
    snapshot::{InstanceView, Snapshot},
    time::Timestamp,
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    events::{Reason, Tell},
    exec,
    metrics::hosts::Sizes,
    service::health,
    tasks::{rollouts, watch},
    term::Term,
};

const RESYNC: Duration = Duration::from_secs(30);

/// While nothing may be done, what is due is looked at no oftener than this.
const STALLED: Duration = Duration::from_millis(500);

/// Between two passes, unless somebody hurries …
const PACE: Duration = Duration::from_millis(20);
/// … and between two hurried ones: of many machines that die together the second to the last are planned together.
const BREATH: Duration = Duration::from_millis(3);

/// However many hurry, after this time everything else has its turn.
const LONGEST_HURRY: Duration = Duration::from_millis(250);

/// Wakes a worker.
#[derive(Default)]
pub struct Bell {
    rung: Notify,
    hurried: Notify,
    hurries: AtomicBool,
}

impl Bell {
    /// Something changed.
    pub fn ring(&self) {
        self.rung.notify_one();
    }

    /// Something changed that cannot wait: a machine is dead, or about to be.
    pub fn hurry(&self) {
        self.hurries.store(true, Ordering::Release);
        self.hurried.notify_one();
        self.rung.notify_one();
    }

    /// Resolves when it was rung, and answers whether somebody hurries. Not sooner after the last pass than is good; the
    /// first in a hurry does not wait at all.
    async fn next(&self, passed: Instant, hurried: bool) -> bool {
        self.rung.notified().await;
        // Whoever is ready goes first: what came together is planned together.
        tokio::task::yield_now().await;
        loop {
            let hurries = self.hurries.load(Ordering::Acquire);
            let earliest = match (hurries, hurried) {
                (true, false) => passed,
                (true, true) => passed + BREATH,
                (false, _) => passed + PACE,
            };
            if earliest <= Instant::now() {
                self.hurries.store(false, Ordering::Release);
                return hurries;
            }
            tokio::select! {
                biased;
                () = self.hurried.notified(), if !hurries => {}
                () = tokio::time::sleep_until(earliest) => {}
            }
        }
    }
}

pub async fn work(term: Arc<Term>, group: GroupRef, bell: Arc<Bell>) {
    let token = term.tasks.token().clone();
    let mut hurries = false;
    // Since when everything else waits for those who hurry.
    let mut waits: Option<Instant> = None;
    loop {
        let patient = waits.is_none_or(|since| since.elapsed() < LONGEST_HURRY);
        let next = if hurries && patient && hurry(&term, &group) {
            waits.get_or_insert_with(Instant::now);
            bell.ring();
            PACE
        } else {
            waits = None;
            pass(&term, &group)
        };
        let now = Instant::now();
        hurries = tokio::select! {
            biased;
            () = token.cancelled() => return,
            hurries = bell.next(now, hurries) => hurries,
            () = tokio::time::sleep(next) => false,
        };
    }
}

/// A pass in a hurry: replacements for the dead and the doomed are begun at once, and everything else is left to the
/// next pass: nobody goes by this one, so watchers need not be told before it who is ill, and for rotations a glance
/// sees too little. Answers whether anything was begun.
fn hurry(term: &Arc<Term>, group: &GroupRef) -> bool {
    let (.., mut plan) = decide(term, group, || term.world.glance(group));
    plan.actions.retain(|planned| matches!(planned.action, Action::Create { reason: CreateReason::Replacement }));
    if plan.actions.is_empty() || !term.guard.is_open() {
        return false;
    }
    for planned in plan.actions {
        exec::start(term, planned);
    }
    true
}

/// Looks and plans.
fn decide(term: &Term, group: &GroupRef, look: impl FnOnce() -> (Snapshot, Timestamp)) -> (Snapshot, Timestamp, Plan) {
    let started = term.world.clock().monotonic();
    let (snapshot, now) = look();
    let plan = (term.shared.planner)(&snapshot, now);
    for violation in check(&snapshot, &plan, now) {
        // The checker is a second opinion: it is told, not obeyed, for either of the two may be wrong.
        term.shared.metrics.plan_violations.inc();
        tracing::error!(%group, ?violation, "plan breaks an invariant, please report this");
    }
    term.shared.metrics.plan_seconds.observe(term.world.clock().monotonic().since(started).as_secs_f64());
    (snapshot, now, plan)
}

/// One whole pass. Synchronous: effects run beside it, each marked in the world before this returns, so that the next
/// pass counts them. Answers how long to wait without an event.
fn pass(term: &Arc<Term>, group: &GroupRef) -> Duration {
    let due = term.world.take_due(group);
    term.observer.look(due.look);
    health::tell_left(term, group, due.left);
    let (snapshot, now, mut plan) = decide(term, group, || term.world.snapshot(Some(group)));
    // Without the lease nothing would be let through; beginning it all the same only makes noise, and intents that
    // never were. Whoever renews the lease wakes us.
    let stalled = !term.guard.is_open();
    if stalled && !plan.actions.is_empty() {
        plan.actions.clear();
        plan.holds.push(Hold {
            kind: HoldKind::LeaseStalled,
            group: group.clone(),
            instance: None,
            message: "the lease is not renewed; effects are stopped until it is".to_owned(),
            since: None,
            until: None,
        });
    }
    let creates = plan.actions.iter().any(|planned| matches!(planned.action, Action::Create { .. }));
    // Watchers are told who is ill before it goes.
    term.world.lock().judge_health(group, now);
    for planned in plan.actions {
        exec::start(term, planned);
    }
    watch::passed(term, group);
    // People are told once the effects are on their way.
    tell_holds(term, group, &plan.holds);
    tell_silence(term, group, &snapshot);
    rollouts::tell(term, group, &snapshot, now);
    show(term, group, &snapshot, now);
    if !creates && plan.holds.is_empty() {
        // Nobody will be replaced for what was lost so far: a later loss must not be timed from an older one.
        if let Some(it) = term.world.lock().groups.get_mut(group) {
            it.losses.clear();
        }
    }
    let wake_at = [plan.wake_at, term.world.next_look(group)].into_iter().flatten().min();
    // Never zero: a moment that is already past was acted on in this very pass.
    let next = wake_at.map_or(RESYNC, |at| at.since(now)).clamp(Duration::from_millis(1), RESYNC);
    if stalled { next.max(STALLED) } else { next }
}

/// Tells which holds began and which ended since the last pass.
fn tell_holds(term: &Term, group: &GroupRef, holds: &[Hold]) {
    let before = {
        let mut state = term.world.lock();
        // Gone for good: nobody is left to tell of.
        let Some(it) = state.groups.get_mut(group) else { return };
        std::mem::replace(&mut it.holds, holds.to_vec())
    };
    let same = |a: &Hold, b: &Hold| a.kind == b.kind && a.instance == b.instance;
    for hold in holds.iter().filter(|it| hold_is_told(it) && !before.iter().any(|old| same(it, old))) {
        let message = format!("{}: {}", hold.kind.as_str(), hold.message);
        term.tell(match hold.instance {
            Some(instance) => Tell::instance(Reason::HoldStarted, group, instance, message),
            None => Tell::group(Reason::HoldStarted, group, message),
        });
    }
    for hold in before.iter().filter(|it| hold_is_told(it) && !holds.iter().any(|new| same(it, new))) {
        term.tell(Tell::group(Reason::HoldCleared, group, hold.kind.as_str()));
    }
}

/// Tells once of every agent that fell silent. What follows is the planner's for members, and the owner's for on-demand
/// instances.
fn tell_silence(term: &Term, group: &GroupRef, snapshot: &Snapshot) {
    let Some(view) = snapshot.groups.get(group) else { return };
    let is_silent = |it: &InstanceView| {
        matches!(it.health, Health::Silent { .. }) && matches!(it.phase, Phase::Provisioning | Phase::Running)
    };
    let mut began = Vec::new();
    {
        let mut state = term.world.lock();
        for (id, it) in &view.instances {
            let Some(entry) = state.entries.get_mut(id) else { continue };
            let silent = is_silent(it);
            if silent && !entry.link.silence_told {
                began.push(*id);
            }
            entry.link.silence_told = silent;
        }
    }
    for id in began {
        let message = "no report for three intervals";
        term.tell(Tell::instance(Reason::InstanceSilent, group, id, message));
    }
}

/// Holds that are the ordinary course of things would only drown the others.
fn hold_is_told(hold: &Hold) -> bool {
    !matches!(hold.kind, HoldKind::InProgress | HoldKind::WaitingForDrain | HoldKind::WaitingForReplacement)
}

/// Notes how large the group is, for whoever asks.
fn show(term: &Term, group: &GroupRef, snapshot: &Snapshot, now: Timestamp) {
    let Some(view) = snapshot.groups.get(group) else { return };
    let counts = counts(&snapshot.shard, group, view, now);
    let desired = match view.desired {
        Desired::Known(size) => Some(size),
        Desired::Tombstoned => Some(0),
        Desired::Unknown => None,
    };
    if let Some(it) = term.world.lock().groups.get_mut(group) {
        it.shown = Some(Sizes { desired, actual: counts.actual, ready: counts.ready });
    }
}
