//! What a provider kind is and accepts in a config, known without any provider running: pure, offline, strict.
//!
//! The room `schemas` holds one [`ProviderSchema`] for every kind, in every build. Other rooms ask it, instead of
//! matching kinds by name.

use std::{fmt, net::IpAddr, time::Duration};

use super::provider::CreatePace;
use crate::value::Object;

/// One fault in the part of a config that belongs to a provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaProblem {
    /// Path below the checked object, e.g. `MetadataOptions.HttpTokens`, with the index of a list as a step; empty for
    /// the object itself.
    pub path: Vec<String>,
    pub what: SchemaFault,
    /// What to do about it, where the fault alone does not say.
    pub help: Option<String>,
}

impl SchemaProblem {
    pub fn new(path: &[&str], what: SchemaFault) -> Self {
        Self { path: path.iter().map(|step| (*step).to_owned()).collect(), what, help: None }
    }

    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Whether it keeps a config from being used.
    pub fn is_error(&self) -> bool {
        !matches!(self.what, SchemaFault::Deprecated { .. } | SchemaFault::Warning { .. })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchemaFault {
    /// The key is not known; `known` holds those that are, for a suggestion.
    UnknownKey {
        known: Vec<&'static str>,
    },
    /// Nstance fills this key in by itself.
    ManagedKey {
        instead: &'static str,
    },
    WrongType {
        expected: &'static str,
    },
    BadValue {
        message: String,
    },
    Missing {
        key: &'static str,
    },
    /// Two keys that exclude each other; the path names one of them.
    Conflict {
        message: String,
    },
    /// Accepted, but the provider is going to drop it.
    Deprecated {
        message: String,
    },
    /// Accepted, but perhaps not what was meant.
    Warning {
        message: String,
    },
    /// Accepted, but the group is in more load balancers than the provider may allow.
    TwoBalancers {
        message: String,
    },
}

/// Facts of a provider kind that other parts of a config depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KindFacts {
    /// Serves development only; may do things that would be unsafe in production.
    pub is_dev: bool,
    /// Agents are started by userdata here, so a template without any starts none.
    pub needs_userdata: bool,
    pub needs_instance_type: bool,
    /// Default of a template's `trust_agent_addresses`.
    pub trusts_agent_addresses: bool,
    /// `None`: it resolves images. `Some`: it does not, and what to do instead.
    pub images_instead: Option<&'static str>,
    /// `None`: it has load balancers. `Some`: it has none, and what to do instead.
    pub load_balancers_instead: Option<&'static str>,
    /// Default of `create_burst` and `create_rate_limit`.
    pub create_pace: CreatePace,
    /// A `garbage_collection.registration_timeout` below this deserves a warning: instances take long to start here.
    pub min_registration_timeout: Option<Duration>,
}

/// What a group asks for in its merged args, beside what the config says of it elsewhere.
#[derive(Debug, Clone, Copy, Default)]
pub struct ArgsContext {
    /// Wanted size of the group, where it is known; some args only suit a group of one.
    pub size: Option<u32>,
}

/// Parts of a merged group that have to fit each other.
#[derive(Debug, Clone, Copy)]
pub struct GroupContext<'a> {
    /// Merged, not rendered.
    pub args: &'a Object,
    /// Those of its subnet pool.
    pub subnets: &'a [String],
    /// What its load balancers say in the config.
    pub load_balancers: &'a [&'a Object],
}

/// One provider kind as configs know it.
pub trait ProviderSchema: Send + Sync {
    /// `aws`, `process`, …
    fn kind(&self) -> &'static str;

    /// Other names that people write, answered with the right one.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    fn facts(&self) -> KindFacts;

    /// Checks `server.provider.options`.
    fn check_options(&self, options: &Object) -> Vec<SchemaProblem>;

    /// Checks `args`, merged but not rendered: strings may still hold templates, and what is required may come later.
    fn check_args(&self, args: &Object, context: ArgsContext) -> Vec<SchemaProblem>;

    /// Checks `args` after rendering: no string holds a template any more, and what is required is there.
    fn check_rendered_args(&self, args: &Object, context: ArgsContext) -> Vec<SchemaProblem> {
        self.check_args(args, context)
    }

    /// Checks an instance type, e.g. Proxmox's `cpu:4,memory:8192`. Says what is wrong with it.
    fn check_instance_type(&self, _instance_type: &str) -> Option<String> {
        None
    }

    /// Checks a subnet of a pool, e.g. Proxmox's `vmbr0.100`. Says what is wrong with it.
    fn check_subnet(&self, _subnet: &str) -> Option<String> {
        None
    }

    /// Checks one entry of `load_balancers` without its `provider`. Not called where the kind has no load balancers.
    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem>;

    /// Every key of one entry of `load_balancers` by its path, with what its value should be: `groups[0]`, `string`. A
    /// key with several possible values occurs several times. For lists of all keys that a config may have.
    fn load_balancer_keys(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Checks `server.leader_network`. An address that could not be read is `None`.
    fn check_leader_network(&self, ip: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem>;

    /// Checks parts of a merged group against each other. Paths begin at the group: `args`, `subnet_pool`,
    /// `load_balancers`.
    fn check_group(&self, _group: GroupContext<'_>) -> Vec<SchemaProblem> {
        Vec::new()
    }
}

impl fmt::Debug for dyn ProviderSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())
    }
}
