//! Two servers and one lease: who acts, who waits, and that nobody acts who may not.

use std::{sync::Arc, time::Duration};

use crate::common::{Shard, Site, fleet::Fleet, meddler::Meddler, overwrite, shard_id, wait_for, wait_until, wire};
use nstance_core::{ids::Epoch, instance::Phase, ports::objects::ObjectStore};
use nstance_providers::fake::{FakeOptions, Op};
use nstance_rt::entropy::SeededEntropy;
use nstance_server::{boot, boot::Parts, vitals::Role};
use nstance_store::{
    faulty::{FaultPlan, FaultyStore},
    memory::MemoryStore,
    records::{self, Versioned, instance_key, leader::LeaseRecord, lease_key},
};
use serde_json::Value;

fn short_lease(config: &mut Value) {
    config["server"]["leader_election"] =
        serde_json::json!({ "ttl": "2s", "renew_interval": "400ms", "margin": "500ms" });
}

fn faulty(inner: &Arc<dyn ObjectStore>) -> Arc<FaultyStore> {
    Arc::new(FaultyStore::new(inner.clone(), Arc::new(SeededEntropy::new(3)), FaultPlan::default()))
}

async fn lease(store: &dyn ObjectStore) -> Versioned<LeaseRecord> {
    let key = lease_key(Some(&shard_id()));
    let object = store.get(&key).await.expect("the lease");
    records::decode_object(&key, object).expect("a lease")
}

/// Effects of later calls never carry a lower epoch than those before them.
fn assert_epochs_rise(site: &Site) {
    let epochs: Vec<_> = site.cloud.calls().into_iter().filter(|call| call.op.is_effect()).map(|it| it.epoch).collect();
    assert!(epochs.iter().all(Option::is_some), "every effect has an epoch");
    assert!(epochs.is_sorted(), "{epochs:?}");
}

#[tokio::test]
async fn one_leads_the_other_follows_and_takes_over() {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let mut second = site.boot("srv-2");
    wait_for("the second is loaded", || second.vitals.is_loaded()).await;
    wait_for("the second follows", || second.vitals.role() == Role::Following).await;
    let health = second.health_addr().await.unwrap();
    assert_eq!(wire::get(health, "/health").await.unwrap().0, 200, "healthy");
    assert_eq!(wire::get(health, "/ready").await.unwrap().0, 200, "able to lead");
    assert_eq!(wire::get(health, "/leader").await.unwrap().0, 503, "but not leading");
    let epoch = shard.leader.epoch;
    shard.server.stop(Duration::from_secs(5)).await;
    assert!(lease(site.bucket.as_ref()).await.value.released || second.vitals.role() != Role::Following);
    let shard = Shard::of(site.clone(), second).await;
    assert!(epoch < shard.leader.epoch);
    fleet.follow(&shard);
    // Only whom the new leader has heard can be missed at once; the fleet may still count on links to the old one.
    wait_for("the new leader hears both", || shard.server.metrics.agents_connected.get() == 2).await;
    fleet.is_whole(&site, 2).await;
    site.cloud.kill(site.standing()[0]);
    fleet.is_whole(&site, 2).await;
    site.assert_nothing_leaks().await;
    assert_eq!(site.calls(Op::Create).len(), 3);
    assert_epochs_rise(&site);
}

#[tokio::test]
async fn a_leader_cut_off_from_the_store_stops_by_itself() {
    let bucket: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
    let site = Arc::new(Site::on(bucket.clone(), FakeOptions::default()));
    let mut config = site.config(2);
    short_lease(&mut config);
    // Agents stay with the stalled one, so its successor learns of a loss by listing.
    config["server"]["garbage_collection"]["interval"] = "500ms".into();
    site.upload(&config).await;
    let own_way = faulty(&bucket);
    let first = boot::start(Parts { store: own_way.clone(), ..site.parts("srv-1") });
    let first = Shard::of(site.clone(), first).await;
    let fleet = Fleet::on(&first);
    fleet.is_whole(&site, 2).await;
    let second = site.boot("srv-2");
    wait_for("the second follows", || second.vitals.role() == Role::Following && second.vitals.is_loaded()).await;

    own_way.set_unreachable(true);
    wait_for("the first is stalled", || first.server.vitals.role() == Role::Stalled).await;
    site.cloud.kill(site.standing()[0]);
    let second = Shard::of(site.clone(), second).await;
    fleet.follow(&second);
    fleet.is_whole(&site, 2).await;
    let by_first = site.calls(Op::Create).into_iter().filter(|call| call.epoch == Some(first.leader.epoch)).count();
    assert_eq!(by_first, 2, "only those of its time");
    assert_epochs_rise(&site);

    own_way.set_unreachable(false);
    wait_for("the first follows", || first.server.vitals.role() == Role::Following).await;
    fleet.is_whole(&site, 2).await;
    site.assert_nothing_leaks().await;
    assert_eq!(site.calls(Op::Create).len(), 3);
}

#[tokio::test]
async fn losing_the_swap_ends_the_term() {
    let shard = Shard::start_with(2, short_lease).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let (site, epoch) = (shard.site.clone(), shard.leader.epoch);
    // Somebody else takes the lease and holds it.
    let key = lease_key(Some(&shard_id()));
    let taken = lease(site.bucket.as_ref()).await;
    let theirs = LeaseRecord {
        epoch: Epoch(epoch.0 + 5),
        holder: "srv-9".to_owned(),
        process: "0123456789abcdef0123456789abcdef".to_owned(),
        addr: "192.0.2.9:8991".to_owned(),
        ttl: Duration::from_secs(60),
        ..taken.value.clone()
    };
    let meta = records::Meta { write_id: "theirs".to_owned(), epoch: theirs.epoch, ..taken.meta.clone() };
    overwrite(site.bucket.as_ref(), &key, records::encode(&theirs, &meta, &taken.extra)).await;
    wait_for("it steps down", || shard.server.vitals.role() == Role::Following).await;
    let creates = site.calls(Op::Create).len();
    site.cloud.kill(site.standing()[0]);
    assert_eq!(lease(site.bucket.as_ref()).await.value, theirs, "what is theirs is not touched");

    // They give it back: only then anything happens, and above their epoch.
    assert_eq!(site.calls(Op::Create).len(), creates);
    let released = LeaseRecord { released: true, ..theirs };
    overwrite(site.bucket.as_ref(), &key, records::encode(&released, &meta, &taken.extra)).await;
    let shard = Shard::of(site.clone(), shard.server).await;
    assert!(epoch.0 + 5 < shard.leader.epoch.0);
    fleet.follow(&shard);
    fleet.is_whole(&site, 2).await;
    site.assert_nothing_leaks().await;
    assert_epochs_rise(&site);
    assert_eq!(site.calls(Op::Create).last().unwrap().epoch, Some(shard.leader.epoch));
}

#[tokio::test]
async fn a_store_outage_longer_than_the_lease_stops_effects_only() {
    let bucket: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
    let store = faulty(&bucket);
    let site = Site::on(store.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 2, short_lease).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    let ids = site.standing();
    store.set_unreachable(true);
    wait_for("effects are stopped", || shard.server.vitals.role() == Role::Stalled).await;
    let effects = || site.cloud.calls().into_iter().filter(|call| call.op.is_effect()).count();
    let before = effects();
    site.cloud.kill(ids[0]);
    wait_for("its loss is seen", || shard.server.metrics.agents_connected.get() == 1).await;
    assert_eq!(fleet.connected(), [ids[1]], "agents stay connected");
    assert_eq!(effects(), before, "and nothing is done");
    store.set_unreachable(false);
    fleet.is_whole(&site, 2).await;
    wait_until("the dead one's record ends", async || site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    site.assert_nothing_leaks().await;
    assert_eq!(site.calls(Op::Create).len(), 3);
    assert_epochs_rise(&site);
    assert_eq!(lease(bucket.as_ref()).await.value.epoch, shard.leader.epoch, "it went on in its own epoch");
}

/// A group of two with all its records, whose successor can read everything but what `hidden` names.
async fn partial(hidden: impl FnOnce(&Site) -> String) {
    let bucket: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
    let site = Arc::new(Site::on(bucket.clone(), FakeOptions::default()));
    site.upload(&site.config(2)).await;
    let shard = site.lead("srv-1").await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&site, 2).await;
    let before = site.standing();

    let meddler = Arc::new(Meddler::new(bucket));
    let mut second = boot::start(Parts { store: meddler.clone(), ..site.parts("srv-2") });
    wait_for("the second follows", || second.vitals.is_loaded() && second.vitals.role() == Role::Following).await;
    // What is written from now on is not in its cache, so it must be read.
    site.cloud.kill(before[0]);
    fleet.is_whole(&site, 2).await;
    site.assert_nothing_leaks().await;
    let (before, creates) = (site.standing(), site.calls(Op::Create).len());
    meddler.hide(Some(&hidden(&site)));
    shard.server.stop(Duration::from_secs(5)).await;
    wait_for("the second has the lease", || second.vitals.role() == Role::Acquiring).await;
    let health = second.health_addr().await.unwrap();
    let looked = site.calls(Op::List).len();
    let tried = meddler.n_hidden();
    tokio::select! {
        biased;
        _ = second.leading() => panic!("served from a part of the picture"),
        () = wait_for("it has tried again and again", || tried + 3 <= meddler.n_hidden()) => {}
    }
    assert_eq!(wire::get(health, "/leader").await.unwrap().0, 503);
    assert_eq!(site.calls(Op::Create).len(), creates);
    assert_eq!(site.calls(Op::List).len(), looked, "nor is anything planned");

    meddler.hide(None);
    let shard = Shard::of(site.clone(), second).await;
    fleet.follow(&shard);
    fleet.is_whole(&site, 2).await;
    assert_eq!(site.standing(), before);
    assert_eq!(site.calls(Op::Create).len(), creates, "nobody was missed");
}

#[tokio::test]
async fn a_partial_rebuild_creates_nothing() {
    partial(|site| {
        let newest = *site.standing().last().unwrap();
        instance_key(&shard_id(), &crate::common::tenant(), &newest)
    })
    .await;
}

#[tokio::test]
async fn nothing_is_served_before_the_state_is_ready() {
    partial(|_| records::instance_prefix(&shard_id())).await;
}

#[tokio::test]
async fn stop_during_acquisition_finishes() {
    let bucket: Arc<dyn ObjectStore> = Arc::new(MemoryStore::new());
    let site = Arc::new(Site::on(bucket.clone(), FakeOptions::default()));
    site.upload(&site.config(1)).await;
    let shard = site.lead("srv-1").await;
    shard.only_vm().await;
    let meddler = Arc::new(Meddler::new(bucket));
    let second = boot::start(Parts { store: meddler.clone(), ..site.parts("srv-2") });
    wait_for("the second follows", || second.vitals.is_loaded() && second.vitals.role() == Role::Following).await;
    meddler.hide(Some(&records::instance_prefix(&shard_id())));
    shard.server.stop(Duration::from_secs(5)).await;
    wait_for("the second has the lease", || second.vitals.role() == Role::Acquiring).await;
    let stopped = tokio::time::timeout(Duration::from_secs(3), second.stop(Duration::from_secs(2))).await;
    stopped.expect("it stops");
    // It gave the lease back, so that a third need not wait for its end.
    assert!(lease(site.bucket.as_ref()).await.value.released);
    site.lead("srv-3").await.only_vm().await;
    assert_eq!(site.calls(Op::Create).len(), 1);
}

#[tokio::test]
async fn who_leads_no_more_exports_no_group() {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(store.clone(), FakeOptions::default()), 1, |_| {}).await;
    let exports = || shard.server.metrics.text().contains(r#"{tenant="default",group="web"}"#);
    wait_for("its group is exported", exports).await;
    // It does not get the lease back.
    store.cut(&[&lease_key(Some(&shard_id()))]);
    shard.server.term().unwrap().step_down("told to");
    wait_for("nothing is left of its group", || !exports()).await;
}

#[tokio::test]
async fn a_restarted_server_acquires_properly() {
    let shard = Shard::start(1).await;
    let (site, id) = (shard.site.clone(), shard.only_vm().await);
    let epoch = shard.leader.epoch;
    shard.server.stop(Duration::from_secs(5)).await;
    // The same id and the same cache: still a new process, a new epoch, a new term.
    let shard = site.lead("srv-1").await;
    assert!(epoch < shard.leader.epoch);
    assert_eq!(lease(site.bucket.as_ref()).await.value.epoch, shard.leader.epoch);
    assert_eq!(site.standing(), [id]);
    assert_eq!(site.calls(Op::Create).len(), 1);
}

/// The leader's wall clock is set: it leads on, and replaces what is lost, whose agents register as ever.
async fn jump(seconds: i64) {
    let shard = Shard::start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 2).await;
    let site = shard.site.clone();
    site.clock.jump(seconds);
    let dead = site.standing()[0];
    site.cloud.kill(dead);
    fleet.is_whole(&site, 2).await;
    wait_until("the dead one's record ends", async || site.phase(dead).await == Some(Phase::Deleted)).await;
    site.assert_nothing_leaks().await;
    assert_eq!(site.calls(Op::Create).len(), 3, "and nobody else was replaced");
    assert_eq!(shard.server.vitals.role(), Role::Leading);
    assert_eq!(lease(site.bucket.as_ref()).await.value.epoch, shard.leader.epoch);
}

#[tokio::test]
async fn a_wall_clock_set_forward_changes_nothing() {
    jump(3600).await;
}

#[tokio::test]
async fn a_wall_clock_set_back_changes_nothing() {
    jump(-3600).await;
}
