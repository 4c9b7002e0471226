//! A failure as a person reads it: what failed, on which object, why, and what to do next.

use std::error::Error;

use crate::{exit::Exit, shards::ShardError};

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
        let next = error.next();
        Self { exit: Exit::of(error.code), what: error.to_string(), next, cause: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_names_object_cause_and_next_step() {
        let failure = Failure::failed("read identity.crt").because("permission denied").next("run it as the owner");
        assert_eq!(failure.lines(false), ["error: read identity.crt: permission denied", "next: run it as the owner"]);
        let debug = ["error: read identity.crt", "  cause: permission denied", "next: run it as the owner"];
        assert_eq!(failure.lines(true), debug);
    }
}
