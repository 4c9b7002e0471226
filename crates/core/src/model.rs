//! The world after a plan, if every effect succeeded at once. Tests and the simulator use it; nothing in production does.
//!
//! It is a model of the executor's contract, not of its code: facts are added as the executor would write them, and the
//! provider obeys immediately.

use std::collections::BTreeMap;

use crate::{
    ids::{GroupRef, InstanceId, Kind, uuid_v7},
    instance::{Health, LbState, Ownership, Phase, Seen},
    plan::{Action, Plan, Planned},
    snapshot::{Candidate, DrainView, GroupView, InstanceView, Snapshot},
    time::Timestamp,
};

/// Applies every action of `plan`. Actions for what the snapshot does not hold change nothing.
pub fn apply(snapshot: &Snapshot, plan: &Plan, now: Timestamp) -> Snapshot {
    let mut after = snapshot.clone();
    let mut n_minted = 0;
    for Planned { group, action, .. } in &plan.actions {
        if let Some(view) = after.groups.get_mut(group) {
            apply_one(group, view, action, now, &mut n_minted);
        }
    }
    after
}

fn apply_one(group: &GroupRef, view: &mut GroupView, action: &Action, now: Timestamp, n_minted: &mut u32) {
    match action {
        Action::Create { reason } => {
            let id = mint(group, view, now, n_minted);
            let mut it = fresh(view, now);
            it.reason = *reason;
            view.instances.insert(id, it);
            view.window.n_creates += 1;
            if let crate::group::Desired::Known(size) = view.desired {
                view.window.largest_size = view.window.largest_size.max(size);
            }
        }
        Action::ResolveCreate { instance } => change(view, instance, |it| {
            it.phase = Phase::Provisioning;
            it.confirmed = true;
            it.seen = Seen::Pending;
            it.seen_since = Some(now);
        }),
        Action::StartDrain { instance, reason, delete_at, .. } => change(view, instance, |it| {
            it.phase = Phase::Draining;
            match &mut it.drain {
                Some(drain) => drain.delete_at = drain.delete_at.min(*delete_at),
                None => {
                    it.drain =
                        Some(DrainView { reason: *reason, started_at: now, delete_at: *delete_at, acked: false });
                }
            }
        }),
        Action::CancelDrain { instance } => change(view, instance, |it| {
            it.phase = if it.registered_at.is_some() { Phase::Running } else { Phase::Provisioning };
            it.drain = None;
        }),
        Action::Delete { instance, .. } => change(view, instance, |it| {
            it.phase = Phase::Deleting;
            it.delete_requested_at = it.delete_requested_at.or(Some(now));
            it.seen = Seen::Gone;
            it.seen_since = Some(now);
        }),
        Action::MarkDeleted { instance } => change(view, instance, |it| {
            it.phase = Phase::Deleted;
            it.delete_gone_at = Some(now);
        }),
        Action::Forget { instance } => {
            view.instances.remove(instance);
        }
        Action::Adopt { vm } => {
            let candidates = view.candidates.clone();
            for candidate in candidates.iter().filter(|candidate| candidate.vm == *vm) {
                let it = adopted(view, candidate, now);
                view.instances.entry(vm.instance).or_insert(it);
            }
            view.candidates.retain(|candidate| candidate.vm != *vm);
        }
        Action::TerminateOrphan { vm } => view.candidates.retain(|candidate| candidate.vm != *vm),
        Action::LbRegister { lb, instance } => change(view, instance, |it| {
            it.load_balancers.insert(lb.clone(), LbState::Coming);
        }),
        Action::LbDeregister { lb, instance } => change(view, instance, |it| {
            it.load_balancers.insert(lb.clone(), LbState::Absent);
        }),
    }
}

fn change(view: &mut GroupView, instance: &InstanceId, how: impl FnOnce(&mut InstanceView)) {
    if let Some(it) = view.instances.get_mut(instance) {
        how(it);
    }
}

/// A new id. The model has no chance to draw, so it counts, and tells groups apart by their names.
fn mint(group: &GroupRef, view: &GroupView, now: Timestamp, n_minted: &mut u32) -> InstanceId {
    let kind = view.instances.keys().next().map_or_else(model_kind, InstanceId::kind);
    loop {
        *n_minted += 1;
        let mut bytes = [0; 10];
        for (i, byte) in group.to_string().bytes().enumerate() {
            bytes[2 + i % 4] ^= byte;
        }
        bytes[6..].copy_from_slice(&n_minted.to_be_bytes());
        let id = InstanceId::new(kind, uuid_v7(now, bytes));
        if !view.instances.contains_key(&id) {
            return id;
        }
    }
}

fn model_kind() -> Kind {
    "mdl".parse().expect("three lower-case letters are a kind")
}

/// A VM the provider has just confirmed.
fn fresh(view: &GroupView, now: Timestamp) -> InstanceView {
    InstanceView {
        ownership: Ownership::Managed,
        phase: Phase::Provisioning,
        reason: crate::instance::CreateReason::ScaleUp,
        created_at: now,
        timers_from: now,
        adopted: false,
        confirmed: true,
        registered_at: None,
        infra_hash: view.infra_hash.clone(),
        seen: Seen::Pending,
        seen_since: Some(now),
        health: Health::Starting,
        reported: false,
        drain: None,
        delete_requested_at: None,
        delete_gone_at: None,
        create_failed_at: None,
        replace_marked_at: None,
        advised_at: None,
        load_balancers: BTreeMap::new(),
        busy: None,
        next_attempt_at: None,
    }
}

fn adopted(view: &GroupView, candidate: &Candidate, now: Timestamp) -> InstanceView {
    InstanceView {
        ownership: candidate.ownership,
        created_at: candidate.created_at.unwrap_or(now),
        adopted: true,
        seen: candidate.seen,
        health: Health::Lost { since: now },
        ..fresh(view, now)
    }
}

/// Lets time do its good: every VM that was asked for runs, registers and reports, load balancers and
/// providers let go, drains are acknowledged.
pub fn settle(snapshot: &Snapshot, now: Timestamp) -> Snapshot {
    let mut after = snapshot.clone();
    for view in after.groups.values_mut() {
        for it in view.instances.values_mut() {
            if it.phase == Phase::Provisioning && matches!(it.seen, Seen::Pending | Seen::Running) {
                it.phase = Phase::Running;
                it.seen = Seen::Running;
                it.registered_at = Some(now);
                it.health = Health::Healthy;
                it.reported = true;
            }
            if it.phase == Phase::Deleting {
                it.seen = Seen::Gone;
            }
            for state in it.load_balancers.values_mut() {
                *state = match *state {
                    LbState::DrainingOut => LbState::Absent,
                    LbState::Coming => LbState::Registered,
                    other => other,
                };
            }
            if let Some(drain) = &mut it.drain {
                drain.acked = true;
            }
        }
    }
    after
}
