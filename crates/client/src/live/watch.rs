//! Reads the watch streams of one shard, over as many leaders and connections as it takes.

use std::{sync::Arc, time::Duration};

use nstance_proto::v1::{
    ConfigStatusResponse, Event, GroupEvent, InstanceEvent, WatchEventsRequest, WatchRequest, group_event::Type,
};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::{Code, Status, Streaming};

use super::{LiveState, ShardState, SnapshotStart, Update};
use crate::{Connection, ResumeToken, ShardClient, ShardError, events::n_replayed};

/// The client retry rule of the operators' service.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);

/// A shard may have nothing to report for long. Its state is called old after 10 s, so it is asked more often than that.
const PROBE_PERIOD: Duration = Duration::from_secs(4);
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps the streams of one shard open and applies what they report. Never ends by itself.
pub(super) async fn run(live: Arc<LiveState>, shard_index: usize, connection: Connection) {
    let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, MAX_WAIT), SystemEntropy::new());
    let (shard, limit) = (connection.shard(), connection.timeout());
    loop {
        let timed_out = |_| ShardError::timed_out(shard, limit);
        let opened = timeout(limit, open(&live, shard_index, &connection)).await.map_err(timed_out).flatten();
        let error = match opened {
            Err(error) => error,
            Ok(streams) => {
                backoff.reset();
                tracing::info!(%shard, "in touch with the shard");
                let error = streams.read(&live, shard_index).await;
                tracing::info!(%shard, %error, "not in touch with the shard any more");
                error
            }
        };
        live.apply(shard_index, Update::Disconnected(error));
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// The open streams of one leader, after their snapshots.
struct Streams {
    client: ShardClient,
    groups: Streaming<GroupEvent>,
    instances: Streaming<InstanceEvent>,
    events: Streaming<Event>,
    status: ConfigStatusResponse,
}

/// Opens all streams and reads them up to the end of their snapshots. Past events are applied on the way, so that none is
/// missing between them and the following ones.
async fn open(live: &LiveState, shard_index: usize, connection: &Connection) -> Result<Streams, ShardError> {
    let shard = connection.shard();
    let refused = |status: Status| ShardError::from_status(shard, &status);
    let mut start = SnapshotStart { n_writes: live.n_writes(shard_index), instances_at: None };
    // A new connection: a kept one may be dead without anybody having noticed.
    let mut client = connection.dial().await?;
    let status = client.config_status().await.map_err(refused)?;
    // From the last event we have; after a change of leaders, from the beginning of the new leader's epoch.
    let last = live.last_token(shard_index).filter(|it| it.epoch() == status.epoch);
    let resume_token = last.unwrap_or_else(|| ResumeToken::start_of_epoch(status.epoch)).to_string();
    let request = WatchEventsRequest { resume_token, ..WatchEventsRequest::default() };
    let answer = client.service.watch_events(request).await.map_err(refused)?;
    let n_past = n_replayed(answer.metadata());
    let mut events = answer.into_inner();
    for _ in 0..n_past {
        live.apply(shard_index, Update::Event(Box::new(next(&mut events, shard).await?)));
    }
    let from_snapshot = WatchRequest::default;
    let mut groups = client.service.watch_groups(from_snapshot()).await.map_err(refused)?.into_inner();
    let mut instances = client.service.watch_instances(from_snapshot()).await.map_err(refused)?.into_inner();
    let mut state = ShardState { status: Arc::new(status.clone()), ..ShardState::default() };
    loop {
        let event = next(&mut groups, shard).await?;
        match (event.r#type(), event.group) {
            (Type::SnapshotEnd, _) => break,
            (Type::Upsert, Some(group)) => _ = state.groups.insert(group.key.clone(), Arc::new(group)),
            (Type::Delete, Some(group)) => _ = state.groups.remove(&group.key),
            (_, None) => {}
        }
    }
    loop {
        let event = next(&mut instances, shard).await?;
        match event.instance {
            _ if event.status == "snapshot_end" => {
                start.instances_at = ResumeToken::parse(&event.resume_token);
                break;
            }
            Some(it) if it.status != "deleted" => {
                state.instances.insert(it.instance_id.clone(), Arc::new(it));
            }
            _ => _ = state.instances.remove(&event.instance_id),
        }
    }
    live.apply(shard_index, Update::Snapshot(Box::new(state), start));
    Ok(Streams { client, groups, instances, events, status })
}

async fn next<T>(stream: &mut Streaming<T>, shard: &str) -> Result<T, ShardError> {
    match stream.message().await {
        Ok(Some(it)) => Ok(it),
        Ok(None) => Err(ShardError::new(shard, Code::Unavailable, "its stream ended")),
        Err(status) => Err(ShardError::from_status(shard, &status)),
    }
}

impl Streams {
    /// Applies what the streams report until one of them ends, and answers why it ended.
    async fn read(mut self, live: &LiveState, shard_index: usize) -> ShardError {
        let shard = self.client.shard.clone();
        let mut probes = interval(PROBE_PERIOD);
        probes.set_missed_tick_behavior(MissedTickBehavior::Delay);
        probes.reset();
        loop {
            let update = tokio::select! {
                biased;
                _ = probes.tick() => self.probe().await,
                it = next(&mut self.groups, &shard) => it.map(group_update),
                it = next(&mut self.instances, &shard) => it.map(instance_update),
                it = next(&mut self.events, &shard) => it.map(|event| Update::Event(Box::new(event))),
            };
            match update {
                Ok(update) => live.apply(shard_index, update),
                Err(error) => return error,
            }
        }
    }

    async fn probe(&mut self) -> Result<Update, ShardError> {
        let timed_out = |shard: &str| ShardError::timed_out(shard, PROBE_TIMEOUT);
        let status = timeout(PROBE_TIMEOUT, self.client.config_status()).await;
        let status = status.map_err(|_| timed_out(&self.client.shard))?;
        let status = status.map_err(|status| ShardError::from_status(&self.client.shard, &status))?;
        if status == self.status {
            return Ok(Update::Alive);
        }
        self.status.clone_from(&status);
        Ok(Update::Status(Box::new(status)))
    }
}

fn group_update(event: GroupEvent) -> Update {
    let token = ResumeToken::parse(&event.resume_token);
    match (event.r#type(), event.group) {
        (Type::Upsert, Some(group)) => Update::Group(Box::new(group), token),
        (Type::Delete, Some(group)) => Update::GroupDeleted(group.key, token),
        _ => Update::Alive,
    }
}

fn instance_update(event: InstanceEvent) -> Update {
    let token = ResumeToken::parse(&event.resume_token);
    event.instance.map_or(Update::Alive, |it| Update::Instance(Box::new(it), token))
}
