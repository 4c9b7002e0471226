//! The live state of all shards: kept in memory from their watch streams.
//!
//! A shard repeats past events only to a caller that names a resume token, and has few places for watchers. So one task per
//! shard reads its streams, and any number of readers are answered from what it keeps.
//!
//! A reader either takes the full state whenever [`LiveState::subscribe`] reports a change ([`LiveState::views`]), or reads
//! the numbered log of changes ([`LiveState::start_reading`], [`LiveState::changes_after`]). Readers have no queues: one that
//! is too far behind the log is told so and starts again.

mod change_log;
mod own_writes;
mod shard_states;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nstance_core::{ports::clock::Clock, time::Timestamp};
use nstance_proto::v1::{Event, GroupStatus};
use nstance_rt::tasks::Tasks;
use tokio::sync::broadcast;

use self::shard_states::ShardStates;
pub use self::{
    change_log::{Change, LogEntry, TooFarBehind},
    shard_states::{ListRequest, MAX_AGE, ShardState, ShardView, SnapshotStart, Update, dropped_events},
};
use crate::{ResumeToken, ShardError, Shards};

/// How many events a reader of [`LiveState::subscribe_events`] may be behind.
const MAX_UNREAD_EVENTS: usize = 1024;

/// An event and its shard.
#[derive(Debug, Clone)]
pub struct ShardEvent {
    pub shard: String,
    pub event: Event,
}

/// The remembered events of one shard.
#[derive(Debug)]
pub struct EventHistory {
    pub shard: String,
    pub events: Vec<Event>,
    /// When the last message was received; `None` if never.
    pub as_of: Option<Timestamp>,
    pub disconnected: Option<ShardError>,
}

/// How a reader of changes starts.
#[derive(Debug)]
pub enum ReadStart {
    /// The reader was away only briefly, and continues after its own number.
    Resumed,
    /// The full state, and the number after which the reader continues.
    FullState(Vec<ShardView>, u64),
}

/// A change that is being made through this process. When it is dropped the change counts as made, whatever the answer was:
/// it may have happened.
#[must_use = "the write is counted when this is dropped"]
pub struct PendingWrite {
    live: Arc<LiveState>,
    shard_indexes: Vec<usize>,
}

impl Drop for PendingWrite {
    fn drop(&mut self) {
        let mut states = self.live.states();
        for index in &self.shard_indexes {
            states.record_write(*index);
        }
    }
}

/// The live state of all shards.
pub struct LiveState {
    names: Vec<String>,
    states: Mutex<ShardStates>,
    /// The number of the last change.
    last_change: tokio::sync::watch::Sender<u64>,
    events: broadcast::Sender<Arc<ShardEvent>>,
    clock: Arc<dyn Clock>,
}

impl LiveState {
    /// Nothing is known of any shard, and no shard is watched.
    pub fn new(shards: &Shards, clock: Arc<dyn Clock>) -> Arc<Self> {
        let names: Vec<String> = shards.names().map(str::to_owned).collect();
        let (events, _) = broadcast::channel(MAX_UNREAD_EVENTS);
        let states = Mutex::new(ShardStates::new(names.iter().cloned()));
        Arc::new(Self { names, states, last_change: tokio::sync::watch::Sender::new(0), events, clock })
    }

    /// Starts to watch all shards, until the task scope ends.
    pub fn start(tasks: &Tasks, shards: &Shards, clock: Arc<dyn Clock>) -> Arc<Self> {
        let live = Self::new(shards, clock);
        for (index, connection) in shards.connections().iter().enumerate() {
            tasks.spawn_droppable("streams of a shard", watch::run(live.clone(), index, connection.clone()));
        }
        live
    }

    fn states(&self) -> MutexGuard<'_, ShardStates> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies an update of the shard with this index in the configured order.
    pub fn apply(&self, shard_index: usize, update: Update) {
        let event = match &update {
            Update::Event(event) => Some(Event::clone(event)),
            _ => None,
        };
        let number = {
            let mut states = self.states();
            states.apply(shard_index, update, self.clock.now());
            states.log.last()
        };
        if let (Some(event), Some(shard)) = (event, self.names.get(shard_index)) {
            // An error means that there is no reader.
            let _ = self.events.send(Arc::new(ShardEvent { shard: shard.clone(), event }));
        }
        self.publish(number);
    }

    fn publish(&self, number: u64) {
        self.last_change.send_if_modified(|it| std::mem::replace(it, number.max(*it)) < number);
    }

    fn n_writes(&self, shard_index: usize) -> u64 {
        self.states().n_writes(shard_index)
    }

    /// Call this before something is changed at these shards, and drop the result when the change was answered. Until the
    /// known state of a shard includes the change, [`Self::groups`] and [`Self::n_instances`] answer `None`.
    pub fn begin_write(self: &Arc<Self>, shards: &Shards) -> PendingWrite {
        let written = self.names.iter().enumerate().filter(|(_, name)| shards.contains(name));
        PendingWrite { live: self.clone(), shard_indexes: written.map(|(index, _)| index).collect() }
    }

    /// Call this before a list is requested that is to complete the shard's known state.
    pub fn begin_list(&self, shard: &str) -> Option<ListRequest> {
        self.states().begin_list(shard)
    }

    /// Merges a list of groups into the known state.
    pub fn merge_groups(&self, request: Option<ListRequest>, groups: &[GroupStatus], token: &str) {
        let (Some(request), Some(token)) = (request, ResumeToken::parse(token)) else { return };
        let number = {
            let mut states = self.states();
            states.merge_groups(request, groups, token);
            states.log.last()
        };
        self.publish(number);
    }

    /// Takes the token of a list of instances: once the stream has passed it, the known instances include all earlier writes.
    pub fn note_instances_token(&self, request: Option<ListRequest>, token: &str) {
        if let (Some(request), Some(token)) = (request, ResumeToken::parse(token)) {
            self.states().note_instances_token(request, token);
        }
    }

    /// A shard's groups, and when it last sent something. `None` if the shard itself must be asked.
    pub fn groups(&self, shard: &str) -> Option<(Timestamp, Vec<Arc<GroupStatus>>)> {
        self.states().groups(shard, self.clock.now())
    }

    /// How many instances a shard has, under the same condition.
    pub fn n_instances(&self, shard: &str) -> Option<(Timestamp, usize)> {
        self.states().n_instances(shard, self.clock.now())
    }

    fn last_token(&self, shard_index: usize) -> Option<ResumeToken> {
        self.states().last_token(shard_index)
    }

    /// Whether each shard is connected.
    pub fn connected(&self) -> Vec<(String, bool)> {
        self.views().iter().map(|it| (it.shard.to_string(), it.disconnected.is_none())).collect()
    }

    /// What is known of every shard, in the configured order.
    pub fn views(&self) -> Vec<ShardView> {
        self.states().views()
    }

    /// Events that arrive from now on. A reader that is too slow loses the oldest.
    pub fn subscribe_events(&self) -> broadcast::Receiver<Arc<ShardEvent>> {
        self.events.subscribe()
    }

    pub fn event_history(&self, shards: &Shards) -> Vec<EventHistory> {
        let states = self.states();
        let history = |it: ShardView| {
            let events = states.history(&it.shard).iter().map(|it| Event::clone(it)).collect();
            EventHistory { shard: it.shard.to_string(), events, as_of: it.as_of, disconnected: it.disconnected }
        };
        states.views().into_iter().filter(|it| shards.contains(&it.shard)).map(history).collect()
    }

    /// The number of the last change, which changes whenever something did.
    pub fn subscribe(&self) -> tokio::sync::watch::Receiver<u64> {
        self.last_change.subscribe()
    }

    /// For a reader that has read up to this number, or nothing yet.
    pub fn start_reading(&self, last_read: Option<u64>) -> ReadStart {
        let states = self.states();
        match last_read {
            Some(number) if states.log.after(number, 0).is_ok() => ReadStart::Resumed,
            _ => ReadStart::FullState(states.views(), states.log.last()),
        }
    }

    /// At most `max` of the changes after this number.
    pub fn changes_after(&self, number: u64, max: usize) -> Result<Vec<Arc<LogEntry>>, TooFarBehind> {
        self.states().log.after(number, max)
    }
}
