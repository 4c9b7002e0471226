//! Taints of Nodes and the tolerations of pods.

use nstance_core::time::Timestamp;
use serde_json::Value;

use crate::object::Object;

pub(crate) const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
pub(crate) const NOT_READY: &str = "node.kubernetes.io/not-ready";
pub(crate) const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// How long a pod stays on a node that is lost, unless it says otherwise. A real server adds this toleration to each pod.
const DEFAULT_TOLERATION_SECONDS: i64 = 300;

/// How long a pod tolerates a taint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tolerance {
    None,
    Seconds(i64),
    Forever,
}

pub(crate) fn tolerance(pod: &Object, taint: &Value) -> Tolerance {
    let mut tolerance = Tolerance::None;
    for toleration in pod.list("/spec/tolerations").iter().filter(|it| tolerates(it, taint)) {
        match toleration["tolerationSeconds"].as_i64() {
            None => return Tolerance::Forever,
            Some(seconds) => match tolerance {
                Tolerance::Seconds(least) if least <= seconds => {}
                _ => tolerance = Tolerance::Seconds(seconds),
            },
        }
    }
    let is_lost = taint["key"] == UNREACHABLE || taint["key"] == NOT_READY;
    if tolerance == Tolerance::None && is_lost && taint["effect"] == "NoExecute" {
        return Tolerance::Seconds(DEFAULT_TOLERATION_SECONDS);
    }
    tolerance
}

fn tolerates(toleration: &Value, taint: &Value) -> bool {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (key, effect) = (text(&toleration["key"]), text(&toleration["effect"]));
    let by_effect = effect.is_empty() || effect == text(&taint["effect"]);
    let by_value = match text(&toleration["operator"]).as_str() {
        "Exists" => key.is_empty() || key == text(&taint["key"]),
        _ => key == text(&taint["key"]) && text(&toleration["value"]) == text(&taint["value"]),
    };
    by_effect && by_value
}

/// Whether a taint keeps a pod from being scheduled.
pub(crate) fn repels(pod: &Object, taint: &Value) -> bool {
    matches!(taint["effect"].as_str(), Some("NoSchedule" | "NoExecute"))
        && !pod.list("/spec/tolerations").iter().any(|it| tolerates(it, taint))
}

/// Whether a `NoExecute` taint ends a pod now.
pub(crate) fn evicts(pod: &Object, taint: &Value, now: Timestamp) -> bool {
    if taint["effect"] != "NoExecute" {
        return false;
    }
    match tolerance(pod, taint) {
        Tolerance::Forever => false,
        Tolerance::None => true,
        Tolerance::Seconds(seconds) => {
            let since = taint["timeAdded"].as_str().and_then(|it| it.parse::<Timestamp>().ok());
            let longest = std::time::Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
            since.is_some_and(|since| longest <= now.since(since))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(tolerations: Value) -> Object {
        Object::new(json!({ "spec": { "tolerations": tolerations } }))
    }

    #[test]
    fn tolerations_match_by_key_value_and_effect() {
        let taint = json!({ "key": "a", "value": "b", "effect": "NoSchedule" });
        assert!(repels(&pod(json!([])), &taint));
        assert!(!repels(&pod(json!([{ "key": "a", "value": "b" }])), &taint));
        assert!(repels(&pod(json!([{ "key": "a", "value": "c" }])), &taint));
        assert!(!repels(&pod(json!([{ "operator": "Exists" }])), &taint));
        assert!(repels(&pod(json!([{ "operator": "Exists", "effect": "NoExecute" }])), &taint));
    }

    #[test]
    fn a_lost_node_keeps_its_pods_for_five_minutes_and_other_taints_end_them_at_once() {
        let t0 = Timestamp::from_millis(1_700_000_000_000);
        let after = |seconds: u64| t0.plus(std::time::Duration::from_secs(seconds));
        let taint = |key: &str| json!({ "key": key, "effect": "NoExecute", "timeAdded": t0.to_string() });
        assert!(!evicts(&pod(json!([])), &taint(UNREACHABLE), after(299)));
        assert!(evicts(&pod(json!([])), &taint(UNREACHABLE), after(300)));
        let five = json!([{ "key": UNREACHABLE, "operator": "Exists", "tolerationSeconds": 5 }]);
        assert!(evicts(&pod(five), &taint(UNREACHABLE), after(5)));
        assert!(evicts(&pod(json!([])), &taint(OUT_OF_SERVICE), t0));
        assert!(!evicts(&pod(json!([{ "operator": "Exists" }])), &taint(OUT_OF_SERVICE), after(999)));
    }
}
