//! The last changes of all shards, numbered in one row, so that a reader who was away for a moment goes on where it was.
//!
//! It is bounded by number and by size. Who is further behind than it reaches begins anew; nobody is ever told less than
//! all without being told so.

use std::{collections::VecDeque, sync::Arc};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{ConfigStatusResponse, Event, GroupStatus, InstanceStatusResponse};
use prost::Message as _;

use super::board::Seen;
use crate::shards::ShardError;

/// A few minutes of a busy cluster.
const MAX_ENTRIES: usize = 4096;
/// Instances carry the last lines of their boot logs, so that a few may be large.
const MAX_WEIGHT: usize = 16 * 1024 * 1024;

/// What changed at a shard.
#[derive(Debug, Clone)]
pub(crate) enum Delta {
    /// It is in touch (again), and this is all of it: what is not named here is gone.
    Snapshot(Box<Seen>),
    Status(Arc<ConfigStatusResponse>),
    Group(Arc<GroupStatus>),
    GroupGone(String),
    /// One that is deleted is told once, as deleted.
    Instance(Arc<InstanceStatusResponse>),
    Event(Arc<Event>),
    /// It is not in touch any more; what was known of it is as old as it is.
    Lost(ShardError),
}

impl Delta {
    fn weight(&self) -> usize {
        match self {
            Self::Snapshot(seen) => seen.weight(),
            Self::Status(it) => it.encoded_len(),
            Self::Group(it) => it.encoded_len(),
            Self::GroupGone(key) => key.len(),
            Self::Instance(it) => it.encoded_len(),
            Self::Event(it) => it.encoded_len(),
            Self::Lost(error) => error.message.len(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) number: u64,
    pub(crate) shard: Arc<str>,
    /// When it was heard, or for a lost shard, when it was heard last; nothing if never.
    pub(crate) as_of: Option<Timestamp>,
    pub(crate) delta: Delta,
    weight: usize,
}

/// Something that came after a reader's place is forgotten already.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Behind;

#[derive(Debug, Default)]
pub(crate) struct Journal {
    entries: VecDeque<Arc<Entry>>,
    weight: usize,
    last: u64,
}

impl Journal {
    pub(super) fn push(&mut self, shard: &Arc<str>, as_of: Option<Timestamp>, delta: Delta) {
        let weight = delta.weight();
        self.last += 1;
        self.weight += weight;
        self.entries.push_back(Arc::new(Entry { number: self.last, shard: shard.clone(), as_of, delta, weight }));
        // The newest stays, however heavy: who reads fast must not be behind for what nobody could have read.
        while 1 < self.entries.len() && (MAX_ENTRIES < self.entries.len() || MAX_WEIGHT < self.weight) {
            self.weight -= self.entries.pop_front().map_or(0, |it| it.weight);
        }
    }

    /// The number of the last entry; 0 before the first.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// At most `max` of the entries after this number.
    pub(super) fn after(&self, number: u64, max: usize) -> Result<Vec<Arc<Entry>>, Behind> {
        let first = self.entries.front().map_or(self.last + 1, |it| it.number);
        // A number that was never given is one of another life. It comes from the reader and may be any.
        let next = number.checked_add(1).filter(|next| first <= *next && number <= self.last).ok_or(Behind)?;
        let skipped = usize::try_from(next - first).unwrap_or(usize::MAX);
        Ok(self.entries.iter().skip(skipped).take(max).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(journal: &mut Journal, key: &str) {
        journal.push(&Arc::from("dev-1"), None, Delta::GroupGone(key.to_owned()));
    }

    fn numbers(journal: &Journal, after: u64, max: usize) -> Result<Vec<u64>, Behind> {
        journal.after(after, max).map(|entries| entries.iter().map(|it| it.number).collect())
    }

    #[test]
    fn reader_goes_on_after_its_place_or_is_told_that_it_is_behind() {
        let mut journal = Journal::default();
        assert_eq!(numbers(&journal, 0, 9), Ok(vec![]));
        assert_eq!(numbers(&journal, 1, 9), Err(Behind), "there was no such number");
        assert_eq!(numbers(&journal, u64::MAX, 9), Err(Behind), "nor one after it");
        for _ in 0..MAX_ENTRIES + 2 {
            gone(&mut journal, "web");
        }
        let last = journal.last();
        assert_eq!(numbers(&journal, last, 9), Ok(vec![]));
        assert_eq!(numbers(&journal, last - 3, 2), Ok(vec![last - 2, last - 1]));
        assert_eq!(numbers(&journal, 2, 1), Ok(vec![3]), "the oldest that is kept");
        assert_eq!(numbers(&journal, 1, 1), Err(Behind));
    }

    #[test]
    fn heavy_entries_push_out_older_ones_but_never_the_newest() {
        let mut journal = Journal::default();
        gone(&mut journal, "light");
        gone(&mut journal, &"x".repeat(MAX_WEIGHT + 1));
        assert_eq!(numbers(&journal, 1, 9), Ok(vec![2]));
        assert_eq!(numbers(&journal, 0, 9), Err(Behind));
        gone(&mut journal, "light");
        assert_eq!(numbers(&journal, 2, 9), Ok(vec![3]));
        assert_eq!((numbers(&journal, 1, 9), journal.weight), (Err(Behind), 5));
    }
}
