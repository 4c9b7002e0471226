//! One Machine for each infrastructure machine of a MachinePool. The provider makes the infrastructure machines; core
//! shows them as Machines and makes a Machine anew as long as its infrastructure machine exists, a terminating one too.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::{
    names,
    view::{Nodes, View},
};
use crate::{
    draft::Draft,
    effect::{Effect, Planned, Target, Via},
    kinds::{INFRA_GROUP, Kind},
    object::{Key, Object, Ownership, owner_reference},
};

/// The Machines of a pool, by their labels.
pub(crate) fn machines_of<'a>(view: View<'a>, pool: &Object) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
    of_pool(view, Kind::Machine, pool)
}

fn of_pool<'a>(view: View<'a>, kind: Kind, pool: &Object) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
    let (namespace, pool_name) = (pool.namespace().to_owned(), names::label_value(pool.name()));
    let cluster = pool.text("/spec/clusterName").to_owned();
    view.picture.all(kind).filter(move |it| {
        it.namespace() == namespace
            && it.label(names::POOL_NAME) == Some(&pool_name)
            && it.label(names::CLUSTER_NAME) == Some(&cluster)
    })
}

/// Says whether the pool has Machines at all.
pub(crate) fn decide(
    view: View<'_>,
    cluster: &Object,
    pool: &Arc<Object>,
    infra_pool: &Object,
    nodes: &Nodes,
    planned: &mut Vec<Planned>,
) -> bool {
    let Some(infra_kind) = Kind::of(INFRA_GROUP, infra_pool.text("/status/infrastructureMachineKind")) else {
        return false;
    };
    let machines: BTreeMap<&str, &Arc<Object>> =
        machines_of(view, pool).map(|it| (it.text("/spec/infrastructureRef/name"), it)).collect();
    for infra in of_pool(view, infra_kind, pool) {
        match machines.get(infra.name()) {
            Some(machine) => update(view, pool, machine, planned),
            None => {
                let node = nodes.with_provider_id(infra.text("/spec/providerID"));
                planned.push(create(cluster, pool, infra_kind, infra, node.map(AsRef::as_ref)));
            }
        }
    }
    true
}

/// Labels and annotations of the template are put back where somebody took them away.
fn update(view: View<'_>, pool: &Object, machine: &Arc<Object>, planned: &mut Vec<Planned>) {
    let mut draft = Draft::new(Via::Own, Kind::Machine, machine, view.now);
    let texts = |pointer: &str| {
        let values = pool.at(pointer).as_object().into_iter().flatten();
        values.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect::<Vec<_>>()
    };
    for (name, value) in texts("/spec/template/metadata/labels") {
        draft.label(&name, &value);
    }
    for (name, value) in texts("/spec/template/metadata/annotations") {
        draft.annotation(&name, &value);
    }
    draft.finish(planned);
}

fn create(cluster: &Object, pool: &Object, infra_kind: Kind, infra: &Object, node: Option<&Object>) -> Planned {
    let template = |field: &str| pool.at(&format!("/spec/template/{field}"));
    let mut labels = template("metadata/labels").as_object().cloned().unwrap_or_default();
    labels.insert(names::CLUSTER_NAME.to_owned(), cluster.name().into());
    labels.insert(names::POOL_NAME.to_owned(), names::label_value(pool.name()).into());
    let mut object = json!({
        "apiVersion": Kind::Machine.api_version(),
        "kind": Kind::Machine.kind(),
        "metadata": {
            "name": infra.name(),
            "namespace": pool.namespace(),
            "labels": labels,
            "ownerReferences": [owner_reference(Kind::MachinePool, pool, Ownership::Controller)],
        },
        "spec": {
            "clusterName": cluster.name(),
            "bootstrap": { "dataSecretName": "" },
            "infrastructureRef": { "apiGroup": infra_kind.group(), "kind": infra_kind.kind(), "name": infra.name() },
        },
    });
    if let Some(annotations) = template("metadata/annotations").as_object() {
        object["metadata"]["annotations"] = Value::Object(annotations.clone());
    }
    for field in ["deletion", "readinessGates", "minReadySeconds"] {
        let value = template(&format!("spec/{field}"));
        if !value.is_null() {
            object["spec"][field] = value.clone();
        }
    }
    let version = node.map(|it| it.text("/status/nodeInfo/kubeletVersion")).unwrap_or_default();
    if !version.is_empty() {
        object["spec"]["version"] = version.into();
    }
    let target = Target { via: Via::Own, kind: Kind::Machine, key: Key::new(pool.namespace(), infra.name()) };
    Planned { target, effect: Effect::Create { object } }
}
