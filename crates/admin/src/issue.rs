//! Certificates that are issued without a server, by whoever has the CA's key. The log comes first, as everywhere: it may
//! list more than was delivered, never less.

use std::time::Duration;

use nstance_core::{
    ids::{ClusterId, Epoch, OperatorId, Tenant},
    instance::{CertFact, CertPair},
    ports::clock::Entropy,
    time::Timestamp,
};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{self, Issued},
    keys::{KeyPair, PublicKey},
};
use nstance_store::{
    Fence, RecordError, Records,
    cas::Created,
    records::{
        certlog::{CertlogRecord, LoggedCertificate},
        operator::OperatorRecord,
    },
};

#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("log a certificate")]
    Log(#[source] RecordError),
    #[error("issue a certificate for operator {operator}")]
    Sign { operator: OperatorId, source: issue::IssueError },
    #[error("record operator {operator}")]
    Record { operator: OperatorId, source: RecordError },
    #[error("operator {operator} exists already; give another id, or none")]
    Exists { operator: OperatorId },
}

/// An operator to be.
pub struct NewOperator {
    pub operator: OperatorId,
    pub tenant: Tenant,
    pub cluster: ClusterId,
    pub key: PublicKey,
    pub ttl: Duration,
}

/// Issues an operator's first certificate: signed, logged, then recorded. Creating the record is the commit; whoever has
/// the certificate without it is nobody.
pub async fn issue_operator(
    ca: &Ca,
    records: &Records,
    new: &NewOperator,
    now: Timestamp,
    entropy: &dyn Entropy,
) -> Result<Issued, IssueError> {
    let NewOperator { operator, tenant, cluster, key, ttl } = new;
    let operator = *operator;
    let issued = ca
        .issue_operator(&operator, tenant, key, now, *ttl, entropy)
        .map_err(|source| IssueError::Sign { operator, source })?;
    let entry = CertlogRecord {
        cluster: cluster.clone(),
        shard: None,
        tenant: Some(tenant.clone()),
        subject_id: operator.to_string(),
        issued_at: now,
        certificates: vec![logged("operator", &issued)],
    };
    records.write_certlog(Fence::Epoch(Epoch(0)), &entry).await.map_err(IssueError::Log)?;
    let current = CertFact {
        serial: issued.serial.clone(),
        issuer: issued.issuer_fingerprint.clone(),
        not_before: issued.not_before,
        not_after: issued.not_after,
    };
    let record = OperatorRecord {
        operator_id: operator,
        tenant: tenant.clone(),
        cluster: cluster.clone(),
        public_key: key.to_der(),
        cert: CertPair { current, previous: None },
        registered_at: now,
        nonce_jti: None,
        renewed_at: None,
        rejoin: None,
        revoked: None,
    };
    let created = records.create_operator(Fence::Epoch(Epoch(0)), &record).await;
    match created.map_err(|source| IssueError::Record { operator, source })? {
        Created::New(_) => Ok(issued),
        Created::Existing(_) => Err(IssueError::Exists { operator }),
    }
}

/// A CA certificate of the key, logged before anybody can see it.
pub async fn new_ca_certificate(
    key: &KeyPair,
    profile: &CaProfile,
    records: &Records,
    now: Timestamp,
    entropy: &dyn Entropy,
) -> Result<String, IssueError> {
    let issued = make_ca_certificate(key, profile, now, entropy);
    let record = CertlogRecord {
        cluster: profile.cluster.clone(),
        shard: None,
        tenant: None,
        subject_id: issued.issuer_fingerprint.clone(),
        issued_at: now,
        certificates: vec![logged("ca", &issued)],
    };
    let records = records.within(Duration::from_secs(5));
    records.write_certlog(Fence::Epoch(Epoch(0)), &record).await.map_err(IssueError::Log)?;
    Ok(issued.chain_pem)
}

/// One certificate as the log keeps it.
fn logged(role: &str, issued: &Issued) -> LoggedCertificate {
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
