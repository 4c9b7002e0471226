//! NstanceMachines: instances that were asked for one by one, and members of pools.
//!
//! [`create`] asks for an instance, [`member`] says what becomes of a pool's member and its Machine, [`remove`] when an
//! NstanceMachine may go, [`status`] what it shows.

mod create;

mod member;

mod remove;

mod status;

use std::sync::Arc;

pub use self::{
    create::{CreateInput, CreatePlan, create},
    member::{HookChange, MemberInput, MemberPlan, member},
    remove::{Removal, RemovalInput, removal},
    status::{NodeView, OURS, StatusInput, status},
};
use crate::{
    api::{
        NstanceMachine,
        capi::{Machine, Meta as _},
        names::label,
    },
    decide::observed::{Instance, InstanceStatus, ShardView},
    ports::{Answer, Progress},
};

/// Why nothing can be done about an object now, as a condition says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hold {
    pub reason: &'static str,
    pub message: String,
    /// It does not pass by itself.
    pub is_stalled: bool,
}

impl Hold {
    pub fn waiting(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), is_stalled: false }
    }

    pub fn stalled(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), is_stalled: true }
    }
}

/// What is known of the instance of an NstanceMachine.
#[derive(Debug, Clone, PartialEq)]
pub enum InstanceView {
    /// None was asked for yet, or the answer is still to come.
    Unnamed,
    Present(Arc<Instance>),
    /// Its shard proved that it does not exist any more.
    Gone,
    /// Its shard has not told, or is not configured.
    Unknown,
}

impl InstanceView {
    pub fn instance(&self) -> Option<&Instance> {
        match self {
            Self::Present(instance) => Some(instance),
            Self::Unnamed | Self::Gone | Self::Unknown => None,
        }
    }

    pub fn is_gone(&self) -> bool {
        *self == Self::Gone
    }
}

/// Whether it stands for an instance of a pool. Others are on-demand machines.
pub fn is_pool_member(object: &NstanceMachine) -> bool {
    object.label(label::POOL_NAME).is_some()
}

/// Whether a Machine's infrastructure is the NstanceMachine of this name.
pub fn refers_to(machine: &Machine, name: &str) -> bool {
    machine.spec.infrastructure_ref.kind == "NstanceMachine" && machine.spec.infrastructure_ref.name == name
}

/// The instance of an NstanceMachine. `asked` is what its shard answered to a question for this very instance; it is needed
/// for on-demand instances only: their ids come from an answer that may be ahead of the picture, so that absence from the
/// picture does not prove anything. Members of pools were made from the picture.
pub fn instance_view(object: &NstanceMachine, shard: Option<&ShardView>, asked: Option<&Progress>) -> InstanceView {
    let Some(id) = object.spec.instance_id.as_deref() else { return InstanceView::Unnamed };
    let Some(picture) = shard.and_then(|it| it.picture.as_deref()) else { return InstanceView::Unknown };
    match picture.instances.get(id) {
        // The provider refused to make it; the pool has another one for it.
        Some(instance) if instance.status == InstanceStatus::Failed && is_pool_member(object) => InstanceView::Gone,
        Some(instance) => present(instance.clone()),
        None if is_pool_member(object) => InstanceView::Gone,
        None => match asked {
            Some(Progress::Answered(Answer::InstanceStatus(instance))) => present(Arc::new((**instance).clone())),
            Some(Progress::Refused(error)) if error.code == tonic::Code::NotFound => InstanceView::Gone,
            _ => InstanceView::Unknown,
        },
    }
}

fn present(instance: Arc<Instance>) -> InstanceView {
    if instance.status == InstanceStatus::Deleted { InstanceView::Gone } else { InstanceView::Present(instance) }
}

/// Whether an on-demand instance is to be asked for by its id: the picture does not have it.
pub fn must_ask(object: &NstanceMachine, shard: Option<&ShardView>) -> bool {
    let Some(id) = object.spec.instance_id.as_deref() else { return false };
    let picture = shard.and_then(|it| it.picture.as_deref());
    !is_pool_member(object) && picture.is_some_and(|it| !it.instances.contains_key(id))
}

#[cfg(test)]
mod tests;
