//! Small pieces of text that people read: spans of time, numbers of things.

use std::time::Duration;

use nstance_core::{ports::clock::Clock as _, time::Timestamp};
use nstance_rt::clock::SystemClock;

/// The time that ages are counted to.
pub fn now() -> Timestamp {
    SystemClock.now()
}

/// The two largest units: `12s`, `3m12s`, `2h5m`, `4d3h`.
pub fn span(it: Duration) -> String {
    let seconds = it.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let two = |large: u64, unit: char, small: u64, smaller: char| match small {
        0 => format!("{large}{unit}"),
        small => format!("{large}{unit}{small}{smaller}"),
    };
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => two(minutes, 'm', seconds % 60, 's'),
        (0, hours, minutes) => two(hours, 'h', minutes, 'm'),
        (days, hours, _) => two(days, 'd', hours, 'h'),
    }
}

/// How long ago; nothing where there is no time.
pub fn age(at: Option<&prost_types::Timestamp>, now: Timestamp) -> String {
    crate::view::time(at).map(|at| span(now.since(at))).unwrap_or_default()
}

/// How much is left until then.
pub fn left(until: Option<&prost_types::Timestamp>, now: Timestamp) -> String {
    crate::view::time(until).map(|until| span(until.since(now))).unwrap_or_default()
}

/// Minutes and seconds on a running clock.
pub fn clock(it: Duration) -> String {
    format!("{:02}:{:02}", it.as_secs() / 60, it.as_secs() % 60)
}

/// `1 instance`, `2 instances`.
pub fn count(n: impl TryInto<i64>, what: &str) -> String {
    let n = n.try_into().unwrap_or(i64::MAX);
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_show_their_two_largest_units() {
        let spans = [0, 59, 60, 192, 3600, 7500, 86_400, 356_400].map(|it| span(Duration::from_secs(it)));
        assert_eq!(spans, ["0s", "59s", "1m", "3m12s", "1h", "2h5m", "1d", "4d3h"]);
        assert_eq!(clock(Duration::from_secs(77)), "01:17");
        assert_eq!(count(1, "event"), "1 event");
        assert_eq!(count(12_u64, "event"), "12 events");
    }
}
