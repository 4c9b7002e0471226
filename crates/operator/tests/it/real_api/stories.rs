//! Stories of the whole operator on a real API server: it runs as its service account with the shipped roles, and the
//! stand-in for Cluster API reaches Nodes and pods by the token in the kubeconfig Secret.

use kube::Client;
use nstance_devk8s::real::RealApi;
use nstance_operator::{api::names::CAPI_GROUP, ports::kinds};
use nstance_rt::tasks::Tasks;
use nstance_standin::kinds::Kind;
use serde_json::json;
use tempfile::TempDir;

use super::setup;
use crate::stories::{
    drains,
    plane::{Plane, Site},
    pools,
};

#[tokio::test(flavor = "multi_thread")]
async fn pools_follow_their_replicas_and_drains_respect_budgets_with_the_shipped_roles() {
    let Some((server, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;
    install_cluster_api(&client).await;
    // One after the other: their keepers would bind each other's pods.
    let plane = plane(server, &client, "real-follows").await;
    pools::follows_its_replicas(&plane).await;
    clean(plane).await;
    let plane = self::plane(server, &client, "real-budget").await;
    drains::budget_blocks_one(&plane, 4).await;
    clean(plane).await;
}

/// Cluster API's kinds without their schemas: what is tested is what the operator may do and what becomes of it.
async fn install_cluster_api(client: &Client) {
    for kind in Kind::ALL.into_iter().filter(|it| it.group() == CAPI_GROUP) {
        let names = kind.resource();
        let mut subresources = json!({ "status": {} });
        if kind.kind() == "MachinePool" {
            subresources["scale"] =
                json!({ "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas" });
        }
        let name = format!("{}.{}", names.plural, names.group);
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": { "name": name },
            "spec": {
                "group": names.group,
                "scope": "Namespaced",
                "names": { "kind": names.kind, "plural": names.plural, "singular": names.kind.to_lowercase() },
                "versions": [{
                    "name": names.version,
                    "served": true,
                    "storage": true,
                    "subresources": subresources,
                    "schema": {
                        "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
                    },
                }],
            },
        });
        setup::apply(client, &definition).await;
        setup::until_established(client, &name).await;
    }
}

async fn plane(server: &RealApi, client: &Client, namespace: &str) -> Plane {
    setup::install_roles(client, namespace).await;
    let admin = server.kubeconfig().unwrap();
    let site = Site {
        standin: admin.clone(),
        admin,
        operator: setup::kubeconfig_of(server, namespace, "nstance-operator"),
        namespace: namespace.to_owned(),
        is_dev: false,
        workload: None,
    };
    Plane::at(namespace, &["a", "b"], Tasks::new(), TempDir::new().unwrap(), None, site).await
}

/// Leaves no Node on the shared server that pods of the next story could be bound to.
async fn clean(plane: Plane) {
    for node in plane.story_nodes().await {
        plane.delete(kinds::NODE, &node).await;
    }
}
