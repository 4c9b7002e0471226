//! What the operator shows and reads in Kubernetes: fields of its kinds, names on objects, conditions, events; and its
//! config file.

use nstance_operator::{
    api::{
        conditions::kind,
        manifests::crds,
        names::{annotation, finalizer, label, manager},
    },
    cluster::events::Reason,
    config,
};
use serde_json::Value;

use super::hold;

#[test]
fn event_reasons() {
    hold("event-reasons-operator", Reason::ALL.iter().map(|it| it.as_str().to_owned()));
}

#[test]
fn condition_types() {
    hold("conditions-operator", kind::ALL.iter().map(|it| (*it).to_owned()));
}

/// Ours, and those of others that it reads or writes.
#[test]
fn names_on_objects() {
    let kinds = [
        ("annotation", annotation::ALL),
        ("field manager", manager::ALL),
        ("finalizer", finalizer::ALL),
        ("label", label::ALL),
    ];
    hold("names-operator", kinds.into_iter().flat_map(|(kind, all)| all.iter().map(move |it| format!("{kind} {it}"))));
}

#[test]
fn config_keys() {
    hold("config-keys-operator", config::keys());
}

/// `path: type` for every field below, and a line for each word of an enum. `*` is a key that people choose.
fn fields(schema: &Value, path: &str, found: &mut Vec<String>) {
    let kind = schema["type"].as_str().unwrap_or("any");
    found.push(format!("{path}: {kind}"));
    let words = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    found.extend(words.map(|it| format!("{path}: \"{it}\"")));
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        fields(schema, &format!("{path}.{name}"), found);
    }
    if schema["items"].is_object() {
        fields(&schema["items"], &format!("{path}[]"), found);
    }
    if schema["additionalProperties"].is_object() {
        fields(&schema["additionalProperties"], &format!("{path}.*"), found);
    }
}

#[test]
fn fields_of_kinds() {
    let mut lines = Vec::new();
    for crd in crds().expect("the CRDs are JSON") {
        let spec = &crd["spec"];
        let text = |value: &Value| value.as_str().expect("a name").to_owned();
        let (kind, plural) = (text(&spec["names"]["kind"]), text(&spec["names"]["plural"]));
        lines.push(format!("{kind} {plural}.{} {}", text(&spec["group"]), text(&spec["scope"])));
        for short in spec["names"]["shortNames"].as_array().into_iter().flatten() {
            lines.push(format!("{kind} short name {}", text(short)));
        }
        for version in spec["versions"].as_array().expect("versions") {
            let at = format!("{kind} {}", text(&version["name"]));
            lines.push(at.clone());
            for subresource in version["subresources"].as_object().into_iter().flatten() {
                lines.push(format!("{at} subresource {}", subresource.0));
            }
            let schema = &version["schema"]["openAPIV3Schema"];
            for (name, schema) in schema["properties"].as_object().expect("properties") {
                fields(schema, &format!("{at} {name}"), &mut lines);
            }
        }
    }
    assert!(100 < lines.len(), "the schemas are not understood");
    hold("crd-fields", lines);
}
