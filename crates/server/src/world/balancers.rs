//! Which instance is in which load balancer, as far as we know: what we asked for, corrected by what the provider shows.
//!
//! Kept in memory only. A new leader rebuilds it from the balancers' own lists of members.

use std::collections::{BTreeMap, BTreeSet};

use nstance_core::{
    ids::{GroupRef, InstanceId, LbKey},
    instance::{LbState, Ownership, Phase},
    ports::provider::LbMember,
    time::{Mono, Timestamp},
};

use super::State;

/// The way an instance goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    In,
    Out,
}

/// One instance at one load balancer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Balance {
    pub state: LbState,
    pub in_flight: bool,
    pub attempts: u32,
    pub next_attempt_at: Option<Timestamp>,
    changed_at: Mono,
}

impl Balance {
    pub fn new(state: LbState, now: Mono) -> Self {
        Self { state, in_flight: false, attempts: 0, next_attempt_at: None, changed_at: now }
    }

    pub fn turn(&mut self, state: LbState, now: Mono) {
        if self.state != state {
            *self = Self { in_flight: self.in_flight, ..Self::new(state, now) };
        }
    }

    /// Sets out on a way. Answers whether the call may start now: the way must be open, no call under way, and the wait
    /// after a failed one over. A turn to the way out is noted even if its call has to wait for another to end.
    pub fn set_out(&mut self, way: Way, now: Timestamp, mono: Mono) -> bool {
        match (way, self.state) {
            (Way::In, LbState::Absent | LbState::Registering) => self.turn(LbState::Registering, mono),
            (Way::Out, LbState::Registering | LbState::Registered | LbState::Deregistering) => {
                self.turn(LbState::Deregistering, mono);
            }
            _ => return false,
        }
        let starts = !self.in_flight && self.next_attempt_at.is_none_or(|at| at <= now);
        self.in_flight |= starts;
        starts
    }

    /// A call in this direction succeeded. Answers whether that was still the way to go.
    pub fn arrive(&mut self, way: Way, now: Mono) -> bool {
        self.in_flight = false;
        match (way, self.state) {
            (Way::In, LbState::Registering) => self.turn(LbState::Registered, now),
            (Way::Out, LbState::Deregistering) => self.turn(LbState::DrainingOut, now),
            _ => return false,
        }
        true
    }
}

/// What a member list makes of a state. It never makes one turn back who is on the way out.
fn corrected(state: LbState, member: Option<LbMember>) -> LbState {
    match (state, member) {
        (LbState::Absent | LbState::Registering | LbState::Registered, Some(LbMember::In)) => LbState::Registered,
        // Back in, by somebody else's hand: out again.
        (LbState::Deregistering | LbState::DrainingOut, Some(LbMember::In)) => LbState::Deregistering,
        (_, Some(LbMember::Draining)) => LbState::DrainingOut,
        (LbState::Absent | LbState::Registered | LbState::DrainingOut, None) => LbState::Absent,
        // Not in all of its target groups, but maybe in some: only a call that succeeded ends this.
        (LbState::Registering | LbState::Deregistering, None) => state,
    }
}

impl State {
    /// Takes in the members of a load balancer, or that they could not be learned. Answers the groups this changed.
    pub fn show_members(
        &mut self,
        lb: &LbKey,
        members: Option<&BTreeMap<InstanceId, LbMember>>,
        asked_at: Mono,
        now: Mono,
    ) -> BTreeSet<GroupRef> {
        let mut changed = BTreeSet::new();
        for (id, entry) in &mut self.entries {
            let it = entry.facts.instance();
            let member = members.and_then(|members| members.get(id)).copied();
            let state = match entry.balancers.get(lb) {
                // What was learned, or begun, after the question is newer than its answer.
                Some(known) if known.in_flight || asked_at < known.changed_at || members.is_none() => continue,
                Some(known) => corrected(known.state, member),
                None if member.is_some() => corrected(LbState::Absent, member),
                // An earlier leader may have begun to take it out. Once more does no harm, and is the only way to know.
                None if matches!(it.phase(), Phase::Draining | Phase::Deleting)
                    && it.ownership == Ownership::Managed
                    && it.registration.is_some()
                    && is_listed(self.groups.get(&it.group), lb) =>
                {
                    LbState::Deregistering
                }
                // Nobody can say whether it is in: an earlier leader may have put it there. Asking for it once more does
                // no harm, and whoever wants it out knows that it may be in.
                None if members.is_none()
                    && it.phase() == Phase::Running
                    && it.ownership == Ownership::Managed
                    && is_listed(self.groups.get(&it.group), lb) =>
                {
                    LbState::Registering
                }
                None => continue,
            };
            let known = entry.balancers.entry(lb.clone()).or_insert_with(|| Balance::new(LbState::Absent, now));
            if known.state != state {
                known.turn(state, now);
                changed.insert(it.group.clone());
            }
        }
        for group in &changed {
            self.group(group).revision += 1;
        }
        changed
    }

    /// Whether somebody is on its way out of the balancer, and only the provider can say when it is out.
    pub fn anybody_drains_out(&self, lb: &LbKey) -> bool {
        self.entries
            .values()
            .any(|entry| entry.balancers.get(lb).is_some_and(|known| known.state == LbState::DrainingOut))
    }
}

fn is_listed(group: Option<&super::GroupState>, lb: &LbKey) -> bool {
    group.and_then(|it| it.merged.as_ref()).is_some_and(|merged| merged.load_balancers.contains(lb))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const T0: Timestamp = Timestamp::EPOCH;

    fn balance(state: LbState) -> Balance {
        Balance::new(state, Mono::default())
    }

    #[test]
    fn a_failed_deregistration_is_only_ever_retried_as_one() {
        let mut it = balance(LbState::Registered);
        assert!(it.set_out(Way::Out, T0, Mono::default()));
        (it.in_flight, it.attempts, it.next_attempt_at) = (false, 1, Some(T0.plus(Duration::from_secs(1))));
        assert!(!it.set_out(Way::In, T0.plus(Duration::from_secs(9)), Mono::default()));
        assert!(!it.set_out(Way::Out, T0, Mono::default()), "its wait is not over");
        assert!(it.set_out(Way::Out, T0.plus(Duration::from_secs(1)), Mono::default()));
        assert_eq!(corrected(it.state, Some(LbMember::In)), LbState::Deregistering);
        assert_eq!(corrected(it.state, None), LbState::Deregistering);
    }

    #[test]
    fn a_registration_that_is_overtaken_does_not_count() {
        let mut it = balance(LbState::Absent);
        assert!(it.set_out(Way::In, T0, Mono::default()));
        assert!(!it.set_out(Way::Out, T0, Mono::default()), "one call at a time");
        assert!(!it.arrive(Way::In, Mono::default()));
        assert_eq!(it.state, LbState::Deregistering);
        assert!(it.set_out(Way::Out, T0, Mono::default()));
        assert!(it.arrive(Way::Out, Mono::default()));
        assert_eq!(it.state, LbState::DrainingOut);
        assert_eq!(corrected(it.state, None), LbState::Absent);
    }

    #[test]
    fn a_member_somebody_removed_is_missed() {
        assert_eq!(corrected(LbState::Registered, None), LbState::Absent);
        assert_eq!(corrected(LbState::Registering, None), LbState::Registering);
        assert_eq!(corrected(LbState::Registered, Some(LbMember::Draining)), LbState::DrainingOut);
    }
}
