//! Which Node an instance runs, and whose spelling of its provider id counts.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use super::observed::Instance;
use crate::api::{capi::Meta as _, names::label};

/// The Node of an instance.
#[derive(Debug, Clone, PartialEq)]
pub enum NodeMatch {
    /// No Node of those that were given.
    None,
    One(Arc<Node>),
    /// Several Nodes may be it, or the only one that may be it carries another instance's label. Nothing is done to any of
    /// them, and nothing is concluded. The names of the Nodes.
    Ambiguous(Vec<String>),
}

impl NodeMatch {
    pub fn node(&self) -> Option<&Arc<Node>> {
        match self {
            Self::One(node) => Some(node),
            Self::None | Self::Ambiguous(_) => None,
        }
    }
}

/// Finds the Node of an instance: by label, by the exact provider id, by what the provider id means, by name. The first of
/// these that finds a Node decides.
pub fn node_of(instance: &Instance, nodes: &[Arc<Node>]) -> NodeMatch {
    let labelled: Vec<&Arc<Node>> = nodes.iter().filter(|it| instance_label(it) == Some(&instance.id)).collect();
    match labelled[..] {
        [] => {}
        [node] => return NodeMatch::One(node.clone()),
        _ => return NodeMatch::Ambiguous(labelled.into_iter().map(|it| name(it).to_owned()).collect()),
    }
    // Nodes that would fit, but belong to another instance by their label.
    let mut claimed: Vec<String> = Vec::new();
    for fits in [has_exact_provider_id, has_same_meaning, has_name] {
        let candidates = nodes.iter().filter(|it| fits(instance, it));
        let (taken, free): (Vec<&Arc<Node>>, Vec<&Arc<Node>>) = candidates.partition(|it| instance_label(it).is_some());
        match free[..] {
            [] => claimed.extend(taken.into_iter().map(|it| name(it).to_owned())),
            [node] => return NodeMatch::One(node.clone()),
            _ => return NodeMatch::Ambiguous(free.into_iter().map(|it| name(it).to_owned()).collect()),
        }
    }
    if claimed.is_empty() {
        return NodeMatch::None;
    }
    claimed.sort();
    claimed.dedup();
    NodeMatch::Ambiguous(claimed)
}

/// Whether the Node may be this instance's by provider id or name, whatever its label says.
pub fn may_be(instance: &Instance, node: &Node) -> bool {
    has_exact_provider_id(instance, node) || has_same_meaning(instance, node) || has_name(instance, node)
}

/// The instance that the Node's label names.
pub fn instance_label(node: &Node) -> Option<&str> {
    node.label(label::INSTANCE_ID).filter(|it| !it.is_empty())
}

/// The provider id that counts: the Node's own, else the one that was kept before, else the shard's. Cluster API compares
/// these strings, and deletes the Node of one that changes.
pub fn provider_id_of(kept: Option<&str>, reported: Option<&str>, node: Option<&Node>) -> Option<String> {
    let own = node.and_then(node_provider_id);
    [own, kept, reported].into_iter().flatten().find(|it| !it.is_empty()).map(str::to_owned)
}

pub fn node_provider_id(node: &Node) -> Option<&str> {
    node.spec.as_ref()?.provider_id.as_deref().filter(|it| !it.is_empty())
}

fn name(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

fn has_exact_provider_id(instance: &Instance, node: &Node) -> bool {
    let ours = instance.provider_id.as_deref().filter(|it| !it.is_empty());
    ours.is_some() && node_provider_id(node) == ours
}

fn has_same_meaning(instance: &Instance, node: &Node) -> bool {
    let Some(theirs) = node_provider_id(node).and_then(ProviderId::parse) else { return false };
    let ours = instance.provider_id.as_deref().and_then(ProviderId::parse);
    let wanted = instance.provider_instance_id.as_deref().filter(|it| !it.is_empty());
    let Some(wanted) = wanted.or(ours.as_ref().map(|it| it.last)) else { return false };
    theirs.is_same_name(wanted) && ours.is_none_or(|ours| ours.agrees_with(&theirs))
}

fn has_name(instance: &Instance, node: &Node) -> bool {
    let name = name(node);
    let hostname = instance.hostname.as_deref().unwrap_or_default();
    !name.is_empty() && (name == instance.id || name.eq_ignore_ascii_case(hostname))
}

/// `SCHEME://PLACE/../LAST`
struct ProviderId<'a> {
    scheme: &'a str,
    /// Zone, project, region: all segments before the last one. An empty segment is not known.
    place: Vec<&'a str>,
    last: &'a str,
}

impl<'a> ProviderId<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (scheme, path) = text.split_once("://").unwrap_or(("", text));
        let mut place: Vec<&str> = path.split('/').collect();
        let last = place.pop().filter(|it| !it.is_empty())?;
        Some(Self { scheme, place, last })
    }

    /// Whether the place in front of the last segment means something to us.
    fn is_known_scheme(&self) -> bool {
        matches!(self.scheme, "aws" | "gce" | "proxmox" | "dev" | "azure")
    }

    fn is_same_name(&self, wanted: &str) -> bool {
        if self.scheme == "azure" { self.last.eq_ignore_ascii_case(wanted) } else { self.last == wanted }
    }

    /// Whether both name the same place, as far as both know it.
    fn agrees_with(&self, other: &Self) -> bool {
        if !self.is_known_scheme() || !other.is_known_scheme() {
            return true;
        }
        if self.scheme != other.scheme {
            return false;
        }
        if self.place.len() != other.place.len() {
            return true;
        }
        let mut pairs = self.place.iter().zip(&other.place);
        pairs.all(|(a, b)| a.is_empty() || b.is_empty() || a.eq_ignore_ascii_case(b))
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeSpec;
    use kube::api::ObjectMeta;

    use super::*;

    fn node(name: &str, provider_id: &str) -> Node {
        let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let spec = NodeSpec { provider_id: Some(provider_id.to_owned()), ..NodeSpec::default() };
        Node { metadata, spec: Some(spec), ..Node::default() }
    }

    fn labelled(node: Node, id: &str) -> Node {
        let mut node = node;
        node.metadata.labels = Some([(label::INSTANCE_ID.to_owned(), id.to_owned())].into());
        node
    }

    fn instance(provider_instance_id: &str, provider_id: &str) -> Instance {
        let text = |it: &str| Some(it.to_owned()).filter(|it| !it.is_empty());
        Instance {
            id: "knc1".to_owned(),
            provider_instance_id: text(provider_instance_id),
            provider_id: text(provider_id),
            hostname: Some("web-1.example".to_owned()),
            ..Instance::default()
        }
    }

    fn found(instance: &Instance, nodes: Vec<Node>) -> String {
        let nodes: Vec<Arc<Node>> = nodes.into_iter().map(Arc::new).collect();
        match node_of(instance, &nodes) {
            NodeMatch::None => "none".to_owned(),
            NodeMatch::One(node) => name(&node).to_owned(),
            NodeMatch::Ambiguous(names) => format!("ambiguous {}", names.join(" ")),
        }
    }

    #[test]
    fn the_label_wins_over_everything_else() {
        let it = instance("i-1", "aws:///a/i-1");
        let nodes = vec![node("x", "aws:///a/i-1"), labelled(node("y", "aws:///a/i-2"), "knc1")];
        assert_eq!(found(&it, nodes), "y");
        let twice = vec![labelled(node("x", ""), "knc1"), labelled(node("y", ""), "knc1")];
        assert_eq!(found(&it, twice), "ambiguous x y");
    }

    #[test]
    fn each_scheme_is_matched_by_its_last_segment_and_the_places_that_both_know() {
        let cases = [
            // provider instance id, our provider id, the Node's, matches
            ("i-1", "aws:///eu-1a/i-1", "aws:///eu-1a/i-1", true),
            ("i-1", "", "aws:///eu-1a/i-1", true),
            ("i-1", "aws:////i-1", "aws:///eu-1a/i-1", true),
            ("i-1", "aws:///eu-1a/i-1", "aws:///eu-1b/i-1", false),
            ("i-1", "", "aws:///eu-1a/i-11", false),
            ("vm", "gce://p/z/vm", "gce://p/z/vm", true),
            ("4711", "gce://p/z/vm", "gce://p/z/vm", true),
            ("vm", "gce://p/z/vm", "gce://q/z/vm", false),
            ("105", "proxmox://r1/105", "proxmox://r1/105", true),
            ("105", "proxmox://r1/105", "proxmox://r2/105", false),
            ("5b7c", "proxmox://r1/105", "proxmox://5b7c", true),
            ("nstance-agent-knc1", "dev:///nstance-agent-knc1", "dev:///nstance-agent-knc1", true),
            ("vm-1", "azure:///subscriptions/a/vm-1", "azure:///subscriptions/A/VM-1", true),
            ("vm-1", "azure:///subscriptions/a/vm-1", "azure:///subscriptions/b/vm-1", false),
            ("x-9", "", "openstack:///x-9", true),
            ("x-9", "fake://elsewhere/x-9", "openstack://here/x-9", true),
            ("i-1", "aws:///eu-1a/i-1", "gce://p/z/i-1", false),
            ("", "", "aws:///eu-1a/i-1", false),
        ];
        for (id, ours, theirs, matches) in cases {
            let expected = if matches { "n" } else { "none" };
            assert_eq!(found(&instance(id, ours), vec![node("n", theirs)]), expected, "{id} {ours} {theirs}");
        }
    }

    #[test]
    fn a_name_matches_last() {
        assert_eq!(found(&instance("", ""), vec![node("knc1", "")]), "knc1");
        assert_eq!(found(&instance("", ""), vec![node("web-1.example", "foo://bar/1")]), "web-1.example");
        assert_eq!(found(&instance("i-1", ""), vec![node("knc1", ""), node("x", "aws:///a/i-1")]), "x");
        assert_eq!(found(&instance("", ""), vec![node("web-1", "")]), "none");
    }

    #[test]
    fn several_candidates_are_no_match() {
        let it = instance("105", "");
        assert_eq!(found(&it, vec![node("a", "proxmox://r1/105"), node("b", "proxmox://r2/105")]), "ambiguous a b");
    }

    #[test]
    fn a_node_that_another_instance_has_labelled_is_never_taken_and_proves_nothing() {
        let it = instance("105", "proxmox://r1/105");
        let other = || labelled(node("a", "proxmox://r1/105"), "knc0");
        assert_eq!(found(&it, vec![other()]), "ambiguous a");
        assert_eq!(found(&it, vec![other(), node("knc1", "")]), "knc1");
    }

    #[test]
    fn a_node_s_own_provider_id_is_adopted_and_never_given_back() {
        let own = node("n", "proxmox://5b7c");
        let without = node("n", "");
        let id = |kept, node| provider_id_of(kept, Some("proxmox://r1/105"), node);
        assert_eq!(id(None, None).as_deref(), Some("proxmox://r1/105"));
        assert_eq!(id(Some("proxmox://r1/105"), Some(&own)).as_deref(), Some("proxmox://5b7c"));
        assert_eq!(id(Some("proxmox://5b7c"), Some(&without)).as_deref(), Some("proxmox://5b7c"));
        assert_eq!(id(Some("proxmox://5b7c"), None).as_deref(), Some("proxmox://5b7c"));
        assert_eq!(provider_id_of(None, None, None), None);
    }
}
