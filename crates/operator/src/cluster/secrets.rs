//! Secrets and ConfigMaps as JSON.

use std::collections::BTreeMap;

use data_encoding::BASE64;
use serde_json::{Value, json};

/// A decoded entry of a Secret. `None` if there is none, or it is empty.
pub fn entry(secret: &Value, key: &str) -> Option<Vec<u8>> {
    let text = secret["data"][key].as_str()?;
    BASE64.decode(text.as_bytes()).ok().filter(|it| !it.is_empty())
}

/// An entry of a ConfigMap.
pub fn text(config_map: &Value, key: &str) -> Option<String> {
    config_map["data"][key].as_str().filter(|it| !it.trim().is_empty()).map(str::to_owned)
}

/// The `data` of a Secret.
pub fn data(entries: &[(&str, &[u8])]) -> Value {
    let encoded: BTreeMap<&str, String> = entries.iter().map(|(key, it)| (*key, BASE64.encode(it))).collect();
    json!(encoded)
}

pub fn annotation<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["annotations"][key].as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_decoded_and_empty_ones_are_none() {
        let secret = json!({ "data": data(&[("a", b"text"), ("b", b"")]) });
        assert_eq!(entry(&secret, "a").as_deref(), Some(b"text".as_slice()));
        assert_eq!(entry(&secret, "b"), None);
        assert_eq!(entry(&secret, "c"), None);
        assert_eq!(entry(&json!({ "data": { "a": "no base64!" } }), "a"), None);
    }
}
