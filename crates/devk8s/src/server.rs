//! The server: its options, its port, its connections.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use data_encoding::BASE64;
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use nstance_core::ports::clock::Clock;
use nstance_rt::{chain::Chain, clock::SystemClock, tasks::Tasks};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::{
    faults::{Fault, Faults},
    http::{App, handle},
    pki,
    resources::Registry,
    seed::seed,
    store::{FileChanges, Store, follow},
};

/// The first byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;

/// To the first byte, the end of a TLS handshake, and the end of a request's head.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// Between two failures to accept, as when file handles ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long requests in flight may take to end when the server stops.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub struct Options {
    /// Holds the objects; made if missing.
    pub dir: PathBuf,
    /// Port 0 picks a free one.
    pub addr: SocketAddr,
    pub clock: Arc<dyn Clock>,
    /// CustomResourceDefinitions that are stored at start; those of the same name are replaced.
    pub crds: Vec<Value>,
    /// API groups that are not served although they are built in, such as `cluster.x-k8s.io`.
    pub without_groups: Vec<String>,
    /// How often a watch that wants bookmarks gets one.
    pub bookmark_every: Duration,
    /// How changes of files are noticed.
    pub file_changes: FileChanges,
    /// Events that are kept for each resource; a watch from before them must list again.
    pub window: usize,
}

impl Options {
    /// The usual ones: a free local port, the machine's clock, all built-in groups.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            clock: Arc::new(SystemClock),
            crds: Vec::new(),
            without_groups: Vec::new(),
            bookmark_every: Duration::from_secs(10),
            file_changes: FileChanges::Notified,
            window: 10_000,
        }
    }
}

pub struct Server;

impl Server {
    /// Bound and serving when it returns. It ends with `tasks`, with [`Running::stop`], or when [`Running`] is dropped.
    pub async fn start(tasks: &Tasks, options: Options) -> anyhow::Result<Running> {
        let Options { dir, addr, clock, crds, without_groups, bookmark_every, file_changes, window } = options;
        let shown = dir.display().to_string();
        let pki_clock = clock.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let store = Store::open(&dir, clock, Registry::new(&without_groups), window)
                .with_context(|| format!("open the objects in {}", dir.display()))?;
            seed(&store, crds).context("store the objects that every cluster has")?;
            anyhow::Ok((store, pki::load_or_make(&dir, addr.ip(), &*pki_clock)?))
        });
        let (store, pki) = opened.await.context("open the objects")??;
        let store = Arc::new(store);
        let listener = TcpListener::bind(addr).await.with_context(|| format!("listen on {addr}"))?;
        let addr = listener.local_addr().context("read the address")?;
        let (tasks, faults) = (tasks.child(), Faults::new());
        let app = Arc::new(App { store: store.clone(), faults: faults.clone(), tasks: tasks.clone(), bookmark_every });
        tasks.spawn_droppable("follow files", follow(store.clone(), file_changes));
        tasks.spawn("accept", accept(app, tasks.clone(), listener, TlsAcceptor::from(pki.config)));
        tracing::info!(%addr, dir = shown, "Kubernetes API server for development started");
        Ok(Running { addr, ca_pem: pki.ca_pem, store, faults, tasks })
    }
}

/// A running server. Dropping it ends it at once.
pub struct Running {
    pub addr: SocketAddr,
    /// The CA that signed the server's certificate.
    pub ca_pem: String,
    store: Arc<Store>,
    faults: Faults,
    tasks: Tasks,
}

impl Running {
    /// `https://127.0.0.1:PORT`; the same port speaks plain HTTP too.
    pub fn url(&self) -> String {
        format!("https://{}", self.addr)
    }

    /// A kubeconfig whose caller is named `dev`.
    pub fn kubeconfig(&self) -> String {
        self.kubeconfig_of("dev")
    }

    /// A kubeconfig whose caller has this name, for the faults that concern it.
    pub fn kubeconfig_of(&self, caller: &str) -> String {
        kubeconfig(&self.url(), &self.ca_pem, caller)
    }

    /// Switches a fault on, in place of those before, or all off.
    pub fn set_fault(&self, fault: Option<Fault>) {
        self.faults.set(fault.into_iter().collect());
    }

    /// Switches several faults on, in place of those before.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        self.faults.set(faults);
    }

    /// Ends every running watch with 410, and answers 410 to every watch that goes on from a version before this call.
    pub fn too_old_watches(&self) {
        self.store.forget_history();
    }

    /// Ends the server; afterwards its files change no more.
    pub async fn stop(self) {
        self.tasks.end(GRACE).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

/// The text of a kubeconfig with a bearer token.
pub fn kubeconfig(server: &str, ca_pem: &str, token: &str) -> String {
    let ca = BASE64.encode(ca_pem.as_bytes());
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: nstance-dev\n\
         clusters:\n- name: nstance-dev\n  cluster:\n    server: {server}\n    certificate-authority-data: {ca}\n\
         contexts:\n- name: nstance-dev\n  context:\n    cluster: nstance-dev\n    user: nstance-dev\n    namespace: default\n\
         users:\n- name: nstance-dev\n  user:\n    token: {token}\n"
    )
}

async fn accept(app: Arc<App>, tasks: Tasks, listener: TcpListener, tls: TlsAcceptor) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = tasks.token().cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (app, tls, stop) = (app.clone(), tls.clone(), tasks.token().clone());
        tasks.spawn("connection", async move {
            // Clients go away as they please.
            if let Err(error) = connection(app, socket, tls, stop).await {
                tracing::debug!(error = %Chain(&error), "connection ended");
            }
        });
    }
}

async fn connection(app: Arc<App>, socket: TcpStream, tls: TlsAcceptor, stop: CancellationToken) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let mut first = [0];
    let peeked = async {
        tokio::select! {
            biased;
            () = stop.cancelled() => Ok(0),
            peeked = socket.peek(&mut first) => peeked,
        }
    };
    if tokio::time::timeout(HEAD_LIMIT, peeked).await.map_err(late)?? == 0 {
        return Ok(());
    }
    if first[0] == TLS_HANDSHAKE {
        let stream = tokio::time::timeout(HEAD_LIMIT, tls.accept(socket)).await.map_err(late)??;
        return requests(app, stream, stop).await;
    }
    requests(app, socket, stop).await
}

async fn requests<S>(app: Arc<App>, stream: S, stop: CancellationToken) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request| handle(app.clone(), request));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).half_close(false);
    let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
    let served = tokio::select! {
        biased;
        served = serving.as_mut() => served,
        () = stop.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    served.map_err(io::Error::other)
}
