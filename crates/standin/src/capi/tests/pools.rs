//! MachinePools and their Machines, as long as nothing is deleted.

use super::*;

fn pool_phase(world: &World) -> String {
    world.get(Kind::MachinePool, "p").text("/status/phase").to_owned()
}

#[test]
fn a_pool_is_provisioned_by_the_older_readiness_field_alone() {
    let mut world = World::with_pool(0);
    world.get_mut(Kind::NstanceMachinePool, "p")["status"] = json!({ "initialization": { "provisioned": true } });
    world.get_mut(Kind::MachinePool, "p").as_object_mut().unwrap().remove("status");
    world.settle();
    assert_eq!(pool_phase(&world), "Provisioning");
    world.get_mut(Kind::NstanceMachinePool, "p")["status"]["ready"] = true.into();
    world.settle();
    assert_eq!(pool_phase(&world), "Running");
}

#[test]
fn a_pool_copies_what_the_provider_says_and_finds_its_nodes() {
    let mut world = World::with_pool(2);
    let pool = world.get(Kind::MachinePool, "p");
    assert_eq!(pool.texts("/spec/providerIDList"), [id(0), id(1)]);
    assert_eq!(pool.number("/status/replicas"), Some(2));
    assert_eq!(pool.list("/status/nodeRefs").len(), 2);
    assert_eq!(pool_phase(&world), "Running");
    assert!(pool.has_finalizer("machinepool.cluster.x-k8s.io"));
    let infra = world.get(Kind::NstanceMachinePool, "p");
    assert_eq!(infra.controller().unwrap().kind(), "MachinePool");
    assert_eq!(infra.label("cluster.x-k8s.io/cluster-name"), Some("c"));
    let node = Object::new(world.nodes["m0"].clone());
    assert_eq!(node.annotation("cluster.x-k8s.io/owner-name"), Some("p"));
    assert_eq!(node.annotation("cluster.x-k8s.io/machine"), Some("m0"));
    world.get_mut(Kind::MachinePool, "p")["spec"]["replicas"] = 3.into();
    world.settle();
    assert_eq!(pool_phase(&world), "ScalingUp");
    world.get_mut(Kind::MachinePool, "p")["spec"]["replicas"] = 1.into();
    world.settle();
    assert_eq!(pool_phase(&world), "ScalingDown");
}

#[test]
fn each_infrastructure_machine_becomes_a_machine_that_runs() {
    let world = World::with_pool(2);
    assert_eq!(world.names(Kind::Machine), ["m0", "m1"]);
    let machine = world.get(Kind::Machine, "m0");
    assert_eq!(machine.controller().unwrap().kind(), "MachinePool");
    assert_eq!(machine.label("cluster.x-k8s.io/pool-name"), Some("p"));
    assert_eq!(machine.text("/spec/version"), "v1.36.3");
    assert_eq!(machine.text("/spec/providerID"), id(0));
    assert_eq!(machine.text("/status/nodeRef/name"), "m0");
    assert_eq!(machine.text("/status/phase"), "Running");
    assert_eq!(machine.number("/spec/deletion/nodeDeletionTimeoutSeconds"), Some(10));
    let infra = world.get(Kind::NstanceMachine, "m0");
    let owner = infra.controller().unwrap();
    assert_eq!((owner.kind(), owner.name()), ("Machine", "m0"));
}

#[test]
fn machines_are_ready_only_once_the_control_plane_is_initialized() {
    let mut world = World::with_pool(1);
    assert_eq!(world.get(Kind::Machine, "m0").condition_status("Ready"), "Unknown");
    world.get_mut(Kind::Cluster, "c")["status"]["conditions"] =
        json!([{ "type": "ControlPlaneInitialized", "status": "True" }]);
    world.settle();
    assert!(world.get(Kind::Machine, "m0").is_true("Ready"));
    assert_eq!(world.get(Kind::MachinePool, "p").number("/status/readyReplicas"), Some(1));
    world.nodes.get_mut("m0").unwrap()["status"]["conditions"][0]["status"] = "Unknown".into();
    world.settle();
    let machine = world.get(Kind::Machine, "m0");
    assert_eq!(machine.condition_status("Ready"), "Unknown");
    assert_eq!(machine.condition("NodeHealthy").unwrap()["message"], "Node.Ready is Unknown");
}

#[test]
fn without_a_working_kubeconfig_no_machine_is_made_and_no_id_is_copied() {
    let mut world = World::with_pool(0);
    world.is_connected = false;
    world.add_infra_machine(0);
    world.add_node(0);
    world.set_ids(&[0]);
    world.settle();
    assert!(world.names(Kind::Machine).is_empty());
    assert!(world.get(Kind::MachinePool, "p").list("/spec/providerIDList").is_empty());
    world.is_connected = true;
    world.settle();
    assert_eq!(world.names(Kind::Machine), ["m0"]);
}

#[test]
fn an_infrastructure_machine_with_another_controller_leaves_its_machine_pending() {
    let mut world = World::with_pool(0);
    world.add_infra_machine(0);
    world.get_mut(Kind::NstanceMachine, "m0")["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1", "kind": "NstanceMachinePool", "name": "p",
        "uid": "x", "controller": true,
    }]);
    world.settle();
    let machine = world.get(Kind::Machine, "m0");
    assert_eq!(machine.text("/status/phase"), "Pending");
    assert_eq!(machine.condition("InfrastructureReady").unwrap()["reason"], "AlreadyOwned");
}

#[test]
fn annotations_of_the_template_are_put_back_on_machines() {
    let mut world = World::with_pool(1);
    world.get_mut(Kind::MachinePool, "p")["spec"]["template"]["metadata"] = json!({ "annotations": { "a/b": "c" } });
    world.settle();
    world.get_mut(Kind::Machine, "m0")["metadata"].as_object_mut().unwrap().remove("annotations");
    world.settle();
    assert_eq!(world.get(Kind::Machine, "m0").annotation("a/b"), Some("c"));
}

#[test]
fn replicas_that_were_left_out_become_one_or_stay_within_the_autoscalers_range() {
    let mut world = World::with_pool(0);
    let mut replicas = |annotations: Value| {
        let pool = world.get_mut(Kind::MachinePool, "p");
        pool["spec"].as_object_mut().unwrap().remove("replicas");
        pool["metadata"]["annotations"] = annotations;
        world.settle();
        world.get(Kind::MachinePool, "p").number("/spec/replicas").unwrap()
    };
    assert_eq!(replicas(json!({})), 1);
    let range = json!({
        "cluster.x-k8s.io/cluster-api-autoscaler-node-group-min-size": "2",
        "cluster.x-k8s.io/cluster-api-autoscaler-node-group-max-size": "5",
    });
    assert_eq!(replicas(range), 2);
}

#[test]
fn an_on_demand_machine_is_owned_by_its_cluster_and_copies_its_infrastructure() {
    let mut world = World::new();
    world.add_infra_machine(0);
    world.add_node(0);
    world.get_mut(Kind::NstanceMachine, "m0")["metadata"]["labels"] = json!({});
    world.get_mut(Kind::NstanceMachine, "m0")["status"]["addresses"] =
        json!([{ "type": "InternalIP", "address": "10.0.0.1" }]);
    world.add(
        Kind::Machine,
        "od-1",
        json!({ "spec": {
        "clusterName": "c",
        "bootstrap": { "dataSecretName": "" },
        "infrastructureRef": { "apiGroup": INFRA_GROUP, "kind": "NstanceMachine", "name": "m0" },
    } }),
    );
    world.settle();
    let machine = world.get(Kind::Machine, "od-1");
    assert_eq!(machine.owners().next().unwrap().kind(), "Cluster");
    assert_eq!(machine.text("/status/addresses/0/address"), "10.0.0.1");
    assert_eq!(machine.text("/status/phase"), "Running");
    assert_eq!(world.get(Kind::NstanceMachine, "m0").controller().unwrap().name(), "od-1");
}
