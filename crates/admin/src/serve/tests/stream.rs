//! The stream of changes: what a reader is told of what the shards tell us. Here the shards' words are given; that they
//! come as given is shown with real shards, in the tests of the whole.

use nstance_client::{
    ShardError,
    live::{ShardState, SnapshotStart, Update},
};
use nstance_proto::v1::{ConfigStatusResponse, Event, GroupStatus, InstanceStatusResponse};
use tonic::Code;

use super::{
    super::{handle::stream::PULSE, schema::named, stall::STALL},
    *,
};

const ID: &str = "tst06bgm7733st2576nx5jht4ecjw";

fn group(key: &str, size: i32) -> GroupStatus {
    GroupStatus { key: key.into(), size, ..GroupStatus::default() }
}

fn resized(size: i32) -> Update {
    Update::Group(Box::new(group("web", size)), None)
}

fn instance(status: &str) -> InstanceStatusResponse {
    InstanceStatusResponse { instance_id: ID.into(), status: status.into(), ..InstanceStatusResponse::default() }
}

fn whole(size: i32) -> Update {
    let state = Box::new(ShardState {
        status: Arc::new(ConfigStatusResponse { epoch: 7, leader_id: "one".into(), ..ConfigStatusResponse::default() }),
        groups: [("web".to_owned(), Arc::new(group("web", size)))].into(),
        instances: [(ID.to_owned(), Arc::new(instance("running")))].into(),
    });
    Update::Snapshot(state, SnapshotStart::default())
}

/// One who reads, message by message.
struct Reading {
    body: Body,
    rest: String,
    schemas: Map<String, Value>,
}

impl Reading {
    async fn open(fixture: &Fixture, query: &str, id: Option<&str>) -> Self {
        let asked = Request::get(format!("/api/v1/stream{query}"))
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, bearer(VIEWER));
        let asked = id.into_iter().fold(asked, |asked, id| asked.header("last-event-id", id));
        let peer = Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
        let response = door::answer(fixture.app.clone(), peer, asked.body(Body::empty()).unwrap()).await;
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Self { body: response.into_body(), rest: String::new(), schemas: fixture.app.schemas.clone() }
    }

    /// The next message, and its id; nothing at the end.
    async fn next(&mut self) -> Option<(Option<String>, Value)> {
        while !self.rest.contains("\n\n") {
            let frame = self.body.frame().await?.unwrap();
            self.rest.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
        let (message, rest) = self.rest.split_once("\n\n").unwrap();
        let field = |name: &str| message.lines().find_map(|it| it.strip_prefix(name)).map(str::to_owned);
        let value: Value = serde_json::from_str(&field("data: ").unwrap()).unwrap();
        assert_eq!(value["type"], json!(field("event: ").unwrap()));
        assert_eq!(misfits(&named("StreamMessage"), &self.schemas, &value), [], "{value}");
        let id = field("id: ");
        self.rest = rest.to_owned();
        Some((id, value))
    }

    /// The next message in short, and its id.
    async fn short(&mut self) -> (String, Option<String>) {
        let (id, it) = self.next().await.unwrap_or((None, json!({"type": "end"})));
        let said = match it["type"].as_str().unwrap() {
            "begin" => format!("begin resumed={}", it["resumed"]),
            "snapshot" => {
                let count = |name: &str| it[name].as_array().map_or("unknown".to_owned(), |it| it.len().to_string());
                let (groups, instances) = (count("groups"), count("instances"));
                format!("snapshot {} reachable={} {groups} {instances}", it["shard"], it["reachable"])
            }
            "group" => format!("group {} {}", it["shard"], it["group"]["size"]),
            "instance" => format!("instance {} {}", it["shard"], it["instance"]["status"]),
            "event" => format!("event {} {}", it["shard"], it["event"]["reason"]),
            "lost" => format!("lost {} {}", it["shard"], it["problem"]),
            other => other.to_owned(),
        };
        (said.replace('"', ""), id)
    }

    async fn says(&mut self, expected: &[&str]) -> Option<String> {
        let mut last = None;
        for expected in expected {
            let (said, id) = self.short().await;
            assert_eq!(said, *expected);
            last = id;
        }
        last
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_begins_with_everything_and_goes_on_with_what_changes() {
    let fixture = Fixture::quiet();
    let live = &fixture.app.live;
    live.apply(0, whole(2));
    let mut reading = Reading::open(&fixture, "", None).await;
    let opening = [
        "begin resumed=false",
        "snapshot dev-1 reachable=true 1 1",
        // Nobody has proved that there is nothing.
        "snapshot dev-2 reachable=false unknown unknown",
        "ready",
    ];
    reading.says(&opening).await;
    live.apply(0, resized(3));
    live.apply(0, Update::Instance(Box::new(instance("deleted")), None));
    live.apply(
        0,
        Update::Event(Box::new(Event { resume_token: "7-1".into(), reason: "New".into(), ..Event::default() })),
    );
    reading.says(&["group dev-1 3", "instance dev-1 deleted", "event dev-1 New"]).await;
    live.apply(0, Update::Disconnected(ShardError::new("dev-1", Code::Unavailable, "gone")));
    reading.says(&["lost dev-1 gone"]).await;
    // Who comes now is told what was known, and that it is old.
    let mut late = Reading::open(&fixture, "?shard=dev-1&follow=false", None).await;
    late.says(&["begin resumed=false", "snapshot dev-1 reachable=false 1 0", "ready", "end"]).await;
    live.apply(0, whole(4));
    live.apply(1, whole(1));
    reading.says(&["snapshot dev-1 reachable=true 1 1", "snapshot dev-2 reachable=true 1 1"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_lines_says_the_same() {
    let fixture = Fixture::quiet();
    fixture.app.live.apply(0, whole(2));
    let asked = Request::get("/api/v1/stream?follow=false")
        .header(header::HOST, "localhost")
        .header(header::AUTHORIZATION, bearer(VIEWER))
        .header(header::ACCEPT, "application/x-ndjson");
    let answered = fixture.ask(asked.body(Body::empty()).unwrap()).await;
    assert_eq!(answered.headers[header::CONTENT_TYPE], "application/x-ndjson");
    let text = String::from_utf8(answered.text).unwrap();
    let lines: Vec<Value> = text.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
    let kinds: Vec<&str> = lines.iter().map(|it| it["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["begin", "snapshot", "snapshot", "ready"]);
    assert!(lines[3]["id"].as_str().unwrap().starts_with(&fixture.app.life), "{}", lines[3]);
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_is_told_what_was_missed_or_everything_anew() {
    let fixture = Fixture::quiet();
    let live = &fixture.app.live;
    live.apply(0, whole(2));
    let mut reading = Reading::open(&fixture, "?shard=dev-1", None).await;
    let all = ["begin resumed=false", "snapshot dev-1 reachable=true 1 1", "ready"];
    // Nobody goes on from the midst of a snapshot.
    assert_eq!(reading.short().await.1.as_deref(), Some(""));
    assert_eq!(reading.short().await.1, None);
    let ready = reading.short().await.1.unwrap();
    live.apply(0, resized(3));
    let third = reading.says(&["group dev-1 3"]).await.unwrap();
    drop(reading);
    live.apply(1, whole(9));
    live.apply(0, resized(4));
    for (id, missed) in [(&ready, &["group dev-1 3", "group dev-1 4"][..]), (&third, &["group dev-1 4"])] {
        let mut reading = Reading::open(&fixture, "?shard=dev-1", Some(id)).await;
        reading.says(&["begin resumed=true"]).await;
        reading.says(missed).await;
    }
    // Other shards were not told to this reader, and another process numbers anew.
    for (query, id) in [("", third.clone()), ("?shard=dev-1", third.replacen(&fixture.app.life, "0123", 1))] {
        assert_eq!(Reading::open(&fixture, query, Some(&id)).await.short().await.0, "begin resumed=false");
    }
    for size in 0..5000 {
        live.apply(0, resized(size));
    }
    Reading::open(&fixture, "?shard=dev-1", Some(&third)).await.says(&all).await;
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_is_too_far_behind_is_cut_off() {
    let fixture = Fixture::quiet();
    let mut reading = Reading::open(&fixture, "?shard=dev-1", None).await;
    reading.says(&["begin resumed=false", "snapshot dev-1 reachable=false unknown unknown", "ready"]).await;
    for size in 0..5000 {
        fixture.app.live.apply(0, resized(size));
    }
    reading.says(&["cut", "end"]).await;
}

#[tokio::test(start_paused = true)]
async fn a_quiet_stream_says_how_old_everything_is() {
    let fixture = Fixture::quiet();
    fixture.app.live.apply(0, whole(2));
    let mut reading = Reading::open(&fixture, "", None).await;
    for _ in 0..4 {
        reading.next().await;
    }
    let began = tokio::time::Instant::now();
    for n in 1..4 {
        fixture.app.live.apply(0, Update::Alive);
        let (id, pulse) = reading.next().await.unwrap();
        assert_eq!((id, &pulse["type"], began.elapsed()), (None, &json!("pulse"), n * PULSE));
        let ages = pulse["as_of"].as_object().unwrap();
        assert_eq!(ages.keys().collect::<Vec<_>>(), ["dev-1"], "of the other nothing is known");
    }
}

/// Nothing asks the reader's end of the stream while the socket is full, so the socket itself gives up.
#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_is_given_up() {
    let fixture = Fixture::quiet();
    fixture.app.live.apply(0, whole(2));
    let (ours, mut theirs) = tokio::io::duplex(256);
    let peer = Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
    let head = format!("GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {FULL}\r\n\r\n");
    theirs.write_all(head.as_bytes()).await.unwrap();
    let began = tokio::time::Instant::now();
    let served = listen::requests(fixture.app.clone(), ours, peer, fixture.app.stop.clone());
    tokio::time::timeout(2 * STALL, served).await.expect("it is given up").unwrap_err();
    assert_eq!(began.elapsed(), STALL);
}
