//! What the operator remembers of a drain between two looks at it. A restart loses it: retries come earlier, waits are
//! bounded anew, and nothing else changes.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::jiff::Timestamp;

use super::after;
use crate::{
    decide::pods::{PodId, PodPlan},
    ports::{KubeError, KubeErrorKind},
};

/// A drain in which no pod went for this long does not keep others from their turn.
const MAX_STALL: Duration = Duration::from_secs(30);

/// What the shard said to an acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckAnswer {
    Accepted,
    /// The drain is over, the instance stays.
    Cancelled,
    /// There is a newer drain of this instance.
    Stale,
}

/// Why a pod was not evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RefusalCause {
    /// A disruption budget, by name if the API server names it.
    Budget(Option<String>),
    /// Several disruption budgets select the pod; the API server evicts such a pod never.
    MultipleBudgets,
    /// Its namespace is being deleted; the pod goes with it.
    NamespaceTerminating,
    /// The API server has too much to do.
    Throttled,
    Other,
}

impl RefusalCause {
    /// One word for dashboards.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Budget(_) => "budget",
            Self::MultipleBudgets => "multiple_budgets",
            Self::NamespaceTerminating => "namespace_terminating",
            Self::Throttled => "throttled",
            Self::Other => "failed",
        }
    }
}

/// An eviction that did not happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub cause: RefusalCause,
    /// The API server's words.
    pub message: String,
    /// Since when this pod is refused.
    pub since: Timestamp,
    pub retry_at: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Memory {
    pub drain_id: String,
    /// When the first complete list of Nodes had none of the instance.
    pub no_node_since: Option<Timestamp>,
    /// A second list, long enough after the first, had none either.
    pub is_no_node_confirmed: bool,
    /// When the pods were first seen to be gone.
    pub empty_since: Option<Timestamp>,
    /// By uid of the pod.
    pub refusals: BTreeMap<String, Refusal>,
    answer: Option<AckAnswer>,
    n_remaining: Option<usize>,
    progress_at: Option<Timestamp>,
    /// Some names of pods that were left when they were last listed.
    left: Vec<String>,
}

impl Memory {
    /// Forgets everything about an earlier drain of the instance.
    pub fn turn_to(&mut self, drain_id: &str) {
        if self.drain_id != drain_id {
            *self = Self { drain_id: drain_id.to_owned(), ..Self::default() };
        }
    }

    pub fn answer_to(&self, drain_id: &str) -> Option<AckAnswer> {
        self.answer.filter(|_| self.drain_id == drain_id)
    }

    pub fn answered(&mut self, answer: AckAnswer) {
        self.answer = Some(answer);
    }

    /// A complete list of Nodes, not from a cache, was read.
    pub fn nodes_listed(&mut self, has_node: bool, now: Timestamp) {
        if has_node {
            (self.no_node_since, self.is_no_node_confirmed) = (None, false);
            return;
        }
        self.is_no_node_confirmed |= super::confirms_no_node(self.no_node_since, now);
        self.no_node_since.get_or_insert(now);
    }

    /// The pods of the Node were listed.
    pub fn pods_listed(&mut self, plan: &PodPlan, now: Timestamp) {
        if plan.is_drained() {
            self.empty_since.get_or_insert(now);
        } else {
            self.empty_since = None;
        }
        let is_left = |uid: &String| plan.evict.iter().any(|it| it.id.uid == *uid);
        self.refusals.retain(|uid, _| is_left(uid));
        let n_remaining = plan.n_remaining();
        if self.n_remaining != Some(n_remaining) {
            self.progress_at = Some(now);
        }
        self.n_remaining = Some(n_remaining);
        self.left = plan.names(5);
    }

    /// The pod goes.
    pub fn accepted(&mut self, pod: &PodId, now: Timestamp) {
        self.refusals.remove(&pod.uid);
        self.progress_at = Some(now);
    }

    /// The pod was not evicted; it is tried again after `wait`.
    pub fn refused(&mut self, pod: &PodId, cause: RefusalCause, message: String, now: Timestamp, wait: Duration) {
        let since = self.refusals.get(&pod.uid).map_or(now, |it| it.since);
        let refusal = Refusal { cause, message, since, retry_at: after(now, wait) };
        self.refusals.insert(pod.uid.clone(), refusal);
    }

    /// How many pods were left when they were last listed.
    pub fn n_remaining(&self) -> Option<usize> {
        self.n_remaining
    }

    /// What was left, in words.
    pub fn left(&self) -> String {
        match self.n_remaining {
            None => "its pods were not listed".to_owned(),
            Some(0) => "no pod was left".to_owned(),
            Some(n) if self.left.len() < n => format!("{n} pods were left: {}, …", self.left.join(", ")),
            Some(n) => format!("{n} pods were left: {}", self.left.join(", ")),
        }
    }

    /// Whether pods are on their way. A drain whose pods are all refused, or do not go, lets others have their turn.
    pub fn is_moving(&self, plan: &PodPlan, now: Timestamp) -> bool {
        let is_fresh = |uid: &String| !self.refusals.contains_key(uid);
        let has_work = !plan.terminating.is_empty() || plan.evict.iter().any(|it| is_fresh(&it.id.uid));
        has_work && self.progress_at.is_none_or(|at| now < after(at, MAX_STALL))
    }
}

/// What became of a request to evict or delete a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionOutcome {
    /// It goes, or is gone, or another pod has its name now.
    Gone,
    Refused {
        cause: RefusalCause,
        message: String,
        retry_after: Option<Duration>,
    },
}

/// Reads the API server's answer to an eviction.
pub fn outcome_of(answer: Result<(), KubeError>) -> EvictionOutcome {
    let Err(error) = answer else { return EvictionOutcome::Gone };
    let has_cause = |name: &str| error.causes.iter().any(|(reason, _)| reason == name);
    let budget = error.causes.iter().find(|(reason, _)| reason == "DisruptionBudget").map(|(_, it)| it.as_str());
    let (cause, retry_after) = match &error.kind {
        KubeErrorKind::NotFound | KubeErrorKind::Conflict => return EvictionOutcome::Gone,
        KubeErrorKind::TooManyRequests { retry_after } => {
            let is_budget = budget.is_some() || error.message.contains("disruption budget");
            let name = budget.and_then(budget_name).or_else(|| budget_name(&error.message));
            let cause = if is_budget { RefusalCause::Budget(name) } else { RefusalCause::Throttled };
            (cause, *retry_after)
        }
        KubeErrorKind::Forbidden if has_cause("NamespaceTerminating") => (RefusalCause::NamespaceTerminating, None),
        _ if error.message.contains("more than one PodDisruptionBudget") => (RefusalCause::MultipleBudgets, None),
        _ => (RefusalCause::Other, None),
    };
    let message = budget.unwrap_or(&error.message).to_owned();
    EvictionOutcome::Refused { cause, message, retry_after }
}

/// `The disruption budget NAME needs ..`
fn budget_name(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("The disruption budget ")?;
    rest.split_whitespace().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kind: KubeErrorKind, code: u16, message: &str, cause: Option<(&str, &str)>) -> KubeError {
        let causes = cause.map(|(a, b)| (a.to_owned(), b.to_owned())).into_iter().collect();
        KubeError { verb: "evict", object: "Pod a/b".to_owned(), kind, message: message.to_owned(), code, causes }
    }

    fn cause(error: KubeError) -> RefusalCause {
        match outcome_of(Err(error)) {
            EvictionOutcome::Refused { cause, .. } => cause,
            EvictionOutcome::Gone => panic!("refused"),
        }
    }

    #[test]
    fn the_answer_of_the_api_server_names_the_budget() {
        let busy = || KubeErrorKind::TooManyRequests { retry_after: Some(Duration::from_secs(7)) };
        let why = "The disruption budget web needs 2 healthy pods and has 2 currently";
        let answer = error(busy(), 429, "Cannot evict pod as it would violate", Some(("DisruptionBudget", why)));
        let expected = EvictionOutcome::Refused {
            cause: RefusalCause::Budget(Some("web".to_owned())),
            message: why.to_owned(),
            retry_after: Some(Duration::from_secs(7)),
        };
        assert_eq!(outcome_of(Err(answer)), expected);
        assert_eq!(
            cause(error(busy(), 429, "too many requests, please try again later", None)),
            RefusalCause::Throttled
        );
    }

    #[test]
    fn other_refusals_are_told_apart() {
        let multiple =
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        assert_eq!(cause(error(KubeErrorKind::Unavailable, 500, multiple, None)), RefusalCause::MultipleBudgets);
        let terminating = error(KubeErrorKind::Forbidden, 403, "no", Some(("NamespaceTerminating", "x")));
        assert_eq!(cause(terminating), RefusalCause::NamespaceTerminating);
        assert_eq!(cause(error(KubeErrorKind::Forbidden, 403, "no", None)), RefusalCause::Other);
        assert_eq!(outcome_of(Err(error(KubeErrorKind::Conflict, 409, "uid", None))), EvictionOutcome::Gone);
        assert_eq!(outcome_of(Err(error(KubeErrorKind::NotFound, 404, "", None))), EvictionOutcome::Gone);
    }
}
