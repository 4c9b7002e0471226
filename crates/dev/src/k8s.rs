//! `nstance-dev k8s`: the minimal API server, and beside it, in the same process, the clients that stand in for Cluster
//! API, kubelets and garbage collection.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use clap::Args;
use kube::{
    Client,
    config::{KubeConfigOptions, Kubeconfig},
};
use nstance_devk8s::{Options, Running, Server};
use nstance_rt::{
    clock::SystemClock,
    shutdown::StopSignals,
    tasks::Tasks,
    telemetry::{self, LogForm},
};
use nstance_standin::{ControlPlane, KeeperOptions};
use serde_json::json;

use crate::objects::{NAMESPACE, Objects, SERVICE_ACCOUNTS};

const CAPI_WORKLOAD: &str = "nstance-capi-workload";

/// How long clients and requests in flight may take to end.
const GRACE: Duration = Duration::from_secs(3);

#[derive(Debug, Args)]
pub(crate) struct K8sArgs {
    /// Holds the objects as JSON files
    #[arg(long, default_value = "temp/dev-k8s")]
    pub(crate) dir: PathBuf,
    /// Where it listens, for HTTP and HTTPS
    #[arg(long, default_value = "127.0.0.1:6443")]
    pub(crate) addr: SocketAddr,
    /// Directories of instances, which tell whether agents live [default: instances beside --dir]
    #[arg(long, value_name = "DIR")]
    pub(crate) instances: Option<PathBuf>,
    /// Write a kubeconfig to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Do not stand in for Cluster API
    #[arg(long)]
    pub(crate) no_capi: bool,
    /// Do not stand in for kubelets, controller manager and scheduler
    #[arg(long)]
    pub(crate) no_keeper: bool,
    /// Debug log
    #[arg(long, short = 'v')]
    pub(crate) debug: bool,
}

pub(crate) async fn run(args: K8sArgs) -> anyhow::Result<ExitCode> {
    telemetry::start(LogForm::Text, args.debug);
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let tasks = Tasks::new();
    let running = start(&tasks, &args).await?;
    if let Some(file) = &args.kubeconfig {
        write_kubeconfig(file, &running.kubeconfig())?;
        println!("KUBECONFIG={}", file.display());
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
        () = async { tasks.end(GRACE).await; running.stop().await } => {}
    }
    match broken {
        Some(broken) => Err(broken.into()),
        None => Ok(ExitCode::SUCCESS),
    }
}

async fn start(tasks: &Tasks, args: &K8sArgs) -> anyhow::Result<Running> {
    let crds = nstance_operator::api::manifests::crds().context("make the definitions of our kinds")?;
    let options = Options { addr: args.addr, crds, ..Options::new(&args.dir) };
    let running = Server::start(tasks, options).await?;
    ensure_service_account(Objects::at(running.addr.port())).await?;
    let config = client_config(Kubeconfig::from_yaml(&running.kubeconfig())?).await?;
    let mut options = nstance_standin::Options::new(Arc::new(SystemClock));
    options.capi = !args.no_capi;
    options.gc = true;
    options.keeper = (!args.no_keeper).then(|| KeeperOptions {
        nodes_dir: Some(args.dir.join("nodes")),
        instances_dir: Some(args.instances.clone().unwrap_or_else(|| beside(&args.dir))),
        plane: ControlPlane::Absent,
        api_is_file_backed: true,
    });
    options.own_api = Some(config.clone());
    let client = Client::try_from(config).context("make a client of the API server")?;
    nstance_standin::start(tasks, client, options);
    Ok(running)
}

/// Like the CRDs, a part of `config/crd`: by its token Cluster API works on the workload cluster.
async fn ensure_service_account(objects: Objects) -> anyhow::Result<()> {
    if objects.get(&format!("{SERVICE_ACCOUNTS}/{CAPI_WORKLOAD}")).await?.is_some() {
        return Ok(());
    }
    let metadata = json!({ "name": CAPI_WORKLOAD, "namespace": NAMESPACE });
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata });
    objects.create(SERVICE_ACCOUNTS, &account).await.context("make the service account of Cluster API")
}

fn beside(dir: &Path) -> PathBuf {
    let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    absolute.with_file_name("instances")
}

/// How clients of this program reach an API server.
pub(crate) async fn client_config(kubeconfig: Kubeconfig) -> anyhow::Result<kube::Config> {
    // The second caller finds it done.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let mut config = config.context("read the kubeconfig")?;
    // The stand-ins try again by themselves; a refused eviction must not wait inside the client.
    config.default_retry = false;
    Ok(config)
}

/// Written aside and renamed: a reader sees a whole file.
fn write_kubeconfig(file: &Path, text: &str) -> anyhow::Result<()> {
    let write = || {
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir)?;
        }
        let aside = file.with_extension("tmp");
        fs::write(&aside, text)?;
        fs::rename(&aside, file)
    };
    write().with_context(|| format!("write {}", file.display()))
}
