//! What ends without being asked to, and what is deleted as a whole.

use std::time::Duration;

use nstance_operator::ports::{KubePort, ResourceKind, Target, kinds};
use serde_json::{Value, json};

use super::plane::{CLUSTER, Plane, name_of};

#[tokio::test(flavor = "multi_thread")]
async fn a_crashed_vm_loses_its_node_and_is_replaced() {
    let plane = Plane::new("crash", &["a"]).await;
    plane.shards[0].add_group("web", 2);
    let operator = plane.start_operator();
    plane.until("both Machines have Nodes", async || plane.has_settled_at(2).await).await;
    let node = json!({ "spec": { "nodeSelector": { "nstance.dev/instance-id": "crash-a-001" } } });
    plane.add_pod("web-0", node).await;
    plane.until("the pod runs", async || plane.is_running("web-0").await).await;

    plane.shards[0].crash("crash-a-001");
    plane
        .until("there is another one instead", async || {
            plane.has_settled_at(2).await && plane.story_nodes().await == ["crash-a-002", "crash-a-003"]
        })
        .await;
    plane.until("its pod is gone too", async || !plane.has(kinds::POD, "web-0").await).await;
    assert!(plane.drains().0.is_empty(), "there was nothing to drain");
    assert_eq!(plane.get(kinds::MACHINE_POOL, "nstance-web").await["spec"]["replicas"], 2);
    operator.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn pools_of_a_deleted_cluster_go_by_their_policy_and_groups_that_live_on_are_imported_again() {
    let plane = Plane::new("deleted", &["a"]).await;
    plane.shards[0].add_group("web", 2);
    plane.shards[0].add_group("db", 1);
    let operator = plane.start_operator();
    plane.until("three Machines have Nodes", async || plane.has_settled_at(3).await).await;
    let web = plane.shards[0].ids_of("web");
    let policy = json!({ "spec": { "deletionPolicy": "Delete" } });
    plane.patch(kinds::NSTANCE_MACHINE_POOL, "nstance-db", policy).await;
    let uid = async |kind: ResourceKind, name: &str| plane.get(kind, name).await["metadata"]["uid"].clone();
    let before = (uid(kinds::CLUSTER, CLUSTER).await, uid(kinds::NSTANCE_MACHINE_POOL, "nstance-web").await);

    plane.delete(kinds::CLUSTER, CLUSTER).await;
    plane
        .until("the Cluster and the pool are made anew", async || {
            let after = (uid(kinds::CLUSTER, CLUSTER).await, uid(kinds::NSTANCE_MACHINE_POOL, "nstance-web").await);
            after.0.is_string() && after.0 != before.0 && after.1.is_string() && after.1 != before.1
        })
        .await;
    plane.until("both Machines have their Nodes again", async || plane.has_settled_at(2).await).await;
    assert_eq!(plane.story_nodes().await, web, "the VMs are the same");
    assert!(!plane.has(kinds::NSTANCE_MACHINE_POOL, "nstance-db").await);
    assert!(!plane.shards[0].state().groups.contains_key("db"));
    assert_eq!(plane.get(kinds::MACHINE_POOL, "nstance-web").await["spec"]["replicas"], 2);
    assert!(plane.drains().0.iter().all(|(id, _)| !web.contains(id)), "no VM of the orphaned pool was drained");
    operator.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_cluster_that_was_moved_away_is_made_anew() {
    let plane = Plane::new("moved", &["a"]).await;
    plane.shards[0].add_group("web", 2);
    let operator = plane.start_operator();
    plane.until("both Machines have Nodes", async || plane.has_settled_at(2).await).await;
    // As clusterctl does it: pause, copy (not here), then delete all without their finalizers.
    plane.patch(kinds::CLUSTER, CLUSTER, json!({ "spec": { "paused": true } })).await;
    plane
        .until("the pause is seen", async || {
            plane.condition(kinds::NSTANCE_MACHINE_POOL, "nstance-web", "Paused").await.0 == "True"
        })
        .await;
    let kinds_moved = [
        kinds::NSTANCE_MACHINE,
        kinds::MACHINE,
        kinds::NSTANCE_SHARD_GROUP,
        kinds::NSTANCE_MACHINE_POOL,
        kinds::MACHINE_POOL,
        kinds::NSTANCE_CLUSTER,
        kinds::CLUSTER,
    ];
    for kind in kinds_moved {
        for object in plane.all(kind).await {
            let name = name_of(&object);
            let mark = json!({ "clusterctl.cluster.x-k8s.io/delete-for-move": "" });
            let patch = json!({ "metadata": { "annotations": mark, "finalizers": null } });
            let object = plane.object(kind, &name);
            let moved = plane.kube.merge_patch(&object, &patch, Target::Main);
            // The one before may have taken this one along.
            if moved.await.is_ok() {
                plane.delete(kind, &name).await;
            }
        }
    }
    plane
        .until("the move is remembered", async || {
            let key = plane.get(kinds::SECRET, "nstance-operator-key").await;
            !key["metadata"]["annotations"]["nstance.dev/moved"].is_null()
        })
        .await;
    let is_empty = async || {
        for kind in kinds_moved {
            let left: Vec<Value> = plane.all(kind).await;
            if !left.is_empty() {
                return false;
            }
        }
        true
    };
    plane.until("nothing is left", is_empty).await;
    plane.holds_for(Duration::from_secs(3), "nothing is made anew", is_empty).await;
    operator.stop().await.unwrap();
    let again = plane.start_operator();
    plane.holds_for(Duration::from_secs(5), "nothing is made anew after a restart", is_empty).await;
    assert_eq!(plane.events("ClusterMoved").await, 1);
    assert!(plane.drains().0.is_empty());
    assert_eq!(plane.shards[0].ids_of("web").len(), 2);
    assert_eq!(plane.story_nodes().await.len(), 2, "the Nodes are the other operator's");
    again.stop().await.unwrap();
}
