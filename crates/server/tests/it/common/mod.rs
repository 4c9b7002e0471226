//! A whole server in this process, and clients that speak to it over real sockets.
//!
//! A [`Site`] is what outlives a server: a bucket, a cloud and a directory. A [`Shard`] is a server that leads on it.
//! Every test owns its site, every port is chosen by the machine, and nothing waits for a time to pass that could be
//! looked at instead.

#![allow(dead_code, unreachable_pub, reason = "every test file is a crate of its own and uses its own part of this")]

pub mod fleet;
pub mod machine;
pub mod meddler;
pub mod operator;
pub mod wire;
pub mod witness;

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ids::{InstanceId, Shard as ShardId, Tenant},
    instance::{Instance, Phase},
    ports::{
        clock::{Clock, Entropy, random},
        objects::{Condition, ObjectStore},
        provider::{Owner, VmSpec},
        secrets::{Secret, Secrets},
    },
    time::{Mono, Timestamp},
};
use nstance_identity::{
    ca::{Bundle, CA_KEY_SECRET, Ca, NONCE_KEY_SECRET},
    keys::KeyPair,
    nonce::AgentNonce,
};
use nstance_providers::fake::{Call, FakeOptions, FakeProvider, Op};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy, tasks::Tasks};
use nstance_server::{
    boot::{self, Doors, Leader, Parts, Running},
    grpc::status::reason_of,
};
use nstance_store::{
    keys::EncryptionKey,
    memory::MemoryStore,
    records::{self, ca_crt_key, certlog::CertlogRecord, config_keys, instance_prefix},
    secrets::ObjectSecrets,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tonic::{Code, Status};

/// Longer than anything here takes on a busy machine; only a failing test waits for it.
pub const LIMIT: Duration = Duration::from_secs(30);

const KEY: [u8; 32] = *b"thisisatest32bytekey123456789012";

pub const ANY_PORT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

pub fn shard_id() -> ShardId {
    "s1".parse().expect("a shard")
}

pub fn tenant() -> Tenant {
    Tenant::default_tenant()
}

/// Looks until `holds`, or fails the test with what was waited for.
pub async fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    wait_until(what, async || holds()).await;
}

/// The same for a look that takes its time.
pub async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(LIMIT, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(waited.await.is_ok(), "in vain: {what}");
}

/// Checks that a call was refused with this code and this typed reason.
#[track_caller]
pub fn assert_refused<T>(answer: Result<T, Status>, code: Code, reason: &str) {
    match answer {
        Ok(_) => panic!("accepted instead of {reason}"),
        Err(status) => {
            let found = (status.code(), reason_of(&status));
            assert_eq!(found, (code, Some(reason.to_owned())), "{}", status.message());
        }
    }
}

/// What outlives a server.
pub struct Site {
    pub bucket: Arc<dyn ObjectStore>,
    pub cloud: FakeProvider,
    pub entropy: Arc<dyn Entropy>,
    pub clock: Arc<Jumpy>,
    dir: TempDir,
}

/// The machine's clock, whose wall time can be set wrong, and which can be ahead of it.
#[derive(Default)]
pub struct Jumpy(AtomicI64, AtomicU64);

/// The farthest that any test of this process leapt, in milliseconds.
static FARTHEST: AtomicU64 = AtomicU64::new(0);

/// The clock by which clients judge certificates. It is ahead of all servers, for what is valid is so for hours, and
/// what a server issued after a leap must not be from the future.
pub struct Ahead;

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        SystemClock.now().plus(Duration::from_millis(FARTHEST.load(Ordering::SeqCst)))
    }

    fn monotonic(&self) -> Mono {
        SystemClock.monotonic()
    }
}

impl Jumpy {
    fn leapt(&self) -> Duration {
        Duration::from_millis(self.1.load(Ordering::SeqCst))
    }

    /// Moves the wall clock by so many seconds.
    pub fn jump(&self, seconds: i64) {
        self.0.fetch_add(seconds * 1000, Ordering::SeqCst);
    }

    /// Lets time pass that nobody waits for. Sleepers do not notice; who is woken for another reason finds it past, and
    /// a leader's next renewal, whose lease ran out meanwhile, wakes everybody.
    pub fn leap(&self, by: Duration) {
        let millis = u64::try_from(by.as_millis()).expect("not for ever");
        let leapt = self.1.fetch_add(millis, Ordering::SeqCst) + millis;
        FARTHEST.fetch_max(leapt, Ordering::SeqCst);
    }
}

impl Clock for Jumpy {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(SystemClock.now().as_millis() + self.0.load(Ordering::SeqCst)).plus(self.leapt())
    }

    fn monotonic(&self) -> Mono {
        SystemClock.monotonic() + self.leapt()
    }
}

impl Site {
    pub fn new() -> Self {
        Self::with(FakeOptions::default())
    }

    pub fn with(options: FakeOptions) -> Self {
        Self::on(Arc::new(MemoryStore::new()), options)
    }

    pub fn on(bucket: Arc<dyn ObjectStore>, options: FakeOptions) -> Self {
        let (clock, entropy): (Arc<Jumpy>, Arc<dyn Entropy>) = (Arc::default(), Arc::new(SystemEntropy::new()));
        let owner = Owner { cluster: "demo".parse().expect("a cluster"), shard: shard_id() };
        let cloud = FakeProvider::new(owner, clock.clone(), entropy.clone(), options);
        let site = Self { bucket, cloud, entropy, clock, dir: TempDir::new().expect("a directory") };
        site.give_key();
        site
    }

    pub fn key_path(&self) -> PathBuf {
        self.dir.path().join("key")
    }

    pub fn give_key(&self) {
        std::fs::write(self.key_path(), KEY).expect("write the encryption key");
    }

    pub fn take_key(&self) {
        std::fs::remove_file(self.key_path()).expect("remove the encryption key");
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// A config with one group `web` of `size`.
    pub fn config(&self, size: u32) -> Value {
        let ports = json!({
            "health_addr": "127.0.0.1:0", "election_addr": "127.0.0.1:0", "registration_addr": "127.0.0.1:0",
            "operator_addr": "127.0.0.1:0", "agent_addr": "127.0.0.1:0"
        });
        json!({
            "server": {
                "cluster_id": "demo", "shard": "s1",
                "provider": { "kind": "fake", "region": "r1", "zone": "z1" },
                "bind": ports, "advertise": ports,
                "subnet_pools": { "main": ["subnet-1"] },
                "secrets": {
                    "provider": "object-storage",
                    "encryption_key": { "provider": "file", "source": self.key_path() }
                },
                "default_drain_timeout": "0s", "health_check_interval": "60s",
                "garbage_collection": { "interval": "30s", "registration_timeout": "60s" },
                "leader_election": { "ttl": "6s", "renew_interval": "1s", "margin": "1s" }
            },
            "templates": { "knc": { "kind": "knc", "arch": "amd64", "subnet_pool": "main" } },
            "groups": { "default": { "web": { "template": "knc", "size": size } } }
        })
    }

    pub async fn upload(&self, config: &Value) {
        self.upload_text(&config.to_string()).await;
    }

    pub async fn upload_text(&self, text: &str) {
        let [key, _] = config_keys(&shard_id());
        overwrite(self.bucket.as_ref(), &key, text.as_bytes().to_vec()).await;
    }

    /// The components of a server with its own cache directory.
    pub fn parts(&self, id: &str) -> Parts {
        Parts {
            id: id.parse().expect("a server id"),
            shard: shard_id(),
            cachedir: self.dir.path().join(id),
            advertise_host: None,
            store: self.bucket.clone(),
            clock: self.clock.clone(),
            entropy: self.entropy.clone(),
            provider: Some(Arc::new(self.cloud.clone())),
            doors: Doors::Sockets { first_health: ANY_PORT },
            cache: None,
            planner: Arc::new(nstance_core::plan::plan),
            tasks: Tasks::new(),
            peers: None,
            lease_store: None,
            port_offset: 0,
        }
    }

    pub fn boot(&self, id: &str) -> Running {
        boot::start(self.parts(id))
    }

    /// Starts a server and waits until it leads.
    pub async fn lead(self: &Arc<Self>, id: &str) -> Shard {
        Shard::of(self.clone(), self.boot(id)).await
    }

    pub fn secrets(&self) -> ObjectSecrets {
        let keys = vec![EncryptionKey::new(KEY)];
        ObjectSecrets::new(self.bucket.clone(), None, keys, Vec::new(), self.entropy.clone()).expect("secrets")
    }

    pub async fn secret_key(&self, name: &str) -> KeyPair {
        let secret = self.secrets().get(name).await.expect("the secret");
        KeyPair::all_from_pkcs8_pem(&secret.0).expect("a key").remove(0)
    }

    pub async fn put_secret_key(&self, name: &str, key: &KeyPair) {
        let secret = Secret(key.to_pkcs8_pem().as_bytes().to_vec());
        self.secrets().create(name, &secret).await.expect("store the secret");
    }

    /// Stores a secret of the users', over an older one.
    pub async fn put_secret(&self, name: &str, text: &str) {
        self.secrets().put(name, &Secret(text.as_bytes().to_vec())).await.expect("store the secret");
    }

    /// Signs nonces, as the server does.
    pub async fn nonce_key(&self) -> KeyPair {
        self.secret_key(NONCE_KEY_SECRET).await
    }

    pub async fn bundle(&self) -> Bundle {
        let object = self.bucket.get(&ca_crt_key()).await.expect("ca.crt");
        Bundle::parse(&object.body).expect("a bundle")
    }

    /// The CA itself, to issue what the server would not.
    pub async fn ca(&self) -> Ca {
        let object = self.bucket.get(&ca_crt_key()).await.expect("ca.crt");
        Ca::load(&object.body, [self.secret_key(CA_KEY_SECRET).await]).expect("the CA")
    }

    /// Every instance record in the bucket.
    pub async fn records(&self) -> Vec<Instance> {
        let mut found = Vec::new();
        for listed in self.bucket.list(&instance_prefix(&shard_id())).await.expect("list records") {
            if let Ok(object) = self.bucket.get(&listed.key).await {
                found.push(records::decode_object::<Instance>(&listed.key, object).expect("a record").value);
            }
        }
        found
    }

    pub async fn record(&self, id: InstanceId) -> Option<Instance> {
        self.records().await.into_iter().find(|it| it.id == id)
    }

    pub async fn phase(&self, id: InstanceId) -> Option<Phase> {
        self.record(id).await.map(|it| it.phase())
    }

    /// Ids of records that say there is a VM, or will be one.
    pub async fn living(&self) -> Vec<InstanceId> {
        let mut living: Vec<_> = self
            .records()
            .await
            .into_iter()
            .filter(|it| !matches!(it.phase(), Phase::Failed | Phase::Deleted))
            .map(|it| it.id)
            .collect();
        living.sort();
        living
    }

    pub async fn certlog(&self) -> Vec<CertlogRecord> {
        let mut found = Vec::new();
        for listed in self.bucket.list("shard/s1/certlog/").await.expect("list the certlog") {
            let object = self.bucket.get(&listed.key).await.expect("read the certlog");
            found.push(records::decode_object::<CertlogRecord>(&listed.key, object).expect("an entry").value);
        }
        found
    }

    /// VMs that are not gone, in order.
    pub fn standing(&self) -> Vec<InstanceId> {
        let mut standing = self.cloud.standing();
        standing.sort();
        standing
    }

    /// The request that made a VM.
    pub fn spec(&self, id: InstanceId) -> VmSpec {
        let vm = self.cloud.vms().into_iter().find(|vm| vm.instance == Some(id)).expect("a VM");
        vm.spec.expect("made through us")
    }

    pub fn calls(&self, op: Op) -> Vec<Call> {
        self.cloud.calls().into_iter().filter(|call| call.op == op).collect()
    }

    /// Nothing is made twice and nothing is leaked: every VM has one record, every living record its VM.
    pub async fn assert_nothing_leaks(&self) {
        wait_until("VMs and records agree", async || self.standing() == self.living().await).await;
    }
}

/// Puts whatever is there.
pub async fn overwrite(store: &dyn ObjectStore, key: &str, body: Vec<u8>) {
    loop {
        let condition = match store.get(key).await {
            Ok(object) => Condition::Match(object.etag),
            Err(_) => Condition::Create,
        };
        match store.put(key, body.clone(), condition).await {
            Ok(_) => return,
            Err(error) => assert!(error.is_precondition(), "{error}"),
        }
    }
}

/// A server that leads.
pub struct Shard {
    pub site: Arc<Site>,
    pub server: Running,
    pub leader: Leader,
}

impl Shard {
    /// The usual: one server, one group `web` of `size`.
    pub async fn start(size: u32) -> Self {
        Self::start_with(size, |_| {}).await
    }

    pub async fn start_with(size: u32, change: impl FnOnce(&mut Value)) -> Self {
        Self::start_on(Site::new(), size, change).await
    }

    pub async fn start_on(site: Site, size: u32, change: impl FnOnce(&mut Value)) -> Self {
        let mut config = site.config(size);
        change(&mut config);
        site.upload(&config).await;
        Arc::new(site).lead("srv-1").await
    }

    pub async fn of(site: Arc<Site>, mut server: Running) -> Self {
        let led = tokio::time::timeout(LIMIT, server.leading()).await;
        let leader = match led {
            Ok(leader) => leader.expect("the server runs"),
            Err(_) => panic!("does not lead: {:?}", server.vitals.ready()),
        };
        Self { site, server, leader }
    }

    /// Stops the server and starts another on the same bucket, with an empty cache.
    pub async fn restart(self, id: &str) -> Self {
        let Self { site, server, .. } = self;
        server.stop(Duration::from_secs(5)).await;
        site.lead(id).await
    }

    /// The VM of a group of one.
    pub async fn only_vm(&self) -> InstanceId {
        self.vms(1).await[0]
    }

    /// Waits for so many VMs whose creation is recorded.
    pub async fn vms(&self, n: usize) -> Vec<InstanceId> {
        wait_until("VMs stand and are confirmed", async || {
            let confirmed = |it: &Instance| it.provider.confirmed_at.is_some();
            self.site.standing().len() == n && self.site.records().await.iter().filter(|it| confirmed(it)).count() >= n
        })
        .await;
        self.site.standing()
    }

    /// What the nonce of a VM says, to sign a variation of it.
    pub async fn claims(&self, id: InstanceId) -> AgentNonce {
        let it = self.site.record(id).await.expect("a record");
        AgentNonce {
            instance: id,
            jti: it.nonce.jti,
            issued_at: it.created_at,
            expires_at: it.nonce.expires_at,
            cluster: it.cluster,
            tenant: it.group.tenant,
            shard: it.shard,
            group: it.group.group,
            on_demand: false,
            config_hash: it.runtime_hash,
        }
    }
}
