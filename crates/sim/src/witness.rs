//! Between the servers and the world: what they send goes on its way even if they die meanwhile, and somebody sees it
//! begin and land.

use std::sync::Arc;

use async_trait::async_trait;
use nstance_core::{
    ids::{Epoch, InstanceId},
    ports::{
        clock::Clock as _,
        objects::{Condition, ETag, Listed, Object, ObjectStore, StoreError, StoreFault},
        provider::{
            Balancers, Capabilities, CheckProblem, DeleteHow, Described, ErrorClass, Images, InstanceType, LbMember,
            LeaderAddress, LeaderNetwork, Listing, LoadBalancer, Needs, Provider, ProviderError, Reservation,
            ReserveSpec, SubnetFree, Vm, VmRef, VmSpec,
        },
    },
    term::Permit,
    time::Timestamp,
};
use nstance_rt::{process::Process, tasks::Tasks};
use nstance_store::memory::MemoryStore;
use tokio::sync::oneshot;

use crate::{clock::SimClock, hosts::Hosts, judge::Judge, points::Points, site::Ground};

/// The bucket, with a witness at it.
pub(crate) struct WitnessedStore {
    pub(crate) bucket: Arc<MemoryStore>,
    pub(crate) judge: Arc<Judge>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) instances: String,
    pub(crate) lease: String,
}

impl WitnessedStore {
    /// Terms that could act at this moment, frozen servers included: a machine that stands still may run on any time.
    fn open_guards(&self) -> Vec<(usize, Epoch)> {
        let servers = self.hosts.servers().into_iter();
        let terms = servers.filter_map(|server| Some((server.n, server.running.term()?)));
        terms.filter(|(_, term)| term.guard.is_open()).map(|(n, term)| (n, term.epoch())).collect()
    }
}

#[async_trait]
impl ObjectStore for WitnessedStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        self.bucket.get(key).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.bucket.get_if_changed(key, etag).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        let put = self.bucket.put(key, body.clone(), condition).await;
        if put.is_ok() {
            if key.starts_with(&self.instances) {
                self.judge.written(key, &body);
            } else if key == self.lease {
                self.judge.leased(key, &body, || self.open_guards());
            } else if !key.ends_with("leader.json") {
                self.judge.note(format!("put {key}"));
            }
        }
        put
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let deleted = self.bucket.delete(key).await;
        if deleted.is_ok() && key.starts_with(&self.instances) {
            self.judge.removed(key);
        }
        deleted
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.bucket.list(prefix).await
    }

    fn describe(&self) -> String {
        "simulated bucket".to_owned()
    }
}

/// The way to the bucket: a write that was sent lands, whatever becomes of its sender.
pub(crate) struct SentStore {
    pub(crate) inner: Arc<dyn ObjectStore>,
    pub(crate) judge: Arc<Judge>,
    pub(crate) instances: String,
    pub(crate) groups: String,
    pub(crate) network: Tasks,
    pub(crate) points: Points,
    pub(crate) process: Process,
}

impl SentStore {
    async fn send<T: Send + 'static>(
        &self,
        op: &'static str,
        key: &str,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let point = self.points.reach(&self.process, || point_of(op, key)).await;
        let (answer, answered) = oneshot::channel();
        self.network.spawn("store write", async move {
            let _ = answer.send(call.await);
        });
        let lost = || StoreError::new(op, key, StoreFault::Ambiguous, "the network ended");
        let done = answered.await.unwrap_or_else(|_| Err(lost()));
        self.points.pass(&self.process, point).await;
        done
    }
}

/// What a write is, without the names that differ from run to run. `None` for those that come with time alone.
fn point_of(op: &str, key: &str) -> Option<String> {
    if key.ends_with("leader.json") || key.contains("/.probe/") {
        return None;
    }
    let words: Vec<&str> = key.split('/').filter(|part| !part.contains("knc") && !part.contains("srv")).collect();
    Some(format!("{op} {}", words.join("/")))
}

#[async_trait]
impl ObjectStore for SentStore {
    async fn get(&self, key: &str) -> Result<Object, StoreError> {
        self.inner.get(key).await
    }

    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError> {
        self.inner.get_if_changed(key, etag).await
    }

    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError> {
        if key.starts_with(&self.instances) || key == self.groups {
            self.judge.sent(key, &body);
        }
        let (inner, name) = (self.inner.clone(), key.to_owned());
        self.send("put", key, async move { inner.put(&name, body, condition).await }).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let (inner, name) = (self.inner.clone(), key.to_owned());
        self.send("delete", key, async move { inner.delete(&name).await }).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError> {
        self.inner.list(prefix).await
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

/// The way to the cloud: effects are judged when they begin, and land whatever becomes of their sender.
pub(crate) struct SentProvider {
    pub(crate) inner: Arc<dyn Provider>,
    pub(crate) ground: Arc<Ground>,
    pub(crate) hosts: Arc<Hosts>,
    pub(crate) n: usize,
    pub(crate) clock: Arc<SimClock>,
    pub(crate) network: Tasks,
    pub(crate) points: Points,
    pub(crate) process: Process,
}

impl SentProvider {
    async fn send<T: Send + 'static>(
        &self,
        op: &'static str,
        call: impl Future<Output = Result<T, ProviderError>> + Send + 'static,
    ) -> Result<T, ProviderError> {
        let point = self.points.reach(&self.process, || Some(op.to_owned())).await;
        let (answer, answered) = oneshot::channel();
        self.network.spawn("provider call", async move {
            let _ = answer.send(call.await);
        });
        let lost = || ProviderError::new(op, ErrorClass::Ambiguous, "the network ended");
        let done = answered.await.unwrap_or_else(|_| Err(lost()));
        self.points.pass(&self.process, point).await;
        done
    }

    /// What the time is for whoever acts here: deadlines are its own.
    fn term_time(&self) -> Timestamp {
        let term = self.hosts.server(self.n).and_then(|server| server.running.term());
        term.map_or_else(|| self.clock.now(), |term| term.now())
    }

    fn begin(&self, op: &str, permit: &Permit, instance: Option<InstanceId>) {
        self.ground.judge.effect(op, permit.epoch(), instance);
    }
}

#[async_trait]
impl Provider for SentProvider {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn balancers(&self) -> Option<&dyn Balancers> {
        self.inner.balancers().map(|_| self as &dyn Balancers)
    }

    fn leader_address(&self) -> Option<&dyn LeaderAddress> {
        self.inner.leader_address().map(|_| self as &dyn LeaderAddress)
    }

    fn images(&self) -> Option<&dyn Images> {
        self.inner.images()
    }

    async fn check(&self, needs: &Needs) -> Vec<CheckProblem> {
        self.inner.check(needs).await
    }

    async fn reserve(&self, spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        self.inner.reserve(spec).await
    }

    fn restore(&self, reserved: &[String]) {
        self.inner.restore(reserved);
    }

    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        self.begin("create", &permit, Some(spec.instance));
        self.ground.judge.count(|stats| stats.created += 1);
        let (inner, spec) = (self.inner.clone(), spec.clone());
        self.send("create", async move { inner.create(permit, &spec).await }).await
    }

    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError> {
        self.begin("delete", &permit, Some(vm.instance));
        self.ground.judge.count(|stats| stats.deleted += 1);
        self.ground.judge.deleting(vm.instance, &self.ground.scene(vm, self.term_time()));
        let (inner, vm) = (self.inner.clone(), vm.clone());
        self.send("delete", async move { inner.delete(permit, &vm, how).await }).await
    }

    async fn describe(&self, vms: &[VmRef]) -> Vec<Described> {
        self.inner.describe(vms).await
    }

    async fn list(&self) -> Result<Listing, ProviderError> {
        self.inner.list().await
    }

    async fn probe(&self) -> Result<(), ProviderError> {
        self.inner.probe().await
    }

    async fn clean(&self, permit: Permit, vm: &VmRef) -> Result<(), ProviderError> {
        self.begin("clean", &permit, Some(vm.instance));
        let (inner, vm) = (self.inner.clone(), vm.clone());
        self.send("clean", async move { inner.clean(permit, &vm).await }).await
    }

    async fn subnet_free(&self, subnet: &str) -> Result<SubnetFree, ProviderError> {
        self.inner.subnet_free(subnet).await
    }

    async fn instance_type(&self, name: &str) -> Result<Option<InstanceType>, ProviderError> {
        self.inner.instance_type(name).await
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        self.inner.k8s_provider_id(vm)
    }
}

/// Said by an ability that is handed out only where the inner provider has it.
const HANDED_OUT: &str = "an ability is handed out only where the inner provider has it";

#[async_trait]
impl Balancers for SentProvider {
    async fn lb_register(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        self.begin("lb_register", &permit, Some(vm.instance));
        let (inner, lb, vm) = (self.inner.clone(), lb.clone(), vm.clone());
        let call = async move { inner.balancers().expect(HANDED_OUT).lb_register(permit, &lb, &vm).await };
        self.send("lb_register", call).await
    }

    async fn lb_deregister(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        self.begin("lb_deregister", &permit, Some(vm.instance));
        let (inner, lb, vm) = (self.inner.clone(), lb.clone(), vm.clone());
        let call = async move { inner.balancers().expect(HANDED_OUT).lb_deregister(permit, &lb, &vm).await };
        self.send("lb_deregister", call).await
    }

    async fn lb_members(&self, lb: &LoadBalancer) -> Result<Vec<LbMember>, ProviderError> {
        self.inner.balancers().expect(HANDED_OUT).lb_members(lb).await
    }
}

#[async_trait]
impl LeaderAddress for SentProvider {
    async fn self_id(&self) -> Result<String, ProviderError> {
        self.inner.leader_address().expect(HANDED_OUT).self_id().await
    }

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        self.inner.leader_address().expect(HANDED_OUT).net_holder(network).await
    }

    async fn net_assign(
        &self,
        permit: Permit,
        me: &str,
        network: &LeaderNetwork,
        previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        self.begin("net_assign", &permit, None);
        self.inner.leader_address().expect(HANDED_OUT).net_assign(permit, me, network, previous).await
    }

    async fn net_release(&self, me: &str, network: &LeaderNetwork) -> Result<(), ProviderError> {
        self.inner.leader_address().expect(HANDED_OUT).net_release(me, network).await
    }
}
