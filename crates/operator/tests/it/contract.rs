//! What Cluster API, clusterctl, cluster-autoscaler and kubectl read of our kinds.

use std::collections::BTreeMap;

use kube::core::cel::{compile_schema, estimate_rule_cost};
use nstance_operator::api::{
    NstanceCluster, NstanceMachine, NstanceMachinePool, NstanceMachineTemplate,
    cluster::{FailureDomain, Initialization, NstanceClusterStatus},
    machine::{Address, NstanceMachineStatus},
    manifests,
    pool::{NodeInfo, NstanceMachinePoolStatus},
};
use serde_json::{Value, json};

fn crds() -> BTreeMap<String, Value> {
    let crds = manifests::crds().unwrap();
    crds.into_iter().map(|it| (it["spec"]["names"]["kind"].as_str().unwrap().to_owned(), it)).collect()
}

fn schema(crd: &Value) -> &Value {
    &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
}

/// A part of a schema, by the path of a field: `spec.shards[].name`, `{}` for the values of a map.
fn part<'a>(schema: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(schema, |schema, step| {
        let name = step.trim_end_matches("[]").trim_end_matches("{}");
        let field = &schema["properties"][name];
        match step {
            _ if step.ends_with("[]") => &field["items"],
            _ if step.ends_with("{}") => &field["additionalProperties"],
            _ => field,
        }
    })
}

/// Calls `look` with every part of a schema and its path.
fn walk(schema: &Value, path: &str, look: &mut dyn FnMut(&str, &Value)) {
    look(path, schema);
    for (name, below) in schema["properties"].as_object().into_iter().flatten() {
        walk(below, &format!("{path}.{name}"), look);
    }
    if schema["items"].is_object() {
        walk(&schema["items"], &format!("{path}[]"), look);
    }
    if schema["additionalProperties"].is_object() {
        walk(&schema["additionalProperties"], &format!("{path}{{}}"), look);
    }
}

#[test]
fn kinds_are_named_as_references_find_them() {
    let short = BTreeMap::from([
        ("NstanceCluster", "ncl"),
        ("NstanceMachine", "nm"),
        ("NstanceMachinePool", "nmp"),
        ("NstanceMachineTemplate", "nmt"),
        ("NstanceShardGroup", "nsg"),
    ]);
    let crds = crds();
    assert_eq!(crds.keys().collect::<Vec<_>>(), short.keys().collect::<Vec<_>>());
    for (kind, crd) in &crds {
        // cluster-autoscaler makes the resource from a reference's kind in this way.
        let plural = format!("{}s", kind.to_lowercase());
        assert_eq!(crd["spec"]["names"]["plural"], plural);
        assert_eq!(crd["metadata"]["name"], format!("{plural}.infrastructure.cluster.x-k8s.io"));
        assert_eq!(crd["spec"]["names"]["singular"], kind.to_lowercase());
        assert_eq!(crd["spec"]["names"]["shortNames"], json!([short[kind.as_str()]]));
        assert_eq!(crd["spec"]["names"]["categories"], json!(["cluster-api"]));
        assert_eq!(crd["spec"]["group"], "infrastructure.cluster.x-k8s.io");
        assert_eq!(crd["spec"]["scope"], "Namespaced");
        let versions = crd["spec"]["versions"].as_array().unwrap();
        assert_eq!(versions.len(), 1);
        assert_eq!((&versions[0]["name"], &versions[0]["served"]), (&json!("v1beta1"), &json!(true)));
        assert_eq!(versions[0]["storage"], true);
        // Replicas belong to the MachinePool: none of our kinds has the subresource `scale`.
        assert_eq!(versions[0]["subresources"], json!({ "status": {} }), "{kind}");
    }
}

#[test]
fn labels_name_the_contract_and_let_clusterctl_move_the_objects() {
    for (kind, crd) in crds() {
        assert_eq!(
            crd["metadata"]["labels"],
            json!({
                "cluster.x-k8s.io/v1beta2": "v1beta1",
                "cluster.x-k8s.io/provider": "infrastructure-nstance",
                "clusterctl.cluster.x-k8s.io": "",
            }),
            "{kind}"
        );
    }
}

#[test]
fn schemas_are_structural_and_nothing_is_ever_null() {
    for (kind, crd) in crds() {
        walk(schema(&crd), &kind, &mut |path, schema| {
            assert!(schema["type"].is_string(), "{path} has no type: {schema}");
            for word in ["nullable", "anyOf", "oneOf", "allOf", "not", "$ref", "title", "propertyNames"] {
                assert!(schema.get(word).is_none(), "{path} has {word}");
            }
            let is_map = schema.get("additionalProperties").is_some();
            assert!(!is_map || schema.get("properties").is_none(), "{path} is both a map and an object");
            if schema["enum"].is_array() {
                assert!(schema["enum"].as_array().unwrap().iter().all(Value::is_string), "{path}");
            }
        });
    }
}

#[test]
fn every_list_says_how_it_is_merged() {
    let mut found = BTreeMap::new();
    for (kind, crd) in crds() {
        walk(schema(&crd), &kind, &mut |path, schema| {
            if schema["type"] != "array" {
                return;
            }
            let how = schema["x-kubernetes-list-type"].as_str().unwrap_or("nothing");
            let keys = &schema["x-kubernetes-list-map-keys"];
            if how == "map" {
                let key = keys[0].as_str().unwrap();
                assert!(schema["items"]["required"].as_array().unwrap().contains(&json!(key)), "{path}: {key}");
            }
            let key = keys[0].as_str().map(|it| format!(" by {it}")).unwrap_or_default();
            let limit = &schema["maxItems"];
            assert!(limit.is_number(), "{path} has no limit");
            found.insert(path.to_owned(), format!("{how}{key}, {limit}"));
        });
    }
    let expected = [
        ("NstanceCluster.status.conditions", "map by type, 32"),
        ("NstanceCluster.status.failureDomains", "map by name, 100"),
        ("NstanceCluster.status.shards", "map by name, 100"),
        ("NstanceMachine.status.addresses", "atomic, 256"),
        ("NstanceMachine.status.conditions", "map by type, 32"),
        ("NstanceMachine.status.drain.blockedBy", "atomic, 16"),
        ("NstanceMachinePool.spec.autoscaler.taints", "atomic, 64"),
        ("NstanceMachinePool.spec.providerIDList", "atomic, 10000"),
        ("NstanceMachinePool.spec.shards", "atomic, 64"),
        ("NstanceMachinePool.status.conditions", "map by type, 32"),
        ("NstanceMachinePool.status.shards", "map by name, 64"),
        ("NstanceShardGroup.spec.removeFirst", "atomic, 1000"),
        ("NstanceShardGroup.status.conditions", "map by type, 32"),
        ("NstanceShardGroup.status.providerIDs", "atomic, 10000"),
    ];
    let expected: BTreeMap<String, String> =
        expected.into_iter().map(|(path, how)| (path.to_owned(), how.to_owned())).collect();
    assert_eq!(found, expected);
}

#[test]
fn only_what_a_person_must_say_is_required() {
    let crds = crds();
    for (kind, path, fields) in [
        ("NstanceCluster", "", json!(["spec"])),
        ("NstanceMachinePool", "", json!(["spec"])),
        ("NstanceMachinePool", "spec", json!(["group", "shards"])),
        ("NstanceShardGroup", "spec", json!(["group", "shard"])),
        ("NstanceMachine", "spec", json!(["group"])),
        ("NstanceMachineTemplate", "spec", json!(["template"])),
        ("NstanceMachineTemplate", "spec.template", json!(["spec"])),
        ("NstanceMachineTemplate", "spec.template.spec", json!(["group"])),
    ] {
        let schema = schema(&crds[kind]);
        let schema = if path.is_empty() { schema } else { part(schema, path) };
        assert_eq!(schema["required"], fields, "{kind} {path}");
    }
    for (kind, path) in [
        ("NstanceCluster", "spec"),
        ("NstanceCluster", "status"),
        ("NstanceMachinePool", "spec.autoscaler"),
        ("NstanceMachinePool", "status"),
        ("NstanceShardGroup", "status"),
        ("NstanceMachine", "status"),
    ] {
        assert!(part(schema(&crds[kind]), path).get("required").is_none(), "{kind} {path}");
    }
}

#[test]
fn fields_have_the_limits_that_shards_have() {
    let crds = crds();
    let identifier =
        json!({ "type": "string", "minLength": 1, "maxLength": 32, "pattern": "^[a-z0-9]+(-[a-z0-9]+)*$" });
    let vars = json!({
        "type": "object", "maxProperties": 256,
        "additionalProperties": { "type": "string", "maxLength": 32768 },
    });
    let instance_type = json!({ "type": "string", "minLength": 1, "maxLength": 64 });
    let provider_id = json!({ "type": "string", "minLength": 1, "maxLength": 512 });
    for (kind, path, expected) in [
        ("NstanceMachinePool", "spec.group", &identifier),
        ("NstanceMachinePool", "spec.shards[]", &identifier),
        ("NstanceMachinePool", "spec.subnetPool", &identifier),
        ("NstanceMachinePool", "spec.instanceType", &instance_type),
        ("NstanceMachinePool", "spec.vars", &vars),
        ("NstanceMachinePool", "spec.providerIDList[]", &provider_id),
        ("NstanceShardGroup", "spec.group", &identifier),
        ("NstanceShardGroup", "spec.shard", &identifier),
        ("NstanceShardGroup", "spec.vars", &vars),
        ("NstanceMachine", "spec.group", &identifier),
        ("NstanceMachine", "spec.shard", &identifier),
        ("NstanceMachine", "spec.subnetPool", &identifier),
        ("NstanceMachine", "spec.instanceType", &instance_type),
        ("NstanceMachine", "spec.vars", &vars),
        ("NstanceMachine", "spec.providerID", &provider_id),
        ("NstanceMachineTemplate", "spec.template.spec.group", &identifier),
        ("NstanceMachineTemplate", "spec.template.spec.vars", &vars),
    ] {
        let schema = part(schema(&crds[kind]), path);
        for (word, value) in expected.as_object().unwrap() {
            assert_eq!(schema[word], *value, "{kind} {path}: {word}");
        }
    }
    let pool = schema(&crds["NstanceMachinePool"]);
    assert_eq!(part(pool, "spec.shards")["minItems"], 1);
    assert_eq!(part(pool, "spec.deletionPolicy")["enum"], json!(["Delete", "Orphan"]));
    assert_eq!(part(pool, "spec.deletionPolicy")["default"], "Delete");
    assert_eq!(part(schema(&crds["NstanceShardGroup"]), "spec.size")["minimum"], 0);
    assert_eq!(part(schema(&crds["NstanceShardGroup"]), "spec.size")["default"], 0);
    let endpoint = part(schema(&crds["NstanceCluster"]), "spec.controlPlaneEndpoint");
    assert_eq!((&part(endpoint, "host")["minLength"], &part(endpoint, "host")["maxLength"]), (&json!(1), &json!(512)));
    assert_eq!((&part(endpoint, "port")["minimum"], &part(endpoint, "port")["maximum"]), (&json!(1), &json!(65535)));
    assert_eq!(
        part(schema(&crds["NstanceMachine"]), "status.phase")["enum"],
        json!(["Pending", "Provisioning", "Booting", "Running", "Draining", "Deleting", "Deleted", "Failed"])
    );
}

/// Without limits an API server takes a rule for too expensive and refuses the CRD.
#[test]
fn rules_look_at_nothing_without_a_limit() {
    let mut n_rules = 0;
    for (kind, crd) in crds() {
        walk(schema(&crd), &kind, &mut |path, schema| {
            for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
                n_rules += 1;
                assert!(rule["message"].is_string(), "{path}: {rule}");
                let rule = rule["rule"].as_str().unwrap();
                let warnings = estimate_rule_cost(rule, &compile_schema(schema));
                assert!(warnings.is_empty(), "{path}: {warnings:?}");
                assert!(!path.contains('[') && !path.contains('{'), "{path} is evaluated more than once");
            }
        });
    }
    assert_eq!(n_rules, 20);
}

#[test]
fn kubectl_get_shows_these_columns() {
    let crds = crds();
    let columns = |kind: &str, wide: bool| -> Vec<(String, String)> {
        crds[kind]["spec"]["versions"][0]["additionalPrinterColumns"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|it| (it["priority"].as_i64().unwrap_or(0) == 1) == wide)
            .map(|it| (it["name"].as_str().unwrap().to_owned(), it["jsonPath"].as_str().unwrap().to_owned()))
            .collect()
    };
    let named = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
        pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    };
    let cluster = ("Cluster", r".metadata.labels['cluster\.x-k8s\.io/cluster-name']");
    let ready = ("Ready", r#".status.conditions[?(@.type=="Ready")].status"#);
    let age = ("Age", ".metadata.creationTimestamp");
    assert_eq!(columns("NstanceCluster", false), named(&[cluster, ready, ("Shards", ".status.reachableShards"), age]));
    assert_eq!(
        columns("NstanceMachinePool", false),
        named(&[
            cluster,
            ("Group", ".spec.group"),
            ("Desired", ".status.desired"),
            ("Current", ".status.replicas"),
            ready,
            ("Static", ".status.isStatic"),
            age,
        ])
    );
    assert_eq!(
        columns("NstanceMachinePool", true),
        named(&[
            ("Shards", ".spec.shards"),
            ("Template", ".spec.template"),
            ("Type", ".spec.instanceType"),
            ("Paused", r#".status.conditions[?(@.type=="Paused")].status"#),
        ])
    );
    assert_eq!(
        columns("NstanceShardGroup", false),
        named(&[
            ("Group", ".spec.group"),
            ("Shard", ".spec.shard"),
            ("Size", ".spec.size"),
            ("Current", ".status.replicas"),
            ("Static", ".status.isStatic"),
            ready,
            age,
        ])
    );
    assert_eq!(
        columns("NstanceMachine", false),
        named(&[
            cluster,
            ("Group", ".spec.group"),
            ("Shard", ".spec.shard"),
            ("Type", ".status.instanceType"),
            ("Phase", ".status.phase"),
            ("Node", ".status.nodeName"),
            ready,
            ("Blocked", ".status.drain.blockedBy[0]"),
            age,
        ])
    );
    assert_eq!(
        columns("NstanceMachine", true),
        named(&[("ProviderID", ".spec.providerID"), ("InstanceID", ".spec.instanceID"), ("Spot", ".status.spot")])
    );
    assert_eq!(
        columns("NstanceMachineTemplate", false),
        named(&[("Group", ".spec.template.spec.group"), ("Type", ".spec.template.spec.instanceType"), age])
    );
    for (kind, crd) in &crds {
        for column in crd["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap() {
            let path = column["jsonPath"].as_str().unwrap();
            if path.contains('\'') || path.contains('?') || path == ".metadata.creationTimestamp" {
                continue;
            }
            let there = part(schema(crd), path.trim_start_matches('.').replace("[0]", "").as_str());
            assert!(there.is_object(), "{kind} has no field for the column {column}");
        }
    }
}

#[test]
fn cluster_api_finds_what_it_reads_of_a_pool() {
    let pool = NstanceMachinePool {
        spec: nstance_operator::api::pool::NstanceMachinePoolSpec {
            provider_id_list: vec!["aws:///eu-west-1a/i-1".to_owned()],
            ..Default::default()
        },
        status: Some(NstanceMachinePoolStatus {
            initialization: Initialization::done(),
            ready: Some(true),
            replicas: Some(1),
            infrastructure_machine_kind: Some("NstanceMachine".to_owned()),
            ..Default::default()
        }),
        ..Default::default()
    };
    let written = serde_json::to_value(pool).unwrap();
    assert_eq!(written["spec"]["providerIDList"], json!(["aws:///eu-west-1a/i-1"]));
    assert_eq!(
        written["status"],
        json!({
            "initialization": { "provisioned": true },
            "ready": true,
            "replicas": 1,
            "infrastructureMachineKind": "NstanceMachine",
        })
    );
    let crds = crds();
    let schema = schema(&crds["NstanceMachinePool"]);
    for (path, kind) in [
        ("spec.providerIDList", "array"),
        ("spec.providerIDList[]", "string"),
        ("status.initialization.provisioned", "boolean"),
        ("status.ready", "boolean"),
        ("status.replicas", "integer"),
        ("status.infrastructureMachineKind", "string"),
    ] {
        assert_eq!(part(schema, path)["type"], kind, "{path}");
    }
}

#[test]
fn cluster_api_finds_what_it_reads_of_a_machine_and_of_a_cluster() {
    let machine = NstanceMachine {
        spec: nstance_operator::api::machine::NstanceMachineSpec {
            provider_id: Some("aws:///eu-west-1a/i-1".to_owned()),
            ..Default::default()
        },
        status: Some(NstanceMachineStatus {
            initialization: Initialization::done(),
            failure_domain: Some("dev-1".to_owned()),
            addresses: vec![Address { kind: "InternalIP".to_owned(), address: "192.0.2.10".to_owned() }],
            ..Default::default()
        }),
        ..Default::default()
    };
    let written = serde_json::to_value(machine).unwrap();
    assert_eq!(written["spec"]["providerID"], "aws:///eu-west-1a/i-1");
    // It would overwrite the Machine's.
    assert_eq!(written["spec"].get("failureDomain"), None);
    assert_eq!(
        written["status"],
        json!({
            "initialization": { "provisioned": true },
            "failureDomain": "dev-1",
            "addresses": [{ "type": "InternalIP", "address": "192.0.2.10" }],
        })
    );
    let cluster = NstanceCluster {
        status: Some(NstanceClusterStatus {
            initialization: Initialization::done(),
            failure_domains: vec![FailureDomain { name: "dev-1".to_owned(), ..Default::default() }],
            ..Default::default()
        }),
        ..Default::default()
    };
    let written = serde_json::to_value(cluster).unwrap();
    assert_eq!(
        written["status"],
        json!({
            "initialization": { "provisioned": true },
            "failureDomains": [{ "name": "dev-1", "controlPlane": false }],
        })
    );
    let crds = crds();
    for (kind, path, type_) in [
        ("NstanceMachine", "spec.providerID", "string"),
        ("NstanceMachine", "status.initialization.provisioned", "boolean"),
        ("NstanceMachine", "status.failureDomain", "string"),
        ("NstanceMachine", "status.addresses[].type", "string"),
        ("NstanceCluster", "spec.controlPlaneEndpoint.port", "integer"),
        ("NstanceCluster", "status.initialization.provisioned", "boolean"),
        ("NstanceCluster", "status.failureDomains[].controlPlane", "boolean"),
        ("NstanceCluster", "status.failureDomains[].attributes{}", "string"),
    ] {
        assert_eq!(part(schema(&crds[kind]), path)["type"], type_, "{kind} {path}");
    }
    let machine = schema(&crds["NstanceMachine"]);
    assert!(part(machine, "spec").get("properties").unwrap().get("failureDomain").is_none());
}

#[test]
fn cluster_autoscaler_finds_capacity_as_strings_and_both_parts_of_the_node_info() {
    let amounts = BTreeMap::from([("cpu".to_owned(), "2".to_owned()), ("memory".to_owned(), "4Gi".to_owned())]);
    let node_info =
        Some(NodeInfo { architecture: Some("arm64".to_owned()), operating_system: Some("linux".to_owned()) });
    let pool = NstanceMachinePool {
        status: Some(NstanceMachinePoolStatus {
            capacity: amounts.clone(),
            node_info: node_info.clone(),
            ..Default::default()
        }),
        ..Default::default()
    };
    let template = NstanceMachineTemplate {
        status: Some(nstance_operator::api::template::NstanceMachineTemplateStatus { capacity: amounts, node_info }),
        ..Default::default()
    };
    for written in [serde_json::to_value(pool).unwrap(), serde_json::to_value(template).unwrap()] {
        assert_eq!(
            written["status"],
            json!({
                "capacity": { "cpu": "2", "memory": "4Gi" },
                "nodeInfo": { "architecture": "arm64", "operatingSystem": "linux" },
            })
        );
    }
    let crds = crds();
    for kind in ["NstanceMachinePool", "NstanceMachineTemplate"] {
        let schema = schema(&crds[kind]);
        // One number among the values would void the map.
        assert_eq!(part(schema, "status.capacity{}")["type"], "string", "{kind}");
        assert_eq!(
            part(schema, "status.nodeInfo.architecture")["enum"],
            json!(["amd64", "arm64", "s390x", "ppc64le"]),
            "{kind}"
        );
        assert_eq!(part(schema, "status.nodeInfo.operatingSystem")["type"], "string", "{kind}");
    }
}
