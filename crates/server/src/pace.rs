//! The gate before every create: a token bucket for the rate, a bound for how many run at once, and the planner's
//! priority deciding who goes next.
//!
//! A fifth of the bucket and a fifth of the places are kept for termination notices and unhealthy replacements, so that
//! a mass scale-up never makes a dying machine's replacement wait: neither for a token, nor for slow creates to end.
//!
//! A provider that throttles us slows the bucket down to half its rate, and again if it goes on; while it does not, the
//! rate grows back by and by.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_config::model::Server;
use nstance_core::{
    plan::Priority,
    ports::{clock::Clock, provider::CreatePace},
    time::Mono,
};
use tokio::sync::{Notify, oneshot};

/// The rate never falls below this, in tokens per second.
const SLOWEST: f64 = 0.5;

/// Where no limit is set, throttling halves this rate.
const UNLIMITED: f64 = 20.0;

/// After so long without throttling the rate grows by a tenth.
const CALM: Duration = Duration::from_secs(5);

/// Refusals that come together are one: the calls behind them began before the rate could fall.
const TOGETHER: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// Refill time of one token; zero means no limit.
    pub refill: Duration,
    pub burst: u32,
    pub max_parallel: u32,
}

impl Pace {
    /// The config's, else the provider's own.
    pub fn of(server: &Server, provider: CreatePace) -> Self {
        Self {
            refill: server.create_rate_limit.unwrap_or(provider.refill),
            burst: server.create_burst.unwrap_or(provider.burst),
            max_parallel: server.max_parallel_creates,
        }
    }
}

#[derive(Clone)]
pub struct Gate {
    state: Arc<Mutex<State>>,
    clock: Arc<dyn Clock>,
    /// Wakes one who waits, so that somebody watches the clock for the next token.
    vacant: Arc<Notify>,
}

struct State {
    pace: Pace,
    tokens: f64,
    filled_at: Mono,
    slowed: Option<Slowed>,
    running: u32,
    arrivals: u64,
    waiting: BTreeMap<(Priority, u64), oneshot::Sender<()>>,
    /// One of those who wait watches the clock for all of them.
    watched: bool,
}

/// The rate while the provider throttles us.
struct Slowed {
    /// Tokens per second.
    rate: f64,
    halved_at: Mono,
    /// When the provider throttled us last, or the rate grew last.
    calm_since: Mono,
}

/// A place among the running creates; dropping it lets the next one in.
pub struct Place {
    gate: Gate,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.lock().running -= 1;
        self.gate.look();
    }
}

/// One who waits.
struct Turn<'a> {
    gate: &'a Gate,
    key: (Priority, u64),
    watches: bool,
    /// It knows that it was let in.
    entered: bool,
}

impl Turn<'_> {
    /// Whether it is this one that watches the clock.
    fn watch(&mut self) -> bool {
        let mut state = self.gate.lock();
        self.watches |= !std::mem::replace(&mut state.watched, true);
        self.watches
    }
}

impl Drop for Turn<'_> {
    /// It was let in, or gave up: another one watches from now on. A place it was given and never heard of goes back.
    fn drop(&mut self) {
        let given_back = {
            let mut state = self.gate.lock();
            let waited = state.waiting.remove(&self.key).is_some();
            if self.watches {
                state.watched = false;
                self.gate.vacant.notify_one();
            }
            !waited && !self.entered
        };
        if given_back {
            drop(Place { gate: self.gate.clone() });
        }
    }
}

impl Gate {
    pub fn new(pace: Pace, clock: Arc<dyn Clock>) -> Self {
        let state = State {
            pace,
            tokens: f64::from(pace.burst),
            filled_at: clock.monotonic(),
            slowed: None,
            running: 0,
            arrivals: 0,
            waiting: BTreeMap::new(),
            watched: false,
        };
        Self { state: Arc::new(Mutex::new(state)), clock, vacant: Arc::default() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another pace from now on. Tokens that are there stay, up to the new burst.
    pub fn set_pace(&self, pace: Pace) {
        let now = self.clock.monotonic();
        {
            let mut state = self.lock();
            state.fill(now);
            state.pace = pace;
            state.tokens = state.tokens.min(f64::from(pace.burst));
        }
        self.look();
    }

    /// Waits for a token and a place. Dropping the future gives up the wait.
    pub async fn enter(&self, priority: Priority) -> Place {
        let (mut turn, mut admitted) = {
            let mut state = self.lock();
            let (sender, receiver) = oneshot::channel();
            let key = (priority, state.arrivals);
            state.arrivals += 1;
            state.waiting.insert(key, sender);
            (Turn { gate: self, key, watches: false, entered: false }, receiver)
        };
        loop {
            // Admission by others arrives by the channel. A refilled token has nobody to announce it, so one of us looks;
            // while there is no place, whoever frees one does.
            let refill = self.admit().filter(|_| turn.watch());
            tokio::select! {
                biased;
                _ = &mut admitted => {
                    turn.entered = true;
                    return Place { gate: self.clone() };
                }
                () = tokio::time::sleep(refill.unwrap_or_default()), if refill.is_some() => {}
                () = self.vacant.notified(), if refill.is_none() => {}
            }
        }
    }

    /// Lets in whoever may go; if the next one lacks a token, somebody has to watch for it.
    fn look(&self) {
        if self.admit().is_some() {
            self.vacant.notify_one();
        }
    }

    /// The provider throttled a call, of whatever kind.
    pub fn throttled(&self) {
        let now = self.clock.monotonic();
        let mut state = self.lock();
        state.fill(now);
        state.slow_down(now);
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
            if state.places(key.0) <= state.running {
                return None; // whoever frees a place will look
            }
            if let Some(wait) = state.lacking(key.0) {
                return Some(wait);
            }
            let sender = state.waiting.remove(&key)?;
            if sender.send(()).is_ok() {
                state.running += 1;
                if state.rate().is_some() {
                    state.tokens -= 1.0;
                }
            }
        }
    }
}

impl State {
    /// Tokens per second now; `None` means no limit.
    fn rate(&self) -> Option<f64> {
        self.slowed.as_ref().map(|slowed| slowed.rate).or_else(|| self.usual_rate())
    }

    fn usual_rate(&self) -> Option<f64> {
        (!self.pace.refill.is_zero()).then(|| self.pace.refill.as_secs_f64().recip())
    }

    fn slow_down(&mut self, now: Mono) {
        let usual = self.usual_rate().unwrap_or(UNLIMITED);
        match &mut self.slowed {
            Some(slowed) => {
                slowed.calm_since = now;
                if TOGETHER <= now.since(slowed.halved_at) {
                    // A rate that people set lower than our floor is not raised.
                    slowed.rate = (slowed.rate / 2.0).max(SLOWEST.min(usual));
                    slowed.halved_at = now;
                }
            }
            none => {
                *none = Some(Slowed { rate: (usual / 2.0).max(SLOWEST.min(usual)), halved_at: now, calm_since: now });
            }
        }
    }

    /// Takes in what has flowed into the bucket, at the rates it had meanwhile.
    fn fill(&mut self, now: Mono) {
        let usual = self.usual_rate();
        while let Some(slowed) = &mut self.slowed {
            let grows_at = slowed.calm_since + CALM;
            if now < grows_at {
                break;
            }
            let (rate, since) = (slowed.rate, self.filled_at);
            slowed.rate *= 1.1;
            slowed.calm_since = grows_at;
            if usual.unwrap_or(UNLIMITED) <= slowed.rate {
                self.slowed = None;
            }
            self.flow(rate, grows_at.since(since));
            self.filled_at = grows_at.max(since);
        }
        match self.rate() {
            Some(rate) => self.flow(rate, now.since(self.filled_at)),
            // Without a limit nothing is taken out, and whoever is throttled later begins with a full bucket.
            None => self.tokens = f64::from(self.pace.burst),
        }
        self.filled_at = now;
    }

    fn flow(&mut self, rate: f64, time: Duration) {
        self.tokens = (self.tokens + rate * time.as_secs_f64()).min(f64::from(self.pace.burst));
    }

    /// So many may run, this one included.
    fn places(&self, priority: Priority) -> u32 {
        let max = self.pace.max_parallel;
        if is_urgent(priority) { max } else { max - max / 5 }
    }

    /// How long this priority must wait for its token; `None` if one is there.
    fn lacking(&self, priority: Priority) -> Option<Duration> {
        let rate = self.rate()?;
        // Of a bucket of fewer than five there is nothing to keep back.
        let reserve = if is_urgent(priority) { 0.0 } else { (f64::from(self.pace.burst) / 5.0).floor() };
        let missing = 1.0 + reserve - self.tokens;
        // A rounding's worth of a token is a token, or two clock readings could miss each other for ever.
        (1e-9 < missing).then(|| Duration::from_secs_f64(missing / rate).max(Duration::from_micros(100)))
    }
}

/// A machine dies or is about to: its replacement may use what is kept back from the others.
fn is_urgent(priority: Priority) -> bool {
    matches!(priority, Priority::TerminationNotice | Priority::Unhealthy)
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
    async fn slow_creates_leave_places_for_dying_machines() {
        let gate = gate(0, 100, 10);
        let mut places = Vec::new();
        while let Some(place) = passes(&gate, Priority::ScaleUp).await {
            places.push(place);
        }
        assert_eq!(places.len(), 8);
        places.extend(passes(&gate, Priority::Unhealthy).await);
        places.extend(passes(&gate, Priority::TerminationNotice).await);
        assert_eq!(places.len(), 10);
        assert!(passes(&gate, Priority::TerminationNotice).await.is_none());
        places.truncate(8);
        assert!(passes(&gate, Priority::ScaleUp).await.is_none(), "what is kept back stays so");
        assert!(passes(&gate, Priority::TerminationNotice).await.is_some());
    }

    /// Goes through the gate, stays for a moment and leaves.
    async fn goes_through(gate: Gate) {
        let place = gate.enter(Priority::ScaleUp).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
        drop(place);
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_came_while_no_place_was_free_are_let_in_as_tokens_come() {
        // Two at a time, and the bucket is empty when the places of the first are free again.
        let gate = gate(100, 4, 2);
        let start = tokio::time::Instant::now();
        let all = (0..50).map(|_| goes_through(gate.clone()));
        let ended = tokio::time::timeout(Duration::from_secs(60), futures::future::join_all(all)).await;
        assert!(ended.is_ok(), "some wait for ever");
        assert_eq!(start.elapsed().as_millis(), 4610, "four at once, the others at the rate");
        assert!(!gate.lock().watched && gate.lock().running == 0);
    }

    #[tokio::test(start_paused = true)]
    async fn another_one_watches_the_clock_when_the_one_who_did_gives_up() {
        let gate = gate(100, 1, 10);
        let place = gate.enter(Priority::ScaleUp).await;
        let mut waiting: Vec<_> = (0..5).map(|_| Box::pin(gate.enter(Priority::ScaleUp))).collect();
        for it in &mut waiting {
            assert!(futures::poll!(it).is_pending());
        }
        drop(waiting.remove(0));
        assert_eq!(gate.lock().waiting.len(), 4);
        let all = tokio::time::timeout(Duration::from_secs(60), futures::future::join_all(waiting)).await;
        assert_eq!(all.map(|places| places.len()).ok(), Some(4));
        drop(place);
    }

    #[tokio::test(start_paused = true)]
    async fn a_place_given_to_one_who_is_gone_before_it_hears_of_it_goes_to_the_next() {
        let gate = gate(0, 1, 1);
        let first = gate.enter(Priority::ScaleUp).await;
        let mut second = Box::pin(gate.enter(Priority::ScaleUp));
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        drop(second);
        assert!(passes(&gate, Priority::ScaleUp).await.is_some());
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

    /// How many pass within so many seconds.
    async fn n_within(gate: &Gate, seconds: u64) -> u32 {
        let end = tokio::time::Instant::now() + Duration::from_secs(seconds);
        let mut n = 0;
        while let Ok(place) = tokio::time::timeout_at(end, gate.enter(Priority::ScaleUp)).await {
            drop(place);
            n += 1;
        }
        n
    }

    #[tokio::test(start_paused = true)]
    async fn throttling_halves_the_rate() {
        let gate = gate(100, 1, 100);
        assert!((39..=42).contains(&n_within(&gate, 4).await));
        gate.throttled();
        assert!((19..=22).contains(&n_within(&gate, 4).await));
        gate.throttled();
        assert!((9..=12).contains(&n_within(&gate, 4).await));
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_that_come_together_halve_the_rate_once() {
        let gate = gate(100, 1, 100);
        for _ in 0..64 {
            gate.throttled();
        }
        assert!((19..=22).contains(&n_within(&gate, 4).await));
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_falls_no_further_than_one_in_two_seconds() {
        let gate = gate(100, 1, 100);
        for _ in 0..20 {
            gate.throttled();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        gate.throttled();
        n_within(&gate, 1).await;
        let wait = gate.wait_for_token(Priority::ScaleUp).unwrap();
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        assert_eq!(n_within(&gate, 4).await, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_rate_set_below_the_floor_is_not_raised() {
        let gate = gate(10_000, 1, 100);
        n_within(&gate, 1).await;
        gate.throttled();
        assert_eq!(n_within(&gate, 30).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_grows_by_a_tenth_every_five_calm_seconds() {
        let gate = gate(100, 1, 100);
        gate.throttled();
        let rate = |gate: &Gate| {
            gate.wait_for_token(Priority::ScaleUp);
            gate.lock().rate().unwrap()
        };
        tokio::time::advance(Duration::from_millis(4999)).await;
        assert!((rate(&gate) - 5.0).abs() < 1e-6);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!((rate(&gate) - 5.5).abs() < 1e-6);
        tokio::time::advance(Duration::from_secs(30)).await;
        // 5 × 1.1⁷ = 9.74, and with the eighth step it is what it was.
        assert!((rate(&gate) - 9.7436).abs() < 1e-3);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!((rate(&gate) - 10.0).abs() < 1e-6);
        assert!(gate.lock().slowed.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_limit_throttling_sets_one_until_it_is_over() {
        let gate = gate(0, 1, 100);
        assert!(gate.wait_for_token(Priority::ScaleUp).is_none());
        gate.throttled();
        assert!((39..=42).contains(&n_within(&gate, 4).await));
        tokio::time::advance(Duration::from_secs(60)).await;
        gate.wait_for_token(Priority::ScaleUp);
        assert_eq!(gate.lock().rate(), None);
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
