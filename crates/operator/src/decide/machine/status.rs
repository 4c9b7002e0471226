//! The status of an NstanceMachine: what its shard and its Node say of the instance.
//!
//! `status.drain` and condition `DrainingSucceeded` are not here: the drain coordinator writes them as a field manager of its
//! own.

use std::sync::Arc;

use k8s_openapi::{
    api::core::v1::Node,
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{Hold, InstanceView};
use crate::{
    api::{
        NstanceMachine,
        cluster::Initialization,
        conditions::{self, Status, kind},
        machine::{Address, BootStatus, NstanceMachineStatus, Phase},
    },
    decide::observed::{Boot, Instance, InstanceStatus},
};

/// The conditions that are written here.
pub const OURS: [&str; 9] = [
    kind::READY,
    kind::RECONCILING,
    kind::STALLED,
    kind::PAUSED,
    kind::INSTANCE_PROVISIONED,
    kind::AGENT_REGISTERED,
    kind::BOOT_SUCCEEDED,
    kind::NODE_FOUND,
    kind::SERVER_DELETED,
];

/// The Node of an instance.
#[derive(Debug, Clone)]
pub enum NodeView {
    Found(Arc<Node>),
    /// No Node among all of the workload cluster.
    None,
    /// The workload cluster does not answer.
    Unknown,
}

pub struct StatusInput<'a> {
    pub object: &'a NstanceMachine,
    pub view: &'a InstanceView,
    pub node: NodeView,
    pub hold: Option<&'a Hold>,
    pub now: Timestamp,
}

struct Draft<'a> {
    input: &'a StatusInput<'a>,
    status: NstanceMachineStatus,
}

pub fn status(input: &StatusInput<'_>) -> NstanceMachineStatus {
    let mut status = input.object.status.clone().unwrap_or_default();
    status.drain = None;
    status.conditions.retain(|it| OURS.contains(&it.type_.as_str()));
    status.observed_generation = input.object.metadata.generation;
    let mut draft = Draft { input, status };
    match input.view {
        InstanceView::Present(instance) => draft.present(instance),
        InstanceView::Gone => draft.gone(),
        InstanceView::Unnamed => draft.unnamed(),
        // What was known stays.
        InstanceView::Unknown => {}
    }
    draft.summarize();
    draft.status
}

impl Draft<'_> {
    fn set(&mut self, kind: &str, status: impl Into<Status>, reason: &str, message: impl Into<String>) {
        let generation = self.input.object.metadata.generation;
        conditions::set(&mut self.status.conditions, kind, status.into(), reason, message, generation, self.input.now);
    }

    fn condition(&self, kind: &str) -> Option<&Condition> {
        conditions::find(&self.status.conditions, kind)
    }

    fn is_true(&self, kind: &str) -> bool {
        conditions::is_true(&self.status.conditions, kind)
    }

    fn unnamed(&mut self) {
        self.status.phase = Some(Phase::Pending);
        self.status.ready = Some(false);
        self.set(kind::INSTANCE_PROVISIONED, false, "NotAsked", "no instance was asked for yet");
    }

    fn gone(&mut self) {
        self.status.phase = Some(Phase::Deleted);
        self.status.ready = Some(false);
        let id = self.input.object.spec.instance_id.as_deref().unwrap_or_default();
        let reason = self.input.object.status.as_ref().and_then(|it| it.drain.as_ref()).map(|it| it.reason.as_str());
        let why = reason.filter(|it| !it.is_empty()).map_or_else(String::new, |it| format!(": {it}"));
        self.set(kind::SERVER_DELETED, true, "Deleted", format!("instance {id} does not exist any more{why}"));
        self.set(kind::INSTANCE_PROVISIONED, false, "Deleted", "");
    }

    fn present(&mut self, instance: &Instance) {
        let spec = &self.input.object.spec;
        let has_provider_id = spec.provider_id.is_some() || instance.provider_id.is_some();
        let is_up = matches!(instance.status, InstanceStatus::Running | InstanceStatus::Draining);
        self.status.ready = Some(is_up && has_provider_id);
        if is_up && has_provider_id {
            self.status.initialization = Initialization::done();
        }
        self.status.failure_domain = spec.shard.clone().or_else(|| Some(instance.shard.clone()));
        self.status.addresses = addresses(instance);
        self.status.instance_type = instance.instance_type.clone();
        self.status.spot = Some(instance.spot);
        self.status.interruptible = Some(instance.spot);
        self.status.boot = instance.boot.as_ref().map(boot);
        self.node(instance);
        self.provisioned(instance, has_provider_id);
        self.booted(instance);
        self.status.phase = self.phase(instance).or(self.status.phase);
    }

    fn provisioned(&mut self, instance: &Instance, has_provider_id: bool) {
        match instance.status {
            InstanceStatus::Pending => {
                self.set(kind::INSTANCE_PROVISIONED, false, "Pending", failure(instance).unwrap_or_default());
            }
            InstanceStatus::Provisioning => {
                self.set(kind::INSTANCE_PROVISIONED, false, "Provisioning", failure(instance).unwrap_or_default());
            }
            InstanceStatus::Failed => {
                let message = failure(instance).unwrap_or_default();
                self.set(kind::INSTANCE_PROVISIONED, false, "Failed", with_command(&message, &instance.id));
            }
            _ if has_provider_id => self.set(kind::INSTANCE_PROVISIONED, true, "Provisioned", ""),
            _ => self.set(
                kind::INSTANCE_PROVISIONED,
                false,
                "NoProviderID",
                "the shard does not know its provider id yet",
            ),
        }
    }

    fn node(&mut self, instance: &Instance) {
        match &self.input.node {
            NodeView::Found(node) => {
                let name = node.metadata.name.clone().unwrap_or_default();
                self.set(kind::NODE_FOUND, true, "Found", format!("Node {name}"));
                self.status.node_name = Some(name);
            }
            NodeView::None => {
                self.status.node_name = None;
                self.set(
                    kind::NODE_FOUND,
                    false,
                    "NotFound",
                    format!("no Node is matched to instance {}", instance.id),
                );
            }
            NodeView::Unknown if self.condition(kind::NODE_FOUND).is_none() => {
                self.set(kind::NODE_FOUND, Status::Unknown, "WorkloadUnknown", "the workload cluster was not read yet");
            }
            NodeView::Unknown => {}
        }
    }

    fn booted(&mut self, instance: &Instance) {
        match instance.registered_at {
            Some(at) => self.set(kind::AGENT_REGISTERED, true, "Registered", format!("registered at {at}")),
            None => self.set(kind::AGENT_REGISTERED, false, "NotRegistered", "its agent did not register yet"),
        }
        let failed = instance.boot.as_ref().filter(|it| it.failed || matches!(it.state.as_str(), "failed" | "stalled"));
        let is_failed = instance.status == InstanceStatus::Failed;
        if let Some(boot) = failed {
            let message = format!("stage {} {}: {}", boot.stage, boot.state, boot.detail);
            let reason = if is_condition_reason(&boot.reason) { boot.reason.as_str() } else { "BootFailed" };
            self.set(kind::BOOT_SUCCEEDED, false, reason, with_command(&message, &instance.id));
        } else if let Some(message) = failure(instance).filter(|_| is_failed) {
            let reason = instance.failure_reason.as_deref().filter(|it| is_condition_reason(it)).unwrap_or("Failed");
            self.set(kind::BOOT_SUCCEEDED, false, reason, with_command(&message, &instance.id));
        } else if is_booted(instance) || self.is_true(kind::NODE_FOUND) {
            self.set(kind::BOOT_SUCCEEDED, true, "Booted", "");
        } else if let Some(boot) = &instance.boot {
            let message = format!("stage {} {}", boot.stage, boot.state);
            self.set(kind::BOOT_SUCCEEDED, Status::Unknown, "Booting", message);
        } else {
            self.set(kind::BOOT_SUCCEEDED, Status::Unknown, "NotReported", "no boot stage was reported yet");
        }
    }

    fn phase(&self, instance: &Instance) -> Option<Phase> {
        Some(match instance.status {
            InstanceStatus::Pending => Phase::Pending,
            InstanceStatus::Provisioning => Phase::Provisioning,
            InstanceStatus::Running if self.is_true(kind::NODE_FOUND) || is_booted(instance) => Phase::Running,
            InstanceStatus::Running => Phase::Booting,
            InstanceStatus::Draining => Phase::Draining,
            InstanceStatus::Deleting => Phase::Deleting,
            InstanceStatus::Deleted => Phase::Deleted,
            InstanceStatus::Failed => Phase::Failed,
            InstanceStatus::Other => return None,
        })
    }

    /// `Ready`, and the two that say why not.
    fn summarize(&mut self) {
        let (ready, reason, message) = self.ready();
        self.set(kind::READY, ready, reason.as_str(), message.clone());
        let is_stalled = self.input.hold.is_some_and(|it| it.is_stalled) || self.status.phase == Some(Phase::Failed);
        let is_done = ready == Status::True || self.status.phase == Some(Phase::Deleted);
        conditions::remove(&mut self.status.conditions, if is_stalled { kind::RECONCILING } else { kind::STALLED });
        if is_stalled {
            self.set(kind::STALLED, true, &reason, message);
        } else if is_done {
            conditions::remove(&mut self.status.conditions, kind::RECONCILING);
        } else {
            self.set(kind::RECONCILING, true, &reason, message);
        }
        self.set(kind::PAUSED, false, "NotPaused", "");
    }

    fn ready(&self) -> (Status, String, String) {
        if let Some(hold) = self.input.hold {
            return (Status::False, hold.reason.to_owned(), hold.message.clone());
        }
        let is_leaving = self.input.view.instance().is_some_and(Instance::is_leaving);
        if is_leaving {
            let reason = if self.status.phase == Some(Phase::Draining) { "Draining" } else { "Deleting" };
            let why = self.input.view.instance().and_then(|it| it.drain.as_ref()).map(|it| it.reason.clone());
            return (Status::False, reason.to_owned(), why.unwrap_or_default());
        }
        if let Some(gone) = self.condition(kind::SERVER_DELETED).filter(|it| it.status == "True") {
            return (Status::False, "Deleted".to_owned(), gone.message.clone());
        }
        // A failed boot says more than the Node that is missing because of it.
        let mut unknown = None;
        for name in [kind::INSTANCE_PROVISIONED, kind::BOOT_SUCCEEDED, kind::AGENT_REGISTERED, kind::NODE_FOUND] {
            match self.condition(name) {
                Some(it) if it.status == "True" => {}
                Some(it) if it.status == "False" => return (Status::False, it.reason.clone(), it.message.clone()),
                Some(it) if name == kind::NODE_FOUND => unknown = Some((it.reason.clone(), it.message.clone())),
                Some(_) => {}
                None => unknown = Some(("NotYetKnown".to_owned(), "its shard has not told of it yet".to_owned())),
            }
        }
        match unknown {
            Some((reason, message)) => (Status::Unknown, reason, message),
            None => (Status::True, "Ready".to_owned(), String::new()),
        }
    }
}

fn is_booted(instance: &Instance) -> bool {
    instance.boot.as_ref().map_or_else(|| instance.registered_at.is_some(), |it| it.state == "done" && !it.failed)
}

fn boot(boot: &Boot) -> BootStatus {
    let message = if boot.detail.is_empty() { boot.state.clone() } else { format!("{}: {}", boot.state, boot.detail) };
    BootStatus {
        stage: boot.stage.clone(),
        since: boot.since.map(Time),
        message: Some(message).filter(|it| !it.is_empty()),
    }
}

fn addresses(instance: &Instance) -> Vec<Address> {
    let one = |kind: &str, address: &Option<String>| {
        let address = address.clone().filter(|it| !it.is_empty())?;
        Some(Address { kind: kind.to_owned(), address })
    };
    [
        one("InternalIP", &instance.ip4),
        one("InternalIP", &instance.ip6),
        one("Hostname", &instance.hostname),
        one("InternalDNS", &instance.hostname),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn failure(instance: &Instance) -> Option<String> {
    match (&instance.failure_reason, &instance.failure_message) {
        (Some(reason), Some(message)) => Some(format!("{reason}: {message}")),
        (Some(one), None) | (None, Some(one)) => Some(one.clone()),
        (None, None) => None,
    }
}

/// What a person can run to learn more.
fn with_command(message: &str, id: &str) -> String {
    format!("{message}; run: nstance-admin instance why {id}")
}

/// Whether an API server takes this word as the reason of a condition.
fn is_condition_reason(reason: &str) -> bool {
    let bytes = reason.as_bytes();
    let is_inner = |it: &u8| it.is_ascii_alphanumeric() || matches!(it, b'_' | b',' | b':');
    bytes.first().is_some_and(u8::is_ascii_alphabetic)
        && bytes.iter().all(is_inner)
        && bytes.last().is_some_and(|it| it.is_ascii_alphanumeric() || *it == b'_')
        && bytes.len() <= 1024
}
