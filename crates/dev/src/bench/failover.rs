//! `failover`: a leader hands over, dies or stands still, again and again, and the other takes its place.
//!
//! Two moments count from the signal: when the other one's lease is in the store, and when it does its first work. So
//! that there is work, an instance dies together with the leader; the first work is the new VM's directory. Nobody else
//! may be touched: every run compares the processes of all other instances.

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::{Context, bail, ensure};
use nstance_core::ports::clock::Clock as _;
use nstance_providers::process::kill_agent;
use nstance_rt::clock::SystemClock;
use rustix::process::Signal;
use serde_json::Value;

use super::Bench;
use crate::{
    cli::Failover,
    layout::Layout,
    records, roles,
    status::{self, Clients, Status},
    target::signal,
};

const SHARD: &str = "dev-1";
/// Short beside what is measured.
const PERIOD: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(60);
/// A standby that has just come back is given the time to find its leader.
const SETTLED: Duration = Duration::from_millis(1500);

/// What one run found.
#[derive(Debug, Clone, Copy)]
struct Found {
    lease: Duration,
    effect: Duration,
}

/// Lets leaders go `runs` times in each of the ways, and fails with `check` if it takes longer than it may.
pub(crate) async fn failover(runs: usize, only: Option<Failover>, size: u32, check: bool) -> anyhow::Result<()> {
    ensure!(0 < runs && 1 < size, "at least one run, and a group of at least two, of which one dies");
    let bench = Bench::new("failover")?;
    let ways = [Failover::Handover, Failover::Kill, Failover::Silent];
    let measured = async {
        let wanted = format!("test={size}");
        bench.expect(&[
            "up",
            "--detach",
            "--port-base",
            "0",
            "--shards",
            "1",
            "--no-k8s",
            "--servers-per-shard",
            "2",
            "--size",
            &wanted,
        ])?;
        let layout = Layout::open(&bench.dir)?;
        let mut all = Vec::new();
        for way in ways.into_iter().filter(|way| only.is_none_or(|only| only == *way)) {
            let mut found = Vec::new();
            for run in 1..=runs {
                let it = once(&layout, way).await.with_context(|| format!("run {run} of {}", way.name()))?;
                println!("{:<8} {run:>3}  lease {}  effect {}", way.name(), millis(it.lease), millis(it.effect));
                found.push(it);
            }
            all.push((way, found));
        }
        let lease = roles::look(&layout).await.leases.remove(SHARD).context("the shard has no lease")?;
        anyhow::Ok((all, lease.ttl))
    };
    let measured = measured.await;
    if measured.is_err() {
        eprintln!("{}", bench.dev(&["logs"]).map(|it| super::tail(&it.stdout)).unwrap_or_default());
    }
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let (all, ttl) = measured?;
    cleaned?;
    let mut late = Vec::new();
    println!("\n{:<8}  {:<6}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}", "after", "until", "min", "p50", "p90", "p99", "max");
    for (way, found) in all {
        let limits = limits(way, ttl);
        let lease: Vec<Duration> = found.iter().map(|it| it.lease).collect();
        let effect: Vec<Duration> = found.iter().map(|it| it.effect).collect();
        for (phase, mut times, limit) in [("lease", lease, limits.0), ("effect", effect, limits.1)] {
            times.sort();
            let shown = [0.0, 0.5, 0.9, 0.99, 1.0].map(|share| millis(quantile(&times, share)));
            println!("{:<8}  {phase:<6}  {}", way.name(), shown.join("  "));
            let p99 = quantile(&times, 0.99);
            if let Some(limit) = limit.filter(|limit| *limit < p99) {
                late.push(format!("{} until {phase}: p99 {} is above {}", way.name(), millis(p99), millis(limit)));
            }
        }
    }
    println!("{runs} runs each, ttl {}; every other instance kept its process", millis(ttl));
    for line in &late {
        println!("late: {line}");
    }
    if check && !late.is_empty() {
        bail!("{} of the limits are broken", late.len());
    }
    Ok(())
}

/// What the lease and the first work may take.
fn limits(way: Failover, ttl: Duration) -> (Option<Duration>, Option<Duration>) {
    let ms = |it| Some(Duration::from_millis(it));
    match way {
        Failover::Handover => (ms(200), ms(600)),
        Failover::Kill => (ms(1000), ms(2000)),
        Failover::Silent => (Some(ttl + Duration::from_secs(1)), Some(ttl + Duration::from_secs(3))),
    }
}

/// The smallest of the sorted times that this share of them does not exceed.
pub(super) fn quantile(sorted: &[Duration], share: f64) -> Duration {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank among the few runs of a bench"
    )]
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).or(sorted.last()).copied().unwrap_or_default()
}

fn millis(it: Duration) -> String {
    format!("{:>6.1} ms", it.as_secs_f64() * 1000.0)
}

/// One leader goes.
async fn once(layout: &Layout, way: Failover) -> anyhow::Result<Found> {
    let before = settled(layout).await?;
    let leader = roles::leader(layout, SHARD).await.context("nobody leads")?;
    let epoch = stored_epoch(layout).context("the shard has no lease")?;
    let mut kept = pids(&before);
    let (victim, _) = kept.pop_last().context("an instance to kill")?;
    let instance = victim.parse().context("read the instance's id")?;
    let known = directories(layout);
    // Held, or a leader that is back at once might follow itself.
    let hold = records::hold_path(layout, &leader.name);
    if way != Failover::Silent {
        fs::write(&hold, "held by `nstance-dev bench`\n").context("hold the leader")?;
    }
    let since = SystemClock.monotonic();
    let signalled = signal(leader.process, way.signal()).context("signal the leader")?;
    ensure!(signalled, "{} ended by itself", leader.name);
    kill_agent(&layout.instances(), instance).context("kill an instance")?;
    let found = tokio::time::timeout(PATIENCE, async {
        let (mut lease, mut effect) = (None, None);
        while lease.is_none() || effect.is_none() {
            if lease.is_none() && stored_epoch(layout).is_some_and(|it| epoch < it) {
                lease = Some(SystemClock.monotonic().since(since));
            }
            if effect.is_none() && directories(layout).iter().any(|it| !known.contains(it)) {
                effect = Some(SystemClock.monotonic().since(since));
            }
            tokio::time::sleep(PERIOD).await;
        }
        Found { lease: lease.unwrap_or_default(), effect: effect.unwrap_or_default() }
    });
    let found = found.await;
    // Before anything may fail: the next run needs it, and so does the end.
    if way == Failover::Silent {
        signal(leader.process, Signal::CONT).context("resume the leader")?;
    }
    let _ = fs::remove_file(&hold);
    let found = found.map_err(|_| anyhow::anyhow!("nobody took over and worked within 60 s"))?;
    let after = settled(layout).await?;
    check(layout, &kept, &victim, epoch, &after)?;
    Ok(found)
}

/// Nobody but the victim was replaced, and that by a later term.
fn check(
    layout: &Layout,
    kept: &BTreeMap<String, u32>,
    victim: &str,
    epoch: u64,
    after: &Status,
) -> anyhow::Result<()> {
    let now = pids(after);
    ensure!(now.len() == kept.len() + 1, "{} instances instead of {}", now.len(), kept.len() + 1);
    for (id, pid) in kept {
        ensure!(now.get(id) == Some(pid), "{id} was replaced or restarted though it was well");
    }
    let new = now.keys().find(|id| !kept.contains_key(*id)).context("the replacement")?;
    ensure!(new != victim, "{victim} was not replaced");
    let term = layout.vm(new).context("the replacement's VM")?.epoch;
    ensure!(epoch < term, "the replacement is of term {term}, whose leader was told to go in {epoch}");
    Ok(())
}

fn pids(status: &Status) -> BTreeMap<String, u32> {
    status.instances.iter().filter_map(|it| Some((it.id.clone(), it.pid?))).collect()
}

/// Waits until all is healthy and the other server stands by.
async fn settled(layout: &Layout) -> anyhow::Result<Status> {
    let mut clients = Clients::new();
    let mut since = None;
    let wait = async {
        loop {
            let picture = status::look(layout, &mut clients).await;
            let status = status::compose(layout, &picture);
            let roles: Vec<&str> = status.components.iter().filter_map(|it| it.role.as_deref()).collect();
            let has_both = roles.contains(&"leading") && roles.contains(&"following");
            if status.healthy && has_both && status.instances.iter().all(|it| it.pid.is_some()) {
                let now = SystemClock.monotonic();
                if SETTLED <= now.since(*since.get_or_insert(now)) {
                    return status;
                }
            } else {
                since = None;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let settled = tokio::time::timeout(PATIENCE, wait).await;
    settled.map_err(|_| anyhow::anyhow!("not healthy with a leader and a standby within 60 s"))
}

/// The epoch of the lease as it lies in the store.
fn stored_epoch(layout: &Layout) -> Option<u64> {
    let bytes = fs::read(layout.bucket().join(format!("shard/{SHARD}/leader.json"))).ok()?;
    serde_json::from_slice::<Value>(&bytes).ok()?["epoch"].as_u64()
}

fn directories(layout: &Layout) -> Vec<String> {
    let entries = fs::read_dir(layout.instances()).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|it| !it.starts_with('.')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_times_that_were_measured() {
        let times: Vec<Duration> = (1..=50).map(Duration::from_millis).collect();
        let at = |share| quantile(&times, share).as_millis();
        assert_eq!([at(0.0), at(0.5), at(0.9), at(0.99), at(1.0)], [1, 25, 45, 50, 50]);
        assert_eq!(quantile(&times[..1], 0.99).as_millis(), 1);
    }
}
