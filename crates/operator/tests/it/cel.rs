//! The rules in our CRDs, as an API server evaluates them.

use kube::core::cel::Validator;
use nstance_operator::api::manifests;
use serde_json::{Value, json};

/// Tells what an API server would say of an object, or of its change.
struct Rules {
    schema: Value,
}

impl Rules {
    fn of(kind: &str) -> Self {
        let crds = manifests::crds().unwrap();
        let crd = crds.iter().find(|it| it["spec"]["names"]["kind"] == kind).unwrap();
        Self { schema: crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone() }
    }

    fn messages(&self, object: &Value, old: Option<&Value>) -> Vec<String> {
        match Validator::new().validate(&self.schema, object, old) {
            Ok(()) => Vec::new(),
            Err(errors) => errors.into_vec().into_iter().map(|it| it.message).collect(),
        }
    }

    #[track_caller]
    fn accept(&self, object: &Value) {
        assert_eq!(self.messages(object, None), Vec::<String>::new(), "{object}");
    }

    #[track_caller]
    fn refuse(&self, object: &Value, message: &str) {
        assert_eq!(self.messages(object, None), [message], "{object}");
    }

    #[track_caller]
    fn accept_change(&self, old: &Value, new: &Value) {
        assert_eq!(self.messages(new, Some(old)), Vec::<String>::new(), "from {old} to {new}");
    }

    #[track_caller]
    fn refuse_change(&self, old: &Value, new: &Value, message: &str) {
        assert_eq!(self.messages(new, Some(old)), [message], "from {old} to {new}");
    }
}

fn object(kind: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "infrastructure.cluster.x-k8s.io/v1beta1",
        "kind": kind,
        "metadata": { "name": "x", "namespace": "default" },
        "spec": spec,
    })
}

fn with(base: &Value, pointer: &str, value: Value) -> Value {
    let mut changed = base.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    changed.pointer_mut(parent).unwrap()[key] = value;
    changed
}

fn without(base: &Value, pointer: &str) -> Value {
    let mut changed = base.clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    changed.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(key).unwrap();
    changed
}

fn pool() -> Value {
    object("NstanceMachinePool", json!({ "group": "web", "shards": ["dev-1", "dev-2"] }))
}

fn static_pool() -> Value {
    with(&pool(), "/status", json!({ "isStatic": true }))
}

fn machine() -> Value {
    object("NstanceMachine", json!({ "group": "web" }))
}

#[test]
fn a_name_has_at_most_63_characters() {
    let spec = |kind: &str| match kind {
        "NstanceCluster" => json!({}),
        "NstanceMachinePool" => json!({ "group": "web", "shards": ["dev-1"] }),
        "NstanceShardGroup" => json!({ "group": "web", "shard": "dev-1" }),
        "NstanceMachine" => json!({ "group": "web" }),
        "NstanceMachineTemplate" => json!({ "template": { "spec": { "group": "web" } } }),
        other => panic!("no example of {other}"),
    };
    for crd in manifests::crds().unwrap() {
        let kind = crd["spec"]["names"]["kind"].as_str().unwrap();
        let rules = Rules::of(kind);
        let object = object(kind, spec(kind));
        rules.accept(&with(&object, "/metadata/name", json!("n".repeat(63))));
        rules.refuse(
            &with(&object, "/metadata/name", json!("n".repeat(64))),
            "metadata.name must have at most 63 characters",
        );
    }
}

#[test]
fn the_group_of_an_object_never_changes() {
    for (kind, spec) in [
        ("NstanceMachinePool", json!({ "group": "web", "shards": ["dev-1"] })),
        ("NstanceShardGroup", json!({ "group": "web", "shard": "dev-1" })),
        ("NstanceMachine", json!({ "group": "web" })),
    ] {
        let old = object(kind, spec);
        let rules = Rules::of(kind);
        rules.accept_change(&old, &old);
        rules.refuse_change(&old, &with(&old, "/spec/group", json!("db")), "spec.group is immutable");
    }
}

#[test]
fn the_shard_of_a_shard_group_never_changes() {
    let old = object("NstanceShardGroup", json!({ "group": "web", "shard": "dev-1", "size": 1 }));
    let rules = Rules::of("NstanceShardGroup");
    rules.accept_change(&old, &with(&old, "/spec/size", json!(2)));
    rules.refuse_change(&old, &with(&old, "/spec/shard", json!("dev-2")), "spec.shard is immutable");
}

#[test]
fn a_pool_names_each_shard_once() {
    let rules = Rules::of("NstanceMachinePool");
    let all: Vec<String> = (0..64).map(|it| format!("shard-{it}")).collect();
    rules.accept(&pool());
    rules.accept(&with(&pool(), "/spec/shards", json!(all)));
    rules.refuse(&with(&pool(), "/spec/shards", json!(["a", "b", "a"])), "spec.shards must not name a shard twice");
}

#[test]
fn the_smallest_size_is_not_above_the_largest() {
    let rules = Rules::of("NstanceMachinePool");
    let sized = |autoscaler: Value| with(&pool(), "/spec/autoscaler", autoscaler);
    for good in [json!({}), json!({ "min": 5 }), json!({ "max": 0 }), json!({ "min": 2, "max": 2 })] {
        rules.accept(&sized(good));
    }
    rules.refuse(&sized(json!({ "min": 3, "max": 2 })), "spec.autoscaler.min must not be above spec.autoscaler.max");
}

#[test]
fn what_the_server_config_defines_is_not_changed_in_a_static_pool() {
    let rules = Rules::of("NstanceMachinePool");
    for (field, value, other) in
        [("template", json!("knd"), json!("knc")), ("subnetPool", json!("private"), json!("public"))]
    {
        let path = format!("/spec/{field}");
        let message = format!(
            "spec.{field} cannot change: the group is defined in the server config; edit the server config instead"
        );
        let (unset, set) = (static_pool(), with(&static_pool(), &path, value));
        rules.accept_change(&set, &set);
        rules.refuse_change(&set, &with(&set, &path, other), &message);
        rules.refuse_change(&set, &without(&set, &path), &message);
        rules.refuse_change(&unset, &set, &message);
    }
    let message =
        "spec.shards cannot change: the group is defined in the server config; edit the server config instead";
    for other in [json!(["dev-1"]), json!(["dev-2", "dev-1"]), json!(["dev-1", "dev-2", "dev-3"])] {
        rules.refuse_change(&static_pool(), &with(&static_pool(), "/spec/shards", other), message);
    }
}

#[test]
fn what_a_server_config_does_not_define_may_change() {
    let rules = Rules::of("NstanceMachinePool");
    for old in [pool(), with(&pool(), "/status", json!({})), with(&pool(), "/status", json!({ "isStatic": false }))] {
        rules.accept_change(&old, &with(&old, "/spec/template", json!("knc")));
        rules.accept_change(&old, &with(&old, "/spec/subnetPool", json!("public")));
        rules.accept_change(&old, &with(&old, "/spec/shards", json!(["dev-2"])));
    }
    for (field, value) in [("instanceType", json!("t4g.large")), ("vars", json!({ "A": "1" }))] {
        rules.accept_change(&static_pool(), &with(&static_pool(), &format!("/spec/{field}"), value));
    }
    // What decides is what was known before the change.
    rules.accept_change(&pool(), &with(&static_pool(), "/spec/template", json!("knc")));
    let no_more = with(&with(&pool(), "/status", json!({ "isStatic": false })), "/spec/template", json!("knc"));
    rules.refuse_change(
        &static_pool(),
        &no_more,
        "spec.template cannot change: the group is defined in the server config; edit the server config instead",
    );
}

#[test]
fn what_a_machine_was_made_from_is_neither_changed_nor_added_nor_removed() {
    let rules = Rules::of("NstanceMachine");
    for (field, value, other) in [
        ("instanceType", json!("t4g.large"), json!("t4g.xlarge")),
        ("subnetPool", json!("private"), json!("public")),
        ("vars", json!({ "A": "1" }), json!({ "A": "2" })),
    ] {
        let path = format!("/spec/{field}");
        let message = format!("spec.{field} is immutable");
        let set = with(&machine(), &path, value);
        rules.accept_change(&set, &set);
        rules.refuse_change(&set, &with(&set, &path, other), &message);
        rules.refuse_change(&set, &without(&set, &path), &message);
        rules.refuse_change(&machine(), &set, &message);
    }
}

#[test]
fn shard_and_instance_of_a_machine_are_set_once() {
    let rules = Rules::of("NstanceMachine");
    for (field, value, other) in
        [("shard", "dev-1", "dev-2"), ("instanceID", "knc06bgm7733st2576nx5jht4ecjw", "knc06bgm7733st2576nx5jht4ecjx")]
    {
        let path = format!("/spec/{field}");
        let message = format!("spec.{field} is immutable once set");
        let set = with(&machine(), &path, json!(value));
        rules.accept_change(&machine(), &set);
        rules.accept_change(&set, &set);
        rules.refuse_change(&set, &with(&set, &path, json!(other)), &message);
        rules.refuse_change(&set, &without(&set, &path), &message);
    }
    // A Node's own spelling replaces the first one.
    let old = with(&machine(), "/spec/providerID", json!("aws:///a/i-1"));
    rules.accept_change(&old, &with(&old, "/spec/providerID", json!("aws:///b/i-1")));
}

#[test]
fn what_a_template_makes_never_changes() {
    let rules = Rules::of("NstanceMachineTemplate");
    let old = object("NstanceMachineTemplate", json!({ "template": { "spec": { "group": "web" } } }));
    let message = "spec.template.spec is immutable; make a new template instead";
    rules.accept_change(&old, &with(&old, "/spec/template/metadata", json!({ "labels": { "a": "b" } })));
    rules.refuse_change(&old, &with(&old, "/spec/template/spec/group", json!("db")), message);
    rules.refuse_change(&old, &with(&old, "/spec/template/spec/vars", json!({ "A": "1" })), message);
}
