//! Ending an environment from outside of its supervisor: `down` and `clean`.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, bail};
use futures::future::join_all;
use nstance_providers::process::{end_all, power};

use crate::{
    layout::Layout,
    records::{self, RunFile},
    roles,
};

/// How long the supervisor may take, which in turn waits for everybody else.
const SUPERVISOR_GRACE: Duration = Duration::from_secs(40);
/// A server hands its lease over within 10 s or not at all.
pub(crate) const SERVER_GRACE: Duration = Duration::from_secs(12);
pub(crate) const AGENT_GRACE: Duration = Duration::from_secs(3);
pub(crate) const STORE_GRACE: Duration = Duration::from_secs(5);
pub(crate) const K8S_GRACE: Duration = Duration::from_secs(6);
/// It gives its own work 5 s.
pub(crate) const OPERATOR_GRACE: Duration = Duration::from_secs(8);

/// What there is one of, besides servers, in the order in which it ends.
pub(crate) const OTHERS: [(&str, Duration); 3] =
    [(records::OPERATOR, OPERATOR_GRACE), (records::K8S, K8S_GRACE), (records::STORE, STORE_GRACE)];

/// Stops everything that is recorded: operator, servers, agents, Kubernetes, store. Servers before agents, or they would replace what we stop next.
pub(crate) async fn down(layout: &Layout) -> anyhow::Result<()> {
    let mut n_stopped = 0;
    if let Some(up) = records::supervisor(layout) {
        // It stops the others itself, in this same order, and does not restart what we end.
        if up.process.end(SUPERVISOR_GRACE).await.context("end the supervisor")? {
            say!("stopped up (pid {}), and what it had started", up.process.pid);
            n_stopped += 1;
        }
        up.forget(layout);
    }
    let [operator, others @ ..] = OTHERS;
    n_stopped += usize::from(end_recorded(layout, operator.0, operator.1).await?);
    n_stopped += servers_off(layout).await?.len();
    n_stopped += agents_off(layout).await?;
    for (name, grace) in others {
        n_stopped += usize::from(end_recorded(layout, name, grace).await?);
    }
    if n_stopped == 0 {
        say!("nothing was running in {}", layout.shown());
    }
    Ok(())
}

/// Ends the servers that are recorded, and names those that ran. Standbys before leaders: nobody is to take over from a
/// leader that is stopped for good.
pub(crate) async fn servers_off(layout: &Layout) -> anyhow::Result<Vec<String>> {
    let servers = records::servers(layout);
    let leaders = roles::leaders(&servers).await;
    let (leaders, others): (Vec<&RunFile>, Vec<&RunFile>) = servers.iter().partition(|it| leaders.contains(&it.name));
    let mut stopped = Vec::new();
    for some in [others, leaders] {
        let ended = join_all(some.iter().map(|it| end_recorded(layout, &it.name, SERVER_GRACE))).await;
        for (server, ended) in some.iter().zip(ended) {
            if ended? {
                stopped.push(server.name.clone());
            }
        }
    }
    Ok(stopped)
}

async fn agents_off(layout: &Layout) -> anyhow::Result<usize> {
    let off = power::power_off(&layout.instances(), AGENT_GRACE).await.context("switch the agents off")?;
    let n_agents = off.instances.len() + off.strays;
    if 0 < n_agents {
        say!("switched off {n_agents} agents");
    }
    for problem in &off.problems {
        say!("not switched off: {problem}");
    }
    Ok(n_agents)
}

/// Ends one component by its record.
pub(crate) async fn end_recorded(layout: &Layout, name: &str, grace: Duration) -> anyhow::Result<bool> {
    let Some(record) = RunFile::read(layout, name) else { return Ok(false) };
    let ended = record.process.end(grace).await.with_context(|| format!("end {name} (pid {})", record.process.pid))?;
    if ended {
        say!("stopped {name} (pid {})", record.process.pid);
    }
    record.forget(layout);
    let _ = fs::remove_file(records::hold_path(layout, name));
    Ok(ended)
}

/// Stops everything and removes the directory, if it bears our mark.
pub(crate) async fn clean(dir: &Path) -> anyhow::Result<()> {
    if !dir.exists() {
        say!("{} is not there, nothing to clean", dir.display());
        return Ok(());
    }
    let layout = Layout::open(dir)?;
    if !layout.is_marked() {
        bail!(
            "{} has no marker file of nstance-dev, so it is not removed; run `nstance-dev up{}` once, or remove it by hand",
            layout.shown(),
            layout.dir_flag()
        );
    }
    down(&layout).await?;
    end_all(&layout.instances()).context("end left-over agents")?;
    fs::remove_dir_all(layout.dir()).with_context(|| format!("remove {}", layout.dir().display()))?;
    say!("removed {}", layout.shown());
    Ok(())
}
