//! A deterministic simulation: the real server, store and planner code on one thread and one clock that jumps from
//! event to event, with a cloud, agents and operators that misbehave by the numbers of a seed.
//!
//! Everything that depends on chance or time takes it from the seed, so one seed gives one run, to the last line of its
//! trace. A run that breaks a promise prints its seed; the same seed, run again, breaks it again.

mod fleet;
mod judge;
mod many;
mod mutations;
mod net;
mod operators;
mod site;
mod story;
mod witness;

use std::sync::Arc;

use nstance_core::plan;
use nstance_rt::tasks::Tasks;
use nstance_server::term::Planner;

pub use judge::Stats;
pub use many::{Summary, report, run_many};
pub use mutations::Mutation;

/// How a run is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub steps: u64,
    /// A planner that is wrong in one way, to see whether anybody notices.
    pub mutation: Option<Mutation>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { steps: 30, mutation: None }
    }
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub seed: u64,
    pub violations: Vec<String>,
    pub trace: Vec<String>,
    /// Of the trace; equal for equal runs.
    pub digest: u64,
    pub stats: Stats,
}

/// Runs one seed from its beginning to its end.
pub fn run(seed: u64, setup: Setup) -> anyhow::Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let outcome = runtime.block_on(async {
        let planner: Planner = match setup.mutation {
            None => Arc::new(plan::plan),
            Some(mutation) => Arc::new(move |snapshot, now| mutation.plan(snapshot, now)),
        };
        let site = site::Site::new(seed, story::options(seed), planner)?;
        let tasks = Tasks::new();
        let story = story::Story::begin(&site, seed, &tasks).await?;
        story.play(setup.steps).await;
        story.heal();
        story.settle().await;
        tasks.end(std::time::Duration::ZERO).await;
        site.close().await;
        let (violations, trace, digest, stats) = site.judge().verdict();
        anyhow::Ok(Outcome { seed, violations, trace, digest, stats })
    })?;
    drop(runtime);
    Ok(outcome)
}
