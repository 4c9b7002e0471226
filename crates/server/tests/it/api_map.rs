//! `docs/api-tests.md` names tests that exist, a good case for every call, and every reason that the code knows.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    fs::read_to_string(root().join("docs/api-tests.md")).unwrap()
}

/// What stands between backticks.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Rows with their cells.
fn rows(page: &str) -> Vec<Vec<&str>> {
    let cells = |line: &str| -> usize { line.matches('|').count() };
    let rows = page.lines().filter(|line| line.starts_with('|') && !line.starts_with("|---") && 2 < cells(line));
    rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
}

fn sources(dir: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(fs::read_to_string(path).unwrap());
        }
    }
}

/// The text of a test, named as `file::name`.
fn body(test: &str) -> String {
    let (file, name) = test.split_once("::").unwrap();
    let path = root().join(format!("crates/server/tests/it/{file}.rs"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{test}: {error}"));
    let find = |keyword: &str| text.split_once(&format!("test]\n{keyword}fn {name}() {{\n"));
    let (_, rest) = find("async ").or_else(|| find("")).unwrap_or_else(|| panic!("there is no test {test}"));
    rest.split("\n}\n").next().unwrap().to_owned()
}

fn is_reason(text: &str) -> bool {
    text.contains('_') && text.chars().all(|c| c.is_ascii_uppercase() || c == '_') && !text.starts_with("CARGO_")
}

#[test]
fn every_test_that_the_page_names_exists_and_shows_its_reason() {
    let page = page();
    let mut n_tests = 0;
    for row in rows(&page) {
        let tests: Vec<&str> = row.iter().flat_map(|cell| quoted(cell)).filter(|it| it.contains("::")).collect();
        n_tests += tests.len();
        let bodies: Vec<String> = tests.iter().map(|test| body(test)).collect();
        if row.len() < 3 {
            continue; // among those that are not shown
        }
        for reason in quoted(row[1]).into_iter().filter(|it| is_reason(it)) {
            let shown = bodies.iter().any(|body| body.contains(&format!("\"{reason}\"")));
            assert!(shown, "{reason} of {} is not in {tests:?}", row[0]);
        }
    }
    assert!(60 < n_tests, "{n_tests}");
}

#[test]
fn every_call_has_a_good_case() {
    let page = page();
    let rows = rows(&page);
    let proto = root().join("crates/proto/proto/nstance/v1");
    let mut n_calls = 0;
    for service in ["registration", "operator", "agent"] {
        let text = fs::read_to_string(proto.join(format!("{service}.proto"))).unwrap();
        for call in text.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next()) {
            n_calls += 1;
            let qualified = format!("{}Service.{call}", service[..1].to_uppercase() + &service[1..]);
            let names = |cell: &str| cell.split(", ").any(|it| it == call || it == qualified);
            let is_good = |answer: &str| answer.starts_with("OK") || answer.starts_with("UNIMPLEMENTED");
            assert!(rows.iter().any(|row| names(row[0]) && is_good(row[1])), "{qualified} has no good case");
        }
    }
    assert_eq!(n_calls, 25);
}

#[test]
fn every_reason_is_on_the_page() {
    let page = page();
    let told: BTreeSet<&str> = quoted(&page).into_iter().collect();
    let mut found = Vec::new();
    for dir in ["grpc", "service", "watch"] {
        sources(&root().join("crates/server/src").join(dir), &mut found);
    }
    for file in ["peer", "nonce"] {
        found.push(fs::read_to_string(root().join(format!("crates/identity/src/{file}.rs"))).unwrap());
    }
    let mut n_reasons = 0;
    for text in &found {
        for reason in text.split('"').filter(|it| is_reason(it)) {
            n_reasons += 1;
            assert!(told.contains(reason), "{reason} is not in docs/api-tests.md");
        }
    }
    assert!(40 < n_reasons, "{n_reasons}");
}
