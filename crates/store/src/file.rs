//! Objects as files of one host, for development and small single-host installations.
//!
//! Check and write happen under an exclusive lock of `.lock`, which other processes on the host respect too. A write
//! goes to a temporary file, is synced, renamed over the object, and the directory is synced: a reader sees the old
//! object or the new one, and a crash leaves one of the two. Readers need no lock, because a rename is atomic.

mod upkeep;

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use nstance_core::{
    ports::objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError, StoreFault, Unavailable},
    time::Timestamp,
};

use crate::{
    key::{check_key, check_prefix, invalid, normal_prefix},
    memory::{not_found, precondition},
};

/// At the root, beside the objects; no key may begin with one of these.
const LOCK: &str = ".lock";
const TEMPORARY: &str = ".tmp";

/// Durable on this host's disk. One host only: `flock` over a network file system is not trusted.
#[derive(Clone)]
pub struct FileStore {
    inner: Arc<Inner>,
}

struct Inner {
    root: PathBuf,
    prefix: String,
    /// Names temporary files apart within this process; the process id does it between processes.
    n_temporary: AtomicU64,
}

impl FileStore {
    /// Opens or makes the directory. Keys live below `prefix` inside it.
    pub fn open(dir: impl AsRef<Path>, prefix: &str) -> Result<Self, StoreError> {
        let prefix = normal_prefix(prefix)?;
        let root = dir.as_ref().to_owned();
        let opened = make_dirs(&root).and_then(|()| make_dirs(&root.join(TEMPORARY))).and_then(|()| lock_file(&root));
        opened.map_err(|error| failed("open", &root.display().to_string(), &error))?;
        Ok(Self { inner: Arc::new(Inner { root, prefix, n_temporary: AtomicU64::new(0) }) })
    }

    /// Runs `work` on a blocking thread. If the caller goes away the work still ends: it is atomic either way.
    async fn blocking<T: Send + 'static>(
        &self,
        op: &'static str,
        key: &str,
        work: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = self.inner.clone();
        match tokio::task::spawn_blocking(move || work(&inner)).await {
            Ok(done) => done,
            // The runtime is ending, or the work panicked: nobody knows how far it came.
            Err(error) => Err(StoreError::new(op, key, StoreFault::Ambiguous, error.to_string())),
        }
    }
}

impl Inner {
    fn path(&self, op: &'static str, key: &str) -> Result<PathBuf, StoreError> {
        check_key(op, key)?;
        let full = format!("{}{key}", self.prefix);
        let first = full.split('/').next().unwrap_or_default();
        if first == LOCK || first == TEMPORARY {
            return Err(invalid(op, key, "the key is taken by the store itself"));
        }
        Ok(self.root.join(full))
    }

    fn get(&self, op: &'static str, key: &str) -> Result<Object, StoreError> {
        let path = self.path(op, key)?;
        let body = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => not_found(op, key),
            // `a/b` where `a` is an object, or `a` where `a/b` is one: no object has that name.
            io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => not_found(op, key),
            _ => failed(op, key, &error),
        })?;
        let modified = fs::metadata(&path).ok().and_then(|it| it.modified().ok()).and_then(wall);
        let etag = etag(&body);
        Ok(Object { body, etag, modified })
    }

    fn put(&self, key: &str, body: &[u8], condition: &Condition) -> Result<ETag, StoreError> {
        let path = self.path("put", key)?;
        let fail = |error: &io::Error| failed("put", key, error);
        let _lock = self.lock("put", key)?;
        let present = match self.get("put", key) {
            Ok(object) => Some(object.etag),
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error),
        };
        match (condition, present) {
            (Condition::Create, None) => {}
            (Condition::Create, Some(_)) => return Err(precondition("put", key, "the object exists")),
            (Condition::Match(wanted), Some(present)) if *wanted == present => {}
            (Condition::Match(_), Some(_)) => return Err(precondition("put", key, "the object has another version")),
            (Condition::Match(_), None) => return Err(precondition("put", key, "the object is missing")),
        }
        let parent = path.parent().unwrap_or(&self.root);
        make_dirs(parent).map_err(|error| fail(&error))?;
        let temporary = self.root.join(TEMPORARY).join(format!(
            "{}.{}",
            std::process::id(),
            self.n_temporary.fetch_add(1, Ordering::Relaxed)
        ));
        let written = write_synced(&temporary, body).and_then(|()| fs::rename(&temporary, &path));
        if let Err(error) = written {
            // Nothing took the object's place, so the write surely did not happen.
            let _ = fs::remove_file(&temporary);
            return Err(fail(&error));
        }
        // Renamed: from here on the write may be seen, so a failing sync leaves its durability unknown.
        self.sync_up(parent)
            .map_err(|error| StoreError::new("put", key, StoreFault::Ambiguous, format!("sync directory: {error}")))?;
        Ok(etag(body))
    }

    fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.path("delete", key)?;
        let _lock = self.lock("delete", key)?;
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if is_absence(&error) => return Ok(()),
            // Linux says EISDIR or EPERM for a directory: no object has that name.
            Err(_) if path.is_dir() => return Ok(()),
            Err(error) => return Err(failed("delete", key, &error)),
        }
        let mut parent = path.parent();
        while let Some(dir) = parent.filter(|dir| *dir != self.root) {
            // Empty directories would stand in the way of an object with their name.
            if fs::remove_dir(dir).is_err() {
                break;
            }
            parent = dir.parent();
        }
        File::open(parent.unwrap_or(&self.root))
            .and_then(|dir| dir.sync_all())
            .map_err(|error| StoreError::new("delete", key, StoreFault::Ambiguous, format!("sync directory: {error}")))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        check_prefix("list", prefix)?;
        // Under the lock, so that the list is a moment and not a stroll: T40 asks for linearizable, lists included.
        let _lock = self.lock("list", prefix)?;
        let full = format!("{}{prefix}", self.prefix);
        let start = full.rsplit_once('/').map_or(self.root.clone(), |(dir, _)| self.root.join(dir));
        let mut listed = Vec::new();
        let mut dirs = vec![start];
        while let Some(dir) = dirs.pop() {
            let entries = match fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(error) if is_absence(&error) => continue,
                Err(error) => return Err(failed("list", prefix, &error)),
            };
            for entry in entries {
                let entry = entry.map_err(|error| failed("list", prefix, &error))?;
                let kind = entry.file_type().map_err(|error| failed("list", prefix, &error))?;
                let path = entry.path();
                let relative = path.strip_prefix(&self.root).unwrap_or(&path);
                if relative == Path::new(LOCK) || relative == Path::new(TEMPORARY) {
                    continue;
                }
                if kind.is_dir() {
                    dirs.push(path);
                    continue;
                }
                // A name that is not UTF-8 cannot be ours.
                let Some(name) = relative.to_str().filter(|name| name.starts_with(&full)) else { continue };
                let key = name[self.prefix.len()..].to_owned();
                let body = fs::read(&path).map_err(|error| failed("list", &key, &error))?;
                listed.push(Listed { etag: etag(&body), size: body.len() as u64, key });
            }
        }
        listed.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(listed)
    }

    fn lock(&self, op: &'static str, key: &str) -> Result<File, StoreError> {
        let file = lock_file(&self.root).map_err(|error| failed(op, key, &error))?;
        file.lock().map_err(|error| failed(op, key, &error))?;
        Ok(file)
    }

    /// Syncs `dir` and its parents up to the root: a directory made a moment ago must survive a crash as well.
    fn sync_up(&self, dir: &Path) -> io::Result<()> {
        let mut dir = Some(dir);
        while let Some(it) = dir.filter(|it| it.starts_with(&self.root)) {
            File::open(it)?.sync_all()?;
            dir = it.parent();
        }
        Ok(())
    }
}

fn lock_file(root: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(root.join(LOCK))
}

fn make_dirs(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn write_synced(path: &Path, body: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.write_all(body)?;
    file.sync_all()
}

fn etag(body: &[u8]) -> ETag {
    ETag(data_encoding::HEXLOWER.encode(ring::digest::digest(&ring::digest::SHA256, body).as_ref()))
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn wall(at: std::time::SystemTime) -> Option<Timestamp> {
    let since = at.duration_since(std::time::UNIX_EPOCH).ok()?;
    Some(Timestamp::from_millis(i64::try_from(since.as_millis()).ok()?))
}

/// Errors of the file system before anything was changed: surely not applied.
fn failed(op: &'static str, key: &str, error: &io::Error) -> StoreError {
    let kind = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Unavailable::Denied,
        io::ErrorKind::NotADirectory
        | io::ErrorKind::IsADirectory
        | io::ErrorKind::DirectoryNotEmpty
        | io::ErrorKind::AlreadyExists
        | io::ErrorKind::InvalidFilename => Unavailable::Invalid,
        _ => Unavailable::Network,
    };
    StoreError::new(op, key, StoreFault::Unavailable(kind), error.to_string())
}

#[async_trait]
impl ObjectStore for FileStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        let name = key.to_owned();
        self.blocking("get", key, move |inner| inner.get("get", &name)).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        let object = self.get(key).await?;
        Ok((object.etag != *etag).then_some(object))
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        let name = key.to_owned();
        self.blocking("put", key, move |inner| inner.put(&name, &body, &condition)).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let name = key.to_owned();
        self.blocking("delete", key, move |inner| inner.delete(&name)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        let name = prefix.to_owned();
        self.blocking("list", prefix, move |inner| inner.list(&name)).await
    }

    fn describe(&self) -> String {
        format!("file://{}/{}", self.inner.root.display(), self.inner.prefix.trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::contract;

    fn open(dir: &Path) -> Arc<dyn ObjectStore> {
        Arc::new(FileStore::open(dir, "some/prefix").unwrap())
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn files_keep_the_contract() {
        let dirs = std::sync::Mutex::new(Vec::new());
        contract::suite(async || {
            let dir = tempfile::tempdir().unwrap();
            let store = open(dir.path());
            dirs.lock().unwrap().push(dir);
            store
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn file_store_is_linearizable() {
        let dir = tempfile::tempdir().unwrap();
        let handles = [open(dir.path()), open(dir.path()), open(dir.path())];
        contract::of_many_creates_one_wins(&handles).await;
        contract::every_acknowledged_swap_counts(&handles).await;
    }

    /// The child's part of the next test; by itself it does nothing.
    #[tokio::test]
    async fn helper_increments_a_counter_of_another_process() {
        let Some(dir) = std::env::var_os("NSTANCE_TEST_FILE_STORE") else { return };
        let store = FileStore::open(Path::new(&dir), "").unwrap();
        let mut n_done = 0;
        while n_done < 25 {
            let object = store.get("counter").await.unwrap();
            let next = String::from_utf8(object.body).unwrap().parse::<u32>().unwrap() + 1;
            match store.put("counter", next.to_string().into_bytes(), Condition::Match(object.etag)).await {
                Ok(_) => n_done += 1,
                Err(error) => assert!(error.is_precondition(), "{error:?}"),
            }
        }
    }

    #[tokio::test]
    async fn processes_do_not_lose_each_others_writes() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), "").unwrap();
        store.put("counter", b"0".to_vec(), Condition::Create).await.unwrap();
        let child = || {
            std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "file::tests::helper_increments_a_counter_of_another_process"])
                .env("NSTANCE_TEST_FILE_STORE", dir.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap()
        };
        for mut child in [child(), child(), child()] {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(store.get("counter").await.unwrap().body, b"75");
    }

    #[tokio::test]
    async fn files_are_private_and_nothing_is_left_lying() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("made");
        let store = FileStore::open(&root, "p").unwrap();
        let etag = store.put("a/b/c", b"x".to_vec(), Condition::Create).await.unwrap();
        store.put("a/b/c", b"y".to_vec(), Condition::Match(etag)).await.unwrap();
        let mode = |path: &str| fs::metadata(root.join(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(""), mode("p/a"), mode("p/a/b/c"), mode(".lock")), (0o700, 0o700, 0o600, 0o600));
        assert_eq!(fs::read_dir(root.join(TEMPORARY)).unwrap().count(), 0);
        store.delete("a/b/c").await.unwrap();
        assert!(!root.join("p").exists(), "empty directories go with their last object");
        store.put("a", b"x".to_vec(), Condition::Create).await.unwrap();
        let below = store.put("a/b", b"x".to_vec(), Condition::Create).await.unwrap_err();
        assert_eq!(below.fault, StoreFault::Unavailable(Unavailable::Invalid), "an object is no directory");
    }

    #[tokio::test]
    async fn the_stores_own_files_are_no_objects() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), "").unwrap();
        for key in [".lock", ".tmp/x"] {
            let put = store.put(key, b"x".to_vec(), Condition::Create).await.unwrap_err();
            assert_eq!(put.fault, StoreFault::Unavailable(Unavailable::Invalid));
        }
        assert_eq!(store.list("").await.unwrap(), []);
    }
}
