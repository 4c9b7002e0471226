//! Operators: who they are is in the bucket, shared by all shards. Their records are remembered for five minutes; an
//! unknown id or serial causes one fresh read before anybody is refused.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
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
}

/// A record and when it was read.
type Remembered = (Mono, Versioned<OperatorRecord>);

impl Operators {
    /// Checks an operator's certificate against its live record.
    pub async fn authorise(
        &self,
        term: &Term,
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
            && judge(&record.value, peer, operator).is_ok()
        {
            return Ok(());
        }
        let record = match term.shared.records.read_operator(tenant, &operator).await {
            Ok(Some(record)) => record,
            Ok(None) => return Err(unknown(operator)),
            // Not being able to look is no reason to refuse anybody.
            Err(error) => return Err(Refusal::unavailable("STORE_UNAVAILABLE", format!("{}", Chain(&error)))),
        };
        let judged = judge(&record.value, peer, operator);
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (now, record));
        judged
    }
}

fn unknown(operator: OperatorId) -> Refusal {
    let message = format!("operator {operator} is not registered; register it with a new nonce");
    Refusal::unauthenticated("OPERATOR_UNKNOWN", message)
}

fn judge(record: &OperatorRecord, peer: &Peer, operator: OperatorId) -> Result<(), Refusal> {
    if record.revoked.is_some() {
        return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {operator} was revoked")));
    }
    let current = record.cert.current.serial == peer.serial;
    let previous = record.cert.previous.as_ref().is_some_and(|cert| cert.serial == peer.serial);
    if record.public_key != peer.public_key_der() || !(current || previous) {
        let message = format!("certificate {} of operator {operator} was superseded", peer.serial);
        return Err(Refusal::unauthenticated("CERT_SUPERSEDED", message));
    }
    Ok(())
}
