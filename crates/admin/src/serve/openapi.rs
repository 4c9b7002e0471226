//! The OpenAPI document, written from the table of routes.

use http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::route::{Access, Place, Route};

pub(super) fn document(routes: &[Route], schemas: &Map<String, Value>) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in routes {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.as_str().to_ascii_lowercase()] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Nstance",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Look at and steer a cluster of Nstance. Shards are asked beside each other: 200 if all \
                            succeeded, 207 if some did, else the highest code of theirs. Groups, and how \
                            much shards have, are answered from memory where a shard's streams are open, and \
                            never as they were before a change that was made here; as_of says how old that is. \
                            Instances and drains are asked for every time, for streams do not tell what agents \
                            report, nor who acknowledged.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    })
}

fn operation(route: &Route) -> Value {
    let parameters = route.params.iter().map(|param| {
        let place = match param.place {
            Place::Path => "path",
            Place::Query => "query",
            Place::Header => "header",
        };
        json!({
            "name": param.name,
            "in": place,
            "required": param.place == Place::Path,
            "description": param.summary,
            "schema": param.schema,
        })
    });
    let mut responses = Map::new();
    for answer in &route.answers {
        let content: Map<String, Value> =
            answer.content.iter().map(|(kind, schema)| ((*kind).to_owned(), json!({"schema": schema}))).collect();
        let mut response = json!({"description": answer.summary, "headers": headers(answer.status)});
        if !content.is_empty() {
            response["content"] = content.into();
        }
        responses.insert(answer.status.as_u16().to_string(), response);
    }
    let mut operation = json!({
        "operationId": route.id,
        "summary": route.summary,
        "parameters": parameters.collect::<Vec<_>>(),
        "responses": responses,
    });
    if let Some(schema) = &route.body {
        operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if route.access == Access::Open {
        operation["security"] = json!([]);
    }
    if route.access != Access::Change && route.method != Method::GET {
        operation["description"] = "Has no effect: it is a question with a body.".into();
    }
    operation
}

fn headers(status: StatusCode) -> Value {
    let mut headers = json!({"X-Request-Id": {"description": "As sent, or ours", "schema": {"type": "string"}}});
    if status == StatusCode::NOT_MODIFIED {
        headers["ETag"] = json!({"schema": {"type": "string"}});
    }
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        headers["Retry-After"] = json!({"description": "In seconds", "schema": {"type": "integer", "minimum": 0}});
    }
    headers
}
