//! Replicas over shards, and which instances go first.

use std::collections::BTreeMap;

use nstance_core::distribute::{Part, distribute, even};

use super::PoolInput;
use crate::{
    api::{
        capi::{Machine, Meta as _},
        names::annotation,
    },
    decide::pool::wants_machine_pool,
};

/// Most instances that a shard takes as hints.
const MAX_HINTS: usize = 1000;

/// By shard: the instances that go first when the group shrinks there.
pub type Hints = BTreeMap<String, Vec<String>>;

/// Instances whose Machines were chosen (by the autoscaler or a person) or deleted, and which are not leaving yet. A hint
/// is used up once its instance leaves: it must not count for the next decrease.
pub fn hints(input: &PoolInput<'_>, machines: &[impl AsRef<Machine>]) -> Hints {
    let mut hints = Hints::new();
    for machine in machines.iter().map(AsRef::as_ref) {
        if machine.annotation(annotation::DELETE_MACHINE).is_none() && !machine.is_terminating() {
            continue;
        }
        let Some((shard, id)) = place_of(input, machine) else { continue };
        let stays = matches!(input.instance(&shard, &id), Ok(Some(it)) if !it.is_leaving());
        let of_shard = hints.entry(shard).or_default();
        if stays && of_shard.len() < MAX_HINTS && !of_shard.contains(&id) {
            of_shard.push(id);
        }
    }
    hints.retain(|_, ids| !ids.is_empty());
    for ids in hints.values_mut() {
        ids.sort();
    }
    hints
}

/// Which instances a shard is to remove first at this size: those of the present hints, and those that it was told
/// before and that it has not acted on. The hint may have been read by a list that the watch is still behind.
pub fn remove_first(input: &PoolInput<'_>, shard: &str, size: u32, hints: &Hints) -> Vec<String> {
    let mut ids = hints.get(shard).cloned().unwrap_or_default();
    let Some(group) = input.shard_groups.get(shard) else { return ids };
    let picture = input.shards.get(shard).and_then(|it| it.picture.as_deref());
    let is_open = |id: &String| match picture {
        // Nothing is known of the shard, so nothing is taken back.
        None => true,
        Some(picture) => {
            let n_staying = picture.managed(&group.spec.group).filter(|it| !it.is_leaving()).count();
            let is_larger = usize::try_from(size).is_ok_and(|size| size < n_staying);
            is_larger && picture.instances.get(id).is_some_and(|it| !it.is_leaving())
        }
    };
    for id in group.spec.remove_first.iter().filter(|it| is_open(it)) {
        if ids.len() < MAX_HINTS && !ids.contains(id) {
            ids.push(id.clone());
        }
    }
    ids.sort();
    ids
}

/// Machines that were chosen to go and whose instances are leaving. They must be deleted soon: cluster-autoscaler chooses
/// them again and shrinks once more, as long as they have no deletion timestamp.
pub fn used_hints<'a>(input: &'a PoolInput<'_>) -> Vec<&'a Machine> {
    let is_used = |machine: &&Machine| {
        machine.annotation(annotation::DELETE_MACHINE).is_some()
            && !machine.is_terminating()
            && place_of(input, machine)
                .is_some_and(|(shard, id)| matches!(input.instance(&shard, &id), Ok(Some(it)) if it.is_leaving()))
    };
    input.machines.iter().map(AsRef::as_ref).filter(is_used).collect()
}

/// The shard and instance of a pool's Machine: by its NstanceMachine, else by the pictures.
fn place_of(input: &PoolInput<'_>, machine: &Machine) -> Option<(String, String)> {
    let id = &machine.spec.infrastructure_ref.name;
    let member = input.members.iter().find(|it| it.metadata.name.as_deref() == Some(id));
    if let Some(shard) = member.and_then(|it| it.spec.shard.clone()) {
        return Some((shard, id.clone()));
    }
    let found = input
        .shards
        .iter()
        .find(|(_, view)| view.picture.as_ref().is_some_and(|picture| picture.instances.contains_key(id)));
    found.map(|(shard, _)| (shard.clone(), id.clone()))
}

/// How many instances each shard shall have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sizes {
    /// In the order of `spec.shards`.
    Set(Vec<u32>),
    /// An imported pool's shard has not told what it has: anything now could move instances that run.
    Wait { shards: Vec<String> },
}

/// Spreads `total` replicas over the pool's shards.
pub fn sizes(input: &PoolInput<'_>, total: u32, hints: &Hints) -> Sizes {
    let shards = &input.pool.spec.shards;
    let n_placed = shards.iter().filter(|shard| input.shard_groups.contains_key(*shard)).count();
    let is_same_set = n_placed == shards.len() && input.shard_groups.len() == shards.len();
    if !input.shard_groups.is_empty() && !is_same_set && !is_first_time(input) {
        return Sizes::Set(even(total, shards.len()));
    }
    let mut parts = Vec::with_capacity(shards.len());
    let mut unknown = Vec::new();
    for shard in shards {
        let size = match (input.shard_groups.get(shard), seen_size(input, shard)) {
            (Some(group), _) => u32::try_from(group.spec.size).unwrap_or(0),
            (None, Some(size)) => size,
            (None, None) => {
                unknown.push(shard.clone());
                0
            }
        };
        let n_hints = u32::try_from(hints.get(shard).map_or(0, Vec::len)).unwrap_or(u32::MAX);
        parts.push(Part { size, n_hints });
    }
    if unknown.is_empty() {
        return Sizes::Set(distribute(total, &parts));
    }
    if wants_machine_pool(input.pool) { Sizes::Wait { shards: unknown } } else { Sizes::Set(even(total, shards.len())) }
}

/// Whether the pool's parts were being made for the first time when the operator last stopped.
fn is_first_time(input: &PoolInput<'_>) -> bool {
    input.pool.status.as_ref().is_none_or(|it| it.shards.is_empty())
}

/// The group's size as the shard has it; 0 where it has no such group.
fn seen_size(input: &PoolInput<'_>, shard: &str) -> Option<u32> {
    let picture = input.shards.get(shard)?.picture.as_deref()?;
    let size = picture.groups.get(&input.pool.spec.group).map_or(0, |it| it.size);
    Some(u32::try_from(size).unwrap_or(0))
}
