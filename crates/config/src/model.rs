//! A config that was found valid: typed, with every default filled in.
//!
//! Only [`load`](crate::load) makes a [`Config`], so whoever holds one need not check anything again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, GroupRef, Kind, LbKey, Shard, SubnetPool, Tenant},
    ports::{
        provider::LoadBalancer,
        schema::{KindFacts, ProviderSchema},
    },
    value::{Object, Value},
};

use crate::path::Path;

macro_rules! choices {
    ($(#[$doc:meta])* $type:ident { $($(#[$item:meta])* $name:ident $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type {
            $($(#[$item])* $name,)*
        }

        impl $type {
            /// Every choice with its spelling in a config.
            pub const ALL: &[(&'static str, Self)] = &[$(($text, Self::$name),)*];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

/// Where instances come from: one of the kinds that the config was checked with.
#[derive(Clone, Copy)]
pub struct ProviderKind(pub(crate) &'static dyn ProviderSchema);

impl ProviderKind {
    pub fn as_str(self) -> &'static str {
        self.0.kind()
    }

    pub fn facts(self) -> KindFacts {
        self.0.facts()
    }

    /// Whether it serves development only; may do things that would be unsafe in production.
    pub fn is_dev(self) -> bool {
        self.facts().is_dev
    }

    pub fn schema(self) -> &'static dyn ProviderSchema {
        self.0
    }
}

impl PartialEq for ProviderKind {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for ProviderKind {}

impl fmt::Debug for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for ProviderKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

choices!(
    /// CPU architecture of a template.
    Arch { Amd64 "amd64", Arm64 "arm64", }
);
choices!(SecretsProvider {
    ObjectStorage "object-storage",
    AwsSecretsManager "aws-secrets-manager",
    AwsParameterStore "aws-parameter-store",
    GoogleSecretManager "google-secret-manager",
    /// Forgets the CA with the process; development only.
    Memory "memory",
});
choices!(KeyProvider {
    Env "env",
    File "file",
    AwsSecretsManager "aws-secrets-manager",
    AwsParameterStore "aws-parameter-store",
    GoogleSecretManager "google-secret-manager",
});
choices!(
    /// Usages of a certificate; `Peer` has both.
    CertificateKind { Client "client", Server "server", Peer "peer", }
);
choices!(ImageSort { CreationDate "creation-date", Name "name", });
choices!(ImageOrder { Desc "desc", Asc "asc", });
choices!(UserdataSource { Inline "inline", Url "url", });
choices!(UserdataEncoding { Plain "plain", Base64 "base64", Gzip "gzip", Base64Gzip "base64+gzip", });

choices!(
    /// A field of a group as the API names it, e.g. in an update mask.
    GroupField {
        Template "template",
        Size "size",
        InstanceType "instance_type",
        SubnetPool "subnet_pool",
        Vars "vars",
        Args "args",
        DrainTimeout "drain_timeout",
        LoadBalancers "load_balancers",
        RolloutPaused "rollout_paused",
    }
);

impl GroupField {
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == text).map(|(_, field)| *field)
    }
}

/// The config of one shard.
#[derive(Clone)]
pub struct Config {
    pub server: Server,
    /// Every tenant, `default` included.
    pub tenants: BTreeSet<Tenant>,
    pub images: BTreeMap<String, ImageSpec>,
    pub certificates: Certificates,
    pub load_balancers: BTreeMap<LbKey, LoadBalancer>,
    pub defaults: Defaults,
    pub templates: BTreeMap<String, Template>,
    pub groups: BTreeMap<GroupRef, StaticGroup>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cluster = &self.server.cluster_id;
        f.debug_struct("Config").field("cluster", cluster).field("shard", &self.server.shard).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct Server {
    pub cluster_id: ClusterId,
    pub shard: Shard,
    pub provider: Provider,
    pub subnet_pools: BTreeMap<SubnetPool, Vec<String>>,
    /// Pools that groups and instances made over the API may use; empty means any.
    pub dynamic_subnet_pools: Vec<SubnetPool>,
    pub secrets: Secrets,
    pub bind: Bind,
    pub advertise: Advertise,
    pub leader_network: Option<LeaderNetwork>,
    pub leader_election: LeaderElection,
    pub garbage_collection: GarbageCollection,
    pub expiry: Expiry,
    /// Refill time of one create token; zero is unlimited, `None` the provider's own.
    pub create_rate_limit: Option<Duration>,
    /// Size of the bucket of create tokens; `None` is the provider's own.
    pub create_burst: Option<u32>,
    pub max_parallel_creates: u32,
    pub health_check_interval: Duration,
    pub shutdown_grace: Duration,
    pub default_drain_timeout: Duration,
    /// Zero: images are looked up at take-over and on change only.
    pub image_refresh_interval: Duration,
    pub request_timeout: Duration,
    pub shutdown_timeout: Duration,
    pub error_exit_jitter: ErrorExitJitter,
    pub safety: Safety,
}

impl Server {
    /// Whether groups and instances made over the API may use this pool.
    pub fn allows_dynamic(&self, pool: &SubnetPool) -> bool {
        self.dynamic_subnet_pools.is_empty() || self.dynamic_subnet_pools.contains(pool)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Provider {
    pub kind: ProviderKind,
    pub region: String,
    pub zone: String,
    pub options: Object,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secrets {
    pub provider: SecretsProvider,
    /// As written; empty means the store's own default.
    pub prefix: String,
    /// Present exactly with [`SecretsProvider::ObjectStorage`].
    pub encryption_key: Option<EncryptionKey>,
    pub old_encryption_keys: Vec<EncryptionKey>,
    pub cache_ttl: Duration,
}

impl Secrets {
    /// The prefix in force: the written one, or the store's default for this cluster.
    pub fn prefix(&self, cluster: &ClusterId) -> String {
        if !self.prefix.is_empty() {
            return self.prefix.clone();
        }
        match self.provider {
            SecretsProvider::ObjectStorage => "secret/".to_owned(),
            SecretsProvider::AwsSecretsManager => format!("{cluster}/"),
            SecretsProvider::AwsParameterStore => format!("/{cluster}/"),
            SecretsProvider::GoogleSecretManager => format!("{cluster}-"),
            SecretsProvider::Memory => String::new(),
        }
    }
}

/// Where an encryption key is found; never the key itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncryptionKey {
    pub provider: KeyProvider,
    pub source: String,
    /// Google only, and there only if it differs from the provider's.
    pub project_id: Option<String>,
}

/// `host:port`. An empty host means all interfaces in `bind`, and "find it out" in `advertise`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    pub host: String,
    /// Zero with dev providers only: any free port.
    pub port: u16,
}

impl Address {
    /// Whether the host names no particular machine.
    pub fn is_any(&self) -> bool {
        matches!(self.host.as_str(), "" | "0.0.0.0" | "::")
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    pub health: Address,
    pub election: Address,
    pub registration: Address,
    pub operator: Address,
    pub agent: Address,
}

/// What others dial. An empty host is to be replaced by the primary interface's address, a zero port by the real one;
/// hosts that `leader_network` decides are filled in already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertise {
    pub health: Address,
    pub election: Address,
    pub registration: Address,
    pub operator: Address,
    pub agent: Address,
    pub extra_sans: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderNetwork {
    pub ip: IpAddr,
    /// Where the provider moves a network interface: the one that moves.
    pub interface_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderElection {
    pub ttl: Duration,
    pub renew_interval: Duration,
    pub margin: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GarbageCollection {
    pub interval: Duration,
    pub registration_timeout: Duration,
    pub deleted_record_retention: Duration,
}

impl GarbageCollection {
    pub fn is_off(&self) -> bool {
        self.interval.is_zero() && self.registration_timeout.is_zero()
    }
}

/// Ages at which instances are replaced; `None` is never.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expiry {
    pub eligible_age: Option<Duration>,
    pub forced_age: Option<Duration>,
    pub ondemand_age: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorExitJitter {
    pub min_delay: Duration,
    pub max_delay: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Safety {
    pub mass_disconnect_min: u32,
    pub mass_disconnect_percent: u32,
    pub mass_disconnect_window: Duration,
    pub runaway_base: u32,
    pub runaway_factor: u32,
    pub runaway_window: Duration,
    pub max_removal_min: u32,
    pub max_removal_percent: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    pub provider: ProviderKind,
    pub filters: Vec<ImageFilter>,
    pub owners: Vec<String>,
    pub sort: ImageSort,
    pub order: ImageOrder,
    pub fallback: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFilter {
    pub name: String,
    pub values: Vec<String>,
}

/// Certificates for files, and the lives of those that Nstance itself uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificates {
    pub named: BTreeMap<String, CertificateSpec>,
    pub agent_ttl: Duration,
    pub operator_ttl: Duration,
    pub ca: CaSpec,
}

/// A certificate before rendering: every text may be a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSpec {
    pub name: String,
    pub kind: CertificateKind,
    pub cn: String,
    pub names: CertificateNames,
    pub ttl: Duration,
}

/// The rendered lists of a certificate, in the order of the documentation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CertificateNames {
    pub organization: Vec<String>,
    pub dns: Vec<String>,
    pub ip: Vec<String>,
    pub uri: Vec<String>,
    pub country: Vec<String>,
    pub province: Vec<String>,
    pub locality: Vec<String>,
    pub street: Vec<String>,
    pub postal_code: Vec<String>,
}

impl CertificateNames {
    /// Each list with its key.
    pub fn lists(&self) -> [(&'static str, &Vec<String>); 9] {
        [
            ("organization", &self.organization),
            ("dns", &self.dns),
            ("ip", &self.ip),
            ("uri", &self.uri),
            ("country", &self.country),
            ("province", &self.province),
            ("locality", &self.locality),
            ("street", &self.street),
            ("postal_code", &self.postal_code),
        ]
    }

    pub(crate) fn lists_mut(&mut self) -> [(&'static str, &mut Vec<String>); 9] {
        [
            ("organization", &mut self.organization),
            ("dns", &mut self.dns),
            ("ip", &mut self.ip),
            ("uri", &mut self.uri),
            ("country", &mut self.country),
            ("province", &mut self.province),
            ("locality", &mut self.locality),
            ("street", &mut self.street),
            ("postal_code", &mut self.postal_code),
        ]
    }
}

/// Subject of a CA that is yet to be made; an existing one never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaSpec {
    /// Absent: the issuer chooses.
    pub cn: Option<String>,
    /// Without `dns`, `ip` and `uri`, which a CA does not have.
    pub names: CertificateNames,
    pub ttl: Duration,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Defaults {
    pub args: Object,
    pub vars: BTreeMap<String, String>,
    pub userdata: Option<Userdata>,
}

/// Userdata in canonical spelling, whichever short form was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Userdata {
    pub source: UserdataSource,
    pub encoding: UserdataEncoding,
    /// Text, or the URL it is fetched from.
    pub content: String,
    /// 64 lower-case hex digits of the fetched bytes.
    pub sha256: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Template {
    pub kind: Kind,
    pub arch: Arch,
    pub instance_type: Option<String>,
    pub instance_type_fallbacks: Vec<String>,
    pub subnet_pool: Option<SubnetPool>,
    pub size: u32,
    pub args: Object,
    pub vars: BTreeMap<String, String>,
    pub userdata: Option<Userdata>,
    pub files: BTreeMap<String, FileSpec>,
    pub trust_agent_addresses: bool,
}

/// A file for an instance, before rendering.
#[derive(Debug, Clone, PartialEq)]
pub enum FileSpec {
    /// A certificate for the agent's key of that name.
    Certificate {
        template: String,
        key: String,
    },
    Secret {
        source: String,
    },
    Storage {
        source: String,
    },
    Env {
        template: BTreeMap<String, String>,
    },
    Json {
        template: Value,
    },
    String {
        template: String,
    },
}

impl FileSpec {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Certificate { .. } => "certificate",
            Self::Secret { .. } => "secret",
            Self::Storage { .. } => "storage",
            Self::Env { .. } => "env",
            Self::Json { .. } => "json",
            Self::String { .. } => "string",
        }
    }
}

/// A group of the config file, as written; what it inherits is added by the merge.
#[derive(Debug, Clone, PartialEq)]
pub struct StaticGroup {
    pub template: String,
    pub size: Option<u32>,
    pub instance_type: Option<String>,
    pub instance_type_fallbacks: Option<Vec<String>>,
    pub subnet_pool: Option<SubnetPool>,
    pub vars: BTreeMap<String, String>,
    pub drain_timeout: Option<Duration>,
    pub rollout_paused: Option<bool>,
    pub load_balancers: Vec<LbKey>,
    pub args: Object,
    /// Where it stands in the file: a group of tenant `default` has two spellings.
    pub(crate) path: Path,
}
