//! Our term of leadership: its number, and until when we may act.
//!
//! The lease is for peace, the epoch for safety. A [`Guard`] is open while this machine's own monotonic clock says so;
//! every effect asks it for a [`Permit`] immediately before it is sent, and a permit cannot be had otherwise.
//!
//! A machine that was frozen by its host does not notice it on a monotonic clock that stood still with it. The wall
//! clock, set right again by the host, betrays it: so a wall clock that ran ahead of the monotonic one since the last
//! renewal shuts the guard until the next. This can only take a permit away; no wall clock ever gives one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    ids::Epoch,
    ports::clock::Clock,
    time::{Mono, Timestamp},
};

/// How far the wall clock may run ahead of the monotonic one between two renewals. Slewing does not get there in the
/// time between them; a freeze that outlasts a lease does by far.
const MAX_AHEAD: Duration = Duration::from_secs(2);

/// One moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Moment {
    pub wall: Timestamp,
    pub mono: Mono,
}

impl Moment {
    /// The wall clock is read first: a freeze between the two readings then counts as one after this moment.
    pub fn of(clock: &dyn Clock) -> Self {
        let wall = clock.now();
        Self { wall, mono: clock.monotonic() }
    }
}

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
    // A lock and not atomics: end, start and shutting change together, and it is held for a few comparisons only.
    state: Arc<Mutex<State>>,
}

struct State {
    end: End,
    /// When the last successful renewal began.
    start: Moment,
    /// When the wall clock was last seen too far ahead since then.
    shut: Option<Mono>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Effects may start before this.
    At(Mono),
    /// The term is over.
    Closed,
    Never,
}

impl Guard {
    /// A guard that is open until `until`, by a renewal that begins now.
    pub fn new(epoch: Epoch, clock: Arc<dyn Clock>, until: Mono) -> Self {
        let start = Moment::of(&*clock);
        Self::begun(epoch, clock, start, until)
    }

    /// A guard that is open until `until`, by a put that began at `start`.
    pub fn begun(epoch: Epoch, clock: Arc<dyn Clock>, start: Moment, until: Mono) -> Self {
        let state = State { end: End::At(until), start, shut: None };
        Self { epoch, clock, state: Arc::new(Mutex::new(state)) }
    }

    /// A guard without a lease behind it, for tools and tests that are alone by construction.
    pub fn unfenced(epoch: Epoch, clock: Arc<dyn Clock>) -> Self {
        let state = State { end: End::Never, start: Moment::of(&*clock), shut: None };
        Self { epoch, clock, state: Arc::new(Mutex::new(state)) }
    }

    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub fn permit(&self) -> Result<Permit, LeaseStalled> {
        if self.is_open() { Ok(Permit { epoch: self.epoch }) } else { Err(LeaseStalled { epoch: self.epoch }) }
    }

    pub fn is_open(&self) -> bool {
        let mono = self.clock.monotonic();
        // Read last, so that a freeze between the two readings shows.
        let wall = self.clock.now();
        let mut state = self.state();
        match state.end {
            End::Never => true,
            End::Closed => false,
            End::At(until) => {
                if MAX_AHEAD < wall.since(state.start.wall).saturating_sub(mono.since(state.start.mono)) {
                    state.shut = Some(mono);
                }
                mono < until && state.shut.is_none()
            }
        }
    }

    /// A renewal that began at `start` succeeded: effects may start until `until`. What shut the guard before `start` is
    /// forgiven. A closed guard stays closed.
    pub fn renewed(&self, start: Moment, until: Mono) {
        let mut state = self.state();
        if let End::At(_) = state.end {
            state.end = End::At(until);
            state.start = start;
            state.shut = state.shut.filter(|at| start.mono < *at);
        }
    }

    /// Moves the end, either way, where no renewal is known to have succeeded or failed anew: before a put that may
    /// shorten the lease, and after one that surely did not. A closed guard stays closed.
    pub fn move_end(&self, until: Mono) {
        let mut state = self.state();
        if let End::At(_) = state.end {
            state.end = End::At(until);
        }
    }

    /// Ends the term: no effect starts after this returns.
    pub fn close(&self) {
        self.state().end = End::Closed;
    }

    pub fn is_closed(&self) -> bool {
        self.state().end == End::Closed
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard").field("epoch", &self.epoch).field("open", &self.is_open()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both clocks, moved by hand.
    struct Hand(Mutex<(i64, u64)>);

    impl Hand {
        fn new() -> Arc<Self> {
            Arc::new(Self(Mutex::new((1_700_000_000_000, 1_000))))
        }

        fn moves(&self, wall_ms: i64, mono_ms: u64) {
            let mut hand = self.0.lock().unwrap();
            hand.0 += wall_ms;
            hand.1 += mono_ms;
        }
    }

    impl Clock for Hand {
        fn now(&self) -> Timestamp {
            Timestamp::from_millis(self.0.lock().unwrap().0)
        }

        fn monotonic(&self) -> Mono {
            Mono::from_start(Duration::from_millis(self.0.lock().unwrap().1))
        }
    }

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn guard(clock: &Arc<Hand>, open_for: Duration) -> Guard {
        Guard::new(Epoch(3), clock.clone(), clock.monotonic() + open_for)
    }

    #[test]
    fn guard_hands_out_permits_only_while_open() {
        let clock = Hand::new();
        let guard = guard(&clock, S(4));
        assert_eq!(guard.permit().unwrap().epoch(), Epoch(3));
        clock.moves(4_000, 4_000);
        assert!(guard.permit().is_err(), "the end itself is too late");
        let now = Moment::of(&*clock);
        guard.renewed(now, now.mono + S(4));
        assert!(guard.permit().is_ok(), "a renewal opens it again");
        guard.move_end(now.mono);
        assert!(guard.permit().is_err(), "an end that is moved back holds at once");
        guard.move_end(now.mono + S(4));
        assert!(guard.permit().is_ok());
        guard.close();
        guard.renewed(now, now.mono + S(99));
        guard.move_end(now.mono + S(99));
        assert!(guard.permit().is_err() && guard.is_closed(), "a closed guard never opens again");
    }

    #[test]
    fn a_suspended_machine_holds_no_open_guard() {
        let clock = Hand::new();
        let (guard, unfenced) = (guard(&clock, S(5)), Guard::unfenced(Epoch(1), clock.clone()));
        let before = Moment::of(&*clock);
        clock.moves(3_600_000, 1_000);
        assert_eq!(guard.permit(), Err(LeaseStalled { epoch: Epoch(3) }));
        assert!(unfenced.is_open(), "without a lease there is nothing to lose");
        guard.renewed(before, before.mono + S(60));
        assert!(!guard.is_open(), "a renewal that began before the freeze proves nothing about the time after it");
        let after = Moment::of(&*clock);
        guard.renewed(after, after.mono + S(5));
        assert!(guard.is_open());
    }

    #[test]
    fn a_wall_clock_set_forward_shuts_the_guard_until_the_next_renewal() {
        let clock = Hand::new();
        let guard = guard(&clock, S(60));
        clock.moves(2_000, 0);
        assert!(guard.is_open(), "up to two seconds are nobody's business");
        clock.moves(1, 0);
        assert!(!guard.is_open());
        clock.moves(-3_600_000, 10);
        assert!(!guard.is_open(), "setting it back undoes nothing: only a renewal tells who leads");
        let now = Moment::of(&*clock);
        guard.renewed(now, now.mono + S(60));
        assert!(guard.is_open());
    }

    #[test]
    fn a_wall_clock_that_goes_back_or_runs_slow_changes_nothing() {
        let clock = Hand::new();
        let guard = guard(&clock, S(60));
        clock.moves(-86_400_000, 1_000);
        assert!(guard.is_open());
        clock.moves(1_000, 30_000);
        assert!(guard.is_open());
        clock.moves(0, 29_000);
        assert!(!guard.is_open(), "its end comes by the monotonic clock, as ever");
    }
}
