//! What is known of every shard, and what each piece of news changes of it. Pure: time and news are given.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{ConfigStatusResponse, Event, GroupStatus, InstanceStatusResponse, Severity};
use prost::Message as _;
use tonic::Code;

use super::{
    journal::{Delta, Journal},
    position::Position,
};
use crate::shards::ShardError;

/// As many events as a leader remembers itself.
const MAX_PAST: usize = 4096;
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
    Whole(Box<Picture>),
    Status(Box<ConfigStatusResponse>),
    Group(Box<GroupStatus>),
    GroupGone(String),
    Instance(Box<InstanceStatusResponse>),
    Event(Box<Event>),
    /// It answers, and has nothing to say.
    Alive,
    Lost(ShardError),
}

struct Shard {
    name: Arc<str>,
    lost: Option<ShardError>,
    heard_at: Option<Timestamp>,
    picture: Option<Arc<Picture>>,
    past: VecDeque<Arc<Event>>,
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
            News::Whole(picture) => {
                shard.lost = None;
                shard.picture = Some(Arc::new(*picture));
                Some(Delta::Snapshot(Box::new(shard.seen())))
            }
            News::Status(status) => {
                let status = Arc::new(*status);
                shard.picture().status = status.clone();
                Some(Delta::Status(status))
            }
            News::Group(group) => {
                let group = Arc::new(*group);
                shard.picture().groups.insert(group.key.clone(), group.clone());
                Some(Delta::Group(group))
            }
            News::GroupGone(key) => {
                shard.picture().groups.remove(&key);
                Some(Delta::GroupGone(key))
            }
            News::Instance(instance) => {
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
mod tests;
