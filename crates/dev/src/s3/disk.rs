//! Objects as files: the synchronous heart of the store, run on blocking threads.
//!
//! What makes it linearizable:
//!
//! - A write goes to a temporary file first, is synced there, and becomes visible by one `rename`.
//! - Between looking at what is there and the rename, the writer holds the key's lock; so every condition is
//!   decided and acted on in one step. Only that step is locked: nobody waits for another's sync.
//! - A read opens the file once. It sees one whole version, that of the moment of opening, and takes no lock.
//! - A listing shuts out all renames while it looks, so it is a snapshot.
//! - After `close` nothing becomes visible any more. Blocking threads outlive their cancelled request, and a
//!   straggler must not write beside the next server on the same directory, whose locks it does not know.
//!
//! Locks are taken in the order upload, key, door, and never two of a kind.
//!
//! User metadata lies in an extended attribute, which the rename carries along. Where the file system has none,
//! it is lost and a warning says so once.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
    sync::{
        Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::SystemTime,
};

use rustix::fs::XattrFlags;

use super::{
    conditions::{Conditions, Refusal},
    etags::{Etags, etag_of},
    keys::{Entry, Found, Key, OWN_DIR, entry},
    listing::{Item, Page, Query, page},
    meta::Meta,
};

/// Keys share locks by hash. Two keys on one lock wait for each other's rename, which is microseconds.
const N_LOCKS: u64 = 256;
/// Every try loses only to another request's progress on the same directories, which cannot go on for long.
const MAX_TRIES: usize = 64;
const META_ATTRIBUTE: &str = "user.nstance.s3";

#[derive(Debug, thiserror::Error)]
pub(super) enum DiskError {
    #[error("no such key")]
    Missing,
    #[error("a condition of the request does not hold")]
    Precondition,
    #[error("the object is not modified")]
    NotModified,
    #[error("no such upload")]
    NoSuchUpload,
    #[error("part {0} is missing or its ETag differs")]
    InvalidPart(i32),
    #[error("parts are not in ascending order")]
    PartOrder,
    #[error("part {0} is too small for any but the last")]
    PartTooSmall(i32),
    #[error("the store is closed")]
    Closed,
    #[error("{action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl From<Refusal> for DiskError {
    fn from(refusal: Refusal) -> DiskError {
        match refusal {
            Refusal::Missing => DiskError::Missing,
            Refusal::Precondition => DiskError::Precondition,
            Refusal::NotModified => DiskError::NotModified,
        }
    }
}

pub(super) type DiskResult<T> = Result<T, DiskError>;

/// Attaches what was tried to an I/O error.
pub(super) fn io<T>(action: &'static str, path: &Path, result: io::Result<T>) -> DiskResult<T> {
    result.map_err(|source| DiskError::Io { action, path: path.to_owned(), source })
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) etag: String,
    pub(super) size: u64,
    pub(super) modified: SystemTime,
}

/// One version of an object, kept readable by its open file whatever happens to the key.
pub(super) struct Object {
    pub(super) stat: Stat,
    pub(super) file: File,
}

impl Object {
    pub(super) fn meta(&self) -> Meta {
        let mut text = Vec::with_capacity(4096);
        match rustix::fs::fgetxattr(&self.file, META_ATTRIBUTE, rustix::buffer::spare_capacity(&mut text)) {
            Ok(_) => serde_json::from_slice(&text).unwrap_or_default(),
            Err(_) => Meta::default(), // written by hand, or no attributes here
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) key: Key,
    pub(super) stat: Stat,
}

pub(super) struct Disk {
    pub(super) root: PathBuf,
    pub(super) durable: bool,
    pub(super) etags: Etags,
    keys: Vec<Mutex<()>>,
    pub(super) uploads: Vec<Mutex<()>>,
    door: RwLock<Door>,
    n_temp: AtomicU64,
    warned: AtomicBool,
}

enum Door {
    /// Holds the lock that keeps a second server off the directory.
    Open(#[expect(dead_code, reason = "held for its lock, released by dropping it")] File),
    Closed,
}

/// As long as it is held, the store is open and no listing looks.
pub(super) struct Pass<'a> {
    _door: RwLockReadGuard<'a, Door>,
}

/// A written and synced file that no key names yet. Removed unless it is renamed.
pub(super) struct Temp {
    pub(super) path: PathBuf,
    pub(super) file: File,
}

impl Drop for Temp {
    fn drop(&mut self) {
        // After the rename there is nothing here any more; what a crash leaves behind is swept at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

enum Try {
    Done {
        path: PathBuf,
        made: Vec<PathBuf>,
        stat: Stat,
    },
    /// The object of this key stands where a directory is needed.
    InTheWay(Key),
    Again,
}

impl Disk {
    pub(super) fn open(root: &Path, durable: bool) -> DiskResult<Disk> {
        let own = root.join(OWN_DIR);
        io("create", &own, fs::create_dir_all(&own))?;
        let lock = own.join("lock");
        let file = io("open", &lock, OpenOptions::new().create(true).append(true).open(&lock))?;
        io("lock (is another server using it?)", &lock, file.try_lock().map_err(io::Error::from))?;
        let temp = own.join("tmp");
        match fs::remove_dir_all(&temp) {
            Err(err) if err.kind() != ErrorKind::NotFound => io("sweep", &temp, Err(err))?,
            _ => (),
        }
        for dir in [temp, own.join("uploads")] {
            io("create", &dir, fs::create_dir_all(&dir))?;
        }
        let locks = || (0..N_LOCKS).map(|_| Mutex::default()).collect();
        Ok(Disk {
            root: root.to_owned(),
            durable,
            etags: Etags::default(),
            keys: locks(),
            uploads: locks(),
            door: RwLock::new(Door::Open(file)),
            n_temp: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        })
    }

    /// From here on nothing becomes visible, and the directory is free for another server.
    pub(super) fn close(&self) {
        *self.door.write().unwrap_or_else(PoisonError::into_inner) = Door::Closed;
    }

    pub(super) fn get(&self, key: &Key) -> DiskResult<Object> {
        self.find(key)?.ok_or(DiskError::Missing)
    }

    pub(super) fn put(&self, key: &Key, bytes: &[u8], meta: &Meta, conditions: &Conditions) -> DiskResult<Stat> {
        // A writer that has already lost need not wait for its sync to hear of it.
        self.check(key, conditions)?;
        let temp = self.write_temp(meta, |file| file.write_all(bytes))?;
        self.commit(key, temp, &etag_of(bytes), conditions)
    }

    /// Makes `temp` the object of `key`, if the conditions hold at that moment.
    pub(super) fn commit(&self, key: &Key, temp: Temp, etag: &str, conditions: &Conditions) -> DiskResult<Stat> {
        for _ in 0..MAX_TRIES {
            match self.try_commit(key, &temp, etag, conditions)? {
                Try::Done { path, made, stat } => {
                    self.sync_parents(&path, &made)?;
                    return Ok(stat);
                }
                Try::InTheWay(ancestor) => self.move_aside(&ancestor)?,
                Try::Again => (),
            }
        }
        let path = key.plain_path(&self.root);
        io("make room for", &path, Err(io::Error::from(ErrorKind::ResourceBusy)))
    }

    /// Removes the object. A missing one is a success, unless its ETag was asked for.
    pub(super) fn delete(&self, key: &Key, conditions: &Conditions) -> DiskResult<()> {
        let plain = key.plain_path(&self.root);
        {
            let _key = self.lock_key(key);
            let _pass = self.pass()?;
            let Some(_) = self.check(key, conditions)? else { return Ok(()) };
            // The one aside first: were both there, it is the older, and must not show through.
            for path in [&key.aside_path(&self.root), &plain] {
                match fs::remove_file(path) {
                    Ok(()) => self.etags.forget(path),
                    Err(err) if is_absence(&err) || err.kind() == ErrorKind::IsADirectory => (),
                    // Some systems say so when asked to unlink a directory.
                    Err(err) if err.kind() == ErrorKind::PermissionDenied && path.is_dir() => (),
                    Err(err) => io("remove", path, Err(err))?,
                }
            }
        }
        self.sync_parents(&plain, &[])?;
        // Empty directories are no objects; they would only litter a person's view.
        let mut dir = plain.parent();
        while let Some(at) = dir.filter(|at| *at != self.root && fs::remove_dir(at).is_ok()) {
            dir = at.parent();
        }
        Ok(())
    }

    pub(super) fn list(&self, query: &Query) -> DiskResult<Page<Listed>> {
        let _shut = self.door.write().unwrap_or_else(PoisonError::into_inner);
        let found = self.walk(&query.prefix, &query.after)?;
        let mut last = None;
        let objects = found.iter().filter_map(|file| file.object(&self.root)).filter(|key| {
            // An object both in its place and aside is one.
            let is_new = last.as_ref() != Some(key);
            last = Some(key.clone());
            is_new
        });
        let page = page(objects, query, Key::as_str);
        let mut items = Vec::with_capacity(page.items.len());
        for item in page.items {
            match item {
                Item::Prefix(prefix) => items.push(Item::Prefix(prefix)),
                Item::Object(key) => {
                    let found = self.find(&key)?; // none if it was taken away by hand just now
                    items.extend(found.map(|object| Item::Object(Listed { key, stat: object.stat })));
                }
            }
        }
        Ok(Page { items, next: page.next })
    }

    /// Everything there is, at one moment.
    pub(super) fn snapshot(&self) -> DiskResult<Vec<Listed>> {
        let page = self.list(&Query { max: usize::MAX, ..Query::default() })?;
        let objects = page.items.into_iter().filter_map(|item| match item {
            Item::Object(listed) => Some(listed),
            Item::Prefix(_) => None,
        });
        Ok(objects.collect())
    }

    pub(super) fn write_temp(&self, meta: &Meta, fill: impl FnOnce(&mut File) -> io::Result<()>) -> DiskResult<Temp> {
        let n = self.n_temp.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join(OWN_DIR).join("tmp").join(n.to_string());
        let file = io("create", &path, OpenOptions::new().read(true).write(true).create_new(true).open(&path))?;
        let mut temp = Temp { path, file };
        io("write", &temp.path, fill(&mut temp.file))?;
        self.write_meta(&temp, meta);
        if self.durable {
            io("sync", &temp.path, temp.file.sync_data())?;
        }
        Ok(temp)
    }

    fn write_meta(&self, temp: &Temp, meta: &Meta) {
        if *meta == Meta::default() {
            return;
        }
        let text = serde_json::to_vec(meta).expect("plain strings serialise");
        let written = rustix::fs::fsetxattr(&temp.file, META_ATTRIBUTE, &text, XattrFlags::empty());
        if let Err(err) = written
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(path = %temp.path.display(), error = %err, "object metadata not kept");
        }
    }

    fn try_commit(&self, key: &Key, temp: &Temp, etag: &str, conditions: &Conditions) -> DiskResult<Try> {
        let _key = self.lock_key(key);
        let _pass = self.pass()?;
        self.check(key, conditions)?;
        let mut made = Vec::new();
        if let Some(step) = self.make_parents(key, &mut made)? {
            return Ok(step);
        }
        let path = self.place(key);
        match fs::rename(&temp.path, &path) {
            Ok(()) => {
                let metadata = io("look at", &path, temp.file.metadata())?;
                self.etags.note(&path, &metadata, etag);
                let stat = Stat { etag: etag.to_owned(), size: metadata.len(), modified: modified(&metadata) };
                Ok(Try::Done { path, made, stat })
            }
            // Someone removed the emptied directory, or made one in our place: look again.
            Err(err) if is_absence(&err) || err.kind() == ErrorKind::IsADirectory => Ok(Try::Again),
            Err(err) => io("rename to", &path, Err(err)),
        }
    }

    /// Where a write of `key` goes: where it already is, or aside if a directory has its place.
    fn place(&self, key: &Key) -> PathBuf {
        let (plain, aside) = (key.plain_path(&self.root), key.aside_path(&self.root));
        match fs::metadata(&plain) {
            Ok(metadata) if metadata.is_file() => plain,
            Ok(metadata) if metadata.is_dir() => aside,
            // Kept where it is even if its place is free by now: moving it would take two steps.
            _ if aside.is_file() => aside,
            _ => plain,
        }
    }

    fn make_parents(&self, key: &Key, made: &mut Vec<PathBuf>) -> DiskResult<Option<Try>> {
        let plain = key.plain_path(&self.root);
        let Some(parent) = plain.parent() else { return Ok(None) };
        if parent.is_dir() {
            return Ok(None);
        }
        let mut dirs: Vec<&Path> = parent.ancestors().take_while(|dir| *dir != self.root).collect();
        dirs.reverse();
        for dir in dirs {
            match fs::create_dir(dir) {
                Ok(()) => made.push(dir.to_owned()),
                Err(err) if err.kind() == ErrorKind::AlreadyExists && dir.is_dir() => (),
                Err(err) if err.kind() == ErrorKind::AlreadyExists => {
                    let in_the_way = key.ancestors().find(|it| it.plain_path(&self.root) == dir);
                    return match in_the_way {
                        Some(ancestor) => Ok(Some(Try::InTheWay(ancestor))),
                        None => io("create directory", dir, Err(err)),
                    };
                }
                Err(err) if is_absence(&err) => return Ok(Some(Try::Again)),
                Err(err) => return io("create directory", dir, Err(err)),
            }
        }
        Ok(None)
    }

    /// Frees the place of `key` for a directory. Readers look in both places, in this order, so they never miss it.
    fn move_aside(&self, key: &Key) -> DiskResult<()> {
        let _key = self.lock_key(key);
        let _pass = self.pass()?;
        let (plain, aside) = (key.plain_path(&self.root), key.aside_path(&self.root));
        match fs::metadata(&plain) {
            Ok(metadata) if metadata.is_file() => {
                io("move aside", &plain, fs::rename(&plain, &aside))?;
                self.etags.forget(&plain);
                // At once, or a second request would see the free place and use it for the object again.
                match fs::create_dir(&plain) {
                    Err(err) if err.kind() != ErrorKind::AlreadyExists => io("create directory", &plain, Err(err))?,
                    _ => (),
                }
                self.sync_parents(&plain, &[])
            }
            _ => Ok(()),
        }
    }

    fn find(&self, key: &Key) -> DiskResult<Option<Object>> {
        for path in [key.plain_path(&self.root), key.aside_path(&self.root)] {
            // Asked before opening, for opening a pipe that someone put here would wait for its other end.
            match fs::metadata(&path) {
                Ok(metadata) if metadata.is_file() => (),
                Ok(_) => continue,
                Err(err) if is_absence(&err) => continue,
                Err(err) => return io("look at", &path, Err(err)),
            }
            let mut file = match File::open(&path) {
                Ok(file) => file,
                Err(err) if is_absence(&err) => continue,
                Err(err) => return io("open", &path, Err(err)),
            };
            let metadata = io("look at", &path, file.metadata())?;
            let etag = io("read", &path, self.etags.get(&path, &mut file, &metadata))?;
            let stat = Stat { etag, size: metadata.len(), modified: modified(&metadata) };
            return Ok(Some(Object { stat, file }));
        }
        Ok(None)
    }

    /// The current version, if the conditions hold for it.
    fn check(&self, key: &Key, conditions: &Conditions) -> DiskResult<Option<Object>> {
        let current = self.find(key)?;
        conditions.check_write(current.as_ref().map(|it| it.stat.etag.as_str()))?;
        Ok(current)
    }

    /// All files whose keys begin with `prefix` and come behind `after`, in the order of their keys' bytes. A listing
    /// of thousands walks once per page: whatever is not on the page should cost it little.
    fn walk(&self, prefix: &str, after: &str) -> DiskResult<Vec<Found>> {
        let mut files = Vec::new();
        let mut todo = vec![(self.root.clone(), String::new())];
        while let Some((dir, under)) = todo.pop() {
            let entries = match fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(err) if is_absence(&err) => continue,
                Err(err) => return io("list", &dir, Err(err)),
            };
            for found in entries {
                let found = io("list", &dir, found)?;
                let path = found.path();
                if under.is_empty() && found.file_name() == OWN_DIR {
                    continue;
                }
                let Ok(kind) = found.file_type() else { continue };
                // A link counts as the file it leads to; linked directories are left out, they could be loops.
                let is_file = kind.is_file() || kind.is_symlink() && path.is_file();
                if !is_file && !kind.is_dir() {
                    continue;
                }
                match entry(path, &under, !is_file) {
                    Some(Entry::Under(under))
                        if (under.starts_with(prefix) || prefix.starts_with(&under))
                            && (after <= under.as_str() || after.starts_with(&under)) =>
                    {
                        todo.push((found.path(), under));
                    }
                    Some(Entry::File(file)) if file.key.starts_with(prefix) && after < file.key.as_str() => {
                        files.push(file);
                    }
                    _ => (),
                }
            }
        }
        files.sort_unstable();
        Ok(files)
    }

    fn sync_parents(&self, path: &Path, made: &[PathBuf]) -> DiskResult<()> {
        if !self.durable {
            return Ok(());
        }
        for dir in [path].into_iter().chain(made.iter().map(PathBuf::as_path)).filter_map(Path::parent) {
            match File::open(dir) {
                Ok(dir_file) => io("sync", dir, dir_file.sync_all())?,
                // Gone again, and with it what there was to keep.
                Err(err) if is_absence(&err) => (),
                Err(err) => io("open", dir, Err(err))?,
            }
        }
        Ok(())
    }

    pub(super) fn pass(&self) -> DiskResult<Pass<'_>> {
        let door = self.door.read().unwrap_or_else(PoisonError::into_inner);
        match *door {
            Door::Open(_) => Ok(Pass { _door: door }),
            Door::Closed => Err(DiskError::Closed),
        }
    }

    fn lock_key(&self, key: &Key) -> MutexGuard<'_, ()> {
        lock(&self.keys, key.as_str())
    }
}

pub(super) fn lock<'a>(locks: &'a [Mutex<()>], name: &str) -> MutexGuard<'a, ()> {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    let at = usize::try_from(hasher.finish() % N_LOCKS).expect("fewer than 2^16");
    locks[at].lock().unwrap_or_else(PoisonError::into_inner)
}

fn modified(metadata: &Metadata) -> SystemTime {
    metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Says that there is nothing under a path, be it for want of a directory or for a file in its place.
pub(super) fn is_absence(err: &io::Error) -> bool {
    matches!(err.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

#[cfg(test)]
mod tests;
