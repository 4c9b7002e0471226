//! The controller as a whole: what changes wakes the right machine.

use tokio::time::Instant;

use super::{
    member::{put_node, world as member_world},
    on_demand::{running, serve, world as on_demand_world},
    *,
};

/// Runs the controller, with watches that are half a second late, until the condition holds.
async fn until(world: &World, what: &str, condition: impl Fn(&World) -> bool) {
    // Shorter than any periodic look, or a missing wake-up would not be noticed.
    let deadline = Instant::now() + Duration::from_secs(4);
    while !condition(world) {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(500)).await;
        world.feed();
    }
}

fn run(world: &World) -> Tasks {
    let tasks = Tasks::new();
    connect(&world.context);
    start(&tasks, &world.context, &crate::control::queue::NoMetrics::of_queues());
    // What was there before the controller is told as by a first list.
    for object in world.context.stores.nstance_machines.all() {
        world.context.queues.machines.add(ObjectKey::of(&*object));
    }
    world.feed();
    tasks
}

fn is_phase(world: &World, name: &str, phase: crate::api::machine::Phase) -> bool {
    nstance_machine(world, name).is_some_and(|it| it.status.is_some_and(|it| it.phase == Some(phase)))
}

#[tokio::test(start_paused = true)]
async fn an_on_demand_machine_comes_and_goes_by_what_wakes_it() {
    use crate::api::machine::Phase;

    let world = on_demand_world();
    let made = serve(&world);
    let tasks = run(&world);
    let id = |world: &World| nstance_machine(world, "m").and_then(|it| it.spec.instance_id);
    until(&world, "asked for", |world| id(world).is_some()).await;
    // What the answer of the shard said is looked at again until the picture has it; the picture wakes it at once.
    world.shards.put_instance("a", Instance { status: InstanceStatus::Provisioning, ..running("i1") });
    until(&world, "provisioning", |world| is_phase(world, "m", Phase::Provisioning)).await;
    world.shards.edit_instance("a", "i1", |it| {
        it.status = InstanceStatus::Running;
        it.registered_at = Some(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    });
    until(&world, "running", |world| is_phase(world, "m", Phase::Running)).await;
    let node = json!({"metadata": {"name": "n"}, "spec": {"providerID": "dev:///i1"}});
    world.kube.put(kinds::NODE, &node);
    until(&world, "ready", |world| condition(&nstance_machine(world, "m").unwrap(), kind::READY) == "True Ready").await;
    made.lock().unwrap().clear();
    world.shards.remove_instance("a", "i1");
    until(&world, "its Machine deleted", |world| machine(world, "m").unwrap().is_terminating()).await;
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "m");
    until(&world, "gone", |world| nstance_machine(world, "m").is_none()).await;
    tasks.end(Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_member_follows_its_machine_and_its_node_by_what_wakes_it() {
    let world = member_world();
    let tasks = run(&world);
    put_node(&world, json!({}));
    let hook = |world: &World| machine(world, "i1").unwrap().annotation(annotation::PRE_DRAIN_HOOK).is_some();
    until(&world, "held", hook).await;
    world.kube.delete_by_user(kinds::MACHINE, NAMESPACE, "i1");
    until(&world, "replaced", |world| world.shards.asked().len() == 1).await;
    world.shards.edit_instance("a", "i1", |it| it.status = InstanceStatus::Draining);
    until(&world, "draining", |world| is_phase(world, "i1", crate::api::machine::Phase::Draining)).await;
    put_node(&world, json!({annotation::DRAIN_INSTANCE_ID: "i1", annotation::DRAIN_STATE: "Drained"}));
    until(&world, "freed", |world| !hook(world)).await;
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    world.shards.remove_instance("a", "i1");
    until(&world, "gone", |world| nstance_machine(world, "i1").is_none()).await;
    // Cluster API made the Machine anew meanwhile.
    world.kube.remove(kinds::MACHINE, NAMESPACE, "i1");
    put_machine(&world, "i1", &[(label::POOL_NAME, "pool")]);
    until(&world, "deleted again", |world| machine(world, "i1").unwrap().is_terminating()).await;
    tasks.end(Duration::from_secs(1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_cluster_that_is_resumed_wakes_its_machines() {
    let world = on_demand_world();
    serve(&world);
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["spec"]["paused"] = json!(true));
    world.feed();
    let tasks = run(&world);
    let is_paused = |world: &World| condition(&nstance_machine(world, "m").unwrap(), kind::PAUSED) == "True Paused";
    until(&world, "paused", is_paused).await;
    world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["spec"]["paused"] = json!(false));
    until(&world, "resumed", |world| nstance_machine(world, "m").unwrap().spec.instance_id.is_some()).await;
    tasks.end(Duration::from_secs(1)).await;
}
