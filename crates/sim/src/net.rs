//! From clients to whoever leads, without a socket: the calls go through the very services and the very authorisation
//! that stand behind the ports, with a latency, and sometimes an answer is lost.

use std::{
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame};
use nstance_core::ids::Epoch;
use nstance_rt::{
    entropy::{below, jitter},
    process::Process,
};
use nstance_server::grpc::{
    conn::ConnInfo,
    serve::{Callable, Inside},
};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::{Status, body::Body};
use tower::{Service, ServiceExt as _};

use crate::site::Site;

/// Which of the three ports is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    Registration,
    Operator,
    Agent,
}

impl Port {
    fn of(self, inside: &Inside) -> Callable {
        match self {
            Self::Registration => inside.registration.clone(),
            Self::Operator => inside.operator.clone(),
            Self::Agent => inside.agent.clone(),
        }
    }
}

const LATENCY: Duration = Duration::from_millis(4);

/// From a new lease until connections to the old leader are reset.
const MOVE: Duration = Duration::from_secs(1);

/// One connection of a client.
#[derive(Clone)]
pub(crate) struct Wire {
    pub(crate) site: Arc<Site>,
    pub(crate) port: Port,
    pub(crate) leaf: Option<Arc<[u8]>>,
    /// Cancelled when the connection ends, as a server notices it.
    pub(crate) closed: CancellationToken,
    /// Nothing gets through while this says so.
    pub(crate) cut: Arc<std::sync::atomic::AtomicBool>,
}

impl Wire {
    pub(crate) fn new(site: &Arc<Site>, port: Port, leaf: Option<Arc<[u8]>>) -> Self {
        Self { site: site.clone(), port, leaf, closed: CancellationToken::new(), cut: Arc::default() }
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(std::sync::atomic::Ordering::SeqCst)
    }

    async fn carry(self, mut request: http::Request<Body>) -> Result<http::Response<Body>, Status> {
        let net = self.site.net.clone();
        tokio::time::sleep(jitter(net.as_ref(), LATENCY)).await;
        if self.is_cut() {
            tokio::time::sleep(Duration::from_secs(3)).await;
            return Err(Status::unavailable("no route to host"));
        }
        let Some(door) = self.site.door() else { return Err(Status::unavailable("connection refused")) };
        request.extensions_mut().insert(ConnInfo {
            remote: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
            leaf: self.leaf.clone(),
            known: Arc::default(),
            closed: self.closed.clone(),
        });
        let lost = below(net.as_ref(), 1000) < self.site.lost_answers();
        let (answer, answered) = oneshot::channel();
        let service = self.port.of(&door.inside);
        door.tasks.spawn("call", async move {
            let Ok(response) = service.oneshot(request).await;
            let _ = answer.send(response);
        });
        let reset = || Status::unavailable("connection reset");
        let response = tokio::select! {
            biased;
            answer = door.process.answer(answered) => answer.and_then(Result::ok).ok_or_else(reset)?,
            () = moved(door.leases.clone(), door.epoch) => return Err(reset()),
        };
        tokio::time::sleep(jitter(net.as_ref(), LATENCY)).await;
        if lost {
            self.site.ground.judge.count(|stats| stats.lost_answers += 1);
            return Err(reset());
        }
        let watched = |inner| Body::new(Watched { inner, process: door.process.clone(), ended: door.ended() });
        Ok(response.map(watched))
    }
}

impl Service<http::Request<Body>> for Wire {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.clone().carry(request))
    }
}

/// A server as a client reaches it.
pub(crate) struct Door {
    pub(crate) process: Process,
    pub(crate) tasks: nstance_rt::tasks::Tasks,
    pub(crate) inside: Inside,
    pub(crate) epoch: Epoch,
    /// The highest epoch of a lease.
    pub(crate) leases: watch::Receiver<Epoch>,
}

impl Door {
    /// Resolves when the connection breaks: its server dies, or the leaders' address goes to another.
    fn ended(&self) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (killed, moved) = (self.process.token().clone(), moved(self.leases.clone(), self.epoch));
        Box::pin(async move {
            tokio::select! {
                biased;
                () = killed.cancelled() => {}
                () = moved => {}
            }
        })
    }
}

/// Resolves when a later leader has the address by which clients came.
async fn moved(mut leases: watch::Receiver<Epoch>, epoch: Epoch) {
    if leases.wait_for(|highest| epoch < *highest).await.is_err() {
        std::future::pending::<()>().await;
    }
    tokio::time::sleep(MOVE).await;
}

/// What a server streams, while it lives.
struct Watched {
    inner: Body,
    process: Process,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.ended.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err(Status::unavailable("connection reset"))));
        }
        match this.process.poll_runs(cx) {
            Poll::Ready(()) => Pin::new(&mut this.inner).poll_frame(cx),
            Poll::Pending => Poll::Pending,
        }
    }
}
