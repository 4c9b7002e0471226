//! `token`: tokens of service accounts, and what they say. They are not signed; only this server gives anything on them.

use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use http::StatusCode;
use nstance_core::{ports::clock::random, time::Timestamp};
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    object::{self, Key, seconds},
    resources::Served,
    store::Txn,
};

/// By this our own tokens are told from others.
const ISSUER: &str = "https://kubernetes.default.svc/nstance-dev";

/// What a client gets that asks for no time.
const DEFAULT_SECONDS: u64 = 3600;

/// Kubernetes gives no shorter ones.
const MIN_SECONDS: u64 = 600;

pub(crate) fn create(txn: &Txn<'_>, served: &Served, key: &Key, request: &Value) -> Result<Value, ApiError> {
    let resource = &*served.resource;
    let account = txn.get(resource, key).ok_or_else(|| ApiError::not_found(resource, &key.name))?;
    let n_seconds = match &request["spec"]["expirationSeconds"] {
        Value::Null => DEFAULT_SECONDS,
        value => value.as_u64().unwrap_or(0),
    };
    if n_seconds < MIN_SECONDS {
        let why = format!("Invalid value: {n_seconds}: may not specify a duration less than 10 minutes");
        return Err(ApiError::invalid(resource, &key.name, "spec.expirationSeconds", &why));
    }
    let now = txn.store.clock.now();
    let end = now.plus(Duration::from_secs(n_seconds));
    let audiences = match request["spec"]["audiences"].as_array() {
        Some(audiences) if !audiences.is_empty() => json!(audiences),
        _ => json!([ISSUER]),
    };
    let id: [u8; 16] = random(&txn.store.entropy);
    let claims = json!({
        "iss": ISSUER, "sub": format!("system:serviceaccount:{}:{}", key.namespace, key.name), "aud": audiences,
        "iat": now.as_millis() / 1000, "nbf": now.as_millis() / 1000, "exp": end.as_millis() / 1000,
        "kubernetes.io": {
            "namespace": key.namespace, "serviceaccount": { "name": key.name, "uid": object::uid(&account) },
        },
    });
    let encode = |text: &str| BASE64URL_NOPAD.encode(text.as_bytes());
    let head = json!({ "alg": "none", "typ": "JWT" }).to_string();
    let token = format!("{}.{}.{}", encode(&head), encode(&claims.to_string()), BASE64URL_NOPAD.encode(&id));
    Ok(json!({
        "kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1",
        "metadata": { "name": key.name, "namespace": key.namespace, "creationTimestamp": seconds(now) },
        "spec": { "audiences": audiences, "expirationSeconds": n_seconds, "boundObjectRef": null },
        "status": { "token": token, "expirationTimestamp": seconds(end) },
    }))
}

/// Who a bearer token names. One of ours that is over is refused.
pub(crate) fn caller(token: &str, now: Timestamp) -> Result<String, ApiError> {
    let Some(claims) = claims(token) else { return Ok(token.to_owned()) };
    let is_over = claims["exp"].as_i64().is_some_and(|exp| exp.saturating_mul(1000) <= now.as_millis());
    if claims["iss"] == ISSUER && is_over {
        return Err(ApiError::new(StatusCode::UNAUTHORIZED, "Unauthorized", "Unauthorized"));
    }
    Ok(claims["sub"].as_str().unwrap_or(token).to_owned())
}

fn claims(token: &str) -> Option<Value> {
    let mut parts = token.split('.');
    let (Some(_), Some(claims), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return None;
    };
    serde_json::from_slice(&BASE64URL_NOPAD.decode(claims.as_bytes()).ok()?).ok()
}
