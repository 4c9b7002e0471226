//! The local HTTP port of a whole agent, over a real socket.

use std::{net::SocketAddr, time::Duration};

use crate::common::World;
use nstance_agent::{State, identity_dir::prepare};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

const HOUR: Duration = Duration::from_secs(3600);

/// A port that was free a moment ago. Should it be taken meanwhile, the agent tries again until it is not.
async fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

#[tokio::test]
async fn serving_agent_is_well_and_shows_its_certificate_and_reports() {
    let world = World::new();
    world.write_nonce(HOUR);
    world.start_server();
    let address = free_port().await;
    let settings = world.settings_with(&[("HEALTH_ADDR", &address.to_string())]);
    prepare(&settings).unwrap();
    world.start_agent_with(settings);
    world.until(|state| *state == State::Serving).await;
    // Slow clients, as many as would take every place but one.
    let mut slow = Vec::new();
    for _ in 0..3 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /hea").await.unwrap();
        slow.push(stream);
    }
    assert_eq!(get(address, "/healthz").await, (200, "ok\n".to_owned()));
    let (status, text) = get(address, "/metrics").await;
    assert_eq!(status, 200);
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    };
    assert_eq!(value("nstance_agent_connected"), 1.0);
    assert_eq!(value("nstance_agent_reports_total{cause=\"first\"}"), 1.0);
    let left = value("nstance_agent_cert_expiry_seconds");
    assert!(86_000.0 < left && left <= 86_400.0, "{left}");
    assert!(0.0 < value("nstance_agent_process_resident_bytes"));
    drop(slow);
}

#[tokio::test]
async fn parked_agent_is_not_well_and_says_why() {
    let world = World::new();
    let address = free_port().await;
    let settings = world.settings_with(&[("HEALTH_ADDR", &address.to_string())]);
    prepare(&settings).unwrap();
    world.start_agent_with(settings);
    let why = world.until_parked().await;
    assert_eq!(get(address, "/healthz").await, (503, format!("parked: {why}\n")));
}
