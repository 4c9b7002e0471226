//! The drain of one instance: from what was observed to the one next step.
//!
//! The state of a drain is on the Node ([`mark`]), so a restarted operator goes on where it was. What is kept in memory
//! ([`Memory`]) only spaces out retries and bounds waits.

pub mod mark;

pub mod memory;

pub mod places;

pub mod report;

use std::{sync::Arc, time::Duration};

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use serde_json::Value;

use self::mark::DrainState;
pub use self::memory::{AckAnswer, Memory};
use super::{
    node_match::NodeMatch,
    observed::{Drain, Instance, InstanceStatus},
    pods::{PodId, PodPlan},
};

/// No grace period of a pod lasts longer than until this long before the deadline.
const GRACE_MARGIN: Duration = Duration::from_secs(2);
/// How long after the last pod volumes are waited for.
const MAX_VOLUME_WAIT: Duration = Duration::from_secs(60);
/// This long before the deadline volumes are not waited for any more.
const VOLUME_MARGIN: Duration = Duration::from_secs(5);
/// Between the two lists that prove that an instance has no Node.
const NO_NODE_GAP: Duration = Duration::from_secs(5);
/// How often pods that are about to go are looked at.
const POLL: Duration = Duration::from_secs(1);
/// How often everything else is looked at.
const SLOW_POLL: Duration = Duration::from_secs(5);

/// What the shards say of the instance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DrainRequest<'a> {
    /// Its shard has not delivered a complete picture.
    Unknown,
    /// It exists and is not to be drained.
    NotDraining,
    /// It does not exist any more.
    Deleted,
    Draining {
        drain: &'a Drain,
        is_vm_gone: bool,
        /// The shard deletes the VM already.
        is_deleting: bool,
    },
}

impl<'a> DrainRequest<'a> {
    pub fn of(instance: &'a Instance) -> Self {
        match (&instance.drain, instance.status) {
            (_, InstanceStatus::Deleted) => Self::Deleted,
            (Some(drain), InstanceStatus::Draining | InstanceStatus::Deleting) => Self::Draining {
                drain,
                is_vm_gone: instance.is_vm_gone(),
                is_deleting: instance.status == InstanceStatus::Deleting,
            },
            (None, InstanceStatus::Deleting) => Self::Deleted,
            _ => Self::NotDraining,
        }
    }
}

/// What the workload cluster shows of the instance.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeView {
    pub matched: NodeMatch,
    /// A Node that says it is drained for this instance.
    pub marked: Option<Arc<Node>>,
}

/// Something that is read only when it is needed.
#[derive(Debug, Clone, PartialEq)]
pub enum Listing<T> {
    NotRead,
    Failed(String),
    Read(T),
}

/// Hooks of others on the Machine, which hold parts of a drain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    /// Hold the evictions.
    pub pre_drain: Vec<String>,
    /// Hold the acknowledgement.
    pub pre_terminate: Vec<String>,
}

/// All that the next step depends on.
#[derive(Debug, Clone)]
pub struct DrainView<'a> {
    pub now: Timestamp,
    pub instance_id: &'a str,
    pub request: DrainRequest<'a>,
    /// `None` until all Nodes were listed, and while the workload cluster cannot be reached.
    pub nodes: Option<NodeView>,
    pub hooks: &'a Hooks,
    /// Whether it is this drain's turn ([`places`]).
    pub may_evict: bool,
    /// This long before the deadline blocked pods are deleted.
    pub force_before: Option<Duration>,
    pub pods: Listing<PodPlan>,
    /// Names of volumes that are still attached, those of pods that stay aside.
    pub volumes: Listing<Vec<String>>,
}

/// What a drain waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// The list of Nodes.
    ForNodes,
    /// A complete picture of the shard.
    ForShard,
    /// Several Nodes may be the instance's.
    Ambiguous(Vec<String>),
    /// The second list that proves that there is no Node.
    ToConfirmNoNode,
    PreDrainHooks(Vec<String>),
    /// Other drains, which end earlier.
    ForPlace,
    /// A list that failed.
    ForList(String),
    Volumes(Vec<String>),
    PreTerminateHooks(Vec<String>),
    /// The shard refused an acknowledgement of this drain; it has begun another one.
    ForNewerDrain,
    /// The deadline passed. The shard deletes the VM by its own clock.
    TimedOut,
    /// The shard knows that the Node is empty.
    Acknowledged,
}

/// Why a drain is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    VmGone,
    NoNode,
    Drained,
}

/// How a pod is asked to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodCall {
    /// `grace_seconds`: shorter than the pod's own.
    Evict { pod: PodId, grace_seconds: Option<i64> },
    /// Without asking disruption budgets.
    Delete { pod: PodId, grace_seconds: i64 },
}

impl PodCall {
    pub fn pod(&self) -> &PodId {
        match self {
            Self::Evict { pod, .. } | Self::Delete { pod, .. } => pod,
        }
    }
}

/// The next step of a drain.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// Nothing is left to do for this instance.
    Over,
    Wait {
        why: Waiting,
        after: Duration,
    },
    /// List all Nodes, not from a cache, and look for the instance's.
    ListNodes,
    /// List the pods of the Node, not from a cache.
    ListPods {
        node: Arc<Node>,
    },
    ListVolumes {
        node: Arc<Node>,
    },
    /// Patch the Node, so that it says where the drain stands.
    Mark {
        node: Arc<Node>,
        patch: Value,
        state: DrainState,
        /// The Node did not carry this drain before.
        is_new: bool,
        /// The state was another one before.
        is_change: bool,
    },
    /// Undo what the drain did to the Node.
    Unmark {
        node: Arc<Node>,
        patch: Value,
    },
    /// Ask these pods to go (there may be none now), and look again.
    Evict {
        calls: Vec<PodCall>,
        after: Duration,
    },
    Acknowledge(Completion),
}

fn wait(why: Waiting, after: Duration) -> Step {
    Step::Wait { why, after }
}

/// The time from `now` until `at`; zero if it has passed.
pub fn until(now: Timestamp, at: Timestamp) -> Duration {
    let millis = at.as_millisecond().saturating_sub(now.as_millisecond());
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// `at`, moved by a duration into the past.
pub fn before(at: Timestamp, by: Duration) -> Timestamp {
    let millis = at.as_millisecond().saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX));
    Timestamp::from_millisecond(millis).unwrap_or(Timestamp::MIN)
}

/// `at`, moved by a duration into the future.
pub fn after(at: Timestamp, by: Duration) -> Timestamp {
    let millis = at.as_millisecond().saturating_add(i64::try_from(by.as_millis()).unwrap_or(i64::MAX));
    Timestamp::from_millisecond(millis).unwrap_or(Timestamp::MAX)
}

/// Whether the kubelet does not answer, so that pods in deletion will not go and volumes not be detached.
pub fn is_unreachable(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|it| it.conditions.as_ref());
    conditions.into_iter().flatten().any(|it| it.type_ == "Ready" && it.status == "Unknown")
}

/// Decides the next step. Nothing is concluded from what was not read, and nothing is done to a Node that is not surely the
/// instance's.
pub fn next_step(view: &DrainView<'_>, memory: &Memory) -> Step {
    let Some(nodes) = &view.nodes else { return wait(Waiting::ForNodes, SLOW_POLL) };
    let (drain, is_vm_gone, is_deleting) = match view.request {
        DrainRequest::Unknown => return wait(Waiting::ForShard, SLOW_POLL),
        DrainRequest::Deleted => return Step::Over,
        DrainRequest::NotDraining => return unmark(nodes),
        DrainRequest::Draining { drain, is_vm_gone, is_deleting } => (drain, is_vm_gone, is_deleting),
    };
    match memory.answer_to(&drain.id) {
        Some(AckAnswer::Cancelled) => return unmark(nodes),
        Some(AckAnswer::Stale) => return wait(Waiting::ForNewerDrain, SLOW_POLL),
        Some(AckAnswer::Accepted) | None => {}
    }
    let is_acknowledged = memory.answer_to(&drain.id).is_some() || drain.acked_at.is_some();
    if is_vm_gone && !is_acknowledged {
        return Step::Acknowledge(Completion::VmGone);
    }
    let is_late = is_deleting || drain.delete_at.is_some_and(|at| at <= view.now);
    let node = match &nodes.matched {
        NodeMatch::One(node) => node,
        _ if is_acknowledged => return wait(Waiting::Acknowledged, SLOW_POLL),
        _ if is_late => return wait(Waiting::TimedOut, SLOW_POLL),
        NodeMatch::Ambiguous(names) => return wait(Waiting::Ambiguous(names.clone()), SLOW_POLL),
        NodeMatch::None => return confirm_no_node(view.now, memory),
    };
    let known = mark::mark_of(node).filter(|it| it.is_for(view.instance_id, &drain.id));
    let known = known.map(|it| it.state);
    let state = match known {
        Some(DrainState::Drained) => DrainState::Drained,
        _ if is_acknowledged => return wait(Waiting::Acknowledged, SLOW_POLL),
        _ if is_late => DrainState::TimedOut,
        _ => DrainState::Draining,
    };
    if let Some(patch) = mark::mark_patch(node, view.instance_id, drain, state, view.now) {
        let (is_new, is_change) = (known.is_none(), known != Some(state));
        return Step::Mark { node: node.clone(), patch, state, is_new, is_change };
    }
    match state {
        DrainState::Drained if is_acknowledged => wait(Waiting::Acknowledged, SLOW_POLL),
        DrainState::Drained => Step::Acknowledge(Completion::Drained),
        DrainState::TimedOut => wait(Waiting::TimedOut, SLOW_POLL),
        DrainState::Draining => empty_node(view, memory, drain, node),
    }
}

fn unmark(nodes: &NodeView) -> Step {
    match nodes.marked.as_ref().and_then(|node| Some((node.clone(), mark::unmark_patch(node)?))) {
        Some((node, patch)) => Step::Unmark { node, patch },
        None => Step::Over,
    }
}

fn confirm_no_node(now: Timestamp, memory: &Memory) -> Step {
    let Some(since) = memory.no_node_since else { return Step::ListNodes };
    let second = after(since, NO_NODE_GAP);
    if memory.is_no_node_confirmed {
        Step::Acknowledge(Completion::NoNode)
    } else if second <= now {
        Step::ListNodes
    } else {
        wait(Waiting::ToConfirmNoNode, until(now, second))
    }
}

/// Whether a list of Nodes at `now` that has no Node of the instance is the second one, long enough after the first.
pub fn confirms_no_node(first: Option<Timestamp>, now: Timestamp) -> bool {
    first.is_some_and(|first| after(first, NO_NODE_GAP) <= now)
}

fn empty_node(view: &DrainView<'_>, memory: &Memory, drain: &Drain, node: &Arc<Node>) -> Step {
    if !view.hooks.pre_drain.is_empty() {
        return wait(Waiting::PreDrainHooks(view.hooks.pre_drain.clone()), POLL);
    }
    if !view.may_evict {
        return wait(Waiting::ForPlace, SLOW_POLL);
    }
    let plan = match &view.pods {
        Listing::NotRead => return Step::ListPods { node: node.clone() },
        Listing::Failed(why) => return wait(Waiting::ForList(why.clone()), 2 * POLL),
        Listing::Read(plan) => plan,
    };
    if !plan.is_drained() {
        return evict(view, memory, drain, node, plan);
    }
    if waits_for_volumes(view.now, memory, drain, node) {
        match &view.volumes {
            Listing::NotRead => return Step::ListVolumes { node: node.clone() },
            Listing::Failed(why) => return wait(Waiting::ForList(why.clone()), 2 * POLL),
            Listing::Read(volumes) if volumes.is_empty() => {}
            Listing::Read(volumes) => return wait(Waiting::Volumes(volumes.clone()), POLL),
        }
    }
    if !view.hooks.pre_terminate.is_empty() {
        return wait(Waiting::PreTerminateHooks(view.hooks.pre_terminate.clone()), POLL);
    }
    let state = DrainState::Drained;
    match mark::mark_patch(node, view.instance_id, drain, state, view.now) {
        Some(patch) => Step::Mark { node: node.clone(), patch, state, is_new: false, is_change: true },
        None => Step::Acknowledge(Completion::Drained),
    }
}

fn waits_for_volumes(now: Timestamp, memory: &Memory, drain: &Drain, node: &Node) -> bool {
    let empty_since = memory.empty_since.unwrap_or(now);
    let is_too_long = after(empty_since, MAX_VOLUME_WAIT) <= now;
    let is_too_late = drain.delete_at.is_some_and(|at| before(at, VOLUME_MARGIN) <= now);
    !is_too_long && !is_too_late && !is_unreachable(node)
}

fn evict(view: &DrainView<'_>, memory: &Memory, drain: &Drain, node: &Node, plan: &PodPlan) -> Step {
    let now = view.now;
    let force_at = view.force_before.zip(drain.delete_at).map(|(by, at)| before(at, by));
    let is_forced = force_at.is_some_and(|at| at <= now);
    let room = drain.delete_at.map(|at| until(now, before(at, GRACE_MARGIN)).as_secs());
    let room = room.map_or(i64::MAX, |it| i64::try_from(it).unwrap_or(i64::MAX).max(1));
    let limit = if is_unreachable(node) { 1 } else { room };
    let mut calls = Vec::new();
    let mut next = if plan.terminating.is_empty() { SLOW_POLL } else { POLL };
    for pod in &plan.evict {
        let grace = pod.grace_seconds.min(limit);
        match memory.refusals.get(&pod.id.uid) {
            Some(_) if is_forced => calls.push(PodCall::Delete { pod: pod.id.clone(), grace_seconds: grace }),
            Some(refusal) if now < refusal.retry_at => next = next.min(until(now, refusal.retry_at)),
            _ => {
                let grace_seconds = Some(grace).filter(|it| *it < pod.grace_seconds);
                calls.push(PodCall::Evict { pod: pod.id.clone(), grace_seconds });
            }
        }
    }
    if !calls.is_empty() || !plan.unknown.is_empty() || !plan.wait.is_empty() {
        next = next.min(POLL);
    }
    for at in [force_at.filter(|_| !is_forced), drain.delete_at].into_iter().flatten() {
        next = next.min(until(now, at));
    }
    Step::Evict { calls, after: next.max(Duration::from_millis(100)) }
}

#[cfg(test)]
mod tests;
