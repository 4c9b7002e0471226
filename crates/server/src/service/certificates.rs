//! Renewal: the same key, a new certificate. The serial that made the call passes until the new one is seen, so that a
//! lost answer locks nobody out.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_config::Code as ProblemCode;
use nstance_core::{
    ids::{InstanceId, OperatorId, Tenant},
    instance::{CertFact, CertPair},
    time::Mono,
};
use nstance_identity::{issue::Issued, keys::PublicKey, peer::Peer, renew::renew_after};
use nstance_proto::v1;
use tonic::Code;

use super::{
    audit::Audit,
    groups::problem,
    register::{cert_fact, log, stalled},
    status::timestamp,
};
use crate::{
    events::{Reason, Tell},
    grpc::{
        auth::{Caller, record_refusal},
        status::Refusal,
    },
    term::Term,
};

/// A subject gets no more than one certificate in this time.
const PAUSE: Duration = Duration::from_secs(10);

/// Who was given a certificate lately.
#[derive(Default)]
pub struct Renewals {
    last: Mutex<BTreeMap<String, Mono>>,
}

impl Renewals {
    /// Takes the subject's turn, if it has one.
    fn take(&self, subject: &str, now: Mono) -> Result<(), Refusal> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.retain(|_, at| now.since(*at) < PAUSE);
        if let Some(at) = last.get(subject) {
            let message = format!("{subject} was given a certificate less than {} s ago", PAUSE.as_secs());
            let refusal = Refusal::new(Code::ResourceExhausted, "TOO_MANY_RENEWALS", message);
            return Err(refusal.within(PAUSE.saturating_sub(now.since(*at))));
        }
        last.insert(subject.to_owned(), now);
        Ok(())
    }

    /// Nothing came of it: the next try need not wait.
    fn give_back(&self, subject: &str) {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).remove(subject);
    }
}

/// Renews the caller's certificate, and notes what came of it.
pub async fn renew(
    term: &Arc<Term>,
    caller: &Caller,
    remote: Option<SocketAddr>,
    public_key_pem: &[u8],
) -> Result<v1::RenewCertificateResponse, Refusal> {
    let mut audit = Audit::new(term, "renewal", caller.peer().role(), remote);
    audit.key(&caller.peer().public_key);
    audit.subject(caller.subject(), caller.tenant());
    let renewed = try_renew(term, caller, public_key_pem, &mut audit).await;
    audit.close(&renewed);
    renewed
}

async fn try_renew(
    term: &Arc<Term>,
    caller: &Caller,
    public_key_pem: &[u8],
    audit: &mut Audit,
) -> Result<v1::RenewCertificateResponse, Refusal> {
    stalled(term)?;
    let bad = |error: &dyn std::fmt::Display| {
        Refusal::bad_request(vec![problem(ProblemCode::BadValue, "public_key_pem", error.to_string())])
    };
    let key = PublicKey::from_pem(public_key_pem).map_err(|error| bad(&error))?;
    if key.to_der() != caller.peer().public_key_der() {
        let message = "a certificate is renewed for its own key only; another key needs a nonce";
        return Err(Refusal::invalid("KEY_CHANGE", message));
    }
    let subject = caller.subject();
    term.renewals.take(&subject, term.shared.clock.monotonic())?;
    let issued = match caller {
        Caller::Agent { instance, tenant, peer } => renew_agent(term, *instance, tenant, peer, &key).await,
        Caller::Operator { operator, tenant, peer } => renew_operator(term, *operator, tenant, peer, &key).await,
    };
    let issued = issued.inspect_err(|_| term.renewals.give_back(&subject))?;
    stalled(term)?;
    audit.serial(&issued.serial);
    Ok(v1::RenewCertificateResponse {
        client_certificate_pem: issued.chain_pem.clone().into_bytes(),
        expires_at: Some(timestamp(issued.not_after)),
        ca_bundle_pem: term.shared.authority.bundle_pem().into_bytes(),
        renew_after: Some(timestamp(renew_after(issued.not_before, issued.not_after))),
    })
}

/// The pair after a renewal by `serial`; `None` if that one passes no longer.
fn renewed(pair: &CertPair, serial: &str, new: &CertFact) -> Option<CertPair> {
    let calling = std::iter::once(&pair.current).chain(&pair.previous).find(|cert| cert.serial == serial)?;
    Some(CertPair { current: new.clone(), previous: Some(calling.clone()) })
}

fn superseded(peer: &Peer) -> Refusal {
    Refusal::unauthenticated("CERT_SUPERSEDED", format!("certificate {} was superseded meanwhile", peer.serial))
}

async fn renew_agent(
    term: &Arc<Term>,
    id: InstanceId,
    tenant: &Tenant,
    peer: &Peer,
    key: &PublicKey,
) -> Result<Issued, Refusal> {
    let ttl = term.applied().config.certificates.agent_ttl;
    let issued = term.shared.authority.issue_agent(&id, tenant, key, term.shared.clock.now(), ttl)?;
    let fact = cert_fact(&issued);
    let commit = term.update(id, |it| {
        let mut it = it.clone();
        it.cert = Some(renewed(it.cert.as_ref()?, &peer.serial, &fact)?);
        Some(it)
    });
    let (committed, logged) = tokio::join!(commit, log(term, Some(tenant), id.to_string(), "agent", &issued));
    let committed = committed.map_err(|error| record_refusal(&error))?;
    if committed.cert.as_ref().is_none_or(|cert| cert.current.serial != issued.serial) {
        return Err(superseded(peer));
    }
    logged?;
    let told = Tell::instance(Reason::CertificateIssued, &committed.group, id, "agent's certificate renewed");
    term.tell(told.detail("serial", &issued.serial).by(id.to_string()));
    Ok(issued)
}

async fn renew_operator(
    term: &Arc<Term>,
    operator: OperatorId,
    tenant: &Tenant,
    peer: &Peer,
    key: &PublicKey,
) -> Result<Issued, Refusal> {
    let unavailable = |error| record_refusal(&term.failed(error));
    let records = &term.shared.records;
    let gone = || Refusal::unauthenticated("OPERATOR_UNKNOWN", format!("operator {operator} is not registered"));
    let current = records.read_operator(tenant, &operator).await.map_err(unavailable)?.ok_or_else(gone)?;
    let now = term.shared.clock.now();
    let ttl = term.applied().config.certificates.operator_ttl;
    let issued = term.shared.authority.issue_operator(&operator, tenant, key, now, ttl)?;
    let fact = cert_fact(&issued);
    log(term, Some(tenant), operator.to_string(), "operator", &issued).await?;
    let changed = records.update_operator(&term.guard, &current, |it| {
        if it.revoked.is_some() || it.cert.current.serial == issued.serial {
            return None;
        }
        let mut it = it.clone();
        it.cert = renewed(&it.cert, &peer.serial, &fact)?;
        it.renewed_at = Some(now);
        Some(it)
    });
    let written = changed.await.map_err(unavailable)?.value;
    if written.revoked.is_some() {
        return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {operator} was revoked")));
    }
    if written.cert.current.serial != issued.serial {
        return Err(superseded(peer));
    }
    let told = Tell::tenant(Reason::CertificateIssued, tenant, "operator's certificate renewed");
    term.tell(told.detail("operator", operator).detail("serial", &issued.serial).by(operator.to_string()));
    Ok(issued)
}
