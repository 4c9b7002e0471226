//! What the kernel tells of processes, and how one of ours is signalled without ever hitting a stranger.
//!
//! A process is named by its pid *and* its start time: pids are used again, the pair is not. Signals go through a pidfd
//! that was opened before the start time was compared, so the process we looked at is the process we signal.

use std::{
    fs,
    io::{self, Read as _},
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};
use tokio::io::{Interest, unix::AsyncFd};

/// The kernel's mark on a task that has begun to exit. It is set before the task's sockets are closed, while the state
/// still reads "running": whoever asks because a socket ended must not be told that its process lives.
const PF_EXITING: u64 = 0x4;

/// The kernel's mark on its own threads, which never have an environment.
const PF_KTHREAD: u64 = 0x20_0000;

/// One process, for ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Process {
    pub pid: u32,
    /// Field 22 of `/proc/{pid}/stat`: clock ticks after boot.
    pub start_time: u64,
}

/// The fields of `/proc/{pid}/stat` that matter here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    state: u8,
    pub(super) group: u32,
    /// The number of its controlling terminal; 0 is none.
    terminal: i64,
    flags: u64,
    pub(super) start_time: u64,
}

impl Stat {
    /// Neither dead, nor a zombie, nor on its way there.
    pub(super) fn is_alive(self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x') && self.flags & PF_EXITING == 0
    }
}

/// `None`: there is no such process.
pub(super) fn stat(pid: u32) -> io::Result<Option<Stat>> {
    // One read: this stands in every describe, and a line has some 350 bytes.
    let mut line = [0; 1024];
    match fs::File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut line)) {
        Ok(n) => parse_stat(&line[..n]).map(Some).ok_or_else(|| io::Error::other("the kernel's stat line is odd")),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// A process that ends between open and read answers ESRCH instead of ENOENT.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

fn parse_stat(line: &[u8]) -> Option<Stat> {
    // The name in field 2 may hold anything, blanks and brackets included; only its last bracket is sure.
    let after = line.iter().rposition(|byte| *byte == b')')? + 2;
    let rest = std::str::from_utf8(line.get(after..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().take(20).collect();
    Some(Stat {
        state: *fields.first()?.as_bytes().first()?,
        group: fields.get(2)?.parse().unwrap_or(0),
        terminal: fields.get(4)?.parse().unwrap_or(0),
        flags: fields.get(6)?.parse().ok()?,
        start_time: fields.get(19)?.parse().ok()?,
    })
}

impl Process {
    /// The process that has this pid now, alive or not yet reaped.
    pub(super) fn of_pid(pid: u32) -> io::Result<Option<Self>> {
        Ok(stat(pid)?.map(|stat| Self { pid, start_time: stat.start_time }))
    }

    pub(super) fn is_alive(self) -> io::Result<bool> {
        Ok(stat(self.pid)?.is_some_and(|stat| stat.start_time == self.start_time && stat.is_alive()))
    }

    /// Whether it lives and has a terminal. The kernel takes the terminal from all its processes when its other end is
    /// closed, whatever they do about the signal that comes with it.
    pub(super) fn has_terminal(self) -> io::Result<bool> {
        let is_at_terminal = |stat: Stat| stat.start_time == self.start_time && stat.is_alive() && stat.terminal != 0;
        Ok(stat(self.pid)?.is_some_and(is_at_terminal))
    }

    /// A hold on the process by which it can be signalled and waited for; `None` if it has ended.
    pub(super) fn hold(self) -> io::Result<Option<Held>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let fd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => fd,
            Err(rustix::io::Errno::SRCH) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // After the open: had the pid been another's at the open, its start time could not be ours now.
        Ok(self.is_alive()?.then_some(Held { process: self, pid, fd }))
    }
}

/// A process of ours that was alive when we took hold of it.
#[derive(Debug)]
pub(super) struct Held {
    process: Process,
    pid: Pid,
    fd: OwnedFd,
}

impl Held {
    pub(super) fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    /// Kills the process, and its whole group if it leads one. Before an agent has made its own session it is still
    /// in its server's group, which must not be touched.
    pub(super) fn kill(&self) -> io::Result<()> {
        let leads = stat(self.process.pid)?
            .is_some_and(|stat| stat.start_time == self.process.start_time && stat.group == self.process.pid);
        if leads {
            match rustix::process::kill_process_group(self.pid, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.signal(Signal::KILL)
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(self.fd.as_fd(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Resolves when the process has ended, whoever its parent is.
    #[expect(deprecated, reason = "its successor is unsafe; a borrowed descriptor that stays open is what it asks for")]
    pub(super) async fn ended(&self) -> io::Result<()> {
        // A pidfd turns readable at the process's end and stays so.
        AsyncFd::with_interest(self.fd.as_fd(), Interest::READABLE)?.readable().await.map(|_| ())
    }
}

/// A living process that says in its environment which instance it is the agent of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) process: Process,
    pub(super) instance: String,
    pub(super) owner: String,
}

/// What a look through all processes told.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Oldest first.
    pub(super) found: Vec<Found>,
    /// Whether some process shows no environment at all: it may be about to become an agent. An exec drops the old
    /// environment and closes descriptors some time before it shows the new one, and can be preempted in between.
    pub(super) unsettled: bool,
}

/// The variable by which an agent is found again, whatever happened to its directory.
pub(super) const IDENTITY_DIR: &str = "NSTANCE_IDENTITY_DIR";
/// Ours and not the agent's, hence not one of its settings.
pub(super) const OWNER: &str = "PROCESS_VM_OWNER";

/// Every living process started for an instance below `work_dir`. Helpers an agent started count too: they bear its
/// environment. Processes of other users cannot be read and are not ours.
pub(super) fn scan(work_dir: &Path) -> io::Result<Scan> {
    let prefix = [IDENTITY_DIR.as_bytes(), b"=", work_dir.as_os_str().as_bytes(), b"/"].concat();
    let mut scan = Scan::default();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse::<u32>().ok()) else { continue };
        let Ok(environ) = fs::read(format!("/proc/{pid}/environ")) else { continue };
        let named = parse_environ(&environ, &prefix);
        if named.is_none() && !environ.is_empty() {
            continue;
        }
        let Ok(Some(stat)) = stat(pid) else { continue };
        match named {
            _ if !stat.is_alive() => {}
            Some((instance, owner)) => {
                let process = Process { pid, start_time: stat.start_time };
                scan.found.push(Found { process, instance, owner });
            }
            None => scan.unsettled |= stat.flags & PF_KTHREAD == 0,
        }
    }
    scan.found.sort_by_key(|it| (it.process.start_time, it.process.pid));
    Ok(scan)
}

fn parse_environ(environ: &[u8], prefix: &[u8]) -> Option<(String, String)> {
    let mut variables = environ.split(|byte| *byte == 0);
    let path = variables.clone().find_map(|variable| variable.strip_prefix(prefix))?;
    let instance = path.split(|byte| *byte == b'/').next()?;
    let owner = variables.find_map(|variable| variable.strip_prefix(OWNER.as_bytes())?.strip_prefix(b"="));
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    Some((text(instance)?, text(owner.unwrap_or_default())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_are_read_past_hostile_names() {
        let line = b"77 (a) Z 1 (b) S 1 77 77 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0 0";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.group, stat.terminal, stat.start_time), (b'S', 77, 0, 123_456));
        assert!(stat.is_alive());
        assert!(parse_stat(b"77 (x").is_none());
        assert!(parse_stat(b"77 (x) S 1 2").is_none());
    }

    #[test]
    fn a_process_that_has_begun_to_exit_is_dead() {
        let of = |state: u8, flags: u64| Stat { state, group: 1, terminal: 0, flags, start_time: 1 };
        assert!(of(b'R', 0x40_0100).is_alive());
        assert!(!of(b'R', 0x40_0104).is_alive(), "its sockets may be closed already");
        for state in *b"ZXx" {
            assert!(!of(state, 0).is_alive());
        }
    }

    #[test]
    fn our_own_process_is_found_and_another_start_time_is_not_it() {
        let me = Process::of_pid(std::process::id()).unwrap().unwrap();
        assert!(me.is_alive().unwrap());
        let other = Process { start_time: me.start_time + 1, ..me };
        assert!(!other.is_alive().unwrap());
        assert!(other.hold().unwrap().is_none());
        assert!(me.hold().unwrap().is_some());
    }

    #[test]
    fn environments_name_instance_and_owner() {
        let environ = b"A=1\0NSTANCE_IDENTITY_DIR=/w/knc1/identity\0PROCESS_VM_OWNER=c/s\0";
        let prefix = b"NSTANCE_IDENTITY_DIR=/w/";
        assert_eq!(parse_environ(environ, prefix), Some(("knc1".into(), "c/s".into())));
        assert_eq!(parse_environ(environ, b"NSTANCE_IDENTITY_DIR=/other/"), None);
        assert_eq!(parse_environ(b"", prefix), None);
    }

    /// Leaves no process behind, however its test ends. It is not reaped before, so its group is its own.
    struct Leader(std::process::Child);

    impl Drop for Leader {
        fn drop(&mut self) {
            if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
            }
            let _ = self.0.wait();
        }
    }

    #[tokio::test]
    async fn a_leader_is_killed_with_its_group() {
        use std::{
            io::BufRead as _,
            os::unix::process::CommandExt as _,
            process::{Command, Stdio},
        };
        let script = "sleep 600 & echo $!; wait";
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut leader = Leader(command.spawn().unwrap());
        let mut line = String::new();
        io::BufReader::new(leader.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let helper = Process::of_pid(line.trim().parse().unwrap()).unwrap().unwrap().hold().unwrap().unwrap();
        let held = Process::of_pid(leader.0.id()).unwrap().unwrap().hold().unwrap().unwrap();
        held.kill().unwrap();
        held.ended().await.unwrap();
        helper.ended().await.unwrap();
        assert!(!helper.process.is_alive().unwrap());
    }
}
