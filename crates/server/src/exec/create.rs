//! Making an instance. Where asking twice makes one, the intent and the call start together: no instance waits for a
//! storage round trip that protects nothing. Elsewhere the intent comes first.

use std::{sync::Arc, time::Duration};

use nstance_config::MergedGroup;
use nstance_core::{
    ids::{GroupRef, InstanceId, uuid_v7},
    instance::{
        Addresses, CreateFailure, CreateReason, Instance, NonceFact, OnDemandRequest, Ownership, Phase, ProviderFact,
    },
    plan::Priority,
    ports::{
        clock::random,
        provider::{CreateMode, ErrorClass, Landed, ProviderError, Reservation, ReserveSpec, Vm, VmSpec},
    },
    snapshot::{BlockKind, Busy},
    time::{Mono, Timestamp},
};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::{cas::RecordError, records::Versioned};

use super::{
    ExecError, finish,
    placement::{self, Choice, SPARED},
    refusal::{pair_of, react},
    request::{IMAGES, asked_for, reserve_spec, spec},
};
use crate::{
    events::{Reason, Tell},
    tasks::observe::{observe_call, provider_failed, provider_works},
    term::Term,
    world::{Facts, Pair, State},
};

/// Life of a nonce where registrations are not timed.
const NONCE_LIFE: Duration = Duration::from_secs(3600);

/// Mints the id and counts it at once; everything else happens beside the planner.
pub(super) fn begin(term: &Arc<Term>, group: &GroupRef, reason: CreateReason, priority: Priority) {
    let now = term.now();
    let mut state = term.world.lock();
    let it = state.group(group);
    let Some(merged) = it.merged.clone() else { return };
    let infra_hash = it.infra_hash.clone();
    let runtime_hash = it.runtime_hash.clone();
    let pairs = Pair::of(&merged);
    let pair = match place(&state, &pairs, now) {
        Choice::Go(pair) => pair,
        Choice::Wait { until, why, .. } => {
            state.group(group).wait(BlockKind::NoCapacity, why, now, until);
            drop(state);
            term.wake(group);
            return;
        }
    };
    let it = state.group(group);
    let cause = if reason == CreateReason::Replacement { it.losses.pop_front() } else { None };
    let id = mint(term, &merged, now);
    let instance = Instance { infra_hash, runtime_hash, reason, ..intent(term, &state, &merged, id, pair, now) };
    state.insert(Facts::Intent(instance.clone()), now);
    let Some(entry) = state.entries.get_mut(&id) else { return };
    entry.busy = Some(Busy::Creating);
    let writing = entry.writing.clone();
    drop(state);
    // Nobody else can know the id yet, so the lock is free.
    let Ok(writing) = writing.try_lock_owned() else { return };
    let term = term.clone();
    term.tasks.clone().spawn("create", async move {
        let place = tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return,
            place = term.gate.enter(priority) => place,
        };
        // Boxed: of thousands that wait for their turn none holds the room that a create under way takes.
        Box::pin(make(&term, &instance, &merged, cause, writing)).await;
        drop(place);
        term.wake(&instance.group);
    });
}

fn mint(term: &Term, merged: &MergedGroup, now: Timestamp) -> InstanceId {
    InstanceId::new(merged.kind, uuid_v7(now, random(term.shared.entropy.as_ref())))
}

/// The first facts of an instance. Its hashes and its reason are the caller's to say.
fn intent(term: &Term, state: &State, merged: &MergedGroup, id: InstanceId, pair: Pair, now: Timestamp) -> Instance {
    let applied = term.applied();
    let jti = nstance_identity::nonce::new_jti(term.shared.entropy.as_ref());
    Instance {
        id,
        group: merged.group.clone(),
        cluster: term.shared.cluster.clone(),
        shard: term.shared.shard.clone(),
        epoch: term.epoch(),
        intent_epoch: term.epoch(),
        ownership: Ownership::Managed,
        created_at: now,
        reason: CreateReason::ScaleUp,
        request: None,
        arch: merged.arch.as_str().to_owned(),
        template: merged.template.clone(),
        infra_hash: String::new(),
        runtime_hash: String::new(),
        config_etag: applied.etag.to_string(),
        instance_type: pair.instance_type,
        subnet: pair.subnet,
        image: state.images.ids(&merged.images).map(|ids| ids.join(IMAGES)),
        nonce: NonceFact { jti, expires_at: now.plus(nonce_life(term)), used_at: None },
        provider: ProviderFact { kind: term.shared.provider.kind().to_owned(), ..ProviderFact::default() },
        create_failure: None,
        registration: None,
        cert: None,
        rejoin: None,
        replace: None,
        drain: None,
        delete: None,
        adopted_at: None,
    }
}

fn nonce_life(term: &Term) -> Duration {
    let timeout = term.applied().config.server.garbage_collection.registration_timeout;
    if timeout.is_zero() { NONCE_LIFE } else { timeout }
}

/// The instance as of the end of its reservation: waiting for a place takes nothing from its time to register.
fn reserved(term: &Term, instance: &Instance, reservation: &Reservation) -> Instance {
    let now = term.now();
    let mut it = instance.clone();
    it.provider.reserved_id.clone_from(&reservation.id);
    it.created_at = now;
    it.nonce.expires_at = now.plus(nonce_life(term));
    it
}

/// An on-demand instance on its way into the records.
pub struct OnDemand {
    pub instance: Instance,
    /// Its first try has to wait until then: every choice is used up, and the one it got is free again the soonest.
    pub not_before: Option<Timestamp>,
}

/// The first facts of an on-demand instance, under the caller's id or a new one. `None` if there is no subnet at all.
///
/// It gets one choice of subnet and type for good: its owner knows its id, and the same id with another request would
/// be refused by the very token that keeps a repeat from making two.
pub fn on_demand(
    term: &Term,
    state: &State,
    merged: &MergedGroup,
    id: Option<InstanceId>,
    request: OnDemandRequest,
) -> Option<OnDemand> {
    let now = term.now();
    let (pair, not_before) = match place(state, &Pair::of(merged), now) {
        Choice::Go(pair) => (pair, None),
        Choice::Wait { pair, until, .. } => (pair?, Some(until)),
    };
    let id = id.unwrap_or_else(|| mint(term, merged, now));
    let instance = Instance {
        ownership: Ownership::OnDemand,
        reason: CreateReason::OnDemand,
        infra_hash: merged.infra_hash(),
        runtime_hash: merged.runtime_hash(Some(term.shared.authority.bundle_pem().as_bytes())),
        request: Some(request),
        ..intent(term, state, merged, id, pair, now)
    };
    Some(OnDemand { instance, not_before })
}

/// Where the next instance of a group goes.
pub(super) fn place(state: &State, pairs: &[Pair], now: Timestamp) -> Choice {
    let n_all = u64::try_from(state.entries.len()).unwrap_or(u64::MAX);
    placement::choose(pairs, &state.places, now, |subnet, figure| {
        // Even if all that there is were hidden there would be room: no need to count.
        if SPARED.saturating_add(n_all) < figure.free { 0 } else { state.n_hidden_creates(subnet, figure) }
    })
}

/// Writes the intent, calls the provider, and sorts out what came of both.
async fn make(
    term: &Arc<Term>,
    instance: &Instance,
    merged: &MergedGroup,
    cause: Option<Mono>,
    writing: tokio::sync::OwnedMutexGuard<()>,
) {
    let (group, id) = (&instance.group, instance.id);
    let mode = term.shared.provider.capabilities().create;
    // Held until the create ended, or nothing came of the intent.
    let mut reservation = Reservation::none();
    let mut reserved_instance = None;
    if mode == CreateMode::RecordFirst {
        let wanted = match reserve_spec(term, instance, merged) {
            Ok(wanted) => wanted,
            Err(message) => return drop_unrendered(term, instance, message),
        };
        let answer = tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return,
            answer = term.shared.provider.reserve(&wanted) => answer,
        };
        match answer {
            Ok(held) => reservation = held,
            Err(error) => {
                {
                    let mut state = term.world.lock();
                    state.remove(id);
                    state.group(group).uncount(instance.created_at);
                }
                react(term, instance, &error);
                return;
            }
        }
        let restated = reserved(term, instance, &reservation);
        term.world.lock().restate_intent(restated.clone(), term.now());
        reserved_instance = Some(restated);
    }
    let instance = reserved_instance.as_ref().unwrap_or(instance);
    let spec = match spec(term, instance, merged) {
        Ok(spec) => spec,
        Err(message) => return drop_unrendered(term, instance, message),
    };
    let requested = |at: Timestamp| {
        let message = instance.reason.as_str();
        term.tell(Tell::instance(Reason::InstanceCreateRequested, group, id, message).at(at));
    };
    let (created, recorded) = match mode {
        // Not `try_join`: a dropped call loses its outcome. In this order: the call is what somebody waits for. The
        // intent comes right behind it, and behind the calls of all others that died in the same moment.
        CreateMode::Idempotent => {
            let asked_at = term.now();
            let recorded = async {
                term.calm().await;
                requested(asked_at);
                intend(term, instance).await
            };
            tokio::join!(call(term, &spec, cause), recorded)
        }
        CreateMode::RecordFirst => match intend(term, instance).await {
            Ok(record) => {
                requested(term.now());
                (call(term, &spec, cause).await, Ok(record))
            }
            Err(error) => (Err(CallError::NotSent), Err(error)),
        },
    };
    drop(reservation);
    let durable = match (recorded, &created) {
        (Ok(record), _) => Some(record),
        // Nothing was made and nothing is known to be written: the intent is dropped if the store agrees.
        (Err(error), Err(CallError::NotSent)) => {
            tracing::warn!(%group, instance = %id, error = %Chain(&error), "intent not written");
            forget_unwritten(term, instance).await
        }
        (Err(error), Err(CallError::Provider(failure))) if failure.landed == Landed::No => {
            tracing::warn!(%group, instance = %id, error = %Chain(&error), "intent not written");
            forget_unwritten(term, instance).await
        }
        // A VM exists, or may: its record must come to be. It is findable by its tags should we end before.
        (Err(error), _) => {
            tracing::warn!(%group, instance = %id, error = %Chain(&error), "intent not written yet, tried again");
            insist(term, instance).await
        }
    };
    let Some(durable) = durable else {
        if let Err(CallError::Provider(error)) = &created {
            react(term, instance, error);
        }
        return;
    };
    term.commit(durable);
    // Registration may go on from here; facts are committed one writer at a time.
    drop(writing);
    settle(term, group, id, created).await;
}

/// An instance that cannot be asked for never was: its templates do not render. Its group is held.
fn drop_unrendered(term: &Term, instance: &Instance, message: String) {
    let now = term.now();
    let mut state = term.world.lock();
    state.remove(instance.id);
    let it = state.group(&instance.group);
    it.uncount(instance.created_at);
    it.block(BlockKind::InvalidRequest, message, now, Some(now.plus(INVALID)));
}

/// What became of a create whose intent is durable.
async fn settle(term: &Arc<Term>, group: &GroupRef, id: InstanceId, created: Result<Vm, CallError>) {
    match created {
        Ok(vm) => {
            let now = term.now();
            term.world.lock().observe(id, vm.seen, Some(&vm), now);
            let confirmed = confirm(term, id, &vm, now).await;
            let mut state = term.world.lock();
            if let Some(entry) = state.entries.get_mut(&id) {
                entry.busy = None;
                entry.attempts = 0;
                entry.next_attempt_at = None;
            }
            if let Some(pair) = state.entries.get(&id).map(|entry| pair_of(entry.instance())) {
                state.places.pardon(&pair);
            }
            let managed = state.entries.get(&id).is_some_and(|it| it.instance().ownership == Ownership::Managed);
            let it = state.group(group);
            for kind in [BlockKind::NoCapacity, BlockKind::Quota, BlockKind::ProviderAuth, BlockKind::InvalidRequest] {
                // What its owner asked for may differ from what the group makes: it proves nothing of the group.
                if managed {
                    it.unblock_after_accepted_create(kind);
                }
            }
            drop(state);
            if let Err(error) = confirmed {
                finish(term, group, id, Err(error));
                return;
            }
            let provider_id = vm.vm.provider_id.clone().unwrap_or_default();
            term.tell(
                Tell::instance(Reason::InstanceCreated, group, id, "provider accepted").detail("vm", provider_id),
            );
        }
        Err(CallError::Provider(error)) if error.landed == Landed::No => {
            let now = term.now();
            let instance = { term.world.lock().entries.get(&id).map(|entry| entry.instance().clone()) };
            let on_demand = instance.as_ref().is_some_and(|it| it.ownership == Ownership::OnDemand);
            if on_demand && is_passing(error.class) {
                put_off(term, group, id, &error);
                return;
            }
            let failed = term
                .update(id, |it| {
                    if it.create_failure.is_some() || it.registration.is_some() {
                        return None;
                    }
                    let failure = CreateFailure {
                        at: now,
                        class: error.class.as_str().to_owned(),
                        message: error.message.clone(),
                    };
                    Some(Instance { create_failure: Some(failure), ..it.clone() })
                })
                .await;
            if let Ok(failed) = &failed
                && !on_demand
            {
                term.world.lock().group(group).uncount(failed.created_at);
            }
            if let Some(instance) = &instance {
                react(term, instance, &error);
            }
            finish(term, group, id, failed.map(|_| ()).map_err(ExecError::Update));
        }
        // Sent, or maybe sent: the planner asks to resolve it.
        Err(error) => {
            if let CallError::Provider(error) = &error {
                tracing::warn!(%group, instance = %id, error = %Chain(error), "outcome of the create is unknown");
                provider_failed(term, error);
            }
            term.want_listing();
            ambiguous(term, group, id);
        }
    }
}

/// Trouble of the provider that says nothing against the request. A group makes its next try under a new id; an
/// on-demand instance has the one id its owner knows, so the identical request is sent again.
fn is_passing(class: ErrorClass) -> bool {
    matches!(class, ErrorClass::Throttled | ErrorClass::Unavailable)
}

fn put_off(term: &Arc<Term>, group: &GroupRef, id: InstanceId, error: &ProviderError) {
    tracing::warn!(%group, instance = %id, error = %Chain(error), "on-demand create put off");
    provider_failed(term, error);
    if let Some(entry) = term.world.lock().entries.get_mut(&id) {
        entry.unsent = true;
    }
    ambiguous(term, group, id);
    if let Some(wait) = error.retry_after
        && let Some(entry) = term.world.lock().entries.get_mut(&id)
    {
        entry.next_attempt_at = Some(term.now().plus(wait));
    }
}

fn ambiguous(term: &Arc<Term>, group: &GroupRef, id: InstanceId) {
    const WAITS: [u64; 6] = [1, 2, 4, 8, 15, 30];
    let now = term.now();
    if let Some(entry) = term.world.lock().entries.get_mut(&id) {
        entry.busy = None;
        let at = usize::try_from(entry.attempts).unwrap_or(5).min(5);
        entry.attempts = entry.attempts.saturating_add(1);
        entry.next_attempt_at = Some(now.plus(Duration::from_secs(WAITS[at])));
    }
    term.wake(group);
}

pub(super) async fn confirm(term: &Arc<Term>, id: InstanceId, vm: &Vm, now: Timestamp) -> Result<(), ExecError> {
    term.update(id, |it| {
        if it.provider.confirmed_at.is_some() {
            return None;
        }
        let mut it = it.clone();
        it.provider.id = vm.vm.provider_id.clone();
        it.provider.confirmed_at = Some(now);
        it.provider.addresses = Addresses {
            ip4: vm.ip4.clone(),
            ip6: vm.ip6.clone(),
            hostname: vm.hostname.clone(),
            fqdn: vm.fqdn.clone(),
        };
        Some(it)
    })
    .await?;
    Ok(())
}

/// Runs [`resolve`], whose outcome says itself when it is due again.
pub(super) fn start_resolve(term: &Arc<Term>, group: &GroupRef, id: InstanceId, priority: Priority) {
    if let Some(entry) = term.world.lock().entries.get_mut(&id) {
        entry.busy = Some(if entry.unsent { Busy::Creating } else { Busy::Other });
    }
    let (term, group) = (term.clone(), group.clone());
    term.tasks.clone().spawn("resolve", async move {
        if let Err(error) = resolve(&term, &group, id, priority).await {
            finish(&term, &group, id, Err(error));
        }
        term.wake(&group);
    });
}

/// Finds out what became of a create: asks again with the very same request, which makes the VM or names it. For an
/// on-demand instance this is the first time, too: it is durable before anybody is asked for it.
async fn resolve(term: &Arc<Term>, group: &GroupRef, id: InstanceId, priority: Priority) -> Result<(), ExecError> {
    let (instance, merged, unsent) = {
        let state = term.world.lock();
        let entry = state.entries.get(&id).ok_or(ExecError::Unknown(id))?;
        (entry.instance().clone(), state.groups.get(group).and_then(|it| it.merged.clone()), entry.unsent)
    };
    let merged = match &instance.request {
        Some(request) => asked_for(term, &instance, request),
        None => merged.ok_or_else(|| "its group is gone".to_owned()),
    };
    // Config changed meanwhile, so that the request cannot be built again: only look.
    let changed = || "config changed before it was made; ask for another".to_owned();
    let same = merged.and_then(|it| if it.infra_hash() == instance.infra_hash { Ok(it) } else { Err(changed()) });
    let spec = same.and_then(|merged| spec(term, &instance, &merged));
    let idempotent = term.shared.provider.capabilities().create == CreateMode::Idempotent;
    let expired = instance.nonce.expires_at <= term.now();
    match spec {
        Ok(spec) if (idempotent || unsent) && !expired => {
            let place = tokio::select! {
                biased;
                () = term.tasks.token().cancelled() => return Ok(()),
                place = term.gate.enter(priority) => place,
            };
            let Some((spec, reservation)) = prepare(term, id, spec).await? else { return Ok(()) };
            let created = call(term, &spec, None).await;
            drop(reservation);
            if let Err(CallError::NotSent) = created
                && let Some(entry) = term.world.lock().entries.get_mut(&id)
            {
                entry.unsent = unsent;
            }
            drop(place);
            match created {
                // A refusal is of this try alone: an earlier one may have made the VM all the same. Only that the VM
                // was there and is gone says something of both.
                Err(CallError::Provider(error))
                    if !unsent && error.landed == Landed::No && error.class != ErrorClass::NotFound =>
                {
                    react(term, &instance, &error);
                    look(term, id);
                    ambiguous(term, group, id);
                }
                created => settle(term, group, id, created).await,
            }
        }
        // Nothing was sent and nothing can be: its owner is told, instead of waiting for what never comes.
        Err(message) if unsent => {
            let error = ProviderError::new("create", ErrorClass::Invalid, message);
            settle(term, group, id, Err(CallError::Provider(error))).await;
        }
        _ => {
            look(term, id);
            ambiguous(term, group, id);
        }
    }
    Ok(())
}

/// Has somebody look at a VM now.
fn look(term: &Term, id: InstanceId) {
    let vm = {
        let mut state = term.world.lock();
        state.entries.get_mut(&id).map(|entry| {
            entry.describe.in_flight = true;
            entry.vm_ref()
        })
    };
    term.observer.look(vm.into_iter().collect());
}

/// The last steps before a call. `None` if the instance is not wanted any more: it waited for its turn, and its owner
/// may have deleted it meanwhile.
async fn prepare(
    term: &Arc<Term>,
    id: InstanceId,
    mut request: VmSpec,
) -> Result<Option<(VmSpec, Reservation)>, ExecError> {
    let first = {
        let mut state = term.world.lock();
        let entry = state.entries.get_mut(&id).ok_or(ExecError::Unknown(id))?;
        if entry.phase() != Phase::Pending {
            entry.busy = None;
            return Ok(None);
        }
        entry.unsent
    };
    let record_first = term.shared.provider.capabilities().create == CreateMode::RecordFirst;
    let mut reservation = Reservation::none();
    if first && record_first && request.reserved_id.is_none() {
        let wanted = ReserveSpec {
            instance: id,
            tags: request.tags.clone(),
            instance_type: request.instance_type.clone(),
            subnet: request.subnet.clone(),
            args: request.args.clone(),
        };
        reservation = term.shared.provider.reserve(&wanted).await.map_err(ExecError::Provider)?;
        if reservation.id.is_some() {
            // Its owner knows when it was made: a durable record keeps its creation time and its nonce.
            let reserve = |it: &Instance| {
                let mut it = it.clone();
                it.provider.reserved_id.clone_from(&reservation.id);
                Some(it)
            };
            term.update(id, reserve).await?;
            request.reserved_id.clone_from(&reservation.id);
        }
    }
    if let Some(entry) = term.world.lock().entries.get_mut(&id) {
        entry.unsent = false;
        entry.absent_since = None;
    }
    Ok(Some((request, reservation)))
}

enum CallError {
    /// The guard was closed: nothing was sent.
    NotSent,
    Provider(ProviderError),
}

async fn call(term: &Arc<Term>, spec: &VmSpec, cause: Option<Mono>) -> Result<Vm, CallError> {
    let Ok(permit) = term.guard.permit() else { return Err(CallError::NotSent) };
    let started = term.world.clock().monotonic();
    if let Some(lost) = cause {
        term.rush();
        term.shared.metrics.replacement_start.observe(started.since(lost).as_secs_f64());
    }
    let limit = term.shared.provider.capabilities().deadlines.create;
    let created = match tokio::time::timeout(limit, term.shared.provider.create(permit, spec)).await {
        Ok(created) => created,
        Err(_) => Err(ProviderError::new("create", ErrorClass::Ambiguous, format!("no answer within {limit:?}"))),
    };
    observe_call(term, "create", started, created.as_ref().err());
    if created.is_ok() {
        provider_works(term);
    }
    created.map_err(CallError::Provider)
}

async fn intend(term: &Arc<Term>, instance: &Instance) -> Result<Versioned<Instance>, RecordError> {
    term.shared.records.create_instance(&term.guard, instance).await
}

/// Writes the intent until it is durable or the term ends.
async fn insist(term: &Arc<Term>, instance: &Instance) -> Option<Versioned<Instance>> {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    loop {
        tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return None,
            () = tokio::time::sleep(backoff.next(term.shared.entropy.as_ref())) => {}
        }
        match intend(term, instance).await {
            Ok(record) => return Some(record),
            Err(RecordError::Taken(existing)) => return Some(*existing),
            Err(error @ RecordError::Fenced { .. }) => {
                term.failed(error);
                return None;
            }
            Err(error) => {
                tracing::warn!(instance = %instance.id, error = %Chain(&error), "intent not written yet, tried again");
            }
        }
    }
}

/// Nothing was made. If the intent did not land either, the instance never was; else its record goes on.
async fn forget_unwritten(term: &Arc<Term>, instance: &Instance) -> Option<Versioned<Instance>> {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    loop {
        match term.shared.records.read_instance(&instance.group.tenant, &instance.id).await {
            Ok(Some(record)) => return Some(record),
            Ok(None) => break,
            Err(error) => {
                tracing::warn!(instance = %instance.id, error = %Chain(&error), "intent not looked at, tried again");
            }
        }
        tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => return None,
            () = tokio::time::sleep(backoff.next(term.shared.entropy.as_ref())) => {}
        }
    }
    let now = term.now();
    let mut state = term.world.lock();
    state.remove(instance.id);
    let it = state.group(&instance.group);
    it.uncount(instance.created_at);
    // What kept the intent from being written may still be there.
    let until = now.plus(UNWRITTEN);
    if it.blocks.get(&BlockKind::BackingOff).is_none_or(|block| block.until.is_some_and(|its| its < until)) {
        it.block(BlockKind::BackingOff, "intent of a create was not written", now, Some(until));
    }
    None
}

/// The pause after a create that left no trace.
const UNWRITTEN: Duration = Duration::from_millis(500);

const INVALID: Duration = Duration::from_secs(600);

/// The record of a VM that has none: read from the store if it is there after all, else made from the tags.
pub(super) async fn adopt(term: &Arc<Term>, group: &GroupRef, vm: &Vm) -> Result<Versioned<Instance>, ExecError> {
    let id = vm.vm.instance;
    match term.shared.records.read_instance(&group.tenant, &id).await {
        Ok(Some(record)) => return Ok(record),
        Ok(None) => {}
        Err(error) => return Err(error.into()),
    }
    let now = term.now();
    let Some(tags) = vm.tags.complete() else { return Err(ExecError::Unknown(id)) };
    let (arch, runtime_hash) = {
        let state = term.world.lock();
        let it = state.groups.get(group);
        let arch = it.and_then(|it| it.merged.as_ref()).map(|merged| merged.arch.as_str().to_owned());
        (arch.unwrap_or_default(), it.map(|it| it.runtime_hash.clone()).unwrap_or_default())
    };
    let instance = Instance {
        id,
        group: group.clone(),
        cluster: tags.cluster.clone(),
        shard: tags.shard.clone(),
        epoch: term.epoch(),
        intent_epoch: tags.epoch,
        ownership: if tags.on_demand { Ownership::OnDemand } else { Ownership::Managed },
        created_at: vm.created_at.unwrap_or(now),
        reason: if tags.on_demand { CreateReason::OnDemand } else { CreateReason::ScaleUp },
        request: None,
        arch,
        template: tags.template.clone(),
        infra_hash: tags.infra_hash.clone(),
        runtime_hash,
        config_etag: String::new(),
        instance_type: vm.instance_type.clone(),
        subnet: vm.subnet.clone().unwrap_or_default(),
        image: None,
        // Which nonce it was born with is not known; the first one that names it and is signed by us binds.
        nonce: NonceFact { jti: String::new(), expires_at: now, used_at: None },
        provider: ProviderFact {
            kind: term.shared.provider.kind().to_owned(),
            reserved_id: None,
            id: vm.vm.provider_id.clone(),
            confirmed_at: Some(now),
            addresses: Addresses {
                ip4: vm.ip4.clone(),
                ip6: vm.ip6.clone(),
                hostname: vm.hostname.clone(),
                fqdn: vm.fqdn.clone(),
            },
        },
        create_failure: None,
        registration: None,
        cert: None,
        rejoin: None,
        replace: None,
        drain: None,
        delete: None,
        adopted_at: Some(now),
    };
    match term.shared.records.create_instance(&term.guard, &instance).await {
        Ok(record) => Ok(record),
        Err(RecordError::Taken(existing)) => Ok(*existing),
        Err(error) => Err(ExecError::Update(term.failed(error))),
    }
}
