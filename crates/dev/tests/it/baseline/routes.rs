//! What can be asked over HTTP, and what comes back.

use nstance_core::ports::peers::Election;
use serde_json::Value;

use super::hold;

#[test]
fn of_the_servers_health_port() {
    hold("routes-server", nstance_server::http::paths().map(|path| format!("GET {path}")));
}

#[test]
fn of_the_servers_election_port() {
    let paths = [Election::Shard, Election::Cluster].map(nstance_server::peer::wire::path);
    hold("routes-election", paths.map(|path| format!("GET {path}")));
}

#[test]
fn of_the_agents_local_port() {
    hold("routes-agent", nstance_agent::local::paths().map(|path| format!("GET {path}")));
}

/// What a schema says, a line for each thing: types, keys, words, patterns. Texts and limits are free to change.
fn schema(at: &str, schema: &Value, lines: &mut Vec<String>) {
    if let Some(reference) = schema["$ref"].as_str() {
        lines.push(format!("{at}: {}", reference.rsplit('/').next().unwrap_or_default()));
    }
    match &schema["type"] {
        Value::Array(kinds) => {
            lines.extend(kinds.iter().filter_map(Value::as_str).map(|kind| format!("{at}: {kind}")));
        }
        Value::String(kind) => lines.push(format!("{at}: {kind}")),
        _ => {}
    }
    for way in schema["anyOf"].as_array().into_iter().flatten() {
        self::schema(at, way, lines);
    }
    for word in schema["enum"].as_array().into_iter().flatten() {
        lines.push(format!("{at}: {word}"));
    }
    for (key, of) in schema["properties"].as_object().into_iter().flatten() {
        let required = schema["required"].as_array().is_some_and(|it| it.iter().any(|it| it == key));
        let at = format!("{at}.{key}");
        if required {
            lines.push(format!("{at}: required"));
        }
        self::schema(&at, of, lines);
    }
    for (suffix, key) in [("[]", "items"), (".*", "additionalProperties")] {
        if schema[key].is_object() {
            self::schema(&format!("{at}{suffix}"), &schema[key], lines);
        }
    }
}

fn operation(at: &str, operation: &Value, lines: &mut Vec<String>) {
    lines.push(at.to_owned());
    lines.push(format!("{at} operation {}", operation["operationId"].as_str().unwrap_or_default()));
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let text = |key: &str| parameter[key].as_str().unwrap_or_default().to_owned();
        let at = format!("{at} {} {}", text("in"), text("name"));
        lines.push(at.clone());
        schema(&at, &parameter["schema"], lines);
    }
    for (kind, media) in operation["requestBody"]["content"].as_object().into_iter().flatten() {
        schema(&format!("{at} body {kind}"), &media["schema"], lines);
    }
    for (status, response) in operation["responses"].as_object().into_iter().flatten() {
        lines.push(format!("{at} {status}"));
        for header in response["headers"].as_object().into_iter().flatten() {
            lines.push(format!("{at} {status} header {}", header.0));
        }
        for (kind, media) in response["content"].as_object().into_iter().flatten() {
            let at = format!("{at} {status} {kind}");
            lines.push(at.clone());
            schema(&at, &media["schema"], lines);
        }
    }
}

#[test]
fn of_the_admin_server() {
    let document = nstance_admin::serve::openapi_document(&["dev-1".to_owned()]);
    let mut lines = Vec::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, it) in methods.as_object().unwrap() {
            operation(&format!("{} {path}", method.to_ascii_uppercase()), it, &mut lines);
        }
    }
    hold("routes-admin", lines);
}

#[test]
fn objects_of_the_admin_server() {
    let document = nstance_admin::serve::openapi_document(&["dev-1".to_owned()]);
    let mut lines = Vec::new();
    for (name, it) in document["components"]["schemas"].as_object().unwrap() {
        schema(name, it, &mut lines);
    }
    hold("routes-admin-objects", lines);
}
