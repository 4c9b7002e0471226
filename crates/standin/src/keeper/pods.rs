//! The kubelet's part for pods: those bound to a living node run and are ready, those told to end do end.

use std::{sync::Arc, time::Duration};

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use crate::{
    draft::Draft,
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::Object,
    times,
};

const CONDITIONS: [&str; 4] = ["PodScheduled", "Initialized", "ContainersReady", "Ready"];

/// What a kubelet has to write now for one pod that is bound to its node.
pub(crate) fn keep(pod: &Arc<Object>, longest_end: Duration, now: Timestamp, planned: &mut Vec<Planned>) {
    if pod.is_deleting() {
        if is_over(pod, longest_end, now) {
            let target = Target { via: Via::Own, kind: Kind::Pod, key: pod.key() };
            planned.push(Planned { target, effect: Effect::Delete { uid: pod.uid().to_owned(), grace: Some(0) } });
        }
        return;
    }
    if matches!(pod.text("/status/phase"), "Succeeded" | "Failed") || is_running(pod) {
        return;
    }
    let mut draft = Draft::new(Via::Own, Kind::Pod, pod, now);
    let since = times::seconds(now);
    draft.set("/status/phase", "Running");
    draft.set_if_absent("/status/startTime", since.clone());
    draft.set_if_absent("/status/hostIP", "127.0.0.1");
    draft.set_if_absent("/status/podIP", "127.0.0.1");
    draft.set_if_absent("/status/podIPs", json!([{ "ip": "127.0.0.1" }]));
    let mut conditions = draft.at("/status/conditions").as_array().cloned().unwrap_or_default();
    for name in CONDITIONS {
        let new = json!({ "type": name, "status": "True", "lastProbeTime": null, "lastTransitionTime": since });
        match conditions.iter().position(|it| it["type"] == name) {
            Some(at) if conditions[at]["status"] == "True" => {}
            Some(at) => conditions[at] = new,
            None => conditions.push(new),
        }
    }
    draft.set("/status/conditions", conditions);
    draft.set("/status/containerStatuses", containers(pod, &since));
    draft.finish(planned);
}

fn is_running(pod: &Object) -> bool {
    pod.text("/status/phase") == "Running" && CONDITIONS.iter().all(|it| pod.is_true(it))
}

fn containers(pod: &Object, since: &str) -> Vec<Value> {
    let containers = pod.list("/spec/containers").iter();
    let status = |it: &Value| {
        json!({
            "name": it["name"],
            "image": it["image"].as_str().unwrap_or_default(),
            "imageID": "",
            "ready": true,
            "started": true,
            "restartCount": 0,
            "state": { "running": { "startedAt": since } },
        })
    };
    containers.map(status).collect()
}

/// The deletion timestamp lies ahead by the pod's grace period, so it tells when the deletion was asked for.
fn is_over(pod: &Object, longest_end: Duration, now: Timestamp) -> bool {
    let grace = u64::try_from(pod.number("/metadata/deletionGracePeriodSeconds").unwrap_or(0)).unwrap_or(0);
    if grace == 0 {
        return false; // gone already, or held by a finalizer: that is nothing for a kubelet
    }
    let grace = Duration::from_secs(grace);
    let end = pod.time("/metadata/deletionTimestamp").unwrap_or(now);
    end.minus(grace).plus(grace.min(longest_end)) <= now
}

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);

    fn kept(pod: Value, now: Timestamp) -> Vec<Effect> {
        let mut planned = Vec::new();
        keep(&Arc::new(Object::new(pod)), Duration::from_secs(1), now, &mut planned);
        planned.into_iter().map(|it| it.effect).collect()
    }

    #[test]
    fn a_bound_pod_becomes_running_and_ready_once() {
        let mut pod = json!({ "metadata": { "name": "p", "uid": "u" }, "spec": { "containers": [{ "name": "c" }] } });
        let effects = kept(pod.clone(), T0);
        let [Effect::PatchStatus { patch, .. }] = effects.as_slice() else { panic!("{effects:?}") };
        assert_eq!(patch["status"]["containerStatuses"][0]["name"], "c");
        pod["status"] = patch["status"].clone();
        assert_eq!(kept(pod, T0), []);
    }

    #[test]
    fn a_terminating_pod_ends_after_its_grace_or_a_second() {
        let pod = |grace: u64| {
            let end = times::seconds(T0.plus(Duration::from_secs(grace)));
            json!({ "metadata": { "name": "p", "uid": "u", "deletionTimestamp": end, "deletionGracePeriodSeconds": grace } })
        };
        assert_eq!(kept(pod(30), T0), []);
        let delete = Effect::Delete { uid: "u".to_owned(), grace: Some(0) };
        assert_eq!(kept(pod(30), T0.plus(Duration::from_secs(1))), [delete]);
        assert_eq!(kept(pod(0), T0.plus(Duration::from_secs(9))), [], "a finalizer holds it");
    }

    #[test]
    fn a_finished_pod_stays_finished() {
        assert_eq!(kept(json!({ "metadata": { "name": "p" }, "status": { "phase": "Succeeded" } }), T0), []);
    }
}
