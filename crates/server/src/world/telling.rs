//! Watchers are told what changed of an instance, under the world's lock and so in the order of the changes.

use std::time::Duration;

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Health, Phase},
    time::Timestamp,
};

use super::{Entry, State, is_dead};
use crate::watch::{Standing, Told};

/// A short loss is no illness: most agents that are lost come back.
pub(super) const LOST_IS_ILL_AFTER: Duration = Duration::from_secs(10);

impl State {
    pub(super) fn standing(&self, instance: InstanceId) -> Option<Standing> {
        // Nobody to tell, before the term has begun.
        self.feed.as_ref()?;
        self.entries.get(&instance).map(|entry| Standing::of(entry))
    }

    /// Tells what is new of an instance since `before`.
    pub(super) fn tell_change(&self, instance: InstanceId, before: Option<&Standing>) {
        let (Some(feed), Some(entry)) = (&self.feed, self.entries.get(&instance)) else { return };
        if let Some(told) = Standing::of(entry).news(before) {
            feed.tell(self, entry, told);
        }
    }

    /// Tells the end of an instance that leaves memory without having been told as deleted.
    pub(super) fn tell_end(&self, entry: &Entry) {
        if let Some(feed) = &self.feed
            && Standing::of(entry).told != Told::Deleted
        {
            feed.tell(self, entry, Told::Deleted);
        }
    }

    /// Notes who of a group is ill, and who is well again.
    pub fn judge_health(&mut self, group: &GroupRef, now: Timestamp) {
        let Some(living) = self.groups.get(group).map(|it| &it.living) else { return };
        let judged: Vec<_> = living
            .iter()
            .filter_map(|id| {
                let entry = self.entries.get(id)?;
                let ill_since = entry.is_ill_since(self, now);
                (ill_since.is_some() != entry.ill_since.is_some()).then_some((*id, ill_since))
            })
            .collect();
        for (id, ill_since) in judged {
            let before = self.standing(id);
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.ill_since = ill_since;
            }
            self.tell_change(id, before.as_ref());
        }
    }
}

impl Entry {
    /// Since when a VM in use, or about to be, is dead or not heard of.
    fn is_ill_since(&self, state: &State, now: Timestamp) -> Option<Timestamp> {
        if !matches!(self.phase(), Phase::Provisioning | Phase::Running) {
            return None;
        }
        if is_dead(self.seen) {
            return Some(self.seen_since.unwrap_or(now));
        }
        match self.health(state, now) {
            Health::Silent { since } => Some(since),
            Health::Lost { since } => (since.plus(LOST_IS_ILL_AFTER) <= now).then_some(since),
            Health::Starting | Health::Healthy | Health::Terminating { .. } => None,
        }
    }
}
