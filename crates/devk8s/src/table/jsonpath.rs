//! The JSON paths of columns: `.a.b`, `.a['b.c']`, `.a\.b`, `[0]`, `[*]`, `[?(@.type=="Ready")]`.

use serde_json::Value;

/// The first value at a path.
pub(super) fn first<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    let path = path.trim().trim_start_matches('{').trim_end_matches('}');
    let mut found = vec![object];
    let mut rest = path.strip_prefix('$').unwrap_or(path);
    while !rest.is_empty() {
        let (step, after) = next(rest)?;
        rest = after;
        found = found.into_iter().flat_map(|value| go(value, &step)).collect();
    }
    found.into_iter().next()
}

#[derive(Debug, PartialEq)]
enum Step {
    Field(String),
    Index(usize),
    Every,
    /// Items whose field has this text.
    Where(String, String),
}

/// The first step of a path, and what follows it.
fn next(path: &str) -> Option<(Step, &str)> {
    if let Some(inside) = path.strip_prefix('[') {
        let end = if inside.starts_with("?(") { inside.find(")]")? + 1 } else { inside.find(']')? };
        return Some((bracket(&inside[..end])?, &inside[end + 1..]));
    }
    let name = path.strip_prefix('.').unwrap_or(path);
    let (mut field, mut escaped) = (String::new(), false);
    for (at, c) in name.char_indices() {
        match c {
            '\\' if !escaped => escaped = true,
            '.' | '[' if !escaped => return Some((Step::Field(field), &name[at..])),
            c => {
                field.push(c);
                escaped = false;
            }
        }
    }
    Some((Step::Field(field), ""))
}

fn bracket(inside: &str) -> Option<Step> {
    // Definitions write dots of a name with a backslash within quotes, too.
    let unquoted = |text: &str| text.trim().trim_matches(['\'', '"']).replace("\\.", ".");
    if inside == "*" {
        return Some(Step::Every);
    }
    if let Some(filter) = inside.strip_prefix("?(").and_then(|it| it.strip_suffix(')')) {
        let (field, value) = filter.split_once("==")?;
        let field = field.trim().strip_prefix("@.")?;
        return Some(Step::Where(field.to_owned(), unquoted(value)));
    }
    match inside.parse() {
        Ok(index) => Some(Step::Index(index)),
        Err(_) => Some(Step::Field(unquoted(inside))),
    }
}

fn go<'a>(value: &'a Value, step: &Step) -> Vec<&'a Value> {
    let items = || value.as_array().into_iter().flatten();
    match step {
        Step::Field(name) if name.is_empty() => vec![value],
        Step::Field(name) => value.get(name).into_iter().collect(),
        Step::Index(index) => value.get(index).into_iter().collect(),
        Step::Every => items().collect(),
        Step::Where(field, wanted) => items().filter(|it| it[field.as_str()] == wanted.as_str()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn paths_of_columns_are_followed() {
        let object = json!({
            "spec": { "a": { "b": 1 }, "list": ["x", "y"] },
            "metadata": { "labels": { "k.io/x": "v" } },
            "status": { "conditions": [{ "type": "A", "status": "False" }, { "type": "Ready", "status": "True" }] },
        });
        for (path, value) in [
            (".spec.a.b", json!(1)),
            (r".metadata.labels['k\.io/x']", json!("v")),
            ("{.spec.a.b}", json!(1)),
            (".spec.list[1]", json!("y")),
            (".spec.list[*]", json!("x")),
            (".metadata.labels.k\\.io/x", json!("v")),
            (".metadata.labels['k.io/x']", json!("v")),
            (".status.conditions[?(@.type==\"Ready\")].status", json!("True")),
            (".status.conditions[?(@.type=='Ready')].status", json!("True")),
        ] {
            assert_eq!(first(&object, path), Some(&value), "{path}");
        }
        for path in [".spec.none.b", ".spec.list[7]", ".status.conditions[?(@.type==\"No\")].status", "[?(", "["] {
            assert_eq!(first(&object, path), None, "{path}");
        }
    }

    proptest! {
        #[test]
        fn no_path_makes_the_reader_panic(path in r#"[.\[\]?(@=)'"a*0\\é]{0,24}"#) {
            first(&json!({ "a": [{ "a": "a" }] }), &path);
        }
    }
}
