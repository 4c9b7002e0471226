//! `nstance-dev operator`: the operator in the foreground, with the files of the environment; and how `up` starts it.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use nstance_config::Config;
use nstance_providers::process::Process;
use nstance_rt::{shutdown::StopSignals, tasks::Tasks};

use crate::{
    layout::Layout,
    objects::NAMESPACE,
    rebuild::{self, Rebuilt},
    stop::OPERATOR_GRACE,
    up::beside,
};

#[derive(Debug, Args)]
pub(crate) struct OperatorArgs {
    /// Directory of the environment
    #[arg(long, default_value = "temp")]
    dir: PathBuf,
    /// The API server to work on [default: operator/kubeconfig of the environment]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Where the shards are [default: operator/config.yaml of the environment]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Port of /healthz and /readyz
    #[arg(long, value_name = "PORT", default_value_t = 8081)]
    probes: u16,
    /// Port of /metrics
    #[arg(long, value_name = "PORT", default_value_t = 8082)]
    metrics: u16,
    /// Build it again when a source changes, and start the new one
    #[arg(long)]
    watch: bool,
    /// Debug log
    #[arg(long, short = 'v')]
    debug: bool,
}

/// Becomes the operator, unless it is to be built again and again.
pub(crate) async fn run(args: OperatorArgs) -> anyhow::Result<ExitCode> {
    let at = |given: Option<PathBuf>, usual: &str| given.unwrap_or_else(|| args.dir.join(usual));
    let kubeconfig = at(args.kubeconfig.clone(), "operator/kubeconfig");
    let config = at(args.config.clone(), "operator/config.yaml");
    for (what, file) in [("kubeconfig", &kubeconfig), ("configuration", &config)] {
        if !file.is_file() {
            bail!(
                "there is no {what} {}; name one with --{}, or start an environment with Kubernetes by `nstance-dev up`",
                file.display(),
                if what == "kubeconfig" { "kubeconfig" } else { "config" }
            );
        }
    }
    let program = beside("nstance-operator")?;
    let arguments = arguments(&kubeconfig, &config, args.probes, args.metrics, args.debug);
    if args.watch {
        return watch(&program, &arguments).await;
    }
    let error = Command::new(&program).args(arguments).envs(variables()).exec();
    Err(error).with_context(|| format!("start {}", program.display()))
}

/// Keeps it running as its newest build, until a signal or until it ends by itself with an error.
async fn watch(program: &Path, arguments: &[String]) -> anyhow::Result<ExitCode> {
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let tasks = Tasks::new();
    let mut rebuilt = rebuild::start(&tasks, rebuild::sources()?)?;
    loop {
        let mut command = tokio::process::Command::new(program);
        // Ctrl-C is for us; we end it.
        command.args(arguments).envs(variables()).process_group(0).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("start {}", program.display()))?;
        let is_renewed = loop {
            tokio::select! {
                biased;
                signal = signals.next() => {
                    say!("{signal}: stopping the operator");
                    break false;
                }
                ended = child.wait() => {
                    let status = ended.context("wait for the operator")?;
                    say!("the operator ended ({status}); it is started again when a source changes");
                    loop {
                        tokio::select! {
                            biased;
                            _ = signals.next() => return Ok(ExitCode::FAILURE),
                            news = rebuilt.recv() => match news {
                                Some(Rebuilt::Changed(programs)) if programs.iter().any(|it| it == program) => break,
                                Some(Rebuilt::Note(note)) => say!("{note}"),
                                Some(Rebuilt::Changed(_)) => {}
                                None => bail!("sources are not watched any more"),
                            },
                        }
                    }
                    break true;
                }
                Some(news) = rebuilt.recv() => match news {
                    Rebuilt::Note(note) => say!("{note}"),
                    Rebuilt::Changed(programs) if programs.iter().any(|it| it == program) => {
                        say!("the operator was built anew and is started again");
                        break true;
                    }
                    Rebuilt::Changed(_) => {}
                },
            }
        };
        if let Some(pid) = child.id()
            && let Some(process) = Process::find(pid).context("look at the operator")?
        {
            process.end(OPERATOR_GRACE).await.context("end the operator")?;
            let _ = child.wait().await;
        }
        if !is_renewed {
            tasks.end(Duration::from_millis(200)).await;
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// How an operator of this machine is started.
pub(crate) fn arguments(kubeconfig: &Path, config: &Path, probes: u16, metrics: u16, debug: bool) -> Vec<String> {
    let local = |port: u16| format!("127.0.0.1:{port}");
    let mut arguments: Vec<String> = ["--disable-webhooks", "--zap-encoder", "console"].map(str::to_owned).into();
    for (flag, value) in [
        ("--kubeconfig", kubeconfig.display().to_string()),
        ("--config", config.display().to_string()),
        ("--health-probe-bind-address", local(probes)),
        ("--metrics-bind-address", local(metrics)),
        ("--zap-log-level", if debug { "debug" } else { "info" }.to_owned()),
    ] {
        arguments.extend([flag.to_owned(), value]);
    }
    arguments
}

pub(crate) fn variables() -> BTreeMap<String, String> {
    let namespace = std::env::var("NSTANCE_NAMESPACE").ok().filter(|it| !it.is_empty());
    [("NSTANCE_NAMESPACE".to_owned(), namespace.unwrap_or_else(|| NAMESPACE.to_owned()))].into()
}

/// Writes `operator/config.yaml`, with the addresses by which the shards are known.
pub(crate) fn write_config(layout: &Layout, configs: &[Arc<Config>]) -> anyhow::Result<()> {
    let path = layout.operator_config();
    let write = || {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir)?;
        }
        fs::write(&path, config_text(configs))
    };
    write().with_context(|| format!("write {}", path.display()))
}

fn config_text(configs: &[Arc<Config>]) -> String {
    let cluster = configs.first().map(|it| it.server.cluster_id.to_string()).unwrap_or_default();
    let mut text =
        format!("# Written by `nstance-dev up` at each start.\ncluster_id: {cluster}\ntenant: default\nshards:\n");
    for config in configs {
        let (server, told) = (&config.server, &config.server.advertise);
        let _ = writeln!(
            text,
            "  {}:\n    registration_addr: {}\n    operator_addr: {}",
            server.shard, told.registration, told.operator
        );
    }
    text
}
