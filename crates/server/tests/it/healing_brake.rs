//! Many agents gone at once while their machines run: then it is the network, or us. A few: then it is them.

use crate::common::{Shard, fleet::Fleet, operator::Operator, wait_until};
use nstance_core::ids::InstanceId;
use nstance_providers::fake::Op;

/// Reports every 300 ms: silent after 900.
async fn whole(n: u32) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start(n).await;
    let mut fleet = Fleet::reporting_every(&shard, 300);
    fleet.keep_reporting();
    let operator = Operator::on(&shard).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == i32::try_from(n).unwrap()).await;
    let ids = shard.site.standing();
    (shard, fleet, operator, ids)
}

#[tokio::test]
async fn a_network_split_replaces_nobody_in_a_hurry() {
    let (shard, fleet, operator, ids) = whole(6).await;
    for id in &ids {
        fleet.cut(*id);
    }
    for id in &ids {
        wait_until("it is silent", async || operator.health(*id).await == "silent").await;
    }
    wait_until("the brake is told", async || operator.holds("web").await.contains(&"MassDisconnect".to_owned())).await;
    assert_eq!(shard.site.calls(Op::Create).len(), 6, "nobody was replaced");
    assert_eq!(operator.group("web").await.actual_size, 6, "they stay members");
    for id in &ids {
        fleet.back(*id);
    }
    wait_until("all are ready again", async || operator.group("web").await.ready_size == 6).await;
    wait_until("the brake ended by itself", async || operator.holds("web").await.is_empty()).await;
    assert_eq!(shard.site.standing(), ids);
    assert_eq!(shard.site.calls(Op::Create).len(), 6);
    assert!(shard.site.calls(Op::Delete).is_empty());
}

#[tokio::test]
async fn a_few_silent_machines_are_replaced_at_once() {
    let (shard, fleet, operator, ids) = whole(6).await;
    for id in &ids[..2] {
        fleet.cut(*id);
    }
    wait_until("both are replaced", async || shard.site.calls(Op::Create).len() == 8).await;
    wait_until("the group is ready again", async || operator.group("web").await.ready_size == 6).await;
    assert!(ids[2..].iter().all(|id| shard.site.standing().contains(id)), "nobody else left");
    assert_eq!(shard.site.calls(Op::Create).len(), 8);
}
