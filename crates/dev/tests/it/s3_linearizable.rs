//! Conditional operations under contention: one history, no lost or doubled write.

use std::collections::BTreeMap;

use crate::s3_common::Store;
use nstance_dev::s3::S3Options;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion, path::Path};
use tokio::{sync::Barrier, task::JoinSet};

const N_ROUNDS: usize = 20;
const N_RACERS: usize = 16;
const N_WRITERS: usize = 64;
const N_INCREMENTS: usize = 3;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_creations_exactly_one_wins() {
    let store = Store::start().await;
    let s3 = std::sync::Arc::new(store.object_store("racer"));
    for round in 0..N_ROUNDS {
        let barrier = std::sync::Arc::new(Barrier::new(N_RACERS));
        let mut racers = JoinSet::new();
        for racer in 0..N_RACERS {
            let (s3, barrier) = (s3.clone(), barrier.clone());
            racers.spawn(async move {
                let path = Path::from(format!("race/{round}"));
                barrier.wait().await;
                let put = s3.put_opts(&path, racer.to_string().into(), PutMode::Create.into()).await;
                match put {
                    Ok(_) => Some(racer),
                    Err(Error::AlreadyExists { .. }) => None,
                    Err(err) => panic!("{err}"),
                }
            });
        }
        let winners: Vec<usize> = racers.join_all().await.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1, "round {round}: {winners:?}");
        assert_eq!(store.get(&format!("race/{round}")).await, winners[0].to_string());
    }
}

/// Increments a counter by compare-and-swap. Gives back every value that was acknowledged, and by whom.
async fn count_up(s3: &impl ObjectStore, path: &Path, writer: usize) -> Vec<(u64, usize)> {
    let mut acknowledged = Vec::new();
    while acknowledged.len() < N_INCREMENTS {
        let current = s3.get(path).await.unwrap();
        let e_tag = current.meta.e_tag.clone();
        let text = current.bytes().await.unwrap();
        let value: u64 = std::str::from_utf8(&text).unwrap().split(' ').next().unwrap().parse().unwrap();
        // The writer's name makes bodies differ: equal ones would have equal ETags.
        let next = PutPayload::from(format!("{} {writer}", value + 1));
        let mode = PutMode::Update(UpdateVersion { e_tag, version: None });
        match s3.put_opts(path, next, PutOptions::from(mode)).await {
            Ok(_) => acknowledged.push((value + 1, writer)),
            Err(Error::Precondition { .. }) => (),
            Err(err) => panic!("{err}"),
        }
    }
    acknowledged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_acknowledged_increment_counts_once() {
    let store = Store::start_with(|options| S3Options { durable: true, ..options }).await;
    let s3 = std::sync::Arc::new(store.object_store("counter"));
    let path = Path::from("counter");
    s3.put(&path, "0 none".into()).await.unwrap();
    let mut writers = JoinSet::new();
    for writer in 0..N_WRITERS {
        let (s3, path) = (s3.clone(), path.clone());
        writers.spawn(async move { count_up(&*s3, &path, writer).await });
    }
    let acknowledged: Vec<(u64, usize)> = writers.join_all().await.concat();
    let history: BTreeMap<u64, usize> = acknowledged.iter().copied().collect();
    // Each value was written by one writer only, none was skipped, and the last one is what there is.
    let n_expected = N_WRITERS * N_INCREMENTS;
    assert_eq!((acknowledged.len(), history.len()), (n_expected, n_expected));
    assert!(history.keys().copied().eq(1..=n_expected as u64));
    let (last, writer) = history.last_key_value().unwrap();
    assert_eq!(store.get("counter").await, format!("{last} {writer}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_conditional_deletions_and_updates_one_acts_on_each_version() {
    let store = std::sync::Arc::new(Store::start().await);
    for round in 0..N_ROUNDS {
        let tag = store.put("k", &format!("version {round}")).await;
        let mut racers = JoinSet::new();
        for racer in 0..N_RACERS {
            let (store, tag) = (store.clone(), tag.clone());
            racers.spawn(async move {
                let method = ["DELETE", "PUT"][racer % 2];
                let body = format!("round {round} racer {racer}");
                let status = store.send(method, "k", &[("if-match", &tag)], &body).await.status();
                assert!([200, 204, 404, 412].contains(&status.as_u16()), "{status}");
                status.is_success()
            });
        }
        let n_winners = racers.join_all().await.into_iter().filter(|won| *won).count();
        assert_eq!(n_winners, 1, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_never_goes_back_in_time() {
    let store = std::sync::Arc::new(Store::start().await);
    store.put("k", "0").await;
    let mut readers = JoinSet::new();
    for reader in 0..8 {
        let store = store.clone();
        readers.spawn(async move {
            let mut last = 0;
            while last < 200 {
                let answer = store.send("GET", "k", &[], "").await;
                let (tag, text) = (crate::s3_common::etag(&answer), answer.text().await.unwrap());
                let now: u64 = text.parse().unwrap();
                assert!(last <= now, "reader {reader} saw {now} after {last}");
                let head = store.send("HEAD", "k", &[("if-match", &tag)], "").await;
                assert!([200, 412].contains(&head.status().as_u16()));
                last = now;
            }
        });
    }
    for n in 1..=200 {
        store.put("k", &n.to_string()).await;
        assert_eq!(store.get("k").await, n.to_string(), "a write is seen by whoever asks after its answer");
    }
    readers.join_all().await;
}
