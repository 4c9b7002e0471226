//! Development VMs: each instance is a directory and an agent process that outlives its server.
//!
//! There are two kinds, which differ in where the agent runs and share everything else. With `process` it has no
//! terminal. With `tmux` it runs in a window that a person can look at (see [`tmux`]): a VM whose window is closed is as
//! dead as one whose process has ended. `vm.json` says of each VM which it is.
//!
//! | on disk and in `/proc` | seen |
//! |---|---|
//! | no directory | `NotFound`: that VM is dead, whatever still runs |
//! | `starting`, no agent recorded | `Pending` |
//! | `running`, process alive (same pid and start time, not exiting; in its window) | `Running`, else `Gone` |
//! | `agent-down` / `stopped` (set by hand) | `Running` / `Stopped` |
//! | `powered-off` (see [`power`]) | `Stopped` |
//! | `deleting`, process alive | `Deleting`, else `Gone` |
//! | `deleted` | `Gone`, and in no listing; `NotFound` after `clean` |
//! | directory that cannot be read, or tags that are not all there | `Unknown`, listed without tags |
//!
//! One instance never has two agents. An agent is started only under the directory's lock, and by somebody who made
//! the directory just now or who looked through `/proc` for an agent that bears its name (see [`dir`] for why that look
//! cannot miss one). What a crash leaves is finished by a repeated create, or by the next listing: a VM that was
//! accepted boots, and a process whose directory somebody removed by hand is ended. Neither takes a permit, because
//! neither is a decision of a server; they are what hardware does by itself.

mod agent;
mod balancers;
mod create;
mod dir;
mod end;
mod network;
mod node;
mod options;
pub mod power;
mod proc;
mod size;
mod starter;
mod tmux;
mod vm_file;

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_nodes;
#[cfg(test)]
mod tests_tmux;

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use nstance_core::{
    ids::InstanceId,
    instance::Seen,
    ports::{
        clock::Clock,
        provider::{
            Balancers, Capabilities, CheckProblem, CheckSeverity, CreateMode, DeleteHow, Described, ErrorClass,
            InstanceType, LbMember, LeaderAddress, LeaderNetwork, Listing, LoadBalancer, Need, Needs, Provider,
            ProviderError, Reservation, ReserveSpec, SubnetFree, Vm, VmRef, VmSpec, VmTags,
        },
    },
    term::Permit,
};
use nstance_rt::tasks::Tasks;

use self::{
    dir::{Lock, LockOutcome, VmDir},
    starter::Starter,
    vm_file::{Read, Whose},
};
pub use self::{
    options::{OptionsError, ProcessOptions},
    proc::Process,
    tmux::TmuxSession,
    vm_file::{VmFile, VmState},
};

/// How long a graceful delete waits between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(3);

pub struct ProcessProvider {
    inner: Arc<Inner>,
    /// The name of the server this is, as a holder of addresses.
    machine: Option<String>,
}

struct Inner {
    options: ProcessOptions,
    owner_text: String,
    clock: Arc<dyn Clock>,
    tasks: Tasks,
    starter: Starter,
    /// Held from counting a subnet's VMs until the new one is visible.
    placing: Mutex<()>,
    /// How long an agent may take to say goodbye.
    grace: Duration,
    /// VMs whose end a task of ours is waiting for.
    ending: Mutex<BTreeSet<InstanceId>>,
}

impl ProcessProvider {
    /// Must be called inside a runtime. Nothing is touched on disk but the work directory, which is made if it can be.
    pub fn new(mut options: ProcessOptions, clock: Arc<dyn Clock>, tasks: Tasks) -> Self {
        // Agents are found by the path in their environment, so every server must spell it alike. A directory that
        // cannot be made now is reported by `check`.
        let _ = fs::create_dir_all(&options.work_dir);
        options.work_dir = resolve(&options.work_dir);
        // The agent starts in its own directory, where our relative path would mean something else.
        if 1 < options.agent_binary.components().count() {
            options.agent_binary = resolve(&options.agent_binary);
        }
        let owner_text = agent::owner_text(&options.owner);
        let (placing, ending) = (Mutex::default(), Mutex::default());
        let starter = if options.tmux.is_some() { Starter::with_equal_rank() } else { Starter::default() };
        let inner = Inner { options, owner_text, clock, tasks, starter, placing, grace: GRACE, ending };
        Self { inner: Arc::new(inner), machine: None }
    }

    /// The same cloud, as seen from this machine: it can hold addresses then.
    #[must_use]
    pub fn on_machine(mut self, name: impl Into<String>) -> Self {
        self.machine = Some(name.into());
        self
    }
}

fn resolve(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

/// How this provider names a VM; also the name of a tmux window.
pub fn provider_id(instance: InstanceId) -> String {
    format!("nstance-agent-{instance}")
}

/// Changes the recorded state of a VM by hand, as the development tools do.
pub async fn mark(work_dir: &Path, instance: InstanceId, state: VmState) -> Result<(), ProviderError> {
    let dir = VmDir::new(work_dir, instance);
    let Some(lock) = locked("mark", &dir).await? else {
        return Err(ProviderError::new("mark", ErrorClass::NotFound, format!("there is no VM {instance}")));
    };
    match dir.read() {
        Read::File(mut file) => {
            file.state = state;
            dir.write(&lock, &file).map_err(|error| io_error("mark", &error))
        }
        Read::NoDirectory => Ok(()),
        Read::Unreadable(error) => Err(io_error("mark", &error)),
    }
}

/// Ends every agent of every directory below `work_dir`, whoever owns it, closes its window if it had one, and says how
/// many agents there were. For tools that clear a whole development environment. Agents are found by their record and by
/// their own environment, and each is known by its start time. Blocking.
pub fn end_all(work_dir: &Path) -> io::Result<usize> {
    let work_dir = resolve(work_dir);
    let mut processes: BTreeSet<Process> = proc::scan(&work_dir)?.found.iter().map(|it| it.process).collect();
    let mut windows = Vec::new();
    for entry in fs::read_dir(&work_dir).into_iter().flatten().flatten() {
        if let Read::File(file) = vm_file::read(&entry.path()) {
            processes.extend(file.process);
            let instance = entry.file_name().to_str().and_then(|name| name.parse().ok());
            windows.extend(instance.zip(file.tmux));
        }
    }
    let mut ended = 0;
    for held in processes.into_iter().filter_map(|process| process.hold().transpose()) {
        held?.kill()?;
        ended += 1;
    }
    for (instance, session) in windows {
        session.close(&provider_id(instance))?;
    }
    Ok(ended)
}

/// Kills the recorded agent of one VM, as the development tools do. Says whether there was one.
pub fn kill_agent(work_dir: &Path, instance: InstanceId) -> io::Result<bool> {
    let Read::File(file) = VmDir::new(work_dir, instance).read() else { return Ok(false) };
    let Some(held) = file.process.map_or(Ok(None), Process::hold)? else { return Ok(false) };
    held.kill().map(|()| true)
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nothing is left behind by a failed step here, so no class is ambiguous.
fn io_error(op: &'static str, error: &io::Error) -> ProviderError {
    let class = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => ErrorClass::Auth,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::OutOfMemory => ErrorClass::Capacity,
        _ => ErrorClass::Unavailable,
    };
    ProviderError::new(op, class, error.to_string())
}

fn tags_absent(op: &'static str, instance: InstanceId) -> ProviderError {
    let message = format!("the tags of {instance} are not all there; put them back or remove its directory");
    ProviderError::new(op, ErrorClass::Unavailable, message)
}

/// `None`: the directory is not there.
async fn locked(op: &'static str, dir: &VmDir) -> Result<Option<Lock>, ProviderError> {
    match dir.lock().await.map_err(|error| io_error(op, &error))? {
        LockOutcome::Locked(lock) => Ok(Some(lock)),
        LockOutcome::NoDirectory => Ok(None),
        LockOutcome::Busy => {
            let message = format!("the lock of {} is held by another server", dir.path.display());
            Err(ProviderError::new(op, ErrorClass::Throttled, message))
        }
    }
}

#[derive(Default)]
struct Directories {
    /// In the order of their instances' creation.
    found: Vec<(InstanceId, Read)>,
    /// What could not be looked at.
    missing: Option<String>,
}

/// What a listing found to be done; see the head of this module.
#[derive(Default)]
struct Due {
    boots: Vec<InstanceId>,
    /// VMs that run and whose Node was never shown.
    nodes: Vec<InstanceId>,
    /// Dead VMs of which a process is left: its window was closed, and it ignored that.
    ends: Vec<InstanceId>,
}

impl Inner {
    fn dir(&self, instance: InstanceId) -> VmDir {
        VmDir::new(&self.options.work_dir, instance)
    }

    fn seen(file: &VmFile) -> io::Result<Seen> {
        Ok(match file.state {
            VmState::Starting => Seen::Pending,
            VmState::Running if file.agent_lives()? => Seen::Running,
            VmState::AgentDown => Seen::Running,
            VmState::Stopped | VmState::PoweredOff => Seen::Stopped,
            VmState::Deleting if file.is_process_left()? => Seen::Deleting,
            VmState::Running | VmState::Deleting | VmState::Deleted => Seen::Gone,
        })
    }

    fn view(instance: InstanceId, file: &VmFile, seen: Seen) -> Vm {
        Vm {
            vm: VmRef { instance, provider_id: Some(provider_id(instance)) },
            seen,
            ended: None,
            tags: file.shown_tags(instance),
            created_at: file.created_at(),
            ip4: Some("127.0.0.1".to_owned()),
            ip6: None,
            hostname: rustix::system::uname().nodename().to_str().ok().map(str::to_owned),
            fqdn: None,
            instance_type: file.instance_type.clone(),
            subnet: Some(file.subnet.clone()),
            host: None,
            spot: None,
        }
    }

    /// A VM that is there and whose state nobody can tell.
    fn unreadable(instance: InstanceId) -> Vm {
        Vm {
            vm: VmRef { instance, provider_id: Some(provider_id(instance)) },
            seen: Seen::Unknown,
            ended: None,
            tags: VmTags::Absent,
            created_at: None,
            ip4: None,
            ip6: None,
            hostname: None,
            fqdn: None,
            instance_type: None,
            subnet: None,
            host: None,
            spot: None,
        }
    }

    /// Whether the ref means the VM that bears this instance's name. Another provider id names another VM.
    fn names(vm: &VmRef) -> bool {
        vm.provider_id.as_ref().is_none_or(|id| *id == provider_id(vm.instance))
    }

    fn describe(&self, vm: &VmRef) -> Described {
        let unknown = |error: &io::Error| Described::Unknown(io_error("describe", error));
        if !Self::names(vm) {
            return Described::NotFound;
        }
        match self.dir(vm.instance).read() {
            Read::NoDirectory => Described::NotFound,
            Read::Unreadable(error) => unknown(&error),
            Read::File(file) if file.whose(&self.options.owner) == Whose::Foreign => Described::NotFound,
            Read::File(file) if file.shown_tags(vm.instance) == VmTags::Absent => {
                Described::Unknown(tags_absent("describe", vm.instance))
            }
            Read::File(file) => match Self::seen(&file) {
                Ok(seen) => Described::Vm(Box::new(Self::view(vm.instance, &file, seen))),
                Err(error) => unknown(&error),
            },
        }
    }

    fn directories(&self) -> io::Result<Directories> {
        let entries = match fs::read_dir(&self.options.work_dir) {
            // Nothing was ever made here, or all of it was removed: either way there are no VMs.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Directories::default()),
            entries => entries?,
        };
        let Directories { mut found, mut missing } = Directories::default();
        for entry in entries {
            match entry {
                Ok(entry) => {
                    let name = entry.file_name();
                    if let Some(instance) = name.to_str().and_then(|name| name.parse().ok()) {
                        found.push((instance, self.dir(instance).read()));
                    } else if name.to_str().is_some_and(dir::is_abandoned) {
                        let _ = fs::remove_dir_all(entry.path());
                    }
                }
                Err(error) => missing = Some(format!("{}: {error}", self.options.work_dir.display())),
            }
        }
        found.sort_by_key(|(instance, _)| *instance);
        Ok(Directories { found, missing })
    }

    fn n_in_subnet(&self, subnet: &str) -> io::Result<u64> {
        let Directories { found, .. } = self.directories()?;
        let stands = |read: &Read| match read {
            Read::File(file) => file.subnet == subnet && !matches!(Self::seen(file), Ok(Seen::Gone)),
            _ => false,
        };
        Ok(found.iter().filter(|(_, read)| stands(read)).count().try_into().unwrap_or(u64::MAX))
    }

    /// Shows the Node of a VM whose agent has started, once in its life. What fails here is tried again by a listing.
    fn show_node(&self, lock: &Lock, dir: &VmDir, file: &mut VmFile) {
        let Some(node_dir) = self.options.node_dir.as_ref().filter(|_| !file.node_shown) else { return };
        let (instance, instance_type) = (dir.instance, file.instance_type.as_deref().unwrap_or_default());
        let shown = node::show(node_dir, instance, &k8s_id(instance), instance_type, self.clock.now()).and_then(|()| {
            file.node_shown = true;
            dir.write(lock, file)
        });
        if let Err(error) = shown {
            tracing::warn!(%instance, %error, "node not shown");
        }
    }

    fn hide_node(&self, instance: InstanceId) {
        let Some(node_dir) = &self.options.node_dir else { return };
        if let Err(error) = node::remove(node_dir, instance) {
            tracing::warn!(%instance, %error, "node not hidden");
        }
    }

    /// Blocking: reads every directory.
    fn list(&self) -> io::Result<(Listing, Due)> {
        let Directories { found, missing } = self.directories()?;
        let now = self.clock.now();
        let (mut vms, mut due) = (Vec::new(), Due::default());
        let shows_nodes = self.options.node_dir.is_some();
        for (instance, read) in found {
            match read {
                Read::NoDirectory => {} // removed while we were reading
                Read::Unreadable(error) => {
                    tracing::warn!(%instance, %error, "directory not understood");
                    vms.push(Self::unreadable(instance));
                }
                Read::File(file) => match file.whose(&self.options.owner) {
                    Whose::Foreign => {}
                    _ if file.state == VmState::Deleted => {}
                    whose => {
                        let seen = Self::seen(&file).unwrap_or(Seen::Unknown);
                        if whose == Whose::Ours {
                            if file.state == VmState::Starting && file.is_due(now) {
                                due.boots.push(instance);
                            }
                            let is_up = file.state == VmState::Running && seen == Seen::Running;
                            if shows_nodes && is_up && !file.node_shown {
                                due.nodes.push(instance);
                            }
                            if seen == Seen::Gone && file.is_process_left().unwrap_or(false) {
                                due.ends.push(instance);
                            }
                        }
                        vms.push(Self::view(instance, &file, seen));
                    }
                },
            }
        }
        Ok((Listing { vms, missing }, due))
    }
}

fn k8s_id(instance: InstanceId) -> String {
    format!("dev:///{}", provider_id(instance))
}

#[async_trait]
impl Provider for ProcessProvider {
    fn kind(&self) -> &'static str {
        self.inner.options.kind()
    }

    fn capabilities(&self) -> Capabilities {
        let in_tmux = self.inner.options.tmux.is_some();
        Capabilities {
            create: if in_tmux { CreateMode::RecordFirst } else { CreateMode::Idempotent },
            ..Capabilities::default()
        }
    }

    fn balancers(&self) -> Option<&dyn Balancers> {
        Some(self)
    }

    fn leader_address(&self) -> Option<&dyn LeaderAddress> {
        (self.machine.is_some() && self.inner.options.tmux.is_none()).then_some(self)
    }

    async fn check(&self, _needs: &Needs) -> Vec<CheckProblem> {
        let options = &self.inner.options;
        let mut problems = Vec::new();
        let mut problem = |class, message| {
            let error = ProviderError::new("check", class, message);
            problems.push(CheckProblem { need: Need::Account, severity: CheckSeverity::Error, error });
        };
        let binary = &options.agent_binary;
        if !agent::is_found(binary) {
            let message = format!("no program {}; build the agent or set `agent_binary`", binary.display());
            problem(ErrorClass::Invalid, message);
        }
        if let Err(error) = fs::create_dir_all(&options.work_dir) {
            let message = format!("make {}: {error}; set `work_dir` to a writable place", options.work_dir.display());
            problem(ErrorClass::Auth, message);
        }
        if Process::of_pid(std::process::id()).is_ok_and(|me| me.is_none()) {
            problem(ErrorClass::Invalid, format!("there is no /proc; the {} provider needs Linux", options.kind()));
        }
        if options.tmux.is_some() {
            let checked = tokio::task::spawn_blocking(tmux::check).await.unwrap_or_else(|join| Err(join.into()));
            if let Err(error) = checked {
                problem(ErrorClass::Invalid, error.to_string());
            }
        }
        problems
    }

    /// The id follows from the instance's, so no two instances can get the same one.
    async fn reserve(&self, spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        Ok(Reservation::named(provider_id(spec.instance)))
    }

    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        self.inner.create(permit, spec).await
    }

    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError> {
        self.inner.delete(permit, vm, how).await
    }

    async fn describe(&self, vms: &[VmRef]) -> Vec<Described> {
        vms.iter().map(|vm| self.inner.describe(vm)).collect()
    }

    async fn list(&self) -> Result<Listing, ProviderError> {
        let inner = self.inner.clone();
        let listed = tokio::task::spawn_blocking(move || inner.list()).await.unwrap_or_else(|join| Err(join.into()));
        let (listing, due) = listed.map_err(|error| io_error("list", &error))?;
        for instance in due.boots {
            self.inner.tasks.spawn_droppable("process: boot", self.inner.clone().boot_later(instance, Duration::ZERO));
        }
        for instance in due.nodes {
            self.inner.show_node_later(instance).await;
        }
        for instance in due.ends {
            self.inner.end_left_over(instance).await;
        }
        self.inner.end_strays().await;
        Ok(listing)
    }

    async fn probe(&self) -> Result<(), ProviderError> {
        match fs::metadata(&self.inner.options.work_dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("probe", &error)),
            _ => Ok(()),
        }
    }

    async fn clean(&self, permit: Permit, vm: &VmRef) -> Result<(), ProviderError> {
        self.inner.clean(permit, vm).await
    }

    async fn subnet_free(&self, subnet: &str) -> Result<SubnetFree, ProviderError> {
        let Some(limit) = self.inner.options.subnet_capacity.get(subnet) else { return Ok(SubnetFree::Unlimited) };
        let taken = self.inner.n_in_subnet(subnet).map_err(|error| io_error("subnet_free", &error))?;
        Ok(SubnetFree::Free(limit.saturating_sub(taken)))
    }

    async fn instance_type(&self, name: &str) -> Result<Option<InstanceType>, ProviderError> {
        Ok(Some(size::of(name)))
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        k8s_id(vm.instance)
    }
}

#[async_trait]
impl Balancers for ProcessProvider {
    async fn lb_register(&self, _permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        balancers::change(&self.inner.options.work_dir, &lb.key, vm.instance, true)
            .await
            .map_err(|error| io_error("lb_register", &error))
    }

    async fn lb_deregister(&self, _permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        balancers::change(&self.inner.options.work_dir, &lb.key, vm.instance, false)
            .await
            .map_err(|error| io_error("lb_deregister", &error))
    }

    async fn lb_members(&self, lb: &LoadBalancer) -> Result<Vec<LbMember>, ProviderError> {
        balancers::members(&self.inner.options.work_dir, &lb.key).map_err(|error| io_error("lb_members", &error))
    }
}

#[async_trait]
impl LeaderAddress for ProcessProvider {
    async fn self_id(&self) -> Result<String, ProviderError> {
        let unknown =
            || ProviderError::new("self_id", ErrorClass::Invalid, "this provider does not know its own machine");
        self.machine.clone().ok_or_else(unknown)
    }

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        network::holder(&self.inner.options.work_dir, network.ip).map_err(|error| io_error("net_holder", &error))
    }

    async fn net_assign(
        &self,
        permit: Permit,
        me: &str,
        network: &LeaderNetwork,
        _previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        network::take(&self.inner.options.work_dir, network.ip, me, permit.epoch().0)
            .await
            .map_err(|error| io_error("net_assign", &error))
    }

    async fn net_release(&self, me: &str, network: &LeaderNetwork) -> Result<(), ProviderError> {
        network::release(&self.inner.options.work_dir, network.ip, me)
            .await
            .map_err(|error| io_error("net_release", &error))
    }
}
