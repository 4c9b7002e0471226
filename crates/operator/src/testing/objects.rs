//! The objects of the fake Kubernetes API and the rules by which they change.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::fields::{self, Path};
use crate::ports::{Apply, KubeErrorKind, ObjectRef, Target};

/// The manager of what is written by patches and replaces.
pub(super) const CLIENT: &str = "client";

/// Why a request is refused.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub(super) kind: KubeErrorKind,
    pub(super) message: String,
    /// If it is not the usual one of its kind.
    pub(super) code: Option<u16>,
    pub(super) causes: Vec<(String, String)>,
}

pub(super) fn refuse<T>(kind: KubeErrorKind, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { kind, message: message.into(), code: None, causes: Vec::new() })
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner {
    manager: String,
    is_apply: bool,
    status: bool,
}

impl Owner {
    fn client(manager: &str) -> Self {
        Self { manager: manager.to_owned(), is_apply: false, status: false }
    }
}

#[derive(Debug, Clone)]
struct Entry {
    value: Value,
    owners: BTreeMap<Owner, BTreeSet<Path>>,
}

/// All objects, as a database: one request at a time.
#[derive(Default)]
pub(super) struct Objects {
    entries: BTreeMap<ObjectRef, Entry>,
    /// Grows with every change.
    pub(super) version: u64,
    n_uids: u64,
}

pub(super) fn metadata(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    if !value["metadata"].is_object() {
        value["metadata"] = json!({});
    }
    value["metadata"].as_object_mut().expect("it was just made an object")
}

pub(super) fn meta_text<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value.get("metadata")?.get(name)?.as_str()
}

fn finalizers(value: &Value) -> Vec<&str> {
    let all = value["metadata"]["finalizers"].as_array();
    all.into_iter().flatten().filter_map(Value::as_str).collect()
}

fn without(value: &Value, names: &[&str]) -> Value {
    let mut value = value.clone();
    for name in names {
        if let Some(map) = value.as_object_mut() {
            map.remove(*name);
        }
    }
    value
}

/// The set of paths as `fieldsV1` writes it.
fn fields_v1(paths: &BTreeSet<Path>) -> Value {
    let mut all = json!({});
    for path in paths {
        let mut place = &mut all;
        for name in path {
            let key = match name.split_once('=') {
                Some(("", value)) => format!("v:{}", json!(value)),
                Some((field, value)) => format!("k:{}", json!({field: value})),
                _ => format!("f:{name}"),
            };
            place = &mut place[key];
            if !place.is_object() {
                *place = json!({});
            }
        }
    }
    all
}

/// `metadata.managedFields`.
fn write_managers(entry: &mut Entry) {
    let managers: Vec<Value> = entry
        .owners
        .iter()
        .map(|(it, paths)| {
            let operation = if it.is_apply { "Apply" } else { "Update" };
            let mut one = json!({"manager": it.manager, "operation": operation, "fieldsType": "FieldsV1"});
            one["fieldsV1"] = fields_v1(paths);
            if it.status {
                one["subresource"] = json!("status");
            }
            one
        })
        .collect();
    let meta = metadata(&mut entry.value);
    if managers.is_empty() {
        meta.remove("managedFields");
    } else {
        meta.insert("managedFields".to_owned(), Value::Array(managers));
    }
}

/// Drops owners that `metadata.managedFields` of a written object does not name any more. A write without that field leaves them.
fn keep_named_owners(entry: &mut Entry, written: &Value) {
    let Some(named) = written["metadata"].get("managedFields").and_then(Value::as_array) else { return };
    let named: BTreeSet<Owner> = named
        .iter()
        .filter_map(|it| {
            let manager = it.get("manager")?.as_str()?.to_owned();
            let is_apply = it.get("operation").and_then(Value::as_str) == Some("Apply");
            Some(Owner { manager, is_apply, status: it.get("subresource").is_some() })
        })
        .collect();
    entry.owners.retain(|owner, _| named.contains(owner));
}

/// Checks a body's `resourceVersion` and uid against the stored object.
fn check_preconditions(known: &Value, body: &Value) -> Result<(), Refusal> {
    for name in ["resourceVersion", "uid"] {
        if let Some(wanted) = meta_text(body, name).filter(|it| !it.is_empty())
            && meta_text(known, name) != Some(wanted)
        {
            let message = format!("{name} is {:?}, not {wanted:?}", meta_text(known, name).unwrap_or_default());
            return refuse(KubeErrorKind::Conflict, message);
        }
    }
    Ok(())
}

/// A terminating object gets no new finalizers.
fn check_finalizers(known: &Value, new: &Value) -> Result<(), Refusal> {
    let (old, new) = (finalizers(known), finalizers(new));
    if meta_text(known, "deletionTimestamp").is_some() && new.iter().any(|it| !old.contains(it)) {
        return refuse(KubeErrorKind::Invalid, "no new finalizers can be added if the object is being deleted");
    }
    Ok(())
}

fn bump_generation(meta: &mut Map<String, Value>) {
    let generation = meta.get("generation").and_then(Value::as_i64).unwrap_or(0);
    meta.insert("generation".to_owned(), json!(generation + 1));
}

impl Objects {
    pub(super) fn get(&self, object: &ObjectRef) -> Option<&Value> {
        self.entries.get(object).map(|it| &it.value)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&ObjectRef, &Value)> {
        self.entries.iter().map(|(object, entry)| (object, &entry.value))
    }

    fn known(&self, object: &ObjectRef) -> Result<&Entry, Refusal> {
        match self.entries.get(object) {
            Some(entry) => Ok(entry),
            None => refuse(KubeErrorKind::NotFound, format!("{object} not found")),
        }
    }

    fn next_version(&mut self) -> Value {
        self.version += 1;
        json!(self.version.to_string())
    }

    /// A new object, or another one in place of an old one, which keeps its uid.
    pub(super) fn put(&mut self, object: &ObjectRef, body: &Value, now: &str) -> Value {
        self.insert(object, body, BTreeMap::new(), now)
    }

    fn insert(
        &mut self,
        object: &ObjectRef,
        body: &Value,
        owners: BTreeMap<Owner, BTreeSet<Path>>,
        now: &str,
    ) -> Value {
        let mut value = body.clone();
        if value.get("status").is_some_and(Value::is_null) {
            value = without(&value, &["status"]);
        }
        value["apiVersion"] = json!(object.kind.api_version());
        value["kind"] = json!(object.kind.kind);
        let known_uid = self.get(object).and_then(|it| meta_text(it, "uid"));
        let uid = meta_text(&value, "uid").or(known_uid).map(str::to_owned).unwrap_or_else(|| {
            self.n_uids += 1;
            format!("00000000-0000-4000-8000-{:012}", self.n_uids)
        });
        let version = self.next_version();
        let meta = metadata(&mut value);
        meta.insert("name".to_owned(), json!(object.name));
        if !object.namespace.is_empty() {
            meta.insert("namespace".to_owned(), json!(object.namespace));
        }
        meta.insert("uid".to_owned(), json!(uid));
        meta.entry("creationTimestamp").or_insert(json!(now));
        meta.entry("generation").or_insert(json!(1));
        meta.insert("resourceVersion".to_owned(), version);
        meta.remove("managedFields");
        let mut entry = Entry { value, owners };
        write_managers(&mut entry);
        let value = entry.value.clone();
        self.entries.insert(object.clone(), entry);
        value
    }

    pub(super) fn create(
        &mut self,
        object: &ObjectRef,
        body: &Value,
        manager: &str,
        now: &str,
    ) -> Result<Value, Refusal> {
        if self.entries.contains_key(object) {
            return refuse(KubeErrorKind::AlreadyExists, format!("{object} already exists"));
        }
        let body = without(&new_body(body), &["status"]);
        let fields = owned_fields(&without(&body, &["apiVersion", "kind"]));
        Ok(self.insert(object, &body, BTreeMap::from([(Owner::client(manager), fields)]), now))
    }

    pub(super) fn merge_patch(&mut self, object: &ObjectRef, patch: &Value, target: Target) -> Result<Value, Refusal> {
        let known = self.known(object)?.value.clone();
        check_preconditions(&known, patch)?;
        let mut patched = known;
        json_patch::merge(&mut patched, patch);
        self.write_part(object, &patched, target)
    }

    pub(super) fn json_patch(&mut self, object: &ObjectRef, patch: &Value) -> Result<Value, Refusal> {
        let mut patched = self.known(object)?.value.clone();
        let patch: json_patch::Patch = match serde_json::from_value(patch.clone()) {
            Ok(patch) => patch,
            Err(error) => return refuse(KubeErrorKind::Invalid, format!("not a JSON patch: {error}")),
        };
        if let Err(error) = json_patch::patch(&mut patched, &patch) {
            return refuse(KubeErrorKind::Invalid, format!("the server rejected our request: {error}"));
        }
        self.write_part(object, &patched, Target::Main)
    }

    pub(super) fn replace(&mut self, object: &ObjectRef, body: &Value) -> Result<Value, Refusal> {
        check_preconditions(&self.known(object)?.value, body)?;
        self.write_part(object, body, Target::Main)
    }

    /// Writes the main part or the status of a changed value.
    fn write_part(&mut self, object: &ObjectRef, changed: &Value, target: Target) -> Result<Value, Refusal> {
        let known = self.known(object)?.value.clone();
        let (main, status) = match target {
            Target::Main => (changed, &known),
            Target::Status => (&known, changed),
        };
        let mut value = without(main, &["status"]);
        if let Some(status) = status.get("status") {
            value["status"] = status.clone();
        }
        check_finalizers(&known, &value)?;
        self.write(object, &value, CLIENT);
        // The last state of an object that lost its last finalizer is the answer.
        Ok(self.get(object).cloned().unwrap_or(value))
    }

    /// Writes a whole value, by a manager that takes over the fields that it changes.
    pub(super) fn write(&mut self, object: &ObjectRef, value: &Value, manager: &str) {
        let Some(before) = self.entries.get(object).cloned() else { return };
        let mut entry = before.clone();
        keep_named_owners(&mut entry, value);
        let mut value = value.clone();
        let meta = metadata(&mut value);
        for name in
            ["name", "namespace", "uid", "creationTimestamp", "generation", "deletionTimestamp", "resourceVersion"]
        {
            match before.value["metadata"].get(name) {
                Some(known) => meta.insert(name.to_owned(), known.clone()),
                None => meta.remove(name),
            };
        }
        let (old, new) = (owned_fields(&before.value), owned_fields(&value));
        let is_changed = |path: &&Path| fields::get(&before.value, path) != fields::get(&value, path);
        let changed: BTreeSet<Path> = new.iter().filter(is_changed).cloned().collect();
        for fields in entry.owners.values_mut() {
            fields.retain(|path| !changed.contains(path) && (new.contains(path) || !old.contains(path)));
        }
        entry.owners.entry(Owner::client(manager)).or_default().extend(changed);
        entry.owners.retain(|_, fields| !fields.is_empty());
        entry.value = value;
        self.settle(object, entry, &before);
    }

    pub(super) fn apply(&mut self, object: &ObjectRef, body: &Value, how: Apply, now: &str) -> Result<Value, Refusal> {
        let status = how.target == Target::Status;
        let owner = Owner { manager: how.manager.to_owned(), is_apply: true, status };
        let applied_body = if status {
            json!({"status": body.get("status").cloned().unwrap_or(json!({}))})
        } else {
            without(&new_body(body), &["status", "apiVersion", "kind"])
        };
        let applied = owned_fields(&applied_body);
        let Some(before) = self.entries.get(object).cloned() else {
            if status {
                return refuse(KubeErrorKind::NotFound, format!("{object} not found"));
            }
            if meta_text(body, "uid").is_some() {
                return refuse(KubeErrorKind::Conflict, format!("uid given, but {object} does not exist"));
            }
            return Ok(self.insert(object, &applied_body, BTreeMap::from([(owner, applied)]), now));
        };
        check_preconditions(&before.value, body)?;
        let mut entry = before.clone();
        let mut conflicts = Vec::new();
        for (other, theirs) in entry.owners.iter_mut().filter(|(it, _)| **it != owner) {
            let differs = |path: &&Path| fields::get(&before.value, path) != fields::get(&applied_body, path);
            let lost: Vec<Path> = applied.intersection(theirs).filter(differs).cloned().collect();
            for path in lost {
                if !how.force {
                    conflicts.push((
                        "FieldManagerConflict".to_owned(),
                        format!("conflict with {:?}: .{}", other.manager, path.join(".")),
                    ));
                }
                theirs.remove(&path);
            }
        }
        if !conflicts.is_empty() {
            let message = format!("apply failed with {} conflicts", conflicts.len());
            return Err(Refusal { kind: KubeErrorKind::Conflict, message, code: None, causes: conflicts });
        }
        let old = entry.owners.remove(&owner).unwrap_or_default();
        for path in old.difference(&applied) {
            if !entry.owners.values().any(|it| it.contains(path)) {
                fields::remove(&mut entry.value, path);
            }
        }
        fields::merge(&mut entry.value, &applied_body);
        check_finalizers(&before.value, &entry.value)?;
        entry.owners.insert(owner, applied);
        entry.owners.retain(|_, fields| !fields.is_empty());
        let value = entry.value.clone();
        self.settle(object, entry, &before);
        Ok(self.get(object).cloned().unwrap_or(value))
    }

    /// Stores a changed object with its next version and generation; a terminating one without finalizers is removed.
    fn settle(&mut self, object: &ObjectRef, mut entry: Entry, before: &Entry) {
        write_managers(&mut entry);
        if entry.value == before.value && entry.owners == before.owners {
            return;
        }
        let spec = |it: &Value| without(it, &["metadata", "status"]);
        let is_spec_changed = spec(&entry.value) != spec(&before.value);
        let version = self.next_version();
        let meta = metadata(&mut entry.value);
        meta.insert("resourceVersion".to_owned(), version);
        if is_spec_changed {
            bump_generation(meta);
        }
        if meta.contains_key("deletionTimestamp") && finalizers(&entry.value).is_empty() {
            self.entries.remove(object);
        } else {
            self.entries.insert(object.clone(), entry);
        }
    }

    /// Deletes an object; with finalizers it stays, terminating.
    pub(super) fn delete(&mut self, object: &ObjectRef, uid: Option<&str>, now: &str) -> Result<(), Refusal> {
        let Some(entry) = self.entries.get(object) else { return Ok(()) };
        if uid.is_some() && meta_text(&entry.value, "uid") != uid {
            return refuse(KubeErrorKind::Conflict, format!("{object} has another uid"));
        }
        if finalizers(&entry.value).is_empty() {
            self.remove(object);
        } else {
            self.terminate(object, now);
        }
        Ok(())
    }

    /// Marks an object as being deleted.
    pub(super) fn terminate(&mut self, object: &ObjectRef, now: &str) {
        let version = self.version + 1;
        let Some(entry) = self.entries.get_mut(object) else { return };
        let meta = metadata(&mut entry.value);
        if meta.contains_key("deletionTimestamp") {
            return;
        }
        meta.insert("deletionTimestamp".to_owned(), json!(now));
        meta.insert("resourceVersion".to_owned(), json!(version.to_string()));
        bump_generation(meta);
        self.version = version;
    }

    pub(super) fn remove(&mut self, object: &ObjectRef) {
        if self.entries.remove(object).is_some() {
            self.version += 1;
        }
    }
}

/// A body without what the server sets or what is only a precondition.
fn new_body(body: &Value) -> Value {
    let mut body = body.clone();
    for name in ["name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"] {
        metadata(&mut body).remove(name);
    }
    body
}

/// The paths of fields that managers own: all but the object's identity and what the server sets.
fn owned_fields(value: &Value) -> BTreeSet<Path> {
    const OF_SERVER: [&str; 8] = [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "managedFields",
    ];
    let is_owned = |path: &Path| match path.as_slice() {
        [first, second, ..] if first == "metadata" => !OF_SERVER.contains(&second.as_str()),
        [first] => !matches!(first.as_str(), "metadata" | "apiVersion" | "kind" | "status"),
        _ => true,
    };
    fields::leaves(value).into_iter().filter(is_owned).collect()
}
