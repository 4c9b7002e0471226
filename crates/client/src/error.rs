//! Why a shard gave no answer or refused a request.

use std::time::Duration;

use nstance_proto::{
    refusal::{problems_of, reason_of},
    v1::Problem,
};
use tonic::{Code, Status};

/// Metadata of every answer: the id by which the server logs the request.
const REQUEST_ID: &str = "nstance-request-id";

/// The failure of one request to one shard.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{shard}: {message}")]
pub struct ShardError {
    pub shard: String,
    pub code: Code,
    /// The server's typed reason, or ours if no server was reached. May be empty.
    pub reason: String,
    pub message: String,
    /// Everything that is wrong with an invalid request.
    pub problems: Vec<Problem>,
    /// The id of the request in the server's log. Empty if no server was reached.
    pub request_id: Box<str>,
}

/// What a person can do about a [`ShardError`]. The caller chooses the words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// The shard does not accept this identity, or we do not trust the server: register a new identity.
    RegisterIdentity,
    /// The identity is valid but not an operator's, or not of the right tenant.
    UseOperatorIdentity,
    /// The shard's leader cannot be reached: check address, network and server.
    CheckShard,
    /// Allow a longer timeout, or check the shard.
    RaiseTimeout,
    /// List the instances; those that were deleted long ago are not kept.
    ListInstances,
    ListGroups,
    /// Look at the object that exists already.
    InspectExisting,
    /// Read the object's current version and decide again.
    ReadCurrentVersion,
}

impl ShardError {
    pub fn new(shard: &str, code: Code, message: impl Into<String>) -> Self {
        Self {
            shard: shard.to_owned(),
            code,
            reason: String::new(),
            message: message.into(),
            problems: Vec::new(),
            request_id: Box::default(),
        }
    }

    #[must_use]
    pub fn with_reason(mut self, reason: &str) -> Self {
        reason.clone_into(&mut self.reason);
        self
    }

    /// The shard answered with this status.
    pub fn from_status(shard: &str, status: &Status) -> Self {
        Self {
            shard: shard.to_owned(),
            code: status.code(),
            reason: reason_of(status).unwrap_or_default(),
            message: status.message().to_owned(),
            problems: problems_of(status),
            request_id: status.metadata().get(REQUEST_ID).and_then(|it| it.to_str().ok()).unwrap_or_default().into(),
        }
    }

    /// The shard did not answer in time.
    pub fn timed_out(shard: &str, timeout: Duration) -> Self {
        Self::new(shard, Code::DeadlineExceeded, format!("no answer within {} s", timeout.as_secs_f64()))
    }

    /// What to do about it, if there is one obvious step.
    pub fn next_step(&self) -> Option<NextStep> {
        match self.code {
            Code::Unauthenticated => Some(NextStep::RegisterIdentity),
            Code::PermissionDenied => Some(NextStep::UseOperatorIdentity),
            Code::Unavailable => Some(NextStep::CheckShard),
            Code::DeadlineExceeded => Some(NextStep::RaiseTimeout),
            Code::NotFound if self.message.contains("no instance") => Some(NextStep::ListInstances),
            Code::NotFound if self.message.contains("no group") => Some(NextStep::ListGroups),
            Code::AlreadyExists => Some(NextStep::InspectExisting),
            Code::Aborted if self.reason == "ETAG_MISMATCH" => Some(NextStep::ReadCurrentVersion),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_next_step_where_one_is_obvious() {
        let next = |code: Code, reason: &str, message: &str| {
            ShardError::new("dev-1", code, message).with_reason(reason).next_step()
        };
        let no_group = next(Code::NotFound, "NOT_FOUND", "there is no group instance-1");
        assert_eq!(no_group, Some(NextStep::ListGroups));
        assert_eq!(next(Code::NotFound, "", "there is no instance x"), Some(NextStep::ListInstances));
        assert_eq!(next(Code::Aborted, "ETAG_MISMATCH", "group web is at 2-1"), Some(NextStep::ReadCurrentVersion));
        assert_eq!(next(Code::Aborted, "", "try again"), None);
    }

    #[test]
    fn an_error_carries_the_id_by_which_the_server_logs_the_request() {
        let mut status = Status::new(Code::Internal, "no");
        assert_eq!(&*ShardError::from_status("dev-1", &status).request_id, "");
        status.metadata_mut().insert(REQUEST_ID, "5f0c".parse().unwrap());
        assert_eq!(&*ShardError::from_status("dev-1", &status).request_id, "5f0c");
    }
}
