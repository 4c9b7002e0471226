//! Names that Kubernetes objects carry: groups and versions, labels, annotations, finalizers, field managers.

/// Our kinds.
pub const GROUP: &str = "infrastructure.cluster.x-k8s.io";
pub const VERSION: &str = "v1beta1";
pub const API_VERSION: &str = "infrastructure.cluster.x-k8s.io/v1beta1";

/// Cluster API's kinds.
pub const CAPI_GROUP: &str = "cluster.x-k8s.io";
pub const CAPI_VERSION: &str = "v1beta2";
pub const CAPI_API_VERSION: &str = "cluster.x-k8s.io/v1beta2";

/// Constants, and a list of them all: baselines hold names that others build on.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident = $word:literal;)*) => {
        $($(#[$doc])* pub const $name: &str = $word;)*

        /// All of them.
        pub const ALL: &[&str] = &[$($name,)*];
    };
}
pub(super) use words;

pub mod label {
    super::words! {
        GROUP = "nstance.dev/group";
        SHARD = "nstance.dev/shard";
        /// On Nodes.
        INSTANCE_ID = "nstance.dev/instance-id";

        CLUSTER_NAME = "cluster.x-k8s.io/cluster-name";
        POOL_NAME = "cluster.x-k8s.io/pool-name";
        WATCH_FILTER = "cluster.x-k8s.io/watch-filter";
        CONTROL_PLANE = "cluster.x-k8s.io/control-plane";
        /// On pods: how Cluster API drains them.
        DRAIN = "cluster.x-k8s.io/drain";
        MOVE = "clusterctl.cluster.x-k8s.io/move";
        EXCLUDE_FROM_LOAD_BALANCERS = "node.kubernetes.io/exclude-from-external-load-balancers";
    }
}

pub mod annotation {
    super::words! {
        IMPORTED = "nstance.dev/imported";
        /// On an NstanceMachinePool: make a MachinePool for it.
        CREATE_MACHINE_POOL = "nstance.dev/create-machinepool";
        /// On an NstanceCluster: import does not wait for these shards.
        IGNORE_SHARDS = "nstance.dev/ignore-shards";
        /// On an NstanceShardGroup that is being deleted: its instances stay.
        ORPHAN = "nstance.dev/orphan";
        REQUEST_ID = "nstance.dev/request-id";
        /// On the key Secret: the cluster was moved away, nothing is made anew.
        MOVED = "nstance.dev/moved";
        /// On the key Secret: the number of the last rejoin, with `sent:` until it was answered.
        REJOIN_COUNTER = "nstance.dev/rejoin-counter";
        TOKEN_EXPIRY = "nstance.dev/token-expiry";
        DRAIN_FORCE_BEFORE = "nstance.dev/drain-force-before";

        ON_DEMAND_GROUP = "on-demand.nstance.dev/group";
        ON_DEMAND_INSTANCE_TYPE = "on-demand.nstance.dev/instance-type";
        ON_DEMAND_VARS = "on-demand.nstance.dev/vars";
        ON_DEMAND_SHARD = "on-demand.nstance.dev/shard";
        ON_DEMAND_SUBNET_POOL = "on-demand.nstance.dev/subnet-pool";
        /// On a Machine that was made for a pod: `namespace/name/uid`.
        ON_DEMAND_POD = "on-demand.nstance.dev/pod";

        DRAIN_STATE = "drain.nstance.dev/state";
        DRAIN_INSTANCE_ID = "drain.nstance.dev/instance-id";
        DRAIN_ID = "drain.nstance.dev/drain-id";
        DRAIN_REASON = "drain.nstance.dev/reason";
        DRAIN_DEADLINE = "drain.nstance.dev/deadline";
        DRAIN_STARTED_AT = "drain.nstance.dev/started-at";
        DRAIN_CORDONED_BY = "drain.nstance.dev/cordoned-by";
        /// On Nodes: `cluster/shard` of the instance. Only the operator of that cluster ever deletes the Node.
        NODE_OWNER = "nstance.dev/owner";

        PAUSED = "cluster.x-k8s.io/paused";
        DELETE_FOR_MOVE = "clusterctl.cluster.x-k8s.io/delete-for-move";
        MANAGED_BY = "cluster.x-k8s.io/managed-by";
        REPLICAS_MANAGED_BY = "cluster.x-k8s.io/replicas-managed-by";
        DELETE_MACHINE = "cluster.x-k8s.io/delete-machine";
        EXCLUDE_NODE_DRAINING = "machine.cluster.x-k8s.io/exclude-node-draining";
        EXCLUDE_WAIT_FOR_VOLUME_DETACH = "machine.cluster.x-k8s.io/exclude-wait-for-node-volume-detach";
        PRE_DRAIN_HOOK_PREFIX = "pre-drain.delete.hook.machine.cluster.x-k8s.io";
        PRE_TERMINATE_HOOK_PREFIX = "pre-terminate.delete.hook.machine.cluster.x-k8s.io";
        /// Ours, on every pool Machine: Cluster API does not drain before we have.
        PRE_DRAIN_HOOK = "pre-drain.delete.hook.machine.cluster.x-k8s.io/nstance";

        AUTOSCALER_MIN_SIZE = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size";
        AUTOSCALER_MAX_SIZE = "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size";
        AUTOSCALER_MAX_PODS = "capacity.cluster-autoscaler.kubernetes.io/maxPods";
        AUTOSCALER_LABELS = "capacity.cluster-autoscaler.kubernetes.io/labels";
        AUTOSCALER_TAINTS = "capacity.cluster-autoscaler.kubernetes.io/taints";
        AUTOSCALER_MAX_NODE_PROVISION_TIME = "cluster.x-k8s.io/autoscaling-options-maxnodeprovisiontime";
    }
}

pub mod finalizer {
    super::words! {
        POOL = "nstancemachinepool.infrastructure.cluster.x-k8s.io/finalizer";
        SHARD_GROUP = "nstanceshardgroup.infrastructure.cluster.x-k8s.io/finalizer";
        MACHINE = "nstancemachine.infrastructure.cluster.x-k8s.io/finalizer";
        /// Cluster API's, on Machines.
        CAPI_MACHINE = "machine.cluster.x-k8s.io";
    }
}

/// Field managers of what we write.
pub mod manager {
    super::words! {
        SPEC = "nstance-operator";
        STATUS = "nstance-operator-status";
        IMPORT = "nstance-import";
        /// Of `status.drain` and of the conditions about drains.
        DRAIN = "nstance-operator-drain";
    }
}

/// The validating webhook, as `config/default` installs it.
pub mod webhook {
    pub const CONFIGURATION: &str = "nstance-operator";
    pub const SERVICE: &str = "nstance-operator-webhook";
    /// Where the API server posts its questions.
    pub const PATH: &str = "/validate-nstancemachinepool";
}
