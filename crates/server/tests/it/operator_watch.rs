//! Watch streams over the wire: a snapshot and what follows it, for every operator of a tenant and for nobody else.

use std::{net::Ipv4Addr, time::Duration};

use crate::common::{
    LIMIT, Shard, Site, assert_refused,
    fleet::{Agent, Fleet},
    operator::Operator,
    tenant, wait_for, wait_until,
    wire::{dial_with, tls},
};
use nstance_core::{
    ids::{InstanceId, Tenant},
    instance::Phase,
    ports::provider::ErrorClass,
};
use nstance_proto::v1::{self, group_event::Type, operator_service_client::OperatorServiceClient};
use nstance_providers::fake::{Op, Outcome, Rule, When};
use serde_json::json;
use tonic::{Code, Status, Streaming};

fn from(token: &str) -> v1::WatchRequest {
    v1::WatchRequest { resume_token: token.to_owned() }
}

async fn watch_groups(operator: &Operator, token: &str) -> Streaming<v1::GroupEvent> {
    operator.client().watch_groups(from(token)).await.unwrap().into_inner()
}

async fn watch_instances(operator: &Operator, token: &str) -> Streaming<v1::InstanceEvent> {
    operator.client().watch_instances(from(token)).await.unwrap().into_inner()
}

async fn watch_errors(operator: &Operator, token: &str) -> Streaming<v1::ErrorEvent> {
    operator.client().watch_errors(from(token)).await.unwrap().into_inner()
}

/// The next message, or how the stream ended.
async fn next<T>(stream: &mut Streaming<T>) -> Result<T, Status> {
    let message = tokio::time::timeout(LIMIT, stream.message()).await.expect("a message in time");
    message.map(|it| it.expect("a stream ends with a status"))
}

/// Reads until a message `fits`; answers all that was read.
async fn until<T>(stream: &mut Streaming<T>, what: &str, fits: impl Fn(&T) -> bool) -> Vec<T> {
    let mut read = Vec::new();
    let reading = tokio::time::timeout(LIMIT, async {
        loop {
            let message = stream.message().await.expect("no end").expect("no end");
            let done = fits(&message);
            read.push(message);
            if done {
                return;
            }
        }
    });
    assert!(reading.await.is_ok(), "in vain: {what}");
    read
}

/// Reads a snapshot up to its end; answers what it showed, and the token of its end.
async fn shown(stream: &mut Streaming<v1::InstanceEvent>) -> (Vec<v1::InstanceEvent>, String) {
    let mut read = until(stream, "the end of the snapshot", |it| it.status == "snapshot_end").await;
    let end = read.pop().unwrap();
    assert!(end.snapshot && read.iter().all(|it| it.snapshot && it.resume_token.is_empty()));
    (read, end.resume_token)
}

async fn shown_groups(stream: &mut Streaming<v1::GroupEvent>) -> (Vec<v1::GroupStatus>, String) {
    let mut read = until(stream, "the end of the snapshot", |it| it.r#type() == Type::SnapshotEnd).await;
    let end = read.pop().unwrap();
    assert!(end.snapshot && read.iter().all(|it| it.snapshot));
    (read.into_iter().map(|it| it.group.unwrap()).collect(), end.resume_token)
}

/// The states an instance went through.
fn states(read: &[v1::InstanceEvent], id: InstanceId) -> Vec<&str> {
    read.iter().filter(|it| it.instance_id == id.to_string()).map(|it| it.status.as_str()).collect()
}

fn is(id: InstanceId, status: &'static str) -> impl Fn(&v1::InstanceEvent) -> bool {
    move |it| it.instance_id == id.to_string() && it.status == status
}

/// A whole group whose members take a minute to drain.
async fn whole(n: u32) -> (Shard, Fleet, Operator, Vec<InstanceId>) {
    let shard = Shard::start_with(n, |config| {
        config["server"]["default_drain_timeout"] = json!("60s");
        config["tenants"] = json!({ "other": {} });
    })
    .await;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    let n = usize::try_from(n).unwrap();
    fleet.is_whole(&shard.site, n).await;
    wait_until("all are ready", async || usize::try_from(operator.group("web").await.ready_size).unwrap() == n).await;
    let ids = shard.site.standing();
    (shard, fleet, operator, ids)
}

async fn resize(operator: &Operator, group: &str, size: i32) {
    let config = Some(v1::GroupConfig { size: Some(size), ..v1::GroupConfig::default() });
    let request = v1::UpsertGroupRequest { key: group.to_owned(), config, ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
}

async fn delete(operator: &Operator, id: InstanceId) {
    let request = v1::DeleteInstanceRequest { instance_id: id.to_string(), ..v1::DeleteInstanceRequest::default() };
    operator.client().delete_instance(request).await.unwrap();
}

async fn acknowledge(operator: &Operator, id: InstanceId, drain_id: &str) {
    let request = v1::DrainAckRequest { instance_id: id.to_string(), drain_id: drain_id.to_owned() };
    operator.client().acknowledge_drained(request).await.unwrap();
}

#[tokio::test]
async fn instances_are_shown_and_then_followed_to_their_end() {
    let (shard, _fleet, operator, ids) = whole(2).await;
    let mut stream = watch_instances(&operator, "").await;
    let (snapshot, token) = shown(&mut stream).await;
    let mut named: Vec<_> = snapshot.iter().map(|it| it.instance_id.clone()).collect();
    named.sort();
    assert_eq!(named, ids.iter().map(ToString::to_string).collect::<Vec<_>>());
    let one = &snapshot[0];
    assert_eq!((one.status.as_str(), one.group.as_str(), one.tenant.as_str()), ("running", "web", "default"));
    assert!(!one.provider_instance_id.is_empty());
    assert_eq!(one.instance.as_ref().unwrap().health, "healthy");
    assert!(!token.is_empty());

    resize(&operator, "web", 3).await;
    let born = until(&mut stream, "a third", |it| it.status == "running").await;
    let third: InstanceId = born[0].instance_id.parse().unwrap();
    assert_eq!(states(&born, third), ["pending", "provisioning", "running"]);
    assert_eq!(born[0].reason, "scale-up");
    assert!(born.iter().all(|it| !it.snapshot && !it.resume_token.is_empty()));

    delete(&operator, third).await;
    let drained = until(&mut stream, "its drain", is(third, "pending_deletion")).await.pop().unwrap();
    assert_eq!(drained.reason, "requested");
    acknowledge(&operator, third, &drained.drain_id).await;
    let left = until(&mut stream, "its end", is(third, "deleted")).await;
    assert_eq!(states(&left, third), ["deleting", "deleted"]);
    assert_eq!(shard.site.phase(third).await, Some(Phase::Deleted), "durable before it is told");
}

#[tokio::test]
async fn a_drain_is_told_with_its_times_and_found_by_later_watchers() {
    let (shard, fleet, operator, ids) = whole(1).await;
    let mut early = watch_instances(&operator, "").await;
    shown(&mut early).await;
    delete(&operator, ids[0]).await;
    let told = until(&mut early, "its drain", is(ids[0], "pending_deletion")).await.pop().unwrap();
    let drain = shard.site.record(ids[0]).await.unwrap().drain.unwrap();
    assert_eq!(told.drain_id, drain.started_at.as_millis().to_string());
    let delete_at = told.delete_at.unwrap();
    assert_eq!(delete_at.seconds * 1000 + i64::from(delete_at.nanos) / 1_000_000, drain.deadline.as_millis());
    let found = |snapshot: Vec<v1::InstanceEvent>| {
        let it = snapshot.into_iter().find(|it| it.instance_id == ids[0].to_string()).unwrap();
        (it.status, it.reason, it.delete_at, it.drain_id)
    };
    let told = (told.status, told.reason, told.delete_at, told.drain_id);
    let mut late = watch_instances(&operator, "").await;
    assert_eq!(found(shown(&mut late).await.0), told);
    // Of the next leader, too.
    let shard = shard.restart("srv-2").await;
    fleet.follow(&shard);
    let operator = Operator::on(&shard).await;
    let mut later = watch_instances(&operator, "").await;
    assert_eq!(found(shown(&mut later).await.0), told);
}

#[tokio::test]
async fn a_cancelled_drain_is_told_after_it_began() {
    let (_shard, _fleet, operator, ids) = whole(2).await;
    let mut stream = watch_instances(&operator, "").await;
    shown(&mut stream).await;
    resize(&operator, "web", 1).await;
    let began = until(&mut stream, "a drain", |it| it.status == "pending_deletion").await.pop().unwrap();
    assert_eq!(began.reason, "scale-down");
    resize(&operator, "web", 2).await;
    let ended = until(&mut stream, "its end", |it| it.status == "drain_cancelled").await.pop().unwrap();
    assert_eq!((ended.instance_id, ended.drain_id), (began.instance_id.clone(), began.drain_id));
    let victim: InstanceId = began.instance_id.parse().unwrap();
    assert!(ids.contains(&victim));
    let (snapshot, _) = shown(&mut watch_instances(&operator, "").await).await;
    assert_eq!(states(&snapshot, victim), ["running"]);
}

#[tokio::test]
async fn one_who_reads_late_hears_of_the_drain_or_of_the_end_alone() {
    let (_shard, _fleet, operator, ids) = whole(1).await;
    let token = {
        let request = v1::ListInstancesRequest::default();
        operator.client().list_instances(request).await.unwrap().into_inner().resume_token
    };
    let mut stream = watch_instances(&operator, "").await;
    shown(&mut stream).await;
    delete(&operator, ids[0]).await;
    acknowledge(&operator, ids[0], "").await;
    let told = until(&mut stream, "its end", is(ids[0], "deleted")).await;
    let order = ["pending_deletion", "deleting", "deleted"];
    assert!(states(&told, ids[0]).iter().all(|it| order.contains(it)));
    // The log has all of it, in its order, for one who lists and then watches.
    let replay = until(&mut watch_instances(&operator, &token).await, "its end", is(ids[0], "deleted")).await;
    assert_eq!(states(&replay, ids[0]), order);
    assert!(replay.iter().all(|it| !it.snapshot), "no snapshot");
    // And a snapshot no longer names it.
    let (snapshot, _) = shown(&mut watch_instances(&operator, "").await).await;
    assert!(states(&snapshot, ids[0]).is_empty());
}

#[tokio::test]
async fn a_watch_resumes_within_the_epoch_and_begins_anew_in_the_next() {
    let (shard, fleet, operator, _ids) = whole(1).await;
    let mut stream = watch_instances(&operator, "").await;
    let (_, token) = shown(&mut stream).await;
    drop(stream);
    resize(&operator, "web", 2).await;
    fleet.is_whole(&shard.site, 2).await;
    let mut back = watch_instances(&operator, &token).await;
    let missed = until(&mut back, "the second", |it| it.status == "running").await;
    assert_eq!(missed[0].status, "pending");
    assert!(missed.iter().all(|it| !it.snapshot));
    let last = missed.last().unwrap().resume_token.clone();

    let mut groups = watch_groups(&operator, "").await;
    let (_, group_token) = shown_groups(&mut groups).await;
    let shard = shard.restart("srv-2").await;
    assert_refused(ended(&mut back).await, Code::Unavailable, "LEADER_CHANGED");
    assert_refused(ended(&mut groups).await, Code::Unavailable, "LEADER_CHANGED");
    let operator = Operator::on(&shard).await;
    let (snapshot, _) = shown(&mut watch_instances(&operator, &last).await).await;
    assert_eq!(snapshot.len(), 2);
    let (groups, _) = shown_groups(&mut watch_groups(&operator, &group_token).await).await;
    assert_eq!(groups.len(), 1);
}

/// How a stream ends, whatever it says before.
async fn ended<T>(stream: &mut Streaming<T>) -> Result<(), Status> {
    loop {
        next(stream).await?;
    }
}

#[tokio::test]
async fn pool_status_follows_within_1s() {
    let shard = Shard::start(1).await;
    let operator = Operator::on(&shard).await;
    let id = shard.only_vm().await;
    let mut stream = watch_groups(&operator, "").await;
    let (groups, _) = shown_groups(&mut stream).await;
    assert_eq!((groups[0].key.as_str(), groups[0].size, groups[0].ready_size), ("web", 1, 0));
    let agent = Agent::register(&shard, id).await;
    let _link = agent.report(&shard.leader).await;
    let within = Duration::from_secs(1);
    let of = |event: &v1::GroupEvent| event.group.clone().unwrap_or_default();
    let ready = until(&mut stream, "ready", |it| of(it).ready_size == 1);
    let ready = of(tokio::time::timeout(within, ready).await.expect("within 1 s").last().unwrap());
    assert_eq!((ready.actual_size, ready.registered_size, ready.provider_ids.len()), (1, 1, 1));
    resize(&operator, "web", 3).await;
    let grown = until(&mut stream, "grown", |it| of(it).actual_size == 3);
    tokio::time::timeout(within, grown).await.expect("within 1 s");
    // What is listed and what is told end as the same.
    let listed = operator.group("web").await;
    let mut again = watch_groups(&operator, "").await;
    assert_eq!(shown_groups(&mut again).await.0[0].size, listed.size);
}

#[tokio::test]
async fn a_listed_group_is_followed_without_a_gap() {
    let shard = Shard::start_with(0, |config| config["templates"]["knc"]["size"] = json!(0)).await;
    let operator = Operator::on(&shard).await;
    let listed = operator.client().list_groups(()).await.unwrap().into_inner();
    assert_eq!(listed.groups[0].size, 0);
    // Nobody watches while it changes.
    resize(&operator, "web", 2).await;
    let mut stream = watch_groups(&operator, &listed.resume_token).await;
    let told = until(&mut stream, "its size", |it| it.group.as_ref().is_some_and(|group| group.size == 2)).await;
    assert!(told.iter().all(|it| !it.snapshot && it.r#type() == Type::Upsert));
}

#[tokio::test]
async fn the_end_of_a_group_is_told() {
    let (_shard, _fleet, operator, _ids) = whole(1).await;
    let config = Some(v1::GroupConfig { template: "knc".to_owned(), size: Some(0), ..v1::GroupConfig::default() });
    let request = v1::UpsertGroupRequest { key: "batch".to_owned(), config, ..v1::UpsertGroupRequest::default() };
    operator.client().upsert_group(request).await.unwrap();
    let mut stream = watch_groups(&operator, "").await;
    assert_eq!(shown_groups(&mut stream).await.0.len(), 2);
    let request = v1::DeleteGroupRequest { key: "batch".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(request).await.unwrap();
    let end = until(&mut stream, "its end", |it| it.r#type() == Type::Delete).await.pop().unwrap();
    let named = v1::GroupStatus { key: "batch".to_owned(), tenant: "default".to_owned(), ..v1::GroupStatus::default() };
    assert_eq!(end.group, Some(named), "key and tenant only");
    assert_eq!(shown_groups(&mut watch_groups(&operator, "").await).await.0.len(), 1);
}

#[tokio::test]
async fn two_operators_see_all_and_only_their_events() {
    let shard = Shard::start_with(1, |config| {
        config["tenants"] = json!({ "other": {} });
        config["groups"]["other"] = json!({ "web": { "template": "knc", "size": 2 } });
    })
    .await;
    shard.vms(3).await;
    let (first, second) = (Operator::on(&shard).await, Operator::on(&shard).await);
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    let mut streams = Vec::new();
    for operator in [&first, &second, &other] {
        let mut instances = watch_instances(operator, "").await;
        let mut groups = watch_groups(operator, "").await;
        let n = shown(&mut instances).await.0.len();
        let sizes: Vec<i32> = shown_groups(&mut groups).await.0.iter().map(|it| it.size).collect();
        streams.push((instances, groups, n, sizes));
    }
    assert_eq!(streams.iter().map(|it| it.2).collect::<Vec<_>>(), [1, 1, 2]);
    assert_eq!(streams.iter().map(|it| it.3.clone()).collect::<Vec<_>>(), [[1], [1], [2]]);
    resize(&first, "web", 2).await;
    resize(&other, "web", 4).await;
    shard.vms(6).await;
    for (n, (instances, groups, ..)) in streams.iter_mut().enumerate() {
        let (name, born, size) = if n < 2 { ("default", 1, 2) } else { ("other", 2, 4) };
        let mut ids = std::collections::BTreeSet::new();
        while ids.len() < born {
            let read = until(instances, "one more", |it| it.status == "provisioning").await;
            assert!(read.iter().all(|it| it.tenant == name), "{name}");
            ids.extend(read.into_iter().map(|it| it.instance_id));
        }
        let is_full = |it: &v1::GroupEvent| it.group.as_ref().is_some_and(|group| group.actual_size == size);
        let read = until(groups, "all of them", is_full).await;
        assert!(read.iter().all(|it| it.group.as_ref().unwrap().tenant == name));
    }
    for event in ["InstanceCreated", "GroupChanged"] {
        let ours = first.hears(event).await;
        assert_eq!(second.hears(event).await, ours);
    }
    let foreign = shard.site.records().await.into_iter().filter(|it| it.group.tenant == tenant());
    for id in foreign.map(|it| it.id.to_string()) {
        assert!(other.events("InstanceCreated").iter().all(|event| event.instance_id != id));
    }
}

#[tokio::test]
async fn a_dead_instance_is_told_as_ill_before_it_goes() {
    let (shard, fleet, operator, ids) = whole(1).await;
    let mut stream = watch_instances(&operator, "").await;
    shown(&mut stream).await;
    // The VM dies; nobody knows before its agent is lost.
    shard.site.cloud.kill(ids[0]);
    fleet.cut(ids[0]);
    let told = until(&mut stream, "its end", is(ids[0], "deleted")).await;
    let ill = told.iter().find(|it| it.status == "unhealthy").expect("told as ill");
    assert!(ill.unhealthy_at.is_some());
    assert_eq!(states(&told, ids[0]), ["unhealthy", "deleting", "deleted"]);
}

#[tokio::test]
async fn an_agent_lost_for_long_makes_its_instance_ill_until_it_is_back() {
    let (shard, fleet, operator, ids) = whole(1).await;
    let mut stream = watch_instances(&operator, "").await;
    let mut groups = watch_groups(&operator, "").await;
    shown(&mut stream).await;
    shown_groups(&mut groups).await;
    fleet.cut(ids[0]);
    operator.hears_of("InstanceLost", ids[0]).await;
    shard.site.clock.leap(Duration::from_secs(11));
    let ill = until(&mut stream, "told as ill", is(ids[0], "unhealthy")).await.pop().unwrap();
    assert_eq!(ill.reason, "lost");
    assert!(ill.unhealthy_at.is_some());
    let n_ill = |n: i32| move |it: &v1::GroupEvent| it.group.as_ref().is_some_and(|group| group.unhealthy_size == n);
    until(&mut groups, "counted as ill", n_ill(1)).await;
    let (snapshot, _) = shown(&mut watch_instances(&operator, "").await).await;
    assert_eq!(snapshot[0].status, "unhealthy");
    fleet.back(ids[0]);
    let back = until(&mut stream, "well again", is(ids[0], "running")).await;
    assert_eq!(states(&back, ids[0]), ["running"]);
    assert_eq!(back[0].unhealthy_at, None);
    until(&mut groups, "counted as well", n_ill(0)).await;
}

#[tokio::test]
async fn a_machine_that_has_registered_is_not_ill_before_it_had_time_to_connect() {
    let shard = Shard::start_with(1, |config| {
        config["server"]["garbage_collection"]["registration_timeout"] = json!("10m");
    })
    .await;
    let id = shard.only_vm().await;
    let operator = Operator::on(&shard).await;
    // Everybody who was here before this term had its time to come back.
    operator.leap(&shard.site, Duration::from_secs(60)).await;
    let mut stream = watch_instances(&operator, "").await;
    shown(&mut stream).await;
    let agent = Agent::register(&shard, id).await;
    operator.leap(&shard.site, Duration::from_secs(15)).await;
    assert_eq!(operator.health(id).await, "starting");
    let reports = agent.report(&shard.leader).await;
    wait_until("it is well", async || operator.health(id).await == "healthy").await;
    shard.site.cloud.kill(id);
    reports.cut();
    let told = until(&mut stream, "its end", is(id, "deleted")).await;
    assert_eq!(states(&told, id), ["running", "unhealthy", "deleting", "deleted"], "ill only once it is dead");
    assert!(operator.events("InstanceRecovered").is_empty(), "it was never lost");
}

#[tokio::test]
async fn a_machine_that_has_registered_and_never_connects_is_missed() {
    let shard = Shard::start(1).await;
    let id = shard.only_vm().await;
    let operator = Operator::on(&shard).await;
    Agent::register(&shard, id).await;
    operator.leap(&shard.site, Duration::from_secs(15)).await;
    assert_eq!(operator.health(id).await, "starting");
    operator.leap(&shard.site, Duration::from_secs(20)).await;
    wait_until("it is missed", async || operator.health(id).await == "lost").await;
}

#[tokio::test]
async fn errors_are_told_with_their_class_and_the_wait() {
    let site = Site::new();
    site.cloud.script(Rule::once(Op::Create, When::Call(1), Outcome::Refuse(ErrorClass::Quota)));
    let shard = Shard::start_on(site, 0, |_| {}).await;
    let operator = Operator::on(&shard).await;
    let mut stream = watch_errors(&operator, "").await;
    resize(&operator, "web", 1).await;
    let told = next(&mut stream).await.unwrap();
    assert_eq!(
        (told.reason.as_str(), told.class.as_str(), told.group.as_str()),
        ("InstanceCreateFailed", "quota", "web")
    );
    assert!(!told.instance_id.is_empty() && !told.error.is_empty() && !told.resume_token.is_empty());
    assert_eq!(told.retry_after.unwrap().seconds, 30);
    assert_eq!((told.dropped, told.repeated), (0, 0));
    // A token replays what came after it; one of another epoch nothing.
    let (epoch, number) = told.resume_token.split_once('-').unwrap();
    let before = format!("{epoch}-{}", number.parse::<u64>().unwrap() - 1);
    assert_eq!(next(&mut watch_errors(&operator, &before).await).await.unwrap(), told);
}

#[tokio::test]
async fn equal_errors_are_told_once_and_then_counted() {
    let (shard, _fleet, operator, ids) = whole(1).await;
    let refused = Outcome::Refuse(ErrorClass::Throttled);
    shard.site.cloud.script(Rule::always(Op::Delete, When::Instance(ids[0]), refused));
    let mut stream = watch_errors(&operator, "").await;
    delete(&operator, ids[0]).await;
    acknowledge(&operator, ids[0], "").await;
    let told = next(&mut stream).await.unwrap();
    let what = (told.reason.as_str(), told.class.as_str(), told.instance_id.clone());
    assert_eq!(what, ("DeleteFailing", "throttled", ids[0].to_string()));
    wait_for("it fails again and again", || 3 <= operator.events("DeleteFailing").len()).await;
    shard.site.clock.leap(Duration::from_secs(10));
    let counted = next(&mut stream).await.unwrap();
    assert_eq!((counted.reason, counted.error), (told.reason, told.error));
    assert!(2 <= counted.repeated, "{}", counted.repeated);
}

#[tokio::test]
async fn events_resume_and_are_told_as_asked_for() {
    let (_shard, _fleet, operator, ids) = whole(2).await;
    let watch =
        async |request: v1::WatchEventsRequest| operator.client().watch_events(request).await.unwrap().into_inner();
    let start = operator.events("LeaderAcquired").remove(0).resume_token;
    let mut one = watch(v1::WatchEventsRequest {
        resume_token: start.clone(),
        instance_id: ids[0].to_string(),
        ..v1::WatchEventsRequest::default()
    })
    .await;
    let mut serious = watch(v1::WatchEventsRequest {
        resume_token: start,
        min_severity: v1::Severity::Warning.into(),
        group: "web".to_owned(),
        ..v1::WatchEventsRequest::default()
    })
    .await;
    let born = until(&mut one, "its registration", |it| it.reason == "InstanceRegistered").await;
    assert!(born.iter().all(|it| it.instance_id == ids[0].to_string()));
    let reasons: Vec<_> = born.iter().map(|it| it.reason.as_str()).collect();
    assert_eq!(reasons, ["InstanceCreateRequested", "InstanceCreated", "InstanceRegistered"]);
    delete(&operator, ids[0]).await;
    until(&mut one, "its drain", |it| it.reason == "DrainStarted").await;
    // A group's own change is no warning; that of an override's end is.
    resize(&operator, "web", 1).await;
    let request = v1::DeleteGroupRequest { key: "web".to_owned(), ..v1::DeleteGroupRequest::default() };
    operator.client().delete_group(request).await.unwrap();
    let told = next(&mut serious).await.unwrap();
    assert_eq!((told.reason.as_str(), told.severity()), ("GroupChanged", v1::Severity::Warning));
}

#[tokio::test]
async fn a_long_snapshot_names_everybody_once() {
    // More than one part of a snapshot holds.
    let n = 300;
    let shard = Shard::start_with(n, |config| config["server"]["create_burst"] = json!(1000)).await;
    let operator = Operator::on(&shard).await;
    let n = usize::try_from(n).unwrap();
    shard.vms(n).await;
    let (snapshot, _) = shown(&mut watch_instances(&operator, "").await).await;
    let named: std::collections::BTreeSet<_> = snapshot.iter().map(|it| it.instance_id.clone()).collect();
    assert_eq!((snapshot.len(), named.len()), (n, n));
}

#[tokio::test]
async fn a_ninth_stream_is_refused_and_a_closed_one_makes_room() {
    let shard = Shard::start(0).await;
    let operator = Operator::on(&shard).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(watch_groups(&operator, "").await);
    }
    let refused = operator.client().watch_groups(from("")).await;
    assert_refused(refused, Code::ResourceExhausted, "TOO_MANY_STREAMS");
    // Another kind and another operator have limits of their own.
    watch_instances(&operator, "").await;
    let second = Operator::on(&shard).await;
    watch_groups(&second, "").await;
    open.pop();
    wait_until("there is room again", async || operator.client().watch_groups(from("")).await.is_ok()).await;
}

#[tokio::test]
async fn a_page_of_instances_is_followed_from_where_the_first_page_was() {
    let (shard, _fleet, operator, ids) = whole(2).await;
    let list = async |page_token: String| {
        let request = v1::ListInstancesRequest { page_size: 1, page_token, ..v1::ListInstancesRequest::default() };
        operator.client().list_instances(request).await.map(tonic::Response::into_inner)
    };
    let first = list(String::new()).await.unwrap();
    delete(&operator, ids[0]).await;
    let second = list(first.next_page_token.clone()).await.unwrap();
    assert_eq!(second.resume_token, first.resume_token);
    let mut stream = watch_instances(&operator, &second.resume_token).await;
    until(&mut stream, "what happened between the pages", is(ids[0], "pending_deletion")).await;
    assert_refused(list("1.x".to_owned()).await, Code::InvalidArgument, "PAGE_TOKEN");
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let request = v1::ListInstancesRequest { page_token: first.next_page_token, ..v1::ListInstancesRequest::default() };
    assert_refused(operator.client().list_instances(request).await, Code::InvalidArgument, "PAGE_TOKEN");
}

#[tokio::test]
async fn one_who_does_not_read_is_cut_off_alone() {
    // More than fits into the windows of the transport: the rest stays with the server.
    let pad = "x".repeat(8000);
    let shard = Shard::start_with(0, |config| {
        for n in 0..40 {
            config["groups"]["default"][format!("g{n}")] =
                json!({ "template": "knc", "size": 0, "vars": { "pad": pad } });
        }
    })
    .await;
    let operator = Operator::on(&shard).await;
    let tls = tls(&shard.site.bundle().await, Some((&operator.chain, &operator.key)));
    let narrow = |endpoint: tonic::transport::Endpoint| endpoint.initial_stream_window_size(65_535);
    let line = dial_with(&shard.leader.advertised.operator, tls, Ipv4Addr::LOCALHOST, narrow).await.unwrap();
    let mut client = OperatorServiceClient::new(line.channel.clone());
    let mut slow = client.watch_groups(from("")).await.unwrap().into_inner();
    let mut quick = watch_groups(&operator, "").await;
    assert_eq!(shown_groups(&mut quick).await.0.len(), 41);
    shard.site.clock.leap(Duration::from_secs(31));
    let metrics = &shard.server.metrics;
    wait_for("it is cut off", || metrics.text().contains("nstance_watchers_cut_off_total 1")).await;
    assert_refused(ended(&mut slow).await, Code::ResourceExhausted, "SLOW_CONSUMER");
    // The other one hears the next change, and the slow one may come again.
    wait_until("the lease is renewed", async || {
        let config = Some(v1::GroupConfig { size: Some(1), ..v1::GroupConfig::default() });
        let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
        operator.client().upsert_group(request).await.is_ok()
    })
    .await;
    until(&mut quick, "the change", |it| it.group.as_ref().is_some_and(|group| group.size == 1)).await;
    assert_eq!(shown_groups(&mut watch_groups(&operator, "").await).await.0.len(), 41);
}
