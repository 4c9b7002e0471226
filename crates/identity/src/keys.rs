//! Ed25519 key pairs and public keys, in the forms other tools can read.
//!
//! Private keys are written as PKCS#8 **version 1**: OpenSSL 3.0 refuses the version 2 that ring would write. Both
//! versions are read.

use std::fmt;

use data_encoding::HEXLOWER;
use nstance_core::ports::clock::Entropy;
use ring::{
    digest::{SHA256, digest},
    signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey},
};
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer, pem::PemObject};
use zeroize::Zeroizing;

use crate::pem;

/// What precedes the 32 bytes of the key in a `SubjectPublicKeyInfo` (RFC 8410); nothing follows them.
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// What precedes the 32 bytes of the seed in PKCS#8 version 1.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("private key is not one PKCS#8 PEM block of an Ed25519 key")]
    Private,
    #[error("public key is not one SPKI PEM block of an Ed25519 key")]
    Public,
}

/// A private key and its public half. Wiped when dropped; `Debug` shows nothing but the type.
pub struct KeyPair {
    seed: Zeroizing<[u8; 32]>,
    pair: Ed25519KeyPair,
    public: PublicKey,
}

impl KeyPair {
    pub fn generate(entropy: &dyn Entropy) -> Self {
        let mut seed = Zeroizing::new([0; 32]);
        entropy.fill(seed.as_mut());
        Self::from_seed(seed)
    }

    fn from_seed(seed: Zeroizing<[u8; 32]>) -> Self {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed.as_ref()).expect("any 32 bytes are a seed");
        let raw = pair.public_key().as_ref().try_into().expect("an Ed25519 public key has 32 bytes");
        Self { seed, pair, public: PublicKey(raw) }
    }

    /// Reads one `PRIVATE KEY` block, PKCS#8 version 1 or 2.
    pub fn from_pkcs8_pem(text: &[u8]) -> Result<Self, KeyError> {
        let mut blocks = PrivatePkcs8KeyDer::pem_slice_iter(text);
        let (Some(Ok(der)), None) = (blocks.next(), blocks.next()) else { return Err(KeyError::Private) };
        Self::from_pkcs8_der(der.secret_pkcs8_der())
    }

    /// Reads one block after the other; one at least.
    pub fn all_from_pkcs8_pem(text: &[u8]) -> Result<Vec<Self>, KeyError> {
        let keys: Result<Vec<_>, _> = PrivatePkcs8KeyDer::pem_slice_iter(text)
            .map(|block| Self::from_pkcs8_der(block.map_err(|_| KeyError::Private)?.secret_pkcs8_der()))
            .collect();
        keys.and_then(|keys| if keys.is_empty() { Err(KeyError::Private) } else { Ok(keys) })
    }

    fn from_pkcs8_der(der: &[u8]) -> Result<Self, KeyError> {
        let read = Ed25519KeyPair::from_pkcs8_maybe_unchecked(der).map_err(|_| KeyError::Private)?;
        // ring keeps the seed to itself. It lies at the same place in both versions; if some odd encoding moved it, the
        // public halves differ and the key is refused rather than silently another one.
        let seed = der.get(PKCS8_PREFIX.len()..PKCS8_PREFIX.len() + 32).and_then(|bytes| bytes.try_into().ok());
        let pair = Self::from_seed(Zeroizing::new(seed.ok_or(KeyError::Private)?));
        if pair.public.0 == read.public_key().as_ref() { Ok(pair) } else { Err(KeyError::Private) }
    }

    fn pkcs8_der(&self) -> Zeroizing<Vec<u8>> {
        let mut der = Zeroizing::new(Vec::with_capacity(PKCS8_PREFIX.len() + 32));
        der.extend_from_slice(&PKCS8_PREFIX);
        der.extend_from_slice(self.seed.as_ref());
        der
    }

    /// PKCS#8 version 1, which OpenSSL, Go and ring all read.
    pub fn to_pkcs8_pem(&self) -> Zeroizing<String> {
        pem::encode("PRIVATE KEY", &self.pkcs8_der())
    }

    pub(crate) fn to_rustls(&self) -> PrivatePkcs8KeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.pkcs8_der().to_vec())
    }

    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    pub fn public_key_der(&self) -> Vec<u8> {
        self.public.to_der()
    }

    pub fn public_key_pem(&self) -> String {
        self.public.to_pem()
    }

    pub fn fingerprint(&self) -> String {
        self.public.fingerprint()
    }

    /// An Ed25519 signature: deterministic, 64 bytes.
    pub fn sign(&self, message: &[u8]) -> Vec<u8> {
        self.pair.sign(message).as_ref().to_vec()
    }
}

impl fmt::Debug for KeyPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyPair")
    }
}

/// An Ed25519 public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Reads exactly one `PUBLIC KEY` block.
    pub fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        let mut blocks = SubjectPublicKeyInfoDer::pem_slice_iter(text);
        let (Some(Ok(der)), None) = (blocks.next(), blocks.next()) else { return Err(KeyError::Public) };
        Self::from_der(&der)
    }

    /// Reads a DER `SubjectPublicKeyInfo`. There is exactly one spelling of an Ed25519 key, so comparing suffices.
    pub fn from_der(der: &[u8]) -> Result<Self, KeyError> {
        der.strip_prefix(&SPKI_PREFIX).and_then(|raw| raw.try_into().ok()).map(Self).ok_or(KeyError::Public)
    }

    pub fn to_der(&self) -> Vec<u8> {
        [&SPKI_PREFIX[..], &self.0].concat()
    }

    pub fn to_pem(&self) -> String {
        String::clone(&pem::encode("PUBLIC KEY", &self.to_der()))
    }

    /// First 16 hex digits of the SPKI's SHA-256: how keys and CAs are named in records and logs.
    pub fn fingerprint(&self) -> String {
        HEXLOWER.encode(&digest(&SHA256, &self.to_der()).as_ref()[..8])
    }

    pub fn verify(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0).verify(message, signature).is_ok()
    }

    pub(crate) fn raw(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.fingerprint())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{Dice, openssl};

    #[test]
    fn keys_survive_being_written_and_read() {
        let key = KeyPair::generate(&Dice::new(1));
        let again = KeyPair::from_pkcs8_pem(key.to_pkcs8_pem().as_bytes()).unwrap();
        assert_eq!(again.public_key(), key.public_key());
        assert!(key.public_key().verify(b"text", &again.sign(b"text")));
        assert!(!key.public_key().verify(b"texT", &again.sign(b"text")));
        assert_eq!(PublicKey::from_pem(key.public_key_pem().as_bytes()).unwrap(), key.public_key());
        assert_eq!(key.fingerprint().len(), 16);
    }

    #[test]
    fn version_two_of_pkcs8_is_read_too() {
        let document = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
        let text = pem::encode("PRIVATE KEY", document.as_ref());
        let key = KeyPair::from_pkcs8_pem(text.as_bytes()).unwrap();
        let theirs = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
        assert_eq!(key.public_key().raw(), theirs.public_key().as_ref());
    }

    #[test]
    fn openssl_reads_our_keys_and_we_read_its_keys() {
        let key = KeyPair::generate(&Dice::new(2));
        let Some(public) = openssl(&["pkey", "-pubout"], key.to_pkcs8_pem().as_bytes()) else { return };
        assert_eq!(PublicKey::from_pem(public.as_bytes()).unwrap(), key.public_key());
        let made = openssl(&["genpkey", "-algorithm", "ED25519"], b"").unwrap();
        assert!(KeyPair::from_pkcs8_pem(made.as_bytes()).is_ok());
        let rsa = openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"], b"").unwrap();
        assert_eq!(KeyPair::from_pkcs8_pem(rsa.as_bytes()).unwrap_err(), KeyError::Private);
        let public = openssl(&["pkey", "-pubout"], rsa.as_bytes()).unwrap();
        assert_eq!(PublicKey::from_pem(public.as_bytes()).unwrap_err(), KeyError::Public);
    }

    #[test]
    fn several_keys_are_read_in_their_order() {
        let keys = [KeyPair::generate(&Dice::new(5)), KeyPair::generate(&Dice::new(6))];
        let text = format!("{}\n{}", keys[0].to_pkcs8_pem().as_str(), keys[1].to_pkcs8_pem().as_str());
        let read = KeyPair::all_from_pkcs8_pem(text.as_bytes()).unwrap();
        assert_eq!(read.iter().map(KeyPair::public_key).collect::<Vec<_>>(), keys.map(|it| it.public_key()));
        for bad in ["", "text", keys_and_a_torn_one(&text).as_str()] {
            assert_eq!(KeyPair::all_from_pkcs8_pem(bad.as_bytes()).unwrap_err(), KeyError::Private);
        }
    }

    fn keys_and_a_torn_one(text: &str) -> String {
        format!("{text}\n-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----\n")
    }

    #[test]
    fn two_blocks_are_not_one_key() {
        let key = KeyPair::generate(&Dice::new(3));
        let twice = [key.public_key_pem(), key.public_key_pem()].concat();
        assert!(PublicKey::from_pem(twice.as_bytes()).is_err());
        assert!(PublicKey::from_pem(key.to_pkcs8_pem().as_bytes()).is_err());
        assert!(PublicKey::from_pem(b"").is_err());
    }

    #[test]
    fn debug_of_a_key_pair_shows_nothing() {
        assert_eq!(format!("{:?}", KeyPair::generate(&Dice::new(4))), "KeyPair");
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_readers_panic(bytes: Vec<u8>) {
            let _ = PublicKey::from_der(&bytes);
            let _ = PublicKey::from_pem(&bytes);
            let _ = KeyPair::from_pkcs8_pem(&bytes);
            let _ = KeyPair::from_pkcs8_der(&bytes);
        }
    }
}
