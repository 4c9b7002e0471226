//! Encryption keys as people hand them over: 32 raw bytes, 64 hex digits or 44 base64 characters, up to four on lines of
//! their own. The first encrypts, all decrypt.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL, BASE64URL_NOPAD, HEXLOWER_PERMISSIVE};
use zeroize::{Zeroize as _, Zeroizing};

const MAX_KEYS: usize = 4;

/// One AES-256 key. Wiped when dropped; it has no `Debug`, and nothing prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct EncryptionKey(Zeroizing<[u8; 32]>);

impl EncryptionKey {
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Where key text comes from on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeySource {
    /// Name of an environment variable.
    Env(String),
    File(PathBuf),
}

impl std::fmt::Display for KeySource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env {name}"),
            Self::File(path) => write!(f, "file {}", path.display()),
        }
    }
}

/// Keys in the order of their use, and what a person should hear about their source.
pub struct LoadedKeys {
    pub keys: Vec<EncryptionKey>,
    pub warning: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("encryption key from {origin} has {n_bytes} bytes; need 32 raw, 64 hex or 44 base64")]
    Form { origin: String, n_bytes: usize },
    #[error("encryption key from {origin} has {n_lines} lines; need one key on each of at most {MAX_KEYS}")]
    TooMany { origin: String, n_lines: usize },
    #[error("encryption key from {origin} is not set")]
    Missing { origin: String },
    #[error("read encryption key from {origin}")]
    Read {
        origin: String,
        #[source]
        source: std::io::Error,
    },
}

/// Reads and parses the keys of a source on this machine.
pub fn load_key(source: &KeySource) -> Result<LoadedKeys, KeyError> {
    let origin = source.to_string();
    match source {
        KeySource::Env(name) => {
            let text = std::env::var_os(name).ok_or_else(|| KeyError::Missing { origin: origin.clone() })?;
            let text = Zeroizing::new(std::os::unix::ffi::OsStringExt::into_vec(text));
            Ok(LoadedKeys { keys: parse_keys(&origin, &text)?, warning: None })
        }
        KeySource::File(path) => {
            let read = |source| KeyError::Read { origin: origin.clone(), source };
            let text = Zeroizing::new(fs::read(path).map_err(read)?);
            let mode = fs::metadata(path).map_err(read)?.permissions().mode();
            let warning = (mode & 0o004 != 0)
                .then(|| format!("encryption key {origin} is readable by everybody; make it mode 0600"));
            Ok(LoadedKeys { keys: parse_keys(&origin, &text)?, warning })
        }
    }
}

/// Parses key text from wherever it came; `origin` names the place in errors.
pub fn parse_keys(origin: &str, text: &[u8]) -> Result<Vec<EncryptionKey>, KeyError> {
    // Exactly 32 bytes are a raw key, even if some of them look like white space.
    if let Ok(raw) = <[u8; 32]>::try_from(text) {
        return Ok(vec![EncryptionKey::new(raw)]);
    }
    let text = text.trim_ascii();
    let form = |n_bytes| KeyError::Form { origin: origin.to_owned(), n_bytes };
    if let Some(key) = parse_one(text) {
        return Ok(vec![key]);
    }
    let lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).collect();
    let lines: Vec<&[u8]> = lines.into_iter().filter(|line| !line.is_empty()).collect();
    if lines.len() <= 1 {
        return Err(form(text.len()));
    }
    if MAX_KEYS < lines.len() {
        return Err(KeyError::TooMany { origin: origin.to_owned(), n_lines: lines.len() });
    }
    lines.into_iter().map(|line| parse_one(line).ok_or_else(|| form(line.len()))).collect()
}

fn parse_one(text: &[u8]) -> Option<EncryptionKey> {
    let decoded = match text.len() {
        32 => Some(text.to_vec()),
        64 => HEXLOWER_PERMISSIVE.decode(text).ok(),
        44 => BASE64.decode(text).or_else(|_| BASE64URL.decode(text)).ok(),
        43 => BASE64_NOPAD.decode(text).or_else(|_| BASE64URL_NOPAD.decode(text)).ok(),
        _ => None,
    };
    let mut decoded = decoded?;
    let key = <[u8; 32]>::try_from(decoded.as_slice()).ok().map(EncryptionKey::new);
    decoded.zeroize();
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: [u8; 32] = *b"0123456789abcdef0123456789ABCDE\n";

    #[test]
    fn every_spelling_of_a_key_is_the_same_key() {
        let hex = HEXLOWER_PERMISSIVE.encode(&RAW);
        for text in [
            hex.clone(),
            hex.to_uppercase(),
            format!("  {hex}\n"),
            BASE64.encode(&RAW),
            BASE64_NOPAD.encode(&RAW),
            BASE64URL.encode(&RAW),
        ] {
            let keys = parse_keys("env K", text.as_bytes()).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(keys == [EncryptionKey::new(RAW)], "{text}");
        }
        assert!(parse_keys("env K", &RAW).unwrap() == [EncryptionKey::new(RAW)], "raw bytes are not trimmed");
    }

    #[test]
    fn a_bad_key_is_named_with_its_source_and_length() {
        let error = parse_keys("env NSTANCE_ENCRYPTION_KEY", &[b'x'; 31]).err().unwrap();
        assert_eq!(
            error.to_string(),
            "encryption key from env NSTANCE_ENCRYPTION_KEY has 31 bytes; need 32 raw, 64 hex or 44 base64"
        );
        for bad in ["", "short", &"z".repeat(64), &"é".repeat(22)] {
            assert!(parse_keys("env K", bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn up_to_four_lines_hold_keys_and_the_first_comes_first() {
        let line = |byte: u8| HEXLOWER_PERMISSIVE.encode(&[byte; 32]);
        let text = format!("{}\n{}\r\n\n{}\n{}\n", line(1), line(2), line(3), line(4));
        let keys = parse_keys("file k", text.as_bytes()).unwrap();
        assert!(keys == [1, 2, 3, 4].map(|byte| EncryptionKey::new([byte; 32])));
        assert!(parse_keys("file k", format!("{text}{}", line(5)).as_bytes()).is_err());
        assert!(parse_keys("file k", format!("{}\nnonsense", line(1)).as_bytes()).is_err());
    }

    #[test]
    fn a_key_file_for_everybody_is_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, RAW).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let source = KeySource::File(path.clone());
        assert!(load_key(&source).unwrap().warning.is_some());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(load_key(&source).unwrap().warning.is_none());
        assert!(load_key(&KeySource::Env("NSTANCE_NO_SUCH_KEY".into())).is_err());
    }
}
