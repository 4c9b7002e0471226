//! What an object should look like, written as changes to what it looks like now. Finishing a draft gives at most two
//! merge patches: one for metadata and spec, one for status. An unchanged draft gives none, so a loop comes to rest.

use std::sync::Arc;

use nstance_core::time::Timestamp;
use serde_json::{Map, Value, json};

use crate::{
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::{self, Object},
    times,
};

pub(crate) struct Draft {
    target: Target,
    old: Arc<Object>,
    new: Value,
    now: Timestamp,
}

/// A condition as it should be; the time of its last change is filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) status: &'static str,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl Condition {
    pub(crate) fn new(status: &'static str, reason: &str, message: impl Into<String>) -> Self {
        Self { status, reason: reason.to_owned(), message: message.into() }
    }
}

impl Draft {
    pub(crate) fn new(via: Via, kind: Kind, old: &Arc<Object>, now: Timestamp) -> Self {
        let target = Target { via, kind, key: old.key() };
        Self { target, old: Arc::clone(old), new: old.value().clone(), now }
    }

    pub(crate) fn old(&self) -> &Object {
        &self.old
    }

    /// The value at a pointer as the draft has it.
    pub(crate) fn at(&self, pointer: &str) -> &Value {
        object::find(&self.new, pointer)
    }

    pub(crate) fn set(&mut self, pointer: &str, value: impl Into<Value>) {
        object::put(&mut self.new, pointer, value.into());
    }

    pub(crate) fn set_if_absent(&mut self, pointer: &str, value: impl Into<Value>) {
        if self.at(pointer).is_null() {
            self.set(pointer, value);
        }
    }

    /// Sets a list, or removes the field where the list is empty: optional lists are never empty in what we write.
    pub(crate) fn set_list(&mut self, pointer: &str, list: Vec<Value>) {
        if list.is_empty() { self.remove(pointer) } else { self.set(pointer, list) }
    }

    pub(crate) fn remove(&mut self, pointer: &str) {
        object::remove(&mut self.new, pointer);
    }

    pub(crate) fn label(&mut self, name: &str, value: &str) {
        self.set(&format!("/metadata/labels/{}", escape(name)), value);
    }

    pub(crate) fn annotation(&mut self, name: &str, value: &str) {
        self.set(&format!("/metadata/annotations/{}", escape(name)), value);
    }

    pub(crate) fn owners(&mut self, references: Vec<Value>) {
        self.set_list("/metadata/ownerReferences", references);
    }

    pub(crate) fn add_finalizer(&mut self, finalizer: &str) {
        if !self.old.has_finalizer(finalizer) {
            let mut finalizers = self.old.list("/metadata/finalizers").to_vec();
            finalizers.push(finalizer.into());
            self.set("/metadata/finalizers", finalizers);
        }
    }

    pub(crate) fn drop_finalizer(&mut self, finalizer: &str) {
        let rest = self.old.list("/metadata/finalizers").iter().filter(|it| **it != finalizer).cloned().collect();
        self.set_list("/metadata/finalizers", rest);
    }

    pub(crate) fn condition(&mut self, name: &str, condition: Condition) {
        self.condition_at("/status/conditions", name, condition, Some(self.old.generation()));
    }

    /// Sets one condition of the list at `pointer`; its time changes only with its status.
    pub(crate) fn condition_at(
        &mut self,
        pointer: &str,
        name: &str,
        condition: Condition,
        observed_generation: Option<i64>,
    ) {
        let mut conditions = self.at(pointer).as_array().cloned().unwrap_or_default();
        let at = conditions.iter().position(|it| it["type"] == name);
        let old = at.map_or(&Value::Null, |at| &conditions[at]);
        let since = if old["status"] == condition.status { old["lastTransitionTime"].as_str() } else { None };
        let since = since.map_or_else(|| times::seconds(self.now), str::to_owned);
        let mut new = json!({ "type": name, "status": condition.status, "lastTransitionTime": since });
        // The older form of conditions, which has no generation, may leave reason and message out but not empty.
        if observed_generation.is_some() || !condition.reason.is_empty() {
            new["reason"] = condition.reason.into();
        }
        if observed_generation.is_some() || !condition.message.is_empty() {
            new["message"] = condition.message.into();
        }
        if let Some(generation) = observed_generation {
            new["observedGeneration"] = generation.into();
        }
        match at {
            Some(at) => conditions[at] = new,
            None => conditions.push(new),
        }
        self.set(pointer, conditions);
    }

    /// Adds what has to be written; nothing, if nothing changed.
    pub(crate) fn finish(self, planned: &mut Vec<Planned>) {
        let version = self.old.resource_version().to_owned();
        if let Some(patch) = difference_except(self.old.value(), &self.new, "status") {
            let effect = Effect::Patch { patch, resource_version: version.clone() };
            planned.push(Planned { target: self.target.clone(), effect });
        }
        if let Some(patch) = difference(self.old.at("/status"), object::find(&self.new, "/status")) {
            let effect = Effect::PatchStatus { patch: json!({ "status": patch }), resource_version: version };
            planned.push(Planned { target: self.target, effect });
        }
    }
}

fn escape(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// The merge patch that makes `new` of `old`; `None` if they are equal.
fn difference(old: &Value, new: &Value) -> Option<Value> {
    match (old, new) {
        (Value::Object(_), Value::Object(_)) => difference_except(old, new, ""),
        _ if old == new => None,
        _ => Some(new.clone()),
    }
}

/// The same for two objects, without one of their fields.
fn difference_except(old: &Value, new: &Value, except: &str) -> Option<Value> {
    let (Value::Object(old), Value::Object(new)) = (old, new) else { return None };
    let mut patch = Map::new();
    for (name, value) in new.iter().filter(|(name, _)| *name != except) {
        if let Some(change) = difference(old.get(name).unwrap_or(&Value::Null), value) {
            patch.insert(name.clone(), change);
        }
    }
    for name in old.keys().filter(|it| *it != except && !new.contains_key(*it)) {
        patch.insert(name.clone(), Value::Null);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(value: Value) -> Draft {
        Draft::new(Via::Own, Kind::Machine, &Arc::new(Object::new(value)), Timestamp::from_millis(1_700_000_000_123))
    }

    fn finish(draft: Draft) -> Vec<Effect> {
        let mut planned = Vec::new();
        draft.finish(&mut planned);
        planned.into_iter().map(|it| it.effect).collect()
    }

    fn machine() -> Value {
        json!({ "metadata": { "name": "m", "resourceVersion": "7", "generation": 3, "finalizers": ["a", "b"] } })
    }

    #[test]
    fn an_unchanged_draft_writes_nothing() {
        let mut unchanged = draft(machine());
        unchanged.add_finalizer("a");
        assert_eq!(finish(unchanged), []);
    }

    #[test]
    fn metadata_and_status_are_patched_apart_and_removed_fields_become_null() {
        let mut changed = draft(machine());
        changed.label("x/y", "z");
        changed.drop_finalizer("a");
        changed.set("/status/phase", "Running");
        let version = "7".to_owned();
        let patch = json!({ "metadata": { "finalizers": ["b"], "labels": { "x/y": "z" } } });
        let status = json!({ "status": { "phase": "Running" } });
        assert_eq!(
            finish(changed),
            [
                Effect::Patch { patch, resource_version: version.clone() },
                Effect::PatchStatus { patch: status, resource_version: version }
            ]
        );
        let mut emptied = draft(json!({ "metadata": { "name": "m", "finalizers": ["a"] } }));
        emptied.drop_finalizer("a");
        let patch = json!({ "metadata": { "finalizers": null } });
        assert_eq!(finish(emptied), [Effect::Patch { patch, resource_version: String::new() }]);
    }

    #[test]
    fn a_condition_keeps_its_time_until_its_status_changes() {
        let ready = json!({ "type": "Ready", "status": "False", "reason": "A", "message": "",
            "lastTransitionTime": "2020-01-01T00:00:00Z", "observedGeneration": 3 });
        let other = json!({ "type": "Other", "status": "True" });
        let mut value = machine();
        value["status"] = json!({ "conditions": [other, ready] });
        let mut same = draft(value.clone());
        same.condition("Ready", Condition::new("False", "A", ""));
        assert_eq!(finish(same), []);
        let mut reason = draft(value.clone());
        reason.condition("Ready", Condition::new("False", "B", ""));
        assert_eq!(reason.at("/status/conditions/1/lastTransitionTime"), "2020-01-01T00:00:00Z");
        let mut status = draft(value);
        status.condition("Ready", Condition::new("True", "A", ""));
        assert_eq!(status.at("/status/conditions/1/lastTransitionTime"), "2023-11-14T22:13:20Z");
        assert_eq!(status.at("/status/conditions/0/type"), "Other");
    }
}
