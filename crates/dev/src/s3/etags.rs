//! ETags: the MD5 of an object's bytes, remembered by inode, modification time and size.
//!
//! Files may be edited by hand under us, so nothing but the content decides. A remembered ETag is believed only
//! once the file was read *after* its modification time had certainly passed: within the granularity of file
//! times, two edits of equal length look alike, and a stale ETag would let a compare-and-swap through.

use std::{
    collections::HashMap,
    fs::{File, Metadata},
    io::{self, Read, Seek},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use data_encoding::HEXLOWER;
use md5::{Digest, Md5};
use tokio::time::Instant;

/// File times step with the kernel's tick, at most 10 ms; twice that is safe.
const SETTLE: Duration = Duration::from_millis(20);
const READ_BYTES: usize = 64 * 1024;

/// The MD5 of `bytes`, as it stands within an ETag's quotes.
pub(super) fn etag_of(bytes: &[u8]) -> String {
    HEXLOWER.encode(&Md5::digest(bytes))
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    modified: (i64, i64),
    size: u64,
}

impl Version {
    fn of(metadata: &Metadata) -> Version {
        Version {
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            size: metadata.size(),
        }
    }
}

struct Known {
    version: Version,
    etag: String,
    first_seen: Instant,
    settled: bool,
}

#[derive(Default)]
pub(super) struct Etags {
    known: Mutex<HashMap<PathBuf, Known>>,
}

impl Etags {
    /// The ETag of an open file, and the file rewound.
    pub(super) fn get(&self, path: &Path, file: &mut File, metadata: &Metadata) -> io::Result<String> {
        let version = Version::of(metadata);
        if let Some(known) = self.known().get(path)
            && known.version == version
            && known.settled
        {
            return Ok(known.etag.clone());
        }
        let read_at = Instant::now();
        let etag = hash(file, metadata.size())?;
        file.rewind()?;
        self.learn(path, version, &etag, read_at);
        Ok(etag)
    }

    /// Notes the ETag of a file that was just written, so that it need not be read back for it.
    pub(super) fn note(&self, path: &Path, metadata: &Metadata, etag: &str) {
        let (version, first_seen) = (Version::of(metadata), Instant::now());
        self.known().insert(path.to_owned(), Known { version, etag: etag.to_owned(), first_seen, settled: false });
    }

    pub(super) fn forget(&self, path: &Path) {
        self.known().remove(path);
    }

    fn learn(&self, path: &Path, version: Version, etag: &str, read_at: Instant) {
        let mut all = self.known();
        match all.get_mut(path) {
            Some(known) if known.version == version => {
                known.settled = SETTLE <= read_at.saturating_duration_since(known.first_seen);
                known.etag = etag.to_owned();
            }
            _ => {
                let known = Known { version, etag: etag.to_owned(), first_seen: read_at, settled: false };
                all.insert(path.to_owned(), known);
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<PathBuf, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn hash(file: &mut File, size: u64) -> io::Result<String> {
    let mut hasher = Md5::new();
    let mut buffer = vec![0; usize::try_from(size).unwrap_or(READ_BYTES).clamp(512, READ_BYTES)];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(HEXLOWER.encode(&hasher.finalize())),
            n => hasher.update(&buffer[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_length_edits_at_once_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let etags = Etags::default();
        for round in 0..200 {
            let text = format!("{round:04}");
            std::fs::write(&path, &text).unwrap();
            let metadata = std::fs::metadata(&path).unwrap();
            let mut file = File::open(&path).unwrap();
            assert_eq!(etags.get(&path, &mut file, &metadata).unwrap(), etag_of(text.as_bytes()));
        }
    }
}
