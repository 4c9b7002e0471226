//! Every key of a config, with what its value may be, as the reader of configs asks for them.
//!
//! A key is asked for wherever its object is. So configs grow here: what is asked for as an object or a list becomes
//! one in the next round, until nothing new is asked for. Only what decides which keys there are (a kind, the form of
//! userdata) is written down in [`SEEDS`]; there, `null` keeps a key away. `any` is a name that people choose, and stands
//! as `*` in the list.

use std::collections::{BTreeMap, BTreeSet};

use nstance_config::{Checks, asked};
use nstance_core::{
    ports::schema::{ProviderSchema, SchemaFault},
    value::{Object, Value as OptionValue},
};
use serde_json::{Value, json};

use super::hold;

type Asked = BTreeMap<String, BTreeSet<String>>;

fn seed(provider: &str, balancer: &str, userdata: Value) -> Value {
    json!({
        "server": { "provider": { "kind": provider } },
        "certificates": { "agent": {}, "operator": {}, "ca": {}, "any": {} },
        "load_balancers": { balancer: {} },
        "defaults": { "userdata": userdata },
        "templates": { "any": {
            "userdata": userdata,
            // Named by their kinds, which have keys of their own.
            "files": {
                "certificate": { "kind": "certificate", "key": {} },
                "secret": { "kind": "secret" },
                "storage": { "kind": "storage" },
                "env": { "kind": "env" },
                "json": { "kind": "json" },
                "string": { "kind": "string" },
                "any": {},
            },
        } },
        "groups": { "any": { "template": "x" }, "default": { "any": {} } },
    })
}

/// One for each provider with load balancers of its own, and for each form of userdata and of a certificate's life.
fn seeds() -> Vec<Value> {
    let long = |more: Value| {
        let mut userdata = json!({ "templateString": null, "templateUrl": null });
        userdata.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        userdata
    };
    let none = json!({ "source": null, "encoding": null, "content": null });
    let text = long(json!({ "templateString": {}, "source": null, "encoding": null, "content": null }));
    let mut url = none.clone();
    url["templateString"] = Value::Null;
    url["templateUrl"] = "https://host/path".into();
    let mut hours = seed("aws", "aws", long(json!({ "content": "x", "source": null, "encoding": null })));
    for name in ["agent", "operator", "ca", "any"] {
        hours["certificates"][name]["ttl"] = 24.into();
    }
    let mut old = seed("fake", "fake", text);
    // The kind of a provider is asked for as a word.
    old["server"]["provider"] = json!({ "kind": {} });
    vec![
        hours,
        seed("gcp", "gcp", url),
        seed("process", "process", long(json!({}))),
        seed("aws", "aws", long(json!({ "source": "url", "encoding": "plain", "content": "https://host/path" }))),
        old,
    ]
}

/// The value at a path, which is made if its parent is there. Paths have the form `a.b[0].c`.
fn slot<'a>(config: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    let mut at = config;
    for part in path.split('.') {
        let (key, index) = match part.split_once('[') {
            Some((key, index)) => (key, index.trim_end_matches(']').parse::<usize>().ok()),
            None => (part, None),
        };
        at = at.as_object_mut()?.entry(key).or_insert_with(|| json!({}));
        if let Some(index) = index {
            at = at.get_mut(index)?;
        }
    }
    Some(at)
}

/// Reads a config until it has grown to its end.
fn grow(mut config: Value) -> Asked {
    let mut before = Asked::new();
    loop {
        let now = asked(config.to_string().as_bytes(), &Checks::offline(nstance_schemas::ALL));
        if now == before {
            return now;
        }
        for (path, wants) in now.iter().filter(|(path, _)| !path.is_empty()) {
            let Some(at) = slot(&mut config, path) else { continue };
            if *at != json!({}) {
                continue;
            }
            if wants.contains("map") {
                *at = json!({ "any": {} });
            } else if wants.contains("list") {
                *at = json!([{}]);
            }
        }
        before = now;
    }
}

fn shown(path: &str) -> String {
    let parts = path.split('.').map(|part| if part == "any" { "*" } else { part });
    parts.collect::<Vec<_>>().join(".").replace("[0]", "[]")
}

#[test]
fn keys_of_a_config() {
    let mut lines = BTreeSet::new();
    for seed in seeds() {
        for (path, wants) in grow(seed).into_iter().filter(|(path, _)| !path.is_empty()) {
            let path = shown(&path);
            lines.extend(wants.into_iter().map(|want| format!("{path}: {want}")));
            lines.insert(path);
        }
    }
    hold("config-keys", lines);
}

/// What an option holds shows in the complaint about a list.
fn options(schema: &dyn ProviderSchema) -> Vec<String> {
    let object = |key: &str| -> Object { [(key.to_owned(), OptionValue::Array(vec![]))].into_iter().collect() };
    let problems = schema.check_options(&object("no-such-option"));
    let known = problems.into_iter().find_map(|it| match it.what {
        SchemaFault::UnknownKey { known } => Some(known),
        _ => None,
    });
    let line = |key: &str| {
        let expected = schema.check_options(&object(key)).into_iter().find_map(|it| match it.what {
            SchemaFault::WrongType { expected } => Some(expected),
            _ => None,
        });
        format!("{} {key}: {}", schema.kind(), expected.expect("no option holds a list"))
    };
    known.expect("an unknown option is an error").into_iter().map(line).collect()
}

#[test]
fn options_of_providers() {
    hold("provider-options", nstance_schemas::ALL.iter().flat_map(|schema| options(*schema)));
}
