//! Windows of tmux, for VMs whose agent a person can look at.
//!
//! Each VM has one window of its own name in one session. Sessions and windows are named by tmux's exact match (`=`), so
//! that no other is ever meant. The session comes with its first window and goes with its last one: nothing here makes
//! or removes a session by itself.
//!
//! A closed window takes its terminal away from the agent, and the kernel notes that in `/proc` at once (see
//! [`super::proc::Process::has_terminal`]). The agent gets SIGHUP, which it may ignore: then it is ended as what is left
//! of a dead VM.

use std::{
    ffi::{OsStr, OsString},
    io::{self, Read as _},
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{dir::Lock, proc::Process};

/// A tmux server that is asked for something answers within milliseconds, unless somebody stopped it.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(2);

/// How long a new pane may take until it has its terminal.
const TERMINAL: Duration = Duration::from_secs(2);

/// A session may come or go between two calls, each time by the act of another.
const TRIES: usize = 5;

/// What the tmux server may inherit if it is started by this call. It is the user's own from then on, so it gets what a
/// terminal has, and nothing of what only our server knows.
const INHERITED: [&str; 14] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "TERM",
    "XDG_CONFIG_HOME",
    "XDG_RUNTIME_DIR",
    "LD_LIBRARY_PATH",
];

/// Where a VM's window is: which tmux server, and which session of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TmuxSession {
    pub name: String,
    /// Below which the server's socket lies, as in `TMUX_TMPDIR`; unset means tmux's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tmpdir: Option<PathBuf>,
}

/// One window of a session of ours, by its oldest pane.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Window {
    /// As tmux calls it, `@3`.
    id: String,
    pid: u32,
    /// Its process has ended, and the user's settings keep the window.
    is_dead: bool,
}

/// What runs in a new window.
pub(super) struct Run<'a> {
    pub(super) window: &'a str,
    pub(super) program: &'a Path,
    pub(super) environment: &'a [(OsString, OsString)],
    pub(super) dir: &'a Path,
    pub(super) log: &'a Path,
}

enum Answer {
    Done(String),
    /// There is no such server, session or window.
    Missing,
    /// Somebody else made the session.
    Exists,
}

impl TmuxSession {
    /// On the server that the environment of this process names.
    pub fn from_env(name: impl Into<String>) -> Self {
        let tmpdir = std::env::var_os("TMUX_TMPDIR").filter(|it| !it.is_empty()).map(PathBuf::from);
        Self { name: name.into(), tmpdir }
    }

    fn target(&self) -> String {
        format!("={}:", self.name)
    }

    /// Opens a window and answers the process in it. The caller holds the VM's lock and knows that it has no window.
    /// The lock goes along with the call: even if this process dies meanwhile, nobody has the lock before the window is
    /// there or never will be.
    pub(super) fn open(&self, lock: &Lock, run: &Run<'_>) -> io::Result<Process> {
        let print = ["-d", "-P", "-F", "#{pane_pid}", "-n", run.window];
        for _ in 0..TRIES {
            let target = self.target();
            let beside = [&["new-window", "-t", &target][..], &print].concat();
            // Wide enough for a line of the agent's log where nobody looks.
            let first = [&["new-session", "-s", &self.name, "-x", "200", "-y", "50"][..], &print].concat();
            for begin in [beside, first] {
                match self.call(&self.command_line(&begin, run), Some(lock)) {
                    Ok(Answer::Done(pid)) => return Ok(settled(parse_pid(&pid)?)),
                    Ok(Answer::Missing | Answer::Exists) => {}
                    // The call may have been broken off after its window was made.
                    Err(error) => {
                        return match self.process_in(run.window) {
                            Ok(Some(process)) => Ok(process),
                            _ => Err(error),
                        };
                    }
                }
            }
        }
        Err(io::Error::other(format!("the tmux session {} comes and goes; leave it alone for a moment", self.name)))
    }

    /// The agent runs without a shell, in an environment that has nothing but `run.environment`.
    fn command_line(&self, begin: &[&str], run: &Run<'_>) -> Vec<OsString> {
        let mut line: Vec<OsString> = begin.iter().map(OsString::from).collect();
        line.extend(["-c".into(), doubled(run.dir.as_os_str(), b"#"), "/usr/bin/env".into(), "-i".into()]);
        for (name, value) in run.environment {
            let mut pair = name.clone();
            pair.push("=");
            pair.push(value);
            line.push(pair);
        }
        line.push(run.program.into());
        // At the end of a word it would end the command.
        for word in &mut line {
            if let Some(start) = word.as_bytes().strip_suffix(b";") {
                *word = OsString::from_vec([start, b"\\;"].concat());
            }
        }
        let mut copy = OsString::from("exec cat >> ");
        copy.push(doubled(&quoted(run.log.as_os_str()), b"#%"));
        line.extend([";".into(), "pipe-pane".into(), "-t".into()]);
        line.extend([format!("{}={}", self.target(), run.window).into(), copy]);
        line
    }

    fn find(&self, window: &str) -> io::Result<Option<Window>> {
        let format = "#{pane_id} #{window_id} #{pane_pid} #{pane_dead} #{window_name}";
        let line = ["list-panes", "-s", "-t", &self.target(), "-F", format].map(OsString::from);
        match self.call(&line, None)? {
            Answer::Done(panes) => Ok(parse_panes(&panes, window)),
            Answer::Missing | Answer::Exists => Ok(None),
        }
    }

    /// The process in the window of that name, unless that is known to have ended.
    pub(super) fn process_in(&self, window: &str) -> io::Result<Option<Process>> {
        Ok(self.find(window)?.filter(|it| !it.is_dead).map(|it| settled(it.pid)))
    }

    /// Closes the window of that name. Says whether there was one.
    pub(super) fn close(&self, window: &str) -> io::Result<bool> {
        let Some(found) = self.find(window)? else { return Ok(false) };
        let line = ["kill-window", "-t", &found.id].map(OsString::from);
        Ok(matches!(self.call(&line, None)?, Answer::Done(_)))
    }

    fn call(&self, line: &[OsString], lock: Option<&Lock>) -> io::Result<Answer> {
        let mut command = Command::new("tmux");
        let inherited = INHERITED.iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        // Without `TMUX`: the session is the one of this name, wherever we were started.
        command.env_clear().envs(inherited).args(line);
        if let Some(tmpdir) = &self.tmpdir {
            command.env("TMUX_TMPDIR", tmpdir);
        }
        command.stdin(lock.map_or_else(|| Ok(Stdio::null()), |lock| lock.share().map(Stdio::from))?);
        let Output { status, stdout, stderr } = output(command)?;
        // A window that was printed was made, whatever became of the commands after it.
        if status.success() || !stdout.is_empty() {
            return Ok(Answer::Done(String::from_utf8_lossy(&stdout).trim().to_owned()));
        }
        let text = String::from_utf8_lossy(&stderr).trim().to_owned();
        match refusal(&text) {
            Some(answer) => Ok(answer),
            None => Err(io::Error::other(format!("tmux: {status}: {text}"))),
        }
    }
}

/// What tmux says when it does not find something, or finds it against expectation.
fn refusal(text: &str) -> Option<Answer> {
    let missing = ["can't find session", "can't find window", "no server running", "server exited", "lost server"];
    if missing.iter().any(|it| text.contains(it)) {
        return Some(Answer::Missing);
    }
    if text.contains("error connecting") && text.contains("(No such file or directory)") {
        return Some(Answer::Missing);
    }
    text.contains("duplicate session").then_some(Answer::Exists)
}

/// Whether tmux can be started at all.
pub(super) fn check() -> io::Result<()> {
    let mut command = Command::new("tmux");
    command.arg("-V").stdin(Stdio::null());
    let Output { status, .. } = output(command)?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("tmux -V: {status}"))) }
}

/// Runs a command that says little, within [`PATIENCE`].
fn output(mut command: Command) -> io::Result<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(not_started)?;
    let mut left = PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if left.is_zero() {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("tmux gave no answer in {PATIENCE:?}")));
        }
        rest(LOOK);
        left = left.saturating_sub(LOOK);
    };
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    if let (Some(mut out), Some(mut err)) = (child.stdout.take(), child.stderr.take()) {
        out.read_to_end(&mut stdout)?;
        err.read_to_end(&mut stderr)?;
    }
    Ok(Output { status, stdout, stderr })
}

fn not_started(error: io::Error) -> io::Error {
    let text = match error.kind() {
        io::ErrorKind::NotFound => "there is no program tmux; install it, or use the provider process".to_owned(),
        _ => format!("start tmux: {error}"),
    };
    io::Error::new(error.kind(), text)
}

/// The process of a new pane, once it has its terminal: before that it would look like one whose window was closed. One
/// that has ended already is a VM that died young, and gets a start time that no process has.
fn settled(pid: u32) -> Process {
    let mut left = TERMINAL;
    loop {
        let Ok(Some(process)) = Process::of_pid(pid) else { return Process { pid, start_time: 0 } };
        if left.is_zero() || process.has_terminal().unwrap_or(false) || !process.is_alive().unwrap_or(false) {
            return process;
        }
        rest(LOOK);
        left = left.saturating_sub(LOOK);
    }
}

#[expect(clippy::disallowed_methods, reason = "on a thread for blocking calls, for what gives no notice")]
fn rest(wait: Duration) {
    thread::sleep(wait);
}

fn parse_pid(text: &str) -> io::Result<u32> {
    text.parse().map_err(|_| io::Error::other(format!("tmux named no process but {text:?}")))
}

/// The oldest pane of a window: the person who looks may have split it.
fn parse_panes(panes: &str, window: &str) -> Option<Window> {
    let pane = |line: &str| {
        let mut words = line.splitn(5, ' ');
        let number: u64 = words.next()?.strip_prefix('%')?.parse().ok()?;
        let (id, pid, dead, name) = (words.next()?, words.next()?, words.next()?, words.next()?);
        let found = Window { id: id.to_owned(), pid: pid.parse().ok()?, is_dead: dead == "1" };
        (name == window).then_some((number, found))
    };
    panes.lines().filter_map(pane).min_by_key(|(number, _)| *number).map(|(_, window)| window)
}

/// Text in which tmux replaces what follows one of `marks`, and takes a doubled mark for itself.
fn doubled(text: &OsStr, marks: &[u8]) -> OsString {
    let mut escaped = Vec::with_capacity(text.len());
    for byte in text.as_bytes() {
        if marks.contains(byte) {
            escaped.push(*byte);
        }
        escaped.push(*byte);
    }
    OsString::from_vec(escaped)
}

/// One word for a shell.
fn quoted(text: &OsStr) -> OsString {
    let inner = text.as_bytes().split(|byte| *byte == b'\'').collect::<Vec<_>>().join(&b"'\\''"[..]);
    OsString::from_vec([b"'", &inner[..], b"'"].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_its_oldest_pane_and_only_the_exact_name_counts() {
        let panes =
            "%7 @2 70 0 nstance-agent-a\n%3 @2 30 1 nstance-agent-a\n%1 @1 10 0 nstance-agent-ab\n%2 @4 20 0 a b";
        assert_eq!(parse_panes(panes, "nstance-agent-a"), Some(Window { id: "@2".to_owned(), pid: 30, is_dead: true }));
        assert_eq!(parse_panes(panes, "a b").unwrap().pid, 20);
        assert_eq!(parse_panes(panes, "nstance-agent-"), None);
        assert_eq!(parse_panes("", "nstance-agent-a"), None);
    }

    #[test]
    fn what_is_not_there_is_told_from_what_went_wrong() {
        let missing = |text| matches!(refusal(text), Some(Answer::Missing));
        assert!(missing("no server running on /tmp/tmux-0/default"));
        assert!(missing("error connecting to /tmp/tmux-0/default (No such file or directory)"));
        assert!(missing("can't find session: s"));
        assert!(matches!(refusal("duplicate session: s"), Some(Answer::Exists)));
        assert!(refusal("error connecting to /tmp/tmux-0/default (Permission denied)").is_none());
        assert!(refusal("").is_none());
    }

    #[test]
    fn no_path_and_no_value_can_become_a_command() {
        let session = TmuxSession { name: "s".to_owned(), tmpdir: None };
        let environment = [("PATH".into(), "/a;".into()), ("B".into(), "x;y".into())];
        let run = Run {
            window: "w",
            program: Path::new("/bin/agent"),
            environment: &environment,
            dir: Path::new("/100%/it's #1"),
            log: Path::new("/100%/it's #1/log"),
        };
        let line = session.command_line(&["new-window"], &run);
        let line: Vec<&str> = line.iter().map(|it| it.to_str().unwrap()).collect();
        assert_eq!(
            line,
            [
                "new-window",
                "-c",
                "/100%/it's ##1",
                "/usr/bin/env",
                "-i",
                "PATH=/a\\;",
                "B=x;y",
                "/bin/agent",
                ";",
                "pipe-pane",
                "-t",
                "=s:=w",
                "exec cat >> '/100%%/it'\\''s ##1/log'",
            ]
        );
    }
}
