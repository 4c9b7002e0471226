//! Groups, changed over the API: durable first, then in force, and never half.

use std::sync::Arc;

use crate::common::{
    Shard, Site, assert_refused, fleet::Fleet, meddler::Meddler, operator::Operator, overwrite, wait_for, wait_until,
};
use nstance_core::{ids::Tenant, instance::Phase, ports::objects::ETag};
use nstance_proto::v1;
use nstance_providers::fake::FakeOptions;
use nstance_server::grpc::status::problems_of;
use nstance_store::{
    memory::MemoryStore,
    records::{self, groups::GroupsFile, groups_key},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tonic::{Code, Status};

fn open(config: &mut Value) {
    config["server"]["dynamic_subnet_pools"] = json!(["main"]);
    config["tenants"] = json!({ "other": {} });
}

async fn start(size: u32) -> (Shard, Operator) {
    let shard = Shard::start_with(size, open).await;
    let operator = Operator::on(&shard).await;
    (shard, operator)
}

fn sized(key: &str, size: i32) -> v1::UpsertGroupRequest {
    let config = v1::GroupConfig { size: Some(size), ..v1::GroupConfig::default() };
    v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() }
}

fn dynamic(key: &str, size: i32) -> v1::UpsertGroupRequest {
    let config = v1::GroupConfig { template: "knc".to_owned(), size: Some(size), ..v1::GroupConfig::default() };
    v1::UpsertGroupRequest { key: key.to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() }
}

fn with(mut request: v1::UpsertGroupRequest, set: impl FnOnce(&mut v1::GroupConfig)) -> v1::UpsertGroupRequest {
    set(request.config.as_mut().unwrap());
    request
}

fn masked(request: v1::UpsertGroupRequest, paths: &[&str]) -> v1::UpsertGroupRequest {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    v1::UpsertGroupRequest { update_mask: Some(prost_types::FieldMask { paths }), ..request }
}

async fn upsert(operator: &Operator, request: v1::UpsertGroupRequest) -> Result<v1::GroupStatus, Status> {
    operator.client().upsert_group(request).await.map(tonic::Response::into_inner)
}

async fn file(site: &Site) -> Option<(ETag, GroupsFile)> {
    let key = groups_key(&crate::common::shard_id());
    let object = site.bucket.get(&key).await.ok()?;
    let read = records::decode_object::<GroupsFile>(&key, object).unwrap();
    Some((read.etag, read.value))
}

/// Which groups the config has is noted in the file too, and nothing of that is the API's.
async fn nothing_stored(site: &Site) -> bool {
    file(site).await.is_none_or(|(_, file)| file.groups.is_empty() && file.deleted.is_empty())
}

#[track_caller]
fn assert_problem(answer: Result<v1::GroupStatus, Status>, path: &str) {
    let status = answer.unwrap_err();
    let problems = problems_of(&status);
    assert!(problems.iter().any(|it| it.path == path), "{path}: {} {problems:?}", status.message());
    assert_refused(Err::<(), _>(status), Code::InvalidArgument, "BAD_REQUEST");
}

#[tokio::test]
async fn a_new_size_is_stored_told_and_reached() {
    let (shard, operator) = start(1).await;
    shard.vms(1).await;
    let status = upsert(&operator, sized("web", 3)).await.unwrap();
    assert_eq!((status.size, status.is_static), (3, true));
    let (_, stored) = file(&shard.site).await.unwrap();
    let entry = stored.groups.values().next().unwrap();
    assert_eq!((entry.size, entry.template.as_deref(), entry.generation), (Some(3), None, 1));
    assert_eq!(entry.updated_by, Some(operator.id.to_string()));
    shard.vms(3).await;
    let told = operator.hears("GroupChanged").await;
    assert_eq!((told.actor, told.group.as_str()), (operator.id.to_string(), "web"));
}

#[tokio::test]
async fn a_dynamic_group_is_made_and_survives_a_failover() {
    let (shard, operator) = start(0).await;
    let status = upsert(&operator, dynamic("batch", 2)).await.unwrap();
    assert_eq!((status.size, status.is_static, status.template.as_str()), (2, false, "knc"));
    let vms = shard.vms(2).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    let group = operator.group("batch").await;
    assert_eq!((group.size, group.etag), (2, status.etag));
    assert_eq!(shard.site.standing(), vms);
}

#[tokio::test]
async fn the_same_again_writes_nothing() {
    let (shard, operator) = start(0).await;
    let first = upsert(&operator, sized("web", 0)).await.unwrap();
    let (etag, _) = file(&shard.site).await.unwrap();
    let again = upsert(&operator, sized("web", 0)).await.unwrap();
    assert_eq!(first.etag, again.etag);
    assert_eq!(file(&shard.site).await.unwrap().0, etag);
    assert_eq!(operator.events("GroupChanged").len(), 1);
}

#[tokio::test]
async fn an_unset_size_stays_and_a_masked_one_goes_back_to_the_config() {
    let (_shard, operator) = start(0).await;
    upsert(&operator, sized("web", 1)).await.unwrap();
    let vars = |config: &mut v1::GroupConfig| {
        config.size = None;
        config.vars = [("A".to_owned(), "1".to_owned())].into();
    };
    let status = upsert(&operator, with(sized("web", 0), vars)).await.unwrap();
    assert_eq!((status.size, status.vars.get("A").map(String::as_str)), (1, Some("1")));
    let layer = status.layer.unwrap_or_default();
    assert_eq!((layer.size, layer.vars.len(), layer.template.as_str()), (Some(1), 1, ""), "only what the API holds");
    let nothing = |config: &mut v1::GroupConfig| *config = v1::GroupConfig::default();
    let status = upsert(&operator, masked(with(sized("web", 0), nothing), &["size"])).await.unwrap();
    assert_eq!((status.size, status.vars.len()), (0, 1), "only the size was named");
    let status = upsert(&operator, masked(with(sized("web", 0), nothing), &["vars"])).await.unwrap();
    assert!(status.vars.is_empty());
}

#[tokio::test]
async fn an_old_etag_is_told_and_changes_nothing() {
    let (shard, operator) = start(0).await;
    let before = operator.group("web").await.etag;
    let expecting = |etag: &str, size| v1::UpsertGroupRequest { expected_etag: etag.to_owned(), ..sized("web", size) };
    upsert(&operator, dynamic("batch", 0)).await.unwrap();
    let status = upsert(&operator, expecting(&before, 1)).await.unwrap();
    assert_ne!(status.etag, before);
    assert_refused(upsert(&operator, expecting(&before, 2)).await, Code::Aborted, "ETAG_MISMATCH");
    assert_eq!(operator.group("web").await.size, 1);
    let listed = operator.group("web").await.etag;
    assert_eq!(upsert(&operator, expecting(&listed, 0)).await.unwrap().size, 0);
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 2);
}

#[tokio::test]
async fn all_problems_come_at_once_and_nothing_is_stored() {
    let (shard, operator) = start(0).await;
    let bad =
        with(sized("web", -1), |config| config.drain_timeout = Some(prost_types::Duration { seconds: -1, nanos: 0 }));
    let bad =
        v1::UpsertGroupRequest { preferred_victims: vec!["nobody".to_owned()], ..masked(bad, &["size", "color"]) };
    let status = upsert(&operator, bad).await.unwrap_err();
    let mut paths: Vec<_> = problems_of(&status).into_iter().map(|it| it.path).collect();
    paths.sort();
    assert_eq!(paths, ["drain_timeout", "preferred_victims", "size", "update_mask"]);
    assert_problem(upsert(&operator, sized("UPPER", 1)).await, "key");
    assert_problem(upsert(&operator, with(sized("web", 1), |it| it.template = "other".to_owned())).await, "template");
    let args = |it: &mut v1::GroupConfig| it.args = [("Role".to_owned(), "admin".to_owned())].into();
    assert_problem(upsert(&operator, with(sized("web", 1), args)).await, "args");
    assert_problem(
        upsert(&operator, with(sized("web", 1), |it| it.subnet_pool = "other".to_owned())).await,
        "subnet_pool",
    );
    assert_problem(upsert(&operator, sized("web", 10_001)).await, "size");
    let new = upsert(&operator, sized("new", 1)).await.unwrap_err();
    assert_refused(Err::<(), _>(new), Code::InvalidArgument, "BAD_REQUEST");
    assert!(nothing_stored(&shard.site).await);
    // Equal to what the config says is no change of it.
    upsert(&operator, with(sized("web", 1), |it| it.template = "knc".to_owned())).await.unwrap();
    assert_eq!(file(&shard.site).await.unwrap().1.groups.values().next().unwrap().template, None);
}

#[tokio::test]
async fn the_named_victim_goes() {
    let (shard, operator) = start(3).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 3).await;
    let victim = *shard.site.standing().last().unwrap();
    let request = v1::UpsertGroupRequest { preferred_victims: vec![victim.to_string()], ..sized("web", 2) };
    upsert(&operator, request).await.unwrap();
    wait_until("the victim is gone", async || shard.site.phase(victim).await == Some(Phase::Deleted)).await;
    assert_eq!(shard.site.standing().len(), 2);
    // Its hint leaves the file with the next change.
    let vars = |config: &mut v1::GroupConfig| {
        config.size = None;
        config.vars = [("A".to_owned(), "1".to_owned())].into();
    };
    upsert(&operator, with(sized("web", 0), vars)).await.unwrap();
    assert!(file(&shard.site).await.unwrap().1.groups.values().all(|it| it.preferred_victims.is_empty()));
}

#[tokio::test]
async fn tenants_do_not_meet() {
    let (shard, operator) = start(1).await;
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    upsert(&other, dynamic("web", 0)).await.unwrap();
    assert_eq!(operator.group("web").await.size, 1);
    assert_eq!(other.group("web").await.size, 0);
    assert!(operator.events("GroupChanged").is_empty());
}

#[tokio::test]
async fn a_hand_that_edits_the_file_meanwhile_is_not_overwritten() {
    let (shard, operator) = start(0).await;
    let key = groups_key(&crate::common::shard_id());
    let by_hand = json!({ "default": { "batch": { "template": "knc", "size": 0 } } }).to_string();
    overwrite(shard.site.bucket.as_ref(), &key, by_hand.into_bytes()).await;
    upsert(&operator, sized("web", 0)).await.unwrap();
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 2);
    assert_eq!(operator.group("batch").await.size, 0, "and it is in force");
    overwrite(shard.site.bucket.as_ref(), &key, b"{ oops".to_vec()).await;
    assert_refused(upsert(&operator, sized("web", 1)).await, Code::FailedPrecondition, "GROUPS_UNREADABLE");
    assert_eq!(operator.group("web").await.size, 0, "memory changes after the commit only");
}

#[tokio::test]
async fn a_file_that_vanished_is_put_back_with_the_change_on_it() {
    let (shard, operator) = start(0).await;
    upsert(&operator, dynamic("batch", 0)).await.unwrap();
    shard.site.bucket.delete(&groups_key(&crate::common::shard_id())).await.unwrap();
    upsert(&operator, sized("web", 1)).await.unwrap();
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 2);
}

#[tokio::test]
async fn calls_at_the_same_time_all_land() {
    let (shard, operator) = start(0).await;
    let operator = Arc::new(operator);
    let calls = (0..8).map(|n| {
        let operator = operator.clone();
        async move { upsert(&operator, dynamic(&format!("g{n}"), 0)).await.unwrap() }
    });
    futures::future::join_all(calls).await;
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 8);
    wait_for("each is told", || operator.events("GroupChanged").len() == 8).await;
}

fn deletion(key: &str, expected_etag: &str) -> v1::DeleteGroupRequest {
    v1::DeleteGroupRequest { key: key.to_owned(), expected_etag: expected_etag.to_owned() }
}

async fn delete(operator: &Operator, request: v1::DeleteGroupRequest) -> Result<(), Status> {
    operator.client().delete_group(request).await.map(tonic::Response::into_inner)
}

#[tokio::test]
async fn a_deleted_group_drains_and_empties() {
    let (shard, operator) = start(1).await;
    let fleet = Fleet::on(&shard);
    let made = upsert(&operator, dynamic("batch", 2)).await.unwrap();
    fleet.is_whole(&shard.site, 3).await;
    assert_refused(delete(&operator, deletion("batch", "0-0")).await, Code::Aborted, "ETAG_MISMATCH");
    assert!(!operator.group("batch").await.deleting);
    delete(&operator, deletion("batch", &made.etag)).await.unwrap();
    // It is listed until its last member is gone.
    let listed = operator.client().list_groups(()).await.unwrap().into_inner().groups;
    assert!(listed.iter().filter(|group| group.key == "batch").all(|group| group.deleting));
    // A lost answer, asked for again.
    delete(&operator, deletion("batch", &made.etag)).await.unwrap();
    wait_for("only the other group is left", || shard.site.standing().len() == 1).await;
    assert_eq!(operator.hears("GroupDeleted").await.actor, operator.id.to_string());
    wait_for("members in use leave by a drain", || operator.events("DrainStarted").len() == 2).await;
    assert!(operator.events("DrainStarted").iter().all(|told| told.message.contains("group-deleted")));
    wait_until("it is empty", async || shard.site.living().await.len() == 1).await;
    // Once empty it may be made again.
    wait_until("made anew", async || upsert(&operator, dynamic("batch", 1)).await.is_ok()).await;
    wait_for("and comes up", || shard.site.standing().len() == 2).await;
}

#[tokio::test]
async fn the_sizes_of_a_group_are_exported_until_it_is_gone() {
    let shard = Shard::start_with(1, |config| {
        open(config);
        config["server"]["default_drain_timeout"] = json!("60s");
    })
    .await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    let made = upsert(&operator, dynamic("batch", 2)).await.unwrap();
    fleet.is_whole(&shard.site, 3).await;
    let lines = |group: &str| {
        let text = shard.server.metrics.text();
        let of = format!(r#"{{tenant="default",group="{group}"}}"#);
        let size = |name: &str| {
            let begin = format!("nstance_group_{name}{of} ");
            text.lines().find_map(|line| line.strip_prefix(&begin)).map(|size| size.parse::<u32>().unwrap())
        };
        ["desired", "actual", "ready"].map(size)
    };
    wait_for("all are ready", || lines("batch") == [Some(2); 3] && lines("web") == [Some(1); 3]).await;
    delete(&operator, deletion("batch", &made.etag)).await.unwrap();
    wait_for("none is wanted", || lines("batch") == [Some(0); 3]).await;
    for drained in operator.instances().await.into_iter().filter(|it| it.group == "batch") {
        let request = v1::DrainAckRequest { instance_id: drained.instance_id, drain_id: String::new() };
        wait_until("it is drained", async || operator.client().acknowledge_drained(request.clone()).await.is_ok())
            .await;
    }
    wait_for("its tombstone has no size", || lines("batch") == [None; 3]).await;
    assert_eq!(lines("web"), [Some(1); 3], "the other group is still there");
}

#[tokio::test]
async fn a_group_being_deleted_cannot_be_changed() {
    let shard = Shard::start_with(0, |config| {
        open(config);
        config["server"]["default_drain_timeout"] = json!("60s");
    })
    .await;
    let operator = Operator::on(&shard).await;
    let fleet = Fleet::on(&shard);
    upsert(&operator, dynamic("batch", 1)).await.unwrap();
    fleet.is_whole(&shard.site, 1).await;
    delete(&operator, deletion("batch", "")).await.unwrap();
    assert_refused(upsert(&operator, dynamic("batch", 1)).await, Code::FailedPrecondition, "GROUP_DELETING");
}

#[tokio::test]
async fn a_static_group_loses_its_override_only() {
    let (shard, operator) = start(1).await;
    shard.vms(1).await;
    upsert(&operator, sized("web", 2)).await.unwrap();
    shard.vms(2).await;
    delete(&operator, deletion("web", "")).await.unwrap();
    let group = operator.group("web").await;
    assert_eq!((group.size, group.deleting), (1, false));
    let warned = || operator.events("GroupChanged").into_iter().any(|it| it.severity() == v1::Severity::Warning);
    wait_for("a warning", warned).await;
    wait_for("back at its size", || shard.site.standing().len() == 1).await;
}

#[tokio::test]
async fn what_is_absent_is_deleted_already() {
    let (shard, operator) = start(0).await;
    delete(&operator, deletion("nobody", "")).await.unwrap();
    assert!(nothing_stored(&shard.site).await);
    assert_refused(delete(&operator, deletion("NO", "")).await, Code::InvalidArgument, "BAD_REQUEST");
}

/// A server whose bucket can be told to wait.
async fn start_slowly(size: u32) -> (Arc<Meddler>, Shard, Operator) {
    let bucket = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(bucket.clone(), FakeOptions::default()), size, open).await;
    let operator = Operator::on(&shard).await;
    (bucket, shard, operator)
}

/// Calls beside each other, with their places.
type Upserting = JoinSet<(usize, Result<v1::GroupStatus, Status>)>;

/// Calls of which the first is being put and the others wait.
async fn together(bucket: &Meddler, operator: &Operator, requests: Vec<v1::UpsertGroupRequest>) -> Upserting {
    bucket.hold(Some("groups.jsonc"));
    let before = bucket.n_puts("groups.jsonc");
    let mut calls = Upserting::new();
    for (n, request) in requests.into_iter().enumerate() {
        let mut client = operator.client();
        calls.spawn(async move { (n, client.upsert_group(request).await.map(tonic::Response::into_inner)) });
        if n == 0 {
            wait_for("the first is being put", || bucket.n_puts("groups.jsonc") == before + 1).await;
        }
    }
    // On the same connection: what is answered now was asked after all of them.
    for _ in 0..20 {
        operator.group("web").await;
    }
    calls
}

/// The answers in the order of the requests.
async fn answers(calls: Upserting) -> Vec<Result<v1::GroupStatus, Status>> {
    let mut answers = calls.join_all().await;
    answers.sort_by_key(|(n, _)| *n);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

#[tokio::test]
async fn a_burst_of_changes_travels_in_a_handful_of_puts() {
    let (bucket, shard, operator) = start_slowly(0).await;
    let mut requests: Vec<_> = (0..100).map(|n| dynamic(&format!("g{n}"), 0)).collect();
    // Refusals hurt nobody else, and each is its own.
    requests.insert(40, with(dynamic("bad", 0), |config| config.template = "knx".to_owned()));
    requests.insert(70, v1::UpsertGroupRequest { expected_etag: "9-9".to_owned(), ..dynamic("late", 0) });
    let keys: Vec<String> = requests.iter().map(|request| request.key.clone()).collect();
    let mut calls = together(&bucket, &operator, requests).await;
    assert!(calls.try_join_next().is_none(), "nobody is answered before its own commit");
    bucket.hold(None);
    for (key, answer) in keys.iter().zip(answers(calls).await) {
        match (key.as_str(), answer) {
            ("bad", answer) => assert_problem(answer, "template"),
            ("late", answer) => assert_refused(answer, Code::Aborted, "ETAG_MISMATCH"),
            (key, answer) => assert_eq!(answer.unwrap().key, key),
        }
    }
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 100);
    let n_puts = bucket.n_puts("groups.jsonc");
    assert!(n_puts <= 5, "{n_puts} puts");
    wait_for("each is told", || operator.events("GroupChanged").len() == 100).await;
}

#[tokio::test]
async fn changes_of_one_group_that_travel_together_build_on_each_other() {
    let (bucket, shard, operator) = start_slowly(0).await;
    let first = upsert(&operator, dynamic("batch", 0)).await.unwrap();
    let guarded = |size| v1::UpsertGroupRequest { expected_etag: first.etag.clone(), ..sized("batch", size) };
    let calls = together(&bucket, &operator, vec![sized("web", 0), guarded(1), guarded(2), sized("batch", 1)]).await;
    bucket.hold(None);
    let mut answers = answers(calls).await;
    assert_refused(answers.remove(2), Code::Aborted, "ETAG_MISMATCH");
    assert!(answers.iter().all(Result::is_ok));
    let stored = file(&shard.site).await.unwrap().1;
    let entry = stored.groups.iter().find(|(group, _)| group.group.as_str() == "batch").unwrap().1;
    assert_eq!((entry.size, entry.generation), (Some(1), 2), "the last one said nothing new");
}

#[tokio::test]
async fn a_change_that_cannot_be_stored_fails_alone() {
    let (bucket, shard, operator) = start_slowly(0).await;
    bucket.refuse("poison");
    let poisoned = with(dynamic("bad", 0), |config| config.vars = [("A".to_owned(), "poison".to_owned())].into());
    let requests = vec![dynamic("g0", 0), dynamic("g1", 0), poisoned, dynamic("g2", 0)];
    let calls = together(&bucket, &operator, requests).await;
    bucket.hold(None);
    let mut answers = answers(calls).await;
    assert_refused(answers.remove(2), Code::Unavailable, "STORE_UNAVAILABLE");
    assert!(answers.iter().all(Result::is_ok));
    assert_eq!(file(&shard.site).await.unwrap().1.groups.len(), 3);
}

#[tokio::test]
async fn hints_leave_the_file_with_their_instances_at_the_next_write() {
    let (shard, operator) = start(2).await;
    let ids = shard.vms(2).await;
    let request = v1::UpsertGroupRequest { preferred_victims: vec![ids[0].to_string()], ..sized("web", 1) };
    let hinted = upsert(&operator, request.clone()).await.unwrap();
    let stored = async |site: &Site| {
        let groups = file(site).await.unwrap().1.groups;
        groups.values().flat_map(|entry| entry.preferred_victims.clone()).collect::<Vec<_>>()
    };
    assert_eq!(stored(&shard.site).await, [ids[0]]);
    wait_until("it left", async || shard.site.phase(ids[0]).await == Some(Phase::Deleted)).await;
    let (etag, _) = file(&shard.site).await.unwrap();
    upsert(&operator, sized("web", 1)).await.unwrap();
    assert_eq!(file(&shard.site).await.unwrap().0, etag, "its leaving is no reason to write");
    // A write of another group takes it along, and changes nothing else of its group.
    upsert(&operator, dynamic("batch", 0)).await.unwrap();
    assert!(stored(&shard.site).await.is_empty());
    assert_eq!(operator.group("web").await.etag, hinted.etag);
    upsert(&operator, request).await.unwrap();
    assert!(stored(&shard.site).await.is_empty(), "and it does not come back");
}
