//! The NstanceMachines of a pool: one per instance. Cluster API makes a Machine for each.

use data_encoding::BASE64URL_NOPAD;
use serde_json::{Value, json};

use super::PoolInput;
use crate::{
    api::{
        NstanceMachine, NstanceMachinePool,
        capi::{Machine, Meta as _},
        names::{API_VERSION, finalizer, label},
    },
    decide::observed::{Instance, InstanceStatus},
};

/// What is to be done about the objects that stand for a pool's instances.
#[derive(Debug, Default, PartialEq)]
pub struct MemberPlan {
    /// NstanceMachines to apply, by instance id.
    pub apply: Vec<(String, Value)>,
    /// Machines whose instances are gone: no drain, then delete.
    pub delete_machines: Vec<String>,
    /// NstanceMachines without a Machine whose instances are gone.
    pub delete_members: Vec<String>,
}

/// Compares the instances that the shards report with the objects there are.
pub fn members(input: &PoolInput<'_>, cluster_name: &str) -> MemberPlan {
    let mut plan = MemberPlan::default();
    let group = &input.pool.spec.group;
    for shard in input.all_shards() {
        let Some(picture) = input.shards.get(shard).and_then(|it| it.picture.as_deref()) else { continue };
        for instance in picture.managed(group) {
            if matches!(instance.status, InstanceStatus::Deleted | InstanceStatus::Failed) {
                continue;
            }
            let existing = input.members.iter().find(|it| it.metadata.name.as_deref() == Some(&*instance.id));
            if existing.is_some_and(|it| it.is_terminating()) {
                continue;
            }
            let body =
                member_body(input.pool, input.machine_pool_name(), cluster_name, instance, existing.map(|it| &**it));
            plan.apply.push((instance.id.clone(), body));
        }
    }
    for member in input.members {
        let Some(name) = member.metadata.name.as_deref() else { continue };
        let id = member.spec.instance_id.as_deref().unwrap_or(name);
        let Some(shard) = member.spec.shard.as_deref() else { continue };
        let is_gone = match input.instance(shard, id) {
            Ok(None) => true,
            Ok(Some(it)) => matches!(it.status, InstanceStatus::Deleted | InstanceStatus::Failed),
            Err(_) => false,
        };
        if !is_gone {
            continue;
        }
        let machine = input.machines.iter().find(|it| it.spec.infrastructure_ref.name == name);
        match machine {
            Some(machine) if !machine.is_terminating() => plan.delete_machines.push(name_of(machine)),
            Some(_) => {}
            None if !member.is_terminating() => plan.delete_members.push(name.to_owned()),
            None => {}
        }
    }
    plan
}

impl PoolInput<'_> {
    fn machine_pool_name(&self) -> &str {
        self.machine_pool.metadata.name.as_deref().unwrap_or_default()
    }
}

fn name_of(machine: &Machine) -> String {
    machine.metadata.name.clone().unwrap_or_default()
}

/// The NstanceMachine of a pool's instance. The provider id that a Node was matched by stays; it is spelled as the Node
/// spells it.
pub fn member_body(
    pool: &NstanceMachinePool,
    machine_pool: &str,
    cluster_name: &str,
    instance: &Instance,
    existing: Option<&NstanceMachine>,
) -> Value {
    let adopted = existing.and_then(|it| it.spec.provider_id.clone());
    let mut body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceMachine",
        "metadata": {
            "name": instance.id,
            "namespace": pool.metadata.namespace,
            "labels": {
                label::CLUSTER_NAME: format_label_value(cluster_name),
                label::POOL_NAME: format_label_value(machine_pool),
                label::GROUP: pool.spec.group,
                label::SHARD: instance.shard,
            },
            "finalizers": [finalizer::MACHINE],
            // Without `controller`: that is the Machine's.
            "ownerReferences": [{
                "apiVersion": API_VERSION,
                "kind": "NstanceMachinePool",
                "name": pool.metadata.name,
                "uid": pool.metadata.uid,
            }],
        },
        "spec": {
            "group": pool.spec.group,
            "shard": instance.shard,
            "instanceID": instance.id,
        },
    });
    if let Some(provider_id) = adopted.or_else(|| instance.provider_id.clone()) {
        body["spec"]["providerID"] = Value::from(provider_id);
    }
    if let Some(existing) = existing {
        body["metadata"]["uid"] = json!(existing.metadata.uid);
        body["metadata"]["resourceVersion"] = json!(existing.metadata.resource_version);
    }
    body
}

/// A label value for a name, as Cluster API makes it: the name if it is a valid value, else a hash.
pub fn format_label_value(name: &str) -> String {
    let is_word = |it: u8| it.is_ascii_alphanumeric();
    let bytes = name.as_bytes();
    let is_valid = bytes.len() <= 63
        && bytes.iter().all(|it| is_word(*it) || matches!(it, b'-' | b'_' | b'.'))
        && bytes.first().is_none_or(|it| is_word(*it))
        && bytes.last().is_none_or(|it| is_word(*it));
    if is_valid {
        return name.to_owned();
    }
    format!("hash_{}_z", BASE64URL_NOPAD.encode(&fnv32(name).to_be_bytes()))
}

/// 32-bit FNV-1a.
pub fn fnv32(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
