//! What is lost is replaced, at once and exactly; what only seems lost is left alone.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use crate::common::{
    Shard, Site,
    fleet::{Agent, Fleet},
    meddler::Meddler,
    operator::Operator,
    tenant, wait_for, wait_until,
};
use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Phase, Seen},
    ports::provider::ErrorClass,
};
use nstance_providers::fake::{FakeOptions, Op, Outcome, Rule, When};
use nstance_store::memory::MemoryStore;

async fn whole(n: u32) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start(n).await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    let n = usize::try_from(n).unwrap();
    fleet.is_whole(&shard.site, n).await;
    wait_until("all are ready", async || usize::try_from(operator.group("web").await.ready_size).unwrap() == n).await;
    let ids = shard.site.standing();
    (shard, fleet, operator, ids)
}

fn n_creates(shard: &Shard) -> usize {
    shard.site.calls(Op::Create).len()
}

#[tokio::test]
async fn a_group_comes_up_at_its_size() {
    let (shard, _fleet, operator, ids) = whole(4).await;
    assert_eq!(n_creates(&shard), 4, "one call each");
    let group = operator.group("web").await;
    assert_eq!((group.size, group.actual_size, group.ready_size, group.registered_size), (4, 4, 4, 4));
    assert_eq!((group.pending_size, group.draining_size, group.unhealthy_size), (0, 0, 0));
    assert!(group.holds.is_empty(), "{:?}", group.holds);
    for id in ids {
        assert_eq!(shard.site.phase(id).await, Some(Phase::Running));
        assert_eq!(operator.health(id).await, "healthy");
    }
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_dead_machine_is_replaced() {
    let (shard, fleet, operator, ids) = whole(3).await;
    let dead = ids[1];
    shard.site.cloud.kill(dead);
    operator.hears_of("InstanceLost", dead).await;
    operator.hears_of("InstanceDead", dead).await;
    fleet.is_whole(&shard.site, 3).await;
    wait_until("the record of the dead ends", async || shard.site.phase(dead).await == Some(Phase::Deleted)).await;
    wait_until("the group is ready again", async || operator.group("web").await.ready_size == 3).await;
    assert_eq!(n_creates(&shard), 4);
    assert!(ids.iter().filter(|id| **id != dead).all(|id| shard.site.standing().contains(id)), "nobody else left");
    let reasons: Vec<_> = shard.site.records().await.into_iter().map(|it| it.reason.as_str()).collect();
    assert_eq!(reasons.iter().filter(|it| **it == "replacement").count(), 1, "{reasons:?}");
    assert!(shard.server.metrics.text().contains("nstance_replacement_start_seconds_count 1"));
    let is_counted = || shard.server.term().is_some_and(|term| term.world.lock().lost.contains(&dead));
    wait_until("the dead is not counted among the lost for ever", async || !is_counted()).await;
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn losing_k_machines_starts_k_creates() {
    let (shard, fleet, _operator, ids) = whole(5).await;
    for id in &ids[..4] {
        shard.site.cloud.kill(*id);
    }
    wait_for("four creates", || n_creates(&shard) == 9).await;
    fleet.is_whole(&shard.site, 5).await;
    shard.site.assert_nothing_leaks().await;
    assert_eq!(n_creates(&shard), 9, "and not one more");
}

#[tokio::test]
async fn a_stopped_machine_is_replaced_and_removed() {
    let (shard, fleet, _operator, ids) = whole(2).await;
    shard.site.cloud.stop(ids[0]);
    fleet.cut(ids[0]);
    wait_until("the stopped VM is removed", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    fleet.is_whole(&shard.site, 2).await;
    shard.site.assert_nothing_leaks().await;
    assert_eq!(shard.site.calls(Op::Delete).iter().filter(|call| call.instance == Some(ids[0])).count(), 1);
}

#[tokio::test]
async fn a_lost_agent_on_a_running_machine_is_waited_for() {
    let (shard, fleet, operator, ids) = whole(2).await;
    let describes = shard.site.calls(Op::Describe).len();
    fleet.cut(ids[0]);
    operator.hears_of("InstanceLost", ids[0]).await;
    wait_for("it is looked at", || describes < shard.site.calls(Op::Describe).len()).await;
    wait_until("it counts as lost", async || operator.health(ids[0]).await == "lost").await;
    let group = operator.group("web").await;
    assert_eq!((group.actual_size, group.ready_size), (2, 2), "it keeps its place");
    fleet.back(ids[0]);
    operator.hears_of("InstanceRecovered", ids[0]).await;
    fleet.is_whole(&shard.site, 2).await;
    assert_eq!(n_creates(&shard), 2, "nobody was replaced");
    assert!(operator.events("InstanceDead").is_empty());
}

#[tokio::test]
async fn a_silent_agent_on_a_running_machine_is_replaced_and_drained() {
    let (shard, fleet, operator, ids) = {
        let shard = Shard::start_with(1, |config| {
            config["server"]["health_check_interval"] = "1s".into();
        })
        .await;
        let fleet = Fleet::reporting_every(&shard, 1000);
        let operator = Operator::on(&shard).await;
        fleet.is_whole(&shard.site, 1).await;
        let ids = shard.site.standing();
        (shard, fleet, operator, ids)
    };
    wait_until("it reports", async || operator.health(ids[0]).await == "healthy").await;
    fleet.cut(ids[0]);
    wait_until("it is removed", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    fleet.is_whole(&shard.site, 1).await;
    let record = shard.site.record(ids[0]).await.unwrap();
    assert_eq!(record.drain.unwrap().reason.as_str(), "unhealthy");
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_report_that_is_overdue_has_its_machine_looked_at() {
    let shard = Shard::start(1).await;
    let fleet = Fleet::reporting_every(&shard, 600_000);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, 1).await;
    wait_until("it is ready", async || operator.group("web").await.ready_size == 1).await;
    let id = shard.site.standing()[0];
    let n_looks = || shard.site.calls(Op::Describe).len();
    let before = n_looks();
    operator.leap(&shard.site, Duration::from_secs(19 * 60)).await;
    assert_eq!((operator.health(id).await.as_str(), n_looks()), ("healthy", before), "late, not yet overdue");
    operator.leap(&shard.site, Duration::from_secs(2 * 60)).await;
    wait_for("it is looked at", || before < n_looks()).await;
    assert_eq!(operator.health(id).await, "healthy", "it is not silent yet");
    assert_eq!(shard.site.calls(Op::Create).len(), 1);
}

#[tokio::test]
async fn an_agent_that_sends_no_reports_is_replaced_when_its_stream_is_gone_for_long() {
    let shard = Shard::start(1).await;
    let fleet = Fleet::reporting_every(&shard, 0);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, 1).await;
    wait_until("it is ready", async || operator.group("web").await.ready_size == 1).await;
    let id = shard.site.standing()[0];
    operator.leap(&shard.site, Duration::from_secs(12 * 3600)).await;
    assert_eq!(operator.health(id).await, "healthy", "its stream is there");
    fleet.cut(id);
    wait_until("it is lost", async || operator.health(id).await == "lost").await;
    operator.leap(&shard.site, Duration::from_secs(170)).await;
    assert_eq!(operator.health(id).await, "lost");
    operator.leap(&shard.site, Duration::from_secs(20)).await;
    wait_until("it is removed", async || shard.site.phase(id).await == Some(Phase::Deleted)).await;
    assert_eq!(shard.site.record(id).await.unwrap().drain.unwrap().reason.as_str(), "unhealthy");
}

/// How often groups were looked at.
fn n_passes(shard: &Shard) -> u64 {
    let text = shard.server.metrics.text();
    let count = text.lines().find_map(|line| line.strip_prefix("nstance_plan_seconds_count "));
    count.map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn a_machine_that_registers_late_is_not_judged_by_the_age_of_its_vm() {
    let store = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(store.clone(), FakeOptions::default()), 1, |config| {
        config["server"]["health_check_interval"] = "1s".into();
        config["server"]["garbage_collection"]["registration_timeout"] = "10m".into();
    })
    .await;
    let id = shard.only_vm().await;
    let operator = Operator::on(&shard).await;
    // It boots slowly, and runs by the time it registers.
    operator.leap(&shard.site, Duration::from_secs(60)).await;
    wait_until("it is seen to run", async || operator.instances().await[0].provider_state == "running").await;
    store.hold(Some("/certlog/"));
    let registering = Agent::register(&shard, id);
    let looked_at = async {
        let group = GroupRef::new(tenant(), "web".parse().unwrap());
        let term = shard.server.term().unwrap();
        let registered = || term.world.lock().entries.get(&id).is_some_and(|it| it.instance().registration.is_some());
        wait_for("its registration counts", registered).await;
        // Its answer is not ready, for the log is slow, and its group is looked at meanwhile.
        let before = n_passes(&shard);
        wait_for("two more looks at its group", || {
            term.wake(&group);
            before + 2 <= n_passes(&shard)
        })
        .await;
        assert_eq!(operator.health(id).await, "starting");
        store.hold(None);
    };
    let (agent, ()) = tokio::join!(registering, looked_at);
    let _stream = agent.report(&shard.leader).await;
    wait_until("it is well", async || operator.health(id).await == "healthy").await;
    assert_eq!((shard.site.standing(), n_creates(&shard)), (vec![id], 1));
    for reason in ["DrainStarted", "InstanceSilent", "InstanceRecovered"] {
        assert_eq!(operator.events(reason), [], "{reason}");
    }
}

#[tokio::test]
async fn a_machine_that_will_be_taken_away_is_replaced_first() {
    let (shard, fleet, operator, ids) = whole(3).await;
    fleet.notice(ids[0], "terminate").await;
    fleet.notice(ids[1], "preempt").await;
    fleet.notice(ids[2], "rebalance").await;
    for id in &ids[..2] {
        operator.hears_of("TerminationNotice", *id).await;
        let drained = operator.hears_of("DrainStarted", *id).await;
        assert!(drained.message.contains("spot-terminating"), "{}", drained.message);
    }
    wait_for("both replacements", || 5 <= n_creates(&shard)).await;
    wait_until("the noticed are gone", async || {
        !shard.site.standing().contains(&ids[0]) && !shard.site.standing().contains(&ids[1])
    })
    .await;
    shard.site.assert_nothing_leaks().await;
    let creates = shard.site.calls(Op::Create);
    let deletes = shard.site.calls(Op::Delete);
    let each = creates[3..].iter().zip(&deletes).all(|(create, delete)| create.at <= delete.at);
    assert!(each, "nobody went before its replacement was asked for: {creates:?} {deletes:?}");
}

#[tokio::test]
async fn an_outage_of_the_provider_replaces_nobody() {
    let (shard, fleet, operator, ids) = whole(3).await;
    shard.site.cloud.outage(true);
    shard.site.cloud.kill(ids[0]);
    fleet.cut(ids[1]);
    for id in &ids[..2] {
        operator.hears_of("InstanceLost", *id).await;
    }
    operator.hears("ProviderFailing").await;
    wait_until("the hold is shown", async || {
        operator.holds("web").await.iter().any(|kind| kind == "UncertainMembers" || kind == "ProviderUnavailable")
    })
    .await;
    assert_eq!(n_creates(&shard), 3);
    assert_eq!(operator.group("web").await.actual_size, 3, "what cannot be seen keeps its place");

    shard.site.cloud.outage(false);
    fleet.back(ids[1]);
    let healed = tokio::time::timeout(Duration::from_secs(5), fleet.is_whole(&shard.site, 3));
    healed.await.expect("whole within 5 s of the provider's return");
    shard.site.assert_nothing_leaks().await;
    assert_eq!(n_creates(&shard), 4, "only the dead one was replaced");
    wait_until("no hold is left", async || operator.holds("web").await.is_empty()).await;
}

#[tokio::test]
async fn after_an_outage_the_group_is_full_within_5s() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    shard.site.cloud.outage(true);
    // Somebody asks for three while nothing can be made.
    let (site, _) = (shard.site.clone(), drop(operator));
    site.upload(&site.config(3)).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    operator.hears("ProviderFailing").await;
    assert!(site.standing().is_empty());
    site.cloud.outage(false);
    let healed = tokio::time::timeout(Duration::from_secs(5), fleet.is_whole(&site, 3));
    healed.await.expect("whole within 5 s of the provider's return");
    site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn one_machine_that_cannot_be_seen_is_not_replaced() {
    let (shard, fleet, operator, ids) = whole(2).await;
    let rule = |outcome| Rule::always(Op::Describe, When::Instance(ids[0]), outcome);
    shard.site.cloud.script(rule(Outcome::Refuse(ErrorClass::Throttled)));
    shard.site.cloud.kill(ids[0]);
    operator.hears_of("InstanceLost", ids[0]).await;
    wait_until("nobody knows", async || operator.holds("web").await.contains(&"UncertainMembers".to_owned())).await;
    assert_eq!(n_creates(&shard), 2);
    shard.site.cloud.clear_script();
    fleet.is_whole(&shard.site, 2).await;
    assert_eq!(n_creates(&shard), 3);
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_delete_that_fails_is_tried_again() {
    let (shard, fleet, operator, ids) = whole(1).await;
    let rule = Rule::once(Op::Delete, When::Instance(ids[0]), Outcome::Refuse(ErrorClass::Throttled));
    shard.site.cloud.script(rule);
    shard.site.cloud.show(ids[0], Seen::Suspended);
    fleet.cut(ids[0]);
    operator.hears_of("DeleteFailing", ids[0]).await;
    wait_until("it is removed", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    fleet.is_whole(&shard.site, 1).await;
    shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn scale_down_drains_and_removes_the_right_number() {
    let (shard, fleet, operator, ids) = whole(4).await;
    drop(operator);
    let site = shard.site.clone();
    let mut config = site.config(2);
    config["groups"]["default"]["web"]["drain_timeout"] = "1s".into();
    site.upload(&config).await;
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    fleet.is_whole(&site, 2).await;
    site.assert_nothing_leaks().await;
    let left: BTreeSet<_> = site.standing().into_iter().collect();
    let gone: Vec<_> = ids.iter().filter(|id| !left.contains(id)).collect();
    assert_eq!(gone.len(), 2);
    let deletes = site.calls(Op::Delete);
    assert_eq!(deletes.len(), 2, "and nobody else");
    for id in gone {
        let drain = site.record(*id).await.unwrap().drain.expect("drained first");
        assert_eq!(drain.reason.as_str(), "scale-down");
        let deleted = deletes.iter().find(|call| call.instance == Some(*id)).unwrap();
        assert!(drain.deadline <= deleted.at, "the drain's time was waited out");
    }
    assert_eq!(n_creates(&shard), 4);
}

#[tokio::test]
async fn equal_group_names_of_two_tenants_do_not_touch() {
    let shard = Shard::start_with(1, |config| {
        config["tenants"] = serde_json::json!({ "other": {} });
        config["groups"]["other"] = serde_json::json!({ "web": { "template": "knc", "size": 2 } });
    })
    .await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    fleet.is_whole(&shard.site, 3).await;
    wait_until("ready", async || operator.group("web").await.ready_size == 1).await;
    let theirs: Vec<_> =
        shard.site.records().await.into_iter().filter(|it| it.group.tenant.as_str() == "other").collect();
    assert_eq!(theirs.len(), 2);
    assert_eq!(operator.instances().await.len(), 1, "and nothing of theirs is shown");
    shard.site.cloud.kill(theirs[0].id);
    fleet.is_whole(&shard.site, 3).await;
    shard.site.assert_nothing_leaks().await;
    let web = |tenant: &str| GroupRef::new(tenant.parse().unwrap(), "web".parse().unwrap());
    let creates = shard.site.calls(Op::Create);
    let of = |group: GroupRef| creates.iter().filter(|call| call.group.as_ref() == Some(&group)).count();
    assert_eq!((of(web("default")), of(web("other"))), (1, 3));
    assert!(operator.events("InstanceDead").is_empty(), "their losses are not told to us");
}
