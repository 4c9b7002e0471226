//! `up`: starts everything in its order, shows it, keeps it running, and stops exactly what it started.

mod checks;
mod ending;
mod kubernetes;
mod show;
mod slot;

use std::{
    collections::BTreeMap,
    fs::{File, TryLockError},
    io,
    net::Ipv4Addr,
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use futures::future::select_all;
use nstance_config::{Config, model::Address};
use nstance_core::{ids::Shard, ports::clock::Clock as _, value::Value};
use nstance_providers::process::{Process, power};
use nstance_rt::{clock::SystemClock, shutdown::StopSignals, tasks::Tasks};
use nstance_store::s3::S3Store;
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

pub(crate) use self::checks::beside;
use self::{
    checks::{check_free, config_on_disk, is_linked, shape},
    show::Show,
    slot::Slot,
};
use crate::{
    api,
    cli::UpArgs,
    component::{Spec, tail},
    detach,
    faults::{self, Who},
    feed, http,
    layout::Layout,
    link::{self, Crossing, Door},
    ports::{self, Ports},
    rebuild::{self, Rebuilt},
    records::{self, Kind, Phase, RunFile},
    render::{self, Made, Provider},
    server,
    shape::{self, Place, Shape},
    steps::{Late, Steps, Tried},
    stop,
    stored::{self, StoredConfig},
};

/// Log lines shown of whatever failed.
const TAIL: usize = 20;
const REDRAW: Duration = Duration::from_millis(250);

const ABSENT: &str = "not built yet: AWS, Google Cloud, Proxmox, dashboard";

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
    shape: Shape,
    /// In the order of their start.
    store: Option<Slot>,
    /// The links to the leaders.
    links: Tasks,
    servers: Vec<Slot>,
    kubernetes: Option<Slot>,
    operator: Option<Slot>,
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
            shard: None,
            shape: None,
            extras: Vec::new(),
        };
        let mut up = Self {
            shape: shape(&args, &layout)?,
            args,
            layout,
            steps: Steps::new(),
            record,
            store: None,
            links: Tasks::new(),
            servers: Vec::new(),
            kubernetes: None,
            operator: None,
            agents_may_run: false,
        };
        up.record.shape = Some(up.shape);
        up.record.extras = up.extras();
        up.record.write(&up.layout)?;
        Ok(up)
    }

    /// What runs besides store and servers.
    fn extras(&self) -> Vec<Kind> {
        match (self.args.no_k8s, self.args.no_operator) {
            (true, _) => Vec::new(),
            (false, true) => vec![Kind::Kubernetes],
            (false, false) => vec![Kind::Kubernetes, Kind::Operator],
        }
    }

    async fn start(&mut self) -> Result<(), Failure> {
        let mut left = stop::servers_off(&self.layout).await.map_err(|error| Failure::of("servers", &error))?;
        for (name, grace) in stop::OTHERS {
            let ended = stop::end_recorded(&self.layout, name, grace).await;
            if ended.map_err(|error| Failure::of(name, &error))? {
                left.push(name.to_owned());
            }
        }
        for name in left {
            self.steps.say(&format!("{name} was left over from an `up` that died"));
        }
        faults::forget_all(&self.layout).map_err(|error| Failure::of("faults", &error))?;
        if config_on_disk(&self.layout, self.shape.shards + 1).is_some() {
            let more = shape::shard(self.shape.shards + 1);
            self.steps.say(&format!("{more} has a config but is not started; give a larger --shards to go on with it"));
        }
        let ports = self.ports().map_err(|error| Failure::of("ports", &error))?;
        let bucket = self.start_store(ports).await?;
        self.start_kubernetes(ports)?;
        let configs = self.settle_configs(&bucket, ports).await?;
        self.switch_agents_on().await?;
        self.start_links(&configs).await?;
        // Standbys only when the others lead: who leads at first is then no matter of luck.
        let (first, others): (Vec<Place>, Vec<Place>) = self.shape.places().partition(|it| it.port_offset == 0);
        self.start_servers(&first, &configs, ports).await?;
        for place in &first {
            self.await_http(&self.gate_name("server", &place.shard), place, "/health").await?;
        }
        self.await_ca(&bucket).await?;
        for place in &first {
            self.await_http(&self.gate_name("leader", &place.shard), place, "/leader").await?;
        }
        self.await_kubernetes(ports).await?;
        self.start_operator(&bucket, &configs, ports).await?;
        self.start_servers(&others, &configs, ports).await?;
        for place in &others {
            self.await_http(&format!("standby {}", place.shard), place, "/health").await?;
        }
        for (place, config) in first.iter().zip(&configs) {
            self.await_agents(&bucket, place, config).await?;
        }
        self.record.phase = Phase::Ready;
        self.record.write(&self.layout).map_err(|error| Failure::of("up", &error))?;
        self.steps.say(ABSENT);
        Ok(())
    }

    /// Names the shard where there are several.
    fn gate_name(&self, gate: &str, shard: &Shard) -> String {
        if 1 < self.shape.shards { format!("{gate} {shard}") } else { gate.to_owned() }
    }

    /// Those of the config that is there already, else those asked for.
    fn ports(&self) -> anyhow::Result<Ports> {
        let asked = self.args.port_base;
        let Some(existing) = config_on_disk(&self.layout, 1) else {
            return Ports::at(asked.unwrap_or(ports::DEFAULT_BASE), self.shape);
        };
        let base = existing.server.bind.health.port;
        if asked.is_some_and(|asked| asked != 0 && asked != base) {
            self.steps.say(&format!("--port-base is not applied: the stored config says {base}"));
        }
        Ports::at(base, self.shape)
    }

    async fn start_store(&mut self, ports: Ports) -> Result<Arc<S3Store>, Failure> {
        let fail = |error: anyhow::Error| Failure::of(records::STORE, &error);
        let port = ports.store();
        check_free(&[("s3", port)]).map_err(fail)?;
        let program = std::env::current_exe().context("find our own program").map_err(fail)?;
        let mut args = vec!["s3".to_owned(), "--dir".to_owned(), self.layout.bucket().display().to_string()];
        args.extend(["--addr".to_owned(), format!("{}:{port}", Ipv4Addr::LOCALHOST)]);
        let spec = Spec {
            name: records::STORE.to_owned(),
            kind: Kind::Store,
            program,
            args: self.with_log_level(args),
            env: self.log_filter(),
            ports: [("s3".to_owned(), port)].into(),
            grace: stop::STORE_GRACE,
            shard: None,
        };
        self.store = Some(Slot::start(&self.layout, spec).map_err(fail)?);
        let store = &mut self.store;
        let gate = self.steps.gate("store", async || {
            if let Some(how) = ended(store.as_mut()).await {
                return Tried::Failed(how);
            }
            match http::get(port, "/-/health").await {
                Ok(answer) if answer.code == 200 => Tried::Done(()),
                Ok(answer) => Tried::Wait(answer.body),
                Err(error) => Tried::Wait(error.to_string()),
            }
        });
        gate.await.map_err(|late| failure(records::STORE, late, self.store.as_ref()))?;
        stored::open(port).map_err(fail)
    }

    /// A config that is there stays as it is, whoever wrote it. In the order of the shards.
    async fn settle_configs(&self, bucket: &Arc<S3Store>, ports: Ports) -> Result<Vec<Arc<Config>>, Failure> {
        let settled = async {
            let mut all = Vec::new();
            for (number, shard) in (1..).zip(self.shape.shards()) {
                if let Some(there) = stored::read_config(bucket, &shard).await? {
                    if !self.args.size.is_empty() || self.args.config.is_some() {
                        let file = self.layout.short(&self.layout.bucket().join(&there.key));
                        self.steps.say(&format!("--size and --config are not applied: {file} exists; edit it instead"));
                    }
                    all.push(there);
                    continue;
                }
                let made = Made {
                    layout: &self.layout,
                    ports,
                    provider: self.args.provider.unwrap_or(Provider::Process),
                    has_operator: self.extras().contains(&Kind::Operator),
                };
                let text = render::render(self.args.config.as_deref(), made, number, &self.args.size)?;
                stored::create_config(bucket, &shard, text).await?;
                let stored = stored::read_config(bucket, &shard).await?;
                all.push(stored.context("the config that was stored is not there")?);
            }
            anyhow::Ok(all)
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
        let all = gate.await.map_err(|late| failure("config", late, None))?;
        all.into_iter().map(|it| self.fits(it).map(Arc::new)).collect()
    }

    /// Whether a config serves this environment.
    fn fits(&self, there: StoredConfig) -> Result<Config, Failure> {
        let file = self.layout.short(&self.layout.bucket().join(&there.key));
        let fail = |what: String| Failure { component: "config".to_owned(), what, log: None };
        let work_dir = there.config.server.provider.options.get("work_dir").and_then(Value::as_str);
        if work_dir.map(PathBuf::from).as_ref() != Some(&self.layout.instances()) {
            return Err(fail(format!(
                "{file} names the work_dir {}, but this environment's is {}; edit it",
                work_dir.unwrap_or("(none)"),
                self.layout.instances().display()
            )));
        }
        if self.shape.links && !is_linked(&there.config) {
            return Err(fail(format!(
                "{file} lets the server bind the ports that agents are told, where links are to listen; raise the ports \
                 of server.bind.registration_addr, operator_addr and agent_addr by 1000, or begin anew with \
                 `nstance-dev clean{}`",
                self.layout.dir_flag()
            )));
        }
        Ok(there.config)
    }

    /// Opens the leaders' addresses; whoever leads is behind them.
    async fn start_links(&self, configs: &[Arc<Config>]) -> Result<(), Failure> {
        let fail = |error: anyhow::Error| Failure::of("links", &error);
        let mut crossings = Vec::new();
        for config in configs.iter().filter(|it| is_linked(it)) {
            let (bind, told) = (&config.server.bind, &config.server.advertise);
            let places = self.shape.places().filter(|it| it.shard == config.server.shard);
            let offsets: Vec<u16> = places.map(|it| it.port_offset).collect();
            let of_each = |port: u16| offsets.iter().map(|offset| port.saturating_add(*offset)).collect();
            let ways = [
                (Who::Agents, &bind.registration, &told.registration),
                (Who::Operators, &bind.operator, &told.operator),
                (Who::Agents, &bind.agent, &told.agent),
            ];
            let door = |(who, bind, told): (Who, &Address, &Address)| Door {
                who,
                listen: told.port,
                servers: of_each(bind.port),
            };
            crossings.push(Crossing {
                shard: config.server.shard.to_string(),
                health: of_each(bind.health.port),
                doors: ways.map(door).into(),
            });
        }
        let listen = crossings.iter().flat_map(|it| &it.doors).map(|it| ("link", it.listen));
        check_free(&listen.collect::<Vec<_>>()).map_err(fail)?;
        link::start(&self.links, &self.layout, crossings).await.map_err(fail)
    }

    /// Before the servers: they must find their VMs as they left them.
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

    async fn start_servers(&mut self, places: &[Place], configs: &[Arc<Config>], ports: Ports) -> Result<(), Failure> {
        for place in places {
            let config = configs.iter().find(|it| it.server.shard == place.shard);
            let started = config.context("the shard has no config").and_then(|it| self.start_server(place, it, ports));
            started.map_err(|error| Failure::of(&place.name(), &error))?;
        }
        Ok(())
    }

    fn start_server(&mut self, place: &Place, config: &Config, ports: Ports) -> anyhow::Result<()> {
        let bind = &config.server.bind;
        let addresses = [&bind.health, &bind.election, &bind.registration, &bind.operator, &bind.agent];
        let named: Vec<(&str, u16)> = ports::SERVER
            .into_iter()
            .zip(addresses)
            .map(|(name, address)| (name, address.port.saturating_add(place.port_offset)))
            .collect();
        check_free(&named)?;
        // The store knows servers by their keys: faults are for one of them.
        let mut env = stored::variables(ports.store(), &format!("dev-{}", place.name()));
        env.extend(self.log_filter());
        let spec = Spec {
            name: place.name(),
            kind: Kind::Server,
            program: beside("nstance-server")?,
            args: self.with_log_level(server::arguments(&self.layout, place)),
            env,
            ports: named.iter().map(|(name, port)| ((*name).to_owned(), *port)).collect(),
            grace: stop::SERVER_GRACE,
            shard: Some(place.shard.to_string()),
        };
        self.servers.push(Slot::start(&self.layout, spec)?);
        Ok(())
    }

    async fn await_http(&mut self, gate: &str, place: &Place, path: &str) -> Result<(), Failure> {
        let name = place.name();
        let mut slot = self.servers.iter_mut().find(|it| it.name() == name);
        let port = slot.as_deref().and_then(Slot::component).and_then(|it| it.record.port("health"));
        let gate = self.steps.gate(gate, async || {
            if let Some(how) = ended(slot.as_deref_mut()).await {
                return Tried::Failed(how);
            }
            match http::get(port.unwrap_or_default(), path).await {
                Ok(answer) if answer.code == 200 => Tried::Done(()),
                Ok(answer) => Tried::Wait(answer.body.trim().to_owned()),
                Err(error) => Tried::Wait(error.to_string()),
            }
        });
        gate.await.map_err(|late| failure(&name, late, slot.as_deref()))
    }

    async fn await_ca(&mut self, bucket: &Arc<S3Store>) -> Result<(), Failure> {
        let gate = self.steps.gate("ca", async || match stored::read_ca(bucket).await {
            Ok(Some(_)) => Tried::Done(()),
            Ok(None) => Tried::Wait("cluster/ca.crt is not there yet".to_owned()),
            Err(error) => Tried::Wait(format!("{error:#}")),
        });
        let first = self.servers.first();
        gate.await.map_err(|late| failure("server-1", late, first))
    }

    async fn await_agents(&mut self, bucket: &Arc<S3Store>, place: &Place, config: &Config) -> Result<(), Failure> {
        let name = place.name();
        let gate = self.gate_name("agents", &place.shard);
        let (layout, mut client) = (&self.layout, None);
        let mut slot = self.servers.iter_mut().find(|it| it.name() == name);
        let mut last = None;
        let gate = self.steps.gate(&gate, async || {
            if let Some(how) = ended(slot.as_deref_mut()).await {
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
        let mut failed = failure(&name, late, slot.as_deref());
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

    /// With `--watch`.
    fn start_rebuild(&self, tasks: &Tasks) -> Option<mpsc::Receiver<Rebuilt>> {
        if !self.args.watch {
            return None;
        }
        match rebuild::sources().and_then(|root| rebuild::start(tasks, root)) {
            Ok(rebuilt) => Some(rebuilt),
            Err(error) => {
                self.steps.say(&format!("sources are not watched: {error:#}"));
                None
            }
        }
    }

    /// Shows and keeps everything running until a signal.
    async fn watch(&mut self, signals: &mut Signals) {
        let tasks = Tasks::new();
        let mut feed = feed::start(&tasks, &self.layout, self.shape);
        let mut rebuilt = self.start_rebuild(&tasks);
        let mut show = Show::begin();
        let mut ticks = tokio::time::interval(REDRAW);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let layout = &self.layout;
        let first = self.store.iter_mut().chain(&mut self.servers);
        let mut slots: Vec<&mut Slot> = first.chain(&mut self.kubernetes).chain(&mut self.operator).collect();
        let signal = loop {
            tokio::select! {
                biased;
                signal = signals.next() => break signal,
                note = next_of(&mut slots, layout) => show.note(&note),
                Some(news) = next_build(&mut rebuilt) => match news {
                    Rebuilt::Note(note) => show.note(&note),
                    Rebuilt::Changed(programs) => {
                        for program in programs {
                            let renewed = slots.iter_mut().filter_map(|it| it.renew(&program));
                            renewed.for_each(|note| show.note(&note));
                        }
                    }
                },
                Some((shard, event)) = feed.events.recv() => show.event(&shard, &event),
                _ = ticks.tick() => {
                    if let Err(error) = keep_recorded(layout, &self.record, &slots) {
                        show.note(&format!("records not kept: {error:#}"));
                    }
                    let picture = feed.picture.borrow_and_update().clone();
                    show.draw(layout, &picture);
                }
            }
        };
        tasks.end(Duration::from_millis(200)).await;
        show.end();
        self.steps.say(&format!("{signal}: stopping; once more kills at once"));
    }
}

/// The next thing that happens to any of them. May be dropped and called again.
async fn next_of(slots: &mut [&mut Slot], layout: &Layout) -> String {
    let nexts: Vec<_> = slots.iter_mut().map(|slot| Box::pin(slot.next(layout))).collect();
    select_all(nexts).await.0
}

/// The next news of a build; never any without `--watch`.
async fn next_build(rebuilt: &mut Option<mpsc::Receiver<Rebuilt>>) -> Option<Rebuilt> {
    match rebuilt {
        Some(rebuilt) => rebuilt.recv().await,
        None => std::future::pending().await,
    }
}

/// People remove what they find; what tells us from strangers is put back while we run.
fn keep_recorded(layout: &Layout, up: &RunFile, slots: &[&mut Slot]) -> anyhow::Result<()> {
    if !layout.is_marked() {
        layout.mark()?;
    }
    let components = slots.iter().filter_map(|it| it.component()).map(|it| &it.record);
    components.chain([up]).try_for_each(|record| record.keep(layout))
}

async fn ended(slot: Option<&mut Slot>) -> Option<String> {
    slot?.has_ended().await
}

fn failure(component: &str, late: Late, slot: Option<&Slot>) -> Failure {
    let log = slot.and_then(Slot::component).map(|it| (it.record.log.clone(), it.tail(TAIL)));
    let what =
        if late.timed_out { format!("gate `{}` did not open within 30 s: {}", late.gate, late.why) } else { late.why };
    Failure { component: component.to_owned(), what, log }
}
