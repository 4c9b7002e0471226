//! Multipart uploads: a directory of parts each, put together when they are completed.
//!
//! The finished object's ETag is the MD5 of its bytes like any other's, not S3's digest of digests: it must be
//! found again from the file alone, after a restart or an edit. Clients have no business computing either.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
    time::SystemTime,
};

use data_encoding::HEXLOWER;
use md5::{Digest, Md5};
use serde::{Deserialize, Serialize};

use super::{
    conditions::Conditions,
    disk::{Disk, DiskError, DiskResult, Stat, io, is_absence, lock},
    etags::etag_of,
    keys::{Key, OWN_DIR},
    meta::Meta,
};

/// S3's floor for every part but the last. Kept, so that what works here works there.
const MIN_PART_BYTES: u64 = 5 * 1024 * 1024;
const COPY_BYTES: usize = 256 * 1024;
const ABOUT: &str = "upload.json";

/// Tells apart uploads that were begun within one step of the file clock.
static N_UPLOADS: AtomicU64 = AtomicU64::new(0);

#[derive(Serialize, Deserialize)]
struct About {
    key: String,
    meta: Meta,
}

pub(super) struct Upload {
    pub(super) id: String,
    pub(super) key: Key,
    pub(super) initiated: SystemTime,
}

pub(super) struct Part {
    pub(super) number: i32,
    pub(super) stat: Stat,
}

impl Disk {
    pub(super) fn create_upload(&self, key: &Key, meta: &Meta) -> DiskResult<String> {
        let about = About { key: key.as_str().to_owned(), meta: meta.clone() };
        let text = serde_json::to_vec(&about).expect("plain strings serialise");
        let temp = self.write_temp(&Meta::default(), |file| file.write_all(&text))?;
        let metadata = io("look at", &temp.path, temp.file.metadata())?;
        let n = N_UPLOADS.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:x}-{:x}-{n:x}", metadata.mtime(), metadata.mtime_nsec());
        let dir = self.upload_dir(&id);
        let _pass = self.pass()?;
        io("create", &dir, fs::create_dir(&dir))?;
        io("rename to", &dir, fs::rename(&temp.path, dir.join(ABOUT)))?;
        Ok(id)
    }

    /// Adds or replaces one part, and says its ETag.
    pub(super) fn put_part(&self, id: &str, key: &Key, number: i32, bytes: &[u8]) -> DiskResult<String> {
        self.about(id, key)?;
        let temp = self.write_temp(&Meta::default(), |file| file.write_all(bytes))?;
        let _upload = lock(&self.uploads, id);
        let _pass = self.pass()?;
        self.about(id, key)?; // it may have ended while we wrote
        let path = self.part_path(id, number);
        io("rename to", &path, fs::rename(&temp.path, &path))?;
        Ok(etag_of(bytes))
    }

    /// Puts the named parts together as the object. The upload stays as it is if the conditions do not hold.
    pub(super) fn complete_upload(
        &self,
        id: &str,
        key: &Key,
        parts: &[(i32, Option<String>)],
        conditions: &Conditions,
    ) -> DiskResult<Stat> {
        let _upload = lock(&self.uploads, id);
        let about = self.about(id, key)?;
        if !parts.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err(DiskError::PartOrder);
        }
        let mut files = Vec::with_capacity(parts.len());
        for (at, (number, etag)) in parts.iter().enumerate() {
            let (file, stat) = self.part(id, *number)?.ok_or(DiskError::InvalidPart(*number))?;
            if etag.as_ref().is_some_and(|etag| *etag != stat.etag) {
                return Err(DiskError::InvalidPart(*number));
            }
            if stat.size < MIN_PART_BYTES && at + 1 < parts.len() {
                return Err(DiskError::PartTooSmall(*number));
            }
            files.push(file);
        }
        let mut hasher = Md5::new();
        let temp = self.write_temp(&about.meta, |whole| {
            let mut buffer = vec![0; COPY_BYTES];
            for file in &mut files {
                loop {
                    match file.read(&mut buffer)? {
                        0 => break,
                        n => {
                            hasher.update(&buffer[..n]);
                            whole.write_all(&buffer[..n])?;
                        }
                    }
                }
            }
            Ok(())
        })?;
        let stat = self.commit(key, temp, &HEXLOWER.encode(&hasher.finalize()), conditions)?;
        self.remove_upload(id)?;
        Ok(stat)
    }

    pub(super) fn abort_upload(&self, id: &str, key: &Key) -> DiskResult<()> {
        let _upload = lock(&self.uploads, id);
        self.about(id, key)?;
        self.remove_upload(id)
    }

    /// The parts so far, by number.
    pub(super) fn parts(&self, id: &str, key: &Key) -> DiskResult<Vec<Part>> {
        let _upload = lock(&self.uploads, id);
        self.about(id, key)?;
        let dir = self.upload_dir(id);
        let mut parts = Vec::new();
        for found in io("list", &dir, fs::read_dir(&dir))? {
            let found = io("list", &dir, found)?;
            if let Some(number) = found.file_name().to_str().and_then(|name| name.parse().ok())
                && let Some((_, stat)) = self.part(id, number)?
            {
                parts.push(Part { number, stat });
            }
        }
        parts.sort_unstable_by_key(|part| part.number);
        Ok(parts)
    }

    /// All uploads that were begun and not ended, by key, then by age.
    pub(super) fn uploads(&self) -> DiskResult<Vec<Upload>> {
        let dir = self.root.join(OWN_DIR).join("uploads");
        let mut uploads = Vec::new();
        for found in io("list", &dir, fs::read_dir(&dir))? {
            let found = io("list", &dir, found)?;
            let path = found.path().join(ABOUT);
            // One that ends meanwhile, or was cut off while it began, is none.
            let Ok(text) = fs::read(&path) else { continue };
            let Ok(about) = serde_json::from_slice::<About>(&text) else { continue };
            let (Ok(key), Some(id)) = (Key::parse(&about.key), found.file_name().to_str().map(str::to_owned)) else {
                continue;
            };
            let initiated = fs::metadata(&path).and_then(|it| it.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
            uploads.push(Upload { id, key, initiated });
        }
        uploads.sort_unstable_by(|a, b| (&a.key, a.initiated, &a.id).cmp(&(&b.key, b.initiated, &b.id)));
        Ok(uploads)
    }

    fn part(&self, id: &str, number: i32) -> DiskResult<Option<(File, Stat)>> {
        let path = self.part_path(id, number);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(err) if is_absence(&err) => return Ok(None),
            Err(err) => return io("open", &path, Err(err)),
        };
        let metadata = io("look at", &path, file.metadata())?;
        let etag = io("read", &path, self.etags.get(&path, &mut file, &metadata))?;
        let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Some((file, Stat { etag, size: metadata.len(), modified })))
    }

    fn about(&self, id: &str, key: &Key) -> DiskResult<About> {
        // The id comes from the client and becomes a path.
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return Err(DiskError::NoSuchUpload);
        }
        let path = self.upload_dir(id).join(ABOUT);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(err) if is_absence(&err) => return Err(DiskError::NoSuchUpload),
            Err(err) => return io("read", &path, Err(err)),
        };
        match serde_json::from_slice::<About>(&text) {
            Ok(about) if about.key == key.as_str() => Ok(about),
            _ => Err(DiskError::NoSuchUpload),
        }
    }

    fn remove_upload(&self, id: &str) -> DiskResult<()> {
        let dir = self.upload_dir(id);
        // What says that it is an upload goes first, so that no half of it is ever found.
        let about = dir.join(ABOUT);
        io("remove", &about, fs::remove_file(&about))?;
        for found in io("list", &dir, fs::read_dir(&dir))?.flatten() {
            self.etags.forget(&found.path());
        }
        io("remove", &dir, fs::remove_dir_all(&dir))
    }

    fn upload_dir(&self, id: &str) -> PathBuf {
        self.root.join(OWN_DIR).join("uploads").join(id)
    }

    fn part_path(&self, id: &str, number: i32) -> PathBuf {
        self.upload_dir(id).join(format!("{number:05}"))
    }
}
