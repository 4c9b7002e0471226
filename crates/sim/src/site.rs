//! What outlives a server: the bucket, the cloud, the config; and the servers that come and go on it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::FutureExt as _;
use nstance_core::{
    ids::{ClusterId, GroupRef, LbKey, Shard, Tenant},
    ports::{
        clock::{Clock, Entropy},
        objects::{Condition, ObjectStore},
        provider::{Owner, VmRef},
        secrets::Secrets as _,
    },
    time::Timestamp,
};
use nstance_identity::{ca::NONCE_KEY_SECRET, keys::KeyPair};
use nstance_providers::{
    fake::{FakeOptions, FakeProvider},
    faulty::{Faults, FaultyProvider},
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy, process::Process, tasks::Tasks};
use nstance_server::{
    boot::{self, Doors, Parts},
    grpc::serve::Inside,
    term::{Planner, Term},
};
use nstance_store::{
    cache::Cache,
    faulty::{FaultPlan, FaultyStore},
    keys::EncryptionKey,
    memory::MemoryStore,
    records::{config_keys, groups_key, instance_prefix, lease_key},
    secrets::ObjectSecrets,
};
use serde_json::Value;

use crate::{
    clock::SimClock,
    hosts::{Hosts, Server, port_of},
    judge::{Judge, Scene},
    net::Door,
    peers::SimPeers,
    points::Points,
    witness::{SentProvider, SentStore, WitnessedStore},
};

/// A graceful stop may take so long.
const STOP: Duration = Duration::from_secs(10);

const KEY: [u8; 32] = *b"a key of thirty-two bytes for us";

/// The beginning of every story. A round number of a year that certificates can live with.
const BEGINNING: i64 = 1_800_000_000_000;

pub(crate) fn cluster() -> ClusterId {
    "sim".parse().expect("a cluster id")
}

pub(crate) fn shard() -> Shard {
    "s1".parse().expect("a shard")
}

pub(crate) fn lb() -> LbKey {
    "front".parse().expect("a load balancer key")
}

pub(crate) fn tenant(name: &str) -> Tenant {
    name.parse().expect("a tenant")
}

pub(crate) fn group(tenant_name: &str, key: &str) -> GroupRef {
    GroupRef::new(tenant(tenant_name), key.parse().expect("a group key"))
}

/// What is really there, whoever leads.
pub(crate) struct Ground {
    pub(crate) judge: Arc<Judge>,
    pub(crate) cloud: FakeProvider,
    pub(crate) clock: Arc<dyn Clock>,
    /// Groups that were asked to go.
    pub(crate) deleted: Mutex<BTreeSet<GroupRef>>,
}

impl Ground {
    /// The moment of an effect, `now` by the clock of whoever acts.
    pub(crate) fn scene(&self, vm: &VmRef, now: Timestamp) -> Scene {
        let found = match &vm.provider_id {
            Some(id) => self.cloud.vms().into_iter().find(|it| it.provider_id == *id),
            None => self.cloud.vm_of(vm.instance),
        };
        let group = found.as_ref().and_then(|it| it.tags.as_ref()).map(nstance_core::ports::provider::Tags::group_ref);
        let deleted = self.deleted.lock().unwrap_or_else(PoisonError::into_inner);
        let balanced = self.cloud.members(&lb()).contains_key(&vm.instance);
        Scene {
            now,
            seen: found.as_ref().and_then(|it| it.seen_at(self.clock.monotonic())),
            group_deleted: group.as_ref().is_some_and(|group| deleted.contains(group)),
            group,
            balanced,
        }
    }
}

pub(crate) struct Site {
    pub(crate) ground: Arc<Ground>,
    pub(crate) bucket: Arc<MemoryStore>,
    /// Chance of the network, and of everything else that is neither script nor server.
    pub(crate) net: Arc<dyn Entropy>,
    /// What was sent is on its way here, whoever sent it.
    pub(crate) network: Tasks,
    seed: u64,
    dir: PathBuf,
    caches: Mutex<BTreeMap<usize, Arc<Cache>>>,
    clocks: Mutex<BTreeMap<usize, Arc<SimClock>>>,
    pub(crate) hosts: Arc<Hosts>,
    /// Machines that do not reach the store.
    cut: Mutex<BTreeSet<usize>>,
    /// Whether the machines' clocks run at rates of their own.
    pub(crate) skew: bool,
    n_boots: AtomicU64,
    lost_answers: AtomicU64,
    store_plan: Mutex<FaultPlan>,
    provider_faults: Mutex<Faults>,
    planner: Planner,
    hears_checker: bool,
    /// Where a server may be stopped.
    pub(crate) points: Points,
}

/// A stream of chance of its own for each purpose, so that one more draw here changes nothing there.
pub(crate) fn chance(seed: u64, purpose: &str) -> Arc<dyn Entropy> {
    let mix = purpose
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    Arc::new(SeededEntropy::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ mix))
}

impl Site {
    pub(crate) fn new(
        seed: u64,
        options: FakeOptions,
        planner: Planner,
        hears_checker: bool,
        skew: bool,
    ) -> anyhow::Result<Arc<Self>> {
        let clock: Arc<dyn Clock> = Arc::new(TokioClock::starting_at(Timestamp::from_millis(BEGINNING)));
        let owner = Owner { cluster: cluster(), shard: shard() };
        let cloud = FakeProvider::new(owner, clock.clone(), chance(seed, "cloud"), options);
        let judge = Arc::new(Judge::new());
        let base = PathBuf::from("/dev/shm");
        let base = if base.is_dir() { base } else { std::env::temp_dir() };
        // Several runs of one seed may go on at a time.
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let run = RUNS.fetch_add(1, Ordering::Relaxed);
        let dir = base.join(format!("nstance-sim-{}-{run}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join("key"), KEY)?;
        Ok(Arc::new(Self {
            ground: Arc::new(Ground { judge, cloud, clock, deleted: Mutex::default() }),
            bucket: Arc::new(MemoryStore::new()),
            net: chance(seed, "net"),
            network: Tasks::new(),
            seed,
            dir,
            caches: Mutex::default(),
            clocks: Mutex::default(),
            hosts: Arc::default(),
            cut: Mutex::default(),
            skew,
            n_boots: AtomicU64::new(0),
            lost_answers: AtomicU64::new(0),
            store_plan: Mutex::default(),
            provider_faults: Mutex::default(),
            planner,
            hears_checker,
            points: Points::default(),
        }))
    }

    pub(crate) fn judge(&self) -> &Judge {
        &self.ground.judge
    }

    pub(crate) fn cloud(&self) -> &FakeProvider {
        &self.ground.cloud
    }

    pub(crate) fn key_path(&self) -> PathBuf {
        self.dir.join("key")
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.ground.clock.now()
    }

    pub(crate) fn server(&self, n: usize) -> Option<Arc<Server>> {
        self.hosts.server(n)
    }

    fn servers(&self) -> Vec<Arc<Server>> {
        self.hosts.servers()
    }

    /// The clock of the nth machine. It outlives the processes there, but each boot has its own rate.
    pub(crate) fn clock_of(&self, n: usize) -> Arc<SimClock> {
        let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = || Arc::new(SimClock::new(self.ground.clock.clone()));
        clocks.entry(n).or_insert_with(clock).clone()
    }

    pub(crate) fn true_time(&self) {
        for clock in self.clocks.lock().unwrap_or_else(PoisonError::into_inner).values() {
            clock.jump_to(0);
        }
    }

    /// A group was asked to go: what is left of it may be ended without further ado.
    pub(crate) fn group_goes(&self, group: GroupRef) {
        self.ground.deleted.lock().unwrap_or_else(PoisonError::into_inner).insert(group);
    }

    /// Puts a config into the bucket, whatever is there.
    pub(crate) async fn upload(&self, config: &Value) -> anyhow::Result<()> {
        let [key, _] = config_keys(&shard());
        let condition = match self.bucket.get(&key).await {
            Ok(object) => Condition::Match(object.etag),
            Err(_) => Condition::Create,
        };
        self.bucket.put(&key, config.to_string().into_bytes(), condition).await?;
        Ok(())
    }

    /// Starts the nth server, with what its machine remembers.
    pub(crate) fn start(&self, n: usize) -> anyhow::Result<()> {
        self.start_as(n, n)
    }

    /// Starts a server on the nth machine that says to be the `id`th.
    pub(crate) fn start_as(&self, n: usize, id: usize) -> anyhow::Result<()> {
        let boot = self.n_boots.fetch_add(1, Ordering::Relaxed);
        let name = format!("server {n} boot {boot}");
        self.judge().note(&name);
        let process = Process::new();
        let tasks = Tasks::of(&process);
        let clock = self.clock_of(n);
        if self.skew {
            clock.run_at(SimClock::draw_rate(chance(self.seed, &format!("{name} clock")).as_ref()));
        }
        let witnessed = WitnessedStore {
            bucket: self.bucket.clone(),
            judge: self.ground.judge.clone(),
            hosts: self.hosts.clone(),
            instances: instance_prefix(&shard()),
            lease: lease_key(Some(&shard())),
        };
        let plan = *self.store_plan.lock().unwrap_or_else(PoisonError::into_inner);
        let store = Arc::new(FaultyStore::new(Arc::new(witnessed), chance(self.seed, &format!("{name} store")), plan));
        store.set_unreachable(self.cut.lock().unwrap_or_else(PoisonError::into_inner).contains(&n));
        let faults = self.provider_faults.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let cloud = Arc::new(self.cloud().with_self(format!("machine-{n}")));
        let provider = Arc::new(FaultyProvider::new(cloud, chance(self.seed, &format!("{name} provider")), faults));
        let cache = {
            let mut caches = self.caches.lock().unwrap_or_else(PoisonError::into_inner);
            match caches.get(&n) {
                Some(cache) => cache.clone(),
                None => {
                    let cache = Arc::new(Cache::in_memory(&cluster(), &shard())?);
                    caches.insert(n, cache.clone());
                    cache
                }
            }
        };
        let running = boot::start(Parts {
            id: format!("srv-{id}").parse()?,
            shard: shard(),
            cachedir: self.dir.join(n.to_string()),
            advertise_host: None,
            store: Arc::new(SentStore {
                inner: store.clone(),
                judge: self.ground.judge.clone(),
                instances: instance_prefix(&shard()),
                groups: groups_key(&shard()),
                network: self.network.clone(),
                points: self.points.clone(),
                process: process.clone(),
            }),
            clock: clock.clone(),
            entropy: chance(self.seed, &name),
            provider: Some(Arc::new(SentProvider {
                inner: provider.clone(),
                ground: self.ground.clone(),
                hosts: self.hosts.clone(),
                n,
                clock: clock.clone(),
                network: self.network.clone(),
                points: self.points.clone(),
                process: process.clone(),
            })),
            doors: Doors::Inside { addr: SocketAddr::from((Ipv4Addr::LOCALHOST, port_of(n))) },
            cache: Some(cache),
            planner: self.planner.clone(),
            tasks: tasks.clone(),
            peers: Some(Arc::new(SimPeers {
                n,
                id: format!("srv-{id}"),
                hosts: self.hosts.clone(),
                chance: chance(self.seed, &format!("{name} peers")),
            })),
            lease_store: None,
            port_offset: 0,
        });
        let server = Server { n, process, running, store, provider, tasks, door: Mutex::default() };
        self.hosts.put(n, Arc::new(server));
        Ok(())
    }

    /// Kills a server where it stands.
    pub(crate) fn kill(&self, n: usize) {
        if let Some(server) = self.hosts.remove(n) {
            self.judge().note(format!("server {n} dies"));
            self.judge().count(|stats| stats.crashes += 1);
            self.retire(&server);
            server.process.kill();
        }
    }

    /// Asks a server to end, as a signal does, and waits until it has.
    pub(crate) async fn stop(&self, n: usize) {
        let Some(server) = self.server(n) else { return };
        self.judge().note(format!("server {n} is asked to stop"));
        self.judge().count(|stats| stats.hand_overs += u64::from(server.running.term().is_some()));
        server.tasks.end(STOP).await;
        if self.server(n).is_some_and(|it| Arc::ptr_eq(&it, &server)) {
            self.judge().note(format!("server {n} has stopped"));
            self.hosts.remove(n);
            self.retire(&server);
        }
        server.process.kill();
    }

    /// Counts what a server went through.
    fn retire(&self, server: &Server) {
        let (store, provider) = (server.store.n_faults(), server.provider.n_faults());
        self.judge().count(|stats| {
            stats.store_faults += store;
            stats.provider_faults += provider;
        });
        self.examine(server);
    }

    /// What a server says of itself: panics, and plans that its own checker refused.
    fn examine(&self, server: &Server) {
        let broken = server.running.metrics.plan_violations.get();
        if 0 < broken && self.hears_checker {
            self.judge().violate("plan", format!("the checker refused {broken} plans"));
        }
        if server.process.spins() {
            self.judge().violate("spin", "the server works without end and without waiting for anything");
        }
        if let Some(Some(failure)) = server.running.broken().now_or_never() {
            self.judge().violate("panic", failure);
        }
    }

    pub(crate) fn examine_all(&self) {
        for server in self.servers() {
            self.examine(&server);
        }
    }

    /// The machine loses its disk: the next server on it knows nothing.
    pub(crate) fn lose_cache(&self, n: usize) {
        self.caches.lock().unwrap_or_else(PoisonError::into_inner).remove(&n);
        // Nothing there is as good.
        let _ = std::fs::remove_dir_all(self.dir.join(n.to_string()));
    }

    /// Whoever leads, as clients find it: one that answers before one that stands still, a later term before an earlier.
    pub(crate) fn leader(&self) -> Option<(Arc<Server>, Arc<Term>)> {
        let leading = self.servers().into_iter().filter_map(|server| {
            let term = server.running.term()?;
            Some((server, term))
        });
        leading.max_by_key(|(server, term)| (!server.process.is_frozen(), term.epoch()))
    }

    pub(crate) fn door(&self) -> Option<Door> {
        let (server, term) = self.leader()?;
        let mut door = server.door.lock().unwrap_or_else(PoisonError::into_inner);
        let inside = match &*door {
            Some((of, inside)) if Arc::ptr_eq(of, &term) => inside.clone(),
            _ => {
                self.ground.judge.count(|stats| stats.terms += 1);
                let inside = Inside::of(&term);
                *door = Some((term.clone(), inside.clone()));
                inside
            }
        };
        let (process, leases) = (server.process.clone(), self.judge().leases());
        Some(Door { process, tasks: server.tasks.clone(), inside, epoch: term.epoch(), leases })
    }

    pub(crate) fn lost_answers(&self) -> u64 {
        self.lost_answers.load(Ordering::Relaxed)
    }

    /// How many answers of a thousand clients do not get.
    pub(crate) fn lose_answers(&self, permille: u64) {
        self.lost_answers.store(permille, Ordering::Relaxed);
    }

    pub(crate) fn set_store(&self, plan: FaultPlan) {
        *self.store_plan.lock().unwrap_or_else(PoisonError::into_inner) = plan;
        for server in self.servers() {
            server.store.set_plan(plan);
        }
    }

    pub(crate) fn set_provider(&self, faults: &Faults) {
        *self.provider_faults.lock().unwrap_or_else(PoisonError::into_inner) = faults.clone();
        for server in self.servers() {
            server.provider.set(faults.clone());
        }
    }

    /// Cuts a machine off from the store, whatever is started on it meanwhile, or joins it again.
    pub(crate) fn cut_store(&self, n: usize, cut: bool) {
        {
            let mut all = self.cut.lock().unwrap_or_else(PoisonError::into_inner);
            if cut {
                all.insert(n)
            } else {
                all.remove(&n)
            };
        }
        if let Some(server) = self.server(n) {
            server.store.set_unreachable(cut);
        }
    }

    /// The key that signs registration nonces, once there is one.
    pub(crate) async fn nonce_key(&self) -> Option<KeyPair> {
        let keys = vec![EncryptionKey::new(KEY)];
        let secrets = ObjectSecrets::new(self.bucket.clone(), None, keys, Vec::new(), self.net.clone()).ok()?;
        let secret = secrets.get(NONCE_KEY_SECRET).await.ok()?;
        KeyPair::from_pkcs8_pem(&secret.0).ok()
    }

    /// The end of the story: servers stop, and what they left on disk goes.
    pub(crate) async fn close(&self) {
        for server in self.hosts.take_all() {
            self.retire(&server);
            server.process.kill();
        }
        self.network.end(Duration::ZERO).await;
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
