//! Every call of the operator and agent ports against what can be wrong for any of them: who calls, for whom, at which
//! server, with which store, how much at once. What is particular to one call stands with that call; `docs/api-tests.md`
//! says where.

use std::{collections::BTreeMap, net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    Shard, Site, assert_refused,
    fleet::{Agent, Fleet, report},
    meddler::Meddler,
    operator::{self, Operator},
    tenant, wait_for, wait_until,
    wire::{Line, dial, dial_with, new_key, register_agent, register_operator, registrar, request, tls},
};
use nstance_core::{
    ids::{InstanceId, Tenant},
    instance::Phase,
    ports::clock::Clock,
};
use nstance_identity::{keys::KeyPair, nonce::sign_operator_nonce};
use nstance_proto::v1::{
    self, agent_service_client::AgentServiceClient, operator_service_client::OperatorServiceClient,
};
use nstance_providers::fake::FakeOptions;
use nstance_server::{
    grpc::status::{problems_of, reason_of},
    vitals::Role,
};
use nstance_store::memory::MemoryStore;
use serde_json::{Value, json};
use tonic::{Code, Request, Status, metadata::MetadataMap, transport::Channel};

const HOUR: Duration = Duration::from_secs(3600);

/// How each call was answered.
type Answers = Vec<(&'static str, Result<MetadataMap, Status>)>;

macro_rules! call {
    ($answers:ident, $name:literal, $call:expr) => {
        $answers.push(($name, $call.await.map(|answer| answer.metadata().clone())))
    };
}

fn web() -> String {
    "web".to_owned()
}

fn upsert(key: &str, size: i32) -> v1::UpsertGroupRequest {
    let config = v1::GroupConfig { template: "knc".to_owned(), size: Some(size), ..v1::GroupConfig::default() };
    v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() }
}

fn on_demand(request_id: &str) -> v1::CreateInstanceRequest {
    let config = Some(v1::InstanceConfig { group: web(), ..v1::InstanceConfig::default() });
    v1::CreateInstanceRequest { config, request_id: request_id.to_owned(), ..v1::CreateInstanceRequest::default() }
}

fn named(id: &str) -> v1::DeleteInstanceRequest {
    v1::DeleteInstanceRequest { instance_id: id.to_owned(), ..v1::DeleteInstanceRequest::default() }
}

fn renewal(key: &KeyPair) -> v1::RenewCertificateRequest {
    v1::RenewCertificateRequest { public_key_pem: key.public_key_pem().into_bytes() }
}

/// Every call that changes nothing, about the group `web` and this instance.
async fn every_look(client: &OperatorServiceClient<Channel>, id: &str) -> Answers {
    use v1::explain_request::Target;
    let (mut client, mut answers) = (client.clone(), Vec::new());
    let of_web = v1::PlanRequest { group: web(), ..v1::PlanRequest::default() };
    let explain = |target| v1::ExplainRequest { target: Some(target) };
    let status = v1::GetInstanceStatusRequest { instance_id: id.to_owned(), max_age: None };
    call!(answers, "GetConfigStatus", client.get_config_status(()));
    call!(answers, "ListGroups", client.list_groups(()));
    call!(answers, "ListInstances", client.list_instances(v1::ListInstancesRequest::default()));
    call!(answers, "GetInstanceStatus", client.get_instance_status(status));
    call!(answers, "Plan", client.plan(of_web));
    call!(answers, "Explain", client.explain(explain(Target::Group(web()))));
    call!(answers, "Explain", client.explain(explain(Target::InstanceId(id.to_owned()))));
    answers
}

async fn every_watch(client: &OperatorServiceClient<Channel>) -> Answers {
    let (mut client, mut answers) = (client.clone(), Vec::new());
    call!(answers, "WatchGroups", client.watch_groups(v1::WatchRequest::default()));
    call!(answers, "WatchInstances", client.watch_instances(v1::WatchRequest::default()));
    call!(answers, "WatchErrors", client.watch_errors(v1::WatchRequest::default()));
    call!(answers, "WatchEvents", client.watch_events(v1::WatchEventsRequest::default()));
    answers
}

/// Changes of one instance that runs; of another that drains, its end.
async fn every_change_of_instances(client: &OperatorServiceClient<Channel>, id: &str, draining: &str) -> Answers {
    let (mut client, mut answers) = (client.clone(), Vec::new());
    let replace = v1::ReplaceInstanceRequest { instance_id: id.to_owned(), reason: "slow".to_owned() };
    let ack = v1::DrainAckRequest { instance_id: draining.to_owned(), ..v1::DrainAckRequest::default() };
    call!(answers, "AcknowledgeDrained", client.acknowledge_drained(ack));
    call!(answers, "ReplaceInstance", client.replace_instance(replace));
    call!(answers, "DeleteInstance", client.delete_instance(named(id)));
    answers
}

async fn every_other_change(client: &OperatorServiceClient<Channel>, key: &KeyPair, batch: &str) -> Answers {
    let (mut client, mut answers) = (client.clone(), Vec::new());
    let delete = v1::DeleteGroupRequest { key: batch.to_owned(), ..v1::DeleteGroupRequest::default() };
    call!(answers, "UpsertGroup", client.upsert_group(upsert("web", 3)));
    call!(answers, "DeleteGroup", client.delete_group(delete));
    call!(answers, "CreateInstance", client.create_instance(on_demand("r1")));
    call!(answers, "RefreshConfig", client.refresh_config(v1::RefreshConfigRequest::default()));
    call!(answers, "RenewCertificate", client.renew_certificate(renewal(key)));
    answers
}

/// All of OperatorService.
async fn every_call(client: &OperatorServiceClient<Channel>, id: &str, key: &KeyPair) -> Answers {
    let mut answers = every_look(client, id).await;
    answers.extend(every_watch(client).await);
    answers.extend(every_change_of_instances(client, id, id).await);
    answers.extend(every_other_change(client, key, "batch").await);
    answers
}

#[track_caller]
fn all_refused(answers: Answers, code: Code, reason: &str) {
    assert!(!answers.is_empty());
    for (name, answer) in answers {
        match answer {
            Ok(_) => panic!("{name} was accepted instead of {reason}"),
            Err(status) => {
                let found = (status.code(), reason_of(&status));
                assert_eq!(found, (code, Some(reason.to_owned())), "{name}: {}", status.message());
            }
        }
    }
}

#[track_caller]
fn all_served(answers: Answers) {
    for (name, answer) in answers {
        assert!(answer.is_ok(), "{name}: {answer:?}");
    }
}

/// Whoever holds this certificate, on the operator port.
async fn holder(shard: &Shard, chain: &[u8], key: &KeyPair) -> (OperatorServiceClient<Channel>, Line) {
    let tls = tls(&shard.site.bundle().await, Some((chain, key)));
    let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.unwrap();
    (OperatorServiceClient::new(line.channel.clone()), line)
}

fn two_tenants(config: &mut Value) {
    config["tenants"] = json!({ "other": {} });
    config["server"]["default_drain_timeout"] = "60s".into();
    config["server"]["dynamic_subnet_pools"] = json!(["main"]);
}

/// A whole group on a store that can be meddled with. Its first member will be asked for changes, its last one drains.
struct Whole {
    shard: Shard,
    store: Arc<Meddler>,
    operator: Operator,
    agent: Agent,
    ids: Vec<InstanceId>,
    _fleet: Fleet,
}

async fn whole(change: impl FnOnce(&mut Value)) -> Whole {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(store.clone(), FakeOptions::default()), 3, |config| {
        two_tenants(config);
        change(config);
    })
    .await;
    let ids = shard.vms(3).await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 3).await;
    let agent = fleet.take(ids[1]);
    operator.client().upsert_group(upsert("batch", 0)).await.unwrap();
    let drained = operator.client().delete_instance(named(&ids[2].to_string())).await;
    assert_eq!(drained.unwrap().into_inner().status, "draining");
    wait_until("another runs in its place", async || {
        let records = shard.site.records().await;
        records.iter().filter(|it| it.phase() == nstance_core::instance::Phase::Running).count() == 3
    })
    .await;
    Whole { shard, store, operator, agent, ids, _fleet: fleet }
}

#[tokio::test]
async fn every_call_of_operators_asks_who_calls() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let (ca, entropy, now) = (shard.site.ca().await, shard.site.entropy.as_ref(), shard.site.now());
    let (client, _line) = holder(&shard, &agent.chain, &agent.key).await;
    all_refused(every_call(&client, &id.to_string(), &agent.key).await, Code::PermissionDenied, "WRONG_ROLE");

    let known = Operator::on(&shard).await;
    let (stranger, key) = (operator::claims(&shard.site).operator, new_key(entropy));
    let foreign: Tenant = "nobody".parse().unwrap();
    let then = now.minus(2 * HOUR);
    let cases = [
        (stranger, tenant(), &key, now, Code::Unauthenticated, "OPERATOR_UNKNOWN"),
        (stranger, foreign, &key, now, Code::PermissionDenied, "TENANT_UNKNOWN"),
        (known.id, tenant(), &known.key, now, Code::Unauthenticated, "CERT_SUPERSEDED"),
        (known.id, tenant(), &known.key, then, Code::Unauthenticated, "CERT_EXPIRED"),
    ];
    for (who, tenant, key, at, code, reason) in cases {
        let issued = ca.issue_operator(&who, &tenant, &key.public_key(), at, HOUR, entropy).unwrap();
        let (client, _line) = holder(&shard, issued.chain_pem.as_bytes(), key).await;
        all_refused(every_call(&client, &id.to_string(), key).await, code, reason);
    }
    assert_eq!(shard.site.standing(), [id], "nobody of them did anything");
}

#[tokio::test]
async fn every_call_of_agents_asks_who_calls() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let tls = tls(&shard.site.bundle().await, Some((&operator.chain, &operator.key)));
    let line = dial(&shard.leader.advertised.agent, tls, Ipv4Addr::LOCALHOST).await.unwrap();
    let mut client = AgentServiceClient::new(line.channel.clone());
    let mut answers = Vec::new();
    let first = report(shard.only_vm().await, v1::ReportKind::First);
    call!(answers, "ReportHealth", client.report_health(tokio_stream::iter([first])));
    call!(answers, "RenewCertificate", client.renew_certificate(renewal(&operator.key)));
    call!(answers, "KeyGenRequests", client.key_gen_requests(v1::AgentStreamRequest::default()));
    call!(answers, "SubmitPublicKeys", client.submit_public_keys(v1::PublicKeysRequest::default()));
    call!(answers, "ReceiveFiles", client.receive_files(v1::AgentStreamRequest::default()));
    all_refused(answers, Code::PermissionDenied, "WRONG_ROLE");
}

#[tokio::test]
async fn every_rpc_is_tenant_scoped() {
    let found = whole(|_| {}).await;
    let (shard, mine) = (&found.shard, &found.operator);
    let other = Operator::of(shard, "other".parse().unwrap()).await;
    let id = found.ids[0].to_string();
    let before = (shard.site.records().await, mine.group("web").await);

    let (about_nobody, looks): (Answers, Answers) = every_look(&other.client(), &id)
        .await
        .into_iter()
        .partition(|(name, _)| matches!(*name, "GetInstanceStatus" | "Plan" | "Explain"));
    assert_eq!(about_nobody.len(), 4);
    all_refused(about_nobody, Code::NotFound, "NOT_FOUND");
    all_served(looks);
    let draining = found.ids[2].to_string();
    let changes = every_change_of_instances(&other.client(), &id, &draining).await;
    all_refused(changes, Code::NotFound, "NOT_FOUND");
    assert_refused(other.client().create_instance(on_demand("r1")).await, Code::NotFound, "NOT_FOUND");
    assert!(other.instances().await.is_empty());
    assert!(other.client().list_groups(()).await.unwrap().into_inner().groups.is_empty());

    // A group of the same name is another group.
    other.client().upsert_group(upsert("web", 0)).await.unwrap();
    let delete = v1::DeleteGroupRequest { key: web(), ..v1::DeleteGroupRequest::default() };
    other.client().delete_group(delete).await.unwrap();
    let mut groups = other.client().watch_groups(v1::WatchRequest::default()).await.unwrap().into_inner();
    let mut instances = other.client().watch_instances(v1::WatchRequest::default()).await.unwrap().into_inner();
    let shown = groups.message().await.unwrap().unwrap();
    assert!(shown.group.is_none_or(|it| it.tenant == "other"));
    assert_eq!(instances.message().await.unwrap().unwrap().status, "snapshot_end", "nobody is shown");
    assert!(other.events("InstanceCreated").is_empty() && other.events("DrainStarted").is_empty());

    let after = (shard.site.records().await, mine.group("web").await);
    let facts = |records: &[nstance_core::instance::Instance]| -> Vec<_> {
        records.iter().map(|it| (it.id, it.phase(), it.replace.is_some(), it.drain.clone())).collect()
    };
    assert_eq!(facts(&after.0), facts(&before.0), "nothing of ours has changed");
    assert_eq!((after.1.size, after.1.etag), (before.1.size, before.1.etag));
}

#[tokio::test]
async fn without_the_lease_every_change_waits_and_every_look_is_served() {
    let short = |config: &mut Value| {
        config["server"]["leader_election"] = json!({ "ttl": "2s", "renew_interval": "400ms", "margin": "500ms" });
    };
    let found = whole(short).await;
    let (shard, client) = (&found.shard, found.operator.client());
    let (id, draining) = (found.ids[0].to_string(), found.ids[2].to_string());
    let mut config = shard.site.config(4);
    two_tenants(&mut config);
    short(&mut config);
    shard.site.upload(&config).await;
    let signer = shard.site.nonce_key().await;
    let nonce = sign_operator_nonce(&signer, &operator::claims(&shard.site));
    found.store.hold(Some("leader.json"));
    wait_for("the lease runs out", || shard.server.vitals.role() == Role::Stalled).await;

    let changes = every_change_of_instances(&client, &id, &draining).await;
    all_refused(changes, Code::Unavailable, "LEASE_STALLED");
    all_refused(every_other_change(&client, &found.operator.key, "batch").await, Code::Unavailable, "LEASE_STALLED");
    let line = found.agent.dial(&shard.leader.advertised.agent).await.unwrap();
    let mut agents = AgentServiceClient::new(line.channel.clone());
    let renewed = agents.renew_certificate(renewal(&found.agent.key)).await;
    assert_refused(renewed, Code::Unavailable, "LEASE_STALLED");
    let public_key_pem = found.agent.key.public_key_pem().into_bytes();
    let keys = vec![v1::PublicKeySubmission { filename: "node".to_owned(), public_key_pem }];
    let submitted = v1::PublicKeysRequest { instance_id: found.agent.id.to_string(), keys };
    let submitted = agents.submit_public_keys(submitted).await;
    assert_refused(submitted, Code::Unavailable, "LEASE_STALLED");
    let key = new_key(shard.site.entropy.as_ref());
    assert_refused(register_operator(shard, &nonce, &key).await, Code::Unavailable, "LEASE_STALLED");
    all_served(every_look(&client, &id).await);
    all_served(every_watch(&client).await);

    found.store.hold(None);
    wait_for("the lease is back", || shard.server.vitals.role() == Role::Leading).await;
    all_served(every_change_of_instances(&client, &id, &draining).await);
    all_served(every_other_change(&client, &found.operator.key, "batch").await);
    agents.renew_certificate(renewal(&found.agent.key)).await.unwrap();
    register_operator(shard, &nonce, &key).await.unwrap();
}

#[tokio::test]
async fn a_store_that_takes_nothing_makes_every_change_wait() {
    let found = whole(|config| config["server"]["request_timeout"] = "1s".into()).await;
    let (shard, client) = (&found.shard, found.operator.client());
    let (id, draining) = (found.ids[0].to_string(), found.ids[2].to_string());
    let signer = shard.site.nonce_key().await;
    let nonce = sign_operator_nonce(&signer, &operator::claims(&shard.site));
    let key = new_key(shard.site.entropy.as_ref());
    found.store.cut(&["/instance/", "/groups", "/operator/", "/certlog/", "/nonce/"]);
    found.store.hide(Some("config"));
    let line = found.agent.dial(&shard.leader.advertised.agent).await.unwrap();
    let mut agents = AgentServiceClient::new(line.channel.clone());

    let began = shard.site.clock.monotonic();
    let changes = every_change_of_instances(&client, &id, &draining).await;
    all_refused(changes, Code::Unavailable, "STORE_UNAVAILABLE");
    let others = every_other_change(&client, &found.operator.key, "batch").await;
    all_refused(others, Code::Unavailable, "STORE_UNAVAILABLE");
    let took = shard.site.clock.monotonic().since(began);
    assert!(took < Duration::from_secs(40), "eight calls have a ceiling of a second each, not of ten: {took:?}");
    let (renewed, registered) =
        tokio::join!(agents.renew_certificate(renewal(&found.agent.key)), register_operator(shard, &nonce, &key));
    assert_refused(renewed, Code::Unavailable, "STORE_UNAVAILABLE");
    assert_refused(registered, Code::Unavailable, "STORE_UNAVAILABLE");
    all_served(every_look(&client, &id).await);

    found.store.cut(&[]);
    found.store.hide(None);
    register_operator(shard, &nonce, &key).await.expect("a retry is safe");
    wait_until("changes are taken again", async || client.clone().upsert_group(upsert("web", 2)).await.is_ok()).await;
}

#[tokio::test]
async fn an_operator_that_cannot_be_looked_up_is_not_refused() {
    let found = whole(|_| {}).await;
    let (operator, store) = (found.operator, found.store);
    let shard = found.shard.restart("srv-2").await;
    let id = found.ids[0].to_string();
    let (client, _line) = holder(&shard, &operator.chain, &operator.key).await;
    store.hide(Some("/operator/"));
    all_refused(every_call(&client, &id, &operator.key).await, Code::Unavailable, "STORE_UNAVAILABLE");
    store.hide(None);
    all_served(every_look(&client, &id).await);
}

#[tokio::test]
async fn what_is_asked_of_an_instance_waits_for_its_record_but_not_for_ever() {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(store.clone(), FakeOptions::default()), 0, |config| {
        two_tenants(config);
        config["server"]["request_timeout"] = "1s".into();
    })
    .await;
    let operator = Operator::on(&shard).await;
    store.hold(Some("/instance/"));
    operator.client().upsert_group(upsert("web", 1)).await.unwrap();
    wait_for("the VM stands", || shard.site.standing().len() == 1).await;
    let id = shard.site.standing()[0];
    let nonce = shard.site.spec(id).bootstrap.nonce_jwt;
    let key = new_key(shard.site.entropy.as_ref());
    // Both wait for the record, but not for ever.
    let mut client = operator.client();
    let (deleted, registered) =
        tokio::join!(client.delete_instance(named(&id.to_string())), register_agent(&shard, &nonce, &key));
    assert_refused(registered, Code::Unavailable, "NOT_READY");
    assert_refused(deleted, Code::Unavailable, "STORE_UNAVAILABLE");
    store.hold(None);
    wait_until("the call is done all the same", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    assert_refused(register_agent(&shard, &nonce, &key).await, Code::PermissionDenied, "INSTANCE_DELETED");
}

#[tokio::test]
async fn a_change_under_way_when_the_term_ends_is_told_so() {
    let found = whole(|_| {}).await;
    found.store.hold(Some("/groups"));
    let mut client = found.operator.client();
    let changing = client.upsert_group(upsert("web", 2));
    let ending = async {
        wait_for("the change is under way", || found.store.is_holding()).await;
        found.shard.server.stop(Duration::from_secs(5)).await;
    };
    let (answer, ()) = tokio::join!(changing, ending);
    assert_refused(answer, Code::Unavailable, "LEADER_CHANGED");
}

#[tokio::test]
async fn every_answer_names_its_epoch_and_request_on_every_port() {
    let found = whole(|_| {}).await;
    let (shard, operator) = (&found.shard, &found.operator);
    let epoch = shard.leader.epoch.to_string();
    let check = |name: &str, metadata: &MetadataMap| {
        assert_eq!(metadata.get("nstance-epoch").map(|it| it.to_str().unwrap()), Some(epoch.as_str()), "{name}");
        assert!(metadata.contains_key("nstance-request-id"), "{name}");
    };
    let mut answers = every_call(&operator.client(), &found.ids[0].to_string(), &operator.key).await;
    answers.extend(every_call(&operator.client(), "nobody", &new_key(shard.site.entropy.as_ref())).await);
    let (mut registrations, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    let nonce = sign_operator_nonce(&shard.site.nonce_key().await, &operator::claims(&shard.site));
    let key = new_key(shard.site.entropy.as_ref());
    call!(answers, "RegisterOperator", registrations.register_operator(request(&nonce, &key)));
    call!(answers, "RegisterAgent", registrations.register_agent(request("forged", &key)));
    let (mut n_good, mut n_bad, mut ids) = (0, 0, std::collections::BTreeSet::new());
    for (name, answer) in answers {
        let metadata = match &answer {
            Ok(metadata) => metadata,
            Err(status) => status.metadata(),
        };
        check(name, metadata);
        ids.insert(metadata.get("nstance-request-id").unwrap().to_str().unwrap().to_owned());
        n_good += usize::from(answer.is_ok());
        n_bad += usize::from(answer.is_err());
    }
    assert!(10 < n_good && 3 < n_bad, "{n_good} good, {n_bad} refused");
    assert_eq!(ids.len(), n_good + n_bad, "each call has an id of its own");
}

#[tokio::test]
async fn a_message_over_its_limit_is_refused_and_nothing_else() {
    let found = whole(|_| {}).await;
    let (shard, operator) = (&found.shard, &found.operator);
    let large = v1::PlanRequest { candidate_config: vec![b' '; 5 << 20], ..v1::PlanRequest::default() };
    assert_refused(operator.client().plan(large).await, Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    assert_eq!(operator.group("web").await.key, "web", "the connection goes on");
    // A report: its stream ends, the next one is taken.
    let stream = found.agent.report(&shard.leader).await;
    let bloated = v1::HealthReportRequest {
        provider_facts: [("x".to_owned(), "y".repeat(300 << 10))].into(),
        ..report(found.agent.id, v1::ReportKind::Change)
    };
    stream.reports.send(bloated).await.unwrap();
    assert_refused(stream.end().await, Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    let stream = found.agent.report(&shard.leader).await;
    stream.half_close().await.expect("an empty answer");
}

#[tokio::test]
async fn limits_on_fields_are_told_with_the_field() {
    let found = whole(|_| {}).await;
    let operator = &found.operator;
    let mut many_vars = upsert("web", 1);
    many_vars.config.as_mut().unwrap().vars = (0..257).map(|n| (format!("V{n}"), String::new())).collect();
    let mut long_vars = upsert("web", 1);
    long_vars.config.as_mut().unwrap().vars =
        BTreeMap::from([("V".to_owned(), "x".repeat(33 << 10))]).into_iter().collect();
    let many_victims =
        v1::UpsertGroupRequest { preferred_victims: vec![found.ids[0].to_string(); 1001], ..upsert("web", 1) };
    let mut args = upsert("web", 1);
    args.config.as_mut().unwrap().args = [("Ami".to_owned(), "x".to_owned())].into();
    for (request, field) in
        [(many_vars, "vars"), (long_vars, "vars"), (many_victims, "preferred_victims"), (args, "args")]
    {
        let status = operator.client().upsert_group(request).await.unwrap_err();
        let paths: Vec<_> = problems_of(&status).into_iter().map(|it| it.path).collect();
        assert!(paths.iter().any(|path| path.contains(field)), "{field} is not among {paths:?}");
        assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
    }
    let candidate_config = vec![b' '; (3 << 20) + 1];
    let long = v1::PlanRequest { candidate_config, ..v1::PlanRequest::default() };
    assert_refused(operator.client().plan(long).await, Code::InvalidArgument, "BAD_REQUEST");
    assert_eq!(operator.group("web").await.size, 3, "nothing of it was taken");
}

#[tokio::test]
async fn a_tenant_has_64_streams_of_a_kind_and_no_more() {
    let shard = Shard::start_with(0, two_tenants).await;
    let (mut operators, mut open) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let operator = Operator::on(&shard).await;
        for _ in 0..8 {
            open.push(operator.client().watch_errors(v1::WatchRequest::default()).await.unwrap());
        }
        operators.push(operator);
    }
    let ninth = Operator::on(&shard).await;
    let refused = ninth.client().watch_errors(v1::WatchRequest::default()).await;
    assert_refused(refused, Code::ResourceExhausted, "TOO_MANY_STREAMS");
    let other = Operator::of(&shard, "other".parse().unwrap()).await;
    other.client().watch_errors(v1::WatchRequest::default()).await.expect("another tenant is not touched");
}

#[tokio::test]
async fn a_shorter_deadline_of_the_client_wins_and_the_change_lands() {
    let found = whole(|_| {}).await;
    let operator = &found.operator;
    let tls = tls(&found.shard.site.bundle().await, Some((&operator.chain, &operator.key)));
    let address = &found.shard.leader.advertised.operator;
    let line = dial_with(address, tls, Ipv4Addr::LOCALHOST, |it| it).await.unwrap();
    found.store.hold(Some("/groups"));
    let mut late = Request::new(upsert("web", 2));
    late.set_timeout(Duration::from_millis(200));
    let status = OperatorServiceClient::new(line.channel.clone()).upsert_group(late).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled), "{status}");
    found.store.hold(None);
    wait_until("it lands all the same", async || operator.group("web").await.size == 2).await;
}
