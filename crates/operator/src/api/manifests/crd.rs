//! The CRDs of our five kinds.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::{Value, json};

use super::{ManifestError, PROVIDER_LABEL};
use crate::api::{
    NstanceCluster, NstanceMachine, NstanceMachinePool, NstanceMachineTemplate, NstanceShardGroup, names,
};

/// As JSON, ready to be sent to an API server.
pub fn crds() -> Result<Vec<Value>, ManifestError> {
    [
        NstanceCluster::crd(),
        NstanceMachinePool::crd(),
        NstanceMachine::crd(),
        NstanceMachineTemplate::crd(),
        NstanceShardGroup::crd(),
    ]
    .into_iter()
    .map(finish)
    .collect()
}

fn finish(crd: CustomResourceDefinition) -> Result<Value, ManifestError> {
    let mut crd = serde_json::to_value(&crd)
        .map_err(|source| ManifestError::Json { kind: crd.spec.names.kind.clone(), source })?;
    crd["metadata"]["labels"] = json!({
        // Cluster API's contract version, and which of our versions is for it.
        "cluster.x-k8s.io/v1beta2": names::VERSION,
        PROVIDER_LABEL.0: PROVIDER_LABEL.1,
        // Without it `clusterctl move` does not see the kind.
        "clusterctl.cluster.x-k8s.io": "",
    });
    if let Some(versions) = crd["spec"]["versions"].as_array_mut() {
        for version in versions {
            tidy(&mut version["schema"]["openAPIV3Schema"]);
        }
    }
    whole_numbers(&mut crd);
    Ok(crd)
}

/// Takes out of a schema what comes from Rust alone: an optional field may be absent, but never null.
fn tidy(schema: &mut Value) {
    let Some(schema) = schema.as_object_mut() else { return };
    schema.shift_remove("nullable");
    schema.shift_remove("title");
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        values.retain(|it| !it.is_null());
    }
    if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        properties.values_mut().for_each(tidy);
    }
    for below in ["items", "additionalProperties"] {
        if let Some(schema) = schema.get_mut(below) {
            tidy(schema);
        }
    }
}

/// Writes limits as `1`, not as `1.0`.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().map(|it| format!("{it}")).and_then(|it| it.parse::<i64>().ok());
            if let Some(whole) = whole {
                *value = json!(whole);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(object) => object.values_mut().for_each(whole_numbers),
        _ => (),
    }
}
