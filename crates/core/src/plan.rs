//! The plan: what shall be done now, in order, and what is deliberately not done, with the reason.

use std::fmt;

mod arrive;
mod balance;
mod draft;
mod drain;
mod expiry;
mod grow;
pub(crate) mod members;
mod orphans;
mod replace;
mod rollout;
mod shrink;

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;

pub use members::{Counts, counts, members};

use self::{
    draft::{Draft, Finished},
    grow::Rotations,
    members::{Crew, Scene},
    shrink::Drains,
};
use crate::{
    group::Desired,
    ids::{GroupRef, InstanceId, LbKey},
    instance::{CreateReason, DrainReason},
    ports::provider::VmRef,
    snapshot::Snapshot,
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// In the order of their priority.
    pub actions: Vec<Planned>,
    pub holds: Vec<Hold>,
    /// When to look again though nothing happened.
    pub wake_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    pub priority: Priority,
    pub group: GroupRef,
    pub action: Action,
}

/// Lower goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    TerminationNotice = 0,
    ScaleDown = 1,
    ForcedExpiry = 2,
    Unhealthy = 3,
    Requested = 4,
    Rotation = 5,
    ScaleUp = 6,
}

/// One step, detailed enough that its executor has no choice left to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// The executor mints the id.
    Create {
        reason: CreateReason,
    },
    /// Find out what became of a create whose answer never came.
    ResolveCreate {
        instance: InstanceId,
    },
    StartDrain {
        instance: InstanceId,
        reason: DrainReason,
        delete_at: Timestamp,
        replacement: Option<InstanceId>,
    },
    CancelDrain {
        instance: InstanceId,
    },
    Delete {
        instance: InstanceId,
        reason: DeleteReason,
    },
    /// Absence is proved.
    MarkDeleted {
        instance: InstanceId,
    },
    /// Retention is over.
    Forget {
        instance: InstanceId,
    },
    Adopt {
        vm: VmRef,
    },
    TerminateOrphan {
        vm: VmRef,
    },
    LbRegister {
        lb: LbKey,
        instance: InstanceId,
    },
    LbDeregister {
        lb: LbKey,
        instance: InstanceId,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeleteReason {
    /// Its drain ended, by acknowledgement, deadline or timeout zero.
    Drained(DrainReason),
    Dead,
    NeverRegistered,
    /// Nobody could find out what became of its create.
    Unresolved,
    /// Surplus that never was in use.
    ScaleDown,
    GroupDeleted,
}

impl fmt::Display for DeleteReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Drained(reason) => reason.as_str(),
            Self::Dead => "dead",
            Self::NeverRegistered => "never-registered",
            Self::Unresolved => "unresolved",
            Self::ScaleDown => "scale-down",
            Self::GroupDeleted => "group-deleted",
        })
    }
}

/// A named reason for deliberately not acting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    pub kind: HoldKind,
    pub group: GroupRef,
    pub instance: Option<InstanceId>,
    pub message: String,
    pub since: Option<Timestamp>,
    pub until: Option<Timestamp>,
}

crate::words!(
    /// Why the planner does not act.
    HoldKind {
        SnapshotIncomplete "SnapshotIncomplete",
        GroupUnknown "GroupUnknown",
        RecordCorrupt "RecordCorrupt",
        UncertainMembers "UncertainMembers",
        ProviderUnavailable "ProviderUnavailable",
        ProviderAuth "ProviderAuth",
        NoCapacity "NoCapacity",
        Quota "Quota",
        InvalidRequest "InvalidRequest",
        ImageUnresolved "ImageUnresolved",
        BackingOff "BackingOff",
        Runaway "Runaway",
        MassDisconnect "MassDisconnect",
        MassRemoval "MassRemoval",
        WaitingForReplacement "WaitingForReplacement",
        WaitingForDrain "WaitingForDrain",
        WaitingForLb "WaitingForLb",
        RolloutPaused "RolloutPaused",
        RolloutFailing "RolloutFailing",
        /// An effect is under way, or its next try is not due yet.
        InProgress "InProgress",
        RateLimited "RateLimited",
        LeaseStalled "LeaseStalled",
    }
);

/// Decides. Pure: the same snapshot and moment give the same plan, and it cannot fail.
///
/// Groups do not see each other: the plan of one group alone is its part of the plan of all.
pub fn plan(snapshot: &Snapshot, now: Timestamp) -> Plan {
    let mut finished = Finished::default();
    for (group, view) in &snapshot.groups {
        finished.extend(plan_group(Scene { shard: &snapshot.shard, group, view, now }));
    }
    finished.into_plan()
}

fn plan_group(scene: Scene<'_>) -> Finished {
    let mut draft = Draft::new(scene);
    let mut crew = Crew::of(scene);
    tell_defects(scene, &mut draft);
    drain::finish(scene, &mut draft);
    orphans::judge(scene, &mut draft);
    expiry::on_demand(scene, &mut draft);
    replace::tell_held(scene, &mut draft, &crew);
    match scene.view.desired {
        Desired::Unknown => replace::see_off_gone(scene, &mut draft, &crew),
        // Decided from a part of the picture, a missing page would look like a missing fleet.
        _ if !scene.is_complete() => {}
        Desired::Known(size) => plan_size(scene, &mut draft, &mut crew, size),
        Desired::Tombstoned => {
            replace::see_off(scene, &mut draft, &crew, &mut Drains::Nobody);
            if scene.view.mass_removal.is_none() {
                shrink::dissolve(scene, &mut draft, &mut crew);
            }
        }
    }
    arrive::resolve(scene, &mut draft);
    balance::balance(scene, &mut draft);
    tell_waiting(scene, &mut draft);
    draft.finish()
}

/// Brings a group to its size. The order matters: each step sees what the ones before it decided, so that the plan of
/// the state after this plan has nothing left to decide.
fn plan_size(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &mut Crew<'_>, size: u32) {
    let mut drains = Drains::Nobody;
    replace::see_off(scene, draft, crew, &mut drains);
    for entry in crew.members() {
        expiry::wake(scene, draft, &entry);
    }
    for at in replace::given_up(crew) {
        draft.wake(at);
    }
    arrive::end_overdue(scene, draft, crew);
    let mut rotations = Rotations::Held;
    if scene.view.mass_removal.is_none() {
        rotations = Rotations::Allowed;
        // A victim may have been the reason for the surge: then there is none any more.
        loop {
            let surge = u32::from(rollout::under_way(scene, crew, size).is_some());
            if !shrink::shrink(scene, draft, crew, size, surge, &mut drains) || surge == 0 {
                shrink::tell_unseen(draft, crew, size.saturating_add(surge));
                break;
            }
        }
        rollout::advance(scene, draft, crew, size, &mut drains);
    }
    let n_unfilled = grow::grow(scene, draft, crew, size, drains, rotations);
    replace::drain_silent(scene, draft, crew, n_unfilled);
}

/// What is wrong with the picture itself.
fn tell_defects(scene: Scene<'_>, draft: &mut Draft<'_>) {
    let complete = scene.shard.complete;
    if !scene.is_complete() {
        let parts = [
            ("config", complete.config),
            ("groups", complete.groups),
            ("records", complete.records),
            ("listing", complete.listing),
        ];
        let missing: Vec<_> = parts.iter().filter(|(_, read)| !read).map(|(part, _)| *part).collect();
        draft.hold(HoldKind::SnapshotIncomplete, format!("not read in this term yet: {}", missing.join(", ")));
    }
    for key in &scene.view.corrupt {
        draft.hold(HoldKind::RecordCorrupt, format!("{key} does not parse; its instance stays as it is"));
    }
    if scene.view.desired == Desired::Unknown {
        draft.hold(
            HoldKind::GroupUnknown,
            "in neither file, or they cannot be read: bring the group back, or delete it by name",
        );
    }
    if let Some(since) = scene.view.mass_removal {
        draft
            .hold(HoldKind::MassRemoval, "a config change would remove too much at once; confirm it, or take it back")
            .since = Some(since);
    }
}

/// Nobody stands at the wrong size without a word about it.
fn tell_waiting(scene: Scene<'_>, draft: &mut Draft<'_>) {
    let Some(size) = members::wanted(scene.view) else { return };
    let n_members = Crew::of(scene).n_members();
    if n_members != size && !draft.has_actions() && !draft.has_holds() {
        draft.hold(HoldKind::InProgress, format!("{n_members} of {size} members; an effect is under way"));
    }
}
