//! The start of the process, its identity, and its shards.

use std::sync::{Arc, Mutex, OnceLock};

use data_encoding::BASE64;
use nstance_devk8s::Fault;
use nstance_operator::{
    api::conditions::Status as Condition,
    args::Args,
    control::context::Context,
    decide::observed::Reach,
    ports::{
        Apply, GroupWish, KubeErrorKind, KubePort, ObjectRef, Progress, Propagation, Selector, Target, Wish, WishKey,
        kinds,
    },
    run::Ended,
};
use nstance_rt::{chain::Chain, tasks::Tasks};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    fake_shard::{Cluster, FakeShard, NONCE},
    support::{World, no_controllers, until},
};

const OURS: Apply = Apply { manager: "nstance-operator", force: true, target: Target::Main };

fn secret(name: &str) -> ObjectRef {
    ObjectRef::new(kinds::SECRET, "default", name)
}

async fn put_ca(world: &World, cluster: &Cluster) {
    let object = ObjectRef::new(kinds::CONFIG_MAP, "default", "nstance-cluster-ca");
    world.kube.create(&object, &json!({ "data": { "ca.crt": cluster.ca.bundle_pem() } }), "test").await.unwrap();
}

async fn put_nonce(world: &World, nonce: &str) {
    let data = json!({ "data": { "nonce.jwt": BASE64.encode(nonce.as_bytes()) } });
    let object = secret("nstance-operator-nonce");
    if world.get(&object).await.is_some() {
        world.kube.merge_patch(&object, &data, Target::Main).await.unwrap();
    } else {
        world.kube.create(&object, &data, "test").await.unwrap();
    }
}

async fn world_with(shards: &[&str]) -> (World, Arc<Cluster>, Vec<FakeShard>) {
    let (world, cluster) = (World::new().await, Cluster::new());
    put_ca(&world, &cluster).await;
    put_nonce(&world, NONCE).await;
    let mut running = Vec::new();
    for name in shards {
        running.push(FakeShard::start(&world.tasks, &cluster, name).await);
    }
    let ports: Vec<_> =
        shards.iter().zip(&running).map(|(name, it)| (*name, it.registration_port, it.operator_port)).collect();
    world.write_config(&ports);
    (world, cluster, running)
}

async fn error_of(world: &World) -> String {
    Chain(&world.run_to_its_end(&[]).await.unwrap_err()).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named_in_one_message_and_nothing_is_changed() {
    let world = World::new().await;
    std::fs::write(world.path("config.yaml"), "cluster_id: demo\ntennant: default\n").unwrap();
    let error = error_of(&world).await;
    assert!(error.contains("did you mean `tenant`?") && error.contains("name at least one shard"), "{error}");
    world.write_config(&[("dev-1", 1, 1)]);
    let error = error_of(&world).await;
    assert!(error.contains("ConfigMap default/nstance-cluster-ca is missing"), "{error}");
    put_ca(&world, &Cluster::new()).await;
    assert!(world.get(&secret("nstance-operator-cert")).await.is_none());
    let error = error_of(&world).await;
    assert!(error.contains("Secret default/nstance-operator-nonce is missing"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn kinds_that_are_not_served_are_named_with_the_command_that_installs_them() {
    for (group, part) in
        [("cluster.x-k8s.io", "clusterctl init"), ("infrastructure.cluster.x-k8s.io", "kubectl apply -k config/crd/")]
    {
        let world = World::without(&[group]).await;
        world.write_config(&[("dev-1", 1, 1)]);
        let error = error_of(&world).await;
        assert!(error.contains(group) && error.contains(part), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_nonce_ends_the_start() {
    let (world, _cluster, _shards) = world_with(&["dev-1"]).await;
    put_nonce(&world, "bad").await;
    let error = error_of(&world).await;
    assert!(error.contains("dev-1 refused the nonce") && error.contains("nstance-admin cluster nonce"), "{error}");
    assert!(world.get(&secret("nstance-operator-key")).await.is_some(), "the key is kept for the next nonce");
    assert!(world.get(&secret("nstance-operator-cert")).await.is_none());
}

/// The context of the operator that a test started last.
struct Seen(OnceLock<Mutex<Option<Arc<Context>>>>);

impl Seen {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn put(&self, ctx: &Arc<Context>) {
        *self.0.get_or_init(Mutex::default).lock().unwrap() = Some(ctx.clone());
    }

    async fn take(&self) -> Arc<Context> {
        let place = self.0.get_or_init(Mutex::default);
        until("the operator has started", || async { place.lock().unwrap().is_some() }).await;
        place.lock().unwrap().take().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_registers_once_and_starts_again_with_what_it_stored() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, shards) = world_with(&["dev-1", "dev-2"]).await;
    shards[0].set_group("web", 3);
    let account = ObjectRef::new(kinds::SERVICE_ACCOUNT, "default", "nstance-capi-workload");
    world.kube.create(&account, &json!({}), "test").await.unwrap();
    let operator = world.start(world.args(&["--leader-elect"]), controllers);
    let ctx = SEEN.take().await;
    until("both shards are ready", || async { ctx.shards.views().iter().all(|it| it.reach.is_ready()) }).await;
    assert_eq!(ctx.shards.names(), ["dev-1", "dev-2"]);
    assert_eq!(ctx.shards.view("dev-1").unwrap().picture.unwrap().groups["web"].size, 3);
    until("the certificate is reported", || async { ctx.certificate.borrow().status == Condition::True }).await;
    let kubeconfig = secret("demo--default-kubeconfig");
    until("the kubeconfig is written", || async { world.get(&kubeconfig).await.is_some() }).await;
    let written: Value = world.get(&kubeconfig).await.unwrap();
    assert_eq!(written["type"], "cluster.x-k8s.io/secret");
    assert_eq!(written["metadata"]["labels"]["cluster.x-k8s.io/cluster-name"], "demo--default");
    until("it is reported", || async { ctx.kubeconfig.borrow().status == Condition::True }).await;
    world.kube.delete(&kubeconfig, None, Propagation::Background).await.unwrap();
    until("the kubeconfig is written again", || async { world.get(&kubeconfig).await.is_some() }).await;
    let registered = |shards: &[FakeShard]| shards.iter().map(|it| it.state().n_registrations).sum::<usize>();
    assert_eq!(registered(&shards), 1);
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
    let again = world.start(world.args(&["--leader-elect"]), controllers);
    let ctx = SEEN.take().await;
    until("both shards are ready", || async { ctx.shards.views().iter().all(|it| it.reach.is_ready()) }).await;
    assert_eq!(registered(&shards), 1, "the stored certificate is used");
    let certificate = secret("nstance-operator-cert");
    assert!(world.get(&certificate).await.unwrap()["data"]["tls.key"].is_string());
    assert_eq!(again.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_before_the_certificate_was_stored_costs_nothing_but_a_second_registration() {
    let (world, _cluster, shards) = world_with(&["dev-1"]).await;
    // The key is there and the nonce used, but no certificate: as after a crash in between.
    let first = world.start(world.args(&[]), no_controllers);
    until("registered", || async { shards[0].state().n_registrations == 1 }).await;
    first.crash();
    drop(first);
    let key = world.get(&secret("nstance-operator-key")).await.unwrap()["data"].clone();
    let certificate = secret("nstance-operator-cert");
    world.kube.delete(&certificate, None, Propagation::Background).await.unwrap();
    let second = world.start(world.args(&[]), no_controllers);
    until("stored", || async { world.get(&certificate).await.is_some() }).await;
    assert_eq!(world.get(&secret("nstance-operator-key")).await.unwrap()["data"], key, "the same key");
    assert_eq!(second.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wish_waits_for_a_shard_that_is_down_and_another_shard_goes_on() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, shards) = world_with(&["dev-1", "dev-2"]).await;
    let operator = world.start(world.args(&[]), controllers);
    let ctx = SEEN.take().await;
    until("both shards are ready", || async { ctx.shards.views().iter().all(|it| it.reach.is_ready()) }).await;
    shards[1].stop().await;
    let reach = |shard: &str| ctx.shards.view(shard).unwrap().reach;
    until("dev-2 is down", || async { matches!(reach("dev-2"), Reach::Down { .. }) }).await;
    let key =
        |name: &str| WishKey { object: ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, "default", name), topic: "size" };
    let wish = |size| Wish::UpsertGroup(GroupWish { key: "web".into(), size, ..GroupWish::default() });
    assert!(matches!(ctx.shards.ask("dev-2", &key("web--dev-2"), wish(2)), Progress::Down(_)));
    assert!(matches!(ctx.shards.ask("dev-1", &key("web--dev-1"), wish(2)), Progress::Waiting));
    assert!(matches!(ctx.shards.ask("dev-3", &key("web--dev-3"), wish(2)), Progress::NotConfigured));
    let answered = |shard: &'static str, name: &'static str, size| {
        let ctx = ctx.clone();
        async move { matches!(ctx.shards.ask(shard, &key(name), wish(size)), Progress::Answered(_)) }
    };
    until("dev-1 answered", || answered("dev-1", "web--dev-1", 2)).await;
    until("the stream reports it", || async {
        ctx.shards.view("dev-1").unwrap().picture.unwrap().groups.get("web").is_some_and(|it| it.size == 2)
    })
    .await;
    let _back = shards[1].restart(&world.tasks).await;
    until("dev-2 answered", || answered("dev-2", "web--dev-2", 2)).await;
    shards[0].state().refusals.push(tonic::Status::invalid_argument("no such template"));
    until("the refusal is told", || async {
        matches!(ctx.shards.ask("dev-1", &key("web--dev-1"), wish(5)), Progress::Refused(error) if error.message.contains("template"))
    })
    .await;
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_that_swallows_packets_delays_no_other() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, shards) = world_with(&["dev-1", "dev-2"]).await;
    let operator = world.start(world.args(&[]), controllers);
    let ctx = SEEN.take().await;
    until("both shards are ready", || async { ctx.shards.views().iter().all(|it| it.reach.is_ready()) }).await;
    shards[1].stop().await;
    // Connections are taken, and nothing is ever said.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", shards[1].operator_port)).await.unwrap();
    let swallowed = Arc::new(Mutex::new(Vec::new()));
    let sockets = swallowed.clone();
    world.tasks.spawn_droppable("black hole", async move {
        while let Ok((socket, _)) = listener.accept().await {
            sockets.lock().unwrap().push(socket);
        }
    });
    until("it is called", || async { !swallowed.lock().unwrap().is_empty() }).await;
    let key =
        |name: &str| WishKey { object: ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, "default", name), topic: "size" };
    let wish = |size| Wish::UpsertGroup(GroupWish { key: "web".into(), size, ..GroupWish::default() });
    for size in 1..=20 {
        let asked = tokio::time::Instant::now();
        let answer = ctx.shards.ask("dev-2", &key("web--dev-2"), wish(size));
        assert!(matches!(answer, Progress::Down(_) | Progress::Waiting), "{answer:?}");
        until("dev-1 answered", || async {
            matches!(ctx.shards.ask("dev-1", &key("web--dev-1"), wish(size)), Progress::Answered(_))
        })
        .await;
        assert!(asked.elapsed().as_secs() < 3, "{:?}", asked.elapsed());
    }
    assert!(!ctx.shards.view("dev-2").unwrap().reach.is_ready());
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_operator_rejoins_and_a_revoked_one_waits_for_a_fresh_nonce() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, shards) = world_with(&["dev-1"]).await;
    let shard = &shards[0];
    // The nonce of the first registration is of no use any more.
    shard.state().refuses_first = 1;
    let operator = world.start(world.args(&[]), controllers);
    let ctx = SEEN.take().await;
    put_nonce(&world, "used").await;
    until("it says what it needs", || async {
        let report = ctx.certificate.borrow().clone();
        report.status == Condition::False && report.reason == "NonceNeeded"
    })
    .await;
    assert!(!ctx.shards.view("dev-1").unwrap().reach.is_ready());
    put_nonce(&world, &format!("{NONCE}-2")).await;
    until("it goes on", || async {
        ctx.shards.view("dev-1").unwrap().reach.is_ready() && ctx.certificate.borrow().status == Condition::True
    })
    .await;
    assert_eq!(shard.state().n_registrations, 2);
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_cannot_renew_its_lease_ends() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, _shards) = world_with(&["dev-1"]).await;
    std::fs::write(world.path("kubeconfig"), world.api.kubeconfig_of("operator")).unwrap();
    let operator = world.start(world.args(&["--leader-elect"]), controllers);
    let ctx = SEEN.take().await;
    world.api.set_fault(Some(Fault::BlackHole { callers: "operator".into() }));
    assert_eq!(operator.ended().await.unwrap(), Ended::NotLeader);
    let refused = ctx.kube.apply(&secret("a"), &json!({}), OURS).await.unwrap_err();
    assert_eq!(refused.kind, KubeErrorKind::NotLeader);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_external_workload_cluster_is_used_as_soon_as_its_kubeconfig_is_there_and_not_when_it_is_silent() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, _cluster, _shards) = world_with(&["dev-1"]).await;
    let workload = World::new().await;
    let node = ObjectRef::new(kinds::NODE, "", "n1");
    workload.kube.create(&node, &json!({ "status": { "images": [{ "names": ["x"] }] } }), "test").await.unwrap();
    let mut args = world.args(&[]);
    args.names.capi_endpoint = "https://127.0.0.1:6443".to_owned();
    let operator = world.start(args, controllers);
    let ctx = SEEN.take().await;
    let reason = || ctx.kubeconfig.borrow().reason;
    until("the missing Secret is reported", || async { reason() == "SecretMissing" }).await;
    assert!(ctx.workload.api().is_none());
    let kubeconfig = secret("demo--default-kubeconfig");
    let text = workload.api.kubeconfig_of("operator");
    let data = json!({ "data": { "value": BASE64.encode(text.as_bytes()) } });
    world.kube.create(&kubeconfig, &data, "test").await.unwrap();
    until("there is access", || async { ctx.workload.api().is_some() }).await;
    let seen = ctx.workload.nodes.all();
    assert_eq!(seen.len(), 1);
    assert!(seen[0].status.as_ref().is_none_or(|it| it.images.is_none()), "images are not kept");
    workload.api.set_fault(Some(Fault::BlackHole { callers: "operator".into() }));
    until("the silence is noticed", || async { reason() == "Unreachable" }).await;
    assert!(ctx.workload.api().is_none());
    workload.api.set_fault(None);
    until("there is access again", || async { ctx.workload.api().is_some() }).await;
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shard_is_added_by_a_changed_file_and_a_wrong_file_changes_nothing() {
    static SEEN: Seen = Seen::new();
    fn controllers(_: &Tasks, ctx: &Arc<Context>, _: &Arc<nstance_operator::metrics::Metrics>) {
        SEEN.put(ctx);
    }
    let (world, cluster, shards) = world_with(&["dev-1"]).await;
    let object = ObjectRef::new(kinds::NSTANCE_CLUSTER, "default", "demo--default");
    world.kube.create(&object, &json!({ "spec": {} }), "test").await.unwrap();
    let operator = world.start(world.args(&[]), controllers);
    let ctx = SEEN.take().await;
    until("dev-1 is ready", || async { ctx.shards.views().iter().any(|it| it.reach.is_ready()) }).await;
    std::fs::write(world.path("config.yaml"), "cluster_id: demo\n").unwrap();
    let added = FakeShard::start(&world.tasks, &cluster, "dev-0").await;
    let ports = |name, it: &FakeShard| (name, it.registration_port, it.operator_port);
    let (kube, selector) = (&world.kube, &Selector::default());
    until("the wrong file is reported", || async {
        kube.list(kinds::EVENT, selector).await.unwrap().iter().any(|it| it["reason"] == "ConfigInvalid")
    })
    .await;
    assert_eq!(ctx.shards.names(), ["dev-1"]);
    world.write_config(&[ports("dev-0", &added), ports("dev-1", &shards[0])]);
    until("dev-0 is ready", || async { ctx.shards.view("dev-0").is_some_and(|it| it.reach.is_ready()) }).await;
    assert_eq!(ctx.shards.names(), ["dev-0", "dev-1"]);
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

/// The answer to a GET, head included.
async fn http_get(port: u16, path: &str) -> String {
    let Ok(mut socket) = tokio::net::TcpStream::connect(("127.0.0.1", port)).await else { return String::new() };
    let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_metrics_tell_how_it_is() {
    let (world, _cluster, shards) = world_with(&["dev-1"]).await;
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (probes, metrics) = (free(), free());
    let probes_at = format!("--health-probe-bind-address=127.0.0.1:{probes}");
    let args = world.args(&[&format!("--metrics-bind-address=127.0.0.1:{metrics}")]);
    let args = Args { health_probe_bind_address: probes_at.split_once('=').unwrap().1.to_owned(), ..args };
    let operator = world.start(args, no_controllers);
    until("it is ready", || async { http_get(probes, "/readyz").await.starts_with("HTTP/1.1 200") }).await;
    assert!(http_get(probes, "/healthz").await.starts_with("HTTP/1.1 200"));
    let shows = |line: &'static str| async move { http_get(metrics, "/metrics").await.contains(line) };
    until("the shard is up", || shows("nstance_operator_shard_up{shard=\"dev-1\"} 1")).await;
    assert!(shows("nstance_operator_is_leader 1").await);
    assert!(shows("nstance_operator_queue_depth{controller=\"pool\"} 0").await);
    assert!(shows("nstance_operator_import_waiting 0").await);
    shards[0].stop().await;
    until("the shard is down", || shows("nstance_operator_shard_up{shard=\"dev-1\"} 0")).await;
    assert!(http_get(probes, "/readyz").await.starts_with("HTTP/1.1 200"), "shards do not count");
    assert_eq!(operator.stop().await.unwrap(), Ended::Asked);
}

#[test]
fn the_program_ends_with_code_1_and_one_message_if_it_cannot_start() {
    let program = std::process::Command::new(env!("CARGO_BIN_EXE_nstance-operator"))
        .args(["--config=/nowhere/config.yaml", "--leader-elect=true", "--zap-log-level=error"])
        .output()
        .unwrap();
    assert_eq!(program.status.code(), Some(1));
    let text = String::from_utf8(program.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.starts_with("nstance-operator: the configuration cannot be used: read /nowhere/config.yaml"),
        "{text}"
    );
}
