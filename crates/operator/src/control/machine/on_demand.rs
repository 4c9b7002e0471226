//! On-demand instances: asked for under a request id that is stored first, followed, and deleted.

use std::collections::BTreeMap;

use serde_json::json;

use super::{ASK_AGAIN, CREATE, DELETE, DESCRIBE, RESYNC, Reconcile, delete, delete_machine};
use crate::{
    api::{
        capi::Meta as _,
        names::{API_VERSION, annotation, finalizer, manager},
    },
    cluster::events::{Reason, Severity},
    control::{apply::Outcome, queue::Next},
    decide::machine::{
        CreateInput, Hold, InstanceView, Removal, RemovalInput, create, instance_view, is_pool_member, must_ask,
        removal,
    },
    ports::{Answer, Apply, KubeError, Progress, Target, Wish},
};

/// Our fields of an on-demand NstanceMachine.
struct Fields<'a> {
    shard: &'a str,
    request_id: &'a str,
    instance_id: Option<&'a str>,
    provider_id: Option<&'a str>,
}

impl Reconcile<'_> {
    pub(super) async fn on_demand(&self) -> Result<Next, KubeError> {
        let object = &self.object;
        let shard = object.spec.shard.as_deref().and_then(|it| self.ctx.shards.view(it));
        let asked = self.describe(must_ask(object, shard.as_ref()));
        let view = instance_view(object, shard.as_ref(), asked.as_ref());
        if object.is_terminating() {
            return self.remove(&view, shard.is_some()).await;
        }
        if !self.ctx.ensure_finalizer(&self.reference, &object.metadata, finalizer::MACHINE).await? {
            return Ok(Next::Wait);
        }
        let hold = match &view {
            InstanceView::Unnamed => self.create().await?,
            InstanceView::Present(instance) => {
                self.withdraw(CREATE);
                let provider_id = object.spec.provider_id.as_deref().or(instance.provider_id.as_deref());
                self.keep_fields(provider_id).await?
            }
            InstanceView::Gone => None,
            InstanceView::Unknown => self.why_unknown(shard.is_some()),
        };
        self.show(&view, hold.as_ref()).await?;
        if view.is_gone() {
            self.end().await?;
        }
        Ok(Next::After(if asked.is_some() && !view.is_gone() { ASK_AGAIN } else { RESYNC }))
    }

    /// Asks the shard for an instance that the picture does not have. An answer that it exists is used once: the picture may
    /// have it soon, or the instance may go before.
    fn describe(&self, is_needed: bool) -> Option<Progress> {
        let (Some(shard), Some(id)) = (&self.object.spec.shard, &self.object.spec.instance_id) else { return None };
        if !is_needed {
            self.withdraw(DESCRIBE);
            return None;
        }
        let progress = self.ask(shard, DESCRIBE, Wish::InstanceStatus { id: id.clone() });
        if matches!(progress, Progress::Answered(_)) {
            self.withdraw(DESCRIBE);
        }
        Some(progress)
    }

    fn why_unknown(&self, is_shard_configured: bool) -> Option<Hold> {
        let shard = self.object.spec.shard.as_deref()?;
        (!is_shard_configured).then(|| {
            let message = format!("shard {shard} is not in the operator's config; add it, or delete this object");
            Hold::stalled("UnknownShard", message)
        })
    }

    /// Asks for the instance. What holds it, if anything does.
    async fn create(&self) -> Result<Option<Hold>, KubeError> {
        let (machine, cluster, shards) = (self.machine(), self.ctx.cluster(), self.ctx.shards.views());
        let input = CreateInput {
            object: &self.object,
            machine: machine.as_deref(),
            cluster: cluster.as_deref(),
            shards: &shards,
            assigned: &self.assigned(),
        };
        let plan = match create(&input) {
            Ok(plan) => plan,
            Err(hold) => return Ok(Some(hold)),
        };
        let request_id = plan.wish.request_id.clone();
        let fields = Fields { shard: &plan.shard, request_id: &request_id, instance_id: None, provider_id: None };
        if !self.apply_fields(&fields).await? {
            return Ok(Some(Hold::waiting("Storing", "the request id is not stored yet")));
        }
        let progress = self.ask(&plan.shard, CREATE, Wish::CreateInstance(plan.wish));
        match progress {
            Progress::Answered(Answer::Instance { id, .. }) => {
                self.apply_fields(&Fields { instance_id: Some(&id), ..fields }).await?;
                self.emit(Severity::Normal, Reason::InstanceCreated, &format!("instance {id} on shard {}", plan.shard));
                Ok(Some(Hold::waiting("Pending", format!("instance {id} was asked for"))))
            }
            Progress::Answered(_) | Progress::Waiting => {
                Ok(Some(Hold::waiting("Asking", format!("asking shard {} for an instance", plan.shard))))
            }
            Progress::Refused(error) => {
                let message = format!("shard {} refused it: {}", plan.shard, error.message);
                Ok(Some(Hold::stalled("Refused", message)))
            }
            Progress::Retrying(error) => Ok(Some(Hold::waiting("Retrying", error.to_string()))),
            Progress::Down(why) => {
                let message = format!("shard {} is not reachable: {why}", plan.shard);
                Ok(Some(Hold::waiting("ShardUnreachable", message)))
            }
            Progress::NotConfigured => Ok(self.why_unknown(false)),
        }
    }

    /// On-demand machines of the same group, by shard.
    fn assigned(&self) -> BTreeMap<String, usize> {
        let group = &self.object.spec.group;
        let others = self.ctx.stores.nstance_machines.filter(|it| it.spec.group == *group && !is_pool_member(it));
        let mut assigned = BTreeMap::new();
        for shard in others.iter().filter_map(|it| it.spec.shard.clone()) {
            *assigned.entry(shard).or_default() += 1;
        }
        assigned
    }

    /// Keeps what is stored, and the provider id once it is known: it never changes by us.
    async fn keep_fields(&self, provider_id: Option<&str>) -> Result<Option<Hold>, KubeError> {
        let spec = &self.object.spec;
        let (Some(shard), Some(request_id)) = (spec.shard.as_deref(), self.object.annotation(annotation::REQUEST_ID))
        else {
            return Ok(None);
        };
        let fields = Fields { shard, request_id, instance_id: spec.instance_id.as_deref(), provider_id };
        self.apply_fields(&fields).await?;
        Ok(None)
    }

    /// Whether they are stored now. If not, the object is newer than what was decided on.
    async fn apply_fields(&self, fields: &Fields<'_>) -> Result<bool, KubeError> {
        let meta = &self.object.metadata;
        let mut body = json!({
            "apiVersion": API_VERSION,
            "kind": "NstanceMachine",
            "metadata": {
                "name": meta.name,
                "namespace": meta.namespace,
                "uid": meta.uid,
                "annotations": {annotation::REQUEST_ID: fields.request_id},
            },
            "spec": {"shard": fields.shard},
        });
        if let Some(id) = fields.instance_id {
            body["spec"]["instanceID"] = json!(id);
        }
        if let Some(provider_id) = fields.provider_id {
            body["spec"]["providerID"] = json!(provider_id);
        }
        // The choice of the shard must not be made twice from an old state of the object.
        if self.object.spec.shard.is_none() && fields.instance_id.is_none() {
            body["metadata"]["resourceVersion"] = json!(meta.resource_version);
        }
        let how = Apply { manager: manager::SPEC, force: false, target: Target::Main };
        match self.ctx.apply(&self.reference, &body, how, Some(&json!(*self.object))).await {
            Ok(Outcome::Unchanged | Outcome::Applied) => Ok(true),
            Ok(Outcome::Conflict) => Ok(false),
            Err(error) if error.is_conflict() || error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The instance is gone by itself: so go its Machine and this object.
    async fn end(&self) -> Result<(), KubeError> {
        match self.machine() {
            Some(machine) => delete_machine(self.ctx, &machine).await,
            None => delete(self.ctx, &self.reference, self.object.metadata.uid.as_deref()).await,
        }
    }

    async fn remove(&self, view: &InstanceView, is_shard_configured: bool) -> Result<Next, KubeError> {
        if !self.object.has_finalizer(finalizer::MACHINE) {
            return Ok(Next::Wait);
        }
        let input = RemovalInput { object: &self.object, view, is_shard_configured, created: None, pool: None };
        let shard = self.object.spec.shard.as_deref().unwrap_or_default();
        let mut next = removal(&input);
        if let Removal::LearnId(wish) = &next {
            let fields = |id| Fields { shard, request_id: &wish.request_id, instance_id: id, provider_id: None };
            let progress = self.ask(shard, CREATE, Wish::CreateInstance(wish.clone()));
            if let Progress::Answered(Answer::Instance { id, .. }) = &progress {
                self.apply_fields(&fields(Some(id))).await?;
                return Ok(Next::Wait);
            }
            next = removal(&RemovalInput { created: Some(&progress), ..input });
        } else {
            self.withdraw(CREATE);
        }
        match next {
            Removal::Drop => self.let_go(view).await,
            Removal::ShardRemoved => {
                let id = self.object.spec.instance_id.as_deref().unwrap_or("of unknown id");
                let message = format!("shard {shard} is not in the operator's config any more; instance {id} stays");
                self.emit(Severity::Warning, Reason::ShardRemoved, &message);
                self.let_go(view).await
            }
            Removal::Delete { id } => {
                let progress = self.ask(shard, DELETE, Wish::DeleteInstance { id: id.clone() });
                let is_absent = matches!(&progress, Progress::Refused(error) if error.code == tonic::Code::NotFound);
                if is_absent {
                    return self.let_go(&InstanceView::Gone).await;
                }
                self.show(view, waiting_for(&id, shard, &progress).as_ref()).await?;
                Ok(Next::After(ASK_AGAIN))
            }
            Removal::LearnId(_) | Removal::Wait => {
                self.show(view, None).await?;
                Ok(Next::After(RESYNC))
            }
        }
    }

    async fn let_go(&self, view: &InstanceView) -> Result<Next, KubeError> {
        for topic in [CREATE, DESCRIBE, DELETE] {
            self.withdraw(topic);
        }
        if view.is_gone() {
            self.show(view, None).await?;
        }
        self.drop_finalizer().await?;
        Ok(Next::Wait)
    }
}

/// Why a delete has no effect yet.
fn waiting_for(id: &str, shard: &str, progress: &Progress) -> Option<Hold> {
    match progress {
        Progress::Answered(_) | Progress::Waiting | Progress::NotConfigured => None,
        Progress::Refused(error) => {
            Some(Hold::stalled("DeleteRefused", format!("shard {shard} refused to delete {id}: {}", error.message)))
        }
        Progress::Retrying(error) => Some(Hold::waiting("Retrying", error.to_string())),
        Progress::Down(why) => {
            let message = format!("shard {shard} is not reachable, {id} cannot be deleted now: {why}");
            Some(Hold::waiting("ShardUnreachable", message))
        }
    }
}
