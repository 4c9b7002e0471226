//! Drains: every instance that a shard wants to delete has its Node emptied first.
//!
//! One key of the queue per instance. A look at a drain makes as many steps as it can without waiting, and says when to look
//! again, so a blocked drain holds no worker. What was decided is on the Node; see [`crate::decide::drain`].

mod effects;

mod listing;

mod metrics;

pub(super) use self::listing::pods_of;

mod reports;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use nstance_rt::{entropy::SystemEntropy, tasks::Tasks};

pub use self::metrics::DrainMetrics;
use self::reports::Reported;
use super::{
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachine, NstanceMachinePool,
        capi::{Machine, Meta as _},
        names::annotation,
    },
    decide::{
        drain::{
            self, DrainRequest, DrainView, Hooks, Listing, Memory, NodeView, Step, Waiting, mark,
            places::{self, Place, Standing},
            report::{self, Progress},
        },
        node_match::{self, NodeMatch},
        observed::{Drain, Instance},
        pods::PodPlan,
        scope::Scope,
    },
    ports::{ObjectRef, ShardChange, WishKey, kinds},
};

/// The wish that acknowledges a drain is known by this topic and the id of the instance.
pub const TOPIC: &str = "drained";

/// More steps than any drain needs in a row.
const MAX_STEPS: usize = 12;
const MIN_WORKERS: usize = 8;
/// After a failed write.
const RETRY: Duration = Duration::from_secs(1);
/// How often a drain is looked at that may not act.
const IDLE: Duration = Duration::from_secs(10);

/// Puts drains into their queue whenever something about them changes.
pub fn connect(ctx: &Arc<Context>) {
    let weak = Arc::downgrade(ctx);
    ctx.shards.on_change(Box::new(move |change: &ShardChange| {
        let Some(ctx) = weak.upgrade() else { return };
        let queue = &ctx.queues.drains;
        for it in &change.instances {
            let drains = |it: &Option<Arc<Instance>>| it.as_ref().is_some_and(|it| it.drain.is_some());
            if drains(&it.old) || drains(&it.new) {
                queue.add(it.id.clone());
            }
        }
        for key in change.answered.iter().filter(|it| it.topic == TOPIC) {
            queue.add(key.object.name.clone());
        }
        if change.reach {
            let picture = ctx.shards.view(&change.shard).and_then(|it| it.picture);
            let instances = picture.iter().flat_map(|it| it.instances.values());
            instances.filter(|it| it.drain.is_some()).for_each(|it| queue.add(it.id.clone()));
            let nodes = ctx.workload.nodes.all();
            nodes.iter().filter_map(|it| mark::marked_instance(it)).for_each(|it| queue.add(it.to_owned()));
        }
    }));
    let queue = ctx.queues.drains.clone();
    ctx.workload.nodes.on_change(move |change| {
        for node in [change.old, change.new].into_iter().flatten() {
            if let Some(id) = mark::marked_instance(node) {
                queue.add(id.to_owned());
            }
        }
        if let (None, Some(node)) = (change.old, change.new)
            && let Some(id) = node_match::instance_label(node)
        {
            queue.add(id.to_owned());
        }
    });
}

/// Starts the workers.
pub fn start(tasks: &Tasks, ctx: &Arc<Context>) {
    start_measured(tasks, ctx, Arc::new(queue::NoMetrics));
}

/// Starts the workers, and tells what they do.
pub fn start_measured(tasks: &Tasks, ctx: &Arc<Context>, metrics: Arc<dyn DrainMetrics>) {
    let of_queue: Arc<dyn queue::QueueMetrics> = metrics.clone();
    let drains = Drains::new(ctx.clone(), metrics);
    // More workers than places: a slow answer to one drain must not hold the others.
    let n_workers = ctx.settings.drain_concurrency.max(MIN_WORKERS);
    queue::start(tasks, &ctx.queues.drains, n_workers, &of_queue, move |id| {
        let drains = drains.clone();
        async move { drains.reconcile(&id).await }
    });
}

/// One open drain, as far as it is not on the Node.
#[derive(Default)]
struct Open {
    memory: Memory,
    place: Option<Place>,
    reported: Option<Reported>,
}

/// All open drains.
pub struct Drains {
    ctx: Arc<Context>,
    entropy: SystemEntropy,
    open: Mutex<BTreeMap<String, Open>>,
    metrics: Arc<dyn DrainMetrics>,
}

/// The objects of an instance whose drain is looked at.
struct Subject {
    id: String,
    shard: String,
    instance: Arc<Instance>,
    nstance_machine: Option<Arc<NstanceMachine>>,
    machine: Option<Arc<Machine>>,
    pool: Option<Arc<NstanceMachinePool>>,
}

/// Where a look at a drain ended.
struct Outcome {
    next: Next,
    progress: Option<Progress>,
    standing: Option<Standing>,
}

impl Outcome {
    fn wait(why: Waiting, after: Duration) -> Self {
        let standing = match why {
            Waiting::ForPlace => Some(Standing::Waiting),
            Waiting::ForList(_) | Waiting::Volumes(_) | Waiting::PreTerminateHooks(_) => Some(Standing::Blocked),
            _ => None,
        };
        Self { next: Next::After(after), progress: Some(Progress::Waiting(why)), standing }
    }

    /// Something was not written, or is out of date. `has_turn`: it need not wait for its turn again.
    fn retry(has_turn: bool) -> Self {
        Self { next: Next::After(RETRY), progress: None, standing: has_turn.then_some(Standing::Blocked) }
    }
}

/// Where an instance is, as far as the shards tell.
enum Found {
    At(String, Arc<Instance>),
    /// Every shard has a picture, and none has it.
    Nowhere,
    Unknown,
}

impl Drains {
    pub fn new(ctx: Arc<Context>, metrics: Arc<dyn DrainMetrics>) -> Arc<Self> {
        Arc::new(Self { ctx, entropy: SystemEntropy::new(), open: Mutex::default(), metrics })
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<String, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all steps of a drain that can be made now.
    pub async fn reconcile(&self, id: &str) -> Result<Next, Infallible> {
        let (shard, instance) = match self.find(id) {
            Found::At(shard, instance) => (shard, instance),
            Found::Unknown => {
                self.leave_turn(id);
                return Ok(Next::After(IDLE));
            }
            Found::Nowhere => {
                self.close(id, None).await;
                return Ok(Next::Wait);
            }
        };
        let subject = self.subject(id, shard, instance);
        if !self.may_act(&subject) {
            self.leave_turn(id);
            return Ok(Next::After(IDLE));
        }
        let drain = subject.instance.drain.clone().unwrap_or_default();
        let mut memory = self.open().get(id).map(|it| it.memory.clone()).unwrap_or_default();
        if subject.instance.drain.is_some() {
            memory.turn_to(&drain.id);
        }
        let mut blocked = Vec::new();
        let outcome = self.make_steps(&subject, &drain, &mut memory, &mut blocked).await;
        let Some(outcome) = outcome else {
            let is_refused = memory.answer_to(&drain.id).is_some() && subject.instance.drain.is_some();
            self.close(id, Some(&subject)).await;
            if is_refused {
                // The picture is behind: it still shows the drain that the shard called off.
                self.open().entry(id.to_owned()).or_default().memory = memory;
            }
            return Ok(Next::Wait);
        };
        if let Some(Progress::Waiting(why)) = &outcome.progress {
            blocked.extend(report::blocked_waiting(why));
        }
        {
            let mut open = self.open();
            let entry = open.entry(id.to_owned()).or_default();
            entry.place = outcome.standing.map(|standing| Place { standing, deadline: drain.delete_at });
            entry.memory = memory.clone();
        }
        self.wake_next();
        self.count_open();
        let report_after = match &outcome.progress {
            Some(progress) => self.report(&subject, &drain, progress, &memory, &blocked).await,
            None => None,
        };
        Ok(match (outcome.next, report_after) {
            (Next::After(a), Some(b)) => Next::After(a.min(b)),
            (Next::Wait, Some(b)) => Next::After(b),
            (next, None) => next,
        })
    }

    fn find(&self, id: &str) -> Found {
        let views = self.ctx.shards.views();
        for view in &views {
            if let Some(instance) = view.picture.as_ref().and_then(|it| it.instances.get(id)) {
                return Found::At(view.name.clone(), instance.clone());
            }
        }
        if views.iter().all(|it| it.picture.is_some()) { Found::Nowhere } else { Found::Unknown }
    }

    fn subject(&self, id: &str, shard: String, instance: Arc<Instance>) -> Subject {
        let stores = &self.ctx.stores;
        let namespace = &self.ctx.settings.namespace;
        let is_ours = |it: &NstanceMachine| it.spec.instance_id.as_deref() == Some(id);
        let by_name = stores.nstance_machines.named(namespace, id).filter(|it| is_ours(it));
        let nstance_machine = by_name.or_else(|| stores.nstance_machines.filter(is_ours).into_iter().next());
        let owner = nstance_machine.as_ref().and_then(|it| {
            let owners = it.metadata.owner_references.as_ref()?;
            owners.iter().find(|it| it.kind == kinds::MACHINE.kind).map(|it| it.name.clone())
        });
        let owner = owner.or_else(|| nstance_machine.as_ref()?.metadata.name.clone());
        let machine = owner.and_then(|name| stores.machines.named(namespace, &name));
        let pool = stores.pools.filter(|it| it.spec.group == instance.group).into_iter().next();
        Subject { id: id.to_owned(), shard, instance, nstance_machine, machine, pool }
    }

    fn may_act(&self, subject: &Subject) -> bool {
        let machine = subject.nstance_machine.as_ref().map(|it| self.ctx.scope(&**it));
        let pool = subject.pool.as_ref().filter(|_| !subject.instance.on_demand).map(|it| self.ctx.scope(&**it));
        match (machine, pool) {
            (None, None) => self.ctx.scope(&NstanceMachine::default()) == Scope::Act,
            (machine, pool) => [machine, pool].into_iter().flatten().all(|it| it == Scope::Act),
        }
    }

    fn ack_key(&self, id: &str) -> WishKey {
        WishKey { object: ObjectRef::new(kinds::NSTANCE_MACHINE, &self.ctx.settings.namespace, id), topic: TOPIC }
    }

    /// What the workload cluster shows. A Node that was just patched is newer than the store.
    fn node_view(&self, instance: &Instance, patched: Option<&Arc<Node>>) -> Option<NodeView> {
        self.ctx.workload.api()?;
        let mut nodes = self.ctx.workload.nodes.all();
        if let Some(patched) = patched {
            for node in &mut nodes {
                if node.metadata.uid == patched.metadata.uid {
                    *node = patched.clone();
                }
            }
        }
        let matched = node_match::node_of(instance, &nodes);
        let marked = nodes.into_iter().find(|it| mark::marked_instance(it) == Some(&instance.id));
        Some(NodeView { matched, marked })
    }

    /// `None`: there is nothing to do for this instance any more.
    async fn make_steps(
        &self,
        subject: &Subject,
        drain: &Drain,
        memory: &mut Memory,
        blocked: &mut Vec<String>,
    ) -> Option<Outcome> {
        let hooks = hooks_of(subject.machine.as_deref());
        let force_before = self.force_before(subject);
        let (mut pods, mut volumes) = (Listing::<PodPlan>::NotRead, Listing::NotRead);
        let mut patched: Option<Arc<Node>> = None;
        let mut may_evict = false;
        for _ in 0..MAX_STEPS {
            let view = DrainView {
                now: self.ctx.now(),
                instance_id: &subject.id,
                request: DrainRequest::of(&subject.instance),
                nodes: self.node_view(&subject.instance, patched.as_ref()),
                hooks: &hooks,
                may_evict,
                force_before,
                pods: pods.clone(),
                volumes: volumes.clone(),
            };
            let now = view.now;
            let step = drain::next_step(&view, memory);
            let Some(api) = self.ctx.workload.api() else {
                return Some(Outcome::wait(Waiting::ForNodes, IDLE));
            };
            match step {
                Step::Over => return None,
                Step::Wait { why: Waiting::ForPlace, .. } if self.take_turn(&subject.id, drain.delete_at) => {
                    may_evict = true;
                }
                Step::Wait { why, after } => {
                    if let Waiting::Ambiguous(nodes) = &why {
                        self.tell_ambiguous(subject, nodes);
                    }
                    return Some(Outcome::wait(why, after));
                }
                Step::ListNodes => match listing::nodes(&*api).await {
                    Ok(nodes) => {
                        let is_absent = node_match::node_of(&subject.instance, &nodes) == NodeMatch::None;
                        memory.nodes_listed(!is_absent, now);
                        if !is_absent {
                            // The store does not have it yet.
                            return Some(Outcome::wait(Waiting::ForNodes, RETRY));
                        }
                    }
                    Err(why) => return Some(Outcome::wait(Waiting::ForList(why), 2 * RETRY)),
                },
                Step::ListPods { node } => {
                    pods = self.list_pods(&*api, subject, &node).await;
                    if let Listing::Read(plan) = &pods {
                        memory.pods_listed(plan, now);
                    }
                }
                Step::ListVolumes { node } => {
                    let plan = if let Listing::Read(plan) = &pods { plan.clone() } else { PodPlan::default() };
                    volumes = listing::volumes(&*api, &node, &plan.skipped_claims).await;
                }
                Step::Mark { node, patch, state, is_new, is_change } => {
                    let Some(node) = self.patch_node(&*api, &node, &patch).await else {
                        return Some(Outcome::retry(may_evict));
                    };
                    patched = Some(node);
                    self.tell_mark(subject, drain, memory, state, is_new, is_change);
                }
                Step::Unmark { node, patch } => {
                    let Some(clean) = self.patch_node(&*api, &node, &patch).await else {
                        return Some(Outcome::retry(may_evict));
                    };
                    patched = Some(clean);
                    self.tell_cancelled(subject, &node);
                }
                Step::Evict { calls, after } => {
                    self.evict(&*api, subject, calls, memory).await;
                    let Listing::Read(plan) = &pods else { return Some(Outcome::retry(may_evict)) };
                    *blocked = report::blocked_pods(plan, memory);
                    let is_moving = memory.is_moving(plan, self.ctx.now());
                    let standing = Some(if is_moving { Standing::Active } else { Standing::Blocked });
                    return Some(Outcome { next: Next::After(after), progress: Some(Progress::Draining), standing });
                }
                Step::Acknowledge(completion) => {
                    if let Some(outcome) = self.acknowledge(subject, drain, completion, memory) {
                        return Some(outcome);
                    }
                }
            }
        }
        Some(Outcome::retry(may_evict))
    }

    /// How long before the deadline blocked pods are deleted, if the pool says so.
    fn force_before(&self, subject: &Subject) -> Option<Duration> {
        let text = subject.pool.as_ref()?.annotation(annotation::DRAIN_FORCE_BEFORE)?;
        let parsed = parse_duration(text);
        if parsed.is_none() {
            self.tell_bad_annotation(subject, text);
        }
        parsed
    }

    /// Takes a place if it is this drain's turn.
    fn take_turn(&self, id: &str, deadline: Option<Timestamp>) -> bool {
        let mut open = self.open();
        let entry = open.entry(id.to_owned()).or_default();
        if entry.place.is_some_and(|it| it.standing != Standing::Waiting) {
            return true;
        }
        entry.place = Some(Place { standing: Standing::Waiting, deadline });
        let all = open.iter().filter_map(|(id, it)| Some((id.clone(), it.place?))).collect();
        let is_next = places::next_turns(&all, self.ctx.settings.drain_concurrency).iter().any(|it| it == id);
        if is_next && let Some(entry) = open.get_mut(id) {
            entry.place = Some(Place { standing: Standing::Active, deadline });
        }
        is_next
    }

    /// A drain that may not go on does not keep others from their turn.
    fn leave_turn(&self, id: &str) {
        if let Some(open) = self.open().get_mut(id) {
            open.place = None;
        }
        self.wake_next();
    }

    /// Wakes the drains whose turn it has become.
    fn wake_next(&self) {
        let all = self.open().iter().filter_map(|(id, it)| Some((id.clone(), it.place?))).collect();
        for id in places::next_turns(&all, self.ctx.settings.drain_concurrency) {
            self.ctx.queues.drains.add_after(id, Duration::ZERO);
        }
    }

    /// Forgets a drain that is over, and what was reported of it.
    async fn close(&self, id: &str, subject: Option<&Subject>) {
        let closed = self.open().remove(id);
        if let Some(subject) = subject {
            self.ctx.shards.withdraw(&subject.shard, &self.ack_key(id));
            self.report_nothing(subject).await;
        } else {
            for shard in self.ctx.shards.names() {
                self.ctx.shards.withdraw(&shard, &self.ack_key(id));
            }
        }
        if closed.is_some() {
            self.wake_next();
            self.count_open();
        }
    }
}

/// Hooks of others on the Machine.
fn hooks_of(machine: Option<&Machine>) -> Hooks {
    let mut hooks = Hooks::default();
    let annotations = machine.and_then(|it| it.metadata.annotations.as_ref());
    for key in annotations.into_iter().flat_map(BTreeMap::keys) {
        if key.starts_with(annotation::PRE_DRAIN_HOOK_PREFIX) && key != annotation::PRE_DRAIN_HOOK {
            hooks.pre_drain.push(key.clone());
        } else if key.starts_with(annotation::PRE_TERMINATE_HOOK_PREFIX) {
            hooks.pre_terminate.push(key.clone());
        }
    }
    hooks
}

/// `15s`, `2m`, `1m30s`, `1h`, as Go writes durations, in whole units.
fn parse_duration(text: &str) -> Option<Duration> {
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let n_digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let n: u64 = rest.get(..n_digits)?.parse().ok()?;
        rest = rest.get(n_digits..)?;
        let n_unit = rest.bytes().take_while(|it| !it.is_ascii_digit()).count();
        let unit = match rest.get(..n_unit)? {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3600),
            _ => return None,
        };
        total = total.checked_add(unit.checked_mul(u32::try_from(n).ok()?)?)?;
        rest = rest.get(n_unit..)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests;
