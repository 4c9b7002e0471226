//! nstance-operator: brings Cluster API objects to the shards, and drains nodes before their VMs go.
//!
//! - [`api`]: what Kubernetes stores;
//! - [`decide`]: what to do, as pure functions of what was observed;
//! - [`ports`]: the Kubernetes API and the shards, as decisions see them.

pub mod api;

pub mod decide;

pub mod ports;
