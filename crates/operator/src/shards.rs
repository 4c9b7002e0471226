//! The shards: one actor each, which keeps a picture of what the shard has and brings it what objects wish for.
//!
//! No call waits for another shard, and no control loop waits for any: it puts down a wish and is woken with the answer.

pub mod snapshot;

pub mod wishes;

pub mod calls;

pub mod actor;
