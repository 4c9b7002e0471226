//! Statuses of groups for watchers. A status is computed only while somebody watches, no oftener than four times a
//! second per group, and told if it differs from what was told last. The last value is always told: a group stays
//! marked until it was looked at.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nstance_core::{
    ids::{GroupRef, Tenant},
    time::Mono,
};
use nstance_proto::v1::{self, group_event::Type};
use tokio::sync::Notify;

use super::{Chunks, GroupKind};
use crate::{service::status, term::Term};

/// Four a second.
const PACE: Duration = Duration::from_millis(250);

#[derive(Default)]
pub struct GroupMemory {
    state: Mutex<Memory>,
    changed: Notify,
    turn: Mutex<()>,
}

#[derive(Default)]
struct Memory {
    /// Groups whose status may differ from what was told.
    marked: BTreeSet<GroupRef>,
    told: BTreeMap<GroupRef, Told>,
}

struct Told {
    /// `None`: not everybody holds the same, so that the next one is told whatever it is.
    status: Option<v1::GroupStatus>,
    at: Option<Mono>,
}

impl GroupMemory {
    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at groups and tells or shows what is seen, one at a time. So what is told after a token was given was also
    /// looked at after it: whoever was shown a list is never told something older than it. Comes before all other locks.
    pub fn in_turn<T>(&self, look_and_tell: impl FnOnce() -> T) -> T {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        look_and_tell()
    }

    /// Something happened in a group.
    pub fn mark(&self, group: &GroupRef) {
        self.lock().marked.insert(group.clone());
        self.changed.notify_one();
    }

    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// There is a new watcher to care for.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Somebody was shown these beside the log, by a list or a snapshot. Where that is not what was told last, the
    /// next status must be told even if it is the old one again.
    pub fn show(&self, groups: &[v1::GroupStatus]) {
        let mut memory = self.lock();
        for status in groups {
            let Some(group) = group_ref(status) else { continue };
            let told =
                memory.told.entry(group.clone()).or_insert_with(|| Told { status: Some(status.clone()), at: None });
            if told.status.as_ref() != Some(status) {
                told.status = None;
                memory.marked.insert(group);
            }
        }
        drop(memory);
        self.changed.notify_one();
    }

    /// Groups to look at now, and when the next one is due.
    pub fn due(&self, watched: impl Fn(&Tenant) -> bool, now: Mono) -> (Vec<GroupRef>, Option<Duration>) {
        let mut memory = self.lock();
        let Memory { marked, told } = &mut *memory;
        let (mut due, mut next) = (Vec::new(), None);
        marked.retain(|group| {
            if !watched(&group.tenant) {
                return true;
            }
            let at = told.get(group).and_then(|told| told.at);
            let left = at.map_or(Duration::ZERO, |at| PACE.saturating_sub(now.since(at)));
            if left.is_zero() {
                due.push(group.clone());
                return false;
            }
            next = Some(next.map_or(left, |next: Duration| next.min(left)));
            true
        });
        (due, next)
    }

    /// What is to be told of a group that looks like this now; `None` is a group that is no more.
    pub fn tell(&self, group: &GroupRef, status: Option<v1::GroupStatus>, now: Mono) -> Option<v1::GroupEvent> {
        let mut memory = self.lock();
        let Some(status) = status else {
            memory.told.remove(group)?;
            let named = v1::GroupStatus {
                key: group.group.to_string(),
                tenant: group.tenant.to_string(),
                ..v1::GroupStatus::default()
            };
            return Some(event(Type::Delete, Some(named), false));
        };
        let told = memory.told.entry(group.clone()).or_insert(Told { status: None, at: None });
        if told.status.as_ref() == Some(&status) {
            return None;
        }
        *told = Told { status: Some(status.clone()), at: Some(now) };
        Some(event(Type::Upsert, Some(status), false))
    }
}

fn group_ref(status: &v1::GroupStatus) -> Option<GroupRef> {
    Some(GroupRef::new(status.tenant.parse().ok()?, status.key.parse().ok()?))
}

fn event(kind: Type, group: Option<v1::GroupStatus>, snapshot: bool) -> v1::GroupEvent {
    v1::GroupEvent { r#type: kind.into(), group, resume_token: String::new(), snapshot }
}

/// All groups of a tenant, then the end marker. Made at once: a shard has few groups, and their counts take one look at
/// the world for all of them.
pub fn snapshot(term: Arc<Term>, tenant: Tenant) -> Chunks<GroupKind> {
    let mut told = false;
    Box::new(move |slot| {
        if std::mem::replace(&mut told, true) {
            return None;
        }
        let (groups, resume_token) = term.watches.group_memory.in_turn(|| {
            let groups = status::groups(&term, &tenant);
            term.watches.group_memory.show(&groups);
            (groups, term.watches.groups.token_of(&tenant, slot))
        });
        let mut events: Vec<_> = groups.into_iter().map(|group| event(Type::Upsert, Some(group), true)).collect();
        events.push(v1::GroupEvent { resume_token, ..event(Type::SnapshotEnd, None, true) });
        Some(events)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI32, Ordering};

    use super::*;

    fn web(actual_size: i32) -> v1::GroupStatus {
        let (key, tenant) = ("web".to_owned(), "default".to_owned());
        v1::GroupStatus { key, tenant, actual_size, ..v1::GroupStatus::default() }
    }

    fn group() -> GroupRef {
        group_ref(&web(0)).unwrap()
    }

    fn at(millis: u64) -> Mono {
        Mono::from_start(Duration::from_millis(millis))
    }

    #[test]
    fn a_group_is_told_four_times_a_second_and_its_last_value_always() {
        let memory = GroupMemory::default();
        let (mut told, mut now) = (Vec::new(), 0);
        // A change every 10 ms for a second, and a look whenever one is due.
        while now < 2000 {
            if now < 1000 {
                memory.mark(&group());
            }
            let (due, next) = memory.due(|_| true, at(now));
            assert!(next.is_none_or(|next| next <= PACE));
            for group in due {
                let status = web(i32::try_from(now.min(1000)).unwrap());
                told.extend(memory.tell(&group, Some(status), at(now)));
            }
            now += 10;
        }
        let sizes: Vec<i32> = told.into_iter().map(|event| event.group.unwrap().actual_size).collect();
        assert_eq!(sizes, [0, 250, 500, 750, 1000]);
    }

    #[test]
    fn what_did_not_change_is_not_told() {
        let memory = GroupMemory::default();
        assert!(memory.tell(&group(), Some(web(1)), at(0)).is_some());
        assert!(memory.tell(&group(), Some(web(1)), at(500)).is_none());
    }

    #[test]
    fn a_group_waits_marked_until_somebody_watches() {
        let memory = GroupMemory::default();
        memory.mark(&group());
        assert_eq!(memory.due(|_| false, at(0)), (vec![], None));
        assert_eq!(memory.due(|_| true, at(0)), (vec![group()], None));
        assert_eq!(memory.due(|_| true, at(0)), (vec![], None), "looked at once");
    }

    #[test]
    fn a_state_that_comes_back_is_told_to_who_was_shown_another() {
        let memory = GroupMemory::default();
        memory.show(&[web(1)]);
        assert_eq!(memory.due(|_| true, at(0)), (vec![], None), "all hold what is");
        // A list shows what no event told yet.
        memory.show(&[web(2)]);
        assert_eq!(memory.due(|_| true, at(0)).0, [group()]);
        let back = memory.tell(&group(), Some(web(1)), at(0)).unwrap();
        assert_eq!(back.group.unwrap().actual_size, 1);
    }

    #[test]
    fn the_end_of_a_group_is_told_once_and_names_it_only() {
        let memory = GroupMemory::default();
        memory.show(&[web(1)]);
        let end = memory.tell(&group(), None, at(0)).unwrap();
        assert_eq!((end.r#type(), end.group.unwrap()), (Type::Delete, web(0)));
        assert!(memory.tell(&group(), None, at(500)).is_none());
    }

    #[test]
    fn whoever_was_shown_a_list_is_told_nothing_older() {
        let (memory, world, log) = (GroupMemory::default(), AtomicI32::new(0), Mutex::new(Vec::new()));
        let lists = std::thread::scope(|scope| {
            scope.spawn(|| (0..20_000).for_each(|n| world.store(n, Ordering::SeqCst)));
            scope.spawn(|| {
                for _ in 0..2000 {
                    memory.in_turn(|| {
                        let seen = world.load(Ordering::SeqCst);
                        std::thread::yield_now();
                        log.lock().unwrap().push(seen);
                    });
                }
            });
            let list = || memory.in_turn(|| (log.lock().unwrap().len(), world.load(Ordering::SeqCst)));
            (0..2000).map(|_| list()).collect::<Vec<(usize, i32)>>()
        });
        let log = log.into_inner().unwrap();
        for (token, seen) in lists {
            assert!(log[..token].iter().all(|told| *told <= seen) && log[token..].iter().all(|told| seen <= *told));
        }
    }
}
