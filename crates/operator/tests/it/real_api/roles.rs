//! The shipped roles, as a real API server reads them.

use k8s_openapi::api::authorization::v1::SelfSubjectAccessReview;
use kube::{Api, Client, api::PostParams};
use serde_json::json;

use super::setup;

/// `verb resource.group/subresource name`, in a namespace or in none.
async fn may(client: &Client, namespace: &str, right: &str) -> bool {
    let mut words = right.split(' ');
    let (verb, resource, name) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap_or_default());
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
    let review = json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": { "resourceAttributes": {
            "namespace": namespace, "verb": verb, "group": group, "resource": resource,
            "subresource": subresource, "name": name,
        } },
    });
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = reviews.create(&PostParams::default(), &serde_json::from_value(review).unwrap()).await.unwrap();
    answer.status.unwrap().allowed
}

#[tokio::test]
async fn service_accounts_may_do_what_their_roles_say_and_no_more() {
    let Some((server, admin)) = setup::server().await else { return };
    setup::install_roles(&admin, "rights-here").await;

    let operator = setup::client(&setup::kubeconfig_of(server, "rights-here", "nstance-operator")).await;
    for (namespace, right, allowed) in [
        ("rights-here", "patch nstancemachinepools.infrastructure.cluster.x-k8s.io/status", true),
        ("rights-here", "delete machines.cluster.x-k8s.io", true),
        ("rights-here", "patch clusters.cluster.x-k8s.io/status", true),
        ("rights-here", "patch machines.cluster.x-k8s.io/status", true),
        ("", "patch nodes", true),
        ("", "update nodes", false),
        ("elsewhere", "create pods/eviction", true),
        ("elsewhere", "create events", true),
        ("rights-here", "update secrets", true),
        ("rights-here", "delete secrets", false),
        ("elsewhere", "get secrets", false),
        ("rights-here", "patch configmaps nstance-cluster-ca", true),
        ("rights-here", "patch configmaps other", false),
        ("rights-here", "create serviceaccounts/token nstance-capi-workload", true),
        ("rights-here", "create serviceaccounts/token nstance-operator", false),
        ("rights-here", "update leases.coordination.k8s.io", true),
        ("elsewhere", "update leases.coordination.k8s.io", false),
        ("", "patch validatingwebhookconfigurations.admissionregistration.k8s.io nstance-operator", true),
        ("", "patch validatingwebhookconfigurations.admissionregistration.k8s.io other", false),
    ] {
        assert_eq!(may(&operator, namespace, right).await, allowed, "nstance-operator, {right} in `{namespace}`");
    }

    let cluster_api = setup::client(&setup::kubeconfig_of(server, "rights-here", "nstance-capi-workload")).await;
    for (namespace, right, allowed) in [
        ("", "delete nodes", true),
        ("elsewhere", "create pods/eviction", true),
        ("elsewhere", "delete pods", false),
        ("rights-here", "get secrets", false),
        ("rights-here", "get machines.cluster.x-k8s.io", false),
    ] {
        assert_eq!(
            may(&cluster_api, namespace, right).await,
            allowed,
            "nstance-capi-workload, {right} in `{namespace}`"
        );
    }
}
