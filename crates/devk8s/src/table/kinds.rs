//! Columns that no path can say: those of nodes, pods and events.

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use super::{age, age_of};
use crate::object::{is_deleting, name, text};

pub(super) struct Kind {
    /// name, type, priority
    pub(super) columns: &'static [(&'static str, &'static str, i64)],
    pub(super) cells: fn(&Value, Timestamp) -> Vec<Value>,
    /// The first column is not the name.
    pub(super) begins_with_own: bool,
}

pub(super) static AGE: Kind =
    Kind { columns: &[("Age", "string", 0)], cells: |object, now| vec![age(object, now)], begins_with_own: false };

static NODES: Kind = Kind {
    columns: &[
        ("Status", "string", 0),
        ("Roles", "string", 0),
        ("Age", "string", 0),
        ("Version", "string", 0),
        ("Internal-IP", "string", 1),
        ("External-IP", "string", 1),
        ("OS-Image", "string", 1),
        ("Kernel-Version", "string", 1),
        ("Container-Runtime", "string", 1),
    ],
    cells: node,
    begins_with_own: false,
};

static PODS: Kind = Kind {
    columns: &[
        ("Ready", "string", 0),
        ("Status", "string", 0),
        ("Restarts", "string", 0),
        ("Age", "string", 0),
        ("IP", "string", 1),
        ("Node", "string", 1),
        ("Nominated Node", "string", 1),
        ("Readiness Gates", "string", 1),
    ],
    cells: pod,
    begins_with_own: false,
};

static EVENTS: Kind = Kind {
    columns: &[
        ("Last Seen", "string", 0),
        ("Type", "string", 0),
        ("Reason", "string", 0),
        ("Object", "string", 0),
        ("Subobject", "string", 1),
        ("Source", "string", 1),
        ("Message", "string", 0),
        ("First Seen", "string", 1),
        ("Count", "string", 1),
        ("Name", "string", 1),
    ],
    cells: event,
    begins_with_own: true,
};

pub(super) fn kind(id: &str) -> Option<&'static Kind> {
    match id {
        "nodes" => Some(&NODES),
        "pods" => Some(&PODS),
        "events" => Some(&EVENTS),
        _ => None,
    }
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

fn items<'a>(object: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    object.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

fn node(node: &Value, now: Timestamp) -> Vec<Value> {
    let ready = items(node, "/status/conditions").find(|it| it["type"] == "Ready");
    let mut status = match ready.and_then(|it| it["status"].as_str()) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.pointer("/spec/unschedulable") == Some(&json!(true)) {
        status.push_str(",SchedulingDisabled");
    }
    let labels = node.pointer("/metadata/labels").and_then(Value::as_object).into_iter().flatten();
    let roles: Vec<&str> = labels
        .filter_map(|(label, _)| label.strip_prefix("node-role.kubernetes.io/"))
        .filter(|it| !it.is_empty())
        .collect();
    let address = |kind: &str| {
        let found = items(node, "/status/addresses").find(|it| it["type"] == kind);
        found.and_then(|it| it["address"].as_str()).unwrap_or("<none>")
    };
    let info = |field: &str| or(text(node, &format!("/status/nodeInfo/{field}")), "<unknown>").to_owned();
    vec![
        json!(status),
        json!(or(&roles.join(","), "<none>")),
        age(node, now),
        json!(text(node, "/status/nodeInfo/kubeletVersion")),
        json!(address("InternalIP")),
        json!(address("ExternalIP")),
        json!(info("osImage")),
        json!(info("kernelVersion")),
        json!(info("containerRuntimeVersion")),
    ]
}

fn pod(pod: &Value, now: Timestamp) -> Vec<Value> {
    let statuses: Vec<&Value> = items(pod, "/status/containerStatuses").collect();
    let n_containers = items(pod, "/spec/containers").count();
    let n_ready = statuses.iter().filter(|it| it["ready"] == true).count();
    let n_restarts: i64 = statuses.iter().filter_map(|it| it["restartCount"].as_i64()).sum();
    let waiting = statuses.iter().find_map(|it| it.pointer("/state/waiting/reason").and_then(Value::as_str));
    let phase = or(text(pod, "/status/phase"), "Unknown");
    let status = match (is_deleting(pod), waiting, text(pod, "/status/reason")) {
        (true, ..) => "Terminating",
        (false, Some(reason), _) => reason,
        (false, None, "") => phase,
        (false, None, reason) => reason,
    };
    vec![
        json!(format!("{n_ready}/{n_containers}")),
        json!(status),
        json!(n_restarts.to_string()),
        age(pod, now),
        json!(or(text(pod, "/status/podIP"), "<none>")),
        json!(or(text(pod, "/spec/nodeName"), "<none>")),
        json!(or(text(pod, "/status/nominatedNodeName"), "<none>")),
        json!("<none>"),
    ]
}

fn event(event: &Value, now: Timestamp) -> Vec<Value> {
    let seen = |fields: &[&str]| {
        let at = fields.iter().map(|field| text(event, field)).find(|at| !at.is_empty());
        at.map_or("<unknown>".to_owned(), |at| age_of(at, now))
    };
    let object =
        format!("{}/{}", text(event, "/involvedObject/kind").to_lowercase(), text(event, "/involvedObject/name"));
    let source = or(text(event, "/source/component"), text(event, "/reportingComponent"));
    let last =
        ["/series/lastObservedTime", "/lastTimestamp", "/eventTime", "/firstTimestamp", "/metadata/creationTimestamp"];
    vec![
        json!(seen(&last)),
        json!(text(event, "/type")),
        json!(text(event, "/reason")),
        json!(object),
        json!(text(event, "/involvedObject/fieldPath")),
        json!(source),
        json!(text(event, "/message").trim()),
        json!(seen(&["/firstTimestamp", "/eventTime", "/metadata/creationTimestamp"])),
        json!(event["count"].as_i64().unwrap_or(1).to_string()),
        json!(name(event)),
    ]
}
