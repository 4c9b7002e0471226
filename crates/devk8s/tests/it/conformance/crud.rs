//! Creating, reading and updating.

use serde_json::{Value, json};

use super::{config_map, config_maps, widget, widgets};
use crate::support::{Cluster, MERGE, unique};

pub(crate) async fn an_object_is_created_once(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let created = cluster.post(&path, &config_map("a")).await.expect(201);
    assert_eq!(created["data"]["key"], "value");
    let refused = cluster.post(&path, &config_map("a")).await.refused(409, "AlreadyExists");
    assert_eq!((&refused["details"]["name"], &refused["details"]["kind"]), (&json!("a"), &json!("configmaps")));
    assert_eq!(cluster.get(&format!("{path}/a")).await.expect(200)["metadata"], created["metadata"]);
    cluster.get(&format!("{path}/b")).await.refused(404, "NotFound");
    cluster.put(&format!("{path}/b"), &config_map("b")).await.refused(404, "NotFound");
}

pub(crate) async fn names_are_generated_and_checked(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let mut map = config_map("x");
    map["metadata"] = json!({ "generateName": "made-" });
    let names: Vec<String> = [cluster.post(&path, &map).await.expect(201), cluster.post(&path, &map).await.expect(201)]
        .iter()
        .map(|it| it["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    assert!(names.iter().all(|it| it.starts_with("made-") && it.len() == 10) && names[0] != names[1], "{names:?}");
    for bad in ["Upper", "a_b", "-a", "a..b", "a/b"] {
        cluster.post(&path, &config_map(bad)).await.refused(422, "Invalid");
    }
    map["metadata"] = json!({});
    cluster.post(&path, &map).await.refused(422, "Invalid");
}

pub(crate) async fn the_server_sets_what_is_its_own(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let mut map = config_map("a");
    map["metadata"]["uid"] = json!("mine");
    map["metadata"]["creationTimestamp"] = json!("2001-01-01T00:00:00Z");
    let created = cluster.post(&path, &map).await.expect(201);
    assert_ne!(created["metadata"]["uid"], "mine");
    assert_ne!(created["metadata"]["creationTimestamp"], "2001-01-01T00:00:00Z");
    let mut changed = created.clone();
    for field in ["creationTimestamp", "uid", "generation"] {
        changed["metadata"][field] = Value::Null;
    }
    changed["data"]["key"] = json!("other");
    let updated = cluster.put(&format!("{path}/a"), &changed).await.expect(200);
    for field in ["uid", "creationTimestamp", "namespace"] {
        assert_eq!(updated["metadata"][field], created["metadata"][field], "{field}");
    }
    assert_ne!(updated["metadata"]["resourceVersion"], created["metadata"]["resourceVersion"]);
}

pub(crate) async fn a_stale_or_foreign_update_conflicts(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let first = cluster.post(&path, &config_map("a")).await.expect(201);
    let path = format!("{path}/a");
    let mut second = first.clone();
    second["data"]["key"] = json!("2");
    cluster.put(&path, &second).await.expect(200);
    let mut third = first.clone();
    third["data"]["key"] = json!("3");
    let refused = cluster.put(&path, &third).await.refused(409, "Conflict");
    assert!(refused["message"].as_str().unwrap().contains("the object has been modified"), "{refused}");
    third["metadata"]["resourceVersion"] = Value::Null;
    third["metadata"]["uid"] = json!("00000000-0000-4000-8000-000000000000");
    cluster.put(&path, &third).await.refused(409, "Conflict");
    let mut unconditional = config_map("a");
    unconditional["data"]["key"] = json!("4");
    assert_eq!(cluster.put(&path, &unconditional).await.expect(200)["data"]["key"], "4");
    cluster.put(&path, &config_map("b")).await.refused(400, "BadRequest");
}

pub(crate) async fn an_update_of_a_custom_kind_names_its_version(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    cluster.put(&format!("{path}/a"), &widget("a", &json!({ "x": 1 }))).await.refused(422, "Invalid");
}

pub(crate) async fn an_update_without_change_keeps_the_version(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let created = cluster.post(&path, &widget("a", &json!({ "x": 1 }))).await.expect(201);
    let path = format!("{path}/a");
    let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
    assert_eq!(version(&cluster.put(&path, &created).await.expect(200)), version(&created));
    let patched = cluster.patch(&path, MERGE, &json!({ "spec": { "x": 1 } })).await.expect(200);
    assert_eq!(version(&patched), version(&created));
}

pub(crate) async fn the_generation_counts_changes_of_the_spec(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let created = cluster.post(&path, &widget("a", &json!({ "x": 1 }))).await.expect(201);
    assert_eq!(created["metadata"]["generation"], 1);
    let path = format!("{path}/a");
    let labelled = json!({ "metadata": { "labels": { "a": "b" } } });
    assert_eq!(cluster.patch(&path, MERGE, &labelled).await.expect(200)["metadata"]["generation"], 1);
    let status = json!({ "status": { "replicas": 1 } });
    let after = cluster.patch(&format!("{path}/status"), MERGE, &status).await.expect(200);
    assert_eq!(after["metadata"]["generation"], 1);
    let spec = json!({ "spec": { "x": 2 } });
    assert_eq!(cluster.patch(&path, MERGE, &spec).await.expect(200)["metadata"]["generation"], 2);
}

pub(crate) async fn status_and_object_are_written_apart(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let mut object = widget("a", &json!({ "x": 1 }));
    object["status"] = json!({ "replicas": 7 });
    let created = cluster.post(&path, &object).await.expect(201);
    assert_eq!(created["status"], Value::Null, "a new object has no status");
    let path = format!("{path}/a");
    let mut both = created;
    both["spec"]["x"] = json!(2);
    both["status"] = json!({ "replicas": 3 });
    let after = cluster.put(&format!("{path}/status"), &both).await.expect(200);
    assert_eq!((&after["spec"]["x"], &after["status"]["replicas"]), (&json!(1), &json!(3)));
    let mut both = after;
    both["spec"]["x"] = json!(2);
    both["status"] = json!({ "replicas": 9 });
    let after = cluster.put(&path, &both).await.expect(200);
    assert_eq!((&after["spec"]["x"], &after["status"]["replicas"]), (&json!(2), &json!(3)));
    let patched = cluster.patch(&path, MERGE, &json!({ "status": { "replicas": 1 } })).await.expect(200);
    assert_eq!(patched["status"]["replicas"], 3);
    assert_eq!(cluster.get(&format!("{path}/status")).await.expect(200)["status"]["replicas"], 3);
}

pub(crate) async fn a_dry_run_changes_nothing(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let object = widget("a", &json!({ "x": 1 }));
    let tried = cluster.post(&format!("{path}?dryRun=All"), &object).await.expect(201);
    assert!(tried["metadata"]["uid"].is_string());
    cluster.get(&format!("{path}/a")).await.refused(404, "NotFound");
    let created = cluster.post(&path, &object).await.expect(201);
    let patch = json!({ "spec": { "x": 2 } });
    let tried = cluster.patch(&format!("{path}/a?dryRun=All"), MERGE, &patch).await.expect(200);
    assert_eq!((&tried["spec"]["x"], &tried["metadata"]["generation"]), (&json!(2), &json!(2)));
    cluster.delete(&format!("{path}/a?dryRun=All")).await.expect(200);
    assert_eq!(cluster.get(&format!("{path}/a")).await.expect(200)["metadata"], created["metadata"]);
    cluster.post(&format!("{path}?dryRun=Some"), &object).await.expect_refusal();
}

pub(crate) async fn a_missing_namespace_is_not_found(cluster: &Cluster) {
    let missing = unique("missing");
    let refused = cluster.post(&config_maps(&missing), &config_map("a")).await.refused(404, "NotFound");
    assert_eq!((&refused["details"]["kind"], &refused["details"]["name"]), (&json!("namespaces"), &json!(missing)));
    let there = cluster.namespace().await;
    let mut map = config_map("a");
    map["metadata"]["namespace"] = json!(missing);
    cluster.post(&config_maps(&there), &map).await.refused(400, "BadRequest");
}

pub(crate) async fn a_lease_is_won_by_one(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
    let lease = |holder: &str| {
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "leader" },
            "spec": { "holderIdentity": holder, "leaseDurationSeconds": 15,
                      "renewTime": "2026-01-01T00:00:00.000000Z" },
        })
    };
    let won = cluster.post(&path, &lease("a")).await.expect(201);
    cluster.post(&path, &lease("b")).await.refused(409, "AlreadyExists");
    let path = format!("{path}/leader");
    let mut taken = won.clone();
    taken["spec"]["holderIdentity"] = json!("b");
    cluster.put(&path, &taken).await.expect(200);
    let mut late = won;
    late["spec"]["holderIdentity"] = json!("c");
    cluster.put(&path, &late).await.refused(409, "Conflict");
    cluster.put(&path, &lease("d")).await.refused(422, "Invalid");
    assert_eq!(cluster.get(&path).await.expect(200)["spec"]["holderIdentity"], "b");
}

pub(crate) async fn secrets_take_string_data(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "s" }, "type": "Opaque",
        "stringData": { "text": "hello" },
    });
    let created = cluster.post(&format!("/api/v1/namespaces/{namespace}/secrets"), &secret).await.expect(201);
    assert_eq!((&created["data"]["text"], &created["stringData"]), (&json!("aGVsbG8="), &Value::Null));
}
