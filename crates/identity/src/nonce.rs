//! Registration nonces: signed statements that the bearer may register as one instance, or as one operator, once.
//!
//! They are JWTs with exactly one algorithm. The token's own `alg` is only ever compared with `EdDSA`, never used to
//! choose a verification, which is what the classic forgeries (`none`, HMAC keyed with the public key) live on. A
//! general JWT library was refused because it reads the machine's clock. That a nonce is used once is the business of
//! the records; here only who signed it, for whom, and until when.
//!
//! Signing is deterministic: the same claims give the same bytes, so a nonce need not be stored to be made again.

use std::time::Duration;

use data_encoding::{BASE64URL_NOPAD, HEXLOWER};
use nstance_core::{
    ids::{ClusterId, GroupKey, InstanceId, OperatorId, Shard, Tenant},
    ports::clock::{Entropy, random},
    time::Timestamp,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::keys::{KeyPair, PublicKey};

/// Longest token that is looked at.
pub const MAX_NONCE: usize = 4096;

/// How far two clocks may be apart before a nonce is called expired or early.
pub const LEEWAY: Duration = Duration::from_secs(60);

const ISSUER: &str = "nstance-server";
const AUDIENCE: &str = "nstance-registration";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NonceError {
    #[error("registration nonce has {len} bytes; at most {MAX_NONCE} are looked at")]
    TooLong { len: usize },
    /// Says nothing more on purpose: whoever forges gets no hints.
    #[error("registration nonce is not valid; give the machine or operator a new one")]
    Invalid,
    #[error("registration nonce is of kind `{got}`, this call needs kind `{wanted}`")]
    WrongKind { wanted: &'static str, got: String },
    #[error("registration nonce expired at {at}; give the machine or operator a new one")]
    Expired { at: Timestamp },
    #[error("registration nonce is valid from {from}; check the clocks of both sides, then try again")]
    NotYetValid { from: Timestamp },
}

impl NonceError {
    /// The reason on the wire.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::TooLong { .. } => "BAD_REQUEST",
            Self::Invalid => "NONCE_INVALID",
            Self::WrongKind { .. } => "NONCE_WRONG_KIND",
            Self::Expired { .. } => "NONCE_EXPIRED",
            Self::NotYetValid { .. } => "NONCE_NOT_YET_VALID",
        }
    }
}

/// What an agent's nonce says. Times are kept to the second.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentNonce {
    pub instance: InstanceId,
    /// 32 hex digits.
    pub jti: String,
    pub issued_at: Timestamp,
    pub expires_at: Timestamp,
    pub cluster: ClusterId,
    pub tenant: Tenant,
    pub shard: Shard,
    pub group: GroupKey,
    pub on_demand: bool,
    pub config_hash: String,
}

/// What an operator's nonce says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OperatorNonce {
    pub operator: OperatorId,
    pub jti: String,
    pub issued_at: Timestamp,
    pub expires_at: Timestamp,
    pub cluster: ClusterId,
    pub tenant: Tenant,
}

/// A fresh `jti`.
pub fn new_jti(entropy: &dyn Entropy) -> String {
    HEXLOWER.encode(&random::<16>(entropy))
}

#[derive(Serialize, Deserialize)]
struct Header {
    alg: String,
    typ: String,
    kid: String,
}

/// The claims as they travel. The order of the fields is part of the bytes, and so of the signature.
#[derive(Serialize, Deserialize)]
struct Claims {
    iss: String,
    aud: String,
    sub: String,
    jti: String,
    iat: i64,
    nbf: i64,
    exp: i64,
    kind: String,
    cluster_id: String,
    tenant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    on_demand: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    config_hash: Option<String>,
}

const AGENT: &str = "agent";
const OPERATOR: &str = "operator";

fn seconds(at: Timestamp) -> i64 {
    at.as_millis().div_euclid(1000)
}

fn from_seconds(seconds: i64) -> Timestamp {
    Timestamp::from_millis(seconds.saturating_mul(1000))
}

fn claims(kind: &str, sub: String, jti: &str, from: Timestamp, until: Timestamp) -> Claims {
    Claims {
        iss: ISSUER.to_owned(),
        aud: AUDIENCE.to_owned(),
        sub,
        jti: jti.to_owned(),
        iat: seconds(from),
        nbf: seconds(from.minus(LEEWAY)),
        exp: seconds(until),
        kind: kind.to_owned(),
        cluster_id: String::new(),
        tenant: String::new(),
        shard: None,
        group: None,
        on_demand: None,
        config_hash: None,
    }
}

pub fn sign_agent_nonce(key: &KeyPair, nonce: &AgentNonce) -> String {
    let base = claims(AGENT, nonce.instance.to_string(), &nonce.jti, nonce.issued_at, nonce.expires_at);
    let claims = Claims {
        cluster_id: nonce.cluster.to_string(),
        tenant: nonce.tenant.to_string(),
        shard: Some(nonce.shard.to_string()),
        group: Some(nonce.group.to_string()),
        on_demand: Some(nonce.on_demand),
        config_hash: Some(nonce.config_hash.clone()),
        ..base
    };
    sign(key, &claims)
}

pub fn sign_operator_nonce(key: &KeyPair, nonce: &OperatorNonce) -> String {
    let base = claims(OPERATOR, nonce.operator.to_string(), &nonce.jti, nonce.issued_at, nonce.expires_at);
    sign(key, &Claims { cluster_id: nonce.cluster.to_string(), tenant: nonce.tenant.to_string(), ..base })
}

fn sign(key: &KeyPair, claims: &Claims) -> String {
    let header = Header { alg: "EdDSA".to_owned(), typ: "JWT".to_owned(), kid: key.fingerprint() };
    let mut token = format!("{}.{}", part(&header), part(claims));
    let signature = key.sign(token.as_bytes());
    token.push('.');
    BASE64URL_NOPAD.encode_append(&signature, &mut token);
    token
}

fn part(value: &impl Serialize) -> String {
    BASE64URL_NOPAD.encode(&serde_json::to_vec(value).expect("strings and numbers always serialise"))
}

fn read<T: DeserializeOwned>(part: &str) -> Result<T, NonceError> {
    let bytes = BASE64URL_NOPAD.decode(part.as_bytes()).map_err(|_| NonceError::Invalid)?;
    serde_json::from_slice(&bytes).map_err(|_| NonceError::Invalid)
}

/// The public halves of all nonce keys in use; while the key is being replaced there are two.
#[derive(Debug, Clone)]
pub struct NonceKeys(Vec<PublicKey>);

impl NonceKeys {
    pub fn new(keys: impl IntoIterator<Item = PublicKey>) -> Self {
        Self(keys.into_iter().collect())
    }

    pub fn verify_agent(&self, token: &str, now: Timestamp) -> Result<AgentNonce, NonceError> {
        let claims = self.verify(token, AGENT, now)?;
        let (Some(shard), Some(group), Some(on_demand), Some(config_hash)) =
            (claims.shard, claims.group, claims.on_demand, claims.config_hash)
        else {
            return Err(NonceError::Invalid);
        };
        Ok(AgentNonce {
            instance: claims.sub.parse().map_err(|_| NonceError::Invalid)?,
            jti: claims.jti,
            issued_at: from_seconds(claims.iat),
            expires_at: from_seconds(claims.exp),
            cluster: claims.cluster_id.parse().map_err(|_| NonceError::Invalid)?,
            tenant: claims.tenant.parse().map_err(|_| NonceError::Invalid)?,
            shard: shard.parse().map_err(|_| NonceError::Invalid)?,
            group: group.parse().map_err(|_| NonceError::Invalid)?,
            on_demand,
            config_hash,
        })
    }

    pub fn verify_operator(&self, token: &str, now: Timestamp) -> Result<OperatorNonce, NonceError> {
        let claims = self.verify(token, OPERATOR, now)?;
        Ok(OperatorNonce {
            operator: claims.sub.parse().map_err(|_| NonceError::Invalid)?,
            jti: claims.jti,
            issued_at: from_seconds(claims.iat),
            expires_at: from_seconds(claims.exp),
            cluster: claims.cluster_id.parse().map_err(|_| NonceError::Invalid)?,
            tenant: claims.tenant.parse().map_err(|_| NonceError::Invalid)?,
        })
    }

    /// Signature first: nothing the token says is believed, not even its kind, before we know that we said it.
    fn verify(&self, token: &str, wanted: &'static str, now: Timestamp) -> Result<Claims, NonceError> {
        if MAX_NONCE < token.len() {
            return Err(NonceError::TooLong { len: token.len() });
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(NonceError::Invalid)?;
        let (header, body) = signed.split_once('.').ok_or(NonceError::Invalid)?;
        let header: Header = read(header)?;
        if header.alg != "EdDSA" || header.typ != "JWT" {
            return Err(NonceError::Invalid);
        }
        let key = self.0.iter().find(|key| key.fingerprint() == header.kid).ok_or(NonceError::Invalid)?;
        let signature = BASE64URL_NOPAD.decode(signature.as_bytes()).map_err(|_| NonceError::Invalid)?;
        if !key.verify(signed.as_bytes(), &signature) {
            return Err(NonceError::Invalid);
        }
        let claims: Claims = read(body)?;
        if claims.iss != ISSUER || claims.aud != AUDIENCE || !is_jti(&claims.jti) {
            return Err(NonceError::Invalid);
        }
        if claims.kind != wanted {
            return Err(NonceError::WrongKind { wanted, got: claims.kind });
        }
        let (from, until) = (from_seconds(claims.nbf), from_seconds(claims.exp));
        if until.plus(LEEWAY) < now {
            return Err(NonceError::Expired { at: until });
        }
        if now.plus(LEEWAY) < from {
            return Err(NonceError::NotYetValid { from });
        }
        Ok(claims)
    }
}

fn is_jti(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// What a nonce claims, **not verified**: for its bearer, who has no key to verify it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeekedClaims {
    pub subject: String,
    pub kind: String,
    pub expires_at: Timestamp,
    pub cluster: String,
    pub tenant: String,
    pub shard: Option<String>,
    pub config_hash: Option<String>,
}

pub fn peek_claims(token: &str) -> Result<PeekedClaims, NonceError> {
    if MAX_NONCE < token.len() {
        return Err(NonceError::TooLong { len: token.len() });
    }
    let mut parts = token.split('.');
    let (Some(_), Some(body), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return Err(NonceError::Invalid);
    };
    let claims: Claims = read(body)?;
    Ok(PeekedClaims {
        subject: claims.sub,
        kind: claims.kind,
        expires_at: from_seconds(claims.exp),
        cluster: claims.cluster_id,
        tenant: claims.tenant,
        shard: claims.shard,
        config_hash: claims.config_hash,
    })
}

#[cfg(test)]
#[path = "nonce/tests.rs"]
mod tests;
