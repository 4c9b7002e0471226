//! One agent on the wire: everything an agent says to its server, and nothing of what it does to its machine.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use nstance_agent::{link::dial, settings::Address};
use nstance_core::ports::clock::Clock as _;
use nstance_identity::{ca::Bundle, keys::KeyPair, tls::client_config};
use nstance_proto::v1::{
    self, AgentStreamRequest, FileStatus, FileTransfer, HealthReportRequest, MachineInfo, Metrics, PublicKeySubmission,
    PublicKeysRequest, RegisterClientRequest, RenewCertificateRequest, ReportKind, TerminationNotice,
    agent_service_client::AgentServiceClient, file_status, registration_service_client::RegistrationServiceClient,
};
use nstance_providers::fake::journal::Made;
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

use super::wire::{Knife, Tapped};

/// Like those of a real agent: one under way, and room for a notice; and one more, for here they also come in floods.
const REPORT_SLOTS: usize = 3;

/// Where the server is and who is to be believed.
pub(super) struct Doors {
    pub(super) registration: Address,
    pub(super) agent: Address,
    pub(super) bundle: Bundle,
    /// How often agents say that they report.
    pub(super) interval: Duration,
}

/// What agents of a fleet count together.
#[derive(Default)]
pub(super) struct Counts {
    /// Reports that were handed to a stream.
    pub(super) reports: AtomicU64,
    /// Reports whose turn had come and that no stream took, of agents that live.
    pub(super) unsent: AtomicU64,
    pub(super) registered: AtomicU64,
    /// Registrations that the server put off for its limits' sake.
    pub(super) put_off: AtomicU64,
    /// Sessions that ended or were not opened in time, because the server was in doubt whether it still leads, or the
    /// machine had no time for it.
    pub(super) reopened: AtomicU64,
}

pub(super) struct Agent {
    pub(super) instance: String,
    pub(super) group: String,
    key: KeyPair,
    made: Made,
    state: Mutex<State>,
    is_furnished: AtomicBool,
}

#[derive(Default)]
struct State {
    reports: Option<mpsc::Sender<HealthReportRequest>>,
    client: Option<AgentServiceClient<Channel>>,
    knife: Knife,
    is_cut: bool,
    /// The runtime hash it has.
    hash: String,
    /// The batch it took last.
    batch: String,
    /// When each was written.
    files: BTreeMap<String, prost_types::Timestamp>,
    notice: Option<TerminationNotice>,
    count: i64,
}

/// Before a connection is tried again.
const REDIAL: Duration = Duration::from_millis(500);

/// Whether the server only asks for patience.
pub(super) fn is_passing(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded | Code::Unknown)
}

fn now() -> prost_types::Timestamp {
    let millis = SystemClock.now().as_millis();
    let nanos = i32::try_from(millis.rem_euclid(1000) * 1_000_000).unwrap_or(0);
    prost_types::Timestamp { seconds: millis.div_euclid(1000), nanos }
}

impl Agent {
    pub(super) fn new(made: Made) -> Self {
        Self {
            instance: made.instance.clone(),
            group: made.group.clone(),
            key: KeyPair::generate(&SystemEntropy::new()),
            made,
            state: Mutex::default(),
            is_furnished: AtomicBool::new(false),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a certificate as often as the server puts it off. The error is final.
    pub(super) async fn register(&self, doors: &Doors, counts: &Counts) -> anyhow::Result<Vec<u8>> {
        let request = RegisterClientRequest {
            registration_nonce_jwt: self.made.nonce.clone(),
            public_key_pem: self.key.public_key_pem().into_bytes(),
            private_ipv4: self.made.ip4.clone().unwrap_or_default(),
            hostname: self.instance.clone(),
            client_version: "bench".to_owned(),
            ..RegisterClientRequest::default()
        };
        let mut wait = Duration::from_millis(20);
        loop {
            // Every machine has settings of its own, and no session to resume.
            let tls = client_config(&doors.bundle, None, Arc::new(SystemClock))?;
            // A door that does not open in time is tried again, like one that is full.
            let answer = match dial(&Tapped::default(), &tls, &doors.registration).await {
                Ok(link) => RegistrationServiceClient::new(link.channel).register_agent(request.clone()).await,
                Err(_) => Err(Status::unavailable("no connection")),
            };
            match answer {
                Ok(answer) => {
                    counts.registered.fetch_add(1, Ordering::Relaxed);
                    return Ok(answer.into_inner().client_certificate_pem);
                }
                Err(status) if is_passing(&status) => {
                    counts.put_off.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(wait).await;
                    wait = (wait * 2).min(Duration::from_secs(1));
                }
                Err(status) => return Err(status).with_context(|| format!("register {}", self.instance)),
            }
        }
    }

    /// Opens the session; answers once the first report is under way.
    pub(super) async fn connect(&self, doors: &Doors, counts: &Counts, chain: &[u8]) -> anyhow::Result<Session> {
        let tls = client_config(&doors.bundle, Some((chain, &self.key)), Arc::new(SystemClock))?;
        let net = Tapped::default();
        let link = loop {
            match dial(&net, &tls, &doors.agent).await {
                Ok(link) => break link,
                Err(error) if self.is_cut() => return Err(error).context("dial for a session"),
                Err(_) => {
                    counts.reopened.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(REDIAL).await;
                }
            }
        };
        let (sender, receiver) = mpsc::channel(REPORT_SLOTS);
        let client = AgentServiceClient::new(link.channel);
        {
            let mut state = self.state();
            state.knife = net.knife();
            if state.is_cut {
                state.knife.cut();
            }
            state.client = Some(client.clone());
            state.reports = Some(sender);
        }
        self.say(doors, counts, ReportKind::First);
        Ok(Session { client, reports: receiver })
    }

    /// Keeps the three streams until one of them ends, and tells once when all files have come: then the server has
    /// taken its first report for sure.
    pub(super) async fn live(
        &self,
        doors: &Doors,
        counts: &Counts,
        session: Session,
        furnished: &(dyn Fn() + Sync),
    ) -> anyhow::Result<()> {
        let Session { client, reports } = session;
        let mut reporting = client.clone();
        let mut reporting = pin!(reporting.report_health(ReceiverStream::new(reports)));
        let told = async {
            let hello = AgentStreamRequest { session_id: self.session(), ..AgentStreamRequest::default() };
            let (mut keys, mut files) = (client.clone(), client.clone());
            let mut asks = keys.key_gen_requests(hello.clone()).await?.into_inner();
            let mut files = files.receive_files(hello).await?.into_inner();
            tokio::try_join!(self.answer(&client, &mut asks), self.receive(doors, counts, furnished, &mut files))?;
            Ok::<_, Status>(())
        };
        tokio::select! {
            biased;
            ended = &mut reporting => ended.map(|_| ()).context("report health"),
            ended = told => ended.context("receive keys and files"),
        }
    }

    /// Makes the keys that are asked for.
    async fn answer(
        &self,
        client: &AgentServiceClient<Channel>,
        asks: &mut Streaming<v1::KeyGenerationRequest>,
    ) -> Result<(), Status> {
        while let Some(ask) = asks.message().await? {
            // One key for all names: whose it is matters to nobody here.
            let public_key_pem = self.key.public_key_pem().into_bytes();
            let key = |name: &String| PublicKeySubmission {
                filename: format!("{name}.pub"),
                public_key_pem: public_key_pem.clone(),
            };
            let keys = ask.key_names.iter().map(key).collect();
            let request = PublicKeysRequest { instance_id: self.instance.clone(), keys };
            client.clone().submit_public_keys(request).await?;
        }
        Ok(())
    }

    /// Takes batches, and tells after each what there is now.
    async fn receive(
        &self,
        doors: &Doors,
        counts: &Counts,
        furnished: &(dyn Fn() + Sync),
        files: &mut Streaming<FileTransfer>,
    ) -> Result<(), Status> {
        let mut batch = BTreeMap::new();
        while let Some(file) = files.message().await? {
            if !file.filename.is_empty() {
                batch.insert(file.filename, now());
                continue;
            }
            let is_whole = {
                let mut state = self.state();
                state.files.append(&mut batch);
                let is_new = state.hash != file.config_hash;
                (state.hash, state.batch) = (file.config_hash, file.batch_id);
                is_new && state.hash.starts_with("sha256:")
            };
            if is_whole && !self.is_furnished.swap(true, Ordering::Relaxed) {
                furnished();
            }
            self.say(doors, counts, ReportKind::Change);
        }
        Ok(())
    }

    fn session(&self) -> String {
        format!("session-{}", self.instance)
    }

    /// Sends a report, if its stream takes one now.
    pub(super) fn say(&self, doors: &Doors, counts: &Counts, kind: ReportKind) -> bool {
        let mut state = self.state();
        let Some(sender) = state.reports.clone().filter(|_| !state.is_cut) else { return false };
        let Ok(place) = sender.try_reserve() else { return false };
        state.count += 1;
        place.send(self.report(&state, doors.interval, kind));
        counts.reports.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Sends the report whose turn has come. One that cannot be handed over is a missed one: a real agent would not have
    /// got rid of it either. Whoever is cut off owes none.
    pub(super) fn report_in_turn(&self, doors: &Doors, counts: &Counts) {
        if !self.say(doors, counts, ReportKind::Periodic) && !self.is_cut() {
            counts.unsent.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// About as large as a real one of a small machine.
    fn report(&self, state: &State, interval: Duration, kind: ReportKind) -> HealthReportRequest {
        let at = now();
        let written = |(name, at): (&String, &prost_types::Timestamp)| {
            (name.clone(), FileStatus { status: Some(file_status::Status::LastModified(*at)), received: true })
        };
        let metrics = || Metrics {
            cpu_usage: 12.5,
            cpu_core_usage: vec![10.0, 15.0],
            memory_usage: 40.0,
            network_bytes_sent: 1e6,
            network_bytes_received: 2e6,
            disk_used: 30.0,
            disk_inodes_used: 5.0,
            disk_bytes_read: 1e5,
            disk_bytes_written: 1e6,
        };
        HealthReportRequest {
            version: "1".to_owned(),
            instance_id: self.instance.clone(),
            timestamp: Some(at),
            count: state.count,
            started: Some(at),
            uptime: "60s".to_owned(),
            one_minute: Some(metrics()),
            five_minutes: Some(metrics()),
            fifteen_minutes: Some(metrics()),
            files: state.files.iter().map(written).collect(),
            termination_notice: state.notice.clone(),
            config_hash: state.hash.clone(),
            batch_id: state.batch.clone(),
            kind: kind.into(),
            interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            machine: (kind == ReportKind::First).then(|| MachineInfo {
                cpu_count: 2,
                memory_bytes: 4 << 30,
                disk_bytes: 20 << 30,
                arch: "amd64".to_owned(),
                os: "linux".to_owned(),
                kernel: "6.12".to_owned(),
                boot_id: self.instance.clone(),
            }),
            agent_version: "bench".to_owned(),
            session_id: self.session(),
            private_ipv4: self.made.ip4.clone().unwrap_or_default(),
            hostname: self.instance.clone(),
            ..HealthReportRequest::default()
        }
    }

    /// Its cloud told it that it will be taken; in every report from now on.
    pub(super) fn note(&self, within: Duration) {
        let mut at = now();
        let detected_at = Some(at);
        at.seconds = at.seconds.saturating_add(i64::try_from(within.as_secs()).unwrap_or(0));
        let notice = TerminationNotice {
            action: "terminate".to_owned(),
            deadline: Some(at),
            detected_at,
            notice_id: self.instance.clone(),
        };
        self.state().notice = Some(notice);
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.state().notice.is_some()
    }

    pub(super) async fn renew(&self) -> anyhow::Result<()> {
        let client = self.state().client.clone();
        let request = RenewCertificateRequest { public_key_pem: self.key.public_key_pem().into_bytes() };
        client.context("it has no session")?.renew_certificate(request).await.context("renew a certificate")?;
        Ok(())
    }

    /// The machine is dead from here on.
    pub(super) fn cut(&self) {
        let mut state = self.state();
        state.is_cut = true;
        state.knife.cut();
        state.reports = None;
        state.client = None;
    }

    pub(super) fn is_furnished(&self) -> bool {
        self.is_furnished.load(Ordering::Relaxed)
    }

    pub(super) fn is_cut(&self) -> bool {
        self.state().is_cut
    }
}

/// What was opened and is to be kept open.
pub(super) struct Session {
    client: AgentServiceClient<Channel>,
    reports: mpsc::Receiver<HealthReportRequest>,
}

#[cfg(test)]
mod tests {
    use nstance_identity::ca::{CaProfile, make_ca_certificate};
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_that_no_stream_takes_is_missed_unless_the_agent_is_cut_off() {
        let (entropy, key) = (SystemEntropy::new(), KeyPair::generate(&SystemEntropy::new()));
        let ca = make_ca_certificate(&key, &CaProfile::of("demo".parse().unwrap()), SystemClock.now(), &entropy);
        let doors = Doors {
            registration: Address::parse("127.0.0.1:1").unwrap(),
            agent: Address::parse("127.0.0.1:1").unwrap(),
            bundle: Bundle::parse(ca.chain_pem.as_bytes()).unwrap(),
            interval: Duration::from_secs(60),
        };
        let made = json!({
            "instance": "tst06bgm7733st2576nx5jht4ecjw", "provider_id": "vm-1", "asked_nanos": 0, "created_at": 0,
            "cluster": "demo", "shard": "dev-1", "tenant": "default", "group": "test", "epoch": 1, "on_demand": false,
            "template": "tst", "infra_hash": "", "nonce": "",
        });
        let agent = Agent::new(serde_json::from_value(made).unwrap());
        let (counts, told) = (Counts::default(), |counts: &Counts| {
            [&counts.reports, &counts.unsent].map(|it| it.load(Ordering::Relaxed))
        });
        agent.report_in_turn(&doors, &counts);
        assert_eq!(told(&counts), [0, 1], "its session is not open");
        let (sender, _stream) = mpsc::channel(1);
        agent.state().reports = Some(sender);
        agent.report_in_turn(&doors, &counts);
        assert_eq!(told(&counts), [1, 1]);
        agent.report_in_turn(&doors, &counts);
        assert_eq!(told(&counts), [1, 2], "its stream is full");
        agent.cut();
        agent.report_in_turn(&doors, &counts);
        assert_eq!(told(&counts), [1, 2]);
    }
}
