//! JSON schemas: how they are written down, and whether a value fits one.
//!
//! The same schema is shown in the OpenAPI document and held against what comes in, so the two cannot differ. Only the
//! words of JSON Schema that our document uses are known here.

use serde_json::{Map, Value, json};

/// Names of groups, shards, pools and load balancers.
pub(super) const IDENTIFIER: &str = "^[a-z0-9]+(-[a-z0-9]+)*$";
pub(super) const INSTANCE: &str = "^[a-z]{3}[0-9a-hjkmnp-tv-z]{26}$";
/// Where a list goes on: shard and instance.
pub(super) const CURSOR: &str = "^[a-z0-9]+(-[a-z0-9]+)*\\.[a-z]{3}[0-9a-hjkmnp-tv-z]{26}$";
/// Names of vars.
pub(super) const VAR: &str = "^[A-Za-z_][A-Za-z0-9_]*$";
/// Printable ASCII.
pub(super) const PRINTABLE: &str = "^[ -~]*$";
/// A span of time back from now.
pub(super) const SPAN: &str = "^[0-9]{1,6}[smhd]$";

/// What is wrong with a value, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Misfit {
    /// `sizes.web`; empty for the value itself.
    pub path: String,
    pub message: String,
}

pub(super) fn text() -> Value {
    json!({"type": "string"})
}

pub(super) fn text_or_null() -> Value {
    json!({"type": ["string", "null"]})
}

pub(super) fn text_of(pattern: &str, max: usize) -> Value {
    json!({"type": "string", "pattern": pattern, "minLength": 1, "maxLength": max})
}

pub(super) fn text_up_to(max: usize) -> Value {
    json!({"type": "string", "maxLength": max})
}

pub(super) fn identifier() -> Value {
    text_of(IDENTIFIER, 32)
}

pub(super) fn instance_id() -> Value {
    text_of(INSTANCE, 29)
}

pub(super) fn one_of(words: &[&str]) -> Value {
    json!({"type": "string", "enum": words})
}

pub(super) fn time() -> Value {
    json!({"type": "string", "format": "date-time"})
}

pub(super) fn time_or_null() -> Value {
    json!({"type": ["string", "null"], "format": "date-time"})
}

pub(super) fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub(super) fn integer() -> Value {
    json!({"type": "integer"})
}

/// Not negative.
pub(super) fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

pub(super) fn integer_in(min: i64, max: i64) -> Value {
    json!({"type": "integer", "minimum": min, "maximum": max})
}

pub(super) fn list(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

/// Texts by name.
pub(super) fn texts() -> Value {
    json!({"type": "object", "additionalProperties": {"type": "string"}})
}

pub(super) fn named(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

pub(super) fn or_null(name: &str) -> Value {
    json!({"anyOf": [named(name), {"type": "null"}]})
}

/// An object with exactly these keys.
pub(super) fn object<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let required: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
    closed(&required, fields)
}

/// An object with some of these keys, the `required` ones always.
pub(super) fn closed<const N: usize>(required: &[&str], fields: [(&str, Value); N]) -> Value {
    let properties: Map<String, Value> = fields.into_iter().map(|(name, it)| (name.to_owned(), it)).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Everything about `value` that does not fit. `defs` holds what `$ref`s name.
pub(super) fn misfits(schema: &Value, defs: &Map<String, Value>, value: &Value) -> Vec<Misfit> {
    let mut found = Vec::new();
    Check { defs, found: &mut found }.value(schema, value, "");
    found
}

struct Check<'a> {
    defs: &'a Map<String, Value>,
    found: &'a mut Vec<Misfit>,
}

impl Check<'_> {
    fn say(&mut self, path: &str, message: impl Into<String>) {
        self.found.push(Misfit { path: path.to_owned(), message: message.into() });
    }

    fn value(&mut self, schema: &Value, value: &Value, path: &str) {
        if let Some(name) = schema["$ref"].as_str().and_then(|it| it.strip_prefix("#/components/schemas/")) {
            match self.defs.get(name) {
                Some(schema) => self.value(schema, value, path),
                None => self.say(path, format!("there is no schema {name}")),
            }
            return;
        }
        if let Some(ways) = schema["anyOf"].as_array() {
            let fits = ways.iter().any(|way| misfits(way, self.defs, value).is_empty());
            if !fits {
                self.say(path, "fits none of the forms it may have");
            }
            return;
        }
        if !self.kind(schema, value, path) {
            return;
        }
        if let Some(words) = schema["enum"].as_array()
            && !words.contains(value)
        {
            let words: Vec<String> = words.iter().map(plain).collect();
            self.say(path, format!("must be one of {}", words.join(", ")));
            return;
        }
        match value {
            Value::String(it) => self.text(schema, it, path),
            Value::Number(it) => {
                let it = it.as_f64().unwrap_or(f64::NAN);
                if let Some(min) = schema["minimum"].as_f64()
                    && it < min
                {
                    self.say(path, format!("must be at least {min}"));
                }
                if let Some(max) = schema["maximum"].as_f64()
                    && max < it
                {
                    self.say(path, format!("must be at most {max}"));
                }
            }
            Value::Array(items) => {
                if let Some(max) = schema["maxItems"].as_u64()
                    && max < items.len() as u64
                {
                    self.say(path, format!("must have at most {max} entries"));
                }
                for (at, item) in items.iter().enumerate() {
                    self.value(&schema["items"], item, &format!("{path}[{at}]"));
                }
            }
            Value::Object(fields) => self.fields(schema, fields, path),
            Value::Null | Value::Bool(_) => {}
        }
    }

    fn kind(&mut self, schema: &Value, value: &Value, path: &str) -> bool {
        let is = |kind: &str| match kind {
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|it| it.fract() == 0.0),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => value.is_null(),
        };
        let kinds: Vec<&str> = match &schema["type"] {
            Value::String(kind) => vec![kind],
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => return true,
        };
        let fits = kinds.iter().any(|kind| is(kind));
        if !fits {
            self.say(path, format!("must be of type {}", kinds.join(" or ")));
        }
        fits
    }

    fn text(&mut self, schema: &Value, it: &str, path: &str) {
        let length = it.chars().count() as u64;
        if let Some(min) = schema["minLength"].as_u64()
            && length < min
        {
            self.say(path, format!("must have at least {min} characters"));
        }
        if let Some(max) = schema["maxLength"].as_u64()
            && max < length
        {
            self.say(path, format!("must have at most {max} characters"));
        }
        if let Some(pattern) = schema["pattern"].as_str()
            && !matches_pattern(pattern, it)
        {
            self.say(path, format!("`{}` does not match {pattern}", it.escape_debug()));
        }
        if schema["format"] == "date-time" && it.parse::<nstance_core::time::Timestamp>().is_err() {
            self.say(path, format!("`{}` is not a time as in 2026-01-31T12:00:00Z", it.escape_debug()));
        }
    }

    fn fields(&mut self, schema: &Value, fields: &Map<String, Value>, path: &str) {
        let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                self.say(&below(name), "is missing");
            }
        }
        if let Some(max) = schema["maxProperties"].as_u64()
            && max < fields.len() as u64
        {
            self.say(path, format!("must have at most {max} keys"));
        }
        for (name, value) in fields {
            let at = below(name);
            if let Some(names) = schema.get("propertyNames") {
                self.value(names, &Value::String(name.clone()), &at);
            }
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) => self.value(schema, value, &at),
                (None, Value::Bool(false)) => {
                    let known = schema["properties"].as_object().into_iter().flat_map(Map::keys);
                    let known: Vec<&str> = known.map(String::as_str).collect();
                    self.say(&at, format!("there is no such key; there are {}", known.join(", ")));
                }
                (None, others @ Value::Object(_)) => self.value(others, value, &at),
                (None, _) => {}
            }
        }
    }
}

fn plain(it: &Value) -> String {
    it.as_str().map_or_else(|| it.to_string(), str::to_owned)
}

/// Our patterns are few, so each is a function and no engine for all others is needed.
fn matches_pattern(pattern: &str, it: &str) -> bool {
    match pattern {
        IDENTIFIER => is_identifier(it),
        INSTANCE => is_instance(it),
        CURSOR => it.split_once('.').is_some_and(|(shard, id)| is_identifier(shard) && is_instance(id)),
        VAR => {
            let mut bytes = it.bytes();
            bytes.next().is_some_and(|it| it.is_ascii_alphabetic() || it == b'_')
                && bytes.all(|it| it.is_ascii_alphanumeric() || it == b'_')
        }
        PRINTABLE => it.bytes().all(|it| (b' '..=b'~').contains(&it)),
        SPAN => it
            .strip_suffix(['s', 'm', 'h', 'd'])
            .is_some_and(|digits| (1..=6).contains(&digits.len()) && digits.bytes().all(|it| it.is_ascii_digit())),
        _ => false,
    }
}

fn is_identifier(it: &str) -> bool {
    it.split('-')
        .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()))
}

fn is_instance(it: &str) -> bool {
    let (Some(kind), Some(rest)) = (it.get(..3), it.get(3..)) else { return false };
    let is_digit = |byte: u8| byte.is_ascii_digit() || byte.is_ascii_lowercase() && !b"ilou".contains(&byte);
    kind.bytes().all(|byte| byte.is_ascii_lowercase()) && rest.len() == 26 && rest.bytes().all(is_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schema: &Value, value: Value) -> Vec<String> {
        let found = misfits(schema, &Map::new(), &value);
        found.into_iter().map(|it| format!("{}: {}", it.path, it.message)).collect()
    }

    #[test]
    fn all_misfits_are_told_with_their_paths() {
        let schema = closed(
            &["group"],
            [
                ("group", identifier()),
                ("size", integer_in(0, 10)),
                ("victims", list(instance_id())),
                ("mode", one_of(&["a", "b"])),
                ("vars", texts()),
            ],
        );
        assert_eq!(check(&schema, json!({"group": "web", "size": 3, "vars": {"a": "b"}})), [""; 0]);
        let bad = json!({"size": 11, "victims": ["x"], "mode": "c", "vars": {"a": 1}, "sizes": 1});
        assert_eq!(
            check(&schema, bad),
            [
                "group: is missing",
                "size: must be at most 10",
                "victims[0]",
                "mode: must be one of a, b",
                "vars.a: must be of type string",
                "sizes: there is no such key; there are group, size, victims, mode, vars",
            ]
            .map(|it| match it {
                "victims[0]" => format!("victims[0]: `x` does not match {INSTANCE}"),
                it => it.to_owned(),
            })
        );
        assert_eq!(check(&schema, json!([])), [": must be of type object"]);
    }

    #[test]
    fn patterns_mean_what_they_say() {
        for (pattern, good, bad) in [
            (IDENTIFIER, vec!["a", "a-1", "dev-1"], vec!["", "-", "a-", "A", "a--b", "a_b", "é"]),
            (
                INSTANCE,
                vec!["knc06bgm7733st2576nx5jht4ecjw"],
                vec!["knc06bgm7733st2576nx5jht4ecj", "é", "knc06bgm7733st2576nx5jht4eilo"],
            ),
            (CURSOR, vec!["dev-1.knc06bgm7733st2576nx5jht4ecjw"], vec!["dev-1", ".knc06bgm7733st2576nx5jht4ecjw"]),
            (VAR, vec!["A", "_a9"], vec!["", "9", "a-b", "a\n"]),
            (PRINTABLE, vec!["", "a b~"], vec!["\n", "é"]),
            (SPAN, vec!["1h", "900s"], vec!["", "h", "1", "1w", "1234567s", "é"]),
        ] {
            for it in good {
                assert!(matches_pattern(pattern, it), "{pattern} {it}");
            }
            for it in bad {
                assert!(!matches_pattern(pattern, it), "{pattern} {it}");
            }
        }
    }
}
