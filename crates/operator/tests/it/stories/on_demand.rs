//! Machines for single pods.

use nstance_operator::ports::kinds;
use serde_json::json;

use super::plane::Plane;

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_gets_a_machine_of_its_own_and_takes_it_along() {
    let plane = Plane::new("ondemand", &["a", "b"]).await;
    plane.shards[0].add_group("web", 1);
    plane.shards[1].add_group("jobs", 0);
    let operator = plane.start_operator();
    plane.until("the Machine has a Node", async || plane.has_settled_at(1).await).await;
    let annotations =
        json!({ "on-demand.nstance.dev/group": "jobs", "on-demand.nstance.dev/vars": r#"{"NodeLabels":"job=demo"}"# });
    let body = json!({ "metadata": { "annotations": annotations }, "spec": { "nodeSelector": { "job": "demo" } } });
    let pod = plane.add_pod("task", body).await;
    plane.until("the pod runs", async || plane.is_running("task").await).await;

    let id = plane.node_of("task").await;
    assert_eq!(id, "ondemand-b-001", "an instance of its own");
    assert_eq!(plane.get(kinds::NODE, &id).await["metadata"]["labels"]["job"], "demo");
    let machine = plane.names(kinds::MACHINE).await.into_iter().find(|it| it.starts_with("od-")).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let shown = plane.get(kinds::MACHINE, &machine).await;
    let for_pod = format!("{}/task/{uid}", plane.namespace());
    assert_eq!(shown["metadata"]["annotations"]["on-demand.nstance.dev/pod"], for_pod.as_str());
    let infra = plane.get(kinds::NSTANCE_MACHINE, &machine).await;
    assert_eq!(infra["spec"]["instanceID"], id.as_str());
    plane
        .until("the Machine has the Node", async || {
            plane.get(kinds::MACHINE, &machine).await["status"]["nodeRef"]["name"] == id.as_str()
        })
        .await;
    let pool = plane.get(kinds::NSTANCE_MACHINE_POOL, "nstance-jobs").await;
    assert_eq!(pool["spec"]["providerIDList"].as_array().map_or(0, Vec::len), 0, "it is no member of the pool");
    assert_eq!(plane.get(kinds::POD, "task").await["metadata"]["finalizers"], json!(null));

    plane.delete(kinds::POD, "task").await;
    plane
        .until("machine, instance and Node are gone", async || {
            let is_gone = plane.shards[1].state().machines.as_ref().unwrap().instances.is_empty();
            is_gone && plane.has_settled_at(1).await
        })
        .await;
    assert_eq!(plane.story_nodes().await, ["ondemand-a-001"]);
    operator.stop().await.unwrap();
}
