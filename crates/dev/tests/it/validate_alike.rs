//! Server and admin tool find the same in a config, whichever provider it names.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

use crate::e2e_common::{DEV, binaries};

fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|it| it.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|it| it.extension().is_some_and(|it| it == "jsonc")).collect();
    files.sort();
    assert!(!files.is_empty(), "{}", directory.display());
    files
}

fn run(program: &str, args: &[&str]) -> Output {
    let mut command = Command::new(Path::new(DEV).with_file_name(program));
    // What a developer has set for a cluster of their own has no part in this.
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("NSTANCE_")) {
        command.env_remove(name);
    }
    command.args(args).output().unwrap()
}

fn document(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(&text).unwrap_or_else(|error| {
        panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr));
    })
}

/// The problems of a report, in one form for both programs.
fn problems(report: &Value, help: &str) -> Vec<Value> {
    let form =
        |it: &Value| json!([it["severity"], it["code"], it["path"], it["line"], it["column"], it["message"], it[help]]);
    report["problems"].as_array().unwrap().iter().map(form).collect()
}

/// What both say of a file: the same verdict and the same problems.
fn judged(file: &Path) -> (bool, Vec<Value>) {
    let file = file.to_str().unwrap();
    let server = run("nstance-server", &[&format!("--validate={file}"), "--output", "json"]);
    let admin = run("nstance-admin", &["config", "validate", file, "-o", "json"]);
    let (by_server, by_admin) = (document(&server), document(&admin));
    let found = problems(&by_server, "help");
    assert_eq!(found, problems(&by_admin, "suggestion"), "{file}");
    assert_eq!(by_server["ok"], by_admin["valid"], "{file}");
    assert_eq!(server.status.code(), admin.status.code(), "{file}");
    let ok = by_server["ok"].as_bool().unwrap();
    assert_eq!(server.status.success(), ok, "{file}");
    (ok, found)
}

#[test]
fn server_and_admin_find_the_same_problems_in_every_config() {
    binaries();
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    for file in files(&here.join("tests/configs/good")) {
        let (ok, found) = judged(&file);
        assert!(ok, "{}: {found:#?}", file.display());
    }
    for file in files(&here.join("tests/configs/bad")) {
        let (ok, found) = judged(&file);
        assert!(!ok && !found.is_empty(), "{}", file.display());
    }
    for file in files(&here.join("../../examples")) {
        assert_eq!(judged(&file), (true, vec![]), "{}", file.display());
    }
}
