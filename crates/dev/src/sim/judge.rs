//! Who watches: every write that landed and every effect that began is held against the promises, and a note of each
//! is kept. The notes of a run are its trace; two runs of one seed have the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::{Mutex, MutexGuard, PoisonError},
};

use nstance_core::{
    ids::{Epoch, GroupRef, InstanceId},
    instance::{DrainReason, Instance, Ownership, Phase, Seen},
    time::Timestamp,
};
use nstance_store::records::{self, Meta};
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
        self.virtual_seconds += other.virtual_seconds;
    }

    /// Everything that was done to the plane against its will.
    pub fn faults(&self) -> u64 {
        self.crashes + self.pauses + self.store_faults + self.provider_faults + self.lost_answers + self.kills
    }
}

pub(crate) struct Judge {
    start: tokio::time::Instant,
    state: Mutex<State>,
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
        Self { start: tokio::time::Instant::now(), state: Mutex::default(), broken: CancellationToken::new() }
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
        if epoch < highest {
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
        let over = drain.deadline <= scene.now;
        if drain.acked_at.is_none() && !over {
            self.violate("I5", format!("{id} is deleted before its drain was acknowledged or over"));
        }
        if scene.balanced && !over {
            self.violate("I18", format!("{id} is deleted while a load balancer still knows it"));
        }
    }
}
