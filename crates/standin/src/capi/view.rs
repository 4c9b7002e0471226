//! What the decisions of the Cluster API stand-in look at: the picture, and what is known of the workload clusters.

use std::{collections::BTreeMap, sync::Arc};

use nstance_core::time::Timestamp;

use super::names;
use crate::{
    kinds::Kind,
    object::{Key, Object},
    picture::{Objects, Picture},
};

/// The connection to one workload cluster.
#[derive(Debug, Clone)]
pub(crate) enum Connection {
    Down {
        why: String,
    },
    /// It answers, and this is the last complete list of its Nodes with all changes since.
    Up {
        nodes: Nodes,
    },
}

/// The Nodes of one workload cluster.
#[derive(Debug, Clone)]
pub(crate) struct Nodes {
    by_name: Arc<Objects>,
    by_provider_id: Arc<BTreeMap<String, Arc<Object>>>,
}

impl Nodes {
    pub(crate) fn new(by_name: Arc<Objects>) -> Self {
        let ids = by_name.values().map(|it| (it.text("/spec/providerID").to_owned(), Arc::clone(it)));
        let by_provider_id = ids.filter(|(id, _)| !id.is_empty()).collect();
        Self { by_name, by_provider_id: Arc::new(by_provider_id) }
    }

    pub(crate) fn named(&self, name: &str) -> Option<&Arc<Object>> {
        self.by_name.get(&Key::new("", name))
    }

    pub(crate) fn with_provider_id(&self, provider_id: &str) -> Option<&Arc<Object>> {
        self.by_provider_id.get(provider_id)
    }
}

/// What the object of `Cluster.spec.controlPlaneRef` says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ControlPlane {
    pub(crate) is_initialized: bool,
    pub(crate) is_externally_managed: bool,
    pub(crate) is_deleting: bool,
}

/// How the last drain of a Machine's Node ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DrainOutcome {
    /// Pods or volumes are left; a sentence about them.
    Waiting(String),
    /// The Node is empty or gone.
    Done,
}

#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) picture: &'a Picture,
    /// By Cluster.
    pub(crate) connections: &'a BTreeMap<Key, Connection>,
    /// By Cluster; only those that have been read.
    pub(crate) control_planes: &'a BTreeMap<Key, ControlPlane>,
    /// By uid of the Machine.
    pub(crate) drains: &'a BTreeMap<String, DrainOutcome>,
    /// The last known replicas of each MachinePool, by uid.
    pub(crate) replicas: &'a BTreeMap<String, i64>,
    /// Machines of control planes, in all Clusters.
    pub(crate) masters: &'a [Arc<Object>],
    pub(crate) now: Timestamp,
}

impl<'a> View<'a> {
    /// The Cluster that an object names in `spec.clusterName`.
    pub(crate) fn cluster_of(self, object: &Object) -> Option<&'a Arc<Object>> {
        self.picture.get(Kind::Cluster, object.namespace(), object.text("/spec/clusterName"))
    }

    /// The Nodes of a Cluster's workload cluster; `Err`: why they cannot be known now.
    pub(crate) fn nodes(self, cluster: &Object) -> Result<&'a Nodes, &'a str> {
        match self.connections.get(&cluster.key()) {
            Some(Connection::Up { nodes }) => Ok(nodes),
            Some(Connection::Down { why }) => Err(why),
            None => Err("not tried yet"),
        }
    }

    /// The object that an infrastructure reference names.
    pub(crate) fn infrastructure(self, object: &Object, pointer: &str) -> Infrastructure<'a> {
        let part = |field: &str| object.text(&format!("{pointer}/{field}")).to_owned();
        let (group, kind, name) = (part("apiGroup"), part("kind"), part("name"));
        let Some(kind) = Kind::of(&group, &kind).filter(|_| !name.is_empty()) else { return Infrastructure::Foreign };
        match self.picture.get(kind, object.namespace(), &name) {
            Some(object) => Infrastructure::Found(kind, object),
            None => Infrastructure::Missing(format!("{} {name}", kind.kind())),
        }
    }

    pub(crate) fn machines_of<'b>(self, cluster: &'b Object) -> impl Iterator<Item = &'a Arc<Object>> + use<'a, 'b> {
        self.picture.all(Kind::Machine).filter(|it| is_of(it, cluster))
    }

    pub(crate) fn masters_of<'b>(self, cluster: &'b Object) -> impl Iterator<Item = &'a Arc<Object>> + use<'a, 'b> {
        self.masters.iter().filter(|it| is_of(it, cluster))
    }
}

fn is_of(object: &Object, cluster: &Object) -> bool {
    object.namespace() == cluster.namespace() && object.text("/spec/clusterName") == cluster.name()
}

pub(crate) enum Infrastructure<'a> {
    Found(Kind, &'a Arc<Object>),
    /// The text names it.
    Missing(String),
    /// No reference, or one to a provider that is not ours.
    Foreign,
}

pub(crate) fn is_paused(cluster: &Object, object: &Object) -> bool {
    cluster.flag("/spec/paused") || object.annotation(names::PAUSED).is_some()
}

/// The summary that an infrastructure object's `Ready` condition becomes on its owner.
pub(crate) fn mirror_ready(infrastructure: &Object, is_provisioned: bool) -> crate::draft::Condition {
    use crate::draft::Condition;
    let status = match infrastructure.condition_status("Ready") {
        "True" => "True",
        "False" => "False",
        "Unknown" => "Unknown",
        _ if is_provisioned => return Condition::new("True", "Provisioned", ""),
        _ => {
            return Condition::new(
                "False",
                "NotProvisioned",
                "waiting for the infrastructure object to be provisioned",
            );
        }
    };
    let text = |field: &str| infrastructure.condition("Ready").and_then(|it| it[field].as_str()).unwrap_or_default();
    let reason = if text("reason").is_empty() { "NoReasonReported" } else { text("reason") };
    Condition::new(status, reason, text("message"))
}
