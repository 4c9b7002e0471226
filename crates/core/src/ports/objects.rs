//! The object store: the only treasure. Small on purpose, and without an unconditional write.

use std::{fmt, time::Duration};

use async_trait::async_trait;

/// Opaque version of an object. Equal tags mean equal content; nothing else may be read into it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ETag(pub String);

impl fmt::Display for ETag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub body: Vec<u8>,
    pub etag: ETag,
    /// The store's own time of the write, for people.
    pub modified: Option<crate::time::Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub key: String,
    pub etag: ETag,
    pub size: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Only if nothing is there.
    Create,
    /// Only over this very version.
    Match(ETag),
}

/// Why a call did not do what was asked, told apart by what the caller may conclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreFault {
    /// The store itself said that the key is absent.
    NotFound,
    /// Exists, differs, or is missing for a `Match`. Not applied, unless an own earlier try was.
    Precondition,
    /// Sent, outcome unknown. Re-read until known.
    Ambiguous,
    /// Surely not applied.
    Unavailable(Unavailable),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unavailable {
    Network,
    Throttled,
    /// A permission problem; never an absence.
    Denied,
    /// The request can never succeed as it is.
    Invalid,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op} of {key}: {message}")]
pub struct StoreError {
    pub op: &'static str,
    pub key: String,
    pub fault: StoreFault,
    /// The store's own words.
    pub message: String,
    pub retry_after: Option<Duration>,
}

impl StoreError {
    pub fn new(op: &'static str, key: impl Into<String>, fault: StoreFault, message: impl Into<String>) -> Self {
        Self { op, key: key.into(), fault, message: message.into(), retry_after: None }
    }

    pub fn is_not_found(&self) -> bool {
        self.fault == StoreFault::NotFound
    }

    pub fn is_precondition(&self) -> bool {
        self.fault == StoreFault::Precondition
    }
}

/// Takes one page of a listing.
pub type ShowPage<'a> = &'a mut (dyn FnMut(&[Listed]) + Send);

/// Linearizable per key. Keys are relative to the configured prefix; adapters retry reads, and writes only with the
/// same bytes.
#[async_trait]
pub trait ObjectStore: Send + Sync {
    async fn get(&self, key: &str) -> Result<Object, StoreError>;

    /// `None` if the object still has `etag`.
    async fn get_if_changed(&self, key: &str, etag: &ETag) -> Result<Option<Object>, StoreError>;

    /// Writes the whole object under a condition and answers its new version.
    async fn put(&self, key: &str, body: Vec<u8>, condition: Condition) -> Result<ETag, StoreError>;

    /// Removes the object. Absent is a success.
    async fn delete(&self, key: &str) -> Result<(), StoreError>;

    /// Every object below `prefix`, all pages, in key order; or an error, never a part.
    async fn list(&self, prefix: &str) -> Result<Vec<Listed>, StoreError>;

    /// Like [`list`](Self::list), and shows each page as soon as it is there. What was shown counts for nothing when it
    /// ends in an error, and may be shown again after one.
    async fn list_pages(&self, prefix: &str, show: ShowPage<'_>) -> Result<Vec<Listed>, StoreError> {
        let listed = self.list(prefix).await?;
        show(&listed);
        Ok(listed)
    }

    /// The store as a person would name it, without credentials: `s3://bucket at http://…`.
    fn describe(&self) -> String;
}
