//! What a pool's status says.

use std::collections::BTreeMap;

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};

use super::{PoolInput, same_last_segment};
use crate::{
    api::{
        NstanceShardGroup,
        cluster::Initialization,
        conditions::{Status, find, is_true, kind, set},
        pool::{EffectiveConfig, NodeInfo, NstanceMachinePoolStatus, PoolShard},
    },
    decide::observed::{Reach, ShardView},
};

/// What a status is made from, beside the pool itself.
pub struct StatusInput<'a> {
    pub provider_ids: &'a [String],
    /// Shards of the pool that are not configured.
    pub unknown_shards: &'a [String],
    pub capacity: BTreeMap<String, String>,
    pub node_info: Option<NodeInfo>,
    /// Pods that block drains of the pool: `namespace/name: why`, the first few and how many there are.
    pub blocked: &'a [String],
}

/// How long a shard may be away before objects say so.
const UNREACHABLE_AFTER_SECONDS: i64 = 10;

/// Whether a shard has been away for so long that its objects say so. The reason, if it has.
pub fn is_unreachable(view: Option<&ShardView>, now: Timestamp) -> Option<String> {
    match view.map(|it| &it.reach) {
        Some(Reach::Ready) => None,
        Some(Reach::Down { since, why }) => {
            let away = now.duration_since(*since).as_secs();
            (UNREACHABLE_AFTER_SECONDS <= away).then(|| why.clone())
        }
        Some(Reach::Connecting) | None => None,
    }
}

pub fn status(input: &PoolInput<'_>, of: &StatusInput<'_>) -> NstanceMachinePoolStatus {
    let pool = input.pool;
    let old = pool.status.clone().unwrap_or_default();
    let desired = input.machine_pool.spec.replicas;
    let current = i32::try_from(of.provider_ids.len()).unwrap_or(i32::MAX);
    let groups: Vec<&NstanceShardGroup> =
        pool.spec.shards.iter().filter_map(|shard| input.shard_groups.get(shard)).map(AsRef::as_ref).collect();
    let is_accepted =
        |it: &&NstanceShardGroup| it.status.as_ref().is_some_and(|it| is_true(&it.conditions, kind::CONFIG_VALID));
    let is_ready = old.ready == Some(true) || groups.iter().any(is_accepted);
    let is_static = groups.iter().any(|it| it.status.as_ref().is_some_and(|it| it.is_static == Some(true)));
    let shards = pool.spec.shards.iter().map(|name| shard_status(input, name)).collect();
    let mut conditions = old.conditions.clone();
    conditions_of(&mut conditions, input, of, &groups, (desired, current));
    NstanceMachinePoolStatus {
        observed_generation: pool.metadata.generation,
        observed_owner_generation: input.machine_pool.metadata.generation,
        initialization: if is_ready { Initialization::done() } else { old.initialization },
        ready: Some(is_ready),
        replicas: Some(current),
        desired,
        is_static: if groups.iter().any(|it| it.status.is_some()) { Some(is_static) } else { old.is_static },
        infrastructure_machine_kind: Some("NstanceMachine".to_owned()),
        capacity: of.capacity.clone(),
        node_info: of.node_info.clone(),
        config: effective(&groups).or(old.config),
        shards,
        conditions,
    }
}

fn effective(groups: &[&NstanceShardGroup]) -> Option<EffectiveConfig> {
    groups.iter().find_map(|it| it.status.as_ref()?.config.clone())
}

fn shard_status(input: &PoolInput<'_>, name: &str) -> PoolShard {
    let picture = input.shards.get(name).and_then(|it| it.picture.as_deref());
    let group = picture.and_then(|it| it.groups.get(&input.pool.spec.group));
    PoolShard {
        name: name.to_owned(),
        size: input.shard_groups.get(name).map(|it| it.spec.size),
        replicas: group.map(|it| it.actual),
        ready: group.map(|it| it.ready),
    }
}

fn conditions_of(
    conditions: &mut Vec<Condition>,
    input: &PoolInput<'_>,
    of: &StatusInput<'_>,
    groups: &[&NstanceShardGroup],
    (desired, current): (Option<i32>, i32),
) {
    let generation = input.pool.metadata.generation;
    let mut say = |kind: &str, status: Status, reason: &str, message: String| {
        set(conditions, kind, status, reason, message, generation, input.now);
    };
    let refused: Vec<String> = groups
        .iter()
        .filter_map(|it| {
            let condition = find(&it.status.as_ref()?.conditions, kind::CONFIG_VALID)?;
            (condition.status == "False").then(|| format!("{}: {}", it.spec.shard, condition.message))
        })
        .collect();
    let is_valid = of.unknown_shards.is_empty() && refused.is_empty() && desired.is_some();
    if !of.unknown_shards.is_empty() {
        let message = format!(
            "no shard {} in the operator's config; configured are {}",
            of.unknown_shards.join(", "),
            input.shards.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
        );
        say(kind::CONFIG_VALID, Status::False, "UnknownShard", message);
    } else if !refused.is_empty() {
        say(kind::CONFIG_VALID, Status::False, "Refused", refused.join("; "));
    } else if desired.is_none() {
        let message = "spec.replicas of the MachinePool is not set; sizes stay as they are".to_owned();
        say(kind::CONFIG_VALID, Status::False, "NoReplicas", message);
    } else {
        let managed_by = input
            .machine_pool
            .metadata
            .annotations
            .as_ref()
            .is_some_and(|it| it.contains_key(crate::api::names::annotation::REPLICAS_MANAGED_BY));
        let message = if managed_by {
            "annotation cluster.x-k8s.io/replicas-managed-by is not honoured: spec.replicas of the MachinePool decides"
        } else {
            ""
        };
        say(kind::CONFIG_VALID, Status::True, "Accepted", message.to_owned());
    }
    let unreachable: Vec<String> = input
        .pool
        .spec
        .shards
        .iter()
        .filter_map(|name| Some(format!("{name}: {}", is_unreachable(input.shards.get(name), input.now)?)))
        .collect();
    match unreachable.is_empty() {
        true => say(kind::SHARDS_REACHABLE, Status::True, "Reachable", String::new()),
        false => say(kind::SHARDS_REACHABLE, Status::False, "ShardUnreachable", unreachable.join("; ")),
    }
    let wanted = desired.unwrap_or(current);
    say(
        kind::SCALING_UP,
        (current < wanted).into(),
        if current < wanted { "ScalingUp" } else { "NotScalingUp" },
        String::new(),
    );
    say(
        kind::SCALING_DOWN,
        (wanted < current).into(),
        if wanted < current { "ScalingDown" } else { "NotScalingDown" },
        String::new(),
    );
    let behind: Vec<&str> = groups
        .iter()
        .filter(|it| it.status.as_ref().and_then(|it| it.observed_generation) != it.metadata.generation)
        .map(|it| it.spec.shard.as_str())
        .collect();
    match behind.is_empty() {
        true => say(kind::UP_TO_DATE, Status::True, "UpToDate", String::new()),
        false => {
            say(kind::UP_TO_DATE, Status::False, "WaitingForShards", format!("not yet at {}", behind.join(", ")));
        }
    }
    match of.blocked.is_empty() {
        true => say(kind::DRAIN_BLOCKED, Status::False, "NotBlocked", String::new()),
        false => say(kind::DRAIN_BLOCKED, Status::True, "Blocked", of.blocked.join("; ")),
    }
    match same_last_segment(of.provider_ids) {
        None => say(kind::PROVIDER_IDS_UNIQUE, Status::True, "Unique", String::new()),
        Some((one, other)) => {
            let message = format!(
                "{one} and {other} end alike, which cluster-autoscaler takes for one machine; give its node group discovery \
                 one cluster only"
            );
            say(kind::PROVIDER_IDS_UNIQUE, Status::False, "SameLastSegment", message);
        }
    }
    let n_ready: i32 = input
        .pool
        .spec
        .shards
        .iter()
        .filter_map(|name| {
            input.shards.get(name)?.picture.as_ref()?.groups.get(&input.pool.spec.group).map(|it| it.ready)
        })
        .sum();
    let is_terminating = input.pool.metadata.deletion_timestamp.is_some();
    say(kind::DELETING, is_terminating.into(), if is_terminating { "Deleting" } else { "NotDeleting" }, String::new());
    say(kind::PAUSED, Status::False, "NotPaused", String::new());
    let all_ready = groups.len() == input.pool.spec.shards.len()
        && groups.iter().all(|it| it.status.as_ref().is_some_and(|it| is_true(&it.conditions, kind::READY)));
    let (status, reason, message) = if !is_valid {
        (Status::False, "ConfigInvalid", "see condition ConfigValid".to_owned())
    } else if all_ready && current == wanted {
        (Status::True, "Ready", format!("{n_ready} of {wanted} instances ready"))
    } else if !unreachable.is_empty() {
        (Status::False, "ShardUnreachable", unreachable.join("; "))
    } else {
        (Status::False, "InstancesNotReady", format!("{n_ready} of {wanted} instances ready"))
    };
    say(kind::READY, status, reason, message.clone());
    let is_stalled = !is_valid;
    say(
        kind::RECONCILING,
        (status != Status::True && !is_stalled).into(),
        if status == Status::True { "Done" } else { "Progressing" },
        if status == Status::True { String::new() } else { message.clone() },
    );
    say(kind::STALLED, is_stalled.into(), if is_stalled { "ConfigInvalid" } else { "NotStalled" }, String::new());
}
