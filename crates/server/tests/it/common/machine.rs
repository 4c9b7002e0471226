//! A machine with a whole agent on it: three streams on one line, keys, and a disk that batches are written to.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use nstance_core::ids::InstanceId;
use nstance_identity::keys::KeyPair;
use nstance_proto::v1::{self, agent_service_client::AgentServiceClient, file_status};
use nstance_rt::entropy::SystemEntropy;
use nstance_server::boot::Leader;
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming, transport::Channel};

use super::{LIMIT, fleet::Agent, fleet::report, wire::Line};

/// What a batch brought.
#[derive(Debug, Default)]
pub struct Batch {
    pub id: String,
    pub files: BTreeMap<String, Vec<u8>>,
    pub removed: BTreeSet<String>,
    pub hash: String,
}

impl Batch {
    pub fn names(&self) -> Vec<&str> {
        self.files.keys().map(String::as_str).collect()
    }

    pub fn text(&self, name: &str) -> String {
        String::from_utf8(self.files.get(name).unwrap_or_else(|| panic!("{name} is in {:?}", self.names())).clone())
            .expect("a text")
    }
}

pub struct Machine {
    pub agent: Agent,
    pub client: AgentServiceClient<Channel>,
    pub session: String,
    pub hash: String,
    /// The batch it committed last.
    pub batch: String,
    pub keys: BTreeMap<String, KeyPair>,
    pub disk: BTreeMap<String, Vec<u8>>,
    /// Files that it cannot write, and why.
    pub broken: BTreeMap<String, String>,
    /// Files on its disk that no server sent.
    pub foreign: BTreeSet<String>,
    pub epoch: u64,
    reports: mpsc::Sender<v1::HealthReportRequest>,
    pub asks: Streaming<v1::KeyGenerationRequest>,
    pub files: Streaming<v1::FileTransfer>,
    _line: Line,
    _calls: JoinSet<Result<(), Status>>,
}

/// A connection with a stream of reports on it.
struct Link {
    line: Line,
    client: AgentServiceClient<Channel>,
    reports: mpsc::Sender<v1::HealthReportRequest>,
    calls: JoinSet<Result<(), Status>>,
}

impl Link {
    async fn to(agent: &Agent, leader: &Leader) -> Self {
        let line = agent.dial(&leader.advertised.agent).await.expect("the agent port");
        let client = AgentServiceClient::new(line.channel.clone());
        let (reports, receiver) = mpsc::channel(16);
        let mut calls = JoinSet::new();
        let mut calling = client.clone();
        calls.spawn(async move { calling.report_health(ReceiverStream::new(receiver)).await.map(|_| ()) });
        Self { line, client, reports, calls }
    }
}

fn now() -> prost_types::Timestamp {
    use nstance_core::ports::clock::Clock as _;
    let millis = super::Ahead.now().as_millis();
    prost_types::Timestamp { seconds: millis / 1000, nanos: 0 }
}

impl Machine {
    /// An agent that has this hash, no files and no keys.
    pub async fn on(agent: Agent, leader: &Leader, hash: &str) -> Self {
        Self::with(agent, leader, hash, BTreeMap::new(), true).await
    }

    /// The same with files on its disk. One that does not report keeps its hash to itself.
    pub async fn with(
        agent: Agent,
        leader: &Leader,
        hash: &str,
        disk: BTreeMap<String, Vec<u8>>,
        reports_first: bool,
    ) -> Self {
        let link = Link::to(&agent, leader).await;
        let session = format!("session-{}", data_encoding::HEXLOWER.encode(&super::random::<4>(&SystemEntropy::new())));
        let machine = Self::on_link(agent, leader, link, session, hash, disk).await;
        if reports_first {
            machine.report(v1::ReportKind::First).await;
        }
        machine
    }

    /// The same agent on a connection of its own, in the same session: it reports, and opens its other streams once
    /// `heard` is through.
    pub async fn again(&self, leader: &Leader, heard: impl AsyncFnOnce()) -> Self {
        let link = Link::to(&self.agent, leader).await;
        link.reports.send(self.state(v1::ReportKind::First)).await.expect("an open stream");
        heard().await;
        let (agent, session, disk) = (self.agent.clone(), self.session.clone(), self.disk.clone());
        Self { batch: self.batch.clone(), ..Self::on_link(agent, leader, link, session, &self.hash, disk).await }
    }

    async fn on_link(
        agent: Agent,
        leader: &Leader,
        link: Link,
        session: String,
        hash: &str,
        disk: BTreeMap<String, Vec<u8>>,
    ) -> Self {
        let Link { line, client, reports, calls } = link;
        let request = v1::AgentStreamRequest { session_id: session.clone(), ..v1::AgentStreamRequest::default() };
        let asks = client.clone().key_gen_requests(request.clone()).await.expect("a stream").into_inner();
        let files = client.clone().receive_files(request).await.expect("a stream").into_inner();
        Self {
            agent,
            client,
            session,
            hash: hash.to_owned(),
            batch: String::new(),
            keys: BTreeMap::new(),
            disk,
            broken: BTreeMap::new(),
            foreign: BTreeSet::new(),
            epoch: leader.epoch.0,
            reports,
            asks,
            files,
            _line: line,
            _calls: calls,
        }
    }

    pub fn id(&self) -> InstanceId {
        self.agent.id
    }

    /// What it says of itself.
    pub fn state(&self, kind: v1::ReportKind) -> v1::HealthReportRequest {
        let written = self.disk.keys().map(|name| (name, file_status::Status::LastModified(now())));
        let broken = self.broken.iter().map(|(name, why)| (name, file_status::Status::Error(why.clone())));
        let received = |name: &String| self.disk.contains_key(name) && !self.foreign.contains(name);
        let files = written
            .chain(broken)
            .map(|(name, status)| (name.clone(), v1::FileStatus { received: received(name), status: Some(status) }));
        v1::HealthReportRequest {
            config_hash: self.hash.clone(),
            batch_id: self.batch.clone(),
            session_id: self.session.clone(),
            files: files.collect(),
            // Only its stream counts: time may leap without its being missed.
            interval_ms: 0,
            ..report(self.id(), kind)
        }
    }

    pub async fn report(&self, kind: v1::ReportKind) {
        self.reports.send(self.state(kind)).await.expect("an open stream");
    }

    pub async fn say(&self, report: v1::HealthReportRequest) {
        self.reports.send(report).await.expect("an open stream");
    }

    /// The names of keys that it is asked for next.
    pub async fn asked(&mut self) -> Vec<String> {
        let asked = tokio::time::timeout(LIMIT, self.asks.message()).await.expect("keys are asked for in time");
        let asked = asked.expect("an open stream").expect("a request");
        assert_eq!(asked.epoch, self.epoch);
        assert!(!asked.request_id.is_empty());
        asked.key_names
    }

    /// Makes the keys it is asked for and sends their public halves.
    pub async fn make_keys(&mut self) {
        for name in self.asked().await {
            self.keys.entry(name).or_insert_with(|| KeyPair::generate(&SystemEntropy::new()));
        }
        self.submit().await.expect("the keys are taken");
    }

    pub fn submission(&self) -> v1::PublicKeysRequest {
        let keys = self.keys.iter().map(|(name, key)| v1::PublicKeySubmission {
            filename: format!("{name}.pub"),
            public_key_pem: key.public_key_pem().into_bytes(),
        });
        v1::PublicKeysRequest { instance_id: self.id().to_string(), keys: keys.collect() }
    }

    pub async fn submit(&self) -> Result<(), Status> {
        self.client.clone().submit_public_keys(self.submission()).await.map(|_| ())
    }

    /// The next batch as it is sent, not written anywhere.
    pub async fn receive(&mut self) -> Batch {
        self.receive_within(LIMIT).await.expect("a batch in time")
    }

    pub async fn receive_within(&mut self, limit: Duration) -> Option<Batch> {
        let epoch = self.epoch;
        let receive = async {
            let (mut batch, mut id) = (Batch::default(), None);
            loop {
                let message = self.files.message().await.expect("an open stream").expect("a message");
                assert_eq!(message.epoch, epoch);
                assert_eq!(
                    id.get_or_insert_with(|| message.batch_id.clone()),
                    &message.batch_id,
                    "one batch at a time"
                );
                if message.filename.is_empty() {
                    assert!(!message.config_hash.is_empty(), "it commits");
                    (batch.hash, batch.id) = (message.config_hash, message.batch_id);
                    return batch;
                }
                assert!(message.config_hash.is_empty(), "only the last message has a hash");
                if message.remove {
                    batch.removed.insert(message.filename);
                } else {
                    let hash = ring::digest::digest(&ring::digest::SHA256, &message.content);
                    assert_eq!(hash.as_ref(), message.sha256);
                    batch.files.insert(message.filename, message.content);
                }
            }
        };
        tokio::time::timeout(limit, receive).await.ok()
    }

    /// Receives a batch, writes it and reports, as an agent does.
    pub async fn apply(&mut self) -> Batch {
        let batch = self.receive().await;
        self.write(&batch).await;
        batch
    }

    pub async fn write(&mut self, batch: &Batch) {
        let mut whole = true;
        for (name, content) in &batch.files {
            if self.broken.contains_key(name) {
                whole = false;
            } else {
                self.disk.insert(name.clone(), content.clone());
            }
        }
        for name in &batch.removed {
            self.disk.remove(name);
            self.broken.remove(name);
        }
        if whole {
            self.hash.clone_from(&batch.hash);
        }
        self.batch.clone_from(&batch.id);
        self.report(v1::ReportKind::Change).await;
    }

    /// Receives batches until it has this hash and all these files.
    pub async fn settle(&mut self, hash: &str, names: &[&str]) {
        while self.hash != hash || !names.iter().all(|name| self.disk.contains_key(*name)) {
            self.apply().await;
        }
    }
}
