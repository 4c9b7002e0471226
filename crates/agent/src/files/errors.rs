//! Error entries: beside the received files, one line per name, saying what went wrong with it last. They are for the
//! person on the machine and for the server, which finds them in every report.

use std::{
    collections::BTreeMap,
    fmt::Display,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use nstance_rt::chain::Chain;

use crate::{
    context::Context,
    disk::{Access, open_regular},
    files::names::{ERRORS, made_safe},
};

const MODE: u32 = 0o640;
const DIRECTORY_MODE: u32 = 0o750;

/// A server that invents names must not fill the disk.
const MAX_ENTRIES: usize = 512;

/// Of each entry, in reports.
const MAX_TOLD: u64 = 1024;

/// Keeps what went wrong with `name`, which may be no name at all. Not being able to is only worth a log line: there is
/// nobody left to tell.
pub(crate) fn tell(ctx: &Context, name: &str, what: impl Display) {
    let entry = made_safe(name);
    tracing::warn!(name = entry, error = %what, "kept as an error entry");
    if let Err(error) = write(ctx, &entry, &format!("{what}\n")) {
        tracing::warn!(name = entry, error = %Chain(&error), "error entry not written");
    }
}

fn write(ctx: &Context, entry: &str, line: &str) -> io::Result<()> {
    let directory = directory(ctx);
    ctx.parts.disk.directory(&directory, DIRECTORY_MODE)?;
    let path = directory.join(entry);
    if fs::symlink_metadata(&path).is_err() && MAX_ENTRIES <= fs::read_dir(&directory)?.count() {
        return Err(io::ErrorKind::StorageFull.into());
    }
    ctx.parts.disk.write(&path, line.as_bytes(), Access::mode(MODE))
}

/// Forgets what went wrong with `name`. Says whether there was anything.
pub(crate) fn clear(ctx: &Context, name: &str) -> bool {
    let directory = directory(ctx);
    let path = directory.join(made_safe(name));
    if !is_directory(&directory) || fs::symlink_metadata(&path).is_err() {
        return false;
    }
    if let Err(error) = ctx.parts.disk.remove(&path) {
        tracing::warn!(name, error = %Chain(&error), "error entry not removed");
    }
    true
}

/// All entries, as reports tell them.
pub(crate) fn all(ctx: &Context) -> BTreeMap<String, String> {
    let directory = directory(ctx);
    if !is_directory(&directory) {
        return BTreeMap::new();
    }
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok().filter(|name| !name.starts_with('.'))?;
            Some((name, read(&entry.path()).ok()?))
        })
        .take(MAX_ENTRIES)
        .collect()
}

fn read(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(MAX_TOLD).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

fn directory(ctx: &Context) -> PathBuf {
    ctx.settings.recv.path.join(ERRORS)
}

/// A link to a directory is none.
fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn entry_is_one_line_and_goes_when_the_name_is_well_again() {
        let (_outer, ctx) = Context::for_tests(&[]);
        assert!(all(&ctx).is_empty());
        assert!(!clear(&ctx, "a"));
        tell(&ctx, "a", "first");
        tell(&ctx, "a", "second");
        assert_eq!(all(&ctx), BTreeMap::from([("a".to_owned(), "second".to_owned())]));
        assert_eq!(fs::metadata(directory(&ctx).join("a")).unwrap().mode() & 0o777, MODE);
        assert!(clear(&ctx, "a"));
        assert!(all(&ctx).is_empty());
    }

    #[test]
    fn reports_get_the_beginning_of_a_long_entry() {
        let (_outer, ctx) = Context::for_tests(&[]);
        tell(&ctx, "a", "ä".repeat(5000));
        let told = &all(&ctx)["a"];
        assert!((1000..=1030).contains(&told.len()), "{}", told.len());
    }

    #[test]
    fn invented_names_do_not_fill_the_disk() {
        let (_directories, ctx) = crate::files::in_memory();
        for n in 0..MAX_ENTRIES + 5 {
            tell(&ctx, &format!("../{n}"), "bad name");
        }
        assert_eq!(all(&ctx).len(), MAX_ENTRIES);
        tell(&ctx, "../7", "another reason");
        assert_eq!(all(&ctx)["_._7"], "another reason", "what is there may still change");
    }

    #[test]
    fn planted_links_are_not_followed() {
        let (outer, ctx) = Context::for_tests(&[]);
        let outside = outer.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("a"), "precious").unwrap();
        symlink(&outside, directory(&ctx)).unwrap();
        assert!(all(&ctx).is_empty());
        assert!(!clear(&ctx, "a"));
        tell(&ctx, "a", "wrong");
        assert!(is_directory(&directory(&ctx)));
        symlink(outside.join("a"), directory(&ctx).join("b")).unwrap();
        assert_eq!(all(&ctx).len(), 1, "a link is not an entry");
        tell(&ctx, "b", "wrong");
        assert_eq!(all(&ctx).len(), 2);
        assert_eq!(fs::read_to_string(outside.join("a")).unwrap(), "precious");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    }
}
