//! One shard, over as many connections as it takes.

use std::time::Duration;

use nstance_proto::v1::{GroupEvent, InstanceEvent, WatchRequest, group_event::Type};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::sync::mpsc::Sender;
use tonic::Status;

use super::{Goal, Picture};
use crate::shards::{ShardError, Shards, Target};

const BASE: Duration = Duration::from_millis(100);
const CAP: Duration = Duration::from_secs(2);

/// Something was learnt of a shard.
#[derive(Debug)]
pub enum News {
    Picture {
        shard: String,
        picture: Box<Picture>,
    },
    /// Something went wrong there, be it with us or in the server's work.
    Trouble {
        shard: String,
        message: String,
    },
}

/// Tells what is known whenever it changes, and never ends by itself: a leader that goes is waited for.
pub async fn follow(shards: &Shards, target: &Target, goal: &Goal, news: Sender<News>) {
    let entropy = SystemEntropy::new();
    let mut backoff = Backoff::new(BASE, CAP);
    loop {
        let Err(error) = once(shards, target, goal, &news, &mut backoff).await else { return };
        let trouble =
            News::Trouble { shard: target.shard.clone(), message: format!("{}; trying again", error.message) };
        // The first time it may be the change of a leader, which is over in a moment.
        if 1 < backoff.n_tries() && news.send(trouble).await.is_err() {
            return;
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// `Ok` if nobody listens any more.
async fn once(
    shards: &Shards,
    target: &Target,
    goal: &Goal,
    news: &Sender<News>,
    backoff: &mut Backoff,
) -> Result<(), ShardError> {
    let refused = |status: Status| ShardError::of(&target.shard, &status);
    let mut client = shards.connect(target).await?;
    let from_start = WatchRequest::default;
    let mut groups = client.service.watch_groups(from_start()).await.map_err(refused)?.into_inner();
    let mut instances = client.service.watch_instances(from_start()).await.map_err(refused)?.into_inner();
    let mut errors = client.service.watch_errors(from_start()).await.map_err(refused)?.into_inner();
    let mut picture = Picture::default();
    let (mut all_groups, mut all_instances) = (false, false);
    let ended = || ShardError::new(&target.shard, tonic::Code::Unavailable, "the stream ended");
    loop {
        let changed = tokio::select! {
            biased;
            event = groups.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                all_groups |= event.r#type() == Type::SnapshotEnd;
                take_group(&mut picture, goal, event)
            }
            event = instances.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                all_instances |= event.status == "snapshot_end";
                take_instance(&mut picture, goal, event)
            }
            event = errors.message() => {
                let event = event.map_err(refused)?.ok_or_else(ended)?;
                if goal.group().is_some_and(|group| group == event.group) || picture.instances.contains_key(&event.instance_id) {
                    let message = format!("{}: {}", event.reason, event.error);
                    if news.send(News::Trouble { shard: target.shard.clone(), message }).await.is_err() {
                        return Ok(());
                    }
                }
                false
            }
        };
        let whole = all_groups && all_instances;
        if whole && (changed || !picture.complete) {
            picture.complete = true;
            backoff.reset();
            let told = News::Picture { shard: target.shard.clone(), picture: Box::new(picture.clone()) };
            if news.send(told).await.is_err() {
                return Ok(());
            }
        }
    }
}

fn take_group(picture: &mut Picture, goal: &Goal, event: GroupEvent) -> bool {
    let kind = event.r#type();
    let Some(group) = event.group.filter(|it| goal.group() == Some(it.key.as_str())) else { return false };
    picture.group = (kind == Type::Upsert).then_some(group);
    true
}

fn take_instance(picture: &mut Picture, goal: &Goal, event: InstanceEvent) -> bool {
    let Some(instance) = event.instance.filter(|it| goal.concerns(it)) else { return false };
    picture.instances.insert(instance.instance_id.clone(), instance);
    true
}
