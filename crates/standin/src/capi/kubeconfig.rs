//! From a kubeconfig Secret to a client that was seen to work.

use std::time::Duration;

use k8s_openapi::api::core::v1::Secret;
use kube::{
    Api, Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use super::names;
use crate::{
    execute::{RequestError, request},
    object::Key,
};

/// How long the first question to a workload cluster may take.
const PROBE_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("read Secret {secret}")]
    Read {
        secret: Key,
        #[source]
        source: RequestError,
    },
    #[error("Secret {secret} not found, or without label {label}={cluster}", label = names::CLUSTER_NAME)]
    NotFound { secret: Key, cluster: String },
    #[error("Secret {secret} has no key `value`")]
    NoValue { secret: Key },
    #[error("kubeconfig in Secret {secret} is not usable; it needs a current-context, its cluster and its user")]
    Kubeconfig {
        secret: Key,
        #[source]
        source: kube::config::KubeconfigError,
    },
    #[error("make a client of the kubeconfig in Secret {secret}")]
    Client {
        secret: Key,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("workload cluster of Secret {secret} does not accept us")]
    Refused {
        secret: Key,
        #[source]
        source: RequestError,
    },
}

/// Where the API server is that the stand-in talks to itself.
#[derive(Clone)]
pub(crate) struct OwnApi {
    pub(crate) client: Client,
    pub(crate) config: Option<Config>,
}

/// Reads the Secret of a Cluster and connects with what it holds.
pub(crate) async fn connect(own: &OwnApi, cluster: &Key) -> Result<Client, ConnectError> {
    let name = format!("{}-kubeconfig", cluster.name);
    let secret = Key::new(&cluster.namespace, &name);
    let secrets: Api<Secret> = Api::namespaced(own.client.clone(), &cluster.namespace);
    let found = request(secrets.get_opt(&name)).await;
    let found = found.map_err(|source| ConnectError::Read { secret: secret.clone(), source })?;
    // Core keeps only labelled Secrets in its cache: one without the label does not exist for it.
    let is_labelled = |it: &Secret| {
        let label = it.metadata.labels.as_ref().and_then(|it| it.get(names::CLUSTER_NAME));
        label == Some(&cluster.name)
    };
    let Some(found) = found.filter(is_labelled) else {
        return Err(ConnectError::NotFound { secret, cluster: cluster.name.clone() });
    };
    let Some(value) = found.data.and_then(|mut it| it.remove("value")) else {
        return Err(ConnectError::NoValue { secret });
    };
    let config = config(own, &String::from_utf8_lossy(&value.0)).await;
    let config = config.map_err(|source| ConnectError::Kubeconfig { secret: secret.clone(), source })?;
    let client = match config {
        Some(config) => Client::try_from(config)
            .map_err(|source| ConnectError::Client { secret: secret.clone(), source: Box::new(source) })?,
        None => own.client.clone(),
    };
    probe(&client).await.map_err(|source| ConnectError::Refused { secret, source })?;
    Ok(client)
}

/// `None`: the own API server, of which no more is known than the client.
async fn config(own: &OwnApi, text: &str) -> Result<Option<Config>, kube::config::KubeconfigError> {
    let kubeconfig = Kubeconfig::from_yaml(text)?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    // A refused token must be seen as such, not retried inside of a call.
    config.default_retry = false;
    if !is_own(config.cluster_url.host().unwrap_or_default()) {
        return Ok(Some(config));
    }
    let Some(own) = &own.config else { return Ok(None) };
    config.cluster_url = own.cluster_url.clone();
    config.root_cert = own.root_cert.clone();
    config.root_cert_file = own.root_cert_file.clone();
    config.accept_invalid_certs = own.accept_invalid_certs;
    config.tls_server_name = own.tls_server_name.clone();
    Ok(Some(config))
}

/// Inside of a cluster this name is the API server's; we run outside of pods and talk to it directly.
fn is_own(host: &str) -> bool {
    matches!(
        host,
        "kubernetes" | "kubernetes.default" | "kubernetes.default.svc" | "kubernetes.default.svc.cluster.local"
    )
}

/// Asks what core asks: the root path. That it is not found is an answer too.
pub(crate) async fn probe(client: &Client) -> Result<(), RequestError> {
    let root = http::Request::get("/").body(Vec::new()).map_err(kube::Error::HttpError);
    let root = root.map_err(RequestError::Refused)?;
    match tokio::time::timeout(PROBE_DEADLINE, request(client.request_text(root))).await {
        Err(_) => Err(RequestError::Deadline),
        Ok(Err(error)) if error.is_not_found() => Ok(()),
        Ok(answer) => answer.map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_service_names_of_the_api_server_mean_our_own() {
        assert!(is_own("kubernetes.default.svc"));
        for other in ["127.0.0.1", "kubernetes.other.svc", "api.example.com", ""] {
            assert!(!is_own(other), "{other}");
        }
    }
}
