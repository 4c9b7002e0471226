//! `eviction`: deletes a pod if the disruption budgets allow it. They are judged by the live pods, since nothing here
//! keeps their status.

use http::StatusCode;
use serde_json::Value;

use super::success;
use crate::{
    error::ApiError,
    object::{self, Key, is_deleting, text},
    resources::Served,
    selector::LabelSelector,
    store::Txn,
    write::{DeleteOptions, delete},
};

pub(crate) fn evict(txn: &mut Txn<'_>, served: &Served, key: &Key, options: &DeleteOptions) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    let pod = txn.current(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    if let Some(wanted) = options.uid.as_deref().filter(|it| *it != object::uid(&pod)) {
        return Err(ApiError::other_uid(resource, &key.name, wanted, object::uid(&pod)));
    }
    // These hold up nothing that a budget protects.
    let is_free = is_deleting(&pod) || ["Pending", "Succeeded", "Failed"].contains(&text(&pod, "/status/phase"));
    if !is_free {
        check_budgets(txn, &pod, &key.namespace)?;
    }
    delete(txn, resource, key, options)?;
    Ok(success(StatusCode::CREATED))
}

fn check_budgets(txn: &Txn<'_>, pod: &Value, namespace: &str) -> Result<(), ApiError> {
    let budgets = txn.list("poddisruptionbudgets.policy", Some(namespace));
    let covers = |budget: &Value, pod: &Value| {
        budget.pointer("/spec/selector").is_some_and(|it| LabelSelector::of_object(it).matches(pod))
    };
    let mut mine = budgets.iter().filter(|budget| covers(budget, pod));
    let Some(budget) = mine.next() else { return Ok(()) };
    if mine.next().is_some() {
        return Err(ApiError::internal(
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.",
        ));
    }
    let pods = txn.list("pods", Some(namespace));
    let covered: Vec<_> = pods.iter().filter(|it| covers(budget, it) && !is_ended(it)).collect();
    let n_expected = i64::try_from(covered.len()).unwrap_or(i64::MAX);
    let n_healthy = i64::try_from(covered.iter().filter(|it| is_healthy(it)).count()).unwrap_or(i64::MAX);
    let n_wanted = match (budget.pointer("/spec/maxUnavailable"), budget.pointer("/spec/minAvailable")) {
        (Some(max), _) => n_expected.saturating_sub(part_of(max, n_expected)).max(0),
        (None, Some(min)) => part_of(min, n_expected),
        (None, None) => 0,
    };
    if !is_healthy(pod) {
        // A pod that is not ready may go while the others suffice.
        let always = text(budget, "/spec/unhealthyPodEvictionPolicy") == "AlwaysAllow";
        if always || (0 < n_wanted && n_wanted <= n_healthy) {
            return Ok(());
        }
    }
    if n_wanted < n_healthy {
        return Ok(());
    }
    let message = "Cannot evict pod as it would violate the pod's disruption budget.";
    let cause = format!(
        "The disruption budget {} needs {n_wanted} healthy pods and has {n_healthy} currently",
        object::name(budget)
    );
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequests", message);
    Err(error.because("DisruptionBudget", &cause, None))
}

fn is_ended(pod: &Value) -> bool {
    ["Succeeded", "Failed"].contains(&text(pod, "/status/phase"))
}

fn is_healthy(pod: &Value) -> bool {
    let conditions = pod.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    !is_deleting(pod) && conditions.into_iter().any(|it| it["type"] == "Ready" && it["status"] == "True")
}

/// A number, or a share of `whole` such as `50%`, rounded up.
fn part_of(value: &Value, whole: i64) -> i64 {
    match value {
        Value::String(text) => {
            let percent: i64 = text.trim_end_matches('%').parse().unwrap_or(0);
            whole.saturating_mul(percent).saturating_add(99).div_euclid(100)
        }
        other => other.as_i64().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn shares_are_rounded_up() {
        for (value, whole, part) in
            [(json!(2), 5, 2), (json!("50%"), 5, 3), (json!("0%"), 5, 0), (json!("100%"), 5, 5), (json!(null), 5, 0)]
        {
            assert_eq!(part_of(&value, whole), part, "{value}");
        }
    }
}
