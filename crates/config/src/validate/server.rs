//! The `server` block.

use std::{collections::BTreeMap, net::IpAddr, ops::RangeInclusive, time::Duration};

use nstance_core::{
    ids::{ClusterId, Shard, SubnetPool},
    ports::schema::SchemaProblem,
};

use super::{Checks, conflict, provider, read_args};
use crate::{
    duration,
    model::{
        Address, Advertise, Bind, EncryptionKey, ErrorExitJitter, Expiry, GarbageCollection, KeyProvider,
        LeaderElection, LeaderNetwork, Provider, ProviderKind, Safety, Secrets, SecretsProvider, Server,
    },
    problems::{Code, Problem, suggest},
    raw::{At, Fields},
};

/// The block as far as it could be read. The parts that others refer to are there even if another part is broken.
pub(super) struct Read {
    pub(super) server: Option<Server>,
    pub(super) kind: Option<ProviderKind>,
    pub(super) pools: Option<BTreeMap<SubnetPool, Vec<String>>>,
}

const HINTS: &[(&str, &str)] = &[
    ("cluster", "write it as `cluster_id`"),
    ("leader_timeout", "write it as `leader_election.ttl`"),
    ("frequent_interval", "write it as `leader_election.renew_interval`"),
];

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(super) fn read(at: &At<'_>, checks: &Checks<'_>) -> Read {
    let Some(fields) = at.fields() else { return Read { server: None, kind: None, pools: None } };
    let fields = fields.with_hints(HINTS);
    let cluster_id = fields.need("cluster_id").and_then(|at| at.parsed::<ClusterId>());
    let shard = fields.need("shard").and_then(|at| read_shard(&at, checks));
    let (provider, kind) = fields.need("provider").map_or((None, None), |at| read_provider(&at, checks));
    let pools = fields.need("subnet_pools").and_then(|at| read_pools(&at, kind));
    let dynamic = fields.get("dynamic_subnet_pools").map(|at| read_dynamic(&at, pools.as_ref())).unwrap_or_default();
    let secrets = read_secrets(&fields, kind);
    let bind = read_bind(fields.get("bind").as_ref(), kind);
    let leader_network = fields.get("leader_network").and_then(|at| read_leader_network(&at, kind));
    let advertise = read_advertise(fields.get("advertise").as_ref(), &bind, leader_network.as_ref(), kind);
    let leader_election = read_leader_election(fields.get("leader_election").as_ref());
    let garbage_collection = read_gc(&fields, kind);
    let expiry = fields.get("expiry").map(|at| read_expiry(&at)).unwrap_or_default();
    let error_exit_jitter = read_jitter(fields.get("error_exit_jitter").as_ref());
    let safety = read_safety(fields.get("safety").as_ref());
    let create_rate_limit = fields.get("create_rate_limit").and_then(|at| at.duration());
    let create_burst = fields.get("create_burst").and_then(|at| at.int(1..=10_000));
    let max_parallel_creates = fields.int("max_parallel_creates", 1..=1000, 64);
    let health_check_interval = at_least(&fields, "health_check_interval", secs(60), secs(1));
    let shutdown_grace = fields.duration("shutdown_grace", secs(60));
    let default_drain_timeout = fields.duration("default_drain_timeout", secs(300));
    let image_refresh_interval = fields.duration("image_refresh_interval", secs(6 * 3600));
    let request_timeout = at_least(&fields, "request_timeout", secs(30), millis(1));
    let shutdown_timeout = fields.duration("shutdown_timeout", secs(10));
    fields.finish();

    let whole = (|| {
        Some(Server {
            // Placeholders let the rest of the file be checked; their problems keep the config from being used.
            cluster_id: cluster_id.or_else(|| "x".parse().ok())?,
            shard: shard.or_else(|| "x".parse().ok())?,
            provider: provider?,
            subnet_pools: pools.clone()?,
            dynamic_subnet_pools: dynamic,
            secrets,
            bind,
            advertise,
            leader_network,
            leader_election,
            garbage_collection,
            expiry,
            create_rate_limit,
            create_burst,
            max_parallel_creates,
            health_check_interval,
            shutdown_grace,
            default_drain_timeout,
            image_refresh_interval,
            request_timeout,
            shutdown_timeout,
            error_exit_jitter,
            safety,
        })
    })();
    Read { server: whole, kind, pools }
}

/// A duration with a floor below which it would make no sense.
fn at_least(fields: &Fields<'_>, key: &'static str, default: Duration, least: Duration) -> Duration {
    let Some(at) = fields.get(key) else { return default };
    let Some(duration) = at.duration() else { return default };
    if duration < least {
        at.bad(format!("`{key}` is too short"), format!("use {} or more", duration::format(least)));
        return default;
    }
    duration
}

fn read_shard(at: &At<'_>, checks: &Checks<'_>) -> Option<Shard> {
    let shard: Shard = at.parsed()?;
    if let Some(expected) = checks.shard.filter(|it| **it != shard) {
        let message = format!("this is the config of shard `{shard}`, but shard `{expected}` is served here");
        at.report(Code::Conflict, message, Some("upload the config of the right shard, or change --shard".to_owned()));
    }
    Some(shard)
}

fn read_provider(at: &At<'_>, checks: &Checks<'_>) -> (Option<Provider>, Option<ProviderKind>) {
    let Some(fields) = at.fields() else { return (None, None) };
    let kind_at = fields.need("kind");
    let kind = kind_at.as_ref().and_then(|at| provider::read_kind(at, checks));
    let region = fields.need("region").and_then(|at| name64(&at));
    let zone = fields.need("zone").and_then(|at| name64(&at));
    let options_at = fields.get("options");
    let options = options_at.as_ref().map(read_args).unwrap_or_default();
    fields.finish();
    if let Some(kind) = kind {
        let problems = kind.schema().check_options(&options);
        match &options_at {
            Some(options_at) => provider::report(options_at, problems, &[]),
            None => {
                let below = |it: SchemaProblem| SchemaProblem {
                    path: std::iter::once("options".to_owned()).chain(it.path).collect(),
                    ..it
                };
                provider::report(at, problems.into_iter().map(below).collect(), &[]);
            }
        }
    }
    let provider = (|| {
        Some(Provider { kind: kind?, region: region.unwrap_or_default(), zone: zone.unwrap_or_default(), options })
    })();
    (provider, kind)
}

fn name64(at: &At<'_>) -> Option<String> {
    let text = at.text()?;
    if 64 < text.chars().count() {
        at.bad("this is longer than 64 characters", "");
        return None;
    }
    Some(text.to_owned())
}

fn read_pools(at: &At<'_>, kind: Option<ProviderKind>) -> Option<BTreeMap<SubnetPool, Vec<String>>> {
    if !at.is_object() {
        at.entries();
        return None;
    }
    let mut pools = BTreeMap::new();
    let mut seen: BTreeMap<&str, String> = BTreeMap::new();
    for (key, value) in at.entries() {
        let pool = key.parsed::<SubnetPool>();
        let mut subnets = Vec::new();
        for item in value.list() {
            let Some(subnet) = item.text() else { continue };
            if let Some(message) = kind.and_then(|kind| kind.schema().check_subnet(subnet)) {
                item.bad(message, "");
            }
            match seen.get(subnet) {
                Some(first) => item.report(
                    Code::Conflict,
                    format!("subnet `{subnet}` is already in {first}"),
                    Some("a subnet belongs to one pool, once".to_owned()),
                ),
                None => {
                    seen.insert(subnet, value.path.to_string());
                    subnets.push(subnet.to_owned());
                }
            }
        }
        if subnets.is_empty() && value.list().is_empty() && matches!(value.node.json, crate::jsonc::Json::Array(_)) {
            value.bad("a subnet pool needs at least one subnet", "list the provider's subnets in order of preference");
        }
        if let Some(pool) = pool {
            pools.insert(pool, subnets);
        }
    }
    if pools.is_empty() && at.entries().is_empty() {
        at.bad("at least one subnet pool is needed", "add one: \"workers\": [\"subnet-…\"]");
        return None;
    }
    Some(pools)
}

fn read_dynamic(at: &At<'_>, pools: Option<&BTreeMap<SubnetPool, Vec<String>>>) -> Vec<SubnetPool> {
    at.list().iter().filter_map(|item| read_pool_ref(item, pools)).collect()
}

/// A reference to a subnet pool.
pub(super) fn read_pool_ref(at: &At<'_>, pools: Option<&BTreeMap<SubnetPool, Vec<String>>>) -> Option<SubnetPool> {
    let text = at.string()?;
    let pools = pools?;
    if let Some((pool, _)) = pools.get_key_value(text) {
        return Some(pool.clone());
    }
    let help = suggest(text, "pools", pools.keys().map(SubnetPool::as_str));
    at.report(Code::BadReference, format!("subnet pool {} does not exist", at.show(text)), help);
    None
}

const SECRET_STORES: &[(&str, &str)] = &[("gcp-secret-manager", "google-secret-manager")];

fn read_secrets(server: &Fields<'_>, kind: Option<ProviderKind>) -> Secrets {
    let mut secrets = Secrets {
        provider: SecretsProvider::ObjectStorage,
        prefix: String::new(),
        encryption_key: None,
        old_encryption_keys: Vec::new(),
        cache_ttl: secs(300),
    };
    let Some(at) = server.get("secrets") else {
        // Object storage is the default, and it never stores a key in the clear.
        let problem = Problem::new(
            Code::Missing,
            server.at.path.key("secrets").key("encryption_key").to_string(),
            server.at.pos(),
            "secrets in object storage need an encryption key",
        );
        let help = "add \"secrets\": { \"encryption_key\": { \"provider\": \"env\" } }, or another secrets.provider";
        server.at.problems.push(problem.with_help(help));
        return secrets;
    };
    let Some(fields) = at.fields() else { return secrets };
    let provider_at = fields.get("provider");
    let provider = match &provider_at {
        Some(at) => at.one_of(SecretsProvider::ALL, SECRET_STORES),
        None => Some(SecretsProvider::ObjectStorage),
    };
    if let Some(prefix) = fields.get("prefix").and_then(|at| at.string()) {
        secrets.prefix = prefix.to_owned();
    }
    let key_at = fields.get("encryption_key");
    secrets.encryption_key = key_at.as_ref().and_then(read_encryption_key);
    if let Some(at) = fields.get("old_encryption_keys") {
        secrets.old_encryption_keys = at.list().iter().filter_map(read_encryption_key).collect();
    }
    secrets.cache_ttl = fields.duration("cache_ttl", secrets.cache_ttl);
    match provider {
        Some(SecretsProvider::ObjectStorage) if !fields.has("encryption_key") => {
            let path = fields.at.path.key("encryption_key").to_string();
            let message = "secrets in object storage need an encryption key";
            let problem = Problem::new(Code::Missing, path, fields.at.pos(), message);
            fields.at.problems.push(problem.with_help("add \"encryption_key\": { \"provider\": \"env\" }"));
        }
        Some(SecretsProvider::ObjectStorage) | None => {}
        Some(other) => {
            if fields.has("encryption_key") {
                let message = format!("`encryption_key` is for object storage, not for {other}");
                conflict(&fields, "encryption_key", message, "remove it; that store encrypts by itself");
            }
            if !secrets.old_encryption_keys.is_empty() {
                let message = format!("`old_encryption_keys` are for object storage, not for {other}");
                conflict(&fields, "old_encryption_keys", message, "remove them");
            }
            if other == SecretsProvider::Memory
                && kind.is_some_and(|kind| !kind.is_dev())
                && let Some(at) = &provider_at
            {
                at.bad("secrets in memory are for the providers process, tmux and fake", "they would forget the CA");
            }
        }
    }
    fields.finish();
    secrets.provider = provider.unwrap_or(secrets.provider);
    secrets
}

fn read_encryption_key(at: &At<'_>) -> Option<EncryptionKey> {
    let fields = at.fields()?;
    let provider = fields.need("provider").and_then(|at| at.one_of(KeyProvider::ALL, SECRET_STORES));
    let source_at = fields.get("source");
    let source = source_at.as_ref().and_then(|at| at.text()).map(str::to_owned);
    let options = fields.get("options");
    let mut project_id = None;
    if let Some(options) = options.as_ref().and_then(|at| at.fields()) {
        project_id = options.text("project_id");
        options.finish();
    }
    if let Some(options) = options.filter(|_| provider.is_some_and(|it| it != KeyProvider::GoogleSecretManager)) {
        options.bad("`options` are for google-secret-manager only", "remove them");
    }
    let source = match (provider, source) {
        (Some(KeyProvider::Env), None) if source_at.is_none() => Some("NSTANCE_ENCRYPTION_KEY".to_owned()),
        (Some(KeyProvider::File), Some(path)) if !path.starts_with('/') => {
            if let Some(at) = &source_at {
                at.bad("the path of a key file must be absolute", "begin it with `/`");
            }
            None
        }
        (Some(_), None) if source_at.is_none() => {
            fields.missing("source");
            None
        }
        (_, source) => source,
    };
    fields.finish();
    Some(EncryptionKey { provider: provider?, source: source?, project_id })
}

const ENDPOINTS: [&str; 5] = ["health_addr", "election_addr", "registration_addr", "operator_addr", "agent_addr"];

/// Reads `host:port`, `[v6]:port` or `:port`.
fn read_address(at: &At<'_>, kind: Option<ProviderKind>) -> Option<Address> {
    let text = at.string()?;
    let parsed = parse_address(text);
    let Some(address) = parsed else {
        at.bad(format!("{} is no address", at.show(text)), "write host:port, [v6]:port or :port, port 1 to 65535");
        return None;
    };
    if address.port == 0 && kind.is_some_and(|kind| !kind.is_dev()) {
        at.bad("port 0 is for the providers process, tmux and fake", "use 1 to 65535");
        return None;
    }
    Some(address)
}

fn parse_address(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let port = port.parse().ok()?;
    let host = match host.strip_prefix('[') {
        Some(v6) => v6.strip_suffix(']').filter(|it| it.parse::<std::net::Ipv6Addr>().is_ok())?,
        None if host.is_empty() || host.parse::<std::net::Ipv4Addr>().is_ok() || is_dns_name(host) => host,
        None => return None,
    };
    Some(Address { host: host.to_owned(), port })
}

/// A host name of RFC 1123; an all-numeric last label would be a mistyped address.
pub(crate) fn is_dns_name(text: &str) -> bool {
    let name = text.strip_suffix('.').unwrap_or(text);
    !name.is_empty()
        && name.len() <= 253
        && name.split('.').all(|label| {
            !label.is_empty()
                && label.len() <= 63
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        })
        && !name.rsplit('.').next().is_some_and(|label| label.bytes().all(|byte| byte.is_ascii_digit()))
}

fn read_bind(at: Option<&At<'_>>, kind: Option<ProviderKind>) -> Bind {
    let fields = at.and_then(|at| at.fields());
    let mut addresses = Vec::new();
    for (i, key) in ENDPOINTS.into_iter().enumerate() {
        let default = Address { host: "0.0.0.0".to_owned(), port: 8990 + u16::try_from(i).unwrap_or(0) };
        let written = fields.as_ref().and_then(|fields| fields.get(key));
        let address = written.as_ref().and_then(|at| read_address(at, kind)).unwrap_or(default);
        let clash = addresses.iter().position(|it: &Address| {
            it.port == address.port && it.port != 0 && (it.host == address.host || it.is_any() || address.is_any())
        });
        if let (Some(clash), Some(fields)) = (clash, &fields) {
            let message = format!("`{key}` and `{}` are the same port {}", ENDPOINTS[clash], address.port);
            let key = if written.is_some() { key } else { ENDPOINTS[clash] };
            conflict(fields, key, message, "the five listeners need five ports");
        }
        addresses.push(address);
    }
    if let Some(fields) = fields {
        fields.finish();
    }
    let mut addresses = addresses.into_iter();
    let mut next = || addresses.next().unwrap_or(Address { host: String::new(), port: 0 });
    Bind { health: next(), election: next(), registration: next(), operator: next(), agent: next() }
}

fn read_advertise(
    at: Option<&At<'_>>,
    bind: &Bind,
    leader: Option<&LeaderNetwork>,
    kind: Option<ProviderKind>,
) -> Advertise {
    let fields = at.and_then(|at| at.fields());
    let read = |key: &'static str, bind: &Address, leader: Option<&LeaderNetwork>| {
        let written = fields.as_ref().and_then(|fields| fields.get(key)).and_then(|at| read_address(&at, kind));
        let mut address = written.unwrap_or(Address { host: String::new(), port: bind.port });
        if address.is_any() {
            address.host = leader.map(|it| it.ip.to_string()).unwrap_or_default();
        }
        address
    };
    let mut advertise = Advertise {
        health: read("health_addr", &bind.health, None),
        election: read("election_addr", &bind.election, None),
        registration: read("registration_addr", &bind.registration, leader),
        operator: read("operator_addr", &bind.operator, leader),
        agent: read("agent_addr", &bind.agent, leader),
        extra_sans: Vec::new(),
    };
    if let Some(fields) = fields {
        for item in fields.get("extra_sans").map(|at| at.list()).unwrap_or_default() {
            let Some(text) = item.text() else { continue };
            if text.parse::<IpAddr>().is_ok() || is_dns_name(text.strip_prefix("*.").unwrap_or(text)) {
                advertise.extra_sans.push(text.to_owned());
            } else {
                item.bad(format!("{} is neither a DNS name nor an IP address", item.show(text)), "");
            }
        }
        fields.finish();
    }
    advertise
}

fn read_leader_network(at: &At<'_>, kind: Option<ProviderKind>) -> Option<LeaderNetwork> {
    let fields = at.fields()?;
    let ip = fields.need("ip").and_then(|at| {
        let text = at.string()?;
        let ip: Option<IpAddr> = text.parse().ok();
        if ip.is_none_or(|ip| ip.is_unspecified()) {
            at.bad(format!("{} is no IP address", at.show(text)), "write the address that moves with leadership");
            return None;
        }
        ip
    });
    let interface_id = fields.text("interface_id");
    if let Some(kind) = kind {
        // One that could not be read is there nevertheless.
        let written = fields.has("interface_id").then(|| interface_id.as_deref().unwrap_or_default());
        provider::report(at, kind.schema().check_leader_network(ip, written), &[]);
    }
    fields.finish();
    Some(LeaderNetwork { ip: ip?, interface_id })
}

fn read_leader_election(at: Option<&At<'_>>) -> LeaderElection {
    let mut election = LeaderElection { ttl: secs(6), renew_interval: secs(2), margin: secs(1) };
    let Some(fields) = at.and_then(|at| at.fields()) else { return election };
    election.renew_interval = at_least(&fields, "renew_interval", election.renew_interval, millis(1));
    election.margin = at_least(&fields, "margin", election.margin, millis(200));
    if let Some((at, ttl)) = fields.get("ttl").and_then(|at| Some((at.clone(), at.duration()?))) {
        if ttl < secs(2) || secs(300) < ttl {
            at.bad("the ttl of a lease is out of range", "use 2s to 5m");
            fields.finish();
            return election;
        }
        election.ttl = ttl;
    }
    if election.ttl <= 2 * election.renew_interval + election.margin {
        let message = format!(
            "2 · renew_interval {} + margin {} must be less than ttl {}",
            duration::format(election.renew_interval),
            duration::format(election.margin),
            duration::format(election.ttl),
        );
        let key = ["ttl", "renew_interval", "margin"].into_iter().find(|key| fields.has(key)).unwrap_or("ttl");
        conflict(&fields, key, message, "a lease must survive one failed renewal");
    }
    fields.finish();
    election
}

fn read_gc(server: &Fields<'_>, kind: Option<ProviderKind>) -> GarbageCollection {
    let mut gc = GarbageCollection {
        interval: secs(120),
        registration_timeout: secs(300),
        deleted_record_retention: secs(1800),
    };
    let at = server.get("garbage_collection");
    let Some(fields) = at.as_ref().and_then(|at| at.fields()) else {
        warn_of_short_registration(server, "garbage_collection", &gc, kind);
        return gc;
    };
    gc.interval = fields.duration("interval", gc.interval);
    gc.registration_timeout = fields.duration("registration_timeout", gc.registration_timeout);
    gc.deleted_record_retention = fields.duration("deleted_record_retention", gc.deleted_record_retention);
    let key = if fields.has("interval") { "interval" } else { "registration_timeout" };
    if gc.is_off() {
        let at = fields.at_key(key);
        let message = "garbage collection is off: instances that never register are not removed";
        at.report(Code::GcOff, message, Some("set both interval and registration_timeout".to_owned()));
    } else if gc.interval.is_zero() || gc.registration_timeout.is_zero() {
        let message = "interval and registration_timeout are zero together or not at all";
        conflict(&fields, key, message, "set both, or both to 0 to switch garbage collection off");
    } else if gc.registration_timeout <= gc.interval {
        let message = format!(
            "interval {} must be less than registration_timeout {}",
            duration::format(gc.interval),
            duration::format(gc.registration_timeout),
        );
        conflict(&fields, key, message, "shorten the interval");
    } else {
        warn_of_short_registration(&fields, "registration_timeout", &gc, kind);
    }
    fields.finish();
    gc
}

/// Instances that need longer than this would be removed while they start.
fn warn_of_short_registration(fields: &Fields<'_>, key: &str, gc: &GarbageCollection, kind: Option<ProviderKind>) {
    let Some(kind) = kind else { return };
    let Some(least) = kind.facts().min_registration_timeout.filter(|least| gc.registration_timeout < *least) else {
        return;
    };
    let (timeout, least) = (duration::format(gc.registration_timeout), duration::format(least));
    let message = format!("registration_timeout {timeout} may be too short for instances of provider {kind}");
    let help = format!("set garbage_collection.registration_timeout to {least} or more");
    fields.at_key(key).report(Code::ProviderWarning, message, Some(help));
}

fn read_expiry(at: &At<'_>) -> Expiry {
    let Some(fields) = at.fields() else { return Expiry::default() };
    let age = |key: &'static str| Some(fields.duration(key, Duration::ZERO)).filter(|it| !it.is_zero());
    let expiry =
        Expiry { eligible_age: age("eligible_age"), forced_age: age("forced_age"), ondemand_age: age("ondemand_age") };
    if let (Some(eligible), Some(forced)) = (expiry.eligible_age, expiry.forced_age)
        && forced <= eligible
    {
        let (eligible, forced) = (duration::format(eligible), duration::format(forced));
        let message = format!("eligible_age {eligible} must be less than forced_age {forced}");
        conflict(&fields, "eligible_age", message, "eligible instances need time before they are forced out");
    }
    fields.finish();
    expiry
}

fn read_jitter(at: Option<&At<'_>>) -> ErrorExitJitter {
    let mut jitter = ErrorExitJitter { min_delay: secs(1), max_delay: secs(5) };
    let Some(fields) = at.and_then(|at| at.fields()) else { return jitter };
    jitter.min_delay = fields.duration("min_delay", jitter.min_delay);
    jitter.max_delay = fields.duration("max_delay", jitter.max_delay);
    if jitter.max_delay < jitter.min_delay {
        let key = if fields.has("min_delay") { "min_delay" } else { "max_delay" };
        let (min, max) = (duration::format(jitter.min_delay), duration::format(jitter.max_delay));
        conflict(&fields, key, format!("min_delay {min} is more than max_delay {max}"), "swap them");
    }
    fields.finish();
    jitter
}

fn read_safety(at: Option<&At<'_>>) -> Safety {
    let mut safety = Safety {
        mass_disconnect_min: 3,
        mass_disconnect_percent: 40,
        mass_disconnect_window: secs(10),
        runaway_base: 10,
        runaway_factor: 3,
        runaway_window: secs(600),
        max_removal_min: 3,
        max_removal_percent: 40,
    };
    const COUNT: RangeInclusive<u32> = 0..=1_000_000;
    const PERCENT: RangeInclusive<u32> = 1..=100;
    let Some(fields) = at.and_then(|at| at.fields()) else { return safety };
    safety.mass_disconnect_min = fields.int("mass_disconnect_min", COUNT, safety.mass_disconnect_min);
    safety.mass_disconnect_percent = fields.int("mass_disconnect_percent", PERCENT, safety.mass_disconnect_percent);
    safety.mass_disconnect_window = fields.duration("mass_disconnect_window", safety.mass_disconnect_window);
    safety.runaway_base = fields.int("runaway_base", COUNT, safety.runaway_base);
    safety.runaway_factor = fields.int("runaway_factor", COUNT, safety.runaway_factor);
    safety.runaway_window = fields.duration("runaway_window", safety.runaway_window);
    safety.max_removal_min = fields.int("max_removal_min", COUNT, safety.max_removal_min);
    safety.max_removal_percent = fields.int("max_removal_percent", PERCENT, safety.max_removal_percent);
    fields.finish();
    safety
}
