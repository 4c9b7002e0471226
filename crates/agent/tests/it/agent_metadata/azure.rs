//! Azure: scheduled events, and a first answer that takes its time.

use std::time::Duration;

use tokio::time::Instant;

use super::{HOUR, MINUTE, SECOND, deadline_of, next_notice, quiet, settled, start, until_fact};
use crate::common::{
    World,
    imds::{self, Answer, Imds},
};

const EVENTS: &str = "/metadata/scheduledevents?api-version=2020-07-01";
const NONE: &str = r#"{"DocumentIncarnation":1,"Events":[]}"#;

fn event(kind: &str, machine: &str, not_before: &str) -> String {
    format!(
        r#"{{"DocumentIncarnation":2,"Events":[{{"EventId":"E","EventStatus":"Scheduled","EventType":"{kind}",
        "ResourceType":"VirtualMachine","Resources":["{machine}"],"NotBefore":"{not_before}"}}]}}"#
    )
}

#[tokio::test(start_paused = true)]
async fn events_of_this_machine_are_told_with_their_time() {
    for (kind, action) in
        [("Preempt", "preempt"), ("Terminate", "terminate"), ("Reboot", "maintenance"), ("Freeze", "maintenance")]
    {
        let imds = Imds::azure("Spot");
        let mut world = settled("azure", &imds, imds::V4).await;
        imds.set(EVENTS, event(kind, "vm-2", "Sat, 31 Jan 2026 12:02:00 GMT").as_str());
        assert_eq!(quiet(&mut world, MINUTE).await, None, "a neighbour's");
        assert!(imds.take_asked().iter().all(|asked| asked.headers["metadata"] == "true"));
        imds.set(EVENTS, event(kind, "vm-1", "Sat, 31 Jan 2026 12:02:00 GMT").as_str());
        let (_, notice) = next_notice(&mut world).await;
        assert_eq!((notice.action.as_str(), deadline_of(&notice)), (action, Some(1_769_860_920)));
        // Begun, and over: neither takes anything back.
        imds.set(EVENTS, event(kind, "vm-1", "").as_str());
        assert_eq!(quiet(&mut world, 2 * MINUTE).await.as_deref(), Some(action));
        imds.set(EVENTS, NONE);
        assert_eq!(quiet(&mut world, 2 * MINUTE).await.as_deref(), Some(action));
    }
}

#[tokio::test(start_paused = true)]
async fn machine_with_large_user_data_is_recognised() {
    let imds = Imds::azure("Spot");
    let user_data = "I2Nsb3Vk".repeat(20 * 1024 / 8);
    let compute = format!(r#"{{"name":"vm-1","location":"westeurope","priority":"Spot","userData":"{user_data}"}}"#);
    imds.set(imds::AZURE_COMPUTE, compute.as_str());
    imds.set(&imds::azure_leaf("userData"), user_data.as_str());
    let mut world = settled("azure", &imds, imds::V4).await;
    assert!(imds.take_asked().iter().all(|asked| asked.headers["metadata"] == "true"));
    imds.set(EVENTS, event("Preempt", "vm-1", "").as_str());
    assert_eq!(next_notice(&mut world).await.1.action, "preempt");
}

#[tokio::test(start_paused = true)]
async fn machine_without_zone_or_priority_has_its_region_and_is_not_spot() {
    for empty in [false, true] {
        let imds = Imds::azure("Spot");
        for leaf in ["zone", "priority"] {
            imds.unset(&imds::azure_leaf(leaf));
            if empty {
                imds.set(&imds::azure_leaf(leaf), "");
            }
        }
        let mut world = World::new();
        imds.listen(&world, imds::V4);
        start(&world, &[("PROVIDER", "azure")]);
        let (_, report) = until_fact(&mut world, "spot_monitor", "ok").await;
        assert_eq!((&*report.provider_facts["zone"], &*report.provider_facts["spot"]), ("westeurope", "false"));
    }
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_not_azures_are_ignored() {
    for (leaf, portal) in [("name", "<html>welcome</html>"), ("name", ""), ("location", "You are welcome")] {
        let imds = Imds::azure("Spot");
        imds.set(&imds::azure_leaf(leaf), portal);
        let mut world = World::new();
        imds.listen(&world, imds::V4);
        start(&world, &[("PROVIDER", "azure")]);
        quiet(&mut world, HOUR).await;
        until_fact(&mut world, "spot_monitor", "unknown").await;
    }
}

#[tokio::test(start_paused = true)]
async fn first_answer_may_take_two_minutes_and_later_ones_may_not() {
    let imds = Imds::azure("Spot");
    imds.set(EVENTS, Answer::Late(Duration::from_secs(125), NONE.into()));
    let mut world = World::new();
    imds.listen(&world, imds::V4);
    let began = Instant::now();
    start(&world, &[("PROVIDER", "azure")]);
    let (_, report) = until_fact(&mut world, "provider", "azure").await;
    assert_eq!(report.provider_facts["spot_monitor"], "unknown", "as long as nothing was said");
    loop {
        let (at, report) = world.next_report().await;
        let state = report.provider_facts["spot_monitor"].as_str();
        assert_ne!(state, "failing");
        if state == "ok" {
            assert!(125 * SECOND <= at - began && at - began < 127 * SECOND, "{:?}", at - began);
            break;
        }
    }
    until_fact(&mut world, "spot_monitor", "failing").await;
    imds.set(EVENTS, event("Preempt", "vm-1", "").as_str());
    let (_, notice) = next_notice(&mut world).await;
    assert_eq!((notice.action.as_str(), notice.deadline), ("preempt", None));
}

#[tokio::test(start_paused = true)]
async fn first_answer_that_takes_longer_is_given_up_and_asked_for_again() {
    let imds = Imds::azure("Spot");
    imds.set(EVENTS, Answer::Late(Duration::from_secs(140), NONE.into()));
    let mut world = World::new();
    imds.listen(&world, imds::V4);
    let began = Instant::now();
    start(&world, &[("PROVIDER", "azure")]);
    let (at, _) = until_fact(&mut world, "spot_monitor", "failing").await;
    assert!(130 * SECOND <= at - began && at - began < 132 * SECOND, "{:?}", at - began);
    imds.set(EVENTS, event("Terminate", "vm-1", "").as_str());
    assert_eq!(next_notice(&mut world).await.1.action, "terminate");
}

#[tokio::test(start_paused = true)]
async fn machine_that_is_not_spot_is_looked_at_once_a_minute() {
    let imds = Imds::azure("Regular");
    let mut world = settled("azure", &imds, imds::V4).await;
    imds.take_asked();
    quiet(&mut world, 10 * MINUTE).await;
    let n_asked = imds.take_asked().len();
    assert!((9..=11).contains(&n_asked), "{n_asked}");
}

#[tokio::test(start_paused = true)]
async fn odd_event_does_not_hide_a_good_one() {
    let imds = Imds::azure("Spot");
    let mut world = settled("azure", &imds, imds::V4).await;
    let one = |kind: &str, at: &str| format!(r#"{{"EventType":"{kind}","Resources":["vm-1"],"NotBefore":"{at}"}}"#);
    imds.set(EVENTS, format!(r#"{{"Events":[{},{}]}}"#, one("Freeze", "soon"), one("Preempt", "")).as_str());
    assert_eq!(next_notice(&mut world).await.1.action, "preempt");
    until_fact(&mut world, "spot_monitor", "failing").await;
}

#[tokio::test(start_paused = true)]
async fn nonsense_is_no_event() {
    for bad in [
        Answer::from("[]"),
        Answer::from(r#"{"Events":[{"Resources":["vm-1"]}]}"#),
        Answer::from(event("Preempt", "vm-1", "soon").as_str()),
        Answer::Status(410),
        Answer::Hang,
    ] {
        let imds = Imds::azure("Spot");
        let mut world = settled("azure", &imds, imds::V4).await;
        imds.set(EVENTS, bad.clone());
        until_fact(&mut world, "spot_monitor", "failing").await;
        assert_eq!(quiet(&mut world, 20 * SECOND).await, None, "{bad:?}");
        imds.set(EVENTS, event("Preempt", "vm-1", "").as_str());
        assert_eq!(next_notice(&mut world).await.1.action, "preempt", "{bad:?}");
    }
}
