//! The Kubernetes API: what the operator watches, and how it writes.

pub mod store;

pub mod events;

pub mod workload;

pub mod leadership;

pub mod lease;

pub mod client;

pub mod watch;

pub mod event_writer;

pub mod secrets;

pub mod identity;

pub mod renewal;

pub mod kubeconfig;
