//! Google: reads that wait.

use tokio::time::Instant;

use super::{HOUR, MINUTE, SECOND, dialled, next_notice, quiet, settled, start, until_fact};
use crate::common::{
    World,
    imds::{self, Answer, Imds},
};

const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
const MAINTENANCE: &str = "/computeMetadata/v1/instance/maintenance-event";

#[tokio::test(start_paused = true)]
async fn hanging_read_tells_of_preemption_at_once() {
    let imds = Imds::gcp("TRUE");
    let mut world = settled("gcp", &imds, imds::GOOGLE).await;
    imds.take_asked();
    quiet(&mut world, 10 * MINUTE).await;
    let asked = imds.take_asked();
    // Two values, each read once a minute.
    assert!((18..=24).contains(&asked.len()), "{}", asked.len());
    for asked in &asked {
        assert!(asked.path.contains("?wait_for_change=true&timeout_sec=60&last_etag="), "{}", asked.path);
        assert_eq!(asked.headers["metadata-flavor"], "Google");
    }
    tokio::time::advance(7 * SECOND).await;
    let changed = Instant::now();
    imds.set(PREEMPTED, "TRUE");
    let (at, notice) = next_notice(&mut world).await;
    assert_eq!((notice.action.as_str(), notice.deadline), ("preempt", None));
    assert_eq!(at, changed);
    imds.set(PREEMPTED, "FALSE");
    assert_eq!(quiet(&mut world, 5 * MINUTE).await.as_deref(), Some("preempt"));
}

#[tokio::test(start_paused = true)]
async fn maintenance_begins_ends_and_stays_told() {
    for (preemptible, event) in [("TRUE", "MIGRATE_ON_HOST_MAINTENANCE"), ("FALSE", "TERMINATE_ON_HOST_MAINTENANCE")] {
        let imds = Imds::gcp(preemptible);
        let mut world = settled("gcp", &imds, imds::GOOGLE).await;
        let changed = Instant::now();
        imds.set(MAINTENANCE, event);
        let (at, notice) = next_notice(&mut world).await;
        assert_eq!((notice.action.as_str(), at), ("maintenance", changed));
        imds.set(MAINTENANCE, "NONE");
        assert_eq!(quiet(&mut world, 5 * MINUTE).await.as_deref(), Some("maintenance"));
        imds.set(MAINTENANCE, event);
        assert_eq!(quiet(&mut world, 5 * MINUTE).await.as_deref(), Some("maintenance"));
        if preemptible == "TRUE" {
            imds.set(PREEMPTED, "TRUE");
            assert_eq!(next_notice(&mut world).await.1.action, "preempt");
        } else {
            assert!(imds.paths().iter().all(|path| !path.contains("preempted")), "nobody preempts this machine");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_not_googles_are_ignored() {
    let imds = Imds::gcp("TRUE");
    let mut world = settled("gcp", &imds, imds::GOOGLE).await;
    imds.no_headers();
    imds.set(PREEMPTED, "TRUE");
    until_fact(&mut world, "spot_monitor", "failing").await;
    assert_eq!(quiet(&mut world, 5 * MINUTE).await, None);
    imds.header("Metadata-Flavor", "Google");
    assert_eq!(next_notice(&mut world).await.1.action, "preempt");
    // Nor is a portal that answers everything taken for a cloud.
    let portal = Imds::new();
    portal.set("/computeMetadata/v1/instance/name", "welcome");
    portal.set("/computeMetadata/v1/instance/zone", "welcome");
    portal.set("/computeMetadata/v1/instance/scheduling/preemptible", "TRUE");
    let mut world = World::new();
    portal.listen(&world, imds::GOOGLE);
    start(&world, &[("PROVIDER", "gcp")]);
    quiet(&mut world, HOUR).await;
    until_fact(&mut world, "spot_monitor", "unknown").await;
}

#[tokio::test(start_paused = true)]
async fn nonsense_is_no_preemption() {
    for bad in
        [Answer::from("perhaps"), Answer::from(""), Answer::Status(503), Answer::Raw(b"TRUE".to_vec()), Answer::Hang]
    {
        let imds = Imds::gcp("TRUE");
        let mut world = settled("gcp", &imds, imds::GOOGLE).await;
        imds.set(PREEMPTED, bad.clone());
        until_fact(&mut world, "spot_monitor", "failing").await;
        assert_eq!(quiet(&mut world, MINUTE).await, None, "{bad:?}");
        imds.set(PREEMPTED, "TRUE");
        assert_eq!(next_notice(&mut world).await.1.action, "preempt", "{bad:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn service_that_does_not_let_readers_wait_is_not_hammered() {
    let imds = Imds::gcp("TRUE");
    // Answers at once, however it is asked.
    for path in [PREEMPTED, MAINTENANCE] {
        let value = if path == PREEMPTED { "FALSE" } else { "NONE" };
        let body = format!("HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nETag: abc\r\n\r\n{value}");
        imds.set(
            &format!("{path}?wait_for_change=true&timeout_sec=60&last_etag=abc"),
            Answer::Raw(body.clone().into()),
        );
        imds.set(path, Answer::Raw(body.into()));
    }
    let mut world = settled("gcp", &imds, imds::GOOGLE).await;
    imds.take_asked();
    quiet(&mut world, 10 * MINUTE).await;
    let n_asked = imds.take_asked().len();
    assert!(n_asked <= 640, "two values every two seconds: {n_asked}");
}

#[tokio::test(start_paused = true)]
async fn service_that_swallows_waiting_reads_is_asked_again_and_again() {
    let imds = Imds::gcp("TRUE");
    let mut world = World::new();
    imds.listen(&world, imds::GOOGLE);
    imds.listen(&world, imds::V4);
    start(&world, &[("PROVIDER", "gcp")]);
    until_fact(&mut world, "spot_monitor", "ok").await;
    imds.swallow_waiting();
    // One that waits already, and the first that is swallowed.
    quiet(&mut world, 60 * SECOND + 65 * SECOND + 10 * SECOND).await;
    assert_eq!(dialled(&world, imds::V4), [], "the other address leads to the same service");
    imds.take_asked();
    quiet(&mut world, MINUTE).await;
    let n_plain = imds.take_asked().iter().filter(|asked| asked.path == PREEMPTED).count();
    assert!((29..=31).contains(&n_plain), "every two seconds: {n_plain}");
    let changed = Instant::now();
    imds.set(PREEMPTED, "TRUE");
    let (at, notice) = next_notice(&mut world).await;
    assert_eq!(notice.action, "preempt");
    assert!(at - changed <= 3 * SECOND, "{:?}", at - changed);
    // It may have learnt it since.
    imds.take_asked();
    quiet(&mut world, 2 * HOUR).await;
    let n_waits = imds.take_asked().iter().filter(|asked| asked.path.contains("wait_for_change")).count();
    assert!((2..=4).contains(&n_waits), "two values once an hour: {n_waits}");
}

#[tokio::test(start_paused = true)]
async fn service_without_tags_is_waited_for_all_the_same() {
    let imds = Imds::gcp("TRUE");
    imds.without_tags();
    let mut world = settled("gcp", &imds, imds::GOOGLE).await;
    quiet(&mut world, 10 * MINUTE).await;
    assert!(imds.take_asked().len() < 60);
    imds.set(PREEMPTED, "TRUE");
    assert_eq!(next_notice(&mut world).await.1.action, "preempt");
}
