//! Who gives a flag its value: the command line, else the environment, else the file of defaults; also where two flags
//! exclude each other.

use std::{fs, process::Command};

use serde_json::Value;
use tempfile::TempDir;

/// What `--shard` and `--all-shards` come out as, each with its source; or the exit code.
fn chosen(words: &str, variables: &[(&str, &str)], file: &str) -> Result<[String; 2], i32> {
    let temp = TempDir::new().unwrap();
    fs::write(temp.path().join("admin.yaml"), file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_nstance-admin"));
    command.env_clear().env("NSTANCE_TEMP_DIR", temp.path()).envs(variables.iter().copied());
    let output = command.args(["env", "-o", "json"]).args(words.split_whitespace()).output().unwrap();
    if !output.status.success() {
        return Err(output.status.code().unwrap());
    }
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    Ok(["shard", "all-shards"].map(|flag| {
        let it = shown["flags"].as_array().unwrap().iter().find(|it| it["flag"] == flag);
        it.map_or("-".to_owned(), |it| format!("{}, {}", it["value"].as_str().unwrap(), it["from"].as_str().unwrap()))
    }))
}

#[test]
fn the_nearer_source_wins_where_two_flags_exclude_each_other() {
    let shard = [("NSTANCE_SHARD", "dev-1")];
    let all = [("NSTANCE_ALL_SHARDS", "true")];
    let off = [("NSTANCE_ALL_SHARDS", "false")];
    let both = [("NSTANCE_SHARD", "dev-1"), ("NSTANCE_ALL_SHARDS", "false")];
    for (words, variables, file, expected) in [
        ("", &shard[..], "", ["dev-1, environment", "false, default"]),
        ("--all-shards", &shard, "", ["-", "true, command line"]),
        ("--all-shards", &[], "shard: dev-2\n", ["-", "true, command line"]),
        ("--all-shards", &shard, "shard: dev-2\n", ["-", "true, command line"]),
        ("--shard=dev-3", &all, "", ["dev-3, command line", "false, default"]),
        ("--shard dev-3", &off, "", ["dev-3, command line", "false, default"]),
        ("--shard dev-3", &shard, "shard: dev-2\n", ["dev-3, command line", "false, default"]),
        ("", &all, "shard: dev-2\n", ["-", "true, environment"]),
        ("", &shard, "all-shards: true\n", ["dev-1, environment", "false, default"]),
        ("", &both, "", ["dev-1, environment", "false, default"]),
    ] {
        let found = chosen(words, variables, file);
        assert_eq!(found, Ok(expected.map(str::to_owned)), "{words:?} {variables:?} {file:?}");
    }
}

#[test]
fn flags_of_one_source_that_exclude_each_other_are_refused() {
    assert_eq!(chosen("--shard dev-1 --all-shards", &[], ""), Err(64));
    assert_eq!(chosen("", &[("NSTANCE_SHARD", "dev-1"), ("NSTANCE_ALL_SHARDS", "true")], ""), Err(64));
}

/// What a command that has no identity says, cause and all.
fn refused(words: &[&str], variables: &[(&str, &str)], file: &str) -> String {
    let temp = TempDir::new().unwrap();
    fs::write(temp.path().join("admin.yaml"), file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_nstance-admin"));
    command.env_clear().env("NSTANCE_TEMP_DIR", temp.path()).envs(variables.iter().copied());
    let output = command.args(["group", "list", "--servers", "dev-1=127.0.0.1:1"]).args(words).output().unwrap();
    assert_eq!(output.status.code(), Some(6));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn causes_are_shown_one_by_one_wherever_debug_comes_from() {
    assert!(!refused(&[], &[], "").contains("  cause: "));
    assert!(refused(&["--debug"], &[], "").contains("  cause: "));
    assert!(refused(&[], &[("NSTANCE_DEBUG", "true")], "").contains("  cause: "));
    assert!(refused(&[], &[], "debug: true\n").contains("  cause: "));
    assert!(!refused(&[], &[("NSTANCE_DEBUG", "false")], "debug: true\n").contains("  cause: "));
}
