//! Fields of objects by path: which manager applied which, and how lists with keys are merged.

use std::collections::BTreeSet;

use serde_json::Value;

pub(super) type Path = Vec<String>;

/// The field by which items of this list are told apart; other lists are one value.
fn list_key(path: &[String]) -> Option<&'static str> {
    let names: Vec<&str> = path.iter().map(String::as_str).collect();
    match names.as_slice() {
        ["metadata", "finalizers"] => Some(""),
        ["metadata", "ownerReferences"] => Some("uid"),
        [.., "conditions"] => Some("type"),
        ["status", "shards" | "failureDomains"] => Some("name"),
        _ => None,
    }
}

fn item_key(path: &[String], item: &Value) -> Option<String> {
    let field = list_key(path)?;
    let value = if field.is_empty() { item.as_str() } else { item.get(field).and_then(Value::as_str) };
    value.map(|it| format!("{field}={it}"))
}

fn with(path: &[String], name: &str) -> Path {
    path.iter().cloned().chain([name.to_owned()]).collect()
}

/// The paths of all values.
pub(super) fn leaves(value: &Value) -> BTreeSet<Path> {
    let mut all = BTreeSet::new();
    collect(&[], value, &mut all);
    all
}

fn collect(path: &[String], value: &Value, all: &mut BTreeSet<Path>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                collect(&with(path, name), value, all);
            }
        }
        Value::Array(items) if list_key(path).is_some() => {
            for item in items {
                if let Some(key) = item_key(path, item) {
                    collect(&with(path, &key), item, all);
                }
            }
        }
        _ => {
            all.insert(path.to_vec());
        }
    }
}

/// The value at a path.
pub(super) fn get<'a>(value: &'a Value, path: &[String]) -> Option<&'a Value> {
    let mut value = value;
    for (at, name) in path.iter().enumerate() {
        value = match value {
            Value::Object(map) => map.get(name)?,
            Value::Array(items) => items.iter().find(|it| item_key(&path[..at], it).as_ref() == Some(name))?,
            _ => return None,
        };
    }
    Some(value)
}

/// Removes the value at a path, and what is empty then.
pub(super) fn remove(value: &mut Value, path: &[String]) {
    remove_below(value, path, 0);
}

fn remove_below(value: &mut Value, path: &[String], at: usize) {
    let Some(name) = path.get(at) else { return };
    let is_last = at + 1 == path.len();
    let is_empty =
        |it: &Value| it.as_object().is_some_and(serde_json::Map::is_empty) || it == &Value::Array(Vec::new());
    match value {
        Value::Object(map) => {
            let Some(child) = map.get_mut(name) else { return };
            if !is_last {
                remove_below(child, path, at + 1);
            }
            if is_last || is_empty(child) {
                map.remove(name);
            }
        }
        Value::Array(items) => {
            let found = items.iter().position(|it| item_key(&path[..at], it).as_ref() == Some(name));
            let Some(found) = found else { return };
            if !is_last {
                remove_below(&mut items[found], path, at + 1);
            }
            if is_last || is_empty(&items[found]) {
                items.remove(found);
            }
        }
        _ => {}
    }
}

/// Puts the fields of `applied` into `live`.
pub(super) fn merge(live: &mut Value, applied: &Value) {
    merge_at(&[], live, applied);
}

fn merge_at(path: &[String], live: &mut Value, applied: &Value) {
    match (live, applied) {
        (Value::Object(live), Value::Object(applied)) => {
            for (name, value) in applied {
                match live.get_mut(name) {
                    Some(place) => merge_at(&with(path, name), place, value),
                    None => {
                        live.insert(name.clone(), value.clone());
                    }
                }
            }
        }
        (Value::Array(live), Value::Array(applied)) if list_key(path).is_some() => {
            for item in applied {
                let key = item_key(path, item);
                match live.iter_mut().find(|it| key.is_some() && item_key(path, it) == key) {
                    Some(place) => merge_at(&with(path, key.as_deref().unwrap_or_default()), place, item),
                    None => live.push(item.clone()),
                }
            }
        }
        (live, applied) => *live = applied.clone(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_with_keys_are_merged_by_item_and_others_replaced() {
        let mut live = json!({
            "metadata": {"finalizers": ["theirs"]},
            "spec": {"providerIDList": ["a", "b"]},
            "status": {"conditions": [{"type": "Ready", "status": "False"}, {"type": "Other", "status": "True"}]},
        });
        merge(
            &mut live,
            &json!({
                "metadata": {"finalizers": ["ours"]},
                "spec": {"providerIDList": ["b"]},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }),
        );
        assert_eq!(live["metadata"]["finalizers"], json!(["theirs", "ours"]));
        assert_eq!(live["spec"]["providerIDList"], json!(["b"]));
        assert_eq!(live["status"]["conditions"][0]["status"], "True");
        assert_eq!(live["status"]["conditions"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn what_is_removed_leaves_no_empty_parent() {
        let mut value = json!({"metadata": {"finalizers": ["ours"], "annotations": {"a/b": "1"}}, "x": 1});
        for path in leaves(&value) {
            if path[0] == "metadata" {
                assert!(get(&value, &path).is_some());
                remove(&mut value, &path);
            }
        }
        assert_eq!(value, json!({"x": 1}));
    }
}
