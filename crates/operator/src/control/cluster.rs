//! The Cluster and the NstanceCluster: made where they are missing, and the table of shards kept.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};

use super::{
    context::Context,
    import,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceCluster,
        capi::{Cluster, Meta as _},
        conditions::{self, Status, kind},
        names::{API_VERSION, CAPI_API_VERSION, GROUP, annotation, label, manager},
    },
    cluster::{
        events::{About, Reason, Severity},
        store::ObjectKey,
    },
    decide::{
        cluster::{Existence, LastSeen, StatusInput, control_plane_initialized, existence, status},
        pool::format_label_value,
        scope::Scope,
    },
    ports::{Apply, KubeError, KubeErrorKind, ObjectRef, Target, kinds},
};

/// How often the table of shards is looked at although nothing was told.
const RESYNC: Duration = Duration::from_secs(10);

/// What this process saw of the Cluster. After a restart the key Secret tells what matters.
#[derive(Default)]
pub struct ClusterMemory {
    last_seen: Mutex<Option<LastSeen>>,
}

pub fn connect(ctx: &Arc<Context>) {
    let key = ObjectKey::new(&ctx.settings.namespace, &ctx.settings.cluster_name());
    let wake = || {
        let (queue, key) = (ctx.queues.clusters.clone(), key.clone());
        move || queue.add(key.clone())
    };
    let woken = wake();
    ctx.stores.clusters.on_change(move |_| woken());
    let woken = wake();
    ctx.stores.nstance_clusters.on_change(move |_| woken());
    let woken = wake();
    ctx.shards.on_change(Box::new(move |change| {
        if change.reach {
            woken();
        }
    }));
    wake()();
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (queue, ctx) = (ctx.queues.clusters.clone(), ctx.clone());
    let memory = Arc::new(ClusterMemory::default());
    queue::start(tasks, &queue, 1, metrics, move |_| {
        let (ctx, memory) = (ctx.clone(), memory.clone());
        async move { reconcile(&ctx, &memory).await }
    });
}

pub async fn reconcile(ctx: &Context, memory: &ClusterMemory) -> Result<Next, KubeError> {
    let (namespace, name) = (&ctx.settings.namespace, ctx.settings.cluster_name());
    if !ctx.stores.clusters.is_synced() || !ctx.stores.nstance_clusters.is_synced() {
        return Ok(Next::After(Duration::from_secs(1)));
    }
    let cluster = ctx.cluster();
    let last_seen = {
        let mut last_seen = memory.last_seen.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *last_seen;
        if let Some(cluster) = &cluster {
            *last_seen = Some(LastSeen::of(cluster));
        }
        before
    };
    // Asked only where it decides something.
    let moved = match &cluster {
        Some(cluster) if cluster.annotation(annotation::DELETE_FOR_MOVE).is_none() => false,
        _ => was_moved(ctx).await?,
    };
    match existence(cluster.as_deref(), last_seen, moved) {
        Existence::Moved | Existence::Ending => return Ok(Next::After(RESYNC)),
        Existence::Moving => {
            if !moved {
                remember_move(ctx, &name).await?;
            }
            return Ok(Next::After(RESYNC));
        }
        Existence::Ensure => {}
    }
    if ctx.terminating.borrow().what.is_some() {
        return Ok(Next::After(RESYNC));
    }
    let object = ctx.stores.nstance_clusters.named(namespace, &name);
    if object.as_ref().is_some_and(|it| it.label(annotation::MANAGED_BY).is_some()) {
        return Ok(Next::After(RESYNC));
    }
    if let Some(object) = &object
        && let Scope::Paused { by } = ctx.scope(&**object)
    {
        let mut status = object.status.clone().unwrap_or_default();
        let (generation, now) = (object.metadata.generation, ctx.now());
        conditions::set(
            &mut status.conditions,
            kind::PAUSED,
            Status::True,
            "Paused",
            format!("paused by {by}"),
            generation,
            now,
        );
        apply_status(ctx, object, &name, json!(status)).await?;
        return Ok(Next::After(RESYNC));
    }
    ensure_nstance_cluster(ctx, object.as_deref(), &name).await?;
    ensure_cluster(ctx, cluster.as_deref(), &name).await?;
    if let Some(object) = &object {
        let (views, import) = (ctx.shards.views(), import::plan(ctx));
        let (kubeconfig, certificate) = (ctx.kubeconfig.borrow().clone(), ctx.certificate.borrow().clone());
        let input = StatusInput {
            object,
            views: &views,
            import: &import,
            kubeconfig: &kubeconfig,
            certificate: &certificate,
            now: ctx.now(),
        };
        apply_status(ctx, object, &name, json!(status(&input))).await?;
    }
    if let Some(cluster) = &cluster {
        initialize_control_plane(ctx, cluster, &name).await?;
    }
    Ok(Next::After(RESYNC))
}

async fn was_moved(ctx: &Context) -> Result<bool, KubeError> {
    let secret = ObjectRef::new(kinds::SECRET, &ctx.settings.namespace, &ctx.settings.key_secret);
    let secret = ctx.kube.get(&secret).await?;
    Ok(secret.is_some_and(|it| it["metadata"]["annotations"].get(annotation::MOVED).is_some()))
}

async fn remember_move(ctx: &Context, name: &str) -> Result<(), KubeError> {
    let secret = ObjectRef::new(kinds::SECRET, &ctx.settings.namespace, &ctx.settings.key_secret);
    let patch = json!({"metadata": {"annotations": {annotation::MOVED: "true"}}});
    ctx.kube.merge_patch(&secret, &patch, Target::Main).await?;
    let about = About { object: secret, uid: String::new() };
    let message = format!(
        "Cluster {name} was moved to another management cluster; nothing is made anew here until annotation {} is removed",
        annotation::MOVED
    );
    ctx.events.emit(&about, Severity::Normal, Reason::ClusterMoved.as_str(), &message);
    Ok(())
}

async fn ensure_nstance_cluster(ctx: &Context, object: Option<&NstanceCluster>, name: &str) -> Result<(), KubeError> {
    if object.is_some_and(|it| it.is_terminating()) {
        return Ok(());
    }
    let reference = ObjectRef::new(kinds::NSTANCE_CLUSTER, &ctx.settings.namespace, name);
    let mut body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceCluster",
        "metadata": {
            "name": name,
            "namespace": ctx.settings.namespace,
            "labels": {label::CLUSTER_NAME: format_label_value(name)},
        },
        "spec": {},
    });
    if let Some((host, port)) = &ctx.settings.api_endpoint {
        body["spec"]["controlPlaneEndpoint"] = json!({"host": host, "port": port});
    }
    finish(ctx, &reference, body, object.map(|it| (it.metadata.uid.clone(), json!(it)))).await
}

async fn ensure_cluster(ctx: &Context, cluster: Option<&Cluster>, name: &str) -> Result<(), KubeError> {
    let reference = ObjectRef::new(kinds::CLUSTER, &ctx.settings.namespace, name);
    let body = json!({
        "apiVersion": CAPI_API_VERSION,
        "kind": "Cluster",
        "metadata": {"name": name, "namespace": ctx.settings.namespace},
        "spec": {"infrastructureRef": {"apiGroup": GROUP, "kind": "NstanceCluster", "name": name}},
    });
    finish(ctx, &reference, body, cluster.map(|it| (it.metadata.uid.clone(), json!(it)))).await
}

/// Applies the body; an object that is there is not brought back by it.
async fn finish(
    ctx: &Context,
    reference: &ObjectRef,
    mut body: Value,
    present: Option<(Option<String>, Value)>,
) -> Result<(), KubeError> {
    if let Some(filter) = &ctx.settings.watch_filter {
        body["metadata"]["labels"][label::WATCH_FILTER] = json!(filter);
    }
    if let Some((uid, _)) = &present {
        body["metadata"]["uid"] = json!(uid);
    }
    let how = Apply { manager: manager::SPEC, force: false, target: Target::Main };
    match ctx.apply(reference, &body, how, present.as_ref().map(|(_, whole)| whole)).await {
        Err(error) if error.is_conflict() => Ok(()),
        other => other.map(drop),
    }
}

async fn apply_status(ctx: &Context, object: &NstanceCluster, name: &str, status: Value) -> Result<(), KubeError> {
    let reference = ObjectRef::new(kinds::NSTANCE_CLUSTER, &ctx.settings.namespace, name);
    let body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceCluster",
        "metadata": {"name": name, "namespace": ctx.settings.namespace, "uid": object.metadata.uid},
        "status": status,
    });
    let how = Apply { manager: manager::STATUS, force: true, target: Target::Status };
    match ctx.apply(&reference, &body, how, Some(&json!(object))).await {
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
        other => other.map(drop),
    }
}

/// Once the workload cluster's API answers. Cluster API leaves the condition alone from then on.
async fn initialize_control_plane(ctx: &Context, cluster: &Cluster, name: &str) -> Result<(), KubeError> {
    if ctx.workload.api().is_none() || cluster.is_terminating() || ctx.scope(cluster) != Scope::Act {
        return Ok(());
    }
    let machines = ctx.stores.machines.all();
    if !ctx.stores.machines.is_synced() {
        return Ok(());
    }
    let Some(conditions) = control_plane_initialized(cluster, machines.iter().map(|it| &**it), ctx.now()) else {
        return Ok(());
    };
    let reference = ObjectRef::new(kinds::CLUSTER, &ctx.settings.namespace, name);
    let patch = json!({
        "metadata": {"resourceVersion": cluster.metadata.resource_version},
        "status": {"initialization": {"controlPlaneInitialized": true}, "conditions": conditions},
    });
    match ctx.kube.merge_patch(&reference, &patch, Target::Status).await {
        Err(error) if matches!(error.kind, KubeErrorKind::Conflict | KubeErrorKind::NotFound) => Ok(()),
        other => other.map(drop),
    }
}
