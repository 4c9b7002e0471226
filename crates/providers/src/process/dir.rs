//! The directory of one VM: how it comes to be, how it is locked, how it goes.
//!
//! It appears complete, by one rename that refuses an existing name: whoever sees the directory sees its tags, and of
//! two creates one wins. The winner holds the lock from before the directory is visible. A lock ends with the last
//! descriptor of its file, and a child between fork and exec still has one: whoever gets the lock after its holder
//! died can be sure that an agent the holder was starting has become visible as an agent, or never will be one.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use nstance_core::{ids::InstanceId, ports::provider::Bootstrap};
use rustix::fs::{CWD, RenameFlags};

use super::{
    proc::Process,
    vm_file::{self, VmFile},
};

/// How often a taken lock is tried again. Holders need a few milliseconds.
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// Longer than any holder needs, unless it is frozen; then the caller is told so and asks again later.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);

const LOCK: &str = "lock";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct VmDir {
    pub(super) instance: InstanceId,
    pub(super) path: PathBuf,
}

/// The sole right to change one VM's directory or to start its agent; given up when dropped.
#[derive(Debug)]
pub(super) struct Lock {
    file: File,
}

impl Lock {
    /// The same lock for a process that is started: it is held until all who share it have ended.
    pub(super) fn share(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

pub(super) enum Published {
    /// We made it, and hold its lock since before anybody could see it.
    New(Lock),
    Exists,
}

pub(super) enum LockOutcome {
    Locked(Lock),
    NoDirectory,
    Busy,
}

impl VmDir {
    pub(super) fn new(work_dir: &Path, instance: InstanceId) -> Self {
        Self { instance, path: work_dir.join(instance.to_string()) }
    }

    pub(super) fn identity(&self) -> PathBuf {
        self.path.join("identity")
    }

    pub(super) fn read(&self) -> vm_file::Read {
        vm_file::read(&self.path)
    }

    pub(super) fn write(&self, _lock: &Lock, file: &VmFile) -> io::Result<()> {
        vm_file::write(&self.path, file)
    }

    /// Makes the directory with everything in it, or finds that it is there already.
    pub(super) fn publish(&self, file: &VmFile, bootstrap: &Bootstrap) -> io::Result<Published> {
        let work_dir = self.path.parent().unwrap_or(Path::new("."));
        let draft = aside(work_dir, "new", self.instance)?;
        let private = |path: &Path| DirBuilder::new().mode(0o700).create(path);
        let made = (|| -> io::Result<Lock> {
            match private(&draft) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    fs::create_dir_all(work_dir)?;
                    private(&draft)?;
                }
                other => other?,
            }
            for name in ["identity", "keys"] {
                private(&draft.join(name))?;
            }
            DirBuilder::new().mode(0o750).create(draft.join("recv"))?;
            write_new(&draft.join("identity/ca.crt"), 0o600, &bootstrap.ca_bundle_pem)?;
            write_new(&draft.join("identity/nonce.jwt"), 0o600, &bootstrap.nonce_jwt)?;
            // Nobody sees the draft, so its file needs no detour.
            fs::write(draft.join(vm_file::NAME), serde_json::to_vec_pretty(file)?)?;
            let lock = open_lock(&draft)?;
            lock.try_lock().map_err(|_| io::Error::other("the lock of a fresh directory is taken"))?;
            rustix::fs::renameat_with(CWD, &draft, CWD, &self.path, RenameFlags::NOREPLACE)?;
            Ok(Lock { file: lock })
        })();
        match made {
            Ok(lock) => Ok(Published::New(lock)),
            Err(error) => {
                // What stays behind after a crash right here is swept by the next listing.
                let _ = fs::remove_dir_all(&draft);
                if error.kind() == io::ErrorKind::AlreadyExists { Ok(Published::Exists) } else { Err(error) }
            }
        }
    }

    pub(super) async fn lock(&self) -> io::Result<LockOutcome> {
        let tries = async {
            loop {
                match self.try_lock()? {
                    LockOutcome::Busy => tokio::time::sleep(LOCK_RETRY).await,
                    outcome => return Ok(outcome),
                }
            }
        };
        tokio::time::timeout(LOCK_PATIENCE, tries).await.unwrap_or(Ok(LockOutcome::Busy))
    }

    pub(super) fn try_lock(&self) -> io::Result<LockOutcome> {
        let file = match open_lock(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(LockOutcome::NoDirectory),
            Err(error) => return Err(error),
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(LockOutcome::Busy),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The directory may have been removed, or removed and made again, while we waited at the old one's lock.
        match fs::metadata(self.path.join(LOCK)) {
            Ok(there) if same_file(&there, &file.metadata()?) => Ok(LockOutcome::Locked(Lock { file })),
            Ok(_) => Ok(LockOutcome::Busy),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(LockOutcome::NoDirectory),
            Err(error) => Err(error),
        }
    }

    /// Removes the directory: out of sight by one rename, then piece by piece.
    pub(super) fn remove(&self, _lock: Lock) -> io::Result<()> {
        let grave = aside(self.path.parent().unwrap_or(Path::new(".")), "old", self.instance)?;
        match fs::rename(&self.path, &grave) {
            Ok(()) => fs::remove_dir_all(&grave),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn same_file(a: &fs::Metadata, b: &fs::Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

fn open_lock(dir: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(dir.join(LOCK))
}

fn write_new(path: &Path, mode: u32, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?.write_all(text.as_bytes())
}

/// A name beside the directories that no listing takes for one, and that says whose it is: `.new-{id}-{pid}-{start}-{n}`.
fn aside(work_dir: &Path, what: &str, instance: InstanceId) -> io::Result<PathBuf> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let me = Process::of_pid(std::process::id())?.ok_or_else(|| io::Error::other("our own process is not there"))?;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    Ok(work_dir.join(format!(".{what}-{instance}-{}-{}-{count}", me.pid, me.start_time)))
}

/// Whether a name was made by [`aside`] in a process that has ended: then nobody will finish it.
pub(super) fn is_abandoned(name: &str) -> bool {
    let mut parts = name.split('-');
    if !matches!(parts.next(), Some(".new" | ".old")) {
        return false;
    }
    let numbers: Vec<u64> = parts.skip(1).filter_map(|part| part.parse().ok()).collect();
    let &[pid, start_time, _] = numbers.as_slice() else { return false };
    u32::try_from(pid).is_ok_and(|pid| matches!(Process { pid, start_time }.is_alive(), Ok(false)))
}
