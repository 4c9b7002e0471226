//! Terminating Namespaces: everything in one is deleted, then the Namespace itself may go.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::json;

use crate::{
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::{Key, Object, put},
    picture::Picture,
};

/// `ended` are Namespaces that were there and are gone; what they held goes too.
pub(crate) fn empty(picture: &Picture, ended: &BTreeSet<String>, planned: &mut Vec<Planned>) {
    for namespace in picture.all(Kind::Namespace).filter(|it| it.is_deleting()) {
        delete_all(picture, namespace.name(), planned);
    }
    for namespace in ended {
        delete_all(picture, namespace, planned);
    }
}

/// Terminating Namespaces that hold nothing any more as far as the picture goes.
pub(crate) fn finishing(picture: &Picture) -> Vec<&Arc<Object>> {
    let is_done = |it: &&Arc<Object>| it.is_deleting() && is_empty(picture, it.name());
    let namespaces = picture.all(Kind::Namespace).filter(|_| picture.is_complete(&Kind::ALL));
    namespaces.filter(|it| !it.list("/spec/finalizers").is_empty()).filter(is_done).collect()
}

fn is_empty(picture: &Picture, namespace: &str) -> bool {
    !Kind::ALL.into_iter().any(|kind| picture.within(kind, namespace).next().is_some())
}

fn delete_all(picture: &Picture, namespace: &str, planned: &mut Vec<Planned>) {
    for kind in Kind::ALL {
        for object in picture.within(kind, namespace).filter(|_| kind.scope() == kube::discovery::Scope::Namespaced) {
            if !object.is_deleting() {
                let target = Target { via: Via::Own, kind, key: object.key() };
                planned.push(Planned { target, effect: Effect::Delete { uid: object.uid().to_owned(), grace: None } });
            }
        }
    }
}

/// Lets a Namespace go. `fresh` was listed after its deletion: a watch may be behind, and what is created last would stay.
pub(crate) fn finish(fresh: &Picture, namespace: &Object, planned: &mut Vec<Planned>) {
    if !is_empty(fresh, namespace.name()) {
        return;
    }
    let mut object = namespace.value().clone();
    put(&mut object, "/apiVersion", "v1".into());
    put(&mut object, "/kind", "Namespace".into());
    put(&mut object, "/spec/finalizers", json!([]));
    let target = Target { via: Via::Own, kind: Kind::Namespace, key: Key::new("", namespace.name()) };
    planned.push(Planned { target, effect: Effect::FinalizeNamespace { object } });
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn emptied(objects: Vec<(Kind, Value)>, ended: &[&str]) -> Vec<(Kind, String)> {
        let mut planned = Vec::new();
        let ended = ended.iter().map(|it| (*it).to_owned()).collect();
        let picture = Picture::of(objects);
        empty(&picture, &ended, &mut planned);
        finishing(&picture).into_iter().for_each(|it| finish(&picture, it, &mut planned));
        planned.into_iter().map(|it| (it.target.kind, it.target.key.name)).collect()
    }

    fn namespace(is_deleting: bool) -> (Kind, Value) {
        let mut value = json!({ "metadata": { "name": "n" }, "spec": { "finalizers": ["kubernetes"] } });
        if is_deleting {
            value["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:20Z".into();
        }
        (Kind::Namespace, value)
    }

    fn object(namespace: &str) -> (Kind, Value) {
        (Kind::Secret, json!({ "metadata": { "name": "s", "namespace": namespace, "uid": "s" } }))
    }

    #[test]
    fn a_terminating_namespace_is_emptied_and_then_finalized() {
        assert_eq!(emptied(vec![namespace(false), object("n")], &[]), []);
        assert_eq!(emptied(vec![namespace(true), object("n"), object("other")], &[]), [(Kind::Secret, "s".to_owned())]);
        assert_eq!(emptied(vec![namespace(true)], &[]), [(Kind::Namespace, "n".to_owned())]);
    }

    #[test]
    fn what_an_ended_namespace_held_goes_and_other_namespaces_without_an_object_are_left_alone() {
        assert_eq!(emptied(vec![object("n")], &["n"]), [(Kind::Secret, "s".to_owned())]);
        assert_eq!(emptied(vec![object("n")], &[]), []);
    }
}
