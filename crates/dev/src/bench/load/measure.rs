//! The phases of one run, in the order in which a shard lives through them.

use std::{sync::atomic::Ordering, time::Duration};

use anyhow::{Context, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use nstance_core::ports::clock::Clock as _;
use nstance_providers::fake::journal::Journal;
use nstance_rt::clock::SystemClock;

use super::{
    LoadArgs,
    figures::{Figures, Spread},
    fleet::{Blow, Fleet, boot_nanos},
    site::{Site, sizes},
};

/// For all agents of a run to be made, or to be connected.
const ALL: Duration = Duration::from_secs(240);
/// For what a blow brings about.
const SOME: Duration = Duration::from_secs(60);
/// For the last reports to be counted.
const COUNTED: Duration = Duration::from_secs(10);
/// Reports of a flood; a few of each agent at least, and not more than so many of one.
const FLOOD: usize = 50_000;
const FLOOD_OF_ONE: usize = 50;
/// Renewals at a time, and as many as show a rate.
const RENEWING: usize = 64;
const RENEWALS: usize = 2000;
/// After a blow the server may still be at it: the next one is to find it at rest.
const REST: Duration = Duration::from_millis(20);

const MIB: f64 = 1024.0 * 1024.0;

pub(super) async fn run(site: &mut Site, n_agents: usize, args: &LoadArgs) -> anyhow::Result<Figures> {
    let step = |what: &str| say!("{n_agents} agents: {what}");
    step("a store and a server");
    site.start(n_agents, args).await?;
    let fleet = Fleet::start(site.doors(args.interval).await?, &site.journal(), args.parallel)?;
    let began = site.machine()?;
    let groups = sizes(n_agents, args.group_size);
    let mut it = Figures { agents: n_agents, groups: groups.len(), ..Figures::default() };
    let empty = site.used()?.rss_bytes;
    it.rss_empty_mib = mib(empty);

    step("scale-up");
    scale_up(site, &fleet, groups.into_iter().collect(), &mut it).await.context("scale up")?;
    // Who is connected reports from then on: a storm may last longer than agents may be silent.
    fleet.report_from_now_on(true);
    step("registration storm");
    storm(site, &fleet, &mut it).await.context("register all agents")?;
    step("reports");
    reports(site, &fleet, args.watch, &mut it).await.context("count reports")?;
    let used = site.used()?;
    it.rss_mib = mib(used.rss_bytes);
    it.rss_peak_mib = mib(used.peak_rss_bytes);
    it.rss_per_agent_kib = float(used.rss_bytes.saturating_sub(empty)) / float(n_agents as u64) / 1024.0;
    flood(site, &fleet, &mut it).await.context("count a flood of reports")?;
    step("renewals");
    renewals(&fleet, &mut it).await.context("renew certificates")?;

    let mut journal = Journal::open(&site.journal()).context("open the cloud's journal")?;
    for (blow, what, counts) in [(Blow::Loss, "losses", &[1, 10, 100][..]), (Blow::Notice, "notices", &[1, 50])] {
        for at_once in counts.iter().copied().filter(|it| *it == 1 || it * 4 <= n_agents) {
            step(&format!("{what}, {at_once} at once"));
            let rounds = match at_once {
                1 => args.singles,
                many => args.singles.min(100).div_ceil(many).max(args.rounds),
            };
            let mut times = Vec::new();
            for _ in 0..rounds {
                times.extend(fleet.strike(blow, at_once, &mut journal, SOME).await.context("replace the lost")?);
                fleet.is_whole(n_agents, SOME).await.context("bring replacements up")?;
                // What many left behind goes on for longer: their drains end together, and so do their machines.
                if 1 < at_once {
                    settled(site, it.cpu_percent).await?;
                }
                tokio::time::sleep(REST).await;
            }
            let spread = Spread::of(at_once, times);
            match blow {
                Blow::Loss => it.losses.push(spread),
                Blow::Notice => it.notices.push(spread),
            }
        }
    }
    it.sessions_reopened = fleet.counts().reopened.load(Ordering::Relaxed);
    it.others_percent = site.machine()?.others_percent(began);

    step("cold start");
    cold_start(site, &fleet, &mut it).await.context("start cold")?;
    Ok(it)
}

async fn scale_up(site: &Site, fleet: &Fleet, groups: Vec<(String, usize)>, it: &mut Figures) -> anyhow::Result<()> {
    let operator = site.operator().await?;
    let begin = boot_nanos();
    let asked = groups.into_iter().map(|(key, size)| {
        let mut operator = operator.clone();
        async move { operator.resize(key, i32::try_from(size).unwrap_or(i32::MAX)).await }
    });
    stream::iter(asked).buffer_unordered(32).try_collect::<Vec<()>>().await.context("resize the groups")?;
    let look = || {
        let n = fleet.n_creates();
        (it.agents <= n, format!("{n} of {} create calls", it.agents))
    };
    fleet.until(ALL, look).await?;
    it.scale_up_s = seconds(begin, fleet.last_create());
    it.creates_per_s = per_second(it.agents, it.scale_up_s);
    Ok(())
}

async fn storm(site: &Site, fleet: &Fleet, it: &mut Figures) -> anyhow::Result<()> {
    // Each create is still being written down when its call is over. The storm comes later, as machines boot.
    settled(site, 0.0).await?;
    let begin = boot_nanos();
    fleet.wake();
    fleet.is_whole(it.agents, ALL).await?;
    it.furnish_s = seconds(begin, boot_nanos());
    it.register_s = seconds(begin, fleet.registered_at());
    it.registrations_per_s = per_second(it.agents, it.register_s);
    it.connect_s = seconds(begin, fleet.connected_at());
    it.registrations_put_off = fleet.counts().put_off.load(Ordering::Relaxed);
    Ok(())
}

/// Waits until the server has nothing to do, but for reports that are known to take `reports_percent` of a core.
async fn settled(site: &Site, reports_percent: f64) -> anyhow::Result<()> {
    let look = Duration::from_millis(250);
    let begin = SystemClock.monotonic();
    let mut before = site.used()?.cpu_seconds;
    loop {
        tokio::time::sleep(look).await;
        let now = site.used()?.cpu_seconds;
        // A tenth of a processor is what it takes to be there at all; reports do not come evenly.
        if now - before <= look.as_secs_f64() * (10.0 + 1.5 * reports_percent) / 100.0 {
            return Ok(());
        }
        ensure!(SystemClock.monotonic().since(begin) < ALL, "the server does not come to rest");
        before = now;
    }
}

/// Stops reports, waits until the server has counted those on their way, and says how many it has counted.
async fn counted(site: &Site, fleet: &Fleet) -> anyhow::Result<(u64, u64)> {
    fleet.report_from_now_on(false);
    let begin = SystemClock.monotonic();
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let sent = fleet.counts().reports.load(Ordering::Relaxed);
        let counted = site.metrics().await?.sum("nstance_health_reports_total");
        // Those that a broken session took along never come.
        if sent <= counted || COUNTED < SystemClock.monotonic().since(begin) {
            return Ok((sent, counted));
        }
    }
}

async fn reports(site: &Site, fleet: &Fleet, watch: Duration, it: &mut Figures) -> anyhow::Result<()> {
    let (sent_before, counted_before) = counted(site, fleet).await?;
    ensure!(
        counted_before == sent_before,
        "the server counts {counted_before} reports, {sent_before} were sent so far"
    );
    let unsent = || fleet.counts().unsent.load(Ordering::Relaxed);
    let unsent_before = unsent();
    fleet.report_from_now_on(true);
    let (begin, used) = (SystemClock.monotonic(), site.used()?);
    let requests = site.metrics().await?.sum("nstance_store_requests_total");
    tokio::time::sleep(watch).await;
    let (used, requests) = {
        let now = site.metrics().await?.sum("nstance_store_requests_total");
        (site.used()?.cpu_seconds - used.cpu_seconds, now - requests)
    };
    let passed = SystemClock.monotonic().since(begin).as_secs_f64();
    let (sent, counted) = counted(site, fleet).await?;
    fleet.report_from_now_on(true);
    it.reports_sent = sent - sent_before;
    it.reports_missed = missed(it.reports_sent, counted - counted_before) + (unsent() - unsent_before);
    it.reports_per_s = float(it.reports_sent) / passed;
    it.cpu_percent = used / passed * 100.0;
    it.store_requests_per_hour = float(requests) / passed * 3600.0;
    Ok(())
}

async fn flood(site: &Site, fleet: &Fleet, it: &mut Figures) -> anyhow::Result<()> {
    let (before, counted_before) = counted(site, fleet).await?;
    let (begin, used) = (SystemClock.monotonic(), site.used()?);
    fleet.flood((FLOOD / it.agents).clamp(5, FLOOD_OF_ONE)).await;
    let (sent, counted) = counted(site, fleet).await?;
    let passed = SystemClock.monotonic().since(begin).as_secs_f64();
    let used = site.used()?.cpu_seconds - used.cpu_seconds;
    fleet.report_from_now_on(true);
    let n = float(sent - before);
    it.reports_missed += missed(sent - before, counted - counted_before);
    it.reports_sent += sent - before;
    it.flood_reports_per_s = n / passed;
    it.cpu_ms_per_1000_reports = used * 1000.0 / (n / 1000.0);
    Ok(())
}

async fn renewals(fleet: &Fleet, it: &mut Figures) -> anyhow::Result<()> {
    let agents: Vec<_> = fleet.alive().into_iter().take(RENEWALS).collect();
    let (n, begin) = (agents.len(), boot_nanos());
    let renewing = agents.iter().map(|agent| agent.renew());
    let renewed = stream::iter(renewing).buffer_unordered(RENEWING).try_collect::<Vec<()>>();
    tokio::time::timeout(ALL, renewed).await.context("not all were renewed in time")??;
    it.certificates_per_s = per_second(n, seconds(begin, boot_nanos()));
    Ok(())
}

/// The server goes in good order, so that no lease is waited for, and comes back with nothing but what is stored.
async fn cold_start(site: &mut Site, fleet: &Fleet, it: &mut Figures) -> anyhow::Result<()> {
    site.stop_server().await?;
    fleet.disband().await;
    site.forget_cache()?;
    it.cold_start_s = site.start_server().await?.as_secs_f64();
    let groups = site.operator().await?.groups().await.context("list the groups")?;
    let n: usize = groups.iter().map(|it| usize::try_from(it.registered_size).unwrap_or(0)).sum();
    ensure!(n == it.agents, "the server knows of {n} registered instances, there are {}", it.agents);
    Ok(())
}

/// What a session lost that ended while it was counted is missed; what it sent before that was counted late is not.
fn missed(sent: u64, counted: u64) -> u64 {
    sent.saturating_sub(counted)
}

fn seconds(from: u64, to: u64) -> f64 {
    Duration::from_nanos(to.saturating_sub(from)).as_secs_f64()
}

fn per_second(n: usize, seconds: f64) -> f64 {
    float(n as u64) / seconds.max(1e-9)
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
fn float(n: u64) -> f64 {
    n as f64
}

fn mib(bytes: u64) -> f64 {
    float(bytes) / MIB
}
