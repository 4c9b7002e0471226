//! Answers and refusals, and how what several shards said becomes one status.

use std::time::Duration;

use axum::body::Body;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use nstance_client::{Answers, ShardError};
use serde_json::{Map, Value, json};
use tonic::Code;

use super::recall::Dated;
use crate::view;

pub(super) enum Content {
    None,
    Json(Value),
    Text(&'static str, String),
    Stream(&'static str, Body),
}

pub(super) struct Reply {
    pub status: StatusCode,
    pub content: Content,
    pub headers: HeaderMap,
}

impl Reply {
    pub(super) fn json(status: StatusCode, document: Value) -> Self {
        Self { status, content: Content::Json(document), headers: HeaderMap::new() }
    }

    pub(super) fn ok(document: Value) -> Self {
        Self::json(StatusCode::OK, document)
    }

    pub(super) fn text(kind: &'static str, text: String) -> Self {
        Self { status: StatusCode::OK, content: Content::Text(kind, text), headers: HeaderMap::new() }
    }

    pub(super) fn stream(kind: &'static str, body: Body) -> Self {
        Self { status: StatusCode::OK, content: Content::Stream(kind, body), headers: HeaderMap::new() }
    }

    fn unchanged(etag: &str) -> Self {
        let mut headers = HeaderMap::new();
        if let Ok(etag) = HeaderValue::from_str(&quoted(etag)) {
            headers.insert(header::ETAG, etag);
        }
        Self { status: StatusCode::NOT_MODIFIED, content: Content::None, headers }
    }

    pub(super) fn into_response(self) -> Response<Body> {
        let (kind, body) = match self.content {
            Content::None => (None, Body::empty()),
            Content::Json(document) => (Some("application/json"), Body::from(format!("{document}\n"))),
            Content::Text(kind, text) => (Some(kind), Body::from(text)),
            Content::Stream(kind, body) => (Some(kind), body),
        };
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        if let Some(kind) = kind {
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        }
        response
    }
}

pub(super) fn quoted(etag: &str) -> String {
    format!("\"{}\"", etag.trim_matches('"'))
}

/// Why a request was not done.
#[derive(Debug, Clone)]
pub(super) struct Trouble {
    pub status: StatusCode,
    code: Box<str>,
    message: Box<str>,
    problems: Box<[Value]>,
    shards: Box<[Value]>,
    hint: Option<Box<str>>,
    /// In seconds.
    retry_after: Option<u32>,
    /// Of 405.
    allow: Box<[Method]>,
}

impl Trouble {
    pub(super) fn new(status: StatusCode, code: &str, message: impl Into<Box<str>>) -> Self {
        Self {
            status,
            code: code.into(),
            message: message.into(),
            problems: Box::default(),
            shards: Box::default(),
            hint: None,
            retry_after: None,
            allow: Box::default(),
        }
    }

    /// An input with these problems.
    pub(super) fn bad_request(problems: Vec<Value>) -> Self {
        let told: Vec<String> = problems.iter().map(told).collect();
        Self { problems: problems.into(), ..Self::new(StatusCode::BAD_REQUEST, "bad_request", told.join("; ")) }
    }

    pub(super) fn hint(mut self, hint: &str) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(super) fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(u32::try_from(wait.as_secs()).unwrap_or(u32::MAX).max(1));
        self
    }

    pub(super) fn allow(mut self, methods: Vec<Method>) -> Self {
        self.allow = methods.into();
        self
    }

    /// Every shard that was asked refused or did not answer.
    pub(super) fn of_shards(errors: &[ShardError]) -> Self {
        let worst = errors.iter().max_by_key(|it| status_of(it));
        let status = worst.map_or(StatusCode::INTERNAL_SERVER_ERROR, status_of);
        let message: Vec<String> = errors.iter().map(ToString::to_string).collect();
        let trouble = Self::new(status, &worst.map_or_else(String::new, view::code_of), message.join("; "));
        let again = matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS);
        Self {
            problems: errors.iter().flat_map(|it| it.problems.iter().map(view::problem)).collect(),
            shards: errors.iter().map(shard_error).collect(),
            hint: worst.and_then(hint_of).map(Into::into),
            retry_after: again.then_some(1),
            ..trouble
        }
    }

    pub(super) fn into_reply(self, request_id: &str) -> Reply {
        let mut reply = Reply::json(
            self.status,
            json!({
                "error": self.message,
                "code": self.code,
                "problems": self.problems,
                "shards": self.shards,
                "hint": self.hint,
                "request_id": request_id,
            }),
        );
        if let Some(seconds) = self.retry_after {
            reply.headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            reply.headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"nstance\""));
        }
        let methods: Vec<&str> = self.allow.iter().map(Method::as_str).collect();
        if let (false, Ok(methods)) = (methods.is_empty(), HeaderValue::from_str(&methods.join(", "))) {
            reply.headers.insert(header::ALLOW, methods);
        }
        reply
    }
}

fn told(problem: &Value) -> String {
    let (path, message) =
        (problem["path"].as_str().unwrap_or_default(), problem["message"].as_str().unwrap_or_default());
    if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") }
}

/// A problem that we found ourselves.
pub(super) fn problem(path: &str, message: &str) -> Value {
    json!({
        "severity": "error",
        "code": "bad-value",
        "path": path,
        "line": 0,
        "column": 0,
        "message": message,
        "suggestion": null,
    })
}

/// The hints of the command line name its flags; here the next step is a command, too.
fn hint_of(error: &ShardError) -> Option<String> {
    match error.reason.as_str() {
        "MASS_REMOVAL" => Some("repeat it with {\"confirm_removals\": true} if that is meant".to_owned()),
        "ETAG_MISMATCH" => Some("read the group again and repeat it with the new etag in If-Match".to_owned()),
        _ => match error.code {
            Code::Unauthenticated | Code::PermissionDenied => {
                Some("nstance-admin cluster register-operator on the machine that runs serve".to_owned())
            }
            Code::Unavailable | Code::DeadlineExceeded => Some("nstance-admin check --only shards".to_owned()),
            _ => None,
        },
    }
}

/// What a shard's refusal means over HTTP.
pub(super) fn status_of(error: &ShardError) -> StatusCode {
    match (error.code, error.reason.as_str()) {
        (Code::InvalidArgument | Code::OutOfRange, _) => StatusCode::BAD_REQUEST,
        (Code::NotFound, _) => StatusCode::NOT_FOUND,
        (Code::Aborted, "ETAG_MISMATCH") => StatusCode::PRECONDITION_FAILED,
        (Code::AlreadyExists | Code::FailedPrecondition | Code::Aborted, _) => StatusCode::CONFLICT,
        (Code::ResourceExhausted, _) => StatusCode::TOO_MANY_REQUESTS,
        (Code::Unavailable, "STORE_UNAVAILABLE") | (Code::Internal, _) => StatusCode::INTERNAL_SERVER_ERROR,
        (Code::Unavailable, _) => StatusCode::SERVICE_UNAVAILABLE,
        (Code::DeadlineExceeded, _) => StatusCode::GATEWAY_TIMEOUT,
        // It does not let us in, or we do not understand it: nothing that the caller could change.
        _ => StatusCode::BAD_GATEWAY,
    }
}

pub(super) fn shard_error(error: &ShardError) -> Value {
    let mut value = view::error(error);
    value["status"] = status_of(error).as_u16().into();
    value["problems"] = error.problems.iter().map(view::problem).collect();
    value
}

fn errors(errors: &[ShardError]) -> Vec<Value> {
    errors.iter().map(shard_error).collect()
}

/// What one shard did.
pub(super) struct Done {
    pub status: StatusCode,
    pub document: Value,
}

impl Done {
    pub(super) fn new(status: StatusCode, document: Value) -> Self {
        Self { status, document }
    }
}

/// One entry per shard, each with its own code.
pub(super) fn gather(name: &str, answers: Answers<Done>) -> Result<Reply, Trouble> {
    let statuses: Vec<StatusCode> = answers.ok.iter().map(|(_, it)| it.status).collect();
    let status = match (statuses.first(), answers.errors.as_slice()) {
        (None, errors) => return Err(Trouble::of_shards(errors)),
        (Some(first), []) if statuses.iter().all(|it| it == first) => *first,
        (Some(_), []) => StatusCode::OK,
        (Some(_), _) => StatusCode::MULTI_STATUS,
    };
    if status == StatusCode::NOT_MODIFIED {
        let etags = answers.ok.iter().filter_map(|(_, it)| it.document["etag"].as_str());
        // One tag for all: etags of stores have their own quotes.
        return Ok(Reply::unchanged(&etags.map(|it| it.trim_matches('"')).collect::<Vec<_>>().join("+")));
    }
    let entries = answers.ok.into_iter().map(|(_, Done { status, mut document })| {
        document["code"] = status.as_u16().into();
        document
    });
    Ok(Reply::json(status, json!({name: entries.collect::<Vec<_>>(), "errors": errors(&answers.errors)})))
}

/// How old what each shard said is at most.
pub(super) fn times<T>(answers: &[(String, Dated<T>)]) -> Map<String, Value> {
    answers.iter().map(|(shard, it)| (shard.clone(), it.as_of.to_string().into())).collect()
}

/// The objects of all shards in one list.
pub(super) fn listed(name: &str, answers: Answers<Dated<Vec<Value>>>) -> Result<Reply, Trouble> {
    if answers.ok.is_empty() && !answers.errors.is_empty() {
        return Err(Trouble::of_shards(&answers.errors));
    }
    let status = if answers.errors.is_empty() { StatusCode::OK } else { StatusCode::MULTI_STATUS };
    let as_of = times(&answers.ok);
    let objects: Vec<Value> = answers.ok.into_iter().flat_map(|(_, objects)| objects.it).collect();
    Ok(Reply::json(status, json!({name: objects, "errors": errors(&answers.errors), "as_of": as_of})))
}

/// Shards that have no such object have nothing to say, unless none has it.
pub(super) fn of_those_that_have_it<T>(mut answers: Answers<T>) -> Answers<T> {
    if !answers.ok.is_empty() || answers.errors.iter().any(|it| it.code != Code::NotFound) {
        answers.errors.retain(|it| it.code != Code::NotFound);
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: Code, reason: &str) -> ShardError {
        ShardError::new("dev-2", code, "no").with_reason(reason)
    }

    fn status(ok: &[u16], errors: Vec<ShardError>) -> u16 {
        let done = |code: &u16| Done::new(StatusCode::from_u16(*code).unwrap(), json!({"etag": "e"}));
        let ok = ok.iter().map(|code| ("dev-1".to_owned(), done(code))).collect();
        gather("shards", Answers { ok, errors }).map_or_else(|it| it.status, |it| it.status).as_u16()
    }

    #[test]
    fn several_shards_make_one_status() {
        let lost = || error(Code::Unavailable, "UNREACHABLE");
        assert_eq!(status(&[200, 200], vec![]), 200);
        assert_eq!(status(&[202], vec![]), 202);
        assert_eq!(status(&[304, 304], vec![]), 304);
        assert_eq!(status(&[200, 304], vec![]), 200);
        assert_eq!(status(&[200], vec![lost()]), 207);
        assert_eq!(status(&[304], vec![lost()]), 207);
        assert_eq!(status(&[], vec![lost(), error(Code::NotFound, "")]), 503);
        assert_eq!(status(&[], vec![error(Code::DeadlineExceeded, ""), lost()]), 504);
    }

    #[test]
    fn refusals_keep_their_meaning() {
        for (code, reason, expected) in [
            (Code::InvalidArgument, "BAD_REQUEST", 400),
            (Code::NotFound, "NOT_FOUND", 404),
            (Code::FailedPrecondition, "MASS_REMOVAL", 409),
            (Code::Aborted, "ETAG_MISMATCH", 412),
            (Code::Aborted, "", 409),
            (Code::ResourceExhausted, "TOO_MANY_ON_DEMAND", 429),
            (Code::Unavailable, "STORE_UNAVAILABLE", 500),
            (Code::Internal, "", 500),
            (Code::Unavailable, "LEADER_CHANGED", 503),
            (Code::DeadlineExceeded, "", 504),
            (Code::Unimplemented, "", 502),
            (Code::Unauthenticated, "CERT_EXPIRED", 502),
        ] {
            assert_eq!(status_of(&error(code, reason)).as_u16(), expected, "{code:?} {reason}");
        }
    }

    #[test]
    fn absence_is_told_only_if_it_is_proven() {
        let errors = vec![error(Code::NotFound, ""), error(Code::Unavailable, "")];
        let answers = of_those_that_have_it(Answers::<()> { ok: vec![], errors });
        assert_eq!(Trouble::of_shards(&answers.errors).status.as_u16(), 503);
        let answers = of_those_that_have_it(Answers::<()> { ok: vec![], errors: vec![error(Code::NotFound, "")] });
        assert_eq!(Trouble::of_shards(&answers.errors).status.as_u16(), 404);
    }
}
