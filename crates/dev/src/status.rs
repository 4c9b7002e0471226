//! `status`: what runs, what the leader says, whether all is well. The JSON form is a promise to scripts.

use std::{collections::BTreeMap, fs, process::ExitCode, time::Duration};

use futures::future::join_all;
use nstance_core::{
    ids::Shard,
    ports::clock::Clock as _,
    time::{Mono, Timestamp},
};
use nstance_proto::v1::InstanceStatusResponse;
use nstance_rt::clock::SystemClock;
use serde::Serialize;

use crate::{
    api::{self, Client, View, millis},
    faults::{self, Fault, Who},
    feed::Picture,
    http,
    kubernetes::{self, KubernetesStatus, KubernetesView},
    layout::Layout,
    link,
    records::{self, Kind, Phase, RunFile},
    roles::{self, Lease},
    shape::Shape,
    table,
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
    /// Absent where it does not run, or does not answer.
    pub(crate) kubernetes: Option<KubernetesStatus>,
    pub(crate) links: Vec<LinkStatus>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) urls: Urls,
    pub(crate) healthy: bool,
    /// Why it is not.
    pub(crate) problems: Vec<String>,
}

/// Where a person goes on.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Urls {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kubeconfig: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ComponentStatus {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    /// Absent while it does not run.
    pub(crate) pid: Option<u32>,
    pub(crate) ports: BTreeMap<String, u16>,
    /// `running`, `paused`, `dead`, or `down`: waiting to be started again.
    pub(crate) state: &'static str,
    pub(crate) restarts: u32,
    pub(crate) rss_bytes: u64,
    pub(crate) log: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shard: Option<String>,
    /// Of a server, by its own word; absent if it does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<u64>,
}

/// The way of agents or operators to a shard's leader.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LinkStatus {
    pub(crate) from: &'static str,
    pub(crate) to: String,
    pub(crate) state: &'static str,
    pub(crate) latency_ms: u64,
}

/// A shard's lease as the store has it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LeaseStatus {
    pub(crate) holder: String,
    pub(crate) epoch: u64,
    pub(crate) renewed_seconds_ago: f64,
    pub(crate) ttl_seconds: f64,
    pub(crate) released: bool,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ShardStatus {
    pub(crate) name: String,
    pub(crate) leader: String,
    pub(crate) epoch: u64,
    pub(crate) reachable: bool,
    pub(crate) lease: Option<LeaseStatus>,
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

/// Puts together what the files say and what the servers say.
pub(crate) fn compose(layout: &Layout, picture: &Picture) -> Status {
    let mut problems = Vec::new();
    let up = records::supervisor(layout);
    match up.as_ref().map(|it| it.phase) {
        None => problems.push("no `nstance-dev up` is running".to_owned()),
        Some(Phase::Starting) => problems.push("`nstance-dev up` is still starting".to_owned()),
        Some(Phase::Stopping) => problems.push("`nstance-dev up` is stopping".to_owned()),
        Some(Phase::Ready) => {}
    }
    let shape = records::shape(layout);
    let components = components(layout, picture, up.is_some().then_some(shape));
    // A server that is gone is no harm while another leads; a shard that nobody leads is told of below.
    let store = components.iter().find(|it| it.kind == Kind::Store);
    if up.is_some() && store.is_none_or(|it| it.state != "running") {
        let state = store.map_or("down", |it| it.state);
        problems.push(format!("{} is {state}", records::STORE));
    }
    let (mut shards, mut instances, mut provider) = (Vec::new(), Vec::new(), "process".to_owned());
    let now = SystemClock.now();
    for shard in shape.shards() {
        let name = shard.to_string();
        let lease = picture.roles.leases.get(&name);
        let status = match picture.shards.get(&name) {
            Some(Ok(view)) => {
                provider.clone_from(&view.leader.provider);
                instances.extend(view.instances.iter().map(|it| instance(layout, it, now)));
                let led = led(view, lease);
                for group in led.groups.iter().filter(|it| it.actual != it.size || it.ready != it.size) {
                    let GroupStatus { tenant, name, size, actual, ready, .. } = group;
                    let of = if 1 < shape.shards { format!(" of {shard}") } else { String::new() };
                    problems
                        .push(format!("group {tenant}/{name}{of} wants {size}, has {actual}, of which {ready} ready"));
                }
                led
            }
            other => {
                let why = other.and_then(|it| it.as_ref().err()).map_or("not asked yet", String::as_str);
                problems.push(format!("the leader of {shard} does not answer: {why}"));
                unled(name, lease)
            }
        };
        shards.push(status);
    }
    let extras = up.as_ref().map(|it| it.extras.clone()).unwrap_or_default();
    problems.extend(kubernetes::problems(&picture.kubernetes, &extras));
    let kubernetes = match &picture.kubernetes {
        KubernetesView::Seen(status) => Some(status.clone()),
        KubernetesView::Absent | KubernetesView::Unreachable(_) => None,
    };
    let kubeconfig = extras.contains(&Kind::Kubernetes).then(|| layout.kubeconfig().display().to_string());
    let faults = faults::all(layout);
    Status {
        up_since: up.map(|it| it.started_at),
        dir: layout.dir().display().to_string(),
        provider,
        components,
        shards,
        instances,
        kubernetes,
        links: links(shape, &faults),
        faults,
        urls: Urls { kubeconfig },
        healthy: problems.is_empty(),
        problems,
    }
}

/// All that are recorded, and the servers that are to be and are not.
fn components(layout: &Layout, picture: &Picture, shape: Option<Shape>) -> Vec<ComponentStatus> {
    let mut components: Vec<ComponentStatus> = records::all(layout)
        .into_iter()
        .map(|it| {
            let role = picture.roles.servers.get(&it.name);
            ComponentStatus {
                state: state(&it),
                pid: Some(it.process.pid),
                rss_bytes: rss_bytes(it.process.pid),
                log: layout.short(&it.log),
                kind: it.kind,
                ports: it.ports,
                restarts: it.restarts,
                shard: it.shard,
                role: role.map(|it| it.role.clone()),
                epoch: role.map(|it| it.epoch),
                name: it.name,
            }
        })
        .collect();
    for place in shape.into_iter().flat_map(Shape::places) {
        if !components.iter().any(|it| it.name == place.name()) {
            components.push(ComponentStatus {
                name: place.name(),
                kind: Kind::Server,
                pid: None,
                ports: BTreeMap::new(),
                state: "down",
                restarts: 0,
                rss_bytes: 0,
                log: layout.short(&layout.log(&place.name())),
                shard: Some(place.shard.to_string()),
                role: None,
                epoch: None,
            });
        }
    }
    components.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    components.sort_by_key(|it| match it.kind {
        Kind::Store => 0,
        Kind::Server => 1,
        Kind::Kubernetes => 2,
        Kind::Operator => 3,
        Kind::Up => 4,
    });
    components
}

fn state(record: &RunFile) -> &'static str {
    if !record.process.lives() {
        "dead"
    } else if is_paused(record.process.pid) {
        "paused"
    } else {
        "running"
    }
}

/// Whether the kernel holds it stopped.
fn is_paused(pid: u32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("State:"));
    line.is_some_and(|line| line.trim_start().starts_with('T'))
}

fn links(shape: Shape, faults: &[Fault]) -> Vec<LinkStatus> {
    let shards = shape.shards().filter(|_| shape.links).map(|it| it.to_string());
    shards
        .flat_map(|shard| Who::ALL.map(|who| (who, shard.clone())))
        .map(|(who, shard)| {
            let state = link::State::of(faults, who, &shard);
            let latency_ms = u64::try_from(state.latency.as_millis()).unwrap_or(u64::MAX);
            LinkStatus { from: who.name(), to: format!("shard/{shard}"), state: state.name(), latency_ms }
        })
        .collect()
}

fn lease_status(lease: &Lease) -> LeaseStatus {
    LeaseStatus {
        holder: lease.holder.clone(),
        epoch: lease.epoch,
        renewed_seconds_ago: lease.renewed.as_secs_f64(),
        ttl_seconds: lease.ttl.as_secs_f64(),
        released: lease.released,
    }
}

/// Of a shard whose leader does not answer only the store can tell.
fn unled(name: String, lease: Option<&Lease>) -> ShardStatus {
    ShardStatus {
        name,
        leader: String::new(),
        epoch: lease.map_or(0, |it| it.epoch),
        reachable: false,
        lease: lease.map(lease_status),
        config_etag: String::new(),
        groups: Vec::new(),
    }
}

fn led(view: &View, lease: Option<&Lease>) -> ShardStatus {
    ShardStatus {
        name: view.leader.shard.clone(),
        leader: view.leader.leader_id.clone(),
        epoch: view.leader.epoch,
        reachable: true,
        lease: lease.map(lease_status),
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
    let mut clients = Clients::default();
    loop {
        let picture = look(layout, &mut clients).await;
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

/// Connections that are kept from one picture to the next, by shard.
pub(crate) type Clients = BTreeMap<String, Client>;

/// One picture of everything.
pub(crate) async fn look(layout: &Layout, clients: &mut Clients) -> Picture {
    let looks = records::shape(layout).shards().map(|shard| {
        let mut client = clients.remove(shard.as_str());
        async move {
            let view = look_at(layout, &shard, &mut client).await;
            (shard.to_string(), view, client)
        }
    });
    let (looks, roles, kubernetes) = tokio::join!(join_all(looks), roles::look(layout), kubernetes::look(layout));
    let mut picture = Picture { shards: BTreeMap::new(), roles, kubernetes };
    for (shard, view, client) in looks {
        clients.extend(client.map(|client| (shard.clone(), client)));
        picture.shards.insert(shard, view);
    }
    picture
}

/// What one shard's leader shows; the connection is kept for the next time.
pub(crate) async fn look_at(layout: &Layout, shard: &Shard, client: &mut Option<Client>) -> Result<View, String> {
    let mut connected = match client.take() {
        Some(connected) => connected,
        None => match api::connect(layout, shard).await {
            Ok(connected) => connected,
            Err(error) => return Err(reason(layout, shard, format!("{error:#}")).await),
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

/// A server's own word about why it does not lead is better than a refused connection.
async fn reason(layout: &Layout, shard: &Shard, error: String) -> String {
    let answers = records::servers_of(layout, shard.as_str()).into_iter().map(|it| async move {
        let answer = http::get_within(it.port("health")?, "/health", Duration::from_secs(1)).await.ok()?;
        (answer.code != 200).then(|| answer.body.trim().to_owned())
    });
    join_all(answers).await.into_iter().flatten().next().unwrap_or(error)
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
