//! `notices`: many machines are told at one moment that they will be taken. Measured is the way from the agent that sees
//! its notice to the server that has read it, and to the create call of a replacement. All run on one machine, by one
//! clock.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, bail, ensure};
use nstance_core::ports::clock::Clock as _;
use nstance_proto::v1::{Event, InstanceStatusResponse};
use nstance_rt::clock::SystemClock;
use tonic::Streaming;

use super::Bench;
use crate::{
    api::{self, Client, millis},
    layout::Layout,
    notice, shape,
};

const PATIENCE: Duration = Duration::from_secs(60);
/// How soon one create more is let through, by default.
const CREATE_RATE_LIMIT: Duration = Duration::from_millis(100);
const MAX: Duration = Duration::from_millis(10);

/// What one round of notices took.
struct Round {
    /// From the agent that sees its notice until the server has read it.
    heard: Vec<Duration>,
    /// From the agent that sees its notice until the create call.
    asked: Vec<Duration>,
}

/// Gives all instances of a group their notice, as often as told, and fails with `check` if a replacement is asked for
/// later than it may be.
pub(crate) async fn notices(size: u32, rounds: u32, check: bool) -> anyhow::Result<()> {
    ensure!(0 < size, "at least one instance");
    ensure!(0 < rounds, "at least one round");
    let bench = Bench::new("notices")?;
    let found = run(&bench, size, rounds).await;
    if found.is_err() {
        eprintln!("{}", bench.dev(&["logs"]).map(|it| super::tail(&it.stdout)).unwrap_or_default());
    }
    // Whatever came of it, nothing stays behind.
    let cleaned = bench.dev(&["clean"]);
    let found = found?;
    cleaned?;
    let sorted = |times: fn(&Round) -> &Vec<Duration>| {
        let mut all: Vec<Duration> = found.iter().flat_map(times).copied().collect();
        all.sort();
        all
    };
    // Both ends are told in whole milliseconds, cut off: the way between them is shorter than this.
    let below = |sorted: &[Duration], share: f64| super::failover::quantile(sorted, share).as_millis() + 1;
    let shown = |sorted: &[Duration]| {
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|share| below(sorted, share));
        format!("p50 < {p50} ms, p99 < {p99} ms, max < {max} ms")
    };
    let (heard, asked) = (sorted(|round| &round.heard), sorted(|round| &round.asked));
    println!("{size} notices at one moment, {rounds} times");
    println!("seen by the agent until read by the server: {}", shown(&heard));
    println!("seen by the agent until the create call:    {}", shown(&asked));
    let last = |round: &Round| round.asked.iter().max().map_or(0, |it| it.as_millis() + 1).to_string();
    let each: Vec<String> = found.iter().map(last).collect();
    println!("the last create call of each time:          < {} ms", each.join(", "));
    if check && MAX.as_millis() < below(&asked, 0.99) {
        bail!("p99 is not below {} ms", MAX.as_millis());
    }
    Ok(())
}

async fn run(bench: &Bench, size: u32, rounds: u32) -> anyhow::Result<Vec<Round>> {
    bench.expect(&[
        "up",
        "--detach",
        "--port-base",
        "0",
        "--shards",
        "1",
        "--no-k8s",
        "--size",
        &format!("test={size}"),
    ])?;
    let layout = Layout::open(&bench.dir)?;
    let mut client = api::connect(&layout, &shape::shard(1)).await?;
    let mut events = client.events().await?;
    let mut found = Vec::new();
    for n in 1..=rounds {
        let one = async {
            let unaware = settled(&mut client, &mut events, size).await?;
            // Else the pace of creates, not the way to them, would be measured.
            tokio::time::sleep(CREATE_RATE_LIMIT * size).await;
            round(&layout, &mut client, &mut events, &unaware).await
        };
        let timed = tokio::time::timeout(PATIENCE, one).await;
        found.push(timed.with_context(|| format!("round {n}: not all were noticed and replaced within 60 s"))??);
    }
    Ok(found)
}

/// Waits until a whole group is there that has had no notice yet.
async fn settled(client: &mut Client, events: &mut Streaming<Event>, size: u32) -> anyhow::Result<Vec<String>> {
    loop {
        let view = client.view().await?;
        let is_unaware = |it: &&InstanceStatusResponse| it.status == "running" && it.notice.is_none();
        let unaware: Vec<String> = view.instances.iter().filter(is_unaware).map(|it| it.instance_id.clone()).collect();
        if view.is_healthy() && unaware.len() == size as usize {
            return Ok(unaware);
        }
        next(events).await?;
    }
}

async fn round(
    layout: &Layout,
    client: &mut Client,
    events: &mut Streaming<Event>,
    instances: &[String],
) -> anyhow::Result<Round> {
    let deadline = SystemClock.now().plus(Duration::from_secs(120));
    for id in instances {
        notice::give(&layout.instances().join(id), "terminate", Some(deadline))?;
    }
    let mut read: BTreeMap<String, i64> = BTreeMap::new();
    let mut asked = Vec::new();
    while read.len() < instances.len() || asked.len() < instances.len() {
        let event = next(events).await?;
        let at = millis(event.at.as_ref()).context("an event without its time")?;
        match event.reason.as_str() {
            "TerminationNotice" => {
                read.entry(event.instance_id).or_insert(at);
            }
            "InstanceCreateRequested" => asked.push(at),
            _ => {}
        }
    }
    // The instances say themselves when their agents saw it.
    let told: BTreeMap<String, i64> = client
        .view()
        .await?
        .instances
        .into_iter()
        .filter_map(|it| Some((it.instance_id, millis(it.notice?.detected_at.as_ref())?)))
        .collect();
    let seen = |id: &String| told.get(id).copied().with_context(|| format!("{id} does not show its notice"));
    let way = |from: i64, to: i64| Duration::from_millis(u64::try_from(to - from).unwrap_or(0));
    let heard: anyhow::Result<_> = read.iter().map(|(id, at)| Ok(way(seen(id)?, *at))).collect();
    // No replacement belongs to one of them: the first call is for whoever saw it first, and so on.
    let mut first: Vec<i64> = instances.iter().map(seen).collect::<anyhow::Result<_>>()?;
    first.sort_unstable();
    asked.sort_unstable();
    let asked = first.into_iter().zip(asked).map(|(seen, asked)| way(seen, asked)).collect();
    Ok(Round { heard: heard?, asked })
}

async fn next(events: &mut Streaming<Event>) -> anyhow::Result<Event> {
    events.message().await?.context("the server ended the stream of events")
}
