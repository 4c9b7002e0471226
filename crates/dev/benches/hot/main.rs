//! The hot paths, each alone: what one look, one plan, one report or one certificate costs.
//!
//! ```text
//! cargo bench -p nstance-dev --bench hot                      wall clock: for people, on a quiet machine
//! cargo bench -p nstance-dev --bench hot -- --instructions    instructions, counted by valgrind: for comparing commits
//! ```
//!
//! `--instances N` sets the size of the fleet, `--json` prints one object instead of a table, and a word chooses the
//! cases that contain it. Everything before a measured step is made from one seed on a clock that stands, so two runs
//! of one program execute nearly the same instructions, however busy the machine is. The count of a case is the
//! difference between a run with and one without its steps, and `noise` is how far two runs without them lie apart.

mod cases;
mod fleet;
mod measure;

use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::{
    cases::{CASES, Case},
    measure::{How, Timed},
};

struct Args {
    instances: usize,
    instructions: bool,
    json: bool,
    /// Set for the runs that are counted: the steps to make.
    steps: Option<u32>,
    filter: Option<String>,
}

fn main() -> ExitCode {
    match args().and_then(|args| run(&args)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hot: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn args() -> anyhow::Result<Args> {
    let mut args = Args { instances: 10_000, instructions: false, json: false, steps: None, filter: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|it| it.parse::<u32>().ok()).with_context(|| format!("{word} N"));
        match word.as_str() {
            "--bench" => {} // said by cargo
            "--instances" => args.instances = number()?.try_into()?,
            "--steps" => args.steps = Some(number()?),
            "--instructions" => args.instructions = true,
            "--json" => args.json = true,
            other if other.starts_with('-') => {
                bail!("{other} is not known; there are --instances N, --instructions, --json and a case's name")
            }
            name => args.filter = Some(name.to_owned()),
        }
    }
    Ok(args)
}

fn run(args: &Args) -> anyhow::Result<()> {
    let chosen = |case: &&Case| args.filter.as_ref().is_none_or(|word| case.name.contains(word.as_str()));
    let cases: Vec<&Case> = CASES.iter().filter(chosen).collect();
    if cases.is_empty() {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        bail!("no such case; there are {}", names.join(", "));
    }
    let mut rows = Vec::new();
    if !args.json && args.steps.is_none() {
        println!("{} instances", args.instances);
        println!("{}", if args.instructions { counted_head() } else { timed_head() });
    }
    for case in cases {
        let row = if args.instructions {
            counted(case, args)?
        } else {
            let how = args.steps.map_or(How::Time, How::Steps);
            let Some(timed) = (case.run)(args.instances, how)? else { continue };
            timed_row(case, &timed)
        };
        if !args.json {
            println!("{}", line(&row));
        }
        rows.push(row);
    }
    if args.json && args.steps.is_none() {
        println!("{:#}", json!({ "instances": args.instances, "cases": rows }));
    }
    Ok(())
}

fn timed_head() -> String {
    format!("{:<22} {:>12} {:>12} {:>12} {:>8}   what", "case", "median", "fastest", "p99", "steps")
}

fn timed_row(case: &Case, timed: &Timed) -> Value {
    json!({
        "case": case.name,
        "what": case.what,
        "median_ns": timed.quantile(0.5).as_nanos(),
        "fastest_ns": timed.quantile(0.0).as_nanos(),
        "p99_ns": timed.quantile(0.99).as_nanos(),
        "steps": timed.n_steps(),
    })
}

fn counted_head() -> String {
    format!("{:<22} {:>15} {:>10} {:>8}   what", "case", "instructions", "noise", "steps")
}

/// Has valgrind count a run with the case's steps, and two without.
fn counted(case: &Case, args: &Args) -> anyhow::Result<Value> {
    let count = |steps: u32| count(case, args.instances, steps);
    let (without, again, with) = (count(0)?, count(0)?, count(case.steps)?);
    let steps = u64::from(case.steps.max(1));
    Ok(json!({
        "case": case.name,
        "what": case.what,
        "instructions": with.saturating_sub(without.min(again)) / steps,
        "noise": without.abs_diff(again) / steps,
        "steps": case.steps,
    }))
}

fn count(case: &Case, instances: usize, steps: u32) -> anyhow::Result<u64> {
    let exe = std::env::current_exe().context("find the own program")?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]).arg(exe);
    valgrind.args(["--steps", &steps.to_string(), "--instances", &instances.to_string(), case.name]);
    let output = valgrind.output().context("run valgrind; install it, or leave --instructions out")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{} under valgrind: {}", case.name, text.trim());
    }
    measure::instructions(&text).with_context(|| format!("no count in what valgrind said: {}", text.trim()))
}

fn line(row: &Value) -> String {
    let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
    let number = |key: &str| row[key].as_u64().unwrap_or_default();
    if row.get("instructions").is_some() {
        let (count, noise) = (measure::grouped(number("instructions")), measure::grouped(number("noise")));
        return format!("{:<22} {count:>15} {noise:>10} {:>8}   {}", text("case"), number("steps"), text("what"));
    }
    let time = |key: &str| measure::time(number(key));
    let (median, fastest, p99) = (time("median_ns"), time("fastest_ns"), time("p99_ns"));
    format!("{:<22} {median:>12} {fastest:>12} {p99:>12} {:>8}   {}", text("case"), number("steps"), text("what"))
}
