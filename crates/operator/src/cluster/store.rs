//! What is known of the objects of one kind, kept by a watch.
//!
//! A store says whether its first complete list was read: until then, absence proves nothing.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

/// An object of a known kind. The namespace is empty for kinds without one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

impl ObjectKey {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    pub fn of<K: kube::Resource>(object: &K) -> Self {
        let meta = object.meta();
        Self { namespace: meta.namespace.clone().unwrap_or_default(), name: meta.name.clone().unwrap_or_default() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.namespace, self.name) }
    }
}

/// One object before and after a change.
pub struct Change<'a, K> {
    pub key: &'a ObjectKey,
    pub old: Option<&'a Arc<K>>,
    pub new: Option<&'a Arc<K>>,
}

type Listener<K> = Box<dyn Fn(&Change<'_, K>) + Send + Sync>;

pub struct Store<K> {
    objects: Mutex<BTreeMap<ObjectKey, Arc<K>>>,
    listeners: Mutex<Vec<Listener<K>>>,
    synced: watch::Sender<bool>,
}

impl<K> Default for Store<K> {
    fn default() -> Self {
        Self { objects: Mutex::default(), listeners: Mutex::default(), synced: watch::Sender::new(false) }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: kube::Resource> Store<K> {
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Arc<K>> {
        locked(&self.objects).get(key).cloned()
    }

    pub fn named(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.get(&ObjectKey::new(namespace, name))
    }

    pub fn all(&self) -> Vec<Arc<K>> {
        locked(&self.objects).values().cloned().collect()
    }

    pub fn filter(&self, is_wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        locked(&self.objects).values().filter(|it| is_wanted(it)).cloned().collect()
    }

    pub fn len(&self) -> usize {
        locked(&self.objects).len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the first complete list was read.
    pub fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    pub async fn until_synced(&self) {
        let mut synced = self.synced.subscribe();
        // The sender lives as long as `self`.
        let _ = synced.wait_for(|it| *it).await;
    }

    /// Calls `listener` at every change from now on. It must be quick and must not wait: it puts keys into queues.
    pub fn on_change(&self, listener: impl Fn(&Change<'_, K>) + Send + Sync + 'static) {
        locked(&self.listeners).push(Box::new(listener));
    }

    /// An object as the watch shows it. Answers to our own writes do not come here: they may arrive after a delete. One with an
    /// older `resourceVersion` than the known one is ignored if both can be compared.
    pub fn put(&self, object: K) {
        let key = ObjectKey::of(&object);
        let new = Arc::new(object);
        let old = {
            let mut objects = locked(&self.objects);
            if let Some(known) = objects.get(&key)
                && is_older(&*new, &**known)
            {
                return;
            }
            objects.insert(key.clone(), new.clone())
        };
        self.tell(&Change { key: &key, old: old.as_ref(), new: Some(&new) });
    }

    pub fn remove(&self, key: &ObjectKey) {
        let Some(old) = locked(&self.objects).remove(key) else { return };
        self.tell(&Change { key, old: Some(&old), new: None });
    }

    /// A complete list: what it does not name is gone. A watch that broke off does not report deletes, this does.
    pub fn replace_all(&self, listed: Vec<K>) {
        let listed: BTreeMap<ObjectKey, K> = listed.into_iter().map(|it| (ObjectKey::of(&it), it)).collect();
        let gone: Vec<ObjectKey> =
            locked(&self.objects).keys().filter(|it| !listed.contains_key(it)).cloned().collect();
        for key in gone {
            self.remove(&key);
        }
        for object in listed.into_values() {
            self.put(object);
        }
        self.synced.send_replace(true);
    }

    /// Tells of every object as if it had just come, for listeners that were added after the first list.
    pub fn retell(&self) {
        for object in self.all() {
            self.tell(&Change { key: &ObjectKey::of(&*object), old: None, new: Some(&object) });
        }
    }

    fn tell(&self, change: &Change<'_, K>) {
        for listener in locked(&self.listeners).iter() {
            listener(change);
        }
    }
}

/// Of the same object (by uid), by numbers that all known API servers use.
fn is_older<K: kube::Resource>(new: &K, known: &K) -> bool {
    let version = |it: &K| it.meta().resource_version.as_ref().and_then(|it| it.parse::<u64>().ok());
    match (version(new), version(known)) {
        (Some(new_version), Some(known_version)) => new.meta().uid == known.meta().uid && new_version < known_version,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::ObjectMeta;

    use super::*;

    fn object(name: &str, version: u64) -> ConfigMap {
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        };
        ConfigMap { metadata, ..ConfigMap::default() }
    }

    #[test]
    fn a_list_after_a_broken_watch_reports_what_is_gone() {
        let store = Store::<ConfigMap>::new();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        store.on_change(move |change| {
            locked(&log).push(format!("{} {}", change.key, if change.new.is_some() { "put" } else { "gone" }));
        });
        assert!(!store.is_synced());
        store.replace_all(vec![object("a", 1), object("b", 2)]);
        store.replace_all(vec![object("b", 3)]);
        assert_eq!(*locked(&seen), ["a put", "b put", "a gone", "b put"]);
        assert!(store.is_synced());
    }

    #[test]
    fn an_older_version_does_not_replace_a_newer_one() {
        let store = Store::<ConfigMap>::new();
        store.put(object("a", 7));
        store.put(object("a", 5));
        assert_eq!(store.all()[0].metadata.resource_version.as_deref(), Some("7"));
    }
}
