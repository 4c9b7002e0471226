//! Pools from import to the last Node.

use nstance_operator::ports::kinds;
use serde_json::json;

use super::plane::{CLUSTER, Plane};

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_two_shards_is_imported_and_follows_its_replicas() {
    let plane = Plane::new("follows", &["a", "b"]).await;
    follows_its_replicas(&plane).await;
}

pub(crate) async fn follows_its_replicas(plane: &Plane) {
    plane.shards[0].add_group("web", 2);
    plane.shards[1].add_group("web", 1);
    let operator = plane.start_operator();
    plane.until("three Machines have Nodes", async || plane.has_settled_at(3).await).await;
    let pool = plane.get(kinds::MACHINE_POOL, "nstance-web").await;
    assert_eq!(pool["spec"]["replicas"], 3, "the sum over all shards");
    let imported = plane.get(kinds::NSTANCE_MACHINE_POOL, "nstance-web").await;
    assert_eq!(imported["spec"]["shards"], json!(["a", "b"]));
    assert_eq!(imported["spec"]["deletionPolicy"], "Orphan");
    assert_eq!(plane.condition(kinds::NSTANCE_CLUSTER, CLUSTER, "ImportComplete").await.0, "True");

    plane.scale("nstance-web", 5).await;
    plane.until("five Machines have Nodes", async || plane.has_settled_at(5).await).await;
    let sizes = || plane.shards.iter().map(|it| it.state().groups["web"].size).collect::<Vec<_>>();
    assert_eq!(sizes(), [3, 2]);

    for n in 0..5 {
        plane.add_pod(&format!("web-{n}"), json!({})).await;
    }
    plane
        .until("all pods run", async || {
            for n in 0..5 {
                if !plane.is_running(&format!("web-{n}")).await {
                    return false;
                }
            }
            true
        })
        .await;
    plane.scale("nstance-web", 3).await;
    plane.until("three Machines are left", async || plane.has_settled_at(3).await).await;
    assert_eq!(sizes(), [2, 1], "what grew shrinks again");
    let (begun, acknowledged) = plane.drains();
    assert_eq!(begun.len(), 2);
    assert_eq!(begun, acknowledged, "every drain ended before its deadline");
    assert_eq!(plane.names(kinds::POD).await.len(), 3, "pods of drained Nodes were evicted");
    plane.until("both are told", async || plane.events("DrainCompleted").await == 2).await;
    operator.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_is_imported_once_the_last_shard_has_told_what_it_has() {
    let plane = Plane::new("late", &["a", "b"]).await;
    plane.shards[0].add_group("web", 1);
    plane.shards[1].add_group("web", 1);
    plane.shards[1].set_silent(true);
    let operator = plane.start_operator();
    plane
        .until("the missing shard is named", async || {
            let import = plane.condition(kinds::NSTANCE_CLUSTER, CLUSTER, "ImportComplete").await;
            import.0 == "False" && import.1.contains('b')
        })
        .await;
    assert_eq!(plane.all(kinds::NSTANCE_MACHINE_POOL).await.len(), 0);
    plane.shards[1].set_silent(false);
    plane.until("both Machines have Nodes", async || plane.has_settled_at(2).await).await;
    assert_eq!(plane.get(kinds::MACHINE_POOL, "nstance-web").await["spec"]["replicas"], 2);
    operator.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_shard_is_told_and_holds_up_no_other() {
    let plane = Plane::new("silent", &["a", "b"]).await;
    plane.shards[0].add_group("web", 1);
    plane.shards[1].add_group("web", 1);
    let operator = plane.start_operator();
    plane.until("both Machines have Nodes", async || plane.has_settled_at(2).await).await;
    plane.shards[1].set_silent(true);
    plane.scale("nstance-web", 4).await;
    plane.until("the other shard grows", async || plane.story_nodes().await.contains(&"silent-a-002".to_owned())).await;
    let reports = async |status: &str| {
        let group = plane.condition(kinds::NSTANCE_SHARD_GROUP, "web--b", "ShardReachable").await.0;
        let pool = plane.condition(kinds::NSTANCE_MACHINE_POOL, "nstance-web", "ShardsReachable").await.0;
        let cluster = plane.condition(kinds::NSTANCE_CLUSTER, CLUSTER, "ShardsReachable").await.0;
        [group, pool, cluster].iter().all(|it| it == status)
    };
    plane.until("the silent shard is reported", async || reports("False").await).await;
    assert_eq!(plane.condition(kinds::NSTANCE_SHARD_GROUP, "web--a", "ShardReachable").await.0, "True");
    assert_eq!(plane.story_nodes().await, ["silent-a-001", "silent-a-002", "silent-b-001"], "no Node is lost");
    plane.shards[1].set_silent(false);
    plane.until("it is reported to be back", async || reports("True").await).await;
    plane.until("its part grows too", async || plane.has_settled_at(4).await).await;
    operator.stop().await.unwrap();
}
