//! Planners that are wrong in one way each. A simulation that does not notice them proves nothing about the right one.

use nstance_core::{
    instance::{DrainReason, Ownership, Phase, Seen},
    plan::{self, Action, DeleteReason, Plan},
    snapshot::Snapshot,
    time::Timestamp,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Mutation {
    /// An instance that is being drained still counts as a member.
    DrainingIsMember,
    /// A VM that could not be looked at is taken for gone.
    UnknownIsGone,
    /// Instances that leave by our own will are deleted at once.
    NoDrain,
    /// An instance whose VM is not confirmed yet does not count.
    PendingIsNobody,
    /// On-demand instances are taken for the group's own.
    OnDemandIsManaged,
}

impl Mutation {
    pub const ALL: [Self; 5] =
        [Self::DrainingIsMember, Self::UnknownIsGone, Self::NoDrain, Self::PendingIsNobody, Self::OnDemandIsManaged];

    pub fn plan(self, snapshot: &Snapshot, now: Timestamp) -> Plan {
        let mut seen = snapshot.clone();
        for view in seen.groups.values_mut() {
            for it in view.instances.values_mut() {
                match self {
                    Self::DrainingIsMember if it.phase == Phase::Draining => {
                        it.phase = Phase::Running;
                        it.drain = None;
                    }
                    Self::UnknownIsGone if it.seen == Seen::Unknown => it.seen = Seen::Gone,
                    Self::OnDemandIsManaged => it.ownership = Ownership::Managed,
                    _ => {}
                }
            }
            if self == Self::PendingIsNobody {
                view.instances.retain(|_, it| it.phase != Phase::Pending);
            }
        }
        let mut plan = plan::plan(&seen, now);
        if self == Self::NoDrain {
            for planned in &mut plan.actions {
                if let Action::StartDrain { instance, .. } = planned.action {
                    let reason = DeleteReason::Drained(DrainReason::ScaleDown);
                    planned.action = Action::Delete { instance, reason };
                }
            }
        }
        plan
    }
}
