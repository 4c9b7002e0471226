//! The files below `config/`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use nstance_operator::api::manifests;
use serde_json::{Value, json};

fn config() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config")
}

fn files_below(directory: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, root, found);
        } else {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            found.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn the_files_are_those_that_the_types_give() {
    let expected = manifests::files().unwrap();
    let mut found = BTreeMap::new();
    files_below(&config(), &config(), &mut found);
    for (path, text) in &expected {
        let Some(there) = found.remove(path) else { panic!("config/{path} is missing; run `make crds`") };
        assert!(there == *text, "config/{path} is not what the types give; run `make crds`");
    }
    assert!(found.is_empty(), "not written by `make crds`: {:?}", found.keys());
}

#[test]
fn a_file_reads_back_as_the_object_it_was_written_from() {
    let files = manifests::files().unwrap();
    let read = |path: &str| -> Value { serde_saphyr::from_str(&files[path]).unwrap() };
    for crd in manifests::crds().unwrap() {
        let plural = crd["spec"]["names"]["plural"].as_str().unwrap();
        assert_eq!(read(&format!("crd/bases/infrastructure.cluster.x-k8s.io_{plural}.yaml")), crd);
    }
    for object in manifests::rbac("default") {
        let (kind, name) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let n_same = files.keys().filter(|it| it.starts_with("rbac/") && read(it) == object).count();
        assert_eq!(n_same, 1, "{kind} {name}");
    }
}

/// The objects that `kubectl apply -k` would send, or `None` where there is no kubectl.
fn kustomize(directory: &str) -> Option<Vec<Value>> {
    let from_tools = std::env::var_os("KUBEBUILDER_ASSETS").map(|it| PathBuf::from(it).join("kubectl"));
    let kubectl = from_tools.filter(|it| it.is_file()).unwrap_or_else(|| PathBuf::from("kubectl"));
    let answer = match Command::new(&kubectl).arg("kustomize").arg(config().join(directory)).output() {
        Ok(answer) => answer,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("NOT TESTED: there is no kubectl, so `kubectl kustomize config/{directory}` was not run");
            return None;
        }
        Err(error) => panic!("run {}: {error}", kubectl.display()),
    };
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    Some(serde_saphyr::from_multiple(&String::from_utf8(answer.stdout).unwrap()).unwrap())
}

fn names(objects: &[Value]) -> Vec<String> {
    let text = |it: &Value| it.as_str().unwrap().to_owned();
    let mut names: Vec<String> =
        objects.iter().map(|it| format!("{} {}", text(&it["kind"]), text(&it["metadata"]["name"]))).collect();
    names.sort();
    names
}

#[test]
fn kustomize_brings_the_crds_and_the_service_account_for_cluster_api() {
    let Some(objects) = kustomize("crd") else { return };
    assert_eq!(
        names(&objects),
        [
            "ClusterRole nstance-capi-workload",
            "ClusterRoleBinding nstance-capi-workload",
            "CustomResourceDefinition nstanceclusters.infrastructure.cluster.x-k8s.io",
            "CustomResourceDefinition nstancemachinepools.infrastructure.cluster.x-k8s.io",
            "CustomResourceDefinition nstancemachines.infrastructure.cluster.x-k8s.io",
            "CustomResourceDefinition nstancemachinetemplates.infrastructure.cluster.x-k8s.io",
            "CustomResourceDefinition nstanceshardgroups.infrastructure.cluster.x-k8s.io",
            "ServiceAccount nstance-capi-workload",
        ]
    );
    // A second reader of YAML sees the same schemas as we wrote.
    for crd in manifests::crds().unwrap() {
        assert!(objects.contains(&crd), "{}", crd["metadata"]["name"]);
    }
    let binding = objects.iter().find(|it| it["kind"] == "ClusterRoleBinding").unwrap();
    assert_eq!(binding["subjects"][0]["namespace"], "default");
}

#[test]
fn kustomize_puts_the_operator_into_its_own_namespace() {
    let Some(objects) = kustomize("default") else { return };
    let find = |kind: &str, name: &str| {
        objects.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name).unwrap_or_else(|| {
            panic!("no {kind} {name} among {:?}", names(&objects));
        })
    };
    for (kind, name) in [
        ("ServiceAccount", "nstance-operator"),
        ("ServiceAccount", "nstance-capi-workload"),
        ("Role", "nstance-operator"),
        ("RoleBinding", "nstance-operator"),
        ("ConfigMap", "nstance-operator-config"),
        ("Deployment", "nstance-operator"),
        ("Service", "nstance-operator-webhook"),
    ] {
        assert_eq!(find(kind, name)["metadata"]["namespace"], "nstance-system", "{kind} {name}");
    }
    for (kind, name) in [
        ("ClusterRoleBinding", "nstance-operator"),
        ("ClusterRoleBinding", "nstance-capi-workload"),
        ("RoleBinding", "nstance-operator"),
    ] {
        assert_eq!(find(kind, name)["subjects"][0]["namespace"], "nstance-system", "{kind} {name}");
    }
    let webhook = find("ValidatingWebhookConfiguration", "nstance-operator");
    assert_eq!(webhook["webhooks"][0]["clientConfig"]["service"]["namespace"], "nstance-system");
    let pod = &find("Deployment", "nstance-operator")["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["name"], "manager");
    assert_eq!(pod["volumes"][0]["configMap"]["name"], "nstance-operator-config");
    assert_eq!(names(&objects).iter().filter(|it| it.starts_with("Namespace ")).count(), 1);
    for object in &objects {
        let label = &object["metadata"]["labels"]["cluster.x-k8s.io/provider"];
        assert_eq!(*label, json!("infrastructure-nstance"), "{} {}", object["kind"], object["metadata"]["name"]);
    }
}
