//! A deterministic simulation: the real server, store and planner code on one thread and one clock that jumps from
//! event to event, with a cloud, agents and operators that misbehave by the numbers of a seed.
//!
//! Everything that depends on chance or time takes it from the seed, so one seed gives one run, to the last line of its
//! trace. A run that breaks a promise prints its seed; the same seed, run again, breaks it again.

mod clock;
mod fleet;
mod hands;
mod hosts;
mod judge;
mod many;
mod mutations;
mod net;
mod operators;
mod peers;
mod plane;
mod points;
mod site;
mod story;
mod witness;

use std::sync::Arc;

use nstance_core::plan;
use nstance_server::term::Planner;

pub use judge::Stats;
pub use many::{Summary, report, run_many};
pub use mutations::Mutation;
pub use operators::Wish;
pub use plane::{Beginning, Manners, Plane};
pub use points::{Points, Side};

/// How a run is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub steps: u64,
    /// A planner that is wrong in one way, to see whether anybody notices.
    pub mutation: Option<Mutation>,
    /// Whether the second opinion on each plan is heard, or only what comes of the plans.
    pub hears_checker: bool,
    /// How many servers the shard has. `None`: one to three, as the seed says.
    pub servers: Option<usize>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { steps: 30, mutation: None, hears_checker: true, servers: None }
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
    simulate(async {
        let planner: Planner = match setup.mutation {
            None => Arc::new(plan::plan),
            Some(mutation) => Arc::new(move |snapshot, now| mutation.plan(snapshot, now)),
        };
        let story = story::Story::begin(seed, planner, setup).await?;
        story.play(setup.steps).await;
        story.plane.heal().await;
        story.plane.settle().await;
        story.plane.close().await;
        let (violations, trace, digest, stats) = story.plane.site.judge().verdict();
        anyhow::Ok(Outcome { seed, violations, trace, digest, stats })
    })
}

/// Runs something on a thread and a clock of its own; the clock jumps to the next timer when nothing else is to do.
pub fn simulate<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O can always be had").block_on(work)
}
