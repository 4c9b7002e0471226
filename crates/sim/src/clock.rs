//! The clocks of one machine: a wall clock that can be set, and a monotonic one that runs a little too fast or too slow.
//! The cloud, the agents and the judge go by true time.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{
    ports::clock::{Clock, Entropy},
    time::{Mono, Timestamp},
};
use nstance_rt::entropy::below;

/// True time in thousandths.
const TRUE: u32 = 1000;
/// How far a clock may be off, either way. A lease of 6 s that its holder leaves 1 s earlier bears two clocks whose
/// rates differ by less than a fifth; between these the difference is 18 %.
const OFF: u32 = 80;

pub(crate) struct SimClock {
    common: Arc<dyn Clock>,
    state: Mutex<State>,
}

struct State {
    /// Milliseconds that the wall clock is ahead.
    offset: i64,
    rate: u32,
    /// True and own reading when the rate was set.
    from: (Mono, Mono),
}

impl SimClock {
    pub(crate) fn new(common: Arc<dyn Clock>) -> Self {
        let now = common.monotonic();
        Self { common, state: Mutex::new(State { offset: 0, rate: TRUE, from: (now, now) }) }
    }

    pub(crate) fn draw_rate(chance: &dyn Entropy) -> u32 {
        TRUE - OFF + u32::try_from(below(chance, u64::from(2 * OFF + 1))).unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on so many thousandths of true time.
    pub(crate) fn run_at(&self, rate: u32) {
        let from = (self.common.monotonic(), self.monotonic());
        let mut state = self.state();
        state.rate = rate;
        state.from = from;
    }

    /// Sets the wall clock so many milliseconds ahead of true time.
    pub(crate) fn jump_to(&self, offset: i64) {
        self.state().offset = offset;
    }
}

impl Clock for SimClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.common.now().as_millis().saturating_add(self.state().offset))
    }

    fn monotonic(&self) -> Mono {
        let state = self.state();
        let (common, own) = state.from;
        let run = self.common.monotonic().since(common);
        if state.rate == TRUE {
            return own + run;
        }
        let nanos = run.as_nanos() * u128::from(state.rate) / u128::from(TRUE);
        own + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::clock::TokioClock;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rates_and_jumps_touch_one_machine_and_time_never_goes_back() {
        let common: Arc<dyn Clock> = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_000_000)));
        let clock = SimClock::new(common.clone());
        clock.run_at(900);
        let start = clock.monotonic();
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(clock.monotonic().since(start), Duration::from_secs(9));
        let before = clock.monotonic();
        clock.run_at(1100);
        assert_eq!(clock.monotonic(), before, "another rate is no jump");
        clock.jump_to(-86_400_000);
        assert_eq!(clock.monotonic(), before, "a wall clock that is set moves no other");
        assert_eq!(common.now().since(clock.now()), Duration::from_secs(86_400));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(clock.monotonic().since(start), Duration::from_secs(20));
    }
}
