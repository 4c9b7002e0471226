//! Sets of fields, and their form in `managedFields` (`FieldsV1`).

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::lists::{ListRule, position, rule_for};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Field(String),
    /// An item of a list by its key.
    Item(String, String),
    /// A value of a set.
    Member(String),
}

pub(super) type Path = Vec<Step>;
pub(super) type Fields = BTreeSet<Path>;

/// The leaves of a value: scalars, empty objects, lists that are replaced as a whole. Nulls are no leaves.
pub(super) fn leaves(value: &Value) -> Fields {
    let mut all = Fields::new();
    collect(value, &mut Vec::new(), &mut all);
    all
}

fn collect(value: &Value, path: &mut Path, all: &mut Fields) {
    let below = |step: Step, value: &Value, path: &mut Path, all: &mut Fields| {
        path.push(step);
        collect(value, path, all);
        path.pop();
    };
    match value {
        Value::Null => {}
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                below(Step::Field(name.clone()), value, path, all);
            }
        }
        Value::Array(items) if !items.is_empty() => match rule_for(list_name(path), items) {
            ListRule::ByKey(key) => {
                for item in items {
                    let value = item.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
                    below(Step::Item(key.to_owned(), value), item, path, all);
                }
            }
            ListRule::Set => {
                for item in items {
                    let value = item.as_str().unwrap_or_default().to_owned();
                    below(Step::Member(value), item, path, all);
                }
            }
            ListRule::Atomic => drop(all.insert(path.clone())),
        },
        _ => drop(all.insert(path.clone())),
    }
}

fn list_name(path: &[Step]) -> &str {
    match path.last() {
        Some(Step::Field(name)) => name,
        _ => "",
    }
}

/// Whether what stands at a path is merged with what is laid over it, rather than replaced.
pub(super) fn is_merged(path: &[Step], value: &Value) -> bool {
    match value {
        Value::Object(_) => true,
        Value::Array(items) => rule_for(list_name(path), items) != ListRule::Atomic,
        _ => false,
    }
}

/// What stands at a path.
pub(super) fn get<'a>(value: &'a Value, path: &[Step]) -> Option<&'a Value> {
    path.iter().try_fold(value, |value, step| match step {
        Step::Field(name) => value.get(name),
        Step::Item(key, item) => {
            let items = value.as_array()?;
            items.get(position(items, key, &json!(item))?)
        }
        Step::Member(member) => value.as_array()?.iter().find(|it| *it == member),
    })
}

/// Lays `config` over `live`.
pub(super) fn overlay(live: &mut Value, config: &Value, name: &str) {
    match (live, config) {
        (_, Value::Null) => {}
        (Value::Object(live), Value::Object(config)) => {
            for (name, value) in config {
                if !value.is_null() {
                    overlay(live.entry(name.clone()).or_insert(Value::Null), value, name);
                }
            }
        }
        (Value::Array(live), Value::Array(config)) => match (rule_for(name, config), rule_for(name, live)) {
            (ListRule::ByKey(key), ListRule::ByKey(_)) => {
                for item in config {
                    match item.get(key).and_then(|value| position(live, key, value)) {
                        Some(at) => overlay(&mut live[at], item, ""),
                        None => live.push(item.clone()),
                    }
                }
            }
            (ListRule::Set, ListRule::Set) => {
                for item in config {
                    if !live.contains(item) {
                        live.push(item.clone());
                    }
                }
            }
            _ => live.clone_from(config),
        },
        (live, Value::Object(config)) => {
            let mut object = Value::Object(Map::new());
            overlay(&mut object, &Value::Object(config.clone()), name);
            *live = object;
        }
        (live, config) => *live = config.clone(),
    }
}

/// Removes what stands at a path, and what is empty above it afterwards.
pub(super) fn remove(value: &mut Value, path: &[Step]) {
    let Some((step, rest)) = path.split_first() else { return };
    match (step, value) {
        (Step::Field(name), Value::Object(fields)) => {
            if let Some(below) = fields.get_mut(name) {
                remove(below, rest);
                if rest.is_empty() || is_empty(below) {
                    fields.shift_remove(name);
                }
            }
        }
        (Step::Item(key, item), Value::Array(items)) => {
            if let Some(at) = position(items, key, &json!(item)) {
                remove(&mut items[at], rest);
                if rest.is_empty() || is_empty(&items[at]) {
                    items.remove(at);
                }
            }
        }
        (Step::Member(member), Value::Array(items)) => items.retain(|it| it != member),
        _ => {}
    }
}

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

pub(super) fn to_fields_v1(fields: &Fields) -> Value {
    let mut root = json!({});
    for path in fields {
        let mut at = &mut root;
        for step in path {
            let (name, is_item) = match step {
                Step::Field(name) => (format!("f:{name}"), false),
                Step::Item(key, item) => (format!("k:{}", json!({ key: item })), true),
                Step::Member(member) => (format!("v:{}", json!(member)), false),
            };
            at = &mut at[name];
            if at.is_null() {
                *at = if is_item { json!({ ".": {} }) } else { json!({}) };
            }
        }
    }
    root
}

/// Steps that cannot be read are left out: nothing is owned by them.
pub(super) fn from_fields_v1(value: &Value) -> Fields {
    let mut all = Fields::new();
    read(value, &mut Vec::new(), &mut all);
    all
}

fn read(value: &Value, path: &mut Path, all: &mut Fields) {
    let steps = value.as_object().into_iter().flatten();
    let mut n_below = 0;
    for (name, below) in steps {
        let step = match name.split_once(':') {
            Some(("f", name)) => Step::Field(name.to_owned()),
            Some(("k", key)) => {
                let key: Map<String, Value> = serde_json::from_str(key).unwrap_or_default();
                match key.into_iter().next() {
                    Some((key, Value::String(item))) => Step::Item(key, item),
                    _ => continue,
                }
            }
            Some(("v", member)) => match serde_json::from_str(member) {
                Ok(Value::String(member)) => Step::Member(member),
                _ => continue,
            },
            _ => continue,
        };
        n_below += 1;
        path.push(step);
        read(below, path, all);
        path.pop();
    }
    if n_below == 0 && !path.is_empty() {
        all.insert(path.clone());
    }
}

/// As the messages of a real API server write it: `.spec.conditions[type="Ready"].status`.
pub(super) fn display(path: &[Step]) -> String {
    let step = |step: &Step| match step {
        Step::Field(name) => format!(".{name}"),
        Step::Item(key, item) => format!("[{key}={}]", json!(item)),
        Step::Member(member) => format!("[={}]", json!(member)),
    };
    path.iter().map(step).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn object() -> Value {
        json!({
            "metadata": { "labels": { "a.b/c": "x" }, "finalizers": ["f1", "f2"] },
            "spec": { "replicas": 3, "list": [1, 2], "empty": {} },
            "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        })
    }

    #[test]
    fn sets_survive_their_written_form() {
        let fields = leaves(&object());
        assert_eq!(from_fields_v1(&to_fields_v1(&fields)), fields);
        let shown: Vec<String> = fields.iter().map(|path| display(path)).collect();
        assert_eq!(
            shown,
            [
                ".metadata.finalizers[=\"f1\"]",
                ".metadata.finalizers[=\"f2\"]",
                ".metadata.labels.a.b/c",
                ".spec.empty",
                ".spec.list",
                ".spec.replicas",
                ".status.conditions[type=\"Ready\"].status",
                ".status.conditions[type=\"Ready\"].type",
            ]
        );
    }

    #[test]
    fn removal_takes_empty_parents_along() {
        let mut object = object();
        for path in leaves(&object) {
            assert!(get(&object, &path).is_some(), "{}", display(&path));
            remove(&mut object, &path);
        }
        assert_eq!(object, json!({}));
    }

    fn value() -> impl Strategy<Value = Value> {
        let name = prop_oneof!["[a-c]", Just("conditions".to_owned()), Just("finalizers".to_owned())];
        let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(Value::from), "[a-c]".prop_map(Value::from)];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            let object = prop::collection::btree_map(name.clone(), inner.clone(), 0..4);
            let condition = ("[a-c]", inner.clone()).prop_map(|(kind, it)| json!({ "type": kind, "x": it }));
            prop_oneof![
                object.prop_map(|fields| Value::Object(fields.into_iter().collect())),
                prop::collection::vec(inner, 0..3).prop_map(Value::Array),
                prop::collection::vec(condition, 0..3).prop_map(Value::Array),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_set_survives_its_written_form(value in value()) {
            let fields: Fields = leaves(&value).into_iter().filter(|path| !path.is_empty()).collect();
            prop_assert_eq!(from_fields_v1(&to_fields_v1(&fields)), fields);
        }

        #[test]
        fn what_is_laid_over_another_value_is_found_in_it(live in value(), config in value()) {
            let mut merged = live;
            overlay(&mut merged, &config, "");
            for path in leaves(&config) {
                let (found, wanted) = (get(&merged, &path), get(&config, &path));
                // What is empty is laid over its like without effect.
                if !wanted.is_some_and(|it| is_empty(it) && is_merged(&path, it)) {
                    prop_assert_eq!(found, wanted);
                }
            }
        }
    }
}
