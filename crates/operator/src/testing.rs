//! Fakes of both worlds, for tests of control loops: a Kubernetes API and shards in memory, with rules of their own.
//!
//! ```no_run
//! # use nstance_operator::testing::World;
//! # async fn example() {
//! let world = World::new(&["a", "b"]);
//! world.shards.edit("a", |picture| picture.leader = "a-1".to_owned());
//! // … seed objects by `world.kube.put`, call a reconcile with `world.context`, look at `world.kube` and `world.shards`.
//! world.feed();
//! # }
//! ```

mod fields;

mod objects;

mod selector;

pub mod kube;

pub mod shards;

use std::sync::{Arc, Mutex, PoisonError};

use nstance_core::time::Timestamp;
use nstance_rt::clock::TokioClock;

pub use self::{
    kube::{EvictionAnswer, FakeKube, KubeCall},
    shards::FakeShards,
};
use crate::{
    api::{capi::Cluster, conditions::Report},
    cluster::{
        events::{About, EventSink, Severity},
        workload::{Access, Workload},
    },
    control::{
        apply::Applied,
        context::{Context, Queues, Settings, Stores, Terminating},
    },
    ports::kinds,
};

/// When the clock of a test starts: 2026-01-01T00:00:00Z.
pub const START: Timestamp = Timestamp::from_millis(1_767_225_600_000);

pub const NAMESPACE: &str = "default";

/// The name of the Cluster in tests.
pub const CLUSTER: &str = "test--default";

/// An event as a test sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitted {
    pub about: About,
    pub severity: Severity,
    pub reason: String,
    pub message: String,
}

/// Keeps all events.
#[derive(Default)]
pub struct FakeEvents {
    emitted: Mutex<Vec<Emitted>>,
}

impl FakeEvents {
    pub fn all(&self) -> Vec<Emitted> {
        self.emitted.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The messages of all events with this reason.
    pub fn messages(&self, reason: &str) -> Vec<String> {
        self.all().into_iter().filter(|it| it.reason == reason).map(|it| it.message).collect()
    }
}

impl EventSink for FakeEvents {
    fn emit(&self, about: &About, severity: Severity, reason: &str, message: &str) {
        let emitted =
            Emitted { about: about.clone(), severity, reason: reason.to_owned(), message: message.to_owned() };
        self.emitted.lock().unwrap_or_else(PoisonError::into_inner).push(emitted);
    }
}

pub fn settings() -> Settings {
    Settings {
        namespace: NAMESPACE.to_owned(),
        cluster_id: "test".to_owned(),
        tenant: "default".to_owned(),
        watch_filter: None,
        capi_server: "https://kubernetes.default.svc:443".to_owned(),
        capi_endpoint: None,
        capi_service_account: "nstance-capi-workload".to_owned(),
        key_secret: "nstance-operator-key".to_owned(),
        api_endpoint: Some(("127.0.0.1".to_owned(), 6443)),
        drain_concurrency: 32,
        concurrent_reconciles: 8,
    }
}

/// A context whose workload cluster is the one that has our objects. Must be called inside a runtime; the clock is tokio's
/// and starts at [`START`].
pub fn context(kube: &Arc<FakeKube>, shards: &Arc<FakeShards>, events: &Arc<FakeEvents>) -> Arc<Context> {
    Arc::new(Context {
        settings: settings(),
        stores: Stores::default(),
        queues: Queues::default(),
        kube: kube.clone(),
        workload: Workload::new(Access::Granted(kube.clone())),
        shards: shards.clone(),
        events: events.clone(),
        clock: Arc::new(TokioClock::starting_at(START)),
        terminating: tokio::sync::watch::Sender::new(Terminating::default()),
        applied: Applied::default(),
        kubeconfig: tokio::sync::watch::Sender::new(Report::unknown()),
        certificate: tokio::sync::watch::Sender::new(Report::unknown()),
    })
}

/// Both worlds and a context between them.
pub struct World {
    pub kube: Arc<FakeKube>,
    pub shards: Arc<FakeShards>,
    pub events: Arc<FakeEvents>,
    pub context: Arc<Context>,
}

impl World {
    /// Shards of these names, all ready and with an empty picture; a Cluster, whose infrastructure is provisioned; nothing
    /// else. All stores are synced. Must be called inside a runtime.
    pub fn new(shards: &[&str]) -> Self {
        let clock = Arc::new(TokioClock::starting_at(START));
        let (kube, shards) = (Arc::new(FakeKube::new(clock)), Arc::new(FakeShards::new(shards)));
        let events = Arc::new(FakeEvents::default());
        let context = context(&kube, &shards, &events);
        let mut cluster = Cluster::new(CLUSTER, crate::api::capi::ClusterSpec::default());
        cluster.metadata.namespace = Some(NAMESPACE.to_owned());
        cluster.status = Some(crate::api::capi::ClusterStatus {
            initialization: Some(crate::api::capi::ClusterInitialization {
                infrastructure_provisioned: Some(true),
                control_plane_initialized: Some(true),
            }),
            ..crate::api::capi::ClusterStatus::default()
        });
        kube.put(kinds::CLUSTER, &cluster);
        kube.feed(&context);
        Self { kube, shards, events, context }
    }

    /// Brings the stores up to date, as watches do.
    pub fn feed(&self) {
        self.kube.feed(&self.context);
    }
}
