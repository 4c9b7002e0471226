//! The machines: are all there that are asked for, and is anything stuck?

use std::time::Duration;

use nstance_client::{ShardClient, Shards};
use nstance_core::time::Timestamp;
use nstance_proto::v1::{GroupStatus, InstanceStatusResponse, ListInstancesRequest, PlanRequest, PlanResponse};

use super::Section;
use crate::{
    certificates::{self, State},
    storage::Cluster,
    view,
};

/// An agent that was not heard of after this does not boot.
const JOINS_WITHIN: Duration = Duration::from_secs(15 * 60);

struct Seen {
    groups: Vec<GroupStatus>,
    instances: Vec<InstanceStatusResponse>,
    plan: PlanResponse,
}

async fn look(mut client: ShardClient) -> Result<Seen, tonic::Status> {
    let groups = client.groups().await?;
    let instances = client.instances(ListInstancesRequest::default()).await?;
    let plan = client.service.plan(PlanRequest::default()).await?.into_inner();
    Ok(Seen { groups, instances, plan })
}

pub async fn check(mut section: Section<'_>, cluster: &Cluster, shards: &Shards) {
    let answers = shards.each(look).await;
    for error in &answers.errors {
        section.skip(&format!("{}/groups", error.shard), error.message.clone());
    }
    let now = cluster.clock.now();
    for (shard, seen) in &answers.ok {
        judge(&mut section, shard, seen, now);
    }
    match certificates::read(cluster).await {
        Ok(read) => expiring(&mut section, &read.all, now),
        Err(error) => section.skip("certificates", error.to_string()),
    }
}

fn judge(section: &mut Section<'_>, shard: &str, seen: &Seen, now: Timestamp) {
    let short: Vec<String> = seen
        .groups
        .iter()
        .filter(|it| it.size != it.ready_size || it.actual_size != it.size)
        .map(|it| format!("{} {}/{} ready", it.key, it.ready_size, it.size))
        .collect();
    let name = |what: &str| format!("{shard}/{what}");
    match short.as_slice() {
        [] => section.ok(&name("groups"), format!("{} at their size", seen.groups.len())),
        some => section.warn(&name("groups"), some.join(", "), "nstance-admin group status GROUP"),
    }
    let holds: Vec<String> = seen
        .groups
        .iter()
        .flat_map(|group| group.holds.iter().map(|it| format!("{}: {}", group.key, it.message)))
        .collect();
    list(section, &name("holds"), &holds, "nstance-admin plan");
    let late = seen.instances.iter().filter(|it| {
        let end = it.drain.as_ref().and_then(|it| view::time(it.delete_at.as_ref()));
        end.is_some_and(|end| end < now)
    });
    let late: Vec<String> = late.map(|it| it.instance_id.clone()).collect();
    list(section, &name("drains"), &late, "nstance-admin instance why ID");
    let silent = seen.instances.iter().filter(|it| {
        let made = view::time(it.created_at.as_ref());
        it.registered_at.is_none() && made.is_some_and(|made| made.plus(JOINS_WITHIN) < now)
    });
    let silent: Vec<String> = silent.map(|it| it.instance_id.clone()).collect();
    list(section, &name("never-registered"), &silent, "nstance-admin instance why ID");
    let orphans = seen.plan.actions.iter().filter(|it| it.kind == "TerminateOrphan");
    let orphans: Vec<String> = orphans.map(|it| it.instance_id.clone()).collect();
    list(section, &name("orphans"), &orphans, "nstance-admin plan: the server ends them by itself");
}

fn list(section: &mut Section<'_>, name: &str, found: &[String], fix: &str) {
    match found {
        [] => section.ok(name, "none"),
        some => section.warn(name, some.join(", "), fix),
    }
}

/// Renewal is due with a third of the life left; whoever has but a sixth missed it.
fn expiring(section: &mut Section<'_>, all: &[certificates::Certificate], now: Timestamp) {
    let late = all.iter().filter(|it| {
        let (from, until) = (it.logged.not_before, it.logged.not_after);
        it.state == State::Valid && until.since(now) < until.since(from) / 6
    });
    let late: Vec<String> = late.map(|it| format!("{} of {}", it.logged.name, it.subject_id)).collect();
    list(section, "certificates", &late, "nstance-admin cert list --expiring 7d");
}

#[cfg(test)]
mod tests {
    use nstance_proto::v1::{DrainStatus, PlanHold, PlannedAction};

    use super::*;
    use crate::check::{Group, Sheet, Verdict};

    fn at(seconds: i64) -> Option<prost_types::Timestamp> {
        Some(prost_types::Timestamp { seconds, nanos: 0 })
    }

    #[test]
    fn whatever_is_stuck_in_a_fleet_is_named() {
        let group = GroupStatus { key: "web".into(), size: 3, actual_size: 3, ready_size: 2, ..Default::default() };
        let held = GroupStatus {
            key: "db".into(),
            holds: vec![PlanHold { message: "paused".into(), ..Default::default() }],
            ..Default::default()
        };
        let draining = InstanceStatusResponse {
            instance_id: "i-late".into(),
            registered_at: at(1),
            drain: Some(DrainStatus { delete_at: at(50), ..Default::default() }),
            ..Default::default()
        };
        let silent = InstanceStatusResponse { instance_id: "i-silent".into(), created_at: at(1), ..Default::default() };
        let orphan =
            PlannedAction { kind: "TerminateOrphan".into(), instance_id: "i-orphan".into(), ..Default::default() };
        let plan = PlanResponse { actions: vec![orphan], ..Default::default() };
        let seen = Seen { groups: vec![group, held], instances: vec![draining, silent], plan };
        let mut sheet = Sheet::default();
        judge(&mut sheet.of(Group::Fleet), "dev-1", &seen, Timestamp::from_millis(10_000_000));
        let told: Vec<(&str, &str)> = sheet.lines.iter().map(|it| (it.name.as_str(), it.detail.as_str())).collect();
        assert_eq!(
            told,
            [
                ("dev-1/groups", "web 2/3 ready"),
                ("dev-1/holds", "db: paused"),
                ("dev-1/drains", "i-late"),
                ("dev-1/never-registered", "i-silent"),
                ("dev-1/orphans", "i-orphan"),
            ]
        );
        assert!(sheet.lines.iter().all(|it| it.verdict == Verdict::Warn && it.fix.is_some()));
    }
}
