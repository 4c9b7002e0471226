//! The kubeconfig Secret through which Cluster API reaches the workload cluster.
//!
//! For the operator's own cluster the operator makes it and keeps its token fresh. For an external one it is somebody
//! else's, and the operator reads it as its own access to Nodes and pods.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{api::core::v1::Secret, jiff::Timestamp};
use kube::config::{KubeConfigOptions, Kubeconfig};
use nstance_rt::{backoff::Backoff, chain::Chain, entropy::SystemEntropy, tasks::Tasks};
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::{
    client::KubeClient,
    leadership::Leadership,
    secrets,
    store::Store,
    watch,
    workload::{Access, Workload},
};
use crate::{
    api::{
        conditions::{Report, Status},
        names::{annotation, label, manager},
    },
    control::context::Context,
    metrics::Metrics,
    ports::{Apply, KubeError, KubePort, ObjectRef, Right, Target, kinds},
};

const TOKEN_LIFE: Duration = Duration::from_secs(3600);
const MIN_WAIT: Duration = Duration::from_secs(30);
const FIRST_RETRY: Duration = Duration::from_secs(10);
const MAX_RETRY: Duration = Duration::from_secs(120);
const VALUE: &str = "value";

/// Keeps the Secret of the operator's own cluster.
pub struct OwnKubeconfig {
    pub ctx: Arc<Context>,
    /// The API server's CAs as PEM.
    pub ca: Option<String>,
    pub metrics: Arc<Metrics>,
    /// The Secret, as the watch shows it.
    pub watched: Arc<Store<Secret>>,
}

impl OwnKubeconfig {
    /// Never ends by itself.
    pub async fn run(self) {
        let (mut backoff, entropy) = (Backoff::new(FIRST_RETRY, MAX_RETRY), SystemEntropy::new());
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        self.watched.on_change(move |_| notify.notify_one());
        let mut written: Option<(Value, Timestamp)> = None;
        loop {
            let wait = match self.refresh(&mut written).await {
                Ok(wait) => {
                    backoff.reset();
                    wait
                }
                Err(error) => {
                    tracing::warn!(error = %Chain(&error), "the kubeconfig Secret was not refreshed");
                    let report =
                        Report { status: Status::False, reason: "RefreshFailed", message: Chain(&error).to_string() };
                    self.ctx.report(&self.ctx.kubeconfig, report);
                    FIRST_RETRY.max(backoff.next(&entropy))
                }
            };
            let _ = tokio::time::timeout(wait, changed.notified()).await;
        }
    }

    /// Writes the Secret if it is due. Answers after which time to look again.
    async fn refresh(&self, written: &mut Option<(Value, Timestamp)>) -> Result<Duration, KubeError> {
        let secret =
            ObjectRef::new(kinds::SECRET, &self.ctx.settings.namespace, &self.ctx.settings.kubeconfig_secret());
        let now = Timestamp::from_millisecond(self.ctx.clock.now().as_millis()).unwrap_or_default();
        if let Some((data, expires)) = written.as_ref() {
            let left = until(now, *expires);
            self.metrics.kubeconfig_token_seconds.set(i64::try_from(left.as_secs()).unwrap_or(i64::MAX));
            let is_as_written = self.ctx.kube.get(&secret).await?.is_some_and(|it| it["data"] == *data);
            if is_as_written && TOKEN_LIFE / 2 < left {
                return Ok((left.saturating_sub(TOKEN_LIFE / 2)).max(MIN_WAIT).min(MAX_RETRY));
            }
        }
        if !self.is_wanted().await? {
            return Ok(MIN_WAIT);
        }
        let account = ObjectRef::new(
            kinds::SERVICE_ACCOUNT,
            &self.ctx.settings.namespace,
            &self.ctx.settings.capi_service_account,
        );
        let (token, expires) = self.ctx.kube.create_token(&account, TOKEN_LIFE).await?;
        let name = self.ctx.settings.cluster_name();
        let text = kubeconfig(&name, &self.ctx.settings.capi_server, self.ca.as_deref(), &token);
        let data = secrets::data(&[(VALUE, text.as_bytes())]);
        let body = json!({
            "metadata": {
                "labels": { label::CLUSTER_NAME: name },
                "annotations": { annotation::TOKEN_EXPIRY: format!("{expires:.0}") },
            },
            "type": "cluster.x-k8s.io/secret",
            "data": data,
        });
        let how = Apply { manager: manager::SPEC, force: true, target: Target::Main };
        self.ctx.kube.apply(&secret, &body, how).await?;
        *written = Some((data, expires));
        let left = until(now, expires);
        self.metrics.kubeconfig_token_seconds.set(i64::try_from(left.as_secs()).unwrap_or(i64::MAX));
        let message = format!("token of ServiceAccount {} until {expires:.0}", account.name);
        let report = Report { status: Status::True, reason: "Fresh", message };
        self.ctx.report(&self.ctx.kubeconfig, report);
        Ok((left / 2).max(MIN_WAIT).min(MAX_RETRY))
    }

    /// Not once the cluster was moved away, and not for a Cluster that is being deleted and has no MachinePool left.
    async fn is_wanted(&self) -> Result<bool, KubeError> {
        let settings = &self.ctx.settings;
        let key_secret = ObjectRef::new(kinds::SECRET, &settings.namespace, &settings.key_secret);
        let key = self.ctx.kube.get(&key_secret).await?;
        if key.is_some_and(|it| secrets::annotation(&it, annotation::MOVED).is_some()) {
            return Ok(false);
        }
        let cluster = self.ctx.stores.clusters.named(&self.ctx.settings.namespace, &self.ctx.settings.cluster_name());
        let is_going = cluster.is_some_and(|it| it.metadata.deletion_timestamp.is_some());
        Ok(!is_going || !self.ctx.stores.machine_pools.is_empty())
    }
}

fn until(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(then.duration_since(now)).unwrap_or_default()
}

fn kubeconfig(name: &str, server: &str, ca: Option<&str>, token: &str) -> String {
    let ca = ca.map(|it| {
        let encoded = data_encoding::BASE64.encode(it.as_bytes());
        format!("\n    certificate-authority-data: {encoded}")
    });
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         clusters:\n\
         - name: {name}\n  cluster:\n    server: {server:?}{ca}\n\
         users:\n\
         - name: {name}\n  user:\n    token: {token:?}\n\
         contexts:\n\
         - name: {name}\n  context:\n    cluster: {name}\n    user: {name}\n\
         current-context: {name}\n",
        ca = ca.unwrap_or_default(),
    )
}

/// What the kubeconfig of an external workload cluster must grant.
pub const WORKLOAD_RIGHTS: &[Right] = &{
    const fn right(
        verb: &'static str,
        group: &'static str,
        resource: &'static str,
        subresource: &'static str,
    ) -> Right {
        Right { verb, group, resource, subresource }
    }
    [
        right("get", "", "nodes", ""),
        right("list", "", "nodes", ""),
        right("watch", "", "nodes", ""),
        right("patch", "", "nodes", ""),
        right("delete", "", "nodes", ""),
        right("get", "", "pods", ""),
        right("list", "", "pods", ""),
        right("watch", "", "pods", ""),
        right("delete", "", "pods", ""),
        right("create", "", "pods", "eviction"),
        right("get", "apps", "daemonsets", ""),
        right("list", "apps", "daemonsets", ""),
        right("watch", "apps", "daemonsets", ""),
        right("get", "", "namespaces", ""),
        right("list", "", "namespaces", ""),
        right("watch", "", "namespaces", ""),
        right("get", "policy", "poddisruptionbudgets", ""),
        right("list", "policy", "poddisruptionbudgets", ""),
        right("watch", "policy", "poddisruptionbudgets", ""),
        right("get", "storage.k8s.io", "volumeattachments", ""),
        right("list", "storage.k8s.io", "volumeattachments", ""),
    ]
};

/// How often a workload cluster that answers is looked at, and one that does not.
const PING: Duration = Duration::from_secs(10);

/// Follows the kubeconfig Secret of an external workload cluster.
pub struct ExternalKubeconfig {
    pub workload: Arc<Workload>,
    pub pods: Arc<Store<kube::core::PartialObjectMeta<k8s_openapi::api::core::v1::Pod>>>,
    pub leadership: Arc<Leadership>,
    pub ctx: Arc<Context>,
    /// The name of the Secret.
    pub secret: String,
    pub watched: Arc<Store<Secret>>,
}

/// Why there is no access to the workload cluster, for a condition.
struct NoAccess {
    reason: &'static str,
    message: String,
}

impl ExternalKubeconfig {
    /// The client of what the Secret says now.
    async fn client(&self) -> Result<(Vec<u8>, KubeClient), NoAccess> {
        let secret = &self.secret;
        let no = |reason, message| NoAccess { reason, message };
        let missing = || no("SecretMissing", format!("Secret {secret} is missing or has no entry {VALUE}"));
        let found = self.watched.all().into_iter().next().ok_or_else(missing)?;
        let value = found.data.as_ref().and_then(|it| it.get(VALUE)).ok_or_else(missing)?.0.clone();
        let invalid = |why: String| no("SecretInvalid", format!("Secret {secret}: {why}"));
        let kubeconfig = Kubeconfig::from_yaml(&String::from_utf8_lossy(&value))
            .map_err(|error| invalid(Chain(&error).to_string()))?;
        if kubeconfig.auth_infos.iter().any(|it| it.auth_info.as_ref().is_some_and(|it| it.exec.is_some())) {
            return Err(invalid(
                "it runs a program for credentials; give it a token or a client certificate".to_owned(),
            ));
        }
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        let config = config.map_err(|error| invalid(Chain(&error).to_string()))?;
        let client = KubeClient::new(config, self.leadership.clone());
        Ok((value, client.map_err(|error| invalid(Chain(&error).to_string()))?))
    }

    /// Never ends by itself.
    pub async fn run(self, tasks: Tasks) {
        let changed = Arc::new(Notify::new());
        let notify = changed.clone();
        self.watched.on_change(move |_| notify.notify_one());
        self.watched.until_synced().await;
        loop {
            let no = match self.client().await {
                Err(no) => no,
                Ok((value, client)) => self.use_client(&tasks, &value, client, &changed).await,
            };
            self.lose(no);
            let _ = tokio::time::timeout(PING, changed.notified()).await;
        }
    }

    fn lose(&self, no: NoAccess) {
        let NoAccess { reason, message } = no;
        let is_new = self.ctx.kubeconfig.borrow().message != message;
        if is_new {
            tracing::warn!(reason, message, "no access to the workload cluster");
        }
        self.workload.set(Access::Missing { reason, message: message.clone() });
        let report = Report { status: Status::False, reason, message };
        self.ctx.report(&self.ctx.kubeconfig, report);
    }

    /// Uses a client until it does not answer any more, or the Secret changes. Answers why it ended.
    async fn use_client(&self, tasks: &Tasks, value: &[u8], client: KubeClient, changed: &Notify) -> NoAccess {
        let server = client.server().to_owned();
        let unreachable = |error: KubeError| NoAccess {
            reason: "Unreachable",
            message: format!("workload cluster {server}: {}", error.message),
        };
        match client.missing_rights(WORKLOAD_RIGHTS).await {
            Ok(missing) if missing.is_empty() => {}
            Ok(missing) => {
                let message = format!("the kubeconfig does not grant: {}", missing.join(", "));
                return NoAccess { reason: "RightsMissing", message };
            }
            Err(error) => return unreachable(error),
        }
        let scope = tasks.child();
        let listed = watch::start_nodes(&scope, &client.watching(), &self.workload.nodes);
        watch::start_unscheduled_pods(&scope, &client.watching(), &self.pods);
        let ended = self.follow(value, &client, changed, &listed).await.unwrap_or_else(unreachable);
        scope.cancel();
        ended
    }

    async fn follow(
        &self,
        value: &[u8],
        client: &KubeClient,
        changed: &Notify,
        listed: &Notify,
    ) -> Result<NoAccess, KubeError> {
        loop {
            tokio::select! {
                biased;
                () = changed.notified() => {
                    let now = self.watched.all().into_iter().next();
                    let now = now.and_then(|it| it.data.as_ref()?.get(VALUE).map(|it| it.0.clone()));
                    if now.as_deref() != Some(value) {
                        let message = format!("Secret {} was changed", self.secret);
                        return Ok(NoAccess { reason: "SecretChanged", message });
                    }
                }
                // Only now is it known which Nodes there are.
                () = listed.notified() => {
                    self.workload.set(Access::Granted(Arc::new(client.clone())));
                    let message = format!("workload cluster {} answers", client.server());
                    let report = Report { status: Status::True, reason: "Ready", message };
                    self.ctx.report(&self.ctx.kubeconfig, report);
                }
                () = tokio::time::sleep(PING) => {
                    client.resources("policy", "v1").await?;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::{
        ports::KubeErrorKind,
        testing::{NAMESPACE, World},
    };

    #[tokio::test(start_paused = true)]
    async fn the_kubeconfig_outlives_three_tokens() {
        let (tasks, world) = (Tasks::new(), World::new(&[]));
        let ctx = world.context.clone();
        let metrics = Metrics::new(ctx.clock.clone());
        let own = OwnKubeconfig { ctx: ctx.clone(), ca: None, metrics, watched: Arc::default() };
        tasks.spawn_droppable("kubeconfig", own.run());
        let secret = || world.kube.value(kinds::SECRET, NAMESPACE, &ctx.settings.kubeconfig_secret());
        let deadline = Instant::now() + Duration::from_secs(10);
        while secret().is_none() {
            assert!(Instant::now() < deadline, "no kubeconfig is written");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // One request for a token fails on the way.
        world.kube.fail_nth("create_token", 2, KubeErrorKind::Unavailable);
        let end = Instant::now() + 3 * TOKEN_LIFE;
        while Instant::now() < end {
            let secret = secret().unwrap();
            let expires: Timestamp =
                secret["metadata"]["annotations"][annotation::TOKEN_EXPIRY].as_str().unwrap().parse().unwrap();
            assert!(TOKEN_LIFE / 3 < until(ctx.now(), expires), "{secret}");
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        let made = world.kube.calls_of("create_token");
        assert!(3 < made.iter().filter(|it| !it.failed).count() && made.iter().any(|it| it.failed));
        tasks.end(Duration::from_secs(1)).await;
    }

    #[test]
    fn the_kubeconfig_can_be_read_back() {
        let ca = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
        let text = kubeconfig("demo--default", "https://kubernetes.default.svc:443", Some(ca), "a.b-c_d");
        let read = Kubeconfig::from_yaml(&text).unwrap();
        assert_eq!(read.current_context.as_deref(), Some("demo--default"));
        let cluster = read.clusters[0].cluster.as_ref().unwrap();
        assert_eq!(cluster.server.as_deref(), Some("https://kubernetes.default.svc:443"));
        let decoded =
            data_encoding::BASE64.decode(cluster.certificate_authority_data.as_ref().unwrap().as_bytes()).unwrap();
        assert_eq!(decoded, ca.as_bytes());
        assert!(kubeconfig("a", "http://127.0.0.1:6443", None, "t").lines().all(|it| !it.contains("authority")));
    }
}
