//! Agents: every VM that runs has one. It registers with the nonce its VM was made with, reports, reconnects, and dies
//! with its VM, loudly or without a word.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ids::{InstanceId, Tenant},
    instance::Seen,
    ports::{
        clock::Entropy,
        provider::{Bootstrap, VmSpec},
    },
    time::Timestamp,
};
use nstance_identity::{keys::KeyPair, rejoin::RejoinClaim, role::Role};
use nstance_proto::refusal::reason_of;
use nstance_proto::v1::{
    self, agent_service_client::AgentServiceClient, registration_service_client::RegistrationServiceClient,
};
use nstance_rt::{
    entropy::{below, jitter},
    tasks::Tasks,
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::{
    net::{Port, Wire},
    plane::Manners,
    site::{Site, cluster},
};

/// How often agents report.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);

/// After so long without an answer a server gives a peer up, and a peer its server.
const KEEPALIVE: Duration = Duration::from_secs(15);

const TICK: Duration = Duration::from_millis(100);

/// For the answer to a call.
const CALL: Duration = Duration::from_secs(10);

/// After a renewal that failed.
const RENEWS_AGAIN: Duration = Duration::from_secs(60);

pub(crate) struct Fleet {
    site: Arc<Site>,
    tasks: Tasks,
    chance: Arc<dyn Entropy>,
    manners: Manners,
    /// Machines start from now on.
    healed: AtomicBool,
    agents: Mutex<BTreeMap<InstanceId, Agent>>,
}

struct Agent {
    life: CancellationToken,
    link: Arc<Link>,
    notices: mpsc::Sender<Timestamp>,
    noticed: bool,
    dying: bool,
}

/// What an agent shows, and until when it is content with it.
struct Identity {
    tenant: Tenant,
    key: KeyPair,
    leaf: Arc<[u8]>,
    renew_after: Timestamp,
    /// Rejoins so far.
    counter: u64,
}

impl Identity {
    fn takes(&mut self, certificate: &[u8], renew_after: Option<prost_types::Timestamp>) {
        self.leaf =
            CertificateDer::from_pem_slice(certificate).map_or_else(|_| Arc::from([]), |leaf| Arc::from(leaf.as_ref()));
        self.renew_after = Timestamp::from_millis(renew_after.map_or(i64::MAX, |at| at.seconds.saturating_mul(1000)));
    }
}

/// An agent's connection, as others may meddle with it.
#[derive(Default)]
struct Link {
    cut: Arc<AtomicBool>,
    closed: Mutex<CancellationToken>,
    open: AtomicBool,
}

impl Link {
    fn close(&self) {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).cancel();
    }
}

impl Fleet {
    pub(crate) fn start(site: &Arc<Site>, tasks: &Tasks, chance: Arc<dyn Entropy>, manners: Manners) -> Arc<Self> {
        let agents = Mutex::default();
        let fleet = Arc::new(Self {
            site: site.clone(),
            tasks: tasks.clone(),
            chance,
            manners,
            healed: AtomicBool::new(false),
            agents,
        });
        let it = fleet.clone();
        tasks.spawn_droppable("fleet", async move {
            loop {
                it.tick();
                tokio::time::sleep(TICK).await;
            }
        });
        fleet
    }

    fn agents(&self) -> MutexGuard<'_, BTreeMap<InstanceId, Agent>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Agents come and go with their VMs, and learn of what was announced.
    pub(crate) fn tick(self: &Arc<Self>) {
        let states: BTreeMap<InstanceId, Seen> = self.site.cloud().states().into_iter().collect();
        let dead: Vec<_> = {
            let agents = self.agents();
            let runs = |id: &InstanceId| states.get(id) == Some(&Seen::Running);
            agents.iter().filter(|(id, agent)| !agent.dying && !runs(id)).map(|(id, _)| *id).collect()
        };
        for id in dead {
            let silent = below(self.chance.as_ref(), 4) == 0;
            self.dies(id, silent);
        }
        for (id, seen) in &states {
            if *seen == Seen::Running && !self.agents().contains_key(id) {
                self.begin(*id);
            }
        }
        let noticed: Vec<_> = self.agents().iter().filter(|(_, it)| !it.noticed).map(|(id, _)| *id).collect();
        for id in noticed {
            if let Some(deadline) = self.site.cloud().notice_of(id)
                && let Some(agent) = self.agents().get_mut(&id)
            {
                agent.noticed = agent.notices.try_send(deadline).is_ok();
            }
        }
    }

    fn begin(self: &Arc<Self>, id: InstanceId) {
        let Some(spec) = self.site.cloud().vm_of(id).and_then(|vm| vm.spec) else { return };
        let (notices, receiver) = mpsc::channel(4);
        let agent =
            Agent { life: CancellationToken::new(), link: Arc::default(), notices, noticed: false, dying: false };
        let (life, link) = (agent.life.clone(), agent.link.clone());
        self.agents().insert(id, agent);
        let fleet = self.clone();
        self.tasks.spawn_droppable("agent", async move {
            tokio::select! {
                biased;
                () = life.cancelled() => {}
                () = fleet.live(id, spec, link, receiver) => {}
            }
        });
    }

    /// Its VM is no more. Silently: nobody is told, and the peer finds out by itself.
    pub(crate) fn dies(&self, id: InstanceId, silent: bool) {
        let (life, link) = {
            let mut agents = self.agents();
            let Some(agent) = agents.get_mut(&id) else { return };
            agent.dying = true;
            (agent.life.clone(), agent.link.clone())
        };
        if !silent {
            link.close();
            life.cancel();
            return;
        }
        link.cut.store(true, Ordering::SeqCst);
        self.tasks.spawn_droppable("power cut", async move {
            tokio::time::sleep(KEEPALIVE).await;
            link.close();
            life.cancel();
        });
    }

    /// Cuts agents off from the servers for a time; their VMs run on.
    pub(crate) fn cut(&self, ids: &[InstanceId], time: Duration) {
        for id in ids {
            let Some(link) = self.agents().get(id).filter(|it| !it.dying).map(|it| it.link.clone()) else { continue };
            link.cut.store(true, Ordering::SeqCst);
            self.tasks.spawn_droppable("cut", async move {
                tokio::time::sleep(KEEPALIVE.min(time)).await;
                if KEEPALIVE <= time {
                    link.close();
                    tokio::time::sleep(time - KEEPALIVE).await;
                }
                link.cut.store(false, Ordering::SeqCst);
            });
        }
    }

    /// Ends the connections of agents, and lets them make no other for a time; their VMs run on.
    pub(crate) fn sever(&self, ids: &[InstanceId], time: Duration) {
        self.cut(ids, time);
        self.reset(ids);
    }

    /// Ends the connections of agents, as a restart of theirs would.
    pub(crate) fn reset(&self, ids: &[InstanceId]) {
        for id in ids {
            if let Some(agent) = self.agents().get(id) {
                agent.link.close();
            }
        }
    }

    /// Agents that are registered and have a stream open.
    pub(crate) fn connected(&self) -> Vec<InstanceId> {
        let open = |it: &Agent| !it.dying && it.link.open.load(Ordering::SeqCst);
        self.agents().iter().filter(|(_, it)| open(it)).map(|(id, _)| *id).collect()
    }

    /// Everything heals: whoever starts from now on does start.
    pub(crate) fn heals(&self) {
        self.healed.store(true, Ordering::SeqCst);
    }

    async fn live(&self, id: InstanceId, spec: VmSpec, link: Arc<Link>, mut notices: mpsc::Receiver<Timestamp>) {
        let chance = self.chance.as_ref();
        tokio::time::sleep(Duration::from_millis(300) + jitter(chance, Duration::from_secs(3))).await;
        let fails = self.manners == Manners::Real && below(chance, 100) < 2;
        if fails && !self.healed.load(Ordering::SeqCst) {
            self.site.judge().note(format!("agent {id} never starts"));
            return std::future::pending().await;
        }
        let mut own = self.register(id, &spec, &link).await;
        loop {
            let ended = self.session(id, &mut own, &link, &mut notices).await;
            link.open.store(false, Ordering::SeqCst);
            if ended.as_ref().and_then(reason_of).is_some_and(|reason| reason == "CERT_EXPIRED") {
                self.rejoin(id, &mut own, &link).await;
            }
            tokio::time::sleep(Duration::from_millis(100) + jitter(chance, Duration::from_secs(2))).await;
        }
    }

    async fn register(&self, id: InstanceId, spec: &VmSpec, link: &Link) -> Identity {
        let (chance, bootstrap) = (self.chance.as_ref(), &spec.bootstrap);
        let key = KeyPair::generate(chance);
        loop {
            match self.ask(bootstrap, &key, link).await {
                Ok(answer) => {
                    if self.manners == Manners::Real && below(chance, 20) == 0 {
                        self.steal(id, bootstrap, link).await;
                    }
                    let (tenant, leaf) = (spec.tags.tenant.clone(), Arc::from([]));
                    let mut own = Identity { tenant, key, leaf, renew_after: self.site.now(), counter: 0 };
                    own.takes(&answer.client_certificate_pem, answer.renew_after);
                    return own;
                }
                Err(status) => self.site.heard("RegisterAgent", &status),
            }
            tokio::time::sleep(Duration::from_millis(500) + jitter(chance, Duration::from_secs(4))).await;
        }
    }

    async fn ask(
        &self,
        bootstrap: &Bootstrap,
        key: &KeyPair,
        link: &Link,
    ) -> Result<v1::RegisterClientResponse, Status> {
        let request = v1::RegisterClientRequest {
            registration_nonce_jwt: bootstrap.nonce_jwt.clone(),
            public_key_pem: key.public_key_pem().into_bytes(),
            client_version: "sim".to_owned(),
            ..v1::RegisterClientRequest::default()
        };
        self.knock(request, link).await
    }

    async fn knock(
        &self,
        request: v1::RegisterClientRequest,
        link: &Link,
    ) -> Result<v1::RegisterClientResponse, Status> {
        let mut wire = Wire::new(&self.site, Port::Registration, None);
        wire.cut = link.cut.clone();
        let mut client = RegistrationServiceClient::new(wire);
        let asked = tokio::time::timeout(CALL, client.register_agent(request));
        asked.await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))).map(tonic::Response::into_inner)
    }

    /// Its certificate ran out while nobody was there to renew it: the key alone must do.
    async fn rejoin(&self, id: InstanceId, own: &mut Identity, link: &Link) {
        let client_id = id.to_string();
        loop {
            own.counter += 1;
            let claim = RejoinClaim {
                cluster: &cluster(),
                role: Role::Agent,
                tenant: &own.tenant,
                client_id: &client_id,
                counter: own.counter,
            };
            let proof = v1::RejoinProof {
                client_id: client_id.clone(),
                tenant: own.tenant.to_string(),
                counter: own.counter,
                signature: claim.sign(&own.key),
            };
            let request = v1::RegisterClientRequest {
                public_key_pem: own.key.public_key_pem().into_bytes(),
                rejoin: Some(proof),
                client_version: "sim".to_owned(),
                ..v1::RegisterClientRequest::default()
            };
            match self.knock(request, link).await {
                Ok(answer) => {
                    self.site.judge().note(format!("agent {id} rejoins"));
                    return own.takes(&answer.client_certificate_pem, answer.renew_after);
                }
                Err(status) => self.site.heard("RegisterAgent", &status),
            }
            tokio::time::sleep(Duration::from_secs(1) + jitter(self.chance.as_ref(), Duration::from_secs(10))).await;
        }
    }

    /// Answers whether there is another certificate now.
    async fn renew(&self, own: &mut Identity, link: &Link) -> bool {
        let mut wire = Wire::new(&self.site, Port::Agent, Some(own.leaf.clone()));
        wire.cut = link.cut.clone();
        let request = v1::RenewCertificateRequest { public_key_pem: own.key.public_key_pem().into_bytes() };
        let mut client = AgentServiceClient::new(wire);
        match tokio::time::timeout(CALL, client.renew_certificate(request)).await {
            Ok(Ok(answer)) => {
                let answer = answer.into_inner();
                own.takes(&answer.client_certificate_pem, answer.renew_after);
                return true;
            }
            Ok(Err(status)) => self.site.heard("RenewCertificate", &status),
            Err(_) => {}
        }
        false
    }

    /// Somebody finds the nonce of a VM and tries it with a key of its own.
    pub(crate) async fn thief(&self, id: InstanceId) -> Result<(), Status> {
        let spec = self.site.cloud().vm_of(id).and_then(|vm| vm.spec);
        let spec = spec.ok_or_else(|| Status::not_found("there is no such VM"))?;
        let key = KeyPair::generate(self.chance.as_ref());
        self.ask(&spec.bootstrap, &key, &Link::default()).await.map(|_| ())
    }

    /// Somebody found the nonce and tries it with a key of its own.
    async fn steal(&self, id: InstanceId, bootstrap: &Bootstrap, link: &Link) {
        let thief = KeyPair::generate(self.chance.as_ref());
        match self.ask(bootstrap, &thief, link).await {
            Ok(_) => self.site.judge().violate("I11", format!("the nonce of {id} was good for a second key")),
            Err(status) => self.site.heard("RegisterAgent", &status),
        }
    }

    /// Until it is lost, or the certificate is another one: answers how the server ended it, if it did.
    async fn session(
        &self,
        id: InstanceId,
        own: &mut Identity,
        link: &Link,
        notices: &mut mpsc::Receiver<Timestamp>,
    ) -> Option<Status> {
        let mut wire = Wire::new(&self.site, Port::Agent, Some(own.leaf.clone()));
        wire.cut = link.cut.clone();
        *link.closed.lock().unwrap_or_else(PoisonError::into_inner) = wire.closed.clone();
        if wire.is_cut() {
            tokio::time::sleep(Duration::from_secs(2)).await;
            return None;
        }
        let (reports, receiver) = mpsc::channel(8);
        let report = |kind: v1::ReportKind| v1::HealthReportRequest {
            instance_id: id.to_string(),
            kind: kind.into(),
            interval_ms: u32::try_from(INTERVAL.as_millis()).unwrap_or(0),
            ..v1::HealthReportRequest::default()
        };
        // A queue that is full holds a report already.
        let _ = reports.try_send(report(v1::ReportKind::First));
        let mut client = AgentServiceClient::new(wire);
        let call = client.report_health(ReceiverStream::new(receiver));
        tokio::pin!(call);
        let mut next = tokio::time::Instant::now() + INTERVAL;
        let opened = tokio::time::sleep(Duration::from_millis(50));
        tokio::pin!(opened);
        let mut is_open = false;
        let mut renews = tokio::time::Instant::now() + own.renew_after.since(self.site.now());
        loop {
            tokio::select! {
                biased;
                ended = &mut call => {
                    let status = ended.err();
                    if let Some(status) = &status {
                        self.site.heard("ReportHealth", status);
                    }
                    return status;
                }
                () = tokio::time::sleep_until(renews) => {
                    if self.renew(own, link).await {
                        return None;
                    }
                    renews = tokio::time::Instant::now() + RENEWS_AGAIN;
                }
                () = &mut opened, if !is_open => {
                    is_open = true;
                    link.open.store(true, Ordering::SeqCst);
                }
                Some(deadline) = notices.recv() => {
                    let notice = v1::TerminationNotice {
                        action: "terminate".to_owned(),
                        deadline: Some(prost_types::Timestamp {
                            seconds: deadline.as_millis() / 1000,
                            nanos: 0,
                        }),
                        ..v1::TerminationNotice::default()
                    };
                    let told = v1::HealthReportRequest { termination_notice: Some(notice), ..report(v1::ReportKind::Notice) };
                    let _ = reports.try_send(told);
                }
                () = tokio::time::sleep_until(next) => {
                    next += INTERVAL;
                    if !link.cut.load(Ordering::SeqCst) {
                        let _ = reports.try_send(report(v1::ReportKind::Periodic));
                    }
                }
            }
        }
    }
}

impl Site {
    /// A refusal as a client got it. Some are never right.
    pub(crate) fn heard(&self, call: &str, status: &Status) {
        let never = matches!(status.code(), Code::Internal | Code::Unknown | Code::Unimplemented | Code::DataLoss);
        if never {
            self.judge().violate("status", format!("{call} answered {:?}: {}", status.code(), status.message()));
        }
    }
}
