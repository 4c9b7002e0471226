//! What the environment keeps in its bucket, and how its processes reach it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use nstance_admin::storage::Cluster;
use nstance_config::{
    Config,
    model::{KeyProvider, SecretsProvider},
};
use nstance_core::{
    ids::{OperatorId, Shard, Tenant, uuid_v7},
    ports::{
        clock::{Clock as _, Entropy, random},
        objects::{Condition, ObjectStore as _},
    },
};
use nstance_identity::{
    ca::Ca,
    nonce::{OperatorNonce, new_jti, sign_operator_nonce},
    vault::read_nonce_key,
};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use nstance_store::{
    keys::{EncryptionKey, KeySource, load_key},
    records::{ca_crt_key, config_keys, decode_object, leader::LeaseRecord, lease_key},
    s3::{S3Settings, S3Store},
    secrets::ObjectSecrets,
};

use crate::render;

pub(crate) const BUCKET: &str = "dev";

/// Known to everybody, for what it guards is a toy.
const ENCRYPTION_KEY: [u8; 32] = *b"thisisatest32bytekey123456789012";

/// As `nstance-admin cluster nonce` has it by default.
const NONCE_LASTS: Duration = Duration::from_secs(3 * 3600);

/// How a process of this environment reaches the store and opens its secrets. `client` is how the store calls it.
pub(crate) fn variables(store_port: u16, client: &str) -> BTreeMap<String, String> {
    let key = String::from_utf8_lossy(&ENCRYPTION_KEY).into_owned();
    [
        ("AWS_ACCESS_KEY_ID", client.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "dev".to_owned()),
        ("AWS_ENDPOINT_URL", endpoint(store_port)),
        ("AWS_S3_USE_PATH_STYLE", "true".to_owned()),
        ("AWS_REGION", "dev".to_owned()),
        ("NSTANCE_ENCRYPTION_KEY", key),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

fn endpoint(store_port: u16) -> String {
    format!("http://127.0.0.1:{store_port}")
}

/// Opens the bucket as a client of our own, so that faults for servers do not hit us.
pub(crate) fn open(store_port: u16) -> anyhow::Result<Arc<S3Store>> {
    let variables = variables(store_port, "dev-cli");
    let settings = S3Settings::from_lookup(BUCKET, "", |name| variables.get(name).cloned());
    Ok(Arc::new(S3Store::new(settings).context("open the bucket")?))
}

/// The stored config, as the server would read it.
pub(crate) struct StoredConfig {
    pub(crate) key: String,
    pub(crate) config: Config,
}

pub(crate) async fn read_config(store: &S3Store, shard: &Shard) -> anyhow::Result<Option<StoredConfig>> {
    for key in config_keys(shard) {
        match store.get(&key).await {
            Ok(object) => {
                let config = render::check(&key, &object.body, Some(shard))?;
                return Ok(Some(StoredConfig { key, config }));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error).context("read the stored config"),
        }
    }
    Ok(None)
}

/// Stores a config unless there is one. Says whether it is ours now.
pub(crate) async fn create_config(store: &S3Store, shard: &Shard, text: String) -> anyhow::Result<bool> {
    let [key, _] = config_keys(shard);
    match store.put(&key, text.into_bytes(), Condition::Create).await {
        Ok(_) => Ok(true),
        Err(error) if error.is_precondition() => Ok(false),
        Err(error) => Err(error).context("store the config"),
    }
}

/// Who holds a shard's lease, by the store.
pub(crate) async fn read_lease(store: &S3Store, shard: &Shard) -> anyhow::Result<Option<LeaseRecord>> {
    let key = lease_key(Some(shard));
    match store.get(&key).await {
        Ok(object) => Ok(Some(decode_object::<LeaseRecord>(&key, object).context("read the lease")?.value)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error).context("read the lease"),
    }
}

pub(crate) async fn read_ca(store: &S3Store) -> anyhow::Result<Option<Vec<u8>>> {
    match store.get(&ca_crt_key()).await {
        Ok(object) => Ok(Some(object.body)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error).context("read the CA's certificate"),
    }
}

/// The cluster's secrets, as the admin tool opens them.
fn secrets(store: &Arc<S3Store>, config: &Config, entropy: Arc<dyn Entropy>) -> anyhow::Result<ObjectSecrets> {
    let secrets = &config.server.secrets;
    if secrets.provider != SecretsProvider::ObjectStorage {
        bail!("server.secrets.provider is {}; only object-storage can be shared with nstance-dev", secrets.provider);
    }
    let keys = match &secrets.encryption_key {
        Some(key) if key.provider == KeyProvider::File => load_key(&KeySource::File((&key.source).into()))?.keys,
        _ => vec![EncryptionKey::new(ENCRYPTION_KEY)],
    };
    let prefix = format!("cluster/{}", secrets.prefix(&config.server.cluster_id));
    ObjectSecrets::new(store.clone(), Some(&prefix), keys, Vec::new(), entropy).context("open the secrets")
}

/// The cluster's CA with its key, as the admin tool gets at it.
pub(crate) async fn load_ca(store: &Arc<S3Store>, config: &Config, entropy: Arc<dyn Entropy>) -> anyhow::Result<Ca> {
    let secrets = secrets(store, config, entropy.clone())?;
    let cluster = Cluster::new(store.clone(), Arc::new(SystemClock), entropy);
    cluster.ca(&secrets).await.context("load the CA")
}

/// What `nstance-admin cluster nonce` would print for this cluster.
pub(crate) async fn operator_nonce(store: &Arc<S3Store>, config: &Config, tenant: Tenant) -> anyhow::Result<String> {
    let entropy: Arc<dyn Entropy> = Arc::new(SystemEntropy::new());
    let secrets = secrets(store, config, entropy.clone())?;
    let key = read_nonce_key(&secrets).await.context("read the nonce key")?;
    let key = key.context("the cluster has no nonce key yet; its server makes it")?;
    let (now, entropy) = (SystemClock.now(), entropy.as_ref());
    let nonce = OperatorNonce {
        operator: OperatorId::new(uuid_v7(now, random(entropy))),
        jti: new_jti(entropy),
        issued_at: now,
        expires_at: now.plus(NONCE_LASTS),
        cluster: config.server.cluster_id.clone(),
        tenant,
    };
    Ok(sign_operator_nonce(&key, &nonce))
}
