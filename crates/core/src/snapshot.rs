//! What the planner sees: everything it may decide from, Unknown included, and nothing it would have to ask for.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    group::Desired,
    ids::{GroupRef, InstanceId, LbKey},
    instance::{CreateReason, DrainReason, Health, LbState, Ownership, Phase, Seen},
    ports::provider::VmRef,
    time::Timestamp,
};

#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub shard: ShardView,
    /// One group for its worker, all of them for `Plan` and the simulator.
    pub groups: BTreeMap<GroupRef, GroupView>,
}

/// Facts that hold for every group of the shard.
#[derive(Debug, Clone, PartialEq)]
pub struct ShardView {
    pub complete: Completeness,
    pub provider: ProviderView,
    /// The mass-disconnect brake: who is held, and who of them may go now.
    pub brake: Brake,
    pub settings: Settings,
}

/// What was read in this term. A create or a removal needs all four.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completeness {
    pub config: bool,
    pub groups: bool,
    pub records: bool,
    pub listing: bool,
}

impl Completeness {
    pub const ALL: Self = Self { config: true, groups: true, records: true, listing: true };

    pub fn is_complete(self) -> bool {
        self.config && self.groups && self.records && self.listing
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProviderView {
    Available,
    /// Since when, and its own words.
    Unavailable {
        since: Timestamp,
        message: String,
    },
    Unauthorized {
        since: Timestamp,
        message: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Brake {
    /// Lost with a running VM while the brake is on: they stay members.
    pub held: BTreeSet<InstanceId>,
    /// Those of the held that may be replaced now.
    pub released: BTreeSet<InstanceId>,
    pub since: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Zero: never.
    pub registration_timeout: Duration,
    pub deleted_record_retention: Duration,
    pub eligible_age: Duration,
    pub forced_age: Duration,
    pub ondemand_age: Duration,
    pub runaway_base: u32,
    pub runaway_factor: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct GroupView {
    pub desired: Desired,
    pub infra_hash: String,
    pub drain_timeout: Duration,
    pub load_balancers: Vec<LbKey>,
    pub rollout_paused: bool,
    /// Whom the operator wants to see go first.
    pub victims: Vec<InstanceId>,
    /// Why no create may start now, beside the size: refusals of the provider and our own pauses.
    pub create_blocks: Vec<CreateBlock>,
    /// Memory of creates and losses.
    pub failures: Failures,
    pub window: CreateWindow,
    pub instances: BTreeMap<InstanceId, InstanceView>,
    /// VMs with our tags for this group and no record, not judged yet.
    pub candidates: Vec<Candidate>,
    /// Records of this group that do not parse. They are members nobody touches; the key of each.
    pub corrupt: Vec<String>,
    /// A config change would empty too much of the shard at once; until a person confirms, the size stays.
    pub mass_removal: Option<Timestamp>,
}

/// Something that keeps creates of a group back until a time or a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateBlock {
    pub kind: BlockKind,
    pub message: String,
    pub since: Timestamp,
    /// `None`: until something changes.
    pub until: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockKind {
    NoCapacity,
    Quota,
    ProviderAuth,
    InvalidRequest,
    ImageUnresolved,
    BackingOff,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Failures {
    /// Instances of the wanted infra hash in a row that failed or never became ready.
    pub rollout_in_a_row: u32,
    /// When a failing rollout may try its next probe.
    pub rollout_probe_at: Option<Timestamp>,
    /// Failed replacements of the present forced expiry.
    pub replacement_in_a_row: u32,
    pub replacement_retry_at: Option<Timestamp>,
}

/// Creates of the runaway window, accepted or ambiguous.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CreateWindow {
    pub n_creates: u32,
    pub largest_size: u32,
    /// When the oldest of them leaves the window.
    pub frees_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct InstanceView {
    pub ownership: Ownership,
    pub phase: Phase,
    pub reason: CreateReason,
    pub created_at: Timestamp,
    /// Adoption restarts the timers, not the age.
    pub timers_from: Timestamp,
    pub adopted: bool,
    pub confirmed: bool,
    pub registered_at: Option<Timestamp>,
    pub infra_hash: String,
    pub seen: Seen,
    pub seen_since: Option<Timestamp>,
    pub health: Health,
    /// A report came in this term (or before, as far as this leader knows).
    pub reported: bool,
    pub drain: Option<DrainView>,
    /// `delete` is durable; when it was decided.
    pub delete_requested_at: Option<Timestamp>,
    pub delete_gone_at: Option<Timestamp>,
    pub create_failed_at: Option<Timestamp>,
    pub replace_marked_at: Option<Timestamp>,
    /// An advisory notice (`rebalance`, `maintenance`) came.
    pub advised_at: Option<Timestamp>,
    pub load_balancers: BTreeMap<LbKey, LbState>,
    /// An effect for this instance is under way: the planner waits for its outcome.
    pub busy: Option<Busy>,
    /// The earliest moment for the next try of whatever failed last.
    pub next_attempt_at: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    /// Its create call is in flight, or waits for its turn.
    Creating,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrainView {
    pub reason: DrainReason,
    pub started_at: Timestamp,
    /// When it is deleted without an acknowledgement, failover allowance included.
    pub delete_at: Timestamp,
    pub acked: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub vm: VmRef,
    pub seen: Seen,
    pub ownership: Ownership,
    pub created_at: Option<Timestamp>,
}
