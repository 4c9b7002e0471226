//! Several servers of a shard: whoever is frozen, cut off, restarted or wrong about the time, one of them acts, and the
//! work goes on where it was.
//!
//! Every run ends with the promises that hold in all of them (`Plane::finish`), among them that no two epochs act.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nstance_core::{
    ids::{Epoch, InstanceId},
    plan::HoldKind,
    ports::{
        peers::{Election, Knock, PeerAsk},
        provider::{ErrorClass, LeaderAddress as _, LeaderNetwork},
    },
};
use nstance_providers::fake::{Op, Outcome, Rule, When};
use nstance_server::events::Reason;
use nstance_sim::{Beginning, Plane, Side, simulate};
use nstance_store::{election::TakeOver, faulty::FaultPlan};
use serde_json::json;

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

const DAY: i64 = 86_400;

/// A lease of six seconds that nobody proves dead, one second until it is looked at, a bid, and the rebuild.
const TAKEOVER: Duration = secs(9);

fn beginning(servers: usize, size: u32) -> Beginning {
    let mut beginning = Beginning::new(1);
    beginning.cloud.boot_time = millis(500);
    beginning.cloud.delete_time = millis(500);
    beginning.cloud.latency = millis(20);
    beginning.servers = servers;
    beginning.sizes = [size, 0];
    beginning
}

/// A plane at the size asked for, with everybody connected.
async fn whole(beginning: Beginning) -> Plane {
    let plane = Plane::start(beginning).await.expect("a plane");
    settled(&plane).await;
    plane
}

async fn of_size(servers: usize, size: u32) -> Plane {
    whole(beginning(servers, size)).await
}

async fn settled(plane: &Plane) {
    plane.settle().await;
    let broken = plane.violations();
    assert!(broken.is_empty(), "{}\n{}", plane.trace().join("\n"), broken.join("\n"));
}

fn web(plane: &Plane) -> Vec<InstanceId> {
    plane.running("default", "web")
}

fn epoch(plane: &Plane) -> Epoch {
    plane.term().expect("somebody leads").epoch()
}

fn leader(plane: &Plane) -> usize {
    plane.leader().expect("somebody leads")
}

/// The other one of two servers.
fn other(n: usize) -> usize {
    3 - n
}

fn resize(plane: &Plane, size: u32) {
    plane.want("default", "web", |wish| wish.size = size);
}

fn n_creates(plane: &Plane) -> usize {
    plane.calls(Op::Create).len()
}

fn n_vms(plane: &Plane) -> usize {
    plane.cloud().vms().iter().filter(|vm| vm.spec.is_some()).count()
}

fn n_deletes(plane: &Plane) -> usize {
    plane.calls(Op::Delete).len()
}

/// Waits until a later epoch than `old` is led in.
async fn next_leads(plane: &Plane, old: Epoch, limit: Duration) -> Duration {
    let leads = || plane.term().is_some_and(|term| old < term.epoch() && term.guard.is_open());
    plane.until("somebody leads in a later epoch", limit, leads).await
}

/// Everything that a group and an instance go through.
async fn life(plane: &Plane) {
    settled(plane).await;
    resize(plane, 1);
    settled(plane).await;
    plane.want("default", "web", |wish| wish.instance_type = "large".to_owned());
    settled(plane).await;
    plane.remove("default", web(plane)[0]);
    settled(plane).await;
    plane.want("acme", "extra", |wish| wish.size = 1);
    settled(plane).await;
    plane.want("acme", "extra", |wish| wish.deleted = true);
    settled(plane).await;
}

async fn long_life() -> Plane {
    let mut beginning = beginning(2, 2);
    beginning.cloud.lb_drain_time = millis(500);
    beginning.drain_timeout = secs(15);
    Plane::start(beginning).await.expect("a plane")
}

/// The same life with a server that stands still at the nth point until its lease is long over. Says which it was, and
/// whether another led meanwhile.
fn pause_at(n: usize, side: Side) -> (String, bool) {
    simulate(async {
        let plane = long_life().await;
        plane.points().arm_pause(n, side);
        let pause = async {
            plane.points().hit().await;
            let point = plane.points().passed()[n].clone();
            let leads = || plane.term().map(|term| term.epoch());
            let before = leads();
            tokio::time::sleep(secs(12)).await;
            let after = leads();
            plane.points().thaw();
            (point, before < after)
        };
        let (point, ()) = tokio::join!(tokio::time::timeout(secs(3600), pause), life(&plane));
        tokio::time::sleep(secs(5)).await;
        settled(&plane).await;
        plane.finish().await;
        point.unwrap_or_else(|_| panic!("point {n} was not met"))
    })
}

/// T04. `make sim` meets all points in an optimised build; without that, every ninth.
#[test]
fn a_frozen_leader_wakes_up_harmless() {
    let points = simulate(async {
        let plane = long_life().await;
        life(&plane).await;
        let passed = plane.points().passed();
        plane.finish().await;
        passed
    });
    for part in ["create", "delete", "lb_register", "lb_deregister", "put shard/s1/instance", "put shard/s1/groups"] {
        assert!(points.iter().any(|point| point.starts_with(part)), "{part} is no point: {points:#?}");
    }
    let stride = if std::env::var_os("NSTANCE_SIM_FULL").is_some() { 1 } else { 9 };
    let cases: Vec<(usize, Side)> =
        (0..points.len()).step_by(stride).flat_map(|n| [(n, Side::Before), (n, Side::After)]).collect();
    let (next, met) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((n, side)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    println!("{n} {side:?} of {}", points[*n]);
                    let (point, changed) = pause_at(*n, *side);
                    assert_eq!(point, points[*n], "point {n} is another in the second run");
                    assert!(
                        changed || point.starts_with("put"),
                        "nobody took over from a leader that paused at {point}"
                    );
                    met.lock().expect("no panic").push(point);
                }
            });
        }
    });
    assert_eq!(met.into_inner().expect("no panic").len(), cases.len());
}

/// T10
#[test]
fn clock_jumps_change_no_leader() {
    for ahead in [60, -60, 3600, -3600, DAY, -DAY] {
        simulate(async {
            let plane = of_size(2, 3).await;
            let (old, ids, made) = (epoch(&plane), web(&plane), n_creates(&plane));
            let n = leader(&plane);
            for machine in [n, other(n)] {
                let leads = || plane.term().is_some_and(|term| term.epoch() == old);
                let acts = || plane.term().is_some_and(|term| term.epoch() == old && term.guard.is_open());
                for ahead in [ahead, 0] {
                    plane.set_clock(machine, ahead);
                    // A clock that was set forward looks like a machine that stood still, until the next renewal.
                    plane.until("the same one may act", millis(2500), acts).await;
                    plane.while_for(secs(30), "the same one leads", leads).await;
                    assert!(acts());
                }
            }
            settled(&plane).await;
            assert_eq!((web(&plane), n_creates(&plane), n_deletes(&plane)), (ids, made, 0), "nobody is replaced");
            plane.finish().await;
        });
    }
}

/// T10: a drain that runs is neither shortened nor stretched by its leader's wall clock.
#[test]
fn a_drain_takes_its_time_whatever_the_wall_clock_says() {
    for ahead in [DAY, -DAY] {
        simulate(async {
            let plane = of_size(2, 2).await;
            plane.mute("default", true);
            let id = web(&plane)[0];
            plane.remove("default", id);
            let drains = || plane.record(id).is_some_and(|it| it.open_drain().is_some());
            plane.until("it drains", secs(10), drains).await;
            plane.set_clock(leader(&plane), ahead);
            let start = plane.now();
            plane.until("it is deleted", secs(40), || 0 < n_deletes(&plane)).await;
            let took = plane.calls(Op::Delete)[0].at.since(start);
            assert!(secs(19) <= took && took <= secs(26), "ahead {ahead}: {took:?}");
            plane.set_clock(leader(&plane), 0);
            plane.mute("default", false);
            settled(&plane).await;
            plane.finish().await;
        });
    }
}

/// T20
#[test]
fn skewed_followers_wait_the_full_ttl() {
    for (leads, follows, ahead) in [(1000, 1000, 0), (920, 1080, 3600), (1080, 920, -3600), (920, 1080, -DAY)] {
        simulate(async {
            let plane = of_size(2, 2).await;
            let (old, n) = (epoch(&plane), leader(&plane));
            plane.set_rate(n, leads);
            plane.set_rate(other(n), follows);
            plane.set_clock(other(n), ahead);
            plane.while_for(secs(60), "nobody takes over", || epoch(&plane) == old).await;
            let term = plane.term_of(n).expect("it leads");
            plane.freeze_nth(n, true);
            let frozen = plane.now();
            plane.until("its guard ends", secs(7), || !term.guard.is_open()).await;
            // The promise that its end comes before the next lease is held by every run.
            let lease = next_leads(&plane, old, TAKEOVER + secs(1)).await;
            // At most two seconds of the lease were over when it froze.
            let took = plane.now().since(frozen);
            assert!(secs(6 - 2).mul_f64(1000.0 / f64::from(follows)) <= took, "{took:?} {lease:?}");
            plane.freeze_nth(n, false);
            plane.set_clock(other(n), 0);
            settled(&plane).await;
            plane.finish().await;
        });
    }
}

/// T13, with a standby that has the store.
#[test]
fn a_leader_cut_off_from_the_store_stops_by_itself() {
    simulate(async {
        let plane = of_size(2, 3).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        let term = plane.term_of(n).expect("it leads");
        plane.cut_store_of(n, true);
        let stopped = plane.until("its guard ends", secs(5) + millis(20), || !term.guard.is_open()).await;
        assert!(secs(2) <= stopped, "{stopped:?}");
        plane.vm_dies(web(&plane)[0]);
        next_leads(&plane, old, secs(4)).await;
        assert_eq!(leader(&plane), other(n));
        settled(&plane).await;
        plane.cut_store_of(n, false);
        plane.until("the old one gives up", secs(5), || plane.term_of(n).is_none()).await;
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_vms(&plane)), (4, 4), "one replacement, made once");
        plane.finish().await;
    });
}

/// T14
#[test]
fn losing_the_swap_ends_the_term() {
    simulate(async {
        let plane = of_size(2, 2).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        plane.freeze_nth(n, true);
        next_leads(&plane, old, TAKEOVER).await;
        let now = epoch(&plane);
        plane.freeze_nth(n, false);
        plane.until("the old one gives up", secs(1), || plane.term_of(n).is_none()).await;
        plane.while_for(secs(30), "the new one leads", || epoch(&plane) == now).await;
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T15
#[test]
fn a_restarted_server_acquires_properly() {
    simulate(async {
        let plane = of_size(2, 2).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        plane.kill_nth(n, false);
        plane.start_nth(n);
        let took = next_leads(&plane, old, TAKEOVER).await;
        assert!(took <= secs(3), "on the same machine nobody waits for the lease's end: {took:?}");
        let lease = plane.lease().await;
        assert_eq!(lease.epoch, epoch(&plane));
        assert!(lease.previous.is_some_and(|it| it.epoch == old && it.process != lease.process));
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T15
#[test]
fn the_same_id_twice_is_two_holders() {
    simulate(async {
        let plane = of_size(1, 2).await;
        let old = epoch(&plane);
        plane.start_as(11, 1);
        plane.while_for(secs(60), "the first leads on", || epoch(&plane) == old && leader(&plane) == 1).await;
        resize(&plane, 3);
        settled(&plane).await;
        plane.freeze_nth(1, true);
        next_leads(&plane, old, TAKEOVER).await;
        assert_eq!(leader(&plane), 11);
        resize(&plane, 4);
        plane.until("a fourth runs", secs(20), || web(&plane).len() == 4).await;
        plane.freeze_nth(1, false);
        plane.until("the first gives up", secs(1), || plane.term_of(1).is_none()).await;
        plane.while_for(secs(30), "one leads", || leader(&plane) == 11).await;
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_vms(&plane), n_deletes(&plane)), (4, 4, 0));
        plane.finish().await;
    });
}

/// T16
#[test]
fn slow_acquisition_keeps_or_loses_the_lease_cleanly() {
    for delay in [400, 1500, 3000] {
        simulate(async {
            let plane = of_size(3, 3).await;
            let (old, n) = (epoch(&plane), leader(&plane));
            plane.set_store(FaultPlan { max_delay: millis(delay), ..FaultPlan::default() });
            plane.power_off(n);
            tokio::time::sleep(secs(60)).await;
            plane.set_store(FaultPlan::default());
            next_leads(&plane, old, TAKEOVER).await;
            plane.start_nth(n);
            settled(&plane).await;
            assert_eq!((n_creates(&plane), n_deletes(&plane)), (3, 0), "delay {delay}");
            plane.finish().await;
        });
    }
}

/// T17
#[test]
fn epochs_only_grow() {
    simulate(async {
        let plane = of_size(2, 2).await;
        let first = epoch(&plane);
        // Another term, so that there is something to fall back to. Each writes a record.
        let n = leader(&plane);
        plane.kill_nth(n, false);
        plane.start_nth(n);
        next_leads(&plane, first, TAKEOVER).await;
        resize(&plane, 3);
        settled(&plane).await;
        let before = epoch(&plane);
        // The lease is deleted: its holder may go by its guard until its next renewal, and no longer.
        plane.excuse_two_leaders(secs(4));
        plane.remove_object(&plane.lease_key()).await;
        next_leads(&plane, before, secs(6)).await;
        resize(&plane, 4);
        settled(&plane).await;
        // It is set back to the first term.
        let before = epoch(&plane);
        plane.excuse_two_leaders(secs(4));
        plane.usurp(first, true).await;
        next_leads(&plane, before, secs(6)).await;
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (4, 0));
        plane.finish().await;
    });
}

/// T25
#[test]
fn nothing_is_served_before_the_state_is_ready() {
    simulate(async {
        let plane = of_size(2, 3).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        plane.set_store(FaultPlan { max_delay: millis(400), ..FaultPlan::default() });
        let ids = web(&plane);
        plane.power_off(n);
        plane.vm_dies(ids[0]);
        next_leads(&plane, old, 2 * TAKEOVER).await;
        let known = plane.term().expect("somebody leads").world.lock().entries.len();
        assert_eq!(known, 3, "whoever can be reached knows everybody");
        plane.set_store(FaultPlan::default());
        plane.start_nth(n);
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_vms(&plane)), (4, 4));
        plane.finish().await;
    });
}

/// T54
#[test]
fn no_timer_outlives_its_term() {
    simulate(async {
        let plane = of_size(2, 3).await;
        plane.mute("default", true);
        let id = web(&plane)[0];
        plane.remove("default", id);
        plane.until("it drains", secs(10), || plane.record(id).is_some_and(|it| it.open_drain().is_some())).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        // Its timers of the drain, of observation and of collection are all due when it wakes up.
        plane.freeze_nth(n, true);
        next_leads(&plane, old, TAKEOVER).await;
        tokio::time::sleep(secs(40)).await;
        let woken = plane.now();
        plane.freeze_nth(n, false);
        plane.until("the old term is over", secs(1), || plane.term_of(n).is_none()).await;
        let late = plane.effects_since(woken);
        assert!(late.iter().all(|call| call.op != Op::Delete), "{late:?}");
        plane.mute("default", false);
        settled(&plane).await;
        assert_eq!(n_deletes(&plane), 1);
        plane.finish().await;
    });
}

#[test]
fn a_peer_partition_changes_nothing() {
    simulate(async {
        let plane = of_size(3, 3).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        let others: Vec<usize> = (1..=3).filter(|it| *it != n).collect();
        for it in &others {
            plane.part(n, *it, true);
        }
        let same = || plane.term().is_some_and(|term| term.epoch() == old && term.guard.is_open());
        plane.while_for(secs(120), "the same one leads", same).await;
        resize(&plane, 4);
        settled(&plane).await;
        for it in &others {
            plane.part(n, *it, false);
        }
        plane.while_for(secs(30), "the same one leads", same).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (4, 0));
        plane.finish().await;
    });
}

#[test]
fn a_stalled_leader_resumes_its_epoch() {
    for servers in [1, 2] {
        simulate(async {
            let plane = of_size(servers, 3).await;
            let (old, ids) = (epoch(&plane), web(&plane));
            (1..=servers).for_each(|n| plane.cut_store_of(n, true));
            let term = plane.term().expect("it leads");
            plane.until("its guard ends", secs(6), || !term.guard.is_open()).await;
            plane.vm_dies(ids[0]);
            let gone = plane.now();
            let idle = || plane.effects_since(gone).is_empty() && epoch(&plane) == old;
            plane.while_for(secs(60), "nothing happens", idle).await;
            (1..=servers).for_each(|n| plane.cut_store_of(n, false));
            plane.until("the lost one is replaced", secs(5), || n_creates(&plane) == 4).await;
            // With a standby, whoever reaches the store first has the lease.
            assert!(1 < servers || epoch(&plane) == old, "nobody took over, so it is the same term");
            settled(&plane).await;
            plane.finish().await;
        });
    }
}

#[test]
fn ten_minutes_without_the_store_change_nothing() {
    for servers in [1, 2, 3] {
        simulate(async {
            let plane = of_size(servers, 5).await;
            let (old, ids, made) = (epoch(&plane), web(&plane), n_creates(&plane));
            let term = plane.term().expect("it leads");
            (1..=servers).for_each(|n| plane.cut_store_of(n, true));
            plane.until("its guard ends", secs(6), || !term.guard.is_open()).await;
            let stalled = plane.now();
            let calm = || {
                plane.effects_since(stalled).is_empty()
                    && (1..=servers).all(|n| plane.is_up(n))
                    && plane.connected().len() == 5
            };
            plane.while_for(secs(600), "nothing happens, and agents stay connected", calm).await;
            (1..=servers).for_each(|n| plane.cut_store_of(n, false));
            let acts = || plane.term().is_some_and(|term| term.guard.is_open());
            plane.until("somebody may act", secs(5), acts).await;
            settled(&plane).await;
            assert_eq!((web(&plane), n_creates(&plane), n_deletes(&plane)), (ids, made, 0), "nobody was replaced");
            // With a standby, whoever reaches the store first has the lease.
            assert!(1 < servers || epoch(&plane) == old, "nobody took over, so it is the same term");
            plane.finish().await;
        });
    }
}

/// A planned hand-over while a group grows.
#[test]
fn hand_over_with_creates_in_flight_makes_no_duplicates() {
    for after in [0, 100, 500, 900, 1500, 2500] {
        simulate(async {
            let mut beginning = beginning(2, 2);
            beginning.cloud.latencies.insert(Op::Create, secs(2));
            let plane = whole(beginning).await;
            let (old, n) = (epoch(&plane), leader(&plane));
            resize(&plane, 12);
            plane.until("creates are on their way", secs(10), || 2 < n_creates(&plane)).await;
            tokio::time::sleep(millis(after)).await;
            let gap = async {
                let took = next_leads(&plane, old, secs(4)).await;
                assert!(took <= secs(2), "a lease that was given back is taken at once: {took:?}");
            };
            tokio::join!(plane.stop_nth(n), gap);
            assert_eq!(plane.lease().await.previous.map(|it| it.reason), Some(TakeOver::Released));
            plane.start_nth(n);
            settled(&plane).await;
            assert_eq!((web(&plane).len(), n_vms(&plane), n_deletes(&plane)), (12, 12, 0));
            plane.finish().await;
        });
    }
}

/// How leadership goes to the other server.
#[derive(Debug, Clone, Copy)]
enum Change {
    Killed,
    Frozen,
    Stopped,
}

impl Change {
    const ALL: [Self; 3] = [Self::Killed, Self::Frozen, Self::Stopped];

    /// Another leads when this returns. Whoever led before comes back.
    async fn happens(self, plane: &Plane) {
        let (old, n) = (epoch(plane), leader(plane));
        match self {
            Self::Killed => plane.power_off(n),
            Self::Frozen => plane.freeze_nth(n, true),
            Self::Stopped => plane.stop_nth(n).await,
        }
        next_leads(plane, old, TAKEOVER).await;
        match self {
            Self::Frozen => plane.freeze_nth(n, false),
            Self::Killed | Self::Stopped => plane.start_nth(n),
        }
    }
}

/// T05
#[test]
fn a_timed_out_create_yields_one_vm_whoever_leads() {
    for change in Change::ALL {
        simulate(async {
            let plane = of_size(2, 1).await;
            let lands = Outcome::LandThenFail(ErrorClass::Ambiguous);
            plane.cloud().script(Rule { op: Op::Create, when: When::Always, times: 2, outcome: lands });
            resize(&plane, 3);
            plane.until("both are asked for", secs(10), || 3 <= n_creates(&plane)).await;
            change.happens(&plane).await;
            settled(&plane).await;
            assert_eq!((web(&plane).len(), n_vms(&plane), n_deletes(&plane)), (3, 3, 0), "{change:?}");
            plane.finish().await;
        });
    }
}

/// T06
#[test]
fn an_invisible_new_vm_is_neither_lost_nor_doubled_by_the_next_leader() {
    for change in Change::ALL {
        simulate(async {
            let mut beginning = beginning(2, 1);
            beginning.cloud.visibility_delay = secs(8);
            beginning.cloud.listing_delay = secs(12);
            let plane = whole(beginning).await;
            resize(&plane, 4);
            plane.until("three more are asked for", secs(10), || n_creates(&plane) == 4).await;
            change.happens(&plane).await;
            settled(&plane).await;
            assert_eq!((n_vms(&plane), n_deletes(&plane)), (4, 0), "{change:?}");
            plane.finish().await;
        });
    }
}

/// T07
#[test]
fn half_of_the_fleet_is_replaced_once_whoever_leads() {
    for change in Change::ALL {
        simulate(async {
            let plane = of_size(2, 10).await;
            let ids = web(&plane);
            plane.reclaim(&ids[..5], secs(60));
            tokio::time::sleep(millis(30)).await;
            change.happens(&plane).await;
            plane.until("all are replaced", secs(20), || 15 <= n_creates(&plane)).await;
            settled(&plane).await;
            assert_eq!((web(&plane).len(), n_vms(&plane)), (10, 15), "{change:?}");
            plane.finish().await;
        });
    }
}

/// T08
#[test]
fn a_network_split_replaces_nobody_in_a_hurry_whoever_leads() {
    for change in Change::ALL {
        simulate(async {
            let plane = of_size(2, 8).await;
            let (ids, made) = (web(&plane), n_creates(&plane));
            plane.sever_agents(&ids, secs(60));
            tokio::time::sleep(secs(5)).await;
            change.happens(&plane).await;
            settled(&plane).await;
            assert!(n_creates(&plane) <= made + 1, "{change:?}: one each minute at most");
            assert!(7 <= ids.iter().filter(|id| web(&plane).contains(id)).count());
            plane.finish().await;
        });
    }
}

/// T11
#[test]
fn runaway_creation_stops_at_the_cap_whoever_leads() {
    for change in Change::ALL {
        simulate(async {
            let mut beginning = beginning(2, 1);
            beginning.config = |config| {
                config["server"]["safety"]["runaway_base"] = 3.into();
                config["server"]["safety"]["runaway_factor"] = 2.into();
            };
            let plane = whole(beginning).await;
            // Whatever is made is lost as soon as it is in use.
            let slay = || {
                let used = |id: &InstanceId| plane.record(*id).is_some_and(|it| it.registration.is_some());
                web(&plane).into_iter().filter(used).for_each(|id| plane.vm_dies(id));
            };
            let cap = 3 + 2;
            let capped = || {
                slay();
                n_creates(&plane) == cap && plane.holds("default", "web").contains(&HoldKind::Runaway)
            };
            plane.until("the cap is reached", secs(100), capped).await;
            change.happens(&plane).await;
            let left = secs(180).saturating_sub(plane.now().since(plane.calls(Op::Create)[0].at));
            let holds = || n_creates(&plane) == cap;
            plane.while_for(left.saturating_sub(secs(1)), "the next leader keeps to the cap", holds).await;
            settled(&plane).await;
            plane.finish().await;
        });
    }
}

/// A describe that was asked while its VM could not be seen yet and whose answer was read only after the machine had
/// stood still is no proof that the VM is gone.
#[test]
fn an_answer_is_judged_by_the_time_of_its_question() {
    for moment in (0..4000).step_by(100) {
        simulate(async {
            let mut beginning = beginning(1, 1);
            beginning.cloud.visibility_delay = secs(8);
            beginning.cloud.latency = millis(150);
            let plane = whole(beginning).await;
            resize(&plane, 3);
            plane.until("two more are asked for", secs(10), || n_creates(&plane) == 3).await;
            tokio::time::sleep(millis(moment)).await;
            plane.freeze(true);
            tokio::time::sleep(secs(20)).await;
            plane.freeze(false);
            settled(&plane).await;
            assert_eq!((n_vms(&plane), n_deletes(&plane)), (3, 0), "at {moment} ms nobody was taken for gone");
            plane.finish().await;
        });
    }
}

/// A stale cache says that a record is there which was rightly removed under another leader.
#[test]
fn a_removed_record_does_not_come_back_with_another_leader() {
    simulate(async {
        let plane = of_size(2, 3).await;
        let n = leader(&plane);
        // The standby has read the records before this one came to its end.
        plane.kill_nth(other(n), false);
        plane.start_nth(other(n));
        tokio::time::sleep(secs(5)).await;
        let id = web(&plane)[0];
        plane.remove("default", id);
        settled(&plane).await;
        plane.until("its record is removed", secs(400), || plane.record(id).is_none()).await;
        let made = n_creates(&plane);
        Change::Killed.happens(&plane).await;
        settled(&plane).await;
        assert_eq!((plane.record(id), n_creates(&plane)), (None, made));
        plane.finish().await;
    });
}

/// T24: an operator registers with whoever leads the shard, while the holder of the cluster's lease is away.
#[test]
fn operators_register_while_the_cluster_leader_is_away() {
    simulate(async {
        let plane = of_size(2, 1).await;
        plane.hold_cluster_lease().await;
        let (old, n) = (epoch(&plane), leader(&plane));
        plane.power_off(n);
        next_leads(&plane, old, TAKEOVER).await;
        plane.register_operator("acme", secs(5)).await;
        plane.start_nth(n);
        settled(&plane).await;
        plane.finish().await;
    });
}

#[test]
fn no_two_epochs_act_is_noticed() {
    // A lease that is taken away while its holder may still act: what the promise is about.
    simulate(async {
        let plane = of_size(2, 30).await;
        // A follower that cannot hear the leader looks at the lease, and finds none.
        plane.part(1, 2, true);
        tokio::time::sleep(secs(3)).await;
        // The leader must not find out before.
        plane.cut_store_of(leader(&plane), true);
        plane.remove_object(&plane.lease_key()).await;
        for id in web(&plane) {
            plane.vm_dies(id);
            tokio::time::sleep(millis(100)).await;
        }
        let broken = plane.violations();
        for promise in ["one_guard_at_a_time", "no two epochs act"] {
            assert!(broken.iter().any(|it| it.starts_with(promise)), "{promise}: {broken:?}");
        }
    });
}

/// What the servers' link is made of here: a proof of death comes from a dead process on a living machine alone.
#[test]
fn the_simulated_link_tells_what_a_socket_would() {
    simulate(async {
        let plane = of_size(2, 0).await;
        let first = PeerAsk { election: Election::Shard, known: None, wait: Duration::ZERO };
        let view = plane.ask_peer(1, 2, &first).await.expect("it answers");
        assert_eq!((view.server_id.as_str(), view.shard.as_str()), ("srv-2", "s1"));
        let long = PeerAsk { known: Some((view.role, view.etag)), wait: secs(5), ..first.clone() };
        let start = plane.now();
        plane.ask_peer(1, 2, &long).await.expect("it answers when something changes, or in the end");
        assert!(plane.now().since(start) <= secs(5) + millis(20));

        let start = plane.now();
        plane.freeze_nth(2, true);
        plane.ask_peer(1, 2, &first).await.expect_err("a frozen process says nothing");
        let took = plane.now().since(start);
        assert!(secs(2) <= took && took <= secs(2) + millis(20), "{took:?}");
        assert_eq!(plane.knock(1, 2).await, Knock::Unknown, "its kernel accepts");
        plane.freeze_nth(2, false);

        let start = plane.now();
        plane.part(1, 2, true);
        plane.ask_peer(1, 2, &first).await.expect_err("nothing gets through");
        assert!(secs(2) <= plane.now().since(start));
        let start = plane.now();
        assert_eq!(plane.knock(1, 2).await, Knock::Unknown);
        assert_eq!(plane.now().since(start), millis(300));
        plane.part(1, 2, false);

        let view = plane.ask_peer(1, 2, &first).await.expect("it answers again");
        let long = PeerAsk { known: Some((view.role, view.etag)), wait: secs(5), ..first.clone() };
        let start = plane.now();
        let kill = async {
            tokio::time::sleep(millis(100)).await;
            plane.kill_nth(2, false);
        };
        let (answer, ()) = tokio::join!(plane.ask_peer(1, 2, &long), kill);
        assert!(answer.is_err() && plane.now().since(start) <= millis(110), "a dead process's kernel resets");
        assert_eq!(plane.knock(1, 2).await, Knock::Refused, "its machine is up");
        plane.start_nth(2);
        settled(&plane).await;
        plane.power_off(2);
        assert_eq!(plane.knock(1, 2).await, Knock::Unknown, "nobody is there to refuse");
        plane.start_nth(2);
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T22, and the order of a move: the lease goes first, work follows it, the address comes when it can.
#[test]
fn lease_is_released_before_the_address() {
    simulate(async {
        let mut beginning = beginning(2, 3);
        beginning.cloud.latencies.insert(Op::NetRelease, secs(8));
        beginning.cloud.address_move_time = secs(3);
        beginning.config = |config| config["server"]["leader_network"] = json!({ "ip": "10.0.0.9" });
        let plane = whole(beginning).await;
        let network = LeaderNetwork { ip: [10, 0, 0, 9].into(), interface_id: None };
        let (old, n) = (epoch(&plane), leader(&plane));
        let held = async || plane.cloud().net_holder(&network).await.expect("the cloud answers");
        assert_eq!(held().await, Some(format!("machine-{n}")));
        plane.vm_dies(web(&plane)[0]);
        let (made, start) = (n_creates(&plane), plane.now());
        let acted = async {
            next_leads(&plane, old, secs(2)).await;
            plane.until("its first effect", secs(2), || made < n_creates(&plane)).await;
            plane.now().since(start)
        };
        let ((), acted) = tokio::join!(plane.stop_nth(n), acted);
        assert!(acted <= millis(600), "{acted:?}");
        assert_eq!(plane.lease().await.previous.map(|it| it.reason), Some(TakeOver::Released));
        let moved = format!("machine-{}", other(n));
        let limit = plane.now().plus(secs(10));
        while held().await.as_ref() != Some(&moved) {
            assert!(plane.now() < limit, "the address does not come");
            tokio::time::sleep(millis(50)).await;
        }
        plane.start_nth(n);
        settled(&plane).await;
        assert_eq!(held().await, Some(moved), "who gave it up late did not take it along");
        plane.finish().await;
    });
}

/// A process that is killed on a machine that lives is succeeded as soon as five knocks were refused.
#[test]
fn proof_of_death_within_one_second() {
    simulate(async {
        let plane = of_size(2, 4).await;
        let (old, n, ids) = (epoch(&plane), leader(&plane), web(&plane));
        plane.vm_dies(ids[0]);
        let made = n_creates(&plane);
        plane.kill_nth(n, false);
        let start = plane.now();
        let gap = next_leads(&plane, old, secs(2)).await;
        assert!(gap <= secs(1), "{gap:?}");
        assert_eq!(plane.lease().await.previous.map(|it| it.reason), Some(TakeOver::ProofOfDeath));
        plane.until("its first effect", secs(1), || made < n_creates(&plane)).await;
        assert!(plane.now().since(start) <= secs(2));
        plane.start_nth(n);
        settled(&plane).await;
        assert_eq!(n_creates(&plane), made + 1, "nobody else was replaced");
        plane.finish().await;
    });
}

/// Neither a machine that went dark nor a process that stands still proves anything: the lease is waited out.
#[test]
fn no_proof_from_timeout_sigstop_or_tls_error() {
    for dark in [true, false] {
        simulate(async {
            let plane = of_size(2, 2).await;
            let (old, n) = (epoch(&plane), leader(&plane));
            if dark {
                plane.power_off(n);
            } else {
                plane.freeze_nth(n, true);
            }
            let gap = next_leads(&plane, old, secs(8)).await;
            assert!(secs(4) <= gap && gap <= secs(7), "dark {dark}: {gap:?}");
            assert_eq!(plane.lease().await.previous.map(|it| it.reason), Some(TakeOver::Expired));
            if dark {
                plane.start_nth(n);
            } else {
                plane.freeze_nth(n, false);
            }
            settled(&plane).await;
            plane.finish().await;
        });
    }
}

/// A day in which nothing happens: the store is paid by the request.
#[test]
fn idle_store_requests_stay_in_budget() {
    for (servers, budget) in [(1, 300), (2, 1950)] {
        simulate(async {
            let plane = of_size(servers, 3).await;
            // A leader knows after five minutes that it is alone.
            tokio::time::sleep(secs(600)).await;
            let spent = || (1..=servers).map(|n| plane.store_calls(n).total()).sum::<u64>();
            // Elsewhere than in the long run an hour must do.
            let hours = if std::env::var_os("NSTANCE_SIM_FULL").is_some() { 24 } else { 1 };
            let before = spent();
            tokio::time::sleep(secs(hours * 3600)).await;
            let per_hour = (spent() - before).div_ceil(hours);
            let calls: Vec<_> = (1..=servers).map(|n| plane.store_calls(n)).collect();
            assert!(per_hour <= budget, "{per_hour} an hour with {servers} servers, not {budget}: {calls:?}");
            println!("{servers} servers: {per_hour} requests an hour: {calls:?}");
            plane.finish().await;
        });
    }
}

/// The first thing heard of a leader that slept through its lease is that it leads no more.
#[test]
fn a_leader_that_slept_says_first_that_it_stepped_down() {
    simulate(async {
        let plane = of_size(2, 4).await;
        let (old, n) = (epoch(&plane), leader(&plane));
        let term = plane.term_of(n).expect("it leads");
        let tenant = "default".parse().expect("a tenant");
        let heard = || term.shared.events.last(&tenant, 1000).into_iter().map(|it| it.reason).collect::<Vec<_>>();
        plane.freeze_nth(n, true);
        plane.vm_dies(web(&plane)[0]);
        let before = heard().len();
        next_leads(&plane, old, TAKEOVER).await;
        tokio::time::sleep(secs(30)).await;
        plane.freeze_nth(n, false);
        plane.until("it says something", secs(5), || before < heard().len()).await;
        assert_eq!(heard()[before], Reason::LeaderLost, "{:?}", &heard()[before..]);
        assert!(!term.guard.is_open());
        settled(&plane).await;
        plane.finish().await;
    });
}
