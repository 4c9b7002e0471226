//! The operator's identity in Secrets and a ConfigMap: load it, or register for one.
//!
//! A crash at any point is harmless. The key is stored before it is used, the same nonce with the same key may be presented
//! again, and a certificate is used only after it was stored, from the bytes in memory.

use std::{error::Error, sync::Arc, time::Duration};

use async_trait::async_trait;
use nstance_client::{
    Identity, IdentityError, Registration, RenewedIdentity, SaveIdentity, ShardError, Target, Targets,
};
use nstance_core::{
    ids::{ClusterId, Tenant},
    ports::clock::{Clock, Entropy},
};
use nstance_identity::{
    ca::{Bundle, CaError},
    keys::{KeyError, KeyPair},
    link::Net,
};
use nstance_rt::{
    backoff::Backoff,
    chain::Chain,
    entropy::{SystemEntropy, below},
};
use serde_json::{Value, json};
use tonic::Code;

use super::secrets;
use crate::{
    api::names::{label, manager},
    ports::{KubeError, KubeErrorKind, KubePort, ObjectRef, Target as Part, kinds},
};

/// All shards together have this long to register us.
const REGISTRATION_LIMIT: Duration = Duration::from_secs(120);
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_millis(500);
const MAX_WAIT: Duration = Duration::from_secs(10);

pub(super) const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const CERTIFICATE_KEY: &str = "tls.key";
const PRIVATE_KEY: &str = "private.key";
const PUBLIC_KEY: &str = "public.key";
pub(super) const NONCE: &str = "nonce.jwt";

/// The names of the objects that hold the identity.
#[derive(Debug, Clone)]
pub struct Names {
    pub ca: ObjectRef,
    pub certificate: ObjectRef,
    pub key: ObjectRef,
    pub nonce: ObjectRef,
}

impl Names {
    pub fn new(namespace: &str, ca: &str, certificate: &str, key: &str, nonce: &str) -> Self {
        let secret = |name: &str| ObjectRef::new(kinds::SECRET, namespace, name);
        Self {
            ca: ObjectRef::new(kinds::CONFIG_MAP, namespace, ca),
            certificate: secret(certificate),
            key: secret(key),
            nonce: secret(nonce),
        }
    }
}

/// Why there is no identity. Each ends the start.
#[derive(Debug, thiserror::Error)]
pub enum NoIdentity {
    #[error("read or write the operator's identity")]
    Kube(#[from] KubeError),
    #[error("{config_map} is missing or has no entry ca.crt; make it of cluster/ca.crt in the cluster's bucket")]
    CaMissing { config_map: ObjectRef },
    #[error("{config_map}: ca.crt cannot be used")]
    CaUnusable { config_map: ObjectRef, source: CaError },
    #[error("{secret}: private.key cannot be used; delete the Secret to register with a new key and nonce")]
    KeyUnusable { secret: ObjectRef, source: KeyError },
    #[error(
        "there is no usable certificate, and {secret} is missing or has no entry nonce.jwt; \
         make a nonce with `nstance-admin cluster nonce` and put it there"
    )]
    NonceMissing { secret: ObjectRef },
    #[error("shard {} refused the nonce in {secret}: {}; make a new one with `nstance-admin cluster nonce`", error.shard, error.message)]
    NonceRefused { secret: ObjectRef, error: ShardError },
    #[error(
        "no shard could be reached to register the operator within {} s; check registration_addr and network. Last: {last}",
        REGISTRATION_LIMIT.as_secs()
    )]
    Unreachable { last: ShardError },
    #[error("the certificate that was issued cannot be used")]
    Unusable(#[source] IdentityError),
    #[error("{secret} is for tenant {theirs}, but the configuration says {ours}; correct tenant, or delete the Secret")]
    OtherTenant { secret: ObjectRef, theirs: String, ours: String },
    #[error("shard {shard} belongs to cluster {theirs}, but the configuration says {ours}; correct cluster_id")]
    OtherCluster { shard: String, theirs: String, ours: String },
}

/// Keeps the identity in Kubernetes.
pub struct Keeper {
    pub kube: Arc<dyn KubePort>,
    pub names: Names,
    pub cluster: ClusterId,
    pub tenant: Tenant,
    pub clock: Arc<dyn Clock>,
    pub network: Arc<dyn Net>,
    /// Is told when the CA ConfigMap could not be brought up to date.
    pub on_stale_ca: Box<dyn Fn(&KubeError) + Send + Sync>,
}

impl Keeper {
    /// The stored identity if it can be used, else a new registration at any of the shards.
    pub async fn obtain(&self, registration: &Targets) -> Result<Arc<Identity>, NoIdentity> {
        let bundle = self.bundle().await?;
        let stored = self.kube.get(&self.names.certificate).await?;
        let key = self.stored_key().await?;
        if let Some(identity) = stored.and_then(|it| self.usable(&it, key.as_ref(), &bundle)) {
            if identity.tenant().is_some_and(|it| it != self.tenant) {
                return Err(NoIdentity::OtherTenant {
                    secret: self.names.certificate.clone(),
                    theirs: identity.tenant().map(|it| it.to_string()).unwrap_or_default(),
                    ours: self.tenant.to_string(),
                });
            }
            if key.is_none() {
                self.store_key(identity.key()).await?;
            }
            // An expired one too: the running operator rejoins with its key, and takes a nonce only if that is refused.
            return Ok(Arc::new(identity));
        }
        let key = match key {
            Some(key) => key,
            None => self.make_key().await?,
        };
        self.register(&bundle, key, registration).await
    }

    async fn bundle(&self) -> Result<Bundle, NoIdentity> {
        let missing = || NoIdentity::CaMissing { config_map: self.names.ca.clone() };
        let config_map = self.kube.get(&self.names.ca).await?.ok_or_else(missing)?;
        let text = secrets::text(&config_map, CA).ok_or_else(missing)?;
        let unusable = |source| NoIdentity::CaUnusable { config_map: self.names.ca.clone(), source };
        Bundle::parse(text.as_bytes()).map_err(unusable)
    }

    /// The identity of a certificate Secret, unless something of it does not fit.
    fn usable(&self, secret: &Value, key: Option<&KeyPair>, bundle: &Bundle) -> Option<Identity> {
        let (certificate, own_key) = (secrets::entry(secret, CERTIFICATE)?, secrets::entry(secret, CERTIFICATE_KEY)?);
        match Identity::from_pem(bundle.pem().as_bytes(), &own_key, &certificate, self.clock.clone()) {
            Ok(identity) => {
                let is_ours = key.is_none_or(|key| key.public_key() == identity.key().public_key());
                if !is_ours || !identity.is_issued_by(bundle) {
                    tracing::warn!(secret = %self.names.certificate, "the certificate is of another key or CA");
                }
                Some(identity).filter(|it| is_ours && it.is_issued_by(bundle))
            }
            Err(error) => {
                tracing::warn!(secret = %self.names.certificate, error = %Chain(&error), "the certificate is not used");
                None
            }
        }
    }

    async fn stored_key(&self) -> Result<Option<KeyPair>, NoIdentity> {
        let Some(secret) = self.kube.get(&self.names.key).await? else { return Ok(None) };
        let Some(pem) = secrets::entry(&secret, PRIVATE_KEY) else { return Ok(None) };
        let unusable = |source| NoIdentity::KeyUnusable { secret: self.names.key.clone(), source };
        KeyPair::from_pkcs8_pem(&pem).map(Some).map_err(unusable)
    }

    /// Makes a key and stores it before it is used. If another process was faster, its key is taken.
    async fn make_key(&self) -> Result<KeyPair, NoIdentity> {
        let key = KeyPair::generate(&SystemEntropy::new());
        match self.store_key(&key).await {
            Ok(()) => Ok(key),
            Err(error) if error.kind == KubeErrorKind::AlreadyExists => {
                if let Some(theirs) = self.stored_key().await? {
                    return Ok(theirs);
                }
                // The Secret is there without a key: somebody emptied it.
                let data = json!({ "data": key_data(&key) });
                self.kube.merge_patch(&self.names.key, &data, Part::Main).await?;
                Ok(key)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn store_key(&self, key: &KeyPair) -> Result<(), KubeError> {
        let body = json!({ "metadata": movable(), "type": "Opaque", "data": key_data(key) });
        self.kube.create(&self.names.key, &body, manager::SPEC).await.map(drop)
    }

    /// The nonce, if there is one now.
    pub async fn nonce(&self) -> Result<Option<String>, KubeError> {
        let secret = self.kube.get(&self.names.nonce).await?;
        let nonce = secret.and_then(|it| secrets::entry(&it, NONCE)).and_then(|it| String::from_utf8(it).ok());
        Ok(nonce.map(|it| it.trim().to_owned()).filter(|it| !it.is_empty()))
    }

    async fn register(&self, bundle: &Bundle, key: KeyPair, shards: &Targets) -> Result<Arc<Identity>, NoIdentity> {
        let nonce = self.nonce().await?;
        let nonce = nonce.ok_or_else(|| NoIdentity::NonceMissing { secret: self.names.nonce.clone() })?;
        let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, MAX_WAIT), SystemEntropy::new());
        let mut last = ShardError::new("", Code::Unavailable, "no shard is configured");
        let registered = async {
            loop {
                match self.register_once(bundle, &key, &nonce, shards).await {
                    Ok(renewed) => return Ok(renewed),
                    Err(error) if is_refusal(&error) => {
                        return Err(NoIdentity::NonceRefused { secret: self.names.nonce.clone(), error });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "not registered yet");
                        last = error;
                    }
                }
                tokio::time::sleep(backoff.next(&entropy)).await;
            }
        };
        let renewed = match tokio::time::timeout(REGISTRATION_LIMIT, registered).await {
            Ok(registered) => registered?,
            Err(_) => return Err(NoIdentity::Unreachable { last }),
        };
        let RenewedIdentity { ca_bundle_pem, certificate_pem } = &renewed;
        let key_pem = key.to_pkcs8_pem();
        let identity = Identity::from_pem(ca_bundle_pem, key_pem.as_bytes(), certificate_pem, self.clock.clone())
            .map_err(NoIdentity::Unusable)?;
        self.store(&key, &renewed).await?;
        tracing::info!(operator = identity.name(), "registered");
        Ok(Arc::new(identity))
    }

    /// Asks the shards one after the other, in random order. The error is a refusal if there was one, else the last.
    pub(super) async fn register_once(
        &self,
        bundle: &Bundle,
        key: &KeyPair,
        nonce: &str,
        shards: &Targets,
    ) -> Result<RenewedIdentity, ShardError> {
        let registration =
            Registration { ca_bundle: bundle, nonce, key, client_version: version(), clock: self.clock.clone() };
        let mut last = ShardError::new("", Code::Unavailable, "no shard is configured");
        for target in shuffled(shards, &SystemEntropy::new()) {
            match registration.register(self.network.as_ref(), &target, CALL_TIMEOUT).await {
                Ok(answer) if answer.cluster_id == self.cluster.as_str() => {
                    return Ok(renewed(bundle, answer.ca_bundle_pem, answer.client_certificate_pem));
                }
                Ok(answer) => {
                    let message = format!(
                        "it belongs to cluster {}, and the configuration says {}; correct cluster_id",
                        answer.cluster_id, self.cluster
                    );
                    last = ShardError::new(&target.shard, Code::InvalidArgument, message);
                }
                Err(error) if is_refusal(&last) && !is_refusal(&error) => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Stores a new certificate, the CA bundle first. A CA bundle that may not be written is used all the same.
    pub(super) async fn store(&self, key: &KeyPair, renewed: &RenewedIdentity) -> Result<(), KubeError> {
        let bundle = String::from_utf8_lossy(&renewed.ca_bundle_pem).into_owned();
        let stored = self.kube.get(&self.names.ca).await?;
        if stored.and_then(|it| secrets::text(&it, CA)).is_none_or(|it| it.trim() != bundle.trim()) {
            let patch = json!({ "data": { CA: bundle } });
            if let Err(error) = self.kube.merge_patch(&self.names.ca, &patch, Part::Main).await {
                tracing::warn!(error = %Chain(&error), "the CA ConfigMap was not brought up to date");
                (self.on_stale_ca)(&error);
            }
        }
        let data =
            secrets::data(&[(CERTIFICATE, &renewed.certificate_pem), (CERTIFICATE_KEY, key.to_pkcs8_pem().as_bytes())]);
        let mut n_tries = 0;
        loop {
            let written = match self.kube.get(&self.names.certificate).await? {
                None => {
                    let body = json!({ "metadata": movable(), "type": "kubernetes.io/tls", "data": data });
                    self.kube.create(&self.names.certificate, &body, manager::SPEC).await
                }
                Some(mut secret) => {
                    if let (Some(entries), Some(new)) = (secret["data"].as_object_mut(), data.as_object()) {
                        entries.extend(new.clone());
                    } else {
                        secret["data"] = data.clone();
                    }
                    // It carries the resourceVersion that was read.
                    self.kube.replace(&self.names.certificate, &secret).await
                }
            };
            n_tries += 1;
            match written {
                Err(error)
                    if n_tries < 4 && matches!(error.kind, KubeErrorKind::Conflict | KubeErrorKind::AlreadyExists) => {}
                written => return written.map(drop),
            }
        }
    }
}

fn key_data(key: &KeyPair) -> Value {
    secrets::data(&[(PRIVATE_KEY, key.to_pkcs8_pem().as_bytes()), (PUBLIC_KEY, key.public_key_pem().as_bytes())])
}

/// `clusterctl move` takes what carries this label along.
fn movable() -> Value {
    json!({ "labels": { label::MOVE: "" } })
}

pub(super) fn renewed(known: &Bundle, ca_bundle_pem: Vec<u8>, certificate_pem: Vec<u8>) -> RenewedIdentity {
    let ca_bundle_pem = if ca_bundle_pem.is_empty() { known.pem().as_bytes().to_vec() } else { ca_bundle_pem };
    RenewedIdentity { ca_bundle_pem, certificate_pem }
}

pub(super) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

pub(super) fn shuffled(shards: &Targets, entropy: &dyn Entropy) -> Vec<Target> {
    let mut targets = shards.0.clone();
    for n in (1..targets.len()).rev() {
        let m = below(entropy, u64::try_from(n + 1).unwrap_or(u64::MAX));
        targets.swap(n, usize::try_from(m).unwrap_or(n));
    }
    targets
}

/// Whether a shard answered, and will not answer otherwise until a person does something.
pub(super) fn is_refusal(error: &ShardError) -> bool {
    let is_answer = error.reason != "UNTRUSTED_SERVER";
    let codes = [Code::Unauthenticated, Code::PermissionDenied, Code::InvalidArgument, Code::FailedPrecondition];
    is_answer && codes.contains(&error.code)
}

/// Stores renewed certificates.
pub struct Saver {
    pub keeper: Arc<Keeper>,
    pub identity: Arc<Identity>,
}

#[async_trait]
impl SaveIdentity for Saver {
    async fn save(&self, renewed: &RenewedIdentity) -> Result<(), Box<dyn Error + Send + Sync>> {
        Ok(self.keeper.store(self.identity.key(), renewed).await?)
    }
}
