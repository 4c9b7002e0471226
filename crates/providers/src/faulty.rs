//! A provider behind a bad network: seeded delays, losses before and after landing, refusals, and a freeze.
//!
//! It never lies: what it makes of a lost call is an ambiguity or an outage, never a "not found". One seed and one
//! sequence of calls give one sequence of faults, since every call draws the same amount of chance.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use nstance_core::{
    ports::{
        clock::Entropy,
        provider::{
            Balancers, Capabilities, CheckProblem, CheckSeverity, DeleteHow, Described, ErrorClass, Image, ImageQuery,
            Images, InstanceType, Landed, LbMember, LeaderAddress, LeaderNetwork, Listing, LoadBalancer, Need, Needs,
            Provider, ProviderError, Reservation, ReserveSpec, SubnetFree, Vm, VmRef, VmSpec,
        },
    },
    term::Permit,
};
use nstance_rt::entropy;
use tokio::sync::watch;

/// How often what goes wrong. Odds are in thousandths of all calls, and together at most 1000.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Faults {
    /// Up to this much before a call is sent.
    pub delay: Duration,
    /// The request never arrives.
    pub lose_before: u32,
    /// The request lands, its answer never arrives.
    pub lose_after: u32,
    /// Refused with this class before anything landed. `NotFound` is left out: that would be a lie.
    pub refuse: BTreeMap<ErrorClass, u32>,
    /// An effect lands, and its answer is a refusal of this class which says that it may have landed. A read is refused.
    /// `NotFound` is left out here too.
    pub land_then_refuse: BTreeMap<ErrorClass, u32>,
}

pub struct FaultyProvider {
    inner: Arc<dyn Provider>,
    entropy: Arc<dyn Entropy>,
    faults: Mutex<Faults>,
    n_faults: AtomicU64,
    frozen: watch::Sender<bool>,
}

/// What chance decided for one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Well,
    LostBefore,
    LostAfter,
    Refused(ErrorClass),
    LandedAndRefused(ErrorClass),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Effect,
}

impl FaultyProvider {
    pub fn new(inner: Arc<dyn Provider>, entropy: Arc<dyn Entropy>, faults: Faults) -> Self {
        Self {
            inner,
            entropy,
            faults: Mutex::new(faults),
            n_faults: AtomicU64::new(0),
            frozen: watch::Sender::new(false),
        }
    }

    pub fn set(&self, faults: Faults) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }

    /// How many calls did not go well.
    pub fn n_faults(&self) -> u64 {
        self.n_faults.load(Ordering::Relaxed)
    }

    /// While frozen, calls neither go out nor come back.
    pub fn freeze(&self, on: bool) {
        self.frozen.send_replace(on);
    }

    async fn thawed(&self) {
        // The sender is ours, so it outlives this wait.
        let _ = self.frozen.subscribe().wait_for(|frozen| !frozen).await;
    }

    fn draw(&self) -> (Duration, Fate) {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let delay = entropy::jitter(&*self.entropy, faults.delay);
        let mut roll = entropy::below(&*self.entropy, 1000);
        let mut falls = |odds: u32| {
            let hit = roll < u64::from(odds);
            roll = roll.wrapping_sub(u64::from(odds)); // never reached again after a hit
            hit
        };
        if falls(faults.lose_before) {
            return (delay, Fate::LostBefore);
        }
        if falls(faults.lose_after) {
            return (delay, Fate::LostAfter);
        }
        let refused = faults.refuse.iter().map(|(class, odds)| (Fate::Refused(*class), *class, *odds));
        let landed =
            faults.land_then_refuse.iter().map(|(class, odds)| (Fate::LandedAndRefused(*class), *class, *odds));
        match refused.chain(landed).find(|(_, _, odds)| falls(*odds)) {
            Some((fate, class, _)) if class != ErrorClass::NotFound => (delay, fate),
            _ => (delay, Fate::Well),
        }
    }

    async fn pass<T>(
        &self,
        op: &'static str,
        kind: Kind,
        call: impl Future<Output = Result<T, ProviderError>> + Send,
    ) -> Result<T, ProviderError> {
        let (delay, fate) = self.draw();
        self.n_faults.fetch_add(u64::from(fate != Fate::Well), Ordering::Relaxed);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        self.thawed().await;
        let lost = || {
            let class = match kind {
                Kind::Read => ErrorClass::Unavailable,
                Kind::Effect => ErrorClass::Ambiguous,
            };
            Err(ProviderError::new(op, class, "the answer was lost"))
        };
        let answer = match fate {
            Fate::LostBefore => lost(),
            Fate::Refused(class) => Err(ProviderError::new(op, class, "refused by chance")),
            Fate::Well => call.await,
            Fate::LostAfter => {
                let _ = call.await;
                lost()
            }
            Fate::LandedAndRefused(class) => {
                let refused = ProviderError::new(op, class, "refused by chance");
                match kind {
                    Kind::Read => Err(refused),
                    Kind::Effect => {
                        let _ = call.await;
                        Err(refused.with_landed(Landed::Maybe))
                    }
                }
            }
        };
        self.thawed().await;
        answer
    }

    fn inner_balancers(&self, op: &'static str) -> Result<&dyn Balancers, ProviderError> {
        self.inner.balancers().ok_or_else(|| lacks(op, "has no load balancers"))
    }

    fn inner_leader_address(&self, op: &'static str) -> Result<&dyn LeaderAddress, ProviderError> {
        self.inner.leader_address().ok_or_else(|| lacks(op, "moves no address"))
    }

    fn inner_images(&self, op: &'static str) -> Result<&dyn Images, ProviderError> {
        self.inner.images().ok_or_else(|| lacks(op, "resolves no images"))
    }
}

/// An ability is handed out only where the inner provider has it, so this is not seen unless that one changes its mind.
fn lacks(op: &'static str, what: &str) -> ProviderError {
    ProviderError::new(op, ErrorClass::Invalid, format!("the provider {what}"))
}

#[async_trait]
impl Provider for FaultyProvider {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn balancers(&self) -> Option<&dyn Balancers> {
        self.inner.balancers().is_some().then_some(self)
    }

    fn leader_address(&self) -> Option<&dyn LeaderAddress> {
        self.inner.leader_address().is_some().then_some(self)
    }

    fn images(&self) -> Option<&dyn Images> {
        self.inner.images().is_some().then_some(self)
    }

    async fn check(&self, needs: &Needs) -> Vec<CheckProblem> {
        match self.pass("check", Kind::Read, async { Ok(self.inner.check(needs).await) }).await {
            Ok(problems) => problems,
            Err(error) => vec![CheckProblem { need: Need::Account, severity: CheckSeverity::Error, error }],
        }
    }

    /// Nothing leaves this process, so nothing can be lost.
    async fn reserve(&self, spec: &ReserveSpec) -> Result<Reservation, ProviderError> {
        self.inner.reserve(spec).await
    }

    fn restore(&self, reserved: &[String]) {
        self.inner.restore(reserved);
    }

    async fn create(&self, permit: Permit, spec: &VmSpec) -> Result<Vm, ProviderError> {
        self.pass("create", Kind::Effect, self.inner.create(permit, spec)).await
    }

    async fn delete(&self, permit: Permit, vm: &VmRef, how: DeleteHow) -> Result<(), ProviderError> {
        self.pass("delete", Kind::Effect, self.inner.delete(permit, vm, how)).await
    }

    async fn describe(&self, vms: &[VmRef]) -> Vec<Described> {
        match self.pass("describe", Kind::Read, async { Ok(self.inner.describe(vms).await) }).await {
            Ok(described) => described,
            Err(error) => vms.iter().map(|_| Described::Unknown(error.clone())).collect(),
        }
    }

    async fn list(&self) -> Result<Listing, ProviderError> {
        self.pass("list", Kind::Read, self.inner.list()).await
    }

    async fn probe(&self) -> Result<(), ProviderError> {
        self.pass("probe", Kind::Read, self.inner.probe()).await
    }

    async fn clean(&self, permit: Permit, vm: &VmRef) -> Result<(), ProviderError> {
        self.pass("clean", Kind::Effect, self.inner.clean(permit, vm)).await
    }

    async fn subnet_free(&self, subnet: &str) -> Result<SubnetFree, ProviderError> {
        self.pass("subnet_free", Kind::Read, self.inner.subnet_free(subnet)).await
    }

    async fn instance_type(&self, name: &str) -> Result<Option<InstanceType>, ProviderError> {
        self.pass("instance_type", Kind::Read, self.inner.instance_type(name)).await
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        self.inner.k8s_provider_id(vm)
    }
}

#[async_trait]
impl Balancers for FaultyProvider {
    async fn lb_register(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        let inner = self.inner_balancers("lb_register")?;
        self.pass("lb_register", Kind::Effect, inner.lb_register(permit, lb, vm)).await
    }

    async fn lb_deregister(&self, permit: Permit, lb: &LoadBalancer, vm: &VmRef) -> Result<(), ProviderError> {
        let inner = self.inner_balancers("lb_deregister")?;
        self.pass("lb_deregister", Kind::Effect, inner.lb_deregister(permit, lb, vm)).await
    }

    async fn lb_members(&self, lb: &LoadBalancer) -> Result<Vec<LbMember>, ProviderError> {
        let inner = self.inner_balancers("lb_members")?;
        self.pass("lb_members", Kind::Read, inner.lb_members(lb)).await
    }
}

#[async_trait]
impl LeaderAddress for FaultyProvider {
    /// Asked of the machine itself, not of the network.
    async fn self_id(&self) -> Result<String, ProviderError> {
        self.inner_leader_address("self_id")?.self_id().await
    }

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        let inner = self.inner_leader_address("net_holder")?;
        self.pass("net_holder", Kind::Read, inner.net_holder(network)).await
    }

    async fn net_assign(
        &self,
        permit: Permit,
        me: &str,
        network: &LeaderNetwork,
        previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        let inner = self.inner_leader_address("net_assign")?;
        self.pass("net_assign", Kind::Effect, inner.net_assign(permit, me, network, previous)).await
    }

    async fn net_release(&self, me: &str, network: &LeaderNetwork) -> Result<(), ProviderError> {
        let inner = self.inner_leader_address("net_release")?;
        self.pass("net_release", Kind::Effect, inner.net_release(me, network)).await
    }
}

#[async_trait]
impl Images for FaultyProvider {
    async fn resolve_image(&self, query: &ImageQuery) -> Result<Option<Image>, ProviderError> {
        let inner = self.inner_images("resolve_image")?;
        self.pass("resolve_image", Kind::Read, inner.resolve_image(query)).await
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::{ports::provider::Owner, time::Timestamp};
    use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

    use super::*;
    use crate::fake::{FakeOptions, FakeProvider};

    fn faulty(seed: u64, faults: Faults) -> (FakeProvider, FaultyProvider) {
        let owner = Owner { cluster: "c".parse().unwrap(), shard: "s".parse().unwrap() };
        let clock = Arc::new(TokioClock::starting_at(Timestamp::EPOCH));
        let fake = FakeProvider::new(owner, clock, Arc::new(SeededEntropy::new(0)), FakeOptions::default());
        let faulty = FaultyProvider::new(Arc::new(fake.clone()), Arc::new(SeededEntropy::new(seed)), faults);
        (fake, faulty)
    }

    #[tokio::test(start_paused = true)]
    async fn one_seed_gives_one_sequence_of_faults() {
        let run = async |seed| {
            let refuse = [(ErrorClass::Auth, 200), (ErrorClass::NotFound, 200)].into();
            let delay = Duration::from_millis(100);
            let (fake, faulty) =
                faulty(seed, Faults { delay, lose_before: 200, lose_after: 200, refuse, ..Faults::default() });
            let mut answers = Vec::new();
            for _ in 0..200 {
                answers.push(faulty.probe().await.map_err(|error| error.class));
            }
            (answers, fake.calls().len())
        };
        let (first, again, other) = (run(1).await, run(1).await, run(2).await);
        assert_eq!(first, again);
        assert_ne!(first.0, other.0);
        let n = |answer| first.0.iter().filter(|it| **it == answer).count();
        assert!(n(Err(ErrorClass::NotFound)) == 0, "it never lies");
        for answer in [Ok(()), Err(ErrorClass::Auth), Err(ErrorClass::Unavailable)] {
            assert!(20 < n(answer), "{answer:?}: {}", n(answer));
        }
        assert!(n(Ok(())) < first.1, "some that failed had landed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_of_what_has_landed_says_so_in_any_class() {
        let faults = Faults { land_then_refuse: [(ErrorClass::Capacity, 1000)].into(), ..Faults::default() };
        let (fake, faulty) = faulty(1, faults);
        let permit = || {
            let clock = Arc::new(TokioClock::starting_at(Timestamp::EPOCH));
            nstance_core::term::Guard::unfenced(nstance_core::ids::Epoch(1), clock).permit().unwrap()
        };
        let lb = LoadBalancer { key: "web".parse().unwrap(), spec: nstance_core::value::Object::new() };
        let instance = nstance_core::ids::InstanceId::new("knc".parse().unwrap(), [1; 16]);
        let vm = VmRef { instance, provider_id: None };
        let refused = faulty.balancers().unwrap().lb_register(permit(), &lb, &vm).await.unwrap_err();
        assert_eq!((refused.class, refused.landed), (ErrorClass::Capacity, Landed::Maybe));
        assert_eq!(fake.members(&lb.key).len(), 1);
        let read = faulty.probe().await.unwrap_err();
        assert_eq!((read.class, read.landed), (ErrorClass::Capacity, Landed::No));
    }

    #[tokio::test(start_paused = true)]
    async fn a_frozen_provider_answers_when_it_thaws() {
        let (_, faulty) = faulty(1, Faults::default());
        faulty.freeze(true);
        let mut call = std::pin::pin!(faulty.probe());
        assert!(tokio::time::timeout(Duration::from_secs(3600), &mut call).await.is_err());
        faulty.freeze(false);
        assert_eq!(call.await, Ok(()));
    }
}
