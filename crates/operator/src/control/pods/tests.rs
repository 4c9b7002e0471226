use serde_json::json;

use super::*;
use crate::{
    api::names::finalizer,
    testing::{CLUSTER, NAMESPACE, World},
};

struct Test {
    world: World,
    memory: PodMemory,
}

impl Test {
    fn new() -> Self {
        Self { world: World::new(&["a"]), memory: PodMemory::default() }
    }

    fn put_pod(&self, uid: &str, annotations: Value) {
        let pod = json!({
            "metadata": {"name": "build", "namespace": "jobs", "uid": uid, "annotations": annotations},
            "spec": {}, "status": {"phase": "Pending"},
        });
        self.world.kube.put(kinds::POD, &pod);
    }

    fn asking(uid: &str) -> Self {
        let test = Self::new();
        test.put_pod(uid, json!({annotation::ON_DEMAND_GROUP: "test", annotation::ON_DEMAND_VARS: r#"{"A": "1"}"#}));
        test
    }

    fn bind(&self, node: &str) {
        self.world.kube.edit(kinds::POD, "jobs", "build", |it| it["spec"]["nodeName"] = json!(node));
    }

    async fn turn(&self) {
        self.world.feed();
        reconcile(&self.world.context, &self.memory, &ObjectKey::new("jobs", "build")).await.unwrap();
        self.world.feed();
    }

    /// The names of the Machines that are not being deleted.
    fn machines(&self) -> Vec<String> {
        let all: Vec<Machine> = self.world.kube.all(kinds::MACHINE);
        all.into_iter().filter(|it| !it.is_terminating()).filter_map(|it| it.metadata.name).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_asks_gets_one_machine_whatever_is_lost() {
    for lands in [false, true] {
        for nth in [1, 2] {
            let test = Test::asking("u1");
            if lands {
                test.world.kube.lose_answer("create", nth);
            } else {
                test.world.kube.fail_nth("create", nth, KubeErrorKind::Unavailable);
            }
            test.world.feed();
            let key = ObjectKey::new("jobs", "build");
            assert!(reconcile(&test.world.context, &test.memory, &key).await.is_err());
            for _ in 0..3 {
                test.turn().await;
            }
            assert_eq!(test.machines().len(), 1);
            let objects: Vec<NstanceMachine> = test.world.kube.all(kinds::NSTANCE_MACHINE);
            assert_eq!(objects.len(), 1);
            assert_eq!(objects[0].spec.vars["OnDemandPodUID"], "u1");
            assert!(objects[0].has_finalizer(finalizer::MACHINE));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_bad_annotation_is_told_on_the_pod_and_nothing_is_made() {
    let test = Test::new();
    test.put_pod("u1", json!({annotation::ON_DEMAND_GROUP: "test", annotation::ON_DEMAND_SHARD: "nowhere"}));
    test.turn().await;
    assert!(test.world.kube.writes().is_empty());
    let events = test.world.events.all();
    assert_eq!((events[0].about.object.name.as_str(), events[0].about.uid.as_str()), ("build", "u1"));
    assert!(events[0].message.contains("there is no shard \"nowhere\""), "{}", events[0].message);
}

#[tokio::test(start_paused = true)]
async fn pods_that_ask_for_nothing_cost_nothing() {
    let test = Test::new();
    test.put_pod("u1", json!({}));
    test.turn().await;
    assert!(test.world.kube.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_machine_goes_with_its_pod_and_a_namesake_gets_its_own() {
    let test = Test::asking("u1");
    test.turn().await;
    let first = test.machines();
    test.world.kube.remove(kinds::POD, "jobs", "build");
    test.put_pod("u2", json!({annotation::ON_DEMAND_GROUP: "test"}));
    test.turn().await;
    test.turn().await;
    let second = test.machines();
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_ne!(first, second);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_ended_keeps_its_machine_for_a_minute() {
    let test = Test::asking("u1");
    test.turn().await;
    test.bind("n1");
    test.world.kube.edit(kinds::POD, "jobs", "build", |it| it["status"]["phase"] = json!("Succeeded"));
    test.turn().await;
    tokio::time::advance(Duration::from_secs(59)).await;
    test.turn().await;
    assert_eq!(test.machines().len(), 1);
    tokio::time::advance(Duration::from_secs(1)).await;
    test.turn().await;
    assert!(test.machines().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_pod_on_another_node_for_a_minute_gives_its_machine_up_and_one_on_its_own_does_not() {
    let test = Test::asking("u1");
    test.turn().await;
    let name = test.machines().remove(0);
    test.world.kube.edit(kinds::NSTANCE_MACHINE, NAMESPACE, &name, |it| it["spec"]["instanceID"] = json!("i1"));
    for (node, id) in [("own", "i1"), ("other", "i2")] {
        let node = json!({"metadata": {"name": node, "labels": {crate::api::names::label::INSTANCE_ID: id}}});
        test.world.kube.put(kinds::NODE, &node);
    }
    test.bind("own");
    for _ in 0..3 {
        test.turn().await;
        tokio::time::advance(Duration::from_secs(61)).await;
    }
    assert_eq!(test.machines().len(), 1);
    test.bind("other");
    test.turn().await;
    assert_eq!(test.machines().len(), 1);
    tokio::time::advance(Duration::from_secs(60)).await;
    test.turn().await;
    assert!(test.machines().is_empty());
    assert!(test.world.events.messages("InstanceDeleted")[0].contains("runs on Node other"));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_deleted_while_pods_cannot_be_read() {
    let test = Test::asking("u1");
    test.turn().await;
    test.world.kube.remove(kinds::POD, "jobs", "build");
    test.world.kube.fail_all("get", Some(kinds::POD), KubeErrorKind::Unavailable);
    test.world.feed();
    let key = ObjectKey::new("jobs", "build");
    assert!(reconcile(&test.world.context, &test.memory, &key).await.is_err());
    assert_eq!(test.machines().len(), 1);
    test.world.kube.heal();
    let missing = crate::cluster::workload::Access::Missing { reason: "Refused", message: String::new() };
    test.world.context.workload.set(missing);
    test.turn().await;
    assert_eq!(test.machines().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_made_for_a_cluster_that_is_paused_or_being_deleted() {
    let test = Test::asking("u1");
    test.world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| {
        it["spec"]["paused"] = json!(true);
        it["metadata"]["finalizers"] = json!(["cluster.cluster.x-k8s.io"]);
    });
    test.turn().await;
    assert!(test.machines().is_empty());
    test.world.kube.edit(kinds::CLUSTER, NAMESPACE, CLUSTER, |it| it["spec"]["paused"] = json!(false));
    test.world.kube.delete_by_user(kinds::CLUSTER, NAMESPACE, CLUSTER);
    test.turn().await;
    assert!(test.machines().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_loop_makes_and_cleans_up_by_itself() {
    let test = Test::asking("u1");
    let tasks = Tasks::new();
    connect(&test.world.context);
    start(&tasks, &test.world.context, &crate::control::queue::NoMetrics::of_queues());
    test.world.feed();
    let wait = |n: usize| {
        let test = &test;
        async move {
            let deadline = Instant::now() + Duration::from_secs(300);
            while test.machines().len() != n {
                assert!(Instant::now() < deadline, "{n} machines");
                tokio::time::sleep(Duration::from_secs(1)).await;
                test.world.feed();
            }
        }
    };
    wait(1).await;
    test.world.kube.remove(kinds::POD, "jobs", "build");
    wait(0).await;
    tasks.end(Duration::from_secs(1)).await;
}
