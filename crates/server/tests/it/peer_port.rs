//! The peer port over real sockets: what a server tells others of its leadership, whom it tells, and how fast the other
//! end hears that it does not tell any more.

mod dead;
mod refusals;
mod waits;

use std::{
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
        peers::{Election, PeerAsk, PeerError, PeerRole, PeerView},
    },
    time::{Mono, Timestamp},
};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::ServerProfile,
    keys::KeyPair,
    tls::client_config,
};
use nstance_rt::{entropy::SystemEntropy, tasks::Tasks};
use nstance_server::{
    authority::{Authority, Keys},
    peer::{Desk, Standing, Who, client::TlsPeers, serve::serve},
    vitals::Vitals,
};
use rustls::{ClientConfig, pki_types::ServerName};
use serde_json::Value;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

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
