use std::collections::BTreeMap;

use nstance_client::ShardError;
use serde_json::json;
use tonic::Code;

use super::*;
use crate::{
    api::{NstanceMachinePool, capi::MachinePool},
    decide::observed::{Drain, Group, Instance, InstanceStatus},
    ports::{Answer, KubeErrorKind},
    testing::{CLUSTER, NAMESPACE, World},
};

mod looped;

mod member;

mod on_demand;

fn key(name: &str) -> ObjectKey {
    ObjectKey::new(NAMESPACE, name)
}

fn wish_key(name: &str, topic: &'static str) -> WishKey {
    WishKey { object: ObjectRef::new(kinds::NSTANCE_MACHINE, NAMESPACE, name), topic }
}

/// Reconciles what is known now, then lets the stores see what came of it.
async fn turn(world: &World, name: &str) -> Next {
    world.feed();
    let next = reconcile(&world.context, &key(name)).await.unwrap();
    world.feed();
    next
}

fn nstance_machine(world: &World, name: &str) -> Option<NstanceMachine> {
    world.kube.read(kinds::NSTANCE_MACHINE, NAMESPACE, name)
}

fn machine(world: &World, name: &str) -> Option<Machine> {
    world.kube.read(kinds::MACHINE, NAMESPACE, name)
}

/// `status reason` of a condition.
fn condition(object: &NstanceMachine, name: &str) -> String {
    let conditions = object.status.as_ref().map(|it| it.conditions.as_slice()).unwrap_or_default();
    conditions::find(conditions, name).map_or_else(String::new, |it| format!("{} {}", it.status, it.reason))
}

fn put_machine(world: &World, name: &str, labels: &[(&str, &str)]) -> Machine {
    let machine = json!({
        "apiVersion": "cluster.x-k8s.io/v1beta2",
        "kind": "Machine",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "finalizers": [finalizer::CAPI_MACHINE],
            "labels": labels.iter().copied().collect::<BTreeMap<_, _>>(),
        },
        "spec": {
            "clusterName": CLUSTER,
            "bootstrap": {"dataSecretName": ""},
            "infrastructureRef": {"apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "NstanceMachine", "name": name},
        },
    });
    world.kube.put(kinds::MACHINE, &serde_json::from_value::<Machine>(machine).unwrap())
}
