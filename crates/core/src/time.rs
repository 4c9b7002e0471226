//! Two kinds of time that must not mix: wall time for records and people, monotonic time for leases and deadlines.
//!
//! Wall clocks of two machines are never compared, and no safety rests on one.

use std::{fmt, ops, str::FromStr, time::Duration};

/// Wall time in UTC, to the millisecond. Written as RFC 3339.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    pub const EPOCH: Self = Self(0);

    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// How long ago `earlier` was; zero if it lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    pub fn plus(self, by: Duration) -> Self {
        Self(self.0.saturating_add(millis(by)))
    }

    pub fn minus(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(millis(by)))
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_millisecond(self.0) {
            Ok(timestamp) => write!(f, "{timestamp:.3}"),
            Err(_) => write!(f, "{}ms", self.0), // before or after all years that RFC 3339 can name
        }
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{value}` is not a time: expected RFC 3339 such as 2026-01-31T12:00:00.000Z")]
pub struct TimestampError {
    value: String,
}

impl FromStr for Timestamp {
    type Err = TimestampError;

    fn from_str(text: &str) -> Result<Self, TimestampError> {
        let millis = match text.parse::<jiff::Timestamp>() {
            Ok(timestamp) => Some(timestamp.as_millisecond()),
            Err(_) => beyond(text),
        };
        millis.map(Self).ok_or_else(|| TimestampError { value: text.to_owned() })
    }
}

/// A time that has no RFC 3339, as [`Timestamp`] writes it: what was stored must be read again, whatever it says.
fn beyond(text: &str) -> Option<i64> {
    let millis = text.strip_suffix("ms")?.parse().ok()?;
    jiff::Timestamp::from_millisecond(millis).is_err().then_some(millis)
}

/// A reading of this machine's monotonic clock, which counts suspended time too. Meaningless anywhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mono(Duration);

impl Mono {
    pub const fn from_start(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    pub const fn elapsed(self) -> Duration {
        self.0
    }

    /// Time from `earlier` to here; zero if it lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Moves back by `by`, stopping at the clock's start.
    pub fn minus(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by))
    }
}

impl ops::Add<Duration> for Mono {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_time_that_is_written_is_read_back(millis in any::<i64>(), days in -4_000_000_i64..4_000_000) {
            // Nearly all numbers lie beyond what people have a date for, so some that do not are tried too.
            for millis in [millis, days * 86_400_000 + millis % 86_400_000] {
                let at = Timestamp::from_millis(millis);
                prop_assert_eq!(at.to_string().parse::<Timestamp>(), Ok(at));
            }
        }
    }

    #[test]
    fn the_ends_of_time_are_read_back_and_nothing_else_is_a_number() {
        let ends = [jiff::Timestamp::MIN, jiff::Timestamp::MAX].map(|end| end.as_millisecond());
        let near = ends.iter().flat_map(|end| [end - 1, *end, end + 1]);
        for millis in near.chain([i64::MIN, i64::MAX, 0]) {
            let at = Timestamp::from_millis(millis);
            assert_eq!(at.to_string().parse::<Timestamp>(), Ok(at), "{at}");
        }
        for text in ["0ms", "1700000000007ms", "-9223372036854775809ms", "ms", "9223372036854775807"] {
            assert!(text.parse::<Timestamp>().is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_written_with_milliseconds_and_read_back() {
        let at = Timestamp::from_millis(1_700_000_000_007);
        assert_eq!(at.to_string(), "2023-11-14T22:13:20.007Z");
        assert_eq!(at.to_string().parse::<Timestamp>().unwrap(), at);
        assert_eq!("2023-11-14T23:13:20.007+01:00".parse::<Timestamp>().unwrap(), at);
        assert!("yesterday".parse::<Timestamp>().is_err());
    }
}
