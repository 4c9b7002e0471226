//! nstance-operator: brings Cluster API objects to the shards, and drains nodes before their VMs go.
//!
//! - [`api`]: what Kubernetes stores.

pub mod api;
