//! What a Node of a group will offer, for cluster-autoscaler: it must know before there is any Node.

mod quantity;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Node;

pub use self::quantity::{Quantity, QuantityError};
use crate::{
    api::{
        capi::Meta as _,
        names::{annotation, label},
        pool::{Autoscaler, NodeInfo, Taint},
    },
    decide::observed::Group,
};

/// What is taken from Nodes. Other resources there come and go with device plugins and kernel settings.
const OF_NODES: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"];

/// What every instance has: a shard that does not name it does not know it.
const OF_EVERY_INSTANCE: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

const ARCH: &str = "kubernetes.io/arch";
const OS: &str = "kubernetes.io/os";

/// What cluster-autoscaler assumes by itself of an unknown architecture.
const DEFAULT_ARCH: &str = "amd64";
const DEFAULT_OS: &str = "linux";

/// The architectures that the CRD accepts.
const ARCHITECTURES: [&str; 4] = ["amd64", "arm64", "s390x", "ppc64le"];

#[derive(Debug, Clone, Copy, Default)]
pub struct CapacityInput<'a> {
    /// `spec.capacity`.
    pub capacity: Option<&'a BTreeMap<String, String>>,
    /// `spec.nodeInfo`.
    pub node_info: Option<&'a NodeInfo>,
    /// The group as each shard reports it.
    pub groups: &'a [Arc<Group>],
    /// Nodes of the pool; those that are not Ready are not looked at.
    pub nodes: &'a [Arc<Node>],
    /// `status.capacity` so far: what was seen on Nodes while there were any.
    pub previous: Option<&'a BTreeMap<String, String>>,
    pub autoscaler: Option<&'a Autoscaler>,
    /// The MachinePool's annotations now. Without Nodes, labels and taints stay as they are there: the caller leaves those two
    /// out if another field manager holds them, or they would become ours too.
    pub annotations: Option<&'a BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Canonical quantities. What is not known is left out.
    pub capacity: BTreeMap<String, String>,
    /// Both parts are always there.
    pub node_info: NodeInfo,
}

/// `status.capacity` and `status.nodeInfo` of a pool or a template.
pub fn capacity(input: &CapacityInput<'_>) -> Capacity {
    let nodes: Vec<&Node> = ready_nodes(input.nodes).collect();
    let mut known = of_shards(input.groups);
    let seen = of_nodes(&nodes);
    let previous = parsed(input.previous.into_iter().flatten()).filter(|(name, _)| OF_NODES.contains(&name.as_str()));
    // Nodes that are there are better evidence than those that were.
    for (name, quantity) in seen.into_iter().chain(previous) {
        if is_missing(&known, &name, input.groups) {
            known.insert(name, quantity);
        }
    }
    known.extend(parsed(input.capacity.into_iter().flatten()));
    let capacity = known.into_iter().map(|(name, quantity)| (name, quantity.to_string())).collect();
    let overridden = |part: fn(&NodeInfo) -> &Option<String>| input.node_info.and_then(|it| part(it).clone());
    let node_info = NodeInfo {
        architecture: overridden(|it| &it.architecture)
            .or_else(|| architecture(input.groups, &nodes))
            .or_else(|| Some(DEFAULT_ARCH.to_owned())),
        operating_system: overridden(|it| &it.operating_system).or_else(|| Some(DEFAULT_OS.to_owned())),
    };
    Capacity { capacity, node_info }
}

/// The annotations of a MachinePool that cluster-autoscaler reads. One that another field manager holds is left to it by
/// the caller. Empty for a pool that is not scaled by it.
pub fn autoscaler_annotations(input: &CapacityInput<'_>) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let present = |key: &str| input.annotations.and_then(|it| it.get(key));
    let is_scaled = input.autoscaler.is_some() || present(annotation::AUTOSCALER_MAX_SIZE).is_some();
    if !is_scaled {
        return all;
    }
    let nodes: Vec<&Node> = ready_nodes(input.nodes).collect();
    if let Some(autoscaler) = input.autoscaler {
        let mut put = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                all.insert(key.to_owned(), value);
            }
        };
        put(annotation::AUTOSCALER_MIN_SIZE, autoscaler.min.map(|it| it.to_string()));
        put(annotation::AUTOSCALER_MAX_SIZE, autoscaler.max.map(|it| it.to_string()));
        put(annotation::AUTOSCALER_MAX_PODS, autoscaler.max_pods.map(|it| it.to_string()));
        put(annotation::AUTOSCALER_MAX_NODE_PROVISION_TIME, autoscaler.max_node_provision_time.clone());
    }
    let wanted_labels = input.autoscaler.map(|it| &it.labels).filter(|it| !it.is_empty());
    let mut labels = match wanted_labels {
        Some(labels) => labels.clone(),
        None if nodes.is_empty() => {
            present(annotation::AUTOSCALER_LABELS).map(|it| split_labels(it)).unwrap_or_default()
        }
        None => common_labels(&nodes),
    };
    let is_arch_known =
        input.node_info.is_some_and(|it| it.architecture.is_some()) || architecture(input.groups, &nodes).is_some();
    if !is_arch_known {
        labels.entry(ARCH.to_owned()).or_insert_with(|| DEFAULT_ARCH.to_owned());
        labels.entry(OS.to_owned()).or_insert_with(|| DEFAULT_OS.to_owned());
    }
    if !labels.is_empty() {
        let pairs: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        all.insert(annotation::AUTOSCALER_LABELS.to_owned(), pairs.join(","));
    }
    let wanted_taints = input.autoscaler.map(|it| &it.taints).filter(|it| !it.is_empty());
    let taints = match wanted_taints {
        Some(taints) => join_taints(taints),
        None if nodes.is_empty() => present(annotation::AUTOSCALER_TAINTS).cloned().unwrap_or_default(),
        None => join_taints(&common_taints(&nodes)),
    };
    if !taints.is_empty() {
        all.insert(annotation::AUTOSCALER_TAINTS.to_owned(), taints);
    }
    all
}

/// Quantities that can be read. One that cannot would void the whole map for its reader, and is left out.
fn parsed<'a>(quantities: impl Iterator<Item = (&'a String, &'a String)>) -> impl Iterator<Item = (String, Quantity)> {
    quantities.filter_map(|(name, quantity)| Some((name.clone(), quantity.parse().ok()?)))
}

/// The minimum over the shards that know.
fn of_shards(groups: &[Arc<Group>]) -> BTreeMap<String, Quantity> {
    let known: Vec<BTreeMap<String, Quantity>> = groups
        .iter()
        .map(|it| parsed(it.capacity.iter()).collect::<BTreeMap<_, _>>())
        .filter(|it| !it.is_empty())
        .collect();
    let mut minimum: BTreeMap<String, Quantity> = BTreeMap::new();
    for (name, quantity) in known.iter().flatten() {
        let place = minimum.entry(name.clone()).or_insert(*quantity);
        *place = (*place).min(*quantity);
    }
    // An extra that one shard does not offer, as a GPU, is not promised.
    minimum.retain(|name, quantity| {
        OF_EVERY_INSTANCE.contains(&name.as_str())
            || (quantity.is_positive() && known.iter().all(|it| it.contains_key(name)))
    });
    minimum
}

/// Whether Nodes have to tell. Once a shard has told of a group's instances, extras that it did not name do not exist.
fn is_missing(known: &BTreeMap<String, Quantity>, name: &str, groups: &[Arc<Group>]) -> bool {
    let is_told = groups.iter().any(|it| !it.capacity.is_empty());
    !known.contains_key(name) && (OF_EVERY_INSTANCE.contains(&name) || !is_told)
}

fn ready_nodes(nodes: &[Arc<Node>]) -> impl Iterator<Item = &Node> {
    nodes.iter().map(|it| &**it).filter(|node| {
        let conditions = node.status.iter().flat_map(|it| it.conditions.iter().flatten());
        !node.is_terminating() && conditions.into_iter().any(|it| it.type_ == "Ready" && it.status == "True")
    })
}

fn of_nodes(nodes: &[&Node]) -> BTreeMap<String, Quantity> {
    let mut minimum: BTreeMap<String, Quantity> = BTreeMap::new();
    let offers: Vec<BTreeMap<&str, Quantity>> = nodes
        .iter()
        .map(|node| {
            let capacity = node.status.iter().flat_map(|it| it.capacity.iter().flatten());
            capacity.filter_map(|(name, quantity)| Some((name.as_str(), quantity.0.parse().ok()?))).collect()
        })
        .collect();
    for name in OF_NODES {
        let smallest = offers.iter().filter_map(|it| it.get(name)).min();
        let is_common = offers.iter().all(|it| it.contains_key(name));
        if let Some(smallest) = smallest.filter(|it| it.is_positive() && is_common) {
            minimum.insert(name.to_owned(), *smallest);
        }
    }
    minimum
}

/// The one architecture of all who know theirs; none if they differ.
fn architecture(groups: &[Arc<Group>], nodes: &[&Node]) -> Option<String> {
    let is_valid = |it: &&str| ARCHITECTURES.contains(it);
    let of_shards: Vec<&str> = groups.iter().map(|it| it.arch.as_str()).filter(|it| !it.is_empty()).collect();
    if !of_shards.is_empty() {
        return common(&of_shards).filter(is_valid).map(str::to_owned);
    }
    let of_nodes: Vec<&str> = nodes
        .iter()
        .filter_map(|node| {
            let info = node.status.as_ref().and_then(|it| it.node_info.as_ref());
            info.map(|it| it.architecture.as_str()).filter(|it| !it.is_empty()).or_else(|| node.label(ARCH))
        })
        .collect();
    common(&of_nodes).filter(is_valid).map(str::to_owned)
}

fn common<'a>(all: &[&'a str]) -> Option<&'a str> {
    let first = *all.first()?;
    all.iter().all(|it| *it == first).then_some(first)
}

/// Labels that say something of one Node only, or that come and go.
fn is_own_label(key: &str) -> bool {
    matches!(key, "kubernetes.io/hostname" | label::INSTANCE_ID | label::EXCLUDE_FROM_LOAD_BALANCERS)
}

fn common_labels(nodes: &[&Node]) -> BTreeMap<String, String> {
    let Some((first, others)) = nodes.split_first() else { return BTreeMap::new() };
    let mut labels = first.metadata.labels.clone().unwrap_or_default();
    labels.retain(|key, value| !is_own_label(key) && others.iter().all(|node| node.label(key) == Some(value.as_str())));
    labels
}

/// Taints that pass: of the Node's state, of Cluster API, of the autoscaler itself.
fn is_passing_taint(key: &str) -> bool {
    const PREFIXES: [&str; 3] = ["node.kubernetes.io/", "node.cluster.x-k8s.io/", "node.cloudprovider.kubernetes.io/"];
    PREFIXES.iter().any(|it| key.starts_with(it))
        || key.contains("cluster-autoscaler.kubernetes.io/")
        || matches!(key, "ToBeDeletedByClusterAutoscaler" | "DeletionCandidateOfClusterAutoscaler")
}

fn common_taints(nodes: &[&Node]) -> Vec<Taint> {
    let of_node = |node: &Node| -> Vec<Taint> {
        let taints = node.spec.iter().flat_map(|it| it.taints.iter().flatten());
        taints
            .map(|it| Taint {
                key: it.key.clone(),
                value: it.value.clone().unwrap_or_default(),
                effect: it.effect.clone(),
            })
            .collect()
    };
    let Some((first, others)) = nodes.split_first() else { return Vec::new() };
    let others: Vec<Vec<Taint>> = others.iter().map(|it| of_node(it)).collect();
    let mut taints = of_node(first);
    taints.retain(|taint| !is_passing_taint(&taint.key) && others.iter().all(|it| it.contains(taint)));
    taints.sort();
    taints
}

fn join_taints(taints: &[Taint]) -> String {
    let text = |it: &Taint| match it.value.as_str() {
        "" => format!("{}:{}", it.key, it.effect),
        value => format!("{}={value}:{}", it.key, it.effect),
    };
    taints.iter().map(text).collect::<Vec<_>>().join(",")
}

fn split_labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter_map(|it| it.split_once('='));
    pairs.map(|(key, value)| (key.trim().to_owned(), value.trim().to_owned())).collect()
}

#[cfg(test)]
mod tests;
