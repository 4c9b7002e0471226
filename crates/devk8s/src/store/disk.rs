//! The files: `{resource}/{namespace}/{name}.json`, cluster-scoped `{resource}/{name}.json`, and beside them a hidden
//! directory with the counter.

use std::{
    fs,
    hash::{DefaultHasher, Hasher as _},
    io,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    object::{Key, is_name},
    resources::Resource,
};

/// What a file holds, in short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hash(u64);

pub(super) fn hash(bytes: &[u8]) -> Hash {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    Hash(hasher.finish())
}

const COUNTER: &str = ".state/version";

pub(super) struct Disk {
    dir: PathBuf,
}

impl Disk {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir.join(".state"))?;
        // Links are resolved once, so that paths of notifications compare equal.
        Ok(Self { dir: dir.canonicalize()? })
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The highest version that may have been given out.
    pub(super) fn reserved(&self) -> io::Result<u64> {
        match fs::read_to_string(self.dir.join(COUNTER)) {
            Ok(text) => Ok(text.trim().parse().unwrap_or(0)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        }
    }

    pub(super) fn reserve(&self, version: u64) -> io::Result<()> {
        replace(&self.dir.join(COUNTER), format!("{version}\n").as_bytes())
    }

    pub(super) fn resource_dir(&self, resource: &Resource) -> PathBuf {
        self.dir.join(&resource.dir)
    }

    pub(super) fn path(&self, resource: &Resource, key: &Key) -> PathBuf {
        let dir = self.resource_dir(resource);
        let dir = if resource.namespaced { dir.join(&key.namespace) } else { dir };
        dir.join(format!("{}.json", key.name))
    }

    /// Writes the object's file and says what it holds now.
    pub(super) fn write(&self, resource: &Resource, key: &Key, object: &Value) -> io::Result<Hash> {
        let mut bytes = serde_json::to_vec_pretty(object)?;
        bytes.push(b'\n');
        replace(&self.path(resource, key), &bytes)?;
        Ok(hash(&bytes))
    }

    /// Writes the object's file if it still holds `before`; otherwise it is left for the next notification.
    pub(super) fn rewrite(&self, resource: &Resource, key: &Key, object: &Value, before: Hash) -> io::Result<Hash> {
        match self.read(resource, key)? {
            Some(bytes) if hash(&bytes) == before => self.write(resource, key, object),
            _ => Ok(before),
        }
    }

    pub(super) fn read(&self, resource: &Resource, key: &Key) -> io::Result<Option<Vec<u8>>> {
        match fs::read(self.path(resource, key)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) fn remove(&self, resource: &Resource, key: &Key) -> io::Result<()> {
        match fs::remove_file(self.path(resource, key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The keys of all files of a resource.
    pub(super) fn keys(&self, resource: &Resource) -> Vec<Key> {
        let dir = self.resource_dir(resource);
        if !resource.namespaced {
            return names(&dir).map(|name| Key::new("", name)).collect();
        }
        let namespaces = directories(&dir);
        namespaces.flat_map(|ns| names(&dir.join(&ns)).map(move |name| Key::new(ns.clone(), name))).collect()
    }
}

/// Names of the directories in `dir`; none if it does not exist.
pub(super) fn directories(dir: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|it| it.file_type().is_ok_and(|it| it.is_dir()));
    dirs.filter_map(|it| it.file_name().into_string().ok()).filter(|it| is_name(it))
}

fn names(dir: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|it| name_of_file(&it.file_name().into_string().ok()?))
}

/// `x` for `x.json`.
pub(super) fn name_of_file(file: &str) -> Option<String> {
    file.strip_suffix(".json").filter(|it| is_name(it)).map(str::to_owned)
}

/// Replaces a file at once: readers see the old content or the new.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let (dir, file) = (path.parent(), path.file_name().and_then(|it| it.to_str()));
    let (Some(dir), Some(file)) = (dir, file) else { return Err(io::ErrorKind::InvalidInput.into()) };
    // The store's lock allows one writer at a time, so the name is free. The dot hides it from the listing.
    let temporary = dir.join(format!(".{file}.tmp"));
    if let Err(error) = fs::write(&temporary, bytes) {
        if error.kind() != io::ErrorKind::NotFound {
            return Err(error);
        }
        fs::create_dir_all(dir)?;
        fs::write(&temporary, bytes)?;
    }
    fs::rename(&temporary, path)
}
