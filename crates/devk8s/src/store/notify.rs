//! Noticing changes of files: by inotify, or by looking every 500 ms where that is not to be had.

use std::{
    collections::HashMap,
    io,
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use tokio::{io::unix::AsyncFd, time::MissedTickBehavior};

use super::{
    Store,
    disk::{directories, name_of_file},
};
use crate::{object::Key, resources::Resource};

/// How often files are looked at without notifications. A person who saves a file waits no longer than that.
const POLL: Duration = Duration::from_millis(500);

/// How changes of files are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileChanges {
    /// By the kernel; where that fails the files are looked at every 500 ms.
    Notified,
    /// Looked at every 500 ms, for file systems that notify of nothing.
    Polled,
}

/// Follows the files for ever.
pub(crate) async fn follow(store: Arc<Store>, changes: FileChanges) {
    if changes == FileChanges::Notified {
        match Notifications::new(&store) {
            Ok(notifications) => {
                let error = notifications.run(&store).await;
                tracing::warn!(%error, "no more file notifications; looking every 500 ms");
            }
            Err(error) => tracing::warn!(%error, "no file notifications; looking every 500 ms"),
        }
    }
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        store.rescan();
    }
}

struct Notifications {
    fd: AsyncFd<OwnedFd>,
    /// Directories by watch number.
    dirs: HashMap<i32, PathBuf>,
}

/// What happened, without names: read from the kernel's buffer before anything is done about it.
enum Happened {
    File(PathBuf, String),
    /// A directory came or went, or notifications were lost: everything is compared.
    Directory,
}

impl Notifications {
    #[expect(deprecated, reason = "its successor is `unsafe`, which is forbidden here; an OwnedFd is what it asks for")]
    fn new(store: &Store) -> io::Result<Self> {
        let fd = AsyncFd::new(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?)?;
        let mut all = Self { fd, dirs: HashMap::new() };
        all.watch_all(store)?;
        Ok(all)
    }

    fn watch(&mut self, dir: &Path) -> io::Result<()> {
        let flags = WatchFlags::CLOSE_WRITE
            | WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::ONLYDIR;
        match inotify::add_watch(&self.fd, dir, flags) {
            Ok(number) => drop(self.dirs.insert(number, dir.to_owned())),
            // It went away again meanwhile.
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Watches every directory that may hold objects; those that are watched already stay so.
    fn watch_all(&mut self, store: &Store) -> io::Result<()> {
        self.watch(store.disk.dir())?;
        for resource in store.registry.all() {
            let dir = store.disk.resource_dir(&resource);
            if !dir.is_dir() {
                continue;
            }
            self.watch(&dir)?;
            if resource.namespaced {
                for namespace in directories(&dir) {
                    self.watch(&dir.join(namespace))?;
                }
            }
        }
        Ok(())
    }

    async fn run(mut self, store: &Store) -> io::Error {
        // What happened before the watches were set.
        store.rescan();
        loop {
            let happened = tokio::select! {
                biased;
                () = store.defined.notified() => Ok(vec![Happened::Directory]),
                happened = self.next() => happened,
            };
            let happened = match happened {
                Ok(happened) => happened,
                Err(error) => return error,
            };
            if happened.iter().any(|it| matches!(it, Happened::Directory)) {
                if let Err(error) = self.watch_all(store) {
                    return error;
                }
                store.rescan();
                continue;
            }
            for it in happened {
                if let Happened::File(dir, file) = it
                    && let Some((resource, key)) = object_of(store, &dir, &file)
                {
                    store.sync_file(&resource, &key);
                }
            }
        }
    }

    async fn next(&mut self) -> io::Result<Vec<Happened>> {
        loop {
            let mut ready = self.fd.readable().await?;
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut reader = Reader::new(ready.get_inner(), &mut buffer);
            let mut happened = Vec::new();
            loop {
                match reader.next() {
                    Ok(event) => {
                        let lost = ReadFlags::QUEUE_OVERFLOW | ReadFlags::ISDIR | ReadFlags::IGNORED;
                        if event.events().intersects(lost) {
                            happened.push(Happened::Directory);
                        } else if let Some(dir) = self.dirs.get(&event.wd())
                            && let Some(Ok(file)) = event.file_name().map(|it| it.to_str())
                        {
                            happened.push(Happened::File(dir.clone(), file.to_owned()));
                        }
                    }
                    Err(Errno::WOULDBLOCK) => break,
                    Err(error) => return Err(error.into()),
                }
            }
            ready.clear_ready();
            if !happened.is_empty() {
                return Ok(happened);
            }
        }
    }
}

/// Which object a file belongs to.
fn object_of(store: &Store, dir: &Path, file: &str) -> Option<(Arc<Resource>, Key)> {
    let name = name_of_file(file)?;
    let inside: Vec<&str> = dir.strip_prefix(store.disk.dir()).ok()?.iter().filter_map(|it| it.to_str()).collect();
    let (resource_dir, namespace) = match inside[..] {
        [resource] => (resource, None),
        [resource, namespace] => (resource, Some(namespace)),
        _ => return None,
    };
    let resource = store.registry.all().into_iter().find(|it| it.dir == resource_dir)?;
    (resource.namespaced == namespace.is_some()).then(|| (resource, Key::new(namespace.unwrap_or(""), name)))
}
