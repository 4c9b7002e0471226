//! What there is: an instance's durable facts, what its provider shows, and what its agent says.
//!
//! Facts are set once and only added. The phase is derived from them, so it cannot disagree with them. What was seen
//! and heard lives beside the facts and never replaces one.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    ids::{ClusterId, Epoch, GroupRef, InstanceId, Shard},
    time::Timestamp,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ownership {
    /// Counted, replaced and removed by its group.
    Managed,
    /// Asked for one by one, and only ever removed by its owner's word or its age.
    OnDemand,
}

crate::words!(
    /// Why an instance was made.
    CreateReason {
        ScaleUp "scale-up",
        Replacement "replacement",
        Rotation "rotation",
        OnDemand "on-demand",
    }
);

impl CreateReason {
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|it| it.as_str() == text)
    }
}

crate::words!(
    /// Why an instance is drained.
    DrainReason {
        ScaleDown "scale-down",
        GroupDeleted "group-deleted",
        Requested "requested",
        Replaced "replaced",
        Unhealthy "unhealthy",
        ConfigDrift "config-drift",
        ForcedExpiry "forced-expiry",
        EligibleExpiry "eligible-expiry",
        OndemandExpiry "ondemand-expiry",
        SpotTerminating "spot-terminating",
        Maintenance "maintenance",
    }
);

impl DrainReason {
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|it| it.as_str() == text)
    }
}

/// The durable facts of one instance: the domain form of its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    pub id: InstanceId,
    pub group: GroupRef,
    pub cluster: ClusterId,
    pub shard: Shard,
    /// Of the last writer; the VM's tags carry that of the intent.
    pub epoch: Epoch,
    /// Of the intent: a repeated create must bear the same tags.
    pub intent_epoch: Epoch,
    pub ownership: Ownership,
    pub created_at: Timestamp,
    pub reason: CreateReason,
    pub request: Option<OnDemandRequest>,
    pub arch: String,
    pub template: String,
    pub infra_hash: String,
    pub runtime_hash: String,
    pub config_etag: String,
    pub instance_type: Option<String>,
    pub subnet: String,
    pub image: Option<String>,
    pub nonce: NonceFact,
    pub provider: ProviderFact,
    pub create_failure: Option<CreateFailure>,
    pub registration: Option<Registration>,
    pub cert: Option<CertPair>,
    pub rejoin: Option<Rejoin>,
    pub replace: Option<ReplaceMark>,
    pub drain: Option<Drain>,
    pub delete: Option<Delete>,
    /// The record was made again from the VM's tags, then.
    pub adopted_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OnDemandRequest {
    pub request_id: Option<String>,
    pub template: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: BTreeMap<String, String>,
    pub by: String,
    pub inherits: Inherited,
}

/// What its group gave to an on-demand instance when it was asked for. The group may change or go before the request is
/// sent for the last time, and the request must stay the same.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Inherited {
    pub template: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    /// Those that the request does not set itself.
    pub vars: BTreeMap<String, String>,
}

/// The registration nonce. The JWT itself is not kept: it is made again from these, byte by byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonceFact {
    pub jti: String,
    pub expires_at: Timestamp,
    pub used_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ProviderFact {
    pub kind: String,
    pub reserved_id: Option<String>,
    pub id: Option<String>,
    pub confirmed_at: Option<Timestamp>,
    pub addresses: Addresses,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Addresses {
    pub ip4: Option<String>,
    pub ip6: Option<String>,
    pub hostname: Option<String>,
    pub fqdn: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateFailure {
    pub at: Timestamp,
    pub class: String,
    pub message: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    pub at: Timestamp,
    /// SPKI, DER.
    pub public_key: Vec<u8>,
    /// As the agent said; which of them are trusted is decided elsewhere.
    pub addresses: Addresses,
    pub agent_version: String,
}

/// The serial in use, and the one before it, which passes until the new one is seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertPair {
    pub current: CertFact,
    pub previous: Option<CertFact>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertFact {
    /// 32 hex digits.
    pub serial: String,
    /// Fingerprint of the issuing CA.
    pub issuer: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejoin {
    pub count: u64,
    pub at: Timestamp,
    pub proof_sha256: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplaceMark {
    pub at: Timestamp,
    pub by: String,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    pub reason: DrainReason,
    pub started_at: Timestamp,
    pub deadline: Timestamp,
    pub replacement: Option<InstanceId>,
    pub acked_at: Option<Timestamp>,
    pub acked_by: Option<String>,
    pub cancelled_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delete {
    pub reason: String,
    pub by: String,
    pub requested_at: Timestamp,
    /// Absence was proved then.
    pub gone_at: Option<Timestamp>,
}

crate::words!(
    /// Where an instance is in its life, by its facts.
    Phase {
        /// Asked for; the provider has not confirmed a VM.
        Pending "pending",
        /// The create was refused. Counted nowhere.
        Failed "failed",
        Provisioning "provisioning",
        Running "running",
        Draining "draining",
        Deleting "deleting",
        Deleted "deleted",
    }
);

impl Instance {
    pub fn phase(&self) -> Phase {
        if let Some(delete) = &self.delete {
            return if delete.gone_at.is_some() { Phase::Deleted } else { Phase::Deleting };
        }
        if self.create_failure.is_some() {
            return Phase::Failed;
        }
        if self.open_drain().is_some() {
            return Phase::Draining;
        }
        if self.registration.is_some() {
            return Phase::Running;
        }
        if self.provider.confirmed_at.is_some() || self.adopted_at.is_some() {
            return Phase::Provisioning;
        }
        Phase::Pending
    }

    /// The drain that is under way, if any.
    pub fn open_drain(&self) -> Option<&Drain> {
        self.drain.as_ref().filter(|drain| drain.cancelled_at.is_none())
    }

    /// When its timers began: an adopted instance's at its adoption.
    pub fn timers_from(&self) -> Timestamp {
        self.adopted_at.unwrap_or(self.created_at)
    }
}

crate::words!(
    /// What the provider shows. Nothing may be decided from not knowing.
    Seen {
        /// Never looked at in this term.
        NotAsked "not-asked",
        /// A look failed, or the VM is missing from something that proves no absence.
        Unknown "unknown",
        Pending "pending",
        Running "running",
        Stopping "stopping",
        Stopped "stopped",
        Suspended "suspended",
        Deleting "deleting",
        Repairing "repairing",
        HostDown "host-down",
        /// Proven: the provider's terminal state, or its own "not found" by id.
        Gone "gone",
    }
);

/// How long a repairing VM or one on a dead host is waited for before it counts as dead.
pub const HOST_GRACE: Duration = Duration::from_secs(60);

impl Seen {
    /// Nothing may be decided from this.
    pub fn is_uncertain(self) -> bool {
        matches!(self, Self::NotAsked | Self::Unknown)
    }
}

/// What the agent says, or fails to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Not registered, or no report yet.
    Starting,
    /// Its report stream is open and its deadline has not passed.
    Healthy,
    /// Its stream is gone, its deadline has not passed.
    Lost { since: Timestamp },
    /// Its deadline has passed.
    Silent { since: Timestamp },
    /// It told us of its end.
    Terminating { noticed_at: Timestamp, deadline: Option<Timestamp> },
}

impl Health {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Lost { .. } => "lost",
            Self::Silent { .. } => "silent",
            Self::Terminating { .. } => "terminating",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LbState {
    Absent,
    /// The call that registers it has not succeeded yet.
    Registering,
    /// The provider accepted it, and does not send it traffic yet.
    Coming,
    Registered,
    Deregistering,
    DrainingOut,
}
