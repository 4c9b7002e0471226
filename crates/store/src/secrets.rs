//! Secrets in the bucket, sealed; and secrets in memory, for development and tests.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use nstance_core::ports::{
    clock::Entropy,
    objects::{Condition, ETag, ObjectStore, StoreError, StoreFault, Unavailable},
    secrets::{Secret, Secrets},
};
use zeroize::Zeroizing;

use crate::{
    key::{check_key, invalid},
    keys::EncryptionKey,
    memory::{not_found, precondition},
    retry,
    seal::{self, Opened},
};

/// Where sealed secrets live unless the config says otherwise.
pub const DEFAULT_PREFIX: &str = "cluster/secret/";

/// Largest secret.
pub const MAX_SECRET: usize = 1024 * 1024;

/// How often an unclear or unavailable answer is tried again, and how often a swap is begun anew.
const TRIES: u32 = 8;

/// Secrets as sealed objects. Durable as the bucket is; worthless to whoever has the bucket and not the key.
pub struct ObjectSecrets {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    /// Those that may encrypt first, then the old ones, which only decrypt.
    keys: Vec<EncryptionKey>,
    n_current: usize,
    entropy: Arc<dyn Entropy>,
}

impl ObjectSecrets {
    /// `keys` may not be empty: the first of them encrypts. `old_keys` only decrypt.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        prefix: Option<&str>,
        keys: Vec<EncryptionKey>,
        old_keys: Vec<EncryptionKey>,
        entropy: Arc<dyn Entropy>,
    ) -> Result<Self, StoreError> {
        let prefix = prefix.unwrap_or(DEFAULT_PREFIX).to_owned();
        check_key("open", prefix.trim_end_matches('/'))?;
        if keys.is_empty() {
            return Err(invalid("open", &prefix, "secrets in object storage need an encryption key"));
        }
        let n_current = keys.len();
        Ok(Self { store, prefix, keys: keys.into_iter().chain(old_keys).collect(), n_current, entropy })
    }

    fn key(&self, op: &'static str, name: &str) -> Result<String, StoreError> {
        check_key(op, name)?;
        Ok(format!("{}{name}", self.prefix))
    }

    fn seal(&self, op: &'static str, name: &str, secret: &Secret) -> Result<Vec<u8>, StoreError> {
        if MAX_SECRET < secret.0.len() {
            return Err(invalid(
                op,
                name,
                format!("the secret has {} bytes, the limit is {MAX_SECRET}", secret.0.len()),
            ));
        }
        Ok(seal::seal(&self.keys[0], name, &secret.0, &*self.entropy))
    }

    async fn read(&self, name: &str) -> Result<(Zeroizing<Vec<u8>>, Opened, ETag), StoreError> {
        let key = self.key("get", name)?;
        let object = self.store.get(&key).await?;
        let (plain, opened) = seal::open(&self.keys, name, &object.body).ok_or_else(|| {
            let message = "no configured encryption key opens this secret; restore the key it was sealed with";
            StoreError::new("get", name, StoreFault::Unavailable(Unavailable::Denied), message)
        })?;
        Ok((plain, opened, object.etag))
    }

    /// Whether a secret opens only with a key that is about to go, or lacks its name inside: seal it again first.
    pub async fn needs_sealing(&self, name: &str) -> Result<bool, StoreError> {
        let (_, opened, _) = self.read(name).await?;
        Ok(opened.key != 0 || !opened.bound)
    }

    /// Whether a secret opens only with one of the old keys, so that those cannot be removed yet.
    pub async fn needs_old_key(&self, name: &str) -> Result<bool, StoreError> {
        let (_, opened, _) = self.read(name).await?;
        Ok(self.n_current <= opened.key)
    }

    /// Seals a secret with the present key if it is not. Says whether it was rewritten.
    pub async fn reseal(&self, name: &str) -> Result<bool, StoreError> {
        let (plain, opened, etag) = self.read(name).await?;
        if opened.key == 0 && opened.bound {
            return Ok(false);
        }
        let blob = seal::seal(&self.keys[0], name, &plain, &*self.entropy);
        self.write("put", name, blob, Condition::Match(etag)).await?;
        Ok(true)
    }

    /// Every secret's name.
    pub async fn names(&self) -> Result<Vec<String>, StoreError> {
        let listed = self.store.list(&self.prefix).await?;
        Ok(listed.into_iter().map(|it| it.key[self.prefix.len()..].to_owned()).collect())
    }

    /// One write until its outcome is known. Blobs have no write id, but a random nonce: equal bytes are our own.
    async fn write(
        &self,
        op: &'static str,
        name: &str,
        blob: Vec<u8>,
        condition: Condition,
    ) -> Result<ETag, StoreError> {
        let key = self.key(op, name)?;
        let mut backoff = retry::backoff();
        let mut unclear = false;
        loop {
            let mut error = match self.store.put(&key, blob.clone(), condition.clone()).await {
                Ok(etag) => return Ok(etag),
                Err(error) => error,
            };
            unclear |= error.fault == StoreFault::Ambiguous;
            if matches!(error.fault, StoreFault::Precondition | StoreFault::Ambiguous) {
                match self.store.get(&key).await {
                    Ok(there) if there.body == blob => return Ok(there.etag),
                    Ok(there) if condition != Condition::Match(there.etag.clone()) => {
                        return Err(precondition(op, name, "somebody else wrote this secret"));
                    }
                    Ok(_) => {}
                    Err(gone) if gone.is_not_found() => {
                        if condition != Condition::Create {
                            return Err(precondition(op, name, "the secret is gone"));
                        }
                    }
                    Err(other) => error = other,
                }
                unclear |= error.fault != StoreFault::Precondition;
                if error.is_precondition() {
                    return Err(StoreError { key: name.to_owned(), ..error });
                }
            }
            if TRIES <= backoff.n_tries() + 1 || !retry::is_passing(&error) {
                if unclear {
                    error.fault = StoreFault::Ambiguous;
                }
                return Err(StoreError { key: name.to_owned(), ..error });
            }
            retry::pause(&mut backoff, &*self.entropy, &error).await;
        }
    }
}

#[async_trait]
impl Secrets for ObjectSecrets {
    async fn get(&self, name: &str) -> Result<Secret, StoreError> {
        let (plain, ..) = self.read(name).await?;
        Ok(Secret(plain.to_vec()))
    }

    async fn create(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        let blob = self.seal("create", name, secret)?;
        self.write("create", name, blob, Condition::Create).await.map(drop)
    }

    async fn put(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        let blob = self.seal("put", name, secret)?;
        let key = self.key("put", name)?;
        for _ in 0..TRIES {
            let condition = match self.store.get(&key).await {
                Ok(there) => Condition::Match(there.etag),
                Err(error) if error.is_not_found() => Condition::Create,
                Err(error) => return Err(error),
            };
            match self.write("put", name, blob.clone(), condition).await {
                Err(error) if error.is_precondition() => {}
                done => return done.map(drop),
            }
        }
        let message = "the secret changed under us again and again";
        Err(StoreError::new("put", name, StoreFault::Unavailable(Unavailable::Throttled), message))
    }

    async fn delete(&self, name: &str) -> Result<(), StoreError> {
        let key = self.key("delete", name)?;
        retry::read(TRIES, &*self.entropy, || self.store.delete(&key)).await
    }

    fn describe(&self) -> String {
        format!("object storage {} below {}", self.store.describe(), self.prefix)
    }
}

/// Secrets of this process's life. For development and tests.
#[derive(Default)]
pub struct MemorySecrets(Mutex<BTreeMap<String, Zeroizing<Vec<u8>>>>);

impl MemorySecrets {
    pub fn new() -> Self {
        Self::default()
    }

    fn map(&self) -> MutexGuard<'_, BTreeMap<String, Zeroizing<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Secrets for MemorySecrets {
    async fn get(&self, name: &str) -> Result<Secret, StoreError> {
        self.map().get(name).map(|it| Secret(it.to_vec())).ok_or_else(|| not_found("get", name))
    }

    async fn create(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        let mut map = self.map();
        if map.contains_key(name) {
            return Err(precondition("create", name, "the secret exists"));
        }
        map.insert(name.to_owned(), Zeroizing::new(secret.0.clone()));
        Ok(())
    }

    async fn put(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        self.map().insert(name.to_owned(), Zeroizing::new(secret.0.clone()));
        Ok(())
    }

    async fn delete(&self, name: &str) -> Result<(), StoreError> {
        self.map().remove(name);
        Ok(())
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }
}

#[cfg(test)]
mod tests;
