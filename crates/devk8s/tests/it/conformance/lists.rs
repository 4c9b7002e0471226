//! Lists: selectors, pages, versions.

use serde_json::{Value, json};

use super::{config_map, config_maps, widget, widgets};
use crate::support::Cluster;

fn names(list: &Value) -> Vec<String> {
    let items = list["items"].as_array().unwrap().iter();
    items.map(|it| it["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

pub(crate) async fn labels_select(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    for (name, app, tier) in [("a", "x", "1"), ("b", "x", "2"), ("c", "y", "1")] {
        let mut object = widget(name, &json!({}));
        object["metadata"]["labels"] = json!({ "app": app, "tier": tier });
        cluster.post(&path, &object).await.expect(201);
    }
    cluster.post(&path, &widget("d", &json!({}))).await.expect(201);
    for (selector, found) in [
        ("app=x", "a b"),
        ("app==x,tier!=1", "b"),
        ("app in (x,y),tier=1", "a c"),
        ("app notin (x)", "c d"),
        ("!app", "d"),
        ("app", "a b c"),
    ] {
        let encoded = selector.replace('=', "%3D").replace(' ', "%20").replace(',', "%2C");
        let list = cluster.get(&format!("{path}?labelSelector={encoded}")).await.expect(200);
        assert_eq!(names(&list).join(" "), found, "{selector}");
    }
    let list = cluster.get(&path).await.expect(200);
    assert_eq!((&list["kind"], &list["items"][0]["kind"]), (&json!("WidgetList"), &json!("Widget")));
    assert!(list["metadata"]["resourceVersion"].is_string());
    cluster.get(&format!("{path}?labelSelector=a%20b")).await.refused(400, "BadRequest");
}

pub(crate) async fn fields_select_and_unknown_ones_are_refused(cluster: &Cluster) {
    let namespace = cluster.namespace().await;
    let path = config_maps(&namespace);
    for name in ["a", "b"] {
        cluster.post(&path, &config_map(name)).await.expect(201);
    }
    let list = cluster.get(&format!("{path}?fieldSelector=metadata.name%3Db")).await.expect(200);
    assert_eq!(names(&list), ["b"]);
    let everywhere = format!("/api/v1/configmaps?fieldSelector=metadata.namespace%3D{namespace}%2Cmetadata.name%3Da");
    assert_eq!(names(&cluster.get(&everywhere).await.expect(200)), ["a"]);
    cluster.get(&format!("{path}?fieldSelector=data.key%3Dx")).await.refused(400, "BadRequest");
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let selector = "spec.nodeName%3Dn%2Cstatus.phase%21%3DFailed";
    assert!(names(&cluster.get(&format!("{pods}?fieldSelector={selector}")).await.expect(200)).is_empty());
    let events = format!("/api/v1/namespaces/{namespace}/events");
    let event = |name: &str, about: &str| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "name": name },
            "involvedObject": { "kind": "ConfigMap", "namespace": namespace, "name": about },
            "reason": "R", "message": "m", "type": "Normal",
        })
    };
    for (name, about) in [("e1", "a"), ("e2", "b")] {
        cluster.post(&events, &event(name, about)).await.expect(201);
    }
    let about = cluster.get(&format!("{events}?fieldSelector=involvedObject.name%3Db")).await.expect(200);
    assert_eq!(names(&about), ["e2"]);
}

pub(crate) async fn pages_show_one_moment(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    for n in 0..5 {
        cluster.post(&path, &widget(&format!("w{n}"), &json!({}))).await.expect(201);
    }
    let first = cluster.get(&format!("{path}?limit=2")).await.expect(200);
    assert_eq!(names(&first), ["w0", "w1"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 3);
    cluster.post(&path, &widget("w15", &json!({}))).await.expect(201);
    cluster.delete(&format!("{path}/w4")).await.expect(200);
    let mut all = names(&first);
    let mut page = first.clone();
    while let Some(token) = page["metadata"]["continue"].as_str().filter(|it| !it.is_empty()) {
        page = cluster.get(&format!("{path}?limit=2&continue={token}")).await.expect(200);
        assert_eq!(page["metadata"]["resourceVersion"], first["metadata"]["resourceVersion"]);
        all.extend(names(&page));
    }
    assert_eq!(all, ["w0", "w1", "w2", "w3", "w4"], "as it was at the first page");
    let whole = cluster.get(&format!("{path}?limit=100")).await.expect(200);
    assert_eq!((names(&whole).len(), whole["metadata"]["continue"].as_str().unwrap_or("")), (5, ""));
}

pub(crate) async fn a_version_from_the_future_is_refused(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    let list = cluster.get(&path).await.expect(200);
    let version: u64 = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    cluster.get(&format!("{path}?resourceVersion={version}&resourceVersionMatch=NotOlderThan")).await.expect(200);
    cluster.get(&format!("{path}?resourceVersion=0")).await.expect(200);
    let future = version + 1_000_000;
    let late = cluster.get(&format!("{path}?resourceVersion={future}&resourceVersionMatch=NotOlderThan")).await;
    assert_eq!(late.refused(504, "Timeout")["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    cluster.get(&format!("{path}?resourceVersion=x")).await.expect_refusal();
    cluster.get(&format!("{path}?resourceVersionMatch=Exact")).await.expect_refusal();
}

pub(crate) async fn a_broken_continue_token_is_refused(cluster: &Cluster) {
    let path = widgets(&cluster.namespace().await);
    cluster.get(&format!("{path}?limit=1&continue=nonsense")).await.refused(400, "BadRequest");
}
