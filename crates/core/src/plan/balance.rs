//! Load balancers: who wants in, who wants out.
//!
//! An error never changes direction: what is being taken out is only ever taken out again, and comes back in only after
//! it was out. A short loss takes nobody out; the balancer's own probe sees to that.

use std::collections::BTreeSet;

use super::{
    Action, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    drain,
    members::Standing,
};
use crate::{
    group::Desired,
    ids::{InstanceId, LbKey},
    instance::{LbState, Ownership, Phase},
    snapshot::{InstanceView, ProviderView},
};

pub(super) fn balance(scene: Scene<'_>, draft: &mut Draft<'_>) {
    if matches!(scene.shard.provider, ProviderView::Unavailable { .. }) {
        return; // these are calls to the provider and nothing else
    }
    let listed: BTreeSet<&LbKey> = scene.view.load_balancers.iter().collect();
    for (id, it) in &scene.view.instances {
        if it.busy.is_none() {
            balance_one(scene, draft, &listed, *id, it);
        }
    }
}

fn balance_one(scene: Scene<'_>, draft: &mut Draft<'_>, listed: &BTreeSet<&LbKey>, id: InstanceId, it: &InstanceView) {
    let standing = scene.standing(id, it);
    // Without the group's settings nobody knows which balancers it lists.
    let is_settled =
        scene.shard.complete.config && scene.shard.complete.groups && scene.view.desired != Desired::Unknown;
    let leaves = match standing {
        Standing::Draining | Standing::Deleting | Standing::Deleted => true,
        Standing::Dead => is_settled,
        _ => false,
    };
    let wants_in = is_settled
        && standing == Standing::Known
        && it.ownership == Ownership::Managed
        && it.phase == Phase::Running
        && it.reported
        && !draft.is_leaving(id);
    for (lb, state) in &it.load_balancers {
        let out = leaves || (is_settled && !listed.contains(lb));
        let goes = match state {
            LbState::Absent | LbState::DrainingOut => false,
            LbState::Registering | LbState::Coming | LbState::Registered => out,
            // Whatever is wanted now: it gets out first.
            LbState::Deregistering => scene.is_due(it),
        };
        if goes {
            let priority = it.drain.as_ref().map_or(Priority::ScaleDown, |drain| drain::priority(drain.reason));
            let since = it.drain.as_ref().map_or(scene.now, |drain| drain.started_at);
            draft.act(Urgency::new(priority, since, id), Action::LbDeregister { lb: lb.clone(), instance: id });
        }
        if *state == LbState::Deregistering {
            draft.wake_if(it.next_attempt_at);
        }
    }
    if !wants_in {
        return;
    }
    for lb in listed {
        let state = it.load_balancers.get(*lb).copied().unwrap_or(LbState::Absent);
        if state == LbState::Coming {
            wait_for(scene, draft, id, it, lb);
        }
        if !matches!(state, LbState::Absent | LbState::Registering) {
            continue;
        }
        if scene.is_due(it) {
            let since = it.registered_at.unwrap_or(it.created_at);
            let urgency = Urgency::new(Priority::ScaleUp, since, id);
            draft.act(urgency, Action::LbRegister { lb: (*lb).clone(), instance: id });
        }
        draft.wake_if(it.next_attempt_at);
    }
}

/// An instance that its load balancer does not serve yet. After the registration timeout this is worth a hold.
fn wait_for(scene: Scene<'_>, draft: &mut Draft<'_>, id: InstanceId, it: &InstanceView, lb: &LbKey) {
    let since = it.registered_at.unwrap_or(it.created_at);
    let Some(overdue) = scene.coming_is_overdue_at(it) else { return };
    if scene.now < overdue {
        draft.wake(overdue);
    } else if !scene.is_serving(it, lb) {
        let hold = draft.hold(HoldKind::WaitingForLb, "registered at its load balancer, which does not serve it yet");
        hold.instance = Some(id);
        hold.since = Some(since);
    }
}
