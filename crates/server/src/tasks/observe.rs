//! Looks at VMs: at once when an agent is lost, again after growing waits, together when many are due.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::InstanceId,
    instance::{Health, Phase, Seen},
    ports::provider::{CreateMode, Described, ErrorClass, ProviderError, VmRef},
    snapshot::{Busy, ProviderView},
    time::Timestamp,
};
use nstance_rt::chain::Chain;
use tokio::sync::{Notify, oneshot};

use crate::{
    events::{Reason, Tell},
    exec,
    metrics::CallLabels,
    term::Term,
    world::{Entry, is_dead},
};

/// Between two probes of a provider that fails.
const PROBE: Duration = Duration::from_secs(2);

/// VMs somebody wants to know about. Asking twice before the look is one look.
#[derive(Default)]
pub struct Observer {
    wanted: Mutex<BTreeMap<InstanceId, Wanted>>,
    wake: Notify,
}

/// A VM to look at, and who waits for the look.
struct Wanted {
    vm: VmRef,
    waiting: Vec<oneshot::Sender<Described>>,
}

impl Observer {
    pub fn look(&self, vms: Vec<VmRef>) {
        if vms.is_empty() {
            return;
        }
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        for vm in vms {
            let waiting = wanted.remove(&vm.instance).map(|it| it.waiting).unwrap_or_default();
            wanted.insert(vm.instance, Wanted { vm, waiting });
        }
        self.wake.notify_one();
    }

    /// Has somebody look for a caller who waits. Resolves with what the provider answered, or that it failed to.
    pub fn ask(&self, vm: VmRef) -> oneshot::Receiver<Described> {
        let (told, looked) = oneshot::channel();
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let it = wanted.entry(vm.instance).or_insert_with(|| Wanted { vm, waiting: Vec::new() });
        it.waiting.push(told);
        self.wake.notify_one();
        looked
    }

    fn take(&self) -> Vec<Wanted> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *wanted).into_values().collect()
    }
}

/// Serves the observer until the term ends. Calls run beside each other: a slow one delays no later look.
pub async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    let batch = term.shared.provider.capabilities().describe_batch.max(1);
    loop {
        let mut wanted = term.observer.take();
        while !wanted.is_empty() {
            let rest = wanted.split_off(wanted.len().min(batch));
            let (vms, waiting): (Vec<_>, Vec<_>) = wanted.into_iter().map(|it| (it.vm, it.waiting)).unzip();
            wanted = rest;
            let term = term.clone();
            let scope = term.tasks.clone();
            scope.spawn_droppable("describe", async move {
                for (answer, waiting) in look(&term, &vms).await.into_iter().zip(waiting) {
                    for told in waiting {
                        // Whoever waited may have given up.
                        let _ = told.send(answer.clone());
                    }
                }
            });
        }
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = term.observer.wake.notified() => {}
        }
    }
}

/// One call for these, whose answers are taken in and handed on.
async fn look(term: &Arc<Term>, vms: &[VmRef]) -> Vec<Described> {
    let (started, asked_at) = (term.world.clock().monotonic(), term.now());
    {
        let state = term.world.lock();
        for vm in vms {
            let first = state
                .entries
                .get(&vm.instance)
                .filter(|entry| entry.describe.tries == 0 && entry.phase() == Phase::Running);
            if let Some(lost) = first.and_then(|entry| entry.link.lost_at_mono) {
                term.shared.metrics.describe_start.observe(started.since(lost).as_secs_f64());
            }
        }
    }
    let limit = term.shared.provider.capabilities().deadlines.other;
    let answers = match tokio::time::timeout(limit, term.shared.provider.describe(vms)).await {
        Ok(answers) => answers,
        Err(_) => {
            let error = ProviderError::new("describe", ErrorClass::Unavailable, "no answer in time");
            vms.iter().map(|_| Described::Unknown(error.clone())).collect()
        }
    };
    let failed = answers.iter().find_map(|answer| match answer {
        Described::Unknown(error) => Some(error.clone()),
        _ => None,
    });
    observe_call(term, "describe", started, failed.as_ref());
    match failed {
        Some(error) => provider_failed(term, &error),
        None => provider_works(term),
    }
    for (vm, answer) in vms.iter().zip(&answers) {
        apply(term, vm.instance, answer, asked_at);
    }
    answers
}

/// One provider call in the histogram.
pub fn observe_call(term: &Term, op: &'static str, started: nstance_core::time::Mono, error: Option<&ProviderError>) {
    let class = error.map_or("ok", |error| error.class.as_str());
    let labels = CallLabels { provider: term.shared.provider.kind(), op, class };
    let seconds = term.world.clock().monotonic().since(started).as_secs_f64();
    term.shared.metrics.provider_seconds.get_or_create(&labels).observe(seconds);
}

/// Takes one answer to a question of `asked_at` in and decides when to look again. It decides nothing else.
fn apply(term: &Arc<Term>, instance: InstanceId, answer: &Described, asked_at: Timestamp) {
    let now = term.now();
    let visibility = term.shared.provider.capabilities().visibility_delay;
    let mut state = term.world.lock();
    let Some(entry) = state.entries.get(&instance) else { return };
    // A caller's look that failed tells nothing: what was seen before stays, with its time, and no plan is made of it.
    if !entry.describe.in_flight && matches!(answer, Described::Unknown(_)) {
        return;
    }
    let never_seen = entry.vm.is_none();
    let is_fresh = is_fresh(entry, asked_at, visibility);
    let (before, phase, group) = (entry.seen, entry.phase(), entry.instance().group.clone());
    let unmade = matches!(answer, Described::NotFound) && never_seen && phase == Phase::Pending && !is_fresh;
    let (seen, vm) = match answer {
        Described::Vm(vm) => (vm.seen, Some(vm.as_ref())),
        // A fresh VM may be invisible to its own provider for a while, even if the provider has shown it before (its
        // answer to the create did): then "not found" is no proof.
        Described::NotFound if is_fresh => (Seen::Unknown, None),
        // Nobody has confirmed that it was ever made, nor seen it: a create may still be on its way.
        Described::NotFound if unmade => (Seen::Unknown, None),
        Described::NotFound => (Seen::Gone, None),
        Described::Unknown(error) => {
            tracing::warn!(%instance, error = %Chain(error), "VM not described");
            (Seen::Unknown, None)
        }
    };
    state.observe(instance, seen, vm, now);
    let health = state.entries.get(&instance).map_or(Health::Starting, |entry| entry.health(&state, now));
    let Some(entry) = state.entries.get_mut(&instance) else { return };
    entry.describe.in_flight = false;
    entry.describe.tries = entry.describe.tries.saturating_add(1);
    let shutting_down = entry
        .link
        .notice
        .as_ref()
        .is_some_and(|notice| notice.action == "shutdown" && now.since(notice.at) < Duration::from_secs(10));
    entry.describe.due = next_look(seen, phase, health, entry.describe.tries, shutting_down, now);
    // A host on its way down was looked at twenty times: whoever comes after that is asked about soon again.
    if entry.describe.due.is_none() || shutting_down {
        entry.describe.tries = 0;
    }
    if unmade && term.shared.provider.capabilities().create == CreateMode::RecordFirst {
        miss(entry, now);
    } else {
        entry.absent_since = None;
    }
    drop(state);
    exec::confirm_shown(term, vm.into_iter().cloned().collect());
    // The worker first: people are told while it plans.
    let died = is_dead(seen) && !is_dead(before);
    if died {
        term.hurry(&group);
    } else {
        term.wake(&group);
    }
    if died && matches!(phase, Phase::Pending | Phase::Provisioning | Phase::Running) {
        exec::died(term, instance);
    }
}

/// Whether the provider may not show the VM yet. By the time of the question: an answer may lie unread for long, on a
/// machine that stood still. And by our own clock, unless the record is old beyond doubt: its times may be another's.
fn is_fresh(entry: &Entry, asked_at: Timestamp, visibility: Duration) -> bool {
    const SKEW: Duration = Duration::from_secs(600);
    let it = entry.instance();
    let registered_at = it.registration.as_ref().map(|registration| registration.at);
    let shown_at = entry.vm.as_ref().and_then(|vm| vm.created_at);
    let made_at = [Some(it.created_at), it.provider.confirmed_at, registered_at, shown_at].into_iter().flatten().max();
    let is_old = made_at.is_some_and(|at| visibility + SKEW <= asked_at.since(at));
    !is_old && asked_at.since(entry.fresh_from) < visibility
}

/// A look found nothing of what was to be made, where asking twice makes two. Nothing at a second look ten seconds
/// later says that no create is on its way: then it is safe to ask again.
fn miss(entry: &mut Entry, now: Timestamp) {
    const APART: Duration = Duration::from_secs(10);
    if matches!(entry.busy, Some(Busy::Creating)) {
        return;
    }
    let again = entry.absent_since.get_or_insert(now).plus(APART);
    if now < again {
        entry.describe.due = entry.describe.due.map(|due| due.min(again)).or(Some(again));
    } else {
        entry.unsent = true;
        entry.next_attempt_at = None;
    }
}

/// When to look again: until proof for what is being deleted, with growing waits for what is lost, soon after a
/// failed look, never for what is fine.
fn next_look(
    seen: Seen,
    phase: Phase,
    health: Health,
    tries: u32,
    shutting_down: bool,
    now: Timestamp,
) -> Option<Timestamp> {
    const WAITS: [u64; 6] = [1, 2, 4, 8, 15, 30];
    let wait = |cap: usize| {
        let at = usize::try_from(tries.saturating_sub(1)).unwrap_or(cap).min(cap);
        Some(now.plus(Duration::from_secs(WAITS[at])))
    };
    match (phase, seen) {
        (Phase::Deleted | Phase::Failed, _) | (_, Seen::Gone) => None,
        (_, Seen::Unknown) => wait(4),
        (Phase::Deleting, _) => wait(5),
        _ if shutting_down => Some(now.plus(Duration::from_millis(500))),
        _ if matches!(health, Health::Lost { .. } | Health::Silent { .. }) => wait(5),
        _ => None,
    }
}

/// Notes that the provider does not serve us, or not so fast. The probe, or time, ends that.
pub fn provider_failed(term: &Arc<Term>, error: &ProviderError) {
    if error.class == ErrorClass::Throttled {
        term.gate.throttled();
    }
    let now = term.now();
    let view = match error.class {
        ErrorClass::Unavailable | ErrorClass::Ambiguous => {
            ProviderView::Unavailable { since: now, message: error.message.clone() }
        }
        ErrorClass::Auth => ProviderView::Unauthorized { since: now, message: error.message.clone() },
        _ => return,
    };
    let began = {
        let mut state = term.world.lock();
        let began = state.provider == ProviderView::Available;
        if began {
            state.provider = view;
        }
        began
    };
    if began {
        let told = Tell::shard(Reason::ProviderFailing, format!("{}", Chain(error)));
        term.tell(told.error(error.class.as_str()).retry_after(PROBE));
        let term = term.clone();
        term.tasks.clone().spawn_droppable("probe", async move { probe(&term).await });
    }
}

/// One cheap call every 2 s until the provider serves us again; then everybody who waited goes on at once.
async fn probe(term: &Arc<Term>) {
    loop {
        tokio::time::sleep(PROBE).await;
        let limit = term.shared.provider.capabilities().deadlines.other;
        if let Ok(Ok(())) = tokio::time::timeout(limit, term.shared.provider.probe()).await {
            provider_works(term);
            return;
        }
    }
}

pub fn provider_works(term: &Arc<Term>) {
    let recovered = {
        let mut state = term.world.lock();
        let failing = state.provider != ProviderView::Available;
        state.provider = ProviderView::Available;
        failing
    };
    if recovered {
        term.tell(Tell::shard(Reason::HoldCleared, "provider answers again"));
        term.want_listing();
        term.wake_all();
    }
}
