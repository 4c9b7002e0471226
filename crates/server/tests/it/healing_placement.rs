//! Subnets and instance types that have no capacity, and where instances go instead.

use std::{collections::BTreeSet, time::Duration};

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_core::{instance::Phase, ports::provider::ErrorClass};
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use serde_json::{Value, json};

fn two_subnets(config: &mut Value) {
    config["server"]["subnet_pools"]["main"] = json!(["subnet-1", "subnet-2"]);
}

fn two_types(config: &mut Value) {
    config["templates"]["knc"]["instance_type"] = "big".into();
    config["templates"]["knc"]["instance_type_fallbacks"] = json!(["small"]);
}

fn no_capacity_in(site: &Site, subnet: &str) {
    let refused = Outcome::Refuse(ErrorClass::Capacity);
    site.cloud.script(Rule::always(Op::Create, When::Subnet(subnet.to_owned()), refused));
}

#[tokio::test]
async fn no_capacity_moves_to_the_next_choice() {
    let site = Site::new();
    no_capacity_in(&site, "subnet-1");
    let shard = Shard::start_on(site, 1, two_subnets).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    assert_eq!(shard.site.spec(id).subnet, "subnet-2");
    let creates = shard.site.calls(Op::Create);
    assert_eq!(creates.len(), 2);
    assert_eq!(creates.iter().filter_map(|call| call.instance).collect::<BTreeSet<_>>().len(), 2, "each its own id");
    assert!(creates[1].mono.since(creates[0].mono) < Duration::from_secs(2), "at once");
    let told = operator.hears("InstanceCreateFailed").await;
    assert_eq!(told.detail["class"], "capacity");
    assert!(operator.holds("web").await.is_empty());
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.subnet, "subnet-2");
    // What was learned is kept: the replacement does not try the full subnet again.
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    wait_until("it is ready", async || operator.group("web").await.ready_size == 1).await;
    shard.site.cloud.kill(id);
    wait_for("it is replaced", || shard.site.standing() != [id] && shard.site.standing().len() == 1).await;
    assert_eq!(shard.site.calls(Op::Create).last().unwrap().subnet.as_deref(), Some("subnet-2"));
    assert_eq!(shard.site.calls(Op::Create).len(), 3);
}

#[tokio::test]
async fn no_capacity_moves_to_the_fallback_type() {
    let site = Site::new();
    site.cloud.script(Rule::once(Op::Create, When::Call(1), Outcome::Refuse(ErrorClass::Capacity)));
    let shard = Shard::start_on(site, 1, two_types).await;
    let id = shard.only_vm().await;
    assert_eq!(shard.site.spec(id).instance_type.as_deref(), Some("small"));
    let mut records = shard.site.records().await;
    records.sort_by_key(|it| it.phase() == Phase::Failed);
    let types: Vec<_> = records.iter().map(|it| (it.phase(), it.instance_type.as_deref().unwrap())).collect();
    assert_eq!(types, [(Phase::Provisioning, "small"), (Phase::Failed, "big")]);
}

#[tokio::test]
async fn when_every_choice_is_exhausted_it_backs_off() {
    let site = Site::new();
    site.cloud.script(Rule::always(Op::Create, When::Always, Outcome::Refuse(ErrorClass::Capacity)));
    let shard = Shard::start_on(site, 1, |config| {
        two_subnets(config);
        two_types(config);
    })
    .await;
    let operator = Operator::on(&shard).await;
    wait_until("the hold is shown", async || operator.holds("web").await == ["NoCapacity"]).await;
    let tried = shard.site.calls(Op::Create);
    assert_eq!(tried.len(), 4, "each choice once");
    let subnets: Vec<_> = tried.iter().map(|call| call.subnet.as_deref().unwrap()).collect();
    assert_eq!(subnets, ["subnet-1", "subnet-1", "subnet-2", "subnet-2"]);
    let group = operator.group("web").await;
    assert_eq!((group.actual_size, group.pending_size), (0, 0));
    let hold = &group.holds[0];
    let (since, until) = (hold.since.unwrap().seconds, hold.until.unwrap().seconds);
    assert!((14..=16).contains(&(until - since)), "15 s, though a penalty is longer: {}", until - since);
}

#[tokio::test]
async fn a_round_of_refusals_counts_as_one() {
    let site = Site::new();
    no_capacity_in(&site, "subnet-1");
    let shard = Shard::start_on(site, 8, |_| {}).await;
    let operator = Operator::on(&shard).await;
    wait_until("all are refused", async || operator.events("InstanceCreateFailed").len() == 8).await;
    wait_until("the hold is shown", async || operator.holds("web").await == ["NoCapacity"]).await;
    let group = operator.group("web").await;
    let hold = &group.holds[0];
    assert!(hold.until.unwrap().seconds - hold.since.unwrap().seconds <= 16);
}

#[tokio::test]
async fn a_subnet_short_of_addresses_is_left_to_others() {
    let site =
        Site::with(FakeOptions { subnet_capacity: [("subnet-1".to_owned(), 10)].into(), ..FakeOptions::default() });
    let shard = Shard::start_on(site, 1, two_subnets).await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    let first = shard.only_vm().await;
    wait_for("free addresses are known", || {
        let asked = shard.site.calls(Op::SubnetFree);
        asked.iter().filter(|call| call.answer == Some(Ok(()))).count() >= 2
    })
    .await;
    wait_until("it is ready", async || operator.group("web").await.ready_size == 1).await;
    shard.site.cloud.kill(first);
    wait_for("it is replaced", || shard.site.standing() != [first] && shard.site.standing().len() == 1).await;
    assert_eq!(shard.site.spec(shard.site.standing()[0]).subnet, "subnet-2");
}
