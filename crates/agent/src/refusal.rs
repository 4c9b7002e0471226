//! What a server's "no" means for the agent. The reason decides, not the code: codes are for people and proxies.

use std::{error::Error, time::Duration};

use nstance_proto::refusal::{reason_of, retry_of};
use tonic::{Code, Status, TimeoutExpired};

/// A status that a server sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("server refused with {code:?} {reason}: {message}")]
pub(crate) struct Refusal {
    pub(crate) code: Code,
    /// Empty if the server gave none.
    pub(crate) reason: String,
    pub(crate) message: String,
    /// Replaces the bound of the next wait.
    pub(crate) retry: Option<Duration>,
}

/// How a call went wrong.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// The connection failed under the call.
    #[error("connection lost")]
    Lost(#[source] Status),
    /// The time for the call is over. That says nothing about the connection.
    #[error("no answer in time")]
    Late,
    #[error(transparent)]
    Refused(Refusal),
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        // Only what was made on this side has a cause; a status off the wire is just itself.
        match status.source() {
            None => Self::Refused(Refusal::of(&status)),
            Some(cause) if chain(cause).any(|it| it.is::<TimeoutExpired>()) => Self::Late,
            Some(_) => Self::Lost(status),
        }
    }
}

/// An error and all that caused it.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&it| it.source())
}

impl Refusal {
    pub(crate) fn of(status: &Status) -> Self {
        Self {
            code: status.code(),
            reason: reason_of(status).unwrap_or_default(),
            message: status.message().to_owned(),
            retry: retry_of(status),
        }
    }

    /// What it means during registration.
    pub(crate) fn on_registration(&self) -> Verdict {
        match self.reason.as_str() {
            "BAD_REQUEST" | "NONCE_INVALID" | "NONCE_WRONG_KIND" | "NONCE_EXPIRED" | "NONCE_SUPERSEDED"
            | "NONCE_USED" | "WRONG_CLUSTER" | "WRONG_SHARD" | "INSTANCE_UNKNOWN" | "INSTANCE_DELETED" => Verdict::Park,
            _ => Verdict::Retry,
        }
    }

    /// What it means when rejoining with the old key.
    pub(crate) fn on_rejoin(&self) -> Verdict {
        match self.reason.as_str() {
            "INSTANCE_DELETED" => Verdict::Dismiss,
            "BAD_REQUEST" | "REJOIN_COUNTER" | "REJOIN_TOO_OLD" => Verdict::Park,
            _ => Verdict::Retry,
        }
    }

    /// What it means on a stream or call of the session.
    pub(crate) fn on_session(&self) -> Verdict {
        match self.reason.as_str() {
            "CERT_EXPIRED" | "CERT_INVALID" | "CERT_SUPERSEDED" | "CERT_MALFORMED" => Verdict::Rejoin,
            "INSTANCE_DELETED" => Verdict::Dismiss,
            "WRONG_ROLE" | "NOT_YOUR_INSTANCE" => Verdict::Park,
            "SUPERSEDED" => Verdict::Shared,
            "LEADER_CHANGED" | "SHUTTING_DOWN" => Verdict::HandOver,
            "NOT_READY" | "LEASE_STALLED" => Verdict::Reconnect,
            _ => Verdict::Retry,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Ask again later, here or elsewhere.
    Retry,
    /// This server cannot help now; find another.
    Reconnect,
    /// The server goes, another comes at once.
    HandOver,
    /// Nothing will change by asking: be quiet until a person does something.
    Park,
    /// The certificate is no longer good; the key may be.
    Rejoin,
    /// The server no longer counts on this machine.
    Dismiss,
    /// Somebody else speaks in our name.
    Shared,
}

#[cfg(test)]
mod tests {
    use nstance_proto::rpc;
    use prost::Message as _;

    use super::*;

    fn status(reason: &str, domain: &str) -> Status {
        let info = rpc::ErrorInfo { reason: reason.into(), domain: domain.into(), ..Default::default() };
        let any = prost_types::Any {
            type_url: "type.googleapis.com/google.rpc.ErrorInfo".into(),
            value: info.encode_to_vec(),
        };
        let details = rpc::Status { code: 7, message: "no".into(), details: vec![any] }.encode_to_vec();
        Status::with_details(Code::PermissionDenied, "no", details.into())
    }

    #[test]
    fn reasons_are_read_from_the_details() {
        let refusal = Refusal::of(&status("NONCE_USED", "nstance"));
        assert_eq!(refusal.reason, "NONCE_USED");
        assert_eq!(refusal.on_registration(), Verdict::Park);
        assert_eq!(Refusal::of(&status("NONCE_USED", "example.com")).reason, "");
        assert_eq!(Refusal::of(&Status::internal("x")).on_registration(), Verdict::Retry);
        assert_eq!(Refusal::of(&Status::with_details(Code::Unknown, "", b"junk".to_vec().into())).reason, "");
    }

    #[test]
    fn one_reason_means_different_things_at_different_times() {
        let refusal = Refusal::of(&status("INSTANCE_DELETED", "nstance"));
        assert_eq!(refusal.on_registration(), Verdict::Park);
        assert_eq!(refusal.on_rejoin(), Verdict::Dismiss);
        assert_eq!(refusal.on_session(), Verdict::Dismiss);
        let late = Refusal::of(&status("NONCE_NOT_YET_VALID", "nstance"));
        assert_eq!(late.on_registration(), Verdict::Retry);
        for reason in ["CERT_EXPIRED", "CERT_INVALID", "CERT_SUPERSEDED"] {
            assert_eq!(Refusal::of(&status(reason, "nstance")).on_session(), Verdict::Rejoin);
        }
    }

    /// As the transport wraps what goes wrong in it.
    #[derive(Debug, thiserror::Error)]
    #[error("transport error")]
    struct Wrapped(#[source] TimeoutExpired);

    /// Of the two timers of a call, ours and the transport's, either may be the first.
    #[test]
    fn call_that_is_late_is_not_a_lost_connection() {
        let late = Status::from_error(Box::new(TimeoutExpired(())));
        assert!(matches!(CallError::from(late), CallError::Late));
        let wrapped = Wrapped(TimeoutExpired(()));
        assert!(matches!(CallError::from(Status::from_error(Box::new(wrapped))), CallError::Late));
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(matches!(CallError::from(Status::from_error(Box::new(broken))), CallError::Lost(_)));
        let told = Status::deadline_exceeded("by the server");
        assert!(matches!(CallError::from(told), CallError::Refused(_)));
    }

    #[test]
    fn retry_hint_is_read_from_the_trailer() {
        let mut status = Status::unavailable("full");
        status.metadata_mut().insert("nstance-retry-ms", "1500".parse().unwrap());
        assert_eq!(Refusal::of(&status).retry, Some(Duration::from_millis(1500)));
    }
}
