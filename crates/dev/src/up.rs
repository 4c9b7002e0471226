//! `up`: starts everything in its order, shows it, keeps it running, and stops exactly what it started.

mod show;
mod slot;

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io,
    net::Ipv4Addr,
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use nstance_config::Config;
use nstance_core::{ports::clock::Clock as _, value::Value};
use nstance_providers::process::{Process, power};
use nstance_rt::{clock::SystemClock, shutdown::StopSignals, tasks::Tasks};
use nstance_store::s3::S3Store;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::{show::Show, slot::Slot};
use crate::{
    api,
    cli::UpArgs,
    component::{Spec, tail},
    detach, feed, http,
    layout::Layout,
    ports::{self, Ports},
    records::{self, Kind, Phase, RunFile},
    render,
    steps::{Late, Steps, Tried},
    stop, stored,
};

/// Log lines shown of whatever failed.
const TAIL: usize = 20;
const REDRAW: Duration = Duration::from_millis(250);

const ABSENT: &str =
    "not part of this build: Kubernetes, operator, dashboard, several shards, several servers per shard, tmux";

/// A terminal that is closed means the same as Ctrl-C.
struct Signals {
    stop: StopSignals,
    hangup: Signal,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self { stop: StopSignals::listen()?, hangup: signal(SignalKind::hangup())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            biased;
            name = self.stop.next() => name,
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}

/// A start that failed, in the words of a person who must do something about it.
struct Failure {
    component: String,
    what: String,
    log: Option<(PathBuf, Vec<String>)>,
}

impl Failure {
    fn of(component: &str, error: &anyhow::Error) -> Self {
        Self { component: component.to_owned(), what: format!("{error:#}"), log: None }
    }
}

struct Up {
    args: UpArgs,
    layout: Layout,
    steps: Steps,
    record: RunFile,
    /// In the order of their start.
    store: Option<Slot>,
    server: Option<Slot>,
    /// Once VMs may have been started.
    agents_may_run: bool,
}

pub(crate) async fn run(args: UpArgs) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen().context("listen for signals")?;
    let layout = Layout::make(&args.dir)?;
    let _lock = sole(&layout)?;
    let mut up = Up::begin(args, layout)?;
    let started = tokio::select! {
        biased;
        signal = signals.next() => Err(Err(signal)),
        started = up.start() => started.map_err(Ok),
    };
    match started {
        Ok(()) => {}
        Err(Err(signal)) => {
            up.steps.break_off();
            up.steps.say(&format!("{signal}: stopping what was started"));
            up.stop(&mut signals).await;
            return Ok(ExitCode::FAILURE);
        }
        Err(Ok(failure)) => {
            up.report(&failure);
            if up.args.keep {
                let flag = up.layout.dir_flag();
                up.steps.say(&format!("left running (--keep); end it with `nstance-dev down{flag}`"));
                up.record.forget(&up.layout);
            } else {
                up.stop(&mut signals).await;
            }
            return Ok(ExitCode::FAILURE);
        }
    }
    up.watch(&mut signals).await;
    up.stop(&mut signals).await;
    Ok(ExitCode::SUCCESS)
}

/// One supervisor per directory, even if somebody removed its lock.
fn sole(layout: &Layout) -> anyhow::Result<File> {
    if let Some(up) = records::supervisor(layout) {
        bail!(detach::already(layout, &up));
    }
    let path = layout.run().join("up.lock");
    let file = File::options().create(true).append(true).open(&path);
    let file = file.with_context(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("another `nstance-dev up` is starting in {}", layout.shown()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("lock {}", path.display())),
    }
}

impl Up {
    fn begin(args: UpArgs, layout: Layout) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let process = Process::find(pid).context("look at our own process")?;
        let record = RunFile {
            name: records::UP.to_owned(),
            kind: Kind::Up,
            phase: Phase::Starting,
            process: process.context("there is no /proc; nstance-dev needs Linux")?,
            ports: BTreeMap::new(),
            command: std::env::args().collect(),
            log: layout.log(records::UP),
            started_at: SystemClock.now().to_string(),
            restarts: 0,
        };
        record.write(&layout)?;
        Ok(Self { args, layout, steps: Steps::new(), record, store: None, server: None, agents_may_run: false })
    }

    async fn start(&mut self) -> Result<(), Failure> {
        for name in [records::SERVER, records::STORE] {
            let ended = stop::end_recorded(&self.layout, name, stop::SERVER_GRACE).await;
            if ended.map_err(|error| Failure::of(name, &error))? {
                self.steps.say(&format!("{name} was left over from an `up` that died"));
            }
        }
        let ports = self.ports().map_err(|error| Failure::of("ports", &error))?;
        let bucket = self.start_store(ports).await?;
        let config = self.settle_config(&bucket, ports).await?;
        self.switch_agents_on().await?;
        self.start_server(&config, ports).await?;
        self.await_ca(&bucket).await?;
        self.await_leader(&config).await?;
        self.await_agents(&bucket, &config).await?;
        self.record.phase = Phase::Ready;
        self.record.write(&self.layout).map_err(|error| Failure::of("up", &error))?;
        self.steps.say(ABSENT);
        Ok(())
    }

    /// Those of the config that is there already, else those asked for.
    fn ports(&self) -> anyhow::Result<Ports> {
        let path = self.layout.bucket().join("config").join(format!("{}.jsonc", render::shard()));
        let existing = fs::read(path).ok().and_then(|bytes| render::check("config", &bytes, None).ok());
        let asked = self.args.port_base;
        let Some(existing) = existing else { return Ports::at(asked.unwrap_or(ports::DEFAULT_BASE)) };
        let base = existing.server.bind.health.port;
        if asked.is_some_and(|asked| asked != 0 && asked != base) {
            self.steps.say(&format!("--port-base is not applied: the stored config says {base}"));
        }
        Ports::at(base)
    }

    async fn start_store(&mut self, ports: Ports) -> Result<Arc<S3Store>, Failure> {
        let fail = |error: anyhow::Error| Failure::of(records::STORE, &error);
        let port = ports.store();
        check_free(&[("s3", port)]).map_err(fail)?;
        let program = std::env::current_exe().context("find our own program").map_err(fail)?;
        let mut args = vec!["s3".to_owned(), "--dir".to_owned(), self.layout.bucket().display().to_string()];
        args.extend(["--addr".to_owned(), format!("{}:{port}", Ipv4Addr::LOCALHOST)]);
        let spec = Spec {
            name: records::STORE,
            kind: Kind::Store,
            program,
            args: self.with_log_level(args),
            env: self.log_filter(),
            ports: [("s3".to_owned(), port)].into(),
            grace: stop::STORE_GRACE,
        };
        self.store = Some(Slot::start(&self.layout, spec).map_err(fail)?);
        let store = &mut self.store;
        let gate = self.steps.gate("store", async || {
            if let Some(how) = ended(store).await {
                return Tried::Failed(how);
            }
            match http::get(port, "/-/health").await {
                Ok(answer) if answer.code == 200 => Tried::Done(()),
                Ok(answer) => Tried::Wait(answer.body),
                Err(error) => Tried::Wait(error.to_string()),
            }
        });
        gate.await.map_err(|late| failure(records::STORE, late, &self.store))?;
        stored::open(port).map_err(fail)
    }

    /// A config that is there stays as it is, whoever wrote it.
    async fn settle_config(&self, bucket: &Arc<S3Store>, ports: Ports) -> Result<Arc<Config>, Failure> {
        let settled = async {
            if let Some(there) = stored::read_config(bucket).await? {
                if !self.args.size.is_empty() || self.args.config.is_some() {
                    let file = self.layout.short(&self.layout.bucket().join(&there.key));
                    self.steps.say(&format!("--size and --config are not applied: {file} exists; edit it instead"));
                }
                return Ok(there);
            }
            let text = render::render(self.args.config.as_deref(), &self.layout, ports, &self.args.size)?;
            stored::create_config(bucket, text).await?;
            stored::read_config(bucket).await?.context("the config that was stored is not there")
        };
        let gate = self.steps.gate("config", {
            let mut settled = Some(settled);
            async move || match settled.take() {
                Some(settled) => match settled.await {
                    Ok(there) => Tried::Done(there),
                    Err(error) => Tried::Failed(format!("{error:#}")),
                },
                None => Tried::Failed("the store did not answer".to_owned()),
            }
        });
        let there = gate.await.map_err(|late| failure("config", late, &None))?;
        let work_dir = there.config.server.provider.options.get("work_dir").and_then(Value::as_str);
        if work_dir.map(PathBuf::from).as_ref() != Some(&self.layout.instances()) {
            let what = format!(
                "{} names the work_dir {}, but this environment's is {}; edit it",
                self.layout.short(&self.layout.bucket().join(&there.key)),
                work_dir.unwrap_or("(none)"),
                self.layout.instances().display()
            );
            return Err(Failure { component: "config".to_owned(), what, log: None });
        }
        Ok(Arc::new(there.config))
    }

    /// Before the server: it must find its VMs as it left them.
    async fn switch_agents_on(&mut self) -> Result<(), Failure> {
        self.agents_may_run = true;
        let agent = beside("nstance-agent").map_err(|error| Failure::of("agents", &error))?;
        let on = power::power_on(&self.layout.instances(), &agent).await;
        let on = on.context("switch the agents on").map_err(|error| Failure::of("agents", &error))?;
        if !on.instances.is_empty() {
            self.steps.say(&format!("    switched on {} agents of before", on.instances.len()));
        }
        for problem in &on.problems {
            self.steps.say(&format!("    agent not switched on: {problem}"));
        }
        Ok(())
    }

    async fn start_server(&mut self, config: &Config, ports: Ports) -> Result<(), Failure> {
        let fail = |error: anyhow::Error| Failure::of(records::SERVER, &error);
        let bind = &config.server.bind;
        let addresses = [&bind.health, &bind.election, &bind.registration, &bind.operator, &bind.agent];
        let named: Vec<(&str, u16)> =
            ports::SERVER.into_iter().zip(addresses).map(|(name, address)| (name, address.port)).collect();
        check_free(&named).map_err(fail)?;
        let mut args: Vec<String> =
            ["--storage", "s3", "--bucket", stored::BUCKET, "--shard"].map(str::to_owned).into();
        args.extend([render::shard().to_string(), "--id".to_owned(), records::SERVER.to_owned()]);
        args.extend(["--cachedir".to_owned(), self.layout.cache().display().to_string()]);
        let mut env = stored::variables(ports.store(), "dev-server-1");
        env.extend(self.log_filter());
        let spec = Spec {
            name: records::SERVER,
            kind: Kind::Server,
            program: beside("nstance-server").map_err(fail)?,
            args: self.with_log_level(args),
            env,
            ports: named.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect(),
            grace: stop::SERVER_GRACE,
        };
        self.server = Some(Slot::start(&self.layout, spec).map_err(fail)?);
        self.await_http("server", config, "/health").await
    }

    async fn await_http(&mut self, gate: &'static str, config: &Config, path: &str) -> Result<(), Failure> {
        let port = config.server.bind.health.port;
        let server = &mut self.server;
        let gate = self.steps.gate(gate, async || {
            if let Some(how) = ended(server).await {
                return Tried::Failed(how);
            }
            match http::get(port, path).await {
                Ok(answer) if answer.code == 200 => Tried::Done(()),
                Ok(answer) => Tried::Wait(answer.body.trim().to_owned()),
                Err(error) => Tried::Wait(error.to_string()),
            }
        });
        gate.await.map_err(|late| failure(records::SERVER, late, &self.server))
    }

    async fn await_ca(&mut self, bucket: &Arc<S3Store>) -> Result<(), Failure> {
        let gate = self.steps.gate("ca", async || match stored::read_ca(bucket).await {
            Ok(Some(_)) => Tried::Done(()),
            Ok(None) => Tried::Wait("cluster/ca.crt is not there yet".to_owned()),
            Err(error) => Tried::Wait(format!("{error:#}")),
        });
        gate.await.map_err(|late| failure(records::SERVER, late, &self.server))
    }

    async fn await_leader(&mut self, config: &Config) -> Result<(), Failure> {
        self.await_http("leader", config, "/leader").await
    }

    async fn await_agents(&mut self, bucket: &Arc<S3Store>, config: &Config) -> Result<(), Failure> {
        let (layout, server, mut client) = (&self.layout, &mut self.server, None);
        let mut last = None;
        let gate = self.steps.gate("agents", async || {
            if let Some(how) = ended(server).await {
                return Tried::Failed(how);
            }
            let connected = match &mut client {
                Some(connected) => connected,
                None => match api::connect_to(layout, bucket, config).await {
                    Ok(connected) => client.insert(connected),
                    Err(error) => return Tried::Wait(format!("{error:#}")),
                },
            };
            let view = match connected.view().await {
                Ok(view) => view,
                Err(status) => {
                    client = None;
                    return Tried::Wait(status.message().to_owned());
                }
            };
            if view.is_healthy() {
                return Tried::Done(());
            }
            let waiting: Vec<String> = view
                .groups
                .iter()
                .filter(|it| it.ready_size != it.size || it.actual_size != it.size)
                .map(|it| format!("{} {} of {} ready", it.key, it.ready_size, it.size))
                .collect();
            let n_ready = view.n_ready();
            last = view.instances.into_iter().find(|it| it.health != "healthy");
            Tried::Closer(n_ready, waiting.join(", "))
        });
        let Err(late) = gate.await else { return Ok(()) };
        // The agent that keeps us waiting knows best why; if there is none, the server does.
        let mut failed = failure(records::SERVER, late, &self.server);
        if let Some(unready) = last {
            let log = self.layout.instances().join(&unready.instance_id).join("agent.log");
            let lines = tail(&log, 0, TAIL);
            if !lines.is_empty() {
                failed.component = format!("agent {}", unready.instance_id);
                failed.log = Some((log, lines));
            }
        }
        Err(failed)
    }

    fn with_log_level(&self, mut args: Vec<String>) -> Vec<String> {
        if self.args.log_level == "debug" {
            args.push("--debug".to_owned());
        }
        args
    }

    fn log_filter(&self) -> BTreeMap<String, String> {
        match self.args.log_level.as_str() {
            "info" | "debug" => BTreeMap::new(),
            filter => [("NSTANCE_LOG".to_owned(), filter.to_owned())].into(),
        }
    }

    fn report(&self, failure: &Failure) {
        let steps = &self.steps;
        steps.say(&format!("\n{} failed: {}", failure.component, failure.what));
        let flag = self.layout.dir_flag();
        match &failure.log {
            Some((path, lines)) => {
                let path = self.layout.short(path);
                steps.say(&format!("last lines of {path}:"));
                for line in lines {
                    steps.say(&format!("  {line}"));
                }
                steps.say(&format!("next: less {path}, then `nstance-dev up{flag}` again"));
            }
            None => steps.say(&format!("next: see to that, then `nstance-dev up{flag}` again")),
        }
    }

    /// Shows and keeps everything running until a signal.
    async fn watch(&mut self, signals: &mut Signals) {
        let tasks = Tasks::new();
        let mut feed = feed::start(&tasks, self.layout.clone());
        let mut show = Show::begin();
        let mut ticks = tokio::time::interval(REDRAW);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (Some(store), Some(server)) = (&mut self.store, &mut self.server) else { return };
        let layout = &self.layout;
        let signal = loop {
            tokio::select! {
                biased;
                signal = signals.next() => break signal,
                note = store.next(layout) => show.note(&note),
                note = server.next(layout) => show.note(&note),
                Some(event) = feed.events.recv() => show.event(&event),
                _ = ticks.tick() => {
                    if let Err(error) = keep_recorded(layout, &self.record, &[store, server]) {
                        show.note(&format!("records not kept: {error:#}"));
                    }
                    let picture = feed.picture.borrow_and_update().clone();
                    show.draw(layout, picture.as_ref());
                }
            }
        };
        tasks.end(Duration::from_millis(200)).await;
        show.end();
        self.steps.say(&format!("{signal}: stopping; once more kills at once"));
    }

    /// Server, agents, store: a server that still ran would replace the agents we stop.
    async fn stop(&mut self, signals: &mut Signals) {
        self.record.phase = Phase::Stopping;
        let _ = self.record.write(&self.layout);
        let hurry = CancellationToken::new();
        {
            let work = self.stop_all(hurry.clone());
            tokio::pin!(work);
            loop {
                tokio::select! {
                    biased;
                    () = &mut work => break,
                    _ = signals.next(), if !hurry.is_cancelled() => hurry.cancel(),
                }
            }
        }
        self.record.forget(&self.layout);
        self.steps.say(&format!("state stays in {}; the next `up` goes on with it", self.layout.shown()));
    }

    async fn stop_all(&mut self, hurry: CancellationToken) {
        if let Some(server) = &mut self.server
            && let Some(line) = server.stop(&self.layout, &hurry).await
        {
            self.steps.say(&line);
        }
        if self.agents_may_run {
            let dir = self.layout.instances();
            let off = tokio::select! {
                biased;
                () = hurry.cancelled() => None,
                off = power::power_off(&dir, stop::AGENT_GRACE) => Some(off),
            };
            let off = match off {
                Some(off) => off,
                None => power::power_off(&dir, Duration::ZERO).await,
            };
            match off {
                Ok(off) => {
                    self.steps.say(&format!("switched off {} agents", off.instances.len() + off.strays));
                    for problem in off.problems {
                        self.steps.say(&format!("agent not switched off: {problem}"));
                    }
                }
                Err(error) => self.steps.say(&format!("agents not switched off: {error}")),
            }
        }
        if let Some(store) = &mut self.store
            && let Some(line) = store.stop(&self.layout, &hurry).await
        {
            self.steps.say(&line);
        }
    }
}

/// People remove what they find; what tells us from strangers is put back while we run.
fn keep_recorded(layout: &Layout, up: &RunFile, slots: &[&mut Slot]) -> anyhow::Result<()> {
    if !layout.is_marked() {
        layout.mark()?;
    }
    let components = slots.iter().filter_map(|slot| slot.component()).map(|it| &it.record);
    components.chain([up]).try_for_each(|record| record.keep(layout))
}

async fn ended(slot: &mut Option<Slot>) -> Option<String> {
    slot.as_mut()?.has_ended().await
}

fn failure(component: &str, late: Late, slot: &Option<Slot>) -> Failure {
    let log = slot.as_ref().and_then(Slot::component).map(|it| (it.record.log.clone(), it.tail(TAIL)));
    let what =
        if late.timed_out { format!("gate `{}` did not open within 30 s: {}", late.gate, late.why) } else { late.why };
    Failure { component: component.to_owned(), what, log }
}

/// A program of ours, built beside this one.
fn beside(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("find our own program")?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        bail!("there is no {}; build it with `cargo build -p {name}`", path.display());
    }
    Ok(path)
}

fn check_free(named: &[(&str, u16)]) -> anyhow::Result<()> {
    let taken: Vec<String> = named
        .iter()
        .filter(|(_, port)| ports::is_taken(*port))
        .map(|(name, port)| format!("{port} ({name})"))
        .collect();
    if taken.is_empty() {
        return Ok(());
    }
    bail!(
        "port {} is taken by another program; end that, or give a new environment other ports with --port-base",
        taken.join(", ")
    )
}
