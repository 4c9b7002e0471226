//! What hangs on an object and is no object itself: scale, eviction, binding, tokens.

pub(crate) mod eviction;
pub(crate) mod scale;
pub(crate) mod token;

use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    object::{self, Key, fields_mut, is_deleting, set_metadata, text},
    resources::Served,
    store::Txn,
    write::{WriteOptions, change_main},
};

/// The answer of an action that has no object to show.
pub(crate) fn success(code: StatusCode) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": code.as_u16() })
}

/// Puts a pod on a node, as a scheduler does.
pub(crate) fn bind(
    txn: &mut Txn<'_>,
    served: &Served,
    key: &Key,
    binding: &Value,
    options: &WriteOptions,
) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    let before = txn.current(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    let node = text(binding, "/target/name");
    if node.is_empty() {
        return Err(ApiError::invalid(resource, &key.name, "target.name", "Required value"));
    }
    let present = text(&before, "/spec/nodeName");
    if is_deleting(&before) {
        let why = format!("pod {} is being deleted, cannot be assigned to a host", key.name);
        return Err(ApiError::conflict(resource, &key.name, &why));
    }
    if !present.is_empty() {
        let why = format!("pod {} is already assigned to node {present:?}", key.name);
        return Err(ApiError::conflict(resource, &key.name, &why));
    }
    let mut after = (*before).clone();
    fields_mut(&mut after["spec"]).insert("nodeName".to_owned(), json!(node));
    set_metadata(&mut after, "resourceVersion", None);
    let bound = change_main(txn, resource, key, &before, after, options)?;
    if !options.dry_run {
        // The condition belongs to the status, which a change of the pod itself leaves alone.
        let mut scheduled = bound.clone();
        let condition = json!({
            "type": "PodScheduled", "status": "True", "lastTransitionTime": object::now(&*txn.store.clock),
        });
        let conditions = fields_mut(&mut scheduled["status"]).entry("conditions").or_insert_with(|| json!([]));
        if let Some(conditions) = conditions.as_array_mut() {
            conditions.retain(|it| it["type"] != "PodScheduled");
            conditions.push(condition);
        }
        txn.put(resource, key, scheduled)?;
    }
    Ok(success(StatusCode::CREATED))
}
