//! Measures what is promised in numbers and fails where a promise is not kept:
//! `cargo run --release -p nstance-server --example acceptance`.
//!
//! Servers, agents and operators live in this process and speak over real sockets; the cloud is a fake one.

#![allow(clippy::expect_used, reason = "a measurement that cannot be made ends here")]

#[path = "../tests/it/common/mod.rs"]
mod common;
#[path = "../tests/measured/mod.rs"]
mod measured;

use std::{process::ExitCode, time::Duration};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const AGENTS: u32 = 1000;
const ROUNDS: usize = 3;
/// How long a fake create takes.
const CREATE: Duration = Duration::from_millis(500);

#[derive(Default)]
struct Report {
    n_missed: usize,
}

impl Report {
    fn at_most(&mut self, what: &str, found: Duration, bound: Duration) {
        self.say(what, found <= bound, &format!("{found:.1?}, promised {bound:.1?}"));
    }

    fn none(&mut self, what: &str, n: usize) {
        self.say(what, n == 0, &format!("{n}, promised none"));
    }

    fn say(&mut self, what: &str, kept: bool, figures: &str) {
        println!("{} {what}: {figures}", if kept { "kept  " } else { "MISSED" });
        self.n_missed += usize::from(!kept);
    }
}

/// Smallest, median, ninth decile and largest.
fn distribution(found: &mut [Duration]) -> String {
    found.sort();
    let at = |tenths: usize| found[(found.len() - 1) * tenths / 10];
    format!("min {:.1?}, median {:.1?}, p90 {:.1?}, max {:.1?} of {}", at(0), at(5), at(9), at(10), found.len())
}

#[tokio::main]
async fn main() -> ExitCode {
    // Three descriptors for each agent.
    let limits = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limits.maximum, ..limits }).expect("as many files as we may open");
    if cfg!(debug_assertions) {
        println!("this is a debug build; promises are about release builds");
    }
    let mut report = Report::default();

    let (mut wholes, mut notices) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let found = measured::scale_up(200, 8, CREATE).await;
        assert!(found.under_way.iter().all(|n| 0 < *n), "a notice came too late to be in the middle: {found:?}");
        wholes.push(found.whole_after);
        notices.extend(found.notices);
    }
    println!("scale-up 0 to 200, 500 ms each create: {}", distribution(&mut wholes));
    println!("notice in the middle of it to the replacement's create: {}", distribution(&mut notices));
    let worst = |found: &[Duration]| found.iter().max().copied().unwrap_or_default();
    report.at_most("scale-up 0 to 200, slowest", worst(&wholes), Duration::from_secs(5));
    report.at_most("notice to create, slowest", worst(&notices), Duration::from_millis(10));

    let mut found = measured::split(AGENTS, 5, Duration::from_secs(1)).await;
    println!("5 of {AGENTS} agents cut, silent after 3 s at most, to creates: {}", distribution(&mut found.few));
    println!("{AGENTS} agents back to ready: {:.1?}", found.back_after);
    report.none("creates beside one for each of the five", found.few.len().abs_diff(5));
    report.at_most("five cut to the last create", worst(&found.few), 3 * found.interval + Duration::from_millis(100));
    report.none(&format!("replaced with all {AGENTS} cut and silent"), found.replaced_in_split);
    report.none("creates and deletes that came of it later", found.changed_by_split);

    if report.n_missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
