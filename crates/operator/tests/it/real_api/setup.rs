//! The one API server of all tests here, with our CRDs.

use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{conditions, wait::await_condition},
};
use nstance_devk8s::real::RealApi;
use nstance_operator::api::manifests;
use serde_json::{Value, json};

/// For everything that an API server does in less than a second.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

/// A client with the rights that a kubeconfig gives.
pub(crate) async fn client(kubeconfig: &str) -> Client {
    // Another test may have been first; it does the same.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// The server, and an administrator's client; `None` where there is no server.
pub(crate) async fn server() -> Option<(&'static RealApi, Client)> {
    let server = RealApi::shared().await?;
    let client = client(&server.kubeconfig().unwrap()).await;
    Some((server, client))
}

/// Puts our CRDs there and waits until they are served. Any test may do it again.
pub(crate) async fn install_crds(client: &Client) {
    for crd in manifests::crds().unwrap() {
        apply(client, &crd).await;
        until_established(client, crd["metadata"]["name"].as_str().unwrap()).await;
    }
}

/// Waits until the kind that a CRD defines is served.
pub(crate) async fn until_established(client: &Client, name: &str) {
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let established = await_condition(crds, name, conditions::is_crd_established());
    tokio::time::timeout(DEADLINE, established).await.unwrap_or_else(|_| panic!("{name} is not established")).unwrap();
}

/// Puts the service accounts and roles of an operator in this namespace there. Bindings are cluster-wide, so they get names
/// of their own.
pub(crate) async fn install_roles(client: &Client, namespace: &str) {
    apply(client, &json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } })).await;
    for mut object in manifests::rbac(namespace) {
        if object["kind"] == "ClusterRoleBinding" {
            let name = object["metadata"]["name"].as_str().unwrap();
            object["metadata"]["name"] = json!(format!("{name}-{namespace}"));
        }
        apply(client, &object).await;
    }
}

/// The kubeconfig of a service account.
pub(crate) fn kubeconfig_of(server: &RealApi, namespace: &str, service_account: &str) -> String {
    let user = format!("system:serviceaccount:{namespace}:{service_account}");
    let groups = ["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")];
    server.kubeconfig_for(&user, &[&groups[0], &groups[1], "system:authenticated"]).unwrap()
}

/// Any object as its manifest says. A CRD that was just made is not served at once, so for those wait first.
pub(crate) async fn apply(client: &Client, manifest: &Value) {
    let (api, name) = api_of(client, manifest);
    let how = PatchParams::apply("nstance-tests").force();
    if let Err(error) = api.patch(&name, &how, &Patch::Apply(manifest)).await {
        panic!("apply {} {name}: {error}", manifest["kind"]);
    }
}

/// The API of an object's kind, and the object's name.
pub(crate) fn api_of(client: &Client, manifest: &Value) -> (Api<DynamicObject>, String) {
    let text = |it: &Value| it.as_str().unwrap().to_owned();
    let version = text(&manifest["apiVersion"]);
    let (group, version) = version.split_once('/').unwrap_or(("", &version));
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &text(&manifest["kind"])));
    let api = match manifest["metadata"]["namespace"].as_str() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind),
        None => Api::all_with(client.clone(), &kind),
    };
    (api, text(&manifest["metadata"]["name"]))
}
