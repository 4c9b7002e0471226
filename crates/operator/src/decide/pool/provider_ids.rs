//! `spec.providerIDList`: the list by which Cluster API finds Nodes. An id that leaves it costs its Node, within seconds and
//! without a drain, so that an id leaves only when its instance is proven gone.

use std::collections::{BTreeMap, BTreeSet};

use super::PoolInput;
use crate::decide::observed::InstanceStatus;

/// The wanted list, and how much of the present one it gives up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProviderIds {
    pub list: Vec<String>,
    /// Ids that would be dropped although no shard said that their instances are gone.
    pub n_unproven: usize,
}

impl ProviderIds {
    /// Whether so much is given up without proof that a person should see it first: the write is held for a while.
    pub fn is_suspicious(&self, n_present: usize) -> bool {
        1 + n_present / 10 < self.n_unproven
    }
}

/// `has_node` says whether an instance ever had a Node.
pub fn provider_ids(input: &PoolInput<'_>, has_node: impl Fn(&str) -> bool) -> ProviderIds {
    let group = &input.pool.spec.group;
    let present = &input.pool.spec.provider_id_list;
    let mut list = BTreeSet::new();
    // Instances that are proven gone, by the id they are listed with.
    let mut gone: BTreeSet<&str> = BTreeSet::new();
    let id_of: BTreeMap<&str, &str> = input
        .members
        .iter()
        .filter_map(|it| Some((it.metadata.name.as_deref()?, it.spec.provider_id.as_deref()?)))
        .collect();
    let mut is_complete = true;
    for shard in input.all_shards() {
        let Some(picture) = input.shards.get(shard).and_then(|it| it.picture.as_deref()) else {
            is_complete = false;
            // What we know of this shard stays as it is.
            let of_shard = input.members.iter().filter(|it| it.spec.shard.as_deref() == Some(shard));
            let known = of_shard.filter_map(|it| it.spec.provider_id.as_deref());
            list.extend(known.filter(|id| present.iter().any(|it| it == id)).map(str::to_owned));
            continue;
        };
        for instance in picture.managed(group) {
            let adopted = id_of.get(instance.id.as_str()).copied();
            let Some(id) = adopted.or(instance.provider_id.as_deref()) else { continue };
            let is_over = matches!(instance.status, InstanceStatus::Deleted | InstanceStatus::Failed);
            let never_had_node = instance.is_leaving() && !has_node(&instance.id);
            if is_over || instance.is_vm_dead() || never_had_node {
                gone.insert(id);
            } else {
                list.insert(id.to_owned());
            }
        }
        for member in input.members.iter().filter(|it| it.spec.shard.as_deref() == Some(shard)) {
            let id = member.spec.instance_id.as_deref().or(member.metadata.name.as_deref());
            if let (Some(id), Some(provider_id)) = (id, member.spec.provider_id.as_deref())
                && !picture.instances.contains_key(id)
            {
                gone.insert(provider_id);
            }
        }
    }
    if !is_complete {
        // Entries of nobody we know may be instances of the shard that has not told yet.
        let known: BTreeSet<&str> = id_of.values().copied().collect();
        list.extend(present.iter().filter(|id| !known.contains(id.as_str()) && !gone.contains(id.as_str())).cloned());
    }
    let n_unproven = present.iter().filter(|id| !list.contains(*id) && !gone.contains(id.as_str())).count();
    ProviderIds { list: list.into_iter().collect(), n_unproven }
}

/// Two different ids whose last segments are the same: cluster-autoscaler takes them for one.
pub fn same_last_segment(ids: &[String]) -> Option<(&str, &str)> {
    let mut seen: BTreeMap<&str, &str> = BTreeMap::new();
    for id in ids {
        let last = id.rsplit('/').next().unwrap_or(id);
        if let Some(other) = seen.insert(last, id)
            && other != id
        {
            return Some((other, id));
        }
    }
    None
}
