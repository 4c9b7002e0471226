//! What the shards report, in our own words. `shards::snapshot` makes it from messages; nothing here knows the wire.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;

/// Whether a shard answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// Not connected yet since the operator started.
    Connecting,
    Ready,
    Down {
        since: Timestamp,
        why: String,
    },
}

impl Reach {
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready)
    }
}

/// All that is known of one shard.
#[derive(Debug, Clone)]
pub struct ShardView {
    pub name: String,
    pub reach: Reach,
    /// The last complete snapshot and all changes since; `None` before the first one. What it does not name does not exist
    /// as of that time. It stays when the shard is down.
    pub picture: Option<Arc<Picture>>,
    /// When the shard last answered anything.
    pub last_contact: Option<Timestamp>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Picture {
    pub leader: String,
    pub epoch: u64,
    pub provider: String,
    pub region: String,
    pub zone: String,
    pub groups: BTreeMap<String, Arc<Group>>,
    /// All that are not deleted.
    pub instances: BTreeMap<String, Arc<Instance>>,
}

impl Picture {
    /// The managed instances of a group: those that count for its size, draining ones included.
    pub fn managed<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Arc<Instance>> {
        self.instances.values().filter(move |it| it.group == group && !it.on_demand)
    }
}

/// A group as a shard reports it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Group {
    pub key: String,
    pub size: i32,
    pub template: String,
    pub instance_type: String,
    pub subnet_pool: String,
    pub vars: BTreeMap<String, String>,
    /// Defined in the shard's config.
    pub is_static: bool,
    pub is_deleting: bool,
    pub etag: String,
    pub actual: i32,
    pub ready: i32,
    pub registered: i32,
    pub draining: i32,
    /// Kubernetes resource name to quantity.
    pub capacity: BTreeMap<String, String>,
    /// `amd64` or `arm64`; empty if unknown.
    pub arch: String,
    /// Why the shard deliberately does not act, each as `Kind: message`.
    pub holds: Vec<String>,
    /// What the API holds on top of the shard's config; `None` if the shard does not tell.
    pub layer: Option<GroupLayer>,
}

/// What the API holds of a group: all of a dynamic one, the overrides of a static one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupLayer {
    pub size: Option<i32>,
    pub template: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InstanceStatus {
    #[default]
    Pending,
    Failed,
    Provisioning,
    Running,
    Draining,
    Deleting,
    Deleted,
    /// A word that this version does not know.
    Other,
}

/// An instance as its shard reports it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Instance {
    pub id: String,
    pub shard: String,
    pub group: String,
    pub on_demand: bool,
    pub status: InstanceStatus,
    /// `starting`, `healthy`, `lost`, `silent`, `terminating`.
    pub health: String,
    /// What the provider says of the VM: `running`, `gone`, `unknown` …
    pub provider_state: String,
    /// The provider's own id.
    pub provider_instance_id: Option<String>,
    /// The provider id as Kubernetes Nodes carry it.
    pub provider_id: Option<String>,
    pub ip4: Option<String>,
    pub ip6: Option<String>,
    pub hostname: Option<String>,
    pub instance_type: Option<String>,
    pub spot: bool,
    pub created_at: Option<Timestamp>,
    pub registered_at: Option<Timestamp>,
    pub drain: Option<Drain>,
    pub boot: Option<Boot>,
    pub failure_reason: Option<String>,
    pub failure_message: Option<String>,
    pub traceparent: Option<String>,
}

impl Instance {
    /// It drains, is being deleted, or is gone: its group has a replacement or needs none.
    pub fn is_leaving(&self) -> bool {
        matches!(self.status, InstanceStatus::Draining | InstanceStatus::Deleting | InstanceStatus::Deleted)
    }

    /// The provider proved that the VM does not exist any more.
    pub fn is_vm_gone(&self) -> bool {
        self.provider_state == "gone" || self.status == InstanceStatus::Deleted
    }

    /// The VM is gone, or stopped for good: nothing runs on its Node any more.
    pub fn is_vm_dead(&self) -> bool {
        self.is_vm_gone() || (self.provider_state == "stopped" && self.is_leaving())
    }
}

/// A drain that the shard has begun.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Drain {
    pub id: String,
    pub reason: String,
    pub started_at: Option<Timestamp>,
    /// When the shard deletes the VM, drained or not.
    pub delete_at: Option<Timestamp>,
    pub acked_at: Option<Timestamp>,
}

/// The latest boot stage that the agent reported.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Boot {
    pub stage: String,
    /// `running`, `done`, `failed`, `stalled`.
    pub state: String,
    pub since: Option<Timestamp>,
    pub detail: String,
    pub failed: bool,
    pub reason: String,
}
