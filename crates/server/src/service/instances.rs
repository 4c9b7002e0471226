//! Instances, one by one, as the API changes them: a durable fact, a wake-up, an answer. What follows from the fact is
//! the planner's.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use nstance_core::{
    group::Desired,
    ids::{InstanceId, Tenant},
    instance::{CreateReason, Delete, Drain, DrainReason, Instance, Ownership, Phase, ReplaceMark},
};
use tokio::sync::oneshot;

use super::groups;
use crate::{
    events::{Reason, Tell},
    grpc::{auth::record_refusal, status::Refusal},
    term::Term,
};

/// Longest text that is kept of what a caller says.
const MAX_TEXT: usize = 2048;

/// One instance, as one caller names it.
pub struct Target {
    pub instance: InstanceId,
    pub tenant: Tenant,
    pub actor: String,
}

impl Target {
    fn missing(&self) -> Refusal {
        Refusal::not_found(format!("there is no instance {}", self.instance))
    }

    fn find(&self, term: &Term) -> Result<Instance, Refusal> {
        term.world.instance(&self.tenant, self.instance).ok_or_else(|| self.missing())
    }
}

/// Adds a fact; answers the record and whether it changed. Goes on when the caller hangs up: memory must learn what the
/// store has taken.
async fn amend(
    term: &Arc<Term>,
    instance: InstanceId,
    decide: impl Fn(&Instance) -> Result<Option<Instance>, Refusal> + Send + Sync + 'static,
) -> Result<(Instance, bool), Refusal> {
    let (answer, answered) = oneshot::channel();
    let term = term.clone();
    term.tasks.clone().spawn("change an instance", async move {
        // What the last run of the change said: the one that the answer is about.
        let verdict = Mutex::new(Ok(false));
        let updated = term.update(instance, |it| {
            let (next, said) = match decide(it) {
                Ok(next) => {
                    let changes = next.is_some();
                    (next, Ok(changes))
                }
                Err(refusal) => (None, Err(refusal)),
            };
            *verdict.lock().unwrap_or_else(PoisonError::into_inner) = said;
            next
        });
        let updated = updated.await.map_err(|error| record_refusal(&error));
        let verdict = verdict.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Nobody waits any more: the fact stands all the same.
        let _ = answer.send(updated.and_then(|it| Ok((it, verdict?))));
    });
    let ended = |_| Err(Refusal::unavailable("LEADER_CHANGED", "this server leads no more; retry"));
    answered.await.unwrap_or_else(ended)
}

/// AcknowledgeDrained: nobody needs this machine any more.
pub async fn acknowledge(term: &Arc<Term>, target: Target, drain_id: String) -> Result<(), Refusal> {
    let known = target.find(term)?;
    let (now, by) = (term.now(), target.actor.clone());
    let (_, acked) = amend(term, target.instance, move |it| {
        if it.delete.is_some() {
            return Ok(None);
        }
        let not_draining = || Refusal::precondition("NOT_DRAINING", format!("instance {} is not draining", it.id));
        let mut it = it.clone();
        let drain = it.drain.as_mut().ok_or_else(not_draining)?;
        if !drain_id.is_empty() && drain_id != drain.started_at.as_millis().to_string() {
            let message = format!("drain {drain_id} is over; look at the instance again");
            return Err(Refusal::precondition("STALE_DRAIN", message));
        }
        if drain.cancelled_at.is_some() {
            let message = format!("the drain of instance {} was cancelled, it stays in use", it.id);
            return Err(Refusal::precondition("DRAIN_CANCELLED", message));
        }
        if drain.acked_at.is_some() {
            return Ok(None);
        }
        drain.acked_at = Some(now);
        drain.acked_by = Some(by.clone());
        Ok(Some(it))
    })
    .await?;
    if acked {
        let told = Tell::instance(Reason::DrainAcked, &known.group, known.id, "drain acknowledged");
        term.tell(told.by(target.actor));
    }
    Ok(())
}

/// How far an instance is on its way out.
fn way_out(phase: Phase) -> &'static str {
    match phase {
        Phase::Deleted | Phase::Failed => "deleted",
        Phase::Deleting => "deleting",
        Phase::Pending | Phase::Provisioning | Phase::Running | Phase::Draining => "draining",
    }
}

pub fn is_leaving(phase: Phase) -> bool {
    matches!(phase, Phase::Draining | Phase::Deleting | Phase::Deleted | Phase::Failed)
}

/// DeleteInstance: the drain, or where there is nothing to drain the delete, is durable before the answer.
pub async fn delete(
    term: &Arc<Term>,
    target: Target,
    shrink_group: bool,
    drain_timeout: Option<Duration>,
) -> Result<&'static str, Refusal> {
    let known = target.find(term)?;
    if shrink_group && known.ownership == Ownership::Managed {
        groups::shrink(term, &known.group, known.id, &target.actor).await?;
    }
    let own = {
        let state = term.world.lock();
        let merged = state.groups.get(&known.group).and_then(|it| it.merged.as_ref());
        merged.map_or(state.default_drain_timeout, |merged| merged.drain_timeout)
    };
    let timeout = drain_timeout.map_or(own, |asked| asked.min(own));
    let (now, by) = (term.now(), target.actor.clone());
    let (it, changed) = amend(term, target.instance, move |it| {
        if it.delete.is_some() || it.create_failure.is_some() {
            return Ok(None);
        }
        let mut next = it.clone();
        let in_use = it.registration.is_some() || it.adopted_at.is_some();
        let deadline = now.plus(timeout);
        match next.drain.as_mut().filter(|drain| drain.cancelled_at.is_none()) {
            _ if !in_use || timeout.is_zero() => {
                let reason = DrainReason::Requested.as_str().to_owned();
                next.delete = Some(Delete { reason, by: by.clone(), requested_at: now, gone_at: None });
            }
            Some(drain) => {
                if drain_timeout.is_some() {
                    drain.deadline = drain.deadline.min(deadline);
                }
                // A scale-down could still be taken back; this word cannot.
                if drain.reason == DrainReason::ScaleDown {
                    drain.reason = DrainReason::Requested;
                }
            }
            None => {
                next.drain = Some(Drain {
                    reason: DrainReason::Requested,
                    started_at: now,
                    deadline,
                    replacement: None,
                    acked_at: None,
                    acked_by: None,
                    cancelled_at: None,
                });
            }
        }
        Ok((next != *it).then_some(next))
    })
    .await?;
    if changed {
        let (reason, message) = match it.phase() {
            Phase::Draining => (Reason::DrainStarted, "drain requested by an operator"),
            _ => (Reason::InstanceDeleting, "deletion requested by an operator"),
        };
        term.tell(Tell::instance(reason, &it.group, it.id, message).by(target.actor));
    }
    Ok(way_out(it.phase()))
}

/// What became of a wish to replace an instance.
pub struct Replacing {
    pub status: &'static str,
    pub replacement: Option<InstanceId>,
}

/// ReplaceInstance: a mark on the record, which makes it the group's most urgent rotation.
pub async fn replace(term: &Arc<Term>, target: Target, reason: String) -> Result<Replacing, Refusal> {
    let known = target.find(term)?;
    let refuse = |why: &str| Refusal::precondition("NOT_A_MEMBER", format!("instance {} {why}", known.id));
    if known.ownership == Ownership::OnDemand {
        return Err(refuse("was asked for by itself; delete it and ask for another"));
    }
    let desired = { term.world.lock().groups.get(&known.group).map(|it| it.desired) };
    match desired {
        Some(Desired::Known(_)) => {}
        Some(Desired::Tombstoned) => {
            let message = format!("group {} is being deleted", known.group.group);
            return Err(Refusal::precondition("GROUP_DELETING", message));
        }
        Some(Desired::Unknown) | None => {
            let message = format!("nobody asks for group {}; bring it back first", known.group.group);
            return Err(Refusal::precondition("GROUP_UNKNOWN", message));
        }
    }
    let mark = ReplaceMark { at: term.now(), by: target.actor.clone(), reason: cut(&reason) };
    let (it, marked) = amend(term, target.instance, move |it| {
        let gone = || Refusal::precondition("NOT_A_MEMBER", format!("instance {} has left its group", it.id));
        match it.phase() {
            Phase::Deleting | Phase::Deleted | Phase::Failed => Err(gone()),
            Phase::Draining => Ok(None),
            _ if it.replace.is_some() => Ok(None),
            _ => Ok(Some(Instance { replace: Some(mark.clone()), ..it.clone() })),
        }
    })
    .await?;
    if marked {
        let told = Tell::instance(Reason::ReplaceRequested, &it.group, it.id, "replacement requested by an operator");
        term.tell(told.detail("why", cut(&reason)).by(target.actor));
    }
    let replacement = it.open_drain().and_then(|drain| drain.replacement).or_else(|| successor(term, &it));
    let status = match (it.phase(), replacement) {
        (Phase::Draining, _) => "draining",
        (_, Some(_)) => "replacing",
        (_, None) => "requested",
    };
    Ok(Replacing { status, replacement })
}

/// The member that was made for the group's rotation since the mark.
fn successor(term: &Term, it: &Instance) -> Option<InstanceId> {
    let since = it.replace.as_ref()?.at;
    let state = term.world.lock();
    let members = &state.groups.get(&it.group)?.members;
    let mut made = members.iter().filter_map(|id| state.entries.get(id)).map(|entry| entry.instance());
    made.find(|other| other.reason == CreateReason::Rotation && since <= other.created_at && !is_leaving(other.phase()))
        .map(|other| other.id)
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}
