//! Reading and writing the metadata of an object that is nothing but JSON.

use nstance_core::{
    ports::clock::{Clock, Entropy, random},
    time::Timestamp,
};
use serde_json::{Map, Value, json};

/// What an object is called inside its resource; the namespace of a cluster-scoped object is empty.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// The text at a JSON pointer; empty if there is none.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

pub(crate) fn namespace(object: &Value) -> &str {
    text(object, "/metadata/namespace")
}

pub(crate) fn uid(object: &Value) -> &str {
    text(object, "/metadata/uid")
}

pub(crate) fn version_text(object: &Value) -> &str {
    text(object, "/metadata/resourceVersion")
}

pub(crate) fn version(object: &Value) -> Option<u64> {
    version_text(object).parse().ok()
}

pub(crate) fn is_deleting(object: &Value) -> bool {
    !text(object, "/metadata/deletionTimestamp").is_empty()
}

pub(crate) fn generation(object: &Value) -> i64 {
    object.pointer("/metadata/generation").and_then(Value::as_i64).unwrap_or(0)
}

pub(crate) fn finalizers(object: &Value) -> impl Iterator<Item = &str> {
    object.pointer("/metadata/finalizers").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str)
}

pub(crate) fn add_finalizer(object: &mut Value, finalizer: &str) {
    if finalizers(object).any(|it| it == finalizer) {
        return;
    }
    let list = metadata_mut(object).entry("finalizers").or_insert_with(|| json!([]));
    if !list.is_array() {
        *list = json!([]);
    }
    if let Some(list) = list.as_array_mut() {
        list.push(json!(finalizer));
    }
}

/// The fields of an object; anything else that stands there is replaced by an empty object.
pub(crate) fn fields_mut(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("it was made an object above")
}

pub(crate) fn metadata_mut(object: &mut Value) -> &mut Map<String, Value> {
    fields_mut(fields_mut(object).entry("metadata").or_insert_with(|| json!({})))
}

/// Sets a field of the metadata, or takes it away.
pub(crate) fn set_metadata(object: &mut Value, field: &str, value: Option<Value>) {
    let metadata = metadata_mut(object);
    match value {
        Some(value) => drop(metadata.insert(field.to_owned(), value)),
        None => drop(metadata.shift_remove(field)),
    }
}

/// Sets a field at the top, or takes it away.
pub(crate) fn set_field(object: &mut Value, field: &str, value: Option<Value>) {
    let fields = fields_mut(object);
    match value {
        Some(value) => drop(fields.insert(field.to_owned(), value)),
        None => drop(fields.shift_remove(field)),
    }
}

/// Writes a time as Kubernetes does in metadata: whole seconds, UTC.
pub(crate) fn seconds(at: Timestamp) -> String {
    match jiff::Timestamp::from_second(at.as_millis().div_euclid(1000)) {
        Ok(at) => at.to_string(),
        Err(_) => at.to_string(),
    }
}

pub(crate) fn now(clock: &dyn Clock) -> Value {
    json!(seconds(clock.now()))
}

/// A random UUID, version 4.
pub(crate) fn new_uid(entropy: &dyn Entropy) -> String {
    let mut bytes: [u8; 16] = random(entropy);
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Five characters without vowels, as `generateName` appends them.
pub(crate) fn name_suffix(entropy: &dyn Entropy) -> String {
    const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let bytes: [u8; 5] = random(entropy);
    bytes.iter().map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()])).collect()
}

/// Whether a name may stand in a path: lower-case letters, digits, `-` and `.`, as for most kinds of Kubernetes.
///
/// The length is less than Kubernetes' 253, since `.json` must still fit into a file name.
pub(crate) fn is_name(name: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= 240
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(byte))
        && !name.contains("..")
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    #[test]
    fn names_that_leave_the_directory_are_no_names() {
        for good in ["a", "a-b", "a.b", "0", "nstance-test.1"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a..b", ".a", "A", "a_b", "-a", "a\0", &"a".repeat(241)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn uids_and_times_look_like_those_of_kubernetes() {
        let uid = new_uid(&SeededEntropy::new(1));
        assert_eq!((uid.len(), &uid[14..15]), (36, "4"));
        assert_eq!(name_suffix(&SeededEntropy::new(1)).len(), 5);
        assert_eq!(seconds("2026-01-31T12:00:00.987Z".parse().unwrap()), "2026-01-31T12:00:00Z");
    }
}
