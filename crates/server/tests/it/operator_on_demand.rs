//! On-demand instances: one for each request, whoever repeats it and whatever happens in between, and nobody's member.

use std::sync::Arc;

use crate::common::{
    Shard, Site, assert_refused, fleet::Fleet, meddler::Meddler, operator::Operator, overwrite, shard_id, tenant,
    wait_for, wait_until,
};
use nstance_core::{
    ids::{InstanceId, Tenant, uuid_v7},
    instance::{Ownership, Phase},
    ports::{clock::random, provider::ErrorClass},
};
use nstance_proto::v1;
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use nstance_server::grpc::status::problems_of;
use nstance_store::{memory::MemoryStore, records::instance_key};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::{Code, Status};

/// Two kinds of machines, pools open to the API, and userdata that shows what a request came to.
fn open(config: &mut Value) {
    config["server"]["dynamic_subnet_pools"] = json!(["main"]);
    config["server"]["subnet_pools"]["closed"] = json!(["subnet-9"]);
    config["tenants"] = json!({ "other": {} });
    config["defaults"] = json!({ "vars": { "Color": "grey" }, "userdata": { "content": "color={{ .Vars.Color }}" } });
    config["templates"]["gpu"] = json!({ "kind": "gpu", "arch": "amd64", "subnet_pool": "main" });
}

async fn start(size: u32) -> (Shard, Operator) {
    start_with(size, |_| {}).await
}

async fn start_with(size: u32, change: impl FnOnce(&mut Value)) -> (Shard, Operator) {
    start_on(Site::new(), size, change).await
}

async fn start_on(site: Site, size: u32, change: impl FnOnce(&mut Value)) -> (Shard, Operator) {
    let shard = Shard::start_on(site, size, |config| {
        open(config);
        change(config);
    })
    .await;
    let operator = Operator::on(&shard).await;
    (shard, operator)
}

fn plain() -> v1::CreateInstanceRequest {
    let config = v1::InstanceConfig { group: "web".to_owned(), ..v1::InstanceConfig::default() };
    v1::CreateInstanceRequest { config: Some(config), ..v1::CreateInstanceRequest::default() }
}

fn requested(request_id: &str) -> v1::CreateInstanceRequest {
    v1::CreateInstanceRequest { request_id: request_id.to_owned(), ..plain() }
}

fn named(id: InstanceId) -> v1::CreateInstanceRequest {
    v1::CreateInstanceRequest { instance_id: id.to_string(), ..plain() }
}

fn with(
    mut request: v1::CreateInstanceRequest,
    set: impl FnOnce(&mut v1::InstanceConfig),
) -> v1::CreateInstanceRequest {
    set(request.config.as_mut().unwrap());
    request
}

fn new_id(site: &Site, kind: &str) -> InstanceId {
    InstanceId::new(kind.parse().unwrap(), uuid_v7(site.now(), random(site.entropy.as_ref())))
}

async fn create(operator: &Operator, request: v1::CreateInstanceRequest) -> Result<(InstanceId, String), Status> {
    let answer = operator.client().create_instance(request).await?.into_inner();
    Ok((answer.instance_id.parse().unwrap(), answer.status))
}

async fn status(operator: &Operator, id: InstanceId) -> v1::InstanceStatusResponse {
    let request = v1::GetInstanceStatusRequest { instance_id: id.to_string(), max_age: None };
    operator.client().get_instance_status(request).await.unwrap().into_inner()
}

async fn delete(operator: &Operator, id: InstanceId) -> String {
    let request = v1::DeleteInstanceRequest { instance_id: id.to_string(), ..v1::DeleteInstanceRequest::default() };
    operator.client().delete_instance(request).await.unwrap().into_inner().status
}

async fn is(shard: &Shard, id: InstanceId, phase: Phase) {
    wait_until(&format!("{id} is {}", phase.as_str()), async || shard.site.phase(id).await == Some(phase)).await;
}

fn n_creates(site: &Site) -> usize {
    site.calls(Op::Create).len()
}

fn assert_sound(shard: &Shard) {
    let metrics = shard.server.metrics.text();
    assert!(metrics.contains("nstance_plan_violations_total 0"), "the checker objected to a plan");
}

#[tokio::test]
async fn an_on_demand_instance_comes_up_and_is_nobodys_member() {
    let (shard, operator) = start(0).await;
    let fleet = Fleet::on(&shard);
    let (id, answered) = create(&operator, requested("r1")).await.unwrap();
    assert_eq!(answered, "pending");
    let record = shard.site.record(id).await.expect("durable before the answer");
    assert_eq!((record.ownership, record.reason.as_str()), (Ownership::OnDemand, "on-demand"));
    let request = record.request.unwrap();
    assert_eq!((request.request_id.as_deref(), request.by), (Some("r1"), operator.id.to_string()));
    is(&shard, id, Phase::Running).await;
    fleet.is_whole(&shard.site, 1).await;
    let spec = shard.site.spec(id);
    assert!(spec.tags.on_demand);
    assert_eq!(spec.userdata.unwrap().0, "color=grey");
    let told = operator.hears_of("InstanceCreateRequested", id).await;
    assert_eq!(told.actor, operator.id.to_string());
    let group = operator.group("web").await;
    assert_eq!((group.size, group.actual_size, group.provider_ids.len()), (0, 0, 0));
    assert!(status(&operator, id).await.on_demand);
    assert_sound(&shard);
}

#[tokio::test]
async fn a_request_sets_its_own_template_type_pool_and_vars() {
    let (shard, operator) = start(0).await;
    let own = with(requested("r1"), |config| {
        config.template = "gpu".to_owned();
        config.instance_type = "big".to_owned();
        config.subnet_pool = "main".to_owned();
        config.vars = [("Color".to_owned(), "red".to_owned())].into();
    });
    let (id, _) = create(&operator, own).await.unwrap();
    assert_eq!(id.kind().as_str(), "gpu");
    is(&shard, id, Phase::Provisioning).await;
    let spec = shard.site.spec(id);
    assert_eq!(spec.instance_type.as_deref(), Some("big"));
    assert_eq!(spec.userdata.unwrap().0, "color=red");
}

#[tokio::test]
async fn the_same_request_id_gives_the_first_instance_whatever_happens_in_between() {
    let (shard, operator) = start(0).await;
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    is(&shard, id, Phase::Provisioning).await;
    assert_eq!(create(&operator, requested("r1")).await.unwrap(), (id, "provisioning".to_owned()));
    // Another tenant's request of that name is another request.
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    assert_refused(create(&other, requested("r1")).await, Code::NotFound, "NOT_FOUND");
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    assert_eq!(create(&operator, requested("r1")).await.unwrap(), (id, "provisioning".to_owned()));
    assert_eq!(delete(&operator, id).await, "deleting");
    is(&shard, id, Phase::Deleted).await;
    assert_eq!(create(&operator, requested("r1")).await.unwrap(), (id, "deleted".to_owned()));
    assert_eq!(shard.site.records().await.len(), 1);
    assert_eq!(n_creates(&shard.site), 1);
}

/// (T79) Neither a lost answer nor a new leader makes a second one, and nobody is asked for a VM before its record is
/// there.
#[tokio::test]
async fn concurrent_calls_with_one_request_id_wait_for_one_record() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let (shard, operator) = start_on(Site::on(bucket.clone(), FakeOptions::default()), 0, |_| {}).await;
    bucket.hold(Some("/instance/"));
    let mut calls = JoinSet::new();
    for _ in 0..8 {
        let mut client = operator.client();
        calls.spawn(async move { client.create_instance(requested("r1")).await.map(tonic::Response::into_inner) });
    }
    wait_for("the record is being written", || bucket.n_puts("/instance/") == 1).await;
    assert_eq!(operator.instances().await.len(), 1);
    assert_eq!(n_creates(&shard.site), 0, "not before its record is durable");
    assert!(calls.try_join_next().is_none(), "nor answered");
    bucket.hold(None);
    let mut ids: Vec<_> = calls.join_all().await.into_iter().map(|answer| answer.unwrap().instance_id).collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    shard.only_vm().await;
    assert_eq!((shard.site.records().await.len(), n_creates(&shard.site)), (1, 1));
}

#[tokio::test]
async fn a_caller_that_hangs_up_finds_its_instance_again() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let (shard, operator) = start_on(Site::on(bucket.clone(), FakeOptions::default()), 0, |_| {}).await;
    bucket.hold(Some("/instance/"));
    let mut client = operator.client();
    let mut call = JoinSet::new();
    call.spawn(async move { client.create_instance(requested("r1")).await });
    wait_for("the record is being written", || bucket.n_puts("/instance/") == 1).await;
    call.shutdown().await;
    bucket.hold(None);
    let id = shard.only_vm().await;
    assert_eq!(create(&operator, requested("r1")).await.unwrap().0, id);
    assert_eq!(n_creates(&shard.site), 1);
}

#[tokio::test]
async fn an_instance_id_makes_one_instance_and_is_never_used_again() {
    let (shard, operator) = start(0).await;
    let id = new_id(&shard.site, "knc");
    assert_eq!(create(&operator, named(id)).await.unwrap(), (id, "pending".to_owned()));
    is(&shard, id, Phase::Provisioning).await;
    assert_eq!(create(&operator, named(id)).await.unwrap(), (id, "provisioning".to_owned()));
    let other = with(named(id), |config| config.vars = [("A".to_owned(), "1".to_owned())].into());
    assert_refused(create(&operator, other).await, Code::AlreadyExists, "ALREADY_EXISTS");
    let other = with(named(id), |config| config.instance_type = "big".to_owned());
    assert_refused(create(&operator, other).await, Code::AlreadyExists, "ALREADY_EXISTS");
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    assert_eq!(create(&operator, named(id)).await.unwrap(), (id, "provisioning".to_owned()));
    delete(&operator, id).await;
    is(&shard, id, Phase::Deleted).await;
    assert_refused(create(&operator, named(id)).await, Code::FailedPrecondition, "ID_USED");
    assert_eq!(n_creates(&shard.site), 1);
}

#[tokio::test]
async fn a_purged_id_stays_used() {
    let (shard, operator) = start_with(0, |config| {
        config["server"]["garbage_collection"]["deleted_record_retention"] = json!("0s");
    })
    .await;
    let id = new_id(&shard.site, "knc");
    create(&operator, named(id)).await.unwrap();
    is(&shard, id, Phase::Provisioning).await;
    delete(&operator, id).await;
    wait_until("the record is removed", async || shard.site.records().await.is_empty()).await;
    wait_until("nobody knows it", async || operator.instances().await.is_empty()).await;
    assert_refused(create(&operator, named(id)).await, Code::FailedPrecondition, "ID_USED");
}

#[tokio::test]
async fn an_id_of_somebody_else_is_taken() {
    let (shard, operator) = start(1).await;
    let member = shard.only_vm().await;
    assert_refused(create(&operator, named(member)).await, Code::AlreadyExists, "ALREADY_EXISTS");
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    let both = v1::CreateInstanceRequest { request_id: "r1".to_owned(), ..named(new_id(&shard.site, "knc")) };
    assert_refused(create(&operator, both).await, Code::AlreadyExists, "ALREADY_EXISTS");
    let both = v1::CreateInstanceRequest { request_id: "r1".to_owned(), ..named(id) };
    assert_eq!(create(&operator, both).await.unwrap().0, id);
    // A record that this leader did not know of has the last word.
    let unknown = new_id(&shard.site, "knc");
    let key = |id: &InstanceId| instance_key(&shard_id(), &tenant(), id);
    let text = shard.site.bucket.get(&key(&member)).await.unwrap().body;
    let text = String::from_utf8(text).unwrap().replace(&member.to_string(), &unknown.to_string());
    overwrite(shard.site.bucket.as_ref(), &key(&unknown), text.into_bytes()).await;
    assert_refused(create(&operator, named(unknown)).await, Code::AlreadyExists, "ALREADY_EXISTS");
}

#[tokio::test]
async fn without_any_id_every_call_makes_one() {
    let (shard, operator) = start(0).await;
    let (first, _) = create(&operator, plain()).await.unwrap();
    let (second, _) = create(&operator, plain()).await.unwrap();
    assert_ne!(first, second);
    shard.vms(2).await;
}

#[tokio::test]
async fn every_problem_is_told_at_once_and_nothing_is_made() {
    let (shard, operator) = start(0).await;
    let bad = v1::CreateInstanceRequest { instance_id: "nobody".to_owned(), ..requested(&"r".repeat(65)) };
    let bad = with(bad, |config| {
        config.subnet_pool = "closed".to_owned();
        config.vars = [("no name".to_owned(), "1".to_owned())].into();
    });
    let refused = create(&operator, bad).await.unwrap_err();
    let mut paths: Vec<_> = problems_of(&refused).into_iter().map(|it| it.path).collect();
    paths.sort();
    assert_eq!(paths, ["instance_id", "request_id", "subnet_pool", "vars"]);
    assert_refused(Err::<(), _>(refused), Code::InvalidArgument, "BAD_REQUEST");
    let problem = async |request: v1::CreateInstanceRequest, path: &str| {
        let refused = create(&operator, request).await.unwrap_err();
        let paths: Vec<_> = problems_of(&refused).into_iter().map(|it| it.path).collect();
        assert_eq!(paths, [path], "{}", refused.message());
        assert_refused(Err::<(), _>(refused), Code::InvalidArgument, "BAD_REQUEST");
    };
    problem(v1::CreateInstanceRequest::default(), "group").await;
    problem(requested("tab\there"), "request_id").await;
    problem(named(new_id(&shard.site, "gpu")), "instance_id").await;
    problem(with(plain(), |config| config.template = "knx".to_owned()), "template").await;
    let many = (0..257).map(|n| (format!("V{n}"), String::new()));
    problem(with(plain(), |config| config.vars = many.collect()), "vars").await;
    let long = [("A".to_owned(), "x".repeat(33 * 1024))];
    problem(with(plain(), |config| config.vars = long.into()), "vars").await;
    assert!(shard.site.records().await.is_empty());
}

#[tokio::test]
async fn a_group_must_be_there_and_stay() {
    let (_shard, operator) = start(0).await;
    let of = |group: &str| with(plain(), |config| config.group = group.to_owned());
    assert_refused(create(&operator, of("nobody")).await, Code::NotFound, "NOT_FOUND");
    batch(&operator, "blue").await;
    let (id, _) = create(&operator, of("batch")).await.unwrap();
    let request = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(request).await.unwrap();
    assert_refused(create(&operator, of("batch")).await, Code::FailedPrecondition, "GROUP_DELETING");
    // What was asked for before is still found.
    assert_eq!(create(&operator, with(named(id), |config| config.group = "batch".to_owned())).await.unwrap().0, id);
}

/// A dynamic group of nobody, whose vars are its own.
async fn batch(operator: &Operator, color: &str) {
    let config = v1::GroupConfig {
        template: "knc".to_owned(),
        size: Some(0),
        vars: [("Color".to_owned(), color.to_owned())].into(),
        ..v1::GroupConfig::default()
    };
    let request =
        v1::UpsertGroupRequest { key: "batch".to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
}

#[tokio::test]
async fn a_tenant_has_a_thousand_of_them_and_no_more() {
    let site = Site::new();
    site.cloud.script(Rule::always(Op::Create, When::Always, Outcome::Hang));
    let (shard, operator) = start_on(site, 0, |_| {}).await;
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    let site = shard.site.clone();
    shard.server.stop(std::time::Duration::from_millis(100)).await;
    let key = |id: &InstanceId| instance_key(&shard_id(), &tenant(), id);
    let text = String::from_utf8(site.bucket.get(&key(&id)).await.unwrap().body).unwrap();
    for n in 2..=1000 {
        let copy = new_id(&site, "knc");
        let text = text.replace(&id.to_string(), &copy.to_string()).replace("\"r1\"", &format!("\"r{n}\""));
        overwrite(site.bucket.as_ref(), &key(&copy), text.into_bytes()).await;
    }
    let shard = site.lead("srv-2").await;
    let operator = Operator::on(&shard).await;
    assert_refused(create(&operator, requested("r1001")).await, Code::ResourceExhausted, "TOO_MANY_ON_DEMAND");
    assert_eq!(create(&operator, requested("r1")).await.unwrap().0, id, "a repeat needs no room");
    assert!(create(&operator, requested("r1000")).await.is_ok());
}

#[tokio::test]
async fn a_refused_create_is_failed_with_its_reason_and_blocks_nobody() {
    for class in [ErrorClass::Capacity, ErrorClass::Quota, ErrorClass::Invalid, ErrorClass::Auth] {
        let site = Site::new();
        site.cloud.script(Rule::once(Op::Create, When::Call(1), Outcome::Refuse(class)));
        let (shard, operator) = start_on(site, 0, |_| {}).await;
        let id = new_id(&shard.site, "knc");
        create(&operator, named(id)).await.unwrap();
        is(&shard, id, Phase::Failed).await;
        let failed = status(&operator, id).await;
        assert_eq!((failed.status.as_str(), failed.failure_reason.as_str()), ("failed", class.as_str()));
        assert!(!failed.failure_message.is_empty());
        assert_eq!(operator.hears_of("InstanceCreateFailed", id).await.detail["class"], class.as_str());
        assert_eq!(create(&operator, named(id)).await.unwrap(), (id, "failed".to_owned()));
        assert_eq!(n_creates(&shard.site), 1, "the id is its owner's: nothing else is tried under it");
        assert!(operator.holds("web").await.iter().all(|hold| hold == "ProviderAuth"), "{class:?}");
        assert_sound(&shard);
    }
}

#[tokio::test]
async fn trouble_of_the_provider_that_passes_is_waited_out_under_the_same_id() {
    for outcome in [
        Outcome::Refuse(ErrorClass::Throttled),
        Outcome::Refuse(ErrorClass::Ambiguous),
        Outcome::LandThenFail(ErrorClass::Ambiguous),
    ] {
        let site = Site::new();
        site.cloud.script(Rule::once(Op::Create, When::Call(1), outcome));
        let (shard, operator) = start_on(site, 0, |_| {}).await;
        let (id, _) = create(&operator, requested("r1")).await.unwrap();
        is(&shard, id, Phase::Provisioning).await;
        assert_eq!(shard.site.standing(), [id]);
        assert!(shard.site.calls(Op::Create).iter().all(|call| call.instance == Some(id)));
        assert_eq!(shard.site.records().await.len(), 1);
    }
}

#[tokio::test]
async fn full_places_are_passed_over_and_waited_for() {
    let site = Site::new();
    site.cloud.script(Rule::always(
        Op::Create,
        When::Subnet("subnet-1".to_owned()),
        Outcome::Refuse(ErrorClass::Capacity),
    ));
    let (shard, operator) = start_on(site, 0, |config| {
        config["server"]["subnet_pools"]["main"] = json!(["subnet-1", "subnet-2"]);
    })
    .await;
    let (first, _) = create(&operator, requested("r1")).await.unwrap();
    is(&shard, first, Phase::Failed).await;
    let (second, _) = create(&operator, requested("r2")).await.unwrap();
    is(&shard, second, Phase::Provisioning).await;
    assert_eq!(shard.site.spec(second).subnet, "subnet-2");
    shard.site.cloud.script(Rule::always(
        Op::Create,
        When::Subnet("subnet-2".to_owned()),
        Outcome::Refuse(ErrorClass::Capacity),
    ));
    let (third, _) = create(&operator, requested("r3")).await.unwrap();
    is(&shard, third, Phase::Failed).await;
    // Nothing is left: the next one waits for the first place that may be free again, and says so.
    let (fourth, _) = create(&operator, requested("r4")).await.unwrap();
    wait_until("the wait is told", async || operator.holds("web").await == ["InProgress"]).await;
    assert_eq!(shard.site.phase(fourth).await, Some(Phase::Pending));
    assert_eq!(n_creates(&shard.site), 3);
}

#[tokio::test]
async fn a_provider_without_idempotency_gets_a_reserved_id_and_one_call() {
    let site = Site::with(FakeOptions { idempotent_create: false, reserve: true, ..FakeOptions::default() });
    let (shard, operator) = start_on(site, 0, |_| {}).await;
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    is(&shard, id, Phase::Provisioning).await;
    let provider = shard.site.record(id).await.unwrap().provider;
    assert!(provider.reserved_id.is_some());
    assert_eq!(provider.reserved_id, provider.id);
    assert_eq!(n_creates(&shard.site), 1);
}

#[tokio::test]
async fn a_successor_makes_what_was_asked_for_though_the_group_is_gone() {
    let (shard, operator) = start(0).await;
    batch(&operator, "blue").await;
    shard.site.cloud.outage(true);
    let request = with(requested("r1"), |config| config.group = "batch".to_owned());
    let (id, answered) = create(&operator, request.clone()).await.unwrap();
    assert_eq!(answered, "pending", "the cloud is not waited for");
    batch(&operator, "green").await;
    let removal = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(removal).await.unwrap();
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    shard.site.cloud.outage(false);
    is(&shard, id, Phase::Provisioning).await;
    assert_eq!(shard.site.spec(id).userdata.unwrap().0, "color=blue", "as it was when it was asked for");
    assert_eq!(create(&operator, request).await.unwrap(), (id, "provisioning".to_owned()));
    assert_eq!(shard.site.standing(), [id]);
}

/// A running on-demand instance in a group without members.
async fn running(change: impl FnOnce(&mut Value)) -> (Shard, Operator, Fleet, InstanceId) {
    let (shard, operator) = start_with(0, change).await;
    let fleet = Fleet::on(&shard);
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    is(&shard, id, Phase::Running).await;
    wait_until("its agent reported", async || operator.health(id).await == "healthy").await;
    (shard, operator, fleet, id)
}

#[tokio::test]
async fn a_dead_one_is_deleted_and_not_replaced() {
    let (shard, operator, fleet, id) = running(|_| {}).await;
    assert!(shard.site.cloud.stop(id));
    fleet.cut(id);
    operator.hears_of("InstanceDead", id).await;
    is(&shard, id, Phase::Deleted).await;
    assert_eq!((shard.site.records().await.len(), n_creates(&shard.site)), (1, 1));
    assert!(shard.site.standing().is_empty());
    assert_sound(&shard);
}

#[tokio::test]
async fn a_silent_one_is_told_of_and_left_to_its_owner() {
    let (shard, operator) = start(0).await;
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    let _fleet = Fleet::reporting_every(&shard, 50);
    operator.hears_of("InstanceSilent", id).await;
    wait_until("it is shown", async || operator.health(id).await == "silent").await;
    wait_for("somebody looked", || !shard.site.calls(Op::Describe).is_empty()).await;
    assert_eq!(operator.events("InstanceSilent").len(), 1);
    assert_eq!(shard.site.phase(id).await, Some(Phase::Running));
    assert_eq!(n_creates(&shard.site), 1);
}

#[tokio::test]
async fn a_deleted_group_leaves_it_alone_and_its_owners_word_drains_it() {
    let (shard, operator) = start_with(0, |config| config["server"]["default_drain_timeout"] = json!("60s")).await;
    batch(&operator, "blue").await;
    let fleet = Fleet::on(&shard);
    let (id, _) = create(&operator, with(requested("r1"), |config| config.group = "batch".to_owned())).await.unwrap();
    is(&shard, id, Phase::Running).await;
    fleet.is_whole(&shard.site, 1).await;
    let removal = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(removal).await.unwrap();
    operator.hears("GroupDeleted").await;
    wait_until("the group goes", async || operator.group("batch").await.deleting).await;
    assert_eq!(shard.site.phase(id).await, Some(Phase::Running));
    assert_eq!(delete(&operator, id).await, "draining");
    let request = v1::DrainAckRequest { instance_id: id.to_string(), drain_id: String::new() };
    assert_eq!(shard.site.standing(), [id], "not before it is acknowledged");
    operator.client().acknowledge_drained(request).await.unwrap();
    is(&shard, id, Phase::Deleted).await;
    let replaced = v1::ReplaceInstanceRequest { instance_id: id.to_string(), reason: String::new() };
    let replaced = operator.client().replace_instance(replaced).await;
    assert_refused(replaced, Code::FailedPrecondition, "NOT_A_MEMBER");
    assert_sound(&shard);
}

#[tokio::test]
async fn an_old_one_is_drained_and_not_replaced() {
    let (shard, _operator, _fleet, id) =
        running(|config| config["server"]["expiry"] = json!({ "ondemand_age": "7d" })).await;
    shard.site.clock.jump(8 * 24 * 3600);
    let shard = shard.restart("srv-2").await;
    is(&shard, id, Phase::Deleted).await;
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.drain.unwrap().reason.as_str(), "ondemand-expiry");
    assert_eq!((shard.site.records().await.len(), n_creates(&shard.site)), (1, 1));
}

#[tokio::test]
async fn one_that_is_deleted_before_it_is_made_leaves_no_vm() {
    let (shard, operator) = start(0).await;
    shard.site.cloud.outage(true);
    let (id, _) = create(&operator, requested("r1")).await.unwrap();
    assert_eq!(delete(&operator, id).await, "deleting");
    shard.site.cloud.outage(false);
    is(&shard, id, Phase::Deleted).await;
    assert!(shard.site.standing().is_empty());
}
