//! Members of pools: the hook on their Machines, replacement of what is deleted or unhealthy, and their end.

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::{DRAINED, REPLACE, RESYNC, Reconcile, annotate, delete_machine, machine_of, machine_reference};
use crate::{
    api::{
        NstanceMachine, NstanceMachinePool,
        capi::{Machine, Meta as _},
        names::{annotation, finalizer, label},
    },
    cluster::{
        events::{Reason, Severity},
        store::ObjectKey,
    },
    control::{context::Context, queue::Next},
    decide::{
        machine::{
            HookChange, InstanceView, MemberInput, MemberPlan, Removal, RemovalInput, instance_view, member, removal,
        },
        observed::InstanceStatus,
        scope::Scope,
    },
    ports::{KubeError, Target, Wish},
};

/// The value of our hook: who holds it.
const HOOK_OWNER: &str = "nstance-operator";

const OWNER_REMEDIATED: &str = "OwnerRemediated";

impl Reconcile<'_> {
    pub(super) async fn member(&self) -> Result<Next, KubeError> {
        let (ctx, object) = (self.ctx, &self.object);
        let shard = object.spec.shard.as_deref().and_then(|it| ctx.shards.view(it));
        let view = instance_view(object, shard.as_ref(), None);
        let machine = self.machine();
        let pool = self.pool();
        let plan = member(&MemberInput {
            object: Some(object),
            machine: machine.as_deref(),
            view: &view,
            is_ending: self.is_ending(pool.as_deref()),
            is_node_drained: is_node_drained(ctx, object),
        });
        self.replace(&plan);
        if let Some(machine) = &machine {
            carry_out(ctx, &plan, machine).await?;
        }
        self.show(&view, None).await?;
        if object.is_terminating() && object.has_finalizer(finalizer::MACHINE) {
            // That a pool is absent is believed only from a complete list.
            let is_pool_known = pool.is_some() || ctx.stores.pools.is_synced();
            let input = RemovalInput {
                object,
                view: &view,
                is_shard_configured: shard.is_some(),
                created: None,
                pool: pool.as_deref(),
            };
            match removal(&input) {
                Removal::Drop if view.is_gone() || is_pool_known => self.drop_finalizer().await?,
                Removal::ShardRemoved => {
                    let shard = object.spec.shard.as_deref().unwrap_or("none");
                    let message = format!("shard {shard} is not in the operator's config any more; the instance stays");
                    self.emit(Severity::Warning, Reason::ShardRemoved, &message);
                    self.drop_finalizer().await?;
                }
                _ => {}
            }
        }
        Ok(Next::After(RESYNC))
    }

    /// The pool that owns it, the very one.
    fn pool(&self) -> Option<Arc<NstanceMachinePool>> {
        let owners = self.object.metadata.owner_references.iter().flatten();
        let owner = owners.into_iter().find(|it| it.kind == "NstanceMachinePool")?;
        let pool = self.ctx.stores.pools.named(&self.key.namespace, &owner.name)?;
        (pool.metadata.uid.as_deref() == Some(owner.uid.as_str())).then_some(pool)
    }

    /// Whether all members go, so that none of them is to be replaced.
    fn is_ending(&self, pool: Option<&NstanceMachinePool>) -> bool {
        let stores = &self.ctx.stores;
        if self.ctx.cluster().is_some_and(|it| it.is_terminating()) {
            return true;
        }
        let Some(pool) = pool else { return stores.pools.is_synced() };
        let name = pool.metadata.name.as_deref().unwrap_or_default();
        let machine_pools = stores.machine_pools.filter(|it| {
            let infrastructure = &it.spec.template.spec.infrastructure_ref;
            it.metadata.namespace.as_deref() == Some(self.key.namespace.as_str())
                && infrastructure.kind == "NstanceMachinePool"
                && infrastructure.name == name
        });
        let has_living = machine_pools.iter().any(|it| !it.is_terminating());
        pool.is_terminating() || (stores.machine_pools.is_synced() && !has_living)
    }

    fn replace(&self, plan: &MemberPlan) {
        let (Some(shard), Some(id)) = (&self.object.spec.shard, &self.object.spec.instance_id) else { return };
        match plan.replace {
            // Refused as it is leaving already: that is what was wanted.
            Some(reason) => {
                let wish = Wish::ReplaceInstance { id: id.clone(), reason: reason.to_owned() };
                self.ask(shard, REPLACE, wish);
            }
            None => self.withdraw(REPLACE),
        }
    }
}

async fn carry_out(ctx: &Context, plan: &MemberPlan, machine: &Machine) -> Result<(), KubeError> {
    match plan.hook {
        HookChange::Keep => {}
        HookChange::Add => {
            annotate(ctx, machine, json!({annotation::PRE_DRAIN_HOOK: HOOK_OWNER})).await?;
        }
        HookChange::Remove => {
            let change = json!({annotation::PRE_DRAIN_HOOK: null, annotation::EXCLUDE_NODE_DRAINING: "true"});
            annotate(ctx, machine, change).await?;
        }
        HookChange::RemoveOfGone => {
            let change = json!({
                annotation::PRE_DRAIN_HOOK: null,
                annotation::EXCLUDE_NODE_DRAINING: "true",
                annotation::EXCLUDE_WAIT_FOR_VOLUME_DETACH: "true",
            });
            annotate(ctx, machine, change).await?;
        }
    }
    if plan.set_remediated {
        set_remediated(ctx, machine).await?;
    }
    if plan.delete_machine {
        delete_machine(ctx, machine).await?;
    }
    Ok(())
}

/// Takes back what a health check said of a Machine that has recovered.
async fn set_remediated(ctx: &Context, machine: &Machine) -> Result<(), KubeError> {
    let mut conditions = machine.status.as_ref().map(|it| it.conditions.clone()).unwrap_or_default();
    let Some(condition) = conditions.iter_mut().find(|it| it.type_ == OWNER_REMEDIATED) else { return Ok(()) };
    condition.status = "True".to_owned();
    condition.reason = "Recovered".to_owned();
    condition.message = "the health check succeeds again".to_owned();
    condition.last_transition_time = Time(ctx.now());
    // A merge patch replaces the whole list: only of the version that was read.
    let patch = json!({
        "metadata": {"resourceVersion": machine.metadata.resource_version},
        "status": {"conditions": conditions},
    });
    match ctx.kube.merge_patch(&machine_reference(machine), &patch, Target::Status).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether the drain coordinator finished this instance's drain.
fn is_node_drained(ctx: &Context, object: &NstanceMachine) -> bool {
    let Some(id) = object.spec.instance_id.as_deref() else { return false };
    let is_it = |annotation: Option<&str>, wanted: &str| annotation == Some(wanted);
    let drained = ctx.workload.nodes.filter(|it| {
        is_it(it.annotation(annotation::DRAIN_INSTANCE_ID), id)
            && is_it(it.annotation(annotation::DRAIN_STATE), DRAINED)
    });
    !drained.is_empty()
}

/// A Machine whose NstanceMachine is gone. Cluster API made it anew while that was still there, or does not know yet.
pub(super) async fn left_over(ctx: &Context, key: &ObjectKey) -> Result<Next, KubeError> {
    if !ctx.stores.nstance_machines.is_synced() {
        return Ok(Next::After(RESYNC));
    }
    let Some(machine) = machine_of(ctx, key) else { return Ok(Next::Wait) };
    if machine.label(label::POOL_NAME).is_none() || ctx.scope(&*machine) != Scope::Act {
        return Ok(Next::Wait);
    }
    let plan = member(&MemberInput {
        object: None,
        machine: Some(&machine),
        view: &unowned_view(ctx, &machine, &key.name),
        is_ending: false,
        is_node_drained: false,
    });
    carry_out(ctx, &plan, &machine).await?;
    Ok(Next::After(RESYNC))
}

/// The instance of this id, on the Machine's shard, or on any if that is not known.
fn unowned_view(ctx: &Context, machine: &Machine, id: &str) -> InstanceView {
    let domain = machine.spec.failure_domain.as_deref();
    let views = ctx.shards.views();
    let mut is_complete = domain.map_or(!views.is_empty(), |domain| views.iter().any(|it| it.name == domain));
    for view in views.iter().filter(|it| domain.is_none_or(|domain| it.name == domain)) {
        match view.picture.as_deref().map(|it| it.instances.get(id)) {
            Some(Some(it)) if matches!(it.status, InstanceStatus::Deleted | InstanceStatus::Failed) => {}
            Some(Some(instance)) => return InstanceView::Present(instance.clone()),
            Some(None) => {}
            None => is_complete = false,
        }
    }
    if is_complete { InstanceView::Gone } else { InstanceView::Unknown }
}
