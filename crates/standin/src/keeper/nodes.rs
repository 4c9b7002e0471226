//! The kubelet's part for Nodes: create once, then Lease, conditions, version and labels as long as the agent lives.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use crate::{
    draft::Draft,
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::{Key, Object, Ownership, owner_reference},
    picture::Picture,
    times,
};

pub(crate) const LEASES: &str = "kube-node-lease";

/// What a kubelet of this age reports. It also becomes the version of Machines.
const KUBELET_VERSION: &str = "v1.36.3";

/// Seconds that a Lease is held for, as kubelets write it.
const LEASE_SECONDS: i64 = 40;

/// What the disk says of one node.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct NodeFacts {
    pub(crate) is_alive: bool,
    pub(crate) labels: BTreeMap<String, String>,
}

/// The four conditions of a kubelet: name, status, reason, message.
const CONDITIONS: [(&str, &str, &str, &str); 4] = [
    ("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    ("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    ("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    ("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
];

/// The Node that a node file describes, as a kubelet would register it: status comes by heartbeats.
pub(crate) fn registration(name: &str, file: &Value) -> Planned {
    let labels = file.pointer("/metadata/labels").cloned().unwrap_or_else(|| json!({}));
    let object = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name, "labels": labels },
        "spec": { "providerID": file.pointer("/spec/providerID").cloned().unwrap_or_default() },
    });
    Planned { target: target(Kind::Node, "", name), effect: Effect::Create { object } }
}

fn target(kind: Kind, namespace: &str, name: &str) -> Target {
    Target { via: Via::Own, kind, key: Key::new(namespace, name) }
}

/// Everything that a kubelet has to write now for one Node of ours.
pub(crate) fn heartbeat(
    picture: &Picture,
    node: &Arc<Object>,
    facts: &NodeFacts,
    file: Option<&Value>,
    period: Duration,
    now: Timestamp,
    planned: &mut Vec<Planned>,
) {
    if !facts.is_alive {
        return;
    }
    renew_lease(picture, node, period, now, planned);
    let mut draft = Draft::new(Via::Own, Kind::Node, node, now);
    if !node.is_deleting() {
        for (name, value) in &facts.labels {
            draft.label(name, value);
        }
    }
    if is_status_due(node, period, now) {
        set_status(&mut draft, file, now);
    }
    draft.finish(planned);
}

fn is_due(last: Option<Timestamp>, period: Duration, now: Timestamp) -> bool {
    last.is_none_or(|last| period <= now.since(last) || now < last)
}

fn renew_lease(picture: &Picture, node: &Object, period: Duration, now: Timestamp, planned: &mut Vec<Planned>) {
    let renew_time = times::micros(now);
    match picture.get(Kind::Lease, LEASES, node.name()) {
        None => {
            let object = json!({
                "apiVersion": Kind::Lease.api_version(),
                "kind": Kind::Lease.kind(),
                "metadata": {
                    "name": node.name(),
                    "namespace": LEASES,
                    "ownerReferences": [owner_reference(Kind::Node, node, Ownership::Plain)],
                },
                "spec": { "holderIdentity": node.name(), "leaseDurationSeconds": LEASE_SECONDS, "renewTime": renew_time },
            });
            planned
                .push(Planned { target: target(Kind::Lease, LEASES, node.name()), effect: Effect::Create { object } });
        }
        Some(lease) if is_due(lease.time("/spec/renewTime"), period, now) => {
            let mut draft = Draft::new(Via::Own, Kind::Lease, lease, now);
            draft.set("/spec/renewTime", renew_time);
            draft.finish(planned);
        }
        Some(_) => {}
    }
}

/// Seconds are all that a heartbeat is stored with, so half a second is taken off the period.
fn is_status_due(node: &Object, period: Duration, now: Timestamp) -> bool {
    let ready = node.condition("Ready").and_then(|it| it["lastHeartbeatTime"].as_str()?.parse().ok());
    let is_complete = CONDITIONS.iter().all(|(name, status, ..)| node.condition_status(name) == *status);
    let has_version = !node.text("/status/nodeInfo/kubeletVersion").is_empty();
    !is_complete || !has_version || is_due(ready, period.saturating_sub(Duration::from_millis(500)), now)
}

fn set_status(draft: &mut Draft, file: Option<&Value>, now: Timestamp) {
    let now = times::seconds(now);
    let mut conditions = draft.at("/status/conditions").as_array().cloned().unwrap_or_default();
    for (name, status, reason, message) in CONDITIONS {
        let at = conditions.iter().position(|it| it["type"] == name);
        let old = at.map_or(Value::Null, |at| conditions[at].clone());
        let since = if old["status"] == status { old["lastTransitionTime"].as_str() } else { None };
        let new = json!({
            "type": name,
            "status": status,
            "reason": reason,
            "message": message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": since.unwrap_or(&now),
        });
        match at {
            Some(at) => conditions[at] = new,
            None => conditions.push(new),
        }
    }
    draft.set("/status/conditions", conditions);
    for field in ["capacity", "allocatable"] {
        let given = file.and_then(|it| it.pointer(&format!("/status/{field}"))).filter(|it| it.is_object());
        let fallback = || json!({ "cpu": "2", "memory": "4Gi", "ephemeral-storage": "20Gi", "pods": "110" });
        draft.set_if_absent(&format!("/status/{field}"), given.cloned().unwrap_or_else(fallback));
    }
    draft.set_if_absent(
        "/status/addresses",
        json!([
            { "type": "InternalIP", "address": "127.0.0.1" },
            { "type": "Hostname", "address": draft.old().name() },
        ]),
    );
    for (field, value) in node_info() {
        draft.set_if_absent(&format!("/status/nodeInfo/{field}"), value);
    }
    draft.set("/status/nodeInfo/kubeletVersion", KUBELET_VERSION);
}

/// The server wants every field of it; those that a process cannot have are empty.
fn node_info() -> [(&'static str, &'static str); 9] {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    [
        ("architecture", architecture),
        ("operatingSystem", "linux"),
        ("bootID", ""),
        ("containerRuntimeVersion", ""),
        ("kernelVersion", ""),
        ("kubeProxyVersion", ""),
        ("machineID", ""),
        ("osImage", ""),
        ("systemUUID", ""),
    ]
}

/// Which node files have no Node yet and never had one.
pub(crate) fn to_register<'a>(
    picture: &Picture,
    files: &'a BTreeMap<String, Value>,
    registered: &BTreeSet<String>,
) -> Vec<(&'a str, &'a Value)> {
    let is_new = |name: &str| !registered.contains(name) && picture.get(Kind::Node, "", name).is_none();
    files.iter().map(|(name, file)| (name.as_str(), file)).filter(|(name, _)| is_new(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);
    const PERIOD: Duration = Duration::from_secs(10);

    fn alive() -> NodeFacts {
        NodeFacts { is_alive: true, labels: [("job".to_owned(), "demo".to_owned())].into() }
    }

    fn beat(picture: &Picture, facts: &NodeFacts, now: Timestamp) -> Vec<Planned> {
        let node = picture.get(Kind::Node, "", "n").unwrap();
        let mut planned = Vec::new();
        heartbeat(picture, node, facts, None, PERIOD, now, &mut planned);
        planned
    }

    fn node() -> Value {
        json!({ "metadata": { "name": "n", "uid": "u" }, "spec": {} })
    }

    #[test]
    fn a_living_agent_gets_lease_labels_and_status_and_a_dead_one_nothing() {
        let picture = Picture::of([(Kind::Node, node())]);
        assert_eq!(beat(&picture, &NodeFacts::default(), T0), []);
        let planned = beat(&picture, &alive(), T0);
        assert!(matches!(&planned[0].effect, Effect::Create { object }
            if object["spec"]["renewTime"] == "2023-11-14T22:13:20.000000Z"));
        assert!(
            matches!(&planned[1].effect, Effect::Patch { patch, .. } if patch["metadata"]["labels"]["job"] == "demo")
        );
        let Effect::PatchStatus { patch, .. } = &planned[2].effect else { panic!("{planned:?}") };
        assert_eq!(patch["status"]["conditions"].as_array().unwrap().len(), 4);
        assert_eq!(patch["status"]["nodeInfo"]["kubeletVersion"], KUBELET_VERSION);
    }

    #[test]
    fn what_was_renewed_a_moment_ago_is_left_alone_and_renewed_after_the_period() {
        let mut kept = node();
        let first = beat(&Picture::of([(Kind::Node, node())]), &NodeFacts { labels: BTreeMap::new(), ..alive() }, T0);
        let Effect::PatchStatus { patch, .. } = &first[1].effect else { panic!("{first:?}") };
        kept["status"] = patch["status"].clone();
        let Effect::Create { object: lease } = &first[0].effect else { panic!("{first:?}") };
        let picture = Picture::of([(Kind::Node, kept), (Kind::Lease, lease.clone())]);
        let facts = NodeFacts { labels: BTreeMap::new(), ..alive() };
        assert_eq!(beat(&picture, &facts, T0.plus(Duration::from_secs(5))), []);
        assert_eq!(beat(&picture, &facts, T0.plus(PERIOD)).len(), 2);
    }

    #[test]
    fn a_deleted_node_is_never_registered_again() {
        let files = BTreeMap::from([("a".to_owned(), json!({})), ("n".to_owned(), json!({}))]);
        let picture = Picture::of([(Kind::Node, node())]);
        let names = |registered: &BTreeSet<String>| {
            to_register(&picture, &files, registered).into_iter().map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(names(&BTreeSet::new()), ["a"]);
        assert!(names(&["a".to_owned()].into()).is_empty());
    }
}
