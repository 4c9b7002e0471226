//! What to do, as pure functions: no Kubernetes client, no runtime, no clock.
//!
//! A function here takes what was observed (objects of the stores, pictures of the shards, the time) and returns what is
//! wanted: objects, sizes, statuses, calls. `control` carries it out.

pub mod observed;

pub mod scope;

pub mod capacity;

pub mod machine;

pub mod on_demand;

pub mod pool;

pub mod shard_group;

pub mod import;

pub mod cluster;

pub mod node_match;

pub mod pods;

pub mod drain;

pub mod node_state;
