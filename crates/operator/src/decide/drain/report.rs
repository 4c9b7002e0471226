//! What people read about a drain: the status of the NstanceMachine and its condition.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};

use super::{
    Completion, Waiting,
    memory::{Memory, RefusalCause},
};
use crate::{
    api::{conditions::Status, machine::DrainStatus},
    decide::{observed::Drain, pods::PodPlan},
};

/// So many are named; the rest is counted.
const MAX_NAMED: usize = 5;

/// Where a drain stands, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    Draining,
    Waiting(Waiting),
    Complete(Completion),
}

/// A condition without its times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConditionText {
    pub status: Status,
    pub reason: &'static str,
    pub message: String,
}

/// What holds pods, one line each.
pub fn blocked_pods(plan: &PodPlan, memory: &Memory) -> Vec<String> {
    let mut lines = Vec::new();
    for pod in &plan.evict {
        let Some(refusal) = memory.refusals.get(&pod.id.uid) else { continue };
        let what = match &refusal.cause {
            RefusalCause::Budget(Some(name)) => format!("PDB {}/{name}", pod.id.namespace),
            RefusalCause::Budget(None) => "PDB".to_owned(),
            RefusalCause::MultipleBudgets => "MultiplePDBs".to_owned(),
            RefusalCause::NamespaceTerminating => "NamespaceTerminating".to_owned(),
            RefusalCause::Throttled => "TooManyRequests".to_owned(),
            RefusalCause::Other => "EvictionFailed".to_owned(),
        };
        lines.push(format!("{}: {what}: {} (since {})", pod.id, refusal.message, second(refusal.since)));
    }
    lines.extend(plan.unknown.iter().map(|(id, why)| format!("{id}: {why}")));
    lines.extend(plan.overdue.iter().map(|id| format!("{id}: is deleted but does not go")));
    lines.extend(plan.wait.iter().map(|id| format!("{id}: is waited for, not evicted")));
    lines
}

/// What holds a drain that waits.
pub fn blocked_waiting(why: &Waiting) -> Vec<String> {
    match why {
        Waiting::PreDrainHooks(hooks) | Waiting::PreTerminateHooks(hooks) => {
            hooks.iter().map(|it| format!("hook {it} on the Machine")).collect()
        }
        Waiting::Volumes(volumes) => volumes.iter().map(|it| format!("volume {it} is still attached")).collect(),
        Waiting::ForList(why) => vec![why.clone()],
        Waiting::Ambiguous(nodes) => vec![format!("several Nodes may be the instance's: {}", nodes.join(", "))],
        _ => Vec::new(),
    }
}

/// The first few lines and the number of the rest.
pub fn shortened(lines: &[String]) -> Vec<String> {
    let mut short: Vec<String> = lines.iter().take(MAX_NAMED).cloned().collect();
    if MAX_NAMED < lines.len() {
        short.push(format!("and {} more", lines.len() - MAX_NAMED));
    }
    short
}

pub fn status(drain: &Drain, memory: &Memory, blocked: &[String]) -> DrainStatus {
    DrainStatus {
        reason: drain.reason.clone(),
        deadline: drain.delete_at.map(|it| Time(second(it))),
        remaining: memory.n_remaining().map(|it| i32::try_from(it).unwrap_or(i32::MAX)),
        blocked_by: shortened(blocked),
    }
}

/// Condition `DrainingSucceeded` of the NstanceMachine.
pub fn condition(progress: &Progress, memory: &Memory, blocked: &[String]) -> ConditionText {
    let no = |reason, message: String| ConditionText { status: Status::False, reason, message };
    let yes = |reason, message: &str| ConditionText { status: Status::True, reason, message: message.to_owned() };
    match progress {
        Progress::Complete(Completion::Drained) => yes("Drained", "the Node is empty"),
        Progress::Complete(Completion::NoNode) => yes("NoNode", "the instance has no Node"),
        Progress::Complete(Completion::VmGone) => yes("InstanceGone", "the VM was gone before it could be drained"),
        Progress::Waiting(Waiting::Acknowledged) => yes("Drained", "the shard may delete the VM"),
        Progress::Waiting(Waiting::TimedOut) => no("DrainTimedOut", format!("the deadline passed, {}", memory.left())),
        Progress::Waiting(Waiting::ForNodes) => {
            no("WaitingForWorkloadCluster", "the Nodes of the workload cluster are not known".to_owned())
        }
        Progress::Waiting(Waiting::ForPlace) => no("WaitingForTurn", "other Nodes are drained first".to_owned()),
        Progress::Waiting(Waiting::Ambiguous(_)) => no("AmbiguousNode", shortened(blocked).join("; ")),
        _ if blocked.is_empty() => no("Draining", "pods are being evicted".to_owned()),
        _ => no("DrainBlocked", shortened(blocked).join("; ")),
    }
}

fn second(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::decide::pods::{EvictablePod, PodId};

    #[test]
    fn the_first_five_are_named_with_budget_cause_and_time_and_the_rest_is_counted() {
        let mut memory = Memory::default();
        let mut plan = PodPlan::default();
        for n in 0..7 {
            let id = PodId { namespace: "default".into(), name: format!("web-{n}"), uid: n.to_string() };
            let budget = RefusalCause::Budget(Some("web".to_owned()));
            let at = Timestamp::from_second(5).unwrap();
            memory.refused(&id, budget, "needs 2".to_owned(), at, Duration::from_secs(1));
            plan.evict.push(EvictablePod { id, grace_seconds: 30 });
        }
        memory.pods_listed(&plan, Timestamp::UNIX_EPOCH);
        let lines = blocked_pods(&plan, &memory);
        let status = status(&Drain::default(), &memory, &lines);
        assert_eq!(status.blocked_by[0], "default/web-0: PDB default/web: needs 2 (since 1970-01-01T00:00:05Z)");
        assert_eq!(status.blocked_by[5], "and 2 more");
        assert_eq!((status.blocked_by.len(), status.remaining), (6, Some(7)));
        let condition = condition(&Progress::Draining, &memory, &lines);
        assert_eq!((condition.status, condition.reason), (Status::False, "DrainBlocked"));
    }
}
