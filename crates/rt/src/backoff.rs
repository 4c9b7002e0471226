//! Exponential backoff with full jitter: `random(0, min(cap, base · 2ⁿ))`.
//!
//! Full jitter, because a fleet that lost its server at one moment must not come back at one moment.

use std::time::Duration;

use nstance_core::ports::clock::Entropy;

use crate::entropy::jitter;

#[derive(Debug, Clone)]
pub struct Backoff {
    base: Duration,
    cap: Duration,
    n: u32,
}

impl Backoff {
    pub fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, n: 0 }
    }

    /// The upper end of the next wait.
    pub fn bound(&self) -> Duration {
        self.base.saturating_mul(2_u32.saturating_pow(self.n)).min(self.cap)
    }

    /// The next wait; the one after it is drawn from twice the range.
    pub fn next(&mut self, entropy: &dyn Entropy) -> Duration {
        let wait = jitter(entropy, self.bound());
        self.n = self.n.saturating_add(1);
        wait
    }

    pub fn reset(&mut self) {
        self.n = 0;
    }

    pub fn set_cap(&mut self, cap: Duration) {
        self.cap = cap;
    }

    /// How many waits were drawn since the last reset.
    pub fn n_tries(&self) -> u32 {
        self.n
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy::SeededEntropy;

    #[test]
    fn waits_grow_to_the_cap_and_stay_below_it() {
        let entropy = SeededEntropy::new(7);
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        let bounds: Vec<u128> = (0..7)
            .map(|_| {
                let bound = backoff.bound();
                assert!(backoff.next(&entropy) < bound);
                bound.as_millis()
            })
            .collect();
        assert_eq!(bounds, [200, 400, 800, 1600, 3200, 5000, 5000]);
        backoff.reset();
        assert_eq!(backoff.bound(), Duration::from_millis(200));
    }
}
