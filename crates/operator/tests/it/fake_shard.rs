//! A shard's leader that says what a test wants: real TLS and gRPC, and machines if the test wants them.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::Stream;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    issue::ServerProfile,
    keys::{KeyPair, PublicKey},
    tls::{ClientAuth, ClientTrust, ServerIdentity, server_config},
};
use nstance_proto::v1::{
    self,
    operator_service_server::{OperatorService, OperatorServiceServer},
    registration_service_server::{RegistrationService, RegistrationServiceServer},
};
use nstance_rt::{entropy::SystemEntropy, tasks::Tasks};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
};
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, service::Routes};

use crate::{
    machines::{Changes, Machines},
    support::clock,
};

pub(crate) const NONCE: &str = "good-nonce";
const OPERATOR: &str = "opr06bgm7733st2576nx5jht4ecjw";
const DAY: Duration = Duration::from_secs(86_400);

/// The CA of all shards of a test.
pub(crate) struct Cluster {
    pub(crate) ca: Ca,
}

impl Cluster {
    pub(crate) fn new() -> Arc<Self> {
        let key = KeyPair::generate(&SystemEntropy::new());
        let profile = CaProfile::of("demo".parse().unwrap());
        let issued = make_ca_certificate(&key, &profile, clock().now(), &SystemEntropy::new());
        Arc::new(Self { ca: Ca::load(issued.chain_pem.as_bytes(), [key]).unwrap() })
    }
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) groups: BTreeMap<String, v1::GroupStatus>,
    pub(crate) n_registrations: usize,
    pub(crate) n_rejoins: usize,
    /// Rejoins are answered; else they are refused as of a revoked operator.
    pub(crate) accepts_rejoins: bool,
    /// Calls of operators are refused until they come with a later registration than this many.
    pub(crate) refuses_first: usize,
    pub(crate) upserts: Vec<v1::UpsertGroupRequest>,
    /// Answers to upserts, while there are any.
    pub(crate) refusals: Vec<Status>,
    /// What the groups consist of, where a test wants that.
    pub(crate) machines: Option<Machines>,
    watchers: Vec<mpsc::Sender<Result<v1::GroupEvent, Status>>>,
    instance_watchers: Vec<mpsc::Sender<Result<v1::InstanceEvent, Status>>>,
    /// Nothing is answered while this holds true.
    is_silent: watch::Sender<bool>,
    holds: Vec<Box<dyn std::any::Any + Send>>,
}

impl State {
    /// Tells those who watch.
    fn tell(&mut self, changes: Changes) {
        for instance in changes.instances {
            let event = instance_event(instance, false);
            self.instance_watchers.retain(|it| it.try_send(Ok(event.clone())).is_ok());
        }
        for group in changes.groups {
            let event = v1::GroupEvent { group: Some(group), ..v1::GroupEvent::default() };
            self.watchers.retain(|it| it.try_send(Ok(event.clone())).is_ok());
        }
        for key in changes.deleted_groups {
            let group = v1::GroupStatus { key, ..v1::GroupStatus::default() };
            let of_type = v1::group_event::Type::Delete;
            let event = v1::GroupEvent { r#type: of_type.into(), group: Some(group), ..v1::GroupEvent::default() };
            self.watchers.retain(|it| it.try_send(Ok(event.clone())).is_ok());
        }
    }

    fn machines(&mut self) -> Result<&mut Machines, Status> {
        self.machines.as_mut().ok_or_else(|| Status::unimplemented("there are no machines here"))
    }
}

fn instance_event(instance: v1::InstanceStatusResponse, snapshot: bool) -> v1::InstanceEvent {
    let drain = instance.drain.clone().unwrap_or_default();
    v1::InstanceEvent {
        instance_id: instance.instance_id.clone(),
        group: instance.group.clone(),
        on_demand: instance.on_demand,
        status: if instance.status == "draining" { "pending_deletion".to_owned() } else { instance.status.clone() },
        drain_id: drain.drain_id,
        delete_at: drain.delete_at,
        instance: Some(instance),
        snapshot,
        ..v1::InstanceEvent::default()
    }
}

/// A running shard. It ends with its scope.
#[derive(Clone)]
pub(crate) struct FakeShard {
    name: String,
    cluster: Arc<Cluster>,
    state: Arc<Mutex<State>>,
    pub(crate) registration_port: u16,
    pub(crate) operator_port: u16,
    pub(crate) scope: Tasks,
}

impl FakeShard {
    pub(crate) async fn start(tasks: &Tasks, cluster: &Arc<Cluster>, name: &str) -> Self {
        Self::start_at(tasks, cluster, name, 0, 0, Arc::default()).await
    }

    /// The same with machines, which go on while the shard is stopped or silent.
    pub(crate) async fn start_with(tasks: &Tasks, cluster: &Arc<Cluster>, name: &str, machines: Machines) -> Self {
        let state = State { machines: Some(machines), ..State::default() };
        let shard = Self::start_at(tasks, cluster, name, 0, 0, Arc::new(Mutex::new(state))).await;
        let state = shard.state.clone();
        tasks.spawn_droppable("machines", async move {
            loop {
                {
                    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                    let state = &mut *state;
                    if let Some(machines) = &mut state.machines {
                        let changes = machines.step(&mut state.groups, clock().now());
                        state.tell(changes);
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        shard
    }

    async fn start_at(
        tasks: &Tasks,
        cluster: &Arc<Cluster>,
        name: &str,
        registration_port: u16,
        operator_port: u16,
        state: Arc<Mutex<State>>,
    ) -> Self {
        let scope = tasks.child();
        let registration = TcpListener::bind(("127.0.0.1", registration_port)).await.unwrap();
        let operator = TcpListener::bind(("127.0.0.1", operator_port)).await.unwrap();
        let shard = Self {
            name: name.to_owned(),
            cluster: cluster.clone(),
            state,
            registration_port: registration.local_addr().unwrap().port(),
            operator_port: operator.local_addr().unwrap().port(),
            scope: scope.clone(),
        };
        let routes = Routes::new(RegistrationServiceServer::new(shard.clone()));
        let tls = shard.tls(ClientAuth::None);
        scope.spawn_droppable("registration", accept(shard.clone(), scope.clone(), registration, tls, routes));
        let routes = Routes::new(OperatorServiceServer::new(shard.clone()));
        let trust = ClientTrust::new(cluster.ca.bundle()).unwrap();
        let tls = shard.tls(ClientAuth::Required(Arc::new(trust)));
        scope.spawn_droppable("operators", accept(shard.clone(), scope.clone(), operator, tls, routes));
        shard
    }

    /// Ends all connections and listens no more.
    pub(crate) async fn stop(&self) {
        {
            let mut state = self.state();
            state.watchers.clear();
            state.instance_watchers.clear();
            state.holds.clear();
        }
        self.scope.end(Duration::from_millis(100)).await;
    }

    /// Listens again at the same ports, with what it knew.
    pub(crate) async fn restart(&self, tasks: &Tasks) -> Self {
        let (registration, operator) = (self.registration_port, self.operator_port);
        Self::start_at(tasks, &self.cluster, &self.name, registration, operator, self.state.clone()).await
    }

    fn tls(&self, client_auth: ClientAuth) -> TlsAcceptor {
        let key = KeyPair::generate(&SystemEntropy::new());
        let profile = ServerProfile {
            server: "server-1".parse().unwrap(),
            cluster: "demo".parse().unwrap(),
            shard: self.name.parse().unwrap(),
            sans: Vec::new(),
        };
        let entropy = SystemEntropy::new();
        let issued = self.cluster.ca.issue_server(&profile, &key.public_key(), clock().now(), DAY, &entropy).unwrap();
        let identity = ServerIdentity::new(issued.chain_pem.as_bytes(), &key).unwrap();
        TlsAcceptor::from(server_config(Arc::new(identity), client_auth, clock()).unwrap())
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers nothing any more, or goes on.
    pub(crate) fn set_silent(&self, is_silent: bool) {
        self.state().is_silent.send_replace(is_silent);
    }

    /// The ids of all instances that there ever were.
    pub(crate) fn all_ids(&self) -> Vec<String> {
        let state = self.state();
        let machines = state.machines.as_ref();
        machines.into_iter().flat_map(|it| it.instances.keys().chain(it.deleted.keys()).cloned()).collect()
    }

    /// The ids of a group's instances.
    pub(crate) fn ids_of(&self, group: &str) -> Vec<String> {
        let state = self.state();
        let instances = state.machines.iter().flat_map(|it| it.instances.values());
        instances.filter(|it| it.group == group).map(|it| it.instance_id.clone()).collect()
    }

    /// The VM of an instance is gone.
    pub(crate) fn crash(&self, id: &str) {
        let mut state = self.state();
        let mut changes = Changes::default();
        state.machines().unwrap().crash(id, &mut changes);
        state.tell(changes);
    }

    /// A group of this size that is not in the shard's config.
    pub(crate) fn add_group(&self, key: &str, size: i32) {
        let group =
            v1::GroupStatus { key: key.to_owned(), size, template: "knc".to_owned(), ..v1::GroupStatus::default() };
        self.state().groups.insert(key.to_owned(), group);
    }

    async fn until_not_silent(&self) {
        let mut is_silent = self.state().is_silent.subscribe();
        // It ends only with the shard.
        let _ = is_silent.wait_for(|it| !it).await;
    }

    /// Adds or changes a group, and tells those who watch.
    pub(crate) fn set_group(&self, key: &str, size: i32) {
        let group = v1::GroupStatus { key: key.to_owned(), size, ..v1::GroupStatus::default() };
        let mut state = self.state();
        state.groups.insert(key.to_owned(), group.clone());
        state.tell(Changes { groups: vec![group], ..Changes::default() });
    }

    async fn permit(&self) -> Result<(), Status> {
        self.until_not_silent().await;
        let state = self.state();
        if state.n_registrations + state.n_rejoins <= state.refuses_first && 0 < state.refuses_first {
            return Err(Status::unauthenticated("the certificate was revoked"));
        }
        Ok(())
    }

    /// A stream that says nothing more.
    fn open<T: Send + 'static>(&self, first: Vec<T>) -> Streamed<T> {
        let (sender, receiver) = mpsc::channel(64);
        for it in first {
            sender.try_send(Ok(it)).ok();
        }
        self.state().holds.push(Box::new(sender));
        Box::pin(ReceiverStream::new(receiver))
    }
}

async fn accept(shard: FakeShard, scope: Tasks, listener: TcpListener, tls: TlsAcceptor, routes: Routes) {
    let app = routes.prepare().into_axum_router();
    while let Ok((socket, _)) = listener.accept().await {
        let (tls, app) = (tls.clone(), app.clone());
        let is_silent = shard.state().is_silent.subscribe();
        scope.spawn_droppable("connection", async move {
            let mut is_silent = is_silent;
            let _ = is_silent.wait_for(|it| !it).await;
            let Ok(stream) = tls.accept(socket).await else { return };
            let http = auto::Builder::new(TokioExecutor::new());
            let _ = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)).await;
        });
    }
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl RegistrationService for FakeShard {
    async fn register_agent(
        &self,
        _: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        Err(Status::unimplemented("no agents here"))
    }

    async fn register_operator(
        &self,
        request: Request<v1::RegisterClientRequest>,
    ) -> Result<Response<v1::RegisterClientResponse>, Status> {
        let request = request.into_inner();
        {
            let mut state = self.state();
            match &request.rejoin {
                Some(_) if state.accepts_rejoins => state.n_rejoins += 1,
                Some(_) => return Err(Status::permission_denied("operator was revoked")),
                None if request.registration_nonce_jwt.starts_with(NONCE) => state.n_registrations += 1,
                None => return Err(Status::unauthenticated("nonce is not valid")),
            }
        }
        let key =
            PublicKey::from_pem(&request.public_key_pem).map_err(|it| Status::invalid_argument(it.to_string()))?;
        let (operator, tenant) = (OPERATOR.parse().unwrap(), "default".parse().unwrap());
        let entropy = SystemEntropy::new();
        let issued = self.cluster.ca.issue_operator(&operator, &tenant, &key, clock().now(), DAY, &entropy).unwrap();
        Ok(Response::new(v1::RegisterClientResponse {
            client_certificate_pem: issued.chain_pem.into_bytes(),
            ca_bundle_pem: self.cluster.ca.bundle_pem().as_bytes().to_vec(),
            cluster_id: "demo".to_owned(),
            ..v1::RegisterClientResponse::default()
        }))
    }
}

macro_rules! not_here {
    ($($name:ident $request:ty => $answer:ty;)*) => {
        $(fn $name<'life0, 'async_trait>(
            &'life0 self,
            _: Request<$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<$answer>, Status>> + Send + 'async_trait>>
        where
            'life0: 'async_trait,
            Self: 'async_trait,
        {
            Box::pin(async { Err(Status::unimplemented(stringify!($name))) })
        })*
    };
}

#[tonic::async_trait]
impl OperatorService for FakeShard {
    type WatchGroupsStream = Streamed<v1::GroupEvent>;
    type WatchInstancesStream = Streamed<v1::InstanceEvent>;
    type WatchErrorsStream = Streamed<v1::ErrorEvent>;
    type WatchEventsStream = Streamed<v1::Event>;

    async fn get_config_status(&self, _: Request<()>) -> Result<Response<v1::ConfigStatusResponse>, Status> {
        self.permit().await?;
        Ok(Response::new(v1::ConfigStatusResponse {
            shard: self.name.clone(),
            leader_id: "server-1".to_owned(),
            epoch: 1,
            ..v1::ConfigStatusResponse::default()
        }))
    }

    async fn list_groups(&self, _: Request<()>) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let groups = self.state().groups.values().cloned().collect();
        Ok(Response::new(v1::ListGroupsResponse { groups, ..v1::ListGroupsResponse::default() }))
    }

    async fn upsert_group(
        &self,
        request: Request<v1::UpsertGroupRequest>,
    ) -> Result<Response<v1::GroupStatus>, Status> {
        self.permit().await?;
        let request = request.into_inner();
        let refusal = {
            let mut state = self.state();
            state.upserts.push(request.clone());
            (!state.refusals.is_empty()).then(|| state.refusals.remove(0))
        };
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        let config = request.config.unwrap_or_default();
        let size = config.size.unwrap_or(0);
        {
            let mut state = self.state();
            if let Ok(machines) = state.machines() {
                machines.prefer(&request.key, &request.preferred_victims);
                let new = v1::GroupStatus { key: request.key.clone(), ..v1::GroupStatus::default() };
                let group = state.groups.entry(request.key).or_insert(new);
                (group.size, group.template, group.vars) = (size, config.template, config.vars);
                (group.instance_type, group.subnet_pool) = (config.instance_type, config.subnet_pool);
                let group = group.clone();
                state.tell(Changes { groups: vec![group.clone()], ..Changes::default() });
                return Ok(Response::new(group));
            }
        }
        self.set_group(&request.key, size);
        Ok(Response::new(v1::GroupStatus { key: request.key, size, ..v1::GroupStatus::default() }))
    }

    async fn watch_groups(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchGroupsStream>, Status> {
        self.permit().await?;
        let (sender, receiver) = mpsc::channel(1024);
        let mut state = self.state();
        for group in state.groups.values().cloned() {
            let event = v1::GroupEvent { group: Some(group), snapshot: true, ..v1::GroupEvent::default() };
            sender.try_send(Ok(event)).ok();
        }
        let end = v1::group_event::Type::SnapshotEnd;
        sender.try_send(Ok(v1::GroupEvent { r#type: end.into(), ..v1::GroupEvent::default() })).ok();
        state.watchers.push(sender);
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn watch_instances(
        &self,
        _: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchInstancesStream>, Status> {
        self.permit().await?;
        let (sender, receiver) = mpsc::channel(1024);
        let mut state = self.state();
        for instance in state.machines.iter().flat_map(|it| it.instances.values()) {
            sender.try_send(Ok(instance_event(instance.clone(), true))).ok();
        }
        let end = v1::InstanceEvent { status: "snapshot_end".to_owned(), ..v1::InstanceEvent::default() };
        sender.try_send(Ok(end)).ok();
        state.instance_watchers.push(sender);
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn watch_errors(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchErrorsStream>, Status> {
        let error = v1::ErrorEvent {
            group: "web".to_owned(),
            reason: "QuotaExceeded".to_owned(),
            error: "no quota".to_owned(),
            ..v1::ErrorEvent::default()
        };
        Ok(Response::new(self.open(vec![error])))
    }

    async fn watch_events(
        &self,
        _: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        Ok(Response::new(self.open(Vec::new())))
    }

    async fn list_instances(
        &self,
        _: Request<v1::ListInstancesRequest>,
    ) -> Result<Response<v1::ListInstancesResponse>, Status> {
        self.until_not_silent().await;
        let instances = self.state().machines.iter().flat_map(|it| it.instances.values().cloned()).collect();
        Ok(Response::new(v1::ListInstancesResponse { instances, ..v1::ListInstancesResponse::default() }))
    }

    async fn delete_group(&self, request: Request<v1::DeleteGroupRequest>) -> Result<Response<()>, Status> {
        self.permit().await?;
        self.state().machines()?.end_group(&request.into_inner().key);
        Ok(Response::new(()))
    }

    async fn create_instance(
        &self,
        request: Request<v1::CreateInstanceRequest>,
    ) -> Result<Response<v1::CreateInstanceResponse>, Status> {
        self.permit().await?;
        let mut state = self.state();
        let made = state.machines()?.create(&request.into_inner(), clock().now());
        let answer = v1::CreateInstanceResponse { instance_id: made.instance_id.clone(), status: made.status.clone() };
        state.tell(Changes { instances: vec![made], ..Changes::default() });
        Ok(Response::new(answer))
    }

    async fn delete_instance(
        &self,
        request: Request<v1::DeleteInstanceRequest>,
    ) -> Result<Response<v1::DeleteInstanceResponse>, Status> {
        self.permit().await?;
        let id = request.into_inner().instance_id;
        let mut state = self.state();
        let status = match state.machines()?.leave(&id, "deleted", clock().now()) {
            None => return Err(Status::not_found("there is no such instance")),
            Some(Ok(instance)) => {
                let status = instance.status.clone();
                state.tell(Changes { instances: vec![instance], ..Changes::default() });
                status
            }
            Some(Err(_)) => state.machines()?.find(&id).unwrap_or_default().status,
        };
        Ok(Response::new(v1::DeleteInstanceResponse { status }))
    }

    async fn replace_instance(
        &self,
        request: Request<v1::ReplaceInstanceRequest>,
    ) -> Result<Response<v1::ReplaceInstanceResponse>, Status> {
        self.permit().await?;
        let request = request.into_inner();
        let mut state = self.state();
        let instance = state.machines()?.leave(&request.instance_id, &request.reason, clock().now());
        let instance = instance.ok_or_else(|| Status::not_found("there is no such instance"))??;
        state.tell(Changes { instances: vec![instance], ..Changes::default() });
        Ok(Response::new(v1::ReplaceInstanceResponse {
            status: "draining".to_owned(),
            ..v1::ReplaceInstanceResponse::default()
        }))
    }

    async fn get_instance_status(
        &self,
        request: Request<v1::GetInstanceStatusRequest>,
    ) -> Result<Response<v1::InstanceStatusResponse>, Status> {
        self.permit().await?;
        let found = self.state().machines()?.find(&request.into_inner().instance_id);
        found.map(Response::new).ok_or_else(|| Status::not_found("there is no such instance"))
    }

    async fn acknowledge_drained(&self, request: Request<v1::DrainAckRequest>) -> Result<Response<()>, Status> {
        self.permit().await?;
        let mut state = self.state();
        let instance = state.machines()?.acknowledge(&request.into_inner(), clock().now())?;
        state.tell(Changes { instances: vec![instance], ..Changes::default() });
        Ok(Response::new(()))
    }

    not_here! {
        refresh_config v1::RefreshConfigRequest => v1::RefreshConfigResponse;
        renew_certificate v1::RenewCertificateRequest => v1::RenewCertificateResponse;
        plan v1::PlanRequest => v1::PlanResponse;
        explain v1::ExplainRequest => v1::ExplainResponse;
    }
}
