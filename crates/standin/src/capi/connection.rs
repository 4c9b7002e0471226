//! One connection per Cluster. Without a working kubeconfig Secret it is looked for again at a fixed interval; while
//! connected the Secret is not read again, and a token that is refused ends the connection.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use kube::Client;
use nstance_rt::{chain::Chain, tasks::Tasks};
use tokio::sync::{Notify, watch};

use super::{
    kubeconfig::{OwnApi, connect, probe},
    view::{Connection, Nodes},
};
use crate::{
    kinds::Kind,
    object::Key,
    options::Timing,
    picture::{Feed, feed},
    watch::{Source, Unserved, follow},
};

/// A connection that does not answer this often in a row is given up.
const MAX_FAILURES: u32 = 5;

#[derive(Clone)]
enum Link {
    Down { why: String },
    Up { client: Client, nodes: Feed },
}

/// All connections. Cloned freely.
#[derive(Clone)]
pub(crate) struct Connections {
    own: OwnApi,
    timing: Timing,
    tasks: Tasks,
    links: Arc<watch::Sender<BTreeMap<Key, Link>>>,
    /// The scope of each Cluster's task.
    running: Arc<Mutex<BTreeMap<Key, Tasks>>>,
    /// Clusters whose Nodes wake the loop. The others' changes are seen at the next round, as core does it.
    watched: Arc<Mutex<BTreeSet<Key>>>,
    wake: Arc<Notify>,
}

impl Connections {
    pub(crate) fn new(tasks: &Tasks, own: OwnApi, timing: Timing, wake: Arc<Notify>) -> Self {
        Self {
            own,
            timing,
            tasks: tasks.clone(),
            links: Arc::new(watch::Sender::new(BTreeMap::new())),
            running: Arc::default(),
            watched: Arc::default(),
            wake,
        }
    }

    /// Connects to these Clusters and ends the connections to all others.
    pub(crate) fn keep(&self, clusters: &BTreeSet<Key>, watched: BTreeSet<Key>) {
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = watched;
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.retain(|cluster, tasks| {
            let stays = clusters.contains(cluster);
            if !stays {
                tasks.cancel();
                self.links.send_modify(|links| drop(links.remove(cluster)));
            }
            stays
        });
        for cluster in clusters.iter().filter(|it| !running.contains_key(*it)).cloned().collect::<Vec<_>>() {
            let tasks = self.tasks.child();
            let (this, scope) = (self.clone(), tasks.clone());
            let key = cluster.clone();
            tasks.spawn_droppable("workload connection", async move { this.run(&key, &scope).await });
            running.insert(cluster, tasks);
        }
    }

    /// What decisions see.
    pub(crate) fn view(&self) -> BTreeMap<Key, Connection> {
        let view = |link: &Link| match link {
            Link::Down { why } => Connection::Down { why: why.clone() },
            Link::Up { nodes, .. } => match nodes.borrow().objects(Kind::Node) {
                Some(nodes) => Connection::Up { nodes: Nodes::new(Arc::clone(nodes)) },
                None => Connection::Down { why: "the first list of Nodes has not ended".to_owned() },
            },
        };
        self.links.borrow().iter().map(|(cluster, link)| (cluster.clone(), view(link))).collect()
    }

    pub(crate) fn clients(&self) -> BTreeMap<Key, Client> {
        let links = self.links.borrow();
        let clients = links.iter().filter_map(|(cluster, link)| match link {
            Link::Up { client, .. } => Some((cluster.clone(), client.clone())),
            Link::Down { .. } => None,
        });
        clients.collect()
    }

    fn set(&self, cluster: &Key, link: Link) {
        self.links.send_modify(|links| drop(links.insert(cluster.clone(), link)));
        self.wake.notify_one();
    }

    async fn run(&self, cluster: &Key, scope: &Tasks) {
        loop {
            match connect(&self.own, cluster).await {
                Ok(client) => {
                    tracing::info!(%cluster, "connected to the workload cluster");
                    let nodes = feed();
                    let connected = scope.child();
                    let source = Source {
                        client: client.clone(),
                        kind: Kind::Node,
                        namespace: None,
                        unserved: Unserved::IsUnknown,
                    };
                    follow(&connected, source, Arc::clone(&nodes));
                    self.forward(&connected, cluster.clone(), &nodes);
                    self.set(cluster, Link::Up { client: client.clone(), nodes });
                    let why = self.until_lost(&client).await;
                    connected.cancel();
                    tracing::warn!(%cluster, why, "connection to the workload cluster lost");
                    self.set(cluster, Link::Down { why });
                }
                Err(error) => {
                    let why = Chain(&error).to_string();
                    tracing::info!(%cluster, why, retry_in = ?self.timing.kubeconfig_retry, "workload cluster not connected");
                    self.set(cluster, Link::Down { why });
                }
            }
            tokio::time::sleep(self.timing.kubeconfig_retry).await;
        }
    }

    async fn until_lost(&self, client: &Client) -> String {
        let mut n_failures = 0;
        loop {
            tokio::time::sleep(self.timing.connection_probe).await;
            match probe(client).await {
                Ok(()) => n_failures = 0,
                Err(error) => {
                    n_failures += 1;
                    if error.is_unauthorized() || MAX_FAILURES <= n_failures {
                        return Chain(&error).to_string();
                    }
                }
            }
        }
    }

    fn forward(&self, tasks: &Tasks, cluster: Key, nodes: &Feed) {
        let mut changes = nodes.subscribe();
        let this = self.clone();
        tasks.spawn_droppable("workload nodes", async move {
            let mut is_first = true;
            while changes.changed().await.is_ok() {
                let is_watched = this.watched.lock().unwrap_or_else(PoisonError::into_inner).contains(&cluster);
                if is_first || is_watched {
                    this.wake.notify_one();
                }
                is_first = false;
            }
        });
    }
}
