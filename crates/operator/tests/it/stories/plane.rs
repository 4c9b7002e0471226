//! One story's API server, stand-ins, shards and operator.

use std::{sync::Arc, time::Duration};

use clap::Parser as _;
use data_encoding::BASE64;
use kube::config::{KubeConfigOptions, Kubeconfig};
use nstance_devk8s::{Options, Running, Server};
use nstance_operator::{
    args::Args,
    cluster::{client::KubeClient, leadership::Leadership},
    ports::{KubePort, ObjectRef, Propagation, ResourceKind, Selector, Target, kinds},
    run,
};
use nstance_rt::tasks::Tasks;
use nstance_standin::{ControlPlane, KeeperOptions, Timing};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::{
    fake_shard::{Cluster, FakeShard, NONCE},
    machines::{Machines, Places},
    support::{Operator, clock, start_operator},
};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// An instance and the id of its drain.
type DrainOf = (String, String);

pub(crate) const CLUSTER: &str = "demo--default";

/// The API server of a story.
pub(crate) struct Site {
    /// The kubeconfigs of an administrator, the stand-ins and the operator.
    pub(crate) admin: String,
    pub(crate) standin: String,
    pub(crate) operator: String,
    pub(crate) namespace: String,
    pub(crate) is_dev: bool,
    /// The administrator's kubeconfig of another cluster, where Nodes and pods are.
    pub(crate) workload: Option<String>,
}

pub(crate) struct Plane {
    pub(crate) tasks: Tasks,
    dir: TempDir,
    /// Unless the API server is a real one.
    pub(crate) api: Option<Running>,
    /// Where Nodes and pods are, if that is another one.
    pub(crate) workload: Option<Running>,
    site: Site,
    pub(crate) kube: KubeClient,
    workload_kube: KubeClient,
    pub(crate) shards: Vec<FakeShard>,
    cluster: Arc<Cluster>,
}

async fn config_of(kubeconfig: &str) -> kube::Config {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig).unwrap();
    kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap()
}

pub(crate) async fn kube_of(kubeconfig: &str) -> KubeClient {
    KubeClient::new(config_of(kubeconfig).await, Leadership::always(clock())).unwrap()
}

impl Plane {
    /// Everything but the operator, on dev-k8s. The story's name begins the names of its Nodes.
    pub(crate) async fn new(story: &str, shards: &[&str]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, dir) = (Tasks::new(), TempDir::new().unwrap());
        let api = Server::start(&tasks, Options::new(dir.path().join("k8s"))).await.unwrap();
        let site = Site {
            admin: api.kubeconfig_of("admin"),
            standin: api.kubeconfig_of("standin"),
            operator: api.kubeconfig_of("operator"),
            namespace: "default".to_owned(),
            is_dev: true,
            workload: None,
        };
        let account = ObjectRef::new(kinds::SERVICE_ACCOUNT, "default", "nstance-capi-workload");
        kube_of(&site.admin).await.create(&account, &json!({}), "test").await.unwrap();
        Self::at(story, shards, tasks, dir, Some(api), site).await
    }

    /// The same with a workload cluster apart, whose kubeconfig Secret nobody has written.
    pub(crate) async fn external(story: &str, shards: &[&str]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, dir) = (Tasks::new(), TempDir::new().unwrap());
        let api = Server::start(&tasks, Options::new(dir.path().join("management"))).await.unwrap();
        let workload = Server::start(&tasks, Options::new(dir.path().join("k8s"))).await.unwrap();
        let site = Site {
            admin: api.kubeconfig_of("admin"),
            standin: api.kubeconfig_of("standin"),
            operator: api.kubeconfig_of("operator"),
            namespace: "default".to_owned(),
            is_dev: true,
            workload: Some(workload.kubeconfig_of("admin")),
        };
        let mut plane = Self::at(story, shards, tasks, dir, Some(api), site).await;
        plane.workload = Some(workload);
        plane
    }

    /// What the administrator of a workload cluster gives us.
    pub(crate) async fn add_kubeconfig(&self, kubeconfig: &str) {
        let body = json!({
            "metadata": { "labels": { "cluster.x-k8s.io/cluster-name": CLUSTER } },
            "type": "cluster.x-k8s.io/secret",
            "data": { "value": BASE64.encode(kubeconfig.as_bytes()) },
        });
        self.create(kinds::SECRET, &format!("{CLUSTER}-kubeconfig"), body).await;
    }

    pub(crate) async fn at(
        story: &str,
        names: &[&str],
        tasks: Tasks,
        dir: TempDir,
        api: Option<Running>,
        site: Site,
    ) -> Self {
        let kube = kube_of(&site.admin).await;
        let cluster = Cluster::new();
        let places = Places {
            nodes: dir.path().join(if site.is_dev { "k8s/nodes" } else { "nodes" }),
            instances: dir.path().join("instances"),
        };
        // An hour where a story shows that nothing happens.
        let drain_time = Duration::from_secs(if site.workload.is_some() { 3600 } else { 60 });
        let mut shards = Vec::new();
        for name in names {
            let machines = Machines::new(name, story, places.clone(), drain_time);
            shards.push(FakeShard::start_with(&tasks, &cluster, name, machines).await);
        }
        let timing = Timing {
            resync: Duration::from_millis(500),
            kubeconfig_retry: Duration::from_millis(500),
            connection_probe: Duration::from_millis(500),
            heartbeat: Duration::from_secs(1),
            ..Timing::default()
        };
        let mut config = config_of(&site.standin).await;
        config.default_retry = false;
        let mut options = nstance_standin::Options::new(clock());
        (options.capi, options.gc) = (true, true);
        options.namespace = Some(site.namespace.clone());
        options.own_api = Some(config.clone());
        options.timing = timing.clone();
        nstance_standin::start(&tasks, kube::Client::try_from(config.clone()).unwrap(), options);
        let workload_admin = site.workload.as_ref();
        let mut config = if let Some(it) = workload_admin { config_of(it).await } else { config };
        config.default_retry = false;
        let mut options = nstance_standin::Options::new(clock());
        options.timing = timing;
        options.keeper = Some(KeeperOptions {
            nodes_dir: Some(places.nodes),
            instances_dir: Some(places.instances),
            plane: ControlPlane::Absent,
            api_is_file_backed: site.is_dev,
        });
        nstance_standin::start(&tasks, kube::Client::try_from(config).unwrap(), options);
        let workload_kube = kube_of(workload_admin.unwrap_or(&site.admin)).await;
        let workload = None;
        let plane = Self { tasks, dir, api, workload, site, kube, workload_kube, shards, cluster };
        let secret = plane.object(kinds::SECRET, "nstance-operator-nonce");
        let nonce = json!({ "data": { "nonce.jwt": BASE64.encode(NONCE.as_bytes()) } });
        plane.kube.create(&secret, &nonce, "test").await.unwrap();
        let ca = plane.object(kinds::CONFIG_MAP, "nstance-cluster-ca");
        let body = json!({ "data": { "ca.crt": plane.cluster.ca.bundle_pem() } });
        plane.kube.create(&ca, &body, "test").await.unwrap();
        let entry = |(name, it): (&&str, &FakeShard)| {
            let (registration, operator) = (it.registration_port, it.operator_port);
            format!(
                "  {name}:\n    registration_addr: 127.0.0.1:{registration}\n    operator_addr: 127.0.0.1:{operator}\n"
            )
        };
        let entries: String = names.iter().zip(&plane.shards).map(entry).collect();
        let text = format!("cluster_id: demo\ntenant: default\nshards:\n{entries}");
        std::fs::write(plane.dir.path().join("config.yaml"), text).unwrap();
        std::fs::write(plane.dir.path().join("kubeconfig"), &plane.site.operator).unwrap();
        plane
    }

    pub(crate) fn args(&self) -> Args {
        let file = |option: &str, name: &str| format!("--{option}={}", self.dir.path().join(name).display());
        Args::try_parse_from([
            "nstance-operator".to_owned(),
            "--disable-webhooks".to_owned(),
            "--leader-elect".to_owned(),
            file("config", "config.yaml"),
            file("kubeconfig", "kubeconfig"),
            format!("--namespace={}", self.site.namespace),
            "--health-probe-bind-address=0".to_owned(),
        ])
        .unwrap()
    }

    /// It ends with what is returned.
    pub(crate) fn start_operator(&self) -> Operator {
        start_operator(&self.tasks, self.args(), run::start_controllers)
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.site.namespace
    }

    pub(crate) fn object(&self, kind: ResourceKind, name: &str) -> ObjectRef {
        ObjectRef::new(kind, &self.site.namespace, name)
    }

    /// A client for the cluster where objects of this kind are.
    fn kube_for(&self, kind: ResourceKind) -> &KubeClient {
        let is_workload = [kinds::NODE, kinds::POD, kinds::POD_DISRUPTION_BUDGET].contains(&kind);
        if is_workload { &self.workload_kube } else { &self.kube }
    }

    pub(crate) async fn all(&self, kind: ResourceKind) -> Vec<Value> {
        let namespace = kind.namespaced.then(|| self.site.namespace.clone());
        self.kube_for(kind).list(kind, &Selector { namespace, ..Selector::default() }).await.unwrap()
    }

    /// The objects' names, in order.
    pub(crate) async fn names(&self, kind: ResourceKind) -> Vec<String> {
        let mut names: Vec<String> = self.all(kind).await.iter().map(name_of).collect();
        names.sort();
        names
    }

    /// Null if there is no such object.
    pub(crate) async fn get(&self, kind: ResourceKind, name: &str) -> Value {
        self.kube_for(kind).get(&self.object(kind, name)).await.unwrap().unwrap_or_default()
    }

    pub(crate) async fn has(&self, kind: ResourceKind, name: &str) -> bool {
        !self.get(kind, name).await.is_null()
    }

    /// `status` and `message` of a condition; empty if it is not there.
    pub(crate) async fn condition(&self, kind: ResourceKind, name: &str, condition: &str) -> (String, String) {
        let object = self.get(kind, name).await;
        let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
        let found = conditions.into_iter().flatten().find(|it| it["type"] == condition);
        let text = |field: &str| found.and_then(|it| it[field].as_str()).unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }

    pub(crate) async fn create(&self, kind: ResourceKind, name: &str, body: Value) -> Value {
        self.kube_for(kind).create(&self.object(kind, name), &body, "test").await.unwrap()
    }

    pub(crate) async fn patch(&self, kind: ResourceKind, name: &str, body: Value) {
        self.kube_for(kind).merge_patch(&self.object(kind, name), &body, Target::Main).await.unwrap();
    }

    pub(crate) async fn delete(&self, kind: ResourceKind, name: &str) {
        self.kube_for(kind).delete(&self.object(kind, name), None, Propagation::Background).await.unwrap();
    }

    /// As cluster-autoscaler does it.
    pub(crate) async fn scale(&self, pool: &str, replicas: i32) {
        let (group, version) = (kinds::MACHINE_POOL.group, kinds::MACHINE_POOL.version);
        let namespace = &self.site.namespace;
        let path = format!("/apis/{group}/{version}/namespaces/{namespace}/machinepools/{pool}/scale");
        let request = http::Request::patch(path)
            .header("content-type", "application/merge-patch+json")
            .body(json!({ "spec": { "replicas": replicas } }).to_string().into_bytes())
            .unwrap();
        self.kube.watching().request::<Value>(request).await.unwrap();
    }

    /// A pod that any node may run, unless the body says more.
    pub(crate) async fn add_pod(&self, name: &str, mut body: Value) -> Value {
        body["spec"]["containers"] = json!([{ "name": "main", "image": "none" }]);
        self.create(kinds::POD, name, body).await
    }

    pub(crate) async fn is_running(&self, pod: &str) -> bool {
        let pod = self.get(kinds::POD, pod).await;
        let conditions = pod["status"]["conditions"].as_array();
        pod["status"]["phase"] == "Running"
            && conditions.into_iter().flatten().any(|it| it["type"] == "Ready" && it["status"] == "True")
    }

    pub(crate) async fn node_of(&self, pod: &str) -> String {
        self.get(kinds::POD, pod).await["spec"]["nodeName"].as_str().unwrap_or_default().to_owned()
    }

    /// The pool has so many Nodes, and a Machine with a nodeRef for each of them, and nothing more.
    pub(crate) async fn has_settled_at(&self, n: usize) -> bool {
        let machines = self.all(kinds::MACHINE).await;
        let with_node = |it: &&Value| it["status"]["nodeRef"]["name"].is_string();
        let pools = self.all(kinds::NSTANCE_MACHINE_POOL).await;
        let ids: usize = pools.iter().map(|it| it["spec"]["providerIDList"].as_array().map_or(0, Vec::len)).sum();
        self.story_nodes().await.len() == n
            && machines.len() == n
            && machines.iter().filter(with_node).count() == n
            && self.all(kinds::NSTANCE_MACHINE).await.len() == n
            && ids == n
    }

    /// The Nodes of this story: a real API server may have those of others.
    pub(crate) async fn story_nodes(&self) -> Vec<String> {
        let made: Vec<String> = self.shards.iter().flat_map(|it| it.all_ids()).collect();
        let mut names = self.names(kinds::NODE).await;
        names.retain(|it| made.contains(it));
        names
    }

    /// All drains that were begun, and all that were acknowledged.
    pub(crate) fn drains(&self) -> (Vec<DrainOf>, Vec<DrainOf>) {
        let (mut begun, mut acknowledged) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let state = shard.state();
            let machines = state.machines.as_ref().unwrap();
            begun.extend(machines.drains.clone());
            acknowledged.extend(machines.acknowledged.clone());
        }
        begun.sort();
        acknowledged.sort();
        (begun, acknowledged)
    }

    /// How many events there are with this reason.
    pub(crate) async fn events(&self, reason: &str) -> usize {
        self.all(kinds::EVENT).await.iter().filter(|it| it["reason"] == reason).count()
    }

    /// Fails as soon as the condition does not hold, within this time.
    pub(crate) async fn holds_for(&self, time: Duration, what: &str, condition: impl AsyncFn() -> bool) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            if !condition().await {
                self.show().await;
                panic!("does not hold: {what}");
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits for a condition; what is there is said if it does not come.
    pub(crate) async fn until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition().await {
            if deadline <= Instant::now() {
                self.show().await;
                panic!("not within {} s: {what}", PATIENCE.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn show(&self) {
        let kinds = [
            kinds::CLUSTER,
            kinds::MACHINE_POOL,
            kinds::NSTANCE_MACHINE_POOL,
            kinds::NSTANCE_SHARD_GROUP,
            kinds::NSTANCE_MACHINE,
            kinds::MACHINE,
            kinds::NODE,
            kinds::POD,
            kinds::EVENT,
        ];
        for kind in kinds {
            for mut object in self.all(kind).await {
                if let Some(metadata) = object["metadata"].as_object_mut() {
                    metadata.remove("managedFields");
                    metadata.remove("uid");
                }
                let name = name_of(&object);
                if kind == kinds::EVENT {
                    eprintln!("event {} {}: {}", object["involvedObject"]["name"], object["reason"], object["message"]);
                    continue;
                }
                eprintln!(
                    "{} {name}: {} spec {} status {}",
                    kind.kind, object["metadata"], object["spec"], object["status"]
                );
            }
        }
        for shard in &self.shards {
            let state = shard.state();
            for it in state.machines.iter().flat_map(|it| it.instances.values()) {
                eprintln!("instance {} {} {:?}", it.instance_id, it.status, it.drain);
            }
        }
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.tasks.cancel();
    }
}

pub(crate) fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}
