//! The other servers' desks over the network: TLS 1.3 with certificates on both sides, one HTTP/2 connection each.
//!
//! A connection is kept while it lives, for its end is news: a killed server hangs up, and whoever waits for its answer
//! hears it. It is made anew once our certificate was renewed, since the other side judges the one it was shown.

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    body::Bytes,
    client::conn::http2::{Builder, SendRequest},
    rt::Executor,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nstance_core::{
    ids::{ClusterId, Shard},
    ports::{
        clock::Clock,
        peers::{Election, Knock, PeerAsk, PeerError, PeerView, Peers},
    },
};
use nstance_identity::tls::{TlsError, peer_config};
use nstance_rt::{chain::Chain, tasks::Tasks};
use rustls::pki_types::ServerName;
use tokio::{
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::{
    MAX_WAIT, line,
    wire::{self, Refusal},
};
use crate::authority::Authority;

/// From the first SYN to the end of the handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// How much longer than asked for an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const KNOCK_LIMIT: Duration = Duration::from_millis(300);
/// An answer has a few hundred bytes.
const MAX_ANSWER: usize = 16 * 1024;

pub struct TlsPeers {
    tasks: Tasks,
    authority: Arc<Authority>,
    tls: TlsConnector,
    shard: Shard,
    cluster: ClusterId,
    lines: Mutex<BTreeMap<String, Arc<Line>>>,
}

/// A connection that stands.
struct Line {
    sender: SendRequest<Empty<Bytes>>,
    /// Of the certificate we showed on it.
    serial: String,
}

impl TlsPeers {
    /// Connections are tasks of the scope and end with it.
    pub fn new(
        tasks: &Tasks,
        authority: Arc<Authority>,
        clock: Arc<dyn Clock>,
        cluster: ClusterId,
        shard: Shard,
    ) -> Result<Self, TlsError> {
        let tls = peer_config(authority.identity.clone(), authority.trust.clone(), cluster.clone(), clock)?;
        Ok(Self {
            tasks: tasks.clone(),
            tls: TlsConnector::from(tls),
            authority,
            shard,
            cluster,
            lines: Mutex::default(),
        })
    }

    fn lines(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection to `addr`, or a new one. Two who dial at once end up on the connection of the first.
    async fn line(&self, addr: &str) -> Result<Arc<Line>, String> {
        let serial = self.authority.own_certificate().serial;
        let fits = |line: &&Arc<Line>| line.serial == serial && !line.sender.is_closed();
        if let Some(line) = self.lines().get(addr).filter(fits) {
            return Ok(line.clone());
        }
        let sender = timeout(CONNECT_LIMIT, self.dial(addr))
            .await
            .map_err(|_| format!("no connection within {CONNECT_LIMIT:?}"))??;
        let line = Arc::new(Line { sender, serial: serial.clone() });
        let mut lines = self.lines();
        if let Some(first) = lines.get(addr).filter(fits) {
            return Ok(first.clone());
        }
        lines.retain(|_, line| !line.sender.is_closed());
        lines.insert(addr.to_owned(), line.clone());
        Ok(line)
    }

    /// The next question dials anew.
    fn give_up(&self, addr: &str, line: &Arc<Line>) {
        let mut lines = self.lines();
        if lines.get(addr).is_some_and(|it| Arc::ptr_eq(it, line)) {
            lines.remove(addr);
        }
    }

    async fn dial(&self, addr: &str) -> Result<SendRequest<Empty<Bytes>>, String> {
        let host = host(addr).ok_or("address is not of the form host:port")?;
        let name = ServerName::try_from(host.to_owned()).map_err(|_| format!("`{host}` is not a host"))?;
        let tcp = TcpStream::connect(addr).await.map_err(|error| format!("connect: {}", Chain(&error)))?;
        tcp.set_nodelay(true).and_then(|()| line::watch(&tcp)).map_err(|error| format!("set up socket: {error}"))?;
        let tls = self.tls.connect(name, tcp).await.map_err(|error| format!("TLS handshake: {}", Chain(&error)))?;
        let (sender, connection) = Builder::new(Links(self.tasks.clone()))
            .timer(TokioTimer::new())
            .keep_alive_interval(line::PROBE_AFTER)
            .keep_alive_timeout(line::PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(tls))
            .await
            .map_err(|error| format!("HTTP/2: {}", Chain(&error)))?;
        let addr = addr.to_owned();
        self.tasks.spawn_droppable("peer link", async move {
            if let Err(error) = connection.await {
                tracing::debug!(%addr, error = %Chain(&error), "peer link ended");
            }
        });
        Ok(sender)
    }

    fn check(&self, ask: &PeerAsk, view: PeerView) -> Result<PeerView, String> {
        if view.election != ask.election {
            return Err(format!(
                "asked about the {}, told about the {}",
                ask.election.as_str(),
                view.election.as_str()
            ));
        }
        if view.cluster != self.cluster.as_str() {
            return Err(format!("server is of cluster {}, ours is {}", view.cluster, self.cluster));
        }
        if ask.election == Election::Shard && view.shard != self.shard.as_str() {
            return Err(format!("server is of shard {}, ours is {}", view.shard, self.shard));
        }
        Ok(view)
    }
}

/// Tasks of a connection end with the scope.
#[derive(Clone)]
struct Links(Tasks);

impl<F> Executor<F> for Links
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn_droppable("peer link", future);
    }
}

/// The host of `host:port`, without the brackets of an IPv6 address.
fn host(addr: &str) -> Option<&str> {
    let (host, port) = addr.rsplit_once(':')?;
    port.parse::<u16>().ok()?;
    Some(host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host))
}

/// One question and its answer. An error means that the line is of no use any more.
async fn exchange(line: &Line, uri: Uri) -> Result<(StatusCode, Bytes), String> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = uri;
    let answered = line.sender.clone().send_request(request).await;
    let answer = answered.map_err(|error| format!("link broke: {}", Chain(&error)))?;
    let code = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| format!("answer broke off: {}", Chain(error.as_ref())))?;
    Ok((code, body.to_bytes()))
}

/// The words of a refusal, if it is in the form we know.
fn refused(code: StatusCode, body: &[u8]) -> String {
    match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => format!("{} {}: {}", code.as_u16(), refusal.reason, refusal.message),
        Err(_) => format!("answered {code}"),
    }
}

#[async_trait]
impl Peers for TlsPeers {
    async fn ask(&self, addr: &str, ask: &PeerAsk) -> Result<PeerView, PeerError> {
        let error = |message: String| PeerError { addr: addr.to_owned(), message };
        let wait = if ask.known.is_some() { ask.wait.min(MAX_WAIT) } else { Duration::ZERO };
        let limit = wait + ANSWER_LIMIT;
        let until = Instant::now() + limit;
        let uri = format!("https://{addr}{}", wire::ask_to_path(ask));
        let uri = uri.parse::<Uri>().map_err(|_| error("address is not of the form host:port".to_owned()))?;
        let line = self.line(addr).await.map_err(error)?;
        let answered = match timeout_at(until, exchange(&line, uri)).await {
            Ok(answered) => answered,
            Err(_) => Err(format!("no answer within {limit:?}")),
        };
        let (code, body) = answered.map_err(|message| {
            self.give_up(addr, &line);
            error(message)
        })?;
        if code != StatusCode::OK {
            return Err(error(refused(code, &body)));
        }
        let view = wire::view_from_json(&body).map_err(|bad| error(Chain(&bad).to_string()))?;
        self.check(ask, view).map_err(error)
    }

    async fn knock(&self, addr: &str) -> Knock {
        match timeout(KNOCK_LIMIT, is_refused(addr)).await {
            Ok(true) => Knock::Refused,
            Ok(false) | Err(_) => Knock::Unknown,
        }
    }
}

/// Whether every address behind the name refuses. One that refuses says nothing of another.
async fn is_refused(addr: &str) -> bool {
    let Ok(found) = tokio::net::lookup_host(addr).await else { return false };
    let found: Vec<SocketAddr> = found.collect();
    for addr in &found {
        match TcpStream::connect(addr).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            _ => return false,
        }
    }
    !found.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_addresses() {
        for (addr, expected) in [
            ("127.0.0.1:8991", Some("127.0.0.1")),
            ("[::1]:8991", Some("::1")),
            ("a.example.com:1", Some("a.example.com")),
            ("a.example.com", None),
            ("a.example.com:x", None),
        ] {
            assert_eq!(host(addr), expected, "{addr}");
        }
    }
}
