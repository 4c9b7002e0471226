//! The audit log: who asked for which change, from where, and what came of it.

use std::net::IpAddr;

use http::StatusCode;
use serde_json::{Map, Value};

use super::route::Call;

/// Of what was asked, at most so many bytes stand in a line.
const MAX_TEXT: usize = 1024;

/// One line. It is written when this is dropped, so that no way out of a request leaves it unwritten.
pub(super) struct Audit {
    pub who: String,
    /// The route's.
    pub what: &'static str,
    /// Path and query.
    pub asked: String,
    /// Parameters and body, once they were read.
    pub wish: String,
    pub address: IpAddr,
    pub request_id: String,
    pub status: Option<StatusCode>,
}

impl Audit {
    pub(super) fn done(mut self, status: StatusCode) {
        self.status = Some(status);
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        let Self { who, what, wish, address, request_id, .. } = self;
        let asked = cut(&self.asked);
        match self.status.map(|it| it.as_u16()) {
            Some(status) => tracing::info!(
                audit = true, %who, %what, %asked, %wish, %address, status, %request_id, "change asked for"
            ),
            // The caller was gone before the request was whole, or we were before it was done.
            None => tracing::info!(
                audit = true, %who, %what, %asked, %wish, %address, %request_id, "change asked for, and its end not seen"
            ),
        }
    }
}

/// What a change is about, in one line. Values of variables may be secrets, so only their names are told.
pub(super) fn wish(call: &Call) -> String {
    let mut told: Map<String, Value> = call.params.iter().map(|(name, it)| ((*name).to_owned(), it.clone())).collect();
    for (name, value) in call.body.as_object().into_iter().flatten() {
        let value = match (name.as_str(), value) {
            ("vars", Value::Object(vars)) => vars.keys().cloned().collect(),
            _ => value.clone(),
        };
        told.insert(name.clone(), value);
    }
    cut(&Value::Object(told).to_string())
}

/// Whole characters.
fn cut(text: &str) -> String {
    if text.len() <= MAX_TEXT {
        return text.to_owned();
    }
    let end = (0..=MAX_TEXT).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    format!("{}...", &text[..end])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_wish_tells_what_was_asked_but_no_secrets_and_no_novels() {
        let params = [("shard", json!(["dev-1"])), ("group", json!("web"))].into();
        let body = json!({"size": 3, "victims": ["tst1"], "vars": {"PASSWORD": "hunter2"}});
        let told = wish(&Call { params, body, accept: String::new() });
        let expected =
            json!({"group": "web", "shard": ["dev-1"], "size": 3, "victims": ["tst1"], "vars": ["PASSWORD"]});
        assert_eq!(serde_json::from_str::<Value>(&told).unwrap(), expected);
        let body = json!({"reason": "é".repeat(5000)});
        let told = wish(&Call { body, ..Call::default() });
        assert!(told.len() < MAX_TEXT + 4 && told.ends_with("..."), "{}", told.len());
    }
}
