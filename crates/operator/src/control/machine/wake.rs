//! What wakes an NstanceMachine.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::{
    api::{
        NstanceMachine,
        capi::{Cluster, Meta as _},
        names::{annotation, label},
    },
    cluster::store::{ObjectKey, Store},
    control::{context::Context, queue::Queue},
    decide::machine::is_pool_member,
    ports::kinds,
};

pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.machines.clone();
    ctx.stores.nstance_machines.on_change(move |change| queue.add(change.key.clone()));

    let queue = ctx.queues.machines.clone();
    ctx.stores.machines.on_change(move |change| {
        for machine in change.new.into_iter().chain(change.old) {
            let infrastructure = &machine.spec.infrastructure_ref;
            if infrastructure.kind == "NstanceMachine" {
                queue.add(ObjectKey::new(&change.key.namespace, &infrastructure.name));
            }
        }
    });

    // A pool, a MachinePool or the Cluster that begins to go, or to stop, changes what its machines may do.
    let (queue, store) = (ctx.queues.machines.clone(), ctx.stores.nstance_machines.clone());
    ctx.stores.pools.on_change(move |change| {
        if change.old.is_some_and(|it| it.is_terminating()) != change.new.is_none_or(|it| it.is_terminating()) {
            add_all(&queue, &store, is_pool_member);
        }
    });
    let (queue, store) = (ctx.queues.machines.clone(), ctx.stores.nstance_machines.clone());
    ctx.stores.machine_pools.on_change(move |change| {
        if change.old.is_some_and(|it| it.is_terminating()) != change.new.is_none_or(|it| it.is_terminating()) {
            add_all(&queue, &store, is_pool_member);
        }
    });
    let (queue, store) = (ctx.queues.machines.clone(), ctx.stores.nstance_machines.clone());
    ctx.stores.clusters.on_change(move |change| {
        if change.old.map(|it| phase(it)) != change.new.map(|it| phase(it)) {
            add_all(&queue, &store, |_| true);
        }
    });

    let (queue, store) = (ctx.queues.machines.clone(), ctx.stores.nstance_machines.clone());
    let namespace = ctx.settings.namespace.clone();
    ctx.workload.nodes.on_change(move |change| {
        if change.old.map(|it| facts(it)) == change.new.map(|it| facts(it)) {
            return;
        }
        for node in change.new.into_iter().chain(change.old) {
            if let Some(id) = node.label(label::INSTANCE_ID) {
                add_instance(&queue, &store, &namespace, id);
            }
            if let Some(provider_id) = node.spec.as_ref().and_then(|it| it.provider_id.as_deref()) {
                add_all(&queue, &store, |it| it.spec.provider_id.as_deref() == Some(provider_id));
            }
        }
    });

    let (queue, store) = (ctx.queues.machines.clone(), ctx.stores.nstance_machines.clone());
    let namespace = ctx.settings.namespace.clone();
    ctx.shards.on_change(Box::new(move |change| {
        for answered in change.answered.iter().filter(|it| it.object.kind == kinds::NSTANCE_MACHINE) {
            queue.add(ObjectKey::new(&answered.object.namespace, &answered.object.name));
        }
        for instance in &change.instances {
            add_instance(&queue, &store, &namespace, &instance.id);
        }
        if change.reach {
            add_all(&queue, &store, |it| it.spec.shard.as_deref().is_none_or(|it| it == change.shard));
        }
    }));
}

/// What machines need to know of their Cluster.
fn phase(cluster: &Cluster) -> (bool, Option<bool>, Option<bool>) {
    let initialization = cluster.status.as_ref().and_then(|it| it.initialization.as_ref());
    let is_provisioned = initialization.and_then(|it| it.infrastructure_provisioned);
    (cluster.is_terminating(), cluster.spec.paused, is_provisioned)
}

/// What machines need to know of a Node: kubelets also write much else, often.
fn facts(node: &Node) -> [Option<String>; 4] {
    [
        node.label(label::INSTANCE_ID).map(str::to_owned),
        node.spec.as_ref().and_then(|it| it.provider_id.clone()),
        node.annotation(annotation::DRAIN_STATE).map(str::to_owned),
        node.annotation(annotation::DRAIN_INSTANCE_ID).map(str::to_owned),
    ]
}

fn add_all(queue: &Queue<ObjectKey>, store: &Store<NstanceMachine>, is_wanted: impl Fn(&NstanceMachine) -> bool) {
    for object in store.filter(is_wanted) {
        queue.add(ObjectKey::of(&*object));
    }
}

/// Members of pools are named by their instances. Their names are added even if only a Machine is left of them.
fn add_instance(queue: &Queue<ObjectKey>, store: &Store<NstanceMachine>, namespace: &str, id: &str) {
    queue.add(ObjectKey::new(namespace, id));
    add_all(queue, store, |it| it.spec.instance_id.as_deref() == Some(id) && it.metadata.name.as_deref() != Some(id));
}
