//! Sealing secrets: AES-256-GCM, bound to the secret's name.
//!
//! A blob is a 12-byte random nonce, the ciphertext and a 16-byte tag. The name is authenticated with it, so a blob that
//! somebody moves to another name does not open. Blobs of before that rule have no name in them and open with none.

use nstance_core::ports::clock::{Entropy, random};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use zeroize::{Zeroize as _, Zeroizing};

use crate::keys::EncryptionKey;

/// Which key opened a blob, and how. Tells whether it should be sealed anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// Position of the key in the list that was tried.
    pub key: usize,
    /// The name was authenticated.
    pub bound: bool,
}

/// Seals `plain` under `name`.
pub fn seal(key: &EncryptionKey, name: &str, plain: &[u8], entropy: &dyn Entropy) -> Vec<u8> {
    let nonce: [u8; NONCE_LEN] = random(entropy);
    seal_with(key, name.as_bytes(), plain, nonce)
}

fn seal_with(key: &EncryptionKey, aad: &[u8], plain: &[u8], nonce: [u8; NONCE_LEN]) -> Vec<u8> {
    let mut blob = Vec::with_capacity(NONCE_LEN + plain.len() + AES_256_GCM.tag_len());
    blob.extend_from_slice(&nonce);
    blob.extend_from_slice(plain);
    let tag = cipher(key)
        .seal_in_place_separate_tag(Nonce::assume_unique_for_key(nonce), Aad::from(aad), &mut blob[NONCE_LEN..])
        .expect("AES-GCM takes 64 GiB, a secret has at most one MiB");
    blob.extend_from_slice(tag.as_ref());
    blob
}

/// Opens `blob`: every key with the name first, then every key without. `None` if none fits.
pub fn open(keys: &[EncryptionKey], name: &str, blob: &[u8]) -> Option<(Zeroizing<Vec<u8>>, Opened)> {
    for (aad, bound) in [(name.as_bytes(), true), (&b""[..], false)] {
        for (at, key) in keys.iter().enumerate() {
            if let Some(plain) = open_with(key, aad, blob) {
                return Some((plain, Opened { key: at, bound }));
            }
        }
    }
    None
}

fn open_with(key: &EncryptionKey, aad: &[u8], blob: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (nonce, sealed) = blob.split_first_chunk::<NONCE_LEN>()?;
    let mut buffer = sealed.to_vec();
    let nonce = Nonce::assume_unique_for_key(*nonce);
    match cipher(key).open_in_place(nonce, Aad::from(aad), &mut buffer) {
        Ok(plain) => Some(Zeroizing::new(plain.to_vec())).inspect(|_| buffer.zeroize()),
        Err(_) => None,
    }
}

fn cipher(key: &EncryptionKey) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key.bytes()).expect("the key has the cipher's length by its type"))
}

#[cfg(test)]
mod tests {
    use nstance_rt::entropy::SeededEntropy;

    use super::*;

    fn key(byte: u8) -> EncryptionKey {
        EncryptionKey::new([byte; 32])
    }

    #[test]
    fn sealed_bytes_open_under_their_name_only() {
        let entropy = SeededEntropy::new(1);
        let blob = seal(&key(1), "ca.key", b"top secret", &entropy);
        assert_eq!(blob.len(), 12 + 10 + 16);
        let (plain, opened) = open(&[key(2), key(1)], "ca.key", &blob).unwrap();
        assert_eq!((plain.as_slice(), opened), (&b"top secret"[..], Opened { key: 1, bound: true }));
        assert!(open(&[key(1)], "other.key", &blob).is_none());
        assert!(open(&[key(2)], "ca.key", &blob).is_none());
        for at in 0..blob.len() {
            let mut broken = blob.clone();
            broken[at] ^= 1;
            assert!(open(&[key(1)], "ca.key", &broken).is_none(), "flipped bit in byte {at}");
        }
        assert!(open(&[key(1)], "ca.key", b"short").is_none());
    }

    #[test]
    fn blobs_of_before_the_name_was_bound_still_open() {
        let blob = seal_with(&key(1), b"", b"old", [7; NONCE_LEN]);
        let (plain, opened) = open(&[key(2), key(1)], "ca.key", &blob).unwrap();
        assert_eq!((plain.as_slice(), opened), (&b"old"[..], Opened { key: 1, bound: false }));
    }
}
