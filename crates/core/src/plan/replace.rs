//! Losses: the dead, those about to be taken away, and those that fell silent.
//!
//! None of them is a member, so their slots are free at once and every replacement starts in the same plan, however
//! many there are. What is left to do here is to see the old ones off.

use super::{
    Action, DeleteReason, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    drain::{self, SendOff, SentOff},
    members::{Crew, Entry, Standing},
    shrink::Drains,
};
use crate::{
    instance::{DrainReason, Health, Seen},
    time::Timestamp,
};

/// Since when the group is without this one.
pub(super) fn urgency(entry: &Entry<'_>) -> Urgency {
    let Entry { id, it, .. } = entry;
    match it.health {
        Health::Terminating { noticed_at, .. } if entry.standing == Standing::Noticed => {
            Urgency::new(Priority::TerminationNotice, noticed_at, *id)
        }
        Health::Silent { since } if entry.standing == Standing::Silent => Urgency::new(Priority::Unhealthy, since, *id),
        _ => Urgency::new(Priority::Unhealthy, it.seen_since.unwrap_or(it.created_at), *id),
    }
}

/// Deletes the dead. There is nobody left to drain.
pub(super) fn bury(scene: Scene<'_>, draft: &mut Draft<'_>, entry: &Entry<'_>) {
    if entry.it.busy.is_none() && scene.is_complete() {
        draft.act(urgency(entry), Action::Delete { instance: entry.id, reason: DeleteReason::Dead });
    }
}

/// Drains one that is about to be taken away, for as long as its notice allows.
pub(super) fn heed_notice(scene: Scene<'_>, draft: &mut Draft<'_>, entry: &Entry<'_>) -> Option<SentOff> {
    if entry.it.busy.is_some() || !scene.is_complete() {
        return None;
    }
    let off = SendOff {
        reason: DrainReason::SpotTerminating,
        urgency: urgency(entry),
        unused: DeleteReason::NeverRegistered,
        replacement: None,
    };
    Some(drain::send_off(scene, draft, entry.id, entry.it, off))
}

/// Sees off the dead and the noticed of a group that is known.
pub(super) fn see_off(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &Crew<'_>, drains: &mut Drains) {
    for entry in crew.with(Standing::Dead) {
        bury(scene, draft, &entry);
    }
    for entry in crew.with(Standing::Noticed) {
        if let Some(sent) = heed_notice(scene, draft, &entry) {
            drains.note(sent);
        }
    }
}

/// Of a group nobody knows only the records of VMs that are gone for certain are ended: that removes nothing.
pub(super) fn see_off_gone(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &Crew<'_>) {
    for entry in crew.with(Standing::Dead).filter(|entry| entry.it.seen == Seen::Gone) {
        bury(scene, draft, &entry);
    }
}

/// Drains the silent whose slot is filled again, or no longer wanted.
///
/// A VM whose agent is mute may still do its work. While creates are held back (`n_unfilled` slots stay empty) as many
/// of the silent are kept: a create that fails removes nothing.
pub(super) fn drain_silent(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &Crew<'_>, n_unfilled: u32) {
    let mut silent: Vec<_> = crew.with(Standing::Silent).filter(|entry| entry.it.busy.is_none()).collect();
    silent.sort_by_key(urgency);
    let n_kept = usize::try_from(n_unfilled).unwrap_or(usize::MAX).min(silent.len());
    let (go, stay) = silent.split_at(silent.len() - n_kept);
    for entry in go {
        let off = SendOff {
            reason: DrainReason::Unhealthy,
            urgency: urgency(entry),
            unused: DeleteReason::NeverRegistered,
            replacement: None,
        };
        drain::send_off(scene, draft, entry.id, entry.it, off);
    }
    for entry in stay {
        let hold = draft.hold(HoldKind::WaitingForReplacement, "silent, and kept until its replacement can be made");
        hold.instance = Some(entry.id);
        hold.since = Some(urgency(entry).since);
    }
}

/// Says who is held by the brake: silent with a running VM, and still a member.
pub(super) fn tell_held(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &Crew<'_>) {
    for entry in crew.known() {
        let silent = matches!(entry.it.health, Health::Silent { .. }) && entry.it.seen == Seen::Running;
        if silent && scene.is_held(entry.id) {
            let hold = draft.hold(
                HoldKind::MassDisconnect,
                "silent together with too many others; its VM runs, so it is kept until its turn comes",
            );
            hold.instance = Some(entry.id);
            hold.since = scene.shard.brake.since;
        }
    }
}

/// A moment at which a VM on a host in trouble is given up.
pub(super) fn given_up(crew: &Crew<'_>) -> impl Iterator<Item = Timestamp> {
    crew.members().filter_map(|entry| super::members::host_is_given_up_at(entry.it))
}
