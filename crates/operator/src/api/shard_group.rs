//! NstanceShardGroup: a pool's part on one shard. Made by the operator; people only read it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pool::EffectiveConfig;

#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "infrastructure.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "NstanceShardGroup",
    plural = "nstanceshardgroups",
    shortname = "nsg",
    category = "cluster-api",
    namespaced,
    status = "NstanceShardGroupStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A pool's part on one shard. The operator makes and changes it.",
    validation = Rule::new("size(self.metadata.name) <= 63").message("metadata.name must have at most 63 characters"),
    printcolumn(name = "Group", type_ = "string", json_path = ".spec.group"),
    printcolumn(name = "Shard", type_ = "string", json_path = ".spec.shard"),
    printcolumn(name = "Size", type_ = "integer", json_path = ".spec.size"),
    printcolumn(name = "Current", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(name = "Static", type_ = "boolean", json_path = ".status.isStatic"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NstanceShardGroupSpec {
    #[schemars(schema_with = "super::schema::identifier")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.group is immutable"))]
    pub group: String,
    #[schemars(schema_with = "super::schema::identifier")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.shard is immutable"))]
    pub shard: String,
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub size: i32,
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
    /// Instances that go first when the group shrinks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::instance_ids")]
    pub remove_first: Vec<String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NstanceShardGroupStatus {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    #[serde(default, rename = "providerIDs", skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::provider_ids")]
    pub provider_ids: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_static: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<EffectiveConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_sync_time: Option<Time>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::conditions")]
    pub conditions: Vec<Condition>,
}
