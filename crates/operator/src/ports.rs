//! The two worlds that decisions act on: the Kubernetes API and the shards. Each is one small trait, so that the control
//! loops also run with fakes, on a clock that jumps.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use nstance_client::ShardError;
use serde_json::Value;

use crate::decide::observed::{Instance, ShardView};

/// A kind of Kubernetes objects, as requests name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceKind {
    /// Empty for the core group.
    pub group: &'static str,
    pub version: &'static str,
    pub kind: &'static str,
    pub plural: &'static str,
    pub namespaced: bool,
}

impl ResourceKind {
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }
}

/// All kinds that the operator uses.
pub mod kinds {
    use super::ResourceKind;

    macro_rules! kinds {
        ($($name:ident = $group:literal $version:literal $kind:literal $plural:literal $namespaced:literal;)*) => {
            $(pub const $name: ResourceKind = ResourceKind {
                group: $group, version: $version, kind: $kind, plural: $plural, namespaced: $namespaced,
            };)*
        };
    }

    kinds! {
        NSTANCE_CLUSTER = "infrastructure.cluster.x-k8s.io" "v1beta1" "NstanceCluster" "nstanceclusters" true;
        NSTANCE_MACHINE_POOL = "infrastructure.cluster.x-k8s.io" "v1beta1" "NstanceMachinePool" "nstancemachinepools" true;
        NSTANCE_SHARD_GROUP = "infrastructure.cluster.x-k8s.io" "v1beta1" "NstanceShardGroup" "nstanceshardgroups" true;
        NSTANCE_MACHINE = "infrastructure.cluster.x-k8s.io" "v1beta1" "NstanceMachine" "nstancemachines" true;
        NSTANCE_MACHINE_TEMPLATE = "infrastructure.cluster.x-k8s.io" "v1beta1" "NstanceMachineTemplate" "nstancemachinetemplates" true;
        CLUSTER = "cluster.x-k8s.io" "v1beta2" "Cluster" "clusters" true;
        MACHINE_POOL = "cluster.x-k8s.io" "v1beta2" "MachinePool" "machinepools" true;
        MACHINE = "cluster.x-k8s.io" "v1beta2" "Machine" "machines" true;
        MACHINE_DRAIN_RULE = "cluster.x-k8s.io" "v1beta2" "MachineDrainRule" "machinedrainrules" true;
        NODE = "" "v1" "Node" "nodes" false;
        POD = "" "v1" "Pod" "pods" true;
        NAMESPACE = "" "v1" "Namespace" "namespaces" false;
        SECRET = "" "v1" "Secret" "secrets" true;
        CONFIG_MAP = "" "v1" "ConfigMap" "configmaps" true;
        SERVICE_ACCOUNT = "" "v1" "ServiceAccount" "serviceaccounts" true;
        EVENT = "" "v1" "Event" "events" true;
        DAEMON_SET = "apps" "v1" "DaemonSet" "daemonsets" true;
        POD_DISRUPTION_BUDGET = "policy" "v1" "PodDisruptionBudget" "poddisruptionbudgets" true;
        PERSISTENT_VOLUME = "" "v1" "PersistentVolume" "persistentvolumes" false;
        VOLUME_ATTACHMENT = "storage.k8s.io" "v1" "VolumeAttachment" "volumeattachments" false;
        LEASE = "coordination.k8s.io" "v1" "Lease" "leases" true;
        CRD = "apiextensions.k8s.io" "v1" "CustomResourceDefinition" "customresourcedefinitions" false;
        VALIDATING_WEBHOOK = "admissionregistration.k8s.io" "v1" "ValidatingWebhookConfiguration" "validatingwebhookconfigurations" false;
        ACCESS_REVIEW = "authorization.k8s.io" "v1" "SelfSubjectAccessReview" "selfsubjectaccessreviews" false;
    }
}

/// One object. The namespace is empty for kinds without one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    pub kind: ResourceKind,
    pub namespace: String,
    pub name: String,
}

impl ObjectRef {
    pub fn new(kind: ResourceKind, namespace: &str, name: &str) -> Self {
        let namespace = if kind.namespaced { namespace } else { "" };
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            write!(f, "{} {}", self.kind.kind, self.name)
        } else {
            write!(f, "{} {}/{}", self.kind.kind, self.namespace, self.name)
        }
    }
}

/// What became of a request to the Kubernetes API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeErrorKind {
    NotFound,
    AlreadyExists,
    /// A stale `resourceVersion`, a foreign uid, or a field that another manager applied.
    Conflict,
    /// The object is refused as it is; trying again does not help.
    Invalid,
    Forbidden,
    /// An eviction that a disruption budget does not allow now, or a limit of the API server.
    TooManyRequests {
        retry_after: Option<Duration>,
    },
    /// A `resourceVersion` or `continue` token is too old.
    Gone,
    /// No answer, or one that says try again. A write may have been made.
    Unavailable,
    /// The operator is not the leader any more; nothing was sent.
    NotLeader,
}

#[derive(Debug, Clone, thiserror::Error)]
#[error("{verb} {object}: {message}")]
pub struct KubeError {
    pub verb: &'static str,
    pub object: String,
    pub kind: KubeErrorKind,
    /// The API server's words.
    pub message: String,
    /// The status code, if there was an answer.
    pub code: u16,
    /// `details.causes` of the answer: (reason, message).
    pub causes: Vec<(String, String)>,
}

impl KubeError {
    pub fn is_not_found(&self) -> bool {
        self.kind == KubeErrorKind::NotFound
    }

    pub fn is_conflict(&self) -> bool {
        self.kind == KubeErrorKind::Conflict
    }
}

/// How fields are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Apply {
    pub manager: &'static str,
    /// Takes fields from other managers. Only where the spec says that all of an object is ours.
    pub force: bool,
    pub target: Target,
}

/// The part of an object that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Main,
    Status,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    Background,
    Orphan,
}

/// Which objects a list is of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    /// `None`: all namespaces.
    pub namespace: Option<String>,
    pub labels: Option<String>,
    pub fields: Option<String>,
}

/// The Kubernetes API. Every call has a deadline, is made only while the operator leads, and is repeated by the caller.
#[async_trait]
pub trait KubePort: Send + Sync {
    /// `None` if the object does not exist.
    async fn get(&self, object: &ObjectRef) -> Result<Option<Value>, KubeError>;

    /// All pages, not from a cache.
    async fn list(&self, kind: ResourceKind, selector: &Selector) -> Result<Vec<Value>, KubeError>;

    async fn create(&self, object: &ObjectRef, body: &Value, manager: &'static str) -> Result<Value, KubeError>;

    /// Server-side apply of the fields in `body`. An apply of a deleted object brings it back, unless `metadata.uid` is given.
    async fn apply(&self, object: &ObjectRef, body: &Value, how: Apply) -> Result<Value, KubeError>;

    async fn merge_patch(&self, object: &ObjectRef, patch: &Value, target: Target) -> Result<Value, KubeError>;

    async fn json_patch(&self, object: &ObjectRef, patch: &Value) -> Result<Value, KubeError>;

    /// Replaces the object; `metadata.resourceVersion` in `body` makes it conditional.
    async fn replace(&self, object: &ObjectRef, body: &Value) -> Result<Value, KubeError>;

    /// `uid`: only if it is still that object. One that does not exist is a success.
    async fn delete(&self, object: &ObjectRef, uid: Option<&str>, how: Propagation) -> Result<(), KubeError>;

    /// Asks for the eviction of the pod with this uid. One that does not exist is a success.
    async fn evict(&self, pod: &ObjectRef, uid: &str, grace_seconds: Option<i64>) -> Result<(), KubeError>;

    /// Deletes a pod with this uid without asking disruption budgets.
    async fn delete_pod(&self, pod: &ObjectRef, uid: &str, grace_seconds: i64) -> Result<(), KubeError>;

    /// A token of a service account: the token and its end.
    async fn create_token(
        &self,
        account: &ObjectRef,
        life: Duration,
    ) -> Result<(String, k8s_openapi::jiff::Timestamp), KubeError>;

    /// The names of verbs and resources (`patch nodes`) that we may not use, of those asked for.
    async fn missing_rights(&self, rights: &[Right]) -> Result<Vec<String>, KubeError>;
}

/// A right that is asked for: verb, group, resource, subresource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Right {
    pub verb: &'static str,
    pub group: &'static str,
    pub resource: &'static str,
    pub subresource: &'static str,
}

/// The object for which something is asked of a shard, and the topic: one wish each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WishKey {
    pub object: ObjectRef,
    pub topic: &'static str,
}

/// What is asked of a shard. Each names an end state or carries an id, so that it may be repeated.
#[derive(Debug, Clone, PartialEq)]
pub enum Wish {
    UpsertGroup(GroupWish),
    DeleteGroup {
        key: String,
    },
    CreateInstance(InstanceWish),
    DeleteInstance {
        id: String,
    },
    ReplaceInstance {
        id: String,
        reason: String,
    },
    /// Of one instance that the picture does not have: does it exist?
    InstanceStatus {
        id: String,
    },
    AcknowledgeDrained {
        id: String,
        drain_id: String,
    },
}

/// The complete layer of a group that the API holds: what is `None` or not named falls back to the shard's config.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupWish {
    pub key: String,
    pub size: i32,
    pub template: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: BTreeMap<String, String>,
    pub preferred_victims: Vec<String>,
    /// The group as it was seen when this was wished. A wish that was granted is sent again when the group has changed
    /// since and still differs.
    pub seen_etag: String,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct InstanceWish {
    pub request_id: String,
    pub group: String,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: BTreeMap<String, String>,
}

/// What a shard answered to a wish.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Group(Box<crate::decide::observed::Group>),
    /// The id and status of an instance.
    Instance {
        id: String,
        status: String,
    },
    InstanceStatus(Box<Instance>),
    Done,
}

/// Where a wish stands.
#[derive(Debug, Clone)]
pub enum Progress {
    /// It was taken, and the object is woken when there is an answer.
    Waiting,
    Answered(Answer),
    /// The shard refused it for good. It is tried again when the wish changes, and every five minutes.
    Refused(ShardError),
    /// It failed in a way that may pass; the actor tries again by itself.
    Retrying(ShardError),
    /// The shard is not connected. The wish stays and is sent when it is.
    Down(String),
    /// No shard of this name is configured.
    NotConfigured,
}

/// What changed about one shard, since the last change that was told.
#[derive(Debug, Clone, Default)]
pub struct ShardChange {
    pub shard: String,
    /// Whether it is reachable, configured at all, or has its first picture: look at everything of this shard again.
    pub reach: bool,
    /// Groups that were added, changed or removed.
    pub groups: Vec<String>,
    /// Instances that were added, changed or removed; the last state that was known, if the new one is `None`.
    pub instances: Vec<InstanceChange>,
    /// Wishes that were answered.
    pub answered: Vec<WishKey>,
}

#[derive(Debug, Clone)]
pub struct InstanceChange {
    pub id: String,
    pub old: Option<Arc<Instance>>,
    pub new: Option<Arc<Instance>>,
}

impl InstanceChange {
    /// The group, whether the instance came or went.
    pub fn group(&self) -> Option<&str> {
        self.new.as_ref().or(self.old.as_ref()).map(|it| it.group.as_str())
    }
}

/// Is told of changes; it must be quick and must not wait: it puts keys into queues.
pub type ShardListener = Box<dyn Fn(&ShardChange) + Send + Sync>;

/// All shards. Nothing here waits: wishes are put down, and objects are woken with the answers.
pub trait ShardPort: Send + Sync {
    /// In the order of the configuration.
    fn names(&self) -> Vec<String>;

    fn view(&self, shard: &str) -> Option<ShardView>;

    fn views(&self) -> Vec<ShardView> {
        self.names().iter().filter_map(|name| self.view(name)).collect()
    }

    /// Puts down what an object wants of a shard. The latest wish of an object replaces its earlier one. The same wish again
    /// does not send it again, but tells where it stands.
    fn ask(&self, shard: &str, key: &WishKey, wish: Wish) -> Progress;

    /// The object wants nothing any more.
    fn withdraw(&self, shard: &str, key: &WishKey);

    fn on_change(&self, listener: ShardListener);
}
