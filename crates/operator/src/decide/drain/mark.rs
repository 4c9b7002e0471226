//! What a drain writes on the Node: where it stands, the cordon, and a label that takes it out of load balancers.

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use serde_json::{Map, Value, json};

use crate::{
    api::{
        capi::Meta as _,
        names::{annotation, label},
    },
    decide::observed::Drain,
};

/// The value by which we know a cordon and a label as ours.
const OURS: &str = "nstance";

const ALL: [&str; 7] = [
    annotation::DRAIN_STATE,
    annotation::DRAIN_INSTANCE_ID,
    annotation::DRAIN_ID,
    annotation::DRAIN_REASON,
    annotation::DRAIN_DEADLINE,
    annotation::DRAIN_STARTED_AT,
    annotation::DRAIN_CORDONED_BY,
];

/// Where a drain stands, as the Node says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainState {
    Draining,
    /// Nothing is left to do but to acknowledge.
    Drained,
    /// The deadline passed with pods left.
    TimedOut,
}

impl DrainState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Draining => "Draining",
            Self::Drained => "Drained",
            Self::TimedOut => "TimedOut",
        }
    }
}

/// The drain that a Node carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    pub state: DrainState,
    pub instance_id: String,
    pub drain_id: String,
}

impl Mark {
    pub fn is_for(&self, instance_id: &str, drain_id: &str) -> bool {
        self.instance_id == instance_id && self.drain_id == drain_id
    }
}

/// Reads the drain that a Node carries. A state of an unknown word counts as draining: everything is looked at again.
pub fn mark_of(node: &Node) -> Option<Mark> {
    let state = match node.annotation(annotation::DRAIN_STATE)? {
        "Drained" => DrainState::Drained,
        "TimedOut" => DrainState::TimedOut,
        _ => DrainState::Draining,
    };
    let text = |key: &str| node.annotation(key).unwrap_or_default().to_owned();
    Some(Mark { state, instance_id: text(annotation::DRAIN_INSTANCE_ID), drain_id: text(annotation::DRAIN_ID) })
}

/// The instance for which a Node carries anything of a drain.
pub fn marked_instance(node: &Node) -> Option<&str> {
    node.annotation(annotation::DRAIN_INSTANCE_ID).filter(|it| !it.is_empty())
}

/// Whether the Node is empty and this instance may be deleted.
pub fn is_drained(node: &Node, instance_id: &str) -> bool {
    mark_of(node).is_some_and(|it| it.state == DrainState::Drained && it.instance_id == instance_id)
}

fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().and_then(|it| it.unschedulable) == Some(true)
}

/// The patch after which the Node says this, is cordoned and out of load balancers; `None` if it is so already.
pub fn mark_patch(node: &Node, instance_id: &str, drain: &Drain, state: DrainState, now: Timestamp) -> Option<Value> {
    let is_known = mark_of(node).is_some_and(|it| it.is_for(instance_id, &drain.id));
    let started_at = match node.annotation(annotation::DRAIN_STARTED_AT) {
        Some(known) if is_known => known.to_owned(),
        _ => drain.started_at.unwrap_or(now).to_string(),
    };
    let deadline = drain.delete_at.map(|it| it.to_string());
    let mut wanted = vec![
        (annotation::DRAIN_STATE, Some(state.as_str().to_owned())),
        (annotation::DRAIN_INSTANCE_ID, Some(instance_id.to_owned())),
        (annotation::DRAIN_ID, Some(drain.id.clone())),
        (annotation::DRAIN_REASON, Some(drain.reason.clone())),
        (annotation::DRAIN_DEADLINE, deadline),
        (annotation::DRAIN_STARTED_AT, Some(started_at)),
    ];
    if !is_cordoned(node) {
        wanted.push((annotation::DRAIN_CORDONED_BY, Some(OURS.to_owned())));
    }
    let mut annotations = Map::new();
    for (key, value) in wanted {
        if node.annotation(key) != value.as_deref() {
            annotations.insert(key.to_owned(), json!(value));
        }
    }
    let mut metadata = Map::new();
    if !annotations.is_empty() {
        metadata.insert("annotations".to_owned(), Value::Object(annotations));
    }
    if node.label(label::EXCLUDE_FROM_LOAD_BALANCERS).is_none() {
        metadata.insert("labels".to_owned(), json!({ label::EXCLUDE_FROM_LOAD_BALANCERS: OURS }));
    }
    let mut patch = Map::new();
    if !is_cordoned(node) {
        patch.insert("spec".to_owned(), json!({"unschedulable": true}));
    }
    finish(node, metadata, patch)
}

/// The patch that removes what a drain wrote, and uncordons if we cordoned; `None` if there is nothing of it.
pub fn unmark_patch(node: &Node) -> Option<Value> {
    let annotations: Map<String, Value> =
        ALL.into_iter().filter(|key| node.annotation(key).is_some()).map(|key| (key.to_owned(), Value::Null)).collect();
    if annotations.is_empty() {
        return None;
    }
    let mut metadata = Map::from_iter([("annotations".to_owned(), Value::Object(annotations))]);
    if node.label(label::EXCLUDE_FROM_LOAD_BALANCERS) == Some(OURS) {
        metadata.insert("labels".to_owned(), json!({ label::EXCLUDE_FROM_LOAD_BALANCERS: null }));
    }
    let mut patch = Map::new();
    if is_cordoned(node) && node.annotation(annotation::DRAIN_CORDONED_BY) == Some(OURS) {
        patch.insert("spec".to_owned(), json!({"unschedulable": null}));
    }
    finish(node, metadata, patch)
}

/// Makes the patch conditional on the version of the Node that was looked at; `None` if nothing changes.
fn finish(node: &Node, mut metadata: Map<String, Value>, mut patch: Map<String, Value>) -> Option<Value> {
    if metadata.is_empty() && patch.is_empty() {
        return None;
    }
    if let Some(version) = &node.metadata.resource_version {
        metadata.insert("resourceVersion".to_owned(), json!(version));
    }
    patch.insert("metadata".to_owned(), Value::Object(metadata));
    Some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeSpec;

    use super::*;

    const T0: Timestamp = Timestamp::UNIX_EPOCH;

    fn drain(id: &str) -> Drain {
        let at = Timestamp::from_second(60).unwrap();
        Drain { id: id.to_owned(), reason: "scale-down".to_owned(), delete_at: Some(at), ..Drain::default() }
    }

    fn node(is_cordoned: bool) -> Node {
        let mut node = Node { spec: Some(NodeSpec::default()), ..Node::default() };
        node.metadata.name = Some("n".to_owned());
        node.metadata.resource_version = Some("7".to_owned());
        node.spec.as_mut().unwrap().unschedulable = is_cordoned.then_some(true);
        node
    }

    fn patched(node: &Node, patch: &Value) -> Node {
        assert_eq!(patch["metadata"]["resourceVersion"], "7");
        let mut value = serde_json::to_value(node).unwrap();
        json_patch::merge(&mut value, patch);
        serde_json::from_value(value).unwrap()
    }

    fn marked(node: &Node, drain: &Drain, state: DrainState) -> Node {
        patched(node, &mark_patch(node, "i", drain, state, T0).unwrap())
    }

    #[test]
    fn a_marked_node_says_so_is_cordoned_and_is_not_patched_again() {
        let marked = marked(&node(false), &drain("1"), DrainState::Draining);
        assert!(is_cordoned(&marked));
        assert_eq!(marked.label(label::EXCLUDE_FROM_LOAD_BALANCERS), Some("nstance"));
        assert_eq!(marked.annotation(annotation::DRAIN_DEADLINE), Some("1970-01-01T00:01:00Z"));
        let mark = mark_of(&marked).unwrap();
        assert!(mark.is_for("i", "1") && mark.state == DrainState::Draining);
        assert_eq!(mark_patch(&marked, "i", &drain("1"), DrainState::Draining, T0), None);
        assert!(!is_drained(&marked, "i"));
    }

    #[test]
    fn unmarking_uncordons_only_what_we_cordoned() {
        let ours = marked(&node(false), &drain("1"), DrainState::Draining);
        let clean = patched(&ours, &unmark_patch(&ours).unwrap());
        assert!(!is_cordoned(&clean) && mark_of(&clean).is_none());
        assert_eq!(clean.label(label::EXCLUDE_FROM_LOAD_BALANCERS), None);
        assert_eq!(clean.metadata.annotations.unwrap_or_default().len(), 0);

        let theirs = marked(&node(true), &drain("1"), DrainState::Draining);
        let clean = patched(&theirs, &unmark_patch(&theirs).unwrap());
        assert!(is_cordoned(&clean) && mark_of(&clean).is_none());
        assert_eq!(unmark_patch(&clean), None);
    }

    #[test]
    fn a_cordon_that_somebody_lifted_comes_back_and_is_ours_from_then_on() {
        let mut lifted = marked(&node(true), &drain("1"), DrainState::Draining);
        lifted.spec.as_mut().unwrap().unschedulable = None;
        let again = marked(&lifted, &drain("1"), DrainState::Draining);
        assert!(is_cordoned(&again));
        assert_eq!(again.annotation(annotation::DRAIN_CORDONED_BY), Some("nstance"));
    }

    #[test]
    fn a_newer_drain_replaces_the_mark_and_keeps_whose_the_cordon_is() {
        let old = marked(&node(false), &drain("1"), DrainState::Drained);
        let new = marked(&old, &drain("2"), DrainState::Draining);
        let mark = mark_of(&new).unwrap();
        assert!(mark.is_for("i", "2") && mark.state == DrainState::Draining);
        assert_eq!(new.annotation(annotation::DRAIN_CORDONED_BY), Some("nstance"));
    }
}
