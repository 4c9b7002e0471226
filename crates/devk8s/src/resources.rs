//! What is served: the built-in resources, and those of stored CustomResourceDefinitions.
//!
//! A definition is looked at for names, versions, columns and subresources only, never for its schema.

mod builtin;

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError, RwLock},
};

use serde_json::Value;

use crate::object::text;

/// The resource whose objects define others.
pub(crate) const DEFINITIONS: &str = "customresourcedefinitions.apiextensions.k8s.io";

/// One column of a table.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Column {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) description: String,
    pub(crate) path: String,
    /// Columns above 0 are shown by `-o wide` only.
    pub(crate) priority: i64,
}

/// Where a kind keeps its number of replicas, as JSON pointers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScalePaths {
    pub(crate) replicas: String,
    pub(crate) status_replicas: String,
    pub(crate) selector: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Version {
    pub(crate) name: String,
    pub(crate) columns: Option<Vec<Column>>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resource {
    /// `plural.group`, or `plural` for the core group: how Kubernetes names it in messages.
    pub(crate) id: String,
    pub(crate) group: String,
    /// Served versions; objects are stored in the first.
    pub(crate) versions: Vec<Version>,
    pub(crate) plural: String,
    pub(crate) singular: String,
    pub(crate) kind: String,
    pub(crate) list_kind: String,
    pub(crate) short_names: Vec<String>,
    pub(crate) categories: Vec<String>,
    pub(crate) namespaced: bool,
    pub(crate) has_status: bool,
    pub(crate) scale: Option<ScalePaths>,
    /// Served by a definition on a real API server.
    pub(crate) custom: bool,
    /// Directory of its files.
    pub(crate) dir: String,
    /// Fields that may be selected, beside name and namespace, as `spec.a.b`.
    pub(crate) selectable: Vec<String>,
}

impl Resource {
    /// `group/version`, or `version` for the core group.
    pub(crate) fn api_version(&self, version: &str) -> String {
        if self.group.is_empty() { version.to_owned() } else { format!("{}/{version}", self.group) }
    }

    pub(crate) fn storage_api_version(&self) -> String {
        self.api_version(self.versions.first().map_or("v1", |it| &it.name))
    }

    /// Whether the kind counts changes of its spec. Kinds of the core group that only hold data do not.
    pub(crate) fn counts_generations(&self) -> bool {
        const WITHOUT: [&str; 9] = [
            "namespaces",
            "secrets",
            "configmaps",
            "nodes",
            "events",
            "serviceaccounts",
            "leases.coordination.k8s.io",
            "volumeattachments.storage.k8s.io",
            "bindings",
        ];
        !WITHOUT.contains(&self.id.as_str())
    }

    /// Whether an update must name the resource version it is based on.
    pub(crate) fn needs_version(&self) -> bool {
        self.custom || ["leases.coordination.k8s.io", DEFINITIONS].contains(&self.id.as_str())
    }

    /// Subresources with kind, group, version and verbs, for discovery.
    pub(crate) fn subresources(&self) -> Vec<Subresource> {
        const WRITE: &[&str] = &["get", "patch", "update"];
        const CREATE: &[&str] = &["create"];
        let mut all = Vec::new();
        let mut add = |name, kind, group_version, verbs| all.push(Subresource { name, kind, group_version, verbs });
        if self.has_status {
            add("status", self.kind.clone(), None, WRITE);
        }
        if self.scale.is_some() {
            add("scale", "Scale".to_owned(), Some(("autoscaling", "v1")), WRITE);
        }
        match self.id.as_str() {
            "pods" => {
                add("eviction", "Eviction".to_owned(), Some(("policy", "v1")), CREATE);
                add("binding", "Binding".to_owned(), None, CREATE);
            }
            "serviceaccounts" => {
                add("token", "TokenRequest".to_owned(), Some(("authentication.k8s.io", "v1")), CREATE);
            }
            "namespaces" => add("finalize", "Namespace".to_owned(), None, &["update"]),
            _ => {}
        }
        all
    }
}

pub(crate) struct Subresource {
    pub(crate) name: &'static str,
    pub(crate) kind: String,
    pub(crate) group_version: Option<(&'static str, &'static str)>,
    pub(crate) verbs: &'static [&'static str],
}

/// A resource in one of its versions.
#[derive(Debug, Clone)]
pub(crate) struct Served {
    pub(crate) resource: Arc<Resource>,
    pub(crate) version: String,
}

impl Served {
    pub(crate) fn api_version(&self) -> String {
        self.resource.api_version(&self.version)
    }

    pub(crate) fn columns(&self) -> Option<&[Column]> {
        self.resource.versions.iter().find(|it| it.name == self.version)?.columns.as_deref()
    }
}

/// All resources. Definitions come and go while the server runs.
pub(crate) struct Registry {
    builtin: BTreeMap<String, Arc<Resource>>,
    defined: RwLock<BTreeMap<String, Arc<Resource>>>,
}

impl Registry {
    /// The built-in resources, except those of the groups in `without`.
    pub(crate) fn new(without: &[String]) -> Self {
        let builtin =
            builtin::all().filter(|it| !without.contains(&it.group)).map(|it| (it.id.clone(), Arc::new(it))).collect();
        Self { builtin, defined: RwLock::default() }
    }

    fn defined(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, Arc<Resource>>> {
        self.defined.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn by_id(&self, id: &str) -> Option<Arc<Resource>> {
        self.defined().get(id).or_else(|| self.builtin.get(id)).cloned()
    }

    /// All of them, in the order of their ids.
    pub(crate) fn all(&self) -> Vec<Arc<Resource>> {
        let mut all = self.builtin.clone();
        all.extend(self.defined().iter().map(|(id, it)| (id.clone(), it.clone())));
        all.into_values().collect()
    }

    pub(crate) fn find(&self, group: &str, version: &str, plural: &str) -> Option<Served> {
        let id = if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") };
        let resource = self.by_id(&id)?;
        let version = resource.versions.iter().find(|it| it.name == version)?.name.clone();
        Some(Served { resource, version })
    }

    /// Takes up what a definition says. Says whether that changed anything.
    pub(crate) fn define(&self, definition: &Value) -> bool {
        let Some(mut resource) = from_definition(definition) else { return false };
        let mut defined = self.defined.write().unwrap_or_else(PoisonError::into_inner);
        let taken = self.builtin.values().chain(defined.values());
        if taken.filter(|it| it.id != resource.id).any(|it| it.dir == resource.dir) {
            resource.dir.clone_from(&resource.id);
        }
        if defined.get(&resource.id).is_some_and(|it| **it == resource) {
            return false;
        }
        defined.insert(resource.id.clone(), Arc::new(resource));
        true
    }

    /// Forgets a definition. A built-in resource of that name is served on.
    pub(crate) fn undefine(&self, name: &str) {
        self.defined.write().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

fn texts(value: Option<&Value>) -> Vec<String> {
    let items = value.and_then(Value::as_array).into_iter().flatten();
    items.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// `None` if it lacks a name that is needed to serve it.
fn from_definition(definition: &Value) -> Option<Resource> {
    let spec = definition.get("spec")?;
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let (group, plural, kind) =
        (some(text(spec, "/group"))?, some(text(spec, "/names/plural"))?, some(text(spec, "/names/kind"))?);
    let all: Vec<&Value> = spec.get("versions")?.as_array()?.iter().collect();
    let storage = all.iter().find(|it| it["storage"] == true).or(all.first()).copied()?;
    let mut served: Vec<&Value> = all.into_iter().filter(|it| it["served"] != false).collect();
    served.sort_by_key(|it| it["name"] != storage["name"]);
    let versions = served.iter().filter_map(|it| {
        Some(Version {
            name: some(text(it, "/name"))?,
            columns: it["additionalPrinterColumns"].as_array().map(|it| columns(it)),
        })
    });
    let scale = storage.pointer("/subresources/scale").map(|scale| ScalePaths {
        replicas: pointer(text(scale, "/specReplicasPath")),
        status_replicas: pointer(text(scale, "/statusReplicasPath")),
        selector: some(text(scale, "/labelSelectorPath")).map(|it| pointer(&it)),
    });
    let selectable = storage["selectableFields"].as_array().into_iter().flatten();
    Some(Resource {
        id: format!("{plural}.{group}"),
        group,
        versions: versions.collect(),
        dir: plural.clone(),
        plural,
        singular: some(text(spec, "/names/singular")).unwrap_or_else(|| kind.to_lowercase()),
        list_kind: some(text(spec, "/names/listKind")).unwrap_or_else(|| format!("{kind}List")),
        kind,
        short_names: texts(spec.pointer("/names/shortNames")),
        categories: texts(spec.pointer("/names/categories")),
        namespaced: text(spec, "/scope") != "Cluster",
        has_status: storage.pointer("/subresources/status").is_some(),
        scale,
        custom: true,
        selectable: selectable.map(|it| text(it, "/jsonPath").trim_start_matches('.').to_owned()).collect(),
    })
}

fn columns(list: &[Value]) -> Vec<Column> {
    let column = |it: &Value| Column {
        name: text(it, "/name").to_owned(),
        kind: text(it, "/type").to_owned(),
        description: text(it, "/description").to_owned(),
        path: text(it, "/jsonPath").to_owned(),
        priority: it["priority"].as_i64().unwrap_or(0),
    };
    list.iter().map(column).collect()
}

/// `.spec.replicas` as `/spec/replicas`.
fn pointer(path: &str) -> String {
    path.replace('.', "/")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn definitions_are_served_beside_the_builtin_resources() {
        let registry = Registry::new(&[]);
        assert!(registry.find("example.org", "v1", "nodes").is_none());
        let definition = json!({ "spec": {
            "group": "example.org", "scope": "Namespaced",
            "names": { "plural": "nodes", "kind": "Node", "shortNames": ["exn"] },
            "versions": [
                { "name": "v1", "served": true, "storage": false },
                { "name": "v2", "served": true, "storage": true, "subresources": { "status": {} } },
                { "name": "v0", "served": false, "storage": false },
            ],
        } });
        assert!(registry.define(&definition));
        assert!(!registry.define(&definition), "nothing new");
        let found = registry.find("example.org", "v1", "nodes").unwrap();
        assert_eq!(found.resource.storage_api_version(), "example.org/v2");
        assert_eq!(found.resource.dir, "nodes.example.org", "the directory of the core nodes is taken");
        assert!(found.resource.has_status && registry.find("example.org", "v0", "nodes").is_none());
        registry.undefine("nodes.example.org");
        assert!(registry.find("example.org", "v1", "nodes").is_none());
    }

    #[test]
    fn groups_can_be_left_out() {
        let registry = Registry::new(&["cluster.x-k8s.io".to_owned()]);
        assert!(registry.find("cluster.x-k8s.io", "v1beta2", "machines").is_none());
        assert!(registry.find("", "v1", "nodes").is_some());
    }
}
