//! What the shell is told. Scripts rely on these numbers.

use std::process::ExitCode;

use nstance_client::ShardError;
use tonic::Code;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    Done = 0,
    /// On all targets; or a check failed, or a config is invalid.
    Failed = 1,
    /// `plan`, `config diff`: there is something to do.
    Changes = 2,
    /// Some shards did it, others did not.
    Partly = 3,
    /// We stopped waiting; the work goes on in the server.
    TimedOut = 4,
    NotFound = 5,
    /// Not authenticated, or not allowed.
    Denied = 6,
    Usage = 64,
    Interrupted = 130,
}

impl Exit {
    /// What one refusal means.
    pub fn of(code: Code) -> Self {
        match code {
            Code::NotFound => Self::NotFound,
            Code::Unauthenticated | Code::PermissionDenied => Self::Denied,
            Code::DeadlineExceeded => Self::TimedOut,
            _ => Self::Failed,
        }
    }

    /// What became of a command on several shards: a word more exact than "failed" only if they all failed alike.
    pub fn of_shards(n_ok: usize, errors: &[ShardError]) -> Self {
        match errors {
            [] => Self::Done,
            _ if 0 < n_ok => Self::Partly,
            [first, rest @ ..] => {
                let exit = Self::of(first.code);
                if rest.iter().all(|it| Self::of(it.code) == exit) { exit } else { Self::Failed }
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(codes: &[Code]) -> Vec<ShardError> {
        codes.iter().map(|code| ShardError::new("dev-1", *code, "no")).collect()
    }

    #[test]
    fn exit_codes_follow_the_table() {
        assert_eq!(Exit::of_shards(2, &[]), Exit::Done);
        assert_eq!(Exit::of_shards(1, &errors(&[Code::Unavailable])), Exit::Partly);
        assert_eq!(Exit::of_shards(0, &errors(&[Code::NotFound, Code::NotFound])), Exit::NotFound);
        assert_eq!(Exit::of_shards(0, &errors(&[Code::NotFound, Code::Unavailable])), Exit::Failed);
        assert_eq!(Exit::of_shards(0, &errors(&[Code::PermissionDenied, Code::Unauthenticated])), Exit::Denied);
        assert_eq!(Exit::of_shards(0, &errors(&[Code::DeadlineExceeded])), Exit::TimedOut);
        assert_eq!(Exit::Usage as u8, 64);
    }
}
