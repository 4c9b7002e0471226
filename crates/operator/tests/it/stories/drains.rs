//! Drains that something holds up.

use std::time::Duration;

use nstance_operator::ports::{KubePort, Target, kinds};
use serde_json::{Value, json};

use super::plane::Plane;

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_blocks_one_drain_delays_no_other() {
    let plane = Plane::new("budget", &["a", "b"]).await;
    budget_blocks_one(&plane, 20).await;
}

/// One of `n` drains is blocked; `n` is even, and there are two shards.
pub(crate) async fn budget_blocks_one(plane: &Plane, n: usize) {
    let half = i32::try_from(n / 2).unwrap();
    plane.shards[0].add_group("web", half);
    plane.shards[1].add_group("web", half);
    let operator = plane.start_operator();
    plane.until("all Machines have Nodes", async || plane.has_settled_at(n).await).await;
    let budget = json!({ "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "db" } } } });
    plane.create(kinds::POD_DISRUPTION_BUDGET, "db", budget).await;
    plane.add_pod("db-0", json!({ "metadata": { "labels": { "app": "db" } } })).await;
    for n in 1..n {
        plane.add_pod(&format!("web-{n}"), json!({})).await;
    }
    plane
        .until("all pods run", async || {
            let mut all_run = plane.is_running("db-0").await;
            for n in 1..n {
                all_run &= plane.is_running(&format!("web-{n}")).await;
            }
            all_run
        })
        .await;
    let node = plane.node_of("db-0").await;

    plane.scale("nstance-web", 0).await;
    plane.until("the others are gone", async || plane.story_nodes().await == [node.as_str()]).await;
    plane
        .until("the budget is named on the NstanceMachine", async || {
            let machine = plane.get(kinds::NSTANCE_MACHINE, &node).await;
            let blocked = machine["status"]["drain"]["blockedBy"][0].as_str().unwrap_or_default().to_owned();
            blocked.contains(&format!("{}/db-0: PDB {}/db", plane.namespace(), plane.namespace()))
        })
        .await;
    plane
        .until("the budget is named on the pool", async || {
            let blocked = plane.condition(kinds::NSTANCE_MACHINE_POOL, "nstance-web", "DrainBlocked").await;
            blocked.0 == "True" && blocked.1.contains("/db")
        })
        .await;
    assert_eq!(plane.get(kinds::NODE, &node).await["spec"]["unschedulable"], true);
    assert!(plane.is_running("db-0").await, "nothing goes past the budget");
    let (begun, acknowledged) = plane.drains();
    assert_eq!((begun.len(), acknowledged.len()), (n, n - 1));

    plane.delete(kinds::POD_DISRUPTION_BUDGET, "db").await;
    plane.until("nothing is left", async || plane.has_settled_at(0).await).await;
    let (begun, acknowledged) = plane.drains();
    assert_eq!(begun, acknowledged);
    plane
        .until("the condition is taken back", async || {
            plane.condition(kinds::NSTANCE_MACHINE_POOL, "nstance-web", "DrainBlocked").await.0 == "False"
        })
        .await;
    let timed_out = |event: &Value| event["reason"] == "DrainTimedOut";
    assert!(!plane.all(kinds::EVENT).await.iter().any(timed_out));
    operator.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_that_crashed_goes_on_with_a_drain_and_begins_no_second_one() {
    let plane = Plane::new("restart", &["a"]).await;
    plane.shards[0].add_group("web", 1);
    let operator = plane.start_operator();
    plane.until("the Machine has a Node", async || plane.has_settled_at(1).await).await;
    let budget = json!({ "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "db" } } } });
    plane.create(kinds::POD_DISRUPTION_BUDGET, "db", budget).await;
    plane.add_pod("db-0", json!({ "metadata": { "labels": { "app": "db" } } })).await;
    plane.until("the pod runs", async || plane.is_running("db-0").await).await;
    plane.scale("nstance-web", 0).await;
    let annotation = async |name: &str| {
        let node = plane.get(kinds::NODE, "restart-a-001").await;
        node["metadata"]["annotations"][format!("drain.nstance.dev/{name}")].clone()
    };
    plane.until("the drain is under way", async || annotation("state").await == "Draining").await;
    let drain_id = annotation("drain-id").await;
    operator.crash();
    drop(operator);

    let again = plane.start_operator();
    plane
        .until("the drain is reported again", async || {
            let machine = plane.get(kinds::NSTANCE_MACHINE, "restart-a-001").await;
            machine["status"]["drain"]["remaining"] == 1
        })
        .await;
    assert_eq!(annotation("drain-id").await, drain_id);
    plane.delete(kinds::POD_DISRUPTION_BUDGET, "db").await;
    plane.until("nothing is left", async || plane.has_settled_at(0).await).await;
    let (begun, acknowledged) = plane.drains();
    assert_eq!((begun.len(), &begun), (1, &acknowledged));
    assert_eq!(plane.events("DrainStarted").await, 1, "it began once");
    again.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_until_the_volumes_of_evicted_pods_are_detached() {
    let plane = Plane::new("volume", &["a"]).await;
    plane.shards[0].add_group("web", 1);
    let operator = plane.start_operator();
    plane.until("the Machine has a Node", async || plane.has_settled_at(1).await).await;
    plane.add_pod("db-0", json!({})).await;
    plane.until("the pod runs", async || plane.is_running("db-0").await).await;
    let spec =
        json!({ "attacher": "csi.test", "nodeName": "volume-a-001", "source": { "persistentVolumeName": "disk" } });
    plane.create(kinds::VOLUME_ATTACHMENT, "disk", json!({ "spec": spec })).await;
    let attached = json!({ "status": { "attached": true } });
    let attachment = plane.object(kinds::VOLUME_ATTACHMENT, "disk");
    plane.kube.merge_patch(&attachment, &attached, Target::Status).await.unwrap();

    plane.scale("nstance-web", 0).await;
    plane.until("the pod is gone", async || !plane.has(kinds::POD, "db-0").await).await;
    plane
        .until("the volume is named", async || {
            let machine = plane.get(kinds::NSTANCE_MACHINE, "volume-a-001").await;
            machine["status"]["drain"]["blockedBy"].to_string().contains("disk")
        })
        .await;
    plane
        .holds_for(Duration::from_secs(3), "the VM stays while its volume is attached", async || {
            plane.drains().1.is_empty() && plane.has(kinds::NODE, "volume-a-001").await
        })
        .await;
    plane.delete(kinds::VOLUME_ATTACHMENT, "disk").await;
    plane.until("nothing is left", async || plane.has_settled_at(0).await).await;
    let (begun, acknowledged) = plane.drains();
    assert_eq!((begun.len(), &begun), (1, &acknowledged));
    operator.stop().await.unwrap();
}
