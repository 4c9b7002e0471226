//! Object keys and where they live on disk.
//!
//! A key is stored under its own name, so that a person finds `config/dev-1.jsonc` where it says it is.
//! Three things have no plain file name and are escaped with `%`, which is itself written `%25`:
//!
//! - an empty part (`a//b`, `a/`) is `%00`, which cannot clash since keys never contain NUL; a part `.` is `%2E`,
//!   and so is the first dot of a top-level `.s3…`, the directory that is ours;
//! - a part longer than a file name may be is cut, and every piece but the last is a directory ending in `%-`;
//! - an object whose place is taken by a directory (`a` beside `a/b`) moves aside to `a%`.
//!
//! The mapping is injective. A file that no key maps to (`50%x`) is not an object and is not listed.

use std::path::{Path, PathBuf};

/// What S3 allows.
const MAX_KEY_BYTES: usize = 1024;
/// File names end at 255 bytes on all file systems that matter; this leaves room for our suffixes.
const MAX_PIECE_BYTES: usize = 200;
/// Holds temporary files, uploads and the lock.
pub(super) const OWN_DIR: &str = ".s3";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadKey {
    #[error("the key is empty")]
    Empty,
    #[error("the key is longer than {MAX_KEY_BYTES} bytes")]
    TooLong,
    #[error("the key begins with a slash")]
    Absolute,
    #[error("the key has a part that is \"..\"")]
    Parent,
    #[error("the key contains a NUL byte")]
    Nul,
}

/// A key that is safe to turn into a path.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Key(String);

impl Key {
    pub(super) fn parse(key: &str) -> Result<Key, BadKey> {
        match key {
            "" => Err(BadKey::Empty),
            key if MAX_KEY_BYTES < key.len() => Err(BadKey::TooLong),
            key if key.starts_with('/') => Err(BadKey::Absolute),
            key if key.contains('\0') => Err(BadKey::Nul),
            key if key.split('/').any(|part| part == "..") => Err(BadKey::Parent),
            key => Ok(Key(key.to_owned())),
        }
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Where the object lies, unless a directory has its place.
    pub(super) fn plain_path(&self, root: &Path) -> PathBuf {
        let mut path = root.to_owned();
        path.extend(self.pieces());
        path
    }

    /// Where the object lies when a directory has its place.
    pub(super) fn aside_path(&self, root: &Path) -> PathBuf {
        let mut path = self.plain_path(root).into_os_string();
        path.push("%");
        path.into()
    }

    /// The keys whose objects could stand where this key needs a directory, outermost first.
    pub(super) fn ancestors(&self) -> impl Iterator<Item = Key> {
        self.0.match_indices('/').map(|(at, _)| Key(self.0[..at].to_owned()))
    }

    fn pieces(&self) -> Vec<String> {
        self.0.split('/').enumerate().flat_map(|(at, part)| cut(&escape(part, at == 0))).collect()
    }
}

/// What a directory entry stands for, given the key prefix of its directory.
pub(super) enum Entry {
    /// A directory; all keys in it begin with this.
    Under(String),
    File(Found),
}

/// A file, and the key that its name spells.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Found {
    pub(super) key: String,
    path: PathBuf,
}

impl Found {
    /// Its key if it is an object. Anyone may write names by hand: only those which we would have chosen are objects.
    pub(super) fn object(&self, root: &Path) -> Option<Key> {
        let key = Key::parse(&self.key).ok()?;
        (self.path == key.plain_path(root) || self.path == key.aside_path(root)).then_some(key)
    }
}

/// Reads a name found on disk. `None` if no key maps to it.
pub(super) fn entry(path: PathBuf, prefix: &str, is_dir: bool) -> Option<Entry> {
    let name = path.file_name()?.to_str()?;
    if is_dir {
        return Some(Entry::Under(match name.strip_suffix("%-") {
            Some(piece) => format!("{prefix}{}", unescape(piece)?),
            None => format!("{prefix}{}/", unescape(name)?),
        }));
    }
    let key = format!("{prefix}{}", unescape(name.strip_suffix('%').unwrap_or(name))?);
    Some(Entry::File(Found { key, path }))
}

fn escape(part: &str, top: bool) -> String {
    match part {
        "" => "%00".to_owned(),
        "." => "%2E".to_owned(),
        part if top && part.starts_with(OWN_DIR) => format!("%2E{}", part[1..].replace('%', "%25")),
        part => part.replace('%', "%25"),
    }
}

fn unescape(name: &str) -> Option<String> {
    let mut out = String::with_capacity(name.len());
    let mut rest = name;
    while let Some((before, after)) = rest.split_once('%') {
        out.push_str(before);
        match after.get(..2)? {
            "00" => (),
            "25" => out.push('%'),
            "2E" => out.push('.'),
            _ => return None,
        }
        rest = &after[2..];
    }
    out.push_str(rest);
    Some(out)
}

/// Cuts an escaped part into file names, never within a character or an escape.
fn cut(escaped: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    let mut rest = escaped;
    while MAX_PIECE_BYTES < rest.len() {
        let mut at = MAX_PIECE_BYTES;
        while !rest.is_char_boundary(at) || rest[..at].ends_with('%') || rest[..at - 1].ends_with('%') {
            at -= 1;
        }
        pieces.push(format!("{}%-", &rest[..at]));
        rest = &rest[at..];
    }
    pieces.push(rest.to_owned());
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(key: &str) -> Key {
        Key::parse(key).unwrap()
    }

    #[test]
    fn ordinary_keys_are_their_own_paths() {
        let path = key("shard/dev-1/leader.json").plain_path(Path::new("/r"));
        assert_eq!(path, Path::new("/r/shard/dev-1/leader.json"));
        assert_eq!(key(".hidden/x~").plain_path(Path::new("/r")), Path::new("/r/.hidden/x~"));
    }

    #[test]
    fn dangerous_keys_are_refused() {
        for (text, why) in [
            ("", BadKey::Empty),
            ("/etc/passwd", BadKey::Absolute),
            ("..", BadKey::Parent),
            ("a/../b", BadKey::Parent),
            ("a/..", BadKey::Parent),
            ("a\0b", BadKey::Nul),
        ] {
            assert_eq!(Key::parse(text), Err(why), "{text:?}");
        }
        assert_eq!(Key::parse(&"x".repeat(1025)), Err(BadKey::TooLong));
        assert!(Key::parse("a..b/...").is_ok());
    }

    #[test]
    fn every_key_finds_back_from_its_path() {
        let root = Path::new("/r");
        let long = "é%".repeat(200);
        let keys =
            ["a", "a/", "a//b", "a/./b", ".", "./a", ".s3", ".s3/tmp/1", "x/.s3", "50%", "%00", "%2E", "a%-", &long];
        let mut seen = std::collections::HashSet::new();
        for text in keys {
            for path in [key(text).plain_path(root), key(text).aside_path(root)] {
                assert!(seen.insert(path.clone()), "{text:?} shares {path:?}");
                let names: Vec<_> = path.strip_prefix(root).unwrap().iter().collect();
                assert!(names.iter().all(|name| name.len() <= 255), "{path:?}");
                assert!(!path.starts_with("/r/.s3"), "{path:?}");
                let (mut at, mut prefix) = (root.to_owned(), String::new());
                for (n, name) in names.iter().enumerate() {
                    at.push(name);
                    match entry(at.clone(), &prefix, n + 1 < names.len()).unwrap() {
                        Entry::Under(under) => prefix = under,
                        Entry::File(found) => assert_eq!(found.object(root), Some(key(text))),
                    }
                }
            }
        }
    }

    #[test]
    fn names_no_key_maps_to_are_no_objects() {
        for name in ["%zz", "%41", "a%0", "%00x"] {
            let object = match entry(Path::new("/r").join(name), "", false) {
                Some(Entry::File(found)) => found.object(Path::new("/r")),
                _ => None,
            };
            assert_eq!(object, None, "{name}");
        }
    }
}
