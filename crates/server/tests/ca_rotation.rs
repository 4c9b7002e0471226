//! What a server shows and whom it trusts changes while it runs, and nobody who is connected notices.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod common;

use std::time::Duration;

use common::{
    Shard,
    fleet::{Agent, Reporting, report},
    operator::Operator,
    wait_for, wait_until,
    wire::tls,
};
use nstance_identity::{ca::Bundle, peer::Peer};
use nstance_proto::v1;
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Clients whose certificates outlive the leaps of these tests.
async fn shard_of(size: u32) -> Shard {
    Shard::start_with(size, |config| {
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
    assert!((expiry - after.not_after.as_millis() as f64 / 1000.0).abs() < 1.0, "{expiry}");
    // Whoever was connected still is, and whoever comes gets in.
    still_reports(&shard, &agent, &stream).await;
    assert_eq!(operator.group("web").await.size, 1);
    assert!(operator.events("InstanceLost").is_empty());
    agent.dial(&shard.leader.advertised.agent).await.unwrap();
}
