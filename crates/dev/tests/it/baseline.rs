//! What others build on does not change by accident.
//!
//! `tests/baseline/` lists it, a line for each name: metrics, codes, objects of the store, config keys, routes, flags, and what the
//! operator has of it in Kubernetes.
//! Each list is held against what the code says today. A line may be added; changing or removing one breaks somebody,
//! and needs an issue's word. `UPDATE_EXPECT=1` adds what is new, and never removes a line.

mod codes;
mod config_keys;
mod flags;
mod metrics;
mod operator;
mod refusals;
mod routes;
mod stored;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/baseline")
}

/// Whether lines that are not in the file yet are added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Check,
    Add,
}

fn mode() -> Mode {
    if std::env::var_os("UPDATE_EXPECT").is_some() { Mode::Add } else { Mode::Check }
}

/// Holds the lines of today against the file of this name.
fn hold(name: &str, today: impl IntoIterator<Item = String>) {
    if let Err(problem) = hold_in(&directory().join(format!("{name}.txt")), today, mode()) {
        panic!("{problem}");
    }
}

fn hold_in(path: &Path, today: impl IntoIterator<Item = String>, mode: Mode) -> Result<(), String> {
    let today: BTreeSet<String> = today.into_iter().collect();
    if let Some(line) = today.iter().find(|line| line.is_empty() || line.contains('\n')) {
        return Err(format!("{line:?} is no line"));
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    let released: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let file = path.file_name().unwrap_or_default().display();
    let missing: Vec<_> = released.difference(&today).map(String::as_str).collect();
    if !missing.is_empty() {
        return Err(format!(
            "the code no longer has these lines of tests/baseline/{file}:\n  {}\n\
             Changing or removing a line needs an issue's word.",
            missing.join("\n  ")
        ));
    }
    let new: Vec<_> = today.difference(&released).map(String::as_str).collect();
    match mode {
        _ if new.is_empty() => Ok(()),
        Mode::Check => Err(format!(
            "the code has lines that are not in tests/baseline/{file} yet:\n  {}\nRun with UPDATE_EXPECT=1 to add it.",
            new.join("\n  ")
        )),
        Mode::Add => {
            let text: String = today.iter().map(|line| format!("{line}\n")).collect();
            fs::write(path, text).map_err(|error| format!("{file}: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> impl Iterator<Item = String> + '_ {
        text.split(' ').map(str::to_owned)
    }

    fn fixture(released: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("words.txt");
        fs::write(&path, released.replace(' ', "\n") + "\n").unwrap();
        (dir, path)
    }

    #[test]
    fn lines_of_today_in_any_order_pass() {
        let (_dir, path) = fixture("a b c");
        assert_eq!(hold_in(&path, lines("c a b b"), Mode::Check), Ok(()));
    }

    #[test]
    fn a_missing_line_is_named_with_its_file_and_never_removed() {
        let (_dir, path) = fixture("a b c");
        for mode in [Mode::Check, Mode::Add] {
            let problem = hold_in(&path, lines("a c d"), mode).unwrap_err();
            assert!(problem.contains("words.txt:\n  b\n") && problem.contains("an issue's word"), "{problem}");
            assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\nc\n");
        }
    }

    #[test]
    fn an_added_line_is_named_until_it_is_in_the_file() {
        let (_dir, path) = fixture("a c");
        let problem = hold_in(&path, lines("a b c"), Mode::Check).unwrap_err();
        assert!(problem.contains("words.txt yet:\n  b\n") && problem.contains("UPDATE_EXPECT=1"), "{problem}");
        assert_eq!(hold_in(&path, lines("a b c"), Mode::Add), Ok(()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\nb\nc\n");
        assert_eq!(hold_in(&path, lines("a b c"), Mode::Check), Ok(()));
    }

    #[test]
    fn a_file_that_is_not_there_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("words.txt");
        assert!(hold_in(&path, lines("a"), Mode::Check).is_err());
        assert_eq!(hold_in(&path, lines("a"), Mode::Add), Ok(()));
        assert_eq!(fs::read_to_string(&path).unwrap(), "a\n");
    }
}
