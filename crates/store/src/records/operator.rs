//! One record per registered operator. It is what an operator's certificate is checked against, and where it ends.

use nstance_core::{
    ids::{ClusterId, OperatorId, Tenant},
    instance::{CertPair, Rejoin},
    time::Timestamp,
};
use serde::{Deserialize, Serialize};

use super::{
    Meta, Record,
    instance::{CertPairForm, RejoinForm, base64},
    key::parse_operator_key,
    text,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorRecord {
    pub operator_id: OperatorId,
    pub tenant: Tenant,
    pub cluster: ClusterId,
    /// SPKI, DER.
    pub public_key: Vec<u8>,
    pub cert: CertPair,
    pub registered_at: Timestamp,
    /// Absent if the admin tool issued it.
    pub nonce_jti: Option<String>,
    pub renewed_at: Option<Timestamp>,
    pub rejoin: Option<Rejoin>,
    pub revoked: Option<Revoked>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revoked {
    pub at: Timestamp,
    pub by: String,
    pub reason: String,
}

#[derive(Serialize, Deserialize)]
pub struct OperatorForm {
    #[serde(with = "text")]
    operator_id: OperatorId,
    #[serde(with = "text")]
    tenant: Tenant,
    #[serde(with = "text")]
    cluster_id: ClusterId,
    #[serde(with = "base64")]
    public_key: Vec<u8>,
    cert: CertPairForm,
    #[serde(with = "text")]
    registered_at: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    nonce_jti: Option<String>,
    #[serde(default, with = "text::option", skip_serializing_if = "Option::is_none")]
    renewed_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rejoin: Option<RejoinForm>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    revoked: Option<RevokedForm>,
}

#[derive(Serialize, Deserialize)]
struct RevokedForm {
    #[serde(with = "text")]
    at: Timestamp,
    by: String,
    reason: String,
}

impl Record for OperatorRecord {
    type Form = OperatorForm;

    fn to_form(&self) -> OperatorForm {
        OperatorForm {
            operator_id: self.operator_id,
            tenant: self.tenant.clone(),
            cluster_id: self.cluster.clone(),
            public_key: self.public_key.clone(),
            cert: (&self.cert).into(),
            registered_at: self.registered_at,
            nonce_jti: self.nonce_jti.clone(),
            renewed_at: self.renewed_at,
            rejoin: self.rejoin.as_ref().map(Into::into),
            revoked: self.revoked.as_ref().map(|it| RevokedForm {
                at: it.at,
                by: it.by.clone(),
                reason: it.reason.clone(),
            }),
        }
    }

    fn from_form(form: OperatorForm, _meta: &Meta, key: &str) -> Result<Self, String> {
        // A record copied under another tenant's key would carry its rights over.
        if let Some((tenant, id)) = parse_operator_key(key)
            && (tenant != form.tenant || id != form.operator_id)
        {
            return Err(format!(
                "the record is of operator {} of tenant {}, not of the one its key names",
                form.operator_id, form.tenant
            ));
        }
        Ok(Self {
            operator_id: form.operator_id,
            tenant: form.tenant,
            cluster: form.cluster_id,
            public_key: form.public_key,
            cert: form.cert.into(),
            registered_at: form.registered_at,
            nonce_jti: form.nonce_jti,
            renewed_at: form.renewed_at,
            rejoin: form.rejoin.map(Into::into),
            revoked: form.revoked.map(|it| Revoked { at: it.at, by: it.by, reason: it.reason }),
        })
    }
}
