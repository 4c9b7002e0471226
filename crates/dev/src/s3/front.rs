//! What stands between the socket and the protocol library: whole bodies, callers instead of signatures, request
//! ids, the control endpoints under `/-/`, and connections that end without an answer.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use bytes::Bytes;
use data_encoding::HEXLOWER_PERMISSIVE;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
    http::request::Parts,
};
use s3s::{
    Body, S3Error, S3Result,
    crypto::{Checksum as _, Sha256},
    s3_error,
    service::S3Service,
};

use super::{
    caller, chunked,
    disk::{Disk, DiskError},
    faults::{FaultRule, Faults},
    gate::Ticket,
    stats::Counts,
};

/// Bodies are kept in memory; larger objects go in parts.
const MAX_BODY_BYTES: usize = 1024 * 1024 * 1024;
const CONTROL: &str = "/-/";

/// Makes the HTTP library close the connection.
#[derive(Debug, Clone, Copy, thiserror::Error)]
pub(super) enum NoAnswer {
    #[error("dropped by a fault rule")]
    Dropped,
    #[error("the client went away amid its request")]
    Hungup,
    #[error("the answer could not be written")]
    Unwritable,
}

pub(super) struct Front {
    pub(super) service: S3Service,
    pub(super) require_auth: bool,
    pub(super) disk: Arc<Disk>,
    pub(super) faults: Arc<Faults>,
    pub(super) counts: Arc<Counts>,
    pub(super) n_requests: AtomicU64,
}

impl Front {
    pub(super) async fn handle(&self, request: Request<Incoming>) -> Result<Response<Body>, NoAnswer> {
        let (parts, body) = request.into_parts();
        let request_id = format!("{:016X}", self.n_requests.fetch_add(1, Ordering::Relaxed) + 1);
        let answer = match Limited::new(body, MAX_BODY_BYTES).collect().await {
            Ok(body) if parts.uri.path().starts_with(CONTROL) => {
                return Ok(self.control(&parts, body.to_bytes()).await);
            }
            Ok(body) => self.operate(parts, body.to_bytes()).await?,
            Err(err) if err.is::<LengthLimitError>() => refusal(s3_error!(EntityTooLarge))?,
            Err(_) => return Err(NoAnswer::Hungup),
        };
        let answer = finish(answer, &request_id).await;
        self.counts.answer(answer.status().as_u16());
        Ok(answer)
    }

    async fn operate(&self, mut parts: Parts, mut body: Bytes) -> Result<Response<Body>, NoAnswer> {
        let ticket = Ticket::new(&caller::access_key(&parts.headers, &parts.uri));
        if !self.require_auth {
            body = match unwrap(&mut parts, body) {
                Ok(body) => body,
                Err(err) => return refusal(err),
            };
        }
        parts.extensions.insert(ticket.clone());
        let answer = self.service.call(Request::from_parts(parts, Body::from(body))).await;
        if ticket.is_dropped() {
            return Err(NoAnswer::Dropped);
        }
        answer.map_err(|_| NoAnswer::Unwritable)
    }

    async fn control(&self, parts: &Parts, body: Bytes) -> Response<Body> {
        let path = parts.uri.path();
        let fault = path.strip_prefix("/-/faults/");
        match (&parts.method, path) {
            (&Method::GET | &Method::HEAD, "/-/health") => json(StatusCode::OK, &serde_json::json!({"ok": true})),
            (&Method::GET, "/-/stats") => json(StatusCode::OK, &self.counts.show()),
            (&Method::DELETE, "/-/stats") => {
                self.counts.reset();
                json(StatusCode::OK, &self.counts.show())
            }
            (&Method::GET, "/-/faults") => json(StatusCode::OK, &self.faults.show()),
            (&Method::POST, "/-/faults") => match parse_rules(&body) {
                Ok(rules) => match self.add_faults(rules).await {
                    Ok(()) => json(StatusCode::OK, &self.faults.show()),
                    Err(err) => problem(StatusCode::INTERNAL_SERVER_ERROR, &err),
                },
                Err(err) => problem(StatusCode::BAD_REQUEST, &err),
            },
            (&Method::DELETE, "/-/faults") => {
                json(StatusCode::OK, &serde_json::json!({"removed": self.faults.remove(None)}))
            }
            (&Method::DELETE, _) if fault.is_some() => match self.faults.remove(fault) {
                0 => json(StatusCode::NOT_FOUND, &serde_json::json!({"error": "no such rule"})),
                n => json(StatusCode::OK, &serde_json::json!({"removed": n})),
            },
            _ => json(StatusCode::NOT_FOUND, &serde_json::json!({"error": "no such endpoint"})),
        }
    }

    pub(super) async fn add_faults(&self, rules: Vec<FaultRule>) -> Result<(), DiskError> {
        let mut snapshot = None;
        if rules.iter().any(|rule| rule.stale_list) {
            let disk = Arc::clone(&self.disk);
            let taken = tokio::task::spawn_blocking(move || disk.snapshot()).await;
            snapshot = Some(Arc::new(taken.unwrap_or(Err(DiskError::Closed))?));
        }
        self.faults.add(rules, snapshot);
        Ok(())
    }
}

/// A list of rules, or just one.
fn parse_rules(body: &[u8]) -> serde_json::Result<Vec<FaultRule>> {
    match body.trim_ascii_start().first() {
        Some(b'{') => serde_json::from_slice(body).map(|rule| vec![rule]),
        _ => serde_json::from_slice(body),
    }
}

/// Makes an unsigned plain request of whatever came.
fn unwrap(parts: &mut Parts, mut body: Bytes) -> S3Result<Bytes> {
    let headers = &mut parts.headers;
    if chunked::is_chunked(headers) {
        let (whole, trailers) = chunked::decode(body).map_err(|err| s3_error!(err, IncompleteBody))?;
        let expected = headers.get("x-amz-decoded-content-length").and_then(|it| it.to_str().ok()?.parse().ok());
        if expected.is_some_and(|expected: usize| expected != whole.len()) {
            return Err(s3_error!(IncompleteBody));
        }
        body = whole;
        headers.extend(trailers);
        headers.remove("x-amz-decoded-content-length");
    } else if let Some(claimed) = headers.get("x-amz-content-sha256")
        && let Ok(claimed) = HEXLOWER_PERMISSIVE.decode(claimed.as_bytes())
        && claimed != Sha256::checksum(&body).as_ref()
    {
        return Err(s3_error!(BadDigest, "x-amz-content-sha256 does not match the body"));
    }
    headers.remove(header::TRANSFER_ENCODING);
    if !body.is_empty() || headers.contains_key(header::CONTENT_LENGTH) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    caller::strip_signature(headers, &mut parts.uri);
    Ok(body)
}

/// Gives the answer its id, in the header and in the body of an error, for people who compare logs.
async fn finish(answer: Response<Body>, request_id: &str) -> Response<Body> {
    let (mut parts, mut body) = answer.into_parts();
    if let Ok(id) = HeaderValue::from_str(request_id) {
        parts.headers.insert("x-amz-request-id", id);
    }
    parts.headers.insert(header::SERVER, HeaderValue::from_static("nstance-dev-s3"));
    if parts.status == StatusCode::NOT_MODIFIED {
        parts.headers.remove(header::CONTENT_TYPE);
        parts.headers.remove(header::CONTENT_LENGTH);
        body = Body::empty();
    } else if parts.status.is_client_error() || parts.status.is_server_error() {
        let text = BodyExt::collect(body).await.map(|it| it.to_bytes()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let text = text.replacen("</Error>", &format!("<RequestId>{request_id}</RequestId></Error>"), 1);
        parts.headers.insert(header::CONTENT_LENGTH, HeaderValue::from(text.len()));
        body = Body::from(text);
    }
    Response::from_parts(parts, body)
}

fn refusal(err: S3Error) -> Result<Response<Body>, NoAnswer> {
    err.to_http_response().map_err(|_| NoAnswer::Unwritable)
}

fn problem(status: StatusCode, err: &dyn std::error::Error) -> Response<Body> {
    json(status, &serde_json::json!({"error": err.to_string()}))
}

fn json(status: StatusCode, value: &impl serde::Serialize) -> Response<Body> {
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    let mut answer = Response::new(Body::from(text));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}
