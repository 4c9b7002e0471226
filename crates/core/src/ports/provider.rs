//! The provider: where instances run. It never decides; it performs one call and says exactly what it knows afterwards.

use std::{collections::BTreeMap, fmt, time::Duration};

use async_trait::async_trait;

use crate::{
    ids::{ClusterId, Epoch, GroupKey, GroupRef, InstanceId, LbKey, Shard, Tenant},
    instance::Seen,
    term::Permit,
    time::Timestamp,
    value::Object,
};

/// Whose VMs an adapter sees and touches; fixed when it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub cluster: ClusterId,
    pub shard: Shard,
}

/// How we name a VM to its provider.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmRef {
    pub instance: InstanceId,
    /// The provider's own id, once it told one (or reserved one).
    pub provider_id: Option<String>,
}

/// What every VM bears from its first moment. Adoption rests on these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tags {
    pub cluster: ClusterId,
    pub shard: Shard,
    pub instance: InstanceId,
    pub tenant: Tenant,
    pub group: GroupKey,
    pub on_demand: bool,
    pub epoch: Epoch,
    pub template: String,
    pub infra_hash: String,
}

impl Tags {
    pub fn group_ref(&self) -> GroupRef {
        GroupRef::new(self.tenant.clone(), self.group.clone())
    }
}

/// A VM as its provider shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    pub vm: VmRef,
    pub seen: Seen,
    /// `None` if they are incomplete or malformed: then nothing may be done to this VM.
    pub tags: Option<Tags>,
    pub created_at: Option<Timestamp>,
    pub ip4: Option<String>,
    pub ip6: Option<String>,
    pub hostname: Option<String>,
    pub fqdn: Option<String>,
    pub instance_type: Option<String>,
    pub subnet: Option<String>,
    /// The machine it stands on, where the provider tells.
    pub host: Option<String>,
    pub spot: Option<bool>,
}

/// Everything a create needs, a pure function of record and config: built twice, it is equal byte by byte.
#[derive(Debug, Clone, PartialEq)]
pub struct VmSpec {
    pub instance: InstanceId,
    pub tags: Tags,
    pub instance_type: Option<String>,
    pub subnet: String,
    /// Merged and rendered.
    pub args: Object,
    pub userdata: Option<Userdata>,
    pub bootstrap: Bootstrap,
    /// From [`Provider::reserve`], repeated on every try.
    pub reserved_id: Option<String>,
}

/// Rendered userdata. It holds the nonce, so it is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Userdata(pub String);

impl fmt::Debug for Userdata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Userdata({} bytes)", self.0.len())
    }
}

/// What an agent needs to register, for providers that start it themselves instead of through userdata.
#[derive(Clone, PartialEq, Eq)]
pub struct Bootstrap {
    pub ca_bundle_pem: String,
    pub nonce_jwt: String,
    pub registration_addr: String,
    pub agent_addr: String,
}

impl fmt::Debug for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bootstrap")
            .field("registration_addr", &self.registration_addr)
            .field("agent_addr", &self.agent_addr)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateMode {
    /// Asking twice with the same spec makes one VM: the record and the call may start together.
    Idempotent,
    /// The record must be durable before the call.
    RecordFirst,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    pub create: CreateMode,
    pub leader_network: bool,
    pub load_balancers: bool,
    pub images: bool,
    /// For this long after a creation, the provider's "not found" proves nothing.
    pub visibility_delay: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeleteHow {
    Graceful,
    Now,
}

/// What one look at one VM told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Described {
    Vm(Box<Vm>),
    /// The provider itself said so.
    NotFound,
    /// It could not be looked at; why.
    Unknown(ProviderError),
}

/// All VMs with our owner tags in any but a terminal state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    pub vms: Vec<Vm>,
    /// Names the part that did not answer; `None` means complete. An incomplete listing proves no absence.
    pub missing: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubnetFree {
    Free(u64),
    Unlimited,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceType {
    pub arch: Option<String>,
    pub cpu: u32,
    pub memory_bytes: u64,
    pub ephemeral_storage_bytes: Option<u64>,
    pub gpus: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageQuery {
    pub filters: BTreeMap<String, Vec<String>>,
    pub owners: Vec<String>,
    /// Sort by name instead of by creation date.
    pub by_name: bool,
    pub ascending: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LbMember {
    In,
    Draining,
}

/// The address that moves with leadership.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderNetwork {
    pub ip: std::net::IpAddr,
    pub interface_id: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ErrorClass {
    /// The provider itself said that this id does not exist.
    NotFound,
    Capacity,
    Quota,
    Throttled,
    Auth,
    /// Can never succeed as it is.
    Invalid,
    /// Not reachable before anything was sent, or an explicit refusal to serve.
    Unavailable,
    /// Sent, outcome unknown.
    Ambiguous,
}

impl ErrorClass {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Capacity => "capacity",
            Self::Quota => "quota",
            Self::Throttled => "throttled",
            Self::Auth => "auth",
            Self::Invalid => "invalid",
            Self::Unavailable => "unavailable",
            Self::Ambiguous => "ambiguous",
        }
    }

    /// Whether a failed create of this class may have made a VM.
    pub fn landed(self) -> Landed {
        match self {
            Self::Ambiguous => Landed::Maybe,
            _ => Landed::No,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landed {
    No,
    Maybe,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("provider {op}: {message}{}", code.as_ref().map(|code| format!(" ({code})")).unwrap_or_default())]
pub struct ProviderError {
    pub op: &'static str,
    pub class: ErrorClass,
    pub code: Option<String>,
    /// The provider's own text, free of credentials.
    pub message: String,
    pub retry_after: Option<Duration>,
}

impl ProviderError {
    pub fn new(op: &'static str, class: ErrorClass, message: impl Into<String>) -> Self {
        Self { op, class, code: None, message: message.into(), retry_after: None }
    }
}

/// Calls that change the world take a [`Permit`], which only an open lease guard hands out. All calls are cancellable;
/// one that was cancelled after sending counts as ambiguous.
#[async_trait]
pub trait Provider: Send + Sync {
    /// `aws`, `process`, …
    fn kind(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Credentials, permissions, zone, subnets. Problems are reported, each with what to do; none stops the server.
    async fn check(&self) -> Vec<ProviderError>;

    /// Chooses the provider's id before anything exists. No effect outside this process.
    async fn reserve(&self, _instance: InstanceId) -> Result<Option<String>, ProviderError> {
        Ok(None)
    }

    /// Asks for exactly the VM `spec.instance`, which bears all its tags from its first moment. Success means that the
    /// provider accepted and named it.
    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError>;

    /// Asks for its end. Already gone is a success; another VM under that provider id counts as already gone.
    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError>;

    /// One answer for each of at most 100 refs, in their order. One failing look does not fail the others.
    async fn describe(&self, vms: &[VmRef]) -> Vec<Described>;

    async fn list(&self) -> Result<Listing, ProviderError>;

    /// The cheapest read that proves that the provider serves us.
    async fn probe(&self) -> Result<(), ProviderError>;

    /// Removes what is left of a VM that is gone. Idempotent.
    async fn clean(&self, _permit: Permit, _vm: &VmRef) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn subnet_free(&self, _subnet: &str) -> Result<SubnetFree, ProviderError> {
        Ok(SubnetFree::Unknown)
    }

    async fn instance_type(&self, _name: &str) -> Result<Option<InstanceType>, ProviderError> {
        Ok(None)
    }

    async fn resolve_image(&self, _query: &ImageQuery) -> Result<Option<String>, ProviderError> {
        Err(ProviderError::new("resolve_image", ErrorClass::Invalid, "this provider resolves no images"))
    }

    async fn lb_register(&self, _permit: Permit, _lb: &LbKey, _vm: &VmRef) -> Result<(), ProviderError> {
        Err(ProviderError::new("lb_register", ErrorClass::Invalid, "this provider has no load balancers"))
    }

    async fn lb_deregister(&self, _permit: Permit, _lb: &LbKey, _vm: &VmRef) -> Result<(), ProviderError> {
        Err(ProviderError::new("lb_deregister", ErrorClass::Invalid, "this provider has no load balancers"))
    }

    async fn lb_members(&self, _lb: &LbKey) -> Result<BTreeMap<InstanceId, LbMember>, ProviderError> {
        Err(ProviderError::new("lb_members", ErrorClass::Invalid, "this provider has no load balancers"))
    }

    /// The provider id of the machine we run on, if any.
    async fn self_id(&self) -> Option<String> {
        None
    }

    async fn net_holder(&self, _network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        Err(ProviderError::new("net_holder", ErrorClass::Invalid, "this provider moves no address"))
    }

    /// Takes the address by force. Idempotent.
    async fn net_assign(
        &self,
        _permit: Permit,
        _network: &LeaderNetwork,
        _previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        Err(ProviderError::new("net_assign", ErrorClass::Invalid, "this provider moves no address"))
    }

    /// Gives the address up, only if it is ours. Needs no permit: it happens after the lease is gone.
    async fn net_release(&self, _network: &LeaderNetwork) -> Result<(), ProviderError> {
        Err(ProviderError::new("net_release", ErrorClass::Invalid, "this provider moves no address"))
    }

    /// How a Kubernetes node of this VM names its provider id.
    fn k8s_provider_id(&self, vm: &VmRef) -> String;
}

/// How fast VMs may be asked for: a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CreatePace {
    /// Size of the bucket.
    pub burst: u32,
    /// Time in which one token flows in; zero is no limit.
    pub refill: Duration,
}

impl Default for CreatePace {
    fn default() -> Self {
        Self { burst: 100, refill: Duration::from_millis(100) }
    }
}

/// A load balancer as the config describes it. What is in `spec` is the provider kind's own (target groups, an instance
/// group); its schema has checked it.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadBalancer {
    pub key: LbKey,
    pub spec: Object,
}
