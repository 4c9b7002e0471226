//! The provider against real processes. Each test has its own work directory, by which its agents are found and ended
//! when it is over, however it ends.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
};

use nstance_core::{
    ids::Epoch,
    ports::provider::{Bootstrap, Owner, Tags},
    term::Guard,
    time::Timestamp,
    value::{Object, Value},
};
use nstance_rt::clock::{SystemClock, TokioClock};
use tempfile::TempDir;

use super::{dir::Published, *};

pub(super) const OBEDIENT: &str = "#!/bin/sh\nexec sleep 600\n";
pub(super) const DEAF: &str = "#!/bin/sh\ntrap '' TERM\ntouch deaf\nwhile :; do sleep 600 & wait $!; done\n";

pub(super) struct Bench {
    dir: TempDir,
    tasks: Tasks,
    /// Where agents have windows: on a tmux server of this bench's own.
    pub(super) tmux: Option<TmuxSession>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = end_all(&self.work_dir());
        if self.tmux.is_some() {
            let _ = self.tmux(&["kill-server"]);
        }
    }
}

impl Bench {
    pub(super) fn new(agent: &str) -> Self {
        let bench = Self { dir: TempDir::new().unwrap(), tasks: Tasks::new(), tmux: None };
        fs::create_dir(bench.work_dir()).unwrap();
        // Written by another process: a descriptor open for writing in ours could leak into a concurrent fork, and then
        // the script is busy.
        let status = Command::new("sh")
            .args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""])
            .arg(bench.agent())
            .arg(agent)
            .status()
            .unwrap();
        assert!(status.success());
        bench
    }

    /// Where agents have windows. `None`, loudly, if there is no tmux here.
    pub(super) fn in_tmux(agent: &str) -> Option<Self> {
        if let Err(error) = tmux::check() {
            // Not by a macro: what these print is shown of failed tests only.
            writeln!(io::stderr(), "NOT TESTED: the tmux provider ({error})").unwrap();
            return None;
        }
        let mut bench = Self::new(agent);
        let tmpdir = bench.dir.path().join("tmux");
        fs::create_dir(&tmpdir).unwrap();
        bench.tmux = Some(TmuxSession { name: "nstance-dev-agents".to_owned(), tmpdir: Some(tmpdir) });
        Some(bench)
    }

    /// What tmux answers; nothing if it refuses.
    pub(super) fn tmux(&self, line: &[&str]) -> String {
        let tmpdir = self.tmux.as_ref().and_then(|it| it.tmpdir.as_ref()).unwrap();
        let mut command = Command::new("tmux");
        command.args(line).env("TMUX_TMPDIR", tmpdir).env_remove("TMUX").stdin(Stdio::null());
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    }

    pub(super) fn work_dir(&self) -> PathBuf {
        self.dir.path().join("instances")
    }

    pub(super) fn agent(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    pub(super) fn options(&self, shard: &str) -> ProcessOptions {
        let owner = Owner { cluster: "dev".parse().unwrap(), shard: shard.parse().unwrap() };
        ProcessOptions { tmux: self.tmux.clone(), ..ProcessOptions::new(owner, self.agent(), self.work_dir()) }
    }

    pub(super) fn provider(&self, shard: &str) -> ProcessProvider {
        self.provider_with(self.options(shard))
    }

    pub(super) fn provider_with(&self, options: ProcessOptions) -> ProcessProvider {
        ProcessProvider::new(options, Arc::new(SystemClock), self.tasks.clone())
    }

    /// Every agent, once no process is amid its start.
    pub(super) fn agents(&self) -> Vec<Process> {
        for _ in 0..100_000 {
            if !is_forking() {
                let scan = proc::scan(&resolve(&self.work_dir())).unwrap();
                if !scan.unsettled {
                    return scan.found.iter().map(|it| it.process).collect();
                }
            }
            std::thread::yield_now();
        }
        panic!("some process never shows its environment");
    }
}

/// Whether a child of ours still shares our memory: a start may return before its child has a command line and an
/// environment of its own. The lock of its directory tells a successor the same; a test holds no lock.
fn is_forking() -> bool {
    let ours = fs::read("/proc/self/cmdline").unwrap();
    let parent = format!(" {} ", std::process::id());
    fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let is_ours = |stat: String| stat.rsplit_once(')').is_some_and(|(_, rest)| rest[2..].starts_with(&parent));
        entry.file_name().as_encoded_bytes()[0].is_ascii_digit()
            && fs::read_to_string(entry.path().join("stat")).is_ok_and(is_ours)
            && fs::read(entry.path().join("cmdline")).is_ok_and(|cmdline| cmdline == ours)
    })
}

pub(super) fn permit() -> Permit {
    Guard::unfenced(Epoch(7), Arc::new(SystemClock)).permit().unwrap()
}

pub(super) fn instance(n: u8) -> InstanceId {
    InstanceId::new("knc".parse().unwrap(), [n; 16])
}

pub(super) fn spec(shard: &str, n: u8) -> VmSpec {
    VmSpec {
        instance: instance(n),
        tags: Tags {
            cluster: "dev".parse().unwrap(),
            shard: shard.parse().unwrap(),
            instance: instance(n),
            tenant: "default".parse().unwrap(),
            group: "web".parse().unwrap(),
            on_demand: false,
            epoch: Epoch(7),
            template: "knc".into(),
            infra_hash: "0123456789abcdef".into(),
        },
        instance_type: Some("small".into()),
        subnet: "subnet-a".into(),
        args: Object::new(),
        userdata: None,
        bootstrap: Bootstrap {
            ca_bundle_pem: "a certificate".into(),
            nonce_jwt: "a nonce".into(),
            registration_addr: "127.0.0.1:8992".into(),
            agent_addr: "127.0.0.1:8994".into(),
        },
        reserved_id: None,
    }
}

pub(super) fn of(n: u8) -> VmRef {
    VmRef { instance: instance(n), provider_id: None }
}

pub(super) async fn seen(provider: &ProcessProvider, n: u8) -> Option<Seen> {
    match provider.describe(&[of(n)]).await.remove(0) {
        Described::Vm(vm) => Some(vm.seen),
        Described::NotFound => None,
        Described::Unknown(_) => Some(Seen::Unknown),
    }
}

/// The end of a process is awaited, never assumed.
pub(super) async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..5000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("not in time: {what}");
}

pub(super) fn state(provider: &ProcessProvider, n: u8) -> Option<VmState> {
    match provider.inner.dir(instance(n)).read() {
        Read::File(file) => Some(file.state),
        _ => None,
    }
}

/// A directory as its creator left it when it was killed right after making it.
pub(super) fn half_created(provider: &ProcessProvider, spec: &VmSpec) -> (VmDir, VmFile) {
    let dir = provider.inner.dir(spec.instance);
    let (published, file) = provider.inner.place(&permit(), &dir, spec).unwrap();
    assert!(matches!(published, Published::New(_)));
    (dir, file)
}

#[tokio::test]
async fn a_created_vm_is_a_directory_and_a_process_without_secrets() {
    let bench = Bench::new(OBEDIENT);
    let mut options = bench.options("dev-1");
    options.node_dir = Some(bench.dir.path().join("k8s/nodes"));
    let node = bench.dir.path().join(format!("k8s/nodes/{}.json", instance(1)));
    let provider = bench.provider_with(options);
    let vm = provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    assert_eq!(vm.tags, VmTags::Complete(spec("dev-1", 1).tags));
    assert_eq!(vm.vm.provider_id.as_deref(), Some(provider_id(instance(1)).as_str()));

    let dir = bench.work_dir().join(instance(1).to_string());
    let mode = |path: &str| fs::metadata(dir.join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("identity"), mode("keys"), mode("recv")), (0o700, 0o700, 0o750));
    assert_eq!((mode("identity/nonce.jwt"), mode("identity/ca.crt")), (0o600, 0o600));
    assert_eq!(fs::read_to_string(dir.join("identity/nonce.jwt")).unwrap(), "a nonce");

    let Read::File(file) = provider.inner.dir(instance(1)).read() else { panic!("no vm.json") };
    assert_eq!((file.state, file.epoch, file.subnet.as_str()), (VmState::Running, 7, "subnet-a"));
    let process = file.process.unwrap();
    assert_eq!(bench.agents(), [process]);
    let environ = fs::read_to_string(format!("/proc/{}/environ", process.pid)).unwrap();
    assert!(environ.contains("NSTANCE_SERVER_AGENT_ADDR=127.0.0.1:8994\0"));
    assert!(environ.contains("NSTANCE_NEW_SESSION=1\0"));
    assert!(!environ.contains("CARGO"), "nothing of the server's own environment leaks");
    let shown: serde_json::Value = serde_json::from_slice(&fs::read(&node).unwrap()).unwrap();
    assert_eq!(shown["spec"]["providerID"], provider.k8s_provider_id(&of(1)));

    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    eventually("deleted", async || state(&provider, 1) == Some(VmState::Deleted)).await;
    eventually("no node", async || !node.exists()).await;
    assert_eq!(seen(&provider, 1).await, Some(Seen::Gone));
    assert_eq!(provider.list().await.unwrap().vms, []);
    provider.clean(permit(), &of(1)).await.unwrap();
    assert_eq!(seen(&provider, 1).await, None);
    assert_eq!(fs::read_dir(bench.work_dir()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn concurrent_creates_by_two_servers_start_one_agent() {
    let bench = Bench::new(OBEDIENT);
    let servers: Vec<Arc<ProcessProvider>> = (0..2).map(|_| Arc::new(bench.provider("dev-1"))).collect();
    for n in 1..=10 {
        let (done, mut results) = tokio::sync::mpsc::channel(8);
        for i in 0..8 {
            let (server, done) = (servers[i % 2].clone(), done.clone());
            bench.tasks.spawn("create", async move {
                done.send(server.create(permit(), &spec("dev-1", n)).await).await.unwrap();
            });
        }
        for _ in 0..8 {
            assert_eq!(results.recv().await.unwrap().unwrap().seen, Seen::Running);
        }
        assert_eq!(bench.agents().len(), usize::from(n));
    }
}

#[tokio::test]
async fn a_creator_killed_before_the_start_is_succeeded_by_a_repeat() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    half_created(&provider, &spec("dev-1", 1));
    assert_eq!(seen(&provider, 1).await, Some(Seen::Pending));
    assert!(bench.agents().is_empty());
    let vm = provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    assert_eq!(vm.seen, Seen::Running);
    assert_eq!(bench.agents().len(), 1);
}

#[tokio::test]
async fn a_creator_killed_before_recording_the_start_leaves_one_agent() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    for (n, finish) in [(1, "create"), (2, "list"), (3, "delete")] {
        let (dir, file) = half_created(&provider, &spec("dev-1", n));
        let options = &provider.inner.options;
        let Ok(LockOutcome::Locked(lock)) = dir.try_lock() else { panic!("not locked") };
        let started =
            agent::start(&options.agent_binary, &lock, &dir, &file, &options.owner, options.metrics_interval).unwrap();
        drop(lock);
        assert_eq!(seen(&provider, n).await, Some(Seen::Pending));
        let successor = bench.provider("dev-1");
        match finish {
            "create" => {
                successor.create(permit(), &spec("dev-1", n)).await.unwrap();
            }
            "list" => {
                successor.list().await.unwrap();
                eventually("recorded", async || state(&successor, n) == Some(VmState::Running)).await;
            }
            _ => {
                successor.delete(permit(), &of(n), DeleteHow::Now).await.unwrap();
                eventually("ended", async || !started.process.is_alive().unwrap()).await;
                eventually("deleted", async || state(&successor, n) == Some(VmState::Deleted)).await;
                assert_eq!(bench.agents().len(), 2);
                continue;
            }
        }
        let Read::File(file) = dir.read() else { panic!("no vm.json") };
        assert_eq!(file.process, Some(started.process), "found again, not started anew");
        assert_eq!(bench.agents().len(), usize::from(n));
    }
}

#[tokio::test]
async fn a_listing_boots_what_was_accepted_and_sweeps_abandoned_drafts() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    half_created(&provider, &spec("dev-1", 1));
    let mine = Process::of_pid(std::process::id()).unwrap().unwrap();
    let abandoned = bench.work_dir().join(format!(".new-{}-{}-{}-0", instance(2), mine.pid, mine.start_time + 1));
    let at_work = bench.work_dir().join(format!(".new-{}-{}-{}-0", instance(3), mine.pid, mine.start_time));
    fs::create_dir_all(abandoned.join("identity")).unwrap();
    fs::create_dir_all(&at_work).unwrap();
    let listing = provider.list().await.unwrap();
    assert_eq!(listing.missing, None);
    assert_eq!(listing.vms.iter().map(|vm| vm.seen).collect::<Vec<_>>(), [Seen::Pending]);
    assert!(!abandoned.exists() && at_work.exists());
    eventually("booted", async || seen(&provider, 1).await == Some(Seen::Running)).await;
    assert_eq!(bench.agents().len(), 1);
}

#[tokio::test]
async fn a_failed_start_leaves_nothing() {
    let bench = Bench::new(OBEDIENT);
    let mut options = bench.options("dev-1");
    options.agent_binary = bench.dir.path().join("no-such-agent");
    let provider = bench.provider_with(options);
    let error = provider.create(permit(), &spec("dev-1", 1)).await.unwrap_err();
    assert_eq!(error.class, ErrorClass::Invalid);
    assert_eq!(fs::read_dir(bench.work_dir()).unwrap().count(), 0);
    assert_eq!(provider.check(&Needs::default()).await.len(), 1);
    assert_eq!(bench.provider("dev-1").check(&Needs::default()).await, []);

    let mut wrong = spec("dev-1", 1);
    wrong.args.insert("ImageId", Value::from("x"));
    assert_eq!(provider.create(permit(), &wrong).await.unwrap_err().class, ErrorClass::Invalid);
    assert_eq!(provider.create(permit(), &spec("dev-2", 1)).await.unwrap_err().class, ErrorClass::Invalid);
}

#[tokio::test]
async fn a_dying_agent_is_dead_before_its_files_are_closed() {
    // The agent holds a pipe as it would hold its connection: whoever sees it close asks at once.
    let bench = Bench::new("#!/bin/sh\nexec sleep 600 > ../../pipe\n");
    let provider = bench.provider("dev-1");
    let pipe = bench.dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    for n in 1..=20 {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
        let (inner, pipe) = (provider.inner.clone(), pipe.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let mut pipe = fs::File::open(pipe).unwrap(); // returns when the agent has opened its end
            let Read::File(file) = inner.dir(instance(n)).read() else { panic!("no vm.json") };
            file.process.unwrap().hold().unwrap().unwrap().kill().unwrap();
            pipe.read_to_end(&mut Vec::new()).unwrap();
            inner.describe(&of(n))
        });
        let Described::Vm(vm) = asked.await.unwrap() else { panic!("a dead VM is not a missing one") };
        assert_eq!(vm.seen, Seen::Gone);
        let again = provider.create(permit(), &spec("dev-1", n)).await.unwrap_err();
        assert_eq!(again.class, ErrorClass::NotFound, "a dead VM is not made a second time");
    }
    assert!(provider.list().await.unwrap().vms.iter().all(|vm| vm.seen == Seen::Gone));
}

#[tokio::test]
async fn an_agent_whose_directory_was_removed_is_dead_and_is_ended() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    let other = bench.provider("dev-2");
    for n in 1..=3 {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
        fs::remove_dir_all(provider.inner.dir(instance(n)).path).unwrap();
    }
    assert_eq!(seen(&provider, 1).await, None);
    other.list().await.unwrap();
    other.delete(permit(), &of(1), DeleteHow::Now).await.unwrap();
    assert_eq!(bench.agents().len(), 3, "another shard's strays are none of our business");
    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    eventually("one ended", async || bench.agents().len() == 2).await;
    assert_eq!(provider.list().await.unwrap().vms, []);
    eventually("all ended", async || bench.agents().is_empty()).await;
}

#[tokio::test]
async fn a_deaf_agent_is_killed_with_its_helpers_after_the_grace() {
    let bench = Bench::new(DEAF);
    let with_grace = |grace| {
        let mut provider = bench.provider("dev-1");
        Arc::get_mut(&mut provider.inner).unwrap().grace = grace;
        provider
    };
    let patient = with_grace(Duration::from_secs(3600));
    patient.create(permit(), &spec("dev-1", 1)).await.unwrap();
    let deaf = patient.inner.dir(instance(1)).path.join("deaf");
    eventually("trap set", async || deaf.exists()).await;
    for _ in 0..2 {
        patient.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
        assert_eq!(seen(&patient, 1).await, Some(Seen::Deleting));
    }
    let again = patient.create(permit(), &spec("dev-1", 1)).await.unwrap_err();
    assert_eq!(again.class, ErrorClass::NotFound);
    assert_eq!(patient.clean(permit(), &of(1)).await.unwrap_err().class, ErrorClass::Invalid);
    assert_ne!(bench.agents(), []);

    let hasty = with_grace(Duration::from_millis(1));
    hasty.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    eventually("deleted", async || state(&hasty, 1) == Some(VmState::Deleted)).await;
    eventually("no helper left", async || bench.agents().is_empty()).await;
}

#[tokio::test]
async fn a_delete_cut_short_by_its_servers_end_is_finished_by_a_repeat() {
    let bench = Bench::new(DEAF);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    let deaf = provider.inner.dir(instance(1)).path.join("deaf");
    eventually("trap set", async || deaf.exists()).await;
    bench.tasks.cancel();
    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    drop(provider);
    assert_ne!(bench.agents(), [], "it outlives its server");

    let successor = ProcessProvider::new(bench.options("dev-1"), Arc::new(SystemClock), Tasks::new());
    assert_eq!(seen(&successor, 1).await, Some(Seen::Deleting));
    assert_eq!(successor.list().await.unwrap().vms[0].seen, Seen::Deleting);
    successor.delete(permit(), &of(1), DeleteHow::Now).await.unwrap();
    eventually("deleted", async || state(&successor, 1) == Some(VmState::Deleted)).await;
    eventually("ended", async || bench.agents().is_empty()).await;
}

#[tokio::test]
async fn a_pid_with_another_start_time_is_never_signalled() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    let stranger = Victim(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap());
    let theirs = Process::of_pid(stranger.0.id()).unwrap().unwrap();
    let dir = provider.inner.dir(instance(1));
    let Ok(LockOutcome::Locked(lock)) = dir.lock().await else { panic!("not locked") };
    let Read::File(mut file) = dir.read() else { panic!("no vm.json") };
    file.process = Some(Process { start_time: theirs.start_time - 1, ..theirs });
    dir.write(&lock, &file).unwrap();
    drop(lock);
    assert_eq!(seen(&provider, 1).await, Some(Seen::Gone));
    provider.delete(permit(), &of(1), DeleteHow::Now).await.unwrap();
    assert!(theirs.is_alive().unwrap());
    eventually("our own agent is ended", async || bench.agents().is_empty()).await;
}

#[tokio::test]
async fn a_directory_that_cannot_be_read_is_unknown_and_listed() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    for n in 1..=3 {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    fs::write(provider.inner.dir(instance(1)).path.join("vm.json"), "{\"state\":").unwrap();
    fs::remove_file(provider.inner.dir(instance(2)).path.join("vm.json")).unwrap();
    let described = provider.describe(&[of(1), of(2), of(3), of(4)]).await;
    assert!(matches!(described[0], Described::Unknown(_)));
    assert!(matches!(described[1], Described::Unknown(_)));
    assert!(matches!(&described[2], Described::Vm(vm) if vm.seen == Seen::Running));
    assert_eq!(described[3], Described::NotFound);
    let listing = provider.list().await.unwrap();
    let shown: Vec<_> = listing.vms.iter().map(|vm| (vm.seen, vm.tags.complete().is_some())).collect();
    assert_eq!(shown, [(Seen::Unknown, false), (Seen::Unknown, false), (Seen::Running, true)]);
    assert!(provider.delete(permit(), &of(1), DeleteHow::Now).await.is_err());
    assert_eq!(provider.create(permit(), &spec("dev-1", 1)).await.unwrap_err().class, ErrorClass::Ambiguous);
    assert_eq!(bench.agents().len(), 3);
}

#[tokio::test]
async fn states_set_by_hand_are_believed() {
    let bench = Bench::new(OBEDIENT);
    let provider = bench.provider("dev-1");
    provider.create(permit(), &spec("dev-1", 1)).await.unwrap();
    mark(&bench.work_dir(), instance(1), VmState::AgentDown).await.unwrap();
    end_all(&bench.work_dir()).unwrap();
    eventually("agent ended", async || bench.agents().is_empty()).await;
    assert_eq!(seen(&provider, 1).await, Some(Seen::Running), "the VM runs without its agent");
    mark(&bench.work_dir(), instance(1), VmState::Stopped).await.unwrap();
    assert_eq!(seen(&provider, 1).await, Some(Seen::Stopped));
    provider.delete(permit(), &of(1), DeleteHow::Graceful).await.unwrap();
    assert_eq!(seen(&provider, 1).await, Some(Seen::Gone));
    assert!(mark(&bench.work_dir(), instance(2), VmState::Stopped).await.is_err());
}

#[tokio::test]
async fn a_full_subnet_is_out_of_capacity_until_a_vm_is_gone() {
    let bench = Bench::new(OBEDIENT);
    let mut options = bench.options("dev-1");
    options.subnet_capacity = BTreeMap::from([("subnet-a".to_owned(), 2)]);
    let provider = bench.provider_with(options);
    for n in 1..=2 {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    assert_eq!(provider.subnet_free("subnet-a").await, Ok(SubnetFree::Free(0)));
    assert_eq!(provider.subnet_free("subnet-b").await, Ok(SubnetFree::Unlimited));
    assert_eq!(provider.create(permit(), &spec("dev-1", 3)).await.unwrap_err().class, ErrorClass::Capacity);
    provider.create(permit(), &spec("dev-1", 2)).await.expect("a repeat needs no new place");
    provider.delete(permit(), &of(1), DeleteHow::Now).await.unwrap();
    eventually("gone", async || seen(&provider, 1).await == Some(Seen::Gone)).await;
    provider.create(permit(), &spec("dev-1", 3)).await.unwrap();
}

/// Keeps the paused clock from running ahead while `future` waits for the starting thread, of which the clock knows
/// nothing: it stands while a blocking task runs.
async fn standing_still<T>(future: impl Future<Output = T>) -> T {
    let (over, wait) = std::sync::mpsc::channel::<()>();
    let stands = tokio::task::spawn_blocking(move || wait.recv());
    let answer = future.await;
    drop(over);
    let _ = stands.await;
    answer
}

#[tokio::test(start_paused = true)]
async fn a_vm_boots_after_its_delay_and_is_pending_until_then() {
    let bench = Bench::new(OBEDIENT);
    let mut options = bench.options("dev-1");
    options.boot_delay = Duration::from_secs(3600);
    let clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_700_000_000_000)));
    let provider = ProcessProvider::new(options, clock, bench.tasks.clone());
    let vm = standing_still(provider.create(permit(), &spec("dev-1", 1))).await.unwrap();
    assert_eq!(vm.seen, Seen::Pending);
    tokio::time::sleep(Duration::from_secs(3590)).await;
    let again = standing_still(provider.create(permit(), &spec("dev-1", 1))).await.unwrap();
    assert_eq!(again.seen, Seen::Pending);
    provider.list().await.unwrap();
    assert!(bench.agents().is_empty(), "neither a repeat nor a listing boots it early");
    tokio::time::sleep(Duration::from_secs(10)).await;
    tokio::time::resume();
    eventually("booted", async || seen(&provider, 1).await == Some(Seen::Running)).await;
    assert_eq!(bench.agents().len(), 1);
}

/// A process that is killed at the latest when its test is over.
struct Victim(std::process::Child);

impl Drop for Victim {
    fn drop(&mut self) {
        // Ours and not reaped yet, so its pid is its own.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Tells [`a_server_to_be_killed`] where to work.
const VICTIM: &str = "PROCESS_TEST_VICTIM";
const N_VICTIMS: u8 = 16;

/// Not a test of its own: the body of a server process that the test below starts and kills.
#[tokio::test]
async fn a_server_to_be_killed() {
    let Some(home) = std::env::var_os(VICTIM).map(PathBuf::from) else { return };
    let owner = Owner { cluster: "dev".parse().unwrap(), shard: "dev-1".parse().unwrap() };
    let options = ProcessOptions::new(owner, home.join("agent"), home.join("instances"));
    let provider = ProcessProvider::new(options, Arc::new(SystemClock), Tasks::new());
    for n in 1..=N_VICTIMS {
        provider.create(permit(), &spec("dev-1", n)).await.unwrap();
    }
    std::future::pending().await
}

#[tokio::test]
async fn a_server_killed_at_any_moment_leaves_one_agent_for_each_instance() {
    for round in 1..=4 {
        let bench = Bench::new(OBEDIENT);
        let server = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::tests::a_server_to_be_killed"])
            .env(VICTIM, bench.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Victim(server);
        // No timer here: the sooner after an entry appears we kill, the nearer to its creator's next step.
        let begun = || fs::read_dir(bench.work_dir()).unwrap().count();
        while begun() < round * 4 {
            assert!(server.0.try_wait().unwrap().is_none(), "the server ended by itself");
            std::thread::yield_now();
        }
        drop(server);
        let survivors = bench.agents();
        assert!(round * 4 - 4 <= survivors.len(), "agents outlive their server");

        let successor = bench.provider("dev-1");
        for n in 1..=N_VICTIMS {
            assert_eq!(successor.create(permit(), &spec("dev-1", n)).await.unwrap().seen, Seen::Running);
        }
        let agents = bench.agents();
        assert_eq!(agents.len(), usize::from(N_VICTIMS), "one agent each");
        assert!(survivors.iter().all(|it| agents.contains(it)), "those that ran run on");
        let listing = successor.list().await.unwrap();
        assert!(listing.vms.iter().all(|vm| vm.seen == Seen::Running && vm.tags.complete().is_some()));
        let drafts = fs::read_dir(bench.work_dir()).unwrap().count() - usize::from(N_VICTIMS);
        assert_eq!(drafts, 0, "an unfinished directory is swept");
    }
}
