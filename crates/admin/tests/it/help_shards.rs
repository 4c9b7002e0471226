//! What the shard commands say about themselves, and about wrong words: without any shard.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use expect_test::{expect, expect_file};
use tempfile::TempDir;

/// Everything a run says, with its exit code. Nothing of the machine gets in.
fn run(temp: &Path, words: &[&str], input: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nstance-admin"));
    command.args(words).env_clear().env("COLUMNS", "100").env("XDG_STATE_HOME", temp).current_dir(temp);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Most commands read nothing and may be gone already.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let said = said.replace(temp.to_str().unwrap(), "<temp>");
    let said: String = said.lines().map(|line| format!("{}\n", line.trim_end())).collect();
    let code = output.status.code().map_or("none".to_owned(), |it| it.to_string());
    format!("$ nstance-admin {}\n{said}[exit {code}]\n", words.join(" "))
}

fn run_all(lines: &[&str], shown: fn(&str) -> String) -> String {
    let temp = TempDir::new().unwrap();
    let runs = lines.iter().map(|line| run(temp.path(), &line.split_whitespace().collect::<Vec<_>>(), ""));
    runs.map(|said| shown(&said)).collect::<Vec<_>>().join("\n")
}

/// Without the flags that all commands share, which would be the same thirty times.
fn own_part(said: &str) -> String {
    let shared = said.find("\nShards:\n").or_else(|| said.find("\nCommon:\n"));
    let own = &said[..shared.unwrap_or(said.len())];
    assert!(said.ends_with("[exit 0]\n"), "{said}");
    own.to_owned()
}

#[test]
fn every_shard_command_explains_itself() {
    let commands = [
        "config --help",
        "config status --help",
        "config refresh --help",
        "config validate --help",
        "config diff --help",
        "group --help",
        "group list --help",
        "group create --help",
        "group scale --help",
        "group set --help",
        "group status --help",
        "group delete --help",
        "instance --help",
        "instance list --help",
        "instance show --help",
        "instance create --help",
        "instance delete --help",
        "instance replace --help",
        "instance drain --help",
        "instance ack --help",
        "instance why --help",
        "drains --help",
        "drains watch --help",
        "plan --help",
        "explain --help",
        "explain group --help",
        "explain instance --help",
        "events --help",
        "top --help",
    ];
    expect_file!["help_shards.txt"].assert_eq(&run_all(&commands, own_part));
}

#[test]
fn wrong_words_are_told_with_what_was_expected() {
    let wrong = [
        "group scale web",
        "group scale web -1",
        "group scale web 640001 --total",
        "group scale web 3",
        "group scale web 3 --servers dev-1",
        "group scale web 3 --shard dev-1 --all-shards",
        "group scale web 3 --wait --dry-run",
        "group create web",
        "group create web --template tst --var nonsense",
        "group set web",
        "group set web --unset colour",
        "group set web --var A=1 --unset vars",
        "group paint",
        "instance list --state broken",
        "instance create",
        "instance delete",
        "plan --size web",
        "plan --size web=-1",
        "explain",
        "explain planet mars",
        "events --since yesterday",
        "events --min-severity loud",
        "drains watch",
        // On a pipe.
        "top",
        "config validate",
        "config validate nowhere.jsonc",
        "config diff nowhere.jsonc",
        "group list --servers dev-1=127.0.0.1:1",
        "group list --servers dev-1=127.0.0.1:1 -o xml",
    ];
    expect_file!["usage_shards.txt"].assert_eq(&run_all(&wrong, str::to_owned));
}

#[test]
fn config_is_checked_without_any_server() {
    let temp = TempDir::new().unwrap();
    let example = include_str!("../../../../examples/config-tmux.jsonc");
    let good = run(temp.path(), &["config", "validate", "-"], example);
    expect![[r#"
        $ nstance-admin config validate -
        stdin: valid, 0 warnings
        note: the live groups were not looked at; add --shard NAME to have its server check the file against them
        [exit 0]
    "#]]
    .assert_eq(&good);
    let bad = example.replace("\"template\": \"tst\", \"size\": 2", "\"template\": \"tsx\", \"sise\": 2");
    assert_ne!(bad, example);
    let table = run(temp.path(), &["config", "validate", "-"], &bad);
    expect![[r#"
        $ nstance-admin config validate -
        stdin:30:50: error[bad-reference] groups.default.test.template: template `tsx` does not exist (did you mean `tst`? templates: tst)
        stdin:30:57: error[unknown-key] groups.default.test.sise: unknown key `sise` (did you mean `size`?)
        stdin: 2 errors, 0 warnings
        [exit 1]
    "#]].assert_eq(&table);
    let json = run(temp.path(), &["config", "validate", "-", "-o", "json"], &bad);
    expect![[r#"
        $ nstance-admin config validate - -o json
        {
          "file": "stdin",
          "valid": false,
          "problems": [
            {
              "severity": "error",
              "code": "bad-reference",
              "path": "groups.default.test.template",
              "line": 30,
              "column": 50,
              "message": "template `tsx` does not exist",
              "suggestion": "did you mean `tst`? templates: tst"
            },
            {
              "severity": "error",
              "code": "unknown-key",
              "path": "groups.default.test.sise",
              "line": 30,
              "column": 57,
              "message": "unknown key `sise`",
              "suggestion": "did you mean `size`?"
            }
          ],
          "errors": []
        }
        [exit 1]
    "#]]
    .assert_eq(&json);
}
