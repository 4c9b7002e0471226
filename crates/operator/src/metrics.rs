//! What Prometheus may ask. Labels are closed sets or names of shards; never an instance id.

use std::{sync::Arc, time::Duration};

use nstance_core::ports::clock::Clock;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::control::{
    drain::DrainMetrics as _,
    queue::{QueueMetrics, Reconciled},
};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ShardLabels {
    pub shard: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RpcLabels {
    pub shard: String,
    pub method: &'static str,
    pub code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReconcileLabels {
    pub controller: &'static str,
    pub result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ControllerLabels {
    pub controller: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabels {
    pub state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabels {
    pub result: &'static str,
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

/// One per process; handed around by reference.
pub struct Metrics {
    registry: Registry,
    clock: Arc<dyn Clock>,
    pub shard_up: Family<ShardLabels, Gauge>,
    pub rpc_seconds: Histograms<RpcLabels>,
    pub reconcile_seconds: Histograms<ReconcileLabels>,
    pub queue_depth: Family<ControllerLabels, Gauge>,
    pub drains: Family<StateLabels, Gauge>,
    pub drain_seconds: Histograms<ResultLabels>,
    pub evictions: Family<ResultLabels, Counter>,
    /// 1 while import waits for shards.
    pub import_waiting: Gauge,
    /// How long the certificate is still valid.
    pub cert_expiry_seconds: Gauge,
    /// How long the token in the kubeconfig Secret is still valid.
    pub kubeconfig_token_seconds: Gauge,
    pub is_leader: Gauge,
}

fn short() -> Histogram {
    Histogram::new([0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0])
}

fn long() -> Histogram {
    Histogram::new([1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0])
}

impl Metrics {
    pub fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        let mut registry = Registry::with_prefix("nstance_operator");
        let shard_up = Family::default();
        registry.register("shard_up", "Whether the shard answers", shard_up.clone());
        let rpc_seconds: Histograms<RpcLabels> = Family::new_with_constructor(short);
        registry.register("rpc_seconds", "Calls to shards", rpc_seconds.clone());
        let reconcile_seconds: Histograms<ReconcileLabels> = Family::new_with_constructor(short);
        registry.register("reconcile_seconds", "Looks at one object", reconcile_seconds.clone());
        let queue_depth = Family::default();
        registry.register("queue_depth", "Objects that wait to be looked at", queue_depth.clone());
        let drains = Family::default();
        registry.register("drains", "Drains under way", drains.clone());
        let drain_seconds: Histograms<ResultLabels> = Family::new_with_constructor(long);
        registry.register("drain_seconds", "Drains that ended", drain_seconds.clone());
        let evictions = Family::default();
        registry.register("evictions", "Evictions asked for", evictions.clone());
        let import_waiting = Gauge::default();
        registry.register("import_waiting", "Whether import waits for shards", import_waiting.clone());
        let cert_expiry_seconds = Gauge::default();
        registry.register("cert_expiry_seconds", "How long the certificate is valid", cert_expiry_seconds.clone());
        let kubeconfig_token_seconds = Gauge::default();
        let help = "How long the token in the kubeconfig Secret is valid";
        registry.register("kubeconfig_token_seconds", help, kubeconfig_token_seconds.clone());
        let is_leader = Gauge::default();
        registry.register("is_leader", "Whether this process leads", is_leader.clone());
        Arc::new(Self {
            registry,
            clock,
            shard_up,
            rpc_seconds,
            reconcile_seconds,
            queue_depth,
            drains,
            drain_seconds,
            evictions,
            import_waiting,
            cert_expiry_seconds,
            kubeconfig_token_seconds,
            is_leader,
        })
    }

    pub fn shard_is_up(&self, shard: &str, is_up: bool) {
        self.shard_up.get_or_create(&ShardLabels { shard: shard.to_owned() }).set(i64::from(is_up));
    }

    pub fn shard_is_removed(&self, shard: &str) {
        self.shard_up.remove(&ShardLabels { shard: shard.to_owned() });
    }

    pub fn rpc(&self, shard: &str, method: &'static str, code: tonic::Code, took: Duration) {
        let labels = RpcLabels { shard: shard.to_owned(), method, code: format!("{code:?}") };
        self.rpc_seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Seconds from now until then; 0 if it is past.
    pub fn seconds_until(&self, then: nstance_core::time::Timestamp) -> i64 {
        i64::try_from(then.since(self.clock.now()).as_secs()).unwrap_or(i64::MAX)
    }

    /// OpenMetrics text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// A page with a sample of every metric: what a dashboard may ask for.
pub fn example_metrics() -> String {
    let metrics = Metrics::new(Arc::new(nstance_rt::clock::SystemClock));
    let took = Duration::from_secs(1);
    metrics.shard_is_up("s", true);
    metrics.rpc("s", "UpsertGroup", tonic::Code::Ok, took);
    metrics.reconciled("pool", Reconciled::Ok, took);
    metrics.queue_depth.get_or_create(&ControllerLabels { controller: "pool" }).set(1);
    metrics.open("active", 1);
    metrics.ended("drained", took);
    metrics.eviction("evicted");
    metrics.text()
}

impl QueueMetrics for Metrics {
    fn reconciled(&self, controller: &'static str, result: Reconciled, took: Duration) {
        let labels = ReconcileLabels { controller, result: result.as_str() };
        self.reconcile_seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use nstance_rt::clock::SystemClock;

    use super::*;

    #[test]
    fn names_carry_the_prefix_and_a_removed_shard_is_not_shown() {
        let metrics = Metrics::new(Arc::new(SystemClock));
        metrics.shard_is_up("dev-1", true);
        metrics.rpc("dev-1", "UpsertGroup", tonic::Code::Ok, Duration::from_millis(3));
        let text = metrics.text();
        assert!(text.contains("nstance_operator_shard_up{shard=\"dev-1\"} 1"), "{text}");
        assert!(
            text.contains("nstance_operator_rpc_seconds_count{shard=\"dev-1\",method=\"UpsertGroup\",code=\"Ok\"} 1")
        );
        metrics.shard_is_removed("dev-1");
        assert!(!metrics.text().contains("shard_up{"));
    }
}
