//! The operator's identity we call with: `ca.crt`, `identity.key`, `identity.crt` in one directory.

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use nstance_core::{ids::Tenant, ports::clock::Clock as _, time::Timestamp};
use nstance_identity::{
    ca::Bundle,
    keys::KeyPair,
    peer::{Peer, PeerName},
    renew::renew_after,
    tls::client_config,
};
use nstance_proto::v1::RenewCertificateRequest;
use nstance_rt::clock::SystemClock;
use rustls::{ClientConfig, pki_types::CertificateDer, pki_types::pem::PemObject as _};

use super::Client;
use crate::failure::Failure;

const CA: &str = "ca.crt";
const KEY: &str = "identity.key";
const CERTIFICATE: &str = "identity.crt";

/// Who we are, read from a directory.
pub struct Identity {
    dir: PathBuf,
    key: KeyPair,
    held: Mutex<Held>,
}

/// What changes with a renewal.
struct Held {
    bundle: Bundle,
    leaf: CertificateDer<'static>,
    peer: Peer,
    tls: Arc<ClientConfig>,
}

impl Identity {
    pub fn load(dir: &Path) -> Result<Self, Failure> {
        let register = "nstance-admin cluster register-operator, which makes an identity, or --identity-dir";
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read(&path).map_err(|error| {
                let what = format!("read {} of the operator identity", path.display());
                Failure::new(crate::exit::Exit::Denied, what).because(error).next(register)
            })
        };
        let bad = |name: &str, error: Box<dyn std::error::Error + Send + Sync>| {
            let what = format!("use {} of the operator identity", dir.join(name).display());
            Failure::new(crate::exit::Exit::Denied, what).because(error).next(register)
        };
        let (ca, key, chain) = (read(CA)?, read(KEY)?, read(CERTIFICATE)?);
        let bundle = Bundle::parse(&ca).map_err(|error| bad(CA, error.into()))?;
        let key = KeyPair::from_pkcs8_pem(&key).map_err(|error| bad(KEY, error.into()))?;
        let held = hold(&bundle, &chain, &key).map_err(|error| bad(CERTIFICATE, error))?;
        Ok(Self { dir: dir.to_owned(), key, held: Mutex::new(held) })
    }

    pub(super) fn tls(&self) -> Arc<ClientConfig> {
        self.held().tls.clone()
    }

    pub fn tenant(&self) -> Option<Tenant> {
        self.held().peer.tenant().cloned()
    }

    /// Its certificate as it stands, for those who look at it from outside.
    pub fn peer(&self) -> Peer {
        self.held().peer.clone()
    }

    /// Whether its certificate is by a CA of this bundle.
    pub fn is_by(&self, bundle: &Bundle) -> bool {
        bundle.signed(&self.held().leaf)
    }

    /// The CAs of the cluster, as far as we were told of them.
    pub fn bundle(&self) -> Bundle {
        self.held().bundle.clone()
    }

    /// The operator's id.
    pub fn name(&self) -> String {
        self.held().peer.common_name()
    }

    pub fn valid_until(&self) -> Timestamp {
        self.held().peer.not_after
    }

    pub fn is_renewal_due(&self, now: Timestamp) -> bool {
        let held = self.held();
        renew_after(held.peer.not_before, held.peer.not_after) <= now
    }

    /// Asks a leader for the next certificate and writes it in place of the old one, which stays good until the new one is
    /// used.
    pub async fn renew(&self, client: &mut Client) -> Result<(), Failure> {
        let request = RenewCertificateRequest { public_key_pem: self.key.public_key_pem().into_bytes() };
        let answer = client.service.renew_certificate(request).await;
        let answer =
            answer.map_err(|status| Failure::from(super::ShardError::of(&client.shard, &status)))?.into_inner();
        let what = || format!("take the renewed certificate into {}", self.dir.display());
        let bundle = Bundle::parse(&answer.ca_bundle_pem).map_err(|error| Failure::failed(what()).because(error))?;
        let held = hold(&bundle, &answer.client_certificate_pem, &self.key)
            .map_err(|error| Failure::failed(what()).because(error))?;
        // Trust first: a certificate of a new CA is of no use to somebody who does not know that CA.
        place(&self.dir, CA, bundle.pem().as_bytes()).map_err(|error| Failure::failed(what()).because(error))?;
        place(&self.dir, CERTIFICATE, &answer.client_certificate_pem)
            .map_err(|error| Failure::failed(what()).because(error))?;
        *self.held() = held;
        Ok(())
    }

    fn held(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hold(bundle: &Bundle, chain: &[u8], key: &KeyPair) -> Result<Held, Box<dyn std::error::Error + Send + Sync>> {
    let der = CertificateDer::from_pem_slice(chain).map_err(|error| format!("parse the certificate: {error}"))?;
    let peer = Peer::from_der(&der)?;
    if !matches!(peer.name, PeerName::Operator { .. }) {
        return Err(format!("it belongs to {}, which is no operator", peer.common_name()).into());
    }
    if peer.public_key_der() != key.public_key_der() {
        return Err("it was made for another key than identity.key".into());
    }
    let tls = client_config(bundle, Some((chain, key)), Arc::new(SystemClock))?;
    Ok(Held { bundle: bundle.clone(), leaf: der, peer, tls })
}

/// Writes an identity in place of what is there. The certificate goes first and comes last: without it the rest is not
/// used, and nobody ever finds the key of one identity beside the certificate of another.
pub fn write(dir: &Path, ca: &str, key: Option<&KeyPair>, chain: &str) -> io::Result<()> {
    make_dir(dir)?;
    match fs::remove_file(dir.join(CERTIFICATE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    place(dir, CA, ca.as_bytes())?;
    if let Some(key) = key {
        place(dir, KEY, key.to_pkcs8_pem().as_bytes())?;
    }
    place(dir, CERTIFICATE, chain.as_bytes())
}

/// For its owner only.
pub(crate) fn make_dir(dir: &Path) -> io::Result<()> {
    if dir.is_dir() { Ok(()) } else { fs::DirBuilder::new().recursive(true).mode(0o700).create(dir) }
}

/// Nobody ever sees half a file.
pub(crate) fn place(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let aside = dir.join(format!(".{name}.{}", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&aside, dir.join(name))
}

/// Whether it is too old to be used now; a server would refuse it.
pub fn is_expired(identity: &Identity) -> bool {
    identity.valid_until() <= SystemClock.now()
}
