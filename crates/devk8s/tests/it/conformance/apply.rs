//! Server-side apply.

use serde_json::{Value, json};

use super::{config_map, config_maps, widget, widgets};
use crate::support::{APPLY, Cluster, MERGE};

pub(crate) async fn an_apply_creates_and_then_changes(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    let created = cluster.apply(&path, "m", &widget("a", &json!({ "x": 1 }))).await.expect(201);
    assert_eq!((&created["spec"]["x"], &created["metadata"]["generation"]), (&json!(1), &json!(1)));
    let entry = &created["metadata"]["managedFields"][0];
    assert_eq!((&entry["manager"], &entry["operation"]), (&json!("m"), &json!("Apply")));
    assert_eq!(entry["fieldsV1"], json!({ "f:spec": { "f:x": {} } }));
    let after = cluster.apply(&path, "m", &widget("a", &json!({ "x": 2, "y": 1 }))).await.expect(200);
    assert_eq!(after["spec"], json!({ "x": 2, "y": 1 }));
    assert_eq!(after["metadata"]["uid"], created["metadata"]["uid"]);
    let mut other_name = widget("b", &json!({}));
    cluster.apply(&path, "m", &other_name).await.refused(400, "BadRequest");
    other_name["metadata"] = json!({ "name": "a", "managedFields": [{}] });
    cluster.apply(&path, "m", &other_name).await.refused(400, "BadRequest");
}

pub(crate) async fn a_conflict_names_manager_and_field_and_force_takes_over(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    cluster.apply(&path, "first", &widget("a", &json!({ "x": 1, "y": 1 }))).await.expect(201);
    let wish = widget("a", &json!({ "x": 2 }));
    let refused = cluster.apply(&path, "second", &wish).await.refused(409, "Conflict");
    assert_eq!(refused["message"], "Apply failed with 1 conflict: conflict with \"first\": .spec.x");
    let cause = &refused["details"]["causes"][0];
    assert_eq!((&cause["reason"], &cause["field"]), (&json!("FieldManagerConflict"), &json!(".spec.x")));
    let same = widget("a", &json!({ "y": 1 }));
    cluster.apply(&path, "third", &same).await.expect(200);
    let forced = format!("{path}?fieldManager=second&force=true");
    let after = cluster.patch(&forced, APPLY, &wish).await.expect(200);
    assert_eq!(after["spec"], json!({ "x": 2, "y": 1 }));
    let refused =
        cluster.apply(&path, "first", &widget("a", &json!({ "x": 1, "y": 1 }))).await.refused(409, "Conflict");
    assert!(refused["message"].as_str().unwrap().contains("\"second\": .spec.x"), "{refused}");
}

pub(crate) async fn what_a_manager_gives_up_is_removed(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    cluster.apply(&path, "a", &widget("a", &json!({ "x": 1, "y": 1, "z": { "w": 1 } }))).await.expect(201);
    cluster.apply(&path, "b", &widget("a", &json!({ "y": 1 }))).await.expect(200);
    cluster.patch(&path, MERGE, &json!({ "spec": { "other": 1 } })).await.expect(200);
    let after = cluster.apply(&path, "a", &widget("a", &json!({ "x": 1 }))).await.expect(200);
    assert_eq!(
        (&after["spec"]["x"], &after["spec"]["y"], &after["spec"]["other"], after["spec"]["z"].get("w")),
        (&json!(1), &json!(1), &json!(1), None),
        "y is b's too, and the writer of other never applied"
    );
}

pub(crate) async fn two_managers_share_a_list_of_conditions(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let path = format!("{path}/a/status");
    let with = |kind: &str, status: &str| {
        let mut object = widget("a", &json!({}));
        object["status"] = json!({ "conditions": [{ "type": kind, "status": status }] });
        object
    };
    cluster.apply(&path, "a", &with("A", "True")).await.expect(200);
    cluster.apply(&path, "b", &with("B", "True")).await.expect(200);
    let after = cluster.apply(&path, "b", &with("B", "False")).await.expect(200);
    let mut conditions = after["status"]["conditions"].as_array().unwrap().clone();
    conditions.sort_by_key(|it| it["type"].to_string());
    assert_eq!(conditions, [json!({ "type": "A", "status": "True" }), json!({ "type": "B", "status": "False" })]);
    cluster.apply(&path, "b", &with("A", "False")).await.refused(409, "Conflict");
    let mut none = widget("a", &json!({}));
    none["status"] = json!({ "replicas": 1 });
    let after = cluster.apply(&path, "a", &none).await.expect(200);
    assert_eq!(after["status"]["conditions"], json!([{ "type": "B", "status": "False" }]));
}

pub(crate) async fn an_apply_for_a_uid_that_is_gone_conflicts(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let created = cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let path = format!("{path}/a");
    let mut object = widget("a", &json!({ "x": 1 }));
    object["metadata"]["uid"] = created["metadata"]["uid"].clone();
    cluster.apply(&path, "m", &object).await.expect(200);
    cluster.delete(&path).await.expect(200);
    cluster.apply(&path, "m", &object).await.refused(409, "Conflict");
    cluster.get(&path).await.refused(404, "NotFound");
    cluster.apply(&path, "m", &widget("a", &json!({}))).await.expect(201);
    cluster.apply(&path, "m", &object).await.refused(422, "Invalid");
}

pub(crate) async fn an_apply_without_manager_is_refused(cluster: &Cluster) {
    let path = format!("{}/a", config_maps(&cluster.namespace().await));
    let answer = cluster.patch(&path, APPLY, &config_map("a")).await;
    assert!([400, 422].contains(&answer.code), "{}", answer.body);
    cluster.get(&path).await.refused(404, "NotFound");
}

pub(crate) async fn an_apply_that_changes_nothing_keeps_the_version(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    let version = |object: Value| object["metadata"]["resourceVersion"].clone();
    let first = version(cluster.apply(&path, "m", &widget("a", &json!({ "x": 1 }))).await.expect(201));
    let second = version(cluster.apply(&path, "m", &widget("a", &json!({ "x": 1 }))).await.expect(200));
    assert_eq!(first, second);
}

pub(crate) async fn managers_of_object_and_status_do_not_meet(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    cluster.apply(&path, "m", &widget("a", &json!({ "x": 1 }))).await.expect(201);
    let mut status = widget("a", &json!({ "x": 9 }));
    status["status"] = json!({ "replicas": 1 });
    let after = cluster.apply(&format!("{path}/status"), "m", &status).await.expect(200);
    assert_eq!((&after["spec"]["x"], &after["status"]["replicas"]), (&json!(1), &json!(1)));
    let after = cluster.apply(&path, "m", &widget("a", &json!({ "x": 2 }))).await.expect(200);
    assert_eq!((&after["spec"]["x"], &after["status"]["replicas"]), (&json!(2), &json!(1)));
}

pub(crate) async fn an_apply_to_the_status_creates_nothing(cluster: &Cluster) {
    let path = format!("{}/a", widgets(&cluster.namespace().await));
    let mut object = widget("a", &json!({}));
    object["status"] = json!({ "replicas": 1 });
    cluster.apply(&format!("{path}/status"), "m", &object).await.refused(404, "NotFound");
    let created = cluster.apply(&path, "m", &object).await.expect(201);
    assert_eq!(created["status"], Value::Null);
    object["metadata"]["resourceVersion"] = created["metadata"]["resourceVersion"].clone();
    cluster.apply(&format!("{path}/status"), "m", &object).await.expect(200);
    cluster.apply(&format!("{path}/status"), "n", &object).await.refused(409, "Conflict");
}
