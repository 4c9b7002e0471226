//! Issuing: the profiles of all certificates, and the writing of X.509 itself.
//!
//! Nobody sends a request to be signed; a certificate is the CA's statement about a public key, and every name in it is
//! chosen here or in the config, never by the holder of the key.

use std::time::Duration;

use data_encoding::HEXLOWER;
use nstance_core::{
    ids::{ClusterId, InstanceId, OperatorId, ServerId, Shard, Tenant},
    ports::clock::{Entropy, random},
    time::Timestamp,
};
use ring::digest::{SHA256, digest};
use x509_parser::time::ASN1Time;

use crate::{
    ca::Ca,
    der,
    keys::{KeyPair, PublicKey},
    pem,
    role::{ROLE_OID, Role},
    subject::{San, Subject},
};

/// Machines whose clocks are a little behind must accept what was issued a moment ago.
pub const BACKDATING: Duration = Duration::from_secs(300);

/// Life of a server's own certificate; it renews itself in memory.
pub const SERVER_TTL: Duration = Duration::from_secs(7 * 86_400);

const ED25519_OID: [u32; 4] = [1, 3, 101, 112];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IssueError {
    #[error("CA {fingerprint} ends at {not_after} and issues nothing more; run nstance-admin cluster rotate-ca")]
    CaExpired { fingerprint: String, not_after: Timestamp },
}

/// A certificate and what the certlog and the records say of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// The certificate alone: it is signed by a CA that everybody holds already, so there is no chain to send.
    pub chain_pem: String,
    /// 32 hex digits.
    pub serial: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    /// For people: `CN=…, O=…`.
    pub subject: String,
    /// For people: `DNS:…`, `IP:…`, `URI:…`.
    pub sans: Vec<String>,
    /// SHA-256 of the DER, 64 hex digits.
    pub sha256_der_hex: String,
    pub issuer_fingerprint: String,
}

pub struct ServerProfile {
    pub server: ServerId,
    pub cluster: ClusterId,
    pub shard: Shard,
    /// Hosts that clients dial, beyond `nstance-server`, `localhost` and loopback, which are always there.
    pub sans: Vec<San>,
}

/// What a file certificate may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileUsage {
    Client,
    Server,
    Peer,
}

/// A rendered `certificates.<name>` of the config. There is no way to give it a role.
pub struct FileProfile {
    pub subject: Subject,
    pub sans: Vec<San>,
    pub usage: FileUsage,
}

impl Ca {
    pub fn issue_server(
        &self,
        profile: &ServerProfile,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        let subject = Subject {
            common_name: profile.server.to_string(),
            organization: vec![profile.cluster.to_string()],
            organizational_unit: vec![profile.shard.to_string()],
            ..Subject::default()
        };
        let own = ["nstance-server", "localhost", "127.0.0.1", "::1"];
        let mut sans: Vec<San> = own.iter().map(|it| San::host(it).expect("a constant, well-formed host")).collect();
        for san in &profile.sans {
            if !sans.contains(san) {
                sans.push(san.clone());
            }
        }
        self.issue(&subject, &sans, Usage::Peer, Some(Role::Server), key, now, ttl, entropy)
    }

    pub fn issue_agent(
        &self,
        instance: &InstanceId,
        tenant: &Tenant,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        self.issue_client(instance.to_string(), tenant, Role::Agent, key, now, ttl, entropy)
    }

    pub fn issue_operator(
        &self,
        operator: &OperatorId,
        tenant: &Tenant,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        self.issue_client(operator.to_string(), tenant, Role::Operator, key, now, ttl, entropy)
    }

    pub fn issue_file(
        &self,
        profile: &FileProfile,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        let usage = match profile.usage {
            FileUsage::Client => Usage::Client,
            FileUsage::Server => Usage::Server,
            FileUsage::Peer => Usage::Peer,
        };
        self.issue(&profile.subject, &profile.sans, usage, None, key, now, ttl, entropy)
    }

    #[expect(clippy::too_many_arguments, reason = "private; a struct would only repeat the callers' arguments")]
    fn issue_client(
        &self,
        common_name: String,
        tenant: &Tenant,
        role: Role,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        let subject = Subject { common_name, organization: vec![tenant.to_string()], ..Subject::default() };
        self.issue(&subject, &[], Usage::Client, Some(role), key, now, ttl, entropy)
    }

    #[expect(clippy::too_many_arguments, reason = "private; a struct would only repeat the callers' arguments")]
    fn issue(
        &self,
        subject: &Subject,
        sans: &[San],
        profile: Usage,
        role: Option<Role>,
        key: &PublicKey,
        now: Timestamp,
        ttl: Duration,
        entropy: &dyn Entropy,
    ) -> Result<Issued, IssueError> {
        let ca = self.bundle().issuer();
        if ca.not_after <= now {
            return Err(IssueError::CaExpired { fingerprint: ca.fingerprint.clone(), not_after: ca.not_after });
        }
        let draft = Draft {
            issuer: &ca.subject,
            issuer_key_id: &ca.key_id,
            subject,
            key,
            not_before: now.minus(BACKDATING),
            not_after: now.plus(ttl).min(ca.not_after),
            sans,
            profile,
            role,
        };
        Ok(draft.sign(self.key(), entropy))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usage {
    Ca,
    Client,
    Server,
    Peer,
}

/// A certificate before its signature.
pub(crate) struct Draft<'a> {
    pub(crate) issuer: &'a [u8],
    pub(crate) issuer_key_id: &'a [u8],
    pub(crate) subject: &'a Subject,
    pub(crate) key: &'a PublicKey,
    pub(crate) not_before: Timestamp,
    pub(crate) not_after: Timestamp,
    pub(crate) sans: &'a [San],
    pub(crate) profile: Usage,
    pub(crate) role: Option<Role>,
}

impl Draft<'_> {
    pub(crate) fn sign(&self, signer: &KeyPair, entropy: &dyn Entropy) -> Issued {
        let serial = new_serial(entropy);
        let der = self.to_der(serial, self.extensions(), signer);
        Issued {
            chain_pem: pem::certificate(&der),
            serial: HEXLOWER.encode(&serial),
            not_before: whole_seconds(self.not_before),
            not_after: whole_seconds(self.not_after),
            subject: self.subject.to_string(),
            sans: self.sans.iter().map(San::to_string).collect(),
            sha256_der_hex: HEXLOWER.encode(digest(&SHA256, &der).as_ref()),
            issuer_fingerprint: signer.fingerprint(),
        }
    }

    pub(crate) fn to_der(&self, serial: [u8; 16], extensions: Vec<Vec<u8>>, signer: &KeyPair) -> Vec<u8> {
        let algorithm = der::sequence(&[der::oid(&ED25519_OID)]);
        let version_three = der::explicit(0, &der::unsigned(&[2]));
        let validity =
            der::sequence(&[der::time(whole_seconds(self.not_before)), der::time(whole_seconds(self.not_after))]);
        let tbs = der::sequence(&[
            version_three,
            der::unsigned(&serial),
            algorithm.clone(),
            self.issuer.to_vec(),
            validity,
            self.subject.to_der(),
            self.key.to_der(),
            der::explicit(3, &der::sequence(&extensions)),
        ]);
        let signature = der::bits(&signer.sign(&tbs));
        der::sequence(&[tbs, algorithm, signature])
    }

    pub(crate) fn extensions(&self) -> Vec<Vec<u8>> {
        let ca = self.profile == Usage::Ca;
        let constraints = if ca { vec![der::boolean(true), der::unsigned(&[0])] } else { vec![] };
        // Bits from the left: digitalSignature is 0, keyCertSign 5, cRLSign 6.
        let usage = if ca { 0b0000_0110 } else { 0b1000_0000 };
        let server_auth = der::oid(&[1, 3, 6, 1, 5, 5, 7, 3, 1]);
        let client_auth = der::oid(&[1, 3, 6, 1, 5, 5, 7, 3, 2]);
        let purposes = match self.profile {
            Usage::Ca => vec![],
            Usage::Client => vec![client_auth],
            Usage::Server => vec![server_auth],
            Usage::Peer => vec![server_auth, client_auth],
        };
        let mut extensions = vec![
            extension(&[2, 5, 29, 19], true, &der::sequence(&constraints)),
            extension(&[2, 5, 29, 15], true, &der::flags(usage)),
            extension(&[2, 5, 29, 14], false, &der::octets(&key_id(self.key))),
            extension(&[2, 5, 29, 35], false, &der::sequence(&[der::implicit(0, self.issuer_key_id)])),
        ];
        if !purposes.is_empty() {
            extensions.push(extension(&[2, 5, 29, 37], false, &der::sequence(&purposes)));
        }
        if !self.sans.is_empty() {
            let sans: Vec<_> = self.sans.iter().map(San::to_der).collect();
            extensions.push(extension(&[2, 5, 29, 17], false, &der::sequence(&sans)));
        }
        if let Some(role) = self.role {
            extensions.push(role_extension(&role.to_der()));
        }
        extensions
    }
}

fn extension(oid: &[u32], critical: bool, value: &[u8]) -> Vec<u8> {
    let mut parts = vec![der::oid(oid)];
    if critical {
        parts.push(der::boolean(true)); // false is the default, and DER leaves defaults out
    }
    parts.push(der::octets(value));
    der::sequence(&parts)
}

pub(crate) fn role_extension(value: &[u8]) -> Vec<u8> {
    extension(&ROLE_OID, false, value)
}

/// RFC 7093, method 1: the leftmost 160 bits of the key's SHA-256.
pub(crate) fn key_id(key: &PublicKey) -> Vec<u8> {
    digest(&SHA256, key.raw()).as_ref()[..20].to_vec()
}

/// Sixteen random bytes, positive and not zero.
fn new_serial(entropy: &dyn Entropy) -> [u8; 16] {
    let mut serial: [u8; 16] = random(entropy);
    serial[0] &= 0x7f;
    if serial == [0; 16] {
        serial[15] = 1;
    }
    serial
}

/// X.509 knows no fractions; records must say what the certificate says.
fn whole_seconds(at: Timestamp) -> Timestamp {
    let millis = at.as_millis().clamp(0, der::END_OF_TIME);
    Timestamp::from_millis(millis - millis % 1000)
}

pub(crate) fn from_asn1(time: ASN1Time) -> Timestamp {
    Timestamp::from_millis(time.timestamp().saturating_mul(1000))
}

#[cfg(test)]
#[path = "issue/tests.rs"]
mod tests;
