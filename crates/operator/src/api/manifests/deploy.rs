//! What runs the operator in a cluster.

use serde_json::{Value, json};

use super::{PROVIDER_LABEL, labels};
use crate::api::names::{GROUP, VERSION, webhook};

const OPERATOR: &str = "nstance-operator";

/// Made from `config/default/config.yaml`.
pub(super) const CONFIG_MAP: &str = "nstance-operator-config";

const APP_LABEL: &str = "app.kubernetes.io/name";

pub(super) const EXAMPLE_CONFIG: &str = "\
# The operator's configuration: put in your cluster's id, tenant and shards.
cluster_id: example-cluster
tenant: default
shards:
  example-shard:
    registration_addr: nstance.example.net:8992
    operator_addr: nstance.example.net:8993
";

/// Namespace, Deployment, webhook. The service account and its roles are not among them.
pub fn objects(namespace: &str) -> Vec<Value> {
    vec![
        json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": { "name": namespace, "labels": labels() },
        }),
        deployment(namespace),
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": webhook::SERVICE, "namespace": namespace, "labels": labels() },
            "spec": {
                "selector": { APP_LABEL: OPERATOR },
                "ports": [{ "name": "webhook", "port": 443, "targetPort": "webhook" }],
            },
        }),
        webhook_configuration(namespace),
    ]
}

fn deployment(namespace: &str) -> Value {
    let pod_labels = json!({ APP_LABEL: OPERATOR, PROVIDER_LABEL.0: PROVIDER_LABEL.1 });
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": OPERATOR, "namespace": namespace, "labels": labels() },
        "spec": {
            "replicas": 2,
            "selector": { "matchLabels": { APP_LABEL: OPERATOR } },
            "template": {
                "metadata": { "labels": pod_labels },
                "spec": {
                    "serviceAccountName": OPERATOR,
                    "priorityClassName": "system-cluster-critical",
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": 65532,
                        "runAsGroup": 65532,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "affinity": { "podAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
                        "weight": 100,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": { "matchLabels": { APP_LABEL: OPERATOR } },
                        },
                    }] } },
                    "containers": [container()],
                    "volumes": [{ "name": "config", "configMap": { "name": CONFIG_MAP } }],
                },
            },
        },
    })
}

fn container() -> Value {
    let probe = |path: &str| json!({ "httpGet": { "path": path, "port": "health" } });
    json!({
        // clusterctl looks for this name.
        "name": "manager",
        "image": concat!("nstance-operator:", env!("CARGO_PKG_VERSION")),
        "args": ["--leader-elect", "--metrics-bind-address=:8080"],
        "env": [{
            "name": "NSTANCE_NAMESPACE",
            "valueFrom": { "fieldRef": { "fieldPath": "metadata.namespace" } },
        }],
        "ports": [
            { "name": "health", "containerPort": 8081 },
            { "name": "metrics", "containerPort": 8080 },
            { "name": "webhook", "containerPort": 9443 },
        ],
        "livenessProbe": probe("/healthz"),
        "readinessProbe": probe("/readyz"),
        "resources": {
            "requests": { "cpu": "20m", "memory": "32Mi" },
            "limits": { "memory": "128Mi" },
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
        // The directory, not the file: a file that is mounted by itself never changes.
        "volumeMounts": [{ "name": "config", "mountPath": "/etc/nstance/operator", "readOnly": true }],
    })
}

/// The operator writes its `caBundle`.
fn webhook_configuration(namespace: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": webhook::CONFIGURATION, "labels": labels() },
        "webhooks": [{
            "name": format!("nstancemachinepools.{GROUP}"),
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            // Nothing waits for the operator: what it would refuse also shows as a condition.
            "failurePolicy": "Ignore",
            "timeoutSeconds": 5,
            "rules": [{
                "apiGroups": [GROUP],
                "apiVersions": [VERSION],
                "operations": ["CREATE", "UPDATE", "DELETE"],
                "resources": ["nstancemachinepools"],
                "scope": "Namespaced",
            }],
            "clientConfig": {
                "service": { "name": webhook::SERVICE, "namespace": namespace, "path": webhook::PATH, "port": 443 },
            },
        }],
    })
}
