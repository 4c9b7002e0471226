//! The peer port: other servers of the cluster ask here who leads, over TLS 1.3 with certificates on both sides.
//!
//! Whoever has no certificate of our CA does not get past the handshake. Whoever has one that is not a server's is told
//! so. The certificate is judged at every request, for one that was good at the handshake may have run out since.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{
    body::{Body as _, Bytes, Incoming},
    rt::Executor,
    server::conn::http2,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nstance_core::{
    ids::{ServerId, Shard},
    ports::{
        clock::Clock,
        peers::{Election, PeerAsk},
    },
};
use nstance_identity::{
    peer::{Peer, PeerName},
    tls::{ClientAuth, TlsError, server_config},
};
use nstance_rt::{chain::Chain, tasks::Tasks};
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected as _;

use super::{
    Desk, line,
    wire::{self, Refusal},
};
use crate::{
    authority::Authority,
    grpc::{
        conn::{Conn, ConnInfo, PortLimits, accept},
        limits::Bucket,
    },
};

const LIMITS: PortLimits = PortLimits {
    max_connections: 64,
    handshake: Duration::from_secs(5),
    user_timeout: Some(line::USER_TIMEOUT),
    // Pings go both ways every second: what is silent for longer never began to speak HTTP/2.
    idle: Some(Duration::from_secs(5)),
};
/// Whoever has a certificate of ours that opens nothing here has time to read why, and then leaves its place.
const STRANGER_LIFE: Duration = Duration::from_secs(5);
/// A server has one question open per election; the rest is room for those that were just given up.
const MAX_STREAMS: u32 = 16;
/// Requests per second of one server, whatever number of connections it has.
const RATE: f64 = 20.0;
const BURST: f64 = 40.0;
/// Servers remembered. One that was forgotten starts with a full bucket, so forgetting the fullest costs nothing.
const MAX_REMEMBERED: usize = 1000;

/// Answers other servers until the scope ends, which should be the server's and not a term's: a standby tells too.
pub fn serve(
    tasks: &Tasks,
    listener: TcpListener,
    authority: &Arc<Authority>,
    clock: Arc<dyn Clock>,
    desk: Arc<Desk>,
) -> Result<(), TlsError> {
    let tls = server_config(authority.identity.clone(), ClientAuth::Required(authority.trust.clone()), clock.clone())?;
    if let Err(error) = line::watch(&listener) {
        // HTTP/2 pings find a broken line all the same.
        tracing::warn!(%error, "kernel does not watch connections of the peer port");
    }
    let mut incoming = accept(tasks, listener, tls, LIMITS);
    let port = Arc::new(Port { desk, clock, stop: tasks.token().clone(), buckets: Mutex::default() });
    let scope = tasks.clone();
    tasks.spawn_droppable("peer port", async move {
        while let Some(accepted) = incoming.next().await {
            if let Ok(conn) = accepted {
                scope.spawn("peer connection", connection(scope.clone(), port.clone(), conn));
            }
        }
    });
    Ok(())
}

/// Serves one connection. When the scope ends, open questions are answered and nothing new is taken.
async fn connection(scope: Tasks, port: Arc<Port>, conn: Conn) {
    let info = conn.connect_info();
    let remote = info.remote;
    let is_stranger = port.caller(&info).is_err();
    let stop = scope.token().clone();
    let mut http = http2::Builder::new(Streams(scope));
    http.timer(TokioTimer::new())
        .keep_alive_interval(line::PROBE_AFTER)
        .keep_alive_timeout(line::PING_TIMEOUT)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(8 * 1024)
        .auto_date_header(false);
    let service = service_fn(move |request| {
        let (port, info) = (port.clone(), info.clone());
        async move { Ok::<_, Infallible>(port.respond(&info, &request).await) }
    });
    let mut served = std::pin::pin!(http.serve_connection(TokioIo::new(conn), service));
    let ended = tokio::select! {
        biased;
        ended = served.as_mut() => ended,
        () = stop.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
        () = tokio::time::sleep(STRANGER_LIFE), if is_stranger => Ok(()),
    };
    if let Err(error) = ended {
        tracing::debug!(%remote, error = %Chain(&error), "peer connection ended");
    }
}

/// Requests of a connection are tasks of the scope.
#[derive(Clone)]
struct Streams(Tasks);

impl<F> Executor<F> for Streams
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn("peer request", future);
    }
}

struct Port {
    desk: Arc<Desk>,
    clock: Arc<dyn Clock>,
    stop: CancellationToken,
    buckets: Mutex<BTreeMap<ServerId, Bucket>>,
}

/// A server of our cluster, proved.
struct Caller {
    server: ServerId,
    shard: Shard,
}

/// A request that is not answered, and why.
struct Refused {
    code: StatusCode,
    reason: &'static str,
    message: String,
}

impl Refused {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    fn denied(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, reason, message)
    }
}

impl Port {
    async fn respond(&self, info: &ConnInfo, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let (caller, ask) = match self.admit(info, request) {
            Ok(admitted) => admitted,
            Err(refused) => {
                tracing::debug!(
                    remote = %info.remote,
                    reason = refused.reason,
                    message = refused.message,
                    "peer request refused"
                );
                let refusal = Refusal { reason: refused.reason.to_owned(), message: refused.message };
                let json = serde_json::to_vec(&refusal).expect("strings are JSON");
                // Whoever sends HEAD takes a body for a breach of protocol.
                return respond(refused.code, if request.method() == Method::HEAD { Vec::new() } else { json });
            }
        };
        let (id, same_shard) = (caller.server.to_string(), caller.shard == self.desk.who().shard);
        let view = tokio::select! {
            biased;
            view = self.desk.answer(&id, same_shard, &ask) => view,
            // Better the last truth at once than a broken line.
            () = self.stop.cancelled() => {
                self.desk.answer(&id, same_shard, &PeerAsk { known: None, wait: Duration::ZERO, ..ask }).await
            }
        };
        respond(StatusCode::OK, wire::view_to_json(&view))
    }

    /// Who asks, and what. Strangers learn nothing, not even which paths there are.
    fn admit(&self, info: &ConnInfo, request: &Request<Incoming>) -> Result<(Caller, PeerAsk), Refused> {
        let caller = self.caller(info)?;
        self.pace(&caller.server)?;
        let path = request.uri().path();
        let Some(election) = wire::election(path) else {
            return Err(Refused::new(StatusCode::NOT_FOUND, "NOT_FOUND", format!("there is nothing at {path}")));
        };
        if request.method() != Method::GET {
            let message = format!("{path} answers GET only");
            return Err(Refused::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message));
        }
        let ours = &self.desk.who().shard;
        if election == Election::Shard && caller.shard != *ours {
            let message = format!("this is a server of shard {ours}, the certificate is of shard {}", caller.shard);
            return Err(Refused::denied("WRONG_SHARD", message));
        }
        let ask = wire::ask_from_uri(election, request.uri())
            .map_err(|message| Refused::new(StatusCode::BAD_REQUEST, "BAD_QUERY", message))?;
        if !request.body().is_end_stream() {
            let message = "a question has no body";
            return Err(Refused::new(StatusCode::PAYLOAD_TOO_LARGE, "BODY_NOT_ALLOWED", message));
        }
        Ok((caller, ask))
    }

    fn caller(&self, info: &ConnInfo) -> Result<Caller, Refused> {
        let Some(leaf) = &info.leaf else {
            return Err(Refused::denied("CERT_INVALID", "this port asks for a client certificate"));
        };
        let peer =
            Peer::accept(leaf, self.clock.now()).map_err(|error| Refused::denied(error.reason(), error.to_string()))?;
        let role = peer.role();
        let PeerName::Server { server, cluster, shard } = peer.name else {
            let message = format!("this port serves servers, the certificate has the role {}", role.as_str());
            return Err(Refused::denied("WRONG_ROLE", message));
        };
        let ours = &self.desk.who().cluster;
        if cluster != *ours {
            let message = format!("this is a server of cluster {ours}, the certificate is of cluster {cluster}");
            return Err(Refused::denied("WRONG_CLUSTER", message));
        }
        Ok(Caller { server, shard })
    }

    fn pace(&self, server: &ServerId) -> Result<(), Refused> {
        let now = self.clock.monotonic();
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        if MAX_REMEMBERED <= buckets.len() {
            buckets.retain(|_, bucket| {
                bucket.fill(now, RATE, BURST);
                bucket.tokens < BURST
            });
        }
        let bucket = buckets.entry(server.clone()).or_insert(Bucket { tokens: BURST, at: now });
        bucket.fill(now, RATE, BURST);
        if bucket.tokens < 1.0 {
            let message = format!("server {server} asks more than {RATE} times a second");
            return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, "TOO_MANY_REQUESTS", message));
        }
        bucket.tokens -= 1.0;
        Ok(())
    }
}

fn respond(code: StatusCode, json: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(json)));
    *response.status_mut() = code;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    if code == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(header::ALLOW, header::HeaderValue::from_static("GET"));
    }
    response
}
