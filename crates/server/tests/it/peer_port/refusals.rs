//! Whom a server tells nothing, and how much the port bears.

use std::{sync::Arc, time::Duration};

use http::Method;
use nstance_core::ports::{
    clock::Clock as _,
    peers::{Election, Peers as _},
};
use nstance_identity::{
    issue::{FileProfile, FileUsage, ServerProfile},
    keys::KeyPair,
    subject::{San, Subject},
    tls::{ClientAuth, ServerIdentity, client_config, server_config},
};
use nstance_rt::entropy::SystemEntropy;
use nstance_server::peer::serve::serve;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

use super::{Cluster, DAY, LIMIT, NOW, Server, get, http, plain, reason, send, soon, tls};

#[tokio::test]
async fn agents_and_operators_are_refused() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let key = KeyPair::generate(&SystemEntropy::default());
    let (public, now, ca) = (key.public_key(), cluster.clock.now(), cluster.ca());
    let tenant = "default".parse().unwrap();
    let instance = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let operator = "opr06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let agent = ca.issue_agent(&instance, &tenant, &public, now, DAY, &SystemEntropy::default()).unwrap();
    let operator = ca.issue_operator(&operator, &tenant, &public, now, DAY, &SystemEntropy::default()).unwrap();
    for chain in [agent.chain_pem, operator.chain_pem] {
        let (sender, _line) = http(&server.addr, cluster.dials(&chain, &key)).await;
        for path in ["/leadership/shard", "/leadership/cluster", "/", "/leadership/shard?wait_ms=x"] {
            assert_eq!(reason(&get(&sender, path).await), (403, "WRONG_ROLE"), "{path}");
        }
    }
    // A file certificate with all the words of a server has no role at all.
    let file = ca.issue_file(&posing(FileUsage::Peer), &public, now, DAY, &SystemEntropy::default()).unwrap();
    let (sender, _line) = http(&server.addr, cluster.dials(&file.chain_pem, &key)).await;
    assert_eq!(reason(&get(&sender, "/leadership/cluster").await), (403, "CERT_MALFORMED"));
}

/// A file certificate that says all that a server's says.
fn posing(usage: FileUsage) -> FileProfile {
    let subject = Subject {
        common_name: "srv-1".to_owned(),
        organization: vec!["demo".to_owned()],
        organizational_unit: vec!["s1".to_owned()],
        ..Subject::default()
    };
    FileProfile { subject, sans: vec![San::host("127.0.0.1").unwrap()], usage }
}

#[tokio::test]
async fn another_shard_hears_of_the_cluster_election_only() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    server.leads("e1", cluster.clock.monotonic());
    let peers = cluster.peers("srv-9", "s2");
    let error = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert_eq!(error.addr, server.addr);
    assert!(error.message.contains("403 WRONG_SHARD") && error.message.contains("s2"), "{error}");
    let view = soon(peers.ask(&server.addr, &plain(Election::Cluster))).await.unwrap();
    assert_eq!((view.election, view.shard.as_str()), (Election::Cluster, "s1"));
    assert!(server.desk.standbys().is_empty(), "a server of another shard cannot take over");
}

#[tokio::test]
async fn another_cluster_of_the_same_ca_is_refused_by_both_sides() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let (sender, _line) = http(&server.addr, cluster.server_dials("srv-2", "other", "s1")).await;
    assert_eq!(reason(&get(&sender, "/leadership/shard").await), (403, "WRONG_CLUSTER"));
    assert_eq!(reason(&get(&sender, "/leadership/cluster").await), (403, "WRONG_CLUSTER"));

    let other = cluster.authority_at("srv-1", "other", "s1", NOW);
    let other = Server::with(other, cluster.clock.clone()).await;
    let error = soon(cluster.peers("srv-2", "s1").ask(&other.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake") && error.message.contains("other"), "{error}");
}

#[tokio::test]
async fn strangers_fail_in_the_handshake() {
    let (cluster, foreign) = (Cluster::new(), Cluster::new());
    let server = cluster.server().await;
    // A server of another CA trusts not us.
    let error = soon(foreign.peers("srv-2", "s1").ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake"), "{error}");
    // One that trusts us is not trusted by us; and who shows nothing is nobody.
    let key = KeyPair::generate(&SystemEntropy::default());
    let profile = ServerProfile {
        server: "srv-2".parse().unwrap(),
        cluster: "demo".parse().unwrap(),
        shard: "s1".parse().unwrap(),
        sans: Vec::new(),
    };
    let issued = foreign.ca().issue_server(&profile, &key.public_key(), NOW, DAY, &SystemEntropy::default()).unwrap();
    let bundle = cluster.ca();
    let nobody = client_config(bundle.bundle(), None, cluster.clock.clone()).unwrap();
    for config in [cluster.dials(&issued.chain_pem, &key), nobody] {
        // In TLS 1.3 a client is done before it is judged; it hears of it with the first byte it reads.
        let mut stream = tls(&server.addr, config).await.unwrap();
        let refused = timeout(LIMIT, stream.read_u8()).await.unwrap().unwrap_err();
        assert!(refused.to_string().contains("alert"), "{refused}");
    }
}

#[tokio::test]
async fn older_tls_is_refused() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let mut hello = vec![3, 3];
    hello.extend([7; 32]); // random
    hello.extend([0, 0, 2, 0xc0, 0x2b, 1, 0]); // no session, ECDHE-ECDSA-AES128-GCM-SHA256, no compression
    hello.extend([0, 16, 0, 10, 0, 4, 0, 2, 0, 0x1d, 0, 13, 0, 4, 0, 2, 4, 3]); // X25519; ECDSA with SHA-256
    let len = u8::try_from(hello.len()).unwrap();
    let mut record = vec![22, 3, 1, 0, len + 4, 1, 0, 0, len];
    record.extend(hello);
    let mut stream = TcpStream::connect(&server.addr).await.unwrap();
    stream.write_all(&record).await.unwrap();
    let mut answer = Vec::new();
    timeout(LIMIT, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert_eq!(answer, [21, 3, 3, 0, 2, 2, 70], "a fatal alert: protocol version");
}

#[tokio::test]
async fn a_certificate_is_judged_at_every_request() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let authority = cluster.authority("srv-2", "s1");
    let peers = cluster.peers_of(&authority, "s1");
    soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
    // The line still stands, and what was shown on it ran out.
    cluster.clock.advance(8 * DAY);
    let error = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("403 CERT_EXPIRED"), "{error}");
    // Who shows the next one is welcome without a restart: the question goes over a new line.
    assert!(authority.show_renewed(authority.reissue(cluster.clock.now()).unwrap()).unwrap());
    let error = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake"), "now the other side is the one that is late: {error}");
    assert!(server.authority.show_renewed(server.authority.reissue(cluster.clock.now()).unwrap()).unwrap());
    soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
}

#[tokio::test]
async fn an_expired_server_is_refused_by_both_sides() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let long_ago = NOW.minus(20 * DAY);
    let late = cluster.authority_at("srv-2", "demo", "s1", long_ago);
    let peers = cluster.peers_of(&late, "s1");
    let error = soon(peers.ask(&server.addr, &plain(Election::Cluster))).await.unwrap_err();
    assert!(error.message.contains("403 CERT_EXPIRED"), "{error}");

    let late = cluster.authority_at("srv-1", "demo", "s1", long_ago);
    let server = Server::with(late, cluster.clock.clone()).await;
    let error = soon(cluster.peers("srv-2", "s1").ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake"), "{error}");
}

/// Accepts one TLS connection after the other and holds them.
fn hold(listener: TcpListener, config: Arc<ServerConfig>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut held = Vec::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = TlsAcceptor::from(config.clone()).accept(stream).await {
                held.push(stream);
            }
        }
    });
    tasks
}

#[tokio::test]
async fn only_a_server_can_pose_as_one() {
    let cluster = Cluster::new();
    let peers = cluster.peers("srv-2", "s1");
    let key = KeyPair::generate(&SystemEntropy::default());
    let (public, now, ca) = (key.public_key(), cluster.clock.now(), cluster.ca());
    let instance = "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let agent =
        ca.issue_agent(&instance, &"default".parse().unwrap(), &public, now, DAY, &SystemEntropy::default()).unwrap();
    let file = ca.issue_file(&posing(FileUsage::Server), &public, now, DAY, &SystemEntropy::default()).unwrap();
    for (issued, word) in [(agent, ""), (file, "it carries no role")] {
        let identity = Arc::new(ServerIdentity::new(issued.chain_pem.as_bytes(), &key).unwrap());
        let config = server_config(identity, ClientAuth::None, cluster.clock.clone()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let _held = hold(listener, config);
        let error = soon(peers.ask(&addr, &plain(Election::Shard))).await.unwrap_err();
        assert!(error.message.contains("TLS handshake") && error.message.contains(word), "{error}");
    }
}

/// The certificate names no such host, whoever answers there.
#[tokio::test]
async fn the_dialled_host_must_be_in_the_certificate() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let port = server.addr.rsplit_once(':').unwrap().1;
    let peers = cluster.peers("srv-2", "s1");
    soon(peers.ask(&format!("localhost:{port}"), &plain(Election::Shard))).await.unwrap();
    let error = soon(peers.ask(&format!("127.0.0.2:{port}"), &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("connect"), "nobody listens there: {error}");
    let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    serve(&server.tasks, listener, &server.authority, cluster.clock.clone(), server.desk.clone()).unwrap();
    let error = soon(peers.ask(&addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake"), "{error}");
}

#[tokio::test]
async fn an_answer_of_another_shard_is_no_answer() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    // Its certificate says s1, so the server lets it ask; but it believes to be of s2.
    let confused = cluster.peers_of(&cluster.authority("srv-2", "s1"), "s2");
    let error = soon(confused.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("shard s1, ours is s2"), "{error}");
    soon(confused.ask(&server.addr, &plain(Election::Cluster))).await.unwrap();
}

#[tokio::test]
async fn what_is_not_a_question_is_refused() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let (sender, _line) = http(&server.addr, cluster.server_dials("srv-2", "demo", "s1")).await;
    for path in ["/", "/leadership", "/leadership/shard/", "/metrics"] {
        assert_eq!(reason(&get(&sender, path).await), (404, "NOT_FOUND"), "{path}");
    }
    for method in [Method::POST, Method::PUT, Method::DELETE] {
        let answer = send(&sender, method, "/leadership/shard", "").await.unwrap();
        assert_eq!(reason(&answer), (405, "METHOD_NOT_ALLOWED"));
    }
    assert_eq!(send(&sender, Method::HEAD, "/leadership/shard", "").await.unwrap().0, 405);
    for query in ["wait_ms=10001", "wait_ms=x", "role=presiding", "etag=a&etag=b"] {
        assert_eq!(reason(&get(&sender, &format!("/leadership/shard?{query}")).await), (400, "BAD_QUERY"), "{query}");
    }
    let answer = send(&sender, Method::GET, "/leadership/shard", "please").await.unwrap();
    assert_eq!(reason(&answer), (413, "BODY_NOT_ALLOWED"));
    assert_eq!(get(&sender, "/leadership/shard").await.0, 200);
}

#[tokio::test]
async fn a_server_that_asks_without_pause_is_slowed() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    // Two lines of one server share what it may ask.
    let (first, _line) = http(&server.addr, cluster.server_dials("srv-2", "demo", "s1")).await;
    let (second, _line) = http(&server.addr, cluster.server_dials("srv-2", "demo", "s1")).await;
    for _ in 0..20 {
        assert_eq!(get(&first, "/leadership/shard").await.0, 200);
        assert_eq!(get(&second, "/leadership/cluster").await.0, 200);
    }
    for sender in [&first, &second] {
        assert_eq!(reason(&get(sender, "/leadership/shard").await), (429, "TOO_MANY_REQUESTS"));
    }
    let (other, _line) = http(&server.addr, cluster.server_dials("srv-3", "demo", "s1")).await;
    assert_eq!(get(&other, "/leadership/shard").await.0, 200, "others are not touched");
    // Twenty a second come back.
    cluster.clock.advance(Duration::from_millis(100));
    for code in [200, 200, 429] {
        assert_eq!(get(&first, "/leadership/shard").await.0, code);
    }
}

#[tokio::test]
async fn the_port_has_room_for_64_connections() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let config = cluster.server_dials("srv-2", "demo", "s1");
    let mut held = Vec::new();
    for _ in 0..64 {
        held.push(http(&server.addr, config.clone()).await);
    }
    assert!(tls(&server.addr, config.clone()).await.is_err(), "the port is full");
    let peers = cluster.peers("srv-3", "s1");
    soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    for (sender, _) in &held[..3] {
        assert_eq!(get(sender, "/leadership/shard").await.0, 200, "those inside are served");
    }
    held.pop();
    let again = async { while peers.ask(&server.addr, &plain(Election::Shard)).await.is_err() {} };
    timeout(LIMIT, again).await.expect("a place that became free is taken");
}

#[tokio::test]
async fn places_are_not_kept_by_those_who_may_not_ask() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let (asker, _line) = http(&server.addr, cluster.server_dials("srv-2", "demo", "s1")).await;
    let (stranger, _line) = http(&server.addr, cluster.server_dials("srv-2", "other", "s1")).await;
    assert_eq!((get(&asker, "/leadership/shard").await.0, get(&stranger, "/leadership/shard").await.0), (200, 403));
    // Has a server's certificate, and never says a word of HTTP/2.
    let mut mute = tls(&server.addr, cluster.server_dials("srv-3", "demo", "s1")).await.unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut bytes = [0; 256];
        while mute.read(&mut bytes).await.is_ok_and(|n| 0 < n) {}
    });

    // A test that never rests keeps a paused clock from running by itself, so pings are answered in time.
    tokio::time::pause();
    let mut ended = (None, None);
    for tenths in 0..150 {
        for _ in 0..500 {
            tokio::task::yield_now().await;
        }
        if stranger.is_closed() {
            ended.0.get_or_insert(tenths);
        }
        if tasks.try_join_next().is_some() {
            ended.1.get_or_insert(tenths);
        }
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    let (stranger, mute) = (ended.0.expect("strangers leave"), ended.1.expect("the mute leave"));
    assert!((45..60).contains(&stranger) && (45..60).contains(&mute), "{stranger} {mute}");
    tokio::time::resume();
    assert_eq!(get(&asker, "/leadership/shard").await.0, 200, "a server stays");
}
