//! The HTTP API before real shards: whatever is asked, the answer is one that its OpenAPI document has.
//!
//! The document is read by a checker of this file's own, so that what serves and what judges have nothing in common.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use crate::e2e_common::Env;
use crate::http_common::{Reading, Served, TOKEN, is, it_stops_when_told, lines_until, read};
use crate::openapi_common::Document;
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};
use reqwest::{Method, Url};
use rustix::process::Signal;
use serde_json::{Value, json};

/// One request, made of what an operation takes and what it does not.
#[derive(Debug, Clone)]
struct Case {
    at: usize,
    params: Vec<(String, String, String)>,
    body: Option<String>,
    fits: bool,
}

fn plain(it: &Value) -> String {
    it.as_str().map_or_else(|| it.to_string(), str::to_owned)
}

/// Names that are there, so that not everything ends at "no such".
#[derive(Clone)]
struct Known {
    instance: String,
}

fn cases(document: &Arc<Document>, known: &Known) -> BoxedStrategy<Case> {
    let operations = document.operations();
    let each = operations.into_iter().enumerate().map(|(at, (_, _, operation))| {
        let params: Vec<_> = operation["parameters"].as_array().unwrap().clone();
        let strategies: Vec<_> = params.iter().map(|param| parameter(document, param, known)).collect();
        let body = match operation.pointer("/requestBody/content/application~1json/schema") {
            None => Just((None, true)).boxed(),
            Some(schema) => {
                let (document, own) = (document.clone(), schema.clone());
                let good = document.good(schema).prop_map(|it| it.to_string());
                let broken = prop_oneof![any::<String>(), arbitrary_json().prop_map(|it| it.to_string())];
                prop_oneof![4 => good, 1 => broken]
                    .prop_map(move |text| {
                        let value: Option<Value> = serde_json::from_str(&text).ok();
                        let empty = text.trim_matches([' ', '\t', '\n', '\r']).is_empty();
                        let value = if empty { Some(json!({})) } else { value };
                        let fits = value.is_some_and(|it| document.fits(&own, &it).is_ok());
                        (Some(text), fits)
                    })
                    .boxed()
            }
        };
        (strategies, body).prop_map(move |(said, (body, body_fits))| {
            let fits = body_fits && said.iter().flatten().all(|(_, fits)| *fits);
            let named = params.iter().zip(said).filter_map(|(param, said)| {
                let (text, _) = said?;
                Some((param["in"].as_str()?.to_owned(), param["name"].as_str()?.to_owned(), text))
            });
            Case { at, params: named.collect(), body, fits }
        })
    });
    prop::strategy::Union::new(each.map(Strategy::boxed).collect::<Vec<_>>()).boxed()
}

/// A parameter in words, if it is given at all, and whether it fits.
fn parameter(document: &Arc<Document>, param: &Value, known: &Known) -> BoxedStrategy<Option<(String, bool)>> {
    let (schema, place) = (param["schema"].clone(), param["in"].as_str().unwrap().to_owned());
    if param["name"] == "follow" {
        // It would have no end.
        return Just(Some(("false".to_owned(), true))).boxed();
    }
    let item = if schema["type"] == "array" { schema["items"].clone() } else { schema };
    let good = document.good(&item).prop_map(|it| plain(&it));
    let there = match param["name"].as_str().unwrap() {
        "group" => "test".to_owned(),
        "id" | "instance" => known.instance.clone(),
        _ => "true".to_owned(),
    };
    let wild = if place == "query" { any::<String>().boxed() } else { "[ -~]{0,40}".boxed() };
    let (document, own) = (document.clone(), item);
    let text = prop_oneof![4 => good, 1 => Just(there), 1 => wild].prop_map(move |text| {
        let value = match own["type"].as_str() {
            Some("boolean") => text.parse::<bool>().ok().map(Value::from),
            Some("integer") => text.parse::<i64>().ok().map(Value::from),
            _ => Some(text.clone().into()),
        };
        let fits = value.is_some_and(|it| document.fits(&own, &it).is_ok());
        (text, fits)
    });
    // A header cannot begin or end with a space, and a path has no empty or dotted segments.
    let is_sendable = move |text: &str| match place.as_str() {
        "header" => text.trim() == text && !text.is_empty(),
        "path" => !text.is_empty() && text.chars().any(|c| c != '.'),
        _ => true,
    };
    let text = text.prop_filter("cannot be sent", move |(text, _)| is_sendable(text));
    if param["required"] == true { text.prop_map(Some).boxed() } else { prop::option::of(text).boxed() }
}

fn arbitrary_json() -> BoxedStrategy<Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3..20_000_i64).prop_map(Value::from),
        any::<String>().prop_map(Value::from)
    ];
    let names = prop::sample::select(vec!["group", "template", "vars", "config", "sizes", "reason", "x", ""]);
    leaf.prop_recursive(3, 12, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec((names.clone(), inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().map(|(name, it)| (name.to_owned(), it)).collect()))
        ]
    })
    .boxed()
}

async fn play(served: &Served, document: &Document, case: &Case) -> Result<u16, String> {
    let (method, path, operation) = document.operations().swap_remove(case.at);
    let mut url: Url = served.base.parse().unwrap();
    {
        let mut segments = url.path_segments_mut().unwrap();
        segments.clear();
        for part in path.split('/').skip(1) {
            let name = part.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
            let value =
                name.map(|name| case.params.iter().find(|(place, it, _)| place == "path" && it == name).unwrap());
            segments.push(value.map_or(part, |(_, _, text)| text));
        }
    }
    for (_, name, text) in case.params.iter().filter(|(place, ..)| place == "query") {
        url.query_pairs_mut().append_pair(name, text);
    }
    let mut request = served.client.request(method.parse().unwrap(), url).bearer_auth(TOKEN);
    for (_, name, text) in case.params.iter().filter(|(place, ..)| place == "header") {
        request = request.header(name, text);
    }
    if let Some(body) = &case.body {
        request = request.header("content-type", "application/json").body(body.clone());
    }
    let response = request.send().await.map_err(|error| format!("{case:?}: {error}"))?;
    let status = response.status().as_u16();
    let kind = response.headers().get("content-type").map(|it| it.to_str().unwrap().to_owned());
    let text = response.text().await.map_err(|error| format!("{case:?}: {error}"))?;
    document.judge(&operation, status, kind.as_deref(), &text)?;
    if 500 <= status {
        return Err(format!("{method} {path}: all shards live, and it is {status}: {text}"));
    }
    if !case.fits && status < 400 {
        return Err(format!("{method} {path}: it does not fit, and it is {status}"));
    }
    Ok(status)
}

#[test]
fn the_http_api_is_as_its_document_says() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (env, served, document) = runtime.block_on(async {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let env = Env::new();
        env.up(&["--shards", "2", "--size", "test=1"]).await;
        env.healthy().await;
        let served = Served::start(&env, &[]).await;
        let (status, document) = served.get("/openapi.json").await;
        assert_eq!(status, 200);
        (env, served, Arc::new(Document(document)))
    });
    runtime.block_on(who_writes_reads_it(&served));
    runtime.block_on(configs_are_refreshed(&env, &served));
    runtime.block_on(a_group_lives_and_goes(&served));
    runtime.block_on(events_go_on_where_a_reader_was(&served));
    // Afterwards: it deletes what it finds.
    whatever_is_asked_the_answer_is_documented(&runtime, &served, &document);
    runtime.block_on(a_dead_shard_hides_nobody(&env, &document));
    runtime.block_on(a_shard_that_stands_still_is_lost_until_it_goes_on(&env, &served));
    runtime.block_on(it_stops_when_told(served));
}

fn whatever_is_asked_the_answer_is_documented(
    runtime: &tokio::runtime::Runtime,
    served: &Served,
    document: &Arc<Document>,
) {
    let instances =
        runtime.block_on(served.until("/api/v1/instances", |it| it["instances"][0]["instance_id"].is_string()));
    let known = Known { instance: instances["instances"][0]["instance_id"].as_str().unwrap().to_owned() };
    let config = Config { cases: 400, failure_persistence: None, max_shrink_iters: 50, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let seen = Mutex::new(BTreeSet::new());
    let outcome = runner.run(&cases(document, &known), |case| {
        let at = case.at;
        let status = runtime.block_on(play(served, document, &case)).map_err(TestCaseError::fail)?;
        seen.lock().unwrap().insert((at, status));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}\n{}", served.log.lock().unwrap());
    }
    // Each was reached, and not only to be refused.
    let (seen, operations) = (seen.into_inner().unwrap(), document.operations());
    for (at, (method, path, _)) in operations.iter().enumerate() {
        assert!(seen.iter().any(|(it, _)| *it == at), "{method} {path} was never asked");
        let reads = method == "GET";
        assert!(!reads || seen.iter().any(|(it, status)| *it == at && *status == 200), "{method} {path}: never 200");
    }
}

/// The shard's config as it lies in the bucket.
fn find(dir: &Path, shard: &str) -> Option<PathBuf> {
    fs::read_dir(dir)
        .ok()?
        .flatten()
        .map(|it| it.path())
        .find_map(|path| if path.ends_with(format!("config/{shard}.jsonc")) { Some(path) } else { find(&path, shard) })
}

/// Updated 200, unchanged 304, mixed 207, invalid 400 with every problem.
async fn configs_are_refreshed(env: &Env, served: &Served) {
    let ask = async |query: &str, body: Value| {
        let request = served.ask(Method::POST, &format!("/config/refresh?{query}")).json(&body);
        let response = request.header("x-request-id", "refresh-of-the-test").send().await.unwrap();
        let etag = response.headers().get("etag").map(|it| it.to_str().unwrap().to_owned());
        let (status, document) = read(response).await;
        (status, document, etag)
    };
    let refresh = async |query: &str| ask(query, json!({})).await;
    let rehearse = async |query: &str| ask(query, json!({"dry_run": true})).await;
    let (status, document, etag) = refresh("shard=dev-1").await;
    assert_eq!((status, document), (304, Value::Null));
    assert_eq!(rehearse("shard=dev-1").await.0, 304, "there is nothing that a refresh would change");
    assert!(etag.is_some_and(|it| it.starts_with('"') && it.ends_with('"')));

    let path = find(&env.dir(), "dev-1").expect("a config in the bucket");
    let before = fs::read_to_string(&path).unwrap();
    assert!(before.contains(r#""Greeting": "hello""#), "{before}");
    fs::write(&path, before.replace(r#""Greeting": "hello""#, r#""Greeting": "good day""#)).unwrap();
    let (status, document, ..) = rehearse("all_shards=true").await;
    assert_eq!(status, 200, "{document}");
    let (would, stays) = (&document["shards"][0], &document["shards"][1]);
    assert_eq!((&would["code"], &would["updated"], &stays["code"]), (&json!(200), &json!(false), &json!(304)));
    assert_eq!(would["changed_groups"], json!(["test"]));
    let (status, document, ..) = refresh("all_shards=true").await;
    assert_eq!(status, 200, "{document}");
    let codes: Vec<_> = document["shards"].as_array().unwrap().iter().map(|it| (&it["shard"], &it["code"])).collect();
    assert_eq!(codes, [(&json!("dev-1"), &json!(200)), (&json!("dev-2"), &json!(304))]);
    assert_eq!(document["shards"][0]["changed_groups"], json!(["test"]));

    fs::write(&path, before.replace(r#""Greeting": "hello""#, r#""Greeting": 7, "9": true"#)).unwrap();
    let (status, document, ..) = refresh("shard=dev-1").await;
    assert_eq!((status, &document["code"]), (400, &json!("config_invalid")), "{document}");
    let problems = document["problems"].as_array().unwrap();
    assert!(1 < problems.len() && problems.iter().all(|it| 0 < it["line"].as_u64().unwrap()), "{document}");
    let (status, document, ..) = refresh("all_shards=true").await;
    assert_eq!((status, &document["errors"][0]["status"]), (207, &json!(400)), "{document}");
    assert_eq!((&document["shards"][0]["shard"], &document["shards"][0]["code"]), (&json!("dev-2"), &json!(304)));
    fs::write(&path, before).unwrap();
    assert_eq!(refresh("shard=dev-1").await.0, 200);
    let is_audit =
        |it: &str| it.contains("audit") && it.contains("refresh-of-the-test") && it.contains("config_refresh");
    served.until_logged(|log| log.lines().filter(|it| is_audit(it)).count() == 7).await;
}

/// Whatever is read after a change has the change in it, be it from the shard or from memory, while streams are behind.
async fn who_writes_reads_it(served: &Served) {
    let path = "/api/v1/groups/own?shard=dev-1";
    for round in 0..30 {
        let greeting = round.to_string();
        let body = json!({"template": "tst", "size": 0, "vars": {"Greeting": greeting}});
        let (status, made) = served.send(Method::PUT, path, body).await;
        assert!(matches!(status, 200 | 201), "{made}");
        for _ in 0..3 {
            let (status, read) = served.get(path).await;
            assert_eq!((status, &read["groups"][0]["vars"]["Greeting"]), (200, &json!(greeting)), "{read}");
            assert!(read["as_of"]["dev-1"].is_string(), "{read}");
        }
    }
    assert_eq!(served.send(Method::DELETE, path, json!({})).await.0, 202);
    for _ in 0..3 {
        let (status, read) = served.get(path).await;
        assert_eq!(status, 404, "{read}");
    }
    let count = async || {
        let (_, read) = served.get("/api/v1/shards?shard=dev-1").await;
        read["shards"][0]["instances"].as_u64().unwrap()
    };
    let before = count().await;
    for n in 1..4 {
        let body = json!({"group": "test", "request_id": format!("own-{n}")});
        let (status, made) = served.send(Method::POST, "/api/v1/instances?shard=dev-1", body).await;
        assert_eq!(status, 202, "{made}");
        assert_eq!((count().await, count().await), (before + n, before + n));
        let id = made["instance"]["instance_id"].as_str().unwrap();
        let (_, listed) = served.get("/api/v1/instances?shard=dev-1&on_demand=true").await;
        assert!(listed["instances"].as_array().unwrap().iter().any(|it| it["instance_id"] == id), "{listed}");
    }
    let (_, listed) = served.get("/api/v1/instances?shard=dev-1&on_demand=true").await;
    for it in listed["instances"].as_array().unwrap() {
        let id = it["instance_id"].as_str().unwrap();
        served.send(Method::DELETE, &format!("/api/v1/instances/{id}?now=true"), json!({})).await;
    }
    served.until("/api/v1/shards?shard=dev-1", |it| it["shards"][0]["instances"] == before).await;
}

async fn a_group_lives_and_goes(served: &Served) {
    let (status, made) =
        served.send(Method::PUT, "/api/v1/groups/web?shard=dev-1", json!({"template": "tst", "size": 0})).await;
    assert_eq!(status, 201, "{made}");
    let etag = made["groups"][0]["etag"].as_str().unwrap().to_owned();
    let put = async |etag: &str, query: &str| {
        let request = served.ask(Method::PUT, &format!("/api/v1/groups/web?shard=dev-1{query}"));
        read(request.header("if-match", format!("\"{etag}\"")).json(&json!({"size": 1})).send().await.unwrap()).await
    };
    let (status, planned) = put(&etag, "&dry_run=true").await;
    assert_eq!((status, &planned["groups"][0]["plan"]["actions"][0]["kind"]), (200, &json!("Create")), "{planned}");
    let (status, refused) = put("another", "&dry_run=true").await;
    assert_eq!((status, &refused["code"]), (412, &json!("etag_mismatch")), "{refused}");
    assert_eq!(put(&etag, "").await.0, 200);
    assert_eq!(put(&etag, "").await.0, 412, "it has changed since");
    let rehearse = async |group: &str, body: Value| {
        served.send(Method::PUT, &format!("/api/v1/groups/{group}?shard=dev-1&dry_run=true"), body).await
    };
    let (status, refused) = rehearse("new", json!({"size": 1})).await;
    assert_eq!((status, &refused["problems"][0]["path"]), (400, &json!("template")), "{refused}");
    let (status, refused) = rehearse("new", json!({"template": "-moon"})).await;
    assert_eq!((status, &refused["problems"][0]["path"]), (400, &json!("template")), "{refused}");
    let (status, planned) = rehearse("new", json!({"template": "tst"})).await;
    assert_eq!((status, &planned["groups"][0]["exists"]), (200, &json!(false)), "{planned}");
    let ready = |it: &Value| it["groups"][0]["ready_size"] == 1;
    served.until("/api/v1/groups/web", ready).await;
    let (_, listed) = served.get("/api/v1/instances?group=web&state=running").await;
    let id = listed["instances"][0]["instance_id"].as_str().unwrap();
    let (status, shown) = served.get(&format!("/api/v1/instances/{id}")).await;
    assert_eq!((status, &shown["shard"]), (200, &json!("dev-1")));
    let reasons: Vec<_> =
        shown["timeline"].as_array().unwrap().iter().map(|it| it["reason"].as_str().unwrap()).collect();
    assert!(reasons.contains(&"InstanceRegistered"), "{reasons:?}");
    let (status, why) = served.get(&format!("/api/v1/instances/{id}/why")).await;
    assert!(status == 200 && why["summary"].as_str().unwrap().contains(id), "{why}");
    let (status, refused) = served.send(Method::POST, &format!("/api/v1/instances/{id}/ack"), json!({})).await;
    assert_eq!((status, &refused["code"]), (409, &json!("not_draining")));
    let body = json!({"group": "web", "request_id": "one-of-the-test"});
    let (status, first) = served.send(Method::POST, "/api/v1/instances?shard=dev-1", body.clone()).await;
    assert_eq!(status, 202, "{first}");
    let (_, second) = served.send(Method::POST, "/api/v1/instances?shard=dev-1", body).await;
    assert_eq!(first["instance"]["instance_id"], second["instance"]["instance_id"], "a repeat makes no second one");
    let made = first["instance"]["instance_id"].as_str().unwrap();
    let (status, gone) = served.send(Method::DELETE, &format!("/api/v1/instances/{made}?now=true"), json!({})).await;
    assert_eq!((status, &gone["effect"]), (202, &json!("deleted at once")));
    let (_, page) = served.get("/api/v1/instances?limit=1").await;
    let cursor = page["next_cursor"].as_str().unwrap();
    let (_, next) = served.get(&format!("/api/v1/instances?limit=1&cursor={cursor}")).await;
    assert_ne!(page["instances"][0]["instance_id"], next["instances"][0]["instance_id"]);
    let (status, _) = served.send(Method::DELETE, "/api/v1/groups/web?all_shards=true", json!({})).await;
    assert_eq!(status, 202);
    let (status, scaled) = served
        .send(Method::POST, "/group/scale?all_shards=true", json!({"group": "test", "size": 3, "total": true}))
        .await;
    assert_eq!(status, 200, "{scaled}");
    let sizes: Vec<_> = scaled["results"].as_array().unwrap().iter().map(|it| it["size"].as_i64().unwrap()).collect();
    assert_eq!(sizes, [2, 1]);
    let (status, absent) = served.get("/api/v1/instances/tst00000000000000000000000000").await;
    assert_eq!((status, &absent["code"]), (404, &json!("not_found")));
}

async fn events_go_on_where_a_reader_was(served: &Served) {
    let follow = async |id: Option<&str>| {
        let request = served.ask(Method::GET, "/api/v1/events?follow=true").header("accept", "text/event-stream");
        let request = id.into_iter().fold(request, |request, id| request.header("last-event-id", id));
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        response
    };
    // The past first, as far as it is remembered.
    let mut stream = follow(None).await;
    let lines = lines_until(&mut stream, |it| it.contains("InstanceCreateRequested")).await;
    let ids = |lines: &[String]| -> Vec<String> {
        lines.iter().filter_map(|it| it.strip_prefix("id: ")).map(str::to_owned).collect()
    };
    let last = ids(&lines).pop().unwrap();
    drop(stream);
    let (status, _) = served.send(Method::POST, "/group/scale?shard=dev-2", json!({"group": "test", "size": 2})).await;
    assert_eq!(status, 200);
    let mut stream = follow(Some(&last)).await;
    let wanted = |it: &str| it.contains("GroupChanged") && it.contains("dev-2");
    let again = lines_until(&mut stream, wanted).await;
    let (before, after): (BTreeSet<_>, Vec<_>) = (ids(&lines).into_iter().collect(), ids(&again));
    assert!(after.iter().all(|id| !before.contains(id)), "nothing is told twice: {after:?}");
    // Lines of JSON, and filters.
    let response = served.ask(Method::GET, "/api/v1/events?group=test&min_severity=info&since=1h");
    let response = response.header("accept", "application/x-ndjson").send().await.unwrap();
    let text = response.text().await.unwrap();
    assert!(text.lines().all(|it| serde_json::from_str::<Value>(it).unwrap()["group"] == "test"), "{text}");
    assert!(!text.is_empty());
}

/// One shard of this server is a closed port.
async fn a_dead_shard_hides_nobody(env: &Env, document: &Document) {
    let variables = env.ok(&["env"]).await;
    let servers = variables.lines().find_map(|it| it.strip_prefix("export NSTANCE_SERVERS='")).unwrap();
    let live = servers.trim_end_matches('\'').split(',').next().unwrap();
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let servers = format!("{live},dev-9=127.0.0.1:{dead}");
    let served = Served::start(env, &["--servers", &servers, "--timeout", "10s"]).await;
    for (path, expected) in [
        ("/api/v1/groups", 207),
        ("/api/v1/groups/test", 207),
        ("/api/v1/shards", 200),
        ("/api/v1/drains", 207),
        ("/config/status", 207),
        ("/api/v1/groups?shard=dev-9", 503),
        // Nobody has proved that it is not there.
        ("/api/v1/instances/tst00000000000000000000000000", 503),
        ("/api/v1/groups?shard=dev-1", 200),
    ] {
        let (status, answer) = served.get(path).await;
        assert_eq!(status, expected, "{path}: {answer}");
        if status == 207 {
            assert_eq!((&answer["errors"][0]["shard"], &answer["errors"][0]["status"]), (&json!("dev-9"), &json!(503)));
        }
        let bare = path
            .split('?')
            .next()
            .unwrap()
            .replace("/test", "/{group}")
            .replace("/tst00000000000000000000000000", "/{id}");
        let operation = &document.0["paths"][&bare]["get"];
        document.judge(operation, status, Some("application/json"), &answer.to_string()).unwrap();
    }
    let up = served.ask(Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
    assert!(up.contains("nstance_admin_shard_up{shard=\"dev-9\"} 0"), "{up}");
    assert!(
        up.contains("nstance_admin_requests_total{route=\"/api/v1/groups\",method=\"GET\",code=\"207\"} 1"),
        "{up}"
    );
    // Guessing is not for long.
    for n in 0..11 {
        let response = served.client.get(format!("{}/metrics", served.base)).bearer_auth("wrong").send().await.unwrap();
        assert_eq!(response.status().as_u16(), if n < 10 { 401 } else { 429 });
        assert_eq!(response.headers().contains_key("retry-after"), n == 10);
    }
    it_stops_when_told(served).await;
}

/// Its connections stay open and nothing ever comes over them.
async fn a_shard_that_stands_still_is_lost_until_it_goes_on(env: &Env, served: &Served) {
    let mut stream = Reading::open(served, "/api/v1/stream", None).await;
    stream.until("all there is", is("ready")).await;
    let server = env.recorded("server-2").unwrap();
    // With this all that was changed before is in memory.
    assert_eq!(served.get("/api/v1/groups").await.0, 200);
    crate::e2e_common::signal(&server, Signal::STOP);
    let (status, known) = served.get("/api/v1/groups?shard=dev-2").await;
    assert_eq!(status, 200, "nobody but memory answers: {known}");
    assert!(known["as_of"]["dev-2"].is_string() && !known["groups"].as_array().unwrap().is_empty(), "{known}");
    let told = stream.until("dev-2 is lost", is("lost")).await;
    assert_eq!(told.last().unwrap()["shard"], "dev-2");
    let pulse = stream.until("the other one goes on", is("pulse")).await.pop().unwrap();
    let age = |shard: &str| pulse["as_of"][shard].as_str().unwrap().to_owned();
    assert!(age("dev-2") < age("dev-1"), "{pulse:#}");
    let mut late = Reading::open(served, "/api/v1/stream?shard=dev-2", None).await;
    let opening = late.until("all that was known", is("ready")).await;
    assert_eq!((&opening[1]["reachable"], opening[1]["groups"].is_array()), (&json!(false), true), "{:#}", opening[1]);
    crate::e2e_common::signal(&server, Signal::CONT);
    for reading in [&mut stream, &mut late] {
        reading.until("it is back", |it| it["type"] == "snapshot" && it["reachable"] == true).await;
    }
}
