//! One story's API server, namespace and stand-ins.

use std::{path::PathBuf, sync::Arc, time::Duration};

use kube::{
    Api, Client, Config,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, PropagationPolicy},
    config::{KubeConfigOptions, Kubeconfig},
    discovery::Scope,
};
use nstance_rt::{clock::SystemClock, tasks::Tasks};
use nstance_standin::{
    ControlPlane, Handle, KeeperOptions, Options, Timing,
    kinds::{CAPI_GROUP, INFRA_GROUP, Kind},
};
use serde_json::{Value, json};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Site {
    pub(crate) client: Client,
    pub(crate) config: Config,
    /// What a kubeconfig Secret of this server holds, as JSON.
    kubeconfig: Value,
    pub(crate) namespace: String,
    pub(crate) plane: ControlPlane,
    pub(crate) is_file_backed: bool,
    pub(crate) dir: tempfile::TempDir,
    /// Where node files lie.
    nodes_dir: PathBuf,
    tasks: Tasks,
    _server: Option<nstance_devk8s::Running>,
}

/// Of the API server that `NSTANCE_TEST_KUBECONFIG` names, else of one that is started where its programs are built.
pub(crate) async fn real_kubeconfig() -> Option<String> {
    match std::env::var_os("NSTANCE_TEST_KUBECONFIG") {
        Some(path) => Some(std::fs::read_to_string(path).unwrap()),
        None => Some(nstance_devk8s::real::RealApi::shared().await?.kubeconfig().unwrap()),
    }
}

fn use_ring() {
    // The second caller finds it done.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

async fn connect(kubeconfig: &str) -> (Config, Client) {
    let parsed = Kubeconfig::from_yaml(kubeconfig).unwrap();
    let mut config = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await.unwrap();
    config.default_retry = false;
    (config.clone(), Client::try_from(config).unwrap())
}

impl Site {
    pub(crate) async fn on_dev_k8s(story: &str) -> Self {
        use_ring();
        let (tasks, dir) = (Tasks::new(), tempfile::tempdir().unwrap());
        let options = nstance_devk8s::Options::new(dir.path().join("dev-k8s"));
        let server = nstance_devk8s::Server::start(&tasks, options).await.unwrap();
        let text = server.kubeconfig();
        let (config, client) = connect(&text).await;
        let site = Self {
            client,
            config,
            kubeconfig: serde_saphyr::from_str(&text).unwrap(),
            namespace: namespace_of(story),
            plane: ControlPlane::Absent,
            is_file_backed: true,
            nodes_dir: dir.path().join("dev-k8s/nodes"),
            dir,
            tasks,
            _server: Some(server),
        };
        site.make_namespace().await;
        site
    }

    /// dev-k8s, but the node files lie elsewhere and become Nodes through the API, as on a real server.
    pub(crate) async fn with_files_apart(story: &str) -> Self {
        let mut site = Self::on_dev_k8s(story).await;
        site.is_file_backed = false;
        site.nodes_dir = site.dir.path().join("files");
        site
    }

    pub(crate) async fn on_real_server(story: &str) -> Self {
        use_ring();
        let text = real_kubeconfig().await.unwrap();
        let (config, client) = connect(&text).await;
        let dir = tempfile::tempdir().unwrap();
        let has_controllers = std::env::var("NSTANCE_TEST_CONTROL_PLANE").is_ok_and(|it| it == "present");
        let site = Self {
            client,
            config,
            kubeconfig: serde_saphyr::from_str(&text).unwrap(),
            namespace: namespace_of(story),
            plane: if has_controllers { ControlPlane::Present } else { ControlPlane::Absent },
            is_file_backed: false,
            nodes_dir: dir.path().join("nodes"),
            dir,
            tasks: Tasks::new(),
            _server: None,
        };
        site.make_definitions().await;
        site.make_namespace().await;
        site
    }

    async fn make_namespace(&self) {
        let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": self.namespace } });
        let namespaces = Api::all_with(self.client.clone(), &Kind::Namespace.resource());
        namespaces.create(&PostParams::default(), &object(namespace)).await.unwrap();
    }

    /// Kinds without schemas, where the real ones are not there: the stand-ins' behaviour is tested, not Cluster API's
    /// validation.
    async fn make_definitions(&self) {
        let resource = kube::api::ApiResource::from_gvk_with_plural(
            &kube::core::GroupVersionKind::gvk("apiextensions.k8s.io", "v1", "CustomResourceDefinition"),
            "customresourcedefinitions",
        );
        let definitions: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        for kind in Kind::ALL.into_iter().filter(|it| [CAPI_GROUP, INFRA_GROUP].contains(&it.group())) {
            let names = kind.resource();
            let definition = json!({
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": { "name": format!("{}.{}", names.plural, names.group) },
                "spec": {
                    "group": names.group,
                    "scope": "Namespaced",
                    "names": { "kind": names.kind, "plural": names.plural, "singular": names.kind.to_lowercase() },
                    "versions": [{
                        "name": names.version,
                        "served": true,
                        "storage": true,
                        "subresources": { "status": {} },
                        "schema": { "openAPIV3Schema": { "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
                    }],
                },
            });
            match definitions.create(&PostParams::default(), &object(definition)).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                Err(error) => panic!("create the definition of {kind:?}: {error}"),
            }
            until(&format!("{kind:?} is served"), async || {
                let all: Api<DynamicObject> = Api::all_with(self.client.clone(), &kind.resource());
                all.list(&Default::default()).await.is_ok()
            })
            .await;
        }
    }

    /// Short intervals: what is tested is the order of things.
    pub(crate) fn options(&self) -> Options {
        let mut options = Options::new(Arc::new(SystemClock));
        options.namespace = Some(self.namespace.clone());
        options.own_api = Some(self.config.clone());
        options.gc = self.plane == ControlPlane::Absent;
        options.timing = Timing {
            resync: Duration::from_millis(500),
            kubeconfig_retry: Duration::from_millis(300),
            connection_probe: Duration::from_millis(500),
            drain_retry: Duration::from_millis(500),
            heartbeat: Duration::from_secs(1),
            node_grace: Duration::from_secs(4),
            ..Timing::default()
        };
        options
    }

    /// The keeper keeps the nodes of [`Site::add_node_file`], which all live.
    pub(crate) fn keeper_options(&self) -> KeeperOptions {
        KeeperOptions {
            nodes_dir: Some(self.nodes_dir.clone()),
            instances_dir: None,
            plane: self.plane,
            api_is_file_backed: self.is_file_backed,
        }
    }

    pub(crate) fn start(&self, options: Options) -> Handle {
        nstance_standin::start(&self.tasks, self.client.clone(), options)
    }

    /// Nodes have no namespace, so their names carry the story's.
    pub(crate) fn node_name(&self, name: &str) -> String {
        format!("{}-{name}", self.namespace)
    }

    pub(crate) fn provider_id(&self, name: &str) -> String {
        format!("dev:///nstance-agent-{}", self.node_name(name))
    }

    /// What a provider does when the agent of an instance has started.
    pub(crate) fn add_node_file(&self, name: &str) {
        let name = self.node_name(name);
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": name, "labels": { "nstance.dev/instance-id": name, "story": self.namespace } },
            "spec": { "providerID": format!("dev:///nstance-agent-{name}") },
        });
        std::fs::create_dir_all(&self.nodes_dir).unwrap();
        let draft = self.nodes_dir.join(format!(".{name}.tmp"));
        std::fs::write(&draft, serde_json::to_vec_pretty(&node).unwrap()).unwrap();
        std::fs::rename(draft, self.nodes_dir.join(format!("{name}.json"))).unwrap();
    }

    pub(crate) fn api(&self, kind: Kind) -> Api<DynamicObject> {
        match kind.scope() {
            Scope::Cluster => Api::all_with(self.client.clone(), &kind.resource()),
            Scope::Namespaced => Api::namespaced_with(self.client.clone(), &self.namespace, &kind.resource()),
        }
    }

    pub(crate) async fn create(&self, kind: Kind, name: &str, mut value: Value) -> Value {
        value["apiVersion"] = kind.api_version().into();
        value["kind"] = kind.kind().into();
        value["metadata"]["name"] = name.into();
        let created = self.api(kind).create(&PostParams::default(), &object(value)).await;
        serde_json::to_value(created.unwrap_or_else(|error| panic!("create {kind:?} {name}: {error}"))).unwrap()
    }

    pub(crate) async fn patch(&self, kind: Kind, name: &str, patch: Value) {
        let patched = self.api(kind).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
        patched.unwrap_or_else(|error| panic!("patch {kind:?} {name}: {error}"));
    }

    pub(crate) async fn set_status(&self, kind: Kind, name: &str, status: Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        let patched = self.api(kind).patch_status(name, &PatchParams::default(), &patch).await;
        patched.unwrap_or_else(|error| panic!("patch status of {kind:?} {name}: {error}"));
    }

    pub(crate) async fn get(&self, kind: Kind, name: &str) -> Option<Value> {
        let found = self.api(kind).get_opt(name).await.unwrap_or_else(|error| panic!("get {kind:?} {name}: {error}"));
        found.map(|it| serde_json::to_value(it).unwrap())
    }

    /// Null for an object or a field that is not there.
    pub(crate) async fn field(&self, kind: Kind, name: &str, pointer: &str) -> Value {
        let found = self.get(kind, name).await.unwrap_or_default();
        found.pointer(pointer).cloned().unwrap_or_default()
    }

    pub(crate) async fn condition(&self, kind: Kind, name: &str, condition: &str) -> String {
        let conditions = self.field(kind, name, "/status/conditions").await;
        let found = conditions.as_array().into_iter().flatten().find(|it| it["type"] == condition);
        found.and_then(|it| it["status"].as_str()).unwrap_or_default().to_owned()
    }

    pub(crate) async fn has(&self, kind: Kind, name: &str) -> bool {
        self.get(kind, name).await.is_some()
    }

    pub(crate) async fn delete(&self, kind: Kind, name: &str) {
        self.delete_as(kind, name, PropagationPolicy::Background).await;
    }

    pub(crate) async fn delete_as(&self, kind: Kind, name: &str, policy: PropagationPolicy) {
        let params = DeleteParams { propagation_policy: Some(policy), ..DeleteParams::default() };
        let deleted = self.api(kind).delete(name, &params).await;
        drop(deleted.unwrap_or_else(|error| panic!("delete {kind:?} {name}: {error}")));
    }

    /// The Secret that Cluster API's controllers look for, with the address that the operator writes into it.
    pub(crate) async fn add_kubeconfig(&self, cluster: &str) {
        let mut kubeconfig = self.kubeconfig.clone();
        kubeconfig["clusters"][0]["cluster"]["server"] = "https://kubernetes.default.svc:443".into();
        let secret = json!({
            "metadata": { "labels": { "cluster.x-k8s.io/cluster-name": cluster } },
            "type": "cluster.x-k8s.io/secret",
            "stringData": { "value": kubeconfig.to_string() },
        });
        self.create(Kind::Secret, &format!("{cluster}-kubeconfig"), secret).await;
    }

    /// Leaves nothing on a shared server that waits for this story's stand-ins.
    pub(crate) async fn clean(&self) {
        self.tasks.end(Duration::from_secs(5)).await;
        let all = kube::api::ListParams::default();
        let no_finalizers = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
        for kind in Kind::ALL.into_iter().filter(|it| [CAPI_GROUP, INFRA_GROUP].contains(&it.group())) {
            let api = self.api(kind);
            let _ = api.delete_collection(&DeleteParams::default(), &all).await;
            for left in api.list(&all).await.unwrap() {
                let name = left.metadata.name.unwrap();
                let _ = api.patch(&name, &PatchParams::default(), &no_finalizers).await;
            }
        }
        let nodes = all.labels(&format!("story={}", self.namespace));
        let _ = self.api(Kind::Node).delete_collection(&DeleteParams::default(), &nodes).await;
        let _ = self.api(Kind::Namespace).delete(&self.namespace, &DeleteParams::default()).await;
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

/// Short, and another one in each run.
fn namespace_of(story: &str) -> String {
    let short: String = story.replace('_', "-").chars().take(20).collect();
    format!("{}-{}", short.trim_matches('-'), nstance_rt::entropy::hex(&nstance_rt::entropy::SystemEntropy::new(), 3))
}

pub(crate) fn object(value: Value) -> DynamicObject {
    serde_json::from_value(value).unwrap()
}

/// Waits for a condition; says which one if it does not come.
pub(crate) async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "not within {} s: {what}", PATIENCE.as_secs());
}
