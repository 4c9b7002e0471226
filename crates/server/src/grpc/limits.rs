//! Limits of the registration port. Only failed calls of a source count against it: a NAT with hundreds of honest new
//! agents behind it is never slowed by their success.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{ports::clock::Clock, time::Mono};

const FAILURES: f64 = 20.0;
const FAILURE_REFILL: Duration = Duration::from_secs(3);
const VERIFY_RATE: f64 = 500.0;
const VERIFY_BURST: f64 = 1000.0;
/// Sources remembered. One that was forgotten starts with a full bucket, so forgetting the fullest costs nothing.
const MAX_SOURCES: usize = 10_000;

pub struct RegistrationLimits {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
}

struct State {
    sources: BTreeMap<IpAddr, Bucket>,
    verify: Bucket,
}

/// Tokens that come back with time.
#[derive(Clone, Copy)]
pub(crate) struct Bucket {
    pub(crate) tokens: f64,
    pub(crate) at: Mono,
}

impl Bucket {
    pub(crate) fn fill(&mut self, now: Mono, per_second: f64, burst: f64) {
        self.tokens = (self.tokens + now.since(self.at).as_secs_f64() * per_second).min(burst);
        self.at = now;
    }
}

/// IPv4 by address, IPv6 by /64: one machine owns a whole one.
fn source(remote: SocketAddr) -> IpAddr {
    match remote.ip().to_canonical() {
        IpAddr::V6(ip) => {
            let mut octets = ip.octets();
            octets[8..].fill(0);
            IpAddr::V6(octets.into())
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl RegistrationLimits {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let verify = Bucket { tokens: VERIFY_BURST, at: clock.monotonic() };
        Self { state: Mutex::new(State { sources: BTreeMap::new(), verify }), clock }
    }

    /// Whether this source may try now; takes one verification.
    pub fn admit(&self, remote: SocketAddr) -> bool {
        let now = self.clock.monotonic();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = state.sources.get_mut(&source(remote)) {
            bucket.fill(now, 1.0 / FAILURE_REFILL.as_secs_f64(), FAILURES);
            if bucket.tokens < 1.0 {
                return false;
            }
        }
        state.verify.fill(now, VERIFY_RATE, VERIFY_BURST);
        if state.verify.tokens < 1.0 {
            return false;
        }
        state.verify.tokens -= 1.0;
        true
    }

    pub fn failed(&self, remote: SocketAddr) {
        let now = self.clock.monotonic();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if MAX_SOURCES <= state.sources.len() {
            state.sources.retain(|_, bucket| {
                bucket.fill(now, 1.0 / FAILURE_REFILL.as_secs_f64(), FAILURES);
                bucket.tokens < FAILURES
            });
        }
        let bucket = state.sources.entry(source(remote)).or_insert(Bucket { tokens: FAILURES, at: now });
        bucket.fill(now, 1.0 / FAILURE_REFILL.as_secs_f64(), FAILURES);
        bucket.tokens = (bucket.tokens - 1.0).max(0.0);
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;
    use nstance_rt::clock::TokioClock;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn twenty_failures_close_a_source_and_time_opens_it_again() {
        let limits = RegistrationLimits::new(Arc::new(TokioClock::starting_at(Timestamp::EPOCH)));
        let hostile: SocketAddr = "192.0.2.1:1".parse().unwrap();
        for _ in 0..20 {
            assert!(limits.admit(hostile));
            limits.failed(hostile);
        }
        assert!(!limits.admit(hostile));
        assert!(limits.admit("192.0.2.2:1".parse().unwrap()), "others are not touched");
        tokio::time::advance(FAILURE_REFILL).await;
        assert!(limits.admit(hostile));
    }

    #[tokio::test(start_paused = true)]
    async fn success_never_slows_a_source() {
        let limits = RegistrationLimits::new(Arc::new(TokioClock::starting_at(Timestamp::EPOCH)));
        assert!((0..1000).all(|_| limits.admit("[2001:db8::1]:5".parse().unwrap())));
    }
}
