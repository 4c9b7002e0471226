//! One line for each result of a registration, rejoin or renewal: who, by which key, from where, and what came of it.
//!
//! A line says as much as the call came to show. Whose nonce it was is said only once the nonce is known to be ours; of a
//! rejoin the claim is named as it was made, for it is how one learns whom somebody tried to be. Nonces, keys and proofs
//! themselves are never in it.

use std::{net::SocketAddr, sync::Arc};

use nstance_core::ids::Tenant;
use nstance_identity::{keys::PublicKey, role::Role};

use crate::{grpc::status::Refusal, term::Term};

pub(crate) struct Audit {
    term: Arc<Term>,
    /// What came of it, once that is known.
    outcome: Option<Result<(), Refusal>>,
    what: &'static str,
    role: Role,
    remote: Option<SocketAddr>,
    key: String,
    subject: String,
    tenant: String,
    jti: String,
    serial: String,
}

impl Audit {
    pub(crate) fn new(term: &Arc<Term>, what: &'static str, role: Role, remote: Option<SocketAddr>) -> Self {
        let [key, subject, tenant, jti, serial] = std::array::from_fn(|_| String::new());
        Self { term: term.clone(), outcome: None, what, role, remote, key, subject, tenant, jti, serial }
    }

    /// What it turns out to be.
    pub(crate) fn is(&mut self, what: &'static str) {
        self.what = what;
    }

    pub(crate) fn key(&mut self, key: &PublicKey) {
        self.key = key.fingerprint();
    }

    pub(crate) fn subject(&mut self, subject: impl ToString, tenant: &Tenant) {
        (self.subject, self.tenant) = (subject.to_string(), tenant.to_string());
    }

    pub(crate) fn jti(&mut self, jti: &str) {
        jti.clone_into(&mut self.jti);
    }

    pub(crate) fn serial(&mut self, serial: &str) {
        serial.clone_into(&mut self.serial);
    }

    /// Says what came of it, and writes the line.
    pub(crate) fn close<T>(mut self, outcome: &Result<T, Refusal>) {
        self.outcome = Some(outcome.as_ref().map(drop).map_err(Clone::clone));
    }
}

impl Drop for Audit {
    /// A caller that hangs up ends the call wherever it is; what is durable by then stays so.
    fn drop(&mut self) {
        let Self { term, outcome, what, role, remote, key, subject, tenant, jti, serial } = self;
        let (role, epoch) = (role.as_str(), term.epoch());
        let remote = remote.map(|remote| remote.to_string()).unwrap_or_default();
        let refused = |reason: &str, detail: &str| {
            tracing::info!(
                audit = true, what, role, subject, tenant, jti, key, remote, %epoch, reason, detail, "identity refused"
            );
        };
        match outcome {
            Some(Ok(())) => tracing::info!(
                audit = true, what, role, subject, tenant, jti, serial, key, remote, %epoch, "identity given"
            ),
            Some(Err(refusal)) => refused(refusal.reason, &refusal.message),
            None => refused("CANCELLED", "the caller did not wait for the answer"),
        }
    }
}
