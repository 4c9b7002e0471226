//! `scale`: the number of replicas of a kind, wherever it keeps it.

use serde_json::{Value, json};

use crate::{
    error::ApiError,
    object::{self, Key, fields_mut, set_metadata, text},
    patch::{PatchKind, patch},
    resources::{Resource, ScalePaths, Served},
    store::Txn,
    write::{WriteOptions, change_main},
};

fn paths(resource: &Resource) -> Result<&ScalePaths, ApiError> {
    resource.scale.as_ref().ok_or_else(ApiError::no_such_path)
}

fn number(object: &Value, pointer: &str) -> i64 {
    object.pointer(pointer).and_then(Value::as_i64).unwrap_or(0)
}

fn scale_of(paths: &ScalePaths, object: &Value) -> Value {
    let mut status = json!({ "replicas": number(object, &paths.status_replicas) });
    if let Some(selector) = paths.selector.as_deref().map(|it| text(object, it)).filter(|it| !it.is_empty()) {
        status["selector"] = json!(selector);
    }
    // Zero is left out, as by a real API server.
    let spec = match number(object, &paths.replicas) {
        0 => json!({}),
        replicas => json!({ "replicas": replicas }),
    };
    json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": {
            "name": object::name(object), "namespace": object::namespace(object), "uid": object::uid(object),
            "resourceVersion": object::version_text(object),
            "creationTimestamp": object["metadata"]["creationTimestamp"],
        },
        "spec": spec,
        "status": status,
    })
}

pub(crate) fn get(txn: &Txn<'_>, served: &Served, key: &Key) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    let paths = paths(resource)?;
    let object = txn.get(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    Ok(scale_of(paths, &object))
}

/// How a request says what it wants.
pub(crate) enum Wanted {
    Replacement(Value),
    Patch(PatchKind, Value),
}

pub(crate) fn change(
    txn: &mut Txn<'_>,
    served: &Served,
    key: &Key,
    wanted: Wanted,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    let paths = paths(resource)?;
    let before = txn.current(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    let scale = match wanted {
        Wanted::Replacement(scale) => scale,
        Wanted::Patch(PatchKind::Apply, _) => {
            return Err(ApiError::unsupported_media_type("scale takes a merge patch or a JSON patch"));
        }
        Wanted::Patch(kind, body) => patch(kind, &scale_of(paths, &before), body)?,
    };
    let name = object::name(&scale);
    if !name.is_empty() && name != key.name {
        return Err(ApiError::bad_request("the name of the object does not match the name on the URL"));
    }
    let replicas = match &scale["spec"]["replicas"] {
        Value::Null => 0,
        replicas => replicas.as_i64().filter(|it| 0 <= *it).ok_or_else(|| {
            let why = format!("Invalid value: {replicas}: must be greater than or equal to 0");
            ApiError::invalid(resource, &key.name, "spec.replicas", &why)
        })?,
    };
    let mut after = (*before).clone();
    set_at(&mut after, &paths.replicas, json!(replicas));
    for field in ["uid", "resourceVersion"] {
        let value = scale["metadata"].get(field).filter(|it| it.as_str().is_some_and(|it| !it.is_empty()));
        set_metadata(&mut after, field, value.cloned());
    }
    let after = change_main(txn, resource, key, &before, after, options)?;
    Ok(scale_of(paths, &after))
}

fn set_at(object: &mut Value, pointer: &str, value: Value) {
    let mut at = object;
    for name in pointer.split('/').skip(1) {
        at = fields_mut(at).entry(name).or_insert(Value::Null);
    }
    *at = value;
}
