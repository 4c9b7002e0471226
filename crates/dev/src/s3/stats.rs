//! Counts of what was asked and how it went, for people and for tests of request budgets.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::Serialize;

/// Since the start, or since they were last reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct S3Stats {
    /// Requests that named an operation, including those that were refused or fell to a fault.
    pub requests: u64,
    pub operations: BTreeMap<String, u64>,
    /// By access key, then by operation; unsigned requests under the empty key.
    pub clients: BTreeMap<String, BTreeMap<String, u64>>,
    /// Answers by HTTP status. Requests that got no answer are under `faults` only.
    pub statuses: BTreeMap<u16, u64>,
    /// How often a fault rule took effect.
    pub faults: u64,
}

#[derive(Default)]
pub(super) struct Counts(Mutex<S3Stats>);

impl Counts {
    pub(super) fn request(&self, access_key: &str, operation: &str) {
        let mut stats = self.stats();
        stats.requests += 1;
        *stats.operations.entry(operation.to_owned()).or_default() += 1;
        *stats.clients.entry(access_key.to_owned()).or_default().entry(operation.to_owned()).or_default() += 1;
    }

    pub(super) fn answer(&self, status: u16) {
        *self.stats().statuses.entry(status).or_default() += 1;
    }

    pub(super) fn faults(&self, n: u64) {
        self.stats().faults += n;
    }

    pub(super) fn show(&self) -> S3Stats {
        self.stats().clone()
    }

    pub(super) fn reset(&self) {
        *self.stats() = S3Stats::default();
    }

    fn stats(&self) -> MutexGuard<'_, S3Stats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
