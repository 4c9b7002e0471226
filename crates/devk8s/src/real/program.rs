//! Programs that end with the process that started them.
//!
//! One shell, the watchdog, reads a pipe whose other end this process holds. Each program is started by a second shell,
//! which writes its pid and start time into the pipe and then becomes the program. When the pipe closes, because its
//! owner was dropped or this process died in whatever way, the watchdog kills the programs that are still alive. A pid
//! with another start time is a stranger and is left alone.
//!
//! Refused: `PR_SET_PDEATHSIG`, which fires when the starting *thread* ends, and each test has a thread of its own.

use std::{
    ffi::OsStr,
    fs, io,
    io::PipeWriter,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;
use rustix::process::{Pid, Signal};

use super::{POLL_INTERVAL, Program};

/// How long a program has to end in order before it is killed.
const STOP_DEADLINE: Duration = Duration::from_secs(10);

/// How much of a log an error shows.
const TAIL_LINES: usize = 15;

/// `stat PID` sets `state` and `born`, the start time in clock ticks after boot. The name in field 2 may hold blanks
/// and brackets, so fields are counted after the last bracket.
const STAT: &str = r#"
stat() {
  state= born=
  { IFS= read -r line <"/proc/$1/stat"; } 2>/dev/null || return 1
  set -- ${line##*) }
  state=$1 born=${20}
}
"#;

/// Standard input is the pipe's writing end.
const LAUNCH: &str = r#"
stat $$ && echo "$$ $born" >&0 && exec "$@" </dev/null
"#;

/// `$1` is a directory to remove, or empty.
const WATCH: &str = r#"
trap '' HUP INT TERM
ours() { stat "${1%:*}" && [ "$state" != Z ] && [ "$born" = "${1#*:}" ]; }
all=
while read -r pid born; do all="$all $pid:$born"; done
for it in $all; do
  if ours "$it"; then kill -KILL "${it%:*}"; fi
done
n=0
for it in $all; do
  while ours "$it" && [ $n -lt 250 ]; do
    sleep 0.02
    n=$((n + 1))
  done
done
[ -z "$1" ] || rm -rf -- "$1"
"#;

/// The shell that kills what is left, and our end of its pipe.
#[derive(Debug)]
pub(super) struct Watchdog {
    child: Child,
    pipe: Option<PipeWriter>,
}

impl Watchdog {
    /// `remove` is a directory that goes when the programs have ended.
    pub(super) fn start(remove: Option<&Path>) -> io::Result<Self> {
        let (reader, pipe) = io::pipe()?;
        let child = Command::new("/bin/sh")
            .arg("-c")
            .arg(format!("{STAT}{WATCH}"))
            .arg("watchdog")
            .arg(remove.map_or(OsStr::new(""), Path::as_os_str))
            .stdin(reader)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in the terminal is for the tests; the watchdog acts once they are gone.
            .process_group(0)
            .spawn()?;
        Ok(Self { child, pipe: Some(pipe) })
    }

    /// Starts a program whose output goes to a log below `dir`.
    pub(super) fn spawn(&self, program: Program, path: &Path, args: &[String], dir: &Path) -> io::Result<Running> {
        let pipe = self.pipe.as_ref().expect("only dropping takes the pipe");
        let log = dir.join("log").join(format!("{program}.log"));
        let file = fs::File::create(&log)?;
        let child = Command::new("/bin/sh")
            .arg("-c")
            .arg(format!("{STAT}{LAUNCH}"))
            .arg(program.file_name())
            .arg(path)
            .args(args)
            // etcd takes settings from its environment, and none of them is meant for it here.
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", dir)
            .stdin(pipe.try_clone()?)
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()?;
        Ok(Running { program, child, log })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.pipe = None;
        // It ends at once: its programs were killed before it, or it kills them now.
        let _ = self.child.wait();
    }
}

/// A started program; killed when dropped.
#[derive(Debug)]
pub(super) struct Running {
    program: Program,
    child: Child,
    log: PathBuf,
}

impl Running {
    pub(super) fn program(&self) -> Program {
        self.program
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How the program ended, if it has.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("wait for {}", self.program))
    }

    /// The log's name and last lines.
    pub(super) fn log_tail(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        format!("{}:\n{}", self.log.display(), tail.join("\n"))
    }

    /// Asks the program to end, waits, and kills it if it does not.
    pub(super) async fn stop(&mut self) -> anyhow::Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        // Until it is waited for, the pid is this child's, dead or alive.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            rustix::process::kill_process(pid, Signal::TERM).with_context(|| format!("stop {}", self.program))?;
        }
        let asked = SystemClock.monotonic();
        while self.ended()?.is_none() {
            if STOP_DEADLINE <= SystemClock.monotonic().since(asked) {
                self.child.kill().with_context(|| format!("kill {}", self.program))?;
                self.child.wait().with_context(|| format!("wait for {}", self.program))?;
                break;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Does nothing to a program that was waited for. Errors have no one to go to; the watchdog is still there.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::process::ExitStatusExt as _};

    use super::*;

    fn dir() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("log")).unwrap();
        dir
    }

    /// Any program that runs until it is ended.
    fn sleeper(watchdog: &Watchdog, dir: &Path) -> Running {
        watchdog.spawn(Program::Etcd, Path::new("/bin/sleep"), &["1000".to_owned()], dir).unwrap()
    }

    async fn end_of(program: &mut Running) -> ExitStatus {
        tokio::time::timeout(Duration::from_secs(20), async {
            loop {
                if let Some(status) = program.ended().unwrap() {
                    return status;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .expect("the program ends")
    }

    #[tokio::test]
    async fn closed_pipe_ends_programs_and_removes_the_directory() {
        let dir = dir();
        let mut watchdog = Watchdog::start(Some(dir.path())).unwrap();
        let mut programs = [sleeper(&watchdog, dir.path()), sleeper(&watchdog, dir.path())];
        watchdog.pipe = None; // as the kernel does when this process dies
        for program in &mut programs {
            assert_eq!(end_of(program).await.signal(), Some(9));
        }
        assert!(watchdog.child.wait().unwrap().success());
        assert!(!dir.path().exists());
    }

    #[tokio::test]
    async fn directory_stays_unless_its_removal_was_asked_for() {
        let dir = dir();
        let watchdog = Watchdog::start(None).unwrap();
        drop(sleeper(&watchdog, dir.path()));
        drop(watchdog);
        assert!(dir.path().exists());
    }

    #[tokio::test]
    async fn pid_with_another_start_time_is_left_alone() {
        let dir = dir();
        let watchdog = Watchdog::start(None).unwrap();
        let mut stranger = sleeper(&watchdog, dir.path());
        let other = Watchdog::start(None).unwrap();
        writeln!(other.pipe.as_ref().unwrap(), "{} 1", stranger.pid()).unwrap();
        drop(other); // returns when that watchdog has ended
        assert!(stranger.ended().unwrap().is_none());
    }

    #[tokio::test]
    async fn stopped_program_ends_by_the_polite_signal_and_its_log_is_shown() {
        let dir = dir();
        let watchdog = Watchdog::start(None).unwrap();
        let args =
            ["-c", "trap 'echo asked; exit 3' TERM; echo started; while :; do sleep 0.01; done"].map(str::to_owned);
        let mut program = watchdog.spawn(Program::Etcd, Path::new("/bin/sh"), &args, dir.path()).unwrap();
        let started = async {
            while !program.log_tail().contains("started") {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), started).await.expect("the program starts");
        program.stop().await.unwrap();
        assert_eq!(program.ended().unwrap().unwrap().code(), Some(3));
        assert!(program.log_tail().ends_with("etcd.log:\nstarted\nasked"), "{}", program.log_tail());
    }

    /// Runs the test above this one in a process of its own, which is killed in its middle.
    #[tokio::test]
    async fn programs_die_with_a_process_that_is_killed() {
        const PID_FILE: &str = "NSTANCE_TEST_PID_FILE";
        let this = "real::program::tests::programs_die_with_a_process_that_is_killed";
        if let Some(pid_file) = std::env::var_os(PID_FILE) {
            let dir = dir();
            let watchdog = Watchdog::start(Some(dir.path())).unwrap();
            let mut program = sleeper(&watchdog, dir.path());
            let finished = format!("{} {}\n", program.pid(), dir.path().display());
            fs::write(pid_file, finished).unwrap();
            end_of(&mut program).await;
            panic!("this process is killed first");
        }
        let dir = dir();
        let pid_file = dir.path().join("pid");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this])
            .env(PID_FILE, &pid_file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (pid, theirs) = tokio::time::timeout(Duration::from_secs(20), async {
            loop {
                let text = fs::read_to_string(&pid_file).unwrap_or_default();
                if let Some((pid, theirs)) = text.strip_suffix('\n').and_then(|text| text.split_once(' ')) {
                    return (pid.to_owned(), PathBuf::from(theirs));
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .expect("the process starts its program");
        child.kill().unwrap();
        child.wait().unwrap();
        let gone = async {
            // A zombie has ended; this container's first process may be slow to collect it.
            while theirs.exists() || fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|it| !it.is_empty()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), gone).await.expect("the program dies and its directory goes");
    }
}
