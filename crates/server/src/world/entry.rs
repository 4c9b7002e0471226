//! One instance in the leader's memory: its facts, its VM, its agent.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_core::{
    ids::LbKey,
    instance::{Addresses, Health, Instance, Ownership, Phase, Seen},
    ports::provider::{Vm, VmRef},
    snapshot::Busy,
    time::{Mono, Timestamp},
};
use nstance_store::records::Versioned;
use tokio_util::sync::CancellationToken;

use super::{Balance, Machine, RETURN_GRACE, State, telling::LOST_IS_ILL_AFTER};
use crate::service::files::Delivery;

/// Facts in memory are what was committed, except for an intent whose write is still on its way.
pub enum Facts {
    Intent(Instance),
    Durable(Versioned<Instance>),
}

impl Facts {
    pub fn instance(&self) -> &Instance {
        match self {
            Self::Intent(instance) => instance,
            Self::Durable(record) => &record.value,
        }
    }
}

/// What is left of a machine that was preempted without being told a deadline.
const PREEMPT: Duration = Duration::from_secs(25);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamId(pub u64);

/// A real termination notice, or advice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    pub action: String,
    /// When we heard of it.
    pub at: Timestamp,
    pub deadline: Option<Timestamp>,
    /// When the agent saw it, by its own clock; shown, and nothing else.
    pub detected_at: Option<Timestamp>,
    pub id: String,
    /// How often its deadline was brought forward.
    pub n_shortened: u8,
}

impl Notice {
    /// When the machine goes, as far as it is known. Google tells no deadline and gives 30 s.
    pub fn due_at(&self) -> Option<Timestamp> {
        self.deadline.or_else(|| (self.action == "preempt").then(|| self.at.plus(PREEMPT)))
    }
}

/// What the agent says, or fails to say.
pub struct Link {
    pub stream: Option<StreamId>,
    /// Tells the open stream that a newer one took over.
    pub superseded: Option<CancellationToken>,
    /// Receive time of the last report; before the first, of the registration; at take-over, the take-over.
    pub last_seen: Timestamp,
    /// When it registered in this term, for then its stream is still to come. One that was adopted has had its time.
    pub registered_at: Option<Timestamp>,
    pub reported: bool,
    pub interval: Duration,
    pub lost_at: Option<Timestamp>,
    pub lost_at_mono: Option<Mono>,
    /// Its silence was told.
    pub silence_told: bool,
    pub notice: Option<Notice>,
    pub config_hash: String,
    pub machine: Machine,
}

impl Link {
    /// Its agent has registered, and opens its stream next.
    pub fn registered(&mut self, now: Timestamp) {
        self.last_seen = now;
        self.registered_at = Some(now);
    }

    /// When a report is overdue by a whole interval on a stream that looks open.
    pub fn overdue_at(&self) -> Option<Timestamp> {
        let awaits = self.stream.is_some() && !self.interval.is_zero();
        awaits.then(|| self.last_seen.plus(self.interval.saturating_mul(2)))
    }
}

/// When to look at the VM next.
#[derive(Default)]
pub struct Describe {
    pub due: Option<Timestamp>,
    pub in_flight: bool,
    pub tries: u32,
}

pub struct Entry {
    pub facts: Facts,
    pub seen: Seen,
    pub seen_since: Option<Timestamp>,
    pub seen_at: Option<Timestamp>,
    pub vm: Option<Vm>,
    /// When we last learned, by our own clock, that it was made: from its record, its registration, its first sight.
    pub fresh_from: Timestamp,
    pub link: Link,
    /// Keys and files of its agent.
    pub delivery: Arc<Delivery>,
    pub describe: Describe,
    /// Load balancers it is in, or was.
    pub balancers: BTreeMap<LbKey, Balance>,
    pub busy: Option<Busy>,
    /// Its create was surely never sent, or surely refused: asking is safe whatever the provider's rules for repeats.
    pub unsent: bool,
    /// Since when looks find nothing of a VM that nobody confirmed and whose create is not under way.
    pub absent_since: Option<Timestamp>,
    pub attempts: u32,
    pub next_attempt_at: Option<Timestamp>,
    /// When its death was noticed without a broken stream before it.
    pub died_at_mono: Option<Mono>,
    /// Since when it is dead, silent, or lost for long, as last judged.
    pub ill_since: Option<Timestamp>,
    /// One writer at a time per record; the intent's write holds it too.
    pub writing: Arc<tokio::sync::Mutex<()>>,
    /// The serial that was used last as the current one: from then on the one before it passes no longer, whatever
    /// the record still says.
    pub used_serial: Option<String>,
    /// The record is being told so.
    pub retiring: bool,
    /// Ends the agent's streams.
    pub cut: CancellationToken,
}

impl Entry {
    pub fn new(facts: Facts, interval: Duration, now: Timestamp) -> Self {
        Self {
            facts,
            seen: Seen::NotAsked,
            seen_since: None,
            seen_at: None,
            vm: None,
            fresh_from: now,
            link: Link {
                stream: None,
                superseded: None,
                last_seen: now,
                registered_at: None,
                reported: false,
                interval,
                lost_at: None,
                lost_at_mono: None,
                silence_told: false,
                notice: None,
                config_hash: String::new(),
                machine: Machine::default(),
            },
            delivery: Arc::default(),
            describe: Describe::default(),
            balancers: BTreeMap::new(),
            busy: None,
            unsent: false,
            absent_since: None,
            attempts: 0,
            next_attempt_at: None,
            died_at_mono: None,
            ill_since: None,
            writing: Arc::default(),
            used_serial: None,
            retiring: false,
            cut: CancellationToken::new(),
        }
    }

    pub fn instance(&self) -> &Instance {
        self.facts.instance()
    }

    pub fn phase(&self) -> Phase {
        self.instance().phase()
    }

    /// Nothing will come of it any more: its record is kept for a while, for people.
    pub fn is_over(&self) -> bool {
        matches!(self.phase(), Phase::Deleted | Phase::Failed)
    }

    pub fn vm_ref(&self) -> VmRef {
        let provider = &self.instance().provider;
        VmRef {
            instance: self.instance().id,
            provider_id: provider.id.clone().or_else(|| provider.reserved_id.clone()),
        }
    }

    pub fn observe(&mut self, seen: Seen, vm: Option<&Vm>, now: Timestamp) {
        if self.seen != seen || self.seen_since.is_none() {
            self.seen_since = Some(now);
        }
        self.seen = seen;
        self.seen_at = Some(now);
        if let Some(vm) = vm {
            if self.vm.is_none() {
                self.fresh_from = now;
            }
            self.vm = Some(vm.clone());
        }
    }

    /// Addresses as the provider reports them.
    pub fn provider_addresses(&self) -> Addresses {
        match &self.vm {
            Some(vm) => Addresses {
                ip4: vm.ip4.clone(),
                ip6: vm.ip6.clone(),
                hostname: vm.hostname.clone(),
                fqdn: vm.fqdn.clone(),
            },
            None => self.instance().provider.addresses.clone(),
        }
    }

    /// When an agent without a report counts as silent. Of one that sends none only its stream counts: `None` while that
    /// is there, and as long after its end as others have who told no interval.
    fn deadline(&self, state: &State) -> Option<Timestamp> {
        let (since, interval) = match self.link.interval {
            Duration::ZERO if self.link.stream.is_some() => return None,
            Duration::ZERO => (self.lost_since(state)?, state.health_check_interval),
            told => (self.link.last_seen, told),
        };
        Some(since.plus(interval.saturating_mul(3)))
    }

    /// From when on a registered agent that is not connected counts as lost.
    fn lost_since(&self, state: &State) -> Option<Timestamp> {
        let judged = state.agents_since?.plus(RETURN_GRACE);
        // One that has not been here in this term may be on its way, back or for the first time.
        let on_its_way = || self.link.registered_at.map_or(judged, |at| judged.max(at.plus(RETURN_GRACE)));
        Some(self.link.lost_at.unwrap_or_else(on_its_way))
    }

    /// When an agent that announced its host's end, and went, is not expected back any more.
    fn shut_down_at(&self, state: &State) -> Option<Timestamp> {
        let notice = self.link.notice.as_ref().filter(|notice| notice.action == "shutdown")?;
        self.link.stream.is_none().then(|| notice.at.plus(state.shutdown_grace))
    }

    /// Went with the word that it would be back, and nobody has been told yet that it was not.
    pub fn left(&self) -> bool {
        let is_leave = self.link.notice.as_ref().is_some_and(|notice| notice.action == "leave");
        is_leave && self.link.stream.is_none() && self.link.lost_at_mono.is_none()
    }

    pub fn health(&self, state: &State, now: Timestamp) -> Health {
        // A machine that was adopted without its agent's word is waited for like one that was lost: it had its time to
        // register before we knew of it.
        if self.instance().registration.is_none() && self.instance().adopted_at.is_none() {
            return Health::Starting;
        }
        if let Some(notice) = &self.link.notice
            && is_terminal(&notice.action)
        {
            return Health::Terminating { noticed_at: notice.at, deadline: notice.due_at() };
        }
        if let Some(since) = self.shut_down_at(state).filter(|at| *at <= now) {
            return Health::Silent { since };
        }
        let late = self.deadline(state).filter(|deadline| *deadline <= now);
        if self.link.stream.is_some() {
            return match late {
                Some(since) => Health::Silent { since },
                None if self.link.reported => Health::Healthy,
                None => Health::Starting,
            };
        }
        match self.lost_since(state) {
            Some(since) if since <= now => match late {
                Some(deadline) => Health::Silent { since: deadline.max(since) },
                None => Health::Lost { since },
            },
            _ if self.link.reported => Health::Healthy,
            _ => Health::Starting,
        }
    }

    /// The next moment at which time alone changes this agent's health, or has its VM looked at.
    pub fn next_health_change(&self, state: &State, now: Timestamp) -> Option<Timestamp> {
        if !self.is_awaited() {
            return None;
        }
        let lost = if self.link.stream.is_none() { self.lost_since(state) } else { None };
        let ill = lost.map(|at| at.plus(LOST_IS_ILL_AFTER));
        let changes = [self.link.overdue_at(), self.deadline(state), lost, ill, self.shut_down_at(state)];
        changes.into_iter().flatten().filter(|at| now < *at).min()
    }

    /// Whether somebody must look at its VM now.
    pub fn wants_look(&self, state: &State, now: Timestamp) -> bool {
        if let Some(due) = self.describe.due {
            return due <= now;
        }
        if !self.is_awaited() {
            return false;
        }
        // A report that is overdue, a loss or a silence nobody has looked into yet.
        let trouble_since = match self.health(state, now) {
            Health::Lost { .. } | Health::Silent { .. } => Some(self.trouble_since(state)),
            _ => self.link.overdue_at().filter(|at| *at <= now),
        };
        trouble_since.is_some_and(|since| self.seen_at.is_none_or(|at| at < since))
    }

    /// Whether its group counts on it, unless it is ill.
    pub fn is_member(&self) -> bool {
        let managed = self.instance().ownership == Ownership::Managed;
        managed && matches!(self.phase(), Phase::Pending | Phase::Provisioning | Phase::Running)
    }

    /// Whether its agent is expected to be there.
    fn is_awaited(&self) -> bool {
        let adopted = self.phase() == Phase::Provisioning && self.instance().adopted_at.is_some();
        self.phase() == Phase::Running || adopted
    }

    fn trouble_since(&self, state: &State) -> Timestamp {
        match self.link.stream {
            Some(_) => self.deadline(state).unwrap_or(self.link.last_seen),
            None => self.lost_since(state).unwrap_or(self.link.last_seen),
        }
    }
}

/// The VM will end. Advice (`rebalance`, `maintenance`) and the agent's own stop (`shutdown`, `leave`) are not that.
pub fn is_terminal(action: &str) -> bool {
    matches!(action, "terminate" | "stop" | "hibernate" | "preempt")
}
