//! JSON patch, merge patch, strategic merge patch.

use serde_json::{Value, json};

use super::{config_map, config_maps, widget, widgets};
use crate::support::{Cluster, JSON_PATCH, MERGE, STRATEGIC, unique};

pub(crate) async fn a_json_patch_tests_before_it_changes(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({ "x": 1, "list": [1, 2] }))).await.expect(201);
    let path = format!("{path}/a");
    let patch = json!([
        { "op": "test", "path": "/spec/x", "value": 1 },
        { "op": "replace", "path": "/spec/x", "value": 2 },
        { "op": "add", "path": "/spec/list/-", "value": 3 },
        { "op": "remove", "path": "/spec/list/0" },
    ]);
    let after = cluster.patch(&path, JSON_PATCH, &patch).await.expect(200);
    assert_eq!(after["spec"], json!({ "x": 2, "list": [2, 3] }));
    cluster.patch(&path, JSON_PATCH, &patch).await.refused(422, "Invalid");
    let missing = json!([{ "op": "remove", "path": "/spec/none" }]);
    cluster.patch(&path, JSON_PATCH, &missing).await.refused(422, "Invalid");
    assert_eq!(cluster.get(&path).await.expect(200)["spec"], after["spec"]);
    cluster.patch(&path, JSON_PATCH, &json!({ "spec": {} })).await.refused(400, "BadRequest");
}

pub(crate) async fn a_merge_patch_removes_by_null(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({ "x": 1, "y": { "z": 1 } }))).await.expect(201);
    let patch = json!({ "metadata": { "annotations": { "a": "b" } }, "spec": { "x": null, "y": { "w": 2 } } });
    let after = cluster.patch(&format!("{path}/a"), MERGE, &patch).await.expect(200);
    assert_eq!(after["spec"], json!({ "y": { "z": 1, "w": 2 } }));
    assert_eq!(after["metadata"]["annotations"]["a"], "b");
    cluster.patch(&format!("{path}/none"), MERGE, &patch).await.refused(404, "NotFound");
    cluster.patch(&format!("{path}/a"), "application/json", &patch).await.refused(415, "UnsupportedMediaType");
}

pub(crate) async fn a_strategic_patch_merges_conditions_by_type(cluster: &Cluster) {
    let name = unique("node");
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "finalizers": ["a.io/x"] } });
    cluster.post("/api/v1/nodes", &node).await.expect(201);
    let path = format!("/api/v1/nodes/{name}");
    let condition = |kind: &str, status: &str| json!({ "status": { "conditions": [{ "type": kind, "status": status, "reason": "r" }] } });
    let status = format!("{path}/status");
    cluster.patch(&status, STRATEGIC, &condition("Ready", "True")).await.expect(200);
    cluster.patch(&status, STRATEGIC, &condition("DiskPressure", "False")).await.expect(200);
    let after = cluster.patch(&status, STRATEGIC, &condition("Ready", "False")).await.expect(200);
    let mut conditions: Vec<(&str, &str)> = after["status"]["conditions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| (it["type"].as_str().unwrap(), it["status"].as_str().unwrap()))
        .collect();
    conditions.sort_unstable();
    assert_eq!(conditions, [("DiskPressure", "False"), ("Ready", "False")]);
    let patch = json!({ "metadata": { "finalizers": ["a.io/y"] }, "spec": { "unschedulable": true } });
    let after = cluster.patch(&path, STRATEGIC, &patch).await.expect(200);
    assert_eq!(after["metadata"]["finalizers"].as_array().unwrap().len(), 2);
    assert_eq!(after["spec"]["unschedulable"], true);
    let taints = json!({ "spec": { "taints": [{ "key": "a", "effect": "NoSchedule" }] } });
    let after = cluster.patch(&path, STRATEGIC, &taints).await.expect(200);
    assert!(after["spec"]["taints"].as_array().unwrap().iter().any(|it| it["key"] == "a"));
    let free = json!({ "metadata": { "finalizers": null } });
    cluster.patch(&path, MERGE, &free).await.expect(200);
    cluster.delete(&path).await.expect(200);
}

pub(crate) async fn a_strategic_patch_of_a_custom_kind_is_refused(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let patch = json!({ "spec": { "x": 1 } });
    cluster.patch(&format!("{path}/a"), STRATEGIC, &patch).await.refused(415, "UnsupportedMediaType");
}

pub(crate) async fn a_patch_may_name_the_version_it_wants(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let created = cluster.post(&path, &config_map("a")).await.expect(201);
    let path = format!("{path}/a");
    let patch = |value: &str, version: &Value, uid: &Value| json!({ "data": { "key": value }, "metadata": { "resourceVersion": version, "uid": uid } });
    let (version, uid) = (&created["metadata"]["resourceVersion"], &created["metadata"]["uid"]);
    cluster.patch(&path, MERGE, &patch("2", version, uid)).await.expect(200);
    cluster.patch(&path, MERGE, &patch("3", version, uid)).await.refused(409, "Conflict");
    let foreign = json!({ "metadata": { "uid": "00000000-0000-4000-8000-000000000000" } });
    cluster.patch(&path, MERGE, &foreign).await.refused(422, "Invalid");
    assert_eq!(cluster.get(&path).await.expect(200)["data"]["key"], "2");
}
