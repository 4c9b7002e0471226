//! Watches.

use serde_json::{Value, json};

use super::{widget, widgets};
use crate::support::{Cluster, Events, MERGE};

fn version(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().unwrap()
}

async fn expect(events: &mut Events, kind: &str, name: &str) {
    assert_eq!(events.named().await, (kind.to_owned(), name.to_owned()));
}

pub(crate) async fn a_watch_goes_on_from_a_list(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.post(&path, &widget("before", &json!({}))).await.expect(201);
    let list = cluster.get(&path).await.expect(200);
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let mut events = cluster.watch(&format!("{path}?watch=1&resourceVersion={}", version(&list))).await;
    expect(&mut events, "ADDED", "a").await;
    let changed = cluster.patch(&format!("{path}/a"), MERGE, &json!({ "spec": { "x": 1 } })).await.expect(200);
    let (kind, object) = events.expect().await;
    assert_eq!((kind.as_str(), &object), ("MODIFIED", &changed));
    cluster.delete(&format!("{path}/a")).await.expect(200);
    let (kind, object) = events.expect().await;
    assert_eq!((kind.as_str(), &object["spec"]["x"]), ("DELETED", &json!(1)));
    assert_eq!(object["metadata"].get("deletionTimestamp"), None, "it was never marked");
    let number = |object: &Value| version(object).parse::<u64>().unwrap();
    assert!(number(&changed) < number(&object), "a deletion has a version of its own");
    let mut again = cluster.watch(&format!("{path}?watch=1&resourceVersion={}", version(&changed))).await;
    expect(&mut again, "DELETED", "a").await;
}

pub(crate) async fn a_watch_without_version_begins_with_what_is_there(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    for name in ["a", "b"] {
        cluster.post(&path, &widget(name, &json!({}))).await.expect(201);
    }
    for query in ["watch=true", "watch=true&resourceVersion=0"] {
        let mut events = cluster.watch(&format!("{path}?{query}")).await;
        let mut names = vec![events.named().await, events.named().await];
        names.sort();
        assert_eq!(names, [("ADDED".to_owned(), "a".to_owned()), ("ADDED".to_owned(), "b".to_owned())]);
    }
}

pub(crate) async fn objects_enter_and_leave_a_selection(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let list = cluster.get(&path).await.expect(200);
    let query = format!("watch=1&resourceVersion={}&labelSelector=in%3Dyes", version(&list));
    let mut events = cluster.watch(&format!("{path}?{query}")).await;
    cluster.post(&path, &widget("a", &json!({}))).await.expect(201);
    let label = |value: Value| json!({ "metadata": { "labels": { "in": value } } });
    cluster.patch(&format!("{path}/a"), MERGE, &label(json!("yes"))).await.expect(200);
    expect(&mut events, "ADDED", "a").await;
    cluster.patch(&format!("{path}/a"), MERGE, &json!({ "spec": { "x": 1 } })).await.expect(200);
    expect(&mut events, "MODIFIED", "a").await;
    let out = cluster.patch(&format!("{path}/a"), MERGE, &label(Value::Null)).await.expect(200);
    let (kind, object) = events.expect().await;
    assert_eq!((kind.as_str(), version(&object)), ("DELETED", version(&out)));
    assert_eq!(object["metadata"]["labels"]["in"], "yes", "as it was inside");
    cluster.patch(&format!("{path}/a"), MERGE, &label(json!("yes"))).await.expect(200);
    expect(&mut events, "ADDED", "a").await;
    cluster.delete(&format!("{path}/a")).await.expect(200);
    expect(&mut events, "DELETED", "a").await;
}

pub(crate) async fn a_watch_ends_after_its_timeout(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let mut events = cluster.watch(&format!("{path}?watch=1&timeoutSeconds=1")).await;
    assert_eq!(events.next().await, None);
}

pub(crate) async fn bookmarks_come_at_the_end_if_wanted(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let list = cluster.get(&path).await.expect(200);
    let query = format!("watch=1&allowWatchBookmarks=true&timeoutSeconds=3&resourceVersion={}", version(&list));
    let mut events = cluster.watch(&format!("{path}?{query}")).await;
    let bookmark = events.next().await.unwrap();
    assert_eq!((&bookmark["type"], &bookmark["object"]["kind"]), (&json!("BOOKMARK"), &json!("Widget")));
    assert!(version(&list).parse::<u64>().unwrap() <= version(&bookmark["object"]).parse().unwrap());
}
