//! The leader's picture in memory: records, what the provider shows, what agents say, and what is asked of each group.
//!
//! It is filled at take-over, changed only after a commit (or by an observation), and dropped with the term. One lock,
//! never held over an await. Everything in ordered maps: the order of a walk reaches plans, ids and logs.

mod balancers;
mod brake;
mod entry;
mod failures;
mod images;
mod machine;
mod places;
mod settings;
mod telling;
mod types;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Duration,
};

use nstance_config::{MergedGroup, model::Server};
use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId, LbKey, Tenant},
    instance::{Health, Instance, Ownership, Seen},
    plan::Hold,
    ports::provider::{LoadBalancer, Vm, VmRef},
    snapshot::{BlockKind, Completeness, CreateBlock, ProviderView, Settings},
    time::{Mono, Timestamp},
};
use nstance_store::{rebuild::CorruptRecord, records::Versioned};
use tokio::sync::Notify;

pub use balancers::{Balance, MembersShown, Way};
pub use brake::{BrakeMemory, BrakeSettings};
pub use entry::{Describe, Entry, Facts, Link, Notice, StreamId, is_terminal};
pub use failures::FailureMemory;
pub use images::Images;
pub use machine::{BlackBox, Load, Machine, counts_for};
pub use places::{Figure, Pair, Places, Room};
pub use types::{InstanceTypes, TypeAnswer, type_name};

use self::settings::{brake_settings, settings};
use crate::{metrics::hosts::Sizes, tasks::rollouts::RolloutMemory, term_clock::TermClock, watch::Feed};

/// How long after the agent port opened nobody counts as lost: a fleet needs its time to find a new leader. Who
/// registers later has as long to open its stream.
pub const RETURN_GRACE: Duration = Duration::from_secs(30);

/// How many removed instances are remembered: more than an hour of heavy churn leaves behind.
const MAX_PURGED: usize = 10_000;

/// How often the lock is tried before sleep: some tens of microseconds, about what sleep and waking cost.
const SPINS: u32 = 1000;

pub struct World {
    clock: TermClock,
    state: Mutex<State>,
    /// Something else is asked of a group.
    asked: Notify,
}

pub struct State {
    pub complete: Completeness,
    pub provider: ProviderView,
    pub settings: Settings,
    pub runaway_window: Duration,
    pub health_check_interval: Duration,
    pub shutdown_grace: Duration,
    /// For groups that say nothing else, those being deleted included.
    pub default_drain_timeout: Duration,
    /// Boxed: a map keeps room for as many again.
    pub entries: BTreeMap<InstanceId, Box<Entry>>,
    pub groups: BTreeMap<GroupRef, GroupState>,
    pub corrupt: Vec<CorruptRecord>,
    /// When the agent port opened in this term.
    pub agents_since: Option<Timestamp>,
    /// When this term began, by its own clock.
    pub began: Timestamp,
    pub next_stream: u64,
    /// Registered instances whose agent is not connected, but for those that are over; and how many are connected.
    pub lost: BTreeSet<InstanceId>,
    pub n_connected: usize,
    pub brake_settings: BrakeSettings,
    pub brake_memory: BrakeMemory,
    pub places: Places,
    /// On-demand instances by the id of the request that made them.
    pub requests: BTreeMap<(Tenant, String), InstanceId>,
    /// Instances whose records were removed in this term: their ids are used up all the same.
    pub purged: VecDeque<InstanceId>,
    pub images: Images,
    pub types: InstanceTypes,
    /// VMs that bear our owner's tags and no usable others. Nobody touches them.
    pub foreign: BTreeSet<InstanceId>,
    /// Members of load balancers that nobody knows, being taken out.
    pub strangers: BTreeSet<(LbKey, InstanceId)>,
    /// VMs whose tags were absent from listings, and from how many in a row.
    pub untagged: BTreeMap<InstanceId, u32>,
    /// Load balancers that somebody looks at until nobody drains out of them.
    pub watched_balancers: BTreeMap<LbKey, Arc<Notify>>,
    /// Load balancers as the config of this term described them last: what leaves the config is still deregistered.
    pub described_balancers: BTreeMap<LbKey, LoadBalancer>,
    /// To those who watch instances; there once the term has begun.
    pub feed: Option<Feed>,
    /// Groups that a config would take away together with too much else, since when: they wait for a person's word.
    pub mass_removal: BTreeMap<GroupRef, Timestamp>,
}

/// What is asked of a group, and what happened in it lately.
pub struct GroupState {
    pub desired: Desired,
    pub merged: Option<Arc<MergedGroup>>,
    pub infra_hash: String,
    pub runtime_hash: String,
    /// Everybody with a record …
    pub members: BTreeSet<InstanceId>,
    /// … and those of them who are not over. Where machines come and go, most records are of those who went.
    pub living: BTreeSet<InstanceId>,
    pub candidates: BTreeMap<InstanceId, Vm>,
    /// Candidates whose adoption or end is under way.
    pub judging: BTreeSet<InstanceId>,
    pub blocks: BTreeMap<BlockKind, Block>,
    pub victims: Vec<InstanceId>,
    pub etag: String,
    /// Creates of the runaway window, accepted or ambiguous.
    pub created: VecDeque<Timestamp>,
    pub sizes: VecDeque<(Timestamp, u32)>,
    pub never_registered_in_a_row: u32,
    /// Blocks caused by VMs that were accepted and died before they registered.
    ended_early: BTreeSet<BlockKind>,
    pub failures: FailureMemory,
    pub rollout: RolloutMemory,
    /// Losses whose replacement has not been asked for yet: when each was noticed.
    pub losses: VecDeque<Mono>,
    pub holds: Vec<Hold>,
    /// As the last pass counted it.
    pub shown: Option<Sizes>,
    /// Grows with every change, so that a stale plan can be recognised.
    pub revision: u64,
}

/// A reason not to create, with its memory of how often it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    pub message: String,
    pub since: Timestamp,
    pub until: Option<Timestamp>,
    pub times: u32,
}

impl Default for GroupState {
    fn default() -> Self {
        Self {
            desired: Desired::Unknown,
            merged: None,
            infra_hash: String::new(),
            runtime_hash: String::new(),
            members: BTreeSet::new(),
            living: BTreeSet::new(),
            candidates: BTreeMap::new(),
            judging: BTreeSet::new(),
            blocks: BTreeMap::new(),
            victims: Vec::new(),
            etag: String::new(),
            created: VecDeque::new(),
            sizes: VecDeque::new(),
            never_registered_in_a_row: 0,
            ended_early: BTreeSet::new(),
            failures: FailureMemory::default(),
            rollout: RolloutMemory::default(),
            losses: VecDeque::new(),
            holds: Vec::new(),
            shown: None,
            revision: 0,
        }
    }
}

/// What is due in a group by the clock.
pub struct Due {
    /// VMs that must be looked at.
    pub look: Vec<VmRef>,
    /// Instances whose agents announced a restart and are lost since.
    pub left: Vec<InstanceId>,
}

/// How a group is asked for, as config and groups file say together.
#[derive(PartialEq)]
pub struct Asked {
    pub desired: Desired,
    pub merged: Option<Arc<MergedGroup>>,
    pub infra_hash: String,
    pub runtime_hash: String,
    pub victims: Vec<InstanceId>,
    pub etag: String,
    /// The merged group is not usable; why.
    pub problem: Option<String>,
}

impl World {
    pub fn new(clock: TermClock, server: &Server) -> Self {
        let state = State {
            complete: Completeness { config: true, groups: true, records: false, listing: false },
            provider: ProviderView::Available,
            settings: settings(server),
            runaway_window: server.safety.runaway_window,
            health_check_interval: server.health_check_interval,
            shutdown_grace: server.shutdown_grace,
            default_drain_timeout: server.default_drain_timeout,
            entries: BTreeMap::new(),
            groups: BTreeMap::new(),
            corrupt: Vec::new(),
            agents_since: None,
            began: clock.started_at(),
            next_stream: 0,
            lost: BTreeSet::new(),
            n_connected: 0,
            brake_settings: brake_settings(server),
            brake_memory: BrakeMemory::default(),
            places: Places::default(),
            requests: BTreeMap::new(),
            purged: VecDeque::new(),
            images: Images::new(clock.started_at()),
            types: InstanceTypes::default(),
            foreign: BTreeSet::new(),
            strangers: BTreeSet::new(),
            untagged: BTreeMap::new(),
            watched_balancers: BTreeMap::new(),
            described_balancers: BTreeMap::new(),
            feed: None,
            mass_removal: BTreeMap::new(),
        };
        Self { clock, state: Mutex::new(state), asked: Notify::new() }
    }

    /// Takes over settings that may change while we lead.
    pub fn configure(&self, server: &Server) {
        let mut state = self.lock();
        state.settings = settings(server);
        state.runaway_window = server.safety.runaway_window;
        state.health_check_interval = server.health_check_interval;
        state.shutdown_grace = server.shutdown_grace;
        state.default_drain_timeout = server.default_drain_timeout;
        state.brake_settings = brake_settings(server);
        // Who has told its own interval keeps it.
        for entry in state.entries.values_mut().filter(|entry| !entry.link.reported) {
            entry.link.interval = server.health_check_interval;
        }
    }

    /// Forgets what went wrong in some groups: they are asked for anew. What is known of places stays, it is true
    /// whatever is asked.
    pub fn forgive<'a>(&self, groups: impl Iterator<Item = &'a GroupRef>) {
        let mut state = self.lock();
        for group in groups {
            if let Some(it) = state.groups.get_mut(group) {
                it.blocks.clear();
                it.never_registered_in_a_row = 0;
                it.ended_early.clear();
                it.revision += 1;
            }
        }
    }

    /// Takes the hold of the removal brake off a group. Answers whether there was one.
    pub fn release(&self, group: &GroupRef) -> bool {
        self.lock().mass_removal.remove(group).is_some()
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        // Nobody holds it for long. Whoever went to sleep for it would wake a good while after it is free again, and
        // find it taken by the next: of two processors one did nothing while fifty machines waited to be replaced.
        for _ in 0..SPINS {
            match self.state.try_lock() {
                Ok(state) => return state,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn clock(&self) -> &TermClock {
        &self.clock
    }

    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Takes in a complete rebuild. Silence of registered agents counts from now.
    pub fn load(&self, records: Vec<Versioned<Instance>>, corrupt: Vec<CorruptRecord>) {
        let now = self.now();
        let mut state = self.lock();
        for record in records {
            state.insert(Facts::Durable(record), now);
        }
        for record in &corrupt {
            if let Some(group) = &record.group {
                state.group(group);
            }
        }
        state.corrupt = corrupt;
        state.complete.records = true;
    }

    /// The provider ids that records reserve.
    pub fn reserved_ids(&self) -> Vec<String> {
        let state = self.lock();
        state.entries.values().filter_map(|entry| entry.instance().provider.reserved_id.clone()).collect()
    }

    /// Says what is asked of some groups. One that nobody asks for any more (`None`) becomes unknown: its
    /// instances live on.
    pub fn ask(&self, asked: BTreeMap<GroupRef, Option<Asked>>) {
        let now = self.now();
        let mut state = self.lock();
        let window = state.runaway_window;
        for (group, asked) in asked {
            let Some(asked) = asked else {
                state.unask(&group);
                continue;
            };
            let it = state.group(&group);
            if let Desired::Known(size) = asked.desired {
                it.sizes.retain(|(at, _)| now.since(*at) <= window);
                it.sizes.push_back((now, size));
            }
            it.desired = asked.desired;
            it.merged = asked.merged;
            it.infra_hash = asked.infra_hash;
            it.runtime_hash = asked.runtime_hash;
            it.victims = asked.victims;
            it.etag = asked.etag;
            it.blocks.remove(&BlockKind::InvalidRequest);
            if let Some(problem) = asked.problem {
                it.block(BlockKind::InvalidRequest, problem, now, None);
            }
            it.revision += 1;
            // Their agents are owed other files now; who is owed nothing looks and sleeps on.
            let living = it.living.clone();
            for entry in living.iter().filter_map(|id| state.entries.get(id)) {
                entry.delivery.wake();
            }
        }
        drop(state);
        self.asked.notify_one();
    }

    /// Resolves when something else was asked of a group since the last time. For one task.
    pub async fn asked_anew(&self) {
        self.asked.notified().await;
    }

    /// Another CA bundle is in force, which is among what instances are sent. Answers the groups that it changes.
    pub fn rehash(&self, ca_bundle: &str) -> Vec<GroupRef> {
        let mut state = self.lock();
        let mut changed = Vec::new();
        for (group, it) in &mut state.groups {
            let Some(merged) = &it.merged else { continue };
            let hash = merged.runtime_hash(Some(ca_bundle.as_bytes()));
            if hash != it.runtime_hash {
                it.runtime_hash = hash;
                it.revision += 1;
                changed.push(group.clone());
            }
        }
        changed
    }

    /// The whole of one group's answer to "is anything due by the clock?", besides the planner's own `wake_at`.
    pub fn next_look(&self, group: &GroupRef) -> Option<Timestamp> {
        let state = self.lock();
        let now = self.now();
        let living = &state.groups.get(group)?.living;
        let entries = || living.iter().filter_map(|id| state.entries.get(id));
        // What is due already was planned in this pass, or waits for something that wakes the worker.
        let balances = entries()
            .flat_map(|entry| entry.balancers.values())
            .filter_map(|known| known.next_attempt_at.filter(|at| now < *at));
        entries()
            .flat_map(|entry| [entry.describe.due, entry.next_health_change(&state, now)])
            .chain([state.brake_memory.next_change()])
            .flatten()
            .chain(balances)
            .min()
    }

    /// What time alone asks for in a group. Each is handed out once.
    pub fn take_due(&self, group: &GroupRef) -> Due {
        let (now, mono) = (self.now(), self.clock().monotonic());
        let mut state = self.lock();
        let (mut look, mut left) = (Vec::new(), Vec::new());
        for id in state.groups.get(group).map(|it| &it.living).into_iter().flatten() {
            let Some(entry) = state.entries.get(id) else { continue };
            if !entry.describe.in_flight && entry.wants_look(&state, now) {
                look.push(*id);
            }
            let is_lost = || matches!(entry.health(&state, now), Health::Lost { .. } | Health::Silent { .. });
            if entry.left() && is_lost() {
                left.push(*id);
            }
        }
        for id in &left {
            if let Some(entry) = state.entries.get_mut(id) {
                entry.link.lost_at_mono = Some(mono);
            }
        }
        let mut taken = |id: InstanceId| {
            let entry = state.entries.get_mut(&id)?;
            entry.describe.in_flight = true;
            entry.describe.due = None;
            Some(entry.vm_ref())
        };
        Due { look: look.into_iter().filter_map(&mut taken).collect(), left }
    }

    /// The groups that exist in any way: asked for, or named by a record or a VM.
    pub fn group_refs(&self) -> Vec<GroupRef> {
        self.lock().groups.keys().cloned().collect()
    }

    /// The subnets that groups may be made in.
    pub fn subnets(&self) -> BTreeSet<String> {
        let state = self.lock();
        state.groups.values().filter_map(|it| it.merged.as_ref()).flat_map(|merged| merged.subnets.clone()).collect()
    }

    pub fn group_of(&self, instance: InstanceId) -> Option<GroupRef> {
        self.lock().entries.get(&instance).map(|entry| entry.instance().group.clone())
    }

    /// An instance of this tenant; another tenant's answers like a missing one.
    pub fn instance(&self, tenant: &Tenant, instance: InstanceId) -> Option<Instance> {
        let state = self.lock();
        let entry = state.entries.get(&instance)?;
        (entry.instance().group.tenant == *tenant).then(|| entry.instance().clone())
    }
}

impl State {
    pub fn group(&mut self, group: &GroupRef) -> &mut GroupState {
        self.groups.entry(group.clone()).or_default()
    }

    /// The record of an instance that is there and does not parse: what it says of the instance is not known.
    pub fn unreadable(&self, id: InstanceId, tenant: &Tenant) -> Option<&CorruptRecord> {
        self.corrupt.iter().find(|record| record.instance == id && record.tenant == *tenant)
    }

    fn unask(&mut self, group: &GroupRef) {
        let Some(it) = self.groups.get_mut(group) else { return };
        if it.members.is_empty() && it.candidates.is_empty() {
            self.groups.remove(group);
            return;
        }
        it.desired = Desired::Unknown;
        it.merged = None;
        it.etag = String::new();
        it.revision += 1;
    }

    /// Takes in the facts of an intent that is not written yet and was made again, with a later creation time.
    pub fn restate_intent(&mut self, intent: Instance, now: Timestamp) {
        let Some(entry) = self.entries.get_mut(&intent.id) else { return };
        let (before, after) = (entry.instance().created_at, intent.created_at);
        let (group, managed) = (intent.group.clone(), intent.ownership == Ownership::Managed);
        entry.facts = Facts::Intent(intent);
        entry.fresh_from = now;
        let window = self.runaway_window;
        let it = self.group(&group);
        if managed {
            it.uncount(before);
            it.count(Some(after), window, now);
        }
        it.revision += 1;
    }

    /// Takes in facts of an instance nobody knew yet, or newer ones of one we know.
    pub fn insert(&mut self, facts: Facts, now: Timestamp) {
        let instance = facts.instance();
        let (id, group, created_at) = (instance.id, instance.group.clone(), instance.created_at);
        let managed = instance.ownership == Ownership::Managed;
        // What somebody asked for one by one is no sign of a loop that runs away, nor may it hold a group's own healing.
        let counts_as_create = managed && instance.create_failure.is_none();
        if let Some(request) = instance.request.as_ref().and_then(|it| it.request_id.clone()) {
            self.requests.entry((group.tenant.clone(), request)).or_insert(id);
        }
        let before = self.standing(id);
        let window = self.runaway_window;
        match self.entries.get_mut(&id) {
            Some(entry) => {
                let registers = entry.instance().registration.is_none() && facts.instance().registration.is_some();
                let confirms = entry.instance().provider.confirmed_at.is_none()
                    && facts.instance().provider.confirmed_at.is_some();
                entry.facts = facts;
                if registers || confirms {
                    entry.fresh_from = now;
                }
                // With the facts: whoever looks at them next must not judge it by the age of its VM.
                if registers {
                    entry.link.registered(now);
                }
                // Somebody spoke from the machine just now: whoever saw it gone looked before that.
                if registers && is_dead(entry.seen) {
                    entry.observe(Seen::Unknown, None, now);
                    entry.describe.due = Some(now);
                }
            }
            None => {
                let interval = self.health_check_interval;
                let entry = Entry::new(facts, interval, now);
                if entry.instance().registration.is_some() {
                    self.lost.insert(id);
                }
                self.entries.insert(id, Box::new(entry));
                self.group(&group).count(counts_as_create.then_some(created_at), window, now);
            }
        }
        // Whoever counts the lost need not pass by all that ever were.
        let is_over = self.entries.get(&id).is_some_and(|entry| entry.is_over());
        if is_over {
            self.lost.remove(&id);
        }
        let it = self.group(&group);
        it.members.insert(id);
        if is_over {
            it.living.remove(&id);
        } else {
            it.living.insert(id);
        }
        it.candidates.remove(&id);
        it.revision += 1;
        self.tell_change(id, before.as_ref());
    }

    pub fn remove(&mut self, instance: InstanceId) {
        if let Some(entry) = self.entries.remove(&instance) {
            entry.cut.cancel();
            self.tell_end(&entry);
            self.lost.remove(&instance);
            let group = entry.instance().group.clone();
            if let Some(request) = entry.instance().request.as_ref().and_then(|it| it.request_id.clone()) {
                let key = (group.tenant.clone(), request);
                if self.requests.get(&key) == Some(&instance) {
                    self.requests.remove(&key);
                }
            }
            let it = self.group(&group);
            it.members.remove(&instance);
            it.living.remove(&instance);
            it.revision += 1;
        }
    }

    /// Its record is gone from the store: nothing is left of it but that its id was used.
    pub fn purge(&mut self, instance: InstanceId) {
        self.remove(instance);
        if MAX_PURGED <= self.purged.len() {
            self.purged.pop_front();
        }
        self.purged.push_back(instance);
    }

    /// Notes what the provider showed of an instance. Answers the group to wake if that changed anything.
    pub fn observe(&mut self, instance: InstanceId, seen: Seen, vm: Option<&Vm>, now: Timestamp) -> Option<GroupRef> {
        let entry = self.entries.get_mut(&instance)?;
        let before = entry.seen;
        entry.observe(seen, vm, now);
        let group = entry.instance().group.clone();
        let lost = entry.link.lost_at_mono;
        let died = is_dead(seen) && !is_dead(before) && entry.is_member();
        if died && let Some(lost) = lost.or(entry.died_at_mono) {
            self.group(&group).losses.push_back(lost);
        }
        (before != seen).then(|| {
            self.group(&group).revision += 1;
            group
        })
    }
}

/// Proven or terminal states of a VM that no grace applies to.
pub fn is_dead(seen: Seen) -> bool {
    matches!(seen, Seen::Stopping | Seen::Stopped | Seen::Suspended | Seen::Deleting | Seen::Gone)
}

impl GroupState {
    /// Whether it cannot be made without this image.
    pub fn needs_image(&self, name: &str) -> bool {
        self.merged.as_ref().is_some_and(|merged| merged.images.contains(name))
    }

    /// Takes a create into the runaway window, and forgets those that have left it. They stand in order, so neither
    /// needs a walk: at a take-over thousands come one after another.
    fn count(&mut self, created_at: Option<Timestamp>, window: Duration, now: Timestamp) {
        while self.created.front().is_some_and(|at| window <= now.since(*at)) {
            self.created.pop_front();
        }
        if let Some(created_at) = created_at.filter(|at| now.since(*at) < window) {
            let place = self.created.partition_point(|at| *at <= created_at);
            self.created.insert(place, created_at);
        }
    }

    /// Takes a create out of the runaway window: it was refused, or never sent. Only what was accepted, or may have
    /// been, counts there.
    pub fn uncount(&mut self, created_at: Timestamp) {
        if let Some(at) = self.created.iter().position(|it| *it == created_at) {
            self.created.remove(at);
        }
    }

    /// Notes a reason not to create. The same one again only moves its end.
    pub fn block(&mut self, kind: BlockKind, message: impl Into<String>, now: Timestamp, until: Option<Timestamp>) {
        let block = self.blocks.entry(kind).or_insert_with(|| Block {
            message: String::new(),
            since: now,
            until: None,
            times: 0,
        });
        block.message = message.into();
        block.until = until;
        block.times += 1;
        self.revision += 1;
    }

    /// Notes until when a reason not to create is expected to last. Nothing was tried, so it does not count as having
    /// come again.
    pub fn wait(&mut self, kind: BlockKind, message: impl Into<String>, now: Timestamp, until: Timestamp) {
        let times = self.blocks.get(&kind).map_or(0, |block| block.times);
        self.block(kind, message, now, Some(until));
        if let Some(block) = self.blocks.get_mut(&kind) {
            block.times = times;
        }
    }

    /// Ends a block because a create was accepted: unless VMs that were accepted died before they registered. Then only a
    /// registration proves that the request works.
    pub fn unblock_after_accepted_create(&mut self, kind: BlockKind) {
        if !self.ended_early.contains(&kind) {
            self.unblock(kind);
        }
    }

    /// Notes that accepted creates come to nothing, for a reason that blocks creates in this way.
    pub fn note_ended_early(&mut self, kind: BlockKind) {
        self.ended_early.insert(kind);
    }

    /// A machine registered: whatever ended others before that is over.
    pub fn registered(&mut self) {
        self.never_registered_in_a_row = 0;
        self.unblock(BlockKind::BackingOff);
        for kind in std::mem::take(&mut self.ended_early) {
            self.unblock(kind);
        }
    }

    pub fn unblock(&mut self, kind: BlockKind) {
        if self.blocks.remove(&kind).is_some() {
            self.revision += 1;
        }
    }

    /// The blocks in force. One whose time is over no longer blocks, but its count stays until a success.
    pub fn active_blocks(&self, now: Timestamp) -> Vec<CreateBlock> {
        self.blocks
            .iter()
            .filter(|(_, block)| block.until.is_none_or(|until| now < until))
            .map(|(kind, block)| CreateBlock {
                kind: *kind,
                message: block.message.clone(),
                since: block.since,
                until: block.until,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runaway_window_is_in_order_however_creates_come_and_forgets_what_left_it() {
        let (at, window) = (Timestamp::from_millis, Duration::from_millis(100));
        let mut group = GroupState::default();
        for created in [50, 10, 90, 30, 30, 70] {
            group.count(Some(at(created)), window, at(100));
        }
        assert_eq!(group.created, [10, 30, 30, 50, 70, 90].map(at));
        // What is too old already never enters, and who comes without a create lets the others go all the same.
        group.count(Some(at(20)), window, at(130));
        assert_eq!(group.created, [50, 70, 90].map(at));
        group.count(None, window, at(180));
        assert_eq!(group.created, [90].map(at));
        group.uncount(at(90));
        assert!(group.created.is_empty());
    }
}
