//! Kinds that are defined while the server runs.

use serde_json::json;

use super::{DEFINITIONS, define, definition};
use crate::support::{Cluster, MERGE, eventually, unique};

/// A definition of its own for one test, with the path of its objects.
async fn own(cluster: &Cluster) -> (String, String) {
    let group = format!("{}.nstance.dev", unique("g"));
    define(cluster, &definition(&group, "gadgets", "Gadget")).await;
    let namespace = cluster.namespace().await;
    (format!("{DEFINITIONS}/gadgets.{group}"), format!("/apis/{group}/v1/namespaces/{namespace}/gadgets"))
}

pub(crate) async fn a_definition_is_served_and_established(cluster: &Cluster) {
    let (definition, gadgets) = own(cluster).await;
    let conditions = eventually("the definition is established", || async {
        let status = cluster.get(&definition).await.expect(200)["status"].clone();
        let conditions = status["conditions"].as_array()?.clone();
        conditions.iter().any(|it| it["type"] == "Established" && it["status"] == "True").then_some(conditions)
    })
    .await;
    assert!(conditions.iter().any(|it| it["type"] == "NamesAccepted" && it["status"] == "True"));
    cluster.get(&gadgets).await.expect(200);
    let served = gadgets.split('/').nth(2).unwrap().to_owned();
    let groups = cluster.get("/apis").await.expect(200);
    assert!(groups["groups"].as_array().unwrap().iter().any(|it| it["name"] == served));
    cluster.delete(&definition).await.expect(200);
}

pub(crate) async fn a_definition_takes_its_objects_along(cluster: &Cluster) {
    let (definition, gadgets) = own(cluster).await;
    let gadget = |name: &str, finalizers: &[&str]| {
        let group = gadgets.split('/').nth(2).unwrap();
        json!({
            "apiVersion": format!("{group}/v1"), "kind": "Gadget", "metadata": { "name": name, "finalizers": finalizers },
        })
    };
    cluster.post(&gadgets, &gadget("free", &[])).await.expect(201);
    cluster.post(&gadgets, &gadget("held", &["a.io/x"])).await.expect(201);
    cluster.delete(&definition).await.expect(200);
    eventually("the objects are being deleted", || async {
        let free = cluster.get(&format!("{gadgets}/free")).await;
        let held = cluster.get(&format!("{gadgets}/held")).await;
        (free.code == 404 && held.body["metadata"]["deletionTimestamp"].is_string()).then_some(())
    })
    .await;
    let leaving = cluster.get(&definition).await.expect(200);
    let conditions = leaving["status"]["conditions"].as_array().unwrap();
    assert!(conditions.iter().any(|it| it["type"] == "Terminating" && it["status"] == "True"), "{conditions:?}");
    cluster.post(&gadgets, &gadget("new", &[])).await.refused(403, "Forbidden");
    let free = json!({ "metadata": { "finalizers": null } });
    cluster.patch(&format!("{gadgets}/held"), MERGE, &free).await.expect(200);
    eventually("the definition is gone", || async { (cluster.get(&definition).await.code == 404).then_some(()) }).await;
    eventually("the kind is gone", || async { (cluster.get(&gadgets).await.code == 404).then_some(()) }).await;
}
