//! This machine: its clock, its program, and whether it finds the servers by name.

use std::time::Duration;

use nstance_client::Targets;
use nstance_core::{ports::objects::Condition, time::Timestamp};
use nstance_rt::{chain::Chain, entropy};
use tokio::{net::lookup_host, time::timeout};

use super::{Section, store::probe_key};
use crate::storage::Cluster;

/// Beyond this somebody is told of a clock, and beyond that certificates and nonces begin to fail.
const NOTED: Duration = Duration::from_secs(2);
const TOO_FAR: Duration = Duration::from_secs(30);
/// Stores tell times in whole seconds.
const GRAIN: Duration = Duration::from_secs(1);
const LOOKUP: Duration = Duration::from_secs(5);

pub async fn check(mut section: Section<'_>, cluster: &Cluster, targets: Option<&Targets>) {
    section.ok("version", format!("nstance-admin {}", env!("CARGO_PKG_VERSION")));
    store_clock(&mut section, cluster).await;
    server_clocks(&mut section, cluster).await;
    let addresses = targets.iter().flat_map(|it| &it.0).flat_map(|it| &it.addresses);
    for address in addresses {
        let name = format!("dns {}", address.host);
        match timeout(LOOKUP, lookup_host((address.host.as_str(), address.port))).await {
            Ok(Ok(found)) => section.ok(&name, found.map(|it| it.ip().to_string()).collect::<Vec<_>>().join(", ")),
            Ok(Err(error)) => {
                section.fail(&name, error.to_string(), "correct --servers, or the name service of this machine")
            }
            Err(_) => section.fail(&name, "no answer within 5 s", "look at the name service of this machine"),
        }
    }
}

/// How far two clocks are apart, by one that was read between two readings of the other.
fn apart(before: Timestamp, theirs: Timestamp, after: Timestamp) -> Duration {
    let ahead = theirs.since(after);
    let behind = before.since(theirs.plus(GRAIN));
    ahead.max(behind)
}

fn judge(section: &mut Section<'_>, name: &str, apart: Duration, fix: &str) {
    let detail = format!("{:.1} s apart", apart.as_secs_f64());
    if TOO_FAR < apart {
        section.fail(name, detail, fix);
    } else if NOTED < apart {
        section.warn(name, detail, fix);
    } else {
        section.ok(name, "");
    }
}

/// The store writes its own time beside an object.
async fn store_clock(section: &mut Section<'_>, cluster: &Cluster) {
    let key = probe_key(&entropy::hex(cluster.entropy.as_ref(), 8));
    let before = cluster.clock.now();
    let looked = async {
        cluster.store.put(&key, b"clock".to_vec(), Condition::Create).await?;
        cluster.store.get(&key).await
    };
    let looked = looked.await;
    let after = cluster.clock.now();
    let _ = cluster.store.delete(&key).await;
    match looked.map(|it| it.modified) {
        Ok(Some(theirs)) => {
            judge(
                section,
                "clock-store",
                apart(before, theirs, after),
                "set this machine's clock: chronyc makestep, or ntpd",
            );
        }
        Ok(None) => section.skip("clock-store", "the store tells no times"),
        Err(error) => section.skip("clock-store", format!("the store cannot be asked: {}", Chain(&error))),
    }
}

/// A leader writes its own time into its lease, and the store beside it.
async fn server_clocks(section: &mut Section<'_>, cluster: &Cluster) {
    for shard in cluster.shards().await.unwrap_or_default() {
        let name = format!("clock-{shard}");
        match cluster.lease(Some(&shard)).await {
            Ok(Some((lease, object))) => match object.modified {
                Some(stored) => {
                    let fix = format!("set the clock of server {}", lease.holder);
                    // Stored a moment after it was said.
                    judge(section, &name, apart(lease.renewed_at, stored, lease.renewed_at.plus(GRAIN)), &fix);
                }
                None => section.skip(&name, "the store tells no times"),
            },
            Ok(None) => section.skip(&name, "it was never led"),
            Err(failure) => section.skip(&name, failure.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Group, Sheet, Verdict};

    #[test]
    fn clocks_are_told_apart_by_the_limits() {
        let at = |seconds: i64| Timestamp::from_millis(seconds * 1000);
        let cases = [
            (100, Verdict::Ok),
            (103, Verdict::Ok),
            (104, Verdict::Warn),
            (140, Verdict::Fail),
            (97, Verdict::Ok),
            (60, Verdict::Fail),
        ];
        for (theirs, verdict) in cases {
            let mut sheet = Sheet::default();
            judge(&mut sheet.of(Group::Environment), "clock", apart(at(100), at(theirs), at(101)), "set it");
            assert_eq!(sheet.lines[0].verdict, verdict, "{theirs}");
        }
    }
}
