//! Files that others wrote, changed or removed.

use std::{io, sync::Arc};

use serde_json::{Value, json};

use super::{Store, Txn, disk};
use crate::{
    object::{self, Key, generation, is_deleting, set_field, set_metadata, uid},
    resources::{DEFINITIONS, Resource},
};

#[derive(Clone, Copy, PartialEq)]
enum Moment {
    /// At start: files carry the versions that were given to them.
    Start,
    Running,
}

impl Store {
    pub(super) fn load(&self) -> io::Result<()> {
        // Definitions first: they say which other directories hold objects.
        if let Some(definitions) = self.registry.by_id(DEFINITIONS) {
            self.scan(&definitions, Moment::Start);
        }
        for resource in self.registry.all() {
            self.scan(&resource, Moment::Start);
        }
        // Files were read in the order of their names, which is no history.
        let mut inner = self.lock();
        let version = inner.version;
        for table in inner.tables.values_mut() {
            table.log.clear();
            table.forgotten = version;
        }
        if inner.reserved < version {
            // The counter's file was lost; the object with the highest version may be lost next.
            inner.reserved = version + super::RESERVED;
            self.disk.reserve(inner.reserved)?;
        }
        Ok(())
    }

    /// Compares all files with what is known.
    pub(super) fn rescan(&self) {
        for resource in self.registry.all() {
            self.scan(&resource, Moment::Running);
        }
    }

    fn scan(&self, resource: &Resource, moment: Moment) {
        let mut keys = self.disk.keys(resource);
        let inner = self.lock();
        keys.extend(inner.tables.get(&resource.id).into_iter().flat_map(|table| table.objects.keys().cloned()));
        drop(inner);
        keys.sort();
        keys.dedup();
        for key in keys {
            self.sync(resource, &key, moment);
        }
    }

    /// Takes over what a file says now.
    pub(super) fn sync_file(&self, resource: &Resource, key: &Key) {
        self.sync(resource, key, Moment::Running);
    }

    fn sync(&self, resource: &Resource, key: &Key, moment: Moment) {
        let synced = self.transact(|txn| txn.sync(resource, key, moment));
        if let Err(error) = synced {
            let path = self.disk.path(resource, key);
            tracing::warn!(path = %path.display(), %error, "file not taken over");
        }
    }
}

impl Txn<'_> {
    /// The object as its file says now, for a change of it: an edit by hand that was not noticed yet must not be lost.
    pub(crate) fn current(&mut self, resource: &Resource, key: &Key) -> Option<Arc<Value>> {
        if let Err(error) = self.sync(resource, key, Moment::Running) {
            let path = self.store.disk.path(resource, key);
            tracing::warn!(path = %path.display(), %error, "file not taken over");
        }
        self.get(resource, key)
    }

    fn sync(&mut self, resource: &Resource, key: &Key, moment: Moment) -> io::Result<()> {
        let disk = &self.store.disk;
        let path = disk.path(resource, key);
        let known = self.inner.table(&resource.id).objects.get(key);
        let known = known.map(|entry| (entry.object.clone(), entry.file));
        let Some(bytes) = disk.read(resource, key)? else {
            self.inner.unreadable.remove(&path);
            if let Some((before, _)) = known {
                tracing::info!(path = %path.display(), "file removed by hand");
                let version = self.next_version()?;
                self.unindex(resource, key, (*before).clone(), version);
            }
            return Ok(());
        };
        let file = disk::hash(&bytes);
        // A file that was only just created; its content is notified separately.
        if bytes.is_empty() && known.is_none() {
            return Ok(());
        }
        if known.as_ref().is_some_and(|(_, it)| *it == file) || self.inner.unreadable.get(&path) == Some(&file) {
            return Ok(());
        }
        let read: Result<Value, String> = match serde_json::from_slice(&bytes) {
            Ok(Value::Object(fields)) => Ok(Value::Object(fields)),
            Ok(_) => Err("it is not a JSON object".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let mut object = match read {
            Ok(object) => object,
            Err(error) => {
                tracing::warn!(path = %path.display(), error, "file is not valid JSON; its last good content is kept");
                self.inner.unreadable.insert(path, file);
                return Ok(());
            }
        };
        self.inner.unreadable.remove(&path);
        if moment == Moment::Start && is_complete(resource, key, &object) {
            let version = object::version(&object).unwrap_or(0);
            self.inner.version = self.inner.version.max(version);
            self.index(resource, key, object, file, version);
            return Ok(());
        }
        let before = known.map(|(object, _)| object);
        self.complete(resource, key, before.as_deref(), &mut object);
        if let Some(before) = &before {
            if **before == object {
                // Written again all the same: it may lack what it needs at the next start, its uid for one.
                let file = self.store.disk.rewrite(resource, key, &object, file)?;
                self.inner.table(&resource.id).objects.entry(key.clone()).and_modify(|entry| entry.file = file);
                return Ok(());
            }
            if is_deleting(&object) && object::finalizers(&object).next().is_none() {
                return self.remove(resource, key, object).map(drop).map_err(io::Error::other);
            }
        }
        let version = self.next_version()?;
        set_metadata(&mut object, "resourceVersion", Some(json!(version.to_string())));
        if resource.id == DEFINITIONS {
            super::establish(&mut object, &*self.store.clock);
        }
        let file = self.store.disk.rewrite(resource, key, &object, file)?;
        self.index(resource, key, object, file, version);
        Ok(())
    }

    /// Gives an object from a file what only the server sets; of a known one that stays as it is.
    fn complete(&mut self, resource: &Resource, key: &Key, before: Option<&Value>, object: &mut Value) {
        if !object.get("apiVersion").is_some_and(Value::is_string) {
            set_field(object, "apiVersion", Some(json!(resource.storage_api_version())));
        }
        if !object.get("kind").is_some_and(Value::is_string) {
            set_field(object, "kind", Some(json!(resource.kind)));
        }
        set_metadata(object, "name", Some(json!(key.name)));
        set_metadata(object, "namespace", resource.namespaced.then(|| json!(key.namespace)));
        if let Some(before) = before {
            for field in ["uid", "creationTimestamp", "deletionTimestamp", "resourceVersion"] {
                set_metadata(object, field, before["metadata"].get(field).cloned());
            }
            if resource.counts_generations() {
                let more = i64::from(differs_in_spec(before, object));
                set_metadata(object, "generation", Some(json!(generation(before) + more)));
            }
            return;
        }
        // A copied file brings the uid of its original.
        let taken = |uid: &str| {
            let table = self.inner.tables.get(&resource.id);
            table.is_some_and(|table| table.objects.values().any(|entry| object::uid(&entry.object) == uid))
        };
        if uid(object).is_empty() || taken(uid(object)) {
            set_metadata(object, "uid", Some(json!(object::new_uid(&self.store.entropy))));
        }
        if object::text(object, "/metadata/creationTimestamp").is_empty() {
            set_metadata(object, "creationTimestamp", Some(object::now(&*self.store.clock)));
        }
        if resource.counts_generations() && generation(object) < 1 {
            set_metadata(object, "generation", Some(json!(1)));
        }
    }
}

/// Whether a file holds an object as this server wrote it.
fn is_complete(resource: &Resource, key: &Key, object: &Value) -> bool {
    let namespace = if resource.namespaced { key.namespace.as_str() } else { "" };
    object::version(object).is_some()
        && !uid(object).is_empty()
        && object::name(object) == key.name
        && object::namespace(object) == namespace
        && object.get("kind").is_some_and(Value::is_string)
        && object.get("apiVersion").is_some_and(Value::is_string)
}

/// Whether two objects differ in more than metadata and status.
pub(crate) fn differs_in_spec(a: &Value, b: &Value) -> bool {
    let spec = |object: &Value| {
        let mut fields = object.as_object().cloned().unwrap_or_default();
        for field in ["apiVersion", "kind", "metadata", "status"] {
            fields.shift_remove(field);
        }
        fields
    };
    spec(a) != spec(b)
}
