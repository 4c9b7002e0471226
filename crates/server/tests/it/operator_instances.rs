//! Instances, changed over the API one by one: every word is durable before it is answered, and none is taken twice.

use crate::common::{Shard, assert_refused, fleet::Fleet, operator::Operator, wait_for, wait_until};
use nstance_core::{
    ids::{InstanceId, Tenant},
    instance::{Instance, Phase},
};
use nstance_proto::v1;
use nstance_providers::fake::{Op, Outcome, Rule, When};
use nstance_store::records::{self, groups::GroupsFile, groups_key};
use serde_json::json;
use tonic::{Code, Status};

/// A whole group whose members take a minute to drain.
async fn slow(n: u32) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    whole(n, "60s").await
}

async fn whole(n: u32, drain_timeout: &str) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start_with(n, |config| {
        config["server"]["default_drain_timeout"] = json!(drain_timeout);
        config["tenants"] = json!({ "other": {} });
    })
    .await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    let n = usize::try_from(n).unwrap();
    fleet.is_whole(&shard.site, n).await;
    wait_until("all are ready", async || usize::try_from(operator.group("web").await.ready_size).unwrap() == n).await;
    let ids = shard.site.standing();
    (shard, fleet, operator, ids)
}

fn deletion(id: InstanceId) -> v1::DeleteInstanceRequest {
    v1::DeleteInstanceRequest { instance_id: id.to_string(), ..v1::DeleteInstanceRequest::default() }
}

fn within(id: InstanceId, seconds: i64) -> v1::DeleteInstanceRequest {
    let drain_timeout = Some(prost_types::Duration { seconds, nanos: 0 });
    v1::DeleteInstanceRequest { drain_timeout, ..deletion(id) }
}

async fn delete(operator: &Operator, request: v1::DeleteInstanceRequest) -> Result<String, Status> {
    operator.client().delete_instance(request).await.map(|answer| answer.into_inner().status)
}

async fn acknowledge(operator: &Operator, id: InstanceId, drain_id: &str) -> Result<(), Status> {
    let request = v1::DrainAckRequest { instance_id: id.to_string(), drain_id: drain_id.to_owned() };
    operator.client().acknowledge_drained(request).await.map(tonic::Response::into_inner)
}

async fn replace(operator: &Operator, id: InstanceId) -> Result<v1::ReplaceInstanceResponse, Status> {
    let request = v1::ReplaceInstanceRequest { instance_id: id.to_string(), reason: "disk is slow".to_owned() };
    operator.client().replace_instance(request).await.map(tonic::Response::into_inner)
}

async fn resize(operator: &Operator, size: i32) {
    let config = Some(v1::GroupConfig { size: Some(size), ..v1::GroupConfig::default() });
    let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
}

async fn drain_id(operator: &Operator, id: InstanceId) -> String {
    let it = operator.instances().await.into_iter().find(|it| it.instance_id == id.to_string()).unwrap();
    it.drain.map(|drain| drain.drain_id).unwrap_or_default()
}

async fn record(shard: &Shard, id: InstanceId) -> Instance {
    shard.site.record(id).await.unwrap()
}

async fn is_gone(shard: &Shard, id: InstanceId) {
    wait_until("the record ends", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    let metrics = shard.server.metrics.text();
    assert!(metrics.contains("nstance_plan_violations_total 0"), "the checker objected to a plan");
}

#[tokio::test]
async fn a_deleted_instance_drains_until_it_is_acknowledged() {
    let (shard, fleet, operator, ids) = slow(2).await;
    let id = ids[0];
    assert_eq!(delete(&operator, deletion(id)).await.unwrap(), "draining");
    assert_eq!(record(&shard, id).await.phase(), Phase::Draining, "durable before the answer");
    assert_eq!(operator.hears_of("DrainStarted", id).await.actor, operator.id.to_string());
    // Its group refills meanwhile.
    fleet.is_whole(&shard.site, 3).await;
    let first = record(&shard, id).await.drain;
    assert_eq!(delete(&operator, deletion(id)).await.unwrap(), "draining");
    assert_eq!(record(&shard, id).await.drain, first, "a repeat changes nothing");
    let drain = drain_id(&operator, id).await;
    assert_refused(acknowledge(&operator, id, "1").await, Code::FailedPrecondition, "STALE_DRAIN");
    acknowledge(&operator, id, &drain).await.unwrap();
    acknowledge(&operator, id, &drain).await.unwrap();
    assert_eq!(operator.hears_of("DrainAcked", id).await.actor, operator.id.to_string());
    is_gone(&shard, id).await;
    let told = record(&shard, id).await.drain.unwrap();
    assert_eq!((told.acked_by, told.reason.as_str()), (Some(operator.id.to_string()), "requested"));
    acknowledge(&operator, id, &drain).await.unwrap();
    assert_eq!(operator.events("DrainAcked").len(), 1);
    assert_eq!(delete(&operator, deletion(id)).await.unwrap(), "deleted");
    fleet.is_whole(&shard.site, 2).await;
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn what_does_not_drain_cannot_be_acknowledged() {
    let (shard, _fleet, operator, ids) = slow(2).await;
    assert_refused(acknowledge(&operator, ids[0], "").await, Code::FailedPrecondition, "NOT_DRAINING");
    resize(&operator, 1).await;
    wait_until("somebody drains", async || operator.group("web").await.draining_size == 1).await;
    let is_draining = async |id| shard.site.phase(id).await == Some(Phase::Draining);
    let victim = if is_draining(ids[0]).await { ids[0] } else { ids[1] };
    resize(&operator, 2).await;
    operator.hears_of("DrainCancelled", victim).await;
    assert_refused(acknowledge(&operator, victim, "").await, Code::FailedPrecondition, "DRAIN_CANCELLED");
    let mut unknown = deletion(victim);
    unknown.instance_id = "nobody".to_owned();
    assert_refused(delete(&operator, unknown).await, Code::NotFound, "NOT_FOUND");
}

#[tokio::test]
async fn nobody_touches_an_instance_of_another_tenant() {
    let (shard, _fleet, _operator, ids) = slow(1).await;
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    assert_refused(delete(&other, deletion(ids[0])).await, Code::NotFound, "NOT_FOUND");
    assert_refused(acknowledge(&other, ids[0], "").await, Code::NotFound, "NOT_FOUND");
    assert_refused(replace(&other, ids[0]).await, Code::NotFound, "NOT_FOUND");
    assert_eq!(record(&shard, ids[0]).await.phase(), Phase::Running);
}

#[tokio::test]
async fn a_drain_can_be_shortened_and_never_lengthened() {
    let (shard, _fleet, operator, ids) = slow(1).await;
    let id = ids[0];
    assert_refused(delete(&operator, within(id, -1)).await, Code::InvalidArgument, "BAD_REQUEST");
    delete(&operator, within(id, 3600)).await.unwrap();
    let began = record(&shard, id).await.drain.unwrap();
    assert_eq!(began.deadline.since(began.started_at).as_secs(), 60, "not longer than the group's");
    delete(&operator, within(id, 30)).await.unwrap();
    let shorter = record(&shard, id).await.drain.unwrap();
    assert!(shorter.deadline < began.deadline);
    assert_eq!(shorter.started_at, began.started_at);
    delete(&operator, within(id, 50)).await.unwrap();
    assert_eq!(record(&shard, id).await.drain.unwrap().deadline, shorter.deadline);
    assert_eq!(delete(&operator, within(id, 0)).await.unwrap(), "deleting");
    assert_eq!(operator.hears_of("InstanceDeleting", id).await.actor, operator.id.to_string());
    is_gone(&shard, id).await;
}

#[tokio::test]
async fn what_never_was_in_use_is_deleted_at_once() {
    let shard = Shard::start_with(1, |config| config["server"]["default_drain_timeout"] = json!("60s")).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    assert_eq!(delete(&operator, deletion(id)).await.unwrap(), "deleting");
    is_gone(&shard, id).await;
    wait_for("its group refills", || shard.site.standing().len() == 1).await;
}

#[tokio::test]
async fn shrinking_takes_one_off_and_only_once() {
    let (shard, fleet, operator, ids) = slow(3).await;
    let id = ids[2];
    let shrink = v1::DeleteInstanceRequest { shrink_group: true, ..deletion(id) };
    assert_eq!(delete(&operator, shrink.clone()).await.unwrap(), "draining");
    assert_eq!(operator.group("web").await.size, 2);
    let key = groups_key(&crate::common::shard_id());
    let object = shard.site.bucket.get(&key).await.unwrap();
    let file = records::decode_object::<GroupsFile>(&key, object).unwrap().value;
    let entry = file.groups.values().next().unwrap();
    assert_eq!((entry.size, entry.preferred_victims.as_slice()), (Some(2), [id].as_slice()), "one write");
    delete(&operator, shrink.clone()).await.unwrap();
    assert_eq!(operator.group("web").await.size, 2, "no second decrement");
    // More members do not take the word back.
    resize(&operator, 3).await;
    fleet.is_whole(&shard.site, 4).await;
    assert_eq!(record(&shard, id).await.phase(), Phase::Draining);
    acknowledge(&operator, id, "").await.unwrap();
    is_gone(&shard, id).await;
    assert_eq!(delete(&operator, shrink).await.unwrap(), "deleted");
    assert_eq!(operator.group("web").await.size, 3);
}

#[tokio::test]
async fn a_replaced_instance_goes_after_its_successor_is_ready() {
    let (shard, fleet, operator, ids) = whole(2, "0s").await;
    let id = ids[0];
    let answer = replace(&operator, id).await.unwrap();
    assert!(["requested", "replacing"].contains(&answer.status.as_str()), "{answer:?}");
    assert_eq!(operator.hears_of("ReplaceRequested", id).await.actor, operator.id.to_string());
    let mark = record(&shard, id).await.replace.unwrap();
    assert_eq!((mark.by, mark.reason.as_str()), (operator.id.to_string(), "disk is slow"));
    is_gone(&shard, id).await;
    fleet.is_whole(&shard.site, 2).await;
    assert!(shard.site.standing().contains(&ids[1]));
    let reasons: Vec<_> = shard.site.records().await.into_iter().map(|it| it.reason.as_str()).collect();
    assert_eq!(reasons.iter().filter(|it| **it == "rotation").count(), 1, "{reasons:?}");
    assert_refused(replace(&operator, id).await, Code::FailedPrecondition, "NOT_A_MEMBER");
}

#[tokio::test]
async fn a_second_wish_names_the_successor() {
    let (shard, _fleet, operator, ids) = slow(1).await;
    replace(&operator, ids[0]).await.unwrap();
    wait_for("its successor", || shard.site.standing().len() == 2).await;
    let successor = shard.site.standing().into_iter().find(|id| *id != ids[0]).unwrap();
    let answer = replace(&operator, ids[0]).await.unwrap();
    assert_eq!(answer.replacement_id, successor.to_string());
    wait_until("it drains", async || replace(&operator, ids[0]).await.unwrap().status == "draining").await;
    assert_eq!(operator.events("ReplaceRequested").len(), 1);
}

async fn status(
    operator: &Operator,
    id: InstanceId,
    max_age: Option<i64>,
) -> Result<v1::InstanceStatusResponse, Status> {
    let max_age = max_age.map(|seconds| prost_types::Duration { seconds, nanos: 0 });
    let request = v1::GetInstanceStatusRequest { instance_id: id.to_string(), max_age };
    operator.client().get_instance_status(request).await.map(tonic::Response::into_inner)
}

fn n_looks(shard: &Shard) -> usize {
    shard.site.calls(Op::Describe).len()
}

#[tokio::test]
async fn a_status_is_as_fresh_as_it_was_asked_for() {
    let (shard, _fleet, operator, ids) = slow(1).await;
    let id = ids[0];
    let fresh = async || status(&operator, id, Some(0)).await.unwrap();
    wait_until("it runs", async || fresh().await.provider_state == "running").await;
    let n = n_looks(&shard);
    assert_eq!(status(&operator, id, None).await.unwrap().provider_state, "running");
    assert_eq!(status(&operator, id, Some(3600)).await.unwrap().provider_state, "running");
    assert_eq!(n_looks(&shard), n, "what is known is young enough");
    shard.site.cloud.show(id, nstance_core::instance::Seen::Repairing);
    assert_eq!(status(&operator, id, Some(3600)).await.unwrap().provider_state, "running");
    assert_eq!(fresh().await.provider_state, "repairing");
    assert_eq!(n_looks(&shard), n + 1);
    assert_refused(status(&operator, id, Some(-1)).await, Code::InvalidArgument, "BAD_REQUEST");
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    assert_refused(status(&other, id, Some(0)).await, Code::NotFound, "NOT_FOUND");
    assert_eq!(n_looks(&shard), n + 1, "nobody looks for a stranger");
}

#[tokio::test]
async fn a_provider_that_is_down_leaves_the_last_look_and_its_time() {
    let (shard, _fleet, operator, ids) = slow(1).await;
    let id = ids[0];
    let fresh = async || status(&operator, id, Some(0)).await.unwrap();
    wait_until("it runs", async || fresh().await.provider_state == "running").await;
    let before = status(&operator, id, None).await.unwrap();
    shard.site.cloud.outage(true);
    let n = n_looks(&shard);
    let after = fresh().await;
    assert!(n < n_looks(&shard), "it was looked at");
    assert_eq!((after.provider_state, after.provider_state_at), (before.provider_state, before.provider_state_at));
    assert_eq!(operator.group("web").await.actual_size, 1);
}

#[tokio::test]
async fn a_provider_that_does_not_answer_is_not_waited_for_long() {
    let (shard, _fleet, operator, ids) = slow(1).await;
    let before = status(&operator, ids[0], None).await.unwrap();
    shard.site.cloud.script(Rule::always(Op::Describe, When::Always, Outcome::Hang));
    let asked = tokio::time::timeout(crate::common::LIMIT, status(&operator, ids[0], Some(0)));
    let after = asked.await.expect("an answer within 5 s").unwrap();
    assert_eq!(after.provider_state_at, before.provider_state_at);
}
