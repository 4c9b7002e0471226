//! From memory to the planner's snapshot: pure reading, no decision.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::{
    group::Desired,
    ids::{GroupRef, InstanceId},
    instance::{Drain, Health, Ownership},
    snapshot::{Candidate, CreateWindow, DrainView, GroupView, InstanceView, ShardView, Snapshot},
    time::Timestamp,
};

use super::{Entry, GroupState, State, World};

/// How long a new leader waits for acknowledgements of drains it inherited, from the opening of its ports on.
const FAILOVER_ALLOWANCE: Duration = Duration::from_secs(10);

impl World {
    /// The snapshot of one group for its worker, or of the whole shard.
    pub fn snapshot(&self, only: Option<&GroupRef>) -> (Snapshot, Timestamp) {
        let now = self.now();
        let mut state = self.lock();
        let concerned: Vec<GroupRef> = match only {
            Some(group) => vec![group.clone()],
            None => state.groups.keys().cloned().collect(),
        };
        for group in &concerned {
            state.remember_failures(group, now);
        }
        (state.view(concerned, now, |it| &it.members), now)
    }

    /// The snapshot of one group for somebody in a hurry: without those who are over, and with failures as they were
    /// known at the last whole one. It says the same of members that are missing, and too little of rotations.
    pub fn glance(&self, group: &GroupRef) -> (Snapshot, Timestamp) {
        let now = self.now();
        (self.lock().view(vec![group.clone()], now, |it| &it.living), now)
    }
}

impl State {
    fn view(
        &mut self,
        concerned: Vec<GroupRef>,
        now: Timestamp,
        whom: impl Fn(&GroupState) -> &BTreeSet<InstanceId>,
    ) -> Snapshot {
        let brake = self.brake(&concerned, now);
        let view = |group: GroupRef| {
            let it = self.groups.get(&group)?;
            let view = group_view(self, &group, it, whom(it), now);
            Some((group, view))
        };
        let groups = concerned.into_iter().filter_map(view).collect();
        let shard = ShardView {
            complete: self.complete,
            provider: self.provider.clone(),
            brake,
            settings: self.settings.clone(),
        };
        Snapshot { shard, groups }
    }
}

fn group_view(
    state: &State,
    group: &GroupRef,
    it: &GroupState,
    whom: &BTreeSet<InstanceId>,
    now: Timestamp,
) -> GroupView {
    // Not collected: that would fill one large piece of memory first, and have it grow, under the lock.
    let mut instances = BTreeMap::new();
    for id in whom {
        if let Some(entry) = state.entries.get(id) {
            instances.insert(*id, instance_view(state, entry, now));
        }
    }
    let block_of_images = it.merged.as_ref().and_then(|merged| state.images.block(&merged.images));
    GroupView {
        desired: it.desired,
        infra_hash: it.infra_hash.clone(),
        drain_timeout: it.merged.as_ref().map_or(state.default_drain_timeout, |merged| merged.drain_timeout),
        load_balancers: it.merged.as_ref().map(|merged| merged.load_balancers.clone()).unwrap_or_default(),
        rollout_paused: it.merged.as_ref().is_some_and(|merged| merged.rollout_paused),
        victims: it.victims.clone(),
        create_blocks: it.active_blocks(now).into_iter().chain(block_of_images).collect(),
        failures: it.failures.view(),
        window: window(state, it, now),
        instances,
        candidates: it
            .candidates
            .values()
            .map(|vm| Candidate {
                vm: vm.vm.clone(),
                seen: vm.seen,
                ownership: match vm.tags.complete() {
                    Some(tags) if tags.on_demand => Ownership::OnDemand,
                    _ => Ownership::Managed,
                },
                created_at: vm.created_at,
            })
            .collect(),
        corrupt: state
            .corrupt
            .iter()
            .filter(|record| record.group.as_ref() == Some(group))
            .map(|record| record.key.clone())
            .collect(),
        mass_removal: state.mass_removal.get(group).copied(),
    }
}

fn window(state: &State, it: &GroupState, now: Timestamp) -> CreateWindow {
    let begin = now.minus(state.runaway_window);
    let inside: Vec<Timestamp> = it.created.iter().copied().filter(|at| begin < *at).collect();
    let current = match it.desired {
        Desired::Known(size) => size,
        Desired::Tombstoned | Desired::Unknown => 0,
    };
    CreateWindow {
        n_creates: u32::try_from(inside.len()).unwrap_or(u32::MAX),
        largest_size: it
            .sizes
            .iter()
            .filter(|(at, _)| begin < *at)
            .map(|(_, size)| *size)
            .chain([current])
            .max()
            .unwrap_or(current),
        frees_at: inside.first().map(|at| at.plus(state.runaway_window)),
    }
}

/// A drain that began before this term gets a moment more: an acknowledgement may be on its way to the new leader. But
/// not beyond the end that its machine was told, which no patience of ours puts off.
fn delete_at(state: &State, drain: &Drain, health: Health) -> Timestamp {
    let patient = allowed(state, drain);
    match health {
        Health::Terminating { deadline: Some(deadline), .. } => patient.min(deadline.max(drain.deadline)),
        _ => patient,
    }
}

fn allowed(state: &State, drain: &Drain) -> Timestamp {
    match state.agents_since {
        Some(since) if drain.started_at < since && drain.acked_at.is_none() && drain.started_at < drain.deadline => {
            drain.deadline.max(since.plus(FAILOVER_ALLOWANCE))
        }
        _ => drain.deadline,
    }
}

fn instance_view(state: &State, entry: &Entry, now: Timestamp) -> InstanceView {
    let instance = entry.instance();
    let health = entry.health(state, now);
    InstanceView {
        ownership: instance.ownership,
        phase: instance.phase(),
        reason: instance.reason,
        created_at: instance.created_at,
        timers_from: instance.timers_from(),
        adopted: instance.adopted_at.is_some(),
        confirmed: instance.provider.confirmed_at.is_some(),
        registered_at: instance.registration.as_ref().map(|registration| registration.at),
        infra_hash: instance.infra_hash.clone(),
        seen: entry.seen,
        seen_since: entry.seen_since,
        health,
        reported: entry.link.reported,
        drain: instance.open_drain().map(|drain| DrainView {
            reason: drain.reason,
            started_at: drain.started_at,
            delete_at: delete_at(state, drain, health),
            acked: drain.acked_at.is_some(),
        }),
        delete_requested_at: instance.delete.as_ref().map(|delete| delete.requested_at),
        // What ended before this term ended by another clock: how long ago is not known, so it counts from the term.
        delete_gone_at: instance.delete.as_ref().and_then(|delete| delete.gone_at).map(|at| at.max(state.began)),
        create_failed_at: instance.create_failure.as_ref().map(|failure| failure.at.max(state.began)),
        replace_marked_at: instance.replace.as_ref().map(|mark| mark.at),
        advised_at: entry
            .link
            .notice
            .as_ref()
            .filter(|notice| matches!(notice.action.as_str(), "rebalance" | "maintenance"))
            .map(|notice| notice.at),
        load_balancers: entry.balancers.iter().map(|(lb, known)| (lb.clone(), known.state)).collect(),
        busy: entry.busy,
        next_attempt_at: entry.next_attempt_at,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nstance_core::ports::provider::ErrorClass;
    use nstance_rt::clock::SystemClock;

    use super::{
        super::{
            Facts,
            failures::tests::{deleted, made, refused},
        },
        *,
    };
    use crate::term_clock::TermClock;

    #[test]
    fn a_glance_leaves_out_who_is_over_and_nobody_else() {
        let example = include_str!("../../../../examples/config-tmux.jsonc");
        let config =
            nstance_config::load("example", example.as_bytes(), &nstance_config::Checks::offline(nstance_schemas::ALL));
        let world = World::new(TermClock::start(Arc::new(SystemClock)), &config.config.unwrap().server);
        let (pending, leaving) = (made(1), made(2));
        let group = pending.group.clone();
        let now = world.now();
        for instance in [pending.clone(), leaving.clone(), refused(3, ErrorClass::Quota), made(4)] {
            world.lock().insert(Facts::Intent(instance), now);
        }
        let ids = |(snapshot, _): (Snapshot, Timestamp)| snapshot.groups[&group].instances.len();
        assert_eq!((ids(world.glance(&group)), ids(world.snapshot(Some(&group)))), (3, 4));
        world.lock().insert(Facts::Intent(deleted(leaving.clone(), "requested", 5)), now);
        assert_eq!((ids(world.glance(&group)), ids(world.snapshot(Some(&group)))), (2, 4));
        world.lock().remove(pending.id);
        world.lock().remove(leaving.id);
        assert_eq!((ids(world.glance(&group)), ids(world.snapshot(Some(&group)))), (1, 2));
        let unknown = GroupRef::new("default".parse().unwrap(), "none".parse().unwrap());
        assert!(world.glance(&unknown).0.groups.is_empty());
    }
}
