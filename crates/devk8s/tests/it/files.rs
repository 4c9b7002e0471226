//! The files are the objects: edited, added and removed by hand.

use nstance_devk8s::FileChanges;
use serde_json::{Value, json};

use crate::support::{Dev, MERGE, eventually};

const NODES: &str = "/api/v1/nodes";

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

/// As a provider writes it.
fn node(name: &str) -> String {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
        "spec": { "providerID": format!("dev:///{name}") },
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    })
    .to_string()
}

#[tokio::test]
async fn objects_lie_in_pretty_files_by_resource_namespace_and_name() {
    let dev = Dev::start().await;
    let map = json!({ "metadata": { "name": "ca" }, "data": { "ca.crt": "x" } });
    let created = dev.cluster.post("/api/v1/namespaces/default/configmaps", &map).await.expect(201);
    let text = std::fs::read_to_string(dev.file("configmaps/default/ca.json")).unwrap();
    assert!(text.starts_with("{\n  \"") && text.ends_with("}\n"), "{text}");
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), created);
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    assert!(dev.file("nodes/n.json").exists());
    dev.cluster.delete(&format!("{NODES}/n")).await.expect(200);
    assert!(!dev.file("nodes/n.json").exists());
}

#[tokio::test]
async fn a_new_file_becomes_an_object_with_an_identity() {
    let dev = Dev::start().await;
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    dev.write("nodes/tst1.json", &node("tst1"));
    let (kind, added) = events.expect().await;
    assert_eq!((kind.as_str(), &added["spec"]["providerID"]), ("ADDED", &json!("dev:///tst1")));
    for field in ["uid", "resourceVersion", "creationTimestamp"] {
        assert!(added["metadata"][field].is_string(), "{field}");
    }
    assert_eq!(added["status"]["conditions"][0]["status"], "True");
    let on_disk = eventually("the file has the identity too", || async {
        let object = dev.read("nodes/tst1.json");
        object["metadata"]["uid"].is_string().then_some(object)
    })
    .await;
    assert_eq!(on_disk, added);
    // The server's own write is no news: the next event is the next change.
    dev.cluster
        .patch(&format!("{NODES}/tst1"), MERGE, &json!({ "metadata": { "labels": { "a": "b" } } }))
        .await
        .expect(200);
    let (kind, changed) = events.expect().await;
    assert_eq!((kind.as_str(), version(&changed)), ("MODIFIED", version(&added) + 1));
}

/// Controllers write often: an edit must not be lost because one of them was quicker than the notification of the file.
#[tokio::test]
async fn an_edit_by_hand_survives_a_write_that_comes_before_it_was_noticed() {
    let dev = Dev::start().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let map = json!({ "metadata": { "name": "ca" }, "data": { "size": "1" } });
    dev.cluster.post(maps, &map).await.expect(201);
    for size in 2..30 {
        let mut edited = dev.read("configmaps/default/ca.json");
        edited["data"]["size"] = json!(size.to_string());
        dev.write("configmaps/default/ca.json", &edited.to_string());
        let label = json!({ "metadata": { "labels": { "seen": size.to_string() } } });
        let patched = dev.cluster.patch(&format!("{maps}/ca"), MERGE, &label).await.expect(200);
        assert_eq!(patched["data"]["size"], json!(size.to_string()));
    }
}

#[tokio::test]
async fn a_file_that_is_renamed_into_place_is_seen() {
    let dev = Dev::start().await;
    dev.write("nodes/first.json", &node("first"));
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    assert_eq!(events.named().await, ("ADDED".to_owned(), "first".to_owned()));
    dev.write("nodes/.second.tmp", &node("second"));
    std::fs::rename(dev.file("nodes/.second.tmp"), dev.file("nodes/second.json")).unwrap();
    assert_eq!(events.named().await, ("ADDED".to_owned(), "second".to_owned()));
}

#[tokio::test]
async fn an_edited_file_is_an_update() {
    let dev = Dev::start().await;
    let pools = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools";
    let pool = json!({ "metadata": { "name": "nstance-test" }, "spec": { "replicas": 2 } });
    let created = dev.cluster.post(pools, &pool).await.expect(201);
    let mut events = dev.cluster.watch(&format!("{pools}?watch=1&resourceVersion={}", version(&created))).await;
    let file = "machinepools/default/nstance-test.json";
    let mut edited = dev.read(file);
    edited["spec"]["replicas"] = json!(5);
    edited["metadata"]["uid"] = json!("changed by mistake");
    dev.write(file, &edited.to_string());
    let (kind, changed) = events.expect().await;
    assert_eq!((kind.as_str(), &changed["spec"]["replicas"]), ("MODIFIED", &json!(5)));
    assert_eq!(changed["metadata"]["generation"], 2);
    assert_eq!(changed["metadata"]["uid"], created["metadata"]["uid"]);
    assert!(version(&created) < version(&changed));
    let scale = dev.cluster.get(&format!("{pools}/nstance-test/scale")).await.expect(200);
    assert_eq!(scale["spec"]["replicas"], 5);
}

#[tokio::test]
async fn a_file_that_is_only_written_otherwise_is_no_update() {
    let dev = Dev::start().await;
    let created = dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1&resourceVersion={}", version(&created))).await;
    // Without its identity, and on one line.
    dev.write("nodes/n.json", "{}");
    eventually("the file has its identity again", || async {
        let text = std::fs::read_to_string(dev.file("nodes/n.json")).unwrap();
        (serde_json::from_str::<Value>(&text).ok()? == created).then_some(())
    })
    .await;
    dev.cluster.delete(&format!("{NODES}/n")).await.expect(200);
    assert_eq!(events.named().await, ("DELETED".to_owned(), "n".to_owned()));
}

#[tokio::test]
async fn a_removed_file_is_a_deletion() {
    let dev = Dev::start().await;
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "n", "finalizers": ["a.io/x"] } })).await.expect(201);
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    assert_eq!(events.named().await, ("ADDED".to_owned(), "n".to_owned()));
    std::fs::remove_file(dev.file("nodes/n.json")).unwrap();
    assert_eq!(events.named().await, ("DELETED".to_owned(), "n".to_owned()));
    dev.cluster.get(&format!("{NODES}/n")).await.refused(404, "NotFound");
}

#[tokio::test]
async fn a_finalizer_removed_by_hand_ends_an_object() {
    let dev = Dev::start().await;
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "n", "finalizers": ["a.io/x"] } })).await.expect(201);
    dev.cluster.delete(&format!("{NODES}/n")).await.expect(200);
    let mut edited = dev.read("nodes/n.json");
    edited["metadata"].as_object_mut().unwrap().remove("finalizers");
    dev.write("nodes/n.json", &edited.to_string());
    eventually("the node is gone", || async {
        (dev.cluster.get(&format!("{NODES}/n")).await.code == 404).then_some(())
    })
    .await;
    assert!(!dev.file("nodes/n.json").exists());
}

#[tokio::test]
async fn broken_json_leaves_the_last_good_object() {
    let dev = Dev::start().await;
    let created = dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1&resourceVersion={}", version(&created))).await;
    dev.write("nodes/n.json", "{ \"metadata\": ");
    dev.write("nodes/list.json", "[1]");
    dev.write("nodes/good.json", &node("good"));
    assert_eq!(events.named().await, ("ADDED".to_owned(), "good".to_owned()), "the broken files said nothing");
    assert_eq!(dev.cluster.get(&format!("{NODES}/n")).await.expect(200), created);
    dev.write("nodes/n.json", &json!({ "metadata": { "labels": { "a": "b" } } }).to_string());
    let (kind, repaired) = events.expect().await;
    assert_eq!((kind.as_str(), &repaired["metadata"]["labels"]["a"]), ("MODIFIED", &json!("b")));
    assert_eq!(repaired["metadata"]["uid"], created["metadata"]["uid"]);
}

#[tokio::test]
async fn a_copied_file_is_another_object() {
    let dev = Dev::start().await;
    let created = dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    std::fs::copy(dev.file("nodes/n.json"), dev.file("nodes/m.json")).unwrap();
    let copy = eventually("the copy is there", || async {
        let answer = dev.cluster.get(&format!("{NODES}/m")).await;
        (answer.code == 200).then_some(answer.body)
    })
    .await;
    assert_eq!(copy["metadata"]["name"], "m");
    assert_ne!(copy["metadata"]["uid"], created["metadata"]["uid"]);
}

#[tokio::test]
async fn a_directory_that_appears_with_files_is_read() {
    let dev = Dev::start().await;
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "data": {} }).to_string();
    dev.write("secrets/made-by-hand/s.json", &secret);
    let path = "/api/v1/namespaces/made-by-hand/secrets/s";
    let found = eventually("the secret is there", || async {
        let answer = dev.cluster.get(path).await;
        (answer.code == 200).then_some(answer.body)
    })
    .await;
    assert_eq!(found["metadata"]["namespace"], "made-by-hand");
    std::fs::remove_dir_all(dev.file("secrets")).unwrap();
    eventually("the secret is gone", || async { (dev.cluster.get(path).await.code == 404).then_some(()) }).await;
    dev.write("secrets/made-by-hand/t.json", &secret);
    let path = "/api/v1/namespaces/made-by-hand/secrets/t";
    eventually("the next one is seen", || async { (dev.cluster.get(path).await.code == 200).then_some(()) }).await;
}

#[tokio::test]
async fn a_restart_keeps_objects_and_counts_on() {
    let dev = Dev::start().await;
    let created = dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    let last = dev.cluster.post(NODES, &json!({ "metadata": { "name": "gone" } })).await.expect(201);
    let dir = dev.stop().await;
    // Without the counter's file the objects themselves say how far it was.
    std::fs::remove_file(dir.path().join("dev-k8s/.state/version")).unwrap();
    let dev = Dev::start_in(dir, |_| {}).await;
    let list = dev.cluster.get(NODES).await.expect(200);
    assert!(version(&last) <= version(&list));
    let dir = dev.stop().await;
    std::fs::remove_file(dir.path().join("dev-k8s/nodes/gone.json")).unwrap();
    std::fs::write(dir.path().join("dev-k8s/nodes/new.json"), node("new")).unwrap();
    let dev = Dev::start_in(dir, |_| {}).await;
    assert_eq!(dev.cluster.get(&format!("{NODES}/n")).await.expect(200), created);
    dev.cluster.get(&format!("{NODES}/gone")).await.refused(404, "NotFound");
    let new = dev.cluster.get(&format!("{NODES}/new")).await.expect(200);
    assert!(version(&last) < version(&new), "no version is given twice");
    assert!(new["metadata"]["uid"].is_string());
    let path = format!("{NODES}?watch=1&resourceVersion={}", version(&last));
    let event = dev.cluster.watch(&path).await.next().await.unwrap();
    assert_eq!((&event["type"], &event["object"]["code"]), (&json!("ERROR"), &json!(410)));
}

#[tokio::test]
async fn definitions_survive_a_restart_with_their_objects() {
    let dev = Dev::start().await;
    let definition = json!({
        "metadata": { "name": "gadgets.example.org" },
        "spec": {
            "group": "example.org", "scope": "Cluster", "names": { "plural": "gadgets", "kind": "Gadget" },
            "versions": [{ "name": "v1", "served": true, "storage": true }],
        },
    });
    dev.cluster.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition).await.expect(201);
    dev.cluster.post("/apis/example.org/v1/gadgets", &json!({ "metadata": { "name": "g" } })).await.expect(201);
    let dev = Dev::start_in(dev.stop().await, |_| {}).await;
    dev.cluster.get("/apis/example.org/v1/gadgets/g").await.expect(200);
}

#[tokio::test]
async fn the_directory_stays_inside_itself() {
    let dev = Dev::start().await;
    for path in ["/api/v1/namespaces/..%2F..%2Fx/secrets/s", "/api/v1/nodes/..%2F..%2Fx"] {
        dev.cluster.delete(path).await.refused(404, "NotFound");
        let object = json!({ "metadata": { "name": "../../x" } });
        dev.cluster.put(path, &object).await.expect_refusal();
        dev.cluster.apply(path, "m", &object).await.expect_refusal();
    }
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "../../x" } })).await.refused(422, "Invalid");
    assert!(!dev.dir.path().join("x.json").exists());
}

#[tokio::test]
async fn without_notifications_the_files_are_looked_at() {
    let dev = Dev::start_with(|options| options.file_changes = FileChanges::Polled).await;
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    dev.write("nodes/n.json", &node("n"));
    let (kind, added) = events.expect().await;
    assert_eq!((kind.as_str(), &added["metadata"]["name"]), ("ADDED", &json!("n")));
    let mut edited = added;
    edited["spec"]["unschedulable"] = json!(true);
    dev.write("nodes/n.json", &edited.to_string());
    assert_eq!(events.expect().await.1["spec"]["unschedulable"], true);
    std::fs::remove_file(dev.file("nodes/n.json")).unwrap();
    assert_eq!(events.named().await, ("DELETED".to_owned(), "n".to_owned()));
}
