//! What every object store keeps, as one suite that runs on every adapter.
//!
//! `suite` takes a maker of fresh, empty stores and panics with the broken rule. The races run on clones of one handle
//! and on the tasks of one runtime; use a multi-threaded one where the adapter has real concurrency to show.
//!
//! ```
//! # use std::sync::Arc;
//! # use nstance_core::ports::objects::ObjectStore;
//! # use nstance_store::{contract, memory::MemoryStore};
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! contract::suite(async || Arc::new(MemoryStore::new()) as Arc<dyn ObjectStore>).await;
//! # });
//! ```

use std::sync::Arc;

use nstance_core::ports::objects::{Condition, ETag, ObjectStore, StoreError, StoreFault, Unavailable};
use tokio::task::JoinSet;

/// More than one page of S3, which are a thousand keys each.
const MANY: usize = 1005;

/// Every rule, each on a store of its own.
pub async fn suite(make: impl AsyncFn() -> Arc<dyn ObjectStore>) {
    missing_is_missing_on_every_backend(&*make().await).await;
    a_create_meets_nothing_and_a_match_its_version(&*make().await).await;
    a_get_answers_the_last_write(&*make().await).await;
    a_conditional_get_is_silent_about_the_known(&*make().await).await;
    deleting_twice_is_deleting_once(&*make().await).await;
    lists_are_complete_and_in_order(make().await).await;
    hostile_keys_are_refused(&*make().await).await;
    bodies_come_back_as_they_were(&*make().await).await;
    of_many_creates_one_wins(&[make().await]).await;
    every_acknowledged_swap_counts(&[make().await]).await;
}

fn is_precondition<T: std::fmt::Debug>(done: &Result<T, StoreError>) -> bool {
    matches!(done, Err(error) if error.is_precondition())
}

fn is_missing<T: std::fmt::Debug>(done: &Result<T, StoreError>) -> bool {
    matches!(done, Err(error) if error.is_not_found())
}

/// A key that was never written is absent for every operation, in the same words.
pub async fn missing_is_missing_on_every_backend(store: &dyn ObjectStore) {
    let nowhere = ETag("\"0123456789abcdef0123456789abcdef\"".to_owned());
    for key in ["nothing", "deep/down/nothing", "shard/a/leader.json"] {
        let got = store.get(key).await;
        assert!(is_missing(&got), "get of a missing key says NotFound: {got:?}");
        let got = store.get_if_changed(key, &nowhere).await;
        assert!(is_missing(&got), "a conditional get of a missing key says NotFound: {got:?}");
        let put = store.put(key, b"x".to_vec(), Condition::Match(nowhere.clone())).await;
        assert!(is_precondition(&put), "Match on a missing key is a failed precondition: {put:?}");
        store.delete(key).await.expect("deleting what is not there succeeds");
    }
    assert_eq!(store.list("nothing/").await.expect("a list of nothing"), []);
    assert_eq!(store.list("").await.expect("a list of everything"), []);
}

pub async fn a_create_meets_nothing_and_a_match_its_version(store: &dyn ObjectStore) {
    let first = store.put("a/k", b"1".to_vec(), Condition::Create).await.expect("create");
    let again = store.put("a/k", b"x".to_vec(), Condition::Create).await;
    assert!(is_precondition(&again), "a second create is refused: {again:?}");
    let second = store.put("a/k", b"2".to_vec(), Condition::Match(first.clone())).await.expect("match");
    assert_ne!(first, second, "another content is another version");
    let stale = store.put("a/k", b"x".to_vec(), Condition::Match(first)).await;
    assert!(is_precondition(&stale), "an old version is refused: {stale:?}");
    assert_eq!(store.get("a/k").await.expect("get").body, b"2");
    store.delete("a/k").await.expect("delete");
    let gone = store.put("a/k", b"x".to_vec(), Condition::Match(second)).await;
    assert!(is_precondition(&gone), "Match on a deleted key is refused: {gone:?}");
    assert!(is_missing(&store.get("a/k").await), "a refused write leaves nothing behind");
    store.put("a/k", b"3".to_vec(), Condition::Create).await.expect("create after delete");
}

pub async fn a_get_answers_the_last_write(store: &dyn ObjectStore) {
    let mut etag = store.put("k", b"0".to_vec(), Condition::Create).await.expect("create");
    for n in 1..10_u8 {
        etag = store.put("k", vec![n], Condition::Match(etag)).await.expect("match");
        let object = store.get("k").await.expect("get");
        assert_eq!((object.body, &object.etag), (vec![n], &etag), "a get shows bytes and version of the last write");
        let listed = store.list("k").await.expect("list");
        assert_eq!((listed.len(), &listed[0].etag, listed[0].size), (1, &etag, 1), "and so does a list");
    }
}

pub async fn a_conditional_get_is_silent_about_the_known(store: &dyn ObjectStore) {
    let first = store.put("k", b"1".to_vec(), Condition::Create).await.expect("create");
    assert_eq!(store.get_if_changed("k", &first).await.expect("get"), None);
    let second = store.put("k", b"2".to_vec(), Condition::Match(first.clone())).await.expect("match");
    let changed = store.get_if_changed("k", &first).await.expect("get").expect("it changed");
    assert_eq!((changed.body.as_slice(), &changed.etag), (&b"2"[..], &second));
    store.delete("k").await.expect("delete");
    assert!(is_missing(&store.get_if_changed("k", &second).await), "deleted is missing, not unchanged");
}

pub async fn deleting_twice_is_deleting_once(store: &dyn ObjectStore) {
    store.put("d/k", b"1".to_vec(), Condition::Create).await.expect("create");
    store.put("d/other", b"1".to_vec(), Condition::Create).await.expect("create");
    store.delete("d/k").await.expect("delete");
    store.delete("d/k").await.expect("delete again");
    assert!(is_missing(&store.get("d/k").await));
    assert_eq!(store.get("d/other").await.expect("its neighbour stays").body, b"1");
}

pub async fn lists_are_complete_and_in_order(store: Arc<dyn ObjectStore>) {
    let mut puts = JoinSet::new();
    for n in 0..MANY {
        // Written out of order, and with a neighbour that a sloppy prefix would catch.
        let (store, key) = (store.clone(), format!("shard/a/instance/{:04}", (n * 7) % MANY));
        puts.spawn(async move { store.put(&key, b"x".to_vec(), Condition::Create).await });
        if 16 <= puts.len() {
            puts.join_next().await.expect("one of them").expect("no panic").expect("create");
        }
    }
    for put in puts.join_all().await {
        put.expect("create");
    }
    for key in
        ["shard/a/instances", "shard/ab/instance/0000", "shard/a/instance.json", "zebra", "shard/a/instance/sub/x"]
    {
        store.put(key, b"y".to_vec(), Condition::Create).await.expect("create");
    }
    let listed = store.list("shard/a/instance/").await.expect("list");
    let mut shown = Vec::new();
    let paged = store.list_pages("shard/a/instance/", &mut |page| shown.extend_from_slice(page)).await.expect("list");
    shown.sort_by(|a, b| a.key.cmp(&b.key));
    assert_eq!((&paged, &shown), (&listed, &listed), "page by page it is the same, and all of it was shown once");
    let keys: Vec<&str> = listed.iter().map(|it| it.key.as_str()).collect();
    let mut wanted: Vec<String> = (0..MANY).map(|n| format!("shard/a/instance/{n:04}")).collect();
    wanted.push("shard/a/instance/sub/x".to_owned());
    assert_eq!(keys, wanted, "all pages, in key order, and nothing else");
    let beginning: Vec<String> =
        store.list("shard/a/instance/000").await.expect("list").into_iter().map(|it| it.key).collect();
    assert_eq!(beginning.len(), 10, "a prefix may end inside a name: {beginning:?}");
    assert_eq!(store.list("").await.expect("list").len(), MANY + 5);
}

pub async fn hostile_keys_are_refused(store: &dyn ObjectStore) {
    let invalid = StoreFault::Unavailable(Unavailable::Invalid);
    let long = "x".repeat(2000);
    for key in ["", "/", "/etc/passwd", "..", "../up", "a/../../up", "a//b", "a/", "./a", "a/.", "a\0b", "a\nb", &long]
    {
        let put = store.put(key, b"x".to_vec(), Condition::Create).await;
        assert_eq!(put.expect_err(key).fault, invalid, "put of {key:?}");
        assert_eq!(store.get(key).await.expect_err(key).fault, invalid, "get of {key:?}");
        assert_eq!(store.delete(key).await.expect_err(key).fault, invalid, "delete of {key:?}");
    }
    assert_eq!(store.list("").await.expect("list"), [], "nothing came of it");
    for key in ["a b", "a+b", "a%2Fb", "a=b&c", "ä", "~a", ".probe/x", "a..b", "a:b"] {
        store.put(key, key.as_bytes().to_vec(), Condition::Create).await.expect(key);
        assert_eq!(store.get(key).await.expect(key).body, key.as_bytes(), "odd but harmless key {key:?}");
    }
    assert_eq!(store.list("").await.expect("list").len(), 9);
}

pub async fn bodies_come_back_as_they_were(store: &dyn ObjectStore) {
    let all: Vec<u8> = (0..=255).collect();
    let large = all.repeat(4096); // a MiB
    for (key, body) in [("empty", vec![]), ("all", all), ("large", large)] {
        store.put(key, body.clone(), Condition::Create).await.expect(key);
        assert!(store.get(key).await.expect(key).body == body, "{key} comes back");
    }
}

/// Tries again what is surely not applied; a contract test on a real store meets conflicts and throttling.
async fn settled(store: &dyn ObjectStore, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
    loop {
        match store.put(key, body.clone(), condition.clone()).await {
            Err(error) if matches!(error.fault, StoreFault::Unavailable(why) if why != Unavailable::Invalid) => {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            done => return done,
        }
    }
}

/// Of simultaneous creates exactly one wins, over however many handles of the same store.
pub async fn of_many_creates_one_wins(handles: &[Arc<dyn ObjectStore>]) {
    for round in 0..10 {
        let key = format!("race/{round}");
        let mut creates = JoinSet::new();
        for n in 0..16_usize {
            let (store, key) = (handles[n % handles.len()].clone(), key.clone());
            creates
                .spawn(async move { (n, settled(&*store, &key, n.to_string().into_bytes(), Condition::Create).await) });
        }
        let mut winners = Vec::new();
        for (n, done) in creates.join_all().await {
            match done {
                Ok(_) => winners.push(n),
                Err(error) => assert!(error.is_precondition(), "a loser is told so: {error:?}"),
            }
        }
        assert_eq!(winners.len(), 1, "winners of round {round}: {winners:?}");
        assert_eq!(handles[0].get(&key).await.expect("get").body, winners[0].to_string().into_bytes());
    }
}

/// A counter that many increment by compare-and-swap ends at the number of acknowledged writes.
pub async fn every_acknowledged_swap_counts(handles: &[Arc<dyn ObjectStore>]) {
    const TASKS: usize = 8;
    const EACH: usize = 10;
    handles[0].put("counter", b"0".to_vec(), Condition::Create).await.expect("create");
    let mut tasks = JoinSet::new();
    for n in 0..TASKS {
        let store = handles[n % handles.len()].clone();
        tasks.spawn(async move {
            let mut n_done = 0;
            while n_done < EACH {
                let object = store.get("counter").await.expect("get");
                let count: usize = String::from_utf8(object.body).expect("text").parse().expect("a number");
                let next = (count + 1).to_string().into_bytes();
                match settled(&*store, "counter", next, Condition::Match(object.etag)).await {
                    Ok(_) => n_done += 1,
                    Err(error) => assert!(error.is_precondition(), "{error:?}"),
                }
            }
        });
    }
    tasks.join_all().await;
    let object = handles[0].get("counter").await.expect("get");
    assert_eq!(object.body, (TASKS * EACH).to_string().into_bytes(), "no acknowledged write was lost");
}
