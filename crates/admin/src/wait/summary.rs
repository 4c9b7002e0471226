//! What all shards have of a goal, in lines; and whether it is reached. Pure.

use std::{collections::BTreeSet, time::Duration};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{GroupStatus, InstanceStatusResponse};

use super::{Goal, News, Picture, progress::Changes};
use crate::words;

pub(super) struct Board {
    goal: Goal,
    rows: Vec<Row>,
    /// Holds and errors that were told already.
    told: BTreeSet<String>,
}

struct Row {
    shard: String,
    picture: Option<Picture>,
    last: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum State {
    Open,
    Reached,
    /// It will never be.
    Failed(String),
}

/// What stands between here and the goal.
pub(super) struct Missing {
    pub(super) words: Vec<String>,
    pub(super) instances: Vec<String>,
}

impl Board {
    pub(super) fn new(goal: Goal, shards: &[String]) -> Self {
        let row = |shard: &String| Row { shard: shard.clone(), picture: None, last: String::new() };
        Self { goal, rows: shards.iter().map(row).collect(), told: BTreeSet::new() }
    }

    pub(super) fn take(&mut self, news: News, now: Timestamp) -> Changes {
        let mut changes = Changes::default();
        match news {
            News::Trouble { shard, message } => {
                let line = format!("error  {shard}  {message}");
                if self.told.insert(line.clone()) {
                    changes.troubles.push(line);
                }
            }
            News::Picture { shard, picture } => {
                for hold in picture.group.iter().flat_map(|group| &group.holds) {
                    let line = format!("hold  {shard}  {}: {}", hold.kind, hold.message);
                    if self.told.insert(line.clone()) {
                        changes.troubles.push(line);
                    }
                }
                let goal = self.goal.clone();
                if let Some(row) = self.rows.iter_mut().find(|row| row.shard == shard) {
                    let line = line(&goal, &shard, &picture, None, now);
                    if line != row.last {
                        changes.states.push(line.clone());
                        row.last = line;
                    }
                    row.picture = Some(*picture);
                }
            }
        }
        changes
    }

    /// One line per shard, with running clocks.
    pub(super) fn lines(&self, elapsed: Duration, now: Timestamp) -> Vec<String> {
        let line = |row: &Row| match &row.picture {
            Some(picture) => line(&self.goal, &row.shard, picture, Some(elapsed), now),
            None => format!("{}  {}  connecting  {}", self.goal.subject(), row.shard, words::clock(elapsed)),
        };
        self.rows.iter().map(line).collect()
    }

    pub(super) fn state(&self) -> State {
        if let Some(why) = self.rows.iter().find_map(|row| failure(&self.goal, row)) {
            return State::Failed(why);
        }
        let reached = |row: &Row| row.picture.as_ref().is_some_and(|picture| is_reached(&self.goal, picture));
        if self.rows.iter().all(reached) { State::Reached } else { State::Open }
    }

    pub(super) fn missing(&self) -> Missing {
        let mut missing = Missing { words: Vec::new(), instances: Vec::new() };
        for row in &self.rows {
            match &row.picture {
                None => missing.words.push(format!("{} did not answer", row.shard)),
                Some(picture) if is_reached(&self.goal, picture) => {}
                Some(picture) => {
                    missing.words.push(row.last.split("  ").collect::<Vec<_>>().join(" "));
                    let open =
                        picture.instances.values().filter(|it| !matches!(it.status.as_str(), "running" | "deleted"));
                    missing.instances.extend(open.map(|it| it.instance_id.clone()));
                }
            }
        }
        missing
    }
}

fn is_reached(goal: &Goal, picture: &Picture) -> bool {
    if !picture.complete {
        return false;
    }
    let status = |id: &String| picture.instances.get(id).map(|it| it.status.as_str());
    match goal {
        Goal::Whole(_) => picture.group.as_ref().is_some_and(is_whole),
        Goal::GroupGone(_) => {
            picture.group.is_none()
                && picture.instances.values().all(|it| matches!(it.status.as_str(), "deleted" | "failed"))
        }
        Goal::Running(id) => status(id) == Some("running"),
        Goal::Deleted(id) => matches!(status(id), None | Some("deleted")),
    }
}

fn is_whole(group: &GroupStatus) -> bool {
    has_all(group) && group.draining_size == 0 && !group.deleting
}

fn has_all(group: &GroupStatus) -> bool {
    group.actual_size == group.size && group.ready_size == group.size
}

/// What ends the waiting without the goal.
fn failure(goal: &Goal, row: &Row) -> Option<String> {
    let picture = row.picture.as_ref().filter(|it| it.complete)?;
    match goal {
        Goal::Running(id) => {
            let found = picture.instances.get(id);
            let status = found.map_or("deleted", |it| it.status.as_str());
            let message = found.map(|it| it.failure_message.as_str()).filter(|it| !it.is_empty());
            let because = message.map(|it| format!(": {it}")).unwrap_or_default();
            matches!(status, "failed" | "deleting" | "deleted").then(|| format!("{id} is {status}{because}"))
        }
        Goal::Whole(group) => {
            let deleting = picture.group.as_ref().is_none_or(|it| it.deleting);
            deleting.then(|| format!("group {group} is being deleted in {}", row.shard))
        }
        Goal::GroupGone(_) | Goal::Deleted(_) => None,
    }
}

/// `workers  dev-1  3/5 ready  1 booting (cloud-init 12s)  1 creating  00:17`; without clocks where it is compared.
fn line(goal: &Goal, shard: &str, picture: &Picture, elapsed: Option<Duration>, now: Timestamp) -> String {
    let mut parts = vec![goal.subject().to_owned(), shard.to_owned()];
    match goal {
        Goal::Whole(_) | Goal::GroupGone(_) => parts.extend(of_group(picture, elapsed.is_some(), now)),
        Goal::Running(id) | Goal::Deleted(id) => {
            parts.extend(of_instance(picture.instances.get(id), elapsed.is_some(), now));
        }
    }
    parts.extend(elapsed.map(words::clock));
    parts.join("  ")
}

fn of_group(picture: &Picture, clocks: bool, now: Timestamp) -> Vec<String> {
    let Some(group) = &picture.group else { return vec!["gone".to_owned()] };
    standing(group, &picture.instances.values().collect::<Vec<_>>(), clocks, now)
}

/// `3/5 ready`, and what its instances do on the way there.
pub(crate) fn standing(
    group: &GroupStatus,
    instances: &[&InstanceStatusResponse],
    clocks: bool,
    now: Timestamp,
) -> Vec<String> {
    let mut parts = if group.deleting {
        vec!["being deleted".to_owned()]
    } else {
        vec![format!("{}/{} ready", group.ready_size, group.size)]
    };
    let with = |status: &str| instances.iter().filter(|it| it.status == status).count();
    let count = |n: usize, word: &str| (0 < n).then(|| format!("{n} {word}"));
    // Groups and instances come over streams of their own: who is still on the way in one has arrived in the other.
    if !has_all(group) {
        let well = instances.iter().filter(|it| it.status == "running" && it.health != "unhealthy").count();
        let ready = usize::try_from(group.ready_size).unwrap_or_default();
        parts.extend(count(well.saturating_sub(ready), "registered"));
        let mut booting = instances.iter().filter(|it| it.status == "provisioning");
        let stage = booting.find_map(|it| stage(it, clocks, now)).map(|it| format!(" ({it})"));
        parts.extend(count(with("provisioning"), &format!("booting{}", stage.unwrap_or_default())));
        parts.extend(count(with("pending"), "creating"));
    }
    parts.extend(count(with("draining"), "draining"));
    parts.extend(count(with("deleting"), "deleting"));
    if 0 < group.unhealthy_size {
        parts.push(format!("{} unhealthy", group.unhealthy_size));
    }
    parts
}

/// What the machine does, as far as it tells.
fn stage(it: &InstanceStatusResponse, clocks: bool, now: Timestamp) -> Option<String> {
    let stages = &it.boot.as_ref()?.stages;
    let stage = stages.iter().rev().find(|stage| stage.state == "running")?;
    let since = words::age(stage.started.as_ref(), now);
    Some(if clocks && !since.is_empty() { format!("{} {since}", stage.name) } else { stage.name.clone() })
}

fn of_instance(instance: Option<&InstanceStatusResponse>, clocks: bool, now: Timestamp) -> Vec<String> {
    let Some(it) = instance else { return vec!["gone".to_owned()] };
    let mut parts = vec![it.status.clone()];
    parts.extend(stage(it, clocks, now));
    if let Some(drain) = it.drain.as_ref().filter(|_| it.status == "draining") {
        let waits = if drain.acked_at.is_some() { "acknowledged" } else { "waits for an acknowledgement" };
        let left = words::left(drain.delete_at.as_ref(), now);
        let until = if clocks { format!(", deleted in {left} at the latest") } else { String::new() };
        parts.push(format!("{}: {waits}{until}", drain.reason));
    }
    parts
}

#[cfg(test)]
mod tests {
    use nstance_proto::v1::{BootReport, BootStage, PlanHold};

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000_000);

    fn instance(id: &str, status: &str) -> InstanceStatusResponse {
        InstanceStatusResponse {
            instance_id: id.into(),
            group: "workers".into(),
            status: status.into(),
            ..InstanceStatusResponse::default()
        }
    }

    fn group(size: i32, ready: i32, actual: i32) -> GroupStatus {
        GroupStatus { key: "workers".into(), size, ready_size: ready, actual_size: actual, ..GroupStatus::default() }
    }

    fn told(shard: &str, group: Option<GroupStatus>, instances: Vec<InstanceStatusResponse>) -> News {
        let instances = instances.into_iter().map(|it| (it.instance_id.clone(), it)).collect();
        News::Picture { shard: shard.into(), picture: Box::new(Picture { complete: true, group, instances }) }
    }

    fn booting(id: &str) -> InstanceStatusResponse {
        let started = Some(prost_types::Timestamp { seconds: 988, nanos: 0 });
        let stage = BootStage { name: "cloud-init".into(), state: "running".into(), started, ..BootStage::default() };
        InstanceStatusResponse {
            boot: Some(BootReport { stages: vec![stage], ..BootReport::default() }),
            ..instance(id, "provisioning")
        }
    }

    #[test]
    fn group_is_done_when_all_are_ready_and_nobody_leaves() {
        let mut board = Board::new(Goal::Whole("workers".into()), &["a".into(), "b".into()]);
        let (three, five) = (Duration::from_secs(3), Duration::from_secs(77));
        assert_eq!(board.lines(three, NOW), ["workers  a  connecting  00:03", "workers  b  connecting  00:03"]);
        let starting = vec![booting("i1"), instance("i2", "pending")];
        let changes = board.take(told("a", Some(group(5, 3, 5)), starting.clone()), NOW);
        assert_eq!(changes.states, ["workers  a  3/5 ready  1 booting (cloud-init)  1 creating"]);
        assert_eq!(board.lines(five, NOW)[0], "workers  a  3/5 ready  1 booting (cloud-init 12s)  1 creating  01:17");
        assert_eq!(board.take(told("a", Some(group(5, 3, 5)), starting), NOW), Changes::default(), "nothing changed");
        assert_eq!(
            board.missing().words,
            ["workers a 3/5 ready 1 booting (cloud-init) 1 creating", "b did not answer"]
        );
        assert_eq!(board.missing().instances, ["i1", "i2"]);
        board.take(told("b", Some(group(0, 0, 0)), vec![]), NOW);
        assert_eq!(board.state(), State::Open);
        let leaving = GroupStatus { draining_size: 1, ..group(5, 5, 5) };
        board.take(told("a", Some(leaving), vec![instance("i0", "draining")]), NOW);
        assert_eq!(board.state(), State::Open, "somebody still leaves");
        board.take(told("a", Some(group(5, 5, 5)), vec![]), NOW);
        assert_eq!(board.state(), State::Reached);
    }

    /// The words of an instance and of its group come one after the other, in any order.
    #[test]
    fn no_line_is_told_twice_on_the_way_to_ready() {
        let mut board = Board::new(Goal::Whole("workers".into()), &["a".into()]);
        let mut lines = |sizes: (i32, i32), statuses: &[&str]| {
            let mut all = vec![instance("i1", "running")];
            all.extend(statuses.iter().map(|status| instance("i2", status)));
            board.take(told("a", Some(group(2, sizes.0, sizes.1)), all), NOW).states
        };
        assert_eq!(lines((1, 1), &[]), ["workers  a  1/2 ready"]);
        assert_eq!(lines((1, 2), &[]), [""; 0]);
        assert_eq!(lines((1, 2), &["pending"]), ["workers  a  1/2 ready  1 creating"]);
        assert_eq!(lines((1, 2), &["provisioning"]), ["workers  a  1/2 ready  1 booting"]);
        assert_eq!(lines((1, 2), &["running"]), ["workers  a  1/2 ready  1 registered"]);
        assert_eq!(lines((2, 2), &["running"]), ["workers  a  2/2 ready"]);
        assert_eq!(lines((2, 2), &["provisioning"]), [""; 0], "the group knows more than the instance's last word");
        assert_eq!(board.state(), State::Reached);
    }

    #[test]
    fn holds_and_errors_are_told_once() {
        let mut board = Board::new(Goal::Whole("workers".into()), &["a".into()]);
        let hold =
            PlanHold { kind: "NoCapacity".into(), message: "all subnets are full".into(), ..PlanHold::default() };
        let held = GroupStatus { holds: vec![hold], ..group(2, 1, 1) };
        let first = board.take(told("a", Some(held.clone()), vec![]), NOW);
        assert_eq!(first.troubles, ["hold  a  NoCapacity: all subnets are full"]);
        assert_eq!(board.take(told("a", Some(held), vec![]), NOW).troubles, [""; 0]);
        let trouble = || News::Trouble { shard: "a".into(), message: "InstanceCreateFailed: quota".into() };
        assert_eq!(board.take(trouble(), NOW).troubles, ["error  a  InstanceCreateFailed: quota"]);
        assert_eq!(board.take(trouble(), NOW).troubles, [""; 0]);
    }

    #[test]
    fn deleted_group_is_gone_with_its_last_instance() {
        let mut board = Board::new(Goal::GroupGone("workers".into()), &["a".into()]);
        let deleting = GroupStatus { deleting: true, ..group(0, 0, 1) };
        let changes = board.take(told("a", Some(deleting), vec![instance("i1", "draining")]), NOW);
        assert_eq!(changes.states, ["workers  a  being deleted  1 draining"]);
        board.take(told("a", None, vec![instance("i1", "deleting")]), NOW);
        assert_eq!(board.state(), State::Open);
        board.take(told("a", None, vec![instance("i1", "deleted")]), NOW);
        assert_eq!(board.state(), State::Reached);
    }

    #[test]
    fn instance_that_will_never_run_ends_the_waiting() {
        let mut board = Board::new(Goal::Running("i1".into()), &["a".into()]);
        board.take(told("a", None, vec![instance("i1", "pending")]), NOW);
        assert_eq!(board.state(), State::Open);
        let failed = InstanceStatusResponse { failure_message: "no quota".into(), ..instance("i1", "failed") };
        board.take(told("a", None, vec![failed]), NOW);
        assert_eq!(board.state(), State::Failed("i1 is failed: no quota".into()));
    }
}
