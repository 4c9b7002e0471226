//! The one place where refusals become gRPC statuses. Each carries a code, a text for people and a typed reason.

use nstance_config::{Problem, problems::MAX_PRINTED};
pub use nstance_proto::refusal::{problems_of, reason_of};
use nstance_proto::{refusal::DOMAIN, rpc, v1};
use prost::Message;
use tonic::{Code, Status};

/// A status travels in headers, and clients take no more than 16 KiB of those unless told otherwise. The text is there
/// twice, escaped to three times its length once, and details grow by a third.
const MAX_TEXT: usize = 1024;
const MAX_DETAILS: usize = 6 * 1024;

/// A refusal before it is put on the wire.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub code: Code,
    pub reason: &'static str,
    pub message: String,
    /// Everything that is wrong with a bad input.
    pub problems: Vec<Problem>,
}

impl Refusal {
    pub fn new(code: Code, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), problems: Vec::new() }
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

    /// A bad request: all of its problems, in the text and typed.
    pub fn bad_request(problems: Vec<Problem>) -> Self {
        let mut message = String::new();
        for (n, it) in problems.iter().enumerate() {
            let path = if it.path.is_empty() { String::new() } else { format!("{}: ", it.path) };
            let text = format!("{}{path}{}", if n == 0 { "" } else { "; " }, it.message);
            if 0 < n && MAX_TEXT < message.len() + text.len() {
                message.push_str(&format!("; and {} more", problems.len() - n));
                break;
            }
            message.push_str(&cut(&text, MAX_TEXT));
        }
        Self { problems, ..Self::invalid("BAD_REQUEST", message) }
    }

    pub fn precondition(reason: &'static str, message: impl Into<String>) -> Self {
        Self::new(Code::FailedPrecondition, reason, message)
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
            details: std::iter::once(any("google.rpc.ErrorInfo", &info))
                .chain((!refusal.problems.is_empty()).then(|| any("nstance.v1.Problems", &wire(&refusal.problems))))
                .collect(),
        };
        Self::with_details(refusal.code, refusal.message, details.encode_to_vec().into())
    }
}

fn any(name: &str, message: &impl Message) -> prost_types::Any {
    prost_types::Any { type_url: format!("type.googleapis.com/{name}"), value: message.encode_to_vec() }
}

/// At most so many bytes, whole characters.
fn cut(text: &str, max: usize) -> String {
    let end = text.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= max).last();
    text[..end.unwrap_or(0)].to_owned()
}

/// As many as fit into status details.
fn wire(problems: &[Problem]) -> v1::Problems {
    let mut left = MAX_DETAILS;
    let problems = problems.iter().take(MAX_PRINTED).map(|it| v1::Problem {
        severity: it.severity.as_str().to_owned(),
        code: it.code.as_str().to_owned(),
        path: cut(&it.path, MAX_TEXT),
        line: it.line,
        column: it.column,
        message: cut(&it.message, MAX_TEXT),
        help: cut(it.help.as_deref().unwrap_or_default(), MAX_TEXT),
    });
    let fitting = problems.take_while(|it| {
        let size = it.encoded_len() + 4;
        let fits = size <= left;
        left = left.saturating_sub(size);
        fits
    });
    v1::Problems { problems: fitting.collect() }
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
