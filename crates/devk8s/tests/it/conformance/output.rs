//! Discovery, tables, metadata.

use serde_json::{Value, json};

use super::{
    WIDGETS,
    deletion::{create_pod, pod},
    widget, widgets,
};
use crate::support::{Cluster, unique};

const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

pub(crate) async fn health_and_version_answer(cluster: &Cluster) {
    for path in ["/healthz", "/readyz", "/livez"] {
        assert_eq!(cluster.get(path).await.expect(200), json!("ok"), "{path}");
    }
    assert_eq!(cluster.get("/version").await.expect(200)["major"], "1");
    cluster.get("/apis/none.example/v1/things").await.expect_refusal();
}

pub(crate) async fn discovery_lists_groups_kinds_and_subresources(cluster: &Cluster) {
    assert_eq!(cluster.get("/api").await.expect(200)["versions"], json!(["v1"]));
    let groups = cluster.get("/apis").await.expect(200);
    let group = |name: &str| groups["groups"].as_array().unwrap().iter().find(|it| it["name"] == name).cloned();
    for name in ["apps", "policy", "coordination.k8s.io", "storage.k8s.io", "apiextensions.k8s.io"] {
        assert_eq!(group(name).unwrap()["preferredVersion"]["version"], "v1", "{name}");
    }
    assert_eq!(
        group("conformance.nstance.dev").unwrap()["versions"],
        json!([{ "groupVersion": "conformance.nstance.dev/v1", "version": "v1" }])
    );
    let resource = |list: &Value, name: &str| {
        let found = list["resources"].as_array().unwrap().iter().find(|it| it["name"] == name).cloned();
        found.unwrap_or_else(|| panic!("{name} is not listed"))
    };
    let core = cluster.get("/api/v1").await.expect(200);
    for (name, kind, namespaced) in [
        ("namespaces", "Namespace", false),
        ("secrets", "Secret", true),
        ("configmaps", "ConfigMap", true),
        ("nodes", "Node", false),
        ("nodes/status", "Node", false),
        ("pods", "Pod", true),
        ("events", "Event", true),
        ("serviceaccounts", "ServiceAccount", true),
    ] {
        let found = resource(&core, name);
        assert_eq!((&found["kind"], &found["namespaced"]), (&json!(kind), &json!(namespaced)), "{name}");
    }
    assert!(resource(&core, "configmaps")["shortNames"].as_array().unwrap().contains(&json!("cm")));
    let eviction = resource(&core, "pods/eviction");
    assert_eq!((&eviction["group"], &eviction["version"]), (&json!("policy"), &json!("v1")));
    let own = cluster.get(WIDGETS).await.expect(200);
    assert_eq!(own["groupVersion"], "conformance.nstance.dev/v1");
    assert!(resource(&own, "widgets")["verbs"].as_array().unwrap().contains(&json!("watch")));
    resource(&own, "widgets/status");
    assert_eq!(resource(&own, "widgets/scale")["kind"], "Scale");
}

pub(crate) async fn openapi_says_that_patches_can_be_validated(cluster: &Cluster) {
    let index = cluster.get("/openapi/v3").await.expect(200);
    for (path, kind) in [("api/v1", "Node"), ("apis/policy/v1", "PodDisruptionBudget")] {
        let url = index["paths"][path]["serverRelativeURL"].as_str().unwrap();
        let document = cluster.get(url).await.expect(200);
        let paths = document["paths"].as_object().unwrap();
        let patch = paths
            .values()
            .map(|it| &it["patch"])
            .find(|it| it["x-kubernetes-group-version-kind"]["kind"] == kind && it["x-kubernetes-action"] == "patch");
        let parameters = patch.unwrap()["parameters"].as_array().unwrap();
        for name in ["fieldValidation", "dryRun"] {
            assert!(parameters.iter().any(|it| it["name"] == name), "{path} {name}");
        }
    }
}

fn columns(table: &Value) -> Vec<&str> {
    table["columnDefinitions"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect()
}

pub(crate) async fn tables_have_the_columns_of_the_definition(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({ "replicas": 3, "note": "n" }))).await.expect(201);
    cluster.post(&path, &widget("b", &json!({}))).await.expect(201);
    let mut ready = cluster.get(&format!("{path}/a")).await.expect(200);
    ready["status"] =
        json!({ "conditions": [{ "type": "Other", "status": "False" }, { "type": "Ready", "status": "True" }] });
    cluster.put(&format!("{path}/a/status"), &ready).await.expect(200);
    let table = cluster.get_as(&path, TABLE).await.expect(200);
    assert_eq!((&table["kind"], &table["apiVersion"]), (&json!("Table"), &json!("meta.k8s.io/v1")));
    assert_eq!(columns(&table), ["Name", "Replicas", "Ready", "Note", "Age"]);
    assert_eq!(table["columnDefinitions"][3]["priority"], 1);
    let cells = |row: usize| table["rows"][row]["cells"].as_array().unwrap().clone();
    assert_eq!(cells(0)[..4], [json!("a"), json!(3), json!("True"), json!("n")]);
    assert_eq!(cells(1)[..4], [json!("b"), Value::Null, Value::Null, Value::Null]);
    assert!(cells(0)[4].as_str().unwrap().ends_with('s'), "an age");
    let object = &table["rows"][0]["object"];
    assert_eq!((&object["kind"], &object["metadata"]["name"]), (&json!("PartialObjectMetadata"), &json!("a")));
    let one = cluster.get_as(&format!("{path}/a"), TABLE).await.expect(200);
    assert_eq!(one["rows"].as_array().unwrap().len(), 1);
    let full = cluster.get_as(&format!("{path}?includeObject=Object"), TABLE).await.expect(200);
    assert_eq!(full["rows"][0]["object"]["spec"]["replicas"], 3);
}

pub(crate) async fn nodes_and_pods_have_tables(cluster: &Cluster) {
    let name = unique("node");
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": name, "labels": { "node-role.kubernetes.io/worker": "" } },
        "spec": { "unschedulable": true },
    });
    cluster.post("/api/v1/nodes", &node).await.expect(201);
    let path = format!("/api/v1/nodes/{name}");
    let mut node = cluster.get(&path).await.expect(200);
    node["status"]["conditions"] = json!([{ "type": "Ready", "status": "True" }]);
    node["status"]["nodeInfo"] = json!({
        "kubeletVersion": "v1.36.0", "osImage": "os", "kernelVersion": "k", "containerRuntimeVersion": "c", "machineID": "",
        "systemUUID": "", "bootID": "", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
    });
    node["status"]["addresses"] = json!([{ "type": "InternalIP", "address": "10.0.0.1" }]);
    cluster.put(&format!("{path}/status"), &node).await.expect(200);
    let table = cluster.get_as(&path, TABLE).await.expect(200);
    assert_eq!(columns(&table)[..6], ["Name", "Status", "Roles", "Age", "Version", "Internal-IP"]);
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(cells[..3], [json!(name), json!("Ready,SchedulingDisabled"), json!("worker")]);
    assert_eq!(cells[4..6], [json!("v1.36.0"), json!("10.0.0.1")]);
    cluster.delete(&path).await.expect(200);

    let namespace = cluster.namespace().await;
    create_pod(cluster, &namespace, &pod("p")).await;
    let table = cluster.get_as(&format!("/api/v1/namespaces/{namespace}/pods"), TABLE).await.expect(200);
    assert_eq!(columns(&table)[..5], ["Name", "Ready", "Status", "Restarts", "Age"]);
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(cells[..3], [json!("p"), json!("0/1"), json!("Pending")]);
}

pub(crate) async fn events_have_a_table(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let path = format!("/api/v1/namespaces/{namespace}/events");
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": "e" }, "reason": "SizePushed", "message": "pushed 3",
        "type": "Normal", "count": 2, "source": { "component": "test" },
        "involvedObject": { "kind": "ConfigMap", "namespace": namespace, "name": "about" },
        "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:00:00Z",
    });
    cluster.post(&path, &event).await.expect(201);
    let table = cluster.get_as(&path, TABLE).await.expect(200);
    let names =
        ["Last Seen", "Type", "Reason", "Object", "Subobject", "Source", "Message", "First Seen", "Count", "Name"];
    assert_eq!(columns(&table), names);
    let cells = table["rows"][0]["cells"].as_array().unwrap();
    assert_eq!(cells[1..4], [json!("Normal"), json!("SizePushed"), json!("configmap/about")]);
    assert_eq!((&cells[5], &cells[6], &cells[9]), (&json!("test"), &json!("pushed 3"), &json!("e")));
}

pub(crate) async fn a_watch_can_send_tables(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    for name in ["a", "b"] {
        cluster.post(&path, &widget(name, &json!({ "replicas": 1 }))).await.expect(201);
    }
    let mut events = cluster.watch_as(&format!("{path}?watch=1"), TABLE).await;
    let (_, first) = events.expect().await;
    let (kind, second) = events.expect().await;
    assert_eq!((kind.as_str(), &second["kind"]), ("ADDED", &json!("Table")));
    assert_eq!(columns(&first)[0], "Name");
    assert!(second["columnDefinitions"].as_array().is_none_or(Vec::is_empty), "named once");
    assert_eq!(second["rows"][0]["cells"].as_array().unwrap()[..2], [json!("b"), json!(1)]);
}

pub(crate) async fn metadata_can_be_read_alone(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let created = cluster.post(&path, &widget("a", &json!({ "x": 1 }))).await.expect(201);
    let one = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let object = cluster.get_as(&format!("{path}/a"), one).await.expect(200);
    assert_eq!((&object["kind"], &object["metadata"]), (&json!("PartialObjectMetadata"), &created["metadata"]));
    assert_eq!(object.get("spec"), None);
    let many = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    let list = cluster.get_as(&path, many).await.expect(200);
    assert_eq!(
        (&list["kind"], &list["items"][0]["metadata"]["name"]),
        (&json!("PartialObjectMetadataList"), &json!("a"))
    );
    let mut events = cluster.watch_as(&format!("{path}?watch=1"), one).await;
    let (kind, object) = events.expect().await;
    assert_eq!((kind.as_str(), object.get("spec")), ("ADDED", None));
}

pub(crate) async fn unacceptable_forms_are_refused(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.get_as(&path, "text/html").await.refused(406, "NotAcceptable");
    let body = widget("a", &json!({})).to_string().into_bytes();
    let answer = cluster.call("POST", &path, &[("content-type", "text/plain")], body).await;
    answer.refused(415, "UnsupportedMediaType");
    let broken = cluster.call("POST", &path, &[("content-type", "application/json")], b"{".to_vec()).await;
    broken.refused(400, "BadRequest");
}
