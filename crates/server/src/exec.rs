//! One action, one effect. The planner left no choice; what stands here is the order of writes and calls, and what an
//! outcome means.
//!
//! Every effect asks the guard for a permit right before it starts. An instance is marked busy before its task begins
//! and freed when it ends, so that no plan asks twice for what is under way.

mod balance;
mod create;
mod placement;
mod refusal;
pub(crate) mod request;

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Delete, Drain, DrainReason, Instance, Ownership, Phase, Seen},
    plan::{Action, DeleteReason, Planned},
    ports::provider::{DeleteHow, ProviderError, Vm, VmRef},
    snapshot::{BlockKind, Busy},
    term::LeaseStalled,
};
use nstance_rt::{chain::Chain, entropy::jitter};
use nstance_store::cas::RecordError;

use crate::{
    events::{Reason, Tell},
    tasks::observe::{observe_call, provider_failed},
    term::{Term, UpdateError},
    world::{Entry, Facts, Way},
};

pub use balance::look_at_balancers;
pub use create::{OnDemand, on_demand};

/// Who decided, in facts that name a person or us.
const BY: &str = "planner";

#[derive(Debug, thiserror::Error)]
enum ExecError {
    #[error("change the record")]
    Update(#[from] UpdateError),
    #[error("write the record")]
    Record(#[from] RecordError),
    #[error("act")]
    Stalled(#[from] LeaseStalled),
    #[error("call the provider")]
    Provider(#[source] ProviderError),
    #[error("instance {0} is not known any more")]
    Unknown(InstanceId),
}

/// Starts an action. Returns at once; the outcome arrives as facts and a wake-up.
pub fn start(term: &Arc<Term>, planned: Planned) {
    let Planned { priority, group, action } = planned;
    tracing::debug!(%group, ?priority, ?action, "action");
    match action {
        Action::Create { reason } => create::begin(term, &group, reason, priority),
        Action::ResolveCreate { instance } => create::start_resolve(term, &group, instance, priority),
        Action::StartDrain { instance, reason, delete_at, replacement } => {
            spawn(term, group, instance, move |term, group| async move {
                let now = term.now();
                term.update(instance, |it| {
                    let mut it = it.clone();
                    match &mut it.drain {
                        // Already draining: only an earlier deadline may replace a later one.
                        Some(drain) if drain.cancelled_at.is_none() => {
                            if drain.deadline <= delete_at {
                                return None;
                            }
                            drain.deadline = delete_at;
                        }
                        other => {
                            *other = Some(Drain {
                                reason,
                                started_at: now,
                                deadline: delete_at,
                                replacement,
                                acked_at: None,
                                acked_by: None,
                                cancelled_at: None,
                            });
                        }
                    }
                    Some(it)
                })
                .await?;
                if matches!(
                    reason,
                    DrainReason::ForcedExpiry | DrainReason::EligibleExpiry | DrainReason::OndemandExpiry
                ) {
                    term.tell(Tell::instance(Reason::ExpiryStarted, &group, instance, reason.as_str()));
                }
                let message = format!("drain for {} until {delete_at}", reason.as_str());
                term.tell(Tell::instance(Reason::DrainStarted, &group, instance, message));
                Ok(())
            });
        }
        Action::CancelDrain { instance } => {
            spawn(term, group, instance, move |term, group| async move {
                let now = term.now();
                term.update(instance, |it| {
                    let mut it = it.clone();
                    it.drain.as_mut().filter(|drain| drain.cancelled_at.is_none())?.cancelled_at = Some(now);
                    Some(it)
                })
                .await?;
                term.tell(Tell::instance(Reason::DrainCancelled, &group, instance, "its group needs it again"));
                Ok(())
            });
        }
        Action::Delete { instance, reason } => {
            spawn(
                term,
                group,
                instance,
                move |term, group| async move { delete(&term, &group, instance, reason).await },
            );
        }
        Action::MarkDeleted { instance } => {
            spawn(term, group, instance, move |term, group| async move {
                let now = term.now();
                term.update(instance, |it| {
                    let mut it = it.clone();
                    let delete = it.delete.get_or_insert_with(|| Delete {
                        reason: DeleteReason::Dead.to_string(),
                        by: BY.to_owned(),
                        requested_at: now,
                        gone_at: None,
                    });
                    delete.gone_at.get_or_insert(now);
                    Some(it)
                })
                .await?;
                // From here on its certificate is refused, and what it has open ends.
                if let Some(entry) = term.world.lock().entries.get(&instance) {
                    entry.cut.cancel();
                }
                term.tell(Tell::instance(Reason::InstanceDeleted, &group, instance, "VM is gone"));
                Ok(())
            });
        }
        Action::Forget { instance } => {
            spawn(term, group, instance, move |term, _| async move { forget(&term, instance).await });
        }
        Action::Adopt { vm } => {
            judge(term, group, vm.instance, move |term, group| async move { adopt(&term, &group, vm.instance).await });
        }
        Action::TerminateOrphan { vm } => {
            judge(
                term,
                group,
                vm.instance,
                move |term, group| async move { terminate_orphan(&term, &group, &vm).await },
            );
        }
        Action::LbRegister { lb, instance } => balance::start(term, group, instance, lb, Way::In),
        Action::LbDeregister { lb, instance } => balance::start(term, group, instance, lb, Way::Out),
    }
}

/// Runs an effect on one instance: busy while it runs, a growing wait after a failure.
fn spawn<F, Fut>(term: &Arc<Term>, group: GroupRef, instance: InstanceId, effect: F)
where
    F: FnOnce(Arc<Term>, GroupRef) -> Fut + Send + 'static,
    Fut: Future<Output = Result<(), ExecError>> + Send + 'static,
{
    if let Some(entry) = term.world.lock().entries.get_mut(&instance) {
        entry.busy = Some(Busy::Other);
    }
    let term = term.clone();
    term.tasks.clone().spawn("action", async move {
        term.calm().await;
        let outcome = effect(term.clone(), group.clone()).await;
        if outcome.is_err() {
            // Busy until the next try is due: not every action waits for `next_attempt_at`, and none may spin.
            let attempts = term.world.lock().entries.get(&instance).map_or(0, |entry| entry.attempts);
            pause(&term, retry_wait(&term, attempts + 1)).await;
        }
        finish(&term, &group, instance, outcome);
    });
}

/// Runs the judgement of a VM without a record, once at a time.
fn judge<F, Fut>(term: &Arc<Term>, group: GroupRef, instance: InstanceId, effect: F)
where
    F: FnOnce(Arc<Term>, GroupRef) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    if !term.world.lock().group(&group).judging.insert(instance) {
        return;
    }
    let term = term.clone();
    term.tasks.clone().spawn("judge", async move {
        effect(term.clone(), group.clone()).await;
        term.world.lock().group(&group).judging.remove(&instance);
        term.wake(&group);
    });
}

/// Waits, unless the term ends.
async fn pause(term: &Term, wait: Duration) {
    tokio::select! {
        biased;
        () = term.tasks.token().cancelled() => {}
        () = tokio::time::sleep(wait) => {}
    }
}

fn finish(term: &Arc<Term>, group: &GroupRef, instance: InstanceId, outcome: Result<(), ExecError>) {
    let now = term.now();
    if let Some(entry) = term.world.lock().entries.get_mut(&instance) {
        entry.busy = None;
        match &outcome {
            Ok(()) => entry.attempts = 0,
            Err(_) => {
                entry.attempts = entry.attempts.saturating_add(1);
                entry.next_attempt_at = Some(now.plus(retry_wait(term, entry.attempts)));
            }
        }
    }
    if let Err(error) = outcome {
        tracing::warn!(%group, %instance, error = %Chain(&error), "action failed, it is tried again");
        if let ExecError::Provider(error) = &error {
            provider_failed(term, error);
        }
    }
    term.wake(group);
}

/// 1 s doubling to 60 s, full jitter above the first half second.
fn retry_wait(term: &Term, attempts: u32) -> Duration {
    let bound = Duration::from_secs(1).saturating_mul(2_u32.saturating_pow(attempts.saturating_sub(1)));
    Duration::from_millis(500) + jitter(term.shared.entropy.as_ref(), bound.min(Duration::from_secs(60)))
}

/// VMs were shown whose create nobody answered: their records learn of them, and with that the creates are over. The
/// same request again would say so too, but a successor that listens elsewhere cannot make the same request.
pub fn confirm_shown(term: &Arc<Term>, vms: Vec<Vm>) {
    for vm in vms {
        let id = vm.vm.instance;
        let group = {
            let state = term.world.lock();
            let open = state.entries.get(&id).filter(|entry| is_unconfirmed(entry) && entry.busy.is_none());
            open.map(|entry| entry.instance().group.clone())
        };
        let Some(group) = group else { continue };
        spawn(term, group, id, move |term, group| async move {
            create::confirm(&term, id, &vm, term.now()).await?;
            let provider_id = vm.vm.provider_id.unwrap_or_default();
            let told =
                Tell::instance(Reason::InstanceCreated, &group, id, "provider shows it").detail("vm", provider_id);
            term.tell(told);
            Ok(())
        });
    }
}

/// Its intent is durable, and whether there is a VM the record does not say.
pub fn is_unconfirmed(entry: &Entry) -> bool {
    matches!(entry.facts, Facts::Durable(_))
        && entry.instance().provider.confirmed_at.is_none()
        && matches!(entry.phase(), Phase::Pending | Phase::Provisioning | Phase::Running | Phase::Draining)
}

/// Ends a second VM of an instance: the one that its record names stays, and nobody else's work is on this one.
pub fn end_double(term: &Arc<Term>, vm: Vm) {
    if !matches!(vm.seen, Seen::Pending | Seen::Running | Seen::Stopping | Seen::Stopped | Seen::Suspended) {
        return; // it goes by itself, or nobody knows what it is
    }
    let id = vm.vm.instance;
    let Some(group) = term.world.group_of(id) else { return };
    judge(term, group, id, move |term, group| async move {
        let named = {
            let state = term.world.lock();
            state.entries.get(&id).and_then(|entry| entry.instance().provider.id.clone())
        };
        let double = vm.vm.provider_id.clone().unwrap_or_default();
        // By its own id only: by the instance's name the provider may mean the other one.
        if named.is_none() || double.is_empty() || named.as_ref() == Some(&double) {
            return;
        }
        let ended = async {
            let deleted = term.shared.provider.delete(term.guard.permit()?, &vm.vm, DeleteHow::Now).await;
            deleted.map_err(ExecError::Provider)
        };
        match ended.await {
            Ok(()) => {
                let message =
                    format!("second VM of the instance ended; its record names {}", named.unwrap_or_default());
                term.tell(Tell::instance(Reason::OrphanTerminated, &group, id, message).detail("vm", double));
            }
            Err(error) => {
                tracing::warn!(%group, instance = %id, vm = double, error = %Chain(&error), "second VM not ended, the next listing tries again");
            }
        }
    });
}

/// The provider showed for the first time that a VM does not run any more. Tells why, and counts an end before
/// registration like a refused create.
pub fn died(term: &Arc<Term>, id: InstanceId) {
    let (instance, seen, ended) = {
        let state = term.world.lock();
        let Some(entry) = state.entries.get(&id) else { return };
        (entry.instance().clone(), entry.seen, entry.vm.as_ref().and_then(|vm| vm.ended.clone()))
    };
    if instance.phase() == Phase::Pending && ended.is_none() {
        return; // the planner asks what became of its create
    }
    let mut message = format!("provider shows the VM {}", seen.as_str());
    if let Some(ended) = &ended {
        message = format!("{message}: {}", ended.message);
        if instance.registration.is_none() && instance.delete.is_none() {
            refusal::ended_early(term, &instance, ended);
        }
    }
    term.tell(Tell::instance(Reason::InstanceDead, &instance.group, id, message));
}

/// Writes the durable word first, then asks the provider, then has somebody look until the end is proved.
async fn delete(
    term: &Arc<Term>,
    group: &GroupRef,
    instance: InstanceId,
    reason: DeleteReason,
) -> Result<(), ExecError> {
    let now = term.now();
    let mut began = false;
    let known = { term.world.lock().entries.get(&instance).is_some_and(|entry| entry.instance().delete.is_some()) };
    if !known {
        let updated = term
            .update(instance, |it| {
                if it.delete.is_some()
                    || !is_due(it, reason)
                    || reason == DeleteReason::Dead && !looks_dead(term, it.id)
                {
                    return None;
                }
                let delete = Delete { reason: reason.to_string(), by: BY.to_owned(), requested_at: now, gone_at: None };
                Some(Instance { delete: Some(delete), ..it.clone() })
            })
            .await?;
        if updated.delete.is_none() {
            return Ok(()); // the next plan sees what came between
        }
        began = true;
    }
    if began {
        term.tell(Tell::instance(Reason::InstanceDeleting, group, instance, reason.to_string()));
        if reason == DeleteReason::NeverRegistered {
            never_registered(term, group, instance);
        }
    }
    let vm = {
        let state = term.world.lock();
        state.entries.get(&instance).ok_or(ExecError::Unknown(instance))?.vm_ref()
    };
    // A machine that is dead, or never came to life, has nobody to be graceful to.
    let how = match reason {
        DeleteReason::Dead | DeleteReason::NeverRegistered | DeleteReason::Unresolved => DeleteHow::Now,
        DeleteReason::Drained(_) | DeleteReason::ScaleDown | DeleteReason::GroupDeleted => DeleteHow::Graceful,
    };
    let permit = term.guard.permit()?;
    let started = term.world.clock().monotonic();
    let deleted = term.shared.provider.delete(permit, &vm, how).await;
    observe_call(term, "delete", started, deleted.as_ref().err());
    deleted.map_err(|error| {
        let told = Tell::instance(Reason::DeleteFailing, group, instance, format!("{}", Chain(&error)));
        term.tell(told.error(error.class.as_str()));
        ExecError::Provider(error)
    })?;
    let now = term.now();
    let look = {
        let mut state = term.world.lock();
        let Some(entry) = state.entries.get_mut(&instance) else { return Ok(()) };
        // Asked again only if the proof stays away for long.
        entry.next_attempt_at = Some(now.plus(Duration::from_secs(60)));
        entry.describe.tries = 0;
        entry.describe.due = None;
        entry.describe.in_flight = true;
        entry.vm_ref()
    };
    term.observer.look(vec![look]);
    Ok(())
}

/// Whether the facts still bear a decision that was made on older ones. What was to be deleted because it was not in use
/// may have registered since: then it is drained first.
fn is_due(it: &Instance, reason: DeleteReason) -> bool {
    match reason {
        DeleteReason::Dead => true,
        DeleteReason::Drained(_) => it.open_drain().is_some(),
        DeleteReason::NeverRegistered
        | DeleteReason::Unresolved
        | DeleteReason::ScaleDown
        | DeleteReason::GroupDeleted => it.registration.is_none(),
    }
}

/// Whether the provider's last word on the machine is still one that a plan may take for its death.
fn looks_dead(term: &Term, instance: InstanceId) -> bool {
    let state = term.world.lock();
    let seen = state.entries.get(&instance).map_or(Seen::Gone, |entry| entry.seen);
    !matches!(seen, Seen::NotAsked | Seen::Unknown | Seen::Pending | Seen::Running)
}

/// Machines that come up but never register point to a broken template: after two in a row, creates slow down.
fn never_registered(term: &Arc<Term>, group: &GroupRef, instance: InstanceId) {
    let now = term.now();
    let message = "agent did not register in time; see the instance's console or agent log";
    term.tell(Tell::instance(Reason::InstanceNeverRegistered, group, instance, message));
    let mut state = term.world.lock();
    if state.entries.get(&instance).is_some_and(|entry| entry.instance().ownership == Ownership::OnDemand) {
        return; // it says nothing of what its group makes
    }
    let it = state.group(group);
    it.never_registered_in_a_row += 1;
    let n = it.never_registered_in_a_row;
    if 2 <= n {
        let wait = Duration::from_secs(60).saturating_mul(2_u32.saturating_pow(n - 2)).min(Duration::from_secs(600));
        let message = format!("{n} instances in a row never registered");
        it.block(BlockKind::BackingOff, message, now, Some(now.plus(wait)));
    }
}

async fn forget(term: &Arc<Term>, instance: InstanceId) -> Result<(), ExecError> {
    let (record, vm) = {
        let state = term.world.lock();
        let entry = state.entries.get(&instance).ok_or(ExecError::Unknown(instance))?;
        (entry.instance().clone(), entry.vm_ref())
    };
    let cleaned = term.shared.provider.clean(term.guard.permit()?, &vm).await;
    cleaned.map_err(ExecError::Provider)?;
    term.shared
        .records
        .forget_instance(&term.guard, &record.group.tenant, &instance)
        .await
        .map_err(|error| term.failed(error))?;
    term.shared.cache.purge(&record);
    term.world.lock().purge(instance);
    Ok(())
}

/// Makes a record again from a VM's tags, after the store itself said that there is none.
async fn adopt(term: &Arc<Term>, group: &GroupRef, instance: InstanceId) {
    let Some(vm) = term.world.lock().group(group).candidates.get(&instance).cloned() else { return };
    match create::adopt(term, group, &vm).await {
        Ok(record) => {
            let adopted = record.value.adopted_at.is_some();
            term.commit(record);
            let now = term.now();
            term.world.lock().observe(instance, vm.seen, Some(&vm), now);
            if adopted {
                let message = "VM without a record, adopted by its tags";
                term.tell(Tell::instance(Reason::InstanceAdopted, group, instance, message));
            }
        }
        Err(error) => {
            tracing::warn!(%group, %instance, error = %Chain(&error), "VM not adopted, the next listing tries again");
            // The candidate stays uncertain until then, so nothing is made in its place.
            pause(term, Duration::from_secs(1)).await;
        }
    }
}

async fn terminate_orphan(term: &Arc<Term>, group: &GroupRef, vm: &VmRef) {
    // The store has the last word on whether it has a record: memory may have missed a late write of our predecessor.
    match term.shared.records.read_instance(&group.tenant, &vm.instance).await {
        Ok(None) => {}
        Ok(Some(record)) => {
            term.commit(record);
            return;
        }
        Err(error) => {
            tracing::warn!(%group, instance = %vm.instance, error = %Chain(&error), "orphan not judged yet");
            pause(term, Duration::from_secs(1)).await;
            return;
        }
    }
    let ended = async {
        let deleted = term.shared.provider.delete(term.guard.permit()?, vm, DeleteHow::Now).await;
        deleted.map_err(ExecError::Provider)?;
        term.shared.provider.clean(term.guard.permit()?, vm).await.map_err(ExecError::Provider)
    };
    match ended.await {
        Ok(()) => {
            term.world.lock().group(group).candidates.remove(&vm.instance);
            let message = "VM without a record ended";
            term.tell(Tell::instance(Reason::OrphanTerminated, group, vm.instance, message));
        }
        Err(error) => {
            tracing::warn!(%group, instance = %vm.instance, error = %Chain(&error), "orphan not ended, tried again");
            pause(term, Duration::from_secs(1)).await;
        }
    }
}
