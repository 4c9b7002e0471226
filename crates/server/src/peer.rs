//! What this server says of its leadership to the other servers, and who of them listens.
//!
//! [`Desk`] is the truth that is told: role, and the last renewal that is durable in the store. It is a watched value;
//! nobody holds a lock over an answer. The mTLS port in front of it and the client of others' desks are apart from it,
//! so that a simulation can carry the questions without sockets.

pub mod wire;

pub mod line;

pub mod serve;

pub mod client;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, Epoch, ServerId, Shard},
    ports::{
        clock::Clock,
        objects::ETag,
        peers::{Election, PeerAsk, PeerRole, PeerView},
    },
    time::Mono,
};
use tokio::sync::watch;

use crate::vitals::Vitals;

/// No question waits longer than this.
pub const MAX_WAIT: Duration = Duration::from_secs(10);
/// A standby asks again at once after each answer; one that has not for so long is none.
const GONE_AFTER: Duration = Duration::from_secs(3);

/// Where this server stands in one election.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub role: PeerRole,
    pub epoch: Epoch,
    /// Of the last durable renewal.
    pub etag: Option<ETag>,
    /// When that renewal began.
    pub renewed: Option<Mono>,
    pub ttl: Duration,
}

impl Default for Standing {
    fn default() -> Self {
        Self { role: PeerRole::Following, epoch: Epoch(0), etag: None, renewed: None, ttl: Duration::ZERO }
    }
}

/// Who answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    pub cluster: ClusterId,
    pub shard: Shard,
    pub server_id: ServerId,
    pub process: String,
}

pub struct Desk {
    who: Who,
    clock: Arc<dyn Clock>,
    vitals: Arc<Vitals>,
    shard: watch::Sender<Standing>,
    cluster: watch::Sender<Standing>,
    callers: Mutex<BTreeMap<String, Caller>>,
    /// Told when a standby appears that was not there.
    arrived: watch::Sender<u64>,
}

/// Another server of this shard that asks.
#[derive(Debug, Default)]
struct Caller {
    n_open: usize,
    last: Option<Mono>,
}

impl Desk {
    pub fn new(who: Who, clock: Arc<dyn Clock>, vitals: Arc<Vitals>) -> Self {
        Self {
            who,
            clock,
            vitals,
            shard: watch::Sender::default(),
            cluster: watch::Sender::default(),
            callers: Mutex::default(),
            arrived: watch::Sender::default(),
        }
    }

    pub fn who(&self) -> &Who {
        &self.who
    }

    fn of(&self, election: Election) -> &watch::Sender<Standing> {
        match election {
            Election::Shard => &self.shard,
            Election::Cluster => &self.cluster,
        }
    }

    pub fn stand(&self, election: Election, change: impl FnOnce(&mut Standing)) {
        self.of(election).send_if_modified(|standing| {
            let before = standing.clone();
            change(standing);
            *standing != before
        });
    }

    pub fn standing(&self, election: Election) -> Standing {
        self.of(election).borrow().clone()
    }

    /// Answers another server, `caller` by the id in its certificate; `same_shard` if it could take over from us.
    pub async fn answer(&self, caller: &str, same_shard: bool, ask: &PeerAsk) -> PeerView {
        let _here = (same_shard && ask.election == Election::Shard).then(|| self.seat(caller));
        let mut watched = self.of(ask.election).subscribe();
        if let Some((role, etag)) = &ask.known {
            let changed = watched.wait_for(|it| it.role != *role || it.etag != *etag);
            // After the wait the answer is the present state, whatever it is.
            let _ = tokio::time::timeout(ask.wait.min(MAX_WAIT), changed).await;
        }
        let standing = watched.borrow().clone();
        self.view(ask.election, &standing)
    }

    fn view(&self, election: Election, standing: &Standing) -> PeerView {
        let now = self.clock.monotonic();
        PeerView {
            election,
            cluster: self.who.cluster.to_string(),
            shard: self.who.shard.to_string(),
            server_id: self.who.server_id.to_string(),
            process: self.who.process.clone(),
            role: standing.role,
            epoch: standing.epoch,
            etag: standing.etag.clone(),
            renewed_ago: standing.renewed.map(|at| now.since(at)),
            ttl: standing.ttl,
            ready: self.vitals.ready().ready,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    fn callers(&self) -> MutexGuard<'_, BTreeMap<String, Caller>> {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seat<'a>(&'a self, caller: &str) -> Seat<'a> {
        let now = self.clock.monotonic();
        let is_new = {
            let mut callers = self.callers();
            let it = callers.entry(caller.to_owned()).or_default();
            let is_new = !it.is_here(now);
            it.n_open += 1;
            it.last = Some(now);
            is_new
        };
        if is_new {
            self.arrived.send_modify(|n| *n += 1);
        }
        Seat { desk: self, caller: caller.to_owned() }
    }

    /// Servers that could take over at once, because they hear from us.
    pub fn standbys(&self) -> Vec<String> {
        let now = self.clock.monotonic();
        let mut callers = self.callers();
        callers.retain(|_, it| it.is_here(now));
        callers.keys().cloned().collect()
    }

    /// Changes with each standby that arrives.
    pub fn arrivals(&self) -> watch::Receiver<u64> {
        self.arrived.subscribe()
    }
}

impl Caller {
    fn is_here(&self, now: Mono) -> bool {
        0 < self.n_open || self.last.is_some_and(|last| now.since(last) < GONE_AFTER)
    }
}

/// A caller is here while its question is open, and a little longer.
struct Seat<'a> {
    desk: &'a Desk,
    caller: String,
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let now = self.desk.clock.monotonic();
        if let Some(it) = self.desk.callers().get_mut(&self.caller) {
            it.n_open = it.n_open.saturating_sub(1);
            it.last = Some(now);
        }
    }
}
