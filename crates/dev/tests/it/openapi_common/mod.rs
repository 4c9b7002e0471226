//! Reads an OpenAPI document: judges answers by it, and makes up inputs that fit it. Nothing of it is shared with what serves.

#![allow(dead_code, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Map, Value};

/// The OpenAPI document.
pub(crate) struct Document(pub(crate) Value);

impl Document {
    pub(crate) fn operations(&self) -> Vec<(String, String, Value)> {
        let paths = self.0["paths"].as_object().unwrap().iter();
        paths
            .flat_map(|(path, methods)| {
                let methods = methods.as_object().unwrap().iter();
                methods.map(|(method, it)| (method.to_ascii_uppercase(), path.clone(), it.clone()))
            })
            .collect()
    }

    /// Holds an answer against an operation.
    pub(crate) fn judge(&self, operation: &Value, status: u16, kind: Option<&str>, text: &str) -> Result<(), String> {
        let id = &operation["operationId"];
        let Some(response) = operation["responses"].get(status.to_string()) else {
            return Err(format!("{id}: {status} is not documented: {text}"));
        };
        let content = response["content"].as_object().cloned().unwrap_or_default();
        let kind = kind.and_then(|it| it.split(';').next());
        match kind {
            None if content.is_empty() && text.is_empty() => Ok(()),
            None => Err(format!("{id}: {status} has a body of no type: {text}")),
            Some(kind) => {
                let media = content.get(kind).ok_or_else(|| format!("{id}: {kind} is not documented for {status}"))?;
                if kind != "application/json" {
                    return Ok(());
                }
                let value: Value = serde_json::from_str(text).map_err(|error| format!("{id}: {error}: {text}"))?;
                self.fits(&media["schema"], &value).map_err(|why| format!("{id} {status}: {why}: {text}"))
            }
        }
    }

    /// Whether a value fits a schema, for those words of JSON Schema that the document uses.
    pub(crate) fn fits(&self, schema: &Value, value: &Value) -> Result<(), String> {
        if let Some(reference) = schema["$ref"].as_str() {
            let schema = self.0.pointer(reference.trim_start_matches('#')).ok_or("a reference to nowhere")?;
            return self.fits(schema, value);
        }
        if let Some(ways) = schema["anyOf"].as_array() {
            let found: Vec<String> = ways.iter().filter_map(|way| self.fits(way, value).err()).collect();
            return if found.len() < ways.len() { Ok(()) } else { Err(found.join(" and ")) };
        }
        let kinds: Vec<&str> = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            kind => kind.as_str().into_iter().collect(),
        };
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(it) if it.as_f64().is_some_and(|it| it.fract() == 0.0) => "integer",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let is_whole = kind == "integer" && kinds.contains(&"number");
        if !(kinds.is_empty() || kinds.contains(&kind) || is_whole) {
            return Err(format!("{value} is no {kinds:?}"));
        }
        if let Some(words) = schema["enum"].as_array()
            && !words.contains(value)
        {
            return Err(format!("{value} is none of {words:?}"));
        }
        let bounded = |name: &str, it: f64, below: bool| match schema[name].as_f64() {
            Some(limit) if below && it < limit || !below && limit < it => Err(format!("{value} breaks {name} {limit}")),
            _ => Ok(()),
        };
        match value {
            Value::Number(it) => {
                bounded("minimum", it.as_f64().unwrap(), true)?;
                bounded("maximum", it.as_f64().unwrap(), false)
            }
            Value::String(it) => {
                bounded("minLength", it.chars().count() as f64, true)?;
                bounded("maxLength", it.chars().count() as f64, false)?;
                match schema["pattern"].as_str() {
                    Some(pattern) if !matches_pattern(pattern, it) => Err(format!("{it:?} does not match {pattern}")),
                    _ => Ok(()),
                }
            }
            Value::Array(items) => {
                bounded("maxItems", items.len() as f64, false)?;
                items.iter().try_for_each(|it| self.fits(&schema["items"], it))
            }
            Value::Object(fields) => self.fields(schema, fields),
            Value::Null | Value::Bool(_) => Ok(()),
        }
    }

    fn fields(&self, schema: &Value, fields: &Map<String, Value>) -> Result<(), String> {
        let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for name in required {
            if !fields.contains_key(name) {
                return Err(format!("{name} is missing"));
            }
        }
        for (name, value) in fields {
            if let Some(names) = schema.get("propertyNames") {
                self.fits(names, &name.clone().into())?;
            }
            match (schema["properties"].get(name), &schema["additionalProperties"]) {
                (Some(schema), _) => self.fits(schema, value).map_err(|why| format!("{name}: {why}"))?,
                (None, Value::Bool(false)) => return Err(format!("{name} is not documented")),
                (None, Value::Object(schema)) => self.fits(&schema.clone().into(), value)?,
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// Values that fit a schema.
    pub(crate) fn good(&self, schema: &Value) -> BoxedStrategy<Value> {
        if let Some(reference) = schema["$ref"].as_str() {
            return self.good(self.0.pointer(reference.trim_start_matches('#')).unwrap());
        }
        if let Some(words) = schema["enum"].as_array() {
            return prop::sample::select(words.clone()).boxed();
        }
        let bound = |name: &str, other: i64| schema[name].as_i64().unwrap_or(other);
        match schema["type"].as_str() {
            Some("boolean") => any::<bool>().prop_map(Value::from).boxed(),
            // Real machines would be made for it.
            Some("integer") => (bound("minimum", 0)..=bound("maximum", 2).min(2)).prop_map(Value::from).boxed(),
            Some("string") => {
                let max = usize::try_from(bound("maxLength", 40)).unwrap();
                let text = match schema["pattern"].as_str() {
                    Some(pattern) => prop::string::string_regex(pattern.trim_matches(['^', '$'])).unwrap().boxed(),
                    None => any::<String>().boxed(),
                };
                text.prop_map(move |it| it.chars().take(max).collect::<String>()).prop_map(Value::from).boxed()
            }
            Some("array") => prop::collection::vec(self.good(&schema["items"]), 0..3).prop_map(Value::from).boxed(),
            _ => self.good_object(schema),
        }
    }

    fn good_object(&self, schema: &Value) -> BoxedStrategy<Value> {
        let required: BTreeSet<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let fields = schema["properties"].as_object().into_iter().flatten().map(|(name, schema)| {
            let value = self.good(schema);
            let value = if required.contains(name.as_str()) {
                value.prop_map(Some).boxed()
            } else {
                prop::option::of(value).boxed()
            };
            (Just(name.clone()), value)
        });
        let fields: Vec<_> = fields.collect();
        let named = match (schema.get("propertyNames"), &schema["additionalProperties"]) {
            (Some(names), value @ Value::Object(_)) => {
                prop::collection::vec((self.good(names), self.good(value)), 0..3).boxed()
            }
            _ => Just(Vec::new()).boxed(),
        };
        (fields, named)
            .prop_map(|(fields, named)| {
                let fields = fields.into_iter().filter_map(|(name, value)| Some((name, value?)));
                let named = named.into_iter().map(|(name, value)| (name.as_str().unwrap().to_owned(), value));
                Value::Object(fields.chain(named).collect())
            })
            .boxed()
    }
}

fn matches_pattern(pattern: &str, it: &str) -> bool {
    // Judged by another engine than the one that serves: that of the generator's own parser is not one, so ours is small.
    let class = |set: &str, c: char| match set {
        "id" => c.is_ascii_lowercase() || c.is_ascii_digit(),
        _ => c.is_ascii_digit() || c.is_ascii_lowercase() && !"ilou".contains(c),
    };
    let name =
        |it: &str| !it.is_empty() && it.split('-').all(|part| !part.is_empty() && part.chars().all(|c| class("id", c)));
    let instance = |it: &str| {
        it.chars().count() == 29
            && it.chars().take(3).all(|c| c.is_ascii_lowercase())
            && it.chars().skip(3).all(|c| class("crockford", c))
    };
    match pattern {
        "^[a-z0-9]+(-[a-z0-9]+)*$" => name(it),
        "^[a-z]{3}[0-9a-hjkmnp-tv-z]{26}$" => instance(it),
        "^[ -~]*$" => it.chars().all(|c| (' '..='~').contains(&c)),
        "^[A-Za-z_][A-Za-z0-9_]*$" => {
            it.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && it.starts_with(|c: char| !c.is_ascii_digit())
        }
        "^[0-9]{1,6}[smhd]$" => {
            let n = it.chars().filter(char::is_ascii_digit).count();
            (1..=6).contains(&n) && it.chars().count() == n + 1 && it.ends_with(['s', 'm', 'h', 'd'])
        }
        _ => it.split_once('.').is_some_and(|(shard, id)| name(shard) && instance(id)),
    }
}
