//! How long to wait before the next connection. Pure, so that its rules can be read and tested as numbers.

use std::time::Duration;

use nstance_core::{ports::clock::Entropy, time::Mono};
use nstance_rt::{backoff::Backoff, entropy::jitter};

const BASE: Duration = Duration::from_millis(200);

/// While the loss is fresh, a follower is probably taking over: look often.
const EAGER_CAP: Duration = Duration::from_secs(5);
const EAGER_FOR: Duration = Duration::from_secs(120);
const PATIENT_CAP: Duration = Duration::from_secs(15);

/// A connection that served this long was a good one, and the next loss is a new one.
const GOOD_AFTER: Duration = Duration::from_secs(30);

/// The server said goodbye: its successor is there already, but the fleet should not arrive in one instant.
const HAND_OVER: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct Reconnect {
    backoff: Backoff,
    patient_cap: Duration,
    without_session_since: Mono,
}

impl Reconnect {
    pub(crate) fn new(now: Mono) -> Self {
        Self::with_cap(now, PATIENT_CAP)
    }

    pub(crate) fn with_cap(now: Mono, patient_cap: Duration) -> Self {
        Self { backoff: Backoff::new(BASE, EAGER_CAP), patient_cap, without_session_since: now }
    }

    /// A connection ended after it served for `how_long`.
    pub(crate) fn served(&mut self, how_long: Duration, now: Mono) {
        self.without_session_since = now;
        if GOOD_AFTER <= how_long {
            self.backoff.reset();
        }
    }

    /// The wait after a failure; a bound that the server told replaces ours.
    pub(crate) fn failed(&mut self, told: Option<Duration>, now: Mono, entropy: &dyn Entropy) -> Duration {
        let eager = now.since(self.without_session_since) < EAGER_FOR;
        self.backoff.set_cap(if eager { EAGER_CAP } else { self.patient_cap });
        let ours = self.backoff.next(entropy);
        told.map_or(ours, |bound| jitter(entropy, bound))
    }

    /// The wait after the server handed over.
    pub(crate) fn handed_over(&mut self, told: Option<Duration>, entropy: &dyn Entropy) -> Duration {
        self.backoff.reset();
        jitter(entropy, told.unwrap_or(HAND_OVER))
    }
}

/// About `period`: ten per cent more or less.
pub(crate) fn about(period: Duration, entropy: &dyn Entropy) -> Duration {
    period * 9 / 10 + jitter(entropy, period / 5)
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn at(seconds: u64) -> Mono {
        Mono::from_start(Duration::from_secs(seconds))
    }

    /// The longest of many waits drawn for one step.
    fn longest(step: impl Fn(&mut Reconnect, &dyn Entropy) -> Duration, prepare: impl Fn(&mut Reconnect)) -> Duration {
        (0..400)
            .map(|seed| {
                let mut reconnect = Reconnect::new(at(0));
                prepare(&mut reconnect);
                step(&mut reconnect, &SeededEntropy::new(seed))
            })
            .max()
            .unwrap()
    }

    fn fail(n: u32) -> impl Fn(&mut Reconnect) {
        move |reconnect| {
            for _ in 0..n {
                reconnect.failed(None, at(0), &SeededEntropy::new(0));
            }
        }
    }

    fn close(actual: Duration, bound_ms: u64) -> bool {
        let bound = Duration::from_millis(bound_ms);
        actual < bound && bound * 9 / 10 < actual
    }

    #[test]
    fn waits_grow_eagerly_then_patiently() {
        assert!(close(longest(|it, dice| it.failed(None, at(0), dice), |_| ()), 200));
        assert!(close(longest(|it, dice| it.failed(None, at(0), dice), fail(3)), 1600));
        assert!(close(longest(|it, dice| it.failed(None, at(119), dice), fail(20)), 5000));
        assert!(close(longest(|it, dice| it.failed(None, at(120), dice), fail(20)), 15_000));
    }

    #[test]
    fn good_connection_starts_the_count_anew_and_a_short_one_does_not() {
        let after = |seconds| {
            longest(
                |it, dice| it.failed(None, at(500), dice),
                move |it| {
                    fail(20)(it);
                    it.served(Duration::from_secs(seconds), at(500));
                },
            )
        };
        assert!(close(after(30), 200));
        assert!(close(after(29), 5000));
    }

    #[test]
    fn server_that_tells_a_bound_is_obeyed() {
        let told = Some(Duration::from_secs(40));
        assert!(close(longest(|it, dice| it.failed(told, at(0), dice), |_| ()), 40_000));
    }

    #[test]
    fn hand_over_is_followed_within_half_a_second() {
        assert!(close(longest(|it, dice| it.handed_over(None, dice), fail(20)), 500));
        let then = |it: &mut Reconnect| {
            fail(20)(it);
            it.handed_over(None, &SeededEntropy::new(1));
        };
        assert!(close(longest(|it, dice| it.failed(None, at(0), dice), then), 200));
    }

    /// How many of a thousand agents arrive at most in a tenth of a second, if all of them lose their server at one
    /// moment and there is one again after `away`.
    fn busiest_tenth(away: Duration) -> u32 {
        let mut tenths = std::collections::BTreeMap::new();
        for seed in 0..1000 {
            let dice = SeededEntropy::new(seed * 7919);
            let mut reconnect = Reconnect::new(at(0));
            let mut now = Duration::ZERO;
            while now < away || now.is_zero() {
                now += reconnect.failed(None, Mono::from_start(now), &dice);
            }
            *tenths.entry(now.as_millis() / 100).or_insert(0_u32) += 1;
        }
        tenths.into_values().max().unwrap_or(0)
    }

    #[test]
    fn fleet_that_lost_its_server_at_one_moment_comes_back_spread() {
        for seconds in [2, 3, 5, 10, 30, 60, 300] {
            let most = busiest_tenth(Duration::from_secs(seconds));
            assert!(most <= 100, "{most} of 1000 in one tenth of a second after {seconds} s");
        }
    }

    #[test]
    fn fleet_that_is_handed_over_with_a_bound_comes_back_spread() {
        // What a server with a thousand agents tells.
        let told = Some(Duration::from_millis(1500));
        for wait in
            [Reconnect::handed_over, |it: &mut Reconnect, told, dice: &dyn Entropy| it.failed(told, at(0), dice)]
        {
            let mut tenths = [0_u32; 15];
            for seed in 0..1000 {
                let wait = wait(&mut Reconnect::new(at(0)), told, &SeededEntropy::new(seed * 7919));
                tenths[usize::try_from(wait.as_millis() / 100).unwrap()] += 1;
            }
            assert!(tenths.iter().all(|n| *n <= 100), "{tenths:?}");
        }
    }
}
