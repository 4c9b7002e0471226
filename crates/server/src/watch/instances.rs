//! From an instance's facts to what its watchers are told.

use std::{ops::Bound, sync::Arc};

use nstance_core::{
    ids::{InstanceId, Tenant},
    instance::{DrainReason, Instance, Ownership, Phase},
    ports::provider::Provider,
    time::Timestamp,
};
use nstance_proto::v1;

use super::{Chunks, InstanceKind, Registry};
use crate::{
    service::status::{self, timestamp},
    term::Term,
    term_clock::TermClock,
    world::{Entry, State},
};

/// Entries that one part of a snapshot looks at: a handful of milliseconds of the world's lock at most.
const CHUNK: usize = 256;

nstance_core::words!(
    /// The states of an instance, as streams name them.
    Told {
        Pending "pending",
        Failed "failed",
        Provisioning "provisioning",
        Running "running",
        Unhealthy "unhealthy",
        PendingDeletion "pending_deletion",
        DrainCancelled "drain_cancelled",
        Deleting "deleting",
        Deleted "deleted",
    }
);

/// One event of one instance.
#[derive(Debug, Clone, PartialEq)]
pub struct InstanceChange {
    pub id: InstanceId,
    pub told: Told,
    pub event: v1::InstanceEvent,
}

/// What watchers know of an instance. They are told when it changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    pub told: Told,
    drain: Option<(DrainReason, Timestamp, Timestamp, Option<InstanceId>)>,
}

impl Standing {
    pub fn of(entry: &Entry) -> Self {
        let it = entry.instance();
        let told = match it.phase() {
            Phase::Provisioning | Phase::Running if entry.ill_since.is_some() => Told::Unhealthy,
            Phase::Pending => Told::Pending,
            Phase::Failed => Told::Failed,
            Phase::Provisioning => Told::Provisioning,
            Phase::Running => Told::Running,
            Phase::Draining => Told::PendingDeletion,
            Phase::Deleting => Told::Deleting,
            Phase::Deleted => Told::Deleted,
        };
        // That a drain was acknowledged is the word of whoever watches.
        let drain = it.open_drain().filter(|_| told == Told::PendingDeletion);
        Self { told, drain: drain.map(|it| (it.reason, it.started_at, it.deadline, it.replacement)) }
    }

    /// What is told on the way from `before` to here.
    pub fn news(&self, before: Option<&Self>) -> Option<Told> {
        match before {
            Some(before) if before == self => None,
            // It was gone before anybody knew of it.
            None if self.told == Told::Deleted => None,
            Some(Self { told: Told::PendingDeletion, .. })
                if matches!(self.told, Told::Pending | Told::Provisioning | Told::Running | Told::Unhealthy) =>
            {
                Some(Told::DrainCancelled)
            }
            _ => Some(self.told),
        }
    }
}

/// The way from the world to the streams. Used under the world's lock, so that streams see changes in their order.
pub struct Feed {
    pub registry: Arc<Registry<InstanceKind>>,
    pub provider: Arc<dyn Provider>,
    pub clock: TermClock,
}

impl Feed {
    /// Tells one change of an entry. Costs a look into a map where nobody watches the tenant.
    pub fn tell(&self, state: &State, entry: &Entry, told: Told) {
        let it = entry.instance();
        self.registry.publish(&it.group.tenant, || {
            let event = event_of(self.provider.as_ref(), state, entry, told, self.clock.now());
            Arc::new(InstanceChange { id: it.id, told, event })
        });
    }
}

pub fn event_of(
    provider: &dyn Provider,
    state: &State,
    entry: &Entry,
    told: Told,
    now: Timestamp,
) -> v1::InstanceEvent {
    let it = entry.instance();
    let drain = it.open_drain();
    v1::InstanceEvent {
        instance_id: it.id.to_string(),
        tenant: it.group.tenant.to_string(),
        provider_instance_id: it.provider.id.clone().unwrap_or_default(),
        group: it.group.group.to_string(),
        status: told.as_str().to_owned(),
        reason: reason(state, entry, told, now),
        unhealthy_at: entry.ill_since.map(timestamp),
        delete_at: drain.map(|drain| timestamp(drain.deadline)),
        drain_id: named_drain(it, told).unwrap_or_default(),
        resume_token: String::new(),
        snapshot: false,
        on_demand: it.ownership == Ownership::OnDemand,
        replacement_id: drain.and_then(|drain| drain.replacement).map(|id| id.to_string()).unwrap_or_default(),
        instance: Some(status::instance_status(provider, state, entry, now)),
    }
}

/// The drain that is under way, or that was cancelled just now.
fn named_drain(it: &Instance, told: Told) -> Option<String> {
    let drain = if told == Told::DrainCancelled { it.drain.as_ref() } else { it.open_drain() };
    drain.map(|drain| drain.started_at.as_millis().to_string())
}

fn reason(state: &State, entry: &Entry, told: Told, now: Timestamp) -> String {
    let it = entry.instance();
    match told {
        Told::Pending => it.reason.as_str().to_owned(),
        Told::Failed => it.create_failure.as_ref().map(|failure| failure.class.clone()).unwrap_or_default(),
        Told::Provisioning | Told::Running => String::new(),
        Told::Unhealthy if crate::world::is_dead(entry.seen) => entry.seen.as_str().to_owned(),
        Told::Unhealthy => entry.health(state, now).as_str().to_owned(),
        Told::PendingDeletion | Told::DrainCancelled => {
            it.drain.as_ref().map(|drain| drain.reason.as_str().to_owned()).unwrap_or_default()
        }
        Told::Deleting | Told::Deleted => it.delete.as_ref().map(|delete| delete.reason.clone()).unwrap_or_default(),
    }
}

/// All instances of a tenant that are not deleted, in parts, then the end marker. Between two parts the world goes on:
/// what happens to those already shown is pending and comes after the end, and what happened to those of a part is in
/// it.
pub fn snapshot(term: Arc<Term>, tenant: Tenant) -> Chunks<InstanceKind> {
    let mut after: Option<InstanceId> = None;
    let mut told = false;
    Box::new(move |slot| {
        if told {
            return None;
        }
        let (now, provider) = (term.now(), term.shared.provider.as_ref());
        let state = term.world.lock();
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let part: Vec<_> = state.entries.range((from, Bound::Unbounded)).take(CHUNK).collect();
        told = part.len() < CHUNK;
        after = part.last().map(|(id, _)| **id);
        let to = after.filter(|_| !told).map_or(Bound::Unbounded, Bound::Included);
        slot.lock().pending.cover((from, to));
        let shown = part.iter().filter(|(_, entry)| entry.instance().group.tenant == tenant);
        let shown =
            shown.map(|(_, entry)| (*entry, Standing::of(entry).told)).filter(|(_, told)| *told != Told::Deleted);
        let mut events: Vec<_> = shown
            .map(|(entry, told)| v1::InstanceEvent { snapshot: true, ..event_of(provider, &state, entry, told, now) })
            .collect();
        if told {
            // Still under the world's lock: nothing comes between the last part and this.
            events.push(v1::InstanceEvent {
                tenant: tenant.to_string(),
                status: "snapshot_end".to_owned(),
                resume_token: term.watches.instances.token_of(&tenant, slot),
                snapshot: true,
                ..v1::InstanceEvent::default()
            });
        }
        Some(events)
    })
}
