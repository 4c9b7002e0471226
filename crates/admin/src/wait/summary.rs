//! The progress of all shards towards a goal, as lines, and whether it is reached. Pure.

use std::{collections::BTreeSet, time::Duration};

use nstance_client::goal::{Goal, GoalFailure, GoalState, GoalUpdate, is_fully_ready};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{GroupStatus, InstanceStatusResponse};

use super::progress::Changes;
use crate::words;

pub(super) struct Summary {
    goal: Goal,
    rows: Vec<Row>,
    /// Holds and errors that were written already.
    reported: BTreeSet<String>,
}

struct Row {
    shard: String,
    state: Option<GoalState>,
    /// The line that was written last.
    last_line: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Open,
    Reached,
    /// It will never be reached.
    Failed(GoalFailure),
}

/// What is missing for the goal.
pub(super) struct Missing {
    /// One per shard.
    pub(super) descriptions: Vec<String>,
    pub(super) instances: Vec<String>,
}

impl Summary {
    pub(super) fn new(goal: Goal, shards: &[String]) -> Self {
        let row = |shard: &String| Row { shard: shard.clone(), state: None, last_line: String::new() };
        Self { goal, rows: shards.iter().map(row).collect(), reported: BTreeSet::new() }
    }

    pub(super) fn apply(&mut self, update: GoalUpdate, now: Timestamp) -> Changes {
        let mut changes = Changes::default();
        match update {
            GoalUpdate::Problem { shard, message } => {
                let line = format!("error  {shard}  {message}");
                if self.reported.insert(line.clone()) {
                    changes.problems.push(line);
                }
            }
            GoalUpdate::State { shard, state } => {
                for hold in state.group.iter().flat_map(|group| &group.holds) {
                    let line = format!("hold  {shard}  {}: {}", hold.kind, hold.message);
                    if self.reported.insert(line.clone()) {
                        changes.problems.push(line);
                    }
                }
                let goal = self.goal.clone();
                if let Some(row) = self.rows.iter_mut().find(|row| row.shard == shard) {
                    let line = line(&goal, &shard, &state, None, now);
                    if line != row.last_line {
                        changes.states.push(line.clone());
                        row.last_line = line;
                    }
                    row.state = Some(*state);
                }
            }
        }
        changes
    }

    /// One line per shard, with elapsed times.
    pub(super) fn lines(&self, elapsed: Duration, now: Timestamp) -> Vec<String> {
        let line = |row: &Row| match &row.state {
            Some(state) => line(&self.goal, &row.shard, state, Some(elapsed), now),
            None => format!("{}  {}  connecting  {}", self.goal.subject(), row.shard, words::clock(elapsed)),
        };
        self.rows.iter().map(line).collect()
    }

    pub(super) fn outcome(&self) -> Outcome {
        let failure = |row: &Row| row.state.as_ref()?.failure(&self.goal, &row.shard);
        if let Some(why) = self.rows.iter().find_map(failure) {
            return Outcome::Failed(why);
        }
        let reached = |row: &Row| row.state.as_ref().is_some_and(|state| state.reaches(&self.goal));
        if self.rows.iter().all(reached) { Outcome::Reached } else { Outcome::Open }
    }

    pub(super) fn missing(&self) -> Missing {
        let mut missing = Missing { descriptions: Vec::new(), instances: Vec::new() };
        for row in &self.rows {
            match &row.state {
                None => missing.descriptions.push(format!("{} did not answer", row.shard)),
                Some(state) if state.reaches(&self.goal) => {}
                Some(state) => {
                    missing.descriptions.push(row.last_line.split("  ").collect::<Vec<_>>().join(" "));
                    let open =
                        state.instances.values().filter(|it| !matches!(it.status.as_str(), "running" | "deleted"));
                    missing.instances.extend(open.map(|it| it.instance_id.clone()));
                }
            }
        }
        missing
    }
}

/// `workers  dev-1  3/5 ready  1 booting (cloud-init 12s)  1 creating  00:17`; without elapsed times where it is compared.
fn line(goal: &Goal, shard: &str, state: &GoalState, elapsed: Option<Duration>, now: Timestamp) -> String {
    let mut parts = vec![goal.subject().to_owned(), shard.to_owned()];
    match goal {
        Goal::GroupReady(_) | Goal::GroupDeleted(_) => parts.extend(of_group(state, elapsed.is_some(), now)),
        Goal::InstanceRunning(id) | Goal::InstanceDeleted(id) => {
            parts.extend(of_instance(state.instances.get(id), elapsed.is_some(), now));
        }
    }
    parts.extend(elapsed.map(words::clock));
    parts.join("  ")
}

fn of_group(state: &GoalState, with_times: bool, now: Timestamp) -> Vec<String> {
    let Some(group) = &state.group else { return vec!["gone".to_owned()] };
    group_progress(group, &state.instances.values().collect::<Vec<_>>(), with_times, now)
}

/// `3/5 ready`, and the phases of the instances that are not ready yet.
pub(crate) fn group_progress(
    group: &GroupStatus,
    instances: &[&InstanceStatusResponse],
    with_times: bool,
    now: Timestamp,
) -> Vec<String> {
    let mut parts = if group.deleting {
        vec!["being deleted".to_owned()]
    } else {
        vec![format!("{}/{} ready", group.ready_size, group.size)]
    };
    let with = |status: &str| instances.iter().filter(|it| it.status == status).count();
    let count = |n: usize, word: &str| (0 < n).then(|| format!("{n} {word}"));
    // Groups and instances come over separate streams, so one may be ahead of the other.
    if !is_fully_ready(group) {
        let well = instances.iter().filter(|it| it.status == "running" && it.health != "unhealthy").count();
        let ready = usize::try_from(group.ready_size).unwrap_or_default();
        parts.extend(count(well.saturating_sub(ready), "registered"));
        let mut booting = instances.iter().filter(|it| it.status == "provisioning");
        let stage = booting.find_map(|it| stage(it, with_times, now)).map(|it| format!(" ({it})"));
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

/// The boot stage that runs, if the machine reports one.
fn stage(it: &InstanceStatusResponse, with_times: bool, now: Timestamp) -> Option<String> {
    let stages = &it.boot.as_ref()?.stages;
    let stage = stages.iter().rev().find(|stage| stage.state == "running")?;
    let since = words::age(stage.started.as_ref(), now);
    Some(if with_times && !since.is_empty() { format!("{} {since}", stage.name) } else { stage.name.clone() })
}

fn of_instance(instance: Option<&InstanceStatusResponse>, with_times: bool, now: Timestamp) -> Vec<String> {
    let Some(it) = instance else { return vec!["gone".to_owned()] };
    let mut parts = vec![it.status.clone()];
    parts.extend(stage(it, with_times, now));
    if let Some(drain) = it.drain.as_ref().filter(|_| it.status == "draining") {
        let waits = if drain.acked_at.is_some() { "acknowledged" } else { "waits for an acknowledgement" };
        let left = words::left(drain.delete_at.as_ref(), now);
        let until = if with_times { format!(", deleted in {left} at the latest") } else { String::new() };
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

    fn update(shard: &str, group: Option<GroupStatus>, instances: Vec<InstanceStatusResponse>) -> GoalUpdate {
        let instances = instances.into_iter().map(|it| (it.instance_id.clone(), it)).collect();
        GoalUpdate::State { shard: shard.into(), state: Box::new(GoalState { complete: true, group, instances }) }
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
    fn group_is_done_when_all_are_ready_and_none_is_leaving() {
        let mut summary = Summary::new(Goal::GroupReady("workers".into()), &["a".into(), "b".into()]);
        let (three, five) = (Duration::from_secs(3), Duration::from_secs(77));
        assert_eq!(summary.lines(three, NOW), ["workers  a  connecting  00:03", "workers  b  connecting  00:03"]);
        let starting = vec![booting("i1"), instance("i2", "pending")];
        let changes = summary.apply(update("a", Some(group(5, 3, 5)), starting.clone()), NOW);
        assert_eq!(changes.states, ["workers  a  3/5 ready  1 booting (cloud-init)  1 creating"]);
        assert_eq!(summary.lines(five, NOW)[0], "workers  a  3/5 ready  1 booting (cloud-init 12s)  1 creating  01:17");
        assert_eq!(
            summary.apply(update("a", Some(group(5, 3, 5)), starting), NOW),
            Changes::default(),
            "nothing changed"
        );
        assert_eq!(
            summary.missing().descriptions,
            ["workers a 3/5 ready 1 booting (cloud-init) 1 creating", "b did not answer"]
        );
        assert_eq!(summary.missing().instances, ["i1", "i2"]);
        summary.apply(update("b", Some(group(0, 0, 0)), vec![]), NOW);
        assert_eq!(summary.outcome(), Outcome::Open);
        let leaving = GroupStatus { draining_size: 1, ..group(5, 5, 5) };
        summary.apply(update("a", Some(leaving), vec![instance("i0", "draining")]), NOW);
        assert_eq!(summary.outcome(), Outcome::Open, "one is still leaving");
        summary.apply(update("a", Some(group(5, 5, 5)), vec![]), NOW);
        assert_eq!(summary.outcome(), Outcome::Reached);
    }

    /// An instance and its group are updated one after the other, in any order.
    #[test]
    fn no_line_is_written_twice_on_the_way_to_ready() {
        let mut summary = Summary::new(Goal::GroupReady("workers".into()), &["a".into()]);
        let mut lines = |sizes: (i32, i32), statuses: &[&str]| {
            let mut all = vec![instance("i1", "running")];
            all.extend(statuses.iter().map(|status| instance("i2", status)));
            summary.apply(update("a", Some(group(2, sizes.0, sizes.1)), all), NOW).states
        };
        assert_eq!(lines((1, 1), &[]), ["workers  a  1/2 ready"]);
        assert_eq!(lines((1, 2), &[]), [""; 0]);
        assert_eq!(lines((1, 2), &["pending"]), ["workers  a  1/2 ready  1 creating"]);
        assert_eq!(lines((1, 2), &["provisioning"]), ["workers  a  1/2 ready  1 booting"]);
        assert_eq!(lines((1, 2), &["running"]), ["workers  a  1/2 ready  1 registered"]);
        assert_eq!(lines((2, 2), &["running"]), ["workers  a  2/2 ready"]);
        assert_eq!(lines((2, 2), &["provisioning"]), [""; 0], "the group is newer than the instance's last update");
        assert_eq!(summary.outcome(), Outcome::Reached);
    }

    #[test]
    fn holds_and_errors_are_written_once() {
        let mut summary = Summary::new(Goal::GroupReady("workers".into()), &["a".into()]);
        let hold =
            PlanHold { kind: "NoCapacity".into(), message: "all subnets are full".into(), ..PlanHold::default() };
        let held = GroupStatus { holds: vec![hold], ..group(2, 1, 1) };
        let first = summary.apply(update("a", Some(held.clone()), vec![]), NOW);
        assert_eq!(first.problems, ["hold  a  NoCapacity: all subnets are full"]);
        assert_eq!(summary.apply(update("a", Some(held), vec![]), NOW).problems, [""; 0]);
        let problem = || GoalUpdate::Problem { shard: "a".into(), message: "InstanceCreateFailed: quota".into() };
        assert_eq!(summary.apply(problem(), NOW).problems, ["error  a  InstanceCreateFailed: quota"]);
        assert_eq!(summary.apply(problem(), NOW).problems, [""; 0]);
    }

    #[test]
    fn deleted_group_is_gone_with_its_last_instance() {
        let mut summary = Summary::new(Goal::GroupDeleted("workers".into()), &["a".into()]);
        let deleting = GroupStatus { deleting: true, ..group(0, 0, 1) };
        let changes = summary.apply(update("a", Some(deleting), vec![instance("i1", "draining")]), NOW);
        assert_eq!(changes.states, ["workers  a  being deleted  1 draining"]);
        summary.apply(update("a", None, vec![instance("i1", "deleting")]), NOW);
        assert_eq!(summary.outcome(), Outcome::Open);
        summary.apply(update("a", None, vec![instance("i1", "deleted")]), NOW);
        assert_eq!(summary.outcome(), Outcome::Reached);
    }

    #[test]
    fn instance_that_will_never_run_ends_the_waiting() {
        let mut summary = Summary::new(Goal::InstanceRunning("i1".into()), &["a".into()]);
        summary.apply(update("a", None, vec![instance("i1", "pending")]), NOW);
        assert_eq!(summary.outcome(), Outcome::Open);
        let failed = InstanceStatusResponse { failure_message: "no quota".into(), ..instance("i1", "failed") };
        summary.apply(update("a", None, vec![failed]), NOW);
        let Outcome::Failed(why) = summary.outcome() else { panic!("it has not failed") };
        assert_eq!(why.to_string(), "i1 is failed: no quota");
    }
}
