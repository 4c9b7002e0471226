//! One object as the API server shows it: a JSON value with named ways to what the stand-ins read.

use std::fmt;

use kube::api::DynamicObject;
use nstance_core::time::Timestamp;
use serde_json::{Map, Value, json};

use crate::kinds::{Kind, group_of};

/// Namespace and name; the namespace of a cluster-scoped object is empty.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.namespace.as_str() {
            "" => write!(f, "{}", self.name),
            namespace => write!(f, "{namespace}/{}", self.name),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Object(Value);

/// One entry of `metadata.ownerReferences`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owner<'a>(&'a Value);

impl<'a> Owner<'a> {
    fn text(self, field: &str) -> &'a str {
        self.0[field].as_str().unwrap_or_default()
    }

    pub(crate) fn uid(self) -> &'a str {
        self.text("uid")
    }

    pub(crate) fn name(self) -> &'a str {
        self.text("name")
    }

    pub(crate) fn api_version(self) -> &'a str {
        self.text("apiVersion")
    }

    pub(crate) fn kind(self) -> &'a str {
        self.text("kind")
    }

    pub(crate) fn is_controller(self) -> bool {
        self.0["controller"].as_bool().unwrap_or(false)
    }

    pub(crate) fn blocks_owner_deletion(self) -> bool {
        self.0["blockOwnerDeletion"].as_bool().unwrap_or(false)
    }

    pub(crate) fn value(self) -> &'a Value {
        self.0
    }

    /// Whether both name the same object, whatever its uid: an object that was made anew keeps its references.
    fn is_same_object(self, api_version: &str, kind: &str, name: &str) -> bool {
        group_of(self.api_version()) == group_of(api_version) && self.kind() == kind && self.name() == name
    }
}

static NULL: Value = Value::Null;

impl Object {
    #[cfg(test)]
    pub(crate) fn new(value: Value) -> Self {
        Self(value)
    }

    /// Drops the book-keeping of field managers, which nothing here reads.
    pub(crate) fn of(mut object: DynamicObject) -> Self {
        object.metadata.managed_fields = None;
        // Only a map with keys that are no strings could fail, and there is none in an object that came as JSON.
        Self(serde_json::to_value(object).unwrap_or_default())
    }

    pub(crate) fn value(&self) -> &Value {
        &self.0
    }

    /// The value at a JSON pointer; null if it is absent.
    pub(crate) fn at(&self, pointer: &str) -> &Value {
        find(&self.0, pointer)
    }

    pub(crate) fn text(&self, pointer: &str) -> &str {
        self.at(pointer).as_str().unwrap_or_default()
    }

    pub(crate) fn number(&self, pointer: &str) -> Option<i64> {
        self.at(pointer).as_i64()
    }

    pub(crate) fn flag(&self, pointer: &str) -> bool {
        self.at(pointer).as_bool().unwrap_or(false)
    }

    pub(crate) fn list(&self, pointer: &str) -> &[Value] {
        self.at(pointer).as_array().map(Vec::as_slice).unwrap_or_default()
    }

    pub(crate) fn texts(&self, pointer: &str) -> Vec<&str> {
        self.list(pointer).iter().filter_map(Value::as_str).collect()
    }

    pub(crate) fn time(&self, pointer: &str) -> Option<Timestamp> {
        self.at(pointer).as_str()?.parse().ok()
    }

    pub(crate) fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    pub(crate) fn namespace(&self) -> &str {
        self.text("/metadata/namespace")
    }

    pub(crate) fn key(&self) -> Key {
        Key::new(self.namespace(), self.name())
    }

    pub(crate) fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    pub(crate) fn resource_version(&self) -> &str {
        self.text("/metadata/resourceVersion")
    }

    pub(crate) fn generation(&self) -> i64 {
        self.number("/metadata/generation").unwrap_or(1)
    }

    pub(crate) fn labels(&self) -> Option<&Map<String, Value>> {
        self.at("/metadata/labels").as_object()
    }

    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels()?.get(name)?.as_str()
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.at("/metadata/annotations").get(name)?.as_str()
    }

    pub(crate) fn has_annotation_prefix(&self, prefix: &str) -> bool {
        let annotations = self.at("/metadata/annotations").as_object();
        annotations.is_some_and(|it| it.keys().any(|name| name.starts_with(prefix)))
    }

    pub(crate) fn has_finalizer(&self, finalizer: &str) -> bool {
        self.texts("/metadata/finalizers").contains(&finalizer)
    }

    pub(crate) fn is_deleting(&self) -> bool {
        !self.at("/metadata/deletionTimestamp").is_null()
    }

    pub(crate) fn owners(&self) -> impl Iterator<Item = Owner<'_>> {
        self.list("/metadata/ownerReferences").iter().map(Owner)
    }

    pub(crate) fn controller(&self) -> Option<Owner<'_>> {
        self.owners().find(|it| it.is_controller())
    }

    pub(crate) fn condition(&self, name: &str) -> Option<&Value> {
        self.list("/status/conditions").iter().find(|it| it["type"] == name)
    }

    /// `True`, `False`, `Unknown`; empty if there is no such condition.
    pub(crate) fn condition_status(&self, name: &str) -> &str {
        self.condition(name).and_then(|it| it["status"].as_str()).unwrap_or_default()
    }

    pub(crate) fn is_true(&self, condition: &str) -> bool {
        self.condition_status(condition) == "True"
    }
}

/// The value at a JSON pointer; null if it is absent. `Value::pointer` allocates for each part of the pointer, which is
/// felt where a thousand Machines are looked at again and again.
pub(crate) fn find<'a>(value: &'a Value, pointer: &str) -> &'a Value {
    let step = |at: &'a Value, part: &str| match at {
        Value::Object(map) if part.contains('~') => map.get(&part.replace("~1", "/").replace("~0", "~")),
        Value::Object(map) => map.get(part),
        Value::Array(list) => list.get(part.parse::<usize>().ok()?),
        _ => None,
    };
    pointer.split('/').skip(1).try_fold(value, step).unwrap_or(&NULL)
}

/// Sets the value at a JSON pointer and makes the objects on the way.
pub(crate) fn put(target: &mut Value, pointer: &str, value: Value) {
    let mut at = target;
    for part in pointer.split('/').skip(1) {
        if !at.is_object() {
            *at = json!({});
        }
        let Value::Object(map) = at else { return };
        at = map.entry(part.replace("~1", "/").replace("~0", "~")).or_insert(Value::Null);
    }
    *at = value;
}

/// Removes the value at a JSON pointer, if it is there.
pub(crate) fn remove(target: &mut Value, pointer: &str) {
    if let Some((parent, name)) = pointer.rsplit_once('/')
        && let Some(Value::Object(map)) = target.pointer_mut(parent)
    {
        map.remove(name);
    }
}

/// How an owner reference binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ownership {
    Plain,
    Controller,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} has the controller {controller} already; only one owner reference may have controller: true")]
pub(crate) struct OtherController {
    key: Key,
    controller: String,
}

/// An owner reference to `owner`.
pub(crate) fn owner_reference(kind: Kind, owner: &Object, ownership: Ownership) -> Value {
    let mut reference = json!({
        "apiVersion": kind.api_version(),
        "kind": kind.kind(),
        "name": owner.name(),
        "uid": owner.uid(),
    });
    if ownership == Ownership::Controller {
        reference["controller"] = true.into();
        reference["blockOwnerDeletion"] = true.into();
    }
    reference
}

/// The owner references of `object` with one to `owner` among them.
pub(crate) fn with_owner(
    object: &Object,
    kind: Kind,
    owner: &Object,
    ownership: Ownership,
) -> Result<Vec<Value>, OtherController> {
    let (api_version, name) = (kind.api_version(), owner.name());
    let is_ours = |it: Owner<'_>| it.is_same_object(&api_version, kind.kind(), name);
    if ownership == Ownership::Controller
        && let Some(other) = object.controller()
        && !is_ours(other)
    {
        let controller = format!("{} {}", other.kind(), other.name());
        return Err(OtherController { key: object.key(), controller });
    }
    let mut references: Vec<Value> = object.owners().map(|it| it.value().clone()).collect();
    let reference = owner_reference(kind, owner, ownership);
    match object.owners().position(is_ours) {
        Some(at) if references[at]["uid"] == reference["uid"] && ownership == Ownership::Plain => {}
        Some(at) => references[at] = reference,
        None => references.push(reference),
    }
    Ok(references)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(uid: &str) -> Object {
        Object::new(json!({ "metadata": { "name": "p", "namespace": "n", "uid": uid } }))
    }

    #[test]
    fn values_are_put_where_nothing_was_and_removed_again() {
        let mut value = json!({});
        put(&mut value, "/metadata/labels/a.b~1c", "d".into());
        assert_eq!(value, json!({ "metadata": { "labels": { "a.b/c": "d" } } }));
        assert_eq!(find(&value, "/metadata/labels/a.b~1c"), "d");
        assert_eq!(find(&json!({ "a": [{ "b": 1 }] }), "/a/0/b"), 1);
        assert_eq!(find(&json!({ "a": [{ "b": 1 }] }), "/a/1/b"), &Value::Null);
        remove(&mut value, "/metadata/labels");
        remove(&mut value, "/spec/nothing");
        assert_eq!(value, json!({ "metadata": {} }));
    }

    #[test]
    fn an_owner_made_anew_takes_the_place_of_the_old_one() {
        let first = with_owner(&pool("x"), Kind::Machine, &pool("1"), Ownership::Controller).unwrap();
        let owned = Object::new(json!({ "metadata": { "name": "x", "ownerReferences": first } }));
        let second = with_owner(&owned, Kind::Machine, &pool("2"), Ownership::Controller).unwrap();
        assert_eq!(second.len(), 1);
        assert_eq!(second[0]["uid"], "2");
    }

    #[test]
    fn a_second_controller_is_refused_and_a_plain_owner_is_not() {
        let references = with_owner(&pool("x"), Kind::Cluster, &pool("1"), Ownership::Controller).unwrap();
        let owned =
            Object::new(json!({ "metadata": { "name": "x", "namespace": "n", "ownerReferences": references } }));
        let refused = with_owner(&owned, Kind::Machine, &pool("2"), Ownership::Controller).unwrap_err();
        assert!(refused.to_string().starts_with("n/x has the controller Cluster p already"), "{refused}");
        assert_eq!(with_owner(&owned, Kind::Machine, &pool("2"), Ownership::Plain).unwrap().len(), 2);
    }
}
