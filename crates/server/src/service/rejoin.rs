//! Rejoin: a client with its key but without a certificate that still passes gets a new one for the same key.
//!
//! A proof counts upwards. Only the next number goes on, or the last one again with the very same proof, whose answer
//! was lost: a second machine with a copy of the key falls out of step, and people are told. No clock is involved.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_config::{Code as ProblemCode, Problem};
use nstance_core::{
    ids::{InstanceId, OperatorId, Tenant},
    instance::{CertPair, Instance, Rejoin},
    time::Timestamp,
};
use nstance_identity::{keys::PublicKey, rejoin::RejoinClaim, role::Role};
use nstance_proto::v1;
use nstance_store::records::operator::OperatorRecord;

use super::{
    audit::Audit,
    groups::problem,
    register::{Asking, answer, cert_fact, log, stalled},
};
use crate::{
    events::{Reason, Tell},
    grpc::{auth::record_refusal, status::Refusal},
    term::Term,
    world::{Facts, is_dead},
};

/// How long after its certificate's end an operator may still rejoin.
const OPERATOR_ABSENCE: Duration = Duration::from_secs(90 * 24 * 3600);

/// Who asks, in the form of its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Agent(InstanceId),
    Operator(OperatorId),
}

/// A well-formed proof. Nothing of it is believed yet.
pub(super) struct Proof {
    subject: Subject,
    client_id: String,
    tenant: Tenant,
    counter: u64,
    signature: Vec<u8>,
}

impl Proof {
    pub(super) fn parse(proof: &v1::RejoinProof, asking: Asking, problems: &mut Vec<Problem>) -> Option<Self> {
        let (subject, whose) = match asking {
            Asking::Agent => (proof.client_id.parse().map(Subject::Agent), "an instance"),
            Asking::Operator => (proof.client_id.parse().map(Subject::Operator), "an operator"),
        };
        let tenant = proof.tenant.parse::<Tenant>();
        if subject.is_err() {
            problems.push(problem(ProblemCode::BadValue, "rejoin.client_id", format!("is not the id of {whose}")));
        }
        if tenant.is_err() {
            problems.push(problem(ProblemCode::BadValue, "rejoin.tenant", "is not the name of a tenant"));
        }
        Some(Self {
            subject: subject.ok()?,
            client_id: proof.client_id.clone(),
            tenant: tenant.ok()?,
            counter: proof.counter,
            signature: proof.signature.clone(),
        })
    }

    fn is_signed_by(&self, key: &PublicKey, term: &Term) -> bool {
        let role = match self.subject {
            Subject::Agent(_) => Role::Agent,
            Subject::Operator(_) => Role::Operator,
        };
        let (cluster, tenant) = (&term.shared.cluster, &self.tenant);
        let claim = RejoinClaim { cluster, role, tenant, client_id: &self.client_id, counter: self.counter };
        claim.verify(key, &self.signature)
    }

    fn sha256(&self) -> String {
        data_encoding::HEXLOWER.encode(ring::digest::digest(&ring::digest::SHA256, &self.signature).as_ref())
    }

    /// What the record says after this proof, or why it is not the next one.
    fn follows(&self, last: Option<&Rejoin>, now: Timestamp) -> Result<Rejoin, Refusal> {
        let proof_sha256 = self.sha256();
        let count = last.map_or(0, |last| last.count);
        if let Some(last) = last
            && last.count == self.counter
            && last.proof_sha256 == proof_sha256
        {
            return Ok(last.clone());
        }
        if count.checked_add(1) == Some(self.counter) {
            return Ok(Rejoin { count: self.counter, at: now, proof_sha256 });
        }
        let message = format!(
            "{} counts its rejoins differently than its record does: its key is used twice, or its disk was rolled \
             back; replace the instance, or register the operator with a new nonce",
            self.client_id
        );
        Err(Refusal::denied("REJOIN_COUNTER", message))
    }
}

pub(super) async fn rejoin(
    term: &Arc<Term>,
    proof: Proof,
    key: &PublicKey,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    audit.is("rejoin");
    audit.subject(&proof.client_id, &proof.tenant);
    // Nothing is looked up for somebody who does not even hold the key it names.
    if !proof.is_signed_by(key, term) {
        return Err(refused());
    }
    match proof.subject {
        Subject::Agent(id) => rejoin_agent(term, id, &proof, key, audit).await,
        Subject::Operator(id) => rejoin_operator(term, id, &proof, key, audit).await,
    }
}

/// Whoever does not hold the key of a record learns nothing of it, not even whether there is one.
fn refused() -> Refusal {
    Refusal::unauthenticated("REJOIN_REFUSED", "the proof does not hold")
}

/// Nobody knows whose key it is while its record does not parse. Why it does not is for people on the inside.
fn unreadable(id: InstanceId) -> Refusal {
    let message = format!("the record of instance {id} cannot be read; have it restored, and retry");
    Refusal::unavailable("NOT_READY", message)
}

async fn rejoin_agent(
    term: &Arc<Term>,
    id: InstanceId,
    proof: &Proof,
    key: &PublicKey,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    let (known, dead) = {
        let state = term.world.lock();
        if !state.entries.contains_key(&id) && state.unreadable(id, &proof.tenant).is_some() {
            return Err(unreadable(id));
        }
        let entry = state.entries.get(&id).ok_or_else(refused)?;
        let Facts::Durable(record) = &entry.facts else { return Err(refused()) };
        (record.value.clone(), is_dead(entry.seen))
    };
    let now = term.now();
    // A first look, so that the usual refusals cost no signature. The commit looks again.
    if let Err(refusal) = judge_agent(&known, dead, proof, key, now) {
        return Err(told(term, proof, key, Some(&known), refusal));
    }
    let ttl = term.applied().config.certificates.agent_ttl;
    let issued = term.shared.authority.issue_agent(&id, &proof.tenant, key, term.shared.clock.now(), ttl)?;
    let fact = cert_fact(&issued);
    let refusal = Mutex::new(None);
    let commit = term.update(id, |it| {
        // Our own write, which landed though its answer did not.
        if is_in(it.cert.as_ref(), &fact.serial) {
            return None;
        }
        match judge_agent(it, dead, proof, key, now) {
            Ok(rejoin) => {
                let previous = it.cert.as_ref().map(|cert| cert.current.clone());
                let cert = Some(CertPair { current: fact.clone(), previous });
                Some(Instance { rejoin: Some(rejoin), cert, ..it.clone() })
            }
            Err(why) => {
                *refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                None
            }
        }
    });
    let log = log(term, Some(&proof.tenant), id.to_string(), "agent", &issued);
    let (committed, logged) = tokio::join!(commit, log);
    let committed = committed.map_err(|error| record_refusal(&error))?;
    if !is_in(committed.cert.as_ref(), &issued.serial) {
        let why = refusal.into_inner().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(not_landed);
        return Err(told(term, proof, key, Some(&committed), why));
    }
    logged?;
    stalled(term)?;
    term.tell(
        Tell::instance(Reason::CertificateIssued, &committed.group, id, "agent rejoined with its key")
            .detail("serial", &issued.serial)
            .detail("key", key.fingerprint())
            .detail("counter", proof.counter)
            .by(id.to_string()),
    );
    audit.serial(&issued.serial);
    Ok(answer(term, &issued, id.to_string()))
}

/// Steps 2 to 4 on the facts at hand, and what the record says of the rejoin afterwards.
fn judge_agent(it: &Instance, dead: bool, proof: &Proof, key: &PublicKey, now: Timestamp) -> Result<Rejoin, Refusal> {
    let bound = it.registration.as_ref().is_some_and(|registration| registration.public_key == key.to_der());
    if it.group.tenant != proof.tenant || !bound {
        return Err(refused());
    }
    if it.delete.is_some() || it.create_failure.is_some() || dead {
        let message = format!("instance {} was removed; this machine may be switched off", it.id);
        return Err(Refusal::denied("INSTANCE_DELETED", message));
    }
    proof.follows(it.rejoin.as_ref(), now)
}

async fn rejoin_operator(
    term: &Arc<Term>,
    id: OperatorId,
    proof: &Proof,
    key: &PublicKey,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    let unavailable = |error| record_refusal(&term.failed(error));
    let records = &term.shared.records;
    let known = records.read_operator(&proof.tenant, &id).await.map_err(unavailable)?.ok_or_else(refused)?;
    let now = term.shared.clock.now();
    if let Err(refusal) = judge_operator(&known.value, proof, key, now) {
        return Err(told(term, proof, key, None, refusal));
    }
    if !term.applied().config.tenants.contains(&proof.tenant) {
        let message = format!("tenant {} is not configured in this shard; add it to tenants", proof.tenant);
        return Err(Refusal::precondition("TENANT_UNKNOWN", message));
    }
    let ttl = term.applied().config.certificates.operator_ttl;
    let issued = term.shared.authority.issue_operator(&id, &proof.tenant, key, now, ttl)?;
    let fact = cert_fact(&issued);
    let refusal = Mutex::new(None);
    let commit = records.update_operator(&term.guard, &known, |it| {
        // Our own write, which landed though its answer did not.
        if is_in(Some(&it.cert), &fact.serial) {
            return None;
        }
        match judge_operator(it, proof, key, now) {
            Ok(rejoin) => {
                let cert = CertPair { current: fact.clone(), previous: Some(it.cert.current.clone()) };
                Some(OperatorRecord { rejoin: Some(rejoin), cert, ..it.clone() })
            }
            Err(why) => {
                *refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                None
            }
        }
    });
    let log = log(term, Some(&proof.tenant), id.to_string(), "operator", &issued);
    let (committed, logged) = tokio::join!(commit, log);
    let committed = committed.map_err(unavailable)?;
    if !is_in(Some(&committed.value.cert), &issued.serial) {
        let why = refusal.into_inner().unwrap_or_else(PoisonError::into_inner).unwrap_or_else(not_landed);
        return Err(told(term, proof, key, None, why));
    }
    logged?;
    stalled(term)?;
    term.tell(
        Tell::tenant(Reason::CertificateIssued, &proof.tenant, "operator rejoined with its key")
            .detail("operator", id)
            .detail("serial", &issued.serial)
            .detail("key", key.fingerprint())
            .detail("counter", proof.counter)
            .by(id.to_string()),
    );
    audit.serial(&issued.serial);
    Ok(answer(term, &issued, id.to_string()))
}

fn judge_operator(it: &OperatorRecord, proof: &Proof, key: &PublicKey, now: Timestamp) -> Result<Rejoin, Refusal> {
    if it.tenant != proof.tenant || it.public_key != key.to_der() {
        return Err(refused());
    }
    let operator = it.operator_id;
    if it.revoked.is_some() {
        return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {operator} was revoked")));
    }
    if it.cert.current.not_after.plus(OPERATOR_ABSENCE) <= now {
        let message = format!("the certificate of operator {operator} ended more than 90 days ago; make a new nonce");
        return Err(Refusal::denied("REJOIN_TOO_OLD", message));
    }
    proof.follows(it.rejoin.as_ref(), now)
}

/// Whether a certificate is one of the two that pass.
pub(super) fn is_in(pair: Option<&CertPair>, serial: &str) -> bool {
    pair.is_some_and(|pair| std::iter::once(&pair.current).chain(&pair.previous).any(|cert| cert.serial == serial))
}

fn not_landed() -> Refusal {
    Refusal::unavailable("STORE_UNAVAILABLE", "the rejoin did not land; retry")
}

/// A counter out of step is told loudly: somebody else may hold this key.
fn told(term: &Term, proof: &Proof, key: &PublicKey, agent: Option<&Instance>, refusal: Refusal) -> Refusal {
    if refusal.reason == "REJOIN_COUNTER" {
        let message = "a rejoin was out of step: its key is used twice, or its state was rolled back";
        let tell = match agent {
            Some(it) => Tell::instance(Reason::RejoinRefused, &it.group, it.id, message),
            None => Tell::tenant(Reason::RejoinRefused, &proof.tenant, message).detail("operator", &proof.client_id),
        };
        term.tell(tell.detail("key", key.fingerprint()).detail("counter", proof.counter));
    }
    refusal
}
