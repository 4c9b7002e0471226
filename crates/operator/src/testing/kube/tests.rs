use serde_json::json;

use super::*;
use crate::testing::{NAMESPACE, World};

const SPEC: Apply = Apply { manager: "spec", force: false, target: Target::Main };
const OTHER: Apply = Apply { manager: "other", force: false, target: Target::Main };

fn machine(name: &str) -> ObjectRef {
    ObjectRef::new(kinds::MACHINE, NAMESPACE, name)
}

fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

#[tokio::test]
async fn an_apply_with_a_uid_does_not_bring_back_what_was_deleted() {
    let kube = World::new(&[]).kube;
    let object = machine("a");
    let made = kube.apply(&object, &json!({"spec": {"clusterName": "c"}}), SPEC).await.unwrap();
    let body = json!({"metadata": {"uid": text(&made, "/metadata/uid")}, "spec": {"clusterName": "c"}});
    let again = kube.apply(&object, &body, SPEC).await.unwrap();
    assert_eq!(text(&again, "/metadata/resourceVersion"), text(&made, "/metadata/resourceVersion"));
    kube.delete(&object, None, Propagation::Background).await.unwrap();
    assert!(kube.apply(&object, &body, SPEC).await.unwrap_err().is_conflict());
    assert!(kube.get(&object).await.unwrap().is_none());
    let remade = kube.apply(&object, &json!({"spec": {"clusterName": "c"}}), SPEC).await.unwrap();
    assert_ne!(text(&remade, "/metadata/uid"), text(&made, "/metadata/uid"));
    assert!(kube.apply(&object, &body, SPEC).await.unwrap_err().is_conflict());
}

#[tokio::test]
async fn a_manager_gives_up_what_it_leaves_out_and_conflicts_over_what_another_holds() {
    let kube = World::new(&[]).kube;
    let object = machine("a");
    kube.apply(&object, &json!({"metadata": {"annotations": {"x": "1", "y": "1"}}}), SPEC).await.unwrap();
    kube.apply(&object, &json!({"metadata": {"annotations": {"y": "1"}}}), OTHER).await.unwrap();
    let conflict = kube.apply(&object, &json!({"metadata": {"annotations": {"x": "2"}}}), OTHER).await.unwrap_err();
    assert!(conflict.is_conflict() && conflict.causes[0].1.contains("spec"), "{conflict:?}");
    let left = kube.apply(&object, &json!({"metadata": {"labels": {"z": "1"}}}), SPEC).await.unwrap();
    assert_eq!(left["metadata"]["annotations"], json!({"y": "1"}));
    let forced = Apply { force: true, ..SPEC };
    let taken = kube.apply(&object, &json!({"metadata": {"annotations": {"y": "2"}}}), forced).await.unwrap();
    assert_eq!(taken["metadata"]["annotations"], json!({"y": "2"}));
    let managers = taken["metadata"]["managedFields"].as_array().unwrap();
    assert_eq!(managers.len(), 1);
    assert!(managers[0]["fieldsV1"]["f:metadata"]["f:annotations"].get("f:y").is_some());
}

#[tokio::test]
async fn status_and_main_part_are_written_apart_and_only_the_spec_counts_generations() {
    let kube = World::new(&[]).kube;
    let object = machine("a");
    let body = json!({"spec": {"clusterName": "c"}, "status": {"phase": "Pending"}});
    let made = kube.create(&object, &body, "import").await.unwrap();
    assert!(made.get("status").is_none());
    let status = Apply { target: Target::Status, ..SPEC };
    let body = json!({"spec": {"clusterName": "other"}, "status": {"phase": "Running"}});
    let shown = kube.apply(&object, &body, status).await.unwrap();
    assert_eq!((text(&shown, "/spec/clusterName"), text(&shown, "/status/phase")), ("c", "Running"));
    let patch = json!({"spec": {"version": "v1"}, "status": {"phase": "Failed"}});
    let patched = kube.merge_patch(&object, &patch, Target::Main).await.unwrap();
    assert_eq!((text(&patched, "/spec/version"), text(&patched, "/status/phase")), ("v1", "Running"));
    assert_eq!(patched["metadata"]["generation"], 2);
}

#[tokio::test]
async fn an_object_with_finalizers_goes_when_the_last_one_does() {
    let kube = World::new(&[]).kube;
    let object = machine("a");
    let finalizers = json!({"metadata": {"finalizers": ["one", "two"]}});
    kube.create(&object, &finalizers, "import").await.unwrap();
    kube.delete(&object, None, Propagation::Background).await.unwrap();
    assert!(kube.get(&object).await.unwrap().unwrap()["metadata"].get("deletionTimestamp").is_some());
    let add = json!([{"op": "add", "path": "/metadata/finalizers/-", "value": "three"}]);
    assert_eq!(kube.json_patch(&object, &add).await.unwrap_err().kind, KubeErrorKind::Invalid);
    let wrong = json!([
        {"op": "test", "path": "/metadata/finalizers/0", "value": "two"},
        {"op": "remove", "path": "/metadata/finalizers/0"},
    ]);
    assert_eq!(kube.json_patch(&object, &wrong).await.unwrap_err().kind, KubeErrorKind::Invalid);
    let remove = json!([{"op": "remove", "path": "/metadata/finalizers/0"}]);
    kube.json_patch(&object, &remove).await.unwrap();
    assert!(kube.get(&object).await.unwrap().is_some());
    kube.json_patch(&object, &remove).await.unwrap();
    assert!(kube.get(&object).await.unwrap().is_none());
}

#[tokio::test]
async fn a_patch_of_an_old_version_is_refused() {
    let kube = World::new(&[]).kube;
    let object = machine("a");
    let made = kube.create(&object, &json!({}), "import").await.unwrap();
    let patch = |value: &str| json!({"metadata": {"resourceVersion": made["metadata"]["resourceVersion"], "labels": {"a": value}}});
    kube.merge_patch(&object, &patch("1"), Target::Main).await.unwrap();
    assert!(kube.merge_patch(&object, &patch("2"), Target::Main).await.unwrap_err().is_conflict());
}

#[tokio::test]
async fn calls_fail_when_a_test_says_so_and_a_lost_answer_is_a_write_all_the_same() {
    let kube = World::new(&[]).kube;
    kube.fail_nth("create", 2, KubeErrorKind::Forbidden);
    kube.lose_answer("create", 3);
    for (name, expected) in [("a", None), ("b", Some(403)), ("c", Some(503)), ("d", None)] {
        let outcome = kube.create(&machine(name), &json!({}), "import").await;
        assert_eq!(outcome.err().map(|it| it.code), expected, "{name}");
    }
    let names: Vec<String> =
        kube.all::<Value>(kinds::MACHINE).iter().map(|it| text(it, "/metadata/name").to_owned()).collect();
    assert_eq!(names, ["a", "c", "d"]);
    assert_eq!(kube.calls_of("create").iter().filter(|it| it.failed).count(), 2);
}

#[tokio::test]
async fn evictions_are_answered_as_scripted() {
    let kube = World::new(&[]).kube;
    let pod = ObjectRef::new(kinds::POD, NAMESPACE, "web-0");
    let made = kube.create(&pod, &json!({"spec": {"nodeName": "n"}}), "test").await.unwrap();
    let uid = text(&made, "/metadata/uid");
    let blocked = EvictionAnswer::BlockedBy { budget: "web".to_owned(), retry_after: None };
    kube.script_evictions(NAMESPACE, "web-0", vec![blocked, EvictionAnswer::Accept]);
    let refused = kube.evict(&pod, uid, None).await.unwrap_err();
    assert_eq!((refused.code, refused.causes[0].0.as_str()), (429, "DisruptionBudget"));
    kube.evict(&pod, uid, None).await.unwrap();
    assert!(kube.get(&pod).await.unwrap().is_none());
    kube.evict(&pod, uid, None).await.unwrap();
    let namesake = kube.create(&pod, &json!({}), "test").await.unwrap();
    assert!(kube.evict(&pod, uid, None).await.unwrap_err().is_conflict());
    kube.let_pods_linger();
    kube.evict(&pod, text(&namesake, "/metadata/uid"), None).await.unwrap();
    assert!(kube.get(&pod).await.unwrap().unwrap()["metadata"].get("deletionTimestamp").is_some());
}

#[tokio::test]
async fn feeding_tells_the_stores_what_changed_and_nothing_else() {
    let world = World::new(&[]);
    let told = Arc::new(Mutex::new(Vec::new()));
    let log = told.clone();
    world.context.stores.machines.on_change(move |change| log.lock().unwrap().push(change.key.name.clone()));
    for name in ["a", "b"] {
        world.kube.create(&machine(name), &json!({"spec": {"clusterName": "c"}}), "test").await.unwrap();
    }
    world.feed();
    world.kube.edit(kinds::MACHINE, NAMESPACE, "b", |it| it["status"] = json!({"phase": "Running"}));
    world.feed();
    world.kube.remove(kinds::MACHINE, NAMESPACE, "a");
    world.feed();
    assert_eq!(*told.lock().unwrap(), ["a", "b", "b", "a"]);
    assert!(world.context.workload.api().is_some() && world.context.stores.pods.is_synced());
}
