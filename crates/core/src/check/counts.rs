//! Judges a group's slice of the plan as a whole: does it add up?

use super::{Court, Invariant, removals::was_in_use};
use crate::{
    group::Desired,
    ids::{InstanceId, LbKey},
    instance::{CreateReason, DrainReason, Health, LbState, Ownership, Phase, Seen},
    plan::{Action, DeleteReason},
    snapshot::{Busy, InstanceView},
};

/// A create step beyond this may be spread over several plans.
const LARGE_STEP: u64 = 10_000;

/// Everybody who counts, before the plan and after it.
struct Census {
    n_members: u64,
    /// Members after the plan, without what it creates or calls back. Those it deletes because they never registered
    /// still count: their successor is another plan's business.
    n_kept: u64,
    /// Of those kept, who could have been removed: seen, and idle.
    n_removable: u64,
    n_created: u64,
    n_called_back: u64,
    /// Removed only because of size.
    n_shrunk: u64,
    n_known: u64,
    n_silent: u64,
    n_silent_drained: u64,
}

impl Court<'_> {
    pub(super) fn judge_counts(&mut self) {
        let census = self.census();
        self.judge_creates(&census);
        match self.view.desired {
            Desired::Unknown => {
                if self.n_holds == 0 {
                    self.object(Invariant::I20, None, "an unknown group without a hold");
                }
            }
            Desired::Known(size) => {
                self.judge_silence(&census, u64::from(size));
                self.judge_size(&census, u64::from(size));
                self.judge_rotation(u64::from(size));
            }
            Desired::Tombstoned => {
                self.judge_silence(&census, 0);
                if self.is_complete() && self.view.mass_removal.is_none() && 0 < census.n_removable {
                    self.object(Invariant::I1, None, "a deleted group keeps members that could leave");
                }
            }
        }
        self.judge_leavers(&census);
    }

    fn is_held(&self, id: InstanceId) -> bool {
        self.shard.brake.held.contains(&id) && !self.shard.brake.released.contains(&id)
    }

    fn is_silent(&self, id: InstanceId, it: &InstanceView) -> bool {
        matches!(it.health, Health::Silent { .. }) && it.seen == Seen::Running && !self.is_held(id)
    }

    fn is_member(&self, id: InstanceId, it: &InstanceView) -> bool {
        it.ownership == Ownership::Managed
            && matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running)
            && !self.is_dead(it)
            && !matches!(it.health, Health::Terminating { .. })
            && !self.is_silent(id, it)
    }

    fn census(&self) -> Census {
        let mut census = Census {
            n_members: 0,
            n_kept: 0,
            n_removable: 0,
            n_created: 0,
            n_called_back: 0,
            n_shrunk: 0,
            n_known: 0,
            n_silent: 0,
            n_silent_drained: 0,
        };
        // Records nobody can read and living VMs nobody has judged yet fill slots too.
        let n_unread = self.view.corrupt.len();
        let n_unjudged = self
            .view
            .candidates
            .iter()
            .filter(|it| it.ownership == Ownership::Managed)
            .filter(|it| {
                !matches!(it.seen, Seen::Stopping | Seen::Stopped | Seen::Suspended | Seen::Deleting | Seen::Gone)
            })
            .count();
        let n_unnamed = u64::try_from(n_unread + n_unjudged).unwrap_or(u64::MAX);
        census.n_members = n_unnamed;
        census.n_kept = n_unnamed;
        let mut removed = std::collections::BTreeMap::new();
        for action in &self.actions {
            match action {
                Action::Create { .. } => census.n_created += 1,
                Action::CancelDrain { .. } => census.n_called_back += 1,
                Action::StartDrain { instance, reason, .. } => {
                    census.n_shrunk += u64::from(*reason == DrainReason::ScaleDown && self.is_fresh(*instance));
                    removed.insert(*instance, false);
                }
                Action::Delete { instance, reason } => {
                    census.n_shrunk += u64::from(*reason == DeleteReason::ScaleDown && self.is_fresh(*instance));
                    let timed = matches!(reason, DeleteReason::NeverRegistered | DeleteReason::Unresolved);
                    let too_late = timed && self.view.instances.get(instance).is_some_and(|it| self.is_overdue(it));
                    removed.insert(*instance, too_late);
                }
                _ => {}
            }
        }
        for (id, it) in &self.view.instances {
            if it.ownership == Ownership::Managed
                && self.is_silent(*id, it)
                && !self.is_dead(it)
                && matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running)
                && it.busy.is_none()
            {
                census.n_silent += 1;
                census.n_silent_drained += u64::from(removed.contains_key(id));
            }
            if !self.is_member(*id, it) {
                continue;
            }
            census.n_members += 1;
            let in_flight = it.phase == Phase::Pending && it.busy == Some(Busy::Creating);
            let known = matches!(it.seen, Seen::Pending | Seen::Running) || in_flight;
            census.n_known += u64::from(known);
            match removed.get(id) {
                None => {
                    census.n_kept += 1;
                    census.n_removable += u64::from(known && it.busy.is_none());
                }
                Some(true) => census.n_kept += 1,
                Some(false) => {}
            }
        }
        census
    }

    /// Not already on its way out before this plan.
    fn is_fresh(&self, id: InstanceId) -> bool {
        self.view
            .instances
            .get(&id)
            .is_some_and(|it| matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running))
    }

    fn judge_creates(&mut self, census: &Census) {
        if census.n_created == 0 {
            return;
        }
        if !self.is_complete() {
            self.object(Invariant::I3, None, "a create from an incomplete snapshot");
        }
        if self.creates_are_blocked() {
            self.object(Invariant::I2, None, "a create while something holds creates back");
        }
        if self.creates_left() < census.n_created {
            self.object(Invariant::I16, None, format!("{} creates are more than the cap allows", census.n_created));
        }
        let Desired::Known(size) = self.view.desired else {
            self.object(Invariant::I2, None, "a create for a group without a size");
            return;
        };
        let allowed = u64::from(size) + self.surge(census, u64::from(size));
        let total = census.n_kept + census.n_called_back + census.n_created;
        if allowed < total {
            self.object(Invariant::I2, None, format!("{total} members after this plan, {allowed} are allowed"));
        }
        for action in self.actions.clone() {
            let Action::Create { reason } = action else { continue };
            if *reason == CreateReason::OnDemand {
                self.object(Invariant::I13, None, "an on-demand instance made by its group");
            }
            if 0 < census.n_shrunk && *reason != CreateReason::Rotation && !self.gives_up_forced() {
                self.object(Invariant::I2, None, "grows and shrinks at once");
            }
        }
    }

    /// Drains a member past its forced age for which no replacement could be made: its slot is to be filled.
    fn gives_up_forced(&self) -> bool {
        2 <= self.view.failures.replacement_in_a_row
            && self.actions.iter().any(|action| match action {
                Action::StartDrain { reason, .. } => *reason == DrainReason::ForcedExpiry,
                _ => false,
            })
    }

    fn judge_silence(&mut self, census: &Census, size: u64) {
        if census.n_members != size && self.actions.is_empty() && self.n_holds == 0 {
            let n_members = census.n_members;
            self.object(Invariant::I20, None, format!("{n_members} members instead of {size}, and not a word"));
        }
    }

    fn judge_size(&mut self, census: &Census, size: u64) {
        if 0 < census.n_shrunk && census.n_known.saturating_sub(census.n_shrunk) < size {
            self.object(Invariant::I17, None, format!("shrinks below its size {size}"));
        }
        if !self.is_complete() {
            return;
        }
        let allowed = size + self.surge(census, size);
        if self.view.mass_removal.is_none() && allowed < census.n_removable {
            let n_removable = census.n_removable;
            self.object(Invariant::I1, None, format!("{n_removable} members stay, {allowed} are allowed"));
        }
        let n_filled = census.n_created + census.n_called_back;
        let n_missing = size.saturating_sub(census.n_kept);
        if !self.creates_are_blocked() {
            let n_due = n_missing.min(LARGE_STEP).min(self.creates_left().saturating_add(census.n_called_back));
            if n_filled < n_due {
                self.object(Invariant::I21, None, format!("{n_filled} slots are filled, {n_due} are empty"));
            }
        }
        let n_unfilled = n_missing.saturating_sub(n_filled);
        let n_may_go = census.n_silent.saturating_sub(n_unfilled);
        if n_may_go < census.n_silent_drained {
            self.object(Invariant::I22, None, "drains a silent member whose replacement cannot be made");
        }
    }

    /// Who lives and is no member is on its way out.
    fn judge_leavers(&mut self, census: &Census) {
        if !self.is_complete() || self.view.desired == Desired::Unknown {
            return;
        }
        let size = match self.view.desired {
            Desired::Known(size) => u64::from(size),
            _ => 0,
        };
        let n_unfilled = size.saturating_sub(census.n_kept + census.n_created + census.n_called_back);
        let held_back = self.view.desired == Desired::Tombstoned && self.view.mass_removal.is_some();
        if census.n_silent_drained + n_unfilled < census.n_silent && !held_back {
            self.object(Invariant::I1, None, "a silent member is neither counted nor on its way out");
        }
        let view = self.view;
        for (id, it) in &view.instances {
            let in_service = matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running);
            let lost = self.is_dead(it) || matches!(it.health, Health::Terminating { .. });
            if in_service && lost && it.busy.is_none() && !self.is_removed(*id) {
                self.object(Invariant::I1, Some(*id), "dead or about to be, and not on its way out");
            }
        }
    }

    /// How many members above its size the group may have: one, if somebody is to be rotated and may be.
    fn surge(&self, census: &Census, size: u64) -> u64 {
        let kept = census.n_kept + census.n_called_back;
        let is_quiet = self.is_quiet();
        // The two youngest will do: one of them is not the member in question.
        let mut successors: Vec<_> = self
            .view
            .instances
            .iter()
            .filter(|(id, it)| it.reason == CreateReason::Rotation && self.is_member(**id, it))
            .map(|(id, it)| (it.created_at, *id))
            .collect();
        successors.sort_unstable_by(|a, b| b.cmp(a));
        successors.truncate(2);
        let has_successor =
            |id, it: &InstanceView| successors.iter().any(|(at, other)| *other != id && it.created_at <= *at);
        let may = |id, it: &InstanceView| {
            let pressing = self.is_forced(it) || it.replace_marked_at.is_some();
            let rotates = pressing || self.has_gentle_cause(it);
            let begins = kept <= size && (pressing || is_quiet);
            rotates && (pressing || self.rollout_goes_on()) && (begins || has_successor(id, it))
        };
        let mut staying =
            self.view.instances.iter().filter(|(id, it)| self.is_member(**id, it) && !self.is_removed(**id));
        u64::from(staying.any(|(id, it)| may(*id, it)))
    }

    fn is_forced(&self, it: &InstanceView) -> bool {
        let age = self.shard.settings.forced_age;
        !age.is_zero() && it.created_at.plus(age) <= self.now
    }

    fn has_gentle_cause(&self, it: &InstanceView) -> bool {
        let age = self.shard.settings.eligible_age;
        let eligible = !age.is_zero() && it.created_at.plus(age) <= self.now;
        let hashes = [&it.infra_hash, &self.view.infra_hash];
        let drifted = hashes[0] != hashes[1] && hashes.iter().all(|hash| !hash.is_empty());
        eligible || drifted || it.advised_at.is_some()
    }

    fn rollout_goes_on(&self) -> bool {
        let failures = &self.view.failures;
        let failing = 3 <= failures.rollout_in_a_row && failures.rollout_probe_at.is_none_or(|at| self.now < at);
        !self.view.rollout_paused && !failing
    }

    /// Nobody is draining, ill or on the way in.
    fn is_quiet(&self) -> bool {
        self.view.instances.iter().filter(|(_, it)| it.ownership == Ownership::Managed).all(|(id, it)| match it.phase {
            Phase::Draining => self.actions.iter().any(|action| match action {
                Action::CancelDrain { instance } | Action::Delete { instance, .. } => instance == id,
                _ => false,
            }),
            Phase::Pending | Phase::Provisioning => self.is_dead(it) || self.is_removed(*id),
            Phase::Running => {
                let ill = matches!(it.health, Health::Lost { .. } | Health::Silent { .. } | Health::Terminating { .. });
                self.is_dead(it) || !ill
            }
            Phase::Failed | Phase::Deleting | Phase::Deleted => true,
        })
    }

    fn judge_rotation(&mut self, size: u64) {
        let rotated: Vec<_> = self
            .about_instances()
            .into_iter()
            .filter_map(|(action, id, it)| match action {
                Action::StartDrain { reason, .. } if it.is_some_and(|it| it.phase != Phase::Draining) => {
                    Some((*reason, id, it?))
                }
                _ => None,
            })
            .filter(|(reason, ..)| is_rotation(*reason))
            .collect();
        if 1 < rotated.len() {
            self.object(Invariant::I14, Some(rotated[1].1), "two members rotate at once");
        }
        for (reason, id, it) in rotated {
            let real = match reason {
                DrainReason::ForcedExpiry => self.is_forced(it),
                DrainReason::Replaced => it.replace_marked_at.is_some(),
                _ => self.has_gentle_cause(it),
            };
            if !real {
                self.object(Invariant::I14, Some(id), format!("no cause for {}", reason.as_str()));
            }
            if reason == DrainReason::ForcedExpiry && 2 <= self.view.failures.replacement_in_a_row {
                continue; // past its age, and nothing better is to be had
            }
            let others: Vec<_> = self
                .view
                .instances
                .iter()
                .filter(|(other, it)| **other != id && self.is_member(**other, it) && !self.is_removed(**other))
                .collect();
            let n_ready = others.iter().filter(|(_, it)| self.is_ready(it)).count();
            let youngest = others.iter().max_by_key(|(id, it)| (it.created_at, **id));
            let youngest_is_ready = youngest.is_some_and(|(_, it)| self.is_ready(it));
            let n_others = u64::try_from(others.len() + self.view.corrupt.len() + self.view.candidates.len());
            let pressing = matches!(reason, DrainReason::ForcedExpiry | DrainReason::Replaced);
            let enough = size <= u64::try_from(n_ready).unwrap_or(u64::MAX);
            let replaced = pressing && youngest_is_ready && size <= n_others.unwrap_or(u64::MAX);
            if !enough && !replaced {
                self.object(Invariant::I14, Some(id), format!("rotated with {n_ready} of {size} others ready"));
            }
        }
    }

    /// Its load balancer had the registration timeout to serve it, and serves no other instance of the group either.
    fn waits_in_vain(&self, it: &InstanceView, lb: &LbKey) -> bool {
        let timeout = self.shard.settings.registration_timeout;
        let begun = it.registered_at.unwrap_or(it.created_at);
        let others = self.view.instances.values().map(|other| other.load_balancers.get(lb));
        !timeout.is_zero()
            && begun.plus(timeout) <= self.now
            && others.into_iter().all(|state| state != Some(&LbState::Registered))
    }

    fn is_ready(&self, it: &InstanceView) -> bool {
        let serves = |lb| match it.load_balancers.get(lb) {
            Some(LbState::Registered) => true,
            Some(LbState::Coming) => self.waits_in_vain(it, lb),
            _ => false,
        };
        it.phase == Phase::Running && was_in_use(it) && it.reported && self.view.load_balancers.iter().all(serves)
    }
}

fn is_rotation(reason: DrainReason) -> bool {
    matches!(
        reason,
        DrainReason::ForcedExpiry
            | DrainReason::Replaced
            | DrainReason::ConfigDrift
            | DrainReason::EligibleExpiry
            | DrainReason::Maintenance
    )
}
