//! Reports the errors of shards on stderr: every shard, every problem, and each next step once.

use nstance_client::{Answers, ShardError};
use nstance_proto::v1::Problem;
use serde_json::Value;

use crate::{args::Context, exit::Exit, failure::next_step, view};

/// Reports what failed, and answers how the whole command ended.
pub fn outcome<T>(context: &Context, answers: &Answers<T>) -> Exit {
    print_errors(context, &answers.errors);
    Exit::of_shards(answers.ok.len(), &answers.errors)
}

/// The same if no shard succeeded.
pub fn all_failed(context: &Context, errors: &[ShardError]) -> Exit {
    print_errors(context, errors);
    Exit::of_shards(0, errors)
}

pub fn print_errors(context: &Context, errors: &[ShardError]) {
    for line in lines(errors, context.debug) {
        context.output.note(&line);
    }
}

/// The errors as part of a JSON document with the answers.
pub fn error_documents(errors: &[ShardError]) -> Vec<Value> {
    errors.iter().map(view::error).collect()
}

fn lines(errors: &[ShardError], debug: bool) -> Vec<String> {
    let (mut lines, mut next_steps) = (Vec::new(), Vec::new());
    for error in errors {
        match error.problems.as_slice() {
            [] => lines.push(format!("error: {error}")),
            [one] => lines.push(format!("error: {}: {}", error.shard, problem(one))),
            // The message contains them too, all in one line.
            all => {
                lines.push(format!("error: {}: {} problems", error.shard, all.len()));
                lines.extend(all.iter().map(|it| format!("  {}", problem(it))));
            }
        }
        if debug && !error.request_id.is_empty() {
            lines.push(format!("  request id: {}", error.request_id));
        }
        next_steps.extend(next_step(error).filter(|it| !next_steps.contains(it)));
    }
    lines.extend(next_steps.iter().map(|it| format!("next: {it}")));
    lines
}

/// `path:line:column: message (suggestion)`, as far as they are known.
pub fn problem(it: &Problem) -> String {
    let place = if it.line == 0 { String::new() } else { format!("{}:{}: ", it.line, it.column) };
    let path = if it.path.is_empty() { String::new() } else { format!("{}: ", it.path) };
    let help = if it.help.is_empty() { String::new() } else { format!(" ({})", it.help) };
    format!("{place}{path}{}{help}", it.message)
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn every_problem_has_its_line_and_a_next_step_is_named_once() {
        let problem = |path: &str| Problem { path: path.into(), message: "is wrong".into(), ..Problem::default() };
        let mut bad = ShardError::new("dev-1", Code::InvalidArgument, "a: is wrong; b: is wrong");
        bad.problems =
            vec![problem("a"), Problem { line: 3, column: 7, help: "did you mean c".into(), ..problem("b") }];
        let mut one = ShardError::new("dev-0", Code::InvalidArgument, "a: is wrong");
        one.problems = vec![Problem { line: 2, column: 1, ..problem("a") }];
        let dead = |shard: &str| ShardError::new(shard, Code::Unavailable, "connection refused");
        let logged = ShardError { request_id: "5f0c".into(), ..dead("dev-2") };
        assert_eq!(
            lines(std::slice::from_ref(&logged), true)[..2],
            ["error: dev-2: connection refused", "  request id: 5f0c"]
        );
        assert_eq!(
            lines(&[one, bad, logged, dead("dev-3")], false),
            [
                "error: dev-0: 2:1: a: is wrong",
                "error: dev-1: 2 problems",
                "  a: is wrong",
                "  3:7: b: is wrong (did you mean c)",
                "error: dev-2: connection refused",
                "error: dev-3: connection refused",
                "next: nstance-admin check --only shards",
            ]
        );
    }
}
