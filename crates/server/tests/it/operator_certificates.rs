//! Renewal: the same key gets a new certificate, and nobody is locked out on the way.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    Shard, Site, assert_refused,
    fleet::Agent,
    meddler::Meddler,
    operator::Operator,
    tenant, wait_for, wait_until,
    wire::{dial, new_key, tls},
};
use nstance_identity::keys::KeyPair;
use nstance_proto::v1::{
    self, agent_service_client::AgentServiceClient, operator_service_client::OperatorServiceClient,
};
use nstance_providers::fake::FakeOptions;
use nstance_store::{
    memory::MemoryStore,
    records::{self, operator::OperatorRecord, operator_key},
};
use tonic::{Code, Status};

fn request(key: &KeyPair) -> v1::RenewCertificateRequest {
    v1::RenewCertificateRequest { public_key_pem: key.public_key_pem().into_bytes() }
}

async fn renew(shard: &Shard, agent: &Agent, key: &KeyPair) -> Result<v1::RenewCertificateResponse, Status> {
    let line = agent.dial(&shard.leader.advertised.agent).await.unwrap();
    let mut client = AgentServiceClient::new(line.channel.clone());
    client.renew_certificate(request(key)).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn an_agent_renews_and_its_old_certificate_passes_until_the_new_one_is_seen() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    let old = Agent::register(&shard, id).await;
    let before = shard.site.record(id).await.unwrap().cert.unwrap().current;
    let answer = renew(&shard, &old, &old.key).await.unwrap();
    assert!(answer.renew_after.is_some() && answer.expires_at.is_some());
    let pair = shard.site.record(id).await.unwrap().cert.unwrap();
    assert_eq!(pair.previous.as_ref(), Some(&before), "the calling serial");
    let logged = shard.site.certlog().await;
    assert!(logged.iter().flat_map(|it| &it.certificates).any(|it| it.serial == pair.current.serial));
    assert_eq!(operator.hears_of("CertificateIssued", id).await.actor, id.to_string());
    assert_eq!(old.knock(&shard.leader).await.code(), Code::InvalidArgument, "the old one still passes");
    let new = Agent { chain: answer.client_certificate_pem, ..old.clone() };
    assert_eq!(new.knock(&shard.leader).await.code(), Code::InvalidArgument);
    wait_until("the old serial is retired", async || old.knock(&shard.leader).await.code() == Code::Unauthenticated)
        .await;
    assert_refused(renew(&shard, &new, &new.key).await, Code::ResourceExhausted, "TOO_MANY_RENEWALS");
}

#[tokio::test]
async fn another_key_is_not_renewed() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let before = shard.site.record(id).await.unwrap().cert;
    let other = new_key(shard.site.entropy.as_ref());
    assert_refused(renew(&shard, &agent, &other).await, Code::InvalidArgument, "KEY_CHANGE");
    let line = agent.dial(&shard.leader.advertised.agent).await.unwrap();
    let mut client = AgentServiceClient::new(line.channel.clone());
    let nothing = client.renew_certificate(v1::RenewCertificateRequest::default()).await;
    assert_refused(nothing, Code::InvalidArgument, "BAD_REQUEST");
    assert_eq!(shard.site.record(id).await.unwrap().cert, before);
    // A refusal takes nobody's turn.
    renew(&shard, &agent, &agent.key).await.unwrap();
}

#[tokio::test]
async fn an_operator_renews_and_works_with_the_old_one_until_the_new_one_is_seen() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    let other = new_key(shard.site.entropy.as_ref());
    let refused = operator.client().renew_certificate(request(&other)).await;
    assert_refused(refused, Code::InvalidArgument, "KEY_CHANGE");
    let answer = operator.client().renew_certificate(request(&operator.key)).await.unwrap().into_inner();
    let by_it = || operator.events("CertificateIssued").iter().any(|told| told.actor == operator.id.to_string());
    wait_for("the renewal is told", by_it).await;
    let again = operator.client().renew_certificate(request(&operator.key)).await;
    let hint = nstance_proto::refusal::retry_of(again.as_ref().expect_err("it has one"));
    assert!(hint.is_some_and(|hint| hint <= Duration::from_secs(10)), "{hint:?}");
    assert_refused(again, Code::ResourceExhausted, "TOO_MANY_RENEWALS");
    let tls = tls(&shard.site.bundle().await, Some((&answer.client_certificate_pem, &operator.key)));
    let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.unwrap();
    assert_eq!(operator.group("web").await.size, 0, "the old one still passes");
    OperatorServiceClient::new(line.channel.clone()).list_groups(()).await.unwrap();
    assert_refused(operator.client().list_groups(()).await, Code::Unauthenticated, "CERT_SUPERSEDED");
    // Other shards learn it from the record.
    let key = operator_key(&tenant(), &operator.id);
    wait_until("the record says so", async || {
        let object = shard.site.bucket.get(&key).await.unwrap();
        records::decode_object::<OperatorRecord>(&key, object).unwrap().value.cert.previous.is_none()
    })
    .await;
    OperatorServiceClient::new(line.channel.clone()).list_groups(()).await.unwrap();
    assert_refused(operator.client().list_groups(()).await, Code::Unauthenticated, "CERT_SUPERSEDED");
}

#[tokio::test]
async fn a_seen_certificate_retires_the_old_one_before_any_record_is_written() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(bucket.clone(), FakeOptions::default()), 1, |_| {}).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    let old = Agent::register(&shard, id).await;
    let answer = renew(&shard, &old, &old.key).await.unwrap();
    let renewed = operator.client().renew_certificate(request(&operator.key)).await.unwrap().into_inner();
    let new = Agent { chain: answer.client_certificate_pem, ..old.clone() };
    for part in ["/instance/", "/operator/"] {
        bucket.hold(Some(part));
        let n_puts = bucket.n_puts(part);
        if part == "/instance/" {
            assert_eq!(new.knock(&shard.leader).await.code(), Code::InvalidArgument);
            assert_eq!(old.knock(&shard.leader).await.code(), Code::Unauthenticated);
        } else {
            let tls = tls(&shard.site.bundle().await, Some((&renewed.client_certificate_pem, &operator.key)));
            let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.unwrap();
            OperatorServiceClient::new(line.channel.clone()).list_groups(()).await.unwrap();
            assert_refused(operator.client().list_groups(()).await, Code::Unauthenticated, "CERT_SUPERSEDED");
        }
        wait_for("the record is on its way", || n_puts < bucket.n_puts(part)).await;
    }
    bucket.hold(None);
}
