//! What a status says beside its code: the typed reason, all problems of an input, when to come again.

use std::time::Duration;

use prost::Message as _;
use tonic::Status;

use crate::{rpc, v1};

/// Our domain in `google.rpc.ErrorInfo`; reasons of others are not ours to understand.
pub const DOMAIN: &str = "nstance";

/// Metadata of a status: replaces the bound of the caller's next wait, in milliseconds.
pub const RETRY_HINT: &str = "nstance-retry-ms";

/// The typed reason of a status, if it carries one of ours.
pub fn reason_of(status: &Status) -> Option<String> {
    let details = rpc::Status::decode(status.details()).ok()?;
    details
        .details
        .iter()
        .filter(|any| any.type_url.ends_with("/google.rpc.ErrorInfo"))
        .filter_map(|any| rpc::ErrorInfo::decode(any.value.as_slice()).ok())
        .find(|info| info.domain == DOMAIN)
        .map(|info| info.reason)
}

/// The problems of a refused request.
pub fn problems_of(status: &Status) -> Vec<v1::Problem> {
    let details = rpc::Status::decode(status.details()).unwrap_or_default().details;
    details
        .iter()
        .filter(|any| any.type_url.ends_with("/nstance.v1.Problems"))
        .filter_map(|any| v1::Problems::decode(any.value.as_slice()).ok())
        .flat_map(|problems| problems.problems)
        .collect()
}

/// Replaces the bound of the caller's next wait.
pub fn retry_of(status: &Status) -> Option<Duration> {
    let value = status.metadata().get(RETRY_HINT)?;
    Some(Duration::from_millis(value.to_str().ok()?.parse().ok()?))
}
