//! The embedded development object store: an S3 server over a directory.
//!
//! Protocol and XML come from `s3s`; storage, conditions and faults are ours. One bucket; its objects are plain
//! files that may be looked at and edited by hand. All conditional operations are linearizable (see [`disk`]),
//! which is what leader election and compare-and-swap stand on, here as on the real stores.
//!
//! Beside the bucket there are control endpoints: `/-/health`, `/-/stats` (`GET`, `DELETE` resets) and `/-/faults`
//! (`GET`, `POST` adds, `DELETE` clears, `DELETE /-/faults/{id}` removes one).
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use nstance_dev::s3::{S3Options, S3Server};
//! let server = S3Server::start(S3Options::new("temp/dev-s3")).await?;
//! println!("AWS_ENDPOINT_URL={}", server.endpoint());
//! server.stop().await;
//! # Ok(())
//! # }
//! ```

mod caller;
mod checksums;
mod chunked;
mod conditions;
mod disk;
mod etags;
mod faults;
mod front;
mod gate;
mod keys;
mod listing;
mod lists;
mod meta;
mod objects;
mod parts;
mod service;
mod stats;
mod uploads;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use anyhow::Context;
use hyper::service::service_fn;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use s3s::service::S3ServiceBuilder;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use self::{
    disk::Disk,
    faults::Faults,
    front::Front,
    gate::{AnyKey, Gate},
    service::{Backend, BucketHost},
    stats::Counts,
};
pub use self::{
    faults::{FaultRule, FaultState, Throttle},
    stats::S3Stats,
};

/// How long requests in flight may take to end when the server stops.
const GRACE: Duration = Duration::from_secs(2);
/// Waited after a failed accept, which is for want of file descriptors: trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Clone)]
pub struct S3Options {
    /// Port 0 picks a free one.
    pub addr: SocketAddr,
    /// Holds the bucket's objects; made if missing.
    pub dir: PathBuf,
    pub bucket: String,
    /// Verifies signatures, with the secret `dev` for every access key. Otherwise any signature will do, and none.
    pub require_auth: bool,
    /// Syncs every write before it is acknowledged. Without it a power cut may lose some; a crash does not.
    pub durable: bool,
}

impl S3Options {
    /// The usual ones: a free local port, bucket `dev`, no signatures, durable.
    pub fn new(dir: impl Into<PathBuf>) -> S3Options {
        S3Options {
            addr: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            dir: dir.into(),
            bucket: "dev".to_owned(),
            require_auth: false,
            durable: true,
        }
    }
}

/// A running server. Dropping it ends it at once, `stop` lets requests finish.
pub struct S3Server {
    addr: SocketAddr,
    front: Arc<Front>,
    stop: CancellationToken,
    tasks: JoinSet<()>,
}

impl S3Server {
    /// Bound and serving when it returns.
    pub async fn start(options: S3Options) -> anyhow::Result<S3Server> {
        anyhow::ensure!(s3s::path::check_bucket_name(&options.bucket), "{:?} is no bucket name", options.bucket);
        let (dir, durable) = (options.dir.clone(), options.durable);
        let disk = tokio::task::spawn_blocking(move || Disk::open(&dir, durable)).await.context("open the store")?;
        let disk = Arc::new(disk.with_context(|| format!("open the store in {}", options.dir.display()))?);
        let listener = TcpListener::bind(options.addr).await.with_context(|| format!("listen on {}", options.addr))?;
        let addr = listener.local_addr().context("read the address")?;

        let (faults, counts, stop) = (Arc::new(Faults::new()), Arc::new(Counts::default()), CancellationToken::new());
        let mut builder =
            S3ServiceBuilder::new(Backend::new(Arc::clone(&disk), options.bucket.clone(), options.require_auth));
        builder.set_host(BucketHost { bucket: options.bucket });
        builder.set_auth(AnyKey);
        builder.set_access(Gate {
            require_auth: options.require_auth,
            faults: Arc::clone(&faults),
            counts: Arc::clone(&counts),
            stop: stop.clone(),
        });
        let front = Arc::new(Front {
            service: builder.build(),
            require_auth: options.require_auth,
            disk,
            faults,
            counts,
            n_requests: AtomicU64::new(0),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, Arc::clone(&front), stop.clone()));
        tracing::info!(%addr, dir = %options.dir.display(), "object store started");
        Ok(S3Server { addr, front, stop, tasks })
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where clients find it: `http://127.0.0.1:PORT`.
    pub fn endpoint(&self) -> String {
        let ip = match self.addr.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        format!("http://{}", SocketAddr::new(ip, self.addr.port()))
    }

    /// Adds fault rules, as `POST /-/faults` does.
    pub async fn add_faults(&self, rules: Vec<FaultRule>) -> anyhow::Result<()> {
        self.front.add_faults(rules).await.context("take the snapshot for stale listings")
    }

    /// Removes all fault rules.
    pub fn clear_faults(&self) {
        self.front.faults.remove(None);
    }

    pub fn faults(&self) -> Vec<FaultState> {
        self.front.faults.show()
    }

    pub fn stats(&self) -> S3Stats {
        self.front.counts.show()
    }

    /// Lets requests in flight finish, for a short while. Afterwards nothing changes in the directory any more.
    pub async fn stop(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
        // What `Drop` does, but off the runtime's threads, for a write may have to end first.
        let disk = Arc::clone(&self.front.disk);
        if let Err(err) = tokio::task::spawn_blocking(move || disk.close()).await {
            tracing::warn!(error = %err, "object store not closed");
        }
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.stop.cancel();
        self.front.disk.close();
    }
}

async fn accept(listener: TcpListener, front: Arc<Front>, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            Some(_) = connections.join_next() => (),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, Arc::clone(&front), stop.clone()));
                }
                Err(err) => {
                    tracing::warn!(error = %err, "connection not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, ended).await.is_err() {
        connections.shutdown().await;
    }
}

async fn serve(stream: TcpStream, front: Arc<Front>, stop: CancellationToken) {
    if let Err(err) = stream.set_nodelay(true) {
        tracing::debug!(error = %err, "no-delay not set");
    }
    let service = service_fn(|request| {
        let front = Arc::clone(&front);
        async move { front.handle(request).await }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        biased;
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    // Clients go away as they please, and fault rules end connections: nothing that anyone must look at.
    if let Err(err) = ended {
        tracing::debug!(error = %err, "connection ended");
    }
}
