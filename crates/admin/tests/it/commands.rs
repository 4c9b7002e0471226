//! Commands that need neither shards nor a bucket, run as they are run.

use std::{collections::BTreeSet, fs, process::Command};

use expect_test::expect_file;
use serde_json::Value;
use tempfile::TempDir;

struct Ran {
    code: i32,
    out: String,
    err: String,
}

/// Nothing of the machine gets in.
fn run(temp: &TempDir, words: &str) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nstance-admin"));
    command.env_clear().env("COLUMNS", "100").env("NSTANCE_TEMP_DIR", temp.path()).current_dir(temp.path());
    let output = command.args(words.split_whitespace()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap().replace(temp.path().to_str().unwrap(), "<temp>");
    Ran { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn version_is_told_with_and_without_servers_and_identity() {
    let temp = TempDir::new().unwrap();
    let ours = env!("CARGO_PKG_VERSION");
    let told = run(&temp, "version");
    assert_eq!((told.code, told.err.as_str()), (0, ""));
    assert!(told.out.contains("nstance-admin") && told.out.contains(ours), "{}", told.out);
    assert_eq!(run(&temp, "--version").out, format!("nstance-admin {ours}\n"));
    // No identity: servers cannot be asked, and that is no failure.
    let told = run(&temp, "version --servers dev-1=127.0.0.1:1 -o json");
    assert_eq!(told.code, 0, "{}", told.err);
    let document: Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!((&document["client"], document["servers"].as_array().unwrap().len()), (&ours.into(), 0));
    assert!(
        told.err.contains("note: servers were not asked: read <temp>/cli-operator-identity/ca.crt"),
        "{}",
        told.err
    );
    assert!(told.err.contains("next: nstance-admin cluster register-operator"), "{}", told.err);
}

#[test]
fn completion_is_a_script_that_a_shell_can_read() {
    let temp = TempDir::new().unwrap();
    for shell in ["bash", "zsh", "fish", "powershell"] {
        let told = run(&temp, &format!("completion {shell}"));
        assert_eq!((told.code, told.err.as_str()), (0, ""), "{shell}");
        assert!(told.out.contains("nstance-admin") && told.out.contains("COMPLETE"), "{shell}: {}", told.out);
    }
    assert_eq!(run(&temp, "completion tcsh").code, 64);
    // Only if there is one to ask.
    let script = temp.path().join("script");
    fs::write(&script, run(&temp, "completion bash").out).unwrap();
    if let Ok(read) = Command::new("bash").arg("-n").arg(&script).output() {
        assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let temp = TempDir::new().unwrap();
    let told = run(&temp, "man --dir pages");
    assert_eq!((told.code, told.out.as_str()), (0, ""), "{}", told.err);
    let pages = fs::read_dir(temp.path().join("pages")).unwrap().map(|it| it.unwrap().file_name());
    let pages: BTreeSet<String> = pages.map(|it| it.into_string().unwrap()).collect();
    for page in ["nstance-admin.1", "nstance-admin-group-scale.1", "nstance-admin-cluster-restore.1"] {
        assert!(pages.contains(page), "{pages:?}");
        let text = fs::read_to_string(temp.path().join("pages").join(page)).unwrap();
        assert!(text.starts_with(".TH NSTANCE-ADMIN") && text.contains(".SH OPTIONS"), "{text}");
    }
    assert_eq!(told.err, format!("{} pages in pages\n", pages.len()));
    let scale = fs::read_to_string(temp.path().join("pages/nstance-admin-group-scale.1")).unwrap();
    assert_eq!(run(&temp, "man group scale").out, scale, "printed it is the same");
    assert_eq!(run(&temp, "man group paint").code, 64);
}

#[test]
fn commands_that_nobody_else_shows_explain_themselves() {
    let temp = TempDir::new().unwrap();
    let words = [
        "--help",
        "shards --help",
        "version --help",
        "env --help",
        "completion --help",
        "man --help",
        "cluster doctor --help",
        "cluster restore --help",
    ];
    let said = words.map(|words| {
        let told = run(&temp, words);
        assert_eq!((told.code, told.err.as_str()), (0, ""), "{words}");
        let lines: String = told.out.lines().map(|it| format!("{}\n", it.trim_end())).collect();
        format!("$ nstance-admin {words}\n{lines}")
    });
    expect_file!["help_rest.txt"].assert_eq(&said.join("\n"));
}
