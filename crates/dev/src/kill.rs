//! `kill`: something dies hard, and we measure how the rest gets over it.

use std::{fs, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use nstance_core::{
    ids::Shard,
    ports::clock::Clock as _,
    time::{Mono, Timestamp},
};
use nstance_proto::v1::Event;
use nstance_providers::process::kill_agent;
use nstance_rt::clock::SystemClock;
use tonic::Streaming;

use crate::{
    api::{self, Client, millis},
    cli::{Deadly, KillArgs},
    layout::Layout,
    records,
    recovery::{self, Watched},
    target::{self, Target},
};

/// After this we say that nothing came of it.
const PATIENCE: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_millis(50);
const HOLD_LOOK: Duration = Duration::from_millis(500);
const HOLD_LASTS: Duration = Duration::from_secs(5);

pub(crate) async fn run(layout: &Layout, args: &KillArgs) -> anyhow::Result<ExitCode> {
    let target: Target = args.target.parse().map_err(anyhow::Error::msg)?;
    match &target {
        Target::Instance(id) => instance(layout, id, args.no_wait).await,
        _ => component(layout, &target, args).await,
    }
}

async fn instance(layout: &Layout, id: &str, no_wait: bool) -> anyhow::Result<ExitCode> {
    let agent = target::agent(layout, id)?;
    let shard = target::shard_of(layout, id);
    let instance = id.parse().with_context(|| format!("read instance id {id:?}"))?;
    // Listening must begin before there is something to hear.
    let watched = if no_wait { None } else { Some(listen(layout, &shard).await) };
    let began = Began::now();
    if !kill_agent(&layout.instances(), instance).with_context(|| format!("kill the agent of {id}"))? {
        bail!("the agent of {id} (pid {}) died by itself just now", agent.pid);
    }
    say!("killed instance/{id} (pid {})", agent.pid);
    tell_recovery(layout, watched, id, began).await
}

/// When something was done to an instance.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Began {
    pub(crate) mono: Mono,
    pub(crate) at: Timestamp,
}

impl Began {
    pub(crate) fn now() -> Self {
        Self { mono: SystemClock.monotonic(), at: SystemClock.now() }
    }
}

/// Tells when the replacement of an instance was asked for and ready. Nobody listens if nobody wants to wait.
pub(crate) async fn tell_recovery(
    layout: &Layout,
    watched: Option<anyhow::Result<(Client, Streaming<Event>)>>,
    id: &str,
    began: Began,
) -> anyhow::Result<ExitCode> {
    let (mut client, events) = match watched {
        None => return Ok(ExitCode::SUCCESS),
        Some(Ok(watched)) => watched,
        Some(Err(error)) => {
            say!("recovery not measured: {error:#}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let recovery = recovery(&mut client, events, id, began);
    let why = match tokio::time::timeout(PATIENCE, recovery).await {
        Ok(Ok(Recovery::Ready(line))) => {
            say!("{line}");
            return Ok(ExitCode::SUCCESS);
        }
        Ok(Ok(Recovery::Held(why))) => format!("no replacement is asked for: {why}"),
        Ok(Err(error)) => format!("recovery not measured: {error:#}"),
        Err(_) => "no replacement was ready within 60 s".to_owned(),
    };
    say!("{why}; look with `nstance-dev status{}`", layout.dir_flag());
    Ok(ExitCode::FAILURE)
}

enum Recovery {
    Ready(String),
    /// The planner has a reason not to replace it now.
    Held(String),
}

pub(crate) async fn listen(layout: &Layout, shard: &Shard) -> anyhow::Result<(Client, Streaming<Event>)> {
    let mut client = api::connect(layout, shard).await?;
    let events = client.events().await?;
    Ok((client, events))
}

/// Waits for the replacement of a killed instance: its create request, then its first good report.
async fn recovery(
    client: &mut Client,
    mut events: Streaming<Event>,
    id: &str,
    began: Began,
) -> anyhow::Result<Recovery> {
    let group = client.view().await?.instances.into_iter().find(|it| it.instance_id == id).map(|it| it.group);
    let mut looks = tokio::time::interval(HOLD_LOOK);
    let (replacement, requested) = loop {
        let event = tokio::select! {
            biased;
            event = events.message() => event?.context("the server ended the stream of events")?,
            _ = looks.tick() => {
                let view = client.view().await?;
                let groups = view.groups.iter().filter(|it| group.as_ref().is_none_or(|group| *group == it.key));
                let hold = groups.flat_map(|it| &it.holds).next();
                match hold {
                    // Many holds last for a moment only.
                    Some(hold) if HOLD_LASTS < SystemClock.monotonic().since(began.mono) => {
                        return Ok(Recovery::Held(format!("{}: {}", hold.kind, hold.message)));
                    }
                    _ => continue,
                }
            }
        };
        let ours = group.as_ref().is_none_or(|group| *group == event.group);
        if event.reason == "InstanceCreateRequested" && ours {
            let at = millis(event.at.as_ref()).map_or(began.at, Timestamp::from_millis);
            break (event.instance_id, at.since(began.at));
        }
    };
    loop {
        let view = client.view().await?;
        let ready = |it: &nstance_proto::v1::InstanceStatusResponse| it.status == "running" && it.health == "healthy";
        if view.instances.iter().any(|it| it.instance_id == replacement && ready(it)) {
            let ready_after = SystemClock.monotonic().since(began.mono).as_secs_f64();
            let requested = requested.as_millis();
            return Ok(Recovery::Ready(format!(
                "replacement requested after {requested} ms, ready after {ready_after:.1} s ({replacement})"
            )));
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn component(layout: &Layout, target: &Target, args: &KillArgs) -> anyhow::Result<ExitCode> {
    let record = target::component(layout, target).await?;
    let (name, pid, flag) = (&record.name, record.process.pid, layout.dir_flag());
    let has_supervisor = records::supervisor(layout).is_some();
    let watched = Watched::begin(layout, &record).await;
    let hold = records::hold_path(layout, name);
    if args.no_restart || args.restart_after.is_some() {
        fs::write(&hold, "held by `nstance-dev kill`\n").with_context(|| format!("write {}", hold.display()))?;
    }
    let since = SystemClock.monotonic();
    let signalled = match args.signal {
        Deadly::Kill => record.process.kill_hard(),
        Deadly::Term => record.process.ask_to_end(),
    };
    if !signalled.with_context(|| format!("signal {name} (pid {pid})"))? {
        let _ = fs::remove_file(&hold);
        bail!("{name} (pid {pid}) ended by itself just now");
    }
    match args.signal {
        Deadly::Kill => say!("killed {name} (pid {pid})"),
        Deadly::Term => say!("asked {name} (pid {pid}) to end"),
    }
    if !has_supervisor {
        say!("no `up` is running that would start it again; start one with `nstance-dev up{flag}`");
        return Ok(ExitCode::SUCCESS);
    }
    if args.no_restart {
        say!("it stays down until `nstance-dev heal{flag}`");
        if args.no_wait || !watched.has_others() {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let release = async {
        if let Some(after) = args.restart_after {
            tokio::time::sleep(after).await;
            let _ = fs::remove_file(&hold);
        }
    };
    if args.no_wait {
        release.await;
        return Ok(ExitCode::SUCCESS);
    }
    let patience = PATIENCE + args.restart_after.unwrap_or_default();
    let comes_back = !args.no_restart;
    let recovery = async { tokio::join!(release, watched.recovery(layout, since, comes_back)) };
    Ok(recovery::within(layout, patience, recovery).await)
}
