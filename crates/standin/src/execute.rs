//! Carries out what was decided. Effects on one object run one after the other, those on different objects side by side;
//! each request has a deadline, and a refused one is left to the next round.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use futures::StreamExt as _;
use kube::{
    Api, Client,
    api::{
        DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy,
        ValidationDirective,
    },
    discovery::Scope,
};
use nstance_rt::chain::Chain;
use serde_json::{Value, json};

use crate::{
    effect::{Effect, Planned, Target, Via},
    kinds::Kind,
    object::Key,
};

/// No answer after this time counts as a failure; kube itself waits for ever.
pub(crate) const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

/// Objects that are written side by side.
const CONCURRENCY: usize = 16;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("no answer within {} s; is the API server overloaded?", REQUEST_DEADLINE.as_secs())]
    Deadline,
    #[error("request refused")]
    Refused(#[source] kube::Error),
}

impl RequestError {
    fn status(&self) -> Option<&kube::core::Status> {
        match self {
            Self::Refused(kube::Error::Api(status)) => Some(status),
            _ => None,
        }
    }

    pub(crate) fn is_not_found(&self) -> bool {
        self.status().is_some_and(kube::core::Status::is_not_found)
    }

    pub(crate) fn is_already_there(&self) -> bool {
        self.status().is_some_and(kube::core::Status::is_already_exists)
    }

    pub(crate) fn is_unauthorized(&self) -> bool {
        self.status().is_some_and(|it| it.code == 401)
    }

    /// Somebody else was faster, which the next picture shows.
    fn is_race(&self) -> bool {
        self.status().is_some_and(|it| it.code == 409 || it.is_conflict() || it.is_not_found())
    }
}

/// Awaits a request for no longer than [`REQUEST_DEADLINE`].
pub(crate) async fn request<T>(
    request: impl Future<Output = Result<T, kube::Error>> + Send,
) -> Result<T, RequestError> {
    match tokio::time::timeout(REQUEST_DEADLINE, request).await {
        Ok(answer) => answer.map_err(RequestError::Refused),
        Err(_) => Err(RequestError::Deadline),
    }
}

/// The objects of `kind` in the namespace of `key`.
pub(crate) fn api(client: &Client, kind: Kind, namespace: &str) -> Api<DynamicObject> {
    match kind.scope() {
        Scope::Cluster => Api::all_with(client.clone(), &kind.resource()),
        Scope::Namespaced => Api::namespaced_with(client.clone(), namespace, &kind.resource()),
    }
}

/// Writes as one field manager.
pub(crate) struct Executor {
    own: Client,
    manager: &'static str,
    /// What was last complained about per object, so that each complaint is logged once.
    complaints: Mutex<BTreeMap<Target, String>>,
}

impl Executor {
    pub(crate) fn new(own: Client, manager: &'static str) -> Self {
        Self { own, manager, complaints: Mutex::default() }
    }

    pub(crate) fn own(&self) -> &Client {
        &self.own
    }

    /// Carries out all effects; `workload` holds the clients of the workload clusters that are connected.
    pub(crate) async fn execute(&self, planned: Vec<Planned>, workload: &BTreeMap<Key, Client>) {
        let mut by_target: BTreeMap<Target, Vec<Effect>> = BTreeMap::new();
        for Planned { target, effect } in planned {
            by_target.entry(target).or_default().push(effect);
        }
        let works = by_target.into_iter().map(|(target, effects)| async move {
            let client = match &target.via {
                Via::Own => &self.own,
                Via::Workload(cluster) => match workload.get(cluster) {
                    Some(client) => client,
                    None => return,
                },
            };
            self.execute_on(client, &target, effects).await;
        });
        futures::stream::iter(works).buffer_unordered(CONCURRENCY).collect::<()>().await;
    }

    async fn execute_on(&self, client: &Client, target: &Target, effects: Vec<Effect>) {
        // The second patch of an object builds on the version that the first one made.
        let mut version = None;
        for effect in effects {
            match self.write(client, target, &effect, version.take()).await {
                Ok(written) => {
                    version = written;
                    self.complaints.lock().unwrap_or_else(PoisonError::into_inner).remove(target);
                }
                Err(error) => {
                    self.complain(target, &effect, &error);
                    return;
                }
            }
        }
    }

    fn complain(&self, target: &Target, effect: &Effect, error: &RequestError) {
        let (kind, object, error_text) = (target.kind.kind(), target.key.to_string(), Chain(error).to_string());
        if error.is_race() {
            tracing::debug!(kind, object, error = error_text, "object changed meanwhile, deciding anew");
            return;
        }
        let mut complaints = self.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        if complaints.get(target) != Some(&error_text) {
            tracing::warn!(kind, object, effect = effect.name(), error = error_text, "write failed, trying again");
            complaints.insert(target.clone(), error_text);
        }
    }

    /// Gives the resource version after a patch.
    async fn write(
        &self,
        client: &Client,
        target: &Target,
        effect: &Effect,
        version: Option<String>,
    ) -> Result<Option<String>, RequestError> {
        let (kind, name) = (target.kind, target.key.name.as_str());
        let api = api(client, kind, &target.key.namespace);
        tracing::debug!(kind = kind.kind(), object = %target.key, effect = effect.name(), "writing");
        let post = PostParams { field_manager: Some(self.manager.to_owned()), ..PostParams::default() };
        let versioned = |patch: &Value, seen: &str| {
            let mut patch = patch.clone();
            let version = version.as_deref().unwrap_or(seen);
            if !version.is_empty() {
                crate::object::put(&mut patch, "/metadata/resourceVersion", version.into());
            }
            Patch::Merge(patch)
        };
        let params = PatchParams {
            field_manager: Some(self.manager.to_owned()),
            // A field that the server does not know is dropped by it; strict mode would refuse the whole write.
            field_validation: Some(ValidationDirective::Ignore),
            ..PatchParams::default()
        };
        let written = match effect {
            Effect::Create { object } => {
                let object: DynamicObject = match serde_json::from_value(object.clone()) {
                    Ok(object) => object,
                    Err(error) => return Err(RequestError::Refused(kube::Error::SerdeError(error))),
                };
                Some(request(api.create(&post, &object)).await?)
            }
            Effect::Patch { patch, resource_version } => {
                Some(request(api.patch(name, &params, &versioned(patch, resource_version))).await?)
            }
            Effect::PatchStatus { patch, resource_version } => {
                Some(request(api.patch_status(name, &params, &versioned(patch, resource_version))).await?)
            }
            Effect::Delete { uid, grace } => {
                let preconditions = Preconditions { uid: Some(uid.clone()), resource_version: None };
                let params = DeleteParams {
                    grace_period_seconds: *grace,
                    propagation_policy: Some(PropagationPolicy::Background),
                    preconditions: Some(preconditions),
                    ..DeleteParams::default()
                };
                request(api.delete(name, &params)).await?;
                None
            }
            Effect::Bind { uid, node } => {
                let binding = json!({
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": { "name": name, "namespace": target.key.namespace, "uid": uid },
                    "target": { "apiVersion": "v1", "kind": "Node", "name": node },
                });
                request(api.create_subresource::<Value, Value>("binding", name, &post, &binding)).await?;
                None
            }
            Effect::FinalizeNamespace { object } => {
                request(api.replace_subresource("finalize", name, &post, object)).await?;
                None
            }
        };
        Ok(written.and_then(|it| it.metadata.resource_version))
    }
}

impl Effect {
    fn name(&self) -> &'static str {
        match self {
            Self::Create { .. } => "create",
            Self::Patch { .. } => "patch",
            Self::PatchStatus { .. } => "patch status",
            Self::Delete { .. } => "delete",
            Self::Bind { .. } => "bind",
            Self::FinalizeNamespace { .. } => "finalize",
        }
    }
}
