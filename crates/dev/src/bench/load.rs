//! `load`: thousands of agents on the wire from this one process, against a server and a store as processes of their
//! own, and everything that grows with their number.
//!
//! Agents are real as far as their server can tell: TLS, registration by nonce, the three streams, keys and files. The
//! machines below them are those of the fake provider, whose journal says exactly when each was asked for. Each number
//! of agents gets an environment of its own.

mod agent;
mod figures;
mod fleet;
mod measure;
mod site;
mod wire;

use std::{fs, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use nstance_rt::shutdown::StopSignals;
use serde_json::json;

use self::{
    figures::{Figures, Limit, Limits, Measure},
    site::Site,
};

#[derive(Debug, Args)]
pub(crate) struct LoadArgs {
    /// Agents of each run, as in 1000,5000,10000
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1000, 5000, 10_000])]
    pub(crate) agents: Vec<usize>,
    /// Largest size of a group
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) group_size: usize,
    /// How often each agent reports
    #[arg(long, value_name = "DURATION", value_parser = crate::cli::duration, default_value = "10s")]
    pub(crate) interval: Duration,
    /// Agents of the storm that register and connect at a time
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) parallel: usize,
    /// How often a single agent is lost, or gets its notice
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) singles: usize,
    /// How often many agents are lost, or get their notice, at once, at least
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) rounds: usize,
    /// How long reports and idle requests to the store are counted
    #[arg(long = "for", value_name = "DURATION", value_parser = crate::cli::duration, default_value = "20s")]
    pub(crate) watch: Duration,
    /// Give up, and clean up, after this time
    #[arg(long, value_name = "DURATION", value_parser = crate::cli::duration, default_value = "20m")]
    pub(crate) max_time: Duration,
    /// The server to measure; the one beside this program otherwise
    #[arg(long, value_name = "FILE")]
    pub(crate) server: Option<PathBuf>,
    /// Write what was found as JSON, too
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Exit with 1 if a promise is not kept
    #[arg(long)]
    pub(crate) check: bool,
    /// Exit with 1 if the storm takes longer to be registered; here and below one number for all runs, or AGENTS=NUMBER
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_register_s: Vec<Limit>,
    /// Exit with 1 if the server takes more memory with all agents connected
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_rss_mib: Vec<Limit>,
    /// Exit with 1 if the 99th percentile of single losses is above this
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_replacement_p99_ms: Vec<Limit>,
    /// Exit with 1 if the 99th percentile of the most notices at once is above this
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_notice_p99_ms: Vec<Limit>,
    /// Exit with 1 if a cold start takes longer
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_cold_start_s: Vec<Limit>,
    /// Exit with 1 if more reports are missed
    #[arg(long, value_name = "LIMIT")]
    pub(crate) max_missed_reports: Vec<Limit>,
}

impl LoadArgs {
    fn limits(&self) -> Limits {
        let mut limits = if self.check { Limits::promised() } else { Limits::default() };
        limits.add(Measure::Register, &self.max_register_s);
        limits.add(Measure::Rss, &self.max_rss_mib);
        limits.add(Measure::Replacement, &self.max_replacement_p99_ms);
        limits.add(Measure::Notice, &self.max_notice_p99_ms);
        limits.add(Measure::ColdStart, &self.max_cold_start_s);
        limits.add(Measure::Missed, &self.max_missed_reports);
        limits
    }
}

/// Measures each number of agents; exits with 1 if a limit is missed.
pub(crate) async fn load(args: LoadArgs) -> anyhow::Result<ExitCode> {
    ensure!(args.agents.iter().all(|it| (1..=20_000).contains(it)), "--agents: 1 to 20000, which the agent port takes");
    ensure!((1..=10_000).contains(&args.group_size), "--group-size: 1 to 10000, which a config takes");
    ensure!(0 < args.parallel && !args.interval.is_zero(), "--parallel and --interval: more than none");
    site::raise_file_limit(args.agents.iter().copied().max().unwrap_or(0))?;
    let mut signals = StopSignals::listen().context("listen for signals")?;
    let mut runs = Vec::new();
    let over = tokio::time::Instant::now() + args.max_time;
    for n_agents in &args.agents {
        let mut site = Site::new(&args)?;
        let run = tokio::select! {
            biased;
            signal = signals.next() => Err(anyhow!("{signal}")),
            () = tokio::time::sleep_until(over) => {
                Err(anyhow!("not done within {} s; give a longer --max-time or fewer --agents", args.max_time.as_secs()))
            }
            run = measure::run(&mut site, *n_agents, &args) => run,
        };
        // Whatever came of it, nothing stays behind.
        let last_words = site.last_words();
        let stopped = site.stop().await;
        if run.is_err() {
            // What was measured before is not lost with what failed.
            if !runs.is_empty() {
                figures::table(&runs).iter().for_each(|line| say!("{line}"));
            }
            last_words.iter().for_each(|line| eprintln!("server: {line}"));
        }
        runs.push(run.with_context(|| format!("measure {n_agents} agents"))?);
        stopped?;
    }
    tell(&args, &runs)
}

fn tell(args: &LoadArgs, runs: &[Figures]) -> anyhow::Result<ExitCode> {
    figures::table(runs).iter().for_each(|line| say!("{line}"));
    let missed = args.limits().missed(runs);
    missed.iter().for_each(|line| say!("missed: {line}"));
    if let Some(path) = &args.json {
        let found = json!({
            "interval_s": args.interval.as_secs_f64(),
            "group_size": args.group_size,
            "watched_s": args.watch.as_secs_f64(),
            "runs": runs,
            "missed": missed,
        });
        fs::write(path, format!("{found:#}\n")).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
