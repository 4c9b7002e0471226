//! Applying fields to objects, only where that changes something.
//!
//! An apply is skipped if it says the same as the last one of this process and the object still has every field of it. A
//! field that another manager holds is left to it: an event tells, and nothing is forced.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Mutex, PoisonError},
};

use serde_json::Value;

use super::context::Context;
use crate::{
    cluster::events::{About, Reason, Severity},
    ports::{Apply, KubeError, ObjectRef, Target},
};

/// What was applied last, by object, field manager and target.
#[derive(Default)]
pub struct Applied {
    hashes: Mutex<BTreeMap<(ObjectRef, &'static str, bool), u64>>,
}

/// What became of an apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Unchanged,
    Applied,
    /// Another manager holds a field. It was told as an event.
    Conflict,
}

impl Context {
    /// Applies `body`, unless `current` has it all already and nothing was given up since the last apply.
    pub async fn apply(
        &self,
        object: &ObjectRef,
        body: &Value,
        how: Apply,
        current: Option<&Value>,
    ) -> Result<Outcome, KubeError> {
        let key = (object.clone(), how.manager, how.target == Target::Status);
        let hash = hash_of(body);
        let last = self.applied.hashes.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if last == Some(hash) && current.is_some_and(|current| contains(current, body)) {
            return Ok(Outcome::Unchanged);
        }
        match self.kube.apply(object, body, how).await {
            Ok(_) => {
                self.applied.hashes.lock().unwrap_or_else(PoisonError::into_inner).insert(key, hash);
                Ok(Outcome::Applied)
            }
            Err(error) if error.is_conflict() && !error.causes.is_empty() => {
                let uid = body["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
                let about = About { object: object.clone(), uid };
                let causes: Vec<&str> = error.causes.iter().map(|(_, message)| message.as_str()).collect();
                let message = format!("not applied, another field manager holds a field: {}", causes.join("; "));
                self.events.emit(&about, Severity::Warning, Reason::FieldConflict.as_str(), &message);
                Ok(Outcome::Conflict)
            }
            Err(error) => Err(error),
        }
    }

    /// The object is gone; a later one of its name starts anew.
    pub fn forget_applied(&self, object: &ObjectRef) {
        self.applied.hashes.lock().unwrap_or_else(PoisonError::into_inner).retain(|(it, _, _), _| it != object);
    }
}

fn hash_of(body: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.to_string().hash(&mut hasher);
    hasher.finish()
}

/// Whether an object has every field of `part`. Versions of the object itself do not count.
pub fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            part.iter().filter(|(key, _)| *key != "resourceVersion").all(|(key, part)| match whole.get(key) {
                // Lists that other managers add to.
                Some(Value::Array(whole)) if matches!(key.as_str(), "ownerReferences" | "finalizers") => part
                    .as_array()
                    .is_some_and(|part| part.iter().all(|part| whole.iter().any(|it| contains(it, part)))),
                Some(whole) if key == "conditions" => holds_conditions(whole, part),
                Some(whole) => contains(whole, part),
                None => is_empty(part),
            })
        }
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        _ => whole == part,
    }
}

/// Conditions are a map by type; other managers may have some of their own.
fn holds_conditions(whole: &Value, part: &Value) -> bool {
    let (Some(whole), Some(part)) = (whole.as_array(), part.as_array()) else { return false };
    part.iter().all(|part| whole.iter().any(|it| it["type"] == part["type"] && contains(it, part)))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_object_contains_what_would_be_applied_whatever_others_added() {
        let whole = json!({
            "metadata": {"finalizers": ["a", "b"], "labels": {"x": "1", "y": "2"}, "resourceVersion": "7"},
            "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Other", "status": "False"}]},
            "spec": {"list": [1, 2], "map": {}},
        });
        for part in [
            json!({"metadata": {"finalizers": ["b"], "labels": {"x": "1"}, "resourceVersion": "5"}}),
            json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
            json!({"spec": {"list": [1, 2], "none": {}}}),
        ] {
            assert!(contains(&whole, &part), "{part}");
        }
        for part in [
            json!({"metadata": {"labels": {"x": "2"}}}),
            json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}),
            json!({"spec": {"list": [1]}}),
            json!({"spec": {"new": "value"}}),
        ] {
            assert!(!contains(&whole, &part), "{part}");
        }
    }
}
