//! NstanceMachines: on-demand instances are asked for and deleted, members of pools follow their Machines, and both show
//! what their shards and Nodes say.

mod member;

mod on_demand;

mod wake;

use std::{sync::Arc, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};

pub use self::wake::connect;
use super::{
    apply::Outcome,
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachine,
        capi::{Machine, Meta as _},
        conditions::{self, Status, kind},
        names::{API_VERSION, annotation, finalizer, label, manager},
    },
    cluster::{
        events::{About, Reason, Severity},
        store::ObjectKey,
    },
    decide::{
        machine::{Hold, InstanceView, NodeView, OURS, StatusInput, is_pool_member, refers_to, status},
        node_match::{self, NodeMatch},
        scope::Scope,
    },
    ports::{Apply, KubeError, ObjectRef, Progress, Propagation, Target, Wish, WishKey, kinds},
};

/// How often a machine is looked at although nothing was told.
const RESYNC: Duration = Duration::from_secs(30);

/// When an instance that the picture does not have is asked for again.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// What is wished for an NstanceMachine, one topic each.
const CREATE: &str = "create-instance";
const DESCRIBE: &str = "instance-status";
const DELETE: &str = "delete-instance";
const REPLACE: &str = "replace-instance";

/// The drain coordinator's word on a Node.
const DRAINED: &str = "Drained";

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (n, queue, ctx) = (ctx.settings.concurrent_reconciles, ctx.queues.machines.clone(), ctx.clone());
    queue::start(tasks, &queue, n, metrics, move |key| {
        let ctx = ctx.clone();
        async move { reconcile(&ctx, &key).await }
    });
}

pub async fn reconcile(ctx: &Context, key: &ObjectKey) -> Result<Next, KubeError> {
    let reference = ObjectRef::new(kinds::NSTANCE_MACHINE, &key.namespace, &key.name);
    let Some(object) = ctx.stores.nstance_machines.get(key) else {
        ctx.forget_applied(&reference);
        for shard in ctx.shards.names() {
            for topic in [CREATE, DESCRIBE, DELETE, REPLACE] {
                ctx.shards.withdraw(&shard, &WishKey { object: reference.clone(), topic });
            }
        }
        return member::left_over(ctx, key).await;
    };
    let it = Reconcile { ctx, key, object, reference };
    match ctx.scope(&*it.object) {
        Scope::HandsOff { .. } => Ok(Next::After(RESYNC)),
        Scope::Paused { by } => it.pause(by).await,
        Scope::Orphan { what } => it.orphan(&what).await,
        Scope::Act if is_pool_member(&it.object) => it.member().await,
        Scope::Act => it.on_demand().await,
    }
}

/// One NstanceMachine, while it is reconciled.
struct Reconcile<'a> {
    ctx: &'a Context,
    key: &'a ObjectKey,
    object: Arc<NstanceMachine>,
    reference: ObjectRef,
}

impl Reconcile<'_> {
    fn about(&self) -> About {
        About { object: self.reference.clone(), uid: self.object.metadata.uid.clone().unwrap_or_default() }
    }

    fn emit(&self, severity: Severity, reason: Reason, message: &str) {
        self.ctx.events.emit(&self.about(), severity, reason.as_str(), message);
    }

    fn wish_key(&self, topic: &'static str) -> WishKey {
        WishKey { object: self.reference.clone(), topic }
    }

    fn ask(&self, shard: &str, topic: &'static str, wish: Wish) -> Progress {
        self.ctx.shards.ask(shard, &self.wish_key(topic), wish)
    }

    fn withdraw(&self, topic: &'static str) {
        if let Some(shard) = &self.object.spec.shard {
            self.ctx.shards.withdraw(shard, &self.wish_key(topic));
        }
    }

    /// The Machine whose infrastructure this is.
    fn machine(&self) -> Option<Arc<Machine>> {
        machine_of(self.ctx, self.key)
    }

    async fn pause(&self, by: &str) -> Result<Next, KubeError> {
        for topic in [CREATE, DELETE, REPLACE] {
            self.withdraw(topic);
        }
        let mut status = self.object.status.clone().unwrap_or_default();
        status.drain = None;
        status.conditions.retain(|it| OURS.contains(&it.type_.as_str()));
        let generation = self.object.metadata.generation;
        let message = format!("paused by {by}");
        let now = self.ctx.now();
        conditions::set(&mut status.conditions, kind::PAUSED, Status::True, "Paused", message, generation, now);
        self.apply_status(json!(status)).await?;
        Ok(Next::After(RESYNC))
    }

    /// The API that stores it is being removed: the VM stays.
    async fn orphan(&self, what: &str) -> Result<Next, KubeError> {
        for topic in [CREATE, DESCRIBE, DELETE, REPLACE] {
            self.withdraw(topic);
        }
        if self.object.is_terminating() && self.object.has_finalizer(finalizer::MACHINE) {
            let id = self.object.spec.instance_id.as_deref().unwrap_or("none");
            let message = format!("{what} is being removed; the instance ({id}) stays");
            self.emit(Severity::Warning, Reason::GroupOrphaned, &message);
            self.drop_finalizer().await?;
        }
        Ok(Next::After(RESYNC))
    }

    async fn drop_finalizer(&self) -> Result<(), KubeError> {
        self.ctx.drop_finalizer(&self.reference, &self.object.metadata, finalizer::MACHINE).await?;
        Ok(())
    }

    /// Writes the status and tells what became of the machine since the last one.
    async fn show(&self, view: &InstanceView, hold: Option<&Hold>) -> Result<(), KubeError> {
        let node = node_of(self.ctx, &self.object, view);
        let new = status(&StatusInput { object: &self.object, view, node, hold, now: self.ctx.now() });
        let old = self.object.status.as_ref().map(|it| it.conditions.as_slice()).unwrap_or_default();
        let became = |name: &str, status: &str| {
            let is = |all: &[Condition]| conditions::find(all, name).is_some_and(|it| it.status == status);
            (!is(old) && is(&new.conditions)).then(|| conditions::find(&new.conditions, name)).flatten()
        };
        if let Some(it) = became(kind::BOOT_SUCCEEDED, "False") {
            self.emit(Severity::Warning, Reason::BootFailed, &it.message);
        }
        if let Some(it) = became(kind::SERVER_DELETED, "True") {
            self.emit(Severity::Normal, Reason::InstanceDeleted, &it.message);
        }
        if let Some(hold) = hold.filter(|it| it.is_stalled) {
            self.emit(Severity::Warning, Reason::ConfigInvalid, &hold.message);
        }
        if let Some(instance) = view.instance()
            && let Some(message) = &instance.failure_message
            && became(kind::BOOT_SUCCEEDED, "False").is_none()
        {
            self.emit(Severity::Warning, Reason::ProviderError, message);
        }
        self.apply_status(json!(new)).await
    }

    async fn apply_status(&self, status: Value) -> Result<(), KubeError> {
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceMachine",
            "metadata": {"name": self.key.name, "namespace": self.key.namespace, "uid": self.object.metadata.uid},
            "status": status,
        });
        let how = Apply { manager: manager::STATUS, force: true, target: Target::Status };
        match self.ctx.apply(&self.reference, &body, how, Some(&json!(*self.object))).await {
            Ok(Outcome::Unchanged | Outcome::Applied | Outcome::Conflict) => Ok(()),
            // It is gone, or another one of its name.
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn machine_of(ctx: &Context, key: &ObjectKey) -> Option<Arc<Machine>> {
    let is_it =
        |it: &Machine| it.metadata.namespace.as_deref() == Some(key.namespace.as_str()) && refers_to(it, &key.name);
    // Usually it has the same name.
    let namesake = ctx.stores.machines.get(key).filter(|it| is_it(it));
    namesake.or_else(|| ctx.stores.machines.filter(is_it).into_iter().next())
}

/// The Node of an instance. Several candidates are none.
fn node_of(ctx: &Context, object: &NstanceMachine, view: &InstanceView) -> NodeView {
    if ctx.workload.api().is_none() {
        return NodeView::Unknown;
    }
    let Some(id) = object.spec.instance_id.as_deref() else { return NodeView::None };
    // Usually its Node is labelled already.
    let mut nodes = ctx.workload.nodes.filter(|it| it.label(label::INSTANCE_ID) == Some(id));
    if nodes.is_empty() {
        nodes = ctx.workload.nodes.all();
    }
    let matched = view.instance().map(|it| node_match::node_of(it, &nodes));
    matched.as_ref().and_then(NodeMatch::node).map_or(NodeView::None, |it| NodeView::Found(it.clone()))
}

/// Changes annotations of a Machine. `false` if it is gone or another one of its name.
async fn annotate(ctx: &Context, machine: &Machine, annotations: Value) -> Result<bool, KubeError> {
    let reference = machine_reference(machine);
    let patch = json!({"metadata": {"uid": machine.metadata.uid, "annotations": annotations}});
    match ctx.kube.merge_patch(&reference, &patch, Target::Main).await {
        Ok(_) => Ok(true),
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Deletes the Machine of an instance that is gone: Cluster API has nothing to drain and nothing to wait for.
async fn delete_machine(ctx: &Context, machine: &Machine) -> Result<(), KubeError> {
    if machine.is_terminating() {
        return Ok(());
    }
    let is_excluded = machine.annotation(annotation::EXCLUDE_NODE_DRAINING).is_some()
        && machine.annotation(annotation::EXCLUDE_WAIT_FOR_VOLUME_DETACH).is_some();
    let exclude = json!({
        annotation::EXCLUDE_NODE_DRAINING: "true",
        annotation::EXCLUDE_WAIT_FOR_VOLUME_DETACH: "true",
    });
    if !is_excluded && !annotate(ctx, machine, exclude).await? {
        return Ok(());
    }
    delete(ctx, &machine_reference(machine), machine.metadata.uid.as_deref()).await
}

/// Deletes this very object. Another one of its name is left alone.
pub(super) async fn delete(ctx: &Context, reference: &ObjectRef, uid: Option<&str>) -> Result<(), KubeError> {
    match ctx.kube.delete(reference, uid, Propagation::Background).await {
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
        other => other,
    }
}

fn machine_reference(machine: &Machine) -> ObjectRef {
    let ObjectKey { namespace, name } = ObjectKey::of(machine);
    ObjectRef::new(kinds::MACHINE, &namespace, &name)
}

#[cfg(test)]
mod tests;
