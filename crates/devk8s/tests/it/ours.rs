//! What a real API server does otherwise, or what cannot be seen there in time.

use std::time::Duration;

use nstance_core::{ports::clock::Clock, time::Mono};
use nstance_devk8s::Options;
use serde_json::{Value, json};

use crate::support::{Cluster, Dev, MERGE, client};

const NODES: &str = "/api/v1/nodes";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn any_json_object_is_accepted() {
    let dev = Dev::start().await;
    let machines = "/apis/infrastructure.cluster.x-k8s.io/v1beta1/namespaces/default/nstancemachines";
    let odd = json!({ "metadata": { "name": "m" }, "spec": { "group": 7, "unknown": [null, {}] }, "extra": true });
    let created = dev.cluster.post(machines, &odd).await.expect(201);
    assert_eq!((&created["spec"], &created["extra"]), (&odd["spec"], &json!(true)));
    assert_eq!(created["kind"], "NstanceMachine");
}

#[tokio::test]
async fn the_kinds_of_cluster_api_are_there_without_definitions() {
    let dev = Dev::start().await;
    let list = dev.cluster.get("/apis/cluster.x-k8s.io/v1beta2").await.expect(200);
    let names: Vec<&str> =
        list["resources"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    for name in ["clusters", "machines", "machinepools/scale", "machinesets/scale", "machinedrainrules"] {
        assert!(names.contains(&name), "{name}");
    }
    assert!(!names.contains(&"machinedrainrules/status"));
    let ours = dev.cluster.get("/apis/infrastructure.cluster.x-k8s.io/v1beta1").await.expect(200);
    let pool = ours["resources"].as_array().unwrap().iter().find(|it| it["name"] == "nstancemachinepools").unwrap();
    assert_eq!((&pool["shortNames"], &pool["categories"]), (&json!(["nmp"]), &json!(["cluster-api"])));
    let dev = Dev::start_with(|options| options.without_groups = vec!["cluster.x-k8s.io".to_owned()]).await;
    dev.cluster.get("/apis/cluster.x-k8s.io/v1beta2").await.refused(404, "NotFound");
}

#[tokio::test]
async fn a_stored_definition_brings_columns_to_a_builtin_kind() {
    let definition = json!({
        "metadata": { "name": "machinepools.cluster.x-k8s.io" },
        "spec": {
            "group": "cluster.x-k8s.io", "scope": "Namespaced",
            "names": { "plural": "machinepools", "kind": "MachinePool", "shortNames": ["mp"] },
            "versions": [{
                "name": "v1beta2", "served": true, "storage": true,
                "additionalPrinterColumns": [{ "name": "Desired", "type": "integer", "jsonPath": ".spec.replicas" }],
            }],
        },
    });
    let dev = Dev::start_with(|options| options.crds = vec![definition.clone()]).await;
    let pools = "/apis/cluster.x-k8s.io/v1beta2/namespaces/default/machinepools";
    let pool = json!({ "metadata": { "name": "p" }, "spec": { "replicas": 2 } });
    dev.cluster.post(pools, &pool).await.expect(201);
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let row = dev.cluster.get_as(pools, table).await.expect(200)["rows"][0]["cells"].clone();
    assert_eq!(row, json!(["p", 2]));
    // The next start with the same definitions changes nothing.
    let before = dev.cluster.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").await.expect(200);
    let dev = Dev::start_in(dev.stop().await, |options| options.crds = vec![definition]).await;
    let after = dev.cluster.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions").await.expect(200);
    assert_eq!(before["items"], after["items"]);
}

#[tokio::test]
async fn plain_http_and_tls_share_a_port_and_the_certificate_is_kept() {
    let dev = Dev::start().await;
    let plain = nstance_devk8s::kubeconfig(&format!("http://{}", dev.running.addr), "", "dev");
    let plain = plain.lines().filter(|line| !line.contains("certificate-authority")).collect::<Vec<_>>().join("\n");
    let plain = Cluster { client: client(&plain).await };
    assert_eq!(plain.get("/healthz").await.expect(200), "ok");
    assert_eq!(dev.cluster.get("/healthz").await.expect(200), "ok");
    let (port, ca) = (dev.running.addr.port(), dev.running.ca_pem.clone());
    let by_name = nstance_devk8s::kubeconfig(&format!("https://localhost:{port}"), &ca, "dev");
    let by_name = Cluster { client: client(&by_name).await };
    assert_eq!(by_name.get("/healthz").await.expect(200), "ok");
    let dev = Dev::start_in(dev.stop().await, |_| {}).await;
    assert_eq!(dev.running.ca_pem, ca);
}

#[tokio::test]
async fn history_is_kept_for_a_number_of_events() {
    let dev = Dev::start_with(|options| options.window = 3).await;
    let created = dev.cluster.post(MAPS, &json!({ "metadata": { "name": "m" } })).await.expect(201);
    let mut versions = vec![version(&created)];
    for n in 0..5 {
        let patch = json!({ "data": { "n": n.to_string() } });
        versions.push(version(&dev.cluster.patch(&format!("{MAPS}/m"), MERGE, &patch).await.expect(200)));
    }
    let watch = |since: u64| format!("{MAPS}?watch=1&resourceVersion={since}");
    let too_old = dev.cluster.watch(&watch(versions[1])).await.next().await.unwrap();
    assert_eq!((&too_old["type"], &too_old["object"]["code"]), (&json!("ERROR"), &json!(410)));
    let mut events = dev.cluster.watch(&watch(versions[2])).await;
    for n in 2..5 {
        assert_eq!(events.expect().await.1["data"]["n"], n.to_string());
    }
    let future = dev.cluster.watch(&watch(versions[5] + 5000)).await.next().await.unwrap();
    assert_eq!(future["object"]["code"], 410, "of a store that was wiped");
}

#[tokio::test]
async fn bookmarks_come_regularly() {
    let dev = Dev::start_with(|options| options.bookmark_every = Duration::from_millis(50)).await;
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1&allowWatchBookmarks=true")).await;
    assert_eq!(events.next().await.unwrap()["type"], "BOOKMARK");
    // Changes of other resources move it too.
    let created = dev.cluster.post(MAPS, &json!({ "metadata": { "name": "m" } })).await.expect(201);
    loop {
        let bookmark = events.next().await.unwrap();
        assert_eq!(bookmark["type"], "BOOKMARK");
        if version(&created) <= version(&bookmark["object"]) {
            break;
        }
    }
    let none = dev.cluster.watch(&format!("{NODES}?watch=1&timeoutSeconds=1")).await.next().await;
    assert_eq!(none, None, "not asked for");
}

#[tokio::test]
async fn initial_events_are_refused_so_that_clients_list() {
    let dev = Dev::start().await;
    let query = "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    dev.cluster.get(&format!("{NODES}?{query}")).await.refused(422, "Invalid");
}

#[tokio::test]
async fn methods_that_a_path_does_not_have_are_refused() {
    let dev = Dev::start().await;
    for (method, path) in
        [("PUT", MAPS), ("POST", "/api/v1/configmaps"), ("POST", "/api/v1/nodes/n"), ("POST", "/version")]
    {
        dev.cluster.call(method, path, &[], b"{}".to_vec()).await.refused(405, "MethodNotAllowed");
    }
}

#[tokio::test]
async fn protobuf_is_refused_with_the_way_out() {
    let dev = Dev::start().await;
    let headers = [("content-type", "application/vnd.kubernetes.protobuf")];
    let answer = dev.cluster.call("POST", MAPS, &headers, b"k8s\0".to_vec()).await;
    let refused = answer.refused(415, "UnsupportedMediaType");
    assert!(
        refused["message"].as_str().unwrap().contains("--dry-run=client -o yaml | kubectl apply -f -"),
        "{refused}"
    );
}

/// A clock that a test moves.
struct HandClock(std::sync::atomic::AtomicI64);

impl Clock for HandClock {
    fn now(&self) -> nstance_core::time::Timestamp {
        nstance_core::time::Timestamp::from_millis(self.0.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn monotonic(&self) -> Mono {
        Mono::default()
    }
}

#[tokio::test]
async fn an_expired_token_is_refused_and_callers_are_named_by_their_token() {
    let hour = 3_600_000;
    let clock = std::sync::Arc::new(HandClock(std::sync::atomic::AtomicI64::new(490_000 * hour)));
    let hand = clock.clone();
    let dev = Dev::start_with(|options: &mut Options| options.clock = hand).await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    dev.cluster.post(accounts, &json!({ "metadata": { "name": "robot" } })).await.expect(201);
    let request = json!({ "spec": { "expirationSeconds": 3600 } });
    let given = dev.cluster.post(&format!("{accounts}/robot/token"), &request).await.expect(201);
    let token = given["status"]["token"].as_str().unwrap();
    let url = format!("http://{}/api/v1/nodes", dev.running.addr);
    let http = reqwest::Client::new();
    let code = || async { http.get(&url).bearer_auth(token).send().await.unwrap().status().as_u16() };
    assert_eq!(code().await, 200);
    let callers = "system:serviceaccount:default:robot".to_owned();
    dev.running.set_fault(Some(nstance_devk8s::Fault::Refuse { callers }));
    assert_eq!(code().await, 503);
    dev.running.set_fault(None);
    clock.0.fetch_add(hour, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(code().await, 401);
}

#[tokio::test]
async fn budgets_are_judged_by_the_live_pods() {
    let dev = Dev::start().await;
    let pods = "/api/v1/namespaces/default/pods";
    for name in ["a", "b", "c"] {
        let pod = json!({ "metadata": { "name": name, "labels": { "app": "x" } }, "spec": { "nodeName": "n" } });
        dev.cluster.post(pods, &pod).await.expect(201);
        let ready = json!({ "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } });
        dev.cluster.patch(&format!("{pods}/{name}/status"), MERGE, &ready).await.expect(200);
    }
    let budgets = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";
    let spec = |spec: Value| json!({ "metadata": { "name": "p" }, "spec": spec });
    let selector = json!({ "matchLabels": { "app": "x" } });
    let budget = spec(json!({ "maxUnavailable": 1, "selector": selector }));
    dev.cluster.post(budgets, &budget).await.expect(201);
    let evict = |name: &str| (format!("{pods}/{name}/eviction"), json!({ "metadata": { "name": name } }));
    let (path, eviction) = evict("a");
    dev.cluster.post(&path, &eviction).await.expect(201);
    let (path, eviction) = evict("b");
    let refused = dev.cluster.post(&path, &eviction).await.refused(429, "TooManyRequests");
    let cause = refused["details"]["causes"][0]["message"].as_str().unwrap();
    assert!(cause.contains("needs 2 healthy pods and has 2 currently"), "{cause}");
    // One that is not ready holds up nothing while the others suffice.
    let unready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } });
    let percent = json!({ "spec": { "maxUnavailable": null, "minAvailable": "33%" } });
    dev.cluster.patch(&format!("{pods}/c/status"), MERGE, &unready).await.expect(200);
    dev.cluster.patch(&format!("{budgets}/p"), MERGE, &percent).await.expect(200);
    let (path, eviction) = evict("c");
    dev.cluster.post(&path, &eviction).await.expect(201);
    let (path, eviction) = evict("b");
    dev.cluster.post(&path, &eviction).await.refused(429, "TooManyRequests");
}

#[tokio::test]
async fn of_many_writers_with_one_version_one_wins() {
    let dev = Dev::start().await;
    dev.cluster.post(MAPS, &json!({ "metadata": { "name": "m" }, "data": { "n": "0" } })).await.expect(201);
    let path = format!("{MAPS}/m");
    let mut events = dev.cluster.watch(&format!("{MAPS}?watch=1")).await;
    let add = async || {
        for _ in 0..10 {
            loop {
                let mut map = dev.cluster.get(&path).await.expect(200);
                let n: u32 = map["data"]["n"].as_str().unwrap().parse().unwrap();
                map["data"]["n"] = json!((n + 1).to_string());
                let answer = dev.cluster.put(&path, &map).await;
                if answer.code == 200 {
                    break;
                }
                answer.refused(409, "Conflict");
            }
        }
    };
    futures::future::join_all((0..16).map(|_| add())).await;
    assert_eq!(dev.cluster.get(&path).await.expect(200)["data"]["n"], "160");
    let mut last = 0;
    for n in 0..=160 {
        let object = events.expect().await.1;
        assert_eq!(object["data"]["n"], n.to_string(), "every change once, and in order");
        assert!(last < version(&object));
        last = version(&object);
    }
}

#[tokio::test]
async fn a_thousand_objects_are_listed_in_pages_and_watched() {
    let dev = Dev::start().await;
    let mut events = dev.cluster.watch(&format!("{NODES}?watch=1")).await;
    for n in 0..1000 {
        dev.write(&format!("nodes/n{n:04}.json"), "{}");
    }
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 1000 {
        let (kind, name) = events.named().await;
        assert!(kind == "ADDED" && seen.insert(name), "each once");
    }
    let (mut n_pages, mut n_items, mut token) = (0, 0, String::new());
    loop {
        let page = dev.cluster.get(&format!("{NODES}?limit=300&continue={token}")).await.expect(200);
        n_pages += 1;
        n_items += page["items"].as_array().unwrap().len();
        match page["metadata"]["continue"].as_str() {
            Some(next) => token = next.to_owned(),
            None => break,
        }
    }
    assert_eq!((n_pages, n_items), (4, 1000));
}
