//! Server-side apply, simplified: each *apply* manager owns the leaf fields it applied; other writers own nothing, and
//! what they change is owned by no manager any more.

use std::collections::{BTreeMap, BTreeSet};

use http::StatusCode;
use serde_json::{Value, json};

use super::fields::{
    Fields, Path, Step, display, from_fields_v1, get, is_empty, is_merged, leaves, overlay, remove, to_fields_v1,
};
use crate::{
    error::ApiError,
    object::{fields_mut, set_metadata},
};

/// Who applies.
#[derive(Debug, Clone)]
pub(crate) struct Applier {
    pub(crate) manager: String,
    pub(crate) force: bool,
    pub(crate) api_version: String,
    /// `status` if it is applied to that; empty for the object itself.
    pub(crate) subresource: &'static str,
    pub(crate) now: Value,
}

/// Lays `config` over `live` for one manager.
pub(crate) fn apply(live: &Value, mut config: Value, applier: &Applier) -> Result<Value, ApiError> {
    const OF_THE_SERVER: [&str; 9] = [
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "selfLink",
        "managedFields",
    ];
    if config.pointer("/metadata/managedFields").is_some_and(|it| it.as_array().is_none_or(|it| !it.is_empty())) {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    for field in OF_THE_SERVER {
        set_metadata(&mut config, field, None);
    }
    let top = fields_mut(&mut config);
    for field in ["apiVersion", "kind"] {
        top.shift_remove(field);
    }
    if top.get("metadata").is_some_and(|it| it.as_object().is_none_or(serde_json::Map::is_empty)) {
        top.shift_remove("metadata");
    }

    let ours = |entry: &Value| {
        entry["manager"] == applier.manager.as_str()
            && entry["operation"] == "Apply"
            && entry["subresource"].as_str().unwrap_or("") == applier.subresource
    };
    let entries = live.pointer("/metadata/managedFields").and_then(Value::as_array).cloned().unwrap_or_default();
    let (mine, mut others): (Vec<Value>, Vec<Value>) = entries.into_iter().partition(ours);
    let old = mine.first().map(|entry| from_fields_v1(&entry["fieldsV1"])).unwrap_or_default();
    let new = leaves(&config);

    resolve_conflicts(live, &config, &new, &mut others, applier.force)?;
    let mut merged = live.clone();
    overlay(&mut merged, &config, "");
    let kept: Vec<Fields> = others.iter().map(|entry| from_fields_v1(&entry["fieldsV1"])).collect();
    remove_given_up(&mut merged, &old, &new, &kept);

    if !new.is_empty() {
        let fields = to_fields_v1(&new);
        let unchanged = mine.first().filter(|entry| entry["fieldsV1"] == fields);
        // An apply that changes nothing must not change the time either.
        let time = unchanged.map_or_else(|| applier.now.clone(), |entry| entry["time"].clone());
        let mut entry = json!({
            "manager": applier.manager, "operation": "Apply", "apiVersion": applier.api_version, "time": time,
            "fieldsType": "FieldsV1", "fieldsV1": fields,
        });
        if !applier.subresource.is_empty() {
            entry["subresource"] = json!(applier.subresource);
        }
        others.push(entry);
    }
    others.sort_by_key(sort_key);
    set_managed_fields(&mut merged, others);
    Ok(merged)
}

/// A stable order, so that applying twice does not reorder the list.
fn sort_key(entry: &Value) -> (String, String) {
    let text = |field: &str| entry[field].as_str().unwrap_or("").to_owned();
    (text("manager"), text("subresource"))
}

fn set_managed_fields(object: &mut Value, entries: Vec<Value>) {
    set_metadata(object, "managedFields", (!entries.is_empty()).then(|| Value::Array(entries)));
}

fn is_prefix(a: &[Step], b: &[Step]) -> bool {
    a.len() <= b.len() && a == &b[..a.len()]
}

/// Whether owning `owned` means owning `path`. What was applied empty is owned without what is in it.
fn covers(object: &Value, owned: &[Step], path: &[Step]) -> bool {
    is_prefix(owned, path) && (owned.len() == path.len() || !get(object, owned).is_some_and(|it| is_merged(owned, it)))
}

fn resolve_conflicts(
    live: &Value,
    config: &Value,
    new: &Fields,
    others: &mut Vec<Value>,
    force: bool,
) -> Result<(), ApiError> {
    let mut conflicts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let changes = |path: &&Path| match (get(live, path), get(config, path)) {
        // What is empty is laid over its like without effect.
        (Some(there), Some(applied)) if is_merged(path, there) && is_empty(applied) => false,
        (live, applied) => live != applied,
    };
    let changed: Vec<&Path> = new.iter().filter(changes).collect();
    for entry in others.iter_mut().filter(|entry| entry["operation"] == "Apply") {
        let theirs = from_fields_v1(&entry["fieldsV1"]);
        let touched = |it: &Path| changed.iter().any(|path| covers(live, it, path) || is_prefix(path, it));
        let (lost, kept): (Fields, Fields) = theirs.into_iter().partition(touched);
        if lost.is_empty() {
            continue;
        }
        if force {
            entry["fieldsV1"] = to_fields_v1(&kept);
        } else {
            let manager = entry["manager"].as_str().unwrap_or("").to_owned();
            conflicts.entry(manager).or_default().extend(lost.iter().map(|path| display(path)));
        }
    }
    others.retain(|entry| entry["fieldsV1"].as_object().is_none_or(|fields| !fields.is_empty()));
    if conflicts.is_empty() { Ok(()) } else { Err(conflict(&conflicts)) }
}

/// Worded as a real API server does it: kubectl prints it.
fn conflict(conflicts: &BTreeMap<String, BTreeSet<String>>) -> ApiError {
    let all: Vec<(&String, &String)> =
        conflicts.iter().flat_map(|(manager, fields)| fields.iter().map(move |field| (manager, field))).collect();
    let message = match all[..] {
        [(manager, field)] => format!("Apply failed with 1 conflict: conflict with {manager:?}: {field}"),
        _ => {
            let parts = conflicts.iter().map(|(manager, fields)| {
                let fields: String = fields.iter().map(|field| format!("\n- {field}")).collect();
                format!("conflicts with {manager:?}:{fields}")
            });
            format!("Apply failed with {} conflicts: {}", all.len(), parts.collect::<Vec<_>>().join("\n"))
        }
    };
    let error = ApiError::new(StatusCode::CONFLICT, "Conflict", message);
    all.into_iter().fold(error, |error, (manager, field)| {
        error.because("FieldManagerConflict", &format!("conflict with {manager:?}"), Some(field))
    })
}

/// Removes what the manager applied before and does not apply any more, unless another apply manager owns it.
fn remove_given_up(object: &mut Value, old: &Fields, new: &Fields, others: &[Fields]) {
    for path in old.difference(new) {
        let is_owned = |path: &[Step]| {
            let mut owned = std::iter::once(new).chain(others).flatten();
            owned.any(|it| is_prefix(path, it) || covers(object, it, path))
        };
        // An item of which no manager owns a field goes as a whole, with what other writers put into it.
        let item = path.iter().position(|step| matches!(step, Step::Item(..))).map(|at| &path[..=at]);
        let gone = match item.filter(|item| !is_owned(item)) {
            Some(item) => item,
            None if !is_owned(path) => path,
            None => continue,
        };
        remove(object, gone);
    }
}

/// After another kind of write: what it changed is owned by no apply manager any more.
pub(crate) fn disown_changed(before: &Value, after: &mut Value) {
    let Some(entries) = before.pointer("/metadata/managedFields").and_then(Value::as_array).cloned() else {
        set_metadata(after, "managedFields", None);
        return;
    };
    let kept = entries.into_iter().filter_map(|mut entry| {
        let fields = from_fields_v1(&entry["fieldsV1"]);
        let n_before = fields.len();
        let kept: Fields = fields.into_iter().filter(|path| get(before, path) == get(after, path)).collect();
        if kept.len() < n_before {
            entry["fieldsV1"] = to_fields_v1(&kept);
        }
        (!kept.is_empty()).then_some(entry)
    });
    let kept: Vec<Value> = kept.collect();
    set_managed_fields(after, kept);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applier(manager: &str) -> Applier {
        Applier {
            manager: manager.to_owned(),
            force: false,
            api_version: "v1".to_owned(),
            subresource: "",
            now: json!("2026-01-01T00:00:00Z"),
        }
    }

    #[test]
    fn fields_that_a_manager_gives_up_are_removed_unless_another_has_them() {
        let first = apply(&json!({}), json!({ "spec": { "a": 1, "b": { "c": 2 } } }), &applier("x")).unwrap();
        let second = apply(&first, json!({ "spec": { "a": 1 } }), &applier("y")).unwrap();
        let third = apply(&second, json!({ "spec": {} }), &applier("x")).unwrap();
        assert_eq!(third["spec"], json!({ "a": 1 }), "y still has a");
        assert_eq!(apply(&third, json!({ "spec": { "a": 1 } }), &applier("y")).unwrap(), third, "nothing new");
    }

    #[test]
    fn a_conflict_names_managers_and_fields_and_force_takes_over() {
        let live = apply(&json!({}), json!({ "spec": { "a": 1, "b": 1 } }), &applier("x")).unwrap();
        let error = apply(&live, json!({ "spec": { "a": 2 } }), &applier("y")).unwrap_err();
        assert_eq!(error.message, "Apply failed with 1 conflict: conflict with \"x\": .spec.a");
        assert_eq!(error.details["causes"][0]["field"], ".spec.a");
        let error = apply(&live, json!({ "spec": { "a": 2, "b": 2 } }), &applier("y")).unwrap_err();
        assert!(
            error.message.starts_with("Apply failed with 2 conflicts: conflicts with \"x\":\n- .spec.a\n- .spec.b")
        );
        let forced = Applier { force: true, ..applier("y") };
        let taken = apply(&live, json!({ "spec": { "a": 2 } }), &forced).unwrap();
        assert_eq!(taken["spec"], json!({ "a": 2, "b": 1 }));
        let error = apply(&taken, json!({ "spec": { "a": 1, "b": 1 } }), &applier("x")).unwrap_err();
        assert_eq!(error.message, "Apply failed with 1 conflict: conflict with \"y\": .spec.a");
    }

    #[test]
    fn conditions_of_two_managers_live_side_by_side() {
        let a = json!({ "status": { "conditions": [{ "type": "A", "status": "True" }] } });
        let b = json!({ "status": { "conditions": [{ "type": "B", "status": "True" }] } });
        let live = apply(&json!({}), a, &applier("a")).unwrap();
        let live = apply(&live, b, &applier("b")).unwrap();
        assert_eq!(live["status"]["conditions"].as_array().unwrap().len(), 2);
        let live = apply(&live, json!({ "status": { "x": 1 } }), &applier("a")).unwrap();
        assert_eq!(live["status"]["conditions"], json!([{ "type": "B", "status": "True" }]));
    }

    #[test]
    fn what_another_writer_changed_is_owned_by_no_manager() {
        let live = apply(&json!({}), json!({ "spec": { "a": 1, "b": 1 } }), &applier("x")).unwrap();
        let mut changed = live.clone();
        changed["spec"]["a"] = json!(7);
        disown_changed(&live, &mut changed);
        let applied = apply(&changed, json!({ "spec": { "a": 3 } }), &applier("y")).unwrap();
        assert_eq!(applied["spec"]["a"], 3, "no conflict");
        let kept = apply(&changed, json!({ "spec": { "b": 1 } }), &applier("x")).unwrap();
        assert_eq!(kept["spec"]["a"], 7, "no longer x's to remove");
    }
}
