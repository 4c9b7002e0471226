//! The secrets store: CA and nonce keys, and what users put there.

use async_trait::async_trait;

use super::objects::StoreError;

/// Bytes that must not be shown. They are wiped by whoever made them; here they have no `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Errors as in [`super::objects`]: `NotFound` only on the store's own word; `Precondition` from [`Secrets::create`]
/// means that the name is taken.
#[async_trait]
pub trait Secrets: Send + Sync {
    async fn get(&self, name: &str) -> Result<Secret, StoreError>;
    /// Atomic: of two callers one wins, and the other reads the winner's.
    async fn create(&self, name: &str, secret: &Secret) -> Result<(), StoreError>;
    async fn put(&self, name: &str, secret: &Secret) -> Result<(), StoreError>;
    async fn delete(&self, name: &str) -> Result<(), StoreError>;
    /// Where secrets live, as a person would name it.
    fn describe(&self) -> String;
}
