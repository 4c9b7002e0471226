use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeCondition, NodeSpec, NodeStatus};
use proptest::prelude::*;
use serde_json::json;

use super::{
    memory::{RefusalCause, outcome_of},
    *,
};
use crate::{
    api::names::annotation,
    decide::pods::EvictablePod,
    ports::{KubeError, KubeErrorKind},
};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn drain(id: &str, deadline: i64) -> Drain {
    Drain { id: id.to_owned(), reason: "scale-down".to_owned(), delete_at: Some(at(deadline)), ..Drain::default() }
}

fn node() -> Node {
    let mut node = Node { spec: Some(NodeSpec::default()), ..Node::default() };
    node.metadata.name = Some("n".to_owned());
    node
}

fn patched(node: &Node, patch: &Value) -> Node {
    let mut value = serde_json::to_value(node).unwrap();
    json_patch::merge(&mut value, patch);
    serde_json::from_value(value).unwrap()
}

fn pod(name: &str) -> EvictablePod {
    let id = PodId { namespace: "default".into(), name: name.into(), uid: name.into() };
    EvictablePod { id, grace_seconds: 30 }
}

fn evicting(names: &[&str]) -> PodPlan {
    PodPlan { evict: names.iter().map(|it| pod(it)).collect(), ..PodPlan::default() }
}

/// A drain at one moment, in which only what matters for a test is changed.
struct Case {
    now: i64,
    drain: Option<Drain>,
    is_vm_gone: bool,
    is_deleting: bool,
    nodes: Option<NodeView>,
    hooks: Hooks,
    may_evict: bool,
    force_before: Option<Duration>,
    pods: Listing<PodPlan>,
    volumes: Listing<Vec<String>>,
    memory: Memory,
}

impl Case {
    /// A Node that says it is being drained for drain `1`, which ends at second 60.
    fn new() -> Self {
        let mut case = Self {
            now: 10,
            drain: Some(drain("1", 60)),
            is_vm_gone: false,
            is_deleting: false,
            nodes: None,
            hooks: Hooks::default(),
            may_evict: true,
            force_before: None,
            pods: Listing::NotRead,
            volumes: Listing::NotRead,
            memory: Memory::default(),
        };
        case.memory.turn_to("1");
        let patch = mark::mark_patch(&node(), "i", &drain("1", 60), DrainState::Draining, at(10)).unwrap();
        case.set_node(patched(&node(), &patch));
        case
    }

    fn set_node(&mut self, node: Node) {
        let node = Arc::new(node);
        let marked = mark::marked_instance(&node).map(|_| node.clone());
        self.nodes = Some(NodeView { matched: NodeMatch::One(node), marked });
    }

    fn node(&self) -> Node {
        (**self.nodes.as_ref().unwrap().matched.node().unwrap()).clone()
    }

    fn set_state(&mut self, state: DrainState) {
        let patch = mark::mark_patch(&self.node(), "i", &drain("1", 60), state, at(10)).unwrap();
        self.set_node(patched(&self.node(), &patch));
    }

    fn step(&self) -> Step {
        let request = match &self.drain {
            None => DrainRequest::NotDraining,
            Some(drain) => DrainRequest::Draining { drain, is_vm_gone: self.is_vm_gone, is_deleting: self.is_deleting },
        };
        let view = DrainView {
            now: at(self.now),
            instance_id: "i",
            request,
            nodes: self.nodes.clone(),
            hooks: &self.hooks,
            may_evict: self.may_evict,
            force_before: self.force_before,
            pods: self.pods.clone(),
            volumes: self.volumes.clone(),
        };
        next_step(&view, &self.memory)
    }

    fn waits_for(&self) -> Waiting {
        match self.step() {
            Step::Wait { why, .. } => why,
            step => panic!("expected to wait, got {step:?}"),
        }
    }

    fn calls(&self) -> (Vec<PodCall>, Duration) {
        match self.step() {
            Step::Evict { calls, after } => (calls, after),
            step => panic!("expected evictions, got {step:?}"),
        }
    }

    fn marks(&self) -> DrainState {
        match self.step() {
            Step::Mark { state, .. } => state,
            step => panic!("expected a mark, got {step:?}"),
        }
    }
}

#[test]
fn nothing_is_done_before_all_nodes_were_listed() {
    let case = Case { nodes: None, is_vm_gone: true, ..Case::new() };
    assert_eq!(case.waits_for(), Waiting::ForNodes);
}

#[test]
fn a_vm_that_is_gone_is_acknowledged_at_once() {
    let case = Case { is_vm_gone: true, now: 99, ..Case::new() };
    assert_eq!(case.step(), Step::Acknowledge(Completion::VmGone));
}

#[test]
fn an_instance_without_a_node_is_acknowledged_after_two_lists_five_seconds_apart() {
    let mut case = Case::new();
    case.nodes = Some(NodeView { matched: NodeMatch::None, marked: None });
    assert_eq!(case.step(), Step::ListNodes);
    case.memory.nodes_listed(false, at(10));
    case.now = 12;
    let wait = Step::Wait { why: Waiting::ToConfirmNoNode, after: Duration::from_secs(3) };
    assert_eq!(case.step(), wait);
    case.memory.nodes_listed(false, at(12));
    assert_eq!(case.step(), wait, "too soon to prove anything");
    case.now = 15;
    assert_eq!(case.step(), Step::ListNodes);
    case.memory.nodes_listed(false, at(15));
    assert_eq!(case.step(), Step::Acknowledge(Completion::NoNode));
    case.memory.nodes_listed(true, at(16));
    assert_eq!(case.step(), Step::ListNodes);
}

#[test]
fn an_ambiguous_node_is_not_touched_and_not_acknowledged() {
    let mut case = Case::new();
    let matched = NodeMatch::Ambiguous(vec!["a".into(), "b".into()]);
    case.nodes = Some(NodeView { matched, marked: None });
    assert_eq!(case.waits_for(), Waiting::Ambiguous(vec!["a".into(), "b".into()]));
}

#[test]
fn the_node_is_marked_and_cordoned_first_even_before_its_turn() {
    let mut case = Case::new();
    case.may_evict = false;
    case.set_node(node());
    let Step::Mark { patch, state, is_new, .. } = case.step() else { panic!("mark first") };
    assert_eq!((state, is_new, &patch["spec"]["unschedulable"]), (DrainState::Draining, true, &json!(true)));
    case.set_node(patched(&case.node(), &patch));
    assert_eq!(case.waits_for(), Waiting::ForPlace);
}

#[test]
fn hooks_of_others_hold_evictions_and_the_acknowledgement() {
    let mut case = Case::new();
    case.hooks.pre_drain = vec!["x".into()];
    assert_eq!(case.waits_for(), Waiting::PreDrainHooks(vec!["x".into()]));
    case.hooks = Hooks { pre_drain: vec![], pre_terminate: vec!["y".into()] };
    (case.pods, case.volumes) = (Listing::Read(PodPlan::default()), Listing::Read(vec![]));
    assert_eq!(case.waits_for(), Waiting::PreTerminateHooks(vec!["y".into()]));
    case.now = 60;
    assert_eq!(case.marks(), DrainState::TimedOut);
}

#[test]
fn a_list_that_failed_proves_nothing() {
    let mut case = Case::new();
    assert!(matches!(case.step(), Step::ListPods { .. }));
    case.pods = Listing::Failed("timeout".into());
    assert_eq!(case.waits_for(), Waiting::ForList("timeout".into()));
    case.pods = Listing::Read(PodPlan::default());
    assert!(matches!(case.step(), Step::ListVolumes { .. }));
    case.volumes = Listing::Failed("refused".into());
    assert_eq!(case.waits_for(), Waiting::ForList("refused".into()));
}

#[test]
fn a_refused_pod_is_tried_again_after_its_pause() {
    let mut case = Case::new();
    case.pods = Listing::Read(evicting(&["a", "b"]));
    assert_eq!(case.calls().0.len(), 2);
    let budget = RefusalCause::Budget(None);
    case.memory.refused(&pod("a").id, budget, String::new(), at(10), Duration::from_secs(4));
    let (calls, after) = case.calls();
    assert_eq!((calls.len(), after), (1, POLL));
    case.pods = Listing::Read(evicting(&["a"]));
    assert_eq!(case.calls(), (vec![], Duration::from_secs(4)));
    case.now = 14;
    assert_eq!(case.calls().0.len(), 1);
}

#[test]
fn grace_ends_two_seconds_before_the_deadline() {
    let grace = |now, deadline| {
        let mut case = Case { now, drain: Some(drain("1", deadline)), ..Case::new() };
        let Step::Mark { patch, .. } = case.step() else { return case_grace(&mut case) };
        case.set_node(patched(&case.node(), &patch));
        case_grace(&mut case)
    };
    fn case_grace(case: &mut Case) -> Option<i64> {
        case.pods = Listing::Read(evicting(&["a"]));
        match case.calls().0.remove(0) {
            PodCall::Evict { grace_seconds, .. } => grace_seconds,
            PodCall::Delete { .. } => panic!("not forced"),
        }
    }
    assert_eq!(grace(10, 60), None);
    assert_eq!(grace(28, 60), None);
    assert_eq!(grace(40, 60), Some(18));
    assert_eq!(grace(59, 60), Some(1));
}

#[test]
fn pods_of_an_unreachable_node_get_one_second_and_its_volumes_are_not_waited_for() {
    let mut case = Case::new();
    let mut node = case.node();
    let condition = NodeCondition { type_: "Ready".into(), status: "Unknown".into(), ..NodeCondition::default() };
    node.status = Some(NodeStatus { conditions: Some(vec![condition]), ..NodeStatus::default() });
    case.set_node(node);
    case.pods = Listing::Read(evicting(&["a"]));
    let expected = PodCall::Evict { pod: pod("a").id, grace_seconds: Some(1) };
    assert_eq!(case.calls().0, [expected]);
    case.pods = Listing::Read(PodPlan::default());
    assert_eq!(case.marks(), DrainState::Drained);
}

#[test]
fn blocked_pods_are_deleted_shortly_before_the_deadline_if_the_pool_says_so() {
    let mut case = Case { force_before: Some(Duration::from_secs(15)), now: 44, ..Case::new() };
    case.pods = Listing::Read(evicting(&["a", "b"]));
    let budget = RefusalCause::Budget(None);
    case.memory.refused(&pod("a").id, budget, String::new(), at(40), Duration::from_secs(100));
    let (calls, after) = case.calls();
    assert!(matches!(&calls[..], [PodCall::Evict { pod, .. }] if pod.name == "b"), "{calls:?}");
    assert_eq!(after, Duration::from_secs(1));
    case.now = 45;
    let (calls, _) = case.calls();
    assert!(matches!(calls[0], PodCall::Delete { grace_seconds: 13, .. }), "{calls:?}");
    assert!(matches!(calls[1], PodCall::Evict { .. }), "one that was not refused is asked first: {calls:?}");
    case.force_before = None;
    assert_eq!(case.calls().0.len(), 1);
}

#[test]
fn volumes_are_waited_for_up_to_a_minute_and_not_close_to_the_deadline() {
    let mut case = Case { drain: Some(drain("1", 600)), ..Case::new() };
    let Step::Mark { patch, .. } = case.step() else { panic!("the deadline changed") };
    case.set_node(patched(&case.node(), &patch));
    (case.pods, case.volumes) = (Listing::Read(PodPlan::default()), Listing::Read(vec!["pv-1".into()]));
    case.memory.pods_listed(&PodPlan::default(), at(10));
    assert_eq!(case.waits_for(), Waiting::Volumes(vec!["pv-1".into()]));
    case.now = 69;
    assert_eq!(case.waits_for(), Waiting::Volumes(vec!["pv-1".into()]));
    case.now = 70;
    assert_eq!(case.marks(), DrainState::Drained);
    case.memory.pods_listed(&evicting(&["late"]), at(592));
    case.memory.pods_listed(&PodPlan::default(), at(593));
    case.now = 594;
    assert_eq!(case.waits_for(), Waiting::Volumes(vec!["pv-1".into()]));
    case.now = 595;
    assert_eq!(case.marks(), DrainState::Drained);
    case.volumes = Listing::Read(vec![]);
    case.now = 11;
    assert_eq!(case.marks(), DrainState::Drained);
}

#[test]
fn a_drained_node_is_only_acknowledged_also_late_and_by_a_restarted_operator() {
    let mut case = Case::new();
    case.set_state(DrainState::Drained);
    case.pods = Listing::Read(evicting(&["new"]));
    assert_eq!(case.step(), Step::Acknowledge(Completion::Drained));
    case.now = 99;
    assert_eq!(case.step(), Step::Acknowledge(Completion::Drained));
    case.memory.answered(AckAnswer::Accepted);
    assert_eq!(case.waits_for(), Waiting::Acknowledged);
}

#[test]
fn after_the_deadline_nothing_is_evicted_or_acknowledged() {
    let mut case = Case { now: 60, ..Case::new() };
    case.pods = Listing::Read(evicting(&["a"]));
    assert_eq!(case.marks(), DrainState::TimedOut);
    case.set_state(DrainState::TimedOut);
    assert_eq!(case.waits_for(), Waiting::TimedOut);
    let deleting = Case { is_deleting: true, now: 20, ..Case::new() };
    assert_eq!(deleting.marks(), DrainState::TimedOut);
    let mut none = Case { now: 60, ..Case::new() };
    none.nodes = Some(NodeView { matched: NodeMatch::None, marked: None });
    assert_eq!(none.waits_for(), Waiting::TimedOut);
}

#[test]
fn a_cancelled_drain_gives_the_node_back() {
    let mut case = Case { drain: None, ..Case::new() };
    let Step::Unmark { patch, .. } = case.step() else { panic!("unmark") };
    let clean = patched(&case.node(), &patch);
    assert_eq!(clean.spec.as_ref().unwrap().unschedulable, None);
    case.set_node(clean);
    assert_eq!(case.step(), Step::Over);
}

#[test]
fn an_acknowledgement_that_is_refused_cancels_or_waits_for_the_newer_drain() {
    let mut case = Case::new();
    case.set_state(DrainState::Drained);
    case.memory.answered(AckAnswer::Cancelled);
    assert!(matches!(case.step(), Step::Unmark { .. }));
    case.memory.answered(AckAnswer::Stale);
    assert_eq!(case.waits_for(), Waiting::ForNewerDrain);
    case.drain = Some(drain("2", 90));
    case.memory.turn_to("2");
    let Step::Mark { state, is_new, .. } = case.step() else { panic!("a new drain begins") };
    assert_eq!((state, is_new), (DrainState::Draining, true));
}

#[test]
fn a_cordon_that_was_lifted_comes_back() {
    for state in [DrainState::Draining, DrainState::Drained] {
        let mut case = Case::new();
        if state == DrainState::Drained {
            case.set_state(state);
        }
        let mut node = case.node();
        node.spec.get_or_insert_default().unschedulable = None;
        case.set_node(node);
        let Step::Mark { patch, is_new, is_change, .. } = case.step() else { panic!("cordon again") };
        assert_eq!((is_new, is_change, &patch["spec"]["unschedulable"]), (false, false, &json!(true)));
    }
}

/// A small world: one Node with pods, a shard, and an operator that may be restarted at any point.
#[derive(Debug, Clone)]
struct Model {
    now: i64,
    node: Option<Node>,
    /// Name, whether it is in deletion, how many refusals are left.
    pods: BTreeMap<String, (bool, u32)>,
    attached_until: i64,
    memory: Memory,
    n_evictions: BTreeMap<String, u32>,
    acknowledged: Option<Completion>,
    n_marks_as_new: u32,
}

#[derive(Debug, Clone)]
enum Happening {
    Pass(i64),
    Restart,
    PodGoes,
    ListsFail,
    Uncordon,
}

fn any_happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        4 => (0..4i64).prop_map(Happening::Pass),
        1 => Just(Happening::Restart),
        3 => Just(Happening::PodGoes),
        1 => Just(Happening::ListsFail),
        1 => Just(Happening::Uncordon),
    ]
}

impl Model {
    const DEADLINE: i64 = 60;

    fn new(n_pods: usize, n_refusals: u32, attached_until: i64) -> Self {
        let pods = (0..n_pods).map(|n| (format!("p{n}"), (false, n_refusals))).collect();
        let memory = Memory::default();
        let (n_evictions, acknowledged) = (BTreeMap::new(), None);
        Self { now: 0, node: Some(node()), pods, attached_until, memory, n_evictions, acknowledged, n_marks_as_new: 0 }
    }

    fn plan(&self) -> PodPlan {
        let mut plan = PodPlan::default();
        for (name, (is_deleting, _)) in &self.pods {
            if *is_deleting { plan.terminating.push(pod(name).id) } else { plan.evict.push(pod(name)) }
        }
        plan
    }

    /// What the operator does in one look.
    fn look(&mut self, do_lists_fail: bool) {
        let drain = drain("1", Self::DEADLINE);
        self.memory.turn_to("1");
        let (mut pods, mut volumes) = (Listing::NotRead, Listing::NotRead);
        for _ in 0..12 {
            let nodes = self.node.clone().map(Arc::new).map(|node| {
                let marked = mark::marked_instance(&node).map(|_| node.clone());
                NodeView { matched: NodeMatch::One(node), marked }
            });
            let view = DrainView {
                now: at(self.now),
                instance_id: "i",
                request: DrainRequest::Draining { drain: &drain, is_vm_gone: false, is_deleting: false },
                nodes,
                hooks: &Hooks::default(),
                may_evict: true,
                force_before: None,
                pods: std::mem::replace(&mut pods, Listing::NotRead),
                volumes: std::mem::replace(&mut volumes, Listing::NotRead),
            };
            let step = next_step(&view, &self.memory);
            (pods, volumes) = (view.pods, view.volumes);
            match step {
                Step::ListPods { .. } if do_lists_fail => pods = Listing::Failed("x".into()),
                Step::ListPods { .. } => {
                    self.memory.pods_listed(&self.plan(), at(self.now));
                    pods = Listing::Read(self.plan());
                }
                Step::ListVolumes { .. } if do_lists_fail => volumes = Listing::Failed("x".into()),
                Step::ListVolumes { .. } => {
                    let names = if self.now < self.attached_until { vec!["pv".into()] } else { vec![] };
                    volumes = Listing::Read(names);
                }
                Step::Mark { patch, is_new, .. } => {
                    self.n_marks_as_new += u32::from(is_new);
                    self.node = self.node.as_ref().map(|it| patched(it, &patch));
                }
                Step::Evict { calls, .. } => {
                    assert!(self.now < Self::DEADLINE, "no eviction after the deadline");
                    for call in calls {
                        self.evict(call.pod());
                    }
                    return;
                }
                Step::Acknowledge(completion) => {
                    assert!(!do_lists_fail || self.is_marked_drained(), "no ack with failed lists");
                    self.acknowledged = Some(completion);
                    self.memory.answered(AckAnswer::Accepted);
                }
                Step::Wait { .. } => return,
                step => panic!("unexpected {step:?}"),
            }
        }
        panic!("a look does not end");
    }

    fn is_marked_drained(&self) -> bool {
        self.node.as_ref().is_some_and(|it| mark::is_drained(it, "i"))
    }

    fn evict(&mut self, id: &PodId) {
        *self.n_evictions.entry(id.name.clone()).or_default() += 1;
        let (is_deleting, n_refusals) = self.pods.get_mut(&id.name).unwrap();
        if *n_refusals == 0 {
            *is_deleting = true;
            self.memory.accepted(id, at(self.now));
            return;
        }
        *n_refusals -= 1;
        let kind = KubeErrorKind::TooManyRequests { retry_after: None };
        let error =
            KubeError { verb: "evict", object: String::new(), kind, message: String::new(), code: 429, causes: vec![] };
        let memory::EvictionOutcome::Refused { cause, message, .. } = outcome_of(Err(error)) else { panic!("refused") };
        self.memory.refused(id, cause, message, at(self.now), Duration::from_secs(3));
    }
}

proptest! {
    #[test]
    fn a_drain_is_acknowledged_only_when_it_is_over_whatever_happens(
        n_pods in 0..4usize,
        n_refusals in 0..3u32,
        attached_until in 0..40i64,
        happenings in prop::collection::vec(any_happening(), 0..60),
    ) {
        let mut model = Model::new(n_pods, n_refusals, attached_until);
        for happening in happenings {
            let mut do_lists_fail = false;
            match happening {
                Happening::Pass(seconds) => model.now += seconds,
                Happening::Restart => model.memory = Memory::default(),
                Happening::PodGoes => {
                    if let Some(name) = model.pods.iter().find(|(_, it)| it.0).map(|(name, _)| name.clone()) {
                        model.pods.remove(&name);
                    }
                }
                Happening::ListsFail => do_lists_fail = true,
                Happening::Uncordon => {
                    if let Some(spec) = model.node.as_mut().and_then(|it| it.spec.as_mut()) {
                        spec.unschedulable = None;
                    }
                }
            }
            let was_acknowledged = model.acknowledged.is_some();
            model.look(do_lists_fail);
            if model.acknowledged.is_some() && !was_acknowledged {
                prop_assert!(model.pods.is_empty(), "a pod is left: {:?}", model.pods);
                prop_assert!(model.attached_until <= model.now || Model::DEADLINE - 5 <= model.now
                    || 60 <= model.now, "a volume is attached");
                prop_assert!(model.is_marked_drained());
                prop_assert!(model.now < Model::DEADLINE || model.is_marked_drained());
            }
            let node = model.node.as_ref().unwrap();
            prop_assert_eq!(node.spec.as_ref().unwrap().unschedulable, Some(true), "cordoned after each look");
            prop_assert_eq!(model.n_marks_as_new, 1, "one drain id is one drain");
            let timed_out = node.metadata.annotations.as_ref().unwrap()[annotation::DRAIN_STATE] == "TimedOut";
            prop_assert!(!timed_out || model.acknowledged.is_none());
        }
        // Left alone, it ends: acknowledged if pods go in time.
        if model.now < 20 {
            for _ in 0..40 {
                model.now += 1;
                model.look(false);
                model.pods.retain(|_, (is_deleting, _)| !*is_deleting);
            }
            prop_assert!(model.acknowledged.is_some() || Model::DEADLINE <= model.now, "{model:?}");
        }
    }
}
