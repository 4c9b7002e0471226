//! Time and chance. Everything that reads a clock or draws a number does it through these, so that a test owns both.

use crate::time::{Mono, Timestamp};

pub trait Clock: Send + Sync {
    /// Wall time, for records and people.
    fn now(&self) -> Timestamp;
    /// Monotonic time that counts suspension, for leases and deadlines.
    fn monotonic(&self) -> Mono;
}

pub trait Entropy: Send + Sync {
    /// Fills `bytes` with numbers nobody can guess (or, in a simulation, with those of its seed).
    fn fill(&self, bytes: &mut [u8]);
}

/// `N` random bytes.
pub fn random<const N: usize>(entropy: &dyn Entropy) -> [u8; N] {
    let mut bytes = [0; N];
    entropy.fill(&mut bytes);
    bytes
}
