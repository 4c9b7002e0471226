use std::{future::Future, sync::Arc};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{BootReport, HealthReportRequest, ReportKind};
use nstance_rt::clock::TokioClock;
use tokio::io::duplex;

use super::*;
use crate::{
    health::wire_time,
    notice::{Action, Notice},
};

fn context(more: &[(&str, &str)]) -> (tempfile::TempDir, Context) {
    let (dir, mut ctx) = Context::for_tests(more);
    ctx.parts.clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_769_860_800_000)));
    (dir, ctx)
}

async fn ask(ctx: &Context, life: &Life, request: &[u8]) -> String {
    let (mut ours, theirs) = duplex(64 * 1024);
    ours.write_all(request).await.unwrap();
    let mut text = String::new();
    let (conversed, read) = tokio::join!(converse(ctx, life, theirs), ours.read_to_string(&mut text));
    conversed.unwrap();
    read.unwrap();
    text
}

async fn get(ctx: &Context, life: &Life, path: &str) -> (u16, String) {
    let text = ask(ctx, life, format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await;
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Runs the follower beside `script`.
async fn beside<T>(ctx: &Context, life: &Life, script: impl Future<Output = T>) -> T {
    tokio::select! {
        biased;
        never = life.follow(ctx) => match never {},
        done = script => done,
    }
}

async fn settle() {
    sleep(Duration::from_millis(1)).await;
}

#[tokio::test(start_paused = true)]
async fn health_follows_the_state() {
    let (_dir, ctx) = context(&[]);
    let life = Life::new(&ctx);
    beside(&ctx, &life, async {
        assert_eq!(get(&ctx, &life, "/healthz").await, (503, "starting\n".into()));
        for (state, expected) in [
            (State::Enrolling, (503, "enrolling\n")),
            (State::Connecting, (200, "ok\n")),
            (State::Serving, (200, "ok\n")),
            (State::Rejoining, (503, "rejoining\n")),
            (State::Parked("NONCE_USED: no".into()), (503, "parked: NONCE_USED: no\n")),
            (State::Dismissed, (503, "dismissed\n")),
            (State::Leaving, (503, "leaving\n")),
        ] {
            ctx.control.set(state);
            settle().await;
            assert_eq!(get(&ctx, &life, "/healthz").await, (expected.0, expected.1.to_owned()));
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn looking_for_a_session_is_well_for_a_minute() {
    let (_dir, ctx) = context(&[]);
    let life = Life::new(&ctx);
    beside(&ctx, &life, async {
        ctx.control.set(State::Serving);
        settle().await;
        ctx.control.set(State::Connecting);
        settle().await;
        sleep(Duration::from_secs(59)).await;
        assert_eq!(get(&ctx, &life, "/healthz").await.0, 200);
        sleep(Duration::from_secs(1)).await;
        assert_eq!(get(&ctx, &life, "/healthz").await, (503, "connecting\n".into()));
        ctx.control.set(State::Serving);
        settle().await;
        assert_eq!(get(&ctx, &life, "/healthz").await.0, 200);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn metrics_tell_what_there_is() {
    let (dir, ctx) = context(&[]);
    let life = Life::new(&ctx);
    for name in ["recv/a.crt", "recv/b.env", "recv/.hidden"] {
        std::fs::write(dir.path().join(name), "").unwrap();
    }
    std::fs::create_dir(dir.path().join("recv/errors")).unwrap();
    std::fs::write(dir.path().join("recv/errors/c.crt"), "bad").unwrap();
    for kind in [ReportKind::First, ReportKind::Periodic, ReportKind::Periodic] {
        ctx.board.fill(&mut HealthReportRequest { kind: kind.into(), ..Default::default() });
    }
    let notice = Notice { action: Action::Preempt, deadline: None, detected_at: ctx.now(), id: "n".into() };
    ctx.board.set_notice(notice);
    ctx.board.set_provider([("spot_monitor".to_owned(), "unknown".to_owned())].into());
    let stage = nstance_proto::v1::BootStage {
        name: "user:apt".into(),
        started: Some(wire_time(ctx.now())),
        ended: Some(wire_time(ctx.now().plus(Duration::from_millis(2500)))),
        ..Default::default()
    };
    ctx.board.set_boot(BootReport { stages: vec![stage], ..Default::default() });
    beside(&ctx, &life, async {
        for state in [State::Connecting, State::Serving, State::Connecting, State::Serving] {
            ctx.control.set(state);
            settle().await;
        }
        let (status, text) = get(&ctx, &life, "/metrics?x=1").await;
        assert_eq!(status, 200);
        for line in [
            "nstance_agent_state{state=\"serving\"} 1",
            "nstance_agent_state{state=\"parked\"} 0",
            "nstance_agent_connected 1",
            "nstance_agent_reconnects_total 1",
            "nstance_agent_reports_total{cause=\"periodic\"} 2",
            "nstance_agent_reports_total{cause=\"change\"} 0",
            "nstance_agent_notice{action=\"preempt\"} 1",
            "nstance_agent_notice{action=\"leave\"} 0",
            "nstance_agent_files{state=\"ok\"} 2",
            "nstance_agent_files{state=\"error\"} 1",
            "nstance_agent_spot_monitor{state=\"unknown\"} 1",
            "nstance_agent_boot_stage_seconds{stage=\"user:apt\"} 2.5",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
        assert!(text.contains("\nnstance_agent_process_resident_bytes "), "{text}");
        assert!(!text.contains("cert_expiry"), "there is no certificate: {text}");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        for sample in samples {
            let (name, value) = sample.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{sample}");
            let name = name.split('{').next().unwrap();
            assert!(text.contains(&format!("# TYPE {name} ")), "{sample}");
        }
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn odd_requests_are_answered_or_dropped() {
    let (_dir, ctx) = context(&[]);
    let life = Life::new(&ctx);
    assert_eq!(get(&ctx, &life, "/").await.0, 404);
    let status = |text: String| text.split(' ').nth(1).map(str::to_owned);
    let post = ask(&ctx, &life, b"POST /healthz HTTP/1.1\r\n\r\n").await;
    assert_eq!(status(post).as_deref(), Some("405"));
    let head = ask(&ctx, &life, b"HEAD /healthz HTTP/1.1\r\n\r\n").await;
    assert!(head.contains(" 503 ") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(ask(&ctx, &life, b"GET /healthz HTTP/1.0\n\n").await.contains(" 503 "));
    assert!(ask(&ctx, &life, b"\xff\xfe\n\n").await.contains(" 405 "));
    let huge = [b"GET /healthz HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 2 * MAX_HEADER]].concat();
    let (mut ours, theirs) = duplex(64 * 1024);
    ours.write_all(&huge).await.unwrap();
    let mut text = String::new();
    let (_, read) = tokio::join!(converse(&ctx, &life, theirs), ours.read_to_string(&mut text));
    read.unwrap();
    assert!(text.contains(" 431 "), "{text}");
    let (ours, theirs) = duplex(64);
    drop(ours);
    assert!(converse(&ctx, &life, theirs).await.is_ok());
}

/// The kernel takes connections for whoever listens, so that connecting tells whether somebody does.
#[tokio::test(start_paused = true)]
async fn taken_port_is_tried_again_until_it_is_free() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap();
    let (_dir, ctx) = context(&[("HEALTH_ADDR", &address.to_string())]);
    let script = async {
        sleep(Duration::from_secs(35)).await;
        drop(holder);
        assert!(std::net::TcpStream::connect(address).is_err());
        sleep(Duration::from_secs(10)).await;
        assert!(std::net::TcpStream::connect(address).is_ok());
    };
    tokio::select! {
        never = serve(&ctx) => match never {},
        () = script => {}
    }
}
