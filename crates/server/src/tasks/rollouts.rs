//! Tells how a rollout goes: its start, every step, that it keeps failing, its end.
//!
//! What is told follows from what there is, compared with the last look. A new leader's first look is compared with
//! nothing: of a rollout that it finds under way it tells the steps from there on, and nothing a second time.

use nstance_core::{
    budget::ROLLOUT_FAILS_AFTER,
    group::Desired,
    ids::GroupRef,
    plan::{Counts, counts},
    snapshot::{GroupView, Snapshot},
    time::Timestamp,
};

use crate::{
    events::{Reason, Tell},
    term::Term,
};

/// What was told last.
#[derive(Debug, Default)]
pub struct RolloutMemory {
    looked: bool,
    target: String,
    n_left: u32,
    running: bool,
    failing: bool,
}

/// One look at a group.
#[derive(Debug, Clone, Copy)]
struct Sight<'a> {
    target: &'a str,
    size: u32,
    /// Members of another hash.
    n_left: u32,
    /// Members of the target that are ready.
    n_updated: u32,
    /// There is, or was, an instance of the target.
    begun: bool,
    n_failures: u32,
}

impl<'a> Sight<'a> {
    fn of(view: &'a GroupView, counts: Counts, size: u32) -> Self {
        Self {
            target: &view.infra_hash,
            size,
            n_left: counts.drifted,
            n_updated: counts.updated,
            begun: view.instances.values().any(|it| it.infra_hash == view.infra_hash),
            n_failures: view.failures.rollout_in_a_row,
        }
    }
}

impl RolloutMemory {
    /// What there is to tell since the last look.
    fn look(&mut self, sight: Sight<'_>) -> Vec<(Reason, String)> {
        let Sight { target, size, n_left, n_updated, begun, n_failures } = sight;
        let first = !std::mem::replace(&mut self.looked, true);
        let is_new = self.target != target;
        let failing = 0 < n_left && ROLLOUT_FAILS_AFTER <= n_failures;
        let progress = || format!("{} of {size} updated", size.saturating_sub(n_left));
        let mut told = Vec::new();
        if 0 < n_left && (!self.running || is_new) {
            if !(first && begun) {
                told.push((Reason::RolloutStarted, format!("{n_left} of {size} are of another infra hash")));
            }
            self.running = true;
            self.failing = first && failing;
        } else if self.running && n_left < self.n_left {
            told.push((Reason::RolloutProgressed, progress()));
        }
        if failing && !self.failing {
            let message = format!("{n_failures} instances in a row failed or never became ready; {}", progress());
            told.push((Reason::RolloutFailing, message));
        }
        self.failing = failing;
        if self.running && n_left == 0 && size <= n_updated {
            told.push((Reason::RolloutFinished, progress()));
            self.running = false;
        }
        self.n_left = n_left;
        target.clone_into(&mut self.target);
        told
    }
}

/// Looks at a group, with the snapshot its worker has just planned from.
pub fn tell(term: &Term, group: &GroupRef, snapshot: &Snapshot, now: Timestamp) {
    let Some(view) = snapshot.groups.get(group) else { return };
    let Desired::Known(size) = view.desired else { return };
    // From a part of the picture, members that are not seen yet would look like steps.
    if !snapshot.shard.complete.is_complete() {
        return;
    }
    let sight = Sight::of(view, counts(&snapshot.shard, group, view, now), size);
    let told = { term.world.lock().group(group).rollout.look(sight) };
    for (reason, message) in told {
        term.tell(Tell::group(reason, group, message).detail("target_hash", sight.target));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(n_left: u32, n_updated: u32) -> Sight<'static> {
        Sight { target: "new", size: 3, n_left, n_updated, begun: 0 < n_updated, n_failures: 0 }
    }

    fn reasons(memory: &mut RolloutMemory, sight: Sight<'_>) -> Vec<Reason> {
        memory.look(sight).into_iter().map(|(reason, _)| reason).collect()
    }

    fn settled() -> RolloutMemory {
        let mut memory = RolloutMemory::default();
        assert!(memory.look(Sight { target: "old", ..sight(0, 3) }).is_empty());
        memory
    }

    #[test]
    fn a_rollout_is_told_from_start_to_end() {
        let mut memory = settled();
        assert_eq!(reasons(&mut memory, sight(3, 0)), [Reason::RolloutStarted]);
        assert_eq!(reasons(&mut memory, sight(3, 1)), []);
        assert_eq!(reasons(&mut memory, sight(2, 1)), [Reason::RolloutProgressed]);
        assert_eq!(reasons(&mut memory, sight(1, 2)), [Reason::RolloutProgressed]);
        assert_eq!(reasons(&mut memory, sight(0, 3)), [Reason::RolloutProgressed, Reason::RolloutFinished]);
        assert_eq!(reasons(&mut memory, sight(0, 3)), []);
        // An instance that comes back from a loss is no rollout.
        assert_eq!(reasons(&mut memory, sight(0, 2)), []);
        assert_eq!(reasons(&mut memory, sight(0, 3)), []);
    }

    #[test]
    fn a_new_leader_tells_nothing_a_second_time() {
        let mut memory = RolloutMemory::default();
        assert_eq!(reasons(&mut memory, Sight { n_failures: 3, begun: true, ..sight(2, 0) }), []);
        assert_eq!(reasons(&mut memory, Sight { n_failures: 4, begun: true, ..sight(2, 0) }), []);
        assert_eq!(reasons(&mut memory, sight(1, 2)), [Reason::RolloutProgressed]);
        let mut memory = RolloutMemory::default();
        assert_eq!(reasons(&mut memory, sight(0, 0)), [], "nor that it ended before");
    }

    #[test]
    fn a_change_that_nobody_led_is_told_by_the_next_leader() {
        let mut memory = RolloutMemory::default();
        assert_eq!(reasons(&mut memory, sight(3, 0)), [Reason::RolloutStarted]);
    }

    #[test]
    fn failing_is_told_once_and_again_after_another_target() {
        let mut memory = settled();
        let failing = |n_failures| Sight { n_failures, ..sight(3, 0) };
        memory.look(failing(0));
        assert_eq!(reasons(&mut memory, failing(2)), []);
        assert_eq!(reasons(&mut memory, failing(3)), [Reason::RolloutFailing]);
        assert_eq!(reasons(&mut memory, failing(4)), []);
        let other = |n_failures| Sight { target: "newer", ..failing(n_failures) };
        assert_eq!(reasons(&mut memory, other(0)), [Reason::RolloutStarted]);
        assert_eq!(reasons(&mut memory, other(3)), [Reason::RolloutFailing]);
    }
}
