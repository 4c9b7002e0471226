//! All objects, in memory and in files, and the history that watches are fed from.
//!
//! Invariants: one lock orders all changes; a change is in its file before it is in the index, and gets the next number
//! of one global counter, which is the object's resource version. What [`Change`] events a table still holds is a gapless
//! tail of its history.
//!
//! Files are written under the lock, by blocking calls: they are small, nothing is synced, and no reader sees a state
//! whose file does not exist yet.

mod adopt;
mod disk;
mod notify;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use nstance_core::ports::clock::Clock;
use nstance_rt::entropy::SystemEntropy;
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use self::disk::{Disk, Hash};
pub use self::notify::FileChanges;
pub(crate) use self::{adopt::differs_in_spec, notify::follow};
use crate::{
    error::ApiError,
    object::{self, Key, set_field, set_metadata},
    resources::{DEFINITIONS, Registry, Resource},
};

/// Numbers that are reserved in a file at once, so that not every change writes it. After a restart counting goes on
/// behind the reserved ones.
const RESERVED: u64 = 1000;

/// Snapshots of paged lists that are kept; the oldest goes first.
const MAX_SNAPSHOTS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    Added,
    Modified,
    Deleted,
}

#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) version: u64,
    pub(crate) change: Change,
    /// The object afterwards; of a deleted one its last state.
    pub(crate) object: Arc<Value>,
    pub(crate) before: Option<Arc<Value>>,
    pub(crate) at: Instant,
}

struct Entry {
    object: Arc<Value>,
    /// What its file holds.
    file: Hash,
}

/// The objects of one resource.
struct Table {
    objects: BTreeMap<Key, Entry>,
    log: VecDeque<Arc<Event>>,
    /// The last version whose event may have been dropped from the log.
    forgotten: u64,
    changed: watch::Sender<u64>,
}

/// A list that is being read page by page.
pub(crate) struct Snapshot {
    pub(crate) version: u64,
    pub(crate) objects: Vec<Arc<Value>>,
}

struct Inner {
    version: u64,
    reserved: u64,
    tables: HashMap<String, Table>,
    snapshots: VecDeque<(u64, Arc<Snapshot>)>,
    n_snapshots: u64,
    /// Files that were reported as unreadable, with what they held.
    unreadable: HashMap<std::path::PathBuf, Hash>,
}

impl Inner {
    fn table(&mut self, id: &str) -> &mut Table {
        if !self.tables.contains_key(id) {
            let (changed, _) = watch::channel(0);
            let table = Table { objects: BTreeMap::new(), log: VecDeque::new(), forgotten: self.version, changed };
            self.tables.insert(id.to_owned(), table);
        }
        self.tables.get_mut(id).expect("it was inserted above")
    }
}

pub(crate) struct Store {
    pub(crate) registry: Registry,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: SystemEntropy,
    disk: Disk,
    inner: Mutex<Inner>,
    /// Woken when a resource was defined, for files of it may be there already.
    defined: Notify,
    /// Events that a table keeps.
    window: usize,
}

impl Store {
    /// Reads all files below `dir`.
    pub(crate) fn open(dir: &Path, clock: Arc<dyn Clock>, registry: Registry, window: usize) -> io::Result<Self> {
        let disk = Disk::open(dir)?;
        let version = disk.reserved()?;
        let inner = Inner {
            version,
            reserved: version,
            tables: HashMap::new(),
            snapshots: VecDeque::new(),
            n_snapshots: 0,
            unreadable: HashMap::new(),
        };
        let (defined, inner) = (Notify::new(), Mutex::new(inner));
        let store = Self { registry, clock, entropy: SystemEntropy::new(), disk, inner, defined, window };
        store.load()?;
        Ok(store)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks and changes; nothing else happens meanwhile.
    pub(crate) fn transact<T>(&self, work: impl FnOnce(&mut Txn<'_>) -> T) -> T {
        work(&mut Txn { store: self, inner: self.lock() })
    }

    /// Drops the history, as the compaction of a real API server does: every watch must list again.
    pub(crate) fn forget_history(&self) {
        let mut inner = self.lock();
        // One version that no client knows, so that even a client that missed nothing is behind.
        inner.version += 1;
        let version = inner.version;
        for table in inner.tables.values_mut() {
            table.log.clear();
            table.forgotten = version;
            table.changed.send_replace(version);
        }
        inner.snapshots.clear();
    }
}

/// What a watch gets when it asks for news.
pub(crate) enum News {
    /// Events in order, and the version up to which nothing is missing.
    Events(Vec<Arc<Event>>, u64),
    /// The history does not reach back that far.
    Forgotten,
}

/// Exclusive access to the store.
pub(crate) struct Txn<'a> {
    pub(crate) store: &'a Store,
    inner: MutexGuard<'a, Inner>,
}

impl Txn<'_> {
    /// The version of the last change of all.
    pub(crate) fn version(&self) -> u64 {
        self.inner.version
    }

    pub(crate) fn get(&self, resource: &Resource, key: &Key) -> Option<Arc<Value>> {
        Some(self.inner.tables.get(&resource.id)?.objects.get(key)?.object.clone())
    }

    /// Objects of a resource in the order of their keys; of one namespace, or of all if it is `None`.
    pub(crate) fn list(&self, id: &str, namespace: Option<&str>) -> Vec<Arc<Value>> {
        let Some(table) = self.inner.tables.get(id) else { return Vec::new() };
        let inside = |key: &Key| namespace.is_none_or(|it| key.namespace == it);
        table.objects.iter().filter(|(key, _)| inside(key)).map(|(_, entry)| entry.object.clone()).collect()
    }

    /// Events after `since`, and a signal for those to come.
    pub(crate) fn news(&mut self, id: &str, since: u64) -> (News, watch::Receiver<u64>) {
        let version = self.inner.version;
        let table = self.inner.table(id);
        let receiver = table.changed.subscribe();
        if since < table.forgotten || version < since {
            return (News::Forgotten, receiver);
        }
        let first = table.log.partition_point(|event| event.version <= since);
        (News::Events(table.log.range(first..).cloned().collect(), version), receiver)
    }

    /// Keeps a list for the pages to come and says under which number.
    pub(crate) fn keep(&mut self, snapshot: Arc<Snapshot>) -> u64 {
        self.inner.n_snapshots += 1;
        let number = self.inner.n_snapshots;
        if self.inner.snapshots.len() == MAX_SNAPSHOTS {
            self.inner.snapshots.pop_front();
        }
        self.inner.snapshots.push_back((number, snapshot));
        number
    }

    /// A kept list, unless it is gone or older than the events that are kept.
    pub(crate) fn kept(&self, number: u64) -> Option<Arc<Snapshot>> {
        let (_, snapshot) = self.inner.snapshots.iter().find(|(it, _)| *it == number)?;
        let window = u64::try_from(self.store.window).unwrap_or(u64::MAX);
        (self.inner.version.saturating_sub(snapshot.version) <= window).then(|| snapshot.clone())
    }

    fn next_version(&mut self) -> io::Result<u64> {
        let next = self.inner.version + 1;
        if self.inner.reserved < next {
            let reserved = next + RESERVED;
            self.store.disk.reserve(reserved)?;
            self.inner.reserved = reserved;
        }
        self.inner.version = next;
        Ok(next)
    }

    /// Stores an object, new or changed, under the next version.
    pub(crate) fn put(&mut self, resource: &Resource, key: &Key, mut object: Value) -> Result<Arc<Value>, ApiError> {
        let failed = |error: &io::Error| {
            ApiError::internal(format!("write {} {}/{}: {error}", resource.id, key.namespace, key.name))
        };
        if resource.id == DEFINITIONS {
            establish(&mut object, &*self.store.clock);
        }
        let version = self.next_version().map_err(|error| failed(&error))?;
        set_metadata(&mut object, "resourceVersion", Some(json!(version.to_string())));
        let file = self.store.disk.write(resource, key, &object).map_err(|error| failed(&error))?;
        Ok(self.index(resource, key, object, file, version))
    }

    /// Takes a stored object up into the index, and tells the watches.
    fn index(&mut self, resource: &Resource, key: &Key, object: Value, file: Hash, version: u64) -> Arc<Value> {
        let object = Arc::new(object);
        let entry = Entry { object: object.clone(), file };
        let before = self.inner.table(&resource.id).objects.insert(key.clone(), entry).map(|it| it.object);
        if resource.id == DEFINITIONS && self.store.registry.define(&object) {
            self.store.defined.notify_one();
        }
        let change = if before.is_some() { Change::Modified } else { Change::Added };
        self.log(resource, Event { version, change, object: object.clone(), before, at: Instant::now() });
        object
    }

    /// Removes an object, whose last state is `object`.
    pub(crate) fn remove(&mut self, resource: &Resource, key: &Key, object: Value) -> Result<Arc<Value>, ApiError> {
        let failed = |error: &io::Error| {
            ApiError::internal(format!("remove {} {}/{}: {error}", resource.id, key.namespace, key.name))
        };
        let version = self.next_version().map_err(|error| failed(&error))?;
        self.store.disk.remove(resource, key).map_err(|error| failed(&error))?;
        Ok(self.unindex(resource, key, object, version))
    }

    fn unindex(&mut self, resource: &Resource, key: &Key, mut object: Value, version: u64) -> Arc<Value> {
        let before = self.inner.table(&resource.id).objects.remove(key).map(|it| it.object);
        set_metadata(&mut object, "resourceVersion", Some(json!(version.to_string())));
        let object = Arc::new(object);
        self.log(
            resource,
            Event { version, change: Change::Deleted, object: object.clone(), before, at: Instant::now() },
        );
        if resource.id == DEFINITIONS {
            self.store.registry.undefine(&key.name);
        }
        object
    }

    fn log(&mut self, resource: &Resource, event: Event) {
        let window = self.store.window;
        let table = self.inner.table(&resource.id);
        let version = event.version;
        table.log.push_back(Arc::new(event));
        if window < table.log.len() {
            table.forgotten = table.log.pop_front().map_or(table.forgotten, |it| it.version);
        }
        table.changed.send_replace(version);
    }
}

/// Fills in the status that a real API server gives to a definition it serves.
fn establish(definition: &mut Value, clock: &dyn Clock) {
    let names = definition.pointer("/spec/names").cloned().unwrap_or_else(|| json!({}));
    let versions = definition.pointer("/spec/versions").and_then(Value::as_array).into_iter().flatten();
    let stored: Vec<Value> = versions.filter(|it| it["storage"] == true).map(|it| it["name"].clone()).collect();
    let old = definition.pointer("/status/conditions").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut conditions = old.clone();
    for (kind, reason) in [("NamesAccepted", "NoConflicts"), ("Established", "InitialNamesAccepted")] {
        if !old.iter().any(|it| it["type"] == kind && it["status"] == "True") {
            conditions.retain(|it| it["type"] != kind);
            conditions.push(json!({
                "type": kind, "status": "True", "reason": reason, "message": "the initial names have been accepted",
                "lastTransitionTime": object::now(clock),
            }));
        }
    }
    let status = json!({ "acceptedNames": names, "conditions": conditions, "storedVersions": stored });
    set_field(definition, "status", Some(status));
}
