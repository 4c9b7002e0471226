//! Rejoin over real sockets: the key of a record opens the door again, a copy of it does not for long.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    Shard, Site, assert_refused,
    fleet::Agent,
    meddler::Meddler,
    operator::{Operator, claims},
    shard_id, tenant, wait_until,
    wire::{dial, new_key, register_operator, registrar, request, tls},
};
use nstance_core::{
    ids::{ClusterId, Epoch, InstanceId, OperatorId, Tenant, uuid_v7},
    ports::clock::random,
};
use nstance_identity::{
    keys::KeyPair,
    nonce::sign_operator_nonce,
    peer::{Peer, PeerName},
    rejoin::RejoinClaim,
    role::Role,
};
use nstance_proto::v1::{self, operator_service_client::OperatorServiceClient};
use nstance_providers::fake::FakeOptions;
use nstance_store::{
    cas::Records,
    fence::Fence,
    memory::MemoryStore,
    records::{self, operator::OperatorRecord, operator_key},
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tonic::{Code, Status};

type Answer = Result<v1::RegisterClientResponse, Status>;

/// A group of one whose agent is registered.
async fn one_agent() -> (Shard, Agent) {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    (shard, agent)
}

/// What a client signs; each field may be wrong.
#[derive(Clone)]
struct Claim {
    cluster: ClusterId,
    role: Role,
    tenant: Tenant,
    client_id: String,
    counter: u64,
}

impl Claim {
    fn agent(id: InstanceId, counter: u64) -> Self {
        let (cluster, role) = ("demo".parse().unwrap(), Role::Agent);
        Self { cluster, role, tenant: tenant(), client_id: id.to_string(), counter }
    }

    fn operator(operator: &Operator, counter: u64) -> Self {
        let (cluster, role) = ("demo".parse().unwrap(), Role::Operator);
        Self { cluster, role, tenant: tenant(), client_id: operator.id.to_string(), counter }
    }

    fn sign(&self, key: &KeyPair) -> Vec<u8> {
        let Self { cluster, role, tenant, client_id, counter } = self;
        RejoinClaim { cluster, role: *role, tenant, client_id, counter: *counter }.sign(key)
    }

    /// The proof that says this, signed over that.
    fn over(&self, signed: &Self, key: &KeyPair) -> v1::RejoinProof {
        v1::RejoinProof {
            client_id: self.client_id.clone(),
            tenant: self.tenant.to_string(),
            counter: self.counter,
            signature: signed.sign(key),
        }
    }

    fn proof(&self, key: &KeyPair) -> v1::RejoinProof {
        self.over(self, key)
    }
}

fn asking(proof: v1::RejoinProof, key: &KeyPair) -> v1::RegisterClientRequest {
    v1::RegisterClientRequest { rejoin: Some(proof), ..request("", key) }
}

async fn rejoin_agent(shard: &Shard, proof: v1::RejoinProof, key: &KeyPair) -> Answer {
    let (mut client, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    client.register_agent(asking(proof, key)).await.map(tonic::Response::into_inner)
}

async fn rejoin_operator(shard: &Shard, proof: v1::RejoinProof, key: &KeyPair) -> Answer {
    let (mut client, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    client.register_operator(asking(proof, key)).await.map(tonic::Response::into_inner)
}

/// An agent's rejoin with this counter, all else being right.
async fn count(shard: &Shard, agent: &Agent, counter: u64) -> Answer {
    rejoin_agent(shard, Claim::agent(agent.id, counter).proof(&agent.key), &agent.key).await
}

fn peer(answer: &v1::RegisterClientResponse) -> Peer {
    let leaf = CertificateDer::from_pem_slice(&answer.client_certificate_pem).unwrap();
    Peer::from_der(&leaf).unwrap()
}

async fn operator_record(site: &Site, operator: OperatorId) -> OperatorRecord {
    let key = operator_key(&tenant(), &operator);
    let object = site.bucket.get(&key).await.unwrap();
    records::decode_object::<OperatorRecord>(&key, object).unwrap().value
}

#[tokio::test]
async fn an_agent_whose_certificate_ran_out_comes_back_with_its_key() {
    let (shard, agent) = one_agent().await;
    let before = shard.site.record(agent.id).await.unwrap();
    shard.site.clock.jump(25 * 3600);
    assert_refused(Err::<(), _>(agent.knock(&shard.leader).await), Code::Unauthenticated, "CERT_EXPIRED");
    // The lease is in doubt after such a jump; its next renewal opens the door again.
    let mut answer = None;
    wait_until("the door is open", async || match count(&shard, &agent, 1).await {
        Ok(found) => {
            answer = Some(found);
            true
        }
        Err(status) => {
            assert_eq!(status.code(), Code::Unavailable, "{status}");
            false
        }
    })
    .await;
    let answer = answer.unwrap();
    let peer = peer(&answer);
    assert_eq!(peer.name, PeerName::Agent { instance: agent.id, tenant: tenant() });
    assert_eq!(peer.public_key, agent.key.public_key());
    assert_eq!(answer.cluster_id, "demo");
    assert_eq!(answer.ca_bundle_pem, shard.site.bundle().await.pem().as_bytes());
    let back = Agent { chain: answer.client_certificate_pem.clone(), ..agent.clone() };
    assert_eq!(back.knock(&shard.leader).await.code(), Code::InvalidArgument, "the new certificate passes");

    let record = shard.site.record(agent.id).await.unwrap();
    assert_eq!(record.rejoin.as_ref().unwrap().count, 1);
    assert_eq!(record.cert.unwrap().current.serial, peer.serial);
    assert_eq!(record.registration, before.registration, "it is registered once");
    let logged = shard.site.certlog().await;
    assert!(logged.iter().flat_map(|it| &it.certificates).any(|it| it.serial == peer.serial && it.role == "agent"));
}

#[tokio::test]
async fn an_operator_comes_back_with_its_key() {
    let shard = Shard::start(0).await;
    let (operator, watcher) = (Operator::on(&shard).await, Operator::on(&shard).await);
    let before = operator_record(&shard.site, operator.id).await;
    let proof = Claim::operator(&operator, 1).proof(&operator.key);
    let answer = rejoin_operator(&shard, proof, &operator.key).await.unwrap();
    let peer = peer(&answer);
    assert_eq!(peer.name, PeerName::Operator { operator: operator.id, tenant: tenant() });
    let record = operator_record(&shard.site, operator.id).await;
    assert_eq!(record.rejoin.unwrap().count, 1);
    assert_eq!(record.cert.current.serial, peer.serial);
    assert_eq!(record.cert.previous.unwrap().serial, before.cert.current.serial);
    assert_eq!(record.nonce_jti, before.nonce_jti);
    let logged = shard.site.certlog().await;
    assert!(logged.iter().flat_map(|it| &it.certificates).any(|it| it.serial == peer.serial && it.role == "operator"));
    let by_it = || watcher.events("CertificateIssued").into_iter().find(|told| told.actor == operator.id.to_string());
    wait_until("it is told", async || by_it().is_some()).await;
    assert_eq!(by_it().unwrap().detail["counter"], "1");
    let tls = tls(&shard.site.bundle().await, Some((&answer.client_certificate_pem, &operator.key)));
    let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.unwrap();
    OperatorServiceClient::new(line.channel.clone()).list_groups(()).await.unwrap();
}

#[tokio::test]
async fn a_proof_that_does_not_hold_is_refused_without_detail() {
    let (shard, agent) = one_agent().await;
    let operator = Operator::on(&shard).await;
    let (right, key) = (Claim::agent(agent.id, 1), &agent.key);
    let (stranger, entropy) = (new_key(shard.site.entropy.as_ref()), shard.site.entropy.as_ref());
    let unknown = InstanceId::new("knc".parse().unwrap(), uuid_v7(shard.site.now(), random(entropy)));
    let other: Tenant = "other".parse().unwrap();
    let cases: Vec<(&str, v1::RejoinProof, &KeyPair)> = vec![
        ("another key", right.proof(&stranger), &stranger),
        ("a key that did not sign", right.proof(key), &stranger),
        ("signed by another", right.proof(&stranger), key),
        ("another cluster", right.over(&Claim { cluster: "other".parse().unwrap(), ..right.clone() }, key), key),
        ("another tenant", right.over(&Claim { tenant: other.clone(), ..right.clone() }, key), key),
        ("another role", right.over(&Claim { role: Role::Operator, ..right.clone() }, key), key),
        ("another counter", right.over(&Claim { counter: 2, ..right.clone() }, key), key),
        ("no signature", v1::RejoinProof { signature: Vec::new(), ..right.proof(key) }, key),
        ("a record of nobody", Claim::agent(unknown, 1).proof(key), key),
        ("a record of another tenant", Claim { tenant: other.clone(), ..right.clone() }.proof(key), key),
    ];
    let mut words = Vec::new();
    for (what, proof, key) in cases {
        let status = rejoin_agent(&shard, proof, key).await.expect_err(what);
        words.push(status.message().to_owned());
        assert_refused(Err::<(), _>(status), Code::Unauthenticated, "REJOIN_REFUSED");
    }
    let right = Claim::operator(&operator, 1);
    let cases = vec![
        ("another key", right.proof(&stranger), &stranger),
        ("another role", right.over(&Claim { role: Role::Agent, ..right.clone() }, &operator.key), &operator.key),
        ("another tenant", Claim { tenant: other, ..right.clone() }.proof(&operator.key), &operator.key),
    ];
    for (what, proof, key) in cases {
        let status = rejoin_operator(&shard, proof, key).await.expect_err(what);
        words.push(status.message().to_owned());
        assert_refused(Err::<(), _>(status), Code::Unauthenticated, "REJOIN_REFUSED");
    }
    words.dedup();
    assert_eq!(words.len(), 1, "nobody learns why: {words:?}");
    assert!(shard.site.record(agent.id).await.unwrap().rejoin.is_none());
    assert!(operator.events("RejoinRefused").is_empty());
}

#[tokio::test]
async fn a_record_without_registration_has_no_key_to_rejoin_with() {
    let shard = Shard::start(1).await;
    let (id, key) = (shard.only_vm().await, new_key(shard.site.entropy.as_ref()));
    let answer = rejoin_agent(&shard, Claim::agent(id, 1).proof(&key), &key).await;
    assert_refused(answer, Code::Unauthenticated, "REJOIN_REFUSED");
    assert!(shard.site.record(id).await.unwrap().cert.is_none());
}

#[tokio::test]
async fn a_bad_proof_names_every_field() {
    let (shard, agent) = one_agent().await;
    let bad = v1::RejoinProof { client_id: "no id".to_owned(), tenant: "No:Tenant".to_owned(), ..Default::default() };
    for answer in [rejoin_agent(&shard, bad.clone(), &agent.key).await, rejoin_operator(&shard, bad, &agent.key).await]
    {
        let message = answer.as_ref().unwrap_err().message().to_owned();
        assert!(message.contains("rejoin.client_id") && message.contains("rejoin.tenant"), "{message}");
        assert_refused(answer, Code::InvalidArgument, "BAD_REQUEST");
    }
    let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let both = v1::RegisterClientRequest {
        registration_nonce_jwt: "x".to_owned(),
        ..asking(Claim::agent(agent.id, 1).proof(&agent.key), &agent.key)
    };
    assert_refused(client.register_agent(both).await, Code::InvalidArgument, "BAD_REQUEST");
    let neither = request("", &agent.key);
    assert_refused(client.register_agent(neither).await, Code::InvalidArgument, "BAD_REQUEST");
}

#[tokio::test]
async fn a_lost_answer_is_repeated() {
    let (shard, agent) = one_agent().await;
    let first = peer(&count(&shard, &agent, 1).await.unwrap());
    let again = peer(&count(&shard, &agent, 1).await.unwrap());
    assert_ne!(first.serial, again.serial);
    let record = shard.site.record(agent.id).await.unwrap();
    assert_eq!(record.rejoin.unwrap().count, 1);
    let cert = record.cert.unwrap();
    assert_eq!((cert.current.serial, cert.previous.unwrap().serial), (again.serial, first.serial));
    let operator = Operator::on(&shard).await;
    let proof = Claim::operator(&operator, 1).proof(&operator.key);
    for _ in 0..2 {
        rejoin_operator(&shard, proof.clone(), &operator.key).await.unwrap();
    }
    assert_eq!(operator_record(&shard.site, operator.id).await.rejoin.unwrap().count, 1);
}

#[tokio::test]
async fn a_repeated_registration_of_an_operator_keeps_what_its_record_gained() {
    let shard = Shard::start(0).await;
    let (claims, key) = (claims(&shard.site), new_key(shard.site.entropy.as_ref()));
    let nonce = sign_operator_nonce(&shard.site.nonce_key().await, &claims);
    let registered = peer(&register_operator(&shard, &nonce, &key).await.unwrap());
    let (cluster, role, client_id) = ("demo".parse().unwrap(), Role::Operator, claims.operator.to_string());
    let claim = Claim { cluster, role, tenant: tenant(), client_id, counter: 1 };
    let rejoined = peer(&rejoin_operator(&shard, claim.proof(&key), &key).await.unwrap());
    let before = operator_record(&shard.site, claims.operator).await;
    assert_eq!(before.cert.previous.as_ref().unwrap().serial, registered.serial);
    let again = peer(&register_operator(&shard, &nonce, &key).await.unwrap());
    let after = operator_record(&shard.site, claims.operator).await;
    assert_eq!((&after.rejoin, after.registered_at), (&before.rejoin, before.registered_at));
    assert_eq!(after.cert.current.serial, again.serial);
    assert_eq!(after.cert.previous.unwrap().serial, rejoined.serial);
}

#[tokio::test]
async fn cloned_key_is_detected() {
    let (shard, agent) = one_agent().await;
    let operator = Operator::on(&shard).await;
    let clone = agent.clone();
    count(&shard, &agent, 1).await.unwrap();
    count(&shard, &agent, 2).await.unwrap();
    let before = shard.site.record(agent.id).await.unwrap();
    // The copy was made before the first of them.
    assert_refused(count(&shard, &clone, 1).await, Code::PermissionDenied, "REJOIN_COUNTER");
    let told = operator.hears_of("RejoinRefused", agent.id).await;
    assert_eq!(told.detail["key"], agent.key.fingerprint());
    assert_eq!(told.detail["counter"], "1");
    assert_eq!(shard.site.record(agent.id).await.unwrap(), before, "and nothing has changed");
}

#[tokio::test]
async fn a_cloned_operator_key_is_detected() {
    let shard = Shard::start(0).await;
    let (operator, watcher) = (Operator::on(&shard).await, Operator::on(&shard).await);
    let proof = |counter| Claim::operator(&operator, counter).proof(&operator.key);
    for counter in [1, 2] {
        rejoin_operator(&shard, proof(counter), &operator.key).await.unwrap();
    }
    let answer = rejoin_operator(&shard, proof(1), &operator.key).await;
    assert_refused(answer, Code::PermissionDenied, "REJOIN_COUNTER");
    assert_eq!(watcher.hears("RejoinRefused").await.detail["operator"], operator.id.to_string());
}

#[tokio::test]
async fn a_counter_that_skips_is_refused() {
    let (shard, agent) = one_agent().await;
    for counter in [0, 2, u64::MAX] {
        assert_refused(count(&shard, &agent, counter).await, Code::PermissionDenied, "REJOIN_COUNTER");
    }
    count(&shard, &agent, 1).await.unwrap();
    for counter in [0, 3] {
        assert_refused(count(&shard, &agent, counter).await, Code::PermissionDenied, "REJOIN_COUNTER");
    }
    count(&shard, &agent, 2).await.unwrap();
}

#[tokio::test]
async fn of_racing_rejoins_only_equal_ones_succeed() {
    let (shard, agent) = one_agent().await;
    let answers = futures::future::join_all([1, 1, 2, 3].map(|counter| count(&shard, &agent, counter))).await;
    assert!(answers[0].is_ok() && answers[1].is_ok());
    for answer in answers {
        match answer {
            Ok(_) => {}
            Err(status) => assert_refused(Err::<(), _>(status), Code::PermissionDenied, "REJOIN_COUNTER"),
        }
    }
}

#[tokio::test]
async fn the_counter_outlives_its_leader() {
    let (shard, agent) = one_agent().await;
    count(&shard, &agent, 1).await.unwrap();
    count(&shard, &agent, 2).await.unwrap();
    let shard = shard.restart("srv-2").await;
    assert_refused(count(&shard, &agent, 1).await, Code::PermissionDenied, "REJOIN_COUNTER");
    count(&shard, &agent, 2).await.expect("a lost answer costs nothing, whoever leads");
    let answer = count(&shard, &agent, 3).await.unwrap();
    let back = Agent { chain: answer.client_certificate_pem, ..agent };
    assert_eq!(back.knock(&shard.leader).await.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_deleted_instance_cannot_rejoin() {
    let shard = Shard::start_with(1, |config| {
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
    })
    .await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    shard.site.cloud.kill(id);
    let deleted = async || shard.site.record(id).await.unwrap().delete.is_some();
    wait_until("the dead VM is deleted", deleted).await;
    assert_refused(count(&shard, &agent, 1).await, Code::PermissionDenied, "INSTANCE_DELETED");
}

#[tokio::test]
async fn a_vm_that_was_seen_dead_cannot_rejoin() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = Site::on(bucket.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 1, |config| {
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
    })
    .await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    let state = async || operator.instances().await.into_iter().find(|it| it.instance_id == id.to_string());
    // Its end is seen but cannot be written down.
    bucket.hold(Some("/instance/"));
    shard.site.cloud.kill(id);
    wait_until("it is seen dead", async || state().await.unwrap().provider_state == "gone").await;
    assert!(shard.site.record(id).await.unwrap().delete.is_none());
    assert_refused(count(&shard, &agent, 1).await, Code::PermissionDenied, "INSTANCE_DELETED");
    bucket.hold(None);
}

#[tokio::test]
async fn an_agent_rejoins_while_nobody_knows_its_vm() {
    let (shard, agent) = one_agent().await;
    shard.site.cloud.outage(true);
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let seen = operator.instances().await.remove(0).provider_state;
    assert!(["unknown", "not-asked"].contains(&seen.as_str()), "{seen}");
    count(&shard, &agent, 1).await.unwrap();
    shard.site.cloud.outage(false);
}

#[tokio::test]
async fn a_revoked_operator_cannot_rejoin() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    operator.revoke(&shard.site).await;
    let proof = Claim::operator(&operator, 1).proof(&operator.key);
    let answer = rejoin_operator(&shard, proof, &operator.key).await;
    assert_refused(answer, Code::PermissionDenied, "OPERATOR_REVOKED");
}

#[tokio::test]
async fn an_operator_that_was_away_too_long_needs_a_nonce() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let shard = Shard::start(0).await;
    let (clock, entropy) = (shard.site.clock.clone(), shard.site.entropy.clone());
    let records = Records::new(shard.site.bucket.clone(), shard_id(), "admin/test".to_owned(), clock, entropy);
    for (days, welcome) in [(89, true), (90, false)] {
        let operator = Operator::on(&shard).await;
        let current = records.read_operator(&tenant(), &operator.id).await.unwrap().unwrap();
        let ended = shard.site.now().minus(days * DAY);
        let age = |it: &OperatorRecord| {
            let mut it = it.clone();
            it.cert.current.not_after = ended;
            Some(it)
        };
        records.update_operator(Fence::Epoch(Epoch(0)), &current, age).await.unwrap();
        let proof = Claim::operator(&operator, 1).proof(&operator.key);
        let answer = rejoin_operator(&shard, proof, &operator.key).await;
        if welcome {
            answer.unwrap();
        } else {
            assert_refused(answer, Code::PermissionDenied, "REJOIN_TOO_OLD");
        }
    }
}

#[tokio::test]
async fn no_rejoin_is_answered_before_it_is_logged_and_recorded() {
    for part in ["/certlog/", "/instance/"] {
        let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
        let shard = Shard::start_on(Site::on(bucket.clone(), FakeOptions::default()), 1, |_| {}).await;
        let id = shard.only_vm().await;
        let agent = Agent::register(&shard, id).await;
        let (client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
        let n_puts = bucket.n_puts(part);
        bucket.hold(Some(part));
        let proof = Claim::agent(id, 1).proof(&agent.key);
        let mut early = client.clone();
        let rejoining = early.register_agent(asking(proof, &agent.key));
        tokio::pin!(rejoining);
        // A write of this kind is under way, and what is sent after it on the same connection is answered before it.
        let later = async {
            wait_until("the write is held", async || n_puts < bucket.n_puts(part)).await;
            client.clone().register_agent(request("forged", &agent.key)).await
        };
        tokio::select! {
            biased;
            answer = &mut rejoining => panic!("answered before {part} was written: {answer:?}"),
            answer = later => assert_refused(answer, Code::Unauthenticated, "NONCE_INVALID"),
        }
        bucket.hold(None);
        rejoining.await.expect("answered once both are durable");
    }
}
