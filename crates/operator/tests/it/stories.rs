//! The whole operator beside everything that it works with: an API server, the stand-ins for Cluster API and kubelets, and
//! shards with machines.

pub(crate) mod plane;

pub(crate) mod drains;

mod endings;

mod hints;

mod on_demand;

pub(crate) mod pools;

mod workload;
