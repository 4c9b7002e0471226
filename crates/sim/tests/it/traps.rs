//! Mistakes that systems of this kind make, one test each, named as in the list of traps (`docs/traps.md`): the whole
//! plane on a clock of its own, one thing that goes wrong, and then the cloud's own log of calls.
//!
//! Every run also ends with the promises that hold in all of them (`Plane::finish`).

use std::{cell::Cell, collections::BTreeSet, time::Duration};

use nstance_core::{
    ids::{Epoch, InstanceId},
    instance::{CreateReason, Phase},
    plan::HoldKind,
    ports::provider::ErrorClass,
    time::Timestamp,
};
use nstance_providers::fake::{Call, Op, Outcome, Rule, When};
use nstance_sim::{Beginning, Manners, Plane, Side, simulate};
use nstance_store::faulty::{Fault, FaultPlan};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A killed server's lease runs six seconds; a look, a bid and the rebuild come on top.
const TAKEOVER: Duration = secs(9);

fn beginning(change: impl FnOnce(&mut Beginning)) -> Beginning {
    let mut beginning = Beginning::new(1);
    beginning.cloud.boot_time = millis(500);
    beginning.cloud.delete_time = millis(500);
    beginning.cloud.latency = millis(20);
    change(&mut beginning);
    beginning
}

/// A plane at the size asked for, with everybody connected.
async fn whole(change: impl FnOnce(&mut Beginning)) -> Plane {
    let plane = Plane::start(beginning(change)).await.expect("a plane");
    settled(&plane).await;
    plane
}

async fn settled(plane: &Plane) {
    plane.settle().await;
    let broken = plane.violations();
    assert!(broken.is_empty(), "{}\n{}", plane.trace().join("\n"), broken.join("\n"));
}

fn of_size(size: u32) -> impl FnOnce(&mut Beginning) {
    move |it| it.sizes = [size, 0]
}

fn web(plane: &Plane) -> Vec<InstanceId> {
    plane.running("default", "web")
}

/// How many VMs were ever made, gone ones included.
fn n_vms(plane: &Plane) -> usize {
    plane.cloud().vms().iter().filter(|vm| vm.spec.is_some()).count()
}

fn n_creates(plane: &Plane) -> usize {
    plane.calls(Op::Create).len()
}

fn n_deletes(plane: &Plane) -> usize {
    plane.calls(Op::Delete).len()
}

fn since(calls: &[Call], at: Timestamp) -> Vec<Call> {
    calls.iter().filter(|call| at <= call.at).cloned().collect()
}

/// When each began, after `start`.
fn waits(calls: &[Call], start: Timestamp) -> Vec<Duration> {
    calls.iter().map(|call| call.at.since(start)).collect()
}

fn epoch(plane: &Plane) -> Epoch {
    plane.term().expect("somebody leads").epoch()
}

fn resize(plane: &Plane, size: u32) {
    plane.want("default", "web", |wish| wish.size = size);
}

/// T01
#[test]
fn a_retried_put_that_already_landed_is_ours() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let before = epoch(&plane);
        // Twenty writes in a row land and are answered with a 412: renewals of the lease, the groups file, records.
        plane.script_puts([Fault::PreconditionAfter; 20]);
        resize(&plane, 4);
        plane.until("two more run", secs(10), || web(&plane).len() == 4).await;
        settled(&plane).await;
        assert_eq!(epoch(&plane), before, "nobody believes to have lost the lease");
        assert_eq!((n_creates(&plane), n_vms(&plane), n_deletes(&plane)), (4, 4, 0));
        plane.finish().await;
    });
}

/// T03
#[test]
fn one_write_per_second_per_key_still_scales_a_group() {
    simulate(async {
        let plane = whole(of_size(0)).await;
        let before = epoch(&plane);
        plane.set_store(FaultPlan { write_gap: secs(1), ..FaultPlan::default() });
        resize(&plane, 20);
        plane.until("all twenty are in use", secs(15), || plane.connected().len() == 20).await;
        settled(&plane).await;
        assert_eq!(epoch(&plane), before, "the lease is renewed within the store's limits");
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (20, 0));
        plane.finish().await;
    });
}

/// T04
#[test]
fn a_frozen_leader_wakes_up_harmless() {
    // It stands still at different moments of its work on a loss: before it knows, while it asks, as it acts.
    for moment in [0, 5, 15, 25, 45, 60] {
        simulate(async {
            let plane = whole(of_size(3)).await;
            let (old, ids) = (epoch(&plane), web(&plane));
            plane.vm_dies(ids[0]);
            tokio::time::sleep(millis(moment)).await;
            plane.freeze(true);
            tokio::time::sleep(secs(10)).await;
            let theirs = Epoch(old.0 + 1);
            plane.usurp(theirs, false).await;
            plane.vm_dies(ids[1]);
            let woken = plane.now();
            plane.freeze(false);
            plane.while_for(secs(30), "it does nothing", || plane.effects_since(woken).is_empty()).await;
            assert!(plane.term().is_none(), "it follows");
            plane.usurp(theirs, true).await;
            plane.leads(secs(5)).await;
            settled(&plane).await;
            let late = plane.effects_since(woken);
            assert!(!late.is_empty() && late.iter().all(|call| Some(theirs) < call.epoch), "{moment} ms: {late:?}");
            assert_eq!((web(&plane).len(), n_vms(&plane)), (3, 5), "what slipped through is nobody's second");
            plane.finish().await;
        });
    }
}

/// T05
#[test]
fn a_timed_out_create_yields_one_vm() {
    for idempotent in [true, false] {
        simulate(async {
            let plane = whole(|it| {
                it.sizes = [0, 0];
                it.cloud.idempotent_create = idempotent;
            })
            .await;
            let lands = Outcome::LandThenFail(ErrorClass::Ambiguous);
            plane.cloud().script(Rule { op: Op::Create, when: When::Always, times: 2, outcome: lands });
            resize(&plane, 2);
            plane.until("both run", secs(30), || plane.connected().len() == 2).await;
            settled(&plane).await;
            let ids: BTreeSet<_> = plane.calls(Op::Create).iter().filter_map(|call| call.instance).collect();
            assert_eq!(ids.len(), 2, "no second id was tried");
            assert_eq!((n_vms(&plane), n_deletes(&plane)), (2, 0), "idempotent: {idempotent}");
            plane.finish().await;
        });
    }
}

/// T06
#[test]
fn an_invisible_new_vm_is_neither_lost_nor_doubled() {
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [0, 0];
            it.cloud.visibility_delay = secs(12);
            it.cloud.listing_delay = secs(20);
        })
        .await;
        resize(&plane, 2);
        plane.until("both were made", secs(5), || n_vms(&plane) == 2).await;
        // The next leader looks while nothing of them can be seen.
        plane.kill_server(true);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.while_for(secs(60), "nobody else is made", || n_vms(&plane) == 2 && n_deletes(&plane) == 0).await;
        settled(&plane).await;
        let ids: BTreeSet<_> = plane.calls(Op::Create).iter().filter_map(|call| call.instance).collect();
        assert_eq!((ids.len(), n_vms(&plane), n_deletes(&plane)), (2, 2, 0));
        plane.finish().await;
    });
}

/// T07
#[test]
fn fifty_percent_spot_loss_starts_every_replacement_at_once() {
    simulate(async {
        let plane = whole(of_size(8)).await;
        plane.mute("default", true);
        let (ids, at) = (web(&plane), plane.now());
        plane.reclaim(&ids[..4], secs(30));
        plane.until("all four creates began", secs(1), || n_creates(&plane) == 12).await;
        let began = waits(&since(&plane.calls(Op::Create), at), at);
        assert!(began.iter().all(|wait| *wait <= millis(50)), "{began:?}");
        assert_eq!(n_deletes(&plane), 0, "no slot waits for a drain");
        for id in &ids[..4] {
            plane.until("it drains", secs(1), || plane.phase(*id) == Some(Phase::Draining)).await;
        }
        plane.mute("default", false);
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 12);
        plane.finish().await;
    });
}

/// T08
#[test]
fn a_network_split_replaces_nobody_in_a_hurry() {
    simulate(async {
        let plane = whole(of_size(8)).await;
        let ids = web(&plane);
        plane.sever_agents(&ids, secs(150));
        let held = || plane.holds("default", "web").contains(&HoldKind::MassDisconnect);
        plane.until("the brake holds", secs(40), held).await;
        plane.while_for(secs(100), "one each minute at most", || n_creates(&plane) <= 8 + 2).await;
        let pace: Vec<_> = plane.calls(Op::Create)[8..].iter().map(|call| call.at).collect();
        assert!(pace.windows(2).all(|it| secs(60) <= it[1].since(it[0])), "{pace:?}");
        plane.until("the brake ends by itself", secs(60), || plane.holds("default", "web").is_empty()).await;
        let made = n_creates(&plane);
        settled(&plane).await;
        assert_eq!(n_creates(&plane), made, "who came back is left alone");
        assert!(6 <= ids.iter().filter(|id| web(&plane).contains(id)).count());
        plane.finish().await;
    });
}

/// T08, where the streams still look open when the silence is noticed.
#[test]
fn a_split_that_swallows_packets_replaces_nobody_in_a_hurry() {
    simulate(async {
        let plane = whole(of_size(8)).await;
        let ids = web(&plane);
        plane.cut_agents(&ids, secs(50));
        let held = || plane.holds("default", "web").contains(&HoldKind::MassDisconnect);
        plane.until("the brake holds", secs(40), held).await;
        settled(&plane).await;
        assert_eq!(web(&plane), ids, "all of them came back and are left alone");
        assert_eq!(n_creates(&plane), 8);
        plane.finish().await;
    });
}

/// T11
#[test]
fn runaway_creation_stops_at_the_cap() {
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [1, 0];
            it.config = |config| {
                config["server"]["safety"]["runaway_base"] = 3.into();
                config["server"]["safety"]["runaway_factor"] = 2.into();
            };
        })
        .await;
        // Whatever is made is lost as soon as it is in use.
        let slay = || {
            let used = |id: &InstanceId| plane.record(*id).is_some_and(|it| it.registration.is_some());
            web(&plane).into_iter().filter(used).for_each(|id| plane.vm_dies(id));
        };
        let cap = 3 + 2;
        plane
            .until("the cap is reached", secs(100), || {
                slay();
                n_creates(&plane) == cap && plane.holds("default", "web").contains(&HoldKind::Runaway)
            })
            .await;
        let first = plane.calls(Op::Create)[0].at;
        plane.kill_server(true);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        let left = secs(180).saturating_sub(plane.now().since(first));
        assert!(secs(30) < left, "{left:?} of the window are left to look at");
        plane.while_for(left - secs(1), "the next leader keeps to the cap", || n_creates(&plane) == cap).await;
        plane.until("the window allows one more", secs(40), || n_creates(&plane) == cap + 1).await;
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T12
#[test]
fn no_orphans_at_the_end_of_any_run() {
    for seed in 1..=3 {
        simulate(async {
            let plane = Plane::start(beginning(|it| {
                it.seed = seed;
                it.sizes = [3, 1];
                it.manners = Manners::Real;
            }))
            .await
            .expect("a plane");
            // Killed in the middle of everything, without what its disk knew.
            plane.points().arm_at("create", 2, Side::After);
            plane.dies_there(true).await;
            plane.start_server();
            plane.leads(TAKEOVER).await;
            resize(&plane, 5);
            plane.points().arm_at("delete", 0, Side::Before);
            plane.until("some run", secs(60), || 3 <= web(&plane).len()).await;
            plane.vm_dies(web(&plane)[0]);
            plane.dies_there(true).await;
            plane.start_server();
            settled(&plane).await;
            resize(&plane, 0);
            plane.want("acme", "web", |wish| wish.size = 0);
            settled(&plane).await;
            assert_eq!(plane.cloud().standing(), []);
            assert!(plane.records().iter().all(|it| matches!(it.phase(), Phase::Deleted | Phase::Failed)));
            plane.finish().await;
        });
    }
}

/// T13
#[test]
fn a_leader_cut_off_from_the_store_stops_by_itself() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let (old, ids) = (epoch(&plane), web(&plane));
        let cut = plane.now();
        plane.cut_store(true);
        tokio::time::sleep(secs(6)).await;
        plane.vm_dies(ids[0]);
        plane.while_for(secs(20), "nothing is done", || plane.effects_since(cut).is_empty()).await;
        assert_eq!(plane.connected(), [ids[1]], "agents stay connected");
        plane.cut_store(false);
        plane.until("the dead one is replaced", secs(3), || n_creates(&plane) == 3).await;
        assert!(old <= epoch(&plane));
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T14
#[test]
fn losing_the_swap_ends_the_term() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let theirs = Epoch(epoch(&plane).0 + 5);
        plane.usurp(theirs, false).await;
        // A renewal every two seconds: the next one is refused.
        plane.until("it steps down", millis(2100), || plane.term().is_none()).await;
        let at = plane.now();
        plane.vm_dies(web(&plane)[0]);
        plane.while_for(secs(30), "nothing is done", || plane.effects_since(at).is_empty()).await;
        let there = plane.lease().await;
        assert_eq!((there.epoch, there.holder.as_str()), (theirs, "srv-9"), "what is theirs is not touched");
        plane.usurp(theirs, true).await;
        plane.leads(secs(3)).await;
        assert!(theirs < epoch(&plane));
        settled(&plane).await;
        let after = plane.effects_since(at);
        assert!(after.iter().all(|call| Some(theirs) < call.epoch), "{after:?}");
        plane.finish().await;
    });
}

/// T15
#[test]
fn a_restarted_server_acquires_properly() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let (old, lease) = (epoch(&plane), plane.lease().await);
        plane.kill_server(false);
        plane.start_server();
        let dead = web(&plane)[0];
        plane.vm_dies(dead);
        plane.leads(TAKEOVER).await;
        let now = plane.lease().await;
        assert!(old < epoch(&plane) && now.epoch == epoch(&plane));
        assert_eq!(now.holder, lease.holder);
        assert_ne!(now.process, lease.process, "the same id, another process");
        plane.until("its state was rebuilt: the dead one is replaced", secs(5), || n_creates(&plane) == 3).await;
        assert_eq!(plane.calls(Op::Create)[2].epoch, Some(now.epoch));
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T16
#[test]
fn slow_acquisition_keeps_or_loses_the_lease_cleanly() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let (old, at) = (epoch(&plane), plane.now());
        plane.kill_server(true);
        let taken = plane.start_until_it_holds_the_lease(old).await;
        // Reading the state takes longer than three leases.
        plane.set_store(FaultPlan { failed_lists: 1000, ..FaultPlan::default() });
        plane.while_for(secs(20), "nothing is served", || plane.term().is_none()).await;
        let kept = plane.lease().await;
        assert_eq!((kept.epoch, &kept.process), (taken.epoch, &taken.process), "the lease was kept meanwhile");
        assert!(taken.renewed_at < kept.renewed_at, "by renewing it");
        // Somebody takes it away while the state is still being read.
        let theirs = Epoch(kept.epoch.0 + 3);
        plane.usurp(theirs, false).await;
        tokio::time::sleep(secs(8)).await;
        plane.set_store(FaultPlan::default());
        plane.while_for(secs(20), "nothing is led", || plane.term().is_none()).await;
        assert_eq!(plane.lease().await.epoch, theirs, "what is theirs is not touched");
        assert!(plane.effects_since(at).is_empty());
        plane.usurp(theirs, true).await;
        plane.leads(secs(5)).await;
        assert!(theirs < epoch(&plane));
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (2, 0));
        plane.finish().await;
    });
}

/// T17
#[test]
fn a_lower_epoch_never_overwrites_a_higher_one() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let (old, id) = (epoch(&plane), web(&plane)[0]);
        let theirs = Epoch(old.0 + 7);
        plane.write_as(id, theirs).await;
        // What is asked next must be written to that record.
        plane.remove("default", id);
        plane
            .until("it leads above what it met", secs(20), || plane.term().is_some_and(|term| theirs < term.epoch()))
            .await;
        settled(&plane).await;
        // The record was read by a later term only; the judge sees that its epoch never fell.
        assert!(plane.record(id).is_some_and(|it| theirs < it.epoch), "{:?}", plane.record(id));
        plane.finish().await;
    });
}

/// T25
#[test]
fn nothing_is_served_before_the_state_is_ready() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        let (old, at) = (epoch(&plane), plane.now());
        plane.kill_server(true);
        plane.start_until_it_holds_the_lease(old).await;
        plane.set_store(FaultPlan { failed_lists: 1000, ..FaultPlan::default() });
        resize(&plane, 3);
        plane.until("agents noticed their leader's end", secs(5), || plane.connected().is_empty()).await;
        plane
            .while_for(secs(30), "nobody is served, nothing is done", || {
                plane.term().is_none() && plane.connected().is_empty() && plane.effects_since(at).is_empty()
            })
            .await;
        plane.set_store(FaultPlan::default());
        plane.leads(secs(3)).await;
        plane.until("what was asked meanwhile is done", secs(8), || n_creates(&plane) == 3).await;
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (3, 0));
        plane.finish().await;
    });
}

/// T27
#[test]
fn ca_creation_survives_a_crash_at_every_step() {
    // What is written before anything is made, up to the first create.
    let steps = simulate(async {
        let plane = whole(of_size(1)).await;
        let passed = plane.points().passed();
        plane.finish().await;
        passed.iter().position(|point| point == "create").expect("something is made")
    });
    assert!((3..20).contains(&steps), "{steps}");
    for (n, side) in (0..steps).flat_map(|n| [(n, Side::Before), (n, Side::After)]) {
        simulate(async {
            let plane = Plane::start(beginning(of_size(1))).await.expect("a plane");
            plane.points().arm(n, side);
            plane.dies_there(true).await;
            let ca = plane.stored("cluster/ca.crt").await;
            plane.start_server();
            // One agent in use: whoever issued its certificate is who checks it.
            plane.until("an agent is connected", secs(40), || plane.connected().len() == 1).await;
            let now = plane.stored("cluster/ca.crt").await;
            assert!(now.is_some());
            assert!(ca.is_none() || ca == now, "a CA that was there is not replaced");
            settled(&plane).await;
            assert_eq!(plane.stored("cluster/ca.crt").await, now);
            plane.finish().await;
        });
    }
}

/// T29
#[test]
fn a_partial_rebuild_creates_nothing() {
    simulate(async {
        let plane = whole(|it| it.sizes = [6, 2]).await;
        let (old, at) = (epoch(&plane), plane.now());
        plane.kill_server(true);
        plane.start_until_it_holds_the_lease(old).await;
        // The list is there, and of eight records now this and now that one can be read.
        plane.set_store(FaultPlan { failed_reads: 900, ..FaultPlan::default() });
        plane.while_for(secs(40), "nothing is done", || plane.effects_since(at).is_empty()).await;
        plane.set_store(FaultPlan::default());
        plane.leads(TAKEOVER).await;
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (8, 0), "nobody was missed");
        plane.finish().await;
    });
}

/// T30
#[test]
fn an_unanswering_node_loses_no_vm() {
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [4, 0];
            it.cloud.hosts = 2;
        })
        .await;
        let there: Vec<_> = plane
            .cloud()
            .vms()
            .into_iter()
            .filter(|vm| vm.host.as_deref() == Some("host-0"))
            .filter_map(|vm| vm.instance)
            .collect();
        assert!(!there.is_empty() && there.len() < 4);
        plane.cloud().host_silent("host-0", true);
        // Their agents are away too, longer than any silence is borne; and three sweeps come and go.
        plane.cut_agents(&there[..1], secs(60));
        plane.while_for(secs(100), "nobody is missed", || n_creates(&plane) == 4 && n_deletes(&plane) == 0).await;
        plane.cloud().host_silent("host-0", false);
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (4, 0));
        plane.finish().await;
    });
}

/// An id as a leader of another time would have minted it.
fn foreign_id(plane: &Plane, n: u8) -> InstanceId {
    InstanceId::new("knc".parse().expect("a kind"), nstance_core::ids::uuid_v7(plane.now(), [n; 10]))
}

/// T31
#[test]
fn a_vm_without_record_is_adopted_or_ended() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        plane.want("acme", "extra", |wish| wish.size = 1);
        settled(&plane).await;
        plane.want("acme", "extra", |wish| wish.deleted = true);
        settled(&plane).await;
        let (ours, late) = (foreign_id(&plane, 1), foreign_id(&plane, 2));
        let deletes = n_deletes(&plane);
        let at = plane.now();
        plane.add_orphan(ours, "default", "web");
        plane.add_orphan(late, "acme", "extra");
        // A sweep every thirty seconds.
        plane
            .until("the one is adopted", secs(32), || plane.record(ours).is_some_and(|it| it.adopted_at.is_some()))
            .await;
        plane
            .until("the other is ended", secs(100), || {
                plane.calls(Op::Delete).iter().any(|call| call.instance == Some(late))
            })
            .await;
        let ended = plane.calls(Op::Delete).into_iter().find(|call| call.instance == Some(late)).expect("it is ended");
        assert!(secs(60) <= ended.at.since(at), "only after the time that a VM has to register");
        assert!(plane.record(late).is_none());
        settled(&plane).await;
        assert_eq!(
            plane.calls(Op::Delete)[deletes..].iter().filter_map(|call| call.instance).collect::<BTreeSet<_>>(),
            [ours, late].into(),
            "the surplus leaves by the one it adopted"
        );
        plane.finish().await;
    });
}

/// T32
#[test]
fn failover_with_an_empty_cache_plans_nothing() {
    simulate(async {
        let plane = whole(|it| it.sizes = [4, 2]).await;
        let (at, ids) = (plane.now(), plane.cloud().standing());
        plane.kill_server(true);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.while_for(secs(120), "nothing is done", || plane.effects_since(at).is_empty()).await;
        settled(&plane).await;
        assert_eq!(plane.cloud().standing(), ids);
        assert!(plane.records().iter().all(|it| it.drain.is_none() && it.replace.is_none()));
        plane.finish().await;
    });
}

/// T33
#[test]
fn a_new_leader_knows_the_last_size() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        resize(&plane, 4);
        settled(&plane).await;
        plane.kill_server(true);
        plane.vm_dies(web(&plane)[0]);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.until("it is full again", secs(5), || web(&plane).len() == 4).await;
        settled(&plane).await;
        let drained = plane.records().iter().filter(|it| it.drain.is_some()).count();
        assert_eq!((n_creates(&plane), drained), (5, 0));
        plane.finish().await;
    });
}

/// T36
#[test]
fn a_drain_survives_failover_with_its_deadline() {
    simulate(async {
        let plane = whole(|it| it.drain_timeout = secs(60)).await;
        plane.mute("default", true);
        let id = web(&plane)[0];
        plane.remove("default", id);
        plane.until("it drains", secs(5), || plane.phase(id) == Some(Phase::Draining)).await;
        let drain = plane.record(id).and_then(|it| it.drain).expect("a drain");
        tokio::time::sleep(secs(10)).await;
        plane.kill_server(true);
        tokio::time::sleep(secs(10)).await;
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.until("it is deleted", secs(60), || n_deletes(&plane) == 1).await;
        let call = plane.calls(Op::Delete)[0].clone();
        assert_eq!(call.instance, Some(id));
        let late = call.at.since(drain.deadline);
        assert!(drain.deadline <= call.at && late <= secs(5), "{late:?}");
        let now = plane.record(id).and_then(|it| it.drain).expect("a drain");
        assert_eq!((now.started_at, now.deadline, now.reason), (drain.started_at, drain.deadline, drain.reason));
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T37
#[test]
fn an_agent_lost_during_failover_is_noticed() {
    simulate(async {
        let plane = whole(of_size(4)).await;
        let ids = web(&plane);
        plane.kill_server(false);
        // While nobody leads, one agent falls silent on a VM that runs on, and one VM ends.
        plane.cut_agents(&ids[..1], secs(3600));
        plane.power_cut(ids[1]);
        tokio::time::sleep(secs(2)).await;
        plane.start_server();
        plane.leads(TAKEOVER).await;
        let at = plane.now();
        plane.until("the ended one is replaced", secs(5), || n_creates(&plane) == 5).await;
        plane.until("the silent one is replaced", secs(60), || n_creates(&plane) == 6).await;
        let wait = plane.calls(Op::Create)[5].at.since(at);
        assert!(secs(15) <= wait && wait <= secs(50), "{wait:?} after the take-over");
        plane.until("it is drained", secs(2), || plane.record(ids[0]).is_some_and(|it| it.drain.is_some())).await;
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T38
#[test]
fn equal_group_names_of_two_tenants_do_not_touch() {
    simulate(async {
        let plane = whole(|it| it.sizes = [3, 3]).await;
        let (ours, theirs) = (web(&plane), plane.running("acme", "web"));
        plane.vm_dies(theirs[0]);
        resize(&plane, 1);
        settled(&plane).await;
        assert_eq!(plane.creates("default", "web").len(), 3);
        assert_eq!(plane.creates("acme", "web").len(), 4);
        let gone: BTreeSet<_> = plane.calls(Op::Delete).iter().filter_map(|call| call.instance).collect();
        assert_eq!(gone.iter().filter(|id| ours.contains(id)).count(), 2);
        assert!(gone.iter().all(|id| ours.contains(id) || *id == theirs[0]), "{gone:?}");
        // The groups of one tenant go, and the other's of the same name stays.
        resize(&plane, 0);
        settled(&plane).await;
        assert_eq!((web(&plane).len(), plane.running("acme", "web").len()), (0, 3));
        plane.finish().await;
    });
}

/// T39
#[test]
fn a_removed_group_is_drained() {
    simulate(async {
        let plane = whole(|it| it.sizes = [4, 1]).await;
        let theirs = plane.running("acme", "web");
        plane.edit_config(|config| config["groups"]["acme"] = serde_json::json!({})).await;
        let at = plane.now();
        let answer = plane.refresh("acme", false).await.expect("one of five may go");
        assert!(answer.updated, "{answer:?}");
        plane.want("acme", "web", |wish| wish.deleted = true);
        plane.until("it drains", secs(1), || plane.record(theirs[0]).is_some_and(|it| it.drain.is_some())).await;
        plane.until("it is deleted", secs(10), || n_deletes(&plane) == 1).await;
        let call = plane.calls(Op::Delete)[0].clone();
        let acked = plane.record(theirs[0]).and_then(|it| it.drain).and_then(|it| it.acked_at);
        assert!(acked.is_some_and(|acked| at <= acked && acked <= call.at), "its operator was asked first");
        settled(&plane).await;
        assert_eq!(plane.cloud().standing().len(), 4, "and nobody else");
        plane.finish().await;
    });
}

/// T39
#[test]
fn a_mass_removal_needs_a_word() {
    simulate(async {
        let plane = whole(|it| it.sizes = [1, 5]).await;
        plane.edit_config(|config| config["groups"]["acme"] = serde_json::json!({})).await;
        let refused = plane.refresh("acme", false).await.expect_err("five of six");
        assert_eq!(refused.code(), tonic::Code::FailedPrecondition, "{refused:?}");
        // Nor does a leader that reads it at its start.
        plane.kill_server(true);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.until("it is held", secs(5), || plane.holds("acme", "web").contains(&HoldKind::MassRemoval)).await;
        plane.while_for(secs(90), "nobody goes", || n_deletes(&plane) == 0).await;
        assert!(plane.records().iter().all(|it| it.drain.is_none()));
        plane.want("acme", "web", |wish| wish.deleted = true);
        plane.refresh("acme", true).await.expect("confirmed");
        plane.until("all five go", secs(20), || n_deletes(&plane) == 5).await;
        settled(&plane).await;
        assert_eq!(plane.cloud().standing().len(), 1);
        plane.finish().await;
    });
}

/// T44
#[test]
fn an_unreadable_group_keeps_its_members() {
    simulate(async {
        let plane = whole(|it| it.sizes = [3, 1]).await;
        let (at, key) = (plane.now(), plane.groups_key());
        let good = plane.stored(&key).await.expect("the groups file");
        plane.kill_server(true);
        plane.overwrite(&key, b"{ \"version\": 1, broken".to_vec()).await;
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.while_for(secs(90), "nobody is touched", || plane.effects_since(at).is_empty()).await;
        assert!(!plane.holds("default", "web").is_empty(), "and the group says why");
        plane.kill_server(true);
        plane.overwrite(&key, good).await;
        plane.start_server();
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (4, 0));
        plane.finish().await;
    });
}

/// T45
#[test]
fn after_an_outage_the_group_is_full_within_5s() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        plane.cloud().outage(true);
        resize(&plane, 6);
        plane.vm_dies(web(&plane)[0]);
        tokio::time::sleep(secs(90)).await;
        assert_eq!(n_vms(&plane), 2);
        plane.cloud().outage(false);
        plane.until("it is full", secs(5), || web(&plane).len() == 6).await;
        settled(&plane).await;
        assert_eq!(n_vms(&plane), 7);
        plane.finish().await;
    });
}

/// T46
#[test]
fn a_notice_overtakes_200_creates() {
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [2, 0];
            // Nobody of the two hundred is up before the end.
            it.cloud.latencies = [(Op::Create, millis(500))].into();
        })
        .await;
        let id = web(&plane)[0];
        resize(&plane, 202);
        plane.until("the creates are under way", secs(5), || 50 < n_creates(&plane)).await;
        let at = plane.now();
        plane.reclaim(&[id], secs(60));
        let replaced = |call: &Call| {
            call.instance.and_then(|it| plane.record(it)).is_some_and(|it| it.reason == CreateReason::Replacement)
        };
        plane.until("its replacement is made", secs(5), || plane.calls(Op::Create).iter().any(replaced)).await;
        let calls = plane.calls(Op::Create);
        let call = calls.iter().find(|call| replaced(call)).expect("a replacement");
        assert!(call.at.since(at) <= millis(600), "{:?}", call.at.since(at));
        assert!(calls.len() < 180, "{} were before it", calls.len());
        plane.finish().await;
    });
}

/// T47
#[test]
fn lost_wakeups_heal_within_a_resync() {
    simulate(async {
        let plane = whole(|it| {
            // Nobody is there whose reports would wake the group's worker.
            it.sizes = [0, 0];
            // No sweep comes to the rescue.
            it.config = |config| {
                config["server"]["garbage_collection"]["interval"] = "1h".into();
                config["server"]["garbage_collection"]["registration_timeout"] = "2h".into();
            };
        })
        .await;
        // The fact is there, and nobody is told of it.
        plane.whisper_size("default", "web", 2);
        resize(&plane, 2);
        let wait = plane.until("two are made", secs(31), || n_creates(&plane) == 2).await;
        assert!(secs(1) < wait, "somebody was told: {wait:?}");
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T48
#[test]
fn a_rollout_finishes_unattended_within_budget() {
    simulate(async {
        let plane = whole(of_size(3)).await;
        plane.want("default", "web", |wish| wish.instance_type = "large".to_owned());
        let (least, most) = (Cell::new(3), Cell::new(3));
        let new = || {
            let of = |id: &InstanceId| plane.record(*id).and_then(|it| it.instance_type);
            web(&plane).iter().filter(|id| of(id).as_deref() == Some("large")).count()
        };
        plane
            .until("all three are of the new type", secs(60), || {
                let n = |phases: &[Phase]| plane.records().iter().filter(|it| phases.contains(&it.phase())).count();
                least.set(least.get().min(n(&[Phase::Running])));
                most.set(most.get().max(n(&[Phase::Pending, Phase::Provisioning, Phase::Running])));
                new() == 3 && plane.cloud().standing().len() == 3
            })
            .await;
        assert_eq!((least.get(), most.get()), (3, 4), "never fewer in use than three, never more than one extra");
        settled(&plane).await;
        assert_eq!((n_creates(&plane), n_deletes(&plane)), (6, 3));
        plane.finish().await;
    });
}

/// T51
#[test]
fn losing_k_machines_starts_k_creates() {
    simulate(async {
        let plane = whole(of_size(8)).await;
        let (ids, at) = (web(&plane), plane.now());
        ids[..5].iter().for_each(|id| plane.vm_dies(*id));
        plane.until("five are made", secs(1), || n_creates(&plane) == 13).await;
        let began = waits(&plane.calls(Op::Create)[8..], at);
        assert!(began.iter().all(|wait| *wait <= millis(100)), "in one round: {began:?}");
        settled(&plane).await;
        assert_eq!((n_creates(&plane), web(&plane).len()), (13, 8));
        plane.finish().await;
    });
}

/// T52
#[test]
fn a_silent_vm_is_replaced_within_35s() {
    simulate(async {
        let plane = whole(of_size(4)).await;
        let ids = web(&plane);
        plane.power_cut(ids[0]);
        let wait = plane.until("the one without power is replaced", secs(20), || n_creates(&plane) == 5).await;
        assert!(secs(1) < wait, "nobody was told: {wait:?}");
        settled(&plane).await;
        // The VM runs, and its agent says nothing.
        plane.cut_agents(&ids[1..2], secs(600));
        plane.until("the silent one is replaced", secs(35), || n_creates(&plane) == 6).await;
        plane.until("and drained", secs(1), || plane.record(ids[1]).is_some_and(|it| it.drain.is_some())).await;
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 6);
        plane.finish().await;
    });
}

/// T53
#[test]
fn a_notice_reaches_the_provider_call_in_50ms() {
    simulate(async {
        let plane = whole(of_size(2)).await;
        plane.mute("default", true);
        let (id, at) = (web(&plane)[0], plane.now());
        plane.reclaim(&[id], secs(15));
        plane.until("its replacement is asked for", secs(1), || n_creates(&plane) == 3).await;
        let wait = plane.calls(Op::Create)[2].at.since(at);
        assert!(wait <= millis(50), "{wait:?}");
        plane.until("it drains", secs(1), || plane.phase(id) == Some(Phase::Draining)).await;
        // Twenty seconds are the group's, fifteen the cloud's.
        let deadline = plane.record(id).and_then(|it| it.drain).expect("a drain").deadline;
        assert!(deadline <= at.plus(secs(15)), "{:?}", deadline.since(at));
        plane.mute("default", false);
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 3, "the repeated notice changes nothing");
        plane.finish().await;
    });
}

/// T54
#[test]
fn no_timer_outlives_its_term() {
    simulate(async {
        let plane = whole(of_size(3)).await;
        plane.mute("default", true);
        let (old, ids) = (epoch(&plane), web(&plane));
        // A drain that ends in twenty seconds, an agent that is silent in fifteen, and a delete that is to be repeated.
        plane.cloud().script(Rule::always(Op::Delete, When::Always, Outcome::Refuse(ErrorClass::Throttled)));
        plane.cloud().stop(ids[2]);
        plane.remove("default", ids[0]);
        plane.until("it drains", secs(5), || plane.phase(ids[0]) == Some(Phase::Draining)).await;
        plane.cut_agents(&ids[1..2], secs(3600));
        plane.usurp(Epoch(old.0 + 1), false).await;
        plane.until("the term ends", secs(3), || plane.term().is_none()).await;
        let at = plane.now();
        let written = || plane.trace().iter().filter(|line| line.contains(" record ")).count();
        tokio::time::sleep(secs(1)).await;
        let before = written();
        plane
            .while_for(secs(50), "nothing of the old term fires", || {
                plane.effects_since(at).is_empty() && written() == before
            })
            .await;
        plane.cloud().clear_script();
        plane.usurp(Epoch(old.0 + 1), true).await;
        plane.leads(secs(5)).await;
        plane.mute("default", false);
        settled(&plane).await;
        assert!(plane.effects_since(at).iter().all(|call| Some(Epoch(old.0 + 1)) < call.epoch));
        plane.finish().await;
    });
}

/// T63
#[test]
fn one_nonce_binds_one_key() {
    simulate(async {
        let plane = whole(of_size(1)).await;
        let id = web(&plane)[0];
        let key = plane.record(id).and_then(|it| it.registration).expect("registered").public_key;
        let refused = plane.steal_nonce(id).await.expect_err("another key");
        assert!(!refused.message().is_empty());
        plane.kill_server(true);
        plane.start_server();
        plane.leads(TAKEOVER).await;
        plane.steal_nonce(id).await.expect_err("another key, and a leader that remembers nothing");
        assert_eq!(plane.record(id).and_then(|it| it.registration).expect("registered").public_key, key);
        // Two at once for one that nobody has used yet: the commit decides, and the loser is told.
        resize(&plane, 2);
        plane.until("another runs", secs(5), || web(&plane).len() == 2).await;
        let new = web(&plane).into_iter().find(|it| *it != id).expect("a second one");
        let (first, second) = tokio::join!(plane.steal_nonce(new), plane.steal_nonce(new));
        assert!(first.is_err() || second.is_err(), "both were let in");
        plane.finish().await;
    });
}

/// T84
#[test]
fn a_provider_outage_during_delete_leaks_nothing() {
    simulate(async {
        let plane = whole(of_size(3)).await;
        let id = web(&plane)[0];
        resize(&plane, 2);
        plane.remove("default", id);
        plane.until("its end is decided", secs(20), || plane.phase(id) == Some(Phase::Deleting)).await;
        plane.cloud().outage(true);
        // Whether or not that first call had landed, nobody may say now that it is gone.
        tokio::time::sleep(millis(15)).await;
        plane.while_for(secs(60), "nobody believes that it is gone", || plane.phase(id) == Some(Phase::Deleting)).await;
        plane.cloud().outage(false);
        let wait = plane.until("its end is proved", secs(5), || plane.phase(id) == Some(Phase::Deleted)).await;
        assert!(!plane.cloud().standing().contains(&id), "{wait:?}");
        settled(&plane).await;
        assert_eq!(plane.cloud().standing().len(), 2);
        plane.finish().await;
    });
}

/// T95
#[test]
fn no_capacity_moves_to_the_next_choice() {
    simulate(async {
        let plane = whole(of_size(0)).await;
        let full = When::Subnet("subnet-1".to_owned());
        plane.cloud().script(Rule::always(Op::Create, full, Outcome::Refuse(ErrorClass::Capacity)));
        resize(&plane, 4);
        plane.until("something was tried", secs(5), || 0 < n_creates(&plane)).await;
        let at = plane.calls(Op::Create)[0].at;
        plane.until("all four are made", secs(2), || n_vms(&plane) == 4).await;
        let calls = plane.calls(Op::Create);
        let last = calls.last().expect("calls").at;
        assert!(last.since(at) <= millis(500), "{:?}", last.since(at));
        let refused: BTreeSet<_> = calls
            .iter()
            .filter(|call| call.subnet.as_deref() == Some("subnet-1"))
            .filter_map(|call| call.instance)
            .collect();
        let made: BTreeSet<_> = plane.cloud().standing().into_iter().collect();
        assert!(!refused.is_empty() && refused.is_disjoint(&made), "another choice is another id");
        assert!(plane.cloud().vms().iter().all(|vm| vm.subnet.as_deref() == Some("subnet-2")));
        settled(&plane).await;
        plane.finish().await;
    });
}

/// T96
#[test]
fn a_leaving_instance_is_out_of_the_balancer_first() {
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [3, 0];
            it.cloud.lb_drain_time = secs(8);
        })
        .await;
        let before = web(&plane);
        // The first word to the balancer is lost.
        plane.cloud().script(Rule::once(Op::LbDeregister, When::Always, Outcome::Refuse(ErrorClass::Throttled)));
        resize(&plane, 2);
        let out = Cell::new(None);
        plane
            .until("one is deleted", secs(19), || {
                let leaving = before.iter().find(|id| plane.record(**id).is_some_and(|it| it.drain.is_some()));
                if leaving.is_some_and(|id| !plane.is_balanced(*id)) && out.get().is_none() {
                    out.set(Some(plane.now()));
                }
                n_deletes(&plane) == 1
            })
            .await;
        let asked = plane.calls(Op::LbDeregister);
        let landed = asked.iter().find(|call| call.landed).expect("it was taken out");
        let deleted = plane.calls(Op::Delete)[0].clone();
        assert_eq!((landed.instance, 2 <= asked.len()), (deleted.instance, true));
        assert!(secs(8) <= deleted.at.since(landed.at), "traffic under way was waited for");
        assert!(out.get().is_some_and(|out| out <= deleted.at));
        settled(&plane).await;
        let id = deleted.instance.expect("an instance");
        assert_eq!(plane.calls(Op::LbRegister).iter().filter(|call| call.instance == Some(id)).count(), 1);
        plane.finish().await;
    });
}

/// T55: days of restarts in which agents renew again and again, and then nobody leads for longer than a certificate
/// lives.
#[test]
fn a_fleet_survives_72h_of_restarts() {
    // Elsewhere than in the long run everything lives a twelfth of its time.
    let (hour, short) = if std::env::var_os("NSTANCE_SIM_FULL").is_some() { (3600, false) } else { (300, true) };
    simulate(async {
        let plane = whole(|it| {
            it.sizes = [3, 0];
            if short {
                it.config = |config| config["certificates"]["agent"]["ttl"] = "2h".into();
            }
        })
        .await;
        let (before, n_creates) = (web(&plane), plane.calls(Op::Create).len());
        let serials = || {
            let serial = |it: nstance_core::instance::Instance| it.cert.map(|cert| cert.current.serial);
            plane.records().into_iter().filter_map(serial).collect::<BTreeSet<_>>()
        };
        let comes_back = async || {
            plane.start_server();
            plane.leads(TAKEOVER).await;
            plane.until("everybody is back", secs(30), || plane.connected() == before).await;
        };
        let first = serials();
        for n in 0..11 {
            tokio::time::sleep(secs(4 * hour)).await;
            plane.kill_server(n % 2 == 0);
            comes_back().await;
        }
        assert!(first.is_disjoint(&serials()), "nobody has its first certificate any more");
        assert!(!plane.trace().iter().any(|line| line.contains("rejoins")), "all of them were renewed in time");
        plane.kill_server(true);
        tokio::time::sleep(secs(28 * hour)).await;
        comes_back().await;
        assert_eq!(plane.trace().iter().filter(|line| line.contains("rejoins")).count(), 3);
        assert_eq!((web(&plane), plane.calls(Op::Create).len()), (before.clone(), n_creates), "nobody was replaced");
        settled(&plane).await;
        plane.finish().await;
    });
}
