//! A second opinion on plans.
//!
//! [`check`] reads a snapshot and a finished plan and lists where the plan breaks an invariant. It knows nothing of how
//! the planner came to its plan and shares none of its counting: each rule is written again, as simply as the words of
//! the invariant allow. What it cannot see from one snapshot and one plan (whether planning again gives nothing, whether
//! order matters) is left to the property tests.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

mod counts;
mod removals;
#[cfg(test)]
mod tests;

use crate::{
    group::Desired,
    ids::{GroupRef, InstanceId},
    instance::Phase,
    plan::{Action, DeleteReason, Plan, Planned},
    snapshot::{GroupView, InstanceView, ProviderView, ShardView, Snapshot},
    time::Timestamp,
};

/// Which promise is broken. The numbers are those of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Invariant {
    /// Members stay within size and surge; whoever else lives is on its way out.
    I1,
    /// No create while members, the uncertain included, cover the size.
    I2,
    /// No create and no removal from an incomplete snapshot.
    I3,
    /// Nothing is justified by not knowing.
    I4,
    /// A VM that was in use and is not dead is drained before it is deleted.
    I5,
    /// On-demand instances are not the group's.
    I13,
    /// A rotation never makes a group smaller.
    I14,
    /// Whom the brake holds is not replaced.
    I15,
    /// Creates stay below the cap of their window.
    I16,
    /// Only size or tombstone empties a group.
    I17,
    /// Out of the load balancers first, and never back by an error.
    I18,
    /// No silence: who is not at its size and does nothing says why.
    I20,
    /// A loss is made good in the same plan.
    I21,
    /// A failing create removes nothing.
    I22,
    /// The form of a plan: its order, and actions that fit the phase of an idle instance of this very group.
    Form,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub invariant: Invariant,
    pub group: GroupRef,
    pub instance: Option<InstanceId>,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} in {}", self.invariant, self.group)?;
        if let Some(instance) = self.instance {
            write!(f, " by {instance}")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// Lists every violation, by group; none for a good plan.
pub fn check(snapshot: &Snapshot, plan: &Plan, now: Timestamp) -> Vec<Violation> {
    let mut violations = Vec::new();
    let mut by_group: BTreeMap<&GroupRef, Vec<&Action>> = BTreeMap::new();
    for Planned { group, action, .. } in &plan.actions {
        by_group.entry(group).or_default().push(action);
        if !snapshot.groups.contains_key(group) {
            violations.push(Violation {
                invariant: Invariant::Form,
                group: group.clone(),
                instance: None,
                what: "an action for a group that is not in the snapshot".to_owned(),
            });
        }
    }
    let ordered = plan.actions.windows(2).all(|pair| pair[0].priority <= pair[1].priority);
    if let (false, Some(first)) = (ordered, plan.actions.first()) {
        violations.push(Violation {
            invariant: Invariant::Form,
            group: first.group.clone(),
            instance: None,
            what: "actions are not in the order of their priority".to_owned(),
        });
    }
    for (group, view) in &snapshot.groups {
        let actions = by_group.remove(group).unwrap_or_default();
        let removed = actions.iter().filter_map(|action| match action {
            Action::StartDrain { instance, .. } | Action::Delete { instance, .. } => Some(*instance),
            _ => None,
        });
        let mut court = Court {
            shard: &snapshot.shard,
            group,
            view,
            now,
            removed: removed.collect(),
            actions,
            n_holds: plan.holds.iter().filter(|hold| hold.group == *group).count(),
            violations: Vec::new(),
        };
        court.judge_form();
        court.judge_removals();
        court.judge_counts();
        violations.append(&mut court.violations);
    }
    violations
}

/// One group and its slice of the plan.
struct Court<'a> {
    shard: &'a ShardView,
    group: &'a GroupRef,
    view: &'a GroupView,
    now: Timestamp,
    actions: Vec<&'a Action>,
    /// Whom the plan drains or deletes.
    removed: BTreeSet<InstanceId>,
    n_holds: usize,
    violations: Vec<Violation>,
}

impl<'a> Court<'a> {
    fn object(&mut self, invariant: Invariant, instance: Option<InstanceId>, what: impl Into<String>) {
        self.violations.push(Violation { invariant, group: self.group.clone(), instance, what: what.into() });
    }

    fn is_complete(&self) -> bool {
        let complete = self.shard.complete;
        complete.config && complete.groups && complete.records && complete.listing
    }

    /// Some reason outside this group's counts keeps every create back.
    fn creates_are_blocked(&self) -> bool {
        self.shard.provider != ProviderView::Available
            || self.view.create_blocks.iter().any(|block| block.until.is_none_or(|until| self.now < until))
    }

    fn creates_left(&self) -> u64 {
        let size = match self.view.desired {
            Desired::Known(size) => size,
            Desired::Tombstoned | Desired::Unknown => 0,
        };
        let largest = u64::from(self.view.window.largest_size.max(size));
        let settings = &self.shard.settings;
        let cap = u64::from(settings.runaway_base) + u64::from(settings.runaway_factor) * largest;
        cap.saturating_sub(u64::from(self.view.window.n_creates))
    }

    /// Actions that are about an instance with a record, with the record.
    fn about_instances(&self) -> Vec<(&'a Action, InstanceId, Option<&'a InstanceView>)> {
        let view = self.view;
        self.actions
            .iter()
            .filter_map(|action| {
                let id = subject(action)?;
                Some((*action, id, view.instances.get(&id)))
            })
            .collect()
    }

    fn judge_form(&mut self) {
        let mut done: BTreeSet<(u8, InstanceId, Option<&str>)> = BTreeSet::new();
        for (action, id, it) in self.about_instances() {
            let Some(it) = it else {
                self.object(Invariant::Form, Some(id), "an action on an instance of another group");
                continue;
            };
            if it.busy.is_some() {
                self.object(Invariant::Form, Some(id), "an action while another effect is under way");
            }
            let (verb, lb) = match action {
                Action::StartDrain { .. } | Action::Delete { .. } | Action::CancelDrain { .. } => (0, None),
                Action::ResolveCreate { .. } => (0, None),
                Action::MarkDeleted { .. } => (1, None),
                Action::Forget { .. } => (2, None),
                Action::LbRegister { lb, .. } | Action::LbDeregister { lb, .. } => (3, Some(lb.as_str())),
                Action::Create { .. } | Action::Adopt { .. } | Action::TerminateOrphan { .. } => continue,
            };
            if !done.insert((verb, id, lb)) {
                self.object(Invariant::Form, Some(id), "two actions that exclude each other");
            }
            if !self.fits(action, it) {
                self.object(Invariant::Form, Some(id), format!("{action:?} does not fit phase {}", it.phase.as_str()));
            }
        }
        for action in self.actions.clone() {
            if let Action::Adopt { vm } | Action::TerminateOrphan { vm } = action
                && !self.view.candidates.iter().any(|candidate| candidate.vm == *vm)
            {
                self.object(Invariant::Form, Some(vm.instance), "a VM that is no candidate of this group");
            }
        }
    }

    fn fits(&self, action: &Action, it: &InstanceView) -> bool {
        let members = matches!(it.phase, Phase::Pending | Phase::Provisioning | Phase::Running);
        let retention = self.shard.settings.deleted_record_retention;
        match action {
            Action::ResolveCreate { .. } => it.phase == Phase::Pending,
            Action::StartDrain { delete_at, .. } => {
                // A drain under way may only get shorter.
                members
                    || it
                        .drain
                        .as_ref()
                        .is_some_and(|drain| it.phase == Phase::Draining && *delete_at < drain.delete_at)
            }
            Action::CancelDrain { .. } => it
                .drain
                .as_ref()
                .is_some_and(|drain| it.phase == Phase::Draining && !drain.acked && self.now < drain.delete_at),
            Action::Delete { reason, .. } => {
                // A create that failed by its record and made a VM all the same.
                let unwanted = it.phase == Phase::Failed && *reason == DeleteReason::Unresolved;
                members || unwanted || matches!(it.phase, Phase::Draining | Phase::Deleting)
            }
            Action::MarkDeleted { .. } => it.phase == Phase::Deleting,
            Action::Forget { .. } => {
                let ended = match it.phase {
                    Phase::Deleted => it.delete_gone_at.or(it.delete_requested_at),
                    Phase::Failed => it.create_failed_at,
                    _ => return false,
                };
                ended.unwrap_or(it.created_at).plus(retention) <= self.now
            }
            Action::LbRegister { .. } => it.phase == Phase::Running,
            Action::LbDeregister { .. }
            | Action::Create { .. }
            | Action::Adopt { .. }
            | Action::TerminateOrphan { .. } => true,
        }
    }
}

fn subject(action: &Action) -> Option<InstanceId> {
    match action {
        Action::ResolveCreate { instance }
        | Action::StartDrain { instance, .. }
        | Action::CancelDrain { instance }
        | Action::Delete { instance, .. }
        | Action::MarkDeleted { instance }
        | Action::Forget { instance }
        | Action::LbRegister { instance, .. }
        | Action::LbDeregister { instance, .. } => Some(*instance),
        Action::Create { .. } | Action::Adopt { .. } | Action::TerminateOrphan { .. } => None,
    }
}
