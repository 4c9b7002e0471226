//! VMs with our tags and no record: adopted, or ended if their group was deleted or they are dead.
//!
//! Whoever puts a candidate into the snapshot has the store's own word that there is no record of it.

use super::{
    Action, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    members::candidate_is_dead,
};
use crate::{
    group::Desired,
    ids::InstanceId,
    instance::{Ownership, Seen},
    snapshot::{Candidate, ProviderView},
    time::Timestamp,
};

pub(super) fn judge(scene: Scene<'_>, draft: &mut Draft<'_>) {
    // While records are missing, every VM looks like an orphan.
    if !scene.shard.complete.records {
        return;
    }
    for candidate in &scene.view.candidates {
        judge_one(scene, draft, candidate);
    }
}

fn judge_one(scene: Scene<'_>, draft: &mut Draft<'_>, candidate: &Candidate) {
    let born = candidate.created_at.unwrap_or_else(|| born_by_id(candidate.vm.instance));
    if candidate_is_dead(candidate) {
        // One that is on its way out needs no push.
        if !matches!(candidate.seen, Seen::Gone | Seen::Deleting) {
            terminate(scene, draft, candidate, born);
        }
        return;
    }
    let timeout = scene.shard.settings.registration_timeout;
    // Only the group's own instances go with their group; an on-demand one waits for its owner's word. Without a
    // timeout nobody is ended for lack of a record: it gets one, and leaves by its drain.
    let is_ended = scene.view.desired == Desired::Tombstoned && candidate.ownership == Ownership::Managed;
    if !is_ended || timeout.is_zero() {
        let urgency = Urgency::new(Priority::ScaleUp, born, candidate.vm.instance);
        draft.act(urgency, Action::Adopt { vm: candidate.vm.clone() });
        return;
    }
    let due = born.plus(timeout);
    if scene.view.mass_removal.is_some() {
        return;
    }
    if scene.is_past(due) {
        terminate(scene, draft, candidate, born);
    } else {
        let hold = draft.hold(HoldKind::InProgress, "a VM without record of a deleted group is ended once it is due");
        hold.instance = Some(candidate.vm.instance);
        hold.since = Some(born);
        hold.until = Some(due);
    }
}

fn terminate(scene: Scene<'_>, draft: &mut Draft<'_>, candidate: &Candidate, born: Timestamp) {
    if scene.is_complete() && !matches!(scene.shard.provider, ProviderView::Unavailable { .. }) {
        let urgency = Urgency::new(Priority::ScaleDown, born, candidate.vm.instance);
        draft.act(urgency, Action::TerminateOrphan { vm: candidate.vm.clone() });
    }
}

/// An id bears the moment it was minted, which is never after its VM was made.
fn born_by_id(id: InstanceId) -> Timestamp {
    let mut millis = [0; 8];
    millis[2..].copy_from_slice(&id.uuid()[..6]);
    Timestamp::from_millis(i64::from_be_bytes(millis))
}
