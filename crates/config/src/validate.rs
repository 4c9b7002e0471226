//! From a tree to a config: shape, values, references, merged groups.
//!
//! One function per part of the file. Each takes what it can, complains about the rest and goes on; a part that needs
//! another takes it as `Option` and stays silent where that part is already reported.

mod check;
mod files;
mod groups;
mod images;
mod provider;
mod server;
mod sites;
mod templates;

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::{
    ids::{Shard, Tenant},
    ports::schema::ProviderSchema,
    value::Object,
};

use crate::{
    jsonc,
    model::Config,
    path::Path,
    problems::{Code, Problem, Problems, Report},
    raw::{At, Fields, string_map},
};

/// What a config is held against besides itself.
pub struct Checks<'a> {
    /// Every provider kind there is, whether or not this build can run it.
    pub schemas: &'static [&'static dyn ProviderSchema],
    /// The shard that this server serves, if it serves one.
    pub shard: Option<&'a Shard>,
}

impl Checks<'static> {
    /// What can be known of a config alone.
    pub fn offline(schemas: &'static [&'static dyn ProviderSchema]) -> Self {
        Self { schemas, shard: None }
    }
}

/// The outcome of reading a config file.
#[derive(Debug)]
pub struct Loaded {
    pub report: Report,
    /// Present only if the report has no error.
    pub config: Option<Config>,
}

/// Hints for keys of the top level that belong elsewhere.
const TOP_HINTS: &[(&str, &str)] = &[
    ("cluster", "it belongs into the `server` block: server.cluster_id"),
    ("cluster_id", "it belongs into the `server` block: server.cluster_id"),
    ("shard", "it belongs into the `server` block: server.shard"),
    ("provider", "it belongs into the `server` block: server.provider"),
    ("subnet_pools", "it belongs into the `server` block: server.subnet_pools"),
    ("secrets", "it belongs into the `server` block: server.secrets"),
    ("leader_timeout", "write it as server.leader_election.ttl"),
    ("frequent_interval", "write it as server.leader_election.renew_interval"),
    ("vars", "it belongs into the `defaults` block: defaults.vars"),
    ("args", "it belongs into the `defaults` block: defaults.args"),
    ("userdata", "it belongs into the `defaults` block: defaults.userdata"),
];

/// Reads and validates the config file `bytes`, which came from `object`.
///
/// Pure: the same bytes and checks give the same answer, and nothing else is looked at.
pub fn load(object: &str, bytes: &[u8], checks: &Checks<'_>) -> Loaded {
    let problems = Problems::default();
    let (tree, faults) = jsonc::parse(bytes);
    for fault in faults {
        problems.push(fault);
    }
    let config = tree.and_then(|tree| {
        let config = read(&At { problems: &problems, path: Path::root(), node: &tree }, checks)?;
        check::check_groups(&problems, &tree, &config);
        Some(config)
    });
    let config = config.filter(|_| !problems.has_errors());
    Loaded { report: problems.into_report(object), config }
}

/// Every key that reading the config `bytes` asks for, by its path, with what its value should be: a key is asked for
/// wherever its object is, whether it is there or not.
///
/// For tools and tests that need to know which keys there are.
pub fn asked(bytes: &[u8], checks: &Checks<'_>) -> BTreeMap<String, BTreeSet<String>> {
    let problems = Problems::with_asked();
    if let (Some(tree), _) = jsonc::parse(bytes) {
        read(&At { problems: &problems, path: Path::root(), node: &tree }, checks);
    }
    problems.into_asked()
}

/// Shape, values and references. `None` if a part is missing without which nothing can be merged.
fn read(root: &At<'_>, checks: &Checks<'_>) -> Option<Config> {
    let top = root.fields()?.with_hints(TOP_HINTS);
    let server = top.need("server").map(|at| server::read(&at, checks));
    let kind = server.as_ref().and_then(|it| it.kind);
    let tenants_at = top.get("tenants");
    let images_at = top.get("images");
    let certificates_at = top.get("certificates");
    let load_balancers_at = top.get("load_balancers");
    let defaults_at = top.get("defaults");
    let templates_at = top.get("templates");
    let groups_at = top.get("groups");
    top.finish();

    let tenants = groups::read_tenants(tenants_at.as_ref());
    let images = images_at.map(|at| images::read_images(&at, kind, checks)).unwrap_or_default();
    let certificates = images::read_certificates(certificates_at.as_ref(), kind);
    let load_balancers =
        load_balancers_at.as_ref().map(|at| images::read_load_balancers(at, kind, checks)).unwrap_or_default();
    let defaults = defaults_at.map(|at| templates::read_defaults(&at)).unwrap_or_default();
    let known = templates::Known {
        kind,
        // Broken pools must not make every reference to them wrong as well.
        pools: server.as_ref().and_then(|it| it.pools.as_ref()),
        certificates: &certificates.named,
        certificate_names: certificates_at.as_ref(),
    };
    let templates = templates_at.as_ref().map(|at| templates::read_templates(at, &known)).unwrap_or_default();
    let template_names = groups::names(templates_at.as_ref());
    let lb_names = groups::names(load_balancers_at.as_ref());
    let known_groups =
        groups::Known { pools: known.pools, templates: &template_names, load_balancers: &lb_names, tenants: &tenants };
    let groups = groups_at.map(|at| groups::read_groups(&at, &known_groups)).unwrap_or_default();

    let server = server?;
    let mut all = tenants;
    all.insert(Tenant::default_tenant());
    Some(Config {
        server: server.server?,
        tenants: all,
        images,
        certificates,
        load_balancers,
        defaults,
        templates,
        groups,
    })
}

/// `[A-Za-z_][A-Za-z0-9_]{0,127}`
pub(crate) fn is_var_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && text.len() <= 128
}

/// `[A-Za-z0-9_][A-Za-z0-9._-]{0,127}` without `..`: names of certificates, files, secrets and keys.
pub(crate) fn is_file_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
        && text.len() <= 128
        && !text.contains("..")
}

/// `[A-Za-z0-9][A-Za-z0-9_-]{0,31}`
pub(crate) fn is_template_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphanumeric())
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && text.len() <= 32
}

/// `[A-Za-z_][A-Za-z0-9_-]{0,63}`
fn is_image_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'_')
        && bytes.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && text.len() <= 64
}

pub(crate) use server::is_dns_name;
pub(crate) use templates::MAX_SIZE;

const FILE_NAME_GRAMMAR: &str = "use 1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter, digit or _, without `..`";

fn read_vars(at: &At<'_>) -> BTreeMap<String, String> {
    string_map(at, is_var_name, "use letters, digits and _, beginning with a letter or _")
}

/// An `args` object, whose nulls mean something and are kept.
fn read_args(at: &At<'_>) -> Object {
    at.wants("object");
    match &at.node.json {
        jsonc::Json::Object(entries) => jsonc::to_object(entries),
        _ => {
            at.entries(); // complains about the type
            Object::new()
        }
    }
}

fn conflict(fields: &Fields<'_>, key: &str, message: impl Into<String>, help: impl Into<String>) {
    let at = fields.at_key(key);
    at.problems.push(Problem::new(Code::Conflict, at.path.to_string(), at.pos(), message).with_help(help));
}
