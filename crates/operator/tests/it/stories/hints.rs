//! Which Machine goes.

use std::time::Duration;

use nstance_devk8s::Fault;
use nstance_operator::ports::kinds;
use serde_json::json;

use super::plane::Plane;

#[tokio::test(flavor = "multi_thread")]
async fn the_chosen_machine_goes_although_its_watch_is_late_and_the_hint_is_used_once() {
    let plane = Plane::new("hint", &["a", "b"]).await;
    plane.shards[0].add_group("web", 2);
    plane.shards[1].add_group("web", 2);
    let operator = plane.start_operator();
    plane.until("four Machines have Nodes", async || plane.has_settled_at(4).await).await;
    // The drain of the chosen one lasts until the second shrink has happened.
    let budget = json!({ "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "db" } } } });
    plane.create(kinds::POD_DISRUPTION_BUDGET, "db", budget).await;
    let spec = json!({ "nodeSelector": { "nstance.dev/instance-id": "hint-a-001" } });
    plane.add_pod("db-0", json!({ "metadata": { "labels": { "app": "db" } }, "spec": spec })).await;
    plane.until("the pod runs", async || plane.is_running("db-0").await).await;
    let late = Fault::DelayWatch { resource: "machines".to_owned(), by: Duration::from_secs(2) };
    plane.api.as_ref().unwrap().set_fault(Some(late));
    // Neither the newest of a shard nor of the shard that would shrink by itself.
    let chosen = "hint-a-001";
    let mark = json!({ "metadata": { "annotations": { "cluster.x-k8s.io/delete-machine": "yes" } } });
    plane.patch(kinds::MACHINE, chosen, mark).await;
    plane.scale("nstance-web", 3).await;
    plane.until("a drain has begun", async || plane.drains().0.len() == 1).await;
    assert_eq!(plane.drains().0[0].0, chosen);
    plane
        .until("the used hint is a deleted Machine", async || {
            plane.get(kinds::MACHINE, chosen).await["metadata"]["deletionTimestamp"].is_string()
        })
        .await;

    plane.scale("nstance-web", 2).await;
    plane.until("another drain has begun", async || plane.drains().0.len() == 2).await;
    plane.delete(kinds::POD_DISRUPTION_BUDGET, "db").await;
    plane.until("two Machines are left", async || plane.has_settled_at(2).await).await;
    // The larger shard shrank: by the old hint it would have been shard a again.
    assert_eq!(plane.story_nodes().await, ["hint-a-002", "hint-b-001"]);
    let (begun, acknowledged) = plane.drains();
    assert_eq!(begun.len(), 2, "one VM for each step");
    assert_eq!(begun, acknowledged);
    operator.stop().await.unwrap();
}
