//! The program that is told which files changed: one run at a time, and what changes meanwhile goes into the next.
//!
//! Names are written down before the first file of a batch is put into its place, and crossed out once a run has had
//! them. So a crash in between costs a run too many, never one too few: the batch that comes again after it finds its
//! files in place and changes nothing. A run that was cut off is repeated once and no more, for it may be what takes the
//! agent down.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    io::{self, Read as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_rt::chain::Chain;
use rustix::{
    fs::{OFlags, fcntl_setfl},
    process::{Pid, Signal, kill_process_group},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep},
};

use crate::{
    context::Context,
    disk::{Access, open_regular},
    files::{
        errors,
        names::{FileName, shown},
    },
};

/// The name of its error entry.
const ENTRY: &str = "on-change";

/// Names that no run has had to its end yet. Those of a run that has begun are followed by how many had, with this one.
const WRITTEN: &str = ".on-change";

/// A name whose runs were cut off this many times gets no other before it changes again.
const MAX_CUT_OFF: u8 = 2;

const LIMIT: Duration = Duration::from_secs(30);

/// A program that ends at once is noticed at once, and a slow one costs little.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(50);

/// How much of what the program said last is kept.
const KEPT: usize = 1024;

#[derive(Default)]
pub(crate) struct Hook {
    names: Mutex<Names>,
    due: Notify,
}

#[derive(Default)]
struct Names {
    waiting: Begun,
    running: Begun,
}

/// Names, with how many runs of each have begun since it changed.
type Begun = BTreeMap<String, u8>;

impl Hook {
    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down that these are about to change.
    pub(crate) fn announce(&self, ctx: &Context, changing: BTreeSet<String>) {
        if ctx.settings.on_change.is_some() && !changing.is_empty() {
            let names = self.names();
            let mut all = names.running.clone();
            all.extend(names.waiting.clone());
            drop(names);
            all.extend(changing.into_iter().map(|name| (name, 0)));
            note(ctx, &all);
        }
    }

    /// These have changed: a run is due.
    pub(crate) fn changed(&self, ctx: &Context, changed: BTreeSet<String>) {
        if ctx.settings.on_change.is_some() && !changed.is_empty() {
            self.resume(changed.into_iter().map(|name| (name, 0)).collect());
        }
    }

    fn resume(&self, names: Begun) {
        self.names().waiting.extend(names);
        self.due.notify_one();
    }

    fn begin(&self, ctx: &Context) -> BTreeSet<String> {
        let mut names = self.names();
        names.running = std::mem::take(&mut names.waiting);
        for n_begun in names.running.values_mut() {
            *n_begun += 1;
        }
        let running = names.running.clone();
        drop(names);
        if !running.is_empty() {
            note(ctx, &running);
        }
        running.into_keys().collect()
    }

    fn end(&self, ctx: &Context) {
        let mut names = self.names();
        names.running.clear();
        let waiting = names.waiting.clone();
        drop(names);
        note(ctx, &waiting);
    }
}

fn note(ctx: &Context, names: &Begun) {
    let path = ctx.settings.recv.path.join(WRITTEN);
    let done = if names.is_empty() {
        ctx.parts.disk.remove(&path)
    } else {
        let line = |(name, n_begun): (&String, &u8)| match n_begun {
            0 => format!("{name}\n"),
            n_begun => format!("{name} {n_begun}\n"),
        };
        let text: String = names.iter().map(line).collect();
        ctx.parts.disk.write(&path, text.as_bytes(), Access::mode(0o600))
    };
    if let Err(error) = done {
        tracing::warn!(error = %Chain(&error), "changed names not written down; a crash now would lose a run");
    }
}

fn noted(ctx: &Context) -> Begun {
    let mut text = String::new();
    // More than all names that can wait.
    let read = open_regular(&ctx.settings.recv.path.join(WRITTEN))
        .and_then(|file| file.take(1024 * 1024).read_to_string(&mut text));
    if read.is_err() {
        return Begun::new();
    }
    let name = |line: &str| {
        let (name, n_begun) = line.split_once(' ').unwrap_or((line, "0"));
        FileName::parse(name).ok().zip(n_begun.parse().ok()).map(|(_, n_begun)| (name.to_owned(), n_begun))
    };
    text.lines().filter_map(name).collect()
}

/// Runs the program whenever files have changed, for as long as the agent lives.
pub(crate) async fn watch(ctx: &Context) -> Infallible {
    let hook = &ctx.files.hook;
    let Some(program) = &ctx.settings.on_change else { return std::future::pending().await };
    let (again, given_up): (Begun, Begun) = noted(ctx).into_iter().partition(|(_, n_begun)| *n_begun < MAX_CUT_OFF);
    if !given_up.is_empty() {
        let names: Vec<_> = given_up.into_keys().collect();
        let (program, names) = (program.display(), names.join(", "));
        let why = "was cut off by the agent's end, and so it was when it ran again; it is not told again of";
        errors::tell(ctx, ENTRY, format_args!("{program} {why} {names}"));
        ctx.board.changed();
        note(ctx, &again);
    }
    hook.resume(again);
    loop {
        hook.due.notified().await;
        let names = hook.begin(ctx);
        if names.is_empty() {
            continue;
        }
        match run(program, &ctx.settings.recv.path, &names, LIMIT).await {
            Ok(()) => {
                tracing::info!(n_changed = names.len(), "told of changed files");
                if errors::clear(ctx, ENTRY) {
                    ctx.board.changed();
                }
            }
            Err(error) => {
                errors::tell(ctx, ENTRY, Chain(&error));
                ctx.board.changed();
            }
        }
        hook.end(ctx);
    }
}

#[derive(Debug, thiserror::Error)]
enum HookError {
    #[error("start {}", program.display())]
    Start { program: PathBuf, source: io::Error },
    #[error("wait for {}", program.display())]
    Wait { program: PathBuf, source: io::Error },
    #[error("{} did not end within {limit:?} and was killed; it said: {said}", program.display())]
    Late { program: PathBuf, limit: Duration, said: String },
    #[error("{} failed with {status}; it said: {said}", program.display())]
    Failed { program: PathBuf, status: ExitStatus, said: String },
}

/// One run. If it is dropped because the agent stops, the program goes on to its end: half a reload is worse than one
/// that nobody waits for.
async fn run(program: &Path, recv: &Path, names: &BTreeSet<String>, limit: Duration) -> Result<(), HookError> {
    let path = || program.to_owned();
    let mut child = Command::new(program)
        .args(names)
        .env("NSTANCE_RECV_DIR", recv)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // Its own group: what it starts dies with it when its time is over.
        .process_group(0)
        .spawn()
        .map_err(|source| HookError::Start { program: path(), source })?;
    let mut words = Words::of(&mut child);
    let began = Instant::now();
    let mut look = FIRST_LOOK;
    let mut late = false;
    // Looked at rather than waited for: runs are rare, and machinery for children would serve nothing else.
    let status = loop {
        words.listen();
        if let Some(status) = child.try_wait().map_err(|source| HookError::Wait { program: path(), source })? {
            break status;
        }
        if limit <= began.elapsed() && !late {
            late = true;
            kill(&mut child);
        }
        sleep(look).await;
        look = (look * 2).min(LAST_LOOK);
    };
    words.listen();
    let said = words.last_line();
    match (late, status.success()) {
        (true, _) => Err(HookError::Late { program: path(), limit, said }),
        (false, true) => Ok(()),
        (false, false) => Err(HookError::Failed { program: path(), status, said }),
    }
}

fn kill(child: &mut Child) {
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if group.is_none_or(|group| kill_process_group(group, Signal::KILL).is_err()) {
        // It may have left its group; it has ended by itself if this fails too.
        let _ = child.kill();
    }
}

/// The end of what a program says on standard error. It is always read on, so that no program hangs on a full pipe.
struct Words {
    pipe: Option<std::process::ChildStderr>,
    kept: Vec<u8>,
}

impl Words {
    fn of(child: &mut Child) -> Self {
        // A pipe that could make us wait is rather not read at all.
        let pipe = child.stderr.take().filter(|pipe| fcntl_setfl(pipe, OFlags::NONBLOCK).is_ok());
        Self { pipe, kept: Vec::new() }
    }

    fn listen(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut buffer = [0; 4096];
        // Bounded: a program that talks faster than we read must not keep us from everything else.
        for _ in 0..64 {
            let Ok(n_read @ 1..) = pipe.read(&mut buffer) else { return };
            self.kept.extend_from_slice(&buffer[..n_read]);
            let n_old = self.kept.len().saturating_sub(KEPT);
            self.kept.drain(..n_old);
        }
    }

    fn last_line(&self) -> String {
        let text = String::from_utf8_lossy(&self.kept);
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map_or_else(|| "nothing".to_owned(), shown)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, Permissions},
        os::unix::fs::PermissionsExt as _,
    };

    use super::*;

    /// A program in a directory of its own, and where it can write.
    fn program(outer: &Path, body: &str) -> PathBuf {
        let path = outer.join("hook");
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        path
    }

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    async fn failure(body: &str, limit: Duration) -> String {
        let outer = tempfile::tempdir().unwrap();
        let path = program(outer.path(), body);
        run(&path, outer.path(), &names(&["a"]), limit).await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn program_gets_the_names_as_they_are_and_the_directory() {
        let outer = tempfile::tempdir().unwrap();
        let path = program(outer.path(), r#"printf '%s|' "$@" "$NSTANCE_RECV_DIR" > "$NSTANCE_RECV_DIR/seen""#);
        run(&path, outer.path(), &names(&["b.crt", "a", "-rf"]), LIMIT).await.unwrap();
        let seen = fs::read_to_string(outer.path().join("seen")).unwrap();
        assert_eq!(seen, format!("-rf|a|b.crt|{}|", outer.path().display()));
    }

    #[tokio::test]
    async fn failure_tells_status_and_last_words() {
        let why = failure("echo first >&2; echo 'no such unit' >&2; exit 3", LIMIT).await;
        assert!(why.contains("exit status: 3") && why.ends_with("no such unit"), "{why}");
        let silent = failure("exit 1", LIMIT).await;
        assert!(silent.ends_with("it said: nothing"), "{silent}");
        let error = run(Path::new("/nowhere/hook"), Path::new("/"), &names(&["a"]), LIMIT).await.unwrap_err();
        assert!(matches!(error, HookError::Start { .. }));
    }

    #[tokio::test]
    async fn talkative_program_does_not_hang_on_its_pipe() {
        let why = failure("head -c 1000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo end >&2; exit 1", LIMIT).await;
        assert!(why.ends_with("end"), "{why}");
    }

    #[tokio::test]
    async fn program_that_does_not_end_is_killed_with_what_it_started() {
        let why = failure("sleep 1000 & echo $! >&2; wait", Duration::from_secs(2)).await;
        let pid: u32 = why.rsplit(' ').next().unwrap().parse().expect("the number of what it started");
        assert!(why.contains("killed"), "{why}");
        // It is gone, or dead and not yet taken note of by whoever has inherited it.
        let lives = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
        };
        tokio::time::timeout(Duration::from_secs(30), async {
            while lives() {
                sleep(FIRST_LOOK).await;
            }
        })
        .await
        .expect("what it started is killed with it");
    }

    #[tokio::test]
    async fn what_changes_during_a_run_goes_into_one_next_run() {
        let outer = tempfile::tempdir().unwrap();
        // A run ends when its file appears, so that the test decides what happens during it.
        let body = r#"echo "$@" >> "$NSTANCE_RECV_DIR/../seen"; while ! [ -e "$NSTANCE_RECV_DIR/../go" ]; do sleep 0.01; done"#;
        let path = program(outer.path(), body);
        let (inner, ctx) = Context::for_tests(&[("ON_CHANGE", path.to_str().unwrap())]);
        let seen = || fs::read_to_string(inner.path().join("seen")).unwrap_or_default();
        let hook = &ctx.files.hook;
        let test = async {
            let until = async |n_lines: usize| {
                while seen().lines().count() < n_lines {
                    sleep(FIRST_LOOK).await;
                }
            };
            hook.announce(&ctx, names(&["a"]));
            hook.changed(&ctx, names(&["a"]));
            until(1).await;
            hook.announce(&ctx, names(&["b"]));
            let both = [("a".to_owned(), 1), ("b".to_owned(), 0)];
            assert_eq!(noted(&ctx), both.into(), "a run that is not over may have to be repeated");
            hook.changed(&ctx, names(&["b"]));
            hook.changed(&ctx, names(&["c", "b"]));
            fs::write(inner.path().join("go"), "").unwrap();
            until(2).await;
            while !noted(&ctx).is_empty() {
                sleep(FIRST_LOOK).await;
            }
        };
        tokio::select! {
            never = watch(&ctx) => match never {},
            () = test => {}
        }
        assert_eq!(seen(), "a\nb c\n");
    }

    #[tokio::test]
    async fn names_that_no_run_had_before_a_crash_get_one() {
        let outer = tempfile::tempdir().unwrap();
        let path = program(outer.path(), r#"echo "$@" > "$NSTANCE_RECV_DIR/../seen"; exit 1"#);
        let (inner, ctx) = Context::for_tests(&[("ON_CHANGE", path.to_str().unwrap())]);
        ctx.files.hook.announce(&ctx, names(&["a", "b"]));
        let again = Context::new(ctx.settings.clone(), ctx.parts.clone(), crate::Control::new());
        tokio::select! {
            never = watch(&again) => match never {},
            kind = again.board.due() => assert_eq!(kind, nstance_proto::v1::ReportKind::Change),
        }
        assert_eq!(fs::read_to_string(inner.path().join("seen")).unwrap(), "a b\n");
        assert!(errors::all(&again)[ENTRY].contains("exit status: 1"));
        assert!(noted(&again).is_empty(), "it had its run, good or bad");
    }

    #[tokio::test]
    async fn names_whose_run_was_cut_off_are_run_once_more_and_told_then() {
        let outer = tempfile::tempdir().unwrap();
        // A run lasts until the test lets it end, or is over.
        let body =
            r#"cd "$NSTANCE_RECV_DIR/.."; echo "$@" >> seen; while [ -e seen ] && ! [ -e go ]; do sleep 0.01; done"#;
        let path = program(outer.path(), body);
        let (inner, ctx) = Context::for_tests(&[("ON_CHANGE", path.to_str().unwrap())]);
        let seen = || fs::read_to_string(inner.path().join("seen")).unwrap_or_default();
        let until = async |expected: &str| {
            while seen() != expected {
                sleep(FIRST_LOOK).await;
            }
        };
        let restart = || Context::new(ctx.settings.clone(), ctx.parts.clone(), crate::Control::new());
        ctx.files.hook.announce(&ctx, names(&["a"]));
        for expected in ["a\n", "a\na\n"] {
            let ctx = restart();
            tokio::select! {
                never = watch(&ctx) => match never {},
                () = until(expected) => {}
            }
        }
        fs::write(inner.path().join("go"), "").unwrap();
        let ctx = restart();
        let test = async {
            while !errors::all(&ctx).contains_key(ENTRY) {
                assert_eq!(seen(), "a\na\n");
                sleep(FIRST_LOOK).await;
            }
            assert!(errors::all(&ctx)[ENTRY].contains("not told again of a"), "{:?}", errors::all(&ctx));
            assert_eq!((ctx.board.due().await, noted(&ctx)), (nstance_proto::v1::ReportKind::Change, Begun::new()));
            // What changes again is told again.
            ctx.files.hook.announce(&ctx, names(&["a", "b"]));
            ctx.files.hook.changed(&ctx, names(&["a", "b"]));
            until("a\na\na b\n").await;
            while errors::all(&ctx).contains_key(ENTRY) {
                sleep(FIRST_LOOK).await;
            }
        };
        tokio::select! {
            never = watch(&ctx) => match never {},
            () = test => {}
        }
    }
}
