//! Certificates that are issued without a server, by whoever has the CA's key. The log comes first, as everywhere: it may
//! list more than was delivered, never less.

use std::time::Duration;

use nstance_core::{ids::Epoch, ports::clock::Entropy, time::Timestamp};
use nstance_identity::{
    ca::{CaProfile, make_ca_certificate},
    issue::Issued,
    keys::KeyPair,
};
use nstance_store::{
    Fence, RecordError, Records,
    records::certlog::{CertlogRecord, LoggedCertificate},
};

#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    #[error("log a certificate")]
    Log(#[source] RecordError),
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
