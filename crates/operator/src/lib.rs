//! nstance-operator: brings Cluster API objects to the shards, and drains nodes before their VMs go.
//!
//! - [`api`]: what Kubernetes stores;
//! - `decide`: what to do, as pure functions of what was observed;
//! - `cluster`: the Kubernetes API, `shards`: the Nstance API; both behind small traits;
//! - `control`: one file per kind: read stores, decide, act.

pub mod api;

pub mod decide;

pub mod ports;

pub mod cluster;

pub mod control;

pub mod shards;

pub mod metrics;

pub mod args;

pub mod config;

pub mod http;

pub mod webhook;

pub mod run;

pub mod testing;
