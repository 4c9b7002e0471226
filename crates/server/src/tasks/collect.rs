//! Full listings: at take-over, every `garbage_collection.interval`, and after an ambiguous create.
//!
//! A complete listing joins VMs and records by instance id. It proves no absence by itself: a record whose VM is
//! missing is looked at by id. A VM without a record becomes a candidate, which the planner adopts or ends; one whose
//! tags tell nothing is told and left alone. Of two VMs for one instance the one that its record names stays.
//! With every listing the members of the load balancers are looked at too.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use nstance_core::{
    ids::InstanceId,
    instance::{Phase, Seen},
    ports::provider::{ErrorClass, Listing, ProviderError, VmTags},
};
use nstance_rt::backoff::Backoff;
use nstance_rt::chain::Chain;

use crate::{
    events::{Reason, Tell},
    exec,
    tasks::observe::{observe_call, provider_failed, provider_works},
    term::Term,
    world::is_dead,
};

pub async fn work(term: Arc<Term>) {
    let token = term.tasks.token().clone();
    // The first one decides whether anything may be made or removed at all: it is tried until it succeeds.
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
    loop {
        let timeout = term.applied().config.server.request_timeout;
        let listed = tokio::select! {
            biased;
            () = token.cancelled() => return,
            listed = list(&term, timeout) => listed,
        };
        let wait = if listed {
            backoff.reset();
            // Read each time: a refresh may have changed it.
            let interval = term.applied().config.server.garbage_collection.interval;
            if interval.is_zero() { Duration::MAX } else { interval }
        } else {
            backoff.next(term.shared.entropy.as_ref()) + Duration::from_millis(50)
        };
        tokio::select! {
            biased;
            () = token.cancelled() => return,
            () = term.listing_wanted() => {}
            () = sleep(wait) => {}
        }
    }
}

async fn sleep(wait: Duration) {
    if wait == Duration::MAX { std::future::pending().await } else { tokio::time::sleep(wait).await }
}

/// So many listings in a row without a VM's tags are no accident of the provider any more.
const UNTAGGED: u32 = 6;

/// One listing. Answers whether it told all there is to know; if not, it is repeated soon.
async fn list(term: &Arc<Term>, timeout: Duration) -> bool {
    let started = term.world.clock().monotonic();
    let asked_at = term.now();
    // Beside the listing: who is in a load balancer is part of the picture that removals need.
    let balancers = exec::look_at_balancers(term);
    let (listed, ()) = tokio::join!(tokio::time::timeout(timeout, term.shared.provider.list()), balancers);
    let listed = match listed {
        Ok(listed) => listed,
        Err(_) => Err(ProviderError::new("list", ErrorClass::Unavailable, "no answer in time")),
    };
    observe_call(term, "list", started, listed.as_ref().err());
    match listed {
        Ok(listing) => {
            provider_works(term);
            let complete = listing.missing.is_none();
            if let Some(part) = &listing.missing {
                tracing::warn!(part, "listing is incomplete, it proves no absence");
            }
            let untagged = apply(term, listing, asked_at);
            complete && !untagged
        }
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "VMs not listed");
            provider_failed(term, &error);
            false
        }
    }
}

/// Takes a listing in. Answers whether it is worth another one soon, for tags were missing from it.
fn apply(term: &Arc<Term>, listing: Listing, asked_at: nstance_core::time::Timestamp) -> bool {
    let now = term.now();
    let complete = listing.missing.is_none();
    let mut foreign = Vec::new();
    let mut looks = Vec::new();
    let mut unconfirmed = Vec::new();
    let mut doubles = Vec::new();
    let mut died = Vec::new();
    let mut untagged = false;
    {
        let mut state = term.world.lock();
        let mut shown = BTreeSet::<InstanceId>::new();
        for vm in listing.vms {
            let id = vm.vm.instance;
            shown.insert(id);
            if let Some(entry) = state.entries.get(&id) {
                // What was learned after the listing began is newer than the listing.
                let stale = entry.seen_at.is_some_and(|at| asked_at < at);
                let confirmed = entry.instance().provider.id.as_ref();
                let same = confirmed.is_none() || confirmed == vm.vm.provider_id.as_ref();
                if !same {
                    doubles.push(vm);
                    continue;
                }
                if !stale {
                    let started_dying = is_dead(vm.seen) && !is_dead(entry.seen);
                    if started_dying {
                        let mono = term.world.clock().monotonic();
                        if let Some(entry) = state.entries.get_mut(&id) {
                            entry.died_at_mono = Some(mono);
                        }
                    }
                    state.observe(id, vm.seen, Some(&vm), now);
                    let phase = state.entries.get(&id).map(|entry| entry.phase());
                    if started_dying && matches!(phase, Some(Phase::Pending | Phase::Provisioning | Phase::Running)) {
                        died.push(id);
                    }
                    if state.entries.get(&id).is_some_and(|entry| exec::is_unconfirmed(entry)) {
                        unconfirmed.push(vm);
                    }
                }
                continue;
            }
            match &vm.tags {
                VmTags::Complete(tags) => {
                    let group = tags.group_ref();
                    state.untagged.remove(&id);
                    state.group(&group).candidates.insert(id, vm);
                }
                // Nothing is concluded from that, and the listing is repeated soon; people hear of it if it stays so.
                VmTags::Absent => {
                    let times = state.untagged.entry(id).or_insert(0);
                    *times += 1;
                    untagged |= *times < UNTAGGED;
                    if *times == UNTAGGED {
                        foreign.push(vm);
                    }
                }
                VmTags::Foreign => {
                    if state.foreign.insert(id) {
                        foreign.push(vm);
                    }
                }
            }
        }
        if complete {
            state.foreign.retain(|id| shown.contains(id));
            state.untagged.retain(|id, _| shown.contains(id));
            // Candidates that are gone need no judgement any more.
            for it in state.groups.values_mut() {
                it.candidates.retain(|id, _| shown.contains(id));
            }
            let missing: Vec<InstanceId> = state
                .entries
                .iter()
                .filter(|(id, _)| !shown.contains(id))
                .filter(|(_, entry)| {
                    !matches!(entry.phase(), Phase::Deleted | Phase::Failed | Phase::Pending)
                        && entry.seen != Seen::Gone
                        && !entry.describe.in_flight
                        && entry.seen_at.is_none_or(|at| at <= asked_at)
                })
                .map(|(id, _)| *id)
                .collect();
            for id in missing {
                if let Some(entry) = state.entries.get_mut(&id) {
                    entry.describe.in_flight = true;
                    looks.push(entry.vm_ref());
                }
            }
            state.complete.listing = true;
        }
    }
    for vm in foreign {
        let named = vm.vm.provider_id.unwrap_or_default();
        let message = format!("VM {} has our tags in part only and is not touched; mend or remove it", vm.vm.instance);
        term.tell(Tell::shard(Reason::ForeignVm, message).detail("vm", named));
    }
    for id in died {
        exec::died(term, id);
    }
    exec::confirm_shown(term, unconfirmed);
    for vm in doubles {
        exec::end_double(term, vm);
    }
    term.observer.look(looks);
    term.wake_all();
    untagged
}
