//! The Cluster API stand-in: what the core controllers of Cluster API do with Clusters, MachinePools and Machines, and
//! no more. Decisions are pure and look at the whole picture; a loop takes them anew on every change and carries them out.

mod cluster;
mod connection;
mod control_plane;
mod drain;
mod kubeconfig;
mod machine;
mod machine_deletion;
mod machinepool;
mod names;
mod node;
mod pool_machines;
#[cfg(test)]
mod tests;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::Client;
use nstance_core::{
    ports::clock::Clock,
    time::{Mono, Timestamp},
};
use nstance_rt::{chain::Chain, tasks::Tasks};
use tokio::sync::Notify;

use self::{
    connection::Connections,
    kubeconfig::OwnApi,
    machine::{DrainOrder, DrainScope},
    view::{Connection, ControlPlane, DrainOutcome, View},
};
use crate::{
    effect::Planned,
    execute::Executor,
    kinds::Kind,
    object::{Key, Object},
    options::{Options, Timing},
    picture::{Feed, Picture, feed},
    rounds::Rounds,
    watch::{Source, Unserved, follow},
};

/// Whose fields they are in managedFields; users see this name in conflicts.
const MANAGER: &str = "capi-manager";

pub(crate) fn start(tasks: &Tasks, client: &Client, options: &Options) {
    let wake = Arc::new(Notify::new());
    let own = OwnApi { client: client.clone(), config: options.own_api.clone() };
    let connections = Connections::new(tasks, own, options.timing.clone(), Arc::clone(&wake));
    let picture = feed();
    for kind in Kind::CAPI {
        let source = Source {
            client: client.clone(),
            kind,
            namespace: options.namespace.clone(),
            unserved: Unserved::IsUnknown,
        };
        follow(tasks, source, Arc::clone(&picture));
    }
    let stand_in = StandIn {
        executor: Executor::new(client.clone(), MANAGER),
        connections,
        clock: Arc::clone(&options.clock),
        timing: options.timing.clone(),
        memory: Memory::default(),
    };
    tasks.spawn_droppable("cluster api stand-in", stand_in.run(picture, wake));
}

/// What is remembered from round to round; losing it costs repeated work only.
#[derive(Default)]
struct Memory {
    control_planes: BTreeMap<Key, ControlPlane>,
    drains: BTreeMap<String, DrainOutcome>,
    /// When a drain was last tried, and with which scope.
    tried: BTreeMap<String, (Mono, DrainScope)>,
    replicas: BTreeMap<String, i64>,
}

struct StandIn {
    executor: Executor,
    connections: Connections,
    clock: Arc<dyn Clock>,
    timing: Timing,
    memory: Memory,
}

impl StandIn {
    async fn run(mut self, feed: Feed, wake: Arc<Notify>) {
        let mut rounds = Rounds::new(&feed, wake, self.timing.resync);
        loop {
            let picture = rounds.next().await;
            if picture.is_complete(&Kind::CAPI) {
                self.round(&picture).await;
            }
        }
    }

    async fn round(&mut self, picture: &Picture) {
        self.keep_connections(picture);
        self.read_control_planes(picture).await;
        let connections = self.connections.view();
        let (planned, orders) = self.memory.decide(picture, &connections, self.clock.now());
        self.executor.execute(planned, &self.connections.clients()).await;
        self.drain(picture, orders).await;
        self.memory.forget(picture);
    }

    /// Core connects once the infrastructure of a Cluster is provisioned, and goes on while the Cluster is being deleted.
    fn keep_connections(&self, picture: &Picture) {
        let provisioned = || {
            let clusters = picture.all(Kind::Cluster);
            clusters.filter(|it| it.flag("/status/initialization/infrastructureProvisioned"))
        };
        let watched = provisioned().filter(|it| it.is_true("ControlPlaneInitialized")).map(|it| it.key());
        self.connections.keep(&provisioned().map(|it| it.key()).collect(), watched.collect());
    }

    async fn read_control_planes(&mut self, picture: &Picture) {
        let mut found = BTreeMap::new();
        for cluster in picture.all(Kind::Cluster).filter(|it| !it.text("/spec/controlPlaneRef/name").is_empty()) {
            match control_plane::read(self.executor.own(), cluster).await {
                Ok(Some(control_plane)) => drop(found.insert(cluster.key(), control_plane)),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(cluster = %cluster.key(), error = %Chain(&error), "control plane not read");
                    // What could not be read is what it was.
                    if let Some(before) = self.memory.control_planes.get(&cluster.key()) {
                        found.insert(cluster.key(), before.clone());
                    }
                }
            }
        }
        self.memory.control_planes = found;
    }

    async fn drain(&mut self, picture: &Picture, orders: Vec<DrainOrder>) {
        let now = self.clock.monotonic();
        let clients = self.connections.clients();
        let is_due = |order: &DrainOrder| match self.memory.tried.get(&order.uid) {
            Some((at, scope)) => *scope != order.scope || self.timing.drain_retry <= now.since(*at),
            None => true,
        };
        let due: Vec<DrainOrder> = orders.into_iter().filter(is_due).collect();
        let wall = self.clock.now();
        let attempts = due.iter().filter_map(|order| {
            let client = clients.get(&order.cluster)?;
            Some(async move { (order, drain::attempt(client, picture, order, wall).await) })
        });
        for (order, outcome) in futures::future::join_all(attempts).await {
            self.memory.tried.insert(order.uid.clone(), (now, order.scope));
            self.memory.drains.insert(order.uid.clone(), outcome);
        }
    }
}

impl Memory {
    /// Everything that is to be done now. One object that makes no sense changes nothing for the others.
    fn decide(
        &mut self,
        picture: &Picture,
        connections: &BTreeMap<Key, Connection>,
        now: Timestamp,
    ) -> (Vec<Planned>, Vec<DrainOrder>) {
        let (mut planned, mut orders) = (Vec::new(), Vec::new());
        let is_master = |it: &&Arc<Object>| it.label(names::CONTROL_PLANE).is_some();
        let masters: Vec<Arc<Object>> = picture.all(Kind::Machine).filter(is_master).cloned().collect();
        let view = View {
            picture,
            connections,
            control_planes: &self.control_planes,
            drains: &self.drains,
            replicas: &self.replicas,
            masters: &masters,
            now,
        };
        for it in picture.all(Kind::Cluster) {
            cluster::decide(view, it, &mut planned);
        }
        for it in picture.all(Kind::MachinePool) {
            machinepool::decide(view, it, &mut planned);
        }
        for it in picture.all(Kind::Machine) {
            machine::decide(view, it, &mut planned, &mut orders);
        }
        for it in picture.all(Kind::MachinePool) {
            if let Some(replicas) = it.number("/spec/replicas") {
                self.replicas.insert(it.uid().to_owned(), replicas);
            }
        }
        (planned, orders)
    }

    fn forget(&mut self, picture: &Picture) {
        let uids = |kind: Kind| picture.all(kind).map(|it| it.uid()).collect::<BTreeSet<&str>>();
        let (machines, pools) = (uids(Kind::Machine), uids(Kind::MachinePool));
        self.drains.retain(|uid, _| machines.contains(uid.as_str()));
        self.tried.retain(|uid, _| machines.contains(uid.as_str()));
        self.replicas.retain(|uid, _| pools.contains(uid.as_str()));
    }
}
