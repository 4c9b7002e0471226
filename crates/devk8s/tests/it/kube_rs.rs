//! kube-rs as our operator uses it.

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PartialObjectMeta, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use serde_json::json;

use crate::support::{Dev, PATIENCE};

fn named(name: &str) -> Node {
    serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap()
}

#[tokio::test]
async fn typed_objects_are_written_read_and_deleted() {
    let dev = Dev::start().await;
    let maps: Api<ConfigMap> = Api::namespaced(dev.cluster.client.clone(), "default");
    let map: ConfigMap = serde_json::from_value(json!({ "metadata": { "name": "m" }, "data": { "a": "b" } })).unwrap();
    let created = maps.create(&PostParams::default(), &map).await.unwrap();
    assert!(created.uid().is_some());
    let error = maps.create(&PostParams::default(), &map).await.unwrap_err();
    assert!(matches!(error, kube::Error::Api(status) if status.reason == "AlreadyExists"));
    let patch = json!({ "apiVersion": "v1", "kind": "ConfigMap", "data": { "a": "c" } });
    let params = PatchParams::apply("test").force();
    assert_eq!(maps.patch("m", &params, &Patch::Apply(patch)).await.unwrap().data.unwrap()["a"], "c");
    assert_eq!(maps.list(&ListParams::default()).await.unwrap().items.len(), 1);
    assert!(maps.get_opt("none").await.unwrap().is_none());
    assert!(maps.delete("m", &DeleteParams::default()).await.unwrap().is_right());
}

#[tokio::test]
async fn a_watcher_survives_forgotten_history() {
    let dev = Dev::start().await;
    let nodes: Api<Node> = Api::all(dev.cluster.client.clone());
    nodes.create(&PostParams::default(), &named("a")).await.unwrap();
    let stream = watcher(nodes.clone(), watcher::Config::default().page_size(1)).default_backoff().applied_objects();
    let mut stream = std::pin::pin!(stream);
    let mut n_expired = 0;
    let mut next = async || loop {
        match tokio::time::timeout(PATIENCE, stream.try_next()).await.unwrap() {
            Ok(node) => return node.unwrap(),
            Err(watcher::Error::WatchError(status)) if status.code == 410 => n_expired += 1,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(next().await.name_any(), "a");
    nodes.create(&PostParams::default(), &named("b")).await.unwrap();
    assert_eq!(next().await.name_any(), "b");
    dev.running.too_old_watches();
    nodes.create(&PostParams::default(), &named("c")).await.unwrap();
    // The new list names all of them again.
    while next().await.name_any() != "c" {}
    assert_eq!(n_expired, 1);
}

#[tokio::test]
async fn metadata_is_watched_without_the_rest() {
    let dev = Dev::start().await;
    let pods: Api<PartialObjectMeta<Pod>> = Api::all(dev.cluster.client.clone());
    let pod = json!({ "metadata": { "name": "p", "labels": { "a": "b" } }, "spec": {} });
    dev.cluster.post("/api/v1/namespaces/default/pods", &pod).await.expect(201);
    let mut stream = watcher(pods.clone(), watcher::Config::default()).applied_objects().boxed();
    let seen = tokio::time::timeout(PATIENCE, stream.try_next()).await.unwrap().unwrap().unwrap();
    assert_eq!((seen.name_any().as_str(), seen.labels()["a"].as_str()), ("p", "b"));
    let list = pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(list.items.len(), 1);
}
