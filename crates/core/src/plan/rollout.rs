//! Rotation: one healthy member after another makes room for a newer one, and the group never gets smaller by it.
//!
//! Nothing about a rotation is remembered. Its cause is read from the members each time (an age, a mark, a drift, an
//! advice), its progress from the intent of the youngest (`rotation`); so it survives a failover, and if the cause
//! vanishes midway, what is left is ordinary surplus.

use super::{
    DeleteReason, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    drain::{self, SendOff},
    expiry,
    members::{Crew, Entry, Standing},
    shrink::Drains,
};
use crate::{
    budget::{self, Rollout},
    instance::{CreateReason, DrainReason, Health, Phase},
};

/// The member that shall be rotated, and why.
#[derive(Clone, Copy)]
pub(super) struct Cause<'a> {
    pub(super) entry: Entry<'a>,
    pub(super) urgency: Urgency,
    pub(super) reason: DrainReason,
}

impl Cause<'_> {
    /// Forced expiry and a person's word do not wait for a quiet group; the others do.
    fn is_pressing(&self) -> bool {
        self.urgency.priority < Priority::Rotation
    }

    /// When a drift began is not known, so it counts as news of this moment: whatever has a date goes before it.
    fn key(&self) -> impl Ord + use<> {
        (self.urgency.priority, self.urgency.since, self.entry.it.created_at, self.entry.id)
    }
}

fn cause_of<'a>(scene: Scene<'_>, entry: Entry<'a>) -> Option<Cause<'a>> {
    let Entry { id, it, .. } = entry;
    let expired = expiry::cause(scene, &entry);
    let marked = it.replace_marked_at.map(|at| (Urgency::new(Priority::Requested, at, id), DrainReason::Replaced));
    let advised = it.advised_at.map(|at| (Urgency::new(Priority::Rotation, at, id), DrainReason::Maintenance));
    let drifted =
        scene.is_drifted(it).then(|| (Urgency::new(Priority::Rotation, scene.now, id), DrainReason::ConfigDrift));
    [expired, marked, advised, drifted]
        .into_iter()
        .flatten()
        .min()
        .map(|(urgency, reason)| Cause { entry, urgency, reason })
        // One that the brake holds is not known to be ill, but neither is it known to be well.
        .filter(|cause| cause.is_pressing() || !scene.is_held(id))
}

/// The most urgent cause among the known members that stay. The unseen are left alone.
fn most_urgent<'a>(scene: Scene<'_>, crew: &Crew<'a>) -> Option<Cause<'a>> {
    crew.known().filter_map(|entry| cause_of(scene, entry)).min_by_key(Cause::key)
}

/// The cause whose rotation has its extra member already.
pub(super) fn under_way<'a>(scene: Scene<'_>, crew: &Crew<'a>, size: u32) -> Option<Cause<'a>> {
    let cause = most_urgent(scene, crew)?;
    let allowed = cause.is_pressing() || budget::rollout(scene.view, scene.now) == Rollout::Free;
    let has_surge = size < crew.n_members() && crew.members().any(|entry| is_for(&cause, &entry));
    (allowed && has_surge).then_some(cause)
}

/// Made for a rotation, and not before the cause itself.
fn is_for(cause: &Cause<'_>, entry: &Entry<'_>) -> bool {
    entry.it.reason == CreateReason::Rotation
        && entry.id != cause.entry.id
        && cause.entry.it.created_at <= entry.it.created_at
}

fn age_key(entry: &Entry<'_>) -> impl Ord + use<> {
    (entry.it.created_at, entry.id)
}

/// Ready, and both witnesses say so now.
fn is_surely_ready(scene: Scene<'_>, entry: &Entry<'_>) -> bool {
    entry.standing == Standing::Known && entry.it.health == Health::Healthy && scene.is_ready(entry.it)
}

/// Drains the cause once its successor stands, or says what is missing.
pub(super) fn advance(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &mut Crew<'_>, size: u32, drains: &mut Drains) {
    if let Some(cause) = given_up(scene, draft, crew, size) {
        crew.vacated.push(cause.urgency);
        drain_cause(scene, draft, crew, &cause, drains);
        return;
    }
    let Some(cause) = under_way(scene, crew, size) else { return };
    let others: Vec<_> = crew.members().filter(|entry| entry.id != cause.entry.id).collect();
    let n_ready = others.iter().filter(|entry| is_surely_ready(scene, entry)).count();
    let enough = super::members::count(n_ready) >= size;
    let newest = others.iter().map(|entry| entry.it.created_at).max();
    let mut youngest = others.iter().filter(|entry| Some(entry.it.created_at) == newest);
    let youngest_is_ready = newest.is_some() && youngest.all(|entry| is_surely_ready(scene, entry));
    if cause.entry.it.busy.is_some() {
        draft.hold(HoldKind::InProgress, "rotates once the effect under way has ended").instance = Some(cause.entry.id);
    } else if enough || (cause.is_pressing() && youngest_is_ready) {
        drain_cause(scene, draft, crew, &cause, drains);
    } else {
        let hold = draft.hold(
            HoldKind::WaitingForReplacement,
            format!("{} waits: {n_ready} of {size} other members are ready", cause.reason.as_str()),
        );
        hold.instance = Some(cause.entry.id);
        hold.since = Some(cause.urgency.since);
    }
}

/// One past its forced age whose replacement failed twice: it goes without. One at a time, and only from a group that
/// is otherwise complete and settled.
fn given_up<'a>(scene: Scene<'_>, draft: &Draft<'_>, crew: &Crew<'a>, size: u32) -> Option<Cause<'a>> {
    let n_failed = scene.view.failures.replacement_in_a_row;
    if n_failed < budget::FORCED_WITHOUT_REPLACEMENT_AFTER || crew.n_members() < size {
        return None;
    }
    let settled = crew.members().all(|entry| entry.it.phase == Phase::Running);
    let draining = crew
        .with(Standing::Draining)
        .filter(|entry| !draft.is_deleting(entry.id))
        .any(|entry| entry.it.drain.as_ref().is_some_and(|drain| drain.reason == DrainReason::ForcedExpiry));
    most_urgent(scene, crew).filter(|cause| {
        cause.reason == DrainReason::ForcedExpiry && settled && !draining && cause.entry.it.busy.is_none()
    })
}

fn drain_cause(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &mut Crew<'_>, cause: &Cause<'_>, drains: &mut Drains) {
    let Entry { id, it, .. } = cause.entry;
    let replacement = crew
        .members()
        .filter(|entry| is_for(cause, entry) && is_surely_ready(scene, entry))
        .max_by_key(|entry| age_key(entry))
        .map(|entry| entry.id);
    crew.leave(id);
    let off =
        SendOff { reason: cause.reason, urgency: cause.urgency, unused: DeleteReason::NeverRegistered, replacement };
    drains.note(drain::send_off(scene, draft, id, it, off));
}

/// What the group looks like once this plan is done, as far as a new rotation cares.
pub(super) struct After {
    /// Slots that this plan fills by creates, or cannot fill.
    pub(super) n_open: u32,
    /// Members that come back from their drain.
    pub(super) cancelled: Vec<crate::ids::InstanceId>,
    pub(super) drains: Drains,
}

/// The cause for which the extra member may be made now, if the group stands at its size or below.
pub(super) fn start<'a>(
    scene: Scene<'_>,
    draft: &mut Draft<'_>,
    crew: &Crew<'a>,
    size: u32,
    after: &After,
) -> Option<Cause<'a>> {
    let cause = most_urgent(scene, crew)?;
    let n_members = crew.n_filled() + super::members::count(after.cancelled.len());
    if size < n_members {
        return None; // either it is under way already, or there is surplus to get rid of first
    }
    let since = Some(cause.urgency.since);
    let instance = Some(cause.entry.id);
    if !cause.is_pressing() {
        let (kind, until) = match budget::rollout(scene.view, scene.now) {
            Rollout::Free => (None, None),
            Rollout::Paused => (Some(HoldKind::RolloutPaused), None),
            Rollout::Failing { until } => (Some(HoldKind::RolloutFailing), until),
        };
        if let Some(kind) = kind {
            let hold = draft.hold(kind, format!("{} waits for the rollout", cause.reason.as_str()));
            (hold.instance, hold.since, hold.until) = (instance, since, until);
            return None;
        }
    }
    if let Some(until) = scene.view.failures.replacement_retry_at.filter(|at| !scene.is_past(*at)) {
        let hold = draft.hold(HoldKind::BackingOff, "the last replacement failed");
        (hold.instance, hold.since, hold.until) = (instance, since, Some(until));
        return None;
    }
    if cause.is_pressing() {
        return Some(cause);
    }
    if let Some((kind, message)) = unrest(scene, draft, crew, after) {
        let hold = draft.hold(kind, format!("{} waits: {message}", cause.reason.as_str()));
        (hold.instance, hold.since) = (instance, since);
        return None;
    }
    Some(cause)
}

/// What speaks against a rotation that can wait.
fn unrest(scene: Scene<'_>, draft: &Draft<'_>, crew: &Crew<'_>, after: &After) -> Option<(HoldKind, &'static str)> {
    let drains_on =
        crew.with(Standing::Draining).any(|entry| !after.cancelled.contains(&entry.id) && !draft.is_deleting(entry.id));
    if drains_on || after.drains == Drains::Somebody {
        return Some((HoldKind::WaitingForDrain, "a member is draining"));
    }
    let ill = crew
        .members()
        .any(|entry| matches!(entry.it.health, Health::Lost { .. } | Health::Silent { .. }) || scene.is_held(entry.id));
    // The dead that this plan deletes are past; the busy ones among them are not.
    let lost = crew.with(Standing::Silent).next().is_some()
        || [Standing::Dead, Standing::Noticed].iter().any(|it| crew.with(*it).any(|entry| entry.it.busy.is_some()));
    if ill || lost {
        return Some((HoldKind::WaitingForReplacement, "a member is unhealthy"));
    }
    let coming = crew.members().any(|entry| entry.it.phase != Phase::Running);
    if coming || 0 < after.n_open || 0 < crew.n_lingering() {
        return Some((HoldKind::WaitingForReplacement, "a member is still coming up"));
    }
    (0 < crew.n_uncertain()).then_some((HoldKind::UncertainMembers, "a member cannot be seen"))
}
