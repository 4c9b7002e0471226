//! A bucket that looks at every record the moment it is committed: what held for an instant is not missed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use nstance_core::{
    instance::{Instance, Phase},
    ports::objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError},
};
use nstance_store::{
    memory::MemoryStore,
    records::{self, instance_prefix},
};

#[derive(Default)]
pub struct Witness {
    inner: MemoryStore,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    records: BTreeMap<String, Instance>,
    /// After each commit, how many were running and how many draining.
    counts: Vec<(usize, usize)>,
}

impl Witness {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Forgets what was counted so far.
    pub fn begin(&self) {
        let mut seen = self.seen.lock().expect("no panic");
        seen.counts.clear();
        let now = seen.count();
        seen.counts.push(now);
    }

    /// The fewest that ran, and the most that drained, at any commit.
    pub fn extremes(&self) -> (usize, usize) {
        let seen = self.seen.lock().expect("no panic");
        let fewest = seen.counts.iter().map(|(running, _)| *running).min().unwrap_or_default();
        let most = seen.counts.iter().map(|(_, draining)| *draining).max().unwrap_or_default();
        (fewest, most)
    }
}

impl Seen {
    fn count(&self) -> (usize, usize) {
        let of = |phase: Phase| self.records.values().filter(|it| it.phase() == phase).count();
        (of(Phase::Running), of(Phase::Draining))
    }

    fn commit(&mut self, key: &str, body: Option<Vec<u8>>, etag: &ETag) {
        if !key.starts_with(&instance_prefix(&super::shard_id())) {
            return;
        }
        match body {
            Some(body) => {
                let object = Object { body, etag: etag.clone(), modified: None };
                let record = records::decode_object::<Instance>(key, object).expect("a record");
                self.records.insert(key.to_owned(), record.value);
            }
            None => {
                self.records.remove(key);
            }
        }
        let now = self.count();
        self.counts.push(now);
    }
}

#[async_trait]
impl ObjectStore for Witness {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        self.inner.get(key).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.inner.get_if_changed(key, etag).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        let etag = self.inner.put(key, body.clone(), condition).await?;
        self.seen.lock().expect("no panic").commit(key, Some(body), &etag);
        Ok(etag)
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.inner.delete(key).await?;
        self.seen.lock().expect("no panic").commit(key, None, &ETag(String::new()));
        Ok(())
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.inner.list(prefix).await
    }

    fn describe(&self) -> String {
        "watched memory".to_owned()
    }
}
