//! NstanceShardGroups: tells each shard what its part of a group is.

use std::{sync::Arc, time::Duration};

use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};

use super::{
    context::Context,
    queue::{self, Next},
};
use crate::{
    api::{
        NstanceShardGroup,
        capi::Meta as _,
        conditions::{self, Status, kind},
        names::{API_VERSION, annotation, finalizer, manager},
    },
    cluster::{
        events::{About, Reason, Severity},
        store::ObjectKey,
    },
    decide::{
        observed::ShardView,
        scope::Scope,
        shard_group::{Removal, StatusInput, must_push, removal, status, wish},
    },
    ports::{Answer, Apply, KubeError, ObjectRef, Progress, Target, Wish, WishKey, kinds},
};

/// How often a reachable shard's group is compared although nothing was told.
const RESYNC: Duration = Duration::from_secs(30);

const PUSH: &str = "group";
const DELETE: &str = "delete-group";

pub fn connect(ctx: &Arc<Context>) {
    let queues = ctx.queues.shard_groups.clone();
    ctx.stores.shard_groups.on_change(move |change| queues.add(change.key.clone()));
    let (queue, store) = (ctx.queues.shard_groups.clone(), ctx.stores.shard_groups.clone());
    ctx.shards.on_change(Box::new(move |change| {
        for answered in &change.answered {
            if answered.object.kind == kinds::NSTANCE_SHARD_GROUP {
                queue.add(ObjectKey::new(&answered.object.namespace, &answered.object.name));
            }
        }
        let is_concerned = |it: &NstanceShardGroup| {
            it.spec.shard == change.shard
                && (change.reach
                    || change.groups.contains(&it.spec.group)
                    || change.instances.iter().any(|instance| instance.group() == Some(&it.spec.group)))
        };
        for object in store.filter(is_concerned) {
            queue.add(ObjectKey::of(&*object));
        }
    }));
}

pub fn start(tasks: &Tasks, ctx: &Arc<Context>, metrics: &Arc<dyn queue::QueueMetrics>) {
    let (n, queue, ctx) = (ctx.settings.concurrent_reconciles, ctx.queues.shard_groups.clone(), ctx.clone());
    queue::start(tasks, &queue, n, metrics, move |key| {
        let ctx = ctx.clone();
        async move { reconcile(&ctx, &key).await }
    });
}

pub async fn reconcile(ctx: &Context, key: &ObjectKey) -> Result<Next, KubeError> {
    let reference = ObjectRef::new(kinds::NSTANCE_SHARD_GROUP, &key.namespace, &key.name);
    let wish_key = |topic| WishKey { object: reference.clone(), topic };
    let Some(object) = ctx.stores.shard_groups.get(key) else {
        for shard in ctx.shards.names() {
            ctx.shards.withdraw(&shard, &wish_key(PUSH));
            ctx.shards.withdraw(&shard, &wish_key(DELETE));
        }
        ctx.forget_applied(&reference);
        return Ok(Next::Wait);
    };
    let about = About { object: reference.clone(), uid: object.metadata.uid.clone().unwrap_or_default() };
    let shard = object.spec.shard.as_str();
    match ctx.scope(&*object) {
        Scope::HandsOff { .. } => return Ok(Next::After(RESYNC)),
        Scope::Paused { by } => {
            ctx.shards.withdraw(shard, &wish_key(PUSH));
            return say_paused(ctx, &object, &reference, by).await;
        }
        Scope::Orphan { what } => {
            ctx.shards.withdraw(shard, &wish_key(PUSH));
            if object.is_terminating() {
                let message = format!("{what} is being removed; the instances on shard {shard} stay");
                ctx.events.emit(&about, Severity::Warning, Reason::GroupOrphaned.as_str(), &message);
                ctx.drop_finalizer(&reference, &object.metadata, finalizer::SHARD_GROUP).await?;
            }
            return Ok(Next::After(RESYNC));
        }
        Scope::Act => {}
    }
    let view = ctx.shards.view(shard);
    if object.is_terminating() {
        ctx.shards.withdraw(shard, &wish_key(PUSH));
        return remove(ctx, &object, &reference, &about, view.as_ref()).await;
    }
    if !ctx.ensure_finalizer(&reference, &object.metadata, finalizer::SHARD_GROUP).await? {
        return Ok(Next::Wait);
    }
    let group = view.as_ref().and_then(|it| it.picture.as_ref()?.groups.get(&object.spec.group).cloned());
    let is_known = view.as_ref().is_some_and(|it| it.picture.is_some());
    let progress = if view.is_some() && is_known && !must_push(&object, group.as_deref()) {
        None
    } else {
        let wish = Wish::UpsertGroup(wish(&object.spec, group.as_deref()));
        Some(ctx.shards.ask(shard, &wish_key(PUSH), wish))
    };
    tell(ctx, &object, &about, group.as_deref().map(|it| it.size), progress.as_ref());
    let input = StatusInput {
        object: &object,
        view: view.as_ref(),
        group: group.as_deref(),
        progress: progress.as_ref(),
        now: ctx.now(),
    };
    apply_status(ctx, &object, &reference, json!(status(&input))).await?;
    Ok(Next::After(RESYNC))
}

/// One event per decision.
fn tell(ctx: &Context, object: &NstanceShardGroup, about: &About, before: Option<i32>, progress: Option<&Progress>) {
    let (group, shard) = (&object.spec.group, &object.spec.shard);
    match progress {
        Some(Progress::Answered(Answer::Group(_))) if before != Some(object.spec.size) => {
            let before = before.map_or_else(|| "new".to_owned(), |it| it.to_string());
            let message = format!("size of group {group} on shard {shard}: {before} -> {}", object.spec.size);
            ctx.events.emit(about, Severity::Normal, Reason::SizePushed.as_str(), &message);
        }
        Some(Progress::Refused(error)) => {
            let message = format!("shard {shard} refused group {group}: {}", error.message);
            ctx.events.emit(about, Severity::Warning, Reason::ConfigInvalid.as_str(), &message);
        }
        _ => {}
    }
}

async fn say_paused(
    ctx: &Context,
    object: &NstanceShardGroup,
    reference: &ObjectRef,
    by: &str,
) -> Result<Next, KubeError> {
    let mut status = object.status.clone().unwrap_or_default();
    let message = format!("paused by {by}");
    conditions::set(
        &mut status.conditions,
        kind::PAUSED,
        Status::True,
        "Paused",
        message,
        object.metadata.generation,
        ctx.now(),
    );
    apply_status(ctx, object, reference, json!(status)).await?;
    Ok(Next::After(RESYNC))
}

async fn apply_status(
    ctx: &Context,
    object: &NstanceShardGroup,
    reference: &ObjectRef,
    status: Value,
) -> Result<(), KubeError> {
    let body = json!({
        "apiVersion": API_VERSION,
        "kind": "NstanceShardGroup",
        "metadata": {"name": reference.name, "namespace": reference.namespace, "uid": object.metadata.uid},
        "status": status,
    });
    let how = Apply { manager: manager::STATUS, force: true, target: Target::Status };
    ctx.apply(reference, &body, how, Some(&json!(object))).await?;
    Ok(())
}

async fn remove(
    ctx: &Context,
    object: &NstanceShardGroup,
    reference: &ObjectRef,
    about: &About,
    view: Option<&ShardView>,
) -> Result<Next, KubeError> {
    if !object.has_finalizer(finalizer::SHARD_GROUP) {
        return Ok(Next::Wait);
    }
    let (group, shard) = (&object.spec.group, object.spec.shard.as_str());
    let key = WishKey { object: reference.clone(), topic: DELETE };
    if object.annotation(annotation::ORPHAN).is_some() {
        ctx.drop_finalizer(reference, &object.metadata, finalizer::SHARD_GROUP).await?;
        return Ok(Next::Wait);
    }
    let progress = view.map(|_| ctx.shards.ask(shard, &key, Wish::DeleteGroup { key: group.clone() }));
    let is_deleted = matches!(progress, Some(Progress::Answered(_)));
    match removal(&object.spec, view, is_deleted) {
        Removal::Done => {
            ctx.drop_finalizer(reference, &object.metadata, finalizer::SHARD_GROUP).await?;
            Ok(Next::Wait)
        }
        Removal::ShardRemoved => {
            let message =
                format!("shard {shard} is not in the operator's config any more; its instances of group {group} stay");
            ctx.events.emit(about, Severity::Warning, Reason::ShardRemoved.as_str(), &message);
            ctx.drop_finalizer(reference, &object.metadata, finalizer::SHARD_GROUP).await?;
            Ok(Next::Wait)
        }
        waits @ (Removal::Delete | Removal::Draining { .. }) => {
            let (reason, message) = match (&waits, &progress) {
                (Removal::Draining { n_instances }, _) => {
                    ("Draining", format!("{n_instances} instances on shard {shard} are draining"))
                }
                (_, Some(Progress::Down(why))) => ("ShardUnreachable", why.clone()),
                (_, Some(Progress::Refused(error) | Progress::Retrying(error))) => ("Refused", error.message.clone()),
                _ => ("Deleting", format!("asking shard {shard} to delete group {group}")),
            };
            let mut status = object.status.clone().unwrap_or_default();
            let (generation, now) = (object.metadata.generation, ctx.now());
            conditions::set(&mut status.conditions, kind::READY, Status::False, reason, message, generation, now);
            apply_status(ctx, object, reference, json!(status)).await?;
            Ok(Next::After(RESYNC))
        }
    }
}
