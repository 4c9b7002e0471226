//! What Kubernetes shows of an environment: pools, nodes, drains, and how the operator is.

use serde::Serialize;
use serde_json::Value;

use crate::{
    http,
    layout::Layout,
    objects::{NODES, OUR_CLUSTERS, OUR_MACHINES, Objects, POOLS},
    records::{self, Kind, RunFile},
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct KubernetesStatus {
    pub(crate) machinepools: Vec<PoolStatus>,
    pub(crate) nodes: usize,
    pub(crate) drains: usize,
    /// Of drains that something holds up.
    pub(crate) blocked: Vec<BlockedDrain>,
    /// Absent where it is not run by `up`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) operator: Option<OperatorStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct PoolStatus {
    pub(crate) name: String,
    /// What is wanted.
    pub(crate) replicas: i64,
    pub(crate) ready: i64,
    pub(crate) phase: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct BlockedDrain {
    pub(crate) machine: String,
    pub(crate) by: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct OperatorStatus {
    pub(crate) ready: bool,
    pub(crate) shards_reachable: usize,
    pub(crate) shards: usize,
}

/// What was seen of it at one moment.
#[derive(Debug, Clone, Default)]
pub(crate) enum KubernetesView {
    /// It is not part of the environment, or was not looked at yet.
    #[default]
    Absent,
    Unreachable(String),
    Seen(KubernetesStatus),
}

/// Looks where the supervisor, living or dead, says that there is something.
pub(crate) async fn look(layout: &Layout) -> KubernetesView {
    let extras = RunFile::read(layout, records::UP).map(|it| it.extras).unwrap_or_default();
    if !extras.contains(&Kind::Kubernetes) {
        return KubernetesView::Absent;
    }
    let living = |name| RunFile::read(layout, name).filter(|it| it.process.lives());
    let Some(port) = living(records::K8S).and_then(|it| it.port("k8s")) else {
        return KubernetesView::Unreachable(format!("{} is not running", records::K8S));
    };
    let ready = async {
        let port = living(records::OPERATOR)?.port("probes")?;
        let answer = http::get(port, "/readyz").await.ok()?;
        Some(answer.code == 200)
    };
    match seen(Objects::at(port)).await {
        Ok((mut status, shards)) => {
            if extras.contains(&Kind::Operator) {
                let reachable = shards.iter().filter(|it| it["reachable"] == true).count();
                let ready = ready.await.unwrap_or(false);
                status.operator = Some(OperatorStatus { ready, shards_reachable: reachable, shards: shards.len() });
            }
            KubernetesView::Seen(status)
        }
        Err(error) => KubernetesView::Unreachable(format!("{error:#}")),
    }
}

/// With the shards as the operator sees them.
async fn seen(objects: Objects) -> anyhow::Result<(KubernetesStatus, Vec<Value>)> {
    let (pools, nodes) = (objects.list(POOLS).await?, objects.list(NODES).await?);
    let (machines, clusters) = (objects.list(OUR_MACHINES).await?, objects.list(OUR_CLUSTERS).await?);
    let draining = machines.iter().filter(|it| it["status"]["phase"] == "Draining");
    let blocked = draining.clone().filter_map(|it| {
        let by = texts(&it["status"]["drain"]["blockedBy"]);
        (!by.is_empty()).then(|| BlockedDrain { machine: text(&it["metadata"]["name"]), by })
    });
    let status = KubernetesStatus {
        machinepools: pools.iter().map(pool).collect(),
        nodes: nodes.len(),
        drains: draining.clone().count(),
        blocked: blocked.collect(),
        operator: None,
    };
    let shards = clusters.first().and_then(|it| it["status"]["shards"].as_array().cloned());
    Ok((status, shards.unwrap_or_default()))
}

fn pool(it: &Value) -> PoolStatus {
    PoolStatus {
        name: text(&it["metadata"]["name"]),
        replicas: it["spec"]["replicas"].as_i64().unwrap_or(0),
        ready: it["status"]["readyReplicas"].as_i64().unwrap_or(0),
        phase: text(&it["status"]["phase"]),
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(|it| it.as_str().map_or_else(|| it.to_string(), str::to_owned)).collect()
}

/// Why not all is well with it.
pub(crate) fn problems(view: &KubernetesView, extras: &[Kind]) -> Vec<String> {
    let mut problems = Vec::new();
    match view {
        KubernetesView::Absent if extras.contains(&Kind::Kubernetes) => {
            problems.push("Kubernetes was not asked yet".to_owned());
        }
        KubernetesView::Absent => {}
        KubernetesView::Unreachable(why) => problems.push(format!("Kubernetes does not answer: {why}")),
        KubernetesView::Seen(status) => {
            for it in status.machinepools.iter().filter(|it| it.replicas != it.ready) {
                problems.push(format!("machinepool {} wants {}, has {} ready", it.name, it.replicas, it.ready));
            }
            match &status.operator {
                Some(it) if !it.ready => problems.push("the operator is not ready".to_owned()),
                Some(it) if it.shards_reachable < it.shards => {
                    problems.push(format!("the operator reaches {} of {} shards", it.shards_reachable, it.shards));
                }
                _ => {}
            }
        }
    }
    problems
}

/// `k8s    machinepool/nstance-test 4/4   nodes 4   drains 0   operator ready, shards 2/2`
pub(crate) fn line(status: &KubernetesStatus) -> String {
    let pools = status.machinepools.iter().map(|it| format!("machinepool/{} {}/{}", it.name, it.ready, it.replicas));
    let mut parts: Vec<String> = pools.collect();
    parts.extend([format!("nodes {}", status.nodes), format!("drains {}", status.drains)]);
    if let Some(it) = &status.operator {
        let ready = if it.ready { "ready" } else { "not ready" };
        parts.push(format!("operator {ready}, shards {}/{}", it.shards_reachable, it.shards));
    }
    format!("k8s    {}", parts.join("   "))
}

/// A line for each drain that something holds up.
pub(crate) fn blocked(status: &KubernetesStatus) -> Vec<String> {
    status.blocked.iter().map(|it| format!("drain of {} waits for {}", it.machine, it.by.join(", "))).collect()
}
