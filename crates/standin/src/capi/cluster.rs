//! Clusters: owner of the infrastructure object, phase, endpoint, connection, and deletion in Cluster API's order.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    names,
    view::{Connection, Infrastructure, View, is_paused, mirror_ready},
};
use crate::{
    draft::{Condition, Draft},
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::{Object, Ownership, with_owner},
};

const INFRASTRUCTURE: &str = "/spec/infrastructureRef";

pub(crate) fn decide(view: View<'_>, cluster: &Arc<Object>, planned: &mut Vec<Planned>) {
    let mut draft = Draft::new(Via::Own, Kind::Cluster, cluster, view.now);
    draft.set("/status/observedGeneration", cluster.generation());
    if is_paused(cluster, cluster) {
        draft.condition("Paused", Condition::new("True", "Paused", "the Cluster is paused"));
        return draft.finish(planned);
    }
    draft.condition("Paused", Condition::new("False", "NotPaused", ""));
    if cluster.is_deleting() {
        delete(view, cluster, &mut draft, planned);
    } else {
        draft.add_finalizer(names::CLUSTER_FINALIZER);
        draft.condition("Deleting", Condition::new("False", "NotDeleting", ""));
        infrastructure(view, cluster, &mut draft, planned);
        control_plane(view, cluster, &mut draft);
    }
    connection(view, cluster, &mut draft);
    let phase = phase(cluster, &draft);
    draft.set("/status/phase", phase);
    draft.finish(planned);
}

fn phase(cluster: &Object, draft: &Draft) -> &'static str {
    let is_set = |pointer: &str| !draft.at(pointer).is_null();
    let has_endpoint = draft.at("/spec/controlPlaneEndpoint/host").as_str().is_some_and(|it| !it.is_empty())
        && draft.at("/spec/controlPlaneEndpoint/port").as_i64().is_some_and(|it| it != 0);
    if cluster.is_deleting() {
        "Deleting"
    } else if draft.at("/status/initialization/infrastructureProvisioned") == true && has_endpoint {
        "Provisioned"
    } else if is_set(INFRASTRUCTURE) || is_set("/spec/controlPlaneRef") {
        "Provisioning"
    } else {
        "Pending"
    }
}

fn infrastructure(view: View<'_>, cluster: &Arc<Object>, draft: &mut Draft, planned: &mut Vec<Planned>) {
    let (kind, infra) = match view.infrastructure(cluster, INFRASTRUCTURE) {
        Infrastructure::Found(kind, infra) => (kind, infra),
        Infrastructure::Missing(name) => {
            let message = format!("{name} does not exist");
            draft.condition("InfrastructureReady", Condition::new("False", "DoesNotExist", message));
            return;
        }
        Infrastructure::Foreign => return,
    };
    if infra.annotation(names::PAUSED).is_some() {
        return;
    }
    let mut infra_draft = Draft::new(Via::Own, kind, infra, view.now);
    infra_draft.label(names::CLUSTER_NAME, cluster.name());
    if let Ok(owners) = with_owner(infra, Kind::Cluster, cluster, Ownership::Plain) {
        infra_draft.owners(owners);
    }
    infra_draft.finish(planned);
    let is_provisioned = infra.flag("/status/initialization/provisioned");
    draft.condition("InfrastructureReady", mirror_ready(infra, is_provisioned));
    if !is_provisioned {
        return;
    }
    draft.set("/status/initialization/infrastructureProvisioned", true);
    if cluster.text("/spec/controlPlaneEndpoint/host").is_empty() {
        let endpoint = infra.at("/spec/controlPlaneEndpoint");
        if endpoint.is_object() {
            draft.set("/spec/controlPlaneEndpoint", endpoint.clone());
        }
    }
    draft.set_list("/status/failureDomains", infra.list("/status/failureDomains").to_vec());
}

/// `ControlPlaneInitialized` is left False unless a control plane says otherwise. Once True, by whomever, it stays.
fn control_plane(view: View<'_>, cluster: &Object, draft: &mut Draft) {
    let has_reference = !cluster.text("/spec/controlPlaneRef/name").is_empty();
    let has_machine = view.masters_of(cluster).any(|it| !it.at("/status/nodeRef").is_null());
    let by_reference = view.control_planes.get(&cluster.key()).is_some_and(|it| it.is_initialized);
    if cluster.is_true("ControlPlaneInitialized") {
        // Written by an outsider, the flag may be missing; it is only the condition that counts.
    } else if by_reference || (!has_reference && has_machine) {
        draft.condition("ControlPlaneInitialized", Condition::new("True", "Initialized", ""));
        draft.set("/status/initialization/controlPlaneInitialized", true);
    } else {
        let message = "waiting for the first control plane machine to have status.nodeRef set";
        draft.condition("ControlPlaneInitialized", Condition::new("False", "NotInitialized", message));
    }
    if !has_reference {
        let message = "the Cluster has no controlPlaneRef";
        draft.condition("ControlPlaneAvailable", Condition::new("Unknown", "NotReported", message));
        draft.condition("Available", Condition::new("Unknown", "NotReported", message));
    }
}

fn connection(view: View<'_>, cluster: &Object, draft: &mut Draft) {
    let condition = match view.connections.get(&cluster.key()) {
        Some(Connection::Up { .. }) => Condition::new("True", "ProbeSucceeded", ""),
        Some(Connection::Down { why }) => {
            Condition::new("False", "ProbeFailed", format!("connection to the workload cluster is down: {why}"))
        }
        None => Condition::new("False", "ProbeFailed", "connection to the workload cluster not tried yet"),
    };
    draft.condition("RemoteConnectionProbe", condition);
}

/// First everything that hangs on the Cluster, workers before control plane, then the infrastructure object, then the
/// finalizer. Machines of pools are left to garbage collection, as their owner is the pool.
fn delete(view: View<'_>, cluster: &Arc<Object>, draft: &mut Draft, planned: &mut Vec<Planned>) {
    let of_cluster =
        |it: &&Arc<Object>| it.namespace() == cluster.namespace() && it.text("/spec/clusterName") == cluster.name();
    let pools: Vec<_> = view.picture.all(Kind::MachinePool).filter(of_cluster).collect();
    let (masters, workers): (Vec<_>, Vec<_>) =
        view.machines_of(cluster).partition(|it| it.label(names::CONTROL_PLANE).is_some());
    let n_left = pools.len() + workers.len();
    let own = |it: &&&Arc<Object>| it.owners().any(|owner| owner.uid() == cluster.uid());
    for pool in pools.iter().filter(own) {
        delete_object(Kind::MachinePool, pool, planned);
    }
    for machine in workers.iter().filter(own) {
        delete_object(Kind::Machine, machine, planned);
    }
    let deleting = |reason: &str, message: String| Condition::new("True", reason, message);
    if 0 < n_left {
        let message = format!("{} MachinePools and {} worker Machines left", pools.len(), workers.len());
        return draft.condition("Deleting", deleting("WaitingForWorkersDeletion", message));
    }
    if !masters.is_empty() {
        masters.iter().for_each(|it| delete_object(Kind::Machine, it, planned));
        let message = format!("{} control plane Machines left", masters.len());
        return draft.condition("Deleting", deleting("WaitingForControlPlaneDeletion", message));
    }
    if let Infrastructure::Found(kind, infra) = view.infrastructure(cluster, INFRASTRUCTURE) {
        delete_object(kind, infra, planned);
        let message = format!("{} {} left", kind.kind(), infra.name());
        return draft.condition("Deleting", deleting("WaitingForInfrastructureDeletion", message));
    }
    draft.condition("Deleting", deleting("DeletionCompleted", String::new()));
    draft.drop_finalizer(names::CLUSTER_FINALIZER);
}

/// Deletes an object that is not being deleted yet.
pub(crate) fn delete_object(kind: Kind, object: &Arc<Object>, planned: &mut Vec<Planned>) {
    if !object.is_deleting() {
        let target = Target { via: Via::Own, kind, key: object.key() };
        planned.push(Planned { target, effect: Effect::Delete { uid: object.uid().to_owned(), grace: None } });
    }
}

/// An object reference to a Node.
pub(crate) fn node_reference(node: &Object) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "name": node.name(), "uid": node.uid() })
}
