//! MachinePools: readiness and provider ids from the infrastructure pool, Nodes by provider id, one Machine for each
//! infrastructure machine, and the deletion of Nodes whose id left the list.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use serde_json::Value;

use super::{
    cluster::{delete_object, node_reference},
    names, node, pool_machines,
    view::{Infrastructure, Nodes, View, is_paused, mirror_ready},
};
use crate::{
    draft::{Condition, Draft},
    effect::{Planned, Via},
    kinds::Kind,
    object::{Object, Ownership, with_owner},
};

const INFRASTRUCTURE: &str = "/spec/template/spec/infrastructureRef";

/// Where this kind still keeps its conditions; of the newer list it fills `Paused` only.
const CONDITIONS: &str = "/status/deprecated/v1beta1/conditions";
const READY_NODES: &str = "/status/deprecated/v1beta1/readyReplicas";

pub(crate) fn decide(view: View<'_>, pool: &Arc<Object>, planned: &mut Vec<Planned>) {
    // Without its Cluster a MachinePool is left alone, also while it is being deleted.
    let Some(cluster) = view.cluster_of(pool) else { return };
    let mut draft = Draft::new(Via::Own, Kind::MachinePool, pool, view.now);
    set_defaults(view, pool, &mut draft);
    draft.set("/status/observedGeneration", pool.generation());
    if is_paused(cluster, pool) {
        draft.condition("Paused", Condition::new("True", "Paused", "the Cluster or the MachinePool is paused"));
        return draft.finish(planned);
    }
    draft.condition("Paused", Condition::new("False", "NotPaused", ""));
    if pool.is_deleting() {
        delete(view, cluster, pool, &mut draft, planned);
    } else {
        draft.add_finalizer(names::POOL_FINALIZER);
        if let Ok(owners) = with_owner(pool, Kind::Cluster, cluster, Ownership::Plain) {
            draft.owners(owners);
        }
        bootstrap(&mut draft);
        infrastructure(view, cluster, pool, &mut draft, planned);
    }
    let phase = phase(pool, &draft);
    draft.set("/status/phase", phase);
    draft.finish(planned);
}

/// What the admission webhook of Cluster API fills in. It does so before the object is stored; this comes shortly after.
fn set_defaults(view: View<'_>, pool: &Object, draft: &mut Draft) {
    draft.label(names::CLUSTER_NAME, pool.text("/spec/clusterName"));
    draft.set_if_absent("/spec/template/spec/deletion/nodeDeletionTimeoutSeconds", 10);
    if pool.number("/spec/replicas").is_none() {
        let limit = |name: &str| pool.annotation(name).and_then(|it| it.parse::<i64>().ok());
        let replicas = match (limit(names::AUTOSCALER_MIN), limit(names::AUTOSCALER_MAX)) {
            (Some(min), Some(max)) if min <= max => {
                view.replicas.get(pool.uid()).map_or(min, |before| (*before).clamp(min, max))
            }
            _ => 1,
        };
        draft.set("/spec/replicas", replicas);
    }
}

fn bootstrap(draft: &mut Draft) {
    // An empty name counts as set: such machines need no bootstrap data.
    if draft.at("/spec/template/spec/bootstrap/dataSecretName").is_string() {
        draft.set("/status/initialization/bootstrapDataSecretCreated", true);
        old_condition(draft, "BootstrapReady", Condition::new("True", "DataSecretProvided", ""));
    }
}

fn old_condition(draft: &mut Draft, name: &str, condition: Condition) {
    draft.condition_at(CONDITIONS, name, condition, None);
}

fn phase(pool: &Object, draft: &Draft) -> &'static str {
    if pool.is_deleting() {
        return "Deleting";
    }
    if draft.at("/status/initialization/infrastructureProvisioned") != true {
        let has_bootstrap = draft.at("/status/initialization/bootstrapDataSecretCreated") == true;
        return if has_bootstrap { "Provisioning" } else { "Pending" };
    }
    // The phase counts Nodes, also where `readyReplicas` counts Machines.
    let n_ready = draft.at(READY_NODES).as_i64().unwrap_or(0);
    match draft.at("/spec/replicas").as_i64().unwrap_or(0).cmp(&n_ready) {
        std::cmp::Ordering::Equal => "Running",
        std::cmp::Ordering::Greater => "ScalingUp",
        std::cmp::Ordering::Less => "ScalingDown",
    }
}

fn infrastructure(
    view: View<'_>,
    cluster: &Arc<Object>,
    pool: &Arc<Object>,
    draft: &mut Draft,
    planned: &mut Vec<Planned>,
) {
    let (kind, infra) = match view.infrastructure(pool, INFRASTRUCTURE) {
        Infrastructure::Found(kind, infra) => (kind, infra),
        Infrastructure::Missing(name) => {
            let missing = Condition::new("False", "IncorrectExternalRef", format!("{name} does not exist"));
            return old_condition(draft, "InfrastructureReady", missing);
        }
        Infrastructure::Foreign => return,
    };
    if infra.annotation(names::PAUSED).is_some() {
        return;
    }
    let owners = match with_owner(infra, Kind::MachinePool, pool, Ownership::Controller) {
        Ok(owners) => owners,
        Err(error) => {
            let owned = Condition::new("False", "AlreadyOwned", error.to_string());
            return old_condition(draft, "InfrastructureReady", owned);
        }
    };
    let mut infra_draft = Draft::new(Via::Own, kind, infra, view.now);
    infra_draft.label(names::CLUSTER_NAME, cluster.name());
    infra_draft.owners(owners);
    infra_draft.finish(planned);
    if infra.is_deleting() {
        return;
    }
    // The older readiness field is what counts for pools; `initialization.provisioned` alone does nothing.
    let is_ready = infra.flag("/status/ready");
    old_condition(draft, "InfrastructureReady", mirror_ready(infra, is_ready));
    if is_ready {
        draft.set("/status/initialization/infrastructureProvisioned", true);
    }
    let nodes = match view.nodes(cluster) {
        Ok(nodes) => nodes,
        Err(why) => {
            let message = format!("connection to the workload cluster is down: {why}");
            return old_condition(draft, "ReplicasReady", Condition::new("False", "ClusterNotConnected", message));
        }
    };
    let has_machines = pool_machines::decide(view, cluster, pool, infra, nodes, planned);
    if !is_ready {
        return;
    }
    copy_provider_ids(infra, draft);
    node_refs(view, cluster, pool, nodes, draft, planned);
    replicas(view, pool, has_machines, draft);
}

fn copy_provider_ids(infra: &Object, draft: &mut Draft) {
    if let Some(replicas) = infra.number("/status/replicas") {
        draft.set("/status/replicas", replicas);
    }
    let provider_ids = infra.list("/spec/providerIDList");
    if provider_ids.is_empty() && draft.at("/status/replicas").as_i64().unwrap_or(0) != 0 {
        return; // ignored: the old list stays
    }
    draft.set_list("/spec/providerIDList", provider_ids.to_vec());
}

fn node_refs(
    view: View<'_>,
    cluster: &Arc<Object>,
    pool: &Arc<Object>,
    nodes: &Nodes,
    draft: &mut Draft,
    planned: &mut Vec<Planned>,
) {
    let listed: Vec<String> = draft
        .at("/spec/providerIDList")
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|it| Some(it.as_str()?.to_owned()))
        .collect();
    // The last id of a pool that still wants machines: nothing is concluded, its Node stays.
    if listed.is_empty() && draft.at("/spec/replicas").as_i64() != Some(0) {
        return;
    }
    delete_retired_nodes(cluster, pool, nodes, &listed, planned);
    let found: Vec<&Arc<Object>> = listed.iter().filter_map(|id| nodes.with_provider_id(id)).collect();
    if found.is_empty() && !listed.is_empty() {
        return; // no Node at all yet: the references stay as they are
    }
    draft.set_list("/status/nodeRefs", found.iter().map(|it| node_reference(it)).collect());
    let n_ready = found.iter().filter(|it| it.is_true("Ready")).count();
    draft.set(READY_NODES, n_ready);
    draft.set("/status/deprecated/v1beta1/availableReplicas", n_ready);
    let owner = node::NodeOwner { cluster, owner: Some((Kind::MachinePool.kind(), pool.name())), machine: None };
    for it in &found {
        node::annotate(view, it, &owner, planned);
    }
    let is_complete = draft.at("/status/replicas").as_u64() == u64::try_from(n_ready).ok();
    let condition = if is_complete && found.len() == n_ready {
        Condition::new("True", "ReplicasReady", "")
    } else {
        Condition::new("False", "WaitingForReplicasReady", "")
    };
    old_condition(draft, "ReplicasReady", condition);
}

/// Deletes the Nodes that the status names and whose id the list no longer has.
fn delete_retired_nodes(cluster: &Object, pool: &Object, nodes: &Nodes, listed: &[String], planned: &mut Vec<Planned>) {
    let listed: BTreeSet<&str> = listed.iter().map(String::as_str).collect();
    for reference in pool.list("/status/nodeRefs") {
        let name = reference["name"].as_str().unwrap_or_default();
        let Some(retired) = nodes.named(name) else { continue };
        let provider_id = retired.text("/spec/providerID");
        if !provider_id.is_empty() && !listed.contains(provider_id) {
            node::delete(cluster, retired, planned);
        }
    }
}

fn replicas(view: View<'_>, pool: &Object, has_machines: bool, draft: &mut Draft) {
    if !has_machines {
        for field in ["readyReplicas", "availableReplicas"] {
            let replicas = draft.at("/status/replicas").clone();
            draft.set(&format!("/status/{field}"), if replicas.is_null() { Value::from(0) } else { replicas });
        }
        let desired = draft.at("/spec/replicas").clone();
        return draft.set("/status/upToDateReplicas", desired);
    }
    let machines: Vec<_> = pool_machines::machines_of(view, pool).collect();
    for (field, condition) in
        [("readyReplicas", "Ready"), ("availableReplicas", "Available"), ("upToDateReplicas", "UpToDate")]
    {
        draft.set(&format!("/status/{field}"), machines.iter().filter(|it| it.is_true(condition)).count());
    }
}

/// The infrastructure pool goes first; Nodes stay, as their ids are all still listed. A workload cluster that does not
/// answer is needed for pools with Nodes, but only for so long.
fn delete(view: View<'_>, cluster: &Arc<Object>, pool: &Arc<Object>, draft: &mut Draft, planned: &mut Vec<Planned>) {
    if let Infrastructure::Found(kind, infra) = view.infrastructure(pool, INFRASTRUCTURE) {
        return delete_object(kind, infra, planned);
    }
    let has_nodes = !pool.list("/status/nodeRefs").is_empty();
    if has_nodes && !is_node_deletion_over(view, pool, "/spec/template/spec/deletion/nodeDeletionTimeoutSeconds") {
        let Ok(nodes) = view.nodes(cluster) else { return };
        let listed: Vec<String> = pool.texts("/spec/providerIDList").into_iter().map(str::to_owned).collect();
        delete_retired_nodes(cluster, pool, nodes, &listed, planned);
    }
    draft.drop_finalizer(names::POOL_FINALIZER);
}

/// Whether the time in which Nodes are to be deleted has passed since the object's deletion; 0 means never.
pub(crate) fn is_node_deletion_over(view: View<'_>, object: &Object, pointer: &str) -> bool {
    let timeout = u64::try_from(object.number(pointer).unwrap_or(10)).unwrap_or(0);
    timeout != 0
        && object
            .time("/metadata/deletionTimestamp")
            .is_some_and(|since| Duration::from_secs(timeout) < view.now.since(since))
}
