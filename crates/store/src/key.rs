//! What a key may look like. One rule for every adapter, so that what works on one store works on all.

use nstance_core::ports::objects::{StoreError, StoreFault, Unavailable};

/// S3's limit, which is the lowest of the stores we know.
const MAX_KEY: usize = 1024;

/// Why `key` cannot name an object, if it cannot.
fn problem(key: &str) -> Option<&'static str> {
    if key.is_empty() {
        return Some("the key is empty");
    }
    if MAX_KEY < key.len() {
        return Some("the key is longer than 1024 bytes");
    }
    if key.chars().any(|it| it.is_control() || it == '\\') {
        return Some("the key contains a control character or a backslash");
    }
    if key.starts_with('/') {
        return Some("the key is absolute");
    }
    key.split('/').find_map(|part| match part {
        "" => Some("the key has an empty part"),
        "." | ".." => Some("the key climbs out of its place"),
        _ => None,
    })
}

/// Refuses keys that would mean different things on different stores, or lead out of the prefix.
pub fn check_key(op: &'static str, key: &str) -> Result<(), StoreError> {
    match problem(key) {
        None => Ok(()),
        Some(problem) => Err(invalid(op, key, problem)),
    }
}

/// A listing prefix is empty, or a key, or the beginning of one (`shard/a/instance/`).
pub fn check_prefix(op: &'static str, prefix: &str) -> Result<(), StoreError> {
    let trimmed = prefix.strip_suffix('/').unwrap_or(prefix);
    if prefix.is_empty() { Ok(()) } else { check_key(op, trimmed) }
}

pub(crate) fn invalid(op: &'static str, key: &str, message: impl Into<String>) -> StoreError {
    StoreError::new(op, key, StoreFault::Unavailable(Unavailable::Invalid), message)
}

/// The configured prefix in the one form the adapters use: empty, or ending in `/`.
pub(crate) fn normal_prefix(prefix: &str) -> Result<String, StoreError> {
    let trimmed = prefix.trim_matches('/');
    if trimmed.is_empty() {
        return Ok(String::new());
    }
    check_key("open", trimmed)?;
    Ok(format!("{trimmed}/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_keys_are_refused_and_ours_are_not() {
        for good in ["a", "shard/us-west-2a/.probe/s1.00", "cluster/secret/ca.key", "a/b.c/…"] {
            assert!(check_key("get", good).is_ok(), "{good}");
        }
        for bad in ["", "/", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\0b", "a\nb", "a\\b", &"x".repeat(1025)] {
            assert!(check_key("get", bad).is_err(), "{bad:?}");
        }
        assert!(check_prefix("list", "").is_ok());
        assert!(check_prefix("list", "shard/a/instance/").is_ok());
        assert!(check_prefix("list", "../").is_err());
    }

    #[test]
    fn a_prefix_has_one_form() {
        for spelled in ["prod", "/prod", "prod/", "/prod/"] {
            assert_eq!(normal_prefix(spelled).unwrap(), "prod/");
        }
        assert_eq!(normal_prefix("/").unwrap(), "");
        assert!(normal_prefix("a/../b").is_err());
    }
}
