//! Many seeds, several at a time, and what they came to.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{Outcome, Setup, Stats, run};

/// What many runs came to.
#[derive(Debug, Default)]
pub struct Summary {
    pub n_runs: u64,
    pub stats: Stats,
    /// Runs that broke a promise, lowest seed first.
    pub broken: Vec<Outcome>,
}

/// Runs `seeds`, `jobs` at a time. After `stop_after` broken runs no more are begun.
pub fn run_many(
    seeds: std::ops::Range<u64>,
    setup: Setup,
    jobs: usize,
    stop_after: usize,
    progress: impl Fn(u64, &Outcome) + Sync,
) -> anyhow::Result<Summary> {
    let next = AtomicU64::new(seeds.start);
    let enough = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    let failed = Mutex::new(None);
    let work = || {
        while !enough.load(Ordering::Relaxed) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seeds.end <= seed {
                return;
            }
            match run(seed, setup) {
                Ok(outcome) => {
                    let mut summary = summary.lock().unwrap_or_else(PoisonError::into_inner);
                    summary.n_runs += 1;
                    summary.stats.add(&outcome.stats);
                    progress(summary.n_runs, &outcome);
                    if !outcome.violations.is_empty() {
                        summary.broken.push(outcome);
                        enough.fetch_or(stop_after <= summary.broken.len(), Ordering::Relaxed);
                    }
                }
                Err(error) => {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(error.context(format!("seed {seed}")));
                    enough.store(true, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(work);
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let mut summary = summary.into_inner().unwrap_or_else(PoisonError::into_inner);
    summary.broken.sort_by_key(|outcome| outcome.seed);
    Ok(summary)
}

impl Summary {
    /// One line for people.
    pub fn line(&self) -> String {
        let stats = &self.stats;
        format!(
            "{} runs, {} broken; {} steps in {} h of their time; {} creates, {} registered, {} drains, {} deletes; {} \
             terms, {} take-overs, {} hand-overs; {} faults: {} crashes, {} pauses, {} partitions, {} clock jumps, \
             {} lost VMs, {} of the store, {} of the provider, {} lost answers",
            self.n_runs,
            self.broken.len(),
            stats.steps,
            stats.virtual_seconds / 3600,
            stats.created,
            stats.registered,
            stats.drains,
            stats.deleted,
            stats.terms,
            stats.take_overs,
            stats.hand_overs,
            stats.faults(),
            stats.crashes,
            stats.pauses,
            stats.partitions,
            stats.clock_jumps,
            stats.kills,
            stats.store_faults,
            stats.provider_faults,
            stats.lost_answers,
        )
    }
}

/// What a broken run shows: the promise, the end of its trace, and how to have it again.
pub fn report(outcome: &Outcome, setup: Setup, n_lines: usize) -> String {
    let mut text = format!("seed {} breaks a promise\n", outcome.seed);
    let skipped = outcome.trace.len().saturating_sub(n_lines);
    if 0 < skipped {
        text += &format!("  ({skipped} lines before)\n");
    }
    for line in &outcome.trace[skipped..] {
        text += &format!("  {line}\n");
    }
    for violation in &outcome.violations {
        text += &format!("  {violation}\n");
    }
    text += &format!("again: {}\n", command(outcome.seed, setup));
    text
}

/// The command that gives one run again.
fn command(seed: u64, setup: Setup) -> String {
    use clap::ValueEnum as _;
    let mut text = format!("nstance-dev sim --seed {seed} --runs 1");
    if setup.steps != Setup::default().steps {
        text += &format!(" --steps {}", setup.steps);
    }
    if let Some(servers) = setup.servers {
        text += &format!(" --servers {servers}");
    }
    if let Some(value) = setup.mutation.and_then(|mutation| mutation.to_possible_value()) {
        text += &format!(" --mutate {}", value.get_name());
    }
    if !setup.hears_checker {
        text += " --blind";
    }
    text
}
