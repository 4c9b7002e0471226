//! What is asked: a group and its wanted size.

use std::time::Duration;

use crate::ids::{GroupRef, Kind, LbKey};

/// A group as the planner needs it, merged from config and API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    pub group: GroupRef,
    pub size: u32,
    pub kind: Kind,
    pub template: String,
    /// A record with another one is drifted, its instance is rotated.
    pub infra_hash: String,
    /// An agent with another one gets its files again.
    pub runtime_hash: String,
    pub drain_timeout: Duration,
    pub load_balancers: Vec<LbKey>,
    pub rollout_paused: bool,
}

/// How many members a group shall have, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Desired {
    Known(u32),
    /// Deleted by an explicit word: its members leave.
    Tombstoned,
    /// Neither in the config nor in the groups file, or those could not be read: nobody is made, nobody removed.
    Unknown,
}
