//! `agent`: one agent, as it runs on a machine where nothing happens, and what it costs there.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, ensure};

use super::Bench;

const MAX_RSS_KIB: u64 = 4 * 1024;
const MAX_SIZE: u64 = 3_000_000;
const MAX_CORE_PERCENT: f64 = 0.1;

/// A look at a process.
#[derive(Debug, Clone, Copy)]
struct Look {
    rss_kib: u64,
    anon_kib: u64,
    threads: u64,
    /// Time on a processor.
    ran: Duration,
    /// How often it was woken.
    wakes: u64,
}

/// Watches an idle agent for a time, and fails with `check` if it costs more than is promised.
pub(crate) async fn agent(watch: Duration, agent: Option<PathBuf>, check: bool) -> anyhow::Result<()> {
    let bench = Bench::new("agent")?;
    let agent = match agent {
        Some(agent) => fs::canonicalize(&agent).with_context(|| format!("find {}", agent.display()))?,
        None => bench.exe.with_file_name("nstance-agent"),
    };
    let size = fs::metadata(&agent).with_context(|| format!("look at {}", agent.display()))?.len();
    let bench = beside(bench, &agent)?;
    let found = watch_one(&bench, watch).await;
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let _ = fs::remove_dir_all(programs(&bench.dir));
    let (before, after) = found?;
    cleaned?;
    let ran = after.ran.saturating_sub(before.ran);
    let percent = ran.as_secs_f64() / watch.as_secs_f64() * 100.0;
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
    let wakes = after.wakes.saturating_sub(before.wakes) as f64 / watch.as_secs_f64();
    println!("{}", agent.display());
    println!("  program     {size:>9} bytes   (at most {MAX_SIZE})");
    println!("  resident    {:>9} KiB     (at most {MAX_RSS_KIB}; {} KiB anonymous)", after.rss_kib, after.anon_kib);
    println!("  processor   {percent:>9.3} %       (at most {MAX_CORE_PERCENT} of one core; {watch:?} watched)");
    println!("  wake-ups    {wakes:>9.2} per second, {} thread(s)", after.threads);
    if check {
        ensure!(size <= MAX_SIZE, "the program is larger than {MAX_SIZE} bytes");
        ensure!(after.rss_kib <= MAX_RSS_KIB, "it holds more than {MAX_RSS_KIB} KiB");
        ensure!(percent <= MAX_CORE_PERCENT, "it uses more than {MAX_CORE_PERCENT} % of a core");
    }
    Ok(())
}

fn programs(dir: &Path) -> PathBuf {
    dir.with_extension("programs")
}

/// The environment runs what lies beside its own program. Here that is an agent which is told what a machine of a user
/// would tell it, not what a development environment does.
fn beside(bench: Bench, agent: &Path) -> anyhow::Result<Bench> {
    let programs = programs(&bench.dir);
    fs::create_dir_all(&programs).with_context(|| format!("make {}", programs.display()))?;
    for name in ["nstance-dev", "nstance-server"] {
        let from = bench.exe.with_file_name(name);
        fs::copy(&from, programs.join(name)).with_context(|| format!("copy {}", from.display()))?;
    }
    let idle = "NSTANCE_METRICS_INTERVAL=60s NSTANCE_PROVIDER=none NSTANCE_NOTICE_FILE=";
    let script = format!("#!/bin/sh\nexec env {idle} '{}' \"$@\"\n", agent.display());
    let wrapper = programs.join("nstance-agent");
    fs::write(&wrapper, script).context("write the agent's wrapper")?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).context("make the agent's wrapper run")?;
    Ok(Bench { exe: programs.join("nstance-dev"), ..bench })
}

async fn watch_one(bench: &Bench, watch: Duration) -> anyhow::Result<(Look, Look)> {
    bench.expect(&["up", "--detach", "--port-base", "0", "--size", "test=1"])?;
    let pid = bench.status()?["instances"][0]["pid"].as_u64().context("the agent has no process")?;
    let before = look(pid)?;
    tokio::time::sleep(watch).await;
    let after = look(pid)?;
    ensure!(bench.status()?["healthy"] == true, "the environment is not healthy at the end");
    Ok((before, after))
}

fn look(pid: u64) -> anyhow::Result<Look> {
    let read = |name: &str| {
        let path = format!("/proc/{pid}/{name}");
        fs::read_to_string(&path).with_context(|| format!("read {path}"))
    };
    let status = read("status")?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
    };
    let of = |name: &str| field(name).with_context(|| format!("{name} of process {pid}"));
    let schedstat = read("schedstat")?;
    let ran = schedstat.split_whitespace().next().and_then(|it| it.parse().ok()).context("read schedstat")?;
    Ok(Look {
        rss_kib: of("VmRSS")?,
        anon_kib: of("RssAnon")?,
        threads: of("Threads")?,
        ran: Duration::from_nanos(ran),
        wakes: of("voluntary_ctxt_switches")?,
    })
}
