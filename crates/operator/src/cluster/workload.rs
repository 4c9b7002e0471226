//! The workload cluster: where the Nodes are. Usually the operator's own cluster; with an external one, access may be
//! missing, come later, and change.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use super::store::Store;
use crate::ports::KubePort;

/// Access to the workload cluster.
#[derive(Clone)]
pub enum Access {
    Granted(Arc<dyn KubePort>),
    /// Why there is none, in words for a condition.
    Missing {
        reason: &'static str,
        message: String,
    },
}

pub struct Workload {
    access: watch::Sender<Access>,
    /// All Nodes, without images and managed fields. Not synced while there is no access, or not yet a complete list.
    pub nodes: Arc<Store<Node>>,
}

impl Workload {
    pub fn new(access: Access) -> Arc<Self> {
        Arc::new(Self { access: watch::Sender::new(access), nodes: Store::new() })
    }

    pub fn access(&self) -> Access {
        self.access.borrow().clone()
    }

    pub fn set(&self, access: Access) {
        self.access.send_replace(access);
    }

    pub fn subscribe(&self) -> watch::Receiver<Access> {
        self.access.subscribe()
    }

    /// The API of the workload cluster, if there is access and all Nodes were listed at least once.
    pub fn api(&self) -> Option<Arc<dyn KubePort>> {
        match &*self.access.borrow() {
            Access::Granted(api) if self.nodes.is_synced() => Some(api.clone()),
            _ => None,
        }
    }
}
