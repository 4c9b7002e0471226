//! What a caller chooses.

use std::{path::PathBuf, sync::Arc, time::Duration};

use nstance_core::ports::clock::Clock;

/// Which of the clients run, and how.
pub struct Options {
    /// The Cluster API stand-in.
    pub capi: bool,
    pub keeper: Option<KeeperOptions>,
    /// Garbage collection, where no controller manager does it.
    pub gc: bool,
    /// Restricts the Cluster API stand-in to one namespace; `None`: all.
    pub namespace: Option<String>,
    /// How `kubernetes.default.svc` is reached: address and CA of the API server that the client talks to. Without it
    /// the client itself is used, and the token in the kubeconfig Secret is not tried.
    pub own_api: Option<kube::Config>,
    pub timing: Timing,
    pub clock: Arc<dyn Clock>,
}

impl Options {
    /// Everything off; switch on what is wanted.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { capi: false, keeper: None, gc: false, namespace: None, own_api: None, timing: Timing::default(), clock }
    }
}

/// Who does what a control plane does besides serving the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlPlane {
    /// Nobody: the keeper also schedules pods, marks lost nodes, writes the status of PodDisruptionBudgets and removes
    /// pods of deleted nodes.
    Absent,
    /// A controller manager and a scheduler run.
    Present,
}

#[derive(Debug, Clone)]
pub struct KeeperOptions {
    /// Node files that providers write; `None`: every Node of the API server is kept.
    pub nodes_dir: Option<PathBuf>,
    /// Directories of the instances, which tell whether an agent lives; `None`: all live.
    pub instances_dir: Option<PathBuf>,
    pub plane: ControlPlane,
    /// On dev-k8s a node file is the object itself. Elsewhere the keeper creates each Node once.
    pub api_is_file_backed: bool,
}

/// How long things take. The defaults are those of the programs that are stood in for.
#[derive(Debug, Clone)]
pub struct Timing {
    /// Decisions are taken anew at least this often, whether or not something changed.
    pub resync: Duration,
    /// How often a missing or refused kubeconfig Secret is looked at again.
    pub kubeconfig_retry: Duration,
    /// How often a connected workload cluster is asked whether it still answers.
    pub connection_probe: Duration,
    /// How often a drain of the Cluster API stand-in is tried again.
    pub drain_retry: Duration,
    /// How often Leases and Node status are renewed.
    pub heartbeat: Duration,
    /// A node whose Lease is older than this counts as lost.
    pub node_grace: Duration,
    /// A terminating pod on a live node ends after at most this time.
    pub pod_end: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            resync: Duration::from_secs(2),
            kubeconfig_retry: Duration::from_secs(30),
            connection_probe: Duration::from_secs(3),
            drain_retry: Duration::from_secs(20),
            heartbeat: Duration::from_secs(10),
            node_grace: Duration::from_secs(40),
            pod_end: Duration::from_secs(1),
        }
    }
}
