//! Operators: who they are is in the bucket, shared by all shards. Their records are remembered for five minutes; an
//! unknown id or serial causes one fresh read before anybody is refused.
//!
//! Open streams are held to the same: once a second it is asked whether those who opened them may still watch. A mark on
//! a record is seen when what is remembered has grown old, or at once after a refresh of the config.
//!
//! Once an operator was seen with its new certificate the one before it passes no longer: here at once, elsewhere as
//! soon as the record says so.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{OperatorId, Tenant},
    time::Mono,
};
use nstance_identity::peer::{LEEWAY, Peer};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::records::{Versioned, operator::OperatorRecord};

use crate::{
    grpc::{
        auth::{RETIRE_BASE, RETIRE_CAP},
        status::Refusal,
    },
    term::Term,
};

const REMEMBERED: Duration = Duration::from_secs(300);

/// How often open streams are held against who opened them.
const SWEEP: Duration = Duration::from_secs(1);

#[derive(Default)]
pub struct Operators {
    known: Mutex<BTreeMap<(Tenant, OperatorId), Remembered>>,
    /// The serial that each was seen with as its current one. The record may be slower.
    used: Mutex<BTreeMap<(Tenant, OperatorId), String>>,
}

/// A record and when it was read.
type Remembered = (Mono, Versioned<OperatorRecord>);

impl Operators {
    /// Checks an operator's certificate against its live record.
    pub async fn authorise(
        &self,
        term: &Arc<Term>,
        peer: &Peer,
        operator: OperatorId,
        tenant: &Tenant,
    ) -> Result<(), Refusal> {
        if !term.applied().config.tenants.contains(tenant) {
            let message = format!("tenant {tenant} is not configured in this shard");
            return Err(Refusal::denied("TENANT_UNKNOWN", message));
        }
        let now = term.shared.clock.monotonic();
        let key = (tenant.clone(), operator);
        if let Some(record) = self.remembered(&key, now)
            && self.judge(term, &key, &record, peer).is_ok()
        {
            return Ok(());
        }
        let record = match term.shared.records.read_operator(tenant, &operator).await {
            Ok(Some(record)) => record,
            Ok(None) => return Err(unknown(operator)),
            // Not being able to look is no reason to refuse anybody.
            Err(error) => return Err(Refusal::unavailable("STORE_UNAVAILABLE", format!("{}", Chain(&error)))),
        };
        let judged = self.judge(term, &key, &record, peer);
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (now, record));
        judged
    }

    fn remembered(&self, key: &(Tenant, OperatorId), now: Mono) -> Option<Versioned<OperatorRecord>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(key).filter(|(at, _)| now.since(*at) < REMEMBERED).map(|(_, record)| record.clone())
    }

    /// Has every record read anew before it is trusted again.
    pub fn forget(&self) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Whether an operator may go on watching. Not being able to look ends no stream.
    async fn may_watch(&self, term: &Arc<Term>, key: &(Tenant, OperatorId)) -> Result<(), Refusal> {
        let (tenant, operator) = key;
        if !term.applied().config.tenants.contains(tenant) {
            let message = format!("tenant {tenant} is not configured in this shard any more");
            return Err(Refusal::denied("TENANT_UNKNOWN", message));
        }
        let now = term.shared.clock.monotonic();
        let record = match self.remembered(key, now) {
            Some(record) => record,
            None => match term.shared.records.read_operator(tenant, operator).await {
                Ok(Some(record)) => {
                    let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                    known.insert(key.clone(), (now, record.clone()));
                    record
                }
                Ok(None) => return Err(unknown(*operator)),
                Err(error) => {
                    tracing::debug!(%operator, error = %Chain(&error), "watcher not looked at");
                    return Ok(());
                }
            },
        };
        if record.value.revoked.is_some() {
            return Err(revoked(*operator));
        }
        Ok(())
    }

    fn judge(
        &self,
        term: &Arc<Term>,
        key: &(Tenant, OperatorId),
        record: &Versioned<OperatorRecord>,
        peer: &Peer,
    ) -> Result<(), Refusal> {
        let (it, operator) = (&record.value, key.1);
        if it.revoked.is_some() {
            return Err(revoked(operator));
        }
        let key_fits = it.public_key == peer.public_key_der();
        if key_fits && it.cert.current.serial == peer.serial {
            if it.cert.previous.is_some() && self.is_first_use(key, &peer.serial) {
                retire_previous(term, operator, record.clone());
            }
            return Ok(());
        }
        let is_previous = it.cert.previous.as_ref().is_some_and(|cert| cert.serial == peer.serial);
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if key_fits && is_previous && used.get(key) != Some(&it.cert.current.serial) {
            return Ok(());
        }
        let message = format!("certificate {} of operator {operator} was superseded", peer.serial);
        Err(Refusal::unauthenticated("CERT_SUPERSEDED", message))
    }

    /// Notes that a new certificate is in use.
    fn is_first_use(&self, key: &(Tenant, OperatorId), serial: &str) -> bool {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        used.insert(key.clone(), serial.to_owned()).as_deref() != Some(serial)
    }
}

/// Ends the streams of operators that were revoked or removed, and those whose certificate has run out.
pub async fn watch_watchers(term: Arc<Term>) {
    loop {
        tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return,
            () = tokio::time::sleep(SWEEP) => {}
        }
        let watching: BTreeSet<_> =
            term.watches.watchers().iter().map(|it| (it.tenant().clone(), it.operator())).collect();
        let mut unwelcome = BTreeMap::new();
        for key in watching {
            let judged = tokio::select! {
                biased;
                () = term.tasks.token().cancelled() => return,
                judged = term.operators.may_watch(&term, &key) => judged,
            };
            if let Err(refusal) = judged {
                unwelcome.insert(key, refusal);
            }
        }
        let now = term.shared.clock.now();
        let n_cut = term.watches.cut_unwelcome(|it| {
            let refusal = unwelcome.get(&(it.tenant().clone(), it.operator())).cloned();
            let expired = it.not_after().plus(LEEWAY) < now;
            let message = "the certificate that this stream was opened with has expired; open it with the new one";
            refusal.or_else(|| expired.then(|| Refusal::unauthenticated("CERT_EXPIRED", message)))
        });
        if 0 < n_cut {
            tracing::info!(n_cut, "streams of operators ended that may not watch any more");
        }
    }
}

/// Takes the old serial off the record: other shards let it pass until then, and a rotation of the CA waits for it.
/// There is one task for each serial that is used for the first time.
fn retire_previous(term: &Arc<Term>, operator: OperatorId, record: Versioned<OperatorRecord>) {
    let term = term.clone();
    term.tasks.clone().spawn_droppable("retire serial", async move {
        let mut backoff = Backoff::new(RETIRE_BASE, RETIRE_CAP);
        let serial = record.value.cert.current.serial.clone();
        loop {
            let retired = term.shared.records.update_operator(&term.guard, &record, |it| {
                let mut it = it.clone();
                it.cert.previous.take().filter(|_| it.cert.current.serial == serial)?;
                Some(it)
            });
            let Err(error) = retired.await else { return };
            tracing::debug!(%operator, error = %Chain(&error), "old serial not retired yet");
            tokio::time::sleep(backoff.next(term.shared.entropy.as_ref())).await;
        }
    });
}

fn revoked(operator: OperatorId) -> Refusal {
    Refusal::denied("OPERATOR_REVOKED", format!("operator {operator} was revoked"))
}

fn unknown(operator: OperatorId) -> Refusal {
    let message = format!("operator {operator} is not registered; register it with a new nonce");
    Refusal::unauthenticated("OPERATOR_UNKNOWN", message)
}
