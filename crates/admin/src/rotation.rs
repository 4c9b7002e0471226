//! Replacing the CA without anybody noticing: `[A]`, then `[A, B]`, `[B, A]`, `[B]`.
//!
//! The order of `cluster/ca.crt` is the whole state, so each step is one conditional put of that object, made under the
//! cluster lease; whatever else a step makes is made before it, or swept up after it, and a crash in between leaves a
//! state from which the step can be asked for again. Servers follow by themselves.
//!
//! A step that would cut somebody off is refused and says whom, unless it is forced.

mod census;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_core::{
    ports::{
        clock::{Clock, Entropy},
        objects::{Condition, ETag, ObjectStore, StoreError, StoreFault},
        secrets::Secrets,
    },
    time::Timestamp,
};
use nstance_identity::{
    ca::{Bundle, CA_KEY_SECRET, CaCertificate, CaError, CaProfile, ca_key_secret},
    keys::KeyPair,
    vault::{VaultError, read_ca_key, read_key, store_key},
};
use nstance_store::{
    cas::Records,
    election::{
        Identity, LeaseKeeper, Timing,
        during::{HoldError, while_holding},
    },
    records::{ca_crt_key, lease_key},
};

use self::census::Census;
use crate::issue::{IssueError, new_ca_certificate};

/// From the start of a rotation to the earliest moment at which the new CA may issue.
const OVERLAP: Duration = Duration::from_secs(15 * 60);

/// Servers know of another bundle after this at the latest. What one issued earlier may have gone out with the old one.
const NOTICED: Duration = Duration::from_secs(10 * 60);

#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    #[error("read or write {what}")]
    Store { what: String, source: StoreError },
    #[error(transparent)]
    Secret(#[from] VaultError),
    #[error(transparent)]
    Issue(#[from] IssueError),
    #[error("read ca.crt")]
    Ca(#[source] CaError),
    #[error(
        "ca.crt (fp {fingerprint}) has no matching key in {secrets}: restore secret ca.key, or run nstance-admin \
         cluster rotate-ca --lost-key"
    )]
    KeyLost { fingerprint: String, secrets: String },
    #[error(transparent)]
    Lease(#[from] HoldError),
    #[error("there is no ca.crt in the store; start a server, which makes the first CA")]
    NoCa,
    #[error("the CA cannot {step} now: {state}; {help}")]
    WrongStage { step: &'static str, state: &'static str, help: &'static str },
    #[error("ca.crt holds {n} certificates and is in none of the states of a rotation; restore it by hand")]
    Strange { n: usize },
    #[error("ca.crt was changed by somebody else meanwhile; look at its status and repeat the step")]
    Raced,
    #[error("the key of CA {fingerprint} is there; rotate the CA the ordinary way")]
    KeyIsThere { fingerprint: String },
    #[error("refused to {step}: {}; wait, or force it and have them registered again or replaced", in_short(.reasons))]
    Refused { step: &'static str, reasons: Vec<String> },
    #[error("read whose certificates are in use")]
    Census(#[source] StoreError),
}

fn in_short(reasons: &[String]) -> String {
    const SHOWN: usize = 20;
    let mut text = reasons.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    if SHOWN < reasons.len() {
        text.push_str(&format!("; and {} more", reasons.len() - SHOWN));
    }
    text
}

/// Where a rotation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// `[A]`.
    Settled,
    /// `[A, B]`: the new one is trusted and does not issue yet.
    Started,
    /// `[B, A]`: the new one issues, the old one is still trusted.
    Active,
}

impl Stage {
    fn of(bundle: &Bundle) -> Result<Self, RotationError> {
        match bundle.certificates() {
            [_] => Ok(Self::Settled),
            [first, second] if first.not_before < second.not_before => Ok(Self::Started),
            [_, _] => Ok(Self::Active),
            more => Err(RotationError::Strange { n: more.len() }),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Settled => "no rotation is under way",
            Self::Started => "a rotation has begun and the old CA still issues",
            Self::Active => "the new CA issues already",
        }
    }
}

/// What a step has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Fingerprints, in the order of the bundle.
    pub bundle: Vec<String>,
    /// Whom it cut off, as it was forced.
    pub cut_off: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RotationStatus {
    pub stage: Stage,
    /// In the order of the bundle: fingerprint, and when it was made.
    pub cas: Vec<(String, Timestamp)>,
    /// Certificates in use by the fingerprint of their issuer.
    pub in_use: BTreeMap<String, usize>,
    /// When a started rotation may be activated at the earliest.
    pub activate_from: Timestamp,
}

/// What may be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Start,
    Activate,
    Retire,
    Abort,
    LostKey,
}

/// How many must register again or be replaced because their CA's key is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostKey {
    pub done: Done,
    pub agents: usize,
    pub operators: usize,
}

/// The steps, for whoever may read the bucket and its secrets.
pub struct Rotation {
    store: Arc<dyn ObjectStore>,
    secrets: Arc<dyn Secrets>,
    records: Records,
    profile: CaProfile,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    lease: LeaseKeeper,
}

/// `ca.crt` as it was read.
struct Stored {
    bundle: Bundle,
    etag: ETag,
    stage: Stage,
}

impl Rotation {
    /// `writer` is who is told to hold the lease: `admin/{host}`.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        secrets: Arc<dyn Secrets>,
        records: Records,
        profile: CaProfile,
        writer: &str,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
    ) -> Self {
        let identity = Identity {
            server_id: writer.to_owned(),
            process: Identity::draw_process(entropy.as_ref()),
            addr: String::new(),
            health_addr: String::new(),
            direct: false,
            exclusive: false,
            boot_id: String::new(),
            provider_id: None,
        };
        let (key, timing) = (lease_key(None), Timing::CLUSTER);
        let lease =
            LeaseKeeper::new(store.clone(), key, writer.to_owned(), identity, timing, clock.clone(), entropy.clone());
        Self { store, secrets, records, profile, clock, entropy, lease }
    }

    /// Where the rotation stands, and whose certificates are in use. Changes nothing and takes no lease.
    pub async fn status(&self) -> Result<RotationStatus, RotationError> {
        let stored = self.read().await?;
        let census = self.census().await?;
        let cas = stored.bundle.certificates().iter().map(|it| (it.fingerprint.clone(), it.made_at())).collect();
        let in_use = census.by_issuer(self.clock.now());
        let newest = stored.bundle.certificates().iter().map(CaCertificate::made_at).max().unwrap_or(Timestamp::EPOCH);
        Ok(RotationStatus { stage: stored.stage, cas, in_use, activate_from: newest.plus(OVERLAP) })
    }

    /// Why the next step of a rotation under way would be refused now: whom it would cut off. Changes nothing.
    pub async fn obstacles(&self) -> Result<Vec<String>, RotationError> {
        let stored = self.read().await?;
        match stored.stage {
            Stage::Settled => Ok(Vec::new()),
            Stage::Started => self.unready(&stored).await,
            Stage::Active => self.holders(&stored).await,
        }
    }

    /// Whether a step comes in its order, and its keys are there; whom it cuts off is another matter.
    pub async fn may(&self, step: Step) -> Result<(), RotationError> {
        let stored = self.read().await?;
        if matches!(step, Step::Retire | Step::Abort) && !self.leftovers(&stored).await?.is_empty() {
            return Ok(());
        }
        stored.must_allow(step)?;
        match step {
            Step::Start => self.key_of(stored.bundle.issuer()).await.map(drop),
            Step::Activate => self.key_of(stored.both()?[1]).await.map(drop),
            Step::Retire | Step::Abort => Ok(()),
            Step::LostKey => self.must_be_lost(stored.bundle.issuer()).await,
        }
    }

    /// Makes the next CA and has it trusted: `[A]` becomes `[A, B]`.
    pub async fn start(&self) -> Result<Done, RotationError> {
        self.under_lease(async {
            let stored = self.read().await?;
            stored.must_allow(Step::Start)?;
            let old = stored.bundle.issuer();
            self.key_of(old).await?;
            let new = self.make(old).await?;
            self.put(&stored, &[old.pem(), new], Vec::new()).await
        })
        .await
    }

    /// Lets the new CA issue: `[A, B]` becomes `[B, A]`.
    pub async fn activate(&self, force: bool) -> Result<Done, RotationError> {
        self.under_lease(async {
            let stored = self.read().await?;
            stored.must_allow(Step::Activate)?;
            let [old, new] = stored.both()?;
            self.key_of(new).await?;
            let cut_off = settle("activate the new CA", self.unready(&stored).await?, force)?;
            self.put(&stored, &[new.pem(), old.pem()], cut_off).await
        })
        .await
    }

    /// Takes the trust of the old CA away: `[B, A]` becomes `[B]`, and the key of A is no more. Asked for again, it
    /// deletes what an attempt that broke off has left.
    pub async fn retire(&self, force: bool) -> Result<Done, RotationError> {
        self.under_lease(async {
            let stored = self.read().await?;
            if let Some(done) = self.sweep(&stored).await? {
                return Ok(done);
            }
            stored.must_allow(Step::Retire)?;
            let [new, old] = stored.both()?;
            let cut_off = settle("retire the old CA", self.holders(&stored).await?, force)?;
            let done = self.put(&stored, &[new.pem()], cut_off).await?;
            self.forget(old).await?;
            Ok(done)
        })
        .await
    }

    /// Back to `[A]`, while the new CA has issued nothing. Asked for again, it deletes what is left, as retiring does.
    pub async fn abort(&self) -> Result<Done, RotationError> {
        self.under_lease(async {
            let stored = self.read().await?;
            if let Some(done) = self.sweep(&stored).await? {
                return Ok(done);
            }
            stored.must_allow(Step::Abort)?;
            let [old, new] = stored.both()?;
            let done = self.put(&stored, &[old.pem()], Vec::new()).await?;
            self.forget(new).await?;
            Ok(done)
        })
        .await
    }

    /// The key of the CA in use is gone: a new CA issues from now on beside the old trust. Nobody has its certificate
    /// yet, so all are counted who must register again or be replaced.
    pub async fn lost_key(&self) -> Result<LostKey, RotationError> {
        self.under_lease(async {
            let stored = self.read().await?;
            stored.must_allow(Step::LostKey)?;
            let old = stored.bundle.issuer();
            self.must_be_lost(old).await?;
            let census = self.census().await?;
            let new = self.make(old).await?;
            let done = self.put(&stored, &[new, old.pem()], Vec::new()).await?;
            Ok(LostKey { done, agents: census.n_agents(), operators: census.n_operators() })
        })
        .await
    }

    /// Who may not know the new CA yet.
    async fn unready(&self, stored: &Stored) -> Result<Vec<String>, RotationError> {
        let [_, new] = stored.both()?;
        let (started, now) = (new.made_at(), self.clock.now());
        let mut reasons = Vec::new();
        if now < started.plus(OVERLAP) {
            reasons.push(format!("the rotation began at {started} and servers need 15 minutes to follow"));
        }
        reasons.extend(self.census().await?.without_bundle(started.plus(NOTICED), self.clock.now()));
        Ok(reasons)
    }

    /// Who holds something by the old CA.
    async fn holders(&self, stored: &Stored) -> Result<Vec<String>, RotationError> {
        let [_, old] = stored.both()?;
        Ok(self.census().await?.issued_by(&old.fingerprint, self.clock.now()))
    }

    async fn must_be_lost(&self, ca: &CaCertificate) -> Result<(), RotationError> {
        match self.key_of(ca).await {
            Ok(_) => Err(RotationError::KeyIsThere { fingerprint: ca.fingerprint.clone() }),
            Err(RotationError::KeyLost { .. }) => Ok(()),
            // Not being able to look is no loss.
            Err(error) => Err(error),
        }
    }

    async fn under_lease<T>(&self, work: impl Future<Output = Result<T, RotationError>>) -> Result<T, RotationError> {
        while_holding(&self.lease, self.clock.as_ref(), work).await?
    }

    async fn read(&self) -> Result<Stored, RotationError> {
        let key = ca_crt_key();
        let object = match self.store.get(&key).await {
            Ok(object) => object,
            Err(error) if error.is_not_found() => return Err(RotationError::NoCa),
            Err(source) => return Err(RotationError::Store { what: key, source }),
        };
        let bundle = Bundle::parse(&object.body).map_err(RotationError::Ca)?;
        Ok(Stored { stage: Stage::of(&bundle)?, bundle, etag: object.etag })
    }

    async fn census(&self) -> Result<Census, RotationError> {
        Census::read(self.store.as_ref()).await.map_err(RotationError::Census)
    }

    async fn key_of(&self, ca: &CaCertificate) -> Result<KeyPair, RotationError> {
        let key = read_ca_key(self.secrets.as_ref(), &ca.fingerprint).await?;
        key.filter(|key| key.public_key() == ca.public_key).ok_or_else(|| RotationError::KeyLost {
            fingerprint: ca.fingerprint.clone(),
            secrets: self.secrets.describe(),
        })
    }

    /// Makes a CA that follows `old`: its key under its own name, then its certificate, logged. What a crash leaves
    /// behind is a key that nothing names.
    async fn make(&self, old: &CaCertificate) -> Result<String, RotationError> {
        let key = KeyPair::generate(self.entropy.as_ref());
        store_key(self.secrets.as_ref(), &ca_key_secret(&key.fingerprint()), &key).await?;
        // The order of their birth tells a started rotation from an active one, and certificates count in seconds.
        let now = self.clock.now().max(old.made_at().plus(Duration::from_secs(1)));
        Ok(new_ca_certificate(&key, &self.profile, &self.records, now, self.entropy.as_ref()).await?)
    }

    /// The commit of a step.
    async fn put(&self, stored: &Stored, bundle: &[String], cut_off: Vec<String>) -> Result<Done, RotationError> {
        let (key, body) = (ca_crt_key(), bundle.concat());
        let parsed = Bundle::parse(body.as_bytes()).map_err(RotationError::Ca)?;
        let condition = Condition::Match(stored.etag.clone());
        match self.store.put(&key, body.clone().into_bytes(), condition).await {
            Ok(_) => {}
            // Ours may have landed all the same; it is recognised by its content.
            Err(error) if matches!(error.fault, StoreFault::Precondition | StoreFault::Ambiguous) => {
                let there = self.store.get(&key).await;
                let there = there.map_err(|source| RotationError::Store { what: key, source })?;
                if there.body != body.as_bytes() {
                    return Err(RotationError::Raced);
                }
            }
            Err(source) => return Err(RotationError::Store { what: key, source }),
        }
        let fingerprints = parsed.certificates().iter().map(|it| it.fingerprint.clone()).collect();
        tracing::info!(bundle = ?parsed, cut_off = cut_off.len(), "CA bundle changed");
        Ok(Done { bundle: fingerprints, cut_off })
    }

    /// Deletes the key of a CA that nobody trusts any more.
    async fn forget(&self, ca: &CaCertificate) -> Result<(), RotationError> {
        for name in [ca_key_secret(&ca.fingerprint), CA_KEY_SECRET.to_owned()] {
            let key = read_key(self.secrets.as_ref(), &name).await?;
            if key.is_some_and(|key| key.public_key() == ca.public_key) {
                self.delete(name).await?;
            }
        }
        Ok(())
    }

    async fn delete(&self, name: String) -> Result<(), RotationError> {
        let deleted = self.secrets.delete(&name).await;
        deleted.map_err(|source| RotationError::Store { what: name, source })
    }

    /// Deletes what rotations that broke off after their last put have left. `None` if that is nothing.
    async fn sweep(&self, stored: &Stored) -> Result<Option<Done>, RotationError> {
        let leftovers = self.leftovers(stored).await?;
        if leftovers.is_empty() {
            return Ok(None);
        }
        for name in leftovers {
            tracing::info!(name, "key of a CA that nobody trusts is deleted");
            self.delete(name).await?;
        }
        let bundle = stored.bundle.certificates().iter().map(|it| it.fingerprint.clone()).collect();
        Ok(Some(Done { bundle, cut_off: Vec::new() }))
    }

    /// Secrets with keys of CAs that are not in the bundle, while no rotation is under way. Secrets cannot be listed:
    /// the names are those of the first CA and of all that the log knows.
    async fn leftovers(&self, stored: &Stored) -> Result<Vec<String>, RotationError> {
        if stored.stage != Stage::Settled {
            return Ok(Vec::new());
        }
        // Where the key in use is missing, what is there may be somebody's attempt to restore it.
        match self.key_of(stored.bundle.issuer()).await {
            Ok(_) => {}
            Err(RotationError::KeyLost { .. }) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        let is_trusted =
            |key: &KeyPair| stored.bundle.certificates().iter().any(|ca| ca.public_key == key.public_key());
        let mut found = Vec::new();
        for fingerprint in self.census().await?.issuers() {
            let name = ca_key_secret(fingerprint);
            let key = read_key(self.secrets.as_ref(), &name).await?;
            if key.is_some_and(|key| key.fingerprint() == *fingerprint && !is_trusted(&key)) {
                found.push(name);
            }
        }
        if read_key(self.secrets.as_ref(), CA_KEY_SECRET).await?.is_some_and(|key| !is_trusted(&key)) {
            found.push(CA_KEY_SECRET.to_owned());
        }
        Ok(found)
    }
}

/// Whom a step cuts off, if it may.
fn settle(step: &'static str, reasons: Vec<String>, force: bool) -> Result<Vec<String>, RotationError> {
    if reasons.is_empty() || force { Ok(reasons) } else { Err(RotationError::Refused { step, reasons }) }
}

impl Stored {
    fn must_allow(&self, step: Step) -> Result<(), RotationError> {
        let (stage, step, help) = match step {
            Step::Start => (Stage::Settled, "start to rotate", "finish or abort the one under way"),
            Step::Activate => (Stage::Started, "activate the new CA", "start a rotation first, or retire the old CA"),
            Step::Retire => (Stage::Active, "retire the old CA", "start a rotation and activate the new CA first"),
            Step::Abort => (Stage::Started, "abort", "only a rotation that was not activated can be taken back"),
            Step::LostKey => (Stage::Settled, "be replaced", "finish the rotation under way, by force if need be"),
        };
        if self.stage == stage {
            return Ok(());
        }
        Err(RotationError::WrongStage { step, state: self.stage.as_str(), help })
    }

    fn both(&self) -> Result<[&CaCertificate; 2], RotationError> {
        match self.bundle.certificates() {
            [first, second] => Ok([first, second]),
            other => Err(RotationError::Strange { n: other.len() }),
        }
    }
}

#[cfg(test)]
mod tests;
