//! Who may call on the operator and agent ports, and how a stream ends for one who may no longer.

use std::{net::Ipv4Addr, time::Duration};

use crate::common::{
    Shard, assert_refused,
    fleet::{Agent, INTERVAL_MS, Reporting, report},
    operator::{self, Operator},
    tenant, wait_for, wait_until,
    wire::{Line, dial, new_key, register_agent, tls},
};
use nstance_core::instance::Phase;
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{FileProfile, FileUsage},
    keys::KeyPair,
    subject::Subject,
};
use nstance_proto::{
    refusal::retry_of,
    v1::{self, agent_service_client::AgentServiceClient, operator_service_client::OperatorServiceClient},
};
use tonic::{Code, Status};

const HOUR: Duration = Duration::from_secs(3600);

/// A group of one whose agent is registered.
async fn one_agent() -> (Shard, Agent) {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    (shard, agent)
}

/// ListGroups, by whoever holds this certificate.
async fn list_groups(shard: &Shard, chain: &[u8], key: &KeyPair) -> Result<(), Status> {
    let tls = tls(&shard.site.bundle().await, Some((chain, key)));
    let line = dial(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST).await.expect("the operator port");
    OperatorServiceClient::new(line.channel.clone()).list_groups(()).await.map(|_| ())
}

/// What a client meets whose certificate does not pass the handshake: words, for there is nobody to send a code yet.
async fn refused_in_the_handshake(dialled: Result<Line, String>) -> String {
    match dialled {
        Err(words) => words,
        Ok(line) => {
            let mut client = AgentServiceClient::new(line.channel.clone());
            let status = client.renew_certificate(v1::RenewCertificateRequest::default()).await.expect_err("a refusal");
            let mut words = status.to_string();
            let mut source = std::error::Error::source(&status);
            while let Some(error) = source {
                words = format!("{words}: {error}");
                source = error.source();
            }
            words
        }
    }
}

#[tokio::test]
async fn agent_port_refuses_a_client_without_certificate() {
    let shard = Shard::start(0).await;
    let advertised = &shard.leader.advertised;
    for address in [&advertised.agent, &advertised.operator] {
        let words =
            refused_in_the_handshake(dial(address, tls(&shard.site.bundle().await, None), Ipv4Addr::LOCALHOST).await);
        let words = words.await;
        assert!(words.contains("CertificateRequired"), "{words}");
    }
}

#[tokio::test]
async fn agent_port_refuses_a_certificate_of_another_ca() {
    let (shard, agent) = one_agent().await;
    let (entropy, now) = (shard.site.entropy.as_ref(), shard.site.now());
    let ca_key = KeyPair::generate(entropy);
    let made = make_ca_certificate(&ca_key, &CaProfile::of("demo".parse().unwrap()), now, entropy);
    let ca = Ca::load(made.chain_pem.as_bytes(), [ca_key]).unwrap();
    let issued = ca.issue_agent(&agent.id, &tenant(), &agent.key.public_key(), now, HOUR, entropy).unwrap();
    let tls = tls(&agent.bundle, Some((issued.chain_pem.as_bytes(), &agent.key)));
    let dialled = dial(&shard.leader.advertised.agent, tls, Ipv4Addr::LOCALHOST).await;
    let words = refused_in_the_handshake(dialled).await;
    assert!(
        words.contains("UnknownCA") || words.contains("DecryptError") || words.contains("BadCertificate"),
        "{words}"
    );
}

#[tokio::test]
async fn agent_certificate_is_refused_on_operator_port() {
    let (shard, agent) = one_agent().await;
    let answer = list_groups(&shard, &agent.chain, &agent.key).await;
    let message = answer.as_ref().unwrap_err().message().to_owned();
    assert!(message.contains(&shard.leader.advertised.agent), "names the right port: {message}");
    assert_refused(answer, Code::PermissionDenied, "WRONG_ROLE");
}

#[tokio::test]
async fn operator_certificate_is_refused_on_agent_port() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    let tls = tls(&shard.site.bundle().await, Some((&operator.chain, &operator.key)));
    let line = dial(&shard.leader.advertised.agent, tls, Ipv4Addr::LOCALHOST).await.unwrap();
    let mut client = AgentServiceClient::new(line.channel.clone());
    let answer = client.renew_certificate(v1::RenewCertificateRequest::default()).await;
    let message = answer.as_ref().unwrap_err().message().to_owned();
    assert!(message.contains(&shard.leader.advertised.operator), "names the right port: {message}");
    assert_refused(answer, Code::PermissionDenied, "WRONG_ROLE");
}

#[tokio::test]
async fn server_and_file_certificates_open_no_port() {
    let (shard, agent) = one_agent().await;
    let (ca, entropy, now) = (shard.site.ca().await, shard.site.entropy.as_ref(), shard.site.now());
    let profile = FileProfile {
        subject: Subject {
            common_name: agent.id.to_string(),
            organization: vec![tenant().to_string()],
            ..Subject::default()
        },
        sans: Vec::new(),
        usage: FileUsage::Client,
    };
    let file = ca.issue_file(&profile, &agent.key.public_key(), now, HOUR, entropy).unwrap();
    let holder = Agent { chain: file.chain_pem.into_bytes(), ..agent.clone() };
    assert_refused(Err::<(), _>(holder.knock(&shard.leader).await), Code::Unauthenticated, "CERT_MALFORMED");
    let server = FileProfile { usage: FileUsage::Server, ..profile };
    let server = ca.issue_file(&server, &agent.key.public_key(), now, HOUR, entropy).unwrap();
    let holder = Agent { chain: server.chain_pem.into_bytes(), ..agent };
    assert_refused(Err::<(), _>(holder.knock(&shard.leader).await), Code::Unauthenticated, "CERT_INVALID");
}

#[tokio::test]
async fn an_expired_certificate_is_told_so() {
    let (shard, agent) = one_agent().await;
    let (ca, entropy) = (shard.site.ca().await, shard.site.entropy.as_ref());
    let then = shard.site.now().minus(2 * HOUR);
    let issued = ca.issue_agent(&agent.id, &tenant(), &agent.key.public_key(), then, HOUR, entropy).unwrap();
    let late = Agent { chain: issued.chain_pem.into_bytes(), ..agent };
    assert_refused(Err::<(), _>(late.knock(&shard.leader).await), Code::Unauthenticated, "CERT_EXPIRED");
    assert_refused(late.report(&shard.leader).await.end().await, Code::Unauthenticated, "CERT_EXPIRED");
}

#[tokio::test]
async fn a_superseded_certificate_is_refused_once_the_new_one_is_seen() {
    let (shard, old) = one_agent().await;
    let nonce = shard.site.spec(old.id).bootstrap.nonce_jwt;
    let answer = register_agent(&shard, &nonce, &old.key).await.unwrap();
    let new = Agent { chain: answer.client_certificate_pem, ..old.clone() };
    assert_eq!(old.knock(&shard.leader).await.code(), Code::InvalidArgument, "both pass until the new one is seen");
    assert_eq!(new.knock(&shard.leader).await.code(), Code::InvalidArgument);
    wait_until("the old serial is retired", async || old.knock(&shard.leader).await.code() == Code::Unauthenticated)
        .await;
    assert_refused(Err::<(), _>(old.knock(&shard.leader).await), Code::Unauthenticated, "CERT_SUPERSEDED");
    assert_eq!(new.knock(&shard.leader).await.code(), Code::InvalidArgument);
    let record = shard.site.record(new.id).await.unwrap();
    assert!(record.cert.unwrap().previous.is_none());
}

#[tokio::test]
async fn a_certificate_the_record_does_not_know_is_refused() {
    let (shard, agent) = one_agent().await;
    let (ca, entropy, now) = (shard.site.ca().await, shard.site.entropy.as_ref(), shard.site.now());
    let other_serial = ca.issue_agent(&agent.id, &tenant(), &agent.key.public_key(), now, HOUR, entropy).unwrap();
    let holder = Agent { chain: other_serial.chain_pem.into_bytes(), ..agent.clone() };
    assert_refused(Err::<(), _>(holder.knock(&shard.leader).await), Code::Unauthenticated, "CERT_SUPERSEDED");
    let other_tenant =
        ca.issue_agent(&agent.id, &"other".parse().unwrap(), &agent.key.public_key(), now, HOUR, entropy).unwrap();
    let holder = Agent { chain: other_tenant.chain_pem.into_bytes(), ..agent };
    assert_refused(Err::<(), _>(holder.knock(&shard.leader).await), Code::PermissionDenied, "INSTANCE_DELETED");
}

#[tokio::test]
async fn agent_cannot_report_for_another() {
    let shard = Shard::start(2).await;
    let ids = shard.vms(2).await;
    let agent = Agent::register(&shard, ids[0]).await;
    let stream = agent.report(&shard.leader).await;
    stream.reports.send(report(ids[1], v1::ReportKind::Change)).await.unwrap();
    assert_refused(stream.end().await, Code::PermissionDenied, "NOT_YOUR_INSTANCE");
    let stream = agent.report(&shard.leader).await;
    let long = v1::HealthReportRequest { instance_id: "x".repeat(100_000), ..report(ids[1], v1::ReportKind::Change) };
    stream.reports.send(long).await.unwrap();
    let refused = stream.end().await;
    let said = refused.as_ref().expect_err("it is not its own").message().len();
    assert!(said < 200, "what an agent says is not echoed at length: {said}");
    assert_refused(refused, Code::PermissionDenied, "NOT_YOUR_INSTANCE");
}

#[tokio::test]
async fn a_newer_stream_supersedes_the_older() {
    let (shard, agent) = one_agent().await;
    let operator = Operator::on(&shard).await;
    let older = agent.report(&shard.leader).await;
    wait_until("the first report is seen", async || operator.health(agent.id).await == "healthy").await;
    let newer = agent.report(&shard.leader).await;
    assert_refused(older.end().await, Code::Aborted, "SUPERSEDED");
    newer.reports.send(report(agent.id, v1::ReportKind::Periodic)).await.unwrap();
    assert_eq!(operator.health(agent.id).await, "healthy");
    assert!(operator.events("InstanceLost").is_empty(), "a reconnect is no loss");
    drop(newer);
}

#[tokio::test]
async fn a_stream_reopened_on_its_connection_is_no_loss() {
    let (shard, agent) = one_agent().await;
    let operator = Operator::on(&shard).await;
    let mut stream = agent.report(&shard.leader).await;
    for _ in 0..5 {
        wait_until("the report is seen", async || operator.health(agent.id).await == "healthy").await;
        stream = Reporting::open(stream.abandon(), agent.id, INTERVAL_MS).await;
    }
    wait_until("the last is seen", async || operator.health(agent.id).await == "healthy").await;
    assert!(operator.events("InstanceLost").is_empty());
    assert_eq!(shard.server.metrics.agents_connected.get(), 1);
    stream.cut();
    operator.hears_of("InstanceLost", agent.id).await;
    wait_for("nobody is connected", || shard.server.metrics.agents_connected.get() == 0).await;
}

#[tokio::test]
async fn a_report_storm_plans_nothing() {
    let (shard, agent) = one_agent().await;
    let stream = agent.report(&shard.leader).await;
    wait_for("the first report", || shard.server.metrics.reports.get() == 1).await;
    let plans = || {
        let text = shard.server.metrics.text();
        let line = text.lines().find(|line| line.starts_with("nstance_plan_seconds_count")).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = plans();
    for _ in 0..3000 {
        stream.reports.send(report(agent.id, v1::ReportKind::Periodic)).await.unwrap();
    }
    wait_for("all reports", || shard.server.metrics.reports.get() == 3001).await;
    assert!(plans() < before + 10, "{before} plans before, {} after", plans());
}

#[tokio::test]
async fn two_operators_see_all_and_only_their_events() {
    let shard = Shard::start_with(0, |config| {
        config["tenants"] = serde_json::json!({ "other": {} });
        config["groups"]["other"] = serde_json::json!({ "db": { "template": "knc", "size": 1 } });
    })
    .await;
    let (first, second) = (Operator::on(&shard).await, Operator::on(&shard).await);
    let theirs = Operator::of(&shard, "other".parse().unwrap()).await;
    theirs.hears("InstanceCreated").await;
    for operator in [&first, &second] {
        operator.hears("LeaderAcquired").await;
        assert!(operator.events("InstanceCreated").is_empty());
        assert!(operator.instances().await.is_empty());
    }
    assert_eq!(theirs.instances().await.len(), 1);
    assert_eq!(theirs.group("db").await.tenant, "other");
}

#[tokio::test]
async fn a_deleted_instance_is_cut_off() {
    let shard = Shard::start_with(1, |config| {
        config["server"]["garbage_collection"]["interval"] = "200ms".into();
    })
    .await;
    let id = shard.only_vm().await;
    let agent = Agent::register(&shard, id).await;
    let operator = Operator::on(&shard).await;
    let stream = agent.report(&shard.leader).await;
    wait_until("the first report is seen", async || operator.health(id).await == "healthy").await;
    // The VM is gone, but something that has its disk still holds the connection.
    shard.site.cloud.kill(id);
    wait_until("its record ends", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    let ended = tokio::time::timeout(Duration::from_secs(1), stream.end()).await.expect("within a second");
    assert_refused(ended, Code::PermissionDenied, "INSTANCE_DELETED");
    assert_refused(Err::<(), _>(agent.knock(&shard.leader).await), Code::PermissionDenied, "INSTANCE_DELETED");
    assert_refused(agent.report(&shard.leader).await.end().await, Code::PermissionDenied, "INSTANCE_DELETED");
}

#[tokio::test]
async fn a_half_closed_stream_after_leave_is_answered_at_once() {
    let (shard, agent) = one_agent().await;
    let operator = Operator::on(&shard).await;
    let stream = agent.report(&shard.leader).await;
    let notice = v1::TerminationNotice { action: "leave".to_owned(), ..v1::TerminationNotice::default() };
    let leave =
        v1::HealthReportRequest { termination_notice: Some(notice), ..report(agent.id, v1::ReportKind::Notice) };
    stream.reports.send(leave).await.unwrap();
    operator.hears_of("HostShutdown", agent.id).await;
    stream.half_close().await.expect("an empty answer");
    assert_ne!(operator.health(agent.id).await, "lost", "it is expected back");
}

#[tokio::test]
async fn an_operator_without_record_is_unknown() {
    let shard = Shard::start(0).await;
    let (ca, entropy, now) = (shard.site.ca().await, shard.site.entropy.as_ref(), shard.site.now());
    let (key, claims) = (new_key(entropy), operator::claims(&shard.site));
    let issued = ca.issue_operator(&claims.operator, &tenant(), &key.public_key(), now, HOUR, entropy).unwrap();
    let answer = list_groups(&shard, issued.chain_pem.as_bytes(), &key).await;
    assert_refused(answer, Code::Unauthenticated, "OPERATOR_UNKNOWN");
    let foreign = "nobody".parse().unwrap();
    let issued = ca.issue_operator(&claims.operator, &foreign, &key.public_key(), now, HOUR, entropy).unwrap();
    let answer = list_groups(&shard, issued.chain_pem.as_bytes(), &key).await;
    assert_refused(answer, Code::PermissionDenied, "TENANT_UNKNOWN");
}

#[tokio::test]
async fn a_revoked_operator_is_refused() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    operator.revoke(&shard.site).await;
    // What a leader remembers of an operator may be five minutes old; a new one reads it.
    let shard = shard.restart("srv-2").await;
    let answer = list_groups(&shard, &operator.chain, &operator.key).await;
    assert_refused(answer, Code::PermissionDenied, "OPERATOR_REVOKED");
}

#[tokio::test]
async fn every_answer_names_its_epoch_and_request() {
    let (shard, agent) = one_agent().await;
    let status = agent.knock(&shard.leader).await;
    let epoch = status.metadata().get("nstance-epoch").expect("an epoch").to_str().unwrap();
    assert_eq!(epoch, shard.leader.epoch.to_string());
    assert!(status.metadata().contains_key("nstance-request-id"));
}

#[tokio::test]
async fn an_agents_stream_ends_with_its_leader() {
    let (shard, agent) = one_agent().await;
    let stream: Reporting = agent.report(&shard.leader).await;
    let site = shard.site.clone();
    wait_for("the stream is open", || shard.server.metrics.agents_connected.get() == 1).await;
    shard.server.stop(Duration::from_secs(5)).await;
    let ended = stream.end().await;
    let hint = retry_of(ended.as_ref().expect_err("the term ended it"));
    assert_eq!(hint, Some(Duration::from_millis(500)), "one agent is told to come within half a second");
    assert_refused(ended, Code::Unavailable, "LEADER_CHANGED");
    let shard = site.lead("srv-2").await;
    assert_eq!(
        agent.knock(&shard.leader).await.code(),
        Code::InvalidArgument,
        "the certificate works with the next one"
    );
}
