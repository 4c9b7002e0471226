//! Every route without a network: the shards are dead, and the door must be right all the same.

mod events;
mod recall;
mod stream;

use std::collections::BTreeSet;

use axum::body::Body;
use expect_test::expect;
use futures::FutureExt as _;
use http::{Method, Request, header};
use http_body_util::BodyExt as _;
use nstance_client::{Identity, Targets};
use nstance_identity::{
    ca::{Ca, CaProfile, make_ca_certificate},
    keys::KeyPair,
};
use nstance_rt::clock::TokioClock;
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

use super::{
    route::{Access, Place},
    schema::misfits,
    *,
};
use crate::identity_files::IdentityFiles;

const FULL: &str = "full-token-of-these-tests";
const VIEWER: &str = "viewer-token-of-these-tests";

/// A server of two shards that nobody serves.
struct Fixture {
    app: Arc<App>,
    tasks: Tasks,
    dir: tempfile::TempDir,
}

/// Writes an operator's identity, and a server's certificate of the same CA.
pub(crate) fn identity(dir: &std::path::Path) -> Identity {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (entropy, now) = (SystemEntropy::new(), SystemClock.now());
    let ca_key = KeyPair::generate(&entropy);
    let issued = make_ca_certificate(&ca_key, &CaProfile::of("demo".parse().unwrap()), now, &entropy);
    let ca = Ca::load(issued.chain_pem.as_bytes(), [ca_key]).unwrap();
    let key = KeyPair::generate(&entropy);
    let operator = "opr06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let tenant = "default".parse().unwrap();
    let day = Duration::from_secs(86_400);
    let issued = ca.issue_operator(&operator, &tenant, &key.public_key(), now, day, &entropy).unwrap();
    std::fs::write(dir.join("ca.crt"), ca.bundle_pem()).unwrap();
    std::fs::write(dir.join("identity.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    std::fs::write(dir.join("identity.crt"), issued.chain_pem).unwrap();
    let profile = nstance_identity::issue::ServerProfile {
        server: "admin".parse().unwrap(),
        cluster: "demo".parse().unwrap(),
        shard: "dev-1".parse().unwrap(),
        sans: Vec::new(),
    };
    let key = KeyPair::generate(&entropy);
    let issued = ca.issue_server(&profile, &key.public_key(), now, day, &entropy).unwrap();
    std::fs::write(dir.join("tls.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    std::fs::write(dir.join("tls.crt"), issued.chain_pem).unwrap();
    others(dir, &ca);
    IdentityFiles::new(dir.to_owned()).load().unwrap()
}

/// Certificates of the cluster's CA that are not for us: an agent's, another tenant's, a service's. And a service's of
/// somebody else's CA.
fn others(dir: &std::path::Path, ca: &Ca) {
    let (entropy, now, day) = (SystemEntropy::new(), SystemClock.now(), Duration::from_secs(86_400));
    let key = KeyPair::generate(&entropy);
    let public = key.public_key();
    std::fs::write(dir.join("other.key"), key.to_pkcs8_pem().as_bytes()).unwrap();
    let (ours, theirs) = ("default".parse().unwrap(), "acme".parse().unwrap());
    let instance = "tst06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let operator = "opr06bgm7733st2576nx5jht4ecjw".parse().unwrap();
    let profile = nstance_identity::issue::FileProfile {
        subject: nstance_identity::subject::Subject { common_name: "etcd".into(), ..Default::default() },
        sans: Vec::new(),
        usage: nstance_identity::issue::FileUsage::Client,
    };
    let foreign_key = KeyPair::generate(&entropy);
    let foreign = make_ca_certificate(&foreign_key, &CaProfile::of("elsewhere".parse().unwrap()), now, &entropy);
    let foreign = Ca::load(foreign.chain_pem.as_bytes(), [foreign_key]).unwrap();
    std::fs::write(dir.join("both-ca.crt"), format!("{}{}", ca.bundle_pem(), foreign.bundle_pem())).unwrap();
    for (name, issued) in [
        ("agent.crt", ca.issue_agent(&instance, &ours, &public, now, day, &entropy)),
        ("tenant.crt", ca.issue_operator(&operator, &theirs, &public, now, day, &entropy)),
        ("service.crt", ca.issue_file(&profile, &public, now, day, &entropy)),
        ("foreign.crt", foreign.issue_file(&profile, &public, now, day, &entropy)),
    ] {
        std::fs::write(dir.join(name), issued.unwrap().chain_pem).unwrap();
    }
}

impl Fixture {
    fn new() -> Self {
        Self::with(false, LiveState::start)
    }

    /// Nobody looks for the shards: what is known of them is for the test to say, and how time goes.
    fn quiet() -> Self {
        let clock = TokioClock::starting_at(SystemClock.now());
        Self::with(false, |_, shards, _| LiveState::new(shards, Arc::new(clock)))
    }

    /// Both shards take connections and never say a word.
    fn mute(timeout: Duration) -> (Self, [std::net::TcpListener; 2]) {
        let mut fixture = Self::quiet();
        let holes = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let [one, two] = [0, 1].map(|at: usize| holes[at].local_addr().unwrap());
        let targets: Targets = format!("dev-1={one},dev-2={two}").parse().unwrap();
        let identity = IdentityFiles::new(fixture.dir.path().to_owned()).load().unwrap();
        let app = Arc::get_mut(&mut fixture.app).unwrap();
        app.shards = Shards::new(targets, identity, timeout);
        app.behind_proxy = true;
        (fixture, holes)
    }

    fn with(read_only: bool, live: impl FnOnce(&Tasks, &Shards, Arc<dyn Clock>) -> Arc<LiveState>) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        // Taken and closed again: nobody answers there.
        let ports = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port());
        let targets: Targets = format!("dev-1=127.0.0.1:{},dev-2=127.0.0.1:{}", ports[0], ports[1]).parse().unwrap();
        let shards = Shards::new(targets, identity(dir.path()), Duration::from_secs(20)).keeping_connections();
        let tokens = Tokens { full: FULL.into(), viewer: Some(VIEWER.into()) };
        let auth = Auth::new(Some(&tokens), read_only, &SystemEntropy::new());
        let tasks = Tasks::new();
        let hosts = Hosts::new("127.0.0.1".parse().unwrap(), &[]);
        let live = live(&tasks, &shards, Arc::new(SystemClock));
        let app = Arc::new(App::new(&tasks, live, shards, auth, hosts, false));
        Self { app, tasks, dir }
    }

    async fn ask(&self, request: Request<Body>) -> Answered {
        let peer = Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
        let response = door::answer(self.app.clone(), peer, request).await;
        let (head, body) = response.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        let document = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answered { status: head.status.as_u16(), headers: head.headers, text: bytes.to_vec(), document }
    }
}

struct Answered {
    status: u16,
    headers: HeaderMap,
    text: Vec<u8>,
    document: Value,
}

/// Bodies and parameters that fit, so that only what a test changes can be wrong.
fn request(route: &Route) -> http::request::Builder {
    let path = route.path.replace("{group}", "web").replace("{id}", "tst06bgm7733st2576nx5jht4ecjw");
    let query = if route.params.iter().any(|it| it.name == "all_shards") { "?all_shards=true" } else { "" };
    let query = match route.id {
        "instance_create" => "?shard=dev-1",
        // It would have no end.
        "stream" => "?follow=false",
        _ => query,
    };
    Request::builder()
        .method(route.method.clone())
        .uri(format!("{path}{query}"))
        .header(header::HOST, "127.0.0.1:8080")
        .header(header::CONTENT_TYPE, "application/json")
}

fn body(route: &Route) -> Body {
    Body::from(match route.id {
        "group_scale" => json!({"group": "web", "size": 1}).to_string(),
        "instance_create" => json!({"group": "web"}).to_string(),
        _ if route.body.is_some() => "{}".to_owned(),
        _ => String::new(),
    })
}

fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}

/// The status is in the table, and the body fits its schema.
fn hold_to_the_table(app: &App, route: &Route, answered: &Answered) {
    let id = route.id;
    let Some(answer) = route.answers.iter().find(|it| it.status.as_u16() == answered.status) else {
        panic!("{id}: {} is not documented: {}", answered.status, answered.document);
    };
    let kind = answered.headers.get(header::CONTENT_TYPE).map(|it| it.to_str().unwrap().to_owned());
    let kind = kind.as_deref().and_then(|it| it.split(';').next());
    match kind {
        None => assert!(answer.content.is_empty() && answered.text.is_empty(), "{id}"),
        Some(kind) => {
            let schema = answer.content.iter().find(|(it, _)| *it == kind);
            let (_, schema) = schema.unwrap_or_else(|| panic!("{id}: {kind} is not documented"));
            if kind == "application/json" {
                assert_eq!(misfits(schema, &app.schemas, &answered.document), [], "{id}: {}", answered.document);
            }
        }
    }
}

#[tokio::test]
async fn every_route_lets_in_whom_it_should() {
    let fixture = Fixture::new();
    let app = &fixture.app;
    for route in &app.routes {
        let ask = async |change: &dyn Fn(http::request::Builder) -> http::request::Builder| {
            let answered = fixture.ask(change(request(route)).body(body(route)).unwrap()).await;
            hold_to_the_table(app, route, &answered);
            answered.status
        };
        let (open, changes) = (route.access == Access::Open, route.access == Access::Change);
        let none = ask(&|it| it).await;
        assert_eq!(none, if open { 200 } else { 401 }, "{} without a token", route.id);

        let viewer = ask(&|it| it.header(header::AUTHORIZATION, bearer(VIEWER))).await;
        assert_eq!(viewer == 403, changes, "{} as a viewer: {viewer}", route.id);

        let full = ask(&|it| it.header(header::AUTHORIZATION, bearer(FULL))).await;
        assert!(matches!(full, 200 | 503), "{} with the token: {full}", route.id);

        let host = ask(&|mut it| {
            it.headers_mut().unwrap().insert(header::HOST, "evil.example.com".parse().unwrap());
            it.header(header::AUTHORIZATION, bearer(FULL))
        });
        assert_eq!(host.await, 403, "{} under a foreign name", route.id);

        let origin =
            ask(&|it| it.header(header::AUTHORIZATION, bearer(FULL)).header(header::ORIGIN, "http://evil.example.com"));
        assert_eq!(origin.await == 403, changes, "{} from a foreign page", route.id);

        let own =
            ask(&|it| it.header(header::AUTHORIZATION, bearer(FULL)).header(header::ORIGIN, "http://127.0.0.1:8080"));
        assert_eq!(own.await, full, "{} from our own page", route.id);
    }
}

#[tokio::test]
async fn a_read_only_server_changes_nothing() {
    let fixture = Fixture::with(true, LiveState::start);
    for route in &fixture.app.routes {
        let asked = request(route).header(header::AUTHORIZATION, bearer(FULL)).body(body(route)).unwrap();
        let answered = fixture.ask(asked).await;
        assert_eq!(answered.status == 403, route.access == Access::Change, "{}: {}", route.id, answered.status);
    }
}

/// What all tests log: one subscriber for all threads, because what a line's place is good for is decided once for all.
#[derive(Clone, Default)]
struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

static LOG: std::sync::LazyLock<Log> = std::sync::LazyLock::new(|| {
    let log = Log::default();
    let own = log.clone();
    let lines = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || own.clone());
    tracing::subscriber::set_global_default(lines.finish()).unwrap();
    log
});

/// The audit's lines of one request.
fn audited(request_id: &str) -> Vec<Value> {
    let text = String::from_utf8(LOG.0.lock().unwrap().clone()).unwrap();
    let lines = text.lines().map(|it| serde_json::from_str::<Value>(it).unwrap());
    lines.filter(|it| it["audit"] == true && it["request_id"] == request_id).collect()
}

fn scaling(token: &str, request_id: &str) -> Request<Body> {
    Request::post("/group/scale?shard=dev-1")
        .header(header::HOST, "localhost")
        .header(header::AUTHORIZATION, bearer(token))
        .header(header::CONTENT_TYPE, "application/json")
        .header("x-forwarded-for", "10.1.1.1, 192.0.2.7")
        .header("x-request-id", request_id)
        .body(Body::from(json!({"group": "web", "size": 1, "victims": ["tst06bgm7733st2576nx5jht4ecjw"]}).to_string()))
        .unwrap()
}

#[tokio::test]
async fn a_change_whose_caller_hangs_up_is_audited_all_the_same() {
    let (fixture, _holes) = Fixture::mute(Duration::from_millis(100));
    let id = "hung-up";
    assert_eq!(audited(id), [Value::Null; 0]);
    let peer = Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
    let answering = door::answer(fixture.app.clone(), peer, scaling(FULL, id));
    assert!(answering.now_or_never().is_none(), "it waits for a shard, and is dropped");
    assert_eq!(fixture.tasks.end(GRACE).await, 0);
    let audited = audited(id);
    let [line] = audited.as_slice() else { panic!("{audited:#?}") };
    assert_eq!((&line["who"], &line["what"], &line["status"]), (&json!("token"), &json!("group_scale"), &json!(504)));
    assert_eq!((&line["address"], &line["request_id"]), (&json!("192.0.2.7"), &json!(id)));
    let wish: Value = serde_json::from_str(line["wish"].as_str().unwrap()).unwrap();
    let expected = json!({"shard": ["dev-1"], "group": "web", "size": 1, "victims": ["tst06bgm7733st2576nx5jht4ecjw"]});
    assert_eq!(wish, expected);
}

#[tokio::test]
async fn changes_that_are_refused_or_cut_off_are_audited_too() {
    let (fixture, _holes) = Fixture::mute(Duration::from_secs(600));
    let id = "cut-off";
    assert_eq!(audited(id), [Value::Null; 0]);
    let peer = || Peer { address: "127.0.0.1".parse().unwrap(), certificate: None };
    assert_eq!(door::answer(fixture.app.clone(), peer(), scaling(VIEWER, id)).await.status().as_u16(), 403);
    assert!(door::answer(fixture.app.clone(), peer(), scaling(FULL, id)).now_or_never().is_none());
    assert_eq!(fixture.tasks.end(Duration::ZERO).await, 1, "it would have waited for long");
    let audited = audited(id);
    let told: Vec<_> = audited.iter().map(|it| (&it["who"], &it["status"], &it["message"])).collect();
    let refused = (&json!("viewer-token"), &json!(403), &json!("change asked for"));
    assert_eq!(told, [refused, (&json!("token"), &Value::Null, &json!("change asked for, and its end not seen"))]);
}

#[tokio::test]
async fn dead_shards_are_named_and_it_is_said_when_to_come_again() {
    let fixture = Fixture::new();
    let ask = async |path: &str| {
        let asked = Request::get(path).header(header::HOST, "localhost").header(header::AUTHORIZATION, bearer(FULL));
        fixture.ask(asked.body(Body::empty()).unwrap()).await
    };
    let answered = ask("/api/v1/groups").await;
    assert_eq!(answered.status, 503);
    assert_eq!(answered.headers[header::RETRY_AFTER], "1");
    assert_eq!(answered.document["code"], "unreachable");
    let shards = answered.document["shards"].as_array().unwrap();
    assert_eq!(shards.iter().map(|it| it["shard"].as_str().unwrap()).collect::<Vec<_>>(), ["dev-1", "dev-2"]);
    assert!(shards.iter().all(|it| it["status"] == 503));
    assert_eq!(answered.document["hint"], "nstance-admin check --only shards");

    let answered = ask("/api/v1/shards").await;
    assert_eq!(answered.status, 200, "who is dead is what was asked");
    assert_eq!(answered.document["shards"][1]["reachable"], false);
}

#[tokio::test]
async fn bad_requests_are_told_all_that_is_wrong_with_them() {
    let fixture = Fixture::new();
    let ask = async |path: &str, kind: &str, body: &str| {
        let asked = Request::post(path)
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, bearer(FULL))
            .header(header::CONTENT_TYPE, kind);
        let answered = fixture.ask(asked.body(Body::from(body.to_owned())).unwrap()).await;
        let problems = answered.document["problems"].as_array().cloned().unwrap_or_default();
        let problems = problems.iter().map(|it| format!("\n  {}: {}", it["path"], it["message"]));
        format!("{} {}{}\n", answered.status, answered.document["code"], problems.collect::<String>())
    };
    let mut said = String::new();
    said += &ask("/group/scale?sahrd=dev-1&shard=dev-9", "application/json", r#"{"size": "3", "x": 1}"#).await;
    said +=
        &ask("/group/scale?all_shards=1&all_shards=2", "application/json", r#"{"group": "A", "size": 10001}"#).await;
    said += &ask("/group/scale", "application/json", r#"{"group": "web", "size": 1}"#).await;
    said +=
        &ask("/group/scale?shard=dev-1&all_shards=true", "application/json", r#"{"group": "web", "size": 1}"#).await;
    said += &ask("/group/scale?shard=dev-1", "application/json", "{\n  nonsense").await;
    said += &ask("/group/scale?shard=dev-1", "text/plain", r#"{"group": "web", "size": 1}"#).await;
    said += &ask("/group/scale?shard=dev-1", "application/json", &" ".repeat(door::MAX_BODY + 1)).await;
    said += &ask("/api/v1/instances/nobody/ack", "application/json", "").await;
    said += &ask("/api/v1/groups", "application/json", "{}").await;
    said += &ask("/nowhere", "application/json", "{}").await;
    expect![[r#"
        400 "bad_request"
          "sahrd": "there is no such parameter; there are shard, all_shards"
          "shard[0]": "must be one of dev-1, dev-2"
          "group": "is missing"
          "size": "must be of type integer"
          "x": "there is no such key; there are group, size, victims, total"
        400 "bad_request"
          "all_shards": "was given more than once"
          "group": "`A` does not match ^[a-z0-9]+(-[a-z0-9]+)*$"
          "size": "must be at most 10000"
        400 "bad_request"
          "shard": "say which of 2 shards: dev-1, dev-2"
        400 "bad_request"
          "all_shards": "is said together with shard"
        400 "bad_request"
          "": "the body is no JSON: key must be a string at line 2 column 3"
        415 "unsupported_media_type"
        413 "body_too_large"
        400 "bad_request"
          "id": "`nobody` does not match ^[a-z]{3}[0-9a-hjkmnp-tv-z]{26}$"
        405 "method_not_allowed"
        404 "no_such_route"
    "#]]
    .assert_eq(&said);
}

#[tokio::test]
async fn answers_carry_ids_policies_and_etags() {
    let fixture = Fixture::new();
    let ask = async |id: &str, etag: &str, method: Method| {
        let asked = Request::builder()
            .method(method)
            .uri("/openapi.json")
            .header(header::HOST, "[::1]:8080")
            .header(header::AUTHORIZATION, bearer(VIEWER))
            .header("x-request-id", id)
            .header(header::IF_NONE_MATCH, etag);
        fixture.ask(asked.body(Body::empty()).unwrap()).await
    };
    let answered = ask("mine-1", "\"other\"", Method::GET).await;
    assert_eq!((answered.status, answered.headers["x-request-id"].as_bytes()), (200, &b"mine-1"[..]));
    assert_eq!(answered.headers[header::CACHE_CONTROL], "no-store");
    assert!(answered.headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap().contains("default-src 'none'"));
    assert_eq!(answered.headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    let etag = answered.headers[header::ETAG].to_str().unwrap().to_owned();
    let again = ask("not plain\t", &etag, Method::GET).await;
    assert_eq!((again.status, again.text.len()), (304, 0));
    assert_eq!(again.headers["x-request-id"].len(), 16, "theirs may not stand in a log");
    let deleted = ask("x", "", Method::DELETE).await;
    assert_eq!((deleted.status, deleted.headers[header::ALLOW].as_bytes()), (405, &b"GET, HEAD"[..]));
}

/// No route is there that the document does not have, and none is documented that is not there: both are one table. What
/// can still be wrong is the table itself, so here it is.
#[tokio::test]
async fn the_document_lists_every_route_with_its_answers() {
    let fixture = Fixture::new();
    let paths = fixture.app.document["paths"].as_object().unwrap();
    let mut lines = String::new();
    let mut ids = BTreeSet::new();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            let codes: Vec<&str> = operation["responses"].as_object().unwrap().keys().map(String::as_str).collect();
            let mut codes: Vec<&str> = codes.into_iter().filter(|it| !matches!(*it, "401" | "429")).collect();
            codes.sort_unstable();
            assert!(ids.insert(operation["operationId"].to_string()), "{operation}");
            lines += &format!("{} {path} {}\n", method.to_ascii_uppercase(), codes.join(" "));
        }
    }
    assert_eq!(ids.len(), fixture.app.routes.len());
    for route in &fixture.app.routes {
        for param in route.params.iter().filter(|it| it.place == Place::Path) {
            assert!(route.path.contains(&format!("{{{}}}", param.name)), "{}", route.id);
        }
    }
    expect![[r#"
        GET /health 200 400 403
        GET /openapi.json 200 304 400 403
        GET /metrics 200 400 403
        GET /config/status 200 207 304 400 403 500 502 503 504
        POST /config/refresh 200 207 304 400 403 404 408 409 413 415 500 502 503 504
        POST /group/scale 200 207 400 403 404 408 409 413 415 500 502 503 504
        GET /api/v1/groups 200 207 304 400 403 500 502 503 504
        GET /api/v1/groups/{group} 200 207 304 400 403 404 500 502 503 504
        PUT /api/v1/groups/{group} 200 201 207 400 403 404 408 409 412 413 415 500 502 503 504
        DELETE /api/v1/groups/{group} 200 202 207 400 403 404 409 412 500 502 503 504
        GET /api/v1/explain/group/{group} 200 207 304 400 403 404 500 502 503 504
        GET /api/v1/instances 200 207 304 400 403 500 502 503 504
        POST /api/v1/instances 202 400 403 404 408 409 413 415 500 502 503 504
        GET /api/v1/instances/{id} 200 304 400 403 404 500 502 503 504
        DELETE /api/v1/instances/{id} 200 202 400 403 404 409 500 502 503 504
        POST /api/v1/instances/{id}/replace 202 400 403 404 408 409 413 415 500 502 503 504
        POST /api/v1/instances/{id}/ack 200 400 403 404 408 409 413 415 500 502 503 504
        GET /api/v1/instances/{id}/why 200 304 400 403 404 500 502 503 504
        GET /api/v1/shards 200 304 400 403 500 502 503 504
        GET /api/v1/plan 200 207 304 400 403 404 500 502 503 504
        POST /api/v1/plan 200 207 400 403 404 408 413 415 500 502 503 504
        GET /api/v1/drains 200 207 304 400 403 500 502 503 504
        GET /api/v1/events 200 207 304 400 403 500 502 503 504
        GET /api/v1/stream 200 400 403 500 502 503 504
    "#]]
    .assert_eq(&lines);
}

#[tokio::test]
async fn a_stop_ends_streams_and_idle_connections_at_once() {
    let fixture = Fixture::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    fixture.tasks.spawn("listener", listen::accept(fixture.app.clone(), fixture.tasks.clone(), listener, None));
    let open = async |path: &str| {
        let mut socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {FULL}\r\n\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut lines = BufReader::new(socket).lines();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "HTTP/1.1 200 OK");
        lines
    };
    let mut open = [open("/api/v1/events?follow=true").await, open("/api/v1/stream").await, open("/health").await];
    assert_eq!(fixture.tasks.end(GRACE).await, 0, "nobody had to be cut off");
    for connection in &mut open {
        while connection.next_line().await.unwrap().is_some() {}
    }
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody is let in any more");
}

#[tokio::test]
async fn an_operators_certificate_is_as_good_as_a_token() {
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
    let fixture = Fixture::new();
    let at = |name: &str| fixture.dir.path().join(name);
    let tls = listen::tls(&at("tls.crt"), &at("tls.key"), Some(&at("both-ca.crt"))).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    fixture.tasks.spawn("listener", listen::accept(fixture.app.clone(), fixture.tasks.clone(), listener, Some(tls)));
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(at("ca.crt")).unwrap()).unwrap();
    let builder = || rustls::ClientConfig::builder().with_root_certificates(roots.clone());
    let with = |certificate: &str, key: &str| {
        let chain = vec![CertificateDer::from_pem_file(at(certificate)).unwrap()];
        builder().with_client_auth_cert(chain, PrivateKeyDer::from_pem_file(at(key)).unwrap()).unwrap()
    };
    let known = with("identity.crt", "identity.key");
    let unknown = builder().with_no_client_auth();
    for (config, token, expected) in [
        (known.clone(), "", "HTTP/1.1 200 OK"),
        (with("agent.crt", "other.key"), "", "HTTP/1.1 403 Forbidden"),
        (with("tls.crt", "tls.key"), "", "HTTP/1.1 403 Forbidden"),
        (with("tenant.crt", "other.key"), "", "HTTP/1.1 403 Forbidden"),
        (with("service.crt", "other.key"), "", "HTTP/1.1 403 Forbidden"),
        (with("agent.crt", "other.key"), FULL, "HTTP/1.1 200 OK"),
        (with("foreign.crt", "other.key"), "", "HTTP/1.1 200 OK"),
        (unknown.clone(), "", "HTTP/1.1 401 Unauthorized"),
        (unknown, FULL, "HTTP/1.1 200 OK"),
        // Who says something wrong is not believed for what they have beside it.
        (known, "wrong-token", "HTTP/1.1 401 Unauthorized"),
    ] {
        let socket = tokio::net::TcpStream::connect(address).await.unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect("localhost".try_into().unwrap(), socket).await.unwrap();
        let token = if token.is_empty() { String::new() } else { format!("Authorization: Bearer {token}\r\n") };
        let head = format!("GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n{token}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let line = BufReader::new(stream).lines().next_line().await.unwrap().unwrap();
        assert_eq!(line, expected);
    }
    fixture.tasks.end(GRACE).await;
}

#[test]
fn addresses_of_a_network_need_tls_and_credentials() {
    use clap::Parser;
    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        serve: ServeArgs,
    }
    let refused = |words: &str| {
        let cli = Cli::try_parse_from(format!("x {words}").split(' ').filter(|it| !it.is_empty())).unwrap();
        check(&cli.serve).err().map(|it| it.exit)
    };
    assert_eq!(refused(""), None);
    assert_eq!(refused("--bind [::1]:0 --insecure-no-auth"), None);
    assert_eq!(refused("--bind 0.0.0.0:8080"), Some(Exit::Usage));
    assert_eq!(refused("--bind 0.0.0.0:8080 --behind-proxy"), None);
    assert_eq!(refused("--bind 10.0.0.1:8080 --tls-cert a --tls-key b"), None);
    assert_eq!(refused("--bind 10.0.0.1:8080 --tls-cert a --tls-key b --insecure-no-auth"), Some(Exit::Usage));
}
