//! A consumed operator nonce. That it exists is the consumption; whose key it names may repeat it.

use nstance_core::{ids::Tenant, time::Timestamp};
use serde::{Deserialize, Serialize};

use super::{Meta, Record, text};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonceRecord {
    pub jti: String,
    /// `operator`.
    pub kind: String,
    pub subject: String,
    pub tenant: Tenant,
    /// Hex, of the SPKI that used it.
    pub public_key_sha256: String,
    pub consumed_at: Timestamp,
    pub expires_at: Timestamp,
}

#[derive(Serialize, Deserialize)]
pub struct NonceForm {
    jti: String,
    kind: String,
    subject: String,
    #[serde(with = "text")]
    tenant: Tenant,
    public_key_sha256: String,
    #[serde(with = "text")]
    consumed_at: Timestamp,
    #[serde(with = "text")]
    expires_at: Timestamp,
}

impl Record for NonceRecord {
    type Form = NonceForm;

    fn to_form(&self) -> NonceForm {
        NonceForm {
            jti: self.jti.clone(),
            kind: self.kind.clone(),
            subject: self.subject.clone(),
            tenant: self.tenant.clone(),
            public_key_sha256: self.public_key_sha256.clone(),
            consumed_at: self.consumed_at,
            expires_at: self.expires_at,
        }
    }

    fn from_form(form: NonceForm, _meta: &Meta, _key: &str) -> Result<Self, String> {
        Ok(Self {
            jti: form.jti,
            kind: form.kind,
            subject: form.subject,
            tenant: form.tenant,
            public_key_sha256: form.public_key_sha256,
            consumed_at: form.consumed_at,
            expires_at: form.expires_at,
        })
    }
}
