//! NstanceMachineTemplate: what MachineSets and MachineDeployments make NstanceMachines from.

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::pool::NodeInfo;

#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "infrastructure.cluster.x-k8s.io",
    version = "v1beta1",
    kind = "NstanceMachineTemplate",
    plural = "nstancemachinetemplates",
    shortname = "nmt",
    category = "cluster-api",
    namespaced,
    status = "NstanceMachineTemplateStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "What NstanceMachines of a MachineSet are made from.",
    validation = Rule::new("size(self.metadata.name) <= 63").message("metadata.name must have at most 63 characters"),
    printcolumn(name = "Group", type_ = "string", json_path = ".spec.template.spec.group"),
    printcolumn(name = "Type", type_ = "string", json_path = ".spec.template.spec.instanceType"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct NstanceMachineTemplateSpec {
    pub template: MachineTemplate,
}

#[derive(KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct MachineTemplate {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<TemplateMetadata>,
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.template.spec is immutable; make a new template instead"))]
    pub spec: TemplateMachineSpec,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
pub struct TemplateMetadata {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TemplateMachineSpec {
    #[schemars(schema_with = "super::schema::identifier")]
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
}

#[derive(JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct NstanceMachineTemplateStatus {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_info: Option<NodeInfo>,
}
