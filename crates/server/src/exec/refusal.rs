//! What a refused create means for whoever comes next: how long its group waits, and which places it avoids.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    instance::{Instance, Ownership},
    ports::provider::{ErrorClass, ProviderError},
    snapshot::BlockKind,
    time::Timestamp,
};
use nstance_rt::chain::Chain;

use super::{create::place, placement::Choice, request::asked_for};
use crate::{
    events::{Reason, Tell},
    tasks::observe::provider_failed,
    term::Term,
    world::{Pair, State},
};

/// What a refusal means for the group's next creates.
pub(super) fn react(term: &Arc<Term>, instance: &Instance, error: &ProviderError) {
    let (group, id) = (&instance.group, instance.id);
    let message = format!("{}", Chain(error));
    provider_failed(term, error);
    let retry_after = hold_back(term, instance, error, &message);
    let told = Tell::instance(Reason::InstanceCreateFailed, group, id, message).error(error.class.as_str());
    term.tell(match retry_after {
        Some(wait) => told.retry_after(wait),
        None => told,
    });
}

/// Keeps the group from asking again too soon. Answers how long it waits now, if it does.
fn hold_back(term: &Arc<Term>, instance: &Instance, error: &ProviderError, message: &str) -> Option<Duration> {
    let group = &instance.group;
    let now = term.now();
    let (kind, first, last) = match error.class {
        ErrorClass::Capacity => (BlockKind::NoCapacity, 15, 120),
        ErrorClass::Quota => (BlockKind::Quota, 30, 300),
        ErrorClass::Auth => (BlockKind::ProviderAuth, 15, 120),
        ErrorClass::Invalid => (BlockKind::InvalidRequest, 600, 600),
        // Not found is what became of an earlier try: it made the VM, and the VM is gone. The next id knows nothing
        // of that.
        ErrorClass::Throttled | ErrorClass::NotFound => (BlockKind::BackingOff, 1, 8),
        // The provider as a whole is held, and its probe ends that.
        ErrorClass::Unavailable | ErrorClass::Ambiguous => return None,
    };
    let mut state = term.world.lock();
    if instance.ownership == Ownership::OnDemand {
        // A choice without capacity is known to all; the rest is between its owner and the provider, and no reason for
        // the group to stop making its own.
        if kind == BlockKind::NoCapacity {
            state.places.penalise(pair_of(instance), now);
            let merged = instance.request.as_ref().and_then(|request| asked_for(term, instance, request).ok());
            let pairs = merged.map(|merged| Pair::of(&merged)).unwrap_or_default();
            if matches!(place(&state, &pairs, now), Choice::Wait { .. }) {
                state.places.shorten(&pairs, now.plus(Duration::from_secs(first)));
            }
        }
        return None;
    }
    if kind == BlockKind::NoCapacity && goes_elsewhere(&mut state, instance, now) {
        return None;
    }
    let it = state.group(group);
    let times = it.blocks.get(&kind).map_or(0, |block| block.times);
    let wait = Duration::from_secs(first).saturating_mul(2_u32.saturating_pow(times)).min(Duration::from_secs(last));
    let wait = error.retry_after.unwrap_or(wait);
    let until = now.plus(wait);
    it.block(kind, message, now, Some(until));
    if kind == BlockKind::NoCapacity {
        let pairs = it.merged.as_ref().map(|merged| Pair::of(merged)).unwrap_or_default();
        state.places.shorten(&pairs, until);
    }
    Some(wait)
}

pub(super) fn pair_of(instance: &Instance) -> Pair {
    Pair { subnet: instance.subnet.clone(), instance_type: instance.instance_type.clone() }
}

/// Notes that a choice had no capacity. Answers whether that needs no wait of its own: another choice is left, which
/// the next plan takes with a new id, or the group waits already, because others of it met the same.
fn goes_elsewhere(state: &mut State, instance: &Instance, now: Timestamp) -> bool {
    state.places.penalise(pair_of(instance), now);
    let Some(it) = state.groups.get(&instance.group) else { return false };
    let Some(merged) = &it.merged else { return false };
    let pairs = Pair::of(merged);
    if matches!(place(state, &pairs, now), Choice::Go(_)) {
        return true;
    }
    let waits = it.blocks.get(&BlockKind::NoCapacity).and_then(|block| block.until).filter(|until| now < *until);
    if let Some(until) = waits {
        state.places.shorten(&pairs, until);
    }
    waits.is_some()
}
