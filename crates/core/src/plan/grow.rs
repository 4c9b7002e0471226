//! Too few members: bring back who is leaving for no other reason than size, and make the rest.

use std::time::Duration;

use super::{
    Action, HoldKind, Priority, Scene,
    draft::{Draft, Urgency},
    members::{Crew, Entry, Standing, count},
    replace,
    rollout::{self, After},
    shrink::Drains,
};
use crate::{
    budget,
    ids::InstanceId,
    instance::{CreateReason, DrainReason, Health, Seen},
};

/// Less time than this before its deletion, and an instance is not called back: its drain may end while we write.
const UNDRAIN_MARGIN: Duration = Duration::from_secs(10);

/// A plan is a value in memory. Larger steps than this take several plans, one right after the other.
pub(crate) const MAX_CREATES: u32 = 10_000;

/// An empty slot: how urgently it is to be filled, and what the intent will say.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Slot {
    urgency: Urgency,
    reason: CreateReason,
}

/// Fills the group up to its size, and one above it for a rotation. Says how many slots of the size stay empty because
/// creates are held back.
pub(super) fn grow(
    scene: Scene<'_>,
    draft: &mut Draft<'_>,
    crew: &Crew<'_>,
    size: u32,
    drains: Drains,
    rotation: Rotations,
) -> u32 {
    let n_missing = size.saturating_sub(crew.n_filled());
    if 0 < crew.n_uncertain() && crew.n_known() + crew.n_lingering() < size && crew.n_filled() <= size {
        draft.hold(
            HoldKind::UncertainMembers,
            format!("{} members cannot be seen; they keep their slots", crew.n_uncertain()),
        );
    }
    let mut slots = losses(scene, crew);
    slots.sort_unstable();
    let mut slots: Vec<Slot> = slots
        .into_iter()
        .chain(std::iter::repeat(Slot {
            urgency: Urgency { priority: Priority::ScaleUp, since: scene.now, cause: None },
            reason: CreateReason::ScaleUp,
        }))
        .take(usize::try_from(n_missing.min(MAX_CREATES)).unwrap_or(usize::MAX))
        .collect();

    let returning: Vec<InstanceId> = returning(scene, crew).into_iter().take(slots.len()).collect();
    for (instance, slot) in returning.iter().zip(slots.drain(..returning.len())) {
        draft.act(slot.urgency, Action::CancelDrain { instance: *instance });
    }

    let n_open = count(slots.len());
    if rotation == Rotations::Allowed {
        let after = After { n_open, cancelled: returning, drains };
        if let Some(cause) = rollout::start(scene, draft, crew, size, &after) {
            slots.push(Slot { urgency: cause.urgency, reason: CreateReason::Rotation });
            slots.sort_unstable();
        }
    }
    // Whatever its reason, a new member fills a slot.
    n_open.saturating_sub(count(create(scene, draft, &slots)))
}

/// Whether this group may begin a rotation at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rotations {
    Allowed,
    Held,
}

/// Creates for as many slots as may be filled now, the most urgent first. Says how many.
fn create(scene: Scene<'_>, draft: &mut Draft<'_>, slots: &[Slot]) -> usize {
    if slots.is_empty() {
        return 0;
    }
    let blocks = budget::blocks(scene.shard, scene.view, scene.now);
    for block in &blocks {
        let hold = draft.hold(block.kind(), block.message());
        (hold.since, hold.until) = (Some(block.since()), block.until());
    }
    if !blocks.is_empty() {
        return 0;
    }
    let n_left = budget::creates_left(scene.shard, scene.view);
    let n_made = slots.len().min(usize::try_from(n_left).unwrap_or(usize::MAX));
    for slot in &slots[..n_made] {
        draft.act(slot.urgency, Action::Create { reason: slot.reason });
    }
    if n_made < slots.len() {
        let n_creates = scene.view.window.n_creates;
        let hold = draft.hold(
            HoldKind::Runaway,
            format!("{n_creates} creates in the window, {} more are wanted but not allowed", slots.len() - n_made),
        );
        hold.until = scene.view.window.frees_at;
    }
    n_made
}

/// The slots that losses left: by notice, by death, by silence. Those that drain for one of these reasons stand for
/// replacements that failed: their slot is as urgent as before.
fn losses(scene: Scene<'_>, crew: &Crew<'_>) -> Vec<Slot> {
    let fresh = [Standing::Noticed, Standing::Dead, Standing::Silent]
        .into_iter()
        .flat_map(|standing| crew.with(standing))
        .map(|entry| replace::urgency(&entry));
    let draining = crew.with(Standing::Draining).filter_map(|entry| {
        let drain = entry.it.drain.as_ref()?;
        let lost = matches!(drain.reason, DrainReason::SpotTerminating | DrainReason::Unhealthy);
        lost.then(|| Urgency::new(super::drain::priority(drain.reason), scene.now, entry.id))
    });
    fresh
        .chain(draining)
        .chain(crew.vacated.iter().copied())
        .map(|urgency| Slot { urgency, reason: CreateReason::Replacement })
        .collect()
}

/// Who can be called back: drained only for size, still well and wanted, and not yet on the threshold. The last to
/// have begun comes first, for least of its work has moved away.
fn returning(scene: Scene<'_>, crew: &Crew<'_>) -> Vec<InstanceId> {
    let mut back: Vec<_> = crew
        .with(Standing::Draining)
        .filter_map(|entry| {
            let drain = entry.it.drain.as_ref()?;
            let for_size = matches!(drain.reason, DrainReason::ScaleDown | DrainReason::GroupDeleted);
            let in_time = scene.now.plus(UNDRAIN_MARGIN) <= drain.delete_at;
            (for_size && in_time && !drain.acked && is_welcome(scene, &entry))
                .then_some((std::cmp::Reverse(drain.started_at), entry.id))
        })
        .collect();
    back.sort_unstable();
    back.into_iter().map(|(_, id)| id).collect()
}

fn is_welcome(scene: Scene<'_>, entry: &Entry<'_>) -> bool {
    let Entry { id, it, .. } = entry;
    let is_well = it.health == Health::Healthy && it.seen == Seen::Running && it.registered_at.is_some();
    let is_wanted = !scene.is_drifted(it)
        && it.replace_marked_at.is_none()
        && it.advised_at.is_none()
        && super::expiry::cause(scene, entry).is_none()
        && !scene.view.victims.contains(id);
    is_well && is_wanted && it.busy.is_none()
}
