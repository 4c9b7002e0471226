use std::sync::{Arc, atomic::Ordering::Relaxed};

use nstance_core::{
    ids::ClusterId,
    instance::Delete,
    ports::objects::{Condition, ShowPage, StoreFault, Unavailable},
    time::Timestamp,
};
use nstance_rt::entropy::SeededEntropy;

use super::*;
use crate::{
    cas::Records,
    faulty::{Fault, FaultPlan, FaultyStore},
    records::instance_key,
    testing::{Bench, instance, shard},
};

struct World {
    bench: Bench,
    link: Arc<FaultyStore>,
    records: Records,
    dir: tempfile::TempDir,
}

impl World {
    async fn with(n: u32) -> Self {
        let bench = Bench::new();
        let link = bench.link(1);
        let records = bench.records(bench.bucket.clone(), 1);
        let guard = bench.guard(3);
        for n in 0..n {
            records.create_instance(&guard, &instance(n)).await.unwrap();
        }
        records.update_groups(&guard, None, |it| Some(it.clone())).await.unwrap();
        Self { bench, link, records, dir: tempfile::tempdir().unwrap() }
    }

    fn cache(&self) -> Cache {
        let cluster: ClusterId = "c".parse().unwrap();
        Cache::open_at(self.dir.path(), &cluster, &shard(), Timestamp::EPOCH).unwrap()
    }

    async fn rebuild(&self, cache: Option<&Cache>) -> Result<Rebuilt, RebuildError> {
        rebuild(&*self.link, cache, &shard(), &SeededEntropy::new(5)).await
    }

    fn key(&self, n: u32) -> String {
        instance_key(&shard(), &instance(n).group.tenant, &instance(n).id)
    }

    async fn overwrite(&self, key: &str, body: &[u8]) {
        let there = self.bench.bucket.get(key).await.unwrap();
        self.bench.bucket.put(key, body.to_vec(), Condition::Match(there.etag)).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_warm_rebuild_fetches_only_what_changed() {
    let world = World::with(200).await;
    let cache = world.cache();
    let cold = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!((cold.instances.len(), cold.n_listed, cold.n_fetched), (200, 200, 201));
    assert_eq!(cold.highest_epoch, Epoch(3));
    let guard = world.bench.guard(4);
    let renewed = |it: &Instance| Some(Instance { adopted_at: Some(Timestamp::EPOCH), ..it.clone() });
    world.records.update_instance(&guard, &cold.instances[7], renewed).await.unwrap();
    world.records.create_instance(&guard, &instance(900)).await.unwrap();
    let before = world.link.calls();
    let warm = world.rebuild(Some(&cache)).await.unwrap();
    let after = world.link.calls();
    assert_eq!((warm.n_fetched, after.get - before.get, after.list - before.list), (2, 2, 1));
    assert_eq!(warm.highest_epoch, Epoch(4));
    assert_eq!(cache.highest_epoch().unwrap(), Epoch(4));
    // And from the file, after a restart, with the very same result as without any cache.
    drop(cache);
    let restarted = world.rebuild(Some(&world.cache())).await.unwrap();
    let fresh = world.rebuild(None).await.unwrap();
    assert_eq!(restarted.n_fetched, 0);
    assert_eq!(Rebuilt { n_fetched: 0, ..fresh }, restarted);
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_without_news_leaves_the_records_of_the_cache_alone() {
    let world = World::with(20).await;
    let cache = world.cache();
    world.rebuild(Some(&cache)).await.unwrap();
    // A mark in the derived tables that only a rewrite would take away.
    let elsewhere = GroupRef::new(instance(3).group.tenant, "elsewhere".parse().unwrap());
    let marked = Instance { group: elsewhere.clone(), ..instance(3) };
    let is_marked = || !cache.instances_of(&elsewhere).unwrap().is_empty();
    cache.put_instance(&marked).unwrap();
    let again = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!((again.instances.len(), again.n_fetched), (20, 0));
    assert!(is_marked());
    // One record less, one more, or another groups file: all is derived anew.
    let gone = world.bench.bucket.get(&world.key(7)).await.unwrap();
    world.bench.bucket.delete(&world.key(7)).await.unwrap();
    world.rebuild(Some(&cache)).await.unwrap();
    assert!(is_marked(), "the cache keeps what vanished, so nothing is new in it");
    world.bench.bucket.put(&world.key(7), gone.body, Condition::Create).await.unwrap();
    world.records.create_instance(&world.bench.guard(3), &instance(900)).await.unwrap();
    world.rebuild(Some(&cache)).await.unwrap();
    assert!(!is_marked());
}

#[tokio::test(start_paused = true)]
async fn a_partial_rebuild_creates_nothing() {
    let world = World::with(50).await;
    let cache = world.cache();
    world.rebuild(Some(&cache)).await.unwrap();
    let known = cache.objects().unwrap();
    world.records.create_instance(&world.bench.guard(3), &instance(900)).await.unwrap();
    // One object that cannot be read fails it all, and is named.
    world.link.script_gets([Fault::None].into_iter().chain([Fault::Unreachable; 8]));
    match world.rebuild(Some(&cache)).await {
        Err(RebuildError::Store { key, .. }) => assert_eq!(key, world.key(900)),
        other => panic!("{other:?}"),
    }
    assert_eq!(cache.objects().unwrap(), known, "nothing of it was swapped in");
    world.link.script_gets([]);
    let again = World { link: world.bench.link(2), ..world };
    again.link.script_lists([Fault::Unreachable; 8]);
    match again.rebuild(Some(&cache)).await {
        Err(RebuildError::Store { key, .. }) => assert_eq!(key, "shard/a/instance/"),
        other => panic!("{other:?}"),
    }
    assert_eq!(cache.objects().unwrap(), known);
    let again = World { link: again.bench.link(3), ..again };
    again.link.script_lists([Fault::Throttled, Fault::Unreachable]);
    assert_eq!(again.rebuild(Some(&cache)).await.unwrap().instances.len(), 51, "passing trouble is waited out");
}

#[tokio::test(start_paused = true)]
async fn a_stormy_store_gives_the_whole_or_an_error() {
    let world = World::with(60).await;
    let truth = world.rebuild(None).await.unwrap();
    let (mut n_whole, mut n_failed) = (0, 0);
    for seed in 0..30 {
        let plan = FaultPlan {
            max_delay: std::time::Duration::from_millis(30),
            throttled: 150,
            failed_reads: 150,
            failed_lists: 300,
            ..FaultPlan::default()
        };
        let link = FaultyStore::new(world.bench.bucket.clone(), Arc::new(SeededEntropy::new(seed)), plan);
        match rebuild(&link, None, &shard(), &SeededEntropy::new(seed)).await {
            Ok(rebuilt) => {
                n_whole += 1;
                assert_eq!(rebuilt, truth, "seed {seed}");
            }
            Err(RebuildError::Store { .. }) => n_failed += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
    assert!(0 < n_whole && 0 < n_failed, "{n_whole} whole, {n_failed} failed");
}

#[tokio::test(start_paused = true)]
async fn a_broken_record_is_reported_and_the_others_live() {
    let world = World::with(3).await;
    let cache = world.cache();
    world.overwrite(&world.key(0), b"{ \"version\": 1, \"group\" : \"web\", \"oops").await;
    world.overwrite(&world.key(1), b"{ \"version\": 1, \"group\": 7 }").await;
    let foreign = "shard/a/instance/README.txt";
    world.bench.bucket.put(foreign, b"hello".to_vec(), Condition::Create).await.unwrap();
    let rebuilt = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!(rebuilt.instances.len(), 1);
    assert_eq!(rebuilt.foreign_keys, [foreign]);
    let corrupt: Vec<_> = rebuilt.corrupt.iter().map(|it| (it.instance, it.group.clone())).collect();
    assert_eq!(corrupt, [(instance(0).id, Some(instance(0).group)), (instance(1).id, None)]);
    assert!(rebuilt.corrupt[0].message.contains(&world.key(0)));
    assert!(world.bench.bucket.get(foreign).await.is_ok(), "never deleted");
}

#[tokio::test(start_paused = true)]
async fn a_newer_record_stops_the_rebuild() {
    let world = World::with(2).await;
    world.overwrite(&world.key(1), b"{ \"version\": 2 }").await;
    match world.rebuild(None).await {
        Err(RebuildError::TooNew { key, version: 2 }) => assert_eq!(key, world.key(1)),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_deleted_since_the_listing_is_no_error() {
    let world = World::with(3).await;

    /// Lists one key too many, as a store does when somebody deletes right after.
    struct Late(Arc<FaultyStore>, String);

    #[async_trait::async_trait]
    impl ObjectStore for Late {
        async fn get(&self, key: &str) -> Result<Object, StoreError> {
            self.0.get(key).await
        }
        async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
            self.0.get_if_changed(key, etag).await
        }
        async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
            self.0.put(key, body, condition).await
        }
        async fn delete(&self, key: &str) -> Result<(), StoreError> {
            self.0.delete(key).await
        }
        async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
            let listed = self.0.list(prefix).await;
            self.0.delete(&self.1).await?;
            listed
        }
        fn describe(&self) -> String {
            self.0.describe()
        }
    }

    let late = Late(world.link.clone(), world.key(1));
    let rebuilt = rebuild(&late, None, &shard(), &SeededEntropy::new(1)).await.unwrap();
    assert_eq!((rebuilt.instances.len(), rebuilt.n_listed), (2, 3));
}

/// Two records to a page. The second page comes only when one of the first has been read.
struct Paged {
    inner: Arc<FaultyStore>,
    was_read: tokio::sync::Notify,
    /// How many listings break off behind their first page.
    breaks: std::sync::atomic::AtomicU32,
}

#[async_trait::async_trait]
impl ObjectStore for Paged {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        let object = self.inner.get(key).await;
        if key.contains("/instance/") {
            self.was_read.notify_one();
        }
        object
    }
    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.inner.get_if_changed(key, etag).await
    }
    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        self.inner.put(key, body, condition).await
    }
    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.inner.delete(key).await
    }
    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.inner.list(prefix).await
    }
    async fn list_pages(&self, prefix: &str, show: ShowPage<'_>) -> Result<Vec<Listed>, StoreError> {
        let listed = self.inner.list(prefix).await?;
        let (first, rest) = listed.split_at(2);
        show(first);
        let breaks = || self.breaks.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1)).is_ok();
        self.was_read.notified().await;
        if breaks() {
            // What was named may change before it is named again.
            self.inner.delete(&first[0].key).await?;
            let fault = StoreFault::Unavailable(Unavailable::Network);
            return Err(StoreError::new("list", prefix, fault, "broke off"));
        }
        show(rest);
        Ok(listed)
    }
    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[tokio::test(start_paused = true)]
async fn records_are_read_while_others_are_listed() {
    let world = World::with(6).await;
    let paged = |breaks: u32| Paged { inner: world.link.clone(), was_read: Default::default(), breaks: breaks.into() };
    let read = async |paged: Paged| {
        let limit = std::time::Duration::from_secs(60);
        let read = async { rebuild(&paged, None, &shard(), &SeededEntropy::new(1)).await.unwrap() };
        tokio::time::timeout(limit, read).await.expect("the second page waits for a read of the first")
    };
    assert_eq!(read(paged(0)).await, world.rebuild(None).await.unwrap());
    // Of a listing that broke off nothing is kept but what the next one names as well.
    assert_eq!(read(paged(1)).await.instances.len(), 5);
}

#[tokio::test(start_paused = true)]
async fn groups_that_are_absent_or_broken_are_remembered() {
    let world = World::with(1).await;
    let cache = world.cache();
    world.rebuild(Some(&cache)).await.unwrap();
    world.overwrite("shard/a/groups.jsonc", b"{ oops").await;
    let broken = world.rebuild(Some(&cache)).await.unwrap();
    assert!(matches!(broken.groups, GroupsState::Unreadable(DecodeError::Corrupt { line: 1, .. })));
    assert!(broken.remembered_groups.is_some());
    world.bench.bucket.delete("shard/a/groups.jsonc").await.unwrap();
    let absent = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!(absent.groups, GroupsState::Absent);
    let remembered = absent.remembered_groups.expect("the cache still has it");
    let guard = world.bench.guard(3);
    world.records.put_back_groups(&guard, &remembered).await.unwrap();
    assert!(world.rebuild(Some(&cache)).await.unwrap().groups.present().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_emptied_bucket_does_not_empty_the_cache() {
    let world = World::with(3).await;
    let cache = world.cache();
    let guard = world.bench.guard(3);
    let full = world.rebuild(Some(&cache)).await.unwrap();
    let gone = |it: &Instance| {
        let at = Timestamp::EPOCH;
        Some(Instance {
            delete: Some(Delete { reason: "x".into(), by: "x".into(), requested_at: at, gone_at: Some(at) }),
            ..it.clone()
        })
    };
    world.records.update_instance(&guard, &full.instances[0], gone).await.unwrap();
    world.rebuild(Some(&cache)).await.unwrap();
    for n in 0..3 {
        world.bench.bucket.delete(&world.key(n)).await.unwrap();
    }
    let empty = world.rebuild(Some(&cache)).await.unwrap();
    assert!(empty.instances.is_empty());
    let vanished: Vec<_> = empty.vanished.iter().map(|it| it.value.id).collect();
    assert_eq!(vanished, [instance(1).id, instance(2).id], "one had come to its end and was rightly forgotten");
    assert_eq!(world.rebuild(Some(&cache)).await.unwrap().vanished.len(), 2, "the last copy is kept");
    world.records.put_back_instance(&guard, &empty.vanished[0]).await.unwrap();
    cache.purge_instance(&empty.vanished[1].value).unwrap();
    let healed = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!((healed.instances.len(), healed.vanished.len()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_records_are_read_many_at_a_time() {
    let world = World::with(10_000).await;
    let cache = world.cache();
    world.link.set_plan(FaultPlan { max_delay: std::time::Duration::from_millis(30), ..FaultPlan::default() });
    let before = world.bench.clock.monotonic();
    let cold = world.rebuild(Some(&cache)).await.unwrap();
    let took = world.bench.clock.monotonic().since(before);
    assert_eq!((cold.instances.len(), cold.n_fetched), (10_000, 10_001));
    assert!(took < std::time::Duration::from_secs(6), "simulated time, so no flake: {took:?}");
    let warm = world.rebuild(Some(&cache)).await.unwrap();
    assert_eq!(warm.n_fetched, 0);
    assert_eq!(warm.instances, cold.instances);
}
