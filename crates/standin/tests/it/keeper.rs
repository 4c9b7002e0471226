//! The node keeper.

crate::stories!(
    a_node_file_becomes_a_ready_node_that_is_lost_and_found,
    a_node_that_was_deleted_does_not_come_back,
    a_pod_waits_for_a_node_runs_and_ends,
    a_pod_goes_with_its_node,
    a_budget_refuses_an_eviction_until_it_is_lifted,
    a_dead_agent_renews_nothing,
);

/// The way of a real server, tried where none is given.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_files_become_nodes_through_the_api_once() {
    let site = crate::site::Site::with_files_apart("files_apart").await;
    story::a_node_that_was_deleted_does_not_come_back(&site).await;
}

mod story {
    use k8s_openapi::api::core::v1::Pod;
    use kube::Api;
    use nstance_standin::{ControlPlane, kinds::Kind};
    use serde_json::{Value, json};

    use crate::site::{Site, until};

    fn start(site: &Site) -> nstance_standin::Handle {
        let mut options = site.options();
        options.keeper = Some(site.keeper_options());
        site.start(options)
    }

    async fn until_ready(site: &Site, node: &str, status: &str) {
        until(&format!("Node {node} is Ready={status}"), async || {
            site.condition(Kind::Node, node, "Ready").await == status
        })
        .await;
    }

    fn lease(site: &Site) -> Api<kube::api::DynamicObject> {
        Api::namespaced_with(site.client.clone(), "kube-node-lease", &Kind::Lease.resource())
    }

    async fn renew_time(site: &Site, node: &str) -> String {
        let lease = lease(site).get_opt(node).await.unwrap();
        lease.and_then(|it| it.data["spec"]["renewTime"].as_str().map(str::to_owned)).unwrap_or_default()
    }

    /// A pod that only this story's nodes may run.
    fn pod(site: &Site, grace: i64) -> Value {
        json!({
            "metadata": { "labels": { "app": "web" } },
            "spec": {
                "nodeSelector": { "story": site.namespace },
                "containers": [{ "name": "c", "image": "none" }],
                "terminationGracePeriodSeconds": grace,
            },
        })
    }

    pub(super) async fn a_node_file_becomes_a_ready_node_that_is_lost_and_found(site: &Site) {
        let standin = start(site);
        let node = site.node_name("n0");
        site.add_node_file("n0");
        // With all nodes lost a controller manager evicts nothing, so one stays healthy.
        site.add_node_file("n1");
        until_ready(site, &node, "True").await;
        assert!(site.field(Kind::Node, &node, "/status/nodeInfo/kubeletVersion").await.is_string());
        until("the Lease is there", async || !renew_time(site, &node).await.is_empty()).await;
        let first = renew_time(site, &node).await;
        until("the Lease is renewed", async || renew_time(site, &node).await != first).await;
        if site.plane == ControlPlane::Present {
            return; // how long a real one waits is its own choice
        }
        standin.break_node(&node);
        until_ready(site, &node, "Unknown").await;
        let taints = site.field(Kind::Node, &node, "/spec/taints").await;
        assert!(taints.to_string().contains("node.kubernetes.io/unreachable"), "{taints}");
        standin.mend_node(&node);
        until_ready(site, &node, "True").await;
        until("the taints are gone", async || {
            !site.field(Kind::Node, &node, "/spec/taints").await.to_string().contains("unreachable")
        })
        .await;
    }

    pub(super) async fn a_node_that_was_deleted_does_not_come_back(site: &Site) {
        start(site);
        let (node, witness) = (site.node_name("n0"), site.node_name("n1"));
        site.add_node_file("n0");
        until_ready(site, &node, "True").await;
        site.delete(Kind::Node, &node).await;
        until("the Node is gone", async || !site.has(Kind::Node, &node).await).await;
        // A round that registers another node has also looked at the deleted one.
        site.add_node_file("n1");
        until_ready(site, &witness, "True").await;
        assert!(!site.has(Kind::Node, &node).await);
    }

    pub(super) async fn a_pod_waits_for_a_node_runs_and_ends(site: &Site) {
        start(site);
        site.create(Kind::Pod, "web", pod(site, 30)).await;
        until("the pod cannot be scheduled", async || {
            site.condition(Kind::Pod, "web", "PodScheduled").await == "False"
        })
        .await;
        site.add_node_file("n0");
        until("the pod is ready", async || site.condition(Kind::Pod, "web", "Ready").await == "True").await;
        assert_eq!(site.field(Kind::Pod, "web", "/spec/nodeName").await, site.node_name("n0"));
        assert_eq!(site.field(Kind::Pod, "web", "/status/phase").await, "Running");
        site.delete(Kind::Pod, "web").await;
        until("the pod has ended", async || !site.has(Kind::Pod, "web").await).await;
    }

    pub(super) async fn a_pod_goes_with_its_node(site: &Site) {
        if site.plane == ControlPlane::Present {
            return; // the controller manager's part; it takes a minute
        }
        start(site);
        site.add_node_file("n0");
        site.create(Kind::Pod, "web", pod(site, 30)).await;
        until("the pod is ready", async || site.condition(Kind::Pod, "web", "Ready").await == "True").await;
        site.delete(Kind::Node, &site.node_name("n0")).await;
        until("the pod is gone", async || !site.has(Kind::Pod, "web").await).await;
    }

    pub(super) async fn a_budget_refuses_an_eviction_until_it_is_lifted(site: &Site) {
        start(site);
        site.add_node_file("n0");
        site.create(Kind::Pod, "web", pod(site, 30)).await;
        let spec = json!({ "minAvailable": 1, "selector": { "matchLabels": { "app": "web" } } });
        site.create(Kind::PodDisruptionBudget, "web", json!({ "spec": spec })).await;
        until("the budget counts the pod", async || {
            site.field(Kind::PodDisruptionBudget, "web", "/status/currentHealthy").await == 1
        })
        .await;
        let pods: Api<Pod> = Api::namespaced(site.client.clone(), &site.namespace);
        let refused = pods.evict("web", &Default::default()).await.unwrap_err();
        assert!(matches!(&refused, kube::Error::Api(status) if status.code == 429), "{refused}");
        site.patch(Kind::PodDisruptionBudget, "web", json!({ "spec": { "minAvailable": 0 } })).await;
        until("one eviction is allowed", async || {
            site.field(Kind::PodDisruptionBudget, "web", "/status/disruptionsAllowed").await == 1
        })
        .await;
        pods.evict("web", &Default::default()).await.unwrap();
        until("the pod is gone", async || !site.has(Kind::Pod, "web").await).await;
    }

    pub(super) async fn a_dead_agent_renews_nothing(site: &Site) {
        let instances = site.dir.path().join("instances");
        let mut options = site.options();
        let mut keeper = site.keeper_options();
        keeper.instances_dir = Some(instances.clone());
        options.keeper = Some(keeper);
        let line = std::fs::read_to_string("/proc/self/stat").unwrap();
        let start_time: u64 =
            line.rsplit_once(") ").unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
        let vm = |name: &str, start_time: u64| {
            let dir = instances.join(site.node_name(name));
            std::fs::create_dir_all(dir.join("recv")).unwrap();
            std::fs::write(dir.join("recv/instance.env"), "NODE_LABELS=job=demo\n").unwrap();
            let file = json!({ "state": "running", "pid": std::process::id(), "start_time": start_time });
            std::fs::write(dir.join("vm.json"), file.to_string()).unwrap();
            site.add_node_file(name);
        };
        vm("dead", start_time + 1);
        vm("alive", start_time);
        site.start(options);
        let (dead, alive) = (site.node_name("dead"), site.node_name("alive"));
        until("the living node has its label", async || {
            site.field(Kind::Node, &alive, "/metadata/labels/job").await == "demo"
        })
        .await;
        until("the living node has a Lease", async || !renew_time(site, &alive).await.is_empty()).await;
        assert_eq!(renew_time(site, &dead).await, "");
        assert!(site.field(Kind::Node, &dead, "/metadata/labels/job").await.is_null());
    }
}
