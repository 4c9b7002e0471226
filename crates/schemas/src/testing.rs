//! Short ways to write values and to read problems in tests.

use nstance_core::{
    ports::schema::{SchemaFault, SchemaProblem},
    value::{Object, Value},
};

pub(crate) fn object(entries: &[(&str, Value)]) -> Object {
    entries.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

pub(crate) fn nested(entries: &[(&str, Value)]) -> Value {
    Value::Object(object(entries))
}

pub(crate) fn list(items: &[Value]) -> Value {
    Value::Array(items.to_vec())
}

pub(crate) fn texts(items: &[&str]) -> Value {
    Value::Array(items.iter().map(|it| Value::from(*it)).collect())
}

/// One line for each problem: `path: what (help)`.
pub(crate) fn faults(problems: Vec<SchemaProblem>) -> Vec<String> {
    let line = |problem: SchemaProblem| {
        let what = match problem.what {
            SchemaFault::UnknownKey { known } => format!("unknown of {}", known.join(", ")),
            SchemaFault::ManagedKey { instead } => format!("managed: {instead}"),
            SchemaFault::WrongType { expected } => format!("expected {expected}"),
            SchemaFault::BadValue { message } => message,
            SchemaFault::Missing { key } => format!("missing {key}"),
            SchemaFault::Conflict { message } => format!("conflict: {message}"),
            SchemaFault::Deprecated { message } => format!("deprecated: {message}"),
            SchemaFault::Warning { message } => format!("warning: {message}"),
            SchemaFault::TwoBalancers { message } => format!("two balancers: {message}"),
        };
        let help = problem.help.map(|it| format!(" ({it})")).unwrap_or_default();
        format!("{}: {what}{help}", problem.path.join("."))
    };
    problems.into_iter().map(line).collect()
}
