//! Faults that other tests switch on.

use std::time::Duration;

use nstance_devk8s::Fault;
use serde_json::json;
use tokio::time::{Instant, timeout};

use crate::support::{Cluster, Dev, client};

const NODES: &str = "/api/v1/nodes";

async fn as_caller(dev: &Dev, name: &str) -> Cluster {
    Cluster { client: client(&dev.running.kubeconfig_of(name)).await }
}

#[tokio::test]
async fn refused_callers_get_503_and_others_do_not() {
    let dev = Dev::start().await;
    let operator = as_caller(&dev, "operator-1").await;
    dev.running.set_fault(Some(Fault::Refuse { callers: "operator-*".to_owned() }));
    operator.get(NODES).await.refused(503, "ServiceUnavailable");
    dev.cluster.get(NODES).await.expect(200);
    dev.running.set_fault(None);
    operator.get(NODES).await.expect(200);
}

#[tokio::test]
async fn a_black_hole_answers_when_it_is_lifted() {
    let dev = Dev::start().await;
    let operator = as_caller(&dev, "operator").await;
    let mut events = operator.watch(&format!("{NODES}?watch=1")).await;
    dev.running.set_fault(Some(Fault::BlackHole { callers: "operator".to_owned() }));
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    let silence = Duration::from_millis(300);
    assert!(timeout(silence, operator.get(NODES)).await.is_err());
    assert!(timeout(silence, events.next()).await.is_err());
    dev.running.set_fault(None);
    assert_eq!(events.named().await, ("ADDED".to_owned(), "n".to_owned()));
    operator.get(NODES).await.expect(200);
}

#[tokio::test]
async fn the_watch_of_one_resource_can_be_late() {
    let dev = Dev::start().await;
    let late = Duration::from_millis(500);
    dev.running.set_fault(Some(Fault::DelayWatch { resource: "nodes".to_owned(), by: late }));
    let maps = "/api/v1/namespaces/default/configmaps";
    let mut nodes = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    let mut others = dev.cluster.watch(&format!("{maps}?watch=1")).await;
    let begun = Instant::now();
    dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    dev.cluster.post(maps, &json!({ "metadata": { "name": "m" } })).await.expect(201);
    assert_eq!(others.named().await.1, "m");
    assert_eq!(
        dev.cluster.get(NODES).await.expect(200)["items"].as_array().unwrap().len(),
        1,
        "only the watch is late"
    );
    assert_eq!(nodes.named().await.1, "n");
    assert!(late <= begun.elapsed());
}

#[tokio::test]
async fn forbidden_resources_are_refused_and_the_access_review_says_so() {
    let dev = Dev::start().await;
    dev.running.set_fault(Some(Fault::Forbid { callers: "dev".to_owned(), resource: "nodes".to_owned() }));
    dev.cluster.get(NODES).await.refused(403, "Forbidden");
    let review = |resource: &str| {
        json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": { "resourceAttributes": { "group": "", "resource": resource, "verb": "get" } },
        })
    };
    let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    for (resource, allowed) in [("nodes", false), ("pods", true)] {
        let answer = dev.cluster.post(path, &review(resource)).await.expect(201);
        assert_eq!(answer["status"]["allowed"], allowed, "{resource}");
    }
}

#[tokio::test]
async fn forgotten_history_ends_every_watch_with_410() {
    let dev = Dev::start().await;
    let created = dev.cluster.post(NODES, &json!({ "metadata": { "name": "n" } })).await.expect(201);
    let version = created["metadata"]["resourceVersion"].as_str().unwrap();
    let path = format!("{NODES}?watch=1&resourceVersion={version}");
    let mut running = dev.cluster.watch(&path).await;
    let paged = dev.cluster.get("/api/v1/namespaces?limit=1").await.expect(200);
    dev.running.too_old_watches();
    for events in [&mut running, &mut dev.cluster.watch(&path).await] {
        let event = events.next().await.unwrap();
        assert_eq!((&event["type"], &event["object"]["reason"]), (&json!("ERROR"), &json!("Expired")));
        assert_eq!(event["object"]["code"], 410);
        assert_eq!(events.next().await, None);
    }
    let token = paged["metadata"]["continue"].as_str().unwrap();
    dev.cluster.get(&format!("/api/v1/namespaces?limit=1&continue={token}")).await.refused(410, "Expired");
    let list = dev.cluster.get(NODES).await.expect(200);
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let mut fresh = dev.cluster.watch(&format!("{NODES}?watch=1&resourceVersion={version}")).await;
    dev.cluster.delete(&format!("{NODES}/n")).await.expect(200);
    assert_eq!(fresh.named().await, ("DELETED".to_owned(), "n".to_owned()));
}
