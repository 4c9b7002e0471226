//! Parts of schemas that several kinds share: what an API server checks of a field by itself.
//!
//! Every string and list that a validation rule looks at has a limit, because an API server refuses a CRD whose rules could
//! become expensive.

use schemars::{Schema, SchemaGenerator, json_schema};

/// Most conditions of one object; far more than there are kinds of them.
const MAX_CONDITIONS: u32 = 32;

/// Of a cluster, shard, tenant, group or subnet pool.
const IDENTIFIER: &str = "^[a-z0-9]+(-[a-z0-9]+)*$";

/// Of a template in a shard's config.
const TEMPLATE_NAME: &str = "^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$";

/// A Kubernetes quantity without sign.
const QUANTITY: &str =
    r"^(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// A duration as Go writes it, not negative.
const DURATION: &str = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$";

pub(crate) fn identifier(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 32, "pattern": IDENTIFIER })
}

/// An ordered list of shards.
pub(crate) fn identifiers(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": identifier(generator),
        "minItems": 1,
        "maxItems": 64,
        "x-kubernetes-list-type": "atomic",
    })
}

pub(crate) fn template_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 32, "pattern": TEMPLATE_NAME })
}

pub(crate) fn instance_type(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 64 })
}

pub(crate) fn instance_id(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 64 })
}

pub(crate) fn provider_id(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 1, "maxLength": 512 })
}

pub(crate) fn provider_ids(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": provider_id(generator),
        "maxItems": 10_000,
        "x-kubernetes-list-type": "atomic",
    })
}

/// Instances that go first when a group shrinks; a shard takes no more of them in one request.
pub(crate) fn instance_ids(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": instance_id(generator),
        "maxItems": 1000,
        "x-kubernetes-list-type": "atomic",
    })
}

/// Variables of a group. A schema can neither limit names nor add up lengths: those the shard checks (names are words of
/// letters, digits and `_`; 32 KiB in total).
pub(crate) fn vars(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 256,
        "additionalProperties": { "type": "string", "maxLength": 32_768 },
    })
}

/// Amounts by resource that a person wrote, all strings: one number among them voids the map in cluster-autoscaler.
pub(crate) fn capacity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": { "type": "string", "maxLength": 64, "pattern": QUANTITY },
    })
}

/// Labels of Nodes.
pub(crate) fn node_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 256,
        "additionalProperties": { "type": "string", "maxLength": 63 },
    })
}

pub(crate) fn duration(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "minLength": 2, "maxLength": 32, "pattern": DURATION })
}

/// The architectures that Cluster API knows.
pub(crate) fn architecture(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["amd64", "arm64", "s390x", "ppc64le"] })
}

pub(crate) fn taint_effect(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"] })
}

/// The kinds of addresses that Cluster API copies to the Machine.
pub(crate) fn address_kind(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "enum": ["Hostname", "ExternalIP", "InternalIP", "ExternalDNS", "InternalDNS"],
    })
}

/// Conditions as Kubernetes defines them, with the limits that it documents.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MAX_CONDITIONS,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "type": {
                    "type": "string",
                    "maxLength": 316,
                    "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                "reason": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": { "type": "string", "maxLength": 32_768 },
                "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
                "lastTransitionTime": {
                    "type": "string",
                    "format": "date-time",
                    "description": "When the status last changed.",
                },
            },
        },
    })
}
