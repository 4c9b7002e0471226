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
    ids::{InstanceId, LbKey},
    ports::{
        clock::Entropy,
        provider::{
            Capabilities, DeleteHow, Described, ErrorClass, ImageQuery, InstanceType, LbMember, LeaderNetwork, Listing,
            Provider, ProviderError, SubnetFree, Vm, VmRef, VmSpec,
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
        let refused = faults.refuse.iter().find(|(_, odds)| falls(**odds)).map(|(class, _)| *class);
        match refused {
            Some(class) if class != ErrorClass::NotFound => (delay, Fate::Refused(class)),
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
        };
        self.thawed().await;
        answer
    }
}

#[async_trait]
impl Provider for FaultyProvider {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn check(&self) -> Vec<ProviderError> {
        match self.pass("check", Kind::Read, async { Ok(self.inner.check().await) }).await {
            Ok(problems) => problems,
            Err(error) => vec![error],
        }
    }

    async fn reserve(&self, instance: InstanceId) -> Result<Option<String>, ProviderError> {
        self.inner.reserve(instance).await
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

    async fn resolve_image(&self, query: &ImageQuery) -> Result<Option<String>, ProviderError> {
        self.pass("resolve_image", Kind::Read, self.inner.resolve_image(query)).await
    }

    async fn lb_register(&self, permit: Permit, lb: &LbKey, vm: &VmRef) -> Result<(), ProviderError> {
        self.pass("lb_register", Kind::Effect, self.inner.lb_register(permit, lb, vm)).await
    }

    async fn lb_deregister(&self, permit: Permit, lb: &LbKey, vm: &VmRef) -> Result<(), ProviderError> {
        self.pass("lb_deregister", Kind::Effect, self.inner.lb_deregister(permit, lb, vm)).await
    }

    async fn lb_members(&self, lb: &LbKey) -> Result<BTreeMap<InstanceId, LbMember>, ProviderError> {
        self.pass("lb_members", Kind::Read, self.inner.lb_members(lb)).await
    }

    async fn self_id(&self) -> Option<String> {
        self.inner.self_id().await
    }

    async fn net_holder(&self, network: &LeaderNetwork) -> Result<Option<String>, ProviderError> {
        self.pass("net_holder", Kind::Read, self.inner.net_holder(network)).await
    }

    async fn net_assign(
        &self,
        permit: Permit,
        network: &LeaderNetwork,
        previous: Option<&str>,
    ) -> Result<(), ProviderError> {
        self.pass("net_assign", Kind::Effect, self.inner.net_assign(permit, network, previous)).await
    }

    async fn net_release(&self, network: &LeaderNetwork) -> Result<(), ProviderError> {
        self.pass("net_release", Kind::Effect, self.inner.net_release(network)).await
    }

    fn k8s_provider_id(&self, vm: &VmRef) -> String {
        self.inner.k8s_provider_id(vm)
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
            let (fake, faulty) = faulty(seed, Faults { delay, lose_before: 200, lose_after: 200, refuse });
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
    async fn a_frozen_provider_answers_when_it_thaws() {
        let (_, faulty) = faulty(1, Faults::default());
        faulty.freeze(true);
        let mut call = std::pin::pin!(faulty.probe());
        assert!(tokio::time::timeout(Duration::from_secs(3600), &mut call).await.is_err());
        faulty.freeze(false);
        assert_eq!(call.await, Ok(()));
    }
}
