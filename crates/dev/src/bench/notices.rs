//! `notices`: many machines are told at one moment that they will be taken. Two ways are measured: from the agent that
//! sees the notice to the server that has read its report, and from there to the create call of the replacement.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, bail, ensure};
use nstance_core::ports::clock::Clock as _;
use nstance_rt::clock::SystemClock;

use super::Bench;
use crate::{
    api::{self, millis},
    http,
    layout::Layout,
    notice, shape,
};

const PATIENCE: Duration = Duration::from_secs(60);
const MAX: Duration = Duration::from_millis(10);

/// Gives all instances of a group their notice, and fails with `check` if a replacement begins later than it may.
pub(crate) async fn notices(size: u32, check: bool) -> anyhow::Result<()> {
    ensure!(0 < size, "at least one instance");
    let bench = Bench::new("notices")?;
    let found = run(&bench, size).await;
    if found.is_err() {
        eprintln!("{}", bench.dev(&["logs"]).map(|it| super::tail(&it.stdout)).unwrap_or_default());
    }
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let (mut heard, started) = found?;
    cleaned?;
    heard.sort();
    let at = |share: f64| super::failover::quantile(&heard, share).as_millis();
    println!("{size} notices at one moment");
    println!("seen by the agent until read by the server: p50 {} ms, p99 {} ms, max {} ms", at(0.5), at(0.99), at(1.0));
    let (p50, p99) = (started.quantile(0.5) * 1000.0, started.quantile(0.99) * 1000.0);
    println!("read by the server until its create call:   p50 <= {p50:.2} ms, p99 <= {p99:.2} ms, {} calls", started.n);
    let both = p99 + super::failover::quantile(&heard, 0.99).as_secs_f64() * 1000.0;
    println!("both together: p99 <= {both:.2} ms");
    if check && MAX.as_secs_f64() * 1000.0 < both {
        bail!("p99 is above {} ms", MAX.as_millis());
    }
    Ok(())
}

async fn run(bench: &Bench, size: u32) -> anyhow::Result<(Vec<Duration>, super::Found)> {
    bench.expect(&["up", "--detach", "--port-base", "0", "--size", &format!("test={size}")])?;
    let port = super::health_port(&bench.status()?).context("the server has no health port")?;
    let layout = Layout::open(&bench.dir)?;
    let mut client = api::connect(&layout, &shape::shard(1)).await?;
    let mut events = client.events().await?;
    let before: Vec<String> = client.view().await?.instances.into_iter().map(|it| it.instance_id).collect();
    ensure!(before.len() == size as usize, "{} instances instead of {size}", before.len());
    let deadline = SystemClock.now().plus(Duration::from_secs(120));
    for id in &before {
        notice::give(&layout.instances().join(id), "terminate", Some(deadline))?;
    }
    let mut read: BTreeMap<String, i64> = BTreeMap::new();
    let mut asked = 0;
    let all = tokio::time::timeout(PATIENCE, async {
        while read.len() < before.len() || asked < before.len() {
            let event = events.message().await?.context("the server ended the stream of events")?;
            match event.reason.as_str() {
                "TerminationNotice" => {
                    let at = millis(event.at.as_ref()).context("an event without its time")?;
                    read.entry(event.instance_id).or_insert(at);
                }
                "InstanceCreateRequested" => asked += 1,
                _ => {}
            }
        }
        anyhow::Ok(())
    });
    all.await.context("not all were noticed and replaced within 60 s")??;
    // The instances say themselves when their agents saw it.
    let seen: BTreeMap<String, i64> = client
        .view()
        .await?
        .instances
        .into_iter()
        .filter_map(|it| Some((it.instance_id, millis(it.notice?.detected_at.as_ref())?)))
        .collect();
    let heard: Vec<Duration> = read
        .iter()
        .filter_map(|(id, at)| Some(Duration::from_millis(u64::try_from(at - seen.get(id)?).unwrap_or(0))))
        .collect();
    ensure!(heard.len() == before.len(), "only {} of {size} instances show their notice", heard.len());
    let text = http::get(port, "/metrics").await.context("read the metrics")?.body;
    let started = super::read(&text).context("no histogram nstance_replacement_start_seconds")?;
    ensure!(u64::from(size) <= started.n, "only {} of {size} create calls were counted", started.n);
    Ok((heard, started))
}
