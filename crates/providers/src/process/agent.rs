//! Starting the agent of a VM, so that it lives on without the server that started it.
//!
//! A VM outlives whoever asked for it, so its agent must not share the server's terminal or process group. The standard
//! library cannot yet start a child in a new session without `unsafe`; making it a group leader instead would forbid
//! it to make a session itself. So the child starts as a plain one, and the agent calls `setsid` as its first act when
//! `NSTANCE_NEW_SESSION=1`. In the moment before, a signal to the server's group would end it too: then the VM died
//! young, which is seen as any other death.

use std::{
    collections::BTreeMap, env, ffi::OsString, fs::OpenOptions, io, os::unix::fs::OpenOptionsExt as _, path::Path,
    process::Stdio, time::Duration,
};

use nstance_core::ports::provider::Owner;
use tokio::process::{Child, Command};

use super::{
    dir::VmDir,
    proc::{self, Process},
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
    let ours: [(&str, OsString); 11] = [
        ("NSTANCE_INSTANCE_ID", dir.instance.to_string().into()),
        ("NSTANCE_SERVER_REGISTRATION_ADDR", file.registration_addr.clone().into()),
        ("NSTANCE_SERVER_AGENT_ADDR", file.agent_addr.clone().into()),
        (proc::IDENTITY_DIR, dir.identity().into()),
        ("NSTANCE_KEYS_DIR", dir.path.join("keys").into()),
        ("NSTANCE_RECV_DIR", dir.path.join("recv").into()),
        ("NSTANCE_METRICS_INTERVAL", nstance_schemas::duration::text(metrics_interval).into()),
        ("NSTANCE_PROVIDER", "dev".into()),
        ("NSTANCE_NOTICE_FILE", dir.path.join("notice.json").into()),
        ("NSTANCE_NEW_SESSION", "1".into()),
        (proc::OWNER, owner_text(owner).into()),
    ];
    all.extend(ours.map(|(name, value)| (name.into(), value)));
    all
}

/// An agent that runs; the caller records it, and reaps it when it ends.
pub(super) struct Started {
    pub(super) process: Process,
    pub(super) child: Child,
}

/// Starts the agent. The caller holds the directory's lock and knows that none runs.
pub(super) fn start(
    binary: &Path,
    dir: &VmDir,
    file: &VmFile,
    owner: &Owner,
    metrics_interval: Duration,
) -> io::Result<Started> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.path.join("agent.log"))?;
    let mut child = Command::new(binary)
        .env_clear()
        .envs(environment(dir, file, owner, metrics_interval))
        .current_dir(&dir.path)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()?;
    // Our own child keeps its pid until it is reaped, so this is it, even if it has ended already.
    let process = child.id().map(Process::of_pid).transpose().map(Option::flatten);
    match process {
        Ok(Some(process)) => Ok(Started { process, child }),
        failed => {
            let _ = child.start_kill();
            Err(failed.err().unwrap_or_else(|| io::Error::other("the started agent is not in /proc")))
        }
    }
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
    }
}
