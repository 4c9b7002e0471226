//! The lease of a shard, or of the cluster: who may bid for it, and how it is taken, kept and given back.
//!
//! Decisions are pure ([`may_bid`], [`next_epoch`]); [`LeaseKeeper`] does the I/O. Nobody compares clocks: a follower
//! times the lease object's ETag on its own monotonic clock, a holder times its own puts on its own. A holder may act
//! until `ttl − margin` after the *start* of its last successful put, a follower waits `ttl` after the *end* of the read
//! that first showed the ETag; the second always comes later than the first.
//!
//! Every put carries a `write_id`. One that landed while its answer was lost, or whose retry was refused, is recognised
//! by reading it back. A candidate never acts on hope: without an answer it does not lead.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::Epoch,
    ports::{
        clock::{Clock, Entropy},
        objects::{Condition, ETag, ObjectStore, StoreError, StoreFault},
    },
    term::{Guard, Moment},
    time::Mono,
};
use nstance_rt::{
    backoff::Backoff,
    entropy::{self, jitter},
};

pub use crate::records::leader::{LeaseRecord, Previous, TakeOver};
use crate::{
    records::{self, DecodeError, Extra, Meta, VERSION, Versioned},
    retry,
};

pub mod follow;

/// Keeps two candidates that saw the same end from colliding each time.
const MAX_BID_WAIT: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub ttl: Duration,
    pub renew_interval: Duration,
    /// How much earlier the holder stops than anybody may take over.
    pub margin: Duration,
}

impl Timing {
    /// Of a shard's lease, unless configured.
    pub const SHARD: Self =
        Self { ttl: Duration::from_secs(6), renew_interval: Duration::from_secs(2), margin: Duration::from_secs(1) };

    /// Of the cluster's lease, which is held only while keys are made or rotated.
    pub const CLUSTER: Self =
        Self { ttl: Duration::from_secs(30), renew_interval: Duration::from_secs(10), margin: Duration::from_secs(3) };

    /// How long a holder may act after the start of a successful put.
    pub fn act_for(&self) -> Duration {
        self.ttl.saturating_sub(self.margin)
    }

    fn per_try(&self) -> Duration {
        self.ttl / 4
    }
}

/// Who we are, as far as a lease tells others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub server_id: String,
    /// 128 random bits of this process. With the id it is the holder: a restarted server is somebody else.
    pub process: String,
    pub addr: String,
    pub health_addr: String,
    /// `addr` is an address of a local interface.
    pub direct: bool,
    /// We are bound to `addr` right now, and nobody can share the port.
    pub exclusive: bool,
    /// Empty if unknown.
    pub boot_id: String,
    pub provider_id: Option<String>,
}

impl Identity {
    /// The random part of a holder's identity.
    pub fn draw_process(entropy: &dyn Entropy) -> String {
        entropy::hex(entropy, 16)
    }
}

/// The lease as this follower saw it.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// `None`: the store itself said that there is none.
    pub lease: Option<Versioned<LeaseRecord>>,
    /// Our time at the end of the read that first showed this version.
    pub first_seen: Mono,
    /// Our time at the beginning of the last read that showed it.
    pub looked_at: Mono,
}

impl Observation {
    /// What a read from `began` to `ended` adds to what was known. The same version keeps its first sight.
    pub fn after(previous: Option<&Self>, lease: Option<Versioned<LeaseRecord>>, began: Mono, ended: Mono) -> Self {
        let etag = |it: &Option<Versioned<LeaseRecord>>| it.as_ref().map(|it| it.etag.clone());
        match previous {
            Some(previous) if etag(&previous.lease) == etag(&lease) => {
                Self { lease, first_seen: previous.first_seen, looked_at: began }
            }
            _ => Self { lease, first_seen: ended, looked_at: began },
        }
    }

    pub fn epoch(&self) -> Epoch {
        self.lease.as_ref().map_or(Epoch(0), |it| it.value.epoch)
    }
}

/// Whether to stand, and if not, when to look again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bid {
    No { look_again_in: Duration },
    Yes { reason: TakeOver, condition: Condition },
}

/// Whether `own` may bid for the lease at `now`. Pure, and the only place that decides it.
pub fn may_bid(seen: &Observation, now: Mono, own: &Identity) -> Bid {
    let Some(lease) = &seen.lease else {
        return Bid::Yes { reason: TakeOver::Absent, condition: Condition::Create };
    };
    let yes = |reason| Bid::Yes { reason, condition: Condition::Match(lease.etag.clone()) };
    if lease.value.released {
        return yes(TakeOver::Released);
    }
    if is_same_host(&lease.value, own) {
        return yes(TakeOver::SameHost);
    }
    let expiry = seen.first_seen + lease.value.ttl;
    // Knowing the version for long is not enough: it must have been *seen* again after its time was over.
    if expiry <= seen.looked_at {
        return yes(TakeOver::Expired);
    }
    Bid::No { look_again_in: expiry.since(now) }
}

/// We sit exclusively on the address the holder must be listening on to have a guard, so it has none.
fn is_same_host(lease: &LeaseRecord, own: &Identity) -> bool {
    lease.direct
        && own.direct
        && own.exclusive
        && lease.addr == own.addr
        && !own.boot_id.is_empty()
        && lease.boot_id == own.boot_id
        && lease.process != own.process
}

/// Epochs never fall: above the lease, above the groups file, above whatever the cache remembers.
pub fn next_epoch(lease: Epoch, groups: Epoch, cache: Epoch) -> Epoch {
    lease.max(groups).max(cache).next()
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ElectionError {
    #[error("lease {key}")]
    Store {
        key: String,
        #[source]
        source: StoreError,
    },
    #[error("lease")]
    Record(#[source] DecodeError),
    #[error("lease {key} went to {holder} in epoch {epoch}")]
    Taken { key: String, holder: String, epoch: Epoch },
    #[error("lease {key} was deleted by somebody")]
    Gone { key: String },
    /// It may be ours by now, but too late to act on it.
    #[error("lease {key}: the store did not answer within the lease's time")]
    TooLate { key: String },
}

/// How a renewal ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Renewal {
    /// Effects may start until then. That may be past already, if the put began long ago: renew again at once.
    Extended { until: Mono },
    /// Somebody else has it, or it is gone. The guard is closed.
    Lost,
    /// Not known, or not done. The guard runs on towards its end; try again after this.
    Retry { after: Duration, error: StoreError },
}

/// A lease of ours. The term's guard hangs on it.
pub struct Held {
    guard: Guard,
    lease: LeaseRecord,
    etag: ETag,
    write_id: String,
    extra: Extra,
    /// Start of the last put that is known to have landed.
    renewed: Mono,
    until: Mono,
    /// Puts on the present version that may have landed.
    unclear: Vec<Attempt>,
    backoff: Backoff,
    /// The epoch must rise above this.
    floor: Epoch,
}

#[derive(Clone)]
struct Attempt {
    write_id: String,
    start: Moment,
    record: LeaseRecord,
}

impl Held {
    /// Opened from the start of the put that took the lease. Replaced by [`LeaseKeeper::raise`].
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    pub fn epoch(&self) -> Epoch {
        self.lease.epoch
    }

    /// Of the last durable version, for the peer endpoint.
    pub fn etag(&self) -> &ETag {
        &self.etag
    }

    pub fn lease(&self) -> &LeaseRecord {
        &self.lease
    }

    /// When the last durable renewal began: the truth that peers are told.
    pub fn renewed(&self) -> Mono {
        self.renewed
    }

    pub fn until(&self) -> Mono {
        self.until
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("epoch", &self.lease.epoch).field("etag", &self.etag).finish_non_exhaustive()
    }
}

/// Takes, keeps and gives back one lease.
pub struct LeaseKeeper {
    store: Arc<dyn ObjectStore>,
    key: String,
    writer: String,
    own: Identity,
    timing: Timing,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl LeaseKeeper {
    /// `key` is from [`records::lease_key`]; `writer` is `{shard}/{server-id}` or `admin/{host}`.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        key: String,
        writer: String,
        own: Identity,
        timing: Timing,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
    ) -> Self {
        Self { store, key, writer, own, timing, clock, entropy }
    }

    pub fn identity(&self) -> &Identity {
        &self.own
    }

    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Looks at the lease once.
    pub async fn look(&self, previous: Option<&Observation>) -> Result<Observation, ElectionError> {
        let began = self.clock.monotonic();
        let lease = self.read().await?;
        Ok(Observation::after(previous, lease, began, self.clock.monotonic()))
    }

    /// Bids for the lease as seen, for `reason`. `floor` is the higher of groups file and cache.
    pub async fn acquire(&self, seen: &Observation, reason: TakeOver, floor: Epoch) -> Result<Held, ElectionError> {
        if !matches!(reason, TakeOver::Released | TakeOver::SameHost) {
            tokio::time::sleep(jitter(&*self.entropy, MAX_BID_WAIT)).await;
        }
        let epoch = next_epoch(seen.epoch(), floor, Epoch(0));
        let now = self.clock.now();
        let before = seen.lease.as_ref().map(|it| &it.value);
        let record = LeaseRecord {
            epoch,
            holder: self.own.server_id.clone(),
            process: self.own.process.clone(),
            addr: self.own.addr.clone(),
            health_addr: self.own.health_addr.clone(),
            direct: self.own.direct,
            boot_id: self.own.boot_id.clone(),
            provider_id: self.own.provider_id.clone(),
            ttl: self.timing.ttl,
            acquired_at: now,
            renewed_at: now,
            released: false,
            previous: Some(Previous {
                holder: before.map(|it| it.holder.clone()).unwrap_or_default(),
                process: before.map(|it| it.process.clone()).unwrap_or_default(),
                epoch: before.map_or(floor, |it| it.epoch),
                provider_id: before.and_then(|it| it.provider_id.clone()),
                reason,
            }),
        };
        let extra = seen.lease.as_ref().map(|it| it.extra.clone()).unwrap_or_default();
        let condition = match &seen.lease {
            Some(lease) => Condition::Match(lease.etag.clone()),
            None => Condition::Create,
        };
        let attempt = self.attempt(record);
        let until = attempt.start.mono + self.timing.act_for();
        let etag = self.bid(&attempt, &extra, &condition, until).await?;
        Ok(Held {
            guard: Guard::begun(epoch, self.clock.clone(), attempt.start, until),
            lease: attempt.record,
            etag,
            write_id: attempt.write_id,
            extra,
            renewed: attempt.start.mono,
            until,
            unclear: Vec::new(),
            backoff: renew_backoff(),
            floor: Epoch(0),
        })
    }

    /// Puts until the outcome is known or the time it would give us is over.
    async fn bid(
        &self,
        attempt: &Attempt,
        extra: &Extra,
        condition: &Condition,
        until: Mono,
    ) -> Result<ETag, ElectionError> {
        let too_late = || ElectionError::TooLate { key: self.key.clone() };
        let mut backoff = renew_backoff();
        let mut unclear = false;
        loop {
            let error = match self.put(attempt, extra, condition).await {
                Ok(etag) => return if self.clock.monotonic() < until { Ok(etag) } else { Err(too_late()) },
                Err(error) => error,
            };
            match error.fault {
                StoreFault::Precondition | StoreFault::Ambiguous => {
                    unclear |= error.fault == StoreFault::Ambiguous;
                    let there = self.read_until(until, &mut backoff).await?;
                    match there {
                        Some(there) if there.meta.write_id == attempt.write_id => {
                            return if self.clock.monotonic() < until { Ok(there.etag) } else { Err(too_late()) };
                        }
                        there if error.is_precondition() || !is_unchanged(condition, there.as_ref()) => {
                            return Err(self.lost_to(there));
                        }
                        // Not landed, or not yet: the same bytes again, which recognise each other.
                        _ => {}
                    }
                }
                _ if unclear && retry::is_passing(&error) => {}
                _ => return Err(self.store_error(error)),
            }
            tokio::time::sleep(backoff.next(&*self.entropy)).await;
            if until <= self.clock.monotonic() {
                return Err(too_late());
            }
        }
    }

    async fn read_until(
        &self,
        until: Mono,
        backoff: &mut Backoff,
    ) -> Result<Option<Versioned<LeaseRecord>>, ElectionError> {
        loop {
            match self.read().await {
                Err(ElectionError::Store { source, .. }) if retry::is_passing(&source) => {
                    tokio::time::sleep(backoff.next(&*self.entropy)).await;
                    if until <= self.clock.monotonic() {
                        return Err(ElectionError::TooLate { key: self.key.clone() });
                    }
                }
                done => return done,
            }
        }
    }

    /// Renews once. Call again every `renew_interval`, or after the time a [`Renewal::Retry`] names.
    pub async fn renew(&self, held: &mut Held) -> Renewal {
        let now = self.clock.monotonic();
        // A put whose outcome is open is sent again as it was, unless its success would give no time any more.
        let open = held.unclear.last().filter(|it| now < it.start.mono + self.timing.act_for()).cloned();
        let attempt = open.unwrap_or_else(|| {
            let epoch = if held.lease.epoch <= held.floor { held.floor.next() } else { held.lease.epoch };
            self.attempt(LeaseRecord {
                epoch,
                renewed_at: self.clock.now(),
                ttl: self.timing.ttl,
                ..held.lease.clone()
            })
        });
        let condition = Condition::Match(held.etag.clone());
        let error = match self.put(&attempt, &held.extra, &condition).await {
            Ok(etag) => return self.landed(held, attempt, etag),
            Err(error) => error,
        };
        match error.fault {
            // A refusal may be the answer to a retry below us of a try that landed, so it is unclear as well.
            StoreFault::Precondition | StoreFault::Ambiguous => {
                if !held.unclear.iter().any(|it| it.write_id == attempt.write_id) {
                    held.unclear.push(attempt);
                }
            }
            // Surely not applied: the next try is a new put with a new start.
            StoreFault::Unavailable(_) | StoreFault::NotFound => return self.retry(held, error),
        }
        match self.read().await {
            Ok(Some(there)) => {
                let known = held.unclear.iter().find(|it| it.write_id == there.meta.write_id);
                if let Some(ours) = known.cloned() {
                    return self.landed(held, ours, there.etag);
                }
                if there.etag == held.etag && there.meta.write_id == held.write_id {
                    // Nobody took over; the put did not land, or not yet.
                    return self.retry(held, error);
                }
                held.guard.close();
                Renewal::Lost
            }
            // Gone, or written by somebody whose form we do not know: not ours in any case.
            Ok(None) | Err(ElectionError::Record(_)) => {
                held.guard.close();
                Renewal::Lost
            }
            Err(_) => self.retry(held, error),
        }
    }

    /// Renews under an epoch above `above`: a record of a higher epoch than ours was met before our first action.
    ///
    /// On success the old guard is closed and [`Held::guard`] is a new one. If an older put turns out to have landed
    /// instead, the epoch is unchanged: look at [`Held::epoch`], and call again.
    pub async fn raise(&self, held: &mut Held, above: Epoch) -> Renewal {
        held.floor = held.floor.max(above);
        self.renew(held).await
    }

    /// Gives the lease back: the guard closes first, then the object says that it is free. Failing is harmless, the
    /// lease then runs out. Answers the version a successor bids on.
    pub async fn release(&self, mut held: Held) -> Result<ETag, ElectionError> {
        held.guard.close();
        let record = LeaseRecord { released: true, renewed_at: self.clock.now(), ..held.lease.clone() };
        let attempt = self.attempt(record);
        let until = attempt.start.mono + self.timing.act_for();
        loop {
            let condition = Condition::Match(held.etag.clone());
            match self.bid(&attempt, &held.extra, &condition, until).await {
                Err(ElectionError::Taken { key, holder, epoch }) => {
                    // An earlier renewal of ours may have landed after all; then the release goes on top of it.
                    let there = self.read().await?;
                    let ours = |it: &&Versioned<LeaseRecord>| {
                        held.unclear.iter().any(|attempt| attempt.write_id == it.meta.write_id)
                    };
                    match there.as_ref().filter(ours) {
                        Some(there) => held.etag = there.etag.clone(),
                        None => return Err(ElectionError::Taken { key, holder, epoch }),
                    }
                    held.unclear.retain(|it| Some(&it.write_id) != there.as_ref().map(|it| &it.meta.write_id));
                }
                done => return done,
            }
        }
    }

    fn landed(&self, held: &mut Held, attempt: Attempt, etag: ETag) -> Renewal {
        let until = attempt.start.mono + self.timing.act_for();
        if attempt.record.epoch == held.guard.epoch() {
            held.guard.renewed(attempt.start, until);
        } else {
            held.guard.close();
            held.guard = Guard::begun(attempt.record.epoch, self.clock.clone(), attempt.start, until);
        }
        held.lease = attempt.record;
        held.write_id = attempt.write_id;
        held.etag = etag;
        held.renewed = attempt.start.mono;
        held.until = until;
        held.unclear.clear();
        held.backoff.reset();
        Renewal::Extended { until }
    }

    fn retry(&self, held: &mut Held, error: StoreError) -> Renewal {
        let asked = error.retry_after.unwrap_or_default().min(self.timing.per_try());
        Renewal::Retry { after: held.backoff.next(&*self.entropy).max(asked), error }
    }

    /// A new put. Its start is now: that of its first try.
    fn attempt(&self, record: LeaseRecord) -> Attempt {
        Attempt { write_id: entropy::hex(&*self.entropy, 16), start: Moment::of(&*self.clock), record }
    }

    async fn put(&self, attempt: &Attempt, extra: &Extra, condition: &Condition) -> Result<ETag, StoreError> {
        let meta = Meta {
            version: VERSION,
            epoch: attempt.record.epoch,
            writer: self.writer.clone(),
            write_id: attempt.write_id.clone(),
            // Of the record, so that the retries of one put are the same bytes.
            updated_at: attempt.record.renewed_at,
        };
        let body = records::encode(&attempt.record, &meta, extra);
        match tokio::time::timeout(self.timing.per_try(), self.store.put(&self.key, body, condition.clone())).await {
            Ok(done) => done,
            Err(_) => Err(StoreError::new("put", &self.key, StoreFault::Ambiguous, "no answer in time")),
        }
    }

    async fn read(&self) -> Result<Option<Versioned<LeaseRecord>>, ElectionError> {
        match tokio::time::timeout(self.timing.per_try(), self.store.get(&self.key)).await {
            Ok(Ok(object)) => records::decode_object(&self.key, object).map(Some).map_err(ElectionError::Record),
            Ok(Err(error)) if error.is_not_found() => Ok(None),
            Ok(Err(error)) => Err(self.store_error(error)),
            Err(_) => Err(self.store_error(StoreError::new(
                "get",
                &self.key,
                StoreFault::Unavailable(nstance_core::ports::objects::Unavailable::Network),
                "no answer in time",
            ))),
        }
    }

    fn store_error(&self, source: StoreError) -> ElectionError {
        ElectionError::Store { key: self.key.clone(), source }
    }

    fn lost_to(&self, there: Option<Versioned<LeaseRecord>>) -> ElectionError {
        match there {
            Some(there) => {
                ElectionError::Taken { key: self.key.clone(), holder: there.value.holder, epoch: there.value.epoch }
            }
            None => ElectionError::Gone { key: self.key.clone() },
        }
    }
}

fn is_unchanged(condition: &Condition, there: Option<&Versioned<LeaseRecord>>) -> bool {
    match (condition, there) {
        (Condition::Create, there) => there.is_none(),
        (Condition::Match(etag), Some(there)) => there.etag == *etag,
        (Condition::Match(_), None) => false,
    }
}

fn renew_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(2))
}

#[cfg(test)]
mod tests;
