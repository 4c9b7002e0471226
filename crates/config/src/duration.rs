//! Durations as people write them: `"90s"`, `"1h30m"`, `"21d"`.

use std::time::Duration;

/// Longest duration in a config. Ten years is longer than anything here should wait, and keeps arithmetic far from
/// overflow.
pub const MAX: Duration = Duration::from_secs(3650 * 24 * 3600);

const UNITS: [(&str, u128); 6] = [
    // `ms` stands before `m`: the longest unit that fits is taken.
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60 * 1_000_000_000),
    ("h", 3600 * 1_000_000_000),
    ("d", 24 * 3600 * 1_000_000_000),
    ("w", 7 * 24 * 3600 * 1_000_000_000),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    #[error("a duration is one or more numbers with their units, such as \"90s\", \"1h30m\" or \"21d\"")]
    Form,
    #[error("a duration needs a unit: ms, s, m, h, d or w")]
    Unit,
    #[error("a duration is at most 3650d")]
    TooLong,
}

/// Reads a duration. Signs, spaces and unknown units are refused.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let mut rest = text;
    let mut nanos: u128 = 0;
    while {
        let (number, after) = number(rest)?;
        let (unit, after) = UNITS
            .iter()
            .find_map(|(name, nanos)| Some((*nanos, after.strip_prefix(name)?)))
            .ok_or(if after.is_empty() { DurationError::Unit } else { DurationError::Form })?;
        nanos = number.times(unit).and_then(|it| nanos.checked_add(it)).ok_or(DurationError::TooLong)?;
        rest = after;
        !rest.is_empty()
    } {}
    let duration = u64::try_from(nanos).map(Duration::from_nanos).map_err(|_| DurationError::TooLong)?;
    if duration <= MAX { Ok(duration) } else { Err(DurationError::TooLong) }
}

/// Digits with an optional fraction, kept exact.
struct Decimal {
    digits: u128,
    scale: u128,
}

impl Decimal {
    fn times(&self, unit: u128) -> Option<u128> {
        Some(self.digits.checked_mul(unit)? / self.scale)
    }
}

fn number(text: &str) -> Result<(Decimal, &str), DurationError> {
    let whole = text.bytes().take_while(u8::is_ascii_digit).count();
    let (whole, mut rest) = text.split_at(whole);
    let mut fraction = "";
    if let Some(after) = rest.strip_prefix('.') {
        let length = after.bytes().take_while(u8::is_ascii_digit).count();
        (fraction, rest) = after.split_at(length);
        if fraction.is_empty() {
            return Err(DurationError::Form);
        }
    }
    if whole.is_empty() {
        return Err(DurationError::Form);
    }
    // Past nanoseconds of a week nothing changes any more; without the cut a long fraction would overflow.
    let fraction = &fraction[..fraction.len().min(15)];
    let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| DurationError::TooLong)?;
    Ok((Decimal { digits, scale: (0..fraction.len()).fold(1, |scale, _| scale * 10) }, rest))
}

/// Writes a duration in the largest units that are exact: `1h30m`, `24h`, `500ms`.
pub fn format(duration: Duration) -> String {
    let mut millis = duration.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    let mut out = String::new();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)] {
        if size <= millis {
            out.push_str(&format!("{}{unit}", millis / size));
            millis %= size;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_sums_of_numbers_with_units() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("21d", 21 * 86_400_000),
            ("500ms", 500),
            ("1.5h", 5_400_000),
            ("1m1ms", 60_001),
            ("2w", 14 * 86_400_000),
            ("3650d", 3650 * 86_400_000),
            ("0.0000000000000000001w", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for (text, error) in [
            ("", DurationError::Form),
            ("5", DurationError::Unit),
            ("5m3", DurationError::Unit),
            ("-5s", DurationError::Form),
            ("+5s", DurationError::Form),
            ("5 s", DurationError::Form),
            (" 5s", DurationError::Form),
            ("5y", DurationError::Form),
            ("5S", DurationError::Form),
            (".5s", DurationError::Form),
            ("5.s", DurationError::Form),
            ("3651d", DurationError::TooLong),
            ("99999999999999999999999999999999999999999999d", DurationError::TooLong),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_written_duration_reads_back(millis in 0_u64..315_360_000_000) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse(&format(duration)), Ok(duration));
        }

        #[test]
        fn no_text_upsets_the_reader(text in ".{0,60}|[0-9.]{0,60}[a-z]{0,3}") {
            let _ = parse(&text);
        }
    }
}
