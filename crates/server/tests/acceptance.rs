//! The promises in numbers, with bounds that hold on a busy machine in debug mode. The promised bounds are checked in
//! release mode by `cargo run --release -p nstance-server --example acceptance`.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "it/common/mod.rs"]
mod common;
mod measured;

use std::time::Duration;

#[tokio::test]
async fn a_notice_overtakes_200_creates() {
    let create = Duration::from_secs(4);
    let found = measured::scale_up(200, 4, create).await;
    assert!(found.under_way.iter().all(|n| 0 < *n), "not in the middle: {found:?}");
    assert!(found.notices.iter().all(|it| *it < create), "{found:?}");
    assert_eq!(found.ended, [0; 4], "none had to wait for a create to end: {found:?}");
    assert!(found.whole_after < 200 * create / 10, "many are made at a time: {found:?}");
}

#[tokio::test]
async fn a_hundred_agents_cut_at_once_are_waited_for_and_five_are_replaced() {
    let found = measured::split(100, 5, Duration::from_millis(1000)).await;
    assert_eq!(found.few.len(), 5, "each of the five and nobody else: {found:?}");
    let late = *found.few.iter().max().unwrap();
    assert!(late < 3 * found.interval + Duration::from_secs(2), "{found:?}");
    assert_eq!(found.replaced_in_split, 0, "{found:?}");
    assert_eq!(found.changed_by_split, 0, "{found:?}");
    assert!(found.back_after < Duration::from_secs(20), "{found:?}");
}
