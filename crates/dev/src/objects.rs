//! The few requests that we make to the API server for development ourselves. It takes them as plain HTTP and asks for no
//! permission.

use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::http::{self, Answer};

/// It answers from memory.
const LIMIT: Duration = Duration::from_secs(2);

/// Where operator and person look.
pub(crate) const NAMESPACE: &str = "default";

pub(crate) const POOLS: &str = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools";
pub(crate) const OUR_POOLS: &str =
    "/apis/infrastructure.cluster.x-k8s.io/v1beta1/namespaces/default/nstancemachinepools";
pub(crate) const OUR_MACHINES: &str =
    "/apis/infrastructure.cluster.x-k8s.io/v1beta1/namespaces/default/nstancemachines";
pub(crate) const OUR_CLUSTERS: &str =
    "/apis/infrastructure.cluster.x-k8s.io/v1beta1/namespaces/default/nstanceclusters";
pub(crate) const NODES: &str = "/api/v1/nodes";
pub(crate) const SECRETS: &str = "/api/v1/namespaces/default/secrets";
pub(crate) const SERVICE_ACCOUNTS: &str = "/api/v1/namespaces/default/serviceaccounts";
pub(crate) const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[derive(Debug, Clone, Copy)]
pub(crate) struct Objects {
    port: u16,
}

impl Objects {
    pub(crate) fn at(port: u16) -> Self {
        Self { port }
    }

    /// `None`: there is no such object, or no such kind.
    pub(crate) async fn get(self, path: &str) -> anyhow::Result<Option<Value>> {
        let answer = http::get_within(self.port, path, LIMIT).await.with_context(|| format!("ask for {path}"))?;
        match answer.code {
            200 => Ok(Some(serde_json::from_str(&answer.body).with_context(|| format!("read {path}"))?)),
            404 => Ok(None),
            _ => Err(refused("GET", path, &answer)),
        }
    }

    pub(crate) async fn list(self, path: &str) -> anyhow::Result<Vec<Value>> {
        let Some(mut list) = self.get(path).await? else { return Ok(Vec::new()) };
        match list.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) => Ok(items),
            _ => bail!("{path} is no list"),
        }
    }

    pub(crate) async fn create(self, path: &str, object: &Value) -> anyhow::Result<()> {
        self.send("POST", path, object).await
    }

    pub(crate) async fn replace(self, path: &str, object: &Value) -> anyhow::Result<()> {
        self.send("PUT", path, object).await
    }

    async fn send(self, method: &str, path: &str, object: &Value) -> anyhow::Result<()> {
        let answer = http::send(self.port, method, path, &object.to_string()).await;
        let answer = answer.with_context(|| format!("{method} {path}"))?;
        if (200..300).contains(&answer.code) { Ok(()) } else { Err(refused(method, path, &answer)) }
    }
}

fn refused(method: &str, path: &str, answer: &Answer) -> anyhow::Error {
    let status: Option<Value> = serde_json::from_str(&answer.body).ok();
    let message = status.as_ref().and_then(|it| it["message"].as_str()).unwrap_or(answer.body.trim());
    anyhow::anyhow!("the API server refuses {method} {path}: {message}")
}
