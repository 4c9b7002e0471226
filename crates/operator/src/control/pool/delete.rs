//! The end of a pool: its instances are drained with it, or they stay.

use std::sync::Arc;

use serde_json::json;

use super::{RESYNC, Reconcile};
use crate::{
    api::{
        capi::{Machine, Meta as _},
        conditions::{Status, kind},
        names::{annotation, finalizer},
        pool::DeletionPolicy,
    },
    cluster::events::{Reason, Severity},
    control::queue::Next,
    decide::pool::owner_of_group,
    ports::{KubeError, KubeErrorKind, ObjectRef, Propagation, Target, kinds},
};

impl Reconcile<'_> {
    /// The API that stores pools is being removed: VMs stay, finalizers go.
    pub(super) async fn orphan_all(&self, what: &str) -> Result<Next, KubeError> {
        if self.pool.is_terminating() {
            let message = format!("{what} is being removed; the instances of group {} stay", self.pool.spec.group);
            self.ctx.events.emit(&self.about(), Severity::Warning, Reason::GroupOrphaned.as_str(), &message);
            self.ctx.drop_finalizer(&self.reference, &self.pool.metadata, finalizer::POOL).await?;
        }
        Ok(Next::After(RESYNC))
    }

    pub(super) async fn delete(&self) -> Result<Next, KubeError> {
        if !self.pool.has_finalizer(finalizer::POOL) {
            return Ok(Next::Wait);
        }
        // A younger pool of the same group never had an effect, and has none when it goes.
        let pools = self.ctx.stores.pools.filter(|it| it.metadata.namespace == self.pool.metadata.namespace);
        let is_owner =
            owner_of_group(&pools, &self.pool.spec.group).is_none_or(|it| it.metadata.uid == self.pool.metadata.uid);
        let is_orphaned = self.pool.spec.deletion_policy == Some(DeletionPolicy::Orphan);
        if is_orphaned && is_owner {
            self.orphan_machines().await?;
        }
        let groups = self.shard_groups();
        for group in groups.values() {
            let name = group.metadata.name.as_deref().unwrap_or_default();
            let reference = ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, &self.key.namespace, name);
            if is_orphaned && group.annotation(annotation::ORPHAN).is_none() {
                let patch =
                    json!({"metadata": {"uid": group.metadata.uid, "annotations": {annotation::ORPHAN: "true"}}});
                match self.ctx.kube.merge_patch(&reference, &patch, Target::Main).await {
                    Ok(_) => {}
                    Err(error) if error.is_not_found() || error.is_conflict() => continue,
                    Err(error) => return Err(error),
                }
            }
            if !group.is_terminating() {
                self.ctx.kube.delete(&reference, group.metadata.uid.as_deref(), Propagation::Background).await?;
            }
        }
        if !groups.is_empty() {
            let message = format!("waiting for {} shard groups", groups.len());
            return self.say(kind::DELETING, Status::True, "WaitingForShardGroups", message).await;
        }
        if is_orphaned && is_owner {
            let message = format!("the instances of group {} stay", self.pool.spec.group);
            self.ctx.events.emit(&self.about(), Severity::Normal, Reason::GroupOrphaned.as_str(), &message);
        }
        self.ctx.drop_finalizer(&self.reference, &self.pool.metadata, finalizer::POOL).await?;
        Ok(Next::Wait)
    }

    /// Machines go without Cluster API noticing, or it would drain and delete the Nodes of instances that stay.
    async fn orphan_machines(&self) -> Result<(), KubeError> {
        let members = self.members();
        for machine in self.machines(&members) {
            self.orphan_machine(&machine).await?;
        }
        for member in &members {
            let name = member.metadata.name.as_deref().unwrap_or_default();
            let reference = ObjectRef::new(kinds::NSTANCE_MACHINE, &self.key.namespace, name);
            if !member.is_terminating() {
                self.ctx.kube.delete(&reference, member.metadata.uid.as_deref(), Propagation::Background).await?;
            }
            self.ctx.drop_finalizer(&reference, &member.metadata, finalizer::MACHINE).await?;
        }
        Ok(())
    }

    async fn orphan_machine(&self, machine: &Arc<Machine>) -> Result<(), KubeError> {
        let name = machine.metadata.name.as_deref().unwrap_or_default();
        let reference = ObjectRef::new(kinds::MACHINE, &self.key.namespace, name);
        if machine.annotation(annotation::PAUSED).is_none() {
            let patch = json!({"metadata": {"uid": machine.metadata.uid, "annotations": {annotation::PAUSED: "true"}}});
            match self.ctx.kube.merge_patch(&reference, &patch, Target::Main).await {
                Ok(_) => {}
                Err(error) if error.is_not_found() || error.is_conflict() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        if !machine.is_terminating() {
            match self.ctx.kube.delete(&reference, machine.metadata.uid.as_deref(), Propagation::Background).await {
                Ok(()) => {}
                Err(error) if error.is_conflict() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.uncordon(machine).await?;
        self.ctx.drop_finalizer(&reference, &machine.metadata, finalizer::CAPI_MACHINE).await?;
        Ok(())
    }

    /// What Cluster API cordoned before it was stopped.
    async fn uncordon(&self, machine: &Machine) -> Result<(), KubeError> {
        let Some(api) = self.ctx.workload.api() else { return Ok(()) };
        let Some(node_name) = machine.status.as_ref().and_then(|it| it.node_ref.as_ref()).map(|it| &it.name) else {
            return Ok(());
        };
        let Some(node) = self.ctx.workload.nodes.named("", node_name) else { return Ok(()) };
        let is_cordoned = node.spec.as_ref().is_some_and(|it| it.unschedulable == Some(true));
        let is_draining_by_us = node.annotation(annotation::DRAIN_STATE).is_some();
        if !machine.is_terminating() || !is_cordoned || is_draining_by_us {
            return Ok(());
        }
        let reference = ObjectRef::new(kinds::NODE, "", node_name);
        let patch = json!({
            "metadata": {"resourceVersion": node.metadata.resource_version},
            "spec": {"unschedulable": null},
        });
        match api.merge_patch(&reference, &patch, Target::Main).await {
            Err(error) if matches!(error.kind, KubeErrorKind::Conflict | KubeErrorKind::NotFound) => Ok(()),
            other => other.map(drop),
        }
    }
}
