//! How well a bucket is kept: settings that no server needs, and on which a cluster's survival may rest one day.
//!
//! Servers have no right to look at them, and many stores have none of them. So each question has its own answer, and
//! not to know is one.

use async_trait::async_trait;

/// The answer to one question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer<T> {
    Known(T),
    /// Denied, not offered by the store, or not understood: nothing may be concluded from it.
    Unknown(String),
}

/// Whether what is overwritten or deleted can be had again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Versioning {
    Enabled,
    /// It was enabled; what is written now has no versions.
    Suspended,
    Off,
    /// The store has no such thing.
    None,
}

/// A rule by which the store itself takes away objects of ours that are in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taker {
    /// As the rule is called; may be empty.
    pub rule: String,
    /// Whose keys begin so; empty is all.
    pub prefix: String,
    /// `expires after 30 days`.
    pub effect: String,
}

/// What rules of the store do to objects of ours.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Retention {
    pub takers: Vec<Taker>,
    /// Days after which versions that were replaced are forgotten, the shortest; nothing if they are kept.
    pub old_versions_days: Option<u32>,
}

/// Whether strangers may be let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nobody can be.
    Closed,
    /// Somebody might be, one day: what is not shut.
    Ajar(Vec<String>),
    /// Somebody is: who, and by what.
    Open(String),
}

#[async_trait]
pub trait Upkeep: Send + Sync {
    async fn versioning(&self) -> Answer<Versioning>;
    /// Of the objects below our prefix.
    async fn retention(&self) -> Answer<Retention>;
    async fn access(&self) -> Answer<Access>;
}
