use proptest::prelude::*;

use super::*;
use crate::{Checks, load};

const LAYERS: &str = r#"{
  "server": { "cluster_id": "c", "shard": "s", "provider": { "kind": "fake", "region": "r", "zone": "z" },
    "subnet_pools": { "one": ["a", "b"], "two": ["c"] }, "dynamic_subnet_pools": ["two"],
    "secrets": { "provider": "memory" } },
  "tenants": { "other": {} },
  "load_balancers": { "www": {}, "api": {} },
  "defaults": { "vars": { "A": "1", "B": "1" },
    "args": {"Monitoring":{"Enabled":false},"MetadataOptions":{"HttpTokens":"required","HttpPutResponseHopLimit":1},"SecurityGroupIds":["sg-base"]} },
  "templates": {
    "tst": { "kind": "tst", "arch": "amd64", "subnet_pool": "one", "size": 7, "instance_type": "small", "vars": { "B": "2" },
      "args": {"MetadataOptions":{"HttpPutResponseHopLimit":2},"SecurityGroupIds":["sg-k8s","sg-ssh"],"EbsOptimized":true} },
    "dyn": { "kind": "dyn", "arch": "arm64", "subnet_pool": "two" } },
  "groups": { "web": { "template": "tst", "vars": { "C": "3" }, "load_balancers": ["www"],
      "args": {"Monitoring":null,"EbsOptimized":false} } }
}"#;

pub(crate) fn config() -> Config {
    let loaded = load("layers", LAYERS.as_bytes(), &Checks::offline(nstance_schemas::ANY));
    loaded.config.unwrap_or_else(|| panic!("{}", loaded.report.text()))
}

pub(crate) fn group_ref(tenant: &str, group: &str) -> GroupRef {
    GroupRef::new(tenant.parse().unwrap(), group.parse().unwrap())
}

fn vars(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn the_documented_layers_merge_as_documented() {
    let layer = GroupLayer { vars: Some(vars(&[("B", "4")])), ..GroupLayer::default() };
    let request =
        OnDemandLayer { vars: vars(&[("C", "5")]), subnet_pool: "two".parse().ok(), ..OnDemandLayer::default() };
    let merged = config().on_demand(&group_ref("default", "web"), Some(&layer), &request).unwrap();
    assert_eq!(
        format!("{:?}", merged.args),
        r#"{"MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}, "SecurityGroupIds": ["sg-k8s", "sg-ssh"], "EbsOptimized": false}"#
    );
    assert_eq!(merged.vars, vars(&[("A", "1"), ("B", "4"), ("C", "5")]));
}

#[test]
fn scalars_come_from_the_highest_layer_that_sets_them() {
    let config = config();
    let web = group_ref("default", "web");
    let plain = config.group(&web, None).unwrap();
    assert_eq!((plain.size, plain.instance_type.as_deref(), plain.subnets.len()), (7, Some("small"), 2));
    assert_eq!(plain.drain_timeout, Duration::from_secs(300));
    assert!(plain.is_static && !plain.rollout_paused);
    let layer = GroupLayer {
        size: Some(0),
        instance_type: Some("large".to_owned()),
        drain_timeout: Some(Duration::ZERO),
        rollout_paused: Some(true),
        ..GroupLayer::default()
    };
    let merged = config.group(&web, Some(&layer)).unwrap();
    assert_eq!((merged.size, merged.instance_type.as_deref()), (0, Some("large")));
    assert!(merged.drain_timeout.is_zero() && merged.rollout_paused);
}

#[test]
fn an_override_does_not_change_what_is_restricted() {
    let layer = GroupLayer {
        template: Some("dyn".to_owned()),
        subnet_pool: "two".parse().ok(),
        load_balancers: Some(vec!["api".parse().unwrap()]),
        ..GroupLayer::default()
    };
    let merged = config().group(&group_ref("default", "web"), Some(&layer)).unwrap();
    assert_eq!((merged.template.as_str(), merged.subnet_pool.as_str()), ("tst", "one"));
    assert_eq!(merged.load_balancers[0].as_str(), "www");
}

#[test]
fn a_dynamic_group_stays_in_the_pools_that_are_open_to_it() {
    let config = config();
    let layer = GroupLayer { template: Some("dyn".to_owned()), ..GroupLayer::default() };
    let merged = config.group(&group_ref("other", "web"), Some(&layer)).unwrap();
    assert_eq!((merged.subnet_pool.as_str(), merged.size, merged.is_static), ("two", 1, false));
    let layer = GroupLayer { template: Some("tst".to_owned()), size: Some(10_001), ..GroupLayer::default() };
    let problems = config.group(&group_ref("nobody", "web"), Some(&layer)).unwrap_err();
    let paths: Vec<&str> = problems.iter().map(|it| it.path.as_str()).collect();
    assert_eq!(paths, ["tenant", "subnet_pool", "size"]);
    assert!(config.group(&group_ref("default", "nothing"), None).is_err());
}

#[test]
fn too_many_vars_are_refused() {
    let many = (0..300).map(|i| (format!("V{i}"), String::new())).collect();
    let long = BTreeMap::from([("V".to_owned(), "x".repeat(33_000))]);
    for vars in [many, long, vars(&[("no-name", "")])] {
        let layer = GroupLayer { vars: Some(vars), ..GroupLayer::default() };
        assert_eq!(config().group(&group_ref("default", "web"), Some(&layer)).unwrap_err()[0].path, "vars");
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        "[a-c]{0,2}".prop_map(Value::String),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
            proptest::collection::vec(("[a-c]", inner), 0..3).prop_map(|it| Value::Object(it.into_iter().collect())),
        ]
    })
}

fn any_object() -> impl Strategy<Value = Object> {
    proptest::collection::vec(("[a-c]", any_value()), 0..4).prop_map(|it| it.into_iter().collect())
}

fn has_null_key(object: &Object) -> bool {
    object.iter().any(|(_, value)| match value {
        Value::Null => true,
        Value::Object(inner) => has_null_key(inner),
        _ => false,
    })
}

proptest! {
    #[test]
    fn merge_changes_no_input(below in any_object(), above in any_object()) {
        let (below_before, above_before) = (below.clone(), above.clone());
        let merged = merge_args(&below, &above);
        prop_assert_eq!(&below, &below_before);
        prop_assert_eq!(&above, &above_before);
        // What is said twice is said once, and nothing changes by an empty layer.
        prop_assert_eq!(merge_args(&merged, &above), merged.clone());
        prop_assert_eq!(merge_args(&merged, &Object::new()), merged);
    }

    #[test]
    fn nulls_remove_and_never_remain(layers in proptest::collection::vec(any_object(), 0..4)) {
        let merged = layers.iter().fold(Object::new(), |below, above| merge_args(&below, above));
        prop_assert!(!has_null_key(&merged), "{merged:?}");
    }
}

#[test]
fn merging_a_group_leaves_the_config_alone() {
    let config = config();
    let before = format!("{:?}{:?}{:?}", config.defaults, config.templates, config.groups);
    let layer = GroupLayer { vars: Some(vars(&[("B", "4")])), ..GroupLayer::default() };
    config.group(&group_ref("default", "web"), Some(&layer)).unwrap();
    assert_eq!(format!("{:?}{:?}{:?}", config.defaults, config.templates, config.groups), before);
}
