//! Sockets: plain on loopback, TLS elsewhere. A connection ends by itself when the server stops, streams included.

use std::{io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use axum::body::Body;
use http::Request;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use nstance_rt::{chain::Chain, tasks::Tasks};
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;

use super::{
    App,
    auth::Certificate,
    door::{Peer, answer},
    stall::Impatient,
};
use crate::failure::Failure;

/// To the end of a request's head, and of a TLS handshake.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// A browser opens six; this is far more than people have browsers, and far less than we have file handles.
const MAX_CONNECTIONS: usize = 512;

/// Between two failures to accept, as when file handles ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Certificate and key in files, and the CA of clients that need no token.
pub(super) fn tls(certificate: &Path, key: &Path, client_ca: Option<&Path>) -> Result<TlsAcceptor, Failure> {
    let bad = |what: &Path| {
        let what = what.display().to_string();
        move |error: Box<dyn std::error::Error + Send + Sync>| Failure::failed(format!("use {what}")).because(error)
    };
    let chain = certificates(certificate).map_err(bad(certificate))?;
    let key_der = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key)(error.into()))?;
    let builder = match client_ca {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for it in certificates(path).map_err(bad(path))? {
                roots.add(it).map_err(|error| bad(path)(error.into()))?;
            }
            // Who has no certificate may still have a token.
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build();
            let verifier = verifier.map_err(|error| bad(path)(error.into()))?;
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key_der).map_err(|error| bad(certificate)(error.into()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Box<dyn std::error::Error + Send + Sync>> {
    let all: Vec<_> = CertificateDer::pem_file_iter(path)?.collect::<Result<_, _>>()?;
    if all.is_empty() {
        return Err("there is no certificate in it".into());
    }
    Ok(all)
}

/// Accepts until the scope ends.
pub(super) async fn accept(app: Arc<App>, tasks: Tasks, listener: TcpListener, tls: Option<TlsAcceptor>) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let place = places.clone().acquire_owned();
        let accepted = async {
            let place = place.await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            biased;
            () = tasks.token().cancelled() => return,
            it = accepted => it,
        };
        let (socket, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "connection not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (app, tls, stop) = (app.clone(), tls.clone(), tasks.token().clone());
        tasks.spawn("connection", async move {
            let _place = place;
            if let Err(error) = connection(app, socket, from, tls, stop).await {
                tracing::debug!(%from, %error, "connection ended");
            }
        });
    }
}

async fn connection(
    app: Arc<App>,
    socket: TcpStream,
    from: SocketAddr,
    tls: Option<TlsAcceptor>,
    stop: tokio_util::sync::CancellationToken,
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let address = from.ip();
    let Some(tls) = tls else {
        return requests(app, socket, Peer { address, certificate: None }, stop).await;
    };
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let stream = tokio::time::timeout(HEAD_LIMIT, tls.accept(socket)).await.map_err(late)??;
    let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let certificate = leaf.map(|it| Certificate::of(it, app.shards.identity()));
    requests(app, stream, Peer { address, certificate }, stop).await
}

/// Answers the requests of one connection, until it ends.
pub(super) async fn requests<S>(
    app: Arc<App>,
    stream: S,
    peer: Peer,
    stop: tokio_util::sync::CancellationToken,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |request: Request<Incoming>| {
        let (app, peer) = (app.clone(), peer.clone());
        async move { Ok::<_, std::convert::Infallible>(answer(app, peer, request.map(Body::new)).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_LIMIT).half_close(false);
    let mut serving = std::pin::pin!(http.serve_connection(TokioIo::new(Impatient::new(stream)), service));
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
