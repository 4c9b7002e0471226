//! Times as HTTP writes them, which two clouds use in their answers.

use nstance_core::time::Timestamp;

const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// `Sat, 31 Jan 2026 12:02:00 GMT`, with or without the day of the week, which is not checked.
pub(crate) fn parse_date(text: &str) -> Option<Timestamp> {
    let text = text.split_once(", ").map_or(text, |(_, rest)| rest);
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    let [day, month, year, time, "GMT" | "UTC"] = fields.as_slice() else { return None };
    let month = MONTHS.iter().position(|name| name.eq_ignore_ascii_case(month))? + 1;
    let day: u8 = day.parse().ok()?;
    // The reader of RFC 3339 knows how long months are.
    format!("{year}-{month:02}-{day:02}T{time}Z").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_with_and_without_the_day_of_the_week() {
        let at = Some(Timestamp::from_millis(1_769_860_920_000));
        assert_eq!(parse_date("Sat, 31 Jan 2026 12:02:00 GMT"), at);
        assert_eq!(parse_date("31 Jan 2026 12:02:00 GMT"), at);
        assert_eq!(parse_date("Sun, 01 Feb 2026 00:00:00 UTC").unwrap().to_string(), "2026-02-01T00:00:00.000Z");
        for bad in ["", "soon", "31 Foo 2026 12:02:00 GMT", "30 Feb 2026 12:02:00 GMT", "31 Jan 2026 12:02:00 CET"] {
            assert_eq!(parse_date(bad), None, "{bad}");
        }
    }
}
