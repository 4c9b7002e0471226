//! NstanceMachineTemplates: what a machine made from one will offer, for cluster-autoscaler.

use std::{sync::Arc, time::Duration};

use nstance_rt::tasks::Tasks;
use serde_json::json;

use super::{
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceMachineTemplate,
        names::{API_VERSION, manager},
        template::NstanceMachineTemplateStatus,
    },
    cluster::store::ObjectKey,
    decide::{
        capacity::{CapacityInput, capacity},
        observed::Group,
        scope::Scope,
    },
    ports::{Apply, KubeError, ObjectRef, Target, kinds},
};

const RESYNC: Duration = Duration::from_secs(300);

pub fn connect(ctx: &Arc<Context>) {
    let queue = ctx.queues.templates.clone();
    ctx.stores.templates.on_change(move |change| queue.add(change.key.clone()));
    let (queue, store) = (ctx.queues.templates.clone(), ctx.stores.templates.clone());
    ctx.shards.on_change(Box::new(move |change| {
        for template in store.filter(|it| change.reach || change.groups.contains(&it.spec.template.spec.group)) {
            queue.add(ObjectKey::of(&*template));
        }
    }));
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (queue, ctx) = (ctx.queues.templates.clone(), ctx.clone());
    queue::start(tasks, &queue, 1, metrics, move |key| {
        let ctx = ctx.clone();
        async move { reconcile(&ctx, &key).await }
    });
}

pub async fn reconcile(ctx: &Context, key: &ObjectKey) -> Result<Next, KubeError> {
    let reference = ObjectRef::new(kinds::NSTANCE_MACHINE_TEMPLATE, &key.namespace, &key.name);
    let Some(template) = ctx.stores.templates.get(key) else {
        ctx.forget_applied(&reference);
        return Ok(Next::Wait);
    };
    if ctx.scope(&*template) != Scope::Act {
        return Ok(Next::After(RESYNC));
    }
    let groups = groups(ctx, &template);
    if groups.is_empty() {
        // No shard has told: what is published stays.
        return Ok(Next::After(RESYNC));
    }
    let found = capacity(&CapacityInput { groups: &groups, ..CapacityInput::default() });
    let status = NstanceMachineTemplateStatus { capacity: found.capacity, node_info: Some(found.node_info) };
    let body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceMachineTemplate",
        "metadata": {"name": key.name, "namespace": key.namespace, "uid": template.metadata.uid},
        "status": status,
    });
    let how = Apply { manager: manager::STATUS, force: true, target: Target::Status };
    match ctx.apply(&reference, &body, how, Some(&json!(*template))).await {
        Err(error) if error.is_conflict() || error.is_not_found() => {}
        other => _ = other?,
    }
    Ok(Next::After(RESYNC))
}

/// The template's group on each shard that has it. A shard's answer is for the group's own instance type.
fn groups(ctx: &Context, template: &NstanceMachineTemplate) -> Vec<Arc<Group>> {
    let spec = &template.spec.template.spec;
    let is_its_type = |group: &Group| spec.instance_type.as_ref().is_none_or(|it| *it == group.instance_type);
    let views = ctx.shards.views();
    let groups = views.iter().filter_map(|view| view.picture.as_deref()?.groups.get(&spec.group).cloned());
    let known = |group: Arc<Group>| {
        if is_its_type(&group) {
            group
        } else {
            Arc::new(Group { capacity: std::collections::BTreeMap::new(), arch: String::new(), ..(*group).clone() })
        }
    };
    groups.map(known).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::testing::{NAMESPACE, World};

    fn world(instance_type: Option<&str>) -> World {
        let world = World::new(&["a", "b"]);
        for (shard, cpu) in [("a", "4"), ("b", "2000m")] {
            let capacity =
                BTreeMap::from([("cpu".to_owned(), cpu.to_owned()), ("memory".to_owned(), "16384Mi".to_owned())]);
            let group = Group {
                key: "web".to_owned(),
                instance_type: "m7g.large".to_owned(),
                arch: "arm64".to_owned(),
                capacity,
                ..Group::default()
            };
            world.shards.put_group(shard, group);
        }
        let template = json!({
            "apiVersion": API_VERSION, "kind": "NstanceMachineTemplate",
            "metadata": {"name": "t", "namespace": NAMESPACE},
            "spec": {"template": {"spec": {"group": "web", "instanceType": instance_type}}},
        });
        let template: NstanceMachineTemplate = serde_json::from_value(template).unwrap();
        world.kube.put(kinds::NSTANCE_MACHINE_TEMPLATE, &template);
        world
    }

    async fn status(world: &World) -> NstanceMachineTemplateStatus {
        world.feed();
        reconcile(&world.context, &ObjectKey::new(NAMESPACE, "t")).await.unwrap();
        world.feed();
        let template: NstanceMachineTemplate =
            world.kube.read(kinds::NSTANCE_MACHINE_TEMPLATE, NAMESPACE, "t").unwrap();
        template.status.unwrap_or_default()
    }

    #[tokio::test(start_paused = true)]
    async fn a_template_offers_what_every_shard_does() {
        let world = world(None);
        let found = status(&world).await;
        assert_eq!((found.capacity["cpu"].as_str(), found.capacity["memory"].as_str()), ("2", "16Gi"));
        assert_eq!(found.node_info.unwrap().architecture.as_deref(), Some("arm64"));
        world.kube.clear_calls();
        status(&world).await;
        assert_eq!(world.kube.writes(), []);
    }

    #[tokio::test(start_paused = true)]
    async fn a_template_of_another_instance_type_promises_nothing() {
        let found = status(&world(Some("x2.huge"))).await;
        assert!(found.capacity.is_empty());
        assert_eq!(found.node_info.unwrap().operating_system.as_deref(), Some("linux"));
        let found = status(&world(Some("m7g.large"))).await;
        assert_eq!(found.capacity["cpu"], "2");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_published_stays_while_no_shard_tells() {
        let world = world(None);
        status(&world).await;
        world.shards.configure(&["c"]);
        assert_eq!(status(&world).await.capacity["cpu"], "2");
    }
}
