//! State in object storage: adapters, compare-and-swap, records, lease, secrets and cache.
//!
//! The bucket is the truth. Everything else here either reaches it ([`memory`], [`file`], [`s3`], [`faulty`]), gives it
//! a form ([`records`]), changes it under our epoch ([`cas`], [`election`]), keeps secrets in it ([`secrets`]), or
//! remembers it for speed ([`cache`], [`rebuild`]). The cache may be deleted at any moment; nothing durable lives there.

pub mod key;

pub mod memory;

pub mod file;

pub mod s3;

pub mod faulty;

pub mod contract;

pub mod qualify;

pub mod upkeep;

pub mod records;

pub mod fence;

pub mod cas;

pub mod election;

pub mod rebuild;

pub mod cache;

pub mod keys;

pub mod seal;

pub mod secrets;

mod retry;

#[cfg(test)]
mod testing;

pub use cas::{Patience, RecordError, Records};
pub use fence::Fence;
pub use records::{Extra, Meta, Versioned};
