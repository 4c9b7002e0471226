//! NstanceMachinePool: a group of instances that a MachinePool refers to.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::cluster::Initialization;

#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "infrastructure.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "NstanceMachinePool",
    plural = "nstancemachinepools",
    shortname = "nmp",
    category = "cluster-api",
    namespaced,
    status = "NstanceMachinePoolStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A group of instances on one or more shards. A MachinePool refers to it and has its number of replicas.",
    validation = Rule::new("size(self.metadata.name) <= 63").message("metadata.name must have at most 63 characters"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.isStatic) || !oldSelf.status.isStatic || (has(self.spec.template) == has(oldSelf.spec.template) && (!has(self.spec.template) || self.spec.template == oldSelf.spec.template))").message("spec.template cannot change: the group is defined in the server config; edit the server config instead"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.isStatic) || !oldSelf.status.isStatic || (has(self.spec.subnetPool) == has(oldSelf.spec.subnetPool) && (!has(self.spec.subnetPool) || self.spec.subnetPool == oldSelf.spec.subnetPool))").message("spec.subnetPool cannot change: the group is defined in the server config; edit the server config instead"),
    validation = Rule::new("!has(oldSelf.status) || !has(oldSelf.status.isStatic) || !oldSelf.status.isStatic || self.spec.shards == oldSelf.spec.shards").message("spec.shards cannot change: the group is defined in the server config; edit the server config instead"),
    printcolumn(name = "Cluster", type_ = "string", json_path = ".metadata.labels['cluster\\.x-k8s\\.io/cluster-name']"),
    printcolumn(name = "Group", type_ = "string", json_path = ".spec.group"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desired"),
    printcolumn(name = "Current", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Static", type_ = "boolean", json_path = ".status.isStatic"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Shards", type_ = "string", json_path = ".spec.shards", priority = 1),
    printcolumn(name = "Template", type_ = "string", json_path = ".spec.template", priority = 1),
    printcolumn(name = "Type", type_ = "string", json_path = ".spec.instanceType", priority = 1),
    printcolumn(name = "Paused", type_ = "string", json_path = ".status.conditions[?(@.type==\"Paused\")].status", priority = 1)
)]
#[serde(rename_all = "camelCase")]
pub struct NstanceMachinePoolSpec {
    /// The group on the shards.
    #[schemars(schema_with = "super::schema::identifier")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.group is immutable"))]
    pub group: String,
    /// In this order replicas are distributed.
    #[schemars(schema_with = "super::schema::identifiers")]
    #[x_kube(validation = Rule::new("self.all(a, self.exists_one(b, a == b))").message("spec.shards must not name a shard twice"))]
    pub shards: Vec<String>,
    /// The server's template of a group that is not in its config. Required for a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::template_name")]
    pub template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::instance_type")]
    pub instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::identifier")]
    pub subnet_pool: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "super::schema::vars")]
    pub vars: BTreeMap<String, String>,
    /// Written by the operator: the provider ids of all instances, by which Cluster API finds their Nodes.
    #[serde(default, rename = "providerIDList", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::provider_ids")]
    pub provider_id_list: Vec<String>,
    /// What becomes of the instances when the pool is deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = "Delete"))]
    pub deletion_policy: Option<DeletionPolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscaler: Option<Autoscaler>,
    /// Overrides `status.capacity`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "super::schema::capacity")]
    pub capacity: BTreeMap<String, String>,
    /// Overrides `status.nodeInfo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_info: Option<NodeInfo>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeletionPolicy {
    #[default]
    Delete,
    Orphan,
}

/// Written as the annotations that cluster-autoscaler reads.
#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("spec.autoscaler.min must not be above spec.autoscaler.max"))]
pub struct Autoscaler {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub min: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub max: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_pods: Option<i32>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "super::schema::node_labels")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub taints: Vec<Taint>,
    /// A Go duration, as `15m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::duration")]
    pub max_node_provision_time: Option<String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63))]
    pub value: String,
    #[schemars(schema_with = "super::schema::taint_effect")]
    pub effect: String,
}

/// Both parts are always set: a missing one becomes an empty label in cluster-autoscaler.
#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeInfo {
    /// `amd64`, `arm64`, `s390x` or `ppc64le`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::architecture")]
    pub architecture: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub operating_system: Option<String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NstanceMachinePoolStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The generation of the MachinePool that was looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_owner_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initialization: Option<Initialization>,
    /// What Cluster API reads of pools. True once any shard accepted the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub desired: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_static: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infrastructure_machine_kind: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_info: Option<NodeInfo>,
    /// What the shards use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<EffectiveConfig>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub shards: Vec<PoolShard>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::conditions")]
    pub conditions: Vec<Condition>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EffectiveConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subnet_pool: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub vars: BTreeMap<String, String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PoolShard {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<i32>,
}
