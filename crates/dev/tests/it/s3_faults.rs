//! Every fault the development object store can be told to show, seen from outside.

use std::time::Duration;

use crate::s3_common::{Store, element, elements, header};
use nstance_dev::s3::{FaultRule, Throttle};
use object_store::{ObjectStoreExt, path::Path};

fn on(operation: &str) -> FaultRule {
    FaultRule { operation: Some(operation.into()), ..FaultRule::default() }
}

#[tokio::test]
async fn rules_are_set_shown_and_cleared_over_http() {
    let store = Store::start().await;
    let at = format!("{}/-/faults", store.server.endpoint());
    let post = |body: &'static str| store.http.post(&at).body(body).send();
    let rules = r#"[{"access_key": "dev-server-1", "operation": "PutObject", "key": "shard/*", "latency_ms": 1},
                    {"id": "cut", "client": "dev-*", "drop-after-apply": true}]"#;
    let shown: serde_json::Value = serde_json::from_str(&post(rules).await.unwrap().text().await.unwrap()).unwrap();
    assert_eq!((&shown[0]["id"], &shown[1]["id"]), (&"1".into(), &"cut".into()));
    let again = store.http.get(&at).send().await.unwrap().text().await.unwrap();
    assert_eq!(serde_json::from_str::<serde_json::Value>(&again).unwrap(), shown);
    let bad = post(r#"[{"latency": 1}]"#).await.unwrap();
    assert_eq!(bad.status(), 400);
    assert!(bad.text().await.unwrap().contains("unknown field"));
    assert_eq!(store.http.delete(format!("{at}/cut")).send().await.unwrap().status(), 200);
    assert_eq!(store.http.delete(format!("{at}/cut")).send().await.unwrap().status(), 404);
    assert_eq!(store.server.faults().len(), 1);
    store.http.delete(&at).send().await.unwrap();
    assert!(store.server.faults().is_empty());
}

#[tokio::test]
async fn rules_hit_only_whom_they_name() {
    let store = Store::start().await;
    store.put("shard/dev-1/leader.json", "1").await;
    store.put("other", "1").await;
    store
        .fault(FaultRule {
            access_key: Some("dev-server-1".into()),
            key: Some("shard/*/leader.json".into()),
            status: Some(403),
            ..on("GetObject")
        })
        .await;
    let (leader, other) = (Path::from("shard/dev-1/leader.json"), Path::from("other"));
    let (named, unnamed) = (store.object_store("dev-server-1"), store.object_store("dev-server-2"));
    assert!(named.get(&leader).await.is_err());
    assert!(named.get(&other).await.is_ok());
    assert!(named.head(&leader).await.is_ok());
    assert!(unnamed.get(&leader).await.is_ok());
    let shown = store.server.faults();
    assert_eq!((shown[0].matched, shown[0].applied), (1, 1));
    assert_eq!(store.server.stats().faults, 1);
}

#[tokio::test]
async fn latency_delays_the_answer() {
    let store = Store::start().await;
    store.fault(FaultRule { latency_ms: 60, ..on("PutObject") }).await;
    let began = tokio::time::Instant::now();
    store.put("k", "1").await;
    assert!(Duration::from_millis(60) <= began.elapsed());
}

#[tokio::test]
async fn errors_are_answered_and_nothing_is_applied() {
    let store = Store::start().await;
    for (status, code) in [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"), (403, "AccessDenied")] {
        store.fault(FaultRule { status: Some(status), times: Some(1), ..on("PutObject") }).await;
        let answer = store.send("PUT", "k", &[], "1").await;
        assert_eq!(answer.status(), status);
        assert_eq!(element(&answer.text().await.unwrap(), "Code"), code);
        assert_eq!(store.status("GET", "k", &[]).await, 404);
    }
    let code = Some("ExpiredToken".to_owned());
    store.fault(FaultRule { status: Some(400), code, ..on("PutObject") }).await;
    let answer = store.send("PUT", "k", &[], "1").await;
    assert_eq!(element(&answer.text().await.unwrap(), "Code"), "ExpiredToken");
}

#[tokio::test]
async fn a_dropped_answer_leaves_the_write_applied_or_not_as_told() {
    let store = Store::start().await;
    store.fault(FaultRule { drop_before_apply: true, times: Some(1), ..on("PutObject") }).await;
    assert!(store.request(reqwest::Method::PUT, "k").body("1").send().await.is_err());
    assert_eq!(store.status("GET", "k", &[]).await, 404);
    store.fault(FaultRule { drop_after_apply: true, times: Some(1), ..on("PutObject") }).await;
    assert!(store.request(reqwest::Method::PUT, "k").body("1").send().await.is_err());
    assert_eq!(store.get("k").await, "1");
    assert_eq!(store.server.stats().statuses[&200], 1, "only the read was answered");
}

#[tokio::test]
async fn a_client_that_retries_an_ambiguous_creation_sees_its_own_object() {
    let store = Store::start().await;
    store.fault(FaultRule { drop_after_apply: true, times: Some(1), ..on("PutObject") }).await;
    let create = [("if-none-match", "*")];
    let lost = store.request(reqwest::Method::PUT, "k").header("if-none-match", "*").body("mine").send().await;
    assert!(lost.is_err());
    assert_eq!(store.send("PUT", "k", &create, "mine").await.status(), 412);
    assert_eq!(store.get("k").await, "mine");
}

#[tokio::test]
async fn what_comes_too_fast_is_throttled() {
    let store = Store::start().await;
    // So slow that nothing refills while the test runs.
    let throttle = |status| Some(Throttle { per_second: 0.001, burst: Some(2.0), status });
    store.fault(FaultRule { id: Some("t".into()), throttle: throttle(503), ..on("GetObject") }).await;
    store.put("k", "1").await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        statuses.push(store.status("GET", "k", &[]).await);
    }
    assert_eq!(statuses, [200, 200, 503, 503]);
    store.fault(FaultRule { id: Some("t".into()), throttle: throttle(429), ..on("GetObject") }).await;
    for expected in [200, 200, 429] {
        assert_eq!(store.status("GET", "k", &[]).await, expected);
    }
}

#[tokio::test]
async fn an_unsafe_store_ignores_conditions() {
    let store = Store::start().await;
    store.put("k", "1").await;
    store.fault(FaultRule { ignore_conditions: true, ..FaultRule::default() }).await;
    assert_eq!(store.status("PUT", "k", &[("if-none-match", "*")]).await, 200);
    assert_eq!(store.status("PUT", "none", &[("if-match", "\"0\"")]).await, 200);
    assert_eq!(store.status("DELETE", "k", &[("if-match", "\"0\"")]).await, 204);
}

#[tokio::test]
async fn a_stale_listing_shows_what_was_there_when_it_began() {
    let store = Store::start().await;
    store.put("a", "1").await;
    store.put("b", "1").await;
    store.fault(FaultRule { stale_list: true, ..on("ListObjects*") }).await;
    store.put("c", "1").await;
    store.status("DELETE", "a", &[]).await;
    let keys = || async { elements(&store.get("?list-type=2").await, "Key") };
    assert_eq!(keys().await, ["a", "b"]);
    assert_eq!(store.status("GET", "a", &[]).await, 404);
    store.server.clear_faults();
    assert_eq!(keys().await, ["b", "c"]);
}

#[tokio::test]
async fn a_black_hole_answers_nothing_until_it_is_healed() {
    let store = Store::start().await;
    store.put("k", "1").await;
    let rule = FaultRule { access_key: Some("dev-server-1".into()), black_hole: true, ..FaultRule::default() };
    store.fault(rule).await;
    let signed = "AWS4-HMAC-SHA256 Credential=dev-server-1/20260101/dev/s3/aws4_request, Signature=0";
    let request = store.request(reqwest::Method::PUT, "k").header("authorization", signed).body("2");
    let mut swallowed = std::pin::pin!(request.send());
    // Everyone else is served meanwhile, and what was swallowed changes nothing.
    while store.server.faults()[0].matched == 0 {
        tokio::select! {
            biased;
            answer = &mut swallowed => panic!("{answer:?}"),
            body = store.get("k") => assert_eq!(body, "1"),
        }
    }
    assert_eq!(store.get("k").await, "1");
    store.server.clear_faults();
    assert!(swallowed.await.is_err());
    assert_eq!(store.get("k").await, "1");
    assert_eq!(store.send("PUT", "k", &[("authorization", signed)], "3").await.status(), 200);
}

#[tokio::test]
async fn stopping_lets_go_of_what_a_black_hole_holds() {
    let store = Store::start().await;
    store.fault(FaultRule { black_hole: true, ..FaultRule::default() }).await;
    let mut held = std::pin::pin!(store.request(reqwest::Method::GET, "k").send());
    while store.server.faults()[0].matched == 0 {
        tokio::select! {
            biased;
            answer = &mut held => panic!("{answer:?}"),
            () = tokio::task::yield_now() => (),
        }
    }
    let began = tokio::time::Instant::now();
    let (answer, ()) = tokio::join!(held, store.server.stop());
    assert!(answer.is_err());
    assert!(began.elapsed() < Duration::from_millis(1900), "the grace period is 2 s");
}

#[tokio::test]
async fn every_answer_has_its_own_request_id() {
    let store = Store::start().await;
    let first = header(&store.send("GET", "k", &[], "").await, "x-amz-request-id");
    let second = header(&store.send("GET", "k", &[], "").await, "x-amz-request-id");
    assert!(!first.is_empty() && first != second);
}
