//! A pool's part on one shard: whether the shard must be told, and what the status says.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{
    observed::{Group, InstanceStatus, Picture, ShardView},
    pool::is_unreachable,
};
use crate::{
    api::{
        NstanceShardGroup,
        conditions::{Status, kind, set},
        pool::EffectiveConfig,
        shard_group::{NstanceShardGroupSpec, NstanceShardGroupStatus},
    },
    ports::{Answer, GroupWish, Progress},
};

/// What the shard is asked for.
pub fn wish(spec: &NstanceShardGroupSpec, seen: Option<&Group>) -> GroupWish {
    GroupWish {
        key: spec.group.clone(),
        size: spec.size,
        template: spec.template.clone(),
        instance_type: spec.instance_type.clone(),
        subnet_pool: spec.subnet_pool.clone(),
        vars: spec.vars.clone(),
        preferred_victims: spec.remove_first.clone(),
        seen_etag: seen.map(|it| it.etag.clone()).unwrap_or_default(),
    }
}

/// Whether the group at the shard is what the spec asks for.
pub fn is_as_asked(spec: &NstanceShardGroupSpec, group: &Group) -> bool {
    if group.size != spec.size || group.is_deleting {
        return false;
    }
    match &group.layer {
        Some(layer) => {
            layer.template == spec.template
                && layer.instance_type == spec.instance_type
                && layer.subnet_pool == spec.subnet_pool
                && layer.vars == spec.vars
        }
        None => {
            let same = |asked: &Option<String>, is: &str| asked.as_deref().is_none_or(|asked| asked == is);
            same(&spec.template, &group.template)
                && same(&spec.instance_type, &group.instance_type)
                && same(&spec.subnet_pool, &group.subnet_pool)
                && spec.vars.iter().all(|(key, value)| group.vars.get(key) == Some(value))
        }
    }
}

/// Whether the shard must be told: the spec changed since it was told, or the group there is another than asked for.
pub fn must_push(object: &NstanceShardGroup, seen: Option<&Group>) -> bool {
    let observed = object.status.as_ref().and_then(|it| it.observed_generation);
    observed != object.metadata.generation || seen.is_none_or(|group| !is_as_asked(&object.spec, group))
}

/// How a push stands, and the group as the shard has it.
pub struct StatusInput<'a> {
    pub object: &'a NstanceShardGroup,
    pub view: Option<&'a ShardView>,
    pub group: Option<&'a Group>,
    /// `None`: nothing had to be pushed.
    pub progress: Option<&'a Progress>,
    pub now: Timestamp,
}

pub fn status(input: &StatusInput<'_>) -> NstanceShardGroupStatus {
    let old = input.object.status.clone().unwrap_or_default();
    let generation = input.object.metadata.generation;
    let answered = match input.progress {
        Some(Progress::Answered(Answer::Group(group))) => Some(&**group),
        _ => None,
    };
    let is_in_force = input.progress.is_none() || answered.is_some();
    // The answer is newer than the picture only until the picture has its etag.
    let group = answered.or(input.group);
    let mut conditions = old.conditions.clone();
    let mut say = |kind: &str, status: Status, reason: &str, message: String| {
        set(&mut conditions, kind, status, reason, message, generation, input.now);
    };
    match is_unreachable(input.view, input.now) {
        Some(why) => say(kind::SHARD_REACHABLE, Status::False, "ShardUnreachable", why),
        None if input.view.is_none() => {
            let message = format!("shard {} is not in the operator's config", input.object.spec.shard);
            say(kind::SHARD_REACHABLE, Status::False, "UnknownShard", message);
        }
        None if input.view.is_some_and(|it| it.reach.is_ready()) => {
            say(kind::SHARD_REACHABLE, Status::True, "Reachable", String::new());
        }
        None => {}
    }
    let mut refusal = None;
    match input.progress {
        Some(Progress::Refused(error)) => {
            refusal = Some(error.message.clone());
            say(kind::CONFIG_VALID, Status::False, "Refused", error.message.clone());
        }
        _ if is_in_force => say(kind::CONFIG_VALID, Status::True, "Accepted", String::new()),
        _ => {}
    }
    let is_settled =
        group.is_some_and(|it| it.size == input.object.spec.size && it.actual == it.size && it.registered == it.size);
    let counts = group.map_or_else(
        || "the shard has not told of the group yet".to_owned(),
        |it| format!("{} of {} instances registered", it.registered, input.object.spec.size),
    );
    let (ready, reason, message) = match (&refusal, is_in_force && is_settled) {
        (Some(message), _) => (Status::False, "ConfigInvalid", message.clone()),
        (None, true) => (Status::True, "Ready", String::new()),
        (None, false) => match input.progress {
            Some(Progress::Down(why)) => (Status::False, "ShardUnreachable", why.clone()),
            Some(Progress::Retrying(error)) => (Status::False, "Retrying", error.message.clone()),
            Some(Progress::NotConfigured) => {
                let message = format!("shard {} is not in the operator's config", input.object.spec.shard);
                (Status::False, "UnknownShard", message)
            }
            _ => {
                let holds = group.map(|it| it.holds.join("; ")).unwrap_or_default();
                let message = if holds.is_empty() { counts } else { format!("{counts}; {holds}") };
                (Status::False, "InstancesNotReady", message)
            }
        },
    };
    say(kind::READY, ready, reason, message.clone());
    let is_stalled = refusal.is_some();
    say(
        kind::RECONCILING,
        (ready != Status::True && !is_stalled).into(),
        if ready == Status::True { "Done" } else { "Progressing" },
        if ready == Status::True { String::new() } else { message },
    );
    say(kind::STALLED, is_stalled.into(), if is_stalled { "ConfigInvalid" } else { "NotStalled" }, String::new());
    let provider_ids =
        input.view.and_then(|it| it.picture.as_deref()).map(|it| provider_ids(it, &input.object.spec.group));
    NstanceShardGroupStatus {
        observed_generation: if is_in_force { generation } else { old.observed_generation },
        replicas: group.map(|it| it.actual).or(old.replicas),
        ready_replicas: group.map(|it| it.ready).or(old.ready_replicas),
        provider_ids: provider_ids.unwrap_or(old.provider_ids),
        is_static: group.map(|it| it.is_static).or(old.is_static),
        config: group.map(effective).or(old.config),
        etag: group.map(|it| it.etag.clone()).filter(|it| !it.is_empty()).or(old.etag),
        last_sync_time: if answered.is_some() { Some(Time(input.now)) } else { old.last_sync_time },
        conditions: sorted(conditions),
    }
}

fn sorted(mut conditions: Vec<Condition>) -> Vec<Condition> {
    conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    conditions
}

fn provider_ids(picture: &Picture, group: &str) -> Vec<String> {
    let mut ids: Vec<String> = picture.managed(group).filter_map(|it| it.provider_id.clone()).collect();
    ids.sort();
    ids
}

fn effective(group: &Group) -> EffectiveConfig {
    let set = |text: &str| Some(text.to_owned()).filter(|it| !it.is_empty());
    EffectiveConfig {
        template: set(&group.template),
        subnet_pool: set(&group.subnet_pool),
        instance_type: set(&group.instance_type),
        vars: group.vars.clone(),
    }
}

/// What a deletion waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removal {
    /// Nothing more: the finalizer goes.
    Done,
    /// The shard is not in the operator's config any more: its VMs stay.
    ShardRemoved,
    /// The shard must be told to delete the group, or its answer is waited for.
    Delete,
    /// It was told; instances are still draining.
    Draining { n_instances: usize },
}

/// `deleted`: the shard has answered that the group is deleted.
pub fn removal(spec: &NstanceShardGroupSpec, view: Option<&ShardView>, deleted: bool) -> Removal {
    let Some(view) = view else { return Removal::ShardRemoved };
    if !deleted {
        return Removal::Delete;
    }
    let Some(picture) = view.picture.as_deref() else { return Removal::Delete };
    match picture.groups.get(&spec.group) {
        // A group of the config lives on, at its configured size.
        Some(group) if group.is_static => Removal::Done,
        group => {
            let lives = |it: &InstanceStatus| !matches!(it, InstanceStatus::Deleted | InstanceStatus::Failed);
            let n_instances = picture.managed(&spec.group).filter(|it| lives(&it.status)).count();
            if 0 < n_instances || group.is_some_and(|it| !it.is_deleting && 0 < it.actual) {
                Removal::Draining { n_instances }
            } else {
                Removal::Done
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::decide::observed::{GroupLayer, Instance, Reach};

    fn spec(size: i32) -> NstanceShardGroupSpec {
        NstanceShardGroupSpec { group: "web".into(), shard: "a".into(), size, ..NstanceShardGroupSpec::default() }
    }

    fn group(size: i32) -> Group {
        Group {
            key: "web".into(),
            size,
            actual: size,
            registered: size,
            layer: Some(GroupLayer { size: Some(size), ..GroupLayer::default() }),
            ..Group::default()
        }
    }

    fn object(size: i32, observed: Option<i64>) -> NstanceShardGroup {
        let mut object = NstanceShardGroup { spec: spec(size), ..NstanceShardGroup::default() };
        object.metadata.generation = Some(3);
        object.status =
            Some(NstanceShardGroupStatus { observed_generation: observed, ..NstanceShardGroupStatus::default() });
        object
    }

    #[test]
    fn a_shard_is_told_when_the_spec_changed_or_the_group_did() {
        assert!(must_push(&object(2, Some(2)), Some(&group(2))), "the spec is newer");
        assert!(must_push(&object(2, Some(3)), Some(&group(5))), "somebody scaled at the shard");
        assert!(must_push(&object(2, Some(3)), None), "the group is gone there");
        assert!(!must_push(&object(2, Some(3)), Some(&group(2))));
        let mut with_var = group(2);
        with_var.layer.as_mut().unwrap().vars.insert("A".into(), "1".into());
        assert!(must_push(&object(2, Some(3)), Some(&with_var)), "an override that the pool does not have");
    }

    #[test]
    fn a_refused_group_says_why_and_does_not_count_as_observed() {
        let error = nstance_client::ShardError::new("a", tonic::Code::InvalidArgument, "template nope does not exist");
        let (object, progress) = (object(2, Some(2)), Progress::Refused(error));
        let input = StatusInput {
            object: &object,
            view: None,
            group: None,
            progress: Some(&progress),
            now: Timestamp::UNIX_EPOCH,
        };
        let status = status(&input);
        assert_eq!(status.observed_generation, Some(2));
        let valid = crate::api::conditions::find(&status.conditions, kind::CONFIG_VALID).unwrap();
        assert_eq!((valid.status.as_str(), valid.message.as_str()), ("False", "template nope does not exist"));
    }

    #[test]
    fn a_group_is_removed_when_its_last_instance_is_gone() {
        let instance =
            Instance { id: "i".into(), group: "web".into(), status: InstanceStatus::Draining, ..Instance::default() };
        let mut picture = Picture::default();
        picture.instances.insert("i".into(), Arc::new(instance));
        let view = |picture: &Picture| ShardView {
            name: "a".into(),
            reach: Reach::Ready,
            picture: Some(Arc::new(picture.clone())),
            last_contact: None,
        };
        assert_eq!(removal(&spec(0), None, false), Removal::ShardRemoved);
        assert_eq!(removal(&spec(0), Some(&view(&picture)), false), Removal::Delete);
        assert_eq!(removal(&spec(0), Some(&view(&picture)), true), Removal::Draining { n_instances: 1 });
        picture.instances.clear();
        assert_eq!(removal(&spec(0), Some(&view(&picture)), true), Removal::Done);
        let blind = ShardView { picture: None, ..view(&picture) };
        assert_eq!(removal(&spec(0), Some(&blind), true), Removal::Delete, "nothing is proven without a picture");
    }
}
