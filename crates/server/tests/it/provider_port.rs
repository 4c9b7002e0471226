//! What a provider may tell and lack: why a VM ended, places it reserves, needs it cannot meet, abilities it does not have.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use nstance_core::{
    instance::Phase,
    ports::provider::{CreatePace, Ended, ErrorClass, ProviderError, Scope},
};
use nstance_providers::{
    fake::{EndOf, FakeOptions, Op, Outcome, Rule, ScriptedEnd, When},
    minimal::MinimalProvider,
};
use nstance_server::boot;
use serde_json::{Value, json};

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, wait_for, wait_until};

fn two_subnets(config: &mut Value) {
    config["server"]["subnet_pools"]["main"] = json!(["subnet-1", "subnet-2"]);
}

/// VMs of this subnet are accepted, and end before they run.
fn ends_in(site: &Site, subnet: &str, class: ErrorClass, message: &str) {
    site.cloud.script_end(ScriptedEnd {
        of: EndOf::Choice { subnet: subnet.to_owned(), instance_type: None },
        after: Duration::from_millis(50),
        times: u32::MAX,
        ended: Ended { class, code: Some("Server.Ended".to_owned()), message: message.to_owned() },
    });
}

/// VMs that end by themselves are noticed by the listing.
fn swept(config: &mut Value) {
    config["server"]["garbage_collection"]["interval"] = "1s".into();
}

fn slow_to_boot() -> FakeOptions {
    FakeOptions { boot_time: Duration::from_secs(600), ..FakeOptions::default() }
}

#[tokio::test]
async fn a_vm_that_ended_for_lack_of_capacity_is_made_elsewhere() {
    let site = Site::with(slow_to_boot());
    ends_in(&site, "subnet-1", ErrorClass::Capacity, "no capacity for this type here");
    let shard = Shard::start_on(site, 1, |config| {
        two_subnets(config);
        swept(config);
    })
    .await;
    let operator = Operator::on(&shard).await;
    let dead = operator.hears("InstanceDead").await;
    assert!(dead.message.contains("no capacity for this type here"), "{}", dead.message);
    wait_for("another one is made", || 2 <= shard.site.calls(Op::Create).len()).await;
    let subnets: Vec<_> = shard.site.calls(Op::Create).into_iter().filter_map(|call| call.subnet).collect();
    assert_eq!(subnets, ["subnet-1", "subnet-2"]);
}

#[tokio::test]
async fn vms_that_end_before_they_register_are_not_launched_in_a_loop() {
    let site = Site::with(slow_to_boot());
    ends_in(&site, "subnet-1", ErrorClass::Quota, "volume limit exceeded");
    let shard = Shard::start_on(site, 1, swept).await;
    let operator = Operator::on(&shard).await;
    operator.hears("InstanceDead").await;
    wait_until("the hold is shown", async || operator.holds("web").await.contains(&"Quota".to_owned())).await;
    let group = operator.group("web").await;
    let hold = group.holds.iter().find(|hold| hold.message.contains("volume limit exceeded")).unwrap();
    let until = hold.until.unwrap().seconds;
    assert!(29 <= until - hold.since.unwrap().seconds);
    assert_eq!(shard.site.calls(Op::Create).len(), 1, "the same again at once would end the same");
}

#[tokio::test]
async fn a_quota_of_one_choice_moves_to_the_next() {
    let site = Site::new();
    let error = ProviderError::new("create", ErrorClass::Quota, "vCPU limit of this family").with_scope(Scope::Choice);
    site.cloud.script(Rule::always(Op::Create, When::Subnet("subnet-1".to_owned()), Outcome::RefuseWith(error)));
    let shard = Shard::start_on(site, 1, two_subnets).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    assert_eq!(shard.site.spec(id).subnet, "subnet-2");
    assert!(!operator.holds("web").await.contains(&"Quota".to_owned()));
}

#[tokio::test]
async fn a_refusal_that_may_have_landed_makes_no_second_vm() {
    let site = Site::new();
    let error = ProviderError::new("create", ErrorClass::Invalid, "configured half of it")
        .with_landed(nstance_core::ports::provider::Landed::Maybe);
    site.cloud.script(Rule::once(Op::Create, When::Always, Outcome::LandThenFailWith(error)));
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let id = shard.only_vm().await;
    wait_until("it is confirmed", async || shard.site.phase(id).await == Some(Phase::Provisioning)).await;
    assert_eq!(shard.site.standing(), [id]);
    assert_eq!(shard.site.records().await.len(), 1, "it was not taken for a refusal");
}

#[tokio::test]
async fn creates_keep_the_providers_pace_unless_the_config_has_one() {
    let pace = CreatePace { burst: 2, refill: Duration::from_secs(3600) };
    let slow = || Site::with(FakeOptions { create_pace: pace, ..FakeOptions::default() });
    let shard = Shard::start_on(slow(), 5, |_| {}).await;
    let operator = Operator::on(&shard).await;
    wait_until("the rest waits", async || operator.group("web").await.pending_size == 5).await;
    wait_for("the burst is used", || shard.site.standing().len() == 2).await;
    let shard = Shard::start_on(slow(), 5, |config| config["server"]["create_burst"] = 100.into()).await;
    shard.vms(5).await;
}

#[tokio::test]
async fn waiting_for_a_place_takes_nothing_from_the_time_to_register() {
    let options = FakeOptions {
        idempotent_create: false,
        reserve: true,
        places: 1,
        latencies: [(Op::Create, Duration::from_secs(2))].into(),
        ..FakeOptions::default()
    };
    let shard = Shard::start_on(Site::with(options), 2, |_| {}).await;
    shard.vms(2).await;
    let mut records = shard.site.records().await;
    records.sort_by_key(|it| it.created_at);
    let apart = records[1].created_at.since(records[0].created_at);
    assert!(Duration::from_millis(1900) <= apart, "the second one waited for the place of the first: {apart:?}");
    for it in &records {
        assert_eq!(it.nonce.expires_at.since(it.created_at), Duration::from_secs(60));
        assert_eq!(shard.site.spec(it.id).reserved_id, it.provider.reserved_id);
    }
    assert_eq!(shard.site.cloud.free_places(), Some(1), "each place is given back");
}

#[tokio::test]
async fn a_new_leader_gives_no_reserved_id_twice() {
    let options =
        FakeOptions { idempotent_create: false, reserve: true, reserve_numbers: true, ..FakeOptions::default() };
    let shard = Shard::start_on(Site::with(options), 2, |_| {}).await;
    shard.vms(2).await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    site.upload(&site.config(4)).await;
    // On another machine, whose memory knows no reservation.
    let mut parts = site.parts("srv-2");
    parts.provider = Some(Arc::new(site.cloud.restarted()));
    let shard = Shard::of(site.clone(), boot::start(parts)).await;
    shard.vms(4).await;
    let ids: BTreeSet<_> = site.records().await.into_iter().filter_map(|it| it.provider.reserved_id).collect();
    assert_eq!(ids.len(), 4);
    assert!(site.calls(Op::Create).iter().all(|call| call.answer == Some(Ok(()))), "none was refused as taken");
}

#[tokio::test]
async fn a_group_whose_subnet_does_not_exist_is_held_and_the_others_are_not() {
    let options = FakeOptions {
        strict_subnets: true,
        subnet_capacity: [("subnet-1".to_owned(), 100)].into(),
        ..FakeOptions::default()
    };
    let shard = Shard::start_on(Site::with(options), 1, |config| {
        config["server"]["subnet_pools"] = json!({ "main": ["subnet-1"], "typo": ["subnet-9"] });
        config["groups"]["default"]["lost"] = json!({ "template": "knc", "size": 1, "subnet_pool": "typo" });
    })
    .await;
    let operator = Operator::on(&shard).await;
    wait_until("it is held", async || operator.holds("lost").await.contains(&"InvalidRequest".to_owned())).await;
    let group = operator.group("lost").await;
    assert!(group.holds.iter().any(|hold| hold.message.contains("subnet-9")), "{:?}", group.holds);
    let fleet = Fleet::on(&shard);
    wait_until("the other is whole", async || operator.group("web").await.ready_size == 1).await;
    drop(fleet);
}

#[tokio::test]
async fn a_provider_without_optional_abilities_keeps_its_groups() {
    let site = Arc::new(Site::new());
    let mut config = site.config(2);
    config["load_balancers"] = json!({});
    site.upload(&config).await;
    let mut parts = site.parts("srv-1");
    parts.provider = Some(Arc::new(MinimalProvider(Arc::new(site.cloud.clone()))));
    let shard = Shard::of(site.clone(), boot::start(parts)).await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&site, 2).await;
    wait_until("both are ready", async || operator.group("web").await.ready_size == 2).await;
    let lost = site.standing()[0];
    site.cloud.kill(lost);
    fleet.cut(lost);
    wait_for("it is replaced", || site.standing().len() == 2 && !site.standing().contains(&lost)).await;
    fleet.is_whole(&site, 2).await;
    wait_until("both are ready again", async || operator.group("web").await.ready_size == 2).await;
    let asked: BTreeSet<_> = site.cloud.calls().into_iter().map(|call| call.op).collect();
    let optional = [Op::LbRegister, Op::LbDeregister, Op::LbMembers, Op::NetAssign, Op::NetRelease, Op::ResolveImage];
    assert!(optional.iter().all(|op| !asked.contains(op)), "{asked:?}");
}
