//! What every control loop is given.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::core::PartialObjectMeta;
use nstance_core::ports::clock::Clock;

use super::{apply::Applied, queue::Queue};
use crate::{
    api::{
        NstanceCluster, NstanceMachine, NstanceMachinePool, NstanceMachineTemplate, NstanceShardGroup,
        capi::{Cluster, Machine, MachineDrainRule, MachinePool},
        conditions::Report,
    },
    cluster::{
        events::EventSink,
        store::{ObjectKey, Store},
        workload::Workload,
    },
    ports::{KubePort, ShardPort},
};

/// How long a changed object waits for more changes before it is looked at.
const DEBOUNCE: Duration = Duration::from_millis(20);

/// Fixed from the start of the process.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Our objects, Cluster API's, Secrets and ConfigMaps are in this namespace.
    pub namespace: String,
    pub cluster_id: String,
    pub tenant: String,
    /// Only objects whose label `cluster.x-k8s.io/watch-filter` has this value are acted on.
    pub watch_filter: Option<String>,
    /// Written into the kubeconfig Secret that the operator keeps.
    pub capi_server: String,
    /// Set: the workload cluster is another one, and its kubeconfig Secret is somebody else's.
    pub capi_endpoint: Option<String>,
    pub capi_service_account: String,
    /// The Secret with the operator's private key. It also says whether the cluster was moved away.
    pub key_secret: String,
    /// Where Nodes join, if that is known: host and port of the API server.
    pub api_endpoint: Option<(String, i32)>,
    pub drain_concurrency: usize,
    pub concurrent_reconciles: usize,
}

impl Settings {
    /// The name of the Cluster and the NstanceCluster.
    pub fn cluster_name(&self) -> String {
        format!("{}--{}", self.cluster_id, self.tenant)
    }

    pub fn kubeconfig_secret(&self) -> String {
        format!("{}-kubeconfig", self.cluster_name())
    }
}

/// What the watches keep, all of our namespace.
#[derive(Default)]
pub struct Stores {
    pub clusters: Arc<Store<Cluster>>,
    pub nstance_clusters: Arc<Store<NstanceCluster>>,
    pub machine_pools: Arc<Store<MachinePool>>,
    pub pools: Arc<Store<NstanceMachinePool>>,
    pub shard_groups: Arc<Store<NstanceShardGroup>>,
    pub machines: Arc<Store<Machine>>,
    pub nstance_machines: Arc<Store<NstanceMachine>>,
    pub templates: Arc<Store<NstanceMachineTemplate>>,
    pub drain_rules: Arc<Store<MachineDrainRule>>,
    /// Pods of all namespaces of the workload cluster that have no Node, metadata only. One that goes from here was scheduled
    /// or deleted.
    pub pods: Arc<Store<PartialObjectMeta<Pod>>>,
}

/// The queues of the controllers. Watches, shards and controllers put keys in.
pub struct Queues {
    pub clusters: Arc<Queue<ObjectKey>>,
    /// One key only: import looks at all groups of all shards.
    pub import: Arc<Queue<()>>,
    pub pools: Arc<Queue<ObjectKey>>,
    pub shard_groups: Arc<Queue<ObjectKey>>,
    pub machines: Arc<Queue<ObjectKey>>,
    pub templates: Arc<Queue<ObjectKey>>,
    /// By instance id.
    pub drains: Arc<Queue<String>>,
    pub nodes: Arc<Queue<ObjectKey>>,
    /// Pods that ask for an instance.
    pub pods: Arc<Queue<ObjectKey>>,
}

impl Default for Queues {
    fn default() -> Self {
        Self {
            clusters: Queue::new("cluster", DEBOUNCE),
            import: Queue::new("import", DEBOUNCE),
            pools: Queue::new("pool", DEBOUNCE),
            shard_groups: Queue::new("shard-group", DEBOUNCE),
            machines: Queue::new("machine", DEBOUNCE),
            templates: Queue::new("template", DEBOUNCE),
            drains: Queue::new("drain", DEBOUNCE),
            nodes: Queue::new("node", DEBOUNCE),
            pods: Queue::new("pod", DEBOUNCE),
        }
    }
}

/// Whether an API that our objects need is being taken away.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Terminating {
    /// The namespace, or a CRD of ours or of Cluster API, is being deleted: its name.
    pub what: Option<String>,
}

pub struct Context {
    pub settings: Settings,
    pub stores: Stores,
    pub queues: Queues,
    /// The cluster that has our objects.
    pub kube: Arc<dyn KubePort>,
    pub workload: Arc<Workload>,
    pub shards: Arc<dyn ShardPort>,
    pub events: Arc<dyn EventSink>,
    pub clock: Arc<dyn Clock>,
    pub terminating: tokio::sync::watch::Sender<Terminating>,
    pub applied: Applied,
    /// Whether the kubeconfig Secret works. Who changes it also wakes the cluster's queue.
    pub kubeconfig: tokio::sync::watch::Sender<Report>,
    /// Whether the operator's certificate is valid.
    pub certificate: tokio::sync::watch::Sender<Report>,
}

impl Context {
    /// What is known of our Cluster.
    pub fn cluster(&self) -> Option<Arc<Cluster>> {
        self.stores.clusters.named(&self.settings.namespace, &self.settings.cluster_name())
    }

    /// Whether and how the operator may act on an object of ours.
    pub fn scope<K: kube::Resource>(&self, object: &K) -> crate::decide::scope::Scope {
        use crate::decide::scope::{ClusterView, scope};
        let cluster = self.cluster();
        let view = match &cluster {
            Some(cluster) => ClusterView::Present(cluster),
            None if self.stores.clusters.is_synced() => ClusterView::Absent,
            None => ClusterView::Unknown,
        };
        let terminating = self.terminating.borrow().what.clone();
        scope(object, view, self.settings.watch_filter.as_deref(), terminating.as_deref())
    }

    /// Changes what the NstanceCluster shows of something, and wakes the controller that writes it.
    pub fn report(&self, of: &tokio::sync::watch::Sender<Report>, report: Report) {
        let is_new = of.send_if_modified(|it| std::mem::replace(it, report.clone()) != report);
        if is_new {
            self.queues.clusters.add(ObjectKey::new(&self.settings.namespace, &self.settings.cluster_name()));
        }
    }

    pub fn now(&self) -> k8s_openapi::jiff::Timestamp {
        let now = self.clock.now();
        k8s_openapi::jiff::Timestamp::from_millisecond(now.as_millis()).unwrap_or_default()
    }
}
