//! Label selectors as objects carry them: `matchLabels` and `matchExpressions`.

use serde_json::{Map, Value};

/// An empty selector selects everything; a missing one (null) is the caller's to interpret, here it selects nothing.
pub(crate) fn selects(selector: &Value, labels: Option<&Map<String, Value>>) -> bool {
    let Some(selector) = selector.as_object() else { return false };
    let label = |name: &str| labels.and_then(|it| it.get(name)).and_then(Value::as_str);
    let equal = selector.get("matchLabels").and_then(Value::as_object);
    let expressions = selector.get("matchExpressions").and_then(Value::as_array);
    equal.into_iter().flatten().all(|(name, value)| label(name) == value.as_str())
        && expressions.into_iter().flatten().all(|it| {
            let values = it["values"].as_array();
            let is_listed = |label: &str| values.is_some_and(|values| values.iter().any(|value| value == label));
            match (it["operator"].as_str(), label(it["key"].as_str().unwrap_or_default())) {
                (Some("In"), label) => label.is_some_and(is_listed),
                (Some("NotIn"), label) => !label.is_some_and(is_listed),
                (Some("Exists"), label) => label.is_some(),
                (Some("DoesNotExist"), label) => label.is_none(),
                _ => false,
            }
        })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_and_expressions_must_all_hold() {
        let labels = json!({ "app": "web", "tier": "front" });
        let selected = |selector: Value| selects(&selector, labels.as_object());
        assert!(selected(json!({})));
        assert!(!selected(Value::Null));
        assert!(selected(json!({ "matchLabels": { "app": "web" } })));
        assert!(!selected(json!({ "matchLabels": { "app": "web", "x": "y" } })));
        let expression = |key: &str, operator: &str| json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": ["web", "db"] }] });
        assert!(selected(expression("app", "In")));
        assert!(!selected(expression("app", "NotIn")));
        assert!(selected(expression("none", "NotIn")));
        assert!(selected(expression("app", "Exists")));
        assert!(selected(expression("none", "DoesNotExist")));
        assert!(!selected(expression("app", "Like")));
    }
}
