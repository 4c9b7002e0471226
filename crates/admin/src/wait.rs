//! `--wait`: follow groups and instances on all chosen shards until they are as asked for.
//!
//! `nstance_client::goal` follows each shard and decides whether the goal is reached there; the [`Summary`] makes lines of
//! all shards together, and [`Progress`] writes them.

mod progress;
mod summary;

use std::time::Duration;

use futures::future::join_all;
use nstance_client::{
    Shards,
    goal::{Goal, follow},
};
use nstance_rt::shutdown::StopSignals;
use tokio::sync::mpsc;

pub(crate) use self::summary::group_progress;
use self::{
    progress::Progress,
    summary::{Outcome, Summary},
};
use crate::{args::Context, exit::Exit, failure::Failure};

/// Updates on their way from the streams. A slow terminal slows down the streams, which the servers tolerate.
const QUEUE: usize = 64;
/// How often the elapsed times on a terminal are redrawn.
const TICK: Duration = Duration::from_millis(500);

/// Follows until the goal is reached everywhere. If it is not within `patience`, the command ends with 4, and the server
/// goes on.
pub async fn wait(context: &Context, shards: &Shards, goal: Goal, patience: Duration) -> Result<Exit, Failure> {
    let names: Vec<String> = shards.names().map(str::to_owned).collect();
    let mut summary = Summary::new(goal.clone(), &names);
    let mut progress = Progress::new(context.output.progress);
    let (sender, mut updates) = mpsc::channel(QUEUE);
    let mut following = Box::pin(join_all(shards.connections().iter().map(|it| follow(it, &goal, sender.clone()))));
    let mut stop = StopSignals::listen().map_err(|error| Failure::failed("listen for signals").because(error))?;
    let began = tokio::time::Instant::now();
    let mut ticks = tokio::time::interval(TICK);
    let deadline = tokio::time::sleep(patience);
    tokio::pin!(deadline);
    loop {
        tokio::select! {
            biased;
            signal = stop.next() => {
                context.output.note(&format!("{signal}: no longer watching; the work goes on in the server"));
                return Ok(Exit::Interrupted);
            }
            Some(update) = updates.recv() => {
                let lines = summary.apply(update, crate::words::now());
                progress.show(&lines, || summary.lines(began.elapsed(), crate::words::now()));
            }
            _ = ticks.tick() => progress.redraw(|| summary.lines(began.elapsed(), crate::words::now())),
            () = &mut deadline => {
                return Err(too_late(&summary, &goal, patience));
            }
            _ = &mut following => return Err(Failure::failed("follow the shards: all streams ended")),
        }
        match summary.outcome() {
            Outcome::Open => {}
            Outcome::Reached => return Ok(Exit::Done),
            Outcome::Failed(why) => {
                return Err(
                    Failure::failed(why.to_string()).next(format!("nstance-admin instance why {}", goal.subject()))
                );
            }
        }
    }
}

fn too_late(summary: &Summary, goal: &Goal, patience: Duration) -> Failure {
    let missing = summary.missing();
    let what = format!("not done after {}: {}", crate::words::span(patience), missing.descriptions.join("; "));
    let mut next: Vec<String> =
        missing.instances.iter().take(3).map(|id| format!("nstance-admin instance why {id}")).collect();
    if let (Some(group), true) = (goal.group(), next.is_empty()) {
        next.push(format!("nstance-admin explain group {group}"));
    }
    Failure::new(Exit::TimedOut, what).next(format!("the work goes on in the server; {}", next.join(", ")))
}
