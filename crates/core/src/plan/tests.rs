//! The planner by pictures: a shard, and what is to be done about it. The checker reads along.

mod drains;
mod grace;
mod losses;
mod properties;
mod rotations;
mod sizes;
