//! The page of traps says which test proves what. A test that was renamed or removed, or a trap that was forgotten, is
//! noticed here.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// One line of a table: its number, the tests it names as (file, function), and what it says in its last cell.
struct Row {
    name: String,
    proofs: Vec<(String, String)>,
    left: String,
}

fn rows(page: &str) -> Vec<Row> {
    let cells = |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let numbered = |name: &str| name.len() > 1 && name[1..].bytes().all(|byte| byte.is_ascii_digit());
    page.lines()
        .filter(|line| line.starts_with("| "))
        .map(cells)
        .filter(|cells| cells.first().is_some_and(|name| numbered(name)))
        .map(|cells| Row {
            name: cells[0].clone(),
            proofs: cells.iter().flat_map(|cell| proofs(cell)).collect(),
            left: cells.last().cloned().unwrap_or_default(),
        })
        .collect()
}

/// What stands in backticks as `file::function`.
fn proofs(text: &str) -> Vec<(String, String)> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter_map(|it| it.split_once("::")).map(|(file, name)| (file.to_owned(), name.to_owned())).collect()
}

/// Whether a source has this function, as a test; the cases of a contract are plain functions.
fn has(source: &str, file: &str, name: &str) -> bool {
    let lines: Vec<_> = source.lines().map(str::trim).collect();
    let found = lines.iter().position(|line| line.contains(&format!("fn {name}(")));
    let is_test = |at: usize| {
        let above = lines[..at].iter().rev().take_while(|line| line.starts_with("#[") || line.starts_with("//"));
        above.into_iter().any(|line| line.starts_with("#[test]") || line.starts_with("#[tokio::test"))
    };
    match found {
        Some(at) => is_test(at) || file.contains("/contract"),
        None => false,
    }
}

fn missing(page: &str) -> Vec<String> {
    let mut sources: BTreeMap<String, String> = BTreeMap::new();
    let mut missing = Vec::new();
    for (file, name) in proofs(page) {
        let source =
            sources.entry(file.clone()).or_insert_with(|| fs::read_to_string(root().join(&file)).unwrap_or_default());
        if !has(source, &file, &name) {
            missing.push(format!("{file} has no test {name}"));
        }
    }
    missing
}

fn page() -> String {
    fs::read_to_string(root().join("docs/traps.md")).expect("docs/traps.md")
}

#[test]
fn every_test_that_the_page_names_exists() {
    let page = page();
    assert!(100 < proofs(&page).len(), "the page is not understood");
    let missing = missing(&page);
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn every_trap_and_every_recovery_has_its_row() {
    let names: Vec<_> = rows(&page()).into_iter().map(|row| row.name).collect();
    let traps = (1..=101).map(|n| format!("T{n:02}"));
    let recoveries = (1..=16).map(|n| format!("R{n:02}"));
    assert_eq!(names, traps.chain(recoveries).collect::<Vec<_>>());
}

#[test]
fn every_row_names_a_test_or_what_it_comes_with() {
    let parts = ["leadership", "agent", "operator", "admin", "provider"];
    for Row { name, proofs, left } in rows(&page()) {
        let later = left.strip_prefix("later: ").and_then(|it| it.split_whitespace().next());
        assert!(later.is_none_or(|part| parts.contains(&part)), "{name}: {left} is none of {parts:?}");
        assert!(!proofs.is_empty() || later.is_some(), "{name} names no test and nothing that it comes with");
    }
}

#[test]
fn every_directed_simulation_is_on_the_page() {
    let page = page();
    for file in ["crates/sim/tests/it/traps.rs", "crates/sim/tests/it/recovery.rs"] {
        let source = fs::read_to_string(root().join(file)).expect("a test file");
        let lines: Vec<_> = source.lines().collect();
        for pair in lines.windows(2).filter(|pair| pair[0] == "#[test]") {
            let name = pair[1].trim_start_matches("fn ").split('(').next().unwrap_or_default();
            assert!(page.contains(&format!("`{file}::{name}`")), "{file}::{name} is not on the page");
        }
    }
}

#[test]
fn a_test_that_is_not_there_is_noticed() {
    let line =
        "| T01 | x | `crates/dev/tests/it/trap_map.rs::no_such_test`, `crates/dev/tests/it/trap_map.rs::page` | |";
    assert_eq!(missing(line).len(), 2, "neither a missing function nor one that is no test");
    assert_eq!(missing("`crates/dev/tests/it/trap_map.rs::a_test_that_is_not_there_is_noticed`"), Vec::<String>::new());
}
