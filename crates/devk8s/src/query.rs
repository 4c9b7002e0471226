//! The query of a request.

use std::collections::BTreeMap;

#[derive(Debug, Clone, Default)]
pub(crate) struct Query(BTreeMap<String, String>);

impl Query {
    /// Of a name that occurs twice the first value counts.
    pub(crate) fn parse(text: &str) -> Self {
        let mut all = BTreeMap::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            all.entry(decode(&name.replace('+', " "))).or_insert_with(|| decode(&value.replace('+', " ")));
        }
        Self(all)
    }

    /// Empty if it is absent.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// `true`, `1`, or present without a value.
    pub(crate) fn is_set(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| ["true", "1", ""].contains(&value.as_str()))
    }
}

/// Undoes percent-encoding; what is badly encoded stays as it is.
pub(crate) fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while let Some(&byte) = bytes.get(at) {
        let decoded = (byte == b'%')
            .then(|| std::str::from_utf8(bytes.get(at + 1..at + 3)?).ok())
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        out.push(decoded.unwrap_or(byte));
        at += if decoded.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded() {
        let query = Query::parse("labelSelector=a%3Db%2Cc&watch=1&x=a+b&flag&bad=%zz%4");
        assert_eq!(query.get("labelSelector"), "a=b,c");
        assert_eq!((query.get("x"), query.get("bad"), query.get("none")), ("a b", "%zz%4", ""));
        assert!(query.is_set("watch") && query.is_set("flag") && !query.is_set("none"));
    }
}
