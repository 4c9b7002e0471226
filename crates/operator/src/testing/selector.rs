//! Label and field selectors, as far as the operator uses them.

use serde_json::Value;

use crate::ports::Selector;

pub(super) fn matches(selector: &Selector, namespace: &str, object: &Value) -> bool {
    selector.namespace.as_deref().is_none_or(|it| it.is_empty() || it == namespace)
        && selector.labels.as_deref().is_none_or(|it| terms(it).all(|it| has_label(it, object)))
        && selector.fields.as_deref().is_none_or(|it| terms(it).all(|it| has_field(it, object)))
}

fn terms(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|it| !it.is_empty())
}

/// `a=b`, `a==b`, `a!=b`, `a`, `!a`.
fn has_label(term: &str, object: &Value) -> bool {
    let value = |key: &str| object["metadata"]["labels"].get(key).and_then(Value::as_str);
    if let Some((key, wanted)) = term.split_once("!=") {
        value(key) != Some(wanted)
    } else if let Some((key, wanted)) = term.split_once('=') {
        value(key) == Some(wanted.trim_start_matches('='))
    } else if let Some(key) = term.strip_prefix('!') {
        value(key).is_none()
    } else {
        value(term).is_some()
    }
}

/// `path=value`, `path!=value`; an absent field is empty.
fn has_field(term: &str, object: &Value) -> bool {
    let value = |path: &str| {
        path.split('.').try_fold(object, |it, name| it.get(name)).and_then(Value::as_str).unwrap_or_default()
    };
    match (term.split_once("!="), term.split_once('=')) {
        (Some((path, wanted)), _) => value(path) != wanted,
        (None, Some((path, wanted))) => value(path) == wanted.trim_start_matches('='),
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn labels_and_fields_select() {
        let object = json!({"metadata": {"labels": {"a": "1"}}, "spec": {"nodeName": "n"}});
        let of = |labels: &str, fields: &str| {
            let text = |it: &str| (!it.is_empty()).then(|| it.to_owned());
            let selector = Selector { namespace: None, labels: text(labels), fields: text(fields) };
            matches(&selector, "default", &object)
        };
        assert!(of("a=1,!b", "spec.nodeName=n"));
        assert!(of("a,b!=2", "status.phase="));
        assert!(!of("a==2", ""));
        assert!(!of("", "spec.nodeName="));
    }
}
