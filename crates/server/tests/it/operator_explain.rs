//! What would be done, and why: the real planner, and no effect.

use crate::common::{Shard, assert_refused, fleet::Fleet, operator::Operator, wait_until};
use nstance_core::ids::Tenant;
use nstance_proto::v1::{self, explain_request::Target};
use nstance_providers::fake::Op;
use nstance_server::grpc::status::problems_of;
use serde_json::json;
use tonic::{Code, Status};

async fn whole() -> (Shard, Fleet, Operator) {
    let shard = Shard::start_with(2, |config| {
        config["server"]["default_drain_timeout"] = json!("60s");
        config["tenants"] = json!({ "other": {} });
    })
    .await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, 2).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 2).await;
    (shard, fleet, operator)
}

async fn plan(operator: &Operator, request: v1::PlanRequest) -> Result<v1::PlanResponse, Status> {
    operator.client().plan(request).await.map(tonic::Response::into_inner)
}

async fn explain(operator: &Operator, target: Option<Target>) -> Result<v1::ExplainResponse, Status> {
    operator.client().explain(v1::ExplainRequest { target }).await.map(tonic::Response::into_inner)
}

fn sizes(size: i32) -> v1::PlanRequest {
    v1::PlanRequest { sizes: [("web".to_owned(), size)].into(), ..v1::PlanRequest::default() }
}

fn kinds(plan: &v1::PlanResponse) -> Vec<&str> {
    plan.actions.iter().map(|action| action.kind.as_str()).collect()
}

#[tokio::test]
async fn a_plan_tells_what_other_sizes_would_do_and_does_nothing() {
    let (shard, _fleet, operator) = whole().await;
    let now = plan(&operator, v1::PlanRequest::default()).await.unwrap();
    assert!(now.actions.is_empty() && now.complete, "{now:?}");
    assert_eq!(now.epoch, shard.leader.epoch.0);
    let more = plan(&operator, sizes(4)).await.unwrap();
    assert_eq!(kinds(&more), ["Create", "Create"]);
    let fewer = plan(&operator, sizes(1)).await.unwrap();
    assert_eq!(kinds(&fewer), ["StartDrain"]);
    assert_eq!(fewer.actions[0].reason, "scale-down");
    assert!(shard.site.standing().iter().any(|id| id.to_string() == fewer.actions[0].instance_id));
    assert_eq!(operator.group("web").await.size, 2);
    assert_eq!((shard.site.calls(Op::Create).len(), operator.events("DrainStarted").len()), (2, 0));
}

#[tokio::test]
async fn a_plan_equals_what_happens_next() {
    let (shard, fleet, operator) = whole().await;
    let resize = async |size| {
        let config = Some(v1::GroupConfig { size: Some(size), ..v1::GroupConfig::default() });
        let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
        operator.client().upsert_group(request).await.unwrap();
    };
    let more = plan(&operator, sizes(5)).await.unwrap();
    assert_eq!(kinds(&more), ["Create"; 3]);
    resize(5).await;
    fleet.is_whole(&shard.site, 5).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 5).await;
    assert_eq!(shard.site.calls(Op::Create).len(), 2 + more.actions.len(), "as many as were planned, and no more");

    let fewer = plan(&operator, sizes(3)).await.unwrap();
    assert_eq!(kinds(&fewer), ["StartDrain"; 2]);
    let mut planned: Vec<_> = fewer.actions.iter().map(|it| it.instance_id.clone()).collect();
    planned.sort_unstable();
    resize(3).await;
    wait_until("all that was planned", async || operator.events("DrainStarted").len() == planned.len()).await;
    let drained: Vec<_> = operator.events("DrainStarted").into_iter().map(|event| event.instance_id).collect();
    let drained: std::collections::BTreeSet<_> = drained.into_iter().collect();
    assert_eq!(drained.into_iter().collect::<Vec<_>>(), planned, "the same instances");
    let now = plan(&operator, v1::PlanRequest::default()).await.unwrap();
    assert!(now.actions.is_empty(), "{now:?}");
    assert_eq!(shard.site.calls(Op::Create).len(), 5);
}

#[tokio::test]
async fn a_plan_tells_what_a_candidate_config_would_do() {
    let (shard, _fleet, operator) = whole().await;
    let mut config = shard.site.config(3);
    config["groups"]["default"]["batch"] = json!({ "template": "knc", "size": 1 });
    let request = |config: &serde_json::Value| v1::PlanRequest {
        candidate_config: config.to_string().into_bytes(),
        ..v1::PlanRequest::default()
    };
    let larger = plan(&operator, request(&config)).await.unwrap();
    let mut groups: Vec<_> = larger.actions.iter().map(|it| (it.kind.as_str(), it.group.as_str())).collect();
    groups.sort_unstable();
    assert_eq!(groups, [("Create", "batch"), ("Create", "web")]);
    config["groups"] = json!({});
    let without = plan(&operator, request(&config)).await.unwrap();
    assert_eq!(kinds(&without), ["StartDrain", "StartDrain"]);
    assert_eq!(without.actions[0].reason, "group-deleted");
    config["server"]["colour"] = json!("red");
    let bad = plan(&operator, request(&config)).await.unwrap_err();
    assert!(problems_of(&bad).iter().any(|it| it.path.contains("colour")), "{}", bad.message());
    assert_refused(Err::<(), _>(bad), Code::InvalidArgument, "BAD_REQUEST");
    // However many there are, the refusal still fits through every client.
    for n in 0..500 {
        config["server"][format!("colour-{n}-{}", "x".repeat(40))] = json!("red");
    }
    let many = plan(&operator, request(&config)).await.unwrap_err();
    assert!(10 < problems_of(&many).len(), "{}", many.message());
    assert_refused(Err::<(), _>(many), Code::InvalidArgument, "BAD_REQUEST");
}

#[tokio::test]
async fn a_plan_of_nothing_is_refused() {
    let (shard, _fleet, operator) = whole().await;
    let of = |group: &str| v1::PlanRequest { group: group.to_owned(), ..v1::PlanRequest::default() };
    assert_refused(plan(&operator, of("nobody")).await, Code::NotFound, "NOT_FOUND");
    assert_refused(plan(&operator, sizes(-1)).await, Code::InvalidArgument, "BAD_REQUEST");
    let unknown = v1::PlanRequest { sizes: [("nobody".to_owned(), 1)].into(), ..v1::PlanRequest::default() };
    assert_refused(plan(&operator, unknown).await, Code::InvalidArgument, "BAD_REQUEST");
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    assert_refused(plan(&other, of("web")).await, Code::NotFound, "NOT_FOUND");
}

#[tokio::test]
async fn a_group_and_an_instance_are_explained() {
    let (shard, _fleet, operator) = whole().await;
    let group = explain(&operator, Some(Target::Group("web".to_owned()))).await.unwrap();
    assert!(group.summary.contains("2 members, 2 ready, wanted 2; nothing to do"), "{}", group.summary);
    assert!(group.history.iter().any(|event| event.reason == "InstanceRegistered"));
    let id = shard.site.standing()[0];
    let target = || Some(Target::InstanceId(id.to_string()));
    let it = explain(&operator, target()).await.unwrap();
    let value = |name: &str| it.facts.iter().find(|fact| fact.name == name).map(|fact| fact.value.clone());
    assert_eq!(value("phase").as_deref(), Some("running"));
    assert_eq!(value("provider_state").as_deref(), Some("running"));
    assert_eq!(value("health").as_deref(), Some("healthy"));
    assert!(it.history.iter().all(|event| event.instance_id == id.to_string()));
    let deletion = v1::DeleteInstanceRequest { instance_id: id.to_string(), ..v1::DeleteInstanceRequest::default() };
    operator.client().delete_instance(deletion).await.unwrap();
    let it = explain(&operator, target()).await.unwrap();
    assert!(it.facts.iter().any(|fact| fact.name == "drain" && fact.value.starts_with("requested until")));
    assert!(it.holds.iter().any(|hold| hold.kind == "WaitingForDrain"), "{:?}", it.holds);
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    assert_refused(explain(&other, target()).await, Code::NotFound, "NOT_FOUND");
    assert_refused(explain(&operator, Some(Target::Group("no".to_owned()))).await, Code::NotFound, "NOT_FOUND");
    assert_refused(explain(&operator, None).await, Code::InvalidArgument, "BAD_REQUEST");
}
