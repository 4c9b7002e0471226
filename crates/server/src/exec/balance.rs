//! Into load balancers and out of them. An error never changes the direction: what is being taken out is only ever
//! taken out again.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId, LbKey},
    instance::LbState,
    ports::provider::{ErrorClass, LbMember, ProviderError, VmRef},
};
use nstance_rt::{chain::Chain, entropy::jitter};

use super::ExecError;
use crate::{
    events::{Reason, Tell},
    tasks::observe::observe_call,
    term::Term,
    world::{Balance, Way},
};

/// Limit of one call that changes members.
const CHANGE: Duration = Duration::from_secs(30);

/// Limit of one look at the members. Short, for the first picture of a term waits for it.
const LOOK: Duration = Duration::from_secs(10);

/// After so many failures in a row somebody is told.
const FAILING: u32 = 3;

/// Sets out. Nothing happens if the instance goes the other way, or a call is under way: its end wakes the planner.
pub(super) fn start(term: &Arc<Term>, group: GroupRef, instance: InstanceId, lb: LbKey, way: Way) {
    let (now, mono) = (term.now(), term.world.clock().monotonic());
    let vm = {
        let mut state = term.world.lock();
        let Some(entry) = state.entries.get_mut(&instance) else { return };
        let vm = entry.vm_ref();
        let known = entry.balancers.entry(lb.clone()).or_insert_with(|| Balance::new(LbState::Absent, mono));
        let before = known.state;
        let starts = known.set_out(way, now, mono);
        if known.state != before {
            state.group(&group).revision += 1;
        }
        if !starts {
            return;
        }
        vm
    };
    let term = term.clone();
    term.tasks.clone().spawn("balance", async move {
        let outcome = call(&term, &lb, &vm, way).await;
        settle(&term, &group, instance, &lb, way, outcome);
        term.wake(&group);
    });
}

async fn call(term: &Arc<Term>, lb: &LbKey, vm: &VmRef, way: Way) -> Result<(), ExecError> {
    let permit = term.guard.permit()?;
    let started = term.world.clock().monotonic();
    let provider = &term.shared.provider;
    let (op, called) = match way {
        Way::In => ("lb_register", tokio::time::timeout(CHANGE, provider.lb_register(permit, lb, vm)).await),
        Way::Out => ("lb_deregister", tokio::time::timeout(CHANGE, provider.lb_deregister(permit, lb, vm)).await),
    };
    let done = called.unwrap_or_else(|_| Err(ProviderError::new(op, ErrorClass::Ambiguous, "no answer within 30 s")));
    observe_call(term, op, started, done.as_ref().err());
    match done {
        // What does not exist is in no balancer.
        Err(error) if way == Way::Out && error.class == ErrorClass::NotFound => Ok(()),
        done => done.map_err(ExecError::Provider),
    }
}

fn settle(
    term: &Arc<Term>,
    group: &GroupRef,
    instance: InstanceId,
    lb: &LbKey,
    way: Way,
    outcome: Result<(), ExecError>,
) {
    let (now, mono) = (term.now(), term.world.clock().monotonic());
    let mut state = term.world.lock();
    state.group(group).revision += 1;
    let Some(known) = state.entries.get_mut(&instance).and_then(|entry| entry.balancers.get_mut(lb)) else { return };
    match outcome {
        Ok(()) => {
            let arrived = known.arrive(way, mono);
            drop(state);
            let (reason, message) = match way {
                Way::In => (Reason::LbRegistered, "is in its load balancer"),
                Way::Out => (Reason::LbDeregistered, "is on its way out of its load balancer"),
            };
            if arrived {
                term.tell(Tell::instance(reason, group, instance, message).detail("load_balancer", lb));
            }
            if way == Way::Out {
                watch(term, lb.clone());
            }
        }
        Err(error) => {
            known.in_flight = false;
            known.attempts = known.attempts.saturating_add(1);
            let (attempts, retry_in) = (known.attempts, retry_wait(term, known.attempts));
            known.next_attempt_at = Some(now.plus(retry_in));
            drop(state);
            tracing::warn!(%group, %instance, %lb, ?way, ?retry_in, error = %Chain(&error), "load balancer not changed");
            // A balancer that does not serve us says nothing about VMs, so the provider as a whole is not held for it.
            if let ExecError::Provider(error) = &error
                && error.class == ErrorClass::Throttled
            {
                term.gate.throttled();
            }
            if attempts == FAILING {
                let message =
                    format!("load balancer {lb} was not changed {attempts} times in a row: {}", Chain(&error));
                let told = Tell::instance(Reason::LbFailing, group, instance, message).detail("load_balancer", lb);
                term.tell(told.retry_after(retry_in));
            }
        }
    }
}

/// 1 s doubling to 60 s, full jitter.
fn retry_wait(term: &Term, attempts: u32) -> Duration {
    let bound = Duration::from_secs(1).saturating_mul(2_u32.saturating_pow(attempts.saturating_sub(1)));
    // A moment at least, so that no failure is repeated at once.
    Duration::from_millis(50) + jitter(term.shared.entropy.as_ref(), bound.min(Duration::from_secs(60)))
}

/// Looks at the members of every load balancer that the config names.
pub async fn look_at_balancers(term: &Arc<Term>) {
    if !term.shared.provider.capabilities().load_balancers {
        return;
    }
    let applied = term.applied();
    let looks = applied.config.load_balancers.keys().map(|lb| async move {
        look(term, lb).await;
        watch(term, lb.clone());
    });
    futures::future::join_all(looks).await;
}

/// Looks again and again until nobody is on its way out of the balancer. Once per balancer at a time.
fn watch(term: &Arc<Term>, lb: LbKey) {
    {
        let mut state = term.world.lock();
        if !state.anybody_drains_out(&lb) || !state.watched_balancers.insert(lb.clone()) {
            return;
        }
    }
    let term = term.clone();
    term.tasks.clone().spawn_droppable("balancer", async move {
        let mut wait = Duration::from_millis(250);
        loop {
            look(&term, &lb).await;
            {
                let mut state = term.world.lock();
                if !state.anybody_drains_out(&lb) {
                    state.watched_balancers.remove(&lb);
                    return;
                }
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(Duration::from_secs(5));
        }
    });
}

async fn look(term: &Arc<Term>, lb: &LbKey) {
    let asked_at = term.world.clock().monotonic();
    // Before that, members whose record or VM has not been read yet would look like strangers.
    let all_known = { term.world.lock().complete.is_complete() };
    let answer = match tokio::time::timeout(LOOK, term.shared.provider.lb_members(lb)).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("lb_members", ErrorClass::Unavailable, "no answer within 10 s")),
    };
    observe_call(term, "lb_members", asked_at, answer.as_ref().err());
    if let Err(error) = &answer {
        tracing::warn!(%lb, error = %Chain(error), "members of the load balancer are not known");
    }
    let now = term.world.clock().monotonic();
    let changed = { term.world.lock().show_members(lb, answer.as_ref().ok(), asked_at, now) };
    for group in changed {
        term.wake(&group);
    }
    if all_known && let Ok(members) = &answer {
        take_out_strangers(term, lb, members);
    }
}

/// Takes out members that bear our name and that neither a record nor a VM waiting for judgement knows.
fn take_out_strangers(term: &Arc<Term>, lb: &LbKey, members: &BTreeMap<InstanceId, LbMember>) {
    let strangers: Vec<InstanceId> = {
        let mut state = term.world.lock();
        let is_known = |id: &InstanceId| {
            state.entries.contains_key(id)
                || state.foreign.contains(id)
                || state.groups.values().any(|it| it.candidates.contains_key(id) || it.judging.contains(id))
        };
        let strange: Vec<InstanceId> = members
            .iter()
            .filter(|(id, member)| **member == LbMember::In && !is_known(id))
            .map(|(id, _)| *id)
            .collect();
        strange.into_iter().filter(|id| state.strangers.insert((lb.clone(), *id))).collect()
    };
    for instance in strangers {
        let (term, lb) = (term.clone(), lb.clone());
        term.tasks.clone().spawn("stranger", async move {
            let vm = VmRef { instance, provider_id: None };
            // No event: whose it was nobody knows, and shard-wide ones name nobody's objects.
            match call(&term, &lb, &vm, Way::Out).await {
                Ok(()) => tracing::info!(%lb, %instance, "member without a record taken out"),
                Err(error) => {
                    tracing::warn!(%lb, %instance, error = %Chain(&error), "member without a record not taken out, the next look tries again");
                }
            }
            term.world.lock().strangers.remove(&(lb, instance));
        });
    }
}
