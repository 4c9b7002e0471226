//! Objects in this process's memory: linearizable under one mutex, and the oracle of the contract suite.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use nstance_core::ports::objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError, StoreFault};

use crate::key::{check_key, check_prefix};

/// Nothing here is durable: it ends with the process. For tests, simulations and a development plane.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Counts writes. Versions are never used twice, not even by a key that was deleted and made again.
    n_writes: u64,
    objects: BTreeMap<String, (Vec<u8>, ETag)>,
}

impl MemoryStore {
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panicking test thread leaves whole objects behind: every change below is one insert or remove.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(crate) fn not_found(op: &'static str, key: &str) -> StoreError {
    StoreError::new(op, key, StoreFault::NotFound, "no such object")
}

pub(crate) fn precondition(op: &'static str, key: &str, message: &str) -> StoreError {
    StoreError::new(op, key, StoreFault::Precondition, message)
}

#[async_trait]
impl ObjectStore for MemoryStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        check_key("get", key)?;
        let state = self.state();
        let (body, etag) = state.objects.get(key).ok_or_else(|| not_found("get", key))?;
        Ok(Object { body: body.clone(), etag: etag.clone(), modified: None })
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        let object = self.get(key).await?;
        Ok((object.etag != *etag).then_some(object))
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        check_key("put", key)?;
        let mut state = self.state();
        match (&condition, state.objects.get(key)) {
            (Condition::Create, None) => {}
            (Condition::Create, Some(_)) => return Err(precondition("put", key, "the object exists")),
            (Condition::Match(wanted), Some((_, present))) if wanted == present => {}
            (Condition::Match(_), Some(_)) => return Err(precondition("put", key, "the object has another version")),
            (Condition::Match(_), None) => return Err(precondition("put", key, "the object is missing")),
        }
        state.n_writes += 1;
        let etag = ETag(format!("m{}", state.n_writes));
        state.objects.insert(key.to_owned(), (body, etag.clone()));
        Ok(etag)
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        check_key("delete", key)?;
        self.state().objects.remove(key);
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        check_prefix("list", prefix)?;
        Ok(self
            .state()
            .objects
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, (body, etag))| Listed { key: key.clone(), etag: etag.clone(), size: body.len() as u64 })
            .collect())
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn memory_keeps_the_contract() {
        crate::contract::suite(async || Arc::new(MemoryStore::new()) as Arc<dyn ObjectStore>).await;
    }
}
