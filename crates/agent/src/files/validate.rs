//! Judges the content of a file by its extension, before anything sees it under its name.

use nstance_identity::material::{self, MaterialError};

use crate::files::{
    json::{self, JsonError},
    names::FileName,
};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error(transparent)]
    Material(#[from] MaterialError),
    #[error(transparent)]
    Json(#[from] JsonError),
    #[error("line {line} is neither blank, nor a comment that begins with `#`, nor KEY=value")]
    Env { line: usize },
    #[error("it holds a NUL byte")]
    Nul,
}

/// An extension nobody knows has nothing to say about the content.
pub(crate) fn validate(name: &FileName, content: &[u8]) -> Result<(), Invalid> {
    match name.extension() {
        "crt" => material::check_certificates(content)?,
        "key" => material::check_private_key(content)?,
        "pub" => material::check_public_key(content)?,
        "json" => json::check(content)?,
        "env" => check_env(content)?,
        _ => {}
    }
    Ok(())
}

fn check_env(content: &[u8]) -> Result<(), Invalid> {
    if content.contains(&0) {
        return Err(Invalid::Nul);
    }
    let fits = |line: &[u8]| {
        let text = line.trim_ascii();
        text.is_empty() || text.starts_with(b"#") || assigns(line)
    };
    match content.split(|byte| *byte == b'\n').position(|line| !fits(line)) {
        None => Ok(()),
        Some(n) => Err(Invalid::Env { line: n + 1 }),
    }
}

fn assigns(line: &[u8]) -> bool {
    let Some(end) = line.iter().position(|byte| *byte == b'=') else { return false };
    let key = &line[..end];
    key.first().is_some_and(|first| first.is_ascii_alphabetic() || *first == b'_')
        && key.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;
    use nstance_identity::{
        ca::{CaProfile, make_ca_certificate},
        keys::KeyPair,
    };
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn taken(name: &str, content: impl AsRef<[u8]>) -> bool {
        validate(&FileName::parse(name).unwrap(), content.as_ref()).is_ok()
    }

    #[test]
    fn extension_says_what_a_file_must_be() {
        let dice = SeededEntropy::new(1);
        let key = KeyPair::generate(&dice);
        let profile = CaProfile::of("demo".parse().unwrap());
        let certificate = make_ca_certificate(&key, &profile, Timestamp::from_millis(0), &dice).chain_pem;
        let (private, public) = (key.to_pkcs8_pem().to_string(), key.public_key_pem());
        for (name, good, bad) in [
            ("a.crt", certificate.as_str(), public.as_str()),
            ("a.crt", &certificate.repeat(3), &(certificate.clone() + &private)),
            ("a.key", &private, &certificate),
            ("a.key", &private, &private.repeat(2)),
            ("a.pub", &public, &private),
            ("a.pub", &public, ""),
            ("a.json", r#"{"a": 1}"#, "{a: 1}"),
            ("a.json", "null", ""),
            ("a.env", "A=1\n", "A\n"),
        ] {
            assert!(taken(name, good), "{name}: {good}");
            assert!(!taken(name, bad), "{name}: {bad}");
        }
    }

    #[test]
    fn environment_is_lines_of_assignments() {
        for good in ["", "\n\n", "# c\n  # c\n", "A=\n_b1=x = y # z\r\n\r\nC=\"1 2\"", "A=\u{e4}", "A==", "A='"] {
            assert!(taken("a.env", good), "{good:?}");
        }
        assert!(taken("a.env", b"A=\xff\n"), "values are bytes");
        for bad in ["A", "=1", "1A=1", " A=1", "A =1", "export A=1", "A-B=1", "A=1\0", "#\0", "A=1\nmore"] {
            assert!(!taken("a.env", bad), "{bad:?}");
        }
        let error = validate(&FileName::parse("a.env").unwrap(), b"A=1\n\nB\n").unwrap_err();
        assert_eq!(error, Invalid::Env { line: 3 });
    }

    #[test]
    fn unknown_extension_takes_any_bytes() {
        for name in ["a", "a.", "a.txt", "a.JSON", "a.crt.bak", "crt"] {
            assert!(taken(name, b"\0\xff{"), "{name}");
            assert!(taken(name, b""), "{name}");
        }
    }
}
