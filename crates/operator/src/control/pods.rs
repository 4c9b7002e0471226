//! Pods that ask for an instance of their own: a Machine is made for each, and deleted when it is not needed any more.
//!
//! User pods get no finalizer and no owner reference: an operator that is down blocks no pod.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_rt::tasks::Tasks;
use serde_json::Value;
use tokio::time::Instant;

use super::{
    context::Context,
    machine::delete,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachine,
        capi::{Machine, Meta as _},
        names::{annotation, manager},
    },
    cluster::{
        events::{About, Reason, Severity},
        store::ObjectKey,
    },
    decide::{
        on_demand::{Place, PodName, PodRequest, Unneeded, request, unneeded},
        scope::{ClusterView, Scope, scope},
    },
    ports::{KubeError, KubeErrorKind, ObjectRef, ResourceKind, kinds},
};

/// How often it is asked whether a pod still needs its instance.
const CLEAN_UP: Duration = Duration::from_secs(30);

/// How long a pod must be done, or be elsewhere, before its instance goes.
const HOLD: Duration = Duration::from_secs(60);

/// Since when instances are not needed. Losing it costs a delay.
#[derive(Default)]
pub struct PodMemory {
    unneeded: Mutex<BTreeMap<PodName, (Unneeded, Instant)>>,
}

impl PodMemory {
    /// Whether this held for long enough.
    fn has_held(&self, pod: &PodName, why: Unneeded) -> bool {
        let now = Instant::now();
        let mut all = self.unneeded.lock().unwrap_or_else(PoisonError::into_inner);
        let since = all.entry(pod.clone()).or_insert((why, now));
        if since.0 != why {
            *since = (why, now);
        }
        !why.must_hold() || HOLD <= now.duration_since(since.1)
    }

    fn forget(&self, pod: &PodName) {
        self.unneeded.lock().unwrap_or_else(PoisonError::into_inner).remove(pod);
    }
}

pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.pods.clone();
    ctx.stores.pods.on_change(move |change| {
        let asks = |it: &Arc<_>| kube::Resource::meta(&**it).annotations.as_ref().is_some_and(is_request);
        if change.new.into_iter().chain(change.old).any(asks) {
            queue.add(change.key.clone());
        }
    });
    let queue = ctx.queues.pods.clone();
    ctx.stores.machines.on_change(move |change| {
        if let Some(pod) = change.new.or(change.old).and_then(|it| pod_of(&**it)) {
            queue.add(ObjectKey::new(&pod.namespace, &pod.name));
        }
    });
    let queue = ctx.queues.pods.clone();
    ctx.stores.nstance_machines.on_change(move |change| {
        if let Some(pod) = change.new.or(change.old).and_then(|it| pod_of(&**it))
            && (change.new.is_none() || change.old.is_none())
        {
            queue.add(ObjectKey::new(&pod.namespace, &pod.name));
        }
    });
    // A Node that comes or goes moves pods.
    let (queue, machines) = (ctx.queues.pods.clone(), ctx.stores.machines.clone());
    ctx.workload.nodes.on_change(move |change| {
        if change.new.is_none() || change.old.is_none() {
            for pod in machines.filter(|it| pod_of(it).is_some()).iter().filter_map(|it| pod_of(&**it)) {
                queue.add(ObjectKey::new(&pod.namespace, &pod.name));
            }
        }
    });
    let (queue, pods) = (ctx.queues.pods.clone(), ctx.stores.pods.clone());
    ctx.stores.clusters.on_change(move |_| {
        for pod in pods.filter(|it| it.annotation(annotation::ON_DEMAND_GROUP).is_some()) {
            queue.add(ObjectKey::of(&*pod));
        }
    });
}

fn is_request(annotations: &BTreeMap<String, String>) -> bool {
    annotations.contains_key(annotation::ON_DEMAND_GROUP)
}

/// The pod that an object was made for.
fn pod_of<K: kube::Resource>(object: &K) -> Option<PodName> {
    PodName::parse(object.annotation(annotation::ON_DEMAND_POD)?)
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (n, queue, ctx) = (ctx.settings.concurrent_reconciles, ctx.queues.pods.clone(), ctx.clone());
    let memory = Arc::new(PodMemory::default());
    queue::start(tasks, &queue, n, metrics, move |key| {
        let (ctx, memory) = (ctx.clone(), memory.clone());
        async move { reconcile(&ctx, &memory, &key).await }
    });
}

/// The objects that were made for one pod.
#[derive(Default)]
struct Made {
    machine: Option<Arc<Machine>>,
    object: Option<Arc<NstanceMachine>>,
}

/// Looks at all pods that had this name, each with the objects that were made for it.
pub async fn reconcile(ctx: &Context, memory: &PodMemory, key: &ObjectKey) -> Result<Next, KubeError> {
    let stores = &ctx.stores;
    let is_known = stores.pods.is_synced() && stores.machines.is_synced() && stores.nstance_machines.is_synced();
    if !is_known || !may_act(ctx) {
        return Ok(Next::After(CLEAN_UP));
    }
    let mut made: BTreeMap<PodName, Made> = BTreeMap::new();
    let is_it =
        |pod: &Option<PodName>| pod.as_ref().is_some_and(|it| it.namespace == key.namespace && it.name == key.name);
    for machine in stores.machines.filter(|it| is_it(&pod_of(it))) {
        if let Some(pod) = pod_of(&*machine) {
            made.entry(pod).or_default().machine = Some(machine);
        }
    }
    for object in stores.nstance_machines.filter(|it| is_it(&pod_of(it))) {
        if let Some(pod) = pod_of(&*object) {
            made.entry(pod).or_default().object = Some(object);
        }
    }
    let unscheduled = stores.pods.get(key);
    if let Some(pod) = &unscheduled
        && let Some(name) = PodName::of(&pod.metadata)
    {
        match request(&pod.metadata, &ctx.shards.names()) {
            Ok(Some(request)) => {
                memory.forget(&name);
                make(ctx, &request, made.remove(&name).unwrap_or_default()).await?;
                clean_up(ctx, memory, made).await?;
                return Ok(Next::After(CLEAN_UP));
            }
            Ok(None) => {}
            Err(problem) => {
                let about = About { object: ObjectRef::new(kinds::POD, &key.namespace, &key.name), uid: name.uid };
                let message = format!("no instance is made for this pod: {problem}");
                ctx.events.emit(&about, Severity::Warning, Reason::ConfigInvalid.as_str(), &message);
            }
        }
    }
    let is_any = !made.is_empty();
    clean_up(ctx, memory, made).await?;
    Ok(if is_any { Next::After(CLEAN_UP) } else { Next::Wait })
}

/// Whether the Cluster lets anything be made or deleted.
fn may_act(ctx: &Context) -> bool {
    let Some(cluster) = ctx.cluster() else { return false };
    let terminating = ctx.terminating.borrow().what.clone();
    scope(&*cluster, ClusterView::Present(&cluster), None, terminating.as_deref()) == Scope::Act
        && !cluster.is_terminating()
}

/// Makes what is missing. What is being deleted is made anew once it is gone.
async fn make(ctx: &Context, request: &PodRequest, made: Made) -> Result<(), KubeError> {
    let is_ending = made.machine.as_ref().is_some_and(|it| it.is_terminating())
        || made.object.as_ref().is_some_and(|it| it.is_terminating());
    if is_ending {
        return Ok(());
    }
    let cluster = ctx.settings.cluster_name();
    let place = Place {
        namespace: &ctx.settings.namespace,
        cluster: &cluster,
        watch_filter: ctx.settings.watch_filter.as_deref(),
    };
    if made.object.is_none() {
        create(ctx, kinds::NSTANCE_MACHINE, &request.nstance_machine(&place)).await?;
    }
    if made.machine.is_none() {
        create(ctx, kinds::MACHINE, &request.machine(&place)).await?;
    }
    Ok(())
}

/// Makes an object, by its name only once.
async fn create(ctx: &Context, kind: ResourceKind, body: &Value) -> Result<(), KubeError> {
    let name = body["metadata"]["name"].as_str().unwrap_or_default();
    let reference = ObjectRef::new(kind, &ctx.settings.namespace, name);
    match ctx.kube.create(&reference, body, manager::SPEC).await {
        Err(error) if error.kind == KubeErrorKind::AlreadyExists => Ok(()),
        other => other.map(drop),
    }
}

/// Deletes what was made for pods that do not need it.
async fn clean_up(ctx: &Context, memory: &PodMemory, made: BTreeMap<PodName, Made>) -> Result<(), KubeError> {
    for (pod, made) in made {
        // Without access nothing is known of the pod.
        let Some(api) = ctx.workload.api() else { return Ok(()) };
        let reference = ObjectRef::new(kinds::POD, &pod.namespace, &pod.name);
        let present = api.get(&reference).await?;
        let node_name = present.as_ref().and_then(|it| it["spec"]["nodeName"].as_str()).unwrap_or_default();
        let node = ctx.workload.nodes.named("", node_name);
        let Some(why) = unneeded(&pod, present.as_ref(), made.object.as_deref(), node.as_deref()) else {
            memory.forget(&pod);
            continue;
        };
        if !memory.has_held(&pod, why) {
            continue;
        }
        let (kind, meta) = match (&made.machine, &made.object) {
            (Some(machine), _) => (kinds::MACHINE, &machine.metadata),
            (None, Some(object)) => (kinds::NSTANCE_MACHINE, &object.metadata),
            (None, None) => continue,
        };
        if meta.deletion_timestamp.is_some() {
            continue;
        }
        let machine = ObjectRef::new(kind, &ctx.settings.namespace, meta.name.as_deref().unwrap_or_default());
        if why == Unneeded::BoundElsewhere {
            let message = format!("runs on Node {node_name}; {machine}, made for it, is deleted");
            let about = About { object: reference, uid: pod.uid.clone() };
            ctx.events.emit(&about, Severity::Normal, Reason::InstanceDeleted.as_str(), &message);
        }
        delete(ctx, &machine, meta.uid.as_deref()).await?;
        memory.forget(&pod);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
