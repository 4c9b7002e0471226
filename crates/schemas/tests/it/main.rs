//! The generated tables are those that their generators make.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::process::Command;

use nstance_schemas::aws::table::MADE_FROM;

fn generate(more: &str) -> Option<String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/generate/aws.py");
    let mut python = Command::new("python3");
    python.args([script, more]);
    if let Some(directory) = std::env::var_os("NSTANCE_BOTOCORE") {
        python.arg("--botocore").arg(directory);
    }
    let output = python.output().ok()?;
    if output.status.code() == Some(3) {
        return None;
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_table_of_run_instances_is_what_its_generator_makes() {
    let Some(version) = generate("--version") else {
        eprintln!("NOT RUN: no botocore here; set NSTANCE_BOTOCORE to a directory that holds it");
        return;
    };
    let version = version.trim();
    if version != MADE_FROM {
        eprintln!("NOT RUN: the table is made from botocore {MADE_FROM}, and {version} is here");
        eprintln!("set NSTANCE_BOTOCORE to a directory that holds the former, or make the table anew");
        return;
    }
    let made = generate("--stdout").unwrap();
    assert!(made == include_str!("../../src/aws/table.rs"), "src/aws/table.rs differs: run generate/aws.py");
}
