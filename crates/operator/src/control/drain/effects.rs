//! What a drain does: patches of the Node, evictions, the acknowledgement, and the events about them.

use std::{sync::Arc, time::Duration};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Node;
use nstance_client::ShardError;
use nstance_rt::entropy::jitter;
use serde_json::Value;

use super::{Drains, Outcome, RETRY, Subject};
use crate::{
    api::{capi::Meta as _, names::annotation},
    cluster::events::{About, Reason, Severity},
    control::queue::Next,
    decide::{
        drain::{
            AckAnswer, Completion, Memory, PodCall,
            mark::DrainState,
            memory::{EvictionOutcome, outcome_of},
            report::Progress,
            until,
        },
        observed::Drain,
        pods::PodId,
    },
    ports::{self, KubePort, ObjectRef, Target, Wish, kinds},
};

/// Requests for pods of one Node that run at a time.
const MAX_EVICTIONS: usize = 10;
/// A pod that was refused is tried again after one to ten seconds.
const MIN_PAUSE: Duration = Duration::from_secs(1);
const PAUSE_RANGE: Duration = Duration::from_secs(9);
/// How often an acknowledgement without an answer is looked at.
const ACK_POLL: Duration = Duration::from_secs(10);

impl Drains {
    /// `None`: it was not patched, and the Node is to be looked at again.
    pub(super) async fn patch_node(&self, api: &dyn KubePort, node: &Node, patch: &Value) -> Option<Arc<Node>> {
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let patched = match api.merge_patch(&ObjectRef::new(kinds::NODE, "", name), patch, Target::Main).await {
            Ok(patched) => patched,
            Err(error) => {
                // A conflict is usual: the kubelet writes its Node often.
                tracing::debug!(node = name, %error, "Node not patched, trying again");
                return None;
            }
        };
        match serde_json::from_value(patched) {
            Ok(node) => Some(Arc::new(node)),
            Err(error) => {
                tracing::warn!(node = name, %error, "the answer to a patch is not a Node");
                None
            }
        }
    }

    /// Asks pods to go. Some at a time, each once.
    pub(super) async fn evict(&self, api: &dyn KubePort, subject: &Subject, calls: Vec<PodCall>, memory: &mut Memory) {
        let ask = |call: PodCall| async move {
            let answer = match &call {
                PodCall::Evict { pod, grace_seconds } => api.evict(&pod_ref(pod), &pod.uid, *grace_seconds).await,
                PodCall::Delete { pod, grace_seconds } => api.delete_pod(&pod_ref(pod), &pod.uid, *grace_seconds).await,
            };
            (call, answer)
        };
        let mut answers = stream::iter(calls).map(ask).buffer_unordered(MAX_EVICTIONS);
        while let Some((call, answer)) = answers.next().await {
            let pod = call.pod();
            let now = self.ctx.now();
            match outcome_of(answer) {
                EvictionOutcome::Gone => {
                    let is_forced = matches!(call, PodCall::Delete { .. });
                    self.metrics.eviction(if is_forced { "deleted" } else { "evicted" });
                    if is_forced {
                        let text = format!("deleted pod {pod} shortly before the deadline, against what held it");
                        self.tell(subject, None, Severity::Warning, Reason::DrainBlocked, &text);
                    }
                    memory.accepted(pod, now);
                }
                EvictionOutcome::Refused { cause, message, retry_after } => {
                    self.metrics.eviction(cause.word());
                    let pause = MIN_PAUSE + jitter(&self.entropy, PAUSE_RANGE);
                    let pause = retry_after.map_or(pause, |it| it.max(pause));
                    tracing::debug!(instance = subject.id, %pod, ?cause, message, retry_in = ?pause, "pod not evicted");
                    memory.refused(pod, cause, message, now, pause);
                }
            }
        }
    }

    /// `None`: the shard answered, and the memory has its answer.
    pub(super) fn acknowledge(
        &self,
        subject: &Subject,
        drain: &Drain,
        completion: Completion,
        memory: &mut Memory,
    ) -> Option<Outcome> {
        let wish = Wish::AcknowledgeDrained { id: subject.id.clone(), drain_id: drain.id.clone() };
        let progress = self.ctx.shards.ask(&subject.shard, &self.ack_key(&subject.id), wish);
        let answer = match progress {
            ports::Progress::Answered(_) => Some(AckAnswer::Accepted),
            ports::Progress::Refused(error) | ports::Progress::Retrying(error) => answer_of(&error),
            ports::Progress::Waiting | ports::Progress::Down(_) | ports::Progress::NotConfigured => None,
        };
        let Some(answer) = answer else {
            let progress = Some(Progress::Complete(completion));
            return Some(Outcome { next: Next::After(ACK_POLL), progress, standing: None });
        };
        memory.answered(answer);
        if answer == AckAnswer::Accepted {
            let (text, result) = match completion {
                // That was told when the Node was marked: the shard may report the end of the VM before it answers.
                Completion::Drained => return None,
                Completion::NoNode => ("the instance has no Node, the shard may delete the VM", "no_node"),
                Completion::VmGone => ("the VM was gone already", "vm_gone"),
            };
            self.tell(subject, None, Severity::Normal, Reason::DrainCompleted, text);
            self.ended(drain, result);
        }
        None
    }

    pub(super) fn tell_mark(
        &self,
        subject: &Subject,
        drain: &Drain,
        memory: &Memory,
        state: DrainState,
        is_new: bool,
        is_change: bool,
    ) {
        tracing::info!(instance = subject.id, drain = drain.id, state = state.as_str(), is_new, "Node marked");
        if is_new {
            let until = drain.delete_at.map(|it| format!(", until {it:.0}")).unwrap_or_default();
            let text = format!("draining the Node of {} ({}){until}", subject.id, drain.reason);
            self.tell(subject, None, Severity::Normal, Reason::DrainStarted, &text);
        }
        if is_change && state == DrainState::Drained {
            let text = "the Node is empty, the shard may delete the VM";
            self.tell(subject, None, Severity::Normal, Reason::DrainCompleted, text);
            self.ended(drain, "drained");
        }
        if is_change && state == DrainState::TimedOut {
            let text = format!("the deadline of the drain passed, {}; the shard deletes the VM", memory.left());
            self.tell(subject, None, Severity::Warning, Reason::DrainTimedOut, &text);
            self.ended(drain, "timed_out");
        }
    }

    fn ended(&self, drain: &Drain, result: &'static str) {
        let now = self.ctx.now();
        self.metrics.ended(result, until(drain.started_at.unwrap_or(now), now));
    }

    /// `node`: as it was before.
    pub(super) fn tell_cancelled(&self, subject: &Subject, node: &Node) {
        let started_at = node.annotation(annotation::DRAIN_STARTED_AT).and_then(|it| it.parse().ok());
        self.ended(&Drain { started_at, ..Drain::default() }, "cancelled");
        let text = "the shard called the drain off, the Node is as it was before";
        self.tell(subject, Some(node), Severity::Normal, Reason::DrainCancelled, text);
    }

    pub(super) fn tell_ambiguous(&self, subject: &Subject, nodes: &[String]) {
        let text = format!(
            "several Nodes may be the one of {}: {}; it is not drained; label the right one nstance.dev/instance-id={}",
            subject.id,
            nodes.join(", "),
            subject.id
        );
        self.tell(subject, None, Severity::Warning, Reason::AmbiguousNode, &text);
    }

    pub(super) fn tell_bad_annotation(&self, subject: &Subject, value: &str) {
        let pool = subject.pool.as_ref().and_then(|it| it.metadata.name.as_deref()).unwrap_or_default();
        let key = annotation::DRAIN_FORCE_BEFORE;
        let text = format!("annotation {key} of pool {pool} is no duration: {value:?}; write it as 15s or 1m30s");
        self.tell(subject, None, Severity::Warning, Reason::ConfigInvalid, &text);
    }

    /// An event on the NstanceMachine, or on the Node, else on the pool.
    pub(super) fn tell(&self, subject: &Subject, node: Option<&Node>, severity: Severity, reason: Reason, text: &str) {
        let namespace = &self.ctx.settings.namespace;
        let about = |kind, meta: &kube::api::ObjectMeta| About {
            object: ObjectRef::new(kind, namespace, meta.name.as_deref().unwrap_or_default()),
            uid: meta.uid.clone().unwrap_or_default(),
        };
        let machine = subject.nstance_machine.as_ref().map(|it| about(kinds::NSTANCE_MACHINE, &it.metadata));
        let node = || node.map(|it| about(kinds::NODE, &it.metadata));
        let pool = || subject.pool.as_ref().map(|it| about(kinds::NSTANCE_MACHINE_POOL, &it.metadata));
        match machine.or_else(node).or_else(pool) {
            Some(about) => self.ctx.events.emit(&about, severity, reason.as_str(), text),
            None => tracing::info!(instance = subject.id, reason = reason.as_str(), text, "event without an object"),
        }
    }
}

/// What a refusal of an acknowledgement says about the drain; `None` if it may pass.
fn answer_of(error: &ShardError) -> Option<AckAnswer> {
    match error.reason.as_str() {
        "STALE_DRAIN" => Some(AckAnswer::Stale),
        "DRAIN_CANCELLED" | "NOT_DRAINING" => Some(AckAnswer::Cancelled),
        _ if error.code == tonic::Code::NotFound => Some(AckAnswer::Accepted),
        _ => {
            tracing::debug!(%error, retry_in = ?RETRY, "drain not acknowledged");
            None
        }
    }
}

fn pod_ref(pod: &PodId) -> ObjectRef {
    ObjectRef::new(kinds::POD, &pod.namespace, &pod.name)
}
