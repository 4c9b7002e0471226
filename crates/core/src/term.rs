//! Our term of leadership: its number, and until when we may act.
//!
//! The lease is for peace, the epoch for safety. A [`Guard`] is open while this machine's own monotonic clock says so;
//! every effect asks it for a [`Permit`] immediately before it is sent, and a permit cannot be had otherwise.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use crate::{ids::Epoch, ports::clock::Clock, time::Mono};

/// The right to start one effect now, under this epoch. Not to be kept: the next effect asks again.
#[derive(Debug, PartialEq, Eq)]
pub struct Permit {
    epoch: Epoch,
}

impl Permit {
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the lease of epoch {epoch} is not ours to act on now; the next leader goes on")]
pub struct LeaseStalled {
    pub epoch: Epoch,
}

/// Shared by everything that acts in one term. Closing it is final; letting it run out is not.
#[derive(Clone)]
pub struct Guard {
    epoch: Epoch,
    clock: Arc<dyn Clock>,
    /// Monotonic nanoseconds until which effects may start; `CLOSED` for ever after the term's end.
    until: Arc<AtomicU64>,
}

const CLOSED: u64 = 0;

impl Guard {
    /// A guard that is open until `until`.
    pub fn new(epoch: Epoch, clock: Arc<dyn Clock>, until: Mono) -> Self {
        Self { epoch, clock, until: Arc::new(AtomicU64::new(nanos(until).max(1))) }
    }

    /// A guard without a lease behind it, for tools and tests that are alone by construction.
    pub fn unfenced(epoch: Epoch, clock: Arc<dyn Clock>) -> Self {
        Self { epoch, clock, until: Arc::new(AtomicU64::new(u64::MAX)) }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn permit(&self) -> Result<Permit, LeaseStalled> {
        if self.is_open() { Ok(Permit { epoch: self.epoch }) } else { Err(LeaseStalled { epoch: self.epoch }) }
    }

    pub fn is_open(&self) -> bool {
        nanos(self.clock.monotonic()) < self.until.load(Ordering::SeqCst)
    }

    /// Moves the end after a renewal. A closed guard stays closed.
    pub fn extend(&self, until: Mono) {
        // Fails only on a closed guard, which is what we want of it.
        let _ = self
            .until
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| (old != CLOSED).then_some(old.max(nanos(until))));
    }

    /// Ends the term: no effect starts after this returns.
    pub fn close(&self) {
        self.until.store(CLOSED, Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.until.load(Ordering::SeqCst) == CLOSED
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("epoch", &self.epoch).field("open", &self.is_open()).finish()
    }
}

fn nanos(at: Mono) -> u64 {
    u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::{sync::Mutex, time::Duration};

    use super::*;
    use crate::time::Timestamp;

    struct Hand(Mutex<Duration>);

    impl Clock for Hand {
        fn now(&self) -> Timestamp {
            Timestamp::EPOCH
        }

        fn monotonic(&self) -> Mono {
            Mono::from_start(*self.0.lock().unwrap())
        }
    }

    #[test]
    fn guard_hands_out_permits_only_while_open() {
        let clock = Arc::new(Hand(Mutex::new(Duration::from_secs(1))));
        let guard = Guard::new(Epoch(3), clock.clone(), Mono::from_start(Duration::from_secs(5)));
        assert_eq!(guard.permit().unwrap().epoch(), Epoch(3));
        *clock.0.lock().unwrap() = Duration::from_secs(5);
        assert!(guard.permit().is_err(), "the end itself is too late");
        guard.extend(Mono::from_start(Duration::from_secs(9)));
        assert!(guard.permit().is_ok(), "a renewal opens it again");
        guard.close();
        guard.extend(Mono::from_start(Duration::from_secs(99)));
        assert!(guard.permit().is_err(), "a closed guard never opens again");
    }
}
