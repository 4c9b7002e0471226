//! The validating webhook, for what the CRDs' rules cannot say. Nothing waits for it: what it refuses also shows as a
//! condition.
//!
//! Its certificate lies in a directory, or is made here at every start, stored in a Secret for people to look at, and named
//! in the configuration of the webhook.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use axum::{Json, Router, extract::State, routing::post};
use data_encoding::BASE64;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use nstance_core::{ids::ClusterId, ports::clock::Clock};
use nstance_identity::{
    ca::{Ca, CaError, CaProfile, make_ca_certificate},
    issue::{FileProfile, FileUsage, IssueError},
    keys::KeyPair,
    subject::{San, SanError, Subject},
};
use nstance_rt::{chain::Chain, entropy::SystemEntropy, tasks::Tasks};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_rustls::TlsAcceptor;

use crate::{
    api::{
        NstanceMachinePool,
        names::{
            manager,
            webhook::{CONFIGURATION, PATH, SERVICE},
        },
    },
    cluster::secrets,
    control::context::Context,
    ports::{Apply, KubeError, KubePort, ObjectRef, Target, kinds},
};

pub const CERTIFICATE_SECRET: &str = "nstance-operator-webhook-cert";

const LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
const LOOK: Duration = Duration::from_secs(3600);
const RETRY: Duration = Duration::from_secs(60);
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
const MAX_CONNECTIONS: usize = 64;
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub enum WebhookError {
    #[error("listen on port {port}; choose another --webhook-port, or give --disable-webhooks")]
    Listen { port: u16, source: std::io::Error },
    #[error("use tls.crt and tls.key in {dir}: {why}")]
    Directory { dir: String, why: String },
    #[error("issue a certificate")]
    Issue(#[from] IssueError),
    #[error("name the service in a certificate")]
    Name(#[from] SanError),
    #[error("make a CA for the certificate")]
    Ca(#[from] CaError),
    #[error("use the certificate")]
    Tls(#[from] rustls::Error),
    #[error("parse the certificate")]
    Pem(#[from] rustls::pki_types::pem::Error),
}

type Shown = Arc<RwLock<Arc<ServerConfig>>>;

/// Starts to serve, until the scope ends.
pub async fn start(tasks: &Tasks, ctx: &Arc<Context>, port: u16, cert_dir: &str) -> Result<(), WebhookError> {
    let own = OwnCertificate { ctx: ctx.clone() };
    let first = match cert_dir {
        "" => {
            let pair = own.make()?;
            let config = pair.tls()?;
            let shown: Shown = Arc::new(RwLock::new(config));
            tasks.spawn_droppable("webhook certificate", own.keep(pair, shown.clone()));
            shown
        }
        dir => Arc::new(RwLock::new(from_directory(dir)?)),
    };
    let address = SocketAddr::from(([0, 0, 0, 0], port));
    let listener = TcpListener::bind(address).await.map_err(|source| WebhookError::Listen { port, source })?;
    let app = Router::new().route(PATH, post(validate)).with_state(ctx.clone());
    tasks.spawn_droppable("webhook", accept(tasks.clone(), listener, first, app));
    Ok(())
}

async fn accept(tasks: Tasks, listener: TcpListener, shown: Shown, app: Router) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "connection to the webhook not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let acceptor = TlsAcceptor::from(shown.read().unwrap_or_else(PoisonError::into_inner).clone());
        let app = app.clone();
        tasks.spawn_droppable("webhook connection", async move {
            let _place = place;
            let handshake = tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(socket)).await;
            let Ok(Ok(stream)) = handshake else { return };
            let service = TowerToHyperService::new(app);
            let http = auto::Builder::new(TokioExecutor::new());
            if let Err(error) = http.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(error, "connection to the webhook ended");
            }
        });
    }
}

/// Of `request`, an AdmissionReview.
async fn validate(State(ctx): State<Arc<Context>>, Json(review): Json<Value>) -> Json<Value> {
    let request = &review["request"];
    let verdict = judge(request, &ctx.stores.pools.all(), &ctx.shards.names());
    let mut response = json!({ "uid": request["uid"], "allowed": verdict.refused.is_none() });
    if let Some(message) = verdict.refused {
        response["status"] = json!({ "code": 422, "reason": "Invalid", "message": message });
    }
    if !verdict.warnings.is_empty() {
        response["warnings"] = json!(verdict.warnings);
    }
    Json(json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response }))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
    refused: Option<String>,
    warnings: Vec<String>,
}

fn judge(request: &Value, pools: &[Arc<NstanceMachinePool>], shards: &[String]) -> Verdict {
    let mut verdict = Verdict::default();
    if request["kind"]["kind"] != "NstanceMachinePool" {
        return verdict;
    }
    let (object, old) = (&request["object"], &request["oldObject"]);
    let name = request["name"].as_str().or_else(|| object["metadata"]["name"].as_str()).unwrap_or_default();
    let namespace = request["namespace"].as_str().unwrap_or_default();
    match request["operation"].as_str() {
        Some("CREATE" | "UPDATE") => {
            let group = object["spec"]["group"].as_str().unwrap_or_default();
            let is_twin = |it: &&Arc<NstanceMachinePool>| {
                it.spec.group == group
                    && it.metadata.namespace.as_deref() == Some(namespace)
                    && it.metadata.name.as_deref() != Some(name)
                    && it.metadata.deletion_timestamp.is_none()
            };
            if request["operation"] == "CREATE"
                && let Some(twin) = pools.iter().find(is_twin)
            {
                let twin = twin.metadata.name.as_deref().unwrap_or_default();
                verdict.refused =
                    Some(format!("group {group} belongs to NstanceMachinePool {twin} already; edit that one"));
            }
            let wanted = object["spec"]["shards"].as_array().into_iter().flatten().filter_map(Value::as_str);
            for shard in wanted.filter(|it| !shards.iter().any(|known| known == it)) {
                let known = shards.join(", ");
                verdict
                    .warnings
                    .push(format!("shard {shard} is not in the operator's configuration, which has {known}"));
            }
        }
        Some("DELETE") => {
            let n = old["status"]["desired"].as_i64().or_else(|| old["status"]["replicas"].as_i64()).unwrap_or(0);
            let orphaned = old["spec"]["deletionPolicy"] == "Orphan";
            if 0 < n && !orphaned {
                verdict.warnings.push(format!(
                    "the {n} machines of this pool are drained and deleted; deletionPolicy: Orphan would keep them"
                ));
            }
        }
        _ => {}
    }
    verdict
}

fn from_directory(dir: &str) -> Result<Arc<ServerConfig>, WebhookError> {
    let bad = |why: String| WebhookError::Directory { dir: dir.to_owned(), why };
    let read = |name: &str| std::fs::read(Path::new(dir).join(name)).map_err(|error| bad(format!("{name}: {error}")));
    tls(&read("tls.crt")?, &read("tls.key")?).map_err(|error| bad(Chain(&error).to_string()))
}

fn tls(chain_pem: &[u8], key_pem: &[u8]) -> Result<Arc<ServerConfig>, WebhookError> {
    let chain = CertificateDer::pem_slice_iter(chain_pem).collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(key_pem)?;
    let mut config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A certificate of our own making.
struct Pair {
    ca_pem: String,
    chain_pem: String,
    key: KeyPair,
    not_after: nstance_core::time::Timestamp,
}

impl Pair {
    fn tls(&self) -> Result<Arc<ServerConfig>, WebhookError> {
        tls(self.chain_pem.as_bytes(), self.key.to_pkcs8_pem().as_bytes())
    }
}

fn make_pair(cluster: &ClusterId, namespace: &str, clock: &dyn Clock) -> Result<Pair, WebhookError> {
    let (entropy, now) = (SystemEntropy::new(), clock.now());
    let named = |name: &str| Subject { common_name: name.to_owned(), ..Subject::default() };
    let ca_key = KeyPair::generate(&entropy);
    let profile = CaProfile { subject: Some(named(SERVICE)), ttl: Some(LIFE), ..CaProfile::of(cluster.clone()) };
    let ca_pem = make_ca_certificate(&ca_key, &profile, now, &entropy).chain_pem;
    let ca = Ca::load(ca_pem.as_bytes(), [ca_key])?;
    let host = format!("{SERVICE}.{namespace}.svc");
    let names = [host.clone(), format!("{host}.cluster.local"), "localhost".to_owned(), "127.0.0.1".to_owned()];
    let sans = names.iter().map(|it| San::host(it)).collect::<Result<Vec<_>, _>>()?;
    let key = KeyPair::generate(&entropy);
    let profile = FileProfile { subject: named(&host), sans, usage: FileUsage::Server };
    let issued = ca.issue_file(&profile, &key.public_key(), now, LIFE, &entropy)?;
    Ok(Pair { ca_pem, chain_pem: issued.chain_pem, key, not_after: issued.not_after })
}

struct OwnCertificate {
    ctx: Arc<Context>,
}

impl OwnCertificate {
    fn make(&self) -> Result<Pair, WebhookError> {
        let settings = &self.ctx.settings;
        // The name of the cluster was checked when the configuration was read.
        let cluster = settings.cluster_id.parse().unwrap_or_else(|_| "nstance".parse().expect("a name"));
        make_pair(&cluster, &settings.namespace, self.ctx.clock.as_ref())
    }

    /// Publishes the certificate, and makes another in time. Never ends by itself.
    async fn keep(self, mut pair: Pair, shown: Shown) {
        let mut is_published = false;
        loop {
            if pair.not_after.since(self.ctx.clock.now()) < LIFE / 3 {
                match self.make().and_then(|it| Ok((it.tls()?, it))) {
                    Ok((config, new)) => {
                        *shown.write().unwrap_or_else(PoisonError::into_inner) = config;
                        (pair, is_published) = (new, false);
                    }
                    Err(error) => tracing::warn!(error = %Chain(&error), "no new certificate for the webhook"),
                }
            }
            if !is_published {
                match self.publish(&pair).await {
                    Ok(()) => is_published = true,
                    Err(error) => tracing::warn!(error = %Chain(&error), "the webhook is not announced yet"),
                }
            }
            tokio::time::sleep(if is_published { LOOK } else { RETRY }).await;
        }
    }

    async fn publish(&self, pair: &Pair) -> Result<(), KubeError> {
        let kube = self.ctx.kube.as_ref();
        let secret = ObjectRef::new(kinds::SECRET, &self.ctx.settings.namespace, CERTIFICATE_SECRET);
        let body = json!({
            "type": "kubernetes.io/tls",
            "data": secrets::data(&[
                ("tls.crt", pair.chain_pem.as_bytes()),
                ("tls.key", pair.key.to_pkcs8_pem().as_bytes()),
                ("ca.crt", pair.ca_pem.as_bytes()),
            ]),
        });
        kube.apply(&secret, &body, Apply { manager: manager::SPEC, force: true, target: Target::Main }).await?;
        set_ca_bundle(kube, &pair.ca_pem).await
    }
}

/// Names the CA in the configuration of the webhook, if there is one.
async fn set_ca_bundle(kube: &dyn KubePort, ca_pem: &str) -> Result<(), KubeError> {
    let object = ObjectRef::new(kinds::VALIDATING_WEBHOOK, "", CONFIGURATION);
    let Some(configuration) = kube.get(&object).await? else {
        tracing::info!(%object, "there is no such object, so nobody calls the webhook");
        return Ok(());
    };
    let bundle = BASE64.encode(ca_pem.as_bytes());
    let webhooks = configuration["webhooks"].as_array().map_or(0, Vec::len);
    let patch: Vec<Value> = (0..webhooks)
        .map(|n| json!({ "op": "add", "path": format!("/webhooks/{n}/clientConfig/caBundle"), "value": bundle }))
        .collect();
    if patch.is_empty() { Ok(()) } else { kube.json_patch(&object, &json!(patch)).await.map(drop) }
}

#[cfg(test)]
mod tests {
    use nstance_rt::clock::SystemClock;

    use super::*;

    fn pool(name: &str, group: &str) -> Arc<NstanceMachinePool> {
        let mut pool = NstanceMachinePool::default();
        pool.metadata.name = Some(name.to_owned());
        pool.metadata.namespace = Some("default".to_owned());
        pool.spec.group = group.to_owned();
        Arc::new(pool)
    }

    fn request(operation: &str, name: &str, spec: Value) -> Value {
        let object = json!({ "metadata": { "name": name }, "spec": spec, "status": { "desired": 3 } });
        let which = if operation == "DELETE" { "oldObject" } else { "object" };
        json!({
            "kind": { "kind": "NstanceMachinePool" }, "operation": operation, "name": name, "namespace": "default",
            which: object,
        })
    }

    #[test]
    fn a_second_pool_of_a_group_is_refused_and_an_unknown_shard_is_warned_of() {
        let (pools, shards) = ([pool("a", "web")], ["dev-1".to_owned()]);
        let create = |name: &str, group: &str, shard: &str| {
            judge(&request("CREATE", name, json!({ "group": group, "shards": [shard] })), &pools, &shards)
        };
        assert!(create("b", "web", "dev-1").refused.unwrap().contains("NstanceMachinePool a"));
        assert_eq!(create("a", "web", "dev-1"), Verdict::default(), "the same object again");
        let unknown = create("b", "db", "dev-9");
        assert_eq!((unknown.refused, unknown.warnings.len()), (None, 1));
    }

    #[test]
    fn deleting_a_pool_with_machines_is_warned_of_unless_they_stay() {
        let delete = |spec: Value| judge(&request("DELETE", "a", spec), &[], &[]).warnings;
        assert!(delete(json!({}))[0].contains("3 machines"));
        assert!(delete(json!({ "deletionPolicy": "Orphan" })).is_empty());
    }

    #[test]
    fn the_certificate_is_accepted_by_a_client_that_knows_only_its_ca() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let pair = make_pair(&"demo".parse().unwrap(), "default", &SystemClock).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(pair.ca_pem.as_bytes()).unwrap()).unwrap();
        let verifier =
            rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        use rustls::client::danger::ServerCertVerifier as _;
        let leaf = CertificateDer::from_pem_slice(pair.chain_pem.as_bytes()).unwrap();
        let verify = |host: &str| {
            let now = std::time::Duration::from_millis(SystemClock.now().as_millis().unsigned_abs());
            let now = rustls::pki_types::UnixTime::since_unix_epoch(now);
            verifier.verify_server_cert(&leaf, &[], &host.to_owned().try_into().unwrap(), &[], now).is_ok()
        };
        assert!(verify("nstance-operator-webhook.default.svc"));
        assert!(!verify("nstance-operator-webhook.other.svc"));
    }
}
