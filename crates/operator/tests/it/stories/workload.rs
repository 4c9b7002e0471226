//! A workload cluster apart from the one where our objects are.

use std::time::Duration;

use nstance_devk8s::Fault;
use nstance_operator::{ports::kinds, run};

use super::plane::{CLUSTER, Plane};
use crate::support::start_operator;

/// Longer than it takes to be sure that an instance has no Node.
const NO_ANSWER: Duration = Duration::from_secs(8);

#[tokio::test(flavor = "multi_thread")]
async fn without_the_workload_cluster_no_drain_is_acknowledged_and_no_node_deleted() {
    let plane = Plane::external("apart", &["a"]).await;
    plane.shards[0].add_group("web", 2);
    let workload = plane.workload.as_ref().unwrap();
    let mut args = plane.args();
    args.names.capi_endpoint = workload.url();
    let operator = start_operator(&plane.tasks, args, run::start_controllers);
    let ready = async || plane.condition(kinds::NSTANCE_CLUSTER, CLUSTER, "KubeconfigReady").await;

    // The Secret is missing.
    plane.until("the missing Secret is told", async || ready().await.0 == "False").await;
    plane.until("the pool is imported", async || plane.has(kinds::MACHINE_POOL, "nstance-web").await).await;
    plane.until("both Nodes are there", async || plane.story_nodes().await.len() == 2).await;
    plane.scale("nstance-web", 1).await;
    plane.until("a drain has begun", async || plane.drains().0.len() == 1).await;
    let leaving = plane.drains().0[0].0.clone();
    let is_kept = async || plane.drains().1.is_empty() && plane.story_nodes().await.contains(&leaving);
    plane.holds_for(NO_ANSWER, "no acknowledgement without a kubeconfig", is_kept).await;
    plane.scale("nstance-web", 2).await;
    plane.until("another VM comes all the same", async || plane.story_nodes().await.len() == 3).await;

    // Rights are missing.
    workload.set_fault(Some(Fault::Forbid { callers: "operator".into(), resource: "nodes".into() }));
    plane.add_kubeconfig(&workload.kubeconfig_of("operator")).await;
    plane.until("it is told that Nodes may not be read", async || ready().await.1.contains("nodes")).await;
    plane.holds_for(NO_ANSWER, "no acknowledgement without rights", is_kept).await;
    assert_eq!(ready().await.0, "False");

    // All is there.
    workload.set_fault(None);
    plane.until("there is access", async || ready().await.0 == "True").await;
    plane.until("the drain ends", async || plane.has_settled_at(2).await).await;
    assert_eq!(plane.drains().1.len(), 1);

    // The workload cluster is silent.
    workload.set_fault(Some(Fault::BlackHole { callers: "operator".into() }));
    plane.until("the silence is told", async || ready().await.0 == "False").await;
    plane.scale("nstance-web", 1).await;
    plane.until("a drain has begun", async || plane.drains().0.len() == 2).await;
    let is_kept = async || plane.drains().1.len() == 1 && plane.story_nodes().await.len() == 2;
    plane.holds_for(NO_ANSWER, "no acknowledgement while nothing answers", is_kept).await;
    workload.set_fault(None);
    plane.until("the drain ends", async || plane.has_settled_at(1).await).await;
    let (begun, acknowledged) = plane.drains();
    assert_eq!(begun, acknowledged);
    operator.stop().await.unwrap();
}
