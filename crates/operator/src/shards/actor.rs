//! One actor per shard: it follows the shard's streams, keeps its picture, and grants wishes. Nothing of it is shared with
//! other shards but the identity.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use k8s_openapi::jiff::Timestamp;
use nstance_client::{
    Connection, Identity, ShardError, Shards, Target, Targets,
    live::{Change, LiveState, LogEntry, ReadStart},
};
use nstance_core::ports::clock::Clock;
use nstance_identity::link::Net;
use nstance_proto::v1::{ListInstancesRequest, WatchRequest};
use nstance_rt::{
    backoff::Backoff,
    entropy::{SystemEntropy, jitter},
    tasks::Tasks,
};
use tokio::{sync::Notify, time::Instant};
use tonic::Code;

use super::{
    calls,
    snapshot::{self, Fault},
    wishes::Wishes,
};
use crate::{
    decide::observed::{Instance, InstanceStatus, Picture, Reach, ShardView},
    metrics::Metrics,
    ports::{InstanceChange, Progress, ShardChange, ShardListener, ShardPort, Wish, WishKey},
};

const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_CALLS: usize = 16;
const RESYNC: Duration = Duration::from_secs(30);
/// A shard that is down for this long is called unreachable, so its objects are looked at once more.
const UNREACHABLE_AFTER: Duration = Duration::from_secs(10);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Changes that are told at once.
const MAX_BATCH: usize = 512;

/// Is told of errors that shards report. It must be quick and must not wait.
pub type FaultListener = Box<dyn Fn(&Fault) + Send + Sync>;

/// What all actors share.
pub struct Common {
    pub identity: Arc<Identity>,
    pub clock: Arc<dyn Clock>,
    pub network: Arc<dyn Net>,
    pub metrics: Arc<Metrics>,
}

/// All configured shards.
pub struct ShardSet {
    common: Common,
    tasks: Tasks,
    /// In the order of the configuration.
    shards: RwLock<Vec<Arc<Shard>>>,
    listeners: RwLock<Vec<ShardListener>>,
    fault_listeners: RwLock<Vec<FaultListener>>,
    refused: Arc<Notify>,
}

struct Shard {
    target: Target,
    scope: Tasks,
    /// For calls; kept open between them.
    connection: Connection,
    known: Mutex<Known>,
    wishes: Mutex<Wishes>,
    /// There may be something new to send.
    wished: Notify,
    /// The streams are to be opened anew.
    reopen: Notify,
}

struct Known {
    reach: Reach,
    picture: Option<Arc<Picture>>,
    live: Option<Arc<LiveState>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ShardSet {
    /// No shard yet: see [`Self::configure`].
    pub fn new(tasks: &Tasks, common: Common) -> Arc<Self> {
        Arc::new(Self {
            common,
            tasks: tasks.clone(),
            shards: RwLock::default(),
            listeners: RwLock::default(),
            fault_listeners: RwLock::default(),
            refused: Arc::new(Notify::new()),
        })
    }

    fn all(&self) -> Vec<Arc<Shard>> {
        self.shards.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn find(&self, name: &str) -> Option<Arc<Shard>> {
        self.all().into_iter().find(|it| it.target.shard == name)
    }

    /// From now on these are the shards. Actors of others end; one whose addresses changed starts anew with what it knew.
    pub fn configure(self: &Arc<Self>, targets: &Targets) {
        let mut told = Vec::new();
        {
            let mut shards = self.shards.write().unwrap_or_else(PoisonError::into_inner);
            let mut old: BTreeMap<String, Arc<Shard>> =
                shards.drain(..).map(|it| (it.target.shard.clone(), it)).collect();
            for target in &targets.0 {
                let known = old.remove(&target.shard);
                if let Some(same) = known.as_ref().filter(|it| it.target == *target) {
                    shards.push(same.clone());
                    continue;
                }
                let shard = self.make(target, known.as_deref());
                told.push(target.shard.clone());
                self.start(&shard);
                shards.push(shard);
            }
            for (name, removed) in old {
                removed.scope.cancel();
                self.common.metrics.shard_is_removed(&name);
                told.push(name);
            }
        }
        for shard in told {
            self.tell(&ShardChange { shard, reach: true, ..ShardChange::default() });
        }
    }

    fn make(&self, target: &Target, before: Option<&Shard>) -> Arc<Shard> {
        let connection = Connection::new(target.clone(), self.common.identity.clone(), CALL_TIMEOUT)
            .with_network(self.common.network.clone())
            .keep_open();
        let (picture, wishes) = match before {
            None => (None, Wishes::default()),
            Some(before) => {
                before.scope.cancel();
                (locked(&before.known).picture.clone(), locked(&before.wishes).moved(Instant::now()))
            }
        };
        Arc::new(Shard {
            target: target.clone(),
            scope: self.tasks.child(),
            connection,
            known: Mutex::new(Known { reach: Reach::Connecting, picture, live: None }),
            wishes: Mutex::new(wishes),
            wished: Notify::new(),
            reopen: Notify::new(),
        })
    }

    fn start(self: &Arc<Self>, shard: &Arc<Shard>) {
        self.common.metrics.shard_is_up(&shard.target.shard, false);
        shard.scope.spawn_droppable("follow a shard", follow(self.clone(), shard.clone()));
        shard.scope.spawn_droppable("grant wishes", grant(self.clone(), shard.clone()));
        shard.scope.spawn_droppable("compare with a shard", resync(shard.clone()));
    }

    /// The identity has another certificate: connections are opened with it, and streams move to them.
    pub fn use_new_certificate(&self) {
        for shard in self.all() {
            shard.connection.forget();
            shard.reopen.notify_one();
        }
    }

    /// Is notified when a shard did not accept our certificate.
    pub fn refused(&self) -> Arc<Notify> {
        self.refused.clone()
    }

    /// The shards that answer, for calls that any of them can serve.
    pub fn ready_targets(&self) -> Targets {
        let is_ready = |it: &Arc<Shard>| locked(&it.known).reach.is_ready();
        Targets(self.all().into_iter().filter(is_ready).map(|it| it.target.clone()).collect())
    }

    pub fn on_fault(&self, listener: FaultListener) {
        self.fault_listeners.write().unwrap_or_else(PoisonError::into_inner).push(listener);
    }

    fn tell(&self, change: &ShardChange) {
        for listener in self.listeners.read().unwrap_or_else(PoisonError::into_inner).iter() {
            listener(change);
        }
    }

    fn tell_fault(&self, fault: &Fault) {
        for listener in self.fault_listeners.read().unwrap_or_else(PoisonError::into_inner).iter() {
            listener(fault);
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_millisecond(self.common.clock.now().as_millis()).unwrap_or_default()
    }
}

impl ShardPort for ShardSet {
    fn names(&self) -> Vec<String> {
        self.all().iter().map(|it| it.target.shard.clone()).collect()
    }

    fn view(&self, shard: &str) -> Option<ShardView> {
        let shard = self.find(shard)?;
        let known = locked(&shard.known);
        let as_of = known.live.as_ref().and_then(|live| live.views().first().and_then(|it| it.as_of));
        Some(ShardView {
            name: shard.target.shard.clone(),
            reach: known.reach.clone(),
            picture: known.picture.clone(),
            last_contact: as_of.and_then(|at| Timestamp::from_millisecond(at.as_millis()).ok()),
        })
    }

    fn ask(&self, shard: &str, key: &WishKey, wish: Wish) -> Progress {
        let Some(shard) = self.find(shard) else { return Progress::NotConfigured };
        let (progress, is_new) = locked(&shard.wishes).ask(key, wish, Instant::now());
        if is_new {
            shard.wished.notify_one();
        }
        progress
    }

    fn withdraw(&self, shard: &str, key: &WishKey) {
        if let Some(shard) = self.find(shard) {
            locked(&shard.wishes).withdraw(key);
        }
    }

    fn on_change(&self, listener: ShardListener) {
        self.listeners.write().unwrap_or_else(PoisonError::into_inner).push(listener);
    }
}

/// Keeps the picture of one shard from its streams. Never ends by itself.
async fn follow(set: Arc<ShardSet>, shard: Arc<Shard>) {
    loop {
        let scope = shard.scope.child();
        let shards = Shards::sharing(Targets(vec![shard.target.clone()]), set.common.identity.clone(), LIST_TIMEOUT)
            .with_network(&set.common.network);
        let live = LiveState::start(&scope, &shards, set.common.clock.clone());
        scope.spawn_droppable("errors of a shard", listen_to_faults(set.clone(), shard.clone()));
        locked(&shard.known).live = Some(live.clone());
        let mut changed = live.subscribe();
        let mut read_up_to = 0;
        let mut unreachable_at: Option<Instant> = None;
        loop {
            read_up_to = read(&set, &shard, &live, read_up_to, &mut unreachable_at);
            let unreachable = async {
                match unreachable_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = shard.reopen.notified() => break,
                ended = changed.changed() => if ended.is_err() { break },
                () = unreachable => {
                    unreachable_at = None;
                    set.tell(&ShardChange { shard: shard.target.shard.clone(), reach: true, ..ShardChange::default() });
                }
            }
        }
        scope.cancel();
    }
}

/// Applies the changes after this number, tells of them, and returns the number of the last.
fn read(set: &ShardSet, shard: &Shard, live: &LiveState, mut number: u64, unreachable_at: &mut Option<Instant>) -> u64 {
    loop {
        let mut told = Told::new(shard);
        match live.changes_after(number, MAX_BATCH) {
            Ok(entries) if entries.is_empty() => return number,
            Ok(entries) => {
                for entry in &entries {
                    number = entry.number;
                    told.apply(set, shard, entry, unreachable_at);
                }
            }
            // Nothing is lost: the full state replaces the missed changes.
            Err(_) => {
                if let ReadStart::FullState(views, last) = live.start_reading(None) {
                    number = last;
                    if let Some(state) = views.first().and_then(|it| it.state.as_ref()) {
                        told.take_picture(shard, snapshot::picture(state));
                    }
                    match views.first().and_then(|it| it.disconnected.as_ref()) {
                        Some(error) => told.go_down(set, shard, error, unreachable_at),
                        None => told.come_back(set, shard, unreachable_at),
                    }
                }
            }
        }
        if let Some(change) = told.finish() {
            set.tell(&change);
        }
    }
}

/// Changes that are told together.
struct Told {
    change: ShardChange,
    groups: BTreeMap<String, ()>,
    instances: BTreeMap<String, InstanceChange>,
}

impl Told {
    fn new(shard: &Shard) -> Self {
        let change = ShardChange { shard: shard.target.shard.clone(), ..ShardChange::default() };
        Self { change, groups: BTreeMap::new(), instances: BTreeMap::new() }
    }

    fn apply(&mut self, set: &ShardSet, shard: &Shard, entry: &LogEntry, unreachable_at: &mut Option<Instant>) {
        match &entry.change {
            Change::Connected(view) => {
                if let Some(state) = &view.state {
                    self.take_picture(shard, snapshot::picture(state));
                }
                self.come_back(set, shard, unreachable_at);
            }
            Change::Disconnected(error) => self.go_down(set, shard, error, unreachable_at),
            Change::Event(_) => {}
            change => {
                let mut known = locked(&shard.known);
                let Some(picture) = &mut known.picture else { return };
                self.apply_to(&shard.target.shard, Arc::make_mut(picture), change);
            }
        }
    }

    fn apply_to(&mut self, shard: &str, picture: &mut Picture, change: &Change) {
        match change {
            Change::Status(status) => {
                let before = (picture.leader.clone(), picture.epoch);
                snapshot::set_status(picture, status);
                self.change.reach |= before != (picture.leader.clone(), picture.epoch);
            }
            Change::Group(group) => {
                let group = snapshot::group(group);
                if picture.groups.get(&group.key).is_none_or(|it| **it != group) {
                    self.groups.insert(group.key.clone(), ());
                    picture.groups.insert(group.key.clone(), Arc::new(group));
                }
            }
            Change::GroupDeleted(key) => {
                if picture.groups.remove(key).is_some() {
                    self.groups.insert(key.clone(), ());
                }
            }
            Change::Instance(instance) => {
                let new = Arc::new(snapshot::instance(shard, instance));
                let old = picture.instances.get(&new.id).cloned();
                if new.status == InstanceStatus::Deleted {
                    picture.instances.remove(&new.id);
                    self.instance(&new.id.clone(), old.or(Some(new)), None);
                } else if old.as_ref() != Some(&new) {
                    picture.instances.insert(new.id.clone(), new.clone());
                    self.instance(&new.id.clone(), old, Some(new));
                }
            }
            Change::Connected(_) | Change::Disconnected(_) | Change::Event(_) => {}
        }
    }

    fn instance(&mut self, id: &str, old: Option<Arc<Instance>>, new: Option<Arc<Instance>>) {
        let change =
            self.instances.entry(id.to_owned()).or_insert(InstanceChange { id: id.to_owned(), old, new: None });
        change.new = new;
    }

    /// A complete snapshot: what it does not name does not exist any more.
    fn take_picture(&mut self, shard: &Shard, new: Picture) {
        let mut known = locked(&shard.known);
        let empty = Arc::default();
        let old = known.picture.as_ref().unwrap_or(&empty);
        let groups = old.groups.keys().chain(new.groups.keys());
        for key in groups.filter(|key| old.groups.get(*key) != new.groups.get(*key)) {
            self.groups.insert(key.clone(), ());
        }
        let ids: Vec<String> = old.instances.keys().chain(new.instances.keys()).cloned().collect();
        for id in ids {
            let (before, after) = (old.instances.get(&id).cloned(), new.instances.get(&id).cloned());
            if before != after {
                self.instance(&id, before, after);
            }
        }
        known.picture = Some(Arc::new(new));
    }

    fn come_back(&mut self, set: &ShardSet, shard: &Shard, unreachable_at: &mut Option<Instant>) {
        locked(&shard.known).reach = Reach::Ready;
        locked(&shard.wishes).come_back(Instant::now());
        shard.wished.notify_one();
        set.common.metrics.shard_is_up(&shard.target.shard, true);
        *unreachable_at = None;
        self.change.reach = true;
    }

    fn go_down(&mut self, set: &ShardSet, shard: &Shard, error: &ShardError, unreachable_at: &mut Option<Instant>) {
        let now = Instant::now();
        let why = error.message.clone();
        {
            let mut known = locked(&shard.known);
            known.reach = match &known.reach {
                Reach::Down { since, .. } => Reach::Down { since: *since, why: why.clone() },
                Reach::Connecting | Reach::Ready => {
                    *unreachable_at = Some(now + UNREACHABLE_AFTER);
                    self.change.reach = true;
                    Reach::Down { since: set.now(), why: why.clone() }
                }
            };
        }
        // The connection for calls goes to the same leader.
        shard.connection.forget();
        locked(&shard.wishes).go_down(&why, now);
        shard.wished.notify_one();
        set.common.metrics.shard_is_up(&shard.target.shard, false);
        if error.code == Code::Unauthenticated && error.reason != "UNTRUSTED_SERVER" || is_revoked(error) {
            set.refused.notify_one();
        }
    }

    fn finish(self) -> Option<ShardChange> {
        let mut change = self.change;
        change.groups = self.groups.into_keys().collect();
        change.instances = self.instances.into_values().collect();
        let is_something = change.reach || !change.groups.is_empty() || !change.instances.is_empty();
        is_something.then_some(change)
    }
}

fn is_revoked(error: &ShardError) -> bool {
    error.code == Code::PermissionDenied && error.reason.contains("REVOKED")
}

/// Sends what is wished for, at most some calls at a time. Never ends by itself.
async fn grant(set: Arc<ShardSet>, shard: Arc<Shard>) {
    let entropy = SystemEntropy::new();
    let name = shard.target.shard.as_str();
    let mut calls = FuturesUnordered::new();
    loop {
        while calls.len() < MAX_CALLS {
            let Some(job) = locked(&shard.wishes).take_due(Instant::now()) else { break };
            let (connection, metrics) = (shard.connection.clone(), set.common.metrics.clone());
            calls.push(async move {
                let began = Instant::now();
                let answer = calls::grant(&connection, job.wish.clone()).await;
                let code = answer.as_ref().err().map_or(Code::Ok, |it| it.code);
                metrics.rpc(connection.shard(), calls::method(&job.wish), code, began.elapsed());
                (job, answer)
            });
        }
        let next = locked(&shard.wishes).next_due().filter(|_| calls.len() < MAX_CALLS);
        let due = async {
            match next {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some((job, answer)) = calls.next() => {
                if let Err(error) = &answer {
                    let (object, reason) = (&job.key.object, error.reason.as_str());
                    tracing::info!(shard = name, %object, %error, reason, "the shard did not do what was asked");
                }
                let is_told = locked(&shard.wishes).finish(&job, answer, Instant::now(), &entropy);
                if is_told {
                    let answered = vec![job.key];
                    set.tell(&ShardChange { shard: name.to_owned(), answered, ..ShardChange::default() });
                }
            }
            () = shard.wished.notified() => {}
            () = due => {}
        }
    }
}

/// Reports the shard's errors. Never ends by itself.
async fn listen_to_faults(set: Arc<ShardSet>, shard: Arc<Shard>) {
    let (mut backoff, entropy) = (Backoff::new(FIRST_WAIT, MAX_WAIT), SystemEntropy::new());
    let mut token = String::new();
    loop {
        if let Err(error) = listen_once(&set, &shard, &mut token, &mut backoff).await {
            tracing::debug!(shard = shard.target.shard, %error, "the stream of errors ended");
        }
        tokio::time::sleep(backoff.next(&entropy)).await;
    }
}

async fn listen_once(
    set: &ShardSet,
    shard: &Shard,
    token: &mut String,
    backoff: &mut Backoff,
) -> Result<(), ShardError> {
    let name = shard.target.shard.as_str();
    let refused = |status: tonic::Status| ShardError::from_status(name, &status);
    let opened = async {
        let mut client = shard.connection.client().await?;
        let request = WatchRequest { resume_token: token.clone() };
        Ok(client.service.watch_errors(request).await.map_err(refused)?.into_inner())
    };
    let timed_out = |_| ShardError::timed_out(name, CALL_TIMEOUT);
    let mut stream = tokio::time::timeout(CALL_TIMEOUT, opened).await.map_err(timed_out).flatten()?;
    backoff.reset();
    while let Some(event) = stream.message().await.map_err(refused)? {
        token.clone_from(&event.resume_token);
        if !event.error.is_empty() {
            set.tell_fault(&snapshot::fault(name, &event));
        }
    }
    Ok(())
}

/// What of an instance is compared with the shard's own list.
#[derive(Clone, PartialEq, Eq)]
struct Facts {
    status: InstanceStatus,
    drain: Option<String>,
    provider_id: Option<String>,
}

impl Facts {
    fn of(it: &Instance) -> Self {
        let drain = it.drain.as_ref().map(|it| it.id.clone());
        Self { status: it.status, drain, provider_id: it.provider_id.clone() }
    }
}

/// Compares the picture with the shard's lists, in case a stream lost something: groups are taken over; if instances
/// differ at two comparisons in a row, the streams are opened anew. Never ends by itself.
async fn resync(shard: Arc<Shard>) {
    let name = shard.target.shard.as_str();
    let connection = shard.connection.clone().with_timeout(LIST_TIMEOUT);
    let mut suspects: BTreeMap<String, Option<Facts>> = BTreeMap::new();
    // Shards are not all asked at one moment.
    tokio::time::sleep(jitter(&SystemEntropy::new(), RESYNC)).await;
    loop {
        tokio::time::sleep(RESYNC).await;
        let live = {
            let known = locked(&shard.known);
            known.live.clone().filter(|_| known.reach.is_ready())
        };
        let Some(live) = live else {
            suspects.clear();
            continue;
        };
        match compare(&shard, &live, &connection).await {
            Ok(found) => {
                let is_lasting = |id: &String, facts: &Option<Facts>| suspects.get(id) == Some(facts);
                if let Some((id, _)) = found.iter().find(|(id, facts)| is_lasting(id, facts)) {
                    tracing::warn!(shard = name, instance = %id, "a stream lost a change; the streams are opened anew");
                    shard.reopen.notify_one();
                    suspects.clear();
                } else {
                    suspects = found;
                }
            }
            Err(error) => tracing::debug!(shard = name, %error, "the picture was not compared"),
        }
    }
}

/// Instances of which the picture says something else than the shard, and has said so since before the shard was asked.
async fn compare(
    shard: &Shard,
    live: &LiveState,
    connection: &Connection,
) -> Result<BTreeMap<String, Option<Facts>>, ShardError> {
    let facts = || -> BTreeMap<String, Facts> {
        let known = locked(&shard.known);
        let instances = known.picture.iter().flat_map(|it| it.instances.values());
        instances.map(|it| (it.id.clone(), Facts::of(it))).collect()
    };
    let request = live.begin_list(&shard.target.shard);
    let call = |mut client: nstance_client::ShardClient| async move { client.service.list_groups(()).await };
    let groups = connection.call(call).await?.into_inner();
    live.merge_groups(request, &groups.groups, &groups.resume_token);
    let before = facts();
    let call = |mut client: nstance_client::ShardClient| async move {
        client.instances(ListInstancesRequest::default()).await
    };
    let listed = connection.call(call).await?;
    let after = facts();
    let listed: BTreeMap<String, Facts> = listed
        .iter()
        .map(|it| snapshot::instance(&shard.target.shard, it))
        .filter(|it| it.status != InstanceStatus::Deleted)
        .map(|it| (it.id.clone(), Facts::of(&it)))
        .collect();
    let ids = before.keys().chain(listed.keys());
    let differs = |id: &&String| before.get(*id) == after.get(*id) && before.get(*id) != listed.get(*id);
    Ok(ids.filter(differs).map(|id| (id.clone(), listed.get(id).cloned())).collect())
}
