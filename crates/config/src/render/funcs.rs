//! Functions of the template language: Go's own, by gotmpl, and ours.

use std::sync::Arc;

use gotmpl::{
    Template, Value,
    parse::{ActionNode, CommandNode, Expr, ListNode, Node, PipeNode, Pos},
};
use sha2::{Digest, Sha256};

use crate::{hash::write_number, problems::write_json_string};

/// Longest string that any function may make, and longest output. Larger files are not for a config.
pub(super) const MAX_TEXT: usize = 1024 * 1024;

/// Every function, Go's first.
pub(super) const NAMES: &[&str] = &[
    "and",
    "or",
    "not",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "len",
    "index",
    "slice",
    "print",
    "printf",
    "println",
    "html",
    "js",
    "urlquery",
    "default",
    "required",
    "quote",
    "lower",
    "upper",
    "trim",
    "replace",
    "join",
    "split",
    "indent",
    "nindent",
    "b64enc",
    "b64dec",
    "toJson",
    "hasKey",
    "sha256sum",
];

pub(super) fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Functions into which a missing value may flow.
pub(super) fn takes_missing(name: &str) -> bool {
    matches!(name, "default" | "required" | "hasKey" | "and" | "or" | "not")
}

/// Calls a function whose arguments are all there. The error says what is wrong, without a place.
pub(super) fn call(name: &str, args: &[Value]) -> Result<Value, String> {
    let result = match name {
        "len" => {
            let [value] = exactly(name, args)?;
            let len = value.len().ok_or_else(|| format!("len: {} has no length", a(value)))?;
            Value::Int(i64::try_from(len).unwrap_or(i64::MAX))
        }
        "slice" => slice(args)?,
        "print" | "println" | "printf" => text(builtin(name, args)?),
        "html" | "js" | "urlquery" => {
            let joined = if args.len() == 1 { args[0].clone() } else { text(builtin("print", args)?) };
            text(builtin(name, &[joined])?)
        }
        "eq" | "ne" | "lt" | "le" | "gt" | "ge" => Value::Bool(builtin(name, args)? == "true"),
        "quote" => text(args.iter().map(quote).collect::<Result<Vec<_>, _>>()?.join(" ")),
        "lower" => text(one_string(name, args)?.to_lowercase()),
        "upper" => text(one_string(name, args)?.to_uppercase()),
        "trim" => text(one_string(name, args)?.trim().to_owned()),
        "replace" => replace(args)?,
        "join" => join(args)?,
        "split" => split(args)?,
        "indent" => text(indent(name, args)?),
        "nindent" => text(format!("\n{}", indent(name, args)?)),
        "b64enc" => text(data_encoding::BASE64.encode(one_string(name, args)?.as_bytes())),
        "b64dec" => b64dec(one_string(name, args)?)?,
        "toJson" => {
            let [value] = exactly(name, args)?;
            let mut out = String::new();
            write_json(&mut out, value)?;
            text(out)
        }
        "sha256sum" => text(data_encoding::HEXLOWER.encode(&Sha256::digest(one_string(name, args)?.as_bytes()))),
        _ => return Err(format!("function `{name}` does not exist")),
    };
    match &result {
        Value::String(it) if MAX_TEXT < it.len() => Err(too_long(name)),
        _ => Ok(result),
    }
}

fn too_long(name: &str) -> String {
    format!("{name}: the result is longer than {MAX_TEXT} bytes")
}

fn text(text: String) -> Value {
    Value::String(Arc::from(text))
}

/// The value's type with its article.
pub(super) fn a(value: &Value) -> String {
    let name = value.type_name();
    format!("{} {name}", if name.starts_with(['i', 'u']) { "an" } else { "a" })
}

fn exactly<'a, const N: usize>(name: &str, args: &'a [Value]) -> Result<&'a [Value; N], String> {
    args.try_into().map_err(|_| format!("{name} takes {N} arguments, not {}", args.len()))
}

fn string<'a>(name: &str, value: &'a Value) -> Result<&'a str, String> {
    value.as_str().ok_or_else(|| format!("{name}: expected a string, found {}", a(value)))
}

fn one_string<'a>(name: &str, args: &'a [Value]) -> Result<&'a str, String> {
    let [value] = exactly(name, args)?;
    string(name, value)
}

/// One of Go's functions, as text. gotmpl keeps them to itself, so a one-action template is made around each call.
pub(super) fn builtin(name: &str, args: &[Value]) -> Result<String, String> {
    bound_output(name, args)?;
    let pos = Pos::new(0, 1);
    let keys: Vec<String> = (0..args.len()).map(|i| format!("a{i}")).collect();
    let mut command = vec![Expr::Identifier(pos, name.into())];
    command.extend(keys.iter().map(|key| Expr::Field(pos, vec![key.as_str().into()])));
    let command = CommandNode { pos, args: command };
    let pipe = PipeNode { pos, decl: Vec::new(), commands: vec![command], is_assign: false };
    let tree = ListNode { pos, nodes: vec![Node::Action(ActionNode { pos, pipe })] };
    let data = keys.iter().map(|key| Arc::from(key.as_str())).zip(args.iter().cloned()).collect();
    Template::new("call")
        .add_parse_tree("call", tree)
        .execute_template_to_string("call", &Value::Map(Arc::new(data)))
        .map_err(|error| {
            let message = error.to_string();
            let message = message.strip_prefix("execution error: ").unwrap_or(&message);
            if message.starts_with(name) { message.to_owned() } else { format!("{name}: {message}") }
        })
}

/// Refuses a call whose output could not fit before it is made: `printf` repeats an argument as often as it likes.
fn bound_output(name: &str, args: &[Value]) -> Result<(), String> {
    const MAX_PAD: usize = u16::MAX as usize;
    const LIMIT: usize = 16 * MAX_TEXT;
    let lengths = args.iter().map(|it| it.as_str().map_or(0, str::len));
    let mut bound: usize = lengths.clone().sum();
    if name == "printf"
        && let Some(format) = args.first().and_then(Value::as_str)
    {
        let n_verbs = format.matches('%').count();
        let padded = format.contains(|c: char| c.is_ascii_digit() || c == '*');
        let longest = lengths.skip(1).max().unwrap_or(0).max(if padded { MAX_PAD } else { 0 });
        bound = bound.saturating_add(n_verbs.saturating_mul(longest));
    }
    if LIMIT < bound { Err(too_long(name)) } else { Ok(()) }
}

fn slice(args: &[Value]) -> Result<Value, String> {
    let Some((value, bounds)) = args.split_first().filter(|(_, bounds)| bounds.len() <= 2) else {
        return Err(format!("slice takes 1 to 3 arguments, not {}", args.len()));
    };
    let bound = |i: usize| match bounds.get(i) {
        None => Ok(None),
        Some(Value::Int(it)) => Ok(Some(*it)),
        Some(other) => Err(format!("slice: expected an integer, found {}", a(other))),
    };
    value.slice(bound(0)?, bound(1)?).map_err(|error| error.to_string())
}

fn quote(value: &Value) -> Result<String, String> {
    let plain = match value {
        Value::String(it) => it.to_string(),
        other => builtin("print", std::slice::from_ref(other))?,
    };
    builtin("printf", &[Value::String("%q".into()), text(plain)])
}

fn replace(args: &[Value]) -> Result<Value, String> {
    let [old, new, it] = exactly("replace", args)?;
    let (old, new, it) = (string("replace", old)?, string("replace", new)?, string("replace", it)?);
    let n_found = if old.is_empty() { it.chars().count() + 1 } else { it.matches(old).count() };
    if MAX_TEXT < it.len().saturating_add(n_found.saturating_mul(new.len())) {
        return Err(too_long("replace"));
    }
    Ok(text(it.replace(old, new)))
}

fn join(args: &[Value]) -> Result<Value, String> {
    let [separator, list] = exactly("join", args)?;
    let separator = string("join", separator)?;
    let Value::List(items) = list else { return Err(format!("join: expected a list, found {}", a(list))) };
    let items = items
        .iter()
        .map(|item| match item {
            Value::String(it) => Ok(it.to_string()),
            other => builtin("print", std::slice::from_ref(other)),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let n_bytes: usize = items.iter().map(String::len).sum();
    if MAX_TEXT < n_bytes.saturating_add(items.len().saturating_mul(separator.len())) {
        return Err(too_long("join"));
    }
    Ok(text(items.join(separator)))
}

fn split(args: &[Value]) -> Result<Value, String> {
    let [separator, it] = exactly("split", args)?;
    let (separator, it) = (string("split", separator)?, string("split", it)?);
    if separator.is_empty() {
        return Err("split: the separator is empty".to_owned());
    }
    Ok(Value::List(it.split(separator).map(|part| Value::String(Arc::from(part))).collect()))
}

fn indent(name: &str, args: &[Value]) -> Result<String, String> {
    let [width, it] = exactly(name, args)?;
    let Value::Int(width) = width else { return Err(format!("{name}: expected an integer, found {}", a(width))) };
    let width = usize::try_from(*width).map_err(|_| format!("{name}: the width is negative"))?;
    let it = string(name, it)?;
    let n_lines = it.matches('\n').count() + 1;
    if MAX_TEXT < it.len().saturating_add(n_lines.saturating_mul(width)) {
        return Err(too_long(name));
    }
    let pad = " ".repeat(width);
    Ok(format!("{pad}{}", it.replace('\n', &format!("\n{pad}"))))
}

fn b64dec(it: &str) -> Result<Value, String> {
    let bytes =
        data_encoding::BASE64.decode(it.trim().as_bytes()).map_err(|_| "b64dec: this is not base64".to_owned())?;
    String::from_utf8(bytes).map(text).map_err(|_| "b64dec: this is not text".to_owned())
}

fn write_json(out: &mut String, value: &Value) -> Result<(), String> {
    match value {
        Value::Nil => out.push_str("null"),
        Value::Bool(it) => out.push_str(if *it { "true" } else { "false" }),
        Value::Int(it) => out.push_str(&it.to_string()),
        Value::Uint(it) => out.push_str(&it.to_string()),
        Value::Float(it) => write_number(out, *it),
        Value::String(it) => write_json_string(out, it),
        Value::List(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i != 0 {
                    out.push(',');
                }
                write_json(out, item)?;
            }
            out.push(']');
        }
        Value::Map(entries) => {
            out.push('{');
            for (i, (key, item)) in entries.iter().enumerate() {
                if i != 0 {
                    out.push(',');
                }
                write_json_string(out, key);
                out.push(':');
                write_json(out, item)?;
            }
            out.push('}');
        }
        _ => return Err(format!("toJson: {} has no JSON form", a(value))),
    }
    Ok(())
}
