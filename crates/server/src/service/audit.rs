//! One line for each result of a registration, rejoin or renewal: who, by which key, from where, and what came of it.
//!
//! A line says as much as the call came to show. Whose nonce it was is said only once the nonce is known to be ours; of a
//! rejoin the claim is named as it was made, for it is how one learns whom somebody tried to be. Nonces, keys and proofs
//! themselves are never in it.

use std::net::SocketAddr;

use nstance_core::ids::Tenant;
use nstance_identity::{keys::PublicKey, role::Role};

use crate::{grpc::status::Refusal, term::Term};

pub(super) struct Audit {
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
    pub(super) fn new(what: &'static str, role: Role, remote: Option<SocketAddr>) -> Self {
        let [key, subject, tenant, jti, serial] = std::array::from_fn(|_| String::new());
        Self { what, role, remote, key, subject, tenant, jti, serial }
    }

    /// What it turns out to be.
    pub(super) fn is(&mut self, what: &'static str) {
        self.what = what;
    }

    pub(super) fn key(&mut self, key: &PublicKey) {
        self.key = key.fingerprint();
    }

    pub(super) fn subject(&mut self, subject: impl ToString, tenant: &Tenant) {
        (self.subject, self.tenant) = (subject.to_string(), tenant.to_string());
    }

    pub(super) fn jti(&mut self, jti: &str) {
        jti.clone_into(&mut self.jti);
    }

    pub(super) fn serial(&mut self, serial: &str) {
        serial.clone_into(&mut self.serial);
    }

    /// Writes the line.
    pub(super) fn close(self, term: &Term, refusal: Option<&Refusal>) {
        let Self { what, role, remote, key, subject, tenant, jti, serial } = self;
        let (role, epoch) = (role.as_str(), term.epoch());
        let remote = remote.map(|remote| remote.to_string()).unwrap_or_default();
        match refusal {
            None => tracing::info!(
                audit = true, what, role, subject, tenant, jti, serial, key, remote, %epoch, "identity given"
            ),
            Some(Refusal { reason, message, .. }) => tracing::info!(
                audit = true, what, role, subject, tenant, jti, key, remote, %epoch, reason, detail = message,
                "identity refused"
            ),
        }
    }
}
