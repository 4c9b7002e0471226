//! The one place where refusals become gRPC statuses. Each carries a code, a text for people and a typed reason.

use nstance_proto::rpc;
use prost::Message;
use tonic::{Code, Status};

/// The domain of every reason.
pub const DOMAIN: &str = "nstance";

/// A refusal before it is put on the wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub code: Code,
    pub reason: &'static str,
    pub message: String,
}

impl Refusal {
    pub fn new(code: Code, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    pub fn unauthenticated(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Code::Unauthenticated, reason, message)
    }

    pub fn denied(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Code::PermissionDenied, reason, message)
    }

    pub fn unavailable(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Code::Unavailable, reason, message)
    }

    pub fn invalid(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, reason, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, "NOT_FOUND", message)
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let info = rpc::ErrorInfo {
            reason: refusal.reason.to_owned(),
            domain: DOMAIN.to_owned(),
            metadata: Default::default(),
        };
        let details = rpc::Status {
            code: refusal.code as i32,
            message: refusal.message.clone(),
            details: vec![prost_types::Any {
                type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
                value: info.encode_to_vec(),
            }],
        };
        Self::with_details(refusal.code, refusal.message, details.encode_to_vec().into())
    }
}

/// The typed reason of a status, if it carries one of ours.
pub fn reason_of(status: &Status) -> Option<String> {
    let details = rpc::Status::decode(status.details()).ok()?;
    details
        .details
        .iter()
        .filter(|any| any.type_url.ends_with("google.rpc.ErrorInfo"))
        .filter_map(|any| rpc::ErrorInfo::decode(any.value.as_slice()).ok())
        .find(|info| info.domain == DOMAIN)
        .map(|info| info.reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_survive_the_wire() {
        let status: Status = Refusal::denied("WRONG_ROLE", "use port 8994").into();
        assert_eq!(status.code(), Code::PermissionDenied);
        assert_eq!(status.message(), "use port 8994");
        assert_eq!(reason_of(&status).as_deref(), Some("WRONG_ROLE"));
    }
}
