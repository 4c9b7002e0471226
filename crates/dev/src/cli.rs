//! The command line, and which command does what.

use std::{ffi::OsString, net::SocketAddr, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};
use nstance_rt::{
    shutdown::StopSignals,
    telemetry::{self, LogForm},
};
use nstance_sim::{Mutation, Setup};
use rustix::process::Signal;

use crate::{
    admin, bench, check, detach,
    k8s::{self, K8sArgs},
    kill,
    layout::Layout,
    logs, notice,
    operator::{self, OperatorArgs},
    partition, pause, refresh,
    render::{Provider, Size},
    s3::{S3Options, S3Server},
    server::{self, ServerArgs},
    standin::{self, StandinArgs},
    status::{self, Form},
    stop, stored, up,
};

/// The whole of Nstance on one machine: object store, server and agents as real processes.
#[derive(Debug, Parser)]
#[command(name = "nstance-dev", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start everything and show it until Ctrl-C; what was stopped before goes on where it was
    Up(UpArgs),
    /// Stop everything that runs in the directory; its state stays
    Down(DirArg),
    /// Stop everything and remove the directory
    Clean(DirArg),
    /// Show what runs; exit code 0 if all is healthy
    Status(StatusArgs),
    /// Show the logs of components and agents, merged
    Logs(LogsArgs),
    /// Let something die: instance/ID (its VM), server/N, shard/NAME (its leader), operator, k8s or s3
    Kill(KillArgs),
    /// Let something stand still
    Pause(PauseArgs),
    /// Tell an instance that its cloud will take it, as a spot machine is told
    Notice(NoticeArgs),
    /// Cut or slow the way between two: server/N and s3, or agents or operators and shard/NAME
    Partition(PartitionArgs),
    /// Remove every fault, resume everything, and start again what `kill --no-restart` left down
    Heal(DirArg),
    /// Let the leaders take the configs as they lie in the store now, edited by hand or not
    Refresh(RefreshArgs),
    /// Measure, in an environment of its own
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Simulate the whole plane by the numbers of a seed, with faults, and check its promises
    Sim(SimArgs),
    /// Run the object store alone, in the foreground
    S3(S3Args),
    /// Run the Kubernetes API server for development alone, in the foreground
    K8s(K8sArgs),
    /// Stand in for Cluster API and kubelets on any API server
    Standin(StandinArgs),
    /// Run the operator alone, in the foreground
    Operator(OperatorArgs),
    /// Run one server alone, in the foreground, beside the store of an environment
    Server(ServerArgs),
    /// Run nstance-admin with the servers, the identity and the bucket of this environment
    Admin(AdminArgs),
    /// Look for the tools and free ports that are needed
    Check,
    /// Print the environment's variables as export lines
    Env(DirArg),
}

#[derive(Debug, Args)]
struct DirArg {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    dir: PathBuf,
}

#[derive(Debug, Args)]
struct AdminArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    dir: PathBuf,
    /// What nstance-admin is told
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    words: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// Config to begin with; a built-in example otherwise. Provider, ports, shard and paths are set for you
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where agents run, in the first config [default: process]
    #[arg(long, value_enum)]
    pub(crate) provider: Option<Provider>,
    /// Neither Kubernetes nor the operator
    #[arg(long)]
    pub(crate) no_k8s: bool,
    /// Kubernetes, but no operator: run one yourself
    #[arg(long)]
    pub(crate) no_operator: bool,
    /// Shards to run [default: those that have a config, else 2]
    #[arg(long, value_name = "N")]
    pub(crate) shards: Option<u16>,
    /// Servers of each shard: one leads, the others stand by
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) servers_per_shard: u16,
    /// Let agents and operators reach leaders through relays that can be cut; always so with several servers per shard
    #[arg(long)]
    pub(crate) links: bool,
    /// Size of a group in the first config, as in test=3
    #[arg(long, value_name = "GROUP=N")]
    pub(crate) size: Vec<Size>,
    /// Return when everything is up, and leave it running
    #[arg(long)]
    pub(crate) detach: bool,
    /// Level of the components' logs: info, debug, or a filter such as warn,nstance_server=trace
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub(crate) log_level: String,
    /// Build again when a source changes, and start again what changed by it
    #[arg(long)]
    pub(crate) watch: bool,
    /// Leave running what was started if the start fails
    #[arg(long)]
    pub(crate) keep: bool,
    /// First port of the first server; the store is one below, further servers ten above. 0 takes free ones [default: 8990]
    #[arg(long, value_name = "PORT")]
    pub(crate) port_base: Option<u16>,
    /// Set by --detach on the process that stays
    #[arg(long, hide = true)]
    pub(crate) supervised: bool,
}

#[derive(Debug, Args)]
struct StatusArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    dir: PathBuf,
    /// For scripts
    #[arg(long)]
    json: bool,
    /// Every second until Ctrl-C
    #[arg(long)]
    watch: bool,
}

#[derive(Debug, Args)]
struct LogsArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    dir: PathBuf,
    /// Which: dev-s3, server-1, dev-k8s, operator, up or an instance id; all otherwise
    components: Vec<String>,
    /// Go on with what comes
    #[arg(long, short)]
    follow: bool,
}

#[derive(Debug, Args)]
pub(crate) struct KillArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// instance/ID, server/N, shard/NAME (its leader), operator, k8s or s3
    pub(crate) target: String,
    /// How a component dies
    #[arg(long, value_enum, default_value_t = Deadly::Kill, ignore_case = true)]
    pub(crate) signal: Deadly,
    /// A component is started again only after this time, as in 10s
    #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "no_restart")]
    pub(crate) restart_after: Option<Duration>,
    /// A component stays down until `nstance-dev heal`
    #[arg(long)]
    pub(crate) no_restart: bool,
    /// Return at once instead of measuring the recovery
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct NoticeArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// instance/ID
    pub(crate) target: String,
    /// What will be done to it
    #[arg(long, value_enum, default_value_t = NoticeAction::Terminate)]
    pub(crate) action: NoticeAction,
    /// When, as in 2m; without it the notice names no time
    #[arg(long = "in", value_name = "DURATION", value_parser = duration)]
    pub(crate) within: Option<Duration>,
    /// Return at once instead of measuring the replacement
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RefreshArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// Let the config take away more instances than the removal brake lets pass
    #[arg(long)]
    pub(crate) confirm_removals: bool,
}

/// What a cloud may announce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum NoticeAction {
    Terminate,
    Stop,
    Hibernate,
    Preempt,
    /// Advice
    Rebalance,
    /// Advice
    Maintenance,
}

impl NoticeAction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Terminate => "terminate",
            Self::Stop => "stop",
            Self::Hibernate => "hibernate",
            Self::Preempt => "preempt",
            Self::Rebalance => "rebalance",
            Self::Maintenance => "maintenance",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Deadly {
    /// At once
    Kill,
    /// Asked to end: a leader hands over
    Term,
}

#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// instance/ID, server/N, shard/NAME (its leader), operator, k8s or s3
    pub(crate) target: String,
    /// How long, as in 30s; until `nstance-dev heal` otherwise
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) lasts: Option<Duration>,
    /// Do not measure the recovery
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PartitionArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// server/N, shard/NAME (its leader), agents or operators
    pub(crate) from: String,
    /// s3 or shard/NAME
    pub(crate) to: String,
    /// How long, as in 30s; until `nstance-dev heal` otherwise
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub(crate) lasts: Option<Duration>,
    /// Only what the first sends to the second is lost
    #[arg(long, conflicts_with = "latency")]
    pub(crate) one_way: bool,
    /// Slow it by this much instead of cutting it, as in 200ms
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) latency: Option<Duration>,
    /// Do not measure the recovery
    #[arg(long)]
    pub(crate) no_wait: bool,
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    nstance_config::duration::parse(text).map_err(|error| error.to_string())
}

#[derive(Debug, Subcommand)]
enum BenchCommand {
    /// How long after a kill the create call of the replacement begins
    Replacement {
        /// Size of the group
        #[arg(long, default_value_t = 8)]
        size: u32,
        /// Agents to kill, one after the other
        #[arg(long, default_value_t = 20)]
        kills: u32,
        /// Exit with 1 if the 99th percentile is above this
        #[arg(long, value_name = "MS")]
        max_p99_ms: Option<f64>,
    },
    /// How long a shard is without a leader after one hands over, dies or stands still
    Failover {
        /// Leaders to let go in each of the ways
        #[arg(long, default_value_t = 50)]
        runs: usize,
        /// One of the ways alone
        #[arg(long, value_enum)]
        only: Option<Failover>,
        /// Size of the group
        #[arg(long, default_value_t = 4)]
        size: u32,
        /// Exit with 1 if a 99th percentile is above what is promised
        #[arg(long)]
        check: bool,
    },
    /// How long after an agent sees a notice of its cloud the create call of the replacement begins
    Notices {
        /// Instances that get a notice, all at the same moment
        #[arg(long, default_value_t = 50)]
        size: u32,
        /// How often, each time with instances that have had none
        #[arg(long, default_value_t = 3)]
        rounds: u32,
        /// Exit with 1 if the 99th percentile is above 10 ms
        #[arg(long)]
        check: bool,
    },
    /// What thousands of agents cost their server, and how it grows with their number
    Load(Box<bench::LoadArgs>),
    /// What an idle agent costs: memory, processor, wake-ups, wire, size of the program; and how soon it registers
    Agent {
        /// How long it is watched
        #[arg(long = "for", value_name = "DURATION", value_parser = duration, default_value = "60s")]
        watch: Duration,
        /// The agent to measure; the one beside this program otherwise
        #[arg(long, value_name = "FILE")]
        agent: Option<PathBuf>,
        /// On a spot machine, which asks every two seconds whether it will be taken; needs a network of its own
        #[arg(long)]
        spot: bool,
        /// Exit with 1 if it costs more than is promised: 4 MiB, 0.1 % of a core, 3 MB, one wake-up a second, 10 KiB a
        /// minute on the wire, 50 ms until it registers
        #[arg(long)]
        check: bool,
    },
}

/// How a leader goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Failover {
    /// Asked to end (SIGTERM)
    Handover,
    /// Killed (SIGKILL)
    Kill,
    /// Stands still (SIGSTOP)
    Silent,
}

impl Failover {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Handover => "handover",
            Self::Kill => "kill",
            Self::Silent => "silent",
        }
    }

    pub(crate) fn signal(self) -> Signal {
        match self {
            Self::Handover => Signal::TERM,
            Self::Kill => Signal::KILL,
            Self::Silent => Signal::STOP,
        }
    }
}

#[derive(Debug, Args)]
struct SimArgs {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds, one after the other
    #[arg(long, default_value_t = 100)]
    runs: u64,
    /// Steps of each script
    #[arg(long, default_value_t = Setup::default().steps)]
    steps: u64,
    /// Runs at a time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// A planner that is wrong in one way, to see that it is noticed
    #[arg(long, value_name = "NAME")]
    mutate: Option<Mutation>,
    /// Servers of the shard; without it one to three, as the seed says
    #[arg(long, value_name = "N")]
    servers: Option<usize>,
    /// Judge what comes of the plans alone, not the plans
    #[arg(long)]
    blind: bool,
    /// Stop after so many broken runs
    #[arg(long, default_value_t = 1)]
    stop_after: usize,
    /// Lines of a broken run's trace to print
    #[arg(long, default_value_t = 60)]
    lines: usize,
    /// The whole trace of every run
    #[arg(long)]
    trace: bool,
    /// With the servers' own log
    #[arg(long)]
    log: bool,
}

#[derive(Debug, Args)]
struct S3Args {
    /// Holds the bucket's objects as files
    #[arg(long, default_value = "temp/dev-s3")]
    dir: PathBuf,
    #[arg(long, default_value = "127.0.0.1:8989")]
    addr: SocketAddr,
    #[arg(long, default_value = stored::BUCKET)]
    bucket: String,
    /// Verify signatures, with the secret `dev`
    #[arg(long)]
    require_auth: bool,
    /// Do not sync every write: faster, and a power cut may lose some
    #[arg(long)]
    no_sync: bool,
    /// Debug log
    #[arg(long, short = 'v')]
    debug: bool,
}

/// Runs one command. Errors are for a person to read.
pub fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    if let Command::Up(args) = &cli.command
        && args.supervised
    {
        // Before anything else: the terminal's signals are for whoever started us. Fails only if we lead a session.
        let _ = rustix::process::setsid();
    }
    if matches!(cli.command, Command::Status(_) | Command::Logs(_) | Command::Env(_)) {
        nstance_rt::pipe::end_quietly_when_closed();
    }
    // Every run has a runtime of its own.
    if let Command::Sim(args) = cli.command {
        return sim(&args);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.context("start the runtime")?;
    let ended = runtime.block_on(dispatch(cli.command));
    // Nobody waits for a read that hangs.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    ended
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(args) if args.detach && !args.supervised => detach::run(&args).await,
        Command::Up(args) => up::run(args).await,
        Command::Down(DirArg { dir }) => stop::down(&Layout::open(&dir)?).await.map(|()| ExitCode::SUCCESS),
        Command::Clean(DirArg { dir }) => stop::clean(&dir).await.map(|()| ExitCode::SUCCESS),
        Command::Status(StatusArgs { dir, json, watch }) => {
            status::run(&Layout::open(&dir)?, if json { Form::Json } else { Form::Text }, watch).await
        }
        Command::Logs(LogsArgs { dir, components, follow }) => {
            logs::run(&Layout::open(&dir)?, &components, follow).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Kill(args) => kill::run(&Layout::open(&args.dir)?, &args).await,
        Command::Pause(args) => pause::run(&Layout::open(&args.dir)?, &args).await,
        Command::Notice(args) => notice::run(&Layout::open(&args.dir)?, &args).await,
        Command::Partition(args) => partition::run(&Layout::open(&args.dir)?, &args).await,
        Command::Refresh(args) => refresh::run(&Layout::open(&args.dir)?, &args).await,
        Command::Heal(DirArg { dir }) => partition::heal(&Layout::open(&dir)?).await,
        Command::Bench(BenchCommand::Replacement { size, kills, max_p99_ms }) => {
            bench::replacement(size, kills, max_p99_ms).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Bench(BenchCommand::Failover { runs, only, size, check }) => {
            bench::failover(runs, only, size, check).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Bench(BenchCommand::Notices { size, rounds, check }) => {
            bench::notices(size, rounds, check).await.map(|()| ExitCode::SUCCESS)
        }
        Command::Bench(BenchCommand::Load(args)) => bench::load(*args).await,
        Command::Bench(BenchCommand::Agent { watch, agent, spot, check }) => {
            bench::agent(watch, agent, spot, check).await.map(|()| ExitCode::SUCCESS)
        }
        Command::S3(args) => s3(args).await,
        Command::K8s(args) => k8s::run(args).await,
        Command::Standin(args) => standin::run(args).await,
        Command::Operator(args) => operator::run(args).await,
        Command::Server(args) => server::run(&Layout::open(&args.dir)?, &args),
        Command::Sim(args) => sim(&args),
        Command::Admin(AdminArgs { dir, words }) => admin::run(&Layout::open(&dir)?, &words).await,
        Command::Check => check::run(),
        Command::Env(DirArg { dir }) => env(&Layout::open(&dir)?).await,
    }
}

fn sim(args: &SimArgs) -> anyhow::Result<ExitCode> {
    if args.log {
        telemetry::start(LogForm::Text, true);
    }
    let setup = Setup { steps: args.steps, mutation: args.mutate, hears_checker: !args.blind, servers: args.servers };
    let seeds = args.seed..args.seed.saturating_add(args.runs);
    let summary = nstance_sim::run_many(seeds, setup, args.jobs, args.stop_after, |n, outcome| {
        if args.trace {
            println!("{}", outcome.trace.join("\n"));
            println!("digest of seed {}: {:016x}", outcome.seed, outcome.digest);
        }
        if n % 100 == 0 && n < args.runs {
            eprintln!("{n} of {}", args.runs);
        }
    })?;
    for outcome in &summary.broken {
        print!("{}", nstance_sim::report(outcome, setup, if args.trace { 0 } else { args.lines }));
    }
    println!("{}", summary.line());
    Ok(if summary.broken.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn s3(args: S3Args) -> anyhow::Result<ExitCode> {
    telemetry::start(LogForm::Text, args.debug);
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let options = S3Options {
        addr: args.addr,
        bucket: args.bucket,
        require_auth: args.require_auth,
        durable: !args.no_sync,
        ..S3Options::new(args.dir)
    };
    let server = S3Server::start(options).await?;
    println!("AWS_ENDPOINT_URL={}", server.endpoint());
    let signal = signals.next().await;
    tracing::info!(signal, "stopping");
    tokio::select! {
        biased;
        _ = signals.next() => Ok(ExitCode::FAILURE),
        () = server.stop() => Ok(ExitCode::SUCCESS),
    }
}

async fn env(layout: &Layout) -> anyhow::Result<ExitCode> {
    for (name, value) in admin::variables(layout).await? {
        println!("export {name}='{value}'");
    }
    Ok(ExitCode::SUCCESS)
}
