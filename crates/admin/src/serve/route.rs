//! What a route is. Everything that is known about one stands in one value: how it is asked, what it may answer, and who
//! does it. The OpenAPI document, the checks of what comes in, and the dispatch are all read from it.

use std::{collections::BTreeMap, sync::Arc};

use futures::future::BoxFuture;
use http::{Method, StatusCode};
use serde_json::Value;

use super::{App, reply::Reply, reply::Trouble};

pub(super) type Handler = fn(Arc<App>, Call) -> BoxFuture<'static, Result<Reply, Trouble>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Without credentials.
    Open,
    Read,
    /// Has an effect: not for viewers, and audited.
    Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Path,
    Query,
    Header,
}

pub(super) struct Param {
    pub name: &'static str,
    pub place: Place,
    pub schema: Value,
    pub summary: &'static str,
}

/// One answer that a route may give, with the schema of its body, or the media type of a body that is no JSON.
pub(super) struct Answer {
    pub status: StatusCode,
    pub summary: &'static str,
    pub content: Vec<(&'static str, Value)>,
}

pub(super) struct Route {
    pub method: Method,
    /// `/api/v1/groups/{group}`.
    pub path: &'static str,
    pub id: &'static str,
    pub summary: &'static str,
    pub access: Access,
    pub params: Vec<Param>,
    /// Of JSON. A route with a body takes none but JSON.
    pub body: Option<Value>,
    pub answers: Vec<Answer>,
    pub handler: Handler,
}

impl Route {
    /// The values of the path's parameters, if this is the route's path.
    pub(super) fn captures(&self, path: &str) -> Option<Vec<(&'static str, String)>> {
        let (mut ours, mut theirs) = (self.path.split('/'), path.split('/'));
        let mut found = Vec::new();
        loop {
            match (ours.next(), theirs.next()) {
                (None, None) => return Some(found),
                (Some(part), Some(segment)) => match part.strip_prefix('{').and_then(|it| it.strip_suffix('}')) {
                    Some(_) if segment.is_empty() => return None,
                    Some(name) => found.push((name, percent_decoded(segment))),
                    None if part == segment => {}
                    None => return None,
                },
                _ => return None,
            }
        }
    }
}

/// What is no valid escape stands for itself; no name of ours has a `%`, so it is refused by its schema.
pub(super) fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).and_then(|it| std::str::from_utf8(it).ok());
        match (bytes[at], hex.and_then(|it| u8::from_str_radix(it, 16).ok())) {
            (b'%', Some(byte)) => {
                out.push(byte);
                at += 3;
            }
            (byte, _) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A request that fits its route: parameters and body as their schemas want them.
#[derive(Debug, Clone, Default)]
pub(super) struct Call {
    pub params: BTreeMap<&'static str, Value>,
    pub body: Value,
    /// The header of that name.
    pub accept: String,
}

impl Call {
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.params.get(name).and_then(Value::as_str)
    }

    /// Of a path, where it is always there.
    pub(super) fn named(&self, name: &str) -> String {
        self.text(name).unwrap_or_default().to_owned()
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        self.params.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    pub(super) fn said(&self, field: &str) -> String {
        self.body[field].as_str().unwrap_or_default().to_owned()
    }

    pub(super) fn is(&self, field: &str) -> bool {
        self.body[field].as_bool().unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_paths_are_undone() {
        for (text, decoded) in [("a-b", "a-b"), ("a%2Fb", "a/b"), ("%zz", "%zz"), ("%", "%"), ("%C3%A9", "é")] {
            assert_eq!(percent_decoded(text), decoded);
        }
    }
}
