//! Changing records by compare-and-swap, under our epoch, with writes that recognise themselves.
//!
//! A put may land although its answer is lost, and its retry is then refused. So every logical write carries a random
//! `write_id`, equal over its retries: after a refusal or an unclear answer the object is read back, and finding the own
//! id is success. The permit is taken right before each put, because a slow read may outlast the lease.
//!
//! Dropping one of these futures leaves the outcome of a put under way unknown, as any lost answer does.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{Epoch, InstanceId, Shard, Tenant},
    instance::Instance,
    ports::{
        clock::{Clock, Entropy},
        objects::{Condition, ETag, ObjectStore, StoreError, StoreFault, Unavailable},
    },
    term::{Guard, LeaseStalled},
    time::Mono,
};
use nstance_rt::{backoff::Backoff, entropy};
use tokio::sync::watch;

use crate::{
    fence::{Fence, Scope, check_epoch},
    key::invalid,
    records::{
        self, DecodeError, Extra, Meta, Record, VERSION, Versioned, groups::GroupsFile, groups_key, instance_key,
    },
    retry,
};

mod cluster;

pub use cluster::{Created, OperatorList};

/// How often a change is recomputed on what others wrote meanwhile.
pub const MAX_ROUNDS: usize = 8;

/// How long a write keeps trying while the store is unavailable or unclear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As long as the guard is open. Without a lease behind the guard this is for ever.
    Guard,
    /// Until this moment, and not past the guard. For requests, which have a deadline of their own.
    Until(Mono),
    /// So many tries of each put, and not past the guard.
    Tries(u32),
}

/// Why a record was not read or written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RecordError {
    /// Not ours to write now. If a put was under way, it may still land.
    #[error(transparent)]
    Stalled(#[from] LeaseStalled),
    #[error("record {key} was written in epoch {theirs}, ours is {ours}; another server leads, step down")]
    Fenced { key: String, ours: Epoch, theirs: Epoch },
    #[error("record {key} is missing; put it back from memory")]
    Missing { key: String },
    #[error("record of instance {} exists already", .0.value.id)]
    Taken(Box<Versioned<Instance>>),
    #[error("record {key} does not parse at {line}:{column}: {message}; repair or restore the object")]
    Corrupt { key: String, line: usize, column: usize, message: String },
    #[error("record {key} has version {version}, written by a newer nstance; upgrade this server")]
    TooNew { key: String, version: u32 },
    #[error("object store")]
    Store(#[source] StoreError),
    #[error("record {key} changed under us {MAX_ROUNDS} times in a row; try again")]
    Busy { key: String },
}

/// What the caller does about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The same call may succeed later.
    Retry,
    /// A person, or the caller's own repair, must act first.
    Fix,
    /// We no longer lead, or must not.
    StepDown,
}

impl RecordError {
    pub fn next(&self) -> Next {
        match self {
            Self::Stalled(_) | Self::Busy { .. } => Next::Retry,
            Self::Fenced { .. } | Self::TooNew { .. } => Next::StepDown,
            Self::Missing { .. } | Self::Taken(_) | Self::Corrupt { .. } => Next::Fix,
            Self::Store(error) if retry::is_passing(error) => Next::Retry,
            Self::Store(_) => Next::Fix,
        }
    }

    /// Whether the write may have landed, or may still land.
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::Stalled(_) => true,
            Self::Store(error) => error.fault == StoreFault::Ambiguous,
            _ => false,
        }
    }
}

impl From<DecodeError> for RecordError {
    fn from(error: DecodeError) -> Self {
        match error {
            DecodeError::Corrupt { key, line, column, message } => Self::Corrupt { key, line, column, message },
            DecodeError::TooNew { key, version } => Self::TooNew { key, version },
        }
    }
}

/// The records of one shard and those of the cluster, as one writer sees them. Cheap to clone.
///
/// Nothing is cached here: the caller keeps what it got and hands it in again, so steady state needs no reads.
#[derive(Clone)]
pub struct Records {
    inner: Arc<Inner>,
    patience: Patience,
}

struct Inner {
    store: Arc<dyn ObjectStore>,
    shard: Shard,
    writer: String,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    /// Writes on their way.
    n_sent: watch::Sender<usize>,
}

/// A write on its way, until it is answered or nobody waits for it any more.
struct Sent<'a>(&'a watch::Sender<usize>);

impl<'a> Sent<'a> {
    fn new(n_sent: &'a watch::Sender<usize>) -> Self {
        n_sent.send_modify(|n| *n += 1);
        Self(n_sent)
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// How a put ended, once that is known.
enum Outcome<T> {
    Done(Versioned<T>),
    /// Refused, and what is there is not ours; `None` if nothing is.
    Refused(Option<Versioned<T>>),
}

impl Records {
    pub fn new(
        store: Arc<dyn ObjectStore>,
        shard: Shard,
        writer: String,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
    ) -> Self {
        let n_sent = watch::Sender::default();
        Self { inner: Arc::new(Inner { store, shard, writer, clock, entropy, n_sent }), patience: Patience::Guard }
    }

    /// Waits until no write is on its way. Whoever closed the guard before can then tell others that it is done.
    pub async fn quiet(&self) {
        // Fails only if the sender is gone, which is us.
        let _ = self.inner.n_sent.subscribe().wait_for(|n| *n == 0).await;
    }

    /// The same records, tried for longer or shorter.
    pub fn with_patience(&self, patience: Patience) -> Self {
        Self { inner: self.inner.clone(), patience }
    }

    /// Until `limit` from now.
    pub fn within(&self, limit: Duration) -> Self {
        self.with_patience(Patience::Until(self.inner.clock.monotonic() + limit))
    }

    pub fn shard(&self) -> &Shard {
        &self.inner.shard
    }

    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.inner.store
    }

    // Instances.

    pub fn instance_key(&self, tenant: &Tenant, instance: &InstanceId) -> String {
        instance_key(&self.inner.shard, tenant, instance)
    }

    fn key_of(&self, instance: &Instance) -> String {
        self.instance_key(&instance.group.tenant, &instance.id)
    }

    /// `None` on the store's own word only.
    pub async fn read_instance(
        &self,
        tenant: &Tenant,
        instance: &InstanceId,
    ) -> Result<Option<Versioned<Instance>>, RecordError> {
        self.read(&self.instance_key(tenant, instance)).await
    }

    /// The intent: from here on the instance exists, whatever happens to us.
    pub async fn create_instance(
        &self,
        guard: &Guard,
        instance: &Instance,
    ) -> Result<Versioned<Instance>, RecordError> {
        self.make_instance(guard, instance, &Extra::default()).await
    }

    /// Makes a record again that somebody deleted, from what we remember of it.
    pub async fn put_back_instance(
        &self,
        guard: &Guard,
        lost: &Versioned<Instance>,
    ) -> Result<Versioned<Instance>, RecordError> {
        self.make_instance(guard, &lost.value, &lost.extra).await
    }

    async fn make_instance(
        &self,
        guard: &Guard,
        instance: &Instance,
        extra: &Extra,
    ) -> Result<Versioned<Instance>, RecordError> {
        let key = self.key_of(instance);
        match self.put(guard.into(), &key, instance, extra, Condition::Create).await? {
            Outcome::Done(made) => Ok(made),
            Outcome::Refused(Some(existing)) => {
                check_epoch(Scope::Shard, &key, guard.epoch(), existing.meta.epoch)?;
                Err(RecordError::Taken(Box::new(existing)))
            }
            // Refused because it existed, and gone by the time we looked.
            Outcome::Refused(None) => Err(RecordError::Busy { key }),
        }
    }

    /// Adds facts. `change` may run several times, on what others wrote meanwhile: keep it pure, let it name the end
    /// state, and let a fact that is already there stand. `None` means that nothing is left to do.
    pub async fn update_instance(
        &self,
        guard: &Guard,
        current: &Versioned<Instance>,
        change: impl Fn(&Instance) -> Option<Instance>,
    ) -> Result<Versioned<Instance>, RecordError> {
        let key = self.key_of(&current.value);
        self.update(guard.into(), Scope::Shard, &key, current, change).await
    }

    /// Removes a record whose instance is gone and whose retention has passed. Its key is never used again.
    pub async fn forget_instance(
        &self,
        guard: &Guard,
        tenant: &Tenant,
        instance: &InstanceId,
    ) -> Result<(), RecordError> {
        self.delete(guard.into(), &self.instance_key(tenant, instance)).await
    }

    // Groups.

    pub fn groups_key(&self) -> String {
        groups_key(&self.inner.shard)
    }

    /// `None` if the shard has no groups file, on the store's own word.
    pub async fn load_groups(&self) -> Result<Option<Versioned<GroupsFile>>, RecordError> {
        self.read(&self.groups_key()).await
    }

    /// Changes the groups file, or makes it if there was none. The rules of [`Self::update_instance`] hold for `change`;
    /// where there is no file, it gets an empty one, and even "nothing to do" leaves an empty file behind.
    pub async fn update_groups(
        &self,
        guard: &Guard,
        current: Option<&Versioned<GroupsFile>>,
        change: impl Fn(&GroupsFile) -> Option<GroupsFile>,
    ) -> Result<Versioned<GroupsFile>, RecordError> {
        let key = self.groups_key();
        let existing;
        let current = match current {
            Some(current) => current,
            None => {
                let empty = GroupsFile::default();
                let first = change(&empty).unwrap_or(empty);
                match self.put(guard.into(), &key, &first, &Extra::default(), Condition::Create).await? {
                    Outcome::Done(made) => return Ok(made),
                    Outcome::Refused(Some(there)) => {
                        existing = there;
                        &existing
                    }
                    Outcome::Refused(None) => return Err(RecordError::Busy { key }),
                }
            }
        };
        self.update(guard.into(), Scope::Shard, &key, current, change).await
    }

    /// Makes the groups file again from what we remember of it. If one is there, that one is returned instead.
    pub async fn put_back_groups(
        &self,
        guard: &Guard,
        lost: &Versioned<GroupsFile>,
    ) -> Result<Versioned<GroupsFile>, RecordError> {
        let key = self.groups_key();
        match self.put(guard.into(), &key, &lost.value, &lost.extra, Condition::Create).await? {
            Outcome::Done(made) => Ok(made),
            Outcome::Refused(Some(there)) => {
                check_epoch(Scope::Shard, &key, guard.epoch(), there.meta.epoch)?;
                Ok(there)
            }
            Outcome::Refused(None) => Err(RecordError::Busy { key }),
        }
    }

    // What they are made of.

    async fn read<T: Record>(&self, key: &str) -> Result<Option<Versioned<T>>, RecordError> {
        match self.inner.store.get(key).await {
            Ok(object) => Ok(Some(records::decode_object(key, object)?)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(RecordError::Store(error)),
        }
    }

    async fn update<T: Record + Clone>(
        &self,
        fence: Fence<'_>,
        scope: Scope,
        key: &str,
        current: &Versioned<T>,
        change: impl Fn(&T) -> Option<T>,
    ) -> Result<Versioned<T>, RecordError> {
        let mut base = current.clone();
        for _ in 0..MAX_ROUNDS {
            check_epoch(scope, key, fence.epoch(), base.meta.epoch)?;
            let Some(changed) = change(&base.value) else { return Ok(base) };
            let condition = Condition::Match(base.etag.clone());
            match self.put(fence, key, &changed, &base.extra, condition).await? {
                Outcome::Done(written) => return Ok(written),
                Outcome::Refused(Some(there)) => base = there,
                Outcome::Refused(None) => return Err(RecordError::Missing { key: key.to_owned() }),
            }
        }
        Err(RecordError::Busy { key: key.to_owned() })
    }

    /// One logical write: the same bytes under the same id, until its outcome is known.
    async fn put<T: Record + Clone>(
        &self,
        fence: Fence<'_>,
        key: &str,
        value: &T,
        extra: &Extra,
        condition: Condition,
    ) -> Result<Outcome<T>, RecordError> {
        let inner = &self.inner;
        let meta = Meta {
            version: VERSION,
            epoch: fence.epoch(),
            writer: inner.writer.clone(),
            write_id: entropy::hex(&*inner.entropy, 16),
            updated_at: inner.clock.now(),
        };
        let body = records::encode(value, &meta, extra);
        if T::MAX_BYTES < body.len() {
            let message = format!("the record has {} bytes, the limit is {}", body.len(), T::MAX_BYTES);
            return Err(RecordError::Store(invalid("put", key, message)));
        }
        let done = |etag: ETag, meta: Meta| {
            let mut value = value.clone();
            value.stamp(meta.epoch);
            Outcome::Done(Versioned { value, etag, meta, extra: extra.clone() })
        };
        let mut tries = Tries::new(self);
        loop {
            fence.permit()?;
            let sent = Sent::new(&inner.n_sent);
            let put = inner.store.put(key, body.clone(), condition.clone()).await;
            drop(sent);
            let error = match put {
                Ok(etag) => return Ok(done(etag, meta)),
                Err(error) => error,
            };
            match error.fault {
                StoreFault::Precondition | StoreFault::Ambiguous => {
                    tries.unclear |= error.fault == StoreFault::Ambiguous;
                    let there: Option<Versioned<T>> = self.read_back(fence, key, &mut tries).await?;
                    let unchanged = match (&condition, &there) {
                        (_, Some(there)) if there.meta.write_id == meta.write_id => {
                            return Ok(done(there.etag.clone(), meta));
                        }
                        (Condition::Create, there) => there.is_none(),
                        (Condition::Match(etag), Some(there)) => there.etag == *etag,
                        (Condition::Match(_), None) => false,
                    };
                    if error.fault == StoreFault::Precondition || !unchanged {
                        return Ok(Outcome::Refused(there));
                    }
                    // Not landed yet. It still may; then the retry is refused and finds its own id.
                    tries.wait(error).await?;
                }
                StoreFault::Unavailable(_) => tries.wait(error).await?,
                StoreFault::NotFound => return Err(RecordError::Store(error)),
            }
        }
    }

    /// Reads until the store answers, as long as patience and lease allow. Without an answer the outcome stays unknown.
    async fn read_back<T: Record>(
        &self,
        fence: Fence<'_>,
        key: &str,
        tries: &mut Tries<'_>,
    ) -> Result<Option<Versioned<T>>, RecordError> {
        loop {
            match self.read(key).await {
                Err(RecordError::Store(error)) => {
                    tries.wait(error).await?;
                    fence.permit()?;
                }
                done => return done,
            }
        }
    }

    /// Deleting twice is deleting once, so an unclear answer is simply tried again.
    async fn delete(&self, fence: Fence<'_>, key: &str) -> Result<(), RecordError> {
        let mut tries = Tries::new(self);
        loop {
            fence.permit()?;
            let sent = Sent::new(&self.inner.n_sent);
            let deleted = self.inner.store.delete(key).await;
            drop(sent);
            match deleted {
                Ok(()) => return Ok(()),
                Err(error) => {
                    tries.unclear |= error.fault == StoreFault::Ambiguous;
                    tries.wait(error).await?;
                }
            }
        }
    }
}

/// Counts the tries of one put, and knows when to give up.
struct Tries<'a> {
    records: &'a Records,
    backoff: Backoff,
    /// An earlier try may have landed, so no later failure may claim that nothing did.
    unclear: bool,
}

impl<'a> Tries<'a> {
    fn new(records: &'a Records) -> Self {
        Self { records, backoff: retry::backoff(), unclear: false }
    }

    /// Waits before the next try, or gives up with `error`.
    async fn wait(&mut self, mut error: StoreError) -> Result<(), RecordError> {
        let inner = &self.records.inner;
        let now = inner.clock.monotonic();
        let denied = error.fault == StoreFault::Unavailable(Unavailable::Denied);
        let wait = retry::next_wait(&mut self.backoff, &*inner.entropy, &error);
        let spent = match self.records.patience {
            Patience::Guard => false,
            // A try that could only begin after the deadline is none.
            Patience::Until(deadline) => deadline <= now + wait,
            Patience::Tries(max) => max <= self.backoff.n_tries(),
        };
        if denied || spent || !retry::is_passing(&error) {
            if self.unclear {
                error.fault = StoreFault::Ambiguous;
            }
            return Err(RecordError::Store(error));
        }
        tokio::time::sleep(wait).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
