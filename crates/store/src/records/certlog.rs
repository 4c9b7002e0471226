//! The certificate log: every certificate of every profile, with its real serial, before it is delivered. It may list
//! more than was delivered, never less. Entries are made once and never changed.

use nstance_core::{
    ids::{ClusterId, Shard, Tenant},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};

use super::{Meta, Record, text};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertlogRecord {
    pub cluster: ClusterId,
    /// `None`: a CA, or issued by the admin tool; the entry lives under `cluster/`.
    pub shard: Option<Shard>,
    /// `None`: a server's or a CA's, written as `_system`.
    pub tenant: Option<Tenant>,
    pub subject_id: String,
    pub issued_at: Timestamp,
    pub certificates: Vec<LoggedCertificate>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedCertificate {
    pub name: String,
    pub role: String,
    /// 32 hex digits.
    pub serial: String,
    pub subject: String,
    #[serde(default)]
    pub sans: Vec<String>,
    #[serde(with = "text")]
    pub not_before: Timestamp,
    #[serde(with = "text")]
    pub not_after: Timestamp,
    /// Of the DER, hex.
    pub sha256: String,
    /// Fingerprint of the CA.
    pub issuer: String,
}

#[derive(Serialize, Deserialize)]
pub struct CertlogForm {
    #[serde(with = "text")]
    cluster_id: ClusterId,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    shard: Option<Shard>,
    tenant: String,
    subject_id: String,
    #[serde(with = "text")]
    issued_at: Timestamp,
    batch_size: usize,
    certificates: Vec<LoggedCertificate>,
}

const SYSTEM: &str = "_system";

impl Record for CertlogRecord {
    type Form = CertlogForm;

    fn to_form(&self) -> CertlogForm {
        CertlogForm {
            cluster_id: self.cluster.clone(),
            shard: self.shard.clone(),
            tenant: self.tenant.as_ref().map_or(SYSTEM, Tenant::as_str).to_owned(),
            subject_id: self.subject_id.clone(),
            issued_at: self.issued_at,
            batch_size: self.certificates.len(),
            certificates: self.certificates.clone(),
        }
    }

    fn from_form(form: CertlogForm, _meta: &Meta, _key: &str) -> Result<Self, String> {
        let tenant = match form.tenant.as_str() {
            SYSTEM => None,
            tenant => Some(tenant.parse().map_err(|error: nstance_core::ids::IdError| error.to_string())?),
        };
        Ok(Self {
            cluster: form.cluster_id,
            shard: form.shard,
            tenant,
            subject_id: form.subject_id,
            issued_at: form.issued_at,
            certificates: form.certificates,
        })
    }
}
