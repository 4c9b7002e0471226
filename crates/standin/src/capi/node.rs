//! What Cluster API writes on Nodes, and what it reads from their conditions.

use std::sync::Arc;

use serde_json::Value;

use super::{names, view::View};
use crate::{
    draft::{Condition, Draft},
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::Object,
};

/// Who annotates a Node.
pub(crate) struct NodeOwner<'a> {
    pub(crate) cluster: &'a Object,
    /// Kind and name of the MachinePool or of the Machine's controller.
    pub(crate) owner: Option<(&'a str, &'a str)>,
    pub(crate) machine: Option<&'a str>,
}

pub(crate) fn annotate(view: View<'_>, node: &Arc<Object>, by: &NodeOwner<'_>, planned: &mut Vec<Planned>) {
    if node.is_deleting() {
        return;
    }
    let mut draft = Draft::new(Via::Workload(by.cluster.key()), Kind::Node, node, view.now);
    draft.annotation(names::CLUSTER_NAME, by.cluster.name());
    draft.annotation(names::CLUSTER_NAMESPACE, by.cluster.namespace());
    if let Some((kind, name)) = by.owner {
        draft.annotation(names::OWNER_KIND, kind);
        draft.annotation(names::OWNER_NAME, name);
    }
    if let Some(machine) = by.machine {
        draft.annotation(names::MACHINE, machine);
    }
    let taints = node.list("/spec/taints");
    if taints.iter().any(|it| it["key"] == names::UNINITIALIZED_TAINT) {
        let rest: Vec<Value> = taints.iter().filter(|it| it["key"] != names::UNINITIALIZED_TAINT).cloned().collect();
        draft.set_list("/spec/taints", rest);
    }
    draft.finish(planned);
}

pub(crate) fn delete(cluster: &Object, node: &Object, planned: &mut Vec<Planned>) {
    if !node.is_deleting() {
        let target = Target { via: Via::Workload(cluster.key()), kind: Kind::Node, key: node.key() };
        planned.push(Planned { target, effect: Effect::Delete { uid: node.uid().to_owned(), grace: None } });
    }
}

/// `NodeHealthy` of a Machine: all four conditions of its Node must be reported and good.
pub(crate) fn health(node: &Object) -> Condition {
    let wanted = [("Ready", "True"), ("MemoryPressure", "False"), ("DiskPressure", "False"), ("PIDPressure", "False")];
    let of = |is_bad: fn(&str, &str) -> bool| -> Vec<String> {
        let bad = wanted.iter().filter(|(name, good)| is_bad(node.condition_status(name), good));
        bad.map(|(name, _)| format!("Node.{name} is {}", status_word(node.condition_status(name)))).collect()
    };
    let unhealthy = of(|status, good| !matches!(status, "" | "Unknown") && status != good);
    if !unhealthy.is_empty() {
        return Condition::new("False", "NodeNotHealthy", unhealthy.join(", "));
    }
    let unknown = of(|status, _| matches!(status, "" | "Unknown"));
    if !unknown.is_empty() {
        return Condition::new("Unknown", "NodeHealthUnknown", unknown.join(", "));
    }
    Condition::new("True", "NodeHealthy", "")
}

fn status_word(status: &str) -> &str {
    if status.is_empty() { "not reported" } else { status }
}

/// `NodeReady` of a Machine: the Node's `Ready`.
pub(crate) fn readiness(node: &Object) -> Condition {
    match node.condition_status("Ready") {
        "True" => Condition::new("True", "NodeReady", ""),
        "False" => Condition::new("False", "NodeNotReady", "Node.Ready is False"),
        status => Condition::new("Unknown", "NodeReadyUnknown", format!("Node.Ready is {}", status_word(status))),
    }
}
