//! Who is who, and until when.
//!
//! Keys, the cluster's CA, the certificates it issues, registration nonces, what a shown certificate says about its
//! holder, and the TLS settings that carry all of it. Everything here is a function of its arguments: time and chance
//! are handed in, nothing is read from disk, nothing is sent; keys are kept through a port. Whether an identity is *still* welcome (the live state of
//! instance and operator records) is decided by the server.
//!
//! Invariants:
//! - every key is Ed25519, every connection TLS 1.3;
//! - a certificate opens a port by its role extension, and files' certificates never carry one;
//! - secrets have no `Display`, and their `Debug` shows nothing.

pub mod keys;

pub mod material;

mod der;
mod pem;

pub mod role;

pub mod subject;

pub mod ca;

pub mod vault;

pub mod issue;

pub mod nonce;

pub mod rejoin;

pub mod peer;

pub mod renew;

pub mod tls;

#[cfg(feature = "link")]
pub mod link;

#[cfg(test)]
mod testing;
