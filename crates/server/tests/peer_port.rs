//! The peer port over real sockets: what a server tells others of its leadership, whom it tells, and how fast the other
//! end hears that it does not tell any more.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::{Method, Request};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    body::Bytes,
    client::conn::http2::{SendRequest, handshake},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use nstance_core::{
    ids::{ClusterId, Epoch, Shard},
    ports::{
        clock::Clock,
        objects::ETag,
        peers::{Election, Knock, PeerAsk, PeerError, PeerRole, PeerView, Peers as _},
    },
    time::{Mono, Timestamp},
};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{FileProfile, FileUsage, ServerProfile},
    keys::KeyPair,
    subject::{San, Subject},
    tls::{ClientAuth, ServerIdentity, client_config, server_config},
};
use nstance_rt::{entropy::SystemEntropy, tasks::Tasks};
use nstance_server::{
    authority::{Authority, Keys},
    peer::{Desk, Standing, Who, client::TlsPeers, serve::serve},
    vitals::Vitals,
};
use rustls::{ClientConfig, ServerConfig, pki_types::ServerName};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};
use tokio_util::sync::CancellationToken;

/// 2026-01-31T12:00:00Z.
const NOW: Timestamp = Timestamp::from_millis(1_769_860_800_000);
const DAY: Duration = Duration::from_secs(86_400);
/// Longer than anything here takes on a busy machine; only a failing test waits for it.
const LIMIT: Duration = Duration::from_secs(9);

/// A clock that goes when it is told to.
#[derive(Default)]
struct Hand(AtomicU64);

impl Hand {
    fn advance(&self, by: Duration) {
        self.0.fetch_add(u64::try_from(by.as_millis()).unwrap(), Ordering::SeqCst);
    }

    fn went(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::SeqCst))
    }
}

impl Clock for Hand {
    fn now(&self) -> Timestamp {
        NOW.plus(self.went())
    }

    fn monotonic(&self) -> Mono {
        Mono::from_start(Duration::from_secs(1) + self.went())
    }
}

/// A CA, and a clock for all who have certificates of it.
struct Cluster {
    pem: String,
    key: KeyPair,
    clock: Arc<Hand>,
}

impl Cluster {
    fn new() -> Self {
        let key = KeyPair::generate(&SystemEntropy::default());
        let made = make_ca_certificate(
            &key,
            &CaProfile::of("demo".parse().unwrap()),
            NOW.minus(30 * DAY),
            &SystemEntropy::default(),
        );
        Self { pem: made.chain_pem, key, clock: Arc::default() }
    }

    fn ca(&self) -> Ca {
        let key = KeyPair::from_pkcs8_pem(self.key.to_pkcs8_pem().as_bytes()).unwrap();
        Ca::load(self.pem.as_bytes(), [key]).unwrap()
    }

    /// A server's keys, with a certificate that was issued at `at`.
    fn authority_at(&self, id: &str, cluster: &str, shard: &str, at: Timestamp) -> Arc<Authority> {
        let profile = ServerProfile {
            server: id.parse().unwrap(),
            cluster: cluster.parse().unwrap(),
            shard: shard.parse().unwrap(),
            sans: Vec::new(),
        };
        let keys = Keys::new(self.ca(), KeyPair::generate(&SystemEntropy::default()));
        Arc::new(Authority::new(keys, profile, at, Arc::new(SystemEntropy::default())).unwrap())
    }

    fn authority(&self, id: &str, shard: &str) -> Arc<Authority> {
        self.authority_at(id, "demo", shard, self.clock.now())
    }

    async fn server(&self) -> Server {
        Server::with(self.authority("srv-1", "s1"), self.clock.clone()).await
    }

    fn peers_of(&self, authority: &Arc<Authority>, shard: &str) -> TlsPeers {
        let (cluster, shard) = ("demo".parse::<ClusterId>().unwrap(), shard.parse::<Shard>().unwrap());
        TlsPeers::new(&Tasks::new(), authority.clone(), self.clock.clone(), cluster, shard).unwrap()
    }

    /// Another server that asks.
    fn peers(&self, id: &str, shard: &str) -> TlsPeers {
        self.peers_of(&self.authority(id, shard), shard)
    }

    /// What a client dials with that shows this certificate.
    fn dials(&self, chain: &str, key: &KeyPair) -> Arc<ClientConfig> {
        client_config(self.ca().bundle(), Some((chain.as_bytes(), key)), self.clock.clone()).unwrap()
    }

    fn server_dials(&self, id: &str, cluster: &str, shard: &str) -> Arc<ClientConfig> {
        let profile = ServerProfile {
            server: id.parse().unwrap(),
            cluster: cluster.parse().unwrap(),
            shard: shard.parse().unwrap(),
            sans: Vec::new(),
        };
        let key = KeyPair::generate(&SystemEntropy::default());
        let issued =
            self.ca().issue_server(&profile, &key.public_key(), self.clock.now(), DAY, &SystemEntropy::default());
        self.dials(&issued.unwrap().chain_pem, &key)
    }
}

/// A server's desk and its port.
struct Server {
    desk: Arc<Desk>,
    authority: Arc<Authority>,
    tasks: Tasks,
    addr: String,
}

impl Server {
    async fn with(authority: Arc<Authority>, clock: Arc<Hand>) -> Self {
        let who = Who {
            cluster: "demo".parse().unwrap(),
            shard: "s1".parse().unwrap(),
            server_id: "srv-1".parse().unwrap(),
            process: "00112233445566778899aabbccddeeff".to_owned(),
        };
        let desk = Arc::new(Desk::new(who, clock.clone(), Arc::new(Vitals::default())));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let tasks = Tasks::new();
        serve(&tasks, listener, &authority, clock, desk.clone()).unwrap();
        Self { desk, authority, tasks, addr }
    }

    fn stand(&self, change: impl FnOnce(&mut Standing)) {
        self.desk.stand(Election::Shard, change);
    }

    /// Leads under this ETag, renewed at this moment.
    fn leads(&self, etag: &str, renewed: Mono) {
        self.stand(|standing| {
            *standing = Standing {
                role: PeerRole::Leading,
                epoch: Epoch(7),
                etag: Some(ETag(etag.to_owned())),
                renewed: Some(renewed),
                ttl: Duration::from_secs(6),
            };
        });
    }
}

fn plain(election: Election) -> PeerAsk {
    PeerAsk { election, known: None, wait: Duration::ZERO }
}

fn knowing(role: PeerRole, etag: &str, wait: Duration) -> PeerAsk {
    PeerAsk { election: Election::Shard, known: Some((role, Some(ETag(etag.to_owned())))), wait }
}

/// The answer, or a failed test if it takes long.
async fn soon(answer: impl Future<Output = Result<PeerView, PeerError>>) -> Result<PeerView, PeerError> {
    timeout(LIMIT, answer).await.expect("an answer or an error in time")
}

/// Looks again until it holds.
async fn until(mut holds: impl FnMut() -> bool) {
    let looking = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, looking).await.expect("it holds in time");
}

async fn tls(addr: &str, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(addr).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    TlsConnector::from(config).connect(name, stream).await
}

type Sender = SendRequest<Full<Bytes>>;

async fn http(addr: &str, config: Arc<ClientConfig>) -> (Sender, JoinSet<()>) {
    let stream = TokioIo::new(tls(addr, config).await.unwrap());
    let (sender, connection) = handshake(TokioExecutor::new(), stream).await.unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _ = connection.await;
    });
    (sender, tasks)
}

async fn send(sender: &Sender, method: Method, path: &str, body: &'static str) -> hyper::Result<(u16, Value)> {
    let mut request = Request::new(Full::new(Bytes::from_static(body.as_bytes())));
    *request.method_mut() = method;
    *request.uri_mut() = format!("https://127.0.0.1{path}").parse().unwrap();
    let answer = sender.clone().send_request(request).await?;
    let code = answer.status().as_u16();
    let body = answer.into_body().collect().await?.to_bytes();
    Ok((code, serde_json::from_slice(&body).unwrap_or(Value::Null)))
}

async fn get(sender: &Sender, path: &str) -> (u16, Value) {
    timeout(LIMIT, send(sender, Method::GET, path, "")).await.unwrap().unwrap()
}

fn reason((code, body): &(u16, Value)) -> (u16, &str) {
    (*code, body["reason"].as_str().unwrap_or_default())
}

/// T18. A server that cannot renew says so by the age of what is durable, however much it believes in itself.
#[tokio::test]
async fn peer_health_tells_the_durable_truth() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    let nothing = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
    assert_eq!((nothing.role, nothing.etag, nothing.renewed_ago), (PeerRole::Following, None, None));

    server.leads("\"e-1\"", cluster.clock.monotonic());
    for seconds in [0, 3, 4] {
        cluster.clock.advance(Duration::from_secs(seconds));
        let view = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
        assert_eq!(
            view,
            PeerView {
                election: Election::Shard,
                cluster: "demo".to_owned(),
                shard: "s1".to_owned(),
                server_id: "srv-1".to_owned(),
                process: "00112233445566778899aabbccddeeff".to_owned(),
                role: PeerRole::Leading,
                epoch: Epoch(7),
                etag: Some(ETag("\"e-1\"".to_owned())),
                renewed_ago: Some(cluster.clock.went()),
                ttl: Duration::from_secs(6),
                ready: false,
                version: env!("CARGO_PKG_VERSION").to_owned(),
            }
        );
    }
    // The other election is told of by itself.
    let other = soon(peers.ask(&server.addr, &plain(Election::Cluster))).await.unwrap();
    assert_eq!((other.election, other.role, other.epoch), (Election::Cluster, PeerRole::Following, Epoch(0)));
    // Only the next durable renewal makes it young again.
    server.leads("\"e-2\"", cluster.clock.monotonic());
    let view = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
    assert_eq!((view.etag, view.renewed_ago), (Some(ETag("\"e-2\"".to_owned())), Some(Duration::ZERO)));
}

#[tokio::test]
async fn what_differs_is_told_at_once() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e/1", cluster.clock.monotonic());
    // Ten seconds are more than the limit of an answer here: none of these waits.
    let wait = Duration::from_secs(10);
    for known in [knowing(PeerRole::Leading, "e/0", wait), knowing(PeerRole::Stalled, "e/1", wait)] {
        let view = soon(peers.ask(&server.addr, &known)).await.unwrap();
        assert_eq!((view.role, view.etag), (PeerRole::Leading, Some(ETag("e/1".to_owned()))));
    }
    let known = PeerAsk { known: Some((PeerRole::Leading, None)), ..knowing(PeerRole::Leading, "", wait) };
    soon(peers.ask(&server.addr, &known)).await.unwrap();

    // Without a role, an ETag is what the leader had.
    let (sender, _line) = http(&server.addr, cluster.server_dials("srv-3", "demo", "s1")).await;
    server.stand(|standing| standing.role = PeerRole::Stopping);
    let (code, body) = get(&sender, "/leadership/shard?etag=e%2F1&wait_ms=10000").await;
    assert_eq!((code, body["role"].as_str()), (200, Some("stopping")));
}

#[tokio::test]
async fn two_who_wait_hear_of_every_change() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let pollers = [cluster.peers("srv-2", "s1"), cluster.peers("srv-3", "s1")];
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let changes: [(PeerRole, &str, PeerRole, &str); 3] = [
        (PeerRole::Leading, "e1", PeerRole::Leading, "e2"),
        (PeerRole::Leading, "e2", PeerRole::Stopping, "e2"),
        (PeerRole::Stopping, "e2", PeerRole::Released, "e3"),
    ];
    for (role, etag, new_role, new_etag) in changes {
        let ask = knowing(role, etag, Duration::from_secs(10));
        let waiting = futures::future::join_all(pollers.iter().map(|peers| soon(peers.ask(&server.addr, &ask))));
        let change = async {
            // Those who asked before are not here any more, so each question is an arrival.
            while server.desk.standbys().len() < 2 {
                arrivals.changed().await.unwrap();
            }
            server.stand(|standing| {
                standing.role = new_role;
                standing.etag = Some(ETag(new_etag.to_owned()));
            });
        };
        let (heard, ()) = tokio::join!(waiting, change);
        for view in heard {
            let view = view.unwrap();
            assert_eq!((view.role, view.etag), (new_role, Some(ETag(new_etag.to_owned()))));
        }
        cluster.clock.advance(Duration::from_secs(4));
        assert!(server.desk.standbys().is_empty());
    }
}

#[tokio::test]
async fn a_wait_without_change_ends_with_the_present_state() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let (began, wait) = (Instant::now(), Duration::from_millis(60));
    let view = soon(peers.ask(&server.addr, &knowing(PeerRole::Leading, "e1", wait))).await.unwrap();
    assert_eq!((view.role, view.etag), (PeerRole::Leading, Some(ETag("e1".to_owned()))));
    assert!(wait <= began.elapsed());
}

#[tokio::test]
async fn a_caller_that_hangs_up_waits_no_longer() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
    tokio::select! {
        biased;
        view = peers.ask(&server.addr, &ask) => panic!("nothing changed: {view:?}"),
        arrived = arrivals.changed() => arrived.unwrap(),
    }
    // While a question is open its caller is here, however late it is.
    until(|| {
        cluster.clock.advance(Duration::from_secs(4));
        server.desk.standbys().is_empty()
    })
    .await;
    // Only the question was given up, not the line.
    soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap();
}

#[tokio::test]
async fn a_stopping_server_answers_open_questions() {
    let cluster = Cluster::new();
    let (server, peers) = (cluster.server().await, cluster.peers("srv-2", "s1"));
    server.leads("e1", cluster.clock.monotonic());
    let mut arrivals = server.desk.arrivals();
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
    let stop = async {
        arrivals.changed().await.unwrap();
        server.tasks.end(LIMIT).await
    };
    let (view, n_aborted) = tokio::join!(soon(peers.ask(&server.addr, &ask)), stop);
    assert_eq!((view.unwrap().role, n_aborted), (PeerRole::Leading, 0));
    assert_eq!(peers.knock(&server.addr).await, Knock::Refused);
}

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
    authority.show(authority.reissue(cluster.clock.now()).unwrap()).unwrap();
    let error = soon(peers.ask(&server.addr, &plain(Election::Shard))).await.unwrap_err();
    assert!(error.message.contains("TLS handshake"), "now the other side is the one that is late: {error}");
    server.authority.show(server.authority.reissue(cluster.clock.now()).unwrap()).unwrap();
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

/// A runtime of its own dies like a process: everything in it is dropped where it stands, and the kernel hangs up.
#[test]
fn a_killed_server_is_heard_at_once() {
    let cluster = Cluster::new();
    let theirs = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let ours = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let server = theirs.block_on(cluster.server());
    server.leads("e1", cluster.clock.monotonic());
    ours.block_on(async {
        let peers = cluster.peers("srv-2", "s1");
        let mut arrivals = server.desk.arrivals();
        let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));
        let kill = async {
            arrivals.changed().await.unwrap();
            theirs.shutdown_background();
            Instant::now()
        };
        let (answer, killed) = tokio::join!(soon(peers.ask(&server.addr, &ask)), kill);
        let error = answer.unwrap_err();
        assert_eq!(error.addr, server.addr);
        assert!(error.message.contains("link broke"), "{error}");
        assert!(killed.elapsed() < Duration::from_secs(1), "a broken line is no timeout");
        // Sockets of a dying process are closed one by one; the listening one may be the last.
        let buried = async { while peers.knock(&server.addr).await != Knock::Refused {} };
        timeout(LIMIT, buried).await.expect("nobody listens any more");
        let error = soon(peers.ask(&server.addr, &ask)).await.unwrap_err();
        assert!(error.message.contains("connect") && error.message.contains("refused"), "{error}");
    });
}

/// Carries bytes between two sockets until it is told to hold them back.
struct Wire {
    addr: String,
    cut: CancellationToken,
    _tasks: JoinSet<()>,
}

impl Wire {
    async fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let (cut, target) = (CancellationToken::new(), target.to_owned());
        let is_cut = cut.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut far = TcpStream::connect(target).await.unwrap();
            tokio::select! {
                biased;
                () = is_cut.cancelled() => {}
                _ = copy_bidirectional(&mut near, &mut far) => return,
            }
            // Both sockets stay open: this is silence, not an end.
            std::future::pending::<()>().await;
        });
        Self { addr, cut, _tasks: tasks }
    }
}

/// The one test that waits for real, because HTTP/2 pings go by the machine's time.
#[tokio::test]
async fn a_silent_peer_is_noticed_in_time() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    server.leads("e1", cluster.clock.monotonic());
    let ask = knowing(PeerRole::Leading, "e1", Duration::from_secs(10));

    let mute = async {
        // Accepts, by the kernel's hand, and says nothing.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let began = Instant::now();
        let error = soon(cluster.peers("srv-2", "s1").ask(&addr, &ask)).await.unwrap_err();
        assert!(error.message.contains("no connection within 1s"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(2));
    };
    let frozen = async {
        // Falls silent amid a long poll, as a frozen machine does.
        let wire = Wire::to(&server.addr).await;
        let peers = cluster.peers("srv-3", "s1");
        let mut arrivals = server.desk.arrivals();
        let freeze = async {
            arrivals.changed().await.unwrap();
            wire.cut.cancel();
            Instant::now()
        };
        let (answer, silent) = tokio::join!(soon(peers.ask(&wire.addr, &ask)), freeze);
        let error = answer.unwrap_err();
        assert!(error.message.contains("link broke"), "{error}");
        assert!(silent.elapsed() < Duration::from_secs(3), "noticed after {:?}", silent.elapsed());
        // And its place is free again.
        until(|| {
            cluster.clock.advance(Duration::from_secs(4));
            server.desk.standbys().is_empty()
        })
        .await;
    };
    tokio::join!(mute, frozen);
}

#[tokio::test]
async fn only_a_refusal_answers_a_knock() {
    let cluster = Cluster::new();
    let peers = cluster.peers("srv-2", "s1");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    assert_eq!(peers.knock(&addr).await, Knock::Unknown, "somebody is there");
    drop(listener);
    assert_eq!(peers.knock(&addr).await, Knock::Refused);
    assert_eq!(peers.knock("no such place").await, Knock::Unknown);

    // A full queue: the kernel lets further SYNs fall, as a frozen or unplugged host would.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let full = socket.listen(1).unwrap();
    let addr = full.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = timeout(Duration::from_millis(100), TcpStream::connect(addr)).await {
        waiting.push(stream.unwrap());
    }
    let began = Instant::now();
    assert_eq!(peers.knock(&addr.to_string()).await, Knock::Unknown);
    assert!(Duration::from_millis(300) <= began.elapsed() && began.elapsed() < Duration::from_secs(1));
}

#[tokio::test]
async fn questions_to_one_address_share_a_line() {
    let cluster = Cluster::new();
    let server = cluster.server().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (counted, n_lines) = watch::channel(0);
    let (target, cut) = (server.addr.clone(), CancellationToken::new());
    let is_cut = cut.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            counted.send_modify(|n| *n += 1);
            let mut far = TcpStream::connect(&target).await.unwrap();
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                () = is_cut.cancelled(), if *counted.borrow() == 1 => {}
            }
        }
    });
    let peers = cluster.peers("srv-2", "s1");
    for election in [Election::Shard, Election::Cluster, Election::Shard] {
        soon(peers.ask(&addr, &plain(election))).await.unwrap();
    }
    assert_eq!(*n_lines.borrow(), 1);
    // A line that broke is replaced by the next question that finds it so.
    cut.cancel();
    let again = async { while peers.ask(&addr, &plain(Election::Shard)).await.is_err() {} };
    timeout(LIMIT, again).await.expect("a new line");
    assert_eq!(*n_lines.borrow(), 2);
}
