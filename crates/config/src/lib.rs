//! Configuration of a shard.
pub mod duration;
pub mod jsonc;
pub mod problems;
