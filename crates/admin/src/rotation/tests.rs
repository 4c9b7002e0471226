use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use nstance_core::ports::{objects::Unavailable, secrets::Secret};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use nstance_store::{memory::MemoryStore, secrets::MemorySecrets};

use super::*;

/// Secrets that cannot be deleted while the store is in a bad mood.
#[derive(Default)]
struct Stubborn {
    secrets: MemorySecrets,
    refuses: AtomicBool,
}

#[async_trait]
impl Secrets for Stubborn {
    async fn get(&self, name: &str) -> Result<Secret, StoreError> {
        self.secrets.get(name).await
    }

    async fn create(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        self.secrets.create(name, secret).await
    }

    async fn put(&self, name: &str, secret: &Secret) -> Result<(), StoreError> {
        self.secrets.put(name, secret).await
    }

    async fn delete(&self, name: &str) -> Result<(), StoreError> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(StoreError::new("delete", name, StoreFault::Unavailable(Unavailable::Network), "not now"));
        }
        self.secrets.delete(name).await
    }

    fn describe(&self) -> String {
        self.secrets.describe()
    }
}

/// A cluster with its first CA, and nobody who holds anything by it.
async fn cluster() -> (Rotation, Arc<Stubborn>) {
    let (store, secrets) = (Arc::new(MemoryStore::new()), Arc::new(Stubborn::default()));
    let (clock, entropy) = (Arc::new(SystemClock), Arc::new(SystemEntropy::new()));
    let profile = CaProfile::of("demo".parse().unwrap());
    let shard = "s1".parse().unwrap();
    let records = Records::new(store.clone(), shard, "admin/test".to_owned(), clock.clone(), entropy.clone());
    let key = KeyPair::generate(entropy.as_ref());
    store_key(secrets.as_ref(), CA_KEY_SECRET, &key).await.unwrap();
    let pem = new_ca_certificate(&key, &profile, &records, clock.now(), entropy.as_ref()).await.unwrap();
    store.put(&ca_crt_key(), pem.into_bytes(), Condition::Create).await.unwrap();
    (Rotation::new(store, secrets.clone(), records, profile, "admin/test", clock, entropy), secrets)
}

async fn has(secrets: &Stubborn, name: &str) -> bool {
    read_key(secrets, name).await.unwrap().is_some()
}

fn is_wrong_stage(refused: Result<impl std::fmt::Debug, RotationError>) -> bool {
    matches!(refused, Err(RotationError::WrongStage { .. }))
}

#[tokio::test]
async fn retiring_again_deletes_the_key_that_was_left() {
    let (rotation, secrets) = cluster().await;
    let b = rotation.start().await.unwrap().bundle[1].clone();
    rotation.activate(true).await.unwrap();
    secrets.refuses.store(true, Ordering::SeqCst);
    assert!(matches!(rotation.retire(true).await, Err(RotationError::Store { .. })));
    assert_eq!(rotation.status().await.unwrap().stage, Stage::Settled, "it had landed");
    assert!(has(&secrets, CA_KEY_SECRET).await);
    rotation.may(Step::Retire).await.unwrap();
    assert!(matches!(rotation.retire(false).await, Err(RotationError::Store { .. })), "as often as need be");

    secrets.refuses.store(false, Ordering::SeqCst);
    assert_eq!(rotation.retire(false).await.unwrap(), Done { bundle: vec![b.clone()], cut_off: Vec::new() });
    assert!(!has(&secrets, CA_KEY_SECRET).await);
    assert!(has(&secrets, &ca_key_secret(&b)).await, "the one in use stays");
    assert!(is_wrong_stage(rotation.may(Step::Retire).await));
    assert!(is_wrong_stage(rotation.retire(true).await), "nothing is left");
}

#[tokio::test]
async fn aborting_again_deletes_the_key_that_was_left() {
    let (rotation, secrets) = cluster().await;
    let b = rotation.start().await.unwrap().bundle[1].clone();
    secrets.refuses.store(true, Ordering::SeqCst);
    assert!(matches!(rotation.abort().await, Err(RotationError::Store { .. })));
    secrets.refuses.store(false, Ordering::SeqCst);
    rotation.abort().await.unwrap();
    assert!(!has(&secrets, &ca_key_secret(&b)).await);
    assert!(has(&secrets, CA_KEY_SECRET).await, "the one in use stays");
    assert!(is_wrong_stage(rotation.abort().await));
}

#[tokio::test]
async fn nothing_is_swept_while_the_key_in_use_is_missing() {
    let (rotation, secrets) = cluster().await;
    let another = KeyPair::generate(&SystemEntropy::new());
    secrets.delete(CA_KEY_SECRET).await.unwrap();
    store_key(secrets.as_ref(), CA_KEY_SECRET, &another).await.unwrap();
    assert!(is_wrong_stage(rotation.retire(true).await));
    assert!(has(&secrets, CA_KEY_SECRET).await);
}
