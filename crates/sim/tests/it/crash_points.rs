//! A server is stopped right before and right after each of its writes and effects, one run for each, and another goes
//! on: the promises hold, and the work is completed.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use nstance_sim::{Beginning, Plane, Side, simulate};

/// Whether the machine keeps its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    Kept,
    Lost,
}

async fn plane() -> Plane {
    let mut beginning = Beginning::new(1);
    beginning.cloud.boot_time = Duration::from_millis(500);
    beginning.cloud.delete_time = Duration::from_millis(500);
    beginning.cloud.lb_drain_time = Duration::from_millis(500);
    beginning.cloud.latency = Duration::from_millis(20);
    beginning.sizes = [2, 1];
    beginning.config = |config| {
        config["server"]["default_drain_timeout"] = "15s".into();
    };
    Plane::start(beginning).await.expect("a plane")
}

/// Everything that a group and an instance go through: made, registered, drained and deleted, rolled over, deleted by
/// request, a group made and deleted. Waits after each until all is as asked.
async fn life(plane: &Plane) {
    plane.settle().await;
    plane.want("default", "web", |wish| wish.size = 1);
    plane.settle().await;
    plane.want("default", "web", |wish| wish.instance_type = "large".to_owned());
    plane.settle().await;
    let one = plane.running("default", "web")[0];
    plane.remove("default", one);
    plane.settle().await;
    plane.want("acme", "extra", |wish| wish.size = 1);
    plane.settle().await;
    plane.want("acme", "extra", |wish| wish.deleted = true);
    plane.settle().await;
}

/// The points that a life without a crash passes.
fn points() -> Vec<String> {
    simulate(async {
        let plane = plane().await;
        life(&plane).await;
        let passed = plane.points().passed();
        plane.finish().await;
        passed
    })
}

/// The same life with a crash at the nth point. Says which it was.
fn crash_at(n: usize, side: Side, disk: Disk) -> String {
    simulate(async {
        let plane = plane().await;
        plane.points().arm(n, side);
        let crash = async {
            plane.points().hit().await;
            let point = plane.points().passed()[n].clone();
            plane.kill_server(disk == Disk::Lost);
            plane.start_server();
            point
        };
        let (point, ()) = tokio::join!(crash, life(&plane));
        plane.finish().await;
        point
    })
}

/// `make sim` meets all of them in an optimised build; without that, every ninth.
#[test]
fn a_crash_at_every_write_and_call_is_made_good() {
    let points = points();
    for part in ["create", "delete", "lb_register", "lb_deregister", "put shard/s1/instance", "put shard/s1/groups"] {
        assert!(points.iter().any(|point| point.starts_with(part)), "{part} is no point: {points:#?}");
    }
    let stride = if std::env::var_os("NSTANCE_SIM_FULL").is_some() { 1 } else { 9 };
    let cases: Vec<(usize, Side, Disk)> = (0..points.len())
        .step_by(stride)
        .flat_map(|n| [(n, Side::Before), (n, Side::After)])
        .enumerate()
        // With and without a cache in turn: each point is met with both, on one of its sides.
        .map(|(case, (n, side))| (n, side, if (case / 2 + case) % 2 == 0 { Disk::Kept } else { Disk::Lost }))
        .collect();
    let (next, met) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((n, side, disk)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let point = crash_at(*n, *side, *disk);
                    assert_eq!(point, points[*n], "point {n} is another in the second run");
                    met.lock().expect("no panic").push((*n, *side, point));
                }
            });
        }
    });
    let mut met = met.into_inner().expect("no panic");
    met.sort_by_key(|(n, side, _)| (*n, *side == Side::After));
    assert_eq!(met.len(), cases.len());
    for (n, side, point) in met {
        println!("{n:>3} {side:?} {point}");
    }
}
