//! What is known of every shard, and what each piece of news changes of it. Pure: time and news are given.

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
    journal::{Delta, Journal},
    position::Position,
    reach::Reach,
};
use crate::shards::ShardError;

/// As many events as a leader remembers itself.
const MAX_PAST: usize = 4096;
/// A shard is heard of every few seconds. What is older than this is not shown in place of an answer of its own.
pub(crate) const FRESH: Duration = Duration::from_secs(10);
/// Events that come with what is shown of a shard.
const MAX_RECENT: usize = 100;

/// What a shard has, as of one moment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Picture {
    pub(crate) status: Arc<ConfigStatusResponse>,
    pub(crate) groups: BTreeMap<String, Arc<GroupStatus>>,
    /// All that are not deleted.
    pub(crate) instances: BTreeMap<String, Arc<InstanceStatusResponse>>,
}

/// What is known of a shard, for whoever shows it.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) shard: Arc<str>,
    /// Why we are not in touch.
    pub(crate) lost: Option<ShardError>,
    /// When it was last heard of; nothing if never.
    pub(crate) as_of: Option<Timestamp>,
    /// Nothing if it was never reached. Of a lost shard, the last that was known.
    pub(crate) picture: Option<Arc<Picture>>,
    /// The last of them, in their order.
    pub(crate) events: Vec<Arc<Event>>,
}

impl Seen {
    pub(super) fn weight(&self) -> usize {
        let Some(picture) = &self.picture else { return 0 };
        picture.groups.values().map(|it| it.encoded_len()).sum::<usize>()
            + picture.instances.values().map(|it| it.encoded_len()).sum::<usize>()
            + self.events.iter().map(|it| it.encoded_len()).sum::<usize>()
    }
}

/// Something was heard of a shard, or not heard any more.
#[derive(Debug)]
pub(crate) enum News {
    /// All of it. What comes afterwards changes it.
    Whole(Box<Picture>, Begun),
    Status(Box<ConfigStatusResponse>),
    /// With its place in the stream of groups.
    Group(Box<GroupStatus>, Option<Position>),
    GroupGone(String, Option<Position>),
    /// With its place in the stream of instances.
    Instance(Box<InstanceStatusResponse>, Option<Position>),
    Event(Box<Event>),
    /// It answers, and has nothing to say.
    Alive,
    Lost(ShardError),
}

/// Where a whole picture comes from.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Begun {
    /// Changes through this process that were answered before it was begun.
    pub(crate) writes: u64,
    /// Where the stream of instances goes on.
    pub(crate) instances_at: Option<Position>,
}

/// A question to a shard whose answer may complete its picture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    pub(super) at: usize,
    pub(super) writes: u64,
}

struct Shard {
    name: Arc<str>,
    lost: Option<ShardError>,
    heard_at: Option<Timestamp>,
    picture: Option<Arc<Picture>>,
    past: VecDeque<Arc<Event>>,
    reach: Reach,
}

pub(super) struct Board {
    shards: Vec<Shard>,
    pub(super) journal: Journal,
}

impl Board {
    pub(super) fn new(names: impl IntoIterator<Item = String>) -> Self {
        let shard = |name: String| Shard {
            lost: Some(ShardError::new(&name, Code::Unavailable, "it was not reached yet")),
            name: name.into(),
            heard_at: None,
            picture: None,
            past: VecDeque::new(),
            reach: Reach::default(),
        };
        Self { shards: names.into_iter().map(shard).collect(), journal: Journal::default() }
    }

    /// Takes news of the shard at this place.
    pub(super) fn take(&mut self, at: usize, news: News, now: Timestamp) {
        let Some(shard) = self.shards.get_mut(at) else { return };
        if !matches!(news, News::Lost(_)) {
            shard.heard_at = Some(now);
        }
        let delta = match news {
            News::Alive => None,
            News::Lost(error) => {
                // Once, and not with every try.
                let same = shard.lost.as_ref().is_some_and(|it| it.message == error.message);
                shard.lost = Some(error.clone());
                (!same).then_some(Delta::Lost(error))
            }
            News::Whole(picture, begun) => {
                shard.lost = None;
                shard.reach.whole(begun.writes, begun.instances_at);
                shard.picture = Some(Arc::new(*picture));
                Some(Delta::Snapshot(Box::new(shard.seen())))
            }
            News::Status(status) => {
                let status = Arc::new(*status);
                shard.picture().status = status.clone();
                Some(Delta::Status(status))
            }
            News::Group(group, place) => shard.reach.group(&group.key, place).then(|| shard.group(Arc::new(*group))),
            News::GroupGone(key, place) => shard.reach.group(&key, place).then(|| shard.group_gone(key)),
            News::Instance(instance, place) => {
                shard.reach.instance(place);
                let instance = Arc::new(*instance);
                let instances = &mut shard.picture().instances;
                if instance.status == "deleted" {
                    instances.remove(&instance.instance_id);
                } else {
                    instances.insert(instance.instance_id.clone(), instance.clone());
                }
                Some(Delta::Instance(instance))
            }
            News::Event(event) => {
                let missed = shard.n_missed_before(&event);
                let event = Arc::new(*event);
                shard.remember(event.clone());
                if 0 < missed && shard.picture.is_some() {
                    self.journal.push(&shard.name, shard.heard_at, Delta::Event(Arc::new(gap(missed))));
                }
                // What was before our time comes with the first snapshot.
                shard.picture.is_some().then_some(Delta::Event(event))
            }
        };
        if let Some(delta) = delta {
            self.journal.push(&shard.name, shard.heard_at, delta);
        }
    }

    pub(super) fn seen(&self) -> Vec<Seen> {
        self.shards.iter().map(Shard::seen).collect()
    }

    /// Something was changed at a shard through this process, or may have been.
    pub(super) fn wrote(&mut self, at: usize) {
        if let Some(shard) = self.shards.get_mut(at) {
            shard.reach.wrote();
        }
    }

    pub(super) fn writes(&self, at: usize) -> u64 {
        self.shards.get(at).map_or(0, |it| it.reach.writes())
    }

    pub(super) fn asked(&self, shard: &str) -> Option<Asked> {
        let at = self.shards.iter().position(|it| *it.name == *shard)?;
        Some(Asked { at, writes: self.writes(at) })
    }

    /// Takes a list of groups, and the token it came with.
    pub(super) fn listed(&mut self, asked: Asked, groups: &[GroupStatus], token: Position) {
        let Some(shard) = self.shards.get_mut(asked.at).filter(|it| it.is_told(token)) else { return };
        if !shard.reach.is_of_use(asked.writes) {
            return;
        }
        let (reach, picture) = (&shard.reach, shard.picture.as_deref());
        let known = |key: &str| picture.and_then(|it| it.groups.get(key)).map(AsRef::as_ref);
        let changed = groups.iter().filter(|it| !reach.is_newer(&it.key, token) && known(&it.key) != Some(it));
        let changed: Vec<_> = changed.cloned().map(Arc::new).collect();
        let listed: BTreeSet<&str> = groups.iter().map(|it| it.key.as_str()).collect();
        let is_gone = |key: &&String| !listed.contains(key.as_str()) && !reach.is_newer(key, token);
        let gone: Vec<_> = picture.iter().flat_map(|it| it.groups.keys()).filter(is_gone).cloned().collect();
        let mut deltas: Vec<Delta> = changed.into_iter().map(|it| shard.group(it)).collect();
        deltas.extend(gone.into_iter().map(|key| shard.group_gone(key)));
        shard.reach.listed(asked.writes, token);
        for delta in deltas {
            self.journal.push(&shard.name, shard.heard_at, delta);
        }
    }

    /// Takes the token of a list of instances.
    pub(super) fn listed_instances(&mut self, asked: Asked, token: Position) {
        if let Some(shard) = self.shards.get_mut(asked.at).filter(|it| it.is_told(token)) {
            shard.reach.await_instances(asked.writes, token);
        }
    }

    /// A shard's groups, and when it was last heard of, if that is as good as asking it.
    pub(super) fn groups(&self, shard: &str, now: Timestamp) -> Option<(Timestamp, Vec<Arc<GroupStatus>>)> {
        let shard = self.shards.iter().find(|it| *it.name == *shard)?;
        let (at, picture) = shard.current(now).filter(|_| shard.reach.has_groups())?;
        Some((at, picture.groups.values().cloned().collect()))
    }

    /// How many instances a shard has, in the same way.
    pub(super) fn n_instances(&self, shard: &str, now: Timestamp) -> Option<(Timestamp, usize)> {
        let shard = self.shards.iter().find(|it| *it.name == *shard)?;
        let (at, picture) = shard.current(now).filter(|_| shard.reach.has_instances())?;
        Some((at, picture.instances.len()))
    }

    /// Everything that is remembered of a shard's events.
    pub(super) fn past(&self, shard: &str) -> Vec<Arc<Event>> {
        let found = self.shards.iter().find(|it| *it.name == *shard);
        found.into_iter().flat_map(|it| it.past.iter().cloned()).collect()
    }

    /// Where the events of a shard go on.
    pub(super) fn position(&self, at: usize) -> Option<Position> {
        self.shards.get(at).and_then(Shard::position)
    }
}

impl Shard {
    fn seen(&self) -> Seen {
        let skipped = self.past.len().saturating_sub(MAX_RECENT);
        Seen {
            shard: self.name.clone(),
            lost: self.lost.clone(),
            as_of: self.heard_at,
            picture: self.picture.clone(),
            events: self.past.iter().skip(skipped).cloned().collect(),
        }
    }

    /// What it is like, if its streams are open and it was heard of lately.
    fn current(&self, now: Timestamp) -> Option<(Timestamp, &Picture)> {
        let at = self.heard_at.filter(|at| self.lost.is_none() && now.since(*at) < FRESH)?;
        Some((at, self.picture.as_deref()?))
    }

    /// Whether its streams are those that a token belongs to.
    fn is_told(&self, token: Position) -> bool {
        self.lost.is_none() && self.picture.as_ref().is_some_and(|it| it.status.epoch == token.epoch())
    }

    fn group(&mut self, group: Arc<GroupStatus>) -> Delta {
        self.picture().groups.insert(group.key.clone(), group.clone());
        Delta::Group(group)
    }

    fn group_gone(&mut self, key: String) -> Delta {
        self.picture().groups.remove(&key);
        Delta::GroupGone(key)
    }

    /// To be changed. It is copied only if somebody still reads it as it was.
    fn picture(&mut self) -> &mut Picture {
        Arc::make_mut(self.picture.get_or_insert_default())
    }

    fn position(&self) -> Option<Position> {
        self.past.iter().rev().find_map(|it| Position::parse(&it.resume_token))
    }

    /// How many events there were between the last one and this.
    fn n_missed_before(&self, event: &Event) -> u64 {
        match (self.position(), Position::parse(&event.resume_token)) {
            // The server has counted them itself.
            _ if 0 < event.dropped => 0,
            (Some(last), Some(position)) => last.n_between(position),
            _ => 0,
        }
    }

    fn remember(&mut self, event: Arc<Event>) {
        if MAX_PAST <= self.past.len() {
            self.past.pop_front();
        }
        self.past.push_back(event);
    }
}

/// Stands where events are missing.
pub(crate) fn gap(n: u64) -> Event {
    Event {
        message: format!("{n} events dropped: they were not read fast enough"),
        severity: Severity::Warning as i32,
        reason: "EventsDropped".to_owned(),
        dropped: u32::try_from(n).unwrap_or(u32::MAX),
        ..Event::default()
    }
}

#[cfg(test)]
#[path = "shard_states/tests.rs"]
mod tests;
