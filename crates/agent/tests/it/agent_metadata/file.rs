//! Notices made by hand, on this machine's file system and clock.

use std::fs;

use super::{deadline_of, next_notice, start, until_fact};
use crate::common::World;

fn world_with_file(provider: &str, name: &str) -> (World, std::path::PathBuf) {
    let world = World::new();
    let path = world.path(name);
    start(&world, &[("PROVIDER", provider), ("NOTICE_FILE", path.to_str().expect("a plain path"))]);
    (world, path)
}

#[tokio::test]
async fn file_that_appears_is_a_notice_with_every_provider() {
    for provider in ["dev", "none", "proxmox"] {
        let (mut world, path) = world_with_file(provider, "notice.json");
        let state = if provider == "dev" { "ok" } else { "off" };
        until_fact(&mut world, "spot_monitor", state).await;
        fs::write(&path, r#"{"action":"rebalance"}"#).unwrap();
        assert_eq!(next_notice(&mut world).await.1.action, "rebalance");
        // Moved into place, as careful writers do it.
        let aside = world.path("aside");
        fs::write(&aside, r#"{"action":"terminate","deadline":"2026-01-31T12:02:00Z"}"#).unwrap();
        fs::rename(&aside, &path).unwrap();
        let (_, notice) = next_notice(&mut world).await;
        assert_eq!((notice.action.as_str(), deadline_of(&notice)), ("terminate", Some(1_769_860_920)));
    }
}

#[tokio::test]
async fn file_that_was_there_before_the_agent_counts() {
    let world = World::new();
    let path = world.path("notice.json");
    fs::write(&path, r#"{"action":"stop","spot":true}"#).unwrap();
    start(&world, &[("PROVIDER", "dev"), ("NOTICE_FILE", path.to_str().unwrap())]);
    let mut world = world;
    let (_, report) = world.next_report().await;
    assert_eq!(report.termination_notice.unwrap().action, "stop");
    assert_eq!((report.provider_facts["provider"].as_str(), report.provider_facts["spot"].as_str()), ("dev", "true"));
}

#[tokio::test]
async fn file_that_makes_no_sense_is_shown_and_mended() {
    let (mut world, path) = world_with_file("dev", "notice.json");
    until_fact(&mut world, "spot_monitor", "ok").await;
    fs::write(&path, "terminate").unwrap();
    let (_, report) = until_fact(&mut world, "spot_monitor", "failing").await;
    assert!(report.termination_notice.is_none());
    fs::write(&path, r#"{"spot":true}"#).unwrap();
    let (_, report) = until_fact(&mut world, "spot", "true").await;
    assert!(report.termination_notice.is_none());
    fs::write(&path, r#"{"action":"hibernate"}"#).unwrap();
    assert_eq!(next_notice(&mut world).await.1.action, "hibernate");
}

#[tokio::test]
async fn directory_that_comes_later_or_comes_again_is_found() {
    let (mut world, path) = world_with_file("dev", "run/notice.json");
    until_fact(&mut world, "spot_monitor", "ok").await;
    fs::create_dir(world.path("run")).unwrap();
    fs::write(&path, r#"{"action":"maintenance"}"#).unwrap();
    assert_eq!(next_notice(&mut world).await.1.action, "maintenance");
    fs::remove_dir_all(world.path("run")).unwrap();
    fs::create_dir(world.path("run")).unwrap();
    fs::write(&path, r#"{"action":"preempt"}"#).unwrap();
    assert_eq!(next_notice(&mut world).await.1.action, "preempt");
}
