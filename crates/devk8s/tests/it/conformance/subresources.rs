//! scale, token, eviction, binding.

use serde_json::{Value, json};

use super::{
    deletion::{create_pod, pod},
    widget, widgets,
};
use crate::support::{Cluster, MERGE, eventually, unique};

pub(crate) async fn scale_reads_and_writes_replicas(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let created = cluster.post(&path, &widget("a", &json!({ "replicas": 3 }))).await.expect(201);
    let scale_path = format!("{path}/a/scale");
    let mut scale = cluster.get(&scale_path).await.expect(200);
    assert_eq!((&scale["kind"], &scale["apiVersion"]), (&json!("Scale"), &json!("autoscaling/v1")));
    assert_eq!((&scale["spec"]["replicas"], &scale["status"]["replicas"]), (&json!(3), &json!(0)));
    assert_eq!(scale["metadata"]["uid"], created["metadata"]["uid"]);
    scale["spec"]["replicas"] = json!(5);
    assert_eq!(cluster.put(&scale_path, &scale).await.expect(200)["spec"]["replicas"], 5);
    for replicas in [7, 0, 2] {
        let patch = json!({ "spec": { "replicas": replicas } });
        let shown = cluster.patch(&scale_path, MERGE, &patch).await.expect(200)["spec"]["replicas"].clone();
        assert_eq!(shown, if replicas == 0 { Value::Null } else { json!(replicas) }, "zero is left out");
        let object = cluster.get(&format!("{path}/a")).await.expect(200);
        assert_eq!(object["spec"]["replicas"], replicas);
    }
    assert_eq!(cluster.get(&format!("{path}/a")).await.expect(200)["metadata"]["generation"], 5);
    let negative = json!({ "spec": { "replicas": -1 } });
    cluster.patch(&scale_path, MERGE, &negative).await.refused(422, "Invalid");
    cluster.get(&format!("{path}/none/scale")).await.refused(404, "NotFound");
}

pub(crate) async fn a_stale_scale_conflicts(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("a", &json!({ "replicas": 3 }))).await.expect(201);
    let path = format!("{path}/a/scale");
    let mut scale = cluster.get(&path).await.expect(200);
    cluster.patch(&path, MERGE, &json!({ "spec": { "replicas": 4 } })).await.expect(200);
    scale["spec"]["replicas"] = json!(9);
    cluster.put(&path, &scale).await.refused(409, "Conflict");
}

pub(crate) async fn tokens_are_given_for_ten_minutes_at_least(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "robot" } });
    cluster.post(&path, &account).await.expect(201);
    let request = |seconds: i64| {
        json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": { "expirationSeconds": seconds },
        })
    };
    let given = cluster.post(&format!("{path}/robot/token"), &request(3600)).await.expect(201);
    assert_eq!(given["status"]["token"].as_str().unwrap().split('.').count(), 3, "a JWT");
    assert!(given["status"]["expirationTimestamp"].is_string());
    cluster.post(&format!("{path}/robot/token"), &request(600)).await.expect(201);
    cluster.post(&format!("{path}/robot/token"), &request(599)).await.refused(422, "Invalid");
    cluster.post(&format!("{path}/none/token"), &request(600)).await.refused(404, "NotFound");
}

/// A running, ready pod on some node.
async fn ready_pod(cluster: &Cluster, namespace: &str, name: &str) -> Value {
    let mut wanted = pod(name);
    wanted["spec"]["nodeName"] = json!(unique("node"));
    let mut created = create_pod(cluster, namespace, &wanted).await;
    created["status"] = json!({ "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] });
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/status");
    // Another writer, a scheduler for one, may be at it.
    eventually("the pod is ready", || async {
        let mut pod = cluster.get(&path).await.expect(200);
        pod["status"] = created["status"].clone();
        let answer = cluster.put(&path, &pod).await;
        (answer.code == 200).then_some(answer.body)
    })
    .await
}

fn eviction(name: &str, uid: Option<&Value>) -> Value {
    let mut eviction = json!({ "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name } });
    if let Some(uid) = uid {
        eviction["deleteOptions"] = json!({ "preconditions": { "uid": uid } });
    }
    eviction
}

pub(crate) async fn a_budget_refuses_an_eviction(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    for name in ["a", "b"] {
        ready_pod(cluster, &namespace, name).await;
    }
    let budgets = format!("/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets");
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "budget" },
        "spec": { "minAvailable": 2, "selector": { "matchLabels": { "app": "x" } } },
    });
    cluster.post(&budgets, &budget).await.expect(201);
    judge(cluster, &budgets, 2, 0).await;
    let path = format!("/api/v1/namespaces/{namespace}/pods/a/eviction");
    let answer = cluster.post(&path, &eviction("a", None)).await;
    assert_eq!(answer.retry_after, None);
    let refused = answer.refused(429, "TooManyRequests");
    let cause = &refused["details"]["causes"][0];
    assert_eq!(cause["reason"], "DisruptionBudget");
    assert!(cause["message"].as_str().unwrap().contains("budget needs 2 healthy pods and has 2 currently"), "{cause}");
    cluster.patch(&format!("{budgets}/budget"), MERGE, &json!({ "spec": { "minAvailable": 1 } })).await.expect(200);
    judge(cluster, &budgets, 1, 1).await;
    cluster.post(&path, &eviction("a", None)).await.expect(201);
    let leaving = cluster.get(&format!("/api/v1/namespaces/{namespace}/pods/a")).await.expect(200);
    assert!(leaving["metadata"]["deletionTimestamp"].is_string());
    let second = budget_named(&budget, "second");
    cluster.post(&budgets, &second).await.expect(201);
    let path = format!("/api/v1/namespaces/{namespace}/pods/b/eviction");
    let refused = cluster.post(&path, &eviction("b", None)).await.expect(500);
    assert!(refused["message"].as_str().unwrap().contains("more than one PodDisruptionBudget"), "{refused}");
}

fn budget_named(budget: &Value, name: &str) -> Value {
    let mut other = budget.clone();
    other["metadata"]["name"] = json!(name);
    other
}

/// What a disruption controller writes; a real API server decides by it. Where one runs it may be faster.
async fn judge(cluster: &Cluster, budgets: &str, wanted: i64, allowed: i64) {
    let path = format!("{budgets}/budget/status");
    eventually("the budget's status is current", || async {
        let mut budget = cluster.get(&path).await.expect(200);
        budget["status"] = json!({
            "observedGeneration": budget["metadata"]["generation"], "disruptionsAllowed": allowed, "currentHealthy": 2,
            "desiredHealthy": wanted, "expectedPods": 2,
        });
        let answer = cluster.put(&path, &budget).await;
        (answer.code == 200).then_some(())
    })
    .await;
}

pub(crate) async fn an_eviction_spares_a_namesake(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let pod = ready_pod(cluster, &namespace, "a").await;
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let foreign = json!("00000000-0000-4000-8000-000000000000");
    cluster.post(&format!("{path}/a/eviction"), &eviction("a", Some(&foreign))).await.refused(409, "Conflict");
    cluster.post(&format!("{path}/none/eviction"), &eviction("none", None)).await.refused(404, "NotFound");
    let own = eviction("a", Some(&pod["metadata"]["uid"]));
    cluster.post(&format!("{path}/a/eviction"), &own).await.expect(201);
}

pub(crate) async fn a_pod_is_bound_once(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let mut unbound = pod("a");
    // No scheduler of that name runs anywhere.
    unbound["spec"]["schedulerName"] = json!("nobody");
    create_pod(cluster, &namespace, &unbound).await;
    let path = format!("/api/v1/namespaces/{namespace}/pods/a");
    let binding = |node: &str| {
        json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": "a" },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        })
    };
    cluster.post(&format!("{path}/binding"), &binding("n1")).await.expect(201);
    let bound = cluster.get(&path).await.expect(200);
    assert_eq!(bound["spec"]["nodeName"], "n1");
    let conditions = bound["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|it| it["type"] == "PodScheduled" && it["status"] == "True"));
    cluster.post(&format!("{path}/binding"), &binding("n2")).await.refused(409, "Conflict");
}
