//! Keeps stores up to date: one task per kind, each with its own list and watch.
//!
//! A watch that broke off is taken up again; where that is not possible, the whole list is read and replaces what the store
//! holds. What nothing reads (managed fields, images of Nodes) is dropped before it is kept.

use std::{fmt::Debug, sync::Arc, time::Duration};

use futures::StreamExt as _;
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Namespace, Node, Pod},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Resource,
    core::PartialObjectMeta,
    runtime::watcher::{self, Event},
};
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::SystemEntropy, tasks::Tasks};
use serde::de::DeserializeOwned;
use tokio::{sync::Notify, time::timeout};

use super::store::{ObjectKey, Store};
use crate::{
    api::names::{CAPI_GROUP, GROUP},
    control::context::{Stores, Terminating},
};

const FIRST_WAIT: Duration = Duration::from_millis(200);
const MAX_WAIT: Duration = Duration::from_secs(10);
/// For one page of a list. A watch notices by itself that its connection is dead, a list does not.
const PAGE_LIMIT: Duration = Duration::from_secs(30);
/// How long one watch request lasts, for kinds whose loss hurts: a connection that died silently is noticed then.
const SHORT_WATCH_SECONDS: u32 = 60;

/// Starts to keep a store. `strip` drops what is not to be kept.
pub fn start<K>(
    tasks: &Tasks,
    name: &'static str,
    api: Api<K>,
    config: watcher::Config,
    strip: fn(&mut K),
    store: Arc<Store<K>>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    tasks.spawn_droppable(name, run(name, api, config, strip, store, None));
}

/// Never ends by itself. `listed` is notified after each complete list.
async fn run<K>(
    name: &'static str,
    api: Api<K>,
    config: watcher::Config,
    strip: fn(&mut K),
    store: Arc<Store<K>>,
    listed: Option<Arc<Notify>>,
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, MAX_WAIT), SystemEntropy::new());
    'streams: loop {
        let mut stream = Box::pin(watcher::watcher(api.clone(), config.clone()));
        let mut list = Vec::new();
        let mut is_watching = false;
        loop {
            let next = if is_watching { Ok(stream.next().await) } else { timeout(PAGE_LIMIT, stream.next()).await };
            let event = match next {
                Ok(Some(Ok(event))) => event,
                Ok(Some(Err(error))) => {
                    tracing::warn!(watch = name, error = %Chain(&error), "the watch broke off; it is taken up again");
                    is_watching = false;
                    tokio::time::sleep(backoff.next(&entropy)).await;
                    continue;
                }
                Ok(None) | Err(_) => {
                    tracing::debug!(watch = name, "no answer to a list; it is asked for again");
                    tokio::time::sleep(backoff.next(&entropy)).await;
                    continue 'streams;
                }
            };
            backoff.reset();
            match event.modify(|it| {
                it.meta_mut().managed_fields = None;
                strip(it);
            }) {
                Event::Init => list.clear(),
                Event::InitApply(object) => list.push(object),
                Event::InitDone => {
                    is_watching = true;
                    store.replace_all(std::mem::take(&mut list));
                    if let Some(listed) = &listed {
                        listed.notify_one();
                    }
                }
                Event::Apply(object) => {
                    is_watching = true;
                    store.put(object);
                }
                Event::Delete(object) => {
                    is_watching = true;
                    store.remove(&ObjectKey::of(&object));
                }
            }
        }
    }
}

fn keep<K>(_: &mut K) {}

fn strip_node(node: &mut Node) {
    if let Some(status) = &mut node.status {
        status.images = None;
    }
}

/// Starts the watches of our namespace: our kinds and Cluster API's.
pub fn start_all(tasks: &Tasks, client: &kube::Client, namespace: &str, stores: &Stores) {
    fn one<K>(tasks: &Tasks, name: &'static str, client: &kube::Client, namespace: &str, store: &Arc<Store<K>>)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
    {
        let api = Api::namespaced(client.clone(), namespace);
        start(tasks, name, api, watcher::Config::default(), keep, store.clone());
    }
    one(tasks, "watch Clusters", client, namespace, &stores.clusters);
    one(tasks, "watch NstanceClusters", client, namespace, &stores.nstance_clusters);
    one(tasks, "watch MachinePools", client, namespace, &stores.machine_pools);
    one(tasks, "watch NstanceMachinePools", client, namespace, &stores.pools);
    one(tasks, "watch NstanceShardGroups", client, namespace, &stores.shard_groups);
    one(tasks, "watch NstanceMachines", client, namespace, &stores.nstance_machines);
    one(tasks, "watch NstanceMachineTemplates", client, namespace, &stores.templates);
    one(tasks, "watch MachineDrainRules", client, namespace, &stores.drain_rules);
    let short = watcher::Config::default().timeout(SHORT_WATCH_SECONDS);
    start(tasks, "watch Machines", Api::namespaced(client.clone(), namespace), short, keep, stores.machines.clone());
}

/// Resolves when the first complete list of every kind was read.
pub async fn until_synced(stores: &Stores) {
    stores.clusters.until_synced().await;
    stores.nstance_clusters.until_synced().await;
    stores.machine_pools.until_synced().await;
    stores.pools.until_synced().await;
    stores.shard_groups.until_synced().await;
    stores.machines.until_synced().await;
    stores.nstance_machines.until_synced().await;
    stores.templates.until_synced().await;
    stores.drain_rules.until_synced().await;
}

/// Tells the listeners of every object that is known.
pub fn retell(stores: &Stores) {
    stores.clusters.retell();
    stores.nstance_clusters.retell();
    stores.machine_pools.retell();
    stores.pools.retell();
    stores.shard_groups.retell();
    stores.machines.retell();
    stores.nstance_machines.retell();
    stores.templates.retell();
    stores.drain_rules.retell();
    stores.pods.retell();
}

/// Starts the watch of all Nodes. The result is notified after each complete list.
pub fn start_nodes(tasks: &Tasks, client: &kube::Client, store: &Arc<Store<Node>>) -> Arc<Notify> {
    let listed = Arc::new(Notify::new());
    let config = watcher::Config::default().timeout(SHORT_WATCH_SECONDS);
    let api = Api::all(client.clone());
    let watch = run("watch Nodes", api, config, strip_node, store.clone(), Some(listed.clone()));
    tasks.spawn_droppable("watch Nodes", watch);
    listed
}

/// Starts the watch of pods that no node was chosen for, of all namespaces, metadata only. One that leaves the store is
/// scheduled or gone.
pub fn start_unscheduled_pods(tasks: &Tasks, client: &kube::Client, store: &Arc<Store<PartialObjectMeta<Pod>>>) {
    let config = watcher::Config::default().fields("spec.nodeName=");
    start(tasks, "watch unscheduled pods", Api::all(client.clone()), config, keep, store.clone());
}

/// Starts the watch of one named object, for example a Secret.
pub fn start_named<K>(
    tasks: &Tasks,
    name: &'static str,
    client: &kube::Client,
    namespace: &str,
    object: &str,
) -> Arc<Store<K>>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + Sync
        + 'static,
{
    let store = Store::new();
    let config = watcher::Config::default().fields(&format!("metadata.name={object}"));
    start(tasks, name, Api::namespaced(client.clone(), namespace), config, keep, store.clone());
    store
}

/// Tells whether our namespace or a kind that we need is being deleted.
pub fn start_terminating(
    tasks: &Tasks,
    client: &kube::Client,
    namespace: &str,
    terminating: tokio::sync::watch::Sender<Terminating>,
) {
    let namespaces: Arc<Store<PartialObjectMeta<Namespace>>> = Store::new();
    let crds: Arc<Store<PartialObjectMeta<CustomResourceDefinition>>> = Store::new();
    let (all_namespaces, all_crds) = (Arc::downgrade(&namespaces), Arc::downgrade(&crds));
    let look = Arc::new(move || {
        let (Some(namespaces), Some(crds)) = (all_namespaces.upgrade(), all_crds.upgrade()) else { return };
        let what = what_terminates(&namespaces.all(), &crds.all());
        terminating.send_if_modified(|it| {
            let is_new = it.what != what;
            it.what = what;
            is_new
        });
    });
    let again = look.clone();
    namespaces.on_change(move |_| again());
    crds.on_change(move |_| look());
    let config = watcher::Config::default().fields(&format!("metadata.name={namespace}"));
    start(tasks, "watch our Namespace", Api::all(client.clone()), config, keep, namespaces);
    start(tasks, "watch CRDs", Api::all(client.clone()), watcher::Config::default(), keep, crds);
}

fn what_terminates(
    namespaces: &[Arc<PartialObjectMeta<Namespace>>],
    crds: &[Arc<PartialObjectMeta<CustomResourceDefinition>>],
) -> Option<String> {
    let name = |meta: &kube::api::ObjectMeta| meta.name.clone().unwrap_or_default();
    let is_going = |meta: &kube::api::ObjectMeta| meta.deletion_timestamp.is_some();
    let is_needed = |name: &str| {
        let kinds = ["clusters", "machinepools", "machines", "machinedrainrules"];
        let ours = name.strip_suffix(GROUP).is_some_and(|it| it.starts_with("nstance"));
        ours || name.split_once('.').is_some_and(|(plural, group)| group == CAPI_GROUP && kinds.contains(&plural))
    };
    let namespace = namespaces.iter().find(|it| is_going(&it.metadata));
    let namespace = namespace.map(|it| format!("Namespace {}", name(&it.metadata)));
    namespace.or_else(|| {
        let crd = crds.iter().map(|it| &it.metadata).find(|meta| is_going(meta) && is_needed(&name(meta)))?;
        Some(format!("CustomResourceDefinition {}", name(crd)))
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn going<K: Default>(name: &str) -> Arc<PartialObjectMeta<K>> {
        let mut object = PartialObjectMeta::default();
        object.metadata.name = Some(name.to_owned());
        object.metadata.deletion_timestamp = Some(Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH));
        Arc::new(object)
    }

    #[test]
    fn the_end_of_our_namespace_or_of_a_kind_that_we_need_is_noticed() {
        assert_eq!(what_terminates(&[going("default")], &[]), Some("Namespace default".to_owned()));
        let needed = ["machinepools.cluster.x-k8s.io", "nstancemachines.infrastructure.cluster.x-k8s.io"];
        for name in needed {
            assert_eq!(what_terminates(&[], &[going(name)]), Some(format!("CustomResourceDefinition {name}")));
        }
        for name in ["machinesets.cluster.x-k8s.io", "awsclusters.infrastructure.cluster.x-k8s.io", "x.example.com"] {
            assert_eq!(what_terminates(&[], &[going(name)]), None, "{name}");
        }
    }
}
