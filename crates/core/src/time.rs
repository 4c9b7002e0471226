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
            Err(_) => write!(f, "{}ms", self.0), // beyond year 9999, where RFC 3339 ends
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
        text.parse::<jiff::Timestamp>()
            .map(|timestamp| Self(timestamp.as_millisecond()))
            .map_err(|_| TimestampError { value: text.to_owned() })
    }
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
    use super::*;

    #[test]
    fn times_are_written_with_milliseconds_and_read_back() {
        let at = Timestamp::from_millis(1_700_000_000_007);
        assert_eq!(at.to_string(), "2023-11-14T22:13:20.007Z");
        assert_eq!(at.to_string().parse::<Timestamp>().unwrap(), at);
        assert_eq!("2023-11-14T23:13:20.007+01:00".parse::<Timestamp>().unwrap(), at);
        assert!("yesterday".parse::<Timestamp>().is_err());
    }
}
