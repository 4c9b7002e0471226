//! A batch of files: each is judged and staged as it comes, and all that passed are put into their places together.
//!
//! Everything is on disk and synced before the first rename, and the hash that says "applied" is written after the last
//! one. A crash in between leaves whole files, old or new, and the old hash, so the server sends the batch again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use nstance_identity::material::sha256;
use nstance_proto::v1::FileTransfer;
use nstance_rt::chain::Chain;

use crate::{
    context::Context,
    disk::{Access, open_regular},
    files::{
        errors,
        names::{FileName, made_safe, shown},
        received,
        validate::validate,
    },
};

const STAGE: &str = ".stage";
const STAGE_MODE: u32 = 0o700;

/// Of one batch, and of what lies in the directory after it.
pub(crate) const MAX_FILES: usize = 512;
const MAX_BYTES: u64 = 64 * 1024 * 1024;

/// Leaves room for the rest of a message of 4 MiB.
const MAX_FILE_BYTES: u64 = 3 * 1024 * 1024;

/// A hash is some tens of bytes; what is longer, or not printable, is none.
const MAX_HASH_BYTES: usize = 256;

/// So is the name of a batch, which every report repeats.
const MAX_BATCH_ID_BYTES: usize = 64;

/// What will become of a name when the batch is committed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Entry {
    /// Lies in the stage, whole and synced.
    Staged {
        n_bytes: u64,
    },
    /// Is in its place already, with its mode.
    Same {
        n_bytes: u64,
    },
    Remove,
    Failed(String),
}

impl Entry {
    fn n_bytes(&self) -> u64 {
        match self {
            Self::Staged { n_bytes } | Self::Same { n_bytes } => *n_bytes,
            Self::Remove | Self::Failed(_) => 0,
        }
    }
}

/// What one stream of files sends.
pub(crate) struct Receiver<'a> {
    ctx: &'a Context,
    recv: PathBuf,
    stage: PathBuf,
    stream: u64,
    batch_id: String,
    entries: BTreeMap<FileName, Entry>,
    /// What was refused for its name, by the name of its error entry: why, or `None` if it is wanted no longer.
    nameless: BTreeMap<String, Option<String>>,
}

impl<'a> Receiver<'a> {
    /// Begins with nothing: what an earlier stream staged is sent again by the server.
    pub(crate) fn open(ctx: &'a Context) -> Self {
        empty_stage(ctx);
        let recv = ctx.settings.recv.path.clone();
        Self {
            ctx,
            stage: recv.join(STAGE),
            recv,
            stream: ctx.files.failures().next_stream(),
            batch_id: String::new(),
            entries: BTreeMap::new(),
            nameless: BTreeMap::new(),
        }
    }

    pub(crate) fn take(&mut self, transfer: FileTransfer) {
        if transfer.batch_id != self.batch_id {
            if !self.entries.is_empty() {
                tracing::info!(n_files = self.entries.len(), "batch replaced before it was committed");
                empty_stage(self.ctx);
            }
            self.entries.clear();
            self.nameless.clear();
            self.batch_id.clone_from(&transfer.batch_id);
        }
        if !transfer.filename.is_empty() {
            self.add(&transfer);
        }
        if !transfer.config_hash.is_empty() {
            self.commit(&transfer.config_hash);
        }
    }

    fn add(&mut self, transfer: &FileTransfer) {
        let is_full = MAX_FILES <= self.entries.len();
        let name = match FileName::parse(&transfer.filename) {
            Ok(name) if is_full && !self.entries.contains_key(&name) => {
                return self.refuse(&transfer.filename, format!("a batch has at most {MAX_FILES} files"));
            }
            Ok(name) => name,
            // It never was there, so its removal is done as soon as nobody complains any more.
            Err(_) if transfer.remove => return self.note(&transfer.filename, None),
            Err(error) => return self.refuse(&transfer.filename, error.to_string()),
        };
        // Whatever was said of the name earlier in this batch counts no longer.
        self.entries.remove(&name);
        let entry = if transfer.remove { Entry::Remove } else { self.judge(&name, transfer) };
        self.entries.insert(name, entry);
    }

    fn refuse(&mut self, name: &str, why: String) {
        self.note(name, Some(why));
    }

    fn note(&mut self, name: &str, why: Option<String>) {
        let entry = made_safe(name);
        if MAX_FILES <= self.nameless.len() && !self.nameless.contains_key(&entry) {
            // Bounded as the files are, but never so that a failure is forgotten: the first ones say enough.
            self.nameless.retain(|_, why| why.is_some());
            if why.is_none() || MAX_FILES <= self.nameless.len() {
                return;
            }
        }
        let what = why.map(|why| format!("file {} was not written: {why}", shown(name)));
        self.nameless.insert(entry, what);
    }

    fn judge(&self, name: &FileName, transfer: &FileTransfer) -> Entry {
        let content = transfer.content.as_slice();
        let n_bytes = content.len() as u64;
        let failed = |why: String| Entry::Failed(format!("file {} was not written: {why}", name.as_str()));
        if MAX_FILE_BYTES < n_bytes {
            return failed(format!("it has {n_bytes} bytes, and at most {MAX_FILE_BYTES} are taken"));
        }
        let n_before: u64 = self.entries.values().map(Entry::n_bytes).sum();
        if MAX_BYTES < n_before + n_bytes {
            return failed(format!("a batch has at most {MAX_BYTES} bytes"));
        }
        if !transfer.sha256.is_empty() && transfer.sha256 != sha256(content) {
            return failed("it arrived damaged: its SHA-256 is not the one that was sent with it".to_owned());
        }
        if let Err(error) = validate(name, content) {
            return failed(error.to_string());
        }
        let access = self.access();
        if is_same(&self.recv.join(name.as_str()), content, access) {
            return Entry::Same { n_bytes };
        }
        let disk = &self.ctx.parts.disk;
        let staged = disk
            .directory(&self.stage, STAGE_MODE)
            .and_then(|()| disk.stage(&self.stage.join(name.as_str()), content, access));
        match staged {
            Ok(()) => Entry::Staged { n_bytes },
            Err(error) => failed(unwritable(&error)),
        }
    }

    fn access(&self) -> Access {
        Access { mode: self.ctx.settings.recv.file_mode, group: self.ctx.settings.recv.group }
    }

    /// The order is the contract: files, then the directory, then what is ours of them, then error entries, then the
    /// hash, then who wants to know.
    fn commit(&mut self, hash: &str) {
        let ctx = self.ctx;
        let mut entries = std::mem::take(&mut self.entries);
        let nameless = std::mem::take(&mut self.nameless);
        let moving = |(name, entry): (&FileName, &Entry)| {
            matches!(entry, Entry::Staged { .. } | Entry::Remove).then(|| name.as_str().to_owned())
        };
        ctx.files.hook.announce(ctx, entries.iter().filter_map(moving).collect());
        let changed = self.place(&mut entries);
        let durable = ctx.parts.disk.sync(&self.recv);
        if let Err(error) = &durable {
            tracing::error!(error = %Chain(error), "received files are not safe on disk");
        }
        let placed = |(name, entry)| matches!(entry, &Entry::Staged { .. } | &Entry::Same { .. }).then_some(name);
        received::note(ctx, entries.iter().filter_map(placed));
        let n_files = entries.len() + nameless.len();
        let n_failed = self.settle(&entries, &nameless, hash);
        let held_back = ctx.files.failures().held_back(hash, self.stream);
        if durable.is_ok() {
            if held_back == 0 {
                advance(ctx, hash);
            }
            name(ctx, &self.batch_id);
        }
        tell_time(ctx);
        // What is left there was replaced within the batch, or could not be placed.
        empty_stage(ctx);
        tracing::info!(n_files, n_changed = changed.len(), n_failed, held_back, hash = shown(hash), "batch committed");
        ctx.files.hook.changed(ctx, changed);
        ctx.board.changed();
    }

    /// Moves every file into its place, and says which names changed. What cannot be moved has failed.
    fn place(&self, entries: &mut BTreeMap<FileName, Entry>) -> BTreeSet<String> {
        let disk = &self.ctx.parts.disk;
        let mut changed = BTreeSet::new();
        let failed = |name: &FileName, what: &str, why: String| {
            Entry::Failed(format!("file {} was not {what}: {why}", name.as_str()))
        };
        // Removals first: they make room.
        for (name, entry) in entries.iter_mut().filter(|(_, entry)| **entry == Entry::Remove) {
            let path = self.recv.join(name.as_str());
            let was_there = fs::symlink_metadata(&path).is_ok();
            match disk.remove(&path) {
                Ok(()) if was_there => drop(changed.insert(name.as_str().to_owned())),
                Ok(()) => {}
                Err(error) => *entry = failed(name, "removed", unwritable(&error)),
            }
        }
        let mut room = Room::of(&self.recv);
        for (name, entry) in entries {
            let path = self.recv.join(name.as_str());
            let n_bytes = match *entry {
                Entry::Staged { n_bytes } => n_bytes,
                Entry::Same { n_bytes } if size_of(&path) != Some(n_bytes) => {
                    *entry = failed(name, "kept", "somebody changed it while the batch came in".to_owned());
                    continue;
                }
                _ => continue,
            };
            let placed = match room.after(&path, n_bytes) {
                None => Err(format!("there would be more than {MAX_FILES} files or {MAX_BYTES} bytes of them")),
                Some(after) => match disk.place(&self.stage.join(name.as_str()), &path) {
                    Ok(()) => Ok(after),
                    Err(error) => Err(unwritable(&error)),
                },
            };
            match placed {
                Ok(after) => {
                    room = after;
                    changed.insert(name.as_str().to_owned());
                }
                Err(why) => *entry = failed(name, "written", why),
            }
        }
        changed
    }

    /// Brings error entries and the memory of failures up to date. Says how many failed.
    fn settle(
        &self,
        entries: &BTreeMap<FileName, Entry>,
        nameless: &BTreeMap<String, Option<String>>,
        hash: &str,
    ) -> usize {
        let named = entries.iter().map(|(name, entry)| match entry {
            Entry::Failed(what) => (name.as_str(), Some(what)),
            _ => (name.as_str(), None),
        });
        let mut n_failed = 0;
        for (name, what) in named.chain(nameless.iter().map(|(name, what)| (name.as_str(), what.as_ref()))) {
            match what {
                None => {
                    errors::clear(self.ctx, name);
                    self.ctx.files.failures().forget(name);
                }
                Some(what) => {
                    n_failed += 1;
                    errors::tell(self.ctx, name, what);
                    self.ctx.files.failures().keep(name, hash, self.stream);
                }
            }
        }
        n_failed
    }
}

pub(crate) fn empty_stage(ctx: &Context) {
    let stage = ctx.settings.recv.path.join(STAGE);
    if let Err(error) = ctx.parts.disk.empty_directory(&stage, STAGE_MODE) {
        tracing::warn!(path = %stage.display(), error = %Chain(&error), "stage not emptied");
    }
}

/// Tells the time of the last batch if a crash came before that: what a batch writes earlier is newer then. A leader who
/// finds the batch in its place does not send it again, and whoever waits for it would wait for ever.
pub(crate) fn catch_up(ctx: &Context) {
    let written = |name: &str| fs::metadata(ctx.settings.identity.path.join(name)).ok()?.modified().ok();
    // A hash alone is no batch: it may be the nonce's.
    let Some(noted) = received::changed_at(ctx) else { return };
    let begun = written("config.hash").map_or(noted, |hash| hash.max(noted));
    if written("write-files.last").is_none_or(|told| told < begun) {
        tell_time(ctx);
    }
}

fn tell_time(ctx: &Context) {
    if let Err(error) = ctx.dir.write_last_batch(ctx.now()) {
        tracing::warn!(error = %Chain(&error), "time of the batch not written");
    }
}

/// From now on reports name the batch. One that cannot be named is sent again when the stream is lost, nothing worse.
fn name(ctx: &Context, batch: &str) {
    let named = if batch.len() <= MAX_BATCH_ID_BYTES { batch } else { "" };
    named.clone_into(&mut ctx.files.batch());
}

fn advance(ctx: &Context, hash: &str) {
    if MAX_HASH_BYTES < hash.len() || !hash.bytes().all(|byte| byte.is_ascii_graphic()) {
        tracing::warn!(hash = shown(hash), "batch came with a hash that is none");
        return;
    }
    if ctx.dir.config_hash().as_deref() == Some(hash) {
        return;
    }
    if let Err(error) = ctx.dir.write_config_hash(hash) {
        tracing::warn!(error = %Chain(&error), "hash of the configuration not written");
    }
}

fn unwritable(error: &io::Error) -> String {
    format!("{error}; check space and permissions of the directory of received files")
}

/// Whether a regular file with exactly this content and access is there.
fn is_same(path: &Path, content: &[u8], access: Access) -> bool {
    let compare = || -> io::Result<bool> {
        let mut file = open_regular(path)?;
        let found = file.metadata()?;
        let same_access = found.mode() & 0o7777 == access.mode && access.group.is_none_or(|group| group == found.gid());
        if !same_access || found.len() != content.len() as u64 {
            return Ok(false);
        }
        let mut buffer = [0; 8192];
        let mut rest = content;
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(rest.is_empty()),
                n_read => match rest.strip_prefix(&buffer[..n_read]) {
                    Some(tail) => rest = tail,
                    None => return Ok(false),
                },
            }
        }
    };
    compare().unwrap_or(false)
}

/// What lies in the directory of received files.
#[derive(Debug, Clone, Copy)]
struct Room {
    n_files: usize,
    n_bytes: u64,
}

impl Room {
    fn of(recv: &Path) -> Self {
        let sizes = fs::read_dir(recv).into_iter().flatten().flatten().filter_map(|entry| size_of(&entry.path()));
        sizes.fold(Self { n_files: 0, n_bytes: 0 }, |sum, n_bytes| Self {
            n_files: sum.n_files + 1,
            n_bytes: sum.n_bytes + n_bytes,
        })
    }

    /// With a file of this size at `path`; `None` if that is too much. What is too much already may still shrink.
    fn after(self, path: &Path, n_bytes: u64) -> Option<Self> {
        let old = size_of(path);
        let after = Self {
            n_files: self.n_files - usize::from(old.is_some()) + 1,
            n_bytes: self.n_bytes - old.unwrap_or(0).min(self.n_bytes) + n_bytes,
        };
        let fits = after.n_files <= MAX_FILES.max(self.n_files) && after.n_bytes <= MAX_BYTES.max(self.n_bytes);
        fits.then_some(after)
    }
}

/// Of a regular file that is not hidden.
fn size_of(path: &Path) -> Option<u64> {
    let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    fs::symlink_metadata(path).ok().filter(|found| found.is_file() && !is_hidden).map(|found| found.len())
}

#[cfg(test)]
#[path = "batch/tests.rs"]
mod tests;
