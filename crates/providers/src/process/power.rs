//! Switching the VMs of a whole environment off, and on again as they were.
//!
//! A development environment that stops takes its machines with it, and that must not look like their death: a VM whose
//! agent is gone is replaced, one that is `powered-off` is waited for. So the state is written *before* the agent is
//! told to end, and on the way back the agent runs *before* the state says so. Each crash between two steps leaves
//! something that the next `power_off`, `power_on` or listing finishes:
//!
//! | crash | leaves | finished by |
//! |---|---|---|
//! | `power_off` after writing | `powered-off`, agent alive | `power_on` ends it and starts a new one |
//! | `power_on` after writing `starting` | no agent, or one unrecorded | the server's listing, as for any half-made VM |
//!
//! No server may run meanwhile: it would take both for news about its VMs. Agents that had died before stay dead.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use nstance_core::{ids::InstanceId, ports::provider::Owner, value::Value};

use super::{
    agent,
    dir::{Lock, LockOutcome, VmDir},
    end::{EXEC_LOOK, EXEC_SETTLES, close_window, scan},
    proc::{Held, Process},
    resolve,
    tmux::TmuxSession,
    vm_file::{Read, VmState},
};

/// Longer than an agent that can still run needs to die of SIGKILL.
const DYING: Duration = Duration::from_secs(5);

/// What a change of power did, and what it could not do.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Switched {
    /// VMs that changed.
    pub instances: Vec<InstanceId>,
    /// Processes ended that were no VM's recorded agent: helpers, half-started agents, agents without a directory.
    pub strays: usize,
    /// One line for each VM that was left as it is, and why.
    pub problems: Vec<String>,
}

/// Switches every running VM below `work_dir` off: SIGTERM, after `grace` SIGKILL. Nothing of them runs afterwards, and
/// their windows are closed; a tmux session goes with its last window.
pub async fn power_off(work_dir: &Path, grace: Duration) -> io::Result<Switched> {
    let work_dir = resolve(work_dir);
    let mut switched = Switched::default();
    let (mut ending, mut half_made, mut windows) = (Vec::new(), false, Vec::new());
    for dir in directories(&work_dir)? {
        windows.extend(window_of(&dir));
        match switch_off(&dir).await {
            Ok(Off::Agent { agent, changed }) => {
                ending.push(agent);
                switched.instances.extend(changed.then_some(dir.instance));
            }
            Ok(Off::HalfMade) => half_made = true,
            Ok(Off::Nothing) => {}
            Err(error) => switched.problems.push(format!("{}: {error}", dir.instance)),
        }
    }
    end_all(&ending, grace).await?;
    // What bears an instance's name and is in no record: ended as well, or it would outlive its environment.
    let strays = unrecorded(&work_dir, half_made).await?;
    let strays: Vec<Held> = strays.into_iter().filter_map(|it| it.hold().transpose()).collect::<Result<_, _>>()?;
    switched.strays = strays.len();
    end_all(&strays, Duration::ZERO).await?;
    for (instance, session) in windows {
        close_window(instance, Some(&session)).await;
    }
    Ok(switched)
}

fn window_of(dir: &VmDir) -> Option<(InstanceId, TmuxSession)> {
    match dir.read() {
        Read::File(file) => Some((dir.instance, file.tmux?)),
        Read::NoDirectory | Read::Unreadable(_) => None,
    }
}

enum Off {
    Agent {
        agent: Held,
        changed: bool,
    },
    /// Its agent may run without being recorded.
    HalfMade,
    Nothing,
}

async fn switch_off(dir: &VmDir) -> io::Result<Off> {
    let Some(lock) = lock(dir).await? else { return Ok(Off::Nothing) };
    let mut file = match dir.read() {
        Read::File(file) => file,
        Read::NoDirectory => return Ok(Off::Nothing),
        Read::Unreadable(error) => return Err(error),
    };
    if file.state == VmState::Starting {
        return Ok(Off::HalfMade);
    }
    let Some(agent) = file.process.map_or(Ok(None), Process::hold)? else { return Ok(Off::Nothing) };
    let changed = file.state == VmState::Running;
    if changed {
        file.state = VmState::PoweredOff;
        dir.write(&lock, &file)?;
    }
    Ok(Off::Agent { agent, changed })
}

/// Processes of VMs that are left when the recorded ones have ended. With a half-made VM about, waits for processes
/// that may be about to show themselves as its agent.
async fn unrecorded(work_dir: &Path, half_made: bool) -> io::Result<Vec<Process>> {
    let mut patience = if half_made { EXEC_SETTLES } else { Duration::ZERO };
    loop {
        let scan = scan(work_dir).await?;
        if !scan.unsettled || patience.is_zero() {
            return Ok(scan.found.into_iter().map(|it| it.process).collect());
        }
        tokio::time::sleep(EXEC_LOOK).await;
        patience = patience.saturating_sub(EXEC_LOOK);
    }
}

/// Starts the agent of every VM that [`power_off`] switched off, in its old directory and with its old environment.
/// Must be called inside a runtime, which reaps the agents while it lives.
pub async fn power_on(work_dir: &Path, agent_binary: &Path) -> io::Result<Switched> {
    let work_dir = resolve(work_dir);
    // The agent starts in its own directory, where a relative path would mean something else.
    let binary: PathBuf =
        if 1 < agent_binary.components().count() { resolve(agent_binary) } else { agent_binary.to_owned() };
    let mut switched = Switched::default();
    for dir in directories(&work_dir)? {
        match switch_on(&dir, &binary).await {
            Ok(true) => switched.instances.push(dir.instance),
            Ok(false) => {}
            Err(error) => switched.problems.push(format!("{}: {error}", dir.instance)),
        }
    }
    Ok(switched)
}

async fn switch_on(dir: &VmDir, binary: &Path) -> io::Result<bool> {
    let Some(lock) = lock(dir).await? else { return Ok(false) };
    let mut file = match dir.read() {
        Read::File(file) => file,
        Read::NoDirectory => return Ok(false),
        Read::Unreadable(error) => return Err(error),
    };
    if file.state != VmState::PoweredOff {
        return Ok(false);
    }
    let Some(tags) = file.tags(dir.instance) else {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "its tags do not say whose it is"));
    };
    // It was told to end, so it may do so at any moment: trusting it to live would be betting the VM on it.
    if let Some(agent) = file.process.map_or(Ok(None), Process::hold)? {
        end_all(&[agent], Duration::ZERO).await?;
    }
    let owner = Owner { cluster: tags.cluster, shard: tags.shard };
    let interval = nstance_schemas::duration::parse(&Value::String(file.metrics_interval.clone()))
        .unwrap_or(Duration::from_secs(1));
    file.state = VmState::Starting;
    file.process = None;
    dir.write(&lock, &file)?;
    // In case the user's settings kept the old one.
    close_window(dir.instance, file.tmux.as_ref()).await;
    let (program, place) = (binary.to_owned(), dir.clone());
    let starting = tokio::task::spawn_blocking(move || {
        let started = agent::start(&program, &lock, &place, &file, &owner, interval);
        (lock, file, started)
    });
    let (lock, mut file, started) = starting.await?;
    let mut started = match started {
        Ok(started) => started,
        Err(error) => {
            file.state = VmState::PoweredOff;
            dir.write(&lock, &file)?;
            return Err(io::Error::new(error.kind(), format!("start {}: {error}", binary.display())));
        }
    };
    file.state = VmState::Running;
    file.process = Some(started.process);
    if let Err(error) = dir.write(&lock, &file) {
        started.kill();
        return Err(error);
    }
    // The runtime reaps what is dropped.
    drop(started.into_child());
    Ok(true)
}

/// `None`: the directory is not there.
async fn lock(dir: &VmDir) -> io::Result<Option<Lock>> {
    match dir.lock().await? {
        LockOutcome::Locked(lock) => Ok(Some(lock)),
        LockOutcome::NoDirectory => Ok(None),
        LockOutcome::Busy => Err(io::Error::new(io::ErrorKind::WouldBlock, "its lock is held by a server")),
    }
}

fn directories(work_dir: &Path) -> io::Result<Vec<VmDir>> {
    let entries = match fs::read_dir(work_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut instances = BTreeSet::new();
    for entry in entries {
        if let Some(instance) = entry?.file_name().to_str().and_then(|name| name.parse::<InstanceId>().ok()) {
            instances.insert(instance);
        }
    }
    Ok(instances.into_iter().map(|instance| VmDir::new(work_dir, instance)).collect())
}

/// Every living process that was started for a VM below `work_dir`, recorded or not.
pub async fn agents(work_dir: &Path) -> io::Result<Vec<Process>> {
    Ok(scan(&resolve(work_dir)).await?.found.into_iter().map(|it| it.process).collect())
}

/// Ends processes together: asked first, killed after `grace`. Returns when all have ended.
async fn end_all(processes: &[Held], grace: Duration) -> io::Result<()> {
    let all_ended = || async {
        for process in processes {
            process.ended().await?;
        }
        io::Result::Ok(())
    };
    if !grace.is_zero() {
        for process in processes {
            process.terminate()?;
        }
        if let Ok(ended) = tokio::time::timeout(grace, all_ended()).await {
            return ended;
        }
    }
    for process in processes {
        process.kill()?;
    }
    let late = || io::Error::new(io::ErrorKind::TimedOut, "a process does not die of SIGKILL");
    tokio::time::timeout(DYING, all_ended()).await.map_err(|_| late())?
}

/// What tools need that start processes of their own beside the VMs, and must find exactly those again.
impl Process {
    /// The living process that has this pid now.
    pub fn find(pid: u32) -> io::Result<Option<Self>> {
        Ok(Self::of_pid(pid)?.filter(|it| it.lives()))
    }

    /// Whether it still runs. What cannot be looked at is not ours, so it does not.
    pub fn lives(self) -> bool {
        self.is_alive().unwrap_or(false)
    }

    /// SIGTERM; says whether there was such a process.
    pub fn ask_to_end(self) -> io::Result<bool> {
        self.hold()?.map_or(Ok(false), |held| held.terminate().map(|()| true))
    }

    /// SIGKILL, to its group as well if it leads one; says whether there was such a process.
    pub fn kill_hard(self) -> io::Result<bool> {
        self.hold()?.map_or(Ok(false), |held| held.kill().map(|()| true))
    }

    /// SIGTERM, after `grace` SIGKILL; returns when it has ended. Says whether there was such a process.
    pub async fn end(self, grace: Duration) -> io::Result<bool> {
        match self.hold()? {
            Some(held) => end_all(&[held], grace).await.map(|()| true),
            None => Ok(false),
        }
    }

    /// Resolves when it has ended, whoever its parent is.
    pub async fn ended(self) -> io::Result<()> {
        match self.hold()? {
            Some(held) => held.ended().await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[path = "power/tests.rs"]
mod tests;
