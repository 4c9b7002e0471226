//! The cryptography that our handshakes may use: what our own certificates need, and nothing besides.
//!
//! Every key of a cluster is Ed25519 and both ends of every connection are ours, so neither RSA nor the NIST curves
//! have anything to do here. Leaving them out is less to attack, and a quarter of a megabyte less on every instance:
//! the tables of P-256 alone are 150 kB.

use std::sync::Arc;

use ring::rand::{SecureRandom as _, SystemRandom};
use rustls::{
    Error, SignatureScheme,
    crypto::{
        CryptoProvider, GetRandomFailed, KeyProvider, SecureRandom, WebPkiSupportedAlgorithms,
        ring::{cipher_suite, kx_group, sign::any_eddsa_type},
    },
    pki_types::PrivateKeyDer,
    sign::SigningKey,
};
use zeroize::Zeroizing;

static SIGNATURES: WebPkiSupportedAlgorithms = WebPkiSupportedAlgorithms {
    all: &[webpki::ring::ED25519],
    mapping: &[(SignatureScheme::ED25519, &[webpki::ring::ED25519])],
};

/// All three suites of TLS 1.3 stay: machines without AES instructions are many times faster with ChaCha20.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![kx_group::X25519],
        signature_verification_algorithms: SIGNATURES,
        secure_random: &Ours,
        key_provider: &Ours,
    })
}

#[derive(Debug)]
struct Ours;

impl SecureRandom for Ours {
    fn fill(&self, buf: &mut [u8]) -> Result<(), GetRandomFailed> {
        SystemRandom::new().fill(buf).map_err(|_| GetRandomFailed)
    }
}

impl KeyProvider for Ours {
    fn load_private_key(&self, key: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
        let key = Zeroizing::new(key);
        match &*key {
            PrivateKeyDer::Pkcs8(key) => any_eddsa_type(key),
            _ => Err(Error::General("a private key of TLS must be Ed25519 in PKCS#8".to_owned())),
        }
    }
}
