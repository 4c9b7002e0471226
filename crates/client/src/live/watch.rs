//! One shard, whoever leads it, over as many connections as it takes.

use std::{sync::Arc, time::Duration};

use nstance_proto::v1::{
    ConfigStatusResponse, Event, GroupEvent, InstanceEvent, WatchEventsRequest, WatchRequest, group_event::Type,
};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::{Code, Status, Streaming};

use super::{Begun, Live, News, Picture, Position};
use crate::shards::{Client, N_REPLAYED, ShardError, Shards, Target};

/// Of operators, in the API's rules.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// A shard may have nothing to tell for long. What is shown of it is called old after 10 s, so it is asked more often.
const PROBE: Duration = Duration::from_secs(4);
/// How long it may take to answer that.
const PROBE_LIMIT: Duration = Duration::from_secs(5);

pub(super) async fn keep(live: Arc<Live>, at: usize, shards: Shards, target: Target) {
    let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, LONGEST_WAIT), SystemEntropy::new());
    loop {
        let late = |_| {
            let message = format!("no answer within {} s", shards.timeout().as_secs_f64());
            ShardError::new(&target.shard, Code::DeadlineExceeded, message)
        };
        let opened = timeout(shards.timeout(), open(&live, at, &shards, &target)).await.map_err(late).flatten();
        let error = match opened {
            Err(error) => error,
            Ok(streams) => {
                backoff.reset();
                tracing::info!(shard = %target.shard, "in touch with the shard");
                let error = streams.follow(&live, at, &target).await;
                tracing::info!(shard = %target.shard, %error, "not in touch with the shard any more");
                error
            }
        };
        live.take(at, News::Lost(error));
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// The open streams of one leader, after their snapshots.
struct Streams {
    client: Client,
    groups: Streaming<GroupEvent>,
    instances: Streaming<InstanceEvent>,
    events: Streaming<Event>,
    status: ConfigStatusResponse,
}

/// Opens all streams and reads them to where the present begins. Events of the past are told on the way, so that none is
/// missing between them and what follows.
async fn open(live: &Live, at: usize, shards: &Shards, target: &Target) -> Result<Streams, ShardError> {
    let of = |status: Status| ShardError::of(&target.shard, &status);
    let mut begun = Begun { writes: live.writes(at), instances_at: None };
    // Anew: of a connection that others have kept it is not known whether it still leads anywhere.
    let mut client = shards.dial(target).await?;
    let status = client.config().await.map_err(of)?;
    // From where we were; with a new leader, from its beginning.
    let last = live.position(at).filter(|it| it.epoch() == status.epoch);
    let resume_token = last.unwrap_or_else(|| Position::beginning(status.epoch)).to_string();
    let request = WatchEventsRequest { resume_token, ..WatchEventsRequest::default() };
    let answer = client.service.watch_events(request).await.map_err(of)?;
    let n_past = answer.metadata().get(N_REPLAYED).and_then(|it| it.to_str().ok()?.parse().ok()).unwrap_or(0_usize);
    let mut events = answer.into_inner();
    for _ in 0..n_past {
        live.take(at, News::Event(Box::new(next(&mut events, target).await?)));
    }
    let from_start = WatchRequest::default;
    let mut groups = client.service.watch_groups(from_start()).await.map_err(of)?.into_inner();
    let mut instances = client.service.watch_instances(from_start()).await.map_err(of)?.into_inner();
    let mut picture = Picture { status: Arc::new(status.clone()), ..Picture::default() };
    loop {
        let event = next(&mut groups, target).await?;
        match (event.r#type(), event.group) {
            (Type::SnapshotEnd, _) => break,
            (Type::Upsert, Some(group)) => _ = picture.groups.insert(group.key.clone(), Arc::new(group)),
            (Type::Delete, Some(group)) => _ = picture.groups.remove(&group.key),
            (_, None) => {}
        }
    }
    loop {
        let event = next(&mut instances, target).await?;
        match event.instance {
            _ if event.status == "snapshot_end" => {
                begun.instances_at = Position::parse(&event.resume_token);
                break;
            }
            Some(it) if it.status != "deleted" => {
                picture.instances.insert(it.instance_id.clone(), Arc::new(it));
            }
            _ => _ = picture.instances.remove(&event.instance_id),
        }
    }
    live.take(at, News::Whole(Box::new(picture), begun));
    Ok(Streams { client, groups, instances, events, status })
}

async fn next<T>(stream: &mut Streaming<T>, target: &Target) -> Result<T, ShardError> {
    match stream.message().await {
        Ok(Some(it)) => Ok(it),
        Ok(None) => Err(ShardError::new(&target.shard, Code::Unavailable, "its stream ended")),
        Err(status) => Err(ShardError::of(&target.shard, &status)),
    }
}

impl Streams {
    /// Tells what comes until one of the streams ends, and says why it did.
    async fn follow(mut self, live: &Live, at: usize, target: &Target) -> ShardError {
        let mut probes = interval(PROBE);
        probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        probes.reset();
        loop {
            let news = tokio::select! {
                biased;
                _ = probes.tick() => self.probe(target).await,
                it = next(&mut self.groups, target) => it.map(of_group),
                it = next(&mut self.instances, target) => it.map(of_instance),
                it = next(&mut self.events, target) => it.map(|event| News::Event(Box::new(event))),
            };
            match news {
                Ok(news) => live.take(at, news),
                Err(error) => return error,
            }
        }
    }

    async fn probe(&mut self, target: &Target) -> Result<News, ShardError> {
        let late = |_| {
            let message = format!("no answer within {} s", PROBE_LIMIT.as_secs());
            ShardError::new(&target.shard, Code::DeadlineExceeded, message)
        };
        let status = timeout(PROBE_LIMIT, self.client.config()).await.map_err(late)?;
        let status = status.map_err(|status| ShardError::of(&target.shard, &status))?;
        if status == self.status {
            return Ok(News::Alive);
        }
        self.status.clone_from(&status);
        Ok(News::Status(Box::new(status)))
    }
}

fn of_group(event: GroupEvent) -> News {
    let place = Position::parse(&event.resume_token);
    match (event.r#type(), event.group) {
        (Type::Upsert, Some(group)) => News::Group(Box::new(group), place),
        (Type::Delete, Some(group)) => News::GroupGone(group.key, place),
        _ => News::Alive,
    }
}

fn of_instance(event: InstanceEvent) -> News {
    let place = Position::parse(&event.resume_token);
    event.instance.map_or(News::Alive, |it| News::Instance(Box::new(it), place))
}
