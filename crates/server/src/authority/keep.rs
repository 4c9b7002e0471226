//! Keeps what a server shows and whom it trusts up to date, for as long as it runs: its own certificate is renewed in
//! place, and the stored CA bundle is followed. Connections that stand are touched by neither.
//!
//! Every server looks at `ca.crt` within ten minutes, whether it leads or not, before it begins a term, and at once on
//! RefreshConfig. A leader puts one back that is gone: whoever found neither it nor a key would make another CA, and
//! nobody in the cluster would trust that.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::Epoch,
    ports::{
        objects::{Condition, ETag},
        secrets::Secrets,
    },
    time::Timestamp,
};
use nstance_identity::{
    ca::{Bundle, Ca},
    issue::Issued,
};
use nstance_rt::{chain::Chain, entropy::jitter, tasks::Tasks};
use nstance_store::{
    cache::Cache,
    fence::Fence,
    records::{ca_crt_key, certlog::CertlogRecord},
};

use super::{AuthorityError, read_ca_key};
use crate::{
    events::{Reason, Tell},
    service::{files, register::logged},
    term::{Shared, Term},
    vitals::Role,
};

/// Between two looks at `ca.crt`, of which up to `SPREAD` is chance: servers that began together should not ask
/// together.
const LOOK: Duration = Duration::from_secs(600);
const SPREAD: Duration = Duration::from_secs(30);

/// Never sooner than this: a CA about to end would otherwise make a busy loop.
const LEAST: Duration = Duration::from_secs(60);

/// A rotation takes longer than this from one CA to the next, unless it is forced: a CA that shares nothing with the one
/// we saw so lately was made by somebody who did not find ours.
const OVERLAP: Duration = Duration::from_secs(900);

/// A term does not wait longer than this for a look.
const TAKEOVER: Duration = Duration::from_secs(5);

/// Where another CA is learned from.
pub struct CaSource {
    secrets: Arc<dyn Secrets>,
    cache: Arc<Cache>,
    /// The version of `ca.crt` that is in force.
    seen: Mutex<Option<ETag>>,
    /// When it was last seen what lies there.
    looked_at: Mutex<Timestamp>,
    /// Looks take turns: an older one must not undo a newer.
    turn: tokio::sync::Mutex<()>,
}

impl CaSource {
    /// For a server that has just read them.
    pub fn new(secrets: Arc<dyn Secrets>, cache: Arc<Cache>, now: Timestamp) -> Self {
        let (seen, looked_at) = (Mutex::default(), Mutex::new(now));
        Self { secrets, cache, seen, looked_at, turn: tokio::sync::Mutex::default() }
    }

    /// By the wall clock, which goes on while a machine is suspended.
    fn looked_lately(&self, now: Timestamp) -> bool {
        now.since(*self.looked_at.lock().unwrap_or_else(PoisonError::into_inner)) < OVERLAP
    }

    fn looked(&self, now: Timestamp) {
        *self.looked_at.lock().unwrap_or_else(PoisonError::into_inner) = now;
    }

    fn seen(&self) -> Option<ETag> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Starts the keeping.
pub fn keep(tasks: &Tasks, shared: Arc<Shared>) {
    tasks.spawn_droppable("own certificate", async move {
        loop {
            show_expiry(&shared);
            let look = LOOK - SPREAD + jitter(shared.entropy.as_ref(), SPREAD);
            // Slept in short stretches, for a machine that was suspended does not notice how late it is.
            let due = shared.authority.renew_at().since(shared.clock.now()).max(LEAST);
            tokio::time::sleep(look.min(due)).await;
            look_and_renew(&shared).await;
        }
    });
}

/// Both, each for itself. What fails is tried again at the next look, and seen on the health port meanwhile.
async fn look_and_renew(shared: &Shared) {
    match follow(shared).await {
        Ok(_) => shared.vitals.clear("ca"),
        // A store that cannot be read is told of elsewhere.
        Err(error @ (AuthorityError::Store { .. } | AuthorityError::Log(_))) => {
            tracing::warn!(error = %Chain(&error), "ca.crt not followed yet, the CA in force stays");
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "ca.crt cannot be followed, the CA in force stays");
            shared.vitals.problem("ca", format!("{}", Chain(&error)));
        }
    }
    if let Err(error) = renew(shared).await {
        tracing::warn!(error = %Chain(&error), "own certificate not renewed yet");
    }
}

fn show_expiry(shared: &Shared) {
    let not_after = shared.authority.own_certificate().not_after;
    #[expect(clippy::cast_precision_loss, reason = "seconds until the year 10889 fit")]
    shared.metrics.certificate_expiry.set(not_after.as_millis() as f64 / 1000.0);
}

/// For RefreshConfig: what a person has changed is in force when the answer comes.
pub async fn look_now(term: &Arc<Term>) {
    look_and_renew(&term.shared).await;
    rehash(term);
}

/// Before a term begins: nobody should lead with a CA that was retired while he slept.
pub async fn look_before_term(shared: &Shared) {
    if tokio::time::timeout(TAKEOVER, look_and_renew(shared)).await.is_err() {
        tracing::warn!("ca.crt not read in time, the CA in force stays");
    }
}

/// Lets every group know of another bundle: agents get their files again, and with them the bundle.
pub async fn tell_term(term: Arc<Term>) {
    let mut bundles = term.shared.authority.bundles();
    loop {
        rehash(&term);
        tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return,
            changed = bundles.changed() => if changed.is_err() { return },
        }
    }
}

fn rehash(term: &Arc<Term>) {
    for group in term.world.rehash(&term.shared.authority.bundle_pem()) {
        term.wake(&group);
    }
    // On-demand instances have no group to be woken with.
    files::refreshed(term);
}

/// Renews the server's own certificate if that is due.
async fn renew(shared: &Shared) -> Result<(), AuthorityError> {
    let now = shared.clock.now();
    if now < shared.authority.renew_at() {
        return Ok(());
    }
    let issued = shared.authority.reissue(now)?;
    log_own(shared, &issued).await?;
    let (serial, issuer) = (issued.serial.clone(), issued.issuer_fingerprint.clone());
    if shared.authority.show_renewed(issued)? {
        show_expiry(shared);
        tracing::info!(serial, issuer, "own certificate renewed");
    } else {
        tracing::info!(serial, issuer, "renewed certificate not shown, another CA issues since");
    }
    Ok(())
}

/// Goes by the stored bundle. Answers whether that was another one.
async fn follow(shared: &Shared) -> Result<bool, AuthorityError> {
    let source = &shared.ca_source;
    let _turn = source.turn.lock().await;
    let key = ca_crt_key();
    let read = match source.seen() {
        Some(seen) => shared.store.get_if_changed(&key, &seen).await,
        None => shared.store.get(&key).await.map(Some),
    };
    let object = match read {
        Ok(Some(object)) => object,
        Ok(None) => {
            source.looked(shared.clock.now());
            return Ok(false);
        }
        // A bucket that lost it says nothing of whom to trust.
        Err(error) if error.is_not_found() && may_put_back(shared) => return put_back(shared, &key).await,
        Err(source) => return Err(AuthorityError::Store { what: key, source }),
    };
    let differs = object.body != shared.authority.bundle_pem().as_bytes();
    if differs {
        adopt(shared, &object.body).await?;
        // Only for a day on which the bucket is empty and this cache is not.
        let _ = source.cache.put_object(&key, &object.etag, &object.body, Epoch(0));
    }
    *source.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(object.etag);
    source.looked(shared.clock.now());
    Ok(differs)
}

/// Who leads knows best; others may have looked longer ago.
fn may_put_back(shared: &Shared) -> bool {
    matches!(shared.vitals.role(), Role::Acquiring | Role::Leading)
}

async fn put_back(shared: &Shared, key: &str) -> Result<bool, AuthorityError> {
    let body = shared.authority.bundle_pem().as_bytes().to_vec();
    match shared.store.put(key, body, Condition::Create).await {
        Ok(etag) => {
            *shared.ca_source.seen.lock().unwrap_or_else(PoisonError::into_inner) = Some(etag);
            shared.ca_source.looked(shared.clock.now());
            shared.tell(Tell::shard(Reason::RecordRepaired, format!("{key} was gone and is put back")));
            Ok(false)
        }
        // Somebody was first: the next look says what with.
        Err(source) => Err(AuthorityError::Store { what: key.to_owned(), source }),
    }
}

async fn adopt(shared: &Shared, body: &[u8]) -> Result<(), AuthorityError> {
    let bundle = Bundle::parse(body).map_err(AuthorityError::Ca)?;
    let ours = Bundle::parse(shared.authority.bundle_pem().as_bytes()).map_err(AuthorityError::Ca)?;
    let now = shared.clock.now();
    if !ours.may_become(&bundle) && shared.ca_source.looked_lately(now) {
        // For as long as it lies there: only who could not look for long does not know how it came to be.
        shared.ca_source.looked(now);
        return Err(AuthorityError::ForeignCa { found: bundle, ours });
    }
    let secrets = shared.ca_source.secrets.as_ref();
    let fingerprint = bundle.issuer().fingerprint.clone();
    let key = read_ca_key(secrets, &fingerprint)
        .await?
        .ok_or_else(|| AuthorityError::KeyLost { fingerprint, secrets: secrets.describe() })?;
    let ca = Ca::load(body, [key]).map_err(AuthorityError::Ca)?;
    let own = shared.authority.own_under(&ca, shared.clock.now())?;
    if let Some(own) = &own {
        log_own(shared, own).await?;
    }
    shared.authority.adopt(ca, own)?;
    show_expiry(shared);
    tracing::info!(bundle = ?bundle, "CA bundle in force");
    Ok(())
}

/// No certificate is shown before it is logged.
async fn log_own(shared: &Shared, issued: &Issued) -> Result<(), AuthorityError> {
    let record = CertlogRecord {
        cluster: shared.cluster.clone(),
        shard: Some(shared.shard.clone()),
        tenant: None,
        subject_id: shared.id.to_string(),
        issued_at: shared.clock.now(),
        certificates: vec![logged("server", issued)],
    };
    let records = shared.records.within(Duration::from_secs(30));
    records.write_certlog(Fence::Epoch(Epoch(0)), &record).await.map(|_| ()).map_err(AuthorityError::Log)
}
