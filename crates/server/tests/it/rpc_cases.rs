//! Refusals of single calls that no other test meets.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    LIMIT, Shard, Site, assert_refused,
    fleet::Fleet,
    meddler::Meddler,
    operator::{self, Operator},
    wait_until,
    wire::{new_key, register_agent, registrar, request},
};
use futures::{StreamExt as _, TryStreamExt as _};
use nstance_core::{
    ids::{InstanceId, uuid_v7},
    ports::clock::random,
};
use nstance_identity::nonce::{OperatorNonce, sign_operator_nonce};
use nstance_proto::v1::{self, explain_request::Target};
use nstance_providers::fake::FakeOptions;
use nstance_server::grpc::status::problems_of;
use nstance_store::memory::MemoryStore;
use serde_json::{Value, json};
use tonic::{Code, Status, Streaming};

fn open(config: &mut Value) {
    config["server"]["dynamic_subnet_pools"] = json!(["main"]);
    config["server"]["default_drain_timeout"] = "60s".into();
}

fn dynamic(key: &str, size: i32) -> v1::UpsertGroupRequest {
    let config = v1::GroupConfig { template: "knc".to_owned(), size: Some(size), ..v1::GroupConfig::default() };
    v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() }
}

async fn replace(operator: &Operator, id: &str) -> Result<(), Status> {
    let request = v1::ReplaceInstanceRequest { instance_id: id.to_owned(), ..v1::ReplaceInstanceRequest::default() };
    operator.client().replace_instance(request).await.map(|_| ())
}

#[tokio::test]
async fn what_nobody_has_is_not_found_by_any_call() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    let unknown = InstanceId::new(id.kind(), uuid_v7(shard.site.now(), random(shard.site.entropy.as_ref())));
    for id in [unknown.to_string(), "no id".to_owned(), String::new()] {
        let mut client = operator.client();
        let status = v1::GetInstanceStatusRequest { instance_id: id.clone(), max_age: None };
        let delete = v1::DeleteInstanceRequest { instance_id: id.clone(), ..v1::DeleteInstanceRequest::default() };
        let ack = v1::DrainAckRequest { instance_id: id.clone(), ..v1::DrainAckRequest::default() };
        let explain = v1::ExplainRequest { target: Some(Target::InstanceId(id.clone())) };
        assert_refused(client.get_instance_status(status).await, Code::NotFound, "NOT_FOUND");
        assert_refused(client.delete_instance(delete).await, Code::NotFound, "NOT_FOUND");
        assert_refused(client.acknowledge_drained(ack).await, Code::NotFound, "NOT_FOUND");
        assert_refused(client.explain(explain).await, Code::NotFound, "NOT_FOUND");
        assert_refused(replace(&operator, &id).await, Code::NotFound, "NOT_FOUND");
    }
}

#[tokio::test]
async fn a_member_of_a_group_that_goes_is_not_replaced() {
    let shard = Shard::start_with(0, open).await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    operator.client().upsert_group(dynamic("batch", 1)).await.unwrap();
    fleet.is_whole(&shard.site, 1).await;
    let id = shard.site.standing()[0].to_string();
    let delete = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(delete).await.unwrap();
    assert_refused(replace(&operator, &id).await, Code::FailedPrecondition, "GROUP_DELETING");
}

#[tokio::test]
async fn a_tenant_has_a_thousand_groups_and_no_more() {
    let shard = Shard::start_with(0, open).await;
    let operator = Operator::on(&shard).await;
    // Not all at once: each has its time to answer in.
    let calls = (0..1000).map(|n| {
        let mut client = operator.client();
        async move { client.upsert_group(dynamic(&format!("g{n}"), 0)).await.map(|_| ()) }
    });
    futures::stream::iter(calls).buffer_unordered(50).try_collect::<Vec<()>>().await.unwrap();
    let status = operator.client().upsert_group(dynamic("one-more", 0)).await.unwrap_err();
    assert_eq!(problems_of(&status)[0].path, "key");
    assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
    operator.client().upsert_group(dynamic("g7", 0)).await.expect("those that are there are served");
}

#[tokio::test]
async fn a_revoked_operator_cannot_register_again() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let claims = OperatorNonce { operator: operator.id, ..operator::claims(&shard.site) };
    let nonce = sign_operator_nonce(&shard.site.nonce_key().await, &claims);
    operator.revoke(&shard.site).await;
    let answer = client.register_operator(request(&nonce, &operator.key)).await;
    assert_refused(answer, Code::PermissionDenied, "OPERATOR_REVOKED");
}

#[tokio::test]
async fn a_registration_that_cannot_be_stored_is_served_at_its_retry() {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(store.clone(), FakeOptions::default()), 1, open).await;
    let id = shard.only_vm().await;
    let (nonce, key) = (shard.site.spec(id).bootstrap.nonce_jwt, new_key(shard.site.entropy.as_ref()));
    store.cut(&["/certlog/"]);
    assert_refused(register_agent(&shard, &nonce, &key).await, Code::Unavailable, "STORE_UNAVAILABLE");
    store.cut(&[]);
    register_agent(&shard, &nonce, &key).await.expect("the same nonce and key");
}

/// How a stream ends, whatever it says before.
async fn end<T>(stream: tonic::Response<Streaming<T>>) -> Result<(), Status> {
    let mut stream = stream.into_inner();
    let reading = async {
        while stream.message().await?.is_some() {}
        Ok(())
    };
    tokio::time::timeout(LIMIT, reading).await.expect("the stream ends")
}

#[tokio::test]
async fn every_watch_ends_with_its_leader() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let mut client = operator.client();
    let groups = client.watch_groups(v1::WatchRequest::default()).await.unwrap();
    let instances = client.watch_instances(v1::WatchRequest::default()).await.unwrap();
    let errors = client.watch_errors(v1::WatchRequest::default()).await.unwrap();
    let events = client.watch_events(v1::WatchEventsRequest::default()).await.unwrap();
    wait_until("something happened", async || operator.group("web").await.actual_size == 1).await;
    let (.., groups, instances, errors, events) =
        tokio::join!(shard.server.stop(Duration::from_secs(5)), end(groups), end(instances), end(errors), end(events));
    for ended in [groups, instances, errors, events] {
        assert_refused(ended, Code::Unavailable, "LEADER_CHANGED");
    }
}
