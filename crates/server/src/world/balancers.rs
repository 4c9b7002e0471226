//! Which instance is in which load balancer, as far as we know: what we asked for, corrected by what the provider shows.
//!
//! Kept in memory only. A new leader rebuilds it from the balancers' own lists of members.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::{
    ids::{GroupRef, InstanceId, LbKey},
    instance::{LbState, Ownership, Phase},
    ports::provider::{LbMember, LbMemberState, VmRef},
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
    /// People were told that it is not served in time.
    overdue_told: bool,
    changed_at: Mono,
}

impl Balance {
    pub fn new(state: LbState, now: Mono) -> Self {
        Self { state, in_flight: false, attempts: 0, next_attempt_at: None, overdue_told: false, changed_at: now }
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
            (Way::Out, LbState::Registering | LbState::Coming | LbState::Registered | LbState::Deregistering) => {
                self.turn(LbState::Deregistering, mono);
            }
            _ => return false,
        }
        let starts = !self.in_flight && self.next_attempt_at.is_none_or(|at| at <= now);
        self.in_flight |= starts;
        starts
    }

    /// Registers again what was registered and is not served yet. Answers whether the call may start now.
    pub fn set_out_again(&mut self) -> bool {
        let starts = self.state == LbState::Coming && !self.in_flight;
        self.in_flight |= starts;
        starts
    }

    /// A call in this direction succeeded. Answers whether that was still the way to go.
    pub fn arrive(&mut self, way: Way, now: Mono) -> bool {
        self.in_flight = false;
        match (way, self.state) {
            (Way::In, LbState::Registering | LbState::Coming) => self.turn(LbState::Coming, now),
            (Way::Out, LbState::Deregistering) => self.turn(LbState::DrainingOut, now),
            _ => return false,
        }
        true
    }
}

/// What a member list makes of a state. It never reverses a deregistration.
fn corrected(state: LbState, member: Option<LbMemberState>) -> LbState {
    use LbMemberState::{Coming, Draining, In};
    match (state, member) {
        (LbState::Absent | LbState::Registering | LbState::Coming | LbState::Registered, Some(In)) => {
            LbState::Registered
        }
        (LbState::Absent | LbState::Coming, Some(Coming)) => LbState::Coming,
        // It may be in some of its target groups only, until the call that registers it succeeds.
        (LbState::Registering, Some(Coming)) => LbState::Registering,
        // A failing health check of the load balancer takes no capacity away: it would empty an overloaded group.
        (LbState::Registered, Some(Coming)) => LbState::Registered,
        // Registered again behind our back: deregister again.
        (LbState::Deregistering | LbState::DrainingOut, Some(In | Coming)) => LbState::Deregistering,
        (_, Some(Draining)) => LbState::DrainingOut,
        // Removed behind our back: register again.
        (LbState::Absent | LbState::Coming | LbState::Registered | LbState::DrainingOut, None) => LbState::Absent,
        // Not in all of its target groups, but maybe in some: only a call that succeeds ends this.
        (LbState::Registering | LbState::Deregistering, None) => state,
    }
}

/// What a member list changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MembersShown {
    /// To be planned again.
    pub groups: BTreeSet<GroupRef>,
    /// Registered by us, and served from now on.
    pub served: Vec<(GroupRef, InstanceId)>,
}

impl State {
    /// Takes in the members of a load balancer, or that they could not be learned.
    pub fn show_members(
        &mut self,
        lb: &LbKey,
        members: Option<&[LbMember]>,
        asked_at: Mono,
        now: Mono,
    ) -> MembersShown {
        let states: Option<BTreeMap<InstanceId, LbMemberState>> =
            members.map(|members| members.iter().map(|member| (member.vm.instance, member.state)).collect());
        let mut shown = MembersShown::default();
        for (id, entry) in &mut self.entries {
            let it = entry.facts.instance();
            let member = states.as_ref().and_then(|states| states.get(id)).copied();
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
                if matches!(known.state, LbState::Registering | LbState::Coming) && state == LbState::Registered {
                    shown.served.push((it.group.clone(), *id));
                }
                known.turn(state, now);
                shown.groups.insert(it.group.clone());
            }
        }
        for group in &shown.groups {
            self.group(group).revision += 1;
        }
        shown
    }

    /// Whether only the provider can say when an instance is in the load balancer, or out of it.
    pub fn any_in_transition(&self, lb: &LbKey) -> bool {
        let is_in_transition = |known: &Balance| matches!(known.state, LbState::Coming | LbState::DrainingOut);
        self.entries.values().any(|entry| entry.balancers.get(lb).is_some_and(is_in_transition))
    }

    /// Instances that were registered at the load balancer longer ago than `timeout` and are not served yet; each is
    /// told once.
    pub fn newly_overdue(&mut self, lb: &LbKey, timeout: Duration, now: Timestamp) -> Vec<(GroupRef, InstanceId)> {
        let mut overdue = Vec::new();
        for (id, entry) in &mut self.entries {
            let it = entry.facts.instance();
            let since = it.registration.as_ref().map_or(it.created_at, |registration| registration.at);
            let Some(known) = entry.balancers.get_mut(lb) else { continue };
            if known.state == LbState::Coming && !known.overdue_told && since.plus(timeout) <= now {
                known.overdue_told = true;
                overdue.push((it.group.clone(), *id));
            }
        }
        overdue
    }

    /// Sets out to register again all that are registered and not served yet.
    pub fn set_out_again(&mut self, lb: &LbKey) -> Vec<(GroupRef, VmRef)> {
        let mut again = Vec::new();
        for entry in self.entries.values_mut() {
            let vm = entry.vm_ref();
            let group = entry.facts.instance().group.clone();
            if entry.balancers.get_mut(lb).is_some_and(Balance::set_out_again) {
                again.push((group, vm));
            }
        }
        again
    }
}

fn is_listed(group: Option<&super::GroupState>, lb: &LbKey) -> bool {
    group.and_then(|it| it.merged.as_ref()).is_some_and(|merged| merged.load_balancers.contains(lb))
}

#[cfg(test)]
mod tests {
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
        assert_eq!(corrected(it.state, Some(LbMemberState::In)), LbState::Deregistering);
        assert_eq!(corrected(it.state, Some(LbMemberState::Coming)), LbState::Deregistering);
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
        assert_eq!(corrected(LbState::Registered, Some(LbMemberState::Draining)), LbState::DrainingOut);
    }

    #[test]
    fn a_member_is_registered_only_once_its_balancer_serves_it_and_stays_so_while_a_check_fails() {
        let mut it = balance(LbState::Absent);
        assert!(it.set_out(Way::In, T0, Mono::default()));
        assert!(it.arrive(Way::In, Mono::default()));
        assert_eq!(it.state, LbState::Coming);
        assert!(!it.set_out(Way::In, T0, Mono::default()), "the planner has nothing to do for it");
        assert!(it.set_out_again(), "with each listing it is registered again");
        assert!(!it.set_out_again(), "one call at a time");
        assert_eq!(corrected(LbState::Coming, Some(LbMemberState::Coming)), LbState::Coming);
        assert_eq!(corrected(LbState::Coming, Some(LbMemberState::In)), LbState::Registered);
        assert_eq!(corrected(LbState::Coming, None), LbState::Absent);
        assert_eq!(corrected(LbState::Registered, Some(LbMemberState::Coming)), LbState::Registered);
    }
}
