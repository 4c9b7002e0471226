//! Under which term a write goes, and whether it may still go.
//!
//! The lease gives peace, the epoch gives safety: below its own `shard/` a writer that meets a higher epoch than its own
//! has been succeeded and must stop. Below `cluster/` leaders of all shards write, so there the epoch only informs.

use nstance_core::{
    ids::Epoch,
    term::{Guard, LeaseStalled},
};

use crate::cas::RecordError;

/// The right to write: a term's guard, or just a number for those who act outside of a term (the admin tool, and a
/// server that logs its own certificate).
#[derive(Clone, Copy)]
pub enum Fence<'a> {
    Guard(&'a Guard),
    Epoch(Epoch),
}

impl Fence<'_> {
    pub fn epoch(&self) -> Epoch {
        match self {
            Self::Guard(guard) => guard.epoch(),
            Self::Epoch(epoch) => *epoch,
        }
    }

    /// Asked immediately before every put.
    pub(crate) fn permit(&self) -> Result<(), LeaseStalled> {
        match self {
            Self::Guard(guard) => guard.permit().map(drop),
            Self::Epoch(_) => Ok(()),
        }
    }
}

impl<'a> From<&'a Guard> for Fence<'a> {
    fn from(guard: &'a Guard) -> Self {
        Self::Guard(guard)
    }
}

/// Who may have written what we met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Below our own `shard/`: only leaders of this shard, one after the other.
    Shard,
    /// Below `cluster/`: leaders of all shards, and the admin tool.
    Cluster,
}

/// Refuses to go on under an epoch that has been succeeded.
pub(crate) fn check_epoch(scope: Scope, key: &str, ours: Epoch, theirs: Epoch) -> Result<(), RecordError> {
    if scope == Scope::Shard && ours < theirs {
        return Err(RecordError::Fenced { key: key.to_owned(), ours, theirs });
    }
    Ok(())
}
