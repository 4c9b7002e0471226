//! Whose a Node is, what we write on it, and when it is removed because its VM is gone.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::core::v1::{Node, Taint},
    jiff::Timestamp,
};
use serde_json::{Map, Value, json};

use super::{
    drain::{Listing, after, until},
    node_match::{self, NodeMatch},
    observed::{Instance, ShardView},
};
use crate::api::{
    capi::Meta as _,
    names::{annotation, label},
};

/// The taint by which Kubernetes moves volumes and StatefulSets away from a Node whose machine is gone.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// A Node stays for this long after its instance is gone, so that Cluster API may remove it first.
const STAY: Duration = Duration::from_secs(10);
/// A Node with pods stays for at most this long: Kubernetes removes the pods of a tainted Node once it calls it unreachable.
const STAY_WITH_PODS: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_secs(2);

/// Who runs on a Node.
#[derive(Debug, Clone, PartialEq)]
pub enum Occupant {
    Live(Arc<Instance>),
    /// Its shard proves that this instance does not exist any more.
    Gone(String),
    /// An instance of ours of which nothing is known now.
    Unknown(String),
    /// Several instances may be it: their ids.
    Ambiguous(Vec<String>),
    /// No instance of ours.
    Stranger,
}

/// Tells whose a Node is. `shard_of`: the shard of an instance, by its NstanceMachine.
pub fn occupant(
    node: &Arc<Node>,
    nodes: &[Arc<Node>],
    views: &[ShardView],
    cluster: &str,
    shard_of: impl Fn(&str) -> Option<String>,
) -> Occupant {
    let Some(id) = node_match::instance_label(node) else { return by_match(node, nodes, views) };
    let pictures = || views.iter().filter_map(|it| it.picture.as_ref());
    let known = pictures().find_map(|it| it.instances.get(id));
    let is_gone = match known {
        Some(instance) if !instance.is_vm_gone() => return Occupant::Live(instance.clone()),
        Some(_) => true,
        None => {
            let Some(shard) = owner_shard(node, cluster).or_else(|| shard_of(id)) else { return Occupant::Stranger };
            // A picture of a shard that is down may be older than the instance.
            views.iter().any(|it| it.name == shard && it.reach.is_ready() && it.picture.is_some())
        }
    };
    if !is_gone {
        return Occupant::Unknown(id.to_owned());
    }
    // A new VM may have taken over the name, and with it the Node.
    let successors: Vec<&Arc<Instance>> = pictures()
        .flat_map(|it| it.instances.values())
        .filter(|it| !it.is_vm_gone() && node_match::may_be(it, node))
        .collect();
    match successors[..] {
        [] => Occupant::Gone(id.to_owned()),
        [successor] => Occupant::Live(successor.clone()),
        _ => Occupant::Ambiguous(successors.into_iter().map(|it| it.id.clone()).collect()),
    }
}

fn by_match(node: &Arc<Node>, nodes: &[Arc<Node>], views: &[ShardView]) -> Occupant {
    let instances = views.iter().filter_map(|it| it.picture.as_ref()).flat_map(|it| it.instances.values());
    let candidates: Vec<&Arc<Instance>> = instances
        .filter(|it| !it.is_vm_gone() && node_match::may_be(it, node))
        .filter(|it| node_match::node_of(it, nodes).node().is_some_and(|it| it.metadata.name == node.metadata.name))
        .collect();
    match candidates[..] {
        [] => Occupant::Stranger,
        [instance] => Occupant::Live(instance.clone()),
        _ => Occupant::Ambiguous(candidates.into_iter().map(|it| it.id.clone()).collect()),
    }
}

/// The shard that we wrote on the Node, if it is one of our cluster.
fn owner_shard(node: &Node, cluster: &str) -> Option<String> {
    let (owner, shard) = node.annotation(annotation::NODE_OWNER)?.rsplit_once('/')?;
    (owner == cluster && !shard.is_empty()).then(|| shard.to_owned())
}

/// The patch after which the Node names its instance and its owner; `None` if it does.
pub fn label_patch(node: &Node, instance: &Instance, cluster: &str) -> Option<Value> {
    let owner = format!("{cluster}/{}", instance.shard);
    let mut metadata = Map::new();
    if node.label(label::INSTANCE_ID) != Some(&instance.id) {
        metadata.insert("labels".to_owned(), json!({ label::INSTANCE_ID: instance.id }));
    }
    if node.annotation(annotation::NODE_OWNER) != Some(&owner) {
        metadata.insert("annotations".to_owned(), json!({ annotation::NODE_OWNER: owner }));
    }
    if metadata.is_empty() {
        return None;
    }
    metadata.insert("resourceVersion".to_owned(), json!(node.metadata.resource_version));
    Some(json!({"metadata": metadata}))
}

/// The provider id that an NstanceMachine must take over from the Node of its instance; `None` if it has it, or if it is not
/// sure that the Node is the instance's.
pub fn provider_id_to_adopt(
    instance: &Instance,
    node: &Node,
    nodes: &[Arc<Node>],
    kept: Option<&str>,
) -> Option<String> {
    match node_match::node_of(instance, nodes) {
        NodeMatch::One(found) if found.metadata.name == node.metadata.name => {}
        _ => return None,
    }
    node_match::node_provider_id(node).filter(|it| Some(*it) != kept).map(str::to_owned)
}

/// The next step towards the removal of a Node whose instance is gone.
#[derive(Debug, Clone, PartialEq)]
pub enum CleanUp {
    ListPods,
    Taint(Value),
    Wait(Duration),
    Delete,
}

/// `pods`: how many pods should run elsewhere.
pub fn clean_up(node: &Node, gone_since: Timestamp, now: Timestamp, pods: &Listing<usize>) -> CleanUp {
    let n_pods = match pods {
        Listing::NotRead => return CleanUp::ListPods,
        Listing::Failed(_) => return CleanUp::Wait(POLL),
        Listing::Read(n_pods) => *n_pods,
    };
    if 0 < n_pods
        && let Some(patch) = taint_patch(node)
    {
        return CleanUp::Taint(patch);
    }
    let earliest = until(now, after(gone_since, STAY));
    if !earliest.is_zero() {
        CleanUp::Wait(earliest.min(POLL))
    } else if 0 < n_pods && now < after(gone_since, STAY_WITH_PODS) {
        CleanUp::Wait(POLL)
    } else {
        CleanUp::Delete
    }
}

fn taint_patch(node: &Node) -> Option<Value> {
    let mut taints = node.spec.as_ref().and_then(|it| it.taints.clone()).unwrap_or_default();
    if taints.iter().any(|it| it.key == OUT_OF_SERVICE) {
        return None;
    }
    taints.push(Taint {
        key: OUT_OF_SERVICE.to_owned(),
        value: Some("nstance".to_owned()),
        effect: "NoExecute".to_owned(),
        ..Taint::default()
    });
    let version = &node.metadata.resource_version;
    Some(json!({"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}))
}

#[cfg(test)]
mod tests {
    use kube::api::ObjectMeta;

    use super::*;
    use crate::decide::observed::{Picture, Reach};

    const CLUSTER: &str = "c--t";

    fn node(name: &str, id: &str, owner: &str) -> Arc<Node> {
        let map =
            |key: &str, value: &str| Some([(key.to_owned(), value.to_owned())].into()).filter(|_| !value.is_empty());
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            labels: map(label::INSTANCE_ID, id),
            annotations: map(annotation::NODE_OWNER, owner),
            resource_version: Some("3".to_owned()),
            ..ObjectMeta::default()
        };
        Arc::new(Node { metadata, ..Node::default() })
    }

    fn shard(name: &str, reach: Reach, instances: &[(&str, &str)]) -> ShardView {
        let instance = |(id, state): &(&str, &str)| {
            let it = Instance {
                id: (*id).to_owned(),
                shard: name.to_owned(),
                provider_state: (*state).to_owned(),
                hostname: Some(format!("host-{id}")),
                ..Instance::default()
            };
            ((*id).to_owned(), Arc::new(it))
        };
        let instances = instances.iter().map(instance).collect();
        let picture = Some(Arc::new(Picture { instances, ..Picture::default() }));
        ShardView { name: name.to_owned(), reach, picture, last_contact: None }
    }

    fn down() -> Reach {
        Reach::Down { since: Timestamp::UNIX_EPOCH, why: String::new() }
    }

    fn who(node: &Arc<Node>, views: &[ShardView]) -> String {
        match occupant(node, std::slice::from_ref(node), views, CLUSTER, |id| (id == "m1").then(|| "a".to_owned())) {
            Occupant::Live(it) => format!("live {}", it.id),
            Occupant::Gone(id) => format!("gone {id}"),
            Occupant::Unknown(id) => format!("unknown {id}"),
            Occupant::Ambiguous(ids) => format!("ambiguous {}", ids.join(" ")),
            Occupant::Stranger => "stranger".to_owned(),
        }
    }

    #[test]
    fn a_node_is_gone_only_if_its_own_shard_is_connected_and_does_not_have_it() {
        let ours = node("n", "i1", "c--t/a");
        let ready = |instances: &[(&str, &str)]| vec![shard("a", Reach::Ready, instances), shard("b", down(), &[])];
        assert_eq!(who(&ours, &ready(&[("i1", "running")])), "live i1");
        assert_eq!(who(&ours, &ready(&[("i1", "gone")])), "gone i1");
        assert_eq!(who(&ours, &ready(&[])), "gone i1");
        assert_eq!(who(&ours, &[shard("a", down(), &[])]), "unknown i1");
        assert_eq!(who(&ours, &[shard("b", Reach::Ready, &[])]), "unknown i1");
        let without_picture = ShardView { picture: None, ..shard("a", Reach::Ready, &[]) };
        assert_eq!(who(&ours, &[without_picture]), "unknown i1");
    }

    #[test]
    fn a_node_of_another_cluster_is_never_ours_to_remove() {
        let views = [shard("a", Reach::Ready, &[])];
        assert_eq!(who(&node("n", "i1", "other--t/a"), &views), "stranger");
        assert_eq!(who(&node("n", "i1", ""), &views), "stranger");
        assert_eq!(who(&node("n", "m1", ""), &views), "gone m1");
        assert_eq!(who(&node("n", "", ""), &views), "stranger");
    }

    #[test]
    fn a_node_that_a_new_instance_took_over_is_relabelled_not_removed() {
        let views = [shard("a", Reach::Ready, &[("i2", "running")])];
        let taken = node("host-i2", "i1", "c--t/a");
        assert_eq!(who(&taken, &views), "live i2");
        let Occupant::Live(instance) = occupant(&taken, &[], &views, CLUSTER, |_| None) else { panic!("live") };
        let patch = label_patch(&taken, &instance, CLUSTER).unwrap();
        assert_eq!(patch["metadata"]["labels"][label::INSTANCE_ID], "i2");
    }

    #[test]
    fn a_matched_node_gets_label_and_owner_once() {
        let views = [shard("a", Reach::Ready, &[("i1", "running")])];
        let fresh = node("host-i1", "", "");
        assert_eq!(who(&fresh, &views), "live i1");
        let instance = Instance { id: "i1".into(), shard: "a".into(), ..Instance::default() };
        let expected = json!({"metadata": {
            "labels": {"nstance.dev/instance-id": "i1"}, "annotations": {"nstance.dev/owner": "c--t/a"},
            "resourceVersion": "3",
        }});
        assert_eq!(label_patch(&fresh, &instance, CLUSTER), Some(expected));
        assert_eq!(label_patch(&node("host-i1", "i1", "c--t/a"), &instance, CLUSTER), None);
    }

    #[test]
    fn a_node_with_pods_is_tainted_first_and_stays_until_they_are_gone() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let mut gone = (*node("n", "i1", "c--t/a")).clone();
        let next = |node: &Node, now, pods| clean_up(node, at(100), at(now), &pods);
        assert_eq!(next(&gone, 100, Listing::NotRead), CleanUp::ListPods);
        assert_eq!(next(&gone, 200, Listing::Failed(String::new())), CleanUp::Wait(POLL));
        assert_eq!(next(&gone, 109, Listing::Read(0)), CleanUp::Wait(Duration::from_secs(1)));
        assert_eq!(next(&gone, 110, Listing::Read(0)), CleanUp::Delete);
        let CleanUp::Taint(patch) = next(&gone, 100, Listing::Read(2)) else { panic!("taint first") };
        assert_eq!(patch["spec"]["taints"][0]["key"], OUT_OF_SERVICE);
        let taints = serde_json::from_value(patch["spec"]["taints"].clone()).unwrap();
        gone.spec.get_or_insert_default().taints = Some(taints);
        assert_eq!(next(&gone, 150, Listing::Read(2)), CleanUp::Wait(POLL));
        assert_eq!(next(&gone, 150, Listing::Read(0)), CleanUp::Delete);
        assert_eq!(next(&gone, 190, Listing::Read(2)), CleanUp::Delete);
    }
}
