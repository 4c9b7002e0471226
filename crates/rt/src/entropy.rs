//! Chance: the machine's, or a seed's.

use std::sync::Mutex;

use nstance_core::ports::clock::Entropy;
use ring::rand::{SecureRandom, SystemRandom};

/// The operating system's random numbers.
pub struct SystemEntropy(SystemRandom);

impl SystemEntropy {
    pub fn new() -> Self {
        Self(SystemRandom::new())
    }
}

impl Default for SystemEntropy {
    fn default() -> Self {
        Self::new()
    }
}

impl Entropy for SystemEntropy {
    fn fill(&self, bytes: &mut [u8]) {
        // Going on without chance would mean guessable keys and equal ids.
        self.0.fill(bytes).expect("the operating system gives random numbers");
    }
}

/// Numbers of a seed (SplitMix64), for simulations: the same seed, the same run. Never for keys that matter.
pub struct SeededEntropy(Mutex<u64>);

impl SeededEntropy {
    pub fn new(seed: u64) -> Self {
        Self(Mutex::new(seed))
    }
}

impl Entropy for SeededEntropy {
    fn fill(&self, bytes: &mut [u8]) {
        let mut state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for chunk in bytes.chunks_mut(8) {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = *state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            chunk.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..chunk.len()]);
        }
    }
}

/// A number in `0..bound`; zero if the bound is zero. Good for jitter, where a bias of 2⁻³² does not matter.
pub fn below(entropy: &dyn Entropy, bound: u64) -> u64 {
    let mut bytes = [0; 8];
    entropy.fill(&mut bytes);
    u64::try_from((u128::from(u64::from_le_bytes(bytes)) * u128::from(bound)) >> 64).unwrap_or(0)
}

/// A duration in `0..bound`.
pub fn jitter(entropy: &dyn Entropy, bound: std::time::Duration) -> std::time::Duration {
    std::time::Duration::from_nanos(below(entropy, u64::try_from(bound.as_nanos()).unwrap_or(u64::MAX)))
}

/// `n` random bytes as lower-case hex.
pub fn hex(entropy: &dyn Entropy, n: usize) -> String {
    let mut bytes = vec![0; n];
    entropy.fill(&mut bytes);
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_gives_one_sequence() {
        let (a, b, c) = (SeededEntropy::new(1), SeededEntropy::new(1), SeededEntropy::new(2));
        assert_eq!(hex(&a, 16), hex(&b, 16));
        assert_ne!(hex(&a, 16), hex(&c, 16));
        for bound in [0, 1, 2, 1000] {
            assert!(below(&a, bound) < bound.max(1));
        }
    }
}
