//! What happened, as a closed set of reasons: for the log, for watchers, for `explain`.
//!
//! An event names one tenant, or none: shard-wide events name nobody's objects. The ring is bounded, and so is every
//! subscriber's queue; whoever reads too slowly is told how many it missed.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, Tenant},
    time::Timestamp,
};
use tokio::sync::broadcast;

use crate::metrics::{Metrics, ReasonLabels};

const RING: usize = 4096;
const QUEUE: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    Debug,
    Info,
    Warning,
    Error,
}

macro_rules! reasons {
    ($($name:ident $severity:ident,)*) => {
        /// Why an event is told. Grows, never changes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason { $($name,)* }

        impl Reason {
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            pub fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity,)* }
            }
        }
    };
}

reasons! {
    InstanceCreateRequested Info,
    InstanceCreated Info,
    InstanceCreateFailed Warning,
    InstanceRegistered Info,
    InstanceNeverRegistered Warning,
    InstanceLost Warning,
    InstanceRecovered Info,
    InstanceSilent Warning,
    InstanceDead Warning,
    TerminationNotice Warning,
    HostShutdown Warning,
    DrainStarted Info,
    DrainAcked Info,
    DrainTimedOut Warning,
    DrainCancelled Info,
    InstanceDeleting Info,
    InstanceDeleted Info,
    DeleteFailing Warning,
    LbRegistered Info,
    LbDeregistered Info,
    LbFailing Warning,
    InstanceAdopted Warning,
    OrphanTerminated Warning,
    ForeignVm Warning,
    RecordRepaired Warning,
    ReplaceRequested Info,
    GroupChanged Info,
    GroupDeleted Info,
    RolloutStarted Info,
    RolloutProgressed Info,
    RolloutFailing Warning,
    RolloutFinished Info,
    ExpiryStarted Info,
    HoldStarted Info,
    HoldCleared Info,
    ImageResolved Info,
    ImageFailed Warning,
    ConfigApplied Info,
    ConfigRejected Error,
    CertificateIssued Info,
    NonceReplayed Error,
    LeaderAcquired Info,
    LeaderReleased Info,
    StoreFailing Warning,
    ProviderFailing Warning,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub number: u64,
    pub at: Timestamp,
    pub reason: Reason,
    pub severity: Severity,
    /// `None`: shard-wide.
    pub tenant: Option<Tenant>,
    pub group: Option<GroupRef>,
    pub instance: Option<InstanceId>,
    pub message: String,
    pub detail: BTreeMap<&'static str, String>,
    pub epoch: Epoch,
    pub actor: String,
}

/// An event on its way in.
#[derive(Debug, Clone)]
pub struct Tell {
    reason: Reason,
    tenant: Option<Tenant>,
    group: Option<GroupRef>,
    instance: Option<InstanceId>,
    message: String,
    detail: BTreeMap<&'static str, String>,
    actor: String,
    severity: Severity,
}

impl Tell {
    pub fn shard(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            tenant: None,
            group: None,
            instance: None,
            message: message.into(),
            detail: BTreeMap::new(),
            actor: String::new(),
            severity: reason.severity(),
        }
    }

    /// Of a tenant as a whole: an operator of its, say. Nobody else hears it.
    pub fn tenant(reason: Reason, tenant: &Tenant, message: impl Into<String>) -> Self {
        Self { tenant: Some(tenant.clone()), ..Self::shard(reason, message) }
    }

    pub fn group(reason: Reason, group: &GroupRef, message: impl Into<String>) -> Self {
        Self { tenant: Some(group.tenant.clone()), group: Some(group.clone()), ..Self::shard(reason, message) }
    }

    pub fn instance(reason: Reason, group: &GroupRef, instance: InstanceId, message: impl Into<String>) -> Self {
        Self { instance: Some(instance), ..Self::group(reason, group, message) }
    }

    pub fn detail(mut self, name: &'static str, value: impl ToString) -> Self {
        self.detail.insert(name, value.to_string());
        self
    }

    /// More serious than its reason usually is.
    pub fn warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    pub fn by(mut self, actor: impl Into<String>) -> Self {
        self.actor = actor.into();
        self
    }
}

pub struct Events {
    ring: Mutex<Ring>,
    sender: broadcast::Sender<Arc<Event>>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Ring {
    events: VecDeque<Arc<Event>>,
    next: u64,
}

impl Events {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { ring: Mutex::default(), sender: broadcast::Sender::new(QUEUE), metrics }
    }

    pub fn tell(&self, at: Timestamp, epoch: Epoch, tell: Tell) {
        let Tell { reason, tenant, group, instance, message, detail, actor, severity } = tell;
        let shown_group = group.as_ref().map(ToString::to_string).unwrap_or_default();
        let shown_instance = instance.as_ref().map(ToString::to_string).unwrap_or_default();
        let name = reason.as_str();
        match severity {
            Severity::Debug => {
                tracing::debug!(reason = name, group = shown_group, instance = shown_instance, %epoch, ?detail, "{message}");
            }
            Severity::Info => {
                tracing::info!(reason = name, group = shown_group, instance = shown_instance, %epoch, ?detail, "{message}");
            }
            Severity::Warning => {
                tracing::warn!(reason = name, group = shown_group, instance = shown_instance, %epoch, ?detail, "{message}");
            }
            Severity::Error => {
                tracing::error!(reason = name, group = shown_group, instance = shown_instance, %epoch, ?detail, "{message}");
            }
        }
        self.metrics.events.get_or_create(&ReasonLabels { reason: name }).inc();
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let event = Arc::new(Event {
            number: ring.next,
            at,
            reason,
            severity,
            tenant,
            group,
            instance,
            message,
            detail,
            epoch,
            actor,
        });
        ring.next += 1;
        ring.events.push_back(event.clone());
        if RING < ring.events.len() {
            ring.events.pop_front();
        }
        // Nobody listening is no fault. Sent under the lock, so that a subscriber sees events in their order.
        let _ = self.sender.send(event);
    }

    /// What a tenant may see of the past after `number`, and everything from now on.
    pub fn subscribe(&self, tenant: &Tenant, after: Option<u64>) -> (Vec<Arc<Event>>, broadcast::Receiver<Arc<Event>>) {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let past = ring
            .events
            .iter()
            .filter(|event| after.is_some_and(|after| after < event.number) && Self::visible(event, tenant))
            .cloned()
            .collect();
        (past, self.sender.subscribe())
    }

    pub fn visible(event: &Event, tenant: &Tenant) -> bool {
        event.tenant.as_ref().is_none_or(|it| it == tenant)
    }

    /// The last `n` events a tenant may see, oldest first.
    pub fn last(&self, tenant: &Tenant, n: usize) -> Vec<Arc<Event>> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last: Vec<_> =
            ring.events.iter().rev().filter(|event| Self::visible(event, tenant)).take(n).cloned().collect();
        last.reverse();
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_sees_its_own_and_the_shards_events_only() {
        let events = Events::new(Arc::default());
        let group = |tenant: &str| GroupRef::new(tenant.parse().unwrap(), "web".parse().unwrap());
        let now = Timestamp::EPOCH;
        events.tell(now, Epoch(1), Tell::group(Reason::GroupChanged, &group("a"), "a's"));
        events.tell(now, Epoch(1), Tell::group(Reason::GroupChanged, &group("b"), "b's"));
        events.tell(now, Epoch(1), Tell::tenant(Reason::CertificateIssued, &group("b").tenant, "b's operator"));
        events.tell(now, Epoch(1), Tell::shard(Reason::LeaderAcquired, "all"));
        let seen: Vec<_> = events.last(&"a".parse().unwrap(), 10).iter().map(|event| event.message.clone()).collect();
        assert_eq!(seen, ["a's", "all"]);
    }
}
