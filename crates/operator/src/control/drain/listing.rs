//! What a drain reads of the workload cluster, never from a cache.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::{
    core::v1::{Node, Pod},
    storage::v1::VolumeAttachment,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Drains, Subject};
use crate::{
    decide::{
        drain::{Listing, is_unreachable},
        pods::{self, Existence, Labels, PodContext, PodPlan},
    },
    ports::{KubePort, ObjectRef, ResourceKind, Selector, kinds},
};

/// Look-ups of one drain that run at a time.
const MAX_LOOKUPS: usize = 10;

fn parsed<K: DeserializeOwned>(values: Vec<Value>) -> Result<Vec<K>, String> {
    values.into_iter().map(|it| serde_json::from_value(it).map_err(|error| error.to_string())).collect()
}

async fn list<K: DeserializeOwned>(
    api: &dyn KubePort,
    kind: ResourceKind,
    selector: &Selector,
) -> Result<Vec<K>, String> {
    parsed(api.list(kind, selector).await.map_err(|error| error.to_string())?)
}

pub(super) async fn nodes(api: &dyn KubePort) -> Result<Vec<Arc<Node>>, String> {
    let nodes: Vec<Node> = list(api, kinds::NODE, &Selector::default()).await?;
    Ok(nodes.into_iter().map(Arc::new).collect())
}

/// All pods of a Node.
pub(in crate::control) async fn pods_of(api: &dyn KubePort, node: &str) -> Result<Vec<Pod>, String> {
    let selector = Selector { fields: Some(format!("spec.nodeName={node}")), ..Selector::default() };
    list(api, kinds::POD, &selector).await
}

/// Which of these DaemonSets exist.
pub(in crate::control) async fn daemon_sets(
    api: &dyn KubePort,
    wanted: BTreeSet<(String, String)>,
) -> BTreeMap<(String, String), Existence> {
    let look_up = |key: (String, String)| async move {
        let existence = match api.get(&ObjectRef::new(kinds::DAEMON_SET, &key.0, &key.1)).await {
            Ok(Some(_)) => Existence::Exists,
            Ok(None) => Existence::Absent,
            Err(error) => Existence::Unknown(error.to_string()),
        };
        (key, existence)
    };
    stream::iter(wanted).map(look_up).buffer_unordered(MAX_LOOKUPS).collect().await
}

async fn namespaces(api: &dyn KubePort) -> Result<BTreeMap<String, Labels>, String> {
    let all = api.list(kinds::NAMESPACE, &Selector::default()).await.map_err(|error| error.to_string())?;
    let labels = |it: &Value| serde_json::from_value(it["metadata"]["labels"].clone()).unwrap_or_default();
    Ok(all.iter().filter_map(|it| Some((it["metadata"]["name"].as_str()?.to_owned(), labels(it)))).collect())
}

/// Volumes that are attached to the Node, by name, those of the given claims aside.
pub(super) async fn volumes(
    api: &dyn KubePort,
    node: &Node,
    skipped: &BTreeSet<(String, String)>,
) -> Listing<Vec<String>> {
    let all = match api.list(kinds::VOLUME_ATTACHMENT, &Selector::default()).await {
        Ok(all) => parsed::<VolumeAttachment>(all),
        // An API server without this kind attaches nothing.
        Err(error) if error.is_not_found() => Ok(Vec::new()),
        Err(error) => Err(error.to_string()),
    };
    let all = match all {
        Ok(all) => all,
        Err(why) => return Listing::Failed(why),
    };
    let is_attached = |it: &VolumeAttachment| {
        Some(&it.spec.node_name) == node.metadata.name.as_ref() && it.status.as_ref().is_some_and(|it| it.attached)
    };
    let mut names = Vec::new();
    for attachment in all.into_iter().filter(is_attached) {
        let volume = attachment.spec.source.persistent_volume_name;
        if let Some(volume) = &volume
            && !skipped.is_empty()
            && claim_of(api, volume).await.is_some_and(|it| skipped.contains(&it))
        {
            continue;
        }
        names.push(volume.or(attachment.metadata.name).unwrap_or_default());
    }
    names.sort();
    Listing::Read(names)
}

/// The claim that a volume is bound to. One that cannot be read counts as unknown: the volume is waited for.
async fn claim_of(api: &dyn KubePort, volume: &str) -> Option<(String, String)> {
    match api.get(&ObjectRef::new(kinds::PERSISTENT_VOLUME, "", volume)).await {
        Ok(volume) => {
            let volume = volume?;
            let claim = &volume["spec"]["claimRef"];
            Some((claim["namespace"].as_str()?.to_owned(), claim["name"].as_str()?.to_owned()))
        }
        Err(error) => {
            tracing::debug!(volume, %error, "claim of an attached volume not read");
            None
        }
    }
}

impl Drains {
    /// The pods of a Node, sorted by what is to be done.
    pub(super) async fn list_pods(&self, api: &dyn KubePort, subject: &Subject, node: &Node) -> Listing<PodPlan> {
        let stores = &self.ctx.stores;
        if !stores.drain_rules.is_synced() {
            return Listing::Failed("the MachineDrainRules are not read yet".to_owned());
        }
        let name = node.metadata.name.as_deref().unwrap_or_default();
        let pods = match pods_of(api, name).await {
            Ok(pods) => pods,
            Err(why) => return Listing::Failed(why),
        };
        let rules = stores
            .drain_rules
            .filter(|it| it.metadata.namespace.as_deref().unwrap_or_default() == self.ctx.settings.namespace);
        let namespaces = if pods::needs_namespaces(&rules) { namespaces(api).await } else { Ok(BTreeMap::new()) };
        let namespaces = match namespaces {
            Ok(namespaces) => namespaces,
            Err(why) => return Listing::Failed(why),
        };
        let machine = subject.machine.as_ref().map(|it| &it.metadata);
        let metadata = machine.or_else(|| subject.nstance_machine.as_ref().map(|it| &it.metadata));
        let cluster = self.ctx.cluster();
        let plan = pods::plan_pods(
            &pods,
            &PodContext {
                rules: &rules,
                machine_labels: &metadata.and_then(|it| it.labels.clone()).unwrap_or_default(),
                cluster_labels: &cluster.and_then(|it| it.metadata.labels.clone()).unwrap_or_default(),
                namespaces: &namespaces,
                daemon_sets: &daemon_sets(api, pods::daemon_sets_of(&pods)).await,
                is_node_unreachable: is_unreachable(node),
                now: self.ctx.now(),
            },
        );
        Listing::Read(plan)
    }
}
