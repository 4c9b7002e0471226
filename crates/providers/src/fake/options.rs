//! The settings of a fake cloud.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use nstance_core::{
    ids::LbKey,
    ports::{
        provider::{CreatePace, Deadlines, InstanceType},
        schema::SchemaProblem,
    },
    value::{Object, Value},
};
use nstance_schemas::{capacities, duration, find};

use super::script::Op;

#[derive(Debug, Clone, PartialEq)]
pub struct FakeOptions {
    /// Whether asking twice makes one VM.
    pub idempotent_create: bool,
    /// Whether provider ids are chosen before the create.
    pub reserve: bool,
    /// Whether those ids are numbers, each above all that exist and all that this process has reserved, as on Proxmox.
    pub reserve_numbers: bool,
    /// Creates that this process may have reserved at a time; zero means no limit.
    pub places: usize,
    pub create_pace: CreatePace,
    /// Creates above that pace are throttled.
    pub enforce_create_pace: bool,
    pub deadlines: Deadlines,
    pub describe_batch: usize,
    /// How long each operation takes; the effect lands half-way. Operations not named take `latency`.
    pub latencies: BTreeMap<Op, Duration>,
    pub latency: Duration,
    /// Up to this much is added to each latency, by chance.
    pub jitter: Duration,
    pub boot_time: Duration,
    pub stop_time: Duration,
    pub delete_time: Duration,
    /// A VM younger than this is "not found" by id.
    pub visibility_delay: Duration,
    /// Listings show the cloud as it was this long ago.
    pub listing_delay: Duration,
    /// VMs in one page of a listing; each page costs one latency.
    pub page_size: usize,
    /// A subnet not named here has no limit.
    pub subnet_capacity: BTreeMap<String, u64>,
    /// Machines that VMs stand on, named `host-0` and so on; zero means that the cloud does not tell.
    pub hosts: usize,
    /// Calls each second that are not throttled, also the size of a burst; zero means no limit.
    pub throttle_rate: u64,
    pub lb_drain_time: Duration,
    /// How long a member is registered before it is in.
    pub lb_warmup: Duration,
    /// Target groups behind each load balancer key.
    pub lb_targets: usize,
    pub address_move_time: Duration,
    /// The machine we are on, as the cloud names it.
    pub self_id: Option<String>,
    pub instance_types: BTreeMap<String, InstanceType>,
    /// Name and id, oldest first.
    pub images: Vec<(String, String)>,
    /// By image id. An image that is not named here tells no architecture.
    pub image_archs: BTreeMap<String, String>,
    /// A check reports subnets that are not in `subnet_capacity`.
    pub strict_subnets: bool,
    /// A check reports load balancers that are not among these; `None` means that every one exists.
    pub load_balancers: Option<BTreeSet<LbKey>>,
    /// Where VMs are written down for other processes, and read from what they wrote; see [`super::journal`].
    pub journal: Option<PathBuf>,
}

impl Default for FakeOptions {
    /// A cloud that answers at once and is always right.
    fn default() -> Self {
        Self {
            idempotent_create: true,
            reserve: false,
            reserve_numbers: false,
            places: 0,
            create_pace: CreatePace::default(),
            enforce_create_pace: false,
            deadlines: Deadlines::default(),
            describe_batch: 100,
            latencies: BTreeMap::new(),
            latency: Duration::ZERO,
            jitter: Duration::ZERO,
            boot_time: Duration::ZERO,
            stop_time: Duration::ZERO,
            delete_time: Duration::ZERO,
            visibility_delay: Duration::ZERO,
            listing_delay: Duration::ZERO,
            page_size: 1000,
            subnet_capacity: BTreeMap::new(),
            hosts: 0,
            throttle_rate: 0,
            lb_drain_time: Duration::ZERO,
            lb_warmup: Duration::ZERO,
            lb_targets: 1,
            address_move_time: Duration::ZERO,
            self_id: Some("fake-self".to_owned()),
            instance_types: BTreeMap::new(),
            images: Vec::new(),
            image_archs: BTreeMap::new(),
            strict_subnets: false,
            load_balancers: None,
            journal: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} of the fake provider's options cannot be used", problems.len())]
pub struct OptionsError {
    pub problems: Vec<SchemaProblem>,
}

impl FakeOptions {
    /// Reads `server.provider.options`.
    pub fn from_options(options: &Object) -> Result<Self, OptionsError> {
        let problems = find("fake").map(|schema| schema.check_options(options)).unwrap_or_default();
        if !problems.is_empty() {
            return Err(OptionsError { problems });
        }
        let flag = |key: &str, default| match options.get(key) {
            Some(Value::Bool(it)) => *it,
            _ => default,
        };
        let count = |key: &str, default: u64| match options.get(key) {
            Some(Value::Int(it)) => u64::try_from(*it).unwrap_or(default),
            _ => default,
        };
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let time = |key: &str| options.get(key).and_then(duration::parse);
        let pace = CreatePace::default();
        Ok(Self {
            idempotent_create: flag("idempotent_create", true),
            reserve: flag("reserve", false),
            places: size(count("places", 0)),
            create_pace: CreatePace {
                burst: u32::try_from(count("create_burst", pace.burst.into())).unwrap_or(u32::MAX).max(1),
                refill: time("create_refill").unwrap_or(pace.refill),
            },
            latencies: time("create_latency").map(|it| (Op::Create, it)).into_iter().collect(),
            latency: time("latency").unwrap_or_default(),
            boot_time: time("boot_time").unwrap_or_default(),
            stop_time: time("stop_time").unwrap_or_default(),
            delete_time: time("delete_time").unwrap_or_default(),
            visibility_delay: time("visibility_delay").unwrap_or_default(),
            listing_delay: time("listing_delay").unwrap_or_default(),
            page_size: size(count("page_size", 1000)).max(1),
            subnet_capacity: capacities(options),
            hosts: size(count("hosts", 0)),
            throttle_rate: count("throttle_rate", 0),
            lb_drain_time: time("lb_drain_time").unwrap_or_default(),
            lb_warmup: time("lb_warmup").unwrap_or_default(),
            address_move_time: time("address_move_time").unwrap_or_default(),
            journal: options.get("journal").and_then(Value::as_str).map(PathBuf::from),
            ..Self::default()
        })
    }

    pub(super) fn latency_of(&self, op: Op) -> Duration {
        self.latencies.get(&op).copied().unwrap_or(self.latency)
    }
}
