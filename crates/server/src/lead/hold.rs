//! A lease in hand: renewed by a task of its own, in a lane of its own, whatever else this server does.
//!
//! The task renews only while the rest of the process is alive: a main runtime that stands still, or a peer port that
//! nobody listens on any more, must cost the lease. It tells peers of nothing but what is durable.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ids::Epoch,
    ports::{
        clock::Clock,
        objects::ETag,
        peers::{Election, Knock, PeerRole, Peers},
    },
    term::Guard,
    time::Mono,
};
use nstance_rt::{chain::Chain, lane::Lane, tasks::Tasks};
use nstance_store::election::{Held, LeaseKeeper, LeaseRecord, Renewal, Timing};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use crate::{
    metrics::Metrics,
    peer::Desk,
    vitals::{Role, Vitals},
};

/// How often the main runtime shows that it is alive.
const BEAT: Duration = Duration::from_millis(500);
/// How soon a guard that shut before its renewal was due is noticed: a machine that was frozen renews at once then.
const WATCH: Duration = Duration::from_secs(1);
/// How often somebody knocks at our own peer port.
const KNOCK: Duration = Duration::from_secs(1);
/// A leader that nobody could succeed saves requests after this.
const ALONE_AFTER: Duration = Duration::from_secs(300);
/// How it renews then.
const ALONE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));

/// What a lone leader's lease is like: longer, with a margin that grows along, because clock rates differ by a part.
pub(crate) fn alone(configured: Timing) -> Timing {
    let (ttl, renew_interval) = ALONE;
    if ttl <= configured.ttl {
        return configured;
    }
    let parts = configured.margin.as_secs_f64() / configured.ttl.as_secs_f64();
    Timing { ttl, renew_interval: renew_interval.max(configured.renew_interval), margin: ttl.mul_f64(parts) }
}

/// Shown by the main runtime, seen by the lease's task.
#[derive(Clone)]
pub(crate) struct Pulse {
    last: Arc<AtomicU64>,
    clock: Arc<dyn Clock>,
}

impl Pulse {
    /// Beats until the scope ends.
    pub(crate) fn start(tasks: &Tasks, clock: Arc<dyn Clock>) -> Self {
        let pulse = Self { last: Arc::default(), clock };
        pulse.beat();
        let beating = pulse.clone();
        tasks.spawn_droppable("pulse", async move {
            loop {
                tokio::time::sleep(BEAT).await;
                beating.beat();
            }
        });
        pulse
    }

    fn beat(&self) {
        self.last.store(millis(self.clock.monotonic()), Ordering::Relaxed);
    }

    fn is_alive(&self, within: Duration) -> bool {
        let last = Mono::from_start(Duration::from_millis(self.last.load(Ordering::Relaxed)));
        self.clock.monotonic().since(last) <= within
    }
}

fn millis(at: Mono) -> u64 {
    u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// What the lease's task needs of the rest.
#[derive(Clone)]
pub(crate) struct Around {
    pub(crate) lane: Lane,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) desk: Arc<Desk>,
    pub(crate) vitals: Arc<Vitals>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pulse: Pulse,
    pub(crate) peers: Arc<dyn Peers>,
}

/// Where a lease stands.
#[derive(Debug, Clone)]
pub(crate) struct News {
    pub(crate) guard: Guard,
    pub(crate) lease: LeaseRecord,
    /// Why it is ours no more.
    pub(crate) lost: Option<String>,
    /// How often acting was resumed after the lease had run out unrenewed.
    pub(crate) n_resumed: u64,
}

enum Order {
    Raise { above: Epoch, done: oneshot::Sender<()> },
    Release { done: oneshot::Sender<Result<ETag, String>> },
}

/// A lease of ours, as the main runtime sees it. Dropped without a release, it runs out by itself.
pub(crate) struct Holding {
    orders: mpsc::Sender<Order>,
    news: watch::Receiver<News>,
}

impl Holding {
    /// Starts renewing.
    pub(crate) fn start(around: &Around, keeper: Arc<LeaseKeeper>, held: Held) -> Self {
        let (orders, ordered) = mpsc::channel(4);
        let (news, heard) =
            watch::channel(News { guard: held.guard().clone(), lease: held.lease().clone(), lost: None, n_resumed: 0 });
        let (dead_port, port_died) = oneshot::channel();
        if keeper.identity().direct {
            let (peers, addr, watched) = (around.peers.clone(), keeper.identity().addr.clone(), heard.clone());
            around.lane.spawn("own port", watch_own_port(peers, addr, watched, dead_port));
        }
        let configured = keeper.timing();
        let renewing = Renewing {
            around: around.clone(),
            keeper,
            held,
            configured,
            accompanied: around.clock.monotonic(),
            news,
            ordered,
            port_died,
            due: Instant::now(),
            lapsed: false,
        };
        around.lane.spawn("lease", renewing.run());
        Self { orders, news: heard }
    }

    pub(crate) fn news(&self) -> News {
        self.news.borrow().clone()
    }

    pub(crate) fn guard(&self) -> Guard {
        self.news.borrow().guard.clone()
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.news.borrow().guard.epoch()
    }

    /// Resolves with the reason when the lease is ours no more.
    pub(crate) async fn lost(&self) -> String {
        let mut news = self.news.clone();
        match news.wait_for(|news| news.lost.is_some()).await {
            Ok(news) => news.lost.clone().unwrap_or_default(),
            Err(_) => "the lease's own task ended".to_owned(),
        }
    }

    /// Resolves each time acting is resumed.
    pub(crate) async fn resumed(&self, before: u64) -> u64 {
        let mut news = self.news.clone();
        let resumed = news.wait_for(|news| before < news.n_resumed).await.ok().map(|news| news.n_resumed);
        match resumed {
            Some(n_resumed) => n_resumed,
            None => std::future::pending().await,
        }
    }

    /// Takes the epoch above one that was met. The guard is another after that. Waits until it is so, or the lease is
    /// lost, which [`Self::lost`] tells.
    pub(crate) async fn raise(&self, above: Epoch) {
        let (done, raised) = oneshot::channel();
        if self.orders.send(Order::Raise { above, done }).await.is_ok() {
            let _ = raised.await;
        }
    }

    /// Gives the lease back. Answers the version that a successor may bid on.
    pub(crate) async fn release(self) -> Result<ETag, String> {
        let (done, released) = oneshot::channel();
        let gone = "it is ours no more".to_owned();
        if self.orders.send(Order::Release { done }).await.is_err() {
            return Err(gone);
        }
        released.await.unwrap_or(Err(gone))
    }
}

/// A server whose peer port is dead could be taken for dead by its peers: it must stop before they can be sure.
async fn watch_own_port(
    peers: Arc<dyn Peers>,
    addr: String,
    mut news: watch::Receiver<News>,
    dead: oneshot::Sender<()>,
) {
    let mut next = Instant::now();
    loop {
        tokio::select! {
            biased;
            over = news.wait_for(|news| news.lost.is_some()) => {
                let _ = over;
                return;
            }
            () = tokio::time::sleep_until(next) => {}
        }
        next = Instant::now() + KNOCK;
        if peers.knock(&addr).await == Knock::Refused {
            news.borrow().guard.close();
            let _ = dead.send(());
            return;
        }
    }
}

struct Renewing {
    around: Around,
    keeper: Arc<LeaseKeeper>,
    held: Held,
    configured: Timing,
    /// When somebody could last have succeeded us.
    accompanied: Mono,
    news: watch::Sender<News>,
    ordered: mpsc::Receiver<Order>,
    port_died: oneshot::Receiver<()>,
    due: Instant,
    /// The guard was shut since it was last known to be open.
    lapsed: bool,
}

impl Renewing {
    async fn run(mut self) {
        let mut arrivals = self.around.desk.arrivals();
        let mut watches_port = self.keeper.identity().direct;
        self.due = Instant::now() + self.configured.renew_interval;
        self.show();
        loop {
            let looks_at = self.looks_at();
            tokio::select! {
                biased;
                order = self.ordered.recv() => match order {
                    None => return,
                    Some(Order::Raise { above, done }) => {
                        while self.held.epoch() <= above {
                            let renewal = self.keeper.raise(&mut self.held, above).await;
                            let wait = match &renewal {
                                Renewal::Retry { after, .. } => *after,
                                _ => Duration::ZERO,
                            };
                            if !self.took(renewal) {
                                return;
                            }
                            tokio::time::sleep(wait).await;
                        }
                        let _ = done.send(());
                    }
                    Some(Order::Release { done }) => {
                        let released = self.keeper.release(self.held).await;
                        let _ = done.send(released.map_err(|error| format!("{}", Chain(&error))));
                        return;
                    }
                },
                died = &mut self.port_died, if watches_port => {
                    watches_port = false;
                    if died.is_ok() {
                        self.lose("nobody listens on our own peer port any more");
                        return;
                    }
                }
                Ok(()) = arrivals.changed() => {
                    self.accompanied = self.around.clock.monotonic();
                    // Before it can be counted on to take over, it must know how long to wait.
                    if self.held.lease().ttl != self.configured.ttl && !self.renew().await {
                        return;
                    }
                }
                () = tokio::time::sleep_until(looks_at) => {
                    let is_due = self.due <= Instant::now() || !self.held.guard().is_open();
                    if is_due && !self.renew().await {
                        return;
                    }
                }
            }
        }
    }

    /// While the guard is open somebody watches that it is; one that is shut waits for its next try.
    fn looks_at(&self) -> Instant {
        if self.held.guard().is_open() { self.due.min(Instant::now() + WATCH) } else { self.due }
    }

    /// Renews once, if this process deserves it. Answers whether the lease may still be ours.
    async fn renew(&mut self) -> bool {
        let timing = self.timing();
        if !self.around.pulse.is_alive(timing.ttl / 2) {
            // Perhaps the whole machine stood still, and this is the first that runs again: then it is long lost.
            if let Ok(seen) = self.keeper.look(None).await
                && seen.lease.as_ref().is_none_or(|it| it.value.process != self.keeper.identity().process)
            {
                self.lose("the lease went to somebody else");
                return false;
            }
            self.stall("main runtime stands still, so the lease is not renewed");
            self.due = Instant::now() + BEAT;
            return true;
        }
        // Whatever was refused while the guard was shut waits for somebody to say that it is open again.
        let (end, was_open) = (self.held.until(), self.held.guard().is_open());
        let renewal = self.keeper.renew_as(&mut self.held, timing).await;
        self.lapsed |= !was_open || end <= self.around.clock.monotonic();
        self.took(renewal)
    }

    fn timing(&mut self) -> Timing {
        let now = self.around.clock.monotonic();
        if !self.around.desk.standbys().is_empty() {
            self.accompanied = now;
        }
        if now.since(self.accompanied) < ALONE_AFTER { self.configured } else { alone(self.configured) }
    }

    /// Takes the outcome of a renewal in. Answers whether the lease may still be ours.
    fn took(&mut self, renewal: Renewal) -> bool {
        match renewal {
            Renewal::Extended { .. } => {
                self.around.metrics.lease_renewals.inc();
                self.around.vitals.clear("lease");
                let interval = self.held.timing().renew_interval;
                // A lease counts from when its renewal began, and so does the next one: of one that took long to land
                // little is left, or nothing. But a term that is over has no hurry.
                let open = self.held.guard().is_open();
                let took = self.around.clock.monotonic().since(self.held.renewed());
                let rest = if open { interval.saturating_sub(took) } else { Duration::ZERO };
                self.due = Instant::now() + if self.held.guard().is_closed() { interval } else { rest };
                let resumes = open && std::mem::take(&mut self.lapsed);
                if open && self.around.vitals.turn(Role::Stalled, Role::Leading, self.held.epoch()) {
                    tracing::info!(epoch = %self.held.epoch(), "lease renewed, acting again");
                }
                self.show();
                self.news.send_modify(|news| {
                    news.guard = self.held.guard().clone();
                    news.lease = self.held.lease().clone();
                    news.n_resumed += u64::from(resumes);
                });
                true
            }
            Renewal::Retry { after, error } => {
                self.around.metrics.lease_renewal_failures.inc();
                tracing::warn!(error = %Chain(&error), retry_in = ?after, "lease not renewed");
                self.stall(&format!("{}", Chain(&error)));
                self.due = Instant::now() + after;
                true
            }
            Renewal::Lost => {
                self.lose("the lease went to somebody else");
                false
            }
        }
    }

    /// What peers are told is what the store holds.
    fn show(&self) {
        let (etag, renewed) = (self.held.etag().clone(), self.held.renewed());
        let (epoch, ttl) = (self.held.epoch(), self.held.lease().ttl);
        self.around.desk.stand(Election::Shard, |it| {
            it.epoch = epoch;
            it.etag = Some(etag);
            it.renewed = Some(renewed);
            it.ttl = ttl;
            if it.role == PeerRole::Stalled {
                it.role = PeerRole::Leading;
            }
        });
    }

    /// Not renewed. Once the guard has run out, nothing is done until it is.
    fn stall(&self, why: &str) {
        self.around.vitals.problem("lease", why);
        let epoch = self.held.epoch();
        if self.held.guard().is_open() || !self.around.vitals.turn(Role::Leading, Role::Stalled, epoch) {
            return;
        }
        tracing::error!(%epoch, why, "lease ran out, effects are stopped until it is renewed");
        self.around.desk.stand(Election::Shard, |it| it.role = PeerRole::Stalled);
    }

    fn lose(&self, why: &str) {
        self.held.guard().close();
        self.around.desk.stand(Election::Shard, |it| {
            it.role = PeerRole::Following;
            it.etag = None;
            it.renewed = None;
        });
        self.news.send_modify(|news| news.lost = Some(why.to_owned()));
    }
}

#[cfg(test)]
mod tests;
