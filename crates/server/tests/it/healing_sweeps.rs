//! What a sweep finds beside what we know: a second VM of an instance, strangers in a load balancer, VMs with half of our
//! tags.

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, shard_id, tenant, wait_for, wait_until};
use nstance_core::{
    ids::{Epoch, InstanceId, LbKey, uuid_v7},
    ports::{
        clock::random,
        provider::{ErrorClass, Tags},
    },
};
use nstance_providers::fake::{Op, Outcome, Rule, ShownTags, When};
use serde_json::{Value, json};

/// Sweeps come every other second.
fn swept(config: &mut Value) {
    config["server"]["garbage_collection"]["interval"] = "2s".into();
}

fn tags(id: InstanceId) -> Tags {
    Tags {
        cluster: "demo".parse().unwrap(),
        shard: shard_id(),
        instance: id,
        tenant: tenant(),
        group: "web".parse().unwrap(),
        on_demand: false,
        epoch: Epoch(1),
        template: "knc".to_owned(),
        infra_hash: String::new(),
    }
}

fn new_id(site: &Site) -> InstanceId {
    InstanceId::new("knc".parse().unwrap(), uuid_v7(site.now(), random(site.entropy.as_ref())))
}

/// Waits for a listing that began after this call.
async fn sweep(site: &Site) {
    let n = site.calls(Op::List).len();
    let answered = || site.calls(Op::List).iter().skip(n).filter(|call| call.answer.is_some()).count();
    wait_for("two sweeps", || 2 <= answered()).await;
}

#[tokio::test]
async fn of_two_vms_with_one_instance_id_the_one_in_the_record_stays() {
    let shard = Shard::start_with(1, swept).await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    let site = &shard.site;
    fleet.is_whole(site, 1).await;
    let named = site.record(id).await.unwrap().provider.id.unwrap();
    site.cloud.script(Rule::once(Op::Delete, When::Instance(id), Outcome::Refuse(ErrorClass::Throttled)));
    site.cloud.add_foreign("double", Some(id), Some(tags(id)));
    assert_eq!(site.standing(), [id, id]);
    let told = operator.hears_of("OrphanTerminated", id).await;
    assert_eq!(told.detail["vm"], "double");
    assert!(told.message.contains(&named), "{}", told.message);
    wait_for("one is left", || site.standing() == [id]).await;
    let left: Vec<_> = site.cloud.vms().into_iter().map(|vm| vm.provider_id).collect();
    assert!(left.contains(&named));
    let deletes = site.calls(Op::Delete);
    assert_eq!(deletes.len(), 2, "the first was refused");
    assert!(deletes.iter().all(|call| call.epoch == Some(shard.leader.epoch)));
    wait_until("it is as it was", async || operator.group("web").await.ready_size == 1).await;
    assert_eq!(site.record(id).await.unwrap().provider.id.as_deref(), Some(named.as_str()));
    assert_eq!(site.calls(Op::Create).len(), 1);
}

#[tokio::test]
async fn a_vm_with_half_of_our_tags_is_told_once_and_left_alone() {
    let site = Site::new();
    let id = new_id(&site);
    site.cloud.add_foreign("half", Some(id), Some(tags(id)));
    site.cloud.show_tags(id, ShownTags::Foreign);
    let shard = Shard::start_on(site, 1, swept).await;
    let operator = Operator::on(&shard).await;
    let told = operator.hears("ForeignVm").await;
    assert_eq!(told.detail["vm"], "half");
    assert!(told.group.is_empty());
    wait_for("the group is made beside it", || shard.site.standing().len() == 2).await;
    sweep(&shard.site).await;
    assert_eq!(operator.events("ForeignVm").len(), 1, "not with every sweep");
    assert!(shard.site.calls(Op::Delete).is_empty());
    assert_eq!(shard.site.record(id).await, None, "nor adopted");
    assert_eq!(operator.group("web").await.actual_size, 1, "it counts nowhere");
}

#[tokio::test]
async fn absent_tags_prove_nothing() {
    let site = Site::new();
    let id = new_id(&site);
    site.cloud.add_foreign("untold", Some(id), Some(tags(id)));
    site.cloud.show_tags(id, ShownTags::Absent);
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let operator = Operator::on(&shard).await;
    // Long before the next regular listing: an answer without tags is asked for again soon.
    wait_for("it is listed again", || 2 <= shard.site.calls(Op::List).len()).await;
    assert!(operator.events("ForeignVm").is_empty(), "so far that is no news");
    assert_eq!(shard.site.record(id).await, None);
    shard.site.cloud.show_tags(id, ShownTags::AsTheyAre);
    wait_until("it is adopted", async || shard.site.record(id).await.is_some()).await;
    assert!(shard.site.calls(Op::Delete).iter().all(|call| call.instance != Some(id)));
}

#[tokio::test]
async fn tags_that_stay_away_are_told_once() {
    let site = Site::new();
    let id = new_id(&site);
    site.cloud.add_foreign("untold", Some(id), Some(tags(id)));
    site.cloud.show_tags(id, ShownTags::Absent);
    let shard = Shard::start_on(site, 1, swept).await;
    let operator = Operator::on(&shard).await;
    assert_eq!(operator.hears("ForeignVm").await.detail["vm"], "untold");
    wait_for("the group is made beside it", || shard.site.standing().len() == 2).await;
    sweep(&shard.site).await;
    assert_eq!(operator.events("ForeignVm").len(), 1);
    assert_eq!(shard.site.record(id).await, None);
    assert!(shard.site.calls(Op::Delete).is_empty());
}

#[tokio::test]
async fn a_member_of_a_load_balancer_without_a_record_is_taken_out() {
    let site = Site::new();
    let www: LbKey = "www".parse().unwrap();
    let (stranger, foreign) = (new_id(&site), new_id(&site));
    site.cloud.put_in_balancer(&www, stranger);
    site.cloud.add_foreign("half", Some(foreign), Some(tags(foreign)));
    site.cloud.spoil_tags(foreign);
    site.cloud.put_in_balancer(&www, foreign);
    site.cloud.script(Rule::once(Op::LbDeregister, When::Instance(stranger), Outcome::Refuse(ErrorClass::Throttled)));
    let shard = Shard::start_on(site, 1, |config| {
        swept(config);
        config["load_balancers"] = json!({ "www": {} });
        config["groups"]["default"]["web"]["load_balancers"] = json!(["www"]);
    })
    .await;
    let fleet = Fleet::on(&shard);
    wait_for("the group's own stands", || shard.site.standing().len() == 2).await;
    let own = shard.site.standing().into_iter().find(|id| *id != foreign).unwrap();
    wait_until("the stranger is out, the others stay", async || {
        let mut members: Vec<_> = shard.site.cloud.members(&www).into_keys().collect();
        members.sort();
        let mut expected = vec![own, foreign];
        expected.sort();
        members == expected
    })
    .await;
    sweep(&shard.site).await;
    let out = shard.site.calls(Op::LbDeregister);
    assert!(out.iter().all(|call| call.instance == Some(stranger)), "nobody else");
    assert_eq!(out.len(), 2, "the first was refused");
    drop(fleet);
}
