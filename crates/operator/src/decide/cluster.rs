//! The Cluster and NstanceCluster: what must exist, and what their status says.

use std::collections::BTreeMap;

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{import::ImportPlan, observed::ShardView, pool::is_unreachable};
use crate::api::{
    NstanceCluster,
    capi::{Cluster, Machine, Meta as _},
    cluster::{FailureDomain, Initialization, NstanceClusterStatus, ShardStatus},
    conditions::{Report, Status, is_true, kind, set},
    names::{annotation, label},
};

/// What becomes of the Cluster and its NstanceCluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existence {
    /// Both must exist.
    Ensure,
    /// The Cluster is being deleted: nothing is made anew.
    Ending,
    /// It is being moved to another management cluster: that is remembered before it is gone.
    Moving,
    /// It was moved away: nothing is made anew, also after a restart.
    Moved,
}

/// What this process saw of a Cluster before it vanished.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LastSeen {
    pub was_paused: bool,
    pub was_marked_for_move: bool,
}

impl LastSeen {
    pub fn of(cluster: &Cluster) -> Self {
        Self {
            was_paused: cluster.spec.paused == Some(true) || cluster.annotation(annotation::PAUSED).is_some(),
            was_marked_for_move: cluster.annotation(annotation::DELETE_FOR_MOVE).is_some(),
        }
    }
}

/// `moved`: the key Secret says that the cluster was moved away.
pub fn existence(cluster: Option<&Cluster>, last_seen: Option<LastSeen>, moved: bool) -> Existence {
    match cluster {
        Some(cluster) if cluster.annotation(annotation::DELETE_FOR_MOVE).is_some() => Existence::Moving,
        Some(cluster) if cluster.is_terminating() => Existence::Ending,
        _ if moved => Existence::Moved,
        Some(_) => Existence::Ensure,
        None => match last_seen {
            Some(it) if it.was_paused || it.was_marked_for_move => Existence::Moving,
            _ => Existence::Ensure,
        },
    }
}

/// What a status is made from.
pub struct StatusInput<'a> {
    pub object: &'a NstanceCluster,
    pub views: &'a [ShardView],
    pub import: &'a ImportPlan,
    pub kubeconfig: &'a Report,
    pub certificate: &'a Report,
    pub now: Timestamp,
}

pub fn status(input: &StatusInput<'_>) -> NstanceClusterStatus {
    let old = input.object.status.clone().unwrap_or_default();
    let generation = input.object.metadata.generation;
    let mut conditions = old.conditions.clone();
    let mut say = |kind: &str, status: Status, reason: &str, message: String| {
        set(&mut conditions, kind, status, reason, message, generation, input.now);
    };
    let away: Vec<String> = input
        .views
        .iter()
        .filter_map(|it| Some(format!("{}: {}", it.name, is_unreachable(Some(it), input.now)?)))
        .collect();
    if away.is_empty() {
        say(kind::SHARDS_REACHABLE, Status::True, "Reachable", String::new());
    } else {
        say(kind::SHARDS_REACHABLE, Status::False, "ShardUnreachable", away.join("; "));
    }
    match (&input.import.waiting[..], &input.import.different[..]) {
        ([], []) => say(kind::IMPORT_COMPLETE, Status::True, "Complete", String::new()),
        ([], different) => say(kind::IMPORT_COMPLETE, Status::False, "ShardsDiffer", different.join("; ")),
        (waiting, _) => {
            let message = format!("no complete snapshot yet of {}", waiting.join(", "));
            say(kind::IMPORT_COMPLETE, Status::False, "WaitingForShards", message);
        }
    }
    say(kind::KUBECONFIG_READY, input.kubeconfig.status, input.kubeconfig.reason, input.kubeconfig.message.clone());
    say(kind::CERTIFICATE_VALID, input.certificate.status, input.certificate.reason, input.certificate.message.clone());
    say(kind::PAUSED, Status::False, "NotPaused", String::new());
    let n_ready = input.views.iter().filter(|it| it.reach.is_ready()).count();
    let is_ready = 0 < n_ready && input.certificate.status != Status::False;
    let (reason, message) = if is_ready {
        ("Ready", String::new())
    } else if input.certificate.status == Status::False {
        ("CertificateInvalid", input.certificate.message.clone())
    } else {
        ("NoShardReachable", "no shard is connected".to_owned())
    };
    say(kind::READY, is_ready.into(), reason, message.clone());
    say(kind::RECONCILING, (!is_ready).into(), if is_ready { "Done" } else { "Progressing" }, message);
    say(kind::STALLED, Status::False, "NotStalled", String::new());
    NstanceClusterStatus {
        observed_generation: generation,
        initialization: Initialization::done(),
        failure_domains: input.views.iter().map(failure_domain).collect(),
        shards: input.views.iter().map(|it| shard_status(it, &old)).collect(),
        reachable_shards: Some(format!("{n_ready}/{}", input.views.len())),
        conditions,
    }
}

fn failure_domain(view: &ShardView) -> FailureDomain {
    let mut attributes = BTreeMap::new();
    if let Some(picture) = &view.picture {
        for (key, value) in [("provider", &picture.provider), ("region", &picture.region), ("zone", &picture.zone)] {
            if !value.is_empty() {
                attributes.insert(key.to_owned(), value.clone());
            }
        }
    }
    FailureDomain { name: view.name.clone(), control_plane: false, attributes }
}

/// How often the time of the last contact is written: every change of a status is a write to the API server.
const CONTACT_STEP_SECONDS: i64 = 60;

fn shard_status(view: &ShardView, old: &NstanceClusterStatus) -> ShardStatus {
    use super::observed::Reach;
    let picture = view.picture.as_deref();
    let n = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let before = old.shards.iter().find(|it| it.name == view.name).and_then(|it| it.last_contact_time.clone());
    let contact = view.last_contact.map(Time).filter(|contact| {
        before.as_ref().is_none_or(|before| CONTACT_STEP_SECONDS <= contact.0.duration_since(before.0).as_secs())
    });
    ShardStatus {
        name: view.name.clone(),
        reachable: view.reach.is_ready(),
        leader: picture.map(|it| it.leader.clone()).filter(|it| !it.is_empty()),
        epoch: picture.and_then(|it| i64::try_from(it.epoch).ok()),
        groups: picture.map(|it| n(it.groups.len())),
        instances: picture.map(|it| n(it.instances.len())),
        last_contact_time: contact.or(before),
        message: match &view.reach {
            Reach::Down { why, .. } => Some(why.clone()),
            Reach::Connecting => Some("not connected yet".to_owned()),
            Reach::Ready => None,
        },
    }
}

/// The conditions of a Cluster with `ControlPlaneInitialized` set, where nobody else will ever set it: the Cluster has
/// neither a control plane object nor control plane Machines. `None` if nothing is to be done.
pub fn control_plane_initialized<'a>(
    cluster: &Cluster,
    machines: impl IntoIterator<Item = &'a Machine>,
    now: Timestamp,
) -> Option<Vec<Condition>> {
    const CONDITION: &str = "ControlPlaneInitialized";
    let has_control_plane = cluster.spec.control_plane_ref.is_some()
        || machines.into_iter().any(|it| it.label(label::CONTROL_PLANE).is_some());
    let status = cluster.status.clone().unwrap_or_default();
    if has_control_plane || is_true(&status.conditions, CONDITION) {
        return None;
    }
    let mut conditions = status.conditions;
    let message = "the workload cluster's API answers";
    set(&mut conditions, CONDITION, Status::True, "Initialized", message, cluster.metadata.generation, now);
    Some(conditions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_that_vanished_while_it_was_moved_is_not_made_anew() {
        let mut marked = Cluster::default();
        marked.metadata.annotations = Some([(annotation::DELETE_FOR_MOVE.to_owned(), String::new())].into());
        assert_eq!(existence(None, None, false), Existence::Ensure, "the first start");
        assert_eq!(existence(Some(&marked), None, false), Existence::Moving);
        assert_eq!(existence(None, Some(LastSeen::of(&marked)), false), Existence::Moving);
        assert_eq!(existence(None, None, true), Existence::Moved, "also after a restart");
        let deleted = LastSeen::of(&Cluster::default());
        assert_eq!(existence(None, Some(deleted), false), Existence::Ensure, "it was deleted, not moved");
    }

    #[test]
    fn the_control_plane_is_only_called_initialized_where_there_is_none() {
        let now = Timestamp::UNIX_EPOCH;
        let cluster = Cluster::default();
        let set = control_plane_initialized(&cluster, [], now).unwrap();
        assert!(is_true(&set, "ControlPlaneInitialized"));
        let mut machine = Machine::default();
        machine.metadata.labels = Some([(label::CONTROL_PLANE.to_owned(), String::new())].into());
        assert!(control_plane_initialized(&cluster, [&machine], now).is_none());
    }
}
