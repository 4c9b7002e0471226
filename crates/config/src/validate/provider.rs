//! The parts of a config that belong to its provider: what the schema of its kind says of them.

use nstance_core::{
    ports::schema::{ProviderSchema, SchemaFault, SchemaProblem},
    value::Value,
};

use super::Checks;
use crate::{
    jsonc::{Json, Node},
    model::ProviderKind,
    path::{Path, locate},
    problems::{Code, Problem, nearest},
    raw::{At, suggest_key},
};

/// The kind that `at` names.
pub(super) fn read_kind(at: &At<'_>, checks: &Checks<'_>) -> Option<ProviderKind> {
    let kinds: Vec<(&str, ProviderKind)> =
        checks.schemas.iter().map(|schema| (schema.kind(), ProviderKind(*schema))).collect();
    let alias = |schema: &&'static dyn ProviderSchema| {
        let kind = schema.kind();
        schema.aliases().iter().map(move |alias| (*alias, kind))
    };
    let aliases: Vec<(&str, &str)> = checks.schemas.iter().flat_map(alias).collect();
    at.one_of(&kinds, &aliases)
}

/// Reports what a schema found in the object `at`; `more` are keys that it does not know of.
pub(super) fn report(at: &At<'_>, problems: Vec<SchemaProblem>, more: &[&'static str]) {
    for problem in without_misspelt(problems) {
        let below = node_path(at.node, &problem.path);
        let found = locate(at.node, &below);
        let mut path = at.path.join(&below);
        let last = problem.path.last().map_or("", String::as_str);
        let (code, pos, message, help) = match problem.what {
            SchemaFault::UnknownKey { known } => {
                let more = if problem.path.len() == 1 { more } else { &[] };
                let known: Vec<&str> = more.iter().copied().chain(known).collect();
                (Code::UnknownKey, found.key, format!("unknown key `{last}`"), suggest_key(last, &known))
            }
            SchemaFault::ManagedKey { instead } => {
                (Code::UnknownKey, found.key, format!("`{last}` is set by nstance"), Some(instead.to_owned()))
            }
            SchemaFault::WrongType { expected } => (Code::WrongType, found.value, format!("expected {expected}"), None),
            SchemaFault::BadValue { message } => (Code::BadValue, found.value, message, None),
            SchemaFault::Missing { key } => {
                let help = format!("add \"{key}\" to `{path}`");
                path = path.key(key);
                (Code::Missing, found.value, format!("`{key}` is missing"), Some(help))
            }
            SchemaFault::Conflict { message } => (Code::Conflict, found.value, message, None),
            SchemaFault::Deprecated { message } => (Code::DeprecatedArg, found.key, message, None),
            SchemaFault::Warning { message } => (Code::ProviderWarning, found.value, message, None),
            SchemaFault::TwoBalancers { message } => (Code::TwoBalancers, found.value, message, None),
        };
        let mut reported = Problem::new(code, path.to_string(), pos, message);
        reported.help = problem.help.or(help);
        at.problems.push(reported);
    }
}

/// One misspelt key is one problem, not an unknown and a missing one.
pub(super) fn without_misspelt(problems: Vec<SchemaProblem>) -> Vec<SchemaProblem> {
    let misspelt: Vec<(Vec<String>, &'static str)> = problems
        .iter()
        .filter_map(|problem| {
            let SchemaFault::UnknownKey { known } = &problem.what else { return None };
            let (key, parent) = problem.path.split_last()?;
            let near = nearest(key, known.iter().copied())?;
            Some((parent.to_vec(), *known.iter().find(|it| **it == near)?))
        })
        .collect();
    let is_misspelt = |problem: &SchemaProblem| match &problem.what {
        SchemaFault::Missing { key } => misspelt.iter().any(|(parent, near)| *parent == problem.path && near == key),
        _ => false,
    };
    problems.into_iter().filter(|problem| !is_misspelt(problem)).collect()
}

/// A schema's path, whose steps into lists are numbers in words, below `node`.
fn node_path(node: &Node, steps: &[String]) -> Path {
    let mut path = Path::root();
    let mut node = Some(node);
    for step in steps {
        match (node.map(|it| &it.json), step.parse::<usize>()) {
            (Some(Json::Array(items)), Ok(index)) => {
                path = path.index(index);
                node = items.get(index);
            }
            _ => {
                path = path.key(step);
                node = node.and_then(|it| it.get(step));
            }
        }
    }
    path
}

/// The same below a merged value, whose parts come from several places of the file.
pub(super) fn value_path(base: Path, value: &Value, steps: &[String]) -> Path {
    let mut path = base;
    let mut value = Some(value);
    for step in steps {
        match (value, step.parse::<usize>()) {
            (Some(Value::Array(items)), Ok(index)) => {
                path = path.index(index);
                value = items.get(index);
            }
            (it, _) => {
                path = path.key(step);
                value = it.and_then(Value::as_object).and_then(|object| object.get(step));
            }
        }
    }
    path
}
