//! What is known of the places where instances can be made: which choices failed lately, and how many addresses a
//! subnet has left. Shard-wide, for what one group learned spares the others the same refusal.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use nstance_config::MergedGroup;
use nstance_core::{ports::provider::SubnetFree, snapshot::Busy, time::Timestamp};

use super::State;

/// How long a choice that had no capacity is passed over.
const PENALTY: Duration = Duration::from_secs(180);

/// So many machines of one choice that are taken back within `TAKEN_WINDOW` mean that the provider wants it for others:
/// its subnet goes last for `AVOIDED`.
const TAKEN: usize = 3;
const TAKEN_WINDOW: Duration = Duration::from_secs(600);
const AVOIDED: Duration = Duration::from_secs(1800);

/// How long a subnet's figure is believed.
const BELIEVED: Duration = Duration::from_secs(30);

/// One choice: a subnet and an instance type.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    pub subnet: String,
    pub instance_type: Option<String>,
}

impl Pair {
    /// Every choice of a group, best first.
    pub fn of(merged: &MergedGroup) -> Vec<Self> {
        let fallbacks = merged.instance_type_fallbacks.iter().cloned().map(Some);
        let types: Vec<Option<String>> = [merged.instance_type.clone()].into_iter().chain(fallbacks).collect();
        merged
            .subnets
            .iter()
            .flat_map(|subnet| types.iter().map(|it| Self { subnet: subnet.clone(), instance_type: it.clone() }))
            .collect()
    }
}

/// A subnet's free addresses, and when we asked for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figure {
    pub free: u64,
    pub asked_at: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    Known(Figure),
    Unlimited,
    Unknown,
}

#[derive(Debug, Default)]
pub struct Places {
    penalties: BTreeMap<Pair, Timestamp>,
    subnets: BTreeMap<String, (SubnetFree, Timestamp)>,
    /// When machines of each choice were announced to be taken back.
    taken: BTreeMap<Pair, VecDeque<Timestamp>>,
    /// Subnets that go last, and until when.
    avoided: BTreeMap<String, Timestamp>,
}

impl Places {
    /// Passes the choice over for a while.
    pub fn penalise(&mut self, pair: Pair, now: Timestamp) {
        self.penalties.retain(|_, until| now < *until);
        self.penalties.insert(pair, now.plus(PENALTY));
    }

    /// Notes that a machine of this choice is taken back.
    pub fn taken(&mut self, pair: Pair, now: Timestamp) {
        self.avoided.retain(|_, until| now < *until);
        self.taken.retain(|_, times| times.back().is_some_and(|at| now.since(*at) <= TAKEN_WINDOW));
        let subnet = pair.subnet.clone();
        let times = self.taken.entry(pair).or_default();
        times.retain(|at| now.since(*at) <= TAKEN_WINDOW);
        times.push_back(now);
        if TAKEN <= times.len() {
            self.avoided.insert(subnet, now.plus(AVOIDED));
        }
    }

    /// Whether the subnet goes last.
    pub fn is_avoided(&self, subnet: &str, now: Timestamp) -> bool {
        self.avoided.get(subnet).is_some_and(|until| now < *until)
    }

    /// Until when the choice is passed over, if it is.
    pub fn penalty(&self, pair: &Pair, now: Timestamp) -> Option<Timestamp> {
        self.penalties.get(pair).copied().filter(|until| now < *until)
    }

    /// Nothing else is left to try: these are free again no later than `until`.
    pub fn shorten(&mut self, pairs: &[Pair], until: Timestamp) {
        for pair in pairs {
            if let Some(its) = self.penalties.get_mut(pair) {
                *its = until.min(*its);
            }
        }
    }

    /// The choice worked.
    pub fn pardon(&mut self, pair: &Pair) {
        self.penalties.remove(pair);
    }

    pub fn learn(&mut self, subnet: &str, free: SubnetFree, asked_at: Timestamp) {
        self.subnets.insert(subnet.to_owned(), (free, asked_at));
    }

    pub fn room(&self, subnet: &str, now: Timestamp) -> Room {
        match self.subnets.get(subnet) {
            Some((SubnetFree::Unlimited, _)) => Room::Unlimited,
            Some((SubnetFree::Free(free), asked_at)) if now.since(*asked_at) < BELIEVED => {
                Room::Known(Figure { free: *free, asked_at: *asked_at })
            }
            _ => Room::Unknown,
        }
    }
}

impl State {
    /// Creates that the figure of their subnet may not show: under way, or begun after it was asked for.
    pub fn n_hidden_creates(&self, subnet: &str, figure: Figure) -> u64 {
        let hidden = self.entries.values().filter(|entry| {
            let it = entry.instance();
            let is_newer = figure.asked_at <= it.created_at && it.create_failure.is_none();
            it.subnet == subnet && (is_newer || entry.busy == Some(Busy::Creating))
        });
        u64::try_from(hidden.count()).unwrap_or(u64::MAX)
    }
}
