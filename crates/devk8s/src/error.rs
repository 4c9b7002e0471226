//! Refusals, as the `metav1.Status` objects that Kubernetes clients understand.

use http::StatusCode;
use serde_json::{Value, json};

use crate::resources::Resource;

#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub(crate) struct ApiError {
    pub(crate) code: StatusCode,
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) details: Value,
}

/// The `details` that name one object.
fn object_details(resource: &Resource, name: &str) -> Value {
    let mut details = json!({ "name": name, "kind": resource.plural });
    if !resource.group.is_empty() {
        details["group"] = json!(resource.group);
    }
    details
}

impl ApiError {
    pub(crate) fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: Value::Null }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub(crate) fn not_found(resource: &Resource, name: &str) -> Self {
        let mut error = Self::new(StatusCode::NOT_FOUND, "NotFound", format!("{} {name:?} not found", resource.id));
        error.details = object_details(resource, name);
        error
    }

    /// A path that is not served at all.
    pub(crate) fn no_such_path() -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", "the server could not find the requested resource")
    }

    pub(crate) fn already_exists(resource: &Resource, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", resource.id);
        let mut error = Self::new(StatusCode::CONFLICT, "AlreadyExists", message);
        error.details = object_details(resource, name);
        error
    }

    pub(crate) fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", resource.id);
        let mut error = Self::new(StatusCode::CONFLICT, "Conflict", message);
        error.details = object_details(resource, name);
        error
    }

    pub(crate) fn modified(resource: &Resource, name: &str) -> Self {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    pub(crate) fn other_uid(resource: &Resource, name: &str, wanted: &str, found: &str) -> Self {
        let why = format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {found}");
        Self::conflict(resource, name, &why)
    }

    pub(crate) fn invalid(resource: &Resource, name: &str, field: &str, why: &str) -> Self {
        let group = if resource.group.is_empty() { String::new() } else { format!(".{}", resource.group) };
        let message = format!("{}{group} {name:?} is invalid: {field}: {why}", resource.kind);
        let mut error = Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message);
        error.details = object_details(resource, name);
        error.details["kind"] = json!(resource.kind);
        error.details["causes"] = json!([{ "reason": "FieldValueInvalid", "message": why, "field": field }]);
        error
    }

    pub(crate) fn forbidden(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!("{} {name:?} is forbidden: {why}", resource.id);
        let mut error = Self::new(StatusCode::FORBIDDEN, "Forbidden", message);
        error.details = object_details(resource, name);
        error
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", message)
    }

    pub(crate) fn unsupported_media_type(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message)
    }

    /// A resource version that is no longer, or not yet, known.
    pub(crate) fn expired(message: impl Into<String>) -> Self {
        Self::new(StatusCode::GONE, "Expired", message)
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", message)
    }

    /// Adds a cause to the details.
    pub(crate) fn because(mut self, reason: &str, message: &str, field: Option<&str>) -> Self {
        if !self.details.is_object() {
            self.details = json!({});
        }
        if !self.details["causes"].is_array() {
            self.details["causes"] = json!([]);
        }
        let mut cause = json!({ "reason": reason, "message": message });
        if let Some(field) = field {
            cause["field"] = json!(field);
        }
        if let Some(causes) = self.details["causes"].as_array_mut() {
            causes.push(cause);
        }
        self
    }

    pub(crate) fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason,
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status["code"] = json!(self.code.as_u16());
        status
    }
}
