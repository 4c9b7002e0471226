//! One open stream, as the transport pulls it. It is asked for the next message only when there is room for one, so
//! being asked is the sign that the last one was taken.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use nstance_core::ids::Tenant;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::{Kind, Pending as _, Registry, Replay, Slot, Wanted, Watcher, number, number_or_start, token};
use crate::grpc::status::Refusal;

/// The parts of a snapshot, made one by one as they are asked for; `None` after the last.
pub type Chunks<K> = Box<dyn FnMut(&Slot<K>) -> Option<Vec<<K as Kind>::Message>> + Send>;

pub struct Subscription<K: Kind> {
    registry: Arc<Registry<K>>,
    tenant: Tenant,
    id: u64,
    slot: Arc<Slot<K>>,
    /// From the log, for one who came back.
    replay: VecDeque<(u64, Arc<K::Item>)>,
    /// Forgotten before the first message.
    dropped: u64,
    snapshot: Option<Chunks<K>>,
    ready: VecDeque<K::Message>,
    ended: Pin<Box<dyn Future<Output = ()> + Send>>,
    over: bool,
}

impl<K: Kind> Subscription<K> {
    /// Opens a stream without a snapshot: of what its token names whatever is still remembered, and all from now on. Who
    /// comes from an earlier leader has heard nothing of this term, and is told all of it.
    pub fn tail(
        registry: &Arc<Registry<K>>,
        watcher: &Watcher,
        resume_token: &str,
        wanted: Wanted<K::Item>,
        end: &CancellationToken,
    ) -> Result<Self, Refusal> {
        let after = number_or_start(registry.epoch, resume_token);
        Self::enter(registry, watcher, wanted, None, end, |past| {
            after.map(|number| (past.after(number), past.n_forgotten(number)))
        })
    }

    /// Opens a stream that goes on after its token, if all since then is remembered, and else begins with a snapshot.
    pub fn open(
        registry: &Arc<Registry<K>>,
        watcher: &Watcher,
        resume_token: &str,
        snapshot: Chunks<K>,
        end: &CancellationToken,
    ) -> Result<Self, Refusal> {
        let after = number(registry.epoch, resume_token);
        Self::enter(registry, watcher, Box::new(|_| true), Some(snapshot), end, |past| {
            after.filter(|number| past.reaches_back_to(*number)).map(|number| (past.after(number), 0))
        })
    }

    fn enter(
        registry: &Arc<Registry<K>>,
        watcher: &Watcher,
        wanted: Wanted<K::Item>,
        mut snapshot: Option<Chunks<K>>,
        end: &CancellationToken,
        past: impl FnOnce(&Replay<'_, K::Item>) -> Option<(VecDeque<(u64, Arc<K::Item>)>, u64)>,
    ) -> Result<Self, Refusal> {
        let (mut replay, mut dropped) = (VecDeque::new(), 0);
        let (id, slot) = registry.enter(watcher, wanted, |log| {
            if let Some(found) = past(log) {
                (replay, dropped) = found;
                snapshot = None;
            }
            snapshot.is_some() || !replay.is_empty()
        })?;
        Ok(Self {
            registry: registry.clone(),
            tenant: watcher.tenant.clone(),
            id,
            slot,
            replay,
            dropped,
            snapshot,
            ready: VecDeque::new(),
            ended: Box::pin(end.clone().cancelled_owned()),
            over: false,
        })
    }

    /// How many of its first messages are of the time before it was opened.
    pub fn n_replayed(&self) -> usize {
        self.replay.len()
    }

    /// The next message that needs no waiting.
    fn take(&mut self) -> Option<K::Message> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Some(message);
            }
            match self.snapshot.as_mut().map(|chunks| chunks(&self.slot)) {
                Some(Some(chunk)) => self.ready.extend(chunk),
                Some(None) => self.snapshot = None,
                None => break,
            }
        }
        let (number, item, dropped) = match self.replay.pop_front() {
            Some((number, item)) => (number, item, 0),
            None => {
                let line = self.slot.lock().pending.pop()?;
                (line.number, line.item, line.dropped)
            }
        };
        let dropped = dropped + std::mem::take(&mut self.dropped);
        let token = token(self.registry.epoch, number);
        Some(K::message(&item, token, u32::try_from(dropped).unwrap_or(u32::MAX)))
    }

    fn has_more(&self) -> bool {
        !self.ready.is_empty() || self.snapshot.is_some() || !self.replay.is_empty()
    }
}

impl<K: Kind> Stream for Subscription<K> {
    type Item = Result<K::Message, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        if this.ended.as_mut().poll(context).is_ready() {
            this.over = true;
            let refusal = Refusal::unavailable("LEADER_CHANGED", "this server leads no more; reconnect");
            return Poll::Ready(Some(Err(refusal.into())));
        }
        let cut = this.slot.lock().cut.clone();
        if let Some(refusal) = cut {
            this.over = true;
            return Poll::Ready(Some(Err(refusal.into())));
        }
        let taken = this.take();
        let has_more = this.has_more();
        let now = this.registry.clock.monotonic();
        let mut state = this.slot.lock();
        let Some(message) = taken else {
            // Looked at again under the lock: something may have come since.
            if !state.pending.is_empty() || state.cut.is_some() {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            state.waits_since = None;
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        };
        state.waits_since = (has_more || !state.pending.is_empty()).then_some(now);
        Poll::Ready(Some(Ok(message)))
    }
}

impl<K: Kind> Drop for Subscription<K> {
    fn drop(&mut self) {
        self.registry.leave(&self.tenant, self.id);
    }
}
