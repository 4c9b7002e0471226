//! A failure as a person reads it: what failed, on which object, why, and what to do next.

use std::error::Error;

use nstance_client::{NextStep, ShardError, UnknownShard};

use crate::exit::Exit;

/// Ends a command.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    pub exit: Exit,
    /// Names the object.
    pub what: String,
    /// The next command to run, or what to change.
    pub next: Option<String>,
    #[source]
    pub cause: Option<Box<dyn Error + Send + Sync>>,
}

impl Failure {
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self { exit, what: what.into(), next: None, cause: None }
    }

    /// The command line asks for something that cannot be.
    pub fn usage(what: impl Into<String>) -> Self {
        Self::new(Exit::Usage, what)
    }

    pub fn failed(what: impl Into<String>) -> Self {
        Self::new(Exit::Failed, what)
    }

    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    #[must_use]
    pub fn next(mut self, next: impl Into<String>) -> Self {
        self.next = Some(next.into());
        self
    }

    /// The lines for stderr. Causes are part of what failed; `debug` shows them one by one.
    pub fn lines(&self, debug: bool) -> Vec<String> {
        let mut lines = Vec::new();
        let mut causes = Vec::new();
        let mut cause = self.cause.as_deref().map(|it| it as &dyn Error);
        while let Some(it) = cause {
            causes.push(it.to_string());
            cause = it.source();
        }
        if debug || causes.is_empty() {
            lines.push(format!("error: {}", self.what));
            lines.extend(causes.iter().map(|it| format!("  cause: {it}")));
        } else {
            lines.push(format!("error: {}: {}", self.what, causes.join(": ")));
        }
        lines.extend(self.next.iter().map(|it| format!("next: {it}")));
        lines
    }
}

impl From<ShardError> for Failure {
    fn from(error: ShardError) -> Self {
        Self { exit: Exit::of(error.code), what: error.to_string(), next: next_step(&error), cause: None }
    }
}

impl From<UnknownShard> for Failure {
    fn from(error: UnknownShard) -> Self {
        Self::usage(unknown_shard(&error))
    }
}

/// A shard that `--servers` does not name.
pub fn unknown_shard(error: &UnknownShard) -> String {
    format!("shard {} is not in --servers, which has {}", error.shard, error.known.join(", "))
}

/// What to do about a shard's error, if there is one obvious step.
pub fn next_step(error: &ShardError) -> Option<String> {
    let text = match error.next_step()? {
        NextStep::RegisterIdentity => "nstance-admin cluster register-operator, which makes a new identity",
        NextStep::UseOperatorIdentity => "use an operator's identity: --identity-dir",
        NextStep::CheckShard => "nstance-admin check --only shards",
        NextStep::RaiseTimeout => "a longer --timeout, or nstance-admin check --only shards",
        NextStep::ListInstances => "nstance-admin instance list --deleted; those that are long gone are not kept",
        NextStep::ListGroups => "nstance-admin group list",
        NextStep::InspectExisting => "nstance-admin group list -o wide, which shows what is there and its version",
        NextStep::ReadCurrentVersion => {
            "nstance-admin group list -o wide, which shows the version that --etag wants now"
        }
    };
    Some(text.to_owned())
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn an_error_of_a_shard_names_the_next_command() {
        let next = |code: Code, reason: &str, message: &str| {
            next_step(&ShardError::new("dev-1", code, message).with_reason(reason)).unwrap_or_default()
        };
        assert_eq!(next(Code::NotFound, "NOT_FOUND", "there is no group instance-1"), "nstance-admin group list");
        assert!(
            next(Code::NotFound, "", "there is no instance x").starts_with("nstance-admin instance list --deleted")
        );
        assert!(
            next(Code::AlreadyExists, "", "group web exists already").starts_with("nstance-admin group list -o wide")
        );
        assert!(next(Code::Aborted, "ETAG_MISMATCH", "group web is at 2-1").contains("--etag"));
        assert_eq!(next(Code::Aborted, "", "try again"), "");
    }

    #[test]
    fn failure_names_object_cause_and_next_step() {
        let failure = Failure::failed("read identity.crt").because("permission denied").next("run it as the owner");
        assert_eq!(failure.lines(false), ["error: read identity.crt: permission denied", "next: run it as the owner"]);
        let debug = ["error: read identity.crt", "  cause: permission denied", "next: run it as the owner"];
        assert_eq!(failure.lines(true), debug);
    }
}
