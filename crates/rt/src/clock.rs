//! Clocks. [`SystemClock`] is the machine's; [`TokioClock`] follows tokio's, so that a test on a paused runtime moves
//! timers and timestamps with one `advance`.

use std::time::Duration;

use nstance_core::{
    ports::clock::Clock,
    time::{Mono, Timestamp},
};

/// The machine's clocks: wall time, and the boot clock, which goes on counting while the machine is suspended.
#[derive(Debug, Default, Clone, Copy)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        Timestamp::from_millis(now.tv_sec.saturating_mul(1000).saturating_add(now.tv_nsec / 1_000_000))
    }

    fn monotonic(&self) -> Mono {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Mono::from_start(Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0)))
    }
}

/// Tokio's clock with a wall time that began at a given moment.
#[derive(Debug, Clone, Copy)]
pub struct TokioClock {
    start: tokio::time::Instant,
    wall: Timestamp,
}

impl TokioClock {
    /// Must be called inside a runtime.
    pub fn starting_at(wall: Timestamp) -> Self {
        Self { start: tokio::time::Instant::now(), wall }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        self.wall.plus(self.start.elapsed())
    }

    fn monotonic(&self) -> Mono {
        // Not from zero, so that a clock's start is not mistaken for "never".
        Mono::from_start(Duration::from_secs(1) + self.start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_advance_moves_timers_and_timestamps() {
        let clock = TokioClock::starting_at(Timestamp::from_millis(1000));
        let before = clock.monotonic();
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(clock.now(), Timestamp::from_millis(8000));
        assert_eq!(clock.monotonic().since(before), Duration::from_secs(7));
    }

    #[test]
    fn machine_clocks_run() {
        let clock = SystemClock;
        assert!(Timestamp::from_millis(1_700_000_000_000) < clock.now());
        let before = clock.monotonic();
        assert!(before <= clock.monotonic());
    }
}
