//! Nodes: labels them with their instance, takes over their provider ids, and removes those whose VM is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::{api::core::v1::Node, jiff::Timestamp};
use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};

use super::{
    context::Context,
    drain::pods_of,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachine,
        capi::Meta as _,
        names::{annotation, label},
    },
    cluster::{
        events::{About, Reason, Severity},
        store::ObjectKey,
    },
    decide::{
        drain::Listing,
        node_match::{instance_label, node_provider_id},
        node_state::{self, CleanUp, Occupant},
        observed::Instance,
        pods,
        scope::{ClusterView, Scope, scope},
    },
    ports::{KubePort, ObjectRef, Propagation, ShardChange, Target, kinds},
};

const RETRY: Duration = Duration::from_secs(1);
/// How often a Node is looked at of which nothing can be told, or that may not be touched.
const IDLE: Duration = Duration::from_secs(30);
const MAX_STEPS: usize = 5;

/// What of a Node matters here. Kubelets write their Nodes often; the rest is no reason to look.
fn gist(node: &Node) -> (Option<&str>, Option<&str>, Option<&str>) {
    (node.label(label::INSTANCE_ID), node.annotation(annotation::NODE_OWNER), node_provider_id(node))
}

/// Puts Nodes into their queue whenever something about them or their instances changes.
pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.nodes.clone();
    ctx.workload.nodes.on_change(move |change| {
        let gists = [change.old, change.new].map(|it| it.map(|it| gist(it)));
        if gists[0] != gists[1] {
            queue.add(change.key.clone());
        }
    });
    let weak = Arc::downgrade(ctx);
    ctx.shards.on_change(Box::new(move |change: &ShardChange| {
        let Some(ctx) = weak.upgrade() else { return };
        let ids: BTreeSet<&str> = change.instances.iter().map(|it| it.id.as_str()).collect();
        if ids.is_empty() && !change.reach {
            return;
        }
        for node in ctx.workload.nodes.all() {
            if change.reach || instance_label(&node).is_none_or(|id| ids.contains(id)) {
                ctx.queues.nodes.add(ObjectKey::of(&*node));
            }
        }
    }));
    let weak = Arc::downgrade(ctx);
    ctx.stores.nstance_machines.on_change(move |change| {
        let spec = |it: Option<&Arc<NstanceMachine>>| it.map(|it| it.spec.clone());
        let (Some(ctx), Some(new)) = (weak.upgrade(), change.new) else { return };
        let Some(id) = new.spec.instance_id.as_deref().filter(|_| spec(change.old) != spec(change.new)) else { return };
        for node in ctx.workload.nodes.filter(|it| instance_label(it) == Some(id)) {
            ctx.queues.nodes.add(ObjectKey::of(&*node));
        }
    });
}

/// Starts the workers.
pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (nodes, n) = (Nodes::new(ctx.clone()), ctx.settings.concurrent_reconciles.max(1));
    queue::start(tasks, &ctx.queues.nodes, n, metrics, move |key: ObjectKey| {
        let nodes = nodes.clone();
        async move { nodes.reconcile(&key).await }
    });
}

pub struct Nodes {
    ctx: Arc<Context>,
    /// Since when the instance of a Node is known to be gone, by the name and uid of the Node.
    gone: Mutex<BTreeMap<(String, String), Timestamp>>,
}

impl Nodes {
    pub fn new(ctx: Arc<Context>) -> Arc<Self> {
        Arc::new(Self { ctx, gone: Mutex::default() })
    }

    fn gone(&self) -> MutexGuard<'_, BTreeMap<(String, String), Timestamp>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn reconcile(&self, key: &ObjectKey) -> Result<Next, Infallible> {
        let Some(api) = self.ctx.workload.api() else { return Ok(Next::After(IDLE)) };
        let Some(node) = self.ctx.workload.nodes.get(key) else {
            self.gone().retain(|(name, _), _| *name != key.name);
            return Ok(Next::Wait);
        };
        let nodes = self.ctx.workload.nodes.all();
        let views = self.ctx.shards.views();
        let shard_of = |id: &str| self.machine_of(id).and_then(|it| it.spec.shard.clone());
        let cluster = self.ctx.settings.cluster_name();
        let occupant = node_state::occupant(&node, &nodes, &views, &cluster, shard_of);
        let place = (key.name.clone(), node.metadata.uid.clone().unwrap_or_default());
        let Occupant::Gone(id) = &occupant else {
            self.gone().remove(&place);
            return Ok(match &occupant {
                Occupant::Live(instance) => self.keep_up(&*api, &node, &nodes, instance).await,
                Occupant::Ambiguous(ids) => {
                    self.tell_ambiguous(&node, ids);
                    Next::After(IDLE)
                }
                Occupant::Unknown(_) | Occupant::Gone(_) => Next::After(IDLE),
                Occupant::Stranger => Next::Wait,
            });
        };
        let machine = self.machine_of(id);
        if !self.may_act(machine.as_deref()) {
            return Ok(Next::After(IDLE));
        }
        let now = self.ctx.now();
        let since = *self.gone().entry(place).or_insert(now);
        Ok(self.remove(&*api, node, since, id, machine.as_deref()).await)
    }

    fn machine_of(&self, id: &str) -> Option<Arc<NstanceMachine>> {
        let machines = &self.ctx.stores.nstance_machines;
        let is_ours = |it: &NstanceMachine| it.spec.instance_id.as_deref() == Some(id);
        let by_name = machines.named(&self.ctx.settings.namespace, id).filter(|it| is_ours(it));
        by_name.or_else(|| machines.filter(is_ours).into_iter().next())
    }

    /// By the NstanceMachine, or if it is gone already, by the Cluster.
    fn may_act(&self, machine: Option<&NstanceMachine>) -> bool {
        if let Some(machine) = machine {
            return self.ctx.scope(machine) == Scope::Act;
        }
        let cluster = self.ctx.cluster();
        let view = match &cluster {
            Some(cluster) => ClusterView::Present(cluster),
            None if self.ctx.stores.clusters.is_synced() => ClusterView::Absent,
            None => ClusterView::Unknown,
        };
        let terminating = self.ctx.terminating.borrow().what.clone();
        scope(&NstanceMachine::default(), view, None, terminating.as_deref()) == Scope::Act
    }

    /// Label, owner and provider id.
    async fn keep_up(&self, api: &dyn KubePort, node: &Node, nodes: &[Arc<Node>], instance: &Instance) -> Next {
        let machine = self.machine_of(&instance.id);
        if !self.may_act(machine.as_deref()) {
            return Next::After(IDLE);
        }
        if let Some(patch) = node_state::label_patch(node, instance, &self.ctx.settings.cluster_name()) {
            // The watch brings the patched Node, and with it the next look.
            return if patch_node(api, node, &patch).await.is_some() { Next::Wait } else { Next::After(RETRY) };
        }
        let Some(machine) = machine else { return Next::Wait };
        let kept = machine.spec.provider_id.as_deref();
        let Some(own) = node_state::provider_id_to_adopt(instance, node, nodes, kept) else { return Next::Wait };
        let name = machine.metadata.name.as_deref().unwrap_or_default();
        let object = ObjectRef::new(kinds::NSTANCE_MACHINE, &self.ctx.settings.namespace, name);
        let version = &machine.metadata.resource_version;
        let patch = json!({"metadata": {"resourceVersion": version}, "spec": {"providerID": own}});
        match self.ctx.kube.merge_patch(&object, &patch, Target::Main).await {
            Ok(_) => {
                tracing::info!(instance = instance.id, provider_id = own, kept, "provider id of the Node taken over");
                Next::Wait
            }
            Err(error) => {
                tracing::debug!(%object, %error, "provider id of the Node not taken over, trying again");
                Next::After(RETRY)
            }
        }
    }

    async fn remove(
        &self,
        api: &dyn KubePort,
        node: Arc<Node>,
        since: Timestamp,
        id: &str,
        machine: Option<&NstanceMachine>,
    ) -> Next {
        let name = node.metadata.name.clone().unwrap_or_default();
        let mut node = node;
        let mut pods = Listing::NotRead;
        for _ in 0..MAX_STEPS {
            match node_state::clean_up(&node, since, self.ctx.now(), &pods) {
                CleanUp::Wait(wait) => return Next::After(wait),
                CleanUp::ListPods => {
                    pods = match pods_of(api, &name).await {
                        Ok(pods) => Listing::Read(pods::n_to_move(&pods)),
                        Err(why) => Listing::Failed(why),
                    }
                }
                CleanUp::Taint(patch) => match patch_node(api, &node, &patch).await {
                    Some(patched) => node = patched,
                    None => return Next::After(RETRY),
                },
                CleanUp::Delete => {
                    let object = ObjectRef::new(kinds::NODE, "", &name);
                    let uid = node.metadata.uid.as_deref();
                    if let Err(error) = api.delete(&object, uid, Propagation::Background).await {
                        tracing::warn!(node = name, %error, "Node of an instance that is gone not deleted");
                        return Next::After(2 * RETRY);
                    }
                    let text = format!("deleted Node {name}: its instance {id} is gone");
                    self.tell(&node, machine, Severity::Normal, Reason::NodeDeleted, &text);
                    return Next::Wait;
                }
            }
        }
        Next::After(RETRY)
    }

    fn tell_ambiguous(&self, node: &Node, ids: &[String]) {
        let text = format!("several instances may run on this Node: {}; it is not labelled", ids.join(", "));
        self.tell(node, None, Severity::Warning, Reason::AmbiguousNode, &text);
    }

    fn tell(&self, node: &Node, machine: Option<&NstanceMachine>, severity: Severity, reason: Reason, text: &str) {
        let (kind, meta) = match machine {
            Some(machine) => (kinds::NSTANCE_MACHINE, &machine.metadata),
            None => (kinds::NODE, &node.metadata),
        };
        let name = meta.name.as_deref().unwrap_or_default();
        let object = ObjectRef::new(kind, meta.namespace.as_deref().unwrap_or_default(), name);
        let about = About { object, uid: meta.uid.clone().unwrap_or_default() };
        self.ctx.events.emit(&about, severity, reason.as_str(), text);
    }
}

/// `None`: it was not patched, and the Node is to be looked at again.
async fn patch_node(api: &dyn KubePort, node: &Node, patch: &Value) -> Option<Arc<Node>> {
    let name = node.metadata.name.as_deref().unwrap_or_default();
    match api.merge_patch(&ObjectRef::new(kinds::NODE, "", name), patch, Target::Main).await {
        Ok(patched) => serde_json::from_value(patched).ok().map(Arc::new),
        Err(error) => {
            tracing::debug!(node = name, %error, "Node not patched, trying again");
            None
        }
    }
}
