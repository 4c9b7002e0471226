//! The rights that we ship, written out once more: a right that is added or taken away is seen here.

use std::collections::BTreeSet;

use nstance_operator::api::manifests;
use serde_json::Value;

fn words(value: &Value) -> Vec<&str> {
    value.as_array().map(|it| it.iter().map(|it| it.as_str().unwrap()).collect()).unwrap_or_default()
}

/// One line for each group, resource and name: `machines.cluster.x-k8s.io: get list`.
fn rights(kind: &str, name: &str) -> Vec<String> {
    let objects = manifests::rbac("default");
    let role = objects.iter().find(|it| it["kind"] == kind && it["metadata"]["name"] == name).unwrap();
    let mut lines = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        let mut verbs = words(&rule["verbs"]);
        verbs.sort_unstable();
        let verbs = verbs.join(" ");
        for url in words(&rule["nonResourceURLs"]) {
            lines.insert(format!("{url}: {verbs}"));
        }
        for group in words(&rule["apiGroups"]) {
            for resource in words(&rule["resources"]) {
                let (resource, part) = resource.split_once('/').unwrap_or((resource, ""));
                let group = if group.is_empty() { String::new() } else { format!(".{group}") };
                let part = if part.is_empty() { String::new() } else { format!("/{part}") };
                let names = words(&rule["resourceNames"]).join(" ");
                let names = if names.is_empty() { names } else { format!(" {names}") };
                lines.insert(format!("{resource}{group}{part}{names}: {verbs}"));
            }
        }
    }
    lines.into_iter().collect()
}

const OURS: [&str; 5] =
    ["nstanceclusters", "nstancemachinepools", "nstancemachines", "nstancemachinetemplates", "nstanceshardgroups"];

fn sorted(lines: impl IntoIterator<Item = String>) -> Vec<String> {
    lines.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

fn lines(text: &str) -> impl Iterator<Item = String> {
    text.lines().map(str::trim).filter(|it| !it.is_empty()).map(str::to_owned)
}

const ALL: &str = "create delete deletecollection get list patch update watch";

#[test]
fn the_operator_may_do_this() {
    let ours = OURS.iter().flat_map(|kind| {
        ["", "/status", "/finalizers"].map(|part| format!("{kind}.infrastructure.cluster.x-k8s.io{part}: {ALL}"))
    });
    let others = lines(
        "
        clusters.cluster.x-k8s.io: create delete get list patch update watch
        clusters.cluster.x-k8s.io/status: patch
        customresourcedefinitions.apiextensions.k8s.io: get list watch
        daemonsets.apps: get list watch
        events: create patch
        machinedrainrules.cluster.x-k8s.io: get list watch
        machinepools.cluster.x-k8s.io: create delete get list patch update watch
        machines.cluster.x-k8s.io/status: patch
        machines.cluster.x-k8s.io: create delete get list patch update watch
        namespaces: get list watch
        nodes: delete get list patch watch
        persistentvolumes: get
        poddisruptionbudgets.policy: get list watch
        pods/eviction: create
        pods: delete get list watch
        validatingwebhookconfigurations.admissionregistration.k8s.io nstance-operator: get patch
        volumeattachments.storage.k8s.io: get list
        ",
    );
    assert_eq!(rights("ClusterRole", "nstance-operator"), sorted(ours.chain(others)));
}

#[test]
fn the_operator_may_do_this_in_its_namespace() {
    let expected = lines(
        "
        configmaps nstance-cluster-ca: patch
        configmaps: get list watch
        leases.coordination.k8s.io: create get update
        secrets: create get list patch update watch
        serviceaccounts/token nstance-capi-workload: create
        ",
    );
    assert_eq!(rights("Role", "nstance-operator"), sorted(expected));
}

#[test]
fn cluster_api_may_do_this_with_the_token_that_it_gets() {
    let expected = lines(
        "
        /: get
        daemonsets.apps: get list
        namespaces: get list watch
        nodes: delete get list patch watch
        persistentvolumes: get list
        pods/eviction: create
        pods: get list
        volumeattachments.storage.k8s.io: get list
        ",
    );
    assert_eq!(rights("ClusterRole", "nstance-capi-workload"), sorted(expected));
}

#[test]
fn cluster_autoscaler_may_do_this() {
    let expected = lines(
        "
        machinedeployments.cluster.x-k8s.io: get list watch
        machinepools.cluster.x-k8s.io/scale: get patch update
        machinepools.cluster.x-k8s.io: get list patch update watch
        machines.cluster.x-k8s.io: get list update watch
        machinesets.cluster.x-k8s.io: get list watch
        nstancemachinepools.infrastructure.cluster.x-k8s.io: get list watch
        nstancemachinetemplates.infrastructure.cluster.x-k8s.io: get list watch
        ",
    );
    assert_eq!(rights("ClusterRole", "nstance-cluster-autoscaler"), sorted(expected));
}

#[test]
fn an_operator_outside_of_the_workload_cluster_may_do_this_in_it() {
    let expected = lines(
        "
        daemonsets.apps: get list watch
        namespaces: get list watch
        nodes: delete get list patch watch
        persistentvolumes: get
        poddisruptionbudgets.policy: get list watch
        pods/eviction: create
        pods: delete get list watch
        volumeattachments.storage.k8s.io: get list
        ",
    );
    assert_eq!(rights("ClusterRole", "nstance-workload-operator"), sorted(expected));
}

#[test]
fn people_and_cluster_api_get_our_kinds_by_aggregation() {
    for (name, label, verbs) in [
        ("nstance-capi-manager", "cluster.x-k8s.io/aggregate-to-manager", ALL),
        ("nstance-viewer", "rbac.authorization.k8s.io/aggregate-to-view", "get list watch"),
        ("nstance-editor", "rbac.authorization.k8s.io/aggregate-to-edit", ALL),
    ] {
        let expected = OURS.iter().map(|kind| format!("{kind}.infrastructure.cluster.x-k8s.io: {verbs}"));
        assert_eq!(rights("ClusterRole", name), sorted(expected), "{name}");
        let objects = manifests::rbac("default");
        let role = objects.iter().find(|it| it["metadata"]["name"] == name).unwrap();
        assert_eq!(role["metadata"]["labels"][label], "true", "{name}");
    }
}

#[test]
fn bindings_name_the_service_account_of_the_given_namespace() {
    let objects = manifests::rbac("elsewhere");
    let bindings: Vec<&Value> =
        objects.iter().filter(|it| it["kind"].as_str().unwrap().ends_with("RoleBinding")).collect();
    assert_eq!(bindings.len(), 3);
    for binding in bindings {
        let subject = &binding["subjects"][0];
        assert_eq!(subject["namespace"], "elsewhere");
        let is_bound = |it: &&Value| {
            it["kind"] == "ServiceAccount"
                && it["metadata"]["name"] == subject["name"]
                && it["metadata"]["namespace"] == "elsewhere"
        };
        assert!(objects.iter().any(|it| is_bound(&it)), "{subject}");
    }
}
