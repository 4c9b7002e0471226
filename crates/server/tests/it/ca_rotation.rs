//! What a server shows and whom it trusts changes while it runs, and nobody who is connected notices.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use crate::common::{
    LIMIT, Shard, Site,
    fleet::{Agent, Reporting, report},
    meddler::Meddler,
    operator::Operator,
    shard_id, tenant, wait_for, wait_until,
    wire::{dial, request, tls},
};
use nstance_admin::rotation::{Rotation, RotationError, Stage};
use nstance_core::ports::{objects::Condition, secrets::Secrets as _};
use nstance_identity::{
    ca::{Bundle, CA_KEY_SECRET, CaProfile, ca_key_secret},
    peer::Peer,
    rejoin::RejoinClaim,
    role::Role,
};
use nstance_proto::v1::{
    self, agent_service_client::AgentServiceClient, registration_service_client::RegistrationServiceClient,
};
use nstance_providers::fake::FakeOptions;
use nstance_store::{
    cas::Records,
    memory::MemoryStore,
    records::{ca_crt_key, instance_key},
};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::{net::TcpStream, task::JoinSet};
use tokio_rustls::TlsConnector;
use tonic::Code;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Clients whose certificates outlive the leaps of these tests.
async fn shard_of(size: u32) -> Shard {
    shard_on(Site::new(), size).await
}

async fn shard_on(site: Site, size: u32) -> Shard {
    Shard::start_on(site, size, |config| {
        let ttl = json!({ "ttl": "720h" });
        config["certificates"] = json!({ "agent": ttl, "operator": ttl });
    })
    .await
}

/// What a server shows on a port to somebody who trusts this bundle, or what is wrong with it.
async fn shown(address: &str, bundle: &Bundle) -> Result<Peer, String> {
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let connected = TlsConnector::from(tls(bundle, None)).connect(name, stream).await;
    let connected = connected.map_err(|error| error.to_string())?;
    let leaf = connected.get_ref().1.peer_certificates().unwrap()[0].clone();
    Ok(Peer::from_der(&leaf).unwrap())
}

/// RefreshConfig, once the lease that ran out with a leap is renewed.
async fn refresh(operator: &Operator) {
    let request = v1::RefreshConfigRequest::default();
    wait_until("a refresh", async || operator.client().refresh_config(request).await.is_ok()).await;
}

/// A stream whose presence is all that counts, however far the clock leaps.
async fn connect(shard: &Shard, agent: &Agent) -> Reporting {
    Reporting::open(agent.dial(&shard.leader.advertised.agent).await.unwrap(), agent.id, 0).await
}

/// Shows that a stream is open from end to end.
async fn still_reports(shard: &Shard, agent: &Agent, stream: &Reporting) {
    let before = shard.server.metrics.reports.get();
    let change = report(agent.id, v1::ReportKind::Change);
    stream.reports.send(v1::HealthReportRequest { interval_ms: 0, ..change }).await.expect("an open stream");
    wait_for("the report is taken", || before < shard.server.metrics.reports.get()).await;
}

#[tokio::test]
async fn server_certificate_rotates_live() {
    let shard = shard_of(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    let stream = connect(&shard, &agent).await;
    still_reports(&shard, &agent, &stream).await;
    let address = &shard.leader.advertised.registration;
    let before = shown(address, &agent.bundle).await.unwrap();
    refresh(&operator).await;
    assert_eq!(shown(address, &agent.bundle).await.unwrap().serial, before.serial, "it is not due yet");

    shard.site.clock.leap(5 * DAY);
    refresh(&operator).await;
    let after = shown(address, &agent.bundle).await.unwrap();
    assert_ne!(after.serial, before.serial);
    assert!(before.not_after < after.not_after);
    assert_eq!((after.name, after.public_key), (before.name, before.public_key));
    let logged = shard.site.certlog().await;
    assert!(logged.iter().flat_map(|it| &it.certificates).any(|it| it.serial == after.serial && it.role == "server"));
    let expiry = shard.server.metrics.certificate_expiry.get();
    let wanted = Duration::from_millis(after.not_after.as_millis().try_into().unwrap()).as_secs_f64();
    assert!((expiry - wanted).abs() < 1.0, "{expiry}");
    // Whoever was connected still is, and whoever comes gets in.
    still_reports(&shard, &agent, &stream).await;
    assert_eq!(operator.group("web").await.size, 1);
    assert!(operator.events("InstanceLost").is_empty());
    agent.dial(&shard.leader.advertised.agent).await.unwrap();
}

/// The admin's hand on the CA of a site.
fn rotation(site: &Arc<Site>) -> Rotation {
    let (clock, entropy) = (site.clock.clone(), site.entropy.clone());
    let writer = "admin/test";
    let records = Records::new(site.bucket.clone(), shard_id(), writer.to_owned(), clock.clone(), entropy.clone());
    let profile = CaProfile::of("demo".parse().unwrap());
    Rotation::new(site.bucket.clone(), Arc::new(site.secrets()), records, profile, writer, clock, entropy)
}

fn reasons(refused: Result<impl std::fmt::Debug, RotationError>) -> Vec<String> {
    match refused {
        Err(RotationError::Refused { reasons, .. }) => reasons,
        other => panic!("not refused: {other:?}"),
    }
}

fn is_wrong_stage(refused: Result<impl std::fmt::Debug, RotationError>) -> bool {
    matches!(refused, Err(RotationError::WrongStage { .. }))
}

/// Who issued the certificate that an agent's record names.
async fn issuer(shard: &Shard, agent: &Agent) -> String {
    shard.site.record(agent.id).await.unwrap().cert.unwrap().current.issuer
}

/// RenewCertificate on a connection of its own, once the lease that ran out with a leap is renewed.
async fn renew(shard: &Shard, agent: &mut Agent) {
    let mut renewed = None;
    wait_until("a renewal", async || {
        let line = agent.dial(&shard.leader.advertised.agent).await.expect("the agent port");
        let public_key_pem = agent.key.public_key_pem().into_bytes();
        let mut client = AgentServiceClient::new(line.channel.clone());
        match client.renew_certificate(v1::RenewCertificateRequest { public_key_pem }).await {
            Ok(answer) => renewed = Some(answer.into_inner()),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
        }
        renewed.is_some()
    })
    .await;
    let answer = renewed.unwrap();
    let newer = Bundle::parse(&answer.ca_bundle_pem).unwrap();
    assert!(agent.bundle.may_become(&newer), "an agent takes only what overlaps");
    agent.chain = answer.client_certificate_pem;
    agent.bundle = newer;
}

/// A call with the certificate at hand, as an agent that renewed makes one at once. The one before passes no longer, and
/// its record soon says so.
async fn use_it(shard: &Shard, agent: &Agent) {
    let line = agent.dial(&shard.leader.advertised.agent).await.expect("the agent port");
    let mut client = AgentServiceClient::new(line.channel.clone());
    let refused = client.submit_public_keys(v1::PublicKeysRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied, "it is let in, and names nobody: {refused}");
    wait_until("a retired serial", async || {
        shard.site.record(agent.id).await.unwrap().cert.unwrap().previous.is_none()
    })
    .await;
}

/// RenewCertificate of the operator; it goes on with the connection that it has.
async fn renew_operator(operator: &Operator) -> v1::RenewCertificateResponse {
    let public_key_pem = operator.key.public_key_pem().into_bytes();
    let mut renewed = None;
    wait_until("an operator's renewal", async || {
        let request = v1::RenewCertificateRequest { public_key_pem: public_key_pem.clone() };
        match operator.client().renew_certificate(request).await {
            Ok(answer) => renewed = Some(answer.into_inner()),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
        }
        renewed.is_some()
    })
    .await;
    renewed.unwrap()
}

const OVERLAP: Duration = Duration::from_secs(16 * 60);
/// A subject gets one certificate in ten seconds.
const PAUSE: Duration = Duration::from_secs(11);

#[tokio::test]
async fn a_rotation_ends_nobodys_session() {
    let shard = shard_of(2).await;
    let ids = shard.vms(2).await;
    let mut agents = [Agent::register(&shard, ids[0]).await, Agent::register(&shard, ids[1]).await];
    let mut operator = Operator::on(&shard).await;
    let streams = [connect(&shard, &agents[0]).await, connect(&shard, &agents[1]).await];
    let rotation = rotation(&shard.site);
    let a = shard.site.bundle().await.issuer().fingerprint.clone();
    let before = operator.group("web").await;
    let registration = &shard.leader.advertised.registration;

    // [A, B]: trusted by all who ask, issuing nothing.
    let b = match rotation.start().await.unwrap().bundle.as_slice() {
        [first, second] if *first == a => second.clone(),
        other => panic!("{other:?}"),
    };
    refresh(&operator).await;
    let started = operator.group("web").await;
    assert_ne!(started.runtime_hash, before.runtime_hash, "agents get their files again");
    assert_eq!(started.infra_hash, before.infra_hash, "and stay what they are");
    shown(registration, &agents[0].bundle).await.expect("the old CA still issues");

    // Nobody has the new bundle yet, and the refusal names all of them.
    let told = reasons(rotation.activate(false).await);
    assert!(told[0].contains("15 minutes"), "{told:?}");
    shard.site.clock.leap(OVERLAP);
    let told = reasons(rotation.activate(false).await);
    assert_eq!(told.len(), 3, "{told:?}");
    for name in [ids[0].to_string(), ids[1].to_string(), operator.id.to_string()] {
        assert!(told.iter().any(|it| it.contains(&name)), "{name} is missing from {told:?}");
    }
    for agent in &mut agents {
        renew(&shard, agent).await;
        let both: Vec<_> = agent.bundle.certificates().iter().map(|it| it.fingerprint.clone()).collect();
        assert_eq!(both, [a.clone(), b.clone()]);
        assert_eq!(issuer(&shard, agent).await, a);
    }
    let renewed = renew_operator(&operator).await;
    // The answers may have been lost: whoever has not used his new certificate may know nothing of B.
    let told = reasons(rotation.activate(false).await);
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.iter().all(|it| it.contains("has not used its new one yet")), "{told:?}");
    for agent in &agents {
        use_it(&shard, agent).await;
    }
    operator.go_on_with(&shard, &renewed).await;
    // [B, A]: the new one issues; whoever has a certificate by the old one is let in.
    let mut activated = None;
    wait_until("the operator to be known as ready", async || {
        activated = rotation.activate(false).await.ok();
        activated.is_some()
    })
    .await;
    assert_eq!(activated.unwrap().bundle, [b.clone(), a.clone()]);
    refresh(&operator).await;
    let only_a = Bundle::parse(shard.site.bundle().await.certificates()[1].pem().as_bytes()).unwrap();
    shown(registration, &only_a).await.expect_err("the server shows a certificate by the new CA");
    shown(registration, &agents[0].bundle).await.expect("which all know by now");
    agents[0].dial(&shard.leader.advertised.agent).await.expect("an old certificate passes");
    for (agent, stream) in agents.iter().zip(&streams) {
        still_reports(&shard, agent, stream).await;
    }
    let told = reasons(rotation.retire(false).await);
    assert_eq!(told.len(), 3, "{told:?}");
    shard.site.clock.leap(PAUSE);
    let old = agents[1].clone();
    for agent in &mut agents {
        renew(&shard, agent).await;
        assert_eq!(issuer(&shard, agent).await, b);
    }
    let told = reasons(rotation.retire(false).await);
    assert_eq!(told.len(), 3, "{told:?}");
    assert_eq!(told.iter().filter(|it| it.contains("has not used its new certificate yet")).count(), 2, "{told:?}");
    for agent in &agents {
        use_it(&shard, agent).await;
    }
    let told = reasons(rotation.retire(false).await);
    assert!(told.len() == 1 && told[0].contains(&operator.id.to_string()), "{told:?}");
    let renewed = renew_operator(&operator).await;
    operator.go_on_with(&shard, &renewed).await;
    wait_until("nobody to be left with the old one", async || {
        let status = rotation.status().await.unwrap();
        assert_eq!(status.stage, Stage::Active);
        !status.in_use.contains_key(&a)
    })
    .await;

    // [B]: the old one is no more.
    assert_eq!(rotation.retire(false).await.unwrap().bundle, std::slice::from_ref(&b));
    refresh(&operator).await;
    for name in [CA_KEY_SECRET.to_owned(), ca_key_secret(&a)] {
        assert!(
            shard.site.secrets().get(&name).await.is_err_and(|error| error.is_not_found()),
            "{name} is still there"
        );
    }
    let refused = match old.dial(&shard.leader.advertised.agent).await {
        Err(_) => true,
        Ok(line) => {
            let mut client = AgentServiceClient::new(line.channel.clone());
            client.renew_certificate(v1::RenewCertificateRequest::default()).await.is_err()
        }
    };
    assert!(refused, "a certificate by the old CA opens no connection any more");
    for (agent, stream) in agents.iter().zip(&streams) {
        agent.dial(&shard.leader.advertised.agent).await.expect("the new one does");
        still_reports(&shard, agent, stream).await;
    }
    let bundle = Bundle::parse(&renewed.ca_bundle_pem).unwrap();
    operator.go_on_with(&shard, &renewed).await;
    assert!(operator.events("InstanceLost").is_empty(), "and nobody noticed");
    assert_eq!(shard.site.standing(), ids);

    // A server that comes later finds all of it.
    let shard = shard.restart("srv-2").await;
    shown(&shard.leader.advertised.registration, &bundle).await.unwrap();
    agents[0].dial(&shard.leader.advertised.agent).await.unwrap();
}

#[tokio::test]
async fn a_renewal_that_a_rotation_overtook_is_not_shown() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = shard_on(Site::on(bucket.clone(), FakeOptions::default()), 0).await;
    let operator = Operator::on(&shard).await;
    let registration = &shard.leader.advertised.registration;
    let only_a = shard.site.bundle().await;
    let rotation = rotation(&shard.site);
    rotation.start().await.unwrap();
    refresh(&operator).await;

    // Due, signed by the old CA, and its log entry waits.
    bucket.hold(Some("/certlog/"));
    let n_logged = bucket.n_puts("/certlog/");
    shard.site.clock.leap(5 * DAY);
    let mut client = operator.client();
    let mut renewing = JoinSet::new();
    renewing.spawn(async move { client.refresh_config(v1::RefreshConfigRequest::default()).await.map(|_| ()) });
    wait_for("a renewal is being logged", || n_logged < bucket.n_puts("/certlog/")).await;
    bucket.hold(bucket.puts("/certlog/").last().map(String::as_str));

    // An entry of another time, so that it is another key.
    shard.site.clock.leap(Duration::from_secs(1));
    rotation.activate(true).await.unwrap();
    refresh(&operator).await;
    shown(registration, &only_a).await.expect_err("the server shows a certificate by the new CA");
    bucket.hold(None);
    let _ = tokio::time::timeout(LIMIT, renewing.join_next()).await.expect("an end of the first refresh");
    shown(registration, &only_a).await.expect_err("and the old one does not come back");
    shown(registration, &shard.site.bundle().await).await.unwrap();
}

#[tokio::test]
async fn an_agent_that_slept_through_the_overlap_rejoins() {
    let shard = shard_of(1).await;
    let id = shard.only_vm().await;
    let mut agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    let rotation = rotation(&shard.site);
    rotation.start().await.unwrap();
    refresh(&operator).await;
    renew(&shard, &mut agent).await;
    // Asleep from here on, with both CAs and a certificate by the old one.
    let cut_off = rotation.activate(true).await.unwrap().cut_off;
    assert!(cut_off.iter().any(|it| it.contains(&operator.id.to_string())), "{cut_off:?}");
    let cut_off = rotation.retire(true).await.unwrap().cut_off;
    assert!(cut_off.iter().any(|it| it.contains(&id.to_string())), "{cut_off:?}");
    refresh(&operator).await;

    let (cluster, tenant) = ("demo".parse().unwrap(), tenant());
    let client_id = id.to_string();
    let claim =
        RejoinClaim { cluster: &cluster, role: Role::Agent, tenant: &tenant, client_id: &client_id, counter: 1 };
    let signature = claim.sign(&agent.key);
    let proof = v1::RejoinProof { client_id: client_id.clone(), tenant: tenant.to_string(), counter: 1, signature };
    let line = dial(&shard.leader.advertised.registration, tls(&agent.bundle, None), Ipv4Addr::LOCALHOST).await;
    let mut client = RegistrationServiceClient::new(line.expect("it knows the new CA").channel.clone());
    let asking = v1::RegisterClientRequest { rejoin: Some(proof), ..request("", &agent.key) };
    let answer = client.register_agent(asking).await.unwrap().into_inner();
    let newer = Bundle::parse(&answer.ca_bundle_pem).unwrap();
    assert!(agent.bundle.may_become(&newer));
    let back = Agent { chain: answer.client_certificate_pem, bundle: newer, ..agent };
    let stream = connect(&shard, &back).await;
    still_reports(&shard, &back, &stream).await;
}

#[tokio::test]
async fn an_adopted_machine_keeps_the_issuer_of_its_certificate() {
    let shard = shard_of(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let old = issuer(&shard, &agent).await;
    let site = shard.site.clone();
    let rotation = rotation(&site);
    rotation.start().await.unwrap();
    rotation.activate(true).await.unwrap();
    shard.server.stop(Duration::from_secs(5)).await;
    site.bucket.delete(&instance_key(&shard_id(), &tenant(), &id)).await.unwrap();
    // Another machine, which remembers nothing: the VM's own tags are all there is.
    let shard = site.lead("srv-2").await;
    let operator = Operator::on(&shard).await;
    operator.hears_of("InstanceAdopted", id).await;
    let back = Agent { bundle: site.bundle().await, ..agent };
    let stream = connect(&shard, &back).await;
    still_reports(&shard, &back, &stream).await;
    assert_eq!(issuer(&shard, &back).await, old);
    let held = reasons(rotation.retire(false).await);
    assert!(held.iter().any(|it| it.contains(&format!("agent {id}"))), "{held:?}");
}

#[tokio::test]
async fn steps_of_a_rotation_come_in_their_order() {
    let shard = shard_of(0).await;
    let operator = Operator::on(&shard).await;
    let rotation = rotation(&shard.site);
    let a = shard.site.bundle().await;
    assert!(is_wrong_stage(rotation.activate(true).await));
    assert!(is_wrong_stage(rotation.retire(true).await));
    assert!(is_wrong_stage(rotation.abort().await));
    let b = rotation.start().await.unwrap().bundle[1].clone();
    assert_eq!(rotation.status().await.unwrap().stage, Stage::Started);
    assert!(is_wrong_stage(rotation.start().await));
    assert!(is_wrong_stage(rotation.retire(true).await));
    shard.site.secrets().get(&ca_key_secret(&b)).await.expect("its key has its own name");
    refresh(&operator).await;

    // Taken back: as if nothing had been.
    rotation.abort().await.unwrap();
    refresh(&operator).await;
    assert_eq!(shard.site.bundle().await.issuer().fingerprint, a.issuer().fingerprint);
    assert!(shard.site.secrets().get(&ca_key_secret(&b)).await.is_err_and(|error| error.is_not_found()));
    shown(&shard.leader.advertised.registration, &a).await.unwrap();

    rotation.start().await.unwrap();
    rotation.activate(true).await.unwrap();
    assert_eq!(rotation.status().await.unwrap().stage, Stage::Active);
    assert!(is_wrong_stage(rotation.abort().await), "what has issued cannot be taken back");
    assert!(is_wrong_stage(rotation.start().await));
}

#[tokio::test]
async fn a_server_notices_another_ca_before_it_leads() {
    let shard = shard_of(0).await;
    let rotation = rotation(&shard.site);
    rotation.start().await.unwrap();
    rotation.activate(true).await.unwrap();
    let bundle = shard.site.bundle().await;
    let only_b = Bundle::parse(bundle.issuer().pem().as_bytes()).unwrap();
    let shard = shard.restart("srv-2").await;
    shown(&shard.leader.advertised.registration, &only_b).await.expect("a certificate by the CA that issues");
}

/// A rotation waits for it.
#[tokio::test]
async fn a_used_certificate_is_noted_once_the_store_takes_it() {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = shard_on(Site::on(bucket.clone(), FakeOptions::default()), 1).await;
    let id = shard.only_vm().await;
    let mut agent = Agent::register(&shard, id).await;
    renew(&shard, &mut agent).await;
    let key = instance_key(&shard_id(), &tenant(), &id);
    let n_before = bucket.n_puts(&key);
    // Said in a way that ends a try. One call, and none after it: nobody will ask for another.
    bucket.refuse(&id.to_string());
    assert_eq!(agent.knock(&shard.leader).await.code(), Code::InvalidArgument);
    wait_until("a try in vain", async || n_before < bucket.n_puts(&key)).await;
    bucket.refuse("what no record says");
    wait_until("the record to say so", async || shard.site.record(id).await.unwrap().cert.unwrap().previous.is_none())
        .await;
}

#[tokio::test]
async fn a_ca_bundle_that_is_gone_is_put_back() {
    let shard = shard_of(0).await;
    let operator = Operator::on(&shard).await;
    let before = shard.site.bucket.get(&ca_crt_key()).await.unwrap();
    shard.site.bucket.delete(&ca_crt_key()).await.unwrap();
    refresh(&operator).await;
    assert_eq!(shard.site.bucket.get(&ca_crt_key()).await.unwrap().body, before.body);
    // And followed as before.
    let rotation = rotation(&shard.site);
    rotation.start().await.unwrap();
    rotation.activate(true).await.unwrap();
    refresh(&operator).await;
    let only_b = Bundle::parse(shard.site.bundle().await.issuer().pem().as_bytes()).unwrap();
    shown(&shard.leader.advertised.registration, &only_b).await.expect("a certificate by the CA that issues");
}

#[tokio::test]
async fn a_ca_that_nobody_trusts_is_not_followed() {
    let shard = shard_of(0).await;
    let operator = Operator::on(&shard).await;
    let registration = &shard.leader.advertised.registration;
    let (ours, elsewhere) = (shard.site.bucket.get(&ca_crt_key()).await.unwrap(), shard_of(0).await);
    // As a server leaves it that found neither bundle nor key: both are there, and match.
    let theirs = elsewhere.site.bucket.get(&ca_crt_key()).await.unwrap().body;
    let fingerprint = elsewhere.site.bundle().await.issuer().fingerprint.clone();
    let key = elsewhere.site.secrets().get(CA_KEY_SECRET).await.unwrap();
    shard.site.secrets().create(&ca_key_secret(&fingerprint), &key).await.unwrap();
    let replaced = shard.site.bucket.put(&ca_crt_key(), theirs, Condition::Match(ours.etag)).await.unwrap();
    let bundle = Bundle::parse(&ours.body).unwrap();
    // However long it lies there.
    for _ in 0..3 {
        refresh(&operator).await;
        shown(registration, &bundle).await.expect("the CA that all trust");
        shard.site.clock.leap(OVERLAP * 2 / 3);
    }
    shard.site.bucket.put(&ca_crt_key(), ours.body, Condition::Match(replaced)).await.unwrap();
    refresh(&operator).await;
    shown(registration, &bundle).await.expect("it still is");
}

#[tokio::test]
async fn a_lost_key_is_replaced_beside_the_old_trust() {
    let shard = shard_of(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    let rotation = rotation(&shard.site);
    assert!(matches!(rotation.lost_key().await, Err(RotationError::KeyIsThere { .. })));
    shard.site.secrets().delete(CA_KEY_SECRET).await.unwrap();
    assert!(matches!(rotation.start().await, Err(RotationError::KeyLost { .. })), "it cannot be rotated as usual");
    let lost = rotation.lost_key().await.unwrap();
    assert_eq!((lost.agents, lost.operators), (1, 1));
    assert_eq!(lost.done.bundle.len(), 2);
    refresh(&operator).await;
    let only_b = Bundle::parse(shard.site.bundle().await.issuer().pem().as_bytes()).unwrap();
    shown(&shard.leader.advertised.registration, &only_b).await.unwrap();
    let trusting = Agent { bundle: shard.site.bundle().await, ..agent };
    trusting.dial(&shard.leader.advertised.agent).await.expect("old certificates pass");
}
