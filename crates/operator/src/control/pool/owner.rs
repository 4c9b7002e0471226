//! The MachinePool of a pool: found or made, and the few fields of it that are ours.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError},
};

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::Reconcile;
use crate::{
    api::{
        capi::{MachinePool, Meta as _},
        names::{annotation, label, manager},
    },
    control::import::machine_pool_body,
    decide::{
        capacity::CapacityInput,
        observed::Group,
        pool::{PoolInput, refers_to, wants_machine_pool},
    },
    ports::{Apply, KubeError, KubeErrorKind, ObjectRef, Target, kinds},
};

/// Groups and Nodes of a pool, which tell what one more instance would offer.
pub(super) struct Offered {
    groups: Vec<Arc<Group>>,
    nodes: Vec<Arc<Node>>,
}

impl Reconcile<'_> {
    /// The MachinePool that refers to this pool. Made if the pool asks for that.
    pub(super) async fn machine_pool(&self) -> Result<Option<Arc<MachinePool>>, KubeError> {
        let namespace = Some(self.key.namespace.as_str());
        let found = self
            .ctx
            .stores
            .machine_pools
            .filter(|it| it.metadata.namespace.as_deref() == namespace && refers_to(it, &self.key.name));
        if let Some(found) = found.into_iter().next() {
            return Ok(Some(found));
        }
        let is_ending = self.ctx.cluster().is_none_or(|it| it.is_terminating());
        if !wants_machine_pool(&self.pool) || !self.ctx.stores.machine_pools.is_synced() || is_ending {
            return Ok(None);
        }
        // As many as there are, so that nothing moves.
        let present = self.pool.status.as_ref().and_then(|it| it.desired);
        let replicas = present.unwrap_or_else(|| {
            let sizes = self
                .ctx
                .shards
                .views()
                .into_iter()
                .filter_map(|view| Some(view.picture?.groups.get(&self.pool.spec.group)?.size));
            sizes.sum()
        });
        let reference = ObjectRef::new(kinds::MACHINE_POOL, &self.key.namespace, &self.key.name);
        let mut body = machine_pool_body(self.ctx, &self.key.name);
        body["spec"]["replicas"] = json!(replicas);
        match self.ctx.kube.create(&reference, &body, manager::IMPORT).await {
            Ok(_) => {}
            Err(error) if error.kind == KubeErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Applies our fields of the MachinePool. `spec.replicas` is never among them.
    pub(super) async fn apply_machine_pool(
        &self,
        machine_pool: &MachinePool,
        wanted: BTreeMap<String, String>,
    ) -> Result<(), KubeError> {
        if machine_pool.is_terminating() {
            return Ok(());
        }
        let name = machine_pool.metadata.name.as_deref().unwrap_or_default();
        let mut body = machine_pool_body(self.ctx, &self.key.name);
        body["metadata"]["name"] = json!(name);
        body["metadata"]["uid"] = json!(machine_pool.metadata.uid);
        let mut ours = BTreeMap::new();
        let reference = ObjectRef::new(kinds::MACHINE_POOL, &self.key.namespace, name);
        for (key, value) in wanted {
            match machine_pool.annotation(&key) {
                Some(present) if present != value && !self.is_ours(&reference, &key).await? => {}
                _ => _ = ours.insert(key, value),
            }
        }
        if !ours.is_empty() {
            body["metadata"]["annotations"] = json!(ours);
        }
        let how = Apply { manager: manager::SPEC, force: false, target: Target::Main };
        match self.ctx.apply(&reference, &body, how, Some(&json!(machine_pool))).await {
            // It was deleted meanwhile.
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
            other => other.map(drop),
        }
    }

    /// Whether an annotation of an object was applied by us. Somebody else's wins.
    async fn is_ours(&self, reference: &ObjectRef, key: &str) -> Result<bool, KubeError> {
        let Some(object) = self.ctx.kube.get(reference).await? else { return Ok(false) };
        let fields = |entry: &Value| {
            let annotations = &entry["fieldsV1"]["f:metadata"]["f:annotations"];
            annotations.get(format!("f:{key}")).is_some()
        };
        let entries = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
        Ok(entries.iter().any(|it| it["manager"] == manager::SPEC && fields(it)))
    }

    /// What is known of what one more instance would offer.
    pub(super) fn offered(&self, input: &PoolInput<'_>) -> Offered {
        let group = &self.pool.spec.group;
        let of_shard = |shard: &String| input.shards.get(shard)?.picture.as_deref()?.groups.get(group).cloned();
        let names: BTreeSet<&str> = input.members.iter().filter_map(|it| it.metadata.name.as_deref()).collect();
        let is_member = |node: &Node| node.label(label::INSTANCE_ID).is_some_and(|it| names.contains(it));
        Offered {
            groups: self.pool.spec.shards.iter().filter_map(of_shard).collect(),
            nodes: self.ctx.workload.nodes.filter(is_member),
        }
    }

    /// The annotations of a MachinePool less the labels and taints that somebody else set: without Nodes, what was published
    /// of them is published again, and to repeat another's value would make it ours too.
    pub(super) async fn own_annotations(
        &self,
        machine_pool: &MachinePool,
    ) -> Result<BTreeMap<String, String>, KubeError> {
        let mut all = machine_pool.metadata.annotations.clone().unwrap_or_default();
        let name = machine_pool.metadata.name.as_deref().unwrap_or_default();
        let reference = ObjectRef::new(kinds::MACHINE_POOL, &self.key.namespace, name);
        for key in [annotation::AUTOSCALER_LABELS, annotation::AUTOSCALER_TAINTS] {
            if all.contains_key(key) && !self.is_ours(&reference, key).await? {
                all.remove(key);
            }
        }
        Ok(all)
    }

    pub(super) fn capacity_input<'a>(
        &'a self,
        offered: &'a Offered,
        annotations: &'a BTreeMap<String, String>,
    ) -> CapacityInput<'a> {
        let spec = &self.pool.spec;
        CapacityInput {
            capacity: Some(&spec.capacity),
            node_info: spec.node_info.as_ref(),
            groups: &offered.groups,
            nodes: &offered.nodes,
            previous: self.pool.status.as_ref().map(|it| &it.capacity),
            autoscaler: spec.autoscaler.as_ref(),
            annotations: Some(annotations),
        }
    }

    /// An imported pool was made by a field manager of its own. That entry is dropped, or a person's later apply of the same
    /// fields would conflict with it.
    pub(super) async fn release_import(&self, machine_pool: &MachinePool) -> Result<(), KubeError> {
        let is_released = self.memory.released.lock().unwrap_or_else(PoisonError::into_inner).contains(self.key);
        if is_released || !wants_machine_pool(&self.pool) {
            return Ok(());
        }
        let name = machine_pool.metadata.name.as_deref().unwrap_or_default();
        let machine_pool = ObjectRef::new(kinds::MACHINE_POOL, &self.key.namespace, name);
        let mut is_done = true;
        for reference in [&self.reference, &machine_pool] {
            is_done &= self.release(reference).await?;
        }
        if is_done {
            self.memory.released.lock().unwrap_or_else(PoisonError::into_inner).insert(self.key.clone());
        }
        Ok(())
    }

    /// Whether the entry is gone.
    async fn release(&self, reference: &ObjectRef) -> Result<bool, KubeError> {
        let Some(object) = self.ctx.kube.get(reference).await? else { return Ok(false) };
        let Some(entries) = object["metadata"]["managedFields"].as_array() else { return Ok(true) };
        let Some(at) = entries.iter().position(|it| it["manager"] == manager::IMPORT) else { return Ok(true) };
        // Emptied wholly, the next apply would book every field to a manager that never gives one up.
        if !entries.iter().any(|it| it["manager"] == manager::SPEC) {
            return Ok(false);
        }
        let path = format!("/metadata/managedFields/{at}");
        let patch = json!([
            {"op": "test", "path": "/metadata/resourceVersion", "value": object["metadata"]["resourceVersion"]},
            {"op": "test", "path": format!("{path}/manager"), "value": manager::IMPORT},
            {"op": "remove", "path": path},
        ]);
        match self.ctx.kube.json_patch(reference, &patch).await {
            Ok(_) => Ok(true),
            Err(error)
                if matches!(error.kind, KubeErrorKind::Conflict | KubeErrorKind::Invalid | KubeErrorKind::NotFound) =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
