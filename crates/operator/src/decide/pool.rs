//! A pool: how its replicas are spread over the shards, which objects stand for its instances, and what its status says.

mod members;
mod provider_ids;
mod sizes;
mod status;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;

pub use self::{
    members::{MemberPlan, fnv32, format_label_value, member_body, members},
    provider_ids::{ProviderIds, provider_ids, same_last_segment},
    sizes::{Hints, Sizes, hints, remove_first, sizes, used_hints},
    status::{StatusInput, is_unreachable, status},
};
use super::observed::{Instance, ShardView};
use crate::api::{
    NstanceMachine, NstanceMachinePool, NstanceShardGroup,
    capi::{Machine, MachinePool, Meta as _},
    names::{GROUP, annotation},
};

/// What is known about one pool.
pub struct PoolInput<'a> {
    pub pool: &'a NstanceMachinePool,
    pub machine_pool: &'a MachinePool,
    /// By name; a shard that is not configured any more is missing.
    pub shards: &'a BTreeMap<String, ShardView>,
    /// The pool's, by shard.
    pub shard_groups: &'a BTreeMap<String, Arc<NstanceShardGroup>>,
    /// NstanceMachines of the pool.
    pub members: &'a [Arc<NstanceMachine>],
    /// Machines of the pool.
    pub machines: &'a [Arc<Machine>],
    pub now: Timestamp,
}

impl PoolInput<'_> {
    /// The shards of the pool, and those from which its group is being removed.
    pub fn all_shards(&self) -> Vec<&str> {
        let removed = self.shard_groups.keys().filter(|shard| !self.pool.spec.shards.contains(shard));
        self.pool.spec.shards.iter().chain(removed).map(String::as_str).collect()
    }

    /// An instance as the shard's picture has it. `None`: the picture does not have it; `Err`: there is no picture.
    pub fn instance(&self, shard: &str, id: &str) -> Result<Option<&Arc<Instance>>, NoPicture> {
        let picture = self.shards.get(shard).and_then(|it| it.picture.as_deref()).ok_or(NoPicture)?;
        Ok(picture.instances.get(id))
    }
}

/// The shard did not deliver a complete snapshot yet, or is not configured: absence proves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoPicture;

/// The longest name of an object of ours.
const MAX_NAME: usize = 63;

/// The name of a pool's part on a shard. Two long names do not fit: their end becomes a hash.
pub fn shard_group_name(group: &str, shard: &str) -> String {
    let name = format!("{group}--{shard}");
    if name.len() <= MAX_NAME { name } else { format!("{}-{:08x}", &name[..MAX_NAME - 9], fnv32(&name)) }
}

/// Whether this MachinePool refers to this pool.
pub fn refers_to(machine_pool: &MachinePool, pool_name: &str) -> bool {
    let reference = &machine_pool.spec.template.spec.infrastructure_ref;
    reference.kind == "NstanceMachinePool" && reference.api_group == GROUP && reference.name == pool_name
}

/// The pool that a group belongs to, if several pools of a namespace name it: the oldest, ties by name.
pub fn owner_of_group<'a>(
    pools: impl IntoIterator<Item = &'a Arc<NstanceMachinePool>>,
    group: &str,
) -> Option<&'a Arc<NstanceMachinePool>> {
    let age =
        |it: &NstanceMachinePool| (it.metadata.creation_timestamp.as_ref().map(|at| at.0), it.metadata.name.clone());
    pools.into_iter().filter(|it| it.spec.group == group).min_by_key(|it| age(it))
}

/// Whether a MachinePool is made for a pool that has none.
pub fn wants_machine_pool(pool: &NstanceMachinePool) -> bool {
    let is_set = |key| pool.annotation(key) == Some("true");
    is_set(annotation::IMPORTED) || is_set(annotation::CREATE_MACHINE_POOL)
}

#[cfg(test)]
mod tests;
