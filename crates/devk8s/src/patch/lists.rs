//! Which lists are merged item by item. Schemas are not looked at, so the names of the lists decide.

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ListRule {
    /// Replaced as a whole.
    Atomic,
    /// Items are told apart by this field.
    ByKey(&'static str),
    /// Items are plain values, each at most once.
    Set,
}

/// The rule for the list in field `name`.
pub(super) fn rule(name: &str) -> ListRule {
    match name {
        "conditions" | "addresses" => ListRule::ByKey("type"),
        "ownerReferences" => ListRule::ByKey("uid"),
        "containers" => ListRule::ByKey("name"),
        "finalizers" => ListRule::Set,
        _ => ListRule::Atomic,
    }
}

/// The rule for these items. A list that breaks its own rule (a missing key, a key twice) is atomic.
pub(super) fn rule_for(name: &str, items: &[Value]) -> ListRule {
    let rule = rule(name);
    let keys: Option<Vec<&str>> = match rule {
        ListRule::Atomic => None,
        ListRule::ByKey(key) => items.iter().map(|item| item.get(key)?.as_str()).collect(),
        ListRule::Set => items.iter().map(Value::as_str).collect(),
    };
    let Some(mut keys) = keys else { return ListRule::Atomic };
    keys.sort_unstable();
    if keys.windows(2).any(|pair| pair[0] == pair[1]) { ListRule::Atomic } else { rule }
}

pub(super) fn position(items: &[Value], key: &str, value: &Value) -> Option<usize> {
    items.iter().position(|item| item.get(key) == Some(value))
}
