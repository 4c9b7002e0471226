//! A new config comes into force without a restart, as a whole or not at all, and takes nothing away by accident.

use std::{sync::Arc, time::Duration};

use crate::common::{
    LIMIT, Shard, Site, assert_refused, fleet::Fleet, meddler::Meddler, operator::Operator, overwrite, wait_for,
    wait_until, wire,
};
use nstance_core::ids::{GroupRef, Tenant};
use nstance_proto::v1;
use nstance_providers::fake::{FakeOptions, Op};
use nstance_server::grpc::status::problems_of;
use nstance_store::{
    memory::MemoryStore,
    records::{self, config_keys, groups::GroupsFile, groups::TombstoneReason, groups_key},
};
use serde_json::{Value, json};
use tonic::{Code, Status};

type Answer = Result<v1::RefreshConfigResponse, Status>;

async fn ask(operator: &Operator, request: v1::RefreshConfigRequest) -> Answer {
    operator.client().refresh_config(request).await.map(tonic::Response::into_inner)
}

async fn refresh(operator: &Operator) -> Answer {
    ask(operator, v1::RefreshConfigRequest::default()).await
}

async fn confirm(operator: &Operator) -> Answer {
    ask(operator, v1::RefreshConfigRequest { confirm_removals: true, dry_run: false }).await
}

async fn status(operator: &Operator) -> v1::ConfigStatusResponse {
    operator.client().get_config_status(()).await.unwrap().into_inner()
}

async fn file(site: &Site) -> GroupsFile {
    let key = groups_key(&crate::common::shard_id());
    let object = site.bucket.get(&key).await.unwrap();
    records::decode_object::<GroupsFile>(&key, object).unwrap().value
}

/// Waits until the groups file says that this many static groups were noted.
async fn settled(site: &Site, n: usize) {
    wait_until("static groups are noted", async || {
        let key = groups_key(&crate::common::shard_id());
        let Ok(object) = site.bucket.get(&key).await else { return false };
        let file = records::decode_object::<GroupsFile>(&key, object).unwrap().value;
        file.static_groups.is_some_and(|seen| seen.groups.len() == n && !seen.etag.is_empty())
    })
    .await;
}

fn group(tenant: &str, key: &str) -> GroupRef {
    GroupRef::new(tenant.parse().unwrap(), key.parse().unwrap())
}

fn sized(template: &str, size: u32) -> Value {
    json!({ "template": template, "size": size })
}

/// A second group and a second tenant beside `web`.
fn two(config: &mut Value) {
    config["tenants"] = json!({ "other": {} });
    config["groups"]["default"]["db"] = sized("knc", 1);
    config["groups"]["other"] = json!({ "apps": sized("knc", 1) });
}

async fn start(size: u32) -> (Shard, Operator, Value) {
    let shard = Shard::start_with(size, two).await;
    let mut config = shard.site.config(size);
    two(&mut config);
    let operator = Operator::on(&shard).await;
    settled(&shard.site, 3).await;
    (shard, operator, config)
}

#[tokio::test]
async fn a_refresh_of_the_same_config_changes_nothing() {
    let (shard, operator, _) = start(0).await;
    let before = (status(&operator).await, file(&shard.site).await);
    let answer = refresh(&operator).await.unwrap();
    assert_eq!((answer.updated, &answer.prev_etag, &answer.etag), (false, &before.0.etag, &before.0.etag));
    assert!(answer.warnings.is_empty(), "{:?}", answer.warnings);
    assert_eq!((status(&operator).await, file(&shard.site).await), before);
    assert!(operator.events("ConfigApplied").iter().all(|event| event.actor.is_empty()));
}

#[tokio::test]
async fn a_new_static_group_comes_to_life() {
    let (shard, operator, mut config) = start(0).await;
    shard.vms(2).await;
    config["groups"]["default"]["new"] = sized("knc", 2);
    shard.site.upload(&config).await;
    let before = status(&operator).await;
    let answer = refresh(&operator).await.unwrap();
    assert!(answer.updated);
    assert_eq!((answer.prev_etag, answer.changed_groups), (before.etag, vec!["new".to_owned()]));
    assert!(answer.removed_groups.is_empty() && answer.restarted.is_empty());
    assert_eq!(status(&operator).await.etag, answer.etag);
    shard.vms(4).await;
    let group_status = operator.group("new").await;
    assert_eq!((group_status.size, group_status.is_static), (2, true));
    let seen = file(&shard.site).await.static_groups.unwrap();
    assert_eq!((seen.etag, seen.groups.contains(&group("default", "new"))), (answer.etag, true));
    wait_for("the refresh is audited", || {
        operator.events("ConfigApplied").iter().any(|event| event.actor == operator.id.to_string())
    })
    .await;
    let told = operator.hears("GroupChanged").await;
    assert_eq!(told.group, "new");
}

#[tokio::test]
async fn a_removed_group_is_drained() {
    let (shard, operator, mut config) = start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 4).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("web");
    config["server"]["default_drain_timeout"] = json!("10m");
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    assert_eq!((answer.updated, answer.removed_groups), (true, vec!["web".to_owned()]));
    let tombstone = file(&shard.site).await.deleted[&group("default", "web")].clone();
    assert_eq!((tombstone.reason, tombstone.by), (TombstoneReason::Config, operator.id.to_string()));
    wait_until("both drain", async || operator.group("web").await.draining_size == 2).await;
    assert!(operator.group("web").await.deleting);
    assert!(shard.site.calls(Op::Delete).is_empty(), "nobody in use goes without a drain");
    let draining = operator.instances().await.into_iter().filter(|it| it.status == "draining");
    for it in draining {
        assert_eq!(it.drain.unwrap().reason, "group-deleted");
        let ack = v1::DrainAckRequest { instance_id: it.instance_id, drain_id: String::new() };
        operator.client().acknowledge_drained(ack).await.unwrap();
    }
    wait_for("they are gone", || shard.site.standing().len() == 2).await;
    assert_eq!(operator.hears("GroupDeleted").await.group, "web");
}

#[tokio::test]
async fn a_group_that_returns_lives_again() {
    let (shard, operator, config) = start(2).await;
    shard.vms(4).await;
    let mut without = config.clone();
    without["groups"]["default"].as_object_mut().unwrap().remove("web");
    shard.site.upload(&without).await;
    refresh(&operator).await.unwrap();
    wait_for("its instances left", || shard.site.standing().len() == 2).await;
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    assert_eq!((answer.updated, answer.changed_groups), (true, vec!["web".to_owned()]));
    assert!(file(&shard.site).await.deleted.is_empty(), "no tombstone stays");
    wait_for("it is full again", || shard.site.standing().len() == 4).await;
}

#[tokio::test]
async fn a_mass_removal_needs_a_word() {
    let (shard, operator, mut config) = start(4).await;
    let vms = shard.vms(6).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("web");
    config["groups"]["other"] = json!({});
    shard.site.upload(&config).await;
    let before = (status(&operator).await.etag, file(&shard.site).await);
    let refused = refresh(&operator).await.unwrap_err();
    assert!(refused.message().contains("web") && refused.message().contains("5 of 6"), "{}", refused.message());
    assert!(!refused.message().contains("apps"), "another tenant's group is counted: {}", refused.message());
    assert!(refused.message().contains("1 of other tenants"), "{}", refused.message());
    assert_refused(Err::<(), _>(refused), Code::FailedPrecondition, "MASS_REMOVAL");
    let dry = v1::RefreshConfigRequest { dry_run: true, confirm_removals: false };
    assert_refused(ask(&operator, dry).await, Code::FailedPrecondition, "MASS_REMOVAL");
    let now = status(&operator).await;
    assert_eq!((now.etag.clone(), file(&shard.site).await), before);
    assert!(!now.pending_etag.is_empty() && now.pending_etag != now.etag, "it waits");
    assert_eq!(shard.site.standing(), vms);

    let answer = confirm(&operator).await.unwrap();
    assert_eq!((answer.updated, answer.removed_groups), (true, vec!["web".to_owned()]));
    wait_for("they are gone", || shard.site.standing().len() == 1).await;
    assert!(status(&operator).await.pending_etag.is_empty());
}

#[tokio::test]
async fn a_size_of_nothing_is_a_removal_too() {
    let (shard, operator, mut config) = start(4).await;
    shard.vms(6).await;
    config["groups"]["default"]["web"]["size"] = json!(0);
    shard.site.upload(&config).await;
    assert_refused(refresh(&operator).await, Code::FailedPrecondition, "MASS_REMOVAL");
    let config = v1::GroupConfig { size: Some(0), ..v1::GroupConfig::default() };
    let own = v1::UpsertGroupRequest { key: "web".to_owned(), config: Some(config), ..Default::default() };
    operator.client().upsert_group(own).await.unwrap();
    wait_for("the API's word is never held", || shard.site.standing().len() == 2).await;
    assert!(refresh(&operator).await.unwrap().updated, "nothing is left to lose");
}

#[tokio::test]
async fn an_edit_does_not_lift_its_own_brake() {
    let (shard, operator, mut config) = start(4).await;
    shard.vms(6).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("web");
    config["server"]["safety"] = json!({ "max_removal_min": 100 });
    shard.site.upload(&config).await;
    assert_refused(refresh(&operator).await, Code::FailedPrecondition, "MASS_REMOVAL");
}

#[tokio::test]
async fn an_invalid_config_leaves_the_old_one_in_force() {
    let (shard, operator, mut config) = start(1).await;
    let vms = shard.vms(3).await;
    let before = (status(&operator).await, file(&shard.site).await);
    config["groups"]["default"]["web"]["template"] = json!("knx");
    config["server"]["leader_election"]["tttl"] = json!("1s");
    config["groups"]["other"]["apps"]["size"] = json!(-1);
    shard.site.upload(&config).await;
    let refused = refresh(&operator).await.unwrap_err();
    let paths: Vec<String> = problems_of(&refused).into_iter().map(|it| it.path).collect();
    assert!(paths.contains(&"groups.default.web.template".to_owned()), "{paths:?}");
    assert!(paths.contains(&"server.leader_election.tttl".to_owned()), "{paths:?}");
    assert!(paths.iter().all(|path| !path.contains("other")), "{paths:?}");
    assert!(!refused.message().contains("apps"), "{}", refused.message());
    assert!(refused.message().contains("1 problems in groups of other tenants"), "{}", refused.message());
    assert_refused(Err::<(), _>(refused), Code::InvalidArgument, "CONFIG_INVALID");
    let now = status(&operator).await;
    assert_eq!((now.etag, now.loaded_at, file(&shard.site).await), (before.0.etag, before.0.loaded_at, before.1));
    assert!(!now.pending_etag.is_empty());
    assert_eq!(shard.site.standing(), vms);
    wait_for("the refusal is audited", || {
        operator.events("ConfigRejected").iter().any(|event| event.actor == operator.id.to_string())
    })
    .await;

    let other = Operator::of(&shard, "other".parse().unwrap()).await;
    let refused = refresh(&other).await.unwrap_err();
    let paths: Vec<String> = problems_of(&refused).into_iter().map(|it| it.path).collect();
    assert!(paths.contains(&"groups.other.apps.size".to_owned()), "{paths:?}");
    assert!(paths.iter().all(|path| !path.contains("web")), "{paths:?}");
    assert!(!refused.message().contains("web"), "{}", refused.message());
    let heard = other.events("ConfigRejected");
    assert!(heard.iter().all(|event| !event.message.contains("web")), "{heard:?}");
}

#[tokio::test]
async fn what_a_shard_is_cannot_change() {
    let (shard, operator, mut config) = start(0).await;
    shard.vms(2).await;
    config["server"]["provider"]["zone"] = json!("z2");
    config.as_object_mut().unwrap().remove("tenants");
    config["groups"].as_object_mut().unwrap().remove("other");
    shard.site.upload(&config).await;
    let refused = refresh(&operator).await.unwrap_err();
    let problems = problems_of(&refused);
    let found: Vec<_> = problems.iter().map(|it| (it.code.as_str(), it.path.as_str())).collect();
    assert_eq!(found, [("immutable", "server.provider.zone")], "the tenant's use is not the caller's business");
    assert_refused(Err::<(), _>(refused), Code::InvalidArgument, "CONFIG_INVALID");
    let other = Operator::of(&shard, "other".parse().unwrap()).await;
    let refused = refresh(&other).await.unwrap_err();
    assert!(problems_of(&refused).iter().any(|it| it.path == "tenants.other"), "{}", refused.message());
}

#[tokio::test]
async fn a_store_that_is_silent_leaves_the_old_config_in_force() {
    let meddler = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(meddler.clone(), FakeOptions::default()), 1, |_| {}).await;
    let operator = Operator::on(&shard).await;
    let before = status(&operator).await.etag;
    meddler.hide(Some("config"));
    let refused = refresh(&operator).await.unwrap_err();
    assert!(refused.message().contains("stays in force"), "{}", refused.message());
    assert_refused(Err::<(), _>(refused), Code::Unavailable, "STORE_UNAVAILABLE");
    meddler.hide(None);
    let [key, _] = config_keys(&crate::common::shard_id());
    shard.site.bucket.delete(&key).await.unwrap();
    let refused = refresh(&operator).await.unwrap_err();
    assert!(refused.message().contains("missing"), "{}", refused.message());
    assert_refused(Err::<(), _>(refused), Code::Unavailable, "STORE_UNAVAILABLE");
    assert_eq!(status(&operator).await.etag, before);
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let (shard, operator, mut config) = start(2).await;
    let vms = shard.vms(4).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("db");
    config["groups"]["default"]["web"]["size"] = json!(3);
    shard.site.upload(&config).await;
    let before = (status(&operator).await, file(&shard.site).await);
    let answer = ask(&operator, v1::RefreshConfigRequest { dry_run: true, confirm_removals: false }).await.unwrap();
    assert!(!answer.updated && answer.etag != answer.prev_etag);
    assert_eq!((answer.changed_groups, answer.removed_groups), (vec!["web".to_owned()], vec!["db".to_owned()]));
    assert_eq!((status(&operator).await, file(&shard.site).await), before);
    assert_eq!(shard.site.standing(), vms);
    assert!(operator.events("GroupDeleted").is_empty());
    let answer = refresh(&operator).await.unwrap();
    assert!(answer.updated, "the dry run took nothing from the real one");
}

#[tokio::test]
async fn without_the_lease_nothing_is_applied() {
    let meddler = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = Site::on(meddler.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 1, |_| {}).await;
    let operator = Operator::on(&shard).await;
    settled(&shard.site, 1).await;
    let before = status(&operator).await.etag;
    shard.site.upload(&shard.site.config(2)).await;
    meddler.hold(Some("leader.json"));
    wait_until("the lease runs out", async || {
        let role = serde_json::to_value(shard.server.vitals.ready().role).unwrap();
        role == "stalled"
    })
    .await;
    assert_refused(refresh(&operator).await, Code::Unavailable, "LEASE_STALLED");
    assert_eq!(status(&operator).await.etag, before);
    meddler.hold(None);
    wait_until("the lease is back", async || refresh(&operator).await.is_ok_and(|answer| answer.updated)).await;
}

#[tokio::test]
async fn a_runtime_change_replaces_nobody() {
    let (shard, operator, mut config) = start(2).await;
    let vms = shard.vms(4).await;
    let before = operator.group("web").await;
    config["groups"]["default"]["web"]["vars"] = json!({ "Greeting": "hello" });
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    assert_eq!(answer.changed_groups, ["web"]);
    let after = operator.group("web").await;
    assert_eq!(after.infra_hash, before.infra_hash);
    assert_ne!(after.runtime_hash, before.runtime_hash);
    assert_eq!(after.vars["Greeting"], "hello");
    assert_eq!((shard.site.standing(), shard.site.calls(Op::Create).len()), (vms, 4));
}

#[tokio::test]
async fn an_infra_change_starts_a_rollout() {
    let (shard, operator, mut config) = start(2).await;
    let fleet = Fleet::on(&shard);
    fleet.is_whole(&shard.site, 4).await;
    wait_until("all are ready", async || operator.group("web").await.ready_size == 2).await;
    let old: Vec<_> = operator.group("web").await.provider_ids;
    let before = operator.group("web").await.infra_hash;
    config["groups"]["default"]["web"]["instance_type"] = json!("bigger");
    shard.site.upload(&config).await;
    assert_eq!(refresh(&operator).await.unwrap().changed_groups, ["web"]);
    assert_ne!(operator.group("web").await.infra_hash, before);
    wait_until("everybody is replaced", async || {
        let group = operator.group("web").await;
        group.updated_size == 2 && group.actual_size == 2 && group.draining_size == 0
    })
    .await;
    let new = operator.group("web").await.provider_ids;
    assert!(new.iter().all(|id| !old.contains(id)), "{old:?} {new:?}");
    assert_eq!(shard.site.calls(Op::Create).len(), 6, "nobody else was replaced");
}

#[tokio::test]
async fn settings_apply_live_and_the_others_are_named() {
    let (shard, operator, mut config) = start(0).await;
    let before = operator.group("web").await.drain_timeout.unwrap();
    assert_eq!(before.seconds, 0);
    config["server"]["default_drain_timeout"] = json!("7m");
    config["server"]["create_rate_limit"] = json!("1h");
    config["server"]["create_burst"] = json!(1);
    config["server"]["garbage_collection"]["interval"] = json!("20s");
    config["server"]["leader_election"]["ttl"] = json!("7s");
    shard.site.upload(&config).await;
    let n_lists = shard.site.calls(Op::List).len();
    let answer = refresh(&operator).await.unwrap();
    assert_eq!(answer.restarted, ["collector"]);
    assert!(answer.warnings.iter().any(|it| it.contains("server.leader_election")), "{:?}", answer.warnings);
    let errors = status(&operator).await.apply_errors;
    assert!(errors.len() == 1 && errors[0].contains("leader_election"), "{errors:?}");
    assert_eq!(operator.group("web").await.drain_timeout.unwrap().seconds, 7 * 60);
    wait_for("the collector began anew", || n_lists < shard.site.calls(Op::List).len()).await;
    let n_creates = shard.site.calls(Op::Create).len();
    config["groups"]["default"]["web"]["size"] = json!(3);
    shard.site.upload(&config).await;
    refresh(&operator).await.unwrap();
    wait_for("one create passes", || shard.site.calls(Op::Create).len() == n_creates + 1).await;
    config["server"]["create_rate_limit"] = json!("0s");
    config["server"]["leader_election"]["ttl"] = json!("6s");
    shard.site.upload(&config).await;
    refresh(&operator).await.unwrap();
    wait_for("the others follow at the new rate", || shard.site.calls(Op::Create).len() == n_creates + 3).await;
    assert!(status(&operator).await.apply_errors.is_empty(), "it is back to what runs");
}

#[tokio::test]
async fn a_changed_group_forgets_what_went_wrong() {
    let impatient = |config: &mut Value| {
        config["server"]["garbage_collection"] = json!({ "interval": "500ms", "registration_timeout": "1s" });
    };
    let shard = Shard::start_with(1, impatient).await;
    let operator = Operator::on(&shard).await;
    let backs_off = async || operator.holds("web").await.contains(&"BackingOff".to_owned());
    // Nobody registers: after two there is a pause of a minute.
    wait_until("it backs off", backs_off).await;
    let n_creates = shard.site.calls(Op::Create).len();
    let mut config = shard.site.config(1);
    impatient(&mut config);
    config["server"]["create_burst"] = json!(50);
    shard.site.upload(&config).await;
    assert!(refresh(&operator).await.unwrap().changed_groups.is_empty());
    assert!(backs_off().await, "nothing of the group changed");
    config["groups"]["default"]["web"]["vars"] = json!({ "A": "a" });
    shard.site.upload(&config).await;
    refresh(&operator).await.unwrap();
    wait_for("it is tried at once", || n_creates < shard.site.calls(Op::Create).len()).await;
}

#[tokio::test]
async fn lists_name_the_callers_tenant_only() {
    let (shard, operator, mut config) = start(0).await;
    let other = Operator::of(&shard, "other".parse::<Tenant>().unwrap()).await;
    shard.vms(2).await;
    config["groups"]["other"] = json!({ "new": sized("knc", 0) });
    config["groups"]["default"]["mine"] = sized("knc", 0);
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    assert_eq!((answer.changed_groups, answer.removed_groups.len()), (vec!["mine".to_owned()], 0));
    let told = other.hears("GroupDeleted").await;
    assert_eq!((told.group.as_str(), told.actor.as_str()), ("apps", ""));
    assert!(operator.events("GroupDeleted").is_empty());
    let heard = other.events("ConfigApplied");
    assert!(!heard.is_empty() && heard.iter().all(|event| event.actor.is_empty()), "{heard:?}");
    config["groups"]["other"] = json!({});
    shard.site.upload(&config).await;
    let answer = refresh(&other).await.unwrap();
    assert_eq!((answer.changed_groups.len(), answer.removed_groups), (0, vec!["new".to_owned()]));
}

#[tokio::test]
async fn refreshes_take_turns() {
    let meddler = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let shard = Shard::start_on(Site::on(meddler.clone(), FakeOptions::default()), 0, |_| {}).await;
    let operator = Operator::on(&shard).await;
    settled(&shard.site, 1).await;
    shard.site.upload(&shard.site.config(2)).await;
    meddler.hold(Some("groups.jsonc"));
    let release = async {
        wait_for("one is about to commit", || meddler.is_holding()).await;
        // Sent after them on the same line, answered before them.
        status(&operator).await;
        meddler.hold(None);
    };
    let (answers, ()) = tokio::join!(futures::future::join_all((0..8).map(|_| refresh(&operator))), release);
    let n_updated = answers.into_iter().filter(|answer| answer.as_ref().unwrap().updated).count();
    assert_eq!(n_updated, 1, "the others find it done");
    shard.vms(2).await;
}

#[tokio::test]
async fn an_override_that_no_longer_fits_is_warned_about() {
    let (shard, operator, mut config) = start(0).await;
    config["templates"]["gone"] = json!({ "kind": "gon", "arch": "amd64", "subnet_pool": "main", "size": 0 });
    shard.site.upload(&config).await;
    refresh(&operator).await.unwrap();
    let own = v1::GroupConfig { template: "gone".to_owned(), size: Some(1), ..v1::GroupConfig::default() };
    let request = v1::UpsertGroupRequest { key: "api".to_owned(), config: Some(own), ..Default::default() };
    operator.client().upsert_group(request).await.unwrap();
    let vms = shard.vms(3).await;
    config["templates"].as_object_mut().unwrap().remove("gone");
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    assert!(answer.warnings.iter().any(|it| it.contains("api")), "{:?}", answer.warnings);
    wait_until("it is held", async || operator.holds("api").await.contains(&"GroupUnknown".to_owned())).await;
    assert_eq!(shard.site.standing(), vms, "its members stay");
}

#[tokio::test]
async fn a_group_that_left_while_nobody_led_is_drained() {
    let (shard, _, mut config) = start(2).await;
    shard.vms(4).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("web");
    shard.site.upload(&config).await;
    let shard = shard.restart("srv-2").await;
    wait_for("its instances left", || shard.site.standing().len() == 2).await;
    let tombstone = file(&shard.site).await.deleted[&group("default", "web")].clone();
    assert_eq!((tombstone.reason, tombstone.by.as_str()), (TombstoneReason::Config, "srv-2"));
}

#[tokio::test]
async fn a_takeover_with_a_mass_removal_holds() {
    let (shard, _, config) = start(4).await;
    let vms = shard.vms(6).await;
    let mut without = config.clone();
    without["groups"]["default"].as_object_mut().unwrap().remove("web");
    without["groups"]["default"]["db"]["size"] = json!(0);
    shard.site.upload(&without).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    for key in ["web", "db"] {
        wait_until("it is held", async || operator.holds(key).await.contains(&"MassRemoval".to_owned())).await;
    }
    assert!(!operator.group("web").await.deleting);
    let answer = refresh(&operator).await.unwrap();
    assert!(!answer.updated && answer.warnings[0].contains("db, web"), "{:?}", answer.warnings);

    // Another leader holds it just the same.
    let shard = shard.restart("srv-3").await;
    let operator = Operator::on(&shard).await;
    wait_until("it is held", async || operator.holds("web").await.contains(&"MassRemoval".to_owned())).await;
    assert!(file(&shard.site).await.deleted.is_empty());
    assert_eq!(shard.site.standing(), vms);

    let answer = confirm(&operator).await.unwrap();
    assert_eq!((answer.updated, answer.removed_groups), (true, vec!["web".to_owned()]));
    wait_for("they are gone", || shard.site.standing().len() == 1).await;
    let shard = shard.restart("srv-4").await;
    let operator = Operator::on(&shard).await;
    assert!(!operator.holds("db").await.contains(&"MassRemoval".to_owned()), "once confirmed is enough");
}

#[tokio::test]
async fn a_held_group_is_let_go_by_name() {
    let (shard, _, config) = start(4).await;
    shard.vms(6).await;
    let mut without = config.clone();
    without["groups"]["default"].as_object_mut().unwrap().remove("web");
    without["groups"]["default"]["db"]["size"] = json!(0);
    shard.site.upload(&without).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    wait_until("it is held", async || operator.holds("db").await.contains(&"MassRemoval".to_owned())).await;
    let delete = |key: &str| v1::DeleteGroupRequest { key: key.to_owned(), expected_etag: String::new() };
    operator.client().delete_group(delete("db")).await.unwrap();
    wait_for("db is empty", || shard.site.standing().len() == 5).await;
    assert!(operator.holds("web").await.contains(&"MassRemoval".to_owned()), "only the one that was named");
    operator.client().delete_group(delete("web")).await.unwrap();
    wait_for("web is empty", || shard.site.standing().len() == 1).await;
}

#[tokio::test]
async fn a_held_group_that_returns_is_as_it_was() {
    let (shard, _, config) = start(4).await;
    let vms = shard.vms(6).await;
    let mut without = config.clone();
    without["groups"]["default"].as_object_mut().unwrap().remove("web");
    shard.site.upload(&without).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    wait_until("it is held", async || operator.holds("web").await.contains(&"MassRemoval".to_owned())).await;
    shard.site.upload(&config).await;
    assert_eq!(refresh(&operator).await.unwrap().changed_groups, ["web"]);
    wait_until("nothing holds it", async || operator.holds("web").await.is_empty()).await;
    assert_eq!(operator.group("web").await.actual_size, 4);
    assert_eq!((shard.site.standing(), shard.site.calls(Op::Create).len()), (vms, 6));
}

#[tokio::test]
async fn an_unreadable_group_keeps_its_members() {
    let (shard, _, mut config) = start(2).await;
    let vms = shard.vms(4).await;
    config["groups"]["default"].as_object_mut().unwrap().remove("web");
    shard.site.upload(&config).await;
    overwrite(shard.site.bucket.as_ref(), &groups_key(&crate::common::shard_id()), b"{ \"groups\": ".to_vec()).await;
    let shard = shard.restart("srv-2").await;
    let operator = Operator::on(&shard).await;
    wait_until("it is held", async || operator.holds("web").await.contains(&"GroupUnknown".to_owned())).await;
    assert_eq!(shard.site.standing(), vms);
    config["groups"]["default"]["db"]["size"] = json!(0);
    shard.site.upload(&config).await;
    assert_refused(confirm(&operator).await, Code::FailedPrecondition, "GROUPS_UNREADABLE");
    assert_eq!(shard.site.standing(), vms);
}

#[tokio::test]
async fn a_standby_leads_by_the_newest_config() {
    let (shard, operator, mut config) = start(0).await;
    shard.vms(2).await;
    let mut standby = shard.site.boot("srv-2");
    tokio::time::timeout(LIMIT, standby.health_addr()).await.unwrap().unwrap();
    wait_for("it stands by", || standby.vitals.ready().ready).await;
    config["groups"]["default"]["web"]["size"] = json!(2);
    shard.site.upload(&config).await;
    let etag = refresh(&operator).await.unwrap().etag;
    let vms = shard.vms(4).await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    let shard = Shard::of(site, standby).await;
    let operator = Operator::on(&shard).await;
    assert_eq!((status(&operator).await.etag, operator.group("web").await.size), (etag, 2));
    assert_eq!(shard.site.standing(), vms);
}

#[tokio::test]
async fn an_old_copy_is_given_up_once_the_store_answers() {
    let meddler = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = Site::on(meddler.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 1, |_| {}).await;
    settled(&shard.site, 1).await;
    shard.only_vm().await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    site.upload(&site.config(2)).await;
    meddler.hide(Some("config/"));
    let mut shard = site.lead("srv-1").await;
    let operator = Operator::on(&shard).await;
    let old = status(&operator).await;
    assert!(old.stale);
    let health = shard.server.health_addr().await.unwrap();
    let (_, body) = wire::get(health, "/ready").await.unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["config"]["stale"], true);
    assert!(body["problems"][0].as_str().unwrap().starts_with("config"), "{body}");
    meddler.hide(None);
    wait_until("the stored config is in force", async || {
        let now = status(&operator).await;
        !now.stale && now.etag != old.etag
    })
    .await;
    shard.vms(2).await;
    let (_, body) = wire::get(health, "/ready").await.unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&body["config"]["stale"], body["problems"].as_array().unwrap().len()), (&json!(false), 0), "{body}");
}

#[tokio::test]
async fn an_invalid_config_at_start_is_repaired_by_a_refresh() {
    let (shard, _, mut config) = start(1).await;
    shard.vms(3).await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    config["groups"]["default"]["web"]["template"] = json!("knx");
    site.upload(&config).await;
    let shard = site.lead("srv-1").await;
    let operator = Operator::on(&shard).await;
    let now = status(&operator).await;
    assert!(now.stale && !now.pending_etag.is_empty());
    assert_refused(refresh(&operator).await, Code::InvalidArgument, "CONFIG_INVALID");
    config["groups"]["default"]["web"] = sized("knc", 2);
    shard.site.upload(&config).await;
    assert!(refresh(&operator).await.unwrap().updated);
    let now = status(&operator).await;
    assert!(!now.stale && now.pending_etag.is_empty());
    shard.vms(4).await;
}

#[tokio::test]
async fn a_mass_removal_that_comes_late_is_held_too() {
    let meddler = Arc::new(Meddler::new(Arc::new(MemoryStore::new())));
    let site = Site::on(meddler.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, 4, |_| {}).await;
    settled(&shard.site, 1).await;
    let vms = shard.vms(4).await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    site.upload(&site.config(0)).await;
    meddler.hide(Some("config/"));
    let shard = site.lead("srv-1").await;
    let operator = Operator::on(&shard).await;
    assert!(status(&operator).await.stale);
    meddler.hide(None);
    wait_until("the stored config is in force", async || !status(&operator).await.stale).await;
    wait_until("it is held", async || operator.holds("web").await.contains(&"MassRemoval".to_owned())).await;
    assert_eq!(shard.site.standing(), vms);
    assert!(confirm(&operator).await.unwrap().updated);
    wait_for("they are gone", || shard.site.standing().is_empty()).await;
}

#[tokio::test]
async fn a_config_older_than_the_last_one_takes_nothing_away() {
    let (shard, operator, mut config) = start(1).await;
    let mut standby = shard.site.boot("srv-2");
    tokio::time::timeout(LIMIT, standby.health_addr()).await.unwrap().unwrap();
    wait_for("it stands by", || standby.vitals.ready().ready).await;
    config["groups"]["default"]["web"]["size"] = json!(3);
    shard.site.upload(&config).await;
    refresh(&operator).await.unwrap();
    let vms = shard.vms(5).await;
    shard.site.upload_text("{ \"server\": ").await;
    let Shard { site, server, .. } = shard;
    server.stop(Duration::from_secs(5)).await;
    let shard = Shard::of(site, standby).await;
    let operator = Operator::on(&shard).await;
    let now = status(&operator).await;
    assert!(now.stale && !now.pending_etag.is_empty());
    wait_until("it is held", async || operator.holds("web").await.contains(&"MassRemoval".to_owned())).await;
    assert_eq!(shard.site.standing(), vms, "the size of its boot time is not believed");
    shard.site.upload(&config).await;
    assert!(refresh(&operator).await.unwrap().updated);
    wait_until("nothing holds it", async || operator.holds("web").await.is_empty()).await;
    let group = operator.group("web").await;
    assert_eq!((group.size, group.actual_size, shard.site.standing()), (3, 3, vms));
}

#[tokio::test]
async fn the_first_place_wins_and_the_second_is_named() {
    let (shard, operator, mut config) = start(0).await;
    let [first, second] = config_keys(&crate::common::shard_id());
    overwrite(shard.site.bucket.as_ref(), &second, config.to_string().into_bytes()).await;
    config["groups"]["default"]["web"]["drain_timeout"] = json!("3m");
    shard.site.upload(&config).await;
    let answer = refresh(&operator).await.unwrap();
    let named = |it: &String| it.contains(&first) && it.contains(&second);
    assert!(answer.updated && answer.warnings.iter().any(named), "{:?}", answer.warnings);
    shard.site.bucket.delete(&first).await.unwrap();
    assert!(refresh(&operator).await.unwrap().updated, "proved absent, the first gives way to the second");
    assert_eq!(operator.group("web").await.drain_timeout.unwrap().seconds, 0);
}
