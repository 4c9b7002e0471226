//! Benchmarks on a real environment of their own: real processes, real TLS, numbers from the server's own histograms.
//!
//! `replacement`: kills agents hard, one after the other, and shows how long after the break of its stream each
//! replacement's create call began. `failover`, `notices`, `agent`, `load`: see there. Build with `--release` before you believe a number.

mod agent;
mod failover;
mod load;
mod metadata;
mod notices;

pub(crate) use self::{
    agent::agent,
    failover::failover,
    load::{LoadArgs, load},
    notices::notices,
};

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, bail};
use serde_json::Value;

use crate::http;

/// What one run found.
struct Found {
    /// Upper bound in seconds and how many were at most that late.
    buckets: Vec<(f64, u64)>,
    n: u64,
    mean: f64,
}

impl Found {
    /// The smallest bucket that holds this share of all: an upper bound of the quantile.
    fn quantile(&self, share: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
        let wanted = share * self.n as f64;
        #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
        let at = |(_, count): &&(f64, u64)| wanted <= *count as f64;
        self.buckets.iter().find(at).map_or(f64::INFINITY, |(bound, _)| *bound)
    }
}

/// Kills `kills` agents of a group of `size` and fails if the 99th percentile is above `max_p99_ms`.
pub(crate) async fn replacement(size: u32, kills: u32, max_p99_ms: Option<f64>) -> anyhow::Result<()> {
    let bench = Bench::new("replacement")?;
    let found = bench.run(size, kills).await;
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let found = found?;
    cleaned?;
    println!("replacement start after the break of the stream, {} kills in a group of {size}", found.n);
    for (bound, count) in found.buckets.iter().filter(|(bound, _)| bound.is_finite()) {
        println!("  <= {:>9.2} ms  {count:>4}", bound * 1000.0);
    }
    let p99 = found.quantile(0.99) * 1000.0;
    println!("mean {:.2} ms, p50 <= {:.2} ms, p99 <= {p99:.2} ms", found.mean * 1000.0, found.quantile(0.5) * 1000.0);
    if let Some(limit) = max_p99_ms
        && limit < p99
    {
        bail!("p99 is above {limit} ms");
    }
    Ok(())
}

struct Bench {
    exe: PathBuf,
    dir: PathBuf,
}

impl Bench {
    fn new(name: &str) -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(format!("nstance-bench-{name}-{}", std::process::id()));
        Ok(Self { exe: std::env::current_exe().context("find the own program")?, dir })
    }

    fn dev(&self, args: &[&str]) -> anyhow::Result<Output> {
        let (command, rest) = args.split_first().context("a command")?;
        Command::new(&self.exe)
            .arg(command)
            .arg("--dir")
            .arg(&self.dir)
            .args(rest)
            .output()
            .with_context(|| format!("run nstance-dev {command}"))
    }

    fn expect(&self, args: &[&str]) -> anyhow::Result<String> {
        let output = self.dev(args)?;
        if !output.status.success() {
            bail!("nstance-dev {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn status(&self) -> anyhow::Result<Value> {
        // Its exit code tells health, which is what we look at in the text.
        serde_json::from_slice(&self.dev(&["status", "--json"])?.stdout).context("read the status")
    }

    async fn run(&self, size: u32, kills: u32) -> anyhow::Result<Found> {
        let wanted = format!("test={size}");
        self.expect(&["up", "--detach", "--port-base", "0", "--shards", "1", "--no-k8s", "--size", &wanted])?;
        let port = health_port(&self.status()?).context("the server has no health port")?;
        for kill in 0..kills {
            let status = self.status()?;
            let instances = status["instances"].as_array().context("instances")?;
            let alive: Vec<&str> = instances.iter().filter_map(|it| it["id"].as_str()).collect();
            let victim = alive.get(kill as usize % alive.len().max(1)).context("an instance to kill")?;
            print!("{}", self.expect(&["kill", &format!("instance/{victim}")])?);
        }
        leaves_nothing(&self.dir, &self.status()?, size)?;
        let text = http::get(port, "/metrics").await.context("read the metrics")?.body;
        read(&text).context("no histogram nstance_replacement_start_seconds")
    }
}

/// The last lines of a log that is too long to show.
fn tail(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

/// The group is back at its size and healthy. That no process leaks is shown by the end-to-end tests, not here.
fn leaves_nothing(dir: &Path, status: &Value, size: u32) -> anyhow::Result<()> {
    if status["healthy"] != true {
        bail!("not healthy after the kills: {}", status["problems"]);
    }
    let living = status["instances"].as_array().map_or(0, Vec::len);
    if u32::try_from(living).ok() != Some(size) {
        bail!("{living} instances after the kills, {size} are wanted; see {}", dir.display());
    }
    Ok(())
}

fn health_port(status: &Value) -> Option<u16> {
    let components = status["components"].as_array()?;
    let server = components.iter().find(|it| it["name"] == "server-1")?;
    u16::try_from(server["ports"]["health"].as_u64()?).ok()
}

fn read(metrics: &str) -> Option<Found> {
    const NAME: &str = "nstance_replacement_start_seconds";
    let value = |suffix: &str| {
        let name = format!("{NAME}_{suffix} ");
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok())
    };
    let prefix = format!("{NAME}_bucket{{le=\"");
    let buckets: Vec<(f64, u64)> = metrics
        .lines()
        .filter_map(|line| {
            let (bound, count) = line.strip_prefix(&prefix)?.split_once("\"} ")?;
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
            Some((bound, count.parse().ok()?))
        })
        .collect();
    let (_, n) = *buckets.last()?;
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
    let mean = value("sum")? / n.max(1) as f64;
    Some(Found { buckets, n, mean })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_upper_bounds_of_buckets() {
        let text = "nstance_replacement_start_seconds_sum 0.02\n\
                    nstance_replacement_start_seconds_count 4\n\
                    nstance_replacement_start_seconds_bucket{le=\"0.002\"} 2\n\
                    nstance_replacement_start_seconds_bucket{le=\"0.01\"} 3\n\
                    nstance_replacement_start_seconds_bucket{le=\"+Inf\"} 4\n";
        let found = read(text).unwrap();
        assert_eq!(found.n, 4);
        assert!((found.mean - 0.005).abs() < 1e-9);
        assert!((found.quantile(0.5) - 0.002).abs() < 1e-9);
        assert!(found.quantile(0.99).is_infinite());
    }
}
