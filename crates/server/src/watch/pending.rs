//! What one stream has not taken yet, bounded by nature: by the number of keys, or by dropping the oldest.
//!
//! Everything is handed out in the order of its number. So whoever stops reading after number `n` and comes back with
//! `n` has missed nothing: what was pending then has a higher number, and what was replaced has a successor that does.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Bound,
    sync::Arc,
};

use nstance_core::ids::InstanceId;
use nstance_proto::v1;

use super::instances::{InstanceChange, Told};

/// Errors and events a stream may be behind.
pub(super) const QUEUE: usize = 1024;

/// The next event of a stream.
#[derive(Debug)]
pub struct Line<I> {
    pub number: u64,
    pub item: Arc<I>,
    /// Events before this one that were dropped.
    pub dropped: u64,
}

pub trait Pending<I>: Default + Send + 'static {
    /// Adds an event. Numbers only grow.
    fn push(&mut self, number: u64, item: Arc<I>);
    fn pop(&mut self) -> Option<Line<I>>;
    /// The number of the event that comes next.
    fn first(&self) -> Option<u64>;

    fn is_empty(&self) -> bool {
        self.first().is_none()
    }
}

/// Has a key of which only the newest state counts.
pub trait Keyed {
    fn key(&self) -> &str;
}

impl Keyed for v1::GroupEvent {
    fn key(&self) -> &str {
        self.group.as_ref().map_or("", |group| &group.key)
    }
}

/// The newest state per key.
pub struct Latest<I> {
    by_number: BTreeMap<u64, Arc<I>>,
    numbers: BTreeMap<String, u64>,
}

impl<I> Default for Latest<I> {
    fn default() -> Self {
        Self { by_number: BTreeMap::new(), numbers: BTreeMap::new() }
    }
}

impl<I: Keyed + Send + Sync + 'static> Pending<I> for Latest<I> {
    fn push(&mut self, number: u64, item: Arc<I>) {
        if let Some(older) = self.numbers.insert(item.key().to_owned(), number) {
            self.by_number.remove(&older);
        }
        self.by_number.insert(number, item);
    }

    fn pop(&mut self) -> Option<Line<I>> {
        let (number, item) = self.by_number.pop_first()?;
        self.numbers.remove(item.key());
        Some(Line { number, item, dropped: 0 })
    }

    fn first(&self) -> Option<u64> {
        self.by_number.first_key_value().map(|(number, _)| *number)
    }
}

/// Per instance the newest state, after at most one begin and one end of a drain. The end of an instance replaces all.
#[derive(Default)]
pub struct Sequences {
    by_number: BTreeMap<u64, Arc<InstanceChange>>,
    numbers: BTreeMap<InstanceId, Vec<u64>>,
}

impl Sequences {
    /// Drops what is pending of these instances: a snapshot says it all.
    pub fn cover(&mut self, ids: (Bound<InstanceId>, Bound<InstanceId>)) {
        let covered: Vec<InstanceId> = self.numbers.range(ids).map(|(id, _)| *id).collect();
        for id in covered {
            for number in self.numbers.remove(&id).unwrap_or_default() {
                self.by_number.remove(&number);
            }
        }
    }
}

/// Whether a pending event is of no more use once a newer one of the same instance is there. The begin and the end of
/// a drain stay in their order, for each asks for something to be done; of each only the newest counts.
fn is_replaced(older: Told, newer: Told) -> bool {
    match (older, newer) {
        (_, Told::Deleted) => true,
        (Told::PendingDeletion | Told::DrainCancelled, newer) => older == newer,
        (_, _) => true,
    }
}

impl Pending<InstanceChange> for Sequences {
    fn push(&mut self, number: u64, item: Arc<InstanceChange>) {
        let numbers = self.numbers.entry(item.id).or_default();
        let by_number = &mut self.by_number;
        numbers.retain(|older| {
            let replaced = by_number.get(older).is_none_or(|it| is_replaced(it.told, item.told));
            if replaced {
                by_number.remove(older);
            }
            !replaced
        });
        numbers.push(number);
        by_number.insert(number, item);
    }

    fn pop(&mut self) -> Option<Line<InstanceChange>> {
        let (number, item) = self.by_number.pop_first()?;
        if let Some(numbers) = self.numbers.get_mut(&item.id) {
            numbers.retain(|it| *it != number);
            if numbers.is_empty() {
                self.numbers.remove(&item.id);
            }
        }
        Some(Line { number, item, dropped: 0 })
    }

    fn first(&self) -> Option<u64> {
        self.by_number.first_key_value().map(|(number, _)| *number)
    }
}

/// The newest so many; what did not fit is counted.
pub struct Queue<I> {
    items: VecDeque<(u64, Arc<I>)>,
    dropped: u64,
}

impl<I> Default for Queue<I> {
    fn default() -> Self {
        Self { items: VecDeque::new(), dropped: 0 }
    }
}

impl<I: Send + Sync + 'static> Pending<I> for Queue<I> {
    fn push(&mut self, number: u64, item: Arc<I>) {
        if QUEUE <= self.items.len() {
            self.items.pop_front();
            self.dropped += 1;
        }
        self.items.push_back((number, item));
    }

    fn pop(&mut self) -> Option<Line<I>> {
        let (number, item) = self.items.pop_front()?;
        Some(Line { number, item, dropped: std::mem::take(&mut self.dropped) })
    }

    fn first(&self) -> Option<u64> {
        self.items.front().map(|(number, _)| *number)
    }
}
