//! Whether the picture of a shard has in it what was changed through this process. Pure.
//!
//! A shard answers a change before its streams tell what came of it. So changes are counted, and a part of the picture is
//! good for readers only if it includes all of them. Two rules of the shard carry this. What a stream tells after a token
//! was looked at after that token was given. And an instance is told before the change of it is answered, while a group
//! may be told a little later: so of groups a list must be read, of instances it is enough to wait for the token.

use std::collections::BTreeMap;

use super::position::Position;

#[derive(Debug, Default)]
pub(super) struct Reach {
    /// Changes that were answered, or given up.
    writes: u64,
    /// How many of them the picture's groups include.
    groups: u64,
    /// How many of them the picture's instances include.
    instances: u64,
    /// Once the stream of instances is here, they include so many.
    awaited: Option<(Position, u64)>,
    /// Where the stream of instances is.
    instances_at: Option<Position>,
    /// A list of groups was read that is newer than what their stream tells up to here.
    listed_at: Option<Position>,
    /// What the stream told of single groups after that, their end included.
    told: BTreeMap<String, Position>,
}

impl Reach {
    pub(super) fn writes(&self) -> u64 {
        self.writes
    }

    /// Something was changed, or may have been.
    pub(super) fn wrote(&mut self) {
        self.writes += 1;
    }

    pub(super) fn has_groups(&self) -> bool {
        self.groups == self.writes
    }

    pub(super) fn has_instances(&self) -> bool {
        self.instances == self.writes
    }

    /// A whole picture came, whose making began when there were so many writes. The stream of instances goes on from here.
    pub(super) fn whole(&mut self, writes: u64, instances_at: Option<Position>) {
        *self = Self { writes: self.writes, groups: writes, instances: writes, instances_at, ..Self::default() };
    }

    /// The stream tells a group, or its end. Answers whether that is news.
    pub(super) fn group(&mut self, key: &str, at: Option<Position>) -> bool {
        let Some(at) = at else { return true };
        if self.listed_at.is_some_and(|listed| at <= listed) {
            return false;
        }
        self.told.insert(key.to_owned(), at);
        true
    }

    /// Whether a list of groups that was asked for when there were so many writes includes all that the picture does.
    pub(super) fn is_of_use(&self, writes: u64) -> bool {
        self.groups <= writes
    }

    /// A list of groups was read with this token, and asked for when there were so many writes. What the stream told later
    /// of a group is newer than the list: `is_newer` says of which ones.
    pub(super) fn listed(&mut self, writes: u64, at: Position) {
        self.listed_at = self.listed_at.max(Some(at));
        self.groups = self.groups.max(writes);
        let listed_at = self.listed_at;
        self.told.retain(|_, told| listed_at < Some(*told));
    }

    /// Whether the stream told the group after this token.
    pub(super) fn is_newer(&self, key: &str, than: Position) -> bool {
        self.told.get(key).is_some_and(|told| than < *told) || self.listed_at.is_some_and(|listed| than < listed)
    }

    /// The stream of instances is here.
    pub(super) fn instance(&mut self, at: Option<Position>) {
        self.instances_at = self.instances_at.max(at);
        if let Some((_, writes)) = self.awaited.take_if(|(awaited, _)| Some(*awaited) <= at) {
            self.instances = self.instances.max(writes);
        }
    }

    /// A token of the stream of instances was given, and asked for when there were so many writes.
    pub(super) fn await_instances(&mut self, writes: u64, at: Position) {
        if Some(at) <= self.instances_at {
            self.instances = self.instances.max(writes);
        } else if self.awaited.is_none_or(|(_, awaited)| awaited < writes) {
            self.awaited = Some((at, writes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Option<Position> {
        Position::parse(text)
    }

    #[test]
    fn after_a_write_groups_are_known_by_a_list_that_was_asked_for_later() {
        let mut reach = Reach::default();
        reach.whole(0, at("7-0"));
        assert!(reach.has_groups());
        let before = reach.writes();
        reach.wrote();
        assert!(!reach.has_groups());
        reach.listed(before, at("7-4").unwrap());
        assert!(!reach.has_groups(), "asked for before the write was answered");
        reach.listed(reach.writes(), at("7-5").unwrap());
        assert!(reach.has_groups());
        assert!(!reach.is_of_use(before), "one that was overtaken takes nothing back");
        assert!(!reach.group("web", at("7-5")), "on its way since before the list");
        assert!(reach.group("web", at("7-6")));
    }

    #[test]
    fn a_list_that_comes_late_takes_nothing_back() {
        let mut reach = Reach::default();
        reach.whole(0, None);
        assert!(reach.group("web", at("7-6")) && reach.group("db", at("7-3")));
        let list = at("7-4").unwrap();
        assert!(reach.is_newer("web", list) && !reach.is_newer("db", list) && !reach.is_newer("other", list));
        reach.listed(0, list);
        assert!(reach.is_newer("web", list), "still");
        assert!(reach.is_newer("db", at("7-2").unwrap()), "a list before that list is older than it");
    }

    #[test]
    fn instances_are_known_once_their_stream_has_passed_a_later_token() {
        let mut reach = Reach::default();
        reach.whole(0, at("7-2"));
        reach.wrote();
        reach.await_instances(reach.writes(), at("7-4").unwrap());
        reach.instance(at("7-3"));
        assert!(!reach.has_instances());
        reach.instance(at("7-4"));
        assert!(reach.has_instances());
        reach.wrote();
        reach.await_instances(reach.writes(), at("7-4").unwrap());
        assert!(reach.has_instances(), "nothing was told since");
    }

    #[test]
    fn a_whole_picture_includes_only_what_was_written_before_it_was_begun() {
        let mut reach = Reach::default();
        let begun = reach.writes();
        reach.wrote();
        reach.whole(begun, at("8-1"));
        assert!(!reach.has_groups() && !reach.has_instances());
        reach.whole(reach.writes(), at("8-1"));
        assert!(reach.has_groups() && reach.has_instances());
    }
}
