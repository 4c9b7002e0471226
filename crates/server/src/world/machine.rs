//! What an agent says of its machine. Kept for people and for figures; nothing is decided from it.

use std::{sync::Arc, time::Duration};

use nstance_core::{instance::Addresses, time::Timestamp};
use nstance_proto::v1;

/// Bounded by whoever fills it, whatever the agent sent.
#[derive(Default)]
pub struct Machine {
    pub info: Option<v1::MachineInfo>,
    /// As the agent found out on the spot.
    pub spot: Option<bool>,
    /// As the agent said last; who trusts them is decided elsewhere.
    pub addresses: Addresses,
    pub boot: BlackBox,
    /// The last figures, and from when on they are too old to count.
    pub load: Option<(Load, Timestamp)>,
}

/// The last black box, and how much of it others know.
#[derive(Default)]
pub struct BlackBox {
    pub report: Option<Arc<v1::BootReport>>,
    /// Not in the cache yet.
    pub is_new: bool,
    pub cached_at: Option<Timestamp>,
    /// What is in the cache says that it failed.
    pub cached_failed: bool,
    /// When its failure was told last.
    pub told_at: Option<Timestamp>,
}

impl BlackBox {
    /// What is to be written to the cache now, if anything.
    pub fn to_cache(&mut self, now: Timestamp) -> Option<Arc<v1::BootReport>> {
        let report = self.report.clone().filter(|_| std::mem::take(&mut self.is_new))?;
        (self.cached_at, self.cached_failed) = (Some(now), report.failed);
        Some(report)
    }
}

/// The figures of one report. Shares of one, and bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    pub cpu: Option<f64>,
    pub memory: Option<f64>,
    pub disk: Option<f64>,
    pub sent: Option<f64>,
    pub received: Option<f64>,
    pub read: Option<f64>,
    pub written: Option<f64>,
}

/// How long a report's figures count.
pub fn counts_for(interval: Duration) -> Duration {
    // An agent without periodic reports still measures by the minute.
    let interval = if interval.is_zero() { Duration::from_secs(60) } else { interval };
    interval.saturating_mul(3)
}
