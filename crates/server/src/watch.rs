//! Who watches what: open streams by tenant and kind, and a log of what they were told.
//!
//! An event knows its tenant and reaches every stream of that tenant and of no other; a stream is opened for its
//! caller's tenant only. Nobody ever waits for a watcher: what a stream has not taken yet is held in a bounded
//! [`Pending`], and a stream that takes nothing for too long is cut, alone. All of it ends with the term.
//!
//! Locks are taken in this order: the turn of the groups, the world, a registry, a slot.

mod errors;
mod groups;
mod instances;
mod pending;
mod stream;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, OperatorId, Tenant},
    ports::clock::Clock,
    time::{Mono, Timestamp},
};
use nstance_proto::v1;
use tonic::Code;

pub use errors::Errors;
pub use groups::{GroupMemory, snapshot as group_snapshot};
pub use instances::{Feed, InstanceChange, Standing, Told, event_of, snapshot as instance_snapshot};
pub use pending::{Latest, Line, Pending, Queue, Sequences};
pub use stream::{Chunks, Subscription};

use crate::{
    events::Event,
    grpc::{auth::Caller, status::Refusal},
    service::status,
};

/// Events kept per tenant and kind for those who come back.
const RING: usize = 4096;
const MAX_PER_OPERATOR: usize = 8;
const MAX_PER_TENANT: usize = 64;
/// How long a stream may have something to take and take nothing.
pub const STALL: Duration = Duration::from_secs(30);

/// One kind of stream.
pub trait Kind: Send + Sync + 'static {
    type Item: Send + Sync + 'static;
    type Pending: Pending<Self::Item>;
    type Message: Send + Unpin + 'static;
    const NAME: &'static str;

    fn message(item: &Self::Item, resume_token: String, dropped: u32) -> Self::Message;
}

pub struct GroupKind;

impl Kind for GroupKind {
    type Item = v1::GroupEvent;
    type Pending = Latest<v1::GroupEvent>;
    type Message = v1::GroupEvent;
    const NAME: &'static str = "WatchGroups";

    fn message(item: &Self::Item, resume_token: String, _: u32) -> Self::Message {
        v1::GroupEvent { resume_token, ..item.clone() }
    }
}

pub struct InstanceKind;

impl Kind for InstanceKind {
    type Item = InstanceChange;
    type Pending = Sequences;
    type Message = v1::InstanceEvent;
    const NAME: &'static str = "WatchInstances";

    fn message(item: &Self::Item, resume_token: String, _: u32) -> Self::Message {
        v1::InstanceEvent { resume_token, ..item.event.clone() }
    }
}

pub struct ErrorKind;

impl Kind for ErrorKind {
    type Item = v1::ErrorEvent;
    type Pending = Queue<v1::ErrorEvent>;
    type Message = v1::ErrorEvent;
    const NAME: &'static str = "WatchErrors";

    fn message(item: &Self::Item, resume_token: String, dropped: u32) -> Self::Message {
        v1::ErrorEvent { resume_token, dropped, ..item.clone() }
    }
}

pub struct EventKind;

impl Kind for EventKind {
    type Item = Event;
    type Pending = Queue<Event>;
    type Message = v1::Event;
    const NAME: &'static str = "WatchEvents";

    fn message(item: &Self::Item, resume_token: String, dropped: u32) -> Self::Message {
        v1::Event { resume_token, dropped, ..status::event(item) }
    }
}

/// Who opens a stream. Comes from a certificate and from nowhere else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watcher {
    tenant: Tenant,
    operator: OperatorId,
    /// The end of the certificate that the stream was opened with.
    not_after: Timestamp,
}

impl Watcher {
    pub fn of(caller: &Caller) -> Result<Self, Refusal> {
        match caller {
            Caller::Operator { operator, tenant, peer } => {
                Ok(Self { tenant: tenant.clone(), operator: *operator, not_after: peer.not_after })
            }
            Caller::Agent { .. } => Err(Refusal::denied("WRONG_ROLE", "agents watch nothing")),
        }
    }

    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    pub fn operator(&self) -> OperatorId {
        self.operator
    }

    pub fn not_after(&self) -> Timestamp {
        self.not_after
    }
}

/// The streams of one kind.
pub struct Registry<K: Kind> {
    epoch: Epoch,
    clock: Arc<dyn Clock>,
    /// Whether a tenant's log begins with the term; else with the first who might come back to it.
    eager: bool,
    channels: Mutex<Channels<K>>,
}

struct Channels<K: Kind> {
    tenants: BTreeMap<Tenant, Channel<K>>,
    /// What every tenant is told, for logs that begin later.
    common: Log<K::Item>,
    next_stream: u64,
}

struct Channel<K: Kind> {
    log: Log<K::Item>,
    streams: BTreeMap<u64, Open<K>>,
}

struct Open<K: Kind> {
    watcher: Watcher,
    slot: Arc<Slot<K>>,
}

/// The last events, numbered without gaps from 1.
struct Log<I> {
    first: u64,
    items: VecDeque<Arc<I>>,
}

impl<I> Default for Log<I> {
    fn default() -> Self {
        Self { first: 1, items: VecDeque::new() }
    }
}

impl<I> Clone for Log<I> {
    fn clone(&self) -> Self {
        Self { first: self.first, items: self.items.clone() }
    }
}

impl<I> Log<I> {
    fn push(&mut self, item: Arc<I>) -> u64 {
        self.items.push_back(item);
        if RING < self.items.len() {
            self.items.pop_front();
            self.first += 1;
        }
        self.last()
    }

    /// The number of the newest event; 0 before the first.
    fn last(&self) -> u64 {
        self.first + u64::try_from(self.items.len()).unwrap_or(u64::MAX) - 1
    }

    fn after(&self, number: u64) -> impl Iterator<Item = (u64, &Arc<I>)> {
        (self.first..).zip(&self.items).filter(move |(at, _)| number < *at)
    }
}

/// Which events a stream asked for.
pub type Wanted<I> = Box<dyn Fn(&I) -> bool + Send + Sync>;

/// What one stream has not taken yet. Shared by the registry, which adds, and the stream, which takes.
pub struct Slot<K: Kind> {
    wanted: Wanted<K::Item>,
    state: Mutex<SlotState<K>>,
}

struct SlotState<K: Kind> {
    pending: K::Pending,
    waker: Option<Waker>,
    /// Since when there is something to take and nothing was taken.
    waits_since: Option<Mono>,
    /// Why it was cut off, if it was.
    cut: Option<Refusal>,
}

impl<K: Kind> Slot<K> {
    fn lock(&self) -> MutexGuard<'_, SlotState<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, number: u64, item: &Arc<K::Item>, now: Mono) {
        if !(self.wanted)(item) {
            return;
        }
        let mut state = self.lock();
        state.pending.push(number, item.clone());
        state.waits_since.get_or_insert(now);
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

impl<K: Kind> Registry<K> {
    pub fn new(epoch: Epoch, clock: Arc<dyn Clock>, eager: bool) -> Self {
        let channels = Channels { tenants: BTreeMap::new(), common: Log::default(), next_stream: 0 };
        Self { epoch, clock, eager, channels: Mutex::new(channels) }
    }

    fn lock(&self) -> MutexGuard<'_, Channels<K>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anybody watches, or may come back with a token.
    pub fn is_followed(&self, tenant: &Tenant) -> bool {
        self.lock().tenants.contains_key(tenant)
    }

    pub fn has_followers(&self) -> bool {
        !self.lock().tenants.is_empty()
    }

    pub fn has_streams(&self) -> bool {
        self.lock().tenants.values().any(|channel| !channel.streams.is_empty())
    }

    pub fn is_watched(&self, tenant: &Tenant) -> bool {
        self.lock().tenants.get(tenant).is_some_and(|channel| !channel.streams.is_empty())
    }

    /// Tells a tenant's streams. The event is not even made where nobody could ever hear it.
    pub fn publish(&self, tenant: &Tenant, item: impl FnOnce() -> Arc<K::Item>) {
        let mut channels = self.lock();
        let channel = if self.eager { Some(channels.channel(tenant)) } else { channels.tenants.get_mut(tenant) };
        if let Some(channel) = channel {
            channel.push(&item(), self.clock.monotonic());
        }
    }

    /// Tells everybody. Such an event names no tenant's objects.
    pub fn publish_to_all(&self, item: &Arc<K::Item>) {
        let now = self.clock.monotonic();
        let mut channels = self.lock();
        channels.common.push(item.clone());
        for channel in channels.tenants.values_mut() {
            channel.push(item, now);
        }
    }

    /// A token from which a watch goes on with what happens after this call.
    pub fn token(&self, tenant: &Tenant) -> String {
        let mut channels = self.lock();
        let last = channels.channel(tenant).log.last();
        token(self.epoch, last)
    }

    pub fn is_of_this_epoch(&self, token: &str) -> bool {
        number(self.epoch, token).is_some()
    }

    /// Enters a stream. From here on it misses nothing; what it is told of the past is up to the caller.
    fn enter(
        &self,
        watcher: &Watcher,
        wanted: Wanted<K::Item>,
        replay: impl FnOnce(&Replay<'_, K::Item>) -> bool,
    ) -> Result<(u64, Arc<Slot<K>>), Refusal> {
        let mut channels = self.lock();
        let id = channels.next_stream;
        let channel = channels.channel(&watcher.tenant);
        let refused = |message: String| Err(Refusal::new(Code::ResourceExhausted, "TOO_MANY_STREAMS", message));
        let own = channel.streams.values().filter(|open| open.watcher.operator == watcher.operator).count();
        if MAX_PER_OPERATOR <= own {
            let operator = watcher.operator;
            return refused(format!("{operator} has {own} {} streams open; close one of them", K::NAME));
        }
        if MAX_PER_TENANT <= channel.streams.len() {
            let (tenant, n) = (&watcher.tenant, channel.streams.len());
            return refused(format!("tenant {tenant} has {n} {} streams open; close one of them", K::NAME));
        }
        let has_more = replay(&Replay { log: &channel.log, wanted: wanted.as_ref() });
        let waits_since = has_more.then(|| self.clock.monotonic());
        let state = SlotState { pending: K::Pending::default(), waker: None, waits_since, cut: None };
        let slot = Arc::new(Slot { wanted, state: Mutex::new(state) });
        channel.streams.insert(id, Open { watcher: watcher.clone(), slot: slot.clone() });
        channels.next_stream += 1;
        Ok((id, slot))
    }

    fn leave(&self, tenant: &Tenant, id: u64) {
        if let Some(channel) = self.lock().tenants.get_mut(tenant) {
            channel.streams.remove(&id);
        }
    }

    /// The token of a stream whose snapshot is complete: whatever is still pending comes after it.
    fn token_of(&self, tenant: &Tenant, slot: &Slot<K>) -> String {
        let mut channels = self.lock();
        let last = channels.channel(tenant).log.last();
        let before = slot.lock().pending.first().map_or(last, |first| first - 1);
        token(self.epoch, before)
    }

    /// Cuts every stream that had something to take for long and took nothing. Answers how many.
    pub fn cut_slow(&self) -> usize {
        let now = self.clock.monotonic();
        self.cut(|_, state| {
            let slow = state.waits_since.is_some_and(|since| STALL <= now.since(since));
            let message = "nothing was read for 30 s; resume by the last token";
            slow.then(|| Refusal::new(Code::ResourceExhausted, "SLOW_CONSUMER", message))
        })
    }

    /// Cuts every stream for which there is a reason. Answers how many.
    fn cut(&self, why: impl Fn(&Watcher, &SlotState<K>) -> Option<Refusal>) -> usize {
        let mut n_cut = 0;
        for channel in self.lock().tenants.values_mut() {
            channel.streams.retain(|_, open| {
                let mut state = open.slot.lock();
                let Some(refusal) = why(&open.watcher, &state) else { return true };
                state.cut = Some(refusal);
                // It resumes by its token; nothing is kept for it here.
                state.pending = K::Pending::default();
                if let Some(waker) = state.waker.take() {
                    waker.wake();
                }
                n_cut += 1;
                false
            });
        }
        n_cut
    }

    fn watchers(&self) -> Vec<Watcher> {
        let channels = self.lock();
        channels
            .tenants
            .values()
            .flat_map(|channel| channel.streams.values())
            .map(|open| open.watcher.clone())
            .collect()
    }
}

/// What a new stream may be told again.
struct Replay<'a, I> {
    log: &'a Log<I>,
    wanted: &'a (dyn Fn(&I) -> bool + Send + Sync),
}

impl<I> Replay<'_, I> {
    fn after(&self, number: u64) -> VecDeque<(u64, Arc<I>)> {
        self.log.after(number).filter(|(_, it)| (self.wanted)(it)).map(|(at, it)| (at, it.clone())).collect()
    }

    /// How many events after this number are forgotten.
    fn n_forgotten(&self, number: u64) -> u64 {
        self.log.first.saturating_sub(number.saturating_add(1))
    }

    /// Whether everything after this number is still there.
    fn reaches_back_to(&self, number: u64) -> bool {
        self.n_forgotten(number) == 0 && number <= self.log.last()
    }
}

impl<K: Kind> Channels<K> {
    /// A tenant's channel, which begins with what all were told before.
    fn channel(&mut self, tenant: &Tenant) -> &mut Channel<K> {
        let common = &self.common;
        let fresh = || Channel { log: common.clone(), streams: BTreeMap::new() };
        self.tenants.entry(tenant.clone()).or_insert_with(fresh)
    }
}

impl<K: Kind> Channel<K> {
    fn push(&mut self, item: &Arc<K::Item>, now: Mono) {
        let number = self.log.push(item.clone());
        for open in self.streams.values() {
            open.slot.push(number, item, now);
        }
    }
}

/// `{epoch}-{number}`; clients take it as it is.
fn token(epoch: Epoch, number: u64) -> String {
    format!("{epoch}-{number}")
}

/// The number of a token of this epoch.
fn number(epoch: Epoch, token: &str) -> Option<u64> {
    let (its, number) = token.split_once('-')?;
    (its == epoch.to_string()).then(|| number.parse().ok()).flatten()
}

/// The same for streams that begin without a snapshot: a token of an earlier epoch stands before everything of this one.
fn number_or_start(epoch: Epoch, token: &str) -> Option<u64> {
    let (its, _) = token.split_once('-')?;
    match its.parse::<u64>() {
        Ok(its) if its < epoch.0 => Some(0),
        _ => number(epoch, token),
    }
}

/// All streams of a term.
pub struct Watches {
    pub groups: Arc<Registry<GroupKind>>,
    pub instances: Arc<Registry<InstanceKind>>,
    pub errors: Errors,
    pub events: Arc<Registry<EventKind>>,
    pub group_memory: GroupMemory,
    served: AtomicBool,
}

impl Watches {
    pub fn new(epoch: Epoch, clock: &Arc<dyn Clock>) -> Self {
        Self {
            groups: Arc::new(Registry::new(epoch, clock.clone(), false)),
            instances: Arc::new(Registry::new(epoch, clock.clone(), false)),
            errors: Errors::new(epoch, clock.clone()),
            // Events are few, and whoever connects may ask for those from the beginning of the term.
            events: Arc::new(Registry::new(epoch, clock.clone(), true)),
            group_memory: GroupMemory::default(),
            served: AtomicBool::new(false),
        }
    }

    /// Answers true once: to whoever shall start the task that serves watchers.
    pub fn begin(&self) -> bool {
        !self.served.swap(true, Ordering::Relaxed)
    }

    pub fn tell(&self, event: &Arc<Event>) {
        match &event.tenant {
            Some(tenant) => self.events.publish(tenant, || event.clone()),
            None => self.events.publish_to_all(event),
        }
        self.errors.tell(event);
    }

    pub fn has_streams(&self) -> bool {
        self.groups.has_streams()
            || self.instances.has_streams()
            || self.errors.registry.has_streams()
            || self.events.has_streams()
    }

    /// Whose streams are open, each stream once.
    pub fn watchers(&self) -> Vec<Watcher> {
        let mut watchers = self.groups.watchers();
        watchers.extend(self.instances.watchers());
        watchers.extend(self.errors.registry.watchers());
        watchers.extend(self.events.watchers());
        watchers
    }

    /// Ends the streams of those who may not watch any more. Answers how many.
    pub fn cut_unwelcome(&self, why: impl Fn(&Watcher) -> Option<Refusal>) -> usize {
        self.groups.cut(|watcher, _| why(watcher))
            + self.instances.cut(|watcher, _| why(watcher))
            + self.errors.registry.cut(|watcher, _| why(watcher))
            + self.events.cut(|watcher, _| why(watcher))
    }

    pub fn cut_slow(&self) -> usize {
        self.groups.cut_slow() + self.instances.cut_slow() + self.errors.registry.cut_slow() + self.events.cut_slow()
    }
}

#[cfg(test)]
mod tests;
