//! The status of PodDisruptionBudgets, by which a real API server decides about evictions.

use std::{sync::Arc, time::Duration};

use nstance_core::time::Timestamp;
use serde_json::{Map, Value};

use crate::{
    draft::{Condition, Draft},
    effect::{Planned, Via},
    kinds::Kind,
    object::Object,
    picture::Picture,
    selector::selects,
};

pub(crate) fn judge(picture: &Picture, budget: &Arc<Object>, now: Timestamp, planned: &mut Vec<Planned>) {
    let selector = budget.at("/spec/selector");
    let is_finished = |it: &Object| matches!(it.text("/status/phase"), "Succeeded" | "Failed");
    let pods: Vec<&Arc<Object>> = picture
        .within(Kind::Pod, budget.namespace())
        .filter(|it| selects(selector, it.labels()) && !is_finished(it))
        .collect();
    let expected = i64::try_from(pods.len()).unwrap_or(i64::MAX);
    let disrupted = disrupted(budget, &pods, now);
    let is_healthy = |it: &Object| it.is_true("Ready") && !it.is_deleting() && !disrupted.contains_key(it.name());
    let healthy = pods.iter().filter(|it| is_healthy(it)).count();
    let healthy = i64::try_from(healthy).unwrap_or(i64::MAX);
    // A percentage is rounded up, in favour of the pods with minAvailable and of the evictions with maxUnavailable.
    let desired = match (budget.at("/spec/minAvailable"), budget.at("/spec/maxUnavailable")) {
        (Value::Null, Value::Null) => expected,
        (Value::Null, most) => (expected - amount(most, expected)).max(0),
        (least, _) => amount(least, expected),
    };
    let allowed = if expected == 0 { 0 } else { (healthy - desired).max(0) };
    let mut draft = Draft::new(Via::Own, Kind::PodDisruptionBudget, budget, now);
    draft.set("/status/observedGeneration", budget.generation());
    draft.set("/status/currentHealthy", healthy);
    draft.set("/status/desiredHealthy", desired);
    draft.set("/status/expectedPods", expected);
    draft.set("/status/disruptionsAllowed", allowed);
    if disrupted.is_empty() {
        draft.remove("/status/disruptedPods");
    } else {
        draft.set("/status/disruptedPods", disrupted);
    }
    let condition = if 0 < allowed {
        Condition::new("True", "SufficientPods", "")
    } else {
        Condition::new("False", "InsufficientPods", "")
    };
    draft.condition("DisruptionAllowed", condition);
    draft.finish(planned);
}

/// The server notes each eviction until the pod is seen to end, so that two evictions at once do not both count on it.
/// An eviction that led to nothing is forgotten after a while.
fn disrupted(budget: &Object, pods: &[&Arc<Object>], now: Timestamp) -> Map<String, Value> {
    let noted = budget.at("/status/disruptedPods").as_object().cloned().unwrap_or_default();
    let is_pending = |name: &str, at: &Value| {
        let at = at.as_str().and_then(|it| it.parse::<Timestamp>().ok());
        let is_recent = at.is_some_and(|at| now.since(at) < Duration::from_secs(120));
        is_recent && pods.iter().any(|it| it.name() == name && !it.is_deleting())
    };
    noted.into_iter().filter(|(name, at)| is_pending(name, at)).collect()
}

fn amount(value: &Value, of: i64) -> i64 {
    match value {
        Value::String(text) => {
            let percent = text.strip_suffix('%').and_then(|it| it.parse::<i64>().ok()).unwrap_or(100);
            of.saturating_mul(percent).saturating_add(99) / 100
        }
        other => other.as_i64().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::effect::Effect;

    fn allowed(spec: Value, n_ready: usize, n_pods: usize) -> (i64, i64) {
        let mut budget = json!({ "metadata": { "name": "b", "namespace": "d" }, "spec": spec });
        budget["spec"]["selector"] = json!({ "matchLabels": { "a": "b" } });
        let pods = (0..n_pods).map(|n| {
            let status = if n < n_ready { "True" } else { "False" };
            (
                Kind::Pod,
                json!({ "metadata": { "name": format!("p{n}"), "namespace": "d", "labels": { "a": "b" } },
                "status": { "conditions": [{ "type": "Ready", "status": status }] } }),
            )
        });
        let picture = Picture::of(pods.chain([(Kind::PodDisruptionBudget, budget)]));
        let mut planned = Vec::new();
        judge(&picture, picture.get(Kind::PodDisruptionBudget, "d", "b").unwrap(), Timestamp::EPOCH, &mut planned);
        let Effect::PatchStatus { patch, .. } = &planned[0].effect else { panic!("{planned:?}") };
        let number = |field: &str| patch["status"][field].as_i64().unwrap();
        (number("disruptionsAllowed"), number("desiredHealthy"))
    }

    #[test]
    fn budgets_count_ready_pods_against_what_they_ask_for() {
        assert_eq!(allowed(json!({ "minAvailable": 1 }), 2, 2), (1, 1));
        assert_eq!(allowed(json!({ "minAvailable": 2 }), 2, 2), (0, 2));
        assert_eq!(allowed(json!({ "minAvailable": "50%" }), 3, 3), (1, 2));
        assert_eq!(allowed(json!({ "maxUnavailable": 1 }), 3, 3), (1, 2));
        assert_eq!(allowed(json!({ "maxUnavailable": 1 }), 2, 3), (0, 2));
        assert_eq!(allowed(json!({ "maxUnavailable": 0 }), 0, 0), (0, 0));
    }
}
