//! The way of a request: host, credentials, route, rights, origin, form, and only then the handler. Whatever comes of it
//! leaves with the same headers, is counted, and is audited if it could have changed something.

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{body::Body, extract::Query};
use futures::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use nstance_client::Shards;
use nstance_rt::entropy::hex;
use serde_json::Value;
use tokio::sync::oneshot;

use super::{
    App,
    audit::{Audit, wish},
    auth::{Caller, Certificate, check_origin},
    handle::looked_at,
    reply::{Content, Reply, Trouble, problem, quoted},
    route::{Access, Call, Param, Place, Route},
    schema::misfits,
};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Largest body of a request.
pub(super) const MAX_BODY: usize = 1024 * 1024;

/// Streams excepted, which go on after their handler is done.
const REQUEST_LIMIT: Duration = Duration::from_secs(60);

/// What the listener knows about a connection.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub address: IpAddr,
    /// One that was verified.
    pub certificate: Option<Certificate>,
}

/// Answers a request, whatever it is.
pub(super) async fn answer(app: Arc<App>, peer: Peer, mut request: Request<Body>) -> Response<Body> {
    let request_id = request_id(&app, request.headers());
    let method = request.method().clone();
    // A HEAD is a GET whose body the connection leaves out.
    if request.method() == Method::HEAD {
        *request.method_mut() = Method::GET;
    }
    let conditional = request.headers().get(header::IF_NONE_MATCH).cloned();
    let mut route = None;
    let reply = match pass(&app, &peer, request, &request_id, &mut route).await {
        Ok(reply) => reply,
        Err(trouble) => trouble.into_reply(&request_id),
    };
    let reply = if matches!(method, Method::GET | Method::HEAD) { conditional_get(reply, conditional) } else { reply };
    app.metrics.count(&method, route.map_or("", |at: usize| app.routes[at].path), reply.status);
    let mut response = reply.into_response();
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if let Ok(id) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Of every answer. What we answer is data: nothing of it is to be run, framed, kept or guessed at.
const HEADERS: [(HeaderName, &str); 7] = [
    (header::CACHE_CONTROL, "no-store"),
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
];

async fn pass(
    app: &Arc<App>,
    peer: &Peer,
    request: Request<Body>,
    request_id: &str,
    found_route: &mut Option<usize>,
) -> Result<Reply, Trouble> {
    let (head, body) = request.into_parts();
    let host = head.headers.get(header::HOST).and_then(|it| it.to_str().ok());
    let authority = head.uri.authority().map(http::uri::Authority::as_str).or(host);
    app.hosts.check(authority)?;
    let path = head.uri.path();
    let mut found: Vec<(usize, _)> = Vec::new();
    for (at, route) in app.routes.iter().enumerate() {
        found.extend(route.captures(path).map(|captures| (at, captures)));
    }
    // Words before parameters: `/a/b` is not `/a/{name}`.
    found.sort_by_key(|(_, captures)| captures.len());
    let chosen = found.iter().position(|(at, _)| app.routes[*at].method == head.method).map(|at| found.swap_remove(at));
    let open = chosen.as_ref().is_some_and(|(at, _)| app.routes[*at].access == Access::Open);
    *found_route = chosen.as_ref().map(|(at, _)| *at);
    let from = app.address(peer, &head.headers);
    let caller = if open {
        Caller::Anybody
    } else {
        app.auth.caller(&head.headers, peer.certificate.as_ref(), from, app.clock.monotonic())?
    };
    let Some((at, captures)) = chosen else {
        return Err(nowhere(app, path, &found.iter().map(|(at, _)| *at).collect::<Vec<_>>()));
    };
    let route = &app.routes[at];
    if route.access != Access::Change {
        app.auth.allow(&caller, route.access)?;
        let call = call(app, route, &captures, &head, body).await?;
        return handled(app, at, call, request_id).await;
    }
    let mut audit = Audit {
        who: caller.to_string(),
        what: route.id,
        asked: head.uri.path_and_query().map(ToString::to_string).unwrap_or_default(),
        wish: String::new(),
        address: from,
        request_id: request_id.to_owned(),
        status: None,
    };
    let admitted = async {
        app.auth.allow(&caller, route.access)?;
        check_origin(&head.headers, authority)?;
        let call = call(app, route, &captures, &head, body).await?;
        let shards = looked_at(app, &call)?;
        Ok((call, shards))
    };
    match admitted.await {
        Ok((call, shards)) => {
            audit.wish = wish(&call);
            change(app, at, call, &shards, audit).await
        }
        Err(trouble) => {
            let trouble: Trouble = trouble;
            audit.done(trouble.status);
            Err(trouble)
        }
    }
}

/// A request in the form that its route wants.
async fn call(
    app: &App,
    route: &Route,
    captures: &[(&'static str, String)],
    head: &http::request::Parts,
    body: Body,
) -> Result<Call, Trouble> {
    let body = match &route.body {
        None => Value::Null,
        Some(_) => json_body(&head.headers, body).await?,
    };
    let mut problems = Vec::new();
    let query = Query::<Vec<(String, String)>>::try_from_uri(&head.uri);
    let query = query.map(|Query(pairs)| pairs).unwrap_or_else(|_| {
        problems.push(problem("", "the query cannot be read"));
        Vec::new()
    });
    let params = parameters(route, captures, &query, &head.headers, &mut problems);
    if let Some(schema) = &route.body {
        let found = misfits(schema, &app.schemas, &body);
        problems.extend(found.iter().map(|it| problem(&it.path, &it.message)));
    }
    if !problems.is_empty() {
        return Err(Trouble::bad_request(problems));
    }
    let accept = head.headers.get(header::ACCEPT).and_then(|it| it.to_str().ok()).unwrap_or_default().to_owned();
    Ok(Call { params, body, accept })
}

/// Comes to its end, and into the audit log, also if the caller hangs up: what was sent to a shard is done all the same.
async fn change(app: &Arc<App>, at: usize, call: Call, shards: &Shards, audit: Audit) -> Result<Reply, Trouble> {
    let (answer, answered) = oneshot::channel();
    // Counted when it is over, and before anybody is told so.
    let writing = app.live.begin_write(shards);
    let own = app.clone();
    app.tasks.spawn("change", async move {
        let done = handled(&own, at, call, &audit.request_id).await;
        drop(writing);
        audit.done(done.as_ref().map_or_else(|trouble| trouble.status, |reply| reply.status));
        // Nobody may be there any more to be told.
        let _ = answer.send(done);
    });
    answered.await.unwrap_or_else(|_| {
        let message = "this server stopped before it was done; it may still be";
        Err(Trouble::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", message))
    })
}

async fn handled(app: &Arc<App>, at: usize, call: Call, request_id: &str) -> Result<Reply, Trouble> {
    let route = &app.routes[at];
    let handled = std::panic::AssertUnwindSafe((route.handler)(app.clone(), call)).catch_unwind();
    match tokio::time::timeout(REQUEST_LIMIT, handled).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(_panic)) => {
            tracing::error!(route = route.id, %request_id, "handler panicked");
            Err(Trouble::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "this is a bug of ours; the log says more"))
        }
        Err(_late) => {
            let message = format!("not done within {} s; it may still be", REQUEST_LIMIT.as_secs());
            Err(Trouble::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message))
        }
    }
}

fn nowhere(app: &App, path: &str, others: &[usize]) -> Trouble {
    if others.is_empty() {
        let message = format!("there is nothing at {}", path.escape_debug());
        return Trouble::new(StatusCode::NOT_FOUND, "no_such_route", message)
            .hint("GET /openapi.json lists all routes");
    }
    let mut allow: Vec<Method> = others.iter().map(|at| app.routes[*at].method.clone()).collect();
    if allow.contains(&Method::GET) {
        allow.push(Method::HEAD);
    }
    let message = "this can be asked, but not with this method";
    Trouble::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).allow(allow)
}

async fn json_body(headers: &HeaderMap, body: Body) -> Result<Value, Trouble> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|it| it.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        let message = "the body must be JSON, and said to be: Content-Type: application/json";
        return Err(Trouble::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
    }
    let too_large = || {
        let message = format!("the body is larger than {MAX_BODY} bytes");
        Trouble::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let collect = tokio::time::timeout(REQUEST_LIMIT, Limited::new(body, MAX_BODY).collect());
    let collected = collect
        .await
        .map_err(|_| Trouble::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", "the body did not come in time"))?;
    let bytes = match collected {
        Ok(collected) => collected.to_bytes(),
        Err(error) if error.is::<LengthLimitError>() => return Err(too_large()),
        Err(error) => {
            return Err(Trouble::bad_request(vec![problem("", &format!("the body could not be read: {error}"))]));
        }
    };
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    serde_json::from_slice(&bytes).map_err(|error| {
        let mut it = problem("", &format!("the body is no JSON: {error}"));
        (it["line"], it["column"]) = (error.line().into(), error.column().into());
        Trouble::bad_request(vec![it])
    })
}

fn parameters(
    route: &Route,
    captures: &[(&'static str, String)],
    query: &[(String, String)],
    headers: &HeaderMap,
    problems: &mut Vec<Value>,
) -> std::collections::BTreeMap<&'static str, Value> {
    for (name, _) in query {
        let known = || route.params.iter().filter(|it| it.place == Place::Query).map(|it| it.name);
        if !known().any(|it| it == name) {
            let known: Vec<&str> = known().collect();
            let others = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            problems.push(problem(name, &format!("there is no such parameter; there are {others}")));
        }
    }
    let mut params = std::collections::BTreeMap::new();
    for param in &route.params {
        let said: Vec<String> = match param.place {
            Place::Path => captures.iter().filter(|(name, _)| *name == param.name).map(|(_, it)| it.clone()).collect(),
            Place::Query => query.iter().filter(|(name, _)| name == param.name).map(|(_, it)| it.clone()).collect(),
            Place::Header => {
                let values = headers.get_all(param.name).iter();
                values.map(|it| String::from_utf8_lossy(it.as_bytes()).into_owned()).collect()
            }
        };
        if let Some(value) = typed(param, &said, problems) {
            params.insert(param.name, value);
        }
    }
    params
}

/// A parameter as its schema wants it.
fn typed(param: &Param, said: &[String], problems: &mut Vec<Value>) -> Option<Value> {
    let value = match (param.schema["type"].as_str(), said) {
        (_, []) => return None,
        (Some("array"), all) => all.iter().map(|it| Value::from(it.clone())).collect(),
        (_, [_, _, ..]) => {
            problems.push(problem(param.name, "was given more than once"));
            return None;
        }
        (Some("boolean"), [it]) => it.parse::<bool>().map_or_else(|_| it.clone().into(), Value::from),
        (Some("integer"), [it]) => it.parse::<i64>().map_or_else(|_| it.clone().into(), Value::from),
        (_, [it]) => it.clone().into(),
    };
    let found = misfits(&param.schema, &serde_json::Map::new(), &value);
    problems.extend(found.iter().map(|it| problem(&format!("{}{}", param.name, it.path), &it.message)));
    found.is_empty().then_some(value)
}

/// The caller's, if it is one that may stand in a log; else our own.
fn request_id(app: &App, headers: &HeaderMap) -> String {
    let is_plain = |it: &&str| {
        (1..=128).contains(&it.len())
            && it.bytes().all(|it| it.is_ascii_alphanumeric() || matches!(it, b'-' | b'_' | b'.'))
    };
    let theirs = headers.get(REQUEST_ID).and_then(|it| it.to_str().ok()).filter(is_plain);
    theirs.map_or_else(|| hex(app.entropy.as_ref(), 8), str::to_owned)
}

/// Whoever has this answer already is not sent it again. How old it is does not make it another.
fn conditional_get(mut reply: Reply, held: Option<HeaderValue>) -> Reply {
    let (StatusCode::OK, Content::Json(document)) = (reply.status, &mut reply.content) else { return reply };
    let as_of = document.as_object_mut().and_then(|it| it.shift_remove("as_of"));
    let digest = ring::digest::digest(&ring::digest::SHA256, document.to_string().as_bytes());
    if let Some(as_of) = as_of {
        document["as_of"] = as_of;
    }
    let etag = quoted(&data_encoding::HEXLOWER.encode(&digest.as_ref()[..16]));
    let held = held.as_ref().and_then(|it| it.to_str().ok()).unwrap_or_default();
    let is_held = held.split(',').map(str::trim).any(|it| it == "*" || it.trim_start_matches("W/") == etag);
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        reply.headers.insert(header::ETAG, etag);
    }
    if is_held {
        return Reply { status: StatusCode::NOT_MODIFIED, content: Content::None, headers: reply.headers };
    }
    reply
}
