//! Standing for leadership, and what runs while we lead.
//!
//! One loop for the life of the process: follow, bid, lead, step down, follow again. A term owns everything that acts;
//! when it ends its scope ends, and with it every task, timer, queue and stream of it. The process does not exit.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use nstance_core::{
    ids::Epoch,
    ports::{
        clock::{Clock, Entropy},
        objects::{ETag, ObjectStore},
    },
    term::Guard,
};
use nstance_rt::{backoff::Backoff, chain::Chain, tasks::Tasks};
use nstance_store::{
    cache::Cache,
    election::{Bid, ElectionError, Held, Identity, LeaseKeeper, Observation, Renewal, Timing, may_bid},
    rebuild::{Rebuilt, rebuild},
    records::lease_key,
};
use tokio::sync::watch;

use crate::{
    boot::{Doors, Leader, Parts, Served},
    events::{Reason, Tell},
    grpc::serve::{Ports, serve},
    pace::{Gate, Pace},
    service::{
        config::{Applied, asked},
        groups::Groups,
        refresh,
    },
    tasks::{capacity, collect, images, observe},
    term::{Advertised, Shared, Term},
    term_clock::TermClock,
    vitals::Role,
    wiring,
    world::World,
};

/// How often a follower looks at a lease that nobody lets run out.
const FOLLOW: Duration = Duration::from_secs(1);
/// Streams end by themselves when their term does; what has not after this is cut.
const STEP_DOWN: Duration = Duration::from_millis(500);

/// Who stands, and by what clock.
pub struct Candidate {
    identity: Identity,
    writer: String,
    timing: Timing,
    store: Arc<dyn ObjectStore>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl Candidate {
    pub fn new(parts: &Parts, applied: &Applied, election: SocketAddr, health: SocketAddr) -> anyhow::Result<Self> {
        let server = &applied.config.server;
        let host =
            |address: &nstance_config::model::Address, bound: SocketAddr| match (&parts.advertise_host, parts.doors) {
                (_, Doors::Inside { addr }) => Ok(addr.to_string()),
                (Some(host), _) => Ok(format!("{host}:{}", bound.port())),
                (None, _) => wiring::advertised_own(address, bound, parts.port_offset),
            };
        let addr = host(&server.advertise.election, election)?;
        let identity = Identity {
            server_id: parts.id.to_string(),
            process: Identity::draw_process(parts.entropy.as_ref()),
            direct: is_local(&addr),
            addr,
            health_addr: host(&server.advertise.health, health)?,
            // std's listener shares its port with nobody.
            exclusive: true,
            boot_id: std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .map(|text| text.trim().to_owned())
                .unwrap_or_default(),
            provider_id: None,
        };
        let election = &server.leader_election;
        let timing = Timing { ttl: election.ttl, renew_interval: election.renew_interval, margin: election.margin };
        Ok(Self {
            identity,
            writer: format!("{}/{}", parts.shard, parts.id),
            timing,
            store: parts.lease_store.clone().unwrap_or_else(|| parts.store.clone()),
            clock: parts.clock.clone(),
            entropy: parts.entropy.clone(),
        })
    }

    /// The random part of our identity as a holder.
    pub fn process(&self) -> &str {
        &self.identity.process
    }

    fn keeper(&self, key: String, timing: Timing) -> LeaseKeeper {
        LeaseKeeper::new(
            self.store.clone(),
            key,
            self.writer.clone(),
            self.identity.clone(),
            timing,
            self.clock.clone(),
            self.entropy.clone(),
        )
    }
}

/// Whether an address is one of this machine's own: only then can sitting on it prove anything.
fn is_local(addr: &str) -> bool {
    let host = addr.rsplit_once(':').map_or(addr, |(host, _)| host).trim_matches(['[', ']']);
    host.parse::<IpAddr>().is_ok_and(|ip| std::net::TcpListener::bind((ip, 0)).is_ok())
}

/// Runs `work` while holding the cluster lease, which is given back at once.
pub async fn with_cluster_lease<E>(
    candidate: &Candidate,
    work: impl Future<Output = Result<(), E>>,
) -> anyhow::Result<()>
where
    E: std::error::Error + Send + Sync + 'static,
{
    let keeper = candidate.keeper(lease_key(None), Timing::CLUSTER);
    let mut seen: Option<Observation> = None;
    let mut held = loop {
        let look = keeper.look(seen.as_ref()).await?;
        match may_bid(&look, candidate.clock.monotonic(), keeper.identity()) {
            Bid::Yes { reason, .. } => match keeper.acquire(&look, reason, Epoch(0)).await {
                Ok(held) => break held,
                Err(ElectionError::Taken { .. } | ElectionError::Gone { .. }) => {}
                Err(error) => return Err(error.into()),
            },
            Bid::No { .. } => {}
        }
        seen = Some(look);
        tokio::time::sleep(FOLLOW).await;
    };
    let Some(done) = renewing(&keeper, &mut held, work).await else {
        anyhow::bail!("the cluster lease was lost while keys were made");
    };
    // Not giving it back only makes the next one wait.
    if let Err(error) = keeper.release(held).await {
        tracing::warn!(error = %Chain(&error), "cluster lease not released");
    }
    done.context("make CA and nonce key")
}

/// Follows and leads until the scope ends.
pub async fn run(
    tasks: &Tasks,
    shared: Arc<Shared>,
    cache: Arc<Cache>,
    candidate: Candidate,
    doors: Doors,
    served: &watch::Sender<Served>,
) {
    let keeper = Arc::new(candidate.keeper(lease_key(Some(&shared.shard)), candidate.timing));
    let stop = tasks.token().clone();
    loop {
        shared.vitals.set_role(Role::Following, Epoch(0));
        let held = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            held = follow(&shared, &keeper, &cache) => held,
        };
        lead(tasks, &shared, &cache, &keeper, held, doors, served).await;
        shared.metrics.leading.set(0);
        if stop.is_cancelled() {
            return;
        }
    }
}

/// Watches the lease until it can be taken, and takes it.
async fn follow(shared: &Shared, keeper: &LeaseKeeper, cache: &Cache) -> Held {
    let mut seen: Option<Observation> = None;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    loop {
        let wait = match keeper.look(seen.as_ref()).await {
            Ok(look) => {
                shared.vitals.clear("lease");
                let wait = match may_bid(&look, shared.clock.monotonic(), keeper.identity()) {
                    Bid::Yes { reason, .. } => {
                        // Above whatever this machine remembers, should the bucket have been set back.
                        let floor = cache.highest_epoch().unwrap_or_default();
                        match keeper.acquire(&look, reason, floor).await {
                            Ok(held) => {
                                tracing::info!(epoch = %held.epoch(), ?reason, "lease taken");
                                return held;
                            }
                            Err(error) => {
                                tracing::info!(error = %Chain(&error), "lease not taken");
                                backoff.next(shared.entropy.as_ref())
                            }
                        }
                    }
                    Bid::No { look_again_in } => look_again_in.min(FOLLOW),
                };
                seen = Some(look);
                wait
            }
            Err(error) => {
                shared.vitals.problem("lease", format!("{}", Chain(&error)));
                tracing::warn!(error = %Chain(&error), "lease not read");
                backoff.next(shared.entropy.as_ref())
            }
        };
        tokio::time::sleep(wait.max(Duration::from_millis(10))).await;
    }
}

/// One term, from the lease to its end.
async fn lead(
    tasks: &Tasks,
    shared: &Arc<Shared>,
    cache: &Arc<Cache>,
    keeper: &Arc<LeaseKeeper>,
    mut held: Held,
    doors: Doors,
    served: &watch::Sender<Served>,
) {
    shared.vitals.set_role(Role::Acquiring, held.epoch());
    let stop = tasks.token().clone();
    let rebuilt = tokio::select! {
        biased;
        () = stop.cancelled() => None,
        rebuilt = acquire_state(shared, cache, keeper, &mut held) => rebuilt,
    };
    let Some(mut rebuilt) = rebuilt else {
        release(shared, keeper, held).await;
        return;
    };
    if !led_last(cache, &held) {
        // Whoever led since this cache was in order may have removed them rightly. The VM of one that was not is found
        // by its tags.
        for lost in std::mem::take(&mut rebuilt.vanished) {
            shared.cache.purge(&lost.value);
        }
    }
    note_led(cache, &held);
    let scope = tasks.child();
    let guard = held.guard().clone();
    let term = match renewing(keeper, &mut held, begin(shared, &scope, guard, rebuilt, doors)).await {
        Some(Ok(term)) => term,
        failed => {
            let error = failed.and_then(Result::err).unwrap_or_else(|| anyhow::anyhow!("the lease was lost"));
            tracing::error!(error = format!("{error:#}"), "term not begun, handing over");
            shared.vitals.problem("term", format!("{error:#}"));
            release(shared, keeper, held).await;
            // Whatever it had started already.
            scope.end(STEP_DOWN).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            return;
        }
    };
    images::start(&term, cache.clone());
    shared.vitals.clear("term");
    shared.vitals.set_role(Role::Leading, term.epoch());
    shared.vitals.set_serving(true);
    shared.metrics.leading.set(1);
    shared.metrics.epoch.set(i64::try_from(term.epoch().0).unwrap_or(i64::MAX));
    term.tell(Tell::shard(Reason::LeaderAcquired, format!("{} leads", shared.id)));
    served.send_modify(|served| {
        served.leader = Some(Leader { epoch: term.epoch(), advertised: term.advertised.clone() });
        served.term = Some(term.clone());
    });
    let why = tokio::select! {
        biased;
        () = stop.cancelled() => "stopping".to_owned(),
        why = term.ended() => why,
        why = keep(shared, keeper, &mut held, &term) => why,
    };
    // From here on no effect starts. Then the lease is freed, so that a successor need not wait for what follows.
    term.guard.close();
    served.send_modify(|served| {
        served.leader = None;
        served.term = None;
    });
    shared.vitals.set_role(if stop.is_cancelled() { Role::Stopping } else { Role::Following }, term.epoch());
    tracing::info!(epoch = %term.epoch(), why, "term ends");
    release(shared, keeper, held).await;
    let aborted = scope.end(STEP_DOWN).await;
    tracing::debug!(aborted, "term's tasks ended");
}

/// Where the cache keeps the epoch in which this machine led last.
const LED: &str = "led";

/// Whether nobody else led since this machine's cache was written.
fn led_last(cache: &Cache, held: &Held) -> bool {
    let led = cache.get_object(LED).ok().flatten().map(|(etag, _)| etag.0);
    let previous = held.lease().previous.as_ref().filter(|it| !it.holder.is_empty());
    previous.is_none_or(|it| led.is_some_and(|led| led == it.epoch.to_string()))
}

fn note_led(cache: &Cache, held: &Held) {
    let epoch = held.epoch();
    if let Err(error) = cache.put_object(LED, &ETag(epoch.to_string()), b"", epoch) {
        // The next term takes nothing from this cache that the bucket does not have.
        tracing::warn!(error = %Chain(&error), "cache does not remember this term");
    }
}

/// Reads the shard's state with the lease held, renewing meanwhile. `None` if the lease was lost.
async fn acquire_state(shared: &Shared, cache: &Cache, keeper: &LeaseKeeper, held: &mut Held) -> Option<Rebuilt> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        let reading = rebuild(shared.store.as_ref(), Some(cache), &shared.shard, shared.entropy.as_ref());
        match renewing(keeper, held, reading).await? {
            // Somebody with a higher epoch wrote here: we act only above it.
            Ok(rebuilt) if held.epoch() < rebuilt.highest_epoch => {
                match keeper.raise(held, rebuilt.highest_epoch).await {
                    Renewal::Lost => return None,
                    Renewal::Extended { .. } if rebuilt.highest_epoch < held.epoch() => return Some(rebuilt),
                    _ => {}
                }
            }
            Ok(rebuilt) => return Some(rebuilt),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "state not read, nothing is served before it is");
                shared.events.tell(
                    shared.clock.now(),
                    held.epoch(),
                    Tell::shard(Reason::StoreFailing, format!("{}", Chain(&error))),
                );
            }
        }
        tokio::time::sleep(backoff.next(shared.entropy.as_ref())).await;
        if !held.guard().is_open() && keeper.renew(held).await == Renewal::Lost {
            return None;
        }
    }
}

/// Does `work` while the lease is kept. `None` if the lease was lost meanwhile.
async fn renewing<T>(keeper: &LeaseKeeper, held: &mut Held, work: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(work);
    let mut wait = keeper.timing().renew_interval;
    loop {
        tokio::select! {
            biased;
            done = &mut work => return Some(done),
            () = tokio::time::sleep(wait) => {}
        }
        wait = match keeper.renew(held).await {
            Renewal::Extended { .. } => keeper.timing().renew_interval,
            Renewal::Retry { after, .. } => after,
            Renewal::Lost => return None,
        };
    }
}

/// Fills the world, opens the ports, starts what runs. Ports open last.
async fn begin(
    shared: &Arc<Shared>,
    scope: &Tasks,
    guard: Guard,
    rebuilt: Rebuilt,
    doors: Doors,
) -> anyhow::Result<Arc<Term>> {
    refresh::latest(shared, guard.epoch()).await;
    let applied = shared.config.get();
    let server = &applied.config.server;
    let world = World::new(TermClock::start(shared.clock.clone()), server);
    let groups_known = !matches!(rebuilt.groups, nstance_store::rebuild::GroupsState::Unreadable(_));
    for key in &rebuilt.foreign_keys {
        tracing::warn!(key, "object below instance/ names no instance, it is left alone");
    }
    let remembered = rebuilt.remembered_groups.is_some();
    let groups = Groups::new(rebuilt.groups, rebuilt.remembered_groups);
    let asked = asked(&applied.config, groups.file().as_ref(), &shared.authority.bundle_pem());
    world.load(rebuilt.instances, rebuilt.corrupt);
    world.ask(asked.into_iter().map(|(group, asked)| (group, Some(asked))).collect());
    world.lock().complete.groups = groups_known || remembered;
    let ports = match doors {
        Doors::Inside { .. } => None,
        Doors::Sockets { .. } => {
            let ports = Ports::bind(
                wiring::socket_addr(&server.bind.registration, shared.port_offset)?,
                wiring::socket_addr(&server.bind.operator, shared.port_offset)?,
                wiring::socket_addr(&server.bind.agent, shared.port_offset)?,
            );
            Some(ports.await.context("open the ports of a leader")?)
        }
    };
    let advertised = match &ports {
        Some(ports) => Advertised {
            registration: wiring::advertised(&server.advertise.registration, ports.registration.local_addr()?),
            operator: wiring::advertised(&server.advertise.operator, ports.operator.local_addr()?),
            agent: wiring::advertised(&server.advertise.agent, ports.agent.local_addr()?),
        },
        // One name for the shard, whoever leads it.
        None => {
            let inside = format!("{}.inside", shared.shard);
            Advertised { registration: inside.clone(), operator: inside.clone(), agent: inside }
        }
    };
    let term = Term::new(
        shared.clone(),
        guard,
        scope.clone(),
        world,
        Gate::new(Pace::of(server), shared.clock.clone()),
        groups,
        advertised,
    );
    restore(&term, rebuilt.vanished).await;
    if let Some(ports) = ports {
        serve(&term, ports).context("serve the ports of a leader")?;
    }
    term.world.lock().agents_since = Some(term.now());
    scope.spawn("observe", observe::work(term.clone()));
    scope.spawn("collect", collect::work(term.clone()));
    scope.spawn("capacity", capacity::work(term.clone()));
    refresh::begin(&term);
    term.wake_all();
    Ok(term)
}

/// Records that the cache remembers and the bucket has lost are put back before anything is decided without them.
async fn restore(term: &Arc<Term>, vanished: Vec<nstance_store::Versioned<nstance_core::instance::Instance>>) {
    for lost in vanished {
        let (group, id) = (lost.value.group.clone(), lost.value.id);
        match term.shared.records.put_back_instance(&term.guard, &lost).await {
            Ok(record) => {
                term.commit(record);
                let message = "record was missing from the store and was put back from the cache";
                term.tell(Tell::instance(Reason::RecordRepaired, &group, id, message));
            }
            Err(nstance_store::RecordError::Taken(existing)) => {
                term.commit(*existing);
            }
            Err(error) => {
                // Its VM, if it lives, is adopted by the listing; its record comes with that.
                tracing::warn!(%group, instance = %id, error = %Chain(&error), "lost record not put back");
            }
        }
    }
}

/// Renews the lease until it is lost. Answers why.
async fn keep(shared: &Shared, keeper: &LeaseKeeper, held: &mut Held, term: &Arc<Term>) -> String {
    let mut wait = keeper.timing().renew_interval;
    loop {
        tokio::time::sleep(wait).await;
        match keeper.renew(held).await {
            Renewal::Extended { .. } => {
                shared.metrics.lease_renewals.inc();
                shared.vitals.clear("lease");
                if shared.vitals.role() == Role::Stalled {
                    tracing::info!(epoch = %held.epoch(), "lease renewed, acting again");
                    shared.vitals.set_role(Role::Leading, held.epoch());
                    shared.vitals.set_serving(true);
                    term.want_listing();
                    term.wake_all();
                }
                wait = keeper.timing().renew_interval;
            }
            Renewal::Lost => return "the lease went to somebody else".to_owned(),
            Renewal::Retry { after, error } => {
                shared.metrics.lease_renewal_failures.inc();
                shared.vitals.problem("lease", format!("{}", Chain(&error)));
                tracing::warn!(error = %Chain(&error), retry_in = ?after, "lease not renewed");
                if !held.guard().is_open() && shared.vitals.role() == Role::Leading {
                    tracing::error!(epoch = %held.epoch(), "lease ran out, effects are stopped until it is renewed");
                    shared.vitals.set_role(Role::Stalled, held.epoch());
                    shared.vitals.set_serving(true);
                }
                wait = after;
            }
        }
    }
}

async fn release(shared: &Shared, keeper: &LeaseKeeper, held: Held) {
    let epoch = held.epoch();
    if held.guard().is_closed() && shared.vitals.role() == Role::Following {
        return; // lost, not given: there is nothing to free
    }
    match tokio::time::timeout(Duration::from_secs(2), keeper.release(held)).await {
        Ok(Ok(_)) => tracing::info!(%epoch, "lease released"),
        Ok(Err(error)) => tracing::warn!(%epoch, error = %Chain(&error), "lease not released, it runs out by itself"),
        Err(_) => tracing::warn!(%epoch, "lease not released in time, it runs out by itself"),
    }
}
