//! Keys over a real connection: asked for, made, submitted until they are taken.

use std::{fs, os::unix::fs::MetadataExt as _, time::Duration};

use crate::common::{
    World,
    files::{Submit, files, say},
};
use nstance_identity::keys::KeyPair;
use nstance_proto::v1::KeyGenerationRequest;
use tonic::Code;

fn request(names: &[&str]) -> KeyGenerationRequest {
    KeyGenerationRequest { key_names: names.iter().map(|name| (*name).to_owned()).collect(), ..Default::default() }
}

fn names(keys: &[(String, String)]) -> Vec<&str> {
    keys.iter().map(|(name, _)| name.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn keys_are_made_submitted_and_reported() {
    let mut world = World::new();
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["web.pub", "db", "web"])]).await;
    let (_, keys) = world.next_submission().await;
    assert_eq!(names(&keys), ["db", "web"]);
    for (name, public) in &keys {
        let private = fs::read(world.path(&format!("keys/{name}.key"))).unwrap();
        assert_eq!(&KeyPair::from_pkcs8_pem(&private).unwrap().public_key_pem(), public);
        assert_eq!(&fs::read_to_string(world.path(&format!("keys/{name}.pub"))).unwrap(), public);
        assert_eq!(fs::metadata(world.path(&format!("keys/{name}.key"))).unwrap().mode() & 0o7777, 0o600);
    }
    world.next_change().await;
    // Asked again, as after a fail-over: the same keys.
    say(&voice, [request(&["web", "db"])]).await;
    assert_eq!(world.next_submission().await.1, keys);
}

#[tokio::test(start_paused = true)]
async fn submission_is_repeated_until_it_is_taken() {
    let mut world = World::new();
    world.script_submit((0..5).map(|_| Submit::Refuse(Code::Unavailable, "STORE_UNAVAILABLE")));
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["web"])]).await;
    let (first, keys) = world.next_submission().await;
    let mut last = first;
    for _ in 0..5 {
        let (at, again) = world.next_submission().await;
        assert_eq!(again, keys);
        last = at;
    }
    // The bounds of five waits together; full jitter stays below them.
    assert!(Duration::from_millis(100) < last - first && last - first < Duration::from_millis(6200));
    world.no_submission_for(Duration::from_secs(600)).await;
}

#[tokio::test(start_paused = true)]
async fn newer_request_joins_the_one_under_way() {
    let mut world = World::new();
    world.script_submit([Submit::Hang]);
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["web"])]).await;
    let (first, keys) = world.next_submission().await;
    assert_eq!(names(&keys), ["web"]);
    say(&voice, [request(&["db"])]).await;
    let (second, keys) = world.next_submission().await;
    assert_eq!(names(&keys), ["db", "web"]);
    assert!(second - first < Duration::from_secs(1), "the stream is read during a call");
    world.no_submission_for(Duration::from_secs(600)).await;
}

#[tokio::test(start_paused = true)]
async fn same_request_during_a_call_changes_nothing() {
    let mut world = World::new();
    world.script_submit([Submit::Hang]);
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["web", "db"])]).await;
    let (first, _) = world.next_submission().await;
    say(&voice, [request(&["db.key"]), request(&["web", "db"])]).await;
    world.no_submission_for(Duration::from_secs(9)).await;
    let (second, keys) = world.next_submission().await;
    assert_eq!(names(&keys), ["db", "web"]);
    assert!(Duration::from_secs(10) <= second - first, "a call that hangs is given up after a while");
}

#[tokio::test(start_paused = true)]
async fn bad_names_are_reported_and_the_stream_lives_on() {
    let mut world = World::new();
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["../identity/identity", "/etc/x", "web"])]).await;
    assert_eq!(names(&world.next_submission().await.1), ["web"]);
    let (_, report) = world.next_change().await;
    let told = files(&report);
    assert_eq!(told.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["_._identity_identity", "_etc_x"]);
    say(&voice, [request(&["db"])]).await;
    assert_eq!(names(&world.next_submission().await.1), ["db"]);
    assert_eq!(fs::read_dir(world.path("keys")).unwrap().count(), 4);
}

#[tokio::test(start_paused = true)]
async fn more_keys_than_a_call_takes_go_in_several() {
    let mut world = World::new();
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    let all: Vec<String> = (0..40).map(|n| format!("k{n:02}")).collect();
    say(&voice, [KeyGenerationRequest { key_names: all.clone(), ..Default::default() }]).await;
    let (first, second) = (world.next_submission().await.1, world.next_submission().await.1);
    assert_eq!((first.len(), second.len()), (32, 8));
    assert_eq!(names(&[first, second].concat()), all);
}

#[tokio::test(start_paused = true)]
async fn restarted_agent_submits_the_keys_it_made() {
    let mut world = World::new();
    world.script_submit([Submit::Hang]);
    let (first, second) = (world.feed_keys(), world.feed_keys());
    world.start_enrolled(&[]).await;
    say(&first, [request(&["web"])]).await;
    let (_, keys) = world.next_submission().await;
    world.control.stop();
    world.until(|state| *state == nstance_agent::State::Leaving).await;
    drop(first);
    world.control = nstance_agent::Control::new();
    world.start_agent();
    say(&second, [request(&["web"])]).await;
    assert_eq!(world.next_submission().await.1, keys);
}

#[tokio::test(start_paused = true)]
async fn certificate_refused_on_submission_leads_to_a_rejoin() {
    let mut world = World::new();
    world.script_submit([Submit::Refuse(Code::Unauthenticated, "CERT_EXPIRED")]);
    let voice = world.feed_keys();
    world.start_enrolled(&[]).await;
    say(&voice, [request(&["web"])]).await;
    world.next_submission().await;
    let (_, registration) = world.next_registration().await;
    assert!(registration.rejoin.is_some());
}
