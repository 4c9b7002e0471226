//! Ages: which of them make a reason to rotate, and the end of instances that were asked for one by one.
//!
//! Nothing polls: a plan wakes at the next moment an age is reached.

use super::{
    DeleteReason, HoldKind, Priority, Scene, arrive,
    draft::{Draft, Urgency},
    drain::{self, SendOff},
    members::{Entry, Standing},
    replace,
};
use crate::instance::{DrainReason, Ownership};

/// On-demand instances: never counted, replaced or rotated. They leave dead, by notice, by age, or by their owner's
/// word, which is a drain in their record. A deleted group does not touch them.
pub(super) fn on_demand(scene: Scene<'_>, draft: &mut Draft<'_>) {
    for (id, it) in &scene.view.instances {
        if it.ownership != Ownership::OnDemand {
            continue;
        }
        let entry = Entry { id: *id, it, standing: scene.standing(*id, it) };
        match entry.standing {
            Standing::Dead => replace::bury(scene, draft, &entry),
            Standing::Noticed => {
                replace::heed_notice(scene, draft, &entry);
            }
            // A mute agent is for the owner to judge.
            Standing::Known | Standing::Uncertain | Standing::Silent => end_by_time(scene, draft, &entry),
            Standing::Draining | Standing::Deleting | Standing::Deleted | Standing::Failed => {}
        }
        if let Some(at) = super::members::host_is_given_up_at(it) {
            draft.wake(at);
        }
    }
}

fn end_by_time(scene: Scene<'_>, draft: &mut Draft<'_>, entry: &Entry<'_>) {
    let Entry { id, it, standing } = *entry;
    let over = scene.reaches_age(it, scene.shard.settings.ondemand_age);
    let ends = scene.registration_ends(it);
    for at in over.into_iter().chain(ends) {
        draft.wake(at);
    }
    if !scene.is_complete() || it.busy.is_some() {
        return;
    }
    if ends.is_some_and(|ends| arrive::end_if_overdue(scene, draft, id, it, ends)) {
        return;
    }
    let Some(over) = over.filter(|over| scene.is_past(*over)) else { return };
    if standing == Standing::Uncertain {
        let hold = draft.hold(HoldKind::UncertainMembers, "over age, but its VM cannot be seen");
        hold.instance = Some(id);
        hold.since = Some(over);
        return;
    }
    let off = SendOff {
        reason: DrainReason::OndemandExpiry,
        urgency: Urgency::new(Priority::Rotation, over, id),
        unused: DeleteReason::NeverRegistered,
        replacement: None,
    };
    drain::send_off(scene, draft, id, it, off);
}

/// The age of a managed member as a reason to rotate it: forced before eligible.
pub(super) fn cause(scene: Scene<'_>, entry: &Entry<'_>) -> Option<(Urgency, DrainReason)> {
    let settings = &scene.shard.settings;
    let forced = scene.reaches_age(entry.it, settings.forced_age).filter(|at| scene.is_past(*at));
    let eligible = scene.reaches_age(entry.it, settings.eligible_age).filter(|at| scene.is_past(*at));
    forced
        .map(|at| (Urgency::new(Priority::ForcedExpiry, at, entry.id), DrainReason::ForcedExpiry))
        .or_else(|| eligible.map(|at| (Urgency::new(Priority::Rotation, at, entry.id), DrainReason::EligibleExpiry)))
}

/// When members reach their next age.
pub(super) fn wake(scene: Scene<'_>, draft: &mut Draft<'_>, entry: &Entry<'_>) {
    let settings = &scene.shard.settings;
    for age in [settings.forced_age, settings.eligible_age] {
        if let Some(at) = scene.reaches_age(entry.it, age) {
            draft.wake(at);
        }
    }
}
