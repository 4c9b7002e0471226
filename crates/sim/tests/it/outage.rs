//! A provider that is away for two minutes: nobody who is well is replaced because of it, and what is missing is made up
//! for right after it is back.

use std::{collections::BTreeSet, time::Duration};

use nstance_core::{
    ids::InstanceId,
    instance::{Phase, Seen},
};
use nstance_providers::fake::Op;
use nstance_sim::{Beginning, Plane, simulate};

const OUTAGE: Duration = Duration::from_secs(120);

/// The group is whole so soon after the provider's return.
const WHOLE: Duration = Duration::from_secs(5);

const SEEDS: u64 = 8;

async fn plane(seed: u64) -> Plane {
    let mut beginning = Beginning::new(seed);
    beginning.cloud.latency = Duration::from_millis(50);
    beginning.cloud.boot_time = Duration::from_millis(500);
    beginning.sizes = [6, 0];
    let plane = Plane::start(beginning).await.expect("a plane");
    plane.settle().await;
    plane
}

/// Members whose VM runs. Their agents come when they come: a machine's start is not the provider's return.
fn standing(plane: &Plane) -> usize {
    plane.running("default", "web").len()
}

/// Members whose VM runs and whose agent registered.
fn ready(plane: &Plane) -> BTreeSet<InstanceId> {
    let running: BTreeSet<_> =
        plane.cloud().states().into_iter().filter(|(_, seen)| *seen == Seen::Running).map(|(id, _)| id).collect();
    let records = plane.records().into_iter();
    records.filter(|it| it.phase() == Phase::Running).map(|it| it.id).filter(|id| running.contains(id)).collect()
}

fn n_creates(plane: &Plane) -> usize {
    plane.cloud().calls().iter().filter(|call| call.op == Op::Create && call.landed).count()
}

/// The provider is away while things happen to the group. Answers how long after its return the group was whole.
async fn outage(plane: &Plane, size: usize, meanwhile: impl AsyncFnOnce(&Plane)) -> Duration {
    plane.cloud().outage(true);
    let end = tokio::time::Instant::now() + OUTAGE;
    meanwhile(plane).await;
    tokio::time::sleep_until(end).await;
    plane.cloud().outage(false);
    let back = tokio::time::Instant::now();
    while standing(plane) < size && back.elapsed() < 12 * WHOLE {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    back.elapsed()
}

#[test]
fn after_an_outage_the_group_is_full_within_5s() {
    for seed in 0..SEEDS {
        simulate(async {
            let plane = plane(seed).await;
            let before: Vec<_> = ready(&plane).into_iter().collect();
            let made = n_creates(&plane);
            let dead = [before[0], before[1], before[2]];
            let took = outage(&plane, 6, async |plane| {
                // One at the beginning, two towards the end; one is cut off meanwhile and runs on.
                plane.cloud().kill(dead[0]);
                plane.cut_agents(&[before[3]], Duration::from_secs(60));
                tokio::time::sleep(OUTAGE / 2 + OUTAGE / 3).await;
                plane.cloud().kill(dead[1]);
                plane.cloud().kill(dead[2]);
            })
            .await;
            assert!(took <= WHOLE, "seed {seed}: whole only {took:?} after the provider's return");
            plane.settle().await;
            let after = ready(&plane);
            assert!(before[3..].iter().all(|id| after.contains(id)), "seed {seed}: a healthy one was replaced");
            assert_eq!(n_creates(&plane), made + 3, "seed {seed}: one for each that died");
            plane.finish().await;
        });
    }
}

#[test]
fn an_outage_alone_changes_nobody() {
    for seed in 0..SEEDS {
        simulate(async {
            let plane = plane(seed).await;
            let (before, made) = (ready(&plane), n_creates(&plane));
            let took = outage(&plane, 6, async |_| {}).await;
            assert!(took <= WHOLE, "seed {seed}: {took:?}");
            plane.settle().await;
            assert_eq!(ready(&plane), before, "seed {seed}");
            assert_eq!(n_creates(&plane), made, "seed {seed}");
            plane.finish().await;
        });
    }
}

#[test]
fn a_scale_up_asked_for_in_an_outage_is_there_within_5s_of_its_end() {
    for seed in 0..SEEDS {
        simulate(async {
            let plane = plane(seed).await;
            let before = ready(&plane);
            let took = outage(&plane, 9, async |plane| plane.want("default", "web", |wish| wish.size = 9)).await;
            assert!(took <= WHOLE, "seed {seed}: whole only {took:?} after the provider's return");
            plane.settle().await;
            assert!(before.is_subset(&ready(&plane)), "seed {seed}: a healthy one was replaced");
            plane.finish().await;
        });
    }
}
