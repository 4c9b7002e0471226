//! The fake cloud as a subject of the contract suite, bare or behind a bad network.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use nstance_core::{
    ids::InstanceId,
    ports::{
        clock::Clock,
        provider::{Ended, ErrorClass, ImageQuery, Landed, Need, Needs, Owner, Provider, ProviderError, Scope, Vm},
    },
    time::Timestamp,
};
use nstance_providers::{
    contract::Subject,
    fake::{FakeOptions, FakeProvider, Op, Outcome, Rule, ShownTags, When},
    faulty::{Faults, FaultyProvider},
    minimal::MinimalProvider,
};
use nstance_rt::{clock::TokioClock, entropy::SeededEntropy};

pub(crate) struct FakeSubject {
    fake: FakeProvider,
    clock: Arc<TokioClock>,
    owner: Owner,
    faults: Faults,
    seed: AtomicU64,
    places: usize,
    is_minimal: bool,
}

impl FakeSubject {
    pub(crate) fn behind(options: FakeOptions, faults: Faults, seed: u64) -> Box<dyn Subject> {
        Box::new(Self::new(options, faults, seed))
    }

    /// Seen through a provider without optional abilities.
    pub(crate) fn minimal(options: FakeOptions, faults: Faults, seed: u64) -> Box<dyn Subject> {
        Box::new(Self { is_minimal: true, ..Self::new(options, faults, seed) })
    }

    fn new(options: FakeOptions, faults: Faults, seed: u64) -> Self {
        let owner = Owner { cluster: "dev".parse().expect("a cluster"), shard: "dev-1".parse().expect("a shard") };
        let clock = Arc::new(TokioClock::starting_at(Timestamp::from_millis(1_700_000_000_000)));
        let entropy = Arc::new(SeededEntropy::new(seed));
        let places = options.places;
        let fake = FakeProvider::new(owner.clone(), clock.clone(), entropy, options);
        Self { fake, clock, owner, faults, seed: AtomicU64::new(seed), places, is_minimal: false }
    }

    fn wrap(&self, fake: FakeProvider) -> Arc<dyn Provider> {
        let provider = self.wrap_in_faults(fake);
        if self.is_minimal { Arc::new(MinimalProvider(provider)) } else { provider }
    }

    fn wrap_in_faults(&self, fake: FakeProvider) -> Arc<dyn Provider> {
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

    fn restarted(&self) -> Arc<dyn Provider> {
        self.wrap(self.fake.restarted())
    }

    fn n_places(&self) -> Option<usize> {
        (0 < self.places && !self.is_minimal).then_some(self.places)
    }

    fn bad_need(&self) -> Option<(Needs, Need)> {
        self.fake.publish_image("al-1", "img-1");
        let query = |name: &str| ImageQuery {
            filters: [("name".to_owned(), vec![name.to_owned()])].into(),
            owners: vec![],
            by_name: false,
            ascending: false,
        };
        let images = [("there".to_owned(), query("al-*")), ("missing".to_owned(), query("bsd-*"))].into();
        Some((Needs { images, ..Needs::default() }, Need::Image("missing".to_owned())))
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

    fn refuse_creates_about(&self, class: ErrorClass, scope: Scope) -> bool {
        let error = ProviderError::new("", class, "scripted").with_scope(scope);
        self.fake.script(Rule::always(Op::Create, When::Always, Outcome::RefuseWith(error)));
        true
    }

    fn land_and_refuse(&self, class: ErrorClass) -> bool {
        let error = ProviderError::new("", class, "scripted").with_landed(Landed::Maybe);
        self.fake.script(Rule::once(Op::Create, When::Always, Outcome::LandThenFailWith(error)));
        true
    }

    fn hide_tags(&self, instance: InstanceId, hidden: bool) -> bool {
        self.fake.show_tags(instance, if hidden { ShownTags::Absent } else { ShownTags::AsTheyAre })
    }

    fn spoil_tags(&self, instance: InstanceId, spoilt: bool) -> bool {
        self.fake.show_tags(instance, if spoilt { ShownTags::Foreign } else { ShownTags::AsTheyAre })
    }

    fn forbid(&self, instance: InstanceId, forbidden: bool) -> bool {
        self.fake.forbid(instance, forbidden)
    }

    fn end(&self, instance: InstanceId, ended: &Ended) -> bool {
        self.fake.end(instance, Duration::from_secs(1), ended)
    }

    fn delay_deletes(&self) -> bool {
        let later = Outcome::LandLater(Duration::from_secs(5));
        self.fake.script(Rule::always(Op::Delete, When::Always, later));
        true
    }

    fn delay_registrations(&self) -> bool {
        self.fake.set_lb_warmup(Duration::from_secs(5));
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
