//! The provider: where instances run. It never decides; it performs one call and says exactly what it knows afterwards.
//!
//! [`Provider`] is what every provider can do. Load balancers, the leader's address and image lookup are traits of
//! their own, handed out as options: an operation that a provider lacks cannot be called.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

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

/// What one answer says about a VM's tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmTags {
    /// All of ours are there.
    Complete(Tags),
    /// Not all of them are in this answer. That proves nothing: providers leave tags out now and then. Ask again.
    Absent,
    /// They are there, and belong to another owner or are malformed: this VM is never touched.
    Foreign,
}

impl VmTags {
    pub fn complete(&self) -> Option<&Tags> {
        match self {
            Self::Complete(tags) => Some(tags),
            Self::Absent | Self::Foreign => None,
        }
    }
}

/// Why the provider ended a VM, in its own words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// As if a create had been refused for this.
    pub class: ErrorClass,
    pub code: Option<String>,
    pub message: String,
}

/// A VM as its provider shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    pub vm: VmRef,
    pub seen: Seen,
    /// Why the provider ended it, if it did and tells.
    pub ended: Option<Ended>,
    pub tags: VmTags,
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
    /// From [`Provider::reserve`], the same at every repeat.
    pub reserved_id: Option<String>,
}

/// What is known of a VM before its provider id is chosen: no userdata and no nonce yet, for both depend on the time
/// of the create, and a reservation may have to wait for a place.
#[derive(Debug, Clone, PartialEq)]
pub struct ReserveSpec {
    pub instance: InstanceId,
    pub tags: Tags,
    pub instance_type: Option<String>,
    pub subnet: String,
    /// Merged and rendered.
    pub args: Object,
}

/// An id and the local places (a clone gate, a node's memory) that a create will use. Dropping it frees the places; the
/// id is not given to another instance.
#[must_use = "dropping a reservation frees its places"]
pub struct Reservation {
    /// The id chosen for the VM, where the provider lets its caller choose.
    pub id: Option<String>,
    places: Option<Box<dyn Send + Sync>>,
}

impl Reservation {
    /// Nothing had to be reserved.
    pub fn none() -> Self {
        Self { id: None, places: None }
    }

    /// An id was chosen; no place is held.
    pub fn named(id: impl Into<String>) -> Self {
        Self { id: Some(id.into()), places: None }
    }

    /// `places` are freed by dropping them.
    pub fn new(id: impl Into<String>, places: impl Send + Sync + 'static) -> Self {
        Self::named(id).with_places(places)
    }

    /// `places` are freed by dropping them.
    pub fn with_places(self, places: impl Send + Sync + 'static) -> Self {
        Self { places: Some(Box::new(places)), ..self }
    }

    pub fn holds_places(&self) -> bool {
        self.places.is_some()
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("id", &self.id).field("places", &self.holds_places()).finish()
    }
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

/// How long a call of each sort may take before its outcome counts as unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadlines {
    pub create: Duration,
    /// Of [`LeaderAddress::net_assign`].
    pub assign: Duration,
    pub other: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { create: Duration::from_secs(120), assign: Duration::from_secs(60), other: Duration::from_secs(30) }
    }
}

/// Constants of a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    pub create: CreateMode,
    /// For this long after a creation, the provider's "not found" proves nothing.
    pub visibility_delay: Duration,
    /// Used where the config says nothing else.
    pub create_pace: CreatePace,
    pub deadlines: Deadlines,
    /// Refs in one [`Provider::describe`].
    pub describe_batch: usize,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            create: CreateMode::Idempotent,
            visibility_delay: Duration::ZERO,
            create_pace: CreatePace::default(),
            deadlines: Deadlines::default(),
            describe_batch: 100,
        }
    }
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    pub id: String,
    /// As the provider tells it, in our words: `amd64`, `arm64`.
    pub arch: Option<String>,
}

/// A load balancer as the config describes it. What is in `spec` is the provider kind's own (target groups, an instance
/// group); its schema has checked it.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadBalancer {
    pub key: LbKey,
    pub spec: Object,
}

/// One of our VMs at a load balancer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LbMember {
    /// Always with the provider's own id: a member without a record is taken out by that.
    pub vm: VmRef,
    pub state: LbMemberState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LbMemberState {
    /// Registered, but not serving in all of its target groups yet.
    Coming,
    /// Serving in all of them.
    In,
    /// Still draining in at least one of them.
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
}

/// Whether a failed call may have taken effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landed {
    No,
    Maybe,
}

/// What a refusal is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// This subnet and type: another choice may pass.
    Choice,
    /// The image: it is looked up again.
    Image,
    /// Everything that this account asks for.
    Account,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("provider {op}: {message}{}", code.as_ref().map(|code| format!(" ({code})")).unwrap_or_default())]
pub struct ProviderError {
    pub op: &'static str,
    pub class: ErrorClass,
    /// Not derived from the class: a create of several steps that could not clean up after itself may have left a VM
    /// in any class.
    pub landed: Landed,
    pub scope: Scope,
    pub code: Option<String>,
    /// The provider's own text, free of credentials.
    pub message: String,
    pub retry_after: Option<Duration>,
}

impl ProviderError {
    /// Landed if it is ambiguous, about the choice if capacity is lacking; the adapter says so where it knows better.
    pub fn new(op: &'static str, class: ErrorClass, message: impl Into<String>) -> Self {
        let landed = if class == ErrorClass::Ambiguous { Landed::Maybe } else { Landed::No };
        let scope = if class == ErrorClass::Capacity { Scope::Choice } else { Scope::Account };
        Self { op, class, landed, scope, code: None, message: message.into(), retry_after: None }
    }

    #[must_use]
    pub fn with_landed(self, landed: Landed) -> Self {
        Self { landed, ..self }
    }

    #[must_use]
    pub fn with_scope(self, scope: Scope) -> Self {
        Self { scope, ..self }
    }

    #[must_use]
    pub fn with_code(self, code: impl Into<String>) -> Self {
        Self { code: Some(code.into()), ..self }
    }
}

/// What the config expects of the provider, for [`Provider::check`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Needs {
    pub subnets: BTreeSet<String>,
    pub instance_types: BTreeSet<String>,
    pub images: BTreeMap<String, ImageQuery>,
    pub load_balancers: Vec<LoadBalancer>,
    pub leader_network: Option<LeaderNetwork>,
    /// The shortest drain timeout of a group with load balancers: they should let go of a member within it.
    pub drain_timeout: Option<Duration>,
}

/// One thing of [`Needs`], or the account as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    Account,
    Subnet(String),
    InstanceType(String),
    Image(String),
    LoadBalancer(LbKey),
    LeaderNetwork,
}

/// What [`Provider::check`] found wrong with one need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckProblem {
    pub need: Need,
    pub severity: CheckSeverity,
    pub error: ProviderError,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckSeverity {
    /// It works, though not as people would expect.
    Warning,
    /// What needs this cannot work as it is.
    Error,
}

/// Calls that change the world take a [`Permit`], which only an open lease guard hands out. All calls are cancellable;
/// one that was cancelled after sending counts as ambiguous.
#[async_trait]
pub trait Provider: Send + Sync {
    /// `aws`, `process`, …
    fn kind(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Load balancers, where this provider has them.
    fn balancers(&self) -> Option<&dyn Balancers> {
        None
    }

    /// The address that moves with leadership, where this provider can move one.
    fn leader_address(&self) -> Option<&dyn LeaderAddress> {
        None
    }

    /// Image lookup, where this provider has it.
    fn images(&self) -> Option<&dyn Images> {
        None
    }

    /// Credentials, permissions and whatever else needs the cloud to be asked, for what the config needs. Problems are
    /// reported, each with what to do; none stops the server.
    async fn check(&self, needs: &Needs) -> Vec<CheckProblem>;

    /// Chooses the provider's id and holds local places before anything exists; may wait for a place. No effect outside
    /// this process.
    async fn reserve(&self, _spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        Ok(Reservation::none())
    }

    /// At take-over, before the first create: the reserved ids of all records. None of them is given to another.
    fn restore(&self, _reserved: &[String]) {}

    /// Asks for exactly the VM `spec.instance`, which bears all its tags from its first moment. Success means that the
    /// provider accepted and named it.
    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError>;

    /// Asks for its end. Already gone is a success; another VM under that provider id counts as already gone. If its
    /// tags are absent from the answer, whose it is is not known: `Unavailable`, to be tried again.
    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError>;

    /// One answer for each of at most [`Capabilities::describe_batch`] refs, in their order. One failing ref does not
    /// fail the others. Absent tags make `Unknown`, never `NotFound`.
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

    /// The size of one instance type; `None` if the provider does not know it. The name is empty for a group that names
    /// no type: a provider that has a size of its own for these answers with it.
    async fn instance_type(&self, _name: &str) -> Result<Option<InstanceType>, ProviderError> {
        Ok(None)
    }

    /// How a Kubernetes node of this VM names its provider id.
    fn k8s_provider_id(&self, vm: &VmRef) -> String;
}

/// Load balancers. Each call is idempotent.
#[async_trait]
pub trait Balancers: Send + Sync {
    async fn lb_register(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError>;

    async fn lb_deregister(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError>;

    /// Every one of our VMs that is registered there, in whatever state; or an error, never a part.
    async fn lb_members(&self, lb: &LoadBalancer) -> Result<Vec<LbMember>, ProviderError>;
}

/// The address that moves with leadership.
#[async_trait]
pub trait LeaderAddress: Send + Sync {
    /// The provider id of the machine we run on, or why it is not known.
    async fn self_id(&self) -> Result<String, ProviderError>;

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError>;

    /// Takes the address for `me` from its holder. Idempotent.
    async fn net_assign(
        &self,
        permit: Permit,
        me: &str,
        network: &LeaderNetwork,
        previous: Option<&str>,
    ) -> Result<(), ProviderError>;

    /// Gives the address up, only if `me` holds it. Needs no permit: it happens after the lease is gone.
    async fn net_release(&self, me: &str, network: &LeaderNetwork) -> Result<(), ProviderError>;
}

/// What image names stand for.
#[async_trait]
pub trait Images: Send + Sync {
    /// `None`: the provider answered, and nothing fits.
    async fn resolve_image(&self, query: &ImageQuery) -> Result<Option<Image>, ProviderError>;
}
