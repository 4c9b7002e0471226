//! Conditions of a status, and the one way to change them.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

/// Names of conditions.
pub mod kind {
    crate::api::names::words! {
        READY = "Ready";
        RECONCILING = "Reconciling";
        STALLED = "Stalled";
        PAUSED = "Paused";
        DELETING = "Deleting";
        SHARDS_REACHABLE = "ShardsReachable";
        SHARD_REACHABLE = "ShardReachable";
        IMPORT_COMPLETE = "ImportComplete";
        KUBECONFIG_READY = "KubeconfigReady";
        CERTIFICATE_VALID = "CertificateValid";
        CONFIG_VALID = "ConfigValid";
        SCALING_UP = "ScalingUp";
        SCALING_DOWN = "ScalingDown";
        UP_TO_DATE = "UpToDate";
        DRAIN_BLOCKED = "DrainBlocked";
        PROVIDER_IDS_UNIQUE = "ProviderIDsUnique";
        INSTANCE_PROVISIONED = "InstanceProvisioned";
        AGENT_REGISTERED = "AgentRegistered";
        BOOT_SUCCEEDED = "BootSucceeded";
        NODE_FOUND = "NodeFound";
        DRAINING_SUCCEEDED = "DrainingSucceeded";
        SERVER_DELETED = "ServerDeleted";
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    True,
    False,
    Unknown,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }
}

impl From<bool> for Status {
    fn from(is_true: bool) -> Self {
        if is_true { Self::True } else { Self::False }
    }
}

/// How something outside of the control loops stands, as a condition of the NstanceCluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub status: Status,
    pub reason: &'static str,
    pub message: String,
}

impl Report {
    pub fn unknown() -> Self {
        Self { status: Status::Unknown, reason: "NotYetKnown", message: String::new() }
    }
}

/// The longest message that an API server accepts in a condition.
const MAX_MESSAGE: usize = 32_768;

/// Sets a condition. Its transition time changes only if its status does.
pub fn set(
    conditions: &mut Vec<Condition>,
    kind: &str,
    status: Status,
    reason: &str,
    message: impl Into<String>,
    generation: Option<i64>,
    now: Timestamp,
) {
    let mut message: String = message.into();
    if MAX_MESSAGE < message.len() {
        let end = (0..=MAX_MESSAGE).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
        message.truncate(end);
    }
    let previous = conditions.iter().find(|it| it.type_ == kind);
    let since = match previous {
        Some(previous) if previous.status == status.as_str() => previous.last_transition_time.clone(),
        _ => Time(now),
    };
    let condition = Condition {
        type_: kind.to_owned(),
        status: status.as_str().to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: since,
    };
    match conditions.iter_mut().find(|it| it.type_ == kind) {
        Some(place) => *place = condition,
        None => conditions.push(condition),
    }
}

pub fn remove(conditions: &mut Vec<Condition>, kind: &str) {
    conditions.retain(|it| it.type_ != kind);
}

pub fn find<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|it| it.type_ == kind)
}

pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    find(conditions, kind).is_some_and(|it| it.status == "True")
}

pub fn is_false(conditions: &[Condition], kind: &str) -> bool {
    find(conditions, kind).is_some_and(|it| it.status == "False")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let mut all = Vec::new();
        set(&mut all, kind::READY, Status::False, "Waiting", "a", Some(1), at(10));
        set(&mut all, kind::READY, Status::False, "Waiting", "b", Some(2), at(20));
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].last_transition_time.0, all[0].message.as_str()), (at(10), "b"));
        set(&mut all, kind::READY, Status::True, "Ready", "", Some(2), at(30));
        assert_eq!(all[0].last_transition_time.0, at(30));
        assert!(is_true(&all, kind::READY) && !is_false(&all, kind::READY));
    }
}
