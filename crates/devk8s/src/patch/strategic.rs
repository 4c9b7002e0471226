//! Strategic merge patch: a merge patch that merges some lists item by item.
//!
//! Of the directives only those are heeded that kubectl puts next to these lists: removal of an item (`$patch: delete`)
//! and of values (`$deleteFromPrimitiveList`). Directives about order are dropped.

use serde_json::{Map, Value};

use super::lists::{ListRule, position, rule};

const REMOVED_VALUES: &str = "$deleteFromPrimitiveList/";

pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Some(changes) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Some(fields) = target.as_object_mut() else { return };
    for (name, change) in changes {
        if let Some(list) = name.strip_prefix(REMOVED_VALUES) {
            let removed = change.as_array().map_or(&[][..], Vec::as_slice);
            if let Some(items) = fields.get_mut(list).and_then(Value::as_array_mut) {
                items.retain(|item| !removed.contains(item));
            }
        } else if name.starts_with('$') {
            // An order of items, or a directive that is not supported.
        } else if change.is_null() {
            fields.shift_remove(name);
        } else if let (Value::Array(changes), ListRule::ByKey(_) | ListRule::Set) = (change, rule(name)) {
            let items = fields.entry(name.clone()).or_insert_with(|| Value::Array(Vec::new()));
            if !items.is_array() {
                *items = Value::Array(Vec::new());
            }
            if let Some(items) = items.as_array_mut() {
                merge_list(rule(name), items, changes);
            }
        } else {
            merge(fields.entry(name.clone()).or_insert(Value::Null), change);
        }
    }
}

fn merge_list(rule: ListRule, items: &mut Vec<Value>, changes: &[Value]) {
    for change in changes {
        match rule {
            ListRule::ByKey(key) => {
                let at = change.get(key).and_then(|value| position(items, key, value));
                match (at, change.get("$patch").and_then(Value::as_str)) {
                    (Some(at), Some("delete")) => drop(items.remove(at)),
                    (None, Some("delete")) => {}
                    (Some(at), _) => merge(&mut items[at], change),
                    (None, _) => {
                        let mut item = Value::Null;
                        merge(&mut item, change);
                        items.push(item);
                    }
                }
            }
            ListRule::Set | ListRule::Atomic => {
                if !items.contains(change) {
                    items.push(change.clone());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn merged(mut target: Value, patch: Value) -> Value {
        merge(&mut target, &patch);
        target
    }

    #[test]
    fn conditions_are_merged_by_type() {
        let node = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "r" }] } });
        let patch = json!({ "status": { "conditions": [
            { "type": "Ready", "status": "False" }, { "type": "DiskPressure", "status": "False" },
        ] } });
        assert_eq!(
            merged(node, patch)["status"]["conditions"],
            json!([{ "type": "Ready", "status": "False", "reason": "r" }, { "type": "DiskPressure", "status": "False" }])
        );
    }

    #[test]
    fn finalizers_are_a_set_and_other_lists_are_replaced() {
        let object = json!({ "metadata": { "finalizers": ["a", "b"] }, "spec": { "taints": [1, 2] } });
        let patch = json!({
            "metadata": { "finalizers": ["b", "c"], "$deleteFromPrimitiveList/finalizers": ["a"] },
            "spec": { "taints": [3] },
        });
        assert_eq!(
            merged(object, patch),
            json!({ "metadata": { "finalizers": ["b", "c"] }, "spec": { "taints": [3] } })
        );
    }

    #[test]
    fn items_and_fields_can_be_removed() {
        let object = json!({ "spec": { "containers": [{ "name": "a" }, { "name": "b", "image": "x" }] }, "gone": 1 });
        let patch = json!({
            "spec": { "containers": [{ "name": "a", "$patch": "delete" }, { "name": "b", "image": null }],
                      "$setElementOrder/containers": [{ "name": "b" }] },
            "gone": null,
        });
        assert_eq!(merged(object, patch), json!({ "spec": { "containers": [{ "name": "b" }] } }));
    }
}
