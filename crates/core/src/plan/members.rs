//! Who is what: the standing of every instance of a group, and the counts that follow from it.
//!
//! A member fills a slot of its group. Unknown is not absence: a member whose VM could not be looked at keeps its slot
//! and is nobody's victim. An instance that drains is never a member, so a drain cannot look like surplus.

use std::time::Duration;

use super::draft::Urgency;
use crate::{
    group::Desired,
    ids::{GroupRef, InstanceId, LbKey},
    instance::{HOST_GRACE, Health, LbState, Ownership, Phase, Seen},
    snapshot::{Busy, Candidate, GroupView, InstanceView, ShardView},
    time::Timestamp,
};

/// Shorter losses are reconnects, not illness.
const LOST_IS_UNHEALTHY_AFTER: Duration = Duration::from_secs(10);

/// One group, the facts of its shard, and the moment of planning.
#[derive(Clone, Copy)]
pub(crate) struct Scene<'a> {
    pub(crate) shard: &'a ShardView,
    pub(crate) group: &'a GroupRef,
    pub(crate) view: &'a GroupView,
    pub(crate) now: Timestamp,
}

/// What an instance is to its group now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// A member, and the provider (or our own create in flight) says so.
    Known,
    /// A member of which nobody knows enough to decide anything.
    Uncertain,
    /// Its VM is proved not to run.
    Dead,
    /// Its VM runs, its agent does not speak, and the brake does not hold it.
    Silent,
    /// Its VM is about to be taken away.
    Noticed,
    Draining,
    Deleting,
    Deleted,
    Failed,
}

impl Standing {
    pub(crate) fn is_member(self) -> bool {
        matches!(self, Self::Known | Self::Uncertain)
    }
}

impl Scene<'_> {
    pub(crate) fn is_complete(&self) -> bool {
        self.shard.complete.is_complete()
    }

    pub(crate) fn is_past(&self, at: Timestamp) -> bool {
        at <= self.now
    }

    /// Whether the next try of what failed last may start.
    pub(crate) fn is_due(&self, it: &InstanceView) -> bool {
        it.next_attempt_at.is_none_or(|at| self.is_past(at))
    }

    /// Stays a member though silent: too many were lost at once for all of them to be ill.
    pub(crate) fn is_held(&self, id: InstanceId) -> bool {
        self.shard.brake.held.contains(&id) && !self.shard.brake.released.contains(&id)
    }

    pub(crate) fn is_dead(&self, it: &InstanceView) -> bool {
        match it.seen {
            Seen::Stopping | Seen::Stopped | Seen::Suspended | Seen::Deleting | Seen::Gone => true,
            // A host in trouble may take its VM down with it or not: only both witnesses together are believed.
            Seen::Repairing | Seen::HostDown => host_is_given_up_at(it).is_some_and(|at| self.is_past(at)),
            Seen::NotAsked | Seen::Unknown | Seen::Pending | Seen::Running => false,
        }
    }

    pub(crate) fn standing(&self, id: InstanceId, it: &InstanceView) -> Standing {
        match it.phase {
            Phase::Failed => return Standing::Failed,
            Phase::Draining => return Standing::Draining,
            Phase::Deleting => return Standing::Deleting,
            Phase::Deleted => return Standing::Deleted,
            Phase::Pending | Phase::Provisioning | Phase::Running => {}
        }
        if self.is_dead(it) {
            return Standing::Dead;
        }
        match it.health {
            Health::Terminating { .. } => Standing::Noticed,
            Health::Silent { .. } if it.seen == Seen::Running && !self.is_held(id) => Standing::Silent,
            _ if matches!(it.seen, Seen::Pending | Seen::Running) => Standing::Known,
            _ if it.phase == Phase::Pending && it.busy == Some(Busy::Creating) => Standing::Known,
            _ => Standing::Uncertain,
        }
    }

    /// Running, heard of, and in every load balancer of its group.
    pub(crate) fn is_ready(&self, it: &InstanceView) -> bool {
        it.phase == Phase::Running && it.reported && self.view.load_balancers.iter().all(|lb| self.is_serving(it, lb))
    }

    /// Whether its load balancer sends it traffic. A health check that has passed for no member of the group until the
    /// registration timeout distinguishes nothing, and is not waited for.
    pub(crate) fn is_serving(&self, it: &InstanceView, lb: &LbKey) -> bool {
        match it.load_balancers.get(lb) {
            Some(LbState::Registered) => true,
            Some(LbState::Coming) => {
                self.coming_is_overdue_at(it).is_some_and(|at| at <= self.now)
                    && !self.view.instances.values().any(|it| it.load_balancers.get(lb) == Some(&LbState::Registered))
            }
            _ => false,
        }
    }

    /// When a load balancer has had enough time to serve the instance.
    pub(crate) fn coming_is_overdue_at(&self, it: &InstanceView) -> Option<Timestamp> {
        let timeout = self.shard.settings.registration_timeout;
        (!timeout.is_zero()).then(|| it.registered_at.unwrap_or(it.created_at).plus(timeout))
    }

    /// Another hash than the group's. A record without one tells nothing, and must not rotate a fleet after a rebuild.
    pub(crate) fn is_drifted(&self, it: &InstanceView) -> bool {
        !it.infra_hash.is_empty() && !self.view.infra_hash.is_empty() && it.infra_hash != self.view.infra_hash
    }

    pub(crate) fn is_unhealthy(&self, it: &InstanceView) -> bool {
        match it.health {
            Health::Silent { .. } => true,
            Health::Lost { since } => self.is_past(since.plus(LOST_IS_UNHEALTHY_AFTER)),
            Health::Starting | Health::Healthy | Health::Terminating { .. } => false,
        }
    }

    /// When it counts as never registered. One that was adopted may have been in use: it counts as lost instead.
    pub(crate) fn registration_ends(&self, it: &InstanceView) -> Option<Timestamp> {
        let timeout = self.shard.settings.registration_timeout;
        let waits = matches!(it.phase, Phase::Pending | Phase::Provisioning) && !may_be_in_use(it);
        (waits && !timeout.is_zero()).then(|| it.timers_from.plus(timeout))
    }

    pub(crate) fn reaches_age(&self, it: &InstanceView, age: Duration) -> Option<Timestamp> {
        (!age.is_zero()).then(|| it.created_at.plus(age))
    }
}

/// Registered once, or found running by its tags: a drain must come before its end.
pub(crate) fn may_be_in_use(it: &InstanceView) -> bool {
    it.registered_at.is_some() || it.adopted || it.phase == Phase::Running
}

/// When a VM on a host in trouble counts as dead, if its agent is lost too.
pub(crate) fn host_is_given_up_at(it: &InstanceView) -> Option<Timestamp> {
    let in_trouble = matches!(it.seen, Seen::Repairing | Seen::HostDown);
    let lost = matches!(it.health, Health::Lost { .. } | Health::Silent { .. });
    it.seen_since.filter(|_| in_trouble && lost).map(|since| since.plus(HOST_GRACE))
}

/// A VM without a record that may be a member. Dead ones are not, and nobody counts what is asked for one by one.
pub(crate) fn candidate_counts(candidate: &Candidate) -> bool {
    candidate.ownership == Ownership::Managed && !candidate_is_dead(candidate)
}

pub(crate) fn candidate_is_dead(candidate: &Candidate) -> bool {
    // There is no agent to ask, so a host in trouble proves nothing.
    matches!(candidate.seen, Seen::Stopping | Seen::Stopped | Seen::Suspended | Seen::Deleting | Seen::Gone)
}

#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    pub(crate) id: InstanceId,
    pub(crate) it: &'a InstanceView,
    pub(crate) standing: Standing,
}

/// The managed instances of one group, and which of them this plan already sends away.
pub(crate) struct Crew<'a> {
    /// By id, as the snapshot holds them.
    entries: Vec<Entry<'a>>,
    /// Whether the entry at this place leaves.
    leaving: Vec<bool>,
    /// Of those leaving, who keeps its slot in this plan: nobody is made in its place yet.
    n_lingering: u32,
    /// Slots that this plan empties on purpose, to be filled as urgently as they were emptied.
    pub(super) vacated: Vec<Urgency>,
    /// Corrupt records and VMs without a record: members nobody may touch.
    n_unnamed: u32,
}

impl<'a> Crew<'a> {
    pub(crate) fn of(scene: Scene<'a>) -> Self {
        let entries: Vec<_> = scene
            .view
            .instances
            .iter()
            .filter(|(_, it)| it.ownership == Ownership::Managed)
            .map(|(id, it)| Entry { id: *id, it, standing: scene.standing(*id, it) })
            .collect();
        let n_candidates = scene.view.candidates.iter().filter(|candidate| candidate_counts(candidate)).count();
        Self {
            leaving: vec![false; entries.len()],
            entries,
            n_lingering: 0,
            vacated: Vec::new(),
            n_unnamed: count(scene.view.corrupt.len() + n_candidates),
        }
    }

    pub(crate) fn with(&self, standing: Standing) -> impl Iterator<Item = Entry<'a>> + '_ {
        self.entries.iter().copied().filter(move |entry| entry.standing == standing)
    }

    /// Members that stay, as far as this plan has decided yet.
    pub(crate) fn members(&self) -> impl Iterator<Item = Entry<'a>> + '_ {
        let staying = self.entries.iter().zip(&self.leaving).filter(|(_, leaves)| !**leaves);
        staying.map(|(entry, _)| *entry).filter(|entry| entry.standing.is_member())
    }

    pub(crate) fn known(&self) -> impl Iterator<Item = Entry<'a>> + '_ {
        self.members().filter(|entry| entry.standing == Standing::Known)
    }

    pub(crate) fn leave(&mut self, id: InstanceId) {
        if let Ok(place) = self.entries.binary_search_by_key(&id, |entry| entry.id) {
            self.leaving[place] = true;
        }
    }

    /// It will leave, but its slot is not free yet.
    pub(crate) fn linger(&mut self, id: InstanceId) {
        self.leave(id);
        self.n_lingering += 1;
    }

    pub(crate) fn n_lingering(&self) -> u32 {
        self.n_lingering
    }

    /// Slots that are filled as far as growth is concerned.
    pub(crate) fn n_filled(&self) -> u32 {
        self.n_members() + self.n_lingering
    }

    pub(crate) fn n_known(&self) -> u32 {
        count(self.known().count())
    }

    pub(crate) fn n_uncertain(&self) -> u32 {
        count(self.members().filter(|entry| entry.standing == Standing::Uncertain).count()) + self.n_unnamed
    }

    pub(crate) fn n_members(&self) -> u32 {
        self.n_known() + self.n_uncertain()
    }
}

pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The sizes of a group as its status shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Members, the uncertain ones included.
    pub actual: u32,
    pub uncertain: u32,
    pub ready: u32,
    pub registered: u32,
    /// Pending and provisioning.
    pub pending: u32,
    /// Draining and deleting.
    pub draining: u32,
    /// Dead, silent, or lost for more than ten seconds.
    pub unhealthy: u32,
    /// Of the group's present infra hash, and ready.
    pub updated: u32,
    /// Members of another infra hash.
    pub drifted: u32,
}

/// Who counts towards the group's size, by the rules the planner goes by.
pub fn members(shard: &ShardView, group: &GroupRef, view: &GroupView, now: Timestamp) -> Vec<InstanceId> {
    Crew::of(Scene { shard, group, view, now }).members().map(|entry| entry.id).collect()
}

/// Counts the managed instances of one group by the rules the planner goes by.
pub fn counts(shard: &ShardView, group: &GroupRef, view: &GroupView, now: Timestamp) -> Counts {
    let scene = Scene { shard, group, view, now };
    let crew = Crew::of(scene);
    let mut counts = Counts { actual: crew.n_members(), uncertain: crew.n_uncertain(), ..Counts::default() };
    for Entry { it, standing, .. } in &crew.entries {
        let ready = standing.is_member() && scene.is_ready(it);
        counts.ready += u32::from(ready);
        counts.updated += u32::from(ready && !scene.is_drifted(it));
        counts.drifted += u32::from(standing.is_member() && scene.is_drifted(it));
        counts.registered += u32::from(standing.is_member() && it.registered_at.is_some());
        counts.pending += u32::from(standing.is_member() && it.phase != Phase::Running);
        counts.draining += u32::from(matches!(standing, Standing::Draining | Standing::Deleting));
        counts.unhealthy += u32::from(match standing {
            Standing::Dead | Standing::Silent => true,
            Standing::Known | Standing::Uncertain => scene.is_unhealthy(it),
            _ => false,
        });
    }
    counts
}

/// How many members the group shall have; none while nobody knows.
pub(crate) fn wanted(view: &GroupView) -> Option<u32> {
    match view.desired {
        Desired::Known(size) => Some(size),
        Desired::Tombstoned => Some(0),
        Desired::Unknown => None,
    }
}
