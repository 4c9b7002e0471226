//! Which pods of a Node are left alone, waited for or evicted when it is drained, and in which order. The rules are those of
//! Cluster API's own drain, so that MachineDrainRules and pod labels mean the same here.
//!
//! One difference: a pod that is only waited for counts as done once it has finished, not only once it is removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use k8s_openapi::{
    api::core::v1::{Pod, Volume},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
    jiff::Timestamp,
};

use crate::api::{
    capi::{DrainBehavior, MachineDrainRule, Meta as _},
    names::label,
};

/// On the API server's copy of a pod that the kubelet runs from a file.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// How long a pod of an unreachable Node may be in deletion before it is left alone.
const UNREACHABLE_DELETION_MILLIS: i64 = 1000;
/// A pod that is still there so long after its grace period is worth a word.
const OVERDUE_MILLIS: i64 = 30_000;

pub type Labels = BTreeMap<String, String>;

/// One pod. The uid tells it from a later pod of the same name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodId {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl PodId {
    pub fn of(pod: &Pod) -> Self {
        let text = |it: &Option<String>| it.clone().unwrap_or_default();
        let meta = &pod.metadata;
        Self { namespace: text(&meta.namespace), name: text(&meta.name), uid: text(&meta.uid) }
    }
}

impl fmt::Display for PodId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Whether an object that was asked for exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Existence {
    Exists,
    Absent,
    Unknown(String),
}

/// What the verdict on a pod depends on, besides the pod.
pub struct PodContext<'a> {
    /// All MachineDrainRules of the namespace of the Machine, in any order.
    pub rules: &'a [Arc<MachineDrainRule>],
    pub machine_labels: &'a Labels,
    pub cluster_labels: &'a Labels,
    /// Labels of the namespaces of the pods. Only read if [`needs_namespaces`].
    pub namespaces: &'a BTreeMap<String, Labels>,
    /// What [`daemon_sets_of`] named.
    pub daemon_sets: &'a BTreeMap<(String, String), Existence>,
    /// The kubelet does not answer: pods in deletion will not go.
    pub is_node_unreachable: bool,
    pub now: Timestamp,
}

/// What is to be done about one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Skip,
    /// It ends by itself, and is never evicted.
    Wait,
    Evict {
        order: i32,
    },
    /// It cannot be told now. It is not touched, and the drain is not complete. `order` is the one it would have.
    Unknown {
        order: i32,
        why: String,
    },
}

/// A pod that is to be evicted, and how long it may take to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvictablePod {
    pub id: PodId,
    pub grace_seconds: i64,
}

/// The pods of a Node, sorted by what is to be done. Each list is in order of namespace and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodPlan {
    /// Of the lowest order that is left.
    pub evict: Vec<EvictablePod>,
    /// In deletion already.
    pub terminating: Vec<PodId>,
    /// Those of them whose grace period ended a while ago.
    pub overdue: Vec<PodId>,
    /// Waited for, never evicted.
    pub wait: Vec<PodId>,
    /// Their turn comes when all pods of lower orders are gone.
    pub later: Vec<PodId>,
    pub unknown: Vec<(PodId, String)>,
    pub skipped: Vec<PodId>,
    /// (namespace, claim) of volumes that skipped pods use.
    pub skipped_claims: BTreeSet<(String, String)>,
}

impl PodPlan {
    /// How many pods must go before the Node is empty.
    pub fn n_remaining(&self) -> usize {
        self.evict.len() + self.terminating.len() + self.wait.len() + self.later.len() + self.unknown.len()
    }

    /// Only pods are left that are not drained.
    pub fn is_drained(&self) -> bool {
        self.n_remaining() == 0
    }

    /// Up to `max` names of pods that are left.
    pub fn names(&self, max: usize) -> Vec<String> {
        let evict = self.evict.iter().map(|it| &it.id);
        let unknown = self.unknown.iter().map(|(id, _)| id);
        let all = evict.chain(&self.terminating).chain(&self.wait).chain(&self.later).chain(unknown);
        all.take(max).map(PodId::to_string).collect()
    }
}

/// The DaemonSets (namespace, name) that must be looked up before pods can be judged.
pub fn daemon_sets_of(pods: &[Pod]) -> BTreeSet<(String, String)> {
    pods.iter().filter_map(unfinished_daemon_set).collect()
}

/// Whether any rule selects by labels of namespaces.
pub fn needs_namespaces(rules: &[Arc<MachineDrainRule>]) -> bool {
    rules.iter().flat_map(|it| &it.spec.pods).any(|it| it.namespace_selector.is_some())
}

/// Sorts the pods of a Node by what is to be done.
pub fn plan_pods(pods: &[Pod], context: &PodContext<'_>) -> PodPlan {
    let rules = rules_of(context);
    let mut judged: Vec<(PodId, &Pod, Verdict)> =
        pods.iter().map(|pod| (PodId::of(pod), pod, judge(pod, &rules, context))).collect();
    judged.sort_by(|a, b| a.0.cmp(&b.0));
    let order_of = |verdict: &Verdict| match verdict {
        Verdict::Skip => None,
        Verdict::Wait => Some(0),
        Verdict::Evict { order } | Verdict::Unknown { order, .. } => Some(*order),
    };
    let lowest = judged.iter().filter_map(|(_, _, verdict)| order_of(verdict)).min();
    let mut plan = PodPlan::default();
    for (id, pod, verdict) in judged {
        let is_terminating = pod.metadata.deletion_timestamp.is_some();
        match verdict {
            Verdict::Skip => {
                plan.skipped_claims.extend(claims_of(pod));
                plan.skipped.push(id);
            }
            Verdict::Wait => plan.wait.push(id),
            Verdict::Unknown { why, .. } => plan.unknown.push((id, why)),
            Verdict::Evict { .. } if is_terminating => {
                if millis_since_deletion(pod, context.now).is_some_and(|it| OVERDUE_MILLIS < it) {
                    plan.overdue.push(id.clone());
                }
                plan.terminating.push(id);
            }
            Verdict::Evict { order } if Some(order) == lowest => {
                plan.evict.push(EvictablePod { grace_seconds: grace_of(pod), id });
            }
            Verdict::Evict { .. } => plan.later.push(id),
        }
    }
    plan
}

/// How many pods of a Node whose VM is gone should run elsewhere: all but finished ones and those that belong to the Node.
pub fn n_to_move(pods: &[Pod]) -> usize {
    let is_of_node = |it: &Pod| unfinished_daemon_set(it).is_some() || it.annotation(MIRROR_ANNOTATION).is_some();
    pods.iter().filter(|it| !is_finished(it) && !is_of_node(it)).count()
}

fn grace_of(pod: &Pod) -> i64 {
    pod.spec.as_ref().and_then(|it| it.termination_grace_period_seconds).unwrap_or(30)
}

/// How long ago the pod should have been gone: the API server adds its grace period.
fn millis_since_deletion(pod: &Pod, now: Timestamp) -> Option<i64> {
    let at = pod.metadata.deletion_timestamp.as_ref()?.0.as_millisecond();
    Some(now.as_millisecond().saturating_sub(at))
}

fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// The DaemonSet of a pod that has not finished.
fn unfinished_daemon_set(pod: &Pod) -> Option<(String, String)> {
    if is_finished(pod) {
        return None;
    }
    let owners = pod.metadata.owner_references.as_ref()?;
    let owner = owners.iter().find(|it| it.controller == Some(true)).filter(|it| it.kind == "DaemonSet")?;
    Some((pod.metadata.namespace.clone().unwrap_or_default(), owner.name.clone()))
}

fn claims_of(pod: &Pod) -> Vec<(String, String)> {
    let id = PodId::of(pod);
    let claim = |volume: &Volume| match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{}-{}", id.name, volume.name)),
        (None, None) => None,
    };
    let volumes = pod.spec.as_ref().and_then(|it| it.volumes.as_ref());
    volumes.into_iter().flatten().filter_map(claim).map(|it| (id.namespace.clone(), it)).collect()
}

/// Rules that are for this Machine, in the order in which they are tried; or why they cannot be told.
type Rules<'a> = Result<Vec<&'a MachineDrainRule>, String>;

fn rules_of<'a>(context: &PodContext<'a>) -> Rules<'a> {
    let mut all: Vec<&MachineDrainRule> = context.rules.iter().map(AsRef::as_ref).collect();
    all.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let mut ours = Vec::new();
    for rule in all {
        let in_rule = |why: String| format!("MachineDrainRule {}: {why}", rule_name(rule));
        let mut is_ours = rule.spec.machines.is_empty();
        for it in &rule.spec.machines {
            let machine = matches(it.selector.as_ref(), context.machine_labels).map_err(in_rule)?;
            let cluster = matches(it.cluster_selector.as_ref(), context.cluster_labels).map_err(in_rule)?;
            is_ours |= machine && cluster;
        }
        if is_ours {
            ours.push(rule);
        }
    }
    Ok(ours)
}

fn rule_name(rule: &MachineDrainRule) -> &str {
    rule.metadata.name.as_deref().unwrap_or_default()
}

fn judge(pod: &Pod, rules: &Rules<'_>, context: &PodContext<'_>) -> Verdict {
    let is_overdue = millis_since_deletion(pod, context.now).is_some_and(|it| UNREACHABLE_DELETION_MILLIS < it);
    if context.is_node_unreachable && is_overdue {
        return Verdict::Skip;
    }
    let daemon_set = unfinished_daemon_set(pod).map(|key| match context.daemon_sets.get(&key) {
        Some(existence) => existence.clone(),
        None => Existence::Unknown(format!("DaemonSet {}/{} was not looked up", key.0, key.1)),
    });
    if daemon_set == Some(Existence::Exists) || pod.annotation(MIRROR_ANNOTATION).is_some() {
        return Verdict::Skip;
    }
    let by_label = match pod.label(label::DRAIN) {
        Some(value) if value.eq_ignore_ascii_case("skip") => Some(Verdict::Skip),
        Some(value) if value.replacen('-', "", 1).eq_ignore_ascii_case("waitcompleted") => Some(Verdict::Wait),
        _ => None,
    };
    let verdict = by_label.unwrap_or_else(|| judge_by_rules(pod, rules, context));
    match (daemon_set, verdict) {
        (Some(Existence::Unknown(why)), Verdict::Evict { order }) => Verdict::Unknown { order, why },
        (Some(Existence::Unknown(why)), Verdict::Wait) => Verdict::Unknown { order: 0, why },
        (_, Verdict::Wait) if is_finished(pod) => Verdict::Skip,
        (_, verdict) => verdict,
    }
}

fn judge_by_rules(pod: &Pod, rules: &Rules<'_>, context: &PodContext<'_>) -> Verdict {
    let unknown = |why: String| Verdict::Unknown { order: 0, why };
    let rules = match rules {
        Ok(rules) => rules,
        Err(why) => return unknown(why.clone()),
    };
    for rule in rules {
        match is_for_pod(rule, pod, context) {
            Ok(false) => {}
            Ok(true) => {
                return match rule.spec.drain.behavior {
                    DrainBehavior::Skip => Verdict::Skip,
                    DrainBehavior::WaitCompleted => Verdict::Wait,
                    DrainBehavior::Drain => Verdict::Evict { order: rule.spec.drain.order.unwrap_or(0) },
                };
            }
            Err(why) => return unknown(format!("MachineDrainRule {}: {why}", rule_name(rule))),
        }
    }
    Verdict::Evict { order: 0 }
}

fn is_for_pod(rule: &MachineDrainRule, pod: &Pod, context: &PodContext<'_>) -> Result<bool, String> {
    if rule.spec.pods.is_empty() {
        return Ok(true);
    }
    let none = Labels::new();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&none);
    for it in &rule.spec.pods {
        if !matches(it.selector.as_ref(), labels)? {
            continue;
        }
        let Some(selector) = &it.namespace_selector else { return Ok(true) };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let Some(labels) = context.namespaces.get(namespace) else {
            return Err(format!("the labels of namespace {namespace} are not known"));
        };
        if matches(Some(selector), labels)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether labels fit a selector. None, and an empty one, fit everything.
pub fn matches(selector: Option<&LabelSelector>, labels: &Labels) -> Result<bool, String> {
    let Some(selector) = selector else { return Ok(true) };
    let by_label = selector.match_labels.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    let mut fits = by_label;
    for it in selector.match_expressions.iter().flatten() {
        let value = labels.get(&it.key);
        let values = it.values.as_deref().unwrap_or_default();
        let is_listed = value.is_some_and(|value| values.contains(value));
        fits &= match it.operator.as_str() {
            "In" => is_listed,
            "NotIn" => !is_listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            other => return Err(format!("selector has the unknown operator {other:?} for {}", it.key)),
        };
    }
    Ok(fits)
}

#[cfg(test)]
mod tests;
