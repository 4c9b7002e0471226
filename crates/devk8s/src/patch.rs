//! Patches: JSON patch, merge patch, strategic merge patch. Server-side apply has a module of its own.

pub(crate) mod apply;
mod fields;
mod lists;
mod strategic;

use http::StatusCode;
use serde_json::Value;

use crate::{error::ApiError, resources::Resource};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchKind {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchKind {
    /// By the content type of a request. Kinds of definitions have no strategic merge, as on a real API server.
    pub(crate) fn of(content_type: &str, resource: &Resource) -> Result<Self, ApiError> {
        match content_type.split(';').next().unwrap_or("").trim() {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            "application/strategic-merge-patch+json" if !resource.custom => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            _ => Err(ApiError::unsupported_media_type(
                "the body of the request was in an unknown format - accepted media types include: \
                 application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
            )),
        }
    }
}

/// Applies one of the first three kinds.
pub(crate) fn patch(kind: PatchKind, object: &Value, body: Value) -> Result<Value, ApiError> {
    let mut object = object.clone();
    match kind {
        PatchKind::Json => {
            let refused = |error: &dyn std::fmt::Display| {
                let message = format!("the server rejected our request due to an error in our request: {error}");
                ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message)
            };
            let patch: json_patch::Patch = serde_json::from_value(body)
                .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
            json_patch::patch(&mut object, &patch).map_err(|error| refused(&error))?;
        }
        PatchKind::Merge => {
            if !body.is_object() {
                return Err(ApiError::bad_request("error decoding patch: a merge patch is a JSON object"));
            }
            json_patch::merge(&mut object, &body);
        }
        PatchKind::Strategic | PatchKind::Apply => strategic::merge(&mut object, &body),
    }
    if object.is_object() { Ok(object) } else { Err(ApiError::bad_request("the patch leaves no object")) }
}
