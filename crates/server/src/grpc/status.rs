//! The one place where refusals become gRPC statuses. Each carries a code, a text for people and a typed reason.

use std::time::Duration;

use nstance_config::{Problem, problems::MAX_PRINTED};
pub use nstance_proto::refusal::{problems_of, reason_of, retry_of};
use nstance_proto::{
    refusal::{DOMAIN, RETRY_HINT},
    rpc, v1,
};
use prost::Message;
use tonic::{Code, Status, metadata::MetadataValue};

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
    /// Within which time the caller should come again, at a moment of its own choice.
    pub retry: Option<Duration>,
}

/// How much time each agent of a fleet that comes back adds to the time in which all of them come. A thousand of them
/// then take a second and a half, and no tenth of a second of it sees more than a tenth of them.
const SPREAD_EACH: Duration = Duration::from_micros(1500);
/// Few agents need no spreading; many must not be away for longer than it takes to notice.
const MIN_SPREAD: Duration = Duration::from_millis(500);
const MAX_SPREAD: Duration = Duration::from_secs(5);

/// Within which time a fleet of so many agents should come back that is sent away at one moment.
pub fn spread(n_agents: usize) -> Duration {
    let all = SPREAD_EACH.saturating_mul(u32::try_from(n_agents).unwrap_or(u32::MAX));
    all.clamp(MIN_SPREAD, MAX_SPREAD)
}

impl Refusal {
    pub fn new(code: Code, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), problems: Vec::new(), retry: None }
    }

    /// With a hint when to come again.
    pub fn within(self, retry: Duration) -> Self {
        Self { retry: Some(retry), ..self }
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
        let mut status = Self::with_details(refusal.code, refusal.message, details.encode_to_vec().into());
        if let Some(retry) = refusal.retry {
            let millis = u64::try_from(retry.as_millis()).unwrap_or(u64::MAX);
            status.metadata_mut().insert(RETRY_HINT, MetadataValue::from(millis));
        }
        status
    }
}

fn any(name: &str, message: &impl Message) -> prost_types::Any {
    prost_types::Any { type_url: format!("type.googleapis.com/{name}"), value: message.encode_to_vec() }
}

/// At most so many bytes, whole characters.
pub(crate) fn cut(text: &str, max: usize) -> String {
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
    use nstance_rt::entropy::{SeededEntropy, jitter};

    use super::*;

    #[test]
    fn reasons_survive_the_wire() {
        let status: Status = Refusal::denied("WRONG_ROLE", "use port 8994").into();
        assert_eq!(status.code(), Code::PermissionDenied);
        assert_eq!(status.message(), "use port 8994");
        assert_eq!(reason_of(&status).as_deref(), Some("WRONG_ROLE"));
        assert_eq!(retry_of(&status), None);
        let status: Status = Refusal::unavailable("NOT_READY", "retry").within(Duration::from_millis(1500)).into();
        assert_eq!(retry_of(&status), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn fleet_that_is_sent_away_comes_back_spread_and_soon() {
        assert_eq!((spread(0), spread(100)), (MIN_SPREAD, MIN_SPREAD));
        assert_eq!((spread(100_000), spread(usize::MAX)), (MAX_SPREAD, MAX_SPREAD));
        for n_agents in [1000_usize, 3000, 10_000] {
            let dice = SeededEntropy::new(n_agents as u64);
            let bound = spread(n_agents);
            let mut tenths = [0; 50];
            for _ in 0..n_agents {
                tenths[usize::try_from(jitter(&dice, bound).as_millis() / 100).unwrap()] += 1;
            }
            assert!(tenths.iter().all(|n| *n <= n_agents / 10), "{n_agents}: {tenths:?}");
        }
    }
}
