//! The CRDs as a real API server takes them.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::setup;

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1",
        "kind": kind,
        "metadata": { "name": name, "namespace": "default" },
        "spec": spec,
    })
}

async fn create(client: &Client, manifest: &Value) -> Result<DynamicObject, kube::Error> {
    let (api, _) = setup::api_of(client, manifest);
    let object: DynamicObject = serde_json::from_value(manifest.clone()).unwrap();
    api.create(&PostParams::default(), &object).await
}

async fn merge(client: &Client, manifest: &Value, patch: Value) -> Result<DynamicObject, kube::Error> {
    let (api, name) = setup::api_of(client, manifest);
    api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await
}

async fn set_status(client: &Client, manifest: &Value, status: Value) -> Result<DynamicObject, kube::Error> {
    let (api, name) = setup::api_of(client, manifest);
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(json!({ "status": status }))).await
}

#[track_caller]
fn is_refused<T: std::fmt::Debug>(answer: Result<T, kube::Error>, message: &str) {
    match answer {
        Err(kube::Error::Api(status)) => {
            assert_eq!(status.code, 422, "{}", status.message);
            assert!(status.message.contains(message), "expected `{message}`, got `{}`", status.message);
        }
        other => panic!("expected `{message}`, got {other:?}"),
    }
}

#[tokio::test]
async fn crds_are_established_and_their_schemas_are_structural() {
    let Some((_, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;
    let crds: Api<CustomResourceDefinition> = Api::all(client);
    for crd in nstance_operator::api::manifests::crds().unwrap() {
        let name = crd["metadata"]["name"].as_str().unwrap();
        let conditions = crds.get(name).await.unwrap().status.unwrap().conditions.unwrap_or_default();
        let status = |kind: &str| conditions.iter().find(|it| it.type_ == kind).map(|it| it.status.clone());
        assert_eq!(status("Established").as_deref(), Some("True"), "{name}");
        assert_eq!(status("NamesAccepted").as_deref(), Some("True"), "{name}");
        assert_eq!(status("NonStructuralSchema"), None, "{name}");
    }
}

#[tokio::test]
async fn a_new_object_that_breaks_a_rule_is_refused_with_our_message() {
    let Some((_, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;
    let pool = |spec: Value| object("NstanceMachinePool", "refused-at-creation", spec);
    let good = json!({ "group": "web", "shards": ["dev-1"] });
    let with = |field: &str, value: Value| {
        let mut spec = good.clone();
        spec[field] = value;
        pool(spec)
    };
    let vars: serde_json::Map<String, Value> = (0..257).map(|it| (format!("V{it}"), json!("1"))).collect();
    for (manifest, message) in [
        (with("shards", json!(["a", "b", "a"])), "spec.shards must not name a shard twice"),
        (with("shards", json!([])), "spec.shards"),
        (with("shards", json!((0..65).map(|it| format!("s{it}")).collect::<Vec<_>>())), "spec.shards: Too many"),
        (
            with("autoscaler", json!({ "min": 3, "max": 2 })),
            "spec.autoscaler.min must not be above spec.autoscaler.max",
        ),
        (with("autoscaler", json!({ "taints": [{ "key": "a", "effect": "Never" }] })), "effect: Unsupported value"),
        (with("autoscaler", json!({ "maxNodeProvisionTime": "15" })), "spec.autoscaler.maxNodeProvisionTime"),
        (with("group", json!("Web")), "spec.group in body should match"),
        (with("group", json!("a".repeat(33))), "spec.group: Too long"),
        (with("template", json!("a b")), "spec.template in body should match"),
        (with("vars", Value::Object(vars)), "spec.vars: Too many"),
        (with("vars", json!({ "A": 1 })), "spec.vars.A"),
        (with("capacity", json!({ "cpu": 2 })), "spec.capacity.cpu"),
        (with("capacity", json!({ "cpu": "two" })), "spec.capacity.cpu in body should match"),
        (with("nodeInfo", json!({ "architecture": "riscv64" })), "spec.nodeInfo.architecture: Unsupported value"),
        (with("deletionPolicy", json!("Keep")), "spec.deletionPolicy: Unsupported value"),
        (pool(json!({ "shards": ["dev-1"] })), "spec.group: Required value"),
        (pool(json!({ "group": "web" })), "spec.shards: Required value"),
        (object("NstanceMachinePool", &"n".repeat(64), good.clone()), "metadata.name must have at most 63 characters"),
        (object("NstanceMachine", &"n".repeat(64), json!({ "group": "web" })), "at most 63 characters"),
        (
            object("NstanceShardGroup", "refused-at-creation", json!({ "group": "web", "shard": "a", "size": -1 })),
            "spec.size",
        ),
        (
            object("NstanceCluster", "refused", json!({ "controlPlaneEndpoint": { "host": "", "port": 6443 } })),
            "spec.controlPlaneEndpoint.host",
        ),
    ] {
        is_refused(create(&client, &manifest).await, message);
    }
    let longest = object("NstanceMachinePool", &"n".repeat(63), good);
    let created = create(&client, &longest).await.unwrap();
    // What is not said is the default, and nothing else was added.
    assert_eq!(created.data["spec"], json!({ "group": "web", "shards": ["dev-1"], "deletionPolicy": "Delete" }));
}

#[tokio::test]
async fn a_change_that_breaks_a_rule_is_refused_with_our_message() {
    let Some((_, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;

    let pool = object(
        "NstanceMachinePool",
        "refused-change",
        json!({ "group": "web", "shards": ["dev-1", "dev-2"], "template": "knc" }),
    );
    create(&client, &pool).await.unwrap();
    is_refused(merge(&client, &pool, json!({ "spec": { "group": "db" } })).await, "spec.group is immutable");
    merge(&client, &pool, json!({ "spec": { "subnetPool": null, "template": "knd" } })).await.unwrap();
    set_status(&client, &pool, json!({ "isStatic": true })).await.unwrap();
    for (change, field) in [
        (json!({ "template": "knc" }), "template"),
        (json!({ "template": null }), "template"),
        (json!({ "subnetPool": "public" }), "subnetPool"),
        (json!({ "shards": ["dev-1"] }), "shards"),
    ] {
        let message = format!("spec.{field} cannot change: the group is defined in the server config");
        is_refused(merge(&client, &pool, json!({ "spec": change })).await, &message);
    }
    let free =
        json!({ "spec": { "instanceType": "t4g.large", "vars": { "A": "1" }, "providerIDList": ["aws:///a/i-1"] } });
    merge(&client, &pool, free).await.unwrap();

    let machine = object("NstanceMachine", "refused-change", json!({ "group": "web", "vars": { "A": "1" } }));
    create(&client, &machine).await.unwrap();
    merge(&client, &machine, json!({ "spec": { "shard": "dev-1", "instanceID": "knc1" } })).await.unwrap();
    for (change, message) in [
        (json!({ "shard": "dev-2" }), "spec.shard is immutable once set"),
        (json!({ "shard": null }), "spec.shard is immutable once set"),
        (json!({ "instanceID": "knc2" }), "spec.instanceID is immutable once set"),
        (json!({ "vars": { "A": "2" } }), "spec.vars is immutable"),
        (json!({ "vars": null }), "spec.vars is immutable"),
        (json!({ "instanceType": "t4g.large" }), "spec.instanceType is immutable"),
        (json!({ "subnetPool": "public" }), "spec.subnetPool is immutable"),
    ] {
        is_refused(merge(&client, &machine, json!({ "spec": change })).await, message);
    }

    let template =
        object("NstanceMachineTemplate", "refused-change", json!({ "template": { "spec": { "group": "web" } } }));
    create(&client, &template).await.unwrap();
    is_refused(
        merge(&client, &template, json!({ "spec": { "template": { "spec": { "instanceType": "a" } } } })).await,
        "spec.template.spec is immutable; make a new template instead",
    );

    let shard_group = object("NstanceShardGroup", "refused-change", json!({ "group": "web", "shard": "dev-1" }));
    create(&client, &shard_group).await.unwrap();
    is_refused(merge(&client, &shard_group, json!({ "spec": { "shard": "dev-2" } })).await, "spec.shard is immutable");
}

#[tokio::test]
async fn a_status_as_the_operator_writes_it_is_taken() {
    let Some((_, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;
    let machine = object("NstanceMachine", "columns", json!({ "group": "web", "shard": "dev-1" }));
    setup::apply(&client, &machine).await;
    let label = json!({ "metadata": { "labels": { "cluster.x-k8s.io/cluster-name": "demo--default" } } });
    merge(&client, &machine, label).await.unwrap();
    let status = json!({
        "observedGeneration": 1,
        "initialization": { "provisioned": true },
        "ready": true,
        "phase": "Draining",
        "nodeName": "node-1",
        "instanceType": "t4g.large",
        "addresses": [{ "type": "InternalIP", "address": "192.0.2.10" }],
        "boot": { "stage": "registered", "since": "2026-01-02T03:04:05Z" },
        "drain": { "reason": "scale-down", "deadline": "2026-01-02T03:04:05Z", "remaining": 2, "blockedBy": ["shop/db-0 (PDB db)"] },
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "Ready", "message": "",
            "observedGeneration": 1, "lastTransitionTime": "2026-01-02T03:04:05Z",
        }],
    });
    let written = set_status(&client, &machine, status.clone()).await.unwrap();
    assert_eq!(written.data["status"], status);

    let path = "/apis/infrastructure.cluster.x-k8s.io/v1beta1/namespaces/default/nstancemachines/columns";
    let request = http::Request::get(path)
        .header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .unwrap();
    let table: Value = client.request(request).await.unwrap();
    let cell = |column: &str| {
        let at = table["columnDefinitions"].as_array().unwrap().iter().position(|it| it["name"] == column).unwrap();
        table["rows"][0]["cells"][at].clone()
    };
    for (column, value) in [
        ("Cluster", "demo--default"),
        ("Group", "web"),
        ("Shard", "dev-1"),
        ("Type", "t4g.large"),
        ("Phase", "Draining"),
        ("Node", "node-1"),
        ("Ready", "True"),
        ("Blocked", "shop/db-0 (PDB db)"),
    ] {
        assert_eq!(cell(column), value, "{column}");
    }
}

/// kubectl from the tools' directory, or from the machine.
fn kubectl(kubeconfig: &Path, args: &[&str]) -> Option<Output> {
    let from_tools = std::env::var_os("KUBEBUILDER_ASSETS").map(|it| PathBuf::from(it).join("kubectl"));
    let program = from_tools.filter(|it| it.is_file()).unwrap_or_else(|| PathBuf::from("kubectl"));
    match Command::new(&program).arg("--kubeconfig").arg(kubeconfig).args(args).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("NOT TESTED: there is no kubectl, so `kubectl {}` was not run", args.join(" "));
            None
        }
        Err(error) => panic!("run {}: {error}", program.display()),
    }
}

#[tokio::test]
async fn kubectl_applies_the_directory_and_shows_what_is_refused() {
    let Some((server, client)) = setup::server().await else { return };
    setup::install_crds(&client).await;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let directory = root.join("config/crd");
    // Without --server-side, as the guide says: the annotation that this leaves must not be too large either.
    let Some(output) = kubectl(&server.kubeconfig_path(), &["apply", "-k", directory.to_str().unwrap()]) else {
        return;
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("serviceaccount/nstance-capi-workload"));

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pool.json");
    let bad = object("NstanceMachinePool", "by-kubectl", json!({ "group": "web", "shards": ["a", "a"] }));
    std::fs::write(&file, bad.to_string()).unwrap();
    let output = kubectl(&server.kubeconfig_path(), &["apply", "-f", file.to_str().unwrap()]).unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("spec.shards must not name a shard twice"), "{error}");
}
