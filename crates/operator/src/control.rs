//! The control loops: one thin file per kind. Each reads the stores and the pictures of the shards, asks `decide` what is
//! wanted, and carries it out. Loops are level-triggered: an event only says which object to look at again.

pub mod queue;

pub mod context;

pub mod apply;

pub mod finalizer;

pub mod cluster;

pub mod import;

pub mod pool;

pub mod machine;

pub mod pods;

pub mod template;

pub mod shard_group;

pub mod drain;

pub mod nodes;

use std::sync::Arc;

use nstance_rt::tasks::Tasks;

use self::context::Context;

/// Starts all control loops. The stores must be watched already; each loop waits for what it needs.
pub fn start_all(tasks: &Tasks, ctx: &Arc<Context>, metrics: Arc<dyn drain::DrainMetrics>) {
    let of_queues: Arc<dyn queue::QueueMetrics> = metrics.clone();
    cluster::connect(ctx);
    import::connect(ctx);
    pool::connect(ctx);
    shard_group::connect(ctx);
    drain::connect(ctx);
    nodes::connect(ctx);
    machine::connect(ctx);
    pods::connect(ctx);
    template::connect(ctx);
    cluster::start(tasks, ctx, &of_queues);
    import::start(tasks, ctx, &of_queues);
    pool::start(tasks, ctx, &of_queues);
    shard_group::start(tasks, ctx, &of_queues);
    drain::start_measured(tasks, ctx, metrics);
    nodes::start(tasks, ctx, &of_queues);
    machine::start(tasks, ctx, &of_queues);
    pods::start(tasks, ctx, &of_queues);
    template::start(tasks, ctx, &of_queues);
}

#[cfg(test)]
mod tests;
