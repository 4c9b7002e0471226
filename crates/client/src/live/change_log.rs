//! The latest changes of all shards, numbered in one sequence, so that a reader that was away for a moment continues where
//! it stopped.
//!
//! The log is bounded by number and by size. A reader that is further behind than the log reaches is told so and starts
//! again from the full state.

use std::{collections::VecDeque, sync::Arc};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{ConfigStatusResponse, Event, GroupStatus, InstanceStatusResponse};
use prost::Message as _;

use super::shard_states::ShardView;
use crate::ShardError;

/// A few minutes of a busy cluster.
const MAX_ENTRIES: usize = 4096;
/// Instances carry the last lines of their boot logs, so that a few may be large.
const MAX_BYTES: usize = 16 * 1024 * 1024;

/// One change of one shard.
#[derive(Debug, Clone)]
pub enum Change {
    /// The shard was connected (again). This is its full state: what is not in it does not exist.
    Connected(Box<ShardView>),
    Status(Arc<ConfigStatusResponse>),
    Group(Arc<GroupStatus>),
    GroupDeleted(String),
    /// A deleted instance is reported once, with status `deleted`.
    Instance(Arc<InstanceStatusResponse>),
    Event(Arc<Event>),
    /// The shard cannot be reached. What is known of it stays, and grows old.
    Disconnected(ShardError),
}

impl Change {
    fn n_bytes(&self) -> usize {
        match self {
            Self::Connected(view) => view.n_bytes(),
            Self::Status(it) => it.encoded_len(),
            Self::Group(it) => it.encoded_len(),
            Self::GroupDeleted(key) => key.len(),
            Self::Instance(it) => it.encoded_len(),
            Self::Event(it) => it.encoded_len(),
            Self::Disconnected(error) => error.message.len(),
        }
    }
}

#[derive(Debug)]
pub struct LogEntry {
    pub number: u64,
    pub shard: Arc<str>,
    /// When the change was received. For a disconnected shard, when the last message was received; `None` if never.
    pub as_of: Option<Timestamp>,
    pub change: Change,
    n_bytes: usize,
}

/// The reader has missed changes that are not in the log any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("changes after this number are not kept any more")]
pub struct TooFarBehind;

#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    entries: VecDeque<Arc<LogEntry>>,
    n_bytes: usize,
    last: u64,
}

impl ChangeLog {
    pub(super) fn push(&mut self, shard: &Arc<str>, as_of: Option<Timestamp>, change: Change) {
        let n_bytes = change.n_bytes();
        self.last += 1;
        self.n_bytes += n_bytes;
        self.entries.push_back(Arc::new(LogEntry { number: self.last, shard: shard.clone(), as_of, change, n_bytes }));
        // The newest stays, however large: else even the fastest reader would be too far behind.
        while 1 < self.entries.len() && (MAX_ENTRIES < self.entries.len() || MAX_BYTES < self.n_bytes) {
            self.n_bytes -= self.entries.pop_front().map_or(0, |it| it.n_bytes);
        }
    }

    /// The number of the last entry; 0 before the first.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    /// At most `max` of the entries after this number.
    pub(super) fn after(&self, number: u64, max: usize) -> Result<Vec<Arc<LogEntry>>, TooFarBehind> {
        let first = self.entries.front().map_or(self.last + 1, |it| it.number);
        // The number comes from the reader and may be any; one that was never given belongs to another process.
        let next = number.checked_add(1).filter(|next| first <= *next && number <= self.last).ok_or(TooFarBehind)?;
        let skipped = usize::try_from(next - first).unwrap_or(usize::MAX);
        Ok(self.entries.iter().skip(skipped).take(max).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push_deleted(log: &mut ChangeLog, key: &str) {
        log.push(&Arc::from("dev-1"), None, Change::GroupDeleted(key.to_owned()));
    }

    fn numbers(log: &ChangeLog, after: u64, max: usize) -> Result<Vec<u64>, TooFarBehind> {
        log.after(after, max).map(|entries| entries.iter().map(|it| it.number).collect())
    }

    #[test]
    fn reader_continues_after_its_number_or_learns_that_it_is_too_far_behind() {
        let mut log = ChangeLog::default();
        assert_eq!(numbers(&log, 0, 9), Ok(vec![]));
        assert_eq!(numbers(&log, 1, 9), Err(TooFarBehind), "there was no such number");
        assert_eq!(numbers(&log, u64::MAX, 9), Err(TooFarBehind), "nor one after it");
        for _ in 0..MAX_ENTRIES + 2 {
            push_deleted(&mut log, "web");
        }
        let last = log.last();
        assert_eq!(numbers(&log, last, 9), Ok(vec![]));
        assert_eq!(numbers(&log, last - 3, 2), Ok(vec![last - 2, last - 1]));
        assert_eq!(numbers(&log, 2, 1), Ok(vec![3]), "the oldest that is kept");
        assert_eq!(numbers(&log, 1, 1), Err(TooFarBehind));
    }

    #[test]
    fn large_entries_push_out_older_ones_but_never_the_newest() {
        let mut log = ChangeLog::default();
        push_deleted(&mut log, "light");
        push_deleted(&mut log, &"x".repeat(MAX_BYTES + 1));
        assert_eq!(numbers(&log, 1, 9), Ok(vec![2]));
        assert_eq!(numbers(&log, 0, 9), Err(TooFarBehind));
        push_deleted(&mut log, "light");
        assert_eq!(numbers(&log, 2, 9), Ok(vec![3]));
        assert_eq!((numbers(&log, 1, 9), log.n_bytes), (Err(TooFarBehind), 5));
    }
}
