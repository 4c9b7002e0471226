//! Sockets, TLS and plain HTTP, as a client sees them.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use nstance_core::ports::clock::Entropy;
use nstance_identity::{ca::Bundle, keys::KeyPair, tls::client_config};
use nstance_proto::v1::{self, registration_service_client::RegistrationServiceClient};
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};
use tokio_rustls::TlsConnector;
use tonic::{
    Status,
    transport::{Channel, Endpoint, Uri},
};
use tower::service_fn;

use super::{Ahead, Shard};

/// One connection; it can be cut as a dying machine cuts it.
pub struct Line {
    pub channel: Channel,
    socket: std::net::TcpStream,
}

impl Line {
    pub fn cut(&self) {
        // Already closed by the other side is as good.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

pub fn tls(bundle: &Bundle, identity: Option<(&[u8], &KeyPair)>) -> Arc<ClientConfig> {
    client_config(bundle, identity, Arc::new(Ahead)).expect("TLS settings")
}

/// Connects from this address of the machine. An error in words: what is refused in a handshake has no code.
pub async fn dial(address: &str, tls: Arc<ClientConfig>, from: Ipv4Addr) -> Result<Line, String> {
    dial_with(address, tls, from, |endpoint| endpoint).await
}

/// The same, with HTTP/2 settings of one's own.
pub async fn dial_with(
    address: &str,
    tls: Arc<ClientConfig>,
    from: Ipv4Addr,
    tune: impl FnOnce(Endpoint) -> Endpoint,
) -> Result<Line, String> {
    async fn connect(address: &str, from: Ipv4Addr) -> io::Result<(TcpStream, std::net::TcpStream)> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(IpAddr::V4(from), 0))?;
        let stream = socket.connect(address.parse().map_err(io::Error::other)?).await?.into_std()?;
        let handle = stream.try_clone()?;
        let stream = TcpStream::from_std(stream)?;
        stream.set_nodelay(true)?;
        Ok((stream, handle))
    }
    let words = |error: &dyn std::error::Error| {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            text = format!("{text}: {error}");
            source = error.source();
        }
        text
    };
    let (stream, socket) = connect(address, from).await.map_err(|error| words(&error))?;
    let name = ServerName::try_from("127.0.0.1").expect("an address");
    let stream = TlsConnector::from(tls).connect(name, stream).await.map_err(|error| words(&error))?;
    let once = Mutex::new(Some(TokioIo::new(stream)));
    let connector = service_fn(move |_: Uri| {
        let stream = once.lock().ok().and_then(|mut once| once.take());
        async move { stream.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected)) }
    });
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an endpoint");
    let endpoint = tune(endpoint.timeout(Duration::from_secs(30)));
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| words(&error))?;
    Ok(Line { channel, socket })
}

/// A client of the registration port, and the line that holds it.
pub async fn registrar(shard: &Shard, from: Ipv4Addr) -> (RegistrationServiceClient<Channel>, Line) {
    let address = &shard.leader.advertised.registration;
    let line = dial(address, tls(&shard.site.bundle().await, None), from).await.expect("the registration port");
    (RegistrationServiceClient::new(line.channel.clone()), line)
}

pub fn request(nonce: &str, key: &KeyPair) -> v1::RegisterClientRequest {
    v1::RegisterClientRequest {
        registration_nonce_jwt: nonce.to_owned(),
        public_key_pem: key.public_key_pem().into_bytes(),
        private_ipv4: "10.1.2.3".to_owned(),
        hostname: "node-1".to_owned(),
        client_version: "test".to_owned(),
        ..v1::RegisterClientRequest::default()
    }
}

/// RegisterAgent, once.
pub async fn register_agent(shard: &Shard, nonce: &str, key: &KeyPair) -> Result<v1::RegisterClientResponse, Status> {
    let (mut client, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    client.register_agent(request(nonce, key)).await.map(tonic::Response::into_inner)
}

pub async fn register_operator(
    shard: &Shard,
    nonce: &str,
    key: &KeyPair,
) -> Result<v1::RegisterClientResponse, Status> {
    let (mut client, _line) = registrar(shard, Ipv4Addr::LOCALHOST).await;
    client.register_operator(request(nonce, key)).await.map(tonic::Response::into_inner)
}

pub fn new_key(entropy: &dyn Entropy) -> KeyPair {
    KeyPair::generate(entropy)
}

/// Status and body of a page of the health port; an error while nothing listens there.
pub async fn get(addr: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let code = text.split(' ').nth(1).and_then(|code| code.parse().ok());
    let code = code.ok_or_else(|| io::Error::other("no HTTP answer"))?;
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    Ok((code, body))
}
