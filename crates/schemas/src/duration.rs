//! Durations as people write them in options: `90s`, `1h30m`, `500ms`. The grammar is that of the whole config.

use std::time::Duration;

use nstance_core::value::Value;

const LONGEST: Duration = Duration::from_secs(3650 * 86_400);

/// What the schema tells a person who wrote something else.
pub const EXPECTED: &str = "a duration such as \"500ms\" or \"1m30s\"";

/// Reads a duration: one or more `<number><unit>`, summed; zero may go without a unit.
pub fn parse(value: &Value) -> Option<Duration> {
    match value {
        Value::Int(0) => Some(Duration::ZERO),
        Value::String(text) => parse_text(text),
        _ => None,
    }
}

fn parse_text(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut rest, mut total) = (text, 0.0_f64);
    while !rest.is_empty() {
        let digits = rest.find(|it: char| !it.is_ascii_digit() && it != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        let after = &rest[digits..];
        let letters = after.find(|it: char| !it.is_ascii_alphabetic()).unwrap_or(after.len());
        total += number * seconds_of(&after[..letters])?;
        rest = &after[letters..];
    }
    let total = (!text.is_empty()).then(|| Duration::try_from_secs_f64(total).ok()).flatten()?;
    (total <= LONGEST).then_some(total)
}

fn seconds_of(unit: &str) -> Option<f64> {
    Some(match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "w" => 604_800.0,
        _ => return None,
    })
}

/// Writes a duration so that [`parse`] and the agent read it back, to the millisecond.
pub fn text(duration: Duration) -> String {
    let millis = duration.as_millis();
    if millis.is_multiple_of(1000) { format!("{}s", millis / 1000) } else { format!("{millis}ms") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_people_write_them() {
        for (written, millis) in
            [("0", 0), ("0s", 0), ("500ms", 500), ("1.5s", 1500), ("1h30m", 5_400_000), ("1d", 86_400_000)]
        {
            let read = parse(&Value::from(written)).unwrap();
            assert_eq!(read, Duration::from_millis(millis), "{written}");
            assert_eq!(parse(&Value::String(text(read))), Some(read), "{written}");
        }
        for bad in ["", "5", "s", "-1s", "1 s", "1y", "1s2", ".s", "99999w"] {
            assert_eq!(parse(&Value::from(bad)), None, "{bad:?}");
        }
        assert_eq!(parse(&Value::Int(0)), Some(Duration::ZERO));
        assert_eq!(parse(&Value::Int(5)), None, "a bare number asks for its unit");
    }
}
