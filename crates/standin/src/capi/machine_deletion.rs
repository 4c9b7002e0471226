//! The end of a Machine. Core drains and deletes the Node only where the Cluster has control-plane Machines or an
//! externally managed control plane, and is not being deleted itself; elsewhere the infrastructure machine goes at once.

use std::sync::Arc;

use super::{
    cluster::delete_object,
    machine::{DrainOrder, DrainScope, INFRASTRUCTURE},
    machinepool::is_node_deletion_over,
    names, node,
    view::{DrainOutcome, Infrastructure, View},
};
use crate::{
    draft::{Condition, Draft},
    effect::Planned,
    object::Object,
    times,
};

pub(crate) fn decide(
    view: View<'_>,
    cluster: &Object,
    machine: &Arc<Object>,
    draft: &mut Draft,
    planned: &mut Vec<Planned>,
    drains: &mut Vec<DrainOrder>,
) {
    let deleting = |draft: &mut Draft, reason: &str, message: String| {
        draft.condition("Deleting", Condition::new("True", reason, message));
    };
    let may_delete_node = may_delete_node(view, cluster, machine);
    if may_delete_node {
        if machine.has_annotation_prefix(names::PRE_DRAIN_HOOK) {
            draft.set_if_absent("/status/deletion/waitForPreDrainHookStartTime", times::seconds(view.now));
            return deleting(draft, "WaitingForPreDrainHook", "waiting for pre-drain hooks to be removed".to_owned());
        }
        if let Some(message) = drain(view, cluster, machine, draft, drains) {
            return deleting(draft, "DrainingNode", message);
        }
    }
    if machine.has_annotation_prefix(names::PRE_TERMINATE_HOOK) {
        draft.set_if_absent("/status/deletion/waitForPreTerminateHookStartTime", times::seconds(view.now));
        return deleting(
            draft,
            "WaitingForPreTerminateHook",
            "waiting for pre-terminate hooks to be removed".to_owned(),
        );
    }
    if let Infrastructure::Found(kind, infra) = view.infrastructure(machine, INFRASTRUCTURE) {
        delete_object(kind, infra, planned);
        let message = format!("waiting for {} {} to be deleted", kind.kind(), infra.name());
        return deleting(draft, "WaitingForInfrastructureDeletion", message);
    }
    // Only now: the machine behind the Node is gone.
    let is_over = is_node_deletion_over(view, machine, "/spec/deletion/nodeDeletionTimeoutSeconds");
    if may_delete_node && !is_over {
        match view.nodes(cluster) {
            Ok(nodes) => {
                if let Some(left) = nodes.named(machine.text("/status/nodeRef/name")) {
                    node::delete(cluster, left, planned);
                    return deleting(draft, "DeletingNode", format!("waiting for Node {} to be deleted", left.name()));
                }
            }
            Err(why) => {
                return deleting(draft, "DeletingNode", format!("connection to the workload cluster is down: {why}"));
            }
        }
    }
    deleting(draft, "DeletionCompleted", String::new());
    draft.drop_finalizer(names::MACHINE_FINALIZER);
}

/// `Some`: why the Machine has to wait.
fn drain(
    view: View<'_>,
    cluster: &Object,
    machine: &Arc<Object>,
    draft: &mut Draft,
    drains: &mut Vec<DrainOrder>,
) -> Option<String> {
    let name = machine.text("/status/nodeRef/name").to_owned();
    let is_excluded = |annotation: &str| machine.annotation(annotation).is_some();
    let scope = match (is_excluded(names::EXCLUDE_NODE_DRAINING), is_excluded(names::EXCLUDE_VOLUME_DETACH)) {
        (true, true) => return None,
        (true, false) => DrainScope::Volumes,
        (false, true) => DrainScope::Pods,
        (false, false) => DrainScope::PodsAndVolumes,
    };
    let is_done = view.drains.get(machine.uid()) == Some(&DrainOutcome::Done);
    if name.is_empty() || is_done || has_timed_out(view, machine) {
        return None;
    }
    let start = times::seconds(view.now);
    draft.set_if_absent("/status/deletion/nodeDrainStartTime", start);
    drains.push(DrainOrder {
        cluster: cluster.key(),
        machine: machine.key(),
        uid: machine.uid().to_owned(),
        node: name.clone(),
        scope,
    });
    match view.drains.get(machine.uid()) {
        Some(DrainOutcome::Waiting(message)) => Some(message.clone()),
        _ => Some(format!("drain of Node {name} begins")),
    }
}

fn has_timed_out(view: View<'_>, machine: &Object) -> bool {
    let timeout = u64::try_from(machine.number("/spec/deletion/nodeDrainTimeoutSeconds").unwrap_or(0)).unwrap_or(0);
    let since = machine.time("/status/deletion/nodeDrainStartTime");
    timeout != 0 && since.is_some_and(|since| std::time::Duration::from_secs(timeout) <= view.now.since(since))
}

fn may_delete_node(view: View<'_>, cluster: &Object, machine: &Object) -> bool {
    if cluster.is_deleting() || !has_node(view, cluster, machine) {
        return false;
    }
    if !cluster.text("/spec/controlPlaneRef/name").is_empty() {
        match view.control_planes.get(&cluster.key()) {
            Some(control_plane) if control_plane.is_deleting => return false,
            Some(control_plane) if control_plane.is_externally_managed => return true,
            _ => {}
        }
    }
    view.masters_of(cluster).any(|it| !it.is_deleting() && it.uid() != machine.uid())
}

fn has_node(view: View<'_>, cluster: &Object, machine: &Object) -> bool {
    !machine.text("/status/nodeRef/name").is_empty()
        || view.nodes(cluster).is_ok_and(|nodes| nodes.with_provider_id(machine.text("/spec/providerID")).is_some())
}
