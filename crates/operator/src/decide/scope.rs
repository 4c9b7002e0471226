//! Whether the operator may act on an object at all: paused objects, clusters that are moved away, APIs that are being
//! removed.

use crate::api::{
    capi::{Cluster, Meta as _},
    names::{annotation, label},
};

/// What the operator may do about an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    Act,
    /// Paused by a person: no effects, and condition `Paused`. The reason says by what.
    Paused {
        by: &'static str,
    },
    /// Nothing at all: it belongs to somebody else, is being moved, or its Cluster is not known.
    HandsOff {
        why: &'static str,
    },
    /// The API that stores it is being removed: no call to a shard, finalizers are dropped, VMs stay.
    Orphan {
        what: String,
    },
}

/// What is known of the Cluster that an object belongs to.
#[derive(Debug, Clone, Copy)]
pub enum ClusterView<'a> {
    Present(&'a Cluster),
    /// Proven absent by a complete list.
    Absent,
    /// Not read yet.
    Unknown,
}

/// The rules of pause, move and orphaning, in the order in which they win.
pub fn scope<K: kube::Resource>(
    object: &K,
    cluster: ClusterView<'_>,
    watch_filter: Option<&str>,
    terminating: Option<&str>,
) -> Scope {
    if watch_filter.is_some() && object.label(label::WATCH_FILTER) != watch_filter {
        return Scope::HandsOff { why: "its watch-filter label names another operator" };
    }
    if object.annotation(annotation::DELETE_FOR_MOVE).is_some() {
        return Scope::HandsOff { why: "it is being moved to another management cluster" };
    }
    if let Some(what) = terminating {
        return Scope::Orphan { what: what.to_owned() };
    }
    match cluster {
        ClusterView::Unknown => Scope::HandsOff { why: "its Cluster is not read yet" },
        ClusterView::Present(cluster) if cluster.annotation(annotation::DELETE_FOR_MOVE).is_some() => {
            Scope::HandsOff { why: "its Cluster is being moved to another management cluster" }
        }
        ClusterView::Present(cluster) if cluster.spec.paused == Some(true) => {
            Scope::Paused { by: "Cluster.spec.paused" }
        }
        _ if object.annotation(annotation::PAUSED).is_some() => {
            Scope::Paused { by: "annotation cluster.x-k8s.io/paused" }
        }
        ClusterView::Present(_) | ClusterView::Absent => Scope::Act,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{NstanceMachinePool, capi::ClusterSpec};

    fn annotated(key: &str) -> NstanceMachinePool {
        let mut pool = NstanceMachinePool::default();
        pool.metadata.annotations = Some([(key.to_owned(), String::new())].into());
        pool
    }

    #[test]
    fn a_moved_object_is_left_alone_even_if_its_api_is_removed() {
        let moved = annotated(annotation::DELETE_FOR_MOVE);
        let scope_of = |pool: &NstanceMachinePool, terminating| scope(pool, ClusterView::Absent, None, terminating);
        assert!(matches!(scope_of(&moved, Some("Namespace default")), Scope::HandsOff { .. }));
        let pool = NstanceMachinePool::default();
        let orphan = Scope::Orphan { what: "Namespace default".to_owned() };
        assert_eq!(scope_of(&pool, Some("Namespace default")), orphan);
        assert_eq!(scope_of(&pool, None), Scope::Act);
    }

    #[test]
    fn pausing_an_object_or_its_cluster_stops_effects() {
        let pool = NstanceMachinePool::default();
        let paused =
            Cluster { spec: ClusterSpec { paused: Some(true), ..ClusterSpec::default() }, ..Cluster::default() };
        assert!(matches!(scope(&pool, ClusterView::Present(&paused), None, None), Scope::Paused { .. }));
        let paused = annotated(annotation::PAUSED);
        assert!(matches!(scope(&paused, ClusterView::Absent, None, None), Scope::Paused { .. }));
        assert!(matches!(scope(&pool, ClusterView::Unknown, None, None), Scope::HandsOff { .. }));
    }

    #[test]
    fn a_watch_filter_selects_by_label() {
        let pool = NstanceMachinePool::default();
        assert!(matches!(scope(&pool, ClusterView::Absent, Some("a"), None), Scope::HandsOff { .. }));
    }
}
