//! Creates that fail, lie or hang; machines that come up wrong; and what a new leader makes of all that.

use std::{sync::Arc, time::Duration};

use crate::common::{
    LIMIT, Shard, Site, fleet::Fleet, operator::Operator, overwrite, shard_id, tenant, wait_for, wait_until,
};
use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, uuid_v7},
    instance::Phase,
    ports::{
        clock::random,
        provider::{ErrorClass, Tags},
    },
};
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use nstance_rt::entropy::SeededEntropy;
use nstance_store::{
    faulty::{FaultPlan, FaultyStore},
    memory::MemoryStore,
    records::groups_key,
};

fn n_creates(site: &Site) -> usize {
    site.calls(Op::Create).len()
}

/// A group of one whose first create meets `outcome`.
async fn first_create(outcome: Outcome) -> (Shard, Operator) {
    let site = Site::new();
    site.cloud.script(Rule::once(Op::Create, When::Call(1), outcome));
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let operator = Operator::on(&shard).await;
    (shard, operator)
}

/// A refused create leaves a failed record that counts nowhere, an event, and a hold that says when it goes on.
async fn refused_create_holds(class: ErrorClass, hold: &str) {
    let (shard, operator) = first_create(Outcome::Refuse(class)).await;
    let told = operator.hears("InstanceCreateFailed").await;
    assert_eq!(told.detail["class"], class.as_str());
    wait_until("the hold is shown", async || operator.holds("web").await == [hold]).await;
    let group = operator.group("web").await;
    assert_eq!((group.actual_size, group.pending_size), (0, 0), "no phantom member");
    assert!(group.holds[0].until.is_some() && group.holds[0].since.is_some());
    let records = shard.site.records().await;
    assert_eq!(records.iter().map(|it| it.phase()).collect::<Vec<_>>(), [Phase::Failed]);
    assert_eq!(records[0].create_failure.as_ref().unwrap().class, class.as_str());
    assert_eq!(n_creates(&shard.site), 1, "and it backs off");
    assert!(shard.site.standing().is_empty());
}

#[tokio::test]
async fn no_capacity_frees_the_slot_and_backs_off() {
    refused_create_holds(ErrorClass::Capacity, "NoCapacity").await;
}

#[tokio::test]
async fn a_quota_frees_the_slot_and_backs_off() {
    refused_create_holds(ErrorClass::Quota, "Quota").await;
}

#[tokio::test]
async fn an_invalid_request_frees_the_slot_and_is_not_repeated() {
    refused_create_holds(ErrorClass::Invalid, "InvalidRequest").await;
}

#[tokio::test]
async fn a_throttled_create_is_soon_tried_again() {
    let (shard, operator) = first_create(Outcome::Refuse(ErrorClass::Throttled)).await;
    operator.hears("InstanceCreateFailed").await;
    shard.only_vm().await;
    assert_eq!(n_creates(&shard.site), 2);
    let mut phases: Vec<_> = shard.site.records().await.iter().map(|it| it.phase()).collect();
    phases.sort();
    assert_eq!(phases, [Phase::Failed, Phase::Provisioning]);
}

#[tokio::test]
async fn a_failed_create_of_one_does_not_hold_the_others_back() {
    let site = Site::new();
    site.cloud.script(Rule::once(Op::Create, When::Call(2), Outcome::Refuse(ErrorClass::Throttled)));
    let shard = Shard::start_on(site, 3, |_| {}).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 3).await;
    shard.site.assert_nothing_leaks().await;
    assert_eq!(n_creates(&shard.site), 4);
}

#[tokio::test]
async fn an_ambiguous_create_that_landed_yields_one_vm() {
    let (shard, _operator) = first_create(Outcome::LandThenFail(ErrorClass::Ambiguous)).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 1).await;
    let id = shard.only_vm().await;
    assert_eq!(shard.site.records().await.len(), 1);
    assert_eq!(shard.site.phase(id).await, Some(Phase::Running));
    assert!(shard.site.calls(Op::Create).iter().all(|call| call.instance == Some(id)), "only ever asked for this one");
}

#[tokio::test]
async fn an_ambiguous_create_that_did_not_land_yields_one_vm() {
    let (shard, _operator) = first_create(Outcome::Refuse(ErrorClass::Ambiguous)).await;
    let id = shard.only_vm().await;
    let records = shard.site.records().await;
    assert_eq!(records.iter().map(|it| it.id).collect::<Vec<_>>(), [id], "the same id is asked for again");
    assert_eq!(records[0].phase(), Phase::Provisioning);
    assert_eq!(n_creates(&shard.site), 2);
}

#[tokio::test]
async fn an_ambiguous_create_without_idempotency_yields_one_vm() {
    for outcome in [Outcome::LandThenFail(ErrorClass::Ambiguous), Outcome::Refuse(ErrorClass::Ambiguous)] {
        let site = Site::with(FakeOptions { idempotent_create: false, reserve: true, ..FakeOptions::default() });
        let landed = matches!(outcome, Outcome::LandThenFail(_));
        site.cloud.script(Rule::once(Op::Create, When::Call(1), outcome));
        let shard = Shard::start_on(site, 1, |_| {}).await;
        if landed {
            shard.only_vm().await;
            assert_eq!(n_creates(&shard.site), 1);
        } else {
            // Asked for again only after two looks ten seconds apart: until then its slot is kept and nothing is made.
            wait_until("the intent is kept", async || shard.site.living().await.len() == 1).await;
            wait_for("it is looked at", || !shard.site.calls(Op::Describe).is_empty()).await;
            assert_eq!(n_creates(&shard.site), 1);
        }
        assert!(shard.site.standing().len() <= 1);
    }
}

#[tokio::test]
async fn a_successor_finishes_an_ambiguous_create() {
    let site = Site::new();
    // It lands, and no answer ever comes.
    site.cloud.script(Rule::once(Op::Create, When::Call(1), Outcome::LandThenHang));
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let site = shard.site.clone();
    wait_until("intent and VM are there", async || {
        site.standing().len() == 1 && site.living().await == site.standing()
    })
    .await;
    let id = site.standing()[0];
    assert_eq!(site.phase(id).await, Some(Phase::Pending));
    // The next leader listens elsewhere, and still means the same VM.
    let shard = shard.restart("srv-2").await;
    wait_until("the successor confirms it", async || site.phase(id).await == Some(Phase::Provisioning)).await;
    assert_eq!(site.standing(), [id]);
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&site, 1).await;
    assert_eq!(site.living().await, [id]);
}

#[tokio::test]
async fn a_vm_that_died_before_it_was_confirmed_is_replaced() {
    let site = Site::new();
    site.cloud.script(Rule::once(Op::Create, When::Call(1), Outcome::LandThenHang));
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let site = shard.site.clone();
    wait_until("intent and VM are there", async || {
        site.standing().len() == 1 && site.living().await == site.standing()
    })
    .await;
    let dead = site.standing()[0];
    site.cloud.kill(dead);
    let shard = shard.restart("srv-2").await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&site, 1).await;
    site.assert_nothing_leaks().await;
    assert_ne!(site.standing(), [dead]);
}

#[tokio::test]
async fn a_vm_that_never_registers_is_removed() {
    let site = Site::new();
    let shard = Shard::start_on(site, 1, |config| {
        config["server"]["garbage_collection"]["registration_timeout"] = "60s".into();
        config["server"]["garbage_collection"]["interval"] = "1s".into();
    })
    .await;
    let operator = Operator::on(&shard).await;
    let deaf = shard.only_vm().await;
    let fleet = Fleet::on_new(&shard);
    operator.leap(&shard.site, Duration::from_secs(61)).await;
    operator.hears_of("InstanceNeverRegistered", deaf).await;
    wait_until("it is removed", async || shard.site.phase(deaf).await == Some(Phase::Deleted)).await;
    fleet.is_whole(&shard.site, 1).await;
    let record = shard.site.record(deaf).await.unwrap();
    assert_eq!(record.delete.unwrap().reason, "never-registered");
    assert!(record.drain.is_none(), "there is nobody to drain");
    shard.site.assert_nothing_leaks().await;
}

fn tags(id: InstanceId, group: &str) -> Tags {
    Tags {
        cluster: "demo".parse().unwrap(),
        shard: shard_id(),
        instance: id,
        tenant: tenant(),
        group: group.parse().unwrap(),
        on_demand: false,
        epoch: Epoch(1),
        template: "knc".to_owned(),
        infra_hash: String::new(),
    }
}

#[tokio::test]
async fn a_vm_without_record_is_adopted() {
    let site = Site::new();
    let id = InstanceId::new("knc".parse().unwrap(), uuid_v7(site.now(), random(site.entropy.as_ref())));
    site.cloud.add_foreign("orphan", Some(id), Some(tags(id, "web")));
    site.cloud.add_foreign("stranger", None, None);
    let shard = Shard::start_on(site, 2, |_| {}).await;
    let operator = Operator::on(&shard).await;
    operator.hears_of("InstanceAdopted", id).await;
    let site = &shard.site;
    wait_until("one is made beside it", async || site.standing().len() == 2 && site.living().await == site.standing())
        .await;
    assert_eq!(n_creates(site), 1, "it fills a place of its group");
    let record = site.record(id).await.unwrap();
    assert!(record.adopted_at.is_some());
    assert_eq!(record.provider.id.as_deref(), Some("orphan"));
    assert!(site.calls(Op::Delete).is_empty(), "and the stranger is not touched");
}

#[tokio::test]
async fn failover_with_an_empty_cache_plans_nothing() {
    let shard = Shard::start(3).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 3).await;
    let (site, before) = (shard.site.clone(), shard.site.standing());
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("all are ready again", async || operator.group("web").await.ready_size == 3).await;
    assert_eq!(site.standing(), before);
    assert_eq!(n_creates(&site), 3);
    assert!(site.calls(Op::Delete).is_empty());
    assert!(operator.events("DrainStarted").is_empty());
    let group = operator.group("web").await;
    assert_eq!((group.updated_size, group.unhealthy_size), (3, 0));
    assert!(shard.leader.epoch > Epoch(1));
}

#[tokio::test]
async fn an_agent_lost_during_failover_is_noticed() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let dead = site.standing()[0];
    shard.server.stop(Duration::from_secs(5)).await;
    site.cloud.kill(dead);
    let shard = site.lead("srv-2").await;
    fleet.follow(&shard);
    fleet.is_whole(&site, 2).await;
    wait_until("its record ends", async || site.phase(dead).await == Some(Phase::Deleted)).await;
    site.assert_nothing_leaks().await;
    assert_eq!(n_creates(&site), 3);
}

#[tokio::test]
async fn an_unreadable_group_keeps_its_members() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let before = site.standing();
    overwrite(site.bucket.as_ref(), &groups_key(&shard_id()), b"{ \"version\": 1, broken".to_vec()).await;
    site.upload(&site.config(5)).await;
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("it says why", async || !operator.holds("web").await.is_empty()).await;
    fleet.is_whole(&site, 2).await;
    assert_eq!(operator.holds("web").await, ["SnapshotIncomplete"]);
    assert_eq!(site.standing(), before);
    assert_eq!((n_creates(&site), site.calls(Op::Delete).len()), (2, 0));
}

#[tokio::test]
async fn a_group_in_no_file_keeps_its_members() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let mut config = site.config(0);
    config["groups"]["default"] = serde_json::json!({ "db": { "template": "knc", "size": 0 } });
    site.upload(&config).await;
    // Nobody remembers that the group was in the config once.
    let key = groups_key(&shard_id());
    wait_until("the file is there", async || site.bucket.get(&key).await.is_ok()).await;
    site.bucket.delete(&key).await.unwrap();
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("it says why", async || operator.holds("web").await == ["GroupUnknown"]).await;
    fleet.is_whole(&site, 2).await;
    assert!(site.calls(Op::Delete).is_empty());
}

#[tokio::test]
async fn a_new_leader_knows_the_last_size() {
    let shard = Shard::start(1).await;
    shard.only_vm().await;
    let site = shard.site.clone();
    // As UpsertGroup will leave it: the file overrides the size that the config gave at boot.
    let groups = serde_json::json!({
        "version": 1, "epoch": shard.leader.epoch.0, "writer": "s1/srv-1", "write_id": "w1",
        "updated_at": "2026-01-01T00:00:00Z", "groups": { "default": { "web": { "size": 3 } } }
    });
    overwrite(site.bucket.as_ref(), &groups_key(&shard_id()), groups.to_string().into_bytes()).await;
    let shard = shard.restart("srv-2").await;
    shard.vms(3).await;
    assert_eq!(n_creates(&site), 3);
}

#[tokio::test]
async fn a_bad_store_neither_doubles_nor_leaks() {
    let inner = Arc::new(MemoryStore::new());
    let faulty = Arc::new(FaultyStore::new(inner, Arc::new(SeededEntropy::new(11)), FaultPlan::default()));
    let site = Site::on(faulty.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 0, |_| {}).await;
    let site = shard.site.clone();
    site.upload(&site.config(5)).await;
    let shard = shard.restart("srv-2").await;
    faulty.set_plan(FaultPlan {
        max_delay: Duration::from_millis(5),
        lost_before: 60,
        lost_after: 60,
        precondition_after: 60,
        throttled: 60,
        ..FaultPlan::default()
    });
    let fleet = Fleet::on(&shard);
    let web = GroupRef::new(tenant(), "web".parse().unwrap());
    let whole = async || site.standing().len() == 5 && fleet.connected().len() == 5;
    let met = tokio::time::timeout(LIMIT, async {
        while !whole().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    assert!(met.await.is_ok(), "{web}: {:?}, connected {:?}", site.standing(), fleet.connected());
    faulty.set_plan(FaultPlan::default());
    site.assert_nothing_leaks().await;
    assert_eq!(site.standing().len(), 5);
}

#[tokio::test]
async fn a_scale_up_beyond_all_places_and_tokens_comes_to_its_end() {
    let options = FakeOptions { latency: Duration::from_millis(20), ..FakeOptions::default() };
    let site = Site::with(options);
    let shard = Shard::start_on(site, 20, |config| {
        config["server"]["create_rate_limit"] = "100ms".into();
        config["server"]["create_burst"] = 10.into();
        config["server"]["max_parallel_creates"] = 5.into();
        config["server"]["safety"]["runaway_base"] = 100.into();
    })
    .await;
    // All of them wait while no place is free; when one is, the bucket is empty.
    shard.vms(20).await;
    assert_eq!(n_creates(&shard.site), 20);
}
