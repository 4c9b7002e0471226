//! An API server, a configuration file and an operator in this process.

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::Parser as _;
use nstance_core::ports::clock::Clock;
use nstance_devk8s::{Options, Running, Server};
use nstance_operator::{
    args::Args,
    cluster::{client::KubeClient, leadership::Leadership},
    control::context::Context,
    ports::{KubePort, ObjectRef},
    run::{self, Ended, StartError},
};
use nstance_rt::{clock::SystemClock, tasks::Tasks};
use serde_json::Value;
use tempfile::TempDir;
use tokio::{sync::oneshot, time::Instant};

pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

/// Waits until it is so; a test that waits in vain fails with these words.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let deadline = Instant::now() + DEADLINE;
    while !condition().await {
        assert!(Instant::now() < deadline, "not within {} s: {what}", DEADLINE.as_secs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) struct World {
    pub(crate) tasks: Tasks,
    pub(crate) dir: TempDir,
    pub(crate) api: Running,
    pub(crate) kube: KubeClient,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::without(&[]).await
    }

    pub(crate) async fn without(groups: &[&str]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (tasks, dir) = (Tasks::new(), TempDir::new().unwrap());
        let mut options = Options::new(dir.path().join("k8s"));
        options.without_groups = groups.iter().map(|it| (*it).to_owned()).collect();
        let api = Server::start(&tasks, options).await.unwrap();
        std::fs::write(dir.path().join("kubeconfig"), api.kubeconfig()).unwrap();
        let kube = client(&api, "test", Leadership::always(clock())).await;
        Self { tasks, dir, api, kube }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write_config(&self, shards: &[(&str, u16, u16)]) {
        let shard = |(name, registration, operator): &(&str, u16, u16)| {
            format!(
                "  {name}:\n    registration_addr: 127.0.0.1:{registration}\n    operator_addr: 127.0.0.1:{operator}\n"
            )
        };
        let text =
            format!("cluster_id: demo\ntenant: default\nshards:\n{}", shards.iter().map(shard).collect::<String>());
        std::fs::write(self.path("config.yaml"), text).unwrap();
    }

    pub(crate) fn args(&self, more: &[&str]) -> Args {
        let mut args = vec!["nstance-operator".to_owned(), "--disable-webhooks".to_owned()];
        args.push(format!("--config={}", self.path("config.yaml").display()));
        args.push(format!("--kubeconfig={}", self.path("kubeconfig").display()));
        args.push("--namespace=default".to_owned());
        args.push("--health-probe-bind-address=0".to_owned());
        args.extend(more.iter().map(|it| (*it).to_owned()));
        Args::try_parse_from(args).unwrap()
    }

    /// Runs an operator that has no controllers, until it ends by itself.
    pub(crate) async fn run_to_its_end(&self, more: &[&str]) -> Result<Ended, StartError> {
        let args = self.args(more);
        let never = std::future::pending();
        tokio::time::timeout(DEADLINE, run::serve(&self.tasks.child(), &args, no_controllers, never)).await.unwrap()
    }

    /// Starts an operator; it ends with what is returned.
    pub(crate) fn start(&self, args: Args, controllers: run::StartControllers) -> Operator {
        start_operator(&self.tasks, args, controllers)
    }

    pub(crate) async fn get(&self, object: &ObjectRef) -> Option<Value> {
        self.kube.get(object).await.unwrap()
    }
}

pub(crate) fn start_operator(outer: &Tasks, args: Args, controllers: run::StartControllers) -> Operator {
    let (stop, stopped) = oneshot::channel::<()>();
    let (ended, end) = oneshot::channel();
    let tasks = outer.child();
    let own = tasks.clone();
    outer.spawn("operator", async move {
        let stop = async {
            // Dropping the sender stops it too.
            let _ = stopped.await;
        };
        let _ = ended.send(run::serve(&own, &args, controllers, stop).await);
        own.end(Duration::from_secs(1)).await;
    });
    Operator { stop: Some(stop), end, tasks }
}

pub(crate) async fn client(api: &Running, caller: &str, leadership: Arc<Leadership>) -> KubeClient {
    let kubeconfig = kube::config::Kubeconfig::from_yaml(&api.kubeconfig_of(caller)).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options);
    KubeClient::new(config.await.unwrap(), leadership).unwrap()
}

pub(crate) fn no_controllers(_: &Tasks, _: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {}

pub(crate) struct Operator {
    stop: Option<oneshot::Sender<()>>,
    end: oneshot::Receiver<Result<Ended, StartError>>,
    tasks: Tasks,
}

impl Operator {
    /// Asks it to stop and waits for its end.
    pub(crate) async fn stop(mut self) -> Result<Ended, StartError> {
        self.stop.take();
        tokio::time::timeout(DEADLINE, &mut self.end).await.unwrap().unwrap()
    }

    /// Waits for its end without asking for it.
    pub(crate) async fn ended(mut self) -> Result<Ended, StartError> {
        let ended = tokio::time::timeout(DEADLINE, &mut self.end).await.unwrap().unwrap();
        self.stop.take();
        ended
    }

    /// Ends it at once, as a crash does.
    pub(crate) fn crash(&self) {
        self.tasks.cancel();
    }
}
