//! Registration: a nonce, once, for one key.
//!
//! The conditional write of the record (agents) or of the nonce object (operators) is the commit: of two racing calls
//! one wins, and the other is told so. No certificate leaves before its log entry and its commit are durable.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use nstance_config::Code as ProblemCode;
use nstance_core::{
    instance::{Addresses, CertFact, CertPair, Instance, Registration},
    ports::provider::{Described, VmRef, VmTags},
};
use nstance_identity::{
    issue::Issued,
    keys::PublicKey,
    nonce::{AgentNonce, NonceError, OperatorNonce},
    renew::renew_after,
    role::Role,
};
use nstance_proto::v1;
use nstance_rt::chain::Chain;
use nstance_store::{
    cas::{Created, RecordError},
    records::{
        certlog::{CertlogRecord, LoggedCertificate},
        nonce::NonceRecord,
        operator::OperatorRecord,
    },
};

use super::{
    audit::Audit,
    groups::problem,
    rejoin::{self, Proof, is_in},
    status::timestamp,
};
use crate::{
    events::{Reason, Tell},
    grpc::{auth::record_refusal, status::Refusal},
    term::{Term, UpdateError},
    world::Facts,
};

const NONCE_FIELD: &str = "registration_nonce_jwt";

/// How long a call may take in all.
const CALL: Duration = Duration::from_secs(10);

/// How long a call waits for an intent that is still being written.
const INTENT: Duration = Duration::from_secs(5);

/// How long a call waits for a look at a machine that no record knows.
const LOOK: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asking {
    Agent,
    Operator,
}

impl Asking {
    pub fn role(self) -> Role {
        match self {
            Self::Agent => Role::Agent,
            Self::Operator => Role::Operator,
        }
    }
}

/// Registers whoever calls from there, and notes what came of it.
pub async fn register(
    term: &Arc<Term>,
    request: v1::RegisterClientRequest,
    asking: Asking,
    remote: Option<SocketAddr>,
) -> Result<v1::RegisterClientResponse, Refusal> {
    let mut audit = Audit::new(term, "registration", asking.role(), remote);
    let registering = try_register(term, request, asking, &mut audit);
    let registered = tokio::time::timeout(CALL, registering).await.unwrap_or_else(|_| {
        Err(Refusal::unavailable("STORE_UNAVAILABLE", "registration did not finish in time; retry"))
    });
    audit.close(&registered);
    registered
}

async fn try_register(
    term: &Arc<Term>,
    request: v1::RegisterClientRequest,
    asking: Asking,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    // 2. Nobody acts, and nobody is told "unknown", without the lease.
    stalled(term)?;
    // 3. All faults of the request at once.
    let parsed = parse(&request, asking)?;
    audit.key(&parsed.key);
    if let Some(proof) = parsed.rejoin {
        return rejoin::rejoin(term, proof, &parsed.key, audit).await;
    }
    // 4., 5. Nothing is looked up before the signature is known to be ours.
    let keys = term.shared.authority.nonce_keys();
    match asking {
        Asking::Agent => {
            // By the term's time, which made it: a wall clock that was set in between must not lock new machines out.
            let nonce =
                keys.verify_agent(&request.registration_nonce_jwt, term.now()).map_err(|error| refuse(&error))?;
            audit.subject(nonce.instance, &nonce.tenant);
            audit.jti(&nonce.jti);
            register_agent(term, nonce, parsed, audit).await
        }
        Asking::Operator => {
            let now = term.shared.clock.now();
            let nonce = keys.verify_operator(&request.registration_nonce_jwt, now).map_err(|error| refuse(&error))?;
            audit.subject(nonce.operator, &nonce.tenant);
            audit.jti(&nonce.jti);
            register_operator(term, nonce, parsed, audit).await
        }
    }
}

pub(super) fn stalled(term: &Term) -> Result<(), Refusal> {
    if term.guard.is_open() && !term.tasks.is_stopping() {
        Ok(())
    } else {
        Err(Refusal::unavailable("LEASE_STALLED", "this server may not act now; retry"))
    }
}

fn refuse(error: &NonceError) -> Refusal {
    match error {
        NonceError::TooLong { .. } => {
            Refusal::bad_request(vec![problem(ProblemCode::Limit, NONCE_FIELD, error.to_string())])
        }
        _ => Refusal::unauthenticated(error.reason(), error.to_string()),
    }
}

struct Parsed {
    key: PublicKey,
    addresses: Addresses,
    version: String,
    /// In place of a nonce.
    rejoin: Option<Proof>,
}

/// All faults at once. None is quoted: whoever asks is unknown yet, and a nonce may stand in the wrong field.
fn parse(request: &v1::RegisterClientRequest, asking: Asking) -> Result<Parsed, Refusal> {
    let mut problems = Vec::new();
    if request.registration_nonce_jwt.is_empty() != request.rejoin.is_some() {
        let message = "exactly one of it and rejoin must be set";
        problems.push(problem(ProblemCode::Conflict, NONCE_FIELD, message));
    }
    let rejoin = request.rejoin.as_ref().and_then(|proof| Proof::parse(proof, asking, &mut problems));
    let key = PublicKey::from_pem(&request.public_key_pem);
    if let Err(error) = &key {
        problems.push(problem(ProblemCode::BadValue, "public_key_pem", error.to_string()));
    }
    for (name, value, v4) in
        [("private_ipv4", &request.private_ipv4, true), ("private_ipv6", &request.private_ipv6, false)]
    {
        let fits = value.is_empty() || value.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv4() == v4);
        if !fits {
            let message = if v4 { "is no IPv4 address" } else { "is no IPv6 address" };
            problems.push(problem(ProblemCode::BadValue, name, message));
        }
    }
    for (name, value) in [("hostname", &request.hostname), ("fqdn", &request.fqdn)] {
        if !value.is_empty() && !is_host(value) {
            let message = "is no host name: use letters, digits and `-`, parts joined by `.`";
            problems.push(problem(ProblemCode::BadValue, name, message));
        }
    }
    if 64 < request.client_version.len() {
        problems.push(problem(ProblemCode::Limit, "client_version", "is longer than 64 characters"));
    }
    match key {
        Ok(key) if problems.is_empty() => Ok(Parsed {
            key,
            addresses: Addresses {
                ip4: said(&request.private_ipv4),
                ip6: said(&request.private_ipv6),
                hostname: said(&request.hostname),
                fqdn: said(&request.fqdn),
            },
            version: request.client_version.clone(),
            rejoin,
        }),
        _ => Err(Refusal::bad_request(problems)),
    }
}

fn said(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

/// RFC 1123.
pub(super) fn is_host(text: &str) -> bool {
    text.len() <= 253
        && text.split('.').all(|label| {
            !label.is_empty()
                && label.len() <= 63
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        })
}

async fn register_agent(
    term: &Arc<Term>,
    nonce: AgentNonce,
    parsed: Parsed,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    // 6. Ours?
    same("WRONG_CLUSTER", "cluster", nonce.cluster.as_str(), term.shared.cluster.as_str())?;
    same("WRONG_SHARD", "shard", nonce.shard.as_str(), term.shared.shard.as_str())?;
    // 7. Known?
    let id = nonce.instance;
    let known = known(term, &nonce).await?;
    // 8., 9. A first look, so that the usual refusals cost no signature. The commit looks again.
    judge(&known, &nonce, &parsed.key).map_err(|refusal| told(term, &known, &parsed.key, refusal))?;
    // 10. Sign; log and commit beside each other.
    let now = term.now();
    let ttl = term.applied().config.certificates.agent_ttl;
    let wall = term.shared.clock.now();
    let issued = term.shared.authority.issue_agent(&id, &nonce.tenant, &parsed.key, wall, ttl)?;
    let fact = cert_fact(&issued);
    let public_key = parsed.key.to_der();
    let refused = std::sync::Mutex::new(None);
    let commit = term.update(id, |it| {
        if let Err(refusal) = judge(it, &nonce, &parsed.key) {
            *refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(refusal);
            return None;
        }
        let mut it = it.clone();
        it.nonce.jti.clone_from(&nonce.jti);
        it.nonce.used_at.get_or_insert(now);
        it.registration.get_or_insert_with(|| Registration {
            at: now,
            public_key: public_key.clone(),
            addresses: parsed.addresses.clone(),
            agent_version: parsed.version.clone(),
        });
        let previous = it.cert.take().map(|cert| cert.current);
        it.cert = Some(CertPair { current: fact.clone(), previous });
        Some(it)
    });
    let log = log(term, Some(&nonce.tenant), id.to_string(), "agent", &issued);
    let (committed, logged) = tokio::join!(commit, log);
    let committed = committed.map_err(|error| record_refusal(&error))?;
    let refused = refused.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The last run of `change` decides: it saw what was there when the write was made, or why none was.
    let ours = committed.cert.as_ref().is_some_and(|cert| {
        cert.current.serial == issued.serial || cert.previous.as_ref().is_some_and(|it| it.serial == issued.serial)
    });
    if !ours {
        let refusal =
            refused.unwrap_or_else(|| Refusal::unavailable("STORE_UNAVAILABLE", "registration did not land; retry"));
        return Err(told(term, &committed, &parsed.key, refusal));
    }
    logged?;
    // 11.
    stalled(term)?;
    {
        let mut state = term.world.lock();
        state.group(&committed.group).registered();
        // Also if it was registered already, and its answer lost: it comes only now.
        if let Some(entry) = state.entries.get_mut(&id) {
            entry.link.registered(term.world.now());
        }
    }
    term.tell(
        Tell::instance(Reason::InstanceRegistered, &committed.group, id, "agent registered")
            .detail("serial", &issued.serial)
            .detail("key", parsed.key.fingerprint())
            .detail("jti", &nonce.jti),
    );
    term.wake(&committed.group);
    audit.serial(&issued.serial);
    Ok(answer(term, &issued, id.to_string()))
}

fn same(reason: &'static str, what: &str, theirs: &str, ours: &str) -> Result<(), Refusal> {
    if theirs == ours {
        return Ok(());
    }
    Err(Refusal::invalid(reason, format!("nonce is for {what} {theirs}, this is {ours}")))
}

/// The facts of the instance a nonce names: from memory, else from the store.
async fn known(term: &Arc<Term>, nonce: &AgentNonce) -> Result<Instance, Refusal> {
    let id = nonce.instance;
    let writing = {
        let state = term.world.lock();
        state.entries.get(&id).map(|entry| (matches!(entry.facts, Facts::Intent(_)), entry.writing.clone()))
    };
    match writing {
        // The machine was faster than the record: the intent's writer holds this lock until it is durable.
        Some((true, writing)) => {
            let _ = tokio::time::timeout(INTENT, writing.lock()).await;
        }
        Some((false, _)) => {}
        None => read(term, nonce).await?,
    }
    let state = term.world.lock();
    let unknown = || {
        let message = format!("instance {id} of tenant {} is not known here", nonce.tenant);
        Refusal::unauthenticated("INSTANCE_UNKNOWN", message)
    };
    let entry = state.entries.get(&id).ok_or_else(unknown)?;
    if matches!(entry.facts, Facts::Intent(_)) {
        return Err(Refusal::unavailable("NOT_READY", format!("the record of {id} is being written; retry")));
    }
    let it = entry.instance();
    if it.group.tenant != nonce.tenant || it.group.group != nonce.group {
        return Err(unknown());
    }
    Ok(it.clone())
}

/// Not in memory. The store has the last word, and a VM that a listing showed is adopted first.
async fn read(term: &Arc<Term>, nonce: &AgentNonce) -> Result<(), Refusal> {
    match term.shared.records.read_instance(&nonce.tenant, &nonce.instance).await {
        Ok(Some(record)) => {
            term.commit(record);
            Ok(())
        }
        Ok(None) => wait_for_adoption(term, nonce).await,
        Err(error) => Err(Refusal::unavailable("STORE_UNAVAILABLE", format!("{}", Chain(&error)))),
    }
}

/// A VM without a record is adopted when a listing shows it. Until one has, nobody can say "unknown".
async fn wait_for_adoption(term: &Arc<Term>, nonce: &AgentNonce) -> Result<(), Refusal> {
    let looked = term.observer.ask(VmRef { instance: nonce.instance, provider_id: None });
    match tokio::time::timeout(LOOK, looked).await {
        Ok(Ok(Described::NotFound)) => Ok(()),
        Ok(Ok(Described::Vm(vm))) if vm.tags == VmTags::Foreign => Ok(()),
        _ => {
            term.want_listing();
            let message = format!("instance {} is about to be adopted; retry", nonce.instance);
            Err(Refusal::unavailable("NOT_READY", message))
        }
    }
}

/// Steps 8 and 9 on the facts at hand.
fn judge(it: &Instance, nonce: &AgentNonce, key: &PublicKey) -> Result<(), Refusal> {
    if it.delete.is_some() || it.create_failure.is_some() {
        let message = format!("instance {} was removed; this machine may be switched off", it.id);
        return Err(Refusal::denied("INSTANCE_DELETED", message));
    }
    // An adopted record does not know the nonce its machine was born with.
    if it.nonce.jti != nonce.jti && !(it.nonce.jti.is_empty() && it.adopted_at.is_some()) {
        let message = format!("instance {} has a newer nonce", it.id);
        return Err(Refusal::unauthenticated("NONCE_SUPERSEDED", message));
    }
    let bound = it.registration.as_ref().map(|registration| registration.public_key == key.to_der());
    match bound {
        // Lost answers cost nothing: the same nonce with the same key again is the same registration.
        None | Some(true) => Ok(()),
        Some(false) => {
            let message = format!("the nonce of instance {} was used with another key", it.id);
            Err(Refusal::unauthenticated("NONCE_USED", message))
        }
    }
}

/// A replay is told loudly: somebody else may have read the nonce.
fn told(term: &Term, it: &Instance, key: &PublicKey, refusal: Refusal) -> Refusal {
    if refusal.reason == "NONCE_USED" {
        let message = "a second key tried to use this instance's nonce; look at the machine before you trust it";
        let bound = it
            .registration
            .as_ref()
            .and_then(|registration| PublicKey::from_der(&registration.public_key).ok())
            .map(|key| key.fingerprint())
            .unwrap_or_default();
        term.tell(
            Tell::instance(Reason::NonceReplayed, &it.group, it.id, message)
                .detail("bound_key", bound)
                .detail("refused_key", key.fingerprint()),
        );
    }
    refusal
}

async fn register_operator(
    term: &Arc<Term>,
    nonce: OperatorNonce,
    parsed: Parsed,
    audit: &mut Audit,
) -> Result<v1::RegisterClientResponse, Refusal> {
    same("WRONG_CLUSTER", "cluster", nonce.cluster.as_str(), term.shared.cluster.as_str())?;
    if !term.applied().config.tenants.contains(&nonce.tenant) {
        let message = format!("tenant {} is not configured in this shard; add it to tenants", nonce.tenant);
        return Err(Refusal::new(tonic::Code::FailedPrecondition, "TENANT_UNKNOWN", message));
    }
    let unavailable = |error: RecordError| {
        let refusal = record_refusal(&term.failed(error));
        Refusal { reason: refusal.reason, ..refusal }
    };
    let existing = term.shared.records.read_operator(&nonce.tenant, &nonce.operator).await.map_err(unavailable)?;
    if existing.as_ref().is_some_and(|record| record.value.revoked.is_some()) {
        return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {} was revoked", nonce.operator)));
    }
    let now = term.shared.clock.now();
    let used = NonceRecord {
        jti: nonce.jti.clone(),
        kind: "operator".to_owned(),
        subject: nonce.operator.to_string(),
        tenant: nonce.tenant.clone(),
        public_key_sha256: sha256(&parsed.key),
        consumed_at: now,
        expires_at: nonce.expires_at,
    };
    // The create of this object is the single use; the same key again is the same use.
    let taken = match term.shared.records.create_nonce(&term.guard, &used).await {
        Ok(Created::New(_)) => None,
        Ok(Created::Existing(existing)) => Some(existing),
        Err(error) => return Err(unavailable(error)),
    };
    if taken.is_some_and(|taken| taken.value.public_key_sha256 != used.public_key_sha256) {
        term.tell(Tell::tenant(Reason::NonceReplayed, &nonce.tenant, "a second key tried to use an operator's nonce"));
        return Err(Refusal::unauthenticated("NONCE_USED", "the nonce was used with another key"));
    }
    let ttl = term.applied().config.certificates.operator_ttl;
    let issued = term.shared.authority.issue_operator(&nonce.operator, &nonce.tenant, &parsed.key, now, ttl)?;
    let fact = cert_fact(&issued);
    let record = OperatorRecord {
        operator_id: nonce.operator,
        tenant: nonce.tenant.clone(),
        cluster: nonce.cluster.clone(),
        public_key: parsed.key.to_der(),
        cert: CertPair { current: fact.clone(), previous: None },
        registered_at: now,
        nonce_jti: Some(nonce.jti.clone()),
        renewed_at: None,
        rejoin: None,
        revoked: None,
    };
    log(term, Some(&nonce.tenant), nonce.operator.to_string(), "operator", &issued).await?;
    let created = match &existing {
        None => term.shared.records.create_operator(&term.guard, &record).await.map_err(unavailable)?,
        Some(current) => Created::Existing(current.clone()),
    };
    if let Created::Existing(current) = created {
        // The answer was lost, or a twin of this call is under way: what the record has gained since is kept.
        let changed = term.shared.records.update_operator(&term.guard, &current, |it| {
            let is_open = it.revoked.is_none() && !is_in(Some(&it.cert), &fact.serial);
            is_open.then(|| OperatorRecord {
                public_key: record.public_key.clone(),
                cert: CertPair { current: fact.clone(), previous: Some(it.cert.current.clone()) },
                nonce_jti: record.nonce_jti.clone(),
                ..it.clone()
            })
        });
        let written = changed.await.map_err(unavailable)?;
        if written.value.revoked.is_some() {
            return Err(Refusal::denied("OPERATOR_REVOKED", format!("operator {} was revoked", nonce.operator)));
        }
    }
    stalled(term)?;
    term.tell(
        Tell::tenant(Reason::CertificateIssued, &nonce.tenant, "operator registered")
            .detail("operator", nonce.operator)
            .detail("serial", &issued.serial),
    );
    audit.serial(&issued.serial);
    Ok(answer(term, &issued, nonce.operator.to_string()))
}

fn sha256(key: &PublicKey) -> String {
    data_encoding::HEXLOWER.encode(ring::digest::digest(&ring::digest::SHA256, &key.to_der()).as_ref())
}

pub(super) fn cert_fact(issued: &Issued) -> CertFact {
    CertFact {
        serial: issued.serial.clone(),
        issuer: issued.issuer_fingerprint.clone(),
        not_before: issued.not_before,
        not_after: issued.not_after,
    }
}

/// Writes the certificate's log entry.
pub(super) async fn log(
    term: &Term,
    tenant: Option<&nstance_core::ids::Tenant>,
    subject: String,
    role: &str,
    issued: &Issued,
) -> Result<(), Refusal> {
    let record = CertlogRecord {
        cluster: term.shared.cluster.clone(),
        shard: Some(term.shared.shard.clone()),
        tenant: tenant.cloned(),
        subject_id: subject,
        issued_at: term.shared.clock.now(),
        certificates: vec![logged(role, issued)],
    };
    term.shared
        .records
        .write_certlog(&term.guard, &record)
        .await
        .map(|_| ())
        .map_err(|error| record_refusal(&UpdateError::Record(error)))
}

/// One certificate as the log keeps it.
pub fn logged(role: &str, issued: &Issued) -> LoggedCertificate {
    LoggedCertificate {
        name: role.to_owned(),
        role: role.to_owned(),
        serial: issued.serial.clone(),
        subject: issued.subject.clone(),
        sans: issued.sans.clone(),
        not_before: issued.not_before,
        not_after: issued.not_after,
        sha256: issued.sha256_der_hex.clone(),
        issuer: issued.issuer_fingerprint.clone(),
    }
}

pub(super) fn answer(term: &Term, issued: &Issued, subject: String) -> v1::RegisterClientResponse {
    v1::RegisterClientResponse {
        client_certificate_pem: issued.chain_pem.clone().into_bytes(),
        expires_at: Some(timestamp(issued.not_after)),
        ca_bundle_pem: term.shared.authority.bundle_pem().into_bytes(),
        renew_after: Some(timestamp(renew_after(issued.not_before, issued.not_after))),
        cluster_id: term.shared.cluster.to_string(),
        subject,
    }
}

impl From<nstance_identity::issue::IssueError> for Refusal {
    fn from(error: nstance_identity::issue::IssueError) -> Self {
        Self::new(tonic::Code::FailedPrecondition, "CA_EXPIRED", error.to_string())
    }
}
