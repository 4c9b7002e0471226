//! What a text of key material is, of whatever algorithm: machines receive files that other tools made and will read.
//!
//! The grammar is narrower than what readers of PEM forgive. Text around the blocks, or a block of another kind, is
//! nearly always two files glued together or an error page in place of a secret, and the tool that would read it later
//! says so far less clearly.

use data_encoding::BASE64;
use ring::digest::{SHA256, digest};
use zeroize::Zeroizing;

const CERTIFICATE: &str = "CERTIFICATE";
const PRIVATE_KEY: &str = "PRIVATE KEY";
const PUBLIC_KEY: &str = "PUBLIC KEY";

const INTEGER: u8 = 0x02;
const BIT_STRING: u8 = 0x03;
const OCTET_STRING: u8 = 0x04;
const OID: u8 = 0x06;
const SEQUENCE: u8 = 0x30;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MaterialError {
    #[error("it is not text")]
    NotText,
    #[error("line {line} belongs to no PEM block; only blank lines may stand between blocks")]
    Outside { line: usize },
    #[error("the PEM block that begins in line {line} does not end, or is not base64")]
    Broken { line: usize },
    #[error("it holds {found} PEM blocks where {wanted} is wanted")]
    Count { found: usize, wanted: &'static str },
    #[error("PEM block {number} is not a {wanted}")]
    Kind { number: usize, wanted: &'static str },
    #[error("PEM block {number} is marked as a {wanted} but does not hold one")]
    Content { number: usize, wanted: &'static str },
}

/// One or more certificates, each of which is X.509, and nothing else.
pub fn check_certificates(text: &[u8]) -> Result<(), MaterialError> {
    let blocks = blocks(text)?;
    if blocks.is_empty() {
        return Err(MaterialError::Count { found: 0, wanted: "one CERTIFICATE or more" });
    }
    check_each(&blocks, CERTIFICATE, |der| matches!(x509_parser::parse_x509_certificate(der), Ok(([], _))))
}

/// Exactly one private key in PKCS#8, and nothing else.
pub fn check_private_key(text: &[u8]) -> Result<(), MaterialError> {
    check_one(&blocks(text)?, PRIVATE_KEY, |der| is_pkcs8(der).is_some())
}

/// Exactly one public key as `SubjectPublicKeyInfo`, and nothing else.
pub fn check_public_key(text: &[u8]) -> Result<(), MaterialError> {
    check_one(&blocks(text)?, PUBLIC_KEY, |der| is_spki(der).is_some())
}

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
    sum
}

fn check_one(blocks: &[Block<'_>], wanted: &'static str, holds: fn(&[u8]) -> bool) -> Result<(), MaterialError> {
    if blocks.len() != 1 {
        let wanted = if wanted == PRIVATE_KEY { "exactly one PRIVATE KEY" } else { "exactly one PUBLIC KEY" };
        return Err(MaterialError::Count { found: blocks.len(), wanted });
    }
    check_each(blocks, wanted, holds)
}

fn check_each(blocks: &[Block<'_>], wanted: &'static str, holds: fn(&[u8]) -> bool) -> Result<(), MaterialError> {
    for (n, block) in blocks.iter().enumerate() {
        let number = n + 1;
        if block.label != wanted {
            return Err(MaterialError::Kind { number, wanted });
        }
        if !holds(&block.der) {
            return Err(MaterialError::Content { number, wanted });
        }
    }
    Ok(())
}

struct Block<'a> {
    label: &'a str,
    der: Zeroizing<Vec<u8>>,
}

/// A block whose end has not been seen.
struct Open<'a> {
    label: &'a str,
    line: usize,
    body: Zeroizing<String>,
}

fn blocks(text: &[u8]) -> Result<Vec<Block<'_>>, MaterialError> {
    let text = std::str::from_utf8(text).map_err(|_| MaterialError::NotText)?;
    let mut blocks = Vec::new();
    let mut open: Option<Open<'_>> = None;
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        open = match open {
            None if line.is_empty() => None,
            None => {
                let label = boundary(line, "BEGIN").ok_or(MaterialError::Outside { line: n + 1 })?;
                // Reserved at once: a string that grows leaves copies of a private key behind.
                let body = Zeroizing::new(String::with_capacity(text.len().min(64 * 1024)));
                Some(Open { label, line: n + 1, body })
            }
            Some(block) if boundary(line, "END") == Some(block.label) => {
                let broken = MaterialError::Broken { line: block.line };
                let der = BASE64.decode(block.body.as_bytes()).map_err(|_| broken)?;
                blocks.push(Block { label: block.label, der: Zeroizing::new(der) });
                None
            }
            Some(mut block) => {
                block.body.push_str(line);
                Some(block)
            }
        };
    }
    match open {
        Some(block) => Err(MaterialError::Broken { line: block.line }),
        None => Ok(blocks),
    }
}

fn boundary<'a>(line: &'a str, which: &str) -> Option<&'a str> {
    line.strip_prefix("-----")?.strip_prefix(which)?.strip_prefix(' ')?.strip_suffix("-----")
}

/// `PrivateKeyInfo` and its successor: version, algorithm, key, and perhaps more that we need not know.
fn is_pkcs8(der: &[u8]) -> Option<()> {
    let (version, rest) = element(whole(der, SEQUENCE)?, INTEGER)?;
    let (algorithm, rest) = element(rest, SEQUENCE)?;
    element(algorithm, OID)?;
    element(rest, OCTET_STRING)?;
    matches!(version, [0 | 1]).then_some(())
}

fn is_spki(der: &[u8]) -> Option<()> {
    let (algorithm, rest) = element(whole(der, SEQUENCE)?, SEQUENCE)?;
    element(algorithm, OID)?;
    whole(rest, BIT_STRING).map(|_| ())
}

/// The content of one element that fills `der`.
fn whole(der: &[u8], tag: u8) -> Option<&[u8]> {
    element(der, tag).filter(|(_, rest)| rest.is_empty()).map(|(content, _)| content)
}

/// The content of the first element, which bears `tag`, and what follows it.
fn element(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = der.strip_prefix(&[tag])?.split_first()?;
    if length < 0x80 {
        return rest.split_at_checked(length.into());
    }
    let (digits, rest) = rest.split_at_checked(usize::from(length & 0x7f))?;
    // Four bytes of length are more than any file has.
    if digits.is_empty() || 4 < digits.len() {
        return None;
    }
    let length = digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit));
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use nstance_core::time::Timestamp;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        ca::{CaProfile, make_ca_certificate},
        keys::KeyPair,
        testing::{Dice, openssl},
    };

    fn certificate() -> String {
        let dice = Dice::new(1);
        let profile = CaProfile::of("demo".parse().unwrap());
        make_ca_certificate(&KeyPair::generate(&dice), &profile, Timestamp::from_millis(0), &dice).chain_pem
    }

    fn texts() -> [String; 3] {
        let key = KeyPair::generate(&Dice::new(1));
        [certificate(), key.to_pkcs8_pem().to_string(), key.public_key_pem()]
    }

    type Check = fn(&[u8]) -> Result<(), MaterialError>;
    const CHECKS: [Check; 3] = [check_certificates, check_private_key, check_public_key];

    #[test]
    fn each_kind_is_taken_by_its_own_check_alone() {
        for (n, text) in texts().iter().enumerate() {
            for (m, check) in CHECKS.iter().enumerate() {
                assert_eq!(check(text.as_bytes()).is_ok(), n == m, "{text} as {m}");
            }
        }
    }

    #[test]
    fn only_certificates_may_be_several() {
        for (n, text) in texts().iter().enumerate() {
            let twice = format!("\n{text}\r\n \n{text}");
            assert_eq!(CHECKS[n](twice.as_bytes()).is_ok(), n == 0, "{twice}");
            assert_eq!(CHECKS[n](format!("  {text}\n\n").as_bytes()), Ok(()));
        }
    }

    #[test]
    fn nothing_else_may_stand_there() {
        for (text, check) in texts().iter().zip(CHECKS) {
            let lines: Vec<&str> = text.lines().collect();
            for bad in [
                String::new(),
                format!("subject=x\n{text}"),
                format!("{text}tail"),
                text.replace("-----END", "----END"),
                text.replacen("-----BEGIN ", "-----BEGIN X ", 1),
                lines[..lines.len() - 1].join("\n"),
                [&lines[..1], &["Proc-Type: 4,ENCRYPTED"], &lines[1..]].concat().join("\n"),
                text.replacen(lines[1], &lines[1][4..], 1),
                [lines[0], lines[lines.len() - 1]].join("\n"),
                "\u{feff}".to_owned() + text,
            ] {
                assert!(check(bad.as_bytes()).is_err(), "{bad}");
            }
            assert_eq!(check(b"\xff"), Err(MaterialError::NotText));
        }
    }

    #[test]
    fn keys_of_other_algorithms_are_key_material_too() {
        for how in [["EC", "ec_paramgen_curve:P-256"], ["RSA", "rsa_keygen_bits:1024"]] {
            let Some(key) = openssl(&["genpkey", "-algorithm", how[0], "-pkeyopt", how[1]], b"") else { return };
            assert_eq!(check_private_key(key.as_bytes()), Ok(()));
            let public = openssl(&["pkey", "-pubout"], key.as_bytes()).unwrap();
            assert_eq!(check_public_key(public.as_bytes()), Ok(()));
            let traditional = openssl(&["pkey", "-traditional"], key.as_bytes()).unwrap();
            assert!(check_private_key(traditional.as_bytes()).is_err());
        }
    }

    #[test]
    fn sum_is_the_known_one() {
        assert_eq!(sha256(b"abc")[..4], [0xba, 0x78, 0x16, 0xbf]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_checks_panic(bytes: Vec<u8>, cut in 0..400_usize) {
            for (text, check) in texts().iter().zip(CHECKS) {
                let _ = check(&bytes);
                let _ = check(&text.as_bytes()[..cut.min(text.len())]);
            }
            let _ = is_pkcs8(&bytes);
            let _ = is_spki(&bytes);
        }
    }
}
