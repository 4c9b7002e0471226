//! Too many members: choose who leaves, and let all of a deleted group leave.

use super::{
    DeleteReason, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    drain::{self, SendOff, SentOff},
    members::{Crew, Entry, Standing},
};
use crate::{instance::DrainReason, victims};

/// Whether somebody begins to drain with this plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drains {
    Nobody,
    Somebody,
}

impl Drains {
    pub(super) fn note(&mut self, sent: SentOff) {
        if sent == SentOff::Draining {
            *self = Self::Somebody;
        }
    }
}

/// Removes what is above `size + surge`; says whether there was anything. Whom the operator named goes even if the
/// surge would cover it.
pub(super) fn shrink(
    scene: Scene<'_>,
    draft: &mut Draft<'_>,
    crew: &mut Crew<'_>,
    size: u32,
    surge: u32,
    drains: &mut Drains,
) -> bool {
    let n_surplus = crew.n_known().saturating_sub(size.saturating_add(surge));
    let n_hintable = crew.n_known().saturating_sub(size);
    if n_hintable == 0 {
        return false;
    }
    let victims = victims::in_order(scene, crew.known());
    let n_hinted = victims.iter().filter(|victim| victim.hinted).count();
    let n_victims = n_hinted.min(to_usize(n_hintable)).max(to_usize(n_surplus));
    for victim in victims.into_iter().take(n_victims) {
        let Entry { id, it, .. } = victim.entry;
        if it.busy.is_some() {
            // Nobody else goes in its place: it is the one whose turn it is.
            crew.linger(id);
            draft.hold(HoldKind::InProgress, "leaves once the effect under way has ended").instance = Some(id);
            continue;
        }
        crew.leave(id);
        let off = SendOff {
            reason: DrainReason::ScaleDown,
            urgency: Urgency::new(Priority::ScaleDown, scene.now, id),
            unused: DeleteReason::ScaleDown,
            replacement: None,
        };
        drains.note(drain::send_off(scene, draft, id, it, off));
    }
    0 < n_victims
}

/// Says so if the members above `limit` are such that nobody may remove them.
pub(super) fn tell_unseen(draft: &mut Draft<'_>, crew: &Crew<'_>, limit: u32) {
    if limit < crew.n_members() {
        draft.hold(
            HoldKind::UncertainMembers,
            format!("{} members cannot be seen, so none of them is removed", crew.n_uncertain()),
        );
    }
}

/// Lets everybody leave: the group was deleted by an explicit word, which names the unseen too.
pub(super) fn dissolve(scene: Scene<'_>, draft: &mut Draft<'_>, crew: &mut Crew<'_>) {
    let all: Vec<_> = crew.members().chain(crew.with(Standing::Silent)).collect();
    for Entry { id, it, .. } in all {
        if it.busy.is_some() {
            draft.hold(HoldKind::InProgress, "leaves once the effect under way has ended").instance = Some(id);
            continue;
        }
        crew.leave(id);
        let off = SendOff {
            reason: DrainReason::GroupDeleted,
            urgency: Urgency::new(Priority::ScaleDown, scene.now, id),
            unused: DeleteReason::GroupDeleted,
            replacement: None,
        };
        drain::send_off(scene, draft, id, it, off);
    }
}

fn to_usize(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}
