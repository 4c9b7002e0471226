//! Whether the known state of a shard includes what was changed through this process (read your own writes). Pure.
//!
//! A shard answers a change before its streams report the result. So changes are counted, and a part of the state may be
//! shown to readers only if it includes all of them. Two guarantees of the server make this possible. What a stream reports
//! after a token was read from the state after that token was given. And a change of an instance is reported before it is
//! answered, while a group may be reported a little later. So groups need a new list; for instances it is enough to wait
//! until their stream has passed a later token.

use std::collections::BTreeMap;

use crate::ResumeToken;

/// Counts the changes made to one shard, and how many of them its known groups and instances include.
#[derive(Debug, Default)]
pub(super) struct OwnWrites {
    /// Changes that were answered or given up.
    n_writes: u64,
    /// How many of them the known groups include.
    n_in_groups: u64,
    /// How many of them the known instances include.
    n_in_instances: u64,
    /// Once the stream of instances has reached this token, the instances include this many.
    awaited: Option<(ResumeToken, u64)>,
    /// The last token of the stream of instances.
    instances_at: Option<ResumeToken>,
    /// The token of the newest list of groups. What the stream reports up to here is older than that list.
    listed_at: Option<ResumeToken>,
    /// Single groups that the stream reported later than that list, deleted ones included.
    streamed: BTreeMap<String, ResumeToken>,
}

impl OwnWrites {
    pub(super) fn n_writes(&self) -> u64 {
        self.n_writes
    }

    /// Something was changed, or may have been.
    pub(super) fn record_write(&mut self) {
        self.n_writes += 1;
    }

    pub(super) fn groups_include_all(&self) -> bool {
        self.n_in_groups == self.n_writes
    }

    pub(super) fn instances_include_all(&self) -> bool {
        self.n_in_instances == self.n_writes
    }

    /// A complete snapshot arrived. `n_writes` changes were answered before it was requested; the stream of instances
    /// continues after the token.
    pub(super) fn apply_snapshot(&mut self, n_writes: u64, instances_at: Option<ResumeToken>) {
        let all = self.n_writes;
        *self =
            Self { n_writes: all, n_in_groups: n_writes, n_in_instances: n_writes, instances_at, ..Self::default() };
    }

    /// The stream reported a group or its deletion. Answers whether it is newer than what is known.
    pub(super) fn apply_streamed_group(&mut self, key: &str, at: Option<ResumeToken>) -> bool {
        let Some(at) = at else { return true };
        if self.listed_at.is_some_and(|listed| at <= listed) {
            return false;
        }
        self.streamed.insert(key.to_owned(), at);
        true
    }

    /// Whether a list of groups, requested after `n_writes` changes, includes all changes that the known groups include.
    pub(super) fn is_list_usable(&self, n_writes: u64) -> bool {
        self.n_in_groups <= n_writes
    }

    /// A list of groups with this token arrived, requested after `n_writes` changes.
    pub(super) fn apply_group_list(&mut self, n_writes: u64, at: ResumeToken) {
        self.listed_at = self.listed_at.max(Some(at));
        self.n_in_groups = self.n_in_groups.max(n_writes);
        let listed_at = self.listed_at;
        self.streamed.retain(|_, streamed| listed_at < Some(*streamed));
    }

    /// Whether what is known of this group is newer than a list with this token.
    pub(super) fn is_group_newer(&self, key: &str, than: ResumeToken) -> bool {
        self.streamed.get(key).is_some_and(|streamed| than < *streamed)
            || self.listed_at.is_some_and(|listed| than < listed)
    }

    /// The stream of instances has reached this token.
    pub(super) fn apply_instances_token(&mut self, at: Option<ResumeToken>) {
        self.instances_at = self.instances_at.max(at);
        if let Some((_, n_writes)) = self.awaited.take_if(|(awaited, _)| Some(*awaited) <= at) {
            self.n_in_instances = self.n_in_instances.max(n_writes);
        }
    }

    /// A request, sent after `n_writes` changes, was answered with this token of the stream of instances.
    pub(super) fn await_instances(&mut self, n_writes: u64, at: ResumeToken) {
        if Some(at) <= self.instances_at {
            self.n_in_instances = self.n_in_instances.max(n_writes);
        } else if self.awaited.is_none_or(|(_, awaited)| awaited < n_writes) {
            self.awaited = Some((at, n_writes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Option<ResumeToken> {
        ResumeToken::parse(text)
    }

    #[test]
    fn after_a_write_groups_are_complete_with_a_list_that_was_requested_later() {
        let mut writes = OwnWrites::default();
        writes.apply_snapshot(0, at("7-0"));
        assert!(writes.groups_include_all());
        let before = writes.n_writes();
        writes.record_write();
        assert!(!writes.groups_include_all());
        writes.apply_group_list(before, at("7-4").unwrap());
        assert!(!writes.groups_include_all(), "requested before the write was answered");
        writes.apply_group_list(writes.n_writes(), at("7-5").unwrap());
        assert!(writes.groups_include_all());
        assert!(!writes.is_list_usable(before), "a list requested earlier must not undo this one");
        assert!(!writes.apply_streamed_group("web", at("7-5")), "sent before the list");
        assert!(writes.apply_streamed_group("web", at("7-6")));
    }

    #[test]
    fn a_late_list_does_not_replace_newer_groups() {
        let mut writes = OwnWrites::default();
        writes.apply_snapshot(0, None);
        assert!(writes.apply_streamed_group("web", at("7-6")) && writes.apply_streamed_group("db", at("7-3")));
        let list = at("7-4").unwrap();
        assert!(writes.is_group_newer("web", list));
        assert!(!writes.is_group_newer("db", list) && !writes.is_group_newer("other", list));
        writes.apply_group_list(0, list);
        assert!(writes.is_group_newer("web", list), "still");
        assert!(writes.is_group_newer("db", at("7-2").unwrap()), "a list before that list is older than it");
    }

    #[test]
    fn instances_are_complete_once_their_stream_has_passed_a_later_token() {
        let mut writes = OwnWrites::default();
        writes.apply_snapshot(0, at("7-2"));
        writes.record_write();
        writes.await_instances(writes.n_writes(), at("7-4").unwrap());
        writes.apply_instances_token(at("7-3"));
        assert!(!writes.instances_include_all());
        writes.apply_instances_token(at("7-4"));
        assert!(writes.instances_include_all());
        writes.record_write();
        writes.await_instances(writes.n_writes(), at("7-4").unwrap());
        assert!(writes.instances_include_all(), "nothing was reported since");
    }

    #[test]
    fn a_snapshot_includes_only_what_was_written_before_it_was_requested() {
        let mut writes = OwnWrites::default();
        let requested = writes.n_writes();
        writes.record_write();
        writes.apply_snapshot(requested, at("8-1"));
        assert!(!writes.groups_include_all() && !writes.instances_include_all());
        writes.apply_snapshot(writes.n_writes(), at("8-1"));
        assert!(writes.groups_include_all() && writes.instances_include_all());
    }
}
