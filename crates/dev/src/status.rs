//! `status`: what runs, what the leader says, whether all is well. The JSON form is a promise to scripts.

use std::{collections::BTreeMap, fs, process::ExitCode, time::Duration};

use nstance_core::{
    ports::clock::Clock as _,
    time::{Mono, Timestamp},
};
use nstance_proto::v1::InstanceStatusResponse;
use nstance_rt::clock::SystemClock;
use serde::Serialize;

use crate::{
    api::{self, Client, View, millis},
    feed::Picture,
    http,
    layout::Layout,
    records::{self, Kind, Phase},
    render, table,
};

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Status {
    /// Absent if nothing is up.
    pub(crate) up_since: Option<String>,
    pub(crate) dir: String,
    pub(crate) provider: String,
    pub(crate) components: Vec<ComponentStatus>,
    pub(crate) shards: Vec<ShardStatus>,
    pub(crate) instances: Vec<InstanceStatus>,
    pub(crate) healthy: bool,
    /// Why it is not.
    pub(crate) problems: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ComponentStatus {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) pid: u32,
    pub(crate) ports: BTreeMap<String, u16>,
    /// `running` or `dead`.
    pub(crate) state: &'static str,
    pub(crate) restarts: u32,
    pub(crate) rss_bytes: u64,
    pub(crate) log: String,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShardStatus {
    pub(crate) name: String,
    pub(crate) leader: String,
    pub(crate) epoch: u64,
    pub(crate) reachable: bool,
    pub(crate) config_etag: String,
    pub(crate) groups: Vec<GroupStatus>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct GroupStatus {
    pub(crate) tenant: String,
    pub(crate) name: String,
    pub(crate) size: i32,
    pub(crate) actual: i32,
    pub(crate) ready: i32,
    pub(crate) draining: i32,
    pub(crate) holds: Vec<String>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct InstanceStatus {
    pub(crate) id: String,
    pub(crate) shard: String,
    pub(crate) group: String,
    pub(crate) state: String,
    pub(crate) health: String,
    pub(crate) pid: Option<u32>,
    pub(crate) age_seconds: f64,
    /// Since its agent was last heard of.
    pub(crate) last_report_seconds: Option<f64>,
    pub(crate) timeline: Vec<Moment>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Moment {
    pub(crate) stage: &'static str,
    pub(crate) at: String,
}

/// Puts together what the files say and what the leader says.
pub(crate) fn compose(layout: &Layout, picture: &Picture) -> Status {
    let mut problems = Vec::new();
    let records = records::all(layout);
    let up = records::supervisor(layout);
    match up.as_ref().map(|it| it.phase) {
        None => problems.push("no `nstance-dev up` is running".to_owned()),
        Some(Phase::Starting) => problems.push("`nstance-dev up` is still starting".to_owned()),
        Some(Phase::Stopping) => problems.push("`nstance-dev up` is stopping".to_owned()),
        Some(Phase::Ready) => {}
    }
    let components: Vec<ComponentStatus> = records
        .into_iter()
        .map(|it| ComponentStatus {
            state: if it.process.lives() { "running" } else { "dead" },
            rss_bytes: rss_bytes(it.process.pid),
            log: layout.short(&it.log),
            name: it.name,
            kind: it.kind,
            pid: it.process.pid,
            ports: it.ports,
            restarts: it.restarts,
        })
        .collect();
    problems.extend(components.iter().filter(|it| it.state == "dead").map(|it| format!("{} is dead", it.name)));
    for needed in [records::STORE, records::SERVER] {
        if up.is_some() && !components.iter().any(|it| it.name == needed) {
            problems.push(format!("{needed} was not started"));
        }
    }
    let (mut shards, mut instances, mut provider) = (Vec::new(), Vec::new(), "process".to_owned());
    match picture {
        Ok(view) => {
            provider.clone_from(&view.leader.provider);
            let now = SystemClock.now();
            instances = view.instances.iter().map(|it| instance(layout, it, now)).collect();
            let shard = shard(view);
            for group in shard.groups.iter().filter(|it| it.actual != it.size || it.ready != it.size) {
                let GroupStatus { tenant, name, size, actual, ready, .. } = group;
                problems.push(format!("group {tenant}/{name} wants {size}, has {actual}, of which {ready} ready"));
            }
            shards.push(shard);
        }
        Err(why) => {
            problems.push(format!("the leader of {} does not answer: {why}", render::shard()));
            shards.push(ShardStatus {
                name: render::shard().to_string(),
                leader: String::new(),
                epoch: 0,
                reachable: false,
                config_etag: String::new(),
                groups: Vec::new(),
            });
        }
    }
    Status {
        up_since: up.map(|it| it.started_at),
        dir: layout.dir().display().to_string(),
        provider,
        components,
        shards,
        instances,
        healthy: problems.is_empty(),
        problems,
    }
}

fn shard(view: &View) -> ShardStatus {
    ShardStatus {
        name: view.leader.shard.clone(),
        leader: view.leader.leader_id.clone(),
        epoch: view.leader.epoch,
        reachable: true,
        config_etag: view.leader.etag.clone(),
        groups: view
            .groups
            .iter()
            .map(|it| GroupStatus {
                tenant: it.tenant.clone(),
                name: it.key.clone(),
                size: it.size,
                actual: it.actual_size,
                ready: it.ready_size,
                draining: it.draining_size,
                holds: it.holds.iter().map(|hold| format!("{}: {}", hold.kind, hold.message)).collect(),
            })
            .collect(),
    }
}

fn instance(layout: &Layout, it: &InstanceStatusResponse, now: Timestamp) -> InstanceStatus {
    let at = |at: Option<&prost_types::Timestamp>| millis(at).map(Timestamp::from_millis);
    let seconds = |at: Timestamp| now.since(at).as_secs_f64();
    let stages = [
        ("created", it.created_at.as_ref()),
        ("registered", it.registered_at.as_ref()),
        ("last-report", it.last_seen.as_ref()),
        ("deleted", it.deleted_at.as_ref()),
    ];
    InstanceStatus {
        id: it.instance_id.clone(),
        shard: it.shard.clone(),
        group: it.group.clone(),
        state: it.status.clone(),
        health: it.health.clone(),
        pid: layout.agent(&it.instance_id).map(|process| process.pid),
        age_seconds: at(it.created_at.as_ref()).map_or(0.0, seconds),
        last_report_seconds: at(it.last_seen.as_ref()).map(seconds),
        timeline: stages
            .into_iter()
            .filter_map(|(stage, moment)| Some(Moment { stage, at: at(moment)?.to_string() }))
            .collect(),
    }
}

/// Memory in use, 0 if the process is gone.
fn rss_bytes(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

/// How `status` shows itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Text,
    Json,
}

/// Shows it once, or again and again until interrupted.
pub(crate) async fn run(layout: &Layout, form: Form, watch: bool) -> anyhow::Result<ExitCode> {
    let mut client = None;
    loop {
        let picture = look(layout, &mut client).await;
        let status = compose(layout, &picture);
        match form {
            Form::Json if watch => println!("{}", serde_json::to_string(&status)?),
            Form::Json => println!("{}", serde_json::to_string_pretty(&status)?),
            Form::Text => println!("{}", table::plain(&status).join("\n")),
        }
        if !watch {
            return Ok(if status.healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        if form == Form::Text {
            println!();
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// One picture; the connection is kept for the next.
pub(crate) async fn look(layout: &Layout, client: &mut Option<Client>) -> Picture {
    let mut connected = match client.take() {
        Some(connected) => connected,
        None => match api::connect(layout).await {
            Ok(connected) => connected,
            Err(error) => return Err(reason(layout, format!("{error:#}")).await),
        },
    };
    match connected.view().await {
        Ok(view) => {
            *client = Some(connected);
            Ok(view)
        }
        Err(status) => Err(status.message().to_owned()),
    }
}

/// The server's own word about why it does not lead is better than a refused connection.
async fn reason(layout: &Layout, error: String) -> String {
    let server = records::RunFile::read(layout, records::SERVER).filter(|it| it.process.lives());
    let Some(port) = server.and_then(|it| it.port("health")) else { return error };
    match http::get(port, "/health").await {
        Ok(answer) if answer.code != 200 => answer.body.trim().to_owned(),
        _ => error,
    }
}

/// `1.2s`, `41s`, `12m`, `3h`: as short as it is clear.
pub(crate) fn short(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => format!("{s:.1}s"),
        s if s < 120.0 => format!("{s:.0}s"),
        s if s < 7200.0 => format!("{:.0}m", s / 60.0),
        s => format!("{:.0}h", s / 3600.0),
    }
}

/// `00:00:41`
pub(crate) fn clock_text(since: Mono, now: Mono) -> String {
    let seconds = now.since(since).as_secs();
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}
