//! NstanceMachinePools: replicas become sizes of shard groups, instances become NstanceMachines.

mod delete;
mod owner;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachine, NstanceMachinePool, NstanceShardGroup,
        capi::{Machine, Meta as _},
        conditions::{self, Status, kind},
        names::{API_VERSION, annotation, finalizer, label, manager},
    },
    cluster::{events::About, store::ObjectKey},
    decide::{
        capacity::{autoscaler_annotations, capacity},
        observed::ShardView,
        pool::{
            Hints, PoolInput, ProviderIds, Sizes, StatusInput, format_label_value, hints, members, owner_of_group,
            provider_ids, remove_first, shard_group_name, sizes, status, used_hints,
        },
        scope::Scope,
    },
    ports::{Apply, KubeError, ObjectRef, Propagation, Selector, Target, kinds},
};

/// How often a pool is looked at although nothing was told.
const RESYNC: Duration = Duration::from_secs(30);

/// How long a write that would drop many ids without proof is held.
const HOLD_DROPS: Duration = Duration::from_secs(30);

/// The first few blocked pods that a pool's condition names.
const MAX_BLOCKED: usize = 5;

/// What the controller remembers beside the objects. Losing it costs a delay.
#[derive(Default)]
pub struct PoolMemory {
    /// Since when a pool's list of provider ids waits to drop ids without proof.
    held: Mutex<BTreeMap<ObjectKey, Instant>>,
    /// Imported pools whose import manager was dropped from the managed fields.
    released: Mutex<std::collections::BTreeSet<ObjectKey>>,
}

pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.pools.clone();
    let store = ctx.stores.pools.clone();
    ctx.stores.pools.on_change(move |change| {
        queue.add(change.key.clone());
        // Which of several pools of one group is the oldest may have changed.
        let group = change.new.or(change.old).map(|it| it.spec.group.clone());
        if change.new.is_none() || change.old.is_none() {
            for pool in store.filter(|it| Some(&it.spec.group) == group.as_ref()) {
                queue.add(ObjectKey::of(&*pool));
            }
        }
    });
    let queue = ctx.queues.pools.clone();
    ctx.stores.machine_pools.on_change(move |change| {
        for machine_pool in change.new.into_iter().chain(change.old) {
            queue.add(ObjectKey::new(&change.key.namespace, &machine_pool.spec.template.spec.infrastructure_ref.name));
        }
    });
    let queue = ctx.queues.pools.clone();
    ctx.stores.shard_groups.on_change(move |change| wake_owner(&queue, change.new.or(change.old).map(|it| &**it)));
    let queue = ctx.queues.pools.clone();
    ctx.stores.nstance_machines.on_change(move |change| wake_owner(&queue, change.new.or(change.old).map(|it| &**it)));
    let (queue, members) = (ctx.queues.pools.clone(), ctx.stores.nstance_machines.clone());
    ctx.stores.machines.on_change(move |change| {
        let Some(machine) = change.new.or(change.old) else { return };
        let member = members.named(&change.key.namespace, &machine.spec.infrastructure_ref.name);
        wake_owner(&queue, member.as_deref());
    });
    let (queue, pools) = (ctx.queues.pools.clone(), ctx.stores.pools.clone());
    ctx.shards.on_change(Box::new(move |change| {
        let is_concerned = |it: &NstanceMachinePool| {
            change.reach
                || change.groups.contains(&it.spec.group)
                || change.instances.iter().any(|instance| instance.group() == Some(&it.spec.group))
        };
        for pool in pools.filter(is_concerned) {
            queue.add(ObjectKey::of(&*pool));
        }
    }));
}

/// Wakes the pool that owns an object.
fn wake_owner<K: kube::Resource>(queue: &queue::Queue<ObjectKey>, object: Option<&K>) {
    let Some(meta) = object.map(kube::Resource::meta) else { return };
    let owners = meta.owner_references.iter().flatten().filter(|it| it.kind == "NstanceMachinePool");
    for owner in owners {
        queue.add(ObjectKey::new(meta.namespace.as_deref().unwrap_or_default(), &owner.name));
    }
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (n, queue, ctx) = (ctx.settings.concurrent_reconciles, ctx.queues.pools.clone(), ctx.clone());
    let memory = Arc::new(PoolMemory::default());
    queue::start(tasks, &queue, n, metrics, move |key| {
        let (ctx, memory) = (ctx.clone(), memory.clone());
        async move { reconcile(&ctx, &memory, &key).await }
    });
}

/// One pool, while it is reconciled.
struct Reconcile<'a> {
    ctx: &'a Context,
    memory: &'a PoolMemory,
    key: &'a ObjectKey,
    pool: Arc<NstanceMachinePool>,
    reference: ObjectRef,
}

pub async fn reconcile(ctx: &Context, memory: &PoolMemory, key: &ObjectKey) -> Result<Next, KubeError> {
    let reference = ObjectRef::new(kinds::NSTANCE_MACHINE_POOL, &key.namespace, &key.name);
    let Some(pool) = ctx.stores.pools.get(key) else {
        ctx.forget_applied(&reference);
        memory.held.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        memory.released.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        return Ok(Next::Wait);
    };
    let it = Reconcile { ctx, memory, key, pool, reference };
    match ctx.scope(&*it.pool) {
        Scope::HandsOff { .. } => Ok(Next::After(RESYNC)),
        Scope::Paused { by } => it.say(kind::PAUSED, Status::True, "Paused", format!("paused by {by}")).await,
        Scope::Orphan { what } => it.orphan_all(&what).await,
        Scope::Act if it.pool.is_terminating() => it.delete().await,
        Scope::Act => it.act().await,
    }
}

impl Reconcile<'_> {
    fn about(&self) -> About {
        About { object: self.reference.clone(), uid: self.pool.metadata.uid.clone().unwrap_or_default() }
    }

    async fn act(&self) -> Result<Next, KubeError> {
        let ctx = self.ctx;
        let pools = ctx.stores.pools.filter(|it| it.metadata.namespace == self.pool.metadata.namespace);
        let oldest = owner_of_group(&pools, &self.pool.spec.group);
        if let Some(oldest) = oldest.filter(|it| it.metadata.uid != self.pool.metadata.uid) {
            let name = oldest.metadata.name.as_deref().unwrap_or_default();
            let message = format!(
                "group {} already belongs to NstanceMachinePool {name}; delete one of the two",
                self.pool.spec.group
            );
            return self.say(kind::READY, Status::False, "DuplicateGroup", message).await;
        }
        if !ctx.ensure_finalizer(&self.reference, &self.pool.metadata, finalizer::POOL).await? {
            return Ok(Next::Wait);
        }
        let Some(machine_pool) = self.machine_pool().await? else {
            let message = format!(
                "no MachinePool refers to this pool; make one, or annotate the pool {}=true",
                annotation::CREATE_MACHINE_POOL
            );
            return self.say(kind::READY, Status::False, "NoOwner", message).await;
        };
        let views: BTreeMap<String, ShardView> =
            ctx.shards.views().into_iter().map(|it| (it.name.clone(), it)).collect();
        let shard_groups = self.shard_groups();
        let members = self.members();
        let machines = self.machines(&members);
        let input = PoolInput {
            pool: &self.pool,
            machine_pool: &machine_pool,
            shards: &views,
            shard_groups: &shard_groups,
            members: &members,
            machines: &machines,
            now: ctx.now(),
        };
        let unknown_shards: Vec<String> =
            self.pool.spec.shards.iter().filter(|it| !views.contains_key(*it)).cloned().collect();
        // A MachinePool that is being deleted takes the pool with it: nothing is scaled any more.
        if !machine_pool.is_terminating() {
            self.push_sizes(&input).await?;
            self.remove_shards(&input).await?;
            self.apply_members(&input).await?;
        }
        let ids = self.provider_ids(&input).await?;
        let offered = self.offered(&input);
        let annotations = self.own_annotations(&machine_pool).await?;
        let capacity_input = self.capacity_input(&offered, &annotations);
        self.apply_machine_pool(&machine_pool, autoscaler_annotations(&capacity_input)).await?;
        self.release_import(&machine_pool).await?;
        let blocked = blocked(&members);
        let offer = capacity(&capacity_input);
        let of = StatusInput {
            provider_ids: &ids,
            unknown_shards: &unknown_shards,
            capacity: offer.capacity,
            node_info: Some(offer.node_info),
            blocked: &blocked,
        };
        self.apply_status(&json!(status(&input, &of))).await?;
        Ok(Next::After(RESYNC))
    }

    fn shard_groups(&self) -> BTreeMap<String, Arc<NstanceShardGroup>> {
        let owned = self.ctx.stores.shard_groups.filter(|it| self.owns(it));
        owned.into_iter().map(|it| (it.spec.shard.clone(), it)).collect()
    }

    fn members(&self) -> Vec<Arc<NstanceMachine>> {
        self.ctx.stores.nstance_machines.filter(|it| self.owns(it))
    }

    fn machines(&self, members: &[Arc<NstanceMachine>]) -> Vec<Arc<Machine>> {
        let names: std::collections::BTreeSet<&str> =
            members.iter().filter_map(|it| it.metadata.name.as_deref()).collect();
        let namespace = self.pool.metadata.namespace.as_deref();
        self.ctx.stores.machines.filter(|it| {
            it.metadata.namespace.as_deref() == namespace
                && it.spec.infrastructure_ref.kind == "NstanceMachine"
                && names.contains(it.spec.infrastructure_ref.name.as_str())
        })
    }

    fn owns<K: kube::Resource>(&self, object: &K) -> bool {
        let meta = object.meta();
        meta.namespace == self.pool.metadata.namespace
            && meta.owner_references.iter().flatten().any(|it| Some(&it.uid) == self.pool.metadata.uid.as_ref())
    }

    /// Spreads the replicas and applies one shard group per shard.
    async fn push_sizes(&self, input: &PoolInput<'_>) -> Result<(), KubeError> {
        let Some(total) = input.machine_pool.spec.replicas.and_then(|it| u32::try_from(it).ok()) else { return Ok(()) };
        let before: u32 = input.shard_groups.values().map(|it| u32::try_from(it.spec.size).unwrap_or(0)).sum();
        let chosen: Hints = if total < before {
            // Who shrinks the pool annotates a Machine just before: the watch may show that too late.
            let cluster = self.ctx.settings.cluster_name();
            let selector = Selector {
                namespace: Some(self.key.namespace.clone()),
                labels: Some(format!("{}={}", label::CLUSTER_NAME, format_label_value(&cluster))),
                fields: None,
            };
            let listed = self.ctx.kube.list(kinds::MACHINE, &selector).await?;
            let names: std::collections::BTreeSet<&str> =
                input.members.iter().filter_map(|it| it.metadata.name.as_deref()).collect();
            let machines: Vec<Arc<Machine>> = listed
                .into_iter()
                .filter_map(|it| serde_json::from_value::<Machine>(it).ok())
                .filter(|it| names.contains(it.spec.infrastructure_ref.name.as_str()))
                .map(Arc::new)
                .collect();
            hints(input, &machines)
        } else {
            hints(input, input.machines)
        };
        let sizes = match sizes(input, total, &chosen) {
            Sizes::Set(sizes) => sizes,
            Sizes::Wait { shards } => {
                tracing::info!(pool = %self.key, shards = ?shards, "sizes wait for shards that have not told what they have");
                return Ok(());
            }
        };
        for (shard, size) in self.pool.spec.shards.iter().zip(sizes) {
            let existing = input.shard_groups.get(shard);
            let is_unknown = !input.shards.contains_key(shard);
            if existing.is_some_and(|it| it.is_terminating()) || (is_unknown && existing.is_none()) {
                continue;
            }
            let body = self.shard_group_body(
                shard,
                size,
                &remove_first(input, shard, size, &chosen),
                existing.map(|it| &**it),
            );
            let name = shard_group_name(&self.pool.spec.group, shard);
            let reference = ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, &self.key.namespace, &name);
            let how = Apply { manager: manager::SPEC, force: true, target: Target::Main };
            let current = existing.map(|it| json!(**it));
            self.ctx.apply(&reference, &body, how, current.as_ref()).await?;
        }
        Ok(())
    }

    fn shard_group_body(
        &self,
        shard: &str,
        size: u32,
        remove_first: &[String],
        existing: Option<&NstanceShardGroup>,
    ) -> Value {
        let spec = &self.pool.spec;
        let cluster = self.ctx.settings.cluster_name();
        let mut body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceShardGroup",
            "metadata": {
                "name": shard_group_name(&spec.group, shard),
                "namespace": self.key.namespace,
                "labels": {
                    label::GROUP: spec.group,
                    label::SHARD: shard,
                    label::CLUSTER_NAME: format_label_value(&cluster),
                },
                "finalizers": [finalizer::SHARD_GROUP],
                "ownerReferences": [{
                    "apiVersion": API_VERSION,
                    "kind": "NstanceMachinePool",
                    "name": self.key.name,
                    "uid": self.pool.metadata.uid,
                    "controller": true,
                    "blockOwnerDeletion": true,
                }],
            },
            "spec": {"group": spec.group, "shard": shard, "size": size},
        });
        for (key, value) in
            [("template", &spec.template), ("instanceType", &spec.instance_type), ("subnetPool", &spec.subnet_pool)]
        {
            if let Some(value) = value {
                body["spec"][key] = json!(value);
            }
        }
        if !spec.vars.is_empty() {
            body["spec"]["vars"] = json!(spec.vars);
        }
        if !remove_first.is_empty() {
            body["spec"]["removeFirst"] = json!(remove_first);
        }
        if let Some(filter) = &self.ctx.settings.watch_filter {
            body["metadata"]["labels"][label::WATCH_FILTER] = json!(filter);
        }
        if let Some(existing) = existing {
            body["metadata"]["uid"] = json!(existing.metadata.uid);
        }
        body
    }

    /// Shards that left `spec.shards`: their part is deleted, which drains it.
    async fn remove_shards(&self, input: &PoolInput<'_>) -> Result<(), KubeError> {
        for (shard, group) in input.shard_groups {
            if !self.pool.spec.shards.contains(shard) && !group.is_terminating() {
                let name = group.metadata.name.as_deref().unwrap_or_default();
                let reference = ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, &self.key.namespace, name);
                self.ctx.kube.delete(&reference, group.metadata.uid.as_deref(), Propagation::Background).await?;
            }
        }
        Ok(())
    }

    /// NstanceMachines of instances that are there; Machines of instances that are gone, or whose hints are used up, go.
    async fn apply_members(&self, input: &PoolInput<'_>) -> Result<(), KubeError> {
        let plan = members(input, &self.ctx.settings.cluster_name());
        for (id, body) in &plan.apply {
            let reference = ObjectRef::new(kinds::NSTANCE_MACHINE, &self.key.namespace, id);
            let existing = input.members.iter().find(|it| it.metadata.name.as_deref() == Some(id));
            let how = Apply { manager: manager::SPEC, force: true, target: Target::Main };
            let current = existing.map(|it| json!(**it));
            match self.ctx.apply(&reference, body, how, current.as_ref()).await {
                Ok(_) => {}
                // It changed since the store was read, or it is going: its watch wakes us.
                Err(error) if error.is_conflict() => {}
                Err(error) => return Err(error),
            }
        }
        for name in &plan.delete_machines {
            self.delete_machine(input.machines, name, true).await?;
        }
        for name in &plan.delete_members {
            let reference = ObjectRef::new(kinds::NSTANCE_MACHINE, &self.key.namespace, name);
            let uid = input
                .members
                .iter()
                .find(|it| it.metadata.name.as_deref() == Some(name))
                .and_then(|it| it.metadata.uid.clone());
            self.ctx.kube.delete(&reference, uid.as_deref(), Propagation::Background).await?;
        }
        for machine in used_hints(input) {
            let name = machine.metadata.name.as_deref().unwrap_or_default();
            self.delete_machine(input.machines, name, false).await?;
        }
        Ok(())
    }

    /// `is_gone`: there is nothing left to drain, and Cluster API is told so first.
    async fn delete_machine(&self, machines: &[Arc<Machine>], name: &str, is_gone: bool) -> Result<(), KubeError> {
        let Some(machine) = machines.iter().find(|it| it.metadata.name.as_deref() == Some(name)) else { return Ok(()) };
        let reference = ObjectRef::new(kinds::MACHINE, &self.key.namespace, name);
        if is_gone && machine.annotation(annotation::EXCLUDE_NODE_DRAINING).is_none() {
            let patch = json!({"metadata": {"uid": machine.metadata.uid, "annotations": {
                annotation::EXCLUDE_NODE_DRAINING: "",
                annotation::EXCLUDE_WAIT_FOR_VOLUME_DETACH: "",
            }}});
            match self.ctx.kube.merge_patch(&reference, &patch, Target::Main).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() || error.is_conflict() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        let deleted = self.ctx.kube.delete(&reference, machine.metadata.uid.as_deref(), Propagation::Background).await;
        match deleted {
            Err(error) if error.is_conflict() => Ok(()),
            other => other,
        }
    }

    /// Writes the list by which Cluster API finds Nodes, and answers what it is now.
    async fn provider_ids(&self, input: &PoolInput<'_>) -> Result<Vec<String>, KubeError> {
        let nodes = &self.ctx.workload.nodes;
        let with_node: std::collections::BTreeSet<String> =
            nodes.all().iter().filter_map(|it| Some(it.label(label::INSTANCE_ID)?.to_owned())).collect();
        let has_node = |id: &str| {
            let had = input
                .members
                .iter()
                .find(|it| it.metadata.name.as_deref() == Some(id))
                .is_some_and(|it| it.status.as_ref().is_some_and(|it| it.node_name.is_some()));
            // While Nodes cannot be listed, absence proves nothing.
            had || !nodes.is_synced() || with_node.contains(id)
        };
        let ids = provider_ids(input, has_node);
        let present = &self.pool.spec.provider_id_list;
        if self.is_held(&ids, present.len()) {
            return Ok(present.clone());
        }
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceMachinePool",
            "metadata": {
                "name": self.key.name,
                "namespace": self.key.namespace,
                "uid": self.pool.metadata.uid,
                "labels": {
                    label::GROUP: self.pool.spec.group,
                    label::CLUSTER_NAME: format_label_value(&self.ctx.settings.cluster_name()),
                },
            },
            "spec": {"providerIDList": ids.list},
        });
        let how = Apply { manager: manager::SPEC, force: false, target: Target::Main };
        self.ctx.apply(&self.reference, &body, how, Some(&json!(*self.pool))).await?;
        Ok(ids.list)
    }

    /// Many ids that would go without proof are first looked at for a while: Cluster API deletes their Nodes at once.
    fn is_held(&self, ids: &ProviderIds, n_present: usize) -> bool {
        let mut held = self.memory.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !ids.is_suspicious(n_present) {
            held.remove(self.key);
            return false;
        }
        let since = *held.entry(self.key.clone()).or_insert_with(|| {
            tracing::warn!(
                pool = %self.key,
                n_dropped = ids.n_unproven,
                n_present,
                "holding a list of provider ids that drops many without proof that their instances are gone"
            );
            Instant::now()
        });
        self.ctx.queues.pools.add_after(self.key.clone(), HOLD_DROPS);
        since.elapsed() < HOLD_DROPS
    }

    async fn say(&self, kind: &str, status: Status, reason: &str, message: String) -> Result<Next, KubeError> {
        let mut now = self.pool.status.clone().unwrap_or_default();
        conditions::set(
            &mut now.conditions,
            kind,
            status,
            reason,
            message,
            self.pool.metadata.generation,
            self.ctx.now(),
        );
        self.apply_status(&json!(now)).await?;
        Ok(Next::After(RESYNC))
    }

    async fn apply_status(&self, status: &Value) -> Result<(), KubeError> {
        let body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceMachinePool",
            "metadata": {"name": self.key.name, "namespace": self.key.namespace, "uid": self.pool.metadata.uid},
            "status": status,
        });
        let how = Apply { manager: manager::STATUS, force: true, target: Target::Status };
        self.ctx.apply(&self.reference, &body, how, Some(&json!(*self.pool))).await?;
        Ok(())
    }
}

/// Pods that block drains of a pool: the first few, and how many there are.
fn blocked(members: &[Arc<NstanceMachine>]) -> Vec<String> {
    let all: Vec<String> = members
        .iter()
        .filter_map(|it| it.status.as_ref()?.drain.as_ref())
        .flat_map(|it| it.blocked_by.iter().cloned())
        .collect();
    let more = all.len().saturating_sub(MAX_BLOCKED);
    let mut shown: Vec<String> = all.into_iter().take(MAX_BLOCKED).collect();
    if 0 < more {
        shown.push(format!("and {more} more"));
    }
    shown
}
