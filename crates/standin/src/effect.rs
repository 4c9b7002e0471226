//! What a decision asks for. Deciding only names effects; [`crate::execute`] carries them out.

use serde_json::Value;

use crate::{kinds::Kind, object::Key};

/// Which API server, and as whom.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Via {
    Own,
    /// The workload cluster of this Cluster, by the kubeconfig of its Secret.
    Workload(Key),
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Target {
    pub(crate) via: Via,
    pub(crate) kind: Kind,
    pub(crate) key: Key,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Planned {
    pub(crate) target: Target,
    pub(crate) effect: Effect,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Effect {
    Create {
        object: Value,
    },
    /// A merge patch that is refused if the object changed meanwhile.
    Patch {
        patch: Value,
        resource_version: String,
    },
    PatchStatus {
        patch: Value,
        resource_version: String,
    },
    /// Deletes the object of this uid, never a namesake.
    Delete {
        uid: String,
        grace: Option<u32>,
    },
    /// Binds a pod to a node by the subresource.
    Bind {
        uid: String,
        node: String,
    },
    /// Removes a Namespace's last finalizer by the subresource.
    FinalizeNamespace {
        object: Value,
    },
}
