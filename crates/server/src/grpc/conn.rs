//! Connections: accepted, shaken hands with, and watched for their end.
//!
//! TLS is done here and not by tonic: TLS 1.3 only, certificates that change while connections live, and the end of a
//! connection noticed at the socket, before HTTP/2 has made sense of it. That moment starts a replacement.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use nstance_identity::peer::Peer;
use nstance_rt::tasks::Tasks;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, mpsc},
    time::{Instant, Sleep},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

/// What is known of a connection, for every request on it.
#[derive(Clone)]
pub struct ConnInfo {
    pub remote: SocketAddr,
    /// The certificate that was shown, proved to be of our CA; `None` where none is asked for. What it says is judged
    /// at each call, for one that was good at the handshake may have run out since.
    pub leaf: Option<Arc<[u8]>>,
    /// What it says, once somebody has read it.
    pub known: Arc<OnceLock<Peer>>,
    /// Cancelled the moment the socket ends.
    pub closed: CancellationToken,
}

impl ConnInfo {
    /// Where a request comes from; nowhere in a process that serves without sockets.
    pub fn remote_of<T>(request: &tonic::Request<T>) -> Option<SocketAddr> {
        request.extensions().get::<Self>().map(|info| info.remote)
    }
}

/// A TCP stream that tells when it ends.
pub struct Watched {
    inner: TcpStream,
    closed: CancellationToken,
    idle: Option<Idle>,
}

/// Ends a connection on which nothing was said for a while.
struct Idle {
    limit: Duration,
    over: Pin<Box<Sleep>>,
}

impl Idle {
    fn new(limit: Duration) -> Self {
        Self { limit, over: Box::pin(tokio::time::sleep(limit)) }
    }

    fn begins_anew(&mut self) {
        self.over.as_mut().reset(Instant::now() + self.limit);
    }
}

impl Watched {
    fn new(inner: TcpStream, idle: Option<Duration>) -> Self {
        Self { inner, closed: CancellationToken::new(), idle: idle.map(Idle::new) }
    }

    /// Something went over the line.
    fn is_used(&mut self) {
        if let Some(idle) = &mut self.idle {
            idle.begins_anew();
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let (before, room) = (buf.filled().len(), buf.remaining());
        let polled = Pin::new(&mut this.inner).poll_read(cx, buf);
        match &polled {
            Poll::Ready(Ok(())) if 0 < room && buf.filled().len() == before => this.closed.cancel(),
            Poll::Ready(Err(_)) => this.closed.cancel(),
            Poll::Ready(Ok(())) => this.is_used(),
            Poll::Pending => {
                if this.idle.as_mut().is_some_and(|idle| idle.over.as_mut().poll(cx).is_ready()) {
                    this.closed.cancel();
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "connection was idle")));
                }
            }
        }
        polled
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write(cx, buf);
        match &polled {
            Poll::Ready(Ok(_)) => this.is_used(),
            Poll::Ready(Err(_)) => this.closed.cancel(),
            Poll::Pending => {}
        }
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let polled = Pin::new(&mut this.inner).poll_write_vectored(cx, bufs);
        if let Poll::Ready(Ok(_)) = &polled {
            this.is_used();
        }
        polled
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

pub struct Conn {
    tls: TlsStream<Watched>,
    info: ConnInfo,
    /// Its place among the connections of the port.
    _place: tokio::sync::OwnedSemaphorePermit,
}

impl Connected for Conn {
    type ConnectInfo = ConnInfo;

    fn connect_info(&self) -> ConnInfo {
        self.info.clone()
    }
}

impl AsyncRead for Conn {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_read(cx, buf)
    }
}

impl AsyncWrite for Conn {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tls).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tls).poll_write_vectored(cx, bufs)
    }
}

/// Bounds of one port.
#[derive(Debug, Clone, Copy)]
pub struct PortLimits {
    pub max_connections: usize,
    pub handshake: Duration,
    /// A peer that acknowledges nothing for this long is gone, whatever TCP hopes.
    pub user_timeout: Option<Duration>,
    /// A connection on which nothing is said for this long ends. `None` where silence is normal and HTTP/2 pings tell.
    pub idle: Option<Duration>,
}

/// Accepts on `listener` until the scope ends and hands out connections whose handshake is done. Handshakes run beside
/// each other: a slow or hostile client delays nobody.
pub fn accept(
    tasks: &Tasks,
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    limits: PortLimits,
) -> ReceiverStream<io::Result<Conn>> {
    let (sender, receiver) = mpsc::channel(256);
    let acceptor = TlsAcceptor::from(tls);
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let scope = tasks.clone();
    tasks.spawn_droppable("accept", async move {
        loop {
            let (stream, remote) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, most likely: wait for some to come back instead of spinning.
                    tracing::warn!(%error, "connection not accepted");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let Ok(place) = places.clone().try_acquire_owned() else {
                tracing::warn!(%remote, limit = limits.max_connections, "connection refused, port is full");
                continue;
            };
            let (acceptor, sender) = (acceptor.clone(), sender.clone());
            scope.spawn_droppable("handshake", async move {
                match handshake(&acceptor, stream, remote, limits, place).await {
                    Ok(conn) => {
                        let _ = sender.send(Ok(conn)).await;
                    }
                    Err(error) => tracing::debug!(%remote, %error, "handshake failed"),
                }
            });
        }
    });
    ReceiverStream::new(receiver)
}

async fn handshake(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    remote: SocketAddr,
    limits: PortLimits,
    place: tokio::sync::OwnedSemaphorePermit,
) -> io::Result<Conn> {
    stream.set_nodelay(true)?;
    if let Some(timeout) = limits.user_timeout {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(&stream, millis)?;
    }
    let watched = Watched::new(stream, limits.idle);
    let closed = watched.closed.clone();
    let tls = tokio::time::timeout(limits.handshake, acceptor.accept(watched))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no TLS handshake in time"))??;
    let leaf = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first()).map(|leaf| Arc::from(leaf.as_ref()));
    Ok(Conn { tls, info: ConnInfo { remote, leaf, known: Arc::default(), closed }, _place: place })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const IDLE: Duration = Duration::from_secs(30);

    async fn pair(idle: Option<Duration>) -> (TcpStream, Watched) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, Watched::new(listener.accept().await.unwrap().0, idle))
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_ends() {
        let (mut client, mut server) = pair(Some(IDLE)).await;
        let closed = server.closed.clone();
        // The silence begins with the last word, of either side.
        for _ in 0..3 {
            tokio::time::advance(IDLE / 2).await;
            client.write_all(b"x").await.unwrap();
            assert_eq!(server.read_u8().await.unwrap(), b'x');
            tokio::time::advance(IDLE / 2).await;
            server.write_all(b"y").await.unwrap();
        }
        let began = Instant::now();
        let ended = server.read_u8().await.unwrap_err();
        assert_eq!((ended.kind(), began.elapsed()), (io::ErrorKind::TimedOut, IDLE));
        assert!(closed.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_without_limit_may_be_silent() {
        let (client, mut server) = pair(None).await;
        tokio::time::timeout(1000 * IDLE, server.read_u8()).await.expect_err("still open");
        drop(client);
    }
}
