//! The plan: what shall be done now, in order, and what is deliberately not done, with the reason.

use std::fmt;

use crate::{
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HoldKind {
    SnapshotIncomplete,
    GroupUnknown,
    RecordCorrupt,
    UncertainMembers,
    ProviderUnavailable,
    ProviderAuth,
    NoCapacity,
    Quota,
    InvalidRequest,
    ImageUnresolved,
    BackingOff,
    Runaway,
    MassDisconnect,
    MassRemoval,
    WaitingForReplacement,
    WaitingForDrain,
    WaitingForLb,
    RolloutPaused,
    RolloutFailing,
    /// An effect is under way, or its next try is not due yet.
    InProgress,
    RateLimited,
    LeaseStalled,
}

impl HoldKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SnapshotIncomplete => "SnapshotIncomplete",
            Self::GroupUnknown => "GroupUnknown",
            Self::RecordCorrupt => "RecordCorrupt",
            Self::UncertainMembers => "UncertainMembers",
            Self::ProviderUnavailable => "ProviderUnavailable",
            Self::ProviderAuth => "ProviderAuth",
            Self::NoCapacity => "NoCapacity",
            Self::Quota => "Quota",
            Self::InvalidRequest => "InvalidRequest",
            Self::ImageUnresolved => "ImageUnresolved",
            Self::BackingOff => "BackingOff",
            Self::Runaway => "Runaway",
            Self::MassDisconnect => "MassDisconnect",
            Self::MassRemoval => "MassRemoval",
            Self::WaitingForReplacement => "WaitingForReplacement",
            Self::WaitingForDrain => "WaitingForDrain",
            Self::WaitingForLb => "WaitingForLb",
            Self::RolloutPaused => "RolloutPaused",
            Self::RolloutFailing => "RolloutFailing",
            Self::InProgress => "InProgress",
            Self::RateLimited => "RateLimited",
            Self::LeaseStalled => "LeaseStalled",
        }
    }
}

/// Decides. Pure: the same snapshot and moment give the same plan, and it cannot fail.
pub fn plan(_snapshot: &Snapshot, _now: Timestamp) -> Plan {
    Plan::default()
}
