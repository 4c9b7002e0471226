//! One shard's events, over as many connections and leaders as there are.

use std::time::Duration;

use nstance_proto::v1::{Event, WatchEventsRequest};
use nstance_rt::{backoff::Backoff, entropy::SystemEntropy};
use tokio::sync::mpsc::Sender;
use tonic::{Code, Status, metadata::MetadataMap};

use crate::shards::{Client, N_REPLAYED, ShardError, Shards, Target};

/// Older than everything that any leader told: what it remembers is told again.
const FROM_THE_BEGINNING: &str = "0-0";

const BASE: Duration = Duration::from_millis(100);
const CAP: Duration = Duration::from_secs(5);

pub(super) enum Told {
    Event {
        shard: String,
        event: Box<Event>,
    },
    Note {
        shard: String,
        text: String,
    },
    /// It is of no use to try again.
    Refused(ShardError),
}

/// What happened so far, as far as the leader remembers.
pub(super) async fn past(mut client: Client, request: WatchEventsRequest) -> Result<Vec<Event>, Status> {
    let request = WatchEventsRequest { resume_token: FROM_THE_BEGINNING.to_owned(), ..request };
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

fn n_replayed(metadata: &MetadataMap) -> usize {
    metadata.get(N_REPLAYED).and_then(|it| it.to_str().ok()?.parse().ok()).unwrap_or(0)
}

/// Where a stream is, so that the next one goes on there.
struct Place {
    token: String,
    /// How much of what was told before the command began, and is of no interest, is still to come. `None` before the
    /// first connection, which says it.
    n_old: Option<usize>,
    /// The leader that was heard last.
    epoch: u64,
}

/// Tells everything from now on, or from the beginning on, once. Ends only if it is refused for good, or nobody listens.
pub(super) async fn follow(
    shards: &Shards,
    target: &Target,
    request: &WatchEventsRequest,
    from_the_beginning: bool,
    told: Sender<Told>,
) {
    let entropy = SystemEntropy::new();
    let mut backoff = Backoff::new(BASE, CAP);
    let n_old = from_the_beginning.then_some(0);
    let mut place = Place { token: FROM_THE_BEGINNING.to_owned(), n_old, epoch: 0 };
    let mut down = false;
    loop {
        let Err(error) = once(shards, target, request, &mut place, &told, (&mut backoff, &mut down)).await else {
            return;
        };
        if matches!(error.code, Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument) {
            let _ = told.send(Told::Refused(error)).await;
            return;
        }
        if !std::mem::replace(&mut down, true) {
            let text = format!("{}; going on as soon as there is a leader", error.message);
            if told.send(Told::Note { shard: target.shard.clone(), text }).await.is_err() {
                return;
            }
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

async fn once(
    shards: &Shards,
    target: &Target,
    request: &WatchEventsRequest,
    place: &mut Place,
    told: &Sender<Told>,
    (backoff, down): (&mut Backoff, &mut bool),
) -> Result<(), ShardError> {
    let refused = |status: Status| ShardError::of(&target.shard, &status);
    let mut client = shards.connect(target).await?;
    let request = WatchEventsRequest { resume_token: place.token.clone(), ..request.clone() };
    let answer = client.service.watch_events(request).await.map_err(refused)?;
    let first = place.n_old.is_none();
    let mut n_old = place.n_old.unwrap_or_else(|| n_replayed(answer.metadata()));
    let mut stream = answer.into_inner();
    backoff.reset();
    if std::mem::replace(down, false) {
        let text = "following again".to_owned();
        if told.send(Told::Note { shard: target.shard.clone(), text }).await.is_err() {
            return Ok(());
        }
    }
    loop {
        place.n_old = Some(n_old);
        let Some(event) = stream.message().await.map_err(refused)? else {
            return Err(ShardError::new(&target.shard, Code::Unavailable, "the stream ended"));
        };
        place.token.clone_from(&event.resume_token);
        let another = place.epoch != 0 && place.epoch < event.epoch;
        if another && !first {
            // Whatever a later leader tells is news.
            n_old = 0;
        }
        if 0 < n_old {
            n_old -= 1;
            place.epoch = place.epoch.max(event.epoch);
            continue;
        }
        if another {
            let text = format!("another leader since epoch {}", event.epoch);
            if told.send(Told::Note { shard: target.shard.clone(), text }).await.is_err() {
                return Ok(());
            }
        }
        place.epoch = place.epoch.max(event.epoch);
        if told.send(Told::Event { shard: target.shard.clone(), event: Box::new(event) }).await.is_err() {
            return Ok(());
        }
    }
}
