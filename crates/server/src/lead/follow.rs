//! Following: a link to whoever leads, an eye on the lease, and knocking at a door that went silent.
//!
//! What to do is decided by [`Follower`], which is pure; here it is done. Everything runs beside everything else: a slow
//! store does not delay the word of a leader that lets go.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::FutureExt as _;
use nstance_core::{
    ports::peers::{Election, Knock, PeerAsk, PeerError, PeerRole, PeerView, Peers},
    time::Mono,
};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::{
    cache::Cache,
    election::{
        ElectionError, Held, LeaseKeeper, Observation,
        follow::{Follower, Holder, KNOCKS, Wish},
    },
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    events::{Reason, Tell},
    term::Shared,
};

/// How long a question waits for news.
const POLL: Duration = Duration::from_secs(5);
/// Between two tries of a link that does not stand.
const RELINK: Duration = Duration::from_millis(500);
/// How often knocking is begun anew.
const ROUNDS: usize = 4;
const BETWEEN_ROUNDS: Duration = Duration::from_millis(20);

type Doing<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What is under way.
struct Under<'a> {
    look: Option<Doing<'a, (Result<Observation, ElectionError>, Mono)>>,
    ask: Option<(Holder, Doing<'a, Result<PeerView, PeerError>>)>,
    knock: Option<(String, Mono, Doing<'a, Vec<Knock>>)>,
    /// No question before this.
    relink: Instant,
}

/// Watches until the lease can be taken, and takes it.
pub(crate) async fn follow(
    shared: &Shared,
    keeper: &LeaseKeeper,
    peers: &Arc<dyn Peers>,
    cache: &Cache,
    mut follower: Follower,
    warm: &Notify,
) -> Held {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    let mut under = Under { look: None, ask: None, knock: None, relink: Instant::now() };
    let mut doubled = false;
    loop {
        let now = shared.clock.monotonic();
        let wait = match follower.wish(now) {
            Wish::Bid { seen, reason } => {
                // Above whatever this machine remembers, should the bucket have been set back.
                let floor = cache.highest_epoch().unwrap_or_default();
                match keeper.acquire(&seen, reason, floor).await {
                    Ok(held) => {
                        tracing::info!(epoch = %held.epoch(), ?reason, "lease taken");
                        return held;
                    }
                    Err(error) => {
                        tracing::info!(error = %Chain(&error), ?reason, "lease not taken");
                        follower.bid_failed(shared.clock.monotonic() + backoff.next(shared.entropy.as_ref()));
                        continue;
                    }
                }
            }
            Wish::Look => {
                if under.look.is_none() {
                    under.look = Some(Box::pin(async {
                        let began = shared.clock.monotonic();
                        (keeper.look(None).await, began)
                    }));
                }
                Duration::MAX
            }
            Wish::Wait { until } => until.since(now).max(Duration::from_millis(1)),
        };
        let holder = follower.holder();
        // A question to somebody who is not the holder any more is none of ours.
        if under.ask.as_ref().is_some_and(|(asked, _)| !is_same(asked, holder.as_ref())) {
            under.ask = None;
        }
        if under.ask.is_none()
            && under.relink <= Instant::now()
            && let Some(holder) = &holder
        {
            under.ask = Some((holder.clone(), ask(peers.clone(), holder)));
        }
        let relink = (under.ask.is_none() && holder.is_some()).then_some(under.relink);
        tokio::select! {
            biased;
            (asked, answer) = answered(&mut under.ask) => {
                let now = shared.clock.monotonic();
                match answer {
                    Ok(view) => {
                        if view.server_id == shared.id.as_str() && !doubled {
                            doubled = true;
                            let message = format!("another server runs with the id {} at {}", shared.id, asked.addr);
                            tracing::warn!(message, "give every server of a shard an id of its own");
                            shared.tell(Tell::shard(Reason::ServerIdDoubled, message));
                        }
                        follower.heard(&view, now);
                        if view.role == PeerRole::Stopping {
                            warm.notify_one();
                        }
                    }
                    Err(error) => {
                        under.relink = Instant::now() + RELINK;
                        if follower.link_broke(now) {
                            tracing::info!(error = %Chain(&error), leader = asked.server_id, "link to the leader broke");
                            if asked.provable {
                                under.knock = Some((asked.process.clone(), now, Box::pin(knock(peers.clone(), asked))));
                            }
                        }
                    }
                }
            }
            (process, began, knocks) = knocked(&mut under.knock) => {
                let now = shared.clock.monotonic();
                tracing::info!(?knocks, "knocked where the leader should listen");
                follower.knocked(&process, began, &knocks, now);
            }
            (look, began) = looked(&mut under.look) => {
                let now = shared.clock.monotonic();
                match look {
                    Ok(look) => {
                        shared.vitals.clear("lease");
                        backoff.reset();
                        follower.looked(look.lease, began, now);
                    }
                    Err(error) => {
                        shared.vitals.problem("lease", format!("{}", Chain(&error)));
                        tracing::warn!(error = %Chain(&error), "lease not read");
                        follower.look_failed(now + backoff.next(shared.entropy.as_ref()));
                    }
                }
            }
            () = pause(wait) => {}
            () = until(relink) => {}
        }
    }
}

fn is_same(asked: &Holder, holder: Option<&Holder>) -> bool {
    holder.is_some_and(|it| (&it.addr, &it.process) == (&asked.addr, &asked.process))
}

fn ask(peers: Arc<dyn Peers>, holder: &Holder) -> Doing<'static, Result<PeerView, PeerError>> {
    let (addr, ask) =
        (holder.addr.clone(), PeerAsk { election: Election::Shard, known: holder.known.clone(), wait: POLL });
    async move { peers.ask(&addr, &ask).await }.boxed()
}

/// Knocks where the holder must listen, and at the end at its health port too. One that is not refused begins it anew, a
/// few times: a process that is being ended may lose its connections a moment before its doors.
async fn knock(peers: Arc<dyn Peers>, holder: Holder) -> Vec<Knock> {
    let mut knocks = Vec::new();
    for round in 0..ROUNDS {
        if 0 < round {
            tokio::time::sleep(BETWEEN_ROUNDS).await;
        }
        knocks = knock_once(&peers, &holder).await;
        if knocks.iter().all(|it| *it == Knock::Refused) {
            break;
        }
    }
    knocks
}

async fn knock_once(peers: &Arc<dyn Peers>, holder: &Holder) -> Vec<Knock> {
    let start = Instant::now();
    let mut knocks = Vec::new();
    for at in KNOCKS {
        tokio::time::sleep_until(start + at).await;
        knocks.push(peers.knock(&holder.addr).await);
        if knocks.last() != Some(&Knock::Refused) {
            return knocks;
        }
    }
    knocks.push(peers.knock(&holder.health_addr).await);
    knocks
}

async fn answered(
    ask: &mut Option<(Holder, Doing<'_, Result<PeerView, PeerError>>)>,
) -> (Holder, Result<PeerView, PeerError>) {
    let Some((_, asking)) = ask else { return std::future::pending().await };
    let answer = asking.await;
    match ask.take() {
        Some((holder, _)) => (holder, answer),
        None => std::future::pending().await,
    }
}

async fn knocked(knock: &mut Option<(String, Mono, Doing<'_, Vec<Knock>>)>) -> (String, Mono, Vec<Knock>) {
    let Some((.., knocking)) = knock else { return std::future::pending().await };
    let knocks = knocking.await;
    match knock.take() {
        Some((process, began, _)) => (process, began, knocks),
        None => std::future::pending().await,
    }
}

async fn looked<T>(look: &mut Option<Doing<'_, T>>) -> T {
    let Some(looking) = look else { return std::future::pending().await };
    let looked = looking.await;
    *look = None;
    looked
}

async fn pause(wait: Duration) {
    if wait == Duration::MAX { std::future::pending().await } else { tokio::time::sleep(wait).await }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Mutex};

    use async_trait::async_trait;

    use super::*;

    /// Answers knocks one by one, then refuses.
    struct Door(Mutex<VecDeque<Knock>>);

    #[async_trait]
    impl Peers for Door {
        async fn ask(&self, addr: &str, _: &PeerAsk) -> Result<PeerView, PeerError> {
            Err(PeerError { addr: addr.to_owned(), message: "nobody is home".to_owned() })
        }

        async fn knock(&self, _: &str) -> Knock {
            self.0.lock().unwrap().pop_front().unwrap_or(Knock::Refused)
        }
    }

    async fn knocked_at(answers: &[Knock]) -> (Vec<Knock>, Duration) {
        let holder = Holder {
            server_id: "s1".to_owned(),
            process: "p1".to_owned(),
            addr: "10.0.0.1:8991".to_owned(),
            health_addr: "10.0.0.1:8990".to_owned(),
            known: None,
            provable: true,
        };
        let start = Instant::now();
        let knocks = super::knock(Arc::new(Door(Mutex::new(answers.iter().copied().collect()))), holder).await;
        (knocks, start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_door_that_closes_a_moment_late_is_knocked_at_again() {
        let (knocks, took) = knocked_at(&[Knock::Unknown, Knock::Refused, Knock::Unknown]).await;
        assert_eq!(knocks, [Knock::Refused; KNOCKS.len() + 1]);
        // Every proof is five refusals in a row over its full time.
        assert_eq!(took, Duration::from_millis(20 + 100 + 20 + 600));
    }

    #[tokio::test(start_paused = true)]
    async fn a_door_that_stays_open_proves_nothing() {
        let (knocks, took) = knocked_at(&[Knock::Unknown; 100]).await;
        assert_eq!(knocks, [Knock::Unknown]);
        assert!(took < Duration::from_millis(100));
    }
}
