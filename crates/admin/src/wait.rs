//! `--wait`: follow groups and instances on all chosen shards until they are as asked for.
//!
//! Each shard is followed by itself, over as many connections as its leaders make necessary; what is known of it is a
//! [`Picture`], and the [`Board`] says purely what that looks like and whether the goal is reached.

#[path = "wait/summary.rs"]
mod board;
#[path = "../../client/src/goal/follow.rs"]
mod follow;
mod progress;

use std::{collections::BTreeMap, time::Duration};

use futures::future::join_all;
use nstance_proto::v1::{GroupStatus, InstanceStatusResponse};
use nstance_rt::shutdown::StopSignals;
use tokio::sync::mpsc;

pub(crate) use self::board::standing;
pub use self::follow::{News, follow};
use self::{
    board::{Board, State},
    progress::Progress,
};
use crate::{args::Context, exit::Exit, failure::Failure, shards::Shards};

/// What is waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// A group has its size: as many ready as wanted, and nobody on the way out.
    Whole(String),
    /// A group is no more, nor any of its instances.
    GroupGone(String),
    /// An instance is there and its agent has come.
    Running(String),
    Deleted(String),
}

impl Goal {
    /// Whether it is about this instance.
    fn concerns(&self, instance: &InstanceStatusResponse) -> bool {
        match self {
            Self::Whole(group) | Self::GroupGone(group) => instance.group == *group && !instance.on_demand,
            Self::Running(id) | Self::Deleted(id) => instance.instance_id == *id,
        }
    }

    fn group(&self) -> Option<&str> {
        match self {
            Self::Whole(group) | Self::GroupGone(group) => Some(group),
            Self::Running(_) | Self::Deleted(_) => None,
        }
    }

    /// What to ask next if it is not reached.
    fn subject(&self) -> &str {
        match self {
            Self::Whole(it) | Self::GroupGone(it) | Self::Running(it) | Self::Deleted(it) => it,
        }
    }
}

/// What one shard has of a goal.
#[derive(Debug, Clone, Default)]
pub struct Picture {
    /// The whole was seen since the last connection began: what is not here is not there.
    pub complete: bool,
    pub group: Option<GroupStatus>,
    pub instances: BTreeMap<String, InstanceStatusResponse>,
}

/// News that are under way from the shards; a slow terminal holds up the streams, and the servers can wait.
const QUEUE: usize = 64;
/// How often clocks on a terminal move.
const TICK: Duration = Duration::from_millis(500);

/// Follows until the goal is reached everywhere. Without luck within the patience the command ends with 4, and the work
/// goes on in the server.
pub async fn wait(context: &Context, shards: &Shards, goal: Goal, patience: Duration) -> Result<Exit, Failure> {
    let names: Vec<String> = shards.targets().iter().map(|it| it.shard.clone()).collect();
    let mut board = Board::new(goal.clone(), &names);
    let mut progress = Progress::new(context.output.progress);
    let (sender, mut news) = mpsc::channel(QUEUE);
    let mut following =
        Box::pin(join_all(shards.targets().iter().map(|target| follow(shards, target, &goal, sender.clone()))));
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
            Some(one) = news.recv() => {
                let lines = board.take(one, crate::words::now());
                progress.show(&lines, || board.lines(began.elapsed(), crate::words::now()));
            }
            _ = ticks.tick() => progress.redraw(|| board.lines(began.elapsed(), crate::words::now())),
            () = &mut deadline => {
                return Err(too_late(&board, &goal, patience));
            }
            _ = &mut following => return Err(Failure::failed("follow the shards: all streams ended")),
        }
        match board.state() {
            State::Open => {}
            State::Reached => return Ok(Exit::Done),
            State::Failed(why) => {
                return Err(Failure::failed(why).next(format!("nstance-admin instance why {}", goal.subject())));
            }
        }
    }
}

fn too_late(board: &Board, goal: &Goal, patience: Duration) -> Failure {
    let missing = board.missing();
    let what = format!("not done after {}: {}", crate::words::span(patience), missing.words.join("; "));
    let mut next: Vec<String> =
        missing.instances.iter().take(3).map(|id| format!("nstance-admin instance why {id}")).collect();
    if let (Some(group), true) = (goal.group(), next.is_empty()) {
        next.push(format!("nstance-admin explain group {group}"));
    }
    Failure::new(Exit::TimedOut, what).next(format!("the work goes on in the server; {}", next.join(", ")))
}
