//! What is promised in numbers, measured over real sockets with a fake cloud.
//!
//! The tests hold the figures to bounds that a busy machine keeps in debug mode; the example `acceptance` holds them to
//! the promised ones in release mode. Times are read in this process: from before the report is sent to the moment the
//! provider call begins.

#![allow(unreachable_pub, reason = "part of a test crate and of an example")]

use std::{collections::BTreeMap, time::Duration};

use nstance_core::ports::clock::Clock;
use nstance_proto::v1;
use nstance_providers::fake::{Call, FakeOptions, Op};
use serde_json::json;

use crate::common::{Shard, Site, fleet::Fleet, operator::Operator};

/// Looks until it `holds`. Measurements of a thousand take longer than tests do.
async fn within(limit: Duration, what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waited = tokio::time::timeout(limit, async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "in vain: {what}");
}

/// A scale-up with slow creates, and termination notices that came in the middle of it.
#[derive(Debug)]
pub struct ScaleUp {
    /// From the call to the last VM being on record.
    pub whole_after: Duration,
    /// From each notice to the create of the replacement.
    pub notices: Vec<Duration>,
    /// Creates of the scale-up under way when each notice was sent.
    pub under_way: Vec<usize>,
    /// Creates of the scale-up that had ended when each replacement was asked for.
    #[allow(dead_code, reason = "the example goes by the times alone")]
    pub ended: Vec<usize>,
}

/// Brings a group from nothing to `size`, with creates that take this long, while `n_notices` members of another are
/// told, one after another, that they will be taken away.
pub async fn scale_up(size: i32, n_notices: usize, create: Duration) -> ScaleUp {
    let latencies = BTreeMap::from([(Op::Create, create)]);
    let site = Site::with(FakeOptions { latencies, ..FakeOptions::default() });
    let shard = Shard::start_on(site, 0, |config| {
        config["server"]["create_rate_limit"] = "0s".into();
        config["groups"]["default"]["calm"] = json!({ "template": "knc", "size": n_notices });
    })
    .await;
    let site = &shard.site;
    let fleet = Fleet::on(&shard);
    let operator = Operator::on(&shard).await;
    within(Duration::from_secs(20), "the calm group is ready", async || {
        usize::try_from(operator.group("calm").await.ready_size).is_ok_and(|ready| ready == n_notices)
    })
    .await;
    let noticed = site.standing();
    // The machines of the scale-up need no agents: that a VM exists is what is measured.
    fleet.deafen_new(site);

    let of = |group: &str| -> Vec<Call> {
        let is_of = |call: &Call| call.group.as_ref().is_some_and(|it| it.group.as_str() == group);
        site.calls(Op::Create).into_iter().filter(is_of).collect()
    };
    let under_way = || of("web").iter().filter(|call| call.answer.is_none()).count();
    let config = Some(v1::GroupConfig { size: Some(size), ..v1::GroupConfig::default() });
    let request = v1::UpsertGroupRequest { key: "web".to_owned(), config, ..v1::UpsertGroupRequest::default() };
    let wanted = usize::try_from(size).expect("a size");

    let began = site.clock.monotonic();
    operator.client().upsert_group(request).await.expect("the scale-up");
    within(Duration::from_secs(20), "creates are under way", async || wanted.min(40) <= under_way()).await;
    let (mut notices, mut busy, mut ended) = (Vec::new(), Vec::new(), Vec::new());
    for (n, id) in noticed.into_iter().enumerate() {
        busy.push(under_way());
        let sent = site.clock.monotonic();
        fleet.notice(id, "terminate").await;
        let replacement = || of("calm").get(noticed_before(n_notices, n)).cloned();
        within(Duration::from_secs(20), "a replacement is asked for", async || replacement().is_some()).await;
        notices.extend(replacement().map(|call| call.mono.since(sent)));
        ended.push(of("web").len() - under_way());
    }
    within(Duration::from_secs(60), "the group is whole", async || {
        of("web").iter().filter(|call| call.answer == Some(Ok(()))).count() == wanted
            && n_confirmed(site, "web").await == wanted
    })
    .await;
    let whole_after = site.clock.monotonic().since(began);
    ScaleUp { whole_after, notices, under_way: busy, ended }
}

/// Where in the log of a group's creates the replacement for the nth notice stands.
fn noticed_before(n_members: usize, n: usize) -> usize {
    n_members + n
}

async fn n_confirmed(site: &Site, group: &str) -> usize {
    let records = site.records().await;
    records.iter().filter(|it| it.group.group.as_str() == group && it.provider.confirmed_at.is_some()).count()
}

/// A few agents cut off, then all of them.
#[derive(Debug)]
pub struct Split {
    /// From cutting a few to each of the creates that replace them.
    pub few: Vec<Duration>,
    /// Nobody is missed before three of these have passed.
    pub interval: Duration,
    /// Creates while all were away and silent.
    pub replaced_in_split: usize,
    /// From their return to a group that is ready again.
    pub back_after: Duration,
    /// Creates and deletes that came of the split, also after it.
    pub changed_by_split: usize,
}

/// With so many agents connected, cuts `n_few` of them off, and then everybody, while the provider says running.
pub async fn split(n: u32, n_few: usize, interval: Duration) -> Split {
    let limit = Duration::from_secs(120);
    let shard = Shard::start_with(n, |config| {
        config["server"]["create_rate_limit"] = "0s".into();
    })
    .await;
    let site = &shard.site;
    let every = u32::try_from(interval.as_millis()).expect("an interval");
    let mut fleet = Fleet::reporting_every(&shard, every);
    fleet.keep_reporting();
    let operator = Operator::on(&shard).await;
    let size = i32::try_from(n).expect("a size");
    let is_ready = async || operator.group("web").await.ready_size == size;
    let is_whole = async || {
        let standing = site.standing();
        standing.len() == usize::try_from(n).expect("a size") && fleet.connected() == standing && is_ready().await
    };
    within(limit, "all are ready", is_whole).await;

    let before = site.calls(Op::Create).len();
    let cut_at = site.clock.monotonic();
    for id in site.standing().iter().take(n_few) {
        fleet.cut(*id);
    }
    within(limit, "the few are replaced", async || before + n_few <= site.calls(Op::Create).len()).await;
    within(limit, "all are ready again", is_whole).await;
    let few = site.calls(Op::Create).drain(before..).map(|call| call.mono.since(cut_at)).collect();

    let changes = || site.calls(Op::Create).len() + site.calls(Op::Delete).len();
    let (creates, before) = (site.calls(Op::Create).len(), changes());
    let everybody = site.standing();
    for id in &everybody {
        fleet.cut(*id);
    }
    within(limit, "all are missed", async || operator.group("web").await.unhealthy_size == size).await;
    within(limit, "the brake is told", async || operator.holds("web").await.contains(&"MassDisconnect".to_owned()))
        .await;
    let replaced_in_split = site.calls(Op::Create).len() - creates;
    let returned = site.clock.monotonic();
    for id in &everybody {
        fleet.back(*id);
    }
    within(limit, "all are back", is_whole).await;
    within(limit, "the brake ended by itself", async || operator.holds("web").await.is_empty()).await;
    let back_after = site.clock.monotonic().since(returned);
    Split { few, interval, replaced_in_split, back_after, changed_by_split: changes() - before }
}
