//! Follows the events of every shard, whoever leads it, and remembers the last of them.
//!
//! A shard tells its past only to those who know where they were, and has few places for watchers. So one task per shard
//! watches, and whoever asks us is answered from what it remembers.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{ports::clock::Clock, time::Timestamp};
use nstance_proto::v1::{Event, WatchEventsRequest};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy, tasks::Tasks};
use tokio::sync::broadcast;
use tonic::Code;

use crate::shards::{ShardError, Shards, Target};

/// As many as a leader remembers itself.
const MAX_PAST: usize = 4096;
/// What a reader of ours may be behind.
const MAX_BEHIND: usize = 1024;
/// Of operators, in the API's rules.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// An event and whose it is.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub shard: String,
    pub event: Event,
}

/// Where an event stands in its shard's history: a leader's epoch, and a number in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Position(u64, u64);

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

impl Position {
    pub(super) fn parse(token: &str) -> Option<Self> {
        let (epoch, number) = token.split_once('-')?;
        Some(Self(epoch.parse().ok()?, number.parse().ok()?))
    }

    /// How many events lie between this one and a later one. Those of another leader cannot be counted.
    pub(super) fn n_between(self, later: Self) -> u64 {
        if self.0 == later.0 { later.1.saturating_sub(self.1).saturating_sub(1) } else { 0 }
    }
}

struct State {
    past: VecDeque<Event>,
    /// Why we are not in touch.
    lost: Option<ShardError>,
    lost_at: Option<Timestamp>,
}

struct Keeper {
    shard: String,
    state: Mutex<State>,
}

impl Keeper {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Keepers {
    all: Vec<Arc<Keeper>>,
    told: broadcast::Sender<Arc<Told>>,
    clock: Arc<dyn Clock>,
}

/// What is remembered of one shard.
pub(super) struct Past {
    pub shard: String,
    pub events: Vec<Event>,
    /// When we were last in touch; nothing if never.
    pub as_of: Option<Timestamp>,
    pub lost: Option<ShardError>,
}

impl Keepers {
    /// Begins to follow all shards, until the scope ends.
    pub(super) fn start(tasks: &Tasks, shards: &Shards, clock: Arc<dyn Clock>) -> Self {
        let (told, _) = broadcast::channel(MAX_BEHIND);
        let all = shards.targets().iter().map(|target| {
            let lost = ShardError::new(&target.shard, Code::Unavailable, "it was not reached yet");
            let state = Mutex::new(State { past: VecDeque::new(), lost: Some(lost), lost_at: None });
            let keeper = Arc::new(Keeper { shard: target.shard.clone(), state });
            let follow = keep(keeper.clone(), shards.clone(), target.clone(), told.clone(), clock.clone());
            tasks.spawn_droppable("events of a shard", follow);
            keeper
        });
        Self { all: all.collect(), told, clock }
    }

    /// Whether each shard is in touch with us.
    pub(super) fn up(&self) -> Vec<(String, bool)> {
        self.all.iter().map(|it| (it.shard.clone(), it.state().lost.is_none())).collect()
    }

    /// What is told from now on.
    pub(super) fn listen(&self) -> broadcast::Receiver<Arc<Told>> {
        self.told.subscribe()
    }

    pub(super) fn past(&self, shards: &Shards) -> Vec<Past> {
        let wanted = |it: &&Arc<Keeper>| shards.targets().iter().any(|target| target.shard == it.shard);
        let past = |it: &Arc<Keeper>| {
            let state = it.state();
            let as_of = if state.lost.is_none() { Some(self.clock.now()) } else { state.lost_at };
            let events = state.past.iter().cloned().collect();
            Past { shard: it.shard.clone(), events, as_of, lost: state.lost.clone() }
        };
        self.all.iter().filter(wanted).map(past).collect()
    }
}

async fn keep(
    keeper: Arc<Keeper>,
    shards: Shards,
    target: Target,
    told: broadcast::Sender<Arc<Told>>,
    clock: Arc<dyn Clock>,
) {
    let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, LONGEST_WAIT), SystemEntropy::new());
    loop {
        let error = follow(&keeper, &shards, &target, &told, &mut backoff).await;
        {
            let mut state = keeper.state();
            if state.lost.is_none() {
                state.lost_at = Some(clock.now());
                tracing::info!(shard = %keeper.shard, %error, "not in touch with the shard any more");
            }
            state.lost = Some(error);
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// Follows one leader until its stream ends, and says why it did.
async fn follow(
    keeper: &Keeper,
    shards: &Shards,
    target: &Target,
    told: &broadcast::Sender<Arc<Told>>,
    backoff: &mut Backoff,
) -> ShardError {
    let opened = async {
        let of = |status: tonic::Status| ShardError::of(&target.shard, &status);
        let mut client = shards.connect(target).await?;
        let epoch = client.config().await.map_err(of)?.epoch;
        // From where we were; with a new leader, from its beginning.
        let last = keeper.state().past.back().map(|it| it.resume_token.clone());
        let resume_token = last
            .filter(|token| Position::parse(token).is_some_and(|it| it.0 == epoch))
            .unwrap_or_else(|| format!("{epoch}-0"));
        let request = WatchEventsRequest { resume_token, ..WatchEventsRequest::default() };
        Ok(client.service.watch_events(request).await.map_err(of)?.into_inner())
    };
    let late = |_| ShardError::new(&target.shard, Code::DeadlineExceeded, "it does not answer");
    let mut stream = match tokio::time::timeout(shards.timeout(), opened).await.map_err(late).flatten() {
        Ok(stream) => stream,
        Err(error) => return error,
    };
    backoff.reset();
    keeper.state().lost = None;
    loop {
        let event = match stream.message().await {
            Ok(Some(event)) => event,
            Ok(None) => return ShardError::new(&target.shard, Code::Unavailable, "its stream of events ended"),
            Err(status) => return ShardError::of(&target.shard, &status),
        };
        {
            let mut state = keeper.state();
            if MAX_PAST <= state.past.len() {
                state.past.pop_front();
            }
            state.past.push_back(event.clone());
        }
        // Nobody listens: that is fine.
        let _ = told.send(Arc::new(Told { shard: keeper.shard.clone(), event }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_ordered_and_gaps_counted() {
        let at = |text: &str| Position::parse(text).unwrap();
        assert!(at("1-9") < at("2-1") && at("2-1") < at("2-10"));
        assert_eq!(at("2-1").n_between(at("2-2")), 0);
        assert_eq!(at("2-1").n_between(at("2-5")), 3);
        assert_eq!(at("1-1").n_between(at("2-5")), 0);
        assert_eq!(Position::parse("x-1"), None);
    }
}
