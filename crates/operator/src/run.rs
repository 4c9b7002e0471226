//! The life of the process: check what is there, be elected, get an identity, connect, act, stop.

use std::{path::Path, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::config::{KubeConfigOptions, Kubeconfig};
use nstance_client::Targets;
use nstance_core::ports::clock::Clock;
use nstance_identity::link::{Net, TcpNet};
use nstance_rt::{
    chain::Chain,
    clock::SystemClock,
    entropy::{SystemEntropy, hex},
    shutdown::StopSignals,
    tasks::Tasks,
};
use tokio::{net::TcpListener, sync::watch};

use crate::{
    api::{conditions::Report, names},
    args::{Args, bind_address, endpoint},
    cluster::{
        client::{ClientError, KubeClient},
        event_writer::EventWriter,
        events::{About, EventSink, Reason, Severity},
        identity::{Keeper, Names, NoIdentity},
        kubeconfig::{ExternalKubeconfig, OwnKubeconfig},
        leadership::Leadership,
        lease::Election,
        renewal::Renewal,
        watch as watches,
        workload::{Access, Workload},
    },
    config::{self, Config, ConfigError},
    control::{
        self,
        apply::Applied,
        context::{Context, Queues, Settings, Stores, Terminating},
    },
    http::{self, Health},
    metrics::Metrics,
    ports::{KubeError, KubePort, ObjectRef, kinds},
    shards::{
        actor::{Common, ShardSet},
        snapshot::Fault,
    },
    webhook,
};

/// How often the configuration file is looked at.
const CONFIG_PERIOD: Duration = Duration::from_secs(10);
/// How long tasks have to end after a stop signal.
const GRACE: Duration = Duration::from_secs(5);
/// How often lengths of queues, and whether import waits, are taken.
const METRICS_PERIOD: Duration = Duration::from_secs(5);

/// How the process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to.
    Asked,
    /// Another process leads now.
    NotLeader,
}

/// Why the process could not start. Each message names what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the configuration cannot be used")]
    Config(#[from] ConfigError),
    #[error("no access to Kubernetes; give --kubeconfig, or run in a pod with a service account")]
    Kubeconfig(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("no access to Kubernetes")]
    Client(#[from] ClientError),
    #[error("ask the Kubernetes API what it serves")]
    Discovery(#[source] KubeError),
    #[error("the Kubernetes API does not serve {missing}; {command}")]
    NotServed { missing: String, command: &'static str },
    #[error("listen on {address}; choose another address, or end who listens there")]
    Listen { address: String, source: std::io::Error },
    #[error("no identity")]
    Identity(#[from] NoIdentity),
    #[error("listen for stop signals")]
    Signals(#[source] std::io::Error),
    #[error("{0}")]
    Task(#[from] nstance_rt::tasks::Failure),
    #[error("serve the webhook")]
    Webhook(#[from] webhook::WebhookError),
}

/// Starts the controllers.
pub type StartControllers = fn(&Tasks, &Arc<Context>, &Arc<Metrics>);

/// The controllers of this program.
pub fn start_controllers(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<Metrics>) {
    control::start_all(tasks, ctx, metrics.clone());
}

/// Runs until a stop signal, the loss of leadership, or an error that ends the start.
pub async fn run(args: Args, start: StartControllers) -> Result<Ended, StartError> {
    // An error means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut signals = StopSignals::listen().map_err(StartError::Signals)?;
    let tasks = Tasks::new();
    let stop = async {
        let signal = signals.next().await;
        tracing::info!(signal, "stopping");
    };
    let ended = serve(&tasks, &args, start, stop).await;
    // Who does not lead any more must not wait: running work could still write.
    if !matches!(ended, Ok(Ended::NotLeader)) {
        tasks.end(GRACE).await;
    }
    ended
}

/// The same with the caller's stop. Ends all it started when `tasks` end.
pub async fn serve(
    tasks: &Tasks,
    args: &Args,
    start: StartControllers,
    stop: impl Future<Output = ()>,
) -> Result<Ended, StartError> {
    let mut stop = std::pin::pin!(stop);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let config = config::read(&args.config)?;
    let mut settings = args.settings(config.cluster_id.as_str(), config.tenant.as_str());
    let leadership =
        if args.leader_elect { Leadership::standby(clock.clone()) } else { Leadership::always(clock.clone()) };
    let kube = KubeClient::new(kube_config(args.kubeconfig.as_deref()).await?, leadership.clone())?;
    if settings.api_endpoint.is_none() {
        settings.api_endpoint = endpoint(kube.server());
    }
    let (health, metrics) = (Arc::new(Health::default()), Metrics::new(clock.clone()));
    if let Some((listener, _)) = listen(&args.health_probe_bind_address).await? {
        http::serve_probes(tasks, listener, health.clone());
    }
    if let Some((listener, _)) = listen(&args.metrics_bind_address).await? {
        http::serve_metrics(tasks, listener, metrics.clone());
    }
    let broken = async {
        let failure = tasks.failure().await;
        health.set_broken();
        failure
    };
    let mut broken = std::pin::pin!(broken);
    tokio::select! {
        biased;
        () = &mut stop => return Ok(Ended::Asked),
        served = check_served(&kube) => served?,
    }
    let mut election = Election::new(
        Arc::new(kube.with_leadership(Leadership::always(clock.clone()))),
        &settings.namespace,
        holder(),
        clock.clone(),
        leadership,
    );
    if args.leader_elect {
        tokio::select! {
            biased;
            () = &mut stop => return Ok(Ended::Asked),
            failure = &mut broken => return Err(failure.into()),
            () = election.acquire() => {}
        }
    }
    metrics.is_leader.set(1);
    let ended = {
        let hold = async { if args.leader_elect { election.hold().await } else { std::future::pending().await } };
        let lead =
            Lead { tasks, args, config, settings, kube, clock, metrics: metrics.clone(), health: health.clone() };
        let work = async {
            match lead.start(start).await {
                Ok(()) => std::future::pending().await,
                Err(error) => error,
            }
        };
        tokio::select! {
            biased;
            () = &mut stop => Ok(Ended::Asked),
            () = hold => Ok(Ended::NotLeader),
            failure = &mut broken => Err(failure.into()),
            error = work => Err(error),
        }
    };
    metrics.is_leader.set(0);
    match &ended {
        Ok(Ended::NotLeader) => tracing::error!("leadership is lost; another process goes on"),
        _ if args.leader_elect => {
            // Effects end before another process may begin.
            tasks.cancel();
            election.release().await;
        }
        _ => {}
    }
    ended
}

async fn kube_config(file: Option<&Path>) -> Result<kube::Config, StartError> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| StartError::Kubeconfig(error);
    let Some(file) = file.filter(|it| !it.as_os_str().is_empty()) else {
        return kube::Config::incluster().map_err(|error| failed(error.into()));
    };
    let kubeconfig = Kubeconfig::read_from(file).map_err(|error| failed(error.into()))?;
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| failed(error.into()))
}

async fn listen(address: &str) -> Result<Option<(TcpListener, String)>, StartError> {
    let Some(address) = bind_address(address) else { return Ok(None) };
    let listener = TcpListener::bind(&address).await;
    // A machine without IPv6.
    let listener = match (listener, address.strip_prefix("[::]:")) {
        (Err(_), Some(port)) => TcpListener::bind(format!("0.0.0.0:{port}")).await,
        (listener, _) => listener,
    };
    let listener = listener.map_err(|source| StartError::Listen { address: address.clone(), source })?;
    Ok(Some((listener, address)))
}

/// Who holds the Lease: the pod, and which process in it.
fn holder() -> String {
    let host = std::env::var("HOSTNAME").ok().filter(|it| !it.is_empty()).unwrap_or_else(|| "operator".to_owned());
    format!("{host}_{}", hex(&SystemEntropy::new(), 8))
}

/// Verifies that Cluster API's kinds and ours are there.
async fn check_served(kube: &KubeClient) -> Result<(), StartError> {
    let groups: [(&str, &str, &[&str], &str); 2] = [
        (
            names::CAPI_GROUP,
            names::CAPI_VERSION,
            &["clusters", "machinepools", "machines"],
            "install Cluster API: `clusterctl init`",
        ),
        (
            names::GROUP,
            names::VERSION,
            &[
                "nstanceclusters",
                "nstancemachinepools",
                "nstanceshardgroups",
                "nstancemachines",
                "nstancemachinetemplates",
            ],
            "install its kinds: `kubectl apply -k config/crd/`",
        ),
    ];
    for (group, version, plurals, command) in groups {
        let served = kube.resources(group, version).await.map_err(StartError::Discovery)?.unwrap_or_default();
        let missing: Vec<&str> = plurals.iter().copied().filter(|it| !served.iter().any(|name| name == it)).collect();
        if !missing.is_empty() {
            let missing = format!("{group}/{version} {}", missing.join(", "));
            return Err(StartError::NotServed { missing, command });
        }
    }
    Ok(())
}

/// Everything of a term.
struct Lead<'a> {
    tasks: &'a Tasks,
    args: &'a Args,
    config: Config,
    settings: Settings,
    kube: KubeClient,
    clock: Arc<dyn Clock>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
}

impl Lead<'_> {
    async fn start(self, start: StartControllers) -> Result<(), StartError> {
        let Self { tasks, args, config, settings, kube, clock, metrics, health } = self;
        health.set_syncing(true);
        let port: Arc<dyn KubePort> = Arc::new(kube.clone());
        let client = kube.watching();
        let events = EventWriter::start(tasks, port.clone(), clock.clone());
        let env = &args.names;
        let names =
            Names::new(&settings.namespace, &env.ca_configmap, &env.cert_secret, &env.key_secret, &env.nonce_secret);
        let network: Arc<dyn Net> = Arc::new(TcpNet);
        let stores = Stores::default();
        let tell = teller(&stores, &settings, events.clone());
        let stale = tell.clone();
        let keeper = Arc::new(Keeper {
            kube: port.clone(),
            names: names.clone(),
            cluster: config.cluster_id.clone(),
            tenant: config.tenant.clone(),
            clock: clock.clone(),
            network: network.clone(),
            on_stale_ca: Box::new(move |error| {
                let message = format!("the CA ConfigMap was not brought up to date: {}", error.message);
                stale(Severity::Warning, Reason::CABundleStale.as_str(), &message);
            }),
        });
        watches::start_all(tasks, &client, &settings.namespace, &stores);
        let identity = keeper.obtain(&config.registration).await?;
        let common = Common { identity: identity.clone(), clock: clock.clone(), network, metrics: metrics.clone() };
        let shards = ShardSet::new(tasks, common);
        let terminating = watch::Sender::new(Terminating::default());
        watches::start_terminating(tasks, &client, &settings.namespace, terminating.clone());
        let workload = match settings.capi_endpoint {
            None => Workload::new(Access::Granted(port.clone())),
            Some(_) => Workload::new(Access::Missing { reason: "Starting", message: String::new() }),
        };
        let ctx = Arc::new(Context {
            settings,
            stores,
            queues: Queues::default(),
            kube: port,
            workload,
            shards: shards.clone(),
            events: events.clone(),
            clock: clock.clone(),
            terminating,
            applied: Applied::default(),
            kubeconfig: watch::Sender::new(Report::unknown()),
            certificate: watch::Sender::new(Report::unknown()),
        });
        start_kubeconfig(tasks, &ctx, &kube, &metrics);
        // Until all is listed, absence proves nothing.
        watches::until_synced(&ctx.stores).await;
        if ctx.settings.capi_endpoint.is_none() {
            ctx.workload.nodes.until_synced().await;
        }
        start(tasks, &ctx, &metrics);
        watches::retell(&ctx.stores);
        ctx.workload.nodes.retell();
        // The listeners of the controllers are in place before the first change of a shard.
        shards.on_fault(fault_events(&ctx));
        shards.configure(&config.operator);
        let registration = watch::Sender::new(config.registration.clone());
        let renewal = Renewal {
            keeper,
            identity,
            shards: shards.clone(),
            registration: registration.subscribe(),
            ctx: ctx.clone(),
            metrics: metrics.clone(),
            tell: {
                let tell = tell.clone();
                Box::new(move |severity, reason: Reason, message: &str| tell(severity, reason.as_str(), message))
            },
            nonce: watches::start_named::<Secret>(
                tasks,
                "watch the nonce",
                &client,
                &names.nonce.namespace,
                &names.nonce.name,
            ),
            ca: watches::start_named::<ConfigMap>(tasks, "watch the CA", &client, &names.ca.namespace, &names.ca.name),
        };
        tasks.spawn_droppable("certificate", renewal.run());
        let file = args.config.clone();
        tasks.spawn_droppable("configuration", follow_config(file, config, shards, registration, tell));
        tasks.spawn_droppable("metrics of queues", take_metrics(ctx.clone(), metrics));
        if !args.disable_webhooks {
            webhook::start(tasks, &ctx, args.webhook_port, &args.webhook_cert_dir).await?;
        }
        health.set_syncing(false);
        tracing::info!("running");
        Ok(())
    }
}

/// Writes an event about the NstanceCluster, or only into the log while there is none.
type Teller = Arc<dyn Fn(Severity, &str, &str) + Send + Sync>;

fn teller(stores: &Stores, settings: &Settings, events: Arc<dyn EventSink>) -> Teller {
    let (clusters, namespace, name) =
        (stores.nstance_clusters.clone(), settings.namespace.clone(), settings.cluster_name());
    Arc::new(move |severity, reason, message| {
        let uid = clusters.named(&namespace, &name).and_then(|it| it.metadata.uid.clone());
        match uid {
            Some(uid) => {
                let object = ObjectRef::new(kinds::NSTANCE_CLUSTER, &namespace, &name);
                events.emit(&About { object, uid }, severity, reason, message);
            }
            None => tracing::info!(reason, message, "event without an object"),
        }
    })
}

fn start_kubeconfig(tasks: &Tasks, ctx: &Arc<Context>, kube: &KubeClient, metrics: &Arc<Metrics>) {
    let (settings, client) = (&ctx.settings, kube.watching());
    let secret = settings.kubeconfig_secret();
    let watched = watches::start_named::<Secret>(tasks, "watch the kubeconfig", &client, &settings.namespace, &secret);
    if settings.capi_endpoint.is_some() {
        let external = ExternalKubeconfig {
            workload: ctx.workload.clone(),
            pods: ctx.stores.pods.clone(),
            leadership: kube.leadership(),
            ctx: ctx.clone(),
            secret,
            watched,
        };
        return tasks.spawn_droppable("kubeconfig", external.run(tasks.clone()));
    }
    watches::start_nodes(tasks, &client, &ctx.workload.nodes);
    watches::start_unscheduled_pods(tasks, &client, &ctx.stores.pods);
    let own = OwnKubeconfig { ctx: ctx.clone(), ca: kube.ca().map(str::to_owned), metrics: metrics.clone(), watched };
    tasks.spawn_droppable("kubeconfig", own.run());
}

/// Errors of shards become events of what they are about: the NstanceMachine, else the NstanceShardGroup.
fn fault_events(ctx: &Arc<Context>) -> Box<dyn Fn(&Fault) + Send + Sync> {
    let ctx = Arc::downgrade(ctx);
    Box::new(move |fault| {
        let Some(ctx) = ctx.upgrade() else { return };
        let namespace = &ctx.settings.namespace;
        let is_it = |it: &crate::api::NstanceMachine| it.spec.instance_id.as_deref() == Some(fault.instance.as_str());
        let machine = Some(&fault.instance).filter(|it| !it.is_empty()).and_then(|id| {
            let by_name = ctx.stores.nstance_machines.named(namespace, id);
            by_name.or_else(|| ctx.stores.nstance_machines.filter(is_it).into_iter().next())
        });
        let about = match machine {
            Some(it) => about(kinds::NSTANCE_MACHINE, &it.metadata),
            None => {
                let name = format!("{}--{}", fault.group, fault.shard);
                ctx.stores
                    .shard_groups
                    .named(namespace, &name)
                    .and_then(|it| about(kinds::NSTANCE_SHARD_GROUP, &it.metadata))
            }
        };
        match about {
            Some(about) => ctx.events.emit(&about, Severity::Warning, &fault.reason, &fault.message),
            None => tracing::warn!(
                shard = fault.shard,
                group = fault.group,
                reason = fault.reason,
                message = fault.message,
                "a shard reports an error"
            ),
        }
    })
}

fn about(kind: crate::ports::ResourceKind, meta: &kube::api::ObjectMeta) -> Option<About> {
    let (namespace, name) = (meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref()?);
    Some(About { object: ObjectRef::new(kind, namespace, name), uid: meta.uid.clone()? })
}

/// Takes over added and removed shards and changed addresses. Never ends by itself.
async fn follow_config(
    file: std::path::PathBuf,
    mut current: Config,
    shards: Arc<ShardSet>,
    registration: watch::Sender<Targets>,
    tell: Teller,
) {
    let mut complained = String::new();
    loop {
        tokio::time::sleep(CONFIG_PERIOD).await;
        let problem = match config::read(&file) {
            Ok(new) if new == current => String::new(),
            Ok(new) if new.cluster_id == current.cluster_id && new.tenant == current.tenant => {
                tracing::info!(shards = %new.operator, "the configuration was changed");
                registration.send_replace(new.registration.clone());
                shards.configure(&new.operator);
                current = new;
                String::new()
            }
            Ok(_) => "cluster_id and tenant cannot be changed in a running operator; restart it".to_owned(),
            Err(error) => Chain(&error).to_string(),
        };
        if !problem.is_empty() && problem != complained {
            let message = format!("the changed configuration is not used: {problem}");
            tracing::warn!(message, "configuration");
            tell(Severity::Warning, Reason::ConfigInvalid.as_str(), &message);
        }
        complained = problem;
    }
}

async fn take_metrics(ctx: Arc<Context>, metrics: Arc<Metrics>) {
    let queues = &ctx.queues;
    loop {
        let depths = [
            (queues.clusters.name(), queues.clusters.len()),
            (queues.import.name(), queues.import.len()),
            (queues.pools.name(), queues.pools.len()),
            (queues.shard_groups.name(), queues.shard_groups.len()),
            (queues.machines.name(), queues.machines.len()),
            (queues.templates.name(), queues.templates.len()),
            (queues.drains.name(), queues.drains.len()),
            (queues.nodes.name(), queues.nodes.len()),
            (queues.pods.name(), queues.pods.len()),
        ];
        for (controller, n) in depths {
            let gauge = metrics.queue_depth.get_or_create(&crate::metrics::ControllerLabels { controller });
            gauge.set(i64::try_from(n).unwrap_or(i64::MAX));
        }
        metrics.import_waiting.set(i64::from(control::import::is_waiting(&ctx)));
        tokio::time::sleep(METRICS_PERIOD).await;
    }
}
