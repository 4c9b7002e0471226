//! The way in: creates whose outcome is unknown, and VMs whose agent never came.

use super::{
    Action, DeleteReason, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    members::{Crew, Standing},
};
use crate::{
    group::Desired,
    ids::InstanceId,
    instance::{CreateReason, Ownership, Phase},
    snapshot::{InstanceView, ProviderView},
    time::Timestamp,
};

/// Deletes the group's members that never registered in time.
///
/// They still fill their slots in this plan: whoever deletes them learns of the failure, and only then is it known
/// whether their successor starts at once or the group backs off.
pub(super) fn end_overdue(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &mut Crew<'_>) {
    let waiting: Vec<_> = crew.members().filter_map(|it| Some((it, scene.registration_ends(it.it)?))).collect();
    for (entry, ends) in waiting {
        if end_if_overdue(scene, draft, entry.id, entry.it, ends) {
            crew.linger(entry.id);
        }
    }
}

/// Deletes one that never registered in time. There is nothing to drain: it was never in use.
pub(super) fn end_if_overdue(
    scene: Scene<'_>,
    draft: &mut Draft<'_>,
    id: InstanceId,
    it: &InstanceView,
    ends: Timestamp,
) -> bool {
    if !scene.is_past(ends) || it.busy.is_some() {
        draft.wake(ends);
        return false;
    }
    let reason = match it.phase {
        Phase::Pending => DeleteReason::Unresolved,
        _ => DeleteReason::NeverRegistered,
    };
    draft.act(Urgency::new(Priority::Unhealthy, ends, id), Action::Delete { instance: id, reason });
    true
}

/// Asks what became of each create that nobody is waiting for any more.
pub(super) fn resolve(scene: Scene<'_>, draft: &mut Draft<'_>) {
    for (id, it) in &scene.view.instances {
        // Of a deleted group, what is not there yet need not come; an on-demand one is not the group's to drop.
        let is_wanted = it.ownership == Ownership::OnDemand || scene.view.desired != Desired::Tombstoned;
        let is_open = it.phase == Phase::Pending && it.busy.is_none() && is_wanted && !draft.is_leaving(*id);
        if is_open && matches!(scene.standing(*id, it), Standing::Known | Standing::Uncertain) {
            resolve_one(scene, draft, *id, it);
        }
    }
}

fn resolve_one(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView) {
    // The request is made again from record and config. It needs no listing: the slot is already counted, and the
    // same id cannot become two VMs.
    if !scene.shard.complete.records || !scene.shard.complete.config {
        return;
    }
    if let ProviderView::Unavailable { since, message } = &scene.shard.provider {
        let hold = draft.hold(HoldKind::ProviderUnavailable, message.clone());
        hold.instance = Some(id);
        hold.since = Some(*since);
        return;
    }
    if scene.is_due(it) {
        let priority = match it.reason {
            CreateReason::ScaleUp => Priority::ScaleUp,
            CreateReason::Replacement => Priority::Unhealthy,
            CreateReason::Rotation => Priority::Rotation,
            CreateReason::OnDemand => Priority::Requested,
        };
        draft.act(Urgency::new(priority, it.created_at, id), Action::ResolveCreate { instance: id });
    } else {
        let hold = draft.hold(HoldKind::InProgress, "asks again what became of its create");
        hold.instance = Some(id);
        hold.since = Some(it.created_at);
        hold.until = it.next_attempt_at;
    }
}
