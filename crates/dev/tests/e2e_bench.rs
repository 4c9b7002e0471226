//! The load generator, as a person runs it, with few agents: what it finds is plausible, and nothing of it stays.

#![allow(clippy::unwrap_used, reason = "a test that fails is a failed test")]

#[path = "it/e2e_common/mod.rs"]
mod e2e_common;

use std::{fs, path::Path};

use e2e_common::DEV;
use serde_json::Value;
use tokio::process::Command;

/// Runs `bench load` with a small number of agents and a directory for temporary files of its own.
async fn bench(temp: &Path, args: &[&str]) -> (bool, String) {
    e2e_common::binaries();
    let mut command = Command::new(DEV);
    command.args(["bench", "load", "--agents", "20", "--group-size", "8", "--interval", "2s", "--singles", "3"]);
    command.args(args);
    let output = command.env("TMPDIR", temp).output().await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), format!("{}{}", text(&output.stdout), text(&output.stderr)))
}

fn number(run: &Value, key: &str) -> f64 {
    run[key].as_f64().unwrap_or_else(|| panic!("{key} in {run:#}"))
}

#[tokio::test]
async fn load_is_measured_and_leaves_nothing_behind() {
    let temp = tempfile::tempdir().unwrap();
    let json = temp.path().join("found.json");
    let (ok, text) = bench(temp.path(), &["--for", "5s", "--json", json.to_str().unwrap()]).await;
    assert!(ok, "{text}");
    assert!(text.contains("storm: all registered, s"), "{text}");
    let found: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let run = &found["runs"][0];
    assert_eq!((run["agents"].as_u64(), run["groups"].as_u64()), (Some(20), Some(3)));
    // A machine that has no time breaks sessions, and with them what was on its way.
    if run["sessions_reopened"] == 0 {
        assert_eq!(run["reports_missed"], 0, "{run:#}");
    }
    for key in [
        "scale_up_s",
        "register_s",
        "furnish_s",
        "rss_mib",
        "reports_per_s",
        "flood_reports_per_s",
        "cpu_ms_per_1000_reports",
        "store_requests_per_hour",
        "certificates_per_s",
        "cold_start_s",
    ] {
        assert!(0.0 < number(run, key), "{key} in {run:#}");
    }
    // Of twenty, bursts of 100 and of 50 are left out: that many at once would be most of them.
    for (key, at_once) in [("losses", &[1][..]), ("notices", &[1])] {
        let spreads = run[key].as_array().unwrap();
        let found: Vec<u64> = spreads.iter().filter_map(|it| it["at_once"].as_u64()).collect();
        assert_eq!(found, at_once, "{key}");
        assert_eq!(spreads[0]["samples"], 3);
        assert!(number(&spreads[0], "p50_ms") <= number(&spreads[0], "max_ms"));
    }
    let left: Vec<_> = fs::read_dir(temp.path()).unwrap().flatten().map(|it| it.file_name()).collect();
    assert_eq!(left, ["found.json"]);
}

#[tokio::test]
async fn a_limit_that_is_missed_is_named_and_fails_the_run() {
    let temp = tempfile::tempdir().unwrap();
    let (ok, text) = bench(temp.path(), &["--for", "1s", "--max-rss-mib", "20=1", "--max-rss-mib", "30=1"]).await;
    assert!(!ok, "{text}");
    let missed: Vec<&str> = text.lines().filter(|line| line.starts_with("missed: ")).collect();
    assert!(matches!(missed[..], [line] if line.contains("20 agents") && line.ends_with("at most 1")), "{text}");
}

#[tokio::test]
async fn a_run_that_takes_too_long_is_ended_and_cleaned_up() {
    let temp = tempfile::tempdir().unwrap();
    let (ok, text) = bench(temp.path(), &["--max-time", "1s", "--for", "1h"]).await;
    assert!(!ok && text.contains("give a longer --max-time"), "{text}");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "{text}");
}
