//! How a step is measured: timed over and over, or merely made as often as somebody who counts wants it.

use std::time::Duration;

use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;

/// So long a case is repeated, and so often at least.
const WATCHED: Duration = Duration::from_secs(2);
const FEWEST: usize = 10;

/// Steps that are faster than this are timed in batches, or the clock itself would be what is measured.
const BATCH: Duration = Duration::from_micros(50);

#[derive(Clone, Copy)]
pub(crate) enum How {
    Time,
    /// Somebody counts from outside.
    Steps(u32),
}

pub(crate) struct Timed {
    /// Of one step, sorted.
    samples: Vec<Duration>,
    batch: u32,
}

impl Timed {
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "an index among thousands"
        )]
        let at = (share * (self.samples.len().saturating_sub(1)) as f64).round() as usize;
        self.samples.get(at).copied().unwrap_or_default()
    }

    pub(crate) fn n_steps(&self) -> u64 {
        u64::try_from(self.samples.len()).unwrap_or(u64::MAX).saturating_mul(u64::from(self.batch))
    }
}

/// Makes a step once to warm up, and then as `how` says. Answers nothing if somebody else counts: then no clock is read
/// either, for ours asks the kernel in a way that valgrind does not bear.
pub(crate) async fn measure(how: How, mut step: impl AsyncFnMut()) -> Option<Timed> {
    if let How::Steps(n) = how {
        for _ in 0..=n {
            step().await;
        }
        return None;
    }
    let began = SystemClock.monotonic();
    step().await;
    let once = SystemClock.monotonic().since(began);
    let batch = (BATCH.as_nanos() / once.as_nanos().max(1)).clamp(1, 1000);
    let batch = u32::try_from(batch).unwrap_or(1);
    let mut samples = Vec::new();
    let began = SystemClock.monotonic();
    while samples.len() < FEWEST || SystemClock.monotonic().since(began) < WATCHED {
        let before = SystemClock.monotonic();
        for _ in 0..batch {
            step().await;
        }
        samples.push(SystemClock.monotonic().since(before) / batch);
    }
    samples.sort_unstable();
    Some(Timed { samples, batch })
}

/// `I   refs:      1,234,567` among what valgrind says.
pub(crate) fn instructions(said: &str) -> Option<u64> {
    let line = said.lines().find_map(|line| line.split_once("refs:").filter(|(name, _)| name.contains(" I ")))?;
    line.1.trim().replace(',', "").parse().ok()
}

pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if 0 < n && (digits.len() - n).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(crate) fn time(nanos: u64) -> String {
    let time = Duration::from_nanos(nanos).as_secs_f64();
    if nanos < 1_000_000 { format!("{:.2} µs", time * 1e6) } else { format!("{:.2} ms", time * 1e3) }
}
