//! NstanceMachine: one instance, either a member of a pool or asked for by itself.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cluster::Initialization;

#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "infrastructure.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "NstanceMachine",
    plural = "nstancemachines",
    shortname = "nm",
    category = "cluster-api",
    namespaced,
    status = "NstanceMachineStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "One instance, as the infrastructure of a Cluster API Machine.",
    validation = Rule::new("size(self.metadata.name) <= 63").message("metadata.name must have at most 63 characters"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']"),
    printcolumn(name = "Group", type_ = "string", json_path = ".spec.group"),
    printcolumn(name = "Shard", type_ = "string", json_path = ".spec.shard"),
    printcolumn(name = "Type", type_ = "string", json_path = ".status.instanceType"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.nodeName"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Blocked", type_ = "string", json_path = ".status.drain.blockedBy[0]"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "ProviderID", type_ = "string", json_path = ".spec.providerID", priority = 1),
    printcolumn(name = "InstanceID", type_ = "string", json_path = ".spec.instanceID", priority = 1),
    printcolumn(name = "Spot", type_ = "boolean", json_path = ".status.spot", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.instanceType) == has(oldSelf.instanceType) && (!has(self.instanceType) || self.instanceType == oldSelf.instanceType)").message("spec.instanceType is immutable"),
    validation = Rule::new("has(self.subnetPool) == has(oldSelf.subnetPool) && (!has(self.subnetPool) || self.subnetPool == oldSelf.subnetPool)").message("spec.subnetPool is immutable"),
    validation = Rule::new("has(self.vars) == has(oldSelf.vars) && (!has(self.vars) || self.vars == oldSelf.vars)").message("spec.vars is immutable"),
    validation = Rule::new("!has(oldSelf.shard) || (has(self.shard) && self.shard == oldSelf.shard)").message("spec.shard is immutable once set"),
    validation = Rule::new("!has(oldSelf.instanceID) || (has(self.instanceID) && self.instanceID == oldSelf.instanceID)").message("spec.instanceID is immutable once set")
)]
pub struct NstanceMachineSpec {
    #[schemars(schema_with = "super::schema::identifier")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.group is immutable"))]
    pub group: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::instance_type")]
    pub instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::identifier")]
    pub subnet_pool: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "super::schema::vars")]
    pub vars: BTreeMap<String, String>,
    /// Chosen by the operator if it is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::identifier")]
    pub shard: Option<String>,
    /// Set by the operator.
    #[serde(default, rename = "instanceID", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::instance_id")]
    pub instance_id: Option<String>,
    /// Set by the operator.
    #[serde(default, rename = "providerID", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::provider_id")]
    pub provider_id: Option<String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NstanceMachineStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initialization: Option<Initialization>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub addresses: Vec<Address>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spot: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interruptible: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainStatus>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::conditions")]
    pub conditions: Vec<Condition>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Pending,
    Provisioning,
    Booting,
    Running,
    Draining,
    Deleting,
    Deleted,
    Failed,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
pub struct Address {
    /// As Cluster API names it: `InternalIP`, `Hostname` and so on.
    #[serde(rename = "type")]
    #[schemars(schema_with = "super::schema::address_kind")]
    pub kind: String,
    #[schemars(length(min = 1, max = 256))]
    pub address: String,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct BootStatus {
    pub stage: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DrainStatus {
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Time>,
    /// Pods that are still there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remaining: Option<i32>,
    /// The first few pods that could not be evicted, each with what holds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub blocked_by: Vec<String>,
}
