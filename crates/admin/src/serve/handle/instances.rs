//! Instances and their drains.

use std::{sync::Arc, time::Duration};

use http::StatusCode;
use nstance_client::{ShardClient, Shards, wire_duration};
use nstance_proto::v1::{
    DeleteInstanceRequest, DrainAckRequest, ExplainRequest, GetInstanceStatusRequest, InstanceStatusResponse,
    ListInstancesRequest, ReplaceInstanceRequest, explain_request::Target,
};
use nstance_rt::entropy::hex;
use serde_json::{Value, json};

use super::{
    super::{
        App, ask,
        recall::asked_at,
        reply::{Content, Reply, Trouble, listed},
        route::Call,
    },
    looked_at, one,
};
use crate::{
    drains::{self, Blocker, Drain},
    view,
};

const PAGE: usize = 200;

/// All shards together, in the order of shards and ids. Where a page ends is told by its last instance, which holds
/// across changes of leaders.
pub(in super::super) async fn list(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, now) = (looked_at(&app, &call)?, app.clock.now());
    let state = call.text("state");
    let request = &ListInstancesRequest {
        group: call.text("group").unwrap_or_default().to_owned(),
        include_deleted: state == Some("deleted"),
        on_demand: call.params.get("on_demand").and_then(Value::as_bool),
        ..ListInstancesRequest::default()
    };
    let answers = shards.each(|mut client| async move {
        let instances = client.instances(request.clone()).await?;
        let wanted = instances.iter().filter(|it| state.is_none_or(|state| it.status == state));
        Ok(wanted.map(|it| view::instance(&client.shard, it)).collect::<Vec<Value>>())
    });
    let mut reply = listed("instances", asked_at(now, answers.await))?;
    let limit = call.params.get("limit").and_then(ask::whole).and_then(|it| usize::try_from(it).ok()).unwrap_or(PAGE);
    if let Content::Json(document) = &mut reply.content {
        page(document, &shards, call.text("cursor"), limit);
    }
    Ok(reply)
}

fn page(document: &mut Value, shards: &Shards, cursor: Option<&str>, limit: usize) {
    let order = |shard: &str| shards.position(shard);
    let place = |it: &Value| {
        let id = it["instance_id"].as_str().unwrap_or_default().to_owned();
        (order(it["shard"].as_str().unwrap_or_default()), id)
    };
    let after = cursor.and_then(|it| it.split_once('.')).map(|(shard, id)| (order(shard), id.to_owned()));
    let mut next = Value::Null;
    if let Some(instances) = document["instances"].as_array_mut() {
        instances.retain(|it| after.as_ref().is_none_or(|after| *after < place(it)));
        instances.sort_by_key(place);
        let more = limit < instances.len();
        instances.truncate(limit);
        if let (true, Some(last)) = (more, instances.last()) {
            let text = |name: &str| last[name].as_str().unwrap_or_default().to_owned();
            next = format!("{}.{}", text("shard"), text("instance_id")).into();
        }
    }
    document["next_cursor"] = next;
}

/// With its timeline.
pub(in super::super) async fn show(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (_, (instance, explained)) = found(&looked_at(&app, &call)?, &call.named("id")).await?;
    let mut document = instance;
    document["timeline"] = explained["history"].clone();
    Ok(Reply::ok(document))
}

/// Why it is as it is.
pub(in super::super) async fn why(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (_, (instance, mut explained)) = found(&looked_at(&app, &call)?, &call.named("id")).await?;
    explained["instance"] = instance;
    Ok(Reply::ok(explained))
}

async fn found(shards: &Shards, id: &str) -> Result<(String, (Value, Value)), Trouble> {
    let ask = |mut client: ShardClient| async move {
        let instance = status(&mut client, id).await?;
        let request = ExplainRequest { target: Some(Target::InstanceId(id.to_owned())) };
        let explained = client.service.explain(request).await?.into_inner();
        Ok((view::instance(&client.shard, &instance), view::explained(&client.shard, &explained)))
    };
    shards.find(&format!("instance {id}"), ask).await.map_err(|errors| Trouble::of_shards(&errors))
}

async fn status(client: &mut ShardClient, id: &str) -> Result<InstanceStatusResponse, tonic::Status> {
    let request = GetInstanceStatusRequest { instance_id: id.to_owned(), max_age: None };
    Ok(client.service.get_instance_status(request).await?.into_inner())
}

pub(in super::super) async fn create(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = one(&app, &call)?;
    // Ours if none was given, so that a repeat inside our own connection makes no second VM.
    let said = call.said("request_id");
    let request_id = if said.is_empty() { hex(app.entropy.as_ref(), 16) } else { said };
    let request = &ask::create(&call, &request_id);
    let answers = shards.each(|mut client| async move {
        let created = client.service.create_instance(request.clone()).await?.into_inner();
        let instance = status(&mut client, &created.instance_id).await?;
        Ok(view::instance(&client.shard, &instance))
    });
    let answers = answers.await;
    match answers.ok.into_iter().next() {
        Some((_, instance)) => {
            Ok(Reply::json(StatusCode::ACCEPTED, json!({"instance": instance, "request_id": request_id})))
        }
        None => Err(Trouble::of_shards(&answers.errors)),
    }
}

/// Asks only the shard that has the instance; the others would say that there is no such one.
async fn at_its_shard<T, F>(
    app: &App,
    call: &Call,
    ask: impl Fn(ShardClient, InstanceStatusResponse) -> F,
) -> Result<(String, T), Trouble>
where
    F: Future<Output = Result<T, tonic::Status>>,
{
    let (shards, id) = (looked_at(app, call)?, call.named("id"));
    let (ask, id) = (&ask, &id);
    let find = |mut client: ShardClient| async move {
        let instance = status(&mut client, id).await?;
        ask(client, instance).await
    };
    shards.find(&format!("instance {id}"), find).await.map_err(|errors| Trouble::of_shards(&errors))
}

pub(in super::super) async fn delete(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shrink, now, dry_run) = (call.flag("shrink"), call.flag("now"), call.flag("dry_run"));
    let (shard, (instance, status)) = at_its_shard(&app, &call, |mut client, instance| async move {
        if dry_run {
            return Ok((instance.clone(), instance.status));
        }
        let request = DeleteInstanceRequest {
            instance_id: instance.instance_id.clone(),
            shrink_group: shrink,
            drain_timeout: now.then(|| wire_duration(Duration::ZERO)),
        };
        let status = client.service.delete_instance(request).await?.into_inner().status;
        Ok((instance, status))
    })
    .await?;
    let effect = match (shrink && !instance.on_demand, now) {
        (true, true) => "deleted at once; its group becomes smaller by one",
        (true, false) => "drained, then deleted; its group becomes smaller by one",
        (false, true) => "deleted at once",
        (false, false) => "drained, then deleted",
    };
    let code = if dry_run { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok(Reply::json(
        code,
        json!({
            "instance_id": instance.instance_id,
            "shard": shard,
            "group": instance.group,
            "status": status,
            "effect": effect,
            "dry_run": dry_run,
        }),
    ))
}

pub(in super::super) async fn replace(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let reason = &call.said("reason");
    let (shard, (id, done)) = at_its_shard(&app, &call, |mut client, instance| async move {
        let request = ReplaceInstanceRequest { instance_id: instance.instance_id, reason: reason.clone() };
        let done = client.service.replace_instance(request.clone()).await?.into_inner();
        Ok((request.instance_id, done))
    })
    .await?;
    let replacement = if done.replacement_id.is_empty() { Value::Null } else { done.replacement_id.into() };
    let document = json!({"instance_id": id, "shard": shard, "status": done.status, "replacement_id": replacement});
    Ok(Reply::json(StatusCode::ACCEPTED, document))
}

pub(in super::super) async fn ack(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let drain_id = &call.said("drain_id");
    let (shard, id) = at_its_shard(&app, &call, |mut client, instance| async move {
        let request = DrainAckRequest { instance_id: instance.instance_id, drain_id: drain_id.clone() };
        client.service.acknowledge_drained(request.clone()).await?;
        Ok(request.instance_id)
    })
    .await?;
    Ok(Reply::ok(json!({"instance_id": id, "shard": shard, "acknowledged": true})))
}

pub(in super::super) async fn drains(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, now) = (looked_at(&app, &call)?, app.clock.now());
    let answers = shards.each(|mut client| async move {
        let drains = drains::of_shard(&mut client).await?;
        let shown = drains.iter().map(|Drain { instance: it, blocked_by }| {
            let mut value = it.drain.as_ref().map(view::drain).unwrap_or_else(|| json!({}));
            value["instance_id"] = it.instance_id.clone().into();
            value["shard"] = client.shard.clone().into();
            value["group"] = it.group.clone().into();
            value["status"] = it.status.clone().into();
            value["blocked_by"] = blocked_by.iter().map(Blocker::document).collect();
            value
        });
        Ok(shown.collect::<Vec<Value>>())
    });
    listed("drains", asked_at(now, answers.await))
}
