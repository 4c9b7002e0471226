//! Import: makes pools for groups that shards have and Kubernetes does not.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};

use super::{
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        capi::Meta as _,
        names::{API_VERSION, CAPI_API_VERSION, GROUP, annotation, label, manager},
    },
    cluster::events::{About, Reason, Severity},
    decide::{
        import::{ImportPlan, NewPool, import},
        pool::{format_label_value, refers_to},
        scope::Scope,
    },
    ports::{KubeError, KubeErrorKind, ObjectRef, kinds},
};

/// New groups are told by the streams; this is for what they missed.
const RESYNC: Duration = Duration::from_secs(30);

pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.import.clone();
    ctx.shards.on_change(Box::new(move |change| {
        if change.reach || !change.groups.is_empty() {
            queue.add(());
        }
    }));
    let queue = ctx.queues.import.clone();
    ctx.stores.pools.on_change(move |change| {
        if change.new.is_none() || change.old.is_none() {
            queue.add(());
        }
    });
    let queue = ctx.queues.import.clone();
    ctx.stores.machine_pools.on_change(move |change| {
        if change.new.is_none() {
            queue.add(());
        }
    });
    let queue = ctx.queues.import.clone();
    ctx.stores.nstance_clusters.on_change(move |_| queue.add(()));
    let queue = ctx.queues.import.clone();
    ctx.stores.clusters.on_change(move |_| queue.add(()));
    ctx.queues.import.add(());
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (queue, ctx) = (ctx.queues.import.clone(), ctx.clone());
    queue::start(tasks, &queue, 1, metrics, move |()| {
        let ctx = ctx.clone();
        async move { reconcile(&ctx).await }
    });
}

/// What import would do now; also told in a condition of the NstanceCluster.
pub fn plan(ctx: &Context) -> ImportPlan {
    let cluster = ctx.stores.nstance_clusters.named(&ctx.settings.namespace, &ctx.settings.cluster_name());
    let ignored: BTreeSet<String> = cluster
        .as_ref()
        .and_then(|it| it.annotation(annotation::IGNORE_SHARDS))
        .map(|it| it.split(',').map(|it| it.trim().to_owned()).collect())
        .unwrap_or_default();
    let pools = ctx.stores.pools.all();
    import(&ctx.shards.views(), &ignored, |group| pools.iter().any(|it| it.spec.group == group))
}

/// Whether pools are not made because shards have not told what they have.
pub fn is_waiting(ctx: &Context) -> bool {
    let has_cluster = ctx.cluster().is_some_and(|it| !it.is_terminating() && ctx.scope(&*it) == Scope::Act);
    has_cluster && !plan(ctx).waiting.is_empty()
}

pub async fn reconcile(ctx: &Context) -> Result<Next, KubeError> {
    if !ctx.stores.pools.is_synced() || !ctx.stores.machine_pools.is_synced() {
        return Ok(Next::After(Duration::from_secs(1)));
    }
    // Without a Cluster there is nothing to import into, and from one that is being deleted everything goes.
    let Some(cluster) = ctx.cluster() else { return Ok(Next::After(RESYNC)) };
    if cluster.is_terminating() || ctx.scope(&*cluster) != Scope::Act {
        return Ok(Next::After(RESYNC));
    }
    let plan = plan(ctx);
    if let Some(object) = ctx.stores.nstance_clusters.named(&ctx.settings.namespace, &ctx.settings.cluster_name()) {
        let reference = ObjectRef::new(kinds::NSTANCE_CLUSTER, &ctx.settings.namespace, &ctx.settings.cluster_name());
        let about = About { object: reference, uid: object.metadata.uid.clone().unwrap_or_default() };
        if !plan.waiting.is_empty() {
            let message = format!("import waits for shards {}", plan.waiting.join(", "));
            ctx.events.emit(&about, Severity::Warning, Reason::ImportWaiting.as_str(), &message);
        }
        for message in &plan.different {
            ctx.events.emit(&about, Severity::Warning, Reason::ConfigInvalid.as_str(), message);
        }
    }
    for pool in &plan.pools {
        create(ctx, pool).await?;
    }
    Ok(Next::After(RESYNC))
}

/// The MachinePool first: a pool without one would have no number of replicas. Names are fixed, so that a repeated
/// import finds what an earlier one made.
async fn create(ctx: &Context, pool: &NewPool) -> Result<(), KubeError> {
    let (name, namespace) = (pool.name(), &ctx.settings.namespace);
    let reference = ObjectRef::new(kinds::NSTANCE_MACHINE_POOL, namespace, &name);
    if let Some(taken) = ctx.stores.machine_pools.named(namespace, &name) {
        if taken.is_terminating() {
            // It takes the new pool with it. It wakes us when it is gone.
            return Ok(());
        }
        if !refers_to(&taken, &name) {
            tracing::warn!(
                group = %pool.group,
                machine_pool = %name,
                "not imported: a MachinePool of that name is for something else"
            );
            return Ok(());
        }
    }
    let machine_pool = ObjectRef::new(kinds::MACHINE_POOL, namespace, &name);
    let mut body = machine_pool_body(ctx, &name);
    body["metadata"]["labels"][label::GROUP] = json!(pool.group);
    body["metadata"]["annotations"] = json!({annotation::IMPORTED: "true"});
    body["spec"]["replicas"] = json!(pool.replicas);
    allow_existing(ctx.kube.create(&machine_pool, &body, manager::IMPORT).await)?;
    let created = allow_existing(ctx.kube.create(&reference, &pool_body(ctx, pool, &name), manager::IMPORT).await)?;
    if let Some(created) = created {
        let uid = created["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
        let message =
            format!("imported group {} from {} with {} replicas", pool.group, pool.shards.join(", "), pool.replicas);
        ctx.events.emit(&About { object: reference, uid }, Severity::Normal, Reason::GroupImported.as_str(), &message);
    }
    Ok(())
}

fn allow_existing(created: Result<Value, KubeError>) -> Result<Option<Value>, KubeError> {
    match created {
        Ok(created) => Ok(Some(created)),
        Err(error) if error.kind == KubeErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

fn pool_body(ctx: &Context, pool: &NewPool, name: &str) -> Value {
    let mut body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceMachinePool",
        "metadata": {
            "name": name,
            "namespace": ctx.settings.namespace,
            "labels": {
                label::GROUP: pool.group,
                label::CLUSTER_NAME: format_label_value(&ctx.settings.cluster_name()),
            },
            "annotations": {annotation::IMPORTED: "true"},
        },
        "spec": {"group": pool.group, "shards": pool.shards, "deletionPolicy": "Orphan"},
    });
    let layer = &pool.layer;
    let set = |body: &mut Value, key: &str, value: &Option<String>| {
        if let Some(value) = value {
            body["spec"][key] = json!(value);
        }
    };
    set(&mut body, "template", &layer.template);
    set(&mut body, "subnetPool", &layer.subnet_pool);
    set(&mut body, "instanceType", &layer.instance_type);
    if !layer.vars.is_empty() {
        body["spec"]["vars"] = json!(layer.vars);
    }
    if let Some(filter) = &ctx.settings.watch_filter {
        body["metadata"]["labels"][label::WATCH_FILTER] = json!(filter);
    }
    body
}

/// The fields of a pool's MachinePool that are ours.
pub fn machine_pool_body(ctx: &Context, pool_name: &str) -> Value {
    let cluster = ctx.settings.cluster_name();
    let mut body = json!({
        "apiVersion": CAPI_API_VERSION,
        "kind": "MachinePool",
        "metadata": {
            "name": pool_name,
            "namespace": ctx.settings.namespace,
            "labels": {label::CLUSTER_NAME: format_label_value(&cluster)},
        },
        "spec": {
            "clusterName": cluster,
            "template": {"spec": {
                "clusterName": cluster,
                "bootstrap": {"dataSecretName": ""},
                "infrastructureRef": {"apiGroup": GROUP, "kind": "NstanceMachinePool", "name": pool_name},
            }},
        },
    });
    if let Some(filter) = &ctx.settings.watch_filter {
        body["metadata"]["labels"][label::WATCH_FILTER] = json!(filter);
    }
    body
}
