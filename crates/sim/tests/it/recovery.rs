//! A server dies right after each step of the work, and loses its disk with it: what is left then, and within what time
//! the next one has made it good. One test for each row of the table of recoveries (`docs/traps.md`).
//!
//! Times count from the moment the next server leads; how soon it does is looked at in each.

use std::time::Duration;

use nstance_core::{ids::InstanceId, instance::Phase, ports::provider::ErrorClass};
use nstance_providers::fake::{Op, Outcome, Rule, When};
use nstance_sim::{Beginning, Plane, Side, simulate};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A killed server's lease runs six seconds; a look, a bid and the rebuild come on top.
const TAKEOVER: Duration = secs(9);
/// An agent or an operator that is refused asks again within this.
const RETRY: Duration = secs(5);

const RECORD: &str = "put shard/s1/instance";
const GROUPS: &str = "put shard/s1/groups";

async fn settled(plane: &Plane) {
    plane.settle().await;
    let broken = plane.violations();
    assert!(broken.is_empty(), "{}\n{}", plane.trace().join("\n"), broken.join("\n"));
}

/// A plane at the size asked for, with everybody connected.
async fn whole(size: u32, change: impl FnOnce(&mut Beginning)) -> Plane {
    let mut beginning = Beginning::new(1);
    beginning.cloud.boot_time = millis(500);
    beginning.cloud.delete_time = millis(500);
    beginning.cloud.latency = millis(20);
    beginning.sizes = [size, 0];
    change(&mut beginning);
    let plane = Plane::start(beginning).await.expect("a plane");
    settled(&plane).await;
    plane
}

fn resize(plane: &Plane, size: u32) {
    plane.want("default", "web", |wish| wish.size = size);
}

fn web(plane: &Plane) -> Vec<InstanceId> {
    plane.running("default", "web")
}

fn n_creates(plane: &Plane) -> usize {
    plane.calls(Op::Create).len()
}

fn n_vms(plane: &Plane) -> usize {
    plane.cloud().vms().len()
}

/// The one instance that is in none of these.
fn newcomer(plane: &Plane, before: &[InstanceId]) -> InstanceId {
    let new: Vec<_> = plane.records().into_iter().map(|it| it.id).filter(|id| !before.contains(id)).collect();
    assert_eq!(new.len(), 1, "{new:?}");
    new[0]
}

/// Sends what was under way to its end: the network delivers though its sender is dead.
async fn dies_at(plane: &Plane, point: &str, skip: usize, side: Side, act: impl FnOnce()) {
    plane.points().arm_at(point, skip, side);
    act();
    plane.dies_there(true).await;
    tokio::time::sleep(secs(1)).await;
}

async fn next_leads(plane: &Plane) {
    plane.start_server();
    plane.leads(TAKEOVER).await;
}

#[test]
fn a_decision_that_was_not_sent_is_made_again() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        dies_at(&plane, GROUPS, 0, Side::After, || resize(&plane, 2)).await;
        assert_eq!((n_creates(&plane), plane.records().len()), (1, 1), "nothing is left");
        next_leads(&plane).await;
        plane.until("it is sent", secs(1), || n_creates(&plane) == 2).await;
        settled(&plane).await;
        assert_eq!(n_vms(&plane), 2);
        plane.finish().await;
    });
}

#[test]
fn a_vm_whose_intent_was_lost_is_adopted() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        let before = web(&plane);
        dies_at(&plane, RECORD, 0, Side::Before, || resize(&plane, 2)).await;
        assert_eq!((n_vms(&plane), plane.records().len()), (2, 1), "a tagged VM and no record");
        let orphan = plane.cloud().standing().into_iter().find(|id| !before.contains(id)).expect("an orphan");
        next_leads(&plane).await;
        plane.until("it is adopted", secs(5), || plane.record(orphan).is_some_and(|it| it.adopted_at.is_some())).await;
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 2, "and fills the place it was made for");
        plane.finish().await;
    });
}

#[test]
fn an_intent_whose_create_was_not_sent_is_carried_out() {
    // Where asking twice makes two, it is asked again after two looks that are ten seconds apart.
    for (idempotent, reserve, limit) in [(true, false, secs(1)), (false, false, secs(15)), (false, true, secs(15))] {
        simulate(async {
            let plane = whole(1, |it| {
                it.cloud.idempotent_create = idempotent;
                it.cloud.reserve = reserve;
            })
            .await;
            let before = web(&plane);
            dies_at(&plane, "create", 0, Side::Before, || resize(&plane, 2)).await;
            let id = newcomer(&plane, &before);
            assert_eq!((plane.phase(id), n_vms(&plane)), (Some(Phase::Pending), 1), "an intent and no VM");
            next_leads(&plane).await;
            let wait = plane.until("it is sent", limit, || n_creates(&plane) == 2).await;
            assert!(idempotent || secs(10) <= wait, "{wait:?}");
            settled(&plane).await;
            assert_eq!(plane.calls(Op::Create)[1].instance, Some(id), "under the same id");
            assert_eq!((n_creates(&plane), n_vms(&plane)), (2, 2), "idempotent: {idempotent}");
            plane.finish().await;
        });
    }
}

#[test]
fn an_unrecorded_confirmation_is_found_again() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        let before = web(&plane);
        dies_at(&plane, RECORD, 1, Side::Before, || resize(&plane, 2)).await;
        let id = newcomer(&plane, &before);
        assert_eq!((plane.phase(id), n_vms(&plane)), (Some(Phase::Pending), 2), "an intent and a VM");
        next_leads(&plane).await;
        plane.until("it is confirmed", secs(2), || plane.phase(id) != Some(Phase::Pending)).await;
        settled(&plane).await;
        assert_eq!((n_vms(&plane), web(&plane).contains(&id)), (2, true));
        plane.finish().await;
    });
}

#[test]
fn a_registration_that_was_not_durable_is_repeated() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        let before = web(&plane);
        dies_at(&plane, RECORD, 2, Side::Before, || resize(&plane, 2)).await;
        let id = newcomer(&plane, &before);
        assert_eq!(plane.phase(id), Some(Phase::Provisioning), "not registered");
        next_leads(&plane).await;
        plane.until("it is registered", RETRY, || plane.phase(id) == Some(Phase::Running)).await;
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 2);
        plane.finish().await;
    });
}

#[test]
fn a_registration_whose_answer_was_lost_is_answered_again() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        let before = web(&plane);
        dies_at(&plane, RECORD, 2, Side::After, || resize(&plane, 2)).await;
        let id = newcomer(&plane, &before);
        let bound = plane.record(id).and_then(|it| it.registration).expect("registered").public_key;
        assert!(!plane.connected().contains(&id), "and the agent does not know");
        next_leads(&plane).await;
        // Asking again, a session and its first report.
        plane.until("it is connected", RETRY + secs(1), || plane.connected().contains(&id)).await;
        settled(&plane).await;
        assert_eq!(plane.record(id).and_then(|it| it.registration).expect("registered").public_key, bound);
        assert_eq!(n_creates(&plane), 2);
        plane.finish().await;
    });
}

#[test]
fn a_rotation_goes_on_after_its_successor_was_made() {
    simulate(async {
        let plane = whole(2, |_| {}).await;
        let grow = || plane.want("default", "web", |wish| wish.instance_type = "large".to_owned());
        dies_at(&plane, RECORD, 3, Side::Before, grow).await;
        assert_eq!(plane.records().iter().filter(|it| it.phase() == Phase::Running).count(), 3, "one more than asked");
        next_leads(&plane).await;
        // Nobody is ready in a new term before it was heard.
        plane.until("all are back", RETRY, || plane.connected().len() == 3).await;
        let drains = || plane.records().iter().filter(|it| it.drain.is_some()).count();
        plane.until("the old one drains", secs(1), || drains() == 1).await;
        settled(&plane).await;
        assert_eq!(n_creates(&plane), 4, "two, and a successor for each");
        plane.finish().await;
    });
}

#[test]
fn a_drain_that_was_not_told_is_found_by_its_operator() {
    simulate(async {
        let plane = whole(2, |_| {}).await;
        dies_at(&plane, RECORD, 0, Side::After, || resize(&plane, 1)).await;
        let drained: Vec<_> = plane.records().into_iter().filter(|it| it.phase() == Phase::Draining).collect();
        assert_eq!(drained.len(), 1);
        let drain = drained[0].drain.clone().expect("a drain");
        next_leads(&plane).await;
        let now = || plane.record(drained[0].id).and_then(|it| it.drain).expect("a drain");
        plane.until("it is acknowledged", secs(2), || now().acked_at.is_some()).await;
        assert_eq!((now().started_at, now().deadline), (drain.started_at, drain.deadline));
        settled(&plane).await;
        plane.finish().await;
    });
}

#[test]
fn an_acknowledgement_that_was_not_durable_is_repeated() {
    simulate(async {
        let plane = whole(2, |_| {}).await;
        dies_at(&plane, RECORD, 1, Side::Before, || resize(&plane, 1)).await;
        let drained: Vec<_> = plane.records().into_iter().filter(|it| it.phase() == Phase::Draining).collect();
        assert_eq!(drained.len(), 1);
        let id = drained[0].id;
        let acked = || plane.record(id).and_then(|it| it.drain).is_some_and(|it| it.acked_at.is_some());
        assert!(!acked());
        next_leads(&plane).await;
        plane.until("it is acknowledged", secs(2), acked).await;
        settled(&plane).await;
        assert_eq!(plane.calls(Op::Delete).len(), 1);
        plane.finish().await;
    });
}

#[test]
fn a_delete_that_was_not_sent_or_not_answered_is_repeated() {
    for side in [Side::Before, Side::After] {
        simulate(async {
            let plane = whole(2, |_| {}).await;
            dies_at(&plane, "delete", 0, side, || resize(&plane, 1)).await;
            let leaving: Vec<_> = plane.records().into_iter().filter(|it| it.phase() == Phase::Deleting).collect();
            assert_eq!(leaving.len(), 1);
            let sent = plane.calls(Op::Delete).len();
            assert_eq!(sent, usize::from(side == Side::After));
            next_leads(&plane).await;
            // Sent once more, or its absence is proof enough.
            let id = leaving[0].id;
            plane
                .until("it goes on", secs(1), || {
                    sent < plane.calls(Op::Delete).len() || plane.phase(id) == Some(Phase::Deleted)
                })
                .await;
            plane.until("its end is proved", secs(4), || plane.phase(id) == Some(Phase::Deleted)).await;
            settled(&plane).await;
            assert_eq!(n_creates(&plane), 2);
            plane.finish().await;
        });
    }
}

#[test]
fn an_end_that_was_not_written_is_proved_again() {
    simulate(async {
        let plane = whole(2, |_| {}).await;
        // Drain, acknowledgement, deletion, and then its end.
        dies_at(&plane, RECORD, 3, Side::Before, || resize(&plane, 1)).await;
        let leaving: Vec<_> = plane.records().into_iter().filter(|it| it.phase() == Phase::Deleting).collect();
        assert_eq!((leaving.len(), plane.cloud().standing().len()), (1, 1), "a VM that is gone and a record");
        next_leads(&plane).await;
        plane.until("it is written", secs(2), || plane.phase(leaving[0].id) == Some(Phase::Deleted)).await;
        settled(&plane).await;
        plane.finish().await;
    });
}

#[test]
fn who_is_in_the_balancer_is_read_from_the_balancer() {
    simulate(async {
        let plane = whole(1, |it| it.cloud.lb_drain_time = secs(2)).await;
        let before = web(&plane);
        dies_at(&plane, "lb_register", 0, Side::After, || resize(&plane, 2)).await;
        let id = newcomer(&plane, &before);
        assert!(plane.is_balanced(id), "it landed, and nobody noted it");
        next_leads(&plane).await;
        settled(&plane).await;
        assert_eq!(plane.calls(Op::LbRegister).len(), 2, "nobody is put in twice");

        dies_at(&plane, "lb_deregister", 0, Side::After, || resize(&plane, 1)).await;
        let leaving: Vec<_> = plane.records().into_iter().filter(|it| it.phase() == Phase::Draining).collect();
        assert_eq!(leaving.len(), 1);
        next_leads(&plane).await;
        plane.until("it goes on", secs(5), || plane.calls(Op::Delete).len() == 1).await;
        assert!(!plane.is_balanced(leaving[0].id));
        settled(&plane).await;
        assert_eq!(plane.calls(Op::LbRegister).len(), 2, "and nobody is put in again");
        plane.finish().await;
    });
}

#[test]
fn a_tombstone_is_heeded_by_the_next_leader() {
    simulate(async {
        let plane = whole(1, |_| {}).await;
        plane.want("acme", "extra", |wish| wish.size = 2);
        settled(&plane).await;
        dies_at(&plane, GROUPS, 0, Side::After, || plane.want("acme", "extra", |wish| wish.deleted = true)).await;
        let drains = || plane.records().iter().filter(|it| it.drain.is_some()).count();
        assert_eq!(drains(), 0, "nobody drains yet");
        next_leads(&plane).await;
        plane.until("both drain", secs(1), || drains() == 2).await;
        settled(&plane).await;
        assert_eq!(plane.cloud().standing().len(), 1);
        plane.finish().await;
    });
}

#[test]
fn an_outage_of_the_provider_is_over_within_5s_of_its_end() {
    simulate(async {
        let plane = whole(3, |_| {}).await;
        let ids = web(&plane);
        // A create of unclear fate, a loss, and a deletion, when the cloud goes away; and then the server too.
        let unclear = Outcome::LandThenFail(ErrorClass::Ambiguous);
        plane.cloud().script(Rule::once(Op::Create, When::Always, unclear));
        plane.vm_dies(ids[0]);
        plane.until("its replacement is asked for", secs(1), || n_creates(&plane) == 4).await;
        plane.cloud().outage(true);
        plane.remove("default", ids[1]);
        // It cannot be taken out of the balancer, so its whole time is waited for.
        plane.until("it is to go", secs(30), || plane.phase(ids[1]) == Some(Phase::Deleting)).await;
        plane.kill_server(true);
        next_leads(&plane).await;
        tokio::time::sleep(secs(60)).await;
        assert!(plane.cloud().standing().contains(&ids[1]));
        plane.cloud().outage(false);
        plane.until("the group is full", secs(5), || web(&plane).iter().filter(|id| **id != ids[1]).count() == 3).await;
        plane.until("who was to go is gone", secs(5), || !plane.cloud().standing().contains(&ids[1])).await;
        settled(&plane).await;
        assert_eq!(n_vms(&plane), 5, "three, and one for each that left");
        plane.finish().await;
    });
}

#[test]
fn an_outage_of_the_store_is_over_within_3s_of_its_end() {
    simulate(async {
        let plane = whole(3, |_| {}).await;
        let (ids, at) = (web(&plane), plane.now());
        plane.cut_store(true);
        tokio::time::sleep(secs(20)).await;
        plane.vm_dies(ids[0]);
        plane.while_for(secs(30), "nothing is done", || plane.effects_since(at).is_empty()).await;
        assert_eq!(plane.connected(), ids[1..], "agents stay connected");
        plane.cut_store(false);
        plane.until("the loss is made good", secs(3), || n_creates(&plane) == 4).await;
        settled(&plane).await;
        plane.finish().await;
    });
}
