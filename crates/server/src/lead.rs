//! Standing for leadership, and what runs while we lead.
//!
//! One loop for the life of the process: follow, bid, lead, step down, follow again. A term owns everything that acts;
//! when it ends its scope ends, and with it every task, timer, queue and stream of it. The process does not exit.

mod follow;
mod hold;
mod network;
mod warm;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context;
use nstance_config::model::Address;
use nstance_core::{
    ids::Epoch,
    ports::{
        clock::{Clock, Entropy},
        objects::{ETag, ObjectStore},
        peers::{Election, PeerRole, Peers},
    },
    term::Guard,
};
use nstance_rt::{backoff::Backoff, chain::Chain, lane::Lane, tasks::Tasks};
use nstance_store::{
    cache::Cache,
    election::{Held, Identity, LeaseKeeper, LeaseRecord, Timing, during::while_holding, follow::Follower},
    rebuild::{RebuildError, Rebuilt, rebuild},
    records::lease_key,
};
use tokio::{
    net::TcpListener,
    sync::{Notify, watch},
};

use self::{
    follow::follow,
    hold::{Around, Holding, Pulse},
    warm::keep_warm,
};
use crate::{
    authority::keep,
    boot::{Doors, Leader, Parts, Served},
    events::{Reason, Tell},
    grpc::serve::{Ports, serve},
    pace::{Gate, Pace},
    service::{
        config::{Applied, asked},
        groups::Groups,
        refresh, report,
    },
    tasks::{capacity, check, collect, images, observe, types},
    term::{Advertised, Shared, Term},
    term_clock::TermClock,
    vitals::Role,
    wiring,
    world::World,
};

/// Writes on their way are waited for so long before a hand-over.
const WRITES: Duration = Duration::from_millis(150);
const RELEASE: Duration = Duration::from_secs(2);
/// Between two tries to bind a port.
const BIND: Duration = Duration::from_millis(250);
/// Streams end by themselves when their term does; what has not after this is cut.
const STEP_DOWN: Duration = Duration::from_millis(500);

/// Who stands, and by what clock.
pub struct Candidate {
    identity: Identity,
    writer: String,
    timing: Timing,
    store: Arc<dyn ObjectStore>,
    lease_store: Arc<dyn ObjectStore>,
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
            store: parts.store.clone(),
            lease_store: parts.lease_store.clone().unwrap_or_else(|| parts.store.clone()),
            clock: parts.clock.clone(),
            entropy: parts.entropy.clone(),
        })
    }

    /// The random part of our identity as a holder.
    pub fn process(&self) -> &str {
        &self.identity.process
    }

    /// The machine we run on, once the provider has told.
    pub fn runs_on(&mut self, provider_id: Option<String>) {
        self.identity.provider_id = provider_id;
    }

    fn keeper(&self, store: &Arc<dyn ObjectStore>, key: String, timing: Timing) -> LeaseKeeper {
        LeaseKeeper::new(
            store.clone(),
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
    let keeper = candidate.keeper(&candidate.store, lease_key(None), Timing::CLUSTER);
    while_holding(&keeper, candidate.clock.as_ref(), work).await?.context("make CA and nonce key")
}

/// What a server needs to stand for leadership, over and over.
pub struct Stand {
    pub tasks: Tasks,
    pub shared: Arc<Shared>,
    pub cache: Arc<Cache>,
    pub candidate: Candidate,
    pub doors: Doors,
    pub peers: Arc<dyn Peers>,
    pub lane: Lane,
}

/// Why a term ended.
enum Why {
    /// This process stops.
    Stopping,
    /// Somebody else has the lease, or nobody.
    Lost(String),
    /// A record of a higher epoch was met: we lead no more, whatever the lease says.
    Fenced(String),
    /// We cannot do the work; perhaps somebody else can.
    HandOver(String),
}

/// Follows and leads until the scope ends.
pub async fn run(stand: Stand, served: &watch::Sender<Served>) {
    let Stand { tasks, shared, cache, candidate, .. } = &stand;
    let key = lease_key(Some(&shared.shard));
    let keeper = candidate.keeper(&shared.store, key.clone(), candidate.timing);
    // The lease has a way of its own to the store: nothing else can fill it.
    let renewals = Arc::new(candidate.keeper(&candidate.lease_store, key, candidate.timing));
    let around = Around {
        lane: stand.lane.clone(),
        clock: shared.clock.clone(),
        desk: shared.desk.clone(),
        vitals: shared.vitals.clone(),
        metrics: shared.metrics.clone(),
        pulse: Pulse::start(tasks, shared.clock.clone()),
        peers: stand.peers.clone(),
    };
    let stop = tasks.token().clone();
    let mut gave_up = None;
    loop {
        shared.set_role(Role::Following, Epoch(0));
        if let Some(why) = shared.too_new.get() {
            tracing::error!(why, "this server does not stand any more");
            shared.vitals.problem("version", why.clone());
            stop.cancelled().await;
            return;
        }
        let leader_ip = network::of(shared).map(|network| network.ip);
        let mut follower = Follower::new(candidate.identity.clone(), leader_ip);
        if let Some(at) = gave_up {
            follower = follower.gave_up(at);
        }
        let warm = Notify::new();
        let held = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            held = follow(shared, &keeper, &stand.peers, cache, follower, &warm) => held,
            () = keep_warm(shared, cache, &warm) => return,
        };
        let given = lead(&stand, &around, &renewals, held, served).await;
        shared.metrics.leading.set(0);
        gave_up = given.then(|| shared.clock.monotonic());
        if stop.is_cancelled() {
            return;
        }
    }
}

/// One term, from the lease to its end. Answers whether it was given up on purpose.
async fn lead(
    stand: &Stand,
    around: &Around,
    renewals: &Arc<LeaseKeeper>,
    held: Held,
    served: &watch::Sender<Served>,
) -> bool {
    let Stand { tasks, shared, .. } = stand;
    let stop = tasks.token().clone();
    shared.set_role(Role::Acquiring, held.epoch());
    let holding = Holding::start(around, renewals.clone(), held);
    let scope = tasks.child();
    let begun = OnceLock::new();
    let why = tokio::select! {
        biased;
        () = stop.cancelled() => Why::Stopping,
        why = holding.lost() => Why::Lost(why),
        why = serve_term(stand, &holding, &scope, &begun, served) => why,
    };
    // From here on no effect starts. Then the lease is freed, so that a successor need not wait for what follows.
    let epoch = holding.epoch();
    holding.guard().close();
    let term: Option<&Arc<Term>> = begun.get();
    let (given, reason, message) = match &why {
        Why::Stopping => (true, Reason::LeaderReleased, format!("{} stops", shared.id)),
        Why::HandOver(why) => (true, Reason::LeaderReleased, format!("{} hands over: {why}", shared.id)),
        Why::Lost(why) | Why::Fenced(why) => (false, Reason::LeaderLost, format!("{} stepped down: {why}", shared.id)),
    };
    tracing::warn!(%epoch, message, "term ends");
    match term {
        Some(term) => term.tell_now(Tell::shard(reason, message)),
        None => {
            shared.events.tell(shared.clock.now(), epoch, Tell::shard(reason, message));
        }
    }
    if given {
        hand_over(shared, holding, epoch).await;
    } else {
        shared.set_role(Role::Following, epoch);
    }
    served.send_modify(|served| {
        served.leader = None;
        served.term = None;
    });
    let aborted = scope.end(STEP_DOWN).await;
    tracing::debug!(aborted, "term's tasks ended");
    network::give_up(tasks, shared);
    given
}

/// Frees the lease as fast as can be, and tells whoever waits for it. Provider calls on their way are not waited for:
/// their intent is durable, the successor repeats or looks at them.
async fn hand_over(shared: &Shared, holding: Holding, epoch: Epoch) {
    shared.set_role(Role::Stopping, epoch);
    if tokio::time::timeout(WRITES, shared.records.quiet()).await.is_err() {
        tracing::debug!("writes are still on their way, the successor reads what became of them");
    }
    match tokio::time::timeout(RELEASE, holding.release()).await {
        Ok(Ok(etag)) => {
            tracing::info!(%epoch, "lease released");
            shared.desk.stand(Election::Shard, |it| {
                it.role = PeerRole::Released;
                it.etag = Some(etag);
                it.renewed = Some(shared.clock.monotonic());
            });
        }
        Ok(Err(error)) => tracing::warn!(%epoch, error, "lease not released, it runs out by itself"),
        Err(_) => tracing::warn!(%epoch, "lease not released in time, it runs out by itself"),
    }
}

/// Everything between the lease and the term's own end.
async fn serve_term(
    stand: &Stand,
    holding: &Holding,
    scope: &Tasks,
    begun: &OnceLock<Arc<Term>>,
    served: &watch::Sender<Served>,
) -> Why {
    let Stand { shared, cache, .. } = stand;
    let mut rebuilt = match read_state(shared, cache, holding).await {
        Ok(rebuilt) => rebuilt,
        Err(why) => return why,
    };
    let lease = holding.news().lease;
    if !led_last(cache, &lease) {
        // Whoever led since this cache was in order may have removed them rightly. The VM of one that was not is found
        // by its tags.
        for lost in std::mem::take(&mut rebuilt.vanished) {
            shared.cache.purge(&lost.value);
        }
    }
    note_led(cache, lease.epoch);
    let previous = lease.previous.and_then(|it| it.provider_id);
    let (term, ports) = match begin(shared, scope, holding.guard(), rebuilt, stand.doors).await {
        Ok(begun) => begun,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "term not begun, handing over");
            shared.vitals.problem("term", format!("{error:#}"));
            return Why::HandOver(format!("{error:#}"));
        }
    };
    let _ = begun.set(term.clone());
    images::start(&term, cache.clone());
    report::recall(&term, cache);
    shared.vitals.clear("term");
    shared.set_role(Role::Leading, term.epoch());
    shared.metrics.leading.set(1);
    shared.metrics.epoch.set(i64::try_from(term.epoch().0).unwrap_or(i64::MAX));
    served.send_modify(|served| served.term = Some(term.clone()));
    term.tell(Tell::shard(Reason::LeaderAcquired, format!("{} leads", shared.id)));
    tokio::select! {
        biased;
        why = term.ended() => match shared.too_new.get() {
            Some(_) => Why::HandOver(why),
            None => Why::Fenced(why),
        },
        why = open_doors(stand, &term, ports, previous, served) => Why::HandOver(why),
        () = resync(holding, &term) => Why::HandOver("the lease's own task ended".to_owned()),
    }
}

/// Where the cache keeps the epoch in which this machine led last.
const LED: &str = "led";

/// Whether nobody else led since this machine's cache was written.
fn led_last(cache: &Cache, lease: &LeaseRecord) -> bool {
    let led = cache.get_object(LED).ok().flatten().map(|(etag, _)| etag.0);
    let previous = lease.previous.as_ref().filter(|it| !it.holder.is_empty());
    previous.is_none_or(|it| led.is_some_and(|led| led == it.epoch.to_string()))
}

fn note_led(cache: &Cache, epoch: Epoch) {
    if let Err(error) = cache.put_object(LED, &ETag(epoch.to_string()), b"", epoch) {
        tracing::warn!(error = %Chain(&error), "cache does not remember that we led");
    }
}

/// After a stall nobody knows what was missed.
async fn resync(holding: &Holding, term: &Arc<Term>) {
    let mut n_resumed = 0;
    loop {
        n_resumed = holding.resumed(n_resumed).await;
        term.tell_kept();
        term.want_listing();
        term.wake_all();
    }
}

/// Reads the shard's state with the lease held.
async fn read_state(shared: &Shared, cache: &Cache, holding: &Holding) -> Result<Rebuilt, Why> {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        match rebuild(shared.store.as_ref(), Some(cache), &shared.shard, shared.entropy.as_ref()).await {
            Ok(rebuilt) => {
                // Somebody wrote here in a later epoch, or in the very same: a lease that was deleted or set back hands
                // numbers out twice. We act only above it.
                if holding.epoch() <= rebuilt.highest_epoch {
                    holding.raise(rebuilt.highest_epoch).await;
                }
                return Ok(rebuilt);
            }
            Err(error @ RebuildError::TooNew { .. }) => {
                let why = format!("{}", Chain(&error));
                let _ = shared.too_new.set(why.clone());
                return Err(Why::HandOver(why));
            }
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "state not read, nothing is served before it is");
                shared.events.tell(
                    shared.clock.now(),
                    holding.epoch(),
                    Tell::shard(Reason::StoreFailing, format!("{}", Chain(&error))),
                );
            }
        }
        tokio::time::sleep(backoff.next(shared.entropy.as_ref())).await;
    }
}

/// Fills the world and starts what runs. The ports are bound here if nothing stands against it, and open afterwards.
async fn begin(
    shared: &Arc<Shared>,
    scope: &Tasks,
    guard: Guard,
    rebuilt: Rebuilt,
    doors: Doors,
) -> anyhow::Result<(Arc<Term>, Option<Ports>)> {
    tokio::join!(refresh::latest(shared, guard.epoch()), keep::look_before_term(shared));
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
    // With an address that must come first, the ports wait for it; else they are had at once, or waited for.
    let ports = match doors {
        Doors::Sockets { .. } if network::of(shared).is_none() => bind(shared).await.ok(),
        _ => None,
    };
    let advertised = match doors {
        Doors::Sockets { .. } => {
            let bound = |it: Option<&TcpListener>, bind: &Address| match it.map(TcpListener::local_addr) {
                Some(addr) => anyhow::Ok(addr?),
                None => wiring::socket_addr(bind, shared.port_offset),
            };
            let (advertise, bind) = (&server.advertise, &server.bind);
            let registration = bound(ports.as_ref().map(|it| &it.registration), &bind.registration)?;
            let operator = bound(ports.as_ref().map(|it| &it.operator), &bind.operator)?;
            let agent = bound(ports.as_ref().map(|it| &it.agent), &bind.agent)?;
            Advertised {
                registration: wiring::advertised(&advertise.registration, registration),
                operator: wiring::advertised(&advertise.operator, operator),
                agent: wiring::advertised(&advertise.agent, agent),
            }
        }
        // One name for the shard, whoever leads it.
        Doors::Inside { .. } => {
            let inside = format!("{}.inside", shared.shard);
            Advertised { registration: inside.clone(), operator: inside.clone(), agent: inside }
        }
    };
    let term = Term::new(
        shared.clone(),
        guard,
        scope.clone(),
        world,
        Gate::new(Pace::of(server, shared.provider.capabilities().create_pace), shared.clock.clone()),
        groups,
        advertised,
    );
    restore(&term, rebuilt.vanished).await;
    shared.provider.restore(&term.world.reserved_ids());
    scope.spawn_droppable("provider check", check::work(term.clone()));
    scope.spawn("observe", observe::work(term.clone()));
    scope.spawn("collect", collect::work(term.clone()));
    scope.spawn("capacity", capacity::work(term.clone()));
    scope.spawn("instance types", types::work(term.clone()));
    scope.spawn("CA bundle", keep::tell_term(term.clone()));
    refresh::begin(&term);
    term.wake_all();
    Ok((term, ports))
}

async fn bind(shared: &Shared) -> anyhow::Result<Ports> {
    let applied = shared.config.get();
    let bind = &applied.config.server.bind;
    let ports = Ports::bind(
        wiring::socket_addr(&bind.registration, shared.port_offset)?,
        wiring::socket_addr(&bind.operator, shared.port_offset)?,
        wiring::socket_addr(&bind.agent, shared.port_offset)?,
    );
    ports.await.context("open the ports of a leader")
}

/// Takes the leader's address, then lets clients in. Answers only if that cannot be had and somebody else should try.
async fn open_doors(
    stand: &Stand,
    term: &Arc<Term>,
    ports: Option<Ports>,
    previous: Option<String>,
    served: &watch::Sender<Served>,
) -> String {
    let shared = &stand.shared;
    let sockets = matches!(stand.doors, Doors::Sockets { .. });
    if let Some(network) = network::of(shared) {
        if let Err(why) = network::take(shared, &term.guard, &network, previous, sockets).await {
            return why;
        }
        shared.vitals.clear("leader network");
    }
    if sockets {
        let mut backoff = Backoff::new(BIND, Duration::from_secs(2));
        let mut ports = ports;
        let ports = loop {
            match ports.take() {
                Some(ports) => break ports,
                None => match bind(shared).await {
                    Ok(bound) => ports = Some(bound),
                    Err(error) => {
                        shared.vitals.problem("ports", format!("{error:#}"));
                        tracing::warn!(error = format!("{error:#}"), "ports not open yet");
                        tokio::time::sleep(backoff.next(shared.entropy.as_ref()) + BIND).await;
                    }
                },
            }
        };
        shared.vitals.clear("ports");
        if let Err(error) = serve(term, ports) {
            return format!("ports not served: {}", Chain(&error));
        }
    }
    term.world.lock().agents_since = Some(term.now());
    shared.vitals.set_serving(true);
    served.send_modify(|served| {
        served.leader = Some(Leader { epoch: term.epoch(), advertised: term.advertised.clone() });
    });
    std::future::pending().await
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
