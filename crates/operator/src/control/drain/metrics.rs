//! What dashboards count of drains. The words are a closed set.

use std::time::Duration;

use super::Drains;
use crate::{
    control::queue::{NoMetrics, QueueMetrics},
    decide::drain::places::Standing,
    metrics::{Metrics, ResultLabels, StateLabels},
};

/// Where drains stand: all words of [`DrainMetrics::open`].
const STANDINGS: [(&str, Option<Standing>); 4] = [
    ("waiting", Some(Standing::Waiting)),
    ("active", Some(Standing::Active)),
    ("blocked", Some(Standing::Blocked)),
    ("other", None),
];

/// Takes what the coordinator measures; it must be quick.
pub trait DrainMetrics: QueueMetrics {
    /// How many open drains stand so: `waiting`, `active`, `blocked`, `other`.
    fn open(&self, state: &'static str, n: usize);

    /// A drain ended: `drained`, `no_node`, `vm_gone`, `timed_out`, `cancelled`.
    fn ended(&self, result: &'static str, took: Duration);

    /// A pod was asked to go: `evicted`, `deleted`, `budget`, `multiple_budgets`, `namespace_terminating`, `throttled`, `failed`.
    fn eviction(&self, result: &'static str);
}

impl DrainMetrics for NoMetrics {
    fn open(&self, _: &'static str, _: usize) {}

    fn ended(&self, _: &'static str, _: Duration) {}

    fn eviction(&self, _: &'static str) {}
}

impl DrainMetrics for Metrics {
    fn open(&self, state: &'static str, n: usize) {
        self.drains.get_or_create(&StateLabels { state }).set(i64::try_from(n).unwrap_or(i64::MAX));
    }

    fn ended(&self, result: &'static str, took: Duration) {
        self.drain_seconds.get_or_create(&ResultLabels { result }).observe(took.as_secs_f64());
    }

    fn eviction(&self, result: &'static str) {
        self.evictions.get_or_create(&ResultLabels { result }).inc();
    }
}

impl Drains {
    pub(super) fn count_open(&self) {
        let standings: Vec<Option<Standing>> = self.open().values().map(|it| it.place.map(|it| it.standing)).collect();
        for (word, standing) in STANDINGS {
            self.metrics.open(word, standings.iter().filter(|it| **it == standing).count());
        }
    }
}
