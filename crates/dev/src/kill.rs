//! `kill`: something dies hard, and we measure how the rest gets over it.

use std::{fs, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use nstance_core::{
    ports::clock::Clock as _,
    time::{Mono, Timestamp},
};
use nstance_proto::v1::Event;
use nstance_providers::process::kill_agent;
use nstance_rt::clock::SystemClock;
use tonic::Streaming;

use crate::{
    api::{self, Client, millis},
    cli::KillArgs,
    http,
    layout::Layout,
    records::{self, RunFile},
    status,
};

/// After this we say that nothing came of it.
const PATIENCE: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_millis(50);
const HOLD_LOOK: Duration = Duration::from_millis(500);
const HOLD_LASTS: Duration = Duration::from_secs(5);

pub(crate) async fn run(layout: &Layout, args: &KillArgs) -> anyhow::Result<ExitCode> {
    match args.target.split_once('/') {
        Some(("instance", id)) => instance(layout, id, args.no_wait).await,
        Some(("server", "1")) => server(layout, args).await,
        Some(("server", n)) => bail!("there is no server/{n}; this build runs one, server/1"),
        _ => bail!("{:?} is no target; targets are instance/ID and server/1", args.target),
    }
}

/// Lets held components be started again.
pub(crate) fn heal(layout: &Layout) -> anyhow::Result<()> {
    let mut n_healed = 0;
    for name in ["server-1", records::STORE] {
        match fs::remove_file(records::hold_path(layout, name)) {
            Ok(()) => {
                n_healed += 1;
                say!("{name} is started again");
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("let {name} start again")),
        }
    }
    if n_healed == 0 {
        say!("nothing was held down");
    }
    Ok(())
}

async fn instance(layout: &Layout, id: &str, no_wait: bool) -> anyhow::Result<ExitCode> {
    let Some(agent) = layout.agent(id) else { bail!(unknown(id, &living(layout))) };
    let instance = id.parse().with_context(|| format!("read instance id {id:?}"))?;
    // Listening must begin before there is something to hear.
    let watched = if no_wait { None } else { Some(listen(layout).await) };
    let (killed, killed_at) = (SystemClock.monotonic(), SystemClock.now());
    if !kill_agent(&layout.instances(), instance).with_context(|| format!("kill the agent of {id}"))? {
        bail!("the agent of {id} (pid {}) died by itself just now", agent.pid);
    }
    say!("killed instance/{id} (pid {})", agent.pid);
    let (mut client, events) = match watched {
        None => return Ok(ExitCode::SUCCESS),
        Some(Ok(watched)) => watched,
        Some(Err(error)) => {
            say!("recovery not measured: {error:#}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let recovery = recovery(&mut client, events, id, killed, killed_at);
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

async fn listen(layout: &Layout) -> anyhow::Result<(Client, Streaming<Event>)> {
    let mut client = api::connect(layout, &crate::shape::shard(1)).await?;
    let events = client.events().await?;
    Ok((client, events))
}

/// Waits for the replacement of a killed instance: its create request, then its first good report.
async fn recovery(
    client: &mut Client,
    mut events: Streaming<Event>,
    id: &str,
    killed: Mono,
    killed_at: Timestamp,
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
                    Some(hold) if HOLD_LASTS < SystemClock.monotonic().since(killed) => {
                        return Ok(Recovery::Held(format!("{}: {}", hold.kind, hold.message)));
                    }
                    _ => continue,
                }
            }
        };
        let ours = group.as_ref().is_none_or(|group| *group == event.group);
        if event.reason == "InstanceCreateRequested" && ours {
            let at = millis(event.at.as_ref()).map_or(killed_at, Timestamp::from_millis);
            break (event.instance_id, at.since(killed_at));
        }
    };
    loop {
        let view = client.view().await?;
        let ready = |it: &nstance_proto::v1::InstanceStatusResponse| it.status == "running" && it.health == "healthy";
        if view.instances.iter().any(|it| it.instance_id == replacement && ready(it)) {
            let ready_after = SystemClock.monotonic().since(killed).as_secs_f64();
            let requested = requested.as_millis();
            return Ok(Recovery::Ready(format!(
                "replacement requested after {requested} ms, ready after {ready_after:.1} s ({replacement})"
            )));
        }
        tokio::time::sleep(PERIOD).await;
    }
}

async fn server(layout: &Layout, args: &KillArgs) -> anyhow::Result<ExitCode> {
    let name = "server-1";
    let flag = layout.dir_flag();
    let record = RunFile::read(layout, name).filter(|it| it.process.lives());
    let record = record.with_context(|| format!("{name} is not running; look with `nstance-dev status{flag}`"))?;
    let has_supervisor = records::supervisor(layout).is_some();
    if args.no_restart {
        let path = records::hold_path(layout, name);
        fs::write(&path, "held by `nstance-dev kill --no-restart`\n")
            .with_context(|| format!("write {}", path.display()))?;
    }
    let killed = SystemClock.monotonic();
    record.process.kill_hard().with_context(|| format!("kill {name}"))?;
    say!("killed {name} (pid {})", record.process.pid);
    if args.no_restart {
        say!("it stays down until `nstance-dev heal{flag}`");
        return Ok(ExitCode::SUCCESS);
    }
    if !has_supervisor {
        say!("no `up` is running that would start it again; start one with `nstance-dev up{flag}`");
        return Ok(ExitCode::SUCCESS);
    }
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    match tokio::time::timeout(PATIENCE, comeback(layout, &record, killed)).await {
        Ok(line) => {
            say!("{line}");
            Ok(ExitCode::SUCCESS)
        }
        Err(_) => {
            say!("{name} was not back within 60 s; look with `nstance-dev logs {name}{flag}`");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Waits until another process serves in the killed one's place, leads, and has all its agents back.
async fn comeback(layout: &Layout, old: &RunFile, killed: Mono) -> String {
    let since = || SystemClock.monotonic().since(killed);
    let (mut started, mut led, mut client) = (None, None, None);
    loop {
        let new = RunFile::read(layout, &old.name).filter(|it| it.process != old.process && it.process.lives());
        if let Some(new) = &new {
            started.get_or_insert_with(since);
            let port = new.port("health").unwrap_or_default();
            if led.is_none() && http::get(port, "/leader").await.is_ok_and(|answer| answer.code == 200) {
                led = Some(since());
            }
        }
        if let (Some(new), Some(started), Some(led)) = (new, started, led)
            && status::look_at(layout, &crate::shape::shard(1), &mut client).await.is_ok_and(|view| view.is_healthy())
        {
            return format!(
                "runs again after {} ms (pid {}), leads after {:.1} s, all healthy after {:.1} s",
                started.as_millis(),
                new.process.pid,
                led.as_secs_f64(),
                since().as_secs_f64()
            );
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Instances whose agent lives.
fn living(layout: &Layout) -> Vec<String> {
    let entries = fs::read_dir(layout.instances()).into_iter().flatten().flatten();
    let mut ids: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|id| layout.agent(id).is_some())
        .collect();
    ids.sort();
    ids
}

/// What to say to somebody who named an instance that does not live.
fn unknown(id: &str, living: &[String]) -> String {
    if living.is_empty() {
        return format!("there is no living instance {id:?}, and no other; look with `nstance-dev status`");
    }
    let nearest =
        living.iter().min_by_key(|it| distance(id, it)).filter(|it| distance(id, it) <= 6 || it.starts_with(id));
    match nearest {
        Some(nearest) if !id.is_empty() => format!("there is no living instance {id:?}; did you mean {nearest}?"),
        _ => format!("there is no living instance {id:?}; there is\n  {}", living.join("\n  ")),
    }
}

/// Edits between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (corner + usize::from(x != *y)).min(above + 1).min(row[j] + 1);
            corner = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_instance_is_answered_with_the_nearest_or_the_list() {
        let living = vec!["tst06bgm7733st2576nx5jht4ecjw".to_owned(), "tst06bgm7733st2576nx5jht4aaaa".to_owned()];
        assert!(
            unknown("tst06bgm7733st2576nx5jht4ecjx", &living).contains("did you mean tst06bgm7733st2576nx5jht4ecjw?")
        );
        assert!(unknown("tst06bgm7733", &living).contains("did you mean"));
        let list = unknown("web-1", &living);
        assert!(list.contains("ecjw\n") && list.contains("aaaa"), "{list}");
        assert!(unknown("x", &[]).contains("no other"));
    }

    #[test]
    fn distances_count_edits() {
        assert_eq!(
            (distance("abc", "abc"), distance("abc", "axc"), distance("", "abc"), distance("ab", "b")),
            (0, 1, 3, 1)
        );
    }
}
