//! Judges each removal by itself: is it proved, allowed, and in the right order?

use super::{Court, Invariant};
use crate::{
    group::Desired,
    ids::InstanceId,
    instance::{DrainReason, HOST_GRACE, Health, LbState, Ownership, Phase, Seen},
    plan::{Action, DeleteReason},
    snapshot::InstanceView,
};

impl Court<'_> {
    pub(super) fn judge_removals(&mut self) {
        for (action, id, it) in self.about_instances() {
            let Some(it) = it else { continue };
            match action {
                Action::StartDrain { reason, .. } => self.judge_drain(id, it, *reason),
                Action::Delete { reason, .. } => self.judge_delete(id, it, *reason),
                Action::MarkDeleted { .. } if it.seen != Seen::Gone => {
                    self.object(Invariant::I4, Some(id), "marked as deleted without proof of absence");
                }
                Action::LbRegister { lb, .. } => {
                    let state = it.load_balancers.get(lb);
                    if matches!(state, Some(LbState::Deregistering | LbState::DrainingOut)) {
                        self.object(Invariant::I18, Some(id), "registered before it was out");
                    }
                    if self.is_removed(id) {
                        self.object(Invariant::I18, Some(id), "registered while it leaves");
                    }
                }
                _ => {}
            }
        }
        self.judge_orphans();
    }

    pub(super) fn is_removed(&self, id: InstanceId) -> bool {
        self.removed.contains(&id)
    }

    pub(super) fn is_dead(&self, it: &InstanceView) -> bool {
        match it.seen {
            Seen::Stopping | Seen::Stopped | Seen::Suspended | Seen::Deleting | Seen::Gone => true,
            Seen::Repairing | Seen::HostDown => {
                let long = it.seen_since.is_some_and(|since| since.plus(HOST_GRACE) <= self.now);
                long && matches!(it.health, Health::Lost { .. } | Health::Silent { .. })
            }
            Seen::NotAsked | Seen::Unknown | Seen::Pending | Seen::Running => false,
        }
    }

    pub(super) fn is_overdue(&self, it: &InstanceView) -> bool {
        let timeout = self.shard.settings.registration_timeout;
        !was_in_use(it) && !timeout.is_zero() && it.timers_from.plus(timeout) <= self.now
    }

    fn judge_drain(&mut self, id: InstanceId, it: &InstanceView, reason: DrainReason) {
        if !self.is_complete() {
            self.object(Invariant::I3, Some(id), "a drain from an incomplete snapshot");
        }
        if it.phase == Phase::Draining {
            return; // shortened by a notice, nothing is decided anew
        }
        let by_notice = reason == DrainReason::SpotTerminating && matches!(it.health, Health::Terminating { .. });
        let by_tombstone = reason == DrainReason::GroupDeleted && self.view.desired == Desired::Tombstoned;
        if it.seen.is_uncertain() && !by_notice && !by_tombstone {
            self.object(Invariant::I4, Some(id), "drained though nobody sees its VM");
        }
        if reason == DrainReason::SpotTerminating && !by_notice {
            self.object(Invariant::I4, Some(id), "drained for a notice that never came");
        }
        if it.ownership == Ownership::OnDemand {
            let age = self.shard.settings.ondemand_age;
            let over_age = !age.is_zero() && it.created_at.plus(age) <= self.now;
            let expired = over_age && reason == DrainReason::OndemandExpiry;
            if !by_notice && !expired {
                self.object(Invariant::I13, Some(id), format!("an on-demand instance drained for {}", reason.as_str()));
            }
            return;
        }
        if reason == DrainReason::OndemandExpiry {
            self.object(Invariant::I13, Some(id), "a managed instance drained by the age of on-demand ones");
        }
        match self.view.desired {
            Desired::Unknown => self.object(Invariant::I17, Some(id), "drained from a group nobody knows"),
            Desired::Known(_) if reason == DrainReason::GroupDeleted => {
                self.object(Invariant::I17, Some(id), "drained with a group that was not deleted");
            }
            Desired::Known(_) | Desired::Tombstoned => {}
        }
        if self.view.mass_removal.is_some() && matches!(reason, DrainReason::GroupDeleted | DrainReason::ScaleDown) {
            self.object(Invariant::I17, Some(id), "removed while a mass removal is not confirmed");
        }
        if reason == DrainReason::Unhealthy {
            let brake = &self.shard.brake;
            if brake.held.contains(&id) && !brake.released.contains(&id) {
                self.object(Invariant::I15, Some(id), "replaced though the brake holds it");
            }
            if !(matches!(it.health, Health::Silent { .. }) && it.seen == Seen::Running) {
                self.object(Invariant::I4, Some(id), "drained as unhealthy without being silent on a running VM");
            }
        }
    }

    fn judge_delete(&mut self, id: InstanceId, it: &InstanceView, reason: DeleteReason) {
        if it.phase == Phase::Deleting {
            return; // decided before, and durable
        }
        if !self.is_complete() {
            self.object(Invariant::I3, Some(id), "a deletion from an incomplete snapshot");
        }
        let dead = self.is_dead(it);
        if reason == DeleteReason::Dead && !dead {
            self.object(Invariant::I4, Some(id), "deleted as dead without proof");
        }
        let drained = match &it.drain {
            Some(drain) if it.phase == Phase::Draining => {
                let over = drain.delete_at <= self.now;
                let out = it.load_balancers.values().all(|state| *state == LbState::Absent);
                if !dead && !over && !out {
                    self.object(Invariant::I18, Some(id), "deleted while a load balancer still knows it");
                }
                drain.acked || over
            }
            _ => false,
        };
        if was_in_use(it) && !dead && !drained {
            self.object(Invariant::I5, Some(id), "deleted without a drain that ended");
        }
        let by_tombstone = reason == DeleteReason::GroupDeleted && self.view.desired == Desired::Tombstoned;
        let by_notice = matches!(it.health, Health::Terminating { .. });
        if it.seen.is_uncertain() && !drained && !self.is_overdue(it) && !by_tombstone && !by_notice {
            self.object(Invariant::I4, Some(id), "deleted though nobody sees its VM");
        }
        let by_size = matches!(reason, DeleteReason::ScaleDown | DeleteReason::GroupDeleted);
        if it.ownership == Ownership::OnDemand && by_size {
            self.object(Invariant::I13, Some(id), "an on-demand instance deleted by its group's size");
        }
        if self.view.mass_removal.is_some() && by_size {
            self.object(Invariant::I17, Some(id), "removed while a mass removal is not confirmed");
        }
        let lives = matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running) && it.seen != Seen::Gone;
        if self.view.desired == Desired::Unknown && it.ownership == Ownership::Managed && lives {
            self.object(Invariant::I17, Some(id), "deleted from a group nobody knows");
        }
    }

    fn judge_orphans(&mut self) {
        for action in self.actions.clone() {
            let Action::TerminateOrphan { vm } = action else { continue };
            let Some(candidate) = self.view.candidates.iter().find(|candidate| candidate.vm == *vm) else { continue };
            if !self.is_complete() {
                self.object(Invariant::I3, Some(vm.instance), "an orphan ended from an incomplete snapshot");
            }
            let dead = matches!(candidate.seen, Seen::Stopping | Seen::Stopped | Seen::Suspended);
            let of_deleted_group =
                self.view.desired == Desired::Tombstoned && candidate.ownership == Ownership::Managed;
            if !dead && !of_deleted_group {
                self.object(Invariant::I17, Some(vm.instance), "a living VM of a group that was not deleted is ended");
            }
        }
    }
}

/// Whether anybody may have work on it.
pub(super) fn was_in_use(it: &InstanceView) -> bool {
    it.registered_at.is_some() || it.adopted || it.phase == Phase::Running
}
