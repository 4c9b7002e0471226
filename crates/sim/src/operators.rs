//! Operators: each wants something of its tenant's groups and goes on asking until it is so; each acknowledges drains,
//! late, at once or never; and each looks at all it is shown for a word about somebody else.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ids::{GroupRef, InstanceId, OperatorId, Tenant, uuid_v7},
    instance::Instance,
    ports::clock::{Entropy, random},
};
use nstance_identity::{
    keys::KeyPair,
    nonce::{OperatorNonce, new_jti, sign_operator_nonce},
};
use nstance_proto::v1::{
    self, operator_service_client::OperatorServiceClient, registration_service_client::RegistrationServiceClient,
};
use nstance_rt::{
    entropy::{below, jitter},
    tasks::Tasks,
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use tonic::{Code, Status};

use crate::{
    net::{Port, Wire},
    plane::Manners,
    site::{Site, cluster},
};

/// What is wanted of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    pub size: u32,
    /// In the config file; if not, the operator makes it.
    pub is_static: bool,
    pub instance_type: String,
    /// Asked to go.
    pub deleted: bool,
}

impl Wish {
    pub(crate) fn is_of_type(&self, instance: &Instance) -> bool {
        instance.instance_type.as_deref() == Some(self.instance_type.as_str())
    }
}

pub(crate) struct Operator {
    pub(crate) tenant: Tenant,
    site: Arc<Site>,
    chance: Arc<dyn Entropy>,
    manners: Manners,
    /// Says nothing to drains while this is set.
    pub(crate) mute: AtomicBool,
    wishes: Mutex<Wishes>,
    view: Mutex<View>,
    /// Its certificate, once it has one.
    leaf: OnceLock<Arc<[u8]>>,
}

#[derive(Default)]
struct Wishes {
    groups: BTreeMap<String, Wish>,
    /// Instances asked for one by one, by request id.
    on_demand: BTreeMap<String, OnDemand>,
    /// Whether a config was uploaded that nobody has asked the server to take yet.
    refresh: bool,
    /// Instances that shall go, each until the server has taken it up.
    remove: BTreeSet<InstanceId>,
    replace: BTreeSet<InstanceId>,
    /// When each drain is acknowledged; `None`: never.
    acks: BTreeMap<(InstanceId, String), Option<tokio::time::Instant>>,
}

/// An instance that was asked for by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct OnDemand {
    group: String,
    /// Once the server has told it.
    id: Option<InstanceId>,
    /// Not wanted any more.
    over: bool,
}

/// What a watch of instances has told so far.
#[derive(Default)]
struct View {
    token: String,
    living: BTreeMap<InstanceId, String>,
    /// A snapshot on its way: what it does not name is gone.
    fresh: Option<BTreeMap<InstanceId, String>>,
}

pub(crate) type Client = OperatorServiceClient<Wire>;

impl Operator {
    pub(crate) fn start(
        site: &Arc<Site>,
        tasks: &Tasks,
        tenant: Tenant,
        chance: Arc<dyn Entropy>,
        manners: Manners,
    ) -> Arc<Self> {
        let operator = Arc::new(Self {
            tenant,
            site: site.clone(),
            chance,
            manners,
            mute: AtomicBool::new(false),
            wishes: Mutex::default(),
            view: Mutex::default(),
            leaf: OnceLock::new(),
        });
        let it = operator.clone();
        tasks.spawn_droppable("operator", async move { it.live().await });
        operator
    }

    fn wishes(&self) -> MutexGuard<'_, Wishes> {
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn want(&self, group: &str, wish: Wish) {
        self.site.judge().note(format!("{} wants {group} {wish:?}", self.tenant));
        self.wishes().groups.insert(group.to_owned(), wish);
    }

    pub(crate) fn groups(&self) -> BTreeMap<String, Wish> {
        self.wishes().groups.clone()
    }

    pub(crate) fn remove(&self, id: InstanceId) {
        self.site.judge().note(format!("{} wants {id} to go", self.tenant));
        self.wishes().remove.insert(id);
    }

    pub(crate) fn replace(&self, id: InstanceId) {
        self.site.judge().note(format!("{} wants {id} replaced", self.tenant));
        self.wishes().replace.insert(id);
    }

    /// Asks for an instance outside of any group's size.
    pub(crate) fn ask_for(&self, request: String, group: String) {
        self.site.judge().note(format!("{} asks for {request} in {group}", self.tenant));
        self.wishes().on_demand.insert(request, OnDemand { group, ..OnDemand::default() });
    }

    /// Gives back one that was asked for by itself. Says whether there was one.
    pub(crate) fn give_back(&self) -> bool {
        let mut wishes = self.wishes();
        let Some((request, it)) = wishes.on_demand.iter_mut().find(|(_, it)| !it.over && it.id.is_some()) else {
            return false;
        };
        it.over = true;
        self.site.judge().note(format!("{} gives {request} back", self.tenant));
        true
    }

    /// Instances that were asked for by themselves and are still wanted.
    pub(crate) fn on_demand(&self) -> BTreeSet<InstanceId> {
        self.wishes().on_demand.values().filter(|it| !it.over).filter_map(|it| it.id).collect()
    }

    /// A config was uploaded: the server is asked to take it.
    pub(crate) fn refresh(&self) {
        self.wishes().refresh = true;
    }

    /// Instances that live, as the watch has told.
    pub(crate) fn watched(&self) -> BTreeSet<InstanceId> {
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.living.iter().filter(|(_, status)| *status != "failed").map(|(id, _)| *id).collect()
    }

    /// Whether the servers have taken up everything.
    pub(crate) fn is_content(&self) -> bool {
        let wishes = self.wishes();
        let settled = |it: &OnDemand| it.id.is_some();
        let asked = wishes.on_demand.values().all(settled) && !wishes.refresh;
        asked && wishes.remove.is_empty() && wishes.replace.is_empty()
    }

    async fn live(&self) {
        let leaf = self.register().await;
        let leaf = self.leaf.get_or_init(|| leaf).clone();
        tokio::join!(self.work(leaf.clone()), self.watch(leaf));
    }

    /// Follows the tenant's instances for ever.
    async fn watch(&self, leaf: Arc<[u8]>) {
        loop {
            let mut client = OperatorServiceClient::new(Wire::new(&self.site, Port::Operator, Some(leaf.clone())));
            let resumes = below(self.chance.as_ref(), 2) == 0;
            let token = self.view.lock().unwrap_or_else(PoisonError::into_inner).token.clone();
            let request = v1::WatchRequest { resume_token: if resumes { token } else { String::new() } };
            let ended = async {
                let mut events = client.watch_instances(request).await?.into_inner();
                while let Some(event) = events.message().await? {
                    self.shown(&event);
                }
                Ok::<_, Status>(())
            };
            if let Err(status) = ended.await {
                self.site.heard("WatchInstances", &status);
            }
            self.view.lock().unwrap_or_else(PoisonError::into_inner).fresh = None;
            tokio::time::sleep(Duration::from_millis(200) + jitter(self.chance.as_ref(), Duration::from_secs(1))).await;
        }
    }

    fn shown(&self, event: &v1::InstanceEvent) {
        let mut view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        if !event.resume_token.is_empty() {
            view.token.clone_from(&event.resume_token);
        }
        if event.status == "snapshot_end" {
            view.living = view.fresh.take().unwrap_or_default();
            return;
        }
        let Ok(id) = event.instance_id.parse::<InstanceId>() else {
            self.site.judge().violate("watch", format!("{} is told of {:?}", self.tenant, event.instance_id));
            return;
        };
        let foreign = self.site.judge().instance(id).is_some_and(|it| it.group.tenant != self.tenant);
        if foreign || event.tenant != self.tenant.as_str() {
            self.site.judge().violate("I12", format!("{} is told of instance {id} of another tenant", self.tenant));
        }
        let View { living, fresh, .. } = &mut *view;
        let map = if event.snapshot { fresh.get_or_insert_default() } else { living };
        if event.status == "deleted" {
            map.remove(&id);
        } else {
            map.insert(id, event.status.clone());
        }
    }

    async fn work(&self, leaf: Arc<[u8]>) {
        let mut client = OperatorServiceClient::new(Wire::new(&self.site, Port::Operator, Some(leaf)));
        loop {
            let pass = tokio::time::timeout(Duration::from_secs(20), self.pass(&mut client)).await;
            if let Ok(Err(status)) = pass {
                self.site.heard("operator call", &status);
            }
            tokio::time::sleep(Duration::from_millis(500) + jitter(self.chance.as_ref(), Duration::from_secs(2))).await;
        }
    }

    /// Another connection of this operator, once it is registered.
    pub(crate) fn client(&self) -> Option<Client> {
        let leaf = self.leaf.get()?.clone();
        Some(OperatorServiceClient::new(Wire::new(&self.site, Port::Operator, Some(leaf))))
    }

    async fn register(&self) -> Arc<[u8]> {
        let key = KeyPair::generate(self.chance.as_ref());
        let mut nonce = None;
        loop {
            if nonce.is_none()
                && let Some(signer) = self.site.nonce_key().await
            {
                let now = self.site.now();
                let claims = OperatorNonce {
                    operator: OperatorId::new(uuid_v7(now, random(self.chance.as_ref()))),
                    jti: new_jti(self.chance.as_ref()),
                    issued_at: now,
                    expires_at: now.plus(Duration::from_secs(3600)),
                    cluster: cluster(),
                    tenant: self.tenant.clone(),
                };
                nonce = Some(sign_operator_nonce(&signer, &claims));
            }
            if let Some(nonce) = &nonce {
                let request = v1::RegisterClientRequest {
                    registration_nonce_jwt: nonce.clone(),
                    public_key_pem: key.public_key_pem().into_bytes(),
                    ..v1::RegisterClientRequest::default()
                };
                let mut client = RegistrationServiceClient::new(Wire::new(&self.site, Port::Registration, None));
                let asked = tokio::time::timeout(Duration::from_secs(10), client.register_operator(request));
                match asked.await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))) {
                    Ok(answer) => {
                        let leaf = CertificateDer::from_pem_slice(&answer.get_ref().client_certificate_pem);
                        return leaf.map(|leaf| Arc::from(leaf.as_ref())).unwrap_or_else(|_| Arc::from([]));
                    }
                    Err(status) => self.site.heard("RegisterOperator", &status),
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    async fn pass(&self, client: &mut Client) -> Result<(), Status> {
        let groups = client.list_groups(()).await?.into_inner().groups;
        for status in &groups {
            if status.tenant != self.tenant.as_str() {
                self.site
                    .judge()
                    .violate("I12", format!("{} is shown group {}/{}", self.tenant, status.tenant, status.key));
            }
        }
        let instances = self.instances(client).await?;
        self.acknowledge(client, &instances).await?;
        for (key, wish) in self.groups() {
            let status = groups.iter().find(|status| status.key == key);
            self.reconcile(client, &key, &wish, status).await?;
        }
        self.ask(client).await?;
        // Taken before the call: another config may be uploaded while it lasts.
        let refresh = std::mem::take(&mut self.wishes().refresh);
        if refresh {
            let taken = self.take_config(client).await;
            if !matches!(taken, Ok(true)) {
                self.wishes().refresh = true;
            }
            taken?;
        }
        let (remove, replace) = {
            let wishes = self.wishes();
            (wishes.remove.clone(), wishes.replace.clone())
        };
        for id in remove {
            let request = v1::DeleteInstanceRequest { instance_id: id.to_string(), ..Default::default() };
            settled(client.delete_instance(request).await)?;
            self.wishes().remove.remove(&id);
        }
        for id in replace {
            let request = v1::ReplaceInstanceRequest { instance_id: id.to_string(), ..Default::default() };
            settled(client.replace_instance(request).await)?;
            self.wishes().replace.remove(&id);
        }
        Ok(())
    }

    /// Asks for instances one by one, again and again under the same request: there is only ever one of each.
    async fn ask(&self, client: &mut Client) -> Result<(), Status> {
        let asked: Vec<_> = self.wishes().on_demand.clone().into_iter().collect();
        for (request_id, it) in asked {
            if it.over {
                if let Some(id) = it.id {
                    let request = v1::DeleteInstanceRequest { instance_id: id.to_string(), ..Default::default() };
                    settled(client.delete_instance(request).await)?;
                }
                continue;
            }
            if it.id.is_some() && 0 < below(self.chance.as_ref(), 20) {
                continue;
            }
            let config = v1::InstanceConfig { group: it.group.clone(), ..Default::default() };
            let request = v1::CreateInstanceRequest {
                config: Some(config),
                request_id: request_id.clone(),
                ..Default::default()
            };
            match client.create_instance(request).await {
                Ok(answer) => {
                    let id = answer.get_ref().instance_id.parse::<InstanceId>().ok();
                    // After its record is gone nobody remembers the request.
                    let stands = it.id.is_some_and(|id| self.site.judge().instance(id).is_some());
                    if stands && id != it.id {
                        let what = format!("{request_id} made {:?} and then {id:?}", it.id);
                        self.site.judge().violate("idempotency", what);
                    }
                    if let Some(it) = self.wishes().on_demand.get_mut(&request_id) {
                        it.id = it.id.filter(|_| stands).or(id);
                    }
                }
                // Its group is gone: nothing will come of it.
                Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => {
                    if it.id.is_none() {
                        self.wishes().on_demand.remove(&request_id);
                    }
                }
                Err(status) => return Err(status),
            }
        }
        Ok(())
    }

    /// Answers whether it is in force now.
    async fn take_config(&self, client: &mut Client) -> Result<bool, Status> {
        let ask = |confirm_removals| v1::RefreshConfigRequest { confirm_removals, dry_run: false };
        match client.refresh_config(ask(false)).await {
            Ok(answer) if answer.get_ref().warnings.is_empty() => {}
            Ok(_) => {
                client.refresh_config(ask(true)).await?;
            }
            // Too much at once: a person would look, and say yes.
            Err(status) if status.code() == Code::FailedPrecondition => {
                client.refresh_config(ask(true)).await?;
            }
            // A config that is wrong will be followed by one that is right.
            Err(status) if status.code() == Code::InvalidArgument => {
                self.site
                    .judge()
                    .note(format!("config refused: {}", status.message().lines().next().unwrap_or_default()));
                return Ok(false);
            }
            Err(status) => return Err(status),
        }
        Ok(true)
    }

    async fn instances(&self, client: &mut Client) -> Result<Vec<v1::InstanceStatusResponse>, Status> {
        let request = v1::ListInstancesRequest { page_size: 500, ..Default::default() };
        let instances = client.list_instances(request).await?.into_inner().instances;
        for shown in &instances {
            let of = shown.instance_id.parse().ok().and_then(|id| self.site.judge().instance(id));
            let foreign = of.is_some_and(|it| it.group.tenant != self.tenant);
            if foreign || shown.tenant != self.tenant.as_str() {
                self.site.judge().violate("I12", format!("{} is shown instance {}", self.tenant, shown.instance_id));
            }
        }
        Ok(instances)
    }

    async fn acknowledge(&self, client: &mut Client, instances: &[v1::InstanceStatusResponse]) -> Result<(), Status> {
        if self.mute.load(Ordering::SeqCst) {
            return Ok(());
        }
        let now = tokio::time::Instant::now();
        for shown in instances {
            let (Some(drain), Ok(id)) = (&shown.drain, shown.instance_id.parse::<InstanceId>()) else { continue };
            if shown.status != "draining" || drain.acked_at.is_some() {
                continue;
            }
            let key = (id, drain.drain_id.clone());
            let chance = self.chance.as_ref();
            let at = *self.wishes().acks.entry(key).or_insert_with(|| match below(chance, 100) {
                _ if self.manners == Manners::Good => Some(now),
                0..15 => None,
                15..40 => Some(now),
                _ => Some(now + jitter(chance, Duration::from_secs(8))),
            });
            if at.is_some_and(|at| at <= now) {
                let request = v1::DrainAckRequest { instance_id: id.to_string(), drain_id: drain.drain_id.clone() };
                settled(client.acknowledge_drained(request).await)?;
            }
        }
        Ok(())
    }

    async fn reconcile(
        &self,
        client: &mut Client,
        key: &str,
        wish: &Wish,
        status: Option<&v1::GroupStatus>,
    ) -> Result<(), Status> {
        if wish.deleted {
            if status.is_some_and(|status| !status.deleting) {
                client.delete_group(v1::DeleteGroupRequest { key: key.to_owned(), ..Default::default() }).await?;
            }
            return Ok(());
        }
        let size = i32::try_from(wish.size).unwrap_or(i32::MAX);
        if status.is_some_and(|it| it.size == size && it.instance_type == wish.instance_type && !it.deleting) {
            return Ok(());
        }
        let config = v1::GroupConfig {
            template: if wish.is_static { String::new() } else { "knc".to_owned() },
            size: Some(size),
            instance_type: wish.instance_type.clone(),
            ..Default::default()
        };
        let request = v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..Default::default() };
        match client.upsert_group(request).await {
            Ok(_) => Ok(()),
            // It goes, and is made anew when it is gone.
            Err(status) if status.code() == Code::FailedPrecondition => Ok(()),
            Err(status) => Err(status),
        }
    }

    pub(crate) fn group(&self, key: &str) -> GroupRef {
        crate::site::group(self.tenant.as_str(), key)
    }
}

/// What the server has done, or will never do: either way it need not be asked again.
fn settled<T>(answer: Result<T, Status>) -> Result<(), Status> {
    match answer {
        Ok(_) => Ok(()),
        Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => Ok(()),
        Err(status) => Err(status),
    }
}
