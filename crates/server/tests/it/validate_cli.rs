//! `nstance-server --validate`: everything wrong at once, each with its place and what to do, and an exit code.

use std::process::{Command, Output};

const TEN_MISTAKES: &str = r#"{
  "server": {
    "cluster_id": "Example",
    "shard": "dev-1",
    "provider": { "kind": "proces", "region": "dev", "zone": "deva" },
    "subnet_pools": { "local": ["loopback"] },
    "secrets": { "encryption_key": { "provider": "env" } },
    "leader_timeout": "3s",
    "default_drain_timeout": 5,
    "create_burst": 0,
  },
  "templates": {
    "tst": { "kind": "opr", "arch": "amd65", "subnet_pool": "local" },
  },
  "groups": { "default": { "test": { "template": "tts", "size": -1 } } },
  "template": {},
}
"#;

fn validate(text: &str, more: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.jsonc");
    std::fs::write(&path, text).unwrap();
    Command::new(env!("CARGO_BIN_EXE_nstance-server"))
        .arg(format!("--validate={}", path.display()))
        .args(more)
        .output()
        .unwrap()
}

#[test]
fn ten_mistakes_are_ten_errors_with_place_and_help() {
    let output = validate(TEN_MISTAKES, &[]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error[")).collect();
    assert_eq!(errors.len(), 10, "{text}");
    for error in errors {
        let (_, place) = error.rsplit_once(" (").unwrap();
        let (line, column) = place.trim_end_matches(')').split_once(':').unwrap();
        assert!(0 < line.parse::<u32>().unwrap() && 0 < column.parse::<u32>().unwrap(), "{error}");
    }
    assert_eq!(text.lines().filter(|line| line.starts_with("  help: ")).count(), 10, "{text}");
}

#[test]
fn json_report_holds_the_same_problems() {
    let output = validate(TEN_MISTAKES, &["--output", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["ok"], false);
    assert_eq!(report["problems"].as_array().unwrap().len(), 10, "{report}");
}

#[test]
fn a_good_config_needs_no_other_flag_and_exits_with_zero() {
    let output = validate(include_str!("../../../../examples/config-tmux.jsonc"), &[]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));
}
