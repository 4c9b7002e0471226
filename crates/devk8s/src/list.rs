//! Lists, whole or page by page.

use std::sync::Arc;

use data_encoding::BASE64URL_NOPAD;
use http::StatusCode;
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    query::Query,
    resources::Resource,
    selector::{FieldSelector, LabelSelector, Selection},
    store::{Snapshot, Store},
};

/// Objects of one page.
pub(crate) struct Page {
    pub(crate) version: u64,
    pub(crate) objects: Vec<Arc<Value>>,
    pub(crate) next: Option<String>,
    pub(crate) n_remaining: Option<usize>,
}

pub(crate) fn selection(query: &Query, resource: &Resource, namespace: Option<&str>) -> Result<Selection, ApiError> {
    Ok(Selection {
        namespace: namespace.map(str::to_owned),
        labels: LabelSelector::parse(query.get("labelSelector"))?,
        fields: FieldSelector::parse(query.get("fieldSelector"), resource)?,
    })
}

pub(crate) fn list(store: &Store, resource: &Resource, selection: &Selection, query: &Query) -> Result<Page, ApiError> {
    let limit: usize = match query.get("limit") {
        "" => 0,
        text => text.parse().map_err(|_| ApiError::bad_request(format!("limit {text:?} is not a number")))?,
    };
    let token = query.get("continue");
    if !token.is_empty() {
        return next_page(store, token, limit, selection);
    }
    store.transact(|txn| {
        check_version(query, txn.version())?;
        let objects = txn.list(&resource.id, selection.namespace.as_deref());
        let objects: Vec<_> = objects.into_iter().filter(|it| selection.matches(it)).collect();
        let version = txn.version();
        if limit == 0 || objects.len() <= limit {
            return Ok(Page { version, objects, next: None, n_remaining: None });
        }
        let snapshot = Arc::new(Snapshot { version, objects });
        let number = txn.keep(snapshot.clone());
        Ok(page(&snapshot, number, 0, limit, selection))
    })
}

fn page(snapshot: &Snapshot, number: u64, start: usize, limit: usize, selection: &Selection) -> Page {
    let rest = snapshot.objects.get(start..).unwrap_or_default();
    let objects: Vec<_> = rest.iter().take(if limit == 0 { usize::MAX } else { limit }).cloned().collect();
    let n_remaining = rest.len() - objects.len();
    let next = (0 < n_remaining).then(|| {
        let token =
            json!({ "v": "meta.k8s.io/v1", "rv": snapshot.version, "list": number, "start": start + objects.len() });
        BASE64URL_NOPAD.encode(token.to_string().as_bytes())
    });
    // A selection may not count what it leaves out, say the rules of the field.
    let n_remaining = (next.is_some() && !selection.is_partial()).then_some(n_remaining);
    Page { version: snapshot.version, objects, next, n_remaining }
}

fn next_page(store: &Store, token: &str, limit: usize, selection: &Selection) -> Result<Page, ApiError> {
    let bad = || ApiError::bad_request("continue key is not valid");
    let token = BASE64URL_NOPAD.decode(token.as_bytes()).map_err(|_| bad())?;
    let token: Value = serde_json::from_slice(&token).map_err(|_| bad())?;
    let (number, start) = (token["list"].as_u64().ok_or_else(bad)?, token["start"].as_u64().ok_or_else(bad)?);
    let gone = || {
        ApiError::expired(
            "The provided continue parameter is too old to display a consistent list result. You can start a new list \
             without the continue parameter",
        )
    };
    let snapshot = store.transact(|txn| txn.kept(number)).ok_or_else(gone)?;
    if token["rv"].as_u64() != Some(snapshot.version) {
        // A token of an earlier run of this server.
        return Err(gone());
    }
    Ok(page(&snapshot, number, usize::try_from(start).unwrap_or(usize::MAX), limit, selection))
}

/// Only the present state is known; older ones are gone, newer ones are not there yet.
fn check_version(query: &Query, current: u64) -> Result<(), ApiError> {
    let (version, matching) = (query.get("resourceVersion"), query.get("resourceVersionMatch"));
    if version.is_empty() {
        return if matching.is_empty() {
            Ok(())
        } else {
            Err(forbidden_option("resourceVersionMatch is forbidden unless resourceVersion is provided"))
        };
    }
    let wanted: u64 = version.parse().map_err(|_| invalid_version(version))?;
    if current < wanted {
        return Err(too_large(wanted, current));
    }
    match matching {
        "" | "NotOlderThan" => Ok(()),
        "Exact" if wanted == 0 => {
            Err(forbidden_option("resourceVersionMatch \"Exact\" is forbidden for resourceVersion \"0\""))
        }
        "Exact" if wanted == current => Ok(()),
        "Exact" => Err(ApiError::expired(format!("The resourceVersion for the provided list is too old: {wanted}"))),
        other => Err(forbidden_option(&format!("resourceVersionMatch {other:?} is not supported"))),
    }
}

pub(crate) fn invalid_version(version: &str) -> ApiError {
    ApiError::bad_request(format!("Invalid value: {version:?}: strconv.ParseUint: parsing {version:?}: invalid syntax"))
}

/// An option that may not be used this way.
pub(crate) fn forbidden_option(why: &str) -> ApiError {
    ApiError::new(
        StatusCode::UNPROCESSABLE_ENTITY,
        "Invalid",
        format!("ListOptions.meta.k8s.io \"\" is invalid: {why}"),
    )
}

fn too_large(wanted: u64, current: u64) -> ApiError {
    let message = format!("Too large resource version: {wanted}, current: {current}");
    let error = ApiError::new(StatusCode::GATEWAY_TIMEOUT, "Timeout", message);
    let mut error = error.because("ResourceVersionTooLarge", "Too large resource version", None);
    error.details["retryAfterSeconds"] = json!(1);
    error
}
