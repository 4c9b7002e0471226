//! One connection to a server: socket, TLS, HTTP/2.
//!
//! The handshake is done here, before the HTTP/2 client sees the stream, for two reasons: a failure keeps its meaning
//! (refused, silent, not trusted), and the client cannot dial again behind our back. When the connection is gone, it is
//! gone, and the rules of reconnecting decide.

use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use async_trait::async_trait;
use hyper_util::rt::TokioIo;
use rustls::{CertificateError, ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, lookup_host},
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

pub use crate::tls::Distrust;
use crate::tls::{distrust_of, is_refused_certificate};

/// Where a server listens: a host name or IP address, and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Address {
    pub host: String,
    pub port: u16,
}

impl Address {
    /// `host:port`, or `[v6]:port`.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').filter(|inner| inner.parse::<Ipv6Addr>().is_ok())?,
            None => Some(host).filter(|host| !host.contains(':') && is_host(host))?,
        };
        Some(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// An IP address, or labels of letters, digits and `-`, joined by dots (RFC 1123).
pub fn is_host(text: &str) -> bool {
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    text.parse::<IpAddr>().is_ok() || text.len() <= 253 && text.split('.').all(label)
}

/// A host that does not answer must not hold up the next one for long.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// All hosts behind one name together.
const DIAL_LIMIT: Duration = Duration::from_secs(10);

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum DialError {
    #[error("connect to {address}")]
    Connect { address: String, source: io::Error },
    #[error("no TLS handshake with {address}")]
    Handshake { address: String, source: io::Error },
    #[error("the server at {address} is not trusted: {}", why.advice())]
    Untrusted { address: String, why: Distrust, source: io::Error },
    #[error("no HTTP/2 with {address}")]
    Http { address: String, source: tonic::transport::Error },
}

/// A byte stream and the address it leaves from.
pub struct Socket {
    pub stream: Box<dyn Stream>,
    pub local: Option<SocketAddr>,
}

pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Where sockets come from; a test or a simulation brings its own.
#[async_trait]
pub trait Net: Send + Sync {
    async fn connect(&self, address: &Address) -> io::Result<Socket>;
}

/// The machine's network.
#[derive(Debug, Default, Clone, Copy)]
pub struct TcpNet;

#[async_trait]
impl Net for TcpNet {
    async fn connect(&self, address: &Address) -> io::Result<Socket> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        // One by one, each with its own limit: of several servers behind one name, the first may be the dead one.
        let hosts =
            timeout(CONNECT_LIMIT, lookup_host((address.host.as_str(), address.port))).await.map_err(late)??;
        for host in hosts {
            match timeout(CONNECT_LIMIT, TcpStream::connect(host)).await.map_err(late).flatten() {
                Ok(stream) => return open(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

fn open(stream: TcpStream) -> io::Result<Socket> {
    // Reports are small and urgent; waiting to fill a packet would cost more than the packet.
    stream.set_nodelay(true)?;
    let local = stream.local_addr().ok();
    Ok(Socket { stream: Box::new(stream), local })
}

/// An open connection.
pub struct Link {
    pub channel: Channel,
    pub local: Option<SocketAddr>,
    pub certificate: Shown,
}

/// What became of the certificate that we showed. In TLS 1.3 the client's handshake is over before the server has judged
/// it, so that the refusal comes as an alert with the first read. HTTP/2 makes mere text of it; so it is noted here.
#[derive(Debug, Clone, Default)]
pub struct Shown(Arc<AtomicBool>);

impl Shown {
    /// Whether the server has ended the connection over it.
    pub fn is_refused(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A stream that notes what the server says of our certificate.
struct Watched {
    stream: TlsStream<Box<dyn Stream>>,
    certificate: Shown,
}

impl Watched {
    fn note<T>(&self, done: &io::Result<T>) {
        if done.as_ref().is_err_and(is_refused_certificate) {
            self.certificate.0.store(true, Ordering::Relaxed);
        }
    }

    /// A server that refused us has closed its end, so a write may fail before its reason was read. Nobody will read any
    /// more after that, so what has arrived is read here.
    fn written<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(_)) = &written {
            let mut bytes = [0; 1024];
            let mut left = ReadBuf::new(&mut bytes);
            while let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(cx, &mut left) {
                self.note(&read);
                if read.is_err() || left.filled().is_empty() {
                    break;
                }
                left.clear();
            }
        }
        written
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.note(&read);
        Poll::Ready(read)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.written(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.written(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.written(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The same cause without the time of the try: whoever tells each cause once compares its text.
fn timeless(source: io::Error, why: Distrust) -> io::Error {
    let cause = match why {
        Distrust::NotYetValid => CertificateError::NotValidYet,
        Distrust::Expired => CertificateError::Expired,
        Distrust::Stranger => return source,
    };
    io::Error::new(source.kind(), rustls::Error::InvalidCertificate(cause))
}

pub async fn dial(net: &dyn Net, tls: &Arc<ClientConfig>, address: &Address) -> Result<Link, DialError> {
    let shown = || address.to_string();
    let late = || io::Error::from(io::ErrorKind::TimedOut);
    let Socket { stream, local } = timeout(DIAL_LIMIT, net.connect(address))
        .await
        .unwrap_or_else(|_| Err(late()))
        .map_err(|source| DialError::Connect { address: shown(), source })?;
    let name = ServerName::try_from(address.host.clone())
        .map_err(|error| DialError::Connect { address: shown(), source: io::Error::other(error) })?;
    let handshake = TlsConnector::from(tls.clone()).connect(name, stream);
    let stream =
        timeout(HANDSHAKE_LIMIT, handshake).await.unwrap_or_else(|_| Err(late())).map_err(
            |source| match distrust_of(&source) {
                Some(why) => DialError::Untrusted { address: shown(), why, source: timeless(source, why) },
                None => DialError::Handshake { address: shown(), source },
            },
        )?;
    let certificate = Shown::default();
    let once = Mutex::new(Some(TokioIo::new(Watched { stream, certificate: certificate.clone() })));
    let connector = service_fn(move |_: Uri| {
        let stream = once.lock().ok().and_then(|mut once| once.take());
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    // The scheme is plain because TLS is already spoken; the name is the host's, as the server expects.
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|source| DialError::Http { address: shown(), source })?
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_LIMIT)
        .keep_alive_while_idle(true);
    let channel = timeout(HANDSHAKE_LIMIT, endpoint.connect_with_connector(connector))
        .await
        .map_err(|_| DialError::Handshake { address: shown(), source: late() })?
        .map_err(|source| DialError::Http { address: shown(), source })?;
    Ok(Link { channel, local, certificate })
}
