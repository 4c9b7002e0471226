//! Operators: who they are is in the bucket, shared by all shards. Their records are remembered for five minutes; an
//! unknown id or serial causes one fresh read before anybody is refused.
//!
//! Once an operator was seen with its new certificate the one before it passes no longer: here at once, elsewhere as
//! soon as the record says so.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{OperatorId, Tenant},
    time::Mono,
};
use nstance_identity::peer::Peer;
use nstance_rt::chain::Chain;
use nstance_store::records::{Versioned, operator::OperatorRecord};

use crate::{grpc::status::Refusal, term::Term};

const REMEMBERED: Duration = Duration::from_secs(300);

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
        let remembered = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(&key).filter(|(at, _)| now.since(*at) < REMEMBERED).map(|(_, record)| record.clone())
        };
        if let Some(record) = remembered
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

    fn judge(
        &self,
        term: &Arc<Term>,
        key: &(Tenant, OperatorId),
        record: &Versioned<OperatorRecord>,
        peer: &Peer,
    ) -> Result<(), Refusal> {
        let (it, operator) = (&record.value, key.1);
        if it.revoked.is_some() {
            return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {operator} was revoked")));
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

/// Takes the old serial off the record, for the other shards. Should that fail, it passes there until the next renewal
/// or its end, as it would have without this.
fn retire_previous(term: &Arc<Term>, operator: OperatorId, record: Versioned<OperatorRecord>) {
    let term = term.clone();
    term.tasks.clone().spawn_droppable("retire serial", async move {
        let serial = record.value.cert.current.serial.clone();
        let retired = term.shared.records.update_operator(&term.guard, &record, |it| {
            let mut it = it.clone();
            it.cert.previous.take().filter(|_| it.cert.current.serial == serial)?;
            Some(it)
        });
        if let Err(error) = retired.await {
            tracing::debug!(%operator, error = %Chain(&error), "old serial not retired");
        }
    });
}

fn unknown(operator: OperatorId) -> Refusal {
    let message = format!("operator {operator} is not registered; register it with a new nonce");
    Refusal::unauthenticated("OPERATOR_UNKNOWN", message)
}
