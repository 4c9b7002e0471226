//! A Kubernetes API in memory: `resourceVersion`, `generation`, uids, finalizers, separate status, server-side apply by
//! field manager, patches, evictions as a test scripts them, and failures at chosen calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use k8s_openapi::jiff::Timestamp;
use nstance_core::ports::clock::Clock;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::objects::{CLIENT, Objects, Refusal, meta_text, metadata, refuse};
use crate::{
    cluster::{
        store::{ObjectKey, Store},
        workload::Access,
    },
    control::context::Context,
    ports::{
        Apply, KubeError, KubeErrorKind, KubePort, ObjectRef, Propagation, ResourceKind, Right, Selector, Target, kinds,
    },
};

/// One call, as it was made.
#[derive(Debug, Clone, PartialEq)]
pub struct KubeCall {
    /// `get`, `list`, `create`, `apply`, `merge_patch`, `json_patch`, `replace`, `delete`, `evict`, `delete_pod`,
    /// `create_token` or `missing_rights`.
    pub verb: &'static str,
    pub object: ObjectRef,
    /// What was sent; `null` without a body.
    pub body: Value,
    pub target: Target,
    pub failed: bool,
}

/// How an eviction is answered.
#[derive(Debug, Clone)]
pub enum EvictionAnswer {
    /// The pod goes.
    Accept,
    /// This budget does not allow it now.
    BlockedBy {
        budget: String,
        retry_after: Option<Duration>,
    },
    Fail {
        kind: KubeErrorKind,
        code: u16,
        message: String,
        causes: Vec<(String, String)>,
    },
}

#[derive(Debug, Clone)]
struct Fault {
    verb: &'static str,
    kind: Option<ResourceKind>,
    /// Calls that pass first.
    skip: usize,
    /// Calls that fail then.
    n_failing: usize,
    error: KubeErrorKind,
    /// The call is carried out, its answer is lost.
    lands: bool,
}

#[derive(Default)]
struct State {
    objects: Objects,
    n_tokens: u64,
    calls: Vec<KubeCall>,
    faults: Vec<Fault>,
    evictions: BTreeMap<ObjectRef, Vec<EvictionAnswer>>,
    pods_linger: bool,
    missing_rights: BTreeSet<String>,
}

pub struct FakeKube {
    clock: Arc<dyn Clock>,
    state: Mutex<State>,
    changed: tokio::sync::watch::Sender<u64>,
}

fn typed<K: DeserializeOwned>(value: Value) -> K {
    let what = format!("{} {}", value["kind"], value["metadata"]["name"]);
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{what} is not of its type: {error}"))
}

/// Setting up and looking.
impl FakeKube {
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, state: Mutex::default(), changed: tokio::sync::watch::Sender::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the objects and tells [`Self::changes`].
    fn change<T>(&self, act: impl FnOnce(&mut State, &str) -> T) -> T {
        let at = Timestamp::from_second(self.clock.now().as_millis().div_euclid(1000)).unwrap_or_default();
        let (result, before, after) = {
            let state = &mut *self.state();
            let before = state.objects.version;
            (act(state, &at.to_string()), before, state.objects.version)
        };
        if before != after {
            self.changed.send_replace(after);
        }
        result
    }

    /// Stores an object with its status, as if all of it had been there before. One of the same name is replaced and keeps its
    /// uid. No manager owns its fields. Returns it as it is stored.
    pub fn put<K: Serialize + DeserializeOwned>(&self, kind: ResourceKind, object: &K) -> K {
        let body = match serde_json::to_value(object) {
            Ok(body) => body,
            Err(error) => panic!("a {} is no JSON: {error}", kind.kind),
        };
        let text = |name: &str| meta_text(&body, name).unwrap_or_default();
        let object = ObjectRef::new(kind, text("namespace"), text("name"));
        typed(self.change(|state, now| state.objects.put(&object, &body, now)))
    }

    /// The object as it is stored.
    pub fn value(&self, kind: ResourceKind, namespace: &str, name: &str) -> Option<Value> {
        self.state().objects.get(&ObjectRef::new(kind, namespace, name)).cloned()
    }

    /// The object as its type.
    pub fn read<K: DeserializeOwned>(&self, kind: ResourceKind, namespace: &str, name: &str) -> Option<K> {
        self.value(kind, namespace, name).map(typed)
    }

    /// All objects of a kind, by namespace and name.
    pub fn all<K: DeserializeOwned>(&self, kind: ResourceKind) -> Vec<K> {
        self.values(kind, &Selector::default()).into_iter().map(typed).collect()
    }

    fn values(&self, kind: ResourceKind, selector: &Selector) -> Vec<Value> {
        select(&self.state().objects, kind, selector)
    }

    /// Changes an object as another client would, status included. Panics if it does not exist.
    pub fn edit(&self, kind: ResourceKind, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let object = ObjectRef::new(kind, namespace, name);
        let Some(mut value) = self.value(kind, namespace, name) else { panic!("{object} does not exist") };
        change(&mut value);
        self.change(|state, _| state.objects.write(&object, &value, CLIENT));
    }

    /// Removes an object at once, whatever its finalizers.
    pub fn remove(&self, kind: ResourceKind, namespace: &str, name: &str) {
        self.change(|state, _| state.objects.remove(&ObjectRef::new(kind, namespace, name)));
    }

    /// Deletes an object as a person does: it stays, terminating, while it has finalizers.
    pub fn delete_by_user(&self, kind: ResourceKind, namespace: &str, name: &str) {
        let object = ObjectRef::new(kind, namespace, name);
        let deleted = self.change(|state, now| state.objects.delete(&object, None, now));
        assert!(deleted.is_ok(), "a delete without precondition is not refused");
    }

    /// How evictions of a pod are answered, in turn; the last answer stays. Without a script every eviction is accepted.
    pub fn script_evictions(&self, namespace: &str, pod: &str, answers: Vec<EvictionAnswer>) {
        self.state().evictions.insert(ObjectRef::new(kinds::POD, namespace, pod), answers);
    }

    /// Evicted pods stay, terminating, until a test removes them.
    pub fn let_pods_linger(&self) {
        self.state().pods_linger = true;
    }

    /// What `missing_rights` answers: names as `patch nodes`.
    pub fn set_missing_rights(&self, rights: &[&str]) {
        self.state().missing_rights = rights.iter().map(|it| (*it).to_owned()).collect();
    }

    /// Changes at every write.
    pub fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
        self.changed.subscribe()
    }
}

/// Failures and the log.
impl FakeKube {
    /// The `nth` call of this verb from now on fails (1 is the next one); nothing is changed.
    pub fn fail_nth(&self, verb: &'static str, nth: usize, error: KubeErrorKind) {
        self.add_fault(Fault { verb, kind: None, skip: nth.saturating_sub(1), n_failing: 1, error, lands: false });
    }

    /// All calls of this verb fail, of one kind or of all, until [`Self::heal`].
    pub fn fail_all(&self, verb: &'static str, kind: Option<ResourceKind>, error: KubeErrorKind) {
        self.add_fault(Fault { verb, kind, skip: 0, n_failing: usize::MAX, error, lands: false });
    }

    /// The `nth` call of this verb from now on is carried out, but its answer is lost.
    pub fn lose_answer(&self, verb: &'static str, nth: usize) {
        let error = KubeErrorKind::Unavailable;
        self.add_fault(Fault { verb, kind: None, skip: nth.saturating_sub(1), n_failing: 1, error, lands: true });
    }

    fn add_fault(&self, fault: Fault) {
        self.state().faults.push(fault);
    }

    /// Ends all failures.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// All calls so far, failed ones included.
    pub fn calls(&self) -> Vec<KubeCall> {
        self.state().calls.clone()
    }

    pub fn calls_of(&self, verb: &str) -> Vec<KubeCall> {
        self.state().calls.iter().filter(|it| it.verb == verb).cloned().collect()
    }

    /// All calls that change something, failed ones included.
    pub fn writes(&self) -> Vec<KubeCall> {
        let is_read = |verb: &str| matches!(verb, "get" | "list" | "create_token" | "missing_rights");
        self.state().calls.iter().filter(|it| !is_read(it.verb)).cloned().collect()
    }

    pub fn clear_calls(&self) {
        self.state().calls.clear();
    }

    /// Logs a call and finds the failure that is due, if any.
    fn begin(&self, verb: &'static str, object: &ObjectRef, body: &Value, target: Target) -> Option<Fault> {
        let state = &mut *self.state();
        let mut due = None;
        for fault in &mut state.faults {
            if fault.verb != verb || fault.kind.is_some_and(|it| it != object.kind) {
                continue;
            }
            if 0 < fault.skip {
                fault.skip -= 1;
            } else if 0 < fault.n_failing && due.is_none() {
                fault.n_failing -= 1;
                due = Some(fault.clone());
            }
        }
        state.calls.push(KubeCall { verb, object: object.clone(), body: body.clone(), target, failed: due.is_some() });
        due
    }

    /// One call: logged, failed if it is its turn, else carried out in one step.
    fn call<T>(
        &self,
        verb: &'static str,
        object: &ObjectRef,
        body: &Value,
        target: Target,
        act: impl FnOnce(&mut State, &str) -> Result<T, Refusal>,
    ) -> Result<T, KubeError> {
        let fault = self.begin(verb, object, body, target);
        let error = |refusal: Refusal| {
            let code = refusal.code.unwrap_or_else(|| usual_code(&refusal.kind));
            let Refusal { kind, message, causes, .. } = refusal;
            KubeError { verb, object: object.to_string(), kind, message, code, causes }
        };
        if let Some(fault) = fault.as_ref().filter(|it| !it.lands) {
            return refuse(fault.error.clone(), "this call was made to fail").map_err(error);
        }
        let outcome = self.change(|state, now| {
            let outcome = act(state, now);
            if outcome.is_err()
                && let Some(call) = state.calls.last_mut()
            {
                call.failed = true;
            }
            outcome
        });
        match (outcome, fault) {
            (Ok(_), Some(fault)) => refuse(fault.error, "the answer was lost").map_err(error),
            (outcome, _) => outcome.map_err(error),
        }
    }
}

/// Watches.
impl FakeKube {
    /// Brings the stores of a context up to date, as its watches do; only what changed is told. Nodes, and pods without a Node,
    /// are fed if this is the context's workload cluster.
    pub fn feed(&self, context: &Context) {
        let stores = &context.stores;
        let all = Selector::default();
        self.feed_store(kinds::CLUSTER, &all, &stores.clusters);
        self.feed_store(kinds::NSTANCE_CLUSTER, &all, &stores.nstance_clusters);
        self.feed_store(kinds::MACHINE_POOL, &all, &stores.machine_pools);
        self.feed_store(kinds::NSTANCE_MACHINE_POOL, &all, &stores.pools);
        self.feed_store(kinds::NSTANCE_SHARD_GROUP, &all, &stores.shard_groups);
        self.feed_store(kinds::MACHINE, &all, &stores.machines);
        self.feed_store(kinds::NSTANCE_MACHINE, &all, &stores.nstance_machines);
        self.feed_store(kinds::NSTANCE_MACHINE_TEMPLATE, &all, &stores.templates);
        self.feed_store(kinds::MACHINE_DRAIN_RULE, &all, &stores.drain_rules);
        let is_workload = match context.workload.access() {
            Access::Granted(api) => std::ptr::addr_eq(Arc::as_ptr(&api), std::ptr::from_ref(self)),
            Access::Missing { .. } => false,
        };
        if is_workload {
            let unscheduled = Selector { fields: Some("spec.nodeName=".to_owned()), ..Selector::default() };
            self.feed_store(kinds::NODE, &all, &context.workload.nodes);
            self.feed_store(kinds::POD, &unscheduled, &stores.pods);
        }
    }

    /// Brings one store up to date with the objects of a kind.
    pub fn feed_store<K>(&self, kind: ResourceKind, selector: &Selector, store: &Store<K>)
    where
        K: kube::Resource + DeserializeOwned,
    {
        let listed = self.values(kind, selector).into_iter().map(|mut value| {
            metadata(&mut value).remove("managedFields");
            typed(value)
        });
        let listed: Vec<K> = listed.collect();
        if !store.is_synced() {
            store.replace_all(listed);
            return;
        }
        let keys: BTreeSet<ObjectKey> = listed.iter().map(ObjectKey::of).collect();
        for known in store.all() {
            let key = ObjectKey::of(&*known);
            if !keys.contains(&key) {
                store.remove(&key);
            }
        }
        for object in listed {
            let known = store.get(&ObjectKey::of(&object));
            if known.is_none_or(|it| it.meta().resource_version != object.meta().resource_version) {
                store.put(object);
            }
        }
    }
}

fn usual_code(kind: &KubeErrorKind) -> u16 {
    match kind {
        KubeErrorKind::NotFound => 404,
        KubeErrorKind::AlreadyExists | KubeErrorKind::Conflict => 409,
        KubeErrorKind::Invalid => 422,
        KubeErrorKind::Forbidden => 403,
        KubeErrorKind::TooManyRequests { .. } => 429,
        KubeErrorKind::Gone => 410,
        KubeErrorKind::Unavailable => 503,
        KubeErrorKind::NotLeader => 0,
    }
}

fn select(objects: &Objects, kind: ResourceKind, selector: &Selector) -> Vec<Value> {
    let of_kind = objects.iter().filter(|(object, _)| object.kind == kind);
    let selected = of_kind.filter(|(object, it)| super::selector::matches(selector, &object.namespace, it));
    selected.map(|(_, it)| it.clone()).collect()
}

/// A pod that was evicted or deleted, if it is still the one with this uid.
fn end_pod(state: &mut State, pod: &ObjectRef, uid: &str, now: &str) -> Result<(), Refusal> {
    let Some(known) = state.objects.get(pod) else { return Ok(()) };
    if meta_text(known, "uid") != Some(uid) {
        return refuse(KubeErrorKind::Conflict, "the pod has another uid");
    }
    if state.pods_linger {
        state.objects.terminate(pod, now);
        Ok(())
    } else {
        state.objects.delete(pod, Some(uid), now)
    }
}

fn next_answer(state: &mut State, pod: &ObjectRef) -> EvictionAnswer {
    match state.evictions.get_mut(pod) {
        Some(answers) if 1 < answers.len() => answers.remove(0),
        Some(answers) => answers.first().cloned().unwrap_or(EvictionAnswer::Accept),
        None => EvictionAnswer::Accept,
    }
}

#[async_trait]
impl KubePort for FakeKube {
    async fn get(&self, object: &ObjectRef) -> Result<Option<Value>, KubeError> {
        self.call("get", object, &Value::Null, Target::Main, |state, _| Ok(state.objects.get(object).cloned()))
    }

    async fn list(&self, kind: ResourceKind, selector: &Selector) -> Result<Vec<Value>, KubeError> {
        let object = ObjectRef::new(kind, selector.namespace.as_deref().unwrap_or_default(), "");
        self.call("list", &object, &Value::Null, Target::Main, |state, _| Ok(select(&state.objects, kind, selector)))
    }

    async fn create(&self, object: &ObjectRef, body: &Value, manager: &'static str) -> Result<Value, KubeError> {
        self.call("create", object, body, Target::Main, |state, now| state.objects.create(object, body, manager, now))
    }

    async fn apply(&self, object: &ObjectRef, body: &Value, how: Apply) -> Result<Value, KubeError> {
        self.call("apply", object, body, how.target, |state, now| state.objects.apply(object, body, how, now))
    }

    async fn merge_patch(&self, object: &ObjectRef, patch: &Value, target: Target) -> Result<Value, KubeError> {
        self.call("merge_patch", object, patch, target, |state, _| state.objects.merge_patch(object, patch, target))
    }

    async fn json_patch(&self, object: &ObjectRef, patch: &Value) -> Result<Value, KubeError> {
        self.call("json_patch", object, patch, Target::Main, |state, _| state.objects.json_patch(object, patch))
    }

    async fn replace(&self, object: &ObjectRef, body: &Value) -> Result<Value, KubeError> {
        self.call("replace", object, body, Target::Main, |state, _| state.objects.replace(object, body))
    }

    async fn delete(&self, object: &ObjectRef, uid: Option<&str>, how: Propagation) -> Result<(), KubeError> {
        let body = serde_json::json!({"uid": uid, "propagationPolicy": format!("{how:?}")});
        self.call("delete", object, &body, Target::Main, |state, now| state.objects.delete(object, uid, now))
    }

    async fn evict(&self, pod: &ObjectRef, uid: &str, grace_seconds: Option<i64>) -> Result<(), KubeError> {
        let body = serde_json::json!({"uid": uid, "gracePeriodSeconds": grace_seconds});
        self.call("evict", pod, &body, Target::Main, |state, now| match next_answer(state, pod) {
            EvictionAnswer::Accept => end_pod(state, pod, uid, now),
            EvictionAnswer::BlockedBy { budget, retry_after } => Err(Refusal {
                kind: KubeErrorKind::TooManyRequests { retry_after },
                message: "Cannot evict pod as it would violate the pod's disruption budget.".to_owned(),
                code: None,
                causes: vec![(
                    "DisruptionBudget".to_owned(),
                    format!("The disruption budget {budget} needs 1 healthy pods and has 1 currently"),
                )],
            }),
            EvictionAnswer::Fail { kind, code, message, causes } => {
                Err(Refusal { kind, message, code: Some(code), causes })
            }
        })
    }

    async fn delete_pod(&self, pod: &ObjectRef, uid: &str, grace_seconds: i64) -> Result<(), KubeError> {
        let body = serde_json::json!({"uid": uid, "gracePeriodSeconds": grace_seconds});
        self.call("delete_pod", pod, &body, Target::Main, |state, now| end_pod(state, pod, uid, now))
    }

    async fn create_token(&self, account: &ObjectRef, life: Duration) -> Result<(String, Timestamp), KubeError> {
        let end = self.clock.now().plus(life);
        self.call("create_token", account, &Value::Null, Target::Main, |state, _| {
            state.n_tokens += 1;
            let end = Timestamp::from_millisecond(end.as_millis()).unwrap_or_default();
            Ok((format!("token-{}", state.n_tokens), end))
        })
    }

    async fn missing_rights(&self, rights: &[Right]) -> Result<Vec<String>, KubeError> {
        let object = ObjectRef::new(kinds::ACCESS_REVIEW, "", "");
        self.call("missing_rights", &object, &Value::Null, Target::Main, |state, _| {
            let names = rights.iter().map(|it| match it.subresource {
                "" => format!("{} {}", it.verb, it.resource),
                subresource => format!("{} {}/{subresource}", it.verb, it.resource),
            });
            Ok(names.filter(|it| state.missing_rights.contains(it)).collect())
        })
    }
}

#[cfg(test)]
mod tests;
