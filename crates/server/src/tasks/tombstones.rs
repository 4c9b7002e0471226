//! Ends tombstones: each is kept a day beyond the last record of its group, for machines that turn up late.
//!
//! When the last record went is not written down anywhere, so a new leader counts from its own beginning: a tombstone
//! may stay longer than a day, never shorter.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use nstance_core::{ids::GroupRef, time::Timestamp};
use nstance_store::records::groups::GroupsFile;

use crate::{service::groups, term::Term};

const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// How often the groups in memory are looked at; the store is asked only when something is due.
const PERIOD: Duration = Duration::from_secs(60 * 60);

pub async fn work(term: Arc<Term>) {
    let mut empty_since = BTreeMap::new();
    loop {
        if let Some(file) = term.groups.file() {
            let now = term.now();
            look(&file, &mut empty_since, |group| is_inhabited(&term, group), now);
            let due = due(&file, &empty_since, now);
            if !due.is_empty() {
                bury(&term, due).await;
            }
        }
        tokio::time::sleep(PERIOD).await;
    }
}

/// Whether a record, or a VM without one, names the group.
fn is_inhabited(term: &Term, group: &GroupRef) -> bool {
    let state = term.world.lock();
    // Before the first complete listing nobody knows who is there.
    !state.complete.listing
        || state.groups.get(group).is_some_and(|it| !it.members.is_empty() || !it.candidates.is_empty())
        || state.corrupt.iter().any(|record| record.group.as_ref().is_none_or(|it| it == group))
}

/// Notes since when nobody names a deleted group any more.
fn look(
    file: &GroupsFile,
    empty_since: &mut BTreeMap<GroupRef, Timestamp>,
    is_inhabited: impl Fn(&GroupRef) -> bool,
    now: Timestamp,
) {
    empty_since.retain(|group, _| file.deleted.contains_key(group) && !is_inhabited(group));
    for group in file.deleted.keys().filter(|group| !is_inhabited(group)) {
        empty_since.entry(group.clone()).or_insert(now);
    }
}

fn due(file: &GroupsFile, empty_since: &BTreeMap<GroupRef, Timestamp>, now: Timestamp) -> BTreeSet<GroupRef> {
    let over = |since: Timestamp| since.plus(KEPT) <= now;
    let tombstones = file.deleted.iter().filter(|(_, tombstone)| over(tombstone.at));
    tombstones
        .filter(|(group, _)| empty_since.get(*group).is_some_and(|since| over(*since)))
        .map(|(group, _)| group.clone())
        .collect()
}

async fn bury(term: &Arc<Term>, due: BTreeSet<GroupRef>) {
    let decide = move |file: &GroupsFile| {
        let mut next = file.clone();
        next.deleted.retain(|group, _| !due.contains(group));
        Ok((next != *file).then_some(next))
    };
    // Tried again with the next look.
    if let Err(refusal) = groups::commit(term, &decide, None).await {
        tracing::warn!(error = %refusal, "tombstones not removed yet");
    }
}

#[cfg(test)]
mod tests {
    use nstance_store::records::groups::{Tombstone, TombstoneReason};

    use super::*;

    fn group() -> GroupRef {
        GroupRef::new("default".parse().unwrap(), "web".parse().unwrap())
    }

    fn at(hours: u64) -> Timestamp {
        Timestamp::EPOCH.plus(Duration::from_secs(hours * 3600))
    }

    fn buried_at(file: &GroupsFile, inhabited_until: u64) -> Option<u64> {
        let mut empty_since = BTreeMap::new();
        (0..100).find(|hour| {
            look(file, &mut empty_since, |_| *hour < inhabited_until, at(*hour));
            !due(file, &empty_since, at(*hour)).is_empty()
        })
    }

    #[test]
    fn a_tombstone_is_kept_a_day_beyond_the_last_record() {
        let tombstone = Tombstone { at: at(1), by: "me".to_owned(), reason: TombstoneReason::Api };
        let mut file = GroupsFile::default();
        assert_eq!(buried_at(&file, 0), None);
        file.deleted.insert(group(), tombstone);
        assert_eq!(buried_at(&file, 5), Some(29));
        assert_eq!(buried_at(&file, 0), Some(25), "a day from the deletion at least");
        assert_eq!(buried_at(&file, 200), None);
    }

    #[test]
    fn a_late_machine_begins_the_day_anew() {
        let tombstone = Tombstone { at: at(0), by: "me".to_owned(), reason: TombstoneReason::Api };
        let file = GroupsFile { deleted: BTreeMap::from([(group(), tombstone)]), ..GroupsFile::default() };
        let mut empty_since = BTreeMap::new();
        look(&file, &mut empty_since, |_| false, at(0));
        look(&file, &mut empty_since, |_| true, at(10));
        look(&file, &mut empty_since, |_| false, at(11));
        assert!(due(&file, &empty_since, at(34)).is_empty());
        assert_eq!(due(&file, &empty_since, at(35)), BTreeSet::from([group()]));
    }
}
