//! Deleting: finalizers, preconditions, grace.

use serde_json::{Value, json};

use super::{config_map, config_maps, widget, widgets};
use crate::support::{Cluster, MERGE, eventually, unique};

pub(crate) async fn finalizers_hold_an_object(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let mut object = widget("a", &json!({}));
    object["metadata"]["finalizers"] = json!(["a.io/1", "a.io/2"]);
    cluster.post(&path, &object).await.expect(201);
    let one = format!("{path}/a");
    let held = cluster.delete(&one).await.expect(200);
    assert!(held["metadata"]["deletionTimestamp"].is_string(), "{held}");
    let again = cluster.delete(&one).await.expect(200);
    assert_eq!(again["metadata"]["deletionTimestamp"], held["metadata"]["deletionTimestamp"]);
    let finalizers = |list: Value| json!({ "metadata": { "finalizers": list } });
    cluster.patch(&one, MERGE, &finalizers(json!(["a.io/1", "a.io/3"]))).await.refused(422, "Invalid");
    let still = cluster.patch(&one, MERGE, &finalizers(json!(["a.io/2"]))).await.expect(200);
    assert_eq!(still["metadata"]["finalizers"], json!(["a.io/2"]));
    cluster.patch(&one, MERGE, &finalizers(Value::Null)).await.expect(200);
    cluster.get(&one).await.refused(404, "NotFound");
    cluster.delete(&one).await.refused(404, "NotFound");
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let gone = cluster.delete(&one).await.expect(200);
    assert_eq!((&gone["kind"], &gone["status"]), (&json!("Status"), &json!("Success")));
    assert_eq!((&gone["details"]["name"], &gone["details"]["kind"]), (&json!("a"), &json!("widgets")));
}

pub(crate) async fn preconditions_are_checked(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    let created = cluster.post(&path, &config_map("a")).await.expect(201);
    let path = format!("{path}/a");
    let options =
        |preconditions: Value| json!({ "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions });
    let foreign = json!({ "uid": "00000000-0000-4000-8000-000000000000" });
    cluster.delete_with(&path, &options(foreign)).await.refused(409, "Conflict");
    let stale = created["metadata"]["resourceVersion"].clone();
    cluster.patch(&path, MERGE, &json!({ "data": { "key": "2" } })).await.expect(200);
    cluster.delete_with(&path, &options(json!({ "resourceVersion": stale }))).await.refused(409, "Conflict");
    let right = json!({ "uid": created["metadata"]["uid"] });
    cluster.delete_with(&path, &options(right)).await.expect(200);
    cluster.get(&path).await.refused(404, "NotFound");
}

pub(crate) async fn a_collection_is_deleted_by_label(cluster: &Cluster) {
    let path = config_maps(&cluster.namespace().await);
    for (name, label) in [("a", "x"), ("b", "x"), ("c", "y")] {
        let mut map = config_map(name);
        map["metadata"]["labels"] = json!({ "l": label });
        cluster.post(&path, &map).await.expect(201);
    }
    cluster.delete(&format!("{path}?labelSelector=l%3Dx")).await.expect(200);
    let left = cluster.get(&format!("{path}?labelSelector=l")).await.expect(200);
    let names: Vec<&Value> = left["items"].as_array().unwrap().iter().map(|it| &it["metadata"]["name"]).collect();
    assert_eq!(names, ["c"]);
}

/// A pod that is as small as a real API server allows.
pub(crate) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "labels": { "app": "x" } },
        "spec": { "containers": [{ "name": "c", "image": "i" }], "terminationGracePeriodSeconds": 30 },
    })
}

/// Creates a pod; the service account that a real API server wants may be a moment late.
pub(crate) async fn create_pod(cluster: &Cluster, namespace: &str, pod: &Value) -> Value {
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    eventually("the pod is accepted", || async {
        let answer = cluster.post(&path, pod).await;
        if answer.code == 403 { None } else { Some(answer.expect(201)) }
    })
    .await
}

pub(crate) async fn a_bound_pod_goes_after_its_grace(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let mut bound = pod("bound");
    bound["spec"]["nodeName"] = json!(unique("node"));
    create_pod(cluster, &namespace, &bound).await;
    create_pod(cluster, &namespace, &pod("unbound")).await;
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    cluster.delete(&format!("{path}/unbound")).await.expect(200);
    cluster.get(&format!("{path}/unbound")).await.refused(404, "NotFound");
    let leaving = cluster.delete(&format!("{path}/bound")).await.expect(200);
    assert_eq!(leaving["metadata"]["deletionGracePeriodSeconds"], 30);
    assert!(cluster.get(&format!("{path}/bound")).await.expect(200)["metadata"]["deletionTimestamp"].is_string());
    let shorter = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 5 });
    let leaving = cluster.delete_with(&format!("{path}/bound"), &shorter).await.expect(200);
    assert_eq!(leaving["metadata"]["deletionGracePeriodSeconds"], 5);
    let now = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0 });
    cluster.delete_with(&format!("{path}/bound"), &now).await.expect(200);
    cluster.get(&format!("{path}/bound")).await.refused(404, "NotFound");
}

pub(crate) async fn a_namespace_ends_when_it_is_finalized(cluster: &Cluster) {
    let name = cluster.namespace().await;
    let path = format!("/api/v1/namespaces/{name}");
    let there = cluster.get(&path).await.expect(200);
    assert_eq!(there["status"]["phase"], "Active");
    assert_eq!(there["spec"]["finalizers"], json!(["kubernetes"]));
    assert_eq!(there["metadata"]["labels"]["kubernetes.io/metadata.name"], json!(name));
    // Held by a finalizer, so that no controller is faster than this test.
    let mut held = config_map("held");
    held["metadata"]["finalizers"] = json!(["a.io/x"]);
    cluster.post(&config_maps(&name), &held).await.expect(201);
    let leaving = cluster.delete(&path).await.expect(200);
    assert_eq!(leaving["status"]["phase"], "Terminating");
    let refused = cluster.post(&config_maps(&name), &config_map("new")).await.refused(403, "Forbidden");
    assert_eq!(refused["details"]["causes"][0]["reason"], "NamespaceTerminating");
    let free = json!({ "metadata": { "finalizers": null } });
    cluster.patch(&format!("{}/held", config_maps(&name)), MERGE, &free).await.expect(200);
    let _ = cluster.delete(&format!("{}/held", config_maps(&name))).await;
    eventually("the namespace is gone", || async {
        let answer = cluster.get(&path).await;
        if answer.code == 404 {
            return Some(());
        }
        let mut namespace = answer.expect(200);
        namespace["spec"]["finalizers"] = json!([]);
        // A namespace controller may do the same at this moment.
        let _ = cluster.put(&format!("{path}/finalize"), &namespace).await;
        None
    })
    .await;
}

pub(crate) async fn orphaning_leaves_a_finalizer(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let mut object = widget("a", &json!({}));
    // The second one keeps the object while a garbage collector does its work.
    object["metadata"]["finalizers"] = json!(["a.io/x"]);
    cluster.post(&path, &object).await.expect(201);
    let path = format!("{path}/a");
    let options = json!({ "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan" });
    let held = cluster.delete_with(&path, &options).await.expect(200);
    let finalizers = held["metadata"]["finalizers"].as_array().unwrap();
    assert!(finalizers.contains(&json!("orphan")) && finalizers.contains(&json!("a.io/x")), "{finalizers:?}");
    cluster.patch(&path, MERGE, &json!({ "metadata": { "finalizers": null } })).await.expect(200);
    cluster.get(&path).await.refused(404, "NotFound");
}

pub(crate) async fn a_watch_sees_the_mark_and_the_end(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let mut object = widget("a", &json!({}));
    object["metadata"]["finalizers"] = json!(["a.io/x"]);
    let created = cluster.post(&path, &object).await.expect(201);
    let version = created["metadata"]["resourceVersion"].as_str().unwrap();
    let mut events = cluster.watch(&format!("{path}?watch=1&resourceVersion={version}")).await;
    let held = cluster.delete(&format!("{path}/a")).await.expect(200);
    assert_eq!(held["metadata"]["generation"], 2, "a deletion changes what is wanted");
    let (kind, marked) = events.expect().await;
    assert_eq!((kind.as_str(), &marked["metadata"]), ("MODIFIED", &held["metadata"]));
    let free = json!({ "metadata": { "finalizers": null, "labels": { "last": "words" } } });
    let last = cluster.patch(&format!("{path}/a"), MERGE, &free).await.expect(200);
    assert_eq!(last["metadata"]["labels"]["last"], "words");
    let (kind, gone) = events.expect().await;
    assert_eq!((kind.as_str(), &gone["metadata"]["uid"]), ("DELETED", &created["metadata"]["uid"]));
    assert_eq!(gone["metadata"]["deletionTimestamp"], held["metadata"]["deletionTimestamp"]);
    assert_eq!(gone["metadata"]["finalizers"], json!(["a.io/x"]), "what was stored last");
}
