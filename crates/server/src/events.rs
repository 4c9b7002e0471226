//! What happened, as a closed set of reasons: for the log, for watchers, for `explain`.
//!
//! An event names one tenant, or none: shard-wide events name nobody's objects. The ring is bounded. Whoever watches is
//! told by `watch.rs`.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId, Tenant},
    time::Timestamp,
};

use crate::metrics::{Metrics, ReasonLabels};

const RING: usize = 4096;

/// Details of events that are errors.
pub const CLASS: &str = "class";
pub const RETRY_AFTER: &str = "retry_after_ms";

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
            pub const ALL: &[Self] = &[$(Self::$name,)*];

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
    BootFailed Warning,
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
    FileDeliveryFailed Warning,
    CertificateIssued Info,
    AddressMismatch Warning,
    NonceReplayed Error,
    RejoinRefused Error,
    LeaderAcquired Info,
    LeaderReleased Info,
    LeaderLost Warning,
    LeaderNetworkFailing Warning,
    ServerIdDoubled Warning,
    StoreFailing Warning,
    ProviderFailing Warning,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
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
    at: Option<Timestamp>,
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
            at: None,
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

    /// Of an error of this class: whoever watches errors is told.
    pub fn error(self, class: &'static str) -> Self {
        self.detail(CLASS, class)
    }

    /// When it is tried again, for errors.
    pub fn retry_after(self, wait: Duration) -> Self {
        self.detail(RETRY_AFTER, wait.as_millis())
    }

    /// More serious than its reason usually is.
    pub fn warning(mut self) -> Self {
        self.severity = Severity::Warning;
        self
    }

    /// When it happened, for what is told later. The first who says so is right.
    pub fn at(mut self, at: Timestamp) -> Self {
        self.at.get_or_insert(at);
        self
    }

    pub fn by(mut self, actor: impl Into<String>) -> Self {
        self.actor = actor.into();
        self
    }
}

pub struct Events {
    ring: Mutex<VecDeque<Arc<Event>>>,
    metrics: Arc<Metrics>,
}

impl Events {
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { ring: Mutex::default(), metrics }
    }

    /// Logs, counts and keeps an event that happened now, unless it says when. Answers it for whoever is to hear of it.
    pub fn tell(&self, now: Timestamp, epoch: Epoch, tell: Tell) -> Arc<Event> {
        let Tell { reason, tenant, group, instance, message, detail, actor, severity, at } = tell;
        let at = at.unwrap_or(now);
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
        let event = Arc::new(Event { at, reason, severity, tenant, group, instance, message, detail, epoch, actor });
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.push_back(event.clone());
        if RING < ring.len() {
            ring.pop_front();
        }
        event
    }

    fn visible(event: &Event, tenant: &Tenant) -> bool {
        event.tenant.as_ref().is_none_or(|it| it == tenant)
    }

    /// What was told to all since the last term, on the way to the one of this epoch; oldest first.
    pub fn on_the_way_to(&self, epoch: Epoch) -> Vec<Arc<Event>> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = ring.iter().rev().take_while(|event| event.epoch == Epoch(0) || event.epoch == epoch);
        let mut recent: Vec<_> = recent.filter(|event| event.tenant.is_none()).cloned().collect();
        recent.reverse();
        recent
    }

    /// The last `n` events a tenant may see, oldest first.
    pub fn last(&self, tenant: &Tenant, n: usize) -> Vec<Arc<Event>> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last: Vec<_> =
            ring.iter().rev().filter(|event| Self::visible(event, tenant)).take(n).cloned().collect();
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
    #[test]
    fn what_is_told_later_keeps_the_time_at_which_it_happened() {
        let events = Events::new(Arc::default());
        let at = |millis| Timestamp::from_millis(millis);
        let tell = || Tell::shard(Reason::LeaderAcquired, "it");
        assert_eq!(events.tell(at(9), Epoch(1), tell()).at, at(9));
        assert_eq!(events.tell(at(9), Epoch(1), tell().at(at(7))).at, at(7));
        assert_eq!(events.tell(at(9), Epoch(1), tell().at(at(7)).at(at(8))).at, at(7), "whoever said it first");
    }
}
