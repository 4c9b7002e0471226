//! CreateInstance: one machine for one caller, outside of every group's count.
//!
//! The record is durable before anybody is asked for a VM, so a lost answer plus a failover cannot make two: whoever
//! asks again, under the same instance id or the same request id, finds the first one. From the record on it is the
//! planner's: it asks to resolve the create, and the executor sends the request that the record holds.
//!
//! A record whose write is unclear is written until it is there. Giving it up could leave a twin behind that a later
//! leader brings to life.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_config::{Code as ProblemCode, MergedGroup, OnDemandLayer, Problem};
use nstance_core::{
    ids::{GroupRef, InstanceId, Tenant},
    instance::{Inherited, Instance, OnDemandRequest, Ownership, Phase},
    ports::objects::{StoreFault, Unavailable},
    snapshot::Busy,
};
use nstance_rt::{backoff::Backoff, chain::Chain};
use nstance_store::cas::{Next, RecordError};
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tonic::Code;

use super::{config::layer, groups::problem, register::stalled};
use crate::{
    events::{Reason, Tell},
    exec::{self, OnDemand},
    grpc::{auth::record_refusal, status::Refusal},
    term::Term,
    world::{Entry, Facts, State},
};

/// Most on-demand instances of a tenant that may have a VM.
const MAX_ON_DEMAND: usize = 1000;

/// CreateInstance, parsed as far as it could be.
pub struct Wish {
    pub tenant: Tenant,
    pub actor: String,
    pub group: Option<GroupRef>,
    pub instance: Option<InstanceId>,
    pub request_id: Option<String>,
    pub layer: OnDemandLayer,
    /// What is wrong with the request so far.
    pub problems: Vec<Problem>,
}

/// The instance of a request, and how far it is.
pub struct Created {
    pub instance: InstanceId,
    pub status: &'static str,
}

pub async fn create(term: &Arc<Term>, wish: Wish) -> Result<Created, Refusal> {
    stalled(term)?;
    let limit = term.applied().config.server.request_timeout;
    let late = |_| {
        let message = "the request is not durable yet; retry with the same instance or request id";
        Err(Refusal::unavailable("STORE_UNAVAILABLE", message))
    };
    tokio::time::timeout(limit, answer(term, &wish)).await.unwrap_or_else(late)
}

async fn answer(term: &Arc<Term>, wish: &Wish) -> Result<Created, Refusal> {
    // Each round that does not answer learned of a write by somebody else; two of them in a row are one too many.
    for _ in 0..3 {
        match begin(term, wish)? {
            Begun::Known(created) => return Ok(created),
            // The same request is being written: its outcome is ours.
            Begun::Writing(writing) => drop(writing.lock().await),
            Begun::New(on_demand, writing) => {
                if let Some(created) = write(term, on_demand, writing, wish.actor.clone()).await? {
                    return Ok(created);
                }
            }
        }
    }
    Err(Refusal::unavailable("NOT_READY", "the instance is changing; retry"))
}

enum Begun {
    Known(Created),
    Writing(Arc<Mutex<()>>),
    New(Box<OnDemand>, OwnedMutexGuard<()>),
}

/// Finds the instance of this request, or takes its place in memory: from there on the same request finds it.
fn begin(term: &Arc<Term>, wish: &Wish) -> Result<Begun, Refusal> {
    if wish.problems.is_empty()
        && let Some(found) = known(&term.world.lock(), wish)?
    {
        return Ok(found);
    }
    let merged = judge(term, wish)?;
    let now = term.now();
    let mut state = term.world.lock();
    // Looked at again, for somebody else may have been here meanwhile.
    if let Some(found) = known(&state, wish)? {
        return Ok(found);
    }
    if MAX_ON_DEMAND <= n_on_demand(&state, &wish.tenant) {
        let message = format!("tenant {} has {MAX_ON_DEMAND} on-demand instances already; delete some", wish.tenant);
        return Err(Refusal::new(Code::ResourceExhausted, "TOO_MANY_ON_DEMAND", message));
    }
    let no_subnet = || Refusal::precondition("NO_SUBNET", format!("subnet pool {} is empty", merged.subnet_pool));
    let made = exec::on_demand(term, &state, &merged, wish.instance, request(wish, &merged)).ok_or_else(no_subnet)?;
    let id = made.instance.id;
    state.insert(Facts::Intent(made.instance.clone()), now);
    let busy = || Refusal::unavailable("NOT_READY", format!("instance {id} is changing; retry"));
    let entry = state.entries.get_mut(&id).ok_or_else(busy)?;
    entry.busy = Some(Busy::Creating);
    // Nobody else can hold it: the entry is new.
    let writing = entry.writing.clone().try_lock_owned().map_err(|_| busy())?;
    Ok(Begun::New(Box::new(made), writing))
}

/// The instance that this request named or made before.
fn known(state: &State, wish: &Wish) -> Result<Option<Begun>, Refusal> {
    let of_request = wish.request_id.as_ref().and_then(|id| state.requests.get(&(wish.tenant.clone(), id.clone())));
    let found = match (wish.instance, of_request) {
        (Some(id), Some(other)) if id != *other => {
            return Err(exists(format!("the request id was used for instance {other} already")));
        }
        (Some(id), _) => id,
        (None, Some(id)) => *id,
        (None, None) => return Ok(None),
    };
    let Some(entry) = state.entries.get(&found) else {
        return if state.purged.contains(&found) { Err(used(found)) } else { Ok(None) };
    };
    let it = entry.instance();
    if it.group.tenant != wish.tenant {
        return Err(exists(format!("instance id {found} is taken")));
    }
    if wish.instance.is_some() {
        if it.phase() == Phase::Deleted {
            return Err(used(found));
        }
        if !is_same(it, wish) {
            return Err(exists(format!("instance {found} exists and was asked for with another request")));
        }
    }
    Ok(Some(match &entry.facts {
        Facts::Intent(_) => Begun::Writing(entry.writing.clone()),
        Facts::Durable(_) => Begun::Known(Created { instance: found, status: it.phase().as_str() }),
    }))
}

fn exists(message: String) -> Refusal {
    Refusal::new(Code::AlreadyExists, "ALREADY_EXISTS", message)
}

fn used(id: InstanceId) -> Refusal {
    Refusal::precondition("ID_USED", format!("instance {id} existed and is gone; ids are never used again"))
}

/// Whether this very instance is asked for. Of one that was adopted by its tags only the group is known.
fn is_same(it: &Instance, wish: &Wish) -> bool {
    if it.ownership != Ownership::OnDemand || Some(&it.group) != wish.group.as_ref() {
        return false;
    }
    let Some(request) = &it.request else { return true };
    let Wish { layer, .. } = wish;
    request.template == layer.template
        && request.instance_type == layer.instance_type
        && request.subnet_pool.as_deref() == layer.subnet_pool.as_ref().map(|pool| pool.as_str())
        && request.vars == layer.vars
}

fn n_on_demand(state: &State, tenant: &Tenant) -> usize {
    let counts = |entry: &Entry| {
        let it = entry.instance();
        it.ownership == Ownership::OnDemand
            && it.group.tenant == *tenant
            && !matches!(it.phase(), Phase::Deleted | Phase::Failed)
    };
    state.entries.values().filter(|entry| counts(entry)).count()
}

/// What the request comes to, or all that is wrong with it.
fn judge(term: &Term, wish: &Wish) -> Result<MergedGroup, Refusal> {
    let mut problems = wish.problems.clone();
    let Some(group) = &wish.group else { return Err(Refusal::bad_request(problems)) };
    let applied = term.applied();
    let file = term.groups.file();
    let is_static = applied.config.groups.contains_key(group);
    let entry = file.as_ref().and_then(|file| file.groups.get(group));
    if !is_static && entry.is_none() {
        if !problems.is_empty() {
            return Err(Refusal::bad_request(problems));
        }
        if file.as_ref().is_some_and(|file| file.deleted.contains_key(group)) {
            let message = format!("group {} is being deleted", group.group);
            return Err(Refusal::precondition("GROUP_DELETING", message));
        }
        term.groups.readable()?;
        return Err(Refusal::not_found(format!("there is no group {}", group.group)));
    }
    let unreadable = |error| Refusal::precondition("GROUPS_UNREADABLE", format!("stored group: {error}"));
    let stored = entry.map(layer).transpose().map_err(unreadable)?;
    match applied.config.on_demand(group, stored.as_ref(), &wish.layer) {
        Ok(merged) => {
            if let Some(id) = wish.instance.filter(|id| id.kind() != merged.kind) {
                let message = format!("its kind is {}, the template's is {}", id.kind(), merged.kind);
                problems.push(problem(ProblemCode::BadValue, "instance_id", message));
            }
            if problems.is_empty() { Ok(merged) } else { Err(Refusal::bad_request(problems)) }
        }
        Err(more) => {
            problems.extend(more);
            Err(Refusal::bad_request(problems))
        }
    }
}

/// The request as it is stored, with what it takes from its group: nobody but the record needs to be asked again.
fn request(wish: &Wish, merged: &MergedGroup) -> OnDemandRequest {
    let OnDemandLayer { template, instance_type, subnet_pool, vars } = wish.layer.clone();
    let inherited = merged.vars.iter().filter(|(name, _)| !vars.contains_key(*name));
    let inherits = Inherited {
        template: Some(merged.template.clone()),
        instance_type: merged.instance_type.clone(),
        subnet_pool: Some(merged.subnet_pool.to_string()),
        vars: inherited.map(|(name, value)| (name.clone(), value.clone())).collect::<BTreeMap<_, _>>(),
    };
    OnDemandRequest {
        request_id: wish.request_id.clone(),
        template,
        instance_type,
        subnet_pool: subnet_pool.map(|pool| pool.to_string()),
        vars,
        by: wish.actor.clone(),
        inherits,
    }
}

/// Makes the record durable. Goes on when the caller hangs up: whoever asks again waits for this very write. `None` if
/// the store had a record of that id which memory had not: the request is to be judged by it.
async fn write(
    term: &Arc<Term>,
    made: Box<OnDemand>,
    writing: OwnedMutexGuard<()>,
    actor: String,
) -> Result<Option<Created>, Refusal> {
    let (answer, answered) = oneshot::channel();
    let term = term.clone();
    term.tasks.clone().spawn("on-demand intent", async move {
        let outcome = commit(&term, &made, actor).await;
        drop(writing);
        // Nobody waits any more: the instance stands all the same.
        let _ = answer.send(outcome);
    });
    let ended = |_| Err(Refusal::unavailable("LEADER_CHANGED", "this server leads no more; retry"));
    answered.await.unwrap_or_else(ended)
}

async fn commit(term: &Arc<Term>, made: &OnDemand, actor: String) -> Result<Option<Created>, Refusal> {
    let OnDemand { instance, not_before } = made;
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(2));
    let record = loop {
        let error = match term.shared.records.create_instance(&term.guard, instance).await {
            Ok(record) => break record,
            Err(RecordError::Taken(existing)) => {
                term.world.lock().remove(instance.id);
                term.commit(*existing);
                return Ok(None);
            }
            Err(error) => error,
        };
        tracing::warn!(group = %instance.group, instance = %instance.id, error = %Chain(&error), "intent not written");
        if error.next() != Next::Retry {
            term.world.lock().remove(instance.id);
            return Err(match &error {
                RecordError::Store(store) if store.fault == StoreFault::Unavailable(Unavailable::Invalid) => {
                    let message = format!("the request cannot be stored: {}", Chain(&error));
                    Refusal::bad_request(vec![problem(ProblemCode::Limit, "config", message)])
                }
                _ => record_refusal(&term.failed(error)),
            });
        }
        tokio::select! {
            biased;
            () = term.tasks.token().cancelled() => {
                return Err(Refusal::unavailable("LEADER_CHANGED", "this server leads no more; retry"));
            }
            () = tokio::time::sleep(backoff.next(term.shared.entropy.as_ref())) => {}
        }
    };
    term.commit(record);
    if let Some(entry) = term.world.lock().entries.get_mut(&instance.id) {
        entry.busy = None;
        entry.unsent = true;
        entry.next_attempt_at = *not_before;
    }
    term.wake(&instance.group);
    let told = Tell::instance(Reason::InstanceCreateRequested, &instance.group, instance.id, instance.reason.as_str());
    term.tell(told.by(actor));
    Ok(Some(Created { instance: instance.id, status: Phase::Pending.as_str() }))
}
