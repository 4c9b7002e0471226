//! `tenants` and `groups`.

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::ids::{GroupKey, GroupRef, LbKey, SubnetPool, Tenant};

use super::{read_args, read_vars, server::read_pool_ref, templates::MAX_SIZE};
use crate::{
    jsonc::{Json, Node},
    model::StaticGroup,
    path::Path,
    problems::{Code, suggest},
    raw::{At, Key},
};

/// What groups may refer to.
pub(super) struct Known<'a> {
    pub(super) pools: Option<&'a BTreeMap<SubnetPool, Vec<String>>>,
    pub(super) templates: &'a [&'a str],
    pub(super) load_balancers: &'a [&'a str],
    pub(super) tenants: &'a BTreeSet<Tenant>,
}

/// The keys of a block as written: an entry with a fault of its own still exists.
pub(super) fn names<'a>(at: Option<&At<'a>>) -> Vec<&'a str> {
    match at.map(|at| &at.node.json) {
        Some(Json::Object(entries)) => entries.iter().map(|entry| entry.key.as_str()).collect(),
        _ => Vec::new(),
    }
}

/// The listed tenants; `default` is not among them.
pub(super) fn read_tenants(at: Option<&At<'_>>) -> BTreeSet<Tenant> {
    let mut tenants = BTreeSet::new();
    for (key, value) in at.map(|at| at.entries()).unwrap_or_default() {
        let tenant = key.parsed::<Tenant>();
        if key.text() == "default" {
            key.bad("tenant `default` exists by itself", "remove it from `tenants`");
        }
        if let Some(fields) = value.fields() {
            fields.finish();
        }
        tenants.extend(tenant);
    }
    tenants
}

const GROUP_FIELDS: [&str; 10] = [
    "template",
    "size",
    "instance_type",
    "instance_type_fallbacks",
    "subnet_pool",
    "vars",
    "drain_timeout",
    "rollout_paused",
    "load_balancers",
    "args",
];

pub(super) fn read_groups(at: &At<'_>, known: &Known<'_>) -> BTreeMap<GroupRef, StaticGroup> {
    let mut groups = BTreeMap::new();
    for (key, value) in at.entries() {
        if is_flat(key.text(), value.node, known) {
            insert(&mut groups, Tenant::default_tenant(), &key, &value, known);
            continue;
        }
        let tenant = key.parsed::<Tenant>();
        if let Some(tenant) = &tenant
            && *tenant != Tenant::default_tenant()
            && !known.tenants.contains(tenant)
        {
            let tenants = known.tenants.iter().map(Tenant::as_str).chain(["default"]);
            let near = suggest(tenant.as_str(), "tenants", tenants).map(|it| format!("{it}; or ")).unwrap_or_default();
            let help = format!("{near}list it in `tenants`");
            key.report(Code::BadReference, format!("tenant `{tenant}` does not exist"), help);
        }
        for (key, value) in value.entries() {
            let tenant = tenant.clone().unwrap_or_else(Tenant::default_tenant);
            insert(&mut groups, tenant, &key, &value, known);
        }
    }
    groups
}

/// Whether an entry below `groups` is a group of tenant `default` rather than a tenant.
///
/// A string `template` decides. Without one, an entry that holds other fields of a group is taken for a group that
/// lacks its template: the more helpful of two complaints.
fn is_flat(name: &str, node: &Node, known: &Known<'_>) -> bool {
    if matches!(node.get("template").map(|it| &it.json), Some(Json::String(_))) {
        return true;
    }
    let tenant = name == "default" || known.tenants.iter().any(|it| it.as_str() == name);
    !tenant
        && GROUP_FIELDS
            .iter()
            .any(|field| node.get(field).is_some_and(|it| !matches!(it.json, Json::Object(_) | Json::Null)))
}

fn insert(
    groups: &mut BTreeMap<GroupRef, StaticGroup>,
    tenant: Tenant,
    key: &Key<'_>,
    value: &At<'_>,
    known: &Known<'_>,
) {
    let name = key.parsed::<GroupKey>();
    let group = read_group(value, known);
    let Some(name) = name else { return };
    let group_ref = GroupRef::new(tenant, name);
    if let Some(first) = groups.get(&group_ref) {
        let message = format!("group {group_ref} is defined twice");
        key.report(Code::Conflict, message, format!("the other one is {}", first.path));
        return;
    }
    groups.extend(group.map(|group| (group_ref, group)));
}

fn read_group(at: &At<'_>, known: &Known<'_>) -> Option<StaticGroup> {
    let fields = at.fields()?;
    let template = fields.need("template").and_then(|at| {
        let name = at.string()?;
        if !known.templates.contains(&name) {
            let help = suggest(name, "templates", known.templates.iter().copied());
            at.report(Code::BadReference, format!("template {} does not exist", at.show(name)), help);
            return None;
        }
        Some(name.to_owned())
    });
    let group = StaticGroup {
        template: template.clone().unwrap_or_default(),
        size: fields.get("size").and_then(|at| at.int(0..=MAX_SIZE)),
        instance_type: fields.text("instance_type"),
        instance_type_fallbacks: fields.get("instance_type_fallbacks").map(|at| at.strings()),
        subnet_pool: fields.get("subnet_pool").and_then(|at| read_pool_ref(&at, known.pools)),
        vars: fields.get("vars").map(|at| read_vars(&at)).unwrap_or_default(),
        drain_timeout: fields.get("drain_timeout").and_then(|at| at.duration()),
        rollout_paused: fields.get("rollout_paused").and_then(|at| at.bool()),
        load_balancers: fields.get("load_balancers").map(|at| read_balancers(&at, known)).unwrap_or_default(),
        args: fields.get("args").map(|at| read_args(&at)).unwrap_or_default(),
        path: Path(at.path.0.clone()),
    };
    fields.finish();
    template.map(|_| group)
}

fn read_balancers(at: &At<'_>, known: &Known<'_>) -> Vec<LbKey> {
    let mut keys: Vec<LbKey> = Vec::new();
    for item in at.list() {
        let Some(name) = item.string() else { continue };
        if !known.load_balancers.contains(&name) {
            let help = suggest(name, "load balancers", known.load_balancers.iter().copied());
            item.report(Code::BadReference, format!("load balancer {} does not exist", item.show(name)), help);
        } else if let Ok(key) = name.parse::<LbKey>() {
            if keys.contains(&key) {
                item.report(Code::Conflict, format!("load balancer `{key}` is listed twice"), None);
            } else {
                keys.push(key);
            }
        }
    }
    keys
}
