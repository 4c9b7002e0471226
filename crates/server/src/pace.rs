//! The gate before every create: a token bucket for the rate, a bound for how many run at once, and the planner's
//! priority deciding who goes next.
//!
//! A fifth of the bucket is kept for termination notices and unhealthy replacements, so that a mass scale-up never
//! makes a dying machine's replacement wait.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{plan::Priority, ports::clock::Clock, time::Mono};
use tokio::sync::oneshot;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Refill time of one token; zero means no limit.
    pub refill: Duration,
    pub burst: u32,
    pub max_parallel: u32,
}

#[derive(Clone)]
pub struct Gate {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
}

struct State {
    pace: Pace,
    tokens: f64,
    filled_at: Mono,
    running: u32,
    arrivals: u64,
    waiting: BTreeMap<(Priority, u64), oneshot::Sender<()>>,
}

/// A place among the running creates; dropping it lets the next one in.
pub struct Place {
    gate: Gate,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.lock().running -= 1;
        self.gate.admit();
    }
}

impl Gate {
    pub fn new(pace: Pace, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            pace,
            tokens: f64::from(pace.burst),
            filled_at: clock.monotonic(),
            running: 0,
            arrivals: 0,
            waiting: BTreeMap::new(),
        };
        Self { state: Arc::new(Mutex::new(state)), clock }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a token and a place. Dropping the future gives up the wait.
    pub async fn enter(&self, priority: Priority) -> Place {
        let mut admitted = {
            let mut state = self.lock();
            let (sender, receiver) = oneshot::channel();
            let key = (priority, state.arrivals);
            state.arrivals += 1;
            state.waiting.insert(key, sender);
            receiver
        };
        loop {
            // Admission by others arrives by the channel; a refilled token has nobody to announce it, so we look.
            let refill = self.admit();
            match refill {
                None => {
                    let _ = (&mut admitted).await;
                    return Place { gate: self.clone() };
                }
                Some(wait) => tokio::select! {
                    biased;
                    _ = &mut admitted => return Place { gate: self.clone() },
                    () = tokio::time::sleep(wait) => {}
                },
            }
        }
    }

    /// Whether a create of this priority would have to wait for a token now, and until when.
    pub fn wait_for_token(&self, priority: Priority) -> Option<Duration> {
        let now = self.clock.monotonic();
        let mut state = self.lock();
        state.fill(now);
        state.lacking(priority)
    }

    /// Lets in whoever may go. Answers how long until the next token, if somebody waits for one.
    fn admit(&self) -> Option<Duration> {
        let now = self.clock.monotonic();
        let mut state = self.lock();
        state.fill(now);
        loop {
            let (&key, _) = state.waiting.iter().next()?;
            if state.pace.max_parallel <= state.running {
                return None; // the place that gets free will call us
            }
            if let Some(wait) = state.lacking(key.0) {
                return Some(wait);
            }
            let sender = state.waiting.remove(&key)?;
            if sender.send(()).is_ok() {
                state.running += 1;
                if !state.pace.refill.is_zero() {
                    state.tokens -= 1.0;
                }
            }
        }
    }
}

impl State {
    fn fill(&mut self, now: Mono) {
        if !self.pace.refill.is_zero() {
            let gained = now.since(self.filled_at).as_secs_f64() / self.pace.refill.as_secs_f64();
            self.tokens = (self.tokens + gained).min(f64::from(self.pace.burst));
        }
        self.filled_at = now;
    }

    /// How long this priority must wait for its token; `None` if one is there.
    fn lacking(&self, priority: Priority) -> Option<Duration> {
        if self.pace.refill.is_zero() {
            return None;
        }
        let reserve = match priority {
            Priority::TerminationNotice | Priority::Unhealthy => 0.0,
            // Of a bucket of fewer than five there is nothing to keep back.
            _ => (f64::from(self.pace.burst) / 5.0).floor(),
        };
        let missing = 1.0 + reserve - self.tokens;
        // A rounding's worth of a token is a token, or two clock readings could miss each other for ever.
        (1e-9 < missing).then(|| self.pace.refill.mul_f64(missing).max(Duration::from_micros(100)))
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;
    use nstance_rt::clock::TokioClock;

    use super::*;

    fn gate(refill_ms: u64, burst: u32, max_parallel: u32) -> Gate {
        let pace = Pace { refill: Duration::from_millis(refill_ms), burst, max_parallel };
        Gate::new(pace, Arc::new(TokioClock::starting_at(Timestamp::EPOCH)))
    }

    async fn passes(gate: &Gate, priority: Priority) -> Option<Place> {
        tokio::time::timeout(Duration::ZERO, gate.enter(priority)).await.ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_passes_at_once_and_the_rest_at_the_rate() {
        let gate = gate(100, 4, 100);
        let start = tokio::time::Instant::now();
        let mut places = Vec::new();
        for _ in 0..6 {
            places.push(gate.enter(Priority::ScaleUp).await);
        }
        assert_eq!(start.elapsed().as_millis(), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reserve_is_kept_for_dying_machines() {
        let gate = gate(1000, 10, 100);
        let mut places = Vec::new();
        while let Some(place) = passes(&gate, Priority::ScaleUp).await {
            places.push(place);
        }
        assert_eq!(places.len(), 8);
        assert!(passes(&gate, Priority::Unhealthy).await.is_some());
        assert!(passes(&gate, Priority::TerminationNotice).await.is_some());
        assert!(passes(&gate, Priority::TerminationNotice).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_urgent_waiter_gets_the_next_place() {
        let gate = gate(0, 1, 1);
        let first = gate.enter(Priority::ScaleUp).await;
        let (mut low, mut high) =
            (Box::pin(gate.enter(Priority::ScaleUp)), Box::pin(gate.enter(Priority::TerminationNotice)));
        assert!(futures::poll!(&mut low).is_pending());
        assert!(futures::poll!(&mut high).is_pending());
        drop(first);
        assert!(futures::poll!(&mut low).is_pending());
        assert!(futures::poll!(&mut high).is_ready());
        assert!(futures::poll!(&mut low).is_ready(), "its place was given back when the other was dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_waiter_that_gave_up_takes_nobodys_place() {
        let gate = gate(0, 1, 1);
        let first = gate.enter(Priority::ScaleUp).await;
        assert!(passes(&gate, Priority::ScaleUp).await.is_none());
        drop(first);
        assert!(passes(&gate, Priority::ScaleUp).await.is_some());
    }
}
