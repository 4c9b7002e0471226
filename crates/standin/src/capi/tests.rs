//! Whole stories of the stand-in's decisions on a picture that behaves like an API server: effects are applied until
//! nothing is left to do, which also proves that the loop comes to rest.

mod deletion;
mod pools;

use std::{collections::BTreeMap, sync::Arc};

use nstance_core::time::Timestamp;
use serde_json::{Value, json};

use super::{
    Memory,
    machine::DrainOrder,
    view::{Connection, ControlPlane, DrainOutcome, Nodes},
};
use crate::{
    effect::{Effect, Via},
    kinds::{INFRA_GROUP, Kind},
    object::{Key, Object},
    picture::{Objects, Picture},
};

const T0: Timestamp = Timestamp::from_millis(1_700_000_000_000);

/// An API server without conflicts, and one workload cluster beside it.
struct World {
    objects: BTreeMap<(Kind, Key), Value>,
    nodes: BTreeMap<String, Value>,
    is_connected: bool,
    memory: Memory,
    drains: Vec<DrainOrder>,
    n_uids: usize,
    now: Timestamp,
}

impl World {
    /// A Cluster `c` with its infrastructure, connected.
    fn new() -> Self {
        let mut world = Self {
            objects: BTreeMap::new(),
            nodes: BTreeMap::new(),
            is_connected: true,
            memory: Memory::default(),
            drains: Vec::new(),
            n_uids: 0,
            now: T0,
        };
        world.add(
            Kind::NstanceCluster,
            "c",
            json!({
                "spec": { "controlPlaneEndpoint": { "host": "127.0.0.1", "port": 6443 } },
                "status": { "initialization": { "provisioned": true } },
            }),
        );
        world.add(
            Kind::Cluster,
            "c",
            json!({
                "spec": { "infrastructureRef": { "apiGroup": INFRA_GROUP, "kind": "NstanceCluster", "name": "c" } },
            }),
        );
        world.settle();
        world
    }

    /// The same with a MachinePool `p` whose infrastructure is ready, and `n` infrastructure machines and Nodes.
    fn with_pool(n: usize) -> Self {
        let mut world = Self::new();
        world.add(Kind::NstanceMachinePool, "p", json!({ "spec": { "group": "test" } }));
        world.add(
            Kind::MachinePool,
            "p",
            json!({ "spec": {
            "clusterName": "c",
            "replicas": n,
            "template": { "spec": {
                "clusterName": "c",
                "bootstrap": { "dataSecretName": "" },
                "infrastructureRef": { "apiGroup": INFRA_GROUP, "kind": "NstanceMachinePool", "name": "p" },
            } },
        } }),
        );
        for at in 0..n {
            world.add_infra_machine(at);
            world.add_node(at);
        }
        world.set_ids(&(0..n).collect::<Vec<_>>());
        world.settle();
        world
    }

    fn add(&mut self, kind: Kind, name: &str, mut object: Value) {
        object["metadata"]["name"] = name.into();
        object["metadata"]["namespace"] = "d".into();
        self.n_uids += 1;
        object["metadata"]["uid"] = format!("uid-{}", self.n_uids).into();
        object["metadata"]["generation"] = 1.into();
        self.objects.insert((kind, Key::new("d", name)), object);
    }

    fn add_infra_machine(&mut self, at: usize) {
        self.add(
            Kind::NstanceMachine,
            &format!("m{at}"),
            json!({
                "metadata": {
                    "labels": { "cluster.x-k8s.io/cluster-name": "c", "cluster.x-k8s.io/pool-name": "p" },
                    "finalizers": ["ours"],
                },
                "spec": { "providerID": id(at) },
                "status": { "initialization": { "provisioned": true }, "ready": true },
            }),
        );
    }

    fn add_node(&mut self, at: usize) {
        let condition = |name: &str, status: &str| json!({ "type": name, "status": status });
        self.nodes.insert(
            format!("m{at}"),
            json!({
                "metadata": { "name": format!("m{at}"), "uid": format!("node-{at}") },
                "spec": { "providerID": id(at) },
                "status": {
                    "conditions": [condition("Ready", "True"), condition("MemoryPressure", "False"),
                        condition("DiskPressure", "False"), condition("PIDPressure", "False")],
                    "nodeInfo": { "kubeletVersion": "v1.36.3" },
                },
            }),
        );
    }

    /// What the provider says of its pool.
    fn set_ids(&mut self, ids: &[usize]) {
        let pool = self.get_mut(Kind::NstanceMachinePool, "p");
        pool["spec"]["providerIDList"] = ids.iter().map(|it| id(*it)).collect::<Vec<_>>().into();
        let status = json!({ "ready": true, "replicas": ids.len(), "infrastructureMachineKind": "NstanceMachine" });
        pool["status"] = status;
    }

    fn get_mut(&mut self, kind: Kind, name: &str) -> &mut Value {
        self.objects.get_mut(&(kind, Key::new("d", name))).unwrap_or_else(|| panic!("no {kind:?} {name}"))
    }

    fn get(&self, kind: Kind, name: &str) -> Object {
        let object = self.objects.get(&(kind, Key::new("d", name)));
        Object::new(object.unwrap_or_else(|| panic!("no {kind:?} {name}")).clone())
    }

    fn has(&self, kind: Kind, name: &str) -> bool {
        self.objects.contains_key(&(kind, Key::new("d", name)))
    }

    fn names(&self, kind: Kind) -> Vec<&str> {
        self.objects.keys().filter(|it| it.0 == kind).map(|it| it.1.name.as_str()).collect()
    }

    fn node_names(&self) -> Vec<&str> {
        self.nodes.keys().map(String::as_str).collect()
    }

    fn delete(&mut self, kind: Kind, name: &str) {
        let now = crate::times::seconds(self.now);
        let object = self.get_mut(kind, name);
        if object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty) {
            self.objects.remove(&(kind, Key::new("d", name)));
        } else if object["metadata"]["deletionTimestamp"].is_null() {
            object["metadata"]["deletionTimestamp"] = now.into();
        }
    }

    fn drop_finalizer(&mut self, kind: Kind, name: &str) {
        self.get_mut(kind, name)["metadata"].as_object_mut().unwrap().remove("finalizers");
        if !self.get(kind, name).at("/metadata/deletionTimestamp").is_null() {
            self.objects.remove(&(kind, Key::new("d", name)));
        }
    }

    /// Garbage collection of what `owner` owned.
    fn collect(&mut self, uid: &str) {
        let owned: Vec<(Kind, String)> = self
            .objects
            .iter()
            .filter(|(_, it)| Object::new((*it).clone()).owners().any(|owner| owner.uid() == uid))
            .map(|((kind, key), _)| (*kind, key.name.clone()))
            .collect();
        owned.iter().for_each(|(kind, name)| self.delete(*kind, name));
    }

    /// Decides and applies until nothing is left to do; says what was done.
    fn settle(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        for _ in 0..20 {
            let effects = self.round();
            if effects.is_empty() {
                return done;
            }
            done.extend(effects);
        }
        panic!("decisions do not come to rest: {done:#?}");
    }

    fn round(&mut self) -> Vec<String> {
        let picture = Picture::of(self.objects.iter().map(|((kind, _), it)| (*kind, it.clone())));
        let nodes: Objects =
            self.nodes.iter().map(|(name, it)| (Key::new("", name), Arc::new(Object::new(it.clone())))).collect();
        let connection = match self.is_connected {
            true => Connection::Up { nodes: Nodes::new(Arc::new(nodes)) },
            false => Connection::Down { why: "test".to_owned() },
        };
        let connections = BTreeMap::from([(Key::new("d", "c"), connection)]);
        let (planned, drains) = self.memory.decide(&picture, &connections, self.now);
        self.drains = drains;
        let names = planned.iter().map(|it| format!("{:?} {}", it.effect, it.target.key)).collect();
        for it in planned {
            match it.target.via {
                Via::Own => self.apply(it.target.kind, &it.target.key, it.effect),
                Via::Workload(_) => self.apply_to_node(&it.target.key, it.effect),
            }
        }
        names
    }

    fn apply(&mut self, kind: Kind, key: &Key, effect: Effect) {
        match effect {
            Effect::Create { object } => self.add(kind, &key.name, object),
            Effect::Patch { patch, .. } => {
                let object = self.get_mut(kind, &key.name);
                merge(object, &patch);
                let is_over = !object["metadata"]["deletionTimestamp"].is_null()
                    && object["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
                if is_over {
                    self.objects.remove(&(kind, key.clone()));
                }
            }
            // An object that went with its last finalizer has no status any more.
            Effect::PatchStatus { patch, .. } => {
                if let Some(object) = self.objects.get_mut(&(kind, key.clone())) {
                    merge(object, &patch);
                }
            }
            Effect::Delete { .. } => self.delete(kind, &key.name),
            other => panic!("unexpected {other:?}"),
        }
    }

    fn apply_to_node(&mut self, key: &Key, effect: Effect) {
        match effect {
            Effect::Patch { patch, .. } => merge(self.nodes.get_mut(&key.name).unwrap(), &patch),
            Effect::Delete { .. } => drop(self.nodes.remove(&key.name)),
            other => panic!("unexpected {other:?}"),
        }
    }

    fn drained(&mut self, machine: &str) {
        let uid = self.get(Kind::Machine, machine).uid().to_owned();
        self.memory.drains.insert(uid, DrainOutcome::Done);
    }

    /// A Machine of the control plane, so that core drains.
    fn add_master(&mut self) {
        self.add(
            Kind::Machine,
            "master",
            json!({
                "metadata": { "labels": { "cluster.x-k8s.io/control-plane": "" } },
                "spec": { "clusterName": "c", "bootstrap": { "dataSecretName": "" },
                    "infrastructureRef": { "apiGroup": "other.example.com", "kind": "OtherMachine", "name": "x" } },
            }),
        );
        self.settle();
    }
}

fn id(at: usize) -> String {
    format!("dev:///nstance-agent-m{at}")
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let map = target.as_object_mut().unwrap();
    for (name, value) in patch {
        if value.is_null() {
            map.remove(name);
        } else {
            merge(map.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

#[test]
fn a_cluster_takes_over_its_infrastructure_and_leaves_the_control_plane_uninitialized() {
    let world = World::new();
    let (cluster, infra) = (world.get(Kind::Cluster, "c"), world.get(Kind::NstanceCluster, "c"));
    assert_eq!(infra.label("cluster.x-k8s.io/cluster-name"), Some("c"));
    let owner = infra.owners().next().unwrap();
    assert_eq!((owner.kind(), owner.is_controller()), ("Cluster", false));
    assert_eq!(cluster.text("/status/phase"), "Provisioned");
    assert_eq!(cluster.number("/spec/controlPlaneEndpoint/port"), Some(6443));
    assert!(cluster.flag("/status/initialization/infrastructureProvisioned"));
    assert_eq!(cluster.condition_status("ControlPlaneInitialized"), "False");
    assert!(cluster.is_true("InfrastructureReady"));
    assert!(cluster.has_finalizer("cluster.cluster.x-k8s.io"));
}

#[test]
fn a_control_plane_that_somebody_else_declared_initialized_stays_so() {
    let mut world = World::new();
    let conditions = world.get_mut(Kind::Cluster, "c")["status"]["conditions"].as_array_mut().unwrap();
    let initialized = conditions.iter_mut().find(|it| it["type"] == "ControlPlaneInitialized").unwrap();
    initialized["status"] = "True".into();
    initialized["reason"] = "Operator".into();
    assert!(world.settle().is_empty());
    let cluster = world.get(Kind::Cluster, "c");
    assert_eq!(cluster.condition("ControlPlaneInitialized").unwrap()["reason"], "Operator");
}

#[test]
fn a_paused_cluster_stops_everything_but_the_condition_that_says_so() {
    let mut world = World::with_pool(2);
    world.get_mut(Kind::Cluster, "c")["spec"]["paused"] = true.into();
    world.set_ids(&[0]);
    world.delete(Kind::Machine, "m1");
    world.settle();
    assert_eq!(world.node_names(), ["m0", "m1"]);
    assert!(world.has(Kind::NstanceMachine, "m1"));
    for (kind, name) in [(Kind::Cluster, "c"), (Kind::MachinePool, "p"), (Kind::Machine, "m0")] {
        assert!(world.get(kind, name).is_true("Paused"), "{kind:?}");
    }
    world.get_mut(Kind::Cluster, "c")["spec"]["paused"] = false.into();
    world.settle();
    assert_eq!(world.node_names(), ["m0"]);
}
