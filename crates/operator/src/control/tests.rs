//! Pools, shard groups and import, with fakes of both worlds.

use std::sync::Arc;

use serde_json::json;

use super::{cluster, import, pool, queue::Next, shard_group};
use crate::{
    api::{
        NstanceCluster, NstanceMachine, NstanceMachinePool, NstanceShardGroup,
        capi::{Cluster, Machine, MachinePool},
        conditions::{find, is_false, is_true, kind},
        names::{annotation, label},
    },
    cluster::store::ObjectKey,
    decide::observed::{Group, Instance, InstanceStatus, Picture, ShardView},
    ports::{Answer, Progress, Wish, kinds},
    testing::{NAMESPACE, World},
};

fn group(key: &str, size: i32) -> Group {
    Group { key: key.into(), size, actual: size, ready: size, registered: size, is_static: true, ..Group::default() }
}

fn instance(id: &str, shard: &str) -> Instance {
    Instance {
        id: id.into(),
        shard: shard.into(),
        group: "web".into(),
        status: InstanceStatus::Running,
        provider_id: Some(format!("dev:///nstance-agent-{id}")),
        ..Instance::default()
    }
}

/// The controllers, called in turn until nothing changes.
struct Plane {
    world: World,
    pools: pool::PoolMemory,
    clusters: cluster::ClusterMemory,
}

impl Plane {
    fn new(shards: &[&str]) -> Self {
        Self {
            world: World::new(shards),
            pools: pool::PoolMemory::default(),
            clusters: cluster::ClusterMemory::default(),
        }
    }

    async fn settle(&self) {
        for _ in 0..12 {
            let before = self.world.kube.writes().len();
            self.round().await;
            if self.world.kube.writes().len() == before {
                return;
            }
        }
        panic!(
            "the controllers write for ever: {:?}",
            self.world.kube.writes().iter().rev().take(3).collect::<Vec<_>>()
        );
    }

    async fn round(&self) {
        let ctx = &self.world.context;
        self.world.feed();
        cluster::reconcile(ctx, &self.clusters).await.unwrap();
        self.world.feed();
        import::reconcile(ctx).await.unwrap();
        self.world.feed();
        for it in ctx.stores.pools.all() {
            pool::reconcile(ctx, &self.pools, &ObjectKey::of(&*it)).await.unwrap();
        }
        self.world.feed();
        for it in ctx.stores.shard_groups.all() {
            let next = shard_group::reconcile(ctx, &ObjectKey::of(&*it)).await.unwrap();
            assert!(matches!(next, Next::After(_) | Next::Wait));
        }
        self.world.feed();
    }

    /// The shards do what they are asked for.
    fn obey(&self) {
        self.world.shards.script(|_, _, wish| match wish {
            Wish::UpsertGroup(wish) => Progress::Answered(Answer::Group(Box::new(group(&wish.key, wish.size)))),
            _ => Progress::Answered(Answer::Done),
        });
    }

    fn pool(&self) -> NstanceMachinePool {
        self.world.kube.read(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web").unwrap()
    }

    fn size(&self, shard: &str) -> i32 {
        let name = format!("web--{shard}");
        self.world.kube.read::<NstanceShardGroup>(kinds::NSTANCE_SHARD_GROUP, NAMESPACE, &name).unwrap().spec.size
    }

    fn scale(&self, replicas: i32) {
        self.world
            .kube
            .edit(kinds::MACHINE_POOL, NAMESPACE, "nstance-web", |it| it["spec"]["replicas"] = json!(replicas));
    }

    /// What Cluster API does: a Machine for each NstanceMachine.
    fn make_machines(&self) {
        for member in self.world.kube.all::<NstanceMachine>(kinds::NSTANCE_MACHINE) {
            let name = member.metadata.name.clone().unwrap();
            if self.world.kube.read::<Machine>(kinds::MACHINE, NAMESPACE, &name).is_some() {
                continue;
            }
            let mut machine = Machine::default();
            machine.metadata.name = Some(name.clone());
            machine.metadata.namespace = Some(NAMESPACE.into());
            machine.metadata.labels =
                Some([(label::CLUSTER_NAME.to_owned(), self.world.context.settings.cluster_name())].into());
            machine.spec.infrastructure_ref.kind = "NstanceMachine".into();
            machine.spec.infrastructure_ref.name = name;
            self.world.kube.put(kinds::MACHINE, &machine);
        }
        self.world.feed();
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_becomes_a_pool_whose_sizes_do_not_move() {
    let plane = Plane::new(&["a", "b"]);
    plane.world.shards.put_group("a", group("web", 3));
    plane.world.shards.put_group("b", group("web", 1));
    plane.settle().await;
    let machine_pool: MachinePool = plane.world.kube.read(kinds::MACHINE_POOL, NAMESPACE, "nstance-web").unwrap();
    assert_eq!(machine_pool.spec.replicas, Some(4));
    assert_eq!((plane.size("a"), plane.size("b")), (3, 1), "import moves nothing");
    let groups = plane.world.shards.asked().into_iter().filter(|it| matches!(it.wish, Wish::UpsertGroup(_)));
    for asked in groups {
        let Wish::UpsertGroup(wish) = asked.wish else { unreachable!() };
        assert_eq!(wish.size, if asked.shard == "a" { 3 } else { 1 });
        assert_eq!((wish.instance_type, wish.template), (None, None), "a config's own values are no overrides");
    }
    let cluster: NstanceCluster =
        plane.world.kube.read(kinds::NSTANCE_CLUSTER, NAMESPACE, &plane.world.context.settings.cluster_name()).unwrap();
    let status = cluster.status.unwrap();
    assert!(is_true(&status.conditions, kind::IMPORT_COMPLETE) && is_true(&status.conditions, kind::READY));
    assert_eq!(status.reachable_shards.as_deref(), Some("2/2"));
}

#[tokio::test(start_paused = true)]
async fn import_waits_for_a_shard_that_has_not_told_and_says_so() {
    let plane = Plane::new(&["a", "b"]);
    plane.world.shards.put_group("a", group("web", 3));
    let blind = ShardView { picture: None, ..plane.world.context.shards.view("b").unwrap() };
    plane.world.shards.set(blind.clone());
    plane.settle().await;
    assert!(plane.world.kube.all::<NstanceMachinePool>(kinds::NSTANCE_MACHINE_POOL).is_empty());
    assert_eq!(
        plane.world.events.messages("ImportWaiting").first().map(String::as_str),
        Some("import waits for shards b")
    );
    assert!(import::is_waiting(&plane.world.context), "as a metric tells too");
    plane.world.shards.set(ShardView { picture: Some(Arc::new(Picture::default())), ..blind });
    plane.settle().await;
    assert_eq!(plane.pool().spec.shards, ["a"]);
    assert!(!import::is_waiting(&plane.world.context));
}

#[tokio::test(start_paused = true)]
async fn replicas_are_pushed_to_the_shards_and_a_refusal_is_shown() {
    let plane = Plane::new(&["a", "b"]);
    plane.world.shards.put_group("a", group("web", 1));
    plane.world.shards.put_group("b", group("web", 1));
    plane.obey();
    plane.settle().await;
    assert_eq!(plane.pool().status.unwrap().ready, Some(true));
    plane.scale(5);
    plane.settle().await;
    assert_eq!((plane.size("a"), plane.size("b")), (3, 2));
    let pushed = plane.world.shards.wishes().into_iter().filter_map(|it| match it.wish {
        Wish::UpsertGroup(wish) => Some(wish.size),
        _ => None,
    });
    assert_eq!(pushed.sum::<i32>(), 5);
    plane.world.shards.script(|_, _, _| {
        Progress::Refused(nstance_client::ShardError::new(
            "a",
            tonic::Code::InvalidArgument,
            "size 9 is above the maximum",
        ))
    });
    plane.scale(18);
    plane.settle().await;
    let status = plane.pool().status.unwrap();
    let valid = find(&status.conditions, kind::CONFIG_VALID).unwrap();
    assert_eq!(valid.status, "False");
    assert!(valid.message.contains("size 9 is above the maximum"), "{}", valid.message);
    assert_eq!(status.ready, Some(true), "once ready, always ready");
    assert!(is_true(&status.conditions, kind::STALLED));
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_was_chosen_goes_and_its_hint_does_not_count_twice() {
    let plane = Plane::new(&["a", "b"]);
    for (shard, ids) in [("a", ["i1", "i2"]), ("b", ["i3", "i4"])] {
        plane.world.shards.put_group(shard, group("web", 2));
        for id in ids {
            plane.world.shards.put_instance(shard, instance(id, shard));
        }
    }
    plane.obey();
    plane.settle().await;
    plane.make_machines();
    plane.settle().await;
    assert_eq!(plane.pool().spec.provider_id_list.len(), 4);
    // As cluster-autoscaler does: annotate, then shrink. The watch of Machines has not shown the annotation yet.
    let stale = plane.world.context.stores.machines.named(NAMESPACE, "i2").unwrap();
    plane.world.kube.edit(kinds::MACHINE, NAMESPACE, "i2", |it| {
        it["metadata"]["annotations"] = json!({annotation::DELETE_MACHINE: "yes"});
    });
    plane.scale(3);
    plane.settle().await;
    drop(stale);
    assert_eq!((plane.size("a"), plane.size("b")), (1, 2), "the shard of the chosen machine shrinks");
    let group: NstanceShardGroup = plane.world.kube.read(kinds::NSTANCE_SHARD_GROUP, NAMESPACE, "web--a").unwrap();
    assert_eq!(group.spec.remove_first, ["i2"]);
    plane.world.shards.edit_instance("a", "i2", |it| it.status = InstanceStatus::Draining);
    plane.settle().await;
    let machine = plane.world.kube.value(kinds::MACHINE, NAMESPACE, "i2");
    assert!(machine.is_none_or(|it| !it["metadata"]["deletionTimestamp"].is_null()), "its Machine is deleted at once");
    plane.scale(2);
    plane.settle().await;
    assert_eq!((plane.size("a"), plane.size("b")), (1, 1), "a used hint does not decide the next decrease");
}

#[tokio::test(start_paused = true)]
async fn an_id_leaves_the_list_only_with_proof() {
    let plane = Plane::new(&["a", "b"]);
    for shard in ["a", "b"] {
        plane.world.shards.put_group(shard, group("web", 1));
        plane.world.shards.put_instance(shard, instance(&format!("i-{shard}"), shard));
    }
    plane.obey();
    plane.settle().await;
    assert_eq!(plane.pool().spec.provider_id_list.len(), 2);
    // After a restart nothing is known of b: what is listed of it stays.
    let blind = ShardView { picture: None, ..plane.world.context.shards.view("b").unwrap() };
    plane.world.shards.set(blind);
    plane.settle().await;
    assert_eq!(plane.pool().spec.provider_id_list.len(), 2);
    plane.world.shards.remove_instance("a", "i-a");
    plane.settle().await;
    assert_eq!(plane.pool().spec.provider_id_list, ["dev:///nstance-agent-i-b"]);
    assert!(
        plane
            .world
            .kube
            .value(kinds::NSTANCE_MACHINE, NAMESPACE, "i-a")
            .is_none_or(|it| !it["metadata"]["deletionTimestamp"].is_null())
    );
}

#[tokio::test(start_paused = true)]
async fn two_pools_of_one_group_the_younger_has_no_effect() {
    let plane = Plane::new(&["a"]);
    plane.world.shards.put_group("a", group("web", 2));
    plane.obey();
    plane.settle().await;
    let mut second = plane.pool();
    second.metadata = kube::api::ObjectMeta {
        name: Some("zz-second".into()),
        namespace: Some(NAMESPACE.into()),
        creation_timestamp: plane.pool().metadata.creation_timestamp,
        ..Default::default()
    };
    plane.world.kube.put(kinds::NSTANCE_MACHINE_POOL, &second);
    plane.settle().await;
    let second: NstanceMachinePool =
        plane.world.kube.read(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "zz-second").unwrap();
    let ready = find(&second.status.unwrap().conditions, kind::READY).cloned().unwrap();
    assert_eq!(ready.reason, "DuplicateGroup");
    assert_eq!(plane.world.kube.all::<NstanceShardGroup>(kinds::NSTANCE_SHARD_GROUP).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_orphaned_pool_leaves_its_instances_and_a_deleted_one_waits_for_them() {
    for policy in ["Orphan", "Delete"] {
        let plane = Plane::new(&["a"]);
        plane.world.shards.put_group("a", Group { is_static: false, ..group("web", 1) });
        plane.world.shards.put_instance("a", instance("i1", "a"));
        plane.obey();
        plane.settle().await;
        plane.make_machines();
        plane.world.kube.edit(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web", |it| {
            it["spec"]["deletionPolicy"] = json!(policy);
        });
        // As Cluster API does: the MachinePool is going, and takes the pool with it.
        plane.world.kube.edit(kinds::MACHINE_POOL, NAMESPACE, "nstance-web", |it| {
            it["metadata"]["finalizers"] = json!(["machinepool.cluster.x-k8s.io"]);
        });
        plane.world.kube.delete_by_user(kinds::MACHINE_POOL, NAMESPACE, "nstance-web");
        plane.world.kube.delete_by_user(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web");
        plane.settle().await;
        let is_told = plane.world.shards.asked().iter().any(|it| matches!(it.wish, Wish::DeleteGroup { .. }));
        let is_there = plane.world.kube.value(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web").is_some();
        match policy {
            "Orphan" => assert!(!is_told && !is_there, "the instances stay, the pool goes"),
            _ => assert!(is_told && is_there, "the pool waits for its instances"),
        }
        if policy == "Delete" {
            plane.world.shards.remove_instance("a", "i1");
            plane.world.shards.remove_group("a", "web");
            plane.settle().await;
            assert!(plane.world.kube.value(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web").is_none());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_paused_cluster_stops_all_effects() {
    let plane = Plane::new(&["a"]);
    plane.world.shards.put_group("a", group("web", 2));
    plane.obey();
    plane.settle().await;
    let name = plane.world.context.settings.cluster_name();
    plane.world.kube.edit(kinds::CLUSTER, NAMESPACE, &name, |it| it["spec"]["paused"] = json!(true));
    plane.scale(7);
    plane.settle().await;
    assert_eq!(plane.size("a"), 2);
    assert!(is_true(&plane.pool().status.unwrap().conditions, kind::PAUSED));
    plane.world.kube.edit(kinds::CLUSTER, NAMESPACE, &name, |it| it["spec"]["paused"] = json!(false));
    plane.settle().await;
    assert_eq!(plane.size("a"), 7);
    assert!(is_false(&plane.pool().status.unwrap().conditions, kind::PAUSED));
    let _: Cluster = plane.world.kube.read(kinds::CLUSTER, NAMESPACE, &name).unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_user_edit_survives_100_syncs() {
    let plane = Plane::new(&["a"]);
    plane.world.shards.put_group("a", group("web", 2));
    plane.settle().await;
    plane.scale(5);
    plane.world.kube.edit(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "nstance-web", |it| {
        it["metadata"]["labels"]["team"] = json!("blue");
        it["spec"]["vars"] = json!({"color": "blue"});
    });
    plane.world.kube.edit(kinds::MACHINE_POOL, NAMESPACE, "nstance-web", |it| {
        it["metadata"]["annotations"]["note"] = json!("keep");
    });
    for n in 0..100 {
        // The shard goes on with what it had before, and its counts change all the time.
        let had = Group { actual: 2 + n % 3, vars: [("color".to_owned(), "red".to_owned())].into(), ..group("web", 2) };
        plane.world.shards.put_group("a", had);
        plane.round().await;
    }
    let pool = plane.pool();
    assert_eq!(pool.spec.vars.get("color").map(String::as_str), Some("blue"));
    assert_eq!(pool.metadata.labels.unwrap()["team"], "blue");
    let machine_pool: MachinePool = plane.world.kube.read(kinds::MACHINE_POOL, NAMESPACE, "nstance-web").unwrap();
    assert_eq!(machine_pool.spec.replicas, Some(5));
    assert_eq!(machine_pool.metadata.annotations.unwrap()["note"], "keep");
    assert_eq!(plane.size("a"), 5, "the shard is asked for what the user wants");
}
