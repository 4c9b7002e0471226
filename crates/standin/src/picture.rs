//! What the watches have told so far, kind by kind. A snapshot is cheap: kinds and objects are shared until they change.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

use crate::{
    kinds::Kind,
    object::{Key, Object},
};

pub(crate) type Objects = BTreeMap<Key, Arc<Object>>;

/// Kinds whose first list has not ended are not in it: unknown is not empty.
#[derive(Debug, Clone, Default)]
pub(crate) struct Picture {
    kinds: BTreeMap<Kind, Arc<Objects>>,
}

/// Where watches write and loops read; a loop is woken by every change.
pub(crate) type Feed = Arc<watch::Sender<Picture>>;

pub(crate) fn feed() -> Feed {
    Arc::new(watch::Sender::new(Picture::default()))
}

impl Picture {
    pub(crate) fn is_complete(&self, kinds: &[Kind]) -> bool {
        kinds.iter().all(|kind| self.kinds.contains_key(kind))
    }

    /// The objects of a kind; `None` as long as its first list has not ended.
    pub(crate) fn objects(&self, kind: Kind) -> Option<&Arc<Objects>> {
        self.kinds.get(&kind)
    }

    pub(crate) fn all(&self, kind: Kind) -> impl Iterator<Item = &Arc<Object>> {
        self.kinds.get(&kind).into_iter().flat_map(|it| it.values())
    }

    pub(crate) fn within<'a>(&'a self, kind: Kind, namespace: &'a str) -> impl Iterator<Item = &'a Arc<Object>> {
        self.all(kind).filter(move |it| it.namespace() == namespace)
    }

    pub(crate) fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<&Arc<Object>> {
        self.kinds.get(&kind)?.get(&Key::new(namespace, name))
    }

    /// A complete list takes the place of what was known.
    pub(crate) fn replace(&mut self, kind: Kind, objects: Objects) {
        self.kinds.insert(kind, Arc::new(objects));
    }

    /// Notes that a kind has no objects, unless more is known of it. Says whether that changed anything.
    pub(crate) fn set_empty_if_unknown(&mut self, kind: Kind) -> bool {
        let is_new = !self.kinds.contains_key(&kind);
        self.kinds.entry(kind).or_default();
        is_new
    }

    pub(crate) fn apply(&mut self, kind: Kind, object: Object) {
        Arc::make_mut(self.kinds.entry(kind).or_default()).insert(object.key(), Arc::new(object));
    }

    pub(crate) fn delete(&mut self, kind: Kind, key: &Key) {
        Arc::make_mut(self.kinds.entry(kind).or_default()).remove(key);
    }
}

#[cfg(test)]
impl Picture {
    /// A picture in which every kind is complete, with these objects.
    pub(crate) fn of(objects: impl IntoIterator<Item = (Kind, serde_json::Value)>) -> Self {
        let mut picture = Self::default();
        for kind in Kind::ALL {
            picture.replace(kind, Objects::new());
        }
        for (kind, value) in objects {
            picture.apply(kind, Object::new(value));
        }
        picture
    }
}
