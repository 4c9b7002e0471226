//! TLS 1.3, and nothing else: how servers show themselves, how clients are known, what clients demand of a server.
//!
//! A server's certificate and its trust can be replaced while it runs: handshakes that begin later see the new ones,
//! open connections stay. Sessions are never resumed, since a resumed one would skip the certificate that the whole of
//! our authorisation rests on.
//!
//! The client side of the server's listener leaves validity time and usage to the authorisation layer: a client whose
//! certificate ran out must get a typed refusal over a working connection, or it could never learn that it should
//! rejoin.

use std::{
    fmt, io,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use nstance_core::{ids::ClusterId, ports::clock::Clock, time::Timestamp};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
    client::{
        ResolvesClientCert, Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
    time_provider::TimeProvider,
    version::TLS13,
};

use self::provider::provider;
use crate::{ca::Bundle, keys::KeyPair, peer, pem};

mod provider;

/// HTTP/2 is all that is spoken on these ports.
const ALPN: &[u8] = b"h2";

#[derive(Debug, Clone, thiserror::Error)]
pub enum TlsError {
    #[error("certificate chain holds no certificate that can be read")]
    Chain,
    #[error("certificate does not belong to the key")]
    Mismatch,
    #[error("TLS settings were not accepted")]
    Rejected(#[source] Error),
}

/// Our clock, in the words of rustls.
struct Time(Arc<dyn Clock>);

impl TimeProvider for Time {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(self.0.now()))
    }
}

impl fmt::Debug for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Time")
    }
}

fn unix_time(at: Timestamp) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_millis(u64::try_from(at.as_millis()).unwrap_or(0)))
}

fn certified(chain_pem: &[u8], key: &KeyPair) -> Result<CertifiedKey, TlsError> {
    let chain = pem::certificates(chain_pem).ok_or(TlsError::Chain)?;
    let signer = ring::sign::any_eddsa_type(&key.to_rustls()).map_err(TlsError::Rejected)?;
    let certified = CertifiedKey::new(chain, signer);
    certified.keys_match().map_err(|_| TlsError::Mismatch)?;
    Ok(certified)
}

fn roots(bundle: &Bundle) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in bundle.certificates() {
        roots.add(certificate.der.clone()).map_err(TlsError::Rejected)?;
    }
    Ok(Arc::new(roots))
}

/// What a server shows, to its clients and to servers that it calls; replaceable while it runs.
pub struct ServerIdentity(RwLock<Arc<CertifiedKey>>);

impl ServerIdentity {
    pub fn new(chain_pem: &[u8], key: &KeyPair) -> Result<Self, TlsError> {
        Ok(Self(RwLock::new(Arc::new(certified(chain_pem, key)?))))
    }

    /// Handshakes that begin from now on show the new certificate.
    pub fn swap(&self, chain_pem: &[u8], key: &KeyPair) -> Result<(), TlsError> {
        let new = Arc::new(certified(chain_pem, key)?);
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    fn shown(&self) -> Arc<CertifiedKey> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ResolvesServerCert for ServerIdentity {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown())
    }
}

impl ResolvesClientCert for ServerIdentity {
    fn resolve(&self, _root_hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.shown())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl fmt::Debug for ServerIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerIdentity")
    }
}

/// Whom a server believes: clients that it lets in, and servers that it calls. Replaceable while it runs.
#[derive(Debug)]
pub struct ClientTrust {
    trusted: RwLock<Trusted>,
    provider: Arc<CryptoProvider>,
}

#[derive(Debug, Clone)]
struct Trusted {
    roots: Arc<RootCertStore>,
    verifier: Arc<dyn ClientCertVerifier>,
    servers: Arc<WebPkiServerVerifier>,
}

impl Trusted {
    fn of(bundle: &Bundle, provider: &Arc<CryptoProvider>) -> Result<Self, TlsError> {
        let roots = roots(bundle)?;
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| TlsError::Rejected(Error::General(error.to_string())))?;
        let servers = servers_of(roots.clone(), provider)?;
        Ok(Self { roots, verifier, servers })
    }
}

fn servers_of(
    roots: Arc<RootCertStore>,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<WebPkiServerVerifier>, TlsError> {
    WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
        .build()
        .map_err(|error| TlsError::Rejected(Error::General(error.to_string())))
}

impl ClientTrust {
    pub fn new(bundle: &Bundle) -> Result<Self, TlsError> {
        let provider = provider();
        Ok(Self { trusted: RwLock::new(Trusted::of(bundle, &provider)?), provider })
    }

    /// Handshakes that begin from now on are judged by the new bundle.
    pub fn swap(&self, bundle: &Bundle) -> Result<(), TlsError> {
        let new = Trusted::of(bundle, &self.provider)?;
        *self.trusted.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    fn trusted(&self) -> Trusted {
        self.trusted.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ClientCertVerifier for ClientTrust {
    /// None are sent: our clients have one certificate each, and the trust may change at any time.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    /// Chain and signature only. The check runs at an instant inside the certificate's own validity, so time decides
    /// nothing; and a certificate for servers is checked as one, so usage decides nothing either. Both are judged, by
    /// name, in [`peer::Peer::accept`]. Our CAs sign leaves directly, so intermediates are not looked at.
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let (not_before, _) = peer::validity(end_entity).ok_or(CertificateError::BadEncoding)?;
        let at = unix_time(not_before);
        let trusted = self.trusted();
        match trusted.verifier.verify_client_cert(end_entity, &[], at) {
            Err(Error::InvalidCertificate(
                CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. },
            )) => {
                let algorithms = self.provider.signature_verification_algorithms.all;
                let parsed = ParsedCertificate::try_from(end_entity)?;
                verify_server_cert_signed_by_trust_anchor(&parsed, &trusted.roots, &[], at, algorithms)?;
                Ok(ClientCertVerified::assertion())
            }
            judged => judged,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trusted().verifier.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trusted().verifier.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trusted().verifier.supported_verify_schemes()
    }
}

/// Whether clients must show a certificate.
pub enum ClientAuth {
    /// Registration: the proof is in the request.
    None,
    Required(Arc<ClientTrust>),
}

pub fn server_config(
    identity: Arc<ServerIdentity>,
    client_auth: ClientAuth,
    clock: Arc<dyn Clock>,
) -> Result<Arc<ServerConfig>, TlsError> {
    let builder = ServerConfig::builder_with_details(provider(), Arc::new(Time(clock)))
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Rejected)?;
    let builder = match client_auth {
        ClientAuth::None => builder.with_no_client_auth(),
        ClientAuth::Required(trust) => builder.with_client_cert_verifier(trust),
    };
    let mut config = builder.with_cert_resolver(identity);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// What an agent, operator or admin dials with: the server must chain to `bundle`, carry the dialled host among its
/// names, and have the role `server`. A stolen file certificate with a server's names fails the last of these.
pub fn client_config(
    bundle: &Bundle,
    identity: Option<(&[u8], &KeyPair)>,
    clock: Arc<dyn Clock>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let provider = provider();
    let webpki = servers_of(roots(bundle)?, &provider)?;
    let builder = ClientConfig::builder_with_details(provider, Arc::new(Time(clock)))
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Rejected)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(OurServer(webpki)));
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            certified(chain, key)?;
            let chain = pem::certificates(chain).ok_or(TlsError::Chain)?;
            builder.with_client_auth_cert(chain, key.to_rustls().into()).map_err(TlsError::Rejected)?
        }
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// What a server dials other servers with: it shows what it shows its own clients, and the other must be believed by
/// `trust`, carry the dialled host among its names, and be a server of our cluster. Both may be replaced at any time.
pub fn peer_config(
    identity: Arc<ServerIdentity>,
    trust: Arc<ClientTrust>,
    cluster: ClusterId,
    clock: Arc<dyn Clock>,
) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = ClientConfig::builder_with_details(provider(), Arc::new(Time(clock)))
        .with_protocol_versions(&[&TLS13])
        .map_err(TlsError::Rejected)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(OurPeer { trust, cluster }))
        .with_client_cert_resolver(identity);
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Everything webpki checks of a server, and our role and cluster besides.
#[derive(Debug)]
struct OurPeer {
    trust: Arc<ClientTrust>,
    cluster: ClusterId,
}

/// The peer proved a certificate of our CA, but not one of a server of our cluster.
#[derive(Debug, thiserror::Error)]
#[error("the certificate is by our CA but not of a server of cluster {cluster}: {why}")]
struct NotOurPeer {
    cluster: ClusterId,
    why: String,
}

impl OurPeer {
    fn check(&self, leaf: &[u8]) -> Result<(), String> {
        let peer = peer::Peer::from_der(leaf).map_err(|error| error.to_string())?;
        match &peer.name {
            peer::PeerName::Server { cluster, .. } if *cluster == self.cluster => Ok(()),
            peer::PeerName::Server { cluster, .. } => Err(format!("its cluster is {cluster}")),
            peer::PeerName::Agent { .. } | peer::PeerName::Operator { .. } => {
                Err(format!("its role is {}", peer.role().as_str()))
            }
        }
    }
}

impl ServerCertVerifier for OurPeer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let servers = self.trust.trusted().servers;
        let verified = servers.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        self.check(end_entity).map_err(|why| {
            let error = NotOurPeer { cluster: self.cluster.clone(), why };
            CertificateError::Other(OtherError(Arc::new(error)))
        })?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trust.trusted().servers.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.trust.trusted().servers.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust.trusted().servers.supported_verify_schemes()
    }
}

/// Everything webpki checks of a server, and our role besides.
#[derive(Debug)]
struct OurServer(Arc<WebPkiServerVerifier>);

/// The peer proved a certificate of our CA, but not a server's.
#[derive(Debug, thiserror::Error)]
#[error("the certificate is by our CA but has not the role `server`")]
struct NotAServer;

impl ServerCertVerifier for OurServer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        if peer::is_server(end_entity) {
            Ok(verified)
        } else {
            Err(CertificateError::Other(OtherError(Arc::new(NotAServer))).into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Why a server is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distrust {
    /// By our clock its certificate is good only later: it was made after the time that our clock shows.
    NotYetValid,
    /// By our clock its certificate is over.
    Expired,
    /// Another CA, another name, another role.
    Stranger,
}

impl Distrust {
    /// What a person can do about it.
    pub fn advice(self) -> &'static str {
        match self {
            Self::NotYetValid => "its certificate is not yet valid, so check this machine's clock",
            Self::Expired => "its certificate is over, so check this machine's clock, then the server",
            Self::Stranger => "check ca.crt, and whether the address is really its",
        }
    }
}

/// Whether a handshake failed because the server is not trusted, and why.
pub fn distrust_of(error: &io::Error) -> Option<Distrust> {
    use CertificateError as Bad;
    let error = error.get_ref()?;
    match error.downcast_ref::<Error>().or_else(|| error.source()?.downcast_ref())? {
        Error::InvalidCertificate(Bad::NotValidYet | Bad::NotValidYetContext { .. }) => Some(Distrust::NotYetValid),
        Error::InvalidCertificate(Bad::Expired | Bad::ExpiredContext { .. }) => Some(Distrust::Expired),
        Error::InvalidCertificate(_) => Some(Distrust::Stranger),
        _ => None,
    }
}

/// Whether a read failed because the peer ended the connection over the certificate that we showed it.
pub fn is_refused_certificate(error: &io::Error) -> bool {
    use rustls::AlertDescription as Alert;
    error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()).is_some_and(|error| {
        matches!(
            error,
            Error::AlertReceived(
                Alert::UnknownCA
                    | Alert::BadCertificate
                    | Alert::CertificateExpired
                    | Alert::CertificateRevoked
                    | Alert::CertificateUnknown
                    | Alert::DecryptError
            )
        )
    })
}

#[cfg(test)]
#[path = "tls/tests.rs"]
mod tests;
