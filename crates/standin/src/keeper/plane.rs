//! What a controller manager and a scheduler do, for API servers that run without them: lost nodes, pods of deleted or
//! tainted nodes, and the binding of pods.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use super::{nodes::LEASES, taints};
use crate::{
    draft::{Condition, Draft},
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::Object,
    picture::Picture,
    times,
};

/// Marks a Node whose Lease was not renewed in time, and takes the marks off one that came back.
pub(crate) fn judge_node(
    picture: &Picture,
    node: &Arc<Object>,
    grace: Duration,
    now: Timestamp,
    planned: &mut Vec<Planned>,
) {
    let lease = picture.get(Kind::Lease, LEASES, node.name());
    // A node that never had a Lease has as long from its creation.
    let renewed = lease.and_then(|it| it.time("/spec/renewTime")).or_else(|| node.time("/metadata/creationTimestamp"));
    let Some(renewed) = renewed else { return };
    let mut draft = Draft::new(Via::Own, Kind::Node, node, now);
    if grace < now.since(renewed) {
        mark_lost(&mut draft, now);
    } else if node.is_true("Ready") {
        // The server itself taints a new Node as not ready; a controller manager takes that away.
        let is_over = |it: &Value| it["key"] == taints::UNREACHABLE || it["key"] == taints::NOT_READY;
        let taints = node.list("/spec/taints");
        let rest: Vec<Value> = taints.iter().filter(|it| !is_over(it)).cloned().collect();
        if rest.len() != taints.len() {
            draft.set_list("/spec/taints", rest);
        }
    }
    draft.finish(planned);
}

fn mark_lost(draft: &mut Draft, now: Timestamp) {
    let mut names = vec!["Ready", "MemoryPressure", "DiskPressure", "PIDPressure"];
    names.retain(|it| draft.old().condition_status(it) != "Unknown");
    let mut conditions = draft.at("/status/conditions").as_array().cloned().unwrap_or_default();
    for name in names {
        let at = conditions.iter().position(|it| it["type"] == name);
        let heartbeat = at.and_then(|at| conditions[at].get("lastHeartbeatTime").cloned());
        let mut new = json!({
            "type": name,
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": times::seconds(now),
        });
        if let Some(heartbeat) = heartbeat {
            new["lastHeartbeatTime"] = heartbeat;
        }
        match at {
            Some(at) => conditions[at] = new,
            None => conditions.push(new),
        }
    }
    draft.set("/status/conditions", conditions);
    let mut taints = draft.old().list("/spec/taints").to_vec();
    for effect in ["NoSchedule", "NoExecute"] {
        if !taints.iter().any(|it| it["key"] == taints::UNREACHABLE && it["effect"] == effect) {
            taints.push(json!({ "key": taints::UNREACHABLE, "effect": effect, "timeAdded": times::seconds(now) }));
        }
    }
    draft.set_list("/spec/taints", taints);
}

/// Deletes pods that a `NoExecute` taint of their node does not let stay. Out of service means that nothing runs there
/// any more, so such pods go without waiting for a kubelet.
pub(crate) fn evict_by_taint(pod: &Object, node: &Object, now: Timestamp, planned: &mut Vec<Planned>) {
    for taint in node.list("/spec/taints").iter().filter(|it| taints::evicts(pod, it, now)) {
        let is_out_of_service = taint["key"] == taints::OUT_OF_SERVICE;
        if is_out_of_service || !pod.is_deleting() {
            delete_pod(pod, is_out_of_service.then_some(0), planned);
            return;
        }
    }
}

pub(crate) fn delete_pod(pod: &Object, grace: Option<u32>, planned: &mut Vec<Planned>) {
    let target = Target { via: Via::Own, kind: Kind::Pod, key: pod.key() };
    planned.push(Planned { target, effect: Effect::Delete { uid: pod.uid().to_owned(), grace } });
}

/// How a pod is bound: by the subresource, which is the only way of a real server, or by a patch on dev-k8s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    Subresource,
    Patch,
}

/// Binds every unscheduled pod to the fitting node with the fewest pods, or says on the pod why there is none.
pub(crate) fn schedule(picture: &Picture, binding: Binding, now: Timestamp, planned: &mut Vec<Planned>) {
    let mut n_pods: BTreeMap<&str, usize> = BTreeMap::new();
    for pod in picture.all(Kind::Pod) {
        *n_pods.entry(pod.text("/spec/nodeName")).or_default() += 1;
    }
    let is_waiting = |it: &&Arc<Object>| {
        it.text("/spec/nodeName").is_empty()
            && !it.is_deleting()
            && !matches!(it.text("/status/phase"), "Succeeded" | "Failed")
    };
    let is_ours = |it: &&Arc<Object>| matches!(it.text("/spec/schedulerName"), "" | "default-scheduler");
    for pod in picture.all(Kind::Pod).filter(is_waiting).filter(is_ours) {
        let fitting = picture.all(Kind::Node).filter(|node| fits(pod, node));
        match fitting.min_by_key(|it| (n_pods.get(it.name()).copied().unwrap_or(0), it.name())) {
            Some(node) => {
                *n_pods.entry(node.name()).or_default() += 1;
                bind(pod, node, binding, now, planned);
            }
            None => refuse(picture, pod, now, planned),
        }
    }
}

fn fits(pod: &Object, node: &Object) -> bool {
    let selector = pod.at("/spec/nodeSelector").as_object();
    let is_selected = selector.into_iter().flatten().all(|(name, value)| node.label(name) == value.as_str());
    let is_repelled = node.list("/spec/taints").iter().any(|it| taints::repels(pod, it));
    node.is_true("Ready") && !node.is_deleting() && !node.flag("/spec/unschedulable") && is_selected && !is_repelled
}

fn bind(pod: &Arc<Object>, node: &Object, binding: Binding, now: Timestamp, planned: &mut Vec<Planned>) {
    match binding {
        Binding::Subresource => {
            let target = Target { via: Via::Own, kind: Kind::Pod, key: pod.key() };
            let effect = Effect::Bind { uid: pod.uid().to_owned(), node: node.name().to_owned() };
            planned.push(Planned { target, effect });
        }
        Binding::Patch => {
            let mut draft = Draft::new(Via::Own, Kind::Pod, pod, now);
            draft.set("/spec/nodeName", node.name());
            draft.condition_at("/status/conditions", "PodScheduled", Condition::new("True", "", ""), None);
            draft.finish(planned);
        }
    }
}

fn refuse(picture: &Picture, pod: &Arc<Object>, now: Timestamp, planned: &mut Vec<Planned>) {
    let n_nodes = picture.all(Kind::Node).count();
    let message = match n_nodes {
        0 => "no nodes available to schedule pods".to_owned(),
        _ => format!("0/{n_nodes} nodes are available: not ready, unschedulable, tainted or not selected by the pod"),
    };
    let mut draft = Draft::new(Via::Own, Kind::Pod, pod, now);
    draft.set_if_absent("/status/phase", "Pending");
    draft.condition_at("/status/conditions", "PodScheduled", Condition::new("False", "Unschedulable", message), None);
    draft.finish(planned);
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn node(name: &str, labels: Value) -> Value {
        let ready = [json!({ "type": "Ready", "status": "True" })];
        json!({ "metadata": { "name": name, "labels": labels }, "spec": {}, "status": { "conditions": ready } })
    }

    fn pod(name: &str, selector: Value) -> Value {
        json!({ "metadata": { "name": name, "namespace": "d", "uid": name }, "spec": { "nodeSelector": selector } })
    }

    fn scheduled(objects: Vec<(Kind, Value)>) -> Vec<(String, Effect)> {
        let mut planned = Vec::new();
        schedule(&Picture::of(objects), Binding::Subresource, T0, &mut planned);
        planned.into_iter().map(|it| (it.target.key.name, it.effect)).collect()
    }

    #[test]
    fn pods_spread_over_the_nodes_that_their_selector_allows() {
        let bound = scheduled(vec![
            (Kind::Node, node("a", json!({ "job": "demo" }))),
            (Kind::Node, node("b", json!({}))),
            (Kind::Pod, pod("p1", json!({}))),
            (Kind::Pod, pod("p2", json!({}))),
            (Kind::Pod, pod("p3", json!({ "job": "demo" }))),
        ]);
        let bind =
            |node: &str, uid: &str| (uid.to_owned(), Effect::Bind { uid: uid.to_owned(), node: node.to_owned() });
        assert_eq!(bound, [bind("a", "p1"), bind("b", "p2"), bind("a", "p3")]);
    }

    #[test]
    fn a_pod_that_fits_nowhere_is_told_why() {
        let mut cordoned = node("a", json!({}));
        cordoned["spec"]["unschedulable"] = true.into();
        let refused = scheduled(vec![(Kind::Node, cordoned), (Kind::Pod, pod("p", json!({})))]);
        let [(_, Effect::PatchStatus { patch, .. })] = refused.as_slice() else { panic!("{refused:?}") };
        let condition = &patch["status"]["conditions"][0];
        assert_eq!((&condition["status"], &condition["reason"]), (&json!("False"), &json!("Unschedulable")));
        assert!(condition["message"].as_str().unwrap().starts_with("0/1 nodes are available"));
    }

    #[test]
    fn a_node_without_renewals_is_lost_and_one_that_came_back_is_not() {
        let lease = |at: Timestamp| {
            let spec = json!({ "renewTime": times::micros(at) });
            (Kind::Lease, json!({ "metadata": { "name": "n", "namespace": LEASES }, "spec": spec }))
        };
        let judged = |node: Value, now: Timestamp| {
            let picture = Picture::of([(Kind::Node, node), lease(T0)]);
            let mut planned = Vec::new();
            let node = picture.get(Kind::Node, "", "n").unwrap();
            judge_node(&picture, node, Duration::from_secs(40), now, &mut planned);
            planned.into_iter().map(|it| it.effect).collect::<Vec<_>>()
        };
        assert_eq!(judged(node("n", json!({})), T0.plus(Duration::from_secs(40))), []);
        let lost = judged(node("n", json!({})), T0.plus(Duration::from_secs(41)));
        let [Effect::Patch { patch, .. }, Effect::PatchStatus { patch: status, .. }] = lost.as_slice() else {
            panic!("{lost:?}")
        };
        assert_eq!(patch["spec"]["taints"].as_array().unwrap().len(), 2);
        assert!(status["status"]["conditions"].as_array().unwrap().iter().all(|it| it["status"] == "Unknown"));
        let mut back = node("n", json!({}));
        back["spec"]["taints"] = patch["spec"]["taints"].clone();
        let not_ready = json!({ "key": taints::NOT_READY, "effect": "NoSchedule" });
        back["spec"]["taints"].as_array_mut().unwrap().push(not_ready);
        let back = judged(back, T0);
        assert_eq!(
            back,
            [Effect::Patch { patch: json!({ "spec": { "taints": null } }), resource_version: String::new() }]
        );
    }
}
