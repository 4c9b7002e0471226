//! Rollouts: a group takes on another template, one member after another, and nobody has to watch it.

use std::{sync::Arc, time::Duration};

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator, wait_for, wait_until, witness::Witness};
use nstance_core::{ids::InstanceId, instance::Phase};
use nstance_proto::v1::{self, operator_service_client::OperatorServiceClient};
use nstance_providers::fake::{FakeOptions, Op};
use serde_json::Value;
use tokio::task::JoinSet;
use tonic::transport::Channel;

/// Longer than the tests leap: nobody is silent for a report that was not due.
const SELDOM: u32 = 24 * 3600 * 1000;

/// Longer than any rollout here takes on a busy machine; only a failing test waits for it.
const ROLLOUT: Duration = Duration::from_secs(120);

struct Plane {
    shard: Shard,
    fleet: Fleet,
    operator: Operator,
    witness: Arc<Witness>,
}

/// A group of so many, all of them ready, that drains until somebody acknowledges.
async fn whole(n: u32) -> Plane {
    whole_with(n, |_| {}).await
}

async fn whole_with(n: u32, change: impl FnOnce(&mut Value)) -> Plane {
    let witness = Witness::new();
    let site = Site::on(witness.clone(), FakeOptions::default());
    let shard = Shard::start_on(site, n, |config| {
        config["server"]["default_drain_timeout"] = "1h".into();
        config["server"]["garbage_collection"]["interval"] = "2s".into();
        config["templates"]["knc"]["instance_type"] = "small".into();
        change(config);
    })
    .await;
    let fleet = Fleet::reporting_every(&shard, SELDOM);
    let operator = Operator::on(&shard).await;
    let plane = Plane { shard, fleet, operator, witness };
    plane.is_ready(n).await;
    plane
}

impl Plane {
    async fn is_ready(&self, n: u32) {
        let ready = async || u32::try_from(self.operator.group("web").await.ready_size).unwrap() == n;
        wait_until("all are ready", ready).await;
    }

    async fn upsert(&self, config: v1::GroupConfig) {
        let request =
            v1::UpsertGroupRequest { key: "web".to_owned(), config: Some(config), ..v1::UpsertGroupRequest::default() };
        self.operator.client().upsert_group(request).await.unwrap();
    }

    async fn leap(&self, by: Duration) {
        self.operator.leap(&self.shard.site, by).await;
    }

    /// Another instance type is another infra hash.
    async fn roll_out(&self, instance_type: &str) {
        self.upsert(v1::GroupConfig { instance_type: instance_type.to_owned(), ..v1::GroupConfig::default() }).await;
    }

    async fn rollout(&self) -> v1::RolloutStatus {
        self.operator.group("web").await.rollout.unwrap()
    }

    /// Members of the target that are not on their way out.
    async fn types(&self) -> Vec<String> {
        let mut types: Vec<_> = self
            .shard
            .site
            .records()
            .await
            .into_iter()
            .filter(|it| matches!(it.phase(), Phase::Pending | Phase::Provisioning | Phase::Running))
            .filter_map(|it| it.instance_type)
            .collect();
        types.sort();
        types
    }

    async fn is_rolled_out(&self, instance_type: &str, n: usize) {
        let rolled_out = async {
            let done = async || {
                self.types().await == vec![instance_type.to_owned(); n] && self.shard.site.standing().len() == n
            };
            while !done().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(
            tokio::time::timeout(ROLLOUT, rolled_out).await.is_ok(),
            "stuck: {:?}",
            self.operator.group("web").await
        );
    }

    fn n_creates(&self) -> usize {
        self.shard.site.calls(Op::Create).len()
    }

    /// Another leader, with an empty cache.
    async fn fail_over(self) -> Self {
        let Self { shard, fleet, operator, witness } = self;
        drop(operator);
        let shard = shard.restart("srv-2").await;
        fleet.follow(&shard);
        let operator = Operator::on(&shard).await;
        Self { shard, fleet, operator, witness }
    }

    /// Minutes from the hold's beginning to its end, for a group that is held like this.
    async fn held(&self, kind: &str) -> v1::PlanHold {
        let of = async || self.operator.group("web").await.holds.into_iter().find(|hold| hold.kind == kind);
        wait_until(kind, async || of().await.is_some()).await;
        of().await.unwrap()
    }
}

/// Acknowledges every drain as soon as it is seen, as a cluster does whose nodes are empty at once.
fn acknowledge_all(operator: &Operator) -> JoinSet<()> {
    async fn pass(client: &mut OperatorServiceClient<Channel>) -> Option<()> {
        let listed = client.list_instances(v1::ListInstancesRequest::default()).await.ok()?.into_inner();
        for it in listed.instances {
            let Some(drain) = it.drain.filter(|drain| it.status == "draining" && drain.acked_at.is_none()) else {
                continue;
            };
            let request = v1::DrainAckRequest { instance_id: it.instance_id, drain_id: drain.drain_id };
            client.acknowledge_drained(request).await.ok()?;
        }
        Some(())
    }
    let mut client = operator.client();
    let mut task = JoinSet::new();
    task.spawn(async move {
        // Ends with the leader it speaks to.
        while pass(&mut client).await.is_some() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    task
}

#[tokio::test]
async fn a_rollout_finishes_unattended_within_budget() {
    let plane = whole(10).await;
    let _acks = acknowledge_all(&plane.operator);
    let before = plane.rollout().await;
    assert_eq!((before.updated, before.total, before.failures, before.paused), (10, 10, 0, false));
    plane.witness.begin();
    plane.roll_out("large").await;
    plane.is_rolled_out("large", 10).await;
    assert_eq!(plane.witness.extremes(), (10, 1), "never below its size, never two drains at once");
    plane.operator.hears("RolloutFinished").await;
    assert_eq!(plane.n_creates(), 20, "one replacement each");
    assert_eq!(plane.operator.events("RolloutStarted").len(), 1);
    let steps: Vec<_> = plane.operator.events("RolloutProgressed").into_iter().map(|event| event.message).collect();
    assert_eq!(steps, (1..=10).map(|n| format!("{n} of 10 updated")).collect::<Vec<_>>());
    let after = plane.rollout().await;
    assert_eq!((after.updated, after.total, after.reason.as_str()), (10, 10, ""));
    assert_ne!(after.target_hash, before.target_hash);
    assert!(plane.operator.events("RolloutFailing").is_empty());
    plane.shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_rollout_waits_for_each_drain() {
    let plane = whole(2).await;
    plane.roll_out("large").await;
    plane.operator.hears("DrainStarted").await;
    plane.held("WaitingForDrain").await;
    let reason = plane.rollout().await.reason;
    assert!(reason.starts_with("WaitingForDrain"), "{reason}");
    assert_eq!(plane.n_creates(), 3, "nobody else is replaced meanwhile");
    let _acks = acknowledge_all(&plane.operator);
    plane.is_rolled_out("large", 2).await;
}

#[tokio::test]
async fn a_paused_rollout_waits_for_a_person() {
    let plane = whole(2).await;
    let _acks = acknowledge_all(&plane.operator);
    plane
        .upsert(v1::GroupConfig {
            instance_type: "large".to_owned(),
            rollout_paused: Some(true),
            ..v1::GroupConfig::default()
        })
        .await;
    plane.held("RolloutPaused").await;
    let rollout = plane.rollout().await;
    assert_eq!((rollout.paused, rollout.updated, rollout.total), (true, 0, 2));
    assert!(rollout.reason.starts_with("RolloutPaused"), "{}", rollout.reason);
    // What is lost is replaced all the same, and by the new template.
    let lost = plane.shard.site.standing()[0];
    plane.shard.site.cloud.kill(lost);
    wait_until("the lost one is replaced", async || plane.types().await == ["large", "small"]).await;
    plane.is_ready(2).await;
    assert_eq!(plane.n_creates(), 3);
    plane.upsert(v1::GroupConfig { rollout_paused: Some(false), ..v1::GroupConfig::default() }).await;
    plane.is_rolled_out("large", 2).await;
}

#[tokio::test]
async fn a_failing_rollout_holds_and_probes() {
    let mut plane = whole(2).await;
    let _acks = acknowledge_all(&plane.operator);
    let (site, old) = (plane.shard.site.clone(), plane.shard.site.standing());
    plane.fleet.deafen_new(&site);
    plane.roll_out("broken").await;
    // Each try comes up and never registers; the next one is due after 1 and 2 minutes.
    for (n, wait) in [(1, 61), (2, 121), (3, 0)] {
        wait_for("a replacement stands", || plane.n_creates() == 2 + n && site.standing().len() == 3).await;
        plane.leap(Duration::from_secs(61)).await;
        wait_for("it is given up", || site.standing() == old).await;
        let failures = async || plane.rollout().await.failures;
        wait_until("it is counted", async || usize::try_from(failures().await).unwrap() == n).await;
        if n < 3 {
            let hold = plane.held("BackingOff").await;
            assert!(hold.until.is_some());
            plane.leap(Duration::from_secs(wait)).await;
        }
    }
    let told = plane.operator.hears("RolloutFailing").await;
    assert!(told.message.starts_with("3 instances in a row"), "{}", told.message);
    let hold = plane.held("RolloutFailing").await;
    assert!(plane.rollout().await.reason.starts_with("RolloutFailing"));
    assert_eq!(plane.operator.events("DrainStarted").len(), 0, "nobody left for it");

    // A new leader knows it from the records, and tells nothing twice.
    plane = plane.fail_over().await;
    let _acks = acknowledge_all(&plane.operator);
    let again = plane.held("RolloutFailing").await;
    assert_eq!(again.until, hold.until);
    assert_eq!(plane.rollout().await.failures, 3);
    assert!(plane.operator.events("RolloutFailing").is_empty() && plane.operator.events("RolloutStarted").is_empty());
    assert_eq!(plane.n_creates(), 5);

    // After ten minutes one probe, and no more.
    plane.leap(Duration::from_secs(601)).await;
    wait_for("the probe stands", || plane.n_creates() == 6).await;
    plane.leap(Duration::from_secs(61)).await;
    wait_for("the probe is given up", || site.standing() == old).await;
    let next = plane.held("RolloutFailing").await;
    assert_eq!(plane.n_creates(), 6);
    assert!(hold.until.unwrap().seconds + 20 * 60 <= next.until.unwrap().seconds, "twenty minutes now");

    // Another target begins anew.
    plane.fleet.hear_all();
    plane.roll_out("mended").await;
    plane.is_rolled_out("mended", 2).await;
    assert_eq!(plane.rollout().await.failures, 0);
    site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_failover_in_the_middle_of_a_rollout_goes_on() {
    let mut plane = whole(4).await;
    let acks = acknowledge_all(&plane.operator);
    plane.witness.begin();
    plane.roll_out("large").await;
    wait_for("it is under way", || !plane.operator.events("RolloutProgressed").is_empty()).await;
    drop(acks);
    plane = plane.fail_over().await;
    let _acks = acknowledge_all(&plane.operator);
    plane.is_rolled_out("large", 4).await;
    assert_eq!(plane.witness.extremes(), (4, 1));
    assert_eq!(plane.n_creates(), 8, "nothing was done twice");
    plane.operator.hears("RolloutFinished").await;
    assert!(plane.operator.events("RolloutStarted").is_empty(), "its start was told before");
    plane.shard.site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn a_failover_with_an_empty_cache_rotates_nobody() {
    let mut plane = whole(5).await;
    let ids = plane.shard.site.standing();
    plane.witness.begin();
    plane = plane.fail_over().await;
    plane.is_ready(5).await;
    // Past the time that a new leader grants agents, and through some resyncs.
    plane.leap(Duration::from_secs(35)).await;
    let listed = plane.shard.site.calls(Op::List).len();
    wait_for("the cloud is listed again", || listed < plane.shard.site.calls(Op::List).len()).await;
    plane.is_ready(5).await;
    assert_eq!(plane.shard.site.standing(), ids);
    assert_eq!((plane.n_creates(), plane.shard.site.calls(Op::Delete).len()), (5, 0));
    assert_eq!(plane.witness.extremes(), (5, 0));
    assert!(plane.operator.holds("web").await.is_empty());
    let rollout = plane.rollout().await;
    assert_eq!((rollout.updated, rollout.total, rollout.failures), (5, 5, 0));
    for reason in ["RolloutStarted", "RolloutProgressed", "RolloutFinished", "DrainStarted", "InstanceLost"] {
        assert!(plane.operator.events(reason).is_empty(), "{reason}");
    }
}

#[tokio::test]
async fn fifty_percent_spot_loss_starts_every_replacement_at_once() {
    let plane = whole(10).await;
    let site = plane.shard.site.clone();
    let taken: Vec<InstanceId> = site.standing().into_iter().step_by(2).collect();
    for id in &taken {
        plane.fleet.notice(*id, "terminate").await;
    }
    wait_for("every replacement is asked for", || plane.n_creates() == 15).await;
    // Nobody acknowledges, so all five still drain: no slot waited for one.
    assert!(site.calls(Op::Delete).is_empty());
    wait_until("all five drain", async || {
        let draining = site.records().await.into_iter().filter(|it| it.phase() == Phase::Draining);
        draining.map(|it| it.id).eq(taken.iter().copied())
    })
    .await;
    plane.is_ready(10).await;
    let creates = site.calls(Op::Create);
    assert!(creates[14].mono.since(creates[10].mono) < Duration::from_secs(2), "in parallel");
    let _acks = acknowledge_all(&plane.operator);
    wait_for("the taken are gone", || taken.iter().all(|id| !site.standing().contains(id))).await;
    assert_eq!(plane.n_creates(), 15, "and not one more");
    site.assert_nothing_leaks().await;
}

#[tokio::test]
async fn an_old_member_is_rotated_when_its_age_is_reached() {
    let plane = whole_with(2, |config| config["server"]["expiry"]["eligible_age"] = "2h".into()).await;
    let _acks = acknowledge_all(&plane.operator);
    let (site, old) = (plane.shard.site.clone(), plane.shard.site.standing());
    plane.witness.begin();
    plane.leap(Duration::from_secs(7201)).await;
    for id in &old {
        let told = plane.operator.hears_of("ExpiryStarted", *id).await;
        assert_eq!(told.message, "eligible-expiry");
    }
    wait_for("both are new", || site.standing().len() == 2 && !site.standing().iter().any(|id| old.contains(id))).await;
    assert_eq!(plane.witness.extremes(), (2, 1));
    assert_eq!(plane.n_creates(), 4);
    assert!(plane.operator.events("RolloutStarted").is_empty(), "the same template");
}

#[tokio::test]
async fn a_forced_expiry_goes_without_a_replacement_after_two_failures() {
    let plane = whole_with(1, |config| config["server"]["expiry"]["forced_age"] = "2h".into()).await;
    let (site, old) = (plane.shard.site.clone(), plane.shard.site.standing());
    plane.fleet.deafen_new(&site);
    plane.leap(Duration::from_secs(7201)).await;
    for n in [1, 2] {
        wait_for("a replacement stands", || plane.n_creates() == 1 + n && site.standing().len() == 2).await;
        assert!(plane.operator.events("DrainStarted").is_empty(), "the old one stays until then");
        plane.leap(Duration::from_secs(61)).await;
        wait_for("it is given up", || !site.calls(Op::Delete).is_empty() && site.calls(Op::Delete).len() == n).await;
        if n == 1 {
            plane.held("BackingOff").await;
            assert_eq!(site.standing(), old);
            plane.leap(Duration::from_secs(61)).await;
        }
    }
    let told = plane.operator.hears_of("ExpiryStarted", old[0]).await;
    assert_eq!(told.message, "forced-expiry");
    plane.operator.hears_of("DrainStarted", old[0]).await;
}
