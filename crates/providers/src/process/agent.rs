//! Starting the agent of a VM, so that it lives on without the server that started it.
//!
//! A VM outlives whoever asked for it, so its agent must not share the server's terminal or process group. The standard
//! library cannot yet start a child in a new session without `unsafe`; making it a group leader instead would forbid
//! it to make a session itself. So the child starts as a plain one, and the agent calls `setsid` as its first act when
//! `NSTANCE_NEW_SESSION=1`. In the moment before, a signal to the server's group would end it too: then the VM died
//! young, which is seen as any other death.
//!
//! In a window of tmux it is a child of the tmux server, which gives it a session and a terminal of its own.

use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs::{self, OpenOptions},
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::Path,
    process::Stdio,
    time::Duration,
};

use nstance_core::ports::provider::Owner;
use tokio::process::{Child, Command};

use super::{
    dir::{Lock, VmDir},
    proc::{self, Process},
    provider_id,
    tmux::{Run, TmuxSession},
    vm_file::VmFile,
};

/// What an agent may inherit. Everything else stays out: a server's environment holds credentials and keys.
const INHERITED: [&str; 11] = [
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "LLVM_PROFILE_FILE",
    "LD_LIBRARY_PATH",
];

/// How an agent process names its owner, so that it is known even without its directory.
pub(super) fn owner_text(owner: &Owner) -> String {
    format!("{}/{}", owner.cluster, owner.shard)
}

fn environment(dir: &VmDir, file: &VmFile, owner: &Owner, metrics_interval: Duration) -> BTreeMap<OsString, OsString> {
    let mut all: BTreeMap<OsString, OsString> =
        INHERITED.iter().filter_map(|name| Some((OsString::from(name), env::var_os(name)?))).collect();
    let ours: [(&str, OsString); 10] = [
        ("NSTANCE_INSTANCE_ID", dir.instance.to_string().into()),
        ("NSTANCE_SERVER_REGISTRATION_ADDR", file.registration_addr.clone().into()),
        ("NSTANCE_SERVER_AGENT_ADDR", file.agent_addr.clone().into()),
        (proc::IDENTITY_DIR, dir.identity().into()),
        ("NSTANCE_KEYS_DIR", dir.path.join("keys").into()),
        ("NSTANCE_RECV_DIR", dir.path.join("recv").into()),
        ("NSTANCE_METRICS_INTERVAL", nstance_schemas::duration::text(metrics_interval).into()),
        ("NSTANCE_PROVIDER", "dev".into()),
        ("NSTANCE_NOTICE_FILE", dir.path.join("notice.json").into()),
        (proc::OWNER, owner_text(owner).into()),
    ];
    all.extend(ours.map(|(name, value)| (name.into(), value)));
    if file.tmux.is_none() {
        all.insert("NSTANCE_NEW_SESSION".into(), "1".into());
    }
    all
}

/// Whether there is such a program, at a path or in `PATH`.
pub(super) fn is_found(binary: &Path) -> bool {
    let is_program =
        |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
    let path = env::var_os("PATH").unwrap_or_default();
    let bare = binary.components().count() == 1;
    is_program(binary) || bare && env::split_paths(&path).any(|dir| is_program(&dir.join(binary)))
}

/// An agent that runs; the caller records it, and reaps it when it ends if it is our child.
pub(super) struct Started {
    pub(super) process: Process,
    child: Option<Child>,
}

impl Started {
    /// An agent that nobody can find by its record must not be.
    pub(super) fn kill(&mut self) {
        match &mut self.child {
            Some(child) => {
                let _ = child.start_kill();
            }
            None => {
                if let Ok(Some(held)) = self.process.hold() {
                    let _ = held.kill();
                }
            }
        }
    }

    /// To be waited for by us while we live; afterwards, and where it is another's child, by whoever has it then.
    pub(super) fn into_child(self) -> Option<Child> {
        self.child
    }
}

/// Starts the agent where its file says. The caller knows that none runs. Blocking; needs a runtime.
pub(super) fn start(
    binary: &Path,
    lock: &Lock,
    dir: &VmDir,
    file: &VmFile,
    owner: &Owner,
    metrics_interval: Duration,
) -> io::Result<Started> {
    let environment = environment(dir, file, owner, metrics_interval);
    let log = dir.path.join("agent.log");
    match &file.tmux {
        None => start_child(binary, dir, environment, &log),
        Some(session) => start_in_window(session, binary, lock, dir, environment, &log),
    }
}

fn open_log(path: &Path) -> io::Result<fs::File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

fn start_child(
    binary: &Path,
    dir: &VmDir,
    environment: BTreeMap<OsString, OsString>,
    log: &Path,
) -> io::Result<Started> {
    let log = open_log(log)?;
    let mut child = Command::new(binary)
        .env_clear()
        .envs(environment)
        .current_dir(&dir.path)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    // Our own child keeps its pid until it is reaped, so this is it, even if it has ended already.
    let process = child.id().map(Process::of_pid).transpose().map(Option::flatten);
    match process {
        Ok(Some(process)) => Ok(Started { process, child: Some(child) }),
        failed => {
            let _ = child.start_kill();
            Err(failed.err().unwrap_or_else(|| io::Error::other("the started agent is not in /proc")))
        }
    }
}

fn start_in_window(
    session: &TmuxSession,
    binary: &Path,
    lock: &Lock,
    dir: &VmDir,
    environment: BTreeMap<OsString, OsString>,
    log: &Path,
) -> io::Result<Started> {
    // In the window it would be a program that ended at once.
    if !is_found(binary) {
        return Err(io::Error::new(io::ErrorKind::NotFound, "there is no such program"));
    }
    // So that it is not readable for everybody: tmux makes it by the umask of its server.
    open_log(log)?;
    let environment: Vec<_> = environment.into_iter().collect();
    let window = provider_id(dir.instance);
    let run = Run { window: &window, program: binary, environment: &environment, dir: &dir.path, log };
    Ok(Started { process: session.open(lock, &run)?, child: None })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::process::vm_file::VmState;

    #[test]
    fn an_agent_inherits_no_secret_of_its_server() {
        let dir = VmDir::new(Path::new("/w"), "knc06bgm7733st2576nx5jht4ecjw".parse().unwrap());
        let file = VmFile {
            state: VmState::Starting,
            process: None,
            tags: BTreeMap::new(),
            epoch: 1,
            subnet: "s".into(),
            instance_type: None,
            created_at: String::new(),
            boots_at: String::new(),
            registration_addr: "127.0.0.1:8992".into(),
            agent_addr: "127.0.0.1:8994".into(),
            metrics_interval: "1s".into(),
            tmux: None,
            node_shown: false,
        };
        let owner = Owner { cluster: "c".parse().unwrap(), shard: "s".parse().unwrap() };
        let environment = environment(&dir, &file, &owner, Duration::from_secs(1));
        for name in environment.keys() {
            let name = name.to_str().unwrap();
            assert!(INHERITED.contains(&name) || name.starts_with("NSTANCE_") || name == proc::OWNER, "{name}");
            assert!(!name.contains("KEY") || name == "NSTANCE_KEYS_DIR", "{name}");
        }
        assert_eq!(environment[&OsString::from("NSTANCE_IDENTITY_DIR")], "/w/knc06bgm7733st2576nx5jht4ecjw/identity");
        assert_eq!(environment[&OsString::from("NSTANCE_METRICS_INTERVAL")], "1s");
        assert_eq!(environment[&OsString::from("NSTANCE_NEW_SESSION")], "1");
        let tmux = Some(TmuxSession { name: "s".into(), tmpdir: None });
        let environment = super::environment(&dir, &VmFile { tmux, ..file }, &owner, Duration::from_secs(1));
        assert!(!environment.contains_key(&OsString::from("NSTANCE_NEW_SESSION")), "it leads one already");
    }
}
