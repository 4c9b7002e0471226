//! What goes, in which order, and what stays.

use super::*;

#[test]
fn the_node_of_an_id_that_left_the_list_is_deleted_and_so_is_that_of_a_respelled_one() {
    let mut world = World::with_pool(3);
    world.set_ids(&[0, 1]);
    world.settle();
    assert_eq!(world.node_names(), ["m0", "m1"]);
    world.get_mut(Kind::NstanceMachinePool, "p")["spec"]["providerIDList"] = json!([id(0), "dev:////nstance-agent-m1"]);
    world.settle();
    assert_eq!(world.node_names(), ["m0"]);
}

#[test]
fn the_last_id_keeps_its_node_while_replicas_are_wanted() {
    let mut world = World::with_pool(1);
    world.set_ids(&[]);
    world.settle();
    assert_eq!(world.node_names(), ["m0"]);
    world.get_mut(Kind::MachinePool, "p")["spec"]["replicas"] = 0.into();
    world.settle();
    assert!(world.node_names().is_empty());
}

#[test]
fn an_empty_list_beside_replicas_is_ignored() {
    let mut world = World::with_pool(2);
    world.get_mut(Kind::NstanceMachinePool, "p")["spec"]["providerIDList"] = json!([]);
    world.get_mut(Kind::MachinePool, "p")["spec"]["replicas"] = 0.into();
    world.settle();
    assert_eq!(world.get(Kind::MachinePool, "p").list("/spec/providerIDList").len(), 2);
    assert_eq!(world.node_names(), ["m0", "m1"]);
}

#[test]
fn a_deleted_pool_waits_for_its_infrastructure_and_leaves_the_nodes() {
    let mut world = World::with_pool(2);
    world.get_mut(Kind::NstanceMachinePool, "p")["metadata"]["finalizers"] = json!(["ours"]);
    world.delete(Kind::MachinePool, "p");
    world.settle();
    assert!(world.get(Kind::NstanceMachinePool, "p").is_deleting());
    assert_eq!(world.get(Kind::MachinePool, "p").text("/status/phase"), "Deleting");
    world.set_ids(&[]);
    world.settle();
    assert_eq!(world.node_names(), ["m0", "m1"]);
    world.drop_finalizer(Kind::NstanceMachinePool, "p");
    world.settle();
    assert!(!world.has(Kind::MachinePool, "p"));
    assert_eq!(world.node_names(), ["m0", "m1"]);
}

#[test]
fn a_terminating_infrastructure_pool_is_no_longer_listened_to() {
    let mut world = World::with_pool(2);
    world.get_mut(Kind::NstanceMachinePool, "p")["metadata"]["finalizers"] = json!(["ours"]);
    world.delete(Kind::NstanceMachinePool, "p");
    world.set_ids(&[0]);
    world.objects.remove(&(Kind::Machine, Key::new("d", "m1")));
    world.settle();
    assert_eq!(world.node_names(), ["m0", "m1"]);
    assert_eq!(world.names(Kind::Machine), ["m0"]);
}

#[test]
fn a_deleted_pool_with_nodes_waits_ten_seconds_for_a_workload_cluster_that_does_not_answer() {
    let mut world = World::with_pool(1);
    world.is_connected = false;
    world.delete(Kind::MachinePool, "p");
    world.settle();
    assert!(world.has(Kind::MachinePool, "p"));
    world.now = T0.plus(std::time::Duration::from_secs(11));
    world.settle();
    assert!(!world.has(Kind::MachinePool, "p"));
}

#[test]
fn without_a_control_plane_a_machine_takes_its_infrastructure_with_it_and_leaves_the_node() {
    let mut world = World::with_pool(1);
    world.get_mut(Kind::Machine, "m0")["metadata"]["annotations"] =
        json!({ "pre-drain.delete.hook.machine.cluster.x-k8s.io/nstance": "" });
    world.delete(Kind::Machine, "m0");
    world.settle();
    assert!(world.drains.is_empty());
    assert!(world.get(Kind::NstanceMachine, "m0").is_deleting());
    assert!(world.has(Kind::Machine, "m0"), "it waits for the infrastructure's finalizer");
    world.drop_finalizer(Kind::NstanceMachine, "m0");
    world.settle();
    assert!(!world.has(Kind::Machine, "m0"));
    assert_eq!(world.node_names(), ["m0"]);
}

#[test]
fn a_machine_comes_back_while_its_infrastructure_exists_even_a_terminating_one() {
    let mut world = World::with_pool(1);
    world.delete(Kind::NstanceMachine, "m0");
    let old = world.get(Kind::Machine, "m0").uid().to_owned();
    world.objects.remove(&(Kind::Machine, Key::new("d", "m0")));
    world.settle();
    assert_ne!(world.get(Kind::Machine, "m0").uid(), old);
}

#[test]
fn where_core_drains_the_order_is_hook_drain_infrastructure_node() {
    let mut world = World::with_pool(1);
    world.add_master();
    world.get_mut(Kind::Machine, "m0")["metadata"]["annotations"] =
        json!({ "pre-drain.delete.hook.machine.cluster.x-k8s.io/nstance": "" });
    world.delete(Kind::Machine, "m0");
    world.settle();
    assert!(world.drains.is_empty());
    assert_eq!(deleting_reason(&world), "WaitingForPreDrainHook");
    world.get_mut(Kind::Machine, "m0")["metadata"].as_object_mut().unwrap().remove("annotations");
    world.settle();
    assert_eq!(world.drains[0].node, "m0");
    assert_eq!(deleting_reason(&world), "DrainingNode");
    assert!(!world.get(Kind::NstanceMachine, "m0").is_deleting());
    world.drained("m0");
    world.settle();
    assert!(world.get(Kind::NstanceMachine, "m0").is_deleting());
    assert_eq!(world.node_names(), ["m0"]);
    world.drop_finalizer(Kind::NstanceMachine, "m0");
    world.settle();
    assert!(!world.has(Kind::Machine, "m0"));
    assert!(world.node_names().is_empty());
}

fn deleting_reason(world: &World) -> String {
    let machine = world.get(Kind::Machine, "m0");
    machine.condition("Deleting").unwrap()["reason"].as_str().unwrap().to_owned()
}

#[test]
fn an_externally_managed_control_plane_drains_too() {
    let mut world = World::with_pool(1);
    world.get_mut(Kind::Cluster, "c")["spec"]["controlPlaneRef"] =
        json!({ "apiGroup": "controlplane.cluster.x-k8s.io", "kind": "DummyControlPlane", "name": "x" });
    let control_plane = ControlPlane { is_externally_managed: true, ..ControlPlane::default() };
    world.memory.control_planes.insert(Key::new("d", "c"), control_plane);
    world.delete(Kind::Machine, "m0");
    world.settle();
    assert_eq!(world.drains.len(), 1);
}

#[test]
fn excluded_from_draining_a_machine_goes_on_once_its_volumes_are_detached() {
    let mut world = World::with_pool(2);
    world.add_master();
    let exclude = "machine.cluster.x-k8s.io/exclude-node-draining";
    let volumes = "machine.cluster.x-k8s.io/exclude-wait-for-node-volume-detach";
    world.get_mut(Kind::Machine, "m0")["metadata"]["annotations"] = json!({ exclude: "" });
    world.get_mut(Kind::Machine, "m1")["metadata"]["annotations"] = json!({ exclude: "", volumes: "" });
    world.delete(Kind::Machine, "m0");
    world.delete(Kind::Machine, "m1");
    world.settle();
    assert_eq!(world.drains.len(), 1);
    assert_eq!(world.drains[0].scope, super::super::machine::DrainScope::Volumes);
    assert!(world.get(Kind::NstanceMachine, "m1").is_deleting());
}

#[test]
fn a_pre_terminate_hook_holds_every_machine() {
    let mut world = World::with_pool(1);
    world.get_mut(Kind::Machine, "m0")["metadata"]["annotations"] =
        json!({ "pre-terminate.delete.hook.machine.cluster.x-k8s.io/x": "" });
    world.delete(Kind::Machine, "m0");
    world.settle();
    assert_eq!(deleting_reason(&world), "WaitingForPreTerminateHook");
    assert!(!world.get(Kind::NstanceMachine, "m0").is_deleting());
}

#[test]
fn a_deleted_cluster_goes_after_its_pools_machines_and_infrastructure_and_no_node_goes() {
    let mut world = World::with_pool(1);
    world.add_master();
    world.get_mut(Kind::NstanceMachinePool, "p")["metadata"]["finalizers"] = json!(["ours"]);
    let uid = world.get(Kind::MachinePool, "p").uid().to_owned();
    world.delete(Kind::Cluster, "c");
    world.settle();
    assert!(world.get(Kind::MachinePool, "p").is_deleting());
    assert!(world.get(Kind::NstanceMachinePool, "p").is_deleting());
    assert!(!world.get(Kind::Machine, "m0").is_deleting(), "its owner is the pool, so it is garbage collection's");
    world.drop_finalizer(Kind::NstanceMachinePool, "p");
    world.settle();
    assert!(!world.has(Kind::MachinePool, "p"));
    world.collect(&uid);
    world.settle();
    assert!(world.drains.is_empty(), "a Cluster that goes drains nothing");
    world.drop_finalizer(Kind::NstanceMachine, "m0");
    world.settle();
    assert!(world.names(Kind::Cluster).is_empty() && world.names(Kind::NstanceCluster).is_empty());
    assert!(world.names(Kind::Machine).is_empty());
    assert_eq!(world.node_names(), ["m0"]);
}
