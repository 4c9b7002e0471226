//! Whom to remove when there are too many.
//!
//! The order: whom the operator named; whom somebody marked for replacement; the ill; those never in use; the drifted;
//! then the oldest, and for equals the lower id. Members of which nobody knows enough are never victims, which is the
//! caller's part: only known members are passed in.

use std::collections::BTreeSet;

use crate::{
    ids::InstanceId,
    plan::members::{Entry, Scene, may_be_in_use},
    time::Timestamp,
};

/// Smaller goes first: `false` sorts before `true`, hence the negations.
type Rank = (bool, bool, bool, bool, bool, Timestamp, InstanceId);

fn rank(scene: Scene<'_>, hints: &BTreeSet<InstanceId>, entry: &Entry<'_>) -> Rank {
    let Entry { id, it, .. } = entry;
    (
        !hints.contains(id),
        it.replace_marked_at.is_none(),
        !scene.is_unhealthy(it),
        may_be_in_use(it),
        !scene.is_drifted(it),
        it.created_at,
        *id,
    )
}

/// Puts known members into the order in which they go, the first of them named by the operator.
///
/// Hints are a set: how they were listed does not matter.
pub(crate) fn in_order<'a>(scene: Scene<'_>, known: impl Iterator<Item = Entry<'a>>) -> Vec<Victim<'a>> {
    let hints: BTreeSet<InstanceId> = scene.view.victims.iter().copied().collect();
    let mut victims: Vec<_> = known.map(|entry| (rank(scene, &hints, &entry), entry)).collect();
    victims.sort_by_key(|(rank, _)| *rank);
    victims.into_iter().map(|(rank, entry)| Victim { entry, hinted: !rank.0 }).collect()
}

pub(crate) struct Victim<'a> {
    pub(crate) entry: Entry<'a>,
    pub(crate) hinted: bool,
}
