//! Writes to the SQLite cache, off the path of everything that matters.
//!
//! The cache is never read while we lead, only at the next rebuild, and that compares ETags with the store. So a row
//! that was not written costs one read later and nothing else: when the queue is full, rows are dropped and counted.

use std::sync::Arc;

use nstance_core::{ids::InstanceId, instance::Instance, time::Timestamp};
use nstance_rt::{chain::Chain, tasks::Tasks};
use nstance_store::{
    cache::{Cache, CacheError, CachedObject},
    records::{Record, Versioned, encode, groups::GroupsFile, instance_key},
};
use tokio::sync::mpsc;

use crate::metrics::Metrics;

const QUEUE: usize = 4096;

enum Write {
    Put(Box<Versioned<Instance>>),
    Groups(String, Box<Versioned<GroupsFile>>),
    Purge(Box<Instance>),
    Keys(InstanceId, Vec<(String, Vec<u8>)>),
    Boot { instance: InstanceId, failed: bool, body: Vec<u8>, at: Timestamp },
}

#[derive(Clone)]
enum Way {
    Queue(mpsc::Sender<Write>),
    AtOnce(Arc<Cache>),
}

#[derive(Clone)]
pub struct CacheWriter {
    way: Way,
    metrics: Arc<Metrics>,
}

impl CacheWriter {
    /// Starts the one writer.
    pub fn start(tasks: &Tasks, cache: Arc<Cache>, metrics: Arc<Metrics>) -> Self {
        let (sender, mut receiver) = mpsc::channel::<Write>(QUEUE);
        let token = tasks.token().clone();
        tasks.spawn("cache writer", async move {
            loop {
                let mut batch = Vec::new();
                tokio::select! {
                    biased;
                    n = receiver.recv_many(&mut batch, 256) => if n == 0 { return },
                    () = token.cancelled() => return,
                }
                // Off the workers: a disk that stalls for a moment must not stall a replacement.
                let cache = cache.clone();
                if let Err(error) = tokio::task::spawn_blocking(move || write_all(&cache, batch)).await {
                    tracing::error!(%error, "cache writer failed");
                }
            }
        });
        Self { way: Way::Queue(sender), metrics }
    }

    /// Writes where it is told to, for a simulation: there nothing may depend on how fast a disk is.
    pub fn at_once(cache: Arc<Cache>, metrics: Arc<Metrics>) -> Self {
        Self { way: Way::AtOnce(cache), metrics }
    }

    pub fn put(&self, record: &Versioned<Instance>) {
        self.send(Write::Put(Box::new(record.clone())));
    }

    pub fn put_groups(&self, key: String, file: &Versioned<GroupsFile>) {
        self.send(Write::Groups(key, Box::new(file.clone())));
    }

    pub fn purge(&self, instance: &Instance) {
        self.send(Write::Purge(Box::new(instance.clone())));
    }

    /// Public keys of an instance, by name.
    pub fn put_keys(&self, instance: InstanceId, keys: Vec<(String, Vec<u8>)>) {
        if !keys.is_empty() {
            self.send(Write::Keys(instance, keys));
        }
    }

    /// The last black box of an instance.
    pub fn put_boot(&self, instance: InstanceId, failed: bool, body: Vec<u8>, at: Timestamp) {
        self.send(Write::Boot { instance, failed, body, at });
    }

    fn send(&self, write: Write) {
        match &self.way {
            Way::Queue(sender) => {
                if sender.try_send(write).is_err() {
                    self.metrics.cache_writes_dropped.inc();
                }
            }
            Way::AtOnce(cache) => write_all(cache, vec![write]),
        }
    }
}

fn put(cache: &Cache, records: &[Versioned<Instance>]) -> Result<(), CacheError> {
    let key = |it: &Instance| instance_key(&it.shard, &it.group.tenant, &it.id);
    let objects: Vec<_> = records.iter().map(|record| object(key(&record.value), record)).collect();
    cache.put_recorded(&objects, records.iter().map(|record| &record.value))
}

fn object<T: Record>(key: String, record: &Versioned<T>) -> CachedObject {
    let Versioned { value, etag, meta, extra } = record;
    CachedObject { key, etag: etag.clone(), body: encode(value, meta, extra), epoch: meta.epoch }
}

fn write_all(cache: &Cache, batch: Vec<Write>) {
    let mut batch = batch.into_iter().peekable();
    while let Some(write) = batch.next() {
        let written = match write {
            // Records that come together are one transaction.
            Write::Put(record) => {
                let mut records = vec![*record];
                while let Some(Write::Put(record)) = batch.next_if(|it| matches!(it, Write::Put(_))) {
                    records.push(*record);
                }
                put(cache, &records)
            }
            Write::Groups(key, file) => cache.put_objects(&[object(key, &file)]),
            Write::Purge(instance) => cache.purge_instance(&instance),
            Write::Keys(instance, keys) => cache.put_public_keys(&instance, &keys),
            Write::Boot { instance, failed, body, at } => cache.put_boot(instance, failed, &body, at),
        };
        if let Err(error) = written {
            tracing::warn!(error = %Chain(&error), "cache not written, the next rebuild reads the store");
        }
    }
}
