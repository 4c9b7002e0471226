//! One term of leadership: everything that lives between taking the lease and losing it.
//!
//! All tasks, timers and queues of a term hang on its scope; when it ends they end, and nothing of it can fire in the
//! next. Whatever changes a record goes through [`Term::update`], and whatever changes the world outside takes a
//! permit of the term's guard.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use nstance_core::{
    ids::{ClusterId, Epoch, GroupRef, InstanceId, ServerId, Shard},
    instance::Instance,
    plan::Plan,
    ports::{
        clock::{Clock, Entropy},
        objects::ObjectStore,
        peers::{Election, PeerRole},
        provider::Provider,
        secrets::Secrets,
    },
    snapshot::Snapshot,
    term::Guard,
    time::Timestamp,
};
use nstance_rt::{chain::Chain, tasks::Tasks};
use nstance_store::{
    cas::{Next, RecordError, Records},
    records::Versioned,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use crate::{
    authority::{Authority, keep::CaSource},
    cache::CacheWriter,
    events::{Events, Reason, Tell},
    grpc::status::spread,
    metrics::{Metrics, hosts::Machines},
    pace::Gate,
    peer::Desk,
    service::{
        certificates::Renewals,
        config::{Applied, InForce, LastGood},
        files::Files,
        groups::Groups,
        operators::Operators,
        refresh::Turn,
    },
    tasks::{
        images::ImageLookups,
        observe::Observer,
        reconcile::{self, Bell},
    },
    vitals::{Role, Vitals},
    watch::{Feed, Watches},
    world::{Facts, World},
};

/// What a server has for its whole life, whether it leads or not.
pub struct Shared {
    pub id: ServerId,
    pub cluster: ClusterId,
    pub shard: Shard,
    pub clock: Arc<dyn Clock>,
    pub entropy: Arc<dyn Entropy>,
    pub store: Arc<dyn ObjectStore>,
    pub secrets: Arc<dyn Secrets>,
    pub records: Records,
    pub provider: Arc<dyn Provider>,
    pub authority: Arc<Authority>,
    /// From where it learns of another CA.
    pub ca_source: CaSource,
    pub metrics: Arc<Metrics>,
    pub vitals: Arc<Vitals>,
    pub events: Arc<Events>,
    pub cache: CacheWriter,
    /// The config in force. It outlives terms: a refresh changes it for the next one too.
    pub config: InForce,
    pub last_good: LastGood,
    pub planner: Planner,
    /// What our peers are told.
    pub desk: Arc<Desk>,
    pub port_offset: u16,
    /// Set when a record of a newer version was met: this server must not lead any more.
    pub too_new: OnceLock<String>,
}

impl Shared {
    /// What we do in the shard's election, for the health port and for our peers.
    pub fn set_role(&self, role: Role, epoch: Epoch) {
        self.vitals.set_role(role, epoch);
        let told = match role {
            Role::Booting | Role::Following => PeerRole::Following,
            Role::Acquiring => PeerRole::Acquiring,
            Role::Leading => PeerRole::Leading,
            Role::Stalled => PeerRole::Stalled,
            Role::Stopping => PeerRole::Stopping,
        };
        self.desk.stand(Election::Shard, |it| it.role = told);
    }

    /// Tells all of something outside of a term.
    pub fn tell(&self, tell: Tell) {
        self.events.tell(self.clock.now(), Epoch(0), tell);
    }
}

/// Decides what to do. There is one, `nstance_core::plan::plan`; a simulation puts a broken one in its place to see
/// whether anybody notices.
pub type Planner = Arc<dyn Fn(&Snapshot, Timestamp) -> Plan + Send + Sync>;

/// Where clients find this shard's leader, as told to new instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advertised {
    pub registration: String,
    pub operator: String,
    pub agent: String,
}

/// Events kept while the lease is in doubt; of more, the oldest go.
const MAX_KEPT: usize = 1024;

/// So long nothing must have been in a hurry before what nobody waits for begins …
const MOMENT: Duration = Duration::from_millis(5);
/// … and so long it waits at most.
const PATIENCE: Duration = Duration::from_millis(50);

pub struct Term {
    pub shared: Arc<Shared>,
    pub guard: Guard,
    pub tasks: Tasks,
    pub world: World,
    pub gate: Gate,
    pub observer: Observer,
    pub renewals: Renewals,
    pub operators: Operators,
    pub images: ImageLookups,
    pub groups: Groups,
    pub files: Files,
    pub refreshing: Turn,
    /// The config this term began with: its ports are bound by it.
    pub began_with: Arc<Applied>,
    pub advertised: Advertised,
    pub watches: Watches,
    bells: Mutex<BTreeMap<GroupRef, Arc<Bell>>>,
    rushed_at: Mutex<Option<Instant>>,
    listing: Arc<Notify>,
    /// What was to be told while the guard was shut.
    kept: Mutex<VecDeque<Tell>>,
    ended: watch::Sender<Option<String>>,
    parting: OnceLock<Duration>,
}

impl Term {
    pub fn new(
        shared: Arc<Shared>,
        guard: Guard,
        tasks: Tasks,
        world: World,
        gate: Gate,
        groups: Groups,
        advertised: Advertised,
    ) -> Arc<Self> {
        let watches = Watches::new(guard.epoch(), &shared.clock);
        // A config that was rejected at the start is news to whoever watches the term.
        for event in shared.events.on_the_way_to(guard.epoch()) {
            watches.tell(&event);
        }
        world.lock().feed = Some(Feed {
            registry: watches.instances.clone(),
            provider: shared.provider.clone(),
            clock: world.clock().clone(),
        });
        let began_with = shared.config.get();
        let metrics = shared.metrics.clone();
        let term = Arc::new(Self {
            shared,
            guard,
            tasks,
            world,
            gate,
            observer: Observer::default(),
            renewals: Renewals::default(),
            operators: Operators::default(),
            images: ImageLookups::default(),
            groups,
            files: Files::default(),
            refreshing: Turn::default(),
            began_with,
            advertised,
            watches,
            bells: Mutex::default(),
            rushed_at: Mutex::default(),
            listing: Arc::default(),
            kept: Mutex::default(),
            ended: watch::Sender::new(None),
            parting: OnceLock::new(),
        });
        let machines: Weak<dyn Machines> = Arc::<Self>::downgrade(&term);
        metrics.hosts.read_from(machines);
        term
    }

    pub fn epoch(&self) -> Epoch {
        self.guard.epoch()
    }

    pub fn now(&self) -> Timestamp {
        self.world.now()
    }

    /// Within which time those who are sent away at the end of the term should go to its successor. Settled with the
    /// first of them, for with each there are fewer left to count.
    pub fn parting(&self) -> Duration {
        *self.parting.get_or_init(|| spread(self.world.lock().n_connected))
    }

    /// The config in force now. Whoever reads several settings that belong together reads them from one copy.
    pub fn applied(&self) -> Arc<Applied> {
        self.shared.config.get()
    }

    /// Tells what happened. While it is in doubt whether we lead, that is kept: a server that slept through its lease
    /// has nothing to say but that it stepped down.
    pub fn tell(&self, tell: Tell) {
        if self.guard.is_open() {
            self.tell_kept();
            self.tell_now(tell);
            return;
        }
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if MAX_KEPT <= kept.len() {
            kept.pop_front();
        }
        kept.push_back(tell.at(self.now()));
    }

    /// Tells what was kept while the lease was in doubt: it is ours.
    pub fn tell_kept(&self) {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        for tell in kept {
            self.tell_now(tell);
        }
    }

    /// Tells of leadership itself, which is told in any case.
    pub fn tell_now(&self, tell: Tell) {
        let event = self.shared.events.tell(self.now(), self.epoch(), tell);
        self.watches.tell(&event);
    }

    /// Wakes a group's worker, which begins with its first wake.
    pub fn wake(self: &Arc<Self>, group: &GroupRef) {
        self.bell(group).ring();
    }

    /// Wakes it at once: a machine is dead, or about to be.
    pub fn hurry(self: &Arc<Self>, group: &GroupRef) {
        self.rush();
        self.bell(group).hurry();
    }

    /// Something is under way that cannot wait.
    pub fn rush(&self) {
        *self.rushed_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Resolves when nothing was in a hurry for a moment, or has been for long. When many machines die at once, the
    /// calls for all their replacements go out before the first write takes the processors from them.
    pub async fn calm(&self) {
        let begin = Instant::now();
        let rushes = || {
            let rushed_at = *self.rushed_at.lock().unwrap_or_else(PoisonError::into_inner);
            rushed_at.is_some_and(|at| at.elapsed() < MOMENT)
        };
        while rushes() && begin.elapsed() < PATIENCE {
            tokio::time::sleep(MOMENT).await;
        }
    }

    fn bell(self: &Arc<Self>, group: &GroupRef) -> Arc<Bell> {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bell) = bells.get(group) {
            return bell.clone();
        }
        let bell = Arc::new(Bell::default());
        bells.insert(group.clone(), bell.clone());
        self.tasks.spawn("reconcile", reconcile::work(self.clone(), group.clone(), bell.clone()));
        bell
    }

    pub fn wake_all(self: &Arc<Self>) {
        for group in self.world.group_refs() {
            self.wake(&group);
        }
    }

    /// Asks for a full listing now.
    pub fn want_listing(&self) {
        self.listing.notify_one();
    }

    pub async fn listing_wanted(&self) {
        self.listing.notified().await;
    }

    /// Ends the term from inside: no effect starts after this.
    pub fn step_down(&self, why: impl Into<String>) {
        let why = why.into();
        self.guard.close();
        self.ended.send_if_modified(|ended| {
            if ended.is_none() {
                tracing::warn!(epoch = %self.epoch(), why, "stepping down");
                *ended = Some(why);
                return true;
            }
            false
        });
    }

    /// Resolves with the reason when the term must end.
    pub async fn ended(&self) -> String {
        let mut ended = self.ended.subscribe();
        loop {
            if let Some(why) = ended.borrow_and_update().clone() {
                return why;
            }
            if ended.changed().await.is_err() {
                return "the term was dropped".to_owned();
            }
        }
    }

    /// Changes an instance's facts: commits first, then memory, then cache, then the group is woken. `change` may run
    /// several times on what it finds; `None` means nothing to change.
    pub async fn update(
        self: &Arc<Self>,
        instance: InstanceId,
        change: impl Fn(&Instance) -> Option<Instance> + Send + Sync,
    ) -> Result<Instance, UpdateError> {
        let writing = {
            let state = self.world.lock();
            state.entries.get(&instance).map(|entry| entry.writing.clone()).ok_or(UpdateError::Unknown(instance))?
        };
        let _one_writer = writing.lock().await;
        let current = {
            let state = self.world.lock();
            match state.entries.get(&instance).map(|entry| &entry.facts) {
                Some(Facts::Durable(record)) => record.clone(),
                Some(Facts::Intent(_)) => return Err(UpdateError::NotDurable(instance)),
                None => return Err(UpdateError::Unknown(instance)),
            }
        };
        let updated = self.shared.records.update_instance(&self.guard, &current, &change).await;
        let record = match updated {
            Ok(record) => record,
            Err(RecordError::Missing { .. }) => self.repair(&current, &change).await?,
            Err(error) => return Err(self.failed(error)),
        };
        Ok(self.commit(record))
    }

    /// The object is gone though we know its content: it is put back, with the change on it.
    async fn repair(
        self: &Arc<Self>,
        current: &Versioned<Instance>,
        change: &(impl Fn(&Instance) -> Option<Instance> + Send + Sync),
    ) -> Result<Versioned<Instance>, UpdateError> {
        let value = change(&current.value).unwrap_or_else(|| current.value.clone());
        let put_back = Versioned { value, ..current.clone() };
        let record =
            self.shared.records.put_back_instance(&self.guard, &put_back).await.map_err(|error| self.failed(error))?;
        let value = &record.value;
        let message = "record was missing from the store and was put back from memory";
        self.tell(Tell::instance(Reason::RecordRepaired, &value.group, value.id, message));
        Ok(record)
    }

    /// Takes a committed record into memory and cache and wakes its group.
    pub fn commit(self: &Arc<Self>, record: Versioned<Instance>) -> Instance {
        let instance = record.value.clone();
        self.shared.cache.put(&record);
        let now = self.now();
        self.world.lock().insert(Facts::Durable(record), now);
        self.wake(&instance.group);
        instance
    }

    /// Ends the term if the error says that somebody else leads, or should.
    pub fn judge(&self, error: &RecordError) {
        if error.next() != Next::StepDown {
            return;
        }
        let why = format!("{}", Chain(error));
        if let RecordError::TooNew { .. } = error {
            // Set already is as good.
            let _ = self.shared.too_new.set(why.clone());
        }
        self.step_down(why);
    }

    /// A record error seen in this term. Meeting a higher epoch means that somebody else leads.
    pub fn failed(&self, error: RecordError) -> UpdateError {
        self.judge(&error);
        UpdateError::Record(error)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    #[error("instance {0} is not known")]
    Unknown(InstanceId),
    #[error("the intent of instance {0} is not durable yet")]
    NotDurable(InstanceId),
    #[error("change the record")]
    Record(#[source] RecordError),
}
