//! kubectl, as a person uses it.

use std::{path::PathBuf, process::Output};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
};

use crate::support::{Dev, MERGE, PATIENCE, say};

/// A server, and kubectl with a home of its own.
struct Kubectl {
    dev: Dev,
    program: PathBuf,
}

impl Kubectl {
    /// `None`, said aloud, where there is no kubectl.
    async fn start() -> Option<Self> {
        let named = std::env::var_os("KUBECTL").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path).map(|dir| dir.join("kubectl")).find(|it| it.is_file());
        let Some(program) = named.or(found) else {
            say("NOT TESTED WITH KUBECTL: put one into the PATH, or name it in KUBECTL");
            return None;
        };
        let dev = Dev::start_with(|options| options.crds = vec![pools()]).await;
        std::fs::write(dev.dir.path().join("kubeconfig"), dev.running.kubeconfig()).unwrap();
        Some(Self { dev, program })
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.dev.dir.path()).env("KUBECONFIG", self.dev.dir.path().join("kubeconfig"));
        command.current_dir(self.dev.dir.path()).kill_on_drop(true);
        command
    }

    async fn run(&self, args: &[&str]) -> Output {
        let run = tokio::time::timeout(3 * PATIENCE, self.command(args).output());
        run.await.unwrap_or_else(|_| panic!("kubectl {args:?} does not end")).unwrap()
    }

    /// What it prints, if it succeeds.
    async fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args).await;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "kubectl {args:?}: {out}{err}");
        out.into_owned()
    }

    /// What it complains of, if it fails.
    async fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args).await;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!output.status.success(), "kubectl {args:?}: {out}{err}");
        err.into_owned()
    }

    fn write(&self, name: &str, object: &Value) {
        std::fs::write(self.dev.dir.path().join(name), object.to_string()).unwrap();
    }

    async fn node(&self, name: &str) {
        let node = json!({ "metadata": { "name": name }, "status": {
            "conditions": [{ "type": "Ready", "status": "True" }], "nodeInfo": { "kubeletVersion": "v1.36.0" },
        } });
        self.dev.cluster.post("/api/v1/nodes", &node).await.expect(201);
    }
}

/// The definition of pools, cut short.
fn pools() -> Value {
    json!({
        "metadata": { "name": "machinepools.cluster.x-k8s.io" },
        "spec": {
            "group": "cluster.x-k8s.io", "scope": "Namespaced",
            "names": { "plural": "machinepools", "singular": "machinepool", "kind": "MachinePool",
                       "shortNames": ["mp"], "categories": ["cluster-api"] },
            "versions": [{
                "name": "v1beta2", "served": true, "storage": true,
                "subresources": { "status": {}, "scale": {
                    "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas" } },
                "additionalPrinterColumns": [
                    { "name": "Desired", "type": "integer", "jsonPath": ".spec.replicas" },
                    { "name": "Phase", "type": "string", "jsonPath": ".status.phase", "priority": 1 },
                ],
            }],
        },
    })
}

fn pool(replicas: i64) -> Value {
    json!({
        "apiVersion": "cluster.x-k8s.io/v1beta2", "kind": "MachinePool", "metadata": { "name": "nstance-test" },
        "spec": { "clusterName": "c", "replicas": replicas },
    })
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[tokio::test]
async fn get_prints_tables_of_several_kinds() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.node("n1").await;
    kubectl.write("pool.json", &pool(2));
    kubectl.ok(&["create", "-f", "pool.json"]).await;
    let nodes = kubectl.ok(&["get", "nodes"]).await;
    let lines: Vec<_> = nodes.lines().map(words).collect();
    assert_eq!(lines[0], ["NAME", "STATUS", "ROLES", "AGE", "VERSION"]);
    assert_eq!((&lines[1][..3], lines[1][4]), (&["n1", "Ready", "<none>"][..], "v1.36.0"));
    assert!(kubectl.ok(&["get", "no", "-o", "wide"]).await.contains("KERNEL-VERSION"));
    let pools = kubectl.ok(&["get", "mp"]).await;
    assert_eq!(pools.lines().map(words).collect::<Vec<_>>(), [vec!["NAME", "DESIRED"], vec!["nstance-test", "2"]]);
    assert!(kubectl.ok(&["get", "mp", "-o", "wide"]).await.contains("PHASE"));
    let machine = json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "NstanceMachine", "metadata": { "name": "m1" },
    });
    kubectl.write("machine.json", &machine);
    kubectl.ok(&["create", "-f", "machine.json"]).await;
    let all = kubectl.ok(&["get", "machinepools,nmp,nsg,nm,machines,nodes"]).await;
    for name in
        ["machinepool.cluster.x-k8s.io/nstance-test", "nstancemachine.infrastructure.cluster.x-k8s.io/m1", "node/n1"]
    {
        assert!(all.contains(name), "{all}");
    }
    assert!(kubectl.ok(&["get", "cluster-api"]).await.contains("nstance-test"));
    assert_eq!(kubectl.ok(&["get", "mp", "nstance-test", "-o", "jsonpath={.spec.replicas}"]).await, "2");
    assert!(kubectl.fails(&["get", "mp", "none"]).await.contains("(NotFound)"));
    assert!(kubectl.ok(&["api-resources"]).await.contains("nstanceshardgroups"));
}

#[tokio::test]
async fn get_follows_changes() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.node("n1").await;
    let mut child = kubectl.command(&["get", "nodes", "-w"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = async || tokio::time::timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert_eq!(words(&next().await)[0], "NAME");
    assert_eq!(words(&next().await)[..2], ["n1", "Ready"]);
    let cordon = json!({ "spec": { "unschedulable": true } });
    kubectl.dev.cluster.patch("/api/v1/nodes/n1", MERGE, &cordon).await.expect(200);
    assert_eq!(words(&next().await)[..2], ["n1", "Ready,SchedulingDisabled"], "without a second header");
    kubectl.node("n2").await;
    assert_eq!(words(&next().await)[0], "n2");
    child.kill().await.unwrap();
}

#[tokio::test]
async fn apply_changes_what_it_applied_before() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.write("pool.json", &pool(2));
    assert!(kubectl.ok(&["apply", "-f", "pool.json"]).await.contains("created"));
    assert!(kubectl.ok(&["apply", "-f", "pool.json"]).await.contains("unchanged"));
    kubectl.write("pool.json", &pool(3));
    let diff = kubectl.run(&["diff", "-f", "pool.json"]).await;
    let text = String::from_utf8_lossy(&diff.stdout);
    assert_eq!(diff.status.code(), Some(1), "{text}{}", String::from_utf8_lossy(&diff.stderr));
    assert!(text.contains("+  replicas: 3"), "{text}");
    assert!(kubectl.ok(&["apply", "-f", "pool.json"]).await.contains("configured"));
    assert_eq!(kubectl.run(&["diff", "-f", "pool.json"]).await.status.code(), Some(0));
    // A kind that kubectl was built with is merged by its own rules.
    let map =
        |data: Value| json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" }, "data": data });
    kubectl.write("map.json", &map(json!({ "a": "1", "b": "1" })));
    kubectl.ok(&["apply", "-f", "map.json"]).await;
    kubectl.write("map.json", &map(json!({ "a": "2" })));
    kubectl.ok(&["apply", "-f", "map.json"]).await;
    let data = kubectl.dev.cluster.get("/api/v1/namespaces/default/configmaps/m").await.expect(200)["data"].clone();
    assert_eq!(data, json!({ "a": "2" }));
}

#[tokio::test]
async fn server_side_apply_names_its_conflicts() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.write("pool.json", &pool(2));
    let apply = ["apply", "--server-side", "-f", "pool.json"];
    assert!(kubectl.ok(&apply).await.contains("serverside-applied"));
    kubectl.write("pool.json", &pool(3));
    kubectl.ok(&apply).await;
    kubectl.write("pool.json", &pool(4));
    let other = [&apply[..], &["--field-manager=other"]].concat();
    let refused = kubectl.fails(&other).await;
    assert!(refused.contains("conflict with \"kubectl\": .spec.replicas"), "{refused}");
    kubectl.ok(&[&other[..], &["--force-conflicts"]].concat()).await;
    let diff = kubectl.run(&["diff", "--server-side", "-f", "pool.json", "--field-manager=other"]).await;
    assert_eq!(diff.status.code(), Some(0), "{}", String::from_utf8_lossy(&diff.stderr));
    // What was applied by the client first can be taken over.
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "m" }, "data": { "a": "1" } });
    kubectl.write("map.json", &map);
    kubectl.ok(&["apply", "-f", "map.json"]).await;
    kubectl.ok(&["apply", "--server-side", "-f", "map.json"]).await;
}

#[tokio::test]
async fn scale_label_annotate_and_patch_change_objects() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.write("pool.json", &pool(2));
    kubectl.ok(&["create", "-f", "pool.json"]).await;
    kubectl.ok(&["scale", "machinepool", "nstance-test", "--replicas", "6"]).await;
    kubectl.ok(&["scale", "mp/nstance-test", "--current-replicas=6", "--replicas=5"]).await;
    kubectl.fails(&["scale", "mp/nstance-test", "--current-replicas=9", "--replicas=1"]).await;
    kubectl.ok(&["label", "mp", "nstance-test", "a=b"]).await;
    kubectl.ok(&["annotate", "mp", "nstance-test", "c=d", "e=f"]).await;
    kubectl.ok(&["annotate", "mp", "nstance-test", "e-"]).await;
    kubectl.ok(&["patch", "mp", "nstance-test", "--type=merge", "-p", r#"{"spec":{"x":1}}"#]).await;
    kubectl
        .ok(&["patch", "mp", "nstance-test", "--type=json", "-p", r#"[{"op":"add","path":"/spec/y","value":2}]"#])
        .await;
    kubectl
        .ok(&[
            "patch",
            "mp",
            "nstance-test",
            "--subresource=status",
            "--type=merge",
            "-p",
            r#"{"status":{"phase":"P"}}"#,
        ])
        .await;
    let path = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools/nstance-test";
    let object = kubectl.dev.cluster.get(path).await.expect(200);
    assert_eq!(object["spec"], json!({ "clusterName": "c", "replicas": 5, "x": 1, "y": 2 }));
    assert_eq!(object["metadata"]["labels"], json!({ "a": "b" }));
    assert_eq!(object["metadata"]["annotations"], json!({ "c": "d" }));
    assert_eq!(object["status"]["phase"], "P");
    assert_eq!(
        kubectl.ok(&["get", "mp", "-l", "a=b", "-o", "name"]).await.trim(),
        "machinepool.cluster.x-k8s.io/nstance-test"
    );
}

#[tokio::test]
async fn nodes_are_described_tainted_cordoned_and_drained() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.node("n1").await;
    let described = kubectl.ok(&["describe", "node", "n1"]).await;
    assert!(described.contains("KubeletVersion") || described.contains("Kubelet Version"), "{described}");
    kubectl.ok(&["taint", "node", "n1", "a=b:NoSchedule"]).await;
    kubectl.ok(&["cordon", "n1"]).await;
    let node = kubectl.dev.cluster.get("/api/v1/nodes/n1").await.expect(200);
    assert_eq!(node["spec"]["unschedulable"], true);
    assert!(node["spec"]["taints"].as_array().unwrap().iter().any(|it| it["key"] == "a"));
    kubectl.ok(&["uncordon", "n1"]).await;
    kubectl.ok(&["taint", "node", "n1", "a-"]).await;
    let pods = "/api/v1/namespaces/default/pods";
    let owner = json!({ "apiVersion": "v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true });
    let pod = json!({
        "metadata": { "name": "p", "labels": { "app": "x" }, "ownerReferences": [owner] },
        "spec": { "nodeName": "n1", "terminationGracePeriodSeconds": 0 },
    });
    kubectl.dev.cluster.post(pods, &pod).await.expect(201);
    let ready = json!({ "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } });
    kubectl.dev.cluster.patch(&format!("{pods}/p/status"), MERGE, &ready).await.expect(200);
    let budget = json!({ "metadata": { "name": "b" }, "spec": { "minAvailable": 1, "selector": { "matchLabels": { "app": "x" } } } });
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    kubectl.dev.cluster.post(budgets, &budget).await.expect(201);
    let refused = kubectl.fails(&["drain", "n1", "--timeout=3s"]).await;
    assert!(refused.contains("disruption budget"), "{refused}");
    kubectl.ok(&["delete", "pdb", "b"]).await;
    let drained = kubectl.ok(&["drain", "n1", "--timeout=30s"]).await;
    assert!(drained.contains("node/n1 drained"), "{drained}");
    kubectl.dev.cluster.get(&format!("{pods}/p")).await.refused(404, "NotFound");
}

#[tokio::test]
async fn delete_and_wait_see_the_end() {
    let Some(kubectl) = Kubectl::start().await else { return };
    kubectl.write("pool.json", &pool(2));
    kubectl.ok(&["create", "-f", "pool.json"]).await;
    let described = kubectl.ok(&["describe", "mp", "nstance-test"]).await;
    assert!(described.contains("Replicas:"), "{described}");
    let path = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools/nstance-test";
    let finalizers = |list: Value| json!({ "metadata": { "finalizers": list } });
    kubectl.dev.cluster.patch(path, MERGE, &finalizers(json!(["a.io/x"]))).await.expect(200);
    let waits = kubectl.command(&["delete", "mp", "nstance-test"]).output();
    let frees = async {
        crate::support::eventually("the deletion is asked for", || async {
            let object = kubectl.dev.cluster.get(path).await.expect(200);
            object["metadata"]["deletionTimestamp"].is_string().then_some(())
        })
        .await;
        kubectl.dev.cluster.patch(path, MERGE, &finalizers(Value::Null)).await.expect(200);
    };
    let (output, ()) = tokio::time::timeout(3 * PATIENCE, async { tokio::join!(waits, frees) }).await.unwrap();
    assert!(output.unwrap().status.success());
    kubectl.ok(&["wait", "--for=delete", "mp/nstance-test", "--timeout=10s"]).await;
    kubectl.node("n1").await;
    kubectl.ok(&["wait", "--for=condition=Ready", "node/n1", "--timeout=10s"]).await;
    kubectl.ok(&["wait", "--for=condition=Established", "crd/machinepools.cluster.x-k8s.io", "--timeout=10s"]).await;
    kubectl.ok(&["delete", "node", "n1"]).await;
}

#[tokio::test]
async fn secrets_are_made_the_long_way() {
    let Some(kubectl) = Kubectl::start().await else { return };
    let dry =
        kubectl.ok(&["create", "secret", "generic", "s", "--from-literal=a=b", "--dry-run=client", "-o", "json"]).await;
    std::fs::write(kubectl.dev.dir.path().join("secret.json"), dry).unwrap();
    kubectl.ok(&["apply", "-f", "secret.json"]).await;
    let secret = kubectl.dev.cluster.get("/api/v1/namespaces/default/secrets/s").await.expect(200);
    assert_eq!(secret["data"]["a"], "Yg==");
    // The short way sends protobuf.
    let refused = kubectl.fails(&["create", "secret", "generic", "t", "--from-literal=a=b"]).await;
    assert!(refused.contains("--dry-run=client -o yaml | kubectl apply -f -"), "{refused}");
}
