//! JSON values as YAML 1.2, in block style.

use serde_json::Value;

pub(super) fn text(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => block(&mut out, value, 0),
        Value::Array(list) if !list.is_empty() => block(&mut out, value, 0),
        _ => {
            out.push_str(&scalar(value));
            out.push('\n');
        }
    }
    out
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        _ => false,
    }
}

fn block(out: &mut String, value: &Value, depth: usize) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                out.push_str(&format!("{indent}{}:", quoted(key)));
                nested(out, value, depth + 1);
            }
        }
        Value::Array(list) => {
            for value in list {
                if let (true, Value::Object(_)) = (is_block(value), value) {
                    // The first key stands beside the dash, the others below it.
                    let mut inner = String::new();
                    block(&mut inner, value, depth + 1);
                    out.push_str(&format!("{indent}- {}", inner.trim_start()));
                } else {
                    out.push_str(&format!("{indent}-"));
                    nested(out, value, depth + 1);
                }
            }
        }
        _ => {}
    }
}

fn nested(out: &mut String, value: &Value, depth: usize) {
    if is_block(value) {
        out.push('\n');
        block(out, value, depth);
    } else {
        out.push_str(&format!(" {}\n", scalar(value)));
    }
}

fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) => quoted(text),
        Value::Object(_) => "{}".to_owned(),
        Value::Array(_) => "[]".to_owned(),
        other => other.to_string(),
    }
}

/// Plain where nobody can take it for anything else; else in double quotes, whose escapes are those of JSON.
fn quoted(text: &str) -> String {
    let plain_start = |c: char| c.is_ascii_alphabetic() || c == '_' || c == '/';
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '@' | '+');
    let is_word = |it: &str| {
        ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"]
            .contains(&it.to_ascii_lowercase().as_str())
    };
    if text.starts_with(plain_start) && text.chars().all(plain) && !is_word(text) {
        text.to_owned()
    } else {
        Value::from(text).to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn documents_are_blocks_and_doubtful_texts_are_quoted() {
        let value = json!({
            "instances": [{"instance_id": "tst1", "group": "web", "drain": null, "vars": {}}, {"instance_id": "07", "ok": true}],
            "names": ["a", "no", "1.5", "x: y", "", "two\nlines", [1, 2]],
            "empty": [],
        });
        let expected = "\
instances:
  - instance_id: tst1
    group: web
    drain: null
    vars: {}
  - instance_id: \"07\"
    ok: true
names:
  - a
  - \"no\"
  - \"1.5\"
  - \"x: y\"
  - \"\"
  - \"two\\nlines\"
  -
    - 1
    - 2
empty: []
";
        assert_eq!(text(&value), expected);
        assert_eq!(text(&json!([])), "[]\n");
        assert_eq!(text(&json!("plain")), "plain\n");
    }
}
