//! The time of one term: the wall time at its start plus what the monotonic clock has run since.
//!
//! Deadlines are stored as wall time, but a wall clock that jumps must not shorten or stretch a wait that is under way.
//! So a leader reads the wall clock once, and from then on only counts.

use std::sync::Arc;

use nstance_core::{
    ports::clock::Clock,
    time::{Mono, Timestamp},
};

#[derive(Clone)]
pub struct TermClock {
    clock: Arc<dyn Clock>,
    wall: Timestamp,
    start: Mono,
}

impl TermClock {
    pub fn start(clock: Arc<dyn Clock>) -> Self {
        let (wall, start) = (clock.now(), clock.monotonic());
        Self { clock, wall, start }
    }

    pub fn now(&self) -> Timestamp {
        self.wall.plus(self.clock.monotonic().since(self.start))
    }

    pub fn monotonic(&self) -> Mono {
        self.clock.monotonic()
    }

    pub fn started_at(&self) -> Timestamp {
        self.wall
    }
}
