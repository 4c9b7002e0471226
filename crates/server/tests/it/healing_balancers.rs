//! Into load balancers when an instance is of use, out of them before it goes.

use std::{collections::BTreeMap, time::Duration};

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_core::{
    ids::InstanceId,
    ports::provider::{ErrorClass, LbMemberState},
};
use nstance_proto::v1;
use nstance_providers::fake::{Call, FakeOptions, Op, Outcome, Rule, When};
use serde_json::{Value, json};

const DRAIN: Duration = Duration::from_millis(300);

fn slow_to_drain() -> FakeOptions {
    FakeOptions { lb_drain_time: DRAIN, ..FakeOptions::default() }
}

/// The group is behind the load balancer `www`, and a drain takes this long.
fn balanced(drain_timeout: &str) -> impl FnOnce(&mut Value) {
    move |config| {
        config["server"]["default_drain_timeout"] = drain_timeout.into();
        config["load_balancers"] = json!({ "www": {}, "other": {} });
        config["groups"]["default"]["web"]["load_balancers"] = json!(["www"]);
    }
}

async fn members(site: &Site) -> BTreeMap<InstanceId, LbMemberState> {
    site.cloud.members(&"www".parse().unwrap())
}

/// All of these are in, and nobody else.
async fn all_are_in(site: &Site, ids: &[InstanceId]) {
    wait_until("all are in the balancer", async || {
        let members = members(site).await;
        members.keys().eq(ids) && members.values().all(|member| *member == LbMemberState::In)
    })
    .await;
}

async fn whole(site: Site, size: u32, change: impl FnOnce(&mut Value)) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start_on(site, size, change).await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, size as usize).await;
    let ids = shard.site.standing();
    all_are_in(&shard.site, &ids).await;
    (shard, fleet, operator, ids)
}

fn calls_of(site: &Site, op: Op, id: InstanceId) -> Vec<Call> {
    site.calls(op).into_iter().filter(|call| call.instance == Some(id)).collect()
}

fn refuse(op: Op) -> Rule {
    Rule::always(op, When::Always, Outcome::Refuse(ErrorClass::Unavailable))
}

#[tokio::test]
async fn an_instance_enters_the_balancer_with_its_first_report() {
    let shard = Shard::start_with(1, balanced("2s")).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    assert!(members(&shard.site).await.is_empty(), "it has not reported yet");
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    let told = operator.hears_of("LbRegistered", id).await;
    assert_eq!(told.detail["load_balancer"], "www");
    assert_eq!(members(&shard.site).await, BTreeMap::from([(id, LbMemberState::In)]));
    let other = shard.site.cloud.members(&"other".parse().unwrap());
    assert!(other.is_empty(), "its group does not list that one");
}

#[tokio::test]
async fn a_leaving_instance_is_out_of_the_balancer_first() {
    let (shard, fleet, operator, ids) = whole(Site::with(slow_to_drain()), 2, balanced("60s")).await;
    let site = &shard.site;
    fleet.notice(ids[0], "terminate").await;
    operator.hears_of("DrainStarted", ids[0]).await;
    operator.hears_of("LbDeregistered", ids[0]).await;
    assert!(site.standing().contains(&ids[0]), "it is still there to finish what it serves");
    let ack = v1::DrainAckRequest { instance_id: ids[0].to_string(), ..v1::DrainAckRequest::default() };
    operator.client().acknowledge_drained(ack).await.unwrap();
    wait_for("it is deleted", || !site.standing().contains(&ids[0])).await;
    let (out, deleted) = (calls_of(site, Op::LbDeregister, ids[0]), calls_of(site, Op::Delete, ids[0]));
    assert_eq!(out.len(), 1);
    assert!(DRAIN <= deleted[0].mono.since(out[0].mono), "the balancer had its time");
    assert_eq!(calls_of(site, Op::LbRegister, ids[0]).len(), 1, "and it did not come back in");
    fleet.is_whole(site, 2).await;
    all_are_in(site, &site.standing()).await;
}

#[tokio::test]
async fn a_failed_deregistration_never_registers() {
    let (shard, fleet, operator, ids) = whole(Site::new(), 2, balanced("60s")).await;
    let site = &shard.site;
    site.cloud.script(refuse(Op::LbDeregister));
    fleet.notice(ids[0], "terminate").await;
    let told = operator.hears_of("LbFailing", ids[0]).await;
    assert_eq!(told.severity, nstance_proto::v1::Severity::Warning as i32, "{told:?}");
    assert!(3 <= calls_of(site, Op::LbDeregister, ids[0]).len());
    assert!(operator.events("ProviderFailing").is_empty(), "it says nothing about VMs");
    site.cloud.clear_script();
    operator.hears_of("LbDeregistered", ids[0]).await;
    wait_until("it is out", async || !members(site).await.contains_key(&ids[0])).await;
    assert_eq!(calls_of(site, Op::LbRegister, ids[0]).len(), 1, "only ever once");
    assert!(calls_of(site, Op::Delete, ids[0]).is_empty());
}

#[tokio::test]
async fn a_registration_that_landed_in_part_is_completed() {
    let site = Site::with(FakeOptions { lb_targets: 2, ..FakeOptions::default() });
    let half = Outcome::LandThenFail(ErrorClass::Ambiguous);
    site.cloud.script(Rule::once(Op::LbRegister, When::Call(1), half));
    let (shard, _fleet, operator, ids) = whole(site, 1, balanced("2s")).await;
    operator.hears_of("LbRegistered", ids[0]).await;
    assert_eq!(calls_of(&shard.site, Op::LbRegister, ids[0]).len(), 2);
}

#[tokio::test]
async fn a_new_leader_rebuilds_who_is_in_the_balancer() {
    let (shard, _fleet, _operator, ids) = whole(Site::with(slow_to_drain()), 2, balanced("2s")).await;
    let site = shard.site.clone();
    let mut smaller = site.config(1);
    balanced("2s")(&mut smaller);
    site.upload(&smaller).await;
    let n_registrations = site.calls(Op::LbRegister).len();
    // Nobody reports to the new leader: what it knows of the balancer it has from the balancer.
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let told = operator.hears("LbDeregistered").await;
    let leaving = *ids.iter().find(|id| id.to_string() == told.instance_id).unwrap();
    wait_for("it is deleted", || !site.standing().contains(&leaving)).await;
    let (out, deleted) = (calls_of(&site, Op::LbDeregister, leaving), calls_of(&site, Op::Delete, leaving));
    assert!(DRAIN <= deleted[0].mono.since(out[0].mono), "out of the balancer first");
    let stays: Vec<_> = ids.iter().copied().filter(|id| *id != leaving).collect();
    all_are_in(&site, &stays).await;
    assert_eq!(site.calls(Op::LbRegister).len(), n_registrations, "nobody was put in anew");
}

#[tokio::test]
async fn a_new_leader_goes_on_with_a_deregistration() {
    let (shard, fleet, operator, ids) = whole(Site::new(), 2, balanced("60s")).await;
    let site = shard.site.clone();
    site.cloud.script(refuse(Op::LbDeregister));
    // Its members cannot be learned either: then being sure means taking it out once more.
    site.cloud.script(refuse(Op::LbMembers));
    fleet.notice(ids[0], "terminate").await;
    operator.hears_of("DrainStarted", ids[0]).await;
    wait_for("it was tried", || !calls_of(&site, Op::LbDeregister, ids[0]).is_empty()).await;
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_for("the new leader tries it", || {
        calls_of(&site, Op::LbDeregister, ids[0]).iter().any(|call| call.epoch == Some(shard.leader.epoch))
    })
    .await;
    site.cloud.clear_script();
    operator.hears_of("LbDeregistered", ids[0]).await;
    wait_until("it is out", async || !members(&site).await.contains_key(&ids[0])).await;
    assert_eq!(calls_of(&site, Op::LbRegister, ids[0]).len(), 1, "only ever once");
}

/// As `balanced`, and a load balancer is waited for no longer than this.
fn waited_for(timeout: &'static str) -> impl FnOnce(&mut Value) {
    move |config| {
        balanced("2s")(config);
        config["server"]["garbage_collection"] = json!({ "interval": "1s", "registration_timeout": timeout });
    }
}

#[tokio::test]
async fn an_instance_is_ready_only_once_its_balancer_serves_it() {
    let www = "www".parse().unwrap();
    let shard = Shard::start_with(1, waited_for("60s")).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    shard.site.cloud.set_lb_health(&www, id, false);
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    // With each listing it is registered again, for its first call may have been forgotten.
    wait_for("it is registered again", || 2 <= calls_of(&shard.site, Op::LbRegister, id).len()).await;
    let group = operator.group("web").await;
    assert_eq!((group.actual_size, group.ready_size), (1, 0), "registered, not served");
    assert!(operator.events("LbRegistered").is_empty());
    shard.site.cloud.set_lb_health(&www, id, true);
    operator.hears_of("LbRegistered", id).await;
    wait_until("it is ready", async || operator.group("web").await.ready_size == 1).await;
    // A health check that fails later takes no capacity away.
    shard.site.cloud.set_lb_health(&www, id, false);
    let n_looks = shard.site.calls(Op::LbMembers).len();
    wait_for("its members were listed again", || n_looks + 2 <= shard.site.calls(Op::LbMembers).len()).await;
    assert_eq!(operator.group("web").await.ready_size, 1);
    assert!(shard.site.calls(Op::Delete).is_empty());
}

#[tokio::test]
async fn an_instance_that_its_balancer_does_not_serve_in_time_is_told() {
    let www = "www".parse().unwrap();
    let shard = Shard::start_with(2, waited_for("3s")).await;
    let operator = Operator::on(&shard).await;
    let ids = shard.vms(2).await;
    shard.site.cloud.set_lb_health(&www, ids[0], false);
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let told = operator.hears_of("LbFailing", ids[0]).await;
    assert_eq!(told.detail["load_balancer"], "www");
    wait_until("the hold is shown", async || operator.holds("web").await.contains(&"WaitingForLb".to_owned())).await;
    assert_eq!(operator.group("web").await.ready_size, 1, "the other one is served");
    assert_eq!(operator.events("LbFailing").len(), 1);
    assert!(shard.site.calls(Op::Delete).is_empty(), "nobody is removed for it");
}

#[tokio::test]
async fn a_health_check_that_passes_for_no_member_is_not_waited_for() {
    let www = "www".parse().unwrap();
    let shard = Shard::start_with(1, waited_for("3s")).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    shard.site.cloud.set_lb_health(&www, id, false);
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    wait_until("it counts as ready", async || operator.group("web").await.ready_size == 1).await;
    operator.hears_of("LbFailing", id).await;
}
