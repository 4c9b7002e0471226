//! The directory that holds who this machine is: CA bundle, nonce, key, certificate.
//!
//! A reader, or this process after a crash at any point, sees the old file or the new one, whole and with its final
//! mode.

use std::{
    collections::BTreeMap,
    fs::{self, Metadata, Permissions},
    io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
};

use nstance_core::time::Timestamp;
use nstance_identity::{
    ca::{Bundle, CaError},
    keys::{KeyError, KeyPair},
};
use zeroize::Zeroizing;

use crate::{
    disk::{Access, Disk},
    settings::{DIRECTORIES, Directory, Problem, Settings, directories_from_env},
};

const CA: &str = "ca.crt";
const NONCE: &str = "nonce.jwt";
const KEY: &str = "identity.key";
const CERTIFICATE: &str = "identity.crt";
const CONFIG_HASH: &str = "config.hash";
const LAST_BATCH: &str = "write-files.last";
const REJOIN_COUNTER: &str = "rejoin.counter";
/// The cluster's id. A rejoin proof is bound to it, and neither key nor certificate says it.
const CLUSTER: &str = "cluster.id";

#[derive(Debug, thiserror::Error)]
pub enum DirError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is not a CA bundle", path.display())]
    Ca { path: PathBuf, source: CaError },
    #[error("{} cannot be used; remove it and give this machine a new nonce", path.display())]
    Key { path: PathBuf, source: KeyError },
}

impl DirError {
    /// Whether the file is there and may be read at another time: the disk, its mode or the process is at fault.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, Self::Read { source, .. } if source.kind() != io::ErrorKind::NotFound)
    }
}

/// How far a rejoin got: the counter is written before it is sent, and again once its answer is safe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejoinCounter {
    /// This one was sent; whether it was heard is not known. It is sent again, with the same proof.
    Sent(u64),
    /// This one is over.
    Done(u64),
}

impl RejoinCounter {
    /// The counter to send now.
    pub fn next(self) -> u64 {
        match self {
            Self::Sent(counter) => counter,
            Self::Done(counter) => counter.saturating_add(1),
        }
    }
}

#[derive(Debug, Clone)]
pub struct IdentityDir {
    path: PathBuf,
    mode: u32,
    disk: Disk,
}

impl IdentityDir {
    pub fn new(directory: &Directory, disk: Disk) -> Self {
        Self { path: directory.path.clone(), mode: directory.file_mode, disk }
    }

    pub fn ca(&self) -> Result<Bundle, DirError> {
        let path = self.path.join(CA);
        let bytes = fs::read(&path).map_err(|source| DirError::Read { path: path.clone(), source })?;
        Bundle::parse(&bytes).map_err(|source| DirError::Ca { path, source })
    }

    pub fn write_ca(&self, bundle: &Bundle) -> Result<(), DirError> {
        self.write(CA, bundle.pem().as_bytes(), 0o644)
    }

    /// The nonce, if one lies there.
    pub fn nonce(&self) -> Result<Option<String>, DirError> {
        Ok(self.read(NONCE)?.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    pub fn remove_nonce(&self) -> Result<(), DirError> {
        let path = self.path.join(NONCE);
        self.disk.remove(&path).map_err(|source| DirError::Write { path, source })
    }

    pub fn key(&self) -> Result<Option<KeyPair>, DirError> {
        let Some(bytes) = self.read(KEY)?.map(Zeroizing::new) else { return Ok(None) };
        let key = KeyPair::from_pkcs8_pem(&bytes);
        key.map(Some).map_err(|source| DirError::Key { path: self.path.join(KEY), source })
    }

    pub fn write_key(&self, key: &KeyPair) -> Result<(), DirError> {
        self.write(KEY, key.to_pkcs8_pem().as_bytes(), self.mode)
    }

    pub fn certificate(&self) -> Result<Option<Vec<u8>>, DirError> {
        self.read(CERTIFICATE)
    }

    pub fn write_certificate(&self, chain_pem: &[u8]) -> Result<(), DirError> {
        self.write(CERTIFICATE, chain_pem, self.mode)
    }

    /// The hash of the configuration that was last applied in full.
    pub fn config_hash(&self) -> Option<String> {
        let bytes = self.read(CONFIG_HASH).ok()??;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|hash| !hash.is_empty())
    }

    pub fn write_config_hash(&self, hash: &str) -> Result<(), DirError> {
        self.write(CONFIG_HASH, hash.as_bytes(), self.mode)
    }

    /// When files were last put into their places; a service manager may watch it.
    pub fn write_last_batch(&self, at: Timestamp) -> Result<(), DirError> {
        self.write(LAST_BATCH, format!("{}\n", at.as_millis()).as_bytes(), 0o644)
    }

    pub fn cluster(&self) -> Result<Option<String>, DirError> {
        Ok(self.read(CLUSTER)?.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()))
    }

    pub fn write_cluster(&self, cluster: &str) -> Result<(), DirError> {
        self.write(CLUSTER, cluster.as_bytes(), 0o644)
    }

    pub fn rejoin_counter(&self) -> Result<RejoinCounter, DirError> {
        let Some(bytes) = self.read(REJOIN_COUNTER)? else { return Ok(RejoinCounter::Done(0)) };
        let text = String::from_utf8_lossy(&bytes);
        let mut words = text.split_whitespace();
        // What cannot be read counts as zero: the server refuses a counter it has seen, and a person looks.
        let counter = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        Ok(if words.next() == Some("sent") { RejoinCounter::Sent(counter) } else { RejoinCounter::Done(counter) })
    }

    pub fn write_rejoin_counter(&self, counter: RejoinCounter) -> Result<(), DirError> {
        let text = match counter {
            RejoinCounter::Sent(counter) => format!("{counter} sent\n"),
            RejoinCounter::Done(counter) => format!("{counter}\n"),
        };
        self.write(REJOIN_COUNTER, text.as_bytes(), 0o600)
    }

    /// What a person changes to help a parked agent; compared, never kept.
    pub(crate) fn help(&self) -> (Option<Vec<u8>>, Option<Vec<u8>>) {
        (self.read(NONCE).unwrap_or(None), self.read(CA).unwrap_or(None))
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, DirError> {
        let path = self.path.join(name);
        match fs::read(&path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(DirError::Read { path, source }),
        }
    }

    fn write(&self, name: &str, content: &[u8], mode: u32) -> Result<(), DirError> {
        self.disk
            .write(&self.path.join(name), content, Access::mode(mode))
            .map_err(|source| DirError::Write { path: self.path.join(name), source })
    }
}

/// Makes the three directories that are missing, and says what is wrong with those that are there.
pub fn prepare(settings: &Settings) -> Result<(), Vec<Problem>> {
    each(settings, prepare_one)
}

/// Says of the directories of the environment what is wrong with them, as far as they are known although other settings
/// are bad. Nothing is made, and what could be made is no problem.
pub fn directory_problems() -> Vec<Problem> {
    let all = directories_from_env();
    judge(all.iter().map(|(name, directory)| (*name, directory)), foresee)
}

/// Says the same of what is there, and makes nothing: as another user one would make directories of that user's.
pub fn inspect(settings: &Settings) -> Result<(), Vec<Problem>> {
    each(settings, |path, mode| look(path, mode).map(Some))
}

/// What is found at a path that is to be a directory of this mode, if something is; or what is wrong with it.
type Find = fn(&Path, u32) -> Result<Option<Metadata>, String>;

fn each(settings: &Settings, find: Find) -> Result<(), Vec<Problem>> {
    let all = [&settings.identity, &settings.keys, &settings.recv];
    let problems = judge(DIRECTORIES.into_iter().zip(all), find);
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

fn judge<'a>(all: impl Iterator<Item = (&'static str, &'a Directory)>, find: Find) -> Vec<Problem> {
    let mut known = BTreeMap::new();
    let mut problems = Vec::new();
    for (name, directory) in all {
        let path = &directory.path;
        // What is received is for others too.
        let mode = if name == "RECV_DIR" { 0o750 } else { 0o700 };
        let why = match find(path, mode) {
            Ok(None) => continue,
            // Paths that differ may lead to one place.
            Ok(Some(found)) => match known.insert((found.dev(), found.ino()), path.display()) {
                Some(other) => format!("is {other}; use three different directories"),
                None => continue,
            },
            Err(why) => why,
        };
        problems.push(Problem::new(name, format!("{}: {why}", path.display())));
    }
    problems
}

fn prepare_one(path: &Path, mode: u32) -> Result<Option<Metadata>, String> {
    if is_missing(path) {
        make(path, mode).map_err(|error| format!("cannot be made: {error}"))?;
    }
    look(path, mode).map(Some)
}

fn foresee(path: &Path, mode: u32) -> Result<Option<Metadata>, String> {
    if is_missing(path) && ask_to_write(nearest(path)).is_ok() {
        return Ok(None);
    }
    look(path, mode).map(Some)
}

/// What there is of the way to a path.
fn nearest(path: &Path) -> &Path {
    path.ancestors().find(|it| !is_missing(it)).unwrap_or(path)
}

fn is_missing(path: &Path) -> bool {
    fs::metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Makes a directory, and those it lies in: whoever may read what is in it must be able to come there.
fn make(path: &Path, mode: u32) -> io::Result<()> {
    if let Some(parent) = path.parent().filter(|parent| is_missing(parent)) {
        make(parent, 0o755)?;
    }
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made?,
    }
    // The umask may have taken bits away.
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn look(path: &Path, mode: u32) -> Result<Metadata, String> {
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => Err("is not a directory".to_owned()),
        Ok(found) if found.mode() & 0o022 != 0 => {
            Err(format!("can be written by others (mode {:04o}); use {mode:04o}", found.mode() & 0o7777))
        }
        Ok(found) => ask_to_write(path).map(|()| found).map_err(|error| format!("cannot be written: {error}")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = nearest(path);
            Err(match ask_to_write(parent) {
                Ok(()) => {
                    format!("is not there; the agent makes it if its user can write {}, as you can", parent.display())
                }
                Err(error) => format!("is not there, and {} cannot be written: {error}", parent.display()),
            })
        }
        Err(error) => Err(format!("cannot be looked at: {error}")),
    }
}

/// Asked rather than tried: where the file of a trial would lie, somebody may have put a link or a pipe.
fn ask_to_write(path: &Path) -> rustix::io::Result<()> {
    use rustix::fs::Access;
    rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK)
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn directory() -> (tempfile::TempDir, IdentityDir) {
        let outer = tempfile::tempdir().unwrap();
        let dir = IdentityDir { path: outer.path().to_owned(), mode: 0o600, disk: Disk::default() };
        (outer, dir)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_written_is_read_and_has_its_mode() {
        let (outer, dir) = directory();
        assert!(dir.key().unwrap().is_none());
        let key = KeyPair::generate(&SeededEntropy::new(1));
        dir.write_key(&key).unwrap();
        assert_eq!(dir.key().unwrap().unwrap().public_key(), key.public_key());
        assert_eq!(mode(&outer.path().join(KEY)), 0o600);
        dir.write_cluster("demo").unwrap();
        assert_eq!(mode(&outer.path().join(CLUSTER)), 0o644);
        assert_eq!(dir.config_hash(), None);
        dir.write_config_hash("sha256:00").unwrap();
        assert_eq!(dir.config_hash().as_deref(), Some("sha256:00"));
        let names: Vec<_> = fs::read_dir(outer.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }

    #[test]
    fn file_left_by_a_crash_is_taken_over() {
        let (outer, dir) = directory();
        fs::write(outer.path().join(".cluster.id.tmp"), "half").unwrap();
        dir.write_cluster("demo").unwrap();
        assert_eq!(dir.cluster().unwrap().as_deref(), Some("demo"));
        assert!(!outer.path().join(".cluster.id.tmp").exists());
    }

    #[test]
    fn reader_never_sees_a_torn_file() {
        let (outer, dir) = directory();
        let (a, b) = ("a".repeat(8192), "b".repeat(8192));
        dir.write_cluster(&a).unwrap();
        let path = outer.path().join(CLUSTER);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for n in 0..200 {
                    dir.write_cluster(if n % 2 == 0 { &b } else { &a }).unwrap();
                }
            });
            while !writer.is_finished() {
                let seen = fs::read_to_string(&path).unwrap();
                assert!(seen == a || seen == b);
                assert_eq!(mode(&path), 0o644);
            }
        });
    }

    #[test]
    fn nonce_goes_and_may_go_twice() {
        let (outer, dir) = directory();
        fs::write(outer.path().join(NONCE), " token\n").unwrap();
        assert_eq!(dir.nonce().unwrap().as_deref(), Some("token"));
        dir.remove_nonce().unwrap();
        dir.remove_nonce().unwrap();
        assert_eq!(dir.nonce().unwrap(), None);
    }

    #[test]
    fn unanswered_rejoin_is_repeated_with_its_counter() {
        let (_outer, dir) = directory();
        assert_eq!(dir.rejoin_counter().unwrap().next(), 1);
        dir.write_rejoin_counter(RejoinCounter::Sent(1)).unwrap();
        assert_eq!(dir.rejoin_counter().unwrap().next(), 1);
        dir.write_rejoin_counter(RejoinCounter::Done(1)).unwrap();
        assert_eq!(dir.rejoin_counter().unwrap().next(), 2);
    }

    #[test]
    fn directories_are_made_closed_and_open_ones_are_refused() {
        let outer = tempfile::tempdir().unwrap();
        let made = outer.path().join("a/b");
        prepare_one(&made, 0o700).unwrap();
        assert_eq!(mode(&made), 0o700);
        prepare_one(&made, 0o700).unwrap();
        fs::set_permissions(&made, Permissions::from_mode(0o770)).unwrap();
        assert!(prepare_one(&made, 0o700).unwrap_err().contains("0770"));
        let file = outer.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(prepare_one(&file, 0o700).is_err());
    }

    #[test]
    fn planted_links_and_pipes_are_left_alone() {
        let (outer, _) = directory();
        fs::set_permissions(outer.path(), Permissions::from_mode(0o700)).unwrap();
        let (linked, pipe) = (tempfile::NamedTempFile::new().unwrap(), outer.path().join("pipe"));
        fs::write(linked.path(), "dear").unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let planted = outer.path().join(".probe.tmp");
        for target in [linked.path(), &pipe] {
            std::os::unix::fs::symlink(target, &planted).unwrap();
            prepare_one(outer.path(), 0o700).unwrap();
            assert_eq!(fs::read_link(&planted).unwrap(), target);
            fs::remove_file(&planted).unwrap();
        }
        assert_eq!(fs::read_to_string(linked.path()).unwrap(), "dear");
    }

    /// Settings of an agent whose directories are these, below `outer`.
    fn settings(outer: &Path, [identity, keys, recv]: [&str; 3]) -> Settings {
        let directories = [("IDENTITY_DIR", identity), ("KEYS_DIR", keys), ("RECV_DIR", recv)];
        let read = Settings::read(|name| {
            let found = directories.iter().find(|(directory, _)| name.strip_prefix("NSTANCE_") == Some(directory));
            let path = found.map(|(_, path)| outer.join(path).display().to_string());
            path.or_else(|| name.ends_with("_ADDR").then(|| "[::1]:1".to_owned()))
                .filter(|_| name != "NSTANCE_HEALTH_ADDR")
                .or_else(|| (name == "NSTANCE_INSTANCE_ID").then(|| "knc06bgm7733st2576nx5jht4ecjw".to_owned()))
        });
        read.unwrap()
    }

    fn problems(found: Result<(), Vec<Problem>>) -> Vec<String> {
        found.unwrap_err().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn others_can_come_to_a_directory_that_was_made_for_them() {
        let outer = tempfile::tempdir().unwrap();
        prepare(&settings(outer.path(), ["a/b/identity", "a/b/keys", "a/b/recv"])).unwrap();
        let modes = ["a", "a/b", "a/b/identity", "a/b/keys", "a/b/recv"].map(|it| mode(&outer.path().join(it)));
        assert_eq!(modes, [0o755, 0o755, 0o700, 0o700, 0o750]);
        prepare(&settings(outer.path(), ["c/../d/identity", "c/keys", "c/recv"])).unwrap();
        assert_eq!(mode(&outer.path().join("d/identity")), 0o700);
    }

    #[test]
    fn one_directory_under_several_names_is_refused() {
        let outer = tempfile::tempdir().unwrap();
        let roundabout = problems(prepare(&settings(outer.path(), ["a/recv", "keys", "a/../a/recv"])));
        assert_eq!(roundabout.len(), 1);
        assert!(roundabout[0].starts_with("NSTANCE_RECV_DIR: "), "{roundabout:?}");
        assert!(roundabout[0].ends_with("/a/recv; use three different directories"), "{roundabout:?}");
        std::os::unix::fs::symlink("a/recv", outer.path().join("link")).unwrap();
        let linked = problems(prepare(&settings(outer.path(), ["a/recv", "link", "recv"])));
        assert!(linked[0].starts_with("NSTANCE_KEYS_DIR: "), "{linked:?}");
    }

    #[test]
    fn who_merely_looks_makes_nothing() {
        let outer = tempfile::tempdir().unwrap();
        let settings = settings(outer.path(), ["a/i", "a/k", "r"]);
        let place = outer.path().display();
        let told = format!(
            "NSTANCE_KEYS_DIR: {place}/a/k: is not there; the agent makes it if its user can write {place}, as you can"
        );
        assert_eq!(problems(inspect(&settings))[1], told);
        assert_eq!(fs::read_dir(outer.path()).unwrap().count(), 0);
        prepare(&settings).unwrap();
        inspect(&settings).unwrap();
    }
}
