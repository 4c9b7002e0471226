//! Agents of the tests: one by one, or a fleet in which every VM that stands runs one.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use nstance_core::ids::InstanceId;
use nstance_identity::{ca::Bundle, keys::KeyPair};
use nstance_proto::v1::{self, agent_service_client::AgentServiceClient};
use nstance_server::boot::Leader;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, transport::Channel};

use super::{
    Shard, Site, wait_for,
    wire::{Line, dial, new_key, register_agent, request, tls},
};

/// Long enough that no test meets a silent agent by accident.
pub const INTERVAL_MS: u32 = 60_000;

/// A registered agent: a key and its certificate.
#[derive(Clone)]
pub struct Agent {
    pub id: InstanceId,
    pub key: Arc<KeyPair>,
    pub chain: Vec<u8>,
    pub bundle: Bundle,
}

impl Agent {
    /// Registers the agent of a VM with the nonce that the VM was made with.
    pub async fn register(shard: &Shard, id: InstanceId) -> Self {
        let key = new_key(shard.site.entropy.as_ref());
        let nonce = shard.site.spec(id).bootstrap.nonce_jwt;
        let answer = register_agent(shard, &nonce, &key).await.expect("a registration");
        Self::from(id, key, &answer)
    }

    pub fn from(id: InstanceId, key: KeyPair, answer: &v1::RegisterClientResponse) -> Self {
        let bundle = Bundle::parse(&answer.ca_bundle_pem).expect("a bundle");
        Self { id, key: Arc::new(key), chain: answer.client_certificate_pem.clone(), bundle }
    }

    pub async fn dial(&self, address: &str) -> Result<Line, String> {
        dial(address, tls(&self.bundle, Some((&self.chain, &self.key))), Ipv4Addr::LOCALHOST).await
    }

    /// A call on the agent port that has no effect: who may call is told that it brought no keys.
    pub async fn knock(&self, leader: &Leader) -> Status {
        let line = self.dial(&leader.advertised.agent).await.expect("the agent port");
        let mut client = AgentServiceClient::new(line.channel.clone());
        let nothing = v1::PublicKeysRequest { instance_id: self.id.to_string(), keys: Vec::new() };
        match client.submit_public_keys(nothing).await {
            Ok(_) => Status::ok("served"),
            Err(status) => status,
        }
    }

    /// Opens the report stream and sends the first report.
    pub async fn report(&self, leader: &Leader) -> Reporting {
        self.try_report(leader, INTERVAL_MS).await.expect("the agent port")
    }

    async fn try_report(&self, leader: &Leader, interval_ms: u32) -> Result<Reporting, String> {
        let line = self.dial(&leader.advertised.agent).await?;
        Ok(Reporting::open(line, self.id, interval_ms).await)
    }
}

pub fn report(id: InstanceId, kind: v1::ReportKind) -> v1::HealthReportRequest {
    v1::HealthReportRequest {
        instance_id: id.to_string(),
        kind: kind.into(),
        interval_ms: INTERVAL_MS,
        ..v1::HealthReportRequest::default()
    }
}

/// An open report stream.
pub struct Reporting {
    pub reports: mpsc::Sender<v1::HealthReportRequest>,
    line: Line,
    call: JoinSet<Result<(), Status>>,
}

impl Reporting {
    pub async fn open(line: Line, id: InstanceId, interval_ms: u32) -> Self {
        let (reports, receiver) = mpsc::channel(16);
        let first = v1::HealthReportRequest { interval_ms, ..report(id, v1::ReportKind::First) };
        reports.send(first).await.expect("room for a report");
        let mut client: AgentServiceClient<Channel> = AgentServiceClient::new(line.channel.clone());
        let mut call = JoinSet::new();
        call.spawn(async move { client.report_health(ReceiverStream::new(receiver)).await.map(|_| ()) });
        Self { reports, line, call }
    }

    /// The connection breaks, as when the machine dies.
    pub fn cut(&self) {
        self.line.cut();
    }

    fn is_over(&mut self) -> bool {
        self.call.try_join_next().is_some()
    }

    /// Says that nothing more will come, and waits for the answer.
    pub async fn half_close(self) -> Result<(), Status> {
        let Self { reports, line, call } = self;
        drop(reports);
        let (reports, _) = mpsc::channel(1);
        Self { reports, line, call }.end().await
    }

    /// Ends the stream but not its connection.
    pub fn abandon(self) -> Line {
        self.line
    }

    /// How the server ended the stream.
    pub async fn end(mut self) -> Result<(), Status> {
        let joined = tokio::time::timeout(super::LIMIT, self.call.join_next()).await.expect("the stream ends");
        joined.expect("one call").expect("no panic")
    }
}

/// Every VM that stands runs an agent, which reconnects when it is cut off. A VM that is gone takes its agent along.
pub struct Fleet {
    state: Arc<Mutex<State>>,
    _task: JoinSet<()>,
}

struct State {
    leader: Leader,
    agents: BTreeMap<InstanceId, Agent>,
    links: BTreeMap<InstanceId, Reporting>,
    /// Kept away from the server.
    away: BTreeSet<InstanceId>,
    /// VMs whose agent never starts.
    deaf: BTreeSet<InstanceId>,
    /// If set, VMs beside these come up without an agent.
    heard: Option<BTreeSet<InstanceId>>,
    interval_ms: u32,
}

impl Fleet {
    pub fn on(shard: &Shard) -> Self {
        Self::reporting_every(shard, INTERVAL_MS)
    }

    /// Only of VMs that do not stand yet: the others never come to life.
    pub fn on_new(shard: &Shard) -> Self {
        let fleet = Self::on(shard);
        fleet.state().deaf.extend(shard.site.standing());
        fleet
    }

    /// The interval is what agents tell; they send one report each.
    pub fn reporting_every(shard: &Shard, interval_ms: u32) -> Self {
        let state = Arc::new(Mutex::new(State {
            leader: shard.leader.clone(),
            agents: BTreeMap::new(),
            links: BTreeMap::new(),
            away: BTreeSet::new(),
            deaf: BTreeSet::new(),
            heard: None,
            interval_ms,
        }));
        let mut task = JoinSet::new();
        let (site, shared) = (shard.site.clone(), state.clone());
        task.spawn(async move {
            loop {
                step(&site, &shared).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self { state, _task: task }
    }

    /// From here on connected agents report again and again, as often as they said.
    pub fn keep_reporting(&mut self) {
        let state = self.state.clone();
        self._task.spawn(async move {
            loop {
                let interval = {
                    let state = lock(&state);
                    for (id, link) in &state.links {
                        let periodic = report(*id, v1::ReportKind::Periodic);
                        // A full queue holds a report already.
                        let _ = link
                            .reports
                            .try_send(v1::HealthReportRequest { interval_ms: state.interval_ms, ..periodic });
                    }
                    Duration::from_millis(u64::from(state.interval_ms))
                };
                tokio::time::sleep(interval).await;
            }
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The shard has a new leader; everybody finds it.
    pub fn follow(&self, shard: &Shard) {
        self.state().leader = shard.leader.clone();
    }

    /// Breaks the connection of an agent and keeps it away.
    pub fn cut(&self, id: InstanceId) {
        let mut state = self.state();
        state.away.insert(id);
        if let Some(link) = state.links.remove(&id) {
            link.cut();
        }
    }

    /// The agent of a VM, to do with as one likes: the fleet keeps away from the server with it.
    pub fn take(&self, id: InstanceId) -> Agent {
        self.cut(id);
        self.state().agents.get(&id).cloned().expect("an agent that was connected")
    }

    pub fn back(&self, id: InstanceId) {
        self.state().away.remove(&id);
    }

    /// An agent tells that its machine will be taken away.
    pub async fn notice(&self, id: InstanceId, action: &str) {
        self.notice_by(id, action, None).await;
    }

    /// The same, with the second at which it will be.
    pub async fn notice_by(&self, id: InstanceId, action: &str, seconds: Option<i64>) {
        let reports = self.state().links.get(&id).expect("a connected agent").reports.clone();
        let deadline = seconds.map(|seconds| prost_types::Timestamp { seconds, nanos: 0 });
        let notice = v1::TerminationNotice { action: action.to_owned(), deadline, ..v1::TerminationNotice::default() };
        let report = v1::HealthReportRequest { termination_notice: Some(notice), ..report(id, v1::ReportKind::Notice) };
        reports.send(report).await.expect("an open stream");
    }

    /// From here on new VMs come up without an agent, as with a broken template.
    pub fn deafen_new(&self, site: &Site) {
        self.state().heard = Some(site.standing().into_iter().collect());
    }

    pub fn hear_all(&self) {
        self.state().heard = None;
    }

    pub fn connected(&self) -> Vec<InstanceId> {
        self.state().links.keys().copied().collect()
    }

    /// Waits until exactly these have an agent connected.
    pub async fn is_whole(&self, site: &Site, n: usize) {
        wait_for("every VM has a connected agent", || {
            site.standing().len() == n && self.connected() == site.standing()
        })
        .await;
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no test panicked with it")
}

async fn step(site: &Site, state: &Mutex<State>) {
    let standing = site.standing();
    let (leader, interval_ms, wanted) = {
        let mut state = lock(state);
        let State { links, .. } = &mut *state;
        links.retain(|id, link| {
            let dead = !standing.contains(id);
            if dead {
                link.cut();
            }
            !dead && !link.is_over()
        });
        let wanted: Vec<_> = standing
            .iter()
            .filter(|id| !state.links.contains_key(id) && !state.away.contains(id))
            .filter(|id| !state.deaf.contains(id))
            .filter(|id| state.heard.as_ref().is_none_or(|heard| heard.contains(id)))
            .map(|id| (*id, state.agents.get(id).cloned()))
            .collect();
        (state.leader.clone(), state.interval_ms, wanted)
    };
    for (id, agent) in wanted {
        let agent = match agent {
            Some(agent) => agent,
            None => match enrol(site, &leader, id).await {
                Some(agent) => agent,
                None => continue,
            },
        };
        let link = agent.try_report(&leader, interval_ms).await;
        let mut state = lock(state);
        state.agents.insert(id, agent);
        if let Ok(link) = link
            && !state.away.contains(&id)
        {
            state.links.insert(id, link);
        }
    }
}

async fn enrol(site: &Site, leader: &Leader, id: InstanceId) -> Option<Agent> {
    let bootstrap = site.cloud.vms().into_iter().find(|vm| vm.instance == Some(id))?.spec?.bootstrap;
    let bundle = Bundle::parse(bootstrap.ca_bundle_pem.as_bytes()).expect("a bundle");
    let line = dial(&leader.advertised.registration, tls(&bundle, None), Ipv4Addr::LOCALHOST).await.ok()?;
    let mut client = v1::registration_service_client::RegistrationServiceClient::new(line.channel.clone());
    let key = new_key(site.entropy.as_ref());
    let answer = client.register_agent(request(&bootstrap.nonce_jwt, &key)).await.ok()?;
    Some(Agent::from(id, key, answer.get_ref()))
}
