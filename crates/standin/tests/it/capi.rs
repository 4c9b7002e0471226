//! The Cluster API stand-in with a provider that the story plays.

crate::stories!(
    a_pool_runs_once_its_kubeconfig_works,
    an_id_that_leaves_the_list_takes_its_node_along,
    a_deleted_machine_waits_for_its_infrastructure,
    a_deleted_cluster_takes_everything_but_nodes,
    where_core_drains_a_budget_blocks_until_it_is_lifted,
);

mod story {
    use nstance_standin::kinds::{INFRA_GROUP, Kind};
    use serde_json::{Value, json};

    use crate::site::{Site, until};

    fn reference(kind: Kind, name: &str) -> Value {
        json!({ "apiGroup": INFRA_GROUP, "kind": kind.kind(), "name": name })
    }

    async fn add_cluster(site: &Site) {
        site.create(
            Kind::NstanceCluster,
            "c",
            json!({ "spec": { "controlPlaneEndpoint": { "host": "127.0.0.1", "port": 6443 } } }),
        )
        .await;
        site.set_status(Kind::NstanceCluster, "c", json!({ "initialization": { "provisioned": true } })).await;
        site.create(
            Kind::Cluster,
            "c",
            json!({ "spec": { "infrastructureRef": reference(Kind::NstanceCluster, "c") } }),
        )
        .await;
    }

    async fn add_pool(site: &Site, machines: &[&str]) {
        site.create(Kind::NstanceMachinePool, "p", json!({ "spec": { "group": "test", "shards": ["dev-1"] } })).await;
        let template = json!({
            "clusterName": "c",
            "bootstrap": { "dataSecretName": "" },
            "infrastructureRef": reference(Kind::NstanceMachinePool, "p"),
        });
        let spec = json!({ "clusterName": "c", "replicas": machines.len(), "template": { "spec": template } });
        site.create(Kind::MachinePool, "p", json!({ "spec": spec })).await;
        for name in machines {
            add_machine(site, name).await;
        }
        set_ids(site, machines).await;
    }

    async fn add_machine(site: &Site, name: &str) {
        let labels = json!({ "cluster.x-k8s.io/cluster-name": "c", "cluster.x-k8s.io/pool-name": "p" });
        let metadata = json!({ "labels": labels, "finalizers": ["nstance.dev/test"] });
        let spec = json!({ "group": "test", "providerID": site.provider_id(name) });
        site.create(Kind::NstanceMachine, name, json!({ "metadata": metadata, "spec": spec })).await;
        let status = json!({ "ready": true, "initialization": { "provisioned": true } });
        site.set_status(Kind::NstanceMachine, name, status).await;
        add_node(site, name).await;
    }

    /// A Node that some kubelet registered.
    async fn add_node(site: &Site, name: &str) {
        let metadata = json!({ "labels": { "story": site.namespace } });
        let spec = json!({ "providerID": site.provider_id(name) });
        site.create(Kind::Node, &site.node_name(name), json!({ "metadata": metadata, "spec": spec })).await;
        let condition = |name: &str, status: &str| {
            let time = "2026-01-01T00:00:00Z";
            json!({ "type": name, "status": status, "reason": "Test", "message": "", "lastHeartbeatTime": time, "lastTransitionTime": time })
        };
        let conditions = [
            condition("Ready", "True"),
            condition("MemoryPressure", "False"),
            condition("DiskPressure", "False"),
            condition("PIDPressure", "False"),
        ];
        site.set_status(Kind::Node, &site.node_name(name), json!({ "conditions": conditions })).await;
    }

    async fn set_ids(site: &Site, machines: &[&str]) {
        let ids: Vec<String> = machines.iter().map(|it| site.provider_id(it)).collect();
        site.patch(Kind::NstanceMachinePool, "p", json!({ "spec": { "providerIDList": ids } })).await;
        let status = json!({ "ready": true, "replicas": ids.len(), "infrastructureMachineKind": "NstanceMachine" });
        site.set_status(Kind::NstanceMachinePool, "p", status).await;
    }

    fn start(site: &Site) {
        let mut options = site.options();
        options.capi = true;
        site.start(options);
    }

    async fn until_phase(site: &Site, kind: Kind, name: &str, phase: &str) {
        until(&format!("{kind:?} {name} is {phase}"), async || site.field(kind, name, "/status/phase").await == phase)
            .await;
    }

    async fn until_gone(site: &Site, kind: Kind, name: &str) {
        until(&format!("{kind:?} {name} is gone"), async || !site.has(kind, name).await).await;
    }

    pub(super) async fn a_pool_runs_once_its_kubeconfig_works(site: &Site) {
        start(site);
        add_cluster(site).await;
        until_phase(site, Kind::Cluster, "c", "Provisioned").await;
        add_pool(site, &["m0", "m1"]).await;
        until("the pool says why it waits", async || {
            let conditions = site.field(Kind::MachinePool, "p", "/status/deprecated/v1beta1/conditions").await;
            conditions.to_string().contains("connection to the workload cluster is down")
        })
        .await;
        assert!(!site.has(Kind::Machine, "m0").await);
        site.add_kubeconfig("c").await;
        until_phase(site, Kind::MachinePool, "p", "Running").await;
        until_phase(site, Kind::Machine, "m0", "Running").await;
        until_phase(site, Kind::Machine, "m1", "Running").await;
        assert_eq!(site.condition(Kind::Machine, "m0", "Ready").await, "Unknown");
        let mut conditions = site.field(Kind::Cluster, "c", "/status/conditions").await;
        for condition in
            conditions.as_array_mut().unwrap().iter_mut().filter(|it| it["type"] == "ControlPlaneInitialized")
        {
            condition["status"] = "True".into();
        }
        site.set_status(Kind::Cluster, "c", json!({ "conditions": conditions })).await;
        until("the Machine is ready", async || site.condition(Kind::Machine, "m0", "Ready").await == "True").await;
        assert_eq!(site.condition(Kind::Cluster, "c", "ControlPlaneInitialized").await, "True");
    }

    pub(super) async fn an_id_that_leaves_the_list_takes_its_node_along(site: &Site) {
        start(site);
        add_cluster(site).await;
        site.add_kubeconfig("c").await;
        add_pool(site, &["m0", "m1"]).await;
        until_phase(site, Kind::MachinePool, "p", "Running").await;
        set_ids(site, &["m0"]).await;
        until_gone(site, Kind::Node, &site.node_name("m1")).await;
        assert!(site.has(Kind::Node, &site.node_name("m0")).await);
    }

    pub(super) async fn a_deleted_machine_waits_for_its_infrastructure(site: &Site) {
        start(site);
        add_cluster(site).await;
        site.add_kubeconfig("c").await;
        add_pool(site, &["m0"]).await;
        until_phase(site, Kind::Machine, "m0", "Running").await;
        site.delete(Kind::Machine, "m0").await;
        until("the infrastructure machine is being deleted", async || {
            !site.field(Kind::NstanceMachine, "m0", "/metadata/deletionTimestamp").await.is_null()
        })
        .await;
        until_phase(site, Kind::Machine, "m0", "Deleting").await;
        assert!(site.has(Kind::Node, &site.node_name("m0")).await);
        site.patch(Kind::NstanceMachine, "m0", json!({ "metadata": { "finalizers": null } })).await;
        until_gone(site, Kind::Machine, "m0").await;
        assert!(site.has(Kind::Node, &site.node_name("m0")).await, "without a control plane the Node stays");
    }

    pub(super) async fn a_deleted_cluster_takes_everything_but_nodes(site: &Site) {
        start(site);
        add_cluster(site).await;
        site.add_kubeconfig("c").await;
        add_pool(site, &["m0"]).await;
        until_phase(site, Kind::Machine, "m0", "Running").await;
        site.delete(Kind::Cluster, "c").await;
        until_gone(site, Kind::MachinePool, "p").await;
        until("garbage collection came to the Machine", async || {
            !site.field(Kind::NstanceMachine, "m0", "/metadata/deletionTimestamp").await.is_null()
        })
        .await;
        site.patch(Kind::NstanceMachine, "m0", json!({ "metadata": { "finalizers": null } })).await;
        until_gone(site, Kind::Cluster, "c").await;
        assert!(!site.has(Kind::NstanceCluster, "c").await);
        assert!(!site.has(Kind::Machine, "m0").await);
        assert!(site.has(Kind::Node, &site.node_name("m0")).await);
    }

    pub(super) async fn where_core_drains_a_budget_blocks_until_it_is_lifted(site: &Site) {
        let mut options = site.options();
        options.capi = true;
        options.keeper = Some(site.keeper_options());
        site.start(options);
        add_cluster(site).await;
        site.add_kubeconfig("c").await;
        add_pool(site, &["m0"]).await;
        // Kept by the keeper from now on, so that its pods run.
        if !site.is_file_backed {
            site.add_node_file("m0");
        }
        let foreign = json!({ "apiGroup": "other.example.com", "kind": "OtherMachine", "name": "x" });
        let spec = json!({ "clusterName": "c", "bootstrap": { "dataSecretName": "" }, "infrastructureRef": foreign });
        let labels = json!({ "cluster.x-k8s.io/control-plane": "" });
        site.create(Kind::Machine, "master", json!({ "metadata": { "labels": labels }, "spec": spec })).await;
        until_phase(site, Kind::Machine, "m0", "Running").await;
        let node = site.node_name("m0");
        let spec = json!({ "nodeName": node, "containers": [{ "name": "c", "image": "none" }], "terminationGracePeriodSeconds": 30 });
        site.create(Kind::Pod, "web", json!({ "metadata": { "labels": { "app": "web" } }, "spec": spec })).await;
        until("the pod is ready", async || site.condition(Kind::Pod, "web", "Ready").await == "True").await;
        let spec = json!({ "minAvailable": 1, "selector": { "matchLabels": { "app": "web" } } });
        site.create(Kind::PodDisruptionBudget, "web", json!({ "spec": spec })).await;
        until("the budget counts the pod", async || {
            site.field(Kind::PodDisruptionBudget, "web", "/status/currentHealthy").await == 1
        })
        .await;
        site.delete(Kind::Machine, "m0").await;
        until("the drain names the pod that is left", async || {
            let conditions = site.field(Kind::Machine, "m0", "/status/conditions").await;
            conditions.to_string().contains("pods left on Node")
        })
        .await;
        assert_eq!(site.field(Kind::Node, &node, "/spec/unschedulable").await, true);
        assert!(site.field(Kind::NstanceMachine, "m0", "/metadata/deletionTimestamp").await.is_null());
        site.delete(Kind::PodDisruptionBudget, "web").await;
        until_gone(site, Kind::Pod, "web").await;
        until("the infrastructure machine is being deleted", async || {
            !site.field(Kind::NstanceMachine, "m0", "/metadata/deletionTimestamp").await.is_null()
        })
        .await;
        site.patch(Kind::NstanceMachine, "m0", json!({ "metadata": { "finalizers": null } })).await;
        until_gone(site, Kind::Machine, "m0").await;
        until_gone(site, Kind::Node, &node).await;
    }
}
