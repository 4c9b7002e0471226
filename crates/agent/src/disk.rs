//! Writing so that no reader, and no start after a crash at any point, ever sees a torn or half-permitted file.
//!
//! A file is written beside its place, given its mode and group, synced, and only then renamed over the old one; the
//! directory is synced after it. What a crash leaves behind is at most the temporary file of one fixed name, which the
//! next write takes over.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write as _},
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::OFlags;

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    pub mode: u32,
    pub group: Option<u32>,
}

impl Access {
    pub fn mode(mode: u32) -> Self {
        Self { mode, group: None }
    }
}

/// A moment at which the process may die.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Before anything of it is on disk.
    Write,
    /// Written beside its place, and synced.
    Rename,
    /// In its place; the directory is not synced yet.
    Sync,
    /// Before a file is removed.
    Remove,
}

type Watcher = dyn Fn(Step, &Path) + Send + Sync;

/// All writes of the agent go through here.
#[derive(Clone, Default)]
pub struct Disk {
    watcher: Option<Arc<Watcher>>,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Disk")
    }
}

impl Disk {
    /// A disk that tells every step before it is made. A test lets the agent die there.
    pub fn watched(watcher: Arc<Watcher>) -> Self {
        Self { watcher: Some(watcher) }
    }

    fn step(&self, step: Step, path: &Path) {
        if let Some(watcher) = &self.watcher {
            watcher(step, path);
        }
    }

    /// Replaces `path` by `content`.
    pub fn write(&self, path: &Path, content: &[u8], access: Access) -> io::Result<()> {
        let temporary = temporary(path)?;
        self.stage(&temporary, content, access)?;
        self.rename(&temporary, path)
    }

    /// Writes a file that is not in its place yet, whole and with its final access, and syncs it.
    pub fn stage(&self, temporary: &Path, content: &[u8], access: Access) -> io::Result<()> {
        self.step(Step::Write, temporary);
        match fs::remove_file(temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Nobody else may open it before it has its final mode.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
        file.write_all(content)?;
        if let Some(group) = access.group {
            std::os::unix::fs::fchown(&file, None, Some(group))?;
        }
        file.set_permissions(Permissions::from_mode(access.mode))?;
        file.sync_all()
    }

    /// Puts a staged file into its place, in the same file system.
    pub fn rename(&self, temporary: &Path, path: &Path) -> io::Result<()> {
        self.place(temporary, path)?;
        self.step(Step::Sync, path);
        match path.parent() {
            Some(directory) => sync_directory(directory),
            None => Ok(()),
        }
    }

    /// The first half of [`Disk::rename`]: whoever places many files syncs their directory once. A link that stands in
    /// the place is replaced, not followed.
    pub fn place(&self, temporary: &Path, path: &Path) -> io::Result<()> {
        self.step(Step::Rename, path);
        fs::rename(temporary, path)
    }

    /// Makes what was placed in a directory last.
    pub fn sync(&self, directory: &Path) -> io::Result<()> {
        self.step(Step::Sync, directory);
        sync_directory(directory)
    }

    /// Sees to it that `path` is a directory, and not a link to one: what was planted there is removed, never followed.
    pub fn directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => self.remove(path)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        self.step(Step::Write, path);
        fs::create_dir(path)?;
        // The umask may have taken bits away.
        fs::set_permissions(path, Permissions::from_mode(mode))
    }

    /// As [`Disk::directory`], and with nothing in it.
    pub fn empty_directory(&self, path: &Path, mode: u32) -> io::Result<()> {
        self.directory(path, mode)?;
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            self.step(Step::Remove, &entry.path());
            // Neither follows links.
            if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
        }
        Ok(())
    }

    /// Removes a file; one that is not there is removed already.
    pub fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(Step::Remove, path);
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
            Ok(()) => path.parent().map_or(Ok(()), sync_directory),
        }
    }
}

/// Where a file is written before it is renamed: hidden, beside its place.
fn temporary(path: &Path) -> io::Result<PathBuf> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".tmp");
    Ok(directory.join(temporary))
}

/// Opens a regular file for reading. Links are not followed, and a pipe that was planted there does not make us wait.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
