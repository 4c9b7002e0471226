//! The node keeper: the kubelet's part for every node whose agent lives, and, where no controller manager and no
//! scheduler run, as much of theirs as nodes and pods need.

mod budgets;
mod instance;
mod nodes;
mod plane;
mod pods;
mod registered;
mod taints;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kube::Client;
use nstance_core::{
    ports::clock::Clock,
    time::{Mono, Timestamp},
};
use nstance_rt::{chain::Chain, tasks::Tasks};
use serde_json::{Value, json};
use tokio::sync::Notify;

use self::{nodes::NodeFacts, plane::Binding, registered::Registered};
use crate::{
    effect::{Effect, Planned, Target, Via},
    execute::{Executor, api, request},
    kinds::Kind,
    object::{Key, Object},
    options::{ControlPlane, KeeperOptions, Options, Timing},
    picture::{Feed, Picture, feed},
    rounds::Rounds,
    watch::{Source, Unserved, follow},
};

/// How often the disk is looked at for new nodes and ended agents, and pods for their end.
const LOOK: Duration = Duration::from_millis(500);

/// Names of nodes whose heartbeats are held back on purpose.
pub(crate) type Broken = Arc<Mutex<BTreeSet<String>>>;

pub(crate) fn start(tasks: &Tasks, client: &Client, options: &Options, keeper: &KeeperOptions, broken: Broken) {
    let mut kinds = vec![Kind::Node, Kind::Pod, Kind::Lease];
    if keeper.plane == ControlPlane::Absent {
        kinds.push(Kind::PodDisruptionBudget);
    }
    let picture = feed();
    for kind in &kinds {
        let source = Source {
            client: client.clone(),
            kind: *kind,
            namespace: lease_namespace(*kind),
            unserved: Unserved::IsUnknown,
        };
        follow(tasks, source, Arc::clone(&picture));
    }
    let keeper = Keeper {
        executor: Executor::new(client.clone(), "kubelet"),
        registered: Registered::of(keeper.nodes_dir.as_deref()),
        options: keeper.clone(),
        timing: options.timing.clone(),
        clock: Arc::clone(&options.clock),
        broken,
        kinds,
        has_lease_namespace: false,
        disk: None,
    };
    tasks.spawn_droppable("node keeper", keeper.run(picture));
}

fn lease_namespace(kind: Kind) -> Option<String> {
    (kind == Kind::Lease).then(|| nodes::LEASES.to_owned())
}

struct Keeper {
    executor: Executor,
    registered: Registered,
    options: KeeperOptions,
    timing: Timing,
    clock: Arc<dyn Clock>,
    broken: Broken,
    kinds: Vec<Kind>,
    has_lease_namespace: bool,
    /// The last look, and when it was.
    disk: Option<(Mono, Arc<Disk>)>,
}

/// What the disk says.
struct Disk {
    /// `None`: there is no directory of node files, every Node is ours.
    files: Option<BTreeMap<String, Value>>,
    /// By name of the Node.
    facts: BTreeMap<String, NodeFacts>,
    broken: BTreeSet<String>,
}

impl Keeper {
    async fn run(mut self, feed: Feed) {
        let mut rounds = Rounds::new(&feed, Arc::new(Notify::new()), LOOK.min(self.timing.resync));
        loop {
            let picture = rounds.next().await;
            if picture.is_complete(&self.kinds) {
                self.round(&picture).await;
            }
        }
    }

    async fn round(&mut self, picture: &Picture) {
        let disk = match self.look(picture).await {
            Ok(disk) => disk,
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "node files not read, keeping no node this time");
                return;
            }
        };
        self.ensure_lease_namespace(picture).await;
        if let Some(files) = disk.files.as_ref().filter(|_| !self.options.api_is_file_backed) {
            self.register(picture, files).await;
        }
        let now = self.clock.now();
        let mut planned = self.keep(picture, &disk, now);
        if self.options.plane == ControlPlane::Absent {
            self.govern(picture, &disk, now, &mut planned).await;
        }
        self.executor.execute(planned, &BTreeMap::new()).await;
    }

    /// What the disk says, not older than [`LOOK`]: the keeper's own writes start rounds too, and many nodes have many
    /// files.
    async fn look(&mut self, picture: &Picture) -> std::io::Result<Arc<Disk>> {
        let now = self.clock.monotonic();
        if let Some((at, disk)) = &self.disk {
            let is_same = disk.broken == *self.broken.lock().unwrap_or_else(PoisonError::into_inner);
            let is_complete = picture.all(Kind::Node).all(|it| disk.facts.contains_key(it.name()));
            if now.since(*at) < LOOK && is_same && is_complete {
                return Ok(Arc::clone(disk));
            }
        }
        let disk = Arc::new(self.read(picture).await?);
        self.disk = Some((now, Arc::clone(&disk)));
        Ok(disk)
    }

    /// Reads files and processes; on another thread, since a disk may be slow.
    async fn read(&self, picture: &Picture) -> std::io::Result<Disk> {
        let names: Vec<(String, String)> =
            picture.all(Kind::Node).map(|it| (it.name().to_owned(), instance_of(it))).collect();
        let (nodes_dir, instances_dir) = (self.options.nodes_dir.clone(), self.options.instances_dir.clone());
        let broken = self.broken.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let look = move || {
            let files = nodes_dir.as_deref().map(instance::node_files).transpose()?;
            let facts = |name: &str, instance: &str| match &instances_dir {
                _ if broken.contains(name) => NodeFacts::default(),
                None => NodeFacts { is_alive: true, labels: BTreeMap::new() },
                Some(dir) => NodeFacts {
                    is_alive: instance::is_agent_alive(dir, instance),
                    labels: instance::node_labels(dir, instance),
                },
            };
            let facts = names.iter().map(|(name, instance)| (name.clone(), facts(name, instance))).collect();
            Ok(Disk { files, facts, broken })
        };
        tokio::task::spawn_blocking(look).await.unwrap_or_else(|error| Err(std::io::Error::other(error)))
    }

    /// A real server makes it by itself; dev-k8s does not.
    async fn ensure_lease_namespace(&mut self, picture: &Picture) {
        if self.has_lease_namespace || picture.all(Kind::Node).next().is_none() {
            return;
        }
        match request(api(self.executor.own(), Kind::Namespace, "").get_opt(nodes::LEASES)).await {
            Ok(Some(_)) => self.has_lease_namespace = true,
            Ok(None) => {
                let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": nodes::LEASES } });
                let target = Target { via: Via::Own, kind: Kind::Namespace, key: Key::new("", nodes::LEASES) };
                self.executor
                    .execute(vec![Planned { target, effect: Effect::Create { object } }], &BTreeMap::new())
                    .await;
            }
            Err(error) => tracing::debug!(error = %Chain(&error), "namespace of node leases not read"),
        }
    }

    /// Creates each Node once. After a crash between creation and note the Node is there, and is noted then.
    async fn register(&mut self, picture: &Picture, files: &BTreeMap<String, Value>) {
        self.registered.forget_all_but(files);
        // A Node that is there was registered, by an earlier keeper perhaps.
        for name in files.keys().filter(|it| picture.get(Kind::Node, "", it).is_some()) {
            self.registered.note(name);
        }
        let new = nodes::to_register(picture, files, self.registered.names());
        let mut planned = Vec::new();
        for (name, file) in new {
            planned.push((name.to_owned(), nodes::registration(name, file)));
        }
        for (name, registration) in planned {
            let Effect::Create { object } = &registration.effect else { continue };
            let node = serde_json::from_value(object.clone()).map_err(kube::Error::SerdeError);
            let nodes = api(self.executor.own(), Kind::Node, "");
            let created = match node {
                Ok(node) => request(nodes.create(&Default::default(), &node)).await,
                Err(error) => Err(crate::execute::RequestError::Refused(error)),
            };
            match created {
                Ok(_) => self.registered.note(&name),
                Err(error) if error.is_already_there() => self.registered.note(&name),
                Err(error) => tracing::warn!(node = name, error = %Chain(&error), "node not registered, trying again"),
            }
        }
    }

    fn keep(&self, picture: &Picture, disk: &Disk, now: Timestamp) -> Vec<Planned> {
        let mut planned = Vec::new();
        let file = |name: &str| disk.files.as_ref().and_then(|it| it.get(name));
        let is_ours = |name: &str| disk.files.is_none() || file(name).is_some();
        for node in picture.all(Kind::Node).filter(|it| is_ours(it.name())) {
            if let Some(facts) = disk.facts.get(node.name()) {
                nodes::heartbeat(picture, node, facts, file(node.name()), self.timing.heartbeat, now, &mut planned);
            }
        }
        for pod in picture.all(Kind::Pod) {
            let name = pod.text("/spec/nodeName");
            if is_ours(name) && disk.facts.get(name).is_some_and(|it| it.is_alive) {
                pods::keep(pod, self.timing.pod_end, now, &mut planned);
            }
        }
        planned
    }

    /// The part of controller manager and scheduler.
    async fn govern(&self, picture: &Picture, disk: &Disk, now: Timestamp, planned: &mut Vec<Planned>) {
        // A node that renews its Lease in this very round is not lost, however old the Lease that we see.
        let is_silent = |it: &&Arc<Object>| {
            let is_ours = disk.files.as_ref().is_none_or(|files| files.contains_key(it.name()));
            let is_alive = is_ours && disk.facts.get(it.name()).is_some_and(|facts| facts.is_alive);
            !is_alive || it.at("/spec/taints").is_array()
        };
        for node in picture.all(Kind::Node).filter(is_silent) {
            plane::judge_node(picture, node, self.timing.node_grace, now, planned);
        }
        for budget in picture.all(Kind::PodDisruptionBudget) {
            budgets::judge(picture, budget, now, planned);
        }
        for pod in picture.all(Kind::Pod).filter(|it| !it.text("/spec/nodeName").is_empty()) {
            match picture.get(Kind::Node, "", pod.text("/spec/nodeName")) {
                Some(node) => plane::evict_by_taint(pod, node, now, planned),
                None => {
                    if self.is_node_gone(pod.text("/spec/nodeName")).await {
                        plane::delete_pod(pod, Some(0), planned);
                    }
                }
            }
        }
        let binding = if self.options.api_is_file_backed { Binding::Patch } else { Binding::Subresource };
        plane::schedule(picture, binding, now, planned);
    }

    /// The watch of Nodes may be behind that of pods, so the server is asked before a pod goes.
    async fn is_node_gone(&self, name: &str) -> bool {
        let node = request(api(self.executor.own(), Kind::Node, "").get_opt(name)).await;
        matches!(node, Ok(None))
    }
}

/// The instance behind a Node: by its label, else by its name.
fn instance_of(node: &Object) -> String {
    node.label("nstance.dev/instance-id").unwrap_or(node.name()).to_owned()
}
