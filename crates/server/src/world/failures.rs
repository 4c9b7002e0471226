//! What became of the newest instances of a group, as far as its rotations must know: how many of the wanted infra hash
//! failed in a row, and when the next try is due.
//!
//! Read from the records each time, so a new leader knows it too. Records end with their retention, and the longest
//! waits are longer than that: within a term what was counted is remembered until a success, or another hash.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::{
    budget::ROLLOUT_FAILS_AFTER,
    ids::{GroupRef, InstanceId},
    instance::{CreateReason, DrainReason, Instance, Ownership},
    ports::provider::ErrorClass,
    snapshot::{BlockKind, Failures},
    time::Timestamp,
};

use super::State;

/// One that ends ill so soon after its registration never was of use.
const EARLY: Duration = Duration::from_secs(300);

/// A refusal for lack of capacity goes on to the next choice of subnet and type within this; all of them are one try.
const ROUND: Duration = Duration::from_secs(10);

/// More failures than this change no wait any more.
const REMEMBERED: usize = 16;

const MINUTE: Duration = Duration::from_secs(60);

/// Failures in a row of one infra hash, with when each was known.
#[derive(Debug, Default)]
pub struct FailureMemory {
    infra_hash: String,
    rollout: BTreeMap<InstanceId, Timestamp>,
    replacement: BTreeMap<InstanceId, Timestamp>,
}

/// What an instance proves about the template it was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Good,
    Failed {
        at: Timestamp,
        fault: Fault,
    },
    /// Not known yet, or it says nothing.
    Open,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Of the instance, or of a request that can never succeed: the template is to blame.
    Template,
    /// The account's limit is reached.
    Quota,
    /// The provider had no room at this choice.
    Capacity,
}

/// One instance and what only memory knows of it.
struct Attempt<'a> {
    instance: &'a Instance,
    /// A report came in this term.
    reported: bool,
    /// A member was drained because this one stood ready.
    relieved: bool,
}

impl Attempt<'_> {
    fn outcome(&self, now: Timestamp) -> Outcome {
        let it = self.instance;
        if let Some(failure) = &it.create_failure {
            // One that the provider did not even consider was not tried.
            return fault_of(&failure.class).map_or(Outcome::Open, |fault| Outcome::Failed { at: failure.at, fault });
        }
        let Some(registration) = &it.registration else {
            let ended = it.delete.as_ref().filter(|delete| is_ill(&delete.reason));
            return ended
                .map_or(Outcome::Open, |delete| Outcome::Failed { at: delete.requested_at, fault: Fault::Template });
        };
        if self.relieved {
            return Outcome::Good;
        }
        // Whether it was ever ready no record says. One that was made to relieve another and died before it could is a
        // failure whatever it reported; of the others a report counts.
        let silent = it.open_drain().filter(|drain| drain.reason == DrainReason::Unhealthy);
        let ended = it.delete.as_ref().filter(|delete| is_ill(&delete.reason)).map(|delete| delete.requested_at);
        let ended = silent.map(|drain| drain.started_at).or(ended);
        match ended {
            Some(at)
                if at.since(registration.at) < EARLY && (it.reason == CreateReason::Rotation || !self.reported) =>
            {
                Outcome::Failed { at, fault: Fault::Template }
            }
            Some(_) => Outcome::Good,
            None if self.reported || it.drain.is_some() || EARLY <= now.since(registration.at) => Outcome::Good,
            None => Outcome::Open,
        }
    }
}

/// Ends that nobody chose.
fn is_ill(reason: &str) -> bool {
    matches!(reason, "dead" | "never-registered" | "unresolved" | "unhealthy")
}

fn fault_of(class: &str) -> Option<Fault> {
    let is = |it: ErrorClass| it.as_str() == class;
    if is(ErrorClass::Capacity) {
        Some(Fault::Capacity)
    } else if is(ErrorClass::Quota) {
        Some(Fault::Quota)
    } else {
        (is(ErrorClass::Invalid) || is(ErrorClass::NotFound)).then_some(Fault::Template)
    }
}

impl FailureMemory {
    /// Takes in the attempts at one infra hash, oldest first.
    fn take_in(&mut self, infra_hash: &str, attempts: &[Attempt<'_>], no_choice_is_left: bool, now: Timestamp) {
        if self.infra_hash != infra_hash {
            *self = Self { infra_hash: infra_hash.to_owned(), ..Self::default() };
        }
        for (n, attempt) in attempts.iter().enumerate() {
            let id = attempt.instance.id;
            let (at, fault) = match attempt.outcome(now) {
                Outcome::Open => continue,
                Outcome::Good => {
                    self.rollout.retain(|it, _| id < *it);
                    self.replacement.retain(|it, _| id < *it);
                    continue;
                }
                Outcome::Failed { at, fault } => (at, fault),
            };
            if fault == Fault::Template {
                self.rollout.insert(id, at);
            }
            // While a round over all choices goes on, it has not failed.
            let goes_on = match attempts.get(n + 1) {
                Some(next) => next.instance.created_at.since(at) < ROUND,
                None => !no_choice_is_left,
            };
            let is_over = fault != Fault::Capacity || !goes_on;
            if attempt.instance.reason == CreateReason::Rotation && is_over {
                self.replacement.insert(id, at);
            }
        }
        for failed in [&mut self.rollout, &mut self.replacement] {
            while REMEMBERED < failed.len() {
                failed.pop_first();
            }
        }
    }

    pub fn view(&self) -> Failures {
        let count = |failed: &BTreeMap<InstanceId, Timestamp>| u32::try_from(failed.len()).unwrap_or(u32::MAX);
        let last = |failed: &BTreeMap<InstanceId, Timestamp>| failed.values().copied().max();
        let (n_rollout, n_replacement) = (count(&self.rollout), count(&self.replacement));
        Failures {
            rollout_in_a_row: n_rollout,
            rollout_probe_at: n_rollout
                .checked_sub(ROLLOUT_FAILS_AFTER)
                .and_then(|n| Some(last(&self.rollout)?.plus(doubling(10 * MINUTE, n, 60 * MINUTE)))),
            replacement_in_a_row: n_replacement,
            replacement_retry_at: n_replacement
                .checked_sub(1)
                .and_then(|n| Some(last(&self.replacement)?.plus(doubling(MINUTE, n, 30 * MINUTE)))),
        }
    }
}

fn doubling(first: Duration, n: u32, longest: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(n)).min(longest)
}

impl State {
    /// Brings the memory of one group up to date.
    pub(super) fn remember_failures(&mut self, group: &GroupRef, now: Timestamp) {
        let Some(it) = self.groups.get_mut(group).filter(|it| !it.infra_hash.is_empty()) else { return };
        let mut memory = std::mem::take(&mut it.failures);
        let it = &*it;
        let no_choice_is_left =
            it.blocks.get(&BlockKind::NoCapacity).is_some_and(|block| block.until.is_none_or(|until| now < until));
        // In the order of time, as ids are.
        let entries: Vec<_> = it.members.iter().filter_map(|id| self.entries.get(id)).collect();
        let relieving: BTreeSet<InstanceId> =
            entries.iter().filter_map(|entry| entry.instance().drain.as_ref()?.replacement).collect();
        let attempts: Vec<Attempt<'_>> = entries
            .iter()
            .filter(|entry| {
                let instance = entry.instance();
                instance.ownership == Ownership::Managed
                    && instance.adopted_at.is_none()
                    && instance.infra_hash == it.infra_hash
            })
            .map(|entry| {
                let instance = entry.instance();
                Attempt { instance, reported: entry.link.reported, relieved: relieving.contains(&instance.id) }
            })
            .collect();
        memory.take_in(&it.infra_hash, &attempts, no_choice_is_left, now);
        self.group(group).failures = memory;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use nstance_core::{
        ids::{Epoch, uuid_v7},
        instance::{Addresses, CreateFailure, Delete, Drain, NonceFact, ProviderFact, Registration},
    };

    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::EPOCH.plus(Duration::from_secs(seconds))
    }

    fn id(seconds: u64) -> InstanceId {
        InstanceId::new("knc".parse().unwrap(), uuid_v7(at(seconds), [0; 10]))
    }

    /// Made for a rotation, nothing heard of it yet.
    pub(in crate::world) fn made(seconds: u64) -> Instance {
        Instance {
            id: id(seconds),
            group: GroupRef::new("default".parse().unwrap(), "web".parse().unwrap()),
            cluster: "demo".parse().unwrap(),
            shard: "s1".parse().unwrap(),
            epoch: Epoch(1),
            intent_epoch: Epoch(1),
            ownership: Ownership::Managed,
            created_at: at(seconds),
            reason: CreateReason::Rotation,
            request: None,
            arch: "amd64".to_owned(),
            template: "knc".to_owned(),
            infra_hash: "new".to_owned(),
            runtime_hash: String::new(),
            config_etag: String::new(),
            instance_type: None,
            subnet: "a".to_owned(),
            image: None,
            nonce: NonceFact { jti: String::new(), expires_at: at(seconds), used_at: None },
            provider: ProviderFact::default(),
            create_failure: None,
            registration: None,
            cert: None,
            rejoin: None,
            replace: None,
            drain: None,
            delete: None,
            adopted_at: None,
        }
    }

    pub(in crate::world) fn refused(seconds: u64, class: ErrorClass) -> Instance {
        let failure = CreateFailure { at: at(seconds), class: class.as_str().to_owned(), message: String::new() };
        Instance { create_failure: Some(failure), ..made(seconds) }
    }

    pub(in crate::world) fn deleted(it: Instance, reason: &str, seconds: u64) -> Instance {
        let delete = Delete {
            reason: reason.to_owned(),
            by: String::new(),
            requested_at: at(seconds),
            gone_at: Some(at(seconds)),
        };
        Instance { delete: Some(delete), ..it }
    }

    fn never_registered(seconds: u64) -> Instance {
        deleted(made(seconds), "never-registered", seconds)
    }

    fn registered(seconds: u64) -> Instance {
        let registration = Registration {
            at: at(seconds),
            public_key: Vec::new(),
            addresses: Addresses::default(),
            agent_version: String::new(),
        };
        Instance { registration: Some(registration), ..made(seconds) }
    }

    fn of(memory: &mut FailureMemory, hash: &str, instances: &[(Instance, bool)], no_choice_is_left: bool) -> Failures {
        let attempts: Vec<_> = instances
            .iter()
            .map(|(instance, reported)| Attempt { instance, reported: *reported, relieved: false })
            .collect();
        memory.take_in(hash, &attempts, no_choice_is_left, at(100_000));
        memory.view()
    }

    fn fresh(instances: &[Instance]) -> Failures {
        let instances: Vec<_> = instances.iter().map(|it| (it.clone(), false)).collect();
        of(&mut FailureMemory::default(), "new", &instances, true)
    }

    fn minutes(n: u64) -> u64 {
        n * 60
    }

    #[test]
    fn the_waits_of_a_failing_rollout_grow_from_ten_minutes_to_sixty() {
        let failed: Vec<_> = (1..=8).map(never_registered).collect();
        let probe_at = |n: usize| fresh(&failed[..n]).rollout_probe_at;
        assert_eq!((probe_at(0), probe_at(2)), (None, None));
        for (n, wait) in [(3, 10), (4, 20), (5, 40), (6, 60), (7, 60)] {
            assert_eq!(probe_at(n), Some(at(u64::try_from(n).unwrap() + minutes(wait))), "after {n}");
            assert_eq!(fresh(&failed[..n]).rollout_in_a_row, u32::try_from(n).unwrap());
        }
    }

    #[test]
    fn the_waits_for_the_next_replacement_grow_from_one_minute_to_thirty() {
        let failed: Vec<_> = (1..=8).map(never_registered).collect();
        for (n, wait) in [(1, 1), (2, 2), (3, 4), (5, 16), (6, 30), (8, 30)] {
            let failures = fresh(&failed[..n]);
            assert_eq!(failures.replacement_retry_at, Some(at(u64::try_from(n).unwrap() + minutes(wait))), "after {n}");
            assert_eq!(failures.replacement_in_a_row, u32::try_from(n).unwrap());
        }
    }

    #[test]
    fn a_success_ends_the_row() {
        let row = [never_registered(1), never_registered(2), registered(3), never_registered(4)];
        let failures = fresh(&row);
        assert_eq!((failures.rollout_in_a_row, failures.replacement_in_a_row), (1, 1));
        assert_eq!(fresh(&row[..3]), Failures::default());
    }

    #[test]
    fn one_that_is_under_way_decides_nothing() {
        let row = [never_registered(1), made(2)];
        assert_eq!(fresh(&row).rollout_in_a_row, 1);
    }

    #[test]
    fn another_hash_begins_anew() {
        let mut memory = FailureMemory::default();
        let row = [(never_registered(1), false), (never_registered(2), false)];
        assert_eq!(of(&mut memory, "new", &row, true).rollout_in_a_row, 2);
        assert_eq!(of(&mut memory, "newer", &[], true), Failures::default());
    }

    #[test]
    fn what_its_records_forgot_is_still_counted_in_the_term() {
        let mut memory = FailureMemory::default();
        let row: Vec<_> = (1..=4).map(|n| (never_registered(n), false)).collect();
        of(&mut memory, "new", &row, true);
        let failures = of(&mut memory, "new", &row[3..], true);
        assert_eq!((failures.rollout_in_a_row, failures.rollout_probe_at), (4, Some(at(4 + minutes(20)))));
        let good = [(registered(5), true)];
        assert_eq!(of(&mut memory, "new", &good, true), Failures::default());
    }

    #[test]
    fn a_provider_that_does_not_serve_says_nothing_of_the_template() {
        let row =
            [refused(1, ErrorClass::Throttled), refused(2, ErrorClass::Unavailable), refused(3, ErrorClass::Auth)];
        assert_eq!(fresh(&row), Failures::default());
        let failures = fresh(&[refused(1, ErrorClass::Quota)]);
        assert_eq!((failures.rollout_in_a_row, failures.replacement_in_a_row), (0, 1));
        let failures = fresh(&[refused(1, ErrorClass::Invalid)]);
        assert_eq!((failures.rollout_in_a_row, failures.replacement_in_a_row), (1, 1));
    }

    #[test]
    fn a_round_over_all_choices_is_one_failure() {
        let full = |seconds| (refused(seconds, ErrorClass::Capacity), false);
        let round = [full(1), full(2), full(3)];
        let mut memory = FailureMemory::default();
        let failures = of(&mut memory, "new", &round, false);
        assert_eq!(failures, Failures::default(), "another choice is left");
        let failures = of(&mut memory, "new", &round, true);
        assert_eq!((failures.replacement_in_a_row, failures.replacement_retry_at), (1, Some(at(3 + 60))));
        let two = [full(1), full(2), full(63), full(64)];
        assert_eq!(of(&mut FailureMemory::default(), "new", &two, true).replacement_in_a_row, 2);
    }

    #[test]
    fn a_replacement_that_dies_before_it_relieved_anybody_failed() {
        let died = deleted(registered(1), "dead", 100);
        let mut memory = FailureMemory::default();
        assert_eq!(of(&mut memory, "new", &[(died.clone(), true)], true).replacement_in_a_row, 1);
        let relieved = [Attempt { instance: &died, reported: true, relieved: true }];
        memory.take_in("new", &relieved, true, at(200));
        assert_eq!(memory.view(), Failures::default());
        let late = deleted(registered(1), "dead", 1 + minutes(5));
        assert_eq!(of(&mut FailureMemory::default(), "new", &[(late, false)], true), Failures::default());
    }

    #[test]
    fn one_that_reported_and_was_lost_is_no_failure_of_its_template() {
        let unhealthy = Drain {
            reason: DrainReason::Unhealthy,
            started_at: at(50),
            deadline: at(60),
            replacement: None,
            acked_at: None,
            acked_by: None,
            cancelled_at: None,
        };
        let grown = Instance { reason: CreateReason::ScaleUp, drain: Some(unhealthy), ..registered(1) };
        let mut memory = FailureMemory::default();
        assert_eq!(of(&mut memory, "new", &[(grown.clone(), true)], true), Failures::default());
        let failures = of(&mut memory, "new", &[(grown, false)], true);
        assert_eq!((failures.rollout_in_a_row, failures.replacement_in_a_row), (1, 0));
    }
}
