use serde_json::json;

use super::*;

fn group(capacity: &[(&str, &str)], arch: &str) -> Arc<Group> {
    Arc::new(Group { capacity: map(capacity), arch: arch.to_owned(), ..Group::default() })
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn node(name: &str, ready: bool, cpu: &str, labels: &[(&str, &str)]) -> Arc<Node> {
    let mut labels = map(labels);
    labels.insert("kubernetes.io/hostname".to_owned(), name.to_owned());
    labels.insert("kubernetes.io/arch".to_owned(), "arm64".to_owned());
    let node = json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [
            {"key": "dedicated", "value": "db", "effect": "NoSchedule"},
            {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
            {"key": format!("only-{name}"), "effect": "NoSchedule"},
        ]},
        "status": {
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}],
            "capacity": {"cpu": cpu, "memory": "16Gi", "pods": "110", "hugepages-2Mi": "0"},
        },
    });
    Arc::new(serde_json::from_value(node).unwrap())
}

#[test]
fn the_minimum_over_the_shards_is_published_as_canonical_strings() {
    let groups = [
        group(&[("cpu", "4000m"), ("memory", "16384Mi"), ("nvidia.com/gpu", "1")], "amd64"),
        group(&[("cpu", "8"), ("memory", "8Gi"), ("nvidia.com/gpu", "2")], "amd64"),
        group(&[], ""),
    ];
    let found = capacity(&CapacityInput { groups: &groups, ..CapacityInput::default() });
    assert_eq!(found.capacity, map(&[("cpu", "4"), ("memory", "8Gi"), ("nvidia.com/gpu", "1")]));
    assert_eq!(found.node_info.architecture.as_deref(), Some("amd64"));
    assert_eq!(found.node_info.operating_system.as_deref(), Some("linux"));
}

#[test]
fn a_gpu_that_one_shard_does_not_have_is_not_promised() {
    let groups = [group(&[("cpu", "4"), ("nvidia.com/gpu", "1")], ""), group(&[("cpu", "4")], "")];
    let found = capacity(&CapacityInput { groups: &groups, ..CapacityInput::default() });
    assert_eq!(found.capacity, map(&[("cpu", "4")]));
}

#[test]
fn what_the_user_sets_wins_and_what_cannot_be_read_is_left_out() {
    let groups = [group(&[("cpu", "4"), ("memory", "lots")], "amd64")];
    let spec = map(&[("cpu", "2"), ("example.com/fpga", "1"), ("memory", "a lot")]);
    let info = NodeInfo { architecture: Some("arm64".to_owned()), operating_system: None };
    let input =
        CapacityInput { capacity: Some(&spec), node_info: Some(&info), groups: &groups, ..CapacityInput::default() };
    let found = capacity(&input);
    assert_eq!(found.capacity, map(&[("cpu", "2"), ("example.com/fpga", "1")]));
    let expected = NodeInfo { architecture: Some("arm64".to_owned()), operating_system: Some("linux".to_owned()) };
    assert_eq!(found.node_info, expected);
}

#[test]
fn without_an_answer_the_smallest_ready_node_tells_and_is_remembered() {
    let nodes = [node("a", true, "4", &[]), node("b", true, "2", &[]), node("c", false, "1", &[])];
    let groups = [group(&[], "")];
    let found = capacity(&CapacityInput { groups: &groups, nodes: &nodes, ..CapacityInput::default() });
    assert_eq!(found.capacity, map(&[("cpu", "2"), ("memory", "16Gi")]));
    assert_eq!(found.node_info.architecture.as_deref(), Some("arm64"));
    let input = CapacityInput { groups: &groups, previous: Some(&found.capacity), ..CapacityInput::default() };
    assert_eq!(capacity(&input).capacity, found.capacity);
    let groups = [group(&[("cpu", "8")], "")];
    let input = CapacityInput { groups: &groups, previous: Some(&found.capacity), ..CapacityInput::default() };
    assert_eq!(capacity(&input).capacity, map(&[("cpu", "8"), ("memory", "16Gi")]));
}

#[test]
fn both_parts_of_the_node_info_are_there_even_if_nothing_is_known() {
    let found = capacity(&CapacityInput::default());
    assert!(found.capacity.is_empty());
    assert!(found.node_info.architecture.is_some() && found.node_info.operating_system.is_some());
    let groups = [group(&[], "amd64"), group(&[], "arm64")];
    let found = capacity(&CapacityInput { groups: &groups, ..CapacityInput::default() });
    assert!(found.node_info.architecture.is_some());
}

#[test]
fn labels_and_taints_are_those_common_to_all_ready_nodes() {
    let nodes = [
        node("a", true, "4", &[("job", "demo"), ("zone", "1"), (label::INSTANCE_ID, "i")]),
        node("b", true, "4", &[("job", "demo"), ("zone", "2")]),
        node("c", false, "4", &[]),
    ];
    let autoscaler = Autoscaler { min: Some(0), max: Some(9), max_pods: Some(30), ..Autoscaler::default() };
    let input = CapacityInput { nodes: &nodes, autoscaler: Some(&autoscaler), ..CapacityInput::default() };
    let annotations = autoscaler_annotations(&input);
    let expected = map(&[
        (annotation::AUTOSCALER_MIN_SIZE, "0"),
        (annotation::AUTOSCALER_MAX_SIZE, "9"),
        (annotation::AUTOSCALER_MAX_PODS, "30"),
        (annotation::AUTOSCALER_LABELS, "job=demo,kubernetes.io/arch=arm64"),
        (annotation::AUTOSCALER_TAINTS, "dedicated=db:NoSchedule"),
    ]);
    assert_eq!(annotations, expected);
    // The last Node goes: what it taught stays.
    let input = CapacityInput { nodes: &[], annotations: Some(&expected), ..input };
    let annotations = autoscaler_annotations(&input);
    assert_eq!(annotations[annotation::AUTOSCALER_LABELS], "job=demo,kubernetes.io/arch=arm64,kubernetes.io/os=linux");
    assert_eq!(annotations[annotation::AUTOSCALER_TAINTS], "dedicated=db:NoSchedule");
}

#[test]
fn an_unknown_architecture_is_spelled_out_as_labels() {
    let autoscaler = Autoscaler { max: Some(1), ..Autoscaler::default() };
    let input = CapacityInput { autoscaler: Some(&autoscaler), ..CapacityInput::default() };
    let annotations = autoscaler_annotations(&input);
    assert_eq!(annotations[annotation::AUTOSCALER_LABELS], "kubernetes.io/arch=amd64,kubernetes.io/os=linux");
    let groups = [group(&[], "arm64")];
    assert!(
        !autoscaler_annotations(&CapacityInput { groups: &groups, ..input })
            .contains_key(annotation::AUTOSCALER_LABELS)
    );
}

#[test]
fn a_pool_that_is_not_scaled_gets_no_annotations() {
    let nodes = [node("a", true, "4", &[("job", "demo")])];
    assert!(autoscaler_annotations(&CapacityInput { nodes: &nodes, ..CapacityInput::default() }).is_empty());
    let by_hand = map(&[(annotation::AUTOSCALER_MAX_SIZE, "3")]);
    let input = CapacityInput { nodes: &nodes, annotations: Some(&by_hand), ..CapacityInput::default() };
    assert!(autoscaler_annotations(&input).contains_key(annotation::AUTOSCALER_LABELS));
}

#[test]
fn the_users_labels_and_taints_are_taken_as_they_are() {
    let autoscaler = Autoscaler {
        labels: map(&[("gpu", "a100"), ("empty", "")]),
        taints: vec![Taint { key: "gpu".to_owned(), value: String::new(), effect: "NoSchedule".to_owned() }],
        max_node_provision_time: Some("20m".to_owned()),
        ..Autoscaler::default()
    };
    let nodes = [node("a", true, "4", &[("job", "demo")])];
    let input = CapacityInput { nodes: &nodes, autoscaler: Some(&autoscaler), ..CapacityInput::default() };
    let annotations = autoscaler_annotations(&input);
    assert_eq!(annotations[annotation::AUTOSCALER_LABELS], "empty=,gpu=a100");
    assert_eq!(annotations[annotation::AUTOSCALER_TAINTS], "gpu:NoSchedule");
    assert_eq!(annotations[annotation::AUTOSCALER_MAX_NODE_PROVISION_TIME], "20m");
}
