//! Registration over real sockets: one nonce, one key, and a typed refusal for everything else.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    Shard, Site, assert_refused,
    meddler::Meddler,
    operator::{self, Operator},
    shard_id, tenant, wait_for, wait_until,
    wire::{new_key, register_agent, register_operator, registrar, request},
};
use data_encoding::BASE64URL_NOPAD;
use futures::future::join_all;
use nstance_core::{
    ids::{InstanceId, uuid_v7},
    instance::Phase,
    ports::{
        clock::random,
        secrets::{Secret, Secrets as _},
    },
};
use nstance_identity::{
    ca::NONCE_KEY_SECRET,
    keys::KeyPair,
    nonce::{AgentNonce, new_jti, sign_agent_nonce, sign_operator_nonce},
    peer::{Peer, PeerName},
};
use nstance_proto::v1;
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use nstance_rt::entropy::SeededEntropy;
use nstance_server::{grpc::status::problems_of, vitals::Role};
use nstance_store::{
    faulty::{FaultPlan, FaultyStore},
    memory::MemoryStore,
    records::instance_prefix,
};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use tonic::Code;

fn key(shard: &Shard) -> KeyPair {
    new_key(shard.site.entropy.as_ref())
}

fn peer(answer: &v1::RegisterClientResponse) -> Peer {
    let leaf = CertificateDer::from_pem_slice(&answer.client_certificate_pem).unwrap();
    Peer::from_der(&leaf).unwrap()
}

/// The nonce a VM was made with.
fn nonce(shard: &Shard, id: InstanceId) -> String {
    shard.site.spec(id).bootstrap.nonce_jwt
}

fn seconds(at: Option<prost_types::Timestamp>) -> i64 {
    at.unwrap().seconds * 1000
}

#[tokio::test]
async fn a_good_registration_answers_logs_and_commits() {
    let shard = Shard::start(1).await;
    let (id, key) = (shard.only_vm().await, key(&shard));
    let answer = register_agent(&shard, &nonce(&shard, id), &key).await.unwrap();

    let peer = peer(&answer);
    assert_eq!(peer.name, PeerName::Agent { instance: id, tenant: tenant() });
    assert_eq!(peer.public_key, key.public_key());
    peer.check_validity(shard.site.now()).unwrap();
    assert_eq!(answer.subject, id.to_string());
    assert_eq!(answer.cluster_id, "demo");
    assert_eq!(answer.ca_bundle_pem, shard.site.bundle().await.pem().as_bytes());
    assert_eq!(seconds(answer.expires_at), peer.not_after.as_millis());
    let renew = seconds(answer.renew_after);
    assert!(peer.not_before.as_millis() < renew && renew < peer.not_after.as_millis());

    let logged = shard.site.certlog().await;
    let logged = logged.iter().find(|it| it.subject_id == id.to_string()).expect("in the certificate log");
    assert_eq!(logged.certificates[0].serial, peer.serial);
    assert_eq!(logged.certificates[0].role, "agent");
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.phase(), Phase::Running);
    assert_eq!(record.cert.unwrap().current.serial, peer.serial);
    let registration = record.registration.unwrap();
    assert_eq!(registration.public_key, key.public_key_der());
    assert_eq!(registration.addresses.ip4.as_deref(), Some("10.1.2.3"));
    assert!(record.nonce.used_at.is_some());
}

#[tokio::test]
async fn one_nonce_binds_one_key() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let (id, ours, theirs) = (shard.only_vm().await, key(&shard), key(&shard));
    let nonce = nonce(&shard, id);
    let first = peer(&register_agent(&shard, &nonce, &ours).await.unwrap());

    assert_refused(register_agent(&shard, &nonce, &theirs).await, Code::Unauthenticated, "NONCE_USED");
    let told = operator.hears_of("NonceReplayed", id).await;
    assert_eq!(told.detail["bound_key"], ours.fingerprint());
    assert_eq!(told.detail["refused_key"], theirs.fingerprint());

    let again = peer(&register_agent(&shard, &nonce, &ours).await.unwrap());
    assert_ne!(again.serial, first.serial);
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.registration.unwrap().public_key, ours.public_key_der());
    let cert = record.cert.unwrap();
    assert_eq!(cert.current.serial, again.serial);
    assert_eq!(cert.previous.unwrap().serial, first.serial);
}

#[tokio::test]
async fn concurrent_registration_has_one_winner() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let nonce = nonce(&shard, id);
    let keys: Vec<_> = (0..6).map(|_| key(&shard)).collect();
    let answers = join_all(keys.iter().map(|key| register_agent(&shard, &nonce, key))).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().zip(&keys).partition(|(answer, _)| answer.is_ok());
    assert_eq!(won.len(), 1);
    for (answer, _) in lost {
        assert_refused(answer, Code::Unauthenticated, "NONCE_USED");
    }
    let record = shard.site.record(id).await.unwrap();
    assert_eq!(record.registration.unwrap().public_key, won[0].1.public_key_der());
    assert_eq!(record.cert.unwrap().current.serial, peer(won[0].0.as_ref().unwrap()).serial);
}

#[tokio::test]
async fn two_operators_cannot_share_a_nonce() {
    let shard = Shard::start(0).await;
    let watcher = Operator::on(&shard).await;
    let signer = shard.site.nonce_key().await;
    let nonce = sign_operator_nonce(&signer, &operator::claims(&shard.site));
    let (ours, theirs) = (key(&shard), key(&shard));
    let answer = register_operator(&shard, &nonce, &ours).await.unwrap();
    assert!(matches!(peer(&answer).name, PeerName::Operator { tenant: its, .. } if its == tenant()));
    assert_refused(register_operator(&shard, &nonce, &theirs).await, Code::Unauthenticated, "NONCE_USED");
    watcher.hears("NonceReplayed").await;
    register_operator(&shard, &nonce, &ours).await.unwrap();
}

/// What the server says of a variation of a VM's own nonce, rightly signed.
async fn refuse_variation(change: impl FnOnce(&mut AgentNonce), code: Code, reason: &str) {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let mut claims = shard.claims(id).await;
    let signer = shard.site.nonce_key().await;
    assert_eq!(sign_agent_nonce(&signer, &claims), nonce(&shard, id), "the test signs as the server does");
    change(&mut claims);
    let varied = sign_agent_nonce(&signer, &claims);
    assert_refused(register_agent(&shard, &varied, &key(&shard)).await, code, reason);
    assert_eq!(shard.site.phase(id).await, Some(Phase::Provisioning), "and nothing has changed");
    register_agent(&shard, &nonce(&shard, id), &key(&shard)).await.expect("the right one still works");
}

#[tokio::test]
async fn an_expired_nonce_is_refused() {
    let past = Duration::from_secs(3600);
    let change = |it: &mut AgentNonce| {
        it.issued_at = it.issued_at.minus(past);
        it.expires_at = it.expires_at.minus(past);
    };
    refuse_variation(change, Code::Unauthenticated, "NONCE_EXPIRED").await;
}

#[tokio::test]
async fn a_nonce_from_the_future_is_refused() {
    let ahead = Duration::from_secs(3600);
    let change = |it: &mut AgentNonce| {
        it.issued_at = it.issued_at.plus(ahead);
        it.expires_at = it.expires_at.plus(ahead);
    };
    refuse_variation(change, Code::Unauthenticated, "NONCE_NOT_YET_VALID").await;
}

#[tokio::test]
async fn nonce_of_other_cluster_is_refused() {
    let change = |it: &mut AgentNonce| it.cluster = "other".parse().unwrap();
    refuse_variation(change, Code::InvalidArgument, "WRONG_CLUSTER").await;
}

#[tokio::test]
async fn nonce_of_other_shard_is_refused() {
    let change = |it: &mut AgentNonce| it.shard = "s2".parse().unwrap();
    refuse_variation(change, Code::InvalidArgument, "WRONG_SHARD").await;
}

#[tokio::test]
async fn nonce_of_other_tenant_finds_no_instance() {
    let change = |it: &mut AgentNonce| it.tenant = "other".parse().unwrap();
    refuse_variation(change, Code::Unauthenticated, "INSTANCE_UNKNOWN").await;
}

#[tokio::test]
async fn a_superseded_nonce_is_refused() {
    let change = |it: &mut AgentNonce| it.jti = "0123456789abcdef0123456789abcdef".to_owned();
    refuse_variation(change, Code::Unauthenticated, "NONCE_SUPERSEDED").await;
}

/// A good nonce of an instance that no record and no VM knows.
async fn unknown(shard: &Shard) -> String {
    let mut claims = shard.claims(shard.only_vm().await).await;
    let entropy = shard.site.entropy.as_ref();
    claims.instance = InstanceId::new("knc".parse().unwrap(), uuid_v7(shard.site.now(), random(entropy)));
    claims.jti = new_jti(entropy);
    sign_agent_nonce(&shard.site.nonce_key().await, &claims)
}

#[tokio::test]
async fn an_unknown_instance_is_refused() {
    let shard = Shard::start(1).await;
    let nonce = unknown(&shard).await;
    assert_refused(register_agent(&shard, &nonce, &key(&shard)).await, Code::Unauthenticated, "INSTANCE_UNKNOWN");
}

#[tokio::test]
async fn nobody_is_called_unknown_while_the_provider_does_not_answer() {
    let shard = Shard::start(1).await;
    let nonce = unknown(&shard).await;
    shard.site.cloud.script(Rule::always(Op::Describe, When::Always, Outcome::Hang));
    assert_refused(register_agent(&shard, &nonce, &key(&shard)).await, Code::Unavailable, "NOT_READY");
}

#[tokio::test]
async fn a_nonce_of_the_other_kind_is_refused() {
    let shard = Shard::start(1).await;
    let agents = nonce(&shard, shard.only_vm().await);
    let operators = sign_operator_nonce(&shard.site.nonce_key().await, &operator::claims(&shard.site));
    let key = key(&shard);
    assert_refused(register_agent(&shard, &operators, &key).await, Code::Unauthenticated, "NONCE_WRONG_KIND");
    assert_refused(register_operator(&shard, &agents, &key).await, Code::Unauthenticated, "NONCE_WRONG_KIND");
}

#[tokio::test]
async fn an_operators_nonce_must_fit_cluster_and_tenant() {
    let shard = Shard::start(0).await;
    let (signer, key) = (shard.site.nonce_key().await, key(&shard));
    let mut foreign = operator::claims(&shard.site);
    foreign.cluster = "other".parse().unwrap();
    let nonce = sign_operator_nonce(&signer, &foreign);
    assert_refused(register_operator(&shard, &nonce, &key).await, Code::InvalidArgument, "WRONG_CLUSTER");
    let mut foreign = operator::claims(&shard.site);
    foreign.tenant = "nobody".parse().unwrap();
    let nonce = sign_operator_nonce(&signer, &foreign);
    assert_refused(register_operator(&shard, &nonce, &key).await, Code::FailedPrecondition, "TENANT_UNKNOWN");
}

#[tokio::test]
async fn forged_nonces_are_refused() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let (real, claims) = (nonce(&shard, id), shard.claims(id).await);
    let [header, payload, signature] = real.split('.').collect::<Vec<_>>().try_into().unwrap();
    let none = BASE64URL_NOPAD.encode(br#"{"alg":"none","typ":"JWT","kid":""}"#);
    let hmac = BASE64URL_NOPAD.encode(br#"{"alg":"HS256","typ":"JWT","kid":""}"#);
    let public = shard.site.nonce_key().await.public_key_der();
    let mac = ring::hmac::sign(
        &ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &public),
        format!("{hmac}.{payload}").as_bytes(),
    );
    let text = String::from_utf8(BASE64URL_NOPAD.decode(payload.as_bytes()).unwrap()).unwrap();
    let tampered = BASE64URL_NOPAD.encode(text.replace("\"web\"", "\"db\"").as_bytes());
    let forged = [
        format!("{none}.{payload}."),
        format!("{none}.{payload}.{signature}"),
        format!("{hmac}.{payload}.{}", BASE64URL_NOPAD.encode(mac.as_ref())),
        format!("{header}.{tampered}.{signature}"),
        format!("{header}.{payload}"),
        sign_agent_nonce(&key(&shard), &claims),
        "not a token".to_owned(),
    ];
    for token in forged {
        let answer = register_agent(&shard, &token, &key(&shard)).await;
        assert_refused(answer, Code::Unauthenticated, "NONCE_INVALID");
    }
    assert_eq!(shard.site.phase(id).await, Some(Phase::Provisioning));
}

#[tokio::test]
async fn a_deleted_instance_cannot_register() {
    let shard = Shard::start_with(1, |config| {
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
    })
    .await;
    let id = shard.only_vm().await;
    let nonce = nonce(&shard, id);
    shard.site.cloud.kill(id);
    wait_until("the dead VM's record ends", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    assert_refused(register_agent(&shard, &nonce, &key(&shard)).await, Code::PermissionDenied, "INSTANCE_DELETED");
}

#[tokio::test]
async fn a_bad_request_names_every_field() {
    let shard = Shard::start(1).await;
    let nonce = nonce(&shard, shard.only_vm().await);
    let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let bad = v1::RegisterClientRequest {
        registration_nonce_jwt: nonce.clone(),
        public_key_pem: b"no key".to_vec(),
        private_ipv4: "::1".to_owned(),
        private_ipv6: "10.0.0.1".to_owned(),
        hostname: "no host!".to_owned(),
        fqdn: "-x.example".to_owned(),
        client_version: "x".repeat(65),
        rejoin: Some(v1::RejoinProof::default()),
    };
    let status = client.register_agent(bad).await.unwrap_err();
    let fields = ["registration_nonce_jwt", "public_key_pem", "private_ipv4", "private_ipv6", "hostname", "fqdn"];
    let typed: Vec<_> = problems_of(&status).into_iter().map(|problem| problem.path).collect();
    for field in fields.into_iter().chain(["client_version"]) {
        assert!(status.message().contains(field), "{field} is missing from: {}", status.message());
        assert!(typed.iter().any(|path| path == field), "{field} is missing from: {typed:?}");
    }
    assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
    let long = request(&"x".repeat(5000), &key(&shard));
    let status = client.register_agent(long).await.unwrap_err();
    assert_eq!(problems_of(&status)[0].path, "registration_nonce_jwt");
    assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
    client.register_agent(request(&nonce, &key(&shard))).await.expect("a good one on the same connection");
}

#[tokio::test]
async fn a_nonce_in_the_wrong_field_is_not_told_back() {
    let shard = Shard::start(1).await;
    let nonce = nonce(&shard, shard.only_vm().await);
    let proof = v1::RejoinProof { client_id: nonce.clone(), tenant: nonce.clone(), ..v1::RejoinProof::default() };
    let bad = v1::RegisterClientRequest {
        private_ipv4: nonce.clone(),
        private_ipv6: nonce.clone(),
        hostname: nonce.clone(),
        fqdn: nonce.clone(),
        client_version: nonce.clone(),
        rejoin: Some(proof),
        ..request("", &key(&shard))
    };
    let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    for status in [client.register_agent(bad.clone()).await, client.register_operator(bad).await] {
        let status = status.unwrap_err();
        let told = format!("{} {}", status.message(), String::from_utf8_lossy(status.details()));
        assert!(!told.contains(&nonce[..20]), "{told}");
        assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
    }
}

#[tokio::test]
async fn used_nonce_is_refused_after_failover() {
    let shard = Shard::start(1).await;
    let (id, ours, theirs) = (shard.only_vm().await, key(&shard), key(&shard));
    let nonce = nonce(&shard, id);
    register_agent(&shard, &nonce, &ours).await.unwrap();
    let operators = sign_operator_nonce(&shard.site.nonce_key().await, &operator::claims(&shard.site));
    register_operator(&shard, &operators, &ours).await.unwrap();

    let shard = shard.restart("srv-2").await;
    assert_refused(register_agent(&shard, &nonce, &theirs).await, Code::Unauthenticated, "NONCE_USED");
    assert_refused(register_operator(&shard, &operators, &theirs).await, Code::Unauthenticated, "NONCE_USED");
    register_agent(&shard, &nonce, &ours).await.expect("a lost answer costs nothing, whoever leads");
}

#[tokio::test]
async fn an_agent_faster_than_its_record_waits_for_it() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = Site::on(bucket.clone(), FakeOptions::default());
    bucket.hold(Some(&instance_prefix(&shard_id())));
    let shard = Shard::start_on(site, 1, |_| {}).await;
    wait_for("the VM stands", || shard.site.standing().len() == 1).await;
    let id = shard.site.standing()[0];
    assert!(shard.site.records().await.is_empty(), "its intent is not durable yet");
    let (nonce, key) = (nonce(&shard, id), key(&shard));
    let (mut client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let mut later = client.clone();
    let register = client.register_agent(request(&nonce, &key));
    tokio::pin!(register);
    // What is sent after it on the same connection is answered before it.
    tokio::select! {
        biased;
        early = &mut register => panic!("neither accepted nor called unknown: {early:?}"),
        answer = later.register_agent(request("forged", &key)) => {
            assert_refused(answer, Code::Unauthenticated, "NONCE_INVALID");
        }
    }
    bucket.hold(None);
    register.await.expect("accepted once the record is there");
    assert_eq!(shard.site.phase(id).await, Some(Phase::Running));
}

#[tokio::test]
async fn a_stalled_leader_issues_nothing() {
    let store =
        Arc::new(FaultyStore::new(Arc::new(MemoryStore::new()), Arc::new(SeededEntropy::new(5)), FaultPlan::default()));
    let site = Site::on(store.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 1, |config| {
        config["server"]["leader_election"] =
            serde_json::json!({ "ttl": "2s", "renew_interval": "400ms", "margin": "500ms" });
    })
    .await;
    let id = shard.only_vm().await;
    let nonce = nonce(&shard, id);
    let (client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let logged = shard.site.certlog().await.len();
    store.set_unreachable(true);
    wait_for("the lease runs out", || shard.server.vitals.role() == Role::Stalled).await;
    let answer = client.clone().register_agent(request(&nonce, &key(&shard))).await;
    assert_refused(answer, Code::Unavailable, "LEASE_STALLED");
    store.set_unreachable(false);
    assert_eq!(shard.site.certlog().await.len(), logged);
    assert_eq!(shard.site.phase(id).await, Some(Phase::Provisioning));
    wait_for("the lease is renewed", || shard.server.vitals.role() == Role::Leading).await;
    client.clone().register_agent(request(&nonce, &key(&shard))).await.expect("the retry is served");
}

#[tokio::test]
async fn no_secret_is_in_any_record() {
    let shard = Shard::start(2).await;
    let ids = shard.vms(2).await;
    let operator = Operator::on(&shard).await;
    let keys: Vec<_> = ids.iter().map(|_| key(&shard)).collect();
    for (id, key) in ids.iter().zip(&keys) {
        register_agent(&shard, &nonce(&shard, *id), key).await.unwrap();
        assert_refused(
            register_agent(&shard, &nonce(&shard, *id), &operator.key).await,
            Code::Unauthenticated,
            "NONCE_USED",
        );
    }
    let site = &shard.site;
    let mut secrets: Vec<String> = ids.iter().map(|id| nonce(&shard, *id)).collect();
    secrets.push("PRIVATE KEY".to_owned());
    let mut seen = 0;
    for listed in site.bucket.list("").await.unwrap() {
        let body = site.bucket.get(&listed.key).await.unwrap().body;
        let text = String::from_utf8_lossy(&body);
        for secret in &secrets {
            // The signature is what makes a nonce; the rest of it can be had from the record.
            let telling = secret.rsplit('.').next().unwrap();
            assert!(!text.contains(telling), "{} holds a secret", listed.key);
        }
        seen += 1;
    }
    assert!(10 < seen);
    let told = format!("{:?}{:?}", operator.events("InstanceRegistered"), operator.events("NonceReplayed"));
    assert!(secrets.iter().all(|secret| !told.contains(secret.rsplit('.').next().unwrap())));
}

#[tokio::test]
async fn the_registration_port_tells_its_health() {
    let shard = Shard::start(0).await;
    let (_, line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let mut client = tonic_health::pb::health_client::HealthClient::new(line.channel.clone());
    let answer = client.check(tonic_health::pb::HealthCheckRequest::default()).await.unwrap().into_inner();
    assert_eq!(answer.status(), tonic_health::pb::health_check_response::ServingStatus::Serving);
}

#[tokio::test]
async fn an_oversized_request_is_refused() {
    let shard = Shard::start(1).await;
    let nonce = nonce(&shard, shard.only_vm().await);
    let (client, _line) = registrar(&shard, Ipv4Addr::LOCALHOST).await;
    let mut large = request(&nonce, &key(&shard));
    large.public_key_pem = vec![b'x'; 20_000];
    assert_refused(client.clone().register_agent(large).await, Code::ResourceExhausted, "MESSAGE_TOO_LARGE");
    register_agent(&shard, &nonce, &key(&shard)).await.expect("and nothing else is touched");
}

#[tokio::test]
async fn flood_leaves_registration_working() {
    let shard = Shard::start(1).await;
    let nonce = nonce(&shard, shard.only_vm().await);
    // One hostile source: after twenty failures it is not listened to any more, and nobody else notices.
    let (client, _line) = registrar(&shard, Ipv4Addr::new(127, 0, 0, 66)).await;
    // It wins back one every three seconds, and uses it up at once.
    let forged = async || client.clone().register_agent(request("forged", &key(&shard))).await.unwrap_err().code();
    let mut n_heard = 0;
    while forged().await == Code::Unauthenticated {
        n_heard += 1;
        assert!(n_heard < 200, "it is listened to for ever");
    }
    assert!(20 <= n_heard, "{n_heard}");
    assert_eq!(forged().await, Code::ResourceExhausted);
    let refused = client.clone().register_agent(request(&nonce, &key(&shard))).await;
    let hint = nstance_proto::refusal::retry_of(refused.as_ref().expect_err("it failed too often"));
    assert!(
        hint.is_some_and(|hint| Duration::from_secs(3) < hint),
        "it takes three seconds to be heard again: {hint:?}"
    );
    assert_refused(refused, Code::ResourceExhausted, "RATE_LIMITED");
    register_agent(&shard, &nonce, &key(&shard)).await.expect("another source is not touched");
}

#[tokio::test]
async fn a_new_nonce_key_before_the_old_one_signs_and_both_are_known() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let (older, newer, unknown) = (shard.site.nonce_key().await, key(&shard), key(&shard));
    let both = [newer.to_pkcs8_pem(), older.to_pkcs8_pem()].map(|it| it.as_str().to_owned()).concat();
    shard.site.secrets().put(NONCE_KEY_SECRET, &Secret(both.into_bytes())).await.unwrap();
    let shard = shard.restart("srv-2").await;
    register_agent(&shard, &nonce(&shard, id), &key(&shard)).await.expect("a machine that was made before");
    for signer in [&older, &newer] {
        let nonce = sign_operator_nonce(signer, &operator::claims(&shard.site));
        register_operator(&shard, &nonce, &key(&shard)).await.unwrap();
    }
    let forged = sign_operator_nonce(&unknown, &operator::claims(&shard.site));
    assert_refused(register_operator(&shard, &forged, &key(&shard)).await, Code::Unauthenticated, "NONCE_INVALID");
    // The first one signs.
    let config = Some(v1::GroupConfig { size: Some(2), ..v1::GroupConfig::default() });
    let larger = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
    Operator::on(&shard).await.client().upsert_group(larger).await.unwrap();
    let made = shard.vms(2).await.into_iter().find(|it| *it != id).unwrap();
    let kid = BASE64URL_NOPAD.decode(nonce(&shard, made).split('.').next().unwrap().as_bytes()).unwrap();
    assert!(String::from_utf8(kid).unwrap().contains(&newer.fingerprint()));
}
