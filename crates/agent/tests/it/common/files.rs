//! Streams of key requests and files that a test speaks into. A stream nobody speaks into is not known to the server.

use std::{collections::VecDeque, sync::Mutex, time::Duration};

use nstance_agent::State;
use nstance_proto::v1::{self, file_status};
use nstance_rt::tasks::Tasks;
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::{World, refusal};

/// How to answer one submission of public keys.
#[derive(Clone)]
pub enum Submit {
    Take,
    Refuse(Code, &'static str),
    Hang,
}

type Queue<T> = Mutex<VecDeque<mpsc::Receiver<Result<T, Status>>>>;

/// What a test says on the next stream that is opened; the stream ends when it is dropped.
pub type Voice<T> = mpsc::Sender<Result<T, Status>>;

pub struct Feeds {
    keys: Queue<v1::KeyGenerationRequest>,
    files: Queue<v1::FileTransfer>,
    /// Empty means `Take`.
    submit: Mutex<VecDeque<Submit>>,
    opened: (mpsc::Sender<v1::AgentStreamRequest>, tokio::sync::Mutex<mpsc::Receiver<v1::AgentStreamRequest>>),
    submitted: (mpsc::Sender<Submission>, tokio::sync::Mutex<mpsc::Receiver<Submission>>),
}

type Submission = (Instant, v1::PublicKeysRequest);

impl Default for Feeds {
    fn default() -> Self {
        let (opened, submitted) = (mpsc::channel(1024), mpsc::channel(1024));
        Self {
            keys: Mutex::default(),
            files: Mutex::default(),
            submit: Mutex::default(),
            opened: (opened.0, tokio::sync::Mutex::new(opened.1)),
            submitted: (submitted.0, tokio::sync::Mutex::new(submitted.1)),
        }
    }
}

fn next<T>(queue: &Queue<T>) -> Result<Response<ReceiverStream<Result<T, Status>>>, Status> {
    let receiver = queue.lock().unwrap().pop_front();
    let stream = receiver.ok_or_else(|| Status::unimplemented("not asked for here"))?;
    Ok(Response::new(ReceiverStream::new(stream)))
}

impl Feeds {
    pub fn open_keys(&self) -> Result<Response<ReceiverStream<Result<v1::KeyGenerationRequest, Status>>>, Status> {
        next(&self.keys)
    }

    pub fn open_files(
        &self,
        request: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<ReceiverStream<Result<v1::FileTransfer, Status>>>, Status> {
        let stream = next(&self.files)?;
        self.opened.0.try_send(request.into_inner()).expect("the test reads what it asks for");
        Ok(stream)
    }

    pub async fn submit(&self, request: Request<v1::PublicKeysRequest>) -> Result<Response<()>, Status> {
        self.submitted.0.try_send((Instant::now(), request.into_inner())).expect("the test reads what it asks for");
        let script = self.submit.lock().unwrap().pop_front().unwrap_or(Submit::Take);
        match script {
            Submit::Take => Ok(Response::new(())),
            Submit::Refuse(code, reason) => Err(refusal(code, reason)),
            Submit::Hang => std::future::pending().await,
        }
    }
}

impl World {
    pub fn feed_keys(&self) -> Voice<v1::KeyGenerationRequest> {
        let (sender, receiver) = mpsc::channel(64);
        self.plane.feeds.keys.lock().unwrap().push_back(receiver);
        sender
    }

    pub fn feed_files(&self) -> Voice<v1::FileTransfer> {
        let (sender, receiver) = mpsc::channel(64);
        self.plane.feeds.files.lock().unwrap().push_back(receiver);
        sender
    }

    pub fn script_submit(&self, answers: impl IntoIterator<Item = Submit>) {
        self.plane.feeds.submit.lock().unwrap().extend(answers);
    }

    /// The next stream of files that is opened.
    pub async fn next_files_stream(&self) -> v1::AgentStreamRequest {
        self.plane.feeds.opened.1.lock().await.recv().await.unwrap()
    }

    /// The names of the next submission, with the keys as they came.
    pub async fn next_submission(&self) -> (Instant, Vec<(String, String)>) {
        let submitted = &self.plane.feeds.submitted.1;
        let next = tokio::time::timeout(Duration::from_secs(3600), async { submitted.lock().await.recv().await });
        let (at, request) = next.await.expect("submitted in time").unwrap();
        assert_eq!(request.instance_id, super::INSTANCE);
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (at, request.keys.into_iter().map(|key| (key.filename, text(key.public_key_pem))).collect())
    }

    pub async fn no_submission_for(&self, long: Duration) {
        let submitted = &self.plane.feeds.submitted.1;
        let next = tokio::time::timeout(long, async { submitted.lock().await.recv().await });
        assert!(next.await.is_err(), "keys were submitted");
    }

    /// The next report out of turn.
    pub async fn next_change(&mut self) -> (Instant, v1::HealthReportRequest) {
        loop {
            let (at, report) = self.next_report().await;
            if report.kind() == v1::ReportKind::Change {
                return (at, report);
            }
        }
    }

    /// Starts server and agent, and waits for the first report.
    pub async fn start_enrolled(&mut self, more: &[(&str, &str)]) -> Tasks {
        self.write_nonce(Duration::from_secs(3600));
        nstance_agent::identity_dir::prepare(&self.settings()).unwrap();
        let server = self.start_server();
        self.start_agent_with(self.settings_with(more));
        self.next_report().await;
        server
    }

    pub async fn until_serving(&self) {
        self.until(|state| *state == State::Serving).await;
    }
}

pub fn file(batch: &str, name: &str, content: impl AsRef<[u8]>) -> v1::FileTransfer {
    v1::FileTransfer {
        batch_id: batch.to_owned(),
        filename: name.to_owned(),
        content: content.as_ref().to_vec(),
        ..Default::default()
    }
}

pub fn commit(batch: &str, hash: &str) -> v1::FileTransfer {
    v1::FileTransfer { batch_id: batch.to_owned(), config_hash: hash.to_owned(), ..Default::default() }
}

pub async fn say<T>(voice: &Voice<T>, all: impl IntoIterator<Item = T>) {
    for message in all {
        voice.send(Ok(message)).await.unwrap();
    }
}

/// What a report says of its files: `None` for one that is fine.
pub fn files(report: &v1::HealthReportRequest) -> Vec<(String, Option<String>)> {
    let mut all: Vec<_> = report
        .files
        .iter()
        .map(|(name, status)| match status.status.clone().unwrap() {
            file_status::Status::LastModified(_) => (name.clone(), None),
            file_status::Status::Error(why) => (name.clone(), Some(why)),
        })
        .collect();
    all.sort();
    all
}
