//! The real API server that tests start. Without its programs these tests say that they did not run.

use std::{path::Path, time::Duration};

use k8s_openapi::api::{
    authentication::v1::{SelfSubjectReview, TokenRequest},
    core::v1::{ConfigMap, Namespace, Node, Pod, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding},
};
use kube::{
    Api, Client, Config, Error,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use nstance_devk8s::real::{Program, RealApi, Setup};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

async fn client(kubeconfig: &str) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

async fn admin(api: &RealApi) -> Client {
    client(&api.kubeconfig().unwrap()).await
}

fn object<K: DeserializeOwned>(json: Value) -> K {
    serde_json::from_value(json).unwrap()
}

/// A namespace of the test's own, for all tests share one server.
async fn namespace(client: &Client, name: &str) {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    namespaces.create(&PostParams::default(), &object(json!({"metadata": {"name": name}}))).await.unwrap();
}

fn status_code(error: &Error) -> u16 {
    let Error::Api(status) = error else { panic!("no answer of the server: {error}") };
    status.code
}

/// Asks again until the answer satisfies `wanted`.
async fn wait_until<T, F: Future<Output = T>>(what: &str, ask: impl Fn() -> F, wanted: impl Fn(&T) -> bool) -> T {
    let asking = async {
        loop {
            let answer = ask().await;
            if wanted(&answer) {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), asking).await.unwrap_or_else(|_| panic!("{what}"))
}

fn pod(name: &str) -> Pod {
    object(json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "none"}]}}))
}

#[tokio::test]
async fn certificate_names_the_user_and_its_groups() {
    let Some(api) = RealApi::shared().await else { return };
    let client = client(&api.kubeconfig_for("alice", &["developers", "owners"]).unwrap()).await;
    let reviews: Api<SelfSubjectReview> = Api::all(client);
    let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    let user = review.status.unwrap().user_info.unwrap();
    assert_eq!(user.username.as_deref(), Some("alice"));
    assert_eq!(user.groups.unwrap(), ["developers", "owners", "system:authenticated"]);
}

#[tokio::test]
async fn user_may_do_only_what_rbac_grants() {
    let Some(api) = RealApi::shared().await else { return };
    let bob = client(&api.kubeconfig_for("bob", &["readers"]).unwrap()).await;
    let configs: Api<ConfigMap> = Api::namespaced(bob, "default");
    let refused = configs.list(&ListParams::default()).await.unwrap_err();
    assert_eq!(status_code(&refused), 403);

    let admin = admin(api).await;
    // Not `view`: roles that are put together from others are empty where no controller manager runs.
    let roles: Api<ClusterRole> = Api::all(admin.clone());
    let role = object(json!({
        "metadata": {"name": "real-api-readers"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}],
    }));
    roles.create(&PostParams::default(), &role).await.unwrap();
    let bindings: Api<ClusterRoleBinding> = Api::all(admin);
    let binding = object(json!({
        "metadata": {"name": "real-api-readers"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "real-api-readers"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "readers"}],
    }));
    bindings.create(&PostParams::default(), &binding).await.unwrap();
    let list = || async { configs.list(&ListParams::default()).await };
    wait_until("readers may list", list, Result::is_ok).await.unwrap();
    let refused = configs.create(&PostParams::default(), &object(json!({"metadata": {"name": "by-bob"}}))).await;
    assert_eq!(status_code(&refused.unwrap_err()), 403);
}

#[tokio::test]
async fn pods_are_accepted_without_controllers() {
    let Some(api) = RealApi::shared().await else { return };
    let client = admin(api).await;
    namespace(&client, "real-api-pods").await;
    let pods: Api<Pod> = Api::namespaced(client, "real-api-pods");
    pods.create(&PostParams::default(), &pod("first")).await.unwrap();
}

#[tokio::test]
async fn token_of_a_service_account_is_accepted() {
    let Some(api) = RealApi::shared().await else { return };
    let client = admin(api).await;
    namespace(&client, "real-api-tokens").await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "real-api-tokens");
    accounts.create(&PostParams::default(), &object(json!({"metadata": {"name": "robot"}}))).await.unwrap();
    let request: TokenRequest = object(json!({"spec": {"audiences": [], "expirationSeconds": 600}}));
    let token = accounts.create_token_request("robot", &PostParams::default(), &request).await.unwrap();

    let mut kubeconfig: Value = serde_json::from_str(&api.kubeconfig().unwrap()).unwrap();
    kubeconfig["users"][0]["user"] = json!({"token": token.status.unwrap().token});
    let robot = self::client(&kubeconfig.to_string()).await;
    let reviews: Api<SelfSubjectReview> = Api::all(robot);
    let review = reviews.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    let user = review.status.unwrap().user_info.unwrap();
    assert_eq!(user.username.as_deref(), Some("system:serviceaccount:real-api-tokens:robot"));
}

#[tokio::test]
async fn controllers_end_namespaces_and_the_scheduler_binds_pods() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup::new().with_controller_manager().with_scheduler();
    let Some(api) = setup.start_if_built(dir.path()).await.unwrap() else { return };
    let client = admin(&api).await;
    namespace(&client, "work").await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "work");
    let account = || async { accounts.get_opt("default").await.unwrap() };
    wait_until("the namespace gets its service account", account, Option::is_some).await;

    let nodes: Api<Node> = Api::all(client.clone());
    nodes.create(&PostParams::default(), &object(json!({"metadata": {"name": "node-1"}}))).await.unwrap();
    let status = json!({"status": {
        "capacity": {"cpu": "4", "memory": "8Gi", "pods": "10"},
        "allocatable": {"cpu": "4", "memory": "8Gi", "pods": "10"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Test", "message": "",
            "lastHeartbeatTime": null, "lastTransitionTime": null}],
    }});
    nodes.patch_status("node-1", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client.clone(), "work");
    pods.create(&PostParams::default(), &pod("first")).await.unwrap();
    let bound = || async { pods.get("first").await.unwrap().spec.unwrap().node_name };
    assert_eq!(wait_until("the pod is bound", bound, Option::is_some).await.as_deref(), Some("node-1"));

    // Nobody runs that node, so the pod goes only without grace.
    pods.delete("first", &DeleteParams::default().grace_period(0)).await.unwrap();
    let namespaces: Api<Namespace> = Api::all(client);
    namespaces.delete("work", &DeleteParams::default()).await.unwrap();
    let gone = || async { namespaces.get_opt("work").await.unwrap() };
    wait_until("the namespace ends", gone, Option::is_none).await;
    api.stop().await.unwrap();
}

#[tokio::test]
async fn stopped_server_leaves_its_data_and_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let Some(api) = Setup::new().start_if_built(dir.path()).await.unwrap() else { return };
    let pids = [Program::Etcd, Program::ApiServer].map(|it| api.pid(it).unwrap());
    let configs: Api<ConfigMap> = Api::namespaced(admin(&api).await, "default");
    configs.create(&PostParams::default(), &object(json!({"metadata": {"name": "kept"}}))).await.unwrap();
    api.stop().await.unwrap();
    for pid in pids {
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    let api = RealApi::start(dir.path()).await.unwrap();
    let configs: Api<ConfigMap> = Api::namespaced(admin(&api).await, "default");
    assert!(configs.get_opt("kept").await.unwrap().is_some());
}

#[tokio::test]
async fn server_that_does_not_start_shows_the_end_of_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let setup = Setup::new().with_flag(Program::ApiServer, "--no-such-flag");
    let error = match setup.start_if_built(dir.path()).await {
        Ok(None) => return,
        Ok(Some(_)) => panic!("started with a flag that does not exist"),
        Err(error) => format!("{error:#}"),
    };
    assert!(error.starts_with("kube-apiserver ended with exit status: 1; the end of"), "{error}");
    assert!(error.contains("unknown flag: --no-such-flag"), "{error}");
}
