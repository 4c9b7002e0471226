//! What a machine's own scripts say of its boot: `nstance-agent stage`, `fail` and `ready`.
//!
//! Each word is a line at the end of one small file, which the running agent, or the next one that starts, reads. Words
//! need no agent and lose nothing if one is not there yet. The file is never rewritten but by the first word of a new
//! boot, under the lock that every writer holds; a line torn by a crash is closed by the next word and skipped.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead as _, BufReader, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use crate::host::Host;

const FILE: &str = "boot.stages";

/// Some hundreds of words. A script that says more is in a loop.
const MAX_BYTES: u64 = 64 * 1024;

/// Room that stages do not get, so that a script which waits in a loop and says so can still tell how it ended.
const FOR_VERDICTS: u64 = 4 * 1024;

/// As long as a detail may be; more would be cut in the report.
pub(crate) const MAX_DETAIL: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    Stage { name: StageName, detail: String, failed: bool },
    Fail(String),
    Ready,
}

impl Word {
    /// Whether the boot is judged by it. The rest only tells how far it is.
    pub fn is_verdict(&self) -> bool {
        !matches!(self, Self::Stage { failed: false, .. })
    }
}

/// Of a stage that a script names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageName(String);

impl StageName {
    /// 1 to 64 letters, digits, `.`, `_` and `-`.
    pub fn parse(text: &str) -> Option<Self> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        ((1..=64).contains(&text.len()) && text.bytes().all(fits)).then(|| Self(text.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// A word and when it was said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) at: Timestamp,
    pub(crate) word: Word,
}

#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    #[error("{} is not there; make it, or set NSTANCE_IDENTITY_DIR", path.display())]
    NoDirectory { path: PathBuf },
    #[error("write {}; run this as root or as the agent's user", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("{} is not a plain file; remove it", path.display())]
    NotPlain { path: PathBuf },
    #[error("{} is full: too much was said in this boot", path.display())]
    Full { path: PathBuf },
}

/// Says a word about the boot that `host` is in.
pub fn say(identity: &Path, host: &Host, at: Timestamp, word: &Word) -> Result<(), SpoolError> {
    let path = identity.join(FILE);
    let owner = match fs::metadata(identity) {
        Ok(found) if found.is_dir() => found,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(SpoolError::Write { path, source: error });
        }
        _ => return Err(SpoolError::NoDirectory { path: identity.to_owned() }),
    };
    let failed = |source| SpoolError::Write { path: path.clone(), source };
    let mut options = OpenOptions::new();
    // Root writes here into a directory of somebody else: a link in it must not lead root anywhere.
    let no_follow = i32::try_from(rustix::fs::OFlags::NOFOLLOW.bits()).unwrap_or(0);
    options.read(true).append(true).create(true).mode(0o600).custom_flags(no_follow);
    let mut file = match options.open(&path) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            return Err(SpoolError::NotPlain { path });
        }
        opened => opened.map_err(failed)?,
    };
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() || found.nlink() != 1 {
        return Err(SpoolError::NotPlain { path });
    }
    if found.uid() != owner.uid() {
        // Made by root just now: the agent must be able to read it.
        std::os::unix::fs::fchown(&file, Some(owner.uid()), Some(owner.gid())).map_err(failed)?;
    }
    // Held for the time of one line; whoever dies lets go of it.
    file.lock().map_err(failed)?;
    let boot = host.boot_id();
    let mut length = file.metadata().map_err(failed)?.len();
    if 0 < length && first_boot(&file).as_deref() != Some(boot.as_str()) {
        file.set_len(0).map_err(failed)?;
        length = 0;
    }
    let mut line = String::new();
    if 0 < length && last_byte(&mut file).map_err(failed)? != b'\n' {
        line.push('\n');
    }
    line.push_str(&to_json(&boot, at, word).to_string());
    line.push('\n');
    let limit = if word.is_verdict() { MAX_BYTES } else { MAX_BYTES - FOR_VERDICTS };
    if limit < length + line.len() as u64 {
        return Err(SpoolError::Full { path });
    }
    file.write_all(line.as_bytes()).and_then(|()| file.sync_data()).map_err(failed)
}

fn first_boot(file: &File) -> Option<String> {
    let mut reader = BufReader::new(file);
    reader.rewind().ok()?;
    let mut line = String::new();
    reader.take(MAX_BYTES).read_line(&mut line).ok()?;
    let value: Value = serde_json::from_str(&line).ok()?;
    Some(value.get("boot")?.as_str()?.to_owned())
}

fn last_byte(file: &mut File) -> io::Result<u8> {
    let mut byte = [0];
    file.seek(io::SeekFrom::End(-1))?;
    file.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn to_json(boot: &str, at: Timestamp, word: &Word) -> Value {
    let mut line = json!({ "boot": boot, "at": at.as_millis() });
    match word {
        Word::Stage { name, detail, failed } => {
            line["stage"] = name.as_str().into();
            line["detail"] = cut(detail).into();
            line["failed"] = (*failed).into();
        }
        Word::Fail(text) => line["fail"] = cut(text).into(),
        Word::Ready => line["ready"] = true.into(),
    }
    line
}

fn from_json(boot: &str, line: &str) -> Option<Said> {
    let value: Value = serde_json::from_str(line).ok()?;
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    if text("boot") != Some(boot) {
        return None;
    }
    let at = Timestamp::from_millis(value.get("at")?.as_i64()?);
    let word = if let Some(name) = text("stage") {
        let detail = cut(text("detail").unwrap_or_default()).to_owned();
        let failed = value.get("failed").and_then(Value::as_bool).unwrap_or(false);
        Word::Stage { name: StageName::parse(name)?, detail, failed }
    } else if let Some(why) = text("fail") {
        Word::Fail(cut(why).to_owned())
    } else if value.get("ready").and_then(Value::as_bool) == Some(true) {
        Word::Ready
    } else {
        return None;
    };
    Some(Said { at, word })
}

/// As much of a detail as is told.
pub(crate) fn cut(text: &str) -> &str {
    let end = (0..=MAX_DETAIL.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    &text[..end]
}

/// The reader's side: words of this boot, read anew only when the file has changed.
pub(crate) struct Spool {
    path: PathBuf,
    boot: String,
    seen: Option<(u64, i64, i64)>,
    words: Vec<Said>,
}

impl Spool {
    pub(crate) fn new(identity: &Path, boot: &str) -> Self {
        Self { path: identity.join(FILE), boot: boot.to_owned(), seen: None, words: Vec::new() }
    }

    pub(crate) fn words(&mut self) -> &[Said] {
        let now = fs::metadata(&self.path).ok().map(|found| (found.len(), found.mtime(), found.mtime_nsec()));
        if now != self.seen {
            self.seen = now;
            self.words = self.read().unwrap_or_default();
        }
        &self.words
    }

    fn read(&self) -> io::Result<Vec<Said>> {
        let mut bytes = Vec::new();
        File::open(&self.path)?.take(MAX_BYTES).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        // What follows the last line's end is not all there yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        Ok(whole.lines().filter_map(|line| from_json(&self.boot, line)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(boot: &str) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        reboot(dir.path(), boot);
        (dir, host)
    }

    fn reboot(root: &Path, boot: &str) {
        let path = root.join("proc/sys/kernel/random");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("boot_id"), format!("{boot}\n")).unwrap();
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_millis(seconds * 1000)
    }

    fn stage(name: &str) -> Word {
        Word::Stage { name: StageName::parse(name).unwrap(), detail: "d".into(), failed: false }
    }

    #[test]
    fn words_are_heard_in_order_with_their_times() {
        let (dir, host) = machine("b1");
        let words = [stage("packages"), Word::Fail("no \"disk\"\nleft".into()), Word::Ready];
        for (n, word) in (1..).zip(&words) {
            say(dir.path(), &host, at(n), word).unwrap();
        }
        let mut spool = Spool::new(dir.path(), "b1");
        let heard: Vec<_> = spool.words().iter().map(|said| (said.at, said.word.clone())).collect();
        assert_eq!(heard, (1..).map(at).zip(words).collect::<Vec<_>>());
        let mode = fs::metadata(dir.path().join(FILE)).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn words_of_an_earlier_boot_are_gone() {
        let (dir, host) = machine("b1");
        say(dir.path(), &host, at(1), &Word::Fail("old".into())).unwrap();
        reboot(dir.path(), "b2");
        assert!(Spool::new(dir.path(), "b2").words().is_empty());
        say(dir.path(), &host, at(2), &Word::Ready).unwrap();
        assert_eq!(Spool::new(dir.path(), "b2").words().len(), 1);
        assert_eq!(fs::read_to_string(dir.path().join(FILE)).unwrap().lines().count(), 1);
    }

    #[test]
    fn torn_line_costs_only_itself() {
        let (dir, host) = machine("b1");
        say(dir.path(), &host, at(1), &stage("one")).unwrap();
        let path = dir.path().join(FILE);
        let mut text = fs::read_to_string(&path).unwrap();
        text.push_str("{\"boot\":\"b1\",\"at\":2,\"rea");
        fs::write(&path, text).unwrap();
        let mut spool = Spool::new(dir.path(), "b1");
        assert_eq!(spool.words().len(), 1);
        say(dir.path(), &host, at(3), &Word::Ready).unwrap();
        assert_eq!(spool.words().last().map(|said| &said.word), Some(&Word::Ready));
        assert_eq!(spool.words().len(), 2);
    }

    #[test]
    fn chatter_ends_at_a_limit() {
        let (dir, host) = machine("b1");
        let word = Word::Fail("x".repeat(10_000));
        let refused = (0..1000).find_map(|n| say(dir.path(), &host, at(n), &word).err());
        assert!(matches!(refused, Some(SpoolError::Full { .. })));
        assert!(fs::metadata(dir.path().join(FILE)).unwrap().len() <= MAX_BYTES);
        assert!(
            Spool::new(dir.path(), "b1")
                .words()
                .iter()
                .all(|said| matches!(&said.word, Word::Fail(it) if it.len() == 256))
        );
    }

    #[test]
    fn script_that_said_too_much_can_still_say_how_it_ended() {
        let (dir, host) = machine("b1");
        let fills = Word::Stage { name: StageName::parse("waiting").unwrap(), detail: "x".repeat(256), failed: false };
        let refused = (0..1000).find_map(|n| say(dir.path(), &host, at(n), &fills).err());
        assert!(matches!(refused, Some(SpoolError::Full { .. })));
        let failed = Word::Stage { name: StageName::parse("waiting").unwrap(), detail: "x".repeat(256), failed: true };
        for word in [failed, Word::Fail("no disk".into()), Word::Ready] {
            say(dir.path(), &host, at(1000), &word).unwrap();
            assert_eq!(Spool::new(dir.path(), "b1").words().last().map(|said| &said.word), Some(&word));
        }
    }

    #[test]
    fn links_are_not_followed() {
        let (dir, host) = machine("b1");
        let precious = dir.path().join("precious");
        fs::write(&precious, "keep").unwrap();
        std::os::unix::fs::symlink(&precious, dir.path().join(FILE)).unwrap();
        assert!(matches!(say(dir.path(), &host, at(1), &Word::Ready), Err(SpoolError::NotPlain { .. })));
        fs::remove_file(dir.path().join(FILE)).unwrap();
        fs::hard_link(&precious, dir.path().join(FILE)).unwrap();
        assert!(matches!(say(dir.path(), &host, at(1), &Word::Ready), Err(SpoolError::NotPlain { .. })));
        assert_eq!(fs::read_to_string(&precious).unwrap(), "keep");
    }

    #[test]
    fn missing_directory_is_named() {
        let (dir, host) = machine("b1");
        let error = say(&dir.path().join("none"), &host, at(1), &Word::Ready).unwrap_err();
        assert!(error.to_string().contains("none is not there"), "{error}");
    }

    #[test]
    fn names_are_plain() {
        for good in ["a", "install-packages", "step_1.2", &"x".repeat(64)] {
            assert!(StageName::parse(good).is_some(), "{good}");
        }
        for bad in ["", "a b", "ä", "a:b", "a/b", &"x".repeat(65)] {
            assert!(StageName::parse(bad).is_none(), "{bad}");
        }
    }
}
