use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::{
    core::v1::{NodeSpec, Pod, PodSpec},
    storage::v1::{VolumeAttachment, VolumeAttachmentSource, VolumeAttachmentSpec, VolumeAttachmentStatus},
};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::*;
use crate::{
    api::{
        machine::NstanceMachineSpec,
        names::{annotation, label},
        pool::NstanceMachinePoolSpec,
    },
    cluster::workload::Access,
    control::nodes,
    decide::{drain::mark::DrainState, observed::InstanceStatus},
    ports::{Answer, KubeErrorKind, ShardPort as _, Wish},
    testing::{EvictionAnswer, NAMESPACE, START, World},
};

const SHARD: &str = "a";

/// A world with running controllers for drains and Nodes.
struct Lab {
    world: World,
    tasks: Tasks,
    /// What acknowledgements are answered: 0 accepted, 1 stale, 2 cancelled.
    answer: Arc<AtomicUsize>,
}

impl Lab {
    fn new(concurrency: usize) -> Self {
        let mut world = World::new(&[SHARD]);
        if let Some(ctx) = Arc::get_mut(&mut world.context) {
            ctx.settings.drain_concurrency = concurrency;
        }
        let answer = Arc::new(AtomicUsize::new(0));
        let answers = answer.clone();
        world.shards.script(move |shard, _, wish| match (wish, answers.load(Ordering::SeqCst)) {
            (Wish::AcknowledgeDrained { .. }, 0) => crate::ports::Progress::Answered(Answer::Done),
            (_, n) => {
                let reason = if n == 1 { "STALE_DRAIN" } else { "DRAIN_CANCELLED" };
                let error = nstance_client::ShardError::new(shard, tonic::Code::FailedPrecondition, "no");
                crate::ports::Progress::Refused(error.with_reason(reason))
            }
        });
        let mut pool = NstanceMachinePool::new("web", NstanceMachinePoolSpec::default());
        pool.metadata.namespace = Some(NAMESPACE.to_owned());
        (pool.spec.group, pool.spec.shards) = ("web".to_owned(), vec![SHARD.to_owned()]);
        world.kube.put(kinds::NSTANCE_MACHINE_POOL, &pool);
        world.feed();
        connect(&world.context);
        nodes::connect(&world.context);
        let lab = Self { world, tasks: Tasks::new(), answer };
        lab.start();
        lab
    }

    fn start(&self) {
        start(&self.tasks, &self.world.context);
        nodes::start(&self.tasks, &self.world.context, &crate::control::queue::NoMetrics::of_queues());
    }

    /// The operator ends and starts again: only what is stored is left.
    async fn restart(&mut self) {
        self.tasks.end(Duration::from_secs(1)).await;
        self.tasks = Tasks::new();
        self.world.shards.forget_wishes();
        self.start();
        for it in self.world.shards.view(SHARD).unwrap().picture.unwrap().instances.keys() {
            self.world.context.queues.drains.add(it.clone());
        }
    }

    /// An instance with its NstanceMachine, its Node and one pod.
    fn add(&self, id: &str) {
        let mut node = Node { spec: Some(NodeSpec::default()), ..Node::default() };
        node.metadata.name = Some(id.to_owned());
        node.spec.get_or_insert_default().provider_id = Some(format!("dev:///{id}"));
        self.world.kube.put(kinds::NODE, &node);
        let spec = NstanceMachineSpec {
            group: "web".to_owned(),
            shard: Some(SHARD.to_owned()),
            instance_id: Some(id.to_owned()),
            ..NstanceMachineSpec::default()
        };
        let mut machine = NstanceMachine::new(id, spec);
        machine.metadata.namespace = Some(NAMESPACE.to_owned());
        self.world.kube.put(kinds::NSTANCE_MACHINE, &machine);
        self.add_pod(id, &format!("pod-{id}"));
        let instance = Instance {
            id: id.to_owned(),
            group: "web".to_owned(),
            status: InstanceStatus::Running,
            provider_state: "running".to_owned(),
            ..Instance::default()
        };
        self.world.shards.put_instance(SHARD, instance);
        self.world.feed();
    }

    fn add_pod(&self, node: &str, name: &str) {
        let mut pod = Pod::default();
        pod.metadata.namespace = Some(NAMESPACE.to_owned());
        pod.metadata.name = Some(name.to_owned());
        pod.spec = Some(PodSpec { node_name: Some(node.to_owned()), ..PodSpec::default() });
        self.world.kube.put(kinds::POD, &pod);
    }

    /// The shard begins to drain an instance, for so many seconds.
    fn drain(&self, id: &str, drain_id: &str, seconds: i64) {
        let now = self.world.context.now();
        let delete_at = Some(drain::after(now, Duration::from_secs(u64::try_from(seconds).unwrap())));
        let reason = "scale-down".to_owned();
        let drain = Drain { id: drain_id.to_owned(), reason, started_at: Some(now), delete_at, acked_at: None };
        self.world.shards.edit_instance(SHARD, id, |it| {
            (it.status, it.drain) = (InstanceStatus::Draining, Some(drain));
        });
    }

    fn cancel(&self, id: &str) {
        self.world.shards.edit_instance(SHARD, id, |it| {
            (it.status, it.drain) = (InstanceStatus::Running, None);
        });
    }

    fn block(&self, pod: &str) {
        let answer = EvictionAnswer::BlockedBy { budget: "web".to_owned(), retry_after: None };
        self.world.kube.script_evictions(NAMESPACE, pod, vec![answer]);
    }

    fn unblock(&self, pod: &str) {
        self.world.kube.script_evictions(NAMESPACE, pod, vec![EvictionAnswer::Accept]);
    }

    fn node(&self, id: &str) -> Option<Node> {
        self.world.kube.read(kinds::NODE, "", id)
    }

    fn state(&self, id: &str) -> Option<DrainState> {
        mark::mark_of(&self.node(id)?).map(|it| it.state)
    }

    fn is_cordoned(&self, id: &str) -> bool {
        self.node(id).unwrap().spec.unwrap_or_default().unschedulable == Some(true)
    }

    /// Acknowledged drains: instance and drain id, in order.
    fn acks(&self) -> Vec<(String, String)> {
        let acks = self.world.shards.asked().into_iter().filter_map(|it| match it.wish {
            Wish::AcknowledgeDrained { id, drain_id } => Some((id, drain_id)),
            _ => None,
        });
        acks.collect()
    }

    fn has_ack(&self, id: &str) -> bool {
        self.acks().iter().any(|it| it.0 == id)
    }

    fn machine(&self, id: &str) -> NstanceMachine {
        self.world.kube.read(kinds::NSTANCE_MACHINE, NAMESPACE, id).unwrap()
    }

    fn blocked(&self, id: &str) -> Vec<String> {
        self.machine(id).status.and_then(|it| it.drain).map(|it| it.blocked_by).unwrap_or_default()
    }

    /// Lets time pass, with watches working, until something is so.
    async fn until(&self, what: &str, seconds: u64, condition: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        while !condition(self) {
            assert!(Instant::now() < deadline, "not within {seconds} s: {what}");
            sleep(Duration::from_millis(50)).await;
            self.world.feed();
        }
    }

    async fn pass(&self, seconds: u64) {
        let end = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < end {
            sleep(Duration::from_millis(50)).await;
            self.world.feed();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_is_cordoned_emptied_and_acknowledged() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.until("labelled", 5, |it| node_match::instance_label(&it.node("i1").unwrap()) == Some("i1")).await;
    lab.until("adopted", 5, |it| it.machine("i1").spec.provider_id.as_deref() == Some("dev:///i1")).await;
    lab.drain("i1", "100", 60);
    lab.until("acknowledged", 10, |it| it.has_ack("i1")).await;
    assert_eq!(lab.acks(), [("i1".to_owned(), "100".to_owned())]);
    assert_eq!(lab.state("i1"), Some(DrainState::Drained));
    assert!(lab.is_cordoned("i1"));
    assert_eq!(lab.node("i1").unwrap().label(label::EXCLUDE_FROM_LOAD_BALANCERS), Some("nstance"));
    assert!(lab.world.kube.value(kinds::POD, NAMESPACE, "pod-i1").is_none());
    lab.until("reported", 15, |it| {
        let conditions = it.machine("i1").status.map(|it| it.conditions).unwrap_or_default();
        crate::api::conditions::is_true(&conditions, "DrainingSucceeded")
    })
    .await;
    assert_eq!(lab.world.events.messages("DrainStarted").len(), 1);
    assert_eq!(lab.world.events.messages("DrainCompleted").len(), 1);
    lab.pass(60).await;
    assert_eq!(lab.world.kube.calls_of("evict").len(), 1);
    assert_eq!(lab.acks().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn one_blocked_drain_delays_no_other() {
    let lab = Lab::new(1);
    for n in 0..20 {
        lab.add(&format!("i{n}"));
    }
    lab.world.kube.let_pods_linger();
    lab.block("pod-i0");
    // The blocked one has the earliest deadline, so it comes first.
    lab.drain("i0", "100", 300);
    (1..20).for_each(|n| lab.drain(&format!("i{n}"), "100", 400));
    let world = &lab.world;
    let begun = Instant::now();
    while (1..20).any(|n| !lab.has_ack(&format!("i{n}"))) {
        assert!(begun.elapsed() < Duration::from_secs(120), "acknowledged: {:?}", lab.acks());
        sleep(Duration::from_millis(500)).await;
        let pods: Vec<Pod> = world.kube.all(kinds::POD);
        let going = pods.iter().filter(|it| it.metadata.deletion_timestamp.is_some());
        going.for_each(|it| world.kube.remove(kinds::POD, NAMESPACE, it.metadata.name.as_deref().unwrap()));
        world.feed();
    }
    assert!(!lab.has_ack("i0"));
    assert!(lab.is_cordoned("i0"));
    let line = lab.blocked("i0").join(" ");
    assert!(line.starts_with("default/pod-i0: PDB default/web: The disruption budget web"), "{line}");
    lab.unblock("pod-i0");
    lab.until("the last one goes too", 30, |it| {
        it.world.kube.remove(kinds::POD, NAMESPACE, "pod-i0");
        it.has_ack("i0")
    })
    .await;
    lab.until("nothing is blocked any more", 30, |it| it.blocked("i0").is_empty()).await;
}

#[tokio::test(start_paused = true)]
async fn evictions_of_a_node_come_in_turn_and_earliest_deadline_first() {
    let lab = Lab::new(1);
    ["late", "soon"].iter().for_each(|id| lab.add(id));
    lab.world.kube.let_pods_linger();
    lab.drain("late", "100", 500);
    lab.until("the first one is evicted", 5, |it| !it.world.kube.calls_of("evict").is_empty()).await;
    lab.add("sooner");
    lab.drain("soon", "100", 300);
    lab.drain("sooner", "100", 200);
    lab.until("all are cordoned", 5, |it| ["late", "soon", "sooner"].iter().all(|id| it.is_cordoned(id))).await;
    lab.pass(2).await;
    assert_eq!(lab.world.kube.calls_of("evict").len(), 1, "one Node at a time");
    let next = |pod: &str| {
        lab.world.kube.remove(kinds::POD, NAMESPACE, pod);
    };
    next("pod-late");
    lab.until("the next one", 10, |it| it.world.kube.calls_of("evict").len() == 2).await;
    assert_eq!(lab.world.kube.calls_of("evict")[1].object.name, "pod-sooner");
    next("pod-sooner");
    lab.until("the last one", 10, |it| it.world.kube.calls_of("evict").len() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_is_waited_for_until_it_is_detached() {
    let lab = Lab::new(32);
    lab.add("i1");
    let source = VolumeAttachmentSource { persistent_volume_name: Some("pv-1".into()), ..Default::default() };
    let spec = VolumeAttachmentSpec { attacher: "csi".into(), node_name: "i1".into(), source };
    let status = Some(VolumeAttachmentStatus { attached: true, ..VolumeAttachmentStatus::default() });
    let mut attachment = VolumeAttachment { spec, status, ..VolumeAttachment::default() };
    attachment.metadata.name = Some("csi-1".to_owned());
    lab.world.kube.put(kinds::VOLUME_ATTACHMENT, &attachment);
    lab.drain("i1", "100", 120);
    lab.until("evicted", 10, |it| it.world.kube.value(kinds::POD, NAMESPACE, "pod-i1").is_none()).await;
    lab.pass(3).await;
    assert!(!lab.has_ack("i1"));
    assert_eq!(lab.blocked("i1"), ["volume pv-1 is still attached"]);
    lab.world.kube.remove(kinds::VOLUME_ATTACHMENT, "", "csi-1");
    lab.until("acknowledged", 3, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_volume_of_a_pod_that_stays_is_not_waited_for() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.add_pod("i1", "stays");
    lab.world.kube.edit(kinds::POD, NAMESPACE, "stays", |it| {
        it["metadata"]["labels"] = json!({label::DRAIN: "skip"});
        it["spec"]["volumes"] = json!([{"name": "a", "persistentVolumeClaim": {"claimName": "data"}}]);
    });
    let volume: k8s_openapi::api::core::v1::PersistentVolume = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"},
        "spec": {"claimRef": {"namespace": NAMESPACE, "name": "data"}},
    }))
    .unwrap();
    lab.world.kube.put(kinds::PERSISTENT_VOLUME, &volume);
    let attachment: VolumeAttachment = serde_json::from_value(json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "VolumeAttachment", "metadata": {"name": "csi-1"},
        "spec": {"attacher": "csi", "nodeName": "i1", "source": {"persistentVolumeName": "pv-1"}},
        "status": {"attached": true},
    }))
    .unwrap();
    lab.world.kube.put(kinds::VOLUME_ATTACHMENT, &attachment);
    lab.drain("i1", "100", 120);
    lab.until("acknowledged", 5, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_proxmox_node_is_drained_before_ack() {
    let lab = Lab::new(32);
    lab.add("node-7");
    lab.world.kube.edit(kinds::NODE, "", "node-7", |it| it["spec"]["providerID"] = json!("proxmox://r1/105"));
    lab.world.shards.edit(SHARD, |it| {
        let mut instance = (*it.instances.remove("node-7").unwrap()).clone();
        (instance.id, instance.provider_instance_id) = ("knc1".to_owned(), Some("105".to_owned()));
        it.instances.insert(instance.id.clone(), Arc::new(instance));
    });
    lab.drain("knc1", "100", 60);
    lab.until("acknowledged", 10, |it| it.has_ack("knc1")).await;
    assert!(lab.world.kube.value(kinds::POD, NAMESPACE, "pod-node-7").is_none());
    assert_eq!(node_match::instance_label(&lab.node("node-7").unwrap()), Some("knc1"));
}

#[tokio::test(start_paused = true)]
async fn an_adopted_provider_id_stays_also_without_the_node() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.world.shards.edit_instance(SHARD, "i1", |it| it.provider_id = Some("other:///i1".to_owned()));
    lab.until("adopted", 5, |it| it.machine("i1").spec.provider_id.as_deref() == Some("dev:///i1")).await;
    lab.world.kube.remove(kinds::NODE, "", "i1");
    lab.world.shards.edit_instance(SHARD, "i1", |it| it.provider_id = Some("third:///i1".to_owned()));
    lab.pass(60).await;
    assert_eq!(lab.machine("i1").spec.provider_id.as_deref(), Some("dev:///i1"));
}

#[tokio::test(start_paused = true)]
async fn nodes_of_others_are_never_touched() {
    let lab = Lab::new(32);
    let node = |name: &str, labels: &[(&str, &str)], owner: Option<&str>| {
        let mut node = Node::default();
        node.metadata.name = Some(name.to_owned());
        let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        node.metadata.labels = Some(labels.iter().map(pair).collect());
        node.metadata.annotations = owner.map(|it| [(annotation::NODE_OWNER.to_owned(), it.to_owned())].into());
        lab.world.kube.put(kinds::NODE, &node);
    };
    node("plain", &[], None);
    node("labelled", &[(label::INSTANCE_ID, "x1")], None);
    node("elsewhere", &[(label::INSTANCE_ID, "x2")], Some("other--default/a"));
    lab.world.feed();
    lab.pass(200).await;
    assert_eq!(lab.world.kube.writes(), []);
    assert!(["plain", "labelled", "elsewhere"].iter().all(|it| lab.node(it).is_some()));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_drain_uncordons_and_a_later_one_drains_again() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.block("pod-i1");
    lab.drain("i1", "100", 120);
    lab.until("blocked", 15, |it| !it.blocked("i1").is_empty()).await;
    lab.cancel("i1");
    lab.until("uncordoned", 10, |it| !it.is_cordoned("i1")).await;
    assert_eq!(lab.state("i1"), None);
    lab.until("nothing is reported", 10, |it| it.machine("i1").status.unwrap_or_default().drain.is_none()).await;
    assert_eq!(lab.world.events.messages("DrainCancelled").len(), 1);
    lab.unblock("pod-i1");
    lab.drain("i1", "200", 120);
    lab.until("acknowledged", 20, |it| it.acks() == [("i1".to_owned(), "200".to_owned())]).await;
}

#[tokio::test(start_paused = true)]
async fn an_acknowledgement_answered_cancelled_gives_the_node_back_and_does_not_begin_again() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.answer.store(2, Ordering::SeqCst);
    lab.drain("i1", "100", 120);
    lab.until("asked", 10, |it| it.has_ack("i1")).await;
    lab.until("uncordoned", 10, |it| !it.is_cordoned("i1")).await;
    lab.pass(30).await;
    assert!(!lab.is_cordoned("i1") && lab.state("i1").is_none());
    assert_eq!(lab.acks().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stale_drain_waits_for_the_newer_event() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.answer.store(1, Ordering::SeqCst);
    lab.drain("i1", "100", 120);
    lab.until("asked", 10, |it| it.has_ack("i1")).await;
    lab.pass(20).await;
    assert_eq!(lab.acks().len(), 1);
    assert!(lab.is_cordoned("i1"));
    lab.answer.store(0, Ordering::SeqCst);
    lab.drain("i1", "200", 120);
    lab.until("acknowledged", 10, |it| it.acks().last() == Some(&("i1".to_owned(), "200".to_owned()))).await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_operator_goes_on_and_does_not_drain_twice() {
    let mut lab = Lab::new(32);
    lab.add("i1");
    lab.block("pod-i1");
    lab.drain("i1", "100", 300);
    lab.until("blocked", 15, |it| !it.blocked("i1").is_empty()).await;
    lab.restart().await;
    lab.unblock("pod-i1");
    lab.until("acknowledged", 20, |it| it.has_ack("i1")).await;
    assert_eq!(lab.world.events.messages("DrainStarted").len(), 1);
    let n_evictions = lab.world.kube.calls_of("evict").len();
    lab.add_pod("i1", "pod-late");
    lab.restart().await;
    lab.until("acknowledged again", 10, |it| it.acks().len() == 2).await;
    lab.pass(10).await;
    assert_eq!(lab.world.kube.calls_of("evict").len(), n_evictions, "Drained means only: acknowledge again");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_passes_is_told_and_not_acknowledged() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.block("pod-i1");
    lab.drain("i1", "100", 20);
    lab.until("timed out", 25, |it| it.state("i1") == Some(DrainState::TimedOut)).await;
    lab.pass(20).await;
    assert_eq!(lab.acks(), []);
    let told = lab.world.events.messages("DrainTimedOut");
    assert_eq!(told.len(), 1);
    assert!(told[0].contains("1 pods were left: default/pod-i1"), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn blocked_pods_are_deleted_before_the_deadline_only_if_the_pool_says_so() {
    let lab = Lab::new(32);
    let say = |how_long: &str| {
        lab.world.kube.edit(kinds::NSTANCE_MACHINE_POOL, NAMESPACE, "web", |it| {
            it["metadata"]["annotations"] = json!({annotation::DRAIN_FORCE_BEFORE: how_long});
        });
    };
    say("soon");
    lab.add("i1");
    lab.block("pod-i1");
    lab.drain("i1", "100", 40);
    lab.until("the mistake is told", 5, |it| !it.world.events.messages("ConfigInvalid").is_empty()).await;
    say("15s");
    lab.pass(23).await;
    assert!(lab.world.kube.calls_of("delete_pod").is_empty());
    lab.until("acknowledged", 5, |it| it.has_ack("i1")).await;
    assert_eq!(lab.world.kube.calls_of("delete_pod").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_instance_without_a_node_is_acknowledged_only_after_two_complete_lists() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.world.kube.remove(kinds::NODE, "", "i1");
    lab.world.feed();
    lab.world.kube.fail_all("list", Some(kinds::NODE), KubeErrorKind::Unavailable);
    lab.drain("i1", "100", 120);
    lab.pass(30).await;
    assert_eq!(lab.acks(), [], "a failed list proves nothing");
    lab.world.kube.heal();
    lab.world.kube.clear_calls();
    lab.until("acknowledged", 12, |it| it.has_ack("i1")).await;
    let lists = lab.world.kube.calls_of("list").into_iter().filter(|it| it.object.kind == kinds::NODE);
    assert_eq!(lists.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn without_the_workload_cluster_nothing_is_acknowledged_and_no_node_deleted() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.add("i2");
    lab.world.kube.remove(kinds::POD, NAMESPACE, "pod-i2");
    lab.pass(2).await;
    let Access::Granted(api) = lab.world.context.workload.access() else { panic!("granted") };
    lab.world.context.workload.set(Access::Missing { reason: "NoSecret", message: String::new() });
    lab.drain("i1", "100", 120);
    lab.world.shards.remove_instance(SHARD, "i2");
    lab.pass(40).await;
    assert_eq!(lab.acks(), []);
    assert!(lab.node("i2").is_some());
    lab.world.context.workload.set(Access::Granted(api));
    lab.until("acknowledged", 20, |it| it.has_ack("i1")).await;
    lab.until("the Node of the other one is deleted", 60, |it| it.node("i2").is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_goes_ten_seconds_after_its_instance_and_pods_are_moved_first() {
    let lab = Lab::new(32);
    ["with", "without"].iter().for_each(|id| lab.add(id));
    lab.world.kube.remove(kinds::POD, NAMESPACE, "pod-without");
    lab.until("labelled", 5, |it| it.node("with").unwrap().annotation(annotation::NODE_OWNER).is_some()).await;
    lab.pass(2).await;
    ["with", "without"].iter().for_each(|id| lab.world.shards.remove_instance(SHARD, id));
    lab.pass(9).await;
    assert!(lab.node("without").is_some());
    lab.until("deleted", 3, |it| it.node("without").is_none()).await;
    let taints = lab.node("with").unwrap().spec.unwrap().taints.unwrap();
    assert_eq!(taints[0].key, "node.kubernetes.io/out-of-service");
    lab.world.kube.remove(kinds::POD, NAMESPACE, "pod-with");
    lab.until("deleted", 5, |it| it.node("with").is_none()).await;
    assert_eq!(lab.world.events.messages("NodeDeleted").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_node_stays_while_its_shard_is_down() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.world.kube.remove(kinds::POD, NAMESPACE, "pod-i1");
    lab.until("labelled", 5, |it| it.node("i1").unwrap().annotation(annotation::NODE_OWNER).is_some()).await;
    lab.world.shards.take_down(SHARD, Timestamp::from_millisecond(START.as_millis()).unwrap());
    lab.world.shards.remove_instance(SHARD, "i1");
    lab.pass(60).await;
    assert!(lab.node("i1").is_some());
    lab.world.shards.bring_back(SHARD);
    lab.until("deleted", 15, |it| it.node("i1").is_none()).await;
}

#[tokio::test(start_paused = true)]
async fn a_paused_cluster_drains_nothing() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.pass(2).await;
    lab.world.kube.edit(kinds::CLUSTER, NAMESPACE, crate::testing::CLUSTER, |it| it["spec"]["paused"] = json!(true));
    lab.world.feed();
    lab.drain("i1", "100", 120);
    lab.pass(30).await;
    assert!(!lab.is_cordoned("i1") && lab.acks().is_empty());
    lab.world.kube.edit(kinds::CLUSTER, NAMESPACE, crate::testing::CLUSTER, |it| it["spec"]["paused"] = json!(false));
    lab.until("drained", 30, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn hooks_of_others_on_the_machine_hold_the_drain_and_ours_does_not() {
    let lab = Lab::new(32);
    lab.add("i1");
    let hook = format!("{}/other", annotation::PRE_DRAIN_HOOK_PREFIX);
    let mut machine = Machine::new("i1", crate::api::capi::MachineSpec::default());
    machine.metadata.namespace = Some(NAMESPACE.to_owned());
    let both = [hook.clone(), annotation::PRE_DRAIN_HOOK.to_owned()];
    machine.metadata.annotations = Some(both.into_iter().map(|it| (it, String::new())).collect());
    lab.world.kube.put(kinds::MACHINE, &machine);
    lab.world.feed();
    lab.drain("i1", "100", 120);
    lab.until("blocked by the hook", 20, |it| it.blocked("i1") == [format!("hook {hook} on the Machine")]).await;
    assert!(lab.is_cordoned("i1") && lab.world.kube.calls_of("evict").is_empty());
    lab.world.kube.edit(kinds::MACHINE, NAMESPACE, "i1", |it| {
        it["metadata"]["annotations"].as_object_mut().unwrap().remove(&hook);
    });
    lab.until("acknowledged", 10, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_eviction_is_tried_again_when_the_api_server_says() {
    let lab = Lab::new(32);
    lab.add("i1");
    let retry_after = Some(Duration::from_secs(25));
    let blocked = EvictionAnswer::BlockedBy { budget: "web".to_owned(), retry_after };
    lab.world.kube.script_evictions(NAMESPACE, "pod-i1", vec![blocked, EvictionAnswer::Accept]);
    lab.drain("i1", "100", 300);
    lab.pass(24).await;
    assert_eq!(lab.world.kube.calls_of("evict").len(), 1);
    lab.until("acknowledged", 8, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_in_a_terminating_namespace_or_with_two_budgets_is_named_and_waited_for() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.add_pod("i1", "two");
    let fail = |kind, code, message: &str, cause: Option<&str>| EvictionAnswer::Fail {
        kind,
        code,
        message: message.to_owned(),
        causes: cause.map(|it| (it.to_owned(), String::new())).into_iter().collect(),
    };
    let terminating = fail(KubeErrorKind::Forbidden, 403, "being terminated", Some("NamespaceTerminating"));
    let two = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
    let two = fail(KubeErrorKind::Unavailable, 500, two, None);
    lab.world.kube.script_evictions(NAMESPACE, "pod-i1", vec![terminating]);
    lab.world.kube.script_evictions(NAMESPACE, "two", vec![two]);
    lab.drain("i1", "100", 120);
    lab.until("both are named", 25, |it| it.blocked("i1").len() == 2).await;
    let lines = lab.blocked("i1");
    assert!(lines[0].starts_with("default/pod-i1: NamespaceTerminating: being terminated (since "), "{lines:?}");
    assert!(lines[1].starts_with("default/two: MultiplePDBs: This pod has more than one"), "{lines:?}");
    ["pod-i1", "two"].iter().for_each(|it| lab.world.kube.remove(kinds::POD, NAMESPACE, it));
    lab.until("acknowledged", 20, |it| it.has_ack("i1")).await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_of_a_daemon_set_that_cannot_be_looked_up_holds_the_drain() {
    let lab = Lab::new(32);
    lab.add("i1");
    lab.world.kube.edit(kinds::POD, NAMESPACE, "pod-i1", |it| {
        let owner = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true});
        it["metadata"]["ownerReferences"] = json!([owner]);
    });
    lab.world.kube.fail_all("get", Some(kinds::DAEMON_SET), KubeErrorKind::Unavailable);
    lab.drain("i1", "100", 120);
    lab.pass(20).await;
    assert!(!lab.has_ack("i1") && lab.world.kube.calls_of("evict").is_empty());
    lab.world.kube.heal();
    lab.until("an orphan is evicted", 5, |it| it.has_ack("i1")).await;
    assert_eq!(lab.world.kube.calls_of("evict").len(), 1);
}

#[tokio::test(start_paused = true)]
async fn drains_and_evictions_are_counted() {
    let lab = Lab::new(32);
    let metrics = crate::metrics::Metrics::new(lab.world.context.clock.clone());
    lab.tasks.end(Duration::from_secs(1)).await;
    let tasks = Tasks::new();
    start_measured(&tasks, &lab.world.context, metrics.clone());
    lab.add("i1");
    lab.block("pod-i1");
    lab.drain("i1", "100", 120);
    let counts = |word: &str| metrics.text().lines().any(|it| it == word);
    lab.until("blocked", 10, |_| counts("nstance_operator_drains{state=\"blocked\"} 1")).await;
    lab.unblock("pod-i1");
    lab.until("acknowledged", 20, |it| it.has_ack("i1")).await;
    lab.until("counted", 5, |_| counts("nstance_operator_evictions_total{result=\"evicted\"} 1")).await;
    assert!(counts("nstance_operator_drain_seconds_count{result=\"drained\"} 1"), "{}", metrics.text());
    let looks = "nstance_operator_reconcile_seconds_count{controller=\"drain\",result=\"ok\"}";
    assert!(metrics.text().contains(looks), "{}", metrics.text());
    lab.world.shards.remove_instance(SHARD, "i1");
    lab.until("no drain is open", 5, |_| counts("nstance_operator_drains{state=\"blocked\"} 0")).await;
}

#[test]
fn durations_are_read_as_go_writes_them() {
    assert_eq!(parse_duration("15s"), Some(Duration::from_secs(15)));
    assert_eq!(parse_duration("1m30s"), Some(Duration::from_secs(90)));
    assert_eq!(parse_duration("2h"), Some(Duration::from_secs(7200)));
    assert_eq!(parse_duration("500ms"), Some(Duration::from_millis(500)));
    for bad in ["", "15", "s", "-1s", "1d", "1.5s"] {
        assert_eq!(parse_duration(bad), None, "{bad}");
    }
}
