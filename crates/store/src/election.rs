//! The lease of a shard, or of the cluster: who may bid for it, and how it is taken, kept and given back.
//!
//! Decisions are pure: a follower's in [`follow`], a candidate's and a holder's in [`hold`]. [`LeaseKeeper`] does the I/O
//! and decides nothing. Nobody compares clocks: a follower times the lease object's ETag on its own monotonic clock, a
//! holder times its own puts on its own. A holder may act until `ttl − margin` after the *start* of its last successful
//! put, a follower waits `ttl` after the *end* of the read that first showed the ETag; the second always comes later than
//! the first. The ttl may change from put to put: [`hold`] says what that means for the guard.
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

pub mod during;
pub mod follow;
pub mod hold;

use hold::{Answer, Candidacy, Put, Sight, Step, Tenure, Turn};

/// Keeps two candidates that saw the same end from colliding each time.
const MAX_BID_WAIT: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    tenure: Tenure,
    /// As in the last durable version.
    lease: LeaseRecord,
    extra: Extra,
    backoff: Backoff,
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
        self.tenure.etag()
    }

    pub fn lease(&self) -> &LeaseRecord {
        &self.lease
    }

    /// Of the last durable version. What [`LeaseKeeper::renew_as`] asked for is in force once this says so.
    pub fn timing(&self) -> Timing {
        self.tenure.landed().timing
    }

    /// When the last durable renewal began: the truth that peers are told.
    pub fn renewed(&self) -> Mono {
        self.tenure.landed().start.mono
    }

    /// The guard's end. While a shorter lease may be in force already, that one's.
    pub fn until(&self) -> Mono {
        self.tenure.end()
    }

    /// What a put of this tenure writes. The times are the put's, so that its retries are the same bytes.
    fn record(&self, put: &Put) -> LeaseRecord {
        LeaseRecord { epoch: put.epoch, ttl: put.timing.ttl, renewed_at: put.start.wall, ..self.lease.clone() }
    }

    /// No answer is waited for longer than this: neither the lease in force nor the one asked for may run out on it.
    fn per_try(&self) -> Duration {
        self.timing().per_try().min(self.tenure.asked().per_try())
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").field("epoch", &self.lease.epoch).field("etag", self.etag()).finish_non_exhaustive()
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
        let lease = self.read(self.timing.per_try()).await?;
        Ok(Observation::after(previous, lease, began, self.clock.monotonic()))
    }

    /// Bids for the lease as seen, for `reason`. `floor` is the higher of groups file and cache.
    pub async fn acquire(&self, seen: &Observation, reason: TakeOver, floor: Epoch) -> Result<Held, ElectionError> {
        if !matches!(reason, TakeOver::Released | TakeOver::SameHost) {
            tokio::time::sleep(jitter(&*self.entropy, MAX_BID_WAIT)).await;
        }
        let put = self.new_put(self.timing, next_epoch(seen.epoch(), floor, Epoch(0)));
        let now = put.start.wall;
        let before = seen.lease.as_ref().map(|it| &it.value);
        let record = LeaseRecord {
            epoch: put.epoch,
            holder: self.own.server_id.clone(),
            process: self.own.process.clone(),
            addr: self.own.addr.clone(),
            health_addr: self.own.health_addr.clone(),
            direct: self.own.direct,
            boot_id: self.own.boot_id.clone(),
            provider_id: self.own.provider_id.clone(),
            ttl: put.timing.ttl,
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
        let etag = self.bid(Candidacy::new(put.clone(), condition), &record, &extra, self.timing.per_try()).await?;
        Ok(Held {
            guard: Guard::begun(put.epoch, self.clock.clone(), put.start, put.end()),
            tenure: Tenure::new(put, etag),
            lease: record,
            extra,
            backoff: renew_backoff(),
        })
    }

    /// Puts until the outcome is known or the time it would give us is over.
    async fn bid(
        &self,
        mut candidacy: Candidacy,
        record: &LeaseRecord,
        extra: &Extra,
        per_try: Duration,
    ) -> Result<ETag, ElectionError> {
        let mut backoff = renew_backoff();
        let mut turn = Turn::PutAgain;
        let mut is_first = true;
        loop {
            if !std::mem::take(&mut is_first) {
                tokio::time::sleep(backoff.next(&*self.entropy)).await;
                if candidacy.is_late(self.clock.monotonic()) {
                    return Err(self.too_late());
                }
            }
            if turn == Turn::PutAgain {
                let done = self.put(candidacy.put(), record, extra, candidacy.condition(), per_try).await;
                turn = candidacy.answered(&Answer::of(&done), self.clock.monotonic());
                if let (Turn::Failed, Err(error)) = (&turn, done) {
                    return Err(self.store_error(error));
                }
            }
            let mut there = None;
            if turn == Turn::ReadBack {
                there = match self.read(per_try).await {
                    Ok(there) => {
                        turn = candidacy.saw(&sight(there.as_ref()), self.clock.monotonic());
                        there
                    }
                    Err(ElectionError::Store { source, .. }) if retry::is_passing(&source) => {
                        turn = candidacy.saw(&Sight::Failed, self.clock.monotonic());
                        None
                    }
                    Err(error) => return Err(error),
                };
            }
            match turn {
                Turn::Won(etag) => return Ok(etag),
                Turn::Lost => return Err(self.lost_to(there)),
                Turn::TooLate | Turn::Failed => return Err(self.too_late()),
                Turn::ReadBack | Turn::PutAgain => {}
            }
        }
    }

    /// Renews once, with the timing asked for last. Call again every `renew_interval`, or after the time a
    /// [`Renewal::Retry`] names.
    pub async fn renew(&self, held: &mut Held) -> Renewal {
        self.renew_as(held, held.tenure.asked()).await
    }

    /// Renews once, as a lease of this timing from now on.
    ///
    /// A longer lease moves the guard's end only when it is known to be durable. A shorter one cuts the guard before its
    /// put is sent, for it may land without our learning it, and followers then wait for the shorter time only; the cut
    /// holds until some put is known to have landed, or this one is known never to. May be dropped at any await: what
    /// was sent is remembered.
    pub async fn renew_as(&self, held: &mut Held, timing: Timing) -> Renewal {
        let put = held.tenure.next(timing, Moment::of(&*self.clock), || entropy::hex(&*self.entropy, 16));
        held.guard.move_end(held.tenure.end());
        let (condition, per_try) = (Condition::Match(held.etag().clone()), held.per_try());
        let done = self.put(&put, &held.record(&put), &held.extra, &condition, per_try).await;
        let mut step = held.tenure.answered(&put, Answer::of(&done));
        if step == Step::ReadBack {
            step = held.tenure.saw(match self.read(per_try).await {
                Ok(there) => sight(there.as_ref()),
                Err(ElectionError::Record(_)) => Sight::Foreign,
                Err(_) => Sight::Failed,
            });
        }
        match (step, done) {
            (Step::Lost, _) => {
                held.guard.close();
                Renewal::Lost
            }
            (Step::Landed, _) | (_, Ok(_)) => self.landed(held),
            (Step::Again | Step::ReadBack, Err(error)) => {
                // Given back, if the put surely failed.
                held.guard.move_end(held.tenure.end());
                let asked = error.retry_after.unwrap_or_default().min(per_try);
                Renewal::Retry { after: held.backoff.next(&*self.entropy).max(asked), error }
            }
        }
    }

    /// Renews under an epoch above `above`: a record of a higher epoch than ours was met before our first action.
    ///
    /// On success the old guard is closed and [`Held::guard`] is a new one. If an older put turns out to have landed
    /// instead, the epoch is unchanged: look at [`Held::epoch`], and call again.
    pub async fn raise(&self, held: &mut Held, above: Epoch) -> Renewal {
        held.tenure.raise(above);
        self.renew(held).await
    }

    /// Gives the lease back: the guard closes first, then the object says that it is free. Failing is harmless, the
    /// lease then runs out. Answers the version a successor bids on.
    pub async fn release(&self, held: Held) -> Result<ETag, ElectionError> {
        held.guard.close();
        let put = self.new_put(held.timing(), held.epoch());
        let record = LeaseRecord { released: true, ..held.record(&put) };
        let mut etag = held.etag().clone();
        loop {
            let candidacy = Candidacy::new(put.clone(), Condition::Match(etag.clone()));
            match self.bid(candidacy, &record, &held.extra, held.per_try()).await {
                Err(ElectionError::Taken { key, holder, epoch }) => {
                    // An earlier renewal of ours may have landed after all; then the release goes on top of it.
                    let there = self.read(held.per_try()).await?;
                    let ours = |it: &Versioned<LeaseRecord>| held.tenure.sent(&it.meta.write_id) && it.etag != etag;
                    match there.filter(ours) {
                        Some(there) => etag = there.etag,
                        None => return Err(ElectionError::Taken { key, holder, epoch }),
                    }
                }
                done => return done,
            }
        }
    }

    /// Takes over what the tenure knows to have landed.
    fn landed(&self, held: &mut Held) -> Renewal {
        let (put, until) = (held.tenure.landed().clone(), held.tenure.end());
        if put.epoch == held.guard.epoch() {
            held.guard.renewed(put.start, until);
        } else {
            held.guard.close();
            held.guard = Guard::begun(put.epoch, self.clock.clone(), put.start, until);
        }
        held.lease = held.record(&put);
        held.backoff.reset();
        Renewal::Extended { until }
    }

    /// A put whose first try begins now.
    fn new_put(&self, timing: Timing, epoch: Epoch) -> Put {
        let write_id = entropy::hex(&*self.entropy, 16);
        Put { write_id, start: Moment::of(&*self.clock), timing, epoch }
    }

    async fn put(
        &self,
        put: &Put,
        record: &LeaseRecord,
        extra: &Extra,
        condition: &Condition,
        per_try: Duration,
    ) -> Result<ETag, StoreError> {
        let meta = Meta {
            version: VERSION,
            epoch: put.epoch,
            writer: self.writer.clone(),
            write_id: put.write_id.clone(),
            // Of the put, so that its retries are the same bytes.
            updated_at: put.start.wall,
        };
        let body = records::encode(record, &meta, extra);
        match tokio::time::timeout(per_try, self.store.put(&self.key, body, condition.clone())).await {
            Ok(done) => done,
            Err(_) => Err(StoreError::new("put", &self.key, StoreFault::Ambiguous, "no answer in time")),
        }
    }

    async fn read(&self, per_try: Duration) -> Result<Option<Versioned<LeaseRecord>>, ElectionError> {
        match tokio::time::timeout(per_try, self.store.get(&self.key)).await {
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

    fn too_late(&self) -> ElectionError {
        ElectionError::TooLate { key: self.key.clone() }
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

fn sight(there: Option<&Versioned<LeaseRecord>>) -> Sight {
    match there {
        Some(there) => Sight::Version { etag: there.etag.clone(), write_id: there.meta.write_id.clone() },
        None => Sight::Nothing,
    }
}

fn renew_backoff() -> Backoff {
    Backoff::new(Duration::from_millis(200), Duration::from_secs(2))
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
