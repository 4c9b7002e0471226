//! Label and field selectors.

use serde_json::Value;

use crate::{
    error::ApiError,
    object::{name, namespace},
    resources::Resource,
};

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    Absent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

impl Requirement {
    fn matches(&self, value: Option<&str>) -> bool {
        let listed = |values: &[String]| value.is_some_and(|value| values.iter().any(|it| it == value));
        match &self.test {
            Test::In(values) => listed(values),
            Test::NotIn(values) => !listed(values),
            Test::Exists => value.is_some(),
            Test::Absent => value.is_none(),
        }
    }
}

/// Requirements on labels; without any it matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LabelSelector(Vec<Requirement>);

impl LabelSelector {
    /// Reads the form of queries: `a=b,c!=d,e in (f,g),!h`.
    pub(crate) fn parse(text: &str) -> Result<Self, ApiError> {
        let bad = |part: &str| ApiError::bad_request(format!("unable to parse requirement: {part:?}"));
        let mut all = Vec::new();
        for part in split_outside_parentheses(text) {
            let part = part.trim();
            if part.is_empty() {
                continue;
            }
            let requirement = requirement(part).ok_or_else(|| bad(part))?;
            if requirement.key.is_empty() || requirement.key.contains(|c: char| " ()=!<>".contains(c)) {
                return Err(bad(part));
            }
            all.push(requirement);
        }
        Ok(Self(all))
    }

    /// Reads the form of objects: `matchLabels` and `matchExpressions`.
    pub(crate) fn of_object(selector: &Value) -> Self {
        let labels = selector["matchLabels"].as_object().into_iter().flatten().map(|(key, value)| Requirement {
            key: key.clone(),
            test: Test::In(vec![value.as_str().unwrap_or_default().to_owned()]),
        });
        let expressions = selector["matchExpressions"].as_array().into_iter().flatten().filter_map(|it| {
            let values = it["values"].as_array().into_iter().flatten();
            let values = values.filter_map(Value::as_str).map(str::to_owned).collect();
            let test = match it["operator"].as_str()? {
                "In" => Test::In(values),
                "NotIn" => Test::NotIn(values),
                "Exists" => Test::Exists,
                "DoesNotExist" => Test::Absent,
                _ => return None,
            };
            Some(Requirement { key: it["key"].as_str()?.to_owned(), test })
        });
        Self(labels.chain(expressions).collect())
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        self.0.iter().all(|it| it.matches(labels.and_then(|labels| labels.get(&it.key)).and_then(Value::as_str)))
    }
}

fn requirement(part: &str) -> Option<Requirement> {
    let of = |key: &str, test| Some(Requirement { key: key.trim().to_owned(), test });
    if let Some(key) = part.strip_prefix('!').filter(|rest| !rest.contains('=')) {
        return of(key, Test::Absent);
    }
    if let Some((key, value)) = part.split_once("!=") {
        return of(key, Test::NotIn(vec![value.trim().to_owned()]));
    }
    if let Some((key, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
        return of(key, Test::In(vec![value.trim().to_owned()]));
    }
    let Some((head, values)) = part.split_once('(') else {
        return (!part.contains(' ')).then(|| Requirement { key: part.to_owned(), test: Test::Exists });
    };
    let values = values.strip_suffix(')')?.split(',').map(|it| it.trim().to_owned()).collect();
    match head.trim().rsplit_once(' ')? {
        (key, "in") => of(key, Test::In(values)),
        (key, "notin") => of(key, Test::NotIn(values)),
        _ => None,
    }
}

fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// Requirements on a few fields, joined by commas: `spec.nodeName=a,status.phase!=Failed`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldSelector(Vec<FieldRequirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct FieldRequirement {
    field: String,
    equal: bool,
    value: String,
}

impl FieldSelector {
    pub(crate) fn parse(text: &str, resource: &Resource) -> Result<Self, ApiError> {
        let mut all = Vec::new();
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (field, equal, value) = if let Some((field, value)) = part.split_once("!=") {
                (field, false, value)
            } else if let Some((field, value)) = part.split_once("==").or_else(|| part.split_once('=')) {
                (field, true, value)
            } else {
                let message = format!("invalid selector: '{text}'; can't understand '{part}'");
                return Err(ApiError::bad_request(message));
            };
            let known = ["metadata.name", "metadata.namespace"].contains(&field)
                || resource.selectable.iter().any(|it| it == field);
            if !known {
                return Err(ApiError::bad_request(format!("field label not supported: {field}")));
            }
            all.push(FieldRequirement { field: field.to_owned(), equal, value: value.to_owned() });
        }
        Ok(Self(all))
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|it| (field(object, &it.field) == it.value) == it.equal)
    }
}

fn field(object: &Value, path: &str) -> String {
    match path {
        "metadata.name" => return name(object).to_owned(),
        "metadata.namespace" => return namespace(object).to_owned(),
        _ => {}
    }
    // The source of an event is selected by its component.
    let path = if path == "source" { "source.component" } else { path };
    match path.split('.').try_fold(object, |value, field| value.get(field)) {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) if path == "spec.unschedulable" => "false".to_owned(),
        None | Some(Value::Null) => String::new(),
        Some(other) => other.to_string(),
    }
}

/// Both kinds, and the namespace of the request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Selection {
    pub(crate) namespace: Option<String>,
    pub(crate) labels: LabelSelector,
    pub(crate) fields: FieldSelector,
}

impl Selection {
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.namespace.as_deref().is_none_or(|it| it == namespace(object))
            && self.labels.matches(object)
            && self.fields.matches(object)
    }

    /// Whether anything but the namespace is selected.
    pub(crate) fn is_partial(&self) -> bool {
        !self.labels.0.is_empty() || !self.fields.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::Registry;

    #[test]
    fn label_selectors_select() {
        let object = json!({ "metadata": { "labels": { "app": "a", "tier": "x" } } });
        for (text, matches) in [
            ("", true),
            ("app=a", true),
            ("app==a,tier=x", true),
            ("app=b", false),
            ("app!=b", true),
            ("none!=b", true),
            ("app", true),
            ("!app", false),
            ("!none", true),
            ("app in (a, b),tier notin (y)", true),
            ("app in (b)", false),
            ("tier notin (x,y)", false),
        ] {
            assert_eq!(LabelSelector::parse(text).unwrap().matches(&object), matches, "{text}");
        }
        for bad in ["a b", "a in b", "a > 1", "=a", "a in (b"] {
            assert!(LabelSelector::parse(bad).is_err(), "{bad}");
        }
        let selector = json!({ "matchLabels": { "app": "a" },
            "matchExpressions": [{ "key": "tier", "operator": "In", "values": ["x"] }] });
        assert!(LabelSelector::of_object(&selector).matches(&object));
        assert!(LabelSelector::of_object(&json!({})).matches(&object));
    }

    #[test]
    fn field_selectors_know_the_fields_of_their_kind_only() {
        let registry = Registry::new(&[]);
        let pods = registry.by_id("pods").unwrap();
        let pod = json!({ "metadata": { "name": "p" }, "spec": { "nodeName": "n" }, "status": { "phase": "Running" } });
        for (text, matches) in [
            ("spec.nodeName=n,status.phase!=Failed", true),
            ("metadata.name=p", true),
            ("spec.nodeName=", false),
            ("status.phase!=Running", false),
        ] {
            assert_eq!(FieldSelector::parse(text, &pods).unwrap().matches(&pod), matches, "{text}");
        }
        let error = FieldSelector::parse("spec.other=x", &pods).unwrap_err();
        assert_eq!(error.message, "field label not supported: spec.other");
        let nodes = registry.by_id("nodes").unwrap();
        assert!(FieldSelector::parse("spec.unschedulable=false", &nodes).unwrap().matches(&json!({})));
    }
}
