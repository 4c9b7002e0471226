//! Which of the files that lie there are the server's: the names we put there for it, each with the time of its file as
//! we left it.
//!
//! Reports tell them. A leader that has just taken over knows nothing of what was sent before, and may so have removed
//! what left the template meanwhile, and nothing else: whoever puts a file of his own there, or writes over one of ours,
//! keeps it, for its time is another.
//!
//! Written after the files it names. A crash in between leaves some of them out, which are then not removed; nor is the
//! hash written yet, so the server sends them again and they are noted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::SystemTime,
};

use nstance_rt::chain::Chain;

use crate::{
    context::Context,
    disk::{Access, open_regular},
    files::names::FileName,
};

/// Among the files it is about, so that it goes when they go.
const NAME: &str = ".received";
const MODE: u32 = 0o600;

/// Room for every name that fits into the directory; what is longer is not ours.
const MAX_BYTES: u64 = 256 * 1024;

/// When a file was last written, as the file system says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    seconds: i64,
    nanos: i64,
}

impl Stamp {
    /// Of a regular file; links are not followed.
    fn of(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file)?;
        Some(Self { seconds: found.mtime(), nanos: found.mtime_nsec() })
    }
}

/// Names of files that lie there as we left them.
pub(crate) fn names(ctx: &Context) -> BTreeSet<String> {
    standing(ctx).into_keys().collect()
}

/// When a batch last changed what is ours, as the file system says.
pub(crate) fn changed_at(ctx: &Context) -> Option<SystemTime> {
    fs::symlink_metadata(ctx.settings.recv.path.join(NAME)).ok()?.modified().ok()
}

/// Takes note of a committed batch: these are in their places now. Those that were removed, or are no longer as we left
/// them, are forgotten.
pub(crate) fn note<'a>(ctx: &Context, placed: impl Iterator<Item = &'a FileName>) {
    let recv = &ctx.settings.recv.path;
    let before = load(ctx);
    let mut now = standing(ctx);
    for name in placed {
        if let Some(stamp) = Stamp::of(&recv.join(name.as_str())) {
            now.insert(name.as_str().to_owned(), stamp);
        }
    }
    if now == before {
        return;
    }
    let text: String =
        now.iter().map(|(name, Stamp { seconds, nanos })| format!("{seconds} {nanos} {name}\n")).collect();
    if let Err(error) = ctx.parts.disk.write(&recv.join(NAME), text.as_bytes(), Access::mode(MODE)) {
        tracing::warn!(error = %Chain(&error), "names of received files not written; after a change of leaders those that left the template will stay");
    }
}

fn standing(ctx: &Context) -> BTreeMap<String, Stamp> {
    let mut all = load(ctx);
    all.retain(|name, stamp| Stamp::of(&ctx.settings.recv.path.join(name)) == Some(*stamp));
    all
}

/// Everything that was noted. A line that makes no sense is passed over: its file stays.
fn load(ctx: &Context) -> BTreeMap<String, Stamp> {
    let mut text = String::new();
    let read =
        open_regular(&ctx.settings.recv.path.join(NAME)).map(|file| file.take(MAX_BYTES).read_to_string(&mut text));
    if !matches!(read, Ok(Ok(_))) {
        return BTreeMap::new();
    }
    let line = |line: &str| {
        let mut parts = line.splitn(3, ' ');
        let (seconds, nanos) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let name = FileName::parse(parts.next()?).ok()?;
        Some((name.as_str().to_owned(), Stamp { seconds, nanos }))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::fs::symlink,
        time::{Duration, SystemTime},
    };

    use super::*;

    fn put(ctx: &Context, name: &str, seconds: u64) {
        let file = fs::File::create(ctx.settings.recv.path.join(name)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
    }

    fn noted(ctx: &Context, placed: &[&str]) -> Vec<String> {
        let placed: Vec<_> = placed.iter().map(|name| FileName::parse(name).unwrap()).collect();
        note(ctx, placed.iter());
        names(ctx).into_iter().collect()
    }

    #[test]
    fn only_what_was_placed_and_lies_there_untouched_is_ours() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let recv = ctx.settings.recv.path.clone();
        assert!(names(&ctx).is_empty());
        for name in ["a", "b", "c", "foreign"] {
            put(&ctx, name, 10);
        }
        assert_eq!(noted(&ctx, &["a", "b", "c"]), ["a", "b", "c"]);
        // Somebody else writes over one, another becomes a link, the third is removed.
        put(&ctx, "a", 11);
        fs::remove_file(recv.join("b")).unwrap();
        symlink(recv.join("foreign"), recv.join("b")).unwrap();
        fs::remove_file(recv.join("c")).unwrap();
        assert!(names(&ctx).is_empty());
        put(&ctx, "d", 20);
        assert_eq!(noted(&ctx, &["d", "not-there"]), ["d"]);
        put(&ctx, "a", 10);
        assert_eq!(noted(&ctx, &[]), ["d"], "what was forgotten stays so");
        put(&ctx, "a", 30);
        assert_eq!(noted(&ctx, &["a"]), ["a", "d"], "and is ours when the server sends it");
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        let (_outer, ctx) = Context::for_tests(&[]);
        let recv = ctx.settings.recv.path.clone();
        put(&ctx, "a", 10);
        put(&ctx, "b", 10);
        fs::write(recv.join(NAME), "10 0 a\n10 b\nx 0 b\n10 0 ../a\n10 0 \n\n10 0 errors\n").unwrap();
        assert_eq!(noted(&ctx, &[]), ["a"]);
        fs::write(recv.join(NAME), b"10 0 a\n\xff").unwrap();
        assert!(names(&ctx).is_empty());
        fs::remove_file(recv.join(NAME)).unwrap();
        fs::write(recv.join("elsewhere"), "10 0 a\n").unwrap();
        symlink(recv.join("elsewhere"), recv.join(NAME)).unwrap();
        assert!(names(&ctx).is_empty(), "links are not followed");
    }
}
