//! Waiting for a group or an instance: what is waited for, and whether one shard has reached it.
//!
//! The decisions are pure ([`GoalState::reaches`], [`GoalState::failure`]); [`follow`] keeps the state up to date from the
//! shard's streams.

mod follow;

use std::collections::BTreeMap;

use nstance_proto::v1::{GroupStatus, InstanceStatusResponse};

pub use self::follow::{GoalUpdate, follow};

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// A group has its size: all members are ready, and none is being removed.
    GroupReady(String),
    /// A group is deleted, and so are all its instances.
    GroupDeleted(String),
    /// An instance exists and its agent has registered.
    InstanceRunning(String),
    InstanceDeleted(String),
}

impl Goal {
    /// The group or instance that it is about.
    pub fn subject(&self) -> &str {
        match self {
            Self::GroupReady(it) | Self::GroupDeleted(it) | Self::InstanceRunning(it) | Self::InstanceDeleted(it) => it,
        }
    }

    pub fn group(&self) -> Option<&str> {
        match self {
            Self::GroupReady(group) | Self::GroupDeleted(group) => Some(group),
            Self::InstanceRunning(_) | Self::InstanceDeleted(_) => None,
        }
    }

    fn concerns(&self, instance: &InstanceStatusResponse) -> bool {
        match self {
            Self::GroupReady(group) | Self::GroupDeleted(group) => instance.group == *group && !instance.on_demand,
            Self::InstanceRunning(id) | Self::InstanceDeleted(id) => instance.instance_id == *id,
        }
    }
}

/// The part of one shard's state that a goal is about.
#[derive(Debug, Clone, Default)]
pub struct GoalState {
    /// Whether the snapshots have been read to their ends: if so, what is not here does not exist.
    pub complete: bool,
    pub group: Option<GroupStatus>,
    pub instances: BTreeMap<String, InstanceStatusResponse>,
}

/// Why a goal will never be reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GoalFailure {
    #[error("{instance} is {status}{}", if message.is_empty() { String::new() } else { format!(": {message}") })]
    Instance { instance: String, status: String, message: String },
    #[error("group {group} is being deleted in {shard}")]
    GroupDeleting { group: String, shard: String },
}

impl GoalState {
    /// Whether the goal is reached in this shard.
    pub fn reaches(&self, goal: &Goal) -> bool {
        if !self.complete {
            return false;
        }
        let status = |id: &String| self.instances.get(id).map(|it| it.status.as_str());
        match goal {
            Goal::GroupReady(_) => self.group.as_ref().is_some_and(is_settled),
            Goal::GroupDeleted(_) => {
                self.group.is_none()
                    && self.instances.values().all(|it| matches!(it.status.as_str(), "deleted" | "failed"))
            }
            Goal::InstanceRunning(id) => status(id) == Some("running"),
            Goal::InstanceDeleted(id) => matches!(status(id), None | Some("deleted")),
        }
    }

    /// Why the goal will never be reached in this shard, if so.
    pub fn failure(&self, goal: &Goal, shard: &str) -> Option<GoalFailure> {
        if !self.complete {
            return None;
        }
        match goal {
            Goal::InstanceRunning(id) => {
                let found = self.instances.get(id);
                let status = found.map_or("deleted", |it| it.status.as_str());
                matches!(status, "failed" | "deleting" | "deleted").then(|| GoalFailure::Instance {
                    instance: id.clone(),
                    status: status.to_owned(),
                    message: found.map(|it| it.failure_message.clone()).unwrap_or_default(),
                })
            }
            Goal::GroupReady(group) => {
                let is_deleting = self.group.as_ref().is_none_or(|it| it.deleting);
                is_deleting.then(|| GoalFailure::GroupDeleting { group: group.clone(), shard: shard.to_owned() })
            }
            Goal::GroupDeleted(_) | Goal::InstanceDeleted(_) => None,
        }
    }
}

fn is_settled(group: &GroupStatus) -> bool {
    is_fully_ready(group) && group.draining_size == 0 && !group.deleting
}

/// Whether a group has as many members as asked for, and all are ready.
pub fn is_fully_ready(group: &GroupStatus) -> bool {
    group.actual_size == group.size && group.ready_size == group.size
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(size: i32, ready: i32, actual: i32) -> GroupStatus {
        GroupStatus { key: "workers".into(), size, ready_size: ready, actual_size: actual, ..GroupStatus::default() }
    }

    fn state(group: Option<GroupStatus>, instances: &[(&str, &str)]) -> GoalState {
        let instance = |(id, status): &(&str, &str)| {
            let (instance_id, status) = ((*id).to_owned(), (*status).to_owned());
            let it = InstanceStatusResponse { instance_id, status, ..InstanceStatusResponse::default() };
            (it.instance_id.clone(), it)
        };
        GoalState { complete: true, group, instances: instances.iter().map(instance).collect() }
    }

    #[test]
    fn a_group_is_ready_when_all_members_are_and_none_is_leaving() {
        let goal = Goal::GroupReady("workers".into());
        let leaving = GroupStatus { draining_size: 1, ..group(5, 5, 5) };
        assert!(!state(Some(group(5, 3, 5)), &[]).reaches(&goal));
        assert!(!state(Some(leaving), &[("i0", "draining")]).reaches(&goal));
        assert!(state(Some(group(5, 5, 5)), &[]).reaches(&goal));
        let unfinished = GoalState { complete: false, ..state(Some(group(5, 5, 5)), &[]) };
        assert!(!unfinished.reaches(&goal) && unfinished.failure(&goal, "dev-1").is_none(), "an unfinished snapshot");
        let absent = state(None, &[]).failure(&goal, "dev-1").unwrap();
        assert_eq!(absent.to_string(), "group workers is being deleted in dev-1");
    }

    #[test]
    fn a_group_is_deleted_with_its_last_instance() {
        let goal = Goal::GroupDeleted("workers".into());
        assert!(!state(Some(group(0, 0, 1)), &[]).reaches(&goal));
        assert!(!state(None, &[("i1", "deleting")]).reaches(&goal));
        assert!(state(None, &[("i1", "deleted"), ("i2", "failed")]).reaches(&goal));
    }

    #[test]
    fn an_instance_that_failed_will_never_run() {
        let goal = Goal::InstanceRunning("i1".into());
        assert!(state(None, &[("i1", "pending")]).failure(&goal, "dev-1").is_none());
        let mut failed = state(None, &[("i1", "failed")]);
        assert_eq!(failed.failure(&goal, "dev-1").unwrap().to_string(), "i1 is failed");
        failed.instances.get_mut("i1").unwrap().failure_message = "no quota".into();
        assert_eq!(failed.failure(&goal, "dev-1").unwrap().to_string(), "i1 is failed: no quota");
        assert_eq!(state(None, &[]).failure(&goal, "dev-1").unwrap().to_string(), "i1 is deleted");
        assert!(state(None, &[]).reaches(&Goal::InstanceDeleted("i1".into())));
    }
}
