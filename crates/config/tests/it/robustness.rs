//! No bytes, however wrong, upset a load; and what it says about them is consistent.

use nstance_config::{Checks, load};
use nstance_schemas::ALL;
use proptest::prelude::*;

const AWS: &str = include_str!("../../../../examples/config-aws.jsonc");

fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    let loaded = load("any", bytes, &Checks::offline(ALL));
    prop_assert_eq!(loaded.config.is_some(), loaded.report.is_ok());
    let n_lines = bytes.split(|byte| *byte == b'\n').count();
    for problem in &loaded.report.problems {
        let line = usize::try_from(problem.line).unwrap_or(usize::MAX);
        prop_assert!(1 <= line && line <= n_lines && 1 <= problem.column, "{}", problem);
    }
    let (_, _) = (loaded.report.text(), loaded.report.json());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn arbitrary_bytes_are_only_ever_reported(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        check(&bytes)?;
    }

    #[test]
    fn a_damaged_example_is_only_ever_reported(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            Just(""), Just("{"), Just("}"), Just("\""), Just(","), Just("{{"), Just("}}"), Just("null"), Just("-1"), Just("[]"), Just("x"),
        ], 0_usize..4), 1..4)
    ) {
        let mut bytes = AWS.as_bytes().to_vec();
        for (at, insert, n_cut) in edits {
            let at = at.index(bytes.len());
            let end = bytes.len().min(at + n_cut);
            bytes.splice(at..end, insert.bytes());
        }
        check(&bytes)?;
    }
}

/// What stands at one value must not decide whether the whole file is understood.
#[test]
fn every_scalar_of_an_example_may_be_of_any_type() {
    let starts: Vec<usize> = AWS.match_indices(": ").map(|(at, _)| at + 2).collect();
    for start in starts {
        let rest = &AWS[start..];
        let length = match rest.as_bytes()[0] {
            b'"' => rest[1..].find('"').map_or(0, |end| end + 2),
            b'0'..=b'9' => rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(0),
            _ => continue,
        };
        for other in ["null", "true", "-7", "1.5", "\"\"", "\"{{ .Nope }}\"", "[]", "[null, 1]", "{}", "{ \"a\": 1 }"] {
            let text = format!("{}{other}{}", &AWS[..start], &rest[length..]);
            let loaded = load("any", text.as_bytes(), &Checks::offline(ALL));
            assert_eq!(loaded.config.is_some(), loaded.report.is_ok());
        }
    }
}
