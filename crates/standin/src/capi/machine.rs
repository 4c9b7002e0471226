//! Machines: owner of the infrastructure machine, provider id and addresses from it, the Node by provider id.

use std::sync::Arc;

use serde_json::json;

use super::{
    machine_deletion, names, node,
    view::{Infrastructure, View, is_paused, mirror_ready},
};
use crate::{
    draft::{Condition, Draft},
    effect::{Planned, Via},
    kinds::Kind,
    object::{Key, Object, Ownership, with_owner},
};

pub(crate) const INFRASTRUCTURE: &str = "/spec/infrastructureRef";

/// A drain that the decision asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DrainOrder {
    pub(crate) cluster: Key,
    pub(crate) machine: Key,
    pub(crate) uid: String,
    pub(crate) node: String,
    pub(crate) scope: DrainScope,
}

/// What has to leave the Node; an annotation on the Machine excludes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DrainScope {
    PodsAndVolumes,
    Pods,
    Volumes,
}

pub(crate) fn decide(view: View<'_>, machine: &Arc<Object>, planned: &mut Vec<Planned>, drains: &mut Vec<DrainOrder>) {
    let Some(cluster) = view.cluster_of(machine) else { return };
    let mut draft = Draft::new(Via::Own, Kind::Machine, machine, view.now);
    // Filled in by Cluster API's webhook before the object is stored; here it comes shortly after.
    draft.label(names::CLUSTER_NAME, cluster.name());
    draft.set_if_absent("/spec/deletion/nodeDeletionTimeoutSeconds", 10);
    draft.set("/status/observedGeneration", machine.generation());
    if is_paused(cluster, machine) {
        draft.condition("Paused", Condition::new("True", "Paused", "the Cluster or the Machine is paused"));
        return draft.finish(planned);
    }
    draft.condition("Paused", Condition::new("False", "NotPaused", ""));
    if !machine.is_deleting() {
        draft.add_finalizer(names::MACHINE_FINALIZER);
        draft.condition("Deleting", Condition::new("False", "NotDeleting", ""));
        if machine.controller().is_none()
            && let Ok(owners) = with_owner(machine, Kind::Cluster, cluster, Ownership::Plain)
        {
            draft.owners(owners);
        }
    }
    if machine.at("/spec/bootstrap/dataSecretName").is_string() {
        draft.condition("BootstrapConfigReady", Condition::new("True", "DataSecretUserProvided", ""));
        infrastructure(view, cluster, machine, &mut draft, planned);
        find_node(view, cluster, machine, &mut draft, planned);
    } else {
        let message = "spec.bootstrap.dataSecretName is not set";
        draft.condition("BootstrapConfigReady", Condition::new("False", "NotReady", message));
    }
    if machine.is_deleting() {
        machine_deletion::decide(view, cluster, machine, &mut draft, planned, drains);
    }
    summary(&mut draft, machine);
    let phase = phase(machine, &draft);
    if draft.at("/status/phase") != phase {
        draft.set("/status/lastUpdated", crate::times::seconds(view.now));
        draft.set("/status/phase", phase);
    }
    draft.finish(planned);
}

fn phase(machine: &Object, draft: &Draft) -> &'static str {
    let is_provisioned = draft.at("/status/initialization/infrastructureProvisioned") == true;
    if machine.is_deleting() {
        "Deleting"
    } else if is_provisioned && !draft.at("/status/nodeRef").is_null() {
        "Running"
    } else if is_provisioned {
        "Provisioned"
    } else {
        // Without a bootstrap provider core shows no `Provisioning` between.
        "Pending"
    }
}

fn infrastructure(
    view: View<'_>,
    cluster: &Object,
    machine: &Arc<Object>,
    draft: &mut Draft,
    planned: &mut Vec<Planned>,
) {
    let (kind, infra) = match view.infrastructure(machine, INFRASTRUCTURE) {
        Infrastructure::Found(kind, infra) => (kind, infra),
        Infrastructure::Missing(_) if machine.is_deleting() => {
            return draft.condition("InfrastructureReady", Condition::new("False", "Deleted", ""));
        }
        Infrastructure::Missing(name) => {
            let message = format!("{name} does not exist");
            return draft.condition("InfrastructureReady", Condition::new("False", "DoesNotExist", message));
        }
        Infrastructure::Foreign => return,
    };
    if infra.annotation(names::PAUSED).is_some() {
        return;
    }
    let owners = match with_owner(infra, Kind::Machine, machine, Ownership::Controller) {
        Ok(owners) => owners,
        Err(error) => {
            let owned = Condition::new("False", "AlreadyOwned", error.to_string());
            return draft.condition("InfrastructureReady", owned);
        }
    };
    // A Machine and its infrastructure machine leave together; nothing is written to one that goes.
    if !machine.is_deleting() {
        let mut infra_draft = Draft::new(Via::Own, kind, infra, view.now);
        infra_draft.label(names::CLUSTER_NAME, cluster.name());
        infra_draft.owners(owners);
        infra_draft.finish(planned);
    }
    let is_provisioned = infra.flag("/status/initialization/provisioned");
    draft.condition("InfrastructureReady", mirror_ready(infra, is_provisioned));
    let provider_id = infra.text("/spec/providerID");
    if !is_provisioned || provider_id.is_empty() {
        return;
    }
    draft.set("/spec/providerID", provider_id);
    draft.set_list("/status/addresses", infra.list("/status/addresses").to_vec());
    let domain = [infra.text("/status/failureDomain"), infra.text("/spec/failureDomain")];
    if let Some(domain) = domain.into_iter().find(|it| !it.is_empty()) {
        draft.set("/status/failureDomain", domain);
    }
    draft.set("/status/initialization/infrastructureProvisioned", true);
}

fn find_node(view: View<'_>, cluster: &Object, machine: &Arc<Object>, draft: &mut Draft, planned: &mut Vec<Planned>) {
    let provider_id = draft.at("/spec/providerID").as_str().unwrap_or_default().to_owned();
    let unknown = |draft: &mut Draft, reason: &str, message: &str| {
        draft.condition("NodeReady", Condition::new("Unknown", reason, message));
        draft.condition("NodeHealthy", Condition::new("Unknown", reason, message));
    };
    if provider_id.is_empty() {
        return unknown(draft, "InspectionFailed", "waiting for spec.providerID of the infrastructure machine");
    }
    let nodes = match view.nodes(cluster) {
        Ok(nodes) => nodes,
        Err(why) => {
            let message = format!("connection to the workload cluster is down: {why}");
            return unknown(draft, "ConnectionDown", &message);
        }
    };
    let Some(found) = nodes.with_provider_id(&provider_id) else {
        if machine.at("/status/nodeRef").is_null() || machine.is_deleting() {
            return unknown(draft, "NodeDoesNotExist", "waiting for a Node with spec.providerID to exist");
        }
        let message =
            format!("Node {} has been deleted while the Machine still exists", machine.text("/status/nodeRef/name"));
        draft.condition("NodeReady", Condition::new("False", "NodeDeleted", message.clone()));
        return draft.condition("NodeHealthy", Condition::new("False", "NodeDeleted", message));
    };
    draft.set_if_absent("/status/nodeRef", json!({ "name": found.name() }));
    let info = found.at("/status/nodeInfo");
    if is_complete_info(info) {
        draft.set("/status/nodeInfo", info.clone());
    }
    let owner = machine.controller().map(|it| (it.kind(), it.name()));
    let by = node::NodeOwner { cluster, owner, machine: Some(machine.name()) };
    node::annotate(view, found, &by, planned);
    if cluster.is_true("ControlPlaneInitialized") {
        draft.condition("NodeReady", node::readiness(found));
        draft.condition("NodeHealthy", node::health(found));
    } else {
        unknown(draft, "InspectionFailed", "waiting for the Cluster's control plane to be initialized");
    }
}

/// The CRD wants all of these; a Node without a kubelet has few of them.
fn is_complete_info(info: &serde_json::Value) -> bool {
    const FIELDS: [&str; 10] = [
        "architecture",
        "bootID",
        "containerRuntimeVersion",
        "kernelVersion",
        "kubeProxyVersion",
        "kubeletVersion",
        "machineID",
        "operatingSystem",
        "osImage",
        "systemUUID",
    ];
    FIELDS.iter().all(|it| info[*it].is_string())
}

/// `Ready` and `Available` from the others. `HealthCheckSucceeded`, set by somebody else, counts where it is False.
fn summary(draft: &mut Draft, machine: &Object) {
    let status = |draft: &Draft, name: &str| {
        let conditions = draft.at("/status/conditions").as_array().cloned().unwrap_or_default();
        let found = conditions.iter().find(|it| it["type"] == name);
        found.and_then(|it| it["status"].as_str()).unwrap_or_default().to_owned()
    };
    let names = ["BootstrapConfigReady", "InfrastructureReady", "NodeHealthy"];
    let mut bad: Vec<&str> = names.into_iter().filter(|it| status(draft, it) == "False").collect();
    if status(draft, "HealthCheckSucceeded") == "False" {
        bad.push("HealthCheckSucceeded");
    }
    let unknown: Vec<&str> =
        names.into_iter().filter(|it| matches!(status(draft, it).as_str(), "" | "Unknown")).collect();
    let ready = if machine.is_deleting() {
        Condition::new("False", "NotReady", "the Machine is being deleted")
    } else if !bad.is_empty() {
        Condition::new("False", "NotReady", format!("not True: {}", bad.join(", ")))
    } else if !unknown.is_empty() {
        Condition::new("Unknown", "ReadyUnknown", format!("not known: {}", unknown.join(", ")))
    } else {
        Condition::new("True", "Ready", "")
    };
    let available = match ready.status {
        "True" => Condition::new("True", "Available", ""),
        _ => Condition::new("False", "NotReady", ""),
    };
    draft.condition("Ready", ready);
    draft.condition("Available", available);
}
