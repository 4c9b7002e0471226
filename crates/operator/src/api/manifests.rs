//! The manifests below `config/`: CRDs from our types, roles, and what runs the operator. `make crds` writes them, and a test
//! keeps files and types equal.
//!
//! - `config/crd`: the CRDs, and the service account whose token Cluster API gets;
//! - `config/rbac`: what the operator and others may do;
//! - `config/default`: all of it and the operator itself, in a namespace of its own.

mod crd;

mod deploy;

mod rbac;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

pub use self::{crd::crds, deploy::objects as deployment, rbac::objects as rbac};

/// The first line of every file.
const HEADER: &str = "# Written by `make crds` from crates/operator/src/api; do not edit.\n";

/// By this label clusterctl finds what belongs to the provider.
const PROVIDER_LABEL: (&str, &str) = ("cluster.x-k8s.io/provider", "infrastructure-nstance");

/// Where `config/crd` and `config/rbac` put objects that need a namespace; the guide's steps use it too.
const PLAIN_NAMESPACE: &str = "default";

/// Where `config/default` puts everything.
const OWN_NAMESPACE: &str = "nstance-system";

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("convert the CRD of {kind} to JSON")]
    Json {
        kind: String,
        #[source]
        source: serde_json::Error,
    },
    #[error("write {path} as YAML")]
    Yaml {
        path: String,
        #[source]
        source: serde_saphyr::SerializeError,
    },
}

/// All files, by path below `config/`.
pub fn files() -> Result<BTreeMap<String, String>, ManifestError> {
    let mut files = BTreeMap::new();

    let mut resources = Vec::new();
    for crd in crds()? {
        let path = format!("bases/{}.yaml", file_name_of_crd(&crd));
        add(&mut files, format!("crd/{path}"), &crd)?;
        resources.push(path);
    }
    resources.push("../rbac/capi-workload".to_owned());
    add(&mut files, "crd/kustomization.yaml".to_owned(), &kustomization(&resources, json!({})))?;

    let (for_cluster_api, others): (Vec<Value>, Vec<Value>) =
        rbac(PLAIN_NAMESPACE).into_iter().partition(|it| name_of(it) == rbac::CAPI_WORKLOAD);
    for (directory, objects) in [("rbac/capi-workload", for_cluster_api), ("rbac", others)] {
        let mut resources = Vec::new();
        for object in objects {
            let path = file_name_of(&object);
            add(&mut files, format!("{directory}/{path}"), &object)?;
            resources.push(path);
        }
        add(&mut files, format!("{directory}/kustomization.yaml"), &kustomization(&resources, json!({})))?;
    }

    let mut resources = vec!["../crd".to_owned(), "../rbac".to_owned()];
    for object in deployment(OWN_NAMESPACE) {
        let path = file_name_of(&object);
        add(&mut files, format!("default/{path}"), &object)?;
        resources.push(path);
    }
    let more = json!({
        "namespace": OWN_NAMESPACE,
        "configMapGenerator": [{
            "name": deploy::CONFIG_MAP,
            "files": ["config.yaml"],
            "options": { "disableNameSuffixHash": true, "labels": labels() },
        }],
    });
    add(&mut files, "default/kustomization.yaml".to_owned(), &kustomization(&resources, more))?;
    files.insert("default/config.yaml".to_owned(), deploy::EXAMPLE_CONFIG.to_owned());
    Ok(files)
}

fn kustomization(resources: &[String], more: Value) -> Value {
    let mut object = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    });
    if let (Some(object), Value::Object(more)) = (object.as_object_mut(), more) {
        object.extend(more);
    }
    object
}

fn add(files: &mut BTreeMap<String, String>, path: String, object: &Value) -> Result<(), ManifestError> {
    // No folded lines: what stands in a rule or a description is found by searching for it.
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    match serde_saphyr::to_string_with_options(&sorted(object), options) {
        Ok(text) => {
            files.insert(path, format!("{HEADER}{text}"));
            Ok(())
        }
        Err(source) => Err(ManifestError::Yaml { path, source }),
    }
}

/// The same with the keys of all objects in order, so that files do not depend on how a type is written down.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let ordered: BTreeMap<&String, &Value> = object.iter().collect();
            Value::Object(ordered.into_iter().map(|(key, value)| (key.clone(), sorted(value))).collect::<Map<_, _>>())
        }
        Value::Array(items) => Value::Array(items.iter().map(sorted).collect()),
        other => other.clone(),
    }
}

fn labels() -> Value {
    json!({ PROVIDER_LABEL.0: PROVIDER_LABEL.1 })
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// As `cluster-role-binding-nstance-operator.yaml`.
fn file_name_of(object: &Value) -> String {
    let mut kind = String::new();
    for letter in object["kind"].as_str().unwrap_or_default().chars() {
        if letter.is_ascii_uppercase() && !kind.is_empty() {
            kind.push('-');
        }
        kind.push(letter.to_ascii_lowercase());
    }
    format!("{kind}-{}.yaml", name_of(object))
}

/// As controller-gen names it: group and plural.
fn file_name_of_crd(crd: &Value) -> String {
    let part = |key: &Value| key.as_str().unwrap_or_default().to_owned();
    format!("{}_{}", part(&crd["spec"]["group"]), part(&crd["spec"]["names"]["plural"]))
}
