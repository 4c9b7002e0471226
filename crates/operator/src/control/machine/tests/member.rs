use k8s_openapi::api::core::v1::Node;

use super::*;

const POOL: &str = "pool";

/// A pool with one member, its Machine and a running instance, as the pool controller makes them.
pub(super) fn world() -> World {
    let world = World::new(&["a"]);
    let mut pool =
        NstanceMachinePool::new(POOL, serde_json::from_value(json!({"group": "web", "shards": ["a"]})).unwrap());
    pool.metadata.namespace = Some(NAMESPACE.to_owned());
    pool.metadata.finalizers = Some(vec![finalizer::POOL.to_owned()]);
    let pool = world.kube.put(kinds::NSTANCE_MACHINE_POOL, &pool);
    let mut machine_pool = MachinePool::new(
        POOL,
        serde_json::from_value(json!({"template": {"spec": {"infrastructureRef": {
            "apiGroup": "infrastructure.cluster.x-k8s.io", "kind": "NstanceMachinePool", "name": POOL,
        }}}}))
        .unwrap(),
    );
    machine_pool.metadata.namespace = Some(NAMESPACE.to_owned());
    machine_pool.metadata.finalizers = Some(vec!["machinepool.cluster.x-k8s.io".to_owned()]);
    world.kube.put(kinds::MACHINE_POOL, &machine_pool);
    world.shards.put_instance("a", running());
    let member = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceMachine",
        "metadata": {
            "name": "i1",
            "namespace": NAMESPACE,
            "labels": {label::POOL_NAME: POOL, label::CLUSTER_NAME: CLUSTER},
            "finalizers": [finalizer::MACHINE],
            "ownerReferences": [{
                "apiVersion": API_VERSION, "kind": "NstanceMachinePool", "name": POOL, "uid": pool.metadata.uid,
            }],
        },
        "spec": {"group": "web", "shard": "a", "instanceID": "i1", "providerID": "dev:///i1"},
    });
    world.kube.put(kinds::NSTANCE_MACHINE, &serde_json::from_value::<NstanceMachine>(member).unwrap());
    put_machine(&world, "i1", &[(label::POOL_NAME, POOL)]);
    world
}

fn running() -> Instance {
    Instance {
        id: "i1".to_owned(),
        group: "web".to_owned(),
        status: InstanceStatus::Running,
        provider_id: Some("dev:///i1".to_owned()),
        registered_at: Some(k8s_openapi::jiff::Timestamp::UNIX_EPOCH),
        ..Instance::default()
    }
}

pub(super) fn put_node(world: &World, annotations: serde_json::Value) {
    let node = json!({
        "metadata": {"name": "n1", "labels": {label::INSTANCE_ID: "i1"}, "annotations": annotations},
        "spec": {"providerID": "dev:///i1"},
    });
    world.kube.put(kinds::NODE, &serde_json::from_value::<Node>(node).unwrap());
}

fn replaced(world: &World) -> Vec<String> {
    let asked = world.shards.asked();
    asked
        .iter()
        .filter_map(|it| match &it.wish {
            Wish::ReplaceInstance { id, reason } => Some(format!("{id}: {reason}")),
            _ => None,
        })
        .collect()
}

fn hook(world: &World) -> Option<String> {
    machine(world, "i1")?.annotation(annotation::PRE_DRAIN_HOOK).map(str::to_owned)
}

#[tokio::test(start_paused = true)]
async fn a_member_is_ready_once_its_node_is_found_and_never_asks_for_an_instance() {
    let world = world();
    turn(&world, "i1").await;
    let object = nstance_machine(&world, "i1").unwrap();
    assert_eq!(condition(&object, kind::READY), "False NotFound");
    put_node(&world, json!({}));
    turn(&world, "i1").await;
    let object = nstance_machine(&world, "i1").unwrap();
    assert_eq!(condition(&object, kind::READY), "True Ready");
    assert_eq!(object.status.as_ref().unwrap().node_name.as_deref(), Some("n1"));
    assert!(world.shards.asked().is_empty());
    world.kube.clear_calls();
    turn(&world, "i1").await;
    assert_eq!(world.kube.writes(), []);
}

#[tokio::test(start_paused = true)]
async fn a_deleted_machine_is_held_until_its_node_is_drained_and_its_instance_replaced_once() {
    let world = world();
    put_node(&world, json!({}));
    turn(&world, "i1").await;
    assert_eq!(hook(&world).as_deref(), Some("nstance-operator"));
    world.kube.delete_by_user(kinds::MACHINE, NAMESPACE, "i1");
    turn(&world, "i1").await;
    turn(&world, "i1").await;
    assert_eq!(replaced(&world), ["i1: its Machine is being deleted"]);
    assert!(hook(&world).is_some());
    // The shard drains; a refusal because it is leaving already is what was wanted.
    let leaving = ShardError::new("a", Code::FailedPrecondition, "i1 is draining");
    world.shards.refuse("a", &wish_key("i1", REPLACE), leaving);
    world.shards.edit_instance("a", "i1", |it| {
        it.status = InstanceStatus::Draining;
        it.drain = Some(Drain { id: "d".to_owned(), reason: "replaced".to_owned(), ..Drain::default() });
    });
    turn(&world, "i1").await;
    assert!(hook(&world).is_some());
    assert_eq!(condition(&nstance_machine(&world, "i1").unwrap(), kind::READY), "False Draining");
    put_node(&world, json!({annotation::DRAIN_INSTANCE_ID: "i1", annotation::DRAIN_STATE: "Drained"}));
    turn(&world, "i1").await;
    let machine = machine(&world, "i1").unwrap();
    assert_eq!(machine.annotation(annotation::PRE_DRAIN_HOOK), None);
    assert_eq!(machine.annotation(annotation::EXCLUDE_NODE_DRAINING), Some("true"));
    turn(&world, "i1").await;
    assert_eq!(hook(&world), None, "a hook that was taken off stays off");
    assert_eq!(replaced(&world).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_drain_that_the_shard_acknowledged_frees_the_machine_too() {
    let world = world();
    turn(&world, "i1").await;
    world.kube.delete_by_user(kinds::MACHINE, NAMESPACE, "i1");
    world.shards.edit_instance("a", "i1", |it| {
        it.status = InstanceStatus::Draining;
        let acked_at = Some(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
        it.drain = Some(Drain { id: "d".to_owned(), acked_at, ..Drain::default() });
    });
    turn(&world, "i1").await;
    assert_eq!(hook(&world), None);
    assert!(replaced(&world).is_empty(), "it is leaving already");
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_stays_keeps_its_hook_although_its_node_was_drained() {
    let world = world();
    turn(&world, "i1").await;
    world.shards.edit_instance("a", "i1", |it| it.status = InstanceStatus::Draining);
    put_node(&world, json!({annotation::DRAIN_INSTANCE_ID: "i1", annotation::DRAIN_STATE: "Drained"}));
    turn(&world, "i1").await;
    assert!(hook(&world).is_some(), "the drain may be cancelled");
}

#[tokio::test(start_paused = true)]
async fn the_finalizer_of_a_member_stays_until_its_instance_is_gone() {
    let world = world();
    turn(&world, "i1").await;
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    turn(&world, "i1").await;
    assert_eq!(replaced(&world), ["i1: its NstanceMachine is being deleted"]);
    world.shards.take_down("a", k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
    turn(&world, "i1").await;
    assert!(nstance_machine(&world, "i1").is_some());
    world.shards.bring_back("a");
    world.shards.remove_instance("a", "i1");
    turn(&world, "i1").await;
    assert!(nstance_machine(&world, "i1").is_none());
    turn(&world, "i1").await;
    assert!(world.shards.wishes().is_empty());
    // Its Machine, which was not deleted, stands for nothing now.
    assert!(machine(&world, "i1").unwrap().is_terminating());
    assert_eq!(hook(&world), None);
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_cluster_api_made_anew_is_deleted_again() {
    let world = world();
    turn(&world, "i1").await;
    world.shards.remove_instance("a", "i1");
    world.kube.remove(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    world.kube.remove(kinds::MACHINE, NAMESPACE, "i1");
    turn(&world, "i1").await;
    put_machine(&world, "i1", &[(label::POOL_NAME, POOL)]);
    turn(&world, "i1").await;
    assert!(machine(&world, "i1").unwrap().is_terminating());
    assert!(world.shards.asked().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_machine_without_nstance_machine_stays_while_nothing_is_proven() {
    let world = world();
    world.kube.remove(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    turn(&world, "i1").await;
    assert!(!machine(&world, "i1").unwrap().is_terminating(), "its instance runs");
    world.shards.remove_instance("a", "i1");
    world.shards.configure(&["a", "b"]);
    turn(&world, "i1").await;
    assert!(!machine(&world, "i1").unwrap().is_terminating(), "shard b has not told yet");
    world.shards.edit("b", |_| {});
    turn(&world, "i1").await;
    assert!(machine(&world, "i1").unwrap().is_terminating());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_replaced_while_pool_machine_pool_or_cluster_are_being_deleted() {
    for ending in [kinds::NSTANCE_MACHINE_POOL, kinds::MACHINE_POOL, kinds::CLUSTER] {
        let world = world();
        turn(&world, "i1").await;
        if ending == kinds::CLUSTER {
            let finalizers = json!(["cluster.cluster.x-k8s.io"]);
            world.kube.edit(ending, NAMESPACE, CLUSTER, |it| it["metadata"]["finalizers"] = finalizers);
            world.kube.delete_by_user(ending, NAMESPACE, CLUSTER);
        } else {
            world.kube.delete_by_user(ending, NAMESPACE, POOL);
        }
        world.kube.delete_by_user(kinds::MACHINE, NAMESPACE, "i1");
        world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
        turn(&world, "i1").await;
        assert!(world.shards.asked().is_empty(), "{}", ending.kind);
        assert!(nstance_machine(&world, "i1").is_some(), "{}", ending.kind);
        world.shards.remove_instance("a", "i1");
        turn(&world, "i1").await;
        assert!(nstance_machine(&world, "i1").is_none(), "{}", ending.kind);
    }
}

#[tokio::test(start_paused = true)]
async fn members_of_an_orphaned_pool_go_and_their_instances_stay() {
    let world = world();
    world.kube.edit(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, POOL, |it| it["spec"]["deletionPolicy"] = json!("Orphan"));
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, POOL);
    turn(&world, "i1").await;
    assert!(nstance_machine(&world, "i1").is_none());
    assert!(world.shards.asked().is_empty());
}

#[tokio::test(start_paused = true)]
async fn members_whose_pool_is_gone_go() {
    let world = world();
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    world.kube.remove(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, POOL);
    turn(&world, "i1").await;
    assert!(nstance_machine(&world, "i1").is_none());
}

fn set_conditions(world: &World, owner_remediated: &str, health: &str) {
    let one = |kind: &str, status: &str| json!({"type": kind, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    world.kube.edit(kinds::MACHINE, NAMESPACE, "i1", |it| {
        it["status"] = json!({"conditions": [
            one("OwnerRemediated", owner_remediated), one("HealthCheckSucceeded", health), one("Other", "True"),
        ]});
    });
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_failed_its_health_check_is_replaced_once_and_not_deleted() {
    let world = world();
    set_conditions(&world, "False", "False");
    for _ in 0..3 {
        turn(&world, "i1").await;
    }
    assert_eq!(replaced(&world), ["i1: its Machine failed a health check"]);
    assert!(!machine(&world, "i1").unwrap().is_terminating());
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_recovered_is_marked_so_that_the_next_outage_is_seen() {
    let world = world();
    set_conditions(&world, "False", "True");
    for _ in 0..3 {
        turn(&world, "i1").await;
    }
    assert!(replaced(&world).is_empty());
    let conditions = machine(&world, "i1").unwrap().status.unwrap().conditions;
    assert!(conditions::is_true(&conditions, "OwnerRemediated"));
    assert!(conditions::is_true(&conditions, "Other"), "others stay");
    let written =
        world.kube.calls_of("merge_patch").iter().filter(|it| it.target == Target::Status && !it.failed).count();
    assert_eq!(written, 1);
}

#[tokio::test(start_paused = true)]
async fn a_machine_being_moved_or_paused_is_left_alone() {
    for mark in [annotation::DELETE_FOR_MOVE, annotation::PAUSED] {
        let world = world();
        world
            .kube
            .edit(kinds::NSTANCE_MACHINE, NAMESPACE, "i1", |it| it["metadata"]["annotations"] = json!({mark: ""}));
        world.kube.delete_by_user(kinds::MACHINE, NAMESPACE, "i1");
        world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
        turn(&world, "i1").await;
        assert!(world.shards.asked().is_empty());
        assert!(hook(&world).is_none());
        assert!(nstance_machine(&world, "i1").is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn where_the_api_is_removed_the_finalizer_goes_and_the_instance_stays() {
    let world = world();
    let what = Some(format!("Namespace {NAMESPACE}"));
    world.context.terminating.send_replace(crate::control::context::Terminating { what });
    world.kube.delete_by_user(kinds::NSTANCE_MACHINE, NAMESPACE, "i1");
    turn(&world, "i1").await;
    assert!(nstance_machine(&world, "i1").is_none());
    assert!(world.shards.asked().is_empty());
    assert_eq!(world.events.messages("GroupOrphaned").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_failed_boot_says_its_stage_and_the_command_that_tells_more() {
    let world = world();
    world.shards.edit_instance("a", "i1", |it| {
        it.boot = Some(crate::decide::observed::Boot {
            stage: "kubelet".to_owned(),
            state: "failed".to_owned(),
            detail: "exit 1".to_owned(),
            failed: true,
            reason: "ServiceFailed".to_owned(),
            since: None,
        });
    });
    turn(&world, "i1").await;
    turn(&world, "i1").await;
    let object = nstance_machine(&world, "i1").unwrap();
    assert_eq!(condition(&object, kind::BOOT_SUCCEEDED), "False ServiceFailed");
    let conditions = &object.status.as_ref().unwrap().conditions;
    let message = &conditions::find(conditions, kind::BOOT_SUCCEEDED).unwrap().message;
    assert!(message.contains("stage kubelet") && message.contains("nstance-admin instance why i1"), "{message}");
    assert_eq!(world.events.messages("BootFailed").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_drain_coordinators_part_of_the_status_is_left_to_it() {
    let world = world();
    turn(&world, "i1").await;
    world.kube.edit(kinds::NSTANCE_MACHINE, NAMESPACE, "i1", |it| {
        it["status"]["drain"] = json!({"reason": "expired", "blockedBy": ["default/web-0"]});
    });
    world.shards.edit_instance("a", "i1", |it| it.status = InstanceStatus::Draining);
    turn(&world, "i1").await;
    let object = nstance_machine(&world, "i1").unwrap();
    assert_eq!(object.status.unwrap().drain.unwrap().blocked_by, ["default/web-0"]);
}
