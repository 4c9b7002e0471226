//! Follows the streams of one shard for a goal, over as many connections as it takes.

use std::time::Duration;

use nstance_proto::v1::{GroupEvent, InstanceEvent, WatchRequest, group_event::Type};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::sync::mpsc::Sender;
use tonic::Status;

use super::{Goal, GoalState};
use crate::{Connection, ShardError};

const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(2);

/// What was learnt of one shard.
#[derive(Debug)]
pub enum GoalUpdate {
    State {
        shard: String,
        state: Box<GoalState>,
    },
    /// The shard cannot be reached, or it reported an error in its work.
    Problem {
        shard: String,
        message: String,
    },
}

/// Reports the state whenever it changes. Never ends by itself: while there is no leader, one is waited for. Ends when the
/// receiver is closed.
pub async fn follow(connection: &Connection, goal: &Goal, updates: Sender<GoalUpdate>) {
    let entropy = SystemEntropy::new();
    let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
    loop {
        let Err(error) = follow_once(connection, goal, &updates, &mut backoff).await else { return };
        let message = format!("{}; trying again", error.message);
        let problem = GoalUpdate::Problem { shard: connection.shard().to_owned(), message };
        // The first failure may be a change of leaders, which is over in a moment.
        if 1 < backoff.n_tries() && updates.send(problem).await.is_err() {
            return;
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// Reads the streams until one ends. `Ok` if the receiver is closed.
async fn follow_once(
    connection: &Connection,
    goal: &Goal,
    updates: &Sender<GoalUpdate>,
    backoff: &mut Backoff,
) -> Result<(), ShardError> {
    let shard = connection.shard();
    let refused = |status: Status| ShardError::from_status(shard, &status);
    let mut client = connection.client().await?;
    let from_snapshot = WatchRequest::default;
    let mut groups = client.service.watch_groups(from_snapshot()).await.map_err(refused)?.into_inner();
    let mut instances = client.service.watch_instances(from_snapshot()).await.map_err(refused)?.into_inner();
    let mut errors = client.service.watch_errors(from_snapshot()).await.map_err(refused)?.into_inner();
    let mut state = GoalState::default();
    let (mut all_groups, mut all_instances) = (false, false);
    let ended = || ShardError::new(shard, tonic::Code::Unavailable, "the stream ended");
    loop {
        let changed = tokio::select! {
            biased;
            event = groups.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                all_groups |= event.r#type() == Type::SnapshotEnd;
                apply_group(&mut state, goal, event)
            }
            event = instances.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                all_instances |= event.status == "snapshot_end";
                apply_instance(&mut state, goal, event)
            }
            event = errors.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                if goal.group() == Some(event.group.as_str()) || state.instances.contains_key(&event.instance_id) {
                    let message = format!("{}: {}", event.reason, event.error);
                    let problem = GoalUpdate::Problem { shard: shard.to_owned(), message };
                    if updates.send(problem).await.is_err() {
                        return Ok(());
                    }
                }
                false
            }
        };
        if all_groups && all_instances && (changed || !state.complete) {
            state.complete = true;
            backoff.reset();
            let update = GoalUpdate::State { shard: shard.to_owned(), state: Box::new(state.clone()) };
            if updates.send(update).await.is_err() {
                return Ok(());
            }
        }
    }
}

fn apply_group(state: &mut GoalState, goal: &Goal, event: GroupEvent) -> bool {
    let kind = event.r#type();
    let Some(group) = event.group.filter(|it| goal.group() == Some(it.key.as_str())) else { return false };
    state.group = (kind == Type::Upsert).then_some(group);
    true
}

fn apply_instance(state: &mut GoalState, goal: &Goal, event: InstanceEvent) -> bool {
    let Some(instance) = event.instance.filter(|it| goal.concerns(it)) else { return false };
    state.instances.insert(instance.instance_id.clone(), instance);
    true
}
