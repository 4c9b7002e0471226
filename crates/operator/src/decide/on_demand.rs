//! Pods that ask for an instance of their own by annotations.

use std::collections::BTreeMap;

use data_encoding::HEXLOWER;
use k8s_openapi::{api::core::v1::Node, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::pool::format_label_value;
use crate::api::{
    NstanceMachine,
    capi::Meta as _,
    names::{API_VERSION, CAPI_API_VERSION, GROUP, annotation, finalizer, label},
};

/// The variable by which a template knows for which pod an instance is.
pub const POD_UID_VAR: &str = "OnDemandPodUID";

/// A pod as the annotation of its Machine names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PodName {
    pub fn of(meta: &ObjectMeta) -> Option<Self> {
        Some(Self { namespace: meta.namespace.clone()?, name: meta.name.clone()?, uid: meta.uid.clone()? })
    }

    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '/').map(str::to_owned);
        Some(Self { namespace: parts.next()?, name: parts.next()?, uid: parts.next()? })
    }

    fn text(&self) -> String {
        format!("{}/{}/{}", self.namespace, self.name, self.uid)
    }

    /// The name of its Machine and NstanceMachine: always the same, so that asking twice makes one.
    pub fn machine_name(&self) -> String {
        let hash = HEXLOWER.encode(&Sha256::digest(self.uid.as_bytes()));
        format!("od-{}", &hash[..10])
    }
}

/// What a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRequest {
    pub pod: PodName,
    pub group: String,
    pub shard: Option<String>,
    pub instance_type: Option<String>,
    pub subnet_pool: Option<String>,
    pub vars: BTreeMap<String, String>,
}

/// Annotations that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("annotation {annotation}: {problem}")]
pub struct PodProblem {
    pub annotation: &'static str,
    pub problem: String,
}

/// What an unscheduled pod asks for; `None` if it asks for nothing, or is being deleted.
pub fn request(meta: &ObjectMeta, shards: &[String]) -> Result<Option<PodRequest>, PodProblem> {
    let value = |key: &str| meta.annotations.as_ref().and_then(|it| it.get(key)).cloned();
    let (Some(group), Some(pod), None) =
        (value(annotation::ON_DEMAND_GROUP), PodName::of(meta), &meta.deletion_timestamp)
    else {
        return Ok(None);
    };
    let shard = value(annotation::ON_DEMAND_SHARD);
    let instance_type = value(annotation::ON_DEMAND_INSTANCE_TYPE);
    let subnet_pool = value(annotation::ON_DEMAND_SUBNET_POOL);
    check_ident(annotation::ON_DEMAND_GROUP, Some(&group))?;
    check_ident(annotation::ON_DEMAND_SUBNET_POOL, subnet_pool.as_deref())?;
    if let Some(shard) = shard.as_ref().filter(|it| !shards.contains(it)) {
        let problem = format!("there is no shard {shard:?}; there are {}", shards.join(", "));
        return Err(PodProblem { annotation: annotation::ON_DEMAND_SHARD, problem });
    }
    if instance_type.as_ref().is_some_and(|it| it.is_empty() || 64 < it.len()) {
        let problem = "an instance type has 1 to 64 characters".to_owned();
        return Err(PodProblem { annotation: annotation::ON_DEMAND_INSTANCE_TYPE, problem });
    }
    let vars = value(annotation::ON_DEMAND_VARS).map(|it| vars(&it)).transpose()?.unwrap_or_default();
    Ok(Some(PodRequest { pod, group, shard, instance_type, subnet_pool, vars }))
}

fn check_ident(annotation: &'static str, value: Option<&str>) -> Result<(), PodProblem> {
    let Some(value) = value else { return Ok(()) };
    let is_part = |it: &str| !it.is_empty() && it.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit());
    if value.len() <= 32 && value.split('-').all(is_part) {
        return Ok(());
    }
    let problem = format!("{value:?} is not a name of 1 to 32 lower-case letters, digits and single dashes");
    Err(PodProblem { annotation, problem })
}

fn vars(text: &str) -> Result<BTreeMap<String, String>, PodProblem> {
    let problem = |problem: String| PodProblem { annotation: annotation::ON_DEMAND_VARS, problem };
    let parsed: Result<BTreeMap<String, Value>, _> = serde_json::from_str(text);
    let parsed = parsed.map_err(|error| problem(format!("not a JSON object: {error}")))?;
    let strings = parsed.into_iter().map(|(name, value)| match value {
        Value::String(value) => Ok((name, value)),
        other => Err(problem(format!("{name} is {other}, not a string; write \"{other}\""))),
    });
    strings.collect()
}

/// Where the objects for a pod are made.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    pub namespace: &'a str,
    pub cluster: &'a str,
    pub watch_filter: Option<&'a str>,
}

impl PodRequest {
    fn metadata(&self, place: &Place<'_>) -> Value {
        let mut labels = BTreeMap::from([(label::CLUSTER_NAME, format_label_value(place.cluster))]);
        if let Some(filter) = place.watch_filter {
            labels.insert(label::WATCH_FILTER, filter.to_owned());
        }
        json!({
            "name": self.pod.machine_name(),
            "namespace": place.namespace,
            "labels": labels,
            "annotations": {annotation::ON_DEMAND_POD: self.pod.text()},
        })
    }

    pub fn nstance_machine(&self, place: &Place<'_>) -> Value {
        let mut vars = self.vars.clone();
        vars.insert(POD_UID_VAR.to_owned(), self.pod.uid.clone());
        let mut body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceMachine",
            "metadata": self.metadata(place),
            "spec": {"group": self.group, "vars": vars},
        });
        body["metadata"]["finalizers"] = json!([finalizer::MACHINE]);
        for (name, value) in [("instanceType", &self.instance_type), ("subnetPool", &self.subnet_pool)] {
            if let Some(value) = value {
                body["spec"][name] = json!(value);
            }
        }
        body
    }

    pub fn machine(&self, place: &Place<'_>) -> Value {
        let mut body = json!({
            "apiVersion": CAPI_API_VERSION,
            "kind": "Machine",
            "metadata": self.metadata(place),
            "spec": {
                "clusterName": place.cluster,
                "bootstrap": {"dataSecretName": ""},
                "infrastructureRef": {
                    "apiGroup": GROUP,
                    "kind": "NstanceMachine",
                    "name": self.pod.machine_name(),
                },
            },
        });
        if let Some(shard) = &self.shard {
            body["spec"]["failureDomain"] = json!(shard);
        }
        body
    }
}

/// Why the instance of a pod is not needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unneeded {
    /// The pod is gone, or another one has its name.
    Gone,
    /// It succeeded or failed.
    Ended,
    /// It is bound to a Node that is not this instance's.
    BoundElsewhere,
}

impl Unneeded {
    /// What may still change at once, or be seen too early, is believed only after it held for a while.
    pub fn must_hold(self) -> bool {
        self != Self::Gone
    }
}

/// Whether a pod still needs its instance. `pod` as the API server has it now; `node` is the Node that it is bound to.
pub fn unneeded(
    wanted: &PodName,
    pod: Option<&Value>,
    object: Option<&NstanceMachine>,
    node: Option<&Node>,
) -> Option<Unneeded> {
    let Some(pod) = pod.filter(|it| it["metadata"]["uid"].as_str() == Some(&wanted.uid)) else {
        return Some(Unneeded::Gone);
    };
    if matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed")) {
        return Some(Unneeded::Ended);
    }
    let bound_to = pod["spec"]["nodeName"].as_str().filter(|it| !it.is_empty())?;
    let is_ours = object.is_some_and(|it| is_node_of(it, bound_to, node));
    (!is_ours).then_some(Unneeded::BoundElsewhere)
}

fn is_node_of(object: &NstanceMachine, name: &str, node: Option<&Node>) -> bool {
    let id = object.spec.instance_id.as_deref();
    let matched = object.status.as_ref().and_then(|it| it.node_name.as_deref());
    let labelled = node.and_then(|it| it.label(label::INSTANCE_ID));
    if labelled.is_some() {
        return labelled == id;
    }
    let provider_id = object.spec.provider_id.as_deref();
    let has_provider_id = node.and_then(|it| it.spec.as_ref()?.provider_id.as_deref()) == provider_id;
    matched == Some(name) || id == Some(name) || (provider_id.is_some() && has_provider_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(annotations: &[(&str, &str)]) -> ObjectMeta {
        ObjectMeta {
            namespace: Some("jobs".to_owned()),
            name: Some("build".to_owned()),
            uid: Some("5e2f".to_owned()),
            annotations: Some(
                annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            ),
            ..ObjectMeta::default()
        }
    }

    fn ask(annotations: &[(&str, &str)]) -> Result<Option<PodRequest>, PodProblem> {
        request(&meta(annotations), &["a".to_owned(), "b".to_owned()])
    }

    #[test]
    fn a_pod_without_the_annotation_asks_for_nothing() {
        assert_eq!(ask(&[]), Ok(None));
        assert_eq!(ask(&[(annotation::ON_DEMAND_VARS, "not even JSON")]), Ok(None));
    }

    #[test]
    fn annotations_become_a_machine_and_its_infrastructure() {
        let request = ask(&[
            (annotation::ON_DEMAND_GROUP, "test"),
            (annotation::ON_DEMAND_VARS, r#"{"NodeLabels": "job=demo"}"#),
            (annotation::ON_DEMAND_SHARD, "b"),
            (annotation::ON_DEMAND_INSTANCE_TYPE, "m7g.large"),
            (annotation::ON_DEMAND_SUBNET_POOL, "workers"),
        ]);
        let request = request.unwrap().unwrap();
        let place = Place { namespace: "default", cluster: "dev--default", watch_filter: None };
        let (infrastructure, machine) = (request.nstance_machine(&place), request.machine(&place));
        let name = machine["metadata"]["name"].as_str().unwrap();
        assert!(name.len() == 13 && name.starts_with("od-"), "{name}");
        assert_eq!(infrastructure["metadata"]["name"], name);
        assert_eq!(machine["spec"]["infrastructureRef"]["name"], name);
        assert_eq!(machine["spec"]["bootstrap"]["dataSecretName"], "");
        assert_eq!(machine["spec"]["failureDomain"], "b");
        assert_eq!(machine["metadata"]["annotations"][annotation::ON_DEMAND_POD], "jobs/build/5e2f");
        assert_eq!(
            infrastructure["spec"],
            json!({
                "group": "test", "instanceType": "m7g.large", "subnetPool": "workers",
                "vars": {"NodeLabels": "job=demo", "OnDemandPodUID": "5e2f"},
            })
        );
        let parsed = PodName::parse("jobs/build/5e2f").unwrap();
        assert_eq!((parsed.machine_name().as_str(), parsed), (name, request.pod));
        serde_json::from_value::<NstanceMachine>(infrastructure).unwrap();
        serde_json::from_value::<crate::api::capi::Machine>(machine).unwrap();
    }

    #[test]
    fn bad_annotations_are_named() {
        for (key, value, expected) in [
            (annotation::ON_DEMAND_GROUP, "Test", "lower-case"),
            (annotation::ON_DEMAND_GROUP, "", "lower-case"),
            (annotation::ON_DEMAND_GROUP, "a--b", "lower-case"),
            (annotation::ON_DEMAND_SHARD, "c", "there is no shard \"c\"; there are a, b"),
            (annotation::ON_DEMAND_INSTANCE_TYPE, "", "1 to 64"),
            (annotation::ON_DEMAND_SUBNET_POOL, "-", "lower-case"),
            (annotation::ON_DEMAND_VARS, "[]", "not a JSON object"),
            (annotation::ON_DEMAND_VARS, r#"{"A": 1}"#, "A is 1, not a string"),
        ] {
            let problem = ask(&[(annotation::ON_DEMAND_GROUP, "test"), (key, value)]).unwrap_err();
            assert!(problem.annotation == key && problem.to_string().contains(expected), "{problem}");
        }
    }

    #[test]
    fn an_instance_is_needed_until_its_pod_is_gone_done_or_elsewhere() {
        let wanted = PodName::of(&meta(&[])).unwrap();
        let pod = |uid: &str, phase: &str, node: &str| json!({"metadata": {"uid": uid}, "spec": {"nodeName": node}, "status": {"phase": phase}});
        let mut object = NstanceMachine::default();
        object.spec.instance_id = Some("i1".to_owned());
        object.spec.provider_id = Some("dev:///i1".to_owned());
        let of = |pod: Option<&Value>, node: Option<&Node>| unneeded(&wanted, pod, Some(&object), node);
        let node = |label: Option<&str>, provider_id: &str| -> Node {
            let labels = label.map(|it| json!({label::INSTANCE_ID: it}));
            serde_json::from_value(json!({
                "metadata": {"name": "n", "labels": labels}, "spec": {"providerID": provider_id},
            }))
            .unwrap()
        };
        assert_eq!(of(None, None), Some(Unneeded::Gone));
        assert_eq!(of(Some(&pod("other", "Running", "n")), None), Some(Unneeded::Gone));
        assert_eq!(of(Some(&pod("5e2f", "Pending", "")), None), None);
        assert_eq!(of(Some(&pod("5e2f", "Succeeded", "n")), None), Some(Unneeded::Ended));
        let running = pod("5e2f", "Running", "n");
        assert_eq!(of(Some(&running), None), Some(Unneeded::BoundElsewhere));
        assert_eq!(of(Some(&running), Some(&node(None, "dev:///i1"))), None);
        assert_eq!(of(Some(&running), Some(&node(Some("i1"), "other"))), None);
        assert_eq!(of(Some(&running), Some(&node(Some("i2"), "dev:///i1"))), Some(Unneeded::BoundElsewhere));
        assert_eq!(of(Some(&pod("5e2f", "Running", "i1")), None), None);
    }
}
