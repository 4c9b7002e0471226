//! What agents announce before they go: a host on its way down, a restart of their own, a machine that is taken back.

use std::time::Duration;

use crate::common::{Shard, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_core::{ids::InstanceId, instance::Phase};
use nstance_providers::fake::Op;
use serde_json::{Value, json};

async fn whole(n: u32, change: impl FnOnce(&mut Value)) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start_with(n, change).await;
    let fleet = Fleet::reporting_every(&shard, 3_600_000);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, usize::try_from(n).unwrap()).await;
    wait_until("all are ready", async || u32::try_from(operator.group("web").await.ready_size).unwrap() == n).await;
    let ids = shard.site.standing();
    (shard, fleet, operator, ids)
}

fn n_looks(shard: &Shard) -> usize {
    shard.site.calls(Op::Describe).len()
}

#[tokio::test]
async fn a_host_on_its_way_down_is_looked_at_until_it_is_down() {
    let (shard, fleet, operator, ids) = whole(2, |_| {}).await;
    let before = n_looks(&shard);
    fleet.notice(ids[0], "shutdown").await;
    operator.hears_of("HostShutdown", ids[0]).await;
    wait_for("it is looked at, again and again", || before + 3 <= n_looks(&shard)).await;
    let looks = shard.site.calls(Op::Describe);
    let gap = looks[before + 2].mono.since(looks[before + 1].mono);
    assert!((Duration::from_millis(450)..Duration::from_secs(2)).contains(&gap), "{gap:?}");
    assert_eq!(shard.site.calls(Op::Create).len(), 2, "it still runs");
    // Its agent never says more, and no stream breaks: the provider alone tells.
    shard.site.cloud.stop(ids[0]);
    operator.hears_of("InstanceDead", ids[0]).await;
    fleet.cut(ids[0]);
    wait_until("it is removed", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    fleet.is_whole(&shard.site, 2).await;
    assert_eq!(shard.site.calls(Op::Create).len(), 3);
}

#[tokio::test]
async fn a_host_that_takes_longer_to_go_down_is_still_looked_at_often() {
    let (shard, fleet, operator, ids) = whole(1, |_| {}).await;
    fleet.notice(ids[0], "shutdown").await;
    operator.hears_of("HostShutdown", ids[0]).await;
    fleet.cut(ids[0]);
    let before = n_looks(&shard);
    wait_for("it is looked at, again and again", || before + 5 <= n_looks(&shard)).await;
    operator.leap(&shard.site, Duration::from_secs(11)).await;
    let before = n_looks(&shard);
    wait_for("the first look after the ten seconds is soon", || before < n_looks(&shard)).await;
    shard.site.cloud.stop(ids[0]);
    operator.leap(&shard.site, Duration::from_secs(2)).await;
    operator.hears_of("InstanceDead", ids[0]).await;
}

#[tokio::test]
async fn a_host_that_said_it_goes_down_and_stays_up_is_replaced_after_its_grace() {
    let (shard, fleet, operator, ids) = whole(1, |_| {}).await;
    fleet.notice(ids[0], "shutdown").await;
    operator.hears_of("HostShutdown", ids[0]).await;
    fleet.cut(ids[0]);
    wait_until("it is lost", async || operator.health(ids[0]).await == "lost").await;
    operator.leap(&shard.site, Duration::from_secs(50)).await;
    assert_eq!(operator.health(ids[0]).await, "lost", "a reboot takes its time");
    assert_eq!(shard.site.calls(Op::Create).len(), 1);
    operator.leap(&shard.site, Duration::from_secs(11)).await;
    wait_until("it is removed", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    let drain = shard.site.record(ids[0]).await.unwrap().drain.unwrap();
    assert_eq!(drain.reason.as_str(), "unhealthy");
    fleet.is_whole(&shard.site, 1).await;
}

#[tokio::test]
async fn a_host_that_comes_back_from_its_reboot_is_left_alone() {
    let (shard, fleet, operator, ids) = whole(1, |_| {}).await;
    fleet.notice(ids[0], "shutdown").await;
    operator.hears_of("HostShutdown", ids[0]).await;
    fleet.cut(ids[0]);
    operator.hears_of("InstanceLost", ids[0]).await;
    fleet.back(ids[0]);
    operator.hears_of("InstanceRecovered", ids[0]).await;
    operator.leap(&shard.site, Duration::from_secs(61)).await;
    wait_until("it is well", async || operator.health(ids[0]).await == "healthy").await;
    assert_eq!((shard.site.standing(), shard.site.calls(Op::Create).len()), (ids, 1));
}

#[tokio::test]
async fn an_agent_that_restarts_is_not_missed_for_half_a_minute() {
    let (shard, fleet, operator, ids) = whole(1, |_| {}).await;
    fleet.notice(ids[0], "leave").await;
    operator.hears_of("HostShutdown", ids[0]).await;
    let looks = n_looks(&shard);
    let connected = || shard.server.metrics.text().contains("nstance_agents_connected 1");
    wait_for("it is connected", connected).await;
    fleet.cut(ids[0]);
    wait_for("its connection is gone", || !connected()).await;
    operator.leap(&shard.site, Duration::from_secs(15)).await;
    assert_eq!(operator.health(ids[0]).await, "healthy");
    assert_eq!(n_looks(&shard), looks, "nobody looks");
    assert!(operator.events("InstanceLost").is_empty());
    let lists = shard.site.calls(Op::List).len();
    operator.leap(&shard.site, Duration::from_secs(16)).await;
    operator.hears_of("InstanceLost", ids[0]).await;
    wait_until("it counts as lost", async || operator.health(ids[0]).await == "lost").await;
    // By itself, or in the listing that follows a lease that ran out.
    let seen = || looks < n_looks(&shard) || lists < shard.site.calls(Op::List).len();
    wait_for("it is looked at", seen).await;
    fleet.back(ids[0]);
    operator.hears_of("InstanceRecovered", ids[0]).await;
    assert_eq!(shard.site.calls(Op::Create).len(), 1);
}

#[tokio::test]
async fn a_deadline_that_no_time_can_be_leaves_a_record_that_the_next_leader_reads() {
    let (shard, fleet, operator, ids) = whole(2, |config| {
        config["groups"]["default"]["web"]["drain_timeout"] = "1h".into();
    })
    .await;
    fleet.notice_by(ids[0], "terminate", Some(i64::MIN)).await;
    operator.hears_of("DrainStarted", ids[0]).await;
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("the group is full again", async || operator.group("web").await.ready_size == 2).await;
    let group = operator.group("web").await;
    assert!(group.holds.iter().all(|hold| hold.kind != "RecordCorrupt"), "{:?}", group.holds);
    assert_eq!(group.draining_size, 1, "nobody knows when it goes, so it has all its time");
}

#[tokio::test]
async fn after_three_notices_in_a_subnet_replacements_go_elsewhere() {
    let (shard, fleet, operator, ids) = whole(4, |config| {
        config["server"]["subnet_pools"]["main"] = json!(["subnet-1", "subnet-2"]);
    })
    .await;
    let subnets = || {
        let creates = shard.site.calls(Op::Create);
        creates.into_iter().skip(4).filter_map(|call| call.subnet).collect::<Vec<_>>()
    };
    for (n, id) in ids.iter().take(2).enumerate() {
        fleet.notice(*id, "terminate").await;
        wait_for("it is replaced", || subnets().len() == n + 1).await;
    }
    fleet.notice(ids[2], "terminate").await;
    operator.hears_of("TerminationNotice", ids[2]).await;
    wait_for("it is replaced", || subnets().len() == 3).await;
    assert_eq!(subnets(), ["subnet-1", "subnet-1", "subnet-2"]);
}
