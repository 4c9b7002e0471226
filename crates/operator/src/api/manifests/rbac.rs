//! Who may do what.

use serde_json::{Value, json};

use super::{PROVIDER_LABEL, labels};
use crate::api::names::{CAPI_GROUP, GROUP, webhook};

const OPERATOR: &str = "nstance-operator";

/// The service account whose token stands in the kubeconfig that Cluster API uses.
pub(super) const CAPI_WORKLOAD: &str = "nstance-capi-workload";

const RBAC: &str = "rbac.authorization.k8s.io";

const READ: &[&str] = &["get", "list", "watch"];
const FULL: &[&str] = &["create", "delete", "get", "list", "patch", "update", "watch"];
const ALL: &[&str] = &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

const OUR_KINDS: &[&str] =
    &["nstanceclusters", "nstancemachinepools", "nstancemachines", "nstancemachinetemplates", "nstanceshardgroups"];

/// Service accounts, roles and bindings of an operator in this namespace.
pub fn objects(namespace: &str) -> Vec<Value> {
    vec![
        service_account(OPERATOR, namespace),
        cluster_role(OPERATOR, operator_rules()),
        cluster_role_binding(OPERATOR, namespace),
        role(OPERATOR, namespace, operator_rules_in_its_namespace()),
        role_binding(OPERATOR, namespace),
        service_account(CAPI_WORKLOAD, namespace),
        cluster_role(CAPI_WORKLOAD, capi_workload_rules()),
        cluster_role_binding(CAPI_WORKLOAD, namespace),
        cluster_role("nstance-cluster-autoscaler", autoscaler_rules()),
        labelled(
            cluster_role("nstance-capi-manager", vec![rule(&[GROUP], OUR_KINDS, ALL)]),
            "cluster.x-k8s.io/aggregate-to-manager",
        ),
        cluster_role("nstance-workload-operator", workload_operator_rules()),
        labelled(
            cluster_role("nstance-viewer", vec![rule(&[GROUP], OUR_KINDS, READ)]),
            "rbac.authorization.k8s.io/aggregate-to-view",
        ),
        labelled(
            cluster_role("nstance-editor", vec![rule(&[GROUP], OUR_KINDS, ALL)]),
            "rbac.authorization.k8s.io/aggregate-to-edit",
        ),
    ]
}

fn operator_rules() -> Vec<Value> {
    let parts = |part: &str| OUR_KINDS.iter().map(|kind| format!("{kind}/{part}")).collect::<Vec<_>>();
    let mut subresources = parts("status");
    subresources.extend(parts("finalizers"));
    let subresources: Vec<&str> = subresources.iter().map(String::as_str).collect();
    let mut rules = vec![
        rule(&[GROUP], OUR_KINDS, ALL),
        rule(&[GROUP], &subresources, ALL),
        rule(&[CAPI_GROUP], &["clusters", "machinepools", "machines"], FULL),
        // `machines/status`: a Machine that recovered after a failed health check is said to be remediated.
        rule(&[CAPI_GROUP], &["clusters/status", "machines/status"], &["patch"]),
        rule(&[CAPI_GROUP], &["machinedrainrules"], READ),
    ];
    rules.extend(workload_operator_rules());
    rules.extend([
        rule(&["apiextensions.k8s.io"], &["customresourcedefinitions"], READ),
        rule(&[""], &["events"], &["create", "patch"]),
        only(
            rule(&["admissionregistration.k8s.io"], &["validatingwebhookconfigurations"], &["get", "patch"]),
            webhook::CONFIGURATION,
        ),
    ]);
    rules
}

/// What drains need, wherever the Nodes are. A kubeconfig for an external workload cluster must grant it.
fn workload_operator_rules() -> Vec<Value> {
    vec![
        rule(&[""], &["nodes"], &["get", "list", "watch", "patch", "delete"]),
        rule(&[""], &["pods"], &["get", "list", "watch", "delete"]),
        rule(&[""], &["pods/eviction"], &["create"]),
        rule(&[""], &["namespaces"], READ),
        rule(&["apps"], &["daemonsets"], READ),
        rule(&["policy"], &["poddisruptionbudgets"], READ),
        rule(&["storage.k8s.io"], &["volumeattachments"], &["get", "list"]),
        // Which pod a volume belongs to: a drain does not wait for those of pods that it skips.
        rule(&[""], &["persistentvolumes"], &["get"]),
    ]
}

fn operator_rules_in_its_namespace() -> Vec<Value> {
    vec![
        rule(&[""], &["configmaps"], READ),
        only(rule(&[""], &["configmaps"], &["patch"]), "nstance-cluster-ca"),
        rule(&[""], &["secrets"], &["get", "list", "watch", "create", "update", "patch"]),
        only(rule(&[""], &["serviceaccounts/token"], &["create"]), CAPI_WORKLOAD),
        rule(&["coordination.k8s.io"], &["leases"], &["get", "create", "update"]),
    ]
}

/// What Cluster API does in a workload cluster.
fn capi_workload_rules() -> Vec<Value> {
    vec![
        rule(&[""], &["nodes"], &["get", "list", "watch", "patch", "delete"]),
        rule(&[""], &["pods"], &["get", "list"]),
        rule(&[""], &["pods/eviction"], &["create"]),
        rule(&[""], &["namespaces"], READ),
        rule(&["apps"], &["daemonsets"], &["get", "list"]),
        rule(&[""], &["persistentvolumes"], &["get", "list"]),
        rule(&["storage.k8s.io"], &["volumeattachments"], &["get", "list"]),
        // It asks for the root path to see whether the API server is there.
        json!({ "nonResourceURLs": ["/"], "verbs": ["get"] }),
    ]
}

/// cluster-autoscaler waits for MachineSets always, and for MachineDeployments where they are served: without the right to
/// watch them it never starts, and its health check does not show it.
fn autoscaler_rules() -> Vec<Value> {
    vec![
        rule(&[GROUP], &["nstancemachinepools", "nstancemachinetemplates"], READ),
        rule(&[CAPI_GROUP], &["machinedeployments", "machinesets"], READ),
        rule(&[CAPI_GROUP], &["machinepools"], &["get", "list", "watch", "update", "patch"]),
        rule(&[CAPI_GROUP], &["machinepools/scale"], &["get", "update", "patch"]),
        rule(&[CAPI_GROUP], &["machines"], &["get", "list", "watch", "update"]),
    ]
}

fn rule(groups: &[&str], resources: &[&str], verbs: &[&str]) -> Value {
    json!({ "apiGroups": groups, "resources": resources, "verbs": verbs })
}

/// The same rule for one object alone.
fn only(mut rule: Value, name: &str) -> Value {
    rule["resourceNames"] = json!([name]);
    rule
}

fn labelled(mut object: Value, label: &str) -> Value {
    object["metadata"]["labels"] = json!({ PROVIDER_LABEL.0: PROVIDER_LABEL.1, label: "true" });
    object
}

fn service_account(name: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": { "name": name, "namespace": namespace, "labels": labels() },
    })
}

fn cluster_role(name: &str, rules: Vec<Value>) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "ClusterRole",
        "metadata": { "name": name, "labels": labels() },
        "rules": rules,
    })
}

fn role(name: &str, namespace: &str, rules: Vec<Value>) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "Role",
        "metadata": { "name": name, "namespace": namespace, "labels": labels() },
        "rules": rules,
    })
}

/// Role and service account have the same name.
fn cluster_role_binding(name: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "ClusterRoleBinding",
        "metadata": { "name": name, "labels": labels() },
        "roleRef": { "apiGroup": RBAC, "kind": "ClusterRole", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": namespace }],
    })
}

fn role_binding(name: &str, namespace: &str) -> Value {
    json!({
        "apiVersion": format!("{RBAC}/v1"),
        "kind": "RoleBinding",
        "metadata": { "name": name, "namespace": namespace, "labels": labels() },
        "roleRef": { "apiGroup": RBAC, "kind": "Role", "name": name },
        "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": namespace }],
    })
}
