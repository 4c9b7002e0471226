//! Kubernetes beside the shards, as a person with kubectl has it: pools, nodes, drains, pods with instances of their own.

use std::{fs, path::Path, time::Duration};

use kube::{
    Api, Client, Config,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::e2e_common::{Env, PATIENCE, text};

const CAPI: (&str, &str) = ("cluster.x-k8s.io", "v1beta2");
const OURS: (&str, &str) = ("infrastructure.cluster.x-k8s.io", "v1beta1");
const CORE: (&str, &str) = ("", "v1");

/// Access to the API server of one environment.
struct Cluster {
    client: Client,
    env: Env,
}

impl Cluster {
    async fn up(args: &[&str]) -> Self {
        let env = Env::new();
        env.up_with_kubernetes(args).await;
        // The second test finds it done.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let kubeconfig = Kubeconfig::read_from(env.dir().join("operator/kubeconfig")).unwrap();
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
        Self { client: Client::try_from(config).unwrap(), env }
    }

    fn api(&self, (group, version): (&str, &str), kind: &str, plural: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        match plural {
            "nodes" => Api::all_with(self.client.clone(), &resource),
            _ => Api::namespaced_with(self.client.clone(), "default", &resource),
        }
    }

    fn pools(&self) -> Api<DynamicObject> {
        self.api(CAPI, "MachinePool", "machinepools")
    }

    fn nodes(&self) -> Api<DynamicObject> {
        self.api(CORE, "Node", "nodes")
    }

    fn pods(&self) -> Api<DynamicObject> {
        self.api(CORE, "Pod", "pods")
    }

    fn budgets(&self) -> Api<DynamicObject> {
        self.api(("policy", "v1"), "PodDisruptionBudget", "poddisruptionbudgets")
    }

    async fn list(&self, api: &Api<DynamicObject>) -> Vec<Value> {
        let items = api.list(&Default::default()).await.unwrap().items;
        items.into_iter().map(|it| serde_json::to_value(it).unwrap()).collect()
    }

    async fn machines(&self) -> Vec<Value> {
        self.list(&self.api(CAPI, "Machine", "machines")).await
    }

    async fn our_machines(&self) -> Vec<Value> {
        self.list(&self.api(OURS, "NstanceMachine", "nstancemachines")).await
    }

    /// As `kubectl scale` does it.
    async fn scale(&self, replicas: u32) {
        let patch = json!({ "spec": { "replicas": replicas } });
        self.pools().patch_scale("nstance-test", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    async fn create(&self, api: &Api<DynamicObject>, object: Value) {
        api.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    }

    async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> bool) {
        let wait = async {
            while !holds().await {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, wait).await.is_err() {
            let (ours, nodes) = (self.our_machines().await, self.list(&self.nodes()).await);
            panic!("not in time: {what}\n{:#}\n{:#}\n{}", json!(ours), json!(nodes), self.env.logs());
        }
    }

    async fn until_nodes(&self, n: usize) {
        self.until(&format!("{n} nodes"), async || self.list(&self.nodes()).await.len() == n).await;
    }

    /// `None` where kubectl is not installed.
    async fn kubectl(&self, args: &[&str]) -> Option<String> {
        let kubeconfig = self.env.dir().join("operator/kubeconfig");
        let output = Command::new("kubectl").arg("--kubeconfig").arg(kubeconfig).args(args).output().await;
        let output = match output {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                println!("kubectl is not installed, so {args:?} was not tried");
                return None;
            }
            output => output.unwrap(),
        };
        assert!(output.status.success(), "kubectl {args:?}: {}", text(&output));
        Some(text(&output))
    }
}

fn is_ready(object: &Value) -> bool {
    let conditions = object["status"]["conditions"].as_array().map(Vec::as_slice).unwrap_or_default();
    conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

#[tokio::test]
async fn groups_are_imported_as_a_pool_whose_machines_are_ready() {
    let cluster = Cluster::up(&[]).await;
    let status = cluster.env.healthy().await;
    cluster
        .until("four machines are ready", async || {
            let machines = cluster.machines().await;
            machines.len() == 4 && machines.iter().all(is_ready)
        })
        .await;
    assert!(cluster.our_machines().await.iter().all(is_ready));
    let kubernetes = &status["kubernetes"];
    let pool = json!({ "name": "nstance-test", "replicas": 4, "ready": 4, "phase": "Running" });
    assert_eq!(kubernetes["machinepools"], json!([pool]), "{kubernetes:#}");
    assert_eq!((&kubernetes["nodes"], &kubernetes["drains"]), (&json!(4), &json!(0)));
    assert_eq!(kubernetes["operator"], json!({ "ready": true, "shards_reachable": 2, "shards": 2 }));
    assert_eq!(
        status["urls"]["kubeconfig"],
        json!(cluster.env.dir().join("operator/kubeconfig").canonicalize().unwrap())
    );

    let objects = cluster.env.dir().join("dev-k8s");
    let mut files: Vec<String> = [
        "configmaps/default/nstance-cluster-ca",
        "secrets/default/nstance-operator-cert",
        "secrets/default/nstance-operator-key",
        "secrets/default/nstance-operator-nonce",
        "nstancemachinepools/default/nstance-test",
        "machinepools/default/nstance-test",
    ]
    .map(str::to_owned)
    .into();
    files.extend(crate::e2e_common::ids(&status).into_iter().map(|id| format!("nodes/{id}")));
    for file in files {
        assert!(objects.join(format!("{file}.json")).is_file(), "{file}");
    }

    let all = cluster.env.processes().await;
    assert_eq!(all.len(), 10, "up, store, two servers, Kubernetes, operator and four agents: {all:?}");
    let said = cluster.env.ok(&["clean"]).await;
    assert!(said.contains("removed"), "{said}");
    assert!(all.iter().all(|it| !it.lives()), "{all:?}");
}

#[tokio::test]
async fn a_pool_that_shrinks_drains_its_nodes_and_a_budget_holds_one_up() {
    let cluster = Cluster::up(&[]).await;
    cluster.env.healthy().await;
    cluster.scale(6).await;
    cluster.until_nodes(6).await;
    cluster
        .until("six machines are ready", async || {
            let machines = cluster.our_machines().await;
            machines.len() == 6 && machines.iter().all(is_ready)
        })
        .await;

    // One pod on each node, of which three must stay: of four that are to go, one has to wait.
    for node in cluster.list(&cluster.nodes()).await {
        let node = name(&node);
        cluster
            .create(
                &cluster.pods(),
                json!({
                    "apiVersion": "v1", "kind": "Pod",
                    "metadata": { "name": format!("web-{node}"), "labels": { "app": "web" } },
                    "spec": { "nodeName": node, "containers": [{ "name": "main", "image": "pause" }] },
                }),
            )
            .await;
    }
    cluster
        .until("the pods are ready", async || {
            let pods = cluster.list(&cluster.pods()).await;
            pods.len() == 6 && pods.iter().all(is_ready)
        })
        .await;
    let budget = json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": { "name": "web" },
        "spec": { "minAvailable": 3, "selector": { "matchLabels": { "app": "web" } } },
    });
    cluster.create(&cluster.budgets(), budget).await;
    cluster
        .until("the budget is known", async || {
            cluster.list(&cluster.budgets()).await[0]["status"]["disruptionsAllowed"] == 3
        })
        .await;

    cluster.scale(2).await;
    let blocked = async || -> Vec<String> {
        let machines = cluster.our_machines().await;
        let by = machines.iter().filter_map(|it| it["status"]["drain"]["blockedBy"][0].as_str());
        by.map(str::to_owned).collect()
    };
    cluster.until_nodes(3).await;
    cluster
        .until("one drain is blocked by the budget", async || {
            let blocked = blocked().await;
            blocked.len() == 1 && blocked[0].contains("PDB") && blocked[0].contains("web")
        })
        .await;
    let status = cluster.env.until("the status shows it", |it| it["kubernetes"]["drains"] == 1).await;
    assert!(status["kubernetes"]["blocked"][0]["by"][0].as_str().unwrap().contains("web"), "{status:#}");
    if let Some(shown) = cluster.kubectl(&["get", "nm"]).await {
        let draining: Vec<&str> = shown.lines().filter(|it| it.contains("Draining")).collect();
        assert!(shown.contains("BLOCKED") && draining.len() == 1 && draining[0].contains("PDB"), "{shown}");
    }
    assert_eq!(cluster.list(&cluster.pods()).await.len(), 3, "no pod went that had to stay");

    cluster.budgets().delete("web", &DeleteParams::default()).await.unwrap();
    cluster.until_nodes(2).await;
    cluster.until("two machines are left", async || cluster.machines().await.len() == 2).await;
    cluster.env.until_agents(2).await;
    cluster.env.healthy().await;
}

#[tokio::test]
async fn a_pod_that_asks_for_an_instance_of_its_own_gets_it_and_runs_there() {
    let cluster = Cluster::up(&["--shards", "1", "--size", "test=1"]).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "demo",
            "annotations": {
                "on-demand.nstance.dev/group": "test",
                "on-demand.nstance.dev/vars": "{\"NodeLabels\":\"job=demo\"}",
            },
        },
        "spec": { "nodeSelector": { "job": "demo" }, "containers": [{ "name": "main", "image": "pause" }] },
    });
    cluster.create(&cluster.pods(), pod).await;
    let demo = async || serde_json::to_value(cluster.pods().get("demo").await.unwrap()).unwrap();
    cluster.until("the pod runs", async || demo().await["status"]["phase"] == "Running").await;
    let node = demo().await["spec"]["nodeName"].as_str().unwrap().to_owned();
    let node = serde_json::to_value(cluster.nodes().get(&node).await.unwrap()).unwrap();
    assert_eq!(node["metadata"]["labels"]["job"], "demo");
    let pool = serde_json::to_value(cluster.pools().get("nstance-test").await.unwrap()).unwrap();
    assert_eq!(pool["spec"]["replicas"], 1, "the pool has nothing to do with it");
    assert_ne!(pool["spec"]["providerIDList"], json!([node["spec"]["providerID"]]));
    cluster.until_nodes(2).await;
    cluster.env.until_agents(2).await;
}

#[tokio::test]
async fn a_file_that_is_edited_by_hand_changes_a_pools_size() {
    let cluster = Cluster::up(&["--shards", "1", "--size", "test=1"]).await;
    let file = cluster.env.dir().join("dev-k8s/machinepools/default/nstance-test.json");
    edit(&file, "\"replicas\": 1", "\"replicas\": 3");
    cluster.until_nodes(3).await;
    let status = cluster.env.healthy().await;
    assert_eq!(crate::e2e_common::group(&status), [3, 3, 3]);
    if cluster.kubectl(&["scale", "machinepool", "nstance-test", "--replicas", "2"]).await.is_some() {
        cluster.until_nodes(2).await;
    }
}

/// The spec's field comes first of those of this name.
fn edit(file: &Path, from: &str, to: &str) {
    let before = fs::read_to_string(file).unwrap();
    let spec = before.find("\"spec\"").unwrap();
    let (head, tail) = before.split_at(spec);
    assert!(tail.contains(from), "{before}");
    fs::write(file, format!("{head}{}", tail.replacen(from, to, 1))).unwrap();
}

#[tokio::test]
async fn operator_and_kubernetes_come_back_after_their_death() {
    let cluster = Cluster::up(&["--shards", "1", "--size", "test=2"]).await;
    cluster.env.healthy().await;
    for target in ["operator", "k8s"] {
        let said = cluster.env.ok(&["kill", target]).await;
        assert!(said.contains("killed") && said.contains("all healthy after"), "{said}");
    }
    assert_eq!(cluster.list(&cluster.nodes()).await.len(), 2);

    // Stopped as a whole, it goes on where it was, with the same identity.
    let certificate = cluster.env.dir().join("dev-k8s/secrets/default/nstance-operator-cert.json");
    let before = fs::read_to_string(&certificate).unwrap();
    cluster.env.ok(&["down"]).await;
    cluster.env.up_with_kubernetes(&[]).await;
    cluster.env.healthy().await;
    assert_eq!(fs::read_to_string(&certificate).unwrap(), before);
    cluster.env.until_agents(2).await;
}

#[tokio::test]
async fn agents_in_tmux_have_a_window_each_and_clean_closes_them() {
    let env = Env::new();
    if env.windows().is_none() {
        println!("tmux is not installed, so agents in its windows were not tried");
        return;
    }
    env.up_with_kubernetes(&["--shards", "1", "--provider", "tmux"]).await;
    let status = env.healthy().await;
    assert_eq!((&status["provider"], &status["kubernetes"]["nodes"]), (&json!("tmux"), &json!(2)));
    let windows = || env.windows().unwrap_or_default();
    let named: std::collections::BTreeSet<String> =
        crate::e2e_common::ids(&status).into_iter().map(|id| format!("nstance-agent-{id}")).collect();
    assert_eq!(windows(), named);
    let lost = crate::e2e_common::ids(&status).into_iter().next().unwrap();
    let said = env.ok(&["kill", &format!("instance/{lost}")]).await;
    assert!(said.contains("ready after"), "{said}");
    env.until("it is replaced", |it| it["healthy"] == true && !crate::e2e_common::ids(it).contains(&lost)).await;
    assert_eq!(windows().len(), 2);
    env.ok(&["clean"]).await;
    assert_eq!(windows().len(), 0);
}
