//! Records below `cluster/` and the certificate log: operators, consumed nonces, issued certificates. Leaders of every
//! shard and the admin tool write here, so compare-and-swap protects and the epoch only informs.

use std::time::Duration;

use nstance_core::{
    ids::{OperatorId, Tenant},
    ports::objects::Condition,
};

use super::{Outcome, RecordError, Records};
use crate::{
    fence::{Fence, Scope},
    records::{
        self, DecodeError, Extra, Versioned, certlog::CertlogRecord, certlog_key, cluster_certlog_key,
        nonce::NonceRecord, nonce_key, operator::OperatorRecord, operator_key, operator_prefix,
    },
};

/// Outcome of a create that may find its place taken.
#[derive(Debug, Clone, PartialEq)]
pub enum Created<T> {
    New(Versioned<T>),
    /// Somebody was first; this is what they wrote.
    Existing(Versioned<T>),
}

/// All operators of a tenant. What does not parse is told, not dropped.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OperatorList {
    pub operators: Vec<Versioned<OperatorRecord>>,
    pub problems: Vec<DecodeError>,
}

/// Entries of one subject within one second; more than this in the same millisecond is a loop somewhere.
const MAX_CLASHES: u64 = 1000;

impl Records {
    async fn create<T: records::Record + Clone>(
        &self,
        fence: Fence<'_>,
        key: &str,
        value: &T,
    ) -> Result<Created<T>, RecordError> {
        match self.put(fence, key, value, &Extra::default(), Condition::Create).await? {
            Outcome::Done(made) => Ok(Created::New(made)),
            Outcome::Refused(Some(there)) => Ok(Created::Existing(there)),
            Outcome::Refused(None) => Err(RecordError::Busy { key: key.to_owned() }),
        }
    }

    /// Logs issued certificates and answers the entry's key. A name that is taken is tried a millisecond later.
    pub async fn write_certlog(
        &self,
        fence: impl Into<Fence<'_>>,
        entry: &CertlogRecord,
    ) -> Result<String, RecordError> {
        let fence = fence.into();
        let mut key = String::new();
        for later in 0..MAX_CLASHES {
            let at = entry.issued_at.plus(Duration::from_millis(later));
            key = match &entry.shard {
                Some(shard) => certlog_key(shard, entry.tenant.as_ref(), at, &entry.subject_id),
                None => cluster_certlog_key(entry.tenant.as_ref(), at, &entry.subject_id),
            };
            match self.put(fence, &key, entry, &Extra::default(), Condition::Create).await {
                Ok(Outcome::Done(_)) => return Ok(key),
                // Taken, by a readable entry or not; entries are never changed.
                Ok(Outcome::Refused(_)) | Err(RecordError::Corrupt { .. } | RecordError::TooNew { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Err(RecordError::Busy { key })
    }

    /// Consumes a nonce: of any number of callers anywhere, one gets [`Created::New`], the others what it wrote.
    pub async fn create_nonce(
        &self,
        fence: impl Into<Fence<'_>>,
        nonce: &NonceRecord,
    ) -> Result<Created<NonceRecord>, RecordError> {
        self.create(fence.into(), &nonce_key(&nonce.jti), nonce).await
    }

    pub async fn read_nonce(&self, jti: &str) -> Result<Option<Versioned<NonceRecord>>, RecordError> {
        self.read(&nonce_key(jti)).await
    }

    /// Only long after its expiry: without the record the nonce could be used again.
    pub async fn forget_nonce(&self, fence: impl Into<Fence<'_>>, jti: &str) -> Result<(), RecordError> {
        self.delete(fence.into(), &nonce_key(jti)).await
    }

    pub async fn create_operator(
        &self,
        fence: impl Into<Fence<'_>>,
        operator: &OperatorRecord,
    ) -> Result<Created<OperatorRecord>, RecordError> {
        self.create(fence.into(), &operator_key(&operator.tenant, &operator.operator_id), operator).await
    }

    /// `None` on the store's own word only.
    pub async fn read_operator(
        &self,
        tenant: &Tenant,
        operator: &OperatorId,
    ) -> Result<Option<Versioned<OperatorRecord>>, RecordError> {
        self.read(&operator_key(tenant, operator)).await
    }

    /// Looks whether the record changed; answers what is there now, `None` if it is gone.
    pub async fn refresh_operator(
        &self,
        known: &Versioned<OperatorRecord>,
    ) -> Result<Option<Versioned<OperatorRecord>>, RecordError> {
        let key = operator_key(&known.value.tenant, &known.value.operator_id);
        match self.inner.store.get_if_changed(&key, &known.etag).await {
            Ok(None) => Ok(Some(known.clone())),
            Ok(Some(object)) => Ok(Some(records::decode_object(&key, object)?)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(RecordError::Store(error)),
        }
    }

    /// The rules of [`Records::update_instance`] hold for `change`.
    pub async fn update_operator(
        &self,
        fence: impl Into<Fence<'_>>,
        current: &Versioned<OperatorRecord>,
        change: impl Fn(&OperatorRecord) -> Option<OperatorRecord>,
    ) -> Result<Versioned<OperatorRecord>, RecordError> {
        let key = operator_key(&current.value.tenant, &current.value.operator_id);
        self.update(fence.into(), Scope::Cluster, &key, current, change).await
    }

    /// For the admin tool, after revocation.
    pub async fn delete_operator(
        &self,
        fence: impl Into<Fence<'_>>,
        tenant: &Tenant,
        operator: &OperatorId,
    ) -> Result<(), RecordError> {
        self.delete(fence.into(), &operator_key(tenant, operator)).await
    }

    pub async fn list_operators(&self, tenant: &Tenant) -> Result<OperatorList, RecordError> {
        let listed = self.inner.store.list(&operator_prefix(tenant)).await.map_err(RecordError::Store)?;
        let mut list = OperatorList::default();
        for entry in listed {
            match self.read(&entry.key).await {
                Ok(Some(operator)) => list.operators.push(operator),
                Ok(None) => {} // deleted since the listing
                Err(RecordError::Corrupt { key, line, column, message }) => {
                    list.problems.push(DecodeError::Corrupt { key, line, column, message });
                }
                Err(RecordError::TooNew { key, version }) => list.problems.push(DecodeError::TooNew { key, version }),
                Err(error) => return Err(error),
            }
        }
        Ok(list)
    }
}
