//! What Prometheus may ask. Labels are closed sets or names of groups; never an instance id.

pub mod hosts;

use std::sync::{Arc, atomic::AtomicU64};

use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use self::hosts::Hosts;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct GroupLabels {
    pub tenant: String,
    pub group: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CallLabels {
    pub provider: &'static str,
    pub op: &'static str,
    pub class: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabels {
    pub reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FieldLabels {
    pub field: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StoreLabels {
    pub op: &'static str,
    pub outcome: &'static str,
}

/// One per process; handed around by reference.
pub struct Metrics {
    registry: Registry,
    /// From the cause (a stream's break, a notice, a change) to the start of the provider's create call.
    pub replacement_start: Histogram,
    /// From the break of a stream to the start of the look at its VM.
    pub describe_start: Histogram,
    pub plan_seconds: Histogram,
    pub provider_seconds: Family<CallLabels, Histogram, fn() -> Histogram>,
    pub registration_rejected: Family<ReasonLabels, Counter>,
    pub registrations: Counter,
    pub reports: Counter,
    pub report_fields_cut: Family<FieldLabels, Counter>,
    pub agents_connected: Gauge,
    pub events: Family<ReasonLabels, Counter>,
    pub watchers_cut_off: Counter,
    pub plan_violations: Counter,
    pub leading: Gauge,
    pub epoch: Gauge,
    pub lease_renewals: Counter,
    pub store_requests: Family<StoreLabels, Counter>,
    pub lease_renewal_failures: Counter,
    pub certificate_expiry: Gauge<f64, AtomicU64>,
    pub cache_writes_dropped: Counter,
    pub config_pending: Gauge,
    pub config_unapplied: Gauge,
    pub hosts: Arc<Hosts>,
}

/// 100 µs to 30 s: the promise is milliseconds, the worst case is a describe of seconds.
const LATENCY: [f64; 18] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0,
    30.0,
];

fn latency() -> Histogram {
    Histogram::new(LATENCY)
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("nstance"),
            replacement_start: latency(),
            describe_start: latency(),
            plan_seconds: latency(),
            provider_seconds: Family::new_with_constructor(latency as fn() -> Histogram),
            registration_rejected: Family::default(),
            registrations: Counter::default(),
            reports: Counter::default(),
            report_fields_cut: Family::default(),
            agents_connected: Gauge::default(),
            events: Family::default(),
            watchers_cut_off: Counter::default(),
            plan_violations: Counter::default(),
            leading: Gauge::default(),
            epoch: Gauge::default(),
            lease_renewals: Counter::default(),
            store_requests: Family::default(),
            lease_renewal_failures: Counter::default(),
            certificate_expiry: Gauge::default(),
            cache_writes_dropped: Counter::default(),
            config_pending: Gauge::default(),
            config_unapplied: Gauge::default(),
            hosts: Arc::default(),
        };
        let it = &mut metrics;
        let registry = &mut it.registry;
        registry.register(
            "replacement_start_seconds",
            "From a loss to the start of the create call of its replacement",
            it.replacement_start.clone(),
        );
        registry.register(
            "describe_start_seconds",
            "From the break of an agent's stream to the look at its VM",
            it.describe_start.clone(),
        );
        registry.register("plan_seconds", "Time of one planning pass of one group", it.plan_seconds.clone());
        registry.register("provider_seconds", "Provider calls", it.provider_seconds.clone());
        registry.register("registration_rejected", "Refused registrations", it.registration_rejected.clone());
        registry.register("store_requests", "Requests to the object store", it.store_requests.clone());
        registry.register("registrations", "Accepted registrations", it.registrations.clone());
        registry.register("health_reports", "Health reports received", it.reports.clone());
        registry.register(
            "report_fields_cut",
            "Fields of health reports that were out of bounds and cut or left out",
            it.report_fields_cut.clone(),
        );
        registry.register("agents_connected", "Agents with an open report stream", it.agents_connected.clone());
        registry.register("events", "Events by reason", it.events.clone());
        registry.register(
            "watchers_cut_off",
            "Watch streams that were ended because nobody read them",
            it.watchers_cut_off.clone(),
        );
        registry.register("plan_violations", "Plans the checker objected to", it.plan_violations.clone());
        registry.register("leading", "1 while this server leads its shard", it.leading.clone());
        registry.register("epoch", "Epoch of the present or last term", it.epoch.clone());
        registry.register("lease_renewals", "Renewed leases", it.lease_renewals.clone());
        registry.register(
            "lease_renewal_failures",
            "Lease renewals that failed and were retried",
            it.lease_renewal_failures.clone(),
        );
        registry.register(
            "certificate_expiry_seconds",
            "Unix time at which the server's own certificate ends",
            it.certificate_expiry.clone(),
        );
        registry.register(
            "cache_writes_dropped",
            "Cache rows not written because the writer was behind; the next rebuild reads them again",
            it.cache_writes_dropped.clone(),
        );
        registry.register(
            "config_pending",
            "1 while the store holds another config than the one in force",
            it.config_pending.clone(),
        );
        registry.register(
            "config_unapplied",
            "Settings of the config in force that wait for a restart",
            it.config_unapplied.clone(),
        );
        registry.register_collector(Box::new(it.hosts.clone()));
        metrics
    }

    /// The Prometheus text form.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }

    pub fn group(group: &nstance_core::ids::GroupRef) -> GroupLabels {
        GroupLabels { tenant: group.tenant.to_string(), group: group.group.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_names_the_headline_histogram() {
        let metrics = Metrics::new();
        metrics.replacement_start.observe(0.004);
        let text = metrics.text();
        assert!(text.contains("nstance_replacement_start_seconds_bucket{le=\"0.005\"} 1"), "{text}");
    }
}
