//! The certificate of the server: made at the first start, kept in `.pki/`, and trusted by the kubeconfig.

use std::{fs, io, net::IpAddr, path::Path, sync::Arc};

use anyhow::Context as _;
use nstance_core::{ids::ClusterId, ports::clock::Clock};
use nstance_identity::{
    ca::{Ca, CaProfile, DEFAULT_CA_TTL, make_ca_certificate},
    issue::{FileProfile, FileUsage},
    keys::KeyPair,
    subject::{San, Subject},
};
use nstance_rt::entropy::SystemEntropy;
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

/// Names under which the server is reached, the one of in-cluster clients included.
const HOSTS: [&str; 4] = ["127.0.0.1", "::1", "localhost", "kubernetes.default.svc"];

pub(crate) struct Pki {
    pub(crate) ca_pem: String,
    pub(crate) config: Arc<ServerConfig>,
}

pub(crate) fn load_or_make(dir: &Path, listening: IpAddr, clock: &dyn Clock) -> anyhow::Result<Pki> {
    let dir = dir.join(".pki");
    let (ca, certificate, key) = (dir.join("ca.crt"), dir.join("tls.crt"), dir.join("tls.key"));
    if ![&ca, &certificate, &key].iter().all(|it| it.exists()) {
        make(&dir, listening, clock).with_context(|| format!("make a certificate in {}", dir.display()))?;
    }
    let ca_pem = fs::read_to_string(&ca).with_context(|| format!("read {}", ca.display()))?;
    let chain = CertificateDer::pem_file_iter(&certificate)
        .and_then(Iterator::collect)
        .with_context(|| format!("read {}", certificate.display()))?;
    let key = PrivateKeyDer::from_pem_file(&key).with_context(|| format!("read {}", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .context("set up TLS")?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .with_context(|| format!("use {}; remove {} to have it made anew", certificate.display(), dir.display()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Pki { ca_pem, config: Arc::new(config) })
}

fn make(dir: &Path, listening: IpAddr, clock: &dyn Clock) -> anyhow::Result<()> {
    let (entropy, now) = (SystemEntropy::new(), clock.now());
    let cluster: ClusterId = "nstance-dev".parse().context("name the cluster")?;
    let ca_key = KeyPair::generate(&entropy);
    let ca_pem = make_ca_certificate(&ca_key, &CaProfile::of(cluster), now, &entropy).chain_pem;
    let ca = Ca::load(ca_pem.as_bytes(), [ca_key]).context("load the CA")?;
    let mut sans = HOSTS.iter().map(|host| San::host(host)).collect::<Result<Vec<_>, _>>().context("name the hosts")?;
    let listening = San::ip(listening);
    if !sans.contains(&listening) {
        sans.push(listening);
    }
    let subject = Subject { common_name: "nstance-dev".to_owned(), ..Subject::default() };
    let profile = FileProfile { subject, sans, usage: FileUsage::Server };
    let key = KeyPair::generate(&entropy);
    let issued = ca.issue_file(&profile, &key.public_key(), now, DEFAULT_CA_TTL, &entropy).context("issue")?;
    fs::create_dir_all(dir)?;
    fs::write(dir.join("ca.crt"), &ca_pem)?;
    fs::write(dir.join("tls.crt"), &issued.chain_pem)?;
    write_secret(&dir.join("tls.key"), key.to_pkcs8_pem().as_bytes())?;
    Ok(())
}

/// Writes a file that only its owner can read.
fn write_secret(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}
