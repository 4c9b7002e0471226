//! Surge, pace and brakes: how much may happen at once.

use crate::{
    group::Desired,
    snapshot::{BlockKind, CreateBlock, GroupView, ProviderView, ShardView},
    time::Timestamp,
};

/// So many failures in a row stop a rollout: once may be chance, three times is the new template.
pub const ROLLOUT_FAILS_AFTER: u32 = 3;

/// So many failed replacements of an instance past its forced age, and it goes without one.
pub const FORCED_WITHOUT_REPLACEMENT_AFTER: u32 = 2;

/// Whether rotations of the group may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rollout {
    Free,
    Paused,
    /// The new template keeps failing; until then no further try.
    Failing {
        until: Option<Timestamp>,
    },
}

pub fn rollout(view: &GroupView, now: Timestamp) -> Rollout {
    if view.rollout_paused {
        return Rollout::Paused;
    }
    let until = view.failures.rollout_probe_at;
    if view.failures.rollout_in_a_row < ROLLOUT_FAILS_AFTER || until.is_some_and(|at| at <= now) {
        return Rollout::Free;
    }
    Rollout::Failing { until }
}

/// How many creates the runaway guard still allows in its window.
pub fn creates_left(shard: &ShardView, view: &GroupView) -> u32 {
    let size = match view.desired {
        Desired::Known(size) => size,
        Desired::Tombstoned | Desired::Unknown => 0,
    };
    let settings = &shard.settings;
    let largest = view.window.largest_size.max(size);
    settings
        .runaway_base
        .saturating_add(settings.runaway_factor.saturating_mul(largest))
        .saturating_sub(view.window.n_creates)
}

/// What keeps creates of a group back now: the provider as a whole, or what the group met last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block<'a> {
    Unavailable { since: Timestamp, message: &'a str },
    Unauthorized { since: Timestamp, message: &'a str },
    Group(&'a CreateBlock),
}

/// Every reason against a create now; a block whose time is over is none.
pub fn blocks<'a>(shard: &'a ShardView, view: &'a GroupView, now: Timestamp) -> Vec<Block<'a>> {
    let provider = match &shard.provider {
        ProviderView::Available => None,
        ProviderView::Unavailable { since, message } => Some(Block::Unavailable { since: *since, message }),
        ProviderView::Unauthorized { since, message } => Some(Block::Unauthorized { since: *since, message }),
    };
    let group = view.create_blocks.iter().filter(|block| block.until.is_none_or(|until| now < until)).map(Block::Group);
    provider.into_iter().chain(group).collect()
}

impl Block<'_> {
    pub fn kind(&self) -> crate::plan::HoldKind {
        use crate::plan::HoldKind;
        match self {
            Self::Unavailable { .. } => HoldKind::ProviderUnavailable,
            Self::Unauthorized { .. } => HoldKind::ProviderAuth,
            Self::Group(block) => match block.kind {
                BlockKind::NoCapacity => HoldKind::NoCapacity,
                BlockKind::Quota => HoldKind::Quota,
                BlockKind::ProviderAuth => HoldKind::ProviderAuth,
                BlockKind::InvalidRequest => HoldKind::InvalidRequest,
                BlockKind::ImageUnresolved => HoldKind::ImageUnresolved,
                BlockKind::BackingOff => HoldKind::BackingOff,
            },
        }
    }

    pub fn message(&self) -> &str {
        match self {
            Self::Unavailable { message, .. } | Self::Unauthorized { message, .. } => message,
            Self::Group(block) => &block.message,
        }
    }

    pub fn since(&self) -> Timestamp {
        match self {
            Self::Unavailable { since, .. } | Self::Unauthorized { since, .. } => *since,
            Self::Group(block) => block.since,
        }
    }

    pub fn until(&self) -> Option<Timestamp> {
        match self {
            Self::Unavailable { .. } | Self::Unauthorized { .. } => None,
            Self::Group(block) => block.until,
        }
    }
}
