use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaimVolumeSource, PodSpec, PodStatus},
    apimachinery::pkg::apis::meta::v1::{LabelSelectorRequirement, OwnerReference, Time},
};
use proptest::prelude::*;

use super::*;
use crate::api::capi::{DrainRule, MachineDrainRuleMachineSelector, MachineDrainRulePodSelector, MachineDrainRuleSpec};

const NOW: i64 = 1000;

fn pod(name: &str) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.namespace = Some("default".to_owned());
    pod.metadata.name = Some(name.to_owned());
    pod.metadata.uid = Some(format!("uid-{name}"));
    pod.metadata.labels = Some(labels(&[("app", name)]));
    pod
}

fn with(mut pod: Pod, change: impl FnOnce(&mut Pod)) -> Pod {
    change(&mut pod);
    pod
}

fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn drain_label(pod: Pod, value: &str) -> Pod {
    with(pod, |it| {
        it.metadata.labels.get_or_insert_default().insert(label::DRAIN.to_owned(), value.to_owned());
    })
}

fn phase(pod: Pod, phase: &str) -> Pod {
    with(pod, |it| it.status = Some(PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() }))
}

fn deleted(pod: Pod, at: i64) -> Pod {
    with(pod, |it| it.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(at).unwrap())))
}

fn of_daemon_set(pod: Pod) -> Pod {
    let owner = OwnerReference {
        kind: "DaemonSet".to_owned(),
        name: "agent".to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    };
    with(pod, |it| it.metadata.owner_references = Some(vec![owner]))
}

fn selector(pairs: &[(&str, &str)]) -> LabelSelector {
    LabelSelector { match_labels: Some(labels(pairs)), match_expressions: None }
}

fn rule(name: &str, behavior: DrainBehavior, order: Option<i32>, app: &str) -> MachineDrainRule {
    let mut rule = MachineDrainRule::new(name, MachineDrainRuleSpec::default());
    rule.spec.drain = DrainRule { behavior, order };
    if !app.is_empty() {
        let selector = Some(selector(&[("app", app)]));
        rule.spec.pods = vec![MachineDrainRulePodSelector { selector, namespace_selector: None }];
    }
    rule
}

struct World {
    rules: Vec<MachineDrainRule>,
    daemon_set: Existence,
    namespaces: BTreeMap<String, Labels>,
    unreachable: bool,
}

impl World {
    fn new(rules: Vec<MachineDrainRule>) -> Self {
        Self { rules, daemon_set: Existence::Exists, namespaces: BTreeMap::new(), unreachable: false }
    }

    fn plan(&self, pods: &[Pod]) -> PodPlan {
        let rules: Vec<Arc<MachineDrainRule>> = self.rules.iter().cloned().map(Arc::new).collect();
        let daemon_sets = daemon_sets_of(pods).into_iter().map(|key| (key, self.daemon_set.clone())).collect();
        plan_pods(
            pods,
            &PodContext {
                rules: &rules,
                machine_labels: &labels(&[("os", "linux")]),
                cluster_labels: &labels(&[("stage", "test")]),
                namespaces: &self.namespaces,
                daemon_sets: &daemon_sets,
                is_node_unreachable: self.unreachable,
                now: Timestamp::from_second(NOW).unwrap(),
            },
        )
    }

    /// One word per pod.
    fn verdict(&self, pod: Pod) -> &'static str {
        let plan = self.plan(&[pod]);
        let counts = [
            ("evict", plan.evict.len()),
            ("terminating", plan.terminating.len()),
            ("wait", plan.wait.len()),
            ("later", plan.later.len()),
            ("unknown", plan.unknown.len()),
            ("skip", plan.skipped.len()),
        ];
        let found: Vec<&str> = counts.into_iter().filter(|(_, n)| *n == 1).map(|(word, _)| word).collect();
        assert_eq!(found.len(), 1, "{plan:?}");
        found[0]
    }
}

#[test]
fn pods_of_an_existing_daemon_set_are_skipped_until_they_have_finished() {
    let mut world = World::new(vec![]);
    assert_eq!(world.verdict(of_daemon_set(pod("a"))), "skip");
    assert_eq!(world.verdict(phase(of_daemon_set(pod("a")), "Succeeded")), "evict");
    assert_eq!(world.verdict(phase(of_daemon_set(pod("a")), "Failed")), "evict");
    world.daemon_set = Existence::Absent;
    assert_eq!(world.verdict(of_daemon_set(pod("a"))), "evict");
    world.daemon_set = Existence::Unknown("timeout".to_owned());
    assert_eq!(world.verdict(of_daemon_set(pod("a"))), "unknown");
    assert_eq!(world.verdict(drain_label(of_daemon_set(pod("a")), "skip")), "skip");
    assert_eq!(world.verdict(drain_label(of_daemon_set(pod("a")), "wait-completed")), "unknown");
}

#[test]
fn labels_come_before_rules_and_in_any_case() {
    let world = World::new(vec![rule("a", DrainBehavior::Drain, Some(3), "")]);
    assert_eq!(world.verdict(pod("a")), "evict");
    assert_eq!(world.verdict(drain_label(pod("a"), "skip")), "skip");
    assert_eq!(world.verdict(drain_label(pod("a"), "Skip")), "skip");
    assert_eq!(world.verdict(drain_label(pod("a"), "wait-completed")), "wait");
    assert_eq!(world.verdict(drain_label(pod("a"), "WaitCompleted")), "wait");
    assert_eq!(world.verdict(drain_label(pod("a"), "else")), "evict");
    assert_eq!(world.verdict(phase(drain_label(pod("a"), "wait-completed"), "Succeeded")), "skip");
}

#[test]
fn mirror_pods_are_skipped_and_finished_pods_are_evicted() {
    let world = World::new(vec![]);
    let mirror = with(pod("a"), |it| {
        it.metadata.annotations = Some(labels(&[(MIRROR_ANNOTATION, "x")]));
    });
    assert_eq!(world.verdict(mirror), "skip");
    assert_eq!(world.verdict(phase(pod("a"), "Succeeded")), "evict");
}

#[test]
fn pods_in_deletion_are_waited_for_unless_the_node_is_unreachable() {
    let mut world = World::new(vec![]);
    assert_eq!(world.verdict(deleted(pod("a"), NOW - 100)), "terminating");
    let plan = world.plan(&[deleted(pod("long"), NOW - 31), deleted(pod("short"), NOW - 30)]);
    assert_eq!(plan.overdue.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["long"]);
    world.unreachable = true;
    assert_eq!(world.verdict(deleted(pod("a"), NOW - 2)), "skip");
    assert_eq!(world.verdict(deleted(pod("a"), NOW)), "terminating");
    assert_eq!(world.verdict(pod("a")), "evict");
}

#[test]
fn the_first_rule_by_name_that_matches_decides() {
    let world = World::new(vec![
        rule("c", DrainBehavior::Skip, None, ""),
        rule("b", DrainBehavior::WaitCompleted, None, "web"),
        rule("a", DrainBehavior::Drain, Some(1), "db"),
    ]);
    assert_eq!(world.verdict(pod("db")), "evict");
    assert_eq!(world.verdict(pod("web")), "wait");
    assert_eq!(world.verdict(pod("else")), "skip");
}

#[test]
fn rules_select_machines_clusters_and_namespaces() {
    let mut ours = rule("a", DrainBehavior::Skip, None, "");
    let machines = |os: &str, stage: &str| {
        vec![MachineDrainRuleMachineSelector {
            selector: Some(selector(&[("os", os)])),
            cluster_selector: Some(selector(&[("stage", stage)])),
        }]
    };
    for (os, stage, expected) in
        [("linux", "test", "skip"), ("linux", "production", "evict"), ("windows", "test", "evict")]
    {
        ours.spec.machines = machines(os, stage);
        assert_eq!(World::new(vec![ours.clone()]).verdict(pod("a")), expected, "{os} {stage}");
    }
    ours.spec.machines = Vec::new();
    let namespace_selector = Some(selector(&[("tier", "system")]));
    ours.spec.pods = vec![MachineDrainRulePodSelector { selector: None, namespace_selector }];
    let mut world = World::new(vec![ours]);
    assert_eq!(world.verdict(pod("a")), "unknown", "the namespace is not known");
    world.namespaces.insert("default".to_owned(), labels(&[("tier", "user")]));
    assert_eq!(world.verdict(pod("a")), "evict");
    world.namespaces.insert("default".to_owned(), labels(&[("tier", "system")]));
    assert_eq!(world.verdict(pod("a")), "skip");
}

#[test]
fn a_rule_that_cannot_be_read_holds_everything() {
    let mut broken = rule("a", DrainBehavior::Skip, None, "");
    let requirement = LabelSelectorRequirement { key: "os".to_owned(), operator: "Above".to_owned(), values: None };
    let selector = LabelSelector { match_labels: None, match_expressions: Some(vec![requirement]) };
    broken.spec.machines = vec![MachineDrainRuleMachineSelector { selector: Some(selector), cluster_selector: None }];
    let plan = World::new(vec![broken]).plan(&[pod("a")]);
    assert!(plan.unknown[0].1.contains("MachineDrainRule a"), "{plan:?}");
}

#[test]
fn selectors_are_those_of_kubernetes() {
    let it = labels(&[("os", "linux")]);
    let check = |key: &str, operator: &str, values: &[&str]| {
        let values = Some(values.iter().map(|it| (*it).to_owned()).collect());
        let requirement = LabelSelectorRequirement { key: key.to_owned(), operator: operator.to_owned(), values };
        matches(Some(&LabelSelector { match_labels: None, match_expressions: Some(vec![requirement]) }), &it)
    };
    assert_eq!(check("os", "In", &["linux", "bsd"]), Ok(true));
    assert_eq!(check("os", "NotIn", &["linux"]), Ok(false));
    assert_eq!(check("arch", "NotIn", &["arm64"]), Ok(true));
    assert_eq!(check("arch", "In", &["arm64"]), Ok(false));
    assert_eq!(check("os", "Exists", &[]), Ok(true));
    assert_eq!(check("os", "DoesNotExist", &[]), Ok(false));
    assert!(check("os", "Gt", &["1"]).is_err());
    assert_eq!(matches(None, &it), Ok(true));
    assert_eq!(matches(Some(&LabelSelector::default()), &it), Ok(true));
}

#[test]
fn a_higher_order_waits_until_all_lower_ones_are_gone() {
    let world = World::new(vec![
        rule("a", DrainBehavior::Drain, Some(-1), "first"),
        rule("b", DrainBehavior::Drain, Some(5), "last"),
    ]);
    let names = |pods: &[EvictablePod]| pods.iter().map(|it| it.id.name.clone()).collect::<Vec<_>>();
    let all = [pod("last"), pod("web"), pod("first")];
    let plan = world.plan(&all);
    assert_eq!((names(&plan.evict), plan.later.len()), (vec!["first".to_owned()], 2));
    let plan = world.plan(&[pod("last"), pod("web"), deleted(pod("first"), NOW + 30)]);
    assert_eq!((plan.evict.len(), plan.terminating.len(), plan.later.len()), (0, 1, 2));
    let plan = world.plan(&[pod("last"), pod("web")]);
    assert_eq!(names(&plan.evict), ["web"]);
    let plan = world.plan(&[pod("last"), drain_label(pod("job"), "wait-completed")]);
    assert_eq!((plan.evict.len(), plan.wait.len(), plan.later.len()), (0, 1, 1));
    assert_eq!(names(&world.plan(&[pod("last")]).evict), ["last"]);
}

#[test]
fn volumes_of_skipped_pods_are_known() {
    let claim = PersistentVolumeClaimVolumeSource { claim_name: "data".to_owned(), ..Default::default() };
    let volumes = vec![
        Volume { name: "a".to_owned(), persistent_volume_claim: Some(claim), ..Volume::default() },
        Volume { name: "b".to_owned(), ephemeral: Some(Default::default()), ..Volume::default() },
        Volume { name: "c".to_owned(), ..Volume::default() },
    ];
    let pod = with(pod("db"), |it| it.spec = Some(PodSpec { volumes: Some(volumes), ..PodSpec::default() }));
    let world = World::new(vec![]);
    assert!(world.plan(std::slice::from_ref(&pod)).skipped_claims.is_empty());
    let claims = world.plan(&[drain_label(pod, "skip")]).skipped_claims;
    let expected = ["data", "db-b"].map(|it| ("default".to_owned(), it.to_owned()));
    assert_eq!(claims, BTreeSet::from(expected));
}

#[test]
fn pods_to_move_are_those_that_should_run_elsewhere() {
    let mirror = with(pod("m"), |it| it.metadata.annotations = Some(labels(&[(MIRROR_ANNOTATION, "x")])));
    let pods = [pod("a"), mirror, of_daemon_set(pod("d")), phase(pod("s"), "Succeeded"), deleted(pod("t"), NOW)];
    assert_eq!(n_to_move(&pods), 2);
}

fn any_pod() -> impl Strategy<Value = Pod> {
    let label = prop::option::of(prop::sample::select(vec!["skip", "wait-completed", "x"]));
    let name = prop::sample::select(vec!["db", "web", "first"]);
    (name, label, any::<bool>(), any::<bool>(), any::<bool>(), 0..1000u32).prop_map(
        |(app, label, is_daemon, is_finished, is_deleted, n)| {
            let mut pod = pod(app);
            pod.metadata.name = Some(format!("{app}-{n}"));
            pod.metadata.uid = Some(format!("uid-{app}-{n}"));
            pod = label.map_or(pod.clone(), |it| drain_label(pod, it));
            pod = if is_daemon { of_daemon_set(pod) } else { pod };
            pod = if is_finished { phase(pod, "Failed") } else { pod };
            if is_deleted { deleted(pod, NOW - 10) } else { pod }
        },
    )
}

proptest! {
    #[test]
    fn every_pod_is_in_exactly_one_list_and_the_order_of_input_does_not_matter(
        mut pods in prop::collection::vec(any_pod(), 0..20),
        existence in prop::sample::select(vec![Existence::Exists, Existence::Absent, Existence::Unknown("x".into())]),
        unreachable in any::<bool>(),
    ) {
        pods.sort_by_key(|it| it.metadata.uid.clone());
        pods.dedup_by_key(|it| it.metadata.uid.clone());
        let mut world = World::new(vec![rule("a", DrainBehavior::Drain, Some(-1), "first")]);
        (world.daemon_set, world.unreachable) = (existence, unreachable);
        let plan = world.plan(&pods);
        prop_assert_eq!(plan.n_remaining() + plan.skipped.len(), pods.len());
        pods.reverse();
        prop_assert_eq!(&world.plan(&pods), &plan);
        // Something can always go on: with pods left, one is evicted, waited for, or not known.
        prop_assert!(plan.later.is_empty() || !(plan.evict.is_empty() && plan.terminating.is_empty()
            && plan.wait.is_empty() && plan.unknown.is_empty()));
    }
}
