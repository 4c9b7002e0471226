//! What Kubernetes stores for us: our five kinds, the fields of Cluster API that we use, and the names of labels,
//! annotations and finalizers.
//!
//! Our kinds are Rust types; `config/crd/` is generated from them. Of Cluster API's kinds only the fields that we read or
//! apply are written down.

pub mod names;

pub mod conditions;

mod schema;

#[expect(unreachable_pub, reason = "the schema derive repeats the type in a scope of its own")]
pub mod cluster;

#[expect(unreachable_pub, reason = "the schema derive repeats the type in a scope of its own")]
pub mod pool;

#[expect(unreachable_pub, reason = "the schema derive repeats the type in a scope of its own")]
pub mod shard_group;

#[expect(unreachable_pub, reason = "the schema derive repeats the type in a scope of its own")]
pub mod machine;

#[expect(unreachable_pub, reason = "the schema derive repeats the type in a scope of its own")]
pub mod template;

pub mod capi;

pub mod manifests;

pub use self::{
    cluster::NstanceCluster, machine::NstanceMachine, pool::NstanceMachinePool, shard_group::NstanceShardGroup,
    template::NstanceMachineTemplate,
};
