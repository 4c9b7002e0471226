//! The events of one shard, over as many leaders and connections as it takes.
//!
//! A stream always starts at a resume token, if need be at one that is older than everything, so that there is a place to
//! continue from. The server says how many of the first messages are events of the past.

use std::time::Duration;

use nstance_proto::v1::{Event, WatchEventsRequest};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::sync::mpsc::Sender;
use tonic::{Code, Status, metadata::MetadataMap};

use crate::{Connection, ShardClient, ShardError};

/// Metadata of a stream of events: how many of its first messages are events of the past.
const N_REPLAYED: &str = "nstance-replayed";

/// Older than every event: the leader repeats all events that it remembers.
const OLDEST: &str = "0-0";

const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(5);

/// Where a stream of events starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    /// With all events that the leader remembers.
    Oldest,
    /// With the first event after the stream was opened.
    Now,
}

/// What [`follow`] reports of one shard.
#[derive(Debug)]
pub struct EventUpdate {
    pub shard: String,
    pub kind: EventUpdateKind,
}

#[derive(Debug)]
pub enum EventUpdateKind {
    Event(Box<Event>),
    /// The stream ended and is opened again. Reported once per outage.
    Disconnected(ShardError),
    Reconnected,
    /// The following events are those of a new leader.
    NewLeader {
        epoch: u64,
    },
    /// The shard refused the stream, and would refuse it again. Nothing follows.
    Refused(ShardError),
}

/// The past events that the leader remembers.
pub async fn past(mut client: ShardClient, request: WatchEventsRequest) -> Result<Vec<Event>, Status> {
    let request = WatchEventsRequest { resume_token: OLDEST.to_owned(), ..request };
    let answer = client.service.watch_events(request).await?;
    let n = n_replayed(answer.metadata());
    let mut stream = answer.into_inner();
    let mut events = Vec::with_capacity(n);
    while events.len() < n {
        match stream.message().await? {
            Some(event) => events.push(event),
            None => break,
        }
    }
    Ok(events)
}

pub(crate) fn n_replayed(metadata: &MetadataMap) -> usize {
    metadata.get(N_REPLAYED).and_then(|it| it.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Where the stream is, so that the next connection continues there.
struct Place {
    token: String,
    /// How many past events are still to be skipped. `None` before the first connection, which says it.
    n_skip: Option<usize>,
    /// The epoch of the last event.
    epoch: u64,
    is_down: bool,
}

/// Reports every event of the shard once. Ends only if the shard refuses the stream for good, or the receiver is closed.
pub async fn follow(
    connection: &Connection,
    request: &WatchEventsRequest,
    start: StartAt,
    updates: Sender<EventUpdate>,
) {
    let entropy = SystemEntropy::new();
    let mut backoff = Backoff::new(FIRST_WAIT, MAX_WAIT);
    let n_skip = match start {
        StartAt::Oldest => Some(0),
        StartAt::Now => None,
    };
    let mut place = Place { token: OLDEST.to_owned(), n_skip, epoch: 0, is_down: false };
    loop {
        let Err(error) = follow_once(connection, request, &mut place, &updates, &mut backoff).await else { return };
        if matches!(error.code, Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument) {
            let _ = send(&updates, connection, EventUpdateKind::Refused(error)).await;
            return;
        }
        if !std::mem::replace(&mut place.is_down, true)
            && send(&updates, connection, EventUpdateKind::Disconnected(error)).await.is_err()
        {
            return;
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

/// The receiver of the updates is closed.
struct Closed;

async fn send(updates: &Sender<EventUpdate>, connection: &Connection, kind: EventUpdateKind) -> Result<(), Closed> {
    let update = EventUpdate { shard: connection.shard().to_owned(), kind };
    updates.send(update).await.map_err(|_| Closed)
}

/// Reads one stream to its end. `Ok` if the receiver is closed.
async fn follow_once(
    connection: &Connection,
    request: &WatchEventsRequest,
    place: &mut Place,
    updates: &Sender<EventUpdate>,
    backoff: &mut Backoff,
) -> Result<(), ShardError> {
    let refused = |status: Status| ShardError::from_status(connection.shard(), &status);
    let mut client = connection.client().await?;
    let request = WatchEventsRequest { resume_token: place.token.clone(), ..request.clone() };
    let answer = client.service.watch_events(request).await.map_err(refused)?;
    let is_first = place.n_skip.is_none();
    let mut n_skip = place.n_skip.unwrap_or_else(|| n_replayed(answer.metadata()));
    let mut stream = answer.into_inner();
    backoff.reset();
    if std::mem::replace(&mut place.is_down, false)
        && send(updates, connection, EventUpdateKind::Reconnected).await.is_err()
    {
        return Ok(());
    }
    loop {
        place.n_skip = Some(n_skip);
        let Some(event) = stream.message().await.map_err(refused)? else {
            return Err(ShardError::new(connection.shard(), Code::Unavailable, "the stream ended"));
        };
        place.token.clone_from(&event.resume_token);
        let is_new_leader = place.epoch != 0 && place.epoch < event.epoch;
        if is_new_leader && !is_first {
            // Every event of a later leader is new.
            n_skip = 0;
        }
        place.epoch = place.epoch.max(event.epoch);
        if 0 < n_skip {
            n_skip -= 1;
            continue;
        }
        let new_leader = is_new_leader.then_some(EventUpdateKind::NewLeader { epoch: event.epoch });
        for kind in new_leader.into_iter().chain([EventUpdateKind::Event(Box::new(event))]) {
            if send(updates, connection, kind).await.is_err() {
                return Ok(());
            }
        }
    }
}
