//! The drain that core does where it drains at all: cordon, evict what MachineDrainRules and labels do not exempt, lowest
//! order first, then wait for volumes. Each call is one attempt.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{DeleteParams, EvictParams, ListParams, PostParams, Preconditions},
};
use nstance_core::time::Timestamp;
use nstance_rt::chain::Chain;
use serde_json::{Value, json};

use super::{
    machine::{DrainOrder, DrainScope},
    names,
    view::DrainOutcome,
};
use crate::{
    execute::{RequestError, api, request},
    kinds::Kind,
    object::{Key, Object, put},
    picture::Picture,
    selector::selects,
};

/// What a drain does with one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PodAction {
    Skip,
    /// It must end by itself.
    Wait,
    Evict {
        order: i64,
    },
}

/// What decides about pods besides the pods themselves.
pub(crate) struct DrainContext<'a> {
    pub(crate) cluster: &'a Object,
    pub(crate) machine: &'a Object,
    /// Of the Machine's namespace, sorted by name.
    pub(crate) rules: Vec<&'a Object>,
    /// Labels of the workload cluster's namespaces.
    pub(crate) namespaces: BTreeMap<String, Object>,
    pub(crate) daemon_sets: BTreeSet<Key>,
}

/// Labels go before rules, and the first rule that matches decides.
pub(crate) fn pod_action(context: &DrainContext<'_>, pod: &Object) -> PodAction {
    let is_finished = matches!(pod.text("/status/phase"), "Succeeded" | "Failed");
    let by_daemon_set = pod.controller().filter(|it| it.kind() == Kind::DaemonSet.kind());
    let has_daemon_set =
        by_daemon_set.is_some_and(|it| context.daemon_sets.contains(&Key::new(pod.namespace(), it.name())));
    if (has_daemon_set && !is_finished) || pod.annotation("kubernetes.io/config.mirror").is_some() {
        return PodAction::Skip;
    }
    match pod.label(names::DRAIN).map(str::to_lowercase).as_deref() {
        Some("skip") => return PodAction::Skip,
        Some("wait-completed") => return PodAction::Wait,
        _ => {}
    }
    let matching = context.rules.iter().find(|it| matches_rule(context, it, pod));
    match matching.map(|it| it.text("/spec/drain/behavior")) {
        Some("Skip") => PodAction::Skip,
        Some("WaitCompleted") => PodAction::Wait,
        Some(_) => PodAction::Evict { order: matching.and_then(|it| it.number("/spec/drain/order")).unwrap_or(0) },
        None => PodAction::Evict { order: 0 },
    }
}

fn matches_rule(context: &DrainContext<'_>, rule: &Object, pod: &Object) -> bool {
    // A selector that is left out matches everything.
    let is_selected = |selector: &Value, object: Option<&Object>| {
        selector.is_null() || object.is_some_and(|it| selects(selector, it.labels()))
    };
    let (machines, pods) = (rule.list("/spec/machines"), rule.list("/spec/pods"));
    let by_machine = machines.iter().any(|it| {
        is_selected(&it["selector"], Some(context.machine))
            && is_selected(&it["clusterSelector"], Some(context.cluster))
    });
    let by_pod = pods.iter().any(|it| {
        let namespace = context.namespaces.get(pod.namespace());
        is_selected(&it["selector"], Some(pod)) && is_selected(&it["namespaceSelector"], namespace)
    });
    (machines.is_empty() || by_machine) && (pods.is_empty() || by_pod)
}

/// One attempt. Whatever goes wrong is an outcome too: the Machine waits and says why.
pub(crate) async fn attempt(client: &Client, picture: &Picture, order: &DrainOrder, now: Timestamp) -> DrainOutcome {
    match try_drain(client, picture, order, now).await {
        Ok(outcome) => outcome,
        Err(error) => DrainOutcome::Waiting(format!("drain of Node {}: {}", order.node, Chain(&error))),
    }
}

async fn try_drain(
    client: &Client,
    picture: &Picture,
    order: &DrainOrder,
    now: Timestamp,
) -> Result<DrainOutcome, RequestError> {
    let nodes = api(client, Kind::Node, "");
    let Some(node) = request(nodes.get_opt(&order.node)).await? else { return Ok(DrainOutcome::Done) };
    let node = Object::of(node);
    if order.scope != DrainScope::Volumes {
        if !node.flag("/spec/unschedulable") {
            let mut patch = json!({ "spec": { "unschedulable": true } });
            put(&mut patch, "/metadata/resourceVersion", node.resource_version().into());
            request(nodes.patch(&order.node, &Default::default(), &kube::api::Patch::Merge(patch))).await?;
        }
        if let Some(left) = evict(client, picture, order, &node, now).await? {
            return Ok(DrainOutcome::Waiting(left));
        }
    }
    if order.scope != DrainScope::Pods {
        let all = api(client, Kind::VolumeAttachment, "");
        let attached: Vec<String> = request(all.list(&ListParams::default()))
            .await?
            .into_iter()
            .map(Object::of)
            .filter(|it| it.text("/spec/nodeName") == order.node && it.flag("/status/attached"))
            .map(|it| it.name().to_owned())
            .collect();
        if !attached.is_empty() {
            return Ok(DrainOutcome::Waiting(format!("waiting for volumes to be detached: {}", attached.join(", "))));
        }
    }
    Ok(DrainOutcome::Done)
}

/// `Some`: which pods are left.
async fn evict(
    client: &Client,
    picture: &Picture,
    order: &DrainOrder,
    node: &Object,
    now: Timestamp,
) -> Result<Option<String>, RequestError> {
    let all = kube::Api::all_with(client.clone(), &Kind::Pod.resource());
    let on_node = ListParams::default().fields(&format!("spec.nodeName={}", order.node));
    let pods: Vec<Object> = request(all.list(&on_node)).await?.into_iter().map(Object::of).collect();
    let (namespace, name) = (order.machine.namespace.as_str(), order.machine.name.as_str());
    let machine = picture.get(Kind::Machine, namespace, name);
    let cluster = picture.get(Kind::Cluster, namespace, &order.cluster.name);
    let (Some(machine), Some(cluster)) = (machine, cluster) else { return Ok(Some("Machine is gone".to_owned())) };
    let context = DrainContext {
        cluster,
        machine,
        rules: picture.within(Kind::MachineDrainRule, namespace).map(AsRef::as_ref).collect(),
        namespaces: namespaces(client).await?,
        daemon_sets: daemon_sets(client, &pods).await?,
    };
    let is_unreachable = node.condition_status("Ready") == "Unknown";
    // On an unreachable node nothing ends a pod, so those that were told to end a while ago do not count.
    let is_left_behind = |pod: &Object| {
        let since = pod.time("/metadata/deletionTimestamp");
        is_unreachable && since.is_some_and(|since| std::time::Duration::from_secs(1) < now.since(since))
    };
    let acted: Vec<(&Object, PodAction)> =
        pods.iter().filter(|it| !is_left_behind(it)).map(|it| (it, pod_action(&context, it))).collect();
    let orders = acted.iter().filter_map(|(_, action)| match action {
        PodAction::Evict { order } => Some(*order),
        PodAction::Wait => Some(0),
        PodAction::Skip => None,
    });
    let Some(lowest) = orders.min() else { return Ok(None) };
    let mut left = Vec::new();
    for (pod, action) in acted {
        match action {
            PodAction::Skip => {}
            PodAction::Evict { order } if order == lowest && !pod.is_deleting() => {
                match evict_pod(client, pod, is_unreachable).await {
                    Ok(()) => left.push(format!("{} (evicted)", pod.key())),
                    Err(error) if error.is_not_found() => {}
                    Err(error) => left.push(format!("{} ({})", pod.key(), Chain(&error))),
                }
            }
            _ => left.push(pod.key().to_string()),
        }
    }
    Ok(Some(format!("pods left on Node {}: {}", order.node, left.join(", "))))
}

async fn evict_pod(client: &Client, pod: &Object, is_unreachable: bool) -> Result<(), RequestError> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), pod.namespace());
    let delete_options = DeleteParams {
        grace_period_seconds: is_unreachable.then_some(1),
        preconditions: Some(Preconditions { uid: Some(pod.uid().to_owned()), resource_version: None }),
        ..DeleteParams::default()
    };
    let params = EvictParams { delete_options: Some(delete_options), post_options: PostParams::default() };
    request(pods.evict(pod.name(), &params)).await.map(|_| ())
}

async fn namespaces(client: &Client) -> Result<BTreeMap<String, Object>, RequestError> {
    let all = request(api(client, Kind::Namespace, "").list(&ListParams::default())).await?;
    Ok(all.into_iter().map(Object::of).map(|it| (it.name().to_owned(), it)).collect())
}

/// Those DaemonSets of the pods that exist. A look-up that fails is an error: unknown is not a reason to skip a pod.
async fn daemon_sets(client: &Client, pods: &[Object]) -> Result<BTreeSet<Key>, RequestError> {
    let mut found = BTreeSet::new();
    for pod in pods {
        let Some(owner) = pod.controller().filter(|it| it.kind() == Kind::DaemonSet.kind()) else { continue };
        let key = Key::new(pod.namespace(), owner.name());
        let sets = api(client, Kind::DaemonSet, pod.namespace());
        if !found.contains(&key) && request(sets.get_opt(owner.name())).await?.is_some() {
            found.insert(key);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Object {
        Object::new(value)
    }

    fn action(pod: Value, rules: &[Value]) -> PodAction {
        let (cluster, machine) = (object(json!({})), object(json!({ "metadata": { "labels": { "m": "1" } } })));
        let rules: Vec<Object> = rules.iter().cloned().map(object).collect();
        let namespaces = [("n".to_owned(), object(json!({ "metadata": { "labels": { "team": "a" } } })))].into();
        let daemon_sets = [Key::new("n", "ds")].into();
        let context = DrainContext {
            cluster: &cluster,
            machine: &machine,
            rules: rules.iter().collect(),
            namespaces,
            daemon_sets,
        };
        pod_action(&context, &object(pod))
    }

    #[test]
    fn pods_of_a_living_daemon_set_are_skipped_and_those_of_a_gone_one_are_not() {
        let pod = |name: &str| {
            json!({ "metadata": { "name": "p", "namespace": "n",
                "ownerReferences": [{ "kind": "DaemonSet", "name": name, "controller": true }] } })
        };
        assert_eq!(action(pod("ds"), &[]), PodAction::Skip);
        assert_eq!(action(pod("gone"), &[]), PodAction::Evict { order: 0 });
    }

    #[test]
    fn a_label_goes_before_rules_and_the_first_rule_decides() {
        let rule = |behavior: &str, pods: Value| {
            json!({ "spec": { "drain": { "behavior": behavior, "order": 5 }, "pods": pods,
                "machines": [{ "selector": { "matchLabels": { "m": "1" } } }] } })
        };
        let pod = |labels: Value| json!({ "metadata": { "name": "p", "namespace": "n", "labels": labels } });
        let mine = json!([{ "selector": { "matchLabels": { "a": "b" } }, "namespaceSelector": { "matchLabels": { "team": "a" } } }]);
        let rules = [rule("Skip", mine), rule("Drain", json!([]))];
        assert_eq!(action(pod(json!({ "a": "b" })), &rules), PodAction::Skip);
        assert_eq!(action(pod(json!({ "a": "c" })), &rules), PodAction::Evict { order: 5 });
        assert_eq!(action(pod(json!({ "cluster.x-k8s.io/drain": "Skip" })), &rules[1..]), PodAction::Skip);
        assert_eq!(action(pod(json!({ "cluster.x-k8s.io/drain": "wait-completed" })), &[]), PodAction::Wait);
        let other_machine = json!({ "spec": { "drain": { "behavior": "Skip" },
            "machines": [{ "selector": { "matchLabels": { "m": "2" } } }] } });
        assert_eq!(action(pod(json!({})), &[other_machine]), PodAction::Evict { order: 0 });
    }
}
