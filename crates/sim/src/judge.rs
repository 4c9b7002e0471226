//! Who watches: every write that landed and every effect that began is held against the promises, and a note of each
//! is kept. The notes of a run are its trace; two runs of one seed have the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId},
    instance::{DrainReason, Instance, Ownership, Phase, Seen},
    time::Timestamp,
};
use nstance_store::records::{self, Meta, groups::GroupsFile, leader::LeaseRecord};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What was counted in a run, or in many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    pub steps: u64,
    pub created: u64,
    pub deleted: u64,
    pub registered: u64,
    pub drains: u64,
    pub terms: u64,
    pub crashes: u64,
    pub pauses: u64,
    pub store_faults: u64,
    pub provider_faults: u64,
    pub lost_answers: u64,
    pub kills: u64,
    pub partitions: u64,
    pub clock_jumps: u64,
    /// Leases under a new epoch.
    pub take_overs: u64,
    /// Leaders that were asked to stop.
    pub hand_overs: u64,
    pub virtual_seconds: u64,
}

impl Stats {
    pub fn add(&mut self, other: &Self) {
        let Self { steps, created, deleted, registered, drains, terms, crashes, pauses, .. } = other;
        self.steps += steps;
        self.created += created;
        self.deleted += deleted;
        self.registered += registered;
        self.drains += drains;
        self.terms += terms;
        self.crashes += crashes;
        self.pauses += pauses;
        self.store_faults += other.store_faults;
        self.provider_faults += other.provider_faults;
        self.lost_answers += other.lost_answers;
        self.kills += other.kills;
        self.partitions += other.partitions;
        self.clock_jumps += other.clock_jumps;
        self.take_overs += other.take_overs;
        self.hand_overs += other.hand_overs;
        self.virtual_seconds += other.virtual_seconds;
    }

    /// Everything that was done to the plane against its will.
    pub fn faults(&self) -> u64 {
        let servers = self.crashes + self.pauses + self.partitions + self.clock_jumps;
        servers + self.store_faults + self.provider_faults + self.lost_answers + self.kills
    }
}

pub(crate) struct Judge {
    start: tokio::time::Instant,
    state: Mutex<State>,
    /// The highest epoch whose lease has landed.
    leased: watch::Sender<Epoch>,
    /// Cancelled with the first broken promise: what happens after it proves nothing.
    pub(crate) broken: CancellationToken,
}

#[derive(Default)]
struct State {
    trace: Vec<String>,
    digest: DefaultHasher,
    violations: Vec<String>,
    stats: Stats,
    highest_epoch: Epoch,
    /// Of every version of the lease.
    write_ids: BTreeSet<String>,
    /// Until then two epochs may act: somebody meddled with the lease itself.
    excused: Option<tokio::time::Instant>,
    /// The latest landed version of each record, by key.
    records: BTreeMap<String, (Instance, Meta)>,
    /// Keys whose object was removed: their ids are used up.
    forgotten: BTreeSet<String>,
    keys: BTreeMap<InstanceId, String>,
}

/// The moment of an effect.
pub(crate) struct Scene {
    pub(crate) now: Timestamp,
    /// What the VM really is.
    pub(crate) seen: Option<Seen>,
    /// The group its tags name.
    pub(crate) group: Option<GroupRef>,
    /// Whether the group was asked to be deleted.
    pub(crate) group_deleted: bool,
    /// Whether a load balancer still sends it traffic, or lets old traffic end.
    pub(crate) balanced: bool,
}

impl Judge {
    pub(crate) fn new() -> Self {
        Self {
            start: tokio::time::Instant::now(),
            state: Mutex::default(),
            leased: watch::Sender::default(),
            broken: CancellationToken::new(),
        }
    }

    pub(crate) fn leases(&self) -> watch::Receiver<Epoch> {
        self.leased.subscribe()
    }

    /// Somebody meddles with the lease object: for this time nothing keeps a leader from believing its guard.
    pub(crate) fn excuse(&self, time: Duration) {
        self.state().excused = Some(tokio::time::Instant::now() + time);
    }

    fn is_excused(&self) -> bool {
        self.state().excused.is_some_and(|until| tokio::time::Instant::now() < until)
    }

    /// A version of the shard's lease as it landed. `open` tells whose guards are open at this moment.
    pub(crate) fn leased(&self, key: &str, body: &[u8], open: impl FnOnce() -> Vec<(usize, Epoch)>) {
        let Ok((lease, meta, _)) = records::decode::<LeaseRecord>(key, body) else {
            self.violate("lease", "the lease was written and cannot be read");
            return;
        };
        if !self.state().write_ids.insert(meta.write_id.clone()) {
            self.violate("lease", format!("two versions of the lease have the write id {}", meta.write_id));
        }
        let highest = *self.leased.borrow();
        if lease.epoch < highest && !self.is_excused() {
            self.violate("I10", format!("the lease falls from epoch {highest} to {}", lease.epoch));
        }
        if lease.released {
            self.note(format!("lease of epoch {} released by {}", lease.epoch, lease.holder));
        }
        if lease.epoch <= highest {
            return;
        }
        let reason = lease.previous.as_ref().map(|it| format!("{:?}", it.reason)).unwrap_or_default();
        self.note(format!("lease of epoch {} taken by {} ({reason})", lease.epoch, lease.holder));
        self.count(|stats| stats.take_overs += 1);
        for (n, epoch) in open() {
            if epoch < lease.epoch && !self.is_excused() {
                self.violate(
                    "one_guard_at_a_time",
                    format!("server {n} may act in epoch {epoch} while {} takes epoch {}", lease.holder, lease.epoch),
                );
            }
        }
        self.leased.send_replace(lease.epoch);
    }

    /// A record is sent to the bucket.
    pub(crate) fn sent(&self, key: &str, body: &[u8]) {
        let meta = if key.ends_with("groups.jsonc") {
            records::decode::<GroupsFile>(key, body).map(|(_, meta, _)| meta)
        } else {
            records::decode::<Instance>(key, body).map(|(_, meta, _)| meta)
        };
        match meta {
            Ok(meta) => self.acts("a write", key, meta.epoch),
            Err(_) => self.violate("record", format!("{key} is written and cannot be read")),
        }
    }

    /// Somebody acts under this epoch: no other has the lease by now.
    fn acts(&self, what: &str, on: &str, epoch: Epoch) {
        let leased = *self.leased.borrow();
        if epoch < leased && !self.is_excused() {
            let text = format!("{what} of {on} begins under epoch {epoch} while epoch {leased} has the lease");
            self.violate("no two epochs act", text);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, line: impl AsRef<str>) {
        let millis = self.start.elapsed().as_millis();
        let mut state = self.state();
        let mut text = String::with_capacity(line.as_ref().len() + 12);
        let _ = write!(text, "{:>7}.{:03} {}", millis / 1000, millis % 1000, line.as_ref());
        text.hash(&mut state.digest);
        state.trace.push(text);
    }

    pub(crate) fn violate(&self, promise: &str, what: impl AsRef<str>) {
        let text = format!("{promise}: {}", what.as_ref());
        self.note(format!("BROKEN {text}"));
        self.state().violations.push(text);
        self.broken.cancel();
    }

    pub(crate) fn count(&self, count: impl FnOnce(&mut Stats)) {
        count(&mut self.state().stats);
    }

    pub(crate) fn verdict(&self) -> (Vec<String>, Vec<String>, u64, Stats) {
        let mut state = self.state();
        state.stats.virtual_seconds = self.start.elapsed().as_secs();
        let State { trace, violations, digest, stats, .. } = &*state;
        (violations.clone(), trace.clone(), digest.finish(), *stats)
    }

    pub(crate) fn instance(&self, id: InstanceId) -> Option<Instance> {
        let state = self.state();
        state.records.get(state.keys.get(&id)?).map(|(instance, _)| instance.clone())
    }

    pub(crate) fn instances(&self) -> Vec<Instance> {
        self.state().records.values().map(|(instance, _)| instance.clone()).collect()
    }

    /// A record as it landed in the bucket.
    pub(crate) fn written(&self, key: &str, body: &[u8]) {
        let Ok((new, meta, _)) = records::decode::<Instance>(key, body) else {
            self.violate("record", format!("{key} was written and cannot be read"));
            return;
        };
        let before = {
            let mut state = self.state();
            state.keys.insert(new.id, key.to_owned());
            state.records.insert(key.to_owned(), (new.clone(), meta.clone()))
        };
        let why = match (&new.delete, new.open_drain()) {
            (Some(delete), _) => format!(" ({})", delete.reason),
            (None, Some(drain)) => format!(" ({})", drain.reason.as_str()),
            (None, None) => String::new(),
        };
        self.note(format!("record {} {}{why} epoch {}", new.id, new.phase().as_str(), meta.epoch));
        let Some((old, old_meta)) = before else {
            if self.state().forgotten.contains(key) {
                self.violate("I11", format!("{} is used again after its record was removed", new.id));
            }
            return;
        };
        if old.registration.is_none() && new.registration.is_some() {
            self.count(|stats| stats.registered += 1);
        }
        if old.open_drain().is_none() && new.open_drain().is_some() {
            self.count(|stats| stats.drains += 1);
        }
        if let Some(drain) = new.open_drain()
            && new.ownership == Ownership::OnDemand
            && !matches!(
                drain.reason,
                DrainReason::Requested | DrainReason::OndemandExpiry | DrainReason::SpotTerminating
            )
        {
            self.violate("I13", format!("{} is nobody's member and is drained for {}", new.id, drain.reason.as_str()));
        }
        if meta.epoch < old_meta.epoch {
            self.violate("I10", format!("epoch of {} falls from {} to {}", new.id, old_meta.epoch, meta.epoch));
        }
        if (&old.group, old.ownership, old.created_at) != (&new.group, new.ownership, new.created_at) {
            self.violate("record", format!("{} changed what it is", new.id));
        }
        let key_of = |it: &Instance| it.registration.as_ref().map(|it| it.public_key.clone());
        if old.registration.is_some() && key_of(&old) != key_of(&new) {
            self.violate("I11", format!("{} is bound to a second key", new.id));
        }
        if old.delete.is_some() && new.delete.is_none() {
            self.violate("record", format!("the deletion of {} was undone", new.id));
        }
        let gone = |it: &Instance| it.delete.as_ref().and_then(|delete| delete.gone_at);
        if gone(&old).is_some() && gone(&new) != gone(&old) {
            self.violate("record", format!("{} came back from the dead", new.id));
        }
        if let Some(drain) = old.open_drain() {
            match &new.drain {
                Some(it) if it.started_at == drain.started_at => {
                    if drain.deadline < it.deadline {
                        self.violate("drain", format!("the deadline of {} was put off", new.id));
                    }
                    if drain.acked_at.is_some() && it.acked_at.is_none() {
                        self.violate("drain", format!("the acknowledgement of {} was lost", new.id));
                    }
                }
                _ => self.violate("drain", format!("the drain of {} was replaced by another", new.id)),
            }
        }
    }

    /// A record object was removed.
    pub(crate) fn removed(&self, key: &str) {
        let removed = {
            let mut state = self.state();
            state.forgotten.insert(key.to_owned());
            state.records.remove(key)
        };
        let Some((instance, _)) = removed else { return };
        self.note(format!("record {} removed", instance.id));
        if !matches!(instance.phase(), Phase::Deleted | Phase::Failed) {
            let phase = instance.phase().as_str();
            self.violate("record", format!("the record of {} was removed while it is {phase}", instance.id));
        }
    }

    /// An effect begins under this epoch.
    pub(crate) fn effect(&self, op: &str, epoch: Epoch, instance: Option<InstanceId>) {
        let name = instance.map(|id| id.to_string()).unwrap_or_default();
        self.note(format!("{op} {name} epoch {epoch}"));
        let highest = {
            let mut state = self.state();
            let highest = state.highest_epoch;
            state.highest_epoch = highest.max(epoch);
            highest
        };
        self.acts(op, &name, epoch);
        if epoch < highest && !self.is_excused() {
            self.violate("I10", format!("{op} {name} begins under epoch {epoch} after epoch {highest} acted"));
        }
    }

    /// A VM is about to be deleted.
    pub(crate) fn deleting(&self, id: InstanceId, scene: &Scene) {
        let Some(record) = self.instance(id) else {
            if scene.seen == Some(Seen::Running) && !scene.group_deleted {
                let group = scene.group.as_ref().map(ToString::to_string).unwrap_or_default();
                self.violate("I5", format!("VM of {id} in {group} is deleted without a record of it"));
            }
            return;
        };
        if record.delete.is_none() {
            self.violate("I5", format!("VM of {id} is deleted before the record says so"));
        }
        if record.registration.is_none() || scene.seen != Some(Seen::Running) {
            return;
        }
        let Some(drain) = record.open_drain() else {
            self.violate("I5", format!("{id} was in use and is deleted without a drain"));
            return;
        };
        // By the clock of whoever decided it, or of whoever acts: the one need not be the other, nor their clocks alike.
        let decided = record.delete.as_ref().map(|delete| delete.requested_at);
        let over = drain.deadline <= scene.now || decided.is_some_and(|at| drain.deadline <= at);
        if drain.acked_at.is_none() && !over {
            self.violate("I5", format!("{id} is deleted before its drain was acknowledged or over"));
        }
        if scene.balanced && !over {
            self.violate("I18", format!("{id} is deleted while a load balancer still knows it"));
        }
    }
}
