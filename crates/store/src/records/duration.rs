//! Durations as people write them in configs: `90s`, `1h30m`, `21d`.

use std::time::Duration;

const UNITS: [(&str, u64); 6] =
    [("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// One or more of number and unit, summed. Decimals are allowed; `0` needs no unit.
pub(super) fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text;
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|it: char| !it.is_ascii_digit() && it != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|it: char| !it.is_ascii_lowercase()).unwrap_or(rest.len());
        let (_, millis) = UNITS.iter().find(|(unit, _)| *unit == &rest[..letters])?;
        #[expect(clippy::cast_precision_loss, reason = "units are small whole numbers")]
        let millis = *millis as f64;
        total += number * millis;
        rest = &rest[letters..];
    }
    (!text.is_empty()).then(|| Duration::try_from_secs_f64(total / 1000.0).ok())?.map(whole)
}

/// Records hold milliseconds; a decimal must not become a drift of nanoseconds.
fn whole(duration: Duration) -> Duration {
    Duration::from_millis(u64::try_from((duration.as_nanos() + 500_000) / 1_000_000).unwrap_or(u64::MAX))
}

/// The largest unit that says it exactly.
pub(super) fn format(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 {
        return "0s".to_owned();
    }
    let (unit, size) = UNITS.iter().find(|(_, size)| millis.is_multiple_of(*size)).unwrap_or(&("ms", 1));
    format!("{}{unit}", millis / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_documented_and_write_back() {
        for (text, millis) in [
            ("90s", 90_000),
            ("1h30m", 5_400_000),
            ("21d", 1_814_400_000),
            ("1.5h", 5_400_000),
            ("100ms", 100),
            ("0", 0),
        ] {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
        }
        for bad in ["", "5", "-5m", "5 m", "m", "5x", "5m5", ".", "1..5s"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        for text in ["90s", "90m", "3w", "100ms", "0s", "1500ms"] {
            assert_eq!(format(parse(text).unwrap()), text);
        }
    }
}
