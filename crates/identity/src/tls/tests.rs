//! Real handshakes, in memory: bytes are carried from one end to the other until both are done or one refuses.

use std::io::{Read as _, Write as _};

use rustls::{ClientConnection, ServerConnection};

use super::*;
use crate::{
    issue::{FileUsage, Issued},
    peer::Peer,
    testing::{DAY, Fixture, NOW, Still},
};

fn clock() -> Arc<dyn Clock> {
    Arc::new(Still(NOW))
}

fn identity(fixture: &Fixture, shown: &Issued) -> Arc<ServerIdentity> {
    Arc::new(ServerIdentity::new(shown.chain_pem.as_bytes(), &fixture.key).unwrap())
}

fn open_server(fixture: &Fixture, shown: &Issued) -> Arc<ServerConfig> {
    server_config(identity(fixture, shown), ClientAuth::None, clock()).unwrap()
}

fn mutual_server(fixture: &Fixture) -> Arc<ServerConfig> {
    let trust = Arc::new(ClientTrust::new(fixture.ca.bundle()).unwrap());
    server_config(identity(fixture, &fixture.server()), ClientAuth::Required(trust), clock()).unwrap()
}

fn client(trust: &Fixture, shown: Option<(&Issued, &KeyPair)>) -> Arc<ClientConfig> {
    let shown = shown.map(|(issued, key)| (issued.chain_pem.as_bytes(), key));
    client_config(trust.ca.bundle(), shown, clock()).unwrap()
}

/// Shakes hands and passes one word each way; the server's view of the client's certificate comes back.
fn shake(client: Arc<ClientConfig>, server: Arc<ServerConfig>, host: &str) -> Result<Option<Vec<u8>>, Error> {
    let mut client = ClientConnection::new(client, ServerName::try_from(host.to_owned()).unwrap())?;
    let mut server = ServerConnection::new(server)?;
    while client.is_handshaking() || server.is_handshaking() || client.wants_write() || server.wants_write() {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut rest: &[u8] = &bytes;
        while !rest.is_empty() {
            server.read_tls(&mut rest).unwrap();
            server.process_new_packets()?;
        }
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut rest: &[u8] = &bytes;
        while !rest.is_empty() {
            client.read_tls(&mut rest).unwrap();
            client.process_new_packets()?;
        }
    }
    assert_eq!(client.alpn_protocol(), Some(b"h2" as &[u8]));
    assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    client.writer().write_all(b"hello").unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    server.read_tls(&mut bytes.as_slice()).unwrap();
    server.process_new_packets()?;
    let mut heard = [0; 5];
    server.reader().read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
    Ok(server.peer_certificates().map(|chain| chain[0].to_vec()))
}

#[test]
fn client_and_server_of_one_ca_understand_each_other() {
    let fixture = Fixture::new();
    let agent = fixture.agent();
    for host in ["localhost", "127.0.0.1", "::1", "nstance-server", "nstance.example.com"] {
        let seen = shake(client(&fixture, Some((&agent, &fixture.key))), mutual_server(&fixture), host).unwrap();
        assert_eq!(Peer::accept(&seen.unwrap(), NOW).unwrap().serial, agent.serial);
    }
    assert_eq!(shake(client(&fixture, None), open_server(&fixture, &fixture.server()), "localhost"), Ok(None));
}

#[test]
fn host_must_be_among_the_names() {
    let fixture = Fixture::new();
    let error = shake(client(&fixture, None), open_server(&fixture, &fixture.server()), "other.example.com");
    assert!(
        matches!(error, Err(Error::InvalidCertificate(CertificateError::NotValidForNameContext { .. }))),
        "{error:?}"
    );
}

#[test]
fn file_certificate_cannot_pose_as_server() {
    let fixture = Fixture::new();
    for usage in [FileUsage::Server, FileUsage::Peer] {
        let stolen = open_server(&fixture, &fixture.file(usage));
        let error = shake(client(&fixture, None), stolen, "localhost").unwrap_err();
        assert!(error.to_string().contains("NotAServer") || error.to_string().contains("role"), "{error}");
        assert_eq!(distrust_of(&io::Error::other(error)), Some(Distrust::Stranger));
    }
}

#[test]
fn agent_cannot_pose_as_server() {
    let fixture = Fixture::new();
    let posing = open_server(&fixture, &fixture.agent());
    assert!(matches!(shake(client(&fixture, None), posing, "localhost"), Err(Error::InvalidCertificate(_))));
}

#[test]
fn server_of_another_ca_is_not_trusted() {
    let (ours, theirs) = (Fixture::seeded(1), Fixture::seeded(2));
    let error = shake(client(&ours, None), open_server(&theirs, &theirs.server()), "localhost").unwrap_err();
    assert_eq!(distrust_of(&io::Error::other(error)), Some(Distrust::Stranger));
    assert_eq!(distrust_of(&io::Error::other("else")), None);
    assert_eq!(distrust_of(&io::Error::from(io::ErrorKind::ConnectionRefused)), None);
}

#[test]
fn expired_client_passes_tls_and_is_refused_by_name() {
    let fixture = Fixture::new();
    let (ca, key) = (&fixture.ca, fixture.public());
    let long_ago = NOW.minus(DAY * 30);
    let id = crate::testing::instance();
    let expired = ca.issue_agent(&id, &crate::testing::tenant(), &key, long_ago, DAY, &fixture.dice).unwrap();
    let seen = shake(client(&fixture, Some((&expired, &fixture.key))), mutual_server(&fixture), "localhost").unwrap();
    assert_eq!(Peer::accept(&seen.unwrap(), NOW).unwrap_err().reason(), "CERT_EXPIRED");
}

#[test]
fn certificate_not_for_clients_passes_tls_and_is_refused_by_name() {
    let fixture = Fixture::new();
    let file = fixture.file(FileUsage::Server);
    let seen = shake(client(&fixture, Some((&file, &fixture.key))), mutual_server(&fixture), "localhost").unwrap();
    assert_eq!(Peer::accept(&seen.unwrap(), NOW).unwrap_err().reason(), "CERT_INVALID");
}

#[test]
fn client_of_another_ca_fails_in_tls() {
    let (ours, theirs) = (Fixture::seeded(1), Fixture::seeded(2));
    // It trusts our server, but its own certificate is by another CA of the same name.
    let foreign = client(&ours, Some((&theirs.agent(), &theirs.key)));
    assert!(shake(foreign, mutual_server(&ours), "localhost").is_err());
    let foreign = client(&ours, Some((&theirs.file(FileUsage::Server), &theirs.key)));
    assert!(shake(foreign, mutual_server(&ours), "localhost").is_err());
    assert!(shake(client(&ours, None), mutual_server(&ours), "localhost").is_err());
}

#[test]
fn ca_itself_is_no_client() {
    let fixture = Fixture::new();
    let config =
        client_config(fixture.ca.bundle(), Some((fixture.ca.bundle_pem().as_bytes(), fixture.ca.key())), clock());
    assert!(shake(config.unwrap(), mutual_server(&fixture), "localhost").is_err());
}

#[test]
fn server_certificate_and_trust_are_swapped_while_listening() {
    let (old, new) = (Fixture::seeded(1), Fixture::seeded(2));
    let shown = identity(&old, &old.server());
    let trust = Arc::new(ClientTrust::new(old.ca.bundle()).unwrap());
    let server = server_config(shown.clone(), ClientAuth::Required(trust.clone()), clock()).unwrap();
    let (old_agent, new_agent) = (old.agent(), new.agent());
    assert!(shake(client(&old, Some((&old_agent, &old.key))), server.clone(), "localhost").is_ok());
    assert!(shake(client(&new, Some((&new_agent, &new.key))), server.clone(), "localhost").is_err());

    // Both are trusted during the overlap, though the two CAs bear one name.
    let both = Bundle::parse([new.ca.bundle_pem(), old.ca.bundle_pem()].concat().as_bytes()).unwrap();
    trust.swap(&both).unwrap();
    shown.swap(new.server().chain_pem.as_bytes(), &new.key).unwrap();
    let trusting = |issued: &Issued, key: &KeyPair| {
        client_config(&both, Some((issued.chain_pem.as_bytes(), key)), clock()).unwrap()
    };
    assert!(shake(trusting(&old_agent, &old.key), server.clone(), "localhost").is_ok());
    assert!(shake(trusting(&new_agent, &new.key), server.clone(), "localhost").is_ok());

    trust.swap(new.ca.bundle()).unwrap();
    assert!(shake(trusting(&old_agent, &old.key), server.clone(), "localhost").is_err());
}

#[test]
fn servers_know_each_other_and_show_their_newest_certificate() {
    let fixture = Fixture::new();
    let mine = identity(&fixture, &fixture.server());
    let trust = Arc::new(ClientTrust::new(fixture.ca.bundle()).unwrap());
    let dial = peer_config(mine.clone(), trust.clone(), "demo".parse().unwrap(), clock()).unwrap();
    for _ in 0..2 {
        let next = fixture.server();
        mine.swap(next.chain_pem.as_bytes(), &fixture.key).unwrap();
        let seen = shake(dial.clone(), mutual_server(&fixture), "localhost").unwrap();
        assert_eq!(Peer::accept(&seen.unwrap(), NOW).unwrap().serial, next.serial);
    }
    assert!(shake(dial.clone(), mutual_server(&fixture), "other.example.com").is_err());

    // A rotated CA is believed from the next handshake on, and the old one no longer.
    let new = Fixture::seeded(2);
    trust.swap(new.ca.bundle()).unwrap();
    assert!(shake(dial.clone(), open_server(&fixture, &fixture.server()), "localhost").is_err());
    assert!(shake(dial, open_server(&new, &new.server()), "localhost").is_ok());
}

#[test]
fn only_a_server_of_the_cluster_is_a_peer() {
    let fixture = Fixture::new();
    let mine = identity(&fixture, &fixture.server());
    let trust = Arc::new(ClientTrust::new(fixture.ca.bundle()).unwrap());
    let dial = |cluster: &str| peer_config(mine.clone(), trust.clone(), cluster.parse().unwrap(), clock()).unwrap();
    let error = shake(dial("other"), open_server(&fixture, &fixture.server()), "localhost").unwrap_err();
    assert!(error.to_string().contains("its cluster is demo"), "{error}");
    for usage in [FileUsage::Server, FileUsage::Peer] {
        let error = shake(dial("demo"), open_server(&fixture, &fixture.file(usage)), "localhost").unwrap_err();
        assert!(error.to_string().contains("no role"), "{error}");
    }
    assert!(shake(dial("demo"), open_server(&fixture, &fixture.agent()), "localhost").is_err());
    let late = peer_config(mine.clone(), trust.clone(), "demo".parse().unwrap(), Arc::new(Still(NOW.plus(DAY * 8))));
    assert!(shake(late.unwrap(), open_server(&fixture, &fixture.server()), "localhost").is_err());
}

#[test]
fn expired_server_is_not_trusted() {
    let fixture = Fixture::new();
    let server = open_server(&fixture, &fixture.server());
    let late = client_config(fixture.ca.bundle(), None, Arc::new(Still(NOW.plus(DAY * 8)))).unwrap();
    assert!(matches!(shake(late, server, "localhost"), Err(Error::InvalidCertificate(_))));
}

#[test]
fn certificate_and_key_must_belong_together() {
    let (ours, theirs) = (Fixture::seeded(1), Fixture::seeded(2));
    let chain = ours.server().chain_pem;
    assert!(matches!(ServerIdentity::new(chain.as_bytes(), &theirs.key), Err(TlsError::Mismatch)));
    assert!(matches!(ServerIdentity::new(b"", &ours.key), Err(TlsError::Chain)));
    let config = client_config(ours.ca.bundle(), Some((chain.as_bytes(), &theirs.key)), clock());
    assert!(matches!(config, Err(TlsError::Mismatch)));
}

#[test]
fn nothing_but_the_algorithms_of_our_own_certificates_is_offered() {
    let fixture = Fixture::new();
    let config = client(&fixture, None);
    let provider = config.crypto_provider();
    assert_eq!(provider.signature_verification_algorithms.supported_schemes(), [SignatureScheme::ED25519]);
    let groups: Vec<_> = provider.kx_groups.iter().map(|group| group.name()).collect();
    assert_eq!(groups, [rustls::NamedGroup::X25519]);
    assert!(provider.cipher_suites.iter().all(|suite| suite.tls13().is_some()));
    assert_eq!(provider.cipher_suites.len(), 3);
}

#[test]
fn keys_other_than_ed25519_are_not_loaded() {
    use ::ring::{rand::SystemRandom, signature};
    use rustls::pki_types::{PrivatePkcs8KeyDer, PrivateSec1KeyDer};
    let loader = provider().key_provider;
    let ours = KeyPair::generate(&crate::testing::Dice::new(1));
    assert!(loader.load_private_key(ours.to_rustls().into()).is_ok());
    let algorithm = &signature::ECDSA_P256_SHA256_ASN1_SIGNING;
    let curve = signature::EcdsaKeyPair::generate_pkcs8(algorithm, &SystemRandom::new()).unwrap();
    let curve = curve.as_ref().to_vec();
    assert!(loader.load_private_key(PrivatePkcs8KeyDer::from(curve.clone()).into()).is_err());
    assert!(loader.load_private_key(PrivateSec1KeyDer::from(curve).into()).is_err());
}
