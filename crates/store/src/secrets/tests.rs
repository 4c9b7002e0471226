use nstance_rt::entropy::SeededEntropy;

use super::*;
use crate::{
    faulty::{Fault, FaultPlan, FaultyStore},
    memory::MemoryStore,
};

fn key(byte: u8) -> EncryptionKey {
    EncryptionKey::new([byte; 32])
}

fn secrets(store: &Arc<MemoryStore>, keys: &[u8], old: &[u8]) -> ObjectSecrets {
    let keys_of = |bytes: &[u8]| bytes.iter().map(|byte| key(*byte)).collect();
    ObjectSecrets::new(store.clone(), None, keys_of(keys), keys_of(old), Arc::new(SeededEntropy::new(3))).unwrap()
}

fn text(text: &str) -> Secret {
    Secret(text.as_bytes().to_vec())
}

async fn keeps_the_port(secrets: &dyn Secrets) {
    assert!(secrets.get("ca.key").await.unwrap_err().is_not_found());
    secrets.create("ca.key", &text("one")).await.unwrap();
    assert!(secrets.create("ca.key", &text("two")).await.unwrap_err().is_precondition());
    assert!(secrets.get("ca.key").await.unwrap() == text("one"));
    secrets.put("ca.key", &text("three")).await.unwrap();
    secrets.put("new", &text("four")).await.unwrap();
    assert!(secrets.get("ca.key").await.unwrap() == text("three"));
    assert!(secrets.get("new").await.unwrap() == text("four"));
    secrets.delete("ca.key").await.unwrap();
    secrets.delete("ca.key").await.unwrap();
    assert!(secrets.get("ca.key").await.unwrap_err().is_not_found());
}

#[tokio::test]
async fn both_stores_keep_the_port() {
    keeps_the_port(&MemorySecrets::new()).await;
    keeps_the_port(&secrets(&Arc::new(MemoryStore::new()), &[1], &[])).await;
}

#[tokio::test]
async fn bucket_holds_no_plain_secret() {
    let store = Arc::new(MemoryStore::new());
    secrets(&store, &[1], &[]).put("user-secret", &text("PLANTED")).await.unwrap();
    let listed = store.list("").await.unwrap();
    assert_eq!(listed[0].key, "cluster/secret/user-secret");
    let body = store.get(&listed[0].key).await.unwrap().body;
    assert!(!body.windows(7).any(|it| it == b"PLANTED"));
}

#[tokio::test]
async fn swapped_secret_does_not_open() {
    let store = Arc::new(MemoryStore::new());
    let secrets = secrets(&store, &[1], &[]);
    secrets.create("a", &text("one")).await.unwrap();
    secrets.create("b", &text("two")).await.unwrap();
    let a = store.get("cluster/secret/a").await.unwrap();
    let b = store.get("cluster/secret/b").await.unwrap();
    store.put("cluster/secret/b", a.body, Condition::Match(b.etag)).await.unwrap();
    let error = secrets.get("b").await.unwrap_err();
    assert_eq!(error.fault, StoreFault::Unavailable(Unavailable::Denied), "never NotFound: nothing may be made anew");
}

#[tokio::test]
async fn keys_rotate_without_a_gap() {
    let store = Arc::new(MemoryStore::new());
    let names = ["a", "b"];
    let before = secrets(&store, &[1], &[]);
    for name in names {
        before.create(name, &text(name)).await.unwrap();
    }
    let during = secrets(&store, &[2], &[1]);
    for name in names {
        assert!(during.get(name).await.unwrap() == text(name));
        assert!(during.needs_old_key(name).await.unwrap());
        assert!(during.reseal(name).await.unwrap());
        assert!(!during.reseal(name).await.unwrap(), "once is enough");
        assert!(!during.needs_old_key(name).await.unwrap());
    }
    assert_eq!(during.names().await.unwrap(), names);
    let after = secrets(&store, &[2], &[]);
    for name in names {
        assert!(after.get(name).await.unwrap() == text(name));
    }
    assert!(before.get("a").await.is_err(), "the old key alone opens nothing any more");
}

#[tokio::test(start_paused = true)]
async fn a_create_that_landed_unnoticed_is_a_success() {
    for fault in [Fault::LostAfter, Fault::LostBefore, Fault::PreconditionAfter, Fault::Throttled] {
        let bucket = Arc::new(MemoryStore::new());
        let entropy = Arc::new(SeededEntropy::new(1));
        let link = Arc::new(FaultyStore::new(bucket.clone(), entropy.clone(), FaultPlan::default()));
        link.script_puts([fault]);
        let secrets = ObjectSecrets::new(link, None, vec![key(1)], vec![], entropy).unwrap();
        secrets.create("ca.key", &text("one")).await.unwrap_or_else(|error| panic!("{fault:?}: {error:?}"));
        assert!(secrets.get("ca.key").await.unwrap() == text("one"));
    }
}

#[tokio::test]
async fn a_secret_too_large_or_with_a_hostile_name_is_refused() {
    let secrets = secrets(&Arc::new(MemoryStore::new()), &[1], &[]);
    assert!(secrets.create("big", &Secret(vec![0; MAX_SECRET + 1])).await.is_err());
    assert!(secrets.put("../ca.key", &text("x")).await.is_err());
    let keyless =
        ObjectSecrets::new(Arc::new(MemoryStore::new()), None, vec![], vec![], Arc::new(SeededEntropy::new(1)));
    assert!(keyless.is_err());
}
