//! Our own operator identity: by it we look at the server through the same door as everybody else.
//!
//! Made by the admin tool's own hands: certificate signed with the CA's key from the bucket, logged, then recorded. It is
//! kept in `cli-operator-identity/` and used again while it is valid and its record still names it.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use nstance_admin::{
    identity_files::write,
    issue::{NewOperator, issue_operator},
};
use nstance_config::Config;
use nstance_core::{
    ids::{OperatorId, Tenant, uuid_v7},
    ports::clock::{Clock, Entropy, random},
};
use nstance_identity::{
    ca::Bundle,
    keys::KeyPair,
    peer::{Peer, PeerName},
    tls::client_config,
};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use nstance_store::{Records, s3::S3Store};
use rustls::{ClientConfig, pki_types::CertificateDer, pki_types::pem::PemObject as _};

use crate::{layout::Layout, shape, stored};

/// A certificate with less than this left is replaced rather than used.
const LEAST_LEFT: Duration = Duration::from_secs(3600);

/// Every config has it.
fn tenant() -> Tenant {
    "default".parse().expect("a constant, well-formed tenant")
}

/// The kept identity if it still serves, else a new one.
pub(crate) async fn obtain(
    layout: &Layout,
    store: &Arc<S3Store>,
    config: &Config,
) -> anyhow::Result<Arc<ClientConfig>> {
    let ca = stored::read_ca(store).await?.context("the cluster has no CA yet; its server makes it")?;
    let records = records(store);
    if let Ok(kept) = kept(layout, &ca, &records).await {
        return Ok(kept);
    }
    // Two commands at once would mix up their keys and certificates.
    let _lock = lock(&layout.identity()).await.context("lock the operator identity")?;
    match kept(layout, &ca, &records).await {
        Ok(kept) => Ok(kept),
        Err(why) => {
            tracing::debug!(why = format!("{why:#}"), "operator identity is made anew");
            make(layout, store, config, &records).await.context("make an operator identity")
        }
    }
}

/// Held by whoever makes an identity; given up when dropped.
async fn lock(dir: &Path) -> io::Result<fs::File> {
    if !dir.is_dir() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    let file = fs::File::options().create(true).append(true).mode(0o600).open(dir.join(".lock"))?;
    let locked = async {
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(()),
                Err(fs::TryLockError::WouldBlock) => tokio::time::sleep(Duration::from_millis(20)).await,
                Err(fs::TryLockError::Error(error)) => return Err(error),
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), locked).await.map_err(|_| io::ErrorKind::TimedOut)??;
    Ok(file)
}

/// Forgets the kept identity, because the server refused it.
pub(crate) fn discard(layout: &Layout) {
    let _ = fs::remove_file(layout.identity().join("identity.crt"));
}

fn records(store: &Arc<S3Store>) -> Records {
    let writer = "admin/nstance-dev".to_owned();
    Records::new(store.clone(), shape::shard(1), writer, Arc::new(SystemClock), Arc::new(SystemEntropy::new()))
        .within(Duration::from_secs(10))
}

async fn kept(layout: &Layout, ca: &[u8], records: &Records) -> anyhow::Result<Arc<ClientConfig>> {
    let dir = layout.identity();
    let chain = fs::read(dir.join("identity.crt")).context("read the certificate")?;
    let key = KeyPair::from_pkcs8_pem(&fs::read(dir.join("identity.key")).context("read the key")?)?;
    let der = CertificateDer::from_pem_slice(&chain).context("parse the certificate")?;
    let peer = Peer::accept(&der, SystemClock.now().plus(LEAST_LEFT))?;
    let PeerName::Operator { operator, tenant } = &peer.name else { bail!("it is no operator's") };
    let Some(record) = records.read_operator(tenant, operator).await? else { bail!("it has no record") };
    let record = record.value;
    if record.revoked.is_some() || record.cert.current.serial != peer.serial {
        bail!("its record does not accept it");
    }
    settings(ca, &chain, &key)
}

/// What we dial with.
fn settings(ca: &[u8], chain: &[u8], key: &KeyPair) -> anyhow::Result<Arc<ClientConfig>> {
    let bundle = Bundle::parse(ca).context("read the CA's certificate")?;
    Ok(client_config(&bundle, Some((chain, key)), Arc::new(SystemClock))?)
}

async fn make(
    layout: &Layout,
    store: &Arc<S3Store>,
    config: &Config,
    records: &Records,
) -> anyhow::Result<Arc<ClientConfig>> {
    let entropy: Arc<dyn Entropy> = Arc::new(SystemEntropy::new());
    let ca = stored::load_ca(store, config, entropy.clone()).await?;
    let (now, key) = (SystemClock.now(), KeyPair::generate(entropy.as_ref()));
    let new = NewOperator {
        operator: OperatorId::new(uuid_v7(now, random(entropy.as_ref()))),
        tenant: tenant(),
        cluster: config.server.cluster_id.clone(),
        key: key.public_key(),
        ttl: config.certificates.operator_ttl,
    };
    let issued = issue_operator(&ca, records, &new, now, entropy.as_ref()).await?;
    write(&layout.identity(), ca.bundle_pem(), Some(&key), &issued.chain_pem).context("keep the operator identity")?;
    settings(ca.bundle_pem().as_bytes(), issued.chain_pem.as_bytes(), &key)
}
