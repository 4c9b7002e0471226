//! Groups.

use std::sync::Arc;

use http::StatusCode;
use nstance_client::{Answers, ShardClient, Shards};
use nstance_proto::v1::{
    DeleteGroupRequest, ExplainRequest, GroupStatus, PlanRequest, UpsertGroupRequest, explain_request::Target,
};
use serde_json::{Value, json};
use tonic::Code;

use super::{
    super::{
        App, ask,
        recall::{self, asked_at},
        reply::{Done, Reply, Trouble, gather, listed, of_those_that_have_it, problem},
        route::Call,
    },
    chosen, looked_at,
};
use crate::{
    rehearse::{Names, check_etag, check_new},
    view,
};

pub(in super::super) async fn list(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = looked_at(&app, &call)?;
    let answers = recall::groups(&app, &shards).await;
    listed("groups", recall::shown(&answers, |shard, groups| groups.iter().map(|it| view::group(shard, it)).collect()))
}

pub(in super::super) async fn show(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, key) = (looked_at(&app, &call)?, &call.named("group"));
    let answers = of_those_that_have_it(recall::group(&app, &shards, key).await);
    listed("groups", recall::shown(&answers, |shard, group| vec![view::group(shard, group)]))
}

pub(in super::super) async fn explain(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, key, now) = (looked_at(&app, &call)?, &call.named("group"), app.clock.now());
    let answers = shards.each(|mut client| async move {
        let request = ExplainRequest { target: Some(Target::Group(key.clone())) };
        let explained = client.service.explain(request).await?.into_inner();
        Ok(vec![view::explained(&client.shard, &explained)])
    });
    listed("explanations", asked_at(now, of_those_that_have_it(answers.await)))
}

pub(in super::super) async fn put(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, key) = (chosen(&app, &call)?, call.named("group"));
    let etag = expected_etag(&shards, &call)?;
    let request = ask::upsert(&key, &call, &etag);
    if call.flag("dry_run") {
        return gather("groups", rehearse(&shards, &request).await);
    }
    let request = &request;
    let answers = shards.each(|mut client| async move {
        let existed = has(&mut client, &request.key).await?;
        let group = client.service.upsert_group(request.clone()).await?.into_inner();
        let status = if existed { StatusCode::OK } else { StatusCode::CREATED };
        Ok(Done::new(status, view::group(&client.shard, &group)))
    });
    gather("groups", answers.await)
}

pub(in super::super) async fn delete(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let (shards, key) = (chosen(&app, &call)?, call.named("group"));
    let etag = expected_etag(&shards, &call)?;
    if call.flag("dry_run") {
        let etag = &etag;
        let answers = shards.each(|mut client| {
            let key = key.clone();
            async move {
                let group = client.group(&key).await?;
                check_etag(&key, Some(&group), etag)?;
                Ok(Done::new(StatusCode::OK, deletion(&client.shard, &group)))
            }
        });
        return gather("groups", of_those_that_have_it(answers.await));
    }
    let request = &DeleteGroupRequest { key, expected_etag: etag };
    let answers = shards.each(|mut client| async move {
        // The service takes the deletion of what is not there as done; whoever mistyped a name wants to know.
        let group = client.group(&request.key).await?;
        client.service.delete_group(request.clone()).await?;
        Ok(Done::new(StatusCode::ACCEPTED, deletion(&client.shard, &group)))
    });
    gather("groups", of_those_that_have_it(answers.await))
}

/// What becomes of a group that is deleted.
fn deletion(shard: &str, group: &GroupStatus) -> Value {
    let effect = if group.is_static { "overrides dropped" } else { "instances drained" };
    json!({"shard": shard, "group": group.key, "is_static": group.is_static, "effect": effect, "actual_size": group.actual_size})
}

pub(in super::super) async fn scale(app: Arc<App>, call: Call) -> Result<Reply, Trouble> {
    let shards = chosen(&app, &call)?;
    let (key, size, victims) = (call.said("group"), ask::scaled_size(&call), ask::victims(&call));
    let sizes = if call.is("total") { parted(&shards, &key, size, &victims).await? } else { vec![size; shards.len()] };
    let by_shard: Vec<(String, i32)> = shards.names().map(str::to_owned).zip(sizes).collect();
    let (by_shard, key, victims) = (&by_shard, &key, &victims);
    let answers = shards.each(|mut client| async move {
        let size = by_shard.iter().find(|(shard, _)| *shard == client.shard).map_or(size, |(_, size)| *size);
        // A size alone makes no group.
        client.group(key).await?;
        let group = client.service.upsert_group(ask::scale(key, size, victims)).await?.into_inner();
        Ok(Done::new(StatusCode::OK, json!({"shard": client.shard, "group": group.key, "size": group.size})))
    });
    gather("results", answers.await)
}

/// Sizes of the chosen shards that make the total. All must be known: a guess would move instances.
async fn parted(shards: &Shards, key: &str, total: i32, victims: &[String]) -> Result<Vec<i32>, Trouble> {
    let answers = shards.each(|mut client| {
        let key = key.to_owned();
        async move {
            let group = client.group(&key).await?;
            let mut n_hints = 0;
            if !victims.is_empty() {
                let request = nstance_proto::v1::ListInstancesRequest { group: key, ..Default::default() };
                let instances = client.instances(request).await?;
                n_hints = instances.iter().filter(|it| victims.contains(&it.instance_id)).count();
            }
            Ok((group.size, n_hints))
        }
    });
    let answers = answers.await;
    if !answers.errors.is_empty() {
        return Err(Trouble::of_shards(&answers.errors));
    }
    let (sizes, hints): (Vec<i32>, Vec<usize>) = answers.ok.into_iter().map(|(_, it)| it).unzip();
    Ok(ask::distribute(total, sizes, hints))
}

/// What the planner would do at another size. Nothing is sent that has an effect.
async fn rehearse(shards: &Shards, request: &UpsertGroupRequest) -> Answers<Done> {
    let config = request.config.clone().unwrap_or_default();
    let (key, config) = (request.key.as_str(), &config);
    shards
        .each(|mut client| async move {
            Names { group: key, template: &config.template, subnet_pool: &config.subnet_pool }.check()?;
            let found = client.groups().await?.into_iter().find(|it| it.key == key);
            check_etag(key, found.as_ref(), &request.expected_etag)?;
            let exists = found.is_some();
            let mut document = json!({"shard": client.shard, "group": key, "exists": exists, "plan": null});
            if exists {
                let sizes = config.size.map(|size| (key.to_owned(), size)).into_iter().collect();
                let request = PlanRequest { group: key.to_owned(), sizes, candidate_config: Vec::new() };
                let plan = client.service.plan(request).await?.into_inner();
                document["plan"] = view::plan(&client.shard, &plan);
            } else {
                check_new(&config.template)?;
            }
            Ok(Done::new(StatusCode::OK, document))
        })
        .await
}

async fn has(client: &mut ShardClient, key: &str) -> Result<bool, tonic::Status> {
    match client.group(key).await {
        Ok(_) => Ok(true),
        Err(status) if status.code() == Code::NotFound => Ok(false),
        Err(status) => Err(status),
    }
}

/// Etags are a shard's own: one cannot be held against several.
fn expected_etag(shards: &Shards, call: &Call) -> Result<String, Trouble> {
    let Some(text) = call.text("If-Match") else { return Ok(String::new()) };
    if 1 < shards.len() {
        let message = "an etag is one shard's: say one shard, or leave it out";
        return Err(Trouble::bad_request(vec![problem("If-Match", message)]));
    }
    Ok(text.trim_start_matches("W/").trim_matches('"').to_owned())
}
