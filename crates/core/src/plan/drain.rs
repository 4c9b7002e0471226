//! The way out: one path for every removal, from the first word to the forgotten record.
//!
//! A VM that may be in use is drained first, whatever the cause; only the provider's proof that it is dead, or that it
//! never came into use, lets it skip the wait. What a drain or a delete began is finished from durable facts, so it goes
//! on under the next leader as if nothing had happened.

use super::{
    Action, DeleteReason, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    members::{Standing, may_be_in_use},
};
use crate::{
    ids::InstanceId,
    instance::{DrainReason, Health, LbState, Seen},
    snapshot::{DrainView, InstanceView, ProviderView},
    time::Timestamp,
};

/// Why, how urgently and until when at most an instance that may be in use is drained.
pub(super) struct SendOff {
    pub(super) reason: DrainReason,
    pub(super) urgency: Urgency,
    /// The reason to give if it never came into use.
    pub(super) unused: DeleteReason,
    pub(super) replacement: Option<InstanceId>,
}

/// Whether the instance begins to drain, or is deleted because there is nothing to drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SentOff {
    Draining,
    Deleting,
}

pub(super) fn send_off(
    scene: Scene<'_>,
    draft: &mut Draft<'_>,
    id: InstanceId,
    it: &InstanceView,
    off: SendOff,
) -> SentOff {
    if !may_be_in_use(it) {
        draft.act(off.urgency, Action::Delete { instance: id, reason: off.unused });
        return SentOff::Deleting;
    }
    let by_timeout = scene.now.plus(scene.view.drain_timeout);
    // Who is about to be taken away has no longer than its notice says.
    let delete_at = match it.health {
        Health::Terminating { deadline: Some(deadline), .. } => deadline.min(by_timeout),
        _ => by_timeout,
    };
    draft.act(
        off.urgency,
        Action::StartDrain { instance: id, reason: off.reason, delete_at, replacement: off.replacement },
    );
    SentOff::Draining
}

/// The priority of what follows from a drain is that of its cause.
pub(super) fn priority(reason: DrainReason) -> Priority {
    match reason {
        DrainReason::SpotTerminating => Priority::TerminationNotice,
        DrainReason::ScaleDown | DrainReason::GroupDeleted => Priority::ScaleDown,
        DrainReason::ForcedExpiry => Priority::ForcedExpiry,
        DrainReason::Unhealthy => Priority::Unhealthy,
        DrainReason::Requested | DrainReason::Replaced => Priority::Requested,
        DrainReason::ConfigDrift
        | DrainReason::EligibleExpiry
        | DrainReason::OndemandExpiry
        | DrainReason::Maintenance => Priority::Rotation,
    }
}

/// Goes on with every removal that has begun, managed or not.
pub(super) fn finish(scene: Scene<'_>, draft: &mut Draft<'_>) {
    for (id, it) in &scene.view.instances {
        if it.busy.is_some() {
            continue;
        }
        match scene.standing(*id, it) {
            Standing::Draining => finish_drain(scene, draft, *id, it),
            Standing::Deleting => finish_delete(scene, draft, *id, it),
            Standing::Deleted => forget(scene, draft, *id, it.delete_gone_at.or(it.delete_requested_at), it),
            Standing::Failed if is_there(it.seen) && !may_be_in_use(it) => end_unwanted(scene, draft, *id, it),
            Standing::Failed => forget(scene, draft, *id, it.create_failed_at, it),
            Standing::Known | Standing::Uncertain | Standing::Dead | Standing::Silent | Standing::Noticed => {}
        }
    }
}

fn finish_drain(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView) {
    let Some(drain) = &it.drain else {
        // Facts contradict each other; waiting harms nobody, and a person can see it.
        draft.hold(HoldKind::RecordCorrupt, "draining without a drain in the record").instance = Some(id);
        return;
    };
    let urgency = Urgency::new(priority(drain.reason), drain.started_at, id);
    let is_over = scene.is_past(drain.delete_at);
    if !scene.is_complete() {
        draft.wake(drain.delete_at);
        return; // the group's hold says why; an acknowledgement under way is not lost to a failover
    }
    if scene.is_dead(it) {
        draft.act(urgency, Action::Delete { instance: id, reason: DeleteReason::Dead });
        return;
    }
    let is_out = it.load_balancers.values().all(|state| *state == LbState::Absent);
    if is_over || (drain.acked && is_out) {
        draft.act(urgency, Action::Delete { instance: id, reason: DeleteReason::Drained(drain.reason) });
        return;
    }
    if shorten(scene, draft, id, it, drain) {
        return;
    }
    let (kind, message) = if drain.acked {
        (HoldKind::WaitingForLb, "drained; waits to leave its load balancers")
    } else {
        (HoldKind::WaitingForDrain, "waits for its drain to be acknowledged")
    };
    let hold = draft.hold(kind, message);
    hold.instance = Some(id);
    hold.since = Some(drain.started_at);
    hold.until = Some(drain.delete_at);
}

/// A notice that leaves less time than the drain under way shortens it; nothing ever lengthens one.
fn shorten(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView, drain: &DrainView) -> bool {
    let Health::Terminating { noticed_at, deadline: Some(deadline) } = it.health else { return false };
    if drain.delete_at <= deadline {
        return false;
    }
    draft.act(
        Urgency::new(Priority::TerminationNotice, noticed_at, id),
        Action::StartDrain { instance: id, reason: drain.reason, delete_at: deadline, replacement: None },
    );
    draft.wake(deadline.max(scene.now));
    true
}

fn finish_delete(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView) {
    let since = it.delete_requested_at.unwrap_or(it.created_at);
    let why = it.drain.as_ref().map(|drain| drain.reason);
    let urgency = Urgency::new(why.map_or(Priority::Unhealthy, priority), since, id);
    if it.seen == Seen::Gone {
        draft.act(urgency, Action::MarkDeleted { instance: id });
        return;
    }
    if let ProviderView::Unavailable { since, message } = &scene.shard.provider {
        let hold = draft.hold(HoldKind::ProviderUnavailable, message.clone());
        hold.instance = Some(id);
        hold.since = Some(*since);
        return;
    }
    // The delete is durable, so repeating its call decides nothing: this needs no complete snapshot.
    let under_way = it.seen == Seen::Deleting && it.next_attempt_at.is_none();
    if !under_way && scene.is_due(it) {
        let reason = match why {
            Some(reason) => DeleteReason::Drained(reason),
            None if scene.is_dead(it) => DeleteReason::Dead,
            None if !may_be_in_use(it) => DeleteReason::NeverRegistered,
            None => DeleteReason::Drained(DrainReason::Requested),
        };
        draft.act(urgency, Action::Delete { instance: id, reason });
        return;
    }
    let hold = draft.hold(HoldKind::InProgress, "waits for the provider to prove that it is gone");
    hold.instance = Some(id);
    hold.since = it.delete_requested_at;
    hold.until = it.next_attempt_at;
}

/// Whether the provider shows a VM that somebody pays for.
fn is_there(seen: Seen) -> bool {
    match seen {
        Seen::Pending
        | Seen::Running
        | Seen::Stopping
        | Seen::Stopped
        | Seen::Suspended
        | Seen::Repairing
        | Seen::HostDown => true,
        Seen::NotAsked | Seen::Unknown | Seen::Deleting | Seen::Gone => false,
    }
}

/// The record says that the create failed, and there is a VM all the same: another try, perhaps another leader's, made
/// it. Its slot was given away long ago.
fn end_unwanted(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView) {
    if scene.is_complete() {
        let since = it.create_failed_at.unwrap_or(it.created_at);
        let reason = DeleteReason::Unresolved;
        draft.act(Urgency::new(Priority::Unhealthy, since, id), Action::Delete { instance: id, reason });
    }
}

fn forget(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, ended: Option<Timestamp>, it: &InstanceView) {
    let ended = ended.unwrap_or(it.created_at);
    let over = ended.plus(scene.shard.settings.deleted_record_retention);
    if scene.is_past(over) {
        draft.act(Urgency::new(Priority::ScaleUp, ended, id), Action::Forget { instance: id });
    } else {
        draft.wake(over);
    }
}
