//! What is followed over HTTP while leaders come and go: nothing is lost, nothing is told twice, and nobody has to ask.

use std::collections::BTreeMap;

use crate::e2e_common::{DEV, Env, exit};
use crate::http_common::{Reading, Served, is, it_stops_when_told};
use crate::openapi_common::Document;
use crate::terminal_common::Terminal;
use reqwest::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::process::Command;

/// The picture of a reader that does as the document says.
#[derive(Default)]
struct Picture {
    sizes: BTreeMap<String, i64>,
    instances: BTreeMap<String, String>,
    epoch: u64,
}

impl Picture {
    fn take(&mut self, message: &Value) {
        let instance =
            |it: &Value| (it["instance_id"].as_str().unwrap().to_owned(), it["status"].as_str().unwrap().to_owned());
        let size = |it: &Value| (it["group"].as_str().unwrap().to_owned(), it["ready_size"].as_i64().unwrap());
        match message["type"].as_str().unwrap_or_default() {
            "snapshot" => {
                self.epoch = message["status"]["epoch"].as_u64().unwrap_or(0);
                self.sizes = message["groups"].as_array().unwrap().iter().map(size).collect();
                self.instances = message["instances"].as_array().unwrap().iter().map(instance).collect();
            }
            "group" => self.sizes.extend([size(&message["group"])]),
            "instance" => {
                let (id, status) = instance(&message["instance"]);
                if status == "deleted" {
                    self.instances.remove(&id);
                } else {
                    self.instances.insert(id, status);
                }
            }
            _ => {}
        }
    }
}

fn ready(n: i64) -> impl Fn(&Value) -> bool {
    move |it| it["group"]["group"] == "test" && it["group"]["ready_size"] == n && it["group"]["actual_size"] == n
}

async fn scale(served: &Served, size: u32) {
    let (status, said) = served.send(Method::POST, "/group/scale", json!({"group": "test", "size": size})).await;
    assert_eq!(status, 200, "{said}");
}

/// Where each event stands: the epoch of its leader, and its number.
fn positions(events: &[Value]) -> Vec<(u64, u64)> {
    let position = |it: &Value| {
        let (epoch, number) = it["resume_token"].as_str()?.split_once('-')?;
        Some((epoch.parse().ok()?, number.parse().ok()?))
    };
    events.iter().map(|it| position(it).unwrap_or_else(|| panic!("events are missing: {it:#}"))).collect()
}

#[tokio::test]
async fn what_is_followed_over_http_goes_on_across_a_change_of_leaders() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let env = Env::new();
    env.up(&["--servers-per-shard", "2", "--size", "test=1"]).await;
    env.healthy().await;
    let served = Served::start(&env, &[]).await;
    let document = Document(served.get("/openapi.json").await.1);
    served.until("/api/v1/shards", |it| it["shards"][0]["reachable"] == true).await;

    // A picture from the stream alone.
    let mut stream = Reading::open(&served, "/api/v1/stream", None).await;
    let mut told = stream.until("all there is", is("ready")).await;
    if told[1]["reachable"] == false {
        told.extend(stream.until("it is reached", |it| it["reachable"] == true).await);
    }
    scale(&served, 2).await;
    told.extend(stream.until("two are ready", ready(2)).await);
    let mut picture = Picture::default();
    told.iter().filter(|it| it["groups"].is_array() || it["type"] != "snapshot").for_each(|it| picture.take(it));
    assert_eq!((&picture.sizes, picture.instances.len()), (&BTreeMap::from([("test".to_owned(), 2)]), 2));
    let (first, ids) = (picture.epoch, picture.instances.keys().cloned().collect::<Vec<_>>());

    // One who reads events goes away before the leader does.
    let mut events = Reading::open(&served, "/api/v1/events?follow=true", None).await;
    let before = events.until("the second came", |it| it["reason"] == "InstanceRegistered").await;
    let (place, last) = (events.id.clone(), stream.id.clone());
    drop(events);
    env.ok(&["kill", "shard/dev-1", "--no-restart"]).await;

    // Nobody but the stream asks, and it comes back by itself: lost first, then everything.
    let mut after = stream.until("the shard is lost", is("lost")).await;
    assert!(after.last().unwrap()["as_of"].is_string(), "{:#}", after.last().unwrap());
    after.extend(stream.until("it is back", is("snapshot")).await);
    after.iter().for_each(|it| picture.take(it));
    assert!(first < picture.epoch, "{first} and {}", picture.epoch);
    assert_eq!(picture.instances.keys().cloned().collect::<Vec<_>>(), ids, "nothing was replaced");
    if picture.sizes["test"] < 2 {
        after.extend(stream.until("both are with the new leader", ready(2)).await);
    }
    scale(&served, 1).await;
    after.extend(stream.until("one is deleted", |it| it["instance"]["status"] == "deleted").await);
    for message in told.iter().chain(&after) {
        document.fits(&json!({"$ref": "#/components/schemas/StreamMessage"}), message).unwrap();
    }

    // Who was away since before the change is told the same changes.
    let mut again = Reading::open(&served, "/api/v1/stream", Some(&last)).await;
    assert_eq!(again.next().await["resumed"], true);
    let ids =
        |all: &[Value]| -> Vec<String> { all.iter().filter_map(|it| Some(it["id"].as_str()?.to_owned())).collect() };
    let replayed = again.until("one is deleted", |it| it["instance"]["status"] == "deleted").await;
    assert_eq!(ids(&replayed), ids(&after));

    // And who reads events, all of both leaders, once.
    let mut events = Reading::open(&served, "/api/v1/events?follow=true", Some(&place)).await;
    let wanted = |it: &Value| it["reason"] == "InstanceDeleted" && it["epoch"].as_u64() == Some(picture.epoch);
    let rest = events.until("the new leader deleted one", wanted).await;
    let mut heard = positions(&before);
    heard.extend(positions(&rest));
    heard.sort_unstable();
    let (_, all) = served.get("/api/v1/events").await;
    let mut all = positions(all["events"].as_array().unwrap());
    all.retain(|it| it <= heard.last().unwrap());
    assert_eq!(heard, all, "nothing twice, and nothing left out");
    let of_new: Vec<u64> = heard.iter().filter(|it| it.0 == picture.epoch).map(|it| it.1).collect();
    let counted: Vec<u64> = (1..).take(of_new.len()).collect();
    assert_eq!(of_new, counted, "from its first word on");
    it_stops_when_told(served).await;
    the_screen_of_top_follows_and_is_given_back(&env).await;
    whoever_waits_on_a_terminal_may_stop_watching(&env).await;
}

/// The cursor, and the screen that was there before.
const LEAVE: &str = "\u{1b}[?25h\u{1b}[?1049l";

async fn the_screen_of_top_follows_and_is_given_back(env: &Env) {
    let instance = env.healthy().await["instances"][0]["id"].as_str().unwrap().to_owned();
    let start = |terminal: &Terminal| {
        let mut command = Command::new(DEV);
        command.arg("admin").arg("--dir").arg(env.dir()).args(["--", "top"]).env("TERM", "xterm").kill_on_drop(true);
        terminal.run(command)
    };
    let terminal = Terminal::new(120, 40);
    let mut child = start(&terminal);
    terminal.until("all is shown", |it| {
        it.contains(&instance) && it.contains("1/1 ready") && it.contains("InstanceDeleted")
    });
    assert_eq!((terminal.is_quiet(), terminal.shown().contains("server-2")), (true, true), "{}", terminal.shown());
    let scaled = env.ok(&["admin", "group", "scale", "test", "2"]).await;
    terminal.until(&scaled, |it| it.contains("2/2 ready"));
    terminal.type_in("xq");
    assert_eq!(exit(&mut child).await.code(), Some(0));
    terminal.until_all("it is given back", |it| it.ends_with(LEAVE));
    assert!(!terminal.is_quiet());

    let terminal = Terminal::new(30, 8);
    let mut child = start(&terminal);
    terminal.until("something is shown", |it| it.contains("SHARD"));
    assert!(terminal.shown().lines().all(|it| it.chars().count() < 30), "{}", terminal.shown());
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(exit(&mut child).await.code(), Some(130));
    terminal.until_all("it is given back", |it| it.ends_with(LEAVE));
    assert!(!terminal.is_quiet());
}

/// Lines are drawn over, and an interrupt ends the watching, not the work.
async fn whoever_waits_on_a_terminal_may_stop_watching(env: &Env) {
    const DRAWN_OVER: &str = "\u{1b}[1A\u{1b}[J";
    let start = |terminal: &Terminal, words: &str| {
        let mut command = Command::new(DEV);
        command.arg("admin").arg("--dir").arg(env.dir()).arg("--").args(words.split(' '));
        command.env("TERM", "xterm").kill_on_drop(true);
        terminal.run(command)
    };
    let terminal = Terminal::new(100, 30);
    let mut child = start(&terminal, "group create slow --template tst --size 1 --drain-timeout 10m --wait");
    assert_eq!(exit(&mut child).await.code(), Some(0));
    terminal.until_all("one line that is drawn over", |all| all.contains(DRAWN_OVER) && all.contains("1/1 ready"));

    // Nobody acknowledges the drain of its instance, for ten minutes.
    let terminal = Terminal::new(100, 30);
    let mut child = start(&terminal, "group delete slow --yes --wait");
    terminal.until_all("it waits", |all| all.contains(DRAWN_OVER));
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::INT).unwrap();
    assert_eq!(exit(&mut child).await.code(), Some(130));
    terminal
        .until_all("it is said what goes on", |all| all.contains("no longer watching; the work goes on in the server"));
    let groups: Value = serde_json::from_str(&env.ok(&["admin", "group", "list", "-o", "json"]).await).unwrap();
    let slow = groups["groups"].as_array().unwrap().iter().find(|it| it["group"] == "slow").unwrap();
    assert_eq!(slow["deleting"], true, "{slow:#}");
}
