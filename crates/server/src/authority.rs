//! The keys a server holds: CA, nonce key, its own certificate. And how the first of them come to be.
//!
//! A CA is made in two steps, each of which may be the last before a crash: the key under its own name, then the
//! certificate of the key *that is stored*. Creating `ca.crt` is the commit; whoever loses a race uses the winner's.
//!
//! The CA may be replaced while we run: `keep.rs` follows the stored bundle, which the admin tool changes.

pub mod keep;

use std::{
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, Epoch, InstanceId, OperatorId, Tenant},
    instance::{Instance, Ownership},
    ports::{
        clock::{Clock, Entropy},
        objects::{Condition, ObjectStore, StoreError, StoreFault},
        secrets::Secrets,
    },
    time::Timestamp,
};
use nstance_identity::{
    ca::{Bundle, CA_KEY_SECRET, Ca, CaError, CaProfile, CaStep, NONCE_KEY_SECRET, ca_step, make_ca_certificate},
    issue::{FileProfile, IssueError, Issued, SERVER_TTL, ServerProfile},
    keys::{KeyError, KeyPair, PublicKey},
    nonce::{AgentNonce, NonceKeys, sign_agent_nonce},
    renew::renew_at,
    tls::{ClientTrust, ServerIdentity, TlsError},
    vault::{VaultError, read_ca_key, read_key, read_keys, read_nonce_key, store_key},
};
use nstance_store::{
    cache::Cache,
    cas::{RecordError, Records},
    fence::Fence,
    records::{ca_crt_key, certlog::CertlogRecord},
};

use tokio::sync::watch;

use crate::service::register::logged;

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("read or write {what}")]
    Store { what: String, source: StoreError },
    #[error("log a certificate")]
    Log(#[source] RecordError),
    #[error("CA")]
    Ca(#[source] CaError),
    #[error("secret {name} does not hold a usable key; restore it")]
    Key { name: String, source: KeyError },
    #[error(
        "ca.crt (fp {fingerprint}) has no matching key in {secrets}: restore secret ca.key, or run nstance-admin \
         cluster rotate-ca --lost-key"
    )]
    KeyLost { fingerprint: String, secrets: String },
    #[error(
        "the bucket holds neither ca.crt nor ca.key, but this server's cache remembers a CA: the store was lost; \
         restore it (nstance-admin cluster restore), or delete the cache directory to begin anew"
    )]
    StoreLost,
    #[error(
        "ca.crt holds {found:?} and shares no certificate with {ours:?}, which is in force: nobody who has a certificate \
         trusts it. If it was replaced by accident, restore the bundle; if this was meant, restart the server"
    )]
    ForeignCa { found: Bundle, ours: Bundle },
    #[error("issue the server's certificate")]
    Issue(#[source] IssueError),
    #[error("use the server's certificate")]
    Tls(#[source] TlsError),
}

impl From<VaultError> for AuthorityError {
    fn from(error: VaultError) -> Self {
        match error {
            VaultError::Store { what, source } => Self::Store { what, source },
            VaultError::Key { name, source } => Self::Key { name, source },
        }
    }
}

/// What a step of making the CA needs of its caller: the cluster lease.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Both are there and match.
    Ready,
    /// Something must be created, and that needs the cluster lease.
    NeedsLease,
}

/// Where CA and nonce key live.
pub struct Vault<'a> {
    pub store: &'a dyn ObjectStore,
    pub secrets: &'a dyn Secrets,
    pub cache: &'a Cache,
    pub records: &'a Records,
    pub clock: &'a dyn Clock,
    pub entropy: &'a dyn Entropy,
    pub cluster: &'a ClusterId,
    pub profile: &'a CaProfile,
}

/// The keys as read from the store, and only as read from it.
pub struct Keys {
    pub ca: Ca,
    nonce: KeyPair,
    /// By which nonces are known, too.
    older_nonces: Vec<KeyPair>,
}

impl Keys {
    /// For those who have them from elsewhere than a vault; a test for instance.
    pub fn new(ca: Ca, nonce: KeyPair) -> Self {
        Self { ca, nonce, older_nonces: Vec::new() }
    }
}

impl Vault<'_> {
    async fn bundle(&self) -> Result<Option<(Vec<u8>, Bundle)>, AuthorityError> {
        match self.store.get(&ca_crt_key()).await {
            Ok(object) => {
                let bundle = Bundle::parse(&object.body).map_err(AuthorityError::Ca)?;
                // Only for a day on which the bucket is empty and this cache is not.
                let _ = self.cache.put_object(&ca_crt_key(), &object.etag, &object.body, Default::default());
                Ok(Some((object.body, bundle)))
            }
            Err(error) if error.is_not_found() => Ok(None),
            Err(source) => Err(AuthorityError::Store { what: ca_crt_key(), source }),
        }
    }

    async fn key(&self, name: &str) -> Result<Option<KeyPair>, AuthorityError> {
        Ok(read_key(self.secrets, name).await?)
    }

    async fn ca_key(&self, bundle: Option<&Bundle>) -> Result<Option<KeyPair>, AuthorityError> {
        match bundle {
            Some(bundle) => Ok(read_ca_key(self.secrets, &bundle.issuer().fingerprint).await?),
            None => self.key(CA_KEY_SECRET).await,
        }
    }

    fn remembered(&self) -> Option<Vec<u8>> {
        self.cache.get_object(&ca_crt_key()).ok().flatten().map(|(_, body)| body)
    }

    /// Whether the keys are there, or somebody must make them.
    pub async fn look(&self) -> Result<Step, AuthorityError> {
        let bundle = self.bundle().await?;
        let bundle = bundle.as_ref().map(|(_, bundle)| bundle);
        let key = self.ca_key(bundle).await?;
        match ca_step(bundle, key.as_ref()) {
            CaStep::GoOn if read_nonce_key(self.secrets).await?.is_some() => Ok(Step::Ready),
            CaStep::MakeKey if self.remembered().is_some() => Err(AuthorityError::StoreLost),
            CaStep::GoOn | CaStep::MakeKey | CaStep::MakeCertificate => Ok(Step::NeedsLease),
            CaStep::KeyLost { fingerprint } => {
                Err(AuthorityError::KeyLost { fingerprint, secrets: self.secrets.describe() })
            }
        }
    }

    /// Makes what is missing, one step after the other, each by create-if-absent. Called under the cluster lease; were
    /// it not, two callers would still agree on one CA.
    pub async fn make(&self) -> Result<(), AuthorityError> {
        loop {
            let bundle = self.bundle().await?;
            let bundle = bundle.as_ref().map(|(_, bundle)| bundle);
            let key = self.ca_key(bundle).await?;
            match ca_step(bundle, key.as_ref()) {
                CaStep::GoOn => break,
                CaStep::MakeKey => self.create_key(CA_KEY_SECRET).await?,
                CaStep::MakeCertificate => {
                    let Some(key) = key else { continue };
                    // The same certificate as before, if we remember it; a new one of the same key otherwise.
                    let remembered = self.remembered().filter(|body| {
                        Bundle::parse(body).is_ok_and(|it| it.issuer().fingerprint == key.fingerprint())
                    });
                    let body = match remembered {
                        Some(body) => body,
                        None => self.new_certificate(&key).await?,
                    };
                    match self.store.put(&ca_crt_key(), body, Condition::Create).await {
                        Ok(_) => tracing::info!(fingerprint = key.fingerprint(), "CA created"),
                        Err(error) if retry(&error) => {}
                        Err(source) => return Err(AuthorityError::Store { what: ca_crt_key(), source }),
                    }
                }
                CaStep::KeyLost { fingerprint } => {
                    return Err(AuthorityError::KeyLost { fingerprint, secrets: self.secrets.describe() });
                }
            }
        }
        if read_nonce_key(self.secrets).await?.is_none() {
            self.create_key(NONCE_KEY_SECRET).await?;
        }
        Ok(())
    }

    async fn new_certificate(&self, key: &KeyPair) -> Result<Vec<u8>, AuthorityError> {
        let now = self.clock.now();
        let made = new_ca_certificate(key, self.profile, self.records, now, self.entropy).await?;
        Ok(made.into_bytes())
    }

    async fn create_key(&self, name: &str) -> Result<(), AuthorityError> {
        match store_key(self.secrets, name, &KeyPair::generate(self.entropy)).await {
            Err(VaultError::Store { source, .. }) if retry(&source) => Ok(()),
            created => Ok(created?),
        }
    }

    /// Reads both and uses only what was read.
    pub async fn load(&self) -> Result<Keys, AuthorityError> {
        let Some((body, bundle)) = self.bundle().await? else {
            return Err(self.missing(&ca_crt_key()));
        };
        let fingerprint = bundle.issuer().fingerprint.clone();
        let key = self
            .ca_key(Some(&bundle))
            .await?
            .ok_or_else(|| AuthorityError::KeyLost { fingerprint, secrets: self.secrets.describe() })?;
        let ca = Ca::load(&body, [key]).map_err(AuthorityError::Ca)?;
        let mut nonces = read_keys(self.secrets, NONCE_KEY_SECRET).await?.into_iter();
        let nonce = nonces.next().ok_or_else(|| self.missing(NONCE_KEY_SECRET))?;
        Ok(Keys { ca, nonce, older_nonces: nonces.collect() })
    }

    fn missing(&self, what: &str) -> AuthorityError {
        let source = StoreError::new("get", what, StoreFault::NotFound, "missing");
        AuthorityError::Store { what: what.to_owned(), source }
    }
}

/// A CA certificate of the key, logged before anybody can see it.
async fn new_ca_certificate(
    key: &KeyPair,
    profile: &CaProfile,
    records: &Records,
    now: Timestamp,
    entropy: &dyn Entropy,
) -> Result<String, AuthorityError> {
    let issued = make_ca_certificate(key, profile, now, entropy);
    let record = CertlogRecord {
        cluster: profile.cluster.clone(),
        shard: None,
        tenant: None,
        subject_id: issued.issuer_fingerprint.clone(),
        issued_at: now,
        certificates: vec![logged("ca", &issued)],
    };
    let records = records.within(Duration::from_secs(5));
    records.write_certlog(Fence::Epoch(Epoch(0)), &record).await.map_err(AuthorityError::Log)?;
    Ok(issued.chain_pem)
}

/// Somebody was faster, or nobody knows: either way the next look tells.
fn retry(error: &StoreError) -> bool {
    matches!(error.fault, StoreFault::Precondition | StoreFault::Ambiguous)
}

/// Issues certificates and nonces, and is what listeners show.
pub struct Authority {
    /// Replaced as a whole: nobody signs with one CA and hands out the bundle of another.
    ca: RwLock<Arc<Ca>>,
    nonce: KeyPair,
    nonce_keys: NonceKeys,
    entropy: Arc<dyn Entropy>,
    profile: ServerProfile,
    own_key: KeyPair,
    own: Mutex<Own>,
    /// Counts the bundles that were in force.
    bundles: watch::Sender<u64>,
    pub identity: Arc<ServerIdentity>,
    pub trust: Arc<ClientTrust>,
}

/// The server's own certificate, and when the next one is due.
struct Own {
    issued: Issued,
    renew_at: Timestamp,
}

impl Own {
    fn new(issued: Issued, entropy: &dyn Entropy) -> Self {
        Self { renew_at: renew_at(None, issued.not_before, issued.not_after, entropy), issued }
    }
}

impl Authority {
    /// Issues the server's own certificate. It is to be logged before anybody sees it.
    pub fn new(
        keys: Keys,
        profile: ServerProfile,
        now: Timestamp,
        entropy: Arc<dyn Entropy>,
    ) -> Result<Self, AuthorityError> {
        let own_key = KeyPair::generate(entropy.as_ref());
        let Keys { ca, nonce, older_nonces } = keys;
        let own = ca
            .issue_server(&profile, &own_key.public_key(), now, SERVER_TTL, entropy.as_ref())
            .map_err(AuthorityError::Issue)?;
        let identity = ServerIdentity::new(own.chain_pem.as_bytes(), &own_key).map_err(AuthorityError::Tls)?;
        let trust = ClientTrust::new(ca.bundle()).map_err(AuthorityError::Tls)?;
        Ok(Self {
            nonce_keys: NonceKeys::new(std::iter::once(&nonce).chain(&older_nonces).map(KeyPair::public_key)),
            ca: RwLock::new(Arc::new(ca)),
            nonce,
            own: Mutex::new(Own::new(own, entropy.as_ref())),
            bundles: watch::Sender::new(0),
            entropy,
            profile,
            own_key,
            identity: Arc::new(identity),
            trust: Arc::new(trust),
        })
    }

    /// The CA in force. Whoever needs several things of it takes them from one.
    pub fn ca(&self) -> Arc<Ca> {
        self.ca.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn own_certificate(&self) -> Issued {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).issued.clone()
    }

    /// When the server's own certificate is due for renewal.
    pub fn renew_at(&self) -> Timestamp {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).renew_at
    }

    /// Issues the next certificate of this server.
    pub fn reissue(&self, now: Timestamp) -> Result<Issued, AuthorityError> {
        self.issue_own(&self.ca(), now)
    }

    fn issue_own(&self, ca: &Ca, now: Timestamp) -> Result<Issued, AuthorityError> {
        ca.issue_server(&self.profile, &self.own_key.public_key(), now, SERVER_TTL, self.entropy.as_ref())
            .map_err(AuthorityError::Issue)
    }

    /// What this server must show under another CA: a certificate by it, unless the one it has still does. It is to be
    /// logged before it is adopted.
    pub fn own_under(&self, ca: &Ca, now: Timestamp) -> Result<Option<Issued>, AuthorityError> {
        if self.own_certificate().issuer_fingerprint == ca.fingerprint() {
            return Ok(None);
        }
        self.issue_own(ca, now).map(Some)
    }

    /// Goes by another CA from now on. Connections that stand are not touched.
    pub fn adopt(&self, ca: Ca, own: Option<Issued>) -> Result<(), AuthorityError> {
        // Trust first: whoever meets the new certificate may show one by the same CA.
        self.trust.swap(ca.bundle()).map_err(AuthorityError::Tls)?;
        *self.ca.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(ca);
        if let Some(issued) = own {
            self.show(&mut self.own.lock().unwrap_or_else(PoisonError::into_inner), issued)?;
        }
        self.bundles.send_modify(|n| *n += 1);
        Ok(())
    }

    /// Tells whenever another bundle came into force.
    pub fn bundles(&self) -> watch::Receiver<u64> {
        self.bundles.subscribe()
    }

    /// Shows a renewed certificate from now on; connections that stand are not touched. Answers whether it does: one by
    /// a CA that issues no more, while this was on its way, must not take the place of what is shown by the next.
    pub fn show_renewed(&self, issued: Issued) -> Result<bool, AuthorityError> {
        // Under the lock: who adopts a CA changes it first, and takes the lock to show what is issued by it.
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if issued.issuer_fingerprint != self.fingerprint() {
            return Ok(false);
        }
        self.show(&mut own, issued).map(|()| true)
    }

    fn show(&self, own: &mut Own, issued: Issued) -> Result<(), AuthorityError> {
        self.identity.swap(issued.chain_pem.as_bytes(), &self.own_key).map_err(AuthorityError::Tls)?;
        *own = Own::new(issued, self.entropy.as_ref());
        Ok(())
    }

    pub fn bundle_pem(&self) -> String {
        self.ca().bundle_pem().to_owned()
    }

    pub fn fingerprint(&self) -> String {
        self.ca().fingerprint().to_owned()
    }

    /// Which of the CAs that are trusted signed a certificate.
    pub fn signer(&self, leaf: &[u8]) -> Option<String> {
        self.ca().bundle().signer(leaf).map(|ca| ca.fingerprint.clone())
    }

    pub fn nonce_keys(&self) -> &NonceKeys {
        &self.nonce_keys
    }

    /// The nonce of an instance: the same bytes from the same record, so that a repeated create is the same request.
    pub fn agent_nonce(&self, instance: &Instance) -> String {
        sign_agent_nonce(
            &self.nonce,
            &AgentNonce {
                instance: instance.id,
                jti: instance.nonce.jti.clone(),
                issued_at: instance.created_at,
                expires_at: instance.nonce.expires_at,
                cluster: instance.cluster.clone(),
                tenant: instance.group.tenant.clone(),
                shard: instance.shard.clone(),
                group: instance.group.group.clone(),
                on_demand: instance.ownership == Ownership::OnDemand,
                config_hash: instance.runtime_hash.clone(),
            },
        )
    }

    pub fn issue_agent(
        &self,
        instance: &InstanceId,
        tenant: &Tenant,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
    ) -> Result<Issued, IssueError> {
        self.ca().issue_agent(instance, tenant, key, now, ttl, self.entropy.as_ref())
    }

    pub fn issue_operator(
        &self,
        operator: &OperatorId,
        tenant: &Tenant,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
    ) -> Result<Issued, IssueError> {
        self.ca().issue_operator(operator, tenant, key, now, ttl, self.entropy.as_ref())
    }

    /// A certificate for a file of an instance. It has no role, so it opens none of our ports.
    pub fn issue_file(
        &self,
        profile: &FileProfile,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
    ) -> Result<Issued, IssueError> {
        self.ca().issue_file(profile, key, now, ttl, self.entropy.as_ref())
    }
}
