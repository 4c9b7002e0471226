//! Owners and what they own. An object goes when the last of its owners is gone, by uid: a namesake made anew is another.

use std::{collections::BTreeMap, sync::Arc};

use nstance_core::time::Timestamp;
use serde_json::Value;

use crate::{
    draft::Draft,
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::{Key, Object, Owner},
    picture::Picture,
};

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";

/// An owner that no watch shows. It counts as gone only when the server says so too.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Suspect {
    pub(crate) kind: Kind,
    pub(crate) key: Key,
    pub(crate) uid: String,
}

/// What became of one owner.
#[derive(Debug, Clone, PartialEq, Eq)]
enum OwnerState {
    Present,
    Suspect(Suspect),
}

/// Uids of everything that is there.
fn uids(picture: &Picture) -> BTreeMap<&str, &Arc<Object>> {
    Kind::ALL.into_iter().flat_map(|kind| picture.all(kind)).map(|it| (it.uid(), it)).collect()
}

/// Owners that might be gone.
pub(crate) fn suspects(picture: &Picture) -> Vec<Suspect> {
    let uids = uids(picture);
    let mut suspects: Vec<Suspect> = dependents(picture)
        .flat_map(|(_, it)| it.owners().map(|owner| state(picture, &uids, it, owner)).collect::<Vec<_>>())
        .filter_map(|it| match it {
            OwnerState::Suspect(suspect) => Some(suspect),
            OwnerState::Present => None,
        })
        .collect();
    suspects.sort();
    suspects.dedup();
    suspects
}

fn dependents(picture: &Picture) -> impl Iterator<Item = (Kind, &Arc<Object>)> {
    let all = Kind::ALL.into_iter().flat_map(|kind| picture.all(kind).map(move |it| (kind, it)));
    all.filter(|(_, it)| it.owners().next().is_some())
}

fn state(picture: &Picture, uids: &BTreeMap<&str, &Arc<Object>>, object: &Object, owner: Owner<'_>) -> OwnerState {
    // Of a kind that is not known here nothing can be said, so its objects keep what they own.
    let Some(kind) = Kind::of_api_version(owner.api_version(), owner.kind()) else { return OwnerState::Present };
    if uids.contains_key(owner.uid()) || !picture.is_complete(&[kind]) {
        return OwnerState::Present;
    }
    let namespace = match kind.scope() {
        kube::discovery::Scope::Cluster => "",
        kube::discovery::Scope::Namespaced => object.namespace(),
    };
    OwnerState::Suspect(Suspect { kind, key: Key::new(namespace, owner.name()), uid: owner.uid().to_owned() })
}

/// Deletes objects without owners and those of owners in foreground deletion, forgets owners that are gone or orphan.
/// `gone` are the suspects of which the server said so.
pub(crate) fn collect(picture: &Picture, gone: &[Suspect], now: Timestamp, planned: &mut Vec<Planned>) {
    let uids = uids(picture);
    let is_gone = |object: &Object, owner: Owner<'_>| match state(picture, &uids, object, owner) {
        OwnerState::Suspect(suspect) => gone.contains(&suspect),
        OwnerState::Present => false,
    };
    let is_orphaning =
        |owner: Owner<'_>| uids.get(owner.uid()).is_some_and(|it| it.is_deleting() && it.has_finalizer(ORPHAN));
    let is_foreground =
        |owner: Owner<'_>| uids.get(owner.uid()).is_some_and(|it| it.is_deleting() && it.has_finalizer(FOREGROUND));
    for (kind, object) in dependents(picture) {
        let stays = |owner: &Owner<'_>| !is_gone(object, *owner) && !is_orphaning(*owner);
        let left: Vec<Owner<'_>> = object.owners().filter(stays).collect();
        let has_lost = left.len() < object.owners().count();
        let was_orphaned = object.owners().any(is_orphaning);
        let is_condemned = if left.is_empty() { !was_orphaned } else { left.iter().all(|it| is_foreground(*it)) };
        if is_condemned {
            if !object.is_deleting() {
                let target = Target { via: Via::Own, kind, key: object.key() };
                planned.push(Planned { target, effect: Effect::Delete { uid: object.uid().to_owned(), grace: None } });
            }
        } else if has_lost {
            let mut draft = Draft::new(Via::Own, kind, object, now);
            draft.owners(left.iter().map(|it| it.value().clone()).collect::<Vec<Value>>());
            draft.finish(planned);
        }
    }
}

/// Objects whose deletion waits for what they own, and that own nothing any more as far as the picture goes.
pub(crate) fn finishing(picture: &Picture) -> Vec<(Kind, &Arc<Object>)> {
    if !picture.is_complete(&Kind::ALL) {
        return Vec::new(); // a dependent may be of the kind that is not known yet
    }
    let objects = Kind::ALL.into_iter().flat_map(|kind| picture.all(kind).map(move |it| (kind, it)));
    let waits = |it: &Object| it.is_deleting() && (it.has_finalizer(ORPHAN) || it.has_finalizer(FOREGROUND));
    objects.filter(|(_, it)| waits(it) && finalizer_to_drop(picture, it).is_some()).collect()
}

/// The finalizer that nothing in the picture stands in the way of.
fn finalizer_to_drop(picture: &Picture, owner: &Object) -> Option<&'static str> {
    let owned: Vec<Owner<'_>> =
        dependents(picture).flat_map(|(_, it)| it.owners()).filter(|it| it.uid() == owner.uid()).collect();
    if owner.has_finalizer(ORPHAN) && owned.is_empty() {
        Some(ORPHAN)
    } else if owner.has_finalizer(FOREGROUND) && !owned.iter().any(|it| it.blocks_owner_deletion()) {
        Some(FOREGROUND)
    } else {
        None
    }
}

/// Lets an owner go. `fresh` was listed after its deletion: a watch that is behind would orphan what it does not show.
pub(crate) fn finish(fresh: &Picture, kind: Kind, owner: &Arc<Object>, now: Timestamp, planned: &mut Vec<Planned>) {
    if let Some(finalizer) = finalizer_to_drop(fresh, owner) {
        let mut draft = Draft::new(Via::Own, kind, owner, now);
        draft.drop_finalizer(finalizer);
        draft.finish(planned);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn owner(name: &str) -> Value {
        json!({ "metadata": { "name": name, "namespace": "d", "uid": name } })
    }

    fn owned(name: &str, owners: &[&str]) -> Value {
        let reference = |it: &&str| json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": it, "uid": it, "blockOwnerDeletion": true });
        let references: Vec<Value> = owners.iter().map(reference).collect();
        json!({ "metadata": { "name": name, "namespace": "d", "uid": name, "ownerReferences": references } })
    }

    fn deleting(mut object: Value, finalizer: &str) -> Value {
        object["metadata"]["deletionTimestamp"] = "2023-11-14T22:13:20Z".into();
        object["metadata"]["finalizers"] = json!([finalizer]);
        object
    }

    /// Every suspect is gone, as the server would say.
    fn collected(objects: &[Value]) -> Vec<(String, Effect)> {
        let picture = Picture::of(objects.iter().map(|it| (Kind::ConfigMap, it.clone())));
        let mut planned = Vec::new();
        collect(&picture, &suspects(&picture), Timestamp::EPOCH, &mut planned);
        for (kind, owner) in finishing(&picture) {
            finish(&picture, kind, owner, Timestamp::EPOCH, &mut planned);
        }
        planned.into_iter().map(|it| (it.target.key.name, it.effect)).collect()
    }

    fn delete(name: &str) -> (String, Effect) {
        (name.to_owned(), Effect::Delete { uid: name.to_owned(), grace: None })
    }

    fn patch(name: &str, metadata: Value) -> (String, Effect) {
        (name.to_owned(), Effect::Patch { patch: json!({ "metadata": metadata }), resource_version: String::new() })
    }

    #[test]
    fn an_object_goes_with_its_last_owner_and_not_before() {
        assert_eq!(collected(&[owned("child", &["gone"])]), [delete("child")]);
        let one_left = collected(&[owner("here"), owned("child", &["gone", "here"])]);
        assert_eq!(one_left.len(), 1);
        assert!(matches!(&one_left[0].1, Effect::Patch { patch, .. }
            if patch["metadata"]["ownerReferences"].as_array().unwrap().len() == 1));
        assert_eq!(collected(&[owner("here"), owned("child", &["here"])]), []);
    }

    #[test]
    fn an_owner_that_the_server_still_has_keeps_what_it_owns() {
        let picture = Picture::of([(Kind::ConfigMap, owned("child", &["late"]))]);
        assert_eq!(suspects(&picture).len(), 1);
        let mut planned = Vec::new();
        collect(&picture, &[], Timestamp::EPOCH, &mut planned);
        assert_eq!(planned, []);
    }

    #[test]
    fn an_owner_of_an_unknown_kind_is_never_gone() {
        let mut child = owned("child", &["x"]);
        child["metadata"]["ownerReferences"][0]["kind"] = "Widget".into();
        assert_eq!(collected(&[child]), []);
    }

    #[test]
    fn foreground_deletion_takes_the_blocking_dependents_first() {
        let parent = deleting(owner("parent"), FOREGROUND);
        assert_eq!(collected(&[parent.clone(), owned("child", &["parent"])]), [delete("child")]);
        assert_eq!(collected(&[parent]), [patch("parent", json!({ "finalizers": null }))]);
    }

    #[test]
    fn an_owner_stays_when_a_fresh_list_shows_what_the_watch_did_not() {
        let parent = deleting(owner("parent"), ORPHAN);
        let seen = Picture::of([(Kind::ConfigMap, parent.clone())]);
        let fresh = Picture::of([parent, owned("late", &["parent"])].map(|it| (Kind::ConfigMap, it)));
        let mut planned = Vec::new();
        let [(kind, owner)] = finishing(&seen).try_into().unwrap();
        finish(&fresh, kind, owner, Timestamp::EPOCH, &mut planned);
        assert_eq!(planned, []);
    }

    #[test]
    fn orphaning_frees_the_dependents_and_deletes_none() {
        let parent = deleting(owner("parent"), ORPHAN);
        let freed = collected(&[parent.clone(), owned("child", &["parent"])]);
        assert_eq!(freed, [patch("child", json!({ "ownerReferences": null }))]);
        assert_eq!(collected(&[parent]), [patch("parent", json!({ "finalizers": null }))]);
    }
}
