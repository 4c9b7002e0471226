//! Events over HTTP: what one reader is told of what all shards tell.

use nstance_client::live::Update;
use nstance_proto::v1::Event;

use super::*;

/// Reads events of one group, and tells each in short.
struct Reading {
    body: Body,
    rest: String,
}

impl Reading {
    async fn open(fixture: &Fixture, query: &str) -> Self {
        let asked = Request::get(format!("/api/v1/events?follow=true&{query}"))
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/x-ndjson")
            .header(header::AUTHORIZATION, bearer(VIEWER));
        let peer = Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
        let response = door::answer(fixture.app.clone(), peer, asked.body(Body::empty()).unwrap()).await;
        assert_eq!(response.status().as_u16(), 200);
        Self { body: response.into_body(), rest: String::new() }
    }

    async fn next(&mut self) -> String {
        loop {
            while let Some((line, rest)) = self.rest.split_once('\n') {
                let (line, rest) = (line.to_owned(), rest.to_owned());
                self.rest = rest;
                // Empty lines keep the connection alive.
                if !line.is_empty() {
                    let it: Value = serde_json::from_str(&line).unwrap();
                    return format!("{} {}", it["reason"].as_str().unwrap(), it["dropped"]);
                }
            }
            let frame = self.body.frame().await.expect("it has no end").unwrap();
            self.rest.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_missing_is_told_also_before_an_event_that_is_not_wanted() {
    let fixture = Fixture::quiet();
    let tell = |at: usize, token: &str, group: &str, dropped: u32| {
        let (resume_token, group, reason) = (token.to_owned(), group.to_owned(), format!("Of{token}"));
        fixture
            .app
            .live
            .apply(at, Update::Event(Box::new(Event { resume_token, group, reason, dropped, ..Event::default() })));
    };
    let mut reading = Reading::open(&fixture, "group=web&shard=dev-1").await;
    tell(0, "7-1", "web", 0);
    // The two between were lost, the next one is another group's, and so are those of another shard.
    tell(0, "7-4", "db", 0);
    tell(1, "3-1", "web", 0);
    tell(1, "3-9", "db", 0);
    tell(0, "7-5", "web", 0);
    // The shard itself says that it dropped some.
    tell(0, "7-6", "db", 5);
    tell(0, "7-7", "web", 6);
    let mut told = Vec::new();
    while told.last().is_none_or(|it| it != "Of7-7 6") {
        told.push(reading.next().await);
    }
    assert_eq!(told, ["Of7-1 0", "EventsDropped 2", "Of7-5 0", "EventsDropped 5", "Of7-7 6"]);
}
