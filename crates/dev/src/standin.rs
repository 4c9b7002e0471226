//! `nstance-dev standin`: the clients that stand in for Cluster API, kubelets and garbage collection, on any API server.

use std::{path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context;
use clap::Args;
use kube::{Client, config::Kubeconfig};
use nstance_rt::{
    clock::SystemClock,
    shutdown::StopSignals,
    tasks::Tasks,
    telemetry::{self, LogForm},
};
use nstance_standin::{ControlPlane, KeeperOptions};

use crate::k8s::client_config;

const GRACE: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(crate) struct StandinArgs {
    /// The API server to work on
    #[arg(long, value_name = "FILE", env = "KUBECONFIG")]
    pub(crate) kubeconfig: PathBuf,
    /// Directory of the environment whose agents are kept as nodes
    #[arg(long, default_value = "temp")]
    pub(crate) dir: PathBuf,
    /// Let the kubelet of this node hang; may be given several times
    #[arg(long = "break", value_name = "NODE")]
    pub(crate) broken: Vec<String>,
    /// No controller manager and no scheduler run there: do what nodes, pods and owner references need of them
    #[arg(long)]
    pub(crate) bare: bool,
    /// Do not stand in for Cluster API
    #[arg(long)]
    pub(crate) no_capi: bool,
    /// Do not stand in for kubelets
    #[arg(long)]
    pub(crate) no_keeper: bool,
    /// Debug log
    #[arg(long, short = 'v')]
    pub(crate) debug: bool,
}

pub(crate) async fn run(args: StandinArgs) -> anyhow::Result<ExitCode> {
    telemetry::start(LogForm::Text, args.debug);
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let kubeconfig = Kubeconfig::read_from(&args.kubeconfig);
    let kubeconfig = kubeconfig.with_context(|| format!("read {}", args.kubeconfig.display()))?;
    let config = client_config(kubeconfig).await?;
    let mut options = nstance_standin::Options::new(Arc::new(SystemClock));
    options.capi = !args.no_capi;
    options.gc = args.bare;
    options.keeper = (!args.no_keeper).then(|| KeeperOptions {
        nodes_dir: Some(args.dir.join("dev-k8s/nodes")),
        instances_dir: Some(args.dir.join("instances")),
        plane: if args.bare { ControlPlane::Absent } else { ControlPlane::Present },
        api_is_file_backed: false,
    });
    options.own_api = Some(config.clone());
    let client = Client::try_from(config).context("make a client of the API server")?;
    let tasks = Tasks::new();
    let handle = nstance_standin::start(&tasks, client, options);
    for node in &args.broken {
        handle.break_node(node);
        println!("the kubelet of {node} hangs until this ends");
    }
    let broken = tokio::select! {
        biased;
        signal = signals.next() => {
            tracing::info!(signal, "stopping");
            None
        }
        broken = tasks.failure() => Some(broken),
    };
    tokio::select! {
        biased;
        _ = signals.next() => {}
        _ = tasks.end(GRACE) => {}
    }
    match broken {
        Some(broken) => Err(broken.into()),
        None => Ok(ExitCode::SUCCESS),
    }
}
