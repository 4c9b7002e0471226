//! Keeps the certificate valid while the operator runs: renews it in time, rejoins with the key if it is refused, and waits
//! for a new nonce if that is refused too. It never ends the process.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use nstance_client::{Identity, Rejoining, RenewError, RenewedIdentity, ShardError, Shards, Targets, renewal};
use nstance_core::time::Timestamp;
use nstance_identity::ca::Bundle;
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::SystemEntropy};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Notify, watch};
use tonic::Code;

use super::{
    events::{Reason, Severity},
    identity::{self, Keeper, Saver, is_refusal, renewed, shuffled, version},
    secrets,
    store::Store,
};
use crate::{
    api::{
        conditions::{Report, Status},
        names::annotation,
    },
    control::context::Context,
    metrics::Metrics,
    ports::{KubeError, Target as Part},
    shards::actor::ShardSet,
};

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_secs(30);
const MAX_WAIT: Duration = Duration::from_secs(600);
/// Wall clocks may be set, so nothing sleeps for longer than this without a look.
const LOOK: Duration = Duration::from_secs(30);
/// Streams of the old certificate may still be refused for a moment after a change.
const SETTLE: Duration = Duration::from_secs(10);

/// What happens to the certificate is told as an event of the cluster.
pub type Tell = Box<dyn Fn(Severity, Reason, &str) + Send + Sync>;

pub struct Renewal {
    pub keeper: Arc<Keeper>,
    pub identity: Arc<Identity>,
    pub shards: Arc<ShardSet>,
    /// Where shards register operators.
    pub registration: watch::Receiver<Targets>,
    pub ctx: Arc<Context>,
    pub metrics: Arc<Metrics>,
    pub tell: Tell,
    pub nonce: Arc<Store<Secret>>,
    pub ca: Arc<Store<ConfigMap>>,
}

/// Why a rejoin gave no certificate.
#[derive(Debug, thiserror::Error)]
enum NoCertificate {
    #[error("a shard refused")]
    Refused(#[source] ShardError),
    #[error("no shard answered")]
    NoAnswer(#[source] ShardError),
    #[error("the certificate was not stored")]
    NotStored(#[from] KubeError),
    #[error("the certificate cannot be used")]
    Unusable(#[from] nstance_client::IdentityError),
}

impl Renewal {
    /// Never ends by itself.
    pub async fn run(self) {
        let entropy = SystemEntropy::new();
        let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
        let refused = self.shards.refused();
        let ca_changed = Arc::new(Notify::new());
        let notify = ca_changed.clone();
        self.ca.on_change(move |_| notify.notify_one());
        let mut renew_at = self.identity.renew_at(&entropy);
        let mut not_before = self.now();
        self.report_valid();
        loop {
            let left = self.identity.valid_until().since(self.now());
            self.metrics.cert_expiry_seconds.set(i64::try_from(left.as_secs()).unwrap_or(i64::MAX));
            let due = renew_at.max(not_before).since(self.now()).min(LOOK);
            let is_refused = tokio::select! {
                biased;
                () = ca_changed.notified() => {
                    self.take_ca_bundle();
                    continue;
                }
                () = refused.notified() => true,
                () = tokio::time::sleep(due) => false,
            };
            let now = self.now();
            if now < not_before || !is_refused && now < renew_at {
                continue;
            }
            let outcome = if is_refused || self.identity.is_expired() {
                self.recover().await;
                Ok(())
            } else {
                self.renew().await
            };
            match outcome {
                Ok(()) => {
                    renew_at = self.identity.renew_at(&entropy);
                    let wait = if is_refused { backoff.next(&entropy).max(SETTLE) } else { SETTLE };
                    not_before = self.now().plus(wait);
                    if !is_refused {
                        backoff.reset();
                    }
                }
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "the certificate was not renewed");
                    not_before = self.now().plus(backoff.next(&entropy).max(FIRST_WAIT / 2));
                }
            }
        }
    }

    fn now(&self) -> Timestamp {
        self.keeper.clock.now()
    }

    fn report_valid(&self) {
        let report = if self.identity.is_expired() {
            Report { status: Status::False, reason: "Expired", message: "the certificate expired".to_owned() }
        } else {
            let until = k8s_openapi::jiff::Timestamp::from_millisecond(self.identity.valid_until().as_millis());
            let message = format!("valid until {:.0}", until.unwrap_or_default());
            Report { status: Status::True, reason: "Valid", message }
        };
        self.ctx.report(&self.ctx.certificate, report);
    }

    fn report_invalid(&self, reason: &'static str, message: String) {
        let report = Report { status: Status::False, reason, message };
        self.ctx.report(&self.ctx.certificate, report);
    }

    /// The CA ConfigMap was changed, by us or by a person.
    fn take_ca_bundle(&self) {
        let text = self.ca.all().first().and_then(|it| it.data.as_ref()?.get(identity::CA).cloned());
        let Some(text) = text.filter(|it| it.trim() != self.identity.ca_bundle().pem().trim()) else { return };
        let taken = Bundle::parse(text.as_bytes())
            .map_err(|error| Chain(&error).to_string())
            .and_then(|bundle| self.identity.replace_ca_bundle(bundle).map_err(|error| Chain(&error).to_string()));
        match taken {
            Ok(()) => {
                tracing::info!("the CA bundle was changed");
                self.shards.use_new_certificate();
            }
            Err(error) => tracing::warn!(error, "the changed CA ConfigMap is not used"),
        }
    }

    async fn renew(&self) -> Result<(), RenewError> {
        let shards = Shards::sharing(self.shards.ready_targets(), self.identity.clone(), CALL_TIMEOUT);
        let shards = shards.with_network(&self.keeper.network);
        if shards.is_empty() {
            let error = ShardError::new("", Code::Unavailable, "no shard is reachable");
            return Err(RenewError::Shard(error));
        }
        let saver = Saver { keeper: self.keeper.clone(), identity: self.identity.clone() };
        match renewal::renew(&shards, &saver).await {
            Ok(()) => {
                self.shards.use_new_certificate();
                (self.tell)(Severity::Normal, Reason::CertificateRenewed, "the operator's certificate was renewed");
                self.report_valid();
                Ok(())
            }
            Err(RenewError::Shard(error)) if is_refusal(&error) => {
                tracing::warn!(%error, "the renewal was refused");
                self.recover().await;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Gets a certificate in place of one that is not accepted any more. Ends only with one.
    async fn recover(&self) {
        let (mut backoff, entropy) = (Backoff::new(Duration::from_secs(1), MAX_WAIT), SystemEntropy::new());
        let why = if self.identity.is_expired() { "the certificate expired" } else { "the certificate is refused" };
        self.report_invalid("Rejoining", format!("{why}; a new one is asked for with the operator's key"));
        (self.tell)(Severity::Warning, Reason::CertificateExpired, why);
        loop {
            match self.rejoin().await {
                Ok(()) => break,
                Err(NoCertificate::Refused(error)) => {
                    let secret = &self.keeper.names.nonce;
                    let message = format!(
                        "{why}, and {}: {}. Make a nonce with `nstance-admin cluster nonce` and put it into {secret}",
                        error.shard, error.message
                    );
                    tracing::warn!(message, "waiting for a new nonce");
                    (self.tell)(Severity::Warning, Reason::CertificateExpired, &message);
                    self.report_invalid("NonceNeeded", message);
                    self.wait_for_nonce().await;
                    break;
                }
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "not rejoined yet");
                    tokio::time::sleep(backoff.next(&entropy)).await;
                }
            }
        }
        self.shards.use_new_certificate();
        (self.tell)(Severity::Normal, Reason::CertificateRenewed, "the operator has a new certificate");
        self.report_valid();
    }

    /// Proves the key to any shard. The number of the proof is stored before it is sent.
    async fn rejoin(&self) -> Result<(), NoCertificate> {
        let counter = self.next_counter().await?;
        let (bundle, client_id) = (self.identity.ca_bundle(), self.identity.name());
        let rejoining = Rejoining {
            ca_bundle: &bundle,
            key: self.identity.key(),
            cluster: &self.keeper.cluster,
            tenant: &self.keeper.tenant,
            client_id: &client_id,
            counter,
            client_version: version(),
            clock: self.keeper.clock.clone(),
        };
        let targets = self.registration.borrow().clone();
        let mut last = ShardError::new("", Code::Unavailable, "no shard is configured");
        for target in shuffled(&targets, &SystemEntropy::new()) {
            match rejoining.rejoin(self.keeper.network.as_ref(), &target, CALL_TIMEOUT).await {
                Ok(answer) => {
                    let new = renewed(&bundle, answer.ca_bundle_pem, answer.client_certificate_pem);
                    self.take(&new).await?;
                    self.store_counter(format!("{counter}")).await?;
                    return Ok(());
                }
                Err(error) if is_refusal(&last) && !is_refusal(&error) => {}
                Err(error) => last = error,
            }
        }
        Err(if is_refusal(&last) { NoCertificate::Refused(last) } else { NoCertificate::NoAnswer(last) })
    }

    async fn take(&self, new: &RenewedIdentity) -> Result<(), NoCertificate> {
        self.keeper.store(self.identity.key(), new).await?;
        Ok(self.identity.replace(new)?)
    }

    async fn next_counter(&self) -> Result<u64, KubeError> {
        let secret = self.keeper.kube.get(&self.keeper.names.key).await?;
        let stored = secret.as_ref().and_then(|it| secrets::annotation(it, annotation::REJOIN_COUNTER)).unwrap_or("0");
        let counter = next_counter(stored);
        self.store_counter(format!("sent:{counter}")).await?;
        Ok(counter)
    }

    async fn store_counter(&self, text: String) -> Result<(), KubeError> {
        let patch = json!({ "metadata": { "annotations": { annotation::REJOIN_COUNTER: text } } });
        self.keeper.kube.merge_patch(&self.keeper.names.key, &patch, Part::Main).await.map(drop)
    }

    /// Registers with the nonce in the nonce Secret. One that was refused is not presented again.
    async fn wait_for_nonce(&self) {
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        self.nonce.on_change(move |_| notify.notify_one());
        let mut refused: Option<Vec<u8>> = None;
        loop {
            match self.keeper.nonce().await {
                Ok(Some(nonce)) if refused.as_deref() != Some(Sha256::digest(nonce.as_bytes()).as_slice()) => {
                    let (bundle, targets) = (self.identity.ca_bundle(), self.registration.borrow().clone());
                    let key = self.identity.key();
                    match self.keeper.register_once(&bundle, key, &nonce, &targets).await {
                        Ok(new) => match self.take(&new).await {
                            Ok(()) => {
                                // The new operator has never rejoined.
                                if let Err(error) = self.store_counter("0".to_owned()).await {
                                    tracing::warn!(error = %Chain(&error), "the rejoin counter was not stored");
                                }
                                return;
                            }
                            Err(error) => tracing::warn!(error = %Chain(&error), "registered, but not usable yet"),
                        },
                        Err(error) => {
                            tracing::warn!(%error, "not registered with the nonce");
                            if is_refusal(&error) {
                                refused = Some(Sha256::digest(nonce.as_bytes()).to_vec());
                            }
                        }
                    }
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(error = %Chain(&error), "the nonce Secret was not read"),
            }
            // A watch tells of changes; the look after a while covers what it may miss.
            let _ = tokio::time::timeout(LOOK, changed.notified()).await;
        }
    }
}

/// The same number again if it was not answered, else the next.
fn next_counter(stored: &str) -> u64 {
    match stored.strip_prefix("sent:") {
        Some(sent) => sent.parse().unwrap_or(1),
        None => stored.parse::<u64>().map_or(1, |it| it.saturating_add(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejoin_that_was_not_answered_is_repeated_with_its_number() {
        assert_eq!(next_counter("0"), 1);
        assert_eq!(next_counter("sent:1"), 1);
        assert_eq!(next_counter("1"), 2);
        assert_eq!(next_counter("no number"), 1);
    }
}
