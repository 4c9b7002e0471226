//! The order of a start: health port first, then store, config, keys, cache; then the election, for ever.
//!
//! Whatever fails is retried and seen on the health port while it lasts. Two things end the process: a store that is
//! not safe, and a signal.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context;
use nstance_config::Config;
use nstance_core::{
    ids::{Epoch, ServerId, Shard},
    ports::{
        clock::{Clock, Entropy},
        objects::ObjectStore,
        peers::Peers,
        provider::Provider,
        secrets::Secrets,
    },
};
use nstance_identity::{
    ca::CaProfile,
    issue::ServerProfile,
    subject::{San, Subject},
};
use nstance_rt::{
    backoff::Backoff, chain::Chain, clock::SystemClock, entropy::SystemEntropy, lane::Lane, shutdown::StopSignals,
    tasks::Tasks,
};
use nstance_store::{
    cache::Cache,
    cas::Records,
    fence::Fence,
    qualify::{QualifyError, qualify},
    rebuild::rebuild,
    records::certlog::CertlogRecord,
};
use tokio::{net::TcpListener, sync::watch};

use crate::{
    args::Args,
    authority::{
        Authority, Step, Vault,
        keep::{self, CaSource},
    },
    cache::CacheWriter,
    counted::CountedStore,
    events::{Events, Reason, Tell},
    http,
    lead::{self, Candidate, Stand},
    metrics::Metrics,
    peer::{self, Desk, Who, client::TlsPeers},
    service::{
        config::{self, Applied, ConfigError, InForce, LastGood},
        register::logged,
    },
    tasks::check,
    term::{Advertised, Planner, Shared, Term},
    vitals::{Role, Vitals},
    wiring,
};

/// Settings and components of one server. Tests bring their own components.
pub struct Parts {
    pub id: ServerId,
    pub shard: Shard,
    pub cachedir: PathBuf,
    pub advertise_host: Option<String>,
    pub store: Arc<dyn ObjectStore>,
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    /// Instead of the provider that the config names.
    pub provider: Option<Arc<dyn Provider>>,
    pub doors: Doors,
    /// Instead of one in the cache directory.
    pub cache: Option<Arc<Cache>>,
    pub planner: Planner,
    /// What the server runs in.
    pub tasks: Tasks,
    /// The way to the other servers, instead of mTLS.
    pub peers: Option<Arc<dyn Peers>>,
    /// The lease's own way to the store, so that nothing else holds a renewal up. `None`: the common one.
    pub lease_store: Option<Arc<dyn ObjectStore>>,
    /// Added to every port that is bound, and to the ports of the advertised health and election addresses: for
    /// several servers of one shard on one machine.
    pub port_offset: u16,
}

/// How others reach a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doors {
    /// By the sockets that the config names. `first_health`: where the health port answers before any is known.
    Sockets { first_health: SocketAddr },
    /// By no socket at all: a simulation calls the services of a term ([`Running::term`]) in this process. The address
    /// stands for this server in the lease, where nobody else may have the same while it lives.
    Inside { addr: SocketAddr },
}

/// The health port's default, for [`Doors::Sockets`].
pub fn first_health(port_offset: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8990_u16.saturating_add(port_offset))
}

/// Where a leader is served, once it is.
#[derive(Clone, Default)]
pub struct Served {
    pub health: Option<SocketAddr>,
    pub leader: Option<Leader>,
    pub term: Option<Arc<Term>>,
    /// Where this server answers its peers, once it can.
    pub desk: Option<Arc<Desk>>,
    pub ending: Ending,
}

/// How this server ends, as its config says once there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// Limit of a graceful stop.
    pub limit: Duration,
    /// Wait before an exit with an error, at least and at most: a supervisor that restarts a whole fleet of servers
    /// should not do it in step.
    pub jitter: (Duration, Duration),
}

impl Default for Ending {
    fn default() -> Self {
        Self { limit: Duration::from_secs(10), jitter: (Duration::from_secs(1), Duration::from_secs(5)) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leader {
    pub epoch: Epoch,
    pub advertised: Advertised,
}

/// A running server.
pub struct Running {
    tasks: Tasks,
    served: watch::Receiver<Served>,
    fatal: watch::Receiver<Option<String>>,
    pub metrics: Arc<Metrics>,
    pub vitals: Arc<Vitals>,
}

impl Running {
    /// Waits until this server leads and serves.
    pub async fn leading(&mut self) -> anyhow::Result<Leader> {
        let served = self.served.wait_for(|served| served.leader.is_some()).await.context("server ended")?;
        served.leader.clone().context("server leads no more")
    }

    /// The term this server leads in, if it does.
    pub fn term(&self) -> Option<Arc<Term>> {
        self.served.borrow().term.clone()
    }

    /// What this server tells its peers, once it can.
    pub fn desk(&self) -> Option<Arc<Desk>> {
        self.served.borrow().desk.clone()
    }

    pub async fn health_addr(&mut self) -> anyhow::Result<SocketAddr> {
        let served = self.served.wait_for(|served| served.health.is_some()).await.context("server ended")?;
        served.health.context("no health port")
    }

    /// Resolves with the reason if the server cannot go on.
    pub async fn failed(&mut self) -> String {
        tokio::select! {
            biased;
            fatal = self.fatal.wait_for(Option::is_some) => match fatal {
                Ok(fatal) => fatal.clone().unwrap_or_default(),
                Err(_) => "server ended".to_owned(),
            },
            failure = self.tasks.failure() => failure.to_string(),
        }
    }

    /// Why the server cannot go on, if that is so now.
    pub async fn broken(&self) -> Option<String> {
        if let Some(fatal) = self.fatal.borrow().clone() {
            return Some(fatal);
        }
        tokio::select! {
            biased;
            failure = self.tasks.failure() => Some(failure.to_string()),
            () = std::future::ready(()) => None,
        }
    }

    /// Hands leadership over and ends everything within `limit`.
    pub async fn stop(self, limit: Duration) {
        let aborted = self.tasks.end(limit).await;
        if 0 < aborted {
            tracing::warn!(aborted, "tasks did not end in time");
        }
    }
}

/// Runs a server until a signal, or until it cannot go on.
pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let (store, lease_store) = (wiring::store(&args)?, wiring::store(&args)?);
    let entropy: Arc<dyn Entropy> = Arc::new(SystemEntropy::new());
    let mut running = start(Parts {
        id: args.id.context("--id is missing")?,
        shard: args.shard.context("--shard is missing")?,
        cachedir: args.cachedir,
        advertise_host: args.advertise_host,
        store,
        clock: Arc::new(SystemClock),
        entropy: entropy.clone(),
        provider: None,
        doors: Doors::Sockets { first_health: first_health(args.port_offset) },
        cache: None,
        planner: Arc::new(nstance_core::plan::plan),
        tasks: Tasks::new(),
        peers: None,
        lease_store: Some(lease_store),
        port_offset: args.port_offset,
    });
    let ended = tokio::select! {
        biased;
        signal = signals.next() => Ok(signal),
        fatal = running.failed() => Err(fatal),
    };
    let ending = running.served.borrow().ending.clone();
    match ended {
        Ok(signal) => {
            tracing::info!(signal, "stopping; a second signal ends at once");
            running.vitals.set_role(Role::Stopping, Epoch(0));
            tokio::select! {
                biased;
                _ = signals.next() => Ok(ExitCode::FAILURE),
                () = running.stop(ending.limit) => Ok(ExitCode::SUCCESS),
            }
        }
        Err(fatal) => {
            running.stop(ending.limit).await;
            let (least, most) = ending.jitter;
            let jitter = nstance_rt::entropy::jitter(entropy.as_ref(), most.saturating_sub(least));
            tracing::error!(error = fatal, "server ends");
            tokio::select! {
                biased;
                _ = signals.next() => {}
                () = tokio::time::sleep(least + jitter) => {}
            }
            anyhow::bail!(fatal)
        }
    }
}

/// Starts a server in this process.
pub fn start(mut parts: Parts) -> Running {
    let tasks = parts.tasks.clone();
    let metrics = Arc::new(Metrics::new());
    parts.store = Arc::new(CountedStore::new(parts.store, metrics.clone()));
    parts.lease_store = (parts.lease_store)
        .map(|store| -> Arc<dyn ObjectStore> { Arc::new(CountedStore::new(store, metrics.clone())) });
    let vitals = Arc::new(Vitals::default());
    let (served, watching) = watch::channel(Served::default());
    let (fatal, fatality) = watch::channel(None);
    let boot = Boot { parts, tasks: tasks.clone(), metrics: metrics.clone(), vitals: vitals.clone(), served };
    tasks.spawn("server", async move {
        if let Err(error) = boot.run().await {
            fatal.send_replace(Some(format!("{error:#}")));
        }
    });
    Running { tasks, served: watching, fatal: fatality, metrics, vitals }
}

struct Boot {
    parts: Parts,
    tasks: Tasks,
    metrics: Arc<Metrics>,
    vitals: Arc<Vitals>,
    served: watch::Sender<Served>,
}

/// Ends a step early when the server stops.
struct Stopped;

/// The health port as it stands before the config is known.
struct FirstHealth {
    wanted: SocketAddr,
    /// With the real port, where any would do.
    bound: SocketAddr,
    tasks: Tasks,
}

impl Boot {
    async fn run(self) -> anyhow::Result<()> {
        match self.steps().await {
            Ok(()) => Ok(()),
            Err(End::Stopped) => Ok(()),
            Err(End::Fatal(error)) => Err(error),
        }
    }

    async fn steps(&self) -> Result<(), End> {
        let parts = &self.parts;
        self.vitals.set_store(parts.store.describe());
        let last_good = LastGood::new(&parts.cachedir, &parts.shard);
        let first_health = self.first_health_port(&last_good).await;
        self.qualified().await?;
        let (applied, rejected) = self.config(&last_good).await?;
        let server = &applied.config.server;
        self.served.send_modify(|served| {
            let jitter = &server.error_exit_jitter;
            served.ending = Ending { limit: server.shutdown_timeout, jitter: (jitter.min_delay, jitter.max_delay) };
        });
        if parts.provider.is_none() {
            wiring::check_provider(&applied.config).map_err(End::Fatal)?;
        }
        self.check_advertise_host(&applied).map_err(End::Fatal)?;
        // Bound for the life of the process: while it is, no other server can be bound here, so one that finds the
        // lease naming this very address knows that its holder is gone.
        let (election, election_addr) = match parts.doors {
            Doors::Inside { addr } => (None, addr),
            Doors::Sockets { .. } => {
                self.health_port(first_health, &applied).await?;
                let election =
                    self.bind("election", wiring::socket_addr(&server.bind.election, parts.port_offset)).await?;
                let addr = election.local_addr().map_err(|error| End::Fatal(error.into()))?;
                (Some(election), addr)
            }
        };
        let cache = self.cache(&applied).await?;
        let metrics = self.metrics.clone();
        let writer = match parts.doors {
            Doors::Sockets { .. } => CacheWriter::start(&self.tasks, cache.clone(), metrics),
            Doors::Inside { .. } => CacheWriter::at_once(cache.clone(), metrics),
        };
        let entropy = parts.entropy.clone();
        let secrets = self
            .until("secrets", || async { wiring::secrets(&applied.config, parts.store.clone(), entropy.clone()) })
            .await?;
        let records = Records::new(
            parts.store.clone(),
            parts.shard.clone(),
            format!("{}/{}", parts.shard, parts.id),
            parts.clock.clone(),
            parts.entropy.clone(),
        );
        let health_addr = self.served.borrow().health.unwrap_or(election_addr);
        let mut candidate = Candidate::new(parts, &applied, election_addr, health_addr).map_err(End::Fatal)?;
        let authority = self.authority(&applied, &cache, secrets.as_ref(), &records, &candidate).await?;
        let who = Who {
            cluster: server.cluster_id.clone(),
            shard: parts.shard.clone(),
            server_id: parts.id.clone(),
            process: candidate.process().to_owned(),
        };
        let desk = Arc::new(Desk::new(who, parts.clock.clone(), self.vitals.clone()));
        self.served.send_modify(|served| served.desk = Some(desk.clone()));
        let provider = match &parts.provider {
            Some(provider) => provider.clone(),
            None => {
                let (clock, entropy) = (parts.clock.clone(), parts.entropy.clone());
                wiring::provider(&applied.config, clock, entropy, &self.tasks, parts.id.as_str()).map_err(End::Fatal)?
            }
        };
        // Beside the start: a standby of a shard tells what is wrong before it is needed.
        let (checked, needs) = (provider.clone(), check::needs(&applied.config, std::iter::empty()));
        self.tasks.spawn_droppable("provider check", async move {
            check::check(checked.as_ref(), &needs).await;
        });
        if let Some(address) = provider.leader_address() {
            match address.self_id().await {
                Ok(id) => candidate.runs_on(Some(id)),
                Err(error) => tracing::info!(error = %Chain(&error), "which machine this is, is not known"),
            }
        }
        self.synced(&cache).await?;
        self.vitals.set_loaded();
        let shared = Arc::new(Shared {
            id: parts.id.clone(),
            cluster: server.cluster_id.clone(),
            shard: parts.shard.clone(),
            clock: parts.clock.clone(),
            entropy: parts.entropy.clone(),
            store: parts.store.clone(),
            ca_source: CaSource::new(secrets.clone(), cache.clone(), parts.clock.now()),
            secrets,
            records,
            provider,
            authority,
            metrics: self.metrics.clone(),
            vitals: self.vitals.clone(),
            events: Arc::new(Events::new(self.metrics.clone())),
            cache: writer,
            config: InForce::new(applied),
            last_good,
            planner: parts.planner.clone(),
            desk,
            port_offset: parts.port_offset,
            too_new: OnceLock::new(),
        });
        shared.events.tell(
            parts.clock.now(),
            Epoch(0),
            Tell::shard(Reason::ConfigApplied, format!("config {} in force", shared.config.get().key))
                .detail("etag", &shared.config.get().etag),
        );
        if let Some(rejected) = &rejected {
            let message = format!("{}", Chain(rejected));
            shared.events.tell(parts.clock.now(), Epoch(0), Tell::shard(Reason::ConfigRejected, message));
        }
        keep::keep(&self.tasks, shared.clone());
        // What answers our peers, and what holds the lease, outlive the rest: both are needed to hand over.
        let (lane, _lane_end) = match parts.doors {
            Doors::Inside { .. } => (Lane::Common(self.tasks.clone()), None),
            Doors::Sockets { .. } => {
                let (lane, end) = Lane::own("lease").map_err(|error| End::Fatal(error.into()))?;
                (lane, Some(end))
            }
        };
        let desks = Tasks::new();
        let _desks_end = desks.token().clone().drop_guard();
        let peers: Arc<dyn Peers> = match (&parts.peers, election) {
            (Some(peers), _) => peers.clone(),
            (None, None) => {
                return Err(End::Fatal(anyhow::anyhow!("a server without sockets needs a way to its peers")));
            }
            (None, Some(listener)) => {
                let (authority, clock) = (&shared.authority, parts.clock.clone());
                peer::serve::serve(&desks, listener, authority, clock.clone(), shared.desk.clone())
                    .map_err(|error| End::Fatal(error.into()))?;
                let (cluster, shard) = (shared.cluster.clone(), shared.shard.clone());
                let peers = TlsPeers::new(&desks, authority.clone(), clock, cluster, shard);
                Arc::new(peers.map_err(|error| End::Fatal(error.into()))?)
            }
        };
        let stand = Stand { tasks: self.tasks.clone(), shared, cache, candidate, doors: parts.doors, peers, lane };
        lead::run(stand, &self.served).await;
        desks.end(Duration::from_millis(200)).await;
        Ok(())
    }

    /// `--advertise-host` fills in a host; it does not overrule one.
    fn check_advertise_host(&self, applied: &Applied) -> anyhow::Result<()> {
        let advertise = &applied.config.server.advertise;
        let named = [("health_addr", &advertise.health), ("election_addr", &advertise.election)];
        if let (Some(host), Some((field, address))) =
            (&self.parts.advertise_host, named.into_iter().find(|(_, address)| !address.is_any()))
        {
            anyhow::bail!(
                "--advertise-host {host} contradicts server.advertise.{field} = {address} of {}; drop one of them",
                applied.key
            );
        }
        Ok(())
    }

    /// Tries until it works or the server stops; the cause is seen on the health port meanwhile.
    async fn until<T, F>(&self, part: &'static str, mut attempt: impl FnMut() -> F) -> Result<T, Stopped>
    where
        F: Future<Output = anyhow::Result<T>>,
    {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        loop {
            let tried = tokio::select! {
                biased;
                () = self.tasks.token().cancelled() => return Err(Stopped),
                tried = attempt() => tried,
            };
            match tried {
                Ok(done) => {
                    self.vitals.clear(part);
                    return Ok(done);
                }
                Err(error) => {
                    let wait = backoff.next(self.parts.entropy.as_ref());
                    tracing::warn!(part, error = format!("{error:#}"), retry_in = ?wait, "start waits");
                    self.vitals.problem(part, format!("{error:#}"));
                    tokio::select! {
                        biased;
                        () = self.tasks.token().cancelled() => return Err(Stopped),
                        () = tokio::time::sleep(wait) => {}
                    }
                }
            }
        }
    }

    /// Before the config is known the health port answers where the last good config put it, else at its default.
    async fn first_health_port(&self, last_good: &LastGood) -> Option<FirstHealth> {
        let known = last_good.applied(&self.parts.shard, self.parts.clock.now());
        let Doors::Sockets { first_health } = self.parts.doors else { return None };
        let wanted = match &known {
            Some(applied) => wiring::socket_addr(&applied.config.server.bind.health, self.parts.port_offset).ok()?,
            None => first_health,
        };
        // Taken by somebody else: the config will tell where ours is.
        let listener = TcpListener::bind(wanted).await.ok()?;
        let bound = listener.local_addr().ok()?;
        let tasks = self.tasks.child();
        http::serve(&tasks, listener, self.vitals.clone(), self.metrics.clone());
        self.served.send_modify(|served| served.health = Some(bound));
        Some(FirstHealth { wanted, bound, tasks })
    }

    async fn health_port(&self, first: Option<FirstHealth>, applied: &Applied) -> Result<(), End> {
        let wanted =
            wiring::socket_addr(&applied.config.server.bind.health, self.parts.port_offset).map_err(End::Fatal)?;
        let bound = match first {
            Some(first) if first.wanted == wanted => first.bound,
            first => {
                if let Some(first) = first {
                    first.tasks.end(Duration::from_millis(100)).await;
                }
                let listener = self.bind("health", Ok(wanted)).await?;
                let bound = listener.local_addr().map_err(|error| End::Fatal(error.into()))?;
                http::serve(&self.tasks, listener, self.vitals.clone(), self.metrics.clone());
                bound
            }
        };
        self.served.send_modify(|served| served.health = Some(bound));
        Ok(())
    }

    async fn bind(&self, part: &'static str, addr: anyhow::Result<SocketAddr>) -> Result<TcpListener, End> {
        let addr = addr.map_err(End::Fatal)?;
        let bind = || async move { TcpListener::bind(addr).await.with_context(|| format!("bind {addr}")) };
        Ok(self.until(part, bind).await?)
    }

    async fn qualified(&self) -> Result<(), End> {
        let parts = &self.parts;
        let outcome = self
            .until("store", || async {
                match qualify(parts.store.as_ref(), &parts.shard, &parts.id, parts.entropy.as_ref()).await {
                    Ok(()) => Ok(Ok(())),
                    Err(error @ QualifyError::Unsafe { .. }) => Ok(Err(error)),
                    Err(error) => Err(error.into()),
                }
            })
            .await?;
        outcome.map_err(|error| End::Fatal(error.into()))
    }

    /// The config in force, and what is wrong with the stored one if it is not that.
    async fn config(&self, last_good: &LastGood) -> Result<(Applied, Option<ConfigError>), End> {
        let parts = &self.parts;
        let fetch = || async {
            let fetched = config::fetch(parts.store.as_ref(), last_good, &parts.shard, parts.clock.now()).await?;
            Ok(fetched)
        };
        let (applied, failure) = self.until("config", fetch).await?;
        self.vitals.set_config(&applied.etag.0, applied.stale);
        if let Some(failure) = &failure {
            tracing::error!(error = %Chain(failure), "stored config is not usable, the last good one stays in force");
            self.vitals.problem("config", format!("{}", Chain(failure)));
        }
        Ok((applied, failure))
    }

    async fn cache(&self, applied: &Applied) -> Result<Arc<Cache>, End> {
        let server = &applied.config.server;
        if let Some(cache) = &self.parts.cache {
            return Ok(cache.clone());
        }
        let open = || async {
            let cache = Cache::open(&self.parts.cachedir, &server.cluster_id, &server.shard)?;
            Ok(Arc::new(cache))
        };
        Ok(self.until("cache", open).await?)
    }

    /// Loads CA and nonce key; makes them under the cluster lease if nobody has yet.
    async fn authority(
        &self,
        applied: &Applied,
        cache: &Cache,
        secrets: &dyn Secrets,
        records: &Records,
        candidate: &Candidate,
    ) -> Result<Arc<Authority>, End> {
        let parts = &self.parts;
        let profile = ca_profile(&applied.config);
        let vault = Vault {
            store: parts.store.as_ref(),
            secrets,
            cache,
            records,
            clock: parts.clock.as_ref(),
            entropy: parts.entropy.as_ref(),
            cluster: &applied.config.server.cluster_id,
            profile: &profile,
        };
        let keys = self
            .until("ca", || async {
                if vault.look().await? == Step::NeedsLease {
                    lead::with_cluster_lease(candidate, vault.make()).await?;
                }
                Ok(vault.load().await?)
            })
            .await?;
        let server_profile = ServerProfile {
            server: parts.id.clone(),
            cluster: applied.config.server.cluster_id.clone(),
            shard: parts.shard.clone(),
            sans: sans(&applied.config, parts.advertise_host.as_deref()),
        };
        let authority = Authority::new(keys, server_profile, parts.clock.now(), parts.entropy.clone())
            .map_err(|error| End::Fatal(error.into()))?;
        let own = authority.own_certificate();
        self.until("certlog", || async { Ok(log_own(records, applied, &parts.id, &own, parts.clock.now()).await?) })
            .await?;
        Ok(Arc::new(authority))
    }

    /// The cache is brought up to date once before anybody is told that we are healthy.
    async fn synced(&self, cache: &Cache) -> Result<(), End> {
        let parts = &self.parts;
        self.until("cache", || async {
            let rebuilt = rebuild(parts.store.as_ref(), Some(cache), &parts.shard, parts.entropy.as_ref()).await?;
            tracing::info!(records = rebuilt.n_listed, fetched = rebuilt.n_fetched, "cache synced");
            Ok(())
        })
        .await?;
        Ok(())
    }
}

enum End {
    Stopped,
    Fatal(anyhow::Error),
}

impl From<Stopped> for End {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

fn ca_profile(config: &Config) -> CaProfile {
    let mut profile = CaProfile::of(config.server.cluster_id.clone());
    profile.ttl = Some(config.certificates.ca.ttl);
    if let Ok(ca) = nstance_config::render::render_ca(config)
        && let Some(common_name) = ca.cn
    {
        profile.subject = Some(Subject {
            common_name,
            organization: if ca.names.organization.is_empty() {
                vec![config.server.cluster_id.to_string()]
            } else {
                ca.names.organization
            },
            country: ca.names.country,
            province: ca.names.province,
            locality: ca.names.locality,
            street: ca.names.street,
            postal_code: ca.names.postal_code,
            ..Subject::default()
        });
    }
    profile
}

/// Every name by which a client may dial this server.
fn sans(config: &Config, advertise_host: Option<&str>) -> Vec<San> {
    let server = &config.server;
    let (bind, advertise) = (&server.bind, &server.advertise);
    let own = wiring::primary_address().to_string();
    let network = server.leader_network.as_ref().map(|network| network.ip.to_string());
    let hosts = [&bind.health, &bind.election, &bind.registration, &bind.operator, &bind.agent]
        .into_iter()
        .chain([&advertise.health, &advertise.election, &advertise.registration, &advertise.operator, &advertise.agent])
        .filter(|address| !address.is_any())
        .map(|address| address.host.as_str());
    let mut sans: Vec<San> = hosts
        .chain(advertise.extra_sans.iter().map(String::as_str))
        .chain(advertise_host)
        .chain(network.as_deref())
        .chain([own.as_str()])
        .filter_map(|host| San::host(host).ok())
        .collect();
    sans.sort();
    sans.dedup();
    sans
}

async fn log_own(
    records: &Records,
    applied: &Applied,
    id: &ServerId,
    own: &nstance_identity::issue::Issued,
    now: nstance_core::time::Timestamp,
) -> Result<(), nstance_store::cas::RecordError> {
    let server = &applied.config.server;
    let record = CertlogRecord {
        cluster: server.cluster_id.clone(),
        shard: Some(server.shard.clone()),
        tenant: None,
        subject_id: id.to_string(),
        issued_at: now,
        certificates: vec![logged("server", own)],
    };
    records.within(Duration::from_secs(5)).write_certlog(Fence::Epoch(Epoch(0)), &record).await.map(|_| ())
}
