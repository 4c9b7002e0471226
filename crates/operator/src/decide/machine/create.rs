//! Asking for an on-demand instance: when, on which shard, and under which request id.

use std::collections::BTreeMap;

use super::Hold;
use crate::{
    api::{
        NstanceMachine,
        capi::{Cluster, Machine, Meta as _},
        names::annotation,
    },
    decide::observed::ShardView,
    ports::InstanceWish,
};

pub struct CreateInput<'a> {
    pub object: &'a NstanceMachine,
    /// The Machine whose infrastructure this is.
    pub machine: Option<&'a Machine>,
    pub cluster: Option<&'a Cluster>,
    /// All configured shards, in their order.
    pub shards: &'a [ShardView],
    /// On-demand machines of the same group that have their shard already. The pictures may not have their instances yet.
    pub assigned: &'a BTreeMap<String, usize>,
}

/// What is asked for. `request_id` and `shard` must be stored with the object before anything is sent: whatever breaks off
/// then, the same request follows, and the server answers it with the same instance.
#[derive(Debug, Clone, PartialEq)]
pub struct CreatePlan {
    pub shard: String,
    pub wish: InstanceWish,
}

/// The request for the instance of an on-demand machine, or why there is none yet.
pub fn create(input: &CreateInput<'_>) -> Result<CreatePlan, Hold> {
    let Some(machine) = input.machine else {
        return Err(Hold::waiting("WaitingForMachine", "no Machine refers to this NstanceMachine yet"));
    };
    let is_provisioned = input
        .cluster
        .and_then(|it| it.status.as_ref()?.initialization.as_ref()?.infrastructure_provisioned)
        .unwrap_or(false);
    if !is_provisioned {
        return Err(Hold::waiting("WaitingForCluster", "the Cluster's infrastructure is not provisioned yet"));
    }
    // An empty name is set: there is nothing to wait for.
    if machine.spec.bootstrap.data_secret_name.is_none() {
        return Err(Hold::waiting("WaitingForBootstrapData", "Machine.spec.bootstrap.dataSecretName is not set yet"));
    }
    let shard = shard(input, machine)?;
    if !input.shards.iter().any(|it| it.name == shard) {
        let names: Vec<&str> = input.shards.iter().map(|it| it.name.as_str()).collect();
        let message = format!("shard {shard} is not in the operator's config; it has {}", names.join(", "));
        return Err(Hold::stalled("UnknownShard", message));
    }
    let wish = request(input.object)
        .ok_or_else(|| Hold::waiting("WaitingForUID", "the object was not stored by an API server yet"))?;
    Ok(CreatePlan { shard, wish })
}

/// What is asked of the shard; the same however often it is asked. The id of the request stays, also after the object was
/// moved to another cluster and has another uid.
pub(super) fn request(object: &NstanceMachine) -> Option<InstanceWish> {
    let request_id = object.annotation(annotation::REQUEST_ID).or(object.metadata.uid.as_deref())?;
    let spec = &object.spec;
    Some(InstanceWish {
        request_id: request_id.to_owned(),
        group: spec.group.clone(),
        instance_type: spec.instance_type.clone(),
        subnet_pool: spec.subnet_pool.clone(),
        vars: spec.vars.clone(),
    })
}

fn shard(input: &CreateInput<'_>, machine: &Machine) -> Result<String, Hold> {
    let fixed = input.object.spec.shard.as_deref();
    let domain = machine.spec.failure_domain.as_deref().filter(|it| !it.is_empty());
    let is_requested = input.object.annotation(annotation::REQUEST_ID).is_some();
    match (domain, fixed) {
        // The request may have been sent already, and `spec.shard` cannot change any more.
        (_, Some(fixed)) if is_requested => Ok(fixed.to_owned()),
        (Some(domain), Some(fixed)) if domain != fixed => Err(Hold::stalled(
            "ShardConflict",
            format!(
                "Machine.spec.failureDomain is {domain}, but spec.shard is {fixed}; make a new object with one of them"
            ),
        )),
        (Some(shard), _) | (None, Some(shard)) => Ok(shard.to_owned()),
        (None, None) => fewest(input),
    }
}

/// The reachable shard that has the group and the fewest on-demand instances of it; the first by name of several.
fn fewest(input: &CreateInput<'_>) -> Result<String, Hold> {
    let group = &input.object.spec.group;
    let candidates = input.shards.iter().filter(|it| it.reach.is_ready()).filter_map(|view| {
        let picture = view.picture.as_deref()?;
        picture.groups.get(group).filter(|it| !it.is_deleting)?;
        let n_present = picture.instances.values().filter(|it| it.on_demand && it.group == *group).count();
        let n_assigned = input.assigned.get(&view.name).copied().unwrap_or(0);
        Some((n_present.max(n_assigned), view.name.as_str()))
    });
    match candidates.min() {
        Some((_, name)) => Ok(name.to_owned()),
        None => Err(Hold::waiting("NoShard", format!("no reachable shard has group {group}"))),
    }
}
