//! Notices from clouds: an agent beside a metadata service, seen from the server that gets its reports.
//!
//! All of it runs in memory on a paused clock, so that two minutes of silence cost nothing; a few tests cross the
//! sockets and the file system of this machine.

mod aws;

mod azure;

mod file;

mod gcp;

use std::time::Duration;

use crate::common::{
    Register, Talk, World,
    imds::{self, Imds},
};
use nstance_proto::v1::{HealthReportRequest, ReportKind, TerminationNotice};
use tokio::time::Instant;
use tonic::Code;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// Starts a server and an agent with these settings.
fn start(world: &World, more: &[(&str, &str)]) {
    world.write_nonce(HOUR);
    world.start_server();
    world.start_agent_with(world.settings_with(more));
}

/// A machine in a cloud, of which nothing but its notices is left to say.
async fn settled(provider: &str, imds: &Imds, address: &str) -> World {
    let mut world = World::new();
    imds.listen(&world, address);
    start(&world, &[("PROVIDER", provider)]);
    until_fact(&mut world, "spot_monitor", "ok").await;
    world
}

async fn until_fact(world: &mut World, name: &str, value: &str) -> (Instant, HealthReportRequest) {
    let began = Instant::now();
    loop {
        let (at, report) = world.next_report().await;
        assert!(at - began < 20 * MINUTE, "{name} does not become {value}: {:?}", report.provider_facts);
        if report.provider_facts.get(name).is_some_and(|it| it == value) {
            return (at, report);
        }
    }
}

/// The next report that was sent because of a notice.
async fn next_notice(world: &mut World) -> (Instant, TerminationNotice) {
    let began = Instant::now();
    loop {
        let (at, report) = world.next_report().await;
        assert!(at - began < 20 * MINUTE, "no notice comes");
        if report.kind() == ReportKind::Notice {
            return (at, report.termination_notice.expect("a notice"));
        }
    }
}

/// Lets time pass, in which no notice may be sent; the notice that the last report repeats, if there was a report.
async fn quiet(world: &mut World, how_long: Duration) -> Option<String> {
    tokio::time::sleep(how_long).await;
    let mut repeated = None;
    while let Ok(seen) = world.seen.try_recv() {
        if let crate::common::Seen::Report { report, .. } = seen {
            assert_ne!(report.kind(), ReportKind::Notice, "{:?}", report.termination_notice);
            repeated = report.termination_notice.map(|notice| notice.action);
        }
    }
    repeated
}

fn dialled(world: &World, address: &str) -> Vec<Instant> {
    let all = world.net.dialled.lock().expect("nobody panicked");
    all.iter().filter(|(_, it)| it == address).map(|(at, _)| *at).collect()
}

fn deadline_of(notice: &TerminationNotice) -> Option<i64> {
    notice.deadline.map(|deadline| deadline.seconds)
}

#[tokio::test(start_paused = true)]
async fn machine_that_nobody_recognises_is_told_and_looked_at_for_ever() {
    let mut world = World::new();
    start(&world, &[("PROVIDER", "auto")]);
    let (_, report) = until_fact(&mut world, "spot_monitor", "unknown").await;
    assert!(!report.provider_facts.contains_key("provider"));
    quiet(&mut world, HOUR).await;
    let tries = dialled(&world, imds::V6);
    let gaps: Vec<_> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!((60..130).contains(&gaps.len()), "{gaps:?}");
    assert!(gaps.iter().all(|gap| SECOND <= *gap && *gap <= MINUTE + 5 * SECOND), "{gaps:?}");
    Imds::azure("Regular").listen(&world, imds::V4);
    let (_, report) = until_fact(&mut world, "spot_monitor", "ok").await;
    assert_eq!(report.provider_facts["provider"], "azure");
}

#[tokio::test(start_paused = true)]
async fn every_cloud_is_recognised_by_its_answers() {
    for (imds, address, provider, zone) in [
        (Imds::aws("spot"), imds::V4, "aws", "eu-west-1b"),
        (Imds::aws("on-demand"), imds::V6, "aws", "eu-west-1b"),
        (Imds::gcp("TRUE"), imds::GOOGLE, "gcp", "europe-west1-b"),
        (Imds::gcp("FALSE"), imds::V4, "gcp", "europe-west1-b"),
        (Imds::azure("Spot"), imds::V4, "azure", "westeurope-2"),
    ] {
        let mut world = World::new();
        imds.listen(&world, address);
        start(&world, &[("PROVIDER", "auto")]);
        let (_, report) = until_fact(&mut world, "spot_monitor", "ok").await;
        let facts = report.provider_facts;
        let spot = !matches!((provider, address), ("aws", imds::V6) | ("gcp", imds::V4));
        assert_eq!(facts["spot"], spot.to_string(), "{provider} at {address}");
        assert_eq!((facts["provider"].as_str(), facts["zone"].as_str()), (provider, zone));
    }
}

#[tokio::test(start_paused = true)]
async fn firmware_saves_asking_the_wrong_cloud() {
    let mut world = World::new();
    Imds::gcp("TRUE").listen(&world, imds::GOOGLE);
    world.write_nonce(HOUR);
    world.start_server();
    std::fs::create_dir(world.path("dmi")).unwrap();
    std::fs::write(world.path("dmi/sys_vendor"), "Google\n").unwrap();
    let mut parts = world.parts();
    parts.metadata.dmi = world.path("dmi");
    let settings = world.settings_with(&[("PROVIDER", "auto")]);
    world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, world.control.clone()));
    until_fact(&mut world, "provider", "gcp").await;
    assert!(dialled(&world, imds::V4).is_empty() && dialled(&world, imds::V6).is_empty());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_asked_where_there_is_nothing_to_ask() {
    for (provider, interval, told) in
        [("none", "2s", "none"), ("proxmox", "2s", "proxmox"), ("dev", "2s", "dev"), ("aws", "0", "aws")]
    {
        let mut world = World::new();
        let imds = Imds::aws("spot");
        imds.listen(&world, imds::V4);
        start(&world, &[("PROVIDER", provider), ("SPOT_POLL_INTERVAL", interval)]);
        let (_, report) = until_fact(&mut world, "spot_monitor", "off").await;
        assert_eq!(report.provider_facts["provider"], told);
        quiet(&mut world, HOUR).await;
        assert!(imds.take_asked().is_empty(), "{provider}");
    }
}

#[tokio::test(start_paused = true)]
async fn notice_without_a_session_is_worth_one_connection_at_once() {
    let later = Talk::RefuseFor(Code::Unavailable, "NOT_READY", 600_000);
    for refusal in [Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED"), later] {
        let mut world = World::new();
        let imds = Imds::aws("spot");
        imds.listen(&world, imds::V4);
        world.script_talk((0..3).map(|_| refusal.clone()));
        start(&world, &[("PROVIDER", "aws")]);
        let began = Instant::now();
        // The first stream is opened again at once; then comes a long pause.
        while began.elapsed() < 5 * SECOND {
            tokio::time::sleep(SECOND).await;
            while world.seen.try_recv().is_ok() {}
        }
        imds.take_asked();
        imds.set(aws::ACTION, r#"{"action":"terminate"}"#);
        let (tried, _) = world.next_stream().await;
        let asked = imds.take_asked();
        let seen = asked.iter().find(|asked| asked.path == aws::ACTION).expect("the look that found it");
        assert_eq!(tried, seen.at);
        let (heard, report) = world.next_report().await;
        assert_eq!(
            (report.kind(), report.termination_notice.unwrap().action.as_str()),
            (ReportKind::First, "terminate")
        );
        assert!(10 * SECOND < heard - tried, "one connection, not many");
    }
}

/// The first address swallows everything, and is dialled for ten seconds by whoever has the time.
#[tokio::test(start_paused = true)]
async fn notice_without_a_session_is_told_in_haste() {
    let waits = Talk::RefuseFor(Code::Unavailable, "NOT_READY", 600_000);
    let dismissed = Talk::Refuse(Code::PermissionDenied, "INSTANCE_DELETED");
    for (refusal, wait) in [(Some(waits), MINUTE), (Some(dismissed), 30 * SECOND), (None, 5 * SECOND)] {
        let mut world = World::new();
        let imds = Imds::aws("spot");
        imds.listen(&world, imds::V4);
        world.net.hang_at("hole.example.com:8994");
        // Refused before the long pause, or still dialling.
        let refused = refusal.is_some();
        world.script_talk(refusal.into_iter().flat_map(|refusal| [refusal.clone(), refusal.clone(), refusal]));
        let addresses = format!("hole.example.com:8994,{}", crate::common::AGENT);
        start(&world, &[("PROVIDER", "aws"), ("SERVER_AGENT_ADDR", &addresses)]);
        tokio::time::sleep(wait).await;
        let mut n_streams = 0;
        while let Ok(seen) = world.seen.try_recv() {
            n_streams += usize::from(matches!(seen, crate::common::Seen::StreamOpened { .. }));
        }
        assert_eq!(0 < n_streams, refused);
        imds.take_asked();
        imds.set(aws::ACTION, r#"{"action":"terminate"}"#);
        let (tried, _) = world.next_stream().await;
        let asked = imds.take_asked();
        let found = asked.iter().find(|asked| asked.path == aws::ACTION).expect("the look that found it");
        assert!(tried - found.at <= Duration::from_millis(1500), "{refused}: {:?}", tried - found.at);
    }
}

/// Whoever has no certificate that counts gets one first; then the notice can be told.
#[tokio::test(start_paused = true)]
async fn notice_is_worth_one_registration_or_rejoin_at_once() {
    let for_long = |reason| (0..20).map(move |_| Register::RefuseFor(Code::Unavailable, reason, 3_600_000));
    let dismissed = (0..20).map(|_| Register::Refuse(Code::PermissionDenied, "INSTANCE_DELETED"));
    let superseded = |n| (0..n).map(|_| Talk::Refuse(Code::Unauthenticated, "CERT_SUPERSEDED")).collect();
    let scripts: [(Vec<Register>, Vec<Talk>); 4] = [
        (for_long("NOT_READY").collect(), vec![]),
        ([Register::Sign].into_iter().chain(for_long("REJOIN_REFUSED")).collect(), superseded(1)),
        ([Register::Sign].into_iter().chain(dismissed).collect(), superseded(1)),
        // Every rejoin is taken, and helps for nothing.
        (vec![], superseded(1000)),
    ];
    for (n, (register, talk)) in scripts.into_iter().enumerate() {
        let mut world = World::new();
        let imds = Imds::aws("spot");
        imds.listen(&world, imds::V4);
        world.script_register(register);
        world.script_talk(talk);
        start(&world, &[("PROVIDER", "aws")]);
        let mut last = world.next_registration().await.0;
        // Until the pauses are long ones.
        loop {
            let (at, _) = world.next_registration().await;
            if 25 * SECOND < at - last {
                break;
            }
            last = at;
        }
        tokio::time::sleep(SECOND).await;
        while world.seen.try_recv().is_ok() {}
        imds.take_asked();
        imds.set(aws::ACTION, r#"{"action":"terminate"}"#);
        let (tried, _) = world.next_registration().await;
        let asked = imds.take_asked();
        let seen = asked.iter().find(|asked| asked.path == aws::ACTION).expect("the look that found it");
        assert_eq!(tried, seen.at, "script {n}");
    }
}

/// The agent's own sockets: connect, write, read, both address families.
#[tokio::test]
async fn notice_travels_over_real_sockets() {
    for host in ["127.0.0.1", "::1"] {
        let mut world = World::new();
        let imds = Imds::aws("spot");
        let Some(address) = imds.listen_at(&world.tasks, host).await else {
            assert_eq!(host, "::1", "every machine has IPv4 on its loopback");
            continue;
        };
        world.write_nonce(HOUR);
        world.start_server();
        let mut parts = world.parts();
        parts.net = std::sync::Arc::new(imds::Mixed(world.net.clone()));
        parts.metadata.aws = vec![address];
        let settings = world.settings_with(&[("PROVIDER", "aws"), ("SPOT_POLL_INTERVAL", "10ms")]);
        world.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, world.control.clone()));
        until_fact(&mut world, "spot_monitor", "ok").await;
        imds.set(aws::ACTION, r#"{"action":"stop","time":"2026-01-31T12:02:00Z"}"#);
        let (_, notice) = next_notice(&mut world).await;
        assert_eq!((notice.action.as_str(), deadline_of(&notice)), ("stop", Some(aws::DEADLINE)));
    }
}
