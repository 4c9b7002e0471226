//! When an NstanceMachine that is being deleted may go: its finalizer stays until its instance is proven absent.

use tonic::Code;

use super::{InstanceView, create::request, is_pool_member};
use crate::{
    api::{
        NstanceMachine, NstanceMachinePool,
        capi::Meta as _,
        conditions::{self, kind},
        names::annotation,
        pool::DeletionPolicy,
    },
    decide::observed::InstanceStatus,
    ports::{InstanceWish, Progress},
};

pub struct RemovalInput<'a> {
    pub object: &'a NstanceMachine,
    pub view: &'a InstanceView,
    /// Whether the operator has this object's shard in its config.
    pub is_shard_configured: bool,
    /// How the request for the instance stands, if it was repeated to learn the id.
    pub created: Option<&'a Progress>,
    /// Of a member: its pool, if that is still there.
    pub pool: Option<&'a NstanceMachinePool>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Removal {
    /// Nothing is left of it: the finalizer goes.
    Drop,
    /// Its shard is not in the config any more: the finalizer goes, the instance stays.
    ShardRemoved,
    /// The instance may exist, but its id is not known: the request is repeated.
    LearnId(InstanceWish),
    Delete {
        id: String,
    },
    /// A member's instance goes by another way; until it is gone there is nothing to ask.
    Wait,
}

pub fn removal(input: &RemovalInput<'_>) -> Removal {
    let object = input.object;
    let status = object.status.as_ref();
    let is_deleted = status.is_some_and(|it| conditions::is_true(&it.conditions, kind::SERVER_DELETED));
    // The provider refused to make a failed one: there is no VM.
    let is_failed = input.view.instance().is_some_and(|it| it.status == InstanceStatus::Failed);
    if is_deleted || is_failed || input.view.is_gone() {
        return Removal::Drop;
    }
    if is_pool_member(object) {
        let is_orphaned = input
            .pool
            .is_none_or(|pool| pool.is_terminating() && pool.spec.deletion_policy == Some(DeletionPolicy::Orphan));
        return match (is_orphaned, input.is_shard_configured) {
            (true, _) => Removal::Drop,
            (false, false) => Removal::ShardRemoved,
            (false, true) => Removal::Wait,
        };
    }
    let id = object.spec.instance_id.as_ref();
    // Annotation and shard are stored before the first request: without them nothing was ever sent.
    let is_requested = object.annotation(annotation::REQUEST_ID).is_some() && object.spec.shard.is_some();
    match (id, request(object)) {
        (None, _) if !is_requested => Removal::Drop,
        _ if !input.is_shard_configured => Removal::ShardRemoved,
        (Some(id), _) => Removal::Delete { id: id.clone() },
        // The shard looks for the instance of a request before it judges the request: refused means there is none.
        (None, _) if input.created.is_some_and(is_refused) => Removal::Drop,
        (None, Some(wish)) => Removal::LearnId(wish),
        (None, None) => Removal::Drop,
    }
}

fn is_refused(progress: &Progress) -> bool {
    match progress {
        Progress::Refused(error) => {
            matches!(error.code, Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition)
        }
        // A limit that may be raised: the shard's actor goes on asking.
        Progress::Retrying(error) => error.reason == "TOO_MANY_ON_DEMAND",
        Progress::Waiting | Progress::Answered(_) | Progress::Down(_) | Progress::NotConfigured => false,
    }
}
