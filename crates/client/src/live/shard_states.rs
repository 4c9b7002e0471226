//! What is known of every shard, and how each update changes it. Pure: time and updates are arguments.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{ConfigStatusResponse, Event, GroupStatus, InstanceStatusResponse, Severity};
use prost::Message as _;
use tonic::Code;

use super::{
    change_log::{Change, ChangeLog},
    own_writes::OwnWrites,
};
use crate::{ResumeToken, ShardError};

/// As many events as a leader remembers itself.
const MAX_HISTORY: usize = 4096;
/// Each shard sends something every few seconds. State that is older than this is not shown in place of a new answer.
pub const MAX_AGE: Duration = Duration::from_secs(10);
/// Events that are part of a [`ShardView`].
const MAX_RECENT_EVENTS: usize = 100;

/// The state of one shard at one moment.
#[derive(Debug, Clone, Default)]
pub struct ShardState {
    pub status: Arc<ConfigStatusResponse>,
    pub groups: BTreeMap<String, Arc<GroupStatus>>,
    /// All instances that are not deleted.
    pub instances: BTreeMap<String, Arc<InstanceStatusResponse>>,
}

/// What is known of one shard, to be shown.
#[derive(Debug, Clone)]
pub struct ShardView {
    pub shard: Arc<str>,
    /// Why the shard is not connected; `None` if it is.
    pub disconnected: Option<ShardError>,
    /// When the last message was received; `None` if never.
    pub as_of: Option<Timestamp>,
    /// `None` if the shard was never reached. For a disconnected shard, the last known state.
    pub state: Option<Arc<ShardState>>,
    /// The latest events, oldest first.
    pub events: Vec<Arc<Event>>,
}

impl ShardView {
    pub(super) fn n_bytes(&self) -> usize {
        let Some(state) = &self.state else { return 0 };
        state.groups.values().map(|it| it.encoded_len()).sum::<usize>()
            + state.instances.values().map(|it| it.encoded_len()).sum::<usize>()
            + self.events.iter().map(|it| it.encoded_len()).sum::<usize>()
    }
}

/// Something that was received from a shard, or the loss of its connection.
#[derive(Debug)]
pub enum Update {
    /// The full state. Later updates change it.
    Snapshot(Box<ShardState>, SnapshotStart),
    Status(Box<ConfigStatusResponse>),
    /// With its token in the stream of groups.
    Group(Box<GroupStatus>, Option<ResumeToken>),
    GroupDeleted(String, Option<ResumeToken>),
    /// With its token in the stream of instances.
    Instance(Box<InstanceStatusResponse>, Option<ResumeToken>),
    Event(Box<Event>),
    /// The shard answers, and nothing has changed.
    Alive,
    Disconnected(ShardError),
}

/// Where a snapshot starts.
#[derive(Debug, Clone, Copy, Default)]
pub struct SnapshotStart {
    /// How many changes through this process were answered before the snapshot was requested.
    pub n_writes: u64,
    /// Where the stream of instances continues.
    pub instances_at: Option<ResumeToken>,
}

/// A list that is requested from a shard to complete its known state.
#[derive(Debug, Clone, Copy)]
pub struct ListRequest {
    shard_index: usize,
    n_writes: u64,
}

struct Shard {
    name: Arc<str>,
    disconnected: Option<ShardError>,
    received_at: Option<Timestamp>,
    state: Option<Arc<ShardState>>,
    history: VecDeque<Arc<Event>>,
    own_writes: OwnWrites,
}

/// What is known of all shards, and the log of its changes.
pub(super) struct ShardStates {
    shards: Vec<Shard>,
    pub(super) log: ChangeLog,
}

impl ShardStates {
    pub(super) fn new(names: impl IntoIterator<Item = String>) -> Self {
        let shard = |name: String| Shard {
            disconnected: Some(ShardError::new(&name, Code::Unavailable, "it was not reached yet")),
            name: name.into(),
            received_at: None,
            state: None,
            history: VecDeque::new(),
            own_writes: OwnWrites::default(),
        };
        Self { shards: names.into_iter().map(shard).collect(), log: ChangeLog::default() }
    }

    /// Applies an update of the shard with this index.
    pub(super) fn apply(&mut self, shard_index: usize, update: Update, now: Timestamp) {
        let Some(shard) = self.shards.get_mut(shard_index) else { return };
        if !matches!(update, Update::Disconnected(_)) {
            shard.received_at = Some(now);
        }
        let change = match update {
            Update::Alive => None,
            Update::Disconnected(error) => {
                // Logged once, and not at every retry.
                let same = shard.disconnected.as_ref().is_some_and(|it| it.message == error.message);
                shard.disconnected = Some(error.clone());
                (!same).then_some(Change::Disconnected(error))
            }
            Update::Snapshot(state, start) => {
                shard.disconnected = None;
                shard.own_writes.apply_snapshot(start.n_writes, start.instances_at);
                shard.state = Some(Arc::new(*state));
                Some(Change::Connected(Box::new(shard.view())))
            }
            Update::Status(status) => {
                let status = Arc::new(*status);
                shard.state_mut().status = status.clone();
                Some(Change::Status(status))
            }
            Update::Group(group, at) => {
                shard.own_writes.apply_streamed_group(&group.key, at).then(|| shard.set_group(Arc::new(*group)))
            }
            Update::GroupDeleted(key, at) => {
                shard.own_writes.apply_streamed_group(&key, at).then(|| shard.remove_group(key))
            }
            Update::Instance(instance, at) => {
                shard.own_writes.apply_instances_token(at);
                let instance = Arc::new(*instance);
                let instances = &mut shard.state_mut().instances;
                if instance.status == "deleted" {
                    instances.remove(&instance.instance_id);
                } else {
                    instances.insert(instance.instance_id.clone(), instance.clone());
                }
                Some(Change::Instance(instance))
            }
            Update::Event(event) => {
                let n_missed = shard.n_missed_before(&event);
                let event = Arc::new(*event);
                shard.remember(event.clone());
                if 0 < n_missed && shard.state.is_some() {
                    let missed = Change::Event(Arc::new(dropped_events(n_missed)));
                    self.log.push(&shard.name, shard.received_at, missed);
                }
                // Events before the first snapshot are part of that snapshot.
                shard.state.is_some().then_some(Change::Event(event))
            }
        };
        if let Some(change) = change {
            self.log.push(&shard.name, shard.received_at, change);
        }
    }

    pub(super) fn views(&self) -> Vec<ShardView> {
        self.shards.iter().map(Shard::view).collect()
    }

    /// Something was changed at a shard through this process, or may have been.
    pub(super) fn record_write(&mut self, shard_index: usize) {
        if let Some(shard) = self.shards.get_mut(shard_index) {
            shard.own_writes.record_write();
        }
    }

    pub(super) fn n_writes(&self, shard_index: usize) -> u64 {
        self.shards.get(shard_index).map_or(0, |it| it.own_writes.n_writes())
    }

    pub(super) fn begin_list(&self, shard: &str) -> Option<ListRequest> {
        let shard_index = self.shards.iter().position(|it| *it.name == *shard)?;
        Some(ListRequest { shard_index, n_writes: self.n_writes(shard_index) })
    }

    /// Merges a list of groups and the token it came with.
    pub(super) fn merge_groups(&mut self, request: ListRequest, groups: &[GroupStatus], token: ResumeToken) {
        let shard = self.shards.get_mut(request.shard_index);
        let Some(shard) = shard.filter(|it| it.is_connected_in(token.epoch())) else { return };
        if !shard.own_writes.is_list_usable(request.n_writes) {
            return;
        }
        let (own_writes, state) = (&shard.own_writes, shard.state.as_deref());
        let known = |key: &str| state.and_then(|it| it.groups.get(key)).map(AsRef::as_ref);
        let is_changed = |it: &&GroupStatus| !own_writes.is_group_newer(&it.key, token) && known(&it.key) != Some(it);
        let changed: Vec<_> = groups.iter().filter(is_changed).cloned().map(Arc::new).collect();
        let listed: BTreeSet<&str> = groups.iter().map(|it| it.key.as_str()).collect();
        let is_deleted = |key: &&String| !listed.contains(key.as_str()) && !own_writes.is_group_newer(key, token);
        let deleted: Vec<_> = state.iter().flat_map(|it| it.groups.keys()).filter(is_deleted).cloned().collect();
        let mut changes: Vec<Change> = changed.into_iter().map(|it| shard.set_group(it)).collect();
        changes.extend(deleted.into_iter().map(|key| shard.remove_group(key)));
        shard.own_writes.apply_group_list(request.n_writes, token);
        for change in changes {
            self.log.push(&shard.name, shard.received_at, change);
        }
    }

    /// Takes the token of a list of instances.
    pub(super) fn note_instances_token(&mut self, request: ListRequest, token: ResumeToken) {
        let shard = self.shards.get_mut(request.shard_index);
        if let Some(shard) = shard.filter(|it| it.is_connected_in(token.epoch())) {
            shard.own_writes.await_instances(request.n_writes, token);
        }
    }

    /// A shard's groups and when it last sent something, if that is as good as asking it.
    pub(super) fn groups(&self, shard: &str, now: Timestamp) -> Option<(Timestamp, Vec<Arc<GroupStatus>>)> {
        let shard = self.shards.iter().find(|it| *it.name == *shard)?;
        let (at, state) = shard.fresh_state(now).filter(|_| shard.own_writes.groups_include_all())?;
        Some((at, state.groups.values().cloned().collect()))
    }

    /// How many instances a shard has, under the same condition.
    pub(super) fn n_instances(&self, shard: &str, now: Timestamp) -> Option<(Timestamp, usize)> {
        let shard = self.shards.iter().find(|it| *it.name == *shard)?;
        let (at, state) = shard.fresh_state(now).filter(|_| shard.own_writes.instances_include_all())?;
        Some((at, state.instances.len()))
    }

    /// All remembered events of a shard.
    pub(super) fn history(&self, shard: &str) -> Vec<Arc<Event>> {
        let found = self.shards.iter().find(|it| *it.name == *shard);
        found.into_iter().flat_map(|it| it.history.iter().cloned()).collect()
    }

    /// The token of a shard's last event.
    pub(super) fn last_token(&self, shard_index: usize) -> Option<ResumeToken> {
        self.shards.get(shard_index).and_then(Shard::last_token)
    }
}

impl Shard {
    fn view(&self) -> ShardView {
        let skipped = self.history.len().saturating_sub(MAX_RECENT_EVENTS);
        ShardView {
            shard: self.name.clone(),
            disconnected: self.disconnected.clone(),
            as_of: self.received_at,
            state: self.state.clone(),
            events: self.history.iter().skip(skipped).cloned().collect(),
        }
    }

    /// Its state, if it is connected and has sent something lately.
    fn fresh_state(&self, now: Timestamp) -> Option<(Timestamp, &ShardState)> {
        let at = self.received_at.filter(|at| self.disconnected.is_none() && now.since(*at) < MAX_AGE)?;
        Some((at, self.state.as_deref()?))
    }

    /// Whether it is connected to the leader of this epoch.
    fn is_connected_in(&self, epoch: u64) -> bool {
        self.disconnected.is_none() && self.state.as_ref().is_some_and(|it| it.status.epoch == epoch)
    }

    fn set_group(&mut self, group: Arc<GroupStatus>) -> Change {
        self.state_mut().groups.insert(group.key.clone(), group.clone());
        Change::Group(group)
    }

    fn remove_group(&mut self, key: String) -> Change {
        self.state_mut().groups.remove(&key);
        Change::GroupDeleted(key)
    }

    /// The state, to be changed. It is copied only if a reader still holds the old one.
    fn state_mut(&mut self) -> &mut ShardState {
        Arc::make_mut(self.state.get_or_insert_default())
    }

    fn last_token(&self) -> Option<ResumeToken> {
        self.history.iter().rev().find_map(|it| ResumeToken::parse(&it.resume_token))
    }

    /// How many events are missing between the last one and this.
    fn n_missed_before(&self, event: &Event) -> u64 {
        match (self.last_token(), ResumeToken::parse(&event.resume_token)) {
            // The server has counted them itself.
            _ if 0 < event.dropped => 0,
            (Some(last), Some(token)) => last.n_between(token),
            _ => 0,
        }
    }

    fn remember(&mut self, event: Arc<Event>) {
        if MAX_HISTORY <= self.history.len() {
            self.history.pop_front();
        }
        self.history.push_back(event);
    }
}

/// An event that stands in place of `n` missing events.
pub fn dropped_events(n: u64) -> Event {
    Event {
        message: format!("{n} events dropped: they were not read fast enough"),
        severity: Severity::Warning as i32,
        reason: "EventsDropped".to_owned(),
        dropped: u32::try_from(n).unwrap_or(u32::MAX),
        ..Event::default()
    }
}

#[cfg(test)]
mod tests;
