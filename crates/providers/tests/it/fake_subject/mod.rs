//! The fake cloud as a subject of the contract suite, bare or behind a bad network.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use async_trait::async_trait;
use nstance_core::{
    ids::InstanceId,
    ports::{
        clock::Clock,
        provider::{ErrorClass, Owner, Provider, Vm},
    },
    time::Timestamp,
};
use nstance_providers::{
    contract::Subject,
    fake::{FakeOptions, FakeProvider, Op, Outcome, Rule, When},
    faulty::{Faults, FaultyProvider},
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

pub(crate) struct FakeSubject {
    fake: FakeProvider,
    clock: Arc<TokioClock>,
    owner: Owner,
    faults: Faults,
    seed: AtomicU64,
}

impl FakeSubject {
    pub(crate) fn behind(options: FakeOptions, faults: Faults, seed: u64) -> Box<dyn Subject> {
        let owner = Owner { cluster: "dev".parse().expect("a cluster"), shard: "dev-1".parse().expect("a shard") };
        let clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_700_000_000_000)));
        let entropy = Arc::new(SeededEntropy::new(seed));
        let fake = FakeProvider::new(owner.clone(), clock.clone(), entropy, options);
        Box::new(Self { fake, clock, owner, faults, seed: AtomicU64::new(seed) })
    }

    fn wrap(&self, fake: FakeProvider) -> Arc<dyn Provider> {
        if self.faults == Faults::default() {
            return Arc::new(fake);
        }
        let entropy = SeededEntropy::new(self.seed.fetch_add(1, Ordering::Relaxed));
        Arc::new(FaultyProvider::new(Arc::new(fake), Arc::new(entropy), self.faults.clone()))
    }
}

#[async_trait]
impl Subject for FakeSubject {
    fn provider(&self) -> Arc<dyn Provider> {
        self.wrap(self.fake.clone())
    }

    fn owner(&self) -> Owner {
        self.owner.clone()
    }

    fn clock(&self) -> Arc<dyn Clock> {
        self.clock.clone()
    }

    fn provider_of(&self, owner: Owner) -> Arc<dyn Provider> {
        self.wrap(self.fake.with_owner(owner))
    }

    fn other_machine(&self) -> Option<Arc<dyn Provider>> {
        Some(self.wrap(self.fake.with_self("fake-other")))
    }

    async fn kill(&self, instance: InstanceId) {
        assert!(self.fake.kill(instance));
    }

    async fn purge(&self, instance: InstanceId) {
        self.fake.purge(instance);
    }

    fn lose_create_answer(&self) -> bool {
        self.fake.script(Rule::once(Op::Create, When::Always, Outcome::LandThenFail(ErrorClass::Ambiguous)));
        true
    }

    fn refuse_creates(&self, class: Option<ErrorClass>) -> bool {
        self.fake.clear_script();
        if let Some(class) = class {
            self.fake.script(Rule::always(Op::Create, When::Always, Outcome::Refuse(class)));
        }
        true
    }

    fn fail_reads(&self, instance: InstanceId, class: Option<ErrorClass>) -> bool {
        self.fake.clear_script();
        if let Some(class) = class {
            self.fake.script(Rule::always(Op::Describe, When::Instance(instance), Outcome::Refuse(class)));
            self.fake.script(Rule::always(Op::List, When::Always, Outcome::Refuse(class)));
        }
        true
    }

    fn silence(&self, vm: &Vm, silent: bool) -> bool {
        let Some(host) = &vm.host else { return false };
        self.fake.host_silent(host, silent);
        true
    }

    fn fail_page(&self, page: Option<usize>) -> bool {
        self.fake.fail_page(page);
        true
    }

    fn add_untagged(&self, provider_id: &str) -> bool {
        self.fake.add_foreign(provider_id, None, None);
        true
    }

    fn register_in_part(&self) -> bool {
        self.fake.script(Rule::once(Op::LbRegister, When::Always, Outcome::LandThenFail(ErrorClass::Unavailable)));
        true
    }
}
