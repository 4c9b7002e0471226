//! A small server to test agents against: real certificates, real TLS, real gRPC, and a script that says how to answer.
//!
//! Connections run through memory, so that on a paused clock hours pass in no time and nothing depends on the machine's
//! speed. One test crosses real sockets besides.

#![allow(
    dead_code,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "shared by several test files, none of which uses all of it"
)]

pub mod files;
pub mod imds;
pub mod net;

use std::{
    collections::{HashMap, VecDeque},
    io,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use net::MemNet;
use nstance_agent::{Components, Control, State, disk::Disk, host::Host, settings::Settings};
use nstance_core::{
    ids::{InstanceId, Tenant},
    ports::clock::Clock,
    time::{Mono, Timestamp},
};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::{SERVER_TTL, ServerProfile},
    keys::{KeyPair, PublicKey},
    nonce::{AgentNonce, NonceKeys, new_jti, sign_agent_nonce},
    peer::Peer,
    tls::{ClientAuth, ClientTrust, ServerIdentity, server_config},
};
use nstance_proto::{rpc, v1};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy, tasks::Tasks};
use prost::Message as _;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::mpsc,
    time::Instant,
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{
    Code, Request, Response, Status, Streaming,
    codegen::{BoxFuture, StdError, http},
    transport::server::{Connected, Server, TlsConnectInfo},
};

pub const INSTANCE: &str = "knc06bgm7733st2576nx5jht4ecjw";
pub const REGISTRATION: &str = "localhost:8992";
pub const AGENT: &str = "localhost:8994";
pub const DAY: Duration = Duration::from_secs(86_400);

/// 2026-01-31T12:00:00Z.
pub const START: Timestamp = Timestamp::from_millis(1_769_860_800_000);

pub fn refusal(code: Code, reason: &str) -> Status {
    let info = rpc::ErrorInfo { reason: reason.into(), domain: "nstance".into(), ..Default::default() };
    let any =
        prost_types::Any { type_url: "type.googleapis.com/google.rpc.ErrorInfo".into(), value: info.encode_to_vec() };
    let details = rpc::Status { code: code.into(), message: "no".into(), details: vec![any] };
    Status::with_details(code, "no", details.encode_to_vec().into())
}

/// How to answer one registration.
#[derive(Clone)]
pub enum Register {
    Sign,
    /// Sign, but the answer gets lost.
    SignAndLose,
    Refuse(Code, &'static str),
    RefuseFor(Code, &'static str, u64),
    /// Refuse, but think about it for so long.
    RefuseAfter(Duration, Code, &'static str),
    Hang,
    /// Sign somebody else's key.
    Nonsense,
    /// Sign, and send this bundle along.
    SignWithBundle(String),
}

/// How to answer one renewal.
#[derive(Clone)]
pub enum Renew {
    Sign,
    /// Sign, and tell to renew again after this time.
    SignFor(Duration),
    SignAndLose,
    SignWithBundle(String),
    Nonsense,
    Refuse(Code, &'static str),
    RefuseFor(Code, &'static str, u64),
    Hang,
}

/// How to treat one report stream.
#[derive(Clone)]
pub enum Talk {
    /// Read until the client is done.
    Listen,
    Refuse(Code, &'static str),
    RefuseFor(Code, &'static str, u64),
    /// Read one report, then end the stream without complaint.
    EndAfterFirst,
    /// Read for so long, then refuse.
    RefuseAfter(Duration, Code, &'static str),
    /// Read one report, then refuse.
    RefuseAfterFirst(Code, &'static str),
}

/// What the server saw.
#[derive(Debug, Clone)]
pub enum Seen {
    Registered { at: Instant, request: Box<v1::RegisterClientRequest> },
    StreamOpened { at: Instant, serial: String },
    Renewed { at: Instant, key: Vec<u8> },
    Report { at: Instant, report: Box<v1::HealthReportRequest> },
    HalfClosed { at: Instant },
}

pub struct Plane {
    pub ca: Ca,
    pub nonce_key: KeyPair,
    pub dice: Arc<SeededEntropy>,
    pub feeds: files::Feeds,
    pub clock: Arc<dyn Clock>,
    /// Life of the certificates it signs.
    pub ttl: Mutex<Duration>,
    /// Scripts; empty means `Sign` and `Listen`.
    pub register: Mutex<VecDeque<Register>>,
    pub talk: Mutex<VecDeque<Talk>>,
    pub renew: Mutex<VecDeque<Renew>>,
    /// Names of calls whose streams are reset, each once, while the connection stands.
    pub resets: Mutex<Vec<&'static str>>,
    seen: mpsc::Sender<Seen>,
}

pub struct World {
    pub plane: Arc<Plane>,
    pub net: Arc<MemNet>,
    pub seen: mpsc::Receiver<Seen>,
    pub tasks: Tasks,
    pub directory: tempfile::TempDir,
    pub control: Control,
}

impl World {
    /// Must be called inside a runtime.
    pub fn new() -> Self {
        Self::with(1, Arc::new(TokioClock::starting_at(START)))
    }

    pub fn with(seed: u64, clock: Arc<dyn Clock>) -> Self {
        let dice = Arc::new(SeededEntropy::new(seed));
        let ca_key = KeyPair::generate(&*dice);
        let made = make_ca_certificate(&ca_key, &CaProfile::of("demo".parse().unwrap()), clock.now(), &*dice);
        let (sender, seen) = mpsc::channel(4096);
        let plane = Plane {
            ca: Ca::load(made.chain_pem.as_bytes(), [ca_key]).unwrap(),
            nonce_key: KeyPair::generate(&*dice),
            dice,
            feeds: files::Feeds::default(),
            clock,
            ttl: Mutex::new(DAY),
            register: Mutex::default(),
            talk: Mutex::default(),
            renew: Mutex::default(),
            resets: Mutex::default(),
            seen: sender,
        };
        let directory = tempfile::tempdir().unwrap();
        let world = Self {
            plane: Arc::new(plane),
            net: Arc::default(),
            seen,
            tasks: Tasks::new(),
            directory,
            control: Control::new(),
        };
        std::fs::create_dir(world.path("identity")).unwrap();
        std::fs::write(world.path("identity/ca.crt"), world.plane.ca.bundle_pem()).unwrap();
        world
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    pub fn write_nonce(&self, life: Duration) {
        std::fs::write(self.path("identity/nonce.jwt"), self.plane.nonce(life)).unwrap();
    }

    pub fn script_register(&self, answers: impl IntoIterator<Item = Register>) {
        self.plane.register.lock().unwrap().extend(answers);
    }

    pub fn script_talk(&self, talks: impl IntoIterator<Item = Talk>) {
        self.plane.talk.lock().unwrap().extend(talks);
    }

    pub fn script_renew(&self, answers: impl IntoIterator<Item = Renew>) {
        self.plane.renew.lock().unwrap().extend(answers);
    }

    pub fn settings(&self) -> Settings {
        self.settings_with(&[])
    }

    pub fn settings_with(&self, more: &[(&str, &str)]) -> Settings {
        let mut all: HashMap<String, String> = environment(self.directory.path()).into_iter().collect();
        all.extend(more.iter().map(|(name, value)| (format!("NSTANCE_{name}"), (*value).to_owned())));
        Settings::read(|name| all.get(name).cloned()).unwrap()
    }

    pub fn parts(&self) -> Components {
        Components {
            clock: self.plane.clock.clone(),
            entropy: Arc::new(SeededEntropy::new(77)),
            net: self.net.clone(),
            disk: Disk::default(),
            metadata: imds::endpoints(),
            host: Host::nowhere(),
            console: false,
        }
    }

    /// Starts an agent in the background.
    pub fn start_agent(&self) {
        self.start_agent_with(self.settings());
    }

    pub fn start_agent_with(&self, settings: Settings) {
        let (parts, control) = (self.parts(), self.control.clone());
        self.tasks.spawn_droppable("agent", nstance_agent::run(settings, parts, control));
    }

    /// Starts an agent whose wall clock is off.
    pub fn start_skewed(&self, ahead: Duration, behind: Duration, more: &[(&str, &str)]) {
        let clock = Arc::new(Skewed { right: self.plane.clock.clone(), ahead, behind });
        let parts = Components { clock, ..self.parts() };
        let run = nstance_agent::run(self.settings_with(more), parts, self.control.clone());
        self.tasks.spawn_droppable("agent", run);
    }

    /// Starts a server for both ports; it dies with the scope that comes back.
    pub fn start_server(&self) -> Tasks {
        self.start_server_of(&self.plane)
    }

    pub fn start_server_of(&self, plane: &Arc<Plane>) -> Tasks {
        let scope = self.tasks.child();
        for address in [REGISTRATION, AGENT] {
            let (sender, incoming) = mpsc::channel(64);
            self.net.listeners.lock().unwrap().insert(address.to_owned(), sender);
            plane.serve(&scope, address == AGENT, incoming);
        }
        scope
    }

    pub async fn kill(&self, server: Tasks) {
        self.net.cut();
        server.end(Duration::ZERO).await;
    }

    pub async fn next(&mut self) -> Seen {
        tokio::time::timeout(DAY, self.seen.recv()).await.expect("seen in time").unwrap()
    }

    pub async fn next_registration(&mut self) -> (Instant, v1::RegisterClientRequest) {
        loop {
            if let Seen::Registered { at, request } = self.next().await {
                return (at, *request);
            }
        }
    }

    pub async fn next_stream(&mut self) -> (Instant, String) {
        loop {
            if let Seen::StreamOpened { at, serial } = self.next().await {
                return (at, serial);
            }
        }
    }

    pub async fn next_renewal(&mut self) -> (Instant, Vec<u8>) {
        loop {
            if let Seen::Renewed { at, key } = self.next().await {
                return (at, key);
            }
        }
    }

    pub async fn next_report(&mut self) -> (Instant, v1::HealthReportRequest) {
        loop {
            if let Seen::Report { at, report } = self.next().await {
                return (at, *report);
            }
        }
    }

    pub async fn until(&self, wanted: impl Fn(&State) -> bool) -> State {
        let mut state = self.control.state();
        let seen = tokio::time::timeout(Duration::from_secs(7200), state.wait_for(|state| wanted(state))).await;
        seen.expect("state reached in time").unwrap().clone()
    }

    pub async fn until_parked(&self) -> String {
        match self.until(|state| matches!(state, State::Parked(_))).await {
            State::Parked(why) => why,
            other => panic!("{other:?}"),
        }
    }
}

pub fn environment(directory: &Path) -> Vec<(String, String)> {
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    [
        ("INSTANCE_ID", INSTANCE.to_owned()),
        ("SERVER_REGISTRATION_ADDR", REGISTRATION.to_owned()),
        ("SERVER_AGENT_ADDR", AGENT.to_owned()),
        ("IDENTITY_DIR", path("identity")),
        ("KEYS_DIR", path("keys")),
        ("RECV_DIR", path("recv")),
        ("LEAVE_ON_STOP", "always".to_owned()),
        ("PROVIDER", "none".to_owned()),
    ]
    .map(|(name, value)| (format!("NSTANCE_{name}"), value))
    .into()
}

/// A clock that is off.
pub struct Skewed {
    pub right: Arc<dyn Clock>,
    pub ahead: Duration,
    pub behind: Duration,
}

impl Clock for Skewed {
    fn now(&self) -> Timestamp {
        self.right.now().plus(self.ahead).minus(self.behind)
    }

    fn monotonic(&self) -> Mono {
        self.right.monotonic()
    }
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl Plane {
    pub fn nonce(&self, life: Duration) -> String {
        let now = self.clock.now();
        let nonce = AgentNonce {
            instance: INSTANCE.parse().unwrap(),
            jti: new_jti(&*self.dice),
            issued_at: now,
            expires_at: now.plus(life),
            cluster: "demo".parse().unwrap(),
            tenant: Tenant::default_tenant(),
            shard: "s1".parse().unwrap(),
            group: "web".parse().unwrap(),
            on_demand: false,
            config_hash: "sha256:00".into(),
        };
        sign_agent_nonce(&self.nonce_key, &nonce)
    }

    pub fn sign(&self, key: &PublicKey, ttl: Duration) -> String {
        let id: InstanceId = INSTANCE.parse().unwrap();
        let (tenant, now) = (Tenant::default_tenant(), self.clock.now());
        self.ca.issue_agent(&id, &tenant, key, now, ttl, &*self.dice).unwrap().chain_pem
    }

    fn see(&self, seen: Seen) {
        self.seen.try_send(seen).expect("the test reads what it asks for");
    }

    /// Serves one port from `incoming` until the scope ends.
    pub fn serve<S>(self: &Arc<Self>, scope: &Tasks, mutual: bool, mut incoming: mpsc::Receiver<S>)
    where
        S: AsyncRead + AsyncWrite + Connected + Send + Unpin + 'static,
    {
        let profile = ServerProfile {
            server: "srv-1".parse().unwrap(),
            cluster: "demo".parse().unwrap(),
            shard: "s1".parse().unwrap(),
            sans: vec![],
        };
        let key = KeyPair::generate(&*self.dice);
        let now = self.clock.now();
        let shown = self.ca.issue_server(&profile, &key.public_key(), now, SERVER_TTL * 100, &*self.dice).unwrap();
        let identity = Arc::new(ServerIdentity::new(shown.chain_pem.as_bytes(), &key).unwrap());
        let client_auth = if mutual {
            ClientAuth::Required(Arc::new(ClientTrust::new(self.ca.bundle()).unwrap()))
        } else {
            ClientAuth::None
        };
        let acceptor = TlsAcceptor::from(server_config(identity, client_auth, self.clock.clone()).unwrap());
        let (ready, streams) = mpsc::channel(64);
        let handshakes = scope.clone();
        scope.spawn_droppable("accept", async move {
            while let Some(stream) = incoming.recv().await {
                let (acceptor, ready) = (acceptor.clone(), ready.clone());
                handshakes.spawn_droppable("handshake", async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        let _ = ready.send(Ok::<_, io::Error>(stream)).await;
                    }
                });
            }
        });
        let service = Service(self.clone());
        let plane = self.clone();
        let resetting = tower::layer::layer_fn(move |inner| Resetting { inner, plane: plane.clone() });
        let stop = scope.token().clone();
        scope.spawn("serve", async move {
            let server = Server::builder()
                .layer(resetting)
                .add_service(v1::registration_service_server::RegistrationServiceServer::new(service.clone()))
                .add_service(v1::agent_service_server::AgentServiceServer::new(service))
                .serve_with_incoming(ReceiverStream::new(streams));
            tokio::select! {
                () = stop.cancelled() => {}
                ended = server => ended.unwrap(),
            }
        });
    }
}

/// Resets single streams, as a proxy in between does.
#[derive(Clone)]
struct Resetting<S> {
    inner: S,
    plane: Arc<Plane>,
}

impl<S, B> tower::Service<http::Request<B>> for Resetting<S>
where
    S: tower::Service<http::Request<B>, Error: Into<StdError>, Response: Send, Future: Send + 'static>,
{
    type Response = S::Response;
    type Error = StdError;
    type Future = BoxFuture<S::Response, StdError>;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), StdError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let mut resets = self.plane.resets.lock().unwrap();
        if let Some(at) = resets.iter().position(|name| request.uri().path().ends_with(name)) {
            resets.remove(at);
            return Box::pin(async { Err("reset".into()) });
        }
        let answer = self.inner.call(request);
        Box::pin(async { answer.await.map_err(Into::into) })
    }
}

#[derive(Clone)]
pub struct Service(Arc<Plane>);

#[tonic::async_trait]
impl v1::registration_service_server::RegistrationService for Service {
    async fn register_agent(
        &self,
        request: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        let plane = &self.0;
        let request = request.into_inner();
        plane.see(Seen::Registered { at: Instant::now(), request: Box::new(request.clone()) });
        let script = plane.register.lock().unwrap().pop_front().unwrap_or(Register::Sign);
        let key =
            PublicKey::from_pem(&request.public_key_pem).map_err(|_| refusal(Code::InvalidArgument, "BAD_REQUEST"))?;
        if request.rejoin.is_none() {
            NonceKeys::new([plane.nonce_key.public_key()])
                .verify_agent(&request.registration_nonce_jwt, plane.clock.now())
                .map_err(|error| refusal(Code::Unauthenticated, error.reason()))?;
        }
        let answer = |key: &PublicKey, bundle: &str| v1::RegisterClientResponse {
            client_certificate_pem: plane.sign(key, *plane.ttl.lock().unwrap()).into_bytes(),
            ca_bundle_pem: bundle.as_bytes().to_vec(),
            cluster_id: "demo".into(),
            ..Default::default()
        };
        let bundle = plane.ca.bundle_pem();
        match script {
            Register::Sign => Ok(Response::new(answer(&key, bundle))),
            Register::SignWithBundle(bundle) => Ok(Response::new(answer(&key, &bundle))),
            Register::Nonsense => Ok(Response::new(answer(&KeyPair::generate(&*plane.dice).public_key(), bundle))),
            Register::SignAndLose => Err(Status::unavailable("the answer got lost")),
            Register::Refuse(code, reason) => Err(refusal(code, reason)),
            Register::RefuseFor(code, reason, millis) => Err(with_retry(refusal(code, reason), millis)),
            Register::RefuseAfter(thought, code, reason) => {
                tokio::time::sleep(thought).await;
                Err(refusal(code, reason))
            }
            Register::Hang => std::future::pending().await,
        }
    }

    async fn register_operator(
        &self,
        _: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        Err(Status::unimplemented("agents only"))
    }
}

fn with_retry(mut status: Status, millis: u64) -> Status {
    status.metadata_mut().insert("nstance-retry-ms", millis.to_string().parse().unwrap());
    status
}

#[tonic::async_trait]
impl v1::agent_service_server::AgentService for Service {
    type KeyGenRequestsStream = ReceiverStream<Result<v1::KeyGenerationRequest, Status>>;
    type ReceiveFilesStream = ReceiverStream<Result<v1::FileTransfer, Status>>;

    async fn report_health(
        &self,
        request: Request<Streaming<v1::HealthReportRequest>>,
    ) -> Result<Response<()>, Status> {
        let plane = &self.0;
        let in_memory = || request.extensions().get::<TlsConnectInfo<()>>().and_then(TlsConnectInfo::peer_certs);
        let certificates = request.peer_certs().or_else(in_memory).expect("the port asks for a certificate");
        let peer = Peer::accept(&certificates[0], plane.clock.now())
            .map_err(|error| refusal(Code::Unauthenticated, error.reason()))?;
        plane.see(Seen::StreamOpened { at: Instant::now(), serial: peer.serial });
        let script = plane.talk.lock().unwrap().pop_front().unwrap_or(Talk::Listen);
        match script {
            Talk::Refuse(code, reason) => return Err(refusal(code, reason)),
            Talk::RefuseFor(code, reason, millis) => return Err(with_retry(refusal(code, reason), millis)),
            _ => {}
        }
        let mut reports = request.into_inner();
        if let Talk::RefuseAfter(listened, code, reason) = script {
            let listen = async {
                while let Some(Ok(report)) = reports.next().await {
                    plane.see(Seen::Report { at: Instant::now(), report: Box::new(report) });
                }
            };
            let _ = tokio::time::timeout(listened, listen).await;
            return Err(refusal(code, reason));
        }
        while let Some(report) = reports.next().await {
            plane.see(Seen::Report { at: Instant::now(), report: Box::new(report?) });
            match script {
                Talk::EndAfterFirst => return Ok(Response::new(())),
                Talk::RefuseAfterFirst(code, reason) => return Err(refusal(code, reason)),
                _ => {}
            }
        }
        plane.see(Seen::HalfClosed { at: Instant::now() });
        Ok(Response::new(()))
    }

    async fn key_gen_requests(
        &self,
        _: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::KeyGenRequestsStream>, Status> {
        self.0.feeds.open_keys()
    }

    async fn receive_files(
        &self,
        request: Request<v1::AgentStreamRequest>,
    ) -> Result<Response<Self::ReceiveFilesStream>, Status> {
        self.0.feeds.open_files(request)
    }

    async fn submit_public_keys(&self, request: Request<v1::PublicKeysRequest>) -> Result<Response<()>, Status> {
        self.0.feeds.submit(request).await
    }

    async fn renew_certificate(
        &self,
        request: Request<v1::RenewCertificateRequest>,
    ) -> Result<Response<v1::RenewCertificateResponse>, Status> {
        let plane = &self.0;
        let pem = request.into_inner().public_key_pem;
        plane.see(Seen::Renewed { at: Instant::now(), key: pem.clone() });
        let script = plane.renew.lock().unwrap().pop_front().unwrap_or(Renew::Sign);
        let key = PublicKey::from_pem(&pem).map_err(|_| refusal(Code::InvalidArgument, "BAD_REQUEST"))?;
        let answer = |key: &PublicKey, bundle: &str, renew_after: Option<Duration>| v1::RenewCertificateResponse {
            client_certificate_pem: plane.sign(key, *plane.ttl.lock().unwrap()).into_bytes(),
            ca_bundle_pem: bundle.as_bytes().to_vec(),
            renew_after: renew_after.map(|after| prost_types::Timestamp {
                seconds: plane.clock.now().plus(after).as_millis() / 1000,
                nanos: 0,
            }),
            ..Default::default()
        };
        let bundle = plane.ca.bundle_pem();
        match script {
            Renew::Sign => Ok(Response::new(answer(&key, bundle, None))),
            Renew::SignFor(after) => Ok(Response::new(answer(&key, bundle, Some(after)))),
            Renew::SignWithBundle(bundle) => Ok(Response::new(answer(&key, &bundle, None))),
            Renew::SignAndLose => Err(Status::unavailable("the answer got lost")),
            Renew::Nonsense => Ok(Response::new(answer(&KeyPair::generate(&*plane.dice).public_key(), bundle, None))),
            Renew::Refuse(code, reason) => Err(refusal(code, reason)),
            Renew::RefuseFor(code, reason, millis) => Err(with_retry(refusal(code, reason), millis)),
            Renew::Hang => std::future::pending().await,
        }
    }
}
