//! The client and the election on an API server.

use std::{sync::Arc, time::Duration};

use nstance_devk8s::Fault;
use nstance_operator::{
    cluster::{
        event_writer::EventWriter,
        events::{About, EventSink, Severity},
        leadership::Leadership,
        lease::{Election, LEASE_NAME},
        store::Store,
        watch,
    },
    ports::{Apply, KubeErrorKind, KubePort, ObjectRef, Propagation, Selector, Target, kinds},
};
use serde_json::json;
use tokio::time::timeout;

use crate::support::{DEADLINE, World, client, clock, until};

fn config_map(name: &str) -> ObjectRef {
    ObjectRef::new(kinds::CONFIG_MAP, "default", name)
}

const OURS: Apply = Apply { manager: "nstance-operator", force: true, target: Target::Main };

#[tokio::test(flavor = "multi_thread")]
async fn an_apply_with_the_uid_of_a_deleted_object_does_not_bring_it_back() {
    let world = World::new().await;
    let object = config_map("a");
    let made = world.kube.create(&object, &json!({ "data": { "x": "1" } }), "nstance-operator").await.unwrap();
    let again = world.kube.create(&object, &json!({}), "nstance-operator").await.unwrap_err();
    assert_eq!(again.kind, KubeErrorKind::AlreadyExists);
    let uid = made["metadata"]["uid"].as_str().unwrap();
    world.kube.delete(&object, Some("another"), Propagation::Background).await.unwrap();
    assert!(world.get(&object).await.is_some(), "another object was meant");
    world.kube.delete(&object, Some(uid), Propagation::Background).await.unwrap();
    world.kube.delete(&object, Some(uid), Propagation::Background).await.unwrap();
    let body = json!({ "metadata": { "uid": uid }, "data": { "x": "2" } });
    let refused = world.kube.apply(&object, &body, OURS).await.unwrap_err();
    assert_eq!(refused.kind, KubeErrorKind::Conflict);
    assert!(refused.to_string().contains("ConfigMap default/a"), "{refused}");
    assert_eq!(world.get(&object).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_does_not_lead_writes_nothing() {
    let world = World::new().await;
    let standby = client(&world.api, "standby", Leadership::standby(clock())).await;
    let refused = standby.apply(&config_map("a"), &json!({ "data": {} }), OURS).await.unwrap_err();
    assert_eq!(refused.kind, KubeErrorKind::NotLeader);
    assert_eq!(standby.get(&config_map("a")).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_reads_all_pages() {
    let world = World::new().await;
    for n in 0..501 {
        world
            .kube
            .create(&config_map(&format!("m{n}")), &json!({ "metadata": { "labels": { "a": "b" } } }), "t")
            .await
            .unwrap();
    }
    let selector = Selector { namespace: Some("default".into()), labels: Some("a=b".into()), fields: None };
    let listed = world.kube.list(kinds::CONFIG_MAP, &selector).await.unwrap();
    assert_eq!(listed.len(), 501);
    assert_eq!(listed[0]["kind"], "ConfigMap");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_during_a_broken_watch_is_told() {
    let world = World::new().await;
    let api = kube::Api::<k8s_openapi::api::core::v1::ConfigMap>::namespaced(world.kube.watching(), "default");
    world.kube.create(&config_map("a"), &json!({}), "t").await.unwrap();
    let store = Store::new();
    let config = kube::runtime::watcher::Config::default();
    watch::start(&world.tasks, "watch", api, config, |_| {}, store.clone());
    timeout(DEADLINE, store.until_synced()).await.unwrap();
    assert!(store.named("default", "a").unwrap().metadata.managed_fields.is_none());
    // The test's own client is refused as well, so it deletes by another one.
    let other = client(&world.api, "other", Leadership::always(clock())).await;
    world.api.set_fault(Some(Fault::Refuse { callers: "test".into() }));
    other.delete(&config_map("a"), None, Propagation::Background).await.unwrap();
    other.create(&config_map("b"), &json!({}), "t").await.unwrap();
    world.api.too_old_watches();
    world.api.set_fault(None);
    until("the store follows", || async {
        store.named("default", "a").is_none() && store.named("default", "b").is_some()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_candidates_one_leads_and_the_other_follows_at_once_when_it_is_released() {
    let world = World::new().await;
    let lead = |name: &str| {
        let leadership = Leadership::standby(clock());
        let kube: Arc<dyn KubePort> = Arc::new(world.kube.clone());
        (Election::new(kube, "default", name.to_owned(), clock(), leadership.clone()), leadership)
    };
    let (mut first, leads_first) = lead("first");
    let (mut second, leads_second) = lead("second");
    timeout(DEADLINE, first.acquire()).await.unwrap();
    assert!(leads_first.is_leader());
    assert!(timeout(Duration::from_millis(300), second.acquire()).await.is_err(), "it must wait");
    assert!(!leads_second.is_leader());
    first.release().await;
    assert!(!leads_first.is_leader());
    timeout(DEADLINE, second.acquire()).await.unwrap();
    assert!(leads_second.is_leader());
    let lease = world.get(&ObjectRef::new(kinds::LEASE, "default", LEASE_NAME)).await.unwrap();
    assert_eq!(lease["spec"]["holderIdentity"], "second");
    assert_eq!(leads_second.transitions(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_whose_api_server_is_silent_gives_up_before_others_may_begin() {
    let world = World::new().await;
    let leadership = Leadership::standby(clock());
    let kube: Arc<dyn KubePort> = Arc::new(client(&world.api, "leader", Leadership::always(clock())).await);
    let mut election = Election::new(kube, "default", "a".into(), clock(), leadership.clone());
    timeout(DEADLINE, election.acquire()).await.unwrap();
    world.api.set_fault(Some(Fault::BlackHole { callers: "leader".into() }));
    let began = tokio::time::Instant::now();
    timeout(DEADLINE, election.hold()).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(13), "{:?}", began.elapsed());
    assert!(!leadership.is_leader());
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_written_and_equal_ones_once() {
    let world = World::new().await;
    let made = world.kube.create(&config_map("a"), &json!({}), "t").await.unwrap();
    let uid = made["metadata"]["uid"].as_str().unwrap().to_owned();
    let writer = EventWriter::start(&world.tasks, Arc::new(world.kube.clone()), clock());
    let about = About { object: config_map("a"), uid };
    for message in ["one", "one", "two"] {
        writer.emit(&about, Severity::Normal, "SizePushed", message);
    }
    let selector = Selector { namespace: Some("default".into()), ..Selector::default() };
    let (kube, selector) = (&world.kube, &selector);
    let events = || async { kube.list(kinds::EVENT, selector).await.unwrap() };
    until("both events are written", || async { events().await.len() == 2 }).await;
    assert!(events().await.iter().all(|it| it["involvedObject"]["name"] == "a" && it["count"] == 1));
}
