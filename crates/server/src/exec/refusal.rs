//! What a refused create means for whoever comes next: how long its group waits, and which places it avoids.

use std::{sync::Arc, time::Duration};

use nstance_core::{
    instance::{Instance, Ownership},
    ports::provider::{Ended, ErrorClass, ProviderError, Scope},
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
    if error.scope == Scope::Image {
        term.images.refresh();
    }
    let retry_after = hold_back(term, instance, error, &message);
    let told = Tell::instance(Reason::InstanceCreateFailed, group, id, message).error(error.class.as_str());
    term.tell(match retry_after {
        Some(wait) => told.retry_after(wait),
        None => told,
    });
}

/// A VM that was accepted ended before its agent registered, and the provider says why: the same as if the create had
/// been refused for that. The same request again at once would launch and lose machines without end.
pub(super) fn ended_early(term: &Arc<Term>, instance: &Instance, ended: &Ended) {
    let error =
        ProviderError { code: ended.code.clone(), ..ProviderError::new("create", ended.class, ended.message.clone()) };
    let message = format!("the VM ended before its agent registered: {}", Chain(&error));
    if instance.ownership == Ownership::Managed
        && let Some(kind) = block_of(error.class)
    {
        term.world.lock().group(&instance.group).note_ended_early(kind);
    }
    hold_back(term, instance, &error, &message);
    if error.scope == Scope::Image {
        term.images.refresh();
    }
}

/// How refusals of a class block the creates of a group.
fn block_of(class: ErrorClass) -> Option<BlockKind> {
    match class {
        ErrorClass::Capacity => Some(BlockKind::NoCapacity),
        ErrorClass::Quota => Some(BlockKind::Quota),
        ErrorClass::Auth => Some(BlockKind::ProviderAuth),
        ErrorClass::Invalid => Some(BlockKind::InvalidRequest),
        // Not found is what became of an earlier try: it made the VM, and the VM is gone. The next id knows nothing
        // of that.
        ErrorClass::Throttled | ErrorClass::NotFound => Some(BlockKind::BackingOff),
        // The provider as a whole is held, and its probe ends that.
        ErrorClass::Unavailable | ErrorClass::Ambiguous => None,
    }
}

/// Keeps the group from asking again too soon. Answers how long it waits now, if it does.
fn hold_back(term: &Arc<Term>, instance: &Instance, error: &ProviderError, message: &str) -> Option<Duration> {
    let group = &instance.group;
    let now = term.now();
    let kind = block_of(error.class)?;
    let (first, last) = match kind {
        BlockKind::Quota => (30, 300),
        BlockKind::InvalidRequest => (600, 600),
        BlockKind::BackingOff => (1, 8),
        _ => (15, 120),
    };
    // Another subnet or type may pass: some quotas are per family of types.
    let of_this_choice = kind == BlockKind::NoCapacity || kind == BlockKind::Quota && error.scope == Scope::Choice;
    let mut state = term.world.lock();
    if instance.ownership == Ownership::OnDemand {
        // A choice without capacity is known to all; the rest is between its owner and the provider, and no reason for
        // the group to stop making its own.
        if of_this_choice {
            state.places.penalise(pair_of(instance), now);
            let merged = instance.request.as_ref().and_then(|request| asked_for(term, instance, request).ok());
            let pairs = merged.map(|merged| Pair::of(&merged)).unwrap_or_default();
            if matches!(place(&state, &pairs, now), Choice::Wait { .. }) {
                state.places.shorten(&pairs, now.plus(Duration::from_secs(first)));
            }
        }
        return None;
    }
    if of_this_choice && goes_elsewhere(&mut state, instance, kind, now) {
        return None;
    }
    let it = state.group(group);
    let times = it.blocks.get(&kind).map_or(0, |block| block.times);
    let wait = Duration::from_secs(first).saturating_mul(2_u32.saturating_pow(times)).min(Duration::from_secs(last));
    let wait = error.retry_after.unwrap_or(wait);
    let until = now.plus(wait);
    it.block(kind, message, now, Some(until));
    if of_this_choice {
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
fn goes_elsewhere(state: &mut State, instance: &Instance, kind: BlockKind, now: Timestamp) -> bool {
    state.places.penalise(pair_of(instance), now);
    let Some(it) = state.groups.get(&instance.group) else { return false };
    let Some(merged) = &it.merged else { return false };
    let pairs = Pair::of(merged);
    if matches!(place(state, &pairs, now), Choice::Go(_)) {
        return true;
    }
    let waits = it.blocks.get(&kind).and_then(|block| block.until).filter(|until| now < *until);
    if let Some(until) = waits {
        state.places.shorten(&pairs, until);
    }
    waits.is_some()
}
