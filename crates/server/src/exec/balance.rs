//! Into load balancers and out of them. An error never changes the direction: what is being taken out is only ever
//! taken out again. What was registered counts as in only once the member list shows it served.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId, LbKey},
    instance::LbState,
    ports::provider::{Balancers, ErrorClass, LbMember, LbMemberState, LoadBalancer, ProviderError, VmRef},
};
use nstance_rt::{chain::Chain, entropy::jitter};
use tokio::sync::Notify;

use super::ExecError;
use crate::{
    events::{Reason, Tell},
    tasks::observe::observe_call,
    term::Term,
    world::{Balance, Way},
};

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
    term.tasks.clone().spawn("balance", async move { go(&term, &group, &lb, &vm, way).await });
}

async fn go(term: &Arc<Term>, group: &GroupRef, lb: &LbKey, vm: &VmRef, way: Way) {
    let outcome = call(term, lb, vm, way).await;
    settle(term, group, vm.instance, lb, way, outcome);
    term.wake(group);
}

/// The load balancers of the provider, and this one as the config describes it, or described it in this term.
fn described<'a>(term: &'a Term, lb: &LbKey) -> Option<(&'a dyn Balancers, LoadBalancer)> {
    let balancers = term.shared.provider.balancers()?;
    let applied = term.applied();
    let mut state = term.world.lock();
    if let Some(current) = applied.config.load_balancers.get(lb) {
        state.described_balancers.insert(lb.clone(), current.clone());
    }
    Some((balancers, state.described_balancers.get(lb)?.clone()))
}

async fn call(term: &Arc<Term>, lb: &LbKey, vm: &VmRef, way: Way) -> Result<(), ExecError> {
    let Some((balancers, described)) = described(term, lb) else {
        // Nobody can be in a load balancer that this term never knew.
        let message = format!("load balancer {lb} is not in the config, or the provider has none; add it again");
        let unknown = ProviderError::new("lb_register", ErrorClass::Invalid, message);
        return if way == Way::Out { Ok(()) } else { Err(ExecError::Provider(unknown)) };
    };
    let permit = term.guard.permit()?;
    let started = term.world.clock().monotonic();
    let limit = term.shared.provider.capabilities().deadlines.other;
    let (op, called) = match way {
        Way::In => ("lb_register", tokio::time::timeout(limit, balancers.lb_register(permit, &described, vm)).await),
        Way::Out => {
            ("lb_deregister", tokio::time::timeout(limit, balancers.lb_deregister(permit, &described, vm)).await)
        }
    };
    let done = called.unwrap_or_else(|_| Err(ProviderError::new(op, ErrorClass::Ambiguous, "no answer in time")));
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
            if arrived && way == Way::Out {
                let message = "is on its way out of its load balancer";
                let told = Tell::instance(Reason::LbDeregistered, group, instance, message);
                term.tell(told.detail("load_balancer", lb));
            }
            watch(term, lb.clone());
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

/// Lists the members of every load balancer that the config names, and registers those again that are not served yet.
pub async fn look_at_balancers(term: &Arc<Term>) {
    if term.shared.provider.balancers().is_none() {
        return;
    }
    let applied = term.applied();
    let looks = applied.config.load_balancers.keys().map(|lb| async move {
        look(term, lb).await;
        let again = { term.world.lock().set_out_again(lb) };
        for (group, vm) in again {
            let (term, lb) = (term.clone(), lb.clone());
            term.tasks.clone().spawn("balance", async move { go(&term, &group, &lb, &vm, Way::In).await });
        }
        watch(term, lb.clone());
    });
    futures::future::join_all(looks).await;
}

/// First wait between two looks at a load balancer with members in transition.
const SOON: Duration = Duration::from_millis(250);

/// Looks again and again while members are in transition; at once when another one begins. Once per load balancer at a
/// time.
fn watch(term: &Arc<Term>, lb: LbKey) {
    let another = Arc::new(Notify::new());
    {
        let mut state = term.world.lock();
        if !state.any_in_transition(&lb) {
            return;
        }
        if let Some(watched) = state.watched_balancers.get(&lb) {
            watched.notify_one();
            return;
        }
        state.watched_balancers.insert(lb.clone(), another.clone());
    }
    let term = term.clone();
    term.tasks.clone().spawn_droppable("balancer", async move {
        let mut wait = SOON;
        loop {
            look(&term, &lb).await;
            {
                let mut state = term.world.lock();
                if !state.any_in_transition(&lb) {
                    state.watched_balancers.remove(&lb);
                    return;
                }
            }
            tokio::select! {
                biased;
                () = another.notified() => wait = SOON,
                () = tokio::time::sleep(wait) => wait = (wait * 2).min(Duration::from_secs(5)),
            }
        }
    });
}

async fn look(term: &Arc<Term>, lb: &LbKey) {
    let asked_at = term.world.clock().monotonic();
    // Before that, members whose record or VM has not been read yet would look like strangers.
    let all_known = { term.world.lock().complete.is_complete() };
    let Some((balancers, described)) = described(term, lb) else { return };
    let answer = match tokio::time::timeout(LOOK, balancers.lb_members(&described)).await {
        Ok(answer) => answer,
        Err(_) => Err(ProviderError::new("lb_members", ErrorClass::Unavailable, "no answer within 10 s")),
    };
    observe_call(term, "lb_members", asked_at, answer.as_ref().err());
    if let Err(error) = &answer {
        tracing::warn!(%lb, error = %Chain(error), "members of the load balancer are not known");
    }
    let (now, mono) = (term.now(), term.world.clock().monotonic());
    let timeout = term.applied().config.server.garbage_collection.registration_timeout;
    let (shown, overdue) = {
        let mut state = term.world.lock();
        let shown = state.show_members(lb, answer.as_deref().ok(), asked_at, mono);
        let overdue = if timeout.is_zero() { Vec::new() } else { state.newly_overdue(lb, timeout, now) };
        (shown, overdue)
    };
    for (group, instance) in shown.served {
        let told = Tell::instance(Reason::LbRegistered, &group, instance, "is in its load balancer");
        term.tell(told.detail("load_balancer", lb));
    }
    for (group, instance) in overdue {
        let message = format!("load balancer {lb} does not serve it yet; look at its health check there");
        term.tell(Tell::instance(Reason::LbFailing, &group, instance, message).detail("load_balancer", lb));
    }
    for group in shown.groups {
        term.wake(&group);
    }
    if all_known && let Ok(members) = &answer {
        take_out_strangers(term, lb, members);
    }
}

/// Takes out members that are our VMs and that neither a record nor a VM waiting for judgement knows: by the provider id
/// that the member list gives, for no record has one.
fn take_out_strangers(term: &Arc<Term>, lb: &LbKey, members: &[LbMember]) {
    let strangers: Vec<VmRef> = {
        let mut state = term.world.lock();
        let is_known = |id: &InstanceId| {
            state.entries.contains_key(id)
                || state.foreign.contains(id)
                || state.untagged.contains_key(id)
                || state.groups.values().any(|it| it.candidates.contains_key(id) || it.judging.contains(id))
        };
        let strange: Vec<VmRef> = members
            .iter()
            .filter(|member| member.state != LbMemberState::Draining && !is_known(&member.vm.instance))
            .map(|member| member.vm.clone())
            .collect();
        strange.into_iter().filter(|vm| state.strangers.insert((lb.clone(), vm.instance))).collect()
    };
    for vm in strangers {
        let (term, lb, instance) = (term.clone(), lb.clone(), vm.instance);
        term.tasks.clone().spawn("stranger", async move {
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
