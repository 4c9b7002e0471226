//! `--watch`: builds again when a source changes, and tells which programs became other ones.
//!
//! A build that fails is shown and changes nothing. Whether a program changed is told by its contents: a build that only
//! touches a file restarts nobody.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use nstance_rt::tasks::Tasks;
use tokio::{process::Command, sync::mpsc};

/// How often sources are looked at.
const LOOK: Duration = Duration::from_millis(500);
const QUEUE: usize = 16;
/// Lines of a failed build that are shown.
const MOST_LINES: usize = 12;

/// Programs that may change.
const PROGRAMS: [&str; 5] = ["nstance-server", "nstance-agent", "nstance-operator", "nstance-admin", "nstance-dev"];

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rebuilt {
    /// For a person.
    Note(String),
    /// Programs that have other contents now.
    Changed(Vec<PathBuf>),
}

/// The sources this program was built from.
pub(crate) fn sources() -> anyhow::Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().ok().filter(|it| it.join("Cargo.toml").is_file() && it.join("crates").is_dir());
    root.context("--watch builds from the sources that nstance-dev was built from, and they are not there any more")
}

/// Watches until the scope ends.
pub(crate) fn start(tasks: &Tasks, root: PathBuf) -> anyhow::Result<mpsc::Receiver<Rebuilt>> {
    let own = std::env::current_exe().context("find our own program")?;
    let programs = own.parent().context("our own program is in no directory")?.to_owned();
    let (sender, receiver) = mpsc::channel(QUEUE);
    tasks.spawn_droppable("rebuild", async move {
        let mut newest = look(&root).await;
        loop {
            tokio::time::sleep(LOOK).await;
            let now = look(&root).await;
            if now == newest {
                continue;
            }
            newest = now;
            let _ = sender.send(Rebuilt::Note("sources changed; building".to_owned())).await;
            let before = contents(&programs).await;
            let told = match build(&root, &programs).await {
                Ok(()) => {
                    let after = contents(&programs).await;
                    let changed: Vec<PathBuf> = after
                        .into_iter()
                        .filter(|(path, it)| before.get(path) != Some(it))
                        .map(|(path, _)| path)
                        .collect();
                    if changed.is_empty() {
                        Rebuilt::Note("built; no program changed".to_owned())
                    } else {
                        Rebuilt::Changed(changed)
                    }
                }
                Err(error) => Rebuilt::Note(format!("not built, everything stays as it is: {error:#}")),
            };
            let _ = sender.send(told).await;
        }
    });
    Ok(receiver)
}

/// The sources by number and latest change: a file that was removed counts too.
async fn look(root: &Path) -> (usize, Option<SystemTime>) {
    let root = root.to_owned();
    let looked = tokio::task::spawn_blocking(move || {
        let (mut n, mut newest) = (0, None);
        for name in ["Cargo.toml", "Cargo.lock"] {
            note(&root.join(name), &mut n, &mut newest);
        }
        for crate_dir in fs::read_dir(root.join("crates")).into_iter().flatten().flatten() {
            note(&crate_dir.path().join("Cargo.toml"), &mut n, &mut newest);
            walk(&crate_dir.path().join("src"), &mut n, &mut newest);
            walk(&crate_dir.path().join("proto"), &mut n, &mut newest);
        }
        (n, newest)
    });
    looked.await.unwrap_or_default()
}

fn walk(dir: &Path, n: &mut usize, newest: &mut Option<SystemTime>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            walk(&path, n, newest);
        } else if path
            .extension()
            .is_some_and(|it| ["rs", "toml", "proto", "jsonc", "html"].iter().any(|end| it == *end))
        {
            note(&path, n, newest);
        }
    }
}

fn note(path: &Path, n: &mut usize, newest: &mut Option<SystemTime>) {
    if let Ok(changed) = fs::metadata(path).and_then(|it| it.modified()) {
        *n += 1;
        *newest = (*newest).max(Some(changed));
    }
}

/// Builds into the directory that the running programs are of.
async fn build(root: &Path, programs: &Path) -> anyhow::Result<()> {
    let target = programs.parent().context("the programs are in no target directory")?;
    let profile = match programs.file_name().and_then(|it| it.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // All of them, as `make build` does: another choice of packages would mean other features, and a build of everything.
    command.args(["build", "--quiet", "--bins", "--color", "never", "--profile", profile]).current_dir(root);
    command.arg("--target-dir").arg(target);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.context("start cargo")?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().filter(|it| !it.trim().is_empty()).take(MOST_LINES).collect();
    bail!("\n{}", lines.join("\n"))
}

/// What each program consists of, in short.
async fn contents(programs: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let programs = programs.to_owned();
    let read = tokio::task::spawn_blocking(move || {
        let of = |name: &str| {
            let path = programs.join(name);
            let bytes = fs::read(&path).ok()?;
            Some((path, digest(&bytes)))
        };
        PROGRAMS.into_iter().filter_map(of).collect()
    });
    read.await.unwrap_or_default()
}

fn digest(bytes: &[u8]) -> Vec<u8> {
    use md5::{Digest as _, Md5};
    Md5::digest(bytes).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sources_that_change_come_and_go_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("crates/x/src");
        fs::create_dir_all(&source).unwrap();
        fs::write(source.join("lib.rs"), "").unwrap();
        let first = look(dir.path()).await;
        assert_eq!(first, look(dir.path()).await);
        fs::write(source.join("notes.txt"), "").unwrap();
        assert_eq!(first, look(dir.path()).await, "no source");
        fs::write(source.join("more.rs"), "").unwrap();
        let second = look(dir.path()).await;
        assert_ne!(first, second);
        fs::remove_file(source.join("lib.rs")).unwrap();
        assert_ne!(second, look(dir.path()).await);
    }

    #[tokio::test]
    async fn a_build_that_fails_says_why() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("Cargo.toml"), "nonsense").unwrap();
        let programs = dir.path().join("target/debug");
        fs::create_dir_all(&programs).unwrap();
        let error = build(dir.path(), &programs).await.unwrap_err().to_string();
        assert!(error.contains("Cargo.toml"), "{error}");
    }
}
