//! What clients ask to learn what is served: API groups, resources, and a stub of the OpenAPI documents.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use crate::resources::{Registry, Resource};

/// The verbs of every resource.
const VERBS: [&str; 8] = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

pub(crate) fn version() -> Value {
    json!({
        "major": "1", "minor": "36", "gitVersion": "v1.36.0-nstance-dev", "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

pub(crate) fn core_versions() -> Value {
    json!({ "kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": [] })
}

/// Groups other than the core one, with their versions; the preferred one is first.
fn groups(registry: &Registry) -> BTreeMap<String, Vec<String>> {
    let mut groups: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for resource in registry.all().iter().filter(|it| !it.group.is_empty()) {
        let versions = groups.entry(resource.group.clone()).or_default();
        for version in &resource.versions {
            if !versions.contains(&version.name) {
                versions.push(version.name.clone());
            }
        }
    }
    groups
}

fn group(name: &str, versions: &[String]) -> Value {
    let version = |it: &String| json!({ "groupVersion": format!("{name}/{it}"), "version": it });
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": name,
        "versions": versions.iter().map(version).collect::<Vec<_>>(),
        "preferredVersion": versions.first().map(version),
    })
}

pub(crate) fn group_list(registry: &Registry) -> Value {
    let groups: Vec<_> = groups(registry).iter().map(|(name, versions)| group(name, versions)).collect();
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups })
}

pub(crate) fn one_group(registry: &Registry, name: &str) -> Option<Value> {
    groups(registry).get(name).map(|versions| group(name, versions))
}

fn served_in(registry: &Registry, group: &str, version: &str) -> Vec<Arc<Resource>> {
    let mut all = registry.all();
    all.retain(|it| it.group == group && it.versions.iter().any(|it| it.name == version));
    all
}

/// The resources of a group and version, with their subresources.
pub(crate) fn resource_list(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let served = served_in(registry, group, version);
    if served.is_empty() {
        return None;
    }
    let mut list = Vec::new();
    for resource in &served {
        let mut entry = json!({
            "name": resource.plural, "singularName": resource.singular, "namespaced": resource.namespaced,
            "kind": resource.kind, "verbs": VERBS,
        });
        if !resource.short_names.is_empty() {
            entry["shortNames"] = json!(resource.short_names);
        }
        if !resource.categories.is_empty() {
            entry["categories"] = json!(resource.categories);
        }
        list.push(entry);
        for it in resource.subresources() {
            let mut entry = json!({
                "name": format!("{}/{}", resource.plural, it.name), "singularName": "",
                "namespaced": resource.namespaced, "kind": it.kind, "verbs": it.verbs,
            });
            if let Some((group, version)) = it.group_version {
                entry["group"] = json!(group);
                entry["version"] = json!(version);
            }
            list.push(entry);
        }
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    Some(json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": list }))
}

fn openapi_path(group: &str, version: &str) -> String {
    if group.is_empty() { format!("api/{version}") } else { format!("apis/{group}/{version}") }
}

/// Which OpenAPI documents there are.
pub(crate) fn openapi_index(registry: &Registry) -> Value {
    let groups = groups(registry);
    let core = std::iter::once(openapi_path("", "v1"));
    let others = groups.iter().flat_map(|(group, versions)| versions.iter().map(|it| openapi_path(group, it)));
    let paths: BTreeMap<_, _> = core
        .chain(others)
        .map(|path| {
            let url = json!({ "serverRelativeURL": format!("/openapi/v3/{path}") });
            (path, url)
        })
        .collect();
    json!({ "paths": paths })
}

/// A document without schemas. It says that PATCH takes `fieldValidation` and `dryRun`, without which kubectl refuses to
/// apply; the types of patches are left out, so that kubectl takes the rules it was built with.
pub(crate) fn openapi(registry: &Registry, group: &str, version: &str) -> Option<Value> {
    let served = served_in(registry, group, version);
    if served.is_empty() {
        return None;
    }
    let parameter =
        |name: &str| json!({ "name": name, "in": "query", "schema": { "type": "string", "uniqueItems": true } });
    let paths: BTreeMap<_, _> = served
        .iter()
        .map(|resource| {
            let namespace = if resource.namespaced { "namespaces/{namespace}/" } else { "" };
            let path = format!("/{}/{namespace}{}/{{name}}", openapi_path(group, version), resource.plural);
            let patch = json!({
                "description": format!("partially update the specified {}", resource.kind),
                "operationId": format!("patch{}{}", resource.kind, version),
                "parameters": [
                    parameter("dryRun"), parameter("fieldManager"), parameter("fieldValidation"), parameter("force"),
                ],
                "responses": { "200": { "description": "OK" } },
                "x-kubernetes-action": "patch",
                "x-kubernetes-group-version-kind": { "group": group, "version": version, "kind": resource.kind },
            });
            (path, json!({ "patch": patch }))
        })
        .collect();
    Some(json!({ "openapi": "3.0.0", "info": { "title": "Kubernetes", "version": "unversioned" }, "paths": paths }))
}
